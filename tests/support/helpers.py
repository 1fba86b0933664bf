"""What the tests compare with: random units, a naive oracle, and error bounds that follow from rounding.

The oracle evaluates the paper's formulas in float64. Only the segments are not its own: those are part of the
definition in the compute type, so they are taken from reference.segments there.
"""

from types import SimpleNamespace

import torch

from pwlu import ops, reference
from pwlu.kernels import cpu, cuda
from pwlu.kernels import dispatch as served
from pwlu.reference import nonuniform

NAMES = ("left", "right", "heights", "left_slope", "right_slope")
OPERATORS = ("forward", "backward", "lookup", "observe", "moments")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CPU_VARIANTS = cpu.usable_variants()
LAYOUTS = ("contiguous", "channels_last", "transposed", "sliced", "expanded", "reversed_dims")


def unit(channels, intervals, dtype=torch.float32, device="cpu", generator=None):
    """Random parameters: bounds around -3 and 3, heights and slopes from a normal distribution."""
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    left, right = -3 + 0.3 * random(channels), 3 + 0.3 * random(channels)
    values = (left, right, random(channels, intervals + 1), random(channels), random(channels))
    return [v.to(device, dtype) for v in values]


def weight_of(parameters):
    """As the operators take them: the weight, and the number of intervals."""
    return reference.pack(*parameters), parameters[2].shape[1] - 1


def knot_weight(channels, intervals, dtype=torch.float64, seed=0):
    """Return the weight of random non-uniform functions."""
    random = torch.Generator().manual_seed(seed)
    widths = torch.rand(channels, intervals, generator=random, dtype=torch.float64) + 0.05
    left = -widths.sum(1) * torch.rand(channels, generator=random, dtype=torch.float64)
    knots = torch.cat([left[:, None], widths], 1).cumsum(1)
    heights = torch.randn(channels, intervals + 1, generator=random, dtype=torch.float64)
    slopes = torch.randn(2, channels, generator=random, dtype=torch.float64)
    return nonuniform.pack_knots(knots, heights, *slopes).to(dtype)


def laid_out(x, layout):
    """x with the same values in another memory layout."""
    if layout == "channels_last" and x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "reversed_dims" and x.ndim > 1:
        return x.permute(*reversed(range(x.ndim))).contiguous().permute(*reversed(range(x.ndim)))
    if layout == "sliced" and x.ndim:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    if layout == "expanded" and x.ndim:
        return x[:1].expand(x.shape)
    return x


def parameter_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def implementations(device):
    """Every code that computes the operators on that device, by name, each with the functions of reference.py."""
    plain = SimpleNamespace(**{name: getattr(served, f"plain_{name}") for name in OPERATORS if name != "observe"})
    plain.observe = _plain_observe
    found = {"reference": plain, "operator": ops}
    if device.type == "cpu":
        found |= {variant: cpu.load(variant) for variant in CPU_VARIANTS}
    if device.type == "cuda":
        kernel = cuda.kernel(torch.cuda.current_device())
        found["cuda"] = SimpleNamespace(**{name: _but_for_float64(kernel, plain, name) for name in OPERATORS})
    return {name: Unpacked(code) for name, code in found.items()}


def names_of_implementations(device):
    return ["reference", "operator", *{"cpu": CPU_VARIANTS, "cuda": ["cuda"]}.get(device.type, [])]


def _plain_observe(x, weight, intervals, dim, pool):
    served.plain_moments(x, dim, pool)
    return served.plain_forward(x, weight, intervals, dim)


def _but_for_float64(kernel, plain, name):
    """The CUDA kernels leave float64 to plain torch, and nothing else that is tested here."""

    def call(*arguments):
        result = getattr(kernel, name)(*arguments)
        assert (result is NotImplemented) == (arguments[0].dtype == torch.float64)
        return getattr(plain, name)(*arguments) if result is NotImplemented else result

    return call


class Unpacked:
    """The operators of some code, with the arguments of reference.py: five parameters, and moments as results."""

    def __init__(self, code):
        self.code = code
        self.lookup = code.lookup

    def forward(self, x, *rest):
        *parameters, dim = rest
        return self.code.forward(x, reference.pack(*parameters), parameters[2].shape[1] - 1, dim)

    def backward(self, grad, x, *rest):
        *parameters, dim, need_input, need_weight = rest
        intervals = parameters[2].shape[1] - 1
        found = self.code.backward(grad, x, reference.pack(*parameters), intervals, dim, need_input, need_weight)
        empty = [not g.numel() for g in found]
        assert need_input or empty[0]
        assert need_weight or empty[1]
        return (found[0] if need_input else None), (list(reference.unpack(found[1], intervals)) if need_weight else None)

    def moments(self, x, channels, dim):
        pool = self._pool(x, channels)
        assert self.code.moments(x, dim, pool) is None
        return tuple(pool)

    def observe(self, x, *rest):
        *parameters, dim = rest
        pool = self._pool(x, parameters[0].shape[0])
        y = self.code.observe(x, reference.pack(*parameters), parameters[2].shape[1] - 1, dim, pool)
        return (y, *pool)

    @staticmethod
    def _pool(x, channels):
        return torch.zeros(3, channels, dtype=reference.compute_dtype(x), device=x.device)


def oracle(x, parameters, channel_dim, grad=None, double_sums=False):
    """y and its error bound and, with grad, the gradients (of x, then of the parameters) and their bounds: all float64.

    u is the unit roundoff of the compute type. With the table form x S + O a kernel makes an error of at most
    u (|S| once, |O| once, the product once, the sum once); the reference computes the knot (3 roundings of up to |B|),
    the slope (4) and the rest (3). 8 u of every term's size covers both, and the bound is not ten times too wide.
    Where positions and sums are of doubles (double_sums), a gradient loses no more than its last rounding.
    """
    compute = reference.compute_dtype(x)
    u = torch.finfo(compute).eps / 2
    rounded = [p.to(compute) for p in parameters]
    left, right, heights, left_slope, right_slope = (p.double() for p in rounded)
    intervals = heights.shape[1] - 1
    value = reference.finite(x.to(compute))
    segment = reference.segments(value, *(reference.along(p, x, channel_dim) for p in rounded[:2]), intervals)
    v = value.double()
    b_l, b_r, k_l, k_r = (reference.along(p, x, channel_dim) for p in (left, right, left_slope, right_slope))
    step = (b_r - b_l) / intervals
    i = segment.clamp(0, intervals - 1)
    y_0, y_1 = (reference.pick(heights, k, x, channel_dim) for k in (i, i + 1))
    at_left, at_right = segment < 0, segment >= intervals
    slope = torch.where(at_left, k_l, torch.where(at_right, k_r, (y_1 - y_0) / step))
    origin = torch.where(at_left, b_l, torch.where(at_right, b_r, b_l + i * step))
    height = torch.where(at_right, y_1, y_0)
    y = (v - origin) * slope + height
    reach = b_l.abs() + b_r.abs()
    of_slope = torch.where(at_left | at_right, slope.abs(), (y_1.abs() + y_0.abs()) / step.abs())
    bound = u * (8 * (v.abs() + reach) * of_slope + 2 * height.abs() + 2 * y.abs()) + rounding(y, x.dtype)
    if grad is None:
        return y, bound
    g = grad.double()
    grad_x = g * slope
    bounds = [u * 8 * g.abs() * of_slope + rounding(grad_x, x.dtype)]
    inside = ~(at_left | at_right)
    width, zero = b_r - b_l, torch.zeros_like(v)
    share = ((v - origin) / step).unsqueeze(-1)
    k, first = torch.arange(intervals + 1, device=x.device), i.unsqueeze(-1)
    table = {
        "left": torch.where(at_left, -slope, torch.where(inside, slope * (v - b_r) / width, zero)),
        "right": torch.where(at_right, -slope, torch.where(inside, slope * (b_l - v) / width, zero)),
        "heights": torch.where(
            inside.unsqueeze(-1),
            (k == first) * (1 - share) + (k == first + 1) * share,
            (k == segment.clamp(0, intervals).unsqueeze(-1)).double(),
        ),
        "left_slope": torch.where(at_left, v - b_l, zero),
        "right_slope": torch.where(at_right, v - b_r, zero),
    }
    gradients = [grad_x]
    # positions in a segment are known to u (|x| + |B|), and are divided by the step
    size = g.abs() * (1 + of_slope) * (1 + (v.abs() + reach) * (1 + 1 / step.abs()))
    for name in NAMES:
        terms = table[name] * (g.unsqueeze(-1) if name == "heights" else g)
        total = over_channel(terms, x, left.shape[0], channel_dim, name == "heights")
        scale = over_channel(size, x, left.shape[0], channel_dim, False)
        gradients.append(total)
        wanted = dict(zip(NAMES, parameters, strict=True))[name].dtype
        loss = 8 * (2.0**-53 if double_sums else u)
        bounds.append(loss * (scale[:, None] if name == "heights" else scale) + rounding(total, wanted))
    return y, bound, gradients, bounds


def over_channel(terms, x, channels, channel_dim, heights):
    """Sum over everything but the channel (and, for heights, the last dimension)."""
    keep = [] if channels == 1 else [channel_dim % x.ndim]
    over = [d for d in range(x.ndim) if d not in keep]
    total = terms.sum(over) if over else terms
    return total.reshape(channels, -1) if heights else total.reshape(channels)


def rounding(y, dtype):
    """Half a unit in the last place of dtype, its denormal numbers included."""
    info = torch.finfo(dtype)
    return info.eps / 2 * y.abs() + info.smallest_normal * info.eps


def assert_within(actual, expected, bound):
    """|actual - expected| <= bound, NaN and infinity in the same places. A NaN in the bound would be no bound at all."""
    actual, bound = actual.double(), bound * 1.01
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    finite = expected.isfinite()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    difference = (actual - expected).abs()
    wrong = torch.where(finite, ~(difference <= bound), ~same)
    if wrong.any():
        worst = torch.where(finite & wrong, difference / bound, 0.0).argmax()
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} differ; the worst is {actual.reshape(-1)[worst]:.9g} where "
            f"{expected.reshape(-1)[worst]:.9g} +- {bound.expand_as(expected).reshape(-1)[worst]:.3g} was expected"
        )


def segment_probe(intervals, left, right, dtype=torch.float32):
    """Parameters whose slopes are the numbers of their segments, -1..N: grad_x for grad = 1 then tells the segment."""
    left, right = torch.tensor([left], dtype=dtype), torch.tensor([right], dtype=dtype)
    step = (right.double() - left.double()) / intervals
    slopes = torch.arange(intervals, dtype=torch.float64)
    heights = torch.cat([torch.zeros(1, dtype=torch.float64), (slopes * step).cumsum(0)])[None].to(dtype)
    return [left, right, heights, torch.tensor([-1.0], dtype=dtype), torch.tensor([float(intervals)], dtype=dtype)]


def wild_values(dtype, parameters):
    """Knots and their neighbours, bounds, numbers of every size, infinities and NaN."""
    left, right = (float(p[0]) for p in parameters[:2])
    intervals = parameters[2].shape[1] - 1
    knots = torch.linspace(left, right, intervals + 1, dtype=torch.float64).to(dtype)
    up, down = (
        (knots.nextafter(torch.tensor(s * torch.inf, dtype=dtype)) for s in (1, -1)) if dtype.itemsize >= 4 else (knots, knots)
    )
    info = torch.finfo(dtype)
    odd = [
        0.0,
        -0.0,
        info.max,
        -info.max,
        info.tiny,
        -info.tiny,
        info.tiny / 2,
        torch.inf,
        -torch.inf,
        torch.nan,
        2.0**31,
        -(2.0**31),
        2.0**33,
    ]
    return torch.cat([knots, up, down, torch.tensor(odd, dtype=torch.float64).to(dtype), (4 * torch.randn(1000)).to(dtype)])
