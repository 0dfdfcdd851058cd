// The operators that the test device has of its own. Fills and copies are late; making tensors and
// views touches no data; everything else runs on the CPU after a wait for the current stream.
#include "copies.h"
#include "counters.h"
#include "memory.h"
#include "operators.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>

namespace lag {

void resize_storage(c10::StorageImpl* storage, std::size_t nbytes) {
  const c10::DeviceGuard guard(storage->device());
  at::DataPtr fresh = device_allocator()->allocate(nbytes);
  const auto kept = std::min(nbytes, storage->nbytes());
  if (kept) copy_bytes_late(storage->device().index(), fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(nbytes);
}

namespace {

// ---- making tensors ------------------------------------------------------------------------

void check_factory(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "lag: only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "lag: only host memory can be pinned");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, device_allocator(), keys, c10::dtype_or_default(dtype),
                                   format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  check_factory(layout, pin_memory);
  const c10::DeviceGuard guard(c10::device_or_default(device));
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys,
                                           c10::dtype_or_default(dtype));
}

// ---- views and metadata --------------------------------------------------------------------

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<std::int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

at::Tensor unfold(const at::Tensor& self, std::int64_t dim, std::int64_t size, std::int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

void grow_to_fit(const at::Tensor& self) {
  const auto needed = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                       self.itemsize(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (self.numel() > 0 && needed > storage->nbytes()) resize_storage(storage, needed);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size,
                         std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    grow_to_fit(self);
  }
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage_at(at::Tensor& self, at::Storage storage, std::int64_t offset,
                           at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  grow_to_fit(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto numel = static_cast<std::int64_t>(storage.nbytes() / self.itemsize());
  return set_storage_at(self, std::move(storage), 0, {numel}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(),
                        source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return set_storage_at(self, std::move(none), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_memory_record_stream(self.storage().data(), stream);
}

// ---- all the rest --------------------------------------------------------------------------

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_not_forked();
  const FallbackScope scope(current_device());
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("fill_.Scalar", &fill_scalar);
  m.impl("zero_", &zero);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
}

// A copy's own function looks at these bits itself. Without the fallthrough torch would resolve
// them first, with a copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

}  // namespace
}  // namespace lag
