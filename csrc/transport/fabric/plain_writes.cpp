#include "transport/fabric/plain_writes.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <span>
#include <thread>
#include <utility>

#include "base/clock.hpp"
#include "transport/fabric/endpoint.hpp"
#include "transport/fabric/nics.hpp"

namespace kvpush {
namespace {

constexpr TimeUs kDeadlineUs = 60'000'000;
constexpr std::size_t kEntriesPerRead = 64;
constexpr std::size_t kQueueEntries = 8192;

using Context = std::array<void*, 8>;  // libfabric's (FI_CONTEXT2)

std::int64_t monotonic_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

class Writes final : public PlainWrites {
 public:
  Writes(std::unique_ptr<FabricEndpoint> endpoint, std::string protocol, Region memory)
      : endpoint_(std::move(endpoint)), protocol_(std::move(protocol)), memory_(memory) {}
  ~Writes() override { endpoint_->shut(); }

  Status start() {
    auto registration = endpoint_->register_memory(memory_, kFiWrite | kFiRemoteWrite, false);
    if (!registration.ok()) return registration.status();
    registration_ = std::move(registration).value();
    return {};
  }

  [[nodiscard]] std::string protocol() const override { return protocol_; }

  [[nodiscard]] PlainAddress address() const override {
    const auto base = reinterpret_cast<std::uintptr_t>(memory_.data);
    return {endpoint_->name(), endpoint_->by_address() ? base : 0, registration_->key};
  }

  Status connect(const PlainAddress& peer) override {
    const auto inserted = endpoint_->insert(peer.endpoint);
    if (!inserted.ok()) return inserted.status();
    peer_ = inserted.value();
    remote_ = peer;
    return {};
  }

  Status write(const std::vector<PlainPiece>& pieces, std::size_t write_bytes, std::size_t window) override {
    if (write_bytes == 0 || write_bytes > endpoint_->max_write_bytes() || window == 0) {
      return {Code::kInvalidArgument, std::to_string(window) + " writes of " + std::to_string(write_bytes) +
                                          " bytes; at most " + std::to_string(endpoint_->max_write_bytes()) +
                                          " bytes are one write here"};
    }
    std::vector<Context> contexts(window);
    std::vector<Context*> idle;
    idle.reserve(window);
    for (Context& context : contexts) idle.push_back(&context);
    const TimeUs deadline = monotonic_us() + kDeadlineUs;
    std::size_t at = 0;
    std::size_t done_bytes = 0;
    while (at < pieces.size() || idle.size() < window) {
      while (at < pieces.size() && !idle.empty()) {
        const PlainPiece& piece = pieces[at];
        const std::size_t size = std::min(write_bytes, piece.size_bytes - done_bytes);
        const FabricStart started = endpoint_->write(
            peer_, {memory_.data + piece.from + done_bytes, size}, registration_->mem_desc,
            static_cast<std::uint32_t>(at), remote_.base + piece.to + done_bytes, remote_.key, idle.back());
        if (started == FabricStart::kNo) return {Code::kTransport, "fi_writedata: " + endpoint_->error()};
        if (started == FabricStart::kAgain) break;
        idle.pop_back();
        done_bytes += size;
        if (done_bytes == piece.size_bytes) {
          ++at;
          done_bytes = 0;
        }
      }
      KVPUSH_TRY(read(deadline));
      for (const FiCqDataEntry& entry : read_) {
        if ((entry.flags & kFiRemoteCqData) == 0) idle.push_back(static_cast<Context*>(entry.op_context));
      }
    }
    return {};
  }

  Result<std::vector<std::int64_t>> wait(std::vector<std::size_t> counts) override {
    const TimeUs deadline = monotonic_us() + kDeadlineUs;
    std::vector<std::int64_t> ended(counts.size(), 0);
    auto left = counts.size() - static_cast<std::size_t>(std::count(counts.begin(), counts.end(), 0U));
    while (left != 0) {
      KVPUSH_TRY(read(deadline));
      for (const FiCqDataEntry& entry : read_) {
        if ((entry.flags & kFiRemoteCqData) == 0) continue;
        if (entry.data >= counts.size() || counts[entry.data] == 0) {
          return Status(Code::kTransport, "an immediate of " + std::to_string(entry.data) + " too many");
        }
        if (--counts[entry.data] != 0) continue;
        ended[entry.data] = monotonic_ns();
        --left;
      }
    }
    return ended;
  }

 private:
  /// Reads what is there into read_; nothing, and another thread's turn, if there is nothing.
  Status read(TimeUs deadline) {
    const std::ptrdiff_t count = endpoint_->read(entries_);
    read_ = std::span(entries_).first(count > 0 ? static_cast<std::size_t>(count) : 0);
    if (count > 0) return {};
    if (count == -kFiAvail) {
      FiCqErrEntry error;
      std::string text;
      if (endpoint_->read_error(error, text)) return {Code::kTransport, "fi_writedata: " + text};
    } else if (count < 0 && count != -kFiAgain) {
      return {Code::kTransport, "fi_cq_read: " + endpoint_->describe(count)};
    }
    if (monotonic_us() > deadline) return {Code::kTransport, "the writes were not over within a minute"};
    std::this_thread::yield();
    return {};
  }

  std::unique_ptr<FabricEndpoint> endpoint_;
  const std::string protocol_;
  const Region memory_;
  FidHandle<FidMr> registration_;
  FiAddr peer_ = kFiAddrUnspec;
  PlainAddress remote_;
  std::array<FiCqDataEntry, kEntriesPerRead> entries_{};
  std::span<FiCqDataEntry> read_;
};

}  // namespace

Result<std::unique_ptr<PlainWrites>> make_plain_writes(const std::shared_ptr<const FabricApi>& api,
                                                       const std::string& provider, Region memory) {
  FabricChoice choice;
  choice.provider = provider;
  auto chosen = choose_fabric_nics(*api, choice, true);
  if (!chosen.ok()) chosen = choose_fabric_nics(*api, choice, false);
  if (!chosen.ok()) return chosen.status();
  FabricRailInfos& rails = chosen.value();
  auto endpoint =
      FabricEndpoint::open(api, std::move(rails.infos.front()), rails.delivers, kQueueEntries, nullptr);
  if (!endpoint.ok()) return endpoint.status();
  auto writes = std::make_unique<Writes>(std::move(endpoint).value(), rails.nics.front().protocol, memory);
  KVPUSH_TRY(writes->start());
  return std::unique_ptr<PlainWrites>(std::move(writes));
}

}  // namespace kvpush
