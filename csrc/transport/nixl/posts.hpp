// The writes that NIXL has taken and not yet ended.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "base/ids.hpp"
#include "transport/nixl/agent.hpp"
#include "transport/transport.hpp"

namespace kvpush {

/// One posted write. After orphan() its ticket has been answered and only the handle is left to free.
struct NixlPost {
  NixlRequestObject* request = nullptr;
  SessionId session;
  TicketId ticket = 0;
  std::string agent;
  std::uint64_t connection = 0;  ///< as NixlPeers::retain() told it
  bool orphaned = false;
};

/// Polls posted writes in turn and frees their handles when they end: a handle that is released earlier
/// lets the write go on unseen. Progress thread only.
class NixlPosts {
 public:
  struct Ended {
    NixlPost post;
    NixlCode code = kNixlOk;
    bool leaked = false;  ///< the handle could not be freed
  };

  explicit NixlPosts(NixlAgent& agent) : agent_(agent) {}

  void add(NixlPost post) { posts_.push_back(std::move(post)); }
  /// Asks for the status of at most `max_checks` posts, longest unasked first.
  [[nodiscard]] std::vector<Ended> drive(std::size_t max_checks);
  /// Takes the tickets of a session's posts away; the posts themselves go on.
  [[nodiscard]] std::vector<TicketId> orphan(const SessionId& session);
  [[nodiscard]] std::size_t size() const noexcept { return posts_.size(); }

 private:
  NixlAgent& agent_;
  std::deque<NixlPost> posts_;
};

}  // namespace kvpush
