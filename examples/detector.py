"""Train a detector with PWLUs on drawings of squares, and measure how many it finds.

The detector is torchvision's RetinaNet on a small ResNet with a feature pyramid, with random weights. A head that
runs on several levels of the pyramid gets one function per channel for all of them, and its statistics in Phase I
cover all levels. The images are drawn by this program: nothing is downloaded. --tiny takes less than a minute on a
CPU.

For real data sets in COCO's layout, use `pwlu train nuclei/retinanet_resnet18_fpn --data DIR`.
"""

import argparse

import torch
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.resnet import BasicBlock, ResNet
from torchvision.ops import box_iou

import pwlu


def detector(pixels: int) -> RetinaNet:
    """Return a RetinaNet for one class on the first three stages of a ResNet with one block per stage."""
    resnet = ResNet(BasicBlock, [1, 1, 1, 1])
    backbone = BackboneWithFPN(resnet, {"layer1": "0", "layer2": "1", "layer3": "2"}, [64, 128, 256], out_channels=64)
    anchors = AnchorGenerator(((6, 9), (12, 18), (24, 36), (48, 72)), ((1.0,),) * 4)
    return RetinaNet(backbone, 2, min_size=pixels, max_size=pixels, anchor_generator=anchors, detections_per_img=20)


def scene(pixels: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an image of noise with one to three bright squares, and their boxes."""
    image = 0.3 * torch.rand(3, pixels, pixels, generator=generator)
    boxes = []
    for _ in range(int(torch.randint(1, 4, (), generator=generator))):
        side = int(torch.randint(pixels // 8, pixels // 3, (), generator=generator))
        left, top = torch.randint(0, pixels - side, (2,), generator=generator).tolist()
        image[:, top : top + side, left : left + side] = 0.5 + 0.5 * torch.rand(3, 1, 1, generator=generator)
        boxes.append([left, top, left + side, top + side])
    return image, {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.ones(len(boxes), dtype=torch.int64)}


def batch(
    images: tuple[Tensor, ...], targets: tuple[dict[str, Tensor], ...], device: str
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return the arguments of the detector, on the device."""
    return [image.to(device) for image in images], [{name: v.to(device) for name, v in target.items()} for target in targets]


def found(model: nn.Module, scenes: list[tuple[Tensor, dict[str, Tensor]]], device: str) -> float:
    """Return the share of squares, in percent, that one of as many detections overlaps by half."""
    hits = total = 0
    model.eval()
    for image, target in scenes:
        with torch.no_grad():
            (detected,) = model([image.to(device)])
        best = detected["boxes"][: len(target["boxes"])].cpu()
        if len(best):
            hits += int((box_iou(target["boxes"], best).amax(1) >= 0.5).sum())
        total += len(target["boxes"])
    return 100 * hits / total


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="optimizer steps of 8 images (default: 600; with --tiny: 60)")
    parser.add_argument("--realign-at", type=int, help="steps of Phase I (default: a fifth of all)")
    parser.add_argument("--tiny", action="store_true", help="images of 64 instead of 128 pixels, 60 steps")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pixels, steps = (64 if options.tiny else 128), options.steps or (60 if options.tiny else 600)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = detector(pixels).to(device)
    images, targets = zip(*(scene(pixels, generator) for _ in range(2)), strict=True)
    # A tuple holds the arguments of one call. A list of images by itself would be taken for several samples.
    print(pwlu.convert_(model, batch(images, targets, device)))
    optimizer = torch.optim.AdamW(pwlu.parameter_groups(model, lr=1e-3, weight_decay=1e-2))
    phases = pwlu.TwoPhase(model, optimizer, realign_at=options.realign_at or max(1, steps // 5))
    model.train()
    for step in range(1, steps + 1):
        images, targets = zip(*(scene(pixels, generator) for _ in range(8)), strict=True)
        loss = sum(model(*batch(images, targets, device)).values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        if step % max(1, steps // 6) == 0:
            print(f"step {step}, phase {phases.phase}: loss {loss.item():.3f}", flush=True)
    phases.remove()
    test = [scene(pixels, generator) for _ in range(50)]
    print(f"{found(model, test, device):.1f} % of the squares in 50 new images were found")


if __name__ == "__main__":
    main()
