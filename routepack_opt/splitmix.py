"""The random numbers of the kernels: SplitMix64 (Steele, Lea & Flood 2014, doi:10.1145/2660193.2660195)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["GOLDEN", "mix", "next_number"]

#: What the counter grows by from number to number.
GOLDEN = 0x9E3779B97F4A7C15


@njit(cache=True, nogil=True, forceinline=True)
def mix(counter: Any) -> Any:
    """Turn a counter into the number at its place, uint64."""
    z = (counter ^ (counter >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True)
def next_number(rng: npt.NDArray[np.uint64]) -> Any:
    """Advance the state, uint64 [1], and return the next number."""
    rng[0] += np.uint64(GOLDEN)
    return mix(rng[0])
