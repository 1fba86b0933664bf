// The operators in eager mode without Python: autograd, memory, and the call of a kernel.
//
// No mathematics and no decisions are here. Which kernel serves which shape it learns from the Python code of this package
// (eager.py), and whatever is new to it, or unusual in any way, it leaves to that code: a mode, a transform, another type of
// tensor, a layout that needs a copy, a wrong shape, a kernel that fails.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_foreach_zero.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "eager_kernels.h"

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether a call is a usual one.

constexpr auto kOrdinary = c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
                                                c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA,
                                                c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
constexpr auto kUsualModes = kOrdinary | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);

bool within(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) {
  return (keys.raw_repr() & ~allowed.raw_repr()) == 0;
}

bool dual(const Tensor& x, const Tables& tables) {  // forward-mode differentiation
  if (x._fw_grad(0).defined()) return true;
  for (const Tensor* table : tables)
    if (table && table->_fw_grad(0).defined()) return true;
  return false;
}

bool transformed(const Tensor& x, const Tables& tables) {  // by torch.func, or so
  const auto modes = c10::impl::tls_local_dispatch_key_set().included_;
  return modes.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) || dual(x, tables);
}

bool usual(const Tensor& x, const Tables& tables) {
  if (!within(c10::impl::tls_local_dispatch_key_set().included_, kUsualModes) || !within(x.key_set(), kOrdinary)) return false;
  for (const Tensor* table : tables)
    if (table && !within(table->key_set(), kOrdinary)) return false;
  return true;
}

bool wanted(const Tensor& x, const Tables& tables) {
  if (!at::GradMode::is_enabled()) return false;
  if (x.requires_grad()) return true;
  for (const Tensor* table : tables)
    if (table && table->requires_grad()) return true;
  return false;
}

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

// Autograd.

variable_list gradients(const Tensor& grad, const variable_list& saved, int64_t channel_dim, bool need_input, bool need_parameters) {
  const Tensor& x = saved[0];
  const Tables tables{&saved[1], &saved[2], &saved[3], &saved[4], &saved[5]};
  const bool differentiated = at::GradMode::is_enabled() || dual(x, tables) || dual(grad, {});
  if (!differentiated && usual(x, tables) && usual(grad, {}))
    if (auto found = run_backward(grad, x, tables, channel_dim, need_parameters)) return *found;
  static const auto op = operator_<Backward>("pwlu::backward");
  auto call = [&] {
    return op.call(grad, x, saved[1], saved[2], saved[3], saved[4], saved[5], channel_dim, need_input, need_parameters);
  };
  auto all = differentiated ? call() : [&] { at::AutoDispatchBelowAutograd guard; return call(); }();
  variable_list found = std::apply([](auto&... each) { return variable_list{each...}; }, all);
  if (!need_input) found[0] = Tensor();
  for (size_t i = 1; !need_parameters && i < 6; ++i) found[i] = Tensor();
  return found;
}

bool any_parameter(const AutogradContext* ctx) {
  for (size_t i = 1; i < 6; ++i)
    if (ctx->needs_input_grad(i)) return true;
  return false;
}

// y, keeping x and the parameters alone.
struct Forward : torch::autograd::Function<Forward> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, PARAMETERS, int64_t channel_dim) {
    ctx->save_for_backward({x, left, right, heights, left_slope, right_slope});
    ctx->saved_data["channel_dim"] = channel_dim;
    if (usual(x, TABLES)) return ::forward(ARGUMENTS);
    static const auto op = operator_<Map>("pwlu::forward");
    return below_autograd(op, ARGUMENTS);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t channel_dim = ctx->saved_data["channel_dim"].toInt();
    auto found = gradients(grads[0], ctx->get_saved_variables(), channel_dim, ctx->needs_input_grad(0), any_parameter(ctx));
    found.emplace_back();
    return found;
  }
};

// y and the moments of x: the parameters stand still, so their gradients are zero, but not missing.
// The moments leave by reference: of outputs that have no derivatives, compiled autograd knows nothing.
struct ObserveFunction : torch::autograd::Function<ObserveFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, PARAMETERS, int64_t channel_dim, Observed& found) {
    ctx->save_for_backward({x, left, right, heights, left_slope, right_slope});
    ctx->saved_data["channel_dim"] = channel_dim;
    ctx->set_materialize_grads(false);
    static const auto op = operator_<Observe>("pwlu::observe");
    found = usual(x, TABLES) ? ::observe(ARGUMENTS) : below_autograd(op, ARGUMENTS);
    return std::get<0>(found);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    variable_list found(8);
    if (ctx->needs_input_grad(0) && grads[0].defined())
      found[0] = gradients(grads[0], saved, ctx->saved_data["channel_dim"].toInt(), true, false)[0];
    const bool at_once = usual(saved[0], {&saved[1], &saved[2], &saved[3], &saved[4], &saved[5]});  // with one launch
    std::vector<Tensor> zeros;
    for (size_t i = 1; i < 6; ++i) {
      if (!ctx->needs_input_grad(i)) continue;
      found[i] = at_once ? at::empty_like(saved[i]) : at::zeros_like(saved[i]);
      if (at_once) zeros.push_back(found[i]);
    }
    if (!zeros.empty()) at::_foreach_zero_(zeros);
    return found;
  }
};

Tensor forward_autograd(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  static const auto op = operator_<Map>("pwlu::forward"), python = operator_<Map>("pwlu_python::autograd_forward");
  if (transformed(x, TABLES)) return python.call(ARGUMENTS);
  if (wanted(x, TABLES)) return Forward::apply(ARGUMENTS);
  return usual(x, TABLES) ? forward(ARGUMENTS) : below_autograd(op, ARGUMENTS);
}

Observed observe_autograd(const Tensor& x, PARAMETERS, int64_t channel_dim) {
  static const auto op = operator_<Observe>("pwlu::observe"), python = operator_<Observe>("pwlu_python::autograd_observe");
  if (transformed(x, TABLES)) return python.call(ARGUMENTS);
  if (wanted(x, TABLES)) {
    Observed found;
    std::get<0>(found) = ObserveFunction::apply(ARGUMENTS, found);
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
