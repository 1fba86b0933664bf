"""The CUDA kernels of the learning rule against the rule in float64, on a GPU or in emulation; and that they can fail."""

import copy
import functools

import pytest
import torch
from cuda_emulator import put_mistake
from helpers import assert_within
from networks import data, network, of_units, same, train
from test_cuda_kernel import fresh, needs_gpu, on_gpu  # noqa: F401  # on_gpu is a fixture
from torch import optim

import pwlu
from pwlu.kernels import dispatch
from pwlu.kernels.cuda import calls
from pwlu.learning.function_table import HEIGHTS, SLOPES, interval, table_of
from pwlu.learning.shared_rule import SharedRule, share_gradients_, smooth_

CHANNELS, INTERVALS = (1, 3, 32, 100, 1024), (1, 2, 4, 16, 64)
SGD, ADAM = functools.partial(optim.SGD, lr=0.05, momentum=0.9), functools.partial(optim.Adam, lr=0.01)
RULES = {
    "default": SharedRule(),
    "strong": SharedRule(sharing=0.2, bend=1e6),
    "no sharing": SharedRule(sharing=0.0, bend=0.3),
    "no bend": SharedRule(bend=0.0),
}
U = 2.0**-24


@pytest.fixture
def use(monkeypatch):
    """Let the rule run on other kernels; on none for None."""
    return lambda kernel: monkeypatch.setattr(dispatch, "_kernel_for_device", lambda device: kernel)


def layers(intervals, device, channels=CHANNELS):
    """Units with random functions and gradients. In some, bounds are crossed or equal; one has no gradient but zeros."""
    made = [pwlu.PWLU(c, intervals, device=device) for c in channels]
    for unit in made:
        unit.weight.data += 0.3 * torch.randn(unit.weight.shape, device=device)
        unit.weight.grad = torch.randn(unit.weight.shape, device=device)
    with torch.no_grad():
        for unit, odd in zip(made[1:], (slice(None), slice(5, 9), slice(0, 0)), strict=False):
            blocks, gradients = unit.blocks(), pwlu.reference.unpack(unit.weight.grad, intervals)
            blocks.right[odd] = blocks.left[odd]
            gradients.left[odd] = gradients.right[odd] = 0  # so that they stay equal
        made[3].left[:7] += 100  # crossed
        made[3].weight.grad.zero_()
    return made


def by_kernels(groups):
    """Return whether kernels share all gradients."""
    return all(hasattr(group, "kept") for group in groups)


def doubled(made):
    other = copy.deepcopy(made)
    for unit, given in zip(other, made, strict=True):
        unit.double().weight.grad = given.weight.grad.double()
    return other


def compare(use, kernel, device, intervals, make=SGD, rule=RULES["default"]):
    """Compare a step of some units by kernels with the same in float64, within bounds that follow from rounding.

    The kernels compute in float64, from `sharing`, t and the shared gradients as float32 numbers. So a shared gradient is off
    by U of itself and of the shared part. The change of a weight is off

    - by U |v| of its function, because solve rounds z: M' L'^-1 D^-1/2 has at most the norm t^-1/2, and |D^-1/2 z| is at
      most t^1/2 |v|;
    - by a quarter of the relative error of t, which is at most 4 U, times |v| + |w| RMS(|v|), because (t q)/(1 + t q)^2 is at
      most a quarter;
    - and the weight is rounded once. Slopes have these errors divided by d.
    """
    made = layers(intervals, device)
    exact = doubled(made)
    optimizer = make([unit.weight for unit in made])
    table = table_of(exact)
    given = table.read([unit.weight.grad for unit in exact])
    use(None)
    expected = share_gradients_(rule, exact, make([unit.weight for unit in exact]))
    use(kernel)
    groups = share_gradients_(rule, made, optimizer)
    assert by_kernels(groups)
    scaled = given.clone()
    scaled[:, HEIGHTS] *= intervals / 16
    shared = expected[0].gradient
    assert_within(table.read([unit.weight.grad for unit in made]), shared, U * (shared.abs() + 2 * (shared - scaled).abs()))
    optimizer.step()
    for unit, other in zip(exact, made, strict=True):
        unit.weight.data.copy_(other.weight)
    before = table.read([unit.weight for unit in made])
    smooth_(rule, groups, optimizer)
    use(None)
    smooth_(rule, expected, make([unit.weight for unit in exact]))
    found, weights = (table.read([unit.weight for unit in units]) for units in (made, exact))
    assert torch.isfinite(weights).all()
    d, w = interval(before), expected[0].share
    v = torch.cat([before[:, SLOPES] * d, before[:, HEIGHTS]], 1).square().sum(1, keepdim=True)
    off = 2 * U * (v.sqrt() + w.abs() * table.layer_mean(v).sqrt())
    bound = U * weights.abs() + off.expand_as(weights)
    bound[:, SLOPES] += torch.where(d == 0, 0.0, off / d.abs())
    bound[:, :2] = 0.0  # the rule does not move bounds
    bound[:, SLOPES][d[:, 0] == 0] = 0.0  # nor slopes without intervals
    assert_within(found, weights, bound)
    return made


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("make", [SGD, ADAM])
@pytest.mark.parametrize("intervals", INTERVALS)
def test_steps(use, kernel, device, intervals, make, rule):
    compare(use, kernel, device, intervals, make, RULES[rule])


def test_the_bits_are_the_same_every_time(use, kernel, device):
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        ends.append(compare(use, kernel, device, 16, ADAM))
    for one, other in zip(*ends, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert torch.equal(one.weight.grad, other.weight.grad)


def test_straight_lines_stay_to_the_last_bit(use, kernel, device):
    use(kernel)
    made = [pwlu.PWLU(c, 8, (-2.0, 2.0), init=torch.positive, device=device) for c in (3, 70)]
    before = [unit.weight.detach().clone() for unit in made]
    for unit in made:
        unit.weight.grad = torch.randn_like(unit.weight)
    optimizer = SGD([unit.weight for unit in made])
    smooth_(SharedRule(bend=1e6), share_gradients_(SharedRule(), made, optimizer), optimizer)
    assert same(before, [unit.weight for unit in made])


def test_rates_and_scales_on_the_device(kernel, device):
    """Halve the rate, and multiply gradients by a scale: as half the strength, and as without the scale."""
    made = layers(16, device)
    before = [unit.weight.detach() for unit in made]
    steps, gradients = ([torch.randn_like(weight) for weight in before] for _ in range(2))
    tensor = functools.partial(torch.tensor, device=device)

    def after(measure, step, factor, *arguments):
        weights = [weight.clone() for weight in before]
        given = [factor * gradient for gradient in gradients]
        kept = kernel.share_gradients(weights, given, CHANNELS, 16, 0.1, measure)
        torch._foreach_add_(weights, steps, alpha=step)
        now = torch.cat(weights)
        kernel.smooth(weights, kept, *arguments)
        return torch.cat(weights), now

    known, now = after(False, 0.01, 1, 0.3, None, None)
    assert torch.equal(after(False, 0.01, 1, 0.6, tensor(0.5), None)[0], known)
    assert torch.equal(after(False, 0.01, 1, 0.6, tensor(0.0), None)[0], now)
    measured, _ = after(True, 0.01, 1, 0.3, None, None)
    assert torch.equal(after(True, 0.01, 4, 0.3, None, tensor(4.0))[0], measured)
    assert not torch.equal(after(True, 0.01, 4, 0.3, None, None)[0], measured)
    assert torch.equal(*after(True, 0.0, 0, 0.3, None, None))


@pytest.mark.parametrize("make", [SGD, ADAM])
def test_a_step_that_a_scaler_skips_changes_nothing(use, kernel, device, make):
    use(kernel)
    made = layers(16, device)
    optimizer = make([unit.weight for unit in made])
    optimizer.found_inf = torch.tensor(1.0, device=device)
    before = [unit.weight.detach().clone() for unit in made]
    groups = share_gradients_(RULES["default"], made, optimizer)
    smooth_(RULES["default"], groups, optimizer)  # the optimizer has not changed any weight
    assert same(before, [unit.weight for unit in made])


def test_training(use, kernel, device, monkeypatch):
    """Launch both kernels in every step of Phase II, and end where torch ends, up to the tolerance of assert_close."""
    launched, launch = [], type(kernel)._launch
    monkeypatch.setattr(
        type(kernel), "_launch", lambda self, plan, *rest: launched.append(plan.kernel) or launch(self, plan, *rest)
    )
    ends = []
    for each in (None, kernel):
        use(each)
        model = network().to(device)
        optimizer = SGD(model.parameters())
        pwlu.TwoPhase(model, optimizer, 2, rule="shared")
        train(model, optimizer, [tuple(t.to(device) for t in batch) for batch in data(5)])
        ends.append([p.detach() for p in of_units(model)])
    torch.testing.assert_close(*ends)
    assert [name for name in launched if name.startswith("rule")] == 3 * ["rule_share_gradients", "rule_smooth"]


def test_what_the_kernels_leave_to_torch(use, kernel, device):
    use(kernel)

    def kernels_run(made, stride=1):
        for unit in made:
            unit.weight.grad = torch.ones_like(unit.weight).repeat_interleave(stride)[::stride]
        return by_kernels(share_gradients_(SharedRule(), made, SGD([unit.weight for unit in made])))

    make = functools.partial(pwlu.PWLU, 3, device=device)
    assert kernels_run([make(16)])
    assert not kernels_run([make(16, dtype=torch.float64)])
    assert not kernels_run([make(16, dtype=torch.bfloat16)])
    scaled = make(16)
    scaled.scale_gradients(heights=0.5)
    assert not kernels_run([make(16), scaled])
    assert not kernels_run([make(16)], stride=2)
    assert not kernels_run([make(4000)])  # more than fits into shared memory
    use(None)
    assert not kernels_run([make(16)])


def test_more_units_than_fit_into_a_launch(use, kernel, device, monkeypatch):
    ends = []
    for most in (calls.RULE_UNITS, 2):
        monkeypatch.setattr(calls, "RULE_UNITS", most)
        torch.manual_seed(0)
        ends.append([unit.weight for unit in compare(use, kernel, device, 16, ADAM)])
    assert same(*ends)


def test_autograd_notices_the_changes(use, kernel, device):
    use(kernel)
    made = layers(16, device)
    optimizer = SGD([unit.weight for unit in made])
    for unit in made:
        unit.saved = unit.weight.grad.clone().requires_grad_() * unit.weight.grad, unit.weight.square().sum()
    smooth_(RULES["default"], share_gradients_(RULES["default"], made, optimizer), optimizer)
    for unit in made:
        for result in unit.saved:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()


def test_several_units_with_one_weight(use, kernel, device):
    use(kernel)
    ends = []
    for units in (1, 2):
        torch.manual_seed(0)
        made = layers(16, device)
        tied = [copy.copy(made[3]) for _ in range(units - 1)]
        optimizer = SGD([unit.weight for unit in made])
        smooth_(RULES["default"], share_gradients_(RULES["default"], [*made, *tied], optimizer), optimizer)
        ends.append([tensor for unit in made for tensor in (unit.weight, unit.weight.grad)])
    assert same(*ends)


def test_an_optimizer_that_replaces_weights(use, kernel, device):
    use(kernel)
    ends = []
    for replaced in (False, True):
        torch.manual_seed(0)
        made = layers(16, device)
        optimizer = SGD([unit.weight for unit in made])
        groups = share_gradients_(RULES["default"], made, optimizer)
        if replaced:
            made[2].weight.data = made[2].weight.data.clone()
        smooth_(RULES["default"], groups, optimizer)
        ends.append([unit.weight for unit in made])
    assert same(*ends)
    made[2].weight.data = made[2].weight.data.repeat_interleave(2)[::2]
    with pytest.raises(RuntimeError, match="the optimizer has changed the dtype or layout of weights"):
        smooth_(RULES["default"], groups, optimizer)


@needs_gpu
def test_in_a_captured_graph(device):
    made = layers(16, device)
    optimizer = SGD([unit.weight for unit in made])
    given, start = ([t.detach().clone() for t in ts] for ts in ([u.weight.grad for u in made], [u.weight for u in made]))

    def step():
        smooth_(RULES["default"], share_gradients_(RULES["default"], made, optimizer), optimizer)

    step()
    expected = [unit.weight.detach().clone() for unit in made]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for unit, weight, gradient in zip(made, start, given, strict=True):
            unit.weight.copy_(weight)
            unit.weight.grad.copy_(gradient)
    graph.replay()
    assert same(expected, [unit.weight for unit in made])


MISTAKES = [
    ("  value = warp_sum(value);\n", ""),
    ("c < functions; c += groups", "c + 1 < functions; c += groups"),
    ("for (int group = 1; group < groups; ++group) sums[i]", "for (int group = 2; group < groups; ++group) sums[i]"),
    ("/ unit.channels + 1e-24", "/ unit.channels + 1e-2"),
    ("speed = a.intervals / 16.0", "speed = 1.0"),
    ("k < 2 ? 1.0 : inverse", "k < 3 ? 1.0 : inverse"),
    ("k > 1 ? t : 0.0;", "0.0;"),
    ("(-4 + (k == 1) + (k == n))", "(-4 + (k == 1))"),
    ("(k == 0 || k == n ? 3 : 6)", "(k == 0 ? 3 : 6)"),
    ("- second[k + 2] * previous", ""),
    ("steps += step * step;", "steps += fabs(step);"),
    ("squares += gradient * gradient + bend * bend;", "squares += gradient * gradient;"),
    ("common_share = share + a.eps", "common_share = share"),
    ("[mine.first + c] = inverse * unit", "[mine.first + c] = unit"),
    ("partial) + mine.first;", "partial);"),
    ("memory, a.sums + first", "memory, a.sums"),
    ("memory = static_cast<float *>(a.out) + first", "memory = static_cast<float *>(a.out)"),
    ("[first + j] = value;", "[first + j] = grad.height(c, k - 2) * 2;"),
    ("[first + j] = unit.height(c, k - 2);", "[first + j] = 0.0f;"),
    ("own_t * share * sums[k]", "own_t * sums[k]"),
    ("of_common * (common.solution[k] - system.solution[k])", "of_common * common.solution[k]"),
    ("(x - after - fall)", "(x - after)"),
    ("change_slope(0, -after)", "change_slope(0, after)"),
    ("fabs(value) <= LARGEST ? value : 0.0", "value"),
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(use, kernel, device, mistake, monkeypatch):
    put_mistake(monkeypatch, *mistake)
    broken = fresh(kernel)
    with pytest.raises(AssertionError):  # noqa: PT012
        for make in (SGD, ADAM):
            compare(use, broken, device, 16, make)
            compare(use, broken, device, 64, make, RULES["strong"])
