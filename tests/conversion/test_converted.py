"""A converted model is the model it was: its weights, hooks, modes and methods; in copies, files and other processes."""

import copy
import importlib
import io
import os
import pickle
import random
import re
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from blocks import IMAGES, Net, conv, converted, units
from imported import SOURCES, SUPPORT
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import pwlu


class Inner(Net):
    def forward(self, x):
        return torch.relu(self.conv(x))


class Network(Net):
    """Sites of every sort, in several classes, and starts that are no names."""

    def __init__(self):
        super().__init__(inner=Inner(conv=conv()), norm=nn.BatchNorm2d(4), act=nn.LeakyReLU(0.2), other=conv(4, 5))

    def forward(self, x, *, scale=1.0):
        x = self.act(self.norm(self.inner(x)))
        x = F.dropout(self.act(self.other(x)), 0.5, self.training)
        return scale * F.gelu(x, approximate="tanh")

    def widths(self):
        return self.norm.num_features, self.other.out_channels


SITES = {"inner.relu": 4, "act": 4, "act_2": 5, "gelu": 5}


@pytest.fixture
def network():
    """Converted, with units that have learned something."""
    model = Network()
    assert converted(model, init="same") == SITES
    with torch.no_grad():
        for unit in units(model).values():
            unit.heights += 0.1 * torch.rand_like(unit.heights)
    return model.eval()


def test_class_methods_and_arguments(network):
    assert isinstance(network, Network)
    assert type(network).__name__ == type(network).__qualname__ == "Network"
    assert type(network).__module__ == Network.__module__
    assert network.widths() == (4, 5)
    assert torch.equal(network(IMAGES, scale=2.0), 2 * network(IMAGES))
    assert repr(network).startswith("Network(\n  (inner): Inner(\n    (conv): Conv2d(3, 4")


def test_new_children_have_the_mode_of_their_parent():
    model = Network().eval()
    model.inner.train()
    pwlu.convert_(model, IMAGES)
    assert {name: unit.training for name, unit in units(model).items()} == {name: name == "inner.relu" for name in SITES}


def test_hooks_of_what_is_replaced():
    """Hooks move to the PWLU, can be removed by their handles, and return after restore_."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    seen = []
    handle = model[1].register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    pwlu.convert_(model, IMAGES)
    seen.clear()
    model(IMAGES)
    assert seen == ["PWLU"]
    pwlu.restore_(model)
    model(IMAGES)
    assert seen == ["PWLU", "ReLU"]
    pwlu.convert_(model, IMAGES)
    handle.remove()
    seen.clear()
    model(IMAGES)
    assert seen == []


@pytest.mark.parametrize("options", [{}, {"init": "relu"}])
def test_hooks_do_not_run_on_the_copies(options):
    model, seen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU()), []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    model[1].register_forward_pre_hook(lambda *_: seen.append("pre"))
    everywhere = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("global"))
    pwlu.convert_(model, IMAGES, **options)
    assert seen == []
    model(IMAGES)
    everywhere.remove()
    assert Counter(seen) == {"hook": 1, "pre": 1, "global": 3}


def test_hooks_without_which_a_model_cannot_run():
    """Those of the user where there is no other way, and those of torch."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Linear(5, 6), nn.ReLU())
    model[0].register_forward_pre_hook(lambda module, args: (args[0].flatten(1)[:, :105].view(-1, 3, 7, 5),))
    assert converted(model, torch.randn(2, 3 * 7 * 5 + 1)) == {"1": 4, "3": 6}
    pruned = nn.Sequential(prune.random_unstructured(nn.Conv2d(3, 4, 1), "weight", 0.5), nn.SiLU()).eval()
    with torch.no_grad():
        pruned[0].weight_orig.mul_(3)  # weight is computed from it, by a hook
        expected = pruned(IMAGES)
    change = pwlu.convert_(pruned, IMAGES).change
    assert change.maximum == pytest.approx((pruned(IMAGES) - expected).abs().max().item(), rel=1e-5)


def gelu_of(x):
    return F.gelu(x)


def test_a_forward_of_the_instance():
    """The forward of the instance is what runs, so the PWLU starts as that function."""
    model = nn.Sequential(conv(), nn.ReLU(), conv(4, 5), nn.ReLU()).eval()
    model[1].forward = gelu_of
    model[3].forward = lambda x: F.relu(x) + 0.5 * x
    expected = model(IMAGES)
    report = pwlu.convert_(model, IMAGES)
    assert [(site.name, site.kind, site.action) for site in report] == [
        ("1", "gelu", "converted"),
        ("3.relu", "relu", "impossible"),
    ]
    assert (model(IMAGES) - expected).abs().max() < 10 * report.sites[0].error
    pwlu.restore_(model)
    assert torch.equal(model(IMAGES), expected)


def test_beside_a_scripted_child():
    scripted = torch.jit.script(nn.Sequential(conv(4, 5), nn.ReLU()))
    model = nn.Sequential(conv(), nn.ReLU(), scripted)
    expected = model(IMAGES)
    report = pwlu.convert_(model, IMAGES)
    assert report.notes == ["2 is scripted, so its activations are not found. Convert the module that was scripted instead."]
    assert [site.name for site in report] == ["1"]
    assert pwlu.restore_(model) == ["1"]
    assert torch.equal(model(IMAGES), expected)


def test_units_on_fake_tensors():
    with FakeTensorMode():
        unit = pwlu.PWLU(4)
        assert unit(torch.randn(2, 4, 3)).shape == (2, 4, 3)
        model = nn.Sequential(conv(), nn.ReLU())
        model[1] = pwlu.PWLU(4, init="silu", bounds=(-4, 4))
        assert model(torch.randn(2, 3, 7, 5)).shape == (2, 4, 7, 5)


def test_hooks_fire_once():
    model, fired = Network(), Counter()

    def note(name):
        return lambda *_: fired.update([name])

    handle = model.register_forward_hook(note("forward"))
    model.inner.register_forward_pre_hook(note("pre"))
    model.other.register_full_backward_hook(note("backward"))
    model.inner.register_state_dict_post_hook(note("state"))
    model.register_load_state_dict_pre_hook(note("load"))
    pwlu.convert_(model, IMAGES)
    fired.clear()
    model(IMAGES).sum().backward()
    model.load_state_dict(model.state_dict())
    assert fired == dict.fromkeys(["forward", "pre", "backward", "state", "load"], 1)
    handle.remove()
    model(IMAGES)
    assert fired["forward"] == 1


def test_the_names_of_weights():
    model = Network()
    before = list(model.state_dict())
    pwlu.convert_(model, IMAGES)
    after = list(model.state_dict())
    assert [key for key in after if key in before] == before
    assert {re.sub(r"\.(weight|statistics\..*)$", "", key) for key in after if key not in before} == set(SITES)


def test_weights_from_before_the_conversion():
    """They load strictly before or after the conversion, but not over units that have learned."""
    trained, early, late = Network(), Network(), Network()
    early.load_state_dict(trained.state_dict())
    for model in (early, late):
        pwlu.convert_(model, IMAGES, init="same")
    assert late.load_state_dict(trained.state_dict()) == ([], [])
    assert torch.equal(early.eval()(IMAGES), late.eval()(IMAGES))
    late.act.heights.data += 1
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "act.weight"'):
        late.load_state_dict(trained.state_dict())


def snapshot(model):
    """Everything that must not change: values, classes, attributes, modes, the order of modules, random numbers."""
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    modules = {name: (type(m), m.training, sorted(vars(m)), list(m._modules.values())) for name, m in model.named_modules()}
    numbers = random.getstate(), torch.get_rng_state().tolist(), numpy.random.get_state()[2]  # noqa: NPY002
    return tensors, modules, repr(model), numbers


def assert_same(first, second):
    assert list(first[0]) == list(second[0])
    assert all(torch.equal(value, second[0][name]) for name, value in first[0].items())
    assert first[1:] == second[1:]


class Restless(Net):
    """Draws random numbers, looks at values, and cannot be run in training mode."""

    def forward(self, x):
        y = self.network(x + random.random() + torch.rand(()) + numpy.random.rand())  # noqa: NPY002
        return y if not self.training and y.isfinite().all() else y.nothing_of_this_name


def declining(site):
    raise KeyError("no")


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ("silu",)},
        {"where": declining},
        {"min_positions": 1000},
        {"to": lambda channels, site: 1 / 0 if site.kind == "gelu" else nn.PReLU()},
        {"to": lambda channels, site: None},
        {"sample": torch.randn(2, 4, 7, 5)},
        {"kinds": nn.LeakyReLU, "init": nn.ReLU()},
    ],
)
def test_an_error_leaves_the_model_as_it_was(options):
    model = Restless(network=Network(), unused=nn.ReLU().eval())
    before = snapshot(model)
    with pytest.raises((ValueError, KeyError, ZeroDivisionError, TypeError, RuntimeError)):
        pwlu.convert_(model, **{"sample": IMAGES} | options)
    assert_same(snapshot(model), before)


def test_nothing_else_changes():
    """This also holds if the sample has to be run with real data."""
    model = Restless(network=Network())
    tensors, modules, _, numbers = snapshot(model)
    sample = IMAGES.clone()
    pwlu.convert_(model, sample)
    assert torch.equal(sample, IMAGES)
    assert not vars(sample)
    after = snapshot(model)
    assert all(torch.equal(after[0][name], value) for name, value in tensors.items())
    assert all(after[1][name][1] == mode for name, (_, mode, *_) in modules.items())
    assert after[3] == numbers


# Elsewhere.


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_a_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
def test_copies(network, way):
    other = way(network)
    assert torch.equal(other(IMAGES, scale=2.0), network(IMAGES, scale=2.0))
    assert type(other) is type(network)
    assert [repr(unit) for unit in units(other).values()] == [repr(unit) for unit in units(network).values()]
    units(other)["act"].heights.data.zero_()
    assert not torch.equal(other(IMAGES), network(IMAGES))
    pwlu.restore_(other)
    assert repr(other) == repr(Network())


@pytest.fixture
def in_a_fresh_process(processes):
    def in_a_fresh_process(code, path):
        done = processes(["-c", code], dict(os.environ), (path, SUPPORT, SOURCES))
        return done.stdout + done.stderr

    return in_a_fresh_process


def test_a_fresh_process(in_a_fresh_process, network, tmp_path):
    """The process imports only what the file needs."""
    torch.save((network, IMAGES, network(IMAGES, scale=2.0)), tmp_path / "model.pt")
    code = f"""
import torch
model, x, y = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
print(torch.equal(model(x, scale=2.0), y), type(model).__name__)
for unit in model.modules():
    if type(unit).__name__ == "PWLU":
        unit.reset_parameters()
        print(unit.extra_repr().split("init=")[1])
"""
    assert in_a_fresh_process(code, Path(__file__).parent).splitlines() == [
        "True Network",
        "'relu', channel_dim=1",
        "'leaky_relu(negative_slope=0.2)', channel_dim=1",
        "'leaky_relu(negative_slope=0.2)', channel_dim=1",
        "'gelu(approximate=tanh)', channel_dim=1",
    ]


SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return torch.relu(self.conv(x))
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file to import."""
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / f"{tmp_path.name}.py"
    file.write_text(SOURCE)
    return file


@pytest.mark.parametrize(
    ("old", "new", "printed"),
    [
        ("import torch\n", "\n# further down\nimport torch\n", "works"),
        ("self.conv(x)", "self.conv(-x)", "RuntimeError: pwlu: the source of Block.forward has changed since the model was"),
    ],
)
def test_other_source_in_the_other_process(in_a_fresh_process, source, old, new, printed):
    model = __import__(source.stem).Block()
    pwlu.convert_(model, IMAGES)
    file = source.parent / "model.pt"
    torch.save(model, file)
    source.write_text(SOURCE.replace(old, new, 1))
    code = f"import torch; torch.load({str(file)!r}, weights_only=False)(torch.ones(1, 3, 1, 1)); print('works')"
    assert printed in in_a_fresh_process(code, source.parent)


def test_source_that_was_edited_since_it_was_imported(source):
    model = __import__(source.stem).Block()
    source.write_text(SOURCE.replace("self.conv(x)", "self.cone(x)"))
    with pytest.raises(ValueError, match=r"the source of Block\.forward has changed since .*\.py was imported"):
        pwlu.convert_(model, IMAGES)


def test_source_that_was_reloaded(source):
    module = __import__(source.stem)
    pwlu.convert_(module.Block(), IMAGES)
    source.write_text(SOURCE.replace("self.conv(x)", "1 + self.conv(x)"))
    model = importlib.reload(module).Block()
    expected = model(IMAGES)
    pwlu.convert_(model, IMAGES)
    assert torch.equal(model(IMAGES), expected)


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_compile(network):
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(IMAGES, scale=2.0), network(IMAGES, scale=2.0))
    network.train()
    compiled(IMAGES).sum().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_export(network, fused):
    expected = network(IMAGES)
    if fused:
        pwlu.fuse_(network)
    torch.testing.assert_close(torch.export.export(network, (IMAGES,)).module()(IMAGES), expected)


def test_distributed_data_parallel(network):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network)
        wrapped(IMAGES).sum().backward()
        assert all(p.grad is not None for p in network.parameters())
        with pytest.raises(ValueError, match="already wrapped by DistributedDataParallel"):
            pwlu.convert_(wrapped, IMAGES)
    finally:
        dist.destroy_process_group()


def test_checkpointing():
    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.saves_memory else self.inner(x)

    model = Checkpointed(inner=Inner(conv=conv()), saves_memory=True)
    assert converted(model) == {"inner.relu": 4}
    gradients = []
    for model.saves_memory in (True, False):
        model.zero_grad()
        model(IMAGES).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
