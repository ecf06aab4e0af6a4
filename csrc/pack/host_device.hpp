// What host and device share: KVPUSH_HD before a function, KVPUSH_UNROLL before a loop.
#pragma once

#ifdef __CUDACC__
#define KVPUSH_HD __host__ __device__
#define KVPUSH_UNROLL _Pragma("unroll")
#else
#define KVPUSH_HD
#define KVPUSH_UNROLL
#endif
