#include "transport/nixl/agent.hpp"

#include <cstdlib>
#include <cstring>
#include <mutex>

namespace kvpush {
namespace {

Status failed(const std::string& call, NixlCode code) {
  return {Code::kTransport, "nixl " + call + ": " + describe_nixl_code(code)};
}

// Agents share NIXL's plugin manager and UCX's globals, whatever thread owns them.
std::mutex& life_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}

Bytes take_blob(void* data, std::size_t size) {
  Bytes bytes(size);
  if (size != 0) std::memcpy(bytes.data(), data, size);
  std::free(data);
  return bytes;
}

}  // namespace

Result<std::unique_ptr<NixlAgent>> NixlAgent::create(std::shared_ptr<const NixlApi> api, std::string name,
                                                     const std::vector<std::string>& backends,
                                                     std::shared_ptr<const CudaDevice> device) {
  std::unique_ptr<NixlAgent> agent(new NixlAgent(std::move(api), std::move(name), std::move(device)));
  Status started;
  {
    const std::lock_guard lock(life_mutex());
    started = agent->start(backends);
  }
  KVPUSH_TRY(started);
  return agent;
}

NixlAgent::NixlAgent(std::shared_ptr<const NixlApi> api, std::string name,
                     std::shared_ptr<const CudaDevice> device)
    : api_(std::move(api)), name_(std::move(name)), device_(std::move(device)) {
  if (device_) place_ = {kNixlVram, static_cast<std::uint32_t>(device_->index())};
}

NixlAgent::~NixlAgent() {
  const std::lock_guard lock(life_mutex());
  const Scope scope(device_);
  if (agent_ != nullptr && !leaked_) api_->destroy_agent(agent_);
}

Status NixlAgent::start(const std::vector<std::string>& backends) {
  const Scope scope(device_);
  const NixlAgentConfig config;
  if (const NixlCode code = api_->create_configured_agent(name_.c_str(), &config, &agent_); code != kNixlOk) {
    agent_ = nullptr;
    return failed("create_configured_agent(" + name_ + ")", code);
  }
  for (const std::string& backend : backends) KVPUSH_TRY(add_backend(backend));

  NixlXferListObject* local = nullptr;
  NixlOptArgsObject* args = nullptr;
  NixlNotifMapObject* map = nullptr;
  NixlCode code = api_->create_xfer_dlist(place_.type, &local);
  if (code == kNixlOk) local_ = own<NixlXferListObject, &NixlApi::destroy_xfer_dlist>(local);
  for (const int type : {kNixlDram, kNixlVram}) {
    NixlXferListObject* remote = nullptr;
    if (code == kNixlOk) code = api_->create_xfer_dlist(type, &remote);
    if (code == kNixlOk)
      remote_[static_cast<std::size_t>(type)] = own<NixlXferListObject, &NixlApi::destroy_xfer_dlist>(remote);
  }
  if (code == kNixlOk) code = api_->create_opt_args(&args);
  if (code == kNixlOk) write_args_ = own<NixlOptArgsObject, &NixlApi::destroy_opt_args>(args);
  if (code == kNixlOk) code = api_->create_notif_map(&map);
  if (code == kNixlOk) arrived_ = own<NixlNotifMapObject, &NixlApi::destroy_notif_map>(map);
  if (code != kNixlOk) return failed("set-up of the agent's lists", code);

  // Taken before anything is registered: it must open no memory.
  void* data = nullptr;
  std::size_t size = 0;
  code = api_->get_local_md(agent_, &data, &size);
  if (code != kNixlOk) return failed("get_local_md", code);
  connection_ = take_blob(data, size);
  return {};
}

Status NixlAgent::add_backend(const std::string& backend) {
  NixlMemListObject* memories = nullptr;
  NixlParamsObject* parameters = nullptr;
  NixlCode code = api_->get_plugin_params(agent_, backend.c_str(), &memories, &parameters);
  if (code != kNixlOk) {
    return {Code::kUnsupported, "this NIXL has no backend " + backend + ": " + describe_nixl_code(code)};
  }
  const auto memories_owner = own<NixlMemListObject, &NixlApi::destroy_mem_list>(memories);
  const auto parameters_owner = own<NixlParamsObject, &NixlApi::destroy_params>(parameters);
  NixlBackendObject* created = nullptr;
  code = api_->create_backend(agent_, backend.c_str(), parameters, &created);
  if (code != kNixlOk)
    return failed("create_backend(" + backend + "), whose own messages are on stderr", code);
  backends_.push_back(own<NixlBackendObject, &NixlApi::destroy_backend>(created));
  return {};
}

Result<NixlAgent::RegList> NixlAgent::list_of(Region region) const {
  NixlRegListObject* list = nullptr;
  NixlCode code = api_->create_reg_dlist(place_.type, &list);
  if (code != kNixlOk) return failed("create_reg_dlist", code);
  RegList owner = own<NixlRegListObject, &NixlApi::destroy_reg_dlist>(list);
  code = api_->reg_dlist_add_desc(list, reinterpret_cast<std::uintptr_t>(region.data), region.size_bytes,
                                  place_.device, nullptr, 0);
  if (code != kNixlOk) return failed("reg_dlist_add_desc", code);
  return owner;
}

Status NixlAgent::register_memory(Region region) {
  auto list = list_of(region);
  if (!list.ok()) return list.status();
  const Scope scope(device_);
  const NixlCode code = api_->register_mem(agent_, list.value().get(), nullptr);
  if (code == kNixlOk) return {};
  const std::string what = "register_mem of " + std::to_string(region.size_bytes) + " bytes";
  if (!device_) return failed(what, code);
  return failed(what + " on GPU " + std::to_string(place_.device) +
                    ", which needs a NIXL and drivers with GPU support: set nixl_device_memory "
                    "(KVPUSH_NIXL_DEVICE_MEMORY) to false for pinned host memory",
                code);
}

Status NixlAgent::deregister_memory(Region region) {
  auto list = list_of(region);
  if (!list.ok()) return list.status();
  const Scope scope(device_);
  const NixlCode code = api_->deregister_mem(agent_, list.value().get(), nullptr);
  return code == kNixlOk ? Status() : failed("deregister_mem", code);
}

Result<Bytes> NixlAgent::access_to(Region region) {
  auto list = list_of(region);
  if (!list.ok()) return list.status();
  void* data = nullptr;
  std::size_t size = 0;
  const NixlCode code = api_->get_local_partial_md(agent_, list.value().get(), &data, &size, nullptr);
  if (code != kNixlOk) return failed("get_local_partial_md", code);
  return take_blob(data, size);
}

Status NixlAgent::load(const std::string& agent, ByteView metadata) {
  char* loaded = nullptr;
  const NixlCode code = api_->load_remote_md(agent_, metadata.data(), metadata.size(), &loaded);
  if (code != kNixlOk) {
    return {Code::kHandshake, "nixl refuses the metadata of " + agent + ": " + describe_nixl_code(code)};
  }
  const std::string named = loaded != nullptr ? loaded : "";
  std::free(loaded);
  if (named == agent) return {};
  return {Code::kHandshake, "the metadata are of agent " + named + ", expected " + agent};
}

void NixlAgent::forget(const std::string& agent) {
  if (knows(agent)) static_cast<void>(api_->invalidate_remote_md(agent_, agent.c_str()));
}

bool NixlAgent::knows(const std::string& agent) const {
  return api_->check_remote_md(agent_, agent.c_str(), nullptr) == kNixlOk;
}

NixlCode NixlAgent::notify(const std::string& agent, ByteView payload) {
  return api_->gen_notif(agent_, agent.c_str(), payload.data(), payload.size(), nullptr);
}

Result<NixlRequestObject*> NixlAgent::create_write(const std::string& agent, ByteView source,
                                                   std::uint64_t destination,
                                                   NixlMemoryPlace destination_place, ByteView payload) {
  const Scope scope(device_);
  const auto source_address = reinterpret_cast<std::uintptr_t>(source.data());
  NixlXferListObject* const remote = remote_[static_cast<std::size_t>(destination_place.type)].get();
  NixlRequestObject* request = nullptr;
  NixlCode code = api_->xfer_dlist_clear(local_.get());
  if (code == kNixlOk) code = api_->xfer_dlist_clear(remote);
  if (code == kNixlOk)
    code = api_->xfer_dlist_add_desc(local_.get(), source_address, source.size(), place_.device);
  if (code == kNixlOk)
    code = api_->xfer_dlist_add_desc(remote, destination, source.size(), destination_place.device);
  if (code == kNixlOk) code = api_->opt_args_set_notif_msg(write_args_.get(), payload.data(), payload.size());
  if (code == kNixlOk) code = api_->opt_args_set_has_notif(write_args_.get(), true);
  if (code == kNixlOk) {
    code = api_->create_xfer_req(agent_, kNixlWrite, local_.get(), remote, agent.c_str(), &request,
                                 write_args_.get());
  }
  if (code != kNixlOk) return failed("create_xfer_req", code);
  return request;
}

void NixlAgent::release(NixlRequestObject* request) noexcept {
  if (api_->release_xfer_req(agent_, request) == kNixlOk) api_->destroy_xfer_req(request);
}

std::size_t NixlAgent::fetch_notifications() {
  const Scope scope(device_);
  api_->notif_map_clear(arrived_.get());
  std::size_t num_agents = 0;
  if (api_->get_notifs(agent_, arrived_.get(), nullptr) != kNixlOk) return 0;
  return api_->notif_map_size(arrived_.get(), &num_agents) == kNixlOk ? num_agents : 0;
}

}  // namespace kvpush
