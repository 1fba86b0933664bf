"""Dynamic PWLU: its reference, the module, the two phases, conversion, deployment, and the activations to compare with."""

import copy
import math
import pickle
import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.library import opcheck
from torch.nn.parallel import DistributedDataParallel

import pwlu
from pwlu import baselines, reference
from pwlu.ops import dynamic as dynamic_ops
from pwlu.units.squeeze import function_parameters, sample_means

LAYOUTS = ("NCHW", "channels_last", "NHWC", "sliced", "BTC", "matrix", "empty")
KINDS = ((5, None, "channel"), (5, None, "layer"), (1, 5, "channel"), (1, 5, "layer"), (1, None, "channel"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def batch(layout, dtype=torch.float32):
    """Random numbers with five channels, and where these are."""
    x = 2 * torch.randn(3, 5, 6, 7, dtype=torch.float64)
    x = {
        "NCHW": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "NHWC": x.permute(0, 2, 3, 1).contiguous(),
        "sliced": x[..., ::2, 1:],
        "BTC": x[:, :, 0].transpose(1, 2).contiguous(),
        "matrix": x[:, :, 0, 0],
        "empty": x[:0],
    }[layout]
    return x.to(dtype), -1 if layout in ("NHWC", "BTC") else 1


def dynamic(kind=KINDS[0], channel_dim=1, dtype=torch.float32, intervals=6, **options):
    """A unit with random parameters."""
    channels, features, mixing = kind
    act = pwlu.DynamicPWLU(
        channels, intervals, features=features, mixing=mixing, channel_dim=channel_dim, dtype=dtype, **options
    )
    with torch.no_grad():
        act.weight.add_(0.3 * torch.randn_like(act.weight))
        act.direction_weight.normal_()
    return act


def naive(act, x):
    """The definition in float64, from the parameters of the module."""
    wide = copy.deepcopy(act).double()
    x = x.double()
    dim = act.channel_dim % x.ndim
    positions = [d for d in range(1, x.ndim) if d != dim or act.features == 1]
    p = x.mean(positions).reshape(len(x), act.features) if positions else x
    s = wide.squeeze
    a = torch.tanh(F.linear(F.relu(F.linear(p, s.first, s.first_bias)), s.second, s.second_bias))
    return naive_samples(x, wide.blocks(), wide.direction_heights(), a.reshape(len(x), act.directions, -1), dim)


def naive_samples(x, blocks, directions, a, dim):
    """One sample after another, each with heights of its own."""
    heights = blocks.heights + torch.einsum("bmr,mck->brck" if a.shape[2] == 1 else "bmc,mck->bck", a, directions).squeeze(1)
    found = []
    for sample, y in zip(x, heights, strict=True):
        one = [p.expand(len(y)) for p in (blocks.left, blocks.right, blocks.left_slope, blocks.right_slope)]
        found.append(reference.forward(sample, *one[:2], y, *one[2:], dim - 1))
    return torch.stack(found)


def bound(act, x, y):
    """How far rounding moves y: the coefficients are known to about 50 units of rounding, heights and positions to 10."""
    u = torch.finfo(reference.compute_dtype(x)).eps / 2
    size = (act.directions + 1) * float(act.direction_weight.detach().abs().max() + act.weight.detach().abs().max())
    steep = size / float(((act.right - act.left) / act.intervals).detach().min())
    own = torch.finfo(x.dtype).eps / 2 if x.dtype not in (torch.float32, torch.float64) else 0.0
    return u * (60 * size + 20 * steep * (x.double().abs() + 4)) + own * y.abs() + torch.finfo(x.dtype).tiny


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_module_equals_the_reference(layout, dtype, kind):
    x, dim = batch(layout, dtype)
    act = dynamic(kind, dim, torch.float64 if dtype == torch.float64 else torch.float32)
    y = act(x)
    assert (y.dtype, y.shape) == (x.dtype, x.shape)
    if layout != "sliced":
        assert y.stride() == torch.empty_like(x).stride()
    if not x.numel():
        return
    expected = naive(act, x)
    assert bool(((y.double() - expected).abs() <= bound(act, x, expected)).all())
    other = copy.deepcopy(act)
    other.direction_weight.data[0] += 0.5  # the comparison can fail
    assert dtype in (torch.bfloat16, torch.float16) or not torch.equal(other(x), y)


@pytest.mark.parametrize("mixing", ["channel", "layer"])
@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "BTC"])
def test_finite_differences_of_the_gradients_agree(layout, mixing):
    x, dim = batch(layout, torch.float64)
    act = dynamic((5, None, mixing), dim, torch.float64, intervals=3)
    x = (x[:2, :3] if layout == "BTC" else x[:2, :, :2, :2]).clone().requires_grad_()
    assert torch.autograd.gradgradcheck(act, (x,))


def parameters_of(act):
    return [act.weight, act.direction_weight, *act.squeeze.parameters()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "BTC", "sliced", "empty"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck(layout, kind, device):
    x, dim = (t.to(device) if isinstance(t, torch.Tensor) else t for t in batch(layout))
    parameters = parameters_of(dynamic(kind, dim).to(device))
    opcheck(dynamic_ops.forward, (x.requires_grad_(), *parameters, 6, dim))
    x, *parameters = (t.detach() for t in (x, *parameters))
    _, state = dynamic_ops.forward(x, *parameters, 6, dim)
    opcheck(dynamic_ops.backward, (torch.randn_like(x), x, *parameters, state, 6, dim))


def test_operators_check_their_arguments():
    x, good = torch.randn(3, 5, 6), parameters_of(dynamic())
    for i, size in enumerate(((5 * 10,), (2 * 5 * 7 - 1,), (4, 5, 1), (3,), (10, 3), (11,))):
        parameters = [*good[:i], torch.zeros(size), *good[i + 1 :]]
        with pytest.raises(ValueError, match=r"R\n? ?coefficients per direction.* needs the shapes"):
            dynamic_ops.forward(x, *parameters, 6, 1)
    for x_of, dim, message in [
        (x[:, :4], 1, "the activation has 5 channels, but x of shape (3, 4, 6) has 4"),
        (x[0, 0], 1, "at least two dimensions"),
        (torch.randn(5, 5, 6), 0, "holds the samples"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            dynamic_ops.forward(x_of, *good, 6, dim)
    _, state = dynamic_ops.forward(x, *good, 6, 1)
    with torch.no_grad(), pytest.raises(ValueError, match="grad must have the shape"):
        dynamic_ops.backward(x[:2], x, *good, state, 6, 1)


@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "BTC"])
def test_compiled_code_computes_the_same(layout):
    x, dim = batch(layout)
    act = dynamic(channel_dim=dim)
    compiled = torch.compile(act, fullgraph=True, dynamic=False)
    y = compiled(x)
    torch.testing.assert_close(y, act(x))
    assert y.stride() == x.stride()  # as its operator returns, not the formula that it is exported as
    for found, expected in zip(
        torch.autograd.grad(y.square().sum(), act.parameters()),
        torch.autograd.grad(act(x).square().sum(), act.parameters()),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features", [5, 1])
def test_the_gradient_of_the_means_is_not_written_to_memory(features, layout, dtype):
    x, dim = batch(layout, dtype)
    seen = []
    x.requires_grad_().register_hook(seen.append)
    means = sample_means(x, features, dim)
    means.backward(torch.ones_like(means))
    positions = x[0].numel() // features if x.numel() else 1
    torch.testing.assert_close(seen[0], torch.full_like(x, 1 / positions))
    assert seen[0].untyped_storage().nbytes() <= means.numel() * x.element_size()


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
def test_hooks_of_the_network_run(register):
    act, (x, _) = dynamic(), batch("NCHW")
    seen = []
    handle = getattr(act.squeeze, register)(lambda module, *found: seen.append([len(each) for each in found]))
    x.requires_grad_()
    y = act(x)
    found = torch.autograd.grad(y.square().sum(), [x, *act.parameters()])
    assert len(seen) == 1
    handle.remove()
    torch.testing.assert_close(y, act(x))
    expected = torch.autograd.grad(act(x).square().sum(), [x, *act.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_hook_can_replace_the_output_of_the_network():
    act, (x, _) = dynamic(), batch("NCHW")
    act.squeeze.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    expected = pwlu.functional.pwlu(x, *act.blocks())
    torch.testing.assert_close(act(x), expected)
    torch.testing.assert_close(torch.compile(act, fullgraph=True, backend="aot_eager")(x), expected)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_the_weight_norm_of_the_network_is_computed_by_a_hook():
    act, (x, _) = dynamic(), batch("NCHW")
    torch.nn.utils.weight_norm(act.squeeze, "first")
    before = act(x)
    before.sum().backward()
    with torch.no_grad():
        act.squeeze.first_g.mul_(3)
    y = act(x)
    assert not torch.equal(y, before)
    y.sum().backward()
    assert act.squeeze.first_g.grad.any()
    torch.nn.utils.remove_weight_norm(act.squeeze, "first")
    torch.testing.assert_close(y, act(x))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_of_the_network_keep_the_layout(layout):
    x, dim = batch(layout)
    act = dynamic(channel_dim=dim)
    expected = act(x)
    act.squeeze.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(act(x), expected, check_stride=True)


def test_a_network_with_hooks_is_constant_in_phase_one():
    model = nn.Sequential(nn.Conv2d(3, 5, 1), dynamic())
    model[1].squeeze.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    phases = pwlu.TwoPhase(model, optimizer, 3)
    model(torch.randn(2, 3, 4, 4)).square().sum().backward()
    assert phases.phase == 1
    assert not any(p.grad.any() for p in model[1].parameters())


def test_it_is_linear_in_the_heights():
    act, (x, _) = dynamic(dtype=torch.float64), batch("NCHW", torch.float64)
    left, right, heights, left_slope, right_slope = act.blocks()
    flat, a = torch.zeros_like(left_slope), act.coefficients(x)
    expected = pwlu.functional.pwlu(x, left, right, heights, left_slope, right_slope)
    for m, direction in enumerate(act.direction_heights()):
        expected = expected + a[:, m, :, None, None] * pwlu.functional.pwlu(x, left, right, direction, flat, flat)
    torch.testing.assert_close(act(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences_agree(kind):
    act, (x, _) = dynamic(kind, dtype=torch.float64, intervals=3), batch("NCHW", torch.float64)
    x = x[:2, :, :2, :2].clone().requires_grad_()
    names = [name for name, _ in act.named_parameters()]

    def run(x, *parameters):
        return torch.func.functional_call(act, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *act.parameters()))


@pytest.mark.parametrize("mixing", ["channel", "layer"])
def test_it_starts_as_a_pwlu_and_learns(mixing):
    x, _ = batch("NCHW")
    act, plain = pwlu.DynamicPWLU(5, init="silu", mixing=mixing), pwlu.PWLU(5, init="silu")
    assert torch.equal(act(x), plain(x))
    assert act.coefficients(x).abs().min() > 0
    act(x).square().sum().backward()
    assert act.direction_weight.grad.abs().max() > 0
    assert act.squeeze.second.grad.abs().max() == 0  # until the directions have moved


def test_values_that_are_not_finite_stay_in_their_sample():
    for wild in (math.nan, math.inf, -math.inf):
        act, (x, _) = dynamic(), batch("NCHW")
        before = act(x)
        x[1, 2, 0, 0] = wild
        after = act(x)
        assert torch.equal(after[[0, 2]], before[[0, 2]])
        assert after[1].isnan().all() or not math.isnan(wild)
    assert act(torch.full((2, 5, 3, 3), 1e30)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 5, 6, 7), (0, 5), (3, 5, 0, 7)])
def test_without_elements_all_gradients_are_zero(kind, shape):
    act = dynamic(kind)
    act(torch.empty(shape)).sum().backward()
    for name, parameter in act.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("kind", KINDS)
def test_channels_last_3d_is_kept(kind):
    x, act = torch.randn(3, 5, 2, 6, 7), dynamic(kind)
    y = act(x.contiguous(memory_format=torch.channels_last_3d))
    assert y.is_contiguous(memory_format=torch.channels_last_3d)
    torch.testing.assert_close(y, act(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "BTC"])
def test_vmap(kind, layout):
    x, dim = batch(layout)
    act = dynamic(kind, dim)
    torch.testing.assert_close(torch.func.vmap(act)(torch.stack([x, 2 * x])), torch.stack([act(x), act(2 * x)]))
    two = {name: torch.stack([p, p]) for name, p in act.named_parameters()}
    ensemble = torch.func.vmap(lambda parameters: torch.func.functional_call(act, parameters, (x,)))
    torch.testing.assert_close(ensemble(two), torch.stack([act(x)] * 2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 6), (3, 5, 6, 7)])
def test_the_output_may_be_changed_in_place(kind, shape):
    act, x = dynamic(kind), torch.randn(shape)
    doubled = act(x).mul_(2)
    assert torch.equal(*(torch.autograd.grad(y.sum(), act.weight)[0] for y in (doubled, 2 * act(x))))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["dynamic_pwlu", "dyrelu", "metaacon", "se_relu"])
def test_a_traced_model_can_be_saved(name, tmp_path):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 1), torch.nn.ReLU()).eval()
    pwlu.convert_(model, torch.randn(2, 3, 6, 7), to=name)
    torch.jit.trace(model, torch.randn(2, 3, 6, 7)).save(tmp_path / "model.ts")
    x = torch.randn(4, 3, 6, 7)
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.ts")(x), model(x))


def test_the_meta_device():
    act = dynamic().to("meta")
    assert act(torch.empty(3, 5, 6, 7, device="meta")).shape == (3, 5, 6, 7)


def test_autocast_changes_nothing():
    act, (x, _) = dynamic(), batch("NCHW")
    expected = act(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(act(x), expected)


def model_of(to="dynamic_pwlu", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    pwlu.convert_(model, torch.zeros(2, 3, 8, 8), to=to, **options)
    return model


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def optimizer_of(model):
    return torch.optim.SGD(pwlu.parameter_groups(model, lr=0.05, weight_decay=1e-3), momentum=0.9)


def test_the_two_phases():
    model, plain = model_of(), model_of("pwlu")
    plain.load_state_dict(model.state_dict(), strict=False)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = [optimizer_of(each) for each in (model, plain)]
    phases = [pwlu.TwoPhase(m, o, realign_at=4) for m, o in zip((model, plain), optimizers, strict=True)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        train(each, optimizer, 3)
    for name, p in model.named_parameters():
        assert torch.equal(p, kept[name]) == name.startswith(("2.", "4.")), name
    torch.testing.assert_close(model[2].statistics.running_std, plain[2].statistics.running_std)
    with torch.no_grad():
        model[2].direction_weight.fill_(1.0)
    train(model, optimizers[0], 1)
    train(plain, optimizers[1], 1)
    assert phases[0].phase == 2
    assert not model[2].direction_weight.any()
    assert model[2].left[0] != -3
    train(model, optimizers[0], 3)
    assert all(unit.direction_weight.any() for unit in (model[2], model[4]))
    assert not torch.equal(model[2].squeeze.second, kept["2.squeeze.second"])
    assert phases[1].phase == 2


def test_phase_one_gradients_are_zero_and_the_function_is_that_of_the_parameters():
    act, (x, _) = dynamic(), batch("NCHW")
    expected = act(x)
    act.phase = 1
    x = x.requires_grad_()
    y = act(x)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in act.parameters())
    assert x.grad.any()
    assert act.statistics.pool[0, 0] == x.numel() / 5


def test_copies_get_everything():
    model = model_of()
    average = copy.deepcopy(model)
    for p in average.parameters():
        p.data.add_(1.0)
    optimizer = optimizer_of(model)
    pwlu.TwoPhase(model, optimizer, realign_at=2, copies=average)
    train(model, optimizer, 2)
    for name, p in model[2].named_parameters():
        assert torch.equal(average[2].get_parameter(name), p)


@pytest.mark.parametrize("at", [2, 5])
def test_resume(at):
    whole, parts = model_of(), model_of()
    optimizer = optimizer_of(whole)
    pwlu.TwoPhase(whole, optimizer, realign_at=4)
    train(whole, optimizer, at)
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, 3, seed=1)
    again = optimizer_of(parts)
    parts.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    pwlu.TwoPhase(parts, again, realign_at=4)
    train(parts, again, 3, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))


def test_state_dicts():
    model = model_of()
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    model.load_state_dict(plain.state_dict())  # from before the conversion
    state = model.state_dict()
    del state["2.squeeze.first"]
    with pytest.raises(RuntimeError, match=r"Missing key.*2\.squeeze\.first"):
        model_of().load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"2\.direction_weight"):
        model.load_state_dict(model_of("pwlu").state_dict())
    later = model.state_dict()
    later._metadata["2"]["version"] = 99
    with pytest.raises(RuntimeError, match="later version"):
        model_of().load_state_dict(later)
    again = pickle.loads(pickle.dumps(model))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))


def worker(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{path}/rendezvous", rank=rank, world_size=2)
    model = model_of()
    optimizer = optimizer_of(model)
    parallel = DistributedDataParallel(model)
    pwlu.TwoPhase(parallel, optimizer, realign_at=2)
    train(parallel, optimizer, 4, seed=rank)
    torch.save(model.state_dict(), f"{path}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    states = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, value in states[0].items():
        if "running" not in name or "statistics" in name:  # batch norm has its own statistics per process
            assert torch.equal(value, states[1][name]), name
    assert states[0]["2.direction_weight"].any()


def test_conversion_and_granularity():
    model = model_of(granularity="layer", intervals=8)
    unit = model[2]
    assert (type(unit), unit.channels, unit.features, unit.intervals) == (pwlu.DynamicPWLU, 1, 6, 8)
    assert model_of()[2].channels == 6
    groups = {g["name"]: {id(p) for p in g["params"]} for g in pwlu.parameter_groups(model, lr=0.1)}
    assert groups["pwlu"] == function_parameters((model[2], model[4]))
    assert id(unit.squeeze.first) in groups["weights"]


def test_another_conversion_leaves_the_network_of_a_unit():
    model = nn.Sequential(nn.Linear(4, 6), pwlu.DynamicPWLU(6), nn.Tanh())
    report = pwlu.convert_(model, torch.randn(2, 4), kinds=("tanh", "clamp"))
    assert [site.name for site in report.sites] == ["2"]


def test_curvature_counts_the_directions():
    act = dynamic(dtype=torch.float64)
    left, right, heights, left_slope, right_slope = act.blocks()
    expected = 0.0
    for y, k_l, k_r in [(heights, left_slope, right_slope), *((d, 0 * left, 0 * left) for d in act.direction_heights())]:
        d = ((right - left) / act.intervals)[:, None]
        expected += torch.cat([k_l[:, None] * d, y.diff(), k_r[:, None] * d], 1).diff().square().sum()
    torch.testing.assert_close(pwlu.curvature(nn.Sequential(act)), expected)


def test_saving(tmp_path):
    pytest.importorskip("safetensors")
    model = model_of(granularity="layer")
    with torch.no_grad():
        model[2].direction_weight.normal_()
    pwlu.save(model, tmp_path / "model.safetensors")
    fresh = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU())
    assert pwlu.load_into(fresh, tmp_path / "model.safetensors") == ["2", "4"]
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(fresh.eval()(x), model.eval()(x))


def test_deployment_and_analysis():
    model = model_of().eval()
    model[4] = pwlu.PWLU(4).eval()
    x = torch.randn(2, 3, 8, 8)
    before = model(x)
    assert pwlu.fuse_(model) == ["4"]
    torch.testing.assert_close(model(x), before)
    model = model_of()
    assert "2" in str(pwlu.describe(model))
    assert pwlu.alignment(model, [x]).iou
    with pytest.raises(ValueError, match="heights depend on the sample"):
        pwlu.fuse_norms_(model, x)
    with pytest.raises(TypeError, match=r"2, 4 is an instance of a subclass of PWLU \(DynamicPWLU\)"):
        pwlu.simplify_(model)


def test_onnx(tmp_path):
    pytest.importorskip("onnxruntime")
    model = model_of().eval()
    with torch.no_grad():
        for unit in (model[2], model[4]):
            unit.direction_weight.normal_()
    report = pwlu.export_onnx(model, torch.randn(2, 3, 8, 8), tmp_path / "model.onnx")
    assert report.difference <= report.tolerance
    assert "each PWLU" not in str(report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"directions": 0}, "directions must be an integer of at least 1"),
        ({"reduction": 0.5}, "reduction must be an integer"),
        ({"mixing": "sample"}, "mixing must be 'channel' or 'layer', not 'sample'"),
        ({"features": 7}, "channels must be 1 or the number of features, 7, not 5"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        pwlu.DynamicPWLU(5, **options)


def test_wrong_inputs():
    with pytest.raises(ValueError, match=r"at least two dimensions.*x\.unsqueeze"):
        pwlu.DynamicPWLU(5)(torch.randn(5))
    with pytest.raises(ValueError, match="dimension 0 of x"):
        pwlu.DynamicPWLU(5, channel_dim=0)(torch.randn(5, 3))
    with pytest.raises(ValueError, match="has 5 channels, but x"):
        pwlu.DynamicPWLU(5)(torch.randn(2, 4, 3))
    with pytest.raises(TypeError, match="not int"):
        pwlu.DynamicPWLU(5)(1)


# The activations to compare with.


def randomized(act):
    with torch.no_grad():
        for p in act.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return act.double()


def hidden_and_outputs(squeeze, x, dim):
    positions = [d for d in range(1, x.ndim) if d != dim % x.ndim]
    p = x.mean(positions)
    return p, F.linear(F.relu(F.linear(p, squeeze.first, squeeze.first_bias)), squeeze.second, squeeze.second_bias)


def shown(values, x, dim):
    shape = [1] * x.ndim
    shape[0], shape[dim] = values.shape
    return values.reshape(shape)


@pytest.mark.parametrize("layout", ["NCHW", "channels_last", "NHWC", "BTC"])
def test_formulas_of_the_competitors(layout):
    x, dim = batch(layout, torch.float64)
    act = randomized(baselines.ACONC(5, dim))
    p1, p2, beta = (shown(p[None], x, dim) for p in (act.p1, act.p2, act.beta))
    torch.testing.assert_close(act(x), (p1 - p2) * x * torch.sigmoid(beta * (p1 - p2) * x) + p2 * x)

    act = randomized(baselines.MetaACON(5, dim)).eval()
    p, _ = hidden_and_outputs(act.squeeze, x, dim)
    s = act.squeeze
    normed = s.second_norm(F.linear(s.first_norm(F.linear(p, s.first, s.first_bias)), s.second, s.second_bias))
    p1, p2 = (shown(p[None], x, dim) for p in (act.p1, act.p2))
    beta = shown(normed.sigmoid(), x, dim)
    torch.testing.assert_close(act(x), (p1 - p2) * x * torch.sigmoid(beta * (p1 - p2) * x) + p2 * x)

    act = randomized(baselines.DyReLU(5, dim))
    _, t = hidden_and_outputs(act.squeeze, x, dim)
    t = 2 * t.sigmoid() - 1
    a1, a2, b1, b2 = (shown(each, x, dim) for each in (1 + t[:, :5], t[:, 5:10], t[:, 10:15] / 2, t[:, 15:] / 2))
    torch.testing.assert_close(act(x), torch.stack([a1 * x + b1, a2 * x + b2]).amax(0))

    act = randomized(baselines.SEReLU(5, dim))
    _, s = hidden_and_outputs(act.squeeze, x, dim)
    torch.testing.assert_close(act(x), x.relu() * shown(s.sigmoid(), x, dim))


@pytest.mark.parametrize("name", ["aconc", "metaacon", "dyrelu", "se_relu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_competitors_in_all_types(name, dtype):
    act, (x, _) = pwlu.activation(name, 5), batch("channels_last", dtype)
    act = act.to(torch.float64 if dtype == torch.float64 else torch.float32).eval()
    y = act(x)
    assert (y.dtype, y.shape, y.stride()) == (x.dtype, x.shape, x.stride())
    wide = copy.deepcopy(act).double()(x.double())
    torch.testing.assert_close(y.double(), wide, rtol=4 * torch.finfo(dtype).eps, atol=1e-5)


def test_starts_and_sizes_of_the_competitors():
    x = torch.randn(3, 64, 5, 5)
    assert torch.equal(baselines.DyReLU(64)(x), x.relu())
    counts = [sum(p.numel() for p in act.parameters()) for act in (baselines.SEReLU(64), pwlu.DynamicPWLU(64))]
    assert abs(counts[0] / counts[1] - 1) < 0.02
    torch.testing.assert_close(pwlu.activation("mish")(x), x * torch.tanh(F.softplus(x)))
