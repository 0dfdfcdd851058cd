// Streams, latches and host waits of the test device: everything that has to do with *when*.
//
// Guarantees
//   - Work pushed to one stream runs in order, one piece at a time, on that stream's own thread.
//   - A piece that runs sees all that happened before it was pushed, and all that happened before
//     the gates it waited for were opened.
//   - Host waits never hold the interpreter lock, so any Python thread may open the latch that a
//     blocked call is waiting for.
// Assumptions
//   - Work never takes the interpreter lock and never takes the locks of the memory files, so
//     pushing while holding one of those is safe.
//   - Nothing here is ever destroyed: stream threads may outlive `main` (see `runtime.cpp`, exit).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

namespace lag {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kDevices = 2;
// As in CUDA: a "new" stream comes from a pool of 32 and may be one that is in use.
constexpr c10::StreamId kPoolStreams = 32;

// Opens once and stays open.
class Gate {
 public:
  void open();
  bool is_open() const;
  void wait() const;

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable opened_;
  bool open_ = false;
};

// One stream: a queue and the thread that works through it.
class Worker {
 public:
  explicit Worker(c10::DeviceIndex device);

  void push(std::function<void()> work);
  // What is pushed after this runs only once `gate` is open.
  void push_wait(std::shared_ptr<const Gate> gate);

  // How much has been pushed so far; `done_up_to(mark())` is what a stream's `query` means.
  std::uint64_t mark() const;
  bool done_up_to(std::uint64_t mark) const;
  void wait_for(std::uint64_t mark) const;

 private:
  struct Item {
    std::shared_ptr<const Gate> gate;
    std::function<void()> work;
  };
  void run();
  void enqueue(Item item);

  const c10::DeviceIndex device_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Item> items_;
  std::uint64_t pushed_ = 0;
  std::uint64_t done_ = 0;
};

// ---- the calling thread's view -------------------------------------------------------------

c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
// -1 means the current device, as everywhere in torch.
c10::DeviceIndex resolve(c10::DeviceIndex device);

c10::StreamId current_stream(c10::DeviceIndex device);
void set_current_stream(c10::DeviceIndex device, c10::StreamId id);
c10::StreamId next_pool_stream(c10::DeviceIndex device);

Worker& worker(c10::DeviceIndex device, c10::StreamId id);
Worker& current_worker(c10::DeviceIndex device);

// ---- host waits ----------------------------------------------------------------------------

// Block the calling thread, without the interpreter lock, until the work is done or the gate is
// open. A wait that finds nothing to wait for is not counted as one.
void host_wait(c10::DeviceIndex device, const Worker& stream);
void host_wait(c10::DeviceIndex device, const Gate& gate);
// The host asked whether something is ready and was told "not yet".
void note_not_ready();

// Wait for every stream of the device, without counting it as a call of the program under test.
void drain(c10::DeviceIndex device);

// ---- latches -------------------------------------------------------------------------------

std::int64_t latch_hold(c10::DeviceIndex device, c10::StreamId stream);
void latch_open(std::int64_t latch);
bool latch_is_open(std::int64_t latch);
int latch_open_all();
// Open the latch by itself as soon as a host thread blocks on the device, or once `queries`
// queries have been answered "not yet": for calls that must wait, without any sleep.
void latch_open_on_wait(std::int64_t latch, std::int64_t queries);

// ---- failures ------------------------------------------------------------------------------

// Work that fails on its stream breaks the device, as in CUDA: the host learns of it at the next
// query or wait, and goes on learning of it until the fault is cleared.
void set_fault(c10::DeviceIndex device, const std::string& what);
void check_fault(c10::DeviceIndex device);
void clear_faults();

// In a forked child there are no stream threads and locks may be held for ever. Calls that would
// need them throw (`check_not_forked`); releasing memory does nothing.
bool forked();
void check_not_forked();

}  // namespace lag
