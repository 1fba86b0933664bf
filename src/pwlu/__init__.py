"""pwlu: the Piecewise Linear Unit, an activation function that a network learns for itself.

    act = pwlu.PWLU(channels=64)   # starts as ReLU, one function a channel
    pwlu.fuse_(model)              # for inference

The mathematics is in :mod:`pwlu.reference`, the function in :mod:`pwlu.functional`.
"""

from pwlu import functional, reference
from pwlu.fuse import FusedPWLU, fuse_
from pwlu.implementations import warm_up
from pwlu.module import PWLU
from pwlu.version import __version__

__all__ = ["PWLU", "FusedPWLU", "__version__", "functional", "fuse_", "reference", "warm_up"]
