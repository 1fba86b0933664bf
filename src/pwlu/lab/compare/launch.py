"""Start the processes of a run as torchrun does: ``python -m pwlu.lab.compare.launch [FLAGS OF TORCHRUN] -m pwlu train ...``.

This process ends like the first rank that failed: with the same exit status, or by the same signal. torchrun itself always
exits with 1. So its exit status cannot tell a killed run, which should be tried again, from a run that would fail again.
"""

import os
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(arguments: list[str]) -> int:
    """Start the processes, wait for them, and return the exit status of the first that failed, or 0."""
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        message = failure.message if isinstance(failure.message, str) else failure.message["message"]
        print(f"rank {rank} failed first, exit status {failure.exitcode}: {message}", file=sys.stderr, flush=True)
        if failure.exitcode < 0:
            if failure.exitcode != -signal.SIGKILL:  # SIGKILL has no handler to reset
                signal.signal(-failure.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -failure.exitcode)
        return failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
