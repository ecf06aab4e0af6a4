// Which NICs become rails, over a fake of libfabric (fake_fabric.hpp) and of /sys; and by name over a real
// one, if there is a libfabric.so.1 or KVPUSH_FABRIC_LIBRARY.
#include <sched.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "fake_fabric.hpp"
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"
#include "transport/fabric/topology.hpp"

namespace kvpush {
namespace {

namespace fs = std::filesystem;

/// A directory laid out as /sys; gone with this.
class Sysfs {
 public:
  Sysfs() {
    std::string name = (fs::temp_directory_path() / "kvpush-sysfs-XXXXXX").string();
    root_ = mkdtemp(name.data());
  }
  Sysfs(const Sysfs&) = delete;
  Sysfs& operator=(const Sysfs&) = delete;
  ~Sysfs() { fs::remove_all(root_); }

  [[nodiscard]] std::string root() const { return root_.string(); }
  /// `chain`: the bridges down to the device, as "pci0000:00/0000:00:01.0".
  void add(const std::string& chain, const std::string& pci, int numa_node) const {
    const fs::path device = root_ / "devices" / chain / pci;
    fs::create_directories(device);
    std::ofstream(device / "numa_node") << numa_node << '\n';
    fs::create_directories(root_ / "bus/pci/devices");
    fs::create_directory_symlink(device, root_ / "bus/pci/devices" / pci);
  }
  void add_node(int node, const std::string& cpus) const {
    const fs::path path = root_ / "devices/system/node" / ("node" + std::to_string(node));
    fs::create_directories(path);
    std::ofstream(path / "cpulist") << cpus << '\n';
  }
  void add_interface(const std::string& name, const std::string& pci, const std::string& speed) const {
    fs::create_directories(root_ / "class/net" / name);
    std::ofstream(root_ / "class/net" / name / "speed") << speed << '\n';
    if (pci.empty()) return;
    fs::create_directory_symlink(root_ / "bus/pci/devices" / pci, root_ / "class/net" / name / "device");
  }

 private:
  fs::path root_;
};

/// Two sockets, two switches on each; nic0 to nic3 one on each switch.
void add_two_sockets(const Sysfs& sysfs) {
  sysfs.add("pci0000:00/0000:00:01.0", "0000:10:00.0", 0);
  sysfs.add("pci0000:00/0000:00:02.0", "0000:11:00.0", 0);
  sysfs.add("pci0000:80/0000:80:01.0", "0000:12:00.0", 1);
  sysfs.add("pci0000:80/0000:80:02.0", "0000:13:00.0", 1);
}

std::vector<std::string> chosen(const FabricChoice& choice) {
  const auto api = fake_fabric::network({.num_nics = 4});
  const auto rails = choose_fabric_nics(*api, choice, true);
  if (!rails.ok()) return {rails.status().message()};
  std::vector<std::string> names;
  for (const FabricNic& nic : rails.value().nics) names.push_back(nic.domain);
  return names;
}

using Names = std::vector<std::string>;

TEST(the_nics_behind_the_gpus_bridge_are_rails) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add("pci0000:80/0000:80:02.0", "0000:90:00.0", 1);
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = "0000:90:00.0", .sysfs = sysfs.root()}),
           Names{"nic3"});
}

TEST(else_those_of_the_gpus_host_bridge) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add("pci0000:80/0000:80:03.0", "0000:90:00.0", 1);
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = "0000:90:00.0", .sysfs = sysfs.root()}),
           (Names{"nic2", "nic3"}));
}

TEST(else_those_of_the_gpus_numa_node) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add("pci0000:c0/0000:c0:01.0", "0000:d0:00.0", 1);
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = "0000:d0:00.0", .sysfs = sysfs.root()}),
           (Names{"nic2", "nic3"}));
}

TEST(without_a_gpu_those_of_the_threads_numa_node) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add_node(0, "");
  sysfs.add_node(1, "0-1023");
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = {}, .sysfs = sysfs.root()}),
           (Names{"nic2", "nic3"}));
}

TEST(where_nothing_is_known_the_first_is_the_rail) {
  const Sysfs sysfs;
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = {}, .sysfs = sysfs.root()}), Names{"nic0"});
  CHECK_EQ(chosen({.provider = {}, .rails = {}, .gpu_pci = "0000:90:00.0", .sysfs = sysfs.root()}),
           Names{"nic0"});
}

TEST(rails_by_name_keep_their_order) {
  CHECK_EQ(chosen({.provider = {}, .rails = {"nic2", "nic0"}, .gpu_pci = {}}), (Names{"nic2", "nic0"}));
  const Names unknown = chosen({.provider = {}, .rails = {"nic0", "mlx5_7"}, .gpu_pci = {}});
  CHECK(unknown.front().find("no 'mlx5_7'") != std::string::npos);
  CHECK(unknown.front().find("nic0, nic1, nic2, nic3") != std::string::npos);
  const Names twice = chosen({.provider = {}, .rails = {"nic1", "nic1"}, .gpu_pci = {}});
  CHECK(twice.front().find("two of them are nic1") != std::string::npos);
}

TEST(all_nics_are_listed_and_the_rails_marked) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  const auto api = fake_fabric::network({.delivers = false, .num_nics = 4});
  const auto nics =
      list_fabric_nics(*api, {.provider = {}, .rails = {"nic3"}, .gpu_pci = {}, .sysfs = sysfs.root()});
  if (!CHECK(nics.ok()) || !CHECK_EQ(nics.value().size(), std::size_t{4})) return;
  CHECK_EQ(nics.value().front().domain, std::string("nic3"));
  CHECK_EQ(nics.value().front().pci, std::string("0000:13:00.0"));
  CHECK_EQ(nics.value().front().numa_node, 1);
  for (const FabricNic& nic : nics.value()) CHECK_EQ(nic.chosen, nic.domain == "nic3");
}

TEST(the_polling_thread_is_pinned_if_that_is_asked_for) {
  struct Nobody final : TransportSink {
    void on_message(const SessionId& /*session*/, ByteView /*message*/) override {}
    void on_notice(const SessionId& /*session*/, ByteView /*notice*/) override {}
    void on_completed(TicketId /*ticket*/, Fate /*fate*/) override {}
    void on_lost(const SessionId& /*session*/, const std::string& /*reason*/) override {}
    void on_settled(TicketId /*ticket*/) override {}
  };
  cpu_set_t all;
  CHECK_EQ(sched_getaffinity(0, sizeof(all), &all), 0);
  std::size_t last = 0;
  for (std::size_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) last = CPU_ISSET(cpu, &all) ? cpu : last;
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add_node(0, "2000");
  sysfs.add_node(1, std::to_string(last) + ",2000");
  for (const bool pins : {false, true}) {
    FabricOptions options;
    options.incarnation = Incarnation{random_uuid()};
    options.rails = {"nic2", "nic0"};
    options.sysfs = sysfs.root();
    options.pin_thread = pins;
    const auto made = make_fabric_transport(fake_fabric::network({.num_nics = 4}), options);
    if (!CHECK(made.ok())) return;
    cpu_set_t now;
    int num_cpus = 0;
    std::thread([&] {
      Nobody sink;
      made.value()->poll(sink);
      CHECK_EQ(sched_getaffinity(0, sizeof(now), &now), 0);
      num_cpus = CPU_COUNT(&now);
    }).join();
    CHECK_EQ(num_cpus, pins ? 1 : CPU_COUNT(&all));
    CHECK(CPU_ISSET(last, &now));
  }
}

TEST(an_interface_tells_its_device_and_speed) {
  const Sysfs sysfs;
  add_two_sockets(sysfs);
  sysfs.add_interface("eth0", "0000:11:00.0", "100000");
  sysfs.add_interface("lo", "", "-1");
  const Topology topology(sysfs.root());
  CHECK_EQ(topology.pci_of_interface("eth0"), std::string("0000:11:00.0"));
  CHECK_EQ(topology.bits_per_s_of_interface("eth0"), std::uint64_t{100'000'000'000});
  CHECK(topology.pci_of_interface("lo").empty());
  CHECK_EQ(topology.bits_per_s_of_interface("lo"), std::uint64_t{0});
  CHECK_EQ(topology.bits_per_s_of_interface("none"), std::uint64_t{0});
}

TEST(a_rail_is_a_real_interface_or_address) {
  const char* path = std::getenv("KVPUSH_FABRIC_LIBRARY");
  const auto api = load_fabric_api({path != nullptr && *path != '\0' ? path : "libfabric.so.1"});
  if (!api.ok()) SKIP(api.status().message());
  const auto rails = choose_fabric_nics(
      *api.value(), {.provider = "tcp", .rails = {"lo", "127.0.0.2", "::1"}, .gpu_pci = {}}, true);
  if (!CHECK(rails.ok()) || !CHECK_EQ(rails.value().nics.size(), std::size_t{3})) return;
  CHECK_EQ(rails.value().nics[0].domain, std::string("lo"));
  CHECK_EQ(rails.value().nics[0].address, std::string("127.0.0.1"));
  CHECK_EQ(rails.value().nics[1].address, std::string("127.0.0.2"));
  CHECK_EQ(rails.value().nics[2].address, std::string("::1"));
  const auto missing =
      choose_fabric_nics(*api.value(), {.provider = "tcp", .rails = {"ib99"}, .gpu_pci = {}}, true);
  CHECK(missing.status().code() == Code::kUnsupported);
  CHECK(missing.status().message().find("lo (127.0.0.1)") != std::string::npos);
}

}  // namespace
}  // namespace kvpush
