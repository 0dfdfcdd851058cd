// Every copy of the test device. The rules are those of torch's CUDA backend
// (aten/src/ATen/native/cuda/Copy.cu), since its surprises are what the tests are about:
//   - a copy over the link is direct only if the dtypes agree and both sides are dense in the same
//     order; otherwise it goes through temporaries, and a temporary on the host is pageable: it
//     blocks, whatever `non_blocking` says;
//   - a conjugated or negated source is fixed up on the host, right after the copy was *queued*.
#include "copies.h"

#include "counters.h"
#include "memory.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/TensorIterator.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <vector>

namespace lag {
namespace {

// The shape of a tensor's memory without the tensor: like a DMA engine or a kernel, queued work
// knows addresses and keeps nothing alive.
struct View {
  explicit View(const at::Tensor& t)
      : ptr(const_cast<void*>(t.const_data_ptr())),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        dtype(t.scalar_type()),
        conj(t.is_conj()),
        neg(t.is_neg()) {}

  at::Tensor on_host() const {
    const auto options = at::TensorOptions().dtype(dtype).device(at::kCPU);
    at::Tensor tensor = at::from_blob(ptr, sizes, strides, options);
    tensor._set_conj(conj);
    tensor._set_neg(neg);
    return tensor;
  }

  void* ptr;
  std::vector<std::int64_t> sizes, strides;
  at::ScalarType dtype;
  bool conj, neg;
};

thread_local bool in_fallback = false;

constexpr const char* kInjected = "lag: this copy was made to fail";

std::mutex injection_mutex;
std::int64_t failing_d2h = 0;  // counts down; 0: none
bool failing_late = false;

c10::Stream stream_of(c10::DeviceIndex device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), current_stream(device));
}

void count_link(c10::DeviceIndex device, bool to_host, bool async, std::int64_t nbytes) {
  if (in_fallback) return;
  auto& count = counters(device);
  auto& number = to_host ? (async ? count.d2h_async : count.d2h_blocking)
                         : (async ? count.h2d_async : count.h2d_blocking);
  auto& bytes = to_host ? (async ? count.d2h_async_bytes : count.d2h_blocking_bytes)
                        : (async ? count.h2d_async_bytes : count.h2d_blocking_bytes);
  ++number;
  bytes += nbytes;
}

// Whether this device-to-host copy was chosen to fail: throws now, or returns true for "when it runs".
bool inject_failure() {
  if (in_fallback) return false;
  std::lock_guard lock(injection_mutex);
  if (failing_d2h == 0 || --failing_d2h > 0) return false;
  TORCH_CHECK(failing_late, kInjected);
  return true;
}

// One dense run of bytes over the link, on the current stream of the device's side.
void copy_over_link(const at::TensorIterator& iter, bool non_blocking) {
  const auto& dst = iter.tensor(0);
  const auto& src = iter.tensor(1);
  const bool to_host = dst.is_cpu();
  const auto device = (to_host ? src : dst).device().index();
  const auto& host = to_host ? dst : src;
  const auto* host_ptr = iter.data_ptr(to_host ? 0 : 1);
  const auto nbytes = iter.numel() * iter.element_size(0);
  const bool async = non_blocking && is_pinned(host_ptr);

  const bool fails = to_host && inject_failure();
  count_link(device, to_host, async, nbytes);

  auto& stream = current_worker(device);
  stream.push([to = iter.data_ptr(0), from = iter.data_ptr(1), nbytes, fails,
               in_use = host_use(host_ptr)] {
    TORCH_CHECK(!fails, kInjected);
    std::memcpy(to, from, nbytes);
  });
  if (async) {
    host_memory_record(host_ptr, host.storage().data_ptr().get_context(), stream_of(device));
  } else {
    host_wait(device, stream);
  }
  // As in torch, this runs on the host at once, after a copy that may not have landed.
  if (dst.is_conj() != src.is_conj()) dst.conj_physical_();
  if (dst.is_neg() != src.is_neg()) dst.neg_();
}

// Casts happen on the device for a non-blocking copy, and on the CPU for a blocking one.
void copy_through_temporaries(const at::TensorIterator& iter, bool non_blocking) {
  const auto& dst = iter.tensor(0);
  const auto& src = iter.tensor(1);
  constexpr auto kDense = at::MemoryFormat::Contiguous;
  const bool cast_at_source = src.device().type() == (non_blocking ? kType : at::kCPU);
  const auto link_dtype = cast_at_source ? dst.scalar_type() : src.scalar_type();

  const bool dst_fits = dst.is_contiguous() && dst.scalar_type() == link_dtype;
  at::Tensor to = dst_fits ? dst : at::empty_like(dst, dst.options().dtype(link_dtype), kDense);
  at::Tensor from = src.to(link_dtype).expand_as(dst).contiguous();
  to._set_conj(dst.is_conj());
  to._set_neg(dst.is_neg());
  from._set_conj(src.is_conj());
  from._set_neg(src.is_neg());
  to.copy_(from, non_blocking);
  if (!dst_fits) dst.copy_(to, non_blocking);
}

// Within a device, or between two: any layout, any cast, always late. Between two devices both
// current streams wait for each other, before and after.
void copy_on_device(const at::Tensor& src, const at::Tensor& dst) {
  const auto from = src.device().index();
  const auto to = dst.device().index();
  auto& stream = current_worker(from);
  if (!in_fallback) {
    ++counters(from).d2d;
    counters(from).d2d_bytes += static_cast<std::int64_t>(dst.nbytes());
  }
  const auto wait_for = [](Worker& waiting, Worker& other) {
    auto gate = std::make_shared<Gate>();
    other.push([gate] { gate->open(); });
    waiting.push_wait(gate);
  };
  if (from != to) wait_for(stream, current_worker(to));
  stream.push([d = View(dst), s = View(src)] {
    at::AutoDispatchBelowADInplaceOrView below;
    d.on_host().copy_(s.on_host());
  });
  if (from != to) wait_for(current_worker(to), stream);
}

}  // namespace

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  check_not_forked();
  const auto device = (src.device().type() == kType ? src : dst).device().index();
  if (dst.numel() == 0) {
    if (!in_fallback) ++counters(device).empty_copies;
    return dst;
  }
  if (src.device().type() == dst.device().type()) {
    copy_on_device(src, dst);
    return dst;
  }
  // torch's own definition of "dense in the same order": dimensions merged and sorted.
  const auto iter = at::TensorIteratorConfig()
                        .add_output(dst)
                        .add_const_input(src)
                        .resize_outputs(false)
                        .check_all_same_dtype(false)
                        .check_all_same_device(false)
                        .build();
  if (iter.dtype(0) == iter.dtype(1) && iter.is_contiguous()) {
    copy_over_link(iter, non_blocking);
  } else {
    copy_through_temporaries(iter, non_blocking);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, /*non_blocking=*/false);
}

at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  check_not_forked();
  if (self.numel() == 0) return self;
  const auto device = self.device().index();
  ++counters(device).fills;
  current_worker(device).push([view = View(self), value] {
    at::AutoDispatchBelowADInplaceOrView below;
    view.on_host().fill_(value);
  });
  return self;
}

at::Tensor& zero(at::Tensor& self) { return fill_scalar(self, 0); }

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const auto device = self.device().index();
  if (inject_failure()) current_worker(device).push([] { TORCH_CHECK(false, kInjected); });
  count_link(device, /*to_host=*/true, /*async=*/false, static_cast<std::int64_t>(self.itemsize()));
  host_wait(device, current_worker(device));
  return View(self).on_host().item();
}

void copy_bytes_late(c10::DeviceIndex device, void* dst, const void* src, std::size_t nbytes) {
  current_worker(device).push([=] { std::memcpy(dst, src, nbytes); });
}

FallbackScope::FallbackScope(c10::DeviceIndex device) : outer_(in_fallback) {
  if (!outer_) ++counters(device).fallbacks;
  in_fallback = true;
}

FallbackScope::~FallbackScope() { in_fallback = outer_; }

void fail_d2h(std::int64_t nth, bool late) {
  std::lock_guard lock(injection_mutex);
  failing_d2h = nth;
  failing_late = late;
}

}  // namespace lag
