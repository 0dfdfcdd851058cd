// What torch's device-neutral parts (torch.Stream, torch.Event, torch.accelerator, autograd) call.
#include "guard.h"

#include "counters.h"
#include "memory.h"
#include "operators.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <chrono>

namespace lag {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

Stream make_stream(DeviceIndex device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, Device(kType, device), id);
}

Worker& worker_of(const Stream& stream) { return worker(stream.device_index(), stream.id()); }

// One `record` of an event. Waits hold on to the record that was the latest when they were asked
// for, so recording the event again does not move them.
struct Record {
  explicit Record(DeviceIndex device) : device(device) {}
  const DeviceIndex device;
  Gate gate;
  std::chrono::steady_clock::time_point at;  // written before the gate opens, read after
};

struct Event {
  explicit Event(bool timing) : timing(timing) {}
  const bool timing;
  std::mutex mutex;
  std::shared_ptr<Record> latest;

  // Nothing: never recorded. Then queries say "ready" and waits do nothing, as in CUDA.
  static std::shared_ptr<Record> latest_of(void* event) {
    if (!event) return nullptr;
    auto* self = static_cast<Event*>(event);
    std::lock_guard lock(self->mutex);
    return self->latest;
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Device getDevice() const override { return {kType, current_device()}; }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    set_current_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    set_current_device(device.index());
    return before;
  }

  Stream getStream(Device device) const override {
    const auto index = resolve(device.index());
    return make_stream(index, current_stream(index));
  }
  Stream getDefaultStream(Device device) const override {
    return make_stream(resolve(device.index()), 0);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    const auto index = resolve(device.index());
    return make_stream(index, next_pool_stream(index));
  }
  Stream getNewStream(Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const Stream& stream) const override {
    const auto device = stream.device_index();
    ++counters(device).stream_queries;
    auto& asked = worker_of(stream);
    const bool done = asked.done_up_to(asked.mark());
    if (!done) note_not_ready();
    check_fault(device);
    return done;
  }
  void synchronizeStream(const Stream& stream) const override {
    ++counters(stream.device_index()).stream_syncs;
    host_wait(stream.device_index(), worker_of(stream));
  }
  void synchronizeDevice(DeviceIndex device) const override {
    const auto index = resolve(device);
    note_device_sync(index);
    drain(index);
    check_fault(index);
  }

  void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag flag) const override {
    check_not_forked();
    if (!*event) *event = new Event(flag == c10::EventFlag::BACKEND_DEFAULT);
    auto record = std::make_shared<Record>(stream.device_index());
    auto* self = static_cast<Event*>(*event);
    {
      std::lock_guard lock(self->mutex);
      self->latest = record;
    }
    worker_of(stream).push([record] {
      record->at = std::chrono::steady_clock::now();
      record->gate.open();
    });
  }
  void block(void* event, const Stream& stream) const override {
    const auto record = Event::latest_of(event);
    if (!record) return;
    // The gate lives inside the record: share the one, keep the other.
    worker_of(stream).push_wait(std::shared_ptr<const Gate>(record, &record->gate));
  }
  bool queryEvent(void* event) const override {
    const auto record = Event::latest_of(event);
    if (!record) return true;
    ++counters(record->device).event_queries;
    const bool done = record->gate.is_open();
    if (!done) note_not_ready();
    check_fault(record->device);
    return done;
  }
  void synchronizeEvent(void* event) const override {
    const auto record = Event::latest_of(event);
    if (!record) return;
    ++counters(record->device).event_syncs;
    host_wait(record->device, record->gate);
  }
  void destroyEvent(void* event, DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* start, void* end, DeviceIndex) const override {
    const auto from = Event::latest_of(start);
    const auto to = Event::latest_of(end);
    TORCH_CHECK(from && to, "lag: both events must be recorded first");
    const auto times = [](void* event) { return static_cast<Event*>(event)->timing; };
    TORCH_CHECK(times(start) && times(end), "lag: events were made without enable_timing");
    TORCH_CHECK(from->gate.is_open() && to->gate.is_open(), "lag: an event has not fired yet");
    return std::chrono::duration<double, std::milli>(to->at - from->at).count();
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    device_memory_record_stream(data.get(), stream);
  }
};

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);  // negative: stays
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return host_allocator(); }
  bool isPinnedPtr(const void* ptr) const override { return is_pinned(ptr); }
  Device getDeviceFromPtr(void* ptr) const override { return {kType, device_memory_owner(ptr)}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

void register_with_torch() {
  c10::SetAllocator(kType, device_allocator());
  at::setHostAllocator(kType, host_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());  // torch keeps it for ever
}

}  // namespace lag
