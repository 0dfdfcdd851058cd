#include "counters.h"

#include <c10/util/Exception.h>

#include <array>

namespace lag {
namespace {
std::atomic<bool> device_sync_forbidden{false};
}

Counters& counters(c10::DeviceIndex device) {
  static auto* all = new std::array<Counters, kDevices>();
  return all->at(device);
}

std::map<std::string, std::int64_t> counters_snapshot(c10::DeviceIndex device) {
  auto& here = counters(device);
  std::map<std::string, std::int64_t> values;
#define LAG_READ(name) values[#name] = here.name;
  LAG_COUNTERS(LAG_READ)
#undef LAG_READ
  return values;
}

void counters_reset() {
  for (c10::DeviceIndex device = 0; device < kDevices; ++device) {
    auto& here = counters(device);
#define LAG_ZERO(name) here.name = 0;
    LAG_COUNTERS(LAG_ZERO)
#undef LAG_ZERO
  }
}

void forbid_device_sync(bool forbidden) { device_sync_forbidden = forbidden; }

void note_device_sync(c10::DeviceIndex device) {
  ++counters(device).device_syncs;
  TORCH_CHECK(!device_sync_forbidden, "lag: a device-wide synchronise was forbidden by the test");
}

}  // namespace lag
