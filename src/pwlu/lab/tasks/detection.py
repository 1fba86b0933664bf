"""Detection and instance segmentation, as the loop sees a task: batches, a loss, a measurement."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pwlu.conversion.conversion_report import Report
from pwlu.lab.data import coco, keyed_random
from pwlu.lab.data.datasets import held_out
from pwlu.lab.data.detection_images import DetectionImages, Scene
from pwlu.lab.data.image_folder import MEAN, STD
from pwlu.lab.models import detectors
from pwlu.lab.recipes.settings import Settings, UserError
from pwlu.lab.runs.network_info import NetworkInfo
from pwlu.lab.runs.processes import Processes
from pwlu.lab.tasks import coco_evaluation
from pwlu.lab.tasks.task import ImageTask
from pwlu.text import counted

# What torchvision's detectors return in training, each added to the loss with weight 1.
LOSSES = {
    "maskrcnn": ("loss_classifier", "loss_box_reg", "loss_mask", "loss_objectness", "loss_rpn_box_reg"),
    "retinanet": ("classification", "bbox_regression"),
}
ALIGNMENT_BATCHES = 64
UNREADABLE = "unreadable_measured_images"  # in metrics.jsonl and result.json, where there are some

Batch = tuple[list[Tensor], list[dict[str, Tensor]], int]  # images, what is in them, how many could not be read


class Detection(ImageTask):
    """A data set of images with boxes around objects, and masks. ``metric``: COCO's average precision of boxes, in percent."""

    metric = "box_ap"

    def __init__(self, settings: Settings, processes: Processes) -> None:
        super().__init__(settings, processes)
        self.detector = self.recipe.network.partition("_")[0]
        self.kinds = ("box", "mask") if "mask_ap" in self.recipe.metrics else ("box",)
        train, test = coco.load(Path(settings.data), with_masks="mask" in self.kinds)
        self.measured_on = "validation images"
        if settings.holdout:
            train, test = held_out(train, settings.holdout)
            self.measured_on = "held-out training images"
            if not len(test.trained_on()):
                raise UserError(f"there is no object in the images that --holdout {settings.holdout} takes: write more")
        self.first_label = detectors.first_label(self.recipe.network)
        self.classes = train.classes
        self.train, self.test = self._scenes(train), self._scenes(test)
        self.used = train.trained_on()
        self.cut(len(self.used))
        self.measured_images = len(test)
        self.notes = self._notes()
        self.rows: list[dict[str, Any]] | None = None  # what was detected in the last measurement

    def _scenes(self, part: coco.Part) -> DetectionImages:
        s = self.settings
        return DetectionImages(part, self.first_label, s.augmentation == "flip", self.processes.device, s.readers)

    def _notes(self) -> list[str]:
        names = ", ".join(list(self.classes.values())[:100])
        notes = [f"{counted(len(self.classes), 'class', 'classes')}: {names}"]
        for name, scenes in (("training", self.train), ("measured on", self.test)):
            unreadable = f", {counted(scenes.unreadable, 'image')} cannot be read" if scenes.unreadable else ""
            notes.append(f"{name}: {scenes.part}{unreadable}")
        return notes

    @property
    def reported(self) -> list[str]:
        """What result.json has beside the metric."""
        names = [name for kind in self.kinds for name in coco_evaluation.names(kind) if name != self.metric]
        return [*names, UNREADABLE]

    # The network.

    def network(self) -> nn.Module:
        """The detector with new weights, and with its own activations."""
        return detectors.of_recipe(self.settings, len(self.classes))

    def sample(self) -> Any:
        """What the network is called with, for :func:`pwlu.convert_`."""
        return detectors.sample(self.settings)

    # Training.

    def order(self, epoch: int) -> Tensor:
        """Numbers of images, (steps, batch). Wide images come with wide ones and tall with tall, so that little is padding.

        What is left of the two at the end comes together.
        """
        batch = self.settings.batch
        order = self.used[torch.randperm(len(self.used), generator=keyed_random.generator(self.settings.seed, epoch, 1))]
        height, width = self.train.part.sizes[order].unbind(1)
        alike: list[Tensor] = []
        rest: list[Tensor] = []
        for group in (height > width, height <= width):
            places = group.nonzero().flatten()
            whole = len(places) // batch * batch
            alike += places[:whole].view(-1, batch).unbind()
            rest.append(places[whole:])
        alike.sort(key=lambda places: int(places[-1]))
        left = torch.cat(rest)
        mixed = left[: len(left) // batch * batch].view(-1, batch).unbind()
        return order[torch.stack([*alike, *mixed])]

    def read(self, parts: list[Tensor], keys: tuple[int, ...]) -> Iterator[Batch]:
        """Their images, and what is in them."""
        for scenes in self.train.batches([part.tolist() for part in parts], keys):
            yield self._prepared(scenes)

    def _prepared(self, scenes: list[Scene]) -> Batch:
        images = [image.to(self.dtype) / 255 for image, _, _ in scenes]
        targets = [
            {name: v.to(self.dtype) if v.is_floating_point() else v for name, v in target.items()} for _, target, _ in scenes
        ]
        return images, targets, sum(not readable for _, _, readable in scenes)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The sum of the detector's losses, and the sums that an epoch adds up: losses, images, images that are unreadable."""
        images, targets, unreadable = batch
        parts = model(images, targets)
        each = torch.stack([parts[name] for name in LOSSES[self.detector]])
        loss = each.sum()
        sums = torch.cat([loss.detach()[None], each.detach()]).double() * len(images)
        return loss, torch.cat([sums, sums.new_tensor([len(images), unreadable])])

    def summary(self, sums: Tensor) -> dict[str, float]:
        """Training losses of an epoch, and how many images could not be read."""
        *losses, count, unreadable = sums.tolist()
        names = ("loss", *(f"loss_{name.removeprefix('loss_')}" for name in LOSSES[self.detector]))
        means = {name: value / max(count, 1) for name, value in zip(names, losses, strict=True)}
        return means | ({"unreadable_images": unreadable} if unreadable else {})

    # Measuring.

    def test_batches(self) -> Iterator[tuple[list[Tensor], list[int], int]]:
        """This process's share of the images to measure on, each once, with their indices, and how many were unreadable.

        Those that do not fit are passed over: what is in them is missed. Images of one size come together: with others of
        another size they would be padded, and what is found in an image would depend on its company.
        """
        sizes = self.test.part.sizes.tolist()
        fitting = self.test.part.fits().nonzero().flatten().tolist()
        mine = sorted(fitting[self.processes.rank :: self.processes.count], key=lambda index: sizes[index])
        plan = []
        for _, alike in groupby(mine, key=lambda index: sizes[index]):
            indices = list(alike)
            plan += [indices[k : k + self.share] for k in range(0, len(indices), self.share)]
        for indices, scenes in zip(plan, self.test.batches(plan) if plan else (), strict=True):
            images, _, unreadable = self._prepared(scenes)
            yield images, indices, unreadable

    @torch.no_grad()
    def measure(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, float]:
        """COCO's average precisions on the images to measure on, over all processes. What is in unreadable images is missed."""
        part, rows, unreadable = self.test.part, list[dict[str, Any]](), 0
        model.eval()
        for images, indices, black in self.test_batches():
            unreadable += black
            with autocast:
                found = model(images)
            for index, each in zip(indices, found, strict=True):
                rows += coco_evaluation.detections(int(part.image_ids[index]), each, list(self.classes), self.first_label)
        model.train()
        rows = self.processes.gather(rows)
        unreadable = int(self.processes.all_reduce(torch.tensor(unreadable, device=self.processes.device)))
        self.rows, values = rows, dict[str, float]()
        if self.processes.is_main:
            for kind in self.kinds:
                values |= coco_evaluation.average_precision(part, rows, kind, self.recipe.detections)
            if unreadable:
                values[UNREADABLE] = unreadable
        return json.loads(self.processes.broadcast_text(json.dumps(values)) or "")

    def files(self, model: nn.Module, autocast: AbstractContextManager[Any]) -> dict[str, bytes]:
        """What was detected, if it is to be saved."""
        if not self.settings.save_detections:
            return {}
        if self.rows is None:  # the run was stopped after its last measurement
            self.measure(model, autocast)
        return {"detections.json": json.dumps(self.rows).encode()}

    def network_info(self, report: Report) -> NetworkInfo:
        """Return what the run folder says about the network, given the report of its conversion."""
        pixels, sites = self.settings.pixels, {site.name: site.was for site in report.converted}
        image = f"RGB images scaled and padded to {pixels} x {pixels}"
        return NetworkInfo((3, pixels, pixels), image, MEAN, STD, tuple(self.classes.values()), sites)

    def some_images(self) -> Iterator[tuple[list[Tensor]]]:
        """To see the inputs of activations."""
        for number, (images, _, _) in enumerate(self.test_batches()):
            if number == ALIGNMENT_BATCHES:
                return
            yield (images,)
