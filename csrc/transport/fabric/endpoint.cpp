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

// Across hosts, by what moves data best. shm reaches one host only, and sockets and udp are slower than tcp.
constexpr std::array<std::string_view, 5> kPreferred = {"efa", "verbs;ofi_rxm", "tcp", "tcp;ofi_rxm", "net"};
constexpr std::size_t kQueueEntries = 8192;
constexpr std::size_t kMaxNameBytes = 256;
constexpr int kMaxKeyTries = 8;

FiInfo* choose(FiInfo* infos, const std::string& provider) {
  if (!provider.empty()) return infos;
  for (const std::string_view preferred : kPreferred) {
    for (FiInfo* info = infos; info != nullptr; info = info->next) {
      if (preferred == info->fabric_attr->prov_name) return info;
    }
  }
  return nullptr;
}

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

Result<std::string> find_fabric_provider(const FabricApi& api, const std::string& provider) {
  Status why(Code::kUnsupported, "libfabric (" + api.path + ") has none of efa, verbs, tcp and net here");
  for (const bool delivers : {true, false}) {
    auto infos = find_fabric_providers(api, provider, delivers);
    if (!infos.ok()) {
      why = infos.status();
    } else if (const FiInfo* info = choose(infos.value().get(), provider); info != nullptr) {
      return std::string(info->fabric_attr->prov_name);
    }
  }
  return why;
}

Result<std::unique_ptr<FabricEndpoint>> FabricEndpoint::open(const std::shared_ptr<const FabricApi>& api,
                                                             const std::string& provider,
                                                             std::size_t min_message_bytes) {
  Status why;
  for (const bool delivers : {true, false}) {
    auto infos = find_fabric_providers(*api, provider, delivers);
    if (!infos.ok()) {
      why = infos.status();
      continue;
    }
    FiInfo* const info = choose(infos.value().get(), provider);
    if (info == nullptr) {
      why = {Code::kUnsupported, "libfabric (" + api->path + ") has none of efa, verbs, tcp and net here"};
      continue;
    }
    if (info->ep_attr->max_msg_size < min_message_bytes) {
      why = {Code::kUnsupported, std::string("libfabric's ") + info->fabric_attr->prov_name +
                                     " sends at most " + std::to_string(info->ep_attr->max_msg_size) +
                                     " bytes at once, needed are " + std::to_string(min_message_bytes)};
      continue;
    }
    std::unique_ptr<FabricEndpoint> endpoint(
        new FabricEndpoint(api, std::move(infos).value(), info, delivers));
    why = endpoint->start();
    if (why.ok()) return endpoint;
  }
  return why;
}

FabricEndpoint::FabricEndpoint(std::shared_ptr<const FabricApi> api, FabricInfo infos, FiInfo* info,
                               bool delivers)
    : api_(std::move(api)), infos_(std::move(infos)), info_(info), delivers_(delivers) {
  protocol_ = std::string(info_->fabric_attr->prov_name) + " protocol " +
              std::to_string(info_->ep_attr->protocol) + "." +
              std::to_string(info_->ep_attr->protocol_version);
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
  code = fabric->ops->domain(fabric, info_, &domain, nullptr);
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
  code = domain->ops->endpoint(domain, info_, &endpoint, nullptr);
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
  FidCq* queue = nullptr;
  FiCqAttr attributes;
  attributes.size = kQueueEntries;
  attributes.format = kFiCqFormatData;
  attributes.wait_obj = kFiWaitFd;
  // The descriptor of net is readable all the time (seen in 1.17).
  const bool waits = info_->fabric_attr->prov_name != std::string_view("net");
  int code = waits ? domain_->ops->cq_open(domain_.get(), &attributes, &queue, nullptr) : -1;
  if (code == 0) {
    queue_ = own(queue);
    int fd = -1;
    if (queue->fid.ops->control(&queue->fid, kFiGetWait, &fd) == 0) wait_fd_ = fd;
    return {};
  }
  attributes.wait_obj = kFiWaitNone;
  code = domain_->ops->cq_open(domain_.get(), &attributes, &queue, nullptr);
  if (code != 0) return {Code::kTransport, "libfabric fi_cq_open: " + describe(code)};
  queue_ = own(queue);
  return {};
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

Result<FidHandle<FidMr>> FabricEndpoint::register_memory(Region region, std::uint64_t access) {
  int code = 0;
  for (int i = 0; i < kMaxKeyTries; ++i) {
    FidMr* registration = nullptr;
    code = domain_->mr->reg(&domain_->fid, region.data, region.size_bytes, access, 0,
                            random_key(info_->domain_attr->mr_key_size), 0, &registration, nullptr);
    if (code == 0) return own(registration);
  }
  return Status(Code::kTransport, "libfabric cannot register " + std::to_string(region.size_bytes) +
                                      " bytes: " + describe(code));
}

FabricStart FabricEndpoint::started(std::ptrdiff_t code) {
  if (code == 0) return FabricStart::kYes;
  if (code == -kFiAgain) return FabricStart::kAgain;
  last_error_ = code;
  return FabricStart::kNo;
}

FabricStart FabricEndpoint::write(FiAddr peer, ByteView source, void* descriptor, std::uint32_t immediate,
                                  std::uint64_t address, std::uint64_t key, void* context) {
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
