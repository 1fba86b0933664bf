"""Define the operators of PWLUs that differ between samples.

    per_sample_forward(x, weight, intervals, channel_dim) -> y
    per_sample_backward(grad, x, weight, intervals, channel_dim, need_input, need_weight) -> gradients of x and of weight

The samples are in dimension 0 of x. ``weight`` holds one function per sample, or one per sample and channel: see
``reference.dynamic.mix``. The other arguments are those of ``pwlu.ops``.
"""

from pwlu.kernels import dispatch
from pwlu.ops import define_kind

forward, backward = define_kind("per_sample_", dispatch.PER_SAMPLE, dispatch.per_sample_forward, dispatch.per_sample_backward)
