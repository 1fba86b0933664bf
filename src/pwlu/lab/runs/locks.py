"""A lock on a file, which ends with the process that holds it, however that ends."""

import sys
from typing import IO, Any


def locked(file: IO[Any]) -> bool:
    """Whether the file is this process's now, and that of the processes it starts; where there are no locks, it always is."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # this file system has no locks
        return True
    return True
