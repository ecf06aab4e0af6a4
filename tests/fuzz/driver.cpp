// A fuzzer's main() for where there is no libFuzzer: mutates a corpus by a seed, so that every run of a seed
// is the same. Ends at the first failure and leaves its input in crash-<program>.
//
//   fuzz_messages [--seed N] [--runs N] [--seconds S] FILE_OR_FOLDER...
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "base/clock.hpp"
#include "sealed.hpp"

// Present when a sanitizer is linked in.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace {

using Input = std::vector<std::uint8_t>;

constexpr std::size_t kMaxInputBytes = 65536;

Input running;
std::string crash_file;

void keep_input() {
  std::ofstream(crash_file, std::ios::binary)
      .write(reinterpret_cast<const char*>(running.data()), static_cast<std::streamsize>(running.size()));
  std::cerr << "the input is in " << crash_file << std::endl;
}

void on_abort(int) {
  keep_input();
  std::_Exit(1);
}

void run(Input input) {
  running = std::move(input);
  LLVMFuzzerTestOneInput(running.data(), running.size());
}

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  Input next(const std::vector<Input>& corpus) {
    Input input = pick(corpus);
    for (std::size_t steps = 1 + below(4); steps > 0; --steps) mutate(input, corpus);
    if (input.size() > kMaxInputBytes) input.resize(kMaxInputBytes);
    return input;
  }

 private:
  std::size_t below(std::size_t limit) { return static_cast<std::size_t>(random_() % limit); }
  const Input& pick(const std::vector<Input>& corpus) { return corpus[below(corpus.size())]; }

  void mutate(Input& input, const std::vector<Input>& corpus) {
    if (input.empty()) {
      input.push_back(static_cast<std::uint8_t>(below(256)));
      return;
    }
    const std::size_t at = below(input.size());
    const auto where = input.begin() + static_cast<std::ptrdiff_t>(at);
    const std::size_t length = 1 + below(std::min<std::size_t>(input.size() - at, 32));
    const auto end = where + static_cast<std::ptrdiff_t>(length);
    switch (below(8)) {
      case 0: *where = static_cast<std::uint8_t>(*where ^ (1U << below(8))); break;
      case 1: *where = static_cast<std::uint8_t>(below(256)); break;
      case 2: number(input, at); break;
      case 3: input.erase(where, end); break;
      case 4: input.resize(at); break;
      case 5: {
        const Input piece(where, end);
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(below(input.size())), piece.begin(),
                     piece.end());
        break;
      }
      case 6: input.insert(where, below(16), static_cast<std::uint8_t>(below(256))); break;
      default: {
        const Input& other = pick(corpus);
        if (other.empty()) break;
        input.erase(where, input.end());
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())),
                     other.end());
      }
    }
  }
  /// Writes a number at which lengths and counts tend to break.
  void number(Input& input, std::size_t at) {
    static constexpr std::uint64_t kNumbers[] = {0,          1,          64,    65,         512,
                                                 513,        65535,      65536, 0x7fffffff, 0x80000000,
                                                 0xffffffff, 1ULL << 63, 16384, UINT64_MAX};
    const std::uint64_t value = kNumbers[below(std::size(kNumbers))];
    const std::size_t width = std::min<std::size_t>(std::size_t{1} << below(4), input.size() - at);
    std::memcpy(input.data() + at, &value, width);
  }

  std::mt19937_64 random_;
};

void load(const std::filesystem::path& path, std::vector<Input>& corpus) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(path)) {
    for (const auto& entry : std::filesystem::directory_iterator(path)) files.push_back(entry.path());
  } else {
    files.push_back(path);
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::uint64_t seed = 1;
  std::uint64_t runs = UINT64_MAX;
  kvpush::TimeUs deadline = kvpush::kNever;
  std::vector<Input> corpus;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.starts_with("--") && i + 1 < argc) {
      const std::uint64_t value = std::strtoull(argv[++i], nullptr, 10);
      if (word == "--seed") seed = value;
      if (word == "--runs") runs = value;
      if (word == "--seconds")
        deadline = kvpush::monotonic_us() + static_cast<kvpush::TimeUs>(value * 1'000'000);
    } else {
      load(word, corpus);
    }
  }
  if (corpus.empty()) corpus.emplace_back();
  crash_file = "crash-" + std::filesystem::path(argv[0]).filename().string();
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(keep_input);
  std::signal(SIGABRT, on_abort);

  for (const Input& input : corpus) run(input);
  Mutator mutator(seed);
  std::uint64_t done = 0;
  while (done < runs && kvpush::monotonic_us() < deadline) {
    run(mutator.next(corpus));
    ++done;
  }
  std::cout << corpus.size() << " inputs of the corpus, " << done << " mutations of seed " << seed << "\n";
  return 0;
}
