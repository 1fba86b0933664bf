// What a call is like: whether it is a usual one, and whether its unit has been called before. Part of eager.cpp.
#pragma once

#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/custom_function.h>

#include <atomic>
#include <unordered_map>

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

bool trained(const Tables& tables) {
  for (const Tensor* table : tables)
    if (table && table->requires_grad()) return true;
  return false;
}

bool wanted(const Tensor& x, const Tables& tables) {
  return at::GradMode::is_enabled() && (x.requires_grad() || trained(tables));
}

// The parameters of a unit as one: where it is called several times in a graph, as the heads of detectors are, autograd has one
// gradient to add up from the second call on, and not five.

variable_list parts(const Tensor& one, int64_t channels) {
  const int64_t wide = one.numel() - 4 * channels;
  const auto found = one.split_with_sizes({wide, channels, channels, channels, channels});
  return {found[1], found[2], found[0].view({channels, wide / channels}), found[3], found[4]};
}

struct AsOne : torch::autograd::Function<AsOne> {
  static Tensor forward(AutogradContext* ctx, const Tensor& left, const Tensor& right, const Tensor& heights,
                        const Tensor& left_slope, const Tensor& right_slope) {
    ctx->saved_data["channels"] = heights.size(0);
    return at::empty_strided({length(heights)}, {0}, heights.options());  // nobody reads it
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const int64_t channels = ctx->saved_data["channels"].toInt();
    if (!at::GradMode::is_enabled() && usual(grads[0], {}) && !dual(grads[0], {})) {
      const at::AutoDispatchBelowADInplaceOrView guard;  // they are no views for autograd: each has a version of its own
      return parts(grads[0], channels);
    }
    variable_list found = parts(grads[0], channels);
    for (Tensor& each : found) each = each.clone();
    return found;
  }
};

// torch 2.11 holds nodes by another kind of pointer than later versions.
template <class T> std::weak_ptr<T> weak(const std::shared_ptr<T>& node) { return node; }
template <class T> c10::weak_intrusive_ptr<T> weak(const c10::intrusive_ptr<T>& node) {
  return c10::weak_intrusive_ptr<T>(node);
}

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

std::atomic<int64_t> steps_back = 0;  // calls whose gradients were asked for

struct Called {
  decltype(weak(Tensor().grad_fn())) first;       // the node of the first call: while it lives, its graph does
  WeakTensor as_one{Tensor().getIntrusivePtr()};  // made for the second call, kept by that and all later ones
  int64_t when = steps_back;                      // what follows a backward pass is another graph, even if the old one lives
};

// By heights, in the thread that calls. If the address is another tensor's by now, the edges tell (below).
thread_local std::unordered_map<const c10::TensorImpl*, Called> called;

void remember(const Tables& tables, const Tensor& y) {
  if (called.size() >= 4096) called.clear();  // most of them dead, and the others begin anew
  called.insert_or_assign(tables[2]->unsafeGetTensorImpl(), Called{weak(y.grad_fn())});
}

Tensor as_one(const Tables& tables) {  // undefined for a first call
  const auto* key = tables[2]->unsafeGetTensorImpl();
  const auto place = called.find(key);
  if (place == called.end() || place->second.when != steps_back || place->second.first.expired()) return {};
  const Called known = place->second;
  const Tensor found(known.as_one.lock());
  size_t same = 0;
  if (found.defined())
    while (same < 5 && found.grad_fn()->next_edge(same) == torch::autograd::impl::gradient_edge(*tables[same])) ++same;
  if (same == 5) return found;
  const Tensor made = AsOne::apply(*tables[0], *tables[1], *tables[2], *tables[3], *tables[4]);  // may run hooks: anything
  called.insert_or_assign(key, Called{known.first, WeakTensor(made.getIntrusivePtr()), known.when});
  return made;
}

}  // namespace
