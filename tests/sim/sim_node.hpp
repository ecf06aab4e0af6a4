// One engine of a simulation: its memory, who owns which block, and a packer that obeys nobody's hurry.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/core.hpp"
#include "pack/cpu/cpu_packer.hpp"
#include "sim_net.hpp"

namespace kvpush::sim {

using BlockTable = std::vector<std::vector<std::int32_t>>;

struct PlaneShape {
  std::int64_t heads = 1;
  std::int64_t tokens = 1;
  std::int64_t content = 40;
  bool tokens_first = false;
  std::int64_t token_gap = 0;
  std::int64_t block_gap = 0;

  [[nodiscard]] std::int64_t unit_bytes() const { return heads * tokens * content; }
  [[nodiscard]] std::int64_t token_stride() const {
    return (tokens_first ? heads * content : content) + token_gap;
  }
  [[nodiscard]] std::int64_t head_stride() const { return tokens_first ? content : tokens * token_stride(); }
  [[nodiscard]] std::int64_t block_stride() const {
    return (tokens_first ? tokens * token_stride() : heads * head_stride()) + block_gap;
  }
};
struct GroupShape {
  std::vector<PlaneShape> planes;
  std::int64_t num_blocks = 48;
};

constexpr std::byte kFree{0xEE};  ///< what nobody owns holds this

/// kAwaited: handed out, but the forward that writes or still reads it has not ended.
enum class Owner : std::uint8_t { kNobody, kPush, kFenced, kReceive, kAwaited };

class SimNode {
 public:
  /// Runs jobs at once or at some later poll, and checks that each may touch what it touches.
  class CheckedPacker final : public Packer {
   public:
    CheckedPacker(SimNode& node, Dice& dice) : node_(node), dice_(dice) {}
    void start(PackJob job) override {
      for (const std::int32_t block : job.block_ids) {
        require(job.kind != PackJob::Kind::kPack || block < 0 ||
                    node_.owner[job.box.group].at(static_cast<std::size_t>(block)) != Owner::kFenced,
                "a pack started behind a fence");
      }
      if (lazy == 0) return run(job);
      jobs_.push_back(std::move(job));
    }
    void poll(std::vector<PackDone>& done) override {
      std::erase_if(jobs_, [this](const PackJob& job) {
        if (held || dice_.chance(lazy)) return false;
        run(job);
        return true;
      });
      for (PackDone& one : std::exchange(done_, {})) done.push_back(std::move(one));
    }
    bool passed(FenceId fence) override {
      require(fences_.contains(fence), "a fence was asked for that is gone");
      if (!fences_[fence]) return false;
      fences_.erase(fence);
      return true;
    }
    void drop(FenceId fence) override {
      require(fences_.erase(fence) == 1, "a fence was dropped that is gone");
    }
    FenceId new_fence() {
      fences_[++last_fence_] = false;
      return last_fence_;
    }
    void happen(FenceId fence) {
      if (holds(fence)) fences_[fence] = true;
    }
    [[nodiscard]] bool holds(FenceId fence) const { return fences_.contains(fence); }
    [[nodiscard]] bool uses(std::size_t group, std::int32_t block) const {
      return std::any_of(jobs_.begin(), jobs_.end(), [&](const PackJob& job) {
        return job.box.group == group && std::ranges::find(job.block_ids, block) != job.block_ids.end();
      });
    }
    [[nodiscard]] bool idle() const { return jobs_.empty() && done_.empty() && fences_.empty(); }

    double lazy = 0;  ///< chance of a job to wait for another poll
    double fails = 0;
    bool held = false;
    std::uint64_t num_failed = 0;

   private:
    void run(const PackJob& job) {
      if (dice_.chance(fails)) {
        node_.net.count("pack fails");
        ++num_failed;
        done_.push_back({job.ticket, 0, 0, {Code::kTransport, "the device is gone"}});
        return;
      }
      const bool packing = job.kind == PackJob::Kind::kPack;
      for (const std::int32_t block : job.block_ids) {
        require(block >= 0 && block < node_.cache.groups[job.box.group].num_blocks(),
                "a job has no such block");
        const Owner who = node_.owner[job.box.group][static_cast<std::size_t>(block)];
        require(packing ? who == Owner::kPush || who == Owner::kFenced : who == Owner::kReceive,
                packing ? "a pack read a block that no open push holds, or before it was written"
                        : "an unpack wrote a block that no open receive holds, or before its fence");
      }
      if (node_.end->capabilities().mapped_slots && packing) node_.net.check_mapped(*node_.end, job.dense);
      if (!packing) node_.net.check_slot(*node_.end, job.dense, packed_bytes(node_.cache, job.box));
      done_.push_back(run_pack_job(node_.cache, job));
    }

    SimNode& node_;
    Dice& dice_;
    std::vector<PackJob> jobs_;
    std::vector<PackDone> done_;
    std::map<FenceId, bool> fences_;  ///< whether it has happened
    FenceId last_fence_ = 0;
  };

  SimNode(SimNet& the_net, const std::vector<GroupShape>& shapes, std::int64_t rank, const CoreConfig& config)
      : net(the_net) {
    for (const GroupShape& shape : shapes) {
      Group group{16, {}};
      for (const PlaneShape& plane : shape.planes) {
        auto& bytes = memory.emplace_back(std::make_unique<Bytes>(
            static_cast<std::size_t>(shape.num_blocks * plane.block_stride()), kFree));
        group.planes.push_back({bytes->data(), shape.num_blocks, plane.heads, plane.tokens, plane.content,
                                plane.block_stride(), plane.head_stride(), plane.token_stride(),
                                "layer " + std::to_string(memory.size()), rank * plane.heads});
      }
      owner.emplace_back(static_cast<std::size_t>(shape.num_blocks), Owner::kNobody);
      auto& list = free.emplace_back();
      for (std::int32_t block = 0; block < shape.num_blocks; ++block) list.push_back(block);
      cache.groups.push_back(std::move(group));
    }
    end = std::make_unique<SimEnd>(net);
    packer = std::make_unique<CheckedPacker>(*this, net.dice);
    static_cast<Uuid&>(incarnation) = net.dice.uuid();
    core = std::make_unique<Core>(cache, config, *end, *packer, incarnation, net.now,
                                  [this] { return net.dice.uuid(); });
  }
  SimNode(const SimNode&) = delete;
  SimNode& operator=(const SimNode&) = delete;

  /// Calls visit(byte, index within the unit) for every byte of one unit, in the order of the dense form.
  template <typename Visit>
  void each_byte(std::size_t group, std::size_t plane, std::int32_t block, Visit visit) const {
    const Plane& where = cache.groups[group].planes[plane];
    std::size_t i = 0;
    for (std::int64_t h = 0; h < where.num_heads; ++h) {
      for (std::int64_t t = 0; t < where.num_tokens; ++t) {
        std::byte* row = where.base + block * where.block_stride_bytes + h * where.head_stride_bytes +
                         t * where.token_stride_bytes;
        for (std::int64_t c = 0; c < where.content_bytes; ++c) visit(row[c], i++);
      }
    }
  }
  static std::uint64_t word(std::uint64_t prompt, std::size_t group, std::size_t plane, std::uint32_t pos) {
    return Dice(prompt * 0x9e3779b97f4a7c15U + group * 1000003 + plane * 10007 + pos * 101).next();
  }
  static std::byte byte_of(std::uint64_t word, std::size_t i) {
    return static_cast<std::byte>((word >> (8 * (i % 8))) + i * 29);
  }
  void write(std::size_t group, std::int32_t block, std::uint64_t prompt, std::uint32_t pos) const {
    for (std::size_t p = 0; p < cache.groups[group].planes.size(); ++p) {
      const std::uint64_t seed = word(prompt, group, p, pos);
      each_byte(group, p, block, [seed](std::byte& byte, std::size_t i) { byte = byte_of(seed, i); });
    }
  }
  [[nodiscard]] bool holds(std::size_t group, std::int32_t block, std::uint64_t prompt,
                           std::uint32_t pos) const {
    bool same = true;
    for (std::size_t p = 0; p < cache.groups[group].planes.size(); ++p) {
      const std::uint64_t seed = word(prompt, group, p, pos);
      each_byte(group, p, block, [&](std::byte& byte, std::size_t i) { same &= byte == byte_of(seed, i); });
    }
    return same;
  }
  void wipe(std::size_t group, std::int32_t block) const {
    for (std::size_t p = 0; p < cache.groups[group].planes.size(); ++p) {
      each_byte(group, p, block, [](std::byte& byte, std::size_t) { byte = kFree; });
    }
  }
  [[nodiscard]] bool is_free(std::size_t group, std::int32_t block) const {
    bool same = true;
    for (std::size_t p = 0; p < cache.groups[group].planes.size(); ++p) {
      each_byte(group, p, block, [&](std::byte& byte, std::size_t) { same &= byte == kFree; });
    }
    return same;
  }

  /// Up to `num` blocks of one group, in no order.
  std::vector<std::int32_t> take(std::size_t group, std::size_t num, Owner who) {
    std::vector<std::int32_t> ids;
    auto& list = free[group];
    while (ids.size() < num && !list.empty()) {
      std::swap(list[net.dice.below(list.size())], list.back());
      ids.push_back(list.back());
      list.pop_back();
      require(is_free(group, ids.back()), "a block that nobody owned was written");
      owner[group][static_cast<std::size_t>(ids.back())] = who;
    }
    return ids;
  }
  void give_back(const BlockTable& blocks) {
    for (std::size_t g = 0; g < blocks.size(); ++g) {
      for (const std::int32_t block : blocks[g]) {
        if (block < 0) continue;
        require(!packer->uses(g, block), "a transfer ended with a pack or unpack under way");
        wipe(g, block);
        owner[g][static_cast<std::size_t>(block)] = Owner::kNobody;
        free[g].push_back(block);
      }
    }
  }
  /// Every byte, also between blocks, is nobody's.
  void check_all_free() const {
    for (const auto& bytes : memory) {
      require(std::all_of(bytes->begin(), bytes->end(), [](std::byte byte) { return byte == kFree; }),
              "memory outside of open receives was written");
    }
  }

  SimNet& net;
  Cache cache;
  std::vector<std::unique_ptr<Bytes>> memory;
  std::vector<std::vector<Owner>> owner;        ///< per group and block
  std::vector<std::vector<std::int32_t>> free;  ///< per group
  std::unique_ptr<SimEnd> end;
  std::unique_ptr<CheckedPacker> packer;
  Incarnation incarnation;
  std::unique_ptr<Core> core;
  HandleId next_handle = 1;
  TransferId next_transfer = 1;
  TimeUs asleep_until = 0;
};

}  // namespace kvpush::sim
