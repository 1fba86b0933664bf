"""`pwlu compare --on ray`: a real cluster of two nodes on this machine trains what this machine alone trains."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from imported import MOST_SECONDS, SOURCES, SUPPORT, plain_environment, wait_for
from lab_helpers import rank_of, same_state, without_times, write_images
from safetensors.torch import load_file

from pwlu.cli import main
from pwlu.lab.compare import ray_pool
from pwlu.lab.recipes.settings import UserError
from pwlu.lab.runs.results import find_runs
from pwlu.lab.runs.run_folder import RunFolder

COMMAND = [sys.executable, "-m", "pwlu", "compare", "digits", "--acts", "relu,pwlu", "--realign-epochs", "1"]


@contextmanager
def cluster(*arguments):
    """Two nodes: the process that started them, and the environment in which they are found."""
    pytest.importorskip("ray")
    command = [sys.executable, SUPPORT / "ray_cluster.py", *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=plain_environment(), text=True, **pipes) as process:
        try:
            word, address = process.stdout.readline().split()
            assert word == "ready"
            yield process, plain_environment(RAY_ADDRESS=address)
        finally:
            process.stdin.close()
            process.wait(60)


def compare(folder, variables, *arguments):
    return subprocess.run(
        [*COMMAND, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=MOST_SECONDS
    )


# What is checked before anything is trained.


def test_without_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "digits", "--on", "ray"]) == 2
    assert "--on ray needs the package ray, here and on all nodes: pip install '.[cluster]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("on", "remedy"), [("ray", "Start one with ray start --head"), ("ray://127.0.0.1:1", "Write the address")]
)
def test_no_cluster(tmp_path, monkeypatch, capsys, on, remedy):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "digits", "--on", on]) == 2
    assert f"--on {on}: no Ray cluster can be reached. {remedy}" in capsys.readouterr().err


HERE = {"shared": True, "versions": {"pwlu": "with the sources 12345678", "torch": "2.15.0"}}


@pytest.mark.parametrize(
    ("there", "text"),
    [
        ({"shared": False}, "the node gpu7 does not see /shared/runs of this machine. All nodes must share the folder of runs"),
        ({"versions": HERE["versions"] | {"torch": "2.11.0"}}, "node gpu7 has torch 2.11.0, but this machine has torch 2."),
        ({"versions": HERE["versions"] | {"pwlu": "missing"}}, "the node gpu7 has pwlu missing, but this machine has pwlu "),
    ],
)
def test_nodes_that_differ(there, text):
    ray_pool._compare("gpu7", HERE, HERE, Path("/shared/runs"))
    with pytest.raises(UserError, match=text):
        ray_pool._compare("gpu7", HERE, HERE | there, Path("/shared/runs"))


def test_inspect_node(tmp_path):
    """Sent as code, it needs no pwlu."""
    found = ray_pool._as_code()(str(tmp_path / "token"))
    assert not found["shared"]
    (tmp_path / "token").touch()
    assert ray_pool._as_code()(str(tmp_path / "token")) == found | {"shared": True}
    assert found["versions"]["pwlu"].startswith("with the sources ")


# A cluster.


@pytest.mark.slow
def test_a_node_with_other_sources(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SOURCES / "pwlu", other / "pwlu")
    (other / "pwlu" / "version.py").write_text("__version__ = '9.9'\n")
    with cluster(other) as (_, variables):
        done = compare(tmp_path, variables, "--on", "ray")
    assert done.returncode == 2, done.stderr
    assert " has pwlu with the sources " in done.stderr
    assert "install the same on all nodes" in done.stderr
    assert not any((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_keyboard_interrupt_and_a_node_that_dies(tmp_path):
    """Nothing is lost: the same bits as on this machine alone."""
    ray, alone = tmp_path / "ray", tmp_path / "alone"
    ray.mkdir()
    alone.mkdir()
    last = 60
    arguments = ["--seeds", "2", "--epochs", str(last)]

    def epochs():
        return {path.parent.name: path.read_bytes().count(b"\n") for path in ray.glob("runs/*/metrics.jsonl")}

    def on_both_nodes():  # each trains a run: Ray would move one that has not begun to another node, and say nothing
        return len([name for name, count in epochs().items() if done_then.get(name, 0) < count < last]) == 2

    with cluster() as (nodes, variables):
        started = {"args": [*COMMAND, *arguments, "--on", "ray"], "cwd": ray, "env": variables, "text": True}
        with subprocess.Popen(**started, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as stopped:
            wait_for(lambda: sum(epochs().values()) >= 2, stopped)
            stopped.send_signal(signal.SIGINT)
            assert stopped.wait(60) == 130
        begun = {path.name for path in ray.glob("runs/digits-*")}
        done_then = epochs()
        time.sleep(1)
        assert epochs() == done_then  # nothing went on without it
        with subprocess.Popen(**started, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as again:
            wait_for(on_both_nodes, again)
            print("kill", file=nodes.stdin, flush=True)
            assert nodes.stdout.readline() == "killed\n"
            out, err = again.communicate(timeout=MOST_SECONDS)
    assert again.returncode == 0, out + err
    assert "died and will be tried again. NodeDiedError" in out
    assert "[4/4] " in out
    done = compare(alone, plain_environment(), *arguments, "--jobs", "2")
    assert done.returncode == 0, done.stderr
    (found, _), (expected, _) = find_runs(ray / "runs"), find_runs(alone / "runs")
    names = {run.path.name for run in found}
    assert begun < names == {run.path.name for run in expected}
    for name in names:
        ours, theirs = (RunFolder(folder / "runs" / name) for folder in (ray, alone))
        assert without_times(ours.metrics()) == without_times(theirs.metrics())
        states = [load_file(folder.path / "model.safetensors") for folder in (ours, theirs)]
        assert all(states[0][key].equal(states[1][key]) for key in states[0] | states[1])
    assert not list(ray.glob("runs/.shared-*"))


@pytest.mark.slow
def test_several_processes_per_run(tmp_path):
    with cluster() as (_, variables):
        arguments = ["--seeds", "1", "--epochs", "2", "--processes-per-run", "2", "--cores-per-run", "1"]
        done = compare(tmp_path, variables, *arguments, "--on", "ray")
    assert done.returncode == 0, done.stdout + done.stderr
    runs, complaints = find_runs(tmp_path / "runs")
    assert not complaints
    assert [run.environment["processes"] for run in runs] == [2, 2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_over_nodes(tmp_path):
    """The bits of two processes on one node, also if the rank on the second node is killed; an error of that rank is told."""
    ray, alone = tmp_path / "ray", tmp_path / "alone"
    ray.mkdir()
    alone.mkdir()
    arguments = ["--seeds", "1", "--epochs", "6", "--processes-per-run", "2"]
    data = write_images(tmp_path / "data", train=8)
    with cluster() as (_, variables):
        command = [*COMMAND, *arguments, "--on", "ray", "--nodes-per-run", "2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ray, env=variables, **pipes) as started:
            wait_for(lambda: any(path.stat().st_size for path in ray.glob("runs/*/metrics.jsonl")), started)
            os.kill(rank_of(str(ray), "1"), signal.SIGKILL)
            out, err = started.communicate(timeout=MOST_SECONDS)
        assert started.returncode == 0, out + err
        assert ": died and will be tried again. exit status -9, " in out
        assert len(list(ray.glob("runs/logs/*.node-1.txt"))) == 2
        too_many = compare(ray, variables, "--on", "ray", "--processes-per-run", "3", "--nodes-per-run", "3", "--seeds", "2")
        assert "a run needs 3 nodes with 1 core and 0 GPUs each, but the cluster has 2 of them" in too_many.stderr
        broken = data / "train" / "dog" / "3.png"
        broken.write_bytes(broken.read_bytes()[:100])
        small = ["--data", data, "--acts", "relu", "--seeds", "1", "--pixels", "32", "--width", "0.125", "--batch", "4"]
        images = ["imagenette/resnet18", *small, "--epochs", "1", "--workers", "0", *arguments[4:]]
        command = [*COMMAND[:4], *images, "--on", "ray", "--nodes-per-run", "2"]
        failed = subprocess.run(command, cwd=tmp_path, env=variables, **pipes, timeout=MOST_SECONDS)
    assert failed.returncode == 1
    assert f"UserError: the image {broken} cannot be read: " in failed.stderr.splitlines()[-1]
    done = compare(alone, plain_environment(), *arguments)
    assert done.returncode == 0, done.stderr
    (found, _), (expected, _) = find_runs(ray / "runs"), find_runs(alone / "runs")
    assert [run.environment["processes"] for run in found] == [2, 2]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.path.name == theirs.path.name
        assert same_state(*(load_file(run.path / "model.safetensors") for run in (ours, theirs)))
