// Call the kernels of a batch norm followed by a PWLU. Part of eager.cpp.
#pragma once

#include "eager_kernels.h"

namespace {

using NormGradients = std::tuple<Tensor, Tensor, Tensor>;  // gradient of z (or empty), sums of the norm, gradient of the weight

// Describe a call with a norm; return nullopt if Python has to handle it.
std::optional<Problem> norm_problem_of(const Tensor &x, const MaybeTensor &residual, const Tensor &norm, const Tensor &weight,
                                       int64_t intervals) {
  if (x.dim() < 2 || (on_gpu(x) && x.scalar_type() == at::kDouble)) return std::nullopt;
  if (residual && !is_like(*residual, x)) return std::nullopt;
  const auto p = problem_of(x, weight, intervals, 1);
  if (!p || p->channels != x.size(1) || !fits(norm, x, {4, p->channels}, computed_in(x))) return std::nullopt;
  return p;
}

// The arguments of a norm other than its input: layout.NormState.
#define PWLU_NORM_STATE \
  const MaybeTensor &gamma, const MaybeTensor &beta, const MaybeTensor &running_mean, const MaybeTensor &running_var, \
      const MaybeTensor &batches, double factor, double eps, bool training, const MaybeTensor &pool
#define PWLU_NORM_NAMES gamma, beta, running_mean, running_var, batches, factor, eps, training

// Return the norm (4, channels). In training, update the running statistics, the number of batches and the pool.
std::optional<Tensor> run_plain_normalization(const Tensor &x, PWLU_NORM_STATE) {
  if (x.dim() < 2 || (on_gpu(x) && x.scalar_type() == at::kDouble)) return std::nullopt;
  const int64_t channels = x.size(1);
  const auto kind = computed_in(x);
  for (const auto *each : {&gamma, &beta, &running_mean, &running_var})
    if (!fits(*each, x, {channels}, kind)) return std::nullopt;
  if (!fits(batches, x, {}, at::kLong) || !fits(pool, x, {3, channels}, kind)) return std::nullopt;
  if (!training && !(running_mean && running_var)) return std::nullopt;
  const Tensor norm = at::empty({4, channels}, x.options().dtype(kind));
  const auto p = problem_of(x, norm, channels, 1, 1);
  if (!p) return std::nullopt;
  if (!on_gpu(x)) {
    if (!call(&CpuKernel::normalization, *p, training ? x.const_data_ptr() : nullptr, p->outer, p->channels, p->inner,
              address(gamma), address(beta), address(running_mean), address(running_var), address(batches), factor, eps,
              address(pool), norm.mutable_data_ptr()))
      return std::nullopt;
    if (training) changed({&batches, &pool});
    return norm;
  }
  Arguments a;
  a.addresses[3] = address(gamma), a.addresses[4] = address(beta);
  a.addresses[8] = address(running_mean), a.addresses[9] = address(running_var), a.addresses[10] = address(batches);
  a.addresses[kNorm] = norm.mutable_data_ptr();
  a.addresses[kPair] = pair(factor, eps);
  if (!training) {
    const auto plan = plan_of({kRunningNorm, index_of(x), int64_t(at::kFloat), int64_t(at::kFloat), 1, 0, channels, 1, true});
    return plan && launch(*plan, a, x, 0) ? std::optional(norm) : std::nullopt;
  }
  a.addresses[0] = x.const_data_ptr();
  a.addresses[kPool] = address(pool);
  if (!launch(kBatchNorm, *p, a, x, 3 * channels)) return std::nullopt;
  changed({&batches, &pool});
  return norm;
}

// The same for parameters and statistics of any dtype, as dispatch.normalization does.
std::optional<Tensor> run_normalization(const Tensor &x, PWLU_NORM_STATE) {
  const auto kind = computed_in(x);
  const auto as = [&](const MaybeTensor &t) { return t && t->scalar_type() != kind ? MaybeTensor(t->to(kind)) : t; };
  const MaybeTensor mean = as(running_mean), variance = as(running_var), own = as(pool);
  const auto norm = run_plain_normalization(x, as(gamma), as(beta), mean, variance, batches, factor, eps, training, own);
  if (!norm || !training) return norm;
  if (running_mean && !mean->is_same(*running_mean)) running_mean->copy_(*mean);
  if (running_var && !variance->is_same(*running_var)) running_var->copy_(*variance);
  if (pool && !own->is_same(*pool)) pool->copy_(*own);
  return norm;
}

std::optional<Tensor> run_norm_forward(const Tensor &x, const MaybeTensor &residual, const Tensor &norm, const Tensor &weight,
                                       int64_t intervals, const MaybeTensor &pool) {
  const auto p = norm_problem_of(x, residual, norm, weight, intervals);
  if (!p || !fits(pool, x, {3, p->channels}, computed_in(x))) return std::nullopt;
  const Tensor y = at::empty_like(x);
  if (!on_gpu(x)) {
    if (!call(&CpuKernel::norm_forward, *p, x.const_data_ptr(), address(residual), y.mutable_data_ptr(), p->outer, p->channels,
              p->inner, norm.const_data_ptr(), intervals, weight.const_data_ptr(), address(pool)))
      return std::nullopt;
    changed({&pool});
    return y;
  }
  Arguments a(x, nullptr, y);
  a.set_blocks(3, weight.const_data_ptr(), p->channels, p->kind);
  a.addresses[kPool] = address(pool), a.addresses[kResidual] = address(residual), a.addresses[kNorm] = norm.const_data_ptr();
  const What what = pool ? (residual ? kNormAddObserve : kNormObserve) : residual ? kNormAddForward : kNormForward;
  if (!launch(what, *p, a, x, 3 * p->channels)) return std::nullopt;
  changed({&pool});
  return y;
}

std::optional<NormGradients> run_norm_backward(const Tensor &grad, const Tensor &x, const MaybeTensor &residual,
                                               const Tensor &norm, const Tensor &weight, int64_t intervals) {
  const auto p = norm_problem_of(x, residual, norm, weight, intervals);
  if (!p || !is_like(grad, x)) return std::nullopt;
  const Tensor grad_z = residual ? at::empty_like(x) : at::empty({0}, x.options());
  const Tensor sums = at::empty({3, p->channels}, norm.options()), grad_weight = at::empty_like(weight);
  if (!on_gpu(x)) {
    if (!call(&CpuKernel::norm_backward, *p, grad.const_data_ptr(), x.const_data_ptr(), address(residual),
              residual ? grad_z.mutable_data_ptr() : nullptr, p->outer, p->channels, p->inner, norm.const_data_ptr(),
              sums.mutable_data_ptr(), intervals, weight.const_data_ptr(), grad_weight.mutable_data_ptr()))
      return std::nullopt;
    return std::tuple(grad_z, sums, grad_weight);
  }
  Arguments a(x, &grad, grad_z);
  a.set_blocks(3, weight.const_data_ptr(), p->channels, p->kind);
  a.set_blocks(8, grad_weight.mutable_data_ptr(), p->channels, p->kind);
  a.addresses[kResidual] = address(residual), a.addresses[kNorm] = norm.const_data_ptr();
  a.addresses[kSums] = sums.mutable_data_ptr();
  const What what = residual ? kNormAddBackward : kNormBackward;
  if (!launch(what, *p, a, x, 2 * (p->intervals + 4) * p->channels)) return std::nullopt;
  return std::tuple(grad_z, sums, grad_weight);
}

std::optional<Tensor> run_norm_input(const Tensor &grad, const Tensor &x, const Tensor &norm, const Tensor &weight,
                                     int64_t intervals, const MaybeTensor &sums, double count, bool grad_is_of_z) {
  const auto p = norm_problem_of(x, std::nullopt, norm, weight, intervals);
  if (!p || !is_like(grad, x) || !fits(sums, x, {3, p->channels}, computed_in(x))) return std::nullopt;
  const Tensor grad_x = at::empty_like(x);
  if (!on_gpu(x)) {
    const bool done = call(&CpuKernel::norm_input, *p, grad.const_data_ptr(), x.const_data_ptr(), grad_x.mutable_data_ptr(),
                           p->outer, p->channels, p->inner, norm.const_data_ptr(), address(sums), count, int(grad_is_of_z),
                           intervals, weight.const_data_ptr());
    return done ? std::optional(grad_x) : std::nullopt;
  }
  Arguments a(x, &grad, grad_x);
  a.set_blocks(3, weight.const_data_ptr(), p->channels, p->kind);
  a.addresses[kNorm] = norm.const_data_ptr(), a.addresses[kSums] = address(sums);
  a.addresses[kPair] = pair(count ? 1.0 / count : 0.0, 0.0);
  return launch(grad_is_of_z ? kNormAddInput : kNormInput, *p, a, x, 0) ? std::optional(grad_x) : std::nullopt;
}

}  // namespace
