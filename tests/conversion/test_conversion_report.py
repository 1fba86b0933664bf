"""What convert_ says: its report, and errors that tell what to write instead."""

import json
import re

import pytest
import torch
from blocks import IMAGES, conv
from torch import nn

import pwlu


def test_report():
    report = pwlu.convert_(nn.Sequential(conv(), nn.GELU(), conv(4, 5), nn.Tanh(), nn.Mish()), IMAGES, init="same")
    assert len(report) == len(list(report)) == 3
    assert [site.name for site in report.converted] == ["1", "4"]
    rows = json.loads(json.dumps(report.as_dicts()))
    assert (rows[0]["name"], rows[0]["was"], rows[0]["start"], rows[0]["channels"]) == (
        "1",
        "GELU(approximate='none')",
        "gelu",
        4,
    )
    lines = str(report).splitlines()
    assert re.match(r"1 +GELU\(approximate='none'\) +2 x 4 x 7 x 5 +converted +starts within 0.011 of it$", lines[2])
    assert re.match(r"3 +Tanh\(\) +2 x 5 x 7 x 5 +skipped +tanh is not in kinds$", lines[3])
    assert lines[-2] == f"Sequential: 2 converted, 1 skipped; {9 * 21} parameters added"


def small():
    return nn.Sequential(conv(), nn.Tanh())


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        (small(), {}, r"nothing in Sequential was converted\.\n(.*\n)*1 +Tanh\(\) .*skipped +tanh is not in kinds"),
        (conv(), {}, "nothing in Conv2d was converted. No activation was found: no call of relu, gelu, silu, ..."),
        (nn.Sequential(conv(), pwlu.PWLU(4)), {}, "nothing in Sequential was converted. It already has 1 PWLU"),
        (nn.ReLU(), {}, r"the model is itself an activation, ReLU\(\), and cannot be replaced in place"),
        (nn.DataParallel(small()), {}, r"wrapped by DataParallel. Convert it first with pwlu.convert_\(model, ...\)"),
        (torch.jit.trace(small(), IMAGES), {}, r"the model is scripted\. .* A converted model cannot be scripted"),
        (torch.compile(small()), {}, "the model is already wrapped by OptimizedModule"),
        (nn.Sequential(torch.compile(small())), {}, "the model is already wrapped by OptimizedModule"),
        (small(), {"sample": torch.randn(2, 5, 4, 4)}, r"could not be run on the sample, in training or in evaluation mode:"),
        (small(), {"sample": {"y": IMAGES}}, "a tensor, a tuple of arguments, or a dictionary of keyword arguments"),
        (small(), {"kinds": ()}, "kinds is empty"),
        (small(), {"kinds": ("relu", "rleu")}, "'rleu' is not a kind. Choose from relu, relu6, .*, or pass classes of modules"),
        (small(), {"kinds": 3}, "3 is not a kind"),
        (small(), {"granularity": "pixel"}, "granularity must be 'channel' or 'layer', not 'pixel'"),
        (small(), {"to": "rleu"}, "'rleu' is not known. Write one of relu, swish"),
        (small(), {"to": pwlu.DynamicPWLU}, r"a function of \(channels, site\), not a class\. Write to='dynamic_pwlu'"),
        (small(), {"to": 3}, r"to must be the name of an activation or a function of \(channels, site\), not 3"),
        (small(), {"init": "rleu"}, "init 'rleu' is not known"),
        (small(), {"intervals": 0}, "intervals must be an integer of at least 1"),
        (small(), {"bounds": (3, -3)}, "bounds must be finite with left < right"),
        (small(), {"kinds": "tanh", "to": lambda *_: 3}, r"to\(channels, site\) must return a torch.nn.Module, .* returned 3"),
        (nn.Sequential(conv(), nn.PReLU(4)), {"kinds": "prelu", "granularity": "layer"}, "differs between channels"),
        (nn.Sequential(conv(), nn.RReLU()), {"kinds": "rrelu"}, r"1 \(RReLU\(.*\)\) is random, or changes its state"),
        (small(), {"kinds": "tanh", "init": torch.bernoulli}, "convert_: init=bernoulli cannot be computed on a tensor alone"),
        (small(), {"kinds": "tanh", "init": torch.randn_like}, "convert_: init=randn_like is random"),
        (small(), {"bounds": "inputs"}, "bounds must be two numbers such as .*, or 'sample', not 'inputs'"),
        (None, {}, r"convert_: model must be a torch\.nn\.Module, not NoneType"),
        (small(), {"where": "0"}, "where must be a function of a site, such as .*, not '0'"),
        (small(), {"min_positions": "2"}, "min_positions must be an integer of at least 0 .*, not '2'"),
        (small(), {"min_positions": -1}, "min_positions must be an integer of at least 0 .*, not -1"),
        (small(), {"tolerance": 0}, "tolerance must be a positive number such as 1e-3, not 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.nn.DataParallel:FutureWarning")
def test_bad_input(model, options, text):
    before = repr(model)
    with pytest.raises((ValueError, RuntimeError, TypeError), match=text):
        pwlu.convert_(model, **{"sample": IMAGES} | options)
    assert repr(model) == before
