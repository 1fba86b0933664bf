"""Random numbers that are functions of what they are for.

What is drawn for an image depends on seed, epoch and the image's number: not on the process, the batch or the device that it
comes to. So runs on one and on many processes see the same images, and a run that goes on needs no generator's state.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # as int64; so are the others
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def mixed(*keys: int | Tensor) -> Tensor:
    """63 bits that look random, int64, a function of the keys alone, which broadcast: splitmix64, one key after the other."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        key = torch.as_tensor(key, dtype=torch.int64)
        state = (state ^ key) + _GOLDEN
        state = (state ^ _shifted(state, 30)) * _FIRST
        state = (state ^ _shifted(state, 27)) * _SECOND
        state = state ^ _shifted(state, 31)
    return _shifted(state, 1)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Unsigned shift to the right."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(*keys: int | Tensor) -> Tensor:
    """In [0, 1), with 24 bits: exact in float32."""
    return (mixed(*keys) >> 39).float() / 2**24


def generator(*keys: int) -> torch.Generator:
    """A generator on the CPU that starts from the keys."""
    return torch.Generator().manual_seed(int(mixed(*keys)))
