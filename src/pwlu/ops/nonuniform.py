"""Define the operators of non-uniform PWLUs.

    nonuniform_forward(x, weight, intervals, channel_dim) -> y
    nonuniform_backward(grad, x, weight, intervals, channel_dim, need_input, need_weight) -> gradients of x and of weight

``weight`` is a knot weight, as ``reference.nonuniform.pack_knots`` returns it. The other arguments are those of ``pwlu.ops``.
"""

from pwlu.kernels import dispatch
from pwlu.ops import define_kind

forward, backward = define_kind("nonuniform_", dispatch.NON_UNIFORM, dispatch.nonuniform_forward, dispatch.nonuniform_backward)
