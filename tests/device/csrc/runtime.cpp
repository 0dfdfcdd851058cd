#include "runtime.h"

#include "counters.h"
#include "gil.h"

#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <map>
#include <pthread.h>
#include <shared_mutex>
#include <thread>
#include <vector>

namespace lag {
namespace {

// ---- exit and fork -------------------------------------------------------------------------

// Running work holds this shared; exit takes it and keeps it. It is leaked, since stream threads
// look at it until the process is gone.
std::shared_mutex& running() {
  static auto* mutex = new std::shared_mutex();
  return *mutex;
}

// Work calls torch's operators, whose tables are destroyed at exit. This object is younger than
// those tables, so it goes first: it waits for the work that is running now and lets none start.
// Streams held by a latch stay where they are; the end of the process takes them along.
struct StopAtExit {
  ~StopAtExit() {
    // A forked child has no stream threads, but may have inherited the lock as one of them held it.
    if (!forked()) running().lock();
  }
} stop_at_exit;

std::atomic<bool> in_child{false};
[[maybe_unused]] const int fork_hook = pthread_atfork(nullptr, nullptr, [] { in_child = true; });

// ---- tables --------------------------------------------------------------------------------

struct DeviceState {
  std::mutex mutex;
  std::array<std::atomic<Worker*>, kPoolStreams + 1> workers{};
  std::atomic<std::uint64_t> drawn{0};
  std::string fault;                 // guarded by `mutex`
  std::atomic<bool> faulty{false};  // the same, without the lock
};

DeviceState& state(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "lag: invalid device index ", int(device));
  static auto* states = new std::array<DeviceState, kDevices>();
  return (*states)[device];
}

thread_local c10::DeviceIndex thread_device = 0;
thread_local std::array<c10::StreamId, kDevices> thread_streams{};

struct Latches {
  struct Armed {
    std::shared_ptr<Gate> gate;
    std::int64_t queries;
  };
  std::mutex mutex;
  std::map<std::int64_t, std::shared_ptr<Gate>> gates;
  std::int64_t next = 0;
  std::vector<Armed> armed;
  std::atomic<bool> any_armed{false};  // spares every query the lock
};

Latches& latches() {
  static auto* all = new Latches();
  return *all;
}

std::shared_ptr<Gate> latch_gate(std::int64_t latch) {
  auto& all = latches();
  std::lock_guard lock(all.mutex);
  auto found = all.gates.find(latch);
  TORCH_CHECK(found != all.gates.end(), "lag: no latch ", latch);
  return found->second;
}

void note_host_blocks() {
  auto& all = latches();
  if (!all.any_armed) return;
  std::lock_guard lock(all.mutex);
  for (auto& armed : all.armed) armed.gate->open();
  all.armed.clear();
  all.any_armed = false;
}

template <class Ready, class Wait>
void wait_on_host(c10::DeviceIndex device, Ready ready, Wait wait) {
  check_not_forked();
  if (!ready()) {
    ++counters(device).host_waits;
    WithoutGil without_gil;
    note_host_blocks();
    wait();
  }
  check_fault(device);
}

}  // namespace

// ---- Gate ----------------------------------------------------------------------------------

void Gate::open() {
  {
    std::lock_guard lock(mutex_);
    open_ = true;
  }
  opened_.notify_all();
}

bool Gate::is_open() const {
  std::lock_guard lock(mutex_);
  return open_;
}

void Gate::wait() const {
  std::unique_lock lock(mutex_);
  opened_.wait(lock, [this] { return open_; });
}

// ---- Worker --------------------------------------------------------------------------------

Worker::Worker(c10::DeviceIndex device) : device_(device) {
  std::thread([this] { run(); }).detach();
}

void Worker::enqueue(Item item) {
  {
    std::lock_guard lock(mutex_);
    items_.push_back(std::move(item));
    ++pushed_;
  }
  changed_.notify_all();
}

void Worker::push(std::function<void()> work) { enqueue({nullptr, std::move(work)}); }

void Worker::push_wait(std::shared_ptr<const Gate> gate) { enqueue({std::move(gate), nullptr}); }

std::uint64_t Worker::mark() const {
  std::lock_guard lock(mutex_);
  return pushed_;
}

bool Worker::done_up_to(std::uint64_t mark) const {
  std::lock_guard lock(mutex_);
  return done_ >= mark;
}

void Worker::wait_for(std::uint64_t mark) const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= mark; });
}

void Worker::run() {
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return !items_.empty(); });
      item = std::move(items_.front());
      items_.pop_front();
    }
    if (item.gate) {
      item.gate->wait();
    } else {
      std::shared_lock until_exit(running());
      try {
        item.work();
      } catch (const std::exception& error) {
        set_fault(device_, error.what());
      }
      // What the work holds (tokens, tensors) goes before the host may see it as done.
      item.work = nullptr;
    }
    {
      std::lock_guard lock(mutex_);
      ++done_;
    }
    changed_.notify_all();
  }
}

// ---- the calling thread's view ---------------------------------------------------------------

c10::DeviceIndex current_device() { return thread_device; }

void set_current_device(c10::DeviceIndex device) {
  if (device < 0) return;
  TORCH_CHECK(device < kDevices, "lag: invalid device index ", int(device));
  thread_device = device;
}

c10::DeviceIndex resolve(c10::DeviceIndex device) { return device < 0 ? thread_device : device; }

c10::StreamId current_stream(c10::DeviceIndex device) { return thread_streams.at(device); }

void set_current_stream(c10::DeviceIndex device, c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id <= kPoolStreams, "lag: invalid stream id ", id);
  thread_streams.at(device) = id;
}

c10::StreamId next_pool_stream(c10::DeviceIndex device) {
  return static_cast<c10::StreamId>(state(device).drawn++ % kPoolStreams) + 1;
}

Worker& worker(c10::DeviceIndex device, c10::StreamId id) {
  auto& here = state(device);
  auto& slot = here.workers.at(static_cast<size_t>(id));
  if (Worker* found = slot) return *found;
  std::lock_guard lock(here.mutex);
  if (!slot) slot = new Worker(device);  // leaked: its thread never ends
  return *slot;
}

Worker& current_worker(c10::DeviceIndex device) { return worker(device, current_stream(device)); }

// ---- host waits ----------------------------------------------------------------------------

void host_wait(c10::DeviceIndex device, const Worker& stream) {
  const auto mark = stream.mark();
  wait_on_host(device, [&] { return stream.done_up_to(mark); }, [&] { stream.wait_for(mark); });
}

void host_wait(c10::DeviceIndex device, const Gate& gate) {
  wait_on_host(device, [&] { return gate.is_open(); }, [&] { gate.wait(); });
}

void note_not_ready() {
  auto& all = latches();
  if (!all.any_armed) return;
  std::lock_guard lock(all.mutex);
  std::vector<Latches::Armed> left;
  for (auto& armed : all.armed) {
    if (--armed.queries <= 0) {
      armed.gate->open();
    } else {
      left.push_back(std::move(armed));
    }
  }
  all.armed = std::move(left);
  all.any_armed = !all.armed.empty();
}

void drain(c10::DeviceIndex device) {
  check_not_forked();
  WithoutGil without_gil;
  for (auto& slot : state(device).workers) {
    Worker* stream = slot;
    if (!stream) continue;
    const auto mark = stream->mark();
    if (!stream->done_up_to(mark)) note_host_blocks();
    stream->wait_for(mark);
  }
}

// ---- latches -------------------------------------------------------------------------------

std::int64_t latch_hold(c10::DeviceIndex device, c10::StreamId stream) {
  check_not_forked();
  auto gate = std::make_shared<Gate>();
  worker(device, stream).push_wait(gate);
  auto& all = latches();
  std::lock_guard lock(all.mutex);
  all.gates[all.next] = gate;
  return all.next++;
}

void latch_open(std::int64_t latch) { latch_gate(latch)->open(); }

bool latch_is_open(std::int64_t latch) { return latch_gate(latch)->is_open(); }

int latch_open_all() {
  auto& all = latches();
  std::lock_guard lock(all.mutex);
  int were_closed = 0;
  for (auto& [latch, gate] : all.gates) {
    were_closed += !gate->is_open();
    gate->open();
  }
  all.armed.clear();
  all.any_armed = false;
  return were_closed;
}

void latch_open_on_wait(std::int64_t latch, std::int64_t queries) {
  auto gate = latch_gate(latch);
  auto& all = latches();
  std::lock_guard lock(all.mutex);
  all.armed.push_back({std::move(gate), queries});
  all.any_armed = true;
}

// ---- failures ------------------------------------------------------------------------------

void set_fault(c10::DeviceIndex device, const std::string& what) {
  auto& here = state(device);
  std::lock_guard lock(here.mutex);
  if (here.fault.empty()) here.fault = what.substr(0, what.find('\n'));
  here.faulty = true;
}

void check_fault(c10::DeviceIndex device) {
  auto& here = state(device);
  if (!here.faulty) return;
  std::lock_guard lock(here.mutex);
  // The type that CUDA's failures have, and no code of its own to tell them apart by.
  const std::string what = c10::str("lag: work failed on device ", int(device), ": ", here.fault);
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, /*error_code=*/-1, what);
}

void clear_faults() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    auto& here = state(device);
    std::lock_guard lock(here.mutex);
    here.fault.clear();
    here.faulty = false;
  }
}

bool forked() { return in_child; }

void check_not_forked() {
  TORCH_CHECK(!in_child, "lag: the device cannot be used in a forked child process");
}

}  // namespace lag
