// The transport's class, for the files that implement it.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/nics.hpp"
#include "transport/fabric/state.hpp"
#include "transport/fabric/wait.hpp"

namespace kvpush {

/// Sessions over all rails. sessions.cpp sets them up and ends them, fabric_transport.cpp moves the data,
/// lanes.cpp chooses the way, queue.cpp takes what the completion queues tell. Progress thread only.
class FabricTransport final : public Transport {
 public:
  /// `delivers`: all rails tell when a write has arrived. `revokes`: closing a registration ends access.
  FabricTransport(const FabricOptions& options, std::string protocol, std::vector<FabricRail> rails,
                  bool delivers, bool revokes);
  ~FabricTransport() override;
  /// Registers the buffers of messages. Once, before anything else.
  Status start();

  [[nodiscard]] std::string_view name() const override { return "fabric"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.can_wait = wait_.fd() >= 0, .max_message_bytes = kFabricMaxMessageBytes};
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
  Status clear_staging(Region region) override;

  Sent post(const SessionId& session, TicketId ticket, ByteView source, std::uint32_t slot,
            ByteView notice) override;
  Sent send(const SessionId& session, ByteView message) override;
  void poll(TransportSink& sink) override;
  [[nodiscard]] int wait_fd() const override { return wait_.fd(); }
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

  struct Trial {
    FabricPeer* peer = nullptr;
    std::uint32_t lane = 0;
    TimeUs since = 0;
  };

  /// Of the host, or of the device if slots are there.
  Result<FabricMemory> allocate_slots(std::size_t size_bytes, std::uint64_t access) const;
  Result<FabricMemory> register_everywhere(Result<RemoteMemory> memory, std::uint64_t access,
                                           bool on_device) const;
  void free_landing(FabricLanding& landing);
  /// Whether nobody writes a closed landing any more; ends the peer's access where that is possible.
  [[nodiscard]] bool is_quiet(FabricClosedLanding& closed) const;
  [[nodiscard]] bool is_known(const SessionId& session) const;
  Result<std::uint16_t> take_index(const SessionId& session);
  /// Keeps entries of the queues for a landing's writes.
  Result<std::size_t> keep_entries(std::uint32_t num_slots, std::uint32_t max_writes) const;
  [[nodiscard]] std::size_t num_parts(std::size_t size_bytes) const;
  [[nodiscard]] Bytes describe(const SessionId& session, const FabricMemory* memory,
                               const FabricLandingInfo& landing) const;
  Result<FabricDescription> understand(const SessionId& session, ByteView description) const;
  Result<FabricPeer*> acquire(const FabricDescription& peer);
  static void release(FabricPeer& peer);
  [[nodiscard]] const FabricMemory* staging_of(ByteView source) const;

  /// Makes the lanes to a peer. Errors: Handshake (none works).
  Result<FabricPeer> make_peer(const FabricDescription& peer);
  /// The next lane to use: of those in the best state, and not in the set `tried`, the first or, `by_load`,
  /// the one whose rail has the fewest bytes under way.
  [[nodiscard]] std::optional<std::uint32_t> choose_lane(const FabricPeer& peer, std::uint32_t tried,
                                                         bool by_load) const;
  [[nodiscard]] std::size_t num_best_lanes(const FabricPeer& peer) const;
  /// Takes note of how an operation over a lane has ended; null: well.
  static void note_start(FabricLane& lane);
  void note_lane(FabricPeer& peer, std::uint32_t lane, const std::string* error);
  /// Sends a trial message over each lane that is due for one.
  void try_lanes(FabricPeer& peer);
  void start_trials();
  /// How many bytes of a box go as one write.
  [[nodiscard]] std::size_t part_of(std::size_t size_bytes, const FabricPeer& peer,
                                    std::uint32_t max_writes) const;
  FabricStart start_write(PostId id, FabricPost& post);
  FabricStart start_message(FabricMessage& message, FabricPeer& peer);
  FabricStart start_on(FabricMessage& message, FabricPeer& peer, std::uint32_t lane);
  /// Whether a message that failed goes on over another lane.
  [[nodiscard]] bool goes_on(const FabricOperation& message) const;
  void resend();
  /// Ends a rail whose queue has failed: what has arrived over it may be lost, and with it every session
  /// that uses it.
  void take_out(std::uint32_t rail, const std::string& reason);

  /// Starts as much of the post as there is room for.
  FabricStart advance(PostId id, FabricPost& post);
  void finish_if_over(PostId id);
  void on_post_over(const FabricPost& post);
  /// Drops what of the post is not started.
  void stop(FabricPost& post);
  void lose(const SessionId& id, const std::string& reason);
  /// Tells the peer how this side of a session has ended, as well as that can be done.
  void announce(FabricPeer& peer, const SessionId& session, FabricKind kind);
  /// Answers a closed session's tickets; what has started goes on.
  void orphan_posts(const SessionId& session);
  void resume();
  void send_announcements();

  void pin_thread();
  void read_queue(TransportSink& sink, std::uint32_t rail);
  void on_entry(TransportSink& sink, const FiCqDataEntry& entry);
  void on_error(std::uint32_t rail, const FiCqErrEntry& entry, const std::string& text);
  /// Takes a message or write that has ended off the books.
  void on_ended(FabricOperation& operation, const std::string* error);
  void end(FabricOperation& operation, bool failed);
  void on_immediate(TransportSink& sink, std::uint32_t immediate);
  void on_received(TransportSink& sink, ByteView frame);
  void on_notice_frame(TransportSink& sink, const SessionId& id, const FabricFrame& frame);
  void on_closed(const SessionId& session, FabricKind kind);
  void deliver_boxes(TransportSink& sink, const SessionId& id);
  void post_receives();
  void find_dead_peers();
  /// Of a peer with a choice of lanes: what is under way over a silent one ends its sessions.
  void find_stalled_lanes(FabricPeer& peer, TimeUs now);
  void sweep_peers(TimeUs now);
  void deliver(TransportSink& sink);

  const Incarnation incarnation_;
  const std::string protocol_;
  const std::size_t max_posts_;
  const std::size_t min_stripe_bytes_;
  const TimeUs try_again_us_;
  const TimeUs stall_us_;
  const TimeUs revoke_after_us_;
  const TimeUs pin_budget_us_;
  const bool delivers_;
  const bool revokes_;
  const std::string sysfs_;
  bool pins_;  // the next poll pins its thread
  const std::shared_ptr<const CudaDevice> device_;
  const bool device_slots_;
  const std::shared_ptr<FabricCounters> counters_;
  const ProcessIdentity process_;
  std::vector<FabricRail> rails_;
  std::size_t max_write_bytes_;
  std::size_t queue_entries_ = SIZE_MAX;  // the least of any rail
  std::size_t num_kept_entries_ = 0;      // of each queue, for the writes into landings
  FabricWait wait_;
  std::optional<FabricMemory> buffers_;
  FabricOperations operations_;

  std::unordered_map<Uuid, FabricPeer> peers_;  // by incarnation; the addresses of entries are stable
  std::unordered_map<SessionId, FabricSession> sessions_;
  std::unordered_map<SessionId, FabricClosedLanding> closed_;
  std::unordered_map<SessionId, FabricDraining> draining_;
  std::unordered_map<std::uint16_t, SessionId> by_index_;
  std::uint16_t next_index_ = 0;
  std::list<FabricMemory> staging_;
  std::unordered_map<PostId, FabricPost> posts_;
  PostId next_post_ = 1;
  std::deque<PostId> unstarted_;  // posts of which something is not yet started
  std::deque<Announcement> announcements_;
  std::deque<FabricMessage*> resends_;  // failed on one lane, to go on over another
  std::deque<Trial> trials_;            // not yet started
  std::vector<std::pair<TicketId, Fate>> due_;
  std::vector<TicketId> settled_;
  std::vector<std::pair<SessionId, std::string>> lost_;
  std::string refusal_;   // what libfabric said to what no rail took
  bool refused_ = false;  // since the last poll the provider had no room for a message or write
  TimeUs next_sweep_ = 0;
};

}  // namespace kvpush
