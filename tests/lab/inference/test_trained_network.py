"""The network of a run, made again from its folder: the same in every bit; what is no such folder is named."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from lab_helpers import NAME, one_thread, same_state, short_run, task_of, write_cifar, write_images
from safetensors.torch import load_file
from torch import nn
from trained_helpers import folder_of

import pwlu
from pwlu.lab.inference.trained_network import load
from pwlu.lab.models import networks
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.results import keep, read_run


@pytest.fixture
def run(digits_run):
    return digits_run.path


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


@pytest.mark.parametrize("flags", ["", "--ema 0.9 --intervals 8 --granularity layer --norm group", "--act frelu", "--act relu"])
def test_it_measures_as_the_run_did(flags, run, tmp_path):
    path = short_run(tmp_path, *flags.split()).path if flags else run
    trained = load(path)
    assert (trained.info.shape, trained.info.classes) == ((1, 8, 8), tuple("0123456789"))
    assert trained.info.sites == dict.fromkeys(("2", "5", "8"), "ReLU()")
    assert not any(module.training for module in trained.network.modules())
    with one_thread():
        found = task_of(**trained.settings.as_dict() | {"channels_last": False}).measure(trained.network, nullcontext())
    result = json.loads((path / "result.json").read_text())
    assert found["accuracy"] == pytest.approx(result["accuracy"], rel=1e-6)  # it is rounded there
    assert found["test_loss"] == pytest.approx(result["test_loss"], rel=1e-6)


def test_float64_is_rounded(tmp_path):
    path = short_run(tmp_path, "--precision", "float64").path
    state = load(path).network.state_dict()
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}
    saved = load_file(path / "model.safetensors")
    assert same_state(state, {name: t.float() if t.is_floating_point() else t for name, t in saved.items()})


@pytest.mark.parametrize(
    "network",
    ["resnet18", "mobilenet_v3_small", *(pytest.param(n, marks=pytest.mark.slow) for n in ("mobilenet_v2", "efficientnet_b0"))],
)
def test_every_architecture(network, tmp_path):
    recipe = f"cifar100/{network}"
    trainer = folder_of(task_of(recipe, data=str(write_cifar(tmp_path)), batch=4, width=0.25), tmp_path / "run")
    trained = load(tmp_path / "run")
    assert same_state(trained.network.state_dict(), trainer.measured.state_dict())
    assert (trained.info.shape, len(trained.info.classes)) == ((3, 32, 32), 100)
    assert list(trained.info.sites) == [site.name for site in trainer.report.converted]
    x = trained.sample(2)
    with one_thread(), torch.no_grad():
        assert torch.equal(trained.network(x), trainer.measured.eval()(x))


@pytest.mark.parametrize("detector", ["maskrcnn", "retinanet"])
def test_detectors(detector, tmp_path):
    import detection_helpers as helpers  # skips the test if a package is missing

    task = helpers.task_of(f"tiny/{detector}_resnet18_fpn", helpers.write_objects(tmp_path))
    trainer = folder_of(task, tmp_path / "run")
    trained = load(tmp_path / "run")
    assert same_state(trained.network.state_dict(), trainer.measured.state_dict())
    assert (trained.info.shape, len(trained.info.classes), trained.detects) == ((3, 96, 96), 2, True)
    backbone = trained.backbone()
    assert 0 < len(backbone.info.sites) < len(trained.info.sites)
    assert all(type(backbone.network.get_submodule(name)).__name__ == "PWLU" for name in backbone.info.sites)
    assert backbone.network(backbone.sample(2))["0"].shape[0] == 2


# What an input is: the data set need not be there any more.


def test_the_numbers_of_digits(run):
    found, data = load(run).info, task_of().data
    x = data.test.images[:7] / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (found.mean, found.std))
    (expected, _) = next(data.test.batches([torch.arange(7)]))
    torch.testing.assert_close((x - mean) / std, expected, rtol=8 * 2.0**-24, atol=8 * 2.0**-24)
    assert found.classes == tuple("0123456789")
    assert "scikit-learn's numbers times 15/255, pixels from 0 to 1, minus 0.286, divided by 0.3532" in str(found)


def test_the_numbers_of_image_files(tmp_path):
    task = task_of("imagenette/resnet18", data=str(write_images(tmp_path)), width=0.1, pixels=28, batch=4, workers=0)
    folder_of(task, tmp_path / "run")
    shutil.rmtree(tmp_path / "train")
    found = load(tmp_path / "run").info
    for values, expected in ((found.mean, task.data.train.mean), (found.std, task.data.train.std)):
        torch.testing.assert_close(torch.tensor(values)[:, None, None] * 255, expected, rtol=4 * 2.0**-24, atol=0)
    assert found.classes == ("cat", "dog", "eel")
    assert "shorter side scaled to 32, the 28 x 28 in the middle" in str(found)


def test_the_numbers_of_cifar(tmp_path):
    data = write_cifar(tmp_path / "data")
    task = task_of("cifar100/resnet18", data=str(data), batch=4, width=0.1, holdout=3)
    folder_of(task, tmp_path / "run")
    shutil.rmtree(data)
    found = load(tmp_path / "run").info
    assert [255 * value for value in found.mean] == pytest.approx(task.data.train.mean.tolist())
    assert found.classes[7] == "kind 7"


# What is no run, or half of one.


def refused(path):
    with pytest.raises(UserError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "network.json"])
def test_no_weights(copied, name):
    (copied / name).unlink()
    text = refused(copied)
    assert f"has the results of a run but no {name}, like the runs in results/" in text
    assert f"such as runs/{NAME.format('')}" in text
    (copied / "result.json").unlink()
    assert (
        refused(copied) == f"{copied} is not finished: it has completed 3 epochs. Continue it with pwlu train --resume {copied}"
    )
    (copied / "metrics.jsonl").unlink()
    assert "it has completed 0 epochs. Continue it with" in refused(copied)


def test_a_run_in_results(run, tmp_path):
    assert "has the results of a run but no model.safetensors" in refused(keep(read_run(run), tmp_path))


@pytest.mark.parametrize("flags", [["--fuse-norms", "on"], ["--act", "prelu"], ["--act", "apl"], ["--act", "pau"]])
def test_other_runs(flags, tmp_path):
    path = short_run(tmp_path, *flags).path
    assert same_state(load(path).network.state_dict(), load_file(path / "model.safetensors"))


def test_it_is_what_save_writes(run):
    """So load_into reads it without anything of the lab."""
    trained = load(run)
    network = networks.build("convnet", 10, 1)
    assert pwlu.load_into(network, run / "model.safetensors") == ["2", "5", "8"]
    assert same_state(network.state_dict(), trained.network.state_dict())


@pytest.mark.parametrize("change", [{"width": 2.0}, {"activation": "relu"}, {"recipe": "cifar100/resnet18"}])
def test_settings_of_another_network(change, copied):
    config = json.loads((copied / "config.json").read_text()) | change
    (copied / "config.json").write_text(json.dumps(config))
    assert "does not hold the weights of the network that config.json describes" in refused(copied)


def test_a_run_that_diverged(copied):
    trained = load(copied).network
    nn.init.constant_(trained[11].bias, float("nan"))
    pwlu.save(trained, copied / "model.safetensors")
    assert "are not all finite. Train again, with a smaller --lr" in refused(copied)
    result = json.loads((copied / "result.json").read_text()) | {"diverged": True, "diverged_at_epoch": 2}
    (copied / "result.json").write_text(json.dumps(result))
    assert "has no trained network. The training diverged in epoch 2: the loss rose to" in refused(copied)
