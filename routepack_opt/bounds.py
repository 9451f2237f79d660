"""Proven lower bounds on every level of the score, and the one function that derives a gap.

A bound holds in a *scope*: ``fixed-placement`` for every packing under one
placement, ``any-placement`` for every plan. All values are exact integers in
work units; floating-point numbers only choose multipliers, and a bound is
valid for any of them.

Expert work and attention work of a block add up, so a bound on the total of
each gives a bound on the total of both:

- **Expert work.** However samples are packed, summing a maximum over blocks is
  at least the maximum of the sum: Σ_{r,g} max_p W_{r,g,l,p} ≥ max_p Lagg_{l,p}.
  Without a placement, the most loaded rank of a layer is bounded by
  :func:`placement_bound`.
- **Attention work.** A block pays its most loaded cell, at least the average
  of its cells; :func:`attention_bound` improves on that with the cell LP.
- **max_shard_work** is at least the total divided by G, **max_row_work** at
  least the total divided by R·G, and at least what the block with the longest
  sample must cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, integer_array
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.highs import silent_highs
from routepack_opt.plan import Placement, placement_faults
from routepack_opt.problem import Problem
from routepack_opt.score import LEVELS, Score

__all__ = [
    "SCOPES",
    "Bound",
    "aggregate_load",
    "attention_bound",
    "best_bound",
    "gap",
    "placement_bound",
    "problem_bounds",
    "window_load",
]

#: What a bound may assume.
SCOPES = ("fixed-placement", "any-placement")

#: Multipliers of the cell LP are rounded to multiples of 1 / this.
_MULTIPLIER_SCALE = 2**20


@dataclass(frozen=True)
class Bound:
    """A proven lower bound on one level.

    Attributes
    ----------
    level : str
        ``max_shard_work``, ``total_work`` or ``max_row_work``.
    scope : str
        ``fixed-placement`` or ``any-placement``.
    value : int
        Work units; no plan in the scope has less.
    method : str
        What proved it.
    num_rows : int
        R it was derived for; it says nothing about plans of another R.
    problem_fingerprint : str
        The problem it was derived for.
    """

    level: str
    scope: str
    value: int
    method: str
    num_rows: int
    problem_fingerprint: str

    def __repr__(self) -> str:
        return f"Bound({self.level} >= {self.value}, {self.scope}, {self.method}, R {self.num_rows})"


def gap(value: int | Score | None, bound: int | Bound | None) -> float | None:
    """Relative distance of a value from a proven bound: (value − bound) / bound.

    Parameters
    ----------
    value : int, Score or None
        Work units of one level; of a score, the level the bound is for.
    bound : int, Bound or None
        Proven lower bound on that level, work units.

    Returns
    -------
    float or None
        At least 0. None if value or bound is unknown, or the bound is 0 and
        the value is not.

    Raises
    ------
    InvalidInputError
        If the value is below the bound (one of them is wrong), or score and
        bound belong to different numbers of rows.
    """
    if isinstance(value, Score):
        if not isinstance(bound, Bound):
            raise InvalidInputError("a score has three levels: give a Bound, which names its level", context="gap")
        if value.num_rows != bound.num_rows:
            raise InvalidInputError(
                f"the plan has {value.num_rows} rows, the bound is for {bound.num_rows}: no gap across rows",
                context="gap",
            )
        if value.problem_fingerprint != bound.problem_fingerprint:
            raise InvalidInputError("the score and the bound belong to different problems", context="gap")
        value = value.levels[LEVELS.index(bound.level)]
    limit = bound.value if isinstance(bound, Bound) else bound
    if value is None or limit is None:
        return None
    if value < limit:
        raise InvalidInputError(f"value {value} is below the proven bound {limit}: one of them is wrong", context="gap")
    if limit <= 0:
        return 0.0 if value == limit else None
    return (int(value) - int(limit)) / int(limit)


def window_load(problem: Problem) -> IntArray:
    """Routed tokens of each expert over the whole window, int64 [L, E]."""
    load: IntArray = problem.counts.sum(axis=0, dtype=np.int64)
    return load


def aggregate_load(problem: Problem, placement: Placement) -> IntArray:
    """Routed tokens of each EP rank over the whole window, Lagg_{l,p}, int64 [L, P].

    Raises
    ------
    InvalidInputError
        If the placement does not fit the problem.
    """
    faults = placement_faults(problem, placement)
    if faults:
        raise InvalidInputError(faults, context="aggregate load")
    if not problem.num_layers:
        return np.zeros((0, problem.ep_size), dtype=np.int64)
    by_slot = np.take_along_axis(window_load(problem), placement.expert_of_slot, axis=1)
    load: IntArray = by_slot.reshape(problem.num_layers, problem.ep_size, -1).sum(axis=2)
    return load


def placement_bound(load: npt.ArrayLike, ep_size: int) -> IntArray:
    """Least possible load of the most loaded rank, for every layer.

    With S = E / P experts a rank, the largest of

    - the average ⌈sum / P⌉;
    - for k = 0..S−1: of the k·P + 1 largest experts some rank owns k + 1, at
      least the k + 1 smallest of them, and S − k − 1 further experts, at least
      the smallest of all. For k = 0 this is the largest expert with the S − 1
      smallest.

    Parameters
    ----------
    load : array-like of int, shape [L, E]
        Load of each expert, at least 0.
    ep_size : int
        P, a divisor of E.

    Returns
    -------
    ndarray of int64, shape [L]

    Raises
    ------
    InvalidInputError
        If E is not divisible by P or a load is negative.

    References
    ----------
    M. Dell'Amico, S. Martello, "Bounds for the cardinality constrained P‖Cmax
    problem", Journal of Scheduling 4 (2001) 123-138, doi:10.1002/jos.68 (the
    bounds of the average and of the largest with the smallest items); the
    pigeonhole argument for k > 0 is the classical one of P‖Cmax, completed by
    the smallest experts to S of them.
    """
    faults = Faults()
    array = integer_array(load, "load", faults, ndim=2, element="layer")
    faults.raise_if_any("placement bound")
    assert array is not None
    if ep_size < 1 or array.shape[1] % ep_size:
        faults.add(f"{array.shape[1]} experts are not divisible by ep_size {ep_size}")
    for layer, expert in np.argwhere(array < 0)[:5]:
        faults.add(f"layer {layer}, expert {expert}: load {array[layer, expert]} is negative")
    faults.raise_if_any("placement bound")
    return _placement_bound(array, int(ep_size))


def _placement_bound(load: IntArray, ep_size: int) -> IntArray:
    num_layers, num_experts = load.shape
    if not num_layers or not num_experts:
        return np.zeros(num_layers, dtype=np.int64)
    per_rank = num_experts // ep_size
    prefix = np.zeros((num_layers, num_experts + 1), dtype=np.int64)
    np.cumsum(-np.sort(-load, axis=1), axis=1, out=prefix[:, 1:])
    total = prefix[:, -1]
    k = np.arange(per_rank)
    top = prefix[:, k * ep_size + 1] - prefix[:, k * ep_size - k]
    rest = total[:, None] - prefix[:, num_experts - (per_rank - k - 1)]
    bound: IntArray = np.maximum(-(-total // ep_size), (top + rest).max(axis=1))
    return bound


def attention_bound(problem: Problem) -> tuple[int, int]:
    """Lower bounds on the attention work of all blocks, Σ_{r,g} A_{r,g}.

    Every block pays the largest of its q = D / G cells, for every operator
    class. The *average* bound replaces the largest by the mean.

    The *cell LP* uses that work per token grows with length (β ≥ 0) while the
    tokens of a cell are limited: one long sample makes a cell expensive, and
    there may not be enough long samples to make its neighbours as expensive.
    Sort the n = R·D cells by work, v_1 ≥ … ≥ v_n, and let V_k be the sum of the
    first k. The j-th largest block maximum is at least v_{(j−1)q+1}, because
    j − 1 blocks hold only (j − 1)q cells; hence the work of all blocks is at
    least Σ_j v_{(j−1)q+1}. This is minimised over all V with

    - V concave, V_0 = 0, V_n = the work of all samples;
    - V_k ≤ the most work k cells can hold: samples by descending length, at
      most (m − 1)·k of those longer than C / m, up to k·C tokens, the last
      one in part;
    - V_k ≥ the work of all samples less the most that n − k cells can hold
      without the k longest samples (some k cells hold those); and V_k ≥ the
      h smallest of the a largest samples, where a = m·n + b of them put
      h = k·m + min(k, b) into the fullest k cells.

    Both sides are integers. With μ ≥ 0 on the concavity constraints the
    minimum is bounded by Σ_k min(r_k·lower_k, r_k·upper_k), r the coefficients
    of the Lagrangian; this is evaluated in integers for the multipliers a LP
    solver returned, rounded, so that the solver's arithmetic cannot make it
    invalid. The bound is taken for each class and summed, and for all classes
    as one (Σ_s max ≥ max Σ_s); the larger counts.

    Parameters
    ----------
    problem : Problem

    Returns
    -------
    average, cells : int
        Work units; ``cells`` ≥ ``average``.

    References
    ----------
    The pigeonhole counts are those of bin packing, S. Martello, P. Toth,
    doi:10.1016/0166-218X(90)90094-S; Lagrangian bounds: A. M. Geoffrion,
    "Lagrangean relaxation for integer programming", Math. Programming Study 2
    (1974) 82-114, doi:10.1007/BFb0120690.
    """
    shard_size = problem.cluster.shard_size
    totals = [int(problem.attention_work[s].sum()) for s in range(len(problem.cost.attention))]
    average = sum(-(-total // shard_size) for total in totals)
    if not totals or shard_size == 1:
        return average, average
    by_class = 0
    for s, total in enumerate(totals):
        by_class += max(-(-total // shard_size), _cell_bound(problem, *problem.attention_coefficients(s)))
    together = 0
    if len(totals) > 1:
        coefficients = [problem.attention_coefficients(s) for s in range(len(totals))]
        together = _cell_bound(problem, sum(a for a, _ in coefficients), sum(b for _, b in coefficients))
    return average, max(average, by_class, together)


@njit(cache=True, nogil=True)
def _most_work(lengths: IntArray, density: IntArray, group: IntArray, first: int, num_cells: int, capacity: int) -> int:
    """Most work ``num_cells`` cells can hold of the samples from ``first`` on (lengths descend).

    ``group[i]`` is the m with C/m < aligned length ≤ C/(m−1): at most (m − 1)·num_cells
    samples longer than C / m fit. Density is work per token; the last sample is taken in part.
    """
    room = num_cells * capacity
    taken = 0
    work = 0
    for i in range(first, lengths.size):
        if taken >= (group[i] - 1) * num_cells:
            continue
        if lengths[i] >= room:
            return int(work + density[i] * room)
        room -= lengths[i]
        work += density[i] * lengths[i]
        taken += 1
    return work


@njit(cache=True, nogil=True)
def _cell_limits(
    lengths: IntArray, density: IntArray, group: IntArray, num_cells: int, capacity: int
) -> tuple[IntArray, IntArray]:
    """Lower and upper limits of V_k, k = 0..n; see :func:`attention_bound`."""
    num_samples = lengths.size
    prefix = np.zeros(num_samples + 1, dtype=np.int64)
    for i in range(num_samples):
        prefix[i + 1] = prefix[i] + density[i] * lengths[i]
    total = prefix[num_samples]
    lower = np.zeros(num_cells + 1, dtype=np.int64)
    upper = np.zeros(num_cells + 1, dtype=np.int64)
    for k in range(1, num_cells):
        upper[k] = min(total, _most_work(lengths, density, group, 0, k, capacity))
        lower[k] = max(0, total - _most_work(lengths, density, group, min(k, num_samples), num_cells - k, capacity))
        for a in range(1, num_samples + 1):
            m = a // num_cells
            h = k * m + min(k, a - m * num_cells)
            lower[k] = max(lower[k], prefix[a] - prefix[a - h])
    lower[num_cells] = total
    upper[num_cells] = total
    return lower, upper


def _samples_by_length(problem: Problem) -> tuple[IntArray, IntArray]:
    """Lengths, descending, and of each the m with C/m < aligned length ≤ C/(m−1)."""
    order = np.argsort(-problem.lengths, kind="stable")
    lengths = problem.lengths[order]
    fitting = problem.capacity // problem.aligned_lengths[order]
    return np.ascontiguousarray(lengths), np.ascontiguousarray(fitting + 1)


def _cell_bound(problem: Problem, per_token: int, per_square: int) -> int:
    lengths, group = _samples_by_length(problem)
    density = per_token + per_square * lengths
    lower, upper = _cell_limits(lengths, density, group, problem.num_cells, problem.capacity)
    return _least_group_maxima(lower, upper, problem.cluster.shard_size)


def _least_group_maxima(lower: IntArray, upper: IntArray, size: int) -> int:
    """Lower bound on Σ_j (V_{jq+1} − V_{jq}) over concave V within limits, V_0 = 0."""
    num_cells = len(lower) - 1
    cost = np.zeros(num_cells + 1, dtype=np.int64)
    starts = np.arange(0, num_cells, size)
    cost[starts + 1] += 1
    cost[starts] -= 1
    multipliers = _concavity_multipliers(lower, upper, cost)
    # Lagrangian in integers: scale·cost·V + Σ_k μ_k (V_{k+1} − 2 V_k + V_{k−1}) with μ ≥ 0, and the
    # last constraint V_{n−1} ≤ V_n in the place of V_{n+1} = V_n.
    coefficient = [_MULTIPLIER_SCALE * int(c) for c in cost]
    for k in range(1, num_cells + 1):
        mu = int(multipliers[k - 1])
        coefficient[k - 1] += mu
        if k < num_cells:
            coefficient[k] -= 2 * mu
            coefficient[k + 1] += mu
        else:
            coefficient[k] -= mu
    value = sum(r * int(lower[k] if r > 0 else upper[k]) for k, r in enumerate(coefficient))
    return -(-value // _MULTIPLIER_SCALE)


def _concavity_multipliers(lower: IntArray, upper: IntArray, cost: IntArray) -> IntArray:
    """Dual multipliers of V_{k+1} − 2 V_k + V_{k−1} ≤ 0, k = 1..n, scaled and rounded; all ≥ 0."""
    import highspy

    num_cells = len(lower) - 1
    scale = 1.0 / max(1, int(upper[-1]))
    solver = silent_highs()
    program: Any = highspy.HighsLp()
    program.num_col_ = num_cells + 1
    program.num_row_ = num_cells
    program.col_cost_ = cost.astype(np.float64)
    program.col_lower_ = lower * scale
    program.col_upper_ = np.maximum(lower, upper) * scale
    program.row_lower_ = np.full(num_cells, -highspy.kHighsInf)
    program.row_upper_ = np.zeros(num_cells)
    rows = np.arange(num_cells - 1)
    index = np.concatenate([np.stack([rows, rows + 1, rows + 2], axis=1).ravel(), [num_cells - 1, num_cells]])
    value = np.concatenate([np.tile([1.0, -2.0, 1.0], num_cells - 1), [1.0, -1.0]])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.append(np.arange(num_cells) * 3, len(index)).astype(np.int32)
    program.a_matrix_.index_ = index.astype(np.int32)
    program.a_matrix_.value_ = value
    solver.passModel(program)
    solver.run()
    duals = np.asarray(solver.getSolution().row_dual, dtype=np.float64)
    if duals.shape != (num_cells,) or not np.isfinite(duals).all():
        return np.zeros(num_cells, dtype=np.int64)
    rounded: IntArray = np.rint(np.maximum(0.0, -duals) * _MULTIPLIER_SCALE).astype(np.int64)
    return rounded


def _longest_cell_work(problem: Problem) -> int:
    """Least attention work, all classes, of the block that holds the longest sample."""
    lengths, group = _samples_by_length(problem)
    work = 0
    for s in range(len(problem.cost.attention)):
        per_token, per_square = problem.attention_coefficients(s)
        density = per_token + per_square * lengths
        total = int((density * lengths).sum())
        others = _most_work(lengths, density, group, 1, problem.num_cells - 1, problem.capacity)
        work += max(int(density[0] * lengths[0]), total - int(others))
    return work


def _sample_expert_load(problem: Problem, placement: Placement | None) -> IntArray:
    """Least Σ_l max_p of each sample alone, routed tokens, int64 [N]."""
    if not problem.num_layers:
        return np.zeros(problem.num_samples, dtype=np.int64)
    if placement is not None:
        load: IntArray = placement.rank_load(problem).max(axis=2).sum(axis=1, dtype=np.int64)
        return load
    out = np.empty(problem.num_samples, dtype=np.int64)
    for start in range(0, problem.num_samples, 64):
        chunk = problem.counts[start : start + 64].astype(np.int64)
        flat = chunk.reshape(-1, problem.num_experts)
        out[start : start + 64] = _placement_bound(flat, problem.ep_size).reshape(len(chunk), -1).sum(axis=1)
    return out


def _forced_block_load(problem: Problem) -> int:
    """Least Σ_l max_p of every block, routed tokens: what the other blocks have no room for."""
    blocks = problem.num_rows * problem.num_shards
    room = (blocks - 1) * problem.cluster.shard_size * problem.capacity
    routed = int(problem.batch.routed_tokens.sum()) - room
    return problem.num_layers * max(0, -(-problem.top_k * routed // problem.ep_size))


def problem_bounds(problem: Problem, placement: Placement | None = None) -> tuple[Bound, ...]:
    """Every bound of every level: what each method proves.

    Parameters
    ----------
    problem : Problem
    placement : Placement, optional
        With it, bounds of scope ``fixed-placement`` are listed too.

    Returns
    -------
    tuple of Bound
        By scope, level and method; several bounds of one level and scope hold
        at once, :func:`best_bound` picks the largest.

    Raises
    ------
    InvalidInputError
        If the placement does not fit the problem.
    """
    found = list(_scope_bounds(problem, None, LEVELS))
    if placement is not None:
        found += _scope_bounds(problem, placement, LEVELS)
    return tuple(found)


def best_bound(problem: Problem, level: str = LEVELS[0], placement: Placement | None = None) -> Bound:
    """The largest proven bound on one level.

    Parameters
    ----------
    problem : Problem
    level : str
        ``max_shard_work``, ``total_work`` or ``max_row_work``.
    placement : Placement, optional
        None: valid for any placement; else for packings under this one.

    Returns
    -------
    Bound

    Raises
    ------
    InvalidInputError
        If the level is unknown or the placement does not fit the problem.
    """
    if level not in LEVELS:
        raise InvalidInputError(f"level {level!r} is none of {', '.join(LEVELS)}", context="bound")
    return max(_scope_bounds(problem, placement, (level,)), key=lambda bound: bound.value)


def _scope_bounds(problem: Problem, placement: Placement | None, levels: tuple[str, ...]) -> list[Bound]:
    scope = SCOPES[1] if placement is None else SCOPES[0]
    unit, num_shards = problem.expert_unit, problem.num_shards
    num_blocks = problem.num_rows * num_shards
    if placement is not None:
        expert, expert_method = int(aggregate_load(problem, placement).max(axis=1, initial=0).sum()), "rank aggregate"
    else:
        expert, expert_method = int(_placement_bound(window_load(problem), problem.ep_size).sum()), "least aggregate"
    average, cells = attention_bound(problem)
    totals = [(expert * unit + average, f"{expert_method} + attention average")]
    if cells > average:
        totals.append((expert * unit + cells, f"{expert_method} + attention cells"))
    found = []
    for level in levels:
        divisor, suffix = {
            "max_shard_work": (num_shards, "" if num_shards == 1 else f" / {num_shards} shards"),
            "total_work": (1, ""),
            "max_row_work": (num_blocks, f" / {num_blocks} blocks"),
        }[level]
        for total, method in totals:
            found.append(
                Bound(level, scope, -(-total // divisor), method + suffix, problem.num_rows, problem.fingerprint)
            )
        if level == "max_row_work":
            alone = _sample_expert_load(problem, placement)
            block = problem.attention_work.sum(axis=0) + unit * alone
            found.append(
                Bound(level, scope, int(block.max()), "costliest sample", problem.num_rows, problem.fingerprint)
            )
            longest = int(np.argmax(problem.lengths))
            forced = _longest_cell_work(problem) + unit * max(int(alone[longest]), _forced_block_load(problem))
            found.append(
                Bound(level, scope, forced, "longest sample in filled cells", problem.num_rows, problem.fingerprint)
            )
    return found
