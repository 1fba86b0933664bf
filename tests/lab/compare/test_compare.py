"""`pwlu compare`: what it runs, what it leaves alone, what it keeps, and that nothing goes on without it."""

import argparse
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from example_runs import every_setting_changed, example_run, files_in
from imported import SOURCES, plain_environment, wait_for

from pwlu.cli import main, train
from pwlu.lab.compare import comparison, job, scheduler, subprocesses
from pwlu.lab.compare.presets import comparison as compared
from pwlu.lab.recipes import catalog
from pwlu.lab.runs.records import read_records
from pwlu.lab.runs.results import find_runs

# In place of training: a run comes out of stage/, or fails if it is not there. The last test of this file trains.
ACTOR = """
import os, shutil, sys
given = dict(word.lstrip('-').split('=', 1) for word in sys.argv[3:] if '=' in word)
print('trained', *sys.argv[3:], os.environ['PWLU_SIDE_BY_SIDE'], os.environ.get('OMP_NUM_THREADS'))
if 'resume' in given:
    shutil.copy('stage/result.json', given['resume'])
else:
    shutil.move(f"stage/{given['act']}-seed{given['seed']}", given['runs'])
"""


@pytest.fixture
def acted(monkeypatch):
    monkeypatch.setattr(subprocesses, "_RUN_MODULE", ACTOR)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Settings on their way to the process that trains.


def test_every_setting_travels():
    usual, changed = catalog.settings("digits"), every_setting_changed()
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    for asked in (changed, usual):
        options = parser.parse_args([asked.recipe, *job.flags(asked)])
        assert usual.replace(**train.changed_settings(options)) == asked
    machine = "accumulate compile cuda-graphs fuse-norms no-channels-last data test-data device workers measure-every"
    machine = [f"--{name}" for name in f"{machine} save-detections snapshots tensorboard".split()]
    assert [word.partition("=")[0] for word in job.flags(changed, machine_only=True)] == machine
    assert job.flags(usual, machine_only=True) == []


def test_required_runs():
    asked = comparison.required_runs([compared("digits", "bounds", {}), compared("digits", "intervals", {})], seeds=2)
    names = [scheduler.title(settings) for settings in asked]
    assert len(names) == len(set(names)) == 2 * (9 + 6 - 2)  # ReLU and PWLU with 16 intervals are in both
    assert names[0] == "digits relu, seed 0"
    assert names[13] == "digits relu, seed 1"


# The command.

ARGUMENTS = ["compare", "digits", "--acts", "relu,pwlu", "--seeds", "2"]


def staged(folder, **accuracies):
    """Runs for the actor to bring out: relu0=..., pwlu1=..."""
    for name, accuracy in accuracies.items():
        example_run(
            folder / "stage" / f"{name[:-1]}-seed{name[-1]}", accuracy, "digits", activation=name[:-1], seed=int(name[-1])
        )


def test_only_missing_runs_are_trained(here, acted, capsys):
    """Finished runs are found and stopped ones continue. The table is written, and needs no run folder afterwards."""
    example_run(here / "results" / "digits" / "any-name", 90.0, "digits", activation="relu", data="/of/another/machine")
    example_run(here / "runs" / "other-name", 92.0, "digits", activation="pwlu")
    example_run(here / "runs" / "stopped", None, "digits", activation="relu", seed=1, intervals=8, epochs_done=3)
    staged(here, pwlu1=94.0)
    (here / "stage" / "result.json").write_text((here / "runs" / "other-name" / "result.json").read_text())
    assert main([*ARGUMENTS, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "finished  digits relu, seed 0 (results/digits/any-name)" in printed
    assert "finished  digits pwlu, seed 0 (runs/other-name)" in printed
    assert "stopped   digits relu, seed 1 (runs/stopped, 3 of 40 epochs)" in printed
    assert "missing   digits pwlu, seed 1\n" in printed
    assert "4 runs: 2 finished, 1 stopped, 1 missing" in printed
    assert files_in(here / "results") == [
        f"digits/any-name/{name}" for name in files_in(here / "results" / "digits" / "any-name")
    ]
    assert main([*ARGUMENTS, "--jobs", "5", "--device", "cpu"]) == 0
    assert not (here / "stage" / "pwlu-seed1").exists()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    log = (here / "runs" / "logs" / "digits-relu-seed1.txt").read_text()
    assert log == f"trained --resume=runs/stopped --device=cpu 2 {max(1, cores // 2)}\n"
    printed = capsys.readouterr().out
    assert "[4/4] " in printed
    assert "| ReLU | 91.00 ± 1.41 (2) |" in printed
    assert "| PWLU | 93.00 ± 1.41 (2) | +2.00 ± 1.41 |" in printed
    names = {path.name for path in (here / "results" / "digits").iterdir() if not path.name.startswith(".")}
    tables = {"relu-pwlu-runs.csv", "relu-pwlu.csv", "relu-pwlu.md", "relu-pwlu.png"}
    assert names == {"any-name", "runs.jsonl", "pwlu-seed0"} | tables
    assert set(read_records(here / "results" / "digits")[0]) == {"pwlu-seed0", "pwlu-seed1", "relu-seed1"}
    assert "+2.00 ± 1.41" in (here / "results" / "digits" / "relu-pwlu.md").read_text()
    assert (here / "results" / "digits" / "relu-pwlu.png").read_bytes().startswith(b"\x89PNG")
    # nothing is left to do, and run folders are not needed any more
    (here / "runs").rename(here / "away")
    assert main(ARGUMENTS) == 0
    printed = capsys.readouterr().out
    assert "4 runs: 4 finished, 0 stopped, 0 missing" in printed
    assert "+2.00 ± 1.41" in printed


def test_a_run_that_fails_does_not_stop_the_others(here, acted, capsys, monkeypatch):
    staged(here, relu0=90.0, relu1=92.0, pwlu1=95.0)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert main([*ARGUMENTS, "--jobs", "3"]) == 1
    printed = capsys.readouterr()
    assert "| PWLU | 95.00 (1) | +4.00 |" in printed.out
    assert "digits pwlu, seed 0: failed" in printed.out
    assert "1 of 4 runs failed:\n\ndigits pwlu, seed 0: exit status 1, runs/logs/digits-pwlu-seed0.txt:" in printed.err
    assert "No such file or directory: 'stage/pwlu-seed0'" in printed.err
    assert (here / "runs" / "logs" / "digits-pwlu-seed1.txt").read_text().endswith(" 3 7\n")


@pytest.mark.parametrize("jobs", [1, 2])
def test_two_equal_failures_stop_the_comparison(here, acted, capsys, monkeypatch, jobs):
    monkeypatch.setattr(subprocesses, "_RUN_MODULE", "print('no data at data/'); raise SystemExit(2)")
    assert main([*ARGUMENTS, "--seeds", "4", "--jobs", str(jobs)]) == 2
    printed = capsys.readouterr()
    assert "pwlu compare: two runs failed with the same output, so no other run was started:\nno data at data/\n" in printed.err
    assert 2 <= len(list((here / "runs" / "logs").iterdir())) <= 1 + jobs  # of two at a time, one may end before the other


def test_old_output_in_a_log_is_not_reported(here, acted, capsys, monkeypatch):
    for status in ("3", "4"):
        monkeypatch.setattr(subprocesses, "_RUN_MODULE", f"print('the end of {status}'); raise SystemExit({status})")
        assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1"]) == 1
        error = capsys.readouterr().err
        assert f"exit status {status}, " in error
        assert error.count("the end of") == 1
    assert (here / "runs" / "logs" / "digits-pwlu-seed0.txt").read_text() == "the end of 3\nthe end of 4\n"


def test_a_child_without_a_result_has_failed(here, acted, capsys, monkeypatch):
    monkeypatch.setattr(subprocesses, "_RUN_MODULE", "pass")
    assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1"]) == 1
    printed = capsys.readouterr()
    assert "digits pwlu, seed 0: exit status 0, " in printed.err
    assert "not measured yet" in printed.out
    assert not (here / "results").exists()


# A run that kills itself. "epoch": it finishes one more epoch each time; the fifth time, the run.
MORTAL = """
import os, pathlib, shutil, signal, sys
tries = pathlib.Path('tries')
tries.open('a').write('x')
count = len(tries.read_text())
given = dict(word.lstrip('-').split('=', 1) for word in sys.argv[3:] if '=' in word)
print('try', count, 'resume' in given)
if {how!r} == 'epoch':
    runs = pathlib.Path('runs/run')
    shutil.rmtree(runs, ignore_errors=True)
    shutil.copytree('stage/pwlu-seed0' if count == 5 else f'stage/{{count}}', runs)
if count < 5:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("how", "status", "tries"), [("at once", 1, 3), ("epoch", 0, 5)])
def test_a_run_that_dies_is_tried_again(here, acted, capsys, monkeypatch, how, status, tries):
    """A run is tried again as long as it makes progress."""
    for epochs in range(1, 5):
        example_run(here / "stage" / str(epochs), None, "digits", epochs_done=epochs)
    staged(here, pwlu0=91.0)
    monkeypatch.setattr(subprocesses, "_RUN_MODULE", MORTAL.format(how=how))
    assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1"]) == status
    printed = capsys.readouterr()
    assert len((here / "tries").read_text()) == tries
    assert printed.out.count("digits pwlu, seed 0: died and will be tried again. exit status -9, ") == tries - 1
    assert ("[1/1] digits pwlu, seed 0: 91.00 %" in printed.out) == (how == "epoch")
    assert ("digits pwlu, seed 0: exit status -9, runs/logs/" in printed.err) == (how == "at once")


def test_processes_of_torchrun(here, acted, capsys):
    staged(here, pwlu0=91.0)
    code = "import os, shutil, sys; print(*sys.argv[1:7], os.environ['OMP_NUM_THREADS']); shutil.move('stage', 'runs')"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocesses, "_RUN_MODULE", code)
        assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1", "--processes-per-run", "2"]) == 0
    log = (here / "runs" / "logs" / "digits-pwlu-seed0.txt").read_text()
    assert log.startswith("pwlu.lab.compare.launch --standalone --nproc-per-node=2 -m pwlu train ")


def test_a_run_that_another_process_trains(here, acted, capsys, monkeypatch):
    staged(here, relu0=90.0, pwlu0=91.0)
    open_log = subprocesses.open_log
    with open_log(here / "runs" / "logs" / "digits-pwlu-seed0.txt"), monkeypatch.context() as patch:
        patch.setattr(job, "open_log", lambda path, patience: open_log(path, 0.2))
        assert main([*ARGUMENTS, "--seeds", "1"]) == 1
    printed = capsys.readouterr()
    assert "digits pwlu, seed 0: another process is training it" in printed.err
    assert "| ReLU | 90.00 (1) |" in printed.out
    assert main([*ARGUMENTS, "--seeds", "1"]) == 0


def test_a_run_that_another_process_finished_in_the_meantime(here, acted, capsys, monkeypatch):
    staged(here, pwlu0=91.0)
    open_log = subprocesses.open_log

    def slowly(path, patience):
        example_run(here / "runs" / "theirs", 92.0, "digits")
        example_run(here / "results" / "digits" / "pwlu-seed0", 92.0, "digits")
        return open_log(path, patience)

    monkeypatch.setattr(job, "open_log", slowly)
    assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1"]) == 0
    assert "[1/1] digits pwlu, seed 0: 92.00 %" in capsys.readouterr().out
    assert (here / "stage" / "pwlu-seed0").exists()  # and --resume finds a run that is finished
    assert "--resume=runs/theirs" in (here / "runs" / "logs" / "digits-pwlu-seed0.txt").read_text()
    assert [path.name for path in (here / "results" / "digits").iterdir() if path.is_dir()] == ["pwlu-seed0"]
    assert not (here / "results" / "digits" / "runs.jsonl").exists()


def test_truncated_results_do_not_count(here, acted, capsys):
    example_run(here / "results" / "digits" / "pwlu-seed0", None, "digits")
    staged(here, pwlu0=91.0)
    assert main(["compare", "digits", "--acts", "pwlu", "--seeds", "1"]) == 0
    assert "| PWLU | 91.00 (1) |" in capsys.readouterr().out


def test_several_recipes(here, acted, capsys):
    """Each has its own table and folder; a figure shows all of them."""
    for recipe in ("cifar100/resnet18", "cifar100/mobilenet_v2"):
        for activation, accuracy in (("relu", 70.0), ("pwlu", 71.5)):
            example_run(here / "runs" / f"{recipe}-{activation}", accuracy, recipe, activation=activation, holdout=5000)
    command = [
        "compare",
        "cifar100/resnet18",
        "cifar100/mobilenet_v2",
        "cifar100/resnet18",
        "--acts",
        "relu,pwlu",
        "--seeds",
        "1",
    ]
    assert main([*command, "--holdout", "5000"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| PWLU | 71.50 (1) | +1.50 |") == 2
    assert "| 72.57 | +1.23 |" in printed
    assert "| 74.69 | +1.85 |" in printed
    resnet = here / "results" / "cifar100" / "resnet18"
    assert set(read_records(resnet)[0]) == {"relu-holdout-5000-seed0", "pwlu-holdout-5000-seed0"}
    assert (resnet / "relu-pwlu-holdout-5000.csv").exists()
    assert (here / "results" / "relu-pwlu-holdout-5000.png").exists()
    assert main([*command, "--dry-run"]) == 0  # what was measured on held-out images is no result
    assert "4 runs: 0 finished" in capsys.readouterr().out


def test_half_written_runs_are_skipped_by_name(here, acted, capsys):
    (here / "runs" / "digits-relu-seed0").mkdir(parents=True)
    assert main([*ARGUMENTS, "--dry-run"]) == 0
    assert "skipped: runs/digits-relu-seed0 is not a run folder: it has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name a recipe, for example: pwlu compare digits"),
        (["digitz"], "there is no recipe 'digitz'. Did you mean digits, "),
        (["digits", "--acts", "relu,gleu"], "there is no activation 'gleu'. Did you mean gelu?"),
        (["digits", "--acts", ""], "expected names of activations separated by commas, not ''. Write --acts relu,"),
        (["digits", "--preset", "interval"], "no preset 'interval'. Did you mean intervals?"),
        (["digits", "--seeds", "0"], "--seeds must be at least 1, not 0"),
        (["digits", "--jobs", "-1"], "--jobs must be at least 1, not -1"),
        (["digits", "--processes-per-run", "0"], "--processes-per-run must be at least 1, not 0"),
        (["digits", "--on", "slurm"], "--on must be ray, or ray://HOST:10001 for a cluster elsewhere, not 'slurm'"),
        (["digits", "--on", "ray", "--gpus-per-run", "1.5"], "--gpus-per-run must be from 0 to 1, such as 0.25, not 1.5"),
        (["digits", "--on", "ray", "--processes-per-run", "8", "--gpus-per-run", "4"], "must be 0, or 8 for 8 processes, not"),
        (["digits", "--mps", "--on", "ray"], "--mps works only on this machine: leave it out, or leave out --on"),
        (["digits", "--gpus-per-run", "0.5"], "works only on a cluster: add --on ray, or write --jobs N instead"),
        (["digits", "--cores-per-run", "2"], "--cores-per-run works only on a cluster: add --on ray"),
        (["digits", "--processes-per-run", "2", "--nodes-per-run", "2"], "--nodes-per-run works only on a cluster"),
        (["digits", "--on", "ray", "--nodes-per-run", "2"], "--processes-per-run 1 must be divisible by --nodes-per-run 2"),
        (["digits", "--on", "ray", "--nodes-per-run", "0"], "--nodes-per-run must be at least 1, not 0"),
        (["digits", "--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["digits", "--preset", "bounds", "--fix-init", "3"], "the comparison 'bounds' varies --fix-init: leave it out"),
        (["digits", "--check"], "--check compares a page with the results: write --document FILE --check"),
        (["digits", "--document", "page.md"], "leave out recipes, --acts, --preset and settings"),
        (["--document", "page.md", "--epochs", "3"], "leave out recipes, --acts, --preset and settings"),
        (["digits", "--runs", "file"], "Not a directory: 'file/logs'"),
    ],
)
def test_bad_input(here, capsys, arguments, text):
    (here / "file").touch()
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pwlu compare: ")
    assert text in error
    assert not (here / "results").exists()


@pytest.mark.parametrize("words", [["--seed", "3"], ["--act", "relu"], ["--acts", "relu", "--preset", "bounds"]])
def test_flags_that_would_be_misunderstood(here, words, capsys):
    with pytest.raises(SystemExit):
        main(["compare", "digits", "--dry-run", *words])
    assert re.search("unrecognized arguments|not allowed with", capsys.readouterr().err)


# Nothing goes on without it.


def test_keyboard_interrupt(here, capsys, monkeypatch):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "complete_runs", stopped)
    assert main(ARGUMENTS) == 130
    assert "stopped. Finished runs are kept: run the same command to continue" in capsys.readouterr().err


# A file of the package without what the package imports: torch takes seconds.
FOLDERS = {name: str(SOURCES / name.replace(".", "/")) for name in ("pwlu", "pwlu.lab", "pwlu.lab.compare", "pwlu.lab.runs")}
LOADED = f"""
import signal, sys, types
for name, folder in {FOLDERS}.items():
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from pwlu.lab.compare import subprocesses
assert "torch" not in sys.modules
"""
GRANDCHILD = "import time; print('here', flush=True); time.sleep(1000)"  # as a child has that reads image files
CHILD = f"""{LOADED}
subprocesses.end_with_parent()
import subprocess
subprocess.run([sys.executable, "-c", {GRANDCHILD!r}])
"""
PARENT = f"""{LOADED}
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell or nohup may have switched these off
signal.signal(signal.SIGHUP, signal.SIG_DFL)
subprocesses._RUN_MODULE = {CHILD!r}
class Log:
    def __init__(self, name):
        self.path = Path(name)
    def start(self, side_by_side):
        return subprocesses.Child([], subprocesses.open_log(self.path), {{}})
pool = subprocesses.LocalPool(2)
with subprocesses.exit_on_signals():
    try:
        for name in "ab":
            pool.start(Log(name))
        while pool.running:
            pool.wait()
    finally:
        pool.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize(("how", "status"), [("SIGINT", -2), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGKILL", -9)])
def test_children_end_with_their_parent(here, how, status):
    logs = [here / "a", here / "b"]
    with started([sys.executable, "-c", PARENT]) as process:
        wait_for(lambda: all(log.exists() and log.read_text() == "here\n" for log in logs), process)
        process.send_signal(getattr(signal, how))
        process.wait(60)
    assert process.returncode == status
    for log in logs:
        with subprocesses.open_log(log) as file:  # else a child or its child still has it
            assert file is not None


@pytest.mark.parametrize("deaf", [False, True])
def test_children_end_with_the_work(here, monkeypatch, deaf):
    """One that does not listen to SIGTERM is killed in the end."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" if deaf else ""
    monkeypatch.setattr(subprocesses, "_RUN_MODULE", ignore + "import time; print('here', flush=True); time.sleep(1000)")
    monkeypatch.setattr(subprocesses, "TIMEOUT", 0.2 if deaf else 60)
    pool, log = subprocesses.LocalPool(1), Path("log")
    pool.start(SimpleNamespace(start=lambda side_by_side: subprocesses.Child([], subprocesses.open_log(log), {})))
    ((_, child),) = pool.children
    wait_for(lambda: log.read_text() == "here\n", child.process)
    assert pool.wait() == []
    pool.close()
    assert child.process.returncode == (-signal.SIGKILL if deaf else -signal.SIGTERM)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signal")
def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with subprocesses.exit_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(SystemExit, match="143"):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@contextmanager
def started(command):
    """Yield a process, and end it afterwards."""
    with subprocess.Popen(command, env=plain_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


# All of it.


@pytest.mark.slow
def test_killed_and_run_again(here):
    command = [sys.executable, "-m", "pwlu", "compare", "digits", "--acts", "relu,pwlu", "--seeds", "1", "--jobs", "2"]
    command += ["--epochs", "12", "--realign-epochs", "1"]
    with started(command) as process:
        wait_for(lambda: any(path.stat().st_size for path in here.glob("runs/*/metrics.jsonl")), process)
    begun = {path.parent.name for path in here.glob("runs/*/config.json")}
    done = subprocess.run(command, env=plain_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"2 runs: 0 finished, {len(begun)} stopped, {2 - len(begun)} missing" in done.stdout
    assert re.search(r"\| PWLU \| \d+\.\d\d \(1\) \| [+-]\d+\.\d\d \|", done.stdout)
    runs, complaints = find_runs(here / "runs")
    assert not complaints
    assert len(runs) == 2  # none was begun anew
    assert begun <= {run.path.name for run in runs}
    assert [run.epochs for run in runs] == [12, 12]
    assert all(run.environment["side_by_side"] == 2 for run in runs)
    kept = here / "results" / "digits" / "pwlu-epochs-12-realign-epochs-1-seed0"
    assert files_in(kept) == ["alignment.json", "functions.pt"]
