// The operators in eager mode without Python: autograd, memory, and kernel launches.
//
// This file contains no mathematics and makes no decisions. The Python code (__init__.py) registers which kernel to launch for
// which shape. For everything else, this code falls back to the Python implementation: new shapes, modes, transforms, tensor
// subclasses, layouts that need a copy, invalid shapes, and kernels that fail.

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include "eager_dynamic.h"
#include "eager_kernels.h"
#include "eager_norm.h"

namespace {

using Gradients = std::tuple<Tensor, Tensor>;
using DifferentiableNormBackward = std::vector<Tensor>(const Tensor &, const Tensor &, const MaybeTensor &, const Tensor &,
                                                       const MaybeTensor &, const MaybeTensor &, const Tensor &, int64_t,
                                                       double, bool);

template <size_t kLength>
struct Name {
  char text[kLength];
  constexpr Name(const char (&from)[kLength]) { std::copy_n(from, kLength, text); }
};

// Call an operator.
template <class Signature, Name kName, class... Args>
auto call_operator(const Args &...arguments) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(kName.text, "").template typed<Signature>();
  return op.call(arguments...);
}

// Implementations below autograd.

template <class Signature, Name kName, class... Args>
auto by_python(const Args &...arguments) {
  const at::AutoDispatchBelowAutograd guard;
  return call_operator<Signature, kName>(arguments...);
}

Tensor forward(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim) {
  if (auto y = run_forward(x, weight, intervals, channel_dim)) return *y;
  return by_python<decltype(forward), "pwlu_python::serve_forward">(x, weight, intervals, channel_dim);
}

Tensor observe(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim, Tensor pool) {
  // In a backward pass, gradient checkpointing recomputes forward: fall back to Python, which does not count the input again.
  if (torch::autograd::get_current_graph_task_id() == -1)
    if (auto y = run_forward(x, weight, intervals, channel_dim, pool)) return *y;
  return by_python<decltype(observe), "pwlu_python::serve_observe">(x, weight, intervals, channel_dim, pool);
}

Gradients backward(const Tensor &grad, const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim,
                   bool need_input, bool need_weight) {
  if (auto found = run_backward(grad, x, weight, intervals, channel_dim, need_input, need_weight)) return *found;
  return by_python<decltype(backward), "pwlu_python::serve_backward">(grad, x, weight, intervals, channel_dim, need_input,
                                                                      need_weight);
}

Tensor lookup(const Tensor &x, const Tensor &left, const Tensor &inv_step, const Tensor &slopes, const Tensor &offsets,
              int64_t channel_dim) {
  if (auto y = run_lookup(x, {&left, &inv_step, &slopes, &offsets}, channel_dim)) return *y;
  return by_python<decltype(lookup), "pwlu_python::serve_lookup">(x, left, inv_step, slopes, offsets, channel_dim);
}

// Dynamic units.

std::tuple<Tensor, Tensor> dynamic_forward(const Tensor &x, PWLU_UNIT, int64_t intervals, int64_t channel_dim) {
  if (auto both = run_dynamic_forward(x, {PWLU_UNIT_NAMES}, intervals, channel_dim)) return *both;
  return by_python<decltype(dynamic_forward), "pwlu_python::serve_dynamic_forward">(x, PWLU_UNIT_NAMES, intervals, channel_dim);
}

DynamicGradients dynamic_backward(const Tensor &grad, const Tensor &x, PWLU_UNIT, const Tensor &state, int64_t intervals,
                                  int64_t channel_dim) {
  if (auto all = run_dynamic_backward(grad, x, {PWLU_UNIT_NAMES}, state, intervals, channel_dim)) return *all;
  return by_python<decltype(dynamic_backward), "pwlu_python::serve_dynamic_backward">(grad, x, PWLU_UNIT_NAMES, state,
                                                                                      intervals, channel_dim);
}

// A batch norm followed by a PWLU.

Tensor normalization(const Tensor &x, PWLU_NORM_STATE) {
  if (!pool || torch::autograd::get_current_graph_task_id() == -1)  // see observe
    if (auto norm = run_normalization(x, PWLU_NORM_NAMES, pool)) return *norm;
  return by_python<decltype(normalization), "pwlu_python::serve_normalization">(x, PWLU_NORM_NAMES, pool);
}

Tensor norm_forward(const Tensor &x, const MaybeTensor &residual, const Tensor &norm, const Tensor &weight, int64_t intervals) {
  if (auto y = run_norm_forward(x, residual, norm, weight, intervals, std::nullopt)) return *y;
  return by_python<decltype(norm_forward), "pwlu_python::serve_norm_forward">(x, residual, norm, weight, intervals);
}

Tensor norm_observe(const Tensor &x, const MaybeTensor &residual, const Tensor &norm, const Tensor &weight, int64_t intervals,
                    Tensor pool) {
  if (torch::autograd::get_current_graph_task_id() == -1)
    if (auto y = run_norm_forward(x, residual, norm, weight, intervals, pool)) return *y;
  return by_python<decltype(norm_observe), "pwlu_python::serve_norm_observe">(x, residual, norm, weight, intervals, pool);
}

NormGradients norm_backward(const Tensor &grad, const Tensor &x, const MaybeTensor &residual, const Tensor &norm,
                            const Tensor &weight, int64_t intervals) {
  if (auto found = run_norm_backward(grad, x, residual, norm, weight, intervals)) return *found;
  return by_python<decltype(norm_backward), "pwlu_python::serve_norm_backward">(grad, x, residual, norm, weight, intervals);
}

Tensor norm_input(const Tensor &grad, const Tensor &x, const Tensor &norm, const Tensor &weight, int64_t intervals,
                  const MaybeTensor &sums, double count, bool grad_is_of_z) {
  if (auto found = run_norm_input(grad, x, norm, weight, intervals, sums, count, grad_is_of_z)) return *found;
  return by_python<decltype(norm_input), "pwlu_python::serve_norm_input">(grad, x, norm, weight, intervals, sums, count,
                                                                          grad_is_of_z);
}

// Return y and the norm. In training and without a residual, the moments of z follow from the norm.
std::tuple<Tensor, Tensor> norm_act(const Tensor &x, const MaybeTensor &residual, const Tensor &weight, int64_t intervals,
                                    PWLU_NORM_STATE) {
  const MaybeTensor none;
  const bool pool_in_norm = training && !residual;
  Tensor norm = normalization(x, PWLU_NORM_NAMES, pool_in_norm ? pool : none);
  if (!pool || pool_in_norm) return {norm_forward(x, residual, norm, weight, intervals), norm};
  return {norm_observe(x, residual, norm, weight, intervals, *pool), norm};
}

// A call is plain if only autograd and a kernel handle it: no mode, no transform, no tensor subclass, no forward-mode AD.

using c10::DispatchKey;
constexpr auto kPlainKeys =
    c10::DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutogradCPU,
                         DispatchKey::AutogradCUDA, DispatchKey::AutocastCPU, DispatchKey::AutocastCUDA});
constexpr auto kPlainModes = kPlainKeys | c10::DispatchKeySet(DispatchKey::BackendSelect);

bool within(c10::DispatchKeySet keys, c10::DispatchKeySet allowed) { return (keys.raw_repr() & ~allowed.raw_repr()) == 0; }

bool is_plain_tensor(const Tensor &tensor) {
  return !tensor.defined() || (within(tensor.key_set(), kPlainKeys) && !tensor._fw_grad(0).defined());
}
bool is_plain_tensor(const MaybeTensor &tensor) { return !tensor || is_plain_tensor(*tensor); }

template <class... Tensors>
bool is_plain(const Tensors &...tensors) {
  return within(c10::impl::tls_local_dispatch_key_set().included_, kPlainModes) && (... && is_plain_tensor(tensors));
}

// Autograd.

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// The derivative of an operator. `Settings` states what a node saves besides tensors: its name, the number of saved tensors,
// the settings, and `needed`: which inputs need a gradient. `gradients` computes the gradients from all of these.
template <class Settings>
struct Derivative : Node {
  using Saved = std::array<Tensor, Settings::kSaved>;
  std::array<SavedVariable, Settings::kSaved> saved_;
  Settings settings_;

  std::string name() const override { return Settings::kName; }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (auto &each : saved_) each.reset_data();
  }

  Settings asked() const {
    Settings s = settings_;
    for (size_t i = 0; i < s.needed.size(); ++i) s.needed[i] = task_should_compute_output(i);
    return s;
  }

  Saved unpacked() const {
    Saved tensors;
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = saved_[i].unpack();
    return tensors;
  }

  variable_list apply(variable_list &&grads) override {
    const std::lock_guard lock(mutex_);
    return gradients(grads[0], unpacked(), asked());
  }

  // Compiled autograd: a node lists what it depends on, and is recorded as a function of its inputs and of numbers.

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
    for (const auto &each : saved_) args.collect(each, false);
    std::apply([&](const auto &...number) { (args.collect(number), ...); }, Settings(settings_).numbers());
  }

  static variable_list recorded(const variable_list &grads, const std::vector<c10::IValue> &a) {
    Saved tensors;
    Settings s{};
    size_t i = 0;
    for (auto &tensor : tensors) tensor = a[i++].toTensor();
    std::apply([&](auto &...number) { ((number = a[i++].to<std::decay_t<decltype(number)>>()), ...); }, s.numbers());
    for (auto &needed : s.needed) needed = a[i++].toBool();
    return gradients(grads[0], tensors, s);
  }

  variable_list apply_with_saved(const variable_list &grads, torch::dynamo::autograd::SwapSavedVariables &saved) override {
    namespace compiled = torch::dynamo::autograd;
    for (auto &each : saved_) saved.before(each);
    Settings s = asked();
    std::vector<c10::IValue> arguments;
    std::vector<at::TypePtr> types;
    const auto add = [&](const auto &value) {
      arguments.emplace_back(value), types.push_back(c10::getTypePtr<std::decay_t<decltype(value)>>());
    };
    for (const auto &tensor : unpacked()) add(tensor);
    std::apply([&](const auto &...number) { (add(number), ...); }, s.numbers());
    for (const bool needed : s.needed) add(needed);
    const auto metadata = compiled::IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        compiled::get_input_metadata(next_edges()));
    const auto &python = compiled::getPyCompilerInterface();
    static const auto function = python->bind_function(saved.get_py_compiler(), name(), recorded, types);  // bind it only once
    auto found = python->call_function(saved.get_py_compiler(), "apply_functional", function, grads, arguments, metadata);
    for (auto &each : saved_) saved.after(each);
    return found;
  }
};

// The derivative of forward and observe. `phase_one`: the unit is in Phase I, and the gradient of its weight is zero.
struct UnitSettings {
  static constexpr auto kName = "PWLUBackward";
  static constexpr size_t kSaved = 2;  // x, weight
  int64_t intervals, channel_dim;
  bool phase_one;
  std::array<bool, 2> needed;

  auto numbers() { return std::tie(intervals, channel_dim, phase_one); }
};

variable_list gradients(const Tensor &grad, const std::array<Tensor, 2> &saved, const UnitSettings &s) {
  const auto &[x, weight] = saved;
  const auto [need_input, need_weight] = s.needed;
  const bool learns = need_weight && !s.phase_one && grad.defined();
  variable_list found(2);
  if (grad.defined() && (need_input || learns)) {  // undefined: no gradient reaches the output
    Gradients both;
    if (is_plain(grad, x, weight) && !at::GradMode::is_enabled()) {  // enabled only if create_graph=True
      const at::AutoDispatchBelowADInplaceOrView guard;
      both = ::backward(grad, x, weight, s.intervals, s.channel_dim, need_input, learns);
    } else {
      both = call_operator<decltype(::backward), "pwlu::backward">(grad, x, weight, s.intervals, s.channel_dim, need_input,
                                                                   learns);
    }
    if (need_input) found[0] = std::get<0>(both);
    if (learns) found[1] = std::get<1>(both);
  }
  if (need_weight && !learns) found[1] = at::zeros_like(weight);  // not undefined: DistributedDataParallel waits for it
  return found;
}

template <class T>
auto make_node() {  // torch 2.11 uses another type of pointer for nodes than later versions
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) return c10::make_intrusive<T>();
  else return std::shared_ptr<T>(new T(), [](T *node) { deleteNode(node); });
}

// Record the derivative of y.
template <class Settings, class... Saved>
void record(const Tensor &y, torch::autograd::edge_list &&inputs, const Settings &settings, const Saved &...saved) {
  static_assert(sizeof...(saved) == Settings::kSaved);
  auto node = make_node<Derivative<Settings>>();
  node->set_next_edges(std::move(inputs));
  node->saved_ = {SavedVariable(saved, false)...};
  node->settings_ = settings;
  torch::autograd::set_history(y, node);
}

// Return what `serve` returns. Only the call runs below autograd: record() calls the user's hooks of saved tensors.
template <class Serve>
auto below_autograd(Serve serve) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return serve();
}

// Compute y by `serve`, and record its derivative.
template <class Serve>
Tensor differentiable(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim, bool phase_one,
                      Serve serve) {
  const Tensor y = below_autograd(serve);
  if (torch::autograd::compute_requires_grad(x, weight))
    record(y, torch::autograd::collect_next_edges(x, weight), UnitSettings{intervals, channel_dim, phase_one, {}}, x, weight);
  return y;
}

Tensor autograd_forward(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim) {
  if (!is_plain(x, weight))
    return call_operator<decltype(forward), "pwlu_python::differentiate_forward">(x, weight, intervals, channel_dim);
  return differentiable(x, weight, intervals, channel_dim, false, [&] { return forward(x, weight, intervals, channel_dim); });
}

Tensor autograd_observe(const Tensor &x, const Tensor &weight, int64_t intervals, int64_t channel_dim, Tensor pool) {
  if (!is_plain(x, weight, pool))
    return call_operator<decltype(observe), "pwlu_python::differentiate_observe">(x, weight, intervals, channel_dim, pool);
  return differentiable(x, weight, intervals, channel_dim, true,
                        [&] { return observe(x, weight, intervals, channel_dim, pool); });
}

// The derivative of norm_act.

struct NormSettings {
  static constexpr auto kName = "PWLUNormBackward";
  static constexpr size_t kSaved = 6;  // x, residual, weight, gamma, beta, norm
  int64_t intervals;
  double eps, count;
  bool training, phase_one;
  std::array<bool, 5> needed;  // gradients of x, residual, weight, gamma, beta

  auto numbers() { return std::tie(intervals, eps, count, training, phase_one); }
};

MaybeTensor maybe(const Tensor &tensor) { return tensor.defined() ? MaybeTensor(tensor) : MaybeTensor(); }

variable_list gradients(const Tensor &grad, const std::array<Tensor, 6> &saved, const NormSettings &s) {
  const auto &[x, residual, weight, gamma, beta, norm] = saved;
  variable_list found(5);
  if (grad.defined()) {
    if (is_plain(grad, x, residual, weight) && !at::GradMode::is_enabled()) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      const auto [grad_z, sums, grad_weight] = norm_backward(grad, x, maybe(residual), norm, weight, s.intervals);
      const MaybeTensor used = s.training ? MaybeTensor(sums) : MaybeTensor();
      const bool grad_is_of_z = residual.defined();
      if (s.needed[0])
        found[0] = norm_input(grad_is_of_z ? grad_z : grad, x, norm, weight, s.intervals, used, s.count, grad_is_of_z);
      if (s.needed[1] && grad_is_of_z) found[1] = grad_z;
      if (s.needed[2]) found[2] = grad_weight;
      if (s.needed[3] && gamma.defined()) found[3] = sums.select(0, 2).to(gamma.scalar_type());
      if (s.needed[4] && beta.defined()) found[4] = sums.select(0, 0).to(beta.scalar_type());
    } else {
      const auto all = call_operator<DifferentiableNormBackward, "pwlu_python::differentiable_norm_backward">(
          grad, x, maybe(residual), weight, maybe(gamma), maybe(beta), norm, s.intervals, s.eps, s.training);
      for (size_t i = 0; i < 5; ++i)
        if (s.needed[i]) found[i] = all[i];
    }
  }
  if (s.phase_one && s.needed[2]) found[2] = at::zeros_like(weight);  // not undefined: DistributedDataParallel waits for it
  return found;
}

std::tuple<Tensor, Tensor> autograd_norm_act(const Tensor &x, const MaybeTensor &residual, const Tensor &weight,
                                             int64_t intervals, PWLU_NORM_STATE) {
  if (!is_plain(x, residual, gamma, beta, weight, running_mean, running_var, batches, pool))
    return call_operator<decltype(norm_act), "pwlu_python::differentiate_norm_act">(x, residual, weight, intervals,
                                                                                    PWLU_NORM_NAMES, pool);
  const auto both = below_autograd([&] { return norm_act(x, residual, weight, intervals, PWLU_NORM_NAMES, pool); });
  if (!torch::autograd::compute_requires_grad(x, residual, weight, gamma, beta)) return both;
  const auto &[y, norm] = both;
  const auto plain = [](const MaybeTensor &tensor) { return tensor ? *tensor : Tensor(); };
  const double count = double(x.numel()) / double(std::max<int64_t>(x.dim() > 1 ? x.size(1) : 1, 1));
  record(y, torch::autograd::collect_next_edges(x, residual, weight, gamma, beta),
         NormSettings{intervals, eps, count, training, pool.has_value(), {}}, x, plain(residual), weight, plain(gamma),
         plain(beta), norm);
  return both;
}

// The derivative of dynamic_forward.

struct DynamicSettings {
  static constexpr auto kName = "PWLUDynamicBackward";
  static constexpr size_t kSaved = 8;  // x, the parameters, state
  int64_t intervals, channel_dim;
  std::array<bool, 7> needed;

  auto numbers() { return std::tie(intervals, channel_dim); }
};

variable_list gradients(const Tensor &grad, const std::array<Tensor, 8> &saved, const DynamicSettings &s) {
  const auto &[x, PWLU_UNIT_NAMES, state] = saved;
  variable_list found(7);
  if (!grad.defined()) {  // no gradient reaches y; DistributedDataParallel waits for those of the parameters
    for (size_t i = 1; i < 7; ++i)
      if (s.needed[i]) found[i] = at::zeros_like(saved[i]);
    return found;
  }
  DynamicGradients all;
  if (is_plain(grad, x, PWLU_UNIT_NAMES) && !at::GradMode::is_enabled()) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    all = ::dynamic_backward(grad, x, PWLU_UNIT_NAMES, state, s.intervals, s.channel_dim);
  } else {
    all = call_operator<decltype(::dynamic_backward), "pwlu::dynamic_backward">(grad, x, PWLU_UNIT_NAMES, state, s.intervals,
                                                                                s.channel_dim);
  }
  size_t i = 0;
  std::apply([&](const auto &...each) { (((s.needed[i] ? found[i] = each : Tensor()), ++i), ...); }, all);
  return found;
}

std::tuple<Tensor, Tensor> autograd_dynamic_forward(const Tensor &x, PWLU_UNIT, int64_t intervals, int64_t channel_dim) {
  if (!is_plain(x, PWLU_UNIT_NAMES))
    return call_operator<decltype(dynamic_forward), "pwlu_python::differentiate_dynamic_forward">(x, PWLU_UNIT_NAMES, intervals,
                                                                                                  channel_dim);
  const auto both = below_autograd([&] { return dynamic_forward(x, PWLU_UNIT_NAMES, intervals, channel_dim); });
  if (!torch::autograd::compute_requires_grad(x, PWLU_UNIT_NAMES)) return both;
  const auto &[y, state] = both;
  record(y, torch::autograd::collect_next_edges(x, PWLU_UNIT_NAMES), DynamicSettings{intervals, channel_dim, {}}, x,
         PWLU_UNIT_NAMES, state);
  return both;
}

// Other operators run only without a gradient. Python differentiates backward, and raises errors for lookup and the parts of
// norm_act, which have no derivative.
template <auto kServe, Name kPython>
struct WithoutGradient;
template <class Result, class... Args, Result (*kServe)(Args...), Name kPython>
struct WithoutGradient<kServe, kPython> {
  static Result call(Args... args) {
    const auto tensors = std::tuple_cat(tensor_of(args)...);
    const bool plain =
        std::apply([](const auto &...t) { return is_plain(t...) && !torch::autograd::compute_requires_grad(t...); }, tensors);
    if (!plain) return call_operator<Result(Args...), kPython>(args...);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return kServe(args...);
  }
  template <class T>
  static auto tensor_of(const T &value) {
    if constexpr (std::is_same_v<T, Tensor> || std::is_same_v<T, MaybeTensor>) return std::tie(value);
    else return std::tuple<>();
  }
};

void serve(torch::Library &m) {
  m.impl("forward", forward);
  m.impl("backward", backward);
  m.impl("lookup", lookup);
  m.impl("observe", observe);
  m.impl("dynamic_forward", dynamic_forward);
  m.impl("dynamic_backward", dynamic_backward);
  m.impl("normalization", normalization);
  m.impl("norm_forward", norm_forward);
  m.impl("norm_observe", norm_observe);
  m.impl("norm_backward", norm_backward);
  m.impl("norm_input", norm_input);
  m.impl("norm_act", norm_act);
}

void differentiate(torch::Library &m) {
  m.impl("forward", autograd_forward);
  m.impl("backward", WithoutGradient<backward, "pwlu_python::differentiate_backward">::call);
  m.impl("lookup", WithoutGradient<lookup, "pwlu_python::differentiate_lookup">::call);
  m.impl("observe", autograd_observe);
  m.impl("dynamic_forward", autograd_dynamic_forward);
  m.impl("dynamic_backward", WithoutGradient<dynamic_backward, "pwlu_python::differentiate_dynamic_backward">::call);
  m.impl("normalization", WithoutGradient<normalization, "pwlu_python::differentiate_normalization">::call);
  m.impl("norm_forward", WithoutGradient<norm_forward, "pwlu_python::differentiate_norm_forward">::call);
  m.impl("norm_observe", WithoutGradient<norm_observe, "pwlu_python::differentiate_norm_observe">::call);
  m.impl("norm_backward", WithoutGradient<norm_backward, "pwlu_python::differentiate_norm_backward">::call);
  m.impl("norm_input", WithoutGradient<norm_input, "pwlu_python::differentiate_norm_input">::call);
  m.impl("norm_act", autograd_norm_act);
}

TORCH_LIBRARY_IMPL(pwlu, CPU, m) { serve(m); }
TORCH_LIBRARY_IMPL(pwlu, CUDA, m) { serve(m); }
TORCH_LIBRARY_IMPL(pwlu, AutogradCPU, m) { differentiate(m); }
TORCH_LIBRARY_IMPL(pwlu, AutogradCUDA, m) { differentiate(m); }

}  // namespace

// The functions that __init__.py calls.

extern "C" {

void pwlu_register_gpu(const int64_t *key, const Launch *launches, int64_t count, int64_t splits, LaunchKernel by) {
  Key known;
  std::copy(key, key + known.size(), known.begin());
  std::unique_lock lock(learning);
  launch_kernel = by;
  plans[known] = std::make_shared<const Plan>(Plan{{launches, launches + count}, splits});
}

void pwlu_register_cpu(const CpuKernel *kernel) {
  std::unique_lock lock(learning);
  cpu_kernel = *kernel;
}

void pwlu_forget() {
  std::unique_lock lock(learning);
  plans.clear();
  cpu_kernel = {};
}
}
