// Tables of `event -> what it must lead to` for the protocol machines, in words.
//
// What a machine asks for is written in this order, separated by blanks: messages "A:ACCEPT(1)", credits
// "A:credit(0)", unpacks "unpack(1,slot 0)", events "sent(1)" and "failed(1,aborted)", breaches "A:breach".
// A, B, ... are sessions; numbers are transfers in messages, handles in events.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "check.hpp"
#include "protocol/actions.hpp"

namespace kvpush::script {

struct Row {
  const char* event;
  const char* expected;
};

inline SessionId session(char name) {
  SessionId id;
  id.bytes.fill(static_cast<std::uint8_t>(name));
  return id;
}

inline char name_of(const SessionId& id) {
  return static_cast<char>(id.bytes[0]);
}

inline std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

inline std::uint32_t number(const std::string& text) {
  return static_cast<std::uint32_t>(std::strtoul(text.c_str(), nullptr, 10));
}

/// "0-4,6-8" to ranges; "" or "." to none.
inline std::vector<PositionRange> ranges(const std::string& text) {
  std::vector<PositionRange> out;
  for (const std::string& part : split(text, ',')) {
    const auto ends = split(part, '-');
    if (ends.size() == 2) out.push_back({number(ends[0]), number(ends[1])});
  }
  return out;
}

inline std::string text_of(const protocol::Wanted& wanted) {
  std::string out;
  for (const auto& group : wanted) {
    if (&group != &wanted.front()) out += '|';
    for (const auto& range : group) {
      if (&range != &group.front()) out += ',';
      out += std::to_string(range.begin) + '-' + std::to_string(range.end);
    }
    if (group.empty()) out += '.';
  }
  return out;
}

/// "3-2": three blocks, a hole, two blocks. Block ids count up from `next`.
inline std::vector<std::int32_t> blocks(const std::string& text, std::int32_t& next) {
  std::vector<std::int32_t> ids;
  for (std::size_t at = 0; at < text.size();) {
    if (text[at] == '-') {
      ids.push_back(-1);
      ++at;
      continue;
    }
    std::size_t end = at;
    while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
    if (end == at) break;
    for (std::uint32_t n = number(text.substr(at, end - at)); n > 0; --n) ids.push_back(next++);
    at = end;
  }
  return ids;
}

inline FailCode code_of(const std::string& name) {
  for (std::uint8_t code = 0; code < kNumFailCodes; ++code) {
    if (to_string(static_cast<FailCode>(code)) == name) return static_cast<FailCode>(code);
  }
  check::fail(__FILE__, __LINE__, "no code " + name);
  return FailCode::kNone;
}

inline std::string text_of(const protocol::Body& body) {
  using namespace protocol;
  const auto arguments = [&]() -> std::string {
    if (const auto* m = std::get_if<Intent>(&body)) return std::to_string(m->transfer);
    if (const auto* m = std::get_if<Open>(&body))
      return std::to_string(m->transfer) + "," + text_of(m->wanted);
    if (const auto* m = std::get_if<Cancel>(&body)) return std::to_string(m->transfer);
    if (const auto* m = std::get_if<Done>(&body)) return std::to_string(m->transfer);
    if (const auto* m = std::get_if<Accept>(&body)) return std::to_string(m->transfer);
    if (const auto* m = std::get_if<End>(&body)) {
      return std::to_string(m->transfer) + "," + std::to_string(m->num_boxes) + "," +
             std::to_string(m->num_units);
    }
    if (const auto* m = std::get_if<Fail>(&body)) {
      return std::to_string(m->transfer) + "," + std::string(to_string(m->code));
    }
    return "?";
  };
  return std::string(name_of(body)) + "(" + arguments() + ")";
}

/// Actions in words; empties them.
inline std::string drain(protocol::Actions& actions) {
  std::string out;
  const auto add = [&out](const std::string& text) {
    if (!out.empty()) out += ' ';
    out += text;
  };
  for (const auto& [id, body] : actions.messages) add(std::string(1, name_of(id)) + ":" + text_of(body));
  for (const auto& [id, slot] : actions.credits) {
    add(std::string(1, name_of(id)) + ":credit(" + std::to_string(slot) + ")");
  }
  for (const auto& unpack : actions.unpacks) {
    add("unpack(" + std::to_string(unpack.transfer) + ",slot " + std::to_string(unpack.slot) + ")");
  }
  for (const auto& event : actions.events) {
    const char* const kind = event.kind == protocol::Event::Kind::kSent       ? "sent("
                             : event.kind == protocol::Event::Kind::kReceived ? "received("
                                                                              : "failed(";
    std::string text = kind + std::to_string(event.handle);
    if (event.kind == protocol::Event::Kind::kFailed) text += "," + std::string(to_string(event.status));
    add(text + ")");
  }
  for (const auto& [id, why] : actions.breaches) add(std::string(1, name_of(id)) + ":breach");
  actions = {};
  return out;
}

/// Runs `rows` on a machine whose do_event(words) carries one out and says what came of it.
template <typename Machine>
void run(const char* title, Machine& machine, std::initializer_list<Row> rows) {
  int index = 0;
  for (const Row& row : rows) {
    const std::string got = machine.do_event(split(row.event, ' '));
    if (got != row.expected) {
      check::fail(title, index,
                  std::string(row.event) + " -> [" + got + "], expected [" + row.expected + "]");
      return;
    }
    ++index;
  }
}

}  // namespace kvpush::script
