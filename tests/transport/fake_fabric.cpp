#include "fake_fabric.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace kvpush::fake_fabric {
namespace {

struct Endpoint;

struct Error {
  void* context = nullptr;
  int err = 0;
};

/// An immediate to come again, by the number of writes that had landed then.
struct Repeat {
  FiCqDataEntry entry{};
  std::uint64_t since = 0;
};
/// So many writes later at most, give or take what lies between two polls.
constexpr std::uint64_t kMaxLate = 1000;

struct Queue : FidCq {
  std::deque<FiCqDataEntry> entries;
  std::deque<Error> errors;
  std::deque<Repeat> repeats;
  Endpoint* endpoint = nullptr;
};

struct Domain : FidDomain {
  int nic = 0;
};

struct Registration : FidMr {
  Domain* domain = nullptr;
  std::byte* data = nullptr;
  std::size_t size = 0;
};

struct Receive {
  void* buffer = nullptr;
  std::size_t size = 0;
  void* context = nullptr;
};

/// Under way to an endpoint. Data are read when it arrives, as a NIC may; of one whose end was told already,
/// from a copy.
struct Packet {
  std::uint64_t from = 0;
  const void* data = nullptr;
  std::size_t size = 0;
  void* context = nullptr;
  bool is_write = false;
  std::uint64_t immediate = 0;
  std::uint64_t address = 0;
  std::uint64_t key = 0;
  std::shared_ptr<std::vector<std::byte>> copy = nullptr;
};

struct Endpoint : FidEp {
  Domain* domain = nullptr;
  std::uint64_t id = 0;
  Queue* queue = nullptr;
  std::deque<Packet> arriving;
  std::deque<Receive> receives;
};

struct Net {
  std::recursive_mutex mutex;
  Policy policy;
  std::uint64_t random = 1;
  std::uint64_t next_id = 1;
  std::uint64_t next_key = 1000;
  std::uint32_t num_failing_writes = 0;
  std::size_t num_open = 0;
  std::uint64_t num_landed = 0;
  std::set<int> broken;
  std::set<int> silent;
  std::map<int, std::size_t> num_writes;
  std::map<std::uint64_t, Endpoint*> endpoints;
  std::vector<Registration*> registrations;

  std::uint64_t below(std::uint64_t limit) {
    random = random * 0xd1342543de82ef95U + 1;
    return (random >> 33U) % limit;
  }
  bool happens(std::uint32_t chance) { return chance != 0 && below(256) < chance; }
};

Net& net() {
  static auto* const the_net = new Net;
  return *the_net;
}
using Lock = std::lock_guard<std::recursive_mutex>;

template <typename Object, typename Base>
Object* as(Base* base) {
  return static_cast<Object*>(base);
}

// Objects start with their Fid, so a Fid's address is the object's.
template <typename Base>
Base* base_of(Fid* fid) {
  return reinterpret_cast<Base*>(fid);
}

void end_at(std::uint64_t source, const Packet& packet, int err) {
  const auto found = net().endpoints.find(source);
  if (found == net().endpoints.end() || packet.copy != nullptr) return;
  Queue& queue = *found->second->queue;
  if (err != 0) {
    queue.errors.push_back({packet.context, err});
  } else {
    const std::uint64_t flags = packet.is_write ? kFiRma | kFiWrite : kFiMsg | kFiSend;
    queue.entries.push_back(
        {.op_context = packet.context, .flags = flags, .len = 0, .buf = nullptr, .data = 0});
  }
}

/// 0, or what is wrong with the write.
int land(const Endpoint& at, const Packet& packet) {
  for (const Registration* each : net().registrations) {
    if (each->key != packet.key || each->domain != at.domain) continue;
    const std::uint64_t base = net().policy.by_address ? reinterpret_cast<std::uintptr_t>(each->data) : 0;
    const std::uint64_t offset = packet.address - base;
    if (offset > each->size || packet.size > each->size - offset) return EACCES;
    std::memcpy(each->data + offset, packet.copy ? packet.copy->data() : packet.data, packet.size);
    return 0;
  }
  return EKEYREJECTED;
}

/// False: it has to wait for a receive.
bool arrive(Endpoint& at, const Packet& packet) {
  if (packet.is_write) {
    const int err = land(at, packet);
    end_at(packet.from, packet, err);
    if (err != 0) return true;
    ++net().num_landed;
    const FiCqDataEntry entry{.op_context = nullptr,
                              .flags = kFiRma | kFiRemoteWrite | kFiRemoteCqData,
                              .len = packet.size,
                              .buf = nullptr,
                              .data = packet.immediate};
    at.queue->entries.push_back(entry);
    if (net().happens(net().policy.repeats)) at.queue->repeats.push_back({entry, net().num_landed});
    return true;
  }
  if (at.receives.empty()) return false;
  const Receive receive = at.receives.front();
  at.receives.pop_front();
  const std::size_t size = std::min(receive.size, packet.size);
  std::memcpy(receive.buffer, packet.data, size);
  at.queue->entries.push_back(
      {.op_context = receive.context, .flags = kFiMsg | kFiRecv, .len = size, .buf = nullptr, .data = 0});
  end_at(packet.from, packet, 0);
  return true;
}

void progress(Endpoint& at) {
  if (net().silent.contains(at.domain->nic)) return;
  if (at.domain->nic == net().policy.slow_nic && net().below(32) != 0) return;
  std::deque<Packet> waiting;
  for (std::size_t left = std::min<std::size_t>(at.arriving.size(), 64); left > 0; --left) {
    if (net().policy.shuffles) std::swap(at.arriving.front(), at.arriving[net().below(at.arriving.size())]);
    const Packet packet = at.arriving.front();
    at.arriving.pop_front();
    if (!arrive(at, packet)) waiting.push_back(packet);
  }
  at.arriving.insert(at.arriving.begin(), waiting.begin(), waiting.end());
  auto& repeats = at.queue->repeats;
  while (!repeats.empty() && (net().num_landed - repeats.front().since > kMaxLate || net().happens(64))) {
    at.queue->entries.push_back(repeats.front().entry);
    repeats.pop_front();
  }
}

std::ptrdiff_t start(FidEp* from, FiAddr to, Packet packet) {
  const int nic = as<Endpoint>(from)->domain->nic;
  if (net().happens(net().policy.again) || nic == net().policy.stubborn_nic) return -EAGAIN;
  if (packet.is_write) ++net().num_writes[nic];
  packet.from = as<Endpoint>(from)->id;
  const auto found = net().endpoints.find(to);
  if (packet.is_write && net().num_failing_writes != 0) {
    --net().num_failing_writes;
    end_at(packet.from, packet, ECONNRESET);
  } else if (net().broken.contains(nic)) {
    end_at(packet.from, packet, ENETDOWN);
  } else if (found == net().endpoints.end()) {
    end_at(packet.from, packet, ECONNREFUSED);
  } else {
    found->second->arriving.push_back(packet);
  }
  return 0;
}

std::ptrdiff_t send(FidEp* ep, const void* data, std::size_t size, void*, FiAddr to, void* context) {
  const Lock lock(net().mutex);
  return start(ep, to, {.data = data, .size = size, .context = context});
}

std::ptrdiff_t writedata(FidEp* ep, const void* data, std::size_t size, void* desc, std::uint64_t immediate,
                         FiAddr to, std::uint64_t address, std::uint64_t key, void* context) {
  const Lock lock(net().mutex);
  if (size > net().policy.max_write_bytes) return -EMSGSIZE;
  const auto* const local = static_cast<const Registration*>(desc);
  if (local == nullptr || local->domain != as<Endpoint>(ep)->domain) return -EINVAL;
  return start(ep, to,
               {.data = data,
                .size = size,
                .context = context,
                .is_write = true,
                .immediate = immediate & UINT32_MAX,
                .address = address,
                .key = key});
}

std::ptrdiff_t receive(FidEp* ep, void* buffer, std::size_t size, void*, FiAddr, void* context) {
  const Lock lock(net().mutex);
  auto& receives = as<Endpoint>(ep)->receives;
  if (receives.size() >= net().policy.max_receives || net().happens(net().policy.again)) return -EAGAIN;
  receives.push_back({buffer, size, context});
  return 0;
}

std::ptrdiff_t read(FidCq* cq, void* into, std::size_t count) {
  const Lock lock(net().mutex);
  auto& queue = *as<Queue>(cq);
  if (queue.endpoint != nullptr) progress(*queue.endpoint);
  if (!queue.errors.empty()) return -kFiAvail;
  if (queue.entries.empty()) return -EAGAIN;
  std::size_t num_read = std::min(count, queue.entries.size());
  if (net().happens(net().policy.short_reads)) num_read = 1;
  std::copy_n(queue.entries.begin(), num_read, static_cast<FiCqDataEntry*>(into));
  queue.entries.erase(queue.entries.begin(), queue.entries.begin() + static_cast<std::ptrdiff_t>(num_read));
  return static_cast<std::ptrdiff_t>(num_read);
}

std::ptrdiff_t read_error(FidCq* cq, FiCqErrEntry* into, std::uint64_t) {
  const Lock lock(net().mutex);
  auto& queue = *as<Queue>(cq);
  if (queue.errors.empty()) return -EAGAIN;
  into->op_context = queue.errors.front().context;
  into->err = queue.errors.front().err;
  queue.errors.pop_front();
  return 1;
}

const char* queue_strerror(FidCq*, int, const void*, char*, std::size_t) {
  return "by the fake";
}

int get_name(Fid* fid, void* into, std::size_t* size) {
  const auto& endpoint = *as<Endpoint>(base_of<FidEp>(fid));
  if (*size < sizeof(endpoint.id)) return -259;
  std::memcpy(into, &endpoint.id, sizeof(endpoint.id));
  *size = sizeof(endpoint.id);
  return 0;
}

int insert(FidAv*, const void* name, std::size_t, FiAddr* address, std::uint64_t, void*) {
  std::memcpy(address, name, sizeof(*address));
  return 1;
}

int remove(FidAv*, FiAddr*, std::size_t, std::uint64_t) {
  return 0;
}

template <typename Object, typename Base>
int close_as(Fid* fid) {
  const Lock lock(net().mutex);
  --net().num_open;
  delete as<Object>(base_of<Base>(fid));
  return 0;
}

int close_endpoint(Fid* fid) {
  const Lock lock(net().mutex);
  auto* const endpoint = as<Endpoint>(base_of<FidEp>(fid));
  net().endpoints.erase(endpoint->id);
  for (auto& [id, other] : net().endpoints) {
    std::erase_if(other->arriving, [&](const Packet& packet) { return packet.from == endpoint->id; });
  }
  for (const Packet& packet : endpoint->arriving) end_at(packet.from, packet, ECONNRESET);
  if (endpoint->queue != nullptr) endpoint->queue->endpoint = nullptr;
  return close_as<Endpoint, FidEp>(fid);
}

int close_registration(Fid* fid) {
  const Lock lock(net().mutex);
  if (!std::exchange(net().policy.closes_registrations, true)) return -EBUSY;
  std::erase(net().registrations, as<Registration>(base_of<FidMr>(fid)));
  return close_as<Registration, FidMr>(fid);
}

int bind(Fid* fid, Fid* other, std::uint64_t flags) {
  const Lock lock(net().mutex);
  if ((flags & kFiRecv) == 0) return 0;
  auto* const endpoint = as<Endpoint>(base_of<FidEp>(fid));
  endpoint->queue = as<Queue>(base_of<FidCq>(other));
  endpoint->queue->endpoint = endpoint;
  return 0;
}

int control(Fid* fid, int command, void*) {
  const Lock lock(net().mutex);
  if (command != kFiEnable) return -ENOSYS;
  auto* const endpoint = as<Endpoint>(base_of<FidEp>(fid));
  net().endpoints[endpoint->id] = endpoint;
  return 0;
}

template <typename Object, typename Base>
FiOps* plain_ops() {
  static FiOps ops{sizeof(FiOps), close_as<Object, Base>, nullptr, control};
  return &ops;
}

int open_av(FidDomain*, FiAvAttr*, FidAv** av, void*) {
  static FiOpsAv ops{sizeof(FiOpsAv), insert, {}, remove};
  const Lock lock(net().mutex);
  ++net().num_open;
  *av = new FidAv{{0, nullptr, plain_ops<FidAv, FidAv>()}, &ops};
  return 0;
}

int open_cq(FidDomain*, FiCqAttr* attributes, FidCq** cq, void*) {
  static FiOpsCq ops{sizeof(FiOpsCq), read, nullptr, read_error, {}, queue_strerror};
  if (attributes->wait_obj != kFiWaitNone) return -ENOSYS;
  const Lock lock(net().mutex);
  ++net().num_open;
  auto* const queue = new Queue;
  queue->fid.ops = plain_ops<Queue, FidCq>();
  queue->FidCq::ops = &ops;
  *cq = queue;
  return 0;
}

int open_endpoint(FidDomain* domain, FiInfo*, FidEp** ep, void*) {
  static FiOps fid_ops{sizeof(FiOps), close_endpoint, bind, control};
  static FiOpsCm cm{sizeof(FiOpsCm), nullptr, get_name};
  static FiOpsMsg msg{sizeof(FiOpsMsg), receive, {}, send};
  static FiOpsRma rma{sizeof(FiOpsRma), {}, writedata};
  const Lock lock(net().mutex);
  ++net().num_open;
  auto* const endpoint = new Endpoint;
  endpoint->fid = {0, nullptr, &fid_ops};
  endpoint->cm = &cm;
  endpoint->msg = &msg;
  endpoint->rma = &rma;
  endpoint->id = net().next_id++;
  endpoint->domain = as<Domain>(domain);
  *ep = endpoint;
  return 0;
}

int register_memory(Fid* domain, const void* data, std::size_t size, std::uint64_t, std::uint64_t,
                    std::uint64_t requested_key, std::uint64_t, FidMr** mr, void*) {
  static FiOps ops{sizeof(FiOps), close_registration, nullptr, control};
  const Lock lock(net().mutex);
  ++net().num_open;
  auto* const registration = new Registration;
  registration->fid = {0, nullptr, &ops};
  registration->key = net().policy.by_address ? net().next_key++ : requested_key;
  registration->data = static_cast<std::byte*>(const_cast<void*>(data));
  registration->size = size;
  registration->domain = as<Domain>(base_of<FidDomain>(domain));
  registration->mem_desc = registration;
  net().registrations.push_back(registration);
  *mr = registration;
  return 0;
}

int register_device_memory(Fid* domain, const FiMrAttr* attributes, std::uint64_t flags, FidMr** mr) {
  const Lock lock(net().mutex);
  const int device = static_cast<int>(attributes->device);
  const bool good = attributes->iface == kFiHmemCuda && device == net().policy.gpu;
  if (!good || flags != 0 || attributes->iov_count != 1) return -ENOSYS;
  const iovec& range = *attributes->mr_iov;
  return register_memory(domain, range.iov_base, range.iov_len, attributes->access, 0,
                         attributes->requested_key, 0, mr, nullptr);
}

int open_domain(FidFabric*, FiInfo* info, FidDomain** domain, void*) {
  static FiOpsDomain ops{sizeof(FiOpsDomain), open_av, open_cq, open_endpoint};
  static FiOpsMr mr{sizeof(FiOpsMr), register_memory, nullptr, register_device_memory};
  const Lock lock(net().mutex);
  ++net().num_open;
  auto* const opened = new Domain;
  opened->fid.ops = plain_ops<Domain, FidDomain>();
  opened->FidDomain::ops = &ops;
  opened->mr = &mr;
  opened->nic = std::atoi(info->domain_attr->name + 3);
  *domain = opened;
  return 0;
}

int open_fabric(FiFabricAttr*, FidFabric** fabric, void*) {
  static FiOpsFabric ops{sizeof(FiOpsFabric), open_domain, {}, nullptr};
  const Lock lock(net().mutex);
  ++net().num_open;
  *fabric = new FidFabric{{0, nullptr, plain_ops<FidFabric, FidFabric>()}, &ops};
  return 0;
}

FiInfo* copy_info(const FiInfo* like) {
  auto* const info = new FiInfo{};
  info->tx_attr = new FiTxAttr(like != nullptr ? *like->tx_attr : FiTxAttr{});
  info->rx_attr = new FiRxAttr(like != nullptr ? *like->rx_attr : FiRxAttr{});
  info->ep_attr = new FiEpAttr(like != nullptr ? *like->ep_attr : FiEpAttr{});
  info->domain_attr = new FiDomainAttr(like != nullptr ? *like->domain_attr : FiDomainAttr{});
  info->fabric_attr = new FiFabricAttr(like != nullptr ? *like->fabric_attr : FiFabricAttr{});
  if (like == nullptr) return info;
  info->caps = like->caps;
  info->domain_attr->name = strdup(like->domain_attr->name);
  info->fabric_attr->prov_name = strdup(like->fabric_attr->prov_name);
  info->nic = new FidNic(*like->nic);
  info->nic->bus_attr = new FiBusAttr(*like->nic->bus_attr);
  return info;
}

void free_info(FiInfo* info) {
  if (info->next != nullptr) free_info(info->next);
  delete info->tx_attr;
  delete info->rx_attr;
  delete info->ep_attr;
  std::free(info->domain_attr->name);
  delete info->domain_attr;
  std::free(info->fabric_attr->prov_name);
  delete info->fabric_attr;
  if (info->nic != nullptr) delete info->nic->bus_attr;
  delete info->nic;
  delete info;
}

FiInfo* make_info(int nic, FiInfo* next) {
  const Policy& policy = net().policy;
  FiInfo* const info = copy_info(nullptr);
  info->next = next;
  info->fabric_attr->prov_name = strdup(policy.provider);
  info->ep_attr->max_msg_size = policy.max_message_bytes;
  info->rx_attr->size = policy.max_receives;
  info->domain_attr->name = strdup(("nic" + std::to_string(nic)).c_str());
  info->domain_attr->mr_key_size = 8;
  info->domain_attr->mr_mode = policy.by_address ? kFiMrVirtAddr | kFiMrProvKey : 0;
  info->nic = new FidNic{};
  info->nic->bus_attr = new FiBusAttr{kFiBusPci, 0, static_cast<std::uint8_t>(0x10 + nic), 0, 0};
  return info;
}

int get_info(std::uint32_t, const char* node, const char*, std::uint64_t, const FiInfo* hints,
             FiInfo** found) {
  const Lock lock(net().mutex);
  if ((hints->caps & kFiHmem) != 0 && net().policy.gpu < 0) return -ENODATA;
  if (node != nullptr || (hints->tx_attr->op_flags != 0 && !net().policy.delivers)) return -ENODATA;
  *found = nullptr;
  for (int nic = net().policy.num_nics - 1; nic >= 0; --nic) *found = make_info(nic, *found);
  return 0;
}

}  // namespace

std::shared_ptr<const FabricApi> network(const Policy& policy) {
  const Lock lock(net().mutex);
  net().policy = policy;
  net().random = policy.seed;
  net().num_failing_writes = 0;
  net().broken.clear();
  net().silent.clear();
  net().num_writes.clear();
  auto api = std::make_shared<FabricApi>();
  api->version = [] { return kFabricVersion; };
  api->getinfo = get_info;
  api->freeinfo = free_info;
  api->dupinfo = copy_info;
  api->fabric = open_fabric;
  api->strerror = [](int code) -> const char* { return std::strerror(code); };
  api->path = "the fake";
  return api;
}

void fail_writes(std::uint32_t count) {
  const Lock lock(net().mutex);
  net().num_failing_writes = count;
}

void overrun(int nic) {
  const Lock lock(net().mutex);
  for (auto& [id, endpoint] : net().endpoints) {
    if (nic < 0 || endpoint->domain->nic == nic) endpoint->queue->errors.push_back({nullptr, kFiOverrun});
  }
}

void break_nic(int nic) {
  const Lock lock(net().mutex);
  net().broken.insert(nic);
  for (auto& [id, endpoint] : net().endpoints) {
    if (endpoint->domain->nic != nic) continue;
    for (Packet& packet : std::exchange(endpoint->arriving, {})) {
      end_at(packet.from, packet, ENETDOWN);
      if (!packet.is_write || net().below(2) == 0) continue;
      const auto* const data = static_cast<const std::byte*>(packet.data);
      packet.copy = std::make_shared<std::vector<std::byte>>(data, data + packet.size);
      endpoint->arriving.push_back(packet);
    }
  }
}

void silence_nic(int nic) {
  const Lock lock(net().mutex);
  net().silent.insert(nic);
}

void mend_nic(int nic) {
  const Lock lock(net().mutex);
  net().broken.erase(nic);
  net().silent.erase(nic);
}

std::size_t num_writes(int nic) {
  const Lock lock(net().mutex);
  return net().num_writes[nic];
}

std::size_t num_open() {
  const Lock lock(net().mutex);
  return net().num_open;
}

}  // namespace kvpush::fake_fabric
