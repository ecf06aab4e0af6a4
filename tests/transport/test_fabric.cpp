// The libfabric transport: what is its own, and the conformance suite over every provider that is here. Needs
// libfabric.so.1 where the loader finds it, or KVPUSH_FABRIC_LIBRARY, its path; without it those tests are
// skipped.
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.hpp"
#include "conformance.hpp"
#include "transport/fabric/arrivals.hpp"
#include "transport/fabric/description.hpp"
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"

namespace kvpush {
namespace {

std::shared_ptr<const FabricApi> library() {
  const char* path = std::getenv("KVPUSH_FABRIC_LIBRARY");
  auto api = load_fabric_api({path != nullptr && *path != '\0' ? path : "libfabric.so.1"});
  if (!api.ok()) SKIP(api.status().message());
  return api.value();
}

/// A box of `count` writes from `first`; its notice is the first write's number.
struct Box {
  std::uint64_t first = 0;
  std::uint32_t count = 0;
};

bool notice(FabricArrivals& arrivals, const Box& box) {
  ByteWriter out;
  out.put(box.first);
  return arrivals.add_notice(box.first, box.count, out.bytes());
}

std::vector<std::uint64_t> taken(FabricArrivals& arrivals) {
  std::vector<std::uint64_t> firsts;
  while (const std::optional<Bytes> each = arrivals.take()) {
    firsts.push_back(ByteReader(*each).get<std::uint64_t>());
  }
  return firsts;
}

TEST(a_box_is_complete_with_its_notice_and_all_its_writes) {
  FabricArrivals arrivals;
  CHECK(arrivals.add_write(1));
  CHECK(notice(arrivals, {0, 3}));
  CHECK(arrivals.add_write(2));
  CHECK(taken(arrivals).empty());
  CHECK(arrivals.add_write(0));
  CHECK_EQ(taken(arrivals), std::vector<std::uint64_t>{0});
  CHECK(arrivals.add_write(3));
  CHECK(taken(arrivals).empty());
  CHECK(notice(arrivals, {3, 1}));
  CHECK_EQ(taken(arrivals), std::vector<std::uint64_t>{3});
}

TEST(repeated_and_late_immediates_change_nothing) {
  FabricArrivals arrivals;
  CHECK(notice(arrivals, {0, 2}));
  CHECK(arrivals.add_write(0));
  // Counted twice it would complete the box without its second write.
  CHECK(!arrivals.add_write(0));
  CHECK(taken(arrivals).empty());
  CHECK(arrivals.add_write(1));
  CHECK_EQ(taken(arrivals), std::vector<std::uint64_t>{0});
  CHECK(!arrivals.add_write(0));
  CHECK(!arrivals.add_write(1));
  CHECK(!notice(arrivals, {0, 2}));
  CHECK(!arrivals.is_broken());
  // 65536 writes later the same 16 bits mean another write, and the late ones have left nothing behind.
  for (std::uint64_t first = 2; first < 65'536; ++first) {
    CHECK(arrivals.add_write(static_cast<std::uint16_t>(first)));
    CHECK(notice(arrivals, {first, 1}));
    CHECK_EQ(taken(arrivals), std::vector<std::uint64_t>{first});
  }
  CHECK(notice(arrivals, {65'536, 2}));
  CHECK(taken(arrivals).empty());
}

TEST(boxes_in_any_order_through_narrow_counters) {
  FabricArrivals arrivals;
  std::uint64_t random = 1;
  const auto below = [&](std::uint64_t limit) {
    random = random * 0xd1342543de82ef95U + 1;
    return (random >> 33U) % limit;
  };
  constexpr std::uint64_t kNumBoxes = 1U << 17U;
  constexpr std::size_t kUnderWay = 64;
  struct Event {
    Box box;
    bool is_notice = false;
    std::uint64_t write = 0;
  };
  std::vector<Event> events;
  std::map<std::uint64_t, std::uint32_t> missing;  // events of each box that are still to come
  std::uint64_t next_write = 0;
  std::uint64_t num_made = 0;
  std::uint64_t num_taken = 0;
  while (num_taken < kNumBoxes) {
    while (num_made < kNumBoxes && missing.size() < kUnderWay) {
      const Box box{next_write, static_cast<std::uint32_t>(1 + below(3))};
      events.push_back({.box = box, .is_notice = true});
      for (std::uint32_t i = 0; i < box.count; ++i) events.push_back({.box = box, .write = box.first + i});
      missing[box.first] = box.count + 1;
      next_write += box.count;
      ++num_made;
    }
    std::swap(events[below(events.size())], events.back());
    const Event event = events.back();
    events.pop_back();
    const bool fresh = event.is_notice ? notice(arrivals, event.box)
                                       : arrivals.add_write(static_cast<std::uint16_t>(event.write));
    if (!CHECK(fresh)) return;
    const bool complete = --missing[event.box.first] == 0;
    const std::vector<std::uint64_t> expected =
        complete ? std::vector{event.box.first} : std::vector<std::uint64_t>{};
    if (!CHECK_EQ(taken(arrivals), expected)) return;
    if (!complete) continue;
    missing.erase(event.box.first);
    ++num_taken;
  }
  CHECK(!arrivals.is_broken());
}

TEST(notices_that_cannot_be_are_found) {
  for (const Box lie : {Box{0, 0}, Box{FabricArrivals::kWindow, 1}, Box{UINT64_MAX, 1}, Box{1, UINT32_MAX},
                        Box{5, 2}, Box{3, 2}, Box{3, 9}}) {
    FabricArrivals arrivals;
    CHECK(notice(arrivals, {4, 2}));
    CHECK(!notice(arrivals, lie));
    CHECK(arrivals.is_broken());
  }
  FabricArrivals arrivals;
  CHECK(notice(arrivals, {4, 2}));
  CHECK(!notice(arrivals, {4, 2}));
  CHECK(!arrivals.is_broken());
}

FabricDescription sample_description() {
  FabricDescription sample;
  sample.session = SessionId{random_uuid()};
  sample.incarnation = Incarnation{random_uuid()};
  sample.protocol = "tcp;ofi_rxm protocol 11.1";
  sample.process = this_process();
  sample.rails = {{.endpoint = Bytes(16, std::byte{3}), .base = 0x7f0000000000, .key = 77},
                  {.endpoint = Bytes(7, std::byte{4}), .alive = false}};
  sample.landing = {.slot_bytes = 4096, .num_slots = 8, .max_writes = 2, .index = 5};
  return sample;
}

TEST(description_round_trip) {
  const FabricDescription sample = sample_description();
  const auto decoded = decode_fabric_description(encode(sample));
  if (!CHECK(decoded.ok())) return;
  CHECK(decoded.value().session == sample.session);
  CHECK(decoded.value().incarnation == sample.incarnation);
  CHECK_EQ(decoded.value().protocol, sample.protocol);
  CHECK_EQ(decoded.value().process.pid, sample.process.pid);
  if (!CHECK_EQ(decoded.value().rails.size(), sample.rails.size())) return;
  for (std::size_t i = 0; i < sample.rails.size(); ++i) {
    CHECK(decoded.value().rails[i].endpoint == sample.rails[i].endpoint);
    CHECK_EQ(decoded.value().rails[i].alive, sample.rails[i].alive);
    CHECK_EQ(decoded.value().rails[i].base, sample.rails[i].base);
    CHECK_EQ(decoded.value().rails[i].key, sample.rails[i].key);
  }
  CHECK_EQ(decoded.value().landing.slot_bytes, sample.landing.slot_bytes);
  CHECK_EQ(decoded.value().landing.num_slots, sample.landing.num_slots);
  CHECK_EQ(decoded.value().landing.max_writes, sample.landing.max_writes);
  CHECK_EQ(decoded.value().landing.index, sample.landing.index);
}

TEST(damaged_description_is_refused) {
  const Bytes good = encode(sample_description());
  for (std::size_t size = 0; size < good.size(); ++size) {
    CHECK(decode_fabric_description(ByteView(good).first(size)).status().code() == Code::kHandshake);
  }
  for (std::size_t i = 0; i < good.size(); ++i) {
    Bytes bad = good;
    bad[i] ^= std::byte{0x40};
    CHECK(decode_fabric_description(bad).status().code() == Code::kHandshake);
  }
  Bytes longer = good;
  longer.push_back(std::byte{0});
  CHECK(!decode_fabric_description(longer).ok());
}

TEST(impossible_landing_is_refused) {
  for (const FabricLandingInfo& landing :
       {FabricLandingInfo{.slot_bytes = UINT64_MAX / 2, .num_slots = 2, .max_writes = 1},
        FabricLandingInfo{.slot_bytes = UINT64_MAX / 4, .num_slots = 2, .max_writes = 1},
        FabricLandingInfo{.slot_bytes = 0, .num_slots = 1, .max_writes = 1},
        FabricLandingInfo{.slot_bytes = 1, .num_slots = 1}, FabricLandingInfo{.slot_bytes = 1},
        FabricLandingInfo{}}) {
    FabricDescription sample = sample_description();  // with keys, which no empty landing has
    sample.landing = landing;
    CHECK(!decode_fabric_description(encode(sample)).ok());
  }
  FabricDescription sample = sample_description();
  sample.landing = {};
  sample.rails = {{.endpoint = Bytes(16, std::byte{3})}};
  CHECK(decode_fabric_description(encode(sample)).ok());
}

TEST(impossible_rails_are_refused) {
  const FabricRailInfo good{.endpoint = Bytes(16, std::byte{3})};
  const FabricRailInfo dead{.endpoint = Bytes(16, std::byte{3}), .alive = false};
  for (const std::vector<FabricRailInfo>& rails :
       {std::vector<FabricRailInfo>{}, std::vector{FabricRailInfo{}}, std::vector{good, FabricRailInfo{}},
        std::vector{dead, dead}, std::vector(kFabricMaxRails + 1, good)}) {
    FabricDescription sample = sample_description();
    sample.rails = rails;
    CHECK(!decode_fabric_description(encode(sample)).ok());
  }
}

TEST(unusable_libraries) {
  CHECK(load_fabric_api({}).status().code() == Code::kInvalidArgument);
  const auto missing = load_fabric_api({"/nowhere/one.so", "/nowhere/two.so"});
  CHECK(missing.status().code() == Code::kTransport);
  CHECK(missing.status().message().find("one.so") != std::string::npos);
  CHECK(missing.status().message().find("two.so") != std::string::npos);
  const auto foreign = load_fabric_api({"libc.so.6"});
  CHECK(foreign.status().code() == Code::kUnsupported);
  CHECK(foreign.status().message().find("fi_") != std::string::npos);
}

TEST(unknown_provider) {
  FabricOptions options;
  options.incarnation = Incarnation{random_uuid()};
  options.provider = "carrier_pigeon";
  const auto made = make_fabric_transport(library(), options);
  CHECK(made.status().code() == Code::kUnsupported);
  CHECK(made.status().message().find("carrier_pigeon") != std::string::npos);
}

TEST(an_address_of_another_host_is_refused) {
  FabricOptions options;
  options.incarnation = Incarnation{random_uuid()};
  options.provider = "tcp";
  options.rails = {"203.0.113.9"};
  CHECK(!make_fabric_transport(library(), options).ok());
}

conformance::Subject over(const std::string& label, const std::string& provider,
                          const std::vector<std::string>& rails = {}) {
  conformance::Subject subject;
  subject.label = label;
  subject.make = [provider, rails](const Incarnation& self) -> std::unique_ptr<Transport> {
    const std::shared_ptr<const FabricApi> api = library();
    const auto infos = find_fabric_providers(*api, {provider, false, false, {}});
    if (!infos.ok()) SKIP(infos.status().message());
    // A layered provider answers for the name of what it is layered on.
    if (const std::string name = infos.value()->fabric_attr->prov_name; name != provider) {
      SKIP("libfabric " + describe_fabric_version(api->version()) + " has " + name + " for " + provider);
    }
    FabricOptions options;
    options.incarnation = self;
    options.provider = provider;
    options.rails = rails;
    options.max_write_bytes = 10'000;  // boxes of the suite are split
    options.min_stripe_bytes = 4096;
    auto made = make_fabric_transport(api, options);
    if (!made.ok()) check::fail(__FILE__, __LINE__, made.status().message());
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}

conformance::Subject fabric_tcp() {
  return over("fabric_tcp", "tcp");
}
conformance::Subject fabric_rxm() {
  conformance::Subject subject = over("fabric_rxm", "tcp;ofi_rxm");
  // Its descriptor is silent when a peer dies: an engine finds that at its next ping.
  subject.detects_death = false;
  return subject;
}
void skip_net() {
#ifdef __SANITIZE_ADDRESS__
  SKIP("libfabric 1.17 leaks in its provider net, which the address sanitizer reports");
#endif
}
conformance::Subject fabric_net() {
  skip_net();
  return over("fabric_net", "net");
}
conformance::Subject fabric_shm() {
  return over("fabric_shm", "shm");
}
const std::vector<std::string> kTwoRails = {"127.0.0.1", "127.0.0.2"};
conformance::Subject fabric_tcp_rails() {
  return over("fabric_tcp_rails", "tcp", kTwoRails);
}
conformance::Subject fabric_rxm_rails() {
  conformance::Subject subject = over("fabric_rxm_rails", "tcp;ofi_rxm", kTwoRails);
  subject.detects_death = false;
  return subject;
}
conformance::Subject fabric_net_rails() {
  skip_net();
  return over("fabric_net_rails", "net", kTwoRails);
}
KVPUSH_TRANSPORT_CONFORMANCE(fabric_tcp_rails)
KVPUSH_TRANSPORT_CONFORMANCE(fabric_rxm_rails)
KVPUSH_TRANSPORT_CONFORMANCE(fabric_net_rails)
KVPUSH_TRANSPORT_CONFORMANCE(fabric_tcp)
KVPUSH_TRANSPORT_CONFORMANCE(fabric_rxm)
KVPUSH_TRANSPORT_CONFORMANCE(fabric_net)
// In one process its endpoints use each other's memory, which goes with the first that closes: it crashes.
KVPUSH_CONFORMANCE_TEST(fabric_shm, process_source)
KVPUSH_CONFORMANCE_TEST(fabric_shm, process_landing)
KVPUSH_CONFORMANCE_TEST(fabric_shm, killed_source)
KVPUSH_CONFORMANCE_TEST(fabric_shm, killed_landing)
KVPUSH_CONFORMANCE_TEST(fabric_shm, child_entry)

}  // namespace
}  // namespace kvpush
