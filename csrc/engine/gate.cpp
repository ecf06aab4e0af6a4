#include "engine/gate.hpp"

#include <iterator>
#include <utility>

namespace kvpush {

// --- pushes

void Gate::advance(HandleId push, std::vector<std::vector<std::int32_t>> ids, FenceId after, TimeUs now,
                   protocol::Actions& out) {
  const auto held = pushes_.find(push);
  if (held != pushes_.end()) {
    held->second.push_back({after, false, std::move(ids)});
  } else if (passed(after)) {
    sender_.advance(push, ids, now, out);
  } else {
    pushes_[push].push_back({after, false, std::move(ids)});
  }
}

void Gate::finish(HandleId push, TimeUs now, protocol::Actions& out) {
  const auto held = pushes_.find(push);
  if (held != pushes_.end()) {
    held->second.push_back({0, true, {}});
  } else {
    sender_.finish(push, now, out);
  }
}

void Gate::retract(HandleId push) {
  forget(push);
  sender_.fence(push);
}

void Gate::abort(HandleId push, std::string reason, TimeUs now, protocol::Actions& out) {
  forget(push);
  sender_.abort(push, FailCode::kAborted, std::move(reason), now, out);
}

void Gate::forget(HandleId push) {
  const auto held = pushes_.find(push);
  if (held == pushes_.end()) return;
  for (const PushCall& call : held->second) drop(call.after);
  pushes_.erase(held);
}

// --- receives

void Gate::receive(const SessionId& session, TransferId transfer, HandleId handle, const std::string& key,
                   Bytes digest, protocol::Destination destination, FenceId after, TimeUs now,
                   protocol::Actions& out) {
  ReceiveCall call{after, session, transfer, handle, key, std::move(digest), std::move(destination)};
  const auto last = receiver_.last_transfer(session);
  if (!last) drop(std::exchange(call.after, 0));  // nobody will write: it only has to fail
  if (passed(call.after)) return hand_on(std::move(call), now, out);
  if (transfer > *last) receiver_.expect(session, transfer, key, now, out);
  receives_.push_back(std::move(call));
}

void Gate::cancel(TransferId transfer, TimeUs now, protocol::Actions& out) {
  give_up([transfer](const ReceiveCall& call) { return call.transfer == transfer; }, now, out);
  receiver_.cancel(transfer, out);
}

void Gate::close_session(const SessionId& session, TimeUs now, protocol::Actions& out) {
  give_up([&session](const ReceiveCall& call) { return call.session == session; }, now, out);
}

/// Only for receives that the caller of this ends before any box can come: their fences have not passed.
template <typename Which>
void Gate::give_up(Which which, TimeUs now, protocol::Actions& out) {
  for (ReceiveCall& call : take(which)) {
    drop(call.after);
    hand_on(std::move(call), now, out);
  }
}

template <typename Which>
std::list<Gate::ReceiveCall> Gate::take(Which which) {
  std::list<ReceiveCall> taken;
  for (auto it = receives_.begin(); it != receives_.end();) {
    const auto call = it++;
    if (which(*call)) taken.splice(taken.end(), receives_, call);
  }
  return taken;
}

void Gate::hand_on(ReceiveCall call, TimeUs now, protocol::Actions& out) {
  receiver_.receive(call.session, call.transfer, call.handle, call.key, std::move(call.digest),
                    std::move(call.destination), now, out);
}

// --- time

bool Gate::let_pass(TimeUs now, protocol::Actions& out) {
  bool any = false;
  for (auto push = pushes_.begin(); push != pushes_.end();) {
    auto& [handle, calls] = *push;
    while (!calls.empty() && passed(calls.front().after)) {
      any = true;
      if (calls.front().finish) {
        sender_.finish(handle, now, out);
      } else {
        sender_.advance(handle, calls.front().ids, now, out);
      }
      calls.pop_front();
    }
    push = calls.empty() ? pushes_.erase(push) : std::next(push);
  }
  for (ReceiveCall& call : take([this](const ReceiveCall& held) { return passed(held.after); })) {
    any = true;
    hand_on(std::move(call), now, out);
  }
  return any;
}

void Gate::close(TimeUs now, protocol::Actions& out) {
  while (!pushes_.empty()) forget(pushes_.begin()->first);
  give_up([](const ReceiveCall&) { return true; }, now, out);
}

}  // namespace kvpush
