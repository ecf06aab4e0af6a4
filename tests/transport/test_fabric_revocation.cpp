// When D of the libfabric transport counts a landing as out of the peer's reach, by provider, over a fake of
// libfabric (fake_fabric.hpp).
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "check.hpp"
#include "conformance.hpp"
#include "fake_fabric.hpp"
#include "transport/fabric/fabric_transport.hpp"
#include "transport/fabric/revocation.hpp"

namespace kvpush {
namespace {

using conformance::End;
using conformance::numbered;
using conformance::pattern;
using conformance::pump_until;

constexpr const char* kNoCache = "FI_MR_CACHE_MAX_COUNT";

/// Sets the variable while it lives.
struct NoCache {
  NoCache() { ::setenv(kNoCache, "0", 1); }
  NoCache(const NoCache&) = delete;
  NoCache& operator=(const NoCache&) = delete;
  ~NoCache() { ::unsetenv(kNoCache); }
};

/// P's completions prove nothing here, so it never says that a landing is quiet.
conformance::Subject over(const char* provider, bool closes_registrations = true) {
  conformance::Subject subject;
  subject.label = provider;
  subject.make = [=](const Incarnation& self) -> std::unique_ptr<Transport> {
    FabricOptions options;
    options.incarnation = self;
    options.provider = provider;
    options.revoke_after_us = 0;
    options.rails = {"nic0", "nic1"};
    const fake_fabric::Policy policy{
        .provider = provider, .closes_registrations = closes_registrations, .delivers = false, .num_nics = 2};
    auto made = make_fabric_transport(fake_fabric::network(policy), options);
    return made.ok() ? std::move(made).value() : nullptr;
  };
  return subject;
}

/// Whether D's landing is quiet after D has closed a session that P keeps open.
bool quiet_after_close(const conformance::Subject& subject) {
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, 4096, 4)) return false;
  CHECK(!d->landing_quiet(session));
  d->close_session(session);
  return d->landing_quiet(session);
}

TEST(only_what_is_known_to_revoke_does) {
  ::unsetenv(kNoCache);
  for (const char* provider : {"efa", "tcp", "tcp;ofi_rxm", "net", "shm", "verbs;ofi_rxm", "unheard-of"}) {
    CHECK(!fabric_revocation(provider).revokes);
    CHECK(!fabric_revocation(provider).reason.empty());
    CHECK(!quiet_after_close(over(provider)));
  }
  const NoCache no_cache;
  for (const char* provider : {"efa", "tcp", "tcp;ofi_rxm", "net", "shm", "unheard-of"}) {
    CHECK(!fabric_revocation(provider).revokes);
    CHECK(!quiet_after_close(over(provider)));
  }
  CHECK(fabric_revocation("verbs;ofi_rxm").revokes);
  CHECK(quiet_after_close(over("verbs;ofi_rxm")));
}

TEST(a_late_write_does_not_land_in_a_revoked_landing) {
  const NoCache no_cache;
  const conformance::Subject subject = over("verbs;ofi_rxm");
  End d(subject);
  End p(subject);
  const SessionId session = conformance::new_session();
  if (!conformance::establish(d, p, session, 4096, 4)) return;
  CHECK(conformance::post_pumping(p, d, session, 1, 0, pattern(1, 4096), numbered(1, 8)) == Sent::kYes);
  CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(1); }));
  CHECK(p.post(session, 2, 1, pattern(2, 4096), numbered(2, 8)) == Sent::kYes);
  d->close_session(session);
  CHECK(d->landing_quiet(session));
  const Region landing = d->landing(session);
  const Bytes before(landing.data, landing.data + landing.size_bytes);
  CHECK(pump_until({&d, &p}, [&] { return p.fates.contains(2); }));
  CHECK_EQ(p.fates[2], std::vector<Fate>{Fate::kUnknown});
  CHECK(std::memcmp(landing.data, before.data(), before.size()) == 0);
  d->release_landing(session);
}

TEST(a_registration_that_does_not_close_is_not_revoked) {
  const NoCache no_cache;
  const conformance::Subject subject = over("verbs;ofi_rxm", false);
  End d(subject);
  const SessionId session = conformance::new_session();
  End p(subject);
  if (!conformance::establish(d, p, session, 4096, 4)) return;
  d->close_session(session);
  CHECK(!d->landing_quiet(session));
  CHECK(!d->landing_quiet(session));
}

}  // namespace
}  // namespace kvpush
