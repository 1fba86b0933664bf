"""pwlu.save and pwlu.load_into: a fresh model becomes the converted one, bit by bit, without a sample and without pickle."""

import copy
import json
import os
import struct
import threading

import pytest
import torch
import torch.nn.functional as F
from networks import same, units
from torch import nn

pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import pwlu
from pwlu.conversion import saving


class Block(nn.Module):
    """A module called twice, a function, a method: four sites, three of them rewritten."""

    def __init__(self, act=nn.ReLU):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1)
        self.act = act()

    def forward(self, x):
        x = self.act(self.b(self.act(self.a(x))))
        return F.relu(x) + (x - 1).relu()


def network():
    return nn.Sequential(Block(), nn.Conv2d(6, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.SiLU(), nn.Flatten(), nn.Linear(4, 2))


X = torch.randn(5, 3, 3, 3)


def converted(model=None, **options):
    """A converted model whose PWLUs are no longer at their start."""
    model = model or network()
    pwlu.convert_(model, X, **{"init": "same", "intervals": 8, "min_positions": 1} | options)
    with torch.no_grad():
        for unit in units(model):
            unit.weight += 0.1 * torch.randn_like(unit.weight)
            unit.statistics.running_mean.normal_()
            unit.statistics.pool.normal_()
            unit.statistics.steps += 3
    return model


def assert_the_same(found, expected, x=X):
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert same(found.state_dict().values(), expected.state_dict().values())
    assert torch.equal(copy.deepcopy(found)(x), expected(x))  # a file's memory may be aligned differently, which changes sums
    for a, b in zip(units(found), units(expected), strict=True):
        assert repr(a) == repr(b)
        assert a.bounds == b.bounds
        assert (a.weight.dtype, a.training) == (b.weight.dtype, b.training)
        assert torch.equal(a.initial_weight(), b.initial_weight())


@pytest.mark.parametrize("options", [{}, {"granularity": "layer"}, {"init": "relu"}, {"where": lambda site: "2" in site.name}])
def test_a_fresh_model_becomes_the_saved_one(tmp_path, options):
    model = converted(**options)
    pwlu.save(model, tmp_path / "model.safetensors")
    fresh = network()
    before = fresh(X)
    assert pwlu.load_into(fresh, tmp_path / "model.safetensors") == list(pwlu.units.module.units_of(model))
    assert_the_same(fresh, model)
    assert not torch.equal(fresh(X), before)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_it_can_be_restored_and_trained(tmp_path):
    pwlu.save(converted(), tmp_path / "file")
    fresh, plain = network(), network()
    pwlu.load_into(fresh, tmp_path / "file")
    fresh(X).sum().backward()
    assert all(unit.weight.grad.any() for unit in units(fresh))
    pwlu.restore_(fresh)
    plain.load_state_dict(fresh.state_dict())
    assert torch.equal(fresh(X), plain(X))


def test_into_a_model_that_was_converted_already(tmp_path):
    """Also with other numbers of intervals: they become those of the file."""
    model = converted()
    pwlu.save(model, tmp_path / "file")
    for options, put in (({}, 0), ({"intervals": 16}, len(units(model)))):
        other = converted(**options)
        assert len(pwlu.load_into(other, str(tmp_path / "file"))) == put
        assert_the_same(other, model)


def test_refined_and_fused(tmp_path):
    model = converted(network(), init="relu")
    pwlu.refine_(model, 16)
    pwlu.save(model, tmp_path / "file")
    fresh = network()
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model)
    for unit in units(model):
        unit.statistics.realigned.fill_(True)
    pwlu.fuse_(model)
    with pytest.raises(
        ValueError, match=r"save: Sequential has no PWLU. It is already fused: call pwlu.save before pwlu.fuse_"
    ):
        pwlu.save(model, tmp_path / "file")
    assert pwlu.load_into(network(), tmp_path / "file")  # it is still there


class Wavy(nn.Module):
    def forward(self, x):
        return x + torch.sin(x)


@pytest.mark.filterwarnings("ignore")  # the fit of such a function
def test_a_start_of_your_own(tmp_path):
    """It is stored as the lines between its knots: those of the start, and for realignment what lies between them."""
    model = nn.Sequential(nn.Linear(4, 3), Wavy())
    pwlu.convert_(model, torch.randn(8, 4), kinds=[Wavy], init="same")
    pwlu.save(model, tmp_path / "file")
    fresh = nn.Sequential(nn.Linear(4, 3), Wavy())
    pwlu.load_into(fresh, tmp_path / "file")
    assert same(fresh.state_dict().values(), model.state_dict().values())
    unit = units(fresh)[0]
    assert "Wavy" in repr(unit)
    torch.testing.assert_close(unit.initial_weight(), units(model)[0].initial_weight(), rtol=0, atol=2.0**-50)
    pwlu.save(fresh, tmp_path / "again")
    copy.deepcopy(fresh)


def prelus():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.PReLU(4), nn.Conv2d(4, 4, 1), nn.PReLU(4))


def test_starts_that_differ_between_channels(tmp_path):
    """They are the same before and after realignment, for one model and for several units at a time."""
    model, fresh = prelus(), prelus()
    for place in (1, 3):
        nn.init.uniform_(model[place].weight, -1, 1)
    pwlu.convert_(model, X, kinds=["prelu"])
    pwlu.save(model, tmp_path / "file")
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model)
    found, expected = (unit.init for unit in (fresh[1], model[1]))
    assert found.channels == expected.channels == 4
    x = torch.linspace(-9, 9, 7, dtype=torch.float64).expand(8, 7)
    torch.testing.assert_close(found.function(x), expected.function(x), rtol=8 * 2.0**-53, atol=8 * 2.0**-53)
    for each in (fresh, model):
        for unit in units(each):
            unit.statistics.running_mean.copy_(torch.linspace(-1, 1, 4))
            unit.statistics.running_std.fill_(0.7)
            unit.statistics.updates.fill_(1)
        pwlu.realign_(each)
    assert not torch.equal(model[1].heights[0], model[1].heights[1])
    for a, b in zip(units(fresh), units(model), strict=True):
        torch.testing.assert_close(a.weight, b.weight, rtol=2.0**-23, atol=2.0**-23)  # float64, rounded once
    pwlu.save(fresh, tmp_path / "again")


def test_other_types_and_the_meta_device(tmp_path):
    model = converted(network()).double()
    pwlu.save(model, tmp_path / "file")
    fresh = network().double()
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model, X.double())
    with torch.device("meta"):
        fresh = network()
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model, X.double())


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2)

    def forward(self, x):
        return self.out(self.transformer(self.embed(x)))


def test_tied_weights_and_torchs_transformers(tmp_path):
    model, tokens = Tied(), torch.randint(7, (2, 5))
    pwlu.convert_(model, tokens)
    pwlu.save(model.eval(), tmp_path / "file")
    assert "out.weight" not in load_file(tmp_path / "file")
    fresh = Tied().eval()
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model, tokens)
    assert fresh.out.weight is fresh.embed.weight


def with_own_unit():
    """Two activations to convert, and a PWLU of the model's own. The linear layers share their weight and their scale."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), pwlu.PWLU(4, 16), nn.SiLU())
    model[2].weight, scale = model[0].weight, torch.ones(4)
    for layer in (model[0], model[2]):
        layer.register_buffer("scale", scale)
    return model


TIES = {
    "ordinary weights": [],
    "new units": [(3, 1), (6, 1)],
    "a new unit with one of the model": [(3, 5)],
    "the same, after it": [(5, 1)],
    "all": [(5, 1), (3, 1), (6, 1)],
}


def tied_units(where, ties):
    """Return a model whose units share weights, its unconverted form on the device `where`, and an input."""
    model, x = with_own_unit(), torch.randn(5, 4)
    pwlu.convert_(model, x, intervals=16)
    with torch.no_grad():
        model[5].weight += 0.1
    for one, other in ties:
        model[one].weight = model[other].weight
    with torch.device(where):
        return model, with_own_unit(), x


def shared(model):
    """Return the names that share each parameter and buffer."""
    groups = {}
    for key, value in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(value), set()).add(key)
    return {frozenset(group) for group in groups.values()}


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("ties", TIES)
def test_tied_weights_stay_tied(tmp_path, where, ties):
    model, fresh, x = tied_units(where, TIES[ties])
    fresh[0].weight.requires_grad_(False)
    pwlu.save(model, tmp_path / "file")
    names = pwlu.load_into(fresh, tmp_path / "file")
    assert names == ["1", "3", "6"]
    assert_the_same(fresh, model, x)
    assert shared(fresh) == shared(model)
    assert [p.requires_grad for p in fresh.parameters()] == [False] + [True] * (len(list(model.parameters())) - 1)
    assert all(type(value) is nn.Parameter for value in fresh.parameters())


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_dynamic_units_share_their_networks(tmp_path, where):
    """Weights in children of new units are shared as well."""
    model, fresh, x = tied_units(where, [])
    pwlu.restore_(model)
    pwlu.convert_(model, x, to=lambda channels, site: pwlu.DynamicPWLU(channels, channel_dim=site.channel_dim))
    model[3].squeeze = model[1].squeeze
    pwlu.save(model, tmp_path / "file")
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model, x)
    assert shared(fresh) == shared(model)


class Called(nn.Module):
    """A call that is rewritten, before and after a module that is not."""

    def __init__(self):
        super().__init__()
        self.act, self.layer = nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(F.relu(self.act(x)))


def with_one_unit(model, x):
    """Convert every site of a model to the same PWLU."""
    act = pwlu.PWLU(4, channel_dim=-1)
    report = pwlu.convert_(model, x, to=lambda channels, site: act)
    with torch.no_grad():
        act.weight += 0.1 * torch.randn_like(act.weight)
        act.statistics.running_mean.normal_()
    return report


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("make", [with_own_unit, lambda: nn.Sequential(Called(), Called(), nn.Tanh())])
def test_one_unit_in_several_places(tmp_path, where, make):
    """Load it into the same places of a fresh model, also if that has its own unit in each of them."""
    model, x = make(), torch.randn(5, 4)
    report = with_one_unit(model, x)
    assert [site.parameters for site in report.converted] == [84] + (len(report.converted) - 1) * [0]
    pwlu.save(model, tmp_path / "file")
    with torch.device(where):
        fresh = make()
    names = [site.name for site in report.converted]
    assert sorted(pwlu.load_into(fresh, tmp_path / "file")) == sorted(names)
    assert len({fresh.get_submodule(name) for name in names}) == 1
    assert shared(fresh) == shared(model)
    assert_the_same(fresh, model, x)
    assert pwlu.load_into(fresh, tmp_path / "file") == []
    separate = make()
    pwlu.convert_(separate, x)
    pwlu.load_into(separate, tmp_path / "file")
    assert shared(separate) == shared(model)
    assert_the_same(separate, model, x)


def test_an_own_unit_in_several_places(tmp_path):
    """It replaces what the fresh model has in these places: activations, or a unit that is in other places too."""
    model, x = with_own_unit(), torch.randn(5, 4)
    model[1] = model[3] = model[5]
    pwlu.save(model, tmp_path / "file")
    fresh = with_own_unit()
    assert pwlu.load_into(fresh, tmp_path / "file") == ["1", "3", "5"]
    assert_the_same(fresh, model, x)
    assert fresh[1] is fresh[3] is fresh[5]
    assert pwlu.load_into(copy.deepcopy(model), tmp_path / "file") == []
    own, other = with_own_unit(), with_own_unit()
    own[1] = own[3] = pwlu.PWLU(4)
    pwlu.save(own, tmp_path / "file")
    other[1] = other[3] = other[5]
    assert pwlu.load_into(other, tmp_path / "file") == ["5"]
    assert_the_same(other, own, x)
    assert other[1] is other[3] is not other[5]


def test_hooks_of_a_replaced_activation_stay(tmp_path):
    """Also if the same unit then replaces an activation without hooks."""
    model, calls = with_own_unit(), []
    handle = model[1].register_forward_hook(lambda *_: calls.append(1))
    with_one_unit(model, torch.randn(5, 4))
    model(torch.randn(5, 4))
    assert len(calls) == 3
    handle.remove()
    model(torch.randn(5, 4))
    assert len(calls) == 3


def test_only_tensors_on_the_meta_device_are_replaced(tmp_path):
    model, fresh, _ = tied_units("cpu", [(3, 1)])
    pwlu.save(model, tmp_path / "file")
    fresh[0].double()
    fresh[4] = nn.Linear(4, 4, device="meta")
    before = dict(fresh.named_parameters())
    pwlu.load_into(fresh, tmp_path / "file")
    after = dict(fresh.named_parameters())
    assert [key for key in before if after[key] is not before[key]] == ["4.weight", "4.bias"]
    assert after["0.weight"].dtype == torch.float64
    assert torch.equal(after["4.weight"], model[4].weight)


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_hooks_get_complete_state_dicts(tmp_path, where):
    model, fresh, _ = tied_units(where, [(3, 1)])
    pwlu.save(model, tmp_path / "file")
    seen = []
    fresh.register_load_state_dict_pre_hook(lambda module, state, *_: seen.append(set(state)))
    pwlu.load_into(fresh, tmp_path / "file")
    assert seen == [set(model.state_dict())] * (2 if where == "meta" else 1)


def test_a_model_without_values_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match=r"save: 0\.weight is on the meta device, which holds no values\. Load or initialise"):
        pwlu.save(with_own_unit().to("meta"), tmp_path / "file")
    assert not (tmp_path / "file").exists()


class Mirrored(nn.Module):
    """A module without parameters whose call is rewritten."""

    def forward(self, x):
        return x.flip(1) + F.relu(x)


class Twice(nn.Module):
    """The same object under two names, with different channels, in a model that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.lock = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 5, 1), None
        self.act = Mirrored()
        self.layers = nn.Sequential(self.act)

    def forward(self, x):
        return self.layers(self.second(self.act(self.first(x))))


@pytest.mark.parametrize("where", [None, lambda site: site.name.startswith("act"), lambda site: site.name.startswith("layers")])
def test_an_object_with_two_names_and_a_lock(tmp_path, where):
    model = converted(Twice(), where=where)
    pwlu.save(model, tmp_path / "file")
    fresh = Twice()
    fresh.lock = threading.Lock()
    pwlu.load_into(fresh, tmp_path / "file")
    fresh.lock = None
    assert_the_same(fresh, model)


def test_a_wrapped_model(tmp_path):
    model = converted()
    pwlu.save(torch.compile(model), tmp_path / "file")
    fresh = network()
    pwlu.load_into(fresh, tmp_path / "file")
    assert_the_same(fresh, model)
    with pytest.raises(ValueError, match=r"load_into: the model is already wrapped by OptimizedModule. Convert it first"):
        pwlu.load_into(torch.compile(network()), tmp_path / "file")


def test_it_is_an_ordinary_file_of_weights(tmp_path):
    """Other tools read it, and nothing in it is pickled."""
    model = converted()
    pwlu.save(model, tmp_path / "file")
    tensors = load_file(tmp_path / "file")
    assert tensors.keys() == model.state_dict().keys()
    content = (tmp_path / "file").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    conversion = json.loads(metadata["pwlu"])
    assert (conversion["format"], conversion["version"], conversion["model"]) == (1, pwlu.__version__, "Sequential")
    rows = {row["name"]: row for row in conversion["units"]}
    assert rows["4"]["init"] == "silu"
    assert (rows["2"]["channels"], rows["2"]["intervals"], rows["2"]["edit"]) == (4, 8, None)
    assert rows["0.relu"]["edit"][0] == "forward"


# What does not fit.


def rewritten(path, change):
    """The file with its conversion changed."""
    conversion = saving.conversion_of(converted())
    change(conversion)
    save_file({"a": torch.zeros(1)}, path, {"pwlu": json.dumps(conversion)})


class Another(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        return F.relu(self.a(x))


def wider():
    model = network()
    model[6] = nn.Linear(4, 3)
    return model


def edited():
    """A model whose source is not what it was."""
    model = network()
    model[0] = Edited()
    return model


class Edited(Block):
    def forward(self, x):
        return F.relu(self.act(self.b(self.act(self.a(x)))))


ERRORS = {
    "no place": (Another, r"Another has no place for 0.act. The file holds a Sequential: create the model as it was"),
    "shape": (wider, r"does not fit Sequential: 6.weight has the shape \(2, 4\), not \(3, 4\), 6.bias has the shape"),
    "source": (edited, "the source of Edited.forward has changed since the model was converted"),
}


@pytest.mark.parametrize("error", ERRORS)
def test_what_does_not_fit_is_left_as_it_was(tmp_path, error):
    make, message = ERRORS[error]
    pwlu.save(converted(), tmp_path / "file")
    model = make()
    before, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises((ValueError, RuntimeError), match=message):
        pwlu.load_into(model, tmp_path / "file")
    assert same(model.state_dict().values(), before.values())
    assert classes == [type(module) for module in model.modules()]


def set_of(row, key, value):
    return lambda conversion: conversion["units"][row].update({key: value})


FILES = {
    "later": (lambda c: c.update(format=4, version="9.9"), "written by a later version, pwlu 9.9, in format 4. This is "),
    "no units": (lambda c: c.pop("units"), "the conversion in the file is damaged: KeyError"),
    "no version": (lambda c: c.pop("version"), "the conversion in the file is damaged: KeyError"),
    "channels": (set_of(0, "channels", "many"), "damaged: .*channels must be an integer"),
    "dtype": (set_of(0, "dtype", "int8"), "damaged: .*a PWLU cannot have the dtype"),
    "dtype of nothing": (set_of(0, "dtype", "load"), "damaged: .*a PWLU cannot have the dtype"),
    "init": (set_of(0, "init", "os.system"), "damaged: .*init 'os.system' is not known"),
    "child": (set_of(1, "edit", ["forward", [0, 0], "x y", False, ""]), "damaged: .*must name the child '.*', not 'x y'"),
    "name": (set_of(0, "name", "no.such"), "Sequential has no place for no.such"),
}


@pytest.mark.parametrize("file", FILES)
def test_damaged_files(tmp_path, file):
    change, message = FILES[file]
    rewritten(tmp_path / "file", change)
    with pytest.raises(ValueError, match=message):
        pwlu.load_into(network(), tmp_path / "file")


def test_files_of_others(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "file")
    with pytest.raises(ValueError, match=r"does not say how its model was converted, so pwlu.save did not write it"):
        pwlu.load_into(network(), tmp_path / "file")
    torch.save({}, tmp_path / "pickled")
    with pytest.raises(ValueError, match="pickled is not a safetensors file, or is damaged"):
        pwlu.load_into(network(), tmp_path / "pickled")
    with pytest.raises(IsADirectoryError, match=r"load_into: .* is a folder. Pass a file in it, such as .*model.safetensors"):
        pwlu.load_into(network(), tmp_path)
    with pytest.raises(FileNotFoundError):
        pwlu.load_into(network(), tmp_path / "missing")
    pwlu.save(converted(), tmp_path / "whole")
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-100])
    with pytest.raises(ValueError, match="half is not a safetensors file, or is damaged"):
        pwlu.load_into(network(), tmp_path / "half")


def test_arguments_in_the_wrong_order(tmp_path):
    model, path = nn.Sequential(pwlu.PWLU()), tmp_path / "model.safetensors"
    for call in (pwlu.save, pwlu.load_into):
        with pytest.raises(TypeError, match=rf"{call.__name__}: model must be a torch.nn.Module, not .*Path. Write pwlu"):
            call(path, model)
    with pytest.raises(TypeError, match=r"load_into: model must be a torch.nn.Module, not type"):
        pwlu.load_into(nn.Sequential, path)


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match=r"save: Linear has no PWLU. Convert it first"):
        pwlu.save(nn.Linear(2, 2), tmp_path / "file")
    model = network()
    pwlu.convert_(model, X, where=lambda site: site.name == "2", init="relu", min_positions=1)
    pwlu.convert_(model, X, to="prelu", kinds=["silu"], min_positions=1)
    with pytest.raises(ValueError, match=r"must be PWLUs, but 4 is not \(PReLU\)\. Save before pwlu.fuse_ and pwlu.simplify_"):
        pwlu.save(model, tmp_path / "file")
    assert not any(tmp_path.iterdir())


def test_without_safetensors(processes):
    code = "import sys; sys.modules['safetensors'] = None; import pwlu; pwlu.save(pwlu.PWLU(), 'file')"
    done = processes(["-c", code], dict(os.environ))
    assert "ImportError: save needs the package safetensors" in done.stderr
    assert "pip install '.[save]'" in done.stderr
