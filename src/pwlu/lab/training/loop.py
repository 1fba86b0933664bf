"""The loop: epochs of steps, a measurement after each, checkpoints on the way, and the report at the end."""

import glob
import math
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pwlu.analysis.alignment import alignment, without_histograms
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.experiment import run_key, run_name
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.divergence import divergence
from pwlu.lab.runs.environment import environment
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.run_folder import MODEL, RunFolder, new_folder
from pwlu.lab.tasks.task import Task
from pwlu.lab.training.summary import write_report
from pwlu.lab.training.trainer import Trainer
from pwlu.plotting.functions import plot_functions
from pwlu.text import install

SECONDS_BETWEEN_CHECKPOINTS = 600  # in an epoch that takes longer
STEPS_BETWEEN_QUESTIONS = 50  # whether so many seconds have passed
PICTURES = 5  # of the functions, for TensorBoard: drawing one takes a second or two
_WORDS = {  # what of an epoch is said in its line; of what is known before it ends, on the bar too
    "loss": "loss {:.4f}",
    "train_accuracy": "train {:.2f} %",
    "accuracy": "test {:.2f} %",
    "box_ap": "box AP {:.2f}",
    "mask_ap": "mask AP {:.2f}",
    "unreadable_images": "{:.0f} unreadable images",
    "unreadable_measured_images": "{:.0f} unreadable images to measure on",
}


def begin(runs: Path, settings: Settings, processes: Processes, again: bool = False) -> Path:
    """Make a run folder, the same for all processes, with the settings in it.

    Args:
        again: make one even if there is a run with the same settings, under a name with the next number.
    """
    made, wrong = "", ""
    if processes.is_main:
        try:
            if not again:
                _refuse_a_second(runs, settings)
            made = str(new_folder(runs, run_name(settings)))
            RunFolder(Path(made)).write_json("config.json", settings.as_dict())
        except UserError as error:
            wrong = str(error)
    if wrong := processes.broadcast_text(wrong) or "":  # else the others would wait for the first
        raise UserError(wrong)
    return Path(processes.broadcast_text(made) or "")


def _refuse_a_second(runs: Path, settings: Settings) -> None:
    """Raise if a run with these settings was begun before."""
    for path in sorted(runs.glob(f"{glob.escape(run_name(settings))}*")):
        folder = RunFolder(path)
        try:
            same = run_key(folder.settings()) == run_key(settings)
            done = len(folder.metrics())
        except UserError:  # that one is none of ours
            continue
        if same:
            state = "is finished" if folder.finished else f"stands after {done} epochs"
            go_on = f"look at it with pwlu report {path}" if folder.finished else f"go on with pwlu train --resume {path}"
            raise UserError(f"{path} has the same settings and {state}: {go_on}, or begin anew with --again or another --seed")


def train(settings: Settings, path: Path, processes: Processes) -> dict[str, Any]:
    """Train as the settings say, or go on with what lies in the run folder; return what result.json says."""
    folder = RunFolder(path)
    if settings.channels_last is None:
        settings = settings.replace(channels_last=processes.device.type == "cuda")
    with folder.held() if processes.is_main else nullcontext():
        try:
            loop = _Loop(settings, folder, processes)
        except UserError:
            if processes.is_main:
                folder.remove_if_bare()
            raise
        return loop.run()


class _Loop:
    def __init__(self, settings: Settings, folder: RunFolder, processes: Processes) -> None:
        self.settings, self.folder, self.processes = settings, folder, processes
        self.task = _task(settings, processes)
        self.trainer = Trainer(self.task, settings, processes)
        self.total = self.task.total_steps
        self.epochs = math.ceil(self.total / self.task.steps_per_epoch)
        self.number = 0  # of steps done
        self.sums = torch.zeros((), device=processes.device)
        self.sound = torch.zeros((), dtype=torch.int64, device=processes.device)  # steps in which the sums were still finite
        self.first_loss: float | None = None  # of the first step
        self.seconds = 0.0  # of training in this epoch
        self.saved_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """To the end."""
        self._begin()
        title = f"{self.settings.recipe} {self.settings.activation}, seed {self.settings.seed}"
        self.board = self._tensorboard()
        self.progress = Progress(title, self.total, done=self.number, silent=not self.processes.is_main)
        for note in self.task.notes:
            self.progress.say(note)
        try:
            while self.number < self.total and self._finite():
                self._epoch(self.number // self.task.steps_per_epoch)
        finally:
            self.progress.close()
            if self.board is not None:
                self.board.close()
        return self._end()

    def _begin(self) -> None:
        state = self.folder.load_checkpoint(self.processes.device)
        if state is not None:
            try:
                self._go_on(state)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self.folder.unreadable(
                    f"the newest checkpoint of {self.folder.path} does not fit what config.json describes: {error!r:.200}",
                    "Put back what was there, or start a new run without --resume",
                ) from None
        if self.processes.is_main:
            if state is None:
                self.folder.write_json("environment.json", environment(self.processes))
                self._snapshot()
            self.folder.forget_metrics_after(self.number)
        self.processes.barrier()
        self.last = next(reversed(self.folder.metrics()), None)
        known, done = self.last["step"] if self.last else 0, self.number
        if known != (done if done == self.total else done // self.task.steps_per_epoch * self.task.steps_per_epoch):
            raise UserError(
                f"{self.folder.path / 'metrics.jsonl'} ends at step {known:,}, the newest checkpoint is of step {done:,}: "
                "epochs are missing. Copy the file again from where it was trained, or start a new run without --resume"
            )

    def _go_on(self, state: dict[str, Any]) -> None:
        before = state.get("steps_per_epoch", self.task.steps_per_epoch)
        if before != self.task.steps_per_epoch:
            raise UserError(
                f"{self.folder.path}: an epoch had {before:,} steps and would have {self.task.steps_per_epoch:,} now, for "
                "the data set has other images than before. Put back what was there, or start a new run without --resume"
            )
        self.trainer.load(state["trainer"])
        self.number, self.seconds = state["step"], state["seconds"]
        self.first_loss = state.get("first_loss")
        self.sound += state.get("sound", self.number % self.task.steps_per_epoch)
        if self.processes.is_main:  # the sums are those of all processes
            self.sums = state["sums"]

    def _epoch(self, epoch: int) -> None:
        steps, begin = self.task.steps_per_epoch, time.monotonic()
        shown = {}
        for batches in self.task.epoch(epoch, self.number % steps):
            self.sums = self.sums + self.trainer.step(self.number, batches)
            self.sound += self.sums.isfinite().all()
            self.number += 1
            if self.number == 1:
                self.first_loss = self._summary()["loss"]
            now = time.monotonic()
            if self.progress.bar is not None and self.number % 10 == 0:  # a look at the sums waits for the device
                shown = self._shown(epoch, now - begin + self.seconds)
            self.progress.step(**shown)
            if self.number % STEPS_BETWEEN_QUESTIONS == 0 and self.number % steps and self._due():
                self._checkpoint(self.seconds + time.monotonic() - begin)
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.number} | _rounded(self._summary())
        if row["loss"] is None:
            row["diverged_at"] = epoch * steps + min(self.processes.gather([self.sound.item()])) + 1
        self.seconds += time.monotonic() - begin  # ._summary() has waited for the device
        self.processes.broadcast(self.trainer.measured.buffers())  # on CPUs, each has batch statistics of its own
        if (epoch + 1) % self.settings.measure_every == 0 or self.number == self.total or row["loss"] is None:
            row |= _rounded(self.task.measure(self.trainer.measured, self.trainer.autocast()))
        phases = self.trainer.phases
        began_in = 1 if phases and epoch * steps < phases.realign_at else 2
        row |= {"lr": self.trainer.schedule.get_last_lr()[0], "phase": began_in}
        row |= _rounded({"seconds": self.seconds, "images_per_second": self._done() * self.settings.batch / self.seconds})
        if self.processes.is_main:
            self.folder.add_metrics(row)
            if self._turn(epoch, self.settings.snapshots):
                self._snapshot()
            self._tell(row)
            if self.board is not None and self.trainer.units and self._turn(epoch, PICTURES):
                self.board.add_figure("functions", plot_functions(self.trainer.measured), self.number)
        self.last = row
        self.sums, self.seconds = torch.zeros((), device=self.processes.device), 0.0
        self.sound.zero_()
        self._checkpoint(0.0)

    def _summary(self) -> dict[str, float]:
        """Return what the sums of all processes say."""
        return self.task.summary(self.processes.all_reduce(self.sums.clone()))

    def _due(self) -> bool:
        """Whether it is time for a checkpoint in the middle of an epoch: the first process decides for all."""
        late = torch.tensor(float(self.processes.is_main and time.monotonic() - self.saved_at > SECONDS_BETWEEN_CHECKPOINTS))
        return bool(self.processes.all_reduce(late.to(self.processes.device)))

    def _checkpoint(self, seconds: float) -> None:
        sums = self.processes.all_reduce(self.sums.clone())
        if self.processes.is_main:
            state = {"trainer": self.trainer.state(), "step": self.number, "sums": sums, "seconds": seconds}
            state |= {"steps_per_epoch": self.task.steps_per_epoch, "first_loss": self.first_loss, "sound": self.sound.item()}
            self.folder.save_checkpoint(self.number, state)
        self.saved_at = time.monotonic()

    def _turn(self, epoch: int, times: int) -> bool:
        """Whether this epoch ends with what is done so many times in a run, at even distances, the last time at its end."""
        times = min(times, self.epochs)
        return (epoch + 1) * times // self.epochs > epoch * times // self.epochs

    def _snapshot(self) -> None:
        if self.trainer.units and self.settings.snapshots:
            self.folder.write_tensors(f"snapshots/step-{self.number:08d}.pt", self.trainer.functions())

    def _finite(self) -> bool:
        return self.last is None or self.last["loss"] is not None

    # What people see.

    def _shown(self, epoch: int, seconds: float) -> dict[str, Any]:
        summary = self.task.summary(self.sums)
        shown = {name: f"{value:.3g}" for name, value in summary.items() if name in _WORDS}
        shown["phase"] = "I" if self.trainer.phase == 1 else "II"
        speed = round(self._done() * self.settings.batch / seconds)
        return {"epoch": f"{epoch + 1}/{self.epochs}"} | shown | {"images/s": speed}

    def _done(self) -> int:
        """Steps in this epoch, at least one of which is done."""
        return (self.number - 1) % self.task.steps_per_epoch + 1

    def _tell(self, row: dict[str, Any]) -> None:
        if self.board is not None:
            for name, value in row.items():
                if name not in ("epoch", "step") and value is not None:
                    self.board.add_scalar(name, value, row["step"])
        text = ", ".join(words.format(row[name]) for name, words in _WORDS.items() if row.get(name) is not None)
        phase = {1: "Phase I", 2: "Phase II"}[row["phase"]] + ", " if self.trainer.phases else ""
        speed = f"{row['images_per_second']:.0f} images/s, {self.progress.left()} left"
        self.progress.say(f"epoch {row['epoch']:3d}/{self.epochs}: {text}, {phase}{speed}")

    def _tensorboard(self) -> Any:
        if not self.settings.tensorboard or not self.processes.is_main:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(f"--tensorboard needs one more package: {install('tensorboard')}") from None
        return SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=self.number + 1)

    # The end.

    def _end(self) -> dict[str, Any]:
        try:
            result = self._result(self.folder.metrics())
        except (LookupError, TypeError, ValueError) as error:  # what others wrote into the file
            path = self.folder.path / "metrics.jsonl"
            raise UserError(f"{path} is damaged: there is no result to make of it ({error!r}). Start a new run") from None
        files = self.task.files(self.trainer.measured, self.trainer.autocast())
        if self.processes.is_main:
            for name, content in files.items():
                self.folder.write(name, content)
            aligned = None
            if self.trainer.units:
                aligned = alignment(self.trainer.measured, self.task.some_images(), histogram=True)
                self.folder.write("inputs.json", aligned.to_json().encode())
                self.folder.write("alignment.json", without_histograms(aligned).to_json().encode())
                self.folder.write_tensors("functions.pt", self.trainer.functions())
            self.folder.write(MODEL, self.trainer.serialised())
            self.task.network_info(self.trainer.report).write(self.folder)
            sites, notes = str(self.trainer.report), self.task.notes
            write_report(self.folder, self.settings, result, sites, self.trainer.measured, aligned, notes=notes)
            self.folder.write_json("result.json", result)
        self.processes.barrier()
        return result

    def _result(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        metric = self.task.metric
        last = rows[-1]
        return {
            metric: last[metric],
            f"best_{metric}": max((row[metric] for row in rows if row.get(metric) is not None), default=None),
            **{name: last[name] for name in self.task.reported if name in last},
            "train_loss": last["loss"],
            "measured_on": self.task.measured_on,
            "measured_images": self.task.measured_images,
            "seconds_per_epoch": round(median(row["seconds"] for row in rows), 3),
            "parameters": sum(p.numel() for p in self.trainer.network.parameters()),
            "sites": len(self.trainer.report.converted),
            **divergence(rows, self.first_loss),
        }


def _task(settings: Settings, processes: Processes) -> Task:
    """Imported when it is wanted: each needs packages that the other does not."""
    try:
        if find(settings.recipe).detects:
            from pwlu.lab.tasks.detection import Detection

            return Detection(settings, processes)
        from pwlu.lab.tasks.classification import Classification

        return Classification(settings, processes)
    except ImportError as error:
        raise UserError(f"training needs more packages ({error}): {install('train')}") from None


def _rounded(numbers: dict[str, float]) -> dict[str, float | None]:
    """Seven digits. JSON has no word for what is not finite: None."""
    return {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in numbers.items()}
