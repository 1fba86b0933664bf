"""The two phases inside Hugging Face's Trainer."""

import os

import pytest
import torch
from training import REALIGN_AT, Network, Watch, X, Y, accuracy, equal, run_example

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import (
    AutoModelForImageClassification,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import pwlu
from pwlu.integrations.hugging_face import TwoPhaseCallback, from_pretrained, own_group_, save_pretrained

DATA = [{"x": x, "labels": y} for x, y in zip(X, Y, strict=True)]


class Watching(TrainerCallback):
    def on_train_begin(self, args, state, control, model, optimizer, **kwargs):
        self.watch = Watch(model, optimizer.optimizer)  # what Accelerate has wrapped


class Training:
    """A Trainer, our callback, and what happens to the PWLU."""

    def __init__(self, folder, realign=None, trainer=None, **arguments):
        usual = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
        usual |= {"save_strategy": "no", "logging_strategy": "no", "per_device_train_batch_size": 8, "learning_rate": 0.02}
        self.callback = TwoPhaseCallback(**realign or {"realign_at": REALIGN_AT})
        self.watching = Watching()
        options = {"train_dataset": DATA, "callbacks": [self.callback, self.watching]} | (trainer or {"model": Network()})
        self.trainer = Trainer(args=TrainingArguments(output_dir=str(folder), **usual | arguments), **options)
        self.train = self.trainer.train

    @property
    def watch(self):
        return self.watching.watch


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 12), (2, 6)])
def test_phases(accumulate, steps, tmp_path):
    training = Training(tmp_path, num_train_epochs=3, gradient_accumulation_steps=accumulate)
    assert training.callback.phase == 0
    training.train()
    training.watch.check(steps, accumulate)
    assert training.callback.phase == 2
    assert [unit.name for unit in training.callback.phases.report] == ["layers.1"]


@pytest.mark.parametrize(("epochs", "accumulate", "steps"), [(2, 1, 8), (1.5, 3, 3)])
@pytest.mark.parametrize("length", [{"num_train_epochs": 5}, {"max_steps": 9}])
def test_epochs(epochs, accumulate, steps, length, tmp_path):
    """Of four batches, three per step, the remaining one makes a second step."""
    training = Training(tmp_path, {"realign_after_epochs": epochs}, gradient_accumulation_steps=accumulate, **length)
    training.train()
    assert training.callback.phases.realign_at == steps
    assert training.watch.unit.statistics.steps == steps


def test_a_rule(tmp_path):
    training = Training(tmp_path, {"realign_at": 2, "rule": "shared"}, max_steps=4)
    training.train()
    assert training.callback.phases.rule == pwlu.learning.shared_rule.SharedRule()
    with pytest.raises(ValueError, match="rule must be 'paper', 'shared'"):
        TwoPhaseCallback(realign_at=2, rule="fast")


def test_bfloat16(tmp_path):
    training = Training(tmp_path, max_steps=6, bf16=True)
    training.train()
    training.watch.check(6)


def test_an_optimizer_of_your_own(tmp_path):
    model = Network()
    optimizer = torch.optim.SGD(pwlu.parameter_groups(model, lr=0.1, weight_decay=0.01), momentum=0.9)
    training = Training(tmp_path, trainer={"model": model, "optimizers": (optimizer, None)}, max_steps=6)
    training.train()
    training.watch.check(6)


def test_a_model_that_the_trainer_makes(tmp_path):
    training = Training(tmp_path, trainer={"model_init": Network}, max_steps=6)
    for _ in range(2):  # each time a new one
        training.train()
        training.watch.check(6)


# Checkpoints.


@pytest.mark.parametrize("step", [2, 6])  # in Phase I, in Phase II
def test_resume(step, tmp_path):
    first, resumed = (Training(tmp_path, max_steps=7, save_strategy="steps", save_steps=1, weight_decay=0.01) for _ in range(2))
    own_group_(first.trainer)
    first.train()
    own_group_(resumed.trainer)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert len(resumed.watch.after) == 7 - step
    assert resumed.callback.phase == 2
    assert equal(resumed.trainer.model.state_dict(), first.trainer.model.state_dict())


def test_a_checkpoint_in_which_the_pwlus_were_not_found(tmp_path):
    Training(tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    resumed = Training(tmp_path, max_steps=4)
    resumed.trainer._load_from_checkpoint = lambda *_: None  # as with models whose weights are saved under other names
    with pytest.raises(
        RuntimeError, match=r"resumes at step 2, but the model's PWLUs have their initial values.*save_original_format"
    ):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def vit():
    """One with a GELU in a child, and, as older versions of transformers had it, weights that are saved under other names."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **sizes))


PIXELS = {"pixel_values": torch.randn(2, 3, 8, 8)}


def learned(model):
    with torch.no_grad():
        for unit in pwlu.units.module.units_of(model).values():
            unit.weight += 0.1 * torch.randn_like(unit.weight)
            unit.statistics.running_std.fill_(0.7)
            unit.statistics.steps += 3
            unit.statistics.realigned.fill_(True)
    return model.eval()


def plain(cls, folder, **options):
    """Load a checkpoint like code that does not know pwlu."""
    return cls.from_pretrained(folder, **options)


@pytest.mark.parametrize("from_pretrained", [from_pretrained, plain])
@pytest.mark.parametrize("cls", [ViTForImageClassification, AutoModelForImageClassification])
def test_a_saved_model_keeps_its_units(tmp_path, cls, from_pretrained):
    model = vit()
    pwlu.convert_(model, PIXELS, init="same")
    save_pretrained(learned(model), tmp_path)
    found, said = from_pretrained(cls, tmp_path, output_loading_info=True)
    assert not any(said.values())
    assert equal(found.state_dict(), model.state_dict())
    assert torch.equal(found(**PIXELS).logits, model(**PIXELS).logits)
    assert type(found) is type(model)
    assert [repr(unit) for unit in pwlu.units.module.units_of(found).values()] == [
        repr(unit) for unit in pwlu.units.module.units_of(model).values()
    ]
    found.save_pretrained(tmp_path / "again")
    again = from_pretrained(cls, tmp_path / "again", dtype=torch.bfloat16)
    assert again.dtype == torch.bfloat16
    Training(tmp_path / "training", trainer={"model": found})  # the Trainer refuses quantised models
    pwlu.restore_(found)


def test_without_pwlu_it_is_not_silent(processes, tmp_path):
    model = vit()
    pwlu.convert_(model, PIXELS, init="same")
    save_pretrained(learned(model), tmp_path)
    code = f"from transformers import ViTForImageClassification as V; V.from_pretrained({str(tmp_path)!r})"
    done = processes(["-c", code], dict(os.environ), path=())
    assert done.returncode == 0, done.stderr
    assert "Unknown quantization type, got pwlu" in done.stderr


def test_a_model_that_is_quantised(tmp_path):
    model = vit()
    pwlu.convert_(model, PIXELS, init="same")
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ValueError, match="save_pretrained: the model is quantized by gptq"):
        save_pretrained(model, tmp_path)


class Rewritten(PreTrainedModel):
    """A model of your own, with a function in its method: a site that is rewritten."""

    config_class = ViTConfig

    def __init__(self, config):
        super().__init__(config)
        self.first, self.last = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.post_init()

    def forward(self, x):
        return self.last(torch.nn.functional.silu(self.first(x)))


def test_a_saved_model_with_a_function(tmp_path):
    model, x = Rewritten(ViTConfig()), torch.randn(5, 3)
    pwlu.convert_(model, x, init="same")
    save_pretrained(learned(model), tmp_path)
    found = from_pretrained(Rewritten, tmp_path)
    assert torch.equal(found(x), model(x))


def test_a_saved_model_that_was_not_recorded(tmp_path):
    vit().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no record of a conversion. Save the model with .*save_pretrained\(model"):
        from_pretrained(ViTForImageClassification, tmp_path)


def test_a_checkpoint_of_the_trainer_keeps_its_units(tmp_path):
    model = vit()
    pwlu.convert_(model, PIXELS, init="same", where=lambda site: "0" in site.name)
    data = [{"pixel_values": torch.randn(3, 8, 8), "labels": i % 2} for i in range(8)]
    options = {"model": model, "train_dataset": data}
    training = Training(tmp_path, trainer=options, max_steps=6, save_strategy="steps", save_steps=6, weight_decay=0.0)
    training.train()
    found = from_pretrained(ViTForImageClassification, tmp_path / "checkpoint-6")
    assert equal(found.state_dict(), training.trainer.model.state_dict())


# A second training.


def test_train_again(tmp_path):
    training = Training(tmp_path, max_steps=4)
    training.train()
    learned = training.watch.parameters()
    assert training.watch.unit.phase == 0  # anyone may have the model now
    training.train()
    assert training.callback.phases.report == []  # not realigned again
    assert training.callback.phase == 2
    assert not torch.equal(training.watch.parameters(), learned)


def test_train_again_after_an_exception(tmp_path):
    class Interrupted(Exception):
        pass

    training = Training(tmp_path, max_steps=6)
    step, calls = training.trainer.training_step, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise Interrupted
        return step(*args, **kwargs)

    training.trainer.training_step = interrupted
    with pytest.raises(Interrupted):
        training.train()
    assert training.callback.phases.steps == 1
    training.train()
    assert training.callback.phase == 2
    assert training.watch.unit.statistics.steps == REALIGN_AT  # one before, two after
    still = training.watch.after[: REALIGN_AT - 2]
    assert all(torch.equal(parameters, training.watch.start) for parameters in still)
    assert not torch.equal(training.watch.after[REALIGN_AT - 2], training.watch.start)


# The optimizer's groups.


def test_own_group(tmp_path):
    training = Training(tmp_path, max_steps=4, weight_decay=0.01)
    with pytest.raises(ValueError, match=r"own_group_: lr_factor must be a finite number of at least 0, not -0\.5"):
        own_group_(training.trainer, lr_factor=-0.5)
    optimizer = own_group_(training.trainer, lr_factor=0.5)
    *others, own = optimizer.param_groups
    assert {id(p) for p in own["params"]} == {id(p) for p in training.trainer.model.layers[1].parameters()}
    assert (own["lr"], own["weight_decay"]) == (0.01, 0.0)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in others] == [(0.02, 0.01, 2), (0.02, 0.0, 2)]
    training.train()
    training.watch.check(4)
    assert training.trainer.optimizer.optimizer is optimizer
    with pytest.raises(ValueError, match="the optimizer already has a scheduler"):
        own_group_(training.trainer)


def test_own_group_of_a_model_that_does_not_stay(tmp_path):
    with pytest.raises(ValueError, match=r"with model_init, train\(\) creates a new model and a new optimizer"):
        own_group_(Training(tmp_path, trainer={"model_init": Network}).trainer)


# What is likely to be a mistake.


def test_weight_decay_is_reported(tmp_path):
    training = Training(tmp_path, max_steps=4, weight_decay=0.01)
    with pytest.warns(UserWarning, match=r"a weight decay of 0\.01.*own_group_\(trainer\)"):
        training.train()
    training.watch.check(4)  # it does not move PWLUs in Phase I


def test_a_training_without_phase_two_is_reported(tmp_path):
    with pytest.warns(UserWarning, match="Phase I takes 3 steps, but this training ends after 3 of them"):
        Training(tmp_path, max_steps=3).train()


def test_data_without_a_length(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(DATA)

    stream = {"model": Network(), "train_dataset": Stream()}
    with pytest.raises(ValueError, match=r"needs training data with a length, but \w+ has none.*realign_at=1000"):
        Training(tmp_path, {"realign_after_epochs": 1}, stream, max_steps=6).train()
    training = Training(tmp_path, None, stream, max_steps=6)
    training.train()
    training.watch.check(6)


@pytest.mark.parametrize("wrong", [{}, {"realign_at": 3, "realign_after_epochs": 5}])
def test_steps_or_epochs(wrong):
    with pytest.raises(ValueError, match=r"either realign_at .* or realign_after_epochs"):
        TwoPhaseCallback(**wrong)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), float("inf")])
def test_a_number_of_epochs(wrong):
    with pytest.raises(ValueError, match="must be a positive number"):
        TwoPhaseCallback(realign_after_epochs=wrong)


def test_without_the_package(processes):
    code = "import sys; sys.modules['transformers'] = None; import pwlu.integrations.hugging_face"
    done = processes(["-c", code], dict(os.environ))
    assert "pip install '.[transformers]'" in done.stderr


def test_example(monkeypatch, tmp_path, capsys):
    pytest.importorskip("sklearn")
    run_example("hugging_face_vit.py", ["--epochs", "5", "--realign-after", "3"], monkeypatch, tmp_path)
    printed = capsys.readouterr().out
    assert "'eval_phase': 1" in printed
    assert "phase 2: test accuracy" in printed
    assert accuracy(printed) > 50
    run_example("hugging_face_vit.py", ["--epochs", "6", "--realign-after", "3", "--resume"], monkeypatch, tmp_path)
    assert accuracy(capsys.readouterr().out) > accuracy(printed) - 10  # did not start anew
