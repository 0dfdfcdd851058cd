// Pinned host memory, with the rules of torch's caching host allocator:
//   - sizes are rounded up to a power of two, and blocks are never split;
//   - a block remembers the streams that used it; when it is freed, an event is recorded on each,
//     and only when all of them have fired may the block be handed out again;
//   - memory registered by somebody else counts as pinned, but is nobody's block: no use of it is
//     remembered, so its owner has to keep it alive.
// As the CUDA driver does, pinned blocks are marked not to be inherited: a forked child that
// touches one dies.
#include "counters.h"
#include "memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <set>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>
#include <vector>

namespace lag {
namespace {

using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;

struct Block {
  std::size_t nbytes = 0;  // asked for
  std::size_t size = 0;    // rounded
  std::set<StreamKey> used;
};

struct Parked {
  void* ptr;
  std::size_t size;
  std::vector<std::shared_ptr<Gate>> passed;
};

struct Registered {
  std::size_t nbytes;
  std::shared_ptr<const void> token = std::make_shared<char>();
};

std::uintptr_t address(const void* ptr) { return reinterpret_cast<std::uintptr_t>(ptr); }

// The entry of an address-ordered map whose [start, start + nbytes) holds `at`, or end().
template <class Map, class Size>
auto containing(Map& map, std::uintptr_t at, Size size) {
  auto after = map.upper_bound(at);
  if (after == map.begin()) return map.end();
  auto found = std::prev(after);
  return at - found->first < size(found->second) ? found : map.end();
}

class HostMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(std::size_t nbytes) override {
    check_not_forked();
    void* ptr = nbytes ? take(nbytes) : nullptr;
    return {ptr, ptr, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, std::size_t nbytes) const override {
    default_copy_data(dest, src, nbytes);
  }
  bool record_event(void* ptr, void* context, c10::Stream stream) override {
    return record(ptr, context, stream);
  }
  void empty_cache() override {
    ++counters(current_device()).empty_cache;
    trim();
  }
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { reset_peak(); }

  bool record(const void* ptr, const void* context, const c10::Stream& stream);
  bool pinned(const void* ptr);
  void trim();
  std::map<std::string, std::int64_t> stats();
  void set_limit(std::optional<std::int64_t> nbytes);
  void reset_peak();
  void add_range(std::uintptr_t ptr, std::size_t nbytes);
  void remove_range(std::uintptr_t ptr);
  std::shared_ptr<const void> use(const void* ptr);

 private:
  static void release(void* ptr);
  void* take(std::size_t nbytes);
  void give_back(void* ptr);
  void reclaim();
  void check_limit(std::size_t more) const;

  std::mutex mutex_;
  std::map<std::uintptr_t, Block> live_;
  std::vector<Parked> parked_;
  std::map<std::size_t, std::vector<void*>> cached_;  // by size; counted as reserved
  std::map<std::size_t, std::vector<void*>> spare_;   // by size; given back to the "system"
  std::map<std::uintptr_t, std::size_t> mapped_;      // all that ever was pinned, with its size
  std::map<std::uintptr_t, Registered> registered_;
  std::int64_t asked_ = 0;
  std::int64_t reserved_ = 0;
  std::int64_t registered_bytes_ = 0;
  std::int64_t peak_ = 0;  // of reserved and registered together
  std::optional<std::int64_t> limit_;
};

HostMemory& memory() {
  static auto* all = new HostMemory();
  return *all;
}

void HostMemory::release(void* ptr) {
  if (ptr && !forked()) memory().give_back(ptr);
}

void HostMemory::check_limit(std::size_t more) const {
  const auto total = reserved_ + registered_bytes_ + static_cast<std::int64_t>(more);
  TORCH_CHECK(!limit_ || total <= *limit_, "lag: cannot pin ", more, " bytes: limit ", *limit_);
}

void* HostMemory::take(std::size_t nbytes) {
  const std::size_t size = std::bit_ceil(nbytes);
  std::lock_guard lock(mutex_);
  reclaim();
  void* ptr = nullptr;
  auto& cached = cached_[size];
  auto& spare = spare_[size];
  if (!cached.empty()) {
    ptr = cached.back();
    cached.pop_back();
  } else {
    check_limit(size);
    if (!spare.empty()) {
      ptr = spare.back();
      spare.pop_back();
    } else {
      ptr = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      TORCH_CHECK(ptr != MAP_FAILED, "lag: the host has no memory left for ", size, " bytes");
      madvise(ptr, size, MADV_DONTFORK);
      mapped_[address(ptr)] = size;
    }
    reserved_ += static_cast<std::int64_t>(size);
    peak_ = std::max(peak_, reserved_ + registered_bytes_);
  }
  asked_ += static_cast<std::int64_t>(nbytes);
  live_[address(ptr)] = Block{nbytes, size, {}};
  return ptr;
}

void HostMemory::give_back(void* ptr) {
  std::lock_guard lock(mutex_);
  auto found = live_.find(address(ptr));
  if (found == live_.end()) return;
  Block block = std::move(found->second);
  live_.erase(found);
  asked_ -= static_cast<std::int64_t>(block.nbytes);
  Parked parked{ptr, block.size, {}};
  for (const auto& [device, stream] : block.used) {
    auto gate = std::make_shared<Gate>();
    worker(device, stream).push([gate] { gate->open(); });
    parked.passed.push_back(std::move(gate));
  }
  parked_.push_back(std::move(parked));
  reclaim();
}

void HostMemory::reclaim() {
  const auto waiting = [](const Parked& parked) {
    return !std::all_of(parked.passed.begin(), parked.passed.end(),
                        [](const auto& gate) { return gate->is_open(); });
  };
  auto ready = std::stable_partition(parked_.begin(), parked_.end(), waiting);
  for (auto it = ready; it != parked_.end(); ++it) cached_[it->size].push_back(it->ptr);
  parked_.erase(ready, parked_.end());
}

void HostMemory::trim() {
  std::lock_guard lock(mutex_);
  reclaim();
  for (auto& [size, blocks] : cached_) {
    reserved_ -= static_cast<std::int64_t>(size * blocks.size());
    auto& spare = spare_[size];
    spare.insert(spare.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }
}

bool HostMemory::record(const void* ptr, const void* context, const c10::Stream& stream) {
  std::lock_guard lock(mutex_);
  auto found = live_.find(address(context));
  if (found == live_.end()) found = live_.find(address(ptr));
  if (found == live_.end()) return false;
  found->second.used.insert({stream.device_index(), stream.id()});
  return true;
}

bool HostMemory::pinned(const void* ptr) {
  if (!ptr) return false;
  std::lock_guard lock(mutex_);
  const auto at = address(ptr);
  return containing(mapped_, at, [](std::size_t size) { return size; }) != mapped_.end() ||
         containing(registered_, at, [](const Registered& r) { return r.nbytes; }) !=
             registered_.end();
}

std::map<std::string, std::int64_t> HostMemory::stats() {
  std::lock_guard lock(mutex_);
  reclaim();
  return {{"live_blocks", static_cast<std::int64_t>(live_.size())},
          {"pinned_bytes", asked_},
          {"reserved_bytes", reserved_},
          {"registered_bytes", registered_bytes_},
          {"peak_bytes", peak_},
          {"parked_blocks", static_cast<std::int64_t>(parked_.size())}};
}

at::HostStats HostMemory::get_stats() {
  const auto now = stats();
  at::HostStats result;
  result.active_requests.current = now.at("live_blocks");
  result.active_bytes.current = now.at("pinned_bytes");
  result.allocated_bytes.current = now.at("reserved_bytes");
  return result;
}

void HostMemory::set_limit(std::optional<std::int64_t> nbytes) {
  std::lock_guard lock(mutex_);
  limit_ = nbytes;
}

void HostMemory::reset_peak() {
  std::lock_guard lock(mutex_);
  peak_ = reserved_ + registered_bytes_;
}

void HostMemory::add_range(std::uintptr_t ptr, std::size_t nbytes) {
  // The driver works by page: two ranges that share one overlap.
  const auto page = static_cast<std::uintptr_t>(getpagesize());
  const auto first = ptr / page, last = (ptr + nbytes - 1) / page;
  std::lock_guard lock(mutex_);
  TORCH_CHECK(nbytes > 0, "lag: nothing to register");
  for (const auto& [start, range] : registered_) {
    const bool apart = last < start / page || (start + range.nbytes - 1) / page < first;
    TORCH_CHECK(apart, "lag: part of this memory is already registered");
  }
  check_limit(nbytes);
  registered_[ptr] = Registered{nbytes};
  registered_bytes_ += static_cast<std::int64_t>(nbytes);
  peak_ = std::max(peak_, reserved_ + registered_bytes_);
}

void HostMemory::remove_range(std::uintptr_t ptr) {
  bool busy = false;
  {
    std::lock_guard lock(mutex_);
    auto found = registered_.find(ptr);
    TORCH_CHECK(found != registered_.end(), "lag: this memory is not registered");
    busy = found->second.token.use_count() > 1;
    registered_bytes_ -= static_cast<std::int64_t>(found->second.nbytes);
    registered_.erase(found);
  }
  if (!busy) return;
  ++counters(current_device()).busy_unregisters;
  // The driver lets copies that use the memory finish first.
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) drain(device);
}

std::shared_ptr<const void> HostMemory::use(const void* ptr) {
  std::lock_guard lock(mutex_);
  auto found = containing(registered_, address(ptr), [](const Registered& r) { return r.nbytes; });
  return found == registered_.end() ? nullptr : found->second.token;
}

}  // namespace

at::HostAllocator* host_allocator() { return &memory(); }

bool is_pinned(const void* ptr) { return !forked() && memory().pinned(ptr); }

void host_memory_record(const void* ptr, const void* context, const c10::Stream& stream) {
  memory().record(ptr, context, stream);
}

std::map<std::string, std::int64_t> host_memory_stats() { return memory().stats(); }

void host_memory_set_limit(std::optional<std::int64_t> nbytes) { memory().set_limit(nbytes); }

void host_memory_trim() { memory().trim(); }

void host_memory_reset_peak() { memory().reset_peak(); }

void host_register(std::uintptr_t ptr, std::size_t nbytes) {
  check_not_forked();
  memory().add_range(ptr, nbytes);
}

void host_unregister(std::uintptr_t ptr) {
  check_not_forked();
  memory().remove_range(ptr);
}

std::shared_ptr<const void> host_use(const void* ptr) { return memory().use(ptr); }

}  // namespace lag
