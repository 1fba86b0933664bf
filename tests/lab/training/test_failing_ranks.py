"""A rank that fails or dies ends all ranks, and what is reported is its own error."""

import os
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist
from imported import MOST_SECONDS, plain_environment, wait_for
from lab_helpers import rank_of, write_images

from pwlu.lab.runs.results import find_runs

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")]
SMALL = ("--pixels", "32", "--width", "0.125", "--batch", "4", "--epochs", "1", "--workers", "0")


@pytest.mark.parametrize("launcher", ["torch.distributed.run", "pwlu.lab.compare.launch"])
def test_a_rank_that_cannot_read_an_image(tmp_path, launcher):
    """The other one loses its connection, which is not the cause."""
    data = write_images(tmp_path / "data", train=8)
    broken = data / "train" / "dog" / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    command = [sys.executable, "-m", launcher, "--standalone", "--nproc-per-node=2", "-m", "pwlu", "train"]
    command += ["imagenette/resnet18", "--data", str(data), "--act", "relu", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, env=plain_environment(), capture_output=True, text=True, timeout=MOST_SECONDS)
    message = f"UserError: the image {broken} cannot be read: "
    if launcher == "torch.distributed.run":
        assert done.returncode == 1
        assert message in done.stderr.partition("Root Cause")[2]
    else:
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
    assert "Connection closed" not in done.stderr.splitlines()[-1]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_is_killed(tmp_path):
    """The run is tried again with all its processes, and goes on from its checkpoint."""
    command = [sys.executable, "-m", "pwlu", "compare", "digits", "--acts", "pwlu", "--seeds", "1", "--epochs", "6"]
    command += ["--realign-epochs", "1", "--processes-per-run", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=plain_environment(), **pipes) as process:
        wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")), process)
        os.kill(rank_of(str(tmp_path), "1"), signal.SIGKILL)
        out, err = process.communicate(timeout=MOST_SECONDS)
    assert process.returncode == 0, out + err
    assert ", seed 0: died and will be tried again. exit status -9, " in out
    ((run,), complaints) = find_runs(tmp_path / "runs")
    assert not complaints
    assert run.environment["processes"] == 2
    assert "rank 1 failed first, exit status -9: Signal 9 (SIGKILL)" in next(tmp_path.glob("runs/logs/*.txt")).read_text()
