// The operators in eager mode without Python: autograd, memory, and the call of a kernel.
//
// No mathematics and no decisions are here. Which kernel serves which shape it learns from the Python code of this package
// (eager.py), and whatever is new to it, or unusual in any way, it leaves to that code: a mode, a transform, another type of
// tensor, a layout that needs a copy, a wrong shape, a kernel that fails.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include <algorithm>

#include "eager_calls.h"
#include "eager_kernels.h"

namespace {

// The operators.

using Map = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
using Observe = Observed(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
using Lookup = Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t);
using Backward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&,
                                                                            const Tensor&, const Tensor&, const Tensor&,
                                                                            const Tensor&, int64_t, bool, bool);

template <class Signature>
c10::TypedOperatorHandle<Signature> operator_(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

template <class Signature, class... Arguments_>
auto below_autograd(const c10::TypedOperatorHandle<Signature>& op, const Arguments_&... arguments) {
  at::AutoDispatchBelowAutograd guard;
  return op.call(arguments...);
}

#define PARAMETERS const Tensor &left, const Tensor &right, const Tensor &heights, const Tensor &left_slope, const Tensor &right_slope
#define TABLES Tables{&left, &right, &heights, &left_slope, &right_slope}
#define ARGUMENTS x, left, right, heights, left_slope, right_slope, channel_dim

Tensor forward(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  if (auto y = run_map(kForward, x, TABLES, channel_dim)) return *y;
  static const auto python = operator_<Map>("pwlu_python::kernel_forward");
  return below_autograd(python, ARGUMENTS);
}

Observed observe(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  if (auto found = run_observe(x, TABLES, channel_dim)) return *found;
  static const auto python = operator_<Observe>("pwlu_python::kernel_observe");
  return below_autograd(python, ARGUMENTS);
}

Tensor lookup(const Tensor& x, const Tensor& left, const Tensor& inv_step, const Tensor& slopes, const Tensor& offsets,
              int64_t channel_dim) {
  if (auto y = run_map(kLookup, x, {&left, &inv_step, &slopes, &offsets, nullptr}, channel_dim)) return *y;
  static const auto python = operator_<Lookup>("pwlu_python::kernel_lookup");
  return below_autograd(python, x, left, inv_step, slopes, offsets, channel_dim);
}

// Autograd. A call has gradients of x and of its parameters, or of all of them as one.

template <class Function, class... More>
Tensor differentiable(const Tensor& x, const Tables& tables, int64_t channel_dim, More&... more) {
  const bool counts = usual(x, tables) && trained(tables) && understand(x, tables, channel_dim);
  const Tensor one = counts ? as_one(tables) : Tensor();
  variable_list parameters{one};
  if (!one.defined()) parameters = {*tables[0], *tables[1], *tables[2], *tables[3], *tables[4]};
  const Tensor y = Function::apply(x, at::TensorList(parameters), tables, channel_dim, more...);
  if (counts && !one.defined()) remember(tables, y);
  return y;
}

void keep(AutogradContext* ctx, const Tensor& x, at::TensorList parameters, const Tables& tables, int64_t channel_dim) {
  ctx->save_for_backward({x, *tables[0], *tables[1], *tables[2], *tables[3], *tables[4]});
  ctx->saved_data["channel_dim"] = channel_dim;
  // So that it lives on for the unit's next call. Not saved: saving would run hooks, and checkpointing counts what is saved.
  if (parameters.size() == 1) ctx->saved_data["as_one"] = parameters[0];
}

bool parameters_needed(const AutogradContext* ctx) {
  for (size_t i = 1; i < (ctx->saved_data.count("as_one") ? 2 : 6); ++i)
    if (ctx->needs_input_grad(i)) return true;
  return false;
}

variable_list gradients(AutogradContext* ctx, const Tensor& grad, const variable_list& saved, bool need_parameters) {
  const Tensor& x = saved[0];
  const Tables tables{&saved[1], &saved[2], &saved[3], &saved[4], &saved[5]};
  const int64_t channel_dim = ctx->saved_data["channel_dim"].toInt();
  const bool one = ctx->saved_data.count("as_one");
  const bool differentiated = at::GradMode::is_enabled() || dual(x, tables) || dual(grad, {});
  if (!differentiated && usual(x, tables) && usual(grad, {})) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (auto found = run_backward(grad, x, tables, channel_dim, need_parameters, one)) return *found;
  }
  static const auto op = operator_<Backward>("pwlu::backward");
  const bool need_input = ctx->needs_input_grad(0);
  auto call = [&] {
    return op.call(grad, x, saved[1], saved[2], saved[3], saved[4], saved[5], channel_dim, need_input, need_parameters);
  };
  const auto all = differentiated ? call() : [&] { at::AutoDispatchBelowAutograd guard; return call(); }();
  const auto& [grad_x, left, right, heights, left_slope, right_slope] = all;
  variable_list found(one ? 2 : 6);
  if (need_input) found[0] = grad_x;
  if (need_parameters && one) found[1] = at::cat({heights.reshape({-1}), left, right, left_slope, right_slope});
  else if (need_parameters) std::ranges::copy(variable_list{left, right, heights, left_slope, right_slope}, found.begin() + 1);
  return found;
}

// y, keeping x and the parameters alone.
struct Forward : torch::autograd::Function<Forward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList parameters, const Tables& tables,
                        int64_t channel_dim) {
    keep(ctx, x, parameters, tables, channel_dim);
    const at::AutoDispatchBelowAutograd guard;
    const auto& [left, right, heights, left_slope, right_slope] = tables;
    static const auto op = operator_<Map>("pwlu::forward");
    return usual(x, tables) ? ::forward(x, *left, *right, *heights, *left_slope, *right_slope, channel_dim)
                            : op.call(x, *left, *right, *heights, *left_slope, *right_slope, channel_dim);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    ++steps_back;
    auto found = gradients(ctx, grads[0], ctx->get_saved_variables(), parameters_needed(ctx));
    found.resize(found.size() + 2);  // none of tables and channel_dim
    return found;
  }
};

variable_list zeros(const variable_list& saved, bool one) {
  if (one) return {at::zeros({length(saved[3])}, saved[3].options())};
  const bool at_once = usual(saved[0], {&saved[1], &saved[2], &saved[3], &saved[4], &saved[5]});  // with one launch
  variable_list found;
  for (size_t i = 1; i < 6; ++i) found.push_back(at_once ? at::empty_like(saved[i]) : at::zeros_like(saved[i]));
  if (at_once) at::_foreach_zero_(found);
  return found;
}

// y and the moments of x: the parameters stand still, so their gradients are zero, but not missing.
// The moments leave by reference: of outputs that have no derivatives, compiled autograd knows nothing.
struct ObserveFunction : torch::autograd::Function<ObserveFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, at::TensorList parameters, const Tables& tables,
                        int64_t channel_dim, Observed& found) {
    keep(ctx, x, parameters, tables, channel_dim);
    ctx->set_materialize_grads(false);
    const at::AutoDispatchBelowAutograd guard;
    const auto& [left, right, heights, left_slope, right_slope] = tables;
    static const auto op = operator_<Observe>("pwlu::observe");
    found = usual(x, tables) ? ::observe(x, *left, *right, *heights, *left_slope, *right_slope, channel_dim)
                             : op.call(x, *left, *right, *heights, *left_slope, *right_slope, channel_dim);
    return std::get<0>(found);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    ++steps_back;
    const variable_list saved = ctx->get_saved_variables();
    const bool one = ctx->saved_data.count("as_one");
    variable_list found(one ? 2 : 6);
    if (ctx->needs_input_grad(0) && grads[0].defined()) found[0] = gradients(ctx, grads[0], saved, false)[0];
    if (parameters_needed(ctx)) std::ranges::move(zeros(saved, one), found.begin() + 1);
    found.resize(found.size() + 3);
    return found;
  }
};

Tensor forward_autograd(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  static const auto op = operator_<Map>("pwlu::forward"), python = operator_<Map>("pwlu_python::autograd_forward");
  if (transformed(x, TABLES)) return python.call(ARGUMENTS);
  if (wanted(x, TABLES)) return differentiable<Forward>(x, TABLES, channel_dim);
  return usual(x, TABLES) ? forward(ARGUMENTS) : below_autograd(op, ARGUMENTS);
}

Observed observe_autograd(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  static const auto op = operator_<Observe>("pwlu::observe"), python = operator_<Observe>("pwlu_python::autograd_observe");
  if (transformed(x, TABLES)) return python.call(ARGUMENTS);
  if (wanted(x, TABLES)) {
    Observed found;
    std::get<0>(found) = differentiable<ObserveFunction>(x, TABLES, channel_dim, found);
    return found;
  }
  return usual(x, TABLES) ? observe(ARGUMENTS) : below_autograd(op, ARGUMENTS);
}

Tensor lookup_autograd(const Tensor& x, const Tensor& left, const Tensor& inv_step, const Tensor& slopes, const Tensor& offsets,
                       int64_t channel_dim) {
  const Tables tables{&left, &inv_step, &slopes, &offsets, nullptr};
  if (!transformed(x, tables) && !wanted(x, tables) && usual(x, tables))
    return lookup(x, left, inv_step, slopes, offsets, channel_dim);
  static const auto python = operator_<Lookup>("pwlu_python::autograd_lookup");  // a derivative of it is an error
  return python.call(x, left, inv_step, slopes, offsets, channel_dim);
}

TORCH_LIBRARY_IMPL(pwlu, CPU, m) { m.impl("forward", forward); m.impl("observe", observe); m.impl("lookup", lookup); }
TORCH_LIBRARY_IMPL(pwlu, CUDA, m) { m.impl("forward", forward); m.impl("observe", observe); m.impl("lookup", lookup); }
TORCH_LIBRARY_IMPL(pwlu, AutogradCPU, m) {
  m.impl("forward", forward_autograd);
  m.impl("observe", observe_autograd);
  m.impl("lookup", lookup_autograd);
}
TORCH_LIBRARY_IMPL(pwlu, AutogradCUDA, m) {
  m.impl("forward", forward_autograd);
  m.impl("observe", observe_autograd);
  m.impl("lookup", lookup_autograd);
}

}  // namespace

// What eager.py calls.

extern "C" {

void pwlu_learn_gpu(const int64_t* key, const Launch* first, const Launch* second, int64_t splits, LaunchKernel by) {
  Key known;
  std::copy(key, key + known.size(), known.begin());
  std::unique_lock lock(learning);
  launch_kernel = by;
  plans[known] = Plan{*first, second ? *second : Launch{}, splits};
}

void pwlu_learn_cpu(const CpuKernel* kernel) {
  std::unique_lock lock(learning);
  cpu_kernel = *kernel;
}

void pwlu_forget() {
  std::unique_lock lock(learning);
  plans.clear();
  cpu_kernel = {};
}
}
