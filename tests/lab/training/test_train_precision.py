"""Precision, memory layout and compilation: how a network computes, not what."""

import copy
from functools import partial

import pytest
import torch
from lab_helpers import after, batches_of, short_run, take_steps, task_of, trainer_of
from safetensors.torch import load_file
from torch import nn

from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.processes import Processes
from pwlu.lab.training.trainer import Trainer
from pwlu.units.deferred_norm import DeferredNorm

SHORT = {"epochs": 3, "realign_epochs": 1.0, "batch": 128}
STEPS = 9  # 7 of them in Phase I


def types_of_outputs(trainer):
    """In a forward pass as a step makes it: of convolutions and of units."""
    seen = {}
    handles = [
        module.register_forward_hook(lambda module, _, y, name=name: seen.update({name: y.dtype}))
        for name, module in trainer.network.named_modules()
        if isinstance(module, nn.Conv2d) or name in trainer.units
    ]
    ((images, _),) = next(batches_of(trainer.task))
    with trainer.autocast():
        trainer.network(images)
    for handle in handles:
        handle.remove()
    return set(seen.values())


@pytest.fixture(scope="module")
def exact():
    return after(STEPS, **SHORT, precision="float64", fuse_norms="off")


@pytest.mark.parametrize(
    ("precision", "computed", "kept"),
    [
        ("float32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("float64", torch.float64, torch.float64),
    ],
)
def test_precision(exact, precision, computed, kept):
    """What is learned and what is measured keeps its precision, whatever the network computes in."""
    trainer = after(STEPS, **SHORT, precision=precision)
    found = trainer.task.measure(trainer.network, trainer.autocast())
    difference = abs(found["test_loss"] - exact.task.measure(exact.network, exact.autocast())["test_loss"])
    unit = torch.finfo(computed).eps / 2
    assert unit / 1e4 < difference < 1e4 * unit or precision == "float64"  # rounded that coarsely, and the same training
    assert trainer.phase == 2
    assert trainer.scaler.is_enabled() == (precision == "fp16")
    assert types_of_outputs(trainer) == {computed}
    assert {p.dtype for p in trainer.network.parameters()} == {kept}


def test_overflow_in_half_precision_is_skipped():
    """A step that did not happen is none of Phase I either, and the scale of the loss falls."""
    trainer = trainer_of(task_of(**SHORT, precision="fp16"))
    trainer.scaler.scale(torch.zeros(()))  # which makes it begin
    before = copy.deepcopy(trainer.network.state_dict())
    trainer.scaler.update(torch.tensor(2.0**120))
    take_steps(trainer, 1)
    assert trainer.scaler.get_scale() == 2.0**119
    assert trainer.phases.steps == 0
    assert torch.equal(trainer.network.state_dict()["0.weight"], before["0.weight"])
    trainer.scaler.update(torch.tensor(2.0**10))
    take_steps(trainer, 1)
    assert trainer.phases.steps == 1
    assert not torch.equal(trainer.network.state_dict()["0.weight"], before["0.weight"])


def test_channels_last(exact):
    trainer = after(STEPS, **SHORT, channels_last=True, precision="float64")
    ((images, _),) = next(batches_of(trainer.task))
    tested = next(trainer.task.test_batches())[0]
    weight = trainer.network[3].weight
    for tensor in (images.expand(-1, 2, -1, -1).contiguous(memory_format=trainer.task.layout), weight):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
        assert not tensor.is_contiguous()
    assert tested.is_contiguous(memory_format=torch.channels_last)
    assert exact.network[3].weight.is_contiguous()
    torch.testing.assert_close(weight, exact.network[3].weight, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fuse_norms", ["off", "on"])
def test_compiled(tmp_path, monkeypatch, fuse_norms):
    """The whole command, in both phases: to rounding the same training. The quickest compiler will do."""
    compiled = []
    compiler = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or compiler(model))
    folder = short_run(tmp_path / "compiled", "--compile", "--precision", "float64", "--fuse-norms", fuse_norms)
    assert len(compiled) == 1
    plain = short_run(tmp_path / "plain", "--precision", "float64")
    assert len(compiled) == 1
    for row, expected in zip(folder.metrics(), plain.metrics(), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)  # metrics have seven digits
        assert row["accuracy"] == expected["accuracy"]
    states = [load_file(f.path / "model.safetensors") for f in (folder, plain)]
    assert states[0].keys() == states[1].keys()  # no trace of the compiler in their names


# Batch norms in one pass with PWLUs.


def test_fused_norms_change_nothing_but_the_time(exact):
    fused = after(STEPS, **SHORT, precision="float64", fuse_norms="on")
    assert sum(isinstance(module, DeferredNorm) for module in fused.network.modules()) == 3
    assert not any(isinstance(module, DeferredNorm) for module in exact.network.modules())
    torch.testing.assert_close(fused.network.state_dict(), exact.network.state_dict(), rtol=1e-7, atol=1e-7)


def test_where_norms_are_fused(monkeypatch):
    """auto: with PWLUs behind batch norms; on a CPU not in channels_last or compiled.

    No GPU is needed to see it: nothing is computed there.
    """
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    never = ({"fuse_norms": "off"}, {"activation": "relu"})
    for device, last in (("cuda", 3), ("cpu", 0)):
        for changes, fused in (
            ({}, 3),
            ({"channels_last": True}, last),
            ({"compile": True}, last),
            *((changes, 0) for changes in never),
        ):
            task = task_of(**changes)
            trainer = Trainer(task, task.settings, Processes(0, 1, torch.device(device)))
            assert sum(isinstance(module, DeferredNorm) for module in trainer.network.modules()) == fused
            assert trainer.fuse_norms == ("on" if fused else "off")
    monkeypatch.setattr("pwlu.lab.training.trainer.warm_up", lambda device: 0)  # no compiled kernel
    assert trainer_of(task_of()).fuse_norms == "off"
    with pytest.raises(UserError, match=r"--fuse-norms on: fuse_norms_: .* has no PWLU"):
        trainer_of(task_of(activation="relu", fuse_norms="on"))
    with pytest.raises(UserError, match="--fuse-norms must be one of auto, on, off, not yes"):
        task_of(fuse_norms="yes")
