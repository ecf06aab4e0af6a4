// Engine, Push, Claim and Receive as Python sees them. Every call releases the GIL.

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "bindings/bindings.hpp"

namespace kvpush::bindings {
namespace {

using EnginePtr = std::shared_ptr<Engine>;
constexpr TimeUs kUsPerSecond = 1'000'000;
constexpr double kLongestPollSeconds = 86'400;

std::int32_t to_block_id(long long value) {
  if (value < std::numeric_limits<std::int32_t>::min() || value > std::numeric_limits<std::int32_t>::max()) {
    raise({Code::kInvalidArgument, "block id " + std::to_string(value) + " does not fit 32 bits"});
  }
  return static_cast<std::int32_t>(value);
}

template <typename T>
std::vector<std::int32_t> copy_ids(const py::buffer_info& info) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(info.size));
  const auto* data = static_cast<const std::byte*>(info.ptr);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    T value;
    std::memcpy(&value, data + static_cast<py::ssize_t>(i) * info.strides[0], sizeof(T));
    ids[i] = to_block_id(static_cast<long long>(value));
  }
  return ids;
}

std::vector<std::int32_t> ids_from(const py::handle& group) {
  if (PyObject_CheckBuffer(group.ptr()) != 0 && !py::isinstance<py::bytes>(group)) {
    const py::buffer_info info = py::reinterpret_borrow<py::buffer>(group).request();
    if (info.ndim == 1 && info.item_type_is_equivalent_to<std::int32_t>())
      return copy_ids<std::int32_t>(info);
    if (info.ndim == 1 && info.item_type_is_equivalent_to<std::int64_t>())
      return copy_ids<std::int64_t>(info);
  }
  std::vector<std::int32_t> ids;
  for (const py::handle item : group) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(item.ptr()));
    if (!index) throw py::error_already_set();
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    ids.push_back(to_block_id(overflow != 0 ? std::numeric_limits<long long>::max() : value));
  }
  return ids;
}

BlockIds blocks_from(const py::iterable& blocks) {
  BlockIds ids;
  for (const py::handle group : blocks) ids.push_back(ids_from(group));
  return ids;
}

std::string key_from(const py::str& key) {
  py::ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    raise({Code::kInvalidArgument, "the key holds a lone surrogate; it must be valid Unicode text"});
  }
  return {text, static_cast<std::size_t>(size)};
}

Bytes bytes_from(const py::bytes& bytes) {
  const std::string_view view = bytes;
  const auto raw = std::as_bytes(std::span(view.data(), view.size()));
  return {raw.begin(), raw.end()};
}

py::bytes to_python(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

SessionId session_from(const std::string& peer) {
  SessionId session;
  bool ok = peer.size() == 2 * session.bytes.size();
  for (std::size_t i = 0; ok && i < peer.size(); ++i) {
    const char c = peer[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    ok = digit >= 0;
    if (ok) session.bytes[i / 2] = static_cast<std::uint8_t>(session.bytes[i / 2] * 16 + digit);
  }
  if (!ok) raise({Code::kInvalidArgument, "'" + peer + "' is not a peer: use what establish() returned"});
  return session;
}

protocol::Destination destination_from(const py::iterable& blocks,
                                       const std::optional<std::vector<std::uint32_t>>& first) {
  protocol::Destination destination;
  destination.blocks = blocks_from(blocks);
  destination.first = first.value_or(std::vector<std::uint32_t>(destination.blocks.size(), 0));
  return destination;
}

/// Without the GIL: the progress thread may take a moment, other Python threads need not wait for it.
template <typename F>
auto unlocked(F&& call) {
  const py::gil_scoped_release release;
  return call();
}

// A handle holds the Python engine, which holds the arrays. Not by py::keep_alive: in pybind11 3.1.0 that
// crashes on a call with an argument of a wrong type.

struct Push {
  py::object owner;
  EnginePtr engine;
  HandleId handle;
  std::string key;
  bool finished = false;

  Push(const EnginePtr& engine_, HandleId handle_, std::string key_)
      : owner(py::cast(engine_)), engine(engine_), handle(handle_), key(std::move(key_)) {}
  Push(const Push&) = delete;
  Push& operator=(const Push&) = delete;
  ~Push() {
    if (!finished) (void)engine->abort(handle, "the handle was dropped before finish()");
  }
};

struct Receive {
  py::object owner;
  EnginePtr engine;
  HandleId handle;
  TransferId transfer;
  std::string key;

  Receive(const EnginePtr& engine_, HandleId handle_, TransferId transfer_, std::string key_)
      : owner(py::cast(engine_)),
        engine(engine_),
        handle(handle_),
        transfer(transfer_),
        key(std::move(key_)) {}
  Receive(const Receive&) = delete;
  Receive& operator=(const Receive&) = delete;
  ~Receive() { (void)engine->cancel(transfer); }
};

struct Claim {
  py::object owner;
  EnginePtr engine;
  SessionId session;
  TransferId transfer;
  std::string key;
  bool used = false;

  Claim(const EnginePtr& engine_, const SessionId& session_, TransferId transfer_, std::string key_)
      : owner(py::cast(engine_)),
        engine(engine_),
        session(session_),
        transfer(transfer_),
        key(std::move(key_)) {}
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  ~Claim() { cancel(); }

  void cancel() {
    if (!std::exchange(used, true)) (void)engine->cancel(transfer);
  }
};

std::unique_ptr<Receive> start_receive(const EnginePtr& engine, const SessionId& session, TransferId claim,
                                       const std::string& key, const py::bytes& digest,
                                       const py::iterable& blocks,
                                       const std::optional<std::vector<std::uint32_t>>& first,
                                       const std::optional<std::uint64_t>& after) {
  protocol::Destination destination = destination_from(blocks, first);
  Bytes digest_bytes = bytes_from(digest);
  const auto [handle, transfer] = check(unlocked([&] {
    return engine->receive(session, claim, key, std::move(digest_bytes), std::move(destination),
                           after.value_or(0));
  }));
  return std::make_unique<Receive>(engine, handle, transfer, key);
}

py::dict failures(const std::array<std::uint64_t, kNumFailCodes>& counts) {
  py::dict by_code;
  for (std::size_t i = 1; i < counts.size(); ++i) {
    if (counts[i] != 0) by_code[py::str(std::string(to_string(static_cast<FailCode>(i))))] = counts[i];
  }
  return by_code;
}

py::dict to_python(const Stats& stats) {
  py::dict out;
#define KVPUSH_FIELD(name) out[#name] = stats.name
  KVPUSH_FIELD(network_ops);
  KVPUSH_FIELD(boxes_sent);
  KVPUSH_FIELD(boxes_received);
  KVPUSH_FIELD(boxes_discarded);
  KVPUSH_FIELD(bytes_sent);
  KVPUSH_FIELD(bytes_received);
  KVPUSH_FIELD(messages_sent);
  KVPUSH_FIELD(messages_received);
  KVPUSH_FIELD(breaches);
  KVPUSH_FIELD(pushes_sent);
  KVPUSH_FIELD(receives_done);
  KVPUSH_FIELD(sessions_opened);
  KVPUSH_FIELD(sessions_ended);
  KVPUSH_FIELD(pack_us);
  KVPUSH_FIELD(unpack_us);
  KVPUSH_FIELD(post_us);
  KVPUSH_FIELD(sessions);
  KVPUSH_FIELD(open_pushes);
  KVPUSH_FIELD(open_claims);
  KVPUSH_FIELD(open_receives);
  KVPUSH_FIELD(credits);
  KVPUSH_FIELD(leases_in_use);
  KVPUSH_FIELD(landing_bytes);
  KVPUSH_FIELD(quarantined_bytes);
  KVPUSH_FIELD(slow_links);
  KVPUSH_FIELD(link_bytes_per_s);
#undef KVPUSH_FIELD
  out["push_failures"] = failures(stats.push_failures);
  out["receive_failures"] = failures(stats.receive_failures);
  return out;
}

void bind_handles(py::module_& module) {
  py::class_<Push>(module, "Push", R"(P's side of one request, from Engine.push() to its one event.

Dropped before finish() it is aborted. Thread-safe. After the event every call does nothing.)")
      .def_readonly("handle", &Push::handle, "Event.handle of its event.")
      .def_readonly("key", &Push::key)
      .def(
          "advance",
          [](Push& self, const py::iterable& blocks, const std::optional<std::uint64_t>& after) {
            BlockIds ids = blocks_from(blocks);
            check(unlocked(
                [&] { return self.engine->advance(self.handle, std::move(ids), after.value_or(0)); }));
          },
          py::arg("blocks"), py::arg("after") = py::none(), R"(These blocks, next in order, hold finished KV.

blocks: per group, the block ids of its next positions; -1 is a hole. after: handle of a CUDA event (torch:
event.cuda_event) that was recorded behind the kernels that write them; None if they are written already. What it
stands for is taken down at the call: it may be recorded anew or destroyed afterwards. Later calls of this push
keep their order behind it. Never waits. Errors: InvalidArgument (id out of range, wrong number of groups),
Unsupported (an event, but the cache is in host memory), TransportError (CUDA refuses it).)")
      .def(
          "retract",
          [](Push& self) {
            auto positions = check(unlocked([&] { return self.engine->retract(self.handle); }));
            self.finished = false;
            return positions;
          },
          R"(Takes back what is not packed yet, before its blocks are overwritten.

Waits for running packs only, never for an event: what waits for one is forgotten. Returns, per group, the
position at which the next advance() goes on. A push that was finished is open again: there is more to come.)")
      .def(
          "finish",
          [](Push& self) {
            self.finished = true;
            check(unlocked([&] { return self.engine->finish(self.handle); }));
          },
          "That was all: 'sent' follows when everything that D wants is packed.")
      .def(
          "abort",
          [](Push& self, const std::string& reason) {
            self.finished = true;
            check(unlocked([&] { return self.engine->abort(self.handle, reason); }));
          },
          py::arg("reason") = "aborted", "Ends it: 'failed' with status 'aborted', and D is told.");

  py::class_<Receive>(module, "Receive", R"(D's side of one request, from receive() to its one event.

Dropped early it is cancelled. Thread-safe. After the event every call does nothing.)")
      .def_readonly("handle", &Receive::handle, "Event.handle of its event.")
      .def_readonly("key", &Receive::key)
      .def_readonly("transfer", &Receive::transfer)
      .def(
          "cancel",
          [](Receive& self) { check(unlocked([&] { return self.engine->cancel(self.transfer); })); },
          "Ends it: 'failed' with status 'cancelled', at once or when a running unpack ends. Never waits for "
          "P.");

  py::class_<Claim>(module, "Claim",
                    "D has told P that it will want this key. Dropped unused it is cancelled.")
      .def_readonly("key", &Claim::key)
      .def_readonly("transfer", &Claim::transfer)
      .def(
          "receive",
          [](Claim& self, const py::bytes& digest, const py::iterable& blocks,
             const std::optional<std::vector<std::uint32_t>>& first,
             const std::optional<std::uint64_t>& after) {
            if (self.used)
              raise({Code::kInvalidArgument, "the claim of key '" + self.key + "' was used or cancelled"});
            auto receive = start_receive(self.engine, self.session, self.transfer, self.key, digest, blocks,
                                         first, after);
            self.used = true;
            return receive;
          },
          py::arg("digest"), py::arg("blocks"), py::arg("first") = py::none(), py::arg("after") = py::none(),
          "As Engine.receive(), for the claimed key.")
      .def(
          "cancel", [](Claim& self) { unlocked([&] { self.cancel(); }); },
          "P may drop the push. Does nothing once receive() was called.");
}

}  // namespace

void bind_engine(py::module_& module) {
  bind_handles(module);
  py::class_<Engine, EnginePtr>(module, "Engine")
      .def(py::init([](const py::dict& cache_description, const py::dict& config_description) {
             std::unique_ptr<const Cache> cache = cache_from(cache_description);
             const EngineConfig config = config_from(config_description);
             check(Core::check(*cache, config.core));
             EngineParts parts = parts_from(config_description, *cache);
             std::unique_ptr<Engine> engine =
                 check(Engine::create(std::move(cache), config, std::move(parts)));
             // In a forked child its thread is gone and its sockets are the parent's: it is left alone.
             return EnginePtr(engine.release(), [](Engine* made) {
               if (!made->forked()) delete made;
             });
           }),
           py::arg("cache"), py::arg("config"))
      .def_property_readonly("incarnation", &Engine::incarnation,
                             "This engine's life: 32 hex digits, random.")
      .def_property_readonly("transport", &Engine::transport,
                             "The transport in use; 'auto' where each session has its own: link() tells.")
      .def(
          "hello", [](Engine& self) { return to_python(check(unlocked([&] { return self.hello(); }))); },
          "P: what D may choose a transport by. The first call looks at the machine.")
      .def(
          "offer",
          [](Engine& self, const py::bytes& peer) {
            Bytes hello = bytes_from(peer);
            return to_python(check(unlocked([&] { return self.offer(std::move(hello)); })));
          },
          py::arg("peer") = py::bytes(), R"(D: opens a landing for one peer and describes it and the cache.

peer: its hello(); empty: offers the first transport. Errors: Exhausted (landing_bytes is spent and no session is
idle), HandshakeError (no transport in common; both lists are named).)")
      .def(
          "link",
          [](Engine& self, const std::string& peer, double timeout) {
            const SessionId session = session_from(peer);
            const auto wait_us =
                static_cast<TimeUs>(std::clamp(timeout, 0.0, kLongestPollSeconds) * kUsPerSecond);
            const Core::Link link = check(unlocked([&] { return self.link(session, wait_us); }));
            return std::pair(link.transport, static_cast<double>(link.bytes_per_s) / 1e9);
          },
          py::arg("peer"), py::arg("timeout") = 0.0,
          R"(Over which transport a session is, and its measured rate in GB/s; 0.0 if it was not measured.

Waits up to timeout seconds for a measurement that is under way. Errors: PeerLost.)")
      .def(
          "answer",
          [](Engine& self, const py::bytes& offer) {
            Bytes bytes = bytes_from(offer);
            return to_python(check(unlocked([&] { return self.answer(std::move(bytes)); })));
          },
          py::arg("offer"), R"(P: takes D's offer. The same offer gets the same answer.

Errors: HandshakeError names the field that does not fit, and both values.)")
      .def(
          "establish",
          [](Engine& self, const py::bytes& answer) {
            Bytes bytes = bytes_from(answer);
            return to_string(check(unlocked([&] { return self.establish(std::move(bytes)); })));
          },
          py::arg("answer"), R"(D: takes P's answer; returns the peer, to be named in expect() and receive().

Errors: HandshakeError (not this engine's offer, too late, or P cannot be reached).)")
      .def(
          "withdraw",
          [](Engine& self, const py::bytes& offer) {
            Bytes bytes = bytes_from(offer);
            check(unlocked([&] { return self.withdraw(std::move(bytes)); }));
          },
          py::arg("offer"), R"(D: takes back an offer that nobody will answer; its landing is free at once.

Does nothing once the offer was established or has expired. Errors: HandshakeError (another engine's offer).)")
      .def(
          "disconnect",
          [](Engine& self, const std::string& peer) {
            const SessionId session = session_from(peer);
            check(unlocked([&] { return self.disconnect(session); }));
          },
          py::arg("peer"), "Says BYE; open transfers with this peer fail. Errors: PeerLost.")
      .def(
          "push",
          [](const EnginePtr& self, const py::str& key, const py::bytes& digest) {
            const std::string name = key_from(key);
            Bytes bytes = bytes_from(digest);
            const HandleId handle = check(unlocked([&] { return self->push(name, std::move(bytes)); }));
            return std::make_unique<Push>(self, handle, name);
          },
          py::arg("key"), py::arg("digest"), R"(P: this request is being prefilled.

key: 1 to 512 bytes, the same as D's. digest: 1 to 64 bytes over all that determines the KV; D's must equal it.
Errors: DuplicateKey, QueueFull, InvalidArgument, ClosedError.)")
      .def(
          "expect",
          [](const EnginePtr& self, const std::string& peer, const py::str& key) {
            const std::string name = key_from(key);
            const SessionId session = session_from(peer);
            const TransferId transfer = check(unlocked([&] { return self->expect(session, name); }));
            return std::make_unique<Claim>(self, session, transfer, name);
          },
          py::arg("peer"), py::arg("key"),
          R"(D: tells P, early, that this key will be wanted.

A claim has no event of its own: one that P or a lost session ended shows when it is received.)")
      .def(
          "receive",
          [](const EnginePtr& self, const std::string& peer, const py::str& key, const py::bytes& digest,
             const py::iterable& blocks, const std::optional<std::vector<std::uint32_t>>& first,
             const std::optional<std::uint64_t>& after) {
            return start_receive(self, session_from(peer), 0, key_from(key), digest, blocks, first, after);
          },
          py::arg("peer"), py::arg("key"), py::arg("digest"), py::arg("blocks"),
          py::arg("first") = py::none(), py::arg("after") = py::none(),
          R"(D: wants this key's KV in these blocks.

blocks[g][i] is where position first[g] + i of group g goes; -1 is not wanted. Until its event in poll() the
blocks are the engine's. after: handle of a CUDA event, as in Push.advance(): nothing is written before what it
stands for at the call (kernels that still read these blocks); P is told at once that the key is wanted. Errors:
InvalidArgument (id out of range, given twice, or in another open receive), QueueFull, PeerLost (the session has
ended; one that ends later shows as a 'failed' event), Unsupported, TransportError (of after).)")
      .def(
          "evict",
          [](Engine& self, std::uint32_t count) { check(unlocked([&] { return self.evict(count); })); },
          py::arg("count") = 1,
          R"(P: fails up to count finished pushes that no D has opened, longest waiting first.

For an engine that is short of blocks. Does not wait; each ends with status 'evicted'.)")
      .def(
          "poll",
          [](Engine& self, double timeout) {
            // max() takes the 0 for a NaN.
            const double seconds = std::min(std::max(0.0, timeout), kLongestPollSeconds);
            return check(unlocked([&] { return self.poll(static_cast<TimeUs>(seconds * kUsPerSecond)); }));
          },
          py::arg("timeout") = 0.0, R"(Events so far; waits up to timeout seconds for the first.

One thread polls. After close() what is left is returned, then ClosedError is raised.)")
      .def(
          "stats", [](Engine& self) { return to_python(check(unlocked([&] { return self.stats(); }))); },
          "Counters since the start and gauges of now, as a plain dict (docs/metrics.md).")
      .def(
          "close", [](Engine& self) { unlocked([&] { self.close(); }); },
          "Fails what is open, says BYE, ends the thread. Bounded by close_timeout_s. Idempotent.")
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly(
          "cache_in_use", &Engine::cache_in_use,
          "After close(): whether a copy may still touch the arrays, which then must stay.");
}

}  // namespace kvpush::bindings
