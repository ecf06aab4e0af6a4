#include "engine/engine.hpp"

#include <algorithm>
#include <future>

#include "base/log.hpp"

namespace kvpush {
namespace {

// How often to look where the transport can only be polled (docs/threading.md).
constexpr TimeUs kPollOpenUs = 1000;
constexpr TimeUs kPollIdleUs = 20000;
// Fences wait for forwards, which take milliseconds.
constexpr TimeUs kPollFenceUs = 50;
// How long to look on for the next box where the transport could wake us: a wake-up takes as long as a box.
constexpr TimeUs kSpinUs = 200;
// Where goodbyes leave only while somebody polls.
constexpr TimeUs kLingerUs = 20000;
constexpr TimeUs kLongestWaitUs = 60'000'000;

Status closed_status() {
  return {Code::kClosed, "the engine is closed"};
}

Status check_key(const std::string& key, const Bytes* digest) {
  if (key.empty() || key.size() > protocol::kMaxKeyBytes) {
    return {Code::kInvalidArgument, "key of " + std::to_string(key.size()) + " bytes; 1 to " +
                                        std::to_string(protocol::kMaxKeyBytes) + " are allowed"};
  }
  if (digest != nullptr && (digest->empty() || digest->size() > protocol::kMaxDigestBytes)) {
    return {Code::kInvalidArgument, "digest of " + std::to_string(digest->size()) + " bytes; 1 to " +
                                        std::to_string(protocol::kMaxDigestBytes) +
                                        " are allowed (SHA-256: 32)"};
  }
  return {};
}

/// Never destroyed: somebody may still use it.
void leave(std::shared_ptr<const void> left) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::vector<std::shared_ptr<const void>>;
  const std::lock_guard lock(*mutex);
  all->push_back(std::move(left));
}

}  // namespace

Result<std::unique_ptr<Engine>> Engine::create(std::unique_ptr<const Cache> cache, const EngineConfig& config,
                                               EngineParts parts) {
  KVPUSH_TRY(Core::check(*cache, config.core));
  return std::unique_ptr<Engine>(new Engine(std::move(cache), config, std::move(parts)));
}

Engine::Engine(std::unique_ptr<const Cache> cache, const EngineConfig& config, EngineParts parts)
    : cache_(std::move(cache)),
      config_(config),
      parts_(std::move(parts)),
      transport_name_(parts_.is_auto ? "auto" : parts_.transport->name()),
      core_(std::make_unique<Core>(*cache_, config.core, *parts_.transport, *parts_.packer,
                                   parts_.incarnation, monotonic_us())),
      registry_(*cache_, config.max_open_transfers),
      made_{{std::string(parts_.transport->name()), Status()}},
      thread_([this] { run(); }) {}

Engine::~Engine() {
  close();
}

// --- calls

Status Engine::submit_locked(Command command) {
  if (closing_) return closed_status();
  commands_.push_back(std::move(command));
  if (commands_.size() == 1) wake_.notify();
  return {};
}

Status Engine::submit(Command command) {
  // Before the lock: a thread that a forked child lacks may hold it. So everywhere below.
  if (forked()) return closed_status();
  const std::lock_guard lock(mutex_);
  return submit_locked(std::move(command));
}

/// Not under the lock: the driver may take long, and the progress thread needs the lock. Once the engine is
/// closing, the packer forgets the fence by itself.
Result<FenceId> Engine::capture(std::uint64_t event) {
  if (event == 0) return FenceId{0};
  {
    const std::lock_guard lock(mutex_);
    if (closing_) return closed_status();
    ++num_captures_;
  }
  Result<FenceId> fence = parts_.packer->capture(event);
  const std::lock_guard lock(mutex_);
  --num_captures_;
  captured_.notify_all();
  return fence;
}

template <typename T>
T Engine::ask(std::function<T(Core&, TimeUs)> question, T when_closed) {
  auto promise = std::make_shared<std::promise<T>>();
  std::future<T> reply = promise->get_future();
  const Status status = submit([promise, question = std::move(question)](Core& core, TimeUs now) {
    promise->set_value(question(core, now));
  });
  return status.ok() ? reply.get() : std::move(when_closed);
}

const std::vector<Path>& Engine::paths() {
  const std::lock_guard lock(source_mutex_);
  if (!paths_) {
    paths_ = parts_.source ? parts_.source->look()
                           : std::vector<Path>{{std::string(parts_.transport->name()), "", {}}};
  }
  return *paths_;
}

/// Not on the progress thread: making one may take 100 ms and more. What failed is not tried again.
Status Engine::open_transport(const std::string& name) {
  const std::lock_guard lock(source_mutex_);
  if (const auto made = made_.find(name); made != made_.end()) return made->second;
  Result<std::unique_ptr<Transport>> transport = parts_.source->make(name);
  Status status = transport.ok() ? Status() : transport.status();
  if (status.ok()) {
    auto owned = std::make_shared<std::unique_ptr<Transport>>(std::move(transport).value());
    status = submit([this, owned](Core& core, TimeUs) {
      core.add(**owned);
      others_.push_back(std::move(*owned));
    });
  } else {
    log(LogLevel::kWarning,
        "transport " + name + " seemed to be there and cannot be used: " + status.message());
  }
  return made_.emplace(name, std::move(status)).first->second;
}

Result<Bytes> Engine::hello() {
  if (closed()) return closed_status();
  return encode(Hello{parts_.incarnation, config_.core.min_link_bytes_per_s != 0, paths()});
}

Result<Bytes> Engine::offer(Bytes hello) {
  if (hello.empty()) {
    return ask<Result<Bytes>>([](Core& core, TimeUs now) { return core.offer(now); }, closed_status());
  }
  if (closed()) return closed_status();
  Result<Hello> peer = decode_hello(hello);
  if (!peer.ok()) return peer.status();
  const std::vector<std::string> names = common_paths(paths(), peer.value().paths);
  if (names.empty()) {
    return Status(Code::kHandshake, "no transport in common: theirs " + describe(peer.value().paths) +
                                        ", ours " + describe(paths()));
  }
  Core::Choice choice{"", peer.value().engine, peer.value().measures};
  Status status;
  for (std::size_t tries = 0; tries < names.size(); ++tries) {
    choice.transport = ask<std::string>(
        [&](Core& core, TimeUs) {
          return core.rates().choose(choice.peer, names, core.config().min_link_bytes_per_s);
        },
        "");
    if (choice.transport.empty()) return closed_status();
    status = open_transport(choice.transport);
    if (status.ok()) {
      return ask<Result<Bytes>>([choice](Core& core, TimeUs now) { return core.offer(now, choice); },
                                closed_status());
    }
    KVPUSH_TRY(submit([choice](Core& core, TimeUs) { core.rates().note(choice.peer, choice.transport, 0); }));
  }
  return status;
}

Result<Core::Link> Engine::link(const SessionId& session, TimeUs timeout_us) {
  auto promise = std::make_shared<std::promise<void>>();
  const std::future<void> measured = promise->get_future();
  KVPUSH_TRY(submit([this, promise, session](Core&, TimeUs) {
    pending_.emplace_back([promise, session](Core& core) {
      const auto link = core.link(session);
      if (link.ok() && link.value().is_measuring) return false;
      promise->set_value();
      return true;
    });
  }));
  (void)measured.wait_for(std::chrono::microseconds(std::clamp(timeout_us, TimeUs{0}, kLongestWaitUs)));
  return ask<Result<Core::Link>>([session](Core& core, TimeUs) { return core.link(session); },
                                 closed_status());
}

Result<Bytes> Engine::answer(Bytes offer) {
  if (parts_.is_auto && !closed()) {
    // An offer that cannot be read, or names what is not there, is refused by the core, in words.
    const Result<Offer> decoded = decode_offer(offer);
    const auto names = [&](const Path& path) {
      return decoded.ok() && path.name == decoded.value().transport;
    };
    if (decoded.ok() && std::ranges::any_of(paths(), names)) {
      KVPUSH_TRY(open_transport(decoded.value().transport));
    }
  }
  return ask<Result<Bytes>>(
      [offer = std::move(offer)](Core& core, TimeUs now) { return core.answer(offer, now); },
      closed_status());
}

Result<SessionId> Engine::establish(Bytes answer) {
  return ask<Result<SessionId>>(
      [this, answer = std::move(answer)](Core& core, TimeUs now) {
        Result<SessionId> session = core.establish(answer, now);
        const std::lock_guard lock(mutex_);
        if (session.ok()) registry_.add_session(session.value());
        return session;
      },
      closed_status());
}

Status Engine::withdraw(Bytes offer) {
  return ask<Status>([offer = std::move(offer)](Core& core, TimeUs now) { return core.withdraw(offer, now); },
                     closed_status());
}

Status Engine::disconnect(const SessionId& session) {
  return ask<Status>([session](Core& core, TimeUs now) { return core.disconnect(session, now); },
                     closed_status());
}

Result<HandleId> Engine::push(const std::string& key, Bytes digest) {
  if (forked()) return closed_status();
  KVPUSH_TRY(check_key(key, &digest));
  const std::lock_guard lock(mutex_);
  if (closing_) return closed_status();
  const HandleId handle = next_handle_;
  KVPUSH_TRY(registry_.add_push(handle, key));
  ++next_handle_;
  KVPUSH_TRY(submit_locked([handle, key, digest = std::move(digest)](Core& core, TimeUs now) {
    core.sender().push(handle, key, digest, now, core.actions());
  }));
  return handle;
}

Status Engine::advance(HandleId push, BlockIds ids, std::uint64_t after) {
  if (forked()) return closed_status();
  KVPUSH_TRY(registry_.check_ids(ids));
  const Result<FenceId> fence = capture(after);
  if (!fence.ok()) return fence.status();
  const std::lock_guard lock(mutex_);
  return submit_locked([push, ids = std::move(ids), fence = fence.value()](Core& core, TimeUs now) {
    core.gate().advance(push, ids, fence, now, core.actions());
  });
}

Result<std::vector<std::uint32_t>> Engine::retract(HandleId push) {
  using Reply = std::vector<std::uint32_t>;
  auto promise = std::make_shared<std::promise<Reply>>();
  std::future<Reply> reply = promise->get_future();
  KVPUSH_TRY(submit([this, promise, push](Core& core, TimeUs) {
    core.gate().retract(push);
    pending_.emplace_back([promise, push](Core& quiet_core) {
      if (!quiet_core.sender().quiescent(push)) return false;
      promise->set_value(quiet_core.sender().resume(push));
      return true;
    });
  }));
  try {
    return reply.get();
  } catch (const std::future_error&) {
    return closed_status();  // the engine closed at its deadline with the pack still running
  }
}

Status Engine::finish(HandleId push) {
  return submit([push](Core& core, TimeUs now) { core.gate().finish(push, now, core.actions()); });
}

Status Engine::abort(HandleId push, std::string reason) {
  return submit([push, reason = std::move(reason)](Core& core, TimeUs now) {
    core.gate().abort(push, reason, now, core.actions());
  });
}

Status Engine::evict(std::uint32_t count) {
  return submit([count](Core& core, TimeUs now) { core.sender().evict(count, now, core.actions()); });
}

Result<TransferId> Engine::expect(const SessionId& session, const std::string& key) {
  if (forked()) return closed_status();
  KVPUSH_TRY(check_key(key, nullptr));
  const std::lock_guard lock(mutex_);
  if (closing_) return closed_status();
  KVPUSH_TRY(registry_.check_session(session));
  const TransferId transfer = next_transfer_;
  KVPUSH_TRY(registry_.add_claim(transfer));
  ++next_transfer_;
  KVPUSH_TRY(submit_locked([session, transfer, key](Core& core, TimeUs now) {
    core.receiver().expect(session, transfer, key, now, core.actions());
  }));
  return transfer;
}

Result<std::pair<HandleId, TransferId>> Engine::receive(const SessionId& session, TransferId claim,
                                                        const std::string& key, Bytes digest,
                                                        protocol::Destination destination,
                                                        std::uint64_t after) {
  if (forked()) return closed_status();
  KVPUSH_TRY(check_key(key, &digest));
  if (destination.first.size() != destination.blocks.size()) {
    return Status(Code::kInvalidArgument, "first has " + std::to_string(destination.first.size()) +
                                              " entries, blocks has " +
                                              std::to_string(destination.blocks.size()));
  }
  for (std::size_t g = 0; g < destination.blocks.size(); ++g) {
    if (destination.first[g] + destination.blocks[g].size() > INT32_MAX) {
      return Status(Code::kInvalidArgument, "first[" + std::to_string(g) + "] is " +
                                                std::to_string(destination.first[g]) + ", too large");
    }
  }
  protocol::Envelope probe;
  probe.body = protocol::Open{0, key, digest, wanted_of(destination)};
  if (encode(probe).size() > protocol::kMaxMessageBytes) {
    return Status(Code::kInvalidArgument,
                  "the holes split blocks into more ranges than one OPEN can name; receive in several keys");
  }
  const Result<FenceId> fence = capture(after);
  if (!fence.ok()) return fence.status();
  const std::lock_guard lock(mutex_);
  if (closing_) return closed_status();
  const auto refused = [&](Status status) {
    parts_.packer->drop(fence.value());
    return status;
  };
  // A claim that its session outlived still ends with an event; only a new transfer needs an open session.
  if (claim == 0) {
    if (Status status = registry_.check_session(session); !status.ok()) return refused(std::move(status));
  }
  const HandleId handle = next_handle_;
  // The claim's room becomes the receive's; a refused call leaves the claim open.
  const bool claimed = registry_.remove_claim(claim);
  if (Status status = registry_.add_receive(handle, destination); !status.ok()) {
    if (claimed) (void)registry_.add_claim(claim);
    return refused(std::move(status));
  }
  ++next_handle_;
  const TransferId transfer = claim != 0 ? claim : next_transfer_++;
  KVPUSH_TRY(submit_locked([=, digest = std::move(digest), destination = std::move(destination),
                            fence = fence.value()](Core& core, TimeUs now) {
    core.gate().receive(session, transfer, handle, key, digest, destination, fence, now, core.actions());
  }));
  return std::pair(handle, transfer);
}

Status Engine::cancel(TransferId transfer) {
  if (forked()) return closed_status();
  const std::lock_guard lock(mutex_);
  registry_.remove_claim(transfer);
  return submit_locked(
      [transfer](Core& core, TimeUs now) { core.gate().cancel(transfer, now, core.actions()); });
}

Result<std::vector<protocol::Event>> Engine::poll(TimeUs timeout_us) {
  if (forked()) return closed_status();
  std::unique_lock lock(mutex_);
  if (events_.empty() && timeout_us > 0 && !closed_) {
    arrived_.wait_for(lock, std::chrono::microseconds(std::min(timeout_us, TimeUs{86'400'000'000})),
                      [this] { return !events_.empty() || closed_; });
  }
  if (events_.empty() && closed_) return closed_status();
  std::vector<protocol::Event> events(std::make_move_iterator(events_.begin()),
                                      std::make_move_iterator(events_.end()));
  events_.clear();
  return events;
}

Result<Stats> Engine::stats() {
  return ask<Result<Stats>>([](Core& core, TimeUs) { return Result<Stats>(core.stats()); }, closed_status());
}

bool Engine::closed() const {
  if (forked()) return true;
  const std::lock_guard lock(mutex_);
  return closing_;
}

bool Engine::cache_in_use() const {
  if (forked()) return false;
  const std::lock_guard lock(mutex_);
  return cache_in_use_;
}

void Engine::close() {
  if (forked()) return;
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    wake_.notify();
  }
  // Two closers: the second waits for the first.
  const std::lock_guard lock(join_mutex_);
  if (thread_.joinable()) thread_.join();
}

// --- the progress thread

void Engine::run() {
  std::deque<Command> commands;
  bool stopping = false;
  TimeUs deadline = kNever;
  TimeUs linger_until = 0;
  while (true) {
    const TimeUs now = monotonic_us();
    {
      const std::lock_guard lock(mutex_);
      std::swap(commands, commands_);
      if (closing_ && !stopping) {
        stopping = true;
        deadline = now + config_.close_timeout_us;
        if (!can_wait()) linger_until = now + kLingerUs;
      }
    }
    for (Command& command : commands) command(*core_, now);
    const bool commanded = !std::exchange(commands, {}).empty();
    if (stopping) core_->shut_down(now);
    const bool progressed = core_->turn(now);
    if (core_->moved_at() == now) spin_until_ = monotonic_us() + kSpinUs;
    std::erase_if(pending_, [this](const auto& reply) { return reply(*core_); });
    publish();
    const bool done = core_->quiet() && now >= linger_until;
    if (stopping && ((done && pending_.empty()) || now >= deadline)) break;
    if (!commanded && !progressed) wait(now, deadline);
  }
  pending_.clear();
  std::unique_lock lock(mutex_);
  const std::chrono::microseconds left(std::max(deadline - monotonic_us(), TimeUs{0}));
  if (captured_.wait_for(lock, left, [this] { return num_captures_ == 0; })) {
    lock.unlock();
    // Ends with the copy that the CPU runs: after close() the cache's memory is the caller's.
    parts_.packer.reset();
    lock.lock();
  } else {
    log(LogLevel::kError, "engine closed while a call waits in the driver: its packer ends with the engine");
  }
  if (!core_->quiet()) {
    log(LogLevel::kError,
        "engine closed with posts or copies of unknown fate: what they use is left to the end of the "
        "process");
    cache_in_use_ = true;
    leave(std::shared_ptr<const Core>(std::move(core_)));
    leave(std::shared_ptr<const Transport>(std::move(parts_.transport)));
    for (auto& other : others_) leave(std::shared_ptr<const Transport>(std::move(other)));
  }
  closed_ = true;
  arrived_.notify_all();
}

void Engine::wait(TimeUs now, TimeUs deadline) {
  TimeUs timeout = std::clamp(std::min(core_->next_deadline(), deadline) - now, TimeUs{0}, kLongestWaitUs);
  if (core_->copies_unseen()) {
    std::this_thread::yield();
    return;
  }
  if (core_->fenced()) timeout = std::min(timeout, kPollFenceUs);
  if (!can_wait()) {
    // A post's notice leaves, and a box arrives, only while somebody looks.
    if (core_->busy(now)) {
      std::this_thread::yield();
      return;
    }
    timeout = std::min(timeout, core_->open() ? kPollOpenUs : kPollIdleUs);
  } else if (now < spin_until_) {
    std::this_thread::yield();
    return;
  } else if (arm_wait()) {
    return;
  }
  fds_.assign(1, parts_.packer->wait_fd());
  for (const Carrier& carrier : core_->carriers()) fds_.push_back(carrier.transport.wait_fd());
  wake_.wait(fds_, timeout);
}

bool Engine::can_wait() const {
  return std::ranges::all_of(core_->carriers(),
                             [](const Carrier& carrier) { return carrier.transport.wait_fd() >= 0; });
}

bool Engine::arm_wait() {
  // All of them, whatever the first ones say.
  bool arrived = false;
  for (const Carrier& carrier : core_->carriers()) arrived |= carrier.transport.arm_wait();
  return arrived;
}

void Engine::publish() {
  std::vector<protocol::Event> events = core_->take_events();
  if (events.empty()) return;
  const std::lock_guard lock(mutex_);
  for (protocol::Event& event : events) {
    registry_.remove(event.handle);
    if (event.kind == protocol::Event::Kind::kLost) registry_.remove_session(event.session);
    events_.push_back(std::move(event));
  }
  arrived_.notify_all();
}

}  // namespace kvpush
