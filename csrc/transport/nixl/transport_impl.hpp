// The transport's class, for the files that implement it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/nixl/agent.hpp"
#include "transport/nixl/description.hpp"
#include "transport/nixl/nixl_transport.hpp"
#include "transport/nixl/peers.hpp"
#include "transport/nixl/posts.hpp"
#include "transport/nixl/retired_memory.hpp"
#include "transport/remote_memory.hpp"

namespace kvpush {

inline constexpr std::size_t kNixlMaxMessageBytes = std::size_t{16} << 10U;

/// One open session. Which members are used tells the side: D has a landing, P has the peer's.
struct NixlSession {
  std::string agent;                   ///< the peer's; empty until connect()
  std::optional<RemoteMemory> memory;  ///< D
  NixlLandingInfo remote;              ///< P
  ProcessIdentity process;             ///< the peer's
  std::size_t num_posts = 0;           ///< unfinished
  std::uint64_t turn = 0;              ///< the poll since which num_sends counts
  std::uint32_t num_sends = 0;
  bool spoke = false;  ///< a message or post has left for the peer
  bool heard = false;  ///< a message or notice has come from it
  bool lost = false;
  bool peer_quiet = false;        ///< D: the peer has closed, and its last post has ended
  std::vector<TicketId> unknown;  ///< P: posts that were answered as kUnknown
  std::string closed_by;          ///< the agent that said it closed before connect() named the peer
};

/// D's landing after close_session().
struct NixlClosedLanding {
  RemoteMemory memory;
  std::string agent;
  ProcessIdentity process;
  bool quiet = false;
};

/// P's session after close_session(), until its last post has completed or the peer is proven dead.
struct NixlDraining {
  std::string agent;
  ProcessIdentity process;
  std::vector<TicketId> unknown;
};

/// Sessions over one agent. sessions.cpp sets them up and ends them, nixl_transport.cpp moves the data.
/// Progress thread only.
class NixlTransport final : public Transport {
 public:
  NixlTransport(const NixlOptions& options, std::unique_ptr<NixlAgent> agent);
  ~NixlTransport() override;

  [[nodiscard]] std::string_view name() const override { return "nixl"; }
  [[nodiscard]] Capabilities capabilities() const override {
    return {.max_message_bytes = kNixlMaxMessageBytes};
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
  [[nodiscard]] int wait_fd() const override { return -1; }
  [[nodiscard]] bool arm_wait() override { return true; }

  void close_session(const SessionId& session) override;
  [[nodiscard]] bool landing_quiet(const SessionId& session) override;
  bool release_landing(const SessionId& session) override;

 private:
  /// The byte behind the session's id at the front of every notification.
  enum class Kind : std::uint8_t {
    kMessage = 1,
    kNotice = 2,
    kClosed = 3,  ///< the sender has closed the session
    kQuiet = 4,   ///< the same, and it writes no more: its posts have ended
  };

  [[nodiscard]] Result<RemoteMemory> allocate(std::size_t size_bytes);
  /// After deregister_memory(). `quiet`: no write can be on its way into it.
  void retire(RemoteMemory memory, bool quiet);
  [[nodiscard]] bool is_known(const SessionId& session) const;
  [[nodiscard]] Bytes describe(const SessionId& session, NixlLandingInfo landing) const;
  Result<NixlDescription> understand(const SessionId& session, ByteView description) const;
  ByteView frame(const SessionId& session, Kind kind, ByteView payload);
  Sent notify(NixlSession& session, ByteView payload);
  void lose(const SessionId& id, NixlSession& session, const std::string& reason);
  void lose_all_of(const std::string& agent, const std::string& reason);
  void on_ended(const NixlPosts::Ended& ended);
  void settle_account(const NixlPost& post, bool completed);
  /// Tells the peer how this side of a session has ended, as well as that can be done.
  void announce(const std::string& agent, const SessionId& session, Kind kind);
  void on_closed(const SessionId& session, const std::string& agent, Kind kind);
  void find_dead_peers();
  void dispatch(TransportSink& sink, const char* agent, ByteView payload);
  void deliver(TransportSink& sink);

  const Incarnation incarnation_;
  const std::string backends_;
  const std::size_t max_posts_;
  const TimeUs pin_budget_us_;
  const std::shared_ptr<const CudaDevice> device_;
  const std::shared_ptr<NixlCounters> counters_;
  const ProcessIdentity process_;
  std::unique_ptr<NixlAgent> agent_;
  NixlPeers peers_;
  NixlPosts posts_;

  std::unordered_map<SessionId, NixlSession> sessions_;
  std::unordered_map<SessionId, NixlClosedLanding> closed_;
  std::unordered_map<SessionId, NixlDraining> draining_;
  std::vector<RemoteMemory> staging_;
  RetiredMemory retired_;
  std::vector<std::pair<TicketId, Fate>> due_;
  std::vector<TicketId> settled_;
  std::vector<std::pair<SessionId, std::string>> lost_;
  Bytes frame_;
  std::uint64_t turn_ = 1;
  TimeUs next_sweep_ = 0;
};

}  // namespace kvpush
