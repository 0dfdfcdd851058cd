// Device memory and pinned host memory: everything that has to do with *where*.
//
// Neither is ever unmapped. A copy that outlives its memory, which is the mistake the test device
// exists to show, then reads poison or another tensor's bytes instead of crashing the process.
#pragma once

#include "runtime.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace lag {

// Every byte of freed device memory, once its own stream gets there.
constexpr unsigned char kPoison = 0xDD;

// ---- device memory (device_memory.cpp) ------------------------------------------------------

c10::DeviceAllocator* device_allocator();
std::map<std::string, std::int64_t> device_memory_stats(c10::DeviceIndex device);
void device_memory_reset_peak(c10::DeviceIndex device);
// Capacity in bytes, cached blocks included; nothing: the default.
void device_memory_set_limit(c10::DeviceIndex device, std::optional<std::int64_t> nbytes);
// Give cached blocks back, waiting for the device first, without counting a call of the program.
void device_memory_trim(c10::DeviceIndex device);
void device_memory_record_stream(const void* base, const c10::Stream& stream);
c10::DeviceIndex device_memory_owner(const void* ptr);

// ---- host memory (host_memory.cpp) ----------------------------------------------------------

at::HostAllocator* host_allocator();
// True for any address inside pinned or registered memory: what the driver knows.
bool is_pinned(const void* ptr);
// Keep a pinned block out of the pool until the stream has passed this point. Like torch's own
// allocator it knows a block by its start or its context only, not by an address inside it.
void host_memory_record(const void* ptr, const void* context, const c10::Stream& stream);
std::map<std::string, std::int64_t> host_memory_stats();
void host_memory_set_limit(std::optional<std::int64_t> nbytes);
void host_memory_reset_peak();
void host_memory_trim();
void host_register(std::uintptr_t ptr, std::size_t nbytes);
void host_unregister(std::uintptr_t ptr);

// A token of the registered memory around `ptr`, or nothing. A queued copy holds it until it has
// run, which is how `host_unregister` knows that the memory is still in use.
std::shared_ptr<const void> host_use(const void* ptr);

}  // namespace lag
