"""``pwlu train`` on the command line: its output, its help, and its errors."""

import argparse
import builtins
import dataclasses
import re

import pytest
import torch
from lab_helpers import SHORT, train

from pwlu.cli import train as command
from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.settings import Settings, UserError, flag


def refused(capsys, *arguments):
    """Return the error of a command that ends with status 2, without a traceback."""
    assert train(*arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("pwlu train: ")
    assert "Traceback" not in printed.err
    return printed.err


def test_without_a_recipe_it_trains_the_digits(tmp_path, monkeypatch, capsys):
    """And ends with an accuracy, a picture of the learned functions and the path of the run folder."""
    monkeypatch.chdir(tmp_path)
    assert train("--epochs", 8, draw=True) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:8]] == [f"epoch {k:3d}/8" for k in range(1, 9)]
    accuracy = re.fullmatch(r"accuracy (\d+\.\d\d) % on 899 test images, 4,618 parameters, \S+ s per epoch", lines[8])
    assert float(accuracy[1]) > 85
    picture = "runs/digits-pwlu-epochs-8-seed0/functions.png"
    assert lines[9:] == [f"run folder: runs/digits-pwlu-epochs-8-seed0, figure of the learned functions: {picture}"]
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_knots_that_learn(tmp_path, capsys):
    """The functions are saved and drawn as those of other PWLUs. Training ended in an error when they were to be drawn."""
    assert train("--act", "nonuniform_pwlu", "--epochs", 2, "--realign-epochs", 1, "--runs", tmp_path, draw=True) == 0
    (run,) = tmp_path.iterdir()
    assert (run / "functions.png").is_file()
    capsys.readouterr()


def test_without_arguments_the_settings_are_those_of_the_recipe():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args([])
    assert vars(options).keys() == {field.name for field in dataclasses.fields(Settings)} | {"again", "resume", "runs"}
    assert options.recipe is options.resume is None
    assert command.changed_settings(options) == {}
    assert settings("digits").epochs == RECIPES["digits"].epochs == 40


def test_held_out_images(tmp_path, capsys):
    assert train(*SHORT, "--act", "relu", "--holdout", 99, "--runs", tmp_path) == 0
    assert re.search(r"accuracy \S+ % on 99 held-out training images, ", capsys.readouterr().out)


# Help.


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        train("--help")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    recipes = re.search(r"recipes: ((?:.+\n)+)", printed)[1]
    assert [name.strip() for name in recipes.replace("\n", " ").split(",")] == list(RECIPES)
    for line in ("pwlu train --resume runs/digits-pwlu-seed0", "torchrun --nproc-per-node 8 -m pwlu train imagenet/resnet18"):
        assert line in printed
    for field in dataclasses.fields(Settings)[1:]:
        assert re.search(rf"^  {flag(field.name)}\b", printed, re.MULTILINE)


def test_flags_change_settings():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = "imagenet/resnet18 --act relu --lr 0.3 --epochs 9 --compile --no-channels-last --precision bf16 --workers 0"
    options = parser.parse_args(words.split())
    changes = {"activation": "relu", "lr": 0.3, "epochs": 9, "compile": True, "channels_last": False, "precision": "bf16"}
    assert command.changed_settings(options) == changes | {"workers": 0}
    found = settings(options.recipe, **command.changed_settings(options))
    assert found == dataclasses.replace(settings("imagenet/resnet18"), **changes, workers=0)


def test_identity_is_what_is_computed():
    """Where and how fast is no part of it."""
    plain = settings("digits")
    machine = {"accumulate": 2, "compile": True, "channels_last": True, "data": "x", "device": "cpu", "workers": 1}
    assert plain.replace(**machine, tensorboard=True).identity() == plain.identity()
    for name in plain.identity():
        value = {str: "x", int: 99, float: 0.5}[next(f.type for f in dataclasses.fields(plain) if f.name == name)]
        assert dataclasses.replace(plain, **{name: value}).identity() != plain.identity()


# Mistakes.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("digit", "digits, "),
        ("cifar/resnet18", "cifar100/resnet18, "),
        ("imagenet/mobilenet", "imagenet/mobilenet_v2, "),
        ("zzz", ""),
    ],
)
def test_unknown_recipe(capsys, name, nearest):
    text = refused(capsys, name)
    assert f"there is no recipe {name!r}." in text
    assert f"Did you mean {nearest}" in text
    assert sum(recipe in re.split(r"[ ,?]+", text) for recipe in RECIPES) == 3
    assert f"pwlu train --help lists all {len(RECIPES)}" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--epochs", 0], "--epochs must be at least 1, not 0"),
        (["--batch", 0], "--batch must be at least 1, not 0"),
        (["--lr", 0], "--lr must be above 0, not 0.0"),
        (["--lr", "nan"], "--lr must be a finite number, not nan"),
        (["--weight-decay", -1], "--weight-decay must be at least 0"),
        (["--label-smoothing", 1], "--label-smoothing must be from 0 to below 1"),
        (["--warm-up", 1], "--warm-up must be from 0 to below 1"),
        (["--width", 0], "--width must be above 0"),
        (["--pixels", 7], "--pixels must be at least 8"),
        (["--holdout", -1], "--holdout must be at least 0"),
        (["--intervals", 0], "--intervals must be at least 1"),
        (["--realign-epochs", 0], "--realign-epochs must be above 0; to train without Phase I write --fix-init 3, not 0.0"),
        (["--fix-init", 3, "--rule", "shared"], "--rule shared needs Phase I: leave out --fix-init, or write --rule paper"),
        (["--act", "nonuniform_pwlu", "--rule", "shared"], "--rule shared needs PWLUs with equally spaced knots: leave it out"),
        (["--act", "nonuniform_pwlu", "--curvature", 0.1], "--curvature needs PWLUs with equally spaced knots: leave it out"),
        (["--fix-init", -1], "--fix-init must be above 0, such as 3"),
        (["--unit-lr", -1], "--unit-lr must be at least 0"),
        (["--curvature", -1], "--curvature must be at least 0"),
        (["--ema", 1], "--ema must be from 0 to below 1, such as 0.999"),
        (["--accumulate", 0], "--accumulate must be at least 1"),
        (["--workers", -1], "--workers must be at least 0"),
        (["--epochs", 3], r"Phase I must be shorter than training: --realign-epochs is 3, --epochs is 3"),
        (["--act", "rleu"], "--act rleu: activation: 'rleu' is not known. Write one of relu, "),
        (["--init", "rleu"], "init 'rleu' is not known"),
        (["--act", "frelu", "--granularity", "layer"], "--act frelu: convert_: to='frelu' needs granularity='channel'"),
        (["--device", "tpu"], "--device tpu: torch has no such device. Write cpu or cuda"),
        (["--device", "meta"], f"--device meta: torch {torch.__version__} cannot use it here. Write --device cpu"),
        (["--resume", "nowhere"], "there is no folder nowhere. pwlu train creates run folders, with config.json"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    assert text in refused(capsys, *arguments)
    assert not list(tmp_path.glob("runs/*"))  # no run was begun


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(tmp_path, capsys):
    assert "--device cuda: torch " in refused(capsys, "--device", "cuda", "--runs", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--epochs", "six"], ["--norm", "layer"], ["--precision", "int8"], ["--colour", "red"]])
def test_what_the_parser_refuses(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        train(*arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_settings_of_a_program_are_checked_too():
    with pytest.raises(UserError, match="--granularity must be channel or layer, not pixel"):
        settings("digits", granularity="pixel")
    with pytest.raises(UserError, match="--precision must be one of float32, bf16, fp16, float64, not int8"):
        settings("digits").replace(precision="int8")


@pytest.mark.parametrize(
    ("package", "text"),
    [
        ("sklearn", "the digits data set needs more packages (no sklearn): pip install '.[train]'"),
        ("matplotlib", "training needs more packages (no matplotlib): pip install '.[train]'"),
        ("safetensors", "training needs more packages (no safetensors): pip install '.[train]'"),
        ("pwlu.lab.training.loop", "training needs more packages (no pwlu.lab.training.loop): pip install '.[train]'"),
    ],
)
def test_missing_packages(tmp_path, monkeypatch, capsys, package, text):
    original = builtins.__import__

    def missing(name, *rest):
        if name.startswith(package):
            raise ImportError(f"no {package}")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert text in refused(capsys, *SHORT, "--runs", tmp_path)
