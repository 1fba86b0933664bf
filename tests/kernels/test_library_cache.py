"""The cache of compiled libraries: what is opened from it, who builds, when the C++ part is loaded, and what is said of it.

In most tests the compilers are small scripts that copy a library which is there already.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from imported import MOST_SECONDS
from torch.utils._python_dispatch import TorchDispatchMode

from pwlu.cli import main
from pwlu.kernels import build, cpu, dispatch, eager

pytestmark = pytest.mark.skipif(
    eager.library is None or sys.platform == "win32", reason="eager.cpp was not built here, or there is no shell"
)
SOURCES = Path(eager.__file__).parents[3]
VARIANT = cpu.usable_variants()[0]

# As if nothing had been built at installation; then one call.
USE = """
import pathlib, time
glob = pathlib.Path.glob
pathlib.Path.glob = lambda self, pattern: iter(()) if pattern.startswith("_cpu_") else glob(self, pattern)
import torch, pwlu
from pwlu.kernels import cpu, eager
unit, x = pwlu.PWLU(3), torch.ones(2, 3)
assert unit(x).sum() == 6
"""
# Calls until the C++ part serves them.
SWITCH = """
deadline = time.monotonic() + 300
while eager.library is None:
    assert not eager.why, eager.why
    assert time.monotonic() < deadline
    assert unit(x).sum() == 6
    time.sleep(0.01)
"""
TELL = "print(cpu.kernel().path, eager.library._name)"


class Cache:
    """An empty cache, compilers that copy, and processes that use both."""

    def __init__(self, folder, processes):
        self.root, self.folder = folder / "cache", folder / "cache" / "libraries"
        self.tools, self.log, self.processes, self.running = folder, folder / "log", processes, []
        self.built = {"cpu": cpu.load(VARIANT).path, "eager": Path(eager.library._name)}
        self.stems = {"cpu": self.folder / _stem_of_cpu().name, "eager": self.folder / eager.stem().name}
        self.environment = {"PWLU_CACHE": str(self.root), "PWLU_EAGER": "auto"}
        for variable, name in (("CC", "cpu"), ("CXX", "eager")):
            self.environment[variable] = self.compiler(
                name, f'while [ "$1" != -o ]; do shift; done; cat {self.built[name]} > "$2"'
            )

    def compiler(self, name, script):
        """Write a compiler that records that it was started; return its path."""
        path = self.tools / f"compiler-{name}"
        path.write_text(f"#!/bin/sh\necho {name} >> {self.log}\n{script}\n")
        path.chmod(0o755)
        return str(path)

    def started(self, name):
        """Return how often a compiler was started."""
        return self.log.read_text().split().count(name) if self.log.exists() else 0

    def fill(self):
        """Put both libraries there."""
        self.folder.mkdir(0o755, parents=True, exist_ok=True)
        return {name: Path(shutil.copy(path, self.place(name))) for name, path in self.built.items()}

    def place(self, name):
        return Path(f"{self.stems[name]}-{build._digest(self.built[name].read_bytes())}.so")

    def run(self, code, **environment):
        """Return what a process prints."""
        done = self.processes(["-c", code], os.environ | self.environment | environment)
        assert not done.returncode, done.stderr
        return done.stdout

    def command(self, *words, **environment):
        return self.processes(["-m", "pwlu", *words], os.environ | self.environment | environment)

    def start(self, code, **environment):
        """Start a process and return without waiting for it."""
        variables = os.environ | self.environment | {"PYTHONPATH": str(SOURCES)} | environment
        pipe = subprocess.PIPE
        self.running.append(subprocess.Popen([sys.executable, "-c", code], env=variables, stdout=pipe, stderr=pipe, text=True))
        return self.running[-1]

    def names(self):
        """Return the names of the files there, except for locks."""
        return sorted(path.name for path in self.folder.iterdir() if path.suffix != ".lock")


def _stem_of_cpu():
    stems = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make", lambda stem, *_, **__: stems.append(stem))
        build.build(VARIANT)
    return stems[0]


@pytest.fixture
def cache(tmp_path, processes):
    cache = Cache(tmp_path, processes)
    yield cache
    for process in cache.running:  # those of a test that failed, too
        process.kill()
        process.communicate()


def eventually(condition):
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + MOST_SECONDS
        time.sleep(0.05)


# What is opened.


def test_found_and_not_built(cache):
    made = cache.fill()
    assert cache.run(USE + TELL).split() == [str(made["cpu"]), str(made["eager"])]
    assert not cache.log.exists()


DAMAGES = [("cpu", "truncated"), *(("eager", how) for how in ("truncated", "changed", "group", "another user", "renamed"))]


@pytest.mark.parametrize(("which", "damage"), DAMAGES)
def test_what_is_damaged_or_foreign_is_built_anew(cache, which, damage):
    """Rebuild it: opening half a library would end the process."""
    made = cache.fill()
    path, content = made[which], made[which].read_bytes()
    if damage == "truncated":
        os.truncate(path, len(content) // 2)
    elif damage == "changed":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "group":
        path.chmod(0o775)
    elif damage == "another user":
        if os.getuid():
            pytest.skip("needs root")
        os.chown(path, 12345, -1)
    else:
        path = path.rename(Path(f"{cache.stems[which]}-{'0' * 16}.so"))
    assert cache.run(USE + SWITCH + TELL).split() == [str(made["cpu"]), str(made["eager"])]
    assert cache.started(which) == 1
    assert made[which].read_bytes() == content
    assert made[which].stat().st_mode & 0o777 == 0o755
    assert made[which].stat().st_uid == os.getuid()
    assert path == made[which] or not path.exists()


# Opens what the cache has, after each of these lengths of it, and says what it opened: half a library would end the process.
TRUNCATE = """
import ctypes, os, sys
from pathlib import Path
from pwlu.kernels import build
path, opened = Path({path!r}), 0
content = path.read_bytes()
for length in {lengths!r}:
    path.unlink()  # the file that is open stays whole
    path.write_bytes(content[:length])
    path.chmod(0o755)
    assert build.find(Path({stem!r})) is None
    found = build.build({variant!r})
    assert found == path and found.read_bytes() == content
    ctypes.CDLL(str(found))
    opened += 1
print(opened)
"""


def test_thirty_truncations(cache):
    path = cache.fill()["cpu"]
    size = path.stat().st_size
    lengths = [0, 1, 4, 64, size - 1, *range(size // 26, size, size // 26)][:30]
    assert len(set(lengths)) == 30
    code = TRUNCATE.format(path=str(path), lengths=lengths, stem=str(cache.stems["cpu"]), variant=VARIANT)
    assert cache.run(code).strip() == "30"
    assert cache.started("cpu") == 30
    for length in lengths:  # of the C++ part: it is found to be damaged in the same way
        made = cache.fill()["eager"]
        os.truncate(made, min(length, made.stat().st_size - 1))
        assert build.find(cache.stems["eager"]) is None
        assert not made.exists()


PLANTED = {  # what another user may have put there
    "owner of the library": lambda cache, path: os.chown(path, 12345, -1),
    "owner of the folder": lambda cache, path: os.chown(cache.folder, 12345, -1),
    "writable by the group": lambda cache, path: path.chmod(0o775),
    "writable by all": lambda cache, path: path.chmod(0o757),
    "folder writable by the group": lambda cache, path: cache.folder.chmod(0o775),
    "link to another's": lambda cache, path: link(path, path.rename(cache.tools / "planted.so"), 12345),
    "folder of another behind a link": lambda cache, path: link(
        cache.folder, cache.folder.rename(cache.tools / "there"), 12345
    ),
}


def link(path, target, owner):
    os.chown(target, owner, -1)
    path.symlink_to(target)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to give files away")
@pytest.mark.parametrize("how", PLANTED)
@pytest.mark.parametrize("which", ["cpu", "eager"])
def test_what_another_user_planted_is_not_opened(cache, which, how):
    PLANTED[how](cache, cache.fill()[which])
    assert build.find(cache.stems[which]) is None


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs root, to give files away")
@pytest.mark.slow
def test_a_process_does_not_run_what_was_planted(cache):
    """A library that writes a file when it is opened, with the right digest in its name, in a folder of another user's."""
    source, evil, mark = cache.tools / "evil.c", cache.tools / "evil.so", cache.tools / "opened"
    source.write_text(f'#include <stdio.h>\n__attribute__((constructor)) void f(void) {{ fclose(fopen("{mark}", "w")); }}\n')
    subprocess.run([*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(evil)], check=True)
    for name, stem in cache.stems.items():
        for owner, of_file in ((12345, 12345), (0, 12345), (12345, 0)):  # of the folder, of the library
            shutil.rmtree(cache.root, ignore_errors=True)
            cache.folder.mkdir(0o755, parents=True)
            planted = Path(f"{stem}-{build._digest(evil.read_bytes())}.so")
            shutil.copy(evil, planted)
            planted.chmod(0o755)
            os.chown(planted, of_file, -1)
            os.chown(cache.folder, owner, -1)
            cache.run(USE + ("while not (eager.why or eager.library): unit(x); time.sleep(0.01)" if name == "eager" else ""))
            assert not mark.exists()
    shutil.rmtree(cache.root)  # and the library does what it says
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(evil)!r})"], check=True)
    assert mark.exists()


def test_a_folder_that_others_can_write(cache):
    """Nothing is opened there, nor deleted; the CPU has its kernel all the same, from a folder of this process."""
    made = cache.fill()
    cache.folder.chmod(0o777)
    code = USE + "while not eager.why: time.sleep(0.01)\nprint(cpu.kernel().path, eager.library, eager.state())"
    path, library, *state = cache.run(code).split()
    assert not Path(path).exists()
    assert Path(path).parent != cache.folder
    assert library == "None"
    assert f"compiled: {cache.folder} must belong to this user and be writable by nobody else. Run chmod go-w" in " ".join(
        state
    )
    assert cache.names() == sorted(path.name for path in made.values())
    done = cache.command("build")
    assert done.returncode == 1
    assert "Run chmod go-w" in done.stderr


def test_no_library_of_pwlu(cache):
    """Build again what is whole but does not open; if the new one does not open either, stop trying."""
    made = cache.fill()
    made["eager"].unlink()
    wrong = Path(f"{cache.stems['eager']}-{build._digest(cache.built['cpu'].read_bytes())}.so")
    shutil.copy(cache.built["cpu"], wrong)
    assert cache.run(USE + SWITCH + TELL).split()[1] == str(made["eager"])
    assert not wrong.exists()
    made["eager"].unlink()
    cxx = cache.compiler("wrong", f'while [ "$1" != -o ]; do shift; done; cp {cache.built["cpu"]} "$2"')
    tried = "while not eager.why: unit(x); time.sleep(0.01)\nprint(eager.why)"
    for _ in range(2):
        assert f"{wrong.name} was built but cannot be opened: {wrong.name} is not a library of pwlu" in cache.run(
            USE + tried, CXX=cxx
        )
    assert cache.started("wrong") == 1


def test_libraries_are_private_whatever_the_umask(cache):
    cache.run("import os; os.umask(0)" + USE + SWITCH)
    for path in (cache.root, cache.folder, *cache.folder.glob("*.so")):
        assert path.stat().st_mode & 0o777 == 0o755
    assert not any(path.stat().st_mode & 0o022 for path in cache.folder.iterdir() if path.suffix != ".lock")


def test_build_needs_the_standard_library_alone():
    """setup.py loads it before anything is installed."""
    code = f"import runpy; print(runpy.run_path({build.__file__!r})['flags']('portable'))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(build.flags("portable")), done.stderr


# Who builds.


@pytest.mark.slow
def test_two_processes_build_once(cache):
    slow = cache.compiler("slow", f'sleep 3; while [ "$1" != -o ]; do shift; done; cp {cache.built["eager"]} "$2"')
    both = [cache.start(USE + SWITCH + TELL, CXX=slow) for _ in range(2)]
    said = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert cache.started("slow") == cache.started("cpu") == 1
    assert [out.split() for out, _ in said] == [[str(cache.place("cpu")), str(cache.place("eager"))]] * 2
    assert sorted(err.count("\n") for _, err in said) == [0, 1]  # the one that builds says so, in one line
    assert "Set PWLU_EAGER=python to turn this off" in "".join(err for _, err in said)
    assert cache.names() == sorted(cache.place(name).name for name in ("cpu", "eager"))


@pytest.mark.slow
def test_a_process_takes_over(cache):
    """A process waits for another that builds, and builds itself if the other is killed."""
    first = cache.start(USE + SWITCH, CXX=cache.compiler("long", "sleep 100"))
    eventually(lambda: cache.started("long"))
    second = cache.start(USE + SWITCH)
    time.sleep(0.5)
    first.kill()
    first.communicate()
    assert second.communicate()[1].count("\n") == 1
    assert second.returncode == 0
    assert cache.place("eager").exists()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "error", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_compiler_is_left_behind(cache, end):
    """Neither are processes that it started, its files, or a note that it failed."""
    pids = cache.tools / "pids"
    cxx = cache.compiler("long", f"sleep 300 & echo $$ $! > {pids}.part; mv {pids}.part {pids}; wait")
    wait = f"while not pathlib.Path({str(pids)!r}).exists(): time.sleep(0.01)\n"
    last = {"return": "", "error": "raise ValueError"}.get(end, "time.sleep(300)")
    process = cache.start(USE + wait + last, CXX=cxx)
    eventually(pids.exists)
    assert any(cache.folder.glob("*.building-*"))
    if isinstance(end, signal.Signals):
        process.send_signal(end)
    process.communicate()
    assert process.returncode == {"return": 0, "error": 1}.get(end, -end if isinstance(end, int) else 0)
    eventually(lambda: not any(map(runs, pids.read_text().split())))
    eventually(lambda: cache.names() == [cache.place("cpu").name])


def runs(pid):
    """Return whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


@pytest.mark.slow
def test_a_failure_is_noted(cache):
    """A failed build is repeated a day later or by hand, not by every process."""
    cxx = cache.compiler("broken", "echo too old >&2; exit 1")
    note = Path(f"{cache.stems['eager']}.failed")
    failed = f"{cxx} failed on eager.cpp: too old"
    tried = USE + "while not eager.why: time.sleep(0.01)\nprint(eager.why)"
    for times in (1, 1):
        assert cache.run(tried, CXX=cxx).strip() == failed
        assert cache.started("broken") == times
    assert note.read_text() == failed
    os.utime(note, (0, 0))
    assert cache.run(tried, CXX=cxx).strip() == failed
    assert cache.started("broken") == 2
    done = cache.command("build", CXX=cxx)
    assert (done.returncode, cache.started("broken")) == (1, 3)
    done = cache.processes(["-c", "import pwlu"], os.environ | cache.environment | {"CXX": cxx, "PWLU_EAGER": "compiled"})
    assert f"OSError: PWLU_EAGER=compiled, but {failed}" in done.stderr
    assert cache.command("build").returncode == 0
    assert not note.exists()


# When it is loaded.


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        dispatch.kernel_of(grad)
        return grad


def _in_a_thread(x):
    thread = threading.Thread(target=dispatch.kernel_of, args=[x])
    thread.start()
    thread.join()


def _in_a_mode(x):
    with _Mode():
        dispatch.kernel_of(x)


SITUATIONS = {
    "plain": (dispatch.kernel_of, True),
    "inference": (torch.inference_mode()(dispatch.kernel_of), True),
    "thread": (_in_a_thread, False),
    "mode": (_in_a_mode, False),
    "backward": (lambda x: _InBackward.apply(x.clone().requires_grad_()).sum().backward(), False),
    "transform": (lambda x: torch.func.grad(lambda y: (dispatch.kernel_of(x), y.sum())[1])(x), False),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_when_it_is_loaded(situation, monkeypatch):
    opened = []
    monkeypatch.setattr(eager, "_open", opened.append)
    monkeypatch.setattr(eager, "_ready", Path("library.so"))
    call, expected = SITUATIONS[situation]
    call(torch.ones(3))
    assert opened == [Path("library.so")] * expected
    dispatch.kernel_of(torch.ones(3))
    dispatch.kernel_of(torch.ones(3))
    assert opened == [Path("library.so")]


FIRST = """
torch.manual_seed(0)
unit, x = pwlu.PWLU(5), torch.randn(4, 5, 6, requires_grad=True)
for parameter in unit.parameters():
    torch.nn.init.normal_(parameter)
grad = torch.cos(x.detach())

def results(y):
    return [y, *torch.autograd.grad(y, [x, *unit.parameters()], grad)]

def by_python(y):
    return "Differentiable" in str(y.grad_fn)

assert eager.library is None
assert eager.state() == "Python; the C++ extension is being compiled and will be used when it is ready"
early, before = unit(x), results(unit(x))
count = 0
while eager.library is None:
    assert not eager.why, eager.why
    late = unit(x)
    count += 1
    time.sleep(0.01)
assert count > 1
assert eager.state() == f"compiled, loaded ({eager.library._name})"
unit(x)
after = unit(x)
assert [by_python(y) for y in (early, late, after)] == [True, True, False], (early, late, after)
for found in (early, late, after, unit(x)):
    assert all(map(torch.equal, results(found), before))
with torch.inference_mode():
    assert torch.equal(unit(x), before[0])
"""


@pytest.mark.slow
def test_the_first_process_switches(cache):
    """With the real compiler: from Python to C++ between two calls, with the same bits; older graphs have their gradients."""
    cache.fill()["eager"].unlink()
    cache.run(USE + FIRST, CXX=shutil.which("c++") or "g++")


def test_python_does_without(cache):
    cache.fill()
    code = USE + "print(eager.library, eager.state())"
    assert cache.run(code, PWLU_EAGER="python").strip() == "None Python (PWLU_EAGER=python)"
    assert cache.started("eager") == 0


# What is said.


def test_build_command(cache):
    code = USE + "from pwlu.cli import main; print('status', main(['build']))"
    for again in (False, True):
        *lines, status = cache.run(code).splitlines()
        assert status == "status 0"
        assert [line[:12].strip() for line in lines] == [*(f"cpu {variant}" for variant in build.variants()), "eager"]
        for line in lines:
            assert line.split()[-2] == "s"
            assert float(line.split()[-3]) < 60
            assert Path(line.split()[-1]).parent == cache.folder
        assert cache.started("eager") == 1
        assert cache.started("cpu") == len(build.variants()), again


def test_build_command_fails(cache, capsys):
    done = cache.command("build", CXX="/no/such")
    assert done.returncode == 1
    assert done.stderr.strip() == "pwlu build: eager could not be built: the compiler CXX='/no/such' was not found"
    shutil.rmtree(cache.root, ignore_errors=True)  # there is none if the package came with its CPU kernels
    cache.root.touch()
    done = cache.command("build")
    assert done.returncode == 1
    assert "pwlu build: eager could not be built: [Errno" in done.stderr
    with pytest.raises(SystemExit) as stopped:
        main(["build", "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for word in ("PWLU_CACHE", "image", "cluster", "Exit status 1", "CXX"):
        assert word in said


def info(cache, **environment):
    (line,) = [line for line in cache.command("info", **environment).stdout.splitlines() if line.startswith("eager mode")]
    return line.removeprefix("eager mode").strip()


@pytest.mark.slow
def test_info(cache, monkeypatch):
    assert info(cache).startswith("Python; the C++ extension is not compiled yet: ")
    assert info(cache, PWLU_EAGER="python") == "Python (PWLU_EAGER=python)"
    missing = (
        "Python; the C++ extension cannot be compiled: the compiler CXX='/no/such' was not found. "
        "Fix this, then run `pwlu build`"
    )
    assert info(cache, CXX="/no/such").startswith(missing)
    assert "there is no folder for the cache" in info_without_a_home(cache)
    broken = cache.compiler("broken", "echo too old >&2; exit 1")
    assert cache.command("build", CXX=broken).returncode == 1
    assert info(cache).startswith(f"Python; the C++ extension cannot be compiled: {broken} failed on eager.cpp: too old. Fix")
    made = cache.fill()
    assert info(cache) == f"compiled, loaded ({made['eager']})"
    with monkeypatch.context() as patch:  # reasons that this machine does not have
        patch.setattr(eager, "library", None)
        patch.setenv("PWLU_EAGER", "auto")
        patch.setattr(eager, "stem", lambda: cache.stems["eager"])
        assert eager.state() == f"Python; the C++ extension is compiled, and used by the next process ({made['eager']})"
        patch.setattr(eager, "_ready", made["eager"])
        assert eager.state() == f"Python; the C++ extension is compiled, and used by the next call ({made['eager']})"
        made["eager"].unlink()
        patch.setattr(build, "compiler", lambda *_: None)
        assert "compiled: no C++ compiler was found (looked for $CXX, c++, g++, clang++)" in eager.state()
        patch.setattr(torch, "__file__", str(cache.tools / "torch" / "__init__.py"))
        assert f"compiled: torch was installed without its C++ headers (looked in {cache.tools / 'torch'}" in eager.state()
        patch.setattr(sys, "platform", "win32")
        assert "compiled: eager.cpp is not built on Windows" in eager.state()


def info_without_a_home(cache):
    home = "import pathlib\ndef home(): raise RuntimeError('no home')\npathlib.Path.home = home\n"
    return cache.run(
        home + "from pwlu.cli import main; main(['info'])", PWLU_CACHE="", XDG_CACHE_HOME="", PWLU_CPU_KERNEL="reference"
    )


@pytest.mark.slow
def test_info_while_another_process_builds(cache):
    process = cache.start(USE + SWITCH, CXX=cache.compiler("long", "sleep 300"))
    eventually(lambda: cache.started("long"))
    assert info(cache) == "Python; the C++ extension is being compiled and will be used when it is ready"
    process.kill()
    process.communicate()
    assert info(cache).startswith("Python; the C++ extension is not compiled yet")
