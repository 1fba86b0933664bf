"""Train a small network with PWLUs, export it to ONNX, and run the file in a process that cannot import pwlu or torch.

pwlu.export_onnx fuses a copy of the network, writes standard operators, and compares the file with PyTorch before it
appears. The second process needs NumPy and ONNX Runtime only. The images are scikit-learn's digits: nothing is
downloaded. --tiny takes seconds on a CPU.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import pwlu

# What you would run on the machine that serves the model. The first line proves that neither package is needed.
SERVER = """
import sys
sys.modules.update(pwlu=None, torch=None)  # importing either is an error now
import numpy as np
import onnxruntime

model, data = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
images, labels = np.load(data)["images"], np.load(data)["labels"]
(outputs,) = session.run(None, {session.get_inputs()[0].name: images})
print(f"in ONNX Runtime, without pwlu and torch: {100 * (outputs.argmax(1) == labels).mean():.2f} % of {len(labels)} images")
"""


def network() -> nn.Sequential:
    """Two convolutions and a linear layer, with ReLU."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def main() -> None:
    """Parse the command line, train, export, start the other process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, help="passes over the training images (default: 20; with --tiny: 4)")
    parser.add_argument("--folder", type=Path, default=Path("runs/onnx"), help="for the files (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="four epochs")
    options = parser.parse_args()
    epochs = options.epochs or (4 if options.tiny else 20)
    torch.manual_seed(0)
    data = load_digits()
    images, labels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(data.target)
    order = torch.randperm(len(images))
    train, test = order[:900], order[900:]
    model = network()
    pwlu.convert_(model, images[:2])
    optimizer = torch.optim.AdamW(pwlu.parameter_groups(model, lr=0.01, weight_decay=0.01))
    phases = pwlu.TwoPhase(model, optimizer, realign_at=max(1, epochs // 4) * 15)
    for _ in range(epochs):
        for batch in train[torch.randperm(len(train))].split(60):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    phases.remove()
    model.eval()
    with torch.no_grad():
        right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    print(f"in PyTorch: {100 * right:.2f} % of {len(test)} images")

    options.folder.mkdir(parents=True, exist_ok=True)
    print(pwlu.export_onnx(model, images[:2], options.folder / "digits.onnx"))
    np.savez(options.folder / "test.npz", images=images[test].numpy(), labels=labels[test].numpy())
    command = [sys.executable, "-c", SERVER, str(options.folder / "digits.onnx"), str(options.folder / "test.npz")]
    print(subprocess.run(command, check=True, capture_output=True, text=True).stdout, end="")


if __name__ == "__main__":
    main()
