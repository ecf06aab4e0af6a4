#include "shim/nixl_api.hpp"

#include <mutex>

#include "shim/dl.hpp"

namespace kvpush {

std::string describe_nixl_code(NixlCode code) {
  const char* text = "unknown code";
  switch (code) {
    case 0: text = "success"; break;
    case 1: text = "in progress"; break;
    case -1: text = "invalid parameter"; break;
    case -2: text = "backend error"; break;
    case -3: text = "invalid state"; break;
    case -4: text = "exception"; break;
    case -5: text = "no telemetry"; break;
    case -6: text = "not found"; break;
    default: break;
  }
  return std::string(text) + " (" + std::to_string(code) + ")";
}

Result<std::shared_ptr<const NixlApi>> load_nixl_api(const std::string& path) {
  // The loader serialises this too, but a thread sanitizer does not see its lock.
  static auto* const mutex = new std::mutex;
  const std::lock_guard lock(*mutex);
  // NIXL's wheels bring a libnl. Where the system's libibverbs is loaded after that, its libnl-route takes
  // half of it, and the process crashes when it exits. What is loaded first stays with its own; absent is
  // fine.
  static_cast<void>(DynamicLibrary::open("libnl-route-3.so.200", DynamicLibrary::Lifetime::kProcess));
  auto library = DynamicLibrary::open(path, DynamicLibrary::Lifetime::kProcess);
  if (!library.ok()) return library.status();

  auto api = std::make_shared<NixlApi>();
#define KVPUSH_NIXL_LOOKUP(name, type) KVPUSH_TRY(library.value().lookup("nixl_capi_" #name, &api->name));
  KVPUSH_NIXL_FUNCTIONS(KVPUSH_NIXL_LOOKUP)
#undef KVPUSH_NIXL_LOOKUP

  if (api->is_stub()) {
    return Status(Code::kUnsupported, path + " is NIXL's stub library: install the nixl package itself");
  }
  return std::shared_ptr<const NixlApi>(std::move(api));
}

}  // namespace kvpush
