"""Rewriting the code that applies an activation, in every form in which it is written."""

import copy
import functools
import re

import pytest
import torch
import torch.nn.functional as F
from blocks import IMAGES, Net, conv, converted, units
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import pwlu


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    wrapper.note = "kept"
    return wrapper


class Decorator:
    """A decorator that is an object, not a function."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, module, cls=None):
        return functools.partial(self.function, module)


class Forms(Net):
    """One activation, in the method that `form` names."""

    def __init__(self, form):
        super().__init__(
            conv=conv(), form=form, attribute=F.relu, of_class=nn.ReLU(), partial=functools.partial(F.relu, inplace=False)
        )
        self.__secret = nn.Identity()
        self.hidden = [nn.ReLU()]

    def forward(self, x):
        return getattr(self, self.form)(self.conv(x))

    def function(self, x):
        return F.relu(x)

    def of_torch(self, x):
        return torch.relu(x)

    def method(self, x):
        return x.relu()

    def in_place(self, x):
        return F.relu(x, inplace=True)

    def in_place_method(self, x):
        x = x.relu_()
        return x

    def keyword(self, x):
        return F.relu(input=x)

    def of_attribute(self, x):
        return self.attribute(x)

    def of_partial(self, x):
        return self.partial(x)

    def by_keyword(self, x):
        return self.of_class(input=x)

    def made_here(self, x):
        return nn.ReLU()(x)

    def in_a_plain_list(self, x):
        return self.hidden[0](x)

    def local_name(self, x, act=F.relu):
        return act(x)

    def several_lines(self, x):
        return (
            x.add(0)  # a comment
            .relu()
            .mul(
                1,
            )
        )

    def private(self, x):
        return F.relu(self.__secret(x))

    def nested(self, x):
        def apply(module, x):  # a module first, as in a method
            return F.relu(module(x))

        return apply(self.__secret, x)

    def of_lambda(self, x):
        return (lambda y: F.relu(y) + 0 * x)(x)

    def comprehension(self, x):
        return [F.relu(y) for y in (x,)][0]  # noqa: RUF015

    def generator(self, x):
        return next(F.relu(y) for y in (x,))

    def walrus(self, x):
        return y if (y := F.relu(x)) is not None else None

    def in_checkpoint(self, x):
        return checkpoint(lambda y: F.relu(y), x, use_reentrant=False)

    @decorated
    def wrapped(self, x):
        return F.relu(x)

    @torch.enable_grad()
    @decorated
    def wrapped_twice(self, x, *, scale: float = 1.0) -> "torch.Tensor":
        return F.relu(x) * scale

    alias = function


FORMS = [name for name in vars(Forms) if not name.startswith("_") and name != "forward"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    model = Forms(form)
    expected = copy.deepcopy(model)(IMAGES)
    report = pwlu.convert_(model, IMAGES)
    assert len(report.converted) == 1
    assert len(units(model)) == 1
    assert torch.equal(model(IMAGES), expected)
    next(iter(units(model).values())).heights.data += 1
    assert not torch.equal(model(IMAGES), expected)
    assert torch.equal(copy.deepcopy(model)(IMAGES), model(IMAGES))
    pwlu.restore_(model)
    assert torch.equal(model(IMAGES), expected)
    assert type(model) is Forms


class Named(Forms):
    """Methods that name the class they are written in."""

    SCALE = 2.0

    def constant(self, x):
        return F.relu(x) * Named.SCALE

    def of_parent(self, x):
        return F.relu(super(Named, self).method(x) - 0.1)  # noqa: UP008

    def by_class(self, x):
        return F.relu(x) if isinstance(self, Named) else x

    def private_too(self, x):
        return Named.__twice(F.relu(x))

    @staticmethod
    def __twice(x):
        return 2 * x

    def in_a_function(self, x):
        return (lambda _Named: F.relu(_Named) * Named.SCALE)(x)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("form", ["constant", "of_parent", "by_class", "private_too", "in_a_function"])
def test_methods_that_name_their_class(form, local):
    model = (local_class() if local else Named)(form)
    expected = copy.deepcopy(model)(IMAGES)
    assert len(converted(model)) == 1
    assert torch.equal(model(IMAGES), expected)
    next(iter(units(model).values())).heights.data += 1
    assert not torch.equal(model(IMAGES), expected)


def local_class():
    class Local(Forms):
        SCALE = 2.0

        def constant(self, x):
            return F.relu(x) * Local.SCALE

        def of_parent(self, x):
            return F.relu(super(Local, self).method(x) - 0.1)  # noqa: UP008

        def by_class(self, x):
            return F.relu(x) if isinstance(self, Local) else x

        def private_too(self, x):
            return Local.__twice(F.relu(x))

        @staticmethod
        def __twice(x):
            return 2 * x

        def in_a_function(self, x):
            return (lambda _Local: F.relu(_Local) * Local.SCALE)(x)

    return Local


class Heir(Forms):
    def method(self, x):
        return F.relu(super().method(x) - 0.1)


@pytest.mark.parametrize("form", ["private", "nested", "wrapped_twice", "alias", "method"])
def test_a_subclass(form):
    """Names that begin with two underscores belong to the class they are written in, and so does super()."""
    model = Heir(form)
    expected = copy.deepcopy(model)(IMAGES)
    assert converted(model) == {"relu": 4}
    assert torch.equal(model(IMAGES), expected)


def test_the_method_stays_itself():
    model = Forms("wrapped_twice")
    old = Forms.wrapped_twice
    pwlu.convert_(model, IMAGES)
    new = type(model).wrapped_twice
    for name in ("__name__", "__qualname__", "__doc__", "__module__", "__annotations__", "note"):
        assert getattr(new, name) == getattr(old, name)
    assert model.wrapped_twice(IMAGES[:, :1].expand(-1, 4, -1, -1), scale=2.0).max() > IMAGES[:, 0].max()
    assert Forms.wrapped_twice is old


def test_other_instances_stay_as_they_were():
    first, second = Forms("function"), Forms("function")
    pwlu.convert_(first, IMAGES)
    assert units(first)
    assert not units(second)
    assert type(second) is Forms
    second(IMAGES)


def test_one_method_in_two_steps():
    class Steps(Net):
        @decorated
        def forward(self, x):
            return F.gelu(F.relu(self.conv(x)))

    model = Steps(conv=conv())
    assert converted(model, kinds="gelu") == {"gelu": 4}
    (site,) = pwlu.convert_(model, IMAGES)  # nothing is said of the one that was converted
    assert site.name == "relu"
    assert list(units(copy.deepcopy(model))) == ["gelu", "relu"]
    assert pwlu.restore_(model) == ["gelu", "relu"]
    assert type(model) is Steps


def free_function(x):
    return F.relu(x)


class Impossible(Net):
    """Forms that cannot be rewritten, and a SiLU that can."""

    def __init__(self, form, child=None):
        super().__init__(conv=conv(3, 3), form=form, child=child)
        self.early = self.function

    def forward(self, x):
        return F.silu(getattr(self, self.form)(self.conv(x)))

    def function(self, x):
        return F.relu(x)

    def taken_earlier(self, x):
        return self.early(x)

    def free(self, x):
        return free_function(x)

    @staticmethod
    def static(x):
        return F.relu(x)

    @Decorator
    def by_object(self, x):
        return F.relu(x)

    def unused(self, x):
        F.relu(x)
        return x

    def starred(self, x):
        return F.relu(*[x])

    def mapped(self, x):
        return next(iter(map(F.relu, [x])))

    def either(self, x):
        return (F.relu if self.training else F.gelu)(x)

    def other_functions_too(self, x):
        for function in (F.relu, torch.neg):
            x = function(x)
        return x


class Caller(Impossible):
    def function(self, x):
        """Overridden."""
        return super().function(x)


class Twice(nn.Sequential):
    def forward(self, x):
        return F.relu(super().forward(x))


class Unseen(Net):
    def forward(self, x):
        return self.acts[0](x)


class Sometimes(nn.Module):
    def forward(self, x):
        return F.relu(x) if self.training else x


def without_source():
    names = {"F": F, "Net": Net, "__name__": __name__}
    exec(compile("class Block(Net):\n    def forward(self, x): return F.relu(self.conv(x))", "<nowhere>", "exec"), names)
    return names["Block"](conv=conv(3, 3))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Impossible("taken_earlier"), "its method is called through a reference that was taken earlier"),
        (Impossible("free"), r"it is called in free_function \(test_rewrite.py:\d+\), which is not a method of a module"),
        (Impossible("static"), r"it is called in Impossible.static \(test_rewrite.py:\d+\), which is not a method of a module"),
        (Impossible("by_object"), "the decorator of its method returns a Decorator, not a function"),
        (Impossible("unused"), "its result is not used"),
        (Impossible("starred"), r"its arguments are passed as \*args"),
        (Impossible("mapped"), r"it is called inside next\(...\), not directly"),
        (Impossible("either"), "the same place applies gelu and relu"),
        (Impossible("other_functions_too"), "the same place in the code also calls something else"),
        (Caller("function"), r"it is in Impossible.function, which Caller overrides and calls through super\(\)"),
        (Impossible("child", Twice(conv(3, 3), conv(3, 3))), "it is called by Twice, which would run a new child .*"),
        (Impossible("child", Unseen(a=(act := nn.ReLU()), acts=[act])), "the model does not call it by its registered name"),
        (Impossible("child", Sometimes()), "its module does not always apply the same activation"),
        (Impossible("child", without_source()), "the source <nowhere> cannot be read"),
        (Impossible("child", fx.symbolic_trace(Forms("function").eval())), "its call is in a torch.fx graph: .*"),
    ],
)
def test_what_is_not_possible(model, reason):
    """Everything around it is still converted."""
    expected = copy.deepcopy(model)(IMAGES)
    report = pwlu.convert_(model, IMAGES, init="same")
    assert [site.kind for site in report.converted] == ["silu"]
    assert all(re.fullmatch(reason, site.reason) and not site.parameters for site in report.of("impossible"))
    assert report.of("impossible")
    assert report.parameters == sum(p.numel() for unit in units(model).values() for p in unit.parameters())
    assert (model(IMAGES) - expected).abs().max() < report.converted[0].error + 1e-6


def test_a_registry_of_classes_is_not_told():
    registered = {}

    class Plugin(Net):
        def __init_subclass__(cls, *, name):
            registered[name] = cls

    class Block(Plugin, name="block"):
        def forward(self, x):
            return F.relu(self.conv(x))

    model = Block(conv=conv())
    assert converted(model) == {"relu": 4}
    assert registered == {"block": Block}
    assert type(model) is not Block
    assert type(model).__qualname__ == Block.__qualname__
