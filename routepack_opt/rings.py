"""The samples of every cell as a ring, so that a walk can draw another sample of a cell in place.

``following`` and ``previous`` are int32 [N + cells]: the neighbours of sample i at
i, and at N + c those of the head of cell c, which is in its ring even when no
sample is. Every change is O(1). The other half of a swap of one sample for two of
its length is drawn here as well.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["PAIR_WINDOW", "change_ring", "join", "one_for_two", "trade_places"]

#: Samples on either side of the length of a pair that may change places with it.
PAIR_WINDOW = 4

Ring = npt.NDArray[np.int32]

Index = np.uint64  # numba adds no test for negative indices to unsigned ones


@njit(cache=True, nogil=True, forceinline=True)
def trade_places(following: Ring, previous: Ring, i: Any, j: Any) -> None:
    """Put two samples of different rings into each other's place."""
    after_i = following[Index(i)]
    before_i = previous[Index(i)]
    after_j = following[Index(j)]
    before_j = previous[Index(j)]
    following[Index(before_i)] = j
    previous[Index(after_i)] = j
    following[Index(j)] = after_i
    previous[Index(j)] = before_i
    following[Index(before_j)] = i
    previous[Index(after_j)] = i
    following[Index(i)] = after_j
    previous[Index(i)] = before_j


@njit(cache=True, nogil=True, forceinline=True)
def join(following: Ring, previous: Ring, i: Any, place: Any) -> None:
    """Put a sample that is in no ring behind a head or sample."""
    after = following[Index(place)]
    following[Index(place)] = i
    previous[Index(after)] = i
    following[Index(i)] = after
    previous[Index(i)] = place


@njit(cache=True, nogil=True, forceinline=True)
def change_ring(following: Ring, previous: Ring, i: Any, place: Any) -> None:
    """Take a sample out of its ring and put it behind a head or sample of another one."""
    after = following[Index(i)]
    before = previous[Index(i)]
    following[Index(before)] = after
    previous[Index(after)] = before
    join(following, previous, i, place)


@njit(cache=True, nogil=True, forceinline=True)
def one_for_two(following: Ring, lengths: npt.NDArray[np.int64], j: Any, steps: Any, offset: Any) -> Any:
    """Draw what may change places with sample j of ascending length and another sample k of its cell.

    ``steps`` from 1 to the samples of the cell less 1 tell k, ``offset`` from 0 to
    2 · PAIR_WINDOW − 1 tells i among the samples around the length of j and k
    together; it may be out of range. ``lengths`` ends with that of a zero sample.
    Returns i and k.
    """
    num_samples = np.int64(lengths.shape[0] - 1)
    k = np.int64(j)
    for _ in range(steps):
        k = np.int64(following[Index(k)])
        if k >= num_samples:
            k = np.int64(following[Index(k)])
    tokens = lengths[Index(j)] + lengths[Index(k)]
    # The first sample at least as long, or N: halving without branches.
    place = np.int64(0)
    left = num_samples
    while left > 1:
        half = left >> 1
        place += half if lengths[Index(place + half - 1)] < tokens else 0
        left -= half
    place += lengths[Index(place)] < tokens
    return place - PAIR_WINDOW + offset, k
