// Where PCI devices, network interfaces and processes are in this host, as sysfs tells it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvpush {

/// Reads below `root`, which is /sys but for tests. What cannot be read counts as unknown. Threads: any.
class Topology {
 public:
  explicit Topology(std::string root) : root_(std::move(root)) {}

  /// -1: unknown. `pci` as "0000:3b:00.0".
  [[nodiscard]] int numa_node_of(const std::string& pci) const;
  /// How many bridges, from the host's on, two devices have in common; 0: none, or unknown.
  [[nodiscard]] std::size_t num_shared_bridges(const std::string& pci, const std::string& other) const;
  /// The PCI device of a network interface; empty: it has none.
  [[nodiscard]] std::string pci_of_interface(const std::string& name) const;
  /// 0: unknown.
  [[nodiscard]] std::uint64_t bits_per_s_of_interface(const std::string& name) const;
  /// The node of all CPUs that this thread may run on; -1: several, or unknown.
  [[nodiscard]] int numa_node_of_thread() const;
  /// Pins the calling thread to the node's CPUs among those that it may run on; false if there are none.
  [[nodiscard]] bool pin_thread(int numa_node) const;

 private:
  [[nodiscard]] std::vector<int> cpus_of_node(int numa_node) const;

  std::string root_;
};

}  // namespace kvpush
