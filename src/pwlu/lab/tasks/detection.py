"""The task of detection and instance segmentation: batches, a loss, a measurement."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.common.text import counted
from pwlu.lab.data import coco, keyed_random
from pwlu.lab.data.datasets import split_holdout
from pwlu.lab.data.detection_images import DetectionImages, Example
from pwlu.lab.data.file_images import MEAN, STD
from pwlu.lab.models import detectors
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes
from pwlu.lab.tasks import coco_evaluation
from pwlu.lab.tasks.task import Task

# The losses that torchvision's detectors return in training. The total loss is their sum.
LOSSES = {
    "maskrcnn": ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"),
    "retinanet": ("classification", "bbox_regression"),
}
ALIGNMENT_BATCHES = 64
UNREADABLE = "unreadable_measured_images"  # an entry of metrics.jsonl and result.json, only if there are unreadable images

Batch = tuple[list[Tensor], list[dict[str, Tensor]], int]  # images, their objects, the number of unreadable images


class Detection(Task):
    """Detection of objects by boxes and masks, measured by COCO's average precision in percent."""

    metric = "box_ap"

    def __init__(self, settings: Settings, processes: Processes) -> None:
        super().__init__(settings, processes)
        self.detector = self.recipe.network.partition("_")[0]
        self.kinds = ("box", "mask") if "mask_ap" in self.recipe.metrics else ("box",)
        measured = [name for kind in self.kinds for name in coco_evaluation.names(kind)]
        self.reported = [*(name for name in measured if name != self.metric), UNREADABLE]
        train, test = coco.load(Path(settings.data), with_masks="mask" in self.kinds)
        self.measured_on = "validation images"
        if settings.holdout:
            train, test = split_holdout(train, settings.holdout)
            self.measured_on = "held-out training images"
            if not len(test.training_images()):
                raise UserError(f"the images of --holdout {settings.holdout} have no objects: write a larger number")
        self.first_label = detectors.first_label(self.recipe.network)
        self.categories, self.classes = list(train.classes), list(train.classes.values())
        self.train, self.test = self._images(train), self._images(test)
        self.used = train.training_images()
        self.plan_steps(len(self.used))
        self.measured_images = len(test)
        self.notes = self._notes()
        self.rows: list[dict[str, Any]] | None = None  # the detections of the last measurement

    def _images(self, part: coco.Annotations) -> DetectionImages:
        s = self.settings
        return DetectionImages(part, self.first_label, s.augmentation == "flip", self.processes.device, s.worker_count)

    def _notes(self) -> list[str]:
        names = ", ".join(self.classes[:100])
        notes = [f"{counted(len(self.classes), 'class', 'classes')}: {names}"]
        for name, images in (("training", self.train), ("measured on", self.test)):
            unreadable = f", {counted(images.unreadable, 'image')} cannot be read" if images.unreadable else ""
            notes.append(f"{name}: {images.part}{unreadable}")
        return notes

    # Training.

    def order(self, epoch: int) -> Tensor:
        """Return the indices of the training images of an epoch, (steps, batch).

        To save padding, a batch has only wide or only tall images. The last batches mix what is left of both.
        """
        batch = self.settings.batch
        order = self.used[torch.randperm(len(self.used), generator=keyed_random.generator(self.settings.seed, epoch, 1))]
        height, width = self.train.part.sizes[order].unbind(1)
        uniform: list[Tensor] = []
        rest: list[Tensor] = []
        for group in (height > width, height <= width):
            places = group.nonzero().flatten()
            filled = len(places) // batch * batch
            uniform += places[:filled].view(-1, batch).unbind()
            rest.append(places[filled:])
        uniform.sort(key=lambda places: int(places[-1]))
        left = torch.cat(rest)
        mixed = left[: len(left) // batch * batch].view(-1, batch).unbind()
        return order[torch.stack([*uniform, *mixed])]

    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Batch]:
        """Yield the images and their objects for each tensor of indices."""
        for examples in self.train.batches([part.tolist() for part in parts], keys):
            yield self._prepare(examples)

    def _prepare(self, examples: list[Example]) -> Batch:
        images = [image.to(self.dtype) / 255 for image, _, _ in examples]
        targets = [
            {name: v.to(self.dtype) if v.is_floating_point() else v for name, v in target.items()} for _, target, _ in examples
        ]
        return images, targets, sum(not readable for _, _, readable in examples)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, and sums to accumulate over the epoch: losses, images, unreadable images."""
        images, targets, unreadable = batch
        parts = model(images, targets)
        each = torch.stack([parts[name] for name in LOSSES[self.detector]])
        loss = each.sum()
        sums = torch.cat([loss.detach()[None], each.detach()]).double() * len(images)
        return loss, torch.cat([sums, sums.new_tensor([len(images), unreadable])])

    def summary(self, sums: Tensor) -> dict[str, float]:
        """Return the training losses of an epoch, and the number of unreadable images."""
        *losses, count, unreadable = sums.tolist()
        names = ("loss", *(f"loss_{name.removeprefix('loss_')}" for name in LOSSES[self.detector]))
        means = {name: value / max(count, 1) for name, value in zip(names, losses, strict=True)}
        return means | ({"unreadable_images": unreadable} if unreadable else {})

    # Measuring.

    def test_batches(self) -> Iterator[tuple[list[Tensor], list[int], int]]:
        """Yield this process's share of the images to measure on, each once, with indices and the number of unreadable ones.

        Images that are too long and narrow are skipped, and their objects count as missed. All images of a batch have the same
        size. Otherwise they would be padded, and the detections in an image would depend on the other images.
        """
        sizes = self.test.part.sizes.tolist()
        fitting = self.test.part.fits().nonzero().flatten().tolist()
        mine = sorted(fitting[self.processes.rank :: self.processes.count], key=lambda index: sizes[index])
        plan = []
        for _, same_size in groupby(mine, key=lambda index: sizes[index]):
            indices = list(same_size)
            plan += [indices[k : k + self.micro_batch] for k in range(0, len(indices), self.micro_batch)]
        for indices, examples in zip(plan, self.test.batches(plan) if plan else (), strict=True):
            images, _, unreadable = self._prepare(examples)
            yield images, indices, unreadable

    @torch.no_grad()
    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """Return COCO's average precisions over all processes. Objects in unreadable images count as missed."""
        part, rows, unreadable = self.test.part, list[dict[str, Any]](), 0
        model.eval()
        for images, indices, unreadable_here in self.test_batches():
            unreadable += unreadable_here
            with autocast:
                found = model(images)
            for index, each in zip(indices, found, strict=True):
                rows += coco_evaluation.detections(int(part.image_ids[index]), each, self.categories, self.first_label)
        model.train()
        rows = self.processes.gather(rows)
        unreadable = int(self.processes.all_reduce(torch.tensor(unreadable, device=self.processes.device)))
        self.rows, values = rows, dict[str, float]()
        if self.processes.is_main:
            for kind in self.kinds:
                values |= coco_evaluation.average_precision(part, rows, kind, self.recipe.detections)
            if unreadable:
                values[UNREADABLE] = unreadable
        return self.processes.broadcast_object(values)

    def files(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, bytes]:
        """Return the detections if --save-detections is set."""
        if not self.settings.save_detections:
            return {}
        if self.rows is None:  # the run was resumed after its last measurement
            self.measure(model, autocast)
        return {"detections.json": json.dumps(self.rows).encode()}

    def network_info(self, sites: dict[str, str]) -> NetworkInfo:
        """Return what the run folder says about the network and these activation sites."""
        pixels = self.settings.pixels
        image = f"RGB images scaled and padded to {pixels} x {pixels}"
        return NetworkInfo((self.channels, pixels, pixels), image, MEAN, STD, tuple(self.classes), sites)

    def alignment_inputs(self) -> Iterator[tuple[list[Tensor]]]:
        """Yield inputs of the detector on which to measure the alignment of PWLUs."""
        for number, (images, _, _) in enumerate(self.test_batches()):
            if number == ALIGNMENT_BATCHES:
                return
            yield (images,)
