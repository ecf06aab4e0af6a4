// P's half of the protocol: pushes, the claims on them, and which box goes next.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.hpp"
#include "cache/cache.hpp"
#include "protocol/actions.hpp"
#include "protocol/cursor.hpp"
#include "protocol/timers.hpp"

namespace kvpush::protocol {

/// Claims of one key; one more fails as `taken`. A key is for one D: more than a few are retries.
inline constexpr std::size_t kMaxClaimsPerKey = 256;

/// A box to pack into one of D's slots.
struct BoxTask {
  HandleId handle = 0;
  TransferId transfer = 0;
  Box box;
  std::vector<std::int32_t> block_ids;
};

/// Pure: events and time in, actions out. Externally synchronised.
///
/// A push lives from push() to its one event, `sent` or `failed`. A claim lives from INTENT or OPEN to
/// DONE, CANCEL or FAIL, or to the end of its session.
class Sender {
 public:
  /// `max_claims`: of one session, beyond which it breaches; and of keys that are remembered as cancelled.
  Sender(const Cache& cache, const Timeouts& timeouts, std::size_t max_claims = 65536)
      : cache_(cache), timeouts_(timeouts), max_claims_(max_claims) {}

  // --- from the engine's caller. Handles that have ended are ignored.
  void push(HandleId handle, const std::string& key, Bytes digest, TimeUs now, Actions& out);
  /// ids[g]: blocks of the next positions of group g. -1 is a hole.
  void advance(HandleId handle, const std::vector<std::vector<std::int32_t>>& ids, TimeUs now, Actions& out);
  void finish(HandleId handle, TimeUs now, Actions& out);
  void abort(HandleId handle, FailCode code, std::string detail, TimeUs now, Actions& out);
  /// Ends every push: the engine closes.
  void abort_all(FailCode code, const std::string& detail, TimeUs now, Actions& out);
  /// Stops new packs of this push; when quiescent() its blocks may be overwritten.
  void fence(HandleId handle);
  [[nodiscard]] bool quiescent(HandleId handle) const;
  /// After the fence: per group the position at which advance() goes on. Packed positions before it are
  /// forgotten, and so cannot be sent to anyone else.
  std::vector<std::uint32_t> resume(HandleId handle);
  /// Fails up to `count` of the finished pushes that nobody has opened, longest finished first.
  void evict(std::uint32_t count, TimeUs now, Actions& out);

  // --- from sessions
  void open_session(const SessionId& session, std::size_t box_bytes);
  void close_session(const SessionId& session, FailCode code, TimeUs now, Actions& out);
  /// INTENT, OPEN, CANCEL or DONE.
  void on_message(const SessionId& session, const Body& body, TimeUs now, Actions& out);

  // --- work
  [[nodiscard]] bool has_work(const SessionId& session) const;
  /// The next box of this session, oldest-ready transfer first. The caller packs it and calls packed().
  std::optional<BoxTask> next_box(const SessionId& session);
  /// A pack has ended. Returns whether its box is still wanted and must be posted.
  bool packed(const SessionId& session, const BoxTask& task, const Status& status, TimeUs now, Actions& out);

  void tick(TimeUs now, Actions& out);
  [[nodiscard]] TimeUs next_deadline() const;
  [[nodiscard]] std::size_t num_pushes() const { return pushes_.size(); }
  [[nodiscard]] std::size_t num_claims() const { return claims_.size(); }
  /// Keys of which anything is known: pushes, claims, tombstones, cancellations.
  [[nodiscard]] std::size_t num_keys() const { return keys_.size(); }

 private:
  using ClaimId = std::pair<SessionId, TransferId>;

  struct Claim {
    std::string key;
    bool opened = false;
    Bytes digest;
    Wanted wanted;
    HandleId push = 0;   ///< once paired
    bool ended = false;  ///< END was sent; D still owes DONE or CANCEL
    bool queued = false;
    std::vector<Cursor> cursors;
    std::uint64_t num_boxes = 0;
    std::uint64_t num_units = 0;
    std::uint64_t num_bytes = 0;
  };
  struct Push {
    std::string key;
    Bytes digest;
    std::vector<std::vector<std::int32_t>> ids;
    std::optional<ClaimId> claim;
    bool finished = false;
    bool fenced = false;
    std::uint32_t packing = 0;
    FailCode ending = FailCode::kNone;
    std::string detail;
    TimeUs pushed_at = 0;
    TimeUs paired_at = 0;
    TimeUs finished_at = 0;
  };
  /// What is known of one key apart from its push: claims in order of arrival, and how it last ended.
  struct Key {
    HandleId push = 0;
    std::vector<ClaimId> claims;
    FailCode tombstone = FailCode::kNone;
    bool only_cancelled = false;
  };
  struct Session {
    std::size_t box_bytes = 0;
    std::size_t num_claims = 0;
    TransferId last_transfer = 0;
    std::deque<TransferId> ready;
    std::uint32_t turn = 0;
    TimeUs moved_at = 0;  ///< when its last box was packed
  };

  void on_claim(const SessionId& session, TransferId transfer, const std::string& key, const Open* open,
                TimeUs now, Actions& out);
  void on_release(const SessionId& session, TransferId transfer, bool cancelled, TimeUs now, Actions& out);
  void try_pair(const ClaimId& id, TimeUs now, Actions& out);
  void fail_claim(const ClaimId& id, FailCode code, Actions& out);
  void erase_claim(const ClaimId& id);
  void end_push(HandleId handle, FailCode code, std::string detail, TimeUs now, Actions& out);
  void settle(HandleId handle, TimeUs now, Actions& out);
  void arm(HandleId handle, TimeUs now);
  void await_room(HandleId handle, const Push& push, TimeUs now);
  void queue_if_ready(const ClaimId& id, Claim& claim);
  [[nodiscard]] bool wants_more(const Claim& claim, const Push& push, bool& missing) const;
  void set_only_cancelled(Key& entry, bool only_cancelled);
  void drop_key_if_idle(const std::string& key);

  const Cache& cache_;
  Timeouts timeouts_;
  std::size_t max_claims_;
  std::size_t num_only_cancelled_ = 0;
  std::map<HandleId, Push> pushes_;
  std::map<ClaimId, Claim> claims_;
  std::map<std::string, Key> keys_;
  std::map<SessionId, Session> sessions_;
  Deadlines<HandleId> push_deadlines_;
  Deadlines<std::string> key_deadlines_;
};

}  // namespace kvpush::protocol
