"""Exact packing by set partitioning over block columns, in integers from end to end.

A *column* is a set of samples that fits one block, with the work of the block
when its samples are split over the cells as well as possible. A packing is a
partition of the samples into R · G columns, and every level of the score is a
function of the column works alone. The method:

1. **Enumerate** every column, with a lower bound on its attention work; exact
   splits are computed when a column first matters. Where they are too many, the
   relaxation is solved by pricing without a list, and only the columns within
   its distance to a known packing are enumerated (module `pricing`).
2. **Price**: the linear relaxation is solved by column generation over the full
   list (Gilmore & Gomory 1961, doi:10.1287/opre.9.6.849). Its multipliers are
   rounded to integers, and the least reduced cost over all columns makes the
   bound Σ_i u_i + R · G · v exact whatever the linear solver's tolerance.
3. **Filter**: a column whose reduced cost exceeds the distance between that
   bound and a known packing cannot be in a better one. Subset-row cuts on three
   samples (Jepsen et al. 2008, doi:10.1287/opre.1070.0449) raise the bound and
   filter again.
4. **Cover**: dynamic programming over covered sets. The next column always
   holds the longest uncovered sample; columns are scanned in order of reduced
   cost until the budget is used up, and of several ways to cover the same set
   only the best by (total, largest block) lives on. For G > 1 the sides, the
   unions of R columns that keep their shard's work within the known packing's,
   are enumerated first; then G sides cover the samples.

Nothing is rounded: linear programming only chooses multipliers, so an OPTIMAL
claim holds at any capacity. Deviation from textbook branch and price: there is
no branching; the filtered list is searched exhaustively instead, which suits
24-32 samples in small blocks and gives up beyond, with the bound of the relaxation.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError, SolverClaimError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.rows import pack_bins
from routepack_opt.score import LEVELS, evaluate, violations
from routepack_opt.solver import Run, Solver
from routepack_opt.solvers.annealing import Annealing
from routepack_opt.solvers.pricing import Blocks, Generation, Master, exact_work, list_within, split_block, work_unit

__all__ = ["Columns"]

#: Bits of a column's set of samples.
_MAX_SAMPLES = 62
_NEVER = np.int64(2**62)
#: Numbers of a pricing pass stay below this.
_SCALED_LIMIT = 2**54
_BUCKETS = 1021
_POLL_SECONDS = 0.02
#: Seconds that annealing for a packing may take at most: at first, and where many columns stay.
_SHORT_START, _LONG_START = 1.0, 5.0
_MANY_COLUMNS = 5000
_HARD_PAIRS = 1_000_000
#: Nodes that splitting one column may take while pricing; harder ones keep their lower bound until the filter.
_PRICING_NODES = 300


@dataclass(frozen=True)
class Columns(Solver):
    """Exact packer by set partitioning over all feasible blocks, for few samples a block.

    An iteration limit counts the Metropolis proposals of the first packing
    (``start_share`` of it is used); enumeration and proof are not iterations.

    Parameters
    ----------
    max_columns : int
        Columns, and partial covers, that may be held. More columns are not
        listed but priced; if even those that a better packing could use are
        more, the best packing found is returned with its bound.
    cuts : bool
        Whether to add subset-row cuts.
    start_share : float
        Share of the time spent on a first packing by annealing, in [0, 1).
    """

    max_columns: int = 30_000_000
    cuts: bool = True
    start_share: float = 0.1
    name: ClassVar[str] = "columns"

    def __post_init__(self) -> None:
        faults = Faults()
        count = self.max_columns
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            faults.add(f"max_columns is {count!r}; it must be an integer of at least 1")
        if not isinstance(self.cuts, bool):
            faults.add(f"cuts is {self.cuts!r}; it must be True or False")
        share = self.start_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            faults.add(f"start_share is {share!r}; it must be in [0, 1)")
        faults.raise_if_any("columns")

    def available(self) -> str | None:
        """Why the linear solver cannot run here."""
        return None if importlib.util.find_spec("highspy") else "the package 'highspy' is not installed"

    def unsupported(self, problem: Problem) -> str | None:
        """Why ``problem`` is beyond this method, or nothing."""
        if problem.num_samples > _MAX_SAMPLES:
            return f"{problem.num_samples} samples; sets of samples are kept in {_MAX_SAMPLES} bits"
        if problem.equal_samples_per_slot and problem.dp_size > 1:
            return "equal_samples_per_slot couples the rows, which columns treat as independent"
        work = int(problem.attention_work.sum())
        work += int(problem.batch.routed_tokens.sum()) * problem.top_k * problem.num_layers * problem.expert_unit
        if problem.num_shards * work * 4 >= _SCALED_LIMIT:
            return f"total work {work} is too large for exact multipliers; round alpha and beta to fewer bits"
        return None

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples for a fixed placement."""
        search = _Search(self, problem, placement, run)
        if run.stopped():
            return search.best
        thread = threading.Thread(target=search.run, name="columns", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                run.progress()
                if run.stopped():
                    search.flag[0] = 1
        except BaseException:
            search.flag[0] = 1
            thread.join()
            raise
        if search.error is not None:
            raise search.error
        search.claim()
        return search.best


class _Stopped(Exception):
    """The search was told to stop."""


class _GaveUp(Exception):
    """Too many columns or partial covers."""


class _List(NamedTuple):
    """Columns: sets of samples, works, and whether a work is exact."""

    masks: IntArray
    works: IntArray
    exact: npt.NDArray[np.uint8]

    def take(self, index: npt.NDArray[Any]) -> _List:
        return _List(self.masks[index], self.works[index], self.exact[index])


class _Search:
    """One run of the method; fills in what it proves and what it finds."""

    def __init__(self, options: Columns, problem: Problem, placement: Placement, run: Run) -> None:
        self.options = options
        self.problem = problem
        self.placement = placement
        self.handle = run
        self.flag = np.zeros(1, dtype=np.uint8)
        self.error: BaseException | None = None
        self.best: Packing | None = None
        self.levels: tuple[int, int, int] | None = None
        self.bounds: list[int | None] = [None, None, None]
        self.proved = False
        self.infeasible = False
        self.gave_up = False
        self.begin = time.perf_counter()
        self.order = np.argsort(-problem.lengths, kind="stable").astype(np.int64)
        self.num_blocks = problem.num_rows * problem.num_shards
        loads = placement.expert_work(problem)[self.order]
        self.blocks = Blocks(
            np.ascontiguousarray(problem.aligned_lengths[self.order]),
            np.ascontiguousarray(problem.attention_work[:, self.order].T),
            np.ascontiguousarray(loads),
            len(problem.shards[0]),
            problem.capacity,
            problem.min_samples_per_cell,
        )
        if run.warm_start is not None:
            self.consider(run.warm_start.packing)

    def consider(self, packing: Packing) -> None:
        plan = Plan.of(self.problem, self.placement, packing)
        if violations(self.problem, plan):
            return
        found = evaluate(self.problem, plan).levels
        if self.levels is None or found < self.levels:
            self.best, self.levels = packing, found
            self.handle.report(packing)

    def check(self) -> None:
        if self.flag[0]:
            raise _Stopped

    def run(self) -> None:
        try:
            self._start()
            self._solve()
        except _Stopped:
            pass
        except _GaveUp:
            self.gave_up = True
        except BaseException as error:
            self.error = error

    def claim(self) -> None:
        run, runtime = self.handle, time.perf_counter() - self.begin
        if self.infeasible and self.levels is None:
            problem = self.problem
            run.claim_infeasible(
                f"no packing of {problem.num_samples} samples into {problem.num_rows} rows x {problem.dp_size} DP "
                f"slots of {problem.capacity} tokens exists: proved by exhaustive search; more rows are needed"
            )
            return
        limit = None
        if not self.proved:
            limit = Limit.EXHAUSTED if self.gave_up else (run.limit_reached() or Limit.TIME)
        for k, level in enumerate(LEVELS):
            value = None if self.levels is None else self.levels[k]
            bound = value if self.proved else self.bounds[k]
            if bound is not None and value is not None and bound > value:
                raise SolverClaimError(f"columns: bound {bound} on {level} above the value {value}")
            proved = self.proved or (value is not None and bound == value and self._earlier_proved(k))
            run.claim(
                level, value, bound, proved=proved, limit=None if proved else limit, runtime=runtime if k == 0 else 0.0
            )

    def _earlier_proved(self, k: int) -> bool:
        return self.levels is not None and all(self.bounds[j] == self.levels[j] for j in range(k))

    # -- a first packing ------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Best-fit decreasing if there is no warm start, then a second of annealing."""
        if self.best is None:
            first = _first_packing(self.problem)
            if first is not None:
                self.consider(first)
        self._anneal(_SHORT_START)

    def _anneal(self, seconds: float) -> None:
        share, left = self.options.start_share, self.handle.time_left()
        if self.best is None or share == 0 or left == 0:
            return
        if np.isfinite(left):
            share = min(share, seconds / left)
        annealing = Annealing()
        warm_start = Plan.of(self.problem, self.placement, self.best)
        child = self.handle.sub(annealing, share, placement=self.placement, warm_start=warm_start)
        found = annealing.pack(self.problem, self.placement, child)
        if found is not None:
            self.consider(found)
        self.check()

    # -- the proof ------------------------------------------------------------------------------------------------

    def _solve(self) -> None:
        num_shards, num_blocks = self.problem.num_shards, self.num_blocks
        columns = self._enumerate()
        self.check()
        if columns is None:
            columns = self._priced()
        if num_blocks == 2 and len(columns.masks) > _HARD_PAIRS:
            self._anneal(_LONG_START)  # a better packing spares many exact splits
        shard_limit, most = self._limits()
        if self.levels is not None and num_shards > 1:
            columns = columns.take(np.flatnonzero(columns.works <= shard_limit))
        if num_blocks == 2:
            columns = self._pairs(columns, most)
        pricing = _Pricing(self, columns, most)
        bound, columns, reduced = pricing.root()
        self._record(bound, columns)
        if len(columns.masks) > _MANY_COLUMNS and self.levels is not None:
            self._anneal(_LONG_START)
            shard_limit = self.levels[0]
            most = pricing.most = num_shards * shard_limit
            columns, reduced = pricing.filter(columns)
            self._record(bound, columns)
        if bound > most and self.levels is not None:
            raise SolverClaimError(f"columns: bound {bound} above the known total {most}")
        if self.options.cuts and bound <= most:
            bound, columns, reduced = pricing.strengthen(bound, columns, reduced)
            self._record(bound, columns)
        if bound > most:
            self.infeasible = True
            return
        budget = most * pricing.scale - pricing.scaled_bound
        if num_shards == 1:
            chosen = self._cover(columns, columns.works, columns.works, reduced, num_blocks, budget)
            if chosen is None:
                self.infeasible = True
                return
            found = [[int(columns.masks[c]) for c in chosen]]
        else:
            sides = self._sides(columns, reduced, pricing, shard_limit, budget)
            shards = self._match(sides, budget)
            if shards is None:
                self.infeasible = True
                return
            found = [[int(columns.masks[c]) for c in sides.columns_of(side)] for side in shards]
        self.consider(self._packing(found))
        self.proved = True

    def _limits(self) -> tuple[int, int]:
        """What one shard, and all together, work at most in a packing worth finding."""
        if self.levels is not None:
            return self.levels[0], self.problem.num_shards * self.levels[0]
        # No partition into columns costs more than all samples one by one: a maximum is at most the sum.
        alone = int(self.blocks.attention.sum() + self.blocks.loads.max(axis=2, initial=0).sum())
        return alone, alone

    def _priced(self) -> _List:
        """Columns that a packing as good as the known one may use, without a list of all."""
        self._anneal(_LONG_START)  # a better packing leaves fewer columns to list
        _, most = self._limits()
        scale = _scale(most)
        generation = Generation(
            self.blocks,
            self.num_blocks,
            most=most,
            scale=scale,
            empty_blocks=self.empty_blocks,
            flag=self.flag,
            on_bound=lambda bound: self._record(bound, None),
        )
        if self.best is not None:
            generation.add(*self.columns_of(self.best))
        generation.run()
        self.check()
        for again in (False, True):
            if again:
                self._anneal(_LONG_START)
            _, most = self._limits()
            if generation.bound > most and self.levels is not None:
                raise SolverClaimError(f"columns: bound {generation.bound} above the known total {most}")
            found = list_within(
                self.blocks,
                self.num_blocks,
                generation.multipliers,
                scale=scale,
                limit=generation.constant + max(0, most * scale - generation.scaled_bound),
                most_columns=self.options.max_columns,
                flag=self.flag,
            )
            self.check()
            if found is not None:
                return _List(*found)
        raise _GaveUp

    def _record(self, bound: int, columns: _List | None) -> None:
        if self.levels is None:
            return
        num_shards, num_blocks = self.problem.num_shards, self.num_blocks
        largest = -(-bound // num_blocks)
        for i in range(self.problem.num_samples if columns is not None else 0):
            assert columns is not None
            holds = (columns.masks >> i) & 1 == 1
            if holds.any():
                largest = max(largest, int(columns.works[holds].min()))
        for k, value in enumerate((-(-bound // num_shards), bound, largest)):
            value = min(value, self.levels[k])
            if self.bounds[k] is None or value > (self.bounds[k] or 0):
                self.bounds[k] = value
                self.handle.bound(LEVELS[k], value)

    def _enumerate(self) -> _List | None:
        """Every column, or None if they are too many."""
        blocks = self.blocks
        least, fewest, most = blocks.sizes(self.num_blocks)
        self.empty_blocks = least <= 0 and blocks.least_samples == 0
        size = self.options.max_columns
        masks, works = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.int64)
        count = _enumerate(
            blocks.lengths,
            blocks.attention,
            blocks.loads,
            blocks.num_cells,
            blocks.num_cells * blocks.capacity,
            least,
            fewest,
            most,
            masks,
            works,
            self.flag,
        )
        self.check()
        if count < 0:
            return None
        exact = np.full(count, blocks.num_cells == 1, dtype=np.uint8)
        return _List(masks[:count].copy(), works[:count].copy(), exact)

    def _pairs(self, columns: _List, most: int) -> _List:
        """Of two blocks each is the other's complement: keep the pairs whose exact works fit together."""
        full = (1 << self.problem.num_samples) - 1
        order = np.argsort(columns.masks, kind="stable")
        columns = columns.take(order)
        masks, works = columns.masks, columns.works
        partner, matched = _complements(masks, full)
        within = np.flatnonzero(matched & (masks < masks[partner]) & (works <= most - works[partner]))
        within = within[np.argsort(works[within] + works[partner[within]], kind="stable")]
        kept = np.zeros(len(masks), dtype=np.bool_)
        kept[masks == full] = True
        _settle_pairs(within, partner, masks, works, columns.exact, most, *self.blocks, kept, self.flag)
        self.check()
        return columns.take(np.flatnonzero(kept))

    def _cover(
        self,
        columns: _List,
        values: IntArray,
        largest: IntArray,
        reduced: IntArray,
        num_parts: int,
        budget: int,
    ) -> list[int] | None:
        """Cover all samples by ``num_parts`` columns: least (Σ values, max largest); column indices or None."""
        full = (1 << self.problem.num_samples) - 1
        order, starts = self._buckets(columns.masks, reduced)
        masks, vals, tops, costs = columns.masks[order], values[order], largest[order], reduced[order]
        by_mask = np.argsort(masks, kind="stable").astype(np.int64)
        sorted_masks = masks[by_mask]
        layers = [_States.first()]
        best: tuple[int, int] | None = None
        winner = (0, 0)  # layer, state
        for part in range(num_parts):
            active = np.flatnonzero(layers[-1].masks != full)
            if not len(active):
                break
            last = part == num_parts - 1
            states = self._grow(
                _extend, layers[-1].take(active),
                (masks, vals, tops, costs, starts, sorted_masks, by_mask, full, budget, last), merge=True,
            )  # fmt: skip
            states = states._replace(parents=active[states.parents])
            layers.append(states)
            if last or self.empty_blocks:
                done = np.flatnonzero(states.masks == full)
                if len(done):
                    at = int(done[np.lexsort((states.tops[done], states.values[done]))[0]])
                    key = (int(states.values[at]), int(states.tops[at]))
                    if best is None or key < best:
                        best, winner = key, (part + 1, at)
        if best is None:
            return None
        layer, at = winner
        return [int(order[column]) for column in _history(layers[1:], layer - 1, at)][::-1]

    def _buckets(self, masks: IntArray, reduced: IntArray) -> tuple[IntArray, IntArray]:
        """Order of the columns by (longest sample, reduced cost), and where each longest sample begins in it."""
        lowest = _lowest(masks)
        order = np.lexsort((reduced, lowest))
        return order, np.searchsorted(lowest[order], np.arange(self.problem.num_samples + 1)).astype(np.int64)

    def _grow(self, kernel: Any, states: _States, columns: tuple[Any, ...], *, merge: bool) -> _States:
        """Add columns to every state: the kernel is called until no state is left, its output being short.

        Parameters
        ----------
        kernel : callable
            ``_extend`` or ``_adjoin``.
        states : _States
        columns : tuple
            What the kernel wants to know of the columns.
        merge : bool
            Keep only the best way to every covered set, now and then and at the end.
        """
        size = 1 << 20
        pieces: list[_States] = []
        held = 0
        position = 0
        out = np.empty((6, size), dtype=np.int64)
        cursor = np.zeros(2, dtype=np.int64)
        while position < len(states.masks):
            count = kernel(
                states.masks, states.values, states.tops, states.costs, position, cursor, *columns, out, self.flag
            )
            self.check()
            position = int(cursor[0])
            piece = _States(*out[:, :count].copy())
            pieces.append(piece.best_by_mask() if merge else piece)
            held += len(pieces[-1].masks)
            if merge and held <= 4 * size:
                continue
            if merge:
                pieces = [_States.join(pieces).best_by_mask()]
                held = len(pieces[0].masks)
            if held > self.options.max_columns:
                raise _GaveUp
        grown = _States.join(pieces)
        return grown.best_by_mask() if merge else grown

    def _sides(self, columns: _List, reduced: IntArray, pricing: _Pricing, shard_limit: int, budget: int) -> _Sides:
        """All unions of at most R columns that one shard could hold, best (work, largest block) of each."""
        problem = self.problem
        num_rows = problem.num_rows
        order, starts = self._buckets(columns.masks, reduced)
        masks, works, costs = columns.masks[order], columns.works[order], reduced[order]
        # The other shards need at least what the multipliers say, and have no more than their limits.
        multipliers, constant = pricing.side_multipliers
        others = problem.num_shards - 1
        allowed = others * (shard_limit * pricing.scale - num_rows * constant)
        least_sum = int(multipliers.sum()) - allowed
        tables = _tables(multipliers)
        states = _States(masks, works, works, costs, np.full(len(masks), -1), np.arange(len(masks)))
        layers = [states]
        for layer_number in range(1, num_rows):
            final = layer_number == num_rows - 1
            last_low = _lowest(masks)[states.columns]
            states = self._grow(
                _adjoin, states,
                (last_low, masks, works, costs, starts, shard_limit, budget, tables, least_sum if final else -(2**62)),
                merge=False,
            )  # fmt: skip
            layers.append(states)
        # Sides of fewer than R columns stand for empty rows.
        wanted = range(num_rows) if self.empty_blocks else range(num_rows - 1, num_rows)
        parts = [layers[k] for k in wanted]
        masks_ = np.concatenate([part.masks for part in parts])
        values = np.concatenate([part.values for part in parts])
        tops = np.concatenate([part.tops for part in parts])
        costs_ = np.concatenate([part.costs for part in parts])
        layer = np.concatenate([np.full(len(part.masks), k) for k, part in zip(wanted, parts, strict=True)])
        index = np.concatenate([np.arange(len(part.masks)) for part in parts])
        if self.empty_blocks:
            masks_ = np.append(masks_, 0)
            values, tops, costs_ = np.append(values, 0), np.append(tops, 0), np.append(costs_, 0)
            layer, index = np.append(layer, -1), np.append(index, 0)
        keep = _best_of_each(masks_, values, tops)
        return _Sides(masks_[keep], values[keep], tops[keep], costs_[keep], layer[keep], index[keep], layers, order)

    def _match(self, sides: _Sides, budget: int) -> list[int] | None:
        """Choose G sides that cover the samples: least (max work, Σ work, max block); side indices or None."""
        num_shards = self.problem.num_shards
        full = (1 << self.problem.num_samples) - 1
        if num_shards == 2:
            partner, matched = _complements(sides.masks, full)
            pair = np.flatnonzero(matched)
            if not len(pair):
                return None
            other = partner[pair]
            first = np.maximum(sides.works[pair], sides.works[other])
            total = sides.works[pair] + sides.works[other]
            row = np.maximum(sides.tops[pair], sides.tops[other])
            k = int(np.lexsort((row, total, first))[0])
            return [int(pair[k]), int(other[k])]
        occupied = np.flatnonzero(sides.masks != 0)
        columns = _List(sides.masks[occupied], sides.works[occupied], np.ones(len(occupied), dtype=np.uint8))
        costs = sides.costs[occupied]
        least = self._cover(columns, np.zeros_like(columns.works), columns.works, costs, num_shards, budget)
        if least is None:
            return None
        limit = max(int(columns.works[c]) for c in least)
        kept = np.flatnonzero(columns.works <= limit)
        columns, tops = columns.take(kept), sides.tops[occupied][kept]
        chosen = self._cover(columns, columns.works, tops, costs[kept], num_shards, budget)
        assert chosen is not None
        return [int(occupied[kept[c]]) for c in chosen]

    def columns_of(self, packing: Packing) -> tuple[IntArray, IntArray]:
        """Columns of a packing, with their works."""
        problem = self.problem
        position = np.empty(problem.num_samples, dtype=np.int64)
        position[self.order] = np.arange(problem.num_samples)
        masks = np.zeros((problem.num_rows, problem.num_shards), dtype=np.int64)
        shards = problem.shard_of_slot[packing.dp_slot_of_sample]
        np.bitwise_or.at(masks, (packing.row_of_sample, shards), np.int64(1) << position)
        used = masks[masks != 0]
        return used, np.array([exact_work(mask, *self.blocks, 2**62) for mask in used], dtype=np.int64)

    def _packing(self, shards: list[list[int]]) -> Packing:
        problem, blocks = self.problem, self.blocks
        rows = np.zeros(problem.num_samples, dtype=np.int64)
        slots = np.zeros(problem.num_samples, dtype=np.int64)
        for g, masks in enumerate(shards):
            for r, mask in enumerate(masks):
                members = np.array([i for i in range(problem.num_samples) if mask >> i & 1], dtype=np.int64)
                cells = np.zeros(len(members), dtype=np.int64)
                split_block(members, blocks.lengths, blocks.attention, blocks.num_cells, blocks.capacity,
                       blocks.least_samples, 2**62, cells)  # fmt: skip
                rows[self.order[members]] = r
                slots[self.order[members]] = np.asarray(problem.shards[g])[cells]
        return Packing.from_arrays(rows, slots)


class _States(NamedTuple):
    """Partial covers: the covered set, its value, its largest block, reduced cost so far, and how it came about."""

    masks: IntArray
    values: IntArray
    tops: IntArray
    costs: IntArray
    parents: IntArray  # position in the layer before
    columns: IntArray

    @classmethod
    def first(cls) -> _States:
        zero = np.zeros(1, dtype=np.int64)
        return cls(zero, zero, zero, zero, zero - 1, zero - 1)

    @classmethod
    def join(cls, pieces: list[_States]) -> _States:
        if not pieces:
            none = np.zeros(0, dtype=np.int64)
            return cls(none, none, none, none, none, none)
        return cls(*(np.concatenate(arrays) for arrays in zip(*pieces, strict=True)))

    def take(self, index: npt.NDArray[Any]) -> _States:
        return _States(*(array[index] for array in self))

    def best_by_mask(self) -> _States:
        """Keep the best (value, largest block) of every covered set."""
        return self.take(_best_of_each(self.masks, self.values, self.tops))


class _Sides(NamedTuple):
    """What one shard may hold: sets in ascending order with work and largest block."""

    masks: IntArray
    works: IntArray
    tops: IntArray
    costs: IntArray
    layer: IntArray
    position: IntArray
    layers: list[_States]
    order: IntArray

    def columns_of(self, side: int) -> list[int]:
        history = _history(self.layers, int(self.layer[side]), int(self.position[side]))
        return [int(self.order[column]) for column in history]


class _Pricing:
    """The linear relaxation: column generation over the full list with exact integer multipliers."""

    def __init__(self, search: _Search, columns: _List, most: int) -> None:
        self.search = search
        self.columns = columns
        self.most = most
        self.scale = _scale(most)
        self.scaled_bound = -(2**62)
        self._num = search.problem.num_samples
        self._triples = np.zeros(0, dtype=np.int64)
        self._unit = work_unit(most)
        self._best_multipliers = np.zeros(self._num, dtype=np.int64)
        self._best_constant = 0

    @property
    def side_multipliers(self) -> tuple[IntArray, int]:
        """Multipliers u and constant v of the relaxation without cuts: a column S works at least Σ_{i in S} u_i + v."""
        return self._best_multipliers[: self._num], self._best_constant

    def _build(self, masks: IntArray, works: IntArray) -> None:
        """A fresh master with the given columns and the cuts."""
        search = self.search
        self._master = Master(
            self._num,
            search.num_blocks,
            most=self.most,
            empty_blocks=search.empty_blocks,
            unit=self._unit,
            cuts=self._triples,
        )
        self._master.add(masks, works)

    def _generate(self, columns: _List) -> tuple[int, IntArray, int]:
        """Column generation until no column prices out: best scaled bound, its multipliers, its constant."""
        search, n = self.search, self._num
        blocks = search.blocks
        best, best_duals, best_constant = -(2**62), np.zeros(n + 1 + len(self._triples), dtype=np.int64), 0
        stalled = 0
        master = self._master
        in_master = set(master.masks.tolist())
        guess = len(in_master) < n
        while True:
            search.check()
            duals = master.guess(blocks.lengths) if guess else master.solve()
            scaled = np.floor(duals * (self._unit * self.scale)).astype(np.int64)
            multipliers, cuts = scaled[:n], np.minimum(scaled[n + 1 :], 0)
            bucket_cost = np.full(_BUCKETS, _NEVER, dtype=np.int64)
            bucket_column = np.full(_BUCKETS, -1, dtype=np.int64)
            threshold = 2**61 if guess else int(scaled[n])
            least = _price(
                columns.masks, columns.works, columns.exact, self.scale, _tables(multipliers), cuts, self._triples,
                threshold, *blocks, bucket_cost, bucket_column, 0 if guess else _PRICING_NODES, search.flag,
            )  # fmt: skip
            search.check()
            constant = int(least)
            if search.empty_blocks:
                constant = min(constant, 0)
            bound = int(multipliers.sum()) + search.num_blocks * constant + int(cuts.sum())
            if bound > best:
                stalled = 0 if bound - best > 1e-7 * abs(bound) else stalled + 1
                best, best_duals, best_constant = bound, np.concatenate([multipliers, [constant], cuts]), constant
            else:
                stalled += 1
            tolerance = int(1e-9 * self.most * self.scale) + 1
            chosen = bucket_column[(bucket_column >= 0) & (bucket_cost < threshold - tolerance)]
            fresh = [c for c in chosen.tolist() if int(columns.masks[c]) not in in_master]
            if (not guess and (not fresh or stalled > 60)) or best > self.most * self.scale:
                return best, best_duals, best_constant
            index = np.asarray(fresh, dtype=np.int64)
            price = bucket_cost[np.isin(bucket_column, index)]
            index = bucket_column[np.isin(bucket_column, index)][np.argsort(price, kind="stable")][:400]
            guess = False
            in_master.update(columns.masks[index].tolist())
            master.add(columns.masks[index], columns.works[index])

    def _filter(self, columns: _List, duals: IntArray, constant: int) -> tuple[_List, IntArray]:
        """Columns whose exact reduced cost is within the distance to the known packing."""
        search, n = self.search, self._num
        budget = self.most * self.scale - self.scaled_bound
        reduced = np.zeros(0, dtype=np.int64)
        for deepen in (False, True):
            reduced = np.empty(len(columns.masks), dtype=np.int64)
            _reduced_costs(
                columns.masks, columns.works, columns.exact, self.scale, _tables(duals[:n]), duals[n + 1 :],
                self._triples, constant, budget, *search.blocks, deepen, reduced, search.flag,
            )  # fmt: skip
            search.check()
            kept = np.flatnonzero(reduced <= budget)
            columns, reduced = columns.take(kept), reduced[kept]
        return columns, reduced

    def filter(self, columns: _List) -> tuple[_List, IntArray]:
        """Columns whose reduced cost at the root is within the distance to the known packing, and these costs."""
        return self._filter(columns, self._best_multipliers, self._best_constant)

    def root(self) -> tuple[int, _List, IntArray]:
        """Bound of the relaxation, the columns that may be in a packing as good as the known one, reduced costs."""
        columns, search = self.columns, self.search
        none = np.zeros(0, dtype=np.int64)
        self._build(*((none, none) if search.best is None else search.columns_of(search.best)))
        self.scaled_bound, duals, constant = self._generate(columns)
        self._best_multipliers, self._best_constant = duals, constant
        kept, reduced = self.filter(columns)
        if search.blocks.num_cells > 1 and len(kept.masks):
            # Works that were lower bounds are exact now: price once more, over what is left.
            known = np.isin(kept.masks, self._master.masks)
            self._build(kept.masks[known], kept.works[known])
            again, duals, constant = self._generate(kept)
            if again > self.scaled_bound:
                self.scaled_bound, self._best_multipliers, self._best_constant = again, duals, constant
                if self.scaled_bound <= self.most * self.scale:
                    kept, reduced = self.filter(kept)
        return -(-self.scaled_bound // self.scale), kept, reduced

    def strengthen(self, bound: int, columns: _List, reduced: IntArray) -> tuple[int, _List, IntArray]:
        """Add violated subset-row cuts round by round, filtering as the bound rises."""
        stalled = 0
        for _ in range(40):
            if len(columns.masks) < 1500 or bound > self.most or stalled >= 3:
                break
            values = self._master.values()
            used = np.flatnonzero(values > 1e-6)
            found = _violated(self._master.masks[used], values[used], self._num)
            found = np.setdiff1d(found[:40], self._triples)
            if not len(found):
                break
            self._triples = np.concatenate([self._triples, found])
            known = np.isin(columns.masks, self._master.masks)
            self._build(columns.masks[known], columns.works[known])
            scaled, duals, constant = self._generate(columns)
            if scaled > self.scaled_bound:
                gain = (scaled - self.scaled_bound) / max(1, self.most * self.scale - self.scaled_bound)
                stalled = 0 if gain > 0.02 else stalled + 1
                self.scaled_bound = scaled
                bound = -(-scaled // self.scale)
                if bound > self.most:
                    break
                columns, reduced = self._filter(columns, duals, constant)
            else:
                stalled += 1
            active = np.flatnonzero(duals[self._num + 1 :] < 0)
            self._triples = self._triples[active] if len(self._triples) > 300 else self._triples
        return bound, columns, reduced


def _scale(most: int) -> int:
    """Multipliers are integers in work units divided by this."""
    scale = 1
    while most * scale * 4 < _SCALED_LIMIT and scale < 2**20:
        scale *= 2
    return scale


def _first_packing(problem: Problem) -> Packing | None:
    try:
        cells = pack_bins(problem.aligned_lengths, problem.capacity, num_bins=problem.num_cells)
    except InvalidInputError:
        return None
    held = np.bincount(cells, minlength=problem.num_cells)
    if problem.min_samples_per_cell:
        for empty in np.flatnonzero(held == 0).tolist():
            donor = int(held.argmax())
            cells[np.flatnonzero(cells == donor)[-1]] = empty
            held = np.bincount(cells, minlength=problem.num_cells)
    # Bins are dealt row by row, so that the bins used spread over the shards.
    return Packing.from_cells(cells, dp_size=problem.dp_size)


def _lowest(masks: IntArray) -> IntArray:
    """Index of the lowest set bit."""
    low = masks & -masks
    lowest: IntArray = np.log2(np.maximum(low, 1).astype(np.float64)).astype(np.int64)
    return lowest


def _complements(masks: IntArray, full: int) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """For sets in ascending order: where the complement of each would be, and whether it is there."""
    partner = np.minimum(np.searchsorted(masks, full ^ masks), len(masks) - 1)
    return partner, masks[partner] == (full ^ masks)


def _best_of_each(masks: IntArray, values: IntArray, tops: IntArray) -> IntArray:
    """Index of the best (value, largest block) of every set, by set."""
    order: IntArray = np.lexsort((tops, values, masks))
    best: IntArray = order[np.diff(masks[order], prepend=-1) != 0]
    return best


def _history(layers: list[_States], layer: int, at: int) -> list[int]:
    """Columns that led to a state, the last one first."""
    columns = []
    while layer >= 0:
        columns.append(int(layers[layer].columns[at]))
        at = int(layers[layer].parents[at])
        layer -= 1
    return columns


def _tables(multipliers: IntArray) -> IntArray:
    """Sums of multipliers over every subset of each run of 16 samples, int64 [4, 65536]."""
    tables = np.zeros((4, 1 << 16), dtype=np.int64)
    for block in range(4):
        part = multipliers[block * 16 : block * 16 + 16]
        for bit, value in enumerate(part.tolist()):
            tables[block, 1 << bit : 2 << bit] = tables[block, : 1 << bit] + value
    return tables


@njit(cache=True, nogil=True)
def _enumerate(
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    room: int,
    least: int,
    fewest: int,
    most: int,
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    flag: npt.NDArray[np.uint8],
) -> int:
    """Every set of samples within the room of a block, with expert work and a lower bound on attention work.

    The attention of a class is at least its largest sample and its average cell. Returns −1 if ``masks`` is too short.
    """
    n, num_classes = attention.shape
    _, num_layers, num_ranks = loads.shape
    suffix = np.zeros(n + 1, dtype=np.int64)
    for i in range(n - 1, -1, -1):
        suffix[i] = suffix[i + 1] + lengths[i]
    held = np.zeros((n + 1, num_layers, num_ranks), dtype=np.int64)
    sums = np.zeros((n + 1, num_classes), dtype=np.int64)
    peak = np.zeros((n + 1, num_classes), dtype=np.int64)
    tokens = np.zeros(n + 1, dtype=np.int64)
    sets = np.zeros(n + 1, dtype=np.int64)
    following = np.zeros(n + 1, dtype=np.int64)
    depth = 0
    count = 0
    while depth >= 0:
        i = following[depth]
        if i >= n or tokens[depth] + suffix[i] < least or depth >= most:
            depth -= 1
            continue
        following[depth] = i + 1
        if tokens[depth] + lengths[i] > room:
            continue
        deeper = depth + 1
        tokens[deeper] = tokens[depth] + lengths[i]
        sets[deeper] = sets[depth] | (np.int64(1) << i)
        following[deeper] = i + 1
        work = np.int64(0)
        for layer in range(num_layers):
            largest = np.int64(0)
            for p in range(num_ranks):
                value = held[depth, layer, p] + loads[i, layer, p]
                held[deeper, layer, p] = value
                largest = max(largest, value)
            work += largest
        for s in range(num_classes):
            sums[deeper, s] = sums[depth, s] + attention[i, s]
            peak[deeper, s] = max(peak[depth, s], attention[i, s])
            work += max(peak[deeper, s], -(-sums[deeper, s] // num_cells))
        if tokens[deeper] >= least and deeper >= fewest:
            if count == len(masks):
                return -1
            masks[count] = sets[deeper]
            works[count] = work
            count += 1
            if count & 1023 == 0 and flag[0]:
                return count
        depth = deeper
    return count


@njit(cache=True, nogil=True)
def _sum_over(mask: int, tables: npt.NDArray[np.int64]) -> Any:
    """Sum of the multipliers of a set."""
    total = tables[0, mask & 65535] + tables[1, (mask >> 16) & 65535]
    total += tables[2, (mask >> 32) & 65535] + tables[3, (mask >> 48) & 65535]
    return total


@njit(cache=True, nogil=True)
def _reduced_cost(
    mask: int,
    work: int,
    scale: int,
    tables: npt.NDArray[np.int64],
    cuts: npt.NDArray[np.int64],
    triples: npt.NDArray[np.int64],
) -> Any:
    cost = work * scale - _sum_over(mask, tables)
    for k in range(len(triples)):
        common = mask & triples[k]
        if common & (common - 1):
            cost -= cuts[k]
    return cost


@njit(cache=True, nogil=True)
def _settle_pairs(
    candidates: npt.NDArray[np.int64],
    partner: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    exact: npt.NDArray[np.uint8],
    most: int,
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    kept: npt.NDArray[np.bool_],
    flag: npt.NDArray[np.uint8],
) -> None:
    """Make works exact until a pair is above ``most``; mark the pairs that are not."""
    for a in candidates:
        if flag[0]:
            return
        b = partner[a]
        for c in (a, b):
            if exact[c] != 1 and works[a] <= most - works[b]:
                works[c] = exact_work(
                    masks[c], lengths, attention, loads, num_cells, capacity, least_samples, 4611686018427387904
                )
                exact[c] = 1
        if works[a] <= most - works[b]:
            kept[a] = True
            kept[b] = True


@njit(cache=True, nogil=True)
def _price(
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    exact: npt.NDArray[np.uint8],
    scale: int,
    tables: npt.NDArray[np.int64],
    cuts: npt.NDArray[np.int64],
    triples: npt.NDArray[np.int64],
    constant: int,
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    bucket_cost: npt.NDArray[np.int64],
    bucket_column: npt.NDArray[np.int64],
    node_limit: int,
    flag: npt.NDArray[np.uint8],
) -> Any:
    """Least reduced cost of all columns, and the best column of each bucket; winners get exact works on the way."""
    never = np.int64(4611686018427387904)
    least = never
    num_buckets = len(bucket_cost)
    for c in range(len(masks)):
        if c & 4095 == 0 and flag[0]:
            return least
        if works[c] >= never:
            continue
        cost = _reduced_cost(masks[c], works[c], scale, tables, cuts, triples)
        if cost >= constant:
            least = min(least, cost)
            continue
        bucket = masks[c] % num_buckets
        if cost < bucket_cost[bucket] or cost < least:
            if exact[c] == 0 and node_limit > 0:
                if flag[0]:
                    return least
                work = exact_work(masks[c], lengths, attention, loads, num_cells, capacity, least_samples, node_limit)
                exact[c] = 1 if work >= 0 else 2  # 2: too hard for now, the lower bound stays
                if work >= 0:
                    works[c] = work
                if work >= never:
                    continue
                cost = _reduced_cost(masks[c], works[c], scale, tables, cuts, triples)
            if cost < bucket_cost[bucket]:
                bucket_cost[bucket] = cost
                bucket_column[bucket] = c
        least = min(least, cost)
    return least


@njit(cache=True, nogil=True)
def _reduced_costs(
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    exact: npt.NDArray[np.uint8],
    scale: int,
    tables: npt.NDArray[np.int64],
    cuts: npt.NDArray[np.int64],
    triples: npt.NDArray[np.int64],
    constant: int,
    budget: int,
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    deepen: bool,
    reduced: npt.NDArray[np.int64],
    flag: npt.NDArray[np.uint8],
) -> None:
    """Reduced costs above the constant; with ``deepen`` the works of columns within the budget are made exact."""
    never = np.int64(4611686018427387904)
    for c in range(len(masks)):
        if c & 255 == 0 and flag[0]:
            return
        reduced[c] = never
        if works[c] >= never:
            continue
        cost = _reduced_cost(masks[c], works[c], scale, tables, cuts, triples) - constant
        if deepen and cost <= budget and exact[c] != 1:
            if flag[0]:
                return
            works[c] = exact_work(
                masks[c], lengths, attention, loads, num_cells, capacity, least_samples, 4611686018427387904
            )
            exact[c] = 1
            if works[c] >= never:
                continue
            cost = _reduced_cost(masks[c], works[c], scale, tables, cuts, triples) - constant
        reduced[c] = cost


@njit(cache=True, nogil=True)
def _violated(masks: npt.NDArray[np.int64], values: npt.NDArray[np.float64], num_samples: int) -> npt.NDArray[np.int64]:
    """Triples of samples whose subset-row cut is violated, most violated first."""
    triples = []
    excess = []
    for i in range(num_samples):
        for j in range(i + 1, num_samples):
            for k in range(j + 1, num_samples):
                triple = (np.int64(1) << i) | (np.int64(1) << j) | (np.int64(1) << k)
                total = 0.0
                for c in range(len(masks)):
                    common = masks[c] & triple
                    if common & (common - 1):
                        total += values[c]
                if total > 1.02:
                    triples.append(triple)
                    excess.append(-total)
    out = np.array(triples, dtype=np.int64) if len(triples) else np.zeros(0, dtype=np.int64)
    if len(triples):
        out = out[np.argsort(np.array(excess))]
    return out


@njit(cache=True, nogil=True)
def _put(
    out: npt.NDArray[np.int64], at: int, mask: int, value: int, top: int, cost: int, parent: int, column: int
) -> int:
    """Write a state as one of ``_States``; where the next one goes."""
    out[0, at] = mask
    out[1, at] = value
    out[2, at] = top
    out[3, at] = cost
    out[4, at] = parent
    out[5, at] = column
    return at + 1


@njit(cache=True, nogil=True)
def _extend(
    state_masks: npt.NDArray[np.int64],
    state_values: npt.NDArray[np.int64],
    state_tops: npt.NDArray[np.int64],
    state_costs: npt.NDArray[np.int64],
    position: int,
    cursor: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    values: npt.NDArray[np.int64],
    tops: npt.NDArray[np.int64],
    costs: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sorted_masks: npt.NDArray[np.int64],
    by_mask: npt.NDArray[np.int64],
    full: int,
    budget: int,
    last: bool,
    out: npt.NDArray[np.int64],
    flag: npt.NDArray[np.uint8],
) -> int:
    """Add to each partial cover every column that holds its longest uncovered sample; stops when the output is full.

    ``cursor`` says where to go on: state, and position within its bucket. The last column must fit exactly and is
    looked up.
    """
    count = 0
    room = out.shape[1]
    for state in range(position, len(state_masks)):
        covered = state_masks[state]
        begin = cursor[1]
        cursor[0] = state
        cursor[1] = 0
        if flag[0]:
            return count
        if last:
            wanted = full ^ covered
            at = np.searchsorted(sorted_masks, wanted)
            if at == len(sorted_masks) or sorted_masks[at] != wanted:
                continue
            c = by_mask[at]
            if state_costs[state] + costs[c] > budget:
                continue
            if count == room:
                return count
            count = _put(out, count, full, state_values[state] + values[c], max(state_tops[state], tops[c]),
                         state_costs[state] + costs[c], state, c)  # fmt: skip
            continue
        low = 0
        while (covered >> low) & 1:
            low += 1
        left = budget - state_costs[state]
        first = max(starts[low], begin)
        for c in range(first, starts[low + 1]):
            if costs[c] > left:
                break
            if masks[c] & covered:
                continue
            if count == room:
                cursor[1] = c
                return count
            count = _put(out, count, covered | masks[c], state_values[state] + values[c],
                         max(state_tops[state], tops[c]), state_costs[state] + costs[c], state, c)  # fmt: skip
    cursor[0] = len(state_masks)
    cursor[1] = 0
    return count


@njit(cache=True, nogil=True)
def _adjoin(
    state_masks: npt.NDArray[np.int64],
    state_values: npt.NDArray[np.int64],
    state_tops: npt.NDArray[np.int64],
    state_costs: npt.NDArray[np.int64],
    position: int,
    cursor: npt.NDArray[np.int64],
    state_lows: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    costs: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    shard_limit: int,
    budget: int,
    tables: npt.NDArray[np.int64],
    least_sum: int,
    out: npt.NDArray[np.int64],
    flag: npt.NDArray[np.uint8],
) -> int:
    """Add to each partial side every disjoint column whose longest sample comes later, within the shard's limit."""
    count = 0
    room = out.shape[1]
    num_samples = len(starts) - 1
    for state in range(position, len(state_masks)):
        covered = state_masks[state]
        resume = cursor[1]
        cursor[0] = state
        cursor[1] = 0
        if flag[0]:
            return count
        left = budget - state_costs[state]
        work_left = shard_limit - state_values[state]
        for low in range(state_lows[state] + 1, num_samples):
            if (covered >> low) & 1:
                continue
            for c in range(max(starts[low], resume), starts[low + 1]):
                if costs[c] > left:
                    break
                if masks[c] & covered or works[c] > work_left:
                    continue
                both = covered | masks[c]
                if _sum_over(both, tables) < least_sum:
                    continue
                if count == room:
                    cursor[1] = c
                    return count
                count = _put(out, count, both, state_values[state] + works[c], max(state_tops[state], works[c]),
                             state_costs[state] + costs[c], state, c)  # fmt: skip
    cursor[0] = len(state_masks)
    cursor[1] = 0
    return count
