"""The learning rule "shared": its formulas against dense matrices, what it leaves unchanged, and every way to train."""

import functools

import pytest
import torch
import torch.nn.functional as F
from networks import data, network, of_units, same, train, units, values
from torch import nn, optim

import pwlu
from pwlu.learning.function_table import bends, interval, table_of
from pwlu.learning.shared_rule import SharedRule, find_rule, penalty, share_gradients_, smooth_

RULE = SharedRule(sharing=0.2, bend=0.3)
SGD = functools.partial(optim.SGD, lr=0.05, momentum=0.9)
U = 2.0**-53


def layers(channels=(3, 1, 7), intervals=16, dtype=torch.float64, seed=0):
    """Units with random functions and random gradients."""
    generator = torch.Generator().manual_seed(seed)
    made = [pwlu.PWLU(c, intervals, dtype=dtype) for c in channels]
    for unit in made:
        unit.weight.data += 0.3 * torch.randn(unit.weight.shape, generator=generator, dtype=dtype)
        unit.weight.grad = torch.randn(unit.weight.shape, generator=generator, dtype=dtype)
    return made


def vectors(unit):
    """v = (K_L d, Y_0, ..., Y_N, K_R d) of each function, and d."""
    left, right, heights, left_slope, right_slope = (block.detach() for block in unit.blocks())
    d = ((right - left) / unit.intervals)[:, None]
    return torch.cat([left_slope[:, None] * d, heights, right_slope[:, None] * d], 1), d


def bending(intervals):
    """M, from v to second differences."""
    v = torch.eye(intervals + 3, dtype=torch.float64)
    return torch.cat([v[:, :1], v[:, 1:-1].diff(), v[:, -1:]], 1).diff().T


def step(made, rule=RULE, optimizer=None):
    """One step of the rule alone, without that of the optimizer."""
    optimizer = optimizer or SGD([unit.weight for unit in made])
    groups = share_gradients_(rule, made, optimizer)
    smooth_(rule, groups, optimizer)


# The formulas.


def test_gradients_are_shared_as_the_formula_says():
    made = layers()
    before = [unit.weight.grad.clone() for unit in made]
    share_gradients_(RULE, made, SGD([unit.weight for unit in made]))
    for unit, old in zip(made, before, strict=True):
        _, d = vectors(unit)
        w = d / d.square().mean().sqrt()
        blocks = pwlu.reference.unpack(old, unit.intervals)
        expected = blocks._replace(
            heights=blocks.heights + 0.2 * w * (w * blocks.heights).sum(0),
            left_slope=blocks.left_slope + 0.2 * blocks.left_slope.sum(),
            right_slope=blocks.right_slope + 0.2 * blocks.right_slope.sum(),
        )
        torch.testing.assert_close(unit.weight.grad, pwlu.reference.pack(*expected), rtol=0, atol=64 * U * 10)


@pytest.mark.parametrize("intervals", [1, 5, 16])
def test_the_penalty_is_an_implicit_step_in_the_same_metric(intervals):
    """(I + t P M'M) v_new = v, with dense matrices. Lines are solutions, however large t is."""
    made = layers(intervals=intervals)
    before = [vectors(unit) for unit in made]
    step(made)
    m = bending(intervals)
    for unit, (v, d) in zip(made, before, strict=True):
        w = d / d.square().mean().sqrt()
        metric = torch.eye(unit.channels, dtype=torch.float64) + 0.2 * w @ w.T
        strength = 2 * 0.3 * (intervals / 16) ** 4 / unit.channels * 0.05 / (1 - 0.9)
        matrix = torch.eye(v.numel(), dtype=torch.float64) + strength * torch.kron(metric, m.T @ m)
        expected = torch.linalg.solve(matrix, v.reshape(-1)).view_as(v)
        found, _ = vectors(unit)
        # eigh, two products with orthogonal matrices and a solve, of vectors with N + 3 entries
        bound = 16 * (v.numel() + 16) * U * v.abs().max() * (1 + strength * 16)
        assert (expected - v).abs().max() > 1e4 * bound
        torch.testing.assert_close(found, expected, rtol=0, atol=bound.item())


def test_the_optimum_is_that_of_the_loss_plus_the_penalty():
    """Gradient descent with the rule ends where the gradient of both is 0. Sharing changes the way there only."""
    ends = []
    for sharing in (0.0, 0.5):
        made = layers((4,), 6)
        (unit,) = made
        rule = SharedRule(sharing, 0.3)
        target = unit.weight.detach() + 0.1 * unit.weight.grad
        optimizer = optim.SGD([unit.weight], lr=0.02)
        unit.scale_gradients(left=0.0, right=0.0)
        for _ in range(6000):
            optimizer.zero_grad()
            (0.5 * (unit.effective_weight() - target).square().sum()).backward()
            groups = share_gradients_(rule, made, optimizer)
            optimizer.step()
            smooth_(rule, groups, optimizer)
        ends.append(unit.weight.detach().clone())
    assert (ends[0] - target).abs().max() > 1e-3  # the penalty did something
    total = 0.5 * (unit.effective_weight() - target).square().sum() + penalty(SharedRule(bend=0.3), [unit])
    (gradient,) = torch.autograd.grad(total, unit.weight)
    # An implicit step after an explicit one ends within O(lr) of the optimum.
    assert gradient.abs().max() < 0.05 * (unit.weight - target).abs().max()
    torch.testing.assert_close(*ends, rtol=0, atol=0.05 * (ends[0] - target).abs().max().item())


# What does not change anything.


def test_straight_lines_stay_to_the_last_bit():
    """Heights of 0.25 k and bounds of -2 and 2 are exact in binary."""
    made = [pwlu.PWLU(3, 8, (-2.0, 2.0), init=torch.positive), pwlu.PWLU(1, 4, (-2.0, 2.0), init="identity")]
    for unit in made:
        unit.weight.grad = torch.randn_like(unit.weight)
    before = values(unit.weight for unit in made)
    step(made, SharedRule(bend=1e6))
    assert same(before, [unit.weight for unit in made])


@pytest.mark.parametrize("make", [SGD, optim.Adam])
def test_a_learning_rate_of_0(make):
    model = trained(make=make)
    optimizer = make(model.parameters())
    pwlu.TwoPhase(model, optimizer, 1, rule=RULE)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = values(of_units(model))
    train(model, optimizer, data(2))
    assert same(before, of_units(model))


def trained(make=SGD, rule=RULE, steps=6, dtype=torch.float32):
    """A network that has been realigned and has learned."""
    model = network(dtype)
    optimizer = make(model.parameters())
    pwlu.TwoPhase(model, optimizer, 2, rule=rule)
    train(model, optimizer, data(steps, dtype=dtype))
    return model


def test_phase_one_and_the_step_that_ends_it_are_those_of_the_paper():
    assert same(trained(steps=2).parameters(), trained(rule="paper", steps=2).parameters())
    assert not same(of_units(trained(steps=3)), of_units(trained(rule="paper", steps=3)))
    assert same(trained(rule=None).parameters(), trained(rule="paper").parameters())
    assert same(trained(rule=SharedRule()).parameters(), trained(rule="shared").parameters())


# Independence of size, number of functions and number of intervals.


@pytest.mark.parametrize("power", [-12, 9])
def test_the_size_of_the_inputs_does_not_matter(power):
    """With inputs and outputs times 2^k, gradients of heights are 2^-k times as large; the rest follows to the last bit."""
    factor = 2.0**power
    plain, scaled = layers(), layers()
    for unit in scaled:
        blocks, gradients = unit.blocks(), pwlu.reference.unpack(unit.weight.grad, unit.intervals)
        with torch.no_grad():
            for name in ("left", "right", "heights"):
                getattr(blocks, name).mul_(factor)
                getattr(gradients, name).div_(factor)
    for made in (plain, scaled):
        step(made)
    for one, other in zip(plain, scaled, strict=True):
        for name, power_of in (("left", 1), ("right", 1), ("heights", 1), ("left_slope", 0), ("right_slope", 0)):
            torch.testing.assert_close(
                getattr(other, name) / factor**power_of, getattr(one, name), rtol=1e-13, atol=1e-14, msg=name
            )
            a, b = (getattr(pwlu.reference.unpack(u.weight.grad, u.intervals), name) for u in (one, other))
            torch.testing.assert_close(b * factor**power_of, a, rtol=1e-13, atol=1e-14, msg=name)


def test_the_number_of_functions_does_not_matter():
    """C equal functions that share one gradient move as one does, but for 1/C + sharing in place of 1 + sharing."""
    (one,) = layers((1,))
    moves, penalties = [], []
    for channels in (1, 8, 512):
        unit = pwlu.PWLU(channels, dtype=torch.float64)
        unit.assign(
            **{name: block.detach().expand(channels, *block.shape[1:]) for name, block in one.blocks()._asdict().items()}
        )
        g = pwlu.reference.unpack(one.weight.grad, 16)
        unit.weight.grad = pwlu.reference.pack(*(block.expand(channels, *block.shape[1:]) / channels for block in g))
        penalties.append(penalty(RULE, [unit]).item())
        optimizer = optim.SGD([unit.weight], lr=1.0)
        groups = share_gradients_(RULE, [unit], optimizer)
        moves.append(pwlu.reference.unpack(unit.weight.grad, 16).heights[0] / (1 / channels + RULE.sharing))
        # the implicit step depends on C through 1/C + sharing alone
        optimizer.param_groups[0]["lr"] = 1 / (1 / channels + RULE.sharing)
        smooth_(RULE, groups, optimizer)
        moves[-1] = torch.cat([moves[-1], unit.heights[0].detach()])
    for move in moves[1:]:
        torch.testing.assert_close(move, moves[0], rtol=1e-12, atol=1e-12)
    assert penalties == pytest.approx([penalties[0]] * 3, rel=1e-12)


def test_the_number_of_intervals_hardly_matters():
    """A smooth function changes as much on every grid, up to an error of order 1/N. Otherwise it would differ 256-fold."""
    lost = []
    for intervals in (16, 64, 256):
        unit = pwlu.PWLU(1, intervals, init=lambda x: torch.sin(x) + 0.1 * x.square(), dtype=torch.float64)
        unit.weight.grad = torch.zeros_like(unit.weight)
        x = torch.linspace(-2, 2, 41, dtype=torch.float64)
        before = unit(x)
        step([unit], SharedRule(0.0, 0.3), optim.SGD([unit.weight], lr=5.0))
        lost.append((before - unit(x)).detach())
    assert lost[0].abs().max() > 0.01
    errors = [(each - lost[2]).abs().max() / lost[2].abs().max() for each in lost[:2]]
    assert errors[0] < 0.3
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize("intervals", [4, 64])
def test_heights_of_a_fine_grid_move_as_fast(intervals):
    unit = pwlu.PWLU(2, intervals, dtype=torch.float64)
    unit.weight.grad = torch.ones_like(unit.weight)
    share_gradients_(SharedRule(0.0), [unit], SGD([unit.weight]))
    gradient = pwlu.reference.unpack(unit.weight.grad, intervals)
    assert (gradient.heights == intervals / 16).all()
    assert all((block == 1).all() for name, block in gradient._asdict().items() if name != "heights")


def test_any_strength_is_stable():
    for bend in (1e3, 1e12):
        made = layers(dtype=torch.float32)
        for _ in range(50):
            step(made, SharedRule(10.0, bend))
        for unit in made:
            rows = table_of([unit]).read([unit.weight])
            assert bends(rows, interval(rows)).abs().max() < 1e-5
            assert unit.weight.isfinite().all()


# Ways to train.


OPTIMIZERS = {
    "SGD": SGD,
    "Nesterov": functools.partial(SGD, nesterov=True),
    "foreach": functools.partial(SGD, foreach=True),
    "fused": functools.partial(SGD, fused=True),
    "dampening": functools.partial(SGD, dampening=0.5),
    "AdamW": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.0),
    "AdamW-fused": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.0, fused=True),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.05),
    "Adadelta": optim.Adadelta,
    "Rprop": functools.partial(optim.Rprop, lr=0.001),
    "Adafactor": optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_bends_less_and_learns(name):
    """A strong penalty leaves less curvature than none, and nothing diverges."""
    ends = {}
    for bend in (0.0, 1.0):
        model = trained(OPTIMIZERS[name], SharedRule(0.1, bend), steps=40)
        assert all(p.isfinite().all() for p in model.parameters())
        ends[bend] = pwlu.curvature(model).item()
    assert ends[1.0] < 0.98 * ends[0.0]


def test_adam_gets_the_penalty_at_its_own_rate():
    """With gradients k times as large, Adam's steps are the same, and the rate is 1/k of it: bends count as much per step."""
    made, other = layers(), layers()
    moved = []
    for each, factor in ((made, 1.0), (other, 1000.0)):
        for unit in each:
            unit.weight.grad *= factor
        optimizer = optim.Adam([unit.weight for unit in each], lr=0.01, eps=0)
        groups = share_gradients_(SharedRule(bend=1e-5), each, optimizer)
        optimizer.step()
        start = values(unit.weight for unit in each)
        smooth_(SharedRule(bend=1e-5), groups, optimizer)
        moved.append(torch.cat([unit.weight.detach() - old for unit, old in zip(each, start, strict=True)]))
    torch.testing.assert_close(moved[0], 1000 * moved[1], rtol=1e-3, atol=1e-12)
    assert moved[0].abs().max() > 1e-8


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_minimizes_the_loss_plus_the_penalty(search):
    model = trained()
    optimizer = optim.LBFGS(model.parameters(), lr=0.02 if search is None else 1, max_iter=6, line_search_fn=search)
    phases = pwlu.TwoPhase(model, optimizer, 2, rule=RULE)
    (x, target), totals = data(1)[0], []

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        return loss

    for _ in range(8):
        totals.append((F.mse_loss(model(x), target) + penalty(RULE, units(model))).item())
        found = optimizer.step(closure)
        assert found.item() == pytest.approx(totals[-1], rel=1e-5)
    assert phases.phase == 2
    assert totals[-1] < 0.9 * totals[0]


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure(keyword):
    """The gradients that the closure computes are shared, and those from before do not matter."""
    ends = []
    for closed in (False, True):
        model = network(torch.float64)
        optimizer = SGD(model.parameters())
        pwlu.TwoPhase(model, optimizer, 2, rule=RULE)
        for x, target in data(5, dtype=torch.float64):

            def closure(x=x, target=target, model=model, optimizer=optimizer):
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), target)
                loss.backward()
                return loss

            if closed:
                optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        ends.append(list(model.parameters()))
    assert same(*ends)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_gradscaler(make, fused):
    """Scaled gradients give the same weights to rounding, and a step that is skipped changes nothing at all."""
    ends = []
    for scale in (None, 1024.0):
        model = network(torch.float64)
        optimizer = make(model.parameters(), lr=0.01, fused=fused)
        pwlu.TwoPhase(model, optimizer, 2, rule=RULE)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for number, (x, target) in enumerate(data(6, dtype=torch.float64)):
            for factor in (torch.inf, 1.0) if scale and number == 4 else (1.0,):
                optimizer.zero_grad()
                scaler.scale(F.mse_loss(model(x), target) * factor).backward()
                before = values(model.parameters())
                scaler.step(optimizer)
                scaler.update()
                assert same(before, model.parameters()) == (factor == torch.inf)
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-9)


def test_frozen_units_and_blocks_stay():
    model = network()
    first, second = units(model)
    optimizer = SGD(model.parameters())
    pwlu.TwoPhase(model, optimizer, 1, rule=RULE)
    train(model, optimizer, data(1))
    first.scale_gradients(heights=0.0, left=0.0)
    second.requires_grad_(False)
    second.weight.grad = None
    before = [block.detach().clone() for block in (first.heights, first.left, second.weight)]
    slopes = first.left_slope.detach().clone()
    train(model, optimizer, data(4))
    assert same(before, (first.heights, first.left, second.weight))
    assert not torch.equal(slopes, first.left_slope)


def test_a_frozen_channel_gets_no_gradient_of_the_others():
    (unit,) = layers((3,))
    unit.scale_gradients(heights=0.5)
    for block in pwlu.reference.unpack(unit.gradient_scale, unit.intervals):
        block[1] = 0  # by hand: scale_gradients has one factor for all channels
    unit.weight.grad *= unit.gradient_scale
    before = values(block[1] for block in unit.blocks())
    step([unit])
    assert all((block[1] == 0).all() for block in pwlu.reference.unpack(unit.weight.grad, unit.intervals))
    assert same(before, [block[1] for block in unit.blocks()])


def test_dampening_weakens_the_penalty_as_it_does_gradients():
    made, other = layers(), layers()
    step(made, optimizer=SGD([unit.weight for unit in made], lr=0.05))
    step(other, optimizer=SGD([unit.weight for unit in other], lr=0.1, dampening=0.5))
    assert same([unit.weight for unit in made], [unit.weight for unit in other])


def test_bounds_that_coincide():
    """Without an interval, slopes have no effect on bends. They stay, and nothing becomes NaN."""
    (unit,) = layers((3,))
    unit.assign(right=unit.left.detach())
    before = unit.left_slope.detach().clone()
    step([unit])
    assert unit.weight.isfinite().all()
    assert torch.equal(unit.left_slope, before)


def test_adam_with_hardly_any_gradient():
    """The penalty counts in the size of the gradient: otherwise the rate would be 10^12, and functions become lines."""
    made = layers()
    for unit in made:
        unit.weight.grad *= 1e-12
    optimizer = optim.Adam([unit.weight for unit in made], lr=0.01, eps=1e-30)
    before = values(unit.weight for unit in made)
    groups = share_gradients_(RULE, made, optimizer)
    optimizer.step()
    smooth_(RULE, groups, optimizer)
    assert all((unit.heights - old).abs().max() < 0.2 for unit, old in zip(made, map(heights_of, before), strict=True))


def heights_of(weight):
    return pwlu.reference.unpack(weight, 16).heights


def test_unused_units_stay():
    model = network()
    optimizer = SGD(model.parameters())
    pwlu.TwoPhase(model, optimizer, 1, rule=RULE)
    train(model, optimizer, data(3))
    before = values(of_units(model))
    for x, target in data(2):
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(model[4](model[2](model[1](model[0](x)))), target).backward()  # without the second unit
        optimizer.step()
    assert not torch.equal(before[0], of_units(model)[0])
    assert torch.equal(before[1], of_units(model)[1])


def test_constraints_hold():
    model = network()
    optimizer = SGD(model.parameters())
    pwlu.TwoPhase(model, optimizer, 1, rule=RULE)
    pwlu.constrain_(model, lipschitz=1.0, monotone=True)
    train(model, optimizer, data(5))
    described = pwlu.describe(model)
    assert described is not None
    for unit in units(model):
        rises = unit.heights.diff() * unit.intervals / (unit.right - unit.left)[:, None]
        assert rises.min() >= 0
        assert rises.max() <= 1 + 1e-6


def test_units_of_several_kinds_and_groups():
    """Two N, two dtypes, two learning rates: each moves as it does alone."""

    def made():
        return [*layers((3,), 8), *layers((2,), 16, seed=1), *layers((2, 4), 16, torch.float32, seed=2)]

    together, apart = made(), made()
    rates = (0.1, 0.2, 0.1, 0.3)
    groups = [{"params": [u.weight], "lr": lr} for u, lr in zip(together, rates, strict=True)]
    step(together, optimizer=optim.SGD(groups, momentum=0.9))
    for unit, lr in zip(apart, rates, strict=True):
        step([unit], optimizer=optim.SGD([unit.weight], lr=lr, momentum=0.9))
    assert same([u.weight for u in together], [u.weight for u in apart])
    assert same([u.weight.grad for u in together], [u.weight.grad for u in apart])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """The computation is that of float32, rounded."""
    half, single = layers(dtype=dtype), layers(dtype=dtype)
    for unit in single:
        gradient = unit.weight.grad.float()
        unit.float().weight.grad = gradient
    for made in (half, single):
        step(made)
    assert all(torch.equal(a.weight, b.weight.to(dtype)) for a, b in zip(half, single, strict=True))


def test_dynamic_units():
    """The base function learns by the rule, the directions as before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), pwlu.DynamicPWLU(8), nn.Linear(8, 2))
    model[1].direction_weight.data.normal_()
    model[1].weight.grad, model[1].direction_weight.grad = (
        torch.randn_like(p) for p in (model[1].weight, model[1].direction_weight)
    )
    gradient, directions = model[1].direction_weight.grad.clone(), model[1].direction_weight.detach().clone()
    before = model[1].weight.detach().clone()
    step([model[1]])
    assert torch.equal(model[1].direction_weight.grad, gradient)
    assert torch.equal(model[1].direction_weight, directions)
    assert not torch.equal(model[1].weight, before)


def test_under_autocast():
    made, other = layers(dtype=torch.float32), layers(dtype=torch.float32)
    step(made)
    with torch.autocast("cpu", torch.bfloat16):
        step(other)
    assert same([u.weight for u in made], [u.weight for u in other])


def test_a_compiled_step():
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        model = network(torch.float64)
        optimizer = SGD(model.parameters())
        pwlu.TwoPhase(model, optimizer, 2, rule=RULE)
        take = torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step
        for x, target in data(5, dtype=torch.float64):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            take()
        ends.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [SGD, functools.partial(optim.AdamW, lr=0.01, weight_decay=0.0)])
def test_resumed(make):
    """To the last bit: the rule keeps nothing from one step to the next."""
    expected = trained(make, steps=8)
    model = network()
    optimizer = make(model.parameters())
    pwlu.TwoPhase(model, optimizer, 2, rule=RULE)
    batches = data(8)
    train(model, optimizer, batches[:5])
    other = network()
    resumed = make(other.parameters())
    pwlu.TwoPhase(other, resumed, 2, rule=RULE)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(other, resumed, batches[5:])
    assert same(expected.parameters(), other.parameters())


# Arguments.


def test_names():
    assert find_rule("paper") is None
    assert find_rule(None) is None
    assert find_rule("shared") == SharedRule(sharing=0.1, bend=0.03)
    assert find_rule(RULE) is RULE
    for wrong in ("smooth", 3):
        with pytest.raises(ValueError, match=r"rule must be 'paper', 'shared' or a pwlu\.learning\.shared_rule\.SharedRule"):
            pwlu.TwoPhase(model := network(), SGD(model.parameters()), 2, rule=wrong)
    for name in ("sharing", "bend"):
        for value in (-1.0, float("nan"), float("inf"), True, "0.1"):
            with pytest.raises(ValueError, match=f"SharedRule: {name} must be a number of at least 0"):
                SharedRule(**{name: value})


def test_knots_that_are_not_equally_spaced_are_refused():
    """With one interval, both kinds of weights have the same size, so that nothing else would notice."""
    model = pwlu.NonUniformPWLU(3, intervals=1, init="identity")
    with pytest.raises(TypeError, match="is a NonUniformPWLU, and the rule needs equally spaced knots"):
        pwlu.TwoPhase(model, SGD(model.parameters()), 1, rule=RULE)


def test_a_momentum_of_1_is_refused():
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"momentum is 1\. Write a momentum below 1"):
        pwlu.TwoPhase(model, optimizer, 2, rule="shared")
    pwlu.TwoPhase(model, optimizer, 2)


def test_dampening_without_momentum():
    """SGD ignores it then, and so must the penalty."""
    assert same(*(of_units(trained(functools.partial(optim.SGD, lr=0.05, dampening=d))) for d in (0.0, 0.5)))


def test_units_that_the_optimizer_does_not_hold():
    """A PWLU that was frozen at first needs no optimizer. Unfreezing it later changes no step of the others."""
    model = network()
    first = units(model)[0]
    first.requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    pwlu.TwoPhase(model, optimizer, 1, rule=RULE)
    train(model, optimizer, data(2))
    first.requires_grad_(True)
    before = values([first.weight])
    train(model, optimizer, data(2))
    assert same(before, [first.weight])
