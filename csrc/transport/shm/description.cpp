#include "transport/shm/description.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>

#include "transport/shm/fd.hpp"

namespace kvpush::shm {
namespace {

constexpr std::uint32_t kMagic = 0x4d53564bU;
constexpr std::uint8_t kVersion = 3;
constexpr std::size_t kMaxHostBytes = 128;
constexpr std::size_t kGpuUuidBytes = 32;

void put_uuid(ByteWriter& out, const Uuid& id) {
  out.put_raw(std::as_bytes(std::span(id.bytes)));
}

void get_uuid(ByteReader& in, Uuid& id) {
  const ByteView raw = in.get_raw(id.bytes.size());
  if (raw.size() == id.bytes.size()) std::memcpy(id.bytes.data(), raw.data(), raw.size());
}

void put_device(ByteWriter& out, const DeviceSlots& device) {
  out.put_text(device.gpu);
  out.put(device.address);
  out.put_raw(std::as_bytes(std::span(device.handle.bytes)));
}

/// False when it cannot be the description of any device memory.
bool get_device(ByteReader& in, DeviceSlots& device) {
  device.gpu = in.get_text(kGpuUuidBytes);
  device.address = in.get<std::uint64_t>();
  const ByteView handle = in.get_raw(sizeof(device.handle.bytes));
  if (handle.size() != sizeof(device.handle.bytes)) return false;
  std::memcpy(device.handle.bytes, handle.data(), handle.size());
  return device.gpu.size() == kGpuUuidBytes && device.address != 0;
}

Status mismatch(const std::string& what, const std::string& ours, const std::string& theirs) {
  return {Code::kHandshake, "shared memory: " + what + " differs: here " + ours + ", at the peer " + theirs};
}

}  // namespace

Result<std::string> host_identity() {
  const Fd boot(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  std::array<char, 36> boot_id{};
  if (!boot.ok() ||
      ::read(boot.get(), boot_id.data(), boot_id.size()) != static_cast<ssize_t>(boot_id.size())) {
    return Status(Code::kTransport, std::string("shared memory needs /proc/sys/kernel/random/boot_id: ") +
                                        std::strerror(errno));
  }
  struct stat net{};
  if (::stat("/proc/self/ns/net", &net) != 0) {
    return Status(Code::kTransport,
                  std::string("shared memory needs /proc/self/ns/net: ") + std::strerror(errno));
  }
  return std::string(boot_id.data(), boot_id.size()) + "/net:" + std::to_string(net.st_ino);
}

const Uuid& process_identity() {
  static const Uuid identity = random_uuid();
  return identity;
}

Bytes encode(const Description& description) {
  ByteWriter out;
  out.put(kMagic);
  out.put(kVersion);
  out.put(static_cast<std::uint8_t>(description.kind));
  out.put_text(description.host);
  put_uuid(out, description.engine);
  put_uuid(out, description.session);
  out.put(description.pid);
  out.put(description.slot_bytes);
  out.put(description.num_slots);
  put_uuid(out, description.process);
  put_identity(out, description.life);
  out.put(static_cast<std::uint8_t>(description.on_device));
  if (description.kind == DescriptionKind::kOffer && description.on_device)
    put_device(out, description.device);
  out.put(fnv1a(out.bytes()));
  return std::move(out).take();
}

Result<Description> decode_matching(ByteView bytes, const Description& expected) {
  ByteReader in(bytes);
  const auto magic = in.get<std::uint32_t>();
  const auto version = in.get<std::uint8_t>();
  if (!in.ok() || magic != kMagic) {
    return Status(Code::kHandshake, "not a shared-memory description (" + std::to_string(bytes.size()) +
                                        " bytes): both engines must use transport shm");
  }
  if (version != kVersion)
    return mismatch("format version", std::to_string(kVersion), std::to_string(version));
  Description got;
  const auto kind = in.get<std::uint8_t>();
  got.host = in.get_text(kMaxHostBytes);
  get_uuid(in, got.engine);
  get_uuid(in, got.session);
  got.pid = in.get<std::int32_t>();
  got.slot_bytes = in.get<std::uint64_t>();
  got.num_slots = in.get<std::uint32_t>();
  get_uuid(in, got.process);
  got.life = get_identity(in);
  const auto on_device = in.get<std::uint8_t>();
  got.on_device = on_device == 1;
  const bool offers_device = got.on_device && kind == static_cast<std::uint8_t>(DescriptionKind::kOffer);
  const bool plausible = on_device <= 1 && (!offers_device || get_device(in, got.device));
  const auto checksum = in.get<std::uint64_t>();
  if (!plausible || !in.done() || checksum != fnv1a(bytes.first(bytes.size() - sizeof(checksum)))) {
    return Status(Code::kHandshake,
                  "damaged shared-memory description of " + std::to_string(bytes.size()) + " bytes");
  }
  got.kind = static_cast<DescriptionKind>(kind);
  if (got.kind != expected.kind) {
    return Status(Code::kHandshake, expected.kind == DescriptionKind::kOffer
                                        ? "shared memory: expected an offer's description, got an answer's"
                                        : "shared memory: expected an answer's description, got an offer's");
  }
  if (got.host != expected.host) {
    return Status(
        Code::kHandshake,
        "shared memory needs both engines on one host and in one network namespace: this one is in " +
            expected.host + ", the peer in " + got.host);
  }
  if (got.session != expected.session) {
    return mismatch("session", to_string(expected.session), to_string(got.session));
  }
  if (got.slot_bytes != expected.slot_bytes) {
    return mismatch("slot_bytes", std::to_string(expected.slot_bytes), std::to_string(got.slot_bytes));
  }
  if (got.num_slots != expected.num_slots) {
    return mismatch("num_slots", std::to_string(expected.num_slots), std::to_string(got.num_slots));
  }
  return got;
}

}  // namespace kvpush::shm
