// What the transport keeps of rails, peers, sessions and posts.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "transport/fabric/arrivals.hpp"
#include "transport/fabric/description.hpp"
#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/operations.hpp"
#include "transport/remote_memory.hpp"

namespace kvpush {

/// One NIC's endpoint, and what is under way over it.
struct FabricRail {
  std::string label;
  int numa_node = -1;
  std::unique_ptr<FabricEndpoint> endpoint;
  std::vector<FabricOperation*> idle_receives;  ///< to be posted, again or for the first time
  std::size_t num_writes = 0;                   ///< under way
  std::uint64_t num_bytes = 0;                  ///< of them
  bool out = false;                             ///< its queue has failed: the endpoint is shut, for good
};

/// Memory with its registration on each rail; null on one that was out. The registrations go first.
struct FabricMemory {
  RemoteMemory memory;
  std::vector<FidHandle<FidMr>> registrations;
};

/// One rail of this engine with one of a peer's.
struct FabricLane {
  /// From the best to the worst.
  enum class State : std::uint8_t {
    kWorks,
    kUntried,
    kFailed,  ///< the last operation over it has
    kGone,    ///< either rail is out, or the provider does not take the address
  };
  std::uint32_t rail = 0;
  std::uint32_t remote = 0;
  FiAddr address = kFiAddrUnspec;
  State state = State::kUntried;
  bool on_trial = false;  ///< a trial message is under way
  TimeUs try_at = 0;
  std::size_t num_operations = 0;  ///< under way
  TimeUs moved_at = 0;             ///< when the first of them started, or one ended
};

/// One other engine, whatever the number of sessions with it.
struct FabricPeer {
  std::vector<FabricLane> lanes;  ///< at most kFabricMaxRails
  std::uint32_t next_lane = 0;
  std::size_t num_users = 0;  ///< sessions, operations under way, announcements
  TimeUs idle_since = kNever;
};

/// D's landing, open or closed.
struct FabricLanding {
  FabricMemory memory;
  std::uint16_t index = 0;
  std::size_t num_entries = 0;  ///< of each rail's queue that are kept for it
};

/// One open session. Which members are used tells the side: D has a landing, P has the peer's.
struct FabricSession {
  FabricPeer* peer = nullptr;                ///< null until connect()
  ProcessIdentity process;                   ///< the peer's
  std::optional<FabricLanding> landing;      ///< D
  FabricArrivals arrivals;                   ///< D
  FabricLandingInfo remote;                  ///< P
  std::vector<FabricRailInfo> remote_rails;  ///< P
  std::uint64_t num_writes = 0;              ///< P: started so far
  std::size_t num_posts = 0;                 ///< P: unfinished
  std::set<std::uint64_t> unfinished;        ///< P: first writes of those
  bool spoke = false;                        ///< a message has left for the peer
  bool heard = false;                        ///< a message or notice has come from it
  bool lost = false;
  bool closed_early = false;  ///< D: the peer closed before connect()
  bool peer_quiet = false;    ///< D: the peer has closed, and its last write has arrived
  bool uncertain = false;     ///< P: a write ended without being known to have arrived
};

/// D's landing after close_session(). It stays registered until it is quiet: a write that a provider refuses
/// ends its whole connection, and with it the pair's other sessions.
struct FabricClosedLanding {
  FabricLanding landing;
  ProcessIdentity process;
  TimeUs revoke_at = kNever;
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
  ByteView source;                        ///< what is not yet started
  const FabricMemory* staging = nullptr;  ///< that the source is in; null: memory of no registration
  std::size_t part_bytes = 0;             ///< of one write
  std::uint64_t offset = 0;               ///< of the source in the landing
  std::uint16_t index = 0;
  std::uint64_t first_write = 0;
  std::uint64_t num_writes = 0;
  std::uint64_t next_write = 0;
  FabricMessage* notice = nullptr;  ///< until it is started
  std::size_t num_started = 0;      ///< operations under way
  bool orphaned = false;            ///< its ticket has been answered as kUnknown
  bool settled = false;             ///< and that it is over
  bool failed = false;
};

}  // namespace kvpush
