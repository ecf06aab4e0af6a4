// The engine as its caller sees it: thread-safe calls in, events out, one progress thread between.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/core.hpp"
#include "engine/registry.hpp"
#include "engine/wake.hpp"

namespace kvpush {

struct EngineConfig {
  CoreConfig core;
  std::size_t max_open_transfers = 65536;
  TimeUs close_timeout_us = 5'000'000;
};

/// What an engine may choose a transport from.
class TransportSource {
 public:
  virtual ~TransportSource() = default;
  /// What is there, better ones first among equals. May take as long as libraries take to look at devices.
  virtual std::vector<Path> look() = 0;
  /// One of those.
  virtual Result<std::unique_ptr<Transport>> make(const std::string& name) = 0;
};

/// What the engine is put together from. `transport` is what it begins with.
struct EngineParts {
  Incarnation incarnation;
  std::unique_ptr<Transport> transport;
  std::unique_ptr<Packer> packer;
  std::unique_ptr<TransportSource> source;  ///< of the others: each is made when first needed
  bool is_auto = false;                     ///< `source` may be asked for others than `transport`
};

using BlockIds = std::vector<std::vector<std::int32_t>>;

/// Thread-safe. Calls validate, copy and return; only hello, offer, answer, establish, retract and close
/// wait, and none of them for a peer; link may wait for one, for as long as it is told to. Every push and
/// receive has exactly one terminal event in poll(). Handles that have ended accept and ignore further calls.
class Engine {
 public:
  /// The cache's memory must outlive the engine. `cache` must be the one the packer was made for.
  static Result<std::unique_ptr<Engine>> create(std::unique_ptr<const Cache> cache,
                                                const EngineConfig& config, EngineParts parts);
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();  ///< close(), silently

  /// P: what D may choose a transport by. Looks at the machine, once.
  Result<Bytes> hello();
  /// D: over the transport that is best by the peer's `hello`; over the first without one (empty).
  Result<Bytes> offer(Bytes hello = {});
  Result<Bytes> answer(Bytes offer);
  Result<SessionId> establish(Bytes answer);
  /// The session's transport and rate; waits up to `timeout_us` for a measurement that is under way.
  Result<Core::Link> link(const SessionId& session, TimeUs timeout_us);
  Status withdraw(Bytes offer);
  Status disconnect(const SessionId& session);

  Result<HandleId> push(const std::string& key, Bytes digest);
  /// `after` is the handle of a CUDA event behind which the blocks hold their KV, or 0. What it stands for is
  /// taken down before this returns. Unsupported where the cache's memory knows no events.
  Status advance(HandleId push, BlockIds ids, std::uint64_t after = 0);
  /// Waits for running packs only, never for an event. Per group, the position at which the next advance goes
  /// on.
  Result<std::vector<std::uint32_t>> retract(HandleId push);
  Status finish(HandleId push);
  Status abort(HandleId push, std::string reason);
  Status evict(std::uint32_t count);

  Result<TransferId> expect(const SessionId& session, const std::string& key);
  /// `claim` is expect()'s transfer, or 0. Nothing is written before what `after` stands for, as in
  /// advance().
  Result<std::pair<HandleId, TransferId>> receive(const SessionId& session, TransferId claim,
                                                  const std::string& key, Bytes digest,
                                                  protocol::Destination destination, std::uint64_t after = 0);
  Status cancel(TransferId transfer);

  /// Events so far; waits up to `timeout_us` for the first. After close() the rest, then Closed.
  Result<std::vector<protocol::Event>> poll(TimeUs timeout_us);
  [[nodiscard]] Result<Stats> stats();
  [[nodiscard]] std::string incarnation() const { return to_string(parts_.incarnation); }
  /// "auto" where each session has one of its own.
  [[nodiscard]] std::string transport() const { return transport_name_; }

  /// Ends everything. What cannot be proven quiet within close_timeout is left mapped and logged.
  void close();
  [[nodiscard]] bool closed() const;
  /// After close(): whether a copy on a device may still touch the cache's memory, which then must stay.
  [[nodiscard]] bool cache_in_use() const;
  /// Whether this is a child of the engine's process, which has no progress thread. Calls then say Closed.
  [[nodiscard]] bool forked() const noexcept { return ::getpid() != pid_; }

 private:
  using Command = std::function<void(Core&, TimeUs)>;

  Engine(std::unique_ptr<const Cache> cache, const EngineConfig& config, EngineParts parts);
  void run();
  void wait(TimeUs now, TimeUs deadline);
  [[nodiscard]] bool can_wait() const;
  [[nodiscard]] bool arm_wait();
  void publish();
  Status submit(Command command);
  template <typename T>
  T ask(std::function<T(Core&, TimeUs)> question, T when_closed);
  Status submit_locked(Command command);
  Result<FenceId> capture(std::uint64_t event);
  const std::vector<Path>& paths();
  Status open_transport(const std::string& name);

  const pid_t pid_ = ::getpid();
  std::unique_ptr<const Cache> cache_;
  EngineConfig config_;
  EngineParts parts_;
  std::string transport_name_;
  std::vector<std::unique_ptr<Transport>> others_;   ///< progress thread only: beside parts_.transport
  std::unique_ptr<Core> core_;                       ///< progress thread only
  std::vector<std::function<bool(Core&)>> pending_;  ///< progress thread only: answers that wait for packs
  TimeUs spin_until_ = 0;                            ///< progress thread only
  std::vector<int> fds_;                             ///< progress thread only
  Wake wake_;

  mutable std::mutex mutex_;
  std::condition_variable arrived_;
  std::deque<Command> commands_;
  std::deque<protocol::Event> events_;
  Registry registry_;
  HandleId next_handle_ = 1;
  TransferId next_transfer_ = 1;
  unsigned num_captures_ = 0;  ///< under way: the packer must not end
  std::condition_variable captured_;
  bool closing_ = false;
  bool closed_ = false;
  bool cache_in_use_ = false;

  std::mutex source_mutex_;  ///< never held by the progress thread
  std::optional<std::vector<Path>> paths_;
  std::map<std::string, Status> made_;  ///< transports that were asked for, and how that went

  std::mutex join_mutex_;
  std::thread thread_;
};

}  // namespace kvpush
