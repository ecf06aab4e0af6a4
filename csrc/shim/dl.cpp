#include "shim/dl.hpp"

#include <dlfcn.h>

#include <utility>

namespace kvpush {
namespace {

std::string last_dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "unknown loader error";
}

}  // namespace

Result<DynamicLibrary> DynamicLibrary::open(const std::string& path, Lifetime lifetime) {
  if (path.empty()) return Status(Code::kInvalidArgument, "the path of the library is empty");
  const int keep = lifetime == Lifetime::kProcess ? RTLD_NODELETE : 0;
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | keep);
  if (handle == nullptr) {
    return Status(Code::kTransport, "cannot load " + path + ": " + last_dl_error());
  }
  return DynamicLibrary(handle, path);
}

DynamicLibrary::DynamicLibrary(DynamicLibrary&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), path_(std::move(other.path_)) {}

DynamicLibrary& DynamicLibrary::operator=(DynamicLibrary&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(path_, other.path_);
  return *this;
}

DynamicLibrary::~DynamicLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

Status DynamicLibrary::find(const char* name, void** address) const {
  dlerror();
  *address = handle_ != nullptr ? dlsym(handle_, name) : nullptr;
  if (*address != nullptr) return {};
  return {Code::kUnsupported, path_ + " has no symbol " + name + ": the version does not fit"};
}

}  // namespace kvpush
