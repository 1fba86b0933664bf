"""The two phases inside Lightning and Accelerate, which need nothing but TwoPhase; each as its users write it."""

import re
import runpy
import subprocess
import sys

import pytest
import torch
from imported import MOST_SECONDS, PRINT_THREADS, plain_environment
from training import (
    BATCHES,
    REALIGN_AT,
    ROOT,
    Network,
    Watch,
    accuracy,
    equal,
    optimizer_of,
    run_example,
    trained_in_a_plain_loop,
)

import pwlu

pytestmark = pytest.mark.filterwarnings("ignore:TwoPhase. the PWLUs have a weight decay")  # that of AdamW by default


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.filterwarnings(r"ignore:.*The '\w+_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:GPU available but not used")
class TestLightning:
    @pytest.fixture(autouse=True)
    def _lightning(self):
        pytest.importorskip("lightning")

    def module(self):
        import lightning as L

        class Module(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.network = Network()

            def configure_optimizers(self):
                optimizer = optimizer_of(self.network)
                self.phases = pwlu.TwoPhase(self, optimizer, realign_at=REALIGN_AT)
                self.watch = Watch(self, optimizer)
                return optimizer

            def training_step(self, batch, index):
                return self.network(*batch)["loss"]

            def on_fit_end(self):
                self.phases.remove()

        return Module()

    def trainer(self, **options):
        import lightning as L

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        return L.Trainer(**{"accelerator": "cpu"} | quiet | options)

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_phases(self, accumulate):
        module = self.module()
        self.trainer(max_epochs=3, accumulate_grad_batches=accumulate).fit(module, BATCHES)
        module.watch.check(12 // accumulate, accumulate)
        assert equal(module.network.state_dict(), trained_in_a_plain_loop(3, accumulate))

    def test_bfloat16(self):
        module = self.module()
        self.trainer(max_epochs=2, precision="bf16-mixed").fit(module, BATCHES)
        module.watch.check(8)

    def test_steps_that_the_scaler_skips_do_not_count(self):
        from lightning.pytorch.plugins import MixedPrecision

        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=2.0**-5)
        module = self.module()
        self.trainer(max_epochs=3, plugins=[MixedPrecision("16-mixed", "cpu", scaler)]).fit(module, BATCHES)
        watch = module.watch
        assert REALIGN_AT < len(watch.after) < 12
        assert all(torch.equal(parameters, watch.start) for parameters in watch.after[: REALIGN_AT - 1])
        assert not torch.equal(watch.after[REALIGN_AT - 1], watch.start)
        assert watch.unit.statistics.steps == REALIGN_AT

    @pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
    @pytest.mark.parametrize("epoch", [0, 1])  # of two steps: in Phase I, in Phase II
    def test_resume(self, epoch, tmp_path):
        from lightning.pytorch.callbacks import ModelCheckpoint

        options = {"max_epochs": 3, "accumulate_grad_batches": 2}
        options |= {"enable_checkpointing": True, "callbacks": ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)}
        module, resumed = self.module(), self.module()
        self.trainer(**options).fit(module, BATCHES)
        self.trainer(**options).fit(resumed, BATCHES, ckpt_path=tmp_path / f"epoch={epoch}.ckpt")
        assert len(resumed.watch.after) == 4 - 2 * epoch
        assert equal(resumed.state_dict(), module.state_dict())

    def test_fit_again(self):
        module = self.module()
        trainer = self.trainer(max_epochs=1)
        trainer.fit(module, BATCHES)
        assert len(module.phases.report) == 1
        again = self.trainer(max_epochs=1)  # while the first trainer, and with it the first optimizer, is still there
        again.fit(module, BATCHES)
        assert module.phases.report == []  # not realigned again
        assert not torch.equal(module.watch.after[0], module.watch.after[-1])

    @pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
    @pytest.mark.filterwarnings("ignore:.*The number of training batches .14. is smaller than the logging interval")
    def test_example(self, monkeypatch, tmp_path, capsys):
        pytest.importorskip("sklearn")
        run_example("lightning_digits.py", ["--epochs", "3", "--realign-after", "2"], monkeypatch, tmp_path)
        printed = capsys.readouterr().out
        assert "2 PWLUs were realigned in this run" in printed
        assert accuracy(printed) > 50
        more = ["--epochs", "4", "--realign-after", "2", "--resume", "runs/lightning/last.ckpt"]
        run_example("lightning_digits.py", more, monkeypatch, tmp_path)
        printed = capsys.readouterr().out
        assert "Phase II" in printed
        assert "0 PWLUs were realigned in this run" in printed


class TestAccelerate:
    @pytest.fixture
    def accelerator(self):
        """A function that makes an Accelerator; what that sets for the whole process is taken back."""
        accelerate = pytest.importorskip("accelerate")
        from accelerate.state import AcceleratorState, GradientState

        def forget():
            AcceleratorState._reset_state(True)
            GradientState._reset_state()

        def make(**options):
            forget()
            return accelerate.Accelerator(cpu=True, **options)

        yield make
        forget()

    class Training:
        """A loop that can be stopped after any epoch."""

        def __init__(self, accelerator):
            self.accelerator = accelerator
            model = Network()
            self.model, self.optimizer, self.batches = accelerator.prepare(model, optimizer_of(model), BATCHES)
            self.phases = pwlu.TwoPhase(self.model, self.optimizer, realign_at=REALIGN_AT)
            self.watch = Watch(self.model, self.optimizer.optimizer)

        def train(self, epochs):
            for _ in range(epochs):
                for x, y in self.batches:
                    with self.accelerator.accumulate(self.model):
                        self.accelerator.backward(self.model(x, y)["loss"])
                        self.optimizer.step()
                        self.optimizer.zero_grad()

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_phases(self, accumulate, accelerator):
        training = self.Training(accelerator(gradient_accumulation_steps=accumulate))
        training.train(3)
        training.watch.check(12 // accumulate, accumulate)
        assert equal(training.model.state_dict(), trained_in_a_plain_loop(3, accumulate))

    def test_bfloat16(self, accelerator):
        training = self.Training(accelerator(mixed_precision="bf16"))
        training.train(2)
        training.watch.check(8)

    @pytest.mark.parametrize("epochs", [1, 2])  # of two steps: in Phase I, in Phase II
    def test_resume(self, epochs, accelerator, tmp_path):
        training = self.Training(accelerator(gradient_accumulation_steps=2))
        training.train(epochs)
        training.accelerator.save_state(tmp_path)
        training.train(3 - epochs)
        resumed = self.Training(accelerator(gradient_accumulation_steps=2))
        resumed.accelerator.load_state(tmp_path)
        resumed.train(3 - epochs)
        assert resumed.phases.phase == 2
        assert equal(resumed.model.state_dict(), training.model.state_dict())

    @pytest.mark.slow
    def test_example_on_two_processes(self, tmp_path):
        """Leave no thread of gloo behind: one that waits for Python's lock at the exit aborts the process."""
        pytest.importorskip("accelerate")
        pytest.importorskip("sklearn")
        example = tmp_path / "example.py"
        example.write_text((ROOT / "examples" / "accelerate_digits.py").read_text() + PRINT_THREADS)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", "localhost:0", str(example), "--epochs", "3", "--realign-after", "2"]
        done = subprocess.run(command, capture_output=True, text=True, env=plain_environment(ACCELERATE_USE_CPU="true"))
        assert not done.returncode, done.stderr
        assert "TwoPhase(2 PWLUs, Phase II, 14 of 14 steps of Phase I taken)" in done.stdout
        assert done.stdout.count("threads:") == 2
        assert "gloo" not in done.stdout

    def test_example(self, accelerator, monkeypatch, tmp_path, capsys):
        pytest.importorskip("sklearn")
        run_example("accelerate_digits.py", ["--epochs", "5", "--realign-after", "2"], monkeypatch, tmp_path)
        printed = capsys.readouterr().out
        assert "TwoPhase(2 PWLUs, Phase II, 28 of 28 steps of Phase I taken)" in printed
        assert accuracy(printed) > 50


# The page on training.

PAGE = (ROOT / "docs" / "training.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FOR_TORCHRUN = re.findall(r"```python title=\"train.py\"\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated")
@pytest.mark.filterwarnings(r"ignore:.*The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_the_code_of_the_page_runs(monkeypatch, tmp_path):
    for package in ("lightning", "transformers", "accelerate"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {}
    ran = list(runpy.run_path(str(ROOT / "docs/run.py"))["run"](ROOT / "docs/training.md", names))
    assert len(ran) == len(BLOCKS)
    for block, code in zip(ran, BLOCKS, strict=True):
        for comment in re.findall(r"print\(phases\)  # (.*)", code):
            assert comment in block.printed
    assert names["checkpoint"]["model"]["2.statistics.realigned"]  # a resume in Phase II
    assert equal(names["model"].state_dict(), names["checkpoint"]["model"])


@pytest.mark.slow
def test_the_page_s_file_for_torchrun(tmp_path):
    """The toy and the blocks on several processes, as the page says."""
    assert len(FOR_TORCHRUN) == 2
    (command,) = re.findall(r"`torchrun (--nproc-per-node 2 train.py)`", " ".join(PAGE.split()))
    (tmp_path / "train.py").write_text("\n".join([BLOCKS[0], *FOR_TORCHRUN]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()]
    done = subprocess.run(
        launcher, cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("TwoPhase(1 PWLU, Phase II, 3 of 3 steps of Phase I taken)") == 4


SCHEDULERS = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("schedule", "kept"),
    [
        (lambda optimizer, rate: SCHEDULERS.CosineAnnealingLR(optimizer, 6), True),
        (lambda optimizer, rate: SCHEDULERS.LinearLR(optimizer), True),
        (lambda optimizer, rate: SCHEDULERS.OneCycleLR(optimizer, rate, 6), False),
        (lambda optimizer, rate: SCHEDULERS.CyclicLR(optimizer, rate, rate, cycle_momentum=False), False),
        (lambda optimizer, rate: SCHEDULERS.OneCycleLR(optimizer, [g["lr"] for g in optimizer.param_groups], 6), True),
    ],
)
def test_schedulers_that_keep_the_factor_of_pwlus(schedule, kept):
    optimizer = torch.optim.SGD(pwlu.parameter_groups(Network(), lr=0.1, lr_factor=0.5), momentum=0.9)
    scheduler = schedule(optimizer, 0.1)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
        weights, units = (group["lr"] for group in optimizer.param_groups)
        assert units == pytest.approx(0.5 * weights if kept else weights)
