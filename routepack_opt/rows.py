"""The least number of rows a batch needs: packings above, bounds below, proofs between.

Capacity decides rows before balance is looked at: a row offers one cell of
``capacity`` tokens on each of ``dp_size`` slots, and a sample goes into one
cell whole, so the least number of rows is the least number of bins of a
one-dimensional bin packing problem, divided by ``dp_size`` and rounded up.
Lengths given to this module are already aligned.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from routepack_opt.errors import Faults, InvalidInputError

__all__ = ["RowCount", "least_bins_bound", "least_rows", "pack_bins"]

IntArray = npt.NDArray[np.int64]

#: Items times bins up to which the subset-sum packing is tried where best fit leaves a gap.
_SUBSET_SUM_WORK = 1_500_000


@dataclass(frozen=True, repr=False)
class RowCount:
    """How many rows are used, and how many no plan can do without.

    Parameters
    ----------
    num_rows : int
        Rows of the best packing known.
    bound : int
        Proven lower bound on the rows of every feasible packing.
    method : str
        What found ``num_rows``.
    bound_method : str
        What proved ``bound``.
    """

    num_rows: int
    bound: int
    method: str
    bound_method: str

    def __post_init__(self) -> None:
        if self.bound > self.num_rows:
            raise InvalidInputError(f"row bound {self.bound} above the rows found {self.num_rows}")

    @property
    def proven(self) -> bool:
        """bool: whether no feasible packing has fewer rows."""
        return self.num_rows == self.bound

    def __repr__(self) -> str:
        if self.proven:
            return f"RowCount({self.num_rows}, proven: {self.method} meets {self.bound_method})"
        return f"RowCount({self.num_rows} by {self.method}, at least {self.bound} by {self.bound_method}, not proven)"


def _checked_lengths(lengths: npt.ArrayLike, capacity: int, *, faults: Faults, noun: str = "sample") -> IntArray:
    array = np.asarray(lengths)
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer):
        faults.add(f"capacity must be an integer, got {capacity!r}")
        capacity = 0
    elif capacity < 1:
        faults.add(f"capacity must be at least 1, got {capacity}")
    if array.ndim != 1:
        faults.add(f"lengths must have one dimension, got shape {array.shape}")
        return np.zeros(0, dtype=np.int64)
    if array.size == 0:
        faults.add("lengths is empty: there is nothing to pack")
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        faults.add(f"lengths must be integers, got dtype {array.dtype}")
        return np.zeros(0, dtype=np.int64)
    for index in np.flatnonzero(array < 1):
        faults.add(f"{noun} {index} has length {array[index]}, it must be at least 1")
    if capacity >= 1:
        for index in np.flatnonzero(array > capacity):
            faults.add(f"{noun} {index} has length {array[index]}, above the capacity {capacity}")
    return array.astype(np.int64)


def _descending(lengths: IntArray) -> IntArray:
    """Item indices by (length descending, index ascending)."""
    return np.argsort(-lengths, kind="stable").astype(np.int64)


def least_bins_bound(lengths: npt.ArrayLike, capacity: int) -> tuple[int, str]:
    """Lower bound on the bins of size ``capacity`` that hold every length.

    The larger of the area bound L1 and the bound L2 of Martello and Toth,
    the latter maximised over all thresholds that can change it: for a
    threshold a, items above ``capacity - a`` and items above half the
    capacity need a bin each, and of the items between a and half the
    capacity only what exceeds the room left beside the latter group counts.

    Parameters
    ----------
    lengths : array_like of int, shape (N,)
        Aligned lengths in tokens, each in 1..capacity.
    capacity : int
        Tokens one bin holds.

    Returns
    -------
    bound : int
        Bins no packing can do without.
    method : str
        ``"area bound L1"`` or ``"Martello-Toth L2"``, the simpler if both agree.

    Raises
    ------
    InvalidInputError
        If a length is below 1 or above the capacity; every such sample is named.

    References
    ----------
    S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin
    packing problem", Discrete Applied Mathematics 28 (1990) 59-70, section 3,
    doi:10.1016/0166-218X(90)90094-S.
    """
    faults = Faults()
    array = _checked_lengths(lengths, capacity, faults=faults)
    faults.raise_if_any("bin bound")
    return _least_bins_bound(array, int(capacity))


def _least_bins_bound(lengths: IntArray, capacity: int) -> tuple[int, str]:
    area = -(-int(lengths.sum()) // capacity)
    ascending = np.sort(lengths, kind="stable")
    prefix = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(ascending, dtype=np.int64)])
    num_items = ascending.size
    # ascending[:half] fit beside an equal item, ascending[half:] are the large ones.
    half = int(np.searchsorted(2 * ascending, capacity, side="right"))
    thresholds = np.concatenate([np.zeros(1, dtype=np.int64), np.unique(ascending[:half])])
    first_small = np.searchsorted(ascending[:half], thresholds, side="left")
    first_alone = np.maximum(np.searchsorted(ascending, capacity - thresholds, side="right"), half)
    num_pairable = first_alone - half
    room = num_pairable * capacity - (prefix[first_alone] - prefix[half])
    small = prefix[half] - prefix[first_small]
    extra = np.maximum(0, -(-(small - room) // capacity))
    l2 = int((num_items - half + extra).max())
    if l2 > area:
        return l2, "Martello-Toth L2"
    return area, "area bound L1"


def pack_bins(lengths: npt.ArrayLike, capacity: int, *, num_bins: int | None = None) -> IntArray:
    """Pack lengths into few bins by best-fit decreasing.

    Items are taken by (length descending, index ascending), each goes into
    the bin with the least room that still holds it (lowest bin number on
    ties), a new bin is opened when there is none. When ``num_bins`` is given
    and best fit needs more, bins are filled one by one instead: the longest
    item left, then the subset of the items left that fills the rest best.

    Parameters
    ----------
    lengths : array_like of int, shape (N,)
        Aligned lengths in tokens, each in 1..capacity.
    capacity : int
        Tokens one bin holds.
    num_bins : int, optional
        The most bins that may be used; by default as many as needed.

    Returns
    -------
    bin_of_item : ndarray of int64, shape (N,)
        Bin of each item, numbered from 0 without gaps.

    Raises
    ------
    InvalidInputError
        If a length is below 1 or above the capacity (each is named), or if no
        packing into ``num_bins`` bins was found.

    References
    ----------
    D. S. Johnson et al., "Worst-case performance bounds for simple
    one-dimensional packing algorithms", SIAM J. Comput. 3 (1974) 299-325,
    doi:10.1137/0203025 (best-fit decreasing); K. Fleszar, K. S. Hindi, "New
    heuristics for one-dimensional bin-packing", Computers & Operations
    Research 29 (2002) 821-839, doi:10.1016/S0305-0548(00)00082-4, MBS' (one
    bin at a time around the longest item left; here the subset is found by
    dynamic programming instead of enumeration).
    """
    faults = Faults()
    array = _checked_lengths(lengths, capacity, faults=faults)
    if num_bins is not None and num_bins < 1:
        faults.add(f"num_bins must be at least 1, got {num_bins}")
    faults.raise_if_any("bin packing")
    capacity = int(capacity)
    bin_of_item = _best_fit_decreasing(array, capacity)
    used = int(bin_of_item.max()) + 1
    if num_bins is None or used <= num_bins:
        return bin_of_item
    bound, method = _least_bins_bound(array, capacity)
    if bound > num_bins:
        raise InvalidInputError(
            f"{array.size} samples need at least {bound} bins of {capacity} tokens ({method}), num_bins is {num_bins}",
            context="bin packing",
        )
    if array.size * used <= _SUBSET_SUM_WORK:
        filled = _largest_first_subset_sum(array, capacity)
        used = min(used, int(filled.max()) + 1)
        if used <= num_bins:
            return filled
    raise InvalidInputError(
        f"no packing of {array.size} samples into {num_bins} bins of {capacity} tokens was found: "
        f"{used} were needed (the lower bound is {bound})",
        context="bin packing",
    )


def _best_fit_decreasing(lengths: IntArray, capacity: int) -> IntArray:
    base = lengths.size + 1
    bin_of_item = np.empty(lengths.size, dtype=np.int64)
    order = _descending(lengths).tolist()
    lengths_list = lengths.tolist()
    room: list[int] = []  # room * base + bin, ascending
    num_bins = 0
    for item in order:
        length = lengths_list[item]
        at = bisect_left(room, length * base)
        if at == len(room):
            chosen = num_bins
            num_bins += 1
            left = capacity - length
        else:
            left, chosen = divmod(room.pop(at), base)
            left -= length
        bin_of_item[item] = chosen
        if left:
            insort(room, left * base + chosen)
    return bin_of_item


def _largest_first_subset_sum(lengths: IntArray, capacity: int) -> IntArray:
    bin_of_item = np.full(lengths.size, -1, dtype=np.int64)
    left = _descending(lengths).tolist()
    lengths_list = lengths.tolist()
    num_bins = 0
    while left:
        room = capacity - lengths_list[left[0]]
        mask = (1 << (room + 1)) - 1
        reachable = 1  # bit v: some subset of the items seen so far sums to v
        seen: list[tuple[int, int]] = []
        for item in left[1:]:
            length = lengths_list[item]
            if length > room:
                continue
            grown = (reachable | (reachable << length)) & mask
            if grown != reachable:
                seen.append((item, reachable))
                reachable = grown
                if reachable >> room:
                    break
        value = reachable.bit_length() - 1
        chosen = {left[0]}
        # Walk back: an item is needed exactly when the value was unreachable before it came.
        for item, before in reversed(seen):
            if not (before >> value) & 1:
                chosen.add(item)
                value -= lengths_list[item]
        for item in chosen:
            bin_of_item[item] = num_bins
        left = [item for item in left if item not in chosen]
        num_bins += 1
    return bin_of_item


def least_rows(
    lengths: npt.ArrayLike,
    capacity: int,
    dp_size: int,
    *,
    exact: bool = False,
    time_limit: float = 10.0,
) -> RowCount:
    """Fewest rows known for a batch, with a proven lower bound.

    Best-fit decreasing from above, the larger of L1 and Martello-Toth L2 from
    below; where they leave a gap in rows, bins filled one by one around the
    longest sample left; where that leaves one too and ``exact`` is set, the
    exact search of :func:`prove_bins`.

    Parameters
    ----------
    lengths : array_like of int, shape (N,)
        Aligned lengths in tokens, each in 1..capacity.
    capacity : int
        Tokens one cell holds.
    dp_size : int
        Cells of a row.
    exact : bool
        Whether to prove the count when the simple bound does not.
    time_limit : float
        Seconds the exact search may take; unused otherwise.

    Returns
    -------
    RowCount
        Rows and bound, each with its method.

    Raises
    ------
    InvalidInputError
        If a length is below 1 or above the capacity (each is named), or if
        ``dp_size`` or ``time_limit`` is out of range.
    """
    faults = Faults()
    array = _checked_lengths(lengths, capacity, faults=faults)
    if dp_size < 1:
        faults.add(f"dp_size must be at least 1, got {dp_size}")
    if not time_limit >= 0 or math.isinf(time_limit):
        faults.add(f"time_limit must be a finite number of seconds >= 0, got {time_limit}")
    faults.raise_if_any("row count")
    capacity, dp_size = int(capacity), int(dp_size)
    bound, bound_method = _least_bins_bound(array, capacity)
    rows_bound = -(-bound // dp_size)
    bins = int(_best_fit_decreasing(array, capacity).max()) + 1
    method = "best-fit decreasing"
    num_rows = -(-bins // dp_size)
    if num_rows > rows_bound and array.size * bins <= _SUBSET_SUM_WORK:
        filled = int(_largest_first_subset_sum(array, capacity).max()) + 1
        if -(-filled // dp_size) < num_rows:
            num_rows, method = -(-filled // dp_size), "largest-first subset sum"
    return RowCount(num_rows, rows_bound, method, bound_method)
