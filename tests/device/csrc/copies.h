// Copies, fills and the injection of copy failures.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace lag {

// torch's one entry for every copy that has a lag tensor on either side.
at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst);

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value);
at::Tensor& zero(at::Tensor& self);
// `item()`: a blocking copy of one element.
at::Scalar local_scalar_dense(const at::Tensor& self);

// Copy bytes on the device's current stream, for storages that grow.
void copy_bytes_late(c10::DeviceIndex device, void* dst, const void* src, std::size_t nbytes);

// Copies made while one of these lives belong to an operator that runs on the CPU, and are not
// what a test wants to see in its counters.
class FallbackScope {
 public:
  explicit FallbackScope(c10::DeviceIndex device);
  ~FallbackScope();

 private:
  bool outer_;
};

// Let the n-th next device-to-host copy fail (0: none): when it is issued, or, if `late`, when it
// runs on its stream.
void fail_d2h(std::int64_t nth, bool late);

}  // namespace lag
