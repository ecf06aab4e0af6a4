// The transport's class, for the files that implement it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/fabric/arrivals.hpp"
#include "transport/fabric/description.hpp"
#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/operations.hpp"
#include "transport/remote_memory.hpp"

namespace kvpush {

/// Memory with its registration. The registration goes first.
struct FabricMemory {
  RemoteMemory memory;
  FidHandle<FidMr> registration;
};

/// One other engine in the address vector, whatever the number of sessions with it.
struct FabricPeer {
  FiAddr address = kFiAddrUnspec;
  std::size_t num_users = 0;  ///< sessions, operations under way, announcements
  TimeUs idle_since = kNever;
};

/// One open session. Which members are used tells the side: D has a landing, P has the peer's.
struct FabricSession {
  FabricPeer* peer = nullptr;           ///< null until connect()
  ProcessIdentity process;              ///< the peer's
  std::optional<FabricMemory> landing;  ///< D
  std::uint16_t index = 0;              ///< D
  FabricArrivals arrivals;              ///< D
  FabricLandingInfo remote;             ///< P
  std::uint64_t num_writes = 0;         ///< P: started so far
  std::size_t num_posts = 0;            ///< P: unfinished
  bool spoke = false;                   ///< a message has left for the peer
  bool heard = false;                   ///< a message or notice has come from it
  bool lost = false;
  bool closed_early = false;  ///< D: the peer closed before connect()
  bool peer_quiet = false;    ///< D: the peer has closed, and its last write has arrived
  bool uncertain = false;     ///< P: a write ended without being known to have arrived
};

/// D's landing after close_session(). It stays registered until it is quiet: a write that a provider refuses
/// ends its whole connection, and with it the pair's other sessions.
struct FabricClosedLanding {
  FabricMemory landing;
  std::uint16_t index = 0;
  ProcessIdentity process;
  bool quiet = false;
};

/// P's session after close_session(), until its last post has ended or the peer is proven dead.
struct FabricDraining {
  FabricPeer* peer = nullptr;
  ProcessIdentity process;
  std::size_t num_posts = 0;
  bool uncertain = false;
};

/// One box on its way: its writes, then its notice.
struct FabricPost {
  SessionId session;
  TicketId ticket = 0;
  FabricPeer* peer = nullptr;
  ByteView source;  ///< what is not yet started
  void* descriptor = nullptr;
  std::uint64_t address = 0;
  std::uint64_t key = 0;
  std::uint16_t index = 0;
  std::uint64_t next_write = 0;
  FabricMessage* notice = nullptr;  ///< until it is started
  std::size_t num_started = 0;      ///< operations under way
  bool orphaned = false;            ///< its ticket has been answered as kUnknown
  bool settled = false;             ///< and that it is over
  bool failed = false;
};

/// Sessions over one endpoint. sessions.cpp sets them up and ends them, fabric_transport.cpp moves the data,
/// queue.cpp takes what the completion queue tells. Progress thread only.
class FabricTransport final : public Transport {
 public:
  FabricTransport(const FabricOptions& options, std::unique_ptr<FabricEndpoint> endpoint);
  ~FabricTransport() override;
  /// Registers the buffers of messages. Once, before anything else.
  Status start();

  [[nodiscard]] std::string_view name() const override { return "fabric"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.can_wait = endpoint_->wait_fd() >= 0, .max_message_bytes = kFabricMaxMessageBytes};
  }

  Result<Bytes> open_landing(const SessionId& session, std::size_t slot_bytes,
                             std::uint32_t num_slots) override;
  [[nodiscard]] Region landing(const SessionId& session) override;
  Result<Bytes> accept(const SessionId& session, ByteView description, std::size_t slot_bytes,
                       std::uint32_t num_slots) override;
  Status connect(const SessionId& session, ByteView description) override;

  [[nodiscard]] Region slot_memory(const SessionId& /*session*/, std::uint32_t /*slot*/) override {
    return {};
  }
  Result<Region> allocate_staging(std::size_t size_bytes) override;
  void release_staging(Region region) override;

  Sent post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override;
  Sent send(const SessionId& session, ByteView message) override;
  void poll(TransportSink& sink) override;
  [[nodiscard]] int wait_fd() const override { return endpoint_->wait_fd(); }
  [[nodiscard]] bool arm_wait() override;

  void close_session(const SessionId& session) override;
  [[nodiscard]] bool landing_quiet(const SessionId& session) override;
  bool release_landing(const SessionId& session) override;

 private:
  using PostId = std::uint64_t;
  struct Announcement {
    FabricPeer* peer = nullptr;
    SessionId session;
    FabricKind kind = FabricKind::kMessage;
    TimeUs give_up_at = 0;
  };

  Result<FabricMemory> allocate(std::size_t size_bytes, std::uint64_t access) const;
  static void free_landing(FabricMemory& landing);
  [[nodiscard]] bool is_known(const SessionId& session) const;
  Result<std::uint16_t> take_index(const SessionId& session);
  [[nodiscard]] Bytes describe(const SessionId& session, const FabricLandingInfo& landing) const;
  Result<FabricDescription> understand(const SessionId& session, ByteView description) const;
  Result<FabricPeer*> acquire(const FabricDescription& peer);
  static void release(FabricPeer& peer);
  [[nodiscard]] void* descriptor_of(ByteView source) const;

  /// Starts as much of the post as there is room for.
  FabricStart advance(PostId id, FabricPost& post);
  void finish_if_over(PostId id);
  void on_post_over(const FabricPost& post);
  /// Drops what of the post is not started.
  void stop(FabricPost& post);
  FabricStart start_message(FabricMessage& message, FabricPeer& peer);
  void lose(const SessionId& id, const std::string& reason);
  /// Tells the peer how this side of a session has ended, as well as that can be done.
  void announce(FabricPeer& peer, const SessionId& session, FabricKind kind);
  /// Answers a closed session's tickets; what has started goes on.
  void orphan_posts(const SessionId& session);
  void resume();
  void send_announcements();

  void read_queue(TransportSink& sink);
  void on_entry(TransportSink& sink, const FiCqDataEntry& entry);
  void on_error(const FiCqErrEntry& entry, const std::string& text);
  /// Takes a message or write that has ended off the books.
  void on_ended(FabricOperation& operation, const std::string* error);
  void lose_all(const std::string& reason);
  void on_immediate(TransportSink& sink, std::uint32_t immediate);
  void on_received(TransportSink& sink, ByteView frame);
  void on_notice_frame(TransportSink& sink, const SessionId& id, const FabricFrame& frame);
  void on_closed(const SessionId& session, FabricKind kind);
  void deliver_boxes(TransportSink& sink, const SessionId& id);
  void post_receives();
  void find_dead_peers();
  void sweep_peers(TimeUs now);
  void deliver(TransportSink& sink);

  const Incarnation incarnation_;
  const std::size_t max_posts_;
  const std::size_t max_write_bytes_;
  const TimeUs pin_budget_us_;
  const std::shared_ptr<const CudaDevice> device_;
  const std::shared_ptr<FabricCounters> counters_;
  const ProcessIdentity process_;
  std::unique_ptr<FabricEndpoint> endpoint_;
  std::optional<FabricMemory> buffers_;
  FabricOperations operations_;

  std::unordered_map<Uuid, FabricPeer> peers_;  // by incarnation; the addresses of entries are stable
  std::unordered_map<SessionId, FabricSession> sessions_;
  std::unordered_map<SessionId, FabricClosedLanding> closed_;
  std::unordered_map<SessionId, FabricDraining> draining_;
  std::unordered_map<std::uint16_t, SessionId> by_index_;
  std::uint16_t next_index_ = 0;
  std::vector<FabricMemory> staging_;
  std::unordered_map<PostId, FabricPost> posts_;
  PostId next_post_ = 1;
  std::deque<PostId> unstarted_;  // posts of which something is not yet started
  std::deque<Announcement> announcements_;
  std::vector<std::pair<TicketId, Fate>> due_;
  std::vector<TicketId> settled_;
  std::vector<std::pair<SessionId, std::string>> lost_;
  bool refused_ = false;  // since the last poll the provider had no room for a message or write
  TimeUs next_sweep_ = 0;
};

}  // namespace kvpush
