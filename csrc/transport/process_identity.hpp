// Proof that a process of this host is gone, for memory that it may still write.
#pragma once

#include <cstdint>
#include <string>

#include "base/bytes.hpp"

namespace kvpush {

/// Names one process for as long as its host is up. Two processes can judge each other only if they
/// share the boot, the pid namespace and the time namespace (start times are shifted by the latter).
/// Source: proc(5), field 22 of /proc/<pid>/stat; namespaces(7).
struct ProcessIdentity {
  std::string boot_id;
  std::uint64_t pid_namespace = 0;
  std::uint64_t time_namespace = 0;
  std::uint32_t pid = 0;  ///< 0: unknown, so its death cannot be proven
  std::uint64_t start_time_ticks = 0;
};

/// This process; pid 0 where /proc is missing or shows another pid namespace. Threads: any.
[[nodiscard]] ProcessIdentity this_process();

/// Whether each of the two processes can prove the other's death. Threads: any.
[[nodiscard]] bool can_judge(const ProcessIdentity& process, const ProcessIdentity& self);

/// True only when `process` is certain not to run any more; false when that cannot be told from here, by
/// `self`, which is this_process(). Threads: any.
[[nodiscard]] bool proven_dead(const ProcessIdentity& process, const ProcessIdentity& self);

void put_identity(ByteWriter& out, const ProcessIdentity& process);
/// Fails the reader on anything but what put_identity() writes.
[[nodiscard]] ProcessIdentity get_identity(ByteReader& in);

}  // namespace kvpush
