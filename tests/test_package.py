"""The package as a whole: imports, the command line, the build, an installation without a compiler."""

import ast
import importlib.util
import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from imported import interpreter

import pwlu
from pwlu.cli import main
from pwlu.kernels import build, cpu

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "pwlu"

# What each file may import of the package; arrows point one way. What is absent here fails the test below.
ALLOWED = {
    "version": set(),
    "text": set(),
    "reference": set(),
    "kernels.build": set(),
    "kernels.layout": set(),
    "kernels.eager": {"kernels.build"},
    "kernels.cpu": {"kernels.build", "kernels.eager", "kernels.layout"},
    "kernels.cuda.compile": {"kernels.build"},
    "kernels.cuda.plan": {"kernels.cuda.compile"},
    "kernels.cuda.driver": {"kernels.cuda.compile", "kernels.cuda.plan"},
    "kernels.cuda": {
        "kernels.eager",
        "kernels.layout",
        "kernels.cuda.compile",
        "kernels.cuda.driver",
        "kernels.cuda.plan",
    },
    "implementations": {"reference", "kernels.cpu", "kernels.cuda", "kernels.eager"},
    "plain": set(),
    "ops": {"reference", "implementations", "kernels.eager", "plain"},
    "functional": {"ops"},
    "starts": {"reference"},
    "module": {"functional", "ops", "reference", "starts"},
    "fuse": {"functional", "ops", "reference", "module"},
    "statistics": {"module", "reference"},
    "realignment": {"module", "reference", "starts"},
    "smoothing": {"module"},
    "tables": {"ops", "text"},
    "learning": {"module", "realignment", "statistics", "text"},
    "baselines": {"baselines.apl", "baselines.frelu", "baselines.pau", "baselines.prelu", "baselines.relu", "module", "starts"},
    "baselines.fused": set(),
    "baselines.apl_kernels": {"baselines.fused", "kernels.layout"},
    "baselines.pau_kernels": {"baselines.fused", "kernels.layout"},
    "baselines.apl": {"baselines.apl_kernels", "baselines.arguments", "baselines.fused", "functional", "reference"},
    "baselines.arguments": {"functional"},
    "baselines.frelu": {"baselines.arguments"},
    "baselines.pau": {"baselines.fused", "baselines.pau_kernels", "baselines.rational", "functional", "reference", "starts"},
    "baselines.prelu": {"baselines.arguments", "functional"},
    "baselines.rational": {"starts"},
    "baselines.relu": set(),
    "quantiles": {"reference"},
    "analysis": {"module", "quantiles", "reference", "text"},
    "curves": {"analysis", "functional", "module", "reference", "starts"},
    "figures": set(),
    "improvements": {"figures"},
    "plot": {"analysis", "curves", "figures", "text"},
    "shapes": {"analysis", "curves", "reference", "starts", "text"},
    "onnx_forms": {"fuse", "reference"},
    "onnx_file": {"onnx_forms"},
    "onnx_check": set(),
    "onnx_units": {"fuse", "module", "onnx_check", "onnx_forms", "reference"},
    "export": {"fuse", "module", "onnx_check", "onnx_file", "onnx_forms", "onnx_units", "text"},
    "fitting": {"reference"},
    "simplify": {"baselines", "fitting", "functional", "module", "realignment", "reference", "starts", "text"},
    "conversion": set(),
    "conversion.kinds": {"starts"},
    "conversion.dataflow": set(),
    "conversion.source": set(),
    "conversion.report": {"starts", "text"},
    "conversion.rewrite": {"conversion.source"},
    "conversion.tracing": {"conversion.dataflow", "conversion.kinds", "conversion.source", "starts"},
    "conversion.sites": {"conversion.report", "conversion.rewrite", "conversion.tracing", "text"},
    "conversion.planning": {"conversion", "conversion.rewrite", "conversion.sites"},
    "conversion.unreached": {
        "conversion.kinds",
        "conversion.report",
        "conversion.rewrite",
        "conversion.sites",
        "conversion.source",
        "conversion.tracing",
    },
    "convert": {
        "baselines",
        "conversion",
        "conversion.kinds",
        "conversion.planning",
        "conversion.report",
        "conversion.rewrite",
        "conversion.sites",
        "conversion.tracing",
        "conversion.unreached",
        "module",
        "starts",
        "text",
    },
    "recipes": set(),
    "recipes.settings": set(),
    "recipes.rows": {"recipes.settings"},
    "recipes.draws": set(),
    "recipes.processes": {"recipes.settings"},
    "recipes.environment": {"recipes.processes", "version"},
    "recipes.progress": set(),
    "recipes.locks": set(),
    "recipes.run_folder": {"recipes.locks", "recipes.settings"},
    "recipes.images": {"recipes.draws"},
    "recipes.folders": {"recipes.draws", "recipes.images", "recipes.pictures", "recipes.settings"},
    "recipes.datasets": {"recipes.draws", "recipes.folders", "recipes.images", "recipes.rows", "recipes.settings"},
    "recipes.networks": {"recipes.settings"},
    "recipes.classification": {
        "recipes.datasets",
        "recipes.draws",
        "recipes.images",
        "recipes.networks",
        "recipes.processes",
        "recipes.settings",
        "recipes.task",
    },
    "recipes.task": {"recipes.processes", "recipes.rows", "recipes.settings"},
    "recipes.measures": set(),
    "recipes.masks": {"recipes.settings"},
    "recipes.pictures": set(),
    "recipes.coco": {"recipes.masks", "recipes.settings", "text"},
    "recipes.scenes": {"recipes.coco", "recipes.draws", "recipes.masks", "recipes.pictures"},
    "recipes.pasting": set(),
    "recipes.detectors": {"recipes.networks", "recipes.pasting"},
    "recipes.evaluation": {"recipes.coco", "recipes.masks", "recipes.settings", "text"},
    "recipes.detection": {
        "recipes.coco",
        "recipes.datasets",
        "recipes.detectors",
        "recipes.draws",
        "recipes.evaluation",
        "recipes.processes",
        "recipes.scenes",
        "recipes.settings",
        "recipes.task",
        "text",
    },
    "recipes.trainee": {
        "baselines",
        "convert",
        "learning",
        "module",
        "recipes.draws",
        "recipes.processes",
        "recipes.rows",
        "recipes.settings",
        "smoothing",
    },
    "recipes.report": {"analysis", "plot", "recipes.measures", "recipes.run_folder", "recipes.settings"},
    "recipes.loop": {
        "analysis",
        "plot",
        "recipes.classification",
        "recipes.detection",
        "recipes.environment",
        "recipes.processes",
        "recipes.progress",
        "recipes.report",
        "recipes.rows",
        "recipes.run_folder",
        "recipes.settings",
        "recipes.task",
        "recipes.trainee",
    },
    "recipes.cells": {"recipes.rows", "recipes.settings"},
    "recipes.presets": {"baselines", "recipes.cells", "recipes.rows", "recipes.settings"},
    "recipes.paper": set(),
    "recipes.results": {"analysis", "recipes.cells", "recipes.rows", "recipes.run_folder", "recipes.settings"},
    "recipes.table": {
        "recipes.cells",
        "recipes.measures",
        "recipes.paper",
        "recipes.presets",
        "recipes.results",
        "recipes.rows",
        "recipes.settings",
    },
    "recipes.listing": {
        "recipes.cells",
        "recipes.measures",
        "recipes.presets",
        "recipes.results",
        "recipes.rows",
        "recipes.settings",
        "recipes.table",
    },
    "recipes.document": {
        "recipes.listing",
        "recipes.presets",
        "recipes.rows",
        "recipes.results",
        "recipes.settings",
        "recipes.table",
    },
    "recipes.children": {"recipes.locks"},
    "recipes.comparison": {
        "recipes.cells",
        "recipes.children",
        "recipes.environment",
        "recipes.loop",
        "recipes.measures",
        "recipes.presets",
        "recipes.processes",
        "recipes.progress",
        "recipes.results",
        "recipes.settings",
    },
    "integrations": set(),
    "integrations.hugging_face": {"learning", "module"},
    "integrations.pt2e": {"ops"},
    "cli": {"version"},
    "recipes.trained": {
        "recipes.classification",
        "recipes.detection",
        "recipes.networks",
        "recipes.rows",
        "recipes.run_folder",
        "recipes.settings",
        "recipes.trainee",
    },
    "recipes.preprocessing": {
        "recipes.datasets",
        "recipes.folders",
        "recipes.rows",
        "recipes.settings",
        "recipes.trained",
    },
    "recipes.shipping": {"export", "fuse", "module", "onnx_check", "onnx_file", "onnx_forms"},
    "recipes.timing": set(),
    "recipes.speed": {
        "fuse",
        "module",
        "recipes.presets",
        "recipes.progress",
        "recipes.settings",
        "recipes.shipping",
        "recipes.timing",
        "recipes.trained",
    },
    "report": set(),
    "report.charts": set(),
    "report.encoding": set(),
    "report.evidence": {
        "analysis",
        "curves",
        "recipes.run_folder",
        "recipes.settings",
        "shapes",
        "starts",
    },
    "report.gallery": {"analysis", "report.encoding", "report.evidence", "shapes", "starts"},
    "report.shape_table": {"analysis", "shapes"},
    "report.sections": {
        "analysis",
        "recipes.cells",
        "recipes.measures",
        "recipes.rows",
        "recipes.settings",
        "report.charts",
        "report.evidence",
    },
    "report.page": {"report.evidence", "report.gallery", "report.sections", "report.shape_table", "version"},
    "cli.report": {"recipes.settings", "report.evidence", "report.page"},
    "cli.export": {
        "module",
        "onnx_forms",
        "recipes.preprocessing",
        "recipes.run_folder",
        "recipes.settings",
        "recipes.shipping",
        "recipes.trained",
        "simplify",
        "version",
    },
    "cli.bench": {
        "recipes.environment",
        "recipes.processes",
        "recipes.settings",
        "recipes.speed",
        "recipes.trained",
        "text",
    },
    "cli.info": {"kernels.build", "kernels.cpu", "kernels.cuda", "kernels.eager", "version"},
    "cli.evaluate": {
        "recipes.coco",
        "recipes.datasets",
        "recipes.evaluation",
        "recipes.rows",
        "recipes.run_folder",
        "recipes.settings",
    },
    "cli.train": {
        "recipes.loop",
        "recipes.processes",
        "recipes.report",
        "recipes.rows",
        "recipes.run_folder",
        "recipes.settings",
    },
    "cli.compare": {
        "cli.train",
        "improvements",
        "recipes.children",
        "recipes.comparison",
        "recipes.document",
        "recipes.presets",
        "recipes.processes",
        "recipes.results",
        "recipes.settings",
        "recipes.table",
    },
    "kernels": set(),
    "__main__": {"cli"},
    "": {
        "analysis",
        "baselines",
        "conversion.kinds",
        "convert",
        "export",
        "functional",
        "fuse",
        "implementations",
        "improvements",
        "learning",
        "module",
        "plot",
        "realignment",
        "reference",
        "shapes",
        "simplify",
        "smoothing",
        "tables",
        "version",
    },
}


@pytest.fixture(scope="module")
def python():
    """Run code in a process of its own that finds the package in src/, with nothing installed."""
    with interpreter() as run:

        def python(code, **environment):
            return run(code, {k: v for k, v in os.environ.items() if k != "PWLU_CPU_KERNEL"} | environment)

        yield python


def modules():
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        yield name.removesuffix("__init__").removesuffix("."), path


@pytest.mark.parametrize(("name", "path"), list(modules()))
def test_imports_point_one_way(name, path):
    found = set()
    known = {n for n, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):  # one way to write it
            assert not any(alias.name.partition(".")[0] == "pwlu" for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "pwlu":
            inside = node.module.removeprefix("pwlu").removeprefix(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".removeprefix(".")
                found.add(full if full in known else inside)
    assert found <= ALLOWED[name], f"{name} imports {found - ALLOWED[name]}"


def test_import_needs_torch_alone(python):
    code = (
        "import sys, torch; old = set(sys.modules); import pwlu; print(*{m.partition('.')[0] for m in set(sys.modules) - old})"
    )
    done = python(["-c", code])
    assert not done.returncode, done.stderr
    added = set(done.stdout.split()) - set(sys.stdlib_module_names)
    assert added <= {"pwlu", "torch"}


def test_public_names():
    names = {"PWLU", "FusedPWLU", "TwoPhase", "__version__", "freeze_", "functional", "fuse_", "parameter_groups"}
    names |= {"realign_", "reference", "warm_up", "activation", "convert_", "restore_", "DEFAULT_KINDS"}
    names |= {"Alignment", "alignment", "plot_alignment", "plot_functions", "plot_improvements"}
    names |= {"Shapes", "curvature", "describe", "export_onnx", "refine_", "simplify_", "tabulate_"}
    assert set(pwlu.__all__) == names
    assert all(hasattr(pwlu, name) for name in pwlu.__all__)


# The command line.


def test_info(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for word in ("pwlu", "torch", "processor", "CPU", "kernel"):
        assert word in printed


def test_help_is_worth_reading(capsys):
    for arguments in (["--help"], ["info", "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert "which code computes PWLU where" in printed
    assert "PWLU_CPU_KERNEL" in printed


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
    done = python(["-c", bare + FORWARD], PWLU_CACHE=str(tmp_path))
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
    assert "mend CC" in done.stdout


def test_a_user_without_a_home(python, bare):
    code = bare + "import pathlib\ndef home(): raise RuntimeError('no home')\npathlib.Path.home = home\n"
    done = python(["-c", code + FORWARD], XDG_CACHE_HOME="", PWLU_CACHE="")
    assert done.stdout.split() == ["None", "None"], done.stderr


def test_without_a_compiler(python, bare, tmp_path):
    """The package works on plain torch, and `pwlu info` says how to get the fast kernel."""
    code = bare + "from pwlu.kernels import build; build.compiler = lambda: None;"
    done = python(["-c", code + FORWARD], PWLU_CACHE=str(tmp_path))
    assert done.stdout.split() == ["None", "None"], done.stderr
    done = python(["-c", code + "from pwlu.cli import main; main(['info'])"], PWLU_CACHE=str(tmp_path))
    assert "plain torch" in done.stdout
    assert "no C compiler was found" in done.stdout
    assert "install a C compiler" in done.stdout


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
    assert {"pwlu/kernels/cpu.c", "pwlu/kernels/cuda/element.cuh", "pwlu/kernels/cuda/finish.cu"} <= set(names)
    assert {"pwlu/py.typed", "pwlu/integrations/hugging_face.py"} <= set(names)
    assert {"pwlu/kernels/eager.cpp", "pwlu/kernels/eager_calls.h", "pwlu/kernels/eager_kernels.h"} <= set(names)
    assert {"pwlu/report/page.html", "pwlu/report/page.css", "pwlu/report/main.js"} <= set(names)
    assert "-py3-none-" in wheel.name
    built = {n for n in names if "_cpu_" in n}
    if compiler == "missing":
        assert not built
    elif build.compiler() is not None:
        assert built == {f"pwlu/kernels/_cpu_{v}.{'dll' if sys.platform == 'win32' else 'so'}" for v in build.variants()}
