"""Lock a file. The system releases the lock when the process ends, even if it was killed.

The package `filelock` cannot be used here, because a child process must inherit the lock. `pwlu compare` passes a locked log to
the training that it starts, and the log stays locked until that training has ended. `filelock` opens a file of its own, which a
new program does not inherit.
"""

import sys
from typing import IO, Any


def try_lock(file: IO[Any]) -> bool:
    """Lock the file for this process and its child processes. Return False if another process holds the lock.

    On systems without locks, do nothing and return True.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system does not support locks
        return True
    return True
