"""Packing by like with like: equal cells inside every block, whatever the blocks are.

The attention time of a block is its slowest cell, per operator class, so what
costs time is the difference between cells of *one* block; blocks may differ
freely. Two observations make a packer of that.

1. *Deal groups of near-equal samples.* In descending order of length, every
   |𝒟_g| consecutive samples form a group, and a group goes to one block, one
   sample to each of its cells, the longest to the emptiest cell. Tokens *and*
   squared tokens of the cells then agree up to the small differences inside
   groups, for every operator class at once; blocks are filled by longest
   processing time first (R. L. Graham, doi:10.1137/0117039) over groups.
2. *Anneal the spread, then the score.* Σ_s max_d is a plateau for most moves.
   The spread Σ_blocks Σ_s Σ_d (A_{s,d} − mean)² has no plateaus, its change is
   O(S), and it needs no maxima: proposals cost 50-100 ns. Samples close in
   length are swapped, single samples relocated, and one sample is exchanged for
   two of about its length together, which is what still moves when cells are
   full (Metropolis rule, doi:10.1063/1.1699114, with the correction for unequal
   chances of a proposal and its reverse, doi:10.1093/biomet/57.1.97). Squared
   differences between the shards' ideal work are added, and cells above capacity
   pay a quadratic penalty. What it finds is then finished on the exact levels
   with :class:`routepack_opt.moves.BlockLoads`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import WORK_LIMIT, Problem
from routepack_opt.rings import PAIR_WINDOW, change_ring, join, one_for_two, trade_places
from routepack_opt.solver import Run, Solver
from routepack_opt.solvers.seeds import Ffd, RandomizedBestFit, WindowShuffle
from routepack_opt.splitmix import next_number

__all__ = ["Leveling", "Schedule", "deal", "ideal_tables", "level", "polish"]

FloatArray = npt.NDArray[np.float64]

_SLICE = 16_384  # proposals of one kernel call on exact levels
_SPREAD_SLICE = 131_072  # proposals of one kernel call on the spread: about 15 ms
_TIMED_SLICE = 16_384  # the same where the temperature follows the clock
_RELOCATIONS, _PAIRS = 205, 400  # chances in 4096 of a relocation and of an exchange of one for two
_INT32_MAX = 2**31 - 1
_SHARD_WEIGHT = 0.03  # of the shards' ideal work beside that of cells, before squaring


@njit(cache=True, nogil=True)
def _deal(lengths: IntArray, num_blocks: int, shard_size: int, capacity: int) -> Any:
    """Cell (block · shard_size + k) of every sample; ``lengths`` ascend."""
    num_samples = lengths.shape[0]
    cell_of_sample = np.empty(num_samples, dtype=np.int32)
    fill = np.zeros(num_blocks * shard_size, dtype=np.int64)
    tokens = np.zeros(num_blocks, dtype=np.int64)
    used = np.empty(shard_size, dtype=np.bool_)
    last = num_samples
    while last > 0:
        first = max(last - shard_size, 0)
        block = 0
        for other in range(1, num_blocks):
            if tokens[other] < tokens[block]:
                block = other
        used[:] = False
        for i in range(last - 1, first - 1, -1):
            best = -1
            for k in range(shard_size):
                cell = block * shard_size + k
                if not used[k] and (best < 0 or fill[cell] < fill[block * shard_size + best]):
                    best = k
            used[best] = True
            cell_of_sample[i] = block * shard_size + best
            fill[block * shard_size + best] += lengths[i]
            tokens[block] += lengths[i]
        last = first
    return cell_of_sample


@njit(cache=True, nogil=True, fastmath=True)
def _spread(cell_of_sample: npt.NDArray[np.int32], work: FloatArray, num_blocks: int, shard_size: int) -> float:
    """Σ_blocks Σ_s Σ_d (A − mean of the block)²."""
    num_classes = work.shape[1]
    cells = np.zeros((num_blocks * shard_size, num_classes))
    for i in range(cell_of_sample.shape[0]):
        for s in range(num_classes):
            cells[cell_of_sample[i], s] += work[i, s]
    total = 0.0
    for block in range(num_blocks):
        for s in range(num_classes):
            mean = 0.0
            for k in range(shard_size):
                mean += cells[block * shard_size + k, s]
            mean /= shard_size
            for k in range(shard_size):
                total += (cells[block * shard_size + k, s] - mean) ** 2
    return total


@njit(cache=True, nogil=True, fastmath=True)
def _walk_spread(
    cell_of_sample: npt.NDArray[np.int32],
    work: FloatArray,
    share_of_shard: FloatArray,
    lengths: IntArray,
    num_blocks: int,
    shard_size: int,
    num_shards: int,
    capacity: int,
    penalty: float,
    least_samples: int,
    temperature: float,
    ratio: float,
    num_proposals: int,
    window: int,
    relocations: int,
    pairs: int,
    rng: npt.NDArray[np.uint64],
) -> int:
    """Metropolis walk on the spread plus penalty; returns the tokens above capacity that are left.

    Sample i of cell a changes places with samples j and k of cell b; one or both
    of these may be the zero sample that ``work`` and ``lengths`` carry at the end.
    ``relocations`` and ``pairs`` are chances in 4096.
    """
    num_samples = cell_of_sample.shape[0]
    num_classes = work.shape[1]
    num_cells = num_blocks * shard_size
    cells = np.zeros((num_cells, num_classes))
    blocks = np.zeros((num_blocks, num_classes))
    shards = np.zeros(num_shards)
    fill = np.zeros(num_cells, dtype=np.int64)
    size = np.zeros(num_cells, dtype=np.int64)
    following = np.arange(num_samples + num_cells).astype(np.int32)
    previous = np.arange(num_samples + num_cells).astype(np.int32)
    for sample in range(num_samples):
        cell = cell_of_sample[sample]
        for s in range(num_classes):
            cells[cell, s] += work[sample, s]
            blocks[cell // shard_size, s] += work[sample, s]
        shards[(cell // shard_size) % num_shards] += share_of_shard[sample]
        fill[cell] += lengths[sample]
        size[cell] += 1
        join(following, previous, sample, previous[num_samples + cell])
    share = 1.0 / shard_size
    for _ in range(num_proposals):
        temperature *= ratio
        bits = next_number(rng)
        kind = np.int64(bits & np.uint64(0xFFF))
        x = np.int64((bits >> np.uint64(12)) & np.uint64(0xFFFFF))
        i = np.int64(((bits >> np.uint64(32)) * np.uint64(num_samples)) >> np.uint64(32))
        k = num_samples
        chances = 1.0  # of the reverse proposal against this one
        if kind < relocations:
            a = np.int64(cell_of_sample[i])
            j = num_samples
            b = (x * num_cells) >> 20
            if size[a] <= least_samples:
                continue
        elif kind < relocations + pairs:
            j = i
            b = np.int64(cell_of_sample[j])
            if size[b] < 2:
                continue
            offset = np.int64(((next_number(rng) >> np.uint64(32)) * np.uint64(2 * PAIR_WINDOW)) >> np.uint64(32))
            i, k = one_for_two(following, lengths, j, 1 + ((x * (size[b] - 1)) >> 20), offset)
            if i < 0 or i >= num_samples:
                continue
            a = np.int64(cell_of_sample[i])
            chances = (size[b] - 1) / size[a]
        else:
            a = np.int64(cell_of_sample[i])
            distance = 1 + (((x >> 1) * window) >> 19)
            j = i + distance if x & 1 else i - distance
            if j < 0 or j >= num_samples:
                continue
            b = np.int64(cell_of_sample[j])
        if a == b:
            continue
        tokens = lengths[j] + lengths[k] - lengths[i]
        over_a = max(0, fill[a] - capacity)
        over_b = max(0, fill[b] - capacity)
        new_a = max(0, fill[a] + tokens - capacity)
        new_b = max(0, fill[b] - tokens - capacity)
        energy = 0.0
        if over_a + over_b + new_a + new_b > 0:
            energy = penalty * (
                float(new_a) * new_a + float(new_b) * new_b - float(over_a) * over_a - float(over_b) * over_b
            )
        block_a = a // shard_size
        block_b = b // shard_size
        shard_a = block_a % num_shards
        shard_b = block_b % num_shards
        if block_a != block_b:
            if shard_a != shard_b:
                d = share_of_shard[j] + share_of_shard[k] - share_of_shard[i]
                energy += 2.0 * d * (shards[shard_a] - shards[shard_b] + d)
            for s in range(num_classes):
                d = work[j, s] + work[k, s] - work[i, s]
                energy += d * (2.0 * (cells[a, s] - cells[b, s] + d))
                energy -= d * (2.0 * (blocks[block_a, s] - blocks[block_b, s] + d)) * share
        else:
            for s in range(num_classes):
                d = work[j, s] + work[k, s] - work[i, s]
                energy += d * (2.0 * (cells[a, s] - cells[b, s] + d))
        if energy > 0.0 or chances < 1.0:
            uniform = (np.float64(next_number(rng) >> np.uint64(11)) + 1.0) * (1.0 / 9007199254740992.0) / chances
            # −T ln u is at most T (1 − u) / u.
            if energy * uniform > temperature * (1.0 - uniform) or energy > -temperature * np.log(uniform):
                continue
        cell_of_sample[i] = b
        moved, source, target = i, a, b  # what one cell has more afterwards, and the other less
        if j < num_samples:
            cell_of_sample[j] = a
            trade_places(following, previous, i, j)
            moved, source, target = k, b, a
        if moved < num_samples:
            cell_of_sample[moved] = target
            size[source] -= 1
            size[target] += 1
            change_ring(following, previous, moved, previous[num_samples + target])
        fill[a] += tokens
        fill[b] -= tokens
        if shard_a != shard_b:
            d = share_of_shard[j] + share_of_shard[k] - share_of_shard[i]
            shards[shard_a] += d
            shards[shard_b] -= d
        for s in range(num_classes):
            d = work[j, s] + work[k, s] - work[i, s]
            cells[a, s] += d
            cells[b, s] -= d
            if block_a != block_b:
                blocks[block_a, s] += d
                blocks[block_b, s] -= d
    over = 0
    for cell in range(num_cells):
        over += max(0, fill[cell] - capacity)
    return over


class _Levels:
    """A problem as the spread walk sees it: samples in ascending order of length, merged operator classes."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.num_blocks = problem.num_rows * problem.num_shards
        self.shard_size = problem.dp_size // problem.num_shards
        self.order: IntArray = np.argsort(problem.aligned_lengths, kind="stable").astype(np.int64)
        columns: dict[tuple[int, int], FloatArray] = {}
        for s in range(len(problem.cost.attention)):
            alpha, beta = problem.attention_coefficients(s)
            divisor = max(1, math.gcd(alpha, beta))
            # Classes in proportion have their slowest cell in common.
            key = (1, 0) if beta == 0 else (alpha // divisor, beta // divisor)
            work = problem.attention_work[s] / problem.unit_denominator
            columns[key] = columns[key] + work if key in columns else work
        if not columns:
            columns[1, 0] = problem.lengths / problem.capacity
        self.work: FloatArray = np.zeros((problem.num_samples + 1, len(columns)))
        self.work[:-1] = np.stack(list(columns.values()), axis=1)[self.order]
        # Work of a shard if all its cells were level and all ranks balanced.
        ideal = problem.attention_work.sum(axis=0) / self.shard_size
        ideal = ideal + problem.batch.routed_tokens * (
            problem.top_k * problem.num_layers * problem.expert_unit / problem.ep_size
        )
        self.share_of_shard: FloatArray = np.append(_SHARD_WEIGHT * ideal[self.order] / problem.unit_denominator, 0.0)
        self.lengths: IntArray = np.append(problem.aligned_lengths[self.order], 0)
        per_token = float(self.work.sum()) / float(self.lengths.sum())
        self.penalty = 10.0 * per_token**2
        inside = np.empty(problem.dp_size, dtype=np.int64)
        for shard in problem.shards:
            inside[list(shard)] = np.arange(self.shard_size)
        self._place_in_shard = inside
        self._slots: IntArray = np.array(problem.shards, dtype=np.int64)
        # Moves of the walk: chances in 4096 of those that change how many samples slots hold; the rest are swaps.
        self.relocations = 0 if problem.equal_samples_per_slot else _RELOCATIONS
        self.pairs = 0 if problem.equal_samples_per_slot else _PAIRS
        self.window = max(1, min(self.shard_size, problem.num_samples - 1))

    def walk(
        self,
        cells: npt.NDArray[np.int32],
        stream: npt.NDArray[np.uint64],
        *,
        num_proposals: int,
        temperature: float,
        ratio: float = 1.0,
        penalty: float,
    ) -> int:
        """Metropolis walk on the spread, the temperature changing by ``ratio`` a proposal; tokens above capacity."""
        problem = self.problem
        return int(
            _walk_spread(
                cells,
                self.work,
                self.share_of_shard,
                self.lengths,
                self.num_blocks,
                self.shard_size,
                problem.num_shards,
                problem.capacity,
                penalty,
                problem.min_samples_per_cell,
                temperature,
                ratio,
                num_proposals,
                self.window,
                self.relocations,
                self.pairs,
                stream,
            )
        )

    def cells_of(self, packing: Packing) -> npt.NDArray[np.int32]:
        """Cells of a packing, by sorted sample."""
        problem = self.problem
        blocks = packing.row_of_sample * problem.num_shards + problem.shard_of_slot[packing.dp_slot_of_sample]
        cells = blocks * self.shard_size + self._place_in_shard[packing.dp_slot_of_sample]
        return cells[self.order].astype(np.int32)

    def packing_of(self, cells: npt.NDArray[np.int32]) -> tuple[IntArray, IntArray]:
        """Row and DP slot of every sample."""
        by_sample = np.empty(len(cells), dtype=np.int64)
        by_sample[self.order] = cells
        block, place = np.divmod(by_sample, self.shard_size)
        row, shard = np.divmod(block, self.problem.num_shards)
        return row, self._slots[shard, place]


def deal(problem: Problem) -> tuple[IntArray, IntArray]:
    """Deal groups of samples next to each other in length to the cells of one block each.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    row_of_sample, dp_slot_of_sample : ndarray of int64, shape [N]
        Cells may be above capacity where the grid is tight.
    """
    levels = _Levels(problem)
    return levels.packing_of(_deal(levels.lengths[:-1], levels.num_blocks, levels.shard_size, problem.capacity))


def _used(done: int, amount: int | None, elapsed: float, seconds: float) -> float:
    """Share of a budget that is used up, by the faster of amount (None: none is set) and time."""
    used = 0.0
    if amount is not None:
        used = done / amount if amount else 1.0
    if math.isfinite(seconds):
        used = max(used, elapsed / seconds if seconds > 0.0 else 1.0)
    return used


def _seeded(problem: Problem, rng: np.random.Generator) -> Packing | None:
    """A feasible packing by the seeding operators."""
    for cells in (
        WindowShuffle().cells(problem, rng),
        RandomizedBestFit().cells(problem, rng),
        Ffd().cells(problem, rng),
    ):
        if cells is not None:
            return Packing.from_cells(cells, dp_size=problem.dp_size)
    return None


def level(
    problem: Problem,
    rng: np.random.Generator,
    *,
    num_proposals: int | None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    stopped: Callable[[], bool] | None = None,
) -> Packing | None:
    """Pack for equal cells inside blocks: deal, then anneal the spread.

    Parameters
    ----------
    problem : Problem
    rng : numpy Generator
    num_proposals : int or None
        Moves proposed; 0 deals only, None goes by ``seconds`` alone.
    seconds : float
        Wall time; the temperature follows whichever budget is used up faster.
    clock : callable
        Seconds now.
    stopped : callable, optional
        Asked every 15 ms or so.

    Returns
    -------
    Packing or None
        Feasible. Where dealt cells cannot be brought under the capacity, the
        walk starts from a seeding operator instead; None if those fail as well.

    Raises
    ------
    InvalidInputError
        If neither budget is finite.
    """
    if num_proposals is None and not math.isfinite(seconds):
        raise InvalidInputError("num_proposals is None and seconds is infinite; give one of them")
    levels = _Levels(problem)
    stream = rng.integers(0, 2**64, size=1, dtype=np.uint64)
    begin = clock()

    def walk(
        cells: npt.NDArray[np.int32], amount: int | None, seconds: float, first: float, last: float, penalty: float
    ) -> int:
        """Walk until the budget is used up; tokens above capacity at the end."""
        timed = math.isfinite(seconds)
        ratio = (last / first) ** (1.0 / amount) if not timed and amount and first > 0.0 else 1.0
        done = 0
        while True:
            used = min(_used(done, amount, clock() - begin, seconds), 1.0)
            step = _TIMED_SLICE if timed else _SPREAD_SLICE
            if amount is not None:
                step = min(step, amount - done)
            over = levels.walk(
                cells,
                stream,
                num_proposals=step,
                temperature=first * (last / first) ** used if first > 0.0 else 0.0,
                ratio=ratio,
                penalty=penalty,
            )
            done += step
            if _used(done, amount, clock() - begin, seconds) >= 1.0 or (stopped is not None and stopped()):
                return over

    def anneal(cells: npt.NDArray[np.int32]) -> int:
        spread = _spread(cells, levels.work, levels.num_blocks, levels.shard_size)
        first = 0.25 * spread / (levels.num_blocks * levels.shard_size)
        over = walk(cells, num_proposals, seconds, first, 1e-4 * first, levels.penalty)
        for factor in (1e2, 1e4, 1e6):
            if over:
                amount = 64 * problem.num_samples
                over = walk(cells, amount, math.inf, 1e-4 * first, 1e-5 * first, levels.penalty * factor)
        return over

    enough = problem.num_samples >= problem.num_cells or not problem.min_samples_per_cell
    if enough and not problem.equal_samples_per_slot:
        cells = _deal(levels.lengths[:-1], levels.num_blocks, levels.shard_size, problem.capacity)
        held = np.bincount(cells, minlength=problem.num_cells)
        if held.min() >= problem.min_samples_per_cell and not anneal(cells):
            return Packing.from_arrays(*levels.packing_of(cells))
    seed = _seeded(problem, rng)
    if seed is None:
        return None
    cells = levels.cells_of(seed)
    if num_proposals != 0 and not anneal(cells):
        return Packing.from_arrays(*levels.packing_of(cells))
    return seed


def ideal_tables(problem: Problem, placement: Placement | None = None, *, routing_weight: float = 0.0) -> MoveTables:
    """Tables of a placement that balances every layer of every block perfectly.

    The expert work of a block is then its routed tokens over P: what packing can
    aim at before a placement is chosen for it.

    Parameters
    ----------
    problem : Problem
    placement : Placement, optional
        Needed for a weight above 0.
    routing_weight : float
        In 0..1, rounded to 1/32 (coarser where integers would overflow): the
        expert work is this share of that under ``placement`` and for the rest the
        ideal one.

    Returns
    -------
    MoveTables
        Levels are in work units; with a weight between 0 and 1 in fractions of
        them, 1/32 unless integers would overflow.
    """
    if placement is not None and routing_weight >= 1.0:
        return MoveTables.of(problem, placement)
    attention, unit = problem.attention_work, problem.expert_unit
    load = np.zeros((problem.num_samples, 0, 1), dtype=np.int64)
    if problem.num_layers:
        tokens = problem.top_k * problem.batch.routed_tokens
        if placement is not None and routing_weight > 0.0:
            ranks = placement.rank_load(problem)
            share = -(-tokens // problem.ep_size)
            top = max(int(ranks.sum(axis=0, dtype=np.int64).max()), int(share.sum()))
            work = int(attention.sum()) + int(tokens.sum()) * problem.num_layers * unit
            scale = 32
            while scale > 1 and (scale * top > _INT32_MAX or scale * work >= WORK_LIMIT):
                scale //= 2
            weight = round(routing_weight * scale)
            # In every layer all ranks carry the ideal share beside the weighted load.
            load = ranks.astype(np.int64) * weight
            load += ((scale - weight) * share)[:, None, None]
            attention = attention * scale
        else:
            total = tokens * problem.num_layers
            shrink = max(1, -(-int(total.sum()) // problem.ep_size // (_INT32_MAX // 2)))
            load = -(-total // (problem.ep_size * shrink))[:, None, None]
            unit *= shrink
    return MoveTables(
        load,
        attention,
        expert_unit=unit,
        aligned_lengths=problem.aligned_lengths,
        capacity=problem.capacity,
        num_rows=problem.num_rows,
        shard_of_slot=problem.shard_of_slot,
        min_samples_per_cell=problem.min_samples_per_cell,
        equal_samples_per_slot=problem.equal_samples_per_slot,
    )


@dataclass(frozen=True)
class Schedule:
    """Temperatures and moves of :func:`polish`.

    Attributes
    ----------
    first, last : float
        Temperature at the beginning and the end, in units of the mean work of a
        block; falls geometrically. Both hold for packings within 1 % of level
        cells and ranks and rise with the power 3/2 of what is above that, up to a
        thousandfold.
    relocation_share, exchange_share, pair_share : float
        Share of relocations, block exchanges and one-for-two moves among proposals.
    swap_window : int
        Largest distance of swap partners in the order of lengths.
    total_weight : float
        Weight of all work beside the heaviest shard in the energy (G > 1).
    """

    first: float = 3e-4
    last: float = 1e-5
    relocation_share: float = 0.05
    exchange_share: float = 0.01
    pair_share: float = 0.05
    swap_window: int = 8
    total_weight: float = 1.0


def polish(
    loads: BlockLoads,
    stream: npt.NDArray[np.uint64],
    schedule: Schedule,
    *,
    num_proposals: int | None,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
    heated: bool = True,
    stopped: Callable[[], bool] | None = None,
) -> int:
    """Anneal a good packing gently on its exact levels; the best one met is in the archive of ``loads``.

    Parameters
    ----------
    loads : BlockLoads
    stream : ndarray of uint64, shape [1]
        Generator state, advanced.
    schedule : Schedule
    num_proposals : int or None
        None: until ``seconds`` are over.
    seconds : float
        Wall time; the temperature follows whichever budget is used up faster.
    clock : callable
        Seconds now.
    heated : bool
        Raise the temperatures for packings that are far from level; off: take
        those of the schedule as they are.
    stopped : callable, optional

    Returns
    -------
    int
        Proposals made.
    """
    num_shards = loads.tables.num_shards
    mean = max(1.0, loads.levels[1] / (loads.tables.num_rows * num_shards))
    heat = _heat(loads) if heated else 1.0
    weights = (1.0 / mean, (schedule.total_weight if num_shards > 1 else 0.0) / mean, 0.0)
    start = clock()
    done = 0
    while stopped is None or not stopped():
        fraction = _used(done, num_proposals, clock() - start, seconds)
        if fraction >= 1.0:
            break
        step = _SLICE if num_proposals is None else min(_SLICE, -(-num_proposals // 32), num_proposals - done)
        loads.walk(
            stream,
            num_proposals=step,
            temperature=heat * schedule.first * (schedule.last / schedule.first) ** fraction,
            energy_weights=weights,
            relocation_share=schedule.relocation_share,
            exchange_share=schedule.exchange_share,
            pair_share=schedule.pair_share,
            swap_window=schedule.swap_window,
        )
        done += step
    return done


def _heat(loads: BlockLoads) -> float:
    """How much hotter than a nearly level packing this one has to be annealed."""
    tables = loads.tables.kernel_tables
    least = float(tables.attention.sum()) / tables.shard_size
    least += float(tables.load_sums.sum()) / tables.num_ranks * tables.expert_unit
    excess = loads.levels[0] * loads.tables.num_shards / least - 1.0 if least > 0.0 else 0.0
    return float(min(max(1.0, (excess / 0.01) ** 1.5), 1000.0)) if excess > 0.0 else 1.0


@dataclass(frozen=True)
class Leveling(Solver):
    """Packs samples of like length together, so that the cells of every block are level.

    Attributes
    ----------
    num_chains : int
        Independent searches; the best is kept.
    spread_share : float
        Share of the budget, in 0..1, for the walk on the spread; the rest anneals
        the exact levels.

    Notes
    -----
    An iteration is one proposal of either walk. Without a limit a chain makes
    2 million of them.
    """

    name: ClassVar[str] = "leveling"
    num_chains: int = 2
    spread_share: float = 0.1

    def __post_init__(self) -> None:
        faults = Faults()
        chains, share = self.num_chains, self.spread_share
        if isinstance(chains, bool) or not isinstance(chains, int) or chains < 1:
            faults.add(f"num_chains is {chains!r}; it must be an integer of at least 1")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            faults.add(f"spread_share is {share!r}; it must be a number in 0..1")
        faults.raise_if_any("leveling")

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack for a placement; None if no feasible start is found."""
        found = search(problem, MoveTables.of(problem, placement), run, self)
        if found is None:
            run.explain("no packing within capacity and rows was found to start from")
            return None
        packing = Packing.from_arrays(*found.best_packing())
        run.report(packing)
        return packing


def search(
    problem: Problem,
    tables: MoveTables,
    run: Run,
    options: Leveling,
    *,
    schedule: Schedule | None = None,
    rng: np.random.Generator | None = None,
    seconds: float | None = None,
    iterations: int | None = None,
) -> BlockLoads | None:
    """Level and polish in several chains; the best one, or None without a feasible start.

    Parameters
    ----------
    problem : Problem
    tables : MoveTables
        What the polish is scored with: of a placement, or :func:`ideal_tables`.
    run : Run
    options : Leveling
    schedule : Schedule, optional
    rng : numpy Generator, optional
        Default: the run's.
    seconds, iterations : optional
        Budget; default: what the run has. Without any, 2 million proposals a chain.
    """
    schedule = Schedule() if schedule is None else schedule
    chains = options.num_chains
    threads = max(1, min(run.num_threads, chains))
    rounds = -(-chains // threads)
    seconds = run.time_left() if seconds is None else seconds
    iterations = run.iteration_limit if iterations is None else iterations
    per_chain: int | None = None if math.isfinite(seconds) else 2_000_000
    if iterations is not None:
        per_chain = max(1, iterations // chains)
    share = options.spread_share
    spread = None if per_chain is None and share > 0 else int((per_chain or 0) * share)
    generators = (run.rng if rng is None else rng).spawn(chains)
    begin = run.time()

    def chain(k: int) -> BlockLoads | None:
        until = begin + seconds * (k // threads + 1) / rounds
        if k and run.time() >= until:
            return None

        def late() -> bool:
            return run.stopped() or run.time() >= until

        packing = level(
            problem,
            generators[k],
            num_proposals=spread,
            seconds=(until - run.time()) * share if math.isfinite(until) else math.inf,
            clock=run.time,
            stopped=late,
        )
        if packing is None:
            return None
        loads = BlockLoads(tables, packing.row_of_sample, packing.dp_slot_of_sample)
        polish(
            loads,
            generators[k].integers(0, 2**64, size=1, dtype=np.uint64),
            schedule,
            num_proposals=None if per_chain is None else per_chain - (spread or 0),
            seconds=until - run.time() if math.isfinite(until) else math.inf,
            clock=run.time,
            stopped=run.stopped,
        )
        return loads

    warm: BlockLoads | None = None
    if run.warm_start is not None:
        packing = run.warm_start.packing
        warm = BlockLoads(tables, packing.row_of_sample, packing.dp_slot_of_sample)
    if threads == 1:
        found = [chain(k) for k in range(chains)]
    else:
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(chain, range(chains)))
    candidates = [loads for loads in (warm, *found) if loads is not None]
    return min(candidates, key=lambda loads: loads.best_levels) if candidates else None
