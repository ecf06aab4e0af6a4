#include "protocol/messages.hpp"

#include <algorithm>
#include <array>

namespace kvpush::protocol {
namespace {

constexpr std::uint32_t kMagic = 0x3170766b;  // "kvp1"
constexpr std::size_t kHashBytes = sizeof(std::uint64_t);
constexpr std::size_t kRangeBytes = 2 * sizeof(std::uint32_t);

constexpr std::array<std::string_view, std::variant_size_v<Body>> kNames = {
    "INTENT", "OPEN", "CANCEL", "DONE", "CREDIT", "ACCEPT", "BOX", "END", "FAIL", "PING", "BYE"};

void put(ByteWriter& out, const Intent& m) {
  out.put(m.transfer);
  out.put_text(m.key);
}
void put(ByteWriter& out, const Open& m) {
  out.put(m.transfer);
  out.put_text(m.key);
  out.put_blob(m.digest);
  out.put(static_cast<std::uint32_t>(m.wanted.size()));
  for (const auto& ranges : m.wanted) {
    out.put(static_cast<std::uint32_t>(ranges.size()));
    for (const PositionRange& range : ranges) {
      out.put(range.begin);
      out.put(range.end);
    }
  }
}
void put(ByteWriter& out, const Cancel& m) {
  out.put(m.transfer);
}
void put(ByteWriter& out, const Done& m) {
  out.put(m.transfer);
}
void put(ByteWriter& out, const Credit& m) {
  out.put(static_cast<std::uint32_t>(m.slots.size()));
  for (const std::uint32_t slot : m.slots) out.put(slot);
}
void put(ByteWriter& out, const Accept& m) {
  out.put(m.transfer);
}
void put(ByteWriter& out, const BoxNotice& m) {
  out.put(m.transfer);
  out.put(m.slot);
  for (const std::uint32_t field : {m.box.group, m.box.plane_begin, m.box.plane_end, m.box.head_begin,
                                    m.box.head_end, m.box.pos_begin, m.box.pos_end}) {
    out.put(field);
  }
  out.put(m.checksum);
}
void put(ByteWriter& out, const End& m) {
  out.put(m.transfer);
  out.put(m.num_boxes);
  out.put(m.num_units);
}
void put(ByteWriter& out, const Fail& m) {
  out.put(m.transfer);
  out.put(static_cast<std::uint8_t>(m.code));
}
void put(ByteWriter& out, const Ping& m) {
  out.put(m.messages_sent);
  out.put(m.boxes_completed);
}
void put(ByteWriter&, const Bye&) {}

Bytes copy_of(ByteView view) {
  return {view.begin(), view.end()};
}

Open get_open(ByteReader& in) {
  Open m;
  m.transfer = in.get<TransferId>();
  m.key = in.get_text(kMaxKeyBytes);
  m.digest = copy_of(in.get_blob(kMaxDigestBytes));
  const auto num_groups = in.get<std::uint32_t>();
  if (num_groups > kMaxGroups) {
    in.get_raw(SIZE_MAX);
    return m;
  }
  m.wanted.resize(num_groups);
  for (auto& ranges : m.wanted) {
    const auto num_ranges = in.get<std::uint32_t>();
    if (num_ranges > in.remaining() / kRangeBytes) {
      in.get_raw(SIZE_MAX);
      return m;
    }
    ranges.resize(num_ranges);
    for (PositionRange& range : ranges) {
      range.begin = in.get<std::uint32_t>();
      range.end = in.get<std::uint32_t>();
    }
  }
  return m;
}

Credit get_credit(ByteReader& in) {
  Credit m;
  const auto num_slots = in.get<std::uint32_t>();
  if (num_slots > in.remaining() / sizeof(std::uint32_t)) {
    in.get_raw(SIZE_MAX);
    return m;
  }
  m.slots.resize(num_slots);
  for (std::uint32_t& slot : m.slots) slot = in.get<std::uint32_t>();
  return m;
}

BoxNotice get_box(ByteReader& in) {
  BoxNotice m;
  m.transfer = in.get<TransferId>();
  m.slot = in.get<std::uint32_t>();
  for (std::uint32_t* field : {&m.box.group, &m.box.plane_begin, &m.box.plane_end, &m.box.head_begin,
                               &m.box.head_end, &m.box.pos_begin, &m.box.pos_end}) {
    *field = in.get<std::uint32_t>();
  }
  m.checksum = in.get<std::uint64_t>();
  return m;
}

Fail get_fail(ByteReader& in) {
  Fail m;
  m.transfer = in.get<TransferId>();
  const auto code = in.get<std::uint8_t>();
  // A code from a newer peer still ends the transfer.
  m.code = code > 0 && code < kNumFailCodes ? static_cast<FailCode>(code) : FailCode::kBreach;
  return m;
}

Body get_body(std::uint8_t type, ByteReader& in) {
  switch (type) {
    case 0: {
      const auto transfer = in.get<TransferId>();
      return Intent{transfer, in.get_text(kMaxKeyBytes)};
    }
    case 1: return get_open(in);
    case 2: return Cancel{in.get<TransferId>()};
    case 3: return Done{in.get<TransferId>()};
    case 4: return get_credit(in);
    case 5: return Accept{in.get<TransferId>()};
    case 6: return get_box(in);
    case 7: {
      End m;
      m.transfer = in.get<TransferId>();
      m.num_boxes = in.get<std::uint64_t>();
      m.num_units = in.get<std::uint64_t>();
      return m;
    }
    case 8: return get_fail(in);
    case 9: {
      Ping m;
      m.messages_sent = in.get<std::uint64_t>();
      m.boxes_completed = in.get<std::uint64_t>();
      return m;
    }
    default: return Bye{};
  }
}

}  // namespace

Bytes encode(const Envelope& envelope) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  out.put(static_cast<std::uint8_t>(envelope.body.index()));
  out.put_raw(std::as_bytes(std::span(envelope.sender.bytes)));
  out.put(envelope.seq);
  std::visit([&out](const auto& body) { put(out, body); }, envelope.body);
  out.put(fnv1a(out.bytes()));
  return std::move(out).take();
}

Result<Envelope> decode(ByteView bytes) {
  if (bytes.size() <= kHashBytes || bytes.size() > kMaxMessageBytes) {
    return Status(Code::kInvalidArgument, "message of " + std::to_string(bytes.size()) + " bytes");
  }
  const ByteView content = bytes.first(bytes.size() - kHashBytes);
  if (ByteReader(bytes.last(kHashBytes)).get<std::uint64_t>() != fnv1a(content)) {
    return Status(Code::kInvalidArgument, "message hash does not match");
  }
  ByteReader in(content);
  const auto magic = in.get<std::uint32_t>();
  const auto version = in.get<std::uint8_t>();
  const auto type = in.get<std::uint8_t>();
  if (magic != kMagic || version != kVersion) {
    return Status(Code::kInvalidArgument,
                  "message version " + std::to_string(version) + ", ours is " + std::to_string(kVersion));
  }
  if (type >= kNames.size()) {
    return Status(Code::kInvalidArgument, "message type " + std::to_string(type));
  }
  Envelope envelope;
  const ByteView sender = in.get_raw(envelope.sender.bytes.size());
  if (sender.size() == envelope.sender.bytes.size()) {
    std::memcpy(envelope.sender.bytes.data(), sender.data(), sender.size());
  }
  envelope.seq = in.get<std::uint64_t>();
  envelope.body = get_body(type, in);
  if (!in.done()) {
    return Status(Code::kInvalidArgument, std::string(kNames[type]) + " message of wrong length");
  }
  return envelope;
}

std::string_view name_of(const Body& body) noexcept {
  return kNames[body.index()];
}

}  // namespace kvpush::protocol
