// Writes the corpora of the fuzz targets: one valid input per file, and a few with one byte too few, too many
// or changed. make_corpus FOLDER
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "engine/handshake.hpp"
#include "protocol/messages.hpp"
#include "transport/fabric/description.hpp"
#include "transport/fabric/operations.hpp"
#include "transport/nixl/description.hpp"
#include "transport/shm/description.hpp"

namespace {

using namespace kvpush;

template <typename Id>
Id id(std::uint8_t fill) {
  Id made;
  made.bytes.fill(fill);
  return made;
}

Bytes text(std::size_t size) {
  return Bytes(size, std::byte{'k'});
}

class Folder {
 public:
  explicit Folder(const std::filesystem::path& path) : path_(path) {
    std::filesystem::create_directories(path);
  }

  void add(const std::string& name, const Bytes& bytes) {
    write(name, bytes);
    if (++count_ % 4 != 1) return;
    Bytes shorter(bytes.begin(), bytes.end() - 1);
    write(name + "_short", shorter);
    Bytes longer = bytes;
    longer.push_back(std::byte{0});
    write(name + "_long", longer);
    Bytes changed = bytes;
    changed[changed.size() / 2] ^= std::byte{0x80};
    write(name + "_changed", changed);
  }

 private:
  void write(const std::string& name, const Bytes& bytes) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  }

  std::filesystem::path path_;
  int count_ = 0;
};

void messages(Folder out) {
  using namespace protocol;
  const std::string key(kMaxKeyBytes, 'k');
  std::vector<std::pair<std::string, Body>> bodies = {
      {"intent", Intent{1, "request-1"}},
      {"intent_longest", Intent{UINT64_MAX, key}},
      {"open", Open{2, "request-1", text(32), {{{0, 4}, {6, 9}}, {}}}},
      {"open_longest", Open{3, key, text(kMaxDigestBytes), {{{0, INT32_MAX}}}}},
      {"open_empty", Open{4, "", {}, {}}},
      {"cancel", Cancel{5}},
      {"done", Done{6}},
      {"credit", Credit{{0, 1, 7}}},
      {"credit_none", Credit{{}}},
      {"accept", Accept{8}},
      {"box", BoxNotice{9, 3, {0, 0, 2, 0, 1, 4, 6}, 0x0123456789abcdefU}},
      {"end", End{10, 4, 16}},
      {"fail", Fail{11, FailCode::kTaken}},
      {"ping", Ping{12, 13}},
      {"bye", Bye{}},
  };
  std::uint64_t seq = 0;
  for (const auto& [name, body] : bodies) out.add(name, encode(Envelope{id<Incarnation>(1), seq++, body}));
}

void handshake(Folder out) {
  Offer offer;
  offer.engine = id<Incarnation>(1);
  offer.session = id<SessionId>(7);
  offer.transport = "shm";
  offer.slot_bytes = 4096;
  offer.num_slots = 8;
  out.add("offer_bare", encode(offer));
  offer.identity = {{"group 0 block_size", "16"}, {"model", "test"}, {"plane 0 name", "layer.0"}};
  offer.description = text(90);
  out.add("offer", encode(offer));
  Answer answer;
  answer.engine = id<Incarnation>(2);
  answer.session = offer.session;
  answer.box_bytes = 4096;
  out.add("answer_bare", encode(answer));
  answer.quiet_sessions = {id<SessionId>(3), id<SessionId>(4)};
  answer.description = text(90);
  out.add("answer", encode(answer));
  answer.quiet_sessions.assign(kMaxQuietSessions, id<SessionId>(5));
  out.add("answer_longest", encode(answer));
  const Hello hello{answer.engine,
                    true,
                    {{"shm", "host/net:1", Path::Rank::kHost},
                     {"fabric", "efa protocol 1.0", Path::Rank::kRdma},
                     {"nixl", "", Path::Rank::kNetwork}}};
  out.add("hello", encode(hello));
}

void shm_description(Folder out) {
  for (const auto kind : {shm::DescriptionKind::kOffer, shm::DescriptionKind::kAnswer}) {
    const std::string name = kind == shm::DescriptionKind::kOffer ? "offer" : "answer";
    shm::Description description{.kind = kind,
                                 .host = "host/net:1",
                                 .engine = id<Incarnation>(1),
                                 .session = id<SessionId>(7),
                                 .pid = 42,
                                 .slot_bytes = 4096,
                                 .num_slots = 8,
                                 .process = id<Uuid>(9)};
    out.add(name, encode(description));
    description.on_device = true;
    description.device = {std::string(32, 'a'), 0x7f0000000000, {}};
    out.add(name + "_on_device", encode(description));
    description.host = std::string(128, 'h');
    out.add(name + "_elsewhere", encode(description));
  }
}

void nixl_description(Folder out) {
  NixlDescription description;
  description.session = id<SessionId>(7);
  description.incarnation = id<Incarnation>(1);
  description.backends = "UCX";
  description.process = {"00000000-0000-4000-8000-000000000000", 4026531836, 4026531834, 42, 1000};
  description.connection = text(64);
  out.add("p", encode(description));
  description.landing = {0x7f0000000000, 1U << 20U, 8, {}, text(40)};
  out.add("d", encode(description));
  description.landing.place = {kNixlVram, 3};
  out.add("d_on_device", encode(description));
  description.process = {};
  out.add("d_of_nobody", encode(description));
}

void fabric_description(Folder out) {
  FabricDescription description;
  description.session = id<SessionId>(7);
  description.incarnation = id<Incarnation>(1);
  description.protocol = "tcp;ofi_rxm protocol 11.1";
  description.process = {"00000000-0000-4000-8000-000000000000", 4026531836, 4026531834, 42, 1000};
  description.rails = {{.endpoint = text(16)}};
  out.add("p", encode(description));
  description.landing = {.slot_bytes = 1U << 20U, .num_slots = 8, .max_writes = 4, .index = 5};
  description.rails[0] = {.endpoint = text(16), .base = 0x7f0000000000, .key = 77};
  out.add("d", encode(description));
  description.rails.push_back({.endpoint = text(16), .alive = false, .key = 78});
  out.add("d_with_a_dead_rail", encode(description));
  description.process = {};
  out.add("d_of_nobody", encode(description));
}

void fabric_frame(Folder out) {
  const auto session = id<SessionId>(7);
  const auto frame = [&](FabricKind kind, std::uint32_t num_writes, std::uint64_t first_write,
                         ByteView payload) {
    ByteWriter writer;
    writer.put_raw(std::as_bytes(std::span(session.bytes)));
    writer.put(static_cast<std::uint8_t>(kind));
    writer.put(num_writes);
    writer.put(first_write);
    writer.put_raw(payload);
    return std::move(writer).take();
  };
  out.add("message", frame(FabricKind::kMessage, 0, 0, text(100)));
  out.add("notice", frame(FabricKind::kNotice, 1, 0, text(40)));
  out.add("notice_of_several", frame(FabricKind::kNotice, 5, 9, text(40)));
  out.add("notice_of_none", frame(FabricKind::kNotice, 0, 0, text(40)));
  out.add("notice_of_all", frame(FabricKind::kNotice, 1U << 15U, 0, {}));
  out.add("notice_at_the_end", frame(FabricKind::kNotice, 2, (1U << 15U) - 2, {}));
  out.add("notice_wraps", frame(FabricKind::kNotice, 2, UINT64_MAX, {}));
  out.add("closed", frame(FabricKind::kClosed, 0, 0, {}));
  out.add("quiet", frame(FabricKind::kQuiet, 0, 0, {}));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "make_corpus FOLDER\n";
    return 2;
  }
  const std::filesystem::path root = argv[1];
  messages(Folder(root / "messages"));
  handshake(Folder(root / "handshake"));
  shm_description(Folder(root / "shm_description"));
  nixl_description(Folder(root / "nixl_description"));
  fabric_description(Folder(root / "fabric_description"));
  fabric_frame(Folder(root / "fabric_frame"));
  return 0;
}
