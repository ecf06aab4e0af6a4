#include "transport/fabric/topology.hpp"

#include <sched.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

namespace kvpush {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// -1 for what is no number.
std::int64_t to_number(const std::string& text) {
  std::int64_t number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() ? number : -1;
}

/// The device's bridges and itself, from the host's bridge on.
std::vector<std::string> chain_of(const std::string& root, const std::string& pci) {
  std::vector<std::string> chain;
  std::error_code error;
  const fs::path path = pci.empty() ? fs::path() : fs::canonical(root + "/bus/pci/devices/" + pci, error);
  if (error) return chain;
  for (const fs::path& part : path) {
    if (!chain.empty() || part.string().starts_with("pci")) chain.push_back(part.string());
  }
  return chain;
}

bool may_run_on(const cpu_set_t& allowed, int cpu) {
  return cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(static_cast<std::size_t>(cpu), &allowed);
}

}  // namespace

int Topology::numa_node_of(const std::string& pci) const {
  if (pci.empty()) return -1;
  return static_cast<int>(to_number(first_line(root_ + "/bus/pci/devices/" + pci + "/numa_node")));
}

std::size_t Topology::num_shared_bridges(const std::string& pci, const std::string& other) const {
  const std::vector<std::string> one = chain_of(root_, pci);
  const std::vector<std::string> two = chain_of(root_, other);
  std::size_t shared = 0;
  while (shared < one.size() && shared < two.size() && one[shared] == two[shared]) ++shared;
  return shared;
}

std::string Topology::pci_of_interface(const std::string& name) const {
  std::error_code error;
  const fs::path device = fs::canonical(root_ + "/class/net/" + name + "/device", error);
  const std::string last = error ? std::string() : device.filename().string();
  // Anything else is a device of a virtual bus.
  return last.find(':') != std::string::npos ? last : std::string();
}

std::uint64_t Topology::bits_per_s_of_interface(const std::string& name) const {
  const std::int64_t megabits = to_number(first_line(root_ + "/class/net/" + name + "/speed"));
  return megabits > 0 ? static_cast<std::uint64_t>(megabits) * 1'000'000 : 0;
}

std::vector<int> Topology::cpus_of_node(int numa_node) const {
  std::vector<int> cpus;
  std::istringstream list(
      first_line(root_ + "/devices/system/node/node" + std::to_string(numa_node) + "/cpulist"));
  for (std::string range; std::getline(list, range, ',');) {
    const std::size_t dash = range.find('-');
    const std::int64_t first = to_number(range.substr(0, dash));
    const std::int64_t last = dash == std::string::npos ? first : to_number(range.substr(dash + 1));
    if (first < 0 || last >= CPU_SETSIZE) continue;
    for (std::int64_t cpu = first; cpu <= last; ++cpu) cpus.push_back(static_cast<int>(cpu));
  }
  return cpus;
}

int Topology::numa_node_of_thread() const {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return -1;
  const int num_allowed = CPU_COUNT(&allowed);
  constexpr int kMaxNodes = 1024;
  for (int node = 0; node < kMaxNodes; ++node) {
    int num_here = 0;
    const std::vector<int> cpus = cpus_of_node(node);
    for (const int cpu : cpus) num_here += may_run_on(allowed, cpu) ? 1 : 0;
    if (num_here != 0) return num_here == num_allowed ? node : -1;
  }
  return -1;
}

bool Topology::pin_thread(int numa_node) const {
  cpu_set_t allowed;
  cpu_set_t wanted;
  CPU_ZERO(&wanted);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
  for (const int cpu : cpus_of_node(numa_node)) {
    if (may_run_on(allowed, cpu)) CPU_SET(static_cast<std::size_t>(cpu), &wanted);
  }
  return CPU_COUNT(&wanted) != 0 && sched_setaffinity(0, sizeof(wanted), &wanted) == 0;
}

}  // namespace kvpush
