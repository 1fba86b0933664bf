"""``python -m pwlu``: the same as the command ``pwlu``, for a package that is not installed."""

import sys

from pwlu.cli import main

sys.exit(main())
