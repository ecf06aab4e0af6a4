// A library opened at run time: nothing here is needed to load kvpush itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/status.hpp"

namespace kvpush {

/// Owns one dlopen() handle. Symbols stay local to it (RTLD_LOCAL) and are all resolved on opening
/// (RTLD_NOW), so a broken library fails here and not in the middle of a transfer. Move-only.
class DynamicLibrary {
 public:
  /// What the destructor does.
  enum class Lifetime : std::uint8_t {
    kScoped,   ///< dlclose()
    kProcess,  ///< never unloaded: for libraries that start threads or register exit handlers
  };

  /// Opens `path`, a file or a name for the loader's search. Transport errors carry dlerror()'s text.
  /// Threads: any.
  static Result<DynamicLibrary> open(const std::string& path, Lifetime lifetime);

  DynamicLibrary(DynamicLibrary&& other) noexcept;
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept;
  DynamicLibrary(const DynamicLibrary&) = delete;
  DynamicLibrary& operator=(const DynamicLibrary&) = delete;
  ~DynamicLibrary();

  /// Sets `function` to the symbol `name`; Unsupported, with both names, when the library lacks it.
  template <typename Function>
  Status lookup(const char* name, Function** function) const {
    void* address = nullptr;
    KVPUSH_TRY(find(name, &address));
    *function = reinterpret_cast<Function*>(address);
    return {};
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

 private:
  DynamicLibrary(void* handle, std::string path) : handle_(handle), path_(std::move(path)) {}
  Status find(const char* name, void** address) const;

  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace kvpush
