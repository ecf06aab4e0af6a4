#include "shim/cuda_device.hpp"

#include <cstdio>

namespace kvpush {
namespace {

std::string hex(const CudaUuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : uuid.bytes) {
    text += kDigits[byte >> 4U];
    text += kDigits[byte & 15U];
  }
  return text;
}

std::string pci_of(const CudaDriver& cuda, int index) {
  int domain = 0;
  int bus = 0;
  int device = 0;
  const bool told = cuda.device_get_attribute(&domain, kCudaAttributePciDomain, index) == kCudaOk &&
                    cuda.device_get_attribute(&bus, kCudaAttributePciBus, index) == kCudaOk &&
                    cuda.device_get_attribute(&device, kCudaAttributePciDevice, index) == kCudaOk;
  char text[32] = {};
  if (told) (void)std::snprintf(text, sizeof(text), "%04x:%02x:%02x.0", domain, bus, device);
  return text;
}

}  // namespace

Result<std::shared_ptr<const CudaDevice>> CudaDevice::open(std::shared_ptr<const CudaDriver> driver,
                                                           int index) {
  const CudaDriver& cuda = *driver;
  int count = 0;
  KVPUSH_TRY(cuda.check(cuda.device_get_count(&count), "cuDeviceGetCount"));
  if (index < 0 || index >= count) {
    return Status(Code::kUnsupported, "CUDA device " + std::to_string(index) + " does not exist: there are " +
                                          std::to_string(count));
  }
  std::shared_ptr<CudaDevice> device(new CudaDevice(std::move(driver), index));
  char name[256] = {};
  KVPUSH_TRY(cuda.check(cuda.device_get_name(name, sizeof(name), index), "cuDeviceGetName"));
  device->name_ = name;
  CudaUuid uuid{};
  KVPUSH_TRY(cuda.check(cuda.device_get_uuid(&uuid, index), "cuDeviceGetUuid"));
  device->uuid_ = hex(uuid);
  KVPUSH_TRY(cuda.check(cuda.device_get_attribute(&device->num_sms_, kCudaAttributeNumSms, index),
                        "cuDeviceGetAttribute"));
  int major = 0;
  int minor = 0;
  KVPUSH_TRY(cuda.check(cuda.device_get_attribute(&major, kCudaAttributeComputeMajor, index),
                        "cuDeviceGetAttribute"));
  KVPUSH_TRY(cuda.check(cuda.device_get_attribute(&minor, kCudaAttributeComputeMinor, index),
                        "cuDeviceGetAttribute"));
  device->compute_ = 10 * major + minor;
  int ordering = 0;
  int flush = 0;
  KVPUSH_TRY(cuda.check(cuda.device_get_attribute(&ordering, kCudaAttributeGpuDirectWritesOrdering, index),
                        "cuDeviceGetAttribute"));
  KVPUSH_TRY(cuda.check(cuda.device_get_attribute(&flush, kCudaAttributeGpuDirectFlushOptions, index),
                        "cuDeviceGetAttribute"));
  if (ordering >= kCudaWritesOrderedForOwner) {
    device->direct_writes_ = CudaDirectWrites::kOrdered;
  } else if ((static_cast<unsigned>(flush) & kCudaFlushFromHost) != 0) {
    device->direct_writes_ = CudaDirectWrites::kFlushed;
  }
  device->pci_ = pci_of(cuda, index);
  KVPUSH_TRY(cuda.check(cuda.primary_context_retain(&device->context_, index), "cuDevicePrimaryCtxRetain"));
  return std::shared_ptr<const CudaDevice>(std::move(device));
}

CudaDevice::~CudaDevice() {
  if (context_ != nullptr) (void)driver_->primary_context_release(index_);
}

}  // namespace kvpush
