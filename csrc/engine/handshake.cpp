#include "engine/handshake.hpp"

#include <cstring>

namespace kvpush {
namespace {

constexpr std::uint32_t kHelloMagic = 0x6870766b;   // "kvph"
constexpr std::uint32_t kOfferMagic = 0x6f70766b;   // "kvpo"
constexpr std::uint32_t kAnswerMagic = 0x6170766b;  // "kvpa"
constexpr std::uint8_t kVersion = 1;
constexpr std::size_t kMaxFields = 65536;
constexpr std::size_t kMaxFieldBytes = 65536;
constexpr std::size_t kMaxPathBytes = 256;
constexpr std::size_t kMaxDescriptionBytes = 1U << 20U;
constexpr std::size_t kHashBytes = sizeof(std::uint64_t);

void put_id(ByteWriter& out, const Uuid& id) {
  out.put_raw(std::as_bytes(std::span(id.bytes)));
}

void get_id(ByteReader& in, Uuid& id) {
  const ByteView raw = in.get_raw(id.bytes.size());
  if (raw.size() == id.bytes.size()) std::memcpy(id.bytes.data(), raw.data(), raw.size());
}

Bytes get_bytes(ByteReader& in) {
  const ByteView raw = in.get_blob(kMaxDescriptionBytes);
  return {raw.begin(), raw.end()};
}

Bytes sealed(ByteWriter&& out) {
  out.put(fnv1a(out.bytes()));
  return std::move(out).take();
}

/// The content without its hash, after magic and version; an error says what the bytes are not.
Status open_content(ByteView bytes, std::uint32_t magic, const char* what, ByteView& content) {
  if (bytes.size() < kHashBytes + sizeof(magic) + sizeof(kVersion) || bytes.size() > kMaxHandshakeBytes) {
    return {Code::kHandshake, std::string("not ") + what + ": " + std::to_string(bytes.size()) + " bytes"};
  }
  content = bytes.first(bytes.size() - kHashBytes);
  ByteReader in(content);
  if (in.get<std::uint32_t>() != magic) return {Code::kHandshake, std::string("not ") + what + " of kvpush"};
  const auto version = in.get<std::uint8_t>();
  if (version != kVersion) {
    return {Code::kHandshake, "protocol version: theirs " + std::to_string(version) + ", ours " +
                                  std::to_string(kVersion) + "; run the same kvpush on both sides"};
  }
  if (ByteReader(bytes.last(kHashBytes)).get<std::uint64_t>() != fnv1a(content)) {
    return {Code::kHandshake, std::string(what) + " that is damaged: its hash does not match"};
  }
  content = content.subspan(sizeof(magic) + sizeof(version));
  return {};
}

}  // namespace

Bytes encode(const Hello& hello) {
  ByteWriter out;
  out.put(kHelloMagic);
  out.put(kVersion);
  put_id(out, hello.engine);
  out.put(static_cast<std::uint8_t>(hello.measures));
  out.put(static_cast<std::uint32_t>(hello.paths.size()));
  for (const Path& path : hello.paths) {
    out.put_text(path.name);
    out.put_text(path.reach);
    out.put(static_cast<std::uint8_t>(path.rank));
  }
  return sealed(std::move(out));
}

Bytes encode(const Offer& offer) {
  ByteWriter out;
  out.put(kOfferMagic);
  out.put(kVersion);
  put_id(out, offer.engine);
  put_id(out, offer.session);
  out.put_text(offer.transport);
  out.put(offer.slot_bytes);
  out.put(offer.num_slots);
  out.put(static_cast<std::uint32_t>(offer.identity.size()));
  for (const auto& [field, value] : offer.identity) {
    out.put_text(field);
    out.put_text(value);
  }
  out.put_blob(offer.description);
  return sealed(std::move(out));
}

Bytes encode(const Answer& answer) {
  ByteWriter out;
  out.put(kAnswerMagic);
  out.put(kVersion);
  put_id(out, answer.engine);
  put_id(out, answer.session);
  out.put(answer.box_bytes);
  out.put(static_cast<std::uint32_t>(answer.quiet_sessions.size()));
  for (const SessionId& session : answer.quiet_sessions) put_id(out, session);
  out.put_blob(answer.description);
  return sealed(std::move(out));
}

Result<Hello> decode_hello(ByteView bytes) {
  ByteView content;
  KVPUSH_TRY(open_content(bytes, kHelloMagic, "a hello", content));
  ByteReader in(content);
  Hello hello;
  get_id(in, hello.engine);
  const auto measures = in.get<std::uint8_t>();
  hello.measures = measures == 1;
  const auto num_paths = in.get<std::uint32_t>();
  if (measures > 1 || num_paths > kMaxPaths) return Status(Code::kHandshake, "malformed hello");
  for (std::uint32_t i = 0; i < num_paths && in.ok(); ++i) {
    Path path;
    path.name = in.get_text(kMaxPathBytes);
    path.reach = in.get_text(kMaxPathBytes);
    const auto rank = in.get<std::uint8_t>();
    if (rank > static_cast<std::uint8_t>(Path::Rank::kNetwork)) {
      return Status(Code::kHandshake, "malformed hello");
    }
    path.rank = static_cast<Path::Rank>(rank);
    hello.paths.push_back(std::move(path));
  }
  if (!in.done() || hello.engine == Incarnation{}) return Status(Code::kHandshake, "malformed hello");
  return hello;
}

Result<Offer> decode_offer(ByteView bytes) {
  ByteView content;
  KVPUSH_TRY(open_content(bytes, kOfferMagic, "an offer", content));
  ByteReader in(content);
  Offer offer;
  get_id(in, offer.engine);
  get_id(in, offer.session);
  offer.transport = in.get_text(kMaxFieldBytes);
  offer.slot_bytes = in.get<std::uint64_t>();
  offer.num_slots = in.get<std::uint32_t>();
  const auto num_fields = in.get<std::uint32_t>();
  if (num_fields > kMaxFields) return Status(Code::kHandshake, "malformed offer");
  for (std::uint32_t i = 0; i < num_fields && in.ok(); ++i) {
    std::string field = in.get_text(kMaxFieldBytes);
    // Sorted and unique, so that an offer has one byte form.
    if (!offer.identity.empty() && field <= offer.identity.rbegin()->first) {
      return Status(Code::kHandshake, "malformed offer");
    }
    offer.identity[std::move(field)] = in.get_text(kMaxFieldBytes);
  }
  offer.description = get_bytes(in);
  if (!in.done()) return Status(Code::kHandshake, "malformed offer");
  return offer;
}

Result<Answer> decode_answer(ByteView bytes) {
  ByteView content;
  KVPUSH_TRY(open_content(bytes, kAnswerMagic, "an answer", content));
  ByteReader in(content);
  Answer answer;
  get_id(in, answer.engine);
  get_id(in, answer.session);
  answer.box_bytes = in.get<std::uint64_t>();
  const auto num_quiet = in.get<std::uint32_t>();
  if (num_quiet > kMaxQuietSessions) return Status(Code::kHandshake, "malformed answer");
  answer.quiet_sessions.resize(num_quiet);
  for (SessionId& session : answer.quiet_sessions) get_id(in, session);
  answer.description = get_bytes(in);
  if (!in.done()) return Status(Code::kHandshake, "malformed answer");
  return answer;
}

}  // namespace kvpush
