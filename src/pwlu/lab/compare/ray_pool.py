"""Train runs as tasks of a Ray cluster whose nodes share a file system."""

import dataclasses
import logging
import os
import socket
import sys
import uuid
from pathlib import Path
from typing import Any

from pwlu.common.text import counted, install
from pwlu.lab.compare import ray_task
from pwlu.lab.compare.job import Job
from pwlu.lab.compare.subprocesses import TIMEOUT, Outcome
from pwlu.lab.recipes.catalog import find
from pwlu.lab.recipes.settings import UserError

PREFIX = "ray://"


class RayPool:
    """Tasks of a Ray cluster, each of which starts a run as a child process on its node.

    Ray starts a task once a node has room for it. The scheduler decides which runs are tried again, so Ray does not.

    Args:
        address: "ray" for the cluster of this machine, or "ray://HOST:PORT".
        runs: the folder of run folders, which all nodes must share.
        slots: how many runs to train at the same time. None: as many as the cluster has room for.
        gpus: the number of GPUs per run; it may be a fraction. None: 1 per process if the cluster has GPUs, else 0.
        cores: the number of cores per run.
        processes: the number of processes per run.
        nodes: the number of nodes over which the processes, GPUs and cores of a run are divided evenly.
    """

    def __init__(
        self, address: str, runs: Path, slots: int | None, gpus: float | None, cores: int, processes: int, nodes: int
    ) -> None:
        self.ray = _connect(address)
        self.slots = sys.maxsize if slots is None else slots
        self.tasks: dict[Any, Job] = {}
        self.groups: dict[Any, Any] = {}  # the placement group of each task; None if its run uses one node
        self.token = runs.resolve() / f".shared-{uuid.uuid4().hex}"
        try:
            alive = [node for node in self.ray.nodes() if node["Alive"]]
            if gpus is None:
                gpus = float(processes * any(node["Resources"].get("GPU") for node in alive))
            self.nodes = nodes
            self.gpus, self.cores, self.processes = gpus / nodes, cores // nodes, processes // nodes  # per node
            self.token.parent.mkdir(parents=True, exist_ok=True)
            self.token.touch()
            self._check(alive)
        except BaseException:
            self.close()
            raise
        self.train = self.ray.remote(num_cpus=self.cores, num_gpus=self.gpus, max_retries=0)(ray_task.train)

    @property
    def running(self) -> int:
        """Return the number of submitted tasks that :meth:`wait` has not returned yet."""
        return len(self.tasks)

    def start(self, job: Job) -> None:
        """Submit a task. Make its paths absolute, because the working directory differs between nodes."""
        data = {"data": job.settings.data, "test_data": job.settings.test_data}
        changes: dict[str, Any] = {name: path and os.path.abspath(path) for name, path in data.items()}
        if job.settings.workers is None and not find(job.settings.recipe).in_memory:
            changes["workers"] = max(1, self.cores // self.processes)
        job = dataclasses.replace(job, settings=job.settings.replace(**changes), runs=job.runs.resolve())
        group, strategy = None, "SPREAD"
        if self.nodes > 1:
            needed = {kind: count for kind, count in (("CPU", self.cores), ("GPU", self.gpus)) if count}
            group = self.ray.util.placement_group([needed] * self.nodes, strategy="STRICT_SPREAD")
            in_group = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            strategy = in_group(group, placement_group_bundle_index=0)
        task = self.train.options(scheduling_strategy=strategy, name="pwlu train").remote(job, self.gpus, self.cores)
        self.tasks[task], self.groups[task] = job, group

    def wait(self) -> list[tuple[Job, Outcome]]:
        """Wait for a fraction of a second, and return the runs that have ended."""
        ready, _ = self.ray.wait(list(self.tasks), timeout=0.2)
        found = [(self.tasks.pop(task), ray_task.task_outcome(self.ray, task)) for task in ready]
        self._release(ready)
        return found

    def _release(self, tasks: list[Any]) -> None:
        """Remove the placement groups that reserved nodes for these tasks."""
        for task in tasks:
            if (group := self.groups.pop(task, None)) is not None:
                self.ray.util.remove_placement_group(group)

    def close(self) -> None:
        """Cancel all tasks, which end their runs. Then disconnect from the cluster."""
        for task in self.tasks:
            self.ray.cancel(task)
        if self.tasks:
            self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=TIMEOUT + 10)
        self._release(list(self.groups))
        self.token.unlink(missing_ok=True)
        self.ray.shutdown()

    def _check(self, nodes: list[dict[str, Any]]) -> None:
        """Raise an error if a node does not see the folder of runs or has other versions. Warn if no node has enough room."""
        here = inspect_node(str(self.token))
        probe = self.ray.remote(_as_code())
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        tasks = [
            probe.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy(node["NodeID"], soft=False)) for node in nodes
        ]
        answers = [task.remote(str(self.token)) for task in tasks]
        for node, answer in zip(nodes, answers, strict=True):
            name = node["NodeManagerAddress"]
            try:
                there = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:
                raise UserError(f"the node {name} of the Ray cluster does not answer: {error}") from None
            _compare(name, here, there, self.token.parent)
        needed = {"CPU": self.cores, "GPU": self.gpus}
        room = sum(all(node["Resources"].get(kind, 0) >= count for kind, count in needed.items()) for node in nodes)
        if room < self.nodes:
            lacking = (
                f"a run needs {counted(self.nodes, 'node', 'nodes')} with {counted(self.cores, 'core', 'cores')} and "
                f"{self.gpus:g} GPUs{' each' if self.nodes > 1 else ''}, but the cluster has {room} of them"
            )
            if self.processes * self.nodes > 1:
                raise UserError(f"{lacking}. Write a smaller --processes-per-run, or another --nodes-per-run")
            print(
                f"{lacking}. Runs wait until such nodes join. Or stop this command and write smaller --cores-per-run and "
                "--gpus-per-run",
                file=sys.stderr,
            )


def _connect(address: str) -> Any:
    """Connect to a cluster, and return the package ray."""
    if address != "ray" and not address.startswith(PREFIX):
        raise UserError(f"--on must be ray, or ray://HOST:10001 for a cluster elsewhere, not {address!r}")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise UserError(f"--on {address} needs the package ray, here and on all nodes: {install('cluster')}") from None
    try:
        _check_reachable(os.environ.get("RAY_ADDRESS", "") if address == "ray" else address)
        ray.init("auto" if address == "ray" else address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ValueError, ImportError) as error:
        started = "Start one with ray start --head, and ray start --address HOST:6379 on the other nodes"
        remedy = started if address == "ray" else "Write the address of the head node, and the port of its Ray Client server"
        raise UserError(f"--on {address}: no Ray cluster can be reached. {remedy}. Ray says: {error}") from None
    return ray


def _check_reachable(address: str) -> None:
    """Raise an error if nothing listens at HOST:PORT. Ray itself would wait for many minutes."""
    host, colon, port = address.removeprefix(PREFIX).partition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=10).close()


def inspect_node(token: str) -> dict[str, Any]:
    """Return whether this machine sees the file `token`, and the versions of its packages.

    The function imports only the standard library, so that a node without pwlu can run it.
    """
    import hashlib
    import importlib.metadata
    import importlib.util
    import pathlib
    import platform

    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "missing"

    spec = importlib.util.find_spec("pwlu")  # find_spec does not import pwlu
    sources = hashlib.sha256()
    if spec is not None and spec.origin is not None:
        folder = pathlib.Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            sources.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    pwlu = "missing" if spec is None else f"with the sources {sources.hexdigest()[:8]}"
    versions = {
        "pwlu": pwlu,
        "torch": version("torch"),
        "torchvision": version("torchvision"),
        "Python": platform.python_version(),
    }
    return {"shared": pathlib.Path(token).exists(), "versions": versions}


def _as_code() -> Any:
    """Return a copy of :func:`inspect_node` that Ray sends to nodes as code. Otherwise, nodes would import it from pwlu."""
    import types

    return types.FunctionType(inspect_node.__code__, {"__builtins__": __builtins__}, "inspect_node")


def _compare(name: str, here: dict[str, Any], there: dict[str, Any], runs: Path) -> None:
    """Raise an error if a node differs from this machine."""
    if not there["shared"]:
        raise UserError(
            f"the node {name} does not see {runs} of this machine. All nodes must share the folder of runs: write --runs DIR "
            "with a folder on a file system that all of them mount at the same path, such as NFS or Lustre"
        )
    for package, version in here["versions"].items():
        if there["versions"][package] != version:
            found = there["versions"][package]
            raise UserError(
                f"the node {name} has {package} {found}, but this machine has {package} {version}. Runs of "
                "one table must be made by the same versions: install the same on all nodes, for example in one environment on "
                "the shared file system"
            )
