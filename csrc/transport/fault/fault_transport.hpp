// A transport that breaks in chosen ways, for tests: a decorator over any other.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/transport.hpp"

namespace kvpush {

/// Rates in [0, 1] for what arrives. One fault at most per arrival, tried in this order.
struct ArrivalFaults {
  double drop = 0;
  double duplicate = 0;  ///< delivered twice, the second time some polls later
  double delay = 0;      ///< delivered some polls later, so possibly after later ones
  double corrupt = 0;    ///< one bit is flipped; empty ones stay as they are
  double truncate = 0;   ///< a random part of the end is cut
};

/// What goes wrong on one engine's end. Every decision depends only on the seed and on how many calls or
/// arrivals of the same sort there were before.
struct FaultPolicy {
  std::uint64_t seed = 1;
  ArrivalFaults messages;
  ArrivalFaults notices;
  std::uint32_t max_delay_polls = 8;   ///< delays last 1 to this many calls of poll()
  double send_again = 0;               ///< rate of send() answering kAgain
  double post_again = 0;               ///< rate of post() answering kAgain
  std::uint64_t fail_post_before = 0;  ///< the n-th accepted post writes nothing: kFailed. 0: never
  std::uint64_t fail_post_after = 0;   ///< the n-th accepted post is carried out, yet reported kUnknown
  std::uint64_t lose_at_send = 0;      ///< the n-th send() or post() loses its session instead
};

/// `inner`, disturbed as `policy` says. With a policy that asks for nothing it only passes calls on.
/// A session it loses stays open inside until close_session(): memory given out before stays valid.
std::unique_ptr<Transport> make_fault_transport(std::unique_ptr<Transport> inner, const FaultPolicy& policy);

}  // namespace kvpush
