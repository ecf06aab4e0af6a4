#include "transport/fabric/endpoint.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/ids.hpp"
#include "transport/fabric/fabric_transport.hpp"

namespace kvpush {
namespace {

constexpr std::size_t kMaxNameBytes = 256;
constexpr int kMaxKeyTries = 8;

std::uint64_t random_key(std::size_t key_bytes) {
  const Uuid random = random_uuid();
  std::uint64_t key = 0;
  std::memcpy(&key, random.bytes.data(), std::min(key_bytes, sizeof(key)));
  return key;
}

template <typename Object>
FidHandle<Object> own(Object* object) {
  return FidHandle<Object>(object);
}

}  // namespace

Result<std::unique_ptr<FabricEndpoint>> FabricEndpoint::open(std::shared_ptr<const FabricApi> api,
                                                             FabricInfo info, bool delivers,
                                                             std::size_t queue_entries,
                                                             std::shared_ptr<const CudaDevice> device) {
  std::unique_ptr<FabricEndpoint> endpoint(
      new FabricEndpoint(std::move(api), std::move(info), delivers, queue_entries, std::move(device)));
  const Scope scope(endpoint->device_);
  KVPUSH_TRY(endpoint->start());
  return endpoint;
}

Status FabricEndpoint::start() {
  const auto failed = [&](const char* call, std::ptrdiff_t code) {
    return Status(Code::kTransport, std::string("libfabric ") + info_->fabric_attr->prov_name + ": " + call +
                                        ": " + describe(code));
  };
  if (delivers_) info_->tx_attr->op_flags |= kFiDeliveryComplete;
  FidFabric* fabric = nullptr;
  int code = api_->fabric(info_->fabric_attr, &fabric, nullptr);
  if (code != 0) return failed("fi_fabric", code);
  fabric_ = own(fabric);
  FidDomain* domain = nullptr;
  code = fabric->ops->domain(fabric, info_.get(), &domain, nullptr);
  if (code != 0) return failed("fi_domain", code);
  domain_ = own(domain);
  FidAv* addresses = nullptr;
  FiAvAttr av_attributes;
  av_attributes.type = info_->domain_attr->av_type;
  code = domain->ops->av_open(domain, &av_attributes, &addresses, nullptr);
  if (code != 0) return failed("fi_av_open", code);
  addresses_ = own(addresses);
  KVPUSH_TRY(open_queue());
  FidEp* endpoint = nullptr;
  code = domain->ops->endpoint(domain, info_.get(), &endpoint, nullptr);
  if (code != 0) return failed("fi_endpoint", code);
  endpoint_ = own(endpoint);
  FiOps& ops = *endpoint->fid.ops;
  code = ops.bind(&endpoint->fid, &addresses->fid, 0);
  if (code == 0) code = ops.bind(&endpoint->fid, &queue_->fid, kFiSend | kFiRecv);
  if (code == 0) code = ops.control(&endpoint->fid, kFiEnable, nullptr);
  if (code != 0) return failed("fi_enable", code);
  name_.resize(kMaxNameBytes);
  std::size_t name_bytes = name_.size();
  code = endpoint->cm->getname(&endpoint->fid, name_.data(), &name_bytes);
  if (code != 0 || name_bytes > name_.size()) return failed("fi_getname", code);
  name_.resize(name_bytes);
  return {};
}

Status FabricEndpoint::open_queue() {
  // The descriptor of net is readable all the time (seen in 1.17).
  const bool waits = info_->fabric_attr->prov_name != std::string_view("net");
  int code = -1;
  // Devices have a limit that fi_info does not tell.
  for (;; queue_entries_ /= 2) {
    if (waits) code = try_open_queue(kFiWaitFd);
    if (code == 0) {
      int fd = -1;
      if (queue_->fid.ops->control(&queue_->fid, kFiGetWait, &fd) == 0) wait_fd_ = fd;
      return {};
    }
    code = try_open_queue(kFiWaitNone);
    if (code == 0) return {};
    if (queue_entries_ / 2 < kFabricMinQueueEntries) break;
  }
  return {Code::kTransport, "libfabric fi_cq_open: " + describe(code)};
}

int FabricEndpoint::try_open_queue(int wait_object) {
  FidCq* queue = nullptr;
  FiCqAttr attributes;
  attributes.size = queue_entries_;
  attributes.format = kFiCqFormatData;
  attributes.wait_obj = wait_object;
  const int code = domain_->ops->cq_open(domain_.get(), &attributes, &queue, nullptr);
  if (code == 0) queue_ = own(queue);
  return code;
}

bool FabricEndpoint::may_wait() {
  // Without a wait object some providers crash in fi_trywait.
  if (wait_fd_ < 0) return false;
  Fid* fid = &queue_->fid;
  return fabric_->ops->trywait(fabric_.get(), &fid, 1) == 0;
}

Result<FiAddr> FabricEndpoint::insert(ByteView name) {
  // Providers that take strings read up to a zero.
  Bytes terminated(name.begin(), name.end());
  terminated.push_back(std::byte{0});
  FiAddr address = kFiAddrUnspec;
  const int inserted = addresses_->ops->insert(addresses_.get(), terminated.data(), 1, &address, 0, nullptr);
  if (inserted == 1 && address != kFiAddrUnspec) return address;
  return Status(Code::kHandshake,
                "libfabric does not take the peer's address: " + describe(inserted < 0 ? inserted : 0));
}

void FabricEndpoint::remove(FiAddr address) {
  static_cast<void>(addresses_->ops->remove(addresses_.get(), &address, 1, 0));
}

Result<FidHandle<FidMr>> FabricEndpoint::register_memory(Region region, std::uint64_t access,
                                                         bool on_device) {
  const Scope scope(device_);
  const iovec range{region.data, region.size_bytes};
  FiMrAttr attributes;
  attributes.mr_iov = &range;
  attributes.iov_count = 1;
  attributes.access = access;
  // The providers export a dmabuf of it themselves where they need one (efa, verbs).
  attributes.iface = kFiHmemCuda;
  if (on_device) attributes.device = static_cast<std::uint64_t>(device_->index());
  int code = 0;
  for (int i = 0; i < kMaxKeyTries; ++i) {
    FidMr* registration = nullptr;
    const std::uint64_t key = random_key(info_->domain_attr->mr_key_size);
    attributes.requested_key = key;
    code = on_device ? domain_->mr->regattr(&domain_->fid, &attributes, 0, &registration)
                     : domain_->mr->reg(&domain_->fid, region.data, region.size_bytes, access, 0, key, 0,
                                        &registration, nullptr);
    if (code == 0) return own(registration);
  }
  const std::string what = on_device ? " bytes of GPU " + std::to_string(device_->index()) +
                                           ", which needs drivers with GPUDirect: set fabric_device_memory "
                                           "(KVPUSH_FABRIC_DEVICE_MEMORY) to false for pinned host memory: "
                                     : " bytes: ";
  return Status(Code::kTransport,
                "libfabric cannot register " + std::to_string(region.size_bytes) + what + describe(code));
}

FabricStart FabricEndpoint::started(std::ptrdiff_t code) {
  if (code == 0) return FabricStart::kYes;
  if (code == -kFiAgain) return FabricStart::kAgain;
  last_error_ = code;
  return FabricStart::kNo;
}

FabricStart FabricEndpoint::write(FiAddr peer, ByteView source, void* descriptor, std::uint32_t immediate,
                                  std::uint64_t address, std::uint64_t key, void* context) {
  const Scope scope(device_);
  return started(endpoint_->rma->writedata(endpoint_.get(), source.data(), source.size(), descriptor,
                                           immediate, peer, address, key, context));
}

FabricStart FabricEndpoint::send(FiAddr peer, ByteView message, void* descriptor, void* context) {
  return started(
      endpoint_->msg->send(endpoint_.get(), message.data(), message.size(), descriptor, peer, context));
}

FabricStart FabricEndpoint::receive(std::span<std::byte> buffer, void* descriptor, void* context) {
  return started(endpoint_->msg->recv(endpoint_.get(), buffer.data(), buffer.size(), descriptor,
                                      kFiAddrUnspec, context));
}

bool FabricEndpoint::read_error(FiCqErrEntry& entry, std::string& text) {
  entry = {};
  if (queue_->ops->readerr(queue_.get(), &entry, 0) <= 0) return false;
  text = describe(entry.err);
  std::array<char, 256> words{};
  const char* detail =
      queue_->ops->strerror(queue_.get(), entry.prov_errno, entry.err_data, words.data(), words.size());
  if (detail != nullptr && text != detail) text += std::string(" (") + detail + ")";
  return true;
}

std::string FabricEndpoint::describe(std::ptrdiff_t code) const {
  const int number = static_cast<int>(code < 0 ? -code : code);
  return std::string(api_->strerror(number)) + " (" + std::to_string(number) + ")";
}

}  // namespace kvpush
