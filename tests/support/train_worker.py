"""``pwlu train`` as the tests start it to kill it: several commands one after the other, each of which may die.

    python train_worker.py FOLDER '[{"arguments": [...], "die_at": STEP, "die_writing": NAME, "often": true}, ...]'

Every command has a process of its own, and under torchrun one for each of its processes. One that is to die does so by SIGKILL:
before the step of that number, or when half of the first file whose name begins with NAME is written. "often": checkpoints are
written every third step too. The exit statuses are printed last, by the first process. FOLDER is where processes may meet.
"""

import json
import os
import signal
import sys

# Imported once here, so that the commands need not do it one by one. Nothing is computed: torch would not survive the fork.
import matplotlib.figure  # noqa: F401
import sklearn.datasets
import sklearn.model_selection  # noqa: F401
import torch._dynamo  # noqa: F401
import torch.distributed as dist

from pwlu.cli import main
from pwlu.common import files
from pwlu.lab.runs.run_folder import RunFolder
from pwlu.lab.training import loop
from pwlu.lab.training.trainer import Trainer


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def run(arguments, die_at=None, die_writing=None, often=False):
    """The command, in this process, which is changed for it; the exit status."""
    step, write = Trainer.step, RunFolder.write

    def mortal_step(trainer, number, batches):
        if number == die_at:
            die()
        return step(trainer, number, batches)

    def mortal_write(folder, name, content):
        if die_writing and name.startswith(die_writing):
            with files.atomic_write(folder.path / name) as file:
                file.write_bytes(content[: len(content) // 2])
                die()
        write(folder, name, content)

    Trainer.step, RunFolder.write = mortal_step, mortal_write
    if often:
        loop.STEPS_BETWEEN_CLOCK_CHECKS, loop.SECONDS_BETWEEN_CHECKPOINTS = 3, -1
    return main(["train", "--device", "cpu", *arguments])  # two processes on one GPU would not do


def in_a_process_of_its_own(folder, number, job):
    """A copy of this one, which has imported everything; the exit status, negative for a signal."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        if "RANK" in os.environ and number:  # torchrun arranges one meeting, that of the first command
            rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{number}", rank=rank, world_size=count)
        status = run(**job)
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    jobs = json.loads(sys.argv[2])
    statuses = [in_a_process_of_its_own(sys.argv[1], number, job) for number, job in enumerate(jobs)]
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(statuses))
