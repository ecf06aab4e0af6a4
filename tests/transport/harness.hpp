// What the conformance suite is made of: one end of a transport with everything it saw, and pumping.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/transport.hpp"

namespace kvpush::conformance {

/// The transport under test.
struct Subject {
  std::string label;  ///< equals the prefix given to KVPUSH_TRANSPORT_CONFORMANCE
  std::function<std::unique_ptr<Transport>(const Incarnation&)>
      make;                           ///< null: failed, or throws check::Skipped
  bool detects_close = true;          ///< the peer's close_session() leads to on_lost without traffic
  bool detects_death = true;          ///< a killed peer leads to on_lost without traffic
  bool proves_quiet = true;           ///< landing_quiet() becomes true once the peer has closed or died
  bool pushes_back = true;            ///< send() and post() answer kAgain to one who sends without end
  bool one_address = false;           ///< both ends of one process see the slots at the same addresses
  std::uint32_t num_floods = 20'000;  ///< messages of the back-pressure tests, at most
};

/// One engine's end. A message or notice may come more than once only if the transport repeats it.
class End final : public TransportSink {
 public:
  explicit End(const Subject& subject);

  Transport& operator*() { return *transport_; }
  Transport* operator->() { return transport_.get(); }
  [[nodiscard]] bool ok() const { return transport_ != nullptr; }
  void poll() { transport_->poll(*this); }
  /// Destroys the transport, as an engine that ends without closing its sessions.
  void destroy() { transport_.reset(); }
  /// Waits for something to do, or yields where the transport cannot wait. False after ten idle seconds.
  bool wait();

  /// P: puts `data` where a post takes it from and posts it, once. After kAgain, repeat it with the same
  /// ticket and data.
  Sent post(const SessionId& session, TicketId ticket, std::uint32_t slot, ByteView data, ByteView notice);

  void on_message(const SessionId& session, ByteView message) override;
  void on_notice(const SessionId& session, ByteView notice) override;
  void on_completed(TicketId ticket, Fate fate) override;
  void on_settled(TicketId ticket) override;
  void on_lost(const SessionId& session, const std::string& reason) override;

  std::map<Uuid, std::vector<Bytes>> messages;
  std::map<Uuid, std::vector<Bytes>> notices;
  std::map<TicketId, std::vector<Fate>> fates;
  std::map<Uuid, std::vector<std::string>> losses;
  std::function<void(const SessionId&, ByteView)> notice_hook;  ///< runs inside on_notice

 private:
  void release_staging_of(TicketId ticket);

  std::unique_ptr<Transport> transport_;
  std::map<TicketId, Region> staging_;
  std::size_t num_seen_ = 0;
  std::size_t num_seen_at_wait_ = 0;
};

[[nodiscard]] SessionId new_session();
/// `size_bytes` bytes that depend on `seed`.
[[nodiscard]] Bytes pattern(std::uint64_t seed, std::size_t size_bytes);
/// The pattern, with the seed at the front where it fits: every one different.
[[nodiscard]] Bytes numbered(std::uint64_t seed, std::size_t size_bytes);

/// Polls all ends until `condition` holds; false after ten seconds.
bool pump_until(std::initializer_list<End*> ends, const std::function<bool()>& condition);
/// A few polls more, for things that must not come.
void settle(std::initializer_list<End*> ends);
/// Sends, pumping both ends while the answer is kAgain.
Sent send_pumping(End& from, End& to, const SessionId& session, ByteView message);
/// End::post in the same way.
Sent post_pumping(End& from, End& to, const SessionId& session, TicketId ticket, std::uint32_t slot,
                  ByteView data, ByteView notice);
/// Sets up a session between two ends up to D's first message ("first"); false if that failed.
bool establish(End& d, End& p, const SessionId& session, std::size_t slot_bytes, std::uint32_t num_slots);

/// What the notices of the suite say, and the data that belongs to it.
struct Note {
  std::uint64_t seed = 0;
  std::uint64_t size_bytes = 0;
  std::uint32_t slot = 0;

  [[nodiscard]] Bytes encode() const;
  static Note decode(ByteView bytes);
};
/// P: posts the pattern of `note`, pumping.
Sent post_note(End& p, End& d, const SessionId& session, TicketId ticket, const Note& note);
/// Makes D compare the slot with the pattern at the moment of each notice.
void verify_at_notice(End& d, std::size_t slot_bytes, std::size_t& num_verified);
/// Both sides close; D's landing becomes quiet and is released.
void end_session(const Subject& subject, End& d, End& p, const SessionId& session);

}  // namespace kvpush::conformance
