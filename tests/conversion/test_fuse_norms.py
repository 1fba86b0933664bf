"""fuse_norms_: which norms are found, that models stay what they are, and that training is the same."""

import copy
import pickle
import weakref

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.checkpoint import checkpoint

import pwlu
from pwlu import reference
from pwlu.ops import norm as norm_ops
from pwlu.units import deferred_norm
from pwlu.units.deferred_norm import Deferred, DeferredNorm


class Block(nn.Module):
    """A residual block, written in one of the ways people write them."""

    def __init__(self, way="x += identity", norm=nn.BatchNorm2d, channels=4, **options):
        super().__init__()
        self.way = way
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = norm(channels, **options), norm(channels, **options)
        self.act1, self.act2 = pwlu.PWLU(channels, init="silu"), pwlu.PWLU(channels, init="silu")
        self.drop, self.identity = nn.Dropout(0.5), nn.Identity()

    def forward(self, x):
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.way == "x += identity":
            y += x
        elif self.way == "x + identity":
            y = y + x
        elif self.way == "identity + x":
            y = x + y
        elif self.way == "torch.add":
            y = torch.add(y, x)
        elif self.way == "broadcast":
            y = y + x.mean((2, 3), keepdim=True)
        elif self.way == "scaled":
            y = torch.add(y, x, alpha=0.5)
        elif self.way == "identity module":
            y = self.identity(y)
        elif self.way == "dropout":
            y = self.drop(y)
        elif self.way == "used twice":
            return self.act2(y) + y
        elif self.way == "used beside its sum":
            return self.act2(y + x) + y.mean()
        elif self.way == "used before":
            return y.mean() + self.act2(y)
        elif self.way == "method":
            y = y.mul(2)
        elif self.way == "operator":
            y = 2 * y
        elif self.way == "three":
            y = y + x + x
        return self.act2(y)


class Two(nn.Module):
    """Two norms that meet in one addition, as in the downsampling blocks of ResNets."""

    def __init__(self, **options):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
        self.bn1, self.bn2 = nn.BatchNorm2d(4, **options), nn.BatchNorm2d(4, **options)
        self.act = pwlu.PWLU(4, init="silu")

    def forward(self, x):
        return self.act(self.bn1(self.conv1(x)) + self.bn2(self.conv2(x)))


def model_of(block, channels=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, channels, 3, bias=False), block, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def sample(batch=4, seed=0):
    return torch.randn(batch, 3, 10, 10, generator=torch.Generator().manual_seed(seed))


def pair(block, **options):
    """A model in float64, fused and not fused."""
    plain = model_of(block).double()
    fused = copy.deepcopy(plain)
    return fused, plain, pwlu.fuse_norms_(fused, sample().double(), **options)


def step(model, seed=0):
    """Return output, gradients and buffers after one step in the current mode of the model."""
    model.zero_grad()
    torch.manual_seed(seed)
    y = model(sample(seed=seed).double())
    y.square().sum().backward()
    return y, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def assert_same(fused, plain, *seeds):
    for seed in seeds or (0,):
        for found, expected in zip(step(fused, seed), step(plain, seed), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def assert_same_in_both_modes(fused, plain):
    for mode in (True, False):
        fused.train(mode), plain.train(mode)
        assert_same(fused, plain, 0, 1, 2)


both_blocks = pytest.mark.parametrize("block", [Block, Two])
torchs_own = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of 2.11

FUSED = {"x += identity": True, "x + identity": True, "identity + x": True, "torch.add": True, "identity module": False}
APART = {
    "broadcast": "an addition of another shape or type",
    "scaled": "add",
    "dropout": "dropout",
    "used twice": "an addition of another shape or type",
    "used beside its sum": "the attribute mean",
    "used before": "the attribute mean",
    "method": "the attribute mul",
    "operator": "__rmul__",
    "three": "an addition of another shape or type",
}


@pytest.mark.parametrize(("way", "added"), FUSED.items())
def test_norms_that_are_fused(way, added):
    fused, plain, report = pair(Block(way))
    assert [(s.norm, s.units, s.added, s.reason) for s in report] == [
        ("1.bn1", ["1.act1"], False, ""),
        ("1.bn2", ["1.act2"], added, ""),
    ]
    assert_same_in_both_modes(fused, plain)


@pytest.mark.parametrize(("way", "reason"), APART.items())
def test_norms_that_are_not_fused(way, reason):
    fused, plain, report = pair(Block(way))
    assert [s.fused for s in report] == [True, False]
    assert reason in report.sites[1].reason
    assert "1 of 2 batch norms fused" in str(report)
    assert_same_in_both_modes(fused, plain)


@pytest.mark.parametrize("way", [*FUSED, *APART])
def test_results_are_right_for_any_use_of_an_output(way):
    """Every norm is deferred here, as if the sample had not shown these uses."""
    fused, plain, _ = pair(Block())
    fused[1].way = plain[1].way = way
    assert_same_in_both_modes(fused, plain)


def test_two_norms_that_are_fused():
    fused, plain, report = pair(Two())
    assert [(s.norm, s.units, s.added, s.reason) for s in report] == [
        (f"1.{name}", ["1.act"], True, "") for name in ("bn1", "bn2")
    ]
    assert_same_in_both_modes(fused, plain)


@both_blocks
@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.5}],
    ids=lambda options: next(iter(options)),
)
def test_kinds_of_norms(block, options):
    fused, plain, report = pair(block(**options))
    assert len(report.fused) == 2
    assert_same_in_both_modes(fused, plain)


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.BatchNorm1d, (6, 5)), (nn.BatchNorm1d, (6, 5, 7)), (nn.BatchNorm3d, (3, 5, 2, 4, 3))]
)
def test_ranks(norm, shape):
    plain = nn.Sequential(norm(5), pwlu.PWLU(5, init="silu"))
    fused = copy.deepcopy(plain)
    x = torch.randn(shape)
    assert len(pwlu.fuse_norms_(fused, x).fused) == 1
    torch.testing.assert_close(fused(x), plain(x))
    torch.testing.assert_close(fused.state_dict()["0.running_var"], plain.state_dict()["0.running_var"])


def test_units_with_one_function_or_another_channel_dim():
    for unit, count in ((pwlu.PWLU(1, init="silu"), 1), (pwlu.PWLU(5, init="silu", channel_dim=-3), 1)):
        plain = nn.Sequential(nn.BatchNorm2d(5), unit)
        fused, x = copy.deepcopy(plain), torch.randn(3, 5, 5, 5)
        assert len(pwlu.fuse_norms_(fused, x).fused) == count
        torch.testing.assert_close(fused(x), plain(x))
        for model in (fused, plain):
            model(x).square().sum().backward()
        torch.testing.assert_close(fused[1].weight.grad, plain[1].weight.grad, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="its channel_dim is 2"):
        pwlu.fuse_norms_(nn.Sequential(nn.BatchNorm2d(5), pwlu.PWLU(5, channel_dim=2)), torch.randn(3, 5, 5, 5))


@both_blocks
@pytest.mark.parametrize(
    "freeze",
    [
        lambda block: block.bn1.eval(),
        lambda block: (block.bn1.eval(), block.bn2.eval()),
        lambda block: (block.bn1.requires_grad_(False), block.bn2.requires_grad_(False)),
        lambda block: [unit.requires_grad_(False) for unit in block.modules() if isinstance(unit, pwlu.PWLU)],
        lambda block: block.requires_grad_(False),
    ],
    ids=["a norm in eval", "norms in eval", "norm parameters", "units", "all but the first convolution"],
)
def test_frozen_parts(block, freeze):
    fused, plain, _ = pair(block())
    freeze(fused[1]), freeze(plain[1])
    assert_same(fused, plain)


def test_shared_norms_and_units():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
            self.one, self.other = pwlu.PWLU(4, init="silu"), pwlu.PWLU(4)

        def forward(self, x):
            return self.other(self.bn(self.conv(self.one(self.bn(x)))))

    fused, plain, report = pair(Shared())
    assert [s.units for s in report] == [["1.one", "1.other"]]
    assert_same(fused, plain)


def test_outputs_of_two_added_norms_are_not_saved(monkeypatch):
    fused, _, _ = pair(Two())
    made, act = [], norm_ops.norm_act

    def noted(*arguments):
        y, norm = act(*arguments)
        made.append(weakref.ref(y))
        return y, norm

    monkeypatch.setattr(norm_ops, "norm_act", noted)
    loss = fused(sample().double()).square().sum()
    assert len(made) == 2
    assert made[0]() is None
    monkeypatch.setattr(norm_ops, "norm_forward", lambda *arguments: torch.zeros_like(arguments[0]))  # it is computed again
    loss.backward()
    wrong = fused[1].conv1.weight.grad.clone()
    monkeypatch.undo()
    assert not torch.allclose(wrong, step(fused)[1]["1.conv1.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_recomputed_outputs_have_the_same_bits(dtype):
    for shape in ((4, 5, 20, 20), (300, 40)):
        x = 3 * torch.randn(shape).to(dtype)
        weight = deferred_norm._identity(shape[1], reference.compute_dtype(x), x.device)
        gamma, beta = (torch.randn(shape[1], dtype=weight.dtype) for _ in range(2))
        y, norm = norm_ops.norm_act(x, None, weight, 1, gamma, beta, None, None, None, 0.0, 1e-5, True, None)
        assert torch.equal(y, reference.normalize(x, None, norm).to(dtype))
        assert torch.equal(y, norm_ops.norm_forward(x, None, norm, weight, 1))


def test_two_norms_of_one_module_or_one_output():
    class Shared(Two):
        def forward(self, x):
            return self.act(self.bn1(self.conv1(x)) + self.bn1(self.conv2(x)))

    class Twice(Two):
        def forward(self, x):
            y, other = self.bn1(self.conv1(x)), self.bn2(self.conv2(x))
            return self.act(y + y) + self.act(y + other) + other.mean()

    for block in (Shared(), Twice()):
        fused, plain, _ = pair(Two())
        for model in (fused, plain):
            model[1].__class__ = type(block)
        assert_same(fused, plain, 0, 1)


def test_two_norms_without_hooks_of_autograd():
    fused, plain, _ = pair(Two())
    with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
        assert_same(fused, plain)


def test_an_input_of_two_norms_that_changes_before_backward():
    fused, _, _ = pair(Two())
    block, x = fused[1], torch.randn(4, 4, 6, 6).double().requires_grad_()
    block.conv1 = block.conv2 = nn.Identity()
    between = 2 * x
    y = block(between)
    with torch.no_grad():
        between.mul_(2)
    with pytest.raises(RuntimeError, match=r"was changed in place, but the backward pass needs it.*unfuse_norms_"):
        y.sum().backward()


# What stays as it is.


def test_the_state_dict_and_everything_else_stay_as_they_are():
    fused, plain, _ = pair(Block())
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in fused.named_modules()] == [n for n, _ in plain.named_modules()]
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert isinstance(fused[1].bn1, nn.BatchNorm2d)
    assert "BatchNorm2d(4, eps=1e-05" in str(fused)
    assert "fused with the PWLU that follows" in str(fused)
    step(fused)
    plain.load_state_dict(fused.state_dict())
    assert_same(fused, plain)


def test_unfuse_norms():
    fused, plain, _ = pair(Block())
    assert pwlu.unfuse_norms_(fused) == ["1.bn1", "1.bn2"]
    assert pwlu.unfuse_norms_(fused) == []
    assert str(fused) == str(plain)
    assert not any(isinstance(m, DeferredNorm) for m in fused.modules())
    assert vars(fused[1].bn1).keys() == vars(plain[1].bn1).keys()
    for found, expected in zip(step(fused), step(plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)  # bit for bit


def test_copies_and_pickles_are_fused_with_their_own_units(tmp_path):
    fused, plain, _ = pair(Block())
    torch.save(fused, tmp_path / "model.pt")
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), torch.load(tmp_path / "model.pt", weights_only=False)]
    for other in copies:
        assert other[1].bn1.units == (other[1].act1,)
        assert other[1].bn1.units[0] is not fused[1].act1
        assert isinstance(other[1].bn1(sample()[:, :1].expand(4, 4, 10, 10).double()), Deferred)
        assert_same(other, copy.deepcopy(plain))


def test_fusing_twice_gives_the_same_report():
    fused, _, report = pair(Block())
    again = pwlu.fuse_norms_(fused, sample().double())
    assert again.sites == report.sites
    assert type(fused[1].bn1).__mro__.count(DeferredNorm) == 1


@pytest.mark.parametrize(("block", "name"), [(Block, "bn1"), (Block, "act1"), (Two, "bn1"), (Two, "bn2")])
def test_hooks(block, name):
    """Norms and units with hooks run separately, whether the hooks come before or after."""
    plain, seen = model_of(block()).double(), []
    before = copy.deepcopy(plain)
    getattr(before[1], name).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    report = pwlu.fuse_norms_(before, sample().double())
    assert f"1.{name} has hooks" in [site.reason for site in report]
    assert_same(before, plain)
    after = copy.deepcopy(plain)
    pwlu.fuse_norms_(after, sample().double())
    handle = getattr(after[1], name).register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    assert_same(after, plain, 1)
    assert len(seen) == 2
    assert all(isinstance(t, torch.Tensor) for both in seen for t in both)
    handle.remove()
    assert_same(after, plain, 2)
    assert len(seen) == 2


class Downsampling(nn.Module):
    """The norms of two modules meet in an addition, and go through a third module to the unit."""

    def __init__(self):
        super().__init__()
        self.conv, self.identity = (nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(2))
        self.act = nn.Sequential(nn.Identity(), pwlu.PWLU(4, init="silu"))

    def forward(self, x):
        return self.act(self.conv(x) + self.identity(x))


@pytest.mark.parametrize("name", ["conv", "identity", "act", "act.0"])
def test_hooks_of_modules_around_the_norm_and_the_unit(name):
    """Hooks on a module that passes the output of a norm on get tensors, and backward hooks get gradients."""

    def watch(model):
        module = model.get_submodule(f"1.{name}")
        module.register_forward_hook(lambda module, args, y: seen.extend((args[0], y)))
        return module.register_full_backward_hook(lambda module, args, y: seen.extend((args[0], y[0])))

    plain = model_of(Downsampling()).double()
    fused = copy.deepcopy(plain)
    report = pwlu.fuse_norms_(fused, sample().double())
    assert [site.through for site in report.fused] == [["1.conv", "1.act.0", "1.act"], ["1.identity", "1.act.0", "1.act"]]
    seen = []
    watch(plain), watch(fused)
    assert_same(fused, plain)
    assert len(seen) == 8
    for found, expected in zip(seen[:4], seen[4:], strict=True):
        torch.testing.assert_close(found, expected)


def test_a_norm_in_a_module_with_hooks_is_not_fused():
    model = model_of(Downsampling())
    model[1].conv.register_forward_hook(lambda module, args, y: None)
    assert [site.reason for site in pwlu.fuse_norms_(model, sample())] == ["1.conv has hooks", ""]


def test_a_norm_whose_output_is_returned_is_not_fused():
    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn1, self.bn2, self.act = nn.BatchNorm2d(3), nn.BatchNorm2d(3), pwlu.PWLU(3)

        def forward(self, x):
            y = self.bn2(self.act(self.bn1(x)))
            return self.act(y), {"features": y}

    model = Returns()
    report = pwlu.fuse_norms_(model, sample())
    assert [site.reason for site in report] == ["", "its output goes to the caller of the model"]
    assert isinstance(model(sample())[1]["features"], torch.Tensor)


def test_fx_and_functions():
    """Run a fused norm separately in a graph of torch.fx and before pwlu.functional."""
    fused, plain, _ = pair(Block())
    traced = torch.fx.symbolic_trace(copy.deepcopy(fused))
    assert_same(fused, plain)
    torch.testing.assert_close(traced(sample(seed=0).double()), step(plain)[0])

    class Functional(Block):
        def forward(self, x):
            return pwlu.functional.pwlu(self.bn2(self.act1(self.bn1(x))), *self.act2.blocks())

    _, _, report = pair(Functional())
    assert [site.reason for site in report] == ["", "its output goes to pwlu"]


def test_a_change_in_place_is_an_error():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn, self.act = nn.BatchNorm2d(4), pwlu.PWLU(4)
            self.change = False

        def forward(self, x):
            y = self.bn(x)
            if self.change:
                x.mul_(2)
            return self.act(y)

    model = Changes()
    pwlu.fuse_norms_(model, torch.randn(2, 4, 5, 5))
    model.change = True
    with pytest.raises(RuntimeError, match=r"was changed in place before its PWLU computed the norm.*: pwlu\.unfuse_norms_"):
        model(torch.randn(2, 4, 5, 5))
    with pytest.raises(RuntimeError, match="changed in place"):
        pwlu.fuse_norms_(model, torch.randn(2, 4, 5, 5))


def test_one_value_per_channel_is_torchs_own_error():
    fused = nn.Sequential(nn.BatchNorm2d(3), pwlu.PWLU(3))
    pwlu.fuse_norms_(fused, torch.randn(2, 3, 2, 2))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        fused(torch.randn(1, 3, 1, 1))
    with pytest.raises(ValueError, match="expected 4D input"):
        fused(torch.randn(2, 3, 4))


def test_nothing_to_fuse():
    with pytest.raises(ValueError, match=r"nothing in Sequential was fused\. .* It has no batch norm"):
        pwlu.fuse_norms_(nn.Sequential(pwlu.PWLU(3)), torch.randn(2, 3))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), pwlu.PWLU(3))
    with pytest.raises(ValueError, match="its output goes to linear"):
        pwlu.fuse_norms_(model, torch.randn(2, 3))
    assert not any(isinstance(m, DeferredNorm) for m in model.modules())
    with pytest.raises(ValueError, match=r"has no PWLU. Convert it first"):
        pwlu.fuse_norms_(nn.Sequential(nn.BatchNorm1d(3)), torch.randn(2, 3))
    with pytest.raises(RuntimeError, match="could not be run on the sample in training mode"):
        pwlu.fuse_norms_(nn.Sequential(nn.BatchNorm1d(3), pwlu.PWLU(3)), torch.randn(2, 4))


# Networks.


@pytest.mark.parametrize(
    ("make", "norms", "fused", "added"),
    [
        (lambda: timm.create_model("resnet18"), 20, 20, 11),
        (lambda: torchvision.models.resnet18(), 20, 20, 11),
        (lambda: timm.create_model("mobilenetv2_100"), 52, 35, 0),
        pytest.param(lambda: torchvision.models.densenet121(), 121, 121, 0, marks=pytest.mark.slow),
    ],
    ids=["timm resnet18", "torchvision resnet18", "timm mobilenetv2", "densenet"],
)
def test_networks(make, norms, fused, added):
    model, x = make(), torch.randn(2, 3, 64, 64)
    pwlu.convert_(model, x)
    report = pwlu.fuse_norms_(model, x)
    assert (len(report), len(report.fused), sum(s.added for s in report)) == (norms, fused, added)
    units = {n for n, m in model.named_modules() if isinstance(m, pwlu.PWLU)}
    assert {u for s in report.fused for u in s.units} == units


def small_resnet():
    from torchvision.models.resnet import BasicBlock

    stem = (nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
    down = BasicBlock(8, 12, stride=2, downsample=nn.Sequential(nn.Conv2d(8, 12, 1, stride=2), nn.BatchNorm2d(12)))
    return nn.Sequential(*stem, BasicBlock(8, 8), down, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10))


def small_mobilenet():
    return torchvision.models.MobileNetV2(10, 0.25, [[1, 8, 1, 1], [3, 8, 2, 1]])


@pytest.mark.parametrize("make", [small_resnet, small_mobilenet])
def test_fifty_steps_are_the_same_to_rounding(make):
    """In float64: the curves differ by rounding alone, amplified by fifty steps."""
    torch.manual_seed(0)
    plain, x = make().double(), torch.randn(4, 3, 16, 16).double()
    pwlu.convert_(plain, x)
    fused = copy.deepcopy(plain)
    assert len(pwlu.fuse_norms_(fused, x).fused) >= 4
    curves = []
    for model in (fused, plain):
        optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.02), momentum=0.9)
        phases = pwlu.TwoPhase(model, optimizer, realign_at=20)
        losses = []
        for seed in range(50):
            torch.manual_seed(seed)
            images, labels = torch.randn(8, 3, 16, 16).double(), torch.randint(10, (8,))
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert phases.phase == 2
        curves.append(torch.tensor(losses))
    torch.testing.assert_close(*curves, rtol=1e-8, atol=1e-8)


# Together with the rest.


@torchs_own
@pytest.mark.parametrize(
    ("backend", "block", "options"),
    [
        ("aot_eager", Block, {}),
        ("aot_eager", Two, {}),
        ("inductor", Block, {}),
        ("inductor", Block, {"track_running_stats": False}),
    ],
)
def test_compile(backend, block, options):
    """Also with Inductor, which has its own rules for operators that change their arguments."""
    fused, plain, _ = pair(block(**options))
    torch._dynamo.reset()
    fused.compile(backend=backend, fullgraph=True)
    assert_same(fused, plain, 0, 1)
    fused.eval(), plain.eval()
    assert_same(fused, plain)


@torchs_own
def test_compile_in_phase_one(request):
    fused, plain, _ = pair(Block())
    torch._dynamo.reset()
    for model in (fused, plain):
        request.addfinalizer(pwlu.TwoPhase(model, torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1)), 9)._detach)
    fused.compile(backend="inductor", fullgraph=True)
    assert_same(fused, plain)


@both_blocks
def test_checkpointing(block):
    fused, plain, _ = pair(block())
    for model in (fused, plain):
        inside, forward = model[1], model[1].forward
        inside.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    assert_same(fused, plain)


@both_blocks
def test_double_backward_and_transforms(block):
    fused, plain, _ = pair(block())
    found = []
    for model in (fused, plain):
        x = sample().double().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append((x.grad, {n: p.grad for n, p in model.named_parameters()}))
    torch.testing.assert_close(*found, rtol=1e-7, atol=1e-7)
    fused.eval(), plain.eval()
    x, tangent = sample().double(), sample(seed=1).double()
    for one, other in zip(*(torch.func.jvp(m, (x,), (tangent,)) for m in (fused, plain)), strict=True):
        torch.testing.assert_close(one, other)


def test_separate_computation_where_it_is_needed():
    fused, plain, _ = pair(Block())
    fused, plain, x = fused.float().eval(), plain.float().eval(), sample()
    found, expected = (torch.export.export(m, (x,)) for m in (fused, plain))
    assert [n.target for n in found.graph.nodes] == [n.target for n in expected.graph.nodes]
    assert pwlu.alignment(fused, [x]).iou == pwlu.alignment(plain, [x]).iou
    pwlu.fuse_(fused), pwlu.fuse_(plain)
    torch.testing.assert_close(fused(x), plain(x))
    model = copy.deepcopy(model_of(Block()))
    pwlu.fuse_norms_(model, x)
    pwlu.simplify_(model, tolerance=1e-2)
    model(x)


def test_restored_models_stay_right():
    model = torchvision.models.resnet18().eval()
    x = torch.randn(2, 3, 32, 32)
    expected = model(x)
    pwlu.convert_(model, x)
    pwlu.fuse_norms_(model, x)
    pwlu.restore_(model)
    assert not any(isinstance(m, DeferredNorm) for m in model.modules())
    torch.testing.assert_close(model(x), expected)


def test_sync_batch_norm_in_one_process():
    """Without a process group it is a batch norm; two processes are tested in test_distributed.py."""
    plain = nn.Sequential(nn.SyncBatchNorm(5), pwlu.PWLU(5, init="silu"))
    fused = copy.deepcopy(plain)
    pwlu.fuse_norms_(fused, torch.randn(3, 5, 4, 4))
    x = torch.randn(3, 5, 4, 4)
    torch.testing.assert_close(fused(x), plain(x))
