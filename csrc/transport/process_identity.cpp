#include "transport/process_identity.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <csignal>
#include <fstream>
#include <optional>
#include <sstream>

namespace kvpush {
namespace {

constexpr std::size_t kMaxBootIdBytes = 64;

struct ProcessStat {
  char state = '?';
  std::uint64_t num_threads = 0;
  std::uint64_t start_time_ticks = 0;
};

std::uint64_t inode_of(const char* path) {
  struct stat info{};
  return stat(path, &info) == 0 ? static_cast<std::uint64_t>(info.st_ino) : 0;
}

std::optional<ProcessStat> read_stat(std::uint32_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // Field 2, the command, may hold spaces and brackets; field 3 follows the last closing one.
  const std::size_t end_of_command = line.rfind(')');
  if (end_of_command == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(end_of_command + 1));
  ProcessStat result;
  if (!(fields >> result.state)) return std::nullopt;
  std::string field;
  for (int number = 4; number <= 22; ++number) {
    if (!(fields >> field)) return std::nullopt;
    if (number != 20 && number != 22) continue;
    std::uint64_t value = 0;
    const auto parsed = std::from_chars(field.data(), field.data() + field.size(), value);
    if (parsed.ec != std::errc{}) return std::nullopt;
    (number == 20 ? result.num_threads : result.start_time_ticks) = value;
  }
  return result;
}

// A /proc of another pid namespace would show this number as another process.
bool proc_is_ours() {
  char target[32] = {};
  const ssize_t length = readlink("/proc/self", target, sizeof(target) - 1);
  return length > 0 && std::string(target) == std::to_string(getpid());
}

}  // namespace

ProcessIdentity this_process() {
  ProcessIdentity self;
  std::ifstream boot_id("/proc/sys/kernel/random/boot_id");
  std::getline(boot_id, self.boot_id);
  if (self.boot_id.size() > kMaxBootIdBytes) self.boot_id.clear();
  self.pid_namespace = inode_of("/proc/self/ns/pid");
  self.time_namespace = inode_of("/proc/self/ns/time");
  const auto pid = static_cast<std::uint32_t>(getpid());
  const auto stat = read_stat(pid);
  if (self.boot_id.empty() || self.pid_namespace == 0 || !stat || !proc_is_ours()) return self;
  self.pid = pid;
  self.start_time_ticks = stat->start_time_ticks;
  return self;
}

bool can_judge(const ProcessIdentity& process, const ProcessIdentity& self) {
  return process.pid != 0 && self.pid != 0 && process.boot_id == self.boot_id &&
         process.pid_namespace == self.pid_namespace && process.time_namespace == self.time_namespace;
}

bool proven_dead(const ProcessIdentity& process, const ProcessIdentity& self) {
  if (!can_judge(process, self)) return false;
  if (kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH) return true;
  const auto stat = read_stat(process.pid);
  if (!stat) return false;
  if (stat->start_time_ticks != process.start_time_ticks) return true;
  // A zombie leader may have threads that run on, with the address space and every connection.
  return (stat->state == 'Z' || stat->state == 'X') && stat->num_threads <= 1;
}

void put_identity(ByteWriter& out, const ProcessIdentity& process) {
  out.put_text(process.boot_id);
  out.put(process.pid_namespace);
  out.put(process.time_namespace);
  out.put(process.pid);
  out.put(process.start_time_ticks);
}

ProcessIdentity get_identity(ByteReader& in) {
  ProcessIdentity process;
  process.boot_id = in.get_text(kMaxBootIdBytes);
  process.pid_namespace = in.get<std::uint64_t>();
  process.time_namespace = in.get<std::uint64_t>();
  process.pid = in.get<std::uint32_t>();
  process.start_time_ticks = in.get<std::uint64_t>();
  return process;
}

}  // namespace kvpush
