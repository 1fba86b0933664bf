"""A training that saves itself and can be killed at any step: the script that test_resume.py starts again and again.

    python resume_worker.py FOLDER {before,after} EVERY [STEP MOMENT]

The controller is made before or after loading; a checkpoint is written every EVERY steps. At STEP the process kills itself,
when MOMENT is "step" (taken, not yet saved), "write" (in the middle of writing) or "saved".
"""

import io
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import pwlu

STEPS, REALIGN_AT = 8, 3
SKIPPED = 2  # the scaler skips this one: its inputs stay in the pool, and have to survive there
BOUNDARY = REALIGN_AT + 1  # the step of the loop that ends Phase I


def main(folder, order, every, die_at=0, moment=""):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    checkpoint = Path(folder, "checkpoint.pt")
    acts = pwlu.PWLU(8), pwlu.PWLU(init="silu")
    model = nn.Sequential(nn.Linear(5, 8), acts[0], nn.Dropout(0.3), nn.Linear(8, 8), acts[1], nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1)
    scaler = torch.amp.GradScaler("cpu")
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    if order == "before":
        pwlu.TwoPhase(model, optimizer, realign_at=REALIGN_AT)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
        done = saved["step"]
    if order == "after":
        pwlu.TwoPhase(model, optimizer, realign_at=REALIGN_AT)

    def die(step, now):
        if (step, now) == (die_at, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(done + 1, STEPS + 1):
        x = 2 * torch.randn(16, 5)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True).abs()).square().mean()
        scaler.scale(loss * (torch.inf if step == SKIPPED else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        die(step, "step")
        if step % every == 0 or step == STEPS:
            content = io.BytesIO()
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "rng": torch.get_rng_state(), "step": step}, content)
            unfinished = checkpoint.with_suffix(".unfinished")
            with unfinished.open("wb") as file:
                file.write(content.getvalue()[:1000])
                file.flush()
                die(step, "write")
                file.write(content.getvalue()[1000:])
            os.replace(unfinished, checkpoint)
            die(step, "saved")


if __name__ == "__main__":
    folder, order, every, *death = sys.argv[1:]
    main(folder, order, int(every), *([int(death[0]), death[1]] if death else []))
