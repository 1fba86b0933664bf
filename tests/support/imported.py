"""Processes that have torch imported from the start: copies of one that imported it, which takes seconds, once.

What such a process runs, and what of pwlu it imports, is its own affair: the one it is a copy of has imported torch alone.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

SOURCES = Path(__file__).parents[2] / "src"
SUPPORT = Path(__file__).parent  # what tests share
MOST_SECONDS = 600  # for what takes some ten of them on an idle machine: a busy one must not fail

# To append to a program: prints the names of its threads on Linux, in one piece, because several processes print.
PRINT_THREADS = """
from pathlib import Path
names = [thread.read_text().strip() for thread in Path("/proc/self/task").glob("*/comm")]
print(f"threads: {' '.join(names)}\\n", end="")
"""

# Nothing is computed before the fork, which torch would not survive. A copy leaves the loop and ends as every program does.
SERVER = """
import json, os, runpy, sys, types
import {modules}
for line in sys.stdin:
    job = json.loads(line)
    copy = os.fork()
    if not copy:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, job["stdout"], job["stderr"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), number)
os.environ.clear()
os.environ.update(job["environment"])
sys.path[:1] = job["path"]
how, what, *arguments = job["command"]
sys.argv = [how if how == "-c" else what, *arguments]
if how == "-c":
    sys.modules["__main__"] = types.ModuleType("__main__")  # what the code makes lives until the process ends
    exec(compile(what, "<string>", "exec"), vars(sys.modules["__main__"]))
else:
    runpy.run_module(what, run_name="__main__", alter_sys=True)
"""


@contextmanager
def interpreter(*modules):
    """A function that runs ``-c CODE ...`` or ``-m MODULE ...`` as a new interpreter with these modules imported would.

    It takes the command, its environment, and the folders to put in front of the path, and returns a CompletedProcess.
    """
    if not hasattr(os, "fork"):
        yield _plain
        return
    command = [sys.executable, "-W", "ignore", "-c", SERVER.format(modules=", ".join(("torch", *modules)))]
    with (
        TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as server,
    ):

        def run(command, environment, path=(SOURCES,)):
            files = [Path(folder, name) for name in ("stdout", "stderr")]
            job = {"command": [str(word) for word in command], "environment": environment, "path": [str(p) for p in path]}
            print(json.dumps(job | {file.name: str(file) for file in files}), file=server.stdin, flush=True)
            try:
                if not select.select([server.stdout], [], [], MOST_SECONDS)[0]:
                    raise TimeoutError(f"{command} has not ended after {MOST_SECONDS} s")
                line = server.stdout.readline()
            except BaseException:
                os.killpg(server.pid, signal.SIGKILL)  # the copy too
                raise
            assert line, f"the process to copy has ended: does it import {modules}?"
            status = int(line)
            out, err = (file.read_text() for file in files)
            for file in files:
                file.unlink()
            return subprocess.CompletedProcess(command, status, out, err)

        yield run


def plain_environment(**more):
    """Return the variables for a process of its own that finds the sources, and neither pytest's nor Ray's."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "RAY_"))}
    return plain | {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | more


def wait_for(happens, process):
    """Wait until it happens; fail if the process ends first or it takes too long."""
    deadline = time.monotonic() + MOST_SECONDS
    while not happens():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


def run_pytest(*arguments, **environment):
    """Run pytest on files of the repository in a process of its own, which does not take itself for a worker of this one."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *arguments]
    variables = plain_environment(**environment)
    return subprocess.run(command, env=variables, cwd=SOURCES.parent, capture_output=True, text=True)


def _plain(command, environment, path=(SOURCES,)):
    variables = environment | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.run([sys.executable, "-W", "ignore", *map(str, command)], env=variables, capture_output=True, text=True)
