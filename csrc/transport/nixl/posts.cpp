#include "transport/nixl/posts.hpp"

#include <algorithm>
#include <utility>

namespace kvpush {

std::vector<NixlPosts::Ended> NixlPosts::drive(std::size_t max_checks) {
  std::vector<Ended> ended;
  for (std::size_t left = std::min(max_checks, posts_.size()); left > 0; --left) {
    NixlPost post = std::move(posts_.front());
    posts_.pop_front();
    const NixlCode code = agent_.status(post.request);
    if (code == kNixlInProgress) {
      posts_.push_back(std::move(post));
      continue;
    }
    // "Not found" says that the agent was dropped while the backend still works on the request.
    const bool running = code == kNixlNotFound;
    if (!running) agent_.release(post.request);
    ended.push_back({std::move(post), code, running});
  }
  return ended;
}

std::vector<TicketId> NixlPosts::orphan(const SessionId& session) {
  std::vector<TicketId> tickets;
  for (NixlPost& post : posts_) {
    if (post.orphaned || post.session != session) continue;
    post.orphaned = true;
    tickets.push_back(post.ticket);
  }
  return tickets;
}

}  // namespace kvpush
