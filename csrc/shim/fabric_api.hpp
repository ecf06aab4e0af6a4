// The part of libfabric (libfabric.so.1) that kvpush calls, declared here and found at run time.
//
// Source: rdma/fabric.h, fi_domain.h, fi_endpoint.h, fi_eq.h, fi_rma.h and fi_cm.h of libfabric 1.17.0,
// compared with those of 2.6: structures only ever grow at their end, so what is declared here is the front
// of each. Structures that the library allocates are never copied or made here, and those that it reads or
// fills have room behind them. Members that are never used are named unused*.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.hpp"

namespace kvpush {

[[nodiscard]] constexpr std::uint32_t fabric_version(std::uint32_t major, std::uint32_t minor) {
  return major << 16U | minor;
}
/// What is asked of every libfabric, and the oldest that is taken.
inline constexpr std::uint32_t kFabricVersion = fabric_version(1, 17);

// Capabilities, and flags of operations and completions.
inline constexpr std::uint64_t kFiMsg = 1ULL << 1U;
inline constexpr std::uint64_t kFiRma = 1ULL << 2U;
inline constexpr std::uint64_t kFiWrite = 1ULL << 9U;
inline constexpr std::uint64_t kFiRecv = 1ULL << 10U;
inline constexpr std::uint64_t kFiSend = 1ULL << 11U;  ///< also FI_TRANSMIT
inline constexpr std::uint64_t kFiRemoteWrite = 1ULL << 13U;
inline constexpr std::uint64_t kFiRemoteCqData = 1ULL << 17U;
inline constexpr std::uint64_t kFiHmem = 1ULL << 47U;  ///< memory of devices
inline constexpr std::uint64_t kFiDeliveryComplete = 1ULL << 28U;
inline constexpr std::uint64_t kFiSource = 1ULL << 57U;  ///< of getinfo(): `node` is of this side
// What an application supports of the modes that a provider may ask for.
inline constexpr std::uint64_t kFiContext = 1ULL << 59U;
inline constexpr std::uint64_t kFiContext2 = 1ULL << 52U;
// Bits of FiDomainAttr::mr_mode.
inline constexpr std::uint32_t kFiMrLocal = 1U << 2U;
inline constexpr std::uint32_t kFiMrVirtAddr = 1U << 4U;
inline constexpr std::uint32_t kFiMrAllocated = 1U << 5U;
inline constexpr std::uint32_t kFiMrProvKey = 1U << 6U;
inline constexpr std::uint32_t kFiMrHmem = 1U << 10U;  ///< memory of devices is registered in any case

inline constexpr int kFiEpRdm = 3;
inline constexpr int kFiThreadDomain = 3;
inline constexpr int kFiRmEnabled = 2;
inline constexpr int kFiCqFormatData = 3;
inline constexpr int kFiWaitNone = 0;
inline constexpr int kFiWaitFd = 3;
inline constexpr int kFiGetWait = 5;
inline constexpr int kFiEnable = 6;

inline constexpr int kFiAgain = 11;     ///< FI_EAGAIN
inline constexpr int kFiAvail = 259;    ///< FI_EAVAIL: an error entry waits
inline constexpr int kFiOverrun = 268;  ///< FI_EOVERRUN: completions were lost

using FiAddr = std::uint64_t;
inline constexpr FiAddr kFiAddrUnspec = UINT64_MAX;

struct Fid;
struct FidFabric;
struct FidDomain;
struct FidAv;
struct FidCq;
struct FidEp;
struct FidMr;

using FiUnused = void (*)();

struct FiOps {
  std::size_t size;
  int (*close)(Fid*);
  int (*bind)(Fid*, Fid*, std::uint64_t flags);
  int (*control)(Fid*, int command, void*);
};

/// What every object starts with.
struct Fid {
  std::size_t fclass;
  void* context;
  FiOps* ops;
};
static_assert(sizeof(Fid) == 24);

struct FiTxAttr {
  std::uint64_t caps;
  std::uint64_t mode;
  std::uint64_t op_flags;
  std::uint64_t msg_order;
  std::uint64_t comp_order;
  std::size_t inject_size;
  std::size_t size;
};
static_assert(offsetof(FiTxAttr, op_flags) == 16 && offsetof(FiTxAttr, size) == 48);

struct FiRxAttr {
  std::uint64_t caps;
  std::uint64_t mode;
  std::uint64_t op_flags;
  std::uint64_t msg_order;
  std::uint64_t comp_order;
  std::size_t total_buffered_recv;
  std::size_t size;
};
static_assert(offsetof(FiRxAttr, size) == 48);

struct FiEpAttr {
  int type;
  std::uint32_t protocol;
  std::uint32_t protocol_version;
  std::size_t max_msg_size;
};
static_assert(offsetof(FiEpAttr, max_msg_size) == 16);

struct FiDomainAttr {
  FidDomain* domain;
  char* name;
  int threading;
  int control_progress;
  int data_progress;
  int resource_mgmt;
  int av_type;
  std::uint32_t mr_mode;  // an int in C
  std::size_t mr_key_size;
  std::size_t cq_data_size;
};
static_assert(offsetof(FiDomainAttr, threading) == 16 && offsetof(FiDomainAttr, mr_mode) == 36 &&
              offsetof(FiDomainAttr, cq_data_size) == 48);

struct FiFabricAttr {
  FidFabric* fabric;
  char* name;
  char* prov_name;
  std::uint32_t prov_version;
  std::uint32_t api_version;
};
static_assert(offsetof(FiFabricAttr, prov_name) == 16 && offsetof(FiFabricAttr, api_version) == 28);

struct FiDeviceAttr {
  char* name;
};

inline constexpr int kFiBusPci = 1;
struct FiBusAttr {
  int bus_type;
  std::uint16_t pci_domain;
  std::uint8_t pci_bus;
  std::uint8_t pci_device;
  std::uint8_t pci_function;
};
static_assert(offsetof(FiBusAttr, pci_domain) == 4 && offsetof(FiBusAttr, pci_function) == 8);

inline constexpr int kFiLinkDown = 1;
struct FiLinkAttr {
  char* address;
  std::size_t mtu;
  std::size_t speed;  ///< bits per second
  int state;
};
static_assert(offsetof(FiLinkAttr, speed) == 16);

/// Of providers that know their hardware.
struct FidNic {
  Fid fid;
  FiDeviceAttr* device_attr;
  FiBusAttr* bus_attr;
  FiLinkAttr* link_attr;
};

inline constexpr std::uint32_t kFiSockaddr = 1;
inline constexpr std::uint32_t kFiSockaddrIn = 2;
inline constexpr std::uint32_t kFiSockaddrIn6 = 3;

struct FiInfo {
  FiInfo* next;
  std::uint64_t caps;
  std::uint64_t mode;
  std::uint32_t addr_format;
  std::size_t src_addrlen;
  std::size_t dest_addrlen;
  void* src_addr;
  void* dest_addr;
  Fid* handle;
  FiTxAttr* tx_attr;
  FiRxAttr* rx_attr;
  FiEpAttr* ep_attr;
  FiDomainAttr* domain_attr;
  FiFabricAttr* fabric_attr;
  FidNic* nic;  ///< null where there is none
};
static_assert(offsetof(FiInfo, addr_format) == 24 && offsetof(FiInfo, src_addr) == 48 &&
              offsetof(FiInfo, tx_attr) == 72 && offsetof(FiInfo, nic) == 112);

struct FiOpsFabric {
  std::size_t size;
  int (*domain)(FidFabric*, FiInfo*, FidDomain**, void* context);
  FiUnused unused[3];
  int (*trywait)(FidFabric*, Fid**, int count);
};
static_assert(offsetof(FiOpsFabric, trywait) == 40);

struct FidFabric {
  Fid fid;
  FiOpsFabric* ops;
};

struct FiAvAttr {
  int type = 0;
  int rx_ctx_bits = 0;
  std::size_t count = 0;
  std::size_t ep_per_node = 0;
  const char* name = nullptr;
  void* map_addr = nullptr;
  std::uint64_t flags = 0;
  std::uint64_t room[4] = {};
};
static_assert(offsetof(FiAvAttr, count) == 8 && offsetof(FiAvAttr, flags) == 40);

struct FiCqAttr {
  std::size_t size = 0;
  std::uint64_t flags = 0;
  int format = 0;
  int wait_obj = 0;
  int signaling_vector = 0;
  int wait_cond = 0;
  void* wait_set = nullptr;
  std::uint64_t room[4] = {};
};
static_assert(offsetof(FiCqAttr, format) == 16 && offsetof(FiCqAttr, wait_set) == 32);

struct FiOpsDomain {
  std::size_t size;
  int (*av_open)(FidDomain*, FiAvAttr*, FidAv**, void* context);
  int (*cq_open)(FidDomain*, FiCqAttr*, FidCq**, void* context);
  int (*endpoint)(FidDomain*, FiInfo*, FidEp**, void* context);
};

inline constexpr int kFiHmemCuda = 1;
struct FiMrAttr {
  const iovec* mr_iov = nullptr;
  std::size_t iov_count = 0;
  std::uint64_t access = 0;
  std::uint64_t offset = 0;
  std::uint64_t requested_key = 0;
  void* context = nullptr;
  std::size_t auth_key_size = 0;
  std::uint8_t* auth_key = nullptr;
  int iface = 0;
  std::uint64_t device = 0;  // a union in C: for CUDA an int, the device's index
  std::uint64_t room[6] = {};
};
static_assert(offsetof(FiMrAttr, iface) == 64 && offsetof(FiMrAttr, device) == 72);

struct FiOpsMr {
  std::size_t size;
  int (*reg)(Fid*, const void*, std::size_t, std::uint64_t access, std::uint64_t offset,
             std::uint64_t requested_key, std::uint64_t flags, FidMr**, void* context);
  FiUnused unused_regv;
  int (*regattr)(Fid*, const FiMrAttr*, std::uint64_t flags, FidMr**);
};
static_assert(offsetof(FiOpsMr, regattr) == 24);

struct FidDomain {
  Fid fid;
  FiOpsDomain* ops;
  FiOpsMr* mr;
};
static_assert(offsetof(FidDomain, mr) == 32);

struct FidMr {
  Fid fid;
  void* mem_desc;
  std::uint64_t key;
};
static_assert(offsetof(FidMr, key) == 32);

struct FiOpsAv {
  std::size_t size;
  int (*insert)(FidAv*, const void*, std::size_t count, FiAddr*, std::uint64_t flags, void* context);
  FiUnused unused[2];
  int (*remove)(FidAv*, FiAddr*, std::size_t count, std::uint64_t flags);
};
static_assert(offsetof(FiOpsAv, remove) == 32);

struct FidAv {
  Fid fid;
  FiOpsAv* ops;
};

struct FiCqDataEntry {
  void* op_context;
  std::uint64_t flags;
  std::size_t len;
  void* buf;
  std::uint64_t data;
};
static_assert(sizeof(FiCqDataEntry) == 40);

struct FiCqErrEntry {
  void* op_context = nullptr;
  std::uint64_t flags = 0;
  std::size_t len = 0;
  void* buf = nullptr;
  std::uint64_t data = 0;
  std::uint64_t tag = 0;
  std::size_t olen = 0;
  int err = 0;
  int prov_errno = 0;
  void* err_data = nullptr;
  std::size_t err_data_size = 0;
  std::uint64_t room[6] = {};
};
static_assert(offsetof(FiCqErrEntry, err) == 56 && offsetof(FiCqErrEntry, err_data_size) == 72);

struct FiOpsCq {
  std::size_t size;
  std::ptrdiff_t (*read)(FidCq*, void*, std::size_t count);
  FiUnused unused_readfrom;
  std::ptrdiff_t (*readerr)(FidCq*, FiCqErrEntry*, std::uint64_t flags);
  FiUnused unused[3];
  const char* (*strerror)(FidCq*, int prov_errno, const void* err_data, char*, std::size_t);
};
static_assert(offsetof(FiOpsCq, readerr) == 24 && offsetof(FiOpsCq, strerror) == 56);

struct FidCq {
  Fid fid;
  FiOpsCq* ops;
};

struct FiOpsCm {
  std::size_t size;
  FiUnused unused_setname;
  int (*getname)(Fid*, void*, std::size_t*);
};
static_assert(offsetof(FiOpsCm, getname) == 16);

struct FiOpsMsg {
  std::size_t size;
  std::ptrdiff_t (*recv)(FidEp*, void*, std::size_t, void* desc, FiAddr, void* context);
  FiUnused unused[2];
  std::ptrdiff_t (*send)(FidEp*, const void*, std::size_t, void* desc, FiAddr, void* context);
};
static_assert(offsetof(FiOpsMsg, send) == 32);

struct FiOpsRma {
  std::size_t size;
  FiUnused unused[7];
  std::ptrdiff_t (*writedata)(FidEp*, const void*, std::size_t, void* desc, std::uint64_t data, FiAddr,
                              std::uint64_t address, std::uint64_t key, void* context);
};
static_assert(offsetof(FiOpsRma, writedata) == 64);

struct FidEp {
  Fid fid;
  void* ops;
  FiOpsCm* cm;
  FiOpsMsg* msg;
  FiOpsRma* rma;
};
static_assert(offsetof(FidEp, cm) == 32 && offsetof(FidEp, rma) == 48);

// The symbols themselves: name without its prefix fi_, type.
#define KVPUSH_FABRIC_FUNCTIONS(X)                                                                           \
  X(version, std::uint32_t())                                                                                \
  X(getinfo,                                                                                                 \
    int(std::uint32_t, const char* node, const char* service, std::uint64_t flags, const FiInfo*, FiInfo**)) \
  X(freeinfo, void(FiInfo*))                                                                                 \
  X(dupinfo, FiInfo*(const FiInfo*))                                                                         \
  X(fabric, int(FiFabricAttr*, FidFabric**, void*))                                                          \
  X(strerror, const char*(int))

/// The functions above as members, e.g. `api.getinfo(...)`. Immutable once loaded.
struct FabricApi {
#define KVPUSH_FABRIC_MEMBER(name, type) std::add_pointer_t<type> name = nullptr;
  KVPUSH_FABRIC_FUNCTIONS(KVPUSH_FABRIC_MEMBER)
#undef KVPUSH_FABRIC_MEMBER
  std::string path;  ///< of the library
};

/// Loads the first library of `paths` that loads, for the rest of the process, and looks every function up. A
/// path is a file, or a name for the loader's search.
/// Errors:  InvalidArgument (no paths), Transport (none loads; the loader's texts), Unsupported (a function
/// is
///          missing, or the library is older than kFabricVersion).
/// Threads: any.
Result<std::shared_ptr<const FabricApi>> load_fabric_api(const std::vector<std::string>& paths);

/// "1.17" for fabric_version(1, 17).
[[nodiscard]] std::string describe_fabric_version(std::uint32_t version);

struct FabricInfoDeleter {
  const FabricApi* api = nullptr;
  void operator()(FiInfo* info) const noexcept { api->freeinfo(info); }
};
using FabricInfo = std::unique_ptr<FiInfo, FabricInfoDeleter>;

/// What is asked of providers beside connectionless reliable endpoints with messages, remote writes and 4
/// bytes of immediate data.
struct FabricQuery {
  std::string provider;            ///< only this one; empty: all
  bool delivery_complete = false;  ///< it can tell when a write has arrived
  bool device_memory = false;      ///< it reads and writes memory of GPUs
  std::string source;              ///< an address of this host to use; empty: any
};

/// One entry per provider, NIC and address that has it. Errors: Unsupported (none). Waits: some 10 ms, longer
/// on the first call of a process.
Result<FabricInfo> find_fabric_providers(const FabricApi& api, const FabricQuery& query);

/// One provider that a library has on this machine.
struct FabricProvider {
  std::string name;
  std::uint32_t version = 0;           ///< the provider's own, as fabric_version()
  std::uint32_t protocol = 0;          ///< 0 where it is not usable
  std::uint32_t protocol_version = 0;  ///< the same
  bool delivers = false;               ///< it can tell when a write has arrived
  std::string reason;                  ///< empty: kvpush can use it
};

/// All providers, in libfabric's order. Waits: some 10 ms for each, longer on the first call of a process.
std::vector<FabricProvider> list_fabric_providers(const FabricApi& api);

}  // namespace kvpush
