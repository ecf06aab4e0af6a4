#include "sim_lies.hpp"

#include <algorithm>
#include <utility>

namespace kvpush::sim {
namespace {

using namespace protocol;

constexpr std::size_t kMaxRemembered = 8;
constexpr TransferId kNeverIssued = TransferId{1} << 20U;
constexpr std::uint32_t kFarAway = 100;  ///< positions; no prompt has as many
constexpr std::uint32_t kNoSlot = 5000;

struct Told {
  std::string_view name;
  bool fatal = false;
};

template <typename T>
void remember(std::vector<T>& list, const T& one) {
  if (list.size() == kMaxRemembered) list.erase(list.begin());
  list.push_back(one);
}

Told about_box(Body& body, const std::vector<BoxNotice>& before, Dice& dice) {
  auto& notice = std::get<BoxNotice>(body);
  Box& box = notice.box;
  switch (dice.below(11)) {
    case 0:
      box.pos_begin += kFarAway;
      box.pos_end += kFarAway;
      return {"box outside the wanted positions"};
    case 1:
      switch (dice.below(3)) {
        case 0: box.group += 77; break;
        case 1: box.plane_end += 77; break;
        default: ++box.head_end; break;
      }
      return {"box outside the cache"};
    case 2:
    case 3:
      for (const BoxNotice& old : before) {
        if (old.transfer != notice.transfer || old.box == box) continue;
        box = old.box;
        return {"units sent twice"};
      }
      return {};
    case 4:
      dice.chance(0.5) ? box.pos_end += 1 + static_cast<std::uint32_t>(dice.below(8)) : --box.pos_end;
      return {"box of another size"};
    case 5: notice.checksum ^= std::uint64_t{1} << dice.below(64); return {"wrong checksum"};
    case 6: notice.slot += kNoSlot; return {"slot out of range", true};
    case 7:
      for (const BoxNotice& old : before) {
        if (old.slot == notice.slot) continue;
        notice.slot = old.slot;
        return {"box in another slot"};
      }
      return {};
    case 8: notice.transfer += kNeverIssued; return {"transfer never issued", true};
    case 9: body = End{notice.transfer, 1, 1}; return {"message as a notice", true};
    default: box.pos_begin = box.pos_end; return {"empty box"};
  }
}

/// ACCEPT, END, FAIL.
Told about_transfer(Body& body, const std::vector<BoxNotice>& before, Dice& dice) {
  TransferId transfer = 0;
  if (const auto* accept = std::get_if<Accept>(&body)) transfer = accept->transfer;
  if (const auto* end = std::get_if<End>(&body)) transfer = end->transfer;
  if (const auto* fail = std::get_if<Fail>(&body)) transfer = fail->transfer;
  switch (dice.below(8)) {
    case 0: body = Accept{transfer + kNeverIssued}; return {"transfer never issued", true};
    case 1: body = End{transfer + kNeverIssued, 1, 1}; return {"transfer never issued", true};
    case 2: body = Fail{transfer + kNeverIssued, FailCode::kAborted}; return {"transfer never issued", true};
    case 3: body = Done{transfer}; return {"message of the wrong side", true};
    case 4:
      body = Fail{transfer, static_cast<FailCode>(1 + dice.below(kNumFailCodes - 1))};
      return {"FAIL of what goes well"};
    case 5:
      if (before.empty()) return {};
      body = before.back();
      return {"notice as a message", true};
    default: break;
  }
  auto* end = std::get_if<End>(&body);
  if (end == nullptr) {
    body = End{transfer, 1 + dice.below(4), 1 + dice.below(4)};
    return {"END before its time"};
  }
  std::uint64_t& total = dice.chance(0.5) ? end->num_boxes : end->num_units;
  dice.chance(0.5) ? ++total : --total;
  return {"wrong totals"};
}

Told about_open(Open& open, bool claimed, Dice& dice) {
  auto& ranges = open.wanted[dice.below(open.wanted.size())];
  // An OPEN whose claim P has failed already is dropped unread.
  const bool fatal = !claimed;
  switch (dice.below(9)) {
    case 0: ranges.push_back({kFarAway, 0x80000000U}); return {"wanted out of bounds", fatal};
    case 1: ranges.push_back({kFarAway, kFarAway}); return {"empty wanted range", fatal};
    case 2:
      ranges.insert(ranges.end(), {{kFarAway, kFarAway + 2}, {kFarAway + 1, kFarAway + 3}});
      return {"wanted ranges overlap", fatal};
    case 3: open.wanted.emplace_back(); return {"wanted of no group", fatal};
    case 4: open.digest.clear(); return {"empty digest", fatal};
    case 5: open.digest[0] ^= std::byte{128}; return {"another digest"};
    case 6: open.key += "?"; return {"another key"};
    case 7: ranges.push_back({kFarAway, kFarAway + 1}); return {"wanted more"};
    default:
      if (ranges.empty()) return {};
      ranges.pop_back();
      return {"wanted less"};
  }
}

Told about_credit(Credit& credit, Dice& dice) {
  if (credit.slots.empty()) return {};
  switch (dice.below(4)) {
    case 0: credit.slots.push_back(credit.slots[0]); return {"credit twice", true};
    case 1: credit.slots[0] += kNoSlot; return {"credit of no slot", true};
    case 2: credit.slots.pop_back(); return {"credit withheld"};
    default: credit.slots[0] = static_cast<std::uint32_t>(dice.below(6)); return {"credit of another slot"};
  }
}

/// INTENT, CANCEL, DONE, and CREDIT in part.
Told about_claim(Body& body, const std::vector<Open>& before, Dice& dice) {
  if (auto* credit = std::get_if<Credit>(&body); credit != nullptr && dice.chance(0.7))
    return about_credit(*credit, dice);
  switch (dice.below(5)) {
    case 0:
      if (before.empty()) return {};
      body = before[dice.below(before.size())];
      return {"OPEN twice"};
    case 1: body = Done{kNeverIssued}; return {"DONE of no transfer", true};
    case 2: body = Cancel{kNeverIssued}; return {"CANCEL of no transfer", true};
    case 3: body = Accept{1}; return {"message of the wrong side", true};
    default:
      if (before.empty()) return {};
      body = Done{before.back().transfer};
      return {"DONE before END"};
  }
}

}  // namespace

void Liar::listen(ByteView bytes, bool to_d) {
  const auto decoded = decode(bytes);
  if (!decoded.ok()) return;
  const Body& body = decoded.value().body;
  if (const auto* box = std::get_if<BoxNotice>(&body); to_d && box != nullptr) remember(boxes_, *box);
  if (const auto* open = std::get_if<Open>(&body); !to_d && open != nullptr) remember(opens_, *open);
  if (const auto* intent = std::get_if<Intent>(&body)) claimed_.insert(intent->transfer);
}

std::optional<Lie> Liar::lie(ByteView bytes, bool to_d, double rate, Dice& dice) {
  const bool may = dice.chance(rate);
  if (!may && !takes_only_) return std::nullopt;
  const auto decoded = decode(bytes);
  if (!decoded.ok()) return std::nullopt;
  Envelope envelope = decoded.value();
  Body& body = envelope.body;
  const bool gives = std::holds_alternative<Credit>(body) || std::holds_alternative<Cancel>(body) ||
                     std::holds_alternative<Done>(body);
  if (gives && (takes_only_ || (may && dice.chance(0.1)))) {
    takes_only_ = true;
    body.emplace<Credit>();
    return Lie{"nothing given back", encode(envelope)};
  }
  if (!may) return std::nullopt;
  Told told;
  if (auto* ping = std::get_if<Ping>(&body)) {
    // There are so many of them.
    if (!dice.chance(0.05)) return std::nullopt;
    ping->messages_sent += dice.below(2);
    ping->boxes_completed += 2;
    told = {"PING of what was never sent"};
  } else if (dice.chance(0.1)) {
    dice.chance(0.5) ? ++envelope.seq : --envelope.seq;
    told = {"number of another message"};
  } else if (std::holds_alternative<BoxNotice>(body)) {
    told = about_box(body, boxes_, dice);
  } else if (std::holds_alternative<Bye>(body)) {
    return std::nullopt;
  } else if (to_d) {
    told = about_transfer(body, boxes_, dice);
  } else if (auto* open = std::get_if<Open>(&body)) {
    told = about_open(*open, claimed_.contains(open->transfer), dice);
  } else {
    told = about_claim(body, opens_, dice);
  }
  if (told.name.empty()) return std::nullopt;
  return Lie{told.name, encode(envelope), told.fatal};
}

}  // namespace kvpush::sim
