"""Constraints: the projection against plain Python, every combination, training, copies, saving, deployment, rounding."""

import copy
import itertools
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import pwlu
from pwlu import reference
from pwlu.units import constraints
from pwlu.units.constraints import Constraint, isotonic, project, satisfies

RANGE = (-0.75, 1.25)
COMBINATIONS = [
    Constraint(lipschitz, monotone, convex, odd, limits)
    for lipschitz, monotone, convex, odd, limits in itertools.product(
        (None, 1.0, 0.3), (False, True), (False, True), (False, True), (None, RANGE)
    )
    if not (convex and limits) and (lipschitz or monotone or convex or odd or limits)
]


def random_rows(count=200, intervals=8, seed=0, dtype=torch.float32):
    """Return functions of all kinds: smooth, wild, with bounds that are narrow, crossed or far from 0."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, intervals + 5, generator=generator, dtype=torch.float64)
    rows[:, 0] = -rows[:, 0].abs() * 3
    rows[:, 1] = rows[:, 1].abs() * 3 + 0.01
    rows[: count // 8, :2] += 100
    rows[count // 8 : count // 4, 1] = rows[count // 8 : count // 4, 0] - 0.1  # crossed
    rows[count // 4 : count // 3, 4:] *= 1e4
    rows[count // 3 : count // 2, 4:] *= 0.01
    return rows.to(dtype)


def pooled(values):
    """Pool adjacent violators, in plain Python."""
    blocks = []
    for value in values:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [[(a * m + b * n) / (m + n), m + n]]
    return [value for value, number in blocks for _ in range(number)]


def projected(row, constraint):
    """The projection of one function in plain Python and float64, without margins for rounding."""
    left, right, k_l, k_r, *heights = (float(number) for number in row)
    n = len(heights) - 1
    if constraint.odd:
        right = (right - left) / 2
        left, k_l = -right, (k_l + k_r) / 2
        k_r, heights = k_l, [(heights[k] - heights[n - k]) / 2 for k in range(n + 1)]
    d = (right - left) / n
    slopes = [k_l, *((b - a) / d for a, b in itertools.pairwise(heights)), k_r]
    if constraint.convex:
        slopes = [sum(slopes) / len(slopes)] * len(slopes) if constraint.odd else pooled(slopes)
    high = float("inf") if constraint.lipschitz is None else constraint.lipschitz
    low = 0.0 if constraint.monotone else -high
    slopes = [min(max(slope, low), high) for slope in slopes]
    sums = [0.0, *itertools.accumulate(slope * d for slope in slopes[1:-1])]
    shift = sum(heights) / len(heights) - sum(sums) / len(sums)
    heights = [number + shift for number in sums]
    k_l, k_r = slopes[0], slopes[-1]
    if constraint.range is not None:
        low, high = constraint.range
        low, high = (-min(-low, high), min(-low, high)) if constraint.odd else (low, high)
        heights, k_l, k_r = [min(max(y, low), high) for y in heights], 0.0, 0.0
    return [left, right, k_l, k_r, *heights]


def test_isotonic_regression():
    values = torch.randn(300, 18, dtype=torch.float64)
    values[100:200] = values[100:200].round()  # ties
    expected = torch.tensor([pooled(row) for row in values.tolist()], dtype=torch.float64)
    fitted = isotonic(values)
    torch.testing.assert_close(fitted, expected, rtol=0, atol=1e-13)
    assert (fitted.diff(dim=1) >= 0).all()


def test_isotonic_regression_in_parts(monkeypatch):
    values = torch.randn(50, 6, dtype=torch.float64)
    whole = isotonic(values)
    monkeypatch.setattr("pwlu.units.constraints._LARGEST_TABLE", 100)
    assert torch.equal(isotonic(values), whole)


@pytest.mark.parametrize("constraint", COMBINATIONS, ids=str)
def test_projection_is_that_of_plain_python(constraint):
    rows = random_rows(dtype=torch.float64)
    rows = rows[rows[:, 1] - rows[:, 0] > 0.1]
    new = project(rows, constraint)
    expected = torch.tensor([projected(row, constraint) for row in rows.tolist()], dtype=torch.float64)
    size = rows.abs().amax(1, keepdim=True) / (rows[:, 1:2] - rows[:, :1]).clamp(max=1) + 1
    assert ((new - expected).abs() <= 1e-12 * size).all()  # float64: 2^-53 times the number of terms and the largest slope


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("constraint", COMBINATIONS, ids=str)
def test_every_combination_holds(constraint, dtype):
    """After all projections every single constraint holds, checked here in exact arithmetic on the stored parameters."""
    rows = random_rows(dtype=dtype)
    new = project(rows, constraint)
    assert satisfies(new, constraint).all()
    assert torch.equal(project(new, constraint), new)  # not a bit changes
    left, right, k_l, k_r, *_ = new.double().unbind(1)
    heights = new.double()[:, 4:]
    step = (right - left) / (heights.shape[1] - 1)
    assert (step > 0).all()
    rises = heights.diff(dim=1)
    if constraint.lipschitz:
        assert (rises.abs() <= constraint.lipschitz * step[:, None] * (1 + 1e-15)).all()
        assert (torch.stack([k_l, k_r]).abs() <= constraint.lipschitz).all()
    if constraint.monotone:
        assert (rises >= 0).all()
        assert (torch.stack([k_l, k_r]) >= 0).all()
    if constraint.convex:
        slopes = torch.cat([k_l[:, None], rises / step[:, None], k_r[:, None]], 1)
        rounding = 2 * torch.finfo(dtype).eps * (heights.abs().amax(1) / step + slopes.abs().amax(1))
        assert (slopes.diff(dim=1) >= -rounding[:, None]).all()
    if constraint.odd:
        assert torch.equal(heights, -heights.flip(1))
        assert torch.equal(left, -right)
        assert torch.equal(k_l, k_r)
    if constraint.range:
        assert (heights >= RANGE[0]).all()
        assert (heights <= RANGE[1]).all()
        assert not torch.stack([k_l, k_r]).any()


def test_satisfied_constraints_change_nothing():
    act = pwlu.PWLU(3)
    before = act.weight.detach().clone()
    pwlu.constrain_(act, lipschitz=1.0, monotone=True, convex=True)  # ReLU
    assert torch.equal(act.weight, before)


def test_values_that_are_not_finite_stay():
    rows = random_rows(12)
    rows[0, 5], rows[1, 0], rows[2, 2] = torch.nan, -torch.inf, torch.inf
    new = project(rows, Constraint(lipschitz=1.0, convex=True))
    torch.testing.assert_close(new[:3], rows[:3], rtol=0, atol=0, equal_nan=True)
    assert new[3:].isfinite().all()
    assert satisfies(new[3:], Constraint(lipschitz=1.0, convex=True)).all()


def test_large_and_small_values():
    rows = torch.tensor([[1e-30, 1.1e-30, 0, 1, 3e38, -3e38, 5], [1e30, 1.1e30, 2, 1, 1e-40, 1, 5], [5, 5, 1, 0, 7, 7, 7]])
    for constraint in COMBINATIONS:
        assert satisfies(project(rows, constraint), constraint).all(), constraint


@pytest.mark.parametrize("constraint", [Constraint(0.001, odd=True), Constraint(0.001, convex=True), Constraint(1e6)], ids=str)
def test_small_numbers_with_few_bits(constraint):
    """Numbers below the smallest normal one have a rounding error of their own, and 1e6 is more than float16 can hold."""
    rows = random_rows(intervals=4)
    rows[:, :2] *= 0.02
    new = project(rows.half(), constraint)
    assert satisfies(new, constraint).all()
    assert torch.equal(project(new, constraint), new)


def test_odd_keeps_an_odd_function_between_other_bounds():
    act = pwlu.PWLU(1, intervals=8, bounds=(-1.0, 3.0), init="identity")
    pwlu.constrain_(act, odd=True)
    x = torch.linspace(-5, 5, 41)
    torch.testing.assert_close(act(x), x)
    assert act.right.item() == -act.left.item() == 3.0


# Training.


def network(channels=6):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, channels), pwlu.PWLU(channels, 8), nn.Linear(channels, channels), pwlu.PWLU(1, 8))


def train(model, optimizer, steps=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(32, 4, generator=generator)
        (model(x) * torch.randn(32, 6, generator=generator)).sum().backward()
        optimizer.step()


def units_hold(model):
    for unit in (module for module in model.modules() if isinstance(module, pwlu.PWLU)):
        weight = unit.weight.detach()
        rows = weight[reference.parameter_indices((weight.shape[0],), unit.intervals, weight.device)]
        if not satisfies(rows, unit.constraint).all():
            return False
    return True


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("constraint", COMBINATIONS[::4], ids=str)
def test_after_every_step(constraint, optimizer):
    model = network()
    assert pwlu.constrain_(model, **constraint._asdict()) == ["1", "3"]
    optimizer = optimizer(model.parameters(), lr=0.03)
    start = model[1].weight.detach().clone()
    for _ in range(5):
        train(model, optimizer, 1)
        assert units_hold(model)
    assert not torch.equal(model[1].weight, start)


def test_training_without_constraint_breaks_it():
    """The other tests can fail."""
    model = network()
    train(model, torch.optim.SGD(model.parameters(), lr=0.3))
    model[1].constraint = model[3].constraint = Constraint(lipschitz=1.0)
    assert not units_hold(model)
    assert "violated by" in str(pwlu.describe(model))


def test_only_the_units_of_the_optimizer():
    """A step of another optimizer does not touch them."""
    model, other = network(), nn.Linear(2, 2)
    pwlu.constrain_(model, lipschitz=1.0)
    with torch.no_grad():
        model[1].weight += 100 * torch.randn_like(model[1].weight)
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight, before)


def test_one_computation_for_all_units(monkeypatch):
    calls = []
    monkeypatch.setattr("pwlu.units.constraints.project", lambda rows, constraint: calls.append(len(rows)) or rows)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for unit in (model[1], model[3]):
        pwlu.constrain_(unit, lipschitz=1.0)
    calls.clear()
    train(model, optimizer, 1)
    assert calls == [7]


def test_two_phases():
    model = network()
    optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1))
    pwlu.constrain_(model, lipschitz=0.5, odd=True)
    phases = pwlu.TwoPhase(model, optimizer, realign_at=3)
    start = model[1].weight.detach().clone()
    for step in range(6):
        train(model, optimizer, 1, seed=step)
        assert units_hold(model)
        assert phases.phase == (1 if step < 2 else 2)
        assert torch.equal(model[1].weight, start) == (step < 2)


def test_remove_and_replace():
    model = network()
    pwlu.constrain_(model, lipschitz=0.1)
    assert "constraint='0.1-Lipschitz'" in repr(model[1])
    pwlu.constrain_(model[1], monotone=True)
    assert model[1].constraint == Constraint(monotone=True)
    assert model[3].constraint == Constraint(lipschitz=0.1)
    pwlu.constrain_(model)
    assert model[1].constraint is model[3].constraint is None
    train(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model[1].constraint = Constraint(monotone=True)
    model[3].constraint = Constraint(lipschitz=0.1)
    assert not units_hold(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_with_the_constraint(copied):
    model = network()
    pwlu.constrain_(model, lipschitz=1.0)
    model = copied(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.3))
    assert units_hold(model)


def test_threads():
    """Steps in one thread while others make copies."""
    model = nn.Sequential(nn.Linear(4, 8), pwlu.PWLU(8))
    pwlu.constrain_(model, lipschitz=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    copies = [copy.deepcopy(model) for _ in range(200)]

    def step(_):
        for _ in range(200):
            optimizer.step()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            stepped = pool.map(step, [0])
            copies += pool.map(copy.deepcopy, [model] * 200)
            list(stepped)  # raises the error of its thread
    finally:
        sys.setswitchinterval(before)


def test_averages_of_weights_keep_constraints():
    constraint = Constraint(1.0, True, False, True, RANGE)
    mean = (project(random_rows(seed=1), constraint).double() + project(random_rows(seed=2), constraint).double()) / 2
    assert satisfies(mean, constraint).all()


def test_start_and_weights_from_before_the_conversion():
    """The projected start counts as the start: weights without PWLUs load, and reset_parameters comes back to it."""
    model = nn.Sequential(nn.Linear(4, 6), pwlu.PWLU(6, init="silu"))
    pwlu.constrain_(model, lipschitz=0.5, odd=True)
    start = model[1].weight.detach().clone()
    model.load_state_dict(nn.Sequential(nn.Linear(4, 6), nn.ReLU()).state_dict())
    train(nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))
    model[1].reset_parameters()
    assert torch.equal(model[1].weight, start)


def test_resume(tmp_path):
    pytest.importorskip("safetensors")
    model = network()
    pwlu.constrain_(model, lipschitz=1.0, range=RANGE)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer, 3)
    pwlu.save(model, tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU())
    pwlu.load_into(other, tmp_path / "model.safetensors")
    assert other[1].constraint == model[1].constraint == Constraint(1.0, range=RANGE)
    again = torch.optim.Adam(other.parameters(), lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # the tensors would be shared
    for each in ((model, optimizer), (other, again)):
        train(*each, 3, seed=2)
    assert units_hold(other)
    assert torch.equal(model[1].weight, other[1].weight)
    assert pwlu.load_into(other, tmp_path / "model.safetensors") == []


# Deployment.


@pytest.mark.parametrize("constraint", COMBINATIONS[::3], ids=str)
def test_simplify_keeps_it(constraint):
    model = network()
    pwlu.constrain_(model, **constraint._asdict())
    train(model, torch.optim.SGD(model.parameters(), lr=0.05))
    before = copy.deepcopy(model)
    pwlu.refine_(model, 16)
    assert units_hold(model)
    report = pwlu.simplify_(model, tolerance=0.05)
    assert all(unit.relative <= 0.05 for unit in report)
    x = torch.linspace(-3, 3, 200)[:, None].expand(-1, 6)
    for old, new in ((before[1], model[1]), (before[3], model[3])):
        if isinstance(new, pwlu.PWLU):
            assert units_hold(new)
        y = new(x.double().float()).detach().double()
        slope = y.diff(dim=0) / x.double().diff(dim=0)
        rounding = 1e-6 * (1 + y.abs().max()) / 0.03
        if constraint.lipschitz:
            assert slope.abs().max() <= constraint.lipschitz + rounding
        if constraint.monotone:
            assert slope.min() >= -rounding
        if constraint.odd:
            assert (y + y.flip(0)).abs().max() <= 1e-5 * (1 + y.abs().max())
        assert old is not new


def test_simplify_finds_fewer_intervals():
    model = nn.Sequential(pwlu.PWLU(2, 16, init="softplus"))
    pwlu.constrain_(model, lipschitz=1.0, convex=True)
    (unit,) = pwlu.simplify_(model, tolerance=0.02)
    assert unit.became == "fewer"
    assert units_hold(model)


def lipschitz_network(channels=16):
    """Return linear layers of norm 1 and PWLUs of slope 1, trained a little so that many slopes are at their limit."""
    torch.manual_seed(0)
    layers = [orthogonal(nn.Linear(channels, channels)) for _ in range(3)]
    model = nn.Sequential(layers[0], pwlu.PWLU(channels), layers[1], pwlu.PWLU(channels), layers[2])
    pwlu.constrain_(model, lipschitz=1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(30):
        optimizer.zero_grad()
        x = torch.randn(64, channels)
        (model(x) - 10 * torch.sin(7 * x)).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("fused", [False, True])
def test_a_million_pairs(fused):
    """|f(x) - f(y)| <= |x - y| up to rounding, near and far."""
    model = lipschitz_network()
    slopes = torch.cat([model[i].heights.diff(dim=1) / ((model[i].right - model[i].left) / 16)[:, None] for i in (1, 3)])
    assert slopes.abs().max() > 0.999  # at the limit
    blocks = {i: [block.detach() for block in model[i].blocks()] for i in (1, 3)}
    if fused:
        pwlu.fuse_(model)
    numbers = [block.abs().max().item() for i in (1, 3) for block in blocks[i][:3]]
    norms = []
    for layer in model:
        layer.register_forward_hook(
            lambda _, given, got: norms.append(max(given[0].norm(dim=1).max(), got.norm(dim=1).max()).item())
        )
    count, channels, generator = 10**6, 16, torch.Generator().manual_seed(0)
    for part in range(10):
        x = 3 * torch.randn(count // 10, channels, generator=generator)
        y = x + torch.randn(x.shape, generator=generator) * 10.0 ** -(part % 5)
        distance = (x.double() - y.double()).norm(dim=1)
        with torch.no_grad():
            values, others = model(x), model(y)
        size = max(norms) + max(numbers)
        # Rounding: a sum of 16 products and a bias errs by 17 units of |w| |x|, where a row w has norm 1. A PWLU errs by 32
        # units of its largest numbers (docs/constraints.md). The norm over 16 channels is at most 4 times that.
        rounding = 2 * 4 * 2.0**-24 * size * (3 * 17 + 2 * 32)
        assert rounding < 0.005
        # An orthogonal matrix in float32 has a norm of at most 1 + 17 * 4 units per layer.
        norm = (1 + 68 * 2.0**-24) ** 3
        assert ((values.double() - others.double()).norm(dim=1) <= norm * distance + rounding).all()


def test_rounding_of_the_forward_pass():
    """The computed function is within 32 units of (L max(|x|, |B|) + max |Y|) of the exact one, and so is the fused one."""
    rows = project(random_rows(400, 16), Constraint(lipschitz=1.0))
    blocks = rows[:, 0], rows[:, 1], rows[:, 4:], rows[:, 2], rows[:, 3]
    x = torch.cat([torch.randn(400, 500) * 4, rows[:, :1] + (rows[:, 1:2] - rows[:, :1]) * torch.rand(400, 500)], 1)
    exact = reference.forward(x.double(), *(block.double() for block in blocks), channel_dim=0)
    largest = torch.maximum(x.abs(), rows[:, :2].abs().amax(1, keepdim=True))
    rounding = 32 * 2.0**-24 * (largest + rows[:, 4:].abs().amax(1, keepdim=True)).double()
    computed = pwlu.functional.pwlu(x, *blocks, channel_dim=0)
    assert ((computed.double() - exact).abs() <= rounding).all()
    act = pwlu.PWLU(400, 16, channel_dim=0).eval()
    act.assign(left=blocks[0], right=blocks[1], heights=blocks[2], left_slope=blocks[3], right_slope=blocks[4])
    pwlu.fuse_(act)
    assert ((act(x).double() - exact).abs() <= rounding).all()


def test_describe():
    model = network()
    pwlu.constrain_(model[1], lipschitz=1.0, odd=True, range=(-1, 1))
    shapes = pwlu.describe(model)
    assert [unit.constraint for unit in shapes] == ["1-Lipschitz, odd, range (-1, 1)", ""]
    assert str(shapes).endswith("\n1: 1-Lipschitz, odd, range (-1, 1)")
    assert {row["constraint"] for row in shapes.as_dicts()} == {"1-Lipschitz, odd, range (-1, 1)", ""}
    assert '"constraint":"1-Lipschitz, odd, range (-1, 1)"' in shapes.to_json()


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lipschitz": 0}, "positive number such as 1.0, not 0"),
        ({"lipschitz": True}, "positive number such as 1.0, not True"),
        ({"lipschitz": float("nan")}, "positive number"),
        ({"lipschitz": 10**400}, "positive number"),
        ({"range": (0, 10**400)}, "two finite numbers"),
        ({"lipschitz": "1"}, "positive number such as 1.0, not '1'"),
        ({"monotone": 1}, "monotone must be True or False, not 1"),
        ({"convex": None}, "convex must be True or False"),
        ({"range": 3}, r"two finite numbers a < b such as \(0.0, 6.0\), not 3"),
        ({"range": (1, 0)}, "two finite numbers a < b"),
        ({"range": (0, float("inf"))}, "two finite numbers a < b"),
        ({"convex": True, "range": (0, 1)}, "a convex function that stays within a range is constant"),
        ({"odd": True, "range": (0, 1)}, r"needs a range around 0.*Write range=\(-1, 1\)"),
    ],
)
def test_bad_arguments(arguments, message):
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        pwlu.constrain_(model, **arguments)
    assert model[1].constraint is None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_bad_models():
    with pytest.raises(ValueError, match="has no PWLU"):
        pwlu.constrain_(nn.Linear(2, 2), lipschitz=1.0)
    with pytest.raises(TypeError, match="model must be a torch"):
        pwlu.constrain_([], lipschitz=1.0)
    with pytest.raises(ValueError, match="on the meta device"):
        pwlu.constrain_(pwlu.PWLU(device="meta"), lipschitz=1.0)
    with pytest.raises(ValueError, match="no two numbers in range"):
        pwlu.constrain_(pwlu.PWLU(dtype=torch.bfloat16), range=(1.0001, 1.0002))
    with pytest.raises(ValueError, match=r"is torch\.float32, which has no two numbers in range.*use float64"):
        pwlu.constrain_(pwlu.PWLU(), range=(0, 1e-50))
    assert np.isclose(Constraint(range=(0.1, 0.3)).limits(torch.bfloat16), (0.1, 0.3), rtol=2**-6).all()


def test_dynamic_units_are_refused():
    model = torch.nn.Sequential(pwlu.PWLU(4), pwlu.DynamicPWLU(4))
    with pytest.raises(TypeError, match="1 is a DynamicPWLU, whose functions differ between samples"):
        pwlu.constrain_(model, monotone=True)
    assert model[0].constraint is None


def test_a_compiled_step_does_not_compile_the_projection(monkeypatch):
    compiling, project = [], constraints.project

    def recorded(*arguments):
        compiling.append(torch.compiler.is_compiling())
        return project(*arguments)

    unit = pwlu.PWLU(4)
    pwlu.constrain_(unit, lipschitz=1.0)
    optimizer = torch.optim.SGD(unit.parameters(), lr=1.0)
    unit(torch.randn(8, 4)).square().sum().backward()
    monkeypatch.setattr(constraints, "project", recorded)
    torch.compile(optimizer.step, backend="eager")()
    assert compiling == [False]


def test_a_computed_weight_is_refused():
    """Refuse it: the optimizer does not hold it, so nothing would project it."""
    unit = pwlu.PWLU(4)
    pwlu.constrain_(unit, lipschitz=1.0)
    nn.utils.parametrize.register_parametrization(unit, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match="so it cannot be kept 1-Lipschitz"):
        unit(torch.randn(2, 4))


def test_knots_that_learn_are_refused():
    unit = pwlu.PWLU(4)
    pwlu.constrain_(unit, odd=True)
    with pytest.raises(ValueError, match="the PWLU is constrained to be odd"):
        pwlu.NonUniformPWLU.from_uniform(unit)
