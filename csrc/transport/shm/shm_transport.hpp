// Shared memory between two processes of one host. P packs straight into D's slots; a post is its notice.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "shim/cuda_device.hpp"
#include "transport/process_identity.hpp"
#include "transport/shm/description.hpp"
#include "transport/shm/fd.hpp"
#include "transport/shm/session.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// See transport.hpp for the calls. What is particular here:
/// - P: slot_memory() stays valid until close_session(), also after on_lost; close_session() unmaps, so no
///   pack into a slot may be running or follow. A session that is never closed keeps D's landing not quiet.
/// - The peer's exit, orderly or not, is reported by the next poll(), after all it had published.
/// - Completions are always kCompleted: the data was in place before the post.
/// - Slot i lies at i * slot_bytes; slot 0 is aligned to 4096, so all are where slot_bytes is a multiple.
/// - release_landing() of slots in the segment is safe at any time: the pages serve no other session. Until
/// the
///   landing is quiet the peer merely keeps them allocated.
/// - With a `device`, slots are where its kernels reach them. D offers device memory; P takes it when its own
///   device can open it once D has connected, and then slot_memory() and landing() are addresses of that
///   device. Otherwise the slots are in the segment, which every side with a device pins for it; D learns of
///   that before P's first record, and landing() is final from then on. A post follows a pack whose event has
///   completed, so what the kernel wrote is at D before its notice, also in another GPU's memory.
/// - Device memory is quiet when P has said in the segment that it holds none and its socket is closed, or
///   when P's process is proven dead: a dying process may close its socket before the GPU's driver has
///   stopped its kernels. P takes device memory only from a D that can prove its death.
/// - Device memory that the peer may have open is not released before the landing is quiet; the destructor
///   leaves it to the process's end.
/// - With a `device`, calls that set up or end a session may also wait for what the device runs at that
///   moment.
/// - A process that forks without exec after connecting delays the news of its death until the child ends.
/// Progress thread only.
class ShmTransport final : public Transport {
 public:
  /// Counts since construction.
  struct Counters {
    std::uint64_t dropped_connections = 0;  ///< refused at the socket
    std::uint64_t device_sessions = 0;      ///< opened with their slots in device memory
  };

  /// `device` is where this engine's cache is; null: in host memory.
  /// Errors: Transport (no /proc, no descriptors, the incarnation's name is taken).
  static Result<std::unique_ptr<ShmTransport>> make(const Incarnation& self, TimeUs call_budget_us,
                                                    std::shared_ptr<const CudaDevice> device = nullptr);
  ~ShmTransport() override;

  [[nodiscard]] std::string_view name() const override { return "shm"; }
  [[nodiscard]] Capabilities capabilities() const override;

  Result<Bytes> open_landing(const SessionId& session, std::size_t slot_bytes,
                             std::uint32_t num_slots) override;
  [[nodiscard]] Region landing(const SessionId& session) override;
  Result<Bytes> accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                       std::uint32_t num_slots) override;
  Status connect(const SessionId& session, ByteView description) override;
  [[nodiscard]] Region slot_memory(const SessionId& session, std::uint32_t slot) override;
  /// Unsupported: slots are mapped.
  Result<Region> allocate_staging(std::size_t size_bytes) override;
  void release_staging(Region region) override;
  Sent post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override;
  Sent send(const SessionId& session, ByteView message) override;
  void poll(TransportSink& sink) override;
  [[nodiscard]] int wait_fd() const override { return epoll_.get(); }
  [[nodiscard]] bool arm_wait() override;
  void close_session(const SessionId& session) override;
  [[nodiscard]] bool landing_quiet(const SessionId& session) override;
  bool release_landing(const SessionId& session) override;

  [[nodiscard]] const Counters& counters() const { return counters_; }

 private:
  using SessionPtr = std::shared_ptr<shm::Session>;

  ShmTransport(const Incarnation& self, TimeUs call_budget_us, std::shared_ptr<const CudaDevice> device,
               std::string host);
  Status start();

  [[nodiscard]] SessionPtr find(const SessionId& session) const;
  [[nodiscard]] shm::Description describe(const shm::Session& session, shm::DescriptionKind kind) const;
  Status add_session(SessionPtr session);
  Sent push(shm::Session& session, shm::RecordKind kind, ByteView payload);
  void lose(shm::Session& session, std::string reason);

  // Where the slots are (slots.cpp).
  void offer_device(shm::Session& session) const;
  [[nodiscard]] bool may_take_device(shm::Session& session, const shm::Description& offer) const;
  Status use_segment(shm::Session& session) const;
  Status settle_landing(shm::Session& session);
  Status settle_source(shm::Session& session, const shm::Fd& memfd);
  [[nodiscard]] Status open_device(shm::Session& session) const;
  [[nodiscard]] bool is_quiet(shm::Session& session) const;
  Status pin_segment(shm::Session& session) const;
  void free_memory(shm::Session& session);

  // Socket events.
  Status watch(const shm::Fd& socket, std::uint64_t token);
  void unwatch(const shm::Fd& socket);
  void watch_hang_up_only(const shm::Session& session);
  void take_events();
  void accept_connections();
  void greet(std::uint64_t token);
  void on_socket(shm::Session& session, std::uint32_t events);
  void drop_socket(shm::Session& session);

  // Rings.
  void serve(shm::Session& session, TransportSink& sink);
  void drain(shm::Session& session, TransportSink& sink);

  const Incarnation self_;
  const TimeUs call_budget_us_;
  const std::shared_ptr<const CudaDevice> device_;
  const std::string host_;
  const ProcessIdentity process_;
  shm::Fd listener_;
  shm::Fd epoll_;
  shm::Fd spare_;  // given up for a moment to turn away a connection when descriptors run out
  std::unordered_map<SessionId, SessionPtr> sessions_;
  std::unordered_map<std::uint64_t, SessionPtr> by_token_;
  std::map<std::uint64_t, shm::Fd> strangers_;  // connected, no hello yet; oldest first
  std::uint64_t next_token_ = 1;
  std::vector<TicketId> completed_;
  std::vector<TicketId> completing_;  // scratch of poll()
  std::vector<SessionPtr> turn_;      // scratch of poll()
  Bytes record_;                      // scratch of drain()
  bool armed_ = false;
  bool loss_owed_ = false;
  Counters counters_;
};

/// A shared-memory transport listening under `self`. No call waits longer than `call_budget_us`, but for a
/// GPU. Errors: as ShmTransport::make.
Result<std::unique_ptr<Transport>> make_shm_transport(const Incarnation& self, TimeUs call_budget_us,
                                                      std::shared_ptr<const CudaDevice> device = nullptr);

}  // namespace kvpush
