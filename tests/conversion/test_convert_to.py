"""convert_ with the activations to compare with: along which dimension, in which type, and in networks of others."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from blocks import IMAGES, Net, conv
from helpers import parameter_dtype
from torch import nn

import pwlu
from pwlu.baselines import APL, PAU, FReLU, PReLU, ReLU

CLASSES = {"relu": nn.ReLU, "prelu": PReLU, "swish": nn.SiLU, "apl": APL, "pau": PAU, "frelu": FReLU, "pwlu": pwlu.PWLU}


class Sequence(Net):
    def forward(self, x):
        return self.out(F.gelu(self.hidden(x)))


@pytest.mark.parametrize("name", CLASSES)
def test_channels_of_a_transformer(name):
    """In its MLP the channels are the last dimension, of (batch, time, channels)."""
    model, x = Sequence(hidden=nn.Linear(4, 7), out=nn.Linear(7, 4)), torch.randn(2, 5, 4)
    (site,) = pwlu.convert_(model, x, to=name).converted
    expected = {"relu": 0, "prelu": 7, "swish": 0, "apl": 42, "pau": 10, "frelu": 0, "pwlu": 7 * 21}
    assert site.parameters == sum(p.numel() for p in model.gelu.parameters()) == expected[name]
    assert site.reason == {
        "frelu": "replaced by ReLU: FReLU needs a 4-d feature map",
        "pau": "starts within 0.0025 of gelu for |x| <= 3",
    }.get(name, "")
    if name in ("prelu", "apl"):
        hidden = torch.randn(2, 5, 7)
        alone = pwlu.activation(name, 7)
        alone.load_state_dict(model.gelu.state_dict())
        assert torch.equal(model.gelu(hidden), alone(hidden.transpose(1, 2)).transpose(1, 2))
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", CLASSES)
def test_types(name, dtype):
    """Parameters that are no weights of a convolution stay wide in a narrow model."""
    model, x = nn.Sequential(conv(), nn.ReLU()).to(dtype), IMAGES.to(dtype)
    pwlu.convert_(model, x, to=name)
    types = {p.dtype for p in model[1].parameters()}
    assert types <= {dtype if name == "frelu" else parameter_dtype(dtype)}
    assert model(x).dtype == dtype


def test_one_a_layer():
    for name, parameters in {"relu": 0, "swish": 0, "prelu": 1, "apl": 6, "pau": 10, "pwlu": 21}.items():
        model = nn.Sequential(conv(), nn.ReLU())
        assert pwlu.convert_(model, IMAGES, to=name, granularity="layer").parameters == parameters
        model(IMAGES)
    with pytest.raises(ValueError, match=r"to='frelu' needs granularity='channel', not 'layer'.*Leave granularity out"):
        pwlu.convert_(nn.Sequential(conv(), nn.ReLU()), IMAGES, to="frelu", granularity="layer")


def test_pau_starts_as_what_stood_there():
    model = nn.Sequential(conv(), nn.LeakyReLU(0.2), nn.Tanh(), nn.ReLU())
    report = pwlu.convert_(model, IMAGES, to="pau", kinds=("leaky_relu", "tanh", "relu"))
    x = torch.linspace(-3, 3, 100)
    for site, act, function in zip(report, model[1:], (nn.LeakyReLU(0.2), nn.Tanh(), nn.ReLU()), strict=True):
        assert (act(x) - function(x)).abs().max() < act.start_error * 1.01 + 1e-5
        assert f"of {act.start} for |x| <= 3" in str(report)
        assert site.error is None
    with pytest.raises(ValueError, match=r"1 \(PReLU\(.*\)\) differs between channels"):
        pwlu.convert_(nn.Sequential(conv(), nn.PReLU(4)), IMAGES, to="pau", kinds=nn.PReLU)


def test_channels_last_maps_have_a_funnel():
    """ConvNeXt's activations follow linear layers: (B, H, W, C)."""
    model = Sequence(hidden=nn.Linear(3, 8), out=nn.Linear(8, 4))
    (site,) = pwlu.convert_(model, IMAGES.permute(0, 2, 3, 1), to="frelu").converted
    assert (site.channels, site.channel_dim, site.reason) == (8, -1, "")
    assert isinstance(model.gelu, FReLU)
    model(IMAGES.permute(0, 2, 3, 1)).sum().backward()


class Pyramid(Net):
    """A head on maps of three sizes; in evaluation a second one, on two of them."""

    def forward(self, x):
        x = F.relu(self.body(x))
        maps = [x, x[..., ::2, ::2], x[..., :2, :1]]
        found = [F.relu(self.head(level)).mean((2, 3)) for level in maps]
        if not self.training:
            found += [self.late(self.last(level)).mean((2, 3)) for level in maps[:2]]
        return sum(found)


def norms(model):
    """Return the norm of every FReLU of a model by its name."""
    return {
        name: "group" if isinstance(module.norm, nn.GroupNorm) else "batch"
        for name, module in model.named_modules()
        if isinstance(module, FReLU)
    }


def test_a_funnel_that_runs_several_times_has_group_norm():
    model = Pyramid(body=conv(), head=conv(4, 8), last=conv(4, 8), late=nn.ReLU())
    report = pwlu.convert_(model, IMAGES, to="frelu")
    assert norms(model) == {"relu": "batch", "relu_2": "group", "late": "group"}
    assert [site.reason for site in report] == [
        "",
        "with group norm: it runs 3 times per forward pass",
        "with group norm: it runs 2 times per forward pass",
    ]
    assert "runs 2 times per forward pass; in eval mode only" in str(report)
    for mode in (True, False):
        model.train(mode)(IMAGES[:1]).sum().backward()  # of the last map, one pixel is left
    assert model.relu.norm.num_batches_tracked == 1
    pwlu.convert_(other := Pyramid(body=conv(), head=conv(4, 8), last=conv(4, 8), late=nn.ReLU()), IMAGES, to="prelu")
    assert not norms(other)


def test_one_module_at_several_places_keeps_batch_norm():
    """torchvision's blocks call their ReLU twice: those are places of their own, and each runs once."""
    model = pytest.importorskip("torchvision").models.resnet18(num_classes=3)
    report = pwlu.convert_(model, torch.randn(2, 3, 32, 32), to="frelu", min_positions=1)
    assert len(report.converted) == 17
    assert list(norms(model).values()) == ["batch"] * 17
    assert {site.reason for site in report.converted} == {""}


@pytest.mark.parametrize("detector", ["retinanet", "maskrcnn"])
def test_heads_of_detectors(detector):
    """Those that run on the five levels of the pyramid get group norm, and no others."""
    pytest.importorskip("torchvision")
    from pwlu.lab.models import detectors

    model = detectors.build(f"{detector}_resnet18_fpn", 2, pixels=64, width=0.125, norm="batch", anchors=0.25, detections=10)
    image, mask = torch.rand(3, 64, 64), torch.ones(1, 64, 64, dtype=torch.uint8)
    target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1]), "masks": mask}
    pwlu.convert_(model, ([image] * 2, [target] * 2), to="frelu")
    found = norms(model)
    shared = {name for name, norm in found.items() if norm == "group"}
    if detector == "retinanet":
        assert shared == {name for name in found if name.startswith("head.")}
        assert (len(found), len(shared)) == (17 + 8, 8)  # between P6 and P7, for a map of one pixel, ReLU stays
    else:
        assert shared == {"rpn.head.conv.0.1"}
        assert len(found) == 17 + 1 + 4 + 1  # of the ResNet, of the proposals, of the masks, before the masks are predicted
    # one image in a process, of 64 pixels: P7 and the coarsest map of the proposals are one pixel
    losses = model.train()([image], [target])
    sum(losses.values()).backward()
    assert all(p.grad.isfinite().all() for name in shared for p in model.get_submodule(name).parameters())


def test_what_comes_after_may_write_into_it():
    """MobileNet-V3's dropout does. torch's ReLU needs its output for backward; the replaced activation did not."""
    model = nn.Sequential(nn.Linear(3, 40), nn.Hardswish(), nn.Dropout(0.5, inplace=True), nn.ReLU())
    x = torch.randn(8, 3, requires_grad=True)
    for name, classes in {"relu": [ReLU, nn.ReLU], "frelu": [ReLU, nn.ReLU], "swish": [nn.SiLU] * 2}.items():
        pwlu.convert_(model, x, to=name)
        assert [type(model[1]), type(model[3])] == classes
        torch.autograd.grad(model(x).sum(), x)
        pwlu.restore_(model)
    values = torch.tensor([-1.0, -0.0, 0.0, 1e-30, 2.0, torch.inf, torch.nan], requires_grad=True)
    results = [(act(values), *torch.autograd.grad(act(values).sum(), values)) for act in (ReLU(), nn.ReLU())]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_checking_a_name_draws_no_random_numbers():
    model = nn.Sequential(conv(), nn.Tanh())
    before = torch.get_rng_state()
    for name in CLASSES:
        with pytest.raises(ValueError, match="nothing in Sequential was converted"):
            pwlu.convert_(model, IMAGES, to=name)
    assert torch.equal(torch.get_rng_state(), before)


NETWORKS = {"resnet18": 17, "mobilenet_v3_small": 24, "efficientnet_b0": 33}  # sites


@pytest.mark.parametrize(
    ("network", "name"),
    [
        pytest.param(*pair, marks=[] if pair == ("mobilenet_v3_small", "frelu") else pytest.mark.slow)
        for pair in itertools.product(NETWORKS, CLASSES)
    ],
)
def test_networks(network, name):
    """Every activation replaces those of a network, but not in squeeze-and-excitation blocks, and trains."""
    sites = NETWORKS[network]
    models = pytest.importorskip("torchvision").models
    model = models.get_model(network, weights=None, num_classes=3)
    squeezed = pytest.importorskip("torchvision.ops").SqueezeExcitation
    gates = {
        child: f"{prefix}.{key}"
        for prefix, module in model.named_modules()
        if isinstance(module, squeezed)
        for key, child in module.named_children()
    }
    assert len(gates) == {"resnet18": 0, "mobilenet_v3_small": 9 * 5, "efficientnet_b0": 16 * 5}[network]
    x = torch.randn(2, 3, 64, 64)
    report = pwlu.convert_(model, x, to=name)
    assert len(report.converted) == sites
    for gate, place in gates.items():
        assert model.get_submodule(place) is gate
    flat = [site.name for site in report.converted if len(site.shape) == 2]
    assert len(flat) == (network == "mobilenet_v3_small")
    for site in report.converted:
        act, as_relu = model.get_submodule(site.name), name == "frelu" and site.name in flat
        assert isinstance(act, nn.ReLU if as_relu else CLASSES[name])
        assert site.reason.startswith("replaced by ReLU") == as_relu
        assert getattr(act, "channels", site.channels) == site.channels
    fixed = {m for m in model.modules() if isinstance(m, (nn.ReLU, nn.SiLU, nn.Hardswish)) and m not in gates}
    assert len(fixed) == {"relu": sites, "swish": sites, "frelu": len(flat)}.get(name, 0)
    F.cross_entropy(model.train()(x), torch.tensor([0, 1])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
