"""The package as a whole: imports, the command line, the build, an installation without a compiler."""

import ast
import dataclasses
import graphlib
import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from imported import SOURCES

import pwlu
from pwlu.cli import main
from pwlu.common.text import install
from pwlu.kernels import build, cpu

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "pwlu"

# Files and folders of the package, lowest first: each imports from itself and from what stands before it.
ORDER = (
    "version common reference initial_functions kernels ops functional units"
    " analysis learning baselines conversion plotting deploy integrations lab report cli __main__"
)
LAB = "recipes runs data models tasks training compare inference"


@pytest.fixture
def python(processes):
    """Run code in a process of its own that finds the package in src/, with nothing installed."""

    def python(code, **environment):
        return processes(code, {k: v for k, v in os.environ.items() if k != "PWLU_CPU_KERNEL"} | environment)

    return python


def imports(path, known):
    """Return the files of the package that a file imports anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):  # one way to write it
            assert not any(alias.name.partition(".")[0] == "pwlu" for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "pwlu":
            inside = node.module.removeprefix("pwlu").removeprefix(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".removeprefix(".")
                yield full if full in known else inside


def test_imports_point_one_way():
    """Down the layers, and without a cycle."""
    paths = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in SOURCE.rglob("*.py")}
    files = {name.removesuffix("__init__").removesuffix("."): path for name, path in paths.items()}
    graph = {name: set(imports(path, files)) for name, path in files.items()}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError
    for folder, order in (("", [*ORDER.split(), ""]), ("lab.", LAB.split())):
        layer = {name: order.index(name.removeprefix(folder).partition(".")[0]) for name in graph if name.startswith(folder)}
        assert not [(name, other) for name in layer for other in graph[name] if layer.get(other, 0) > layer[name]]


def test_import_needs_torch_alone():
    """And not its compiler, which takes a second to import."""
    code = "import sys, torch; old = set(sys.modules); import pwlu; print(*set(sys.modules) - old)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(SOURCES)}, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    added = set(done.stdout.split())
    assert {name.partition(".")[0] for name in added} - set(sys.stdlib_module_names) <= {"pwlu", "torch"}
    assert "torch._dynamo" not in added


def test_public_names():
    names = {
        "PWLU",
        "DynamicPWLU",
        "FusedPWLU",
        "NonUniformPWLU",
        "TwoPhase",
        "__version__",
        "freeze_",
        "functional",
        "fuse_",
        "parameter_groups",
    }
    names |= {"realign_", "regrid_", "reference", "warm_up", "activation", "convert_", "restore_", "DEFAULT_KINDS"}
    names |= {"Alignment", "alignment", "plot_alignment", "plot_functions", "plot_improvements"}
    names |= {"Shapes", "curvature", "describe", "export_onnx", "refine_", "simplify_", "tabulate_", "save", "load_into"}
    names |= {"constrain_", "fuse_norms_", "unfuse_norms_", "Report", "Site"}
    assert set(pwlu.__all__) == names == set(dir(pwlu))
    assert all(hasattr(pwlu, name) for name in pwlu.__all__)


def test_options_are_keywords():
    """A call with five arguments by position is hard to read: options come by name where there are more than four."""
    for name in pwlu.__all__:
        if callable(function := getattr(pwlu, name)) and not dataclasses.is_dataclass(function):
            taken = inspect.signature(function).parameters.values()
            assert len(taken) <= 4 or sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in taken) <= 3, name


# The command line.


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("pwlu", "torch", "processor", "CPU", "kernel"):
        assert word in printed


def test_output_that_nobody_reads():
    """Print no traceback, and end with status 141, as in `pwlu info | head -0`."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run([sys.executable, "-m", "pwlu", "info"], stdout=closed, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 141
    assert done.stderr == "pwlu: stopped because the program that read its output has exited (as in `| head`)\n"


def test_how_to_install_more():
    """One function words it, from the sources, and every extra that is named exists."""
    assert install("train", "onnx") == "pip install '.[train,onnx]' in the folder of pwlu's sources"
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "pip install" not in text or path.name == "text.py", path
        for named in re.findall(r"(?:\binstall\(|needs_packages\([^,)]*, )([^)]*)\)", text):
            assert set(re.findall(r"[\"'](\w+)[\"']", named)) <= extras, path
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for where, named in re.findall(r"pip install '([^'\[]*)\[([\w,]+)\]'", page.read_text()):
            assert where == ".", page
            assert set(named.split(",")) <= extras, page


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train", "--epoches", "3"], "Instead of --epoches, did you mean --epochs?"),
        (["train", "--learning-rat=3"], "unrecognized arguments: --learning-rat=3"),
        (["train", "--weigth-decay=3"], "Instead of --weigth-decay=3, did you mean --weight-decay?"),
        (["compare", "digits", "--seed", "3"], "Instead of --seed, did you mean --seeds?"),
        (["report", "run", "--base-line", "run"], "Instead of --base-line, did you mean --baseline?"),
    ],
)
def test_a_mistyped_flag(capsys, arguments, meant):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert f"pwlu {arguments[0]}: error: unrecognized arguments: " in text
    assert meant in text


def test_unknown_command(capsys):
    with pytest.raises(SystemExit):
        main(["trian"])
    assert "invalid choice: 'trian'" in capsys.readouterr().err


# The build on first use.

FORWARD = (
    "import torch, pwlu; from pwlu.kernels import cpu; pwlu.PWLU()(torch.ones(3));"
    "k = cpu.kernel(); print(k and k.variant, k and k.path)"
)


@pytest.fixture
def bare(monkeypatch):
    """As if nothing had been built at installation, and nothing were built but cpu.c."""
    monkeypatch.setenv("PWLU_EAGER", "python")
    code = "import pathlib; from pwlu.kernels import cpu; glob = pathlib.Path.glob;"
    return code + "pathlib.Path.glob = lambda s, p: iter(()) if p.startswith('_cpu_') else glob(s, p);"


@pytest.fixture
def quick(tmp_path_factory):
    """A compiler that does not take its time to optimise."""
    path = tmp_path_factory.mktemp("compiler") / "cc"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(build.compiler())} "$@" -O0\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler here")
def test_built_on_first_use_and_kept(python, bare, quick, tmp_path):
    done = python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path), CC=quick)
    assert not done.returncode, done.stderr
    variant, path = done.stdout.split()
    assert variant == cpu.usable_variants()[0]
    assert Path(path).parent == tmp_path / "libraries"
    assert [p.name for p in Path(path).parent.iterdir() if p.suffix != ".lock"] == [Path(path).name]
    # found again, also where there is no compiler
    stamp = Path(path).stat().st_mtime_ns
    assert python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path), CC="/no/such").stdout == done.stdout
    assert Path(path).stat().st_mtime_ns == stamp
    # what another machine or a full disk left there is made anew
    Path(path).write_bytes(b"not a library")
    again = python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path), CC=quick)
    assert again.stdout.rpartition("-")[0] == done.stdout.rpartition("-")[0]  # its name ends with its digest


@pytest.mark.skipif(build.compiler() is None, reason="no C compiler here")
def test_a_cache_that_cannot_be_written_is_no_error(python, bare, quick, tmp_path):
    (tmp_path / "file").touch()
    done = python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path / "file" / "folder"), CC=quick)
    assert not done.returncode, done.stderr
    variant, path = done.stdout.split()
    assert variant == cpu.usable_variants()[0]
    assert not Path(path).exists()  # and nothing is left behind


@pytest.mark.parametrize("compiler", ["/no/such/cc", "gcc '-O", "false"])
def test_a_compiler_that_does_not_work_is_named(python, bare, tmp_path, compiler):
    """Asked for by name, it is not replaced in silence; the package works all the same."""
    done = python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path), CC=compiler)
    assert done.stdout.split() == ["None", "None"], done.stderr
    done = python(["-c", bare + "from pwlu.cli import main; main(['info'])"], PWLU_CACHE=str(tmp_path), CC=compiler)
    assert "failed on cpu.c" in done.stdout or f"the compiler CC={compiler!r} was not found" in done.stdout
    assert "correct CC" in done.stdout


def test_a_user_without_a_home(python, bare, quick):
    code = bare + "import pathlib\ndef home(): raise RuntimeError('no home')\npathlib.Path.home = home\n"
    done = python(["-c", code + FORWARD], XDG_CACHE_HOME="", PWLU_CACHE="", CC=quick)
    variant, path = done.stdout.split()
    assert variant == cpu.usable_variants()[0], done.stderr
    assert not Path(path).exists()  # for that process alone
    assert "compiler" not in done.stderr
    done = python(["-c", code + "from pwlu.cli import main; print(main(['build']))"], XDG_CACHE_HOME="", PWLU_CACHE="")
    assert "there is no folder for the cache (no home). Set PWLU_CACHE to a folder" in done.stderr
    assert done.stdout.endswith("1\n")


def test_without_a_compiler(python, bare, tmp_path):
    """The package works on plain torch, and `pwlu info` says how to get the fast kernel."""
    code = bare + "from pwlu.kernels import build; build.compiler = lambda: None;"
    done = python(["-c", code + FORWARD], PWLU_CACHE=str(tmp_path))
    assert done.stdout.split() == ["None", "None"], done.stderr
    done = python(["-c", code + "from pwlu.cli import main; main(['info'])"], PWLU_CACHE=str(tmp_path))
    assert "plain torch" in done.stdout
    assert "no C compiler was found" in done.stdout
    assert "install a C compiler" in done.stdout


@pytest.mark.slow
def test_kernels_by_name(python):
    for name in cpu.usable_variants():
        assert python(["-c", FORWARD], PWLU_CPU_KERNEL=name).stdout.split()[0] == name
    assert python(["-c", FORWARD], PWLU_CPU_KERNEL="reference").stdout.split()[0] == "None"
    done = python(["-c", FORWARD], PWLU_CPU_KERNEL="neon")
    assert done.returncode
    assert "unknown or unusable CPU kernel 'neon': this processor can run" in done.stderr
    done = python(["-m", "pwlu", "info"], PWLU_CPU_KERNEL="neon")
    assert "none: unknown or unusable CPU kernel 'neon'" in done.stdout


def test_a_stale_library_is_not_used(monkeypatch):
    kernel = cpu.load(cpu.usable_variants()[0])
    monkeypatch.setattr(build, "source_id", lambda: 1)
    with pytest.raises(OSError, match=r"built from another version of cpu\.c"):
        cpu.Kernel("stale", kernel.path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("build") is None, reason="not the development environment")
@pytest.mark.parametrize("compiler", ["usual", "missing"])
def test_wheel(compiler, tmp_path):
    """With a compiler the wheel holds the libraries; without one it is built all the same."""
    for item in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tmp_path / item).write_bytes((ROOT / item).read_bytes())
    for path in SOURCE.rglob("*"):
        if path.suffix in (".py", ".c", ".cpp", ".h", ".cu", ".cuh", ".typed", ".html", ".css", ".js"):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    environment = os.environ | ({"CC": "/nowhere/cc"} if compiler == "missing" else {})
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "pwlu/kernels/cpu/cpu.c",
        "pwlu/kernels/cpu/job.h",
        "pwlu/kernels/cuda/element.cuh",
        "pwlu/kernels/cuda/finish.cu",
    } <= set(names)
    assert {"pwlu/py.typed", "pwlu/integrations/hugging_face.py"} <= set(names)
    assert {"pwlu/kernels/eager/eager.cpp", "pwlu/kernels/eager/eager_kernels.h"} <= set(names)
    assert {"pwlu/report/page.html", "pwlu/report/page.css", "pwlu/report/main.js"} <= set(names)
    assert "-py3-none-" in wheel.name
    built = {n for n in names if "_cpu_" in n}
    if compiler == "missing":
        assert not built
    elif build.compiler() is not None:
        assert built == {f"pwlu/kernels/cpu/_cpu_{v}.{'dll' if sys.platform == 'win32' else 'so'}" for v in build.variants()}
