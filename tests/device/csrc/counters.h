// What the device was asked to do, per device. Counted when a call is issued, not when it lands.
#pragma once

#include "runtime.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

// clang-format off
// A "blocking" link copy made the host wait: it was not `non_blocking`, or its host side is pageable.
// Copies made only to run an operator on the CPU (`fallbacks`) are in none of the copy counters.
#define LAG_COUNTERS(X)                                                                          \
  X(d2h_async)    X(d2h_async_bytes)    X(d2h_blocking) X(d2h_blocking_bytes)                    \
  X(h2d_async)    X(h2d_async_bytes)    X(h2d_blocking) X(h2d_blocking_bytes)                    \
  X(d2d)          X(d2d_bytes)                                                                   \
  X(empty_copies)      /* copies of zero elements that reached the device's copy function */     \
  X(fills)                                                                                       \
  X(fallbacks)         /* operators that ran on the CPU, after a wait for the current stream */  \
  X(allocations)  X(frees)                                                                       \
  X(alloc_retries)     /* allocations that emptied the cache, and stalled the device, to fit */  \
  X(ooms)                                                                                        \
  X(empty_cache)       /* calls of the program */                                                \
  X(device_syncs)      /* device-wide synchronises by the program */                             \
  X(stream_syncs) X(event_syncs)                                                                 \
  X(event_queries) X(stream_queries)                                                             \
  X(host_waits)        /* waits of any kind that found something to wait for */                  \
  X(busy_unregisters)  /* host memory unregistered while a copy was still using it */
// clang-format on

namespace lag {

struct Counters {
#define LAG_FIELD(name) std::atomic<std::int64_t> name{0};
  LAG_COUNTERS(LAG_FIELD)
#undef LAG_FIELD
};

Counters& counters(c10::DeviceIndex device);
std::map<std::string, std::int64_t> counters_snapshot(c10::DeviceIndex device);
void counters_reset();

// Make device-wide synchronises throw, so that a test sees who calls one.
void forbid_device_sync(bool forbidden);
void note_device_sync(c10::DeviceIndex device);

}  // namespace lag
