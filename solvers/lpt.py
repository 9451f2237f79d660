"""Expert placement for the window load: contiguous, and longest processing time first with refinement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from math import comb
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, integer_array, read_only
from routepack_opt.bounds import placement_bound, window_load
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.migration import relabel
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.solver import AGGREGATE_LEVEL, Run, Solver

__all__ = [
    "Contiguous",
    "Lpt",
    "checked_load",
    "claimed_placement",
    "kicked_ranks",
    "lpt_ranks",
    "rank_loads",
    "refined_ranks",
]

#: Sums of expert subsets kept per layer while refining; larger exchanges are left out where this is exceeded.
_MAX_SUMS = 4_000_000


def checked_load(load: npt.ArrayLike, ep_size: int) -> IntArray:
    """Validate expert loads, int64 [L, E].

    Raises
    ------
    InvalidInputError
        If E is not divisible by P, a load is negative, or a layer's total passes 2⁶².
    """
    faults = Faults()
    array = integer_array(load, "load", faults, ndim=2, element="layer")
    if isinstance(ep_size, bool) or not isinstance(ep_size, int | np.integer) or ep_size < 1:
        faults.add(f"ep_size is {ep_size!r}; it must be an integer of at least 1")
    faults.raise_if_any("expert load")
    assert array is not None
    if array.shape[1] % ep_size:
        faults.add(f"{array.shape[1]} experts are not divisible by ep_size {ep_size}")
    for layer, expert in np.argwhere(array < 0)[:5]:
        faults.add(f"layer {layer}, expert {expert}: load {array[layer, expert]} is negative")
    for layer in np.flatnonzero(array.sum(axis=1, dtype=np.float64) >= 2.0**62)[:5]:
        faults.add(f"layer {layer}: the total load reaches 2^62")
    faults.raise_if_any("expert load")
    return array


def rank_loads(load: IntArray, rank_of_expert: IntArray, ep_size: int) -> IntArray:
    """Load of each EP rank, int64 [L, P]."""
    num_layers = load.shape[0]
    total = np.zeros((num_layers, ep_size), dtype=np.int64)
    np.add.at(total, (np.arange(num_layers)[:, None], rank_of_expert), load)
    return total


def lpt_ranks(load: npt.ArrayLike, ep_size: int, *, refine: bool = True, max_exchange: int = 2) -> IntArray:
    """Balance expert loads over EP ranks, E / P experts a rank, every layer on its own.

    Longest processing time first: experts by (load descending, index ascending),
    each to the least loaded rank (lowest number on ties) that has a free slot.

    Parameters
    ----------
    load : array-like of int, shape [L, E]
        Load of each expert, at least 0.
    ep_size : int
        P, a divisor of E.
    refine : bool
        Whether to apply :func:`refined_ranks` afterwards.
    max_exchange : int
        See :func:`refined_ranks`; without effect unless ``refine``.

    Returns
    -------
    rank_of_expert : ndarray of int64, shape [L, E]

    Raises
    ------
    InvalidInputError
        If E is not divisible by P or a load is negative.

    References
    ----------
    R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl.
    Math. 17 (1969) 416-429, doi:10.1137/0117039; the cardinality-constrained
    version is analysed by H. Kellerer, V. Kotov, Inf. Process. Lett. 111
    (2011) 823-828, doi:10.1016/j.ipl.2011.05.021.
    """
    array = checked_load(load, ep_size)
    if type(max_exchange) is not int or max_exchange not in (1, 2, 3, 4):
        raise InvalidInputError(f"max_exchange is {max_exchange!r}; it must be 1, 2, 3 or 4", context="lpt")
    order = np.argsort(-array, axis=1, kind="stable").astype(np.int64)
    ranks = np.zeros_like(array)
    _lpt(array, order, int(ep_size), ranks)
    if refine:
        _refine_valid(array, ranks, int(ep_size), max_exchange)
    return ranks


@njit(cache=True, nogil=True)
def _lpt(load: IntArray, order: IntArray, ep_size: int, ranks: IntArray) -> None:
    num_layers, num_experts = load.shape
    per_rank = num_experts // ep_size
    for layer in range(num_layers):
        total = np.zeros(ep_size, np.int64)
        held = np.zeros(ep_size, np.int64)
        for position in range(num_experts):
            expert = order[layer, position]
            chosen = -1
            for p in range(ep_size):
                if held[p] < per_rank and (chosen < 0 or total[p] < total[chosen]):
                    chosen = p
            ranks[layer, expert] = chosen
            total[chosen] += load[layer, expert]
            held[chosen] += 1


def refined_ranks(
    load: npt.ArrayLike, rank_of_expert: npt.ArrayLike, ep_size: int, *, max_exchange: int = 2
) -> IntArray:
    """Improve a placement by exchanging as many experts between two ranks as it takes to balance them.

    Per layer, until nothing improves: the most loaded rank exchanges k experts
    for k experts of another rank, k = 1, then 2, … ``max_exchange``; when that
    fails, or the most loaded rank meets
    :func:`routepack_opt.bounds.placement_bound`, the least loaded rank is
    raised by exchanging single experts. Partners are tried from the other end
    of the load order, the first exchange that improves is made, and of two
    ranks' exchanges the one that brings their loads closest together, found by
    walking their sorted k-subset sums against each other. Both ranks end
    strictly between their former loads: every exchange lowers the sum of
    squared loads, and the most loaded rank never grows.

    Parameters
    ----------
    load : array-like of int, shape [L, E]
    rank_of_expert : array-like of int, shape [L, E]
        A placement with E / P experts on every rank.
    ep_size : int
        P.
    max_exchange : int
        Largest k, 1–4. Sizes whose subset sums would not fit in memory are left out.

    Returns
    -------
    rank_of_expert : ndarray of int64, shape [L, E]

    Raises
    ------
    InvalidInputError
        If the loads or the placement are invalid, or ``max_exchange`` is outside 1–4.

    References
    ----------
    The exchange neighbourhood is that of P. M. França, M. Gendreau, G. Laporte,
    F. M. Müller, "A composite heuristic for the identical parallel machine
    scheduling problem", Computers & Operations Research 21 (1994) 205-210,
    doi:10.1016/0305-0548(94)90053-1, restricted to equal numbers.
    """
    array = checked_load(load, ep_size)
    faults = Faults()
    ranks = integer_array(rank_of_expert, "rank_of_expert", faults, ndim=2, element="layer")
    if type(max_exchange) is not int or max_exchange not in (1, 2, 3, 4):
        faults.add(f"max_exchange is {max_exchange!r}; it must be 1, 2, 3 or 4")
    faults.raise_if_any("refinement")
    assert ranks is not None
    num_experts = array.shape[1]
    per_rank = num_experts // ep_size
    if ranks.shape != array.shape:
        faults.add(f"rank_of_expert has shape {ranks.shape}, the load {array.shape}")
    elif (ranks < 0).any() or (ranks >= ep_size).any():
        faults.add(f"rank_of_expert holds ranks outside 0..{ep_size - 1}")
    elif num_experts and (np.sort(ranks, axis=1) != np.arange(num_experts) // max(1, per_rank)).any():
        faults.add(f"every rank must own {per_rank} experts of every layer")
    faults.raise_if_any("refinement")
    _refine_valid(array, ranks, int(ep_size), max_exchange)
    return ranks


def _refine_valid(load: IntArray, ranks: IntArray, ep_size: int, max_exchange: int) -> None:
    """Refine ``ranks`` in place; loads and ranks are valid."""
    num_layers, num_experts = load.shape
    if ep_size == 1 or not num_layers or not num_experts:
        return
    starts, members = _subset_tables(num_experts // ep_size, ep_size, max_exchange)
    _refine(load, ranks, placement_bound(load, ep_size), ep_size, starts, members)


def _subset_tables(per_rank: int, ep_size: int, max_exchange: int) -> tuple[IntArray, IntArray]:
    """Positions of every subset of 1, 2, … experts of a rank, and where each size starts."""
    sizes = [1]
    for k in range(2, min(max_exchange, per_rank) + 1):
        if ep_size * sum(comb(per_rank, j) for j in range(1, k + 1)) > _MAX_SUMS:
            break
        sizes.append(k)
    starts = np.cumsum([0, *(comb(per_rank, k) for k in sizes)]).astype(np.int64)
    members = np.full((int(starts[-1]), max(sizes)), -1, dtype=np.int64)
    for k, start in zip(sizes, starts, strict=False):
        subsets = np.fromiter(
            (position for subset in combinations(range(per_rank), k) for position in subset), dtype=np.int64
        )
        members[start : start + comb(per_rank, k), :k] = subsets.reshape(-1, k)
    return starts, members


def kicked_ranks(
    load: npt.ArrayLike,
    rank_of_expert: npt.ArrayLike,
    ep_size: int,
    *,
    kicks: int,
    rng: np.random.Generator,
    max_exchange: int = 2,
    stopped: Callable[[], bool] = lambda: False,
) -> IntArray:
    """Escape from local optima of :func:`refined_ranks`: iterated local search, layer by layer.

    A kick shuffles the experts of the most loaded rank and two others drawn at
    random, and refines these three; it is kept unless the load above the bound,
    summed over them, grew.
    Layers that meet :func:`routepack_opt.bounds.placement_bound` are done.

    Parameters
    ----------
    load, rank_of_expert, ep_size, max_exchange
        See :func:`refined_ranks`.
    kicks : int
        Most kicks of a layer.
    rng : numpy.random.Generator
    stopped : callable
        Asked before every kick; True ends the search.

    Returns
    -------
    rank_of_expert : ndarray of int64, shape [L, E]
        No layer's most loaded rank is above that of the refined input.

    References
    ----------
    H. R. Lourenço, O. C. Martin, T. Stützle, "Iterated local search", Handbook
    of Metaheuristics (2003), doi:10.1007/0-306-48056-5_11.
    """
    ranks = refined_ranks(load, rank_of_expert, ep_size, max_exchange=max_exchange)
    array = checked_load(load, ep_size)
    if ep_size == 1 or not array.size:
        return ranks
    bound = placement_bound(array, ep_size)
    per_rank, num_kicked = array.shape[1] // ep_size, min(3, ep_size)
    starts, members = _subset_tables(per_rank, num_kicked, max_exchange)
    places = np.repeat(np.arange(num_kicked), per_rank)
    for layer in range(array.shape[0]):
        row, limit = array[layer], bound[layer : layer + 1]
        total = rank_loads(row[None], ranks[layer : layer + 1], ep_size)[0]
        best, best_load = ranks[layer].copy(), int(total.max())
        for _ in range(kicks):
            if best_load <= limit[0] or stopped():
                break
            heavy = int(total.argmax())
            others = rng.choice(ep_size - 1, size=num_kicked - 1, replace=False)
            kicked = np.array([heavy, *(others + (others >= heavy))])
            pool = np.flatnonzero(np.isin(ranks[layer], kicked))
            trial = rng.permutation(places)[None]
            _refine(row[None, pool], trial, limit, num_kicked, starts, members)
            reached = rank_loads(row[None, pool], trial, num_kicked)[0]
            excess = np.maximum(0, reached - limit[0]).sum() - np.maximum(0, total[kicked] - limit[0]).sum()
            if excess <= 0:
                ranks[layer, pool] = kicked[trial[0]]
                total[kicked] = reached
                if total.max() < best_load:
                    best, best_load = ranks[layer].copy(), int(total.max())
        ranks[layer] = best
    return ranks


@njit(cache=True, nogil=True)
def _sum_subsets(
    load: IntArray, experts: IntArray, members: IntArray, start: int, stop: int, sums: IntArray, order: IntArray
) -> None:
    """Sums of the subsets start..stop of one rank, ascending (stable), and which subsets they are."""
    run = 32
    for a in range(start, stop):
        value = 0
        for j in range(members.shape[1]):
            if members[a, j] < 0:
                break
            value += load[experts[members[a, j]]]
        # Insertion sort of short runs.
        b = a
        begin = a - (a - start) % run
        while b > begin and sums[b - 1] > value:
            sums[b] = sums[b - 1]
            order[b] = order[b - 1]
            b -= 1
        sums[b] = value
        order[b] = a
    if stop - start <= run:
        return
    # Merge the runs, bottom up. Own code, because compiling NumPy's sort costs eight seconds.
    other_sums = np.empty(stop, np.int64)
    other_order = np.empty(stop, np.int64)
    while run < stop - start:
        for begin in range(start, stop, 2 * run):
            middle = min(begin + run, stop)
            end = min(begin + 2 * run, stop)
            i = begin
            j = middle
            for k in range(begin, end):
                if i < middle and (j >= end or sums[i] <= sums[j]):
                    other_sums[k] = sums[i]
                    other_order[k] = order[i]
                    i += 1
                else:
                    other_sums[k] = sums[j]
                    other_order[k] = order[j]
                    j += 1
        for k in range(start, stop):
            sums[k] = other_sums[k]
            order[k] = other_order[k]
        run *= 2


@njit(cache=True, nogil=True)
def _best_exchange(upper: IntArray, lower: IntArray, difference: int) -> tuple[int, int, int]:
    """Sums that differ by 0 < d < difference, d closest to half of it: d and both positions; 0 if none do."""
    best = difference
    best_upper = -1
    best_lower = -1
    i = 0
    j = 0
    while i < upper.size and j < lower.size:
        excess = 2 * (upper[i] - lower[j]) - difference
        if abs(excess) < best:
            best, best_upper, best_lower = abs(excess), i, j
        too_little = 1 if excess < 0 else 0
        i += too_little
        j += 1 - too_little
    if best_upper < 0:
        return 0, 0, 0
    return upper[best_upper] - lower[best_lower], best_upper, best_lower


@njit(cache=True, nogil=True)
def _refine(
    load: IntArray, ranks: IntArray, bound: IntArray, ep_size: int, starts: IntArray, members: IntArray
) -> None:
    num_layers, num_experts = load.shape
    per_rank = num_experts // ep_size
    num_sizes = starts.size - 1
    experts = np.empty((ep_size, per_rank), np.int64)
    total = np.empty(ep_size, np.int64)
    sums = np.empty((ep_size, members.shape[0]), np.int64)
    order = np.empty((ep_size, members.shape[0]), np.int64)
    fresh = np.zeros((num_sizes, ep_size), np.bool_)
    held = np.empty(ep_size, np.int64)
    by_load = np.empty(ep_size, np.int64)
    for layer in range(num_layers):
        held[:] = 0
        total[:] = 0
        fresh[:] = False
        for expert in range(num_experts):
            p = ranks[layer, expert]
            experts[p, held[p]] = expert
            held[p] += 1
            total[p] += load[layer, expert]
        for p in range(ep_size):  # stable insertion sort by load
            a = p
            while a > 0 and total[by_load[a - 1]] > total[p]:
                by_load[a] = by_load[a - 1]
                a -= 1
            by_load[a] = p
        improved = True
        while improved:
            improved = False
            for attempt in range(num_sizes + 1):
                # Exchanges of 1, 2, … that lower the most loaded rank, then of 1 that raise the least loaded one.
                lowering = attempt < num_sizes
                size = attempt if lowering else 0
                pivot = by_load[ep_size - 1] if lowering else by_load[0]
                if lowering and total[pivot] <= bound[layer]:
                    continue
                first, stop = starts[size], starts[size + 1]
                for position in range(ep_size):
                    other = by_load[position] if lowering else by_load[ep_size - 1 - position]
                    upper, lower = (pivot, other) if lowering else (other, pivot)
                    difference = total[upper] - total[lower]
                    if difference < 2:
                        break
                    for p in (upper, lower):
                        if not fresh[size, p]:
                            _sum_subsets(load[layer], experts[p], members, first, stop, sums[p], order[p])
                            fresh[size, p] = True
                    gain, a, b = _best_exchange(sums[upper, first:stop], sums[lower, first:stop], difference)
                    if gain == 0:
                        continue
                    more = order[upper, first + a]
                    less = order[lower, first + b]
                    for j in range(size + 1):
                        a, b = members[more, j], members[less, j]
                        x, y = experts[upper, a], experts[lower, b]
                        experts[upper, a], experts[lower, b] = y, x
                        ranks[layer, x], ranks[layer, y] = lower, upper
                    total[upper] -= gain
                    total[lower] += gain
                    fresh[:, upper] = False
                    fresh[:, lower] = False
                    # Both loads moved inwards: one pass up and one down restore the order.
                    for a in range(ep_size - 1):
                        if total[by_load[a]] > total[by_load[a + 1]]:
                            by_load[a], by_load[a + 1] = by_load[a + 1], by_load[a]
                    for a in range(ep_size - 2, -1, -1):
                        if total[by_load[a]] > total[by_load[a + 1]]:
                            by_load[a], by_load[a + 1] = by_load[a + 1], by_load[a]
                    improved = True
                    break
                if improved:
                    break


def claimed_placement(problem: Problem, ranks: IntArray, packing: Packing | None, run: Run) -> Placement:
    """Turn ranks into a placement near the previous one, and claim what the combinatorial bound proves.

    Parameters
    ----------
    problem : Problem
    ranks : ndarray of int64, shape [L, E]
    packing : Packing or None
        With a packing nothing is claimed: the window load is not its objective.
    run : Run

    Returns
    -------
    Placement
    """
    placement = Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)
    if run.previous_placement is not None:
        placement = relabel(placement, run.previous_placement)
    if packing is None:
        load = window_load(problem)
        value = int(rank_loads(load, ranks, problem.ep_size).max(axis=1, initial=0).sum()) * problem.expert_unit
        bound = int(placement_bound(load, problem.ep_size).sum()) * problem.expert_unit
        run.claim(
            AGGREGATE_LEVEL, value, bound, proved=value == bound, limit=None if value == bound else Limit.EXHAUSTED
        )
    return placement


@dataclass(frozen=True)
class Contiguous(Solver):
    """Leave experts where they are: expert e on rank e // (E / P)."""

    name: ClassVar[str] = "contiguous"

    def unsupported(self, problem: Problem) -> str | None:
        """Why the component cannot treat ``problem``; None if it can."""
        return _without_routing(problem)

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Return the layout of a trainer without placement; a previous placement does not change it.

        Parameters
        ----------
        problem : Problem
        packing : Packing or None
            Not looked at.
        run : Run
        """
        del packing, run
        return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


@dataclass(frozen=True)
class Lpt(Solver):
    """Longest processing time first on the window load, with cardinality; every layer on its own.

    Parameters
    ----------
    refine : bool
        Exchange experts afterwards between the most (and the least) loaded rank and the others.
    max_exchange : int
        Most experts that change sides in one exchange, 1–4; used by ``refine``.
    kicks : int
        Most kicks of a layer that refinement left above the bound, see :func:`kicked_ranks`;
        needs ``refine``. Worth their time only where the last token counts.

    See Also
    --------
    lpt_ranks, refined_ranks, kicked_ranks : the same on plain arrays.
    """

    refine: bool = True
    max_exchange: int = 2
    kicks: int = 0
    name: ClassVar[str] = "lpt"

    def __post_init__(self) -> None:
        faults = refinement_faults(self.refine, self.max_exchange)
        if isinstance(self.kicks, bool) or not isinstance(self.kicks, int) or self.kicks < 0:
            faults.append(f"kicks is {self.kicks!r}; it must be an integer of at least 0")
        elif self.kicks and self.refine is False:
            faults.append(f"kicks is {self.kicks} with refine=False; kicks refine")
        if faults:
            raise InvalidInputError(faults, context="lpt")

    def unsupported(self, problem: Problem) -> str | None:
        """Why the component cannot treat ``problem``; None if it can."""
        return _without_routing(problem)

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Balance the window load.

        Parameters
        ----------
        problem : Problem
        packing : Packing or None
            Not looked at: this placer balances the window, whatever the blocks.
        run : Run
            With a previous placement, ranks and slots are renamed so that few experts move.
        """
        load = window_load(problem)
        ranks = lpt_ranks(load, problem.ep_size, refine=self.refine, max_exchange=self.max_exchange)
        if self.kicks:
            ranks = kicked_ranks(
                load,
                ranks,
                problem.ep_size,
                kicks=self.kicks,
                rng=run.rng,
                max_exchange=self.max_exchange,
                stopped=run.stopped,
            )
        return claimed_placement(problem, read_only(ranks), packing, run)


def refinement_faults(refine: Any, max_exchange: Any) -> list[str]:
    """Why refinement parameters are invalid."""
    faults = []
    if not isinstance(refine, bool):
        faults.append(f"refine is {refine!r}; it must be True or False")
    if type(max_exchange) is not int or max_exchange not in (1, 2, 3, 4):
        faults.append(f"max_exchange is {max_exchange!r}; it must be 1, 2, 3 or 4")
    return faults


def _without_routing(problem: Problem) -> str | None:
    return None if problem.num_layers else "it has no routing counts, so there are no experts to place"
