"""The least number of rows a batch needs: packings above, bounds below, proofs between.

Capacity decides rows before balance is looked at: a row offers one cell of
``capacity`` tokens on each of ``dp_size`` slots, and a sample goes into one
cell whole, so the least number of rows is the least number of bins of a
one-dimensional bin packing problem, divided by ``dp_size`` and rounded up.
Lengths given to this module are already aligned.

The proof (:func:`prove_bins`) generates patterns: the relaxation over all
fillings of one bin gives a bound that is almost always the answer, diving
through it finds a packing, and where the bound is short of a packing by a
little, the few fillings that could still occur are enumerated and searched.
"""

from __future__ import annotations

import importlib
import math
import time
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, read_only
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.highs import silent_highs

__all__ = ["BinCount", "RowCount", "least_bins_bound", "least_rows", "pack_bins", "prove_bins"]

#: Items times bins up to which the subset-sum packing is tried where best fit leaves a gap.
_SUBSET_SUM_WORK = 1_500_000
#: Item types times capacity up to which pattern generation is tried (entries of one knapsack table).
_KNAPSACK_SIZE = 25_000_000
#: Patterns enumerated at most, and up to how many the search through them gets most of the time.
_MAX_PATTERNS = 40_000
_FEW_PATTERNS = 700
#: Duals are rounded down to multiples of 1 / this.
_DUAL_SCALE = 10**7


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
    stored : bool
        ``bound`` is taken on the word of the file it was read from: it is above
        what the simple bounds show, and nobody has proved it again.
    """

    num_rows: int
    bound: int
    method: str
    bound_method: str
    stored: bool = False

    def __post_init__(self) -> None:
        faults = Faults()
        for name, value, least in (("num_rows", self.num_rows, 1), ("bound", self.bound, 0)):
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                faults.add(f"{name} is {value!r}; it must be an integer")
            elif value < least:
                faults.add(f"{name} is {value}; it must be at least {least}")
        if not faults and self.bound > self.num_rows:
            faults.add(f"row bound {self.bound} above the rows found {self.num_rows}")
        faults.raise_if_any()

    @property
    def proven(self) -> bool:
        """bool: whether no feasible packing has fewer rows."""
        return self.num_rows == self.bound

    def __repr__(self) -> str:
        proof = self.bound_method + (" (as stored)" if self.stored else "")
        if self.proven:
            return f"RowCount({self.num_rows}, proven: {self.method} meets {proof})"
        return f"RowCount({self.num_rows} by {self.method}, at least {self.bound} by {proof}, not proven)"


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


@dataclass(frozen=True, repr=False, eq=False)
class BinCount:
    """A packing into bins with a proven lower bound on their number.

    Parameters
    ----------
    num_bins : int
        Bins of the packing.
    bound : int
        Proven lower bound on the bins of every packing.
    method : str
        What found the packing.
    bound_method : str
        What proved ``bound``.
    bin_of_item : ndarray of int64, shape (N,)
        Bin of each item, 0..num_bins−1.
    """

    num_bins: int
    bound: int
    method: str
    bound_method: str
    bin_of_item: IntArray

    @property
    def proven(self) -> bool:
        """bool: whether no packing has fewer bins."""
        return self.num_bins == self.bound

    def __repr__(self) -> str:
        proof = "proven" if self.proven else f"not proven, at least {self.bound}"
        return f"BinCount({self.num_bins} by {self.method}, {proof} by {self.bound_method})"


def prove_bins(lengths: npt.ArrayLike, capacity: int, *, time_limit: float = 10.0) -> BinCount:
    """Find the least number of bins, with a proof, within a time limit.

    1. Heuristics from above, L1 and Martello-Toth L2 from below.
    2. Column generation: the relaxation over all patterns (fillings of one
       bin) by a bounded knapsack. Duals are rounded to integers y and M, the
       largest Σ y over any pattern, is found exactly: ⌈Σ y_i / M⌉ bins are a
       lower bound whatever the LP solver's arithmetic.
    3. To reach a target of z bins: diving (patterns with the largest fractions
       are fixed, the rest is solved again, with limited discrepancies, and
       heuristics try every rest), and enumeration: in a packing into z bins
       the amounts M − Σ y of its patterns add up to at most z·M − Σ y, so that
       only patterns close to M can occur, for each of several duals. If there
       are few enough to list, an integer program over them finds a packing or
       proves that there is none; then z grows by one.

    Parameters
    ----------
    lengths : array_like of int, shape (N,)
        Aligned lengths in tokens, each in 1..capacity.
    capacity : int
        Tokens one bin holds.
    time_limit : float
        Seconds; what is known then is returned.

    Returns
    -------
    BinCount
        With the packing that achieves ``num_bins``.

    Raises
    ------
    InvalidInputError
        If a length is below 1 or above the capacity (each is named), or the
        time limit is no finite number of seconds.

    Notes
    -----
    Infeasibility of the integer program is HiGHS's claim; its matrix has small
    integers only. Instances whose knapsack table would have more than
    25 million entries (distinct lengths times capacity) get no more than step 1.

    References
    ----------
    P. C. Gilmore, R. E. Gomory, "A linear programming approach to the
    cutting-stock problem", Operations Research 9 (1961) 849-859,
    doi:10.1287/opre.9.6.849; A. A. Farley, Operations Research 38 (1990)
    922-923, doi:10.1287/opre.38.5.922 (the bound from rounded duals);
    R. Sadykov et al., "Primal heuristics for branch and price", INFORMS J.
    Computing 31 (2019) 251-267, doi:10.1287/ijoc.2018.0822 (diving with
    limited discrepancy); V. L. de Lima, M. Iori, F. K. Miyazawa, "Exact
    solution of network flow models with strong relaxations", Math. Programming
    197 (2023) 813-846, doi:10.1007/s10107-022-01785-9 (reduced costs leave few
    columns).
    """
    faults = Faults()
    array = _checked_lengths(lengths, capacity, faults=faults)
    if not time_limit >= 0 or math.isinf(time_limit):
        faults.add(f"time_limit must be a finite number of seconds >= 0, got {time_limit}")
    faults.raise_if_any("bin proof")
    return _prove_bins(array, int(capacity), time.perf_counter() + time_limit, 1)


def _prove_bins(lengths: IntArray, capacity: int, deadline: float, step: int) -> BinCount:
    """:func:`prove_bins`, satisfied when bins and bound agree after rounding up to multiples of ``step``."""

    def rounded(num_bins: int) -> int:
        return -(-num_bins // step)

    bound, bound_method = _least_bins_bound(lengths, capacity)
    packing = _best_fit_decreasing(lengths, capacity)
    num_bins, method = int(packing.max()) + 1, "best-fit decreasing"
    if rounded(num_bins) > rounded(bound) and lengths.size * num_bins <= _SUBSET_SUM_WORK:
        filled = _largest_first_subset_sum(lengths, capacity)
        if int(filled.max()) + 1 < num_bins:
            packing, num_bins, method = filled, int(filled.max()) + 1, "largest-first subset sum"
    num_types = len(np.unique(lengths))
    if rounded(num_bins) > rounded(bound) and (num_types + 1) * (capacity + 1) <= _KNAPSACK_SIZE:
        patterns = _Patterns(lengths, capacity)
        _, proof = patterns.relax(patterns.demand, None, deadline)
        if proof.bound > bound:
            bound, bound_method = proof.bound, "column generation"
        while rounded(num_bins) > rounded(bound) and time.perf_counter() < deadline:
            target = rounded(bound) * step
            found, how, impossible = patterns.search(target, deadline)
            if found is not None:
                packing, num_bins, method = patterns.assign(found, lengths), len(found), how
            elif impossible:
                bound, bound_method = target + 1, "exhaustive pattern search"
            else:
                break
    return BinCount(num_bins, bound, method, bound_method, read_only(packing))


@dataclass(frozen=True)
class _DualBound:
    """Integer duals y of the item types, the largest Σ y of a pattern, and Σ y over all items."""

    duals: IntArray
    largest: int
    total: int

    @property
    def bound(self) -> int:
        return -(-self.total // max(1, self.largest))


class _Patterns:
    """Patterns of item types, the linear relaxation over them, and searches for integer solutions."""

    def __init__(self, lengths: IntArray, capacity: int) -> None:
        sizes, demand = np.unique(-lengths, return_counts=True)
        self.sizes = np.ascontiguousarray(-sizes)  # descending
        self.demand = demand.astype(np.int64)
        self.capacity = capacity
        self.columns: list[IntArray] = []
        self._known: set[bytes] = set()
        self._infinity = float(importlib.import_module("highspy").kHighsInf)
        self._solver = silent_highs()
        nothing = (np.zeros(0, dtype=np.int32), np.zeros(0))
        for amount in self.demand:
            self._solver.addRow(float(amount), self._infinity, 0, *nothing)
        for pattern in self._heuristic(self.demand, len(lengths)) or ():
            self._add(pattern)

    def _add(self, pattern: IntArray) -> bool:
        key = pattern.tobytes()
        if key in self._known:
            return False
        self._known.add(key)
        self.columns.append(pattern)
        index = np.flatnonzero(pattern).astype(np.int32)
        self._solver.addCol(1.0, 0.0, self._infinity, len(index), index, pattern[index].astype(np.float64))
        return True

    def _heuristic(self, demand: IntArray, num_bins: int) -> list[IntArray] | None:
        """A packing of ``demand`` into at most ``num_bins`` patterns, if a heuristic finds one."""
        lengths = np.repeat(self.sizes, demand)
        if lengths.size == 0:
            return []
        kinds = np.repeat(np.arange(self.sizes.size), demand)
        for packing in (_largest_first_subset_sum, _best_fit_decreasing):
            bins = packing(lengths, self.capacity)
            used = int(bins.max()) + 1
            if used <= num_bins:
                table = np.zeros((used, self.sizes.size), dtype=np.int64)
                np.add.at(table, (bins, kinds), 1)
                return list(table)
        return None

    def relax(
        self, demand: IntArray, num_bins: int | None, deadline: float
    ) -> tuple[npt.NDArray[np.float64] | None, _DualBound]:
        """Solve the relaxation for ``demand``; no values if it needs more than ``num_bins`` or time is out."""
        solver, count = self._solver, self.sizes.size
        rows = np.arange(count, dtype=np.int32)
        solver.changeRowsBounds(count, rows, demand.astype(np.float64), np.full(count, self._infinity))
        best = _DualBound(np.zeros(count, dtype=np.int64), 1, 0)
        while True:
            solver.run()
            solution = solver.getSolution()
            duals = np.maximum(0.0, np.asarray(solution.row_dual, dtype=np.float64))
            scaled = np.floor(duals * _DUAL_SCALE).astype(np.int64)
            largest, found = _price(self.sizes, demand, scaled, self.capacity, 20, _DUAL_SCALE + 10)
            proof = _DualBound(scaled, int(largest), int((scaled * demand).sum()))
            if proof.total * best.largest > best.total * proof.largest:
                best = proof
            if num_bins is not None and best.bound > num_bins:
                return None, best
            if proof.largest <= _DUAL_SCALE + 10 or sum([self._add(pattern) for pattern in found]) == 0:
                break
            if time.perf_counter() > deadline:
                return None, best
        return np.asarray(solution.col_value, dtype=np.float64), best

    def search(self, num_bins: int, deadline: float) -> tuple[list[IntArray] | None, str, bool]:
        """Look for a packing into ``num_bins`` bins: patterns, what found them, whether there is provably none."""
        _, proof = self.relax(self.demand, num_bins, deadline)
        if proof.bound > num_bins:
            return None, "", True
        candidates = self._enumerate(proof, num_bins)
        if candidates is None and (proof.duals == 0).any():
            # Many optimal duals: perturbed demands pick one that gives every length a value.
            candidates = self._enumerate(self._perturbed(1e-3, 0, deadline), num_bins)
        if candidates is not None:
            for number in range(6):  # what one of several duals forbids cannot occur
                other = self._perturbed((1e-3, 1e-2, 0.1)[number % 3], number, deadline)
                slack = num_bins * other.largest - other.total
                candidates = candidates[candidates @ other.duals >= other.largest - slack]
        # Time is shared between random dives, which only find, and the search through the list, which also
        # refutes: the shorter the list, the more the search is worth. (attempt, share of the time, seconds)
        shares: tuple[tuple[str, float, float], ...]
        if candidates is None:
            shares = (("dives", 1.0, math.inf),)
        elif len(candidates) <= _FEW_PATTERNS:
            shares = (("dives", 0.15, 1.5), ("list", 0.9, math.inf), ("dives", 1.0, math.inf))
        else:
            shares = (("dives", 0.67, 20.0), ("list", 1.0, math.inf))
        start = time.perf_counter()
        number = 0
        for attempt, share, seconds in shares:
            end = min(start + share * (deadline - start), start + seconds)
            if attempt == "list" and candidates is not None:
                found, impossible = self._choose(candidates, num_bins, end)
                if found is not None or impossible:
                    return found, "pattern search", impossible
                continue
            while number == 0 or time.perf_counter() < end:
                found = self._dive(num_bins, end, np.random.default_rng(number) if number else None)
                if found is not None:
                    return found, "diving in column generation", False
                number += 1
        return None, "", False

    def _perturbed(self, scale: float, seed: int, deadline: float) -> _DualBound:
        """A nearly optimal dual, optimal for slightly other demands."""
        noise = np.random.default_rng(seed).random(self.sizes.size) - 0.3
        count = self.sizes.size
        rows = np.arange(count, dtype=np.int32)
        lower = self.demand + scale * noise
        self._solver.changeRowsBounds(count, rows, lower, np.full(count, self._infinity))
        while True:
            self._solver.run()
            duals = np.maximum(0.0, np.asarray(self._solver.getSolution().row_dual, dtype=np.float64))
            scaled = np.floor(duals * _DUAL_SCALE).astype(np.int64)
            largest, found = _price(self.sizes, self.demand, scaled, self.capacity, 20, _DUAL_SCALE + 10)
            done = largest <= _DUAL_SCALE + 10 or sum([self._add(pattern) for pattern in found]) == 0
            if done or time.perf_counter() > deadline:
                return _DualBound(scaled, int(largest), int((scaled * self.demand).sum()))

    def _enumerate(self, proof: _DualBound, num_bins: int) -> IntArray | None:
        """Maximal patterns that a packing into ``num_bins`` bins can use; None if there are too many.

        Every packing can be made of maximal patterns that cover the demand, with no smaller Σ y each.
        """
        slack = num_bins * proof.largest - proof.total
        table = _knapsack(self.sizes, self.demand, proof.duals, self.capacity)
        count, patterns = _list_patterns(
            self.sizes, self.demand, proof.duals, self.capacity, table, proof.largest - slack, _MAX_PATTERNS
        )
        return patterns.astype(np.int64) if count <= _MAX_PATTERNS else None

    def _choose(self, patterns: IntArray, num_bins: int, deadline: float) -> tuple[list[IntArray] | None, bool]:
        """Cover the demand with ``num_bins`` of the patterns, or prove that this cannot be done."""
        highspy: Any = importlib.import_module("highspy")
        num_patterns, count = patterns.shape
        if (patterns.max(axis=0, initial=0) == 0).any():
            return None, True
        solver = silent_highs()
        solver.setOptionValue("time_limit", max(0.01, deadline - time.perf_counter()))
        program: Any = highspy.HighsLp()
        program.num_col_, program.num_row_ = num_patterns, count + 1
        program.col_cost_ = np.ones(num_patterns)
        program.col_lower_ = np.zeros(num_patterns)
        most = np.where(patterns > 0, -(-self.demand // np.maximum(1, patterns)), 0).max(axis=1)
        program.col_upper_ = most.astype(np.float64)
        program.row_lower_ = np.append(self.demand.astype(np.float64), -self._infinity)
        program.row_upper_ = np.append(np.full(count, self._infinity), float(num_bins))
        entries = np.column_stack([patterns, np.ones(num_patterns, dtype=np.int64)])
        row, column = np.nonzero(entries)
        program.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        program.a_matrix_.start_ = np.searchsorted(row, np.arange(num_patterns + 1)).astype(np.int32)
        program.a_matrix_.index_ = column.astype(np.int32)
        program.a_matrix_.value_ = entries[row, column].astype(np.float64)
        program.integrality_ = [highspy.HighsVarType.kInteger] * num_patterns
        solver.passModel(program)
        solver.run()
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return None, True
        if status != highspy.HighsModelStatus.kOptimal:
            return None, False
        times = np.rint(np.asarray(solver.getSolution().col_value)).astype(np.int64)
        chosen = [patterns[k] for k in np.flatnonzero(times) for _ in range(int(times[k]))]
        return (chosen, False) if self._covers(chosen, num_bins) else (None, False)

    def _covers(self, chosen: list[IntArray], num_bins: int) -> bool:
        total = np.zeros(self.sizes.size, dtype=np.int64)
        for pattern in chosen:
            if int((pattern * self.sizes).sum()) > self.capacity:
                return False
            total += pattern
        return len(chosen) <= num_bins and bool((total >= self.demand).all())

    def _dive(
        self, num_bins: int, deadline: float, rng: np.random.Generator | None, *, max_depth: int = 6
    ) -> list[IntArray] | None:
        """Fix the pattern with the largest fraction, again and again; near the root also the runner-up, once.

        With ``rng`` the fractions are multiplied by noise, so that repeated dives differ.
        """

        def descend(demand: IntArray, left: int, depth: int, spare: int, avoid: int) -> list[IntArray] | None:
            fixed: list[IntArray] = []
            while True:
                values, _ = self.relax(demand, left, deadline)
                if values is None:
                    return None
                rest = self._heuristic(demand, left)
                if rest is not None:
                    return fixed + rest
                whole = np.floor(values + 1e-6).astype(np.int64)
                for k in np.flatnonzero(whole):
                    for _ in range(int(whole[k])):
                        used = np.minimum(self.columns[k], demand)
                        if left and used.any():
                            fixed.append(used)
                            demand, left = demand - used, left - 1
                if not demand.any():
                    return fixed
                if not left:
                    return None
                fractions = values - whole
                fractions[fractions < 1e-6] = 0.0
                if rng is not None:
                    fractions *= 0.5 + rng.random(fractions.size)
                ranked = np.argsort(-fractions, kind="stable")[: np.count_nonzero(fractions)].tolist()
                ranked = [k for k in ranked if k != avoid and (np.minimum(self.columns[k], demand) > 0).any()]
                if not ranked:
                    return None
                used = np.minimum(self.columns[ranked[0]], demand)
                if depth < max_depth and spare and len(ranked) > 1:
                    below = descend(demand - used, left - 1, depth + 1, spare, -1)
                    if below is not None:
                        return [*fixed, used, *below]
                    if time.perf_counter() > deadline:
                        return None
                    used = np.minimum(self.columns[ranked[1]], demand)
                    below = descend(demand - used, left - 1, max_depth, 0, ranked[0])
                    return None if below is None else [*fixed, used, *below]
                fixed.append(used)
                demand, left, avoid = demand - used, left - 1, -1

        found = descend(self.demand.copy(), num_bins, 0, 0 if rng is None else 1, -1)
        return found if found is not None and self._covers(found, num_bins) else None

    def assign(self, chosen: Iterable[IntArray], lengths: IntArray) -> IntArray:
        """Bin of each item for patterns that cover the demand; surplus places stay empty."""
        items_of_type = [np.flatnonzero(lengths == size).tolist()[::-1] for size in self.sizes]
        bin_of_item = np.full(lengths.size, -1, dtype=np.int64)
        for number, pattern in enumerate(chosen):
            for kind in np.flatnonzero(pattern).tolist():
                waiting = items_of_type[kind]
                for _ in range(min(int(pattern[kind]), len(waiting))):
                    bin_of_item[waiting.pop()] = number
        used = np.unique(bin_of_item)
        return np.searchsorted(used, bin_of_item).astype(np.int64)


@njit(cache=True, nogil=True)
def _knapsack(sizes: IntArray, demand: IntArray, value: IntArray, capacity: int) -> IntArray:
    """Bounded knapsack: table[j, c] is the largest value of types j, j+1, … within c tokens."""
    count = sizes.size
    table = np.zeros((count + 1, capacity + 1), np.int64)
    for j in range(count - 1, -1, -1):
        table[j, :] = table[j + 1, :]
        if value[j] <= 0:
            continue
        for _ in range(min(demand[j], capacity // sizes[j])):
            changed = False
            for c in range(capacity, sizes[j] - 1, -1):
                candidate = table[j, c - sizes[j]] + value[j]
                if candidate > table[j, c]:
                    table[j, c] = candidate
                    changed = True
            if not changed:
                break
    return table


@njit(cache=True, nogil=True)
def _price(
    sizes: IntArray, demand: IntArray, value: IntArray, capacity: int, max_patterns: int, threshold: int
) -> tuple[int, IntArray]:
    """Value of the best pattern; that pattern, and for other items the best pattern with none smaller."""
    count = sizes.size
    # The table runs over the types from the smallest to the largest, so that table[j] covers the larger ones.
    table = _knapsack(sizes[::-1].copy(), demand[::-1].copy(), value[::-1].copy(), capacity)[::-1]
    ending = np.full(count, -1, np.int64)
    for j in range(count):
        if value[j] > 0 and demand[j] > 0:
            ending[j] = value[j] + table[j, capacity - sizes[j]]
    patterns = np.zeros((max_patterns, count), np.int64)
    found = 0
    for last in np.argsort(-ending, kind="mergesort"):
        if found and (found >= max_patterns or ending[last] <= threshold):
            break
        room = capacity
        start = count - 1
        if found:
            patterns[found, last] = 1
            room -= sizes[last]
            start = last - 1
        for j in range(start, -1, -1):
            if table[j + 1, room] == table[j, room]:
                continue
            k = 1
            while table[j, room - k * sizes[j]] + k * value[j] != table[j + 1, room]:
                k += 1
            patterns[found, j] = k
            room -= k * sizes[j]
        found += 1
    return table[count, capacity], patterns[:found]


@njit(cache=True, nogil=True)
def _list_patterns(
    sizes: IntArray, demand: IntArray, value: IntArray, capacity: int, table: IntArray, least: int, max_patterns: int
) -> tuple[int, npt.NDArray[np.int16]]:
    """Maximal patterns of value ≥ ``least`` by depth-first search, cut by the knapsack table."""
    count = sizes.size
    patterns = np.zeros((max_patterns, count), np.int16)
    found = 0
    chosen = np.zeros(count, np.int64)
    entered = np.zeros(count, np.bool_)
    room = capacity
    worth = 0
    depth = 0
    nodes = 0
    while depth >= 0:
        nodes += 1
        if nodes > 50_000_000:
            return max_patterns + 1, patterns
        if depth == count:
            if worth >= least:
                maximal = True
                for j in range(count - 1, -1, -1):
                    if sizes[j] > room:
                        break
                    if chosen[j] < demand[j]:
                        maximal = False
                        break
                if maximal:
                    if found == max_patterns:
                        return max_patterns + 1, patterns
                    for j in range(count):
                        patterns[found, j] = chosen[j]
                    found += 1
            depth -= 1
            continue
        if not entered[depth]:
            entered[depth] = True
            k = min(demand[depth], room // sizes[depth])
            chosen[depth] = k
            room -= k * sizes[depth]
            worth += k * value[depth]
        elif chosen[depth] > 0:
            chosen[depth] -= 1
            room += sizes[depth]
            worth -= value[depth]
        else:
            entered[depth] = False
            depth -= 1
            continue
        if worth + table[depth + 1, room] >= least:
            depth += 1
    return found, patterns[:found]


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
    if num_rows > rows_bound and exact:
        proof = _prove_bins(array, capacity, time.perf_counter() + time_limit, dp_size)
        if -(-proof.num_bins // dp_size) < num_rows:
            num_rows, method = -(-proof.num_bins // dp_size), proof.method
        if -(-proof.bound // dp_size) > rows_bound:
            rows_bound, bound_method = -(-proof.bound // dp_size), proof.bound_method
    return RowCount(num_rows, rows_bound, method, bound_method)
