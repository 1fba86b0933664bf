// Kernel calls: registered launches, the description of a call, memory, and the launch. Part of eager.cpp.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Tables = std::array<const Tensor *, 4>;  // of the inference form: left, 1/d, slopes, offsets

// What Python registers.

enum What : int64_t {
  kForward,
  kLookup,
  kObserve,
  kBackward,
  kBackwardInput,
  kNormForward,
  kNormAddForward,
  kNormObserve,
  kNormAddObserve,
  kNormBackward,
  kNormAddBackward,
  kNormInput,
  kNormAddInput,
  kBatchNorm,
  kRunningNorm,
  kDynamicForward,
  kDynamicBackward,
  kDynamicInput,
};

constexpr size_t kAddresses = 34, kNumbers = 104;  // struct Arguments of element.cuh, and indices of its addresses
constexpr size_t kX = 0, kGrad = 1, kOut = 2, kPartial = 13, kPool = 14, kResidual = 15, kNorm = 16, kSums = 17, kNetwork = 18,
                 kPair = 33;

struct Launch {
  void *function;
  unsigned blocks[3], threads, shared;
  unsigned char numbers[kNumbers];
};

struct Plan {
  std::vector<Launch> launches;  // one after another
  int64_t splits;  // the number of partial results of the first
};

// operation, device, dtype of x, dtype of the parameters, intervals, (outer, channels, inner), aligned to 16 bytes, and zeros; for
// dynamic units, see dynamic_key_of
using Key = std::array<int64_t, 14>;

using LaunchKernel = int (*)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                             void **);

struct CpuKernel {  // the functions of cpu.c
  void *parallel;
  int (*forward)(void *, unsigned, int, const void *, void *, int64_t, int64_t, int64_t, int64_t, const void *, const void *,
                 const void *, const void *, const void *);
  int (*lookup)(void *, unsigned, int, const void *, void *, int64_t, int64_t, int64_t, int64_t, const void *, const void *,
                const void *, const void *);
  int (*backward)(void *, unsigned, int, const void *, const void *, void *, int64_t, int64_t, int64_t, int64_t, const void *,
                  const void *, const void *, const void *, const void *, void *, void *, void *, void *, void *);
  int (*moments)(void *, unsigned, int, const void *, int64_t, int64_t, int64_t, void *);
  int (*normalization)(void *, unsigned, int, const void *, int64_t, int64_t, int64_t, const void *, const void *, const void *,
                       const void *, const void *, double, double, const void *, void *);
  int (*norm_forward)(void *, unsigned, int, const void *, const void *, void *, int64_t, int64_t, int64_t, const void *,
                      int64_t, const void *, const void *);
  int (*norm_backward)(void *, unsigned, int, const void *, const void *, const void *, void *, int64_t, int64_t, int64_t,
                       const void *, void *, int64_t, const void *, void *);
  int (*norm_input)(void *, unsigned, int, const void *, const void *, void *, int64_t, int64_t, int64_t, const void *,
                    const void *, double, int, int64_t, const void *);
};

std::shared_mutex learning;
std::map<Key, std::shared_ptr<const Plan>> plans;
LaunchKernel launch_kernel = nullptr;
CpuKernel cpu_kernel{};

// The description of a call.

#ifdef PWLU_PRETEND_GPU  // for a test without a GPU: launches with CPU tensors go to a function of the test
bool on_gpu(const Tensor &) { return true; }
int64_t index_of(const Tensor &) { return 0; }
void *stream_of(const Tensor &) { return nullptr; }
#else
bool on_gpu(const Tensor &x) { return x.is_cuda(); }
int64_t index_of(const Tensor &x) { return x.get_device(); }
void *stream_of(const Tensor &x) { return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle(); }
#endif

struct Problem {
  at::ScalarType dtype, kind;  // of x and of the parameters
  int64_t outer, channels, inner, intervals;

  Key key(What what, const Tensor &x, bool aligned) const {
    return {what, index_of(x), int64_t(dtype), int64_t(kind), intervals, outer, channels, inner, aligned};
  }
};

at::ScalarType computed_in(const Tensor &x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

const void *address(const MaybeTensor &tensor) { return tensor ? tensor->const_data_ptr() : nullptr; }

const void *pair(double factor, double eps) {
  const float both[2] = {float(factor), float(eps)};
  const void *packed;
  static_assert(sizeof packed == sizeof both);
  std::memcpy(&packed, both, sizeof both);
  return packed;
}

// Return whether kernels can use a tensor without a copy: it has this size and dtype and is on the device of x, or is missing.
bool fits(const MaybeTensor &tensor, const Tensor &x, at::IntArrayRef sizes, at::ScalarType dtype) {
  return !tensor || (tensor->sizes() == sizes && tensor->scalar_type() == dtype && tensor->device() == x.device() &&
                     tensor->is_contiguous() && tensor->const_data_ptr());
}

bool is_like(const Tensor &tensor, const Tensor &x) {
  return tensor.sizes() == x.sizes() && tensor.strides() == x.strides() && tensor.device() == x.device() &&
         tensor.scalar_type() == x.scalar_type() && tensor.const_data_ptr();
}

// Increment the version counters. Do not call this for running statistics: see layout.note_changes.
void changed(std::initializer_list<const MaybeTensor *> tensors) {
  for (const auto *each : tensors)
    if (*each && !(*each)->is_inference()) (*each)->unsafeGetTensorImpl()->bump_version();
}

// Describe a call; return nullopt unless a kernel can surely use these tensors without a copy. `parameters` is one of the
// parameter tensors, which all have the same dtype.
std::optional<Problem> problem_of(const Tensor &x, const Tensor &parameters, int64_t channels, int64_t intervals,
                                  int64_t channel_dim) {
  if (channels < 1 || intervals < 1 || !x.numel() || parameters.device() != x.device()) return std::nullopt;
  int64_t inner = x.numel();
  if (channels > 1) {
    if (channel_dim < -x.dim() || channel_dim >= x.dim()) return std::nullopt;
    const int64_t dim = channel_dim < 0 ? channel_dim + x.dim() : channel_dim;
    if (x.size(dim) != channels) return std::nullopt;
    inner = x.stride(dim);
  }
  if (!x.const_data_ptr() || !x.is_non_overlapping_and_dense()) return std::nullopt;
  const auto dtype = x.scalar_type(), kind = parameters.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf && dtype != at::kDouble) return std::nullopt;
  if (!on_gpu(x) && kind != computed_in(x)) return std::nullopt;
  return Problem{dtype, kind, x.numel() / (channels * inner), channels, inner, intervals};
}

std::optional<Problem> problem_of(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim) {
  if (intervals < 1 || weight.dim() != 1 || weight.numel() % (intervals + 5)) return std::nullopt;
  if (!weight.is_contiguous() || !weight.const_data_ptr()) return std::nullopt;
  return problem_of(x, weight, weight.numel() / (intervals + 5), intervals, channel_dim);
}

std::optional<Problem> problem_of(const Tensor &x, const Tables &tables, int64_t channel_dim) {
  const Tensor &one = *tables[0], &wide = *tables[2];
  if (one.dim() != 1 || wide.dim() != 2) return std::nullopt;
  for (size_t i = 0; i < 4; ++i) {
    const Tensor &table = *tables[i];
    if (table.sizes() != (i < 2 ? one : wide).sizes() || table.device() != one.device()) return std::nullopt;
    if (table.scalar_type() != one.scalar_type() || !table.is_contiguous() || !table.const_data_ptr()) return std::nullopt;
  }
  if (one.size(0) != wide.size(0)) return std::nullopt;
  return problem_of(x, one, one.size(0), wide.size(1) - 2, channel_dim);
}

struct Arguments {
  const void *addresses[kAddresses] = {};
  unsigned char numbers[kNumbers];

  Arguments() = default;
  Arguments(const Tensor &x, const Tensor *grad, const Tensor &target) {
    addresses[kX] = x.const_data_ptr();
    addresses[kGrad] = grad ? grad->const_data_ptr() : nullptr;
    addresses[kOut] = target.mutable_data_ptr();
  }

  // Set the addresses of left, right, heights, left_slope and right_slope of a packed weight, or of its gradient if `at` is 8.
  void set_blocks(size_t at, const void *memory, int64_t channels, at::ScalarType kind) {
    const auto *base = static_cast<const char *>(memory);
    const auto bytes = channels * int64_t(c10::elementSize(kind));
    constexpr int64_t kPlaces[] = {0, 1, 4, 2, 3};
    for (size_t i = 0; i < 5; ++i) addresses[at + i] = base + kPlaces[i] * bytes;
  }

  bool aligned() const {
    uintptr_t all = 0;
    for (const size_t i : {kX, kGrad, kOut, kResidual}) all |= uintptr_t(addresses[i]);
    return !(all & 15);
  }
  void *to(size_t i) const { return const_cast<void *>(addresses[i]); }
};

// CUDA.

std::shared_ptr<const Plan> plan_of(const Key &key) {
  std::shared_lock lock(learning);
  const auto found = plans.find(key);
  return found == plans.end() ? nullptr : found->second;
}

bool launch(const Launch &plan, Arguments &arguments, const Tensor &x) {
  std::memcpy(arguments.numbers, plan.numbers, kNumbers);
  void *packed = &arguments;
  const unsigned *blocks = plan.blocks;
  return !launch_kernel(plan.function, blocks[0], blocks[1], blocks[2], plan.threads, 1, 1, plan.shared, stream_of(x), &packed,
                        nullptr);
}

// Launch kernels one after another. If there are several, the first writes partial results: `sums` floats per split.
bool launch(const Plan &plan, Arguments &arguments, const Tensor &x, int64_t sums) {
  const c10::DeviceGuard guard(x.device());
  Tensor partial;
  if (sums && plan.launches.size() > 1) partial = at::empty({plan.splits * sums}, x.options().dtype(at::kFloat));
  arguments.addresses[kPartial] = partial.defined() ? partial.mutable_data_ptr() : nullptr;
  return std::all_of(plan.launches.begin(), plan.launches.end(), [&](const auto &each) { return launch(each, arguments, x); });
}

// Launch the kernels of a call. Return whether Python has registered them, and they could be launched.
bool launch(What what, const Problem &p, Arguments &arguments, const Tensor &x, int64_t sums) {
  const auto plan = plan_of(p.key(what, x, arguments.aligned()));
  return plan && launch(*plan, arguments, x, sums);
}

// CPU.

int code_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0 : dtype == at::kDouble ? 1 : dtype == at::kBFloat16 ? 2 : 3;
}

CpuKernel on_cpu() {
  std::shared_lock lock(learning);
  return cpu_kernel;
}

// Call a function of cpu.c, with the arguments that all of them start with. Return whether it succeeded.
template <class Function, class... Rest>
bool call(Function CpuKernel::*function, const Problem &p, Rest... rest) {
  const CpuKernel k = on_cpu();
  return k.parallel && !(k.*function)(k.parallel, at::get_num_threads(), code_of(p.dtype), rest...);
}

// The kernels. They return nullopt if Python has to handle the call.

// Return y; to observe, also add the moments of x to the pool. `arguments` holds the parameters and the pool.
std::optional<Tensor> run_map(What what, const Tensor &x, const Problem &p, Arguments &arguments, const Tensor &y) {
  if (on_gpu(x)) return launch(what, p, arguments, x, 3 * p.channels) ? std::optional(y) : std::nullopt;
  const void *const *a = arguments.addresses;
  void *out = arguments.to(2);
  const bool done =
      what == kLookup
          ? call(&CpuKernel::lookup, p, a[0], out, p.outer, p.channels, p.inner, p.intervals, a[3], a[4], a[5], a[6])
          : call(&CpuKernel::forward, p, a[0], out, p.outer, p.channels, p.inner, p.intervals, a[3], a[4], a[5], a[6], a[7]);
  if (!done) return std::nullopt;
  if (what == kObserve && !call(&CpuKernel::moments, p, a[0], p.outer, p.channels, p.inner, arguments.to(kPool)))
    return std::nullopt;
  return y;
}

std::optional<Tensor> run_forward(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim,
                                  const MaybeTensor &pool = std::nullopt) {
  const auto p = problem_of(x, weight, intervals, channel_dim);
  if (!p || !fits(pool, x, {3, p->channels}, computed_in(x))) return std::nullopt;
  const Tensor y = at::empty_like(x);  // has the strides of x, because x is dense
  Arguments arguments(x, nullptr, y);
  arguments.set_blocks(3, weight.const_data_ptr(), p->channels, p->kind);
  if (pool) arguments.addresses[kPool] = pool->mutable_data_ptr();
  const auto found = run_map(pool ? kObserve : kForward, x, *p, arguments, y);
  if (found) changed({&pool});
  return found;
}

std::optional<Tensor> run_lookup(const Tensor &x, const Tables &tables, int64_t channel_dim) {
  const auto p = problem_of(x, tables, channel_dim);
  if (!p) return std::nullopt;
  const Tensor y = at::empty_like(x);
  Arguments arguments(x, nullptr, y);
  for (size_t i = 0; i < 4; ++i) arguments.addresses[3 + i] = tables[i]->const_data_ptr();
  return run_map(kLookup, x, *p, arguments, y);
}

// Return the gradients of x and of the weight; an empty tensor for a gradient that is not needed.
std::optional<std::tuple<Tensor, Tensor>> run_backward(const Tensor &grad, const Tensor &x, const Tensor &weight,
                                                       int64_t intervals, int64_t channel_dim, bool need_input,
                                                       bool need_weight) {
  const auto p = problem_of(x, weight, intervals, channel_dim);
  if (!p || !is_like(grad, x)) return std::nullopt;
  const auto none = [](const Tensor &like) { return at::empty({0}, like.options()); };
  const Tensor grad_x = need_input || on_gpu(x) ? at::empty_like(x) : none(x);  // GPU kernels always write it
  const Tensor grad_weight = need_weight ? at::empty_like(weight) : none(weight);
  Arguments arguments(x, &grad, grad_x);
  arguments.set_blocks(3, weight.const_data_ptr(), p->channels, p->kind);
  if (need_weight) arguments.set_blocks(8, grad_weight.mutable_data_ptr(), p->channels, p->kind);
  if (on_gpu(x)) {
    const What what = need_weight ? kBackward : kBackwardInput;
    if (!launch(what, *p, arguments, x, 2 * (p->intervals + 3) * p->channels)) return std::nullopt;
    return std::tuple(need_input ? grad_x : none(x), grad_weight);
  }
  const void *const *a = arguments.addresses;
  if (!call(&CpuKernel::backward, *p, a[1], a[0], arguments.to(2), p->outer, p->channels, p->inner, p->intervals, a[3], a[4],
            a[5], a[6], a[7], arguments.to(8), arguments.to(9), arguments.to(10), arguments.to(11), arguments.to(12)))
    return std::nullopt;
  return std::tuple(grad_x, grad_weight);
}

}  // namespace
