"""Packers that build a packing in one pass: the start points of annealing, each usable alone.

All of them fill the fixed R·D cells of a problem, respect capacity on aligned
lengths, and look at nothing but lengths, except :class:`EdpAwarePair`. Where a
rule leaves samples over because the rows are tight, the packing is repaired:
best-fit decreasing first, then the packings that the row count itself rests on
(:func:`routepack_opt.rows.pack_bins`), then best fit in random orders; when all
of them fail the answer is None.

How filled bins are dealt to cells: ``ffd``, and the other rules with
``level=False``, deal bins in the order they were opened, bin b to row b // D and
DP slot b mod D, as trainers do; since samples come in descending order, a row
holds bins with samples of similar lengths. With ``level=True`` bins are sorted
by (attention work descending, tokens descending, bin index) first, and dealt to
the slots in ascending order in even rows and in descending order in odd ones, so
that no shard always gets the costlier ones.
Empty cells are given their least samples afterwards, the shortest ones of
cells that can spare them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt import rows
from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.solver import Run, Solver

__all__ = ["EdpAwarePair", "Ffd", "RandomizedBestFit", "WindowShuffle"]

FloatArray = npt.NDArray[np.float64]

#: Random orders tried before a tight problem is given up.
_RESTARTS = 64


@njit(cache=True, nogil=True)
def _fill(
    order: IntArray, lengths: IntArray, capacity: int, num_bins: int, best: bool, tolerance: int, uniforms: FloatArray
) -> Any:
    """Put samples into bins in the given order; −1 marks what fits nowhere.

    ``best`` false: the first bin with room. True: one of the bins whose room
    left is within ``tolerance`` tokens of the least, chosen by the next uniform
    number.
    """
    bin_of_sample = np.full(lengths.shape[0], -1, dtype=np.int64)
    room = np.full(num_bins, capacity, dtype=np.int64)
    for k in range(order.shape[0]):
        i = order[k]
        chosen = -1
        if not best:
            for cell in range(num_bins):
                if room[cell] >= lengths[i]:
                    chosen = cell
                    break
        else:
            least = capacity + 1
            for cell in range(num_bins):
                if lengths[i] <= room[cell] < least:
                    least = room[cell]
            count = 0
            for cell in range(num_bins):
                if lengths[i] <= room[cell] <= least + tolerance:
                    count += 1
            pick = min(int(uniforms[k] * count), count - 1)
            for cell in range(num_bins):
                if lengths[i] <= room[cell] <= least + tolerance:
                    if pick == 0:
                        chosen = cell
                        break
                    pick -= 1
        if chosen >= 0:
            bin_of_sample[i] = chosen
            room[chosen] -= lengths[i]
    return bin_of_sample


@njit(cache=True, nogil=True)
def _joint_peaks(loads: npt.NDArray[np.int64], peaks: IntArray, attention: IntArray, expert_unit: int) -> Any:
    """Work saved by every pair of units that share a block instead of standing alone, [B, B]."""
    num_units, num_layers, num_ranks = loads.shape
    saved = np.zeros((num_units, num_units), dtype=np.int64)
    for b in range(num_units):
        for c in range(b):
            joint = np.int64(0)
            for layer in range(num_layers):
                top = np.int64(0)
                for p in range(num_ranks):
                    top = max(top, loads[b, layer, p] + loads[c, layer, p])
                joint += top
            value = (peaks[b] + peaks[c] - joint) * expert_unit
            for s in range(attention.shape[1]):
                value += min(attention[b, s], attention[c, s])
            saved[b, c] = value
            saved[c, b] = value
    return saved


def _descending(lengths: IntArray) -> IntArray:
    return np.lexsort((np.arange(len(lengths)), -lengths)).astype(np.int64)


def _window_shuffled(lengths: IntArray, window: int, rng: np.random.Generator) -> IntArray:
    """Descending order, shuffled inside consecutive windows."""
    order = _descending(lengths)
    for start in range(0, len(order), window):
        rng.shuffle(order[start : start + window])
    return order


def _capacities(lengths: IntArray, capacity: int, num_bins: int, level: bool) -> list[int]:
    """Fill limits to try in turn: from a little above the average up to the capacity if cells are to be level."""
    if not level:
        return [capacity]
    average = max(-(-int(lengths.sum()) // num_bins), int(lengths.max()))
    limits = [average + average * step // 256 for step in (1, 2, 4, 8, 16, 32, 64)]
    return [limit for limit in limits if limit < capacity] + [capacity]


@dataclass(frozen=True)
class _Rule:
    """One filling rule: an order of samples and a choice of bin."""

    window: int = 1
    best: bool = False
    near: float = 0.0
    level: bool = False

    def bins(self, lengths: IntArray, capacity: int, num_bins: int, rng: np.random.Generator) -> IntArray | None:
        """Bins of all samples within ``num_bins``, or None if the rule leaves samples over."""
        order = _window_shuffled(lengths, self.window, rng) if self.window > 1 else _descending(lengths)
        uniforms = rng.random(len(lengths)) if self.best else np.zeros(len(lengths))
        for limit in _capacities(lengths, capacity, num_bins, self.level):
            found: IntArray = _fill(order, lengths, limit, num_bins, self.best, int(self.near * capacity), uniforms)
            if found.min() >= 0:
                return found
        return None


def _repaired(lengths: IntArray, capacity: int, num_bins: int, rng: np.random.Generator) -> IntArray | None:
    """Bins by ever more patient rules; None if none of them fits everything."""
    found = _Rule(best=True).bins(lengths, capacity, num_bins, rng)
    if found is not None:
        return found
    try:
        return rows.pack_bins(lengths, capacity, num_bins=num_bins)
    except InvalidInputError:
        pass
    for restart in range(_RESTARTS):
        found = _Rule(window=2 + restart // 4, best=True, near=0.0).bins(lengths, capacity, num_bins, rng)
        if found is not None:
            return found
    return None


def _deal(problem: Problem, bins: IntArray, *, by_attention: bool) -> IntArray:
    """Cells (row · D + slot) of samples from bins, by the rule of the module."""
    if not by_attention:
        return bins
    num_cells, dp_size = problem.num_rows * problem.dp_size, problem.dp_size
    tokens = np.zeros(num_cells, dtype=np.int64)
    np.add.at(tokens, bins, problem.aligned_lengths)
    attention = np.zeros(num_cells, dtype=np.int64)
    np.add.at(attention, bins, problem.attention_work.sum(axis=0))
    order = np.lexsort((np.arange(num_cells), -tokens, -attention))
    slots = np.arange(num_cells) % dp_size
    odd = (np.arange(num_cells) // dp_size) % 2 == 1
    cells = np.arange(num_cells) - slots + np.where(odd, dp_size - 1 - slots, slots)
    cell_of_bin = np.empty(num_cells, dtype=np.int64)
    cell_of_bin[order] = cells
    return cell_of_bin[bins]


def _deal_to_slots(lengths: IntArray, dp_size: int, rng: np.random.Generator, *, shuffled: bool) -> IntArray:
    """Slots with N / D samples each: runs of D samples in descending order, the longest to the emptiest slot."""
    order = _window_shuffled(lengths, dp_size, rng) if shuffled else _descending(lengths)
    slot_of_sample = np.empty(len(lengths), dtype=np.int64)
    tokens = np.zeros(dp_size, dtype=np.int64)
    for start in range(0, len(order), dp_size):
        group = order[start : start + dp_size]
        emptiest = np.lexsort((np.arange(dp_size), tokens))
        slot_of_sample[group] = emptiest
        tokens[emptiest] += lengths[group]
    return slot_of_sample


def _cells_by_slot(problem: Problem, rule: _Rule, rng: np.random.Generator) -> IntArray | None:
    """Cells with equally many samples in every DP slot: samples are dealt to slots, then fill the rows of a slot."""
    lengths, dp_size, num_rows = problem.aligned_lengths, problem.dp_size, problem.num_rows
    for attempt in range(_RESTARTS):
        slot_of_sample = _deal_to_slots(lengths, dp_size, rng, shuffled=attempt > 0)
        cells = np.empty(len(lengths), dtype=np.int64)
        for slot in range(dp_size):
            members = np.flatnonzero(slot_of_sample == slot)
            found = rule.bins(lengths[members], problem.capacity, num_rows, rng)
            if found is None:
                found = _repaired(lengths[members], problem.capacity, num_rows, rng)
            if found is None:
                break
            tokens = np.zeros(num_rows, dtype=np.int64)
            np.add.at(tokens, found, lengths[members])
            row_of_bin = np.empty(num_rows, dtype=np.int64)
            row_of_bin[np.lexsort((np.arange(num_rows), -tokens))] = np.arange(num_rows)
            cells[members] = row_of_bin[found] * dp_size + slot
        else:
            return cells
    return None


def _fill_empty_cells(problem: Problem, cells: IntArray) -> IntArray:
    """Give every empty cell the shortest sample that another cell (of its slot, if slots are equal) can spare."""
    if not problem.min_samples_per_cell:
        return cells
    cells = cells.copy()
    num_cells = problem.num_rows * problem.dp_size
    size = np.bincount(cells, minlength=num_cells)
    shortest_first = np.lexsort((np.arange(len(cells)), problem.aligned_lengths))
    for empty in np.flatnonzero(size == 0):
        for i in shortest_first:
            donor = cells[i]
            if size[donor] > 1 and (
                not problem.equal_samples_per_slot or donor % problem.dp_size == empty % problem.dp_size
            ):
                size[donor] -= 1
                size[empty] += 1
                cells[i] = empty
                break
    return cells


def _cells(problem: Problem, rule: _Rule, rng: np.random.Generator) -> IntArray | None:
    """Cells of a rule, repaired where it fails; None if nothing fits."""
    if problem.equal_samples_per_slot:
        cells = _cells_by_slot(problem, rule, rng)
    else:
        lengths, num_bins = problem.aligned_lengths, problem.num_rows * problem.dp_size
        bins = rule.bins(lengths, problem.capacity, num_bins, rng)
        if bins is None:
            bins = _repaired(lengths, problem.capacity, num_bins, rng)
        cells = None if bins is None else _deal(problem, bins, by_attention=rule.level)
    return None if cells is None else _fill_empty_cells(problem, cells)


def _packed(problem: Problem, cells: IntArray | None, run: Run) -> Packing | None:
    if cells is None:
        run.explain(
            f"no packing into {problem.num_rows} rows x {problem.dp_size} DP slots of {problem.capacity} tokens was "
            "found by best fit, subset sums and random orders"
        )
        return None
    return Packing.from_cells(cells, dp_size=problem.dp_size)


def _positive_int(faults: Faults, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        faults.add(f"{name} is {value!r}; it must be an integer of at least 1")


def _flag(faults: Faults, name: str, value: object) -> None:
    if not isinstance(value, bool):
        faults.add(f"{name} is {value!r}; it must be True or False")


@dataclass(frozen=True)
class Ffd(Solver):
    """First-fit decreasing by length over the fixed cells: the routing-blind baseline.

    Bins are filled up to the capacity in index order; bin b goes to row b // D
    and DP slot b mod D.

    References
    ----------
    D. S. Johnson, "Near-optimal bin packing algorithms", PhD thesis, MIT (1973).
    """

    name: ClassVar[str] = "ffd"

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack; the placement is not looked at."""
        del placement
        return _packed(problem, self.cells(problem, run.rng), run)

    def cells(self, problem: Problem, rng: np.random.Generator) -> IntArray | None:
        """Cell (row · D + slot) of every sample, int64 [N], or None."""
        return _cells(problem, _Rule(), rng)


@dataclass(frozen=True)
class WindowShuffle(Solver):
    """Descending lengths shuffled inside windows, then first fit.

    Attributes
    ----------
    window : int
        Samples of one window; 1 is plain descending order.
    level : bool
        Cells are filled to the least of eight limits, from just above the average
        fill up to the capacity, that first fit can keep: no cell stays almost empty
        while others are full. Off: to the capacity.
    """

    name: ClassVar[str] = "window_shuffle"
    window: int = 8
    level: bool = True

    def __post_init__(self) -> None:
        faults = Faults()
        _positive_int(faults, "window", self.window)
        _flag(faults, "level", self.level)
        faults.raise_if_any(self.name)

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack; the placement is not looked at."""
        del placement
        return _packed(problem, self.cells(problem, run.rng), run)

    def cells(self, problem: Problem, rng: np.random.Generator) -> IntArray | None:
        """Cell (row · D + slot) of every sample, int64 [N], or None."""
        return _cells(problem, _Rule(window=self.window, level=self.level), rng)


@dataclass(frozen=True)
class RandomizedBestFit(Solver):
    """Best-fit decreasing with a random choice among near-best cells.

    Attributes
    ----------
    near : float
        A cell is near-best if its room exceeds the least sufficient room by at most
        this share of the capacity; 0 breaks only exact ties at random.
    level : bool
        As for :class:`WindowShuffle`.
    """

    name: ClassVar[str] = "randomized_best_fit"
    near: float = 0.1
    level: bool = True

    def __post_init__(self) -> None:
        faults = Faults()
        if isinstance(self.near, bool) or not isinstance(self.near, int | float) or not 0 <= self.near <= 1:
            faults.add(f"near is {self.near!r}; it must be a share of the capacity in 0..1")
        _flag(faults, "level", self.level)
        faults.raise_if_any(self.name)

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack; the placement is not looked at."""
        del placement
        return _packed(problem, self.cells(problem, run.rng), run)

    def cells(self, problem: Problem, rng: np.random.Generator) -> IntArray | None:
        """Cell (row · D + slot) of every sample, int64 [N], or None."""
        return _cells(problem, _Rule(best=True, near=float(self.near), level=self.level), rng)


@dataclass(frozen=True)
class EdpAwarePair(Solver):
    """Window-shuffled bins joined to blocks so that complementary expert loads share a block.

    All pairs of bins are costed jointly, in O(B²·L·P) for B bins: what a pair
    saves is the work of the two bins standing alone minus their work as one
    block, expert and attention part alike. Pairs are matched greedily by what
    they save (ties: lower indices), and joined again in the same way while twice
    the unit still divides the block; where the block size has an odd factor, the
    rest of a block is added unit by unit, each time the one that saves most with
    the block so far. Finished blocks go, in descending order of work, to the
    shard with the least work that has rows left. The paper names the operator
    and its cost; matching, joining and dealing are choices made here.

    Attributes
    ----------
    window : int
        Samples of one window of the shuffle that fills the bins.
    level : bool
        As for :class:`WindowShuffle`.
    """

    name: ClassVar[str] = "edp_aware_pair"
    window: int = 8
    level: bool = True

    def __post_init__(self) -> None:
        faults = Faults()
        _positive_int(faults, "window", self.window)
        _flag(faults, "level", self.level)
        faults.raise_if_any(self.name)

    def unsupported(self, problem: Problem) -> str | None:
        """Blocks cannot be composed freely when every DP slot must get equally many samples."""
        if problem.equal_samples_per_slot:
            return "edp_aware_pair regroups cells across DP slots, which breaks equal_samples_per_slot"
        return None

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack for a placement."""
        return _packed(problem, self.cells(problem, placement, run.rng), run)

    def cells(self, problem: Problem, placement: Placement, rng: np.random.Generator) -> IntArray | None:
        """Cell (row · D + slot) of every sample, int64 [N], or None."""
        bins = _cells(problem, _Rule(window=self.window, level=self.level), rng)
        if bins is None:
            return None
        num_bins = problem.num_rows * problem.dp_size
        shard_size = problem.dp_size // problem.num_shards
        rank_load = placement.rank_load(problem)
        loads = np.zeros((num_bins, *rank_load.shape[1:]), dtype=np.int64)
        np.add.at(loads, bins, rank_load)
        attention = np.zeros((num_bins, len(problem.attention_work)), dtype=np.int64)
        np.add.at(attention, bins, problem.attention_work.T)
        units = [[b] for b in range(num_bins)]
        size = 1
        while shard_size % (2 * size) == 0:
            saved = _saved(loads, attention, problem.expert_unit)
            pairs = _matched(saved)
            units = [units[b] + units[c] for b, c in pairs]
            first, second = pairs.T
            loads = loads[first] + loads[second]
            attention = np.maximum(attention[first], attention[second])
            size *= 2
        blocks, work = _grown(units, loads, attention, problem.expert_unit, shard_size // size)
        slots = [list(shard) for shard in problem.shards]
        cell_of_bin = np.empty(num_bins, dtype=np.int64)
        shard_work = np.zeros(problem.num_shards, dtype=np.int64)
        rows_used = np.zeros(problem.num_shards, dtype=np.int64)
        for block in np.lexsort((np.arange(len(blocks)), -work)):
            open_shards = np.flatnonzero(rows_used < problem.num_rows)
            g = int(open_shards[np.argmin(shard_work[open_shards])])
            cell_of_bin[blocks[block]] = rows_used[g] * problem.dp_size + np.array(slots[g], dtype=np.int64)
            rows_used[g] += 1
            shard_work[g] += work[block]
        return cell_of_bin[bins]


def _saved(loads: IntArray, attention: IntArray, expert_unit: int) -> IntArray:
    peaks = loads.max(axis=2).sum(axis=1) if loads.size else np.zeros(len(loads), dtype=np.int64)
    saved: IntArray = _joint_peaks(loads, peaks, attention, expert_unit)
    return saved


def _matched(saved: IntArray) -> IntArray:
    """Greedy matching of an even number of units by what a pair saves, [B/2, 2]."""
    first, second = np.triu_indices(len(saved), k=1)
    free = np.ones(len(saved), dtype=bool)
    pairs = []
    for k in np.argsort(-saved[first, second], kind="stable"):
        b, c = int(first[k]), int(second[k])
        if free[b] and free[c]:
            free[[b, c]] = False
            pairs.append((b, c))
            if 2 * len(pairs) == len(saved):
                break
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _grown(
    units: list[list[int]], loads: IntArray, attention: IntArray, expert_unit: int, units_per_block: int
) -> tuple[list[list[int]], IntArray]:
    """Blocks of ``units_per_block`` units: the heaviest unit left, then those that save most with the block."""

    def peak(load: IntArray) -> IntArray:
        return load.max(axis=-1).sum(axis=-1) if load.shape[-1] else np.zeros(load.shape[:-2], dtype=np.int64)

    peaks = peak(loads)
    work = peaks * expert_unit + attention.sum(axis=1)
    left = [int(b) for b in np.lexsort((np.arange(len(units)), -work))]
    blocks, block_work = [], []
    while left:
        seed = left.pop(0)
        members, load, top = list(units[seed]), loads[seed], attention[seed]
        for _ in range(units_per_block - 1):
            saved = (peak(load) + peaks[left] - peak(load + loads[left])) * expert_unit
            saved = saved + np.minimum(top, attention[left]).sum(axis=1)
            partner = left.pop(int(np.argmax(saved)))
            members += units[partner]
            load, top = load + loads[partner], np.maximum(top, attention[partner])
        blocks.append(members)
        block_work.append(int(peak(load)) * expert_unit + int(top.sum()))
    return blocks, np.array(block_work, dtype=np.int64)
