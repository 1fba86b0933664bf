"""Lock a file. The system releases the lock when the process ends, even if it was killed.

This is not `filelock`, because a child process must inherit the lock. `pwlu compare` passes a locked log to the training that
it starts, and the log stays locked until that training has ended. `filelock` opens a file of its own, which no new program
inherits.
"""

import sys
from typing import IO, Any


def locked(file: IO[Any]) -> bool:
    """Lock the file for this process and its child processes; return False if another process holds the lock.

    Return True on systems without locks.
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
