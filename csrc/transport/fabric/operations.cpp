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
  if (!in.ok() || frame.kind < FabricKind::kMessage || frame.kind > FabricKind::kTrial) return std::nullopt;
  std::memcpy(frame.session.bytes.data(), id.data(), id.size());
  frame.payload = in.get_raw(in.remaining());
  return frame;
}

FabricOperation& FabricOperations::add(FabricOperationKind kind) {
  FabricOperation& operation = all_.emplace_back();
  operation.kind = kind;
  if (kind != FabricOperationKind::kWrite) {
    operation.buffer = {next_buffer_, kFabricBufferBytes};
    next_buffer_ += kFabricBufferBytes;
  }
  return operation;
}

void FabricOperations::use(std::byte* memory) {
  next_buffer_ = memory;
  for (std::size_t i = 0; i < kNumSends; ++i) idle_messages_.push_back(&add(FabricOperationKind::kSend));
}

std::vector<FabricOperation*> FabricOperations::add_receives(std::uint32_t rail, std::size_t count) {
  std::vector<FabricOperation*> receives;
  for (std::size_t i = 0; i < std::min(count, kNumReceives); ++i) {
    receives.push_back(&add(FabricOperationKind::kReceive));
    receives.back()->rail = rail;
  }
  return receives;
}

FabricMessage* FabricOperations::take_message(const SessionId& session, FabricKind kind,
                                              std::uint32_t num_writes, std::uint64_t first_write,
                                              ByteView payload) {
  if (idle_messages_.empty()) return nullptr;
  FabricMessage* const message = idle_messages_.back();
  idle_messages_.pop_back();
  message->session = session;
  message->post = 0;
  message->frame = kind;
  message->num_tries = 0;
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
  if (idle_writes_.empty()) return add(FabricOperationKind::kWrite);
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

std::vector<FabricOperation*> FabricOperations::under_way(std::uint32_t rail) {
  std::vector<FabricOperation*> found;
  for (FabricOperation& operation : all_) {
    if (operation.under_way && operation.rail == rail) found.push_back(&operation);
  }
  return found;
}

}  // namespace kvpush
