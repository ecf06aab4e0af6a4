// What Python describes, as the core's own types; and the parts that a configuration names.
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/transports.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "pack/cuda/cuda_packer.hpp"
#include "shim/cuda_device.hpp"
#include "transport/fault/fault_transport.hpp"

namespace kvpush::bindings {
namespace {

template <typename T>
T get(const py::dict& description, const char* field) {
  return description[field].cast<T>();
}

/// Enough for a network's or PCIe's rate; the forward beside it keeps the others.
constexpr unsigned kSmsForLink = 2;

/// kvpush.testing.faults(): the transport behind the seam fails as that says. No setting of kvpush.Config.
FaultPolicy fault_policy_from(const py::dict& faults) {
  FaultPolicy policy;
  for (const auto& [name, n] : faults.cast<std::map<std::string, std::uint64_t>>()) {
    if (name == "fail_post_before") {
      policy.fail_post_before = n;
    } else if (name == "fail_post_after") {
      policy.fail_post_after = n;
    } else if (name == "lose_at_send") {
      policy.lose_at_send = n;
    } else {
      raise(Status(Code::kInvalidArgument, "fault '" + name + "' is unknown"));
    }
  }
  return policy;
}

}  // namespace

std::unique_ptr<const Cache> cache_from(const py::dict& description) {
  auto cache = std::make_unique<Cache>();
  for (const py::handle group_handle : description["groups"]) {
    const auto group_dict = group_handle.cast<py::dict>();
    Group group;
    group.block_size = get<std::int64_t>(group_dict, "block_size");
    for (const py::handle plane_handle : group_dict["planes"]) {
      const auto plane_dict = plane_handle.cast<py::dict>();
      Plane plane;
      plane.base = reinterpret_cast<std::byte*>(get<std::uintptr_t>(plane_dict, "base"));
      plane.num_blocks = get<std::int64_t>(plane_dict, "num_blocks");
      plane.num_heads = get<std::int64_t>(plane_dict, "num_heads");
      plane.num_tokens = get<std::int64_t>(plane_dict, "num_tokens");
      plane.content_bytes = get<std::int64_t>(plane_dict, "content_bytes");
      plane.block_stride_bytes = get<std::int64_t>(plane_dict, "block_stride_bytes");
      plane.head_stride_bytes = get<std::int64_t>(plane_dict, "head_stride_bytes");
      plane.token_stride_bytes = get<std::int64_t>(plane_dict, "token_stride_bytes");
      plane.name = get<std::string>(plane_dict, "name");
      plane.head_begin = get<std::int64_t>(plane_dict, "head_begin");
      group.planes.push_back(std::move(plane));
    }
    cache->groups.push_back(std::move(group));
  }
  cache->device = get<int>(description, "device");
  cache->fingerprint = get<std::map<std::string, std::string>>(description, "fingerprint");
  return cache;
}

EngineConfig config_from(const py::dict& description) {
  EngineConfig config;
  CoreConfig& core = config.core;
  core.slot_bytes = get<std::size_t>(description, "slot_bytes");
  core.num_slots = get<std::uint32_t>(description, "num_slots");
  core.landing_bytes = get<std::size_t>(description, "landing_bytes");
  core.num_leases = get<std::size_t>(description, "num_leases");
  core.max_quarantined_bytes = get<std::size_t>(description, "max_quarantined_bytes");
  core.max_sessions = get<std::size_t>(description, "max_sessions");
  core.max_claims = get<std::size_t>(description, "max_open_transfers");
  core.min_link_bytes_per_s = get<std::uint64_t>(description, "min_link_bytes_per_s");
  core.timeouts.pairing_us = get<TimeUs>(description, "pairing_timeout_us");
  core.timeouts.claim_us = get<TimeUs>(description, "claim_timeout_us");
  core.timeouts.unclaimed_us = get<TimeUs>(description, "unclaimed_timeout_us");
  core.timeouts.progress_us = get<TimeUs>(description, "progress_timeout_us");
  core.timeouts.peer_us = get<TimeUs>(description, "peer_timeout_us");
  core.timeouts.handshake_us = get<TimeUs>(description, "handshake_timeout_us");
  config.max_open_transfers = get<std::size_t>(description, "max_open_transfers");
  config.close_timeout_us = get<TimeUs>(description, "close_timeout_us");
  return config;
}

std::unique_ptr<Packer> packer_from(const py::dict& description, const Cache& cache,
                                    std::shared_ptr<const CudaDevice> device) {
  if (device == nullptr) return make_cpu_packer(cache, get<unsigned>(description, "pack_threads"));
  CudaPackerOptions options{get<unsigned>(description, "cuda_sms"), get<bool>(description, "cuda_bulk")};
  const auto transport = get<std::string>(description, "transport");
  if (options.num_sms == 0 && (transport == "nixl" || transport == "fabric")) options.num_sms = kSmsForLink;
  return check(
      make_cuda_packer(cache, std::move(device), get<std::string>(description, "cuda_kernels"), options));
}

EngineParts parts_from(const py::dict& description, const Cache& cache) {
  EngineParts parts;
  static_cast<Uuid&>(parts.incarnation) = random_uuid();
  const std::shared_ptr<const CudaDevice> device = device_from(description, cache.device);
  std::optional<FaultPolicy> policy;
  if (description.contains("faults")) policy = fault_policy_from(description["faults"].cast<py::dict>());
  add_transports(parts, transport_settings_from(description, parts.incarnation, device), policy);
  parts.packer = packer_from(description, cache, device);
  return parts;
}

}  // namespace kvpush::bindings
