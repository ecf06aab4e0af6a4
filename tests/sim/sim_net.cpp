#include "sim_net.hpp"

#include <algorithm>
#include <utility>

namespace kvpush::sim {
namespace {

constexpr std::byte kReleased{0xDD};
constexpr std::size_t kMaxOldMessages = 64;
constexpr TimeUs kMessageUs = 20;

}  // namespace

bool SimNet::hits(double rate, std::string_view fault) {
  if (!trouble || !dice.chance(rate)) return false;
  count(fault);
  return true;
}

void SimNet::deliver(const SessionId& id, const SimEnd& from, bool is_notice, ByteView bytes) {
  Session& session = sessions.at(id);
  SimEnd* const to = session.d == &from ? session.p : session.d;
  for (const std::byte byte : bytes.last(8)) mix(static_cast<std::uint64_t>(byte));
  if (to == nullptr) return;
  const bool to_d = session.p == &from;
  const auto put = [&](Bytes content, TimeUs wait) {
    if (hold) {
      held.push_back({now, next_order_++, id, is_notice, to_d, std::move(content)});
      return;
    }
    if (reorder) wait += static_cast<TimeUs>(dice.below(400));
    to->inbox_.push_back({now + kMessageUs + wait, next_order_++, id, is_notice, to_d, std::move(content)});
  };
  Bytes content(bytes.begin(), bytes.end());
  TimeUs wait = 0;
  if (trouble) {
    if (faults.lie > 0) {
      session.liar.listen(bytes, to_d);
      if (auto lie = session.liar.lie(bytes, to_d, faults.lie, dice)) {
        content = std::move(lie->bytes);
        session.lied = true;
        session.must_end |= lie->fatal;
        ++num_lies;
        count(lie->name);
      }
    }
    if (faults.stray > 0) {
      if (old_messages_.size() < kMaxOldMessages) {
        old_messages_.emplace_back(id, content);
      } else {
        old_messages_[dice.below(kMaxOldMessages)] = {id, content};
      }
      // Of the same engine's other sessions nothing can stray in: a transport keeps sessions apart.
      const auto& [other, old] = old_messages_[dice.below(old_messages_.size())];
      if (sessions.at(other).d != session.d && sessions.at(other).p != session.p &&
          sessions.at(other).p != session.d && sessions.at(other).d != session.p &&
          hits(faults.stray, "stray")) {
        put(old, 0);
      }
    }
    if (hits(faults.drop, "drop")) return;
    if (hits(faults.delay, "delay"))
      wait = static_cast<TimeUs>(dice.below(static_cast<std::uint64_t>(faults.max_delay_us)));
    if (hits(faults.duplicate, "duplicate")) put(content, wait + static_cast<TimeUs>(dice.below(1000)));
    if (hits(faults.truncate, "truncate")) {
      content.resize(dice.below(content.size()));
      ++num_damaged;
    } else if (hits(faults.corrupt, "corrupt")) {
      content[dice.below(content.size())] ^= static_cast<std::byte>(1U << dice.below(8));
      ++num_damaged;
    }
  }
  put(std::move(content), wait);
}

void SimNet::hand_out(const Packet& packet) {
  const Session& session = sessions.at(packet.session);
  SimEnd* const to = packet.to_d ? session.d : session.p;
  if (to != nullptr) to->inbox_.push_back(packet);
}

void SimNet::land(Write& write) {
  Session& session = sessions.at(write.session);
  write.landed = true;
  if (session.d_dead) return;
  require(!session.released, "a post landed in memory that D had released");
  const std::size_t begin = write.slot * session.slot_bytes;
  if (!write.source.empty()) {
    if (write.from != nullptr)
      require(std::equal(write.source.begin(), write.source.end(), write.snapshot.begin()),
              "the source of a post changed before it landed");
    require(write.snapshot.size() <= session.slot_bytes, "a post is larger than its slot");
    std::copy(write.snapshot.begin(), write.snapshot.end(),
              session.landing.begin() + static_cast<std::ptrdiff_t>(begin));
  }
  if (hits(faults.corrupt_data, "corrupt data")) {
    const std::size_t size = write.source.empty() ? session.slot_bytes : write.snapshot.size();
    session.landing[begin + dice.below(size)] ^= static_cast<std::byte>(1U << dice.below(8));
    ++num_data_damaged;
  }
}

void SimNet::decide(Write& write, Fate fate) {
  write.decided = true;
  write.fate = fate;
  write.told_at = now + (hold ? 0 : static_cast<TimeUs>(dice.below(200)));
  if (fate == Fate::kUnknown) sessions.at(write.session).unknown = true;
}

void SimNet::advance(TimeUs to) {
  now = to;
  for (std::size_t i = 0; i < writes_.size(); ++i) {
    Write& write = writes_[i];
    if (write.due > now) continue;
    if (!write.landed && (write.plan == Plan::kFine || write.plan == Plan::kUnknownLanded || write.decided)) {
      const bool first = !write.decided;
      if (write.plan != Plan::kFails) land(write);
      if (first && write.from != nullptr) {
        const bool fine = write.plan == Plan::kFine;
        decide(write, fine ? Fate::kCompleted : Fate::kUnknown);
        if (fine || dice.chance(0.5)) {
          const SimEnd& from = *write.from;
          const SessionId id = write.session;
          const Bytes notice = write.notice;
          deliver(id, from, true, notice);
        }
      }
    } else if (!write.decided) {
      decide(write, write.plan == Plan::kFails ? Fate::kFailed : Fate::kUnknown);
      write.due = now + static_cast<TimeUs>(dice.below(8000));
    }
  }
  std::erase_if(writes_, [](const Write& write) { return write.over(); });
}

void SimNet::died(SimEnd& end) {
  for (auto& [id, session] : sessions) {
    if (session.d != &end && session.p != &end) continue;
    const bool is_d = session.d == &end;
    (is_d ? session.d_dead : session.p_dead) = true;
    (is_d ? session.d_open : session.p_open) = false;
    (is_d ? session.d : session.p) = nullptr;
    SimEnd* const other = is_d ? session.p : session.d;
    if (tells_close && other != nullptr) other->losses.emplace_back(now + 100, id);
  }
  for (Write& write : writes_) {
    if (write.from != &end) continue;
    write.from = nullptr;
    if (!write.landed && dice.chance(0.5)) write.plan = Plan::kFails;
    if (write.plan != Plan::kFails) {
      write.plan = Plan::kUnknownLanded;
      write.due = std::min(write.due, now + 3000);
    }
  }
  std::erase_if(writes_, [](const Write& write) { return write.over(); });
}

bool SimNet::writes_pending(const SessionId& id) const {
  return std::any_of(writes_.begin(), writes_.end(), [&](const Write& write) {
    return write.session == id && !write.landed && write.plan != Plan::kFails;
  });
}

TimeUs SimNet::next_due() const {
  TimeUs next = kNever;
  for (const Write& write : writes_) {
    if (!write.told && write.decided) next = std::min(next, write.told_at);
    if (!write.landed && write.plan != Plan::kFails) next = std::min(next, write.due);
    if (!write.decided) next = std::min(next, write.due);
  }
  const auto of = [&next](const SimEnd* end) {
    if (end == nullptr) return;
    for (const Packet& packet : end->inbox_) next = std::min(next, packet.due);
    for (const auto& loss : end->losses) next = std::min(next, loss.first);
  };
  for (const auto& [id, session] : sessions) {
    of(session.d);
    of(session.p);
  }
  return next;
}

void SimNet::check_released() const {
  for (const auto& [id, session] : sessions) {
    if (!session.released) continue;
    require(std::all_of(session.landing.begin(), session.landing.end(),
                        [](std::byte byte) { return byte == kReleased; }),
            "memory of a landing was written after its release");
  }
}

void SimNet::check_mapped(const SimEnd& end, const std::byte* slot) const {
  for (const auto& [id, session] : sessions) {
    const std::byte* const begin = session.landing.data();
    if (session.p != &end || slot < begin || slot >= begin + session.landing.size()) continue;
    require(session.p_open, "a pack ran into a mapped slot after P closed the session");
    return;
  }
  throw Violation("a pack ran into memory that is no slot of its engine");
}

void SimNet::check_slot(const SimEnd& end, const std::byte* from, std::size_t size) const {
  for (const auto& [id, session] : sessions) {
    const std::byte* const begin = session.landing.data();
    if (session.d != &end || from < begin || from >= begin + session.landing.size()) continue;
    const std::size_t offset = static_cast<std::size_t>(from - begin) % session.slot_bytes;
    require(offset + size <= session.slot_bytes, "an unpack read past its slot");
    return;
  }
  throw Violation("an unpack read memory that is no slot of its engine");
}

// --- one end

Result<Bytes> SimEnd::open_landing(const SessionId& id, std::size_t slot_bytes, std::uint32_t num_slots) {
  require(!net_.sessions.contains(id), "a session id was used twice");
  SimNet::Session& session = net_.sessions[id];
  session.d = this;
  session.slot_bytes = slot_bytes;
  session.landing.resize(slot_bytes * num_slots);
  return Bytes(1);
}

Region SimEnd::landing(const SessionId& id) {
  SimNet::Session& session = net_.sessions.at(id);
  require(!session.released && session.d == this, "D uses a landing that it has not");
  return {session.landing.data(), session.landing.size()};
}

Result<Bytes> SimEnd::accept(const SessionId& id, ByteView, std::size_t, std::uint32_t) {
  const auto found = net_.sessions.find(id);
  if (found == net_.sessions.end() || !found->second.d_open)
    return Status(Code::kTransport, "no such landing");
  found->second.p = this;
  found->second.p_open = true;
  return Bytes(2);
}

Status SimEnd::connect(const SessionId& id, ByteView) {
  SimNet::Session& session = net_.sessions.at(id);
  if (session.p_dead || !session.p_open) return {Code::kTransport, "no route"};
  session.connected = true;
  return {};
}

Region SimEnd::slot_memory(const SessionId& id, std::uint32_t slot) {
  SimNet::Session& session = net_.sessions.at(id);
  require(session.p == this && session.p_open, "P asks for a slot of a session that it has closed");
  require((slot + 1) * session.slot_bytes <= session.landing.size(), "P asks for a slot that is not there");
  if (!session.connected) return {};
  return {session.landing.data() + slot * session.slot_bytes, session.slot_bytes};
}

Result<Region> SimEnd::allocate_staging(std::size_t size_bytes) {
  ++num_staging;
  net_.staging_.push_back(std::make_unique<Bytes>(size_bytes));
  return Region{net_.staging_.back()->data(), size_bytes};
}

bool SimEnd::refuses() {
  return net_.now < blocked_until || net_.hits(net_.faults.again, "again");
}

Sent SimEnd::post(const SessionId& id, TicketId ticket, ByteView source, std::uint32_t slot,
                  ByteView notice) {
  const SimNet::Session& session = net_.sessions.at(id);
  require(session.p == this && session.p_open, "P posts to a session that it has closed");
  require(source.size() <= session.slot_bytes, "a post is larger than its slot");
  require(net_.mapped == source.empty(), "a post carries data exactly when slots are not mapped");
  require(session.p_heard, "P posts before D's first message");
  if (refuses()) return Sent::kAgain;
  using Plan = SimNet::Plan;
  SimNet::Write write;
  if (session.d_dead || !session.d_open) {
    write.plan = net_.dice.chance(0.5) ? Plan::kFails : Plan::kUnknownLanded;
  } else if (net_.hits(net_.faults.post_fails, "post fails")) {
    write.plan = Plan::kFails;
  } else if (net_.hits(net_.faults.post_unknown, "post unknown")) {
    write.plan = net_.dice.chance(0.5) ? Plan::kUnknownLanded : Plan::kUnknownLate;
  }
  // A landing that D has closed may be given back at any time once P has closed too.
  write.due = net_.now + (net_.hold ? 0 : static_cast<TimeUs>(net_.dice.below(300)));
  write.session = id;
  write.from = this;
  write.ticket = ticket;
  write.source = source;
  write.snapshot.assign(source.begin(), source.end());
  write.slot = slot;
  write.notice.assign(notice.begin(), notice.end());
  net_.writes_.push_back(std::move(write));
  if (net_.hold) net_.advance(net_.now);
  return Sent::kYes;
}

Sent SimEnd::send(const SessionId& id, ByteView message) {
  const SimNet::Session& session = net_.sessions.at(id);
  require(session.d == this ? session.d_open : session.p_open, "a message to a session that was closed");
  require(session.d == this || session.p_heard, "P sends before D's first message");
  if (refuses()) return Sent::kAgain;
  net_.deliver(id, *this, false, message);
  return Sent::kYes;
}

void SimEnd::poll(TransportSink& sink) {
  std::vector<SimNet::Write> told;
  for (SimNet::Write& write : net_.writes_) {
    if (write.from != this || write.told || !write.decided || write.told_at > net_.now) continue;
    require(std::equal(write.source.begin(), write.source.end(), write.snapshot.begin()),
            "the source of a post changed before it completed");
    told.push_back(write);
    write.told = true;
  }
  std::erase_if(net_.writes_, [](const SimNet::Write& write) { return write.over(); });
  for (const SimNet::Write& write : told) {
    if (write.fate == Fate::kUnknown && !write.source.empty()) ++num_unknown;
    sink.on_completed(write.ticket, write.fate);
  }

  std::vector<Packet> due;
  std::erase_if(inbox_, [&](Packet& packet) {
    if (packet.due > net_.now) return false;
    due.push_back(std::move(packet));
    return true;
  });
  std::sort(due.begin(), due.end(), [](const Packet& a, const Packet& b) {
    return std::pair(a.due, a.order) < std::pair(b.due, b.order);
  });
  for (const Packet& packet : due) {
    const SimNet::Session& session = net_.sessions.at(packet.session);
    if (session.d == this ? !session.d_open : !session.p_open) continue;
    net_.mix(packet.order);
    if (!packet.to_d) net_.sessions.at(packet.session).p_heard = true;
    if (packet.is_notice) {
      sink.on_notice(packet.session, packet.bytes);
    } else {
      sink.on_message(packet.session, packet.bytes);
    }
  }
  std::erase_if(losses, [&](const std::pair<TimeUs, SessionId>& loss) {
    if (loss.first > net_.now) return false;
    sink.on_lost(loss.second, "the other end is gone");
    return true;
  });
}

void SimEnd::close_session(const SessionId& id) {
  SimNet::Session& session = net_.sessions.at(id);
  const bool is_d = session.d == this;
  require(is_d ? session.d_open : session.p_open, "a session was closed twice");
  (is_d ? session.d_open : session.p_open) = false;
  SimEnd* const other = is_d ? session.p : session.d;
  if (net_.tells_close && other != nullptr) other->losses.emplace_back(net_.now + 100, id);
  if (is_d) return;
  for (SimNet::Write& write : net_.writes_) {
    if (write.session != id || write.from != this) continue;
    if (write.decided) {
      if (!write.landed && net_.revokes) write.plan = SimNet::Plan::kFails;
      continue;
    }
    if (net_.revokes) {
      write.plan = SimNet::Plan::kFails;
      net_.decide(write, Fate::kFailed);
    } else {
      write.plan = net_.dice.chance(0.5) ? SimNet::Plan::kUnknownLate : SimNet::Plan::kFails;
      net_.decide(write, Fate::kUnknown);
      write.due = net_.now + static_cast<TimeUs>(net_.dice.below(8000));
    }
  }
}

bool SimEnd::landing_quiet(const SessionId& id) {
  const SimNet::Session& session = net_.sessions.at(id);
  if (net_.writes_pending(id)) return false;
  if (session.p_dead) return true;
  if (session.p == nullptr) return true;
  return net_.revokes && !session.p_open;
}

bool SimEnd::release_landing(const SessionId& id) {
  SimNet::Session& session = net_.sessions.at(id);
  require(session.d == this && !session.released, "a landing was released twice");
  require(!session.d_open, "a landing was released before its session was closed");
  require(!session.p_open, "a landing was released while P could still write into it");
  require(!net_.writes_pending(id), "a landing was released with a post under way");
  require(net_.revokes || session.p_dead || !session.unknown,
          "a landing was released although the fate of a post into it is unknown");
  session.released = true;
  std::fill(session.landing.begin(), session.landing.end(), kReleased);
  return true;
}

}  // namespace kvpush::sim
