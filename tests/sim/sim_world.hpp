// Engines, their callers, and an oracle that knows what was asked for and nothing of how it is done.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "sim_node.hpp"

namespace kvpush::sim {

enum class WorldKind : std::uint8_t { kRandom, kRetry, kCalm, kStarved, kUnclaimed, kRanks, kLiars };
inline constexpr std::array<std::string_view, 7> kWorldNames = {"random",    "retry", "calm", "starved",
                                                                "unclaimed", "ranks", "liars"};

/// What a run was worth.
struct Tally {
  std::map<std::string, std::uint64_t> ends;         ///< sent, received, or why not
  std::map<std::string_view, std::uint64_t> faults;  ///< by kind
  std::uint64_t hash = 0;
};

class SimWorld {
 public:
  struct Push {
    std::size_t node = 0;
    HandleId handle = 0;
    std::string key;
    std::uint64_t prompt = 0;
    std::uint64_t content = 0;  ///< prompt and attempt
    BlockTable blocks;
    std::vector<std::size_t> advanced;
    bool finished = false;
    bool fenced = false;
    bool open = true;
    TimeUs finished_at = 0;
    std::string end{};
    TimeUs ended_at = 0;
  };
  struct Claim {
    std::size_t node = 0;
    SessionId session;
    TransferId transfer = 0;
    std::string key;
    std::uint64_t prompt = 0;
  };
  struct Receive {
    std::size_t node = 0;
    SessionId session;
    HandleId handle = 0;
    TransferId transfer = 0;
    std::string key;
    std::uint64_t prompt = 0;
    BlockTable blocks;
    std::vector<std::uint32_t> first;
    bool open = true;
    bool cancelled = false;
    TimeUs opened_at = 0;
    std::string end{};
    TimeUs ended_at = 0;
  };
  /// Kernels that a call waits for: until they end, P's blocks hold nothing yet, and D's are not to be
  /// written.
  struct Forward {
    struct Spot {
      std::size_t group;
      std::int32_t block;
      std::uint32_t pos;
    };
    std::size_t node = 0;
    HandleId handle = 0;  ///< of the push or receive
    FenceId fence = 0;
    TimeUs ends_at = 0;
    bool writes = false;
    std::uint64_t content = 0;
    std::vector<Spot> spots;  ///< none once the push or receive has ended
  };
  struct Link {
    std::size_t d = 0;
    std::size_t p = 0;
    SessionId id;
  };

  SimWorld(std::uint64_t seed, WorldKind kind);
  virtual ~SimWorld() = default;
  SimWorld(const SimWorld&) = delete;
  SimWorld& operator=(const SimWorld&) = delete;

  /// The whole life; throws Violation.
  void run();
  [[nodiscard]] Tally tally() const;
  /// Where the engines stand, to the trace.
  void describe() const;
  [[nodiscard]] std::uint64_t steps() const { return steps_; }
  [[nodiscard]] WorldKind kind() const { return kind_; }

  bool trace = false;

 protected:
  /// What the callers do before everything comes to rest.
  virtual void live() = 0;

  // --- what callers do
  Dice& dice() { return net_.dice; }
  SimNode& node(std::size_t n) { return *nodes_[n]; }
  void add_node(std::int64_t rank = 0);
  SessionId connect(std::size_t d, std::size_t p);
  Push& begin_push(std::size_t n, const std::string& key, std::uint64_t prompt,
                   const std::vector<std::size_t>& sizes);
  void advance(Push& push, std::size_t most);
  void finish(Push& push);
  void retract(Push& push);
  void abort(Push& push);
  Claim expect(std::size_t n, const SessionId& session, const std::string& key, std::uint64_t prompt);
  Receive& receive(std::size_t n, const SessionId& session, const std::string& key, std::uint64_t prompt,
                   const std::vector<std::size_t>& sizes, TransferId claim, bool wrong_digest);
  void cancel(Receive& receive);
  /// By chance, kernels that the next call of this handle waits for; nullptr: it waits for none.
  Forward* begin_forward(std::size_t n, HandleId handle);
  void end_forwards();
  /// What they were for is over. Returns whether the engine still waits for one.
  bool forget_forwards(std::size_t n, HandleId handle);
  void step(TimeUs us);
  void step_pushes();
  void note(const std::string& what) const;
  [[nodiscard]] bool any_open() const;
  [[nodiscard]] bool any_busy() const;
  [[nodiscard]] std::uint64_t attempts(std::uint64_t prompt) const;
  static Bytes digest(std::uint64_t prompt);

  // --- checks
  void took(std::size_t n, const protocol::Event& event);
  void check_received(std::size_t n, const Receive& receive);
  void settle();
  void check_quiet();
  void close_all();

  std::uint64_t seed_;
  WorldKind kind_;
  SimNet net_;
  CoreConfig config_;
  std::vector<GroupShape> shapes_;
  std::vector<std::unique_ptr<SimNode>> nodes_;
  std::vector<Link> links_;
  std::vector<Push> pushes_;
  std::vector<Claim> claims_;
  std::vector<Receive> receives_;
  std::vector<Forward> forwards_;
  std::map<std::uint64_t, std::uint64_t> attempts_;
  bool fences_ = false;
  Dice fence_luck_;  ///< of its own: worlds without fences roll as before
  double lazy_ = 0;
  double holes_ = 0.03;
  double partial_ = 0.4;  ///< receives that do not begin at position 0
  double pack_fails_ = 0;
  bool lossless_ = false;  ///< no session without a lie may be lost, no transfer of it fail unasked
  std::uint64_t num_pack_failures_ = 0;
  std::uint64_t num_crashes_ = 0;
  std::uint64_t steps_ = 0;
  std::map<std::string, std::uint64_t> ends_;

 private:
  void end_lied();
  void unfence(Push& push);
};

std::unique_ptr<SimWorld> make_world(std::uint64_t seed, WorldKind kind);
/// Those with a story: starved, unclaimed, ranks.
std::unique_ptr<SimWorld> make_plain_world(std::uint64_t seed, WorldKind kind);

}  // namespace kvpush::sim
