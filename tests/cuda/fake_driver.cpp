// A CUDA driver without a GPU: every function that kvpush calls, kernels played on the CPU. Work runs when
// somebody asks for it: a query moves every stream on by one step at most, so that work is seen under way.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "fake_state.hpp"

using namespace kvpush;
using namespace kvpush::fake;

namespace {

int from_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr || *text == '\0' ? otherwise : std::atoi(text);
}

int num_devices() {
  return std::clamp(from_environment("FAKE_CUDA_DEVICES", 1), 0, kMaxDevices);
}

bool is_device(CudaDeviceIndex device) {
  return device >= 0 && device < num_devices();
}

struct ErrorText {
  CudaCode code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {kCudaOk, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kCudaOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kDeinitialized, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kCudaNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kCudaNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {kHostMemoryAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
};

const ErrorText* find_error(CudaCode code) {
  const auto* const found = std::find_if(std::begin(kErrors), std::end(kErrors),
                                         [code](const ErrorText& e) { return e.code == code; });
  return found == std::end(kErrors) ? nullptr : found;
}

bool event_exists(CudaEvent event) {
  return state().events.contains(event);
}

int compute() {
  const auto& set = state().attributes;
  const int from_env = from_environment("FAKE_CUDA_COMPUTE", 90);
  const auto major = set.find(kCudaAttributeComputeMajor);
  const auto minor = set.find(kCudaAttributeComputeMinor);
  return 10 * (major != set.end() ? major->second : from_env / 10) +
         (minor != set.end() ? minor->second : from_env % 10);
}

const CudaFunctionObject* find_function(CudaFunction function) {
  for (const auto& [module, owner] : state().modules) {
    for (const auto& [name, one] : owner->functions) {
      if (&one == function) return &one;
    }
  }
  return nullptr;
}

}  // namespace

FAKE_CUDA_EXPORT CudaCode cuInit(unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuInit, kNothing);
  if (num_devices() == 0) return kNoDevice;
  state().initialized = true;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDriverGetVersion(int* version) {
  FAKE_CUDA_ENTER(cuDriverGetVersion, kNothing);
  *version = 12080;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuGetErrorName(CudaCode code, const char** name) {
  FAKE_CUDA_ENTER(cuGetErrorName, kNothing);
  const ErrorText* const error = find_error(code);
  *name = error != nullptr ? error->name : nullptr;
  return error != nullptr ? kCudaOk : kInvalidValue;
}

FAKE_CUDA_EXPORT CudaCode cuGetErrorString(CudaCode code, const char** text) {
  FAKE_CUDA_ENTER(cuGetErrorString, kNothing);
  const ErrorText* const error = find_error(code);
  *text = error != nullptr ? error->text : nullptr;
  return error != nullptr ? kCudaOk : kInvalidValue;
}

FAKE_CUDA_EXPORT CudaCode cuDeviceGetCount(int* count) {
  FAKE_CUDA_ENTER(cuDeviceGetCount, kDriver);
  *count = num_devices();
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDeviceGetName(char* name, int size, CudaDeviceIndex device) {
  FAKE_CUDA_ENTER(cuDeviceGetName, kDriver);
  if (!is_device(device)) return kInvalidDevice;
  std::strncpy(name, "Fake GPU", static_cast<std::size_t>(size));
  name[size - 1] = '\0';
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDeviceGetUuid_v2(CudaUuid* uuid, CudaDeviceIndex device) {
  FAKE_CUDA_ENTER(cuDeviceGetUuid_v2, kDriver);
  if (!is_device(device)) return kInvalidDevice;
  const char* const text = std::getenv("FAKE_CUDA_UUID");
  *uuid = {{0xfa, 0xce}};
  if (text != nullptr && std::strlen(text) == 32) {
    for (std::size_t i = 0; i < 16; ++i) {
      uuid->bytes[i] = static_cast<unsigned char>(std::stoi(std::string(text + 2 * i, 2), nullptr, 16));
    }
  }
  uuid->bytes[15] = static_cast<unsigned char>(uuid->bytes[15] + device);
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDeviceGetAttribute(int* value, int attribute, CudaDeviceIndex device) {
  FAKE_CUDA_ENTER(cuDeviceGetAttribute, kDriver);
  if (!is_device(device)) return kInvalidDevice;
  if (const auto set = state().attributes.find(attribute); set != state().attributes.end()) {
    *value = set->second;
    return kCudaOk;
  }
  switch (attribute) {
    case kCudaAttributeNumSms: *value = 132; break;
    case kCudaAttributeComputeMajor: *value = compute() / 10; break;
    case kCudaAttributeComputeMinor: *value = compute() % 10; break;
    case kCudaAttributeGpuDirectWritesOrdering: *value = kCudaWritesOrderedForOwner; break;
    case kCudaAttributeGpuDirectFlushOptions: *value = int{kCudaFlushFromHost}; break;
    default: return kInvalidValue;
  }
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDevicePrimaryCtxRetain(CudaContext* context, CudaDeviceIndex device) {
  FAKE_CUDA_ENTER(cuDevicePrimaryCtxRetain, kDriver);
  if (!is_device(device)) return kInvalidDevice;
  *context = &state().contexts[static_cast<std::size_t>(device)];
  ++(*context)->references;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuDevicePrimaryCtxRelease_v2(CudaDeviceIndex device) {
  FAKE_CUDA_ENTER_RELEASE(cuDevicePrimaryCtxRelease_v2, kDriver);
  if (!is_device(device)) return kInvalidDevice;
  CudaContextObject& context = state().contexts[static_cast<std::size_t>(device)];
  if (context.references == 0) return kInvalidContext;
  --context.references;
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuCtxPushCurrent_v2(CudaContext context) {
  FAKE_CUDA_ENTER(cuCtxPushCurrent_v2, kDriver);
  if (context == nullptr) return kInvalidContext;
  if (context->references == 0) return kContextIsDestroyed;
  context_stack().push_back(context);
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuCtxPopCurrent_v2(CudaContext* context) {
  FAKE_CUDA_ENTER_RELEASE(cuCtxPopCurrent_v2, kDriver);
  if (context_stack().empty()) return kInvalidContext;
  if (context != nullptr) *context = context_stack().back();
  context_stack().pop_back();
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  FAKE_CUDA_ENTER(cuCtxGetStreamPriorityRange, kContext);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuThreadExchangeStreamCaptureMode(int* mode) {
  FAKE_CUDA_ENTER(cuThreadExchangeStreamCaptureMode, kDriver);
  thread_local int current = 0;
  if (*mode < 0 || *mode > kCudaCaptureModeRelaxed) return kInvalidValue;
  std::swap(current, *mode);
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuFlushGPUDirectRDMAWrites(int target, int scope) {
  FAKE_CUDA_ENTER(cuFlushGPUDirectRDMAWrites, kContext);
  return target == kCudaFlushTargetCurrentContext && scope >= kCudaFlushToOwner ? kCudaOk : kInvalidValue;
}

FAKE_CUDA_EXPORT CudaCode cuStreamCreateWithPriority(CudaStream* stream, unsigned /*flags*/,
                                                     int /*priority*/) {
  FAKE_CUDA_ENTER(cuStreamCreateWithPriority, kContext);
  *stream = state().streams.emplace_back(std::make_unique<CudaStreamObject>()).get();
  (*stream)->context = current_context();
  return kCudaOk;
}

// What a stream still has to do is done.
FAKE_CUDA_EXPORT CudaCode cuStreamDestroy_v2(CudaStream stream) {
  FAKE_CUDA_ENTER_RELEASE(cuStreamDestroy_v2, kContext);
  auto& streams = state().streams;
  const auto found =
      std::find_if(streams.begin(), streams.end(), [stream](const auto& one) { return one.get() == stream; });
  if (found == streams.end()) return kInvalidHandle;
  if (!stream->ops.empty()) state().destroyed.push_back(std::move(*found));
  streams.erase(found);
  return call.code;
}

FAKE_CUDA_EXPORT CudaCode cuStreamQuery(CudaStream stream) {
  FAKE_CUDA_ENTER(cuStreamQuery, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr) return kInvalidHandle;
  advance();
  return queue->ops.empty() ? kCudaOk : kCudaNotReady;
}

FAKE_CUDA_EXPORT CudaCode cuStreamSynchronize(CudaStream stream) {
  FAKE_CUDA_ENTER_RELEASE(cuStreamSynchronize, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr) return kInvalidHandle;
  advance(true);
  if (call.code != kCudaOk) return call.code;
  if (!queue->ops.empty()) die("cuStreamSynchronize waits for work that nobody ends");
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuStreamWaitEvent(CudaStream stream, CudaEvent event, unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuStreamWaitEvent, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr || !event_exists(event)) return kInvalidHandle;
  const Marker marker = event->latest;
  if (marker != nullptr) queue->ops.emplace_back([marker] { return *marker; });
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuEventCreate(CudaEvent* event, unsigned /*flags*/) {
  FAKE_CUDA_ENTER(cuEventCreate, kContext);
  auto made = std::make_unique<CudaEventObject>();
  made->context = current_context();
  *event = made.get();
  state().events[*event] = std::move(made);
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuEventRecord(CudaEvent event, CudaStream stream) {
  FAKE_CUDA_ENTER(cuEventRecord, kContext);
  CudaStreamObject* const queue = find_stream(stream);
  if (queue == nullptr || !event_exists(event) || event->context != queue->context) return kInvalidHandle;
  const auto marker = std::make_shared<bool>(false);
  event->latest = marker;
  queue->ops.emplace_back([marker] { return *marker = true; });
  return kCudaOk;
}

// Needs no current context, as the real one.
FAKE_CUDA_EXPORT CudaCode cuEventQuery(CudaEvent event) {
  FAKE_CUDA_ENTER(cuEventQuery, kDevice);
  if (!event_exists(event)) return kInvalidHandle;
  advance();
  return event->latest == nullptr || *event->latest ? kCudaOk : kCudaNotReady;
}

FAKE_CUDA_EXPORT CudaCode cuEventDestroy_v2(CudaEvent event) {
  FAKE_CUDA_ENTER_RELEASE(cuEventDestroy_v2, kContext);
  return state().events.erase(event) == 1 ? call.code : kInvalidHandle;
}

// An image is a fatbin, or, where a test has none, text that begins with "fake".
FAKE_CUDA_EXPORT CudaCode cuModuleLoadData(CudaModule* module, const void* image) {
  FAKE_CUDA_ENTER(cuModuleLoadData, kContext);
  constexpr unsigned char kFatbin[4] = {0x50, 0xed, 0x55, 0xba};
  if (image == nullptr) return kInvalidValue;
  if (std::memcmp(image, kFatbin, 4) != 0 && std::memcmp(image, "fake", 4) != 0) return kInvalidImage;
  auto made = std::make_unique<CudaModuleObject>();
  const auto add = [&made](const char* name, bool packing, bool bulk) {
    made->functions[name] = {name, packing, bulk};
  };
  add(kPackKernel, true, false);
  add(kUnpackKernel, false, false);
  if (compute() >= 90) {
    add(kPackBulkKernel, true, true);
    add(kUnpackBulkKernel, false, true);
  }
  *module = made.get();
  state().modules[*module] = std::move(made);
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuModuleUnload(CudaModule module) {
  FAKE_CUDA_ENTER_RELEASE(cuModuleUnload, kContext);
  return state().modules.erase(module) == 1 ? call.code : kInvalidHandle;
}

FAKE_CUDA_EXPORT CudaCode cuModuleGetFunction(CudaFunction* function, CudaModule module, const char* name) {
  FAKE_CUDA_ENTER(cuModuleGetFunction, kContext);
  if (!state().modules.contains(module)) return kInvalidHandle;
  const auto found = module->functions.find(name);
  if (found == module->functions.end()) return kNotFound;
  *function = &found->second;
  return kCudaOk;
}

FAKE_CUDA_EXPORT CudaCode cuLaunchKernel(CudaFunction function, unsigned grid_x, unsigned grid_y,
                                         unsigned grid_z, unsigned block_x, unsigned block_y,
                                         unsigned block_z, unsigned /*shared_bytes*/, CudaStream stream,
                                         void** parameters, void** /*extra*/) {
  FAKE_CUDA_ENTER(cuLaunchKernel, kContext);
  const CudaFunctionObject* const kernel = find_function(function);
  CudaStreamObject* const queue = find_stream(stream);
  if (kernel == nullptr || queue == nullptr || queue->context != current_context()) return kInvalidHandle;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 || block_y != 1 ||
      block_z != 1 || parameters == nullptr) {
    return kInvalidValue;
  }
  ++state().counts[kernel->name];
  state().counts["blocks"] += grid_x;
  const CudaFunctionObject copied = *kernel;
  const CopyArgs args = *static_cast<const CopyArgs*>(parameters[0]);
  queue->ops.emplace_back([copied, args, grid_x, block_x] {
    run_copy(copied, args, grid_x, block_x);
    return true;
  });
  return kCudaOk;
}
