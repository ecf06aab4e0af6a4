// kvpush_sim: many random lives, or all lives of a small world.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "exhaustive.hpp"
#include "sim_world.hpp"

namespace {

using namespace kvpush;
using namespace kvpush::sim;

constexpr const char* kUsage =
    "kvpush_sim [--seed N] [--runs M] [--world NAME] [--trace] [--regressions FILE] [--exhaustive [--states "
    "N]]\n"
    "  runs seeds N to N + M - 1; a failing one is printed and replays with --seed\n"
    "  worlds: random retry calm starved unclaimed ranks liars; without one, the seed chooses\n";

// Mostly chaos; each of the others often enough.
constexpr WorldKind kMix[] = {
    WorldKind::kRandom, WorldKind::kCalm,  WorldKind::kRetry,  WorldKind::kLiars,
    WorldKind::kRandom, WorldKind::kRetry, WorldKind::kLiars,  WorldKind::kStarved,
    WorldKind::kRandom, WorldKind::kCalm,  WorldKind::kRandom, WorldKind::kRetry,
    WorldKind::kRandom, WorldKind::kLiars, WorldKind::kRandom, WorldKind::kUnclaimed};

WorldKind world_of(std::uint64_t seed) {
  return seed % 256 == 255 ? WorldKind::kRanks : kMix[seed % std::size(kMix)];
}

std::optional<WorldKind> world_named(std::string_view name) {
  for (std::size_t i = 0; i < kWorldNames.size(); ++i) {
    if (kWorldNames[i] == name) return static_cast<WorldKind>(i);
  }
  return std::nullopt;
}

struct Options {
  std::uint64_t seed = 1;
  std::uint64_t runs = 1;
  std::optional<WorldKind> world;
  bool trace = false;
  bool exhaustive = false;
  std::size_t states = 400'000;
  std::string regressions;
};

using Tallies = std::map<WorldKind, Tally>;

void print(const Tallies& tallies) {
  std::map<std::string_view, std::uint64_t> faults;
  for (const auto& [kind, tally] : tallies) {
    std::uint64_t ended = 0;
    std::uint64_t well = 0;
    std::string list;
    for (const auto& [end, count] : tally.ends) {
      ended += count;
      if (end == "sent" || end == "received") well += count;
      list += ", " + end + " " + std::to_string(count);
    }
    for (const auto& [fault, count] : tally.faults) faults[fault] += count;
    std::printf("%s: %.0f %% of %llu transfers went well%s\n",
                std::string(kWorldNames[static_cast<std::size_t>(kind)]).c_str(),
                100.0 * static_cast<double>(well) / static_cast<double>(std::max<std::uint64_t>(ended, 1)),
                static_cast<unsigned long long>(ended), list.c_str());
  }
  std::string list;
  for (const auto& [fault, count] : faults)
    list += (list.empty() ? "" : ", ") + std::string(fault) + " " + std::to_string(count);
  std::printf("faults: %s\n", list.c_str());
}

bool run_one(std::uint64_t seed, WorldKind kind, bool trace, Tallies& tallies) {
  std::unique_ptr<SimWorld> world;
  std::string what;
  std::uint64_t step = 0;
  try {
    world = make_world(seed, kind);
    world->trace = trace;
    world->run();
  } catch (const std::exception& error) {
    what = error.what();
  }
  const auto name = std::string(kWorldNames[static_cast<std::size_t>(kind)]);
  if (world != nullptr) step = world->steps();
  if (!what.empty()) {
    if (world != nullptr && trace) world->describe();
    std::printf("seed %llu, world %s, step %llu: %s\n  replay: kvpush_sim --seed %llu --world %s --trace\n",
                static_cast<unsigned long long>(seed), name.c_str(), static_cast<unsigned long long>(step),
                what.c_str(), static_cast<unsigned long long>(seed), name.c_str());
    return false;
  }
  const Tally tally = world->tally();
  Tally& sum = tallies[kind];
  for (const auto& [end, count] : tally.ends) sum.ends[end] += count;
  for (const auto& [fault, count] : tally.faults) sum.faults[fault] += count;
  sum.hash = (sum.hash ^ tally.hash ^ step) * 1099511628211U;
  return true;
}

/// Lines of "seed world sentence"; # begins a comment.
bool run_regressions(const std::string& path) {
  std::ifstream in(path);
  if (!in) {
    std::printf("cannot read %s\n", path.c_str());
    return false;
  }
  bool ok = true;
  int count = 0;
  Tallies ignored;
  for (std::string line; std::getline(in, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream fields(line);
    std::uint64_t seed = 0;
    std::string name;
    fields >> seed >> name;
    const auto kind = world_named(name);
    ok &= fields && kind && run_one(seed, *kind, false, ignored);
    ++count;
  }
  std::printf("%d regressions %s\n", count, ok ? "passed" : "FAILED");
  return ok;
}

bool parse(int argc, char** argv, Options& options) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    const bool more = i + 1 < argc;
    if (arg == "--trace") {
      options.trace = true;
    } else if (arg == "--exhaustive") {
      options.exhaustive = true;
    } else if (arg == "--states" && more) {
      options.states = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--seed" && more) {
      options.seed = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--runs" && more) {
      options.runs = std::strtoull(argv[++i], nullptr, 10);
    } else if (arg == "--regressions" && more) {
      options.regressions = argv[++i];
    } else if (arg == "--world" && more && (options.world = world_named(argv[i + 1]))) {
      ++i;
    } else {
      return false;
    }
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fputs(kUsage, stderr);
    return 2;
  }
  // Broken messages are what this is about: no line for each.
  setenv("KVPUSH_LOG_LEVEL", "error", 0);
  bool ok = true;
  if (!options.regressions.empty()) ok &= run_regressions(options.regressions);
  if (options.exhaustive) ok &= explore_all(options.states);
  if (options.exhaustive && options.runs == 1) return ok ? 0 : 1;

  const auto begin = std::chrono::steady_clock::now();
  Tallies tallies;
  std::uint64_t done = 0;
  for (; done < options.runs && ok; ++done) {
    const std::uint64_t seed = options.seed + done;
    ok = run_one(seed, options.world.value_or(world_of(seed)), options.trace, tallies);
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  print(tallies);
  std::uint64_t hash = 0;
  for (const auto& [kind, tally] : tallies) hash ^= tally.hash;
  std::printf("%llu runs, %.0f per second; hash %016llx\n", static_cast<unsigned long long>(done),
              static_cast<double>(done) / seconds, static_cast<unsigned long long>(hash));
  return ok ? 0 : 1;
}
