"""Every recipe for classification builds, takes steps in both phases, and says what the paper says."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from lab_helpers import one_thread, take_steps, task_of, trainer_of, write_cifar, write_images, write_tiny_imagenet
from networks import of_units, same, values
from torch import nn

from pwlu import baselines
from pwlu.lab.models import networks
from pwlu.lab.recipes.catalog import RECIPES, settings
from pwlu.lab.recipes.settings import UserError

# Places with an activation; those of squeeze-and-excitation stay as they were.
SITES = {
    "convnet": 3,
    "resnet18": 17,
    "resnet50": 49,
    "mobilenet_v1": 27,
    "mobilenet_v2": 35,
    "mobilenet_v3_small": 24,
    "efficientnet_b0": 33,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """By the kind of data set that a recipe names."""
    folder = tmp_path_factory.mktemp("data")
    return {
        "cifar100": write_cifar(folder / "cifar"),
        "tinyimagenet": write_tiny_imagenet(folder / "tiny"),
        "folder": write_images(folder / "images"),
        "digits": folder,
    }


SLOW = re.compile("(tiny)?imagenet(te)?/(mobilenet|efficientnet)")  # these train on the images of CIFAR in `make test`


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if SLOW.match(name) else [])
        for name, row in RECIPES.items()
        if not row.detects  # others: test_detection_training
    ],
)
def test_every_recipe_trains(data, name):
    """Two steps, one in each phase."""
    row = RECIPES[name]
    pixels = min(row.pixels, 64)
    changes = {"pixels": pixels, "batch": 4, "epochs": 2, "realign_epochs": 1 / 3 if name != "digits" else 1 / 224}
    task = task_of(name, **changes, data=str(data[row.data]), workers=0)
    trainer = trainer_of(task)
    assert len(trainer.units) == len(trainer.report.converted) == SITES[row.network]
    seen = []
    take_steps(trainer, 2, lambda number: seen.append((trainer.phase, values(of_units(trainer.network)))))
    assert [phase for phase, _ in seen] == [1, 2]
    assert not same(seen[1][1], values(of_units(trainer.network)))
    assert all(p.isfinite().all() for p in trainer.network.parameters())


OTHERS = [
    *itertools.product(["convnet"], ["relu", "prelu", "swish", "frelu"]),
    *[("resnet18", "swish"), ("mobilenet_v3_small", "frelu")],
]


@pytest.mark.parametrize(("network", "activation"), OTHERS)
def test_other_activations(data, network, activation):
    """A step each, in place of every function that PWLUs replace."""
    name = next(n for n in ("digits", *RECIPES) if RECIPES[n].network == network)
    kind = RECIPES[name].data
    task = task_of(
        name, activation=activation, pixels=8 if kind == "digits" else 32, batch=4, data=str(data[kind]), workers=0, epochs=1
    )
    trainer = trainer_of(task)
    kinds = {"relu": nn.ReLU, "prelu": baselines.PReLU, "swish": nn.SiLU, "frelu": (baselines.FReLU, nn.ReLU)}
    for site in trainer.report.converted:
        assert isinstance(trainer.network.get_submodule(site.name), kinds[activation])
    assert len(trainer.report.converted) > SITES[network] / 2  # the last maps are a single pixel here, and stay
    before = values(trainer.network.parameters())
    take_steps(trainer, 1)
    after = list(trainer.network.parameters())
    assert all(p.isfinite().all() for p in after)
    assert not same(before, after)


def test_start_as_what_stood_there(data):
    """MobileNet-V3 has two kinds of activations."""
    task = task_of("cifar100/mobilenet_v3_small", init="same", data=str(data["cifar100"]), batch=4)
    starts = [unit.init for unit in trainer_of(task).units.values()]
    assert set(starts) == {"relu", "hardswish"}


@pytest.mark.parametrize(
    ("network", "epochs", "weight_decay", "augmentation"),
    [
        ("resnet18", 100, 1e-4, "crop+flip"),
        ("resnet50", 100, 1e-4, "crop+flip"),
        ("mobilenet_v2", 200, 4e-5, "crop+flip"),
        ("mobilenet_v3_small", 350, 4e-5, "crop+flip"),
        ("efficientnet_b0", 350, 1e-5, "autoaugment"),
    ],
)
def test_the_settings_of_the_paper(network, epochs, weight_decay, augmentation):
    found = settings(f"imagenet/{network}")
    assert (found.epochs, found.weight_decay, found.augmentation) == (epochs, weight_decay, augmentation)
    assert (found.batch, found.realign_epochs, found.intervals, found.granularity) == (1024, 5, 16, "channel")
    assert (found.init, found.unit_lr, found.curvature, found.pixels) == ("relu", 1.0, 0.0, 224)
    (group,) = trainer_of(task_of(activation="relu")).optimizer.param_groups
    assert group["momentum"] == 0.9
    assert found.warm_up == 0.1  # ours, as is the peak rate


def test_the_page_of_recipes_has_their_values():
    page = (Path(__file__).parents[3] / "docs/recipes.md").read_text()
    lines = [line for line in page.splitlines() if re.match(r"\| (imagenet|tinyimagenet|cifar100|digits)", line)]
    table = [line.strip("| ").split(" | ") for line in lines]
    seen = []
    for names, epochs, batch, peak, weight_decay, _, realign_epochs in table:
        numbers = [
            float(number.removesuffix(" *").removesuffix(" epochs"))
            for number in (epochs, batch, peak, weight_decay, realign_epochs)
        ]
        prefix = names.partition("/")[0] + "/"
        for name in re.sub(r" \(.*?\)", "", names).split(", "):
            seen.append(name if name in RECIPES else prefix + name)
            found = settings(seen[-1])
            assert [found.epochs, found.batch, found.lr, found.weight_decay, found.realign_epochs] == numbers, seen[-1]
    assert seen == [name for name, row in RECIPES.items() if not row.detects]


def test_the_rate_of_pau():
    """Chosen on held-out images, recipe by recipe; every other activation learns at the common rate."""
    rates = {"digits": 1e-4, "cifar100/resnet18": 3e-4, "cifar100/mobilenet_v3_small": 1e-3, "imagenet/resnet18": 1e-4}
    assert {name: settings(name, activation="pau").unit_lr for name in rates} == rates
    assert settings("cifar100/resnet18", activation="apl").unit_lr == settings("cifar100/resnet18").unit_lr == 1
    assert settings("cifar100/resnet18", activation="pau", unit_lr=0.5).unit_lr == 0.5


# The networks.


@pytest.mark.parametrize("network", ["resnet18", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"])
def test_networks_for_small_images(network):
    """A quarter of the stride, and about a quarter of the weights for half the width."""
    sizes = {}
    for small in (False, True):
        model = networks.build(network, 7, width=0.5, small=small).eval()
        maps = []
        features = model.layer4 if network == "resnet18" else model.features
        features.register_forward_hook(lambda module, inputs, output, maps=maps: maps.append(output.shape[-1]))
        with one_thread(), torch.no_grad():
            assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
        sizes[small] = maps[0]
    assert (sizes[False], sizes[True]) == (2, 8)
    half, whole = (sum(p.numel() for p in networks.build(network, 7, width=w).parameters()) for w in (0.5, 1.0))
    assert 0.2 < half / whole < 0.5


@pytest.mark.parametrize(
    ("network", "parameters"),
    [
        ("resnet18", 11_689_512),
        ("resnet50", 25_557_032),
        ("mobilenet_v2", 3_504_872),
        ("mobilenet_v3_small", 2_542_856),
        ("efficientnet_b0", 5_288_548),
    ],
)
def test_networks_are_the_usual_ones(network, parameters):
    """As many weights as torchvision's documentation has, for 1000 classes."""
    with torch.device("meta"):
        assert sum(p.numel() for p in networks.build(network, 1000).parameters()) == parameters


@pytest.mark.parametrize("network", SITES)
def test_group_norm(network):
    channels = 1 if network == "convnet" else 3
    with torch.device("meta"):
        model = networks.build(network, 10, channels, norm="group")
    kinds = [type(module) for module in model.modules()]
    assert nn.GroupNorm in kinds
    assert nn.BatchNorm2d not in kinds


def test_a_width_that_does_not_exist(data):
    task = task_of("imagenet/resnet50", width=0.5, batch=4, data=str(data["folder"]), workers=0)
    with pytest.raises(UserError, match="--width does not work for resnet50: leave it out, or choose a resnet18 recipe"):
        task.network()
