"""The training loop: epochs with measurements, checkpoints, and the report at the end."""

import glob
import math
import shlex
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pwlu.analysis.alignment import alignment, without_histograms
from pwlu.common.text import counted
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.experiment import run_key, run_name
from pwlu.lab.recipes.settings import Settings, UserError, needs_packages
from pwlu.lab.runs.divergence import divergence
from pwlu.lab.runs.environment import environment
from pwlu.lab.runs.processes import Processes
from pwlu.lab.runs.progress import Progress
from pwlu.lab.runs.run_folder import MODEL, RunFolder, new_folder
from pwlu.lab.tasks.task import Task
from pwlu.lab.training.summary import write_report
from pwlu.lab.training.trainer import Trainer
from pwlu.plotting.functions import plot_functions

SECONDS_BETWEEN_CHECKPOINTS = 600  # within an epoch; each epoch ends with a checkpoint as well
STEPS_BETWEEN_CLOCK_CHECKS = 50  # after so many steps, the ranks agree whether that time has passed
FIGURES = 5  # the number of figures of the functions for TensorBoard; drawing one takes a second or two
_FORMATS = {  # the values in the line of an epoch; the progress bar shows those that are known during the epoch
    "loss": "loss {:.4f}",
    "train_accuracy": "train {:.2f} %",
    "accuracy": "test {:.2f} %",
    "box_ap": "box AP {:.2f}",
    "mask_ap": "mask AP {:.2f}",
    "unreadable_images": "{:.0f} unreadable images",
    "unreadable_measured_images": "{:.0f} unreadable images to measure on",
}


def create_run(runs: Path, settings: Settings, processes: Processes, again: bool = False) -> Path:
    """Create a run folder with the settings in it, below the folder `runs`, and return its path on all processes.

    `again`: create a folder with the next free number even if a run with the same settings exists.
    """
    created: Path | UserError = runs
    if processes.is_main:
        try:
            if not again:
                _refuse_duplicate(runs, settings)
            created = new_folder(runs, run_name(settings))
            RunFolder(created).write_json("config.json", settings.as_dict())
        except UserError as error:
            created = error
    created = processes.broadcast_object(created)
    if isinstance(created, UserError):  # raise on all ranks, or the others would wait for rank 0
        raise created
    return created


def _refuse_duplicate(runs: Path, settings: Settings) -> None:
    """Raise an error if a run with the same settings exists."""
    for path in sorted(runs.glob(f"{glob.escape(run_name(settings))}*")):
        folder = RunFolder(path)
        try:
            same = run_key(folder.settings()) == run_key(settings)
            done = len(folder.metrics())
        except UserError:  # not a run folder
            continue
        if same:
            place = shlex.quote(str(path))
            if folder.finished:
                state = f"It is finished: view it with pwlu report {place}, or"
            elif folder.is_locked():
                state = "Another process is training it: wait for it, or"
            else:
                state = f"It stopped after {done} epochs: continue it with pwlu train --resume {place}, or"
            raise UserError(f"{path} is a run with the same settings. {state} start a new run with --again or another --seed")


def train(settings: Settings, path: Path, processes: Processes) -> dict[str, Any]:
    """Train the run in a run folder, from the start or from its last checkpoint. Return the content of result.json."""
    folder = RunFolder(path)
    if settings.channels_last is None:
        settings = settings.replace(channels_last=processes.device.type == "cuda")
    if settings.fuse_norms == "auto":
        settings = settings.replace(fuse_norms=folder.fuse_norms())
    with folder.lock() if processes.is_main else nullcontext():
        try:
            loop = _Loop(settings, folder, processes)
        except UserError:
            if processes.is_main:
                folder.remove_if_only_settings()
            raise
        return loop.run()


class _Loop:
    def __init__(self, settings: Settings, folder: RunFolder, processes: Processes) -> None:
        self.settings, self.folder, self.processes = settings, folder, processes
        self.task = _task(settings, processes)
        self.trainer = Trainer(self.task, settings, processes)
        self.total = self.task.total_steps
        self.epochs = math.ceil(self.total / self.task.steps_per_epoch)
        self.number = 0  # the number of steps done
        self.sums = torch.zeros((), device=processes.device)
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=processes.device)  # steps of this epoch with finite sums
        self.first_loss: float | None = None  # the loss of the first step
        self.seconds = 0.0  # the training time of this epoch
        self.saved_at = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Train to the end, and return the result."""
        self._begin()
        title = f"{self.settings.recipe} {self.settings.activation}, seed {self.settings.seed}"
        self.board = self._tensorboard()
        self.progress = Progress(title, self.total, done=self.number, silent=not self.processes.is_main)
        for note in (*self.task.notes, *self._changed_processes()):
            self.progress.say(note)
        try:
            while self.number < self.total and self._loss_is_finite():
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
                self._restore(state)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise self.folder.unreadable(
                    f"the newest checkpoint of {self.folder.path} does not fit what config.json describes: {error!r:.200}",
                    "Restore the original files, or start a new run without --resume",
                ) from None
        if self.processes.is_main:
            if state is None:
                made_with = environment(self.processes) | {"fuse_norms": self.trainer.fuse_norms}
                self.folder.write_json("environment.json", made_with)
                self._snapshot()
            self.folder.forget_metrics_after(self.number)
        self.processes.barrier()
        self.last = next(reversed(self.folder.metrics()), None)
        known, done = self.last["step"] if self.last else 0, self.number
        if known != (done if done == self.total else done // self.task.steps_per_epoch * self.task.steps_per_epoch):
            raise UserError(
                f"{self.folder.path / 'metrics.jsonl'} ends at step {known:,}, but the newest checkpoint is of step {done:,}: "
                "epochs are missing. Copy the file again from where it was trained, or start a new run without --resume"
            )

    def _changed_processes(self) -> list[str]:
        """Return a note on what changes and what does not, if the run started with another number of processes."""
        known = self.folder.environment() if self.folder.has("environment.json") else {}
        begun, now = known.get("processes"), self.processes.count
        if begun in (None, now):
            return []
        norms = "" if self.processes.device.type == "cuda" else ", the batch statistics of each process"
        return [
            f"started with {counted(int(begun), 'process', 'processes')}, now {now}. Unchanged: the images of every step, "
            "their augmentation, the batch, the learning rate. Changed: the rounding of sums, the random numbers of dropout"
            + norms
        ]

    def _restore(self, state: dict[str, Any]) -> None:
        before = state.get("steps_per_epoch", self.task.steps_per_epoch)
        if before != self.task.steps_per_epoch:
            raise UserError(
                f"{self.folder.path}: the data set has changed. An epoch had {before:,} steps and would now have "
                f"{self.task.steps_per_epoch:,}. Restore the original data, or start a new run without --resume"
            )
        self.trainer.load(state["trainer"])
        self.number, self.seconds = state["step"], state["seconds"]
        self.first_loss = state.get("first_loss")
        self.finite_steps += state.get("sound", self.number % self.task.steps_per_epoch)
        if self.processes.is_main:  # the saved sums are over all processes, so only one process may continue them
            self.sums = state["sums"]

    def _epoch(self, epoch: int) -> None:
        steps, begin = self.task.steps_per_epoch, time.monotonic()
        shown = {}
        for batches in self.task.epoch(epoch, self.number % steps):
            self.sums = self.sums + self.trainer.step(self.number, batches)
            self.finite_steps += self.sums.isfinite().all()
            self.number += 1
            if self.number == 1:
                self.first_loss = self._summary()["loss"]
            now = time.monotonic()
            if self.progress.bar is not None and self.number % 10 == 0:  # not each time: reading the sums synchronizes
                shown = self._bar_values(epoch, now - begin + self.seconds)
            self.progress.step(**shown)
            if self.number % STEPS_BETWEEN_CLOCK_CHECKS == 0 and self.number % steps and self._checkpoint_due():
                self._checkpoint(self.seconds + time.monotonic() - begin)
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.number} | _rounded(self._summary())
        if row["loss"] is None:
            row["diverged_at"] = epoch * steps + min(self.processes.gather([self.finite_steps.item()])) + 1
        self.seconds += time.monotonic() - begin  # _summary() has synchronized with the device
        self.processes.broadcast(self.trainer.measured.buffers())  # without SyncBatchNorm, ranks differ in batch statistics
        if (epoch + 1) % self.settings.measure_every == 0 or self.number == self.total or row["loss"] is None:
            row |= _rounded(self.task.measure(self.trainer.measured, self.trainer.autocast()))
        phases = self.trainer.phases
        first_phase = 1 if phases and epoch * steps < phases.realign_at else 2
        row |= {"lr": self.trainer.schedule.get_last_lr()[0], "phase": first_phase}
        speed = self._steps_in_epoch() * self.settings.batch / self.seconds
        row |= _rounded({"seconds": self.seconds, "images_per_second": speed})
        if self.processes.is_main:
            self.folder.add_metrics(row)
            if self._is_due(epoch, self.settings.snapshots):
                self._snapshot()
            self._report_epoch(row)
            if self.board is not None and self.trainer.units and self._is_due(epoch, FIGURES):
                self.board.add_figure("functions", plot_functions(self.trainer.measured), self.number)
        self.last = row
        self.sums, self.seconds = torch.zeros((), device=self.processes.device), 0.0
        self.finite_steps.zero_()
        self._checkpoint(0.0)

    def _summary(self) -> dict[str, float]:
        """Return the summary of this epoch over all processes."""
        return self.task.summary(self.processes.all_reduce(self.sums.clone()))

    def _checkpoint_due(self) -> bool:
        """Return whether to write a checkpoint within the epoch. Rank 0 decides for all."""
        late = torch.tensor(float(self.processes.is_main and time.monotonic() - self.saved_at > SECONDS_BETWEEN_CHECKPOINTS))
        return bool(self.processes.all_reduce(late.to(self.processes.device)))

    def _checkpoint(self, seconds: float) -> None:
        sums = self.processes.all_reduce(self.sums.clone())
        if self.processes.is_main:
            state = {"trainer": self.trainer.state(), "step": self.number, "sums": sums, "seconds": seconds}
            state |= {"steps_per_epoch": self.task.steps_per_epoch, "first_loss": self.first_loss}
            state["sound"] = self.finite_steps.item()  # all versions use this name in checkpoints
            self.folder.save_checkpoint(self.number, state)
        self.saved_at = time.monotonic()

    def _is_due(self, epoch: int, times: int) -> bool:
        """Return whether this epoch is one of `times` evenly spaced epochs, including the last epoch."""
        times = min(times, self.epochs)
        return (epoch + 1) * times // self.epochs > epoch * times // self.epochs

    def _snapshot(self) -> None:
        if self.trainer.units and self.settings.snapshots:
            self.folder.write_tensors(f"snapshots/step-{self.number:08d}.pt", self.trainer.functions())

    def _loss_is_finite(self) -> bool:
        return self.last is None or self.last["loss"] is not None

    # Progress.

    def _bar_values(self, epoch: int, seconds: float) -> dict[str, Any]:
        summary = self.task.summary(self.sums)
        shown = {name: f"{value:.3g}" for name, value in summary.items() if name in _FORMATS}
        shown["phase"] = "I" if self.trainer.phase == 1 else "II"
        speed = round(self._steps_in_epoch() * self.settings.batch / seconds)
        return {"epoch": f"{epoch + 1}/{self.epochs}"} | shown | {"images/s": speed}

    def _steps_in_epoch(self) -> int:
        """Return the number of steps done in the current epoch. At least one step must have been done."""
        return (self.number - 1) % self.task.steps_per_epoch + 1

    def _report_epoch(self, row: dict[str, Any]) -> None:
        if self.board is not None:
            for name, value in row.items():
                if name not in ("epoch", "step") and value is not None:
                    self.board.add_scalar(name, value, row["step"])
        text = ", ".join(form.format(row[name]) for name, form in _FORMATS.items() if row.get(name) is not None)
        phase = {1: "Phase I", 2: "Phase II"}[row["phase"]] + ", " if self.trainer.phases else ""
        speed = f"{row['images_per_second']:.0f} images/s, {self.progress.left()} left"
        self.progress.say(f"epoch {row['epoch']:3d}/{self.epochs}: {text}, {phase}{speed}")

    def _tensorboard(self) -> Any:
        if not self.settings.tensorboard or not self.processes.is_main:
            return None
        with needs_packages("--tensorboard", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        return SummaryWriter(str(self.folder.path / "tensorboard"), purge_step=self.number + 1)

    # The end.

    def _end(self) -> dict[str, Any]:
        try:
            result = self._result(self.folder.metrics())
        except (LookupError, TypeError, ValueError) as error:  # another program has changed the file
            path = self.folder.path / "metrics.jsonl"
            raise UserError(f"{path} is damaged: it does not give a result ({error!r}). Start a new run") from None
        files = self.task.files(self.trainer.measured, self.trainer.autocast())
        if self.processes.is_main:
            for name, content in files.items():
                self.folder.write(name, content)
            aligned = None
            if self.trainer.units:
                aligned = alignment(self.trainer.measured, self.task.alignment_inputs(), histogram=True)
                self.folder.write("inputs.json", aligned.to_json().encode())
                self.folder.write("alignment.json", without_histograms(aligned).to_json().encode())
                self.folder.write_tensors("functions.pt", self.trainer.functions())
            self.folder.write(MODEL, self.trainer.serialised())
            self.task.network_info({site.name: site.was for site in self.trainer.report.converted}).write(self.folder)
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
    """Return the task of a recipe. Import only its module, because each task needs packages that the other does not."""
    with needs_packages("training", "train"):
        # Both are needed at the end of the run: ask for them before it.
        import matplotlib  # noqa: F401
        import safetensors  # noqa: F401

        if find(settings.recipe).detects:
            from pwlu.lab.tasks.detection import Detection

            return Detection(settings, processes)
        from pwlu.lab.tasks.classification import Classification

        return Classification(settings, processes)


def _rounded(numbers: dict[str, float]) -> dict[str, float | None]:
    """Round to seven digits, and replace numbers that are not finite by None, because JSON cannot represent them."""
    return {name: float(f"{value:.7g}") if math.isfinite(value) else None for name, value in numbers.items()}
