"""Random attacks, each case from its own seed: operators, models, and trainings that are killed.

    make torture                                          100,000 operator cases, 60 models, 20 kills, on two cores
    python tests/torture/torture.py --cases 0 --kills 0   the models alone
    python tests/torture/torture.py --device cuda         the operators on a GPU; models and kills stay on the CPU
    python tests/torture/torture.py --seed 7 --cases 1 ... one case again: a failure prints this line

Not part of the tests that a change has to pass: those have fixed cases.
"""

import argparse
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torture_models
from safetensors.torch import load_file

sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("support", "kernels")]
from helpers import DTYPES, LAYOUTS, assert_within, implementations, laid_out, oracle, parameter_dtype, unit, wild_values
from test_cuda_knots import oracle as oracle_of_knots
from test_kernels import check_moments

from pwlu import reference
from pwlu.kernels import dispatch
from pwlu.ops import nonuniform
from pwlu.reference.dynamic import fold
from pwlu.reference.nonuniform import Knots, lines, pack_knots, unpack_knots

INTERVALS = (1, 2, 3, 4, 7, 8, 14, 15, 16, 22, 23, 30, 31, 62, 64, 65, 130)
MOST_FAILURES = 5


# Operators: every implementation against the oracle in float64.


def operator_case(seed, device):
    """One random problem: usually of PWLUs, else of functions that differ between samples, or of non-uniform ones."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rng.choice([_unit_case] * 8 + [_sample_case, _knots_case])(rng, generator, device)


def _unit_case(rng, generator, device):
    """One random problem, given to one implementation."""
    code = rng.choice(list(_implementations(device).values()))
    dtype, dim, channels, shape = rng.choice(DTYPES), *_shape(rng)
    parameters = _parameters(rng, generator, channels, parameter_dtype(dtype))
    crossed = bool((parameters[0] >= parameters[1]).any())
    x = _values(rng, generator, shape, dtype, parameters, crossed)
    grad = torch.randn(shape, generator=generator).to(dtype) * rng.choice([1.0, 1.0, 1e-4, 0.0])
    x, grad = (laid_out(t.to(device), rng.choice(LAYOUTS)) for t in (x, grad))
    parameters = [p.to(device) for p in parameters]

    unknown = x.isnan()
    grad = torch.where(unknown | (x.double().abs() < 1e15), grad, 0)  # else sums overflow, here or there
    y, bound = oracle(x, parameters, dim)
    found = code.forward(x, *parameters, dim)
    assert (found.dtype, found.stride()) == (x.dtype, torch.empty_like(x).stride())
    _near(found, y, bound)
    # The oracle has the sums of all but NaN, the reference says what NaN makes of them.
    _, _, gradients, bounds = oracle(x.nan_to_num(nan=0.0), parameters, dim, torch.where(unknown, 0, grad))
    if x.dtype == torch.float64:  # a sum of n doubles in doubles loses up to (n - 1) u, beside the 8 u of each term
        bounds[1:] = [bound * (1 + x.numel() / parameters[0].numel() / 8) for bound in bounds[1:]]
    grad_x, others = _implementations(device)["reference"].backward(grad, x, *parameters, dim, True, True)
    gradients[0] = torch.where(unknown, grad_x.double(), gradients[0])
    gradients[1:] = [torch.where(g.isnan(), torch.nan, expected) for g, expected in zip(others, gradients[1:], strict=True)]
    steepest, u = _steepest(parameters), torch.finfo(reference.compute_dtype(x)).eps
    eps = u + torch.finfo(x.dtype).eps  # in which both are computed, and stored
    bounds[0] = torch.where(unknown, 8 * eps * grad.double().abs() * steepest, bounds[0])
    needs = rng.choice([(True, True), (True, True), (True, False), (False, True)])
    grad_x, others = code.backward(grad, x, *parameters, dim, *needs)
    for g, expected, bound in zip([grad_x, *(others or [None] * 5)], gradients, bounds, strict=True):
        if g is not None:
            _near(g, expected, bound)
    tables = [t.to(parameters[0].dtype) for t in reference.tables(*(p.double() for p in parameters))]
    # Next to a knot it may be the neighbouring line, with another slope.
    reach = x.double().abs().nan_to_num() + sum(p.double().abs().amax() for p in parameters[:2])
    _near(code.lookup(x, parameters[0], *tables, dim), y, 2 * oracle(x, parameters, dim)[1] + 8 * u * steepest * reach)
    observed, *_ = code.observe(x, *parameters, dim)
    assert torch.equal(observed.nan_to_num(), found.nan_to_num())
    if not x.numel() or x.double().abs().amax() < 1e15:  # False for NaN
        _check_moments(code, x, channels, dim, device)


def _sample_case(rng, generator, device):
    """Functions per sample and channel, or per sample, against the oracle."""
    dtype = rng.choice(DTYPES)
    shape = [max(size, 1) for size in [*_shape(rng)[2], 1, 2]]
    dim = rng.randint(1, len(shape) - 1)
    functions = shape[0] * rng.choice([1, shape[dim]])
    parameters = [p.to(device) for p in unit(functions, rng.choice(INTERVALS), parameter_dtype(dtype), "cpu", generator)]
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x, grad = (laid_out(t.to(device), rng.choice(LAYOUTS)) for t in (3 * x, grad))
    weight, intervals = reference.pack(*parameters), parameters[2].shape[1] - 1
    y, bound, gradients, bounds = oracle(fold(x, functions, dim), parameters, 0, fold(grad, functions, dim))
    found = dispatch.per_sample_forward(x, weight, intervals, dim)
    assert (found.dtype, found.stride()) == (x.dtype, torch.empty_like(x).stride())
    assert_within(fold(found, functions, dim), y, bound)
    grad_x, grad_weight = dispatch.per_sample_backward(grad, x, weight, intervals, dim, True, True)
    found = [fold(grad_x, functions, dim), *reference.unpack(grad_weight, intervals)]
    for actual, expected, limit in zip(found, gradients, bounds, strict=True):
        assert_within(actual, expected, limit)


def _knots_case(rng, generator, device):
    """The operators of non-uniform PWLUs, whose intervals have very different widths."""
    dtype, dim, channels, shape = rng.choice(DTYPES[:1] + DTYPES[2:]), *_shape(rng)
    intervals = rng.choice(INTERVALS)
    _, _, heights, *slopes = unit(channels, intervals, torch.float32, "cpu", generator)
    widths = torch.randn(channels, intervals, generator=generator).exp()
    knots = torch.cat([torch.full((channels, 1), -3.0), 6 * widths / widths.sum(1, keepdim=True)], 1).cumsum(1)
    parameters = Knots(*(p.to(device) for p in (knots, heights, *slopes)))
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    x, grad = (laid_out(t.to(device), rng.choice(LAYOUTS)) for t in (2 * x, grad))
    y, bound, gradients, bounds = oracle_of_knots(x, parameters, dim, grad)
    _, origin, slope, _ = lines(x.double(), *(p.double() for p in parameters), dim)
    bound += torch.finfo(torch.float32).eps * 4 * (x.double().abs() + origin.abs()) * slope.abs()  # the CPU has x S + O
    weight = pack_knots(*parameters)
    found = nonuniform.forward(x, weight, intervals, dim)
    assert (found.dtype, found.stride()) == (x.dtype, torch.empty_like(x).stride())
    assert_within(found, y, bound)
    grad_x, grad_weight = nonuniform.backward(grad, x, weight, intervals, dim, True, True)
    for actual, expected, limit in zip([grad_x, *unpack_knots(grad_weight, intervals)], gradients, bounds, strict=True):
        assert_within(actual, expected, limit)


def _check_moments(code, x, channels, dim, device):
    if x.dtype != torch.float64:
        check_moments(code, x, channels, dim)
        return
    # No wider type to compare with: two sums of n doubles, in different orders.
    found, expected = (each.moments(x, channels, dim) for each in (code, _implementations(device)["reference"]))
    assert torch.equal(found[0], expected[0])
    n, u, largest = x.numel() // channels, torch.finfo(x.dtype).eps, x.abs().amax() if x.numel() else 0.0
    slack = (8 + n) * u * largest
    assert_within(found[1], expected[1], slack + torch.zeros_like(expected[1]))
    # The kernel subtracts the channel's first element before it squares: its sum is up to 1 + n times the one about the mean.
    assert_within(found[2], expected[2], (8 + n) * (1 + n) * u * expected[2] + n * slack**2 + 2 * u * largest**2)


def _steepest(parameters):
    """The largest slope between two knots, or what rounding can make of one."""
    left, right, heights = (p.double() for p in parameters[:3])
    return 2 * heights.abs().amax() / ((right - left).abs().amin() / (heights.shape[1] - 1))


def _implementations(device, made={}):  # noqa: B006  # kept on purpose
    if device not in made:
        made[device] = implementations(torch.device(device))
    return made[device]


def _shape(rng):
    rank = rng.randint(0, 5)
    shape = [rng.randint(0, 9) if rng.random() < 0.2 else rng.randint(1, 9) for _ in range(rank)]
    if rank and rng.random() < 0.3:  # long enough for vector loops and several blocks
        shape[rng.randrange(rank)] = rng.randint(20, 1200)
    while torch.Size(shape).numel() > 6000:
        shape = [size // 2 for size in shape]
    dim = rng.randint(-rank, rank - 1) if rank else 1
    return dim, shape[dim] if rank and shape[dim] and rng.random() < 0.6 else 1, shape


def _parameters(rng, generator, channels, dtype):
    left, right, heights, left_slope, right_slope = unit(channels, rng.choice(INTERVALS), torch.float64, "cpu", generator)
    kind = rng.choice(["usual", "usual", "far", "narrow", "crossed", "equal", "large", "small"])
    if kind == "far":
        shift = rng.choice([-1e4, 500.0, 1e6])
        left, right = left + shift, right + shift
    elif kind == "narrow":
        left, right = left * 1e-3, right * 1e-3
    elif kind == "crossed":
        left, right = (
            torch.where(torch.rand(channels, generator=generator) < 0.5, a, b) for a, b in ((right, left), (left, right))
        )
    elif kind == "equal":
        right = left.clone()
    elif kind in ("large", "small"):
        factor = 1e10 if kind == "large" else 1e-10
        heights, left_slope, right_slope = heights * factor, left_slope * factor, right_slope * factor
    return [p.to(dtype) for p in (left, right, heights, left_slope, right_slope)]


def _values(rng, generator, shape, dtype, parameters, crossed):
    x = 3 * torch.randn(shape, generator=generator)
    left, right = (p.double().mean().item() for p in parameters[:2])
    x = ((left + right) / 2 + x * max(abs(right - left), 1e-3) / 6).to(dtype)
    if rng.random() < 0.4 and x.numel():  # knots and their neighbours, infinities, NaN, numbers of every size
        pool = wild_values(dtype, parameters)
        if crossed:  # the oracle leaves open what the slope is there
            pool = pool[~pool.isnan()]
        some = torch.rand(shape, generator=generator) < rng.choice([0.05, 0.5, 1.0])
        x = torch.where(some, pool[torch.randint(len(pool), shape, generator=generator)], x)
    return x


def _near(found, expected, bound):
    """Within the bound; what is beyond the largest number of the type is infinite."""
    largest = torch.finfo(found.dtype).max
    beyond = expected.abs() > largest
    near_it = expected.isfinite() & ((expected.abs() + bound) > largest) & ~beyond  # either is right
    expected = torch.where(beyond, expected.sign() * torch.inf, expected)
    found = torch.where((near_it | beyond) & (found.double().abs() >= largest / 2), expected.to(found.dtype), found)
    assert_within(found, torch.where(near_it, found.double(), expected), bound.nan_to_num(nan=torch.inf))


# Kills: pwlu train, stopped at any moment and resumed, ends with the same bits.


def kills(count, seed):
    """Kill a run so many times, at random moments; every run that comes to its end is compared with one that was left alone."""
    rng = random.Random(seed)
    arguments = ["digits", "--epochs", "3", "--realign-epochs", "1", "--seed", str(seed % 1000), "--workers", "0"]
    with tempfile.TemporaryDirectory() as root:
        begun = time.monotonic()
        _train([*arguments, "--runs", f"{root}/whole"])
        longest = time.monotonic() - begun
        expected, done, number = _result(Path(root, "whole")), 0, 0
        while done < count:
            number += 1
            runs = Path(root, f"killed-{number}")
            while not _result(runs):
                folders = [path.parent for path in runs.glob("*/config.json")]
                command = ["--resume", str(folders[0])] if folders else [*arguments, "--runs", str(runs)]
                done += _train(command, rng.uniform(0.2, 1.0) * longest if done < count else None)
            for name, value in _result(runs).items():
                assert torch.equal(value, expected[name]), f"{name} differs in a run that was killed"
            print(f"  {done} kills, run {number} ended with the same bits", flush=True)


def _train(arguments, seconds=None):
    """Run the command to its end, or for so many seconds; return whether it was killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pwlu", "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return True
    assert process.returncode == 0, said
    return False


def _result(runs):
    found = next(iter(runs.glob("*/result.json")), None)
    return load_file(found.with_name("model.safetensors")) if found else {}


# All of it.


def attempt(case, seed):
    """Return what went wrong with the case of that seed, or None."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    try:
        case(seed)
    except Exception:
        return seed, traceback.format_exc(limit=-3)
    return None


def many(name, case, count, seed, jobs, flag):
    """Run so many cases; return how many failed."""
    if not count:
        return 0
    begun, failed = time.monotonic(), 0
    print(f"{name}: {count} from seed {seed}", flush=True)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for number, wrong in enumerate(pool.map(partial(attempt, case), range(seed, seed + count), chunksize=20), start=1):
            if wrong:
                failed += 1
                print(f"  FAILED: python tests/torture/torture.py --seed {wrong[0]} {flag}\n{wrong[1]}", flush=True)
                if failed == MOST_FAILURES:
                    break
            if number % max(1, count // 10) == 0:
                print(f"  {number} done, {time.monotonic() - begun:.0f} s", flush=True)
        pool.shutdown(cancel_futures=True)
    return failed


def main():
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--models", type=int, default=60)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first case; those that follow count up")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the operators")
    parser.add_argument(
        "--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes (default: one per core, at most 16)"
    )
    chosen = parser.parse_args()
    begun, jobs = time.monotonic(), chosen.jobs
    print(f"seed {chosen.seed}", flush=True)
    operators = partial(operator_case, device=chosen.device)
    again = f"--device {chosen.device} --cases 1 --models 0 --kills 0"
    failed = many("operator cases", operators, chosen.cases, chosen.seed, jobs, again)
    failed += many("models", torture_models.case, chosen.models, chosen.seed, jobs, "--cases 0 --models 1 --kills 0")
    if chosen.kills:
        print(f"kills: {chosen.kills} from seed {chosen.seed}", flush=True)
        if wrong := attempt(partial(kills, chosen.kills), chosen.seed):
            failed += 1
            print(f"  FAILED: --seed {chosen.seed} --cases 0 --models 0 --kills {chosen.kills}\n{wrong[1]}", flush=True)
    print(f"{'FAILED' if failed else 'all right'}, {time.monotonic() - begun:.0f} s, seed {chosen.seed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
