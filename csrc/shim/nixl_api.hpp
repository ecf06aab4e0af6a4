// The part of NIXL's C API (libnixl_capi.so, as bound by NIXL's Rust crate) that kvpush calls.
// NIXL ships no header for it in its wheels and no ABI version, so every symbol is declared here and
// probed when the library is loaded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "base/status.hpp"

namespace kvpush {

/// 0 is success, 1 in progress, negative an error. NIXL's own errors collapse into few values.
/// Source: nixl_capi_status_t in src/bindings/rust/wrapper.h, NIXL 1.4 to 1.5.
using NixlCode = int;
inline constexpr NixlCode kNixlOk = 0;
inline constexpr NixlCode kNixlInProgress = 1;
inline constexpr NixlCode kNixlBackend = -2;   ///< any failure of a backend; says nothing of a write's fate
inline constexpr NixlCode kNixlNotFound = -6;  ///< metadata of the remote agent is not loaded

/// The code as text with its number, for messages.
[[nodiscard]] std::string describe_nixl_code(NixlCode code);

struct NixlAgentObject;
struct NixlParamsObject;
struct NixlMemListObject;
struct NixlBackendObject;
struct NixlOptArgsObject;
struct NixlXferListObject;
struct NixlRegListObject;
struct NixlRequestObject;
struct NixlNotifMapObject;

inline constexpr int kNixlDram = 0;
inline constexpr int kNixlVram = 1;
inline constexpr int kNixlWrite = 1;

/// Arguments of nixlAgentConfig. Passed by address: the layout is the C struct's.
struct NixlAgentConfig {
  bool enable_progress_thread = false;
  bool enable_listen_thread = false;
  int listen_port = 0;
  int thread_sync = 0;  ///< 0: the agent is not thread-safe
  unsigned int num_workers = 1;
  std::uint64_t progress_delay_us = 0;
  std::uint64_t listen_delay_us = 0;
  bool capture_telemetry = false;
};
static_assert(offsetof(NixlAgentConfig, listen_port) == 4 && offsetof(NixlAgentConfig, thread_sync) == 8 &&
              offsetof(NixlAgentConfig, num_workers) == 12 &&
              offsetof(NixlAgentConfig, progress_delay_us) == 16 &&
              offsetof(NixlAgentConfig, capture_telemetry) == 32);

// name without its prefix nixl_capi_, type. Blobs that come back by void** or char** belong to the
// caller, who frees them with free().
#define KVPUSH_NIXL_FUNCTIONS(X)                                                                            \
  X(is_stub, bool())                                                                                        \
  X(create_configured_agent, NixlCode(const char*, const NixlAgentConfig*, NixlAgentObject**))              \
  X(destroy_agent, NixlCode(NixlAgentObject*))                                                              \
  X(get_plugin_params, NixlCode(NixlAgentObject*, const char*, NixlMemListObject**, NixlParamsObject**))    \
  X(destroy_mem_list, NixlCode(NixlMemListObject*))                                                         \
  X(destroy_params, NixlCode(NixlParamsObject*))                                                            \
  X(create_backend, NixlCode(NixlAgentObject*, const char*, NixlParamsObject*, NixlBackendObject**))        \
  X(destroy_backend, NixlCode(NixlBackendObject*))                                                          \
  X(create_opt_args, NixlCode(NixlOptArgsObject**))                                                         \
  X(destroy_opt_args, NixlCode(NixlOptArgsObject*))                                                         \
  X(opt_args_add_backend, NixlCode(NixlOptArgsObject*, NixlBackendObject*))                                 \
  X(opt_args_set_notif_msg, NixlCode(NixlOptArgsObject*, const void*, std::size_t))                         \
  X(opt_args_set_has_notif, NixlCode(NixlOptArgsObject*, bool))                                             \
  X(create_reg_dlist, NixlCode(int, NixlRegListObject**))                                                   \
  X(destroy_reg_dlist, NixlCode(NixlRegListObject*))                                                        \
  X(reg_dlist_add_desc,                                                                                     \
    NixlCode(NixlRegListObject*, std::uintptr_t, std::size_t, std::uint64_t, const void*, std::size_t))     \
  X(register_mem, NixlCode(NixlAgentObject*, NixlRegListObject*, NixlOptArgsObject*))                       \
  X(deregister_mem, NixlCode(NixlAgentObject*, NixlRegListObject*, NixlOptArgsObject*))                     \
  X(get_local_md, NixlCode(NixlAgentObject*, void**, std::size_t*))                                         \
  X(get_local_partial_md,                                                                                   \
    NixlCode(NixlAgentObject*, NixlRegListObject*, void**, std::size_t*, NixlOptArgsObject*))               \
  X(load_remote_md, NixlCode(NixlAgentObject*, const void*, std::size_t, char**))                           \
  X(invalidate_remote_md, NixlCode(NixlAgentObject*, const char*))                                          \
  X(check_remote_md, NixlCode(NixlAgentObject*, const char*, NixlXferListObject*))                          \
  X(create_xfer_dlist, NixlCode(int, NixlXferListObject**))                                                 \
  X(destroy_xfer_dlist, NixlCode(NixlXferListObject*))                                                      \
  X(xfer_dlist_add_desc, NixlCode(NixlXferListObject*, std::uintptr_t, std::size_t, std::uint64_t))         \
  X(xfer_dlist_clear, NixlCode(NixlXferListObject*))                                                        \
  X(create_xfer_req, NixlCode(NixlAgentObject*, int, NixlXferListObject*, NixlXferListObject*, const char*, \
                              NixlRequestObject**, NixlOptArgsObject*))                                     \
  X(post_xfer_req, NixlCode(NixlAgentObject*, NixlRequestObject*, NixlOptArgsObject*))                      \
  X(get_xfer_status, NixlCode(NixlAgentObject*, NixlRequestObject*))                                        \
  X(release_xfer_req, NixlCode(NixlAgentObject*, NixlRequestObject*))                                       \
  X(destroy_xfer_req, NixlCode(NixlRequestObject*))                                                         \
  X(gen_notif, NixlCode(NixlAgentObject*, const char*, const void*, std::size_t, NixlOptArgsObject*))       \
  X(create_notif_map, NixlCode(NixlNotifMapObject**))                                                       \
  X(destroy_notif_map, NixlCode(NixlNotifMapObject*))                                                       \
  X(notif_map_clear, NixlCode(NixlNotifMapObject*))                                                         \
  X(get_notifs, NixlCode(NixlAgentObject*, NixlNotifMapObject*, NixlOptArgsObject*))                        \
  X(notif_map_size, NixlCode(NixlNotifMapObject*, std::size_t*))                                            \
  X(notif_map_get_agent_at, NixlCode(NixlNotifMapObject*, std::size_t, const char**))                       \
  X(notif_map_get_notifs_size, NixlCode(NixlNotifMapObject*, const char*, std::size_t*))                    \
  X(notif_map_get_notif, NixlCode(NixlNotifMapObject*, const char*, std::size_t, const void**, std::size_t*))

/// The functions above as members, e.g. `api.gen_notif(...)`. Immutable once loaded.
struct NixlApi {
#define KVPUSH_NIXL_MEMBER(name, type) std::add_pointer_t<type> name = nullptr;
  KVPUSH_NIXL_FUNCTIONS(KVPUSH_NIXL_MEMBER)
#undef KVPUSH_NIXL_MEMBER
};

/// Loads the library at `path` (libnixl_capi.so) for the rest of the process and looks every function
/// up. It sets no environment variable: NIXL and UCX read theirs, and both log warnings and errors
/// only unless the user says otherwise.
/// Errors:  InvalidArgument (empty path), Transport (it does not load; the loader's text), Unsupported
///          (a function is missing, or the library is NIXL's stub).
/// Threads: any.
Result<std::shared_ptr<const NixlApi>> load_nixl_api(const std::string& path);

}  // namespace kvpush
