// Kernels called from C++: what was learned about them, a call as they see it, memory, and the launch. Part of eager.cpp.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <vector>

namespace {

using at::Tensor;
using Tables = std::array<const Tensor*, 5>;  // the parameters, or the four tables of the fused form and none
using Observed = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What is learned.

enum What : int64_t { kForward, kLookup, kObserve, kBackward, kBackwardInput };

constexpr size_t kAddresses = 17, kNumbers = 80;  // struct Arguments of element.cuh

struct Launch {
  void* function;
  unsigned blocks[3], threads, shared;
  unsigned char numbers[kNumbers];
};

struct Plan {
  Launch first, second;  // the second adds up what the splits of the first left; it has no function if there is nothing to add
  int64_t splits;
};

// what, device, type of x, type of the parameters, intervals, (outer, channels, inner), aligned to 16 bytes
using Key = std::array<int64_t, 9>;

using LaunchKernel = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

struct CpuKernel {  // the functions of cpu.c
  void* parallel;
  int (*forward)(void*, unsigned, int, const void*, void*, int64_t, int64_t, int64_t, int64_t, const void*, const void*,
                 const void*, const void*, const void*);
  int (*lookup)(void*, unsigned, int, const void*, void*, int64_t, int64_t, int64_t, int64_t, const void*, const void*,
                const void*, const void*);
  int (*backward)(void*, unsigned, int, const void*, const void*, void*, int64_t, int64_t, int64_t, int64_t, const void*,
                  const void*, const void*, const void*, const void*, void*, void*, void*, void*, void*);
  int (*moments)(void*, unsigned, int, const void*, int64_t, int64_t, int64_t, void*, void*);
};

std::shared_mutex learning;
std::map<Key, Plan> plans;
LaunchKernel launch_kernel = nullptr;
CpuKernel cpu_kernel{};

// A call as kernels see it.

#ifdef PWLU_PRETEND_GPU  // a test without a GPU: launches of tensors of the CPU, which a function of the test receives
bool on_gpu(const Tensor&) { return true; }
int64_t index_of(const Tensor&) { return 0; }
void* stream_of(const Tensor&) { return nullptr; }
#else
bool on_gpu(const Tensor& x) { return x.is_cuda(); }
int64_t index_of(const Tensor& x) { return x.get_device(); }
void* stream_of(const Tensor& x) { return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(x.device()).native_handle(); }
#endif

struct Problem {
  at::ScalarType dtype, kind;  // of x and of the parameters
  int64_t outer, channels, inner, intervals;

  Key key(What what, const Tensor& x, bool aligned) const {
    return {what, index_of(x), int64_t(dtype), int64_t(kind), intervals, outer, channels, inner, aligned};
  }
};

// Nothing if it is not certain that a kernel can have these as they are.
std::optional<Problem> understand(const Tensor& x, const Tables& tables, int64_t channel_dim) {
  const Tensor &one = *tables[0], &wide = *tables[2];
  const bool fused = !tables[4];
  if (one.dim() != 1 || wide.dim() != 2 || !x.numel()) return std::nullopt;
  const int64_t channels = one.size(0), columns = wide.size(1), intervals = columns - (fused ? 2 : 1);
  if (channels < 1 || intervals < 1) return std::nullopt;
  for (size_t i = 0; i < (fused ? 4 : 5); ++i) {
    const Tensor* table = tables[i];
    const bool two = i == 2 || (fused && i == 3);
    if (table->dim() != (two ? 2 : 1) || table->size(0) != channels || (two && table->size(1) != columns)) return std::nullopt;
    if (table->device() != x.device() || table->scalar_type() != one.scalar_type()) return std::nullopt;
    if (!table->is_contiguous() || !table->const_data_ptr()) return std::nullopt;
  }
  int64_t inner = x.numel();
  if (channels > 1) {
    if (channel_dim < -x.dim() || channel_dim >= x.dim()) return std::nullopt;
    const int64_t dim = channel_dim < 0 ? channel_dim + x.dim() : channel_dim;
    if (x.size(dim) != channels) return std::nullopt;
    inner = x.stride(dim);
  }
  if (!x.const_data_ptr() || !x.is_non_overlapping_and_dense()) return std::nullopt;
  const auto double_ = at::kDouble, dtype = x.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf && dtype != double_) return std::nullopt;
  if (!on_gpu(x) && one.scalar_type() != (dtype == double_ ? double_ : at::kFloat)) return std::nullopt;
  return Problem{dtype, one.scalar_type(), x.numel() / (channels * inner), channels, inner, intervals};
}

// CUDA.

struct Arguments {
  const void* addresses[kAddresses] = {};
  unsigned char numbers[kNumbers];

  Arguments(const Tensor& x, const Tensor* grad, const Tensor& target, const Tables& tables) {
    addresses[0] = x.const_data_ptr();
    addresses[1] = grad ? grad->const_data_ptr() : nullptr;
    addresses[2] = target.mutable_data_ptr();
    for (size_t i = 0; i < tables.size(); ++i) addresses[3 + i] = tables[i] ? tables[i]->const_data_ptr() : nullptr;
  }

  bool aligned() const {
    return !((uintptr_t(addresses[0]) | uintptr_t(addresses[1]) | uintptr_t(addresses[2])) & 15);
  }
};

std::optional<Plan> plan_of(const Key& key) {
  std::shared_lock lock(learning);
  const auto found = plans.find(key);
  return found == plans.end() ? std::nullopt : std::optional(found->second);
}

bool launch(const Launch& plan, Arguments& arguments, const Tensor& x) {
  std::memcpy(arguments.numbers, plan.numbers, kNumbers);
  void* packed = &arguments;
  const unsigned* blocks = plan.blocks;
  return !launch_kernel(plan.function, blocks[0], blocks[1], blocks[2], plan.threads, 1, 1, plan.shared, stream_of(x), &packed,
                        nullptr);
}

bool launch(const Plan& plan, Arguments& arguments, const Tensor& x) {
  const c10::DeviceGuard guard(x.device());
  return launch(plan.first, arguments, x) && (!plan.second.function || launch(plan.second, arguments, x));
}

Tensor partial_sums(const Tensor& x, int64_t count) { return at::empty({count}, x.options().dtype(at::kFloat)); }

// CPU.

int code_of(at::ScalarType dtype) {
  return dtype == at::kFloat ? 0 : dtype == at::kDouble ? 1 : dtype == at::kBFloat16 ? 2 : 3;
}

CpuKernel on_cpu() {
  std::shared_lock lock(learning);
  return cpu_kernel;
}

// The kernels. None of them returns anything where Python has to do it.

std::optional<Tensor> run_map(What what, const Tensor& x, const Tables& tables, int64_t channel_dim) {
  const auto p = understand(x, tables, channel_dim);
  if (!p) return std::nullopt;
  const Tensor y = at::empty_like(x);  // x is dense: so it has the same strides
  Arguments arguments(x, nullptr, y, tables);
  if (on_gpu(x)) {
    const auto plan = plan_of(p->key(what, x, arguments.aligned()));
    return plan && launch(*plan, arguments, x) ? std::optional(y) : std::nullopt;
  }
  const CpuKernel k = on_cpu();
  if (!k.parallel) return std::nullopt;
  const int threads = at::get_num_threads(), code = code_of(p->dtype);
  const void* const* t = arguments.addresses + 3;
  void* target = y.mutable_data_ptr();
  const int failed = what == kLookup ? k.lookup(k.parallel, threads, code, arguments.addresses[0], target, p->outer, p->channels,
                                                p->inner, p->intervals, t[0], t[1], t[2], t[3])
                                     : k.forward(k.parallel, threads, code, arguments.addresses[0], target, p->outer,
                                                 p->channels, p->inner, p->intervals, t[0], t[1], t[2], t[3], t[4]);
  return failed ? std::nullopt : std::optional(y);
}

std::optional<Observed> run_observe(const Tensor& x, const Tables& tables, int64_t channel_dim) {
  const auto p = understand(x, tables, channel_dim);
  if (!p) return std::nullopt;
  const auto wide = x.options().dtype(p->dtype == at::kDouble ? at::kDouble : at::kFloat);
  if (on_gpu(x)) {
    const Tensor y = at::empty_like(x);
    Arguments arguments(x, nullptr, y, tables);
    const auto plan = plan_of(p->key(kObserve, x, arguments.aligned()));
    if (!plan) return std::nullopt;
    Tensor count = at::empty({}, x.options().dtype(at::kLong));
    Tensor mean = at::empty({p->channels}, wide), m2 = at::empty({p->channels}, wide);
    const Tensor partial = partial_sums(x, plan->splits * p->channels * 3);
    const Tensor* moments[] = {&partial, &count, &mean, &m2};
    for (size_t i = 0; i < 4; ++i) arguments.addresses[13 + i] = moments[i]->mutable_data_ptr();
    if (!launch(*plan, arguments, x)) return std::nullopt;
    return Observed(y, count, mean, m2);
  }
  const CpuKernel k = on_cpu();
  const auto y = run_map(kForward, x, tables, channel_dim);
  if (!y || !k.parallel) return std::nullopt;
  Tensor mean = at::zeros({p->channels}, wide), m2 = at::zeros({p->channels}, wide);
  if (k.moments(k.parallel, at::get_num_threads(), code_of(p->dtype), x.const_data_ptr(), p->outer, p->channels, p->inner,
                mean.mutable_data_ptr(), m2.mutable_data_ptr()))
    return std::nullopt;
  Tensor count = at::empty({}, x.options().dtype(at::kLong));
  *count.mutable_data_ptr<int64_t>() = x.numel() / p->channels;
  return Observed(*y, count, mean, m2);
}

// The gradients of all parameters in one piece: heights, left, right, left_slope, right_slope.
int64_t length(const Tensor& heights) { return heights.numel() + 4 * heights.size(0); }

// The gradient of x, and those of the parameters, in one piece or in five; the latter are missing unless they are needed.
std::optional<std::vector<Tensor>> run_backward(const Tensor& grad, const Tensor& x, const Tables& tables, int64_t channel_dim,
                                                bool need_parameters, bool in_one) {
  const auto p = understand(x, tables, channel_dim);
  if (!p || grad.scalar_type() != p->dtype || grad.device() != x.device() || grad.sizes() != x.sizes()) return std::nullopt;
  if (grad.strides() != x.strides() || !grad.const_data_ptr()) return std::nullopt;
  const Tensor grad_x = at::empty_like(x);
  Arguments arguments(x, &grad, grad_x, tables);
  std::optional<Plan> plan;
  const CpuKernel k = on_gpu(x) ? CpuKernel{} : on_cpu();
  if (on_gpu(x)) {
    plan = plan_of(p->key(need_parameters ? kBackward : kBackwardInput, x, arguments.aligned()));
    if (!plan) return std::nullopt;
  } else if (!k.parallel) {
    return std::nullopt;
  }
  std::vector<Tensor> found(in_one ? 2 : 6);
  found[0] = grad_x;
  if (need_parameters && in_one) {
    found[1] = at::empty({length(*tables[2])}, tables[2]->options());
    auto* memory = static_cast<char*>(found[1].mutable_data_ptr());
    for (size_t i : {2, 0, 1, 3, 4}) {
      arguments.addresses[8 + i] = memory;
      memory += tables[i]->nbytes();
    }
  } else if (need_parameters) {
    for (size_t i = 0; i < 5; ++i) {
      found[1 + i] = at::empty_like(*tables[i]);
      arguments.addresses[8 + i] = found[1 + i].mutable_data_ptr();
    }
  }
  if (plan) {
    Tensor partial;
    if (plan->second.function) {
      partial = partial_sums(x, plan->splits * p->channels * (p->intervals + 3) * 2);
      arguments.addresses[13] = partial.mutable_data_ptr();
    }
    return launch(*plan, arguments, x) ? std::optional(found) : std::nullopt;
  }
  const void* const* a = arguments.addresses;
  auto to = [&](size_t i) { return const_cast<void*>(a[i]); };
  const int failed = k.backward(k.parallel, at::get_num_threads(), code_of(p->dtype), a[1], a[0], to(2), p->outer, p->channels,
                                p->inner, p->intervals, a[3], a[4], a[5], a[6], a[7], to(8), to(9), to(10), to(11), to(12));
  return failed ? std::nullopt : std::optional(found);
}

}  // namespace
