"""The tasks of a Ray cluster. A task trains a run on its node, alone or with the tasks of other nodes."""

import socket
import time
from typing import Any

from pwlu.lab.compare.job import Job, machine_cores
from pwlu.lab.compare.subprocesses import BUSY, TIMEOUT, Child, Outcome, end_all

SECONDS_BETWEEN_CHECKS = 0.1


def train(job: Job, gpus: float, cores: int) -> Outcome:
    """Train a run on this node and, if it has several, on the other nodes of this task's placement group.

    If the comparison is stopped, Ray interrupts this task. `gpus`, `cores`: how many of each node the run may use.
    """
    log = job.open_log()
    if log is None:
        return BUSY
    command, side_by_side = job.command(), _side_by_side(gpus, cores)
    if job.nodes == 1:
        return _watch(job.start_node(command, log, side_by_side, cores))
    launcher = [f"--nnodes={job.nodes}", *_rendezvous_flags()]
    others = _start_others(job, command, launcher, gpus, cores)
    return _watch(job.start_node(command, log, side_by_side, cores, launcher=[*launcher, "--node-rank=0"]), others)


def join(job: Job, node: int, command: list[str], launcher: list[str], gpus: float, cores: int) -> Outcome:
    """Train a run with the processes of a further node. The first node passes the command."""
    log = job.open_log(node)
    if log is None:
        return BUSY
    return _watch(job.start_node(command, log, _side_by_side(gpus, cores), cores, launcher=[*launcher, f"--node-rank={node}"]))


def task_outcome(ray: Any, task: Any) -> Outcome:
    """Return how the run of a task ended, even if its node was lost."""
    try:
        found: Outcome = ray.get(task)
    except ray.exceptions.RayTaskError as error:  # raised by the task itself
        return Outcome(str(error), str(error))
    except ray.exceptions.RayError as error:  # the node or the worker process was lost
        return Outcome(f"{type(error).__name__}: {error}", died=True)
    return found


def _start_others(job: Job, command: list[str], launcher: list[str], gpus: float, cores: int) -> list[Any]:
    """Start the tasks of all nodes but the first, each in its part of the placement group."""
    import ray
    from ray.util import get_current_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = get_current_placement_group()
    assert group is not None
    tasks = []
    for node in range(1, job.nodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
        task = ray.remote(join).options(
            num_cpus=cores, num_gpus=gpus, max_retries=0, scheduling_strategy=strategy, name=f"pwlu train, node {node}"
        )
        tasks.append(task.remote(job, node, command, launcher, gpus, cores))
    return tasks


def _watch(child: Child, others: list[Any] | None = None) -> Outcome:
    """Wait until the run ends, and return how it ended. If a node fails, end the run on all nodes and return that failure."""
    others = others or []
    try:
        while (found := child.outcome() or _first_failure(others)) is None:
            time.sleep(SECONDS_BETWEEN_CHECKS)
        return found
    finally:
        end_all([child])
        if others:
            import ray

            for task in others:
                ray.cancel(task)
            ray.wait(others, num_returns=len(others), timeout=TIMEOUT + 5)


def _first_failure(others: list[Any]) -> Outcome | None:
    """Return how another node of the run failed, or None."""
    if not others:
        return None
    import ray

    ready, _ = ray.wait(others, num_returns=len(others), timeout=0)
    return next((found for task in ready if not (found := task_outcome(ray, task)).succeeded), None)


def _side_by_side(gpus: float, cores: int) -> int:
    """Return how many runs share a GPU, or the cores of this machine."""
    return int(1 / gpus) if 0 < gpus < 1 else 1 if gpus else max(1, machine_cores() // cores)


def _rendezvous_flags() -> list[str]:
    """Return flags of torchrun with the address of this node and a free port."""
    from ray.util import get_node_ip_address

    with socket.socket() as free:
        free.bind(("", 0))
        return [f"--master-addr={get_node_ip_address()}", f"--master-port={free.getsockname()[1]}"]
