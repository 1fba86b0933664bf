"""The models of others: every place where they apply an activation, counted by hand from their sources.

Images are of 64 pixels or more: with 32, late maps would have one position and be left alone like squeeze-and-excitation.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from blocks import units
from torch import nn
from torch.utils._pytree import tree_leaves

import pwlu

FUNCTIONS = {"relu": F.relu, "relu6": F.relu6, "hardswish": F.hardswish, "silu": F.silu, "gelu": F.gelu}
IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


class Case(NamedTuple):
    """`skipped`: in squeeze-and-excitation blocks, or on maps of one position. `train_only`: of the converted."""

    make: object
    converted: int
    skipped: int = 0
    train_only: int = 0
    gelu: object = F.gelu


def torchvision(name, **options):
    def make():
        models = pytest.importorskip("torchvision").models
        model = models.get_model(name, weights=None, **options)
        return model, IMAGES

    return make


def timm(name, **options):
    def make():
        return pytest.importorskip("timm").create_model(name, **options), IMAGES

    return make


def transformers(model, config, **options):
    def make():
        library = pytest.importorskip("transformers")
        images = {"pixel_values": IMAGES}
        words = {"input_ids": torch.arange(20).view(2, 10), "attention_mask": torch.ones(2, 10, dtype=torch.int64)}
        return getattr(library, model)(getattr(library, config)(**options)), images if "image_size" in options else words

    return make


BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 50}
CASES = {
    "resnet18": Case(torchvision("resnet18"), 1 + 8 * 2),  # stem, BasicBlocks
    "resnet50": Case(torchvision("resnet50"), 1 + 16 * 3),  # stem, Bottlenecks
    "mobilenet_v2": Case(torchvision("mobilenet_v2"), 1 + 1 + 16 * 2 + 1),  # stem, a block without expansion, others, last
    # stem, a block without expansion, others, last, classifier; squeeze-and-excitation in 9 of 11 blocks
    "mobilenet_v3_small": Case(torchvision("mobilenet_v3_small"), 1 + 1 + 10 * 2 + 1 + 1, 9),
    "mobilenet_v3_large": Case(torchvision("mobilenet_v3_large"), 1 + 1 + 14 * 2 + 1 + 1, 8),  # in 8 of 15
    "efficientnet_b0": Case(torchvision("efficientnet_b0"), 1 + 1 + 15 * 2 + 1, 16),  # stem, MBConvs, last; SE in all
    "densenet121": Case(torchvision("densenet121"), 1 + 58 * 2 + 3 + 1),  # stem, layers, transitions, F.relu at the end
    # 3 convolutions, Inceptions, and two auxiliary heads, in training, with a convolution and a linear layer
    "googlenet": Case(torchvision("googlenet", aux_logits=True, init_weights=False), 3 + 9 * 6 + 2 * 2, train_only=4),
    "regnet_y_400mf": Case(torchvision("regnet_y_400mf"), 1 + 16 * 3, 16),  # stem, blocks; SE in all
    "regnet_x_400mf": Case(torchvision("regnet_x_400mf"), 1 + 22 * 3),
    "convnext_tiny": Case(torchvision("convnext_tiny"), 3 + 3 + 9 + 3),
    "vit_b_16": Case(torchvision("vit_b_16", image_size=64), 12),
    "swin_t": Case(torchvision("swin_t"), 2 + 2 + 6 + 2),
    "timm resnet18": Case(timm("resnet18"), 1 + 8 * 2),
    # stem, a block without expansion, others, last; SE in 9 blocks, and a head on a map of one position
    "timm mobilenetv3_small_100": Case(timm("mobilenetv3_small_100"), 1 + 1 + 10 * 2 + 1, 9 + 1),
    "timm efficientnet_b0": Case(timm("efficientnet_b0"), 1 + 1 + 15 * 2 + 1, 16),
    "timm vit_tiny": Case(timm("vit_tiny_patch16_224", img_size=64), 12),
    # layers
    "ViT": Case(
        transformers("ViTForImageClassification", "ViTConfig", **BERT | {"vocab_size": None}, image_size=64, patch_size=16), 3
    ),
    "BERT": Case(transformers("BertForSequenceClassification", "BertConfig", **BERT), 3),
    "BERT with a head": Case(transformers("BertForMaskedLM", "BertConfig", **BERT), 3 + 1),
    # layers, and an nn.ReLU() made in the forward of the head
    "DistilBERT": Case(
        transformers(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            dim=32,
            n_layers=3,
            n_heads=2,
            hidden_dim=48,
            vocab_size=50,
        ),
        3 + 1,
    ),
    "GPT-2": Case(
        transformers("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=3, n_head=2, vocab_size=50),
        3,
        gelu=partial(F.gelu, approximate="tanh"),
    ),
}


def call(model, sample):
    return model(**sample) if isinstance(sample, dict) else model(*sample) if isinstance(sample, tuple) else model(sample)


def fill_zeros(model):
    """Replace weights of zero, which let no gradient through."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)


def check_sites(model, sample, sites, functions=FUNCTIONS):
    """Each unit is called, and on its real inputs is within the reported error of what stood there."""
    called = set()

    def check(site, unit, inputs, y):
        called.add(site.name)
        (x,) = inputs
        bound = site.error + 8 * torch.finfo().eps * (x.abs() + sum(map(abs, unit.bounds)))
        assert ((y - functions[site.kind](x)).abs() <= bound).all(), site

    new = units(model)
    for site in sites:
        new[site.name].register_forward_hook(partial(check, site))
    with torch.no_grad():
        call(model, sample)
    assert called == {site.name for site in sites}


def check_training(model, sample):
    """One step of small values: every unit has gradients and changes."""
    new = units(model)
    before = {name: unit.heights.detach().clone() for name, unit in new.items()}
    optimizer = torch.optim.SGD([p for unit in new.values() for p in unit.parameters()], lr=1.0)
    outputs = [leaf for leaf in tree_leaves(call(model, sample)) if torch.is_tensor(leaf) and leaf.requires_grad]
    sum((leaf - torch.randn_like(leaf)).square().mean() for leaf in outputs).backward()
    assert all(p.grad is not None for unit in new.values() for p in unit.parameters())
    optimizer.step()
    assert [name for name, unit in new.items() if torch.equal(unit.heights, before[name])] == []


SMALL = ("mobilenet_v3_small", "timm vit_tiny", "ViT", "BERT with a head", "DistilBERT", "GPT-2")  # one of each kind


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in SMALL else pytest.mark.slow) for name in CASES])
@pytest.mark.filterwarnings("ignore:Importing from timm.models:FutureWarning")
def test_every_activation_is_found(name):
    case = CASES[name]
    model, sample = case.make()
    fill_zeros(model)
    keys = list(model.state_dict())
    report = pwlu.convert_(model, sample, init="same")
    assert len(report.converted) == len(units(model)) == case.converted
    assert len([site for site in report.of("skipped") if site.kind in FUNCTIONS]) == case.skipped
    assert not report.of("impossible")
    assert not report.of("unreached")
    assert not report.notes
    assert [key for key in model.state_dict() if key in set(keys)] == keys
    in_eval = [site for site in report.converted if "eval" in site.modes]
    assert len(in_eval) == case.converted - case.train_only
    check_sites(model.eval(), sample, in_eval, FUNCTIONS | {"gelu": case.gelu})
    check_training(model.train(), sample)


# Detection: the body of the ResNet with 49 sites, in training with targets and for evaluation without.


def detector(name, **options):
    torchvision = pytest.importorskip("torchvision")
    make = getattr(torchvision.models.detection, name)
    return make(weights=None, weights_backbone=None, num_classes=3, max_size=160, **options)


def image_and_target():
    box = torch.tensor([[8.0, 8.0, 40.0, 48.0]])
    mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
    mask[:, 8:48, 8:40] = 1
    return [torch.rand(3, 64, 64)], [{"boxes": box, "labels": torch.tensor([1]), "masks": mask}]


@pytest.mark.slow
@pytest.mark.parametrize("with_targets", [True, False])
@pytest.mark.parametrize(
    ("name", "options", "converted", "levels"),
    [
        # P7, which is made of relu(P6), here of 2 x 2 positions; two heads of four convolutions on P3 to P7
        (
            "retinanet_resnet50_fpn",
            {"min_size": 128},
            49 + 1 + 2 * 4,
            {"head.classification_head.conv.0.1": 5, "head.regression_head.conv.3.1": 5},
        ),
        # the proposals' head on P2 to P6, two layers for boxes, four convolutions and a last one for masks
        (
            "maskrcnn_resnet50_fpn",
            {"min_size": 64, "box_score_thresh": 0.0},
            49 + 1 + 2 + 4 + 1,
            {"rpn.head.conv.0.1": 5, "roi_heads.mask_head.0.1": 1},
        ),
    ],
)
def test_detection(name, options, converted, levels, with_targets):
    model = detector(name, **options)
    images, targets = image_and_target()
    report = pwlu.convert_(model, (images, targets) if with_targets else (images,), init="same")
    assert len(report.converted) == len(units(model)) == converted
    assert not report.of("impossible")
    assert not report.of("unreached")
    calls = {site.name: site.calls for site in report.converted}
    assert {name: calls[name] for name in levels} == {name: n * (2 if with_targets else 1) for name, n in levels.items()}
    if with_targets:
        assert not report.notes
        check_sites(model.eval(), (images,), report.converted)
        check_training(model.train(), (images, targets))
    else:
        (note,) = report.notes
        assert note.startswith(
            "In train mode, the model could not be run on the sample (AssertionError: targets should not be none"
        )
