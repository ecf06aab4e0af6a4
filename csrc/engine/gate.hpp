// Between the caller's calls and the two state machines: what must wait for a fence waits here.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "pack/packer.hpp"
#include "protocol/actions.hpp"
#include "protocol/receiver.hpp"
#include "protocol/sender.hpp"

namespace kvpush {

/// The calls that a fence can hold back, and those that must find what is held back. `after` is a fence of
/// the packer, 0 for none; it is the gate's from then on. The calls of one push keep their order; pushes and
/// receives do not wait for each other. Progress thread only.
class Gate {
 public:
  Gate(protocol::Sender& sender, protocol::Receiver& receiver, Packer& packer)
      : sender_(sender), receiver_(receiver), packer_(packer) {}

  void advance(HandleId push, std::vector<std::vector<std::int32_t>> ids, FenceId after, TimeUs now,
               protocol::Actions& out);
  void finish(HandleId push, TimeUs now, protocol::Actions& out);
  /// Forgets what is held back of this push and stops its packs; sender.quiescent() and resume() follow.
  void retract(HandleId push);
  void abort(HandleId push, std::string reason, TimeUs now, protocol::Actions& out);

  /// One that is held back claims its key at once: P knows of it, and ids stay in order.
  void receive(const SessionId& session, TransferId transfer, HandleId handle, const std::string& key,
               Bytes digest, protocol::Destination destination, FenceId after, TimeUs now,
               protocol::Actions& out);
  void cancel(TransferId transfer, TimeUs now, protocol::Actions& out);

  /// Hands on what waits no longer. Returns whether there was any.
  bool let_pass(TimeUs now, protocol::Actions& out);
  /// Before the receiver closes a session: its receives are handed on, to end with it.
  void close_session(const SessionId& session, TimeUs now, protocol::Actions& out);
  /// After all pushes were aborted and all sessions closed: nothing waits any more.
  void close(TimeUs now, protocol::Actions& out);

  [[nodiscard]] bool empty() const { return pushes_.empty() && receives_.empty(); }

 private:
  struct PushCall {
    FenceId after = 0;
    bool finish = false;
    std::vector<std::vector<std::int32_t>> ids;
  };
  struct ReceiveCall {
    FenceId after = 0;
    SessionId session;
    TransferId transfer = 0;
    HandleId handle = 0;
    std::string key;
    Bytes digest;
    protocol::Destination destination;
  };

  [[nodiscard]] bool passed(FenceId fence) { return fence == 0 || packer_.passed(fence); }
  void drop(FenceId fence) {
    if (fence != 0) packer_.drop(fence);
  }
  void forget(HandleId push);
  void hand_on(ReceiveCall call, TimeUs now, protocol::Actions& out);
  template <typename Which>
  std::list<ReceiveCall> take(Which which);
  template <typename Which>
  void give_up(Which which, TimeUs now, protocol::Actions& out);

  protocol::Sender& sender_;
  protocol::Receiver& receiver_;
  Packer& packer_;
  std::map<HandleId, std::deque<PushCall>> pushes_;  ///< each begins with one whose fence has not passed
  std::list<ReceiveCall> receives_;
};

}  // namespace kvpush
