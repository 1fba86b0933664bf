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

// As in Sizes of plan.py and in layout.sample_geometry. `own` is the number of functions of a sample; neighbours in memory share
// a mean.
struct DynamicProblem {
  int64_t samples, functions, rates, directions, features, hidden, own;
  int64_t outer, channels, inner, apart, neighbours, intervals;

  Key key(What what, const Tensor &x, bool aligned) const {
    return {what,
            index_of(x),
            int64_t(x.scalar_type()),
            int64_t(at::kFloat),
            intervals,
            outer,
            channels,
            inner,
            aligned,
            apart,
            functions,
            rates,
            directions,
            features,
            hidden,
            neighbours};
  }
  Problem blocks(int64_t count) const { return {at::kFloat, at::kFloat, 0, count, 0, intervals}; }
};

// Describe a call; return nullopt if Python has to handle it.
std::optional<DynamicProblem> dynamic_problem_of(const Tensor &x, const Unit &unit, int64_t intervals, int64_t channel_dim) {
  const auto &[PWLU_UNIT_NAMES] = unit;
  const auto dtype = x.scalar_type();
  if (!on_gpu(x) || (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf)) return std::nullopt;
  if (x.dim() < 2 || intervals < 1 || first.dim() != 2 || second.dim() != 2 || weight.dim() != 1 || directions.dim() != 1)
    return std::nullopt;
  if (!x.numel() || !x.const_data_ptr() || !x.is_non_overlapping_and_dense()) return std::nullopt;
  DynamicProblem p{};
  p.intervals = intervals, p.samples = x.size(0), p.hidden = first.size(0), p.features = first.size(1);
  const int64_t outputs = second.size(0);
  p.functions = weight.numel() / (intervals + 5);
  if (p.functions < 1) return std::nullopt;
  p.directions = directions.numel() / (p.functions * (intervals + 1));
  if (p.directions < 1) return std::nullopt;
  p.rates = outputs / p.directions;
  p.own = std::max(p.functions, p.rates);
  if ((p.functions != 1 && p.functions != p.features) || (p.rates != 1 && p.rates != p.features)) return std::nullopt;
  if (!fits(weight, x, {p.functions * (intervals + 5)}, at::kFloat) ||
      !fits(directions, x, {p.directions * p.functions * (intervals + 1)}, at::kFloat) ||
      !fits(first, x, {p.hidden, p.features}, at::kFloat) || !fits(first_bias, x, {p.hidden}, at::kFloat) ||
      !fits(second, x, {p.directions * p.rates, p.hidden}, at::kFloat) ||
      !fits(second_bias, x, {p.directions * p.rates}, at::kFloat))
    return std::nullopt;
  const int64_t of_sample = x.numel() / p.samples;
  if (p.samples > 1 && x.stride(0) != of_sample) return std::nullopt;
  p.inner = p.neighbours = of_sample;
  if (p.features > 1) {
    if (channel_dim < -x.dim() || channel_dim >= x.dim()) return std::nullopt;
    const int64_t dim = channel_dim < 0 ? channel_dim + x.dim() : channel_dim;
    if (dim == 0 || x.size(dim) != p.features) return std::nullopt;
    p.neighbours = x.stride(dim);
    if (p.own > 1) p.inner = p.neighbours;
  }
  p.outer = of_sample / (p.own * p.inner);
  p.channels = p.outer == 1 ? p.samples * p.own : p.own;  // samples are folded into channels
  p.apart = p.outer == 1 ? 1 : p.samples;
  return p;
}

Arguments dynamic_arguments(const Tensor &x, const Tensor *grad, const Tensor &out, const Unit &unit, const Tensor &state,
                            const DynamicProblem &p) {
  Arguments a(x, grad, out);
  a.set_blocks(3, unit[0].const_data_ptr(), p.blocks(p.functions));
  for (size_t i = 1; i < unit.size(); ++i) a.addresses[kNetwork + i - 1] = unit[i].const_data_ptr();
  a.addresses[kNetwork + 5] = state.const_data_ptr();
  return a;
}

// Return y and the state.
std::optional<std::tuple<Tensor, Tensor>> run_dynamic_forward(const Tensor &x, const Unit &unit, int64_t intervals,
                                                              int64_t channel_dim) {
  const auto p = dynamic_problem_of(x, unit, intervals, channel_dim);
  if (!p) return std::nullopt;
  const Tensor y = at::empty_like(x);
  const int64_t size = p->samples * (p->features + p->hidden + p->directions * p->rates);
  const Tensor state = at::empty({size}, x.options().dtype(at::kFloat));
  Arguments a = dynamic_arguments(x, nullptr, y, unit, state, *p);
  const auto plan = plan_of(p->key(kDynamicForward, x, a.aligned()));
  if (!plan) return std::nullopt;
  if (plan->launches.size() == 3) {  // no kernel computes the means
    std::vector<int64_t> positions;
    for (int64_t d = 1; d < x.dim(); ++d)
      if (p->features == 1 || d != (channel_dim + x.dim()) % x.dim()) positions.push_back(d);
    const Tensor flat = state.narrow(0, 0, p->samples * p->features);
    Tensor means = p->features > 1 ? flat.view({p->samples, p->features}) : flat;
    if (positions.empty()) flat.view({p->samples, p->features}).copy_(x);
    else at::mean_out(means, x, positions, false, at::kFloat);
  }
  if (!launch(*plan, a, x, 0)) return std::nullopt;
  return std::tuple(y, state);
}

std::optional<DynamicGradients> run_dynamic_backward(const Tensor &grad, const Tensor &x, const Unit &unit, const Tensor &state,
                                                     int64_t intervals, int64_t channel_dim) {
  const auto p = dynamic_problem_of(x, unit, intervals, channel_dim);
  if (!p || !is_like(grad, x)) return std::nullopt;
  const int64_t outputs = p->directions * p->rates, own = p->own, knots = intervals + 1;
  if (!fits(state, x, {p->samples * (p->features + p->hidden + outputs)}, at::kFloat)) return std::nullopt;
  const auto floats = [&](int64_t size) { return at::empty({size}, state.options()); };
  const Tensor grad_x = at::empty_like(x);
  Tensor of_weight = floats(own * (intervals + 5)), of_directions = floats(p->directions * own * knots);
  Arguments a = dynamic_arguments(x, &grad, grad_x, unit, state, *p);
  a.set_blocks(8, of_weight.mutable_data_ptr(), p->blocks(own));
  a.addresses[kPair] = pair(double(p->features) * double(p->samples) / double(x.numel()), 0.0);
  a.addresses[kNetwork + 6] = of_directions.mutable_data_ptr();
  std::array<Tensor, 4> of_network;
  for (size_t i = 0; i < 4; ++i) {
    of_network[i] = at::empty_like(unit[2 + i]);
    a.addresses[kNetwork + 7 + i] = of_network[i].mutable_data_ptr();
  }
  Tensor of_outputs = floats(p->samples * outputs);
  const Tensor of_hidden = floats(p->samples * p->hidden), of_means = floats(p->samples * p->features);
  const bool shared_rates = p->rates < own;  // all channels have the same coefficients
  const Tensor of_coefficients = floats(shared_rates ? p->samples * p->directions * own : 0);
  const Tensor *within[] = {&of_outputs, &of_hidden, &of_means, &of_coefficients};
  for (size_t i = 0; i < 4; ++i) a.addresses[kNetwork + 11 + i] = within[i]->mutable_data_ptr();
  const bool aligned = a.aligned();
  const auto sums = plan_of(p->key(kDynamicBackward, x, aligned)), rest = plan_of(p->key(kDynamicInput, x, aligned));
  if (!sums || !rest || !launch(*sums, a, x, 2 * (intervals + 3) * p->samples * own)) return std::nullopt;
  if (shared_rates) at::sum_out(of_outputs, of_coefficients.view({-1, own}), 1);
  if (!launch(*rest, a, x, 0)) return std::nullopt;
  if (p->functions < own) {  // all channels have the same function
    const Tensor outer = of_weight.narrow(0, 0, 4 * own).view({4, own}).sum(1);
    of_weight = at::cat({outer, of_weight.narrow(0, 4 * own, own * knots).view({own, knots}).sum(0)});
    of_directions = of_directions.view({p->directions, own, knots}).sum(1).flatten();
  }
  const auto &[of_first, of_first_bias, of_second, of_second_bias] = of_network;
  return std::tuple(grad_x, of_weight, of_directions, of_first, of_first_bias, of_second, of_second_bias);
}

}  // namespace
