// The part of the CUDA driver API (libcuda.so.1) that kvpush calls. Declared here: no CUDA header is needed
// to build it, and no GPU to load it. Source: cuda.h of CUDA 12.0 to 13.0; the names carry the ABI's version
// suffix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "base/status.hpp"

namespace kvpush {

using CudaCode = int;
inline constexpr CudaCode kCudaOk = 0;
inline constexpr CudaCode kCudaInvalidValue = 1;
inline constexpr CudaCode kCudaOutOfMemory = 2;
inline constexpr CudaCode kCudaNoBinaryForGpu = 209;
inline constexpr CudaCode kCudaNotReady = 600;

using CudaDeviceIndex = int;
using CudaPointer = std::uint64_t;
struct CudaContextObject;
struct CudaModuleObject;
struct CudaFunctionObject;
struct CudaStreamObject;
struct CudaEventObject;
using CudaContext = CudaContextObject*;
using CudaModule = CudaModuleObject*;
using CudaFunction = CudaFunctionObject*;
using CudaStream = CudaStreamObject*;
using CudaEvent = CudaEventObject*;

/// Names memory of another process of this host. Passed by value: the size is the ABI's.
struct CudaIpcHandle {
  unsigned char bytes[64];
};
struct CudaUuid {
  unsigned char bytes[16];
};

inline constexpr unsigned kCudaStreamNonBlocking = 1;
inline constexpr unsigned kCudaEventDisableTiming = 2;
inline constexpr int kCudaCaptureModeRelaxed = 2;
inline constexpr unsigned kCudaHostPortable = 1;   ///< of cuMemHostAlloc and cuMemHostRegister
inline constexpr unsigned kCudaHostDeviceMap = 2;  ///< the same
inline constexpr unsigned kCudaIpcLazyPeerAccess = 1;
inline constexpr int kCudaAttributeNumSms = 16;
inline constexpr int kCudaAttributePciBus = 33;
inline constexpr int kCudaAttributePciDevice = 34;
inline constexpr int kCudaAttributePciDomain = 50;
inline constexpr int kCudaAttributeComputeMajor = 75;
inline constexpr int kCudaAttributeComputeMinor = 76;
inline constexpr int kCudaAttributeGpuDirectFlushOptions = 117;
inline constexpr unsigned kCudaFlushFromHost = 1;  ///< a bit of it: cuFlushGPUDirectRDMAWrites works
inline constexpr int kCudaAttributeGpuDirectWritesOrdering = 118;
inline constexpr int kCudaWritesOrderedForOwner = 100;  ///< or more: its own kernels need no flush
inline constexpr int kCudaPointerMemoryType = 2;
inline constexpr unsigned kCudaMemoryTypeDevice = 2;
inline constexpr int kCudaPointerDeviceOrdinal = 9;
inline constexpr int kCudaPointerRangeStart = 11;  ///< of the allocation
inline constexpr int kCudaPointerRangeSize = 12;   ///< a size_t
inline constexpr int kCudaFlushTargetCurrentContext = 0;
inline constexpr int kCudaFlushToOwner = 100;

// symbol, member, type.
#define KVPUSH_CUDA_FUNCTIONS(X)                                                                             \
  X(cuInit, init, CudaCode(unsigned))                                                                        \
  X(cuDriverGetVersion, driver_get_version, CudaCode(int*))                                                  \
  X(cuGetErrorName, get_error_name, CudaCode(CudaCode, const char**))                                        \
  X(cuGetErrorString, get_error_string, CudaCode(CudaCode, const char**))                                    \
  X(cuDeviceGetCount, device_get_count, CudaCode(int*))                                                      \
  X(cuDeviceGetName, device_get_name, CudaCode(char*, int, CudaDeviceIndex))                                 \
  X(cuDeviceGetUuid_v2, device_get_uuid, CudaCode(CudaUuid*, CudaDeviceIndex))                               \
  X(cuDeviceGetAttribute, device_get_attribute, CudaCode(int*, int, CudaDeviceIndex))                        \
  X(cuDevicePrimaryCtxRetain, primary_context_retain, CudaCode(CudaContext*, CudaDeviceIndex))               \
  X(cuDevicePrimaryCtxRelease_v2, primary_context_release, CudaCode(CudaDeviceIndex))                        \
  X(cuCtxPushCurrent_v2, context_push, CudaCode(CudaContext))                                                \
  X(cuCtxPopCurrent_v2, context_pop, CudaCode(CudaContext*))                                                 \
  X(cuCtxGetStreamPriorityRange, stream_priority_range, CudaCode(int*, int*))                                \
  X(cuThreadExchangeStreamCaptureMode, exchange_capture_mode, CudaCode(int*))                                \
  X(cuFlushGPUDirectRDMAWrites, flush_gpu_direct_writes, CudaCode(int, int))                                 \
  X(cuPointerGetAttribute, pointer_get_attribute, CudaCode(void*, int, CudaPointer))                         \
  X(cuMemAlloc_v2, mem_alloc, CudaCode(CudaPointer*, std::size_t))                                           \
  X(cuMemFree_v2, mem_free, CudaCode(CudaPointer))                                                           \
  X(cuMemHostAlloc, mem_host_alloc, CudaCode(void**, std::size_t, unsigned))                                 \
  X(cuMemFreeHost, mem_free_host, CudaCode(void*))                                                           \
  X(cuMemHostRegister_v2, mem_host_register, CudaCode(void*, std::size_t, unsigned))                         \
  X(cuMemHostUnregister, mem_host_unregister, CudaCode(void*))                                               \
  X(cuMemHostGetDevicePointer_v2, mem_host_get_device_pointer, CudaCode(CudaPointer*, void*, unsigned))      \
  X(cuMemcpyAsync, memcpy_async, CudaCode(CudaPointer, CudaPointer, std::size_t, CudaStream))                \
  X(cuMemsetD8Async, memset_async, CudaCode(CudaPointer, unsigned char, std::size_t, CudaStream))            \
  X(cuIpcGetMemHandle, ipc_get_mem_handle, CudaCode(CudaIpcHandle*, CudaPointer))                            \
  X(cuIpcOpenMemHandle_v2, ipc_open_mem_handle, CudaCode(CudaPointer*, CudaIpcHandle, unsigned))             \
  X(cuIpcCloseMemHandle, ipc_close_mem_handle, CudaCode(CudaPointer))                                        \
  X(cuStreamCreateWithPriority, stream_create, CudaCode(CudaStream*, unsigned, int))                         \
  X(cuStreamDestroy_v2, stream_destroy, CudaCode(CudaStream))                                                \
  X(cuStreamQuery, stream_query, CudaCode(CudaStream))                                                       \
  X(cuStreamSynchronize, stream_synchronize, CudaCode(CudaStream))                                           \
  X(cuStreamWaitEvent, stream_wait_event, CudaCode(CudaStream, CudaEvent, unsigned))                         \
  X(cuEventCreate, event_create, CudaCode(CudaEvent*, unsigned))                                             \
  X(cuEventRecord, event_record, CudaCode(CudaEvent, CudaStream))                                            \
  X(cuEventQuery, event_query, CudaCode(CudaEvent))                                                          \
  X(cuEventDestroy_v2, event_destroy, CudaCode(CudaEvent))                                                   \
  X(cuModuleLoadData, module_load_data, CudaCode(CudaModule*, const void*))                                  \
  X(cuModuleUnload, module_unload, CudaCode(CudaModule))                                                     \
  X(cuModuleGetFunction, module_get_function, CudaCode(CudaFunction*, CudaModule, const char*))              \
  X(cuLaunchKernel, launch_kernel,                                                                           \
    CudaCode(CudaFunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CudaStream, \
             void**, void**))

/// The functions above as members, e.g. `driver.mem_alloc(...)`. Immutable once loaded.
struct CudaDriver {
#define KVPUSH_CUDA_MEMBER(symbol, name, type) std::add_pointer_t<type> name = nullptr;
  KVPUSH_CUDA_FUNCTIONS(KVPUSH_CUDA_MEMBER)
#undef KVPUSH_CUDA_MEMBER

  /// OK, or Exhausted (out of memory) or Transport, with `call`, the code's name and the driver's text.
  [[nodiscard]] Status check(CudaCode code, const char* call) const;
};

/// Whether the context is of no use any more after `code`: none of its work runs, and each later call fails.
/// After any other code its work goes on.
[[nodiscard]] bool ends_context(CudaCode code);

/// Loads the driver at `path`, by default libcuda.so.1 as the loader finds it, for the rest of the process,
/// and initialises it. Errors:  Unsupported (no driver, a function is missing, or it does not initialise: no
/// GPU), with the reason. Threads: any.
Result<std::shared_ptr<const CudaDriver>> load_cuda_driver(const std::string& path = "libcuda.so.1");

}  // namespace kvpush
