"""Random numbers that are functions of integer keys.

The random numbers of an image depend on seed, epoch and the number of the image, but not on process, batch or device. So the
number of processes does not change the augmentation, and a resumed run needs no generator state.
"""

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # constants of splitmix64, as int64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def hash_keys(*keys: int | Tensor) -> Tensor:
    """Return 63 pseudorandom bits as int64: splitmix64 applied to one key after the other. Keys broadcast."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        key = torch.as_tensor(key, dtype=torch.int64)
        state = (state ^ key) + _GOLDEN
        state = (state ^ _shift_right(state, 30)) * _FIRST
        state = (state ^ _shift_right(state, 27)) * _SECOND
        state = state ^ _shift_right(state, 31)
    return _shift_right(state, 1)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right as if it were unsigned."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(*keys: int | Tensor) -> Tensor:
    """Return uniform numbers in [0, 1) with 24 bits, which are exact in float32."""
    return (hash_keys(*keys) >> 39).float() / 2**24


def generator(*keys: int) -> torch.Generator:
    """Return a CPU generator seeded by the keys."""
    return torch.Generator().manual_seed(int(hash_keys(*keys)))
