// The words of a Sender's table.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "protocol/sender.hpp"
#include "script.hpp"

namespace kvpush::script {

/// push H KEY [DIGEST] | advance H 3-2|4 | finish H | abort H | fence H | quiet H | resume H | evict N
/// A intent T KEY | A open T KEY 0-4,6-8|. [DIGEST] | A cancel T | A done T | A lose CODE | A join
/// A pack: "T p0-p1 b0-b1" or "none" | A packed [error]: "post" or "drop", oldest first | A drain: boxes
/// wait US: time passes
/// Two positions of a group fit one box. Sessions A and B are open. Timeouts: pairing 100, claim 1000,
/// unclaimed 10, progress 500.
class SenderTable {
 public:
  explicit SenderTable(std::size_t num_groups = 1)
      : cache_(make_cache(num_groups)), sender_(cache_, timeouts()) {
    for (const char name : {'A', 'B'}) sender_.open_session(session(name), kBoxBytes);
  }

  std::string do_event(std::vector<std::string> words) {
    char from = 0;
    if (words[0].size() == 1) {
      from = words[0][0];
      words.erase(words.begin());
    }
    words.resize(5);
    const std::string said = from == 0 ? own(words) : theirs(from, words);
    const std::string actions = drain(out_);
    return said.empty() || actions.empty() ? said + actions : said + " " + actions;
  }

  protocol::Sender& sender() { return sender_; }

 private:
  static constexpr std::size_t kUnitBytes = 64;
  static constexpr std::size_t kBoxBytes = 4 * kUnitBytes;

  static Cache make_cache(std::size_t num_groups) {
    Cache cache;
    const Plane plane{nullptr, 1000, 1, 1, kUnitBytes, kUnitBytes, 0, 0, "p", 0};
    cache.groups.assign(num_groups, Group{16, {plane, plane}});
    return cache;
  }
  static protocol::Timeouts timeouts() {
    protocol::Timeouts timeouts;
    timeouts.pairing_us = 100;
    timeouts.claim_us = 1000;
    timeouts.unclaimed_us = 10;
    timeouts.progress_us = 500;
    return timeouts;
  }
  static Bytes digest_of(const std::string& word) {
    const std::string text = word.empty() ? "d" : word;
    const auto view = std::as_bytes(std::span(text.data(), text.size()));
    return text == "none" ? Bytes{} : Bytes(view.begin(), view.end());
  }

  std::string own(const std::vector<std::string>& words) {
    const std::string& verb = words[0];
    const HandleId handle = number(words[1]);
    if (verb == "push") sender_.push(handle, words[2], digest_of(words[3]), now_, out_);
    if (verb == "advance") {
      std::vector<std::vector<std::int32_t>> ids(cache_.groups.size());
      const auto groups = split(words[2], '|');
      for (std::size_t g = 0; g < groups.size(); ++g) ids[g] = blocks(groups[g], next_block_);
      sender_.advance(handle, ids, now_, out_);
    }
    if (verb == "finish") sender_.finish(handle, now_, out_);
    if (verb == "abort") sender_.abort(handle, FailCode::kAborted, "why", now_, out_);
    if (verb == "fence") sender_.fence(handle);
    if (verb == "quiet") return sender_.quiescent(handle) ? "yes" : "no";
    if (verb == "resume") {
      std::string at;
      for (const std::uint32_t pos : sender_.resume(handle))
        at += (at.empty() ? "" : "|") + std::to_string(pos);
      return "at " + at;
    }
    if (verb == "evict") sender_.evict(number(words[1]), now_, out_);
    if (verb == "wait") {
      now_ += number(words[1]);
      sender_.tick(now_, out_);
    }
    return "";
  }

  std::string theirs(char from, const std::vector<std::string>& words) {
    const SessionId id = session(from);
    const std::string& verb = words[0];
    const TransferId transfer = number(words[1]);
    const auto tell = [&](const protocol::Body& body) { sender_.on_message(id, body, now_, out_); };
    if (verb == "intent") tell(protocol::Intent{transfer, words[2]});
    if (verb == "open") {
      protocol::Wanted wanted;
      for (const auto& group : split(words[3], '|')) wanted.push_back(ranges(group));
      tell(protocol::Open{transfer, words[2], digest_of(words[4]), std::move(wanted)});
    }
    if (verb == "cancel") tell(protocol::Cancel{transfer});
    if (verb == "done") tell(protocol::Done{transfer});
    if (verb == "lose") sender_.close_session(id, code_of(words[1]), now_, out_);
    if (verb == "join") sender_.open_session(id, kBoxBytes);
    if (verb == "pack") return pack(from);
    if (verb == "packed") return packed(from, words[1] == "error");
    if (verb == "drain") {
      std::uint64_t num_boxes = 0;
      while (pack(from) != "none") {
        packed(from, false);
        ++num_boxes;
      }
      return std::to_string(num_boxes) + " boxes";
    }
    return "";
  }

  std::string pack(char from) {
    const auto task = sender_.next_box(session(from));
    if (!task) return "none";
    running_[from].push_back(*task);
    const auto& box = task->box;
    const std::string group = cache_.groups.size() > 1 ? "g" + std::to_string(box.group) + " " : "";
    if (task->block_ids.size() != box.num_positions()) return "block ids do not fit";
    for (const std::int32_t block : task->block_ids) {
      if (block < 0) return "a hole was taken";
    }
    return std::to_string(task->transfer) + " " + group + std::to_string(box.plane_begin) + "-" +
           std::to_string(box.plane_end) + " " + std::to_string(box.pos_begin) + "-" +
           std::to_string(box.pos_end);
  }
  std::string packed(char from, bool error) {
    const protocol::BoxTask task = running_[from].front();
    running_[from].pop_front();
    const Status status = error ? Status(Code::kTransport, "no") : Status();
    return sender_.packed(session(from), task, status, now_, out_) ? "post" : "drop";
  }

  Cache cache_;
  protocol::Sender sender_;
  protocol::Actions out_;
  TimeUs now_ = 0;
  std::int32_t next_block_ = 0;
  std::map<char, std::deque<protocol::BoxTask>> running_;
};

}  // namespace kvpush::script
