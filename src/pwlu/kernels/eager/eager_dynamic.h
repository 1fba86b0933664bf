// Call the kernels of a dynamic PWLU. Part of eager.cpp.
#pragma once

#include <ATen/ops/cat.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/sum.h>

#include "eager_kernels.h"

namespace {

using Unit = std::array<Tensor, 6>;  // weight, directions, first, first_bias, second, second_bias
using DynamicGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;  // of x and of those

#define PWLU_UNIT \
  const Tensor &weight, const Tensor &directions, const Tensor &first, const Tensor &first_bias, const Tensor &second, \
      const Tensor &second_bias
#define PWLU_UNIT_NAMES weight, directions, first, first_bias, second, second_bias

// Describe a call by the shapes that its plans depend on; return nullopt if Python has to handle it. Python registers only plans
// of shapes that match each other. The operation is missing, and whether the addresses are aligned.
std::optional<Key> dynamic_key_of(const Tensor &x, const Unit &unit, int64_t intervals, int64_t channel_dim) {
  const auto &[PWLU_UNIT_NAMES] = unit;
  const auto dtype = x.scalar_type();
  if (!on_gpu(x) || (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf)) return std::nullopt;
  if (x.dim() < 2 || first.dim() != 2 || second.dim() != 2) return std::nullopt;
  if (!x.numel() || !x.const_data_ptr() || !x.is_non_overlapping_and_dense()) return std::nullopt;
  const int64_t hidden = first.size(0), features = first.size(1), outputs = second.size(0);
  if (!fits(weight, x, {weight.numel()}, at::kFloat) || !fits(directions, x, {directions.numel()}, at::kFloat) ||
      !fits(first, x, {hidden, features}, at::kFloat) || !fits(first_bias, x, {hidden}, at::kFloat) ||
      !fits(second, x, {outputs, hidden}, at::kFloat) || !fits(second_bias, x, {outputs}, at::kFloat))
    return std::nullopt;
  const int64_t of_sample = x.numel() / x.size(0);
  if (x.size(0) > 1 && x.stride(0) != of_sample) return std::nullopt;
  int64_t neighbours = of_sample;  // elements that follow each other in memory and have the same mean
  if (features > 1) {
    if (channel_dim < -x.dim() || channel_dim >= x.dim()) return std::nullopt;
    const int64_t dim = channel_dim < 0 ? channel_dim + x.dim() : channel_dim;
    if (dim == 0 || x.size(dim) != features) return std::nullopt;
    neighbours = x.stride(dim);
  }
  return Key{0,          index_of(x), int64_t(dtype), int64_t(at::kFloat), intervals, x.size(0), x.numel(),
             neighbours, 0,           weight.numel(), directions.numel(),  features,  hidden,    outputs};
}

std::shared_ptr<const Plan> dynamic_plan_of(What what, Key key, const Arguments &a) {
  key[0] = what, key[8] = a.aligned();
  return plan_of(key);
}

struct Sizes {  // as in plan.py, at the end of the numbers of every kernel, before `first`
  int samples, functions, rates, directions, features, hidden;

  explicit Sizes(const Plan &plan) {
    std::memcpy(this, plan.launches[0].numbers + kNumbers - sizeof(int) - sizeof(Sizes), sizeof(Sizes));
  }
  int64_t outputs() const { return int64_t(directions) * rates; }
  int64_t of_state() const { return samples * (features + hidden + outputs()); }
};

void set_unit(Arguments &a, const Unit &unit, const Tensor &state, const Sizes &sizes) {
  a.set_blocks(3, unit[0].const_data_ptr(), sizes.functions, at::kFloat);
  for (size_t i = 1; i < unit.size(); ++i) a.addresses[kNetwork + i - 1] = unit[i].const_data_ptr();
  a.addresses[kNetwork + 5] = state.const_data_ptr();
}

// Return y and the state.
std::optional<std::tuple<Tensor, Tensor>> run_dynamic_forward(const Tensor &x, const Unit &unit, int64_t intervals,
                                                              int64_t channel_dim) {
  const auto key = dynamic_key_of(x, unit, intervals, channel_dim);
  if (!key) return std::nullopt;
  const Tensor y = at::empty_like(x);
  Arguments a(x, nullptr, y);
  const auto plan = dynamic_plan_of(kDynamicForward, *key, a);
  if (!plan) return std::nullopt;
  const Sizes sizes(*plan);
  const Tensor state = at::empty({sizes.of_state()}, x.options().dtype(at::kFloat));
  set_unit(a, unit, state, sizes);
  if (plan->launches.size() == 3) {  // no kernel computes the means
    std::vector<int64_t> positions;
    for (int64_t d = 1; d < x.dim(); ++d)
      if (sizes.features == 1 || d != (channel_dim + x.dim()) % x.dim()) positions.push_back(d);
    const Tensor flat = state.narrow(0, 0, int64_t(sizes.samples) * sizes.features);
    Tensor means = sizes.features > 1 ? flat.view({sizes.samples, sizes.features}) : flat;
    if (positions.empty()) flat.view({sizes.samples, sizes.features}).copy_(x);
    else at::mean_out(means, x, positions, false, at::kFloat);
  }
  if (!launch(*plan, a, x, 0)) return std::nullopt;
  return std::tuple(y, state);
}

std::optional<DynamicGradients> run_dynamic_backward(const Tensor &grad, const Tensor &x, const Unit &unit, const Tensor &state,
                                                     int64_t intervals, int64_t channel_dim) {
  const auto key = dynamic_key_of(x, unit, intervals, channel_dim);
  if (!key || !is_like(grad, x)) return std::nullopt;
  const Tensor grad_x = at::empty_like(x);
  Arguments a(x, &grad, grad_x);
  const auto sums = dynamic_plan_of(kDynamicBackward, *key, a), rest = dynamic_plan_of(kDynamicInput, *key, a);
  if (!sums || !rest) return std::nullopt;
  const Sizes sizes(*sums);
  if (!fits(state, x, {sizes.of_state()}, at::kFloat)) return std::nullopt;
  set_unit(a, unit, state, sizes);
  const int64_t samples = sizes.samples, own = std::max(sizes.functions, sizes.rates), knots = intervals + 1;
  const auto floats = [&](int64_t size) { return at::empty({size}, state.options()); };
  Tensor of_weight = floats(own * (intervals + 5)), of_directions = floats(sizes.directions * own * knots);
  a.set_blocks(8, of_weight.mutable_data_ptr(), own, at::kFloat);
  a.addresses[kPair] = pair(double(sizes.features) * double(samples) / double(x.numel()), 0.0);
  a.addresses[kNetwork + 6] = of_directions.mutable_data_ptr();
  std::array<Tensor, 4> of_network;
  for (size_t i = 0; i < 4; ++i) {
    of_network[i] = at::empty_like(unit[2 + i]);
    a.addresses[kNetwork + 7 + i] = of_network[i].mutable_data_ptr();
  }
  Tensor of_outputs = floats(samples * sizes.outputs());
  const Tensor of_hidden = floats(samples * sizes.hidden), of_means = floats(samples * sizes.features);
  const bool shared_rates = sizes.rates < own;  // all channels have the same coefficients
  const Tensor of_coefficients = floats(shared_rates ? samples * sizes.directions * own : 0);
  const Tensor *within[] = {&of_outputs, &of_hidden, &of_means, &of_coefficients};
  for (size_t i = 0; i < 4; ++i) a.addresses[kNetwork + 11 + i] = within[i]->mutable_data_ptr();
  if (!launch(*sums, a, x, 2 * (intervals + 3) * samples * own)) return std::nullopt;
  if (shared_rates) at::sum_out(of_outputs, of_coefficients.view({-1, own}), 1);
  if (!launch(*rest, a, x, 0)) return std::nullopt;
  if (sizes.functions < own) {  // all channels have the same function
    const Tensor outer = of_weight.narrow(0, 0, 4 * own).view({4, own}).sum(1);
    of_weight = at::cat({outer, of_weight.narrow(0, 4 * own, own * knots).view({own, knots}).sum(0)});
    of_directions = of_directions.view({sizes.directions, own, knots}).sum(1).flatten();
  }
  const auto &[of_first, of_first_bias, of_second, of_second_bias] = of_network;
  return std::tuple(grad_x, of_weight, of_directions, of_first, of_first_bias, of_second, of_second_bias);
}

}  // namespace
