// The transports that a configuration names, and which of them this machine has.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"
#include "transport/fault/fault_transport.hpp"

namespace kvpush::bindings {

/// What of kvpush.Config.to_core() is about transports.
struct TransportSettings {
  std::string name;
  Incarnation incarnation;
  TimeUs call_budget_us = 0;
  std::string nixl_library;
  std::vector<std::string> nixl_backends;
  bool nixl_device_memory = false;
  std::vector<std::string> fabric_libraries;
  std::string fabric_provider;
  std::vector<std::string> fabric_rails;
  bool fabric_device_memory = false;
  bool fabric_pin_thread = false;
  std::shared_ptr<const CudaDevice> device;  ///< where the engine's cache is; null: in host memory
};

TransportSettings transport_settings_from(const py::dict& description, const Incarnation& incarnation,
                                          std::shared_ptr<const CudaDevice> device);
/// The transport that `settings` name, or the first that "auto" finds, and the source of the others. With
/// a policy all of them fail as it says.
void add_transports(EngineParts& parts, const TransportSettings& settings,
                    const std::optional<FaultPolicy>& policy);

}  // namespace kvpush::bindings
