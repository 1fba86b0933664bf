"""Start the processes of a run as torchrun does: ``python -m pwlu.lab.compare.launch [FLAGS OF TORCHRUN] -m pwlu train ...``.

The end of this process is that of the first rank that failed: its exit status or its signal. torchrun itself always returns 1,
which does not tell a run that was killed, to be tried again, from one that would fail again.
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
            if failure.exitcode != -signal.SIGKILL:  # which cannot be handled
                signal.signal(-failure.exitcode, signal.SIG_DFL)
            os.kill(os.getpid(), -failure.exitcode)
        return failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
