// A caching allocator with CUDA's rules, which are what makes use-after-free races real:
//   - a freed block goes back at once to the cache of the stream it was allocated on, and is the
//     first to be handed out again there: stream order protects that stream and no other;
//   - a block that was recorded on further streams stays away until they have passed the free;
//   - where a request does not fit, the device is stalled, the cache emptied, and one more try made.
// Beyond CUDA, freed memory is poisoned on its own stream.
#include "counters.h"
#include "gil.h"
#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>
#include <vector>

namespace lag {
namespace {

constexpr std::size_t kRound = 512;
constexpr std::int64_t kDefaultLimit = std::int64_t{4} << 30;

struct Block {
  void* ptr;
  std::size_t nbytes;  // asked for
  std::size_t size;    // rounded
  c10::DeviceIndex device;
  c10::StreamId stream;
  std::set<c10::StreamId> also;  // further streams (of the same device) that use it
};

// Freed, but used by further streams that have not passed the free yet.
struct Parked {
  Block block;
  std::vector<std::shared_ptr<Gate>> passed;
};

struct Usage {
  std::int64_t live_blocks = 0;
  std::int64_t allocated = 0;
  std::int64_t peak = 0;
  std::int64_t reserved = 0;  // rounded, cached blocks included
  std::int64_t reserved_peak = 0;
  std::int64_t limit = kDefaultLimit;
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    check_not_forked();
    const auto device = current_device();
    void* ptr = nbytes ? take(nbytes, device) : nullptr;
    return {ptr, ptr, &release, c10::Device(kType, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, std::size_t) const override {
    TORCH_CHECK(false, "lag: device memory is only copied on a stream");
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
      ++counters(device).empty_cache;
      trim(device);
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record(data.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto usage = usage_of(resolve(device));
    const auto left = std::max<std::int64_t>(0, usage.limit - usage.reserved);
    return {left, usage.limit};
  }

  Usage usage_of(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    return usage_.at(device);
  }
  void set_limit(c10::DeviceIndex device, std::optional<std::int64_t> nbytes) {
    std::lock_guard lock(mutex_);
    usage_.at(device).limit = nbytes.value_or(kDefaultLimit);
  }
  void reset_peak(c10::DeviceIndex device) {
    std::lock_guard lock(mutex_);
    auto& usage = usage_.at(device);
    usage.peak = usage.allocated;
    usage.reserved_peak = usage.reserved;
  }
  void record(const void* base, const c10::Stream& stream) {
    std::lock_guard lock(mutex_);
    auto found = live_.find(base);
    if (found == live_.end() || found->second.stream == stream.id()) return;
    found->second.also.insert(stream.id());
  }
  c10::DeviceIndex owner(const void* ptr) {
    std::lock_guard lock(mutex_);
    auto after = live_.upper_bound(ptr);
    TORCH_CHECK(after != live_.begin(), "lag: no device memory at this address");
    const auto& block = std::prev(after)->second;
    const auto offset = static_cast<const char*>(ptr) - static_cast<const char*>(block.ptr);
    TORCH_CHECK(offset < static_cast<std::ptrdiff_t>(block.size), "lag: no device memory here");
    return block.device;
  }

  // Wait for the device, then forget which stream the cached blocks belonged to. The wait is what
  // makes that safe, and what makes an out-of-memory so costly.
  void trim(c10::DeviceIndex device) {
    drain(device);
    std::lock_guard lock(mutex_);
    reclaim();
    for (auto& [key, blocks] : cached_) {
      const auto& [owner, stream, size] = key;
      if (owner != device) continue;
      usage_[device].reserved -= static_cast<std::int64_t>(size * blocks.size());
      auto& spare = spare_[{device, size}];
      spare.insert(spare.end(), blocks.begin(), blocks.end());
      blocks.clear();
    }
  }

 private:
  static void release(void* ptr);
  void* take(std::size_t nbytes, c10::DeviceIndex device);
  void give_back(void* ptr);
  void reclaim();
  void cache(const Block& block);

  std::mutex mutex_;
  std::map<const void*, Block> live_;
  std::vector<Parked> parked_;
  std::map<std::tuple<c10::DeviceIndex, c10::StreamId, std::size_t>, std::vector<void*>> cached_;
  // Mapped once, and given back to the device: what its next allocations beyond the cache get.
  std::map<std::pair<c10::DeviceIndex, std::size_t>, std::vector<void*>> spare_;
  std::array<Usage, kDevices> usage_;
};

DeviceMemory& memory() {
  static auto* all = new DeviceMemory();
  return *all;
}

void DeviceMemory::release(void* ptr) {
  if (ptr && !forked()) memory().give_back(ptr);
}

void* DeviceMemory::take(std::size_t nbytes, c10::DeviceIndex device) {
  const std::size_t size = (nbytes + kRound - 1) / kRound * kRound;
  const auto stream = current_stream(device);
  auto& usage = usage_.at(device);
  std::unique_lock lock(mutex_);
  reclaim();

  void* ptr = nullptr;
  auto& own = cached_[{device, stream, size}];
  if (!own.empty()) {
    ptr = own.back();
    own.pop_back();
  } else {
    const auto fits = [&] { return usage.reserved + static_cast<std::int64_t>(size) <= usage.limit; };
    if (!fits()) {
      lock.unlock();
      ++counters(device).alloc_retries;
      trim(device);
      lock.lock();
    }
    if (!fits()) {
      ++counters(device).ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "lag: out of memory. Tried to allocate ", nbytes,
                       " bytes on device ", int(device), ", which has ", usage.limit,
                       " bytes of which ", usage.reserved, " are in use");
    }
    auto& spare = spare_[{device, size}];
    if (!spare.empty()) {
      ptr = spare.back();
      spare.pop_back();
    } else {
      ptr = std::aligned_alloc(kRound, size);
      TORCH_CHECK(ptr, "lag: the host has no memory left for ", size, " bytes of device memory");
    }
    usage.reserved += static_cast<std::int64_t>(size);
    usage.reserved_peak = std::max(usage.reserved_peak, usage.reserved);
  }

  live_[ptr] = Block{ptr, nbytes, size, device, stream, {}};
  ++usage.live_blocks;
  usage.allocated += static_cast<std::int64_t>(nbytes);
  usage.peak = std::max(usage.peak, usage.allocated);
  ++counters(device).allocations;
  return ptr;
}

void DeviceMemory::give_back(void* ptr) {
  std::lock_guard lock(mutex_);
  auto found = live_.find(ptr);
  if (found == live_.end()) return;
  Block block = std::move(found->second);
  live_.erase(found);
  auto& usage = usage_.at(block.device);
  --usage.live_blocks;
  usage.allocated -= static_cast<std::int64_t>(block.nbytes);
  ++counters(block.device).frees;

  if (block.also.empty()) return cache(block);
  Parked parked{block, {}};
  for (auto stream : block.also) {
    auto gate = std::make_shared<Gate>();
    worker(block.device, stream).push([gate] { gate->open(); });
    parked.passed.push_back(std::move(gate));
  }
  parked_.push_back(std::move(parked));
}

void DeviceMemory::cache(const Block& block) {
  worker(block.device, block.stream).push([ptr = block.ptr, size = block.size] {
    std::memset(ptr, kPoison, size);
  });
  cached_[{block.device, block.stream, block.size}].push_back(block.ptr);
}

void DeviceMemory::reclaim() {
  const auto all_passed = [](const Parked& parked) {
    return std::all_of(parked.passed.begin(), parked.passed.end(),
                       [](const auto& gate) { return gate->is_open(); });
  };
  auto ready = std::stable_partition(parked_.begin(), parked_.end(),
                                     [&](const Parked& parked) { return !all_passed(parked); });
  std::for_each(ready, parked_.end(), [this](const Parked& parked) { cache(parked.block); });
  parked_.erase(ready, parked_.end());
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex device) {
  const auto at = resolve(device);
  const auto usage = usage_of(at);
  const auto all = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocation[all].current = usage.live_blocks;
  stats.allocated_bytes[all].current = usage.allocated;
  stats.allocated_bytes[all].peak = usage.peak;
  stats.reserved_bytes[all].current = usage.reserved;
  stats.reserved_bytes[all].peak = usage.reserved_peak;
  stats.num_alloc_retries = counters(at).alloc_retries;
  stats.num_ooms = counters(at).ooms;
  return stats;
}

}  // namespace

c10::DeviceAllocator* device_allocator() { return &memory(); }

std::map<std::string, std::int64_t> device_memory_stats(c10::DeviceIndex device) {
  const auto usage = memory().usage_of(device);
  return {{"live_blocks", usage.live_blocks},     {"allocated_bytes", usage.allocated},
          {"peak_bytes", usage.peak},             {"reserved_bytes", usage.reserved},
          {"reserved_peak", usage.reserved_peak}, {"limit", usage.limit}};
}

void device_memory_reset_peak(c10::DeviceIndex device) { memory().reset_peak(device); }

void device_memory_set_limit(c10::DeviceIndex device, std::optional<std::int64_t> nbytes) {
  memory().set_limit(device, nbytes);
}

void device_memory_trim(c10::DeviceIndex device) { memory().trim(device); }

void device_memory_record_stream(const void* base, const c10::Stream& stream) {
  memory().record(base, stream);
}

c10::DeviceIndex device_memory_owner(const void* ptr) { return memory().owner(ptr); }

}  // namespace lag
