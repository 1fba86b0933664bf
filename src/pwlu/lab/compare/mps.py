"""Let several processes use a GPU at the same time, by NVIDIA's multi-process service."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CONTROL = "nvidia-cuda-mps-control"
_CHECK = "import torch; torch.zeros(8, device='cuda').sum().item()"


@contextmanager
def multi_process_service() -> Iterator[None]:
    """Start NVIDIA's multi-process service for the processes that this one starts, and stop it at the end.

    Without the service, processes take turns on a GPU. If it does not work, print so and continue without it.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with_service, before = os.environ | variables, {name: os.environ.get(name) for name in variables}
        try:
            subprocess.run([_CONTROL, "-d"], env=with_service, timeout=20, capture_output=True, check=True)
            subprocess.run([sys.executable, "-c", _CHECK], env=with_service, timeout=120, capture_output=True, check=True)
            os.environ.update(variables)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"--mps does not work here, continuing without it: {error}", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run([_CONTROL], input=b"quit\n", env=with_service, timeout=20, capture_output=True)
