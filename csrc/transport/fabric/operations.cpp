#include "transport/fabric/operations.hpp"

#include <algorithm>
#include <cstring>

namespace kvpush {

std::optional<FabricFrame> decode_fabric_frame(ByteView bytes) {
  ByteReader in(bytes);
  FabricFrame frame;
  const ByteView id = in.get_raw(frame.session.bytes.size());
  frame.kind = static_cast<FabricKind>(in.get<std::uint8_t>());
  frame.num_writes = in.get<std::uint32_t>();
  frame.first_write = in.get<std::uint64_t>();
  if (!in.ok() || frame.kind < FabricKind::kMessage || frame.kind > FabricKind::kQuiet) return std::nullopt;
  std::memcpy(frame.session.bytes.data(), id.data(), id.size());
  frame.payload = in.get_raw(in.remaining());
  return frame;
}

void FabricOperations::use(std::byte* memory, std::size_t num_receives) {
  const auto add = [&](FabricOperationKind kind) {
    FabricOperation& operation = all_.emplace_back();
    operation.kind = kind;
    operation.buffer = {memory, kFabricBufferBytes};
    memory += kFabricBufferBytes;
    return &operation;
  };
  for (std::size_t i = 0; i < kNumSends; ++i) idle_messages_.push_back(add(FabricOperationKind::kSend));
  for (std::size_t i = 0; i < std::min(num_receives, kNumReceives); ++i) {
    idle_receives_.push_back(add(FabricOperationKind::kReceive));
  }
}

FabricMessage* FabricOperations::take_message(const SessionId& session, FabricKind kind,
                                              std::uint32_t num_writes, std::uint64_t first_write,
                                              ByteView payload) {
  if (idle_messages_.empty()) return nullptr;
  FabricMessage* const message = idle_messages_.back();
  idle_messages_.pop_back();
  message->session = session;
  message->post = 0;
  std::byte* at = message->buffer.data();
  const auto put = [&](const void* data, std::size_t size) {
    if (size != 0) std::memcpy(at, data, size);
    at += size;
  };
  put(session.bytes.data(), session.bytes.size());
  put(&kind, sizeof(kind));
  put(&num_writes, sizeof(num_writes));
  put(&first_write, sizeof(first_write));
  put(payload.data(), payload.size());
  message->size_bytes = kFabricFrameBytes + payload.size();
  return message;
}

FabricOperation& FabricOperations::take_write() {
  if (idle_writes_.empty()) {
    FabricOperation& operation = all_.emplace_back();
    operation.kind = FabricOperationKind::kWrite;
    return operation;
  }
  FabricOperation* const operation = idle_writes_.back();
  idle_writes_.pop_back();
  return *operation;
}

void FabricOperations::give_back(FabricOperation& operation) {
  (operation.kind == FabricOperationKind::kSend ? idle_messages_ : idle_writes_).push_back(&operation);
}

bool FabricOperations::owns(const void* context) const {
  return std::any_of(all_.begin(), all_.end(),
                     [&](const FabricOperation& operation) { return &operation == context; });
}

}  // namespace kvpush
