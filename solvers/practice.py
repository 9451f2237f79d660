"""Baselines from practice: what trainers and inference engines do today, on the one evaluator.

Every packer here is blind to routing, every placer blind to the packing. Each
is named after what it does and says whose behaviour it follows, as read in
that project's sources of August 2026; the algorithms are implemented from
their descriptions. Three things are common to all of them:

* *The grid is fixed.* Practice opens as many bins (microbatches) as it needs;
  here a plan has exactly R rows × D slots. Bin b goes to row b // D and slot
  b % D unless the class says otherwise, the order in which a strided deal
  hands bins to ranks. A packer that needs more bins than cells, or whose bins
  break the capacity, returns no plan and explains that it cannot satisfy R
  rows. That is no proof of infeasibility.
* *Capacity* is checked on aligned lengths; loads and workloads use true ones.
* *Ties* break by (value descending, index ascending), bins by (load, index).
  Nothing is random.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.score import packing_violations
from routepack_opt.solver import Run, Solver

__all__ = [
    "EplbBalanced",
    "FfdDealt",
    "KarmarkarKarp",
    "KkFfdFallback",
    "KkSwap",
    "LeastLoaded",
    "MffdDealt",
    "NextFit",
    "RoundRobin",
    "RoundRobinExperts",
    "SplitSortChunk",
    "balanced_ranks",
    "differencing",
    "first_fit",
    "least_loaded",
    "modified_first_fit_decreasing",
    "next_fit",
]

#: Items of one bin.
Bin = list[int]


def _never() -> bool:
    return False


def _descending(values: npt.NDArray[np.int64]) -> IntArray:
    """Indices by (value descending, index ascending)."""
    order: IntArray = np.argsort(-values, kind="stable").astype(np.int64)
    return order


# --- textbook parts -------------------------------------------------------------------------------------------------


def next_fit(lengths: IntArray, capacity: int) -> list[Bin]:
    """Next fit in the order given: an item that does not fit closes the bin.

    Parameters
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens, each at most ``capacity``.
    capacity : int
        Tokens of a bin.

    Returns
    -------
    list of list of int
        Items of each bin.

    References
    ----------
    D. S. Johnson, "Near-optimal bin packing algorithms", MIT, 1973.
    """
    bins: list[Bin] = []
    room = -1
    for item, length in enumerate(lengths.tolist()):
        if length > room:
            bins.append([])
            room = capacity
        bins[-1].append(item)
        room -= length
    return bins


def first_fit(
    lengths: IntArray, capacity: int, order: Sequence[int] | IntArray, *, stopped: Callable[[], bool] = _never
) -> list[Bin] | None:
    """First fit in a given order; with descending lengths it is first-fit decreasing.

    Parameters
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens, each at most ``capacity``.
    capacity : int
        Tokens of a bin.
    order : sequence of int
        Items in the order they are packed.
    stopped : callable
        Asked now and then; True gives the packing up.

    Returns
    -------
    list of list of int or None
        Items of each bin; None if stopped.

    References
    ----------
    D. S. Johnson et al., "Worst-case performance bounds for simple one-dimensional
    packing algorithms", SIAM J. Comput. 3 (1974), doi:10.1137/0203025.
    """
    bins: list[Bin] = []
    room = np.full(max(1, len(order)), -1, dtype=np.int64)
    for step, item in enumerate(order):
        if step % 256 == 0 and stopped():
            return None
        length = int(lengths[item])
        fits = room[: len(bins)] >= length
        chosen = int(fits.argmax()) if len(bins) else 0
        if not len(bins) or not fits[chosen]:
            chosen = len(bins)
            bins.append([])
            room[chosen] = capacity
        bins[chosen].append(int(item))
        room[chosen] -= length
    return bins


def modified_first_fit_decreasing(
    lengths: IntArray, capacity: int, *, stopped: Callable[[], bool] = _never
) -> list[Bin] | None:
    """Modified first-fit decreasing: pairs medium and small items with the large ones first.

    Items above C/2 (large) open a bin each, in descending order. Forward over
    these bins, the largest medium item (above C/3) that fits is added. Backward
    over those still without a medium item, the smallest small item (above C/6)
    and the largest small item that fits beside it are added where two fit.
    Forward again, every bin is filled with the largest item left that fits. The
    rest is packed first-fit decreasing into new bins.

    Parameters
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens, each at most ``capacity``.
    capacity : int
        Tokens of a bin.
    stopped : callable
        Asked now and then; True gives the packing up.

    Returns
    -------
    list of list of int or None
        Items of each bin; None if stopped.

    References
    ----------
    D. S. Johnson, M. R. Garey, "A 71/60 theorem for bin packing", J. Complexity
    1 (1985) 65-106, doi:10.1016/0885-064X(85)90022-6.
    """
    size = lengths.tolist()
    order = _descending(lengths).tolist()
    large = [item for item in order if 2 * size[item] > capacity]
    medium = [item for item in order if 2 * size[item] <= capacity < 3 * size[item]]
    small = [item for item in order if 3 * size[item] <= capacity < 6 * size[item]]
    bins: list[Bin] = [[item] for item in large]
    room = [capacity - size[item] for item in large]

    def add(index: int, item: int, pool: list[int]) -> None:
        bins[index].append(item)
        room[index] -= size[item]
        pool.remove(item)

    def largest_fitting(pool: list[int], space: int) -> int | None:
        return next((item for item in pool if size[item] <= space), None)

    with_medium = set()
    for index in range(len(bins)):
        found = largest_fitting(medium, room[index])
        if found is not None:
            add(index, found, medium)
            with_medium.add(index)
    for index in reversed(range(len(bins))):
        if index in with_medium or len(small) < 2 or size[small[-1]] + size[small[-2]] > room[index]:
            continue
        add(index, small[-1], small)
        beside = largest_fitting(small, room[index])
        if beside is not None:
            add(index, beside, small)
    left = set(medium) | set(small) | {item for item in order if 6 * size[item] <= capacity}
    rest = [item for item in order if item in left]
    for index in range(len(bins)):
        if stopped():
            return None
        kept = []
        for item in rest:  # descending, so the largest that fits comes first
            if size[item] <= room[index]:
                bins[index].append(item)
                room[index] -= size[item]
            else:
                kept.append(item)
        rest = kept
    tail = first_fit(lengths, capacity, rest, stopped=stopped)
    return None if tail is None else bins + tail


def differencing(
    work: Sequence[int], num_sets: int, *, equal_size: bool = False, stopped: Callable[[], bool] = _never
) -> list[Bin] | None:
    """Largest differencing method of Karmarkar and Karp for any number of sets.

    A state holds ``num_sets`` partial sets. The two states of largest spread
    (largest minus smallest sum) are merged, the largest set of one with the
    smallest of the other, until one is left.

    Parameters
    ----------
    work : sequence of int, length N
        Exact integers of any size.
    num_sets : int
    equal_size : bool
        Start from states of ``num_sets`` consecutive items in sorted order, which
        keeps the numbers of items equal; N must be divisible by ``num_sets``.
    stopped : callable
        Asked now and then; True gives up.

    Returns
    -------
    list of list of int or None
        Items of each set, ascending, sets by (work descending, smallest item);
        empty sets last. None if stopped.

    References
    ----------
    N. Karmarkar, R. M. Karp, "The differencing method of set partitioning",
    UCB/CSD 82/113, 1982; W. Michiels et al., "Performance ratios of the
    Karmarkar-Karp differencing method", J. Comb. Optim. 13 (2007) 19-32.
    """
    # A state: minus its spread, its smallest item, and its non-empty sets (minus sum, smallest item, items), largest
    # first. Smallest items are unique, so that tuples of sets sort without ever comparing lists.
    Sets = list[tuple[int, int, Bin]]
    heap: list[tuple[int, int, Sets]] = []
    items = sorted(range(len(work)), key=lambda item: (work[item], item))
    if equal_size:
        if len(items) % num_sets:
            raise ValueError(f"{len(items)} items do not split into {num_sets} sets of equal size")
        for start in range(0, len(items), num_sets):
            group = items[start : start + num_sets]
            sets: Sets = sorted((-int(work[item]), item, [item]) for item in group)
            heap.append((sets[0][0] - sets[-1][0], min(group), sets))
    else:
        for item in items:
            own = -int(work[item])
            heap.append((own if num_sets > 1 else 0, item, [(own, item, [item])]))
    heapq.heapify(heap)
    while len(heap) > 1:
        if stopped():
            return None
        _, least, first = heapq.heappop(heap)
        _, other, second = heapq.heappop(heap)
        # In a layout of num_sets places the second state lies reversed: its j-th largest at place num_sets - 1 - j.
        overlap = max(0, len(first) + len(second) - num_sets)
        merged = first[: len(first) - overlap]
        for j in range(overlap):
            a = first[len(first) - overlap + j]
            b = second[len(second) - 1 - j]
            merged.append((a[0] + b[0], min(a[1], b[1]), a[2] + b[2]))
        merged += second[: len(second) - overlap]
        merged.sort()
        spread = merged[0][0] - (merged[-1][0] if len(merged) == num_sets else 0)
        heapq.heappush(heap, (spread, min(least, other), merged))
    found = [sorted(part[2]) for part in heap[0][2]] if heap else []
    return found + [[] for _ in range(num_sets - len(found))]


def least_loaded(lengths: IntArray, capacity: int, num_bins: int) -> tuple[list[Bin], int | None]:
    """LPT list scheduling with a capacity: descending items, each into the least-loaded bin.

    Parameters
    ----------
    lengths : ndarray of int64, shape [N]
    capacity : int
        Tokens of a bin. An item that does not fit the least-loaded bin fits none.
    num_bins : int

    Returns
    -------
    bins : list of list of int
    refused : int or None
        First item that fitted nowhere; packing ends there.

    References
    ----------
    R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math.
    17 (1969), doi:10.1137/0117039.
    """
    bins: list[Bin] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in _descending(lengths).tolist():
        load, index = heap[0]
        length = int(lengths[item])
        if load + length > capacity:
            return bins, item
        bins[index].append(item)
        heapq.heapreplace(heap, (load + length, index))
    return bins, None


def balanced_ranks(load: npt.NDArray[np.int64], ep_size: int) -> IntArray:
    """LPT with exact cardinality, every layer on its own: E / P experts a rank.

    Parameters
    ----------
    load : ndarray of int64, shape [L, E]
        Routed tokens of each expert.
    ep_size : int
        P; divides E.

    Returns
    -------
    ndarray of int64, shape [L, E]
        Rank of each expert: descending by load, each to the rank of least load
        that still has a free slot, ties by (load, rank).
    """
    num_layers, num_experts = load.shape
    order = np.argsort(-load, axis=1, kind="stable")
    layers = np.arange(num_layers)
    ranks = np.zeros((num_layers, num_experts), dtype=np.int64)
    rank_load = np.zeros((num_layers, ep_size), dtype=np.int64)
    free = np.full((num_layers, ep_size), num_experts // ep_size, dtype=np.int64)
    full = np.iinfo(np.int64).max
    for step in range(num_experts):
        expert = order[:, step]
        rank = np.where(free > 0, rank_load, full).argmin(axis=1)
        ranks[layers, expert] = rank
        rank_load[layers, rank] += load[layers, expert]
        free[layers, rank] -= 1
    return ranks


# --- from bins to the grid ------------------------------------------------------------------------------------------


def _cannot(run: Run, name: str, problem: Problem, reason: str) -> None:
    run.explain(
        f"{name} cannot satisfy R = {problem.num_rows} rows x D = {problem.dp_size} slots "
        f"({problem.num_cells} cells of {problem.capacity} tokens): {reason}; more rows or another packer may"
    )


def _out_of_time(run: Run, name: str) -> None:
    run.explain(f"{name} was stopped before it had packed every sample")


def _packing(problem: Problem, row: IntArray, slot: IntArray, run: Run, name: str) -> Packing | None:
    """The packing, or None with the reason where it breaks a rule of the problem."""
    packing = Packing.from_arrays(row, slot)
    found = packing_violations(problem, packing)
    if not found:
        return packing
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    _cannot(run, name, problem, found[0] + more)
    return None


def _deal(problem: Problem, bins: Sequence[Bin], run: Run, name: str, *, by_tokens: bool = False) -> Packing | None:
    """Deal bin b to row b // D and slot b % D; with ``by_tokens`` each slot runs its bins fullest first."""
    if len(bins) > problem.num_cells:
        _cannot(run, name, problem, f"it opens {len(bins)} bins")
        return None
    row = np.zeros(problem.num_samples, dtype=np.int64)
    slot = np.zeros(problem.num_samples, dtype=np.int64)
    for dp_slot in range(problem.dp_size):
        mine = list(bins[dp_slot :: problem.dp_size])
        if by_tokens:
            mine.sort(key=lambda items: -int(problem.lengths[items].sum()))
        for r, items in enumerate(mine):
            row[items] = r
            slot[items] = dp_slot
    return _packing(problem, row, slot, run, name)


def _split_off(bins: list[Bin], target: int) -> None:
    """Reach ``target`` bins: the last sample of the bin with the most samples opens a new one, again and again."""
    heap = [(-len(items), index) for index, items in enumerate(bins)]
    heapq.heapify(heap)
    while len(bins) < target and heap and -heap[0][0] > 1:
        _, index = heap[0]
        bins.append([bins[index].pop()])
        heapq.heapreplace(heap, (-len(bins[index]), index))


def _split_heaviest(bins: list[Bin], work: Sequence[int], target: int) -> None:
    """Reach ``target`` bins: the costliest bin that can be split is split in two by LPT on ``work``."""
    cost = [sum(work[item] for item in items) for items in bins]
    heap = [(-cost[index], index) for index, items in enumerate(bins) if len(items) > 1]
    heapq.heapify(heap)
    while len(bins) < target and heap:
        _, index = heapq.heappop(heap)
        halves: tuple[Bin, Bin] = ([], [])
        sums = [0, 0]
        for item in sorted(bins[index], key=lambda item: (-work[item], item)):
            side = 0 if sums[0] <= sums[1] else 1
            halves[side].append(item)
            sums[side] += work[item]
        if not halves[1]:  # all work sits in items of no work: split by number
            halves = (halves[0][:-1], halves[0][-1:])
        bins[index] = halves[0]
        bins.append(halves[1])
        for where, half in ((index, 0), (len(bins) - 1, 1)):
            if len(halves[half]) > 1:
                heapq.heappush(heap, (-sum(work[item] for item in halves[half]), where))


def _deal_rounded_up(
    problem: Problem, bins: list[Bin] | None, run: Run, name: str, *, by_tokens: bool = False
) -> Packing | None:
    """Deal bins after rounding their number up as practice does, to a multiple of D; None are bins that were stopped.

    Every cell gets a bin where none may be empty. To reach the number, the last
    sample of the bin with the most samples opens a new one, again and again.
    """
    if bins is None:
        _out_of_time(run, name)
        return None
    if len(bins) <= problem.num_cells:  # else dealing says what is wrong
        _split_off(bins, _bins_wanted(problem, len(bins)))
    return _deal(problem, bins, run, name, by_tokens=by_tokens)


def _bins_wanted(problem: Problem, num_bins: int) -> int:
    if problem.min_samples_per_cell:
        return problem.num_cells
    return -(-num_bins // problem.dp_size) * problem.dp_size


def _first_fit_decreasing(problem: Problem, run: Run) -> list[Bin] | None:
    lengths = problem.aligned_lengths
    return first_fit(lengths, problem.capacity, _descending(lengths), stopped=run.stopped)


def _unequal(problem: Problem, why: str) -> str | None:
    return f"equal_samples_per_slot: {why}" if problem.equal_samples_per_slot else None


def _mean_work(problem: Problem) -> list[int]:
    """Work of each sample if experts were perfectly balanced, scaled to integers whose sum is below 2⁶².

    Σ_s attention work · P + expert unit · K · L · M_i: what a cost model that knows the
    architecture but no routing would charge.
    """
    expert = problem.expert_unit * problem.top_k * problem.num_layers
    attention = problem.attention_work.sum(axis=0, dtype=np.int64).tolist() or [0] * problem.num_samples
    routed = problem.batch.routed_tokens.tolist()
    work = [problem.ep_size * a + expert * m for a, m in zip(attention, routed, strict=True)]
    excess = max(0, sum(work).bit_length() - 62)
    return [w >> excess for w in work]


def _flag(faults: Faults, name: str, value: object) -> None:
    if not isinstance(value, bool):
        faults.add(f"{name} is {value!r}; it must be True or False")


def _count(faults: Faults, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        faults.add(f"{name} is {value!r}; it must be an integer")
    elif value < 0:
        faults.add(f"{name} is {value}; it must be at least 0")


# --- placers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundRobinExperts(Solver):
    """Expert e on EP rank e mod P, in every layer, whatever the load.

    The ``round_robin`` placement strategy of vLLM (vllm-project/vllm#23745); it
    breaks up runs of hot neighbours and knows nothing else.
    """

    name: ClassVar[str] = "round_robin_experts"

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Place experts; the packing does not matter."""
        del packing, run
        ranks = np.arange(problem.num_experts, dtype=np.int64) % problem.ep_size
        return Placement.from_rank_of_expert(
            np.broadcast_to(ranks, (problem.num_layers, problem.num_experts)), ep_size=problem.ep_size
        )


@dataclass(frozen=True)
class EplbBalanced(Solver):
    """LPT with exact cardinality on the window load, as EPLB packs experts onto GPUs.

    ``balanced_packing`` of deepseek-ai/EPLB (also in vLLM and SGLang) without
    replicas and with one group and one node: experts by descending load, each to
    the least-loaded rank with a free slot. Deviation: loads stay int64 and ties
    break by index, where EPLB sorts float32 weights unstably. A packing handed in
    does not change the result: EPLB sees one aggregate weight an expert.
    """

    name: ClassVar[str] = "eplb_balanced"

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Place experts for the window load."""
        del packing, run
        ranks = balanced_ranks(problem.batch.expert_load(), problem.ep_size)
        return Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)


# --- packers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundRobin(Solver):
    """Samples to DP slots in turn; inside a slot first-fit in arrival order into its rows.

    What a strided sampler with token-capped microbatches does (the default of
    data-parallel trainers without balancing, for instance slime's strided deal).
    At a tight number of rows the tokens of a slot rarely fit by chance.
    """

    name: ClassVar[str] = "round_robin"

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        row = np.zeros(problem.num_samples, dtype=np.int64)
        slot = np.arange(problem.num_samples, dtype=np.int64) % problem.dp_size
        for dp_slot in range(problem.dp_size):
            mine = np.flatnonzero(slot == dp_slot)
            bins = first_fit(problem.aligned_lengths, problem.capacity, mine, stopped=run.stopped)
            if bins is None:
                _out_of_time(run, self.name)
                return None
            if len(bins) > problem.num_rows:
                _cannot(run, self.name, problem, f"the samples of slot {dp_slot} need {len(bins)} rows")
                return None
            if problem.min_samples_per_cell:
                _split_off(bins, problem.num_rows)
            for r, items in enumerate(bins):
                row[items] = r
        return _packing(problem, row, slot, run, self.name)


class _BinDealer(Solver):
    """Fills bins and deals them to slots, however many samples they hold."""

    def unsupported(self, problem: Problem) -> str | None:
        """Refuses equal numbers of samples on every slot."""
        return _unequal(problem, "it deals bins to slots, however many samples they hold")


@dataclass(frozen=True)
class NextFit(_BinDealer):
    """Fill microbatches in arrival order, deal them to slots in order.

    ``fit="next"`` is next fit, as Megatron-LM's ``DpBalancedScheduler``
    (``dp_balanced``) packs; ``fit="first"`` looks back at every open bin, as
    slime's and miles' schedule does. To reach a multiple of D bins, the last sample of
    the bin with the most samples opens a new one (Megatron-LM takes samples off
    the last bins and asserts when they have none to give).
    """

    name: ClassVar[str] = "next_fit"
    fit: str = "next"

    def __post_init__(self) -> None:
        faults = Faults()
        if self.fit not in ("next", "first"):
            faults.add(f"fit is {self.fit!r}; it must be 'next' or 'first'")
        faults.raise_if_any(self.name)

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        lengths = problem.aligned_lengths
        bins: list[Bin] | None
        if self.fit == "next":
            bins = next_fit(lengths, problem.capacity)
        else:
            bins = first_fit(lengths, problem.capacity, range(problem.num_samples), stopped=run.stopped)
        return _deal_rounded_up(problem, bins, run, self.name)


@dataclass(frozen=True)
class _DecreasingDealer(_BinDealer):
    """NVIDIA NeMo-RL's packers, which differ in how they fill bins.

    Bins b, b + D, b + 2D … go to slot b; to reach a multiple of D, the last sample
    of the bin with the most samples opens a new bin.
    """

    largest_first: bool = False

    def __post_init__(self) -> None:
        faults = Faults()
        _flag(faults, "largest_first", self.largest_first)
        faults.raise_if_any(self.name)

    def _bins(self, problem: Problem, run: Run) -> list[Bin] | None:
        raise NotImplementedError

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        return _deal_rounded_up(problem, self._bins(problem, run), run, self.name, by_tokens=self.largest_first)


@dataclass(frozen=True)
class FfdDealt(_DecreasingDealer):
    """First-fit decreasing into the fewest bins it finds, bins dealt to slots in turn.

    ``first_fit_decreasing`` of NVIDIA NeMo-RL: bins b, b + D, b + 2D … go to slot
    b; to reach a multiple of D, the last sample of the bin with the most samples
    opens a new bin. ``largest_first`` makes every slot run its fullest bins first
    (NeMo-RL's ``microbatch_order="largest_first"``), so that a row holds bins alike.
    """

    name: ClassVar[str] = "ffd_dealt"

    def _bins(self, problem: Problem, run: Run) -> list[Bin] | None:
        return _first_fit_decreasing(problem, run)


@dataclass(frozen=True)
class MffdDealt(_DecreasingDealer):
    """Modified first-fit decreasing, bins dealt to slots in turn.

    ``modified_first_fit_decreasing`` of NVIDIA NeMo-RL (the size classes of
    Johnson and Garey), dealt and rounded up as :class:`FfdDealt` does.
    """

    name: ClassVar[str] = "mffd_dealt"

    def _bins(self, problem: Problem, run: Run) -> list[Bin] | None:
        return modified_first_fit_decreasing(problem.aligned_lengths, problem.capacity, stopped=run.stopped)


@dataclass(frozen=True)
class KarmarkarKarp(Solver):
    """Karmarkar–Karp on 24576·t + t², first over slots, then over the rows of each slot.

    verl's two stages: ``_balance_batch`` splits the batch over DP ranks
    (``equal_size=True`` there, free-size by default here, since N need not be
    divisible by D), ``rearrange_micro_batches`` splits every rank's samples into
    as many free-size microbatches as rows and orders them from both ends inwards
    by workload (costliest in the middle), the same way on every rank. Neither
    stage knows a token limit, so at a tight number of rows the result usually
    breaks the capacity (verl-project/verl#7553, #6735): then there is no plan,
    and the reason names the cells.

    Parameters
    ----------
    equal_size : bool
        Equal numbers of samples on every slot; N must be divisible by D.
    repair : bool
        Mend broken capacities by the relocations and swaps that lower the excess
        most. Not part of the practice followed: the result says how many moves it took.
    linear_work : int
        Workload of a sample is ``linear_work`` · t + t².
    """

    name: ClassVar[str] = "karmarkar_karp"
    equal_size: bool = False
    repair: bool = False
    linear_work: int = 24576

    def __post_init__(self) -> None:
        faults = Faults()
        _flag(faults, "equal_size", self.equal_size)
        _flag(faults, "repair", self.repair)
        _count(faults, "linear_work", self.linear_work)
        faults.raise_if_any(self.name)

    def unsupported(self, problem: Problem) -> str | None:
        """Refuses what the two variants cannot keep."""
        if self.equal_size and problem.num_samples % problem.dp_size:
            return (
                f"equal_size=True needs {problem.num_samples} samples divisible by dp_size {problem.dp_size}; "
                "equal_size=False does not"
            )
        if not self.equal_size:
            return _unequal(problem, "free-size partitions differ in their number of samples; use equal_size=True")
        return None

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        work = [self.linear_work * t + t * t for t in problem.lengths.tolist()]
        parts = differencing(work, problem.dp_size, equal_size=self.equal_size, stopped=run.stopped)
        row = np.zeros(problem.num_samples, dtype=np.int64)
        slot = np.zeros(problem.num_samples, dtype=np.int64)
        # Sets come costliest first: every other one ascending, the rest descending puts small ones at both ends.
        position = [*reversed(range(0, problem.num_rows, 2)), *range(1, problem.num_rows, 2)]
        for dp_slot, part in enumerate(parts or []):
            if run.stopped():
                parts = None
                break
            inner = differencing([work[item] for item in part], problem.num_rows, stopped=run.stopped)
            if inner is None:
                parts = None
                break
            slot[part] = dp_slot
            for r, source in enumerate(position):
                row[[part[k] for k in inner[source]]] = r
        if parts is None:
            _out_of_time(run, self.name)
            return None
        if not self.repair:
            return _packing(problem, row, slot, run, self.name)
        cells = row * problem.dp_size + slot
        before = np.bincount(cells, weights=problem.aligned_lengths, minlength=problem.num_cells)
        broken = int((before > problem.capacity).sum())
        mended = _repair(problem, cells, within_slot=problem.equal_samples_per_slot, stopped=run.stopped)
        if run.stopped():
            _out_of_time(run, self.name)
            return None
        packing = _packing(
            problem, cells // problem.dp_size, cells % problem.dp_size, run, f"{self.name} after {mended} repair moves"
        )
        if packing is not None and mended:
            run.explain(
                f"{self.name} broke the capacity of {broken} of {problem.num_cells} cells; mended by {mended} moves"
            )
        return packing


def _repair(problem: Problem, cells: IntArray, *, within_slot: bool, stopped: Callable[[], bool]) -> int:
    """Lower the tokens above capacity by relocations and swaps, fullest cell and best move first; changes ``cells``.

    Every move lowers Σ_cells max(0, tokens − C) + (empty cells that must not be
    empty) · C, so it ends. Returns the number of moves.
    """
    length, capacity, num_cells = problem.aligned_lengths, problem.capacity, problem.num_cells
    used = np.zeros(num_cells, dtype=np.int64)
    np.add.at(used, cells, length)
    held = np.bincount(cells, minlength=num_cells)
    cell_index = np.arange(num_cells)
    moves = 0
    while not stopped():
        over = np.flatnonzero(used > capacity)
        empty = np.flatnonzero(held == 0) if problem.min_samples_per_cell else over[:0]
        if not len(over) and not len(empty):
            break
        best: tuple[int, int, int, int] | None = None
        sources = over[np.argsort(-used[over], kind="stable")] if len(over) else np.flatnonzero(held > 1)
        for source in sources.tolist():
            if best is not None or stopped():
                break
            for item in np.flatnonzero(cells == source).tolist():
                reach = cell_index != source
                if within_slot:
                    reach &= cell_index % problem.dp_size == source % problem.dp_size
                relief = max(0, int(used[source]) - capacity)
                # Relocation.
                after = max(0, int(used[source] - length[item]) - capacity) + np.maximum(
                    0, used + length[item] - capacity
                )
                gain = relief + np.maximum(0, used - capacity) - after
                if problem.min_samples_per_cell:
                    gain = gain + np.where(held == 0, capacity, 0) - (capacity if held[source] == 1 else 0)
                gain = np.where(reach, gain, -1)
                target = int(gain.argmax())
                if gain[target] > 0 and (best is None or gain[target] > best[0]):
                    best = (int(gain[target]), item, target, -1)
                # Swap with a shorter item elsewhere.
                change = length - length[item]
                there = cells
                swapped = np.maximum(0, used[source] + change - capacity) + np.maximum(
                    0, used[there] - change - capacity
                )
                gain = relief + np.maximum(0, used[there] - capacity) - swapped
                gain = np.where((change < 0) & reach[there], gain, -1)
                other = int(gain.argmax())
                if gain[other] > 0 and (best is None or gain[other] > best[0]):
                    best = (int(gain[other]), item, int(there[other]), other)
        if best is None:
            break
        _, item, target, other = best
        source = int(cells[item])
        used[source] -= length[item]
        used[target] += length[item]
        held[source] -= 1
        held[target] += 1
        cells[item] = target
        if other >= 0:
            used[target] -= length[other]
            used[source] += length[other]
            held[target] -= 1
            held[source] += 1
            cells[other] = source
        moves += 1
    return moves


@dataclass(frozen=True)
class KkFfdFallback(_BinDealer):
    """Karmarkar–Karp on token lengths over all cells; first-fit decreasing where it breaks a capacity.

    ``kk_allocate`` of AReaL: balanced groups while they keep the token limit, FFD
    otherwise. The result says when the fallback was taken.
    """

    name: ClassVar[str] = "kk_ffd_fallback"

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        lengths = problem.aligned_lengths
        groups = differencing(lengths.tolist(), problem.num_cells, stopped=run.stopped)
        if groups is None:
            _out_of_time(run, self.name)
            return None
        broken = sum(int(lengths[items].sum()) > problem.capacity for items in groups)
        if not broken:
            return _deal(problem, groups, run, self.name)
        packing = _deal_rounded_up(problem, _first_fit_decreasing(problem, run), run, self.name)
        if packing is not None:
            run.explain(
                f"{self.name} fell back to first-fit decreasing: Karmarkar-Karp broke the capacity of {broken} of "
                f"{problem.num_cells} cells"
            )
        return packing


@dataclass(frozen=True)
class SplitSortChunk(_BinDealer):
    """FFD, split the costliest bins until every cell has one, sort by Σt², chunk into rows.

    The batcher proposed in pytorch/torchtitan#3938: bins by first-fit decreasing;
    while cells are left, the bin of largest Σt² is split in two by LPT on t²; bins
    sorted by Σt² descending are cut into rows of D, so that what runs at the same
    time costs alike. The nearest public relative of row-aware packing, for
    attention only.
    """

    name: ClassVar[str] = "split_sort_chunk"

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        bins = _first_fit_decreasing(problem, run)
        if bins is None:
            _out_of_time(run, self.name)
            return None
        squares = [t * t for t in problem.lengths.tolist()]
        _split_heaviest(bins, squares, problem.num_cells)
        bins.sort(key=lambda items: -sum(squares[item] for item in items))
        return _deal(problem, bins, run, self.name)


@dataclass(frozen=True)
class KkSwap(_BinDealer):
    """FFD, split to a multiple of D, equal-size Karmarkar–Karp over slots, then best swaps of bins.

    prime-rl's pipeline: first-fit decreasing; the costliest bin is split (two-way
    LPT) until the bins divide by D; equal-size Karmarkar–Karp gives every slot the
    same number of bins; then the swap of two bins that lowers (largest slot cost,
    spread) most is made, until none does or ``max_swaps`` is reached. A bin costs
    what the cost model charges with perfectly balanced experts (prime-rl derives
    its linear and quadratic coefficients from the model configuration). Deviations:
    prime-rl's refinement has no budget; every slot runs its bins costliest first.

    Parameters
    ----------
    max_swaps : int
        Budget of swaps; 0 switches the refinement off.
    """

    name: ClassVar[str] = "kk_swap"
    max_swaps: int = 1000

    def __post_init__(self) -> None:
        faults = Faults()
        _count(faults, "max_swaps", self.max_swaps)
        faults.raise_if_any(self.name)

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        bins = _first_fit_decreasing(problem, run)
        if bins is None:
            _out_of_time(run, self.name)
            return None
        if len(bins) > problem.num_cells:
            _cannot(run, self.name, problem, f"first-fit decreasing opens {len(bins)} bins")
            return None
        work = _mean_work(problem)
        _split_heaviest(bins, work, _bins_wanted(problem, len(bins)))
        wanted = _bins_wanted(problem, len(bins))
        bins.extend([] for _ in range(wanted - len(bins)))  # fewer samples than bins: prime-rl adds empty ones
        cost = [sum(work[item] for item in items) for items in bins]
        slots = differencing(cost, problem.dp_size, equal_size=True, stopped=run.stopped)
        if slots is None:
            _out_of_time(run, self.name)
            return None
        _swap_bins(slots, cost, max_swaps=self.max_swaps, stopped=run.stopped)
        row = np.zeros(problem.num_samples, dtype=np.int64)
        slot = np.zeros(problem.num_samples, dtype=np.int64)
        for dp_slot, mine in enumerate(slots):
            for r, index in enumerate(sorted(mine, key=lambda index: (-cost[index], index))):
                row[bins[index]] = r
                slot[bins[index]] = dp_slot
        return _packing(problem, row, slot, run, self.name)


def _swap_bins(slots: list[Bin], cost: Sequence[int], *, max_swaps: int, stopped: Callable[[], bool]) -> int:
    """Swap bins between the costliest slot and others while (largest, largest − smallest) falls; count the swaps.

    All slots hold equally many bins. The best swap is made, the first of equal
    ones by (other slot, bin of the costliest, bin of the other).
    """
    bins = np.array(slots, dtype=np.int64)  # [D, bins a slot]
    costs = np.array(cost, dtype=np.int64)[bins]
    total = costs.sum(axis=1)
    num_slots = len(slots)
    swaps = 0
    while swaps < max_swaps and num_slots > 1 and bins.shape[1] and not stopped():
        high = int(total.argmax())
        current = (int(total[high]), int(total[high] - total.min()))
        # Largest and smallest total among the slots that a swap of high and low leaves alone.
        rest = np.delete(np.arange(num_slots), high)
        others = total[rest]
        order = np.argsort(others, kind="stable")
        top = np.full(num_slots - 1, others[order[-1]])
        bottom = np.full(num_slots - 1, others[order[0]])
        alone = num_slots == 2
        top[order[-1]] = -1 if alone else others[order[-2]]
        bottom[order[0]] = total[high] if alone else others[order[1]]
        shift = costs[high][None, :, None] - costs[rest][:, None, :]  # [others, bins of high, bins of other]
        one, two = total[high] - shift, others[:, None, None] + shift
        largest = np.maximum(np.maximum(one, two), top[:, None, None])
        spread = largest - np.minimum(np.minimum(one, two), bottom[:, None, None])
        least = largest.min()
        flat = np.where(largest == least, spread, np.iinfo(np.int64).max).ravel()
        best = int(flat.argmin())
        if (int(least), int(flat[best])) >= current:
            break
        low, a, b = (int(k) for k in np.unravel_index(best, shift.shape))
        low = int(rest[low])
        for table in (bins, costs):
            table[high, a], table[low, b] = table[low, b], table[high, a]
        total = costs.sum(axis=1)
        swaps += 1
    slots[:] = bins.tolist()
    return swaps


@dataclass(frozen=True)
class LeastLoaded(_BinDealer):
    """Descending samples, each into the cell with the fewest tokens (LPT).

    SkyRL's balanced bin packing, over all R · D cells at once. Deviation: SkyRL's
    limit is soft (an oversize sample gets a bin of its own); here a sample that
    does not fit the emptiest cell ends the packing without a plan.
    """

    name: ClassVar[str] = "least_loaded"

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples; the placement does not matter."""
        del placement
        bins, refused = least_loaded(problem.aligned_lengths, problem.capacity, problem.num_cells)
        if refused is not None:
            _cannot(
                run,
                self.name,
                problem,
                f"{problem.batch.sample_name(refused)} ({problem.aligned_lengths[refused]} tokens) does not fit the "
                "emptiest cell",
            )
            return None
        return _deal(problem, bins, run, self.name)
