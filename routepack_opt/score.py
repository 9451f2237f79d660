"""The one cost authority: exact integer scores, and everything that is wrong with a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import total_ordering
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, read_only
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Plan, placement_faults
from routepack_opt.problem import Problem

__all__ = ["LEVELS", "Breakdown", "Score", "evaluate", "packing_violations", "violations"]

#: Names of the lexicographic levels, most important first.
LEVELS = ("max_shard_work", "total_work", "max_row_work")


@njit(cache=True, nogil=True)
def _add_by_block(load: npt.NDArray[Any], block_of_sample: IntArray, out: IntArray) -> None:
    """out[b] += load[i] for every sample i of block b."""
    for i in range(load.shape[0]):
        row = out[block_of_sample[i]]
        for k in range(load.shape[1]):
            row[k] += load[i, k]


@dataclass(frozen=True)
class Breakdown:
    """Where the work of a plan sits; work in integer units, tokens in tokens.

    Attributes
    ----------
    attention : ndarray of int64, shape [R, G]
        A_{r,g}: slowest cell per operator class, summed over classes.
    expert : ndarray of int64, shape [R, G]
        E_{r,g}: hottest rank per layer, summed over layers.
    rank_load : ndarray of int64, shape [R, G, L, P]
        W_{r,g,l,p}, routed tokens.
    cell_tokens : ndarray of int64, shape [R, D]
        Tokens of each cell (T = tokens / C).
    cell_squares : ndarray of int64, shape [R, D]
        Σ t² of each cell (Q = squares / C²).
    cell_samples : ndarray of int64, shape [R, D]
        Samples of each cell.
    cell_work : ndarray of int64, shape [S, R, D]
        Attention work of each cell by operator class.
    """

    attention: IntArray
    expert: IntArray
    rank_load: IntArray
    cell_tokens: IntArray
    cell_squares: IntArray
    cell_samples: IntArray
    cell_work: IntArray

    @property
    def block(self) -> IntArray:
        """J_{r,g} = A_{r,g} + E_{r,g}, int64 [R, G]."""
        return self.attention + self.expert

    @property
    def shard(self) -> IntArray:
        """U_g = Σ_r J_{r,g}, int64 [G]."""
        shard: IntArray = self.block.sum(axis=0)
        return shard


@total_ordering
@dataclass(frozen=True, eq=False)
class Score:
    """Exact score of a feasible plan; compares lexicographically, fewer rows first.

    Attributes
    ----------
    max_shard_work, total_work, max_row_work : int
        max_g U_g, Σ_g U_g and max_{r,g} J_{r,g}, in work units.
    unit_denominator : int
        Work units of J = 1.
    num_rows : int
        R.
    problem_fingerprint : str
        The problem the plan was scored on.
    breakdown : Breakdown
    """

    max_shard_work: int
    total_work: int
    max_row_work: int
    unit_denominator: int
    num_rows: int
    problem_fingerprint: str
    breakdown: Breakdown = field(repr=False)

    @property
    def levels(self) -> tuple[int, int, int]:
        """The three levels in order."""
        return (self.max_shard_work, self.total_work, self.max_row_work)

    @property
    def values(self) -> tuple[float, float, float]:
        """The three levels in units of J."""
        first, second, third = (level / self.unit_denominator for level in self.levels)
        return (first, second, third)

    def _key(self) -> tuple[int, tuple[int, int, int]]:
        return (self.num_rows, self.levels)

    def _comparable(self, other: Score) -> None:
        if self.unit_denominator != other.unit_denominator:
            raise InvalidInputError("scores of different problems (different work units) are not comparable")
        if self.num_rows == other.num_rows and self.problem_fingerprint != other.problem_fingerprint:
            raise InvalidInputError("scores of different problems are not comparable")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Score):
            return NotImplemented
        self._comparable(other)
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self._key(), self.unit_denominator))

    def __lt__(self, other: Score) -> bool:
        self._comparable(other)
        return self._key() < other._key()

    def to_dict(self) -> dict[str, int]:
        """The levels and the unit, exact integers."""
        return {
            "max_shard_work": self.max_shard_work,
            "total_work": self.total_work,
            "max_row_work": self.max_row_work,
            "unit_denominator": self.unit_denominator,
        }

    def __repr__(self) -> str:
        shard, total, row = self.values
        return f"Score(shard {shard:,.4f}, total {total:,.4f}, row {row:,.4f}, R {self.num_rows})"


def evaluate(problem: Problem, plan: Plan) -> Score:
    """Score a plan exactly.

    Parameters
    ----------
    problem : Problem
    plan : Plan
        Of this problem.

    Returns
    -------
    Score

    Raises
    ------
    InvalidInputError
        If the plan is infeasible, with every violation; an infeasible plan has no score.
    """
    found = violations(problem, plan)
    if found:
        raise InvalidInputError(found, context="infeasible plan")
    detail = breakdown(problem, plan)
    shard = detail.shard
    return Score(
        max_shard_work=int(shard.max()),
        total_work=int(shard.sum()),
        max_row_work=int(detail.block.max()),
        unit_denominator=problem.unit_denominator,
        num_rows=problem.num_rows,
        problem_fingerprint=problem.fingerprint,
        breakdown=detail,
    )


def breakdown(problem: Problem, plan: Plan) -> Breakdown:
    """Work by block, rank and cell of a plan whose samples all lie inside the grid.

    Unlike :func:`evaluate` this works for plans that break a capacity, so that
    they can be looked at.
    """
    num_rows, num_slots, num_shards = problem.num_rows, problem.dp_size, problem.num_shards
    num_classes = len(problem.cost.attention)
    rows, slots = plan.packing.row_of_sample, plan.packing.dp_slot_of_sample
    cells = rows * num_slots + slots
    num_cells = num_rows * num_slots

    def by_cell(values: npt.NDArray[np.int64]) -> IntArray:
        out = np.zeros(num_cells, dtype=np.int64)
        np.add.at(out, cells, values)
        return out.reshape(num_rows, num_slots)

    cell_work = np.zeros((num_classes, num_rows, num_slots), dtype=np.int64)
    for s in range(num_classes):
        cell_work[s] = by_cell(problem.attention_work[s])
    attention = np.zeros((num_rows, num_shards), dtype=np.int64)
    for g, shard in enumerate(problem.shards):
        attention[:, g] = cell_work[:, :, list(shard)].max(axis=2).sum(axis=0)
    load = np.zeros((num_rows, num_shards, problem.num_layers, problem.ep_size), dtype=np.int64)
    if problem.num_layers:
        blocks = rows * num_shards + problem.shard_of_slot[slots]
        _add_by_block(
            plan.placement.rank_load(problem).reshape(problem.num_samples, -1),
            blocks,
            load.reshape(num_rows * num_shards, -1),
        )
        expert = load.max(axis=3).sum(axis=2) * problem.expert_unit
    else:
        expert = np.zeros((num_rows, num_shards), dtype=np.int64)
    return Breakdown(
        attention=read_only(attention),
        expert=read_only(expert),
        rank_load=read_only(load),
        cell_tokens=read_only(by_cell(problem.lengths)),
        cell_squares=read_only(by_cell(problem.lengths**2)),
        cell_samples=read_only(by_cell(np.ones(problem.num_samples, dtype=np.int64))),
        cell_work=read_only(cell_work),
    )


def packing_violations(problem: Problem, packing: Packing) -> list[str]:
    """Everything that makes a packing infeasible; empty if nothing does."""
    if packing.num_samples != problem.num_samples:
        return [f"the packing has {packing.num_samples} samples, the problem {problem.num_samples}"]
    found = []
    rows, slots = packing.row_of_sample, packing.dp_slot_of_sample
    for i in np.flatnonzero(rows >= problem.num_rows):
        found.append(f"{problem.batch.sample_name(int(i))}: row {rows[i]} is outside 0..{problem.num_rows - 1}")
    for i in np.flatnonzero(slots >= problem.dp_size):
        found.append(f"{problem.batch.sample_name(int(i))}: DP slot {slots[i]} is outside 0..{problem.dp_size - 1}")
    if found:
        return found
    cells = rows * problem.dp_size + slots
    used = np.zeros(problem.num_cells, dtype=np.int64)
    np.add.at(used, cells, problem.aligned_lengths)
    for cell in np.flatnonzero(used > problem.capacity):
        row, slot = divmod(int(cell), problem.dp_size)
        aligned = " aligned" if problem.length_alignment > 1 else ""
        found.append(
            f"cell (row {row}, DP slot {slot}): {used[cell]}{aligned} tokens in "
            f"{int((cells == cell).sum())} samples are above the capacity {problem.capacity}"
        )
    held = np.bincount(cells, minlength=problem.num_cells)
    if problem.min_samples_per_cell:
        for cell in np.flatnonzero(held == 0):
            row, slot = divmod(int(cell), problem.dp_size)
            found.append(f"cell (row {row}, DP slot {slot}): empty, and min_samples_per_cell is 1")
    if problem.equal_samples_per_slot:
        by_slot = np.bincount(slots, minlength=problem.dp_size)
        share = problem.num_samples // problem.dp_size
        for slot in np.flatnonzero(by_slot != share).tolist():
            found.append(f"DP slot {slot}: {by_slot[slot]} samples; equal_samples_per_slot asks for {share}")
    return found


def violations(problem: Problem, plan: Plan) -> list[str]:
    """Everything that makes a plan infeasible; empty if nothing does.

    Returns
    -------
    list of str
        Each names the sample, cell or slot, its value and the limit it breaks.
    """
    found = placement_faults(problem, plan.placement)
    if plan.num_rows != problem.num_rows:
        found.append(f"the plan has {plan.num_rows} rows, the problem {problem.num_rows}")
    if plan.problem_fingerprint != problem.fingerprint:
        found.append("the plan belongs to another problem (fingerprints differ)")
    return found + packing_violations(problem, plan.packing)
