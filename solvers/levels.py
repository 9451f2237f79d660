"""Lexicographic solving with an exact engine: the loop that CP-SAT and MIP backends share.

Level after level is minimised, held with ``level <= value`` and handed to the
next as a warm start. Every decision an engine returns is read as a plan and
evaluated in integers; only then does it count. An engine's bound is believed
only while no evaluated plan refutes it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray
from routepack_opt.bounds import placement_bound
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.score import LEVELS, evaluate, violations
from routepack_opt.solver import AGGREGATE_LEVEL, BLOCK_LEVEL, Run, Solver
from routepack_opt.solvers.formulation import (
    BuildStopped,
    LinearModel,
    PackingModel,
    PlacementModel,
    Redundancy,
    joint_model,
    packing_model,
    placement_model,
)

__all__ = [
    "Budget",
    "Engine",
    "LevelSolver",
    "Outcome",
    "block_loads",
    "place_by_layer",
    "solve_levels",
    "start_ranks",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Budget:
    """What one call of an engine may use.

    Attributes
    ----------
    seconds : float
        inf without a time limit.
    iterations : float or None
        In the engine's iterations.
    """

    seconds: float
    iterations: float | None


@dataclass(frozen=True)
class Outcome:
    """What an engine says after one minimisation.

    Attributes
    ----------
    bound : int or None
        Safe lower bound on the objective variable.
    infeasible : bool
        The engine proved that no solution exists.
    limit : Limit or None
        Why it ended, if not with a proof.
    iterations : float
        Iterations used.
    """

    bound: int | None
    infeasible: bool
    limit: Limit | None
    iterations: float = 0.0


class Engine(Protocol):
    """An engine holding one linear model; constraints are only ever added."""

    def tighten(self, variable: int, value: int) -> None:
        """Add ``variable <= value``."""

    def minimise(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        """Minimise a variable; hand every solution found to ``on_solution``, in the order of the model's variables."""


@dataclass(frozen=True)
class LevelSolver(Solver):
    """Packer, placer and joint planner on the shared models; a backend adds its engine.

    Parameters
    ----------
    symmetry, rank_sums, window_loads, attention_averages, area_bounds : bool
        What the model holds beyond a correct formulation; see
        :class:`routepack_opt.solvers.formulation.Redundancy`.
    level_share : float
        Share of the remaining budget that a level may use, in (0, 1); the last
        level may use all of it.
    """

    symmetry: bool = True
    rank_sums: bool = True
    window_loads: bool = True
    attention_averages: bool = True
    area_bounds: bool = True
    level_share: float = 0.7

    def __post_init__(self) -> None:
        faults = Faults()
        for flag in dataclasses.fields(self):
            value = getattr(self, flag.name)
            if isinstance(flag.default, bool) and not isinstance(value, bool):
                faults.add(f"{flag.name} is {value!r}; it must be True or False")
        share = self.level_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
            faults.add(f"level_share is {share!r}; it must be in (0, 1)")
        self._check(faults)
        faults.raise_if_any(self.name)

    def _check(self, faults: Faults) -> None:
        """Add faults of further parameters."""

    def make_engine(self, linear: LinearModel) -> Engine:
        """Build an engine for a model."""
        raise NotImplementedError

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Place experts for the window load, or for the blocks of ``packing``."""
        return place_by_layer(problem, packing, run, self.make_engine, self._redundancy)

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples for a fixed placement."""
        plan = self._solve(problem, placement, run)
        return None if plan is None else plan.packing

    def plan(self, problem: Problem, run: Run) -> Plan | None:
        """Choose placement and packing in one model."""
        return self._solve(problem, None, run)

    def _solve(self, problem: Problem, placement: Placement | None, run: Run) -> Plan | None:
        try:
            if placement is None:
                model = joint_model(problem, self._redundancy, stop=run.stopped)
            else:
                model = packing_model(problem, placement, self._redundancy, stop=run.stopped)
            engine = self.make_engine(model.linear)
        except BuildStopped:
            warm = run.warm_start
            return warm if warm is None or placement is None else Plan.of(problem, placement, warm.packing)
        return solve_levels(model, engine, run, level_share=self.level_share)

    @property
    def _redundancy(self) -> Redundancy:
        return Redundancy(
            symmetry=self.symmetry,
            rank_sums=self.rank_sums,
            window_loads=self.window_loads,
            attention_averages=self.attention_averages,
            area_bounds=self.area_bounds,
        )


def solve_levels(
    model: PackingModel,
    engine: Engine,
    run: Run,
    *,
    level_share: float,
) -> Plan | None:
    """Minimise the three levels one after another.

    Parameters
    ----------
    model : PackingModel
    engine : Engine
        Of ``model.linear``.
    run : Run
        Gets incumbents, bounds and claims.
    level_share : float
        Share of the time and iterations left that a level may use; the last
        one may use all of it.

    Returns
    -------
    Plan or None
        The best plan seen, the warm start included.
    """
    problem = model.problem
    best: Plan | None = None
    values: tuple[int, int, int] | None = None

    def consider(plan: Plan) -> None:
        nonlocal best, values
        if violations(problem, plan):
            return
        found = evaluate(problem, plan).levels
        if values is None or found < values:
            best, values = plan, found
            run.report(plan)

    warm = run.warm_start
    if warm is not None:
        consider(warm if model.placement is None else Plan.of(problem, model.placement, warm.packing))

    def read(assignment: Sequence[float]) -> None:
        try:
            consider(Plan.of(problem, model.placement_of(assignment), model.packing(assignment)))
        except InvalidInputError:
            log.debug("an engine returned ownership that is no placement; ignored")

    bounds: list[int | None] = [None, None, None]
    limits: list[Limit | None] = [None, None, None]
    runtimes = [0.0, 0.0, 0.0]
    iterations = None if run.iteration_limit is None else float(run.iteration_limit)
    same_as_first = [False, problem.num_shards == 1, problem.num_shards == 1 and problem.num_rows == 1]
    for k, level in enumerate(LEVELS):
        if same_as_first[k]:
            bounds[k], limits[k] = bounds[0], limits[0]
            continue
        limit = run.limit_reached()
        if limit is not None or run.stopped():
            limits[k] = run.limit_reached() or Limit.TIME
            continue
        if iterations is not None and iterations <= 0:
            limits[k] = Limit.ITERATIONS
            continue
        share = 1.0 if all(same_as_first[k + 1 :]) else level_share
        budget = Budget(run.time_left() * share, None if iterations is None else iterations * share)
        hint = None if best is None else model.assignment(best.placement, best.packing)
        if values is not None:
            engine.tighten(model.levels[k], values[k] // model.unit)

        def on_bound(bound: float, level: str = level) -> None:
            safe = int(bound - 1e-6 * abs(bound)) * model.unit
            if safe > 0:
                run.bound(level, safe)

        start = time.perf_counter()
        outcome = engine.minimise(model.levels[k], hint, budget, run, read, on_bound)
        runtimes[k] = time.perf_counter() - start
        if iterations is not None:
            iterations -= outcome.iterations
        run.progress((k + 1) / len(LEVELS))
        if outcome.infeasible:
            if values is None and k == 0:
                run.claim_infeasible(
                    f"no packing of {problem.num_samples} samples into {problem.num_rows} rows x {problem.dp_size} DP "
                    f"slots of {problem.capacity} tokens exists: proved by exhaustive search; more rows are needed"
                )
                return None
            log.warning("the engine calls level %s infeasible although a plan is known; no claim is made", level)
            limits[k] = Limit.EXHAUSTED
            continue
        bound = None if outcome.bound is None else outcome.bound * model.unit
        if bound is not None and values is not None and bound > values[k]:
            log.warning("the engine's bound %d on %s is refuted by a plan of %d; dropped", bound, level, values[k])
            bound = None
        bounds[k] = bound
        if bound is not None:
            run.bound(level, bound)
        limits[k] = outcome.limit or Limit.EXHAUSTED
        if values is None:
            break
        engine.tighten(model.levels[k], values[k] // model.unit)
    proved = True
    for k, level in enumerate(LEVELS):
        value, bound = (None if values is None else values[k]), bounds[k]
        if value is not None and bound is not None and bound > value:
            bound = None  # a later level found a better plan than the bound allows: the bound was wrong
        proved = proved and value is not None and bound == value
        limit = None if proved else (limits[k] or run.limit_reached() or Limit.TIME)
        run.claim(level, value, bound, proved=proved, limit=limit, runtime=runtimes[k])
    return best


def block_loads(problem: Problem, packing: Packing | None) -> IntArray:
    """Load of every expert in the window (one block) or in each block of a packing, int64 [B, L, E]."""
    if packing is None:
        window: IntArray = problem.counts.sum(axis=0, dtype=np.int64)[None]
        return window
    blocks = packing.row_of_sample * problem.num_shards + problem.shard_of_slot[packing.dp_slot_of_sample]
    out = np.zeros((problem.num_rows * problem.num_shards, problem.num_layers, problem.num_experts), dtype=np.int64)
    for i, block in enumerate(blocks.tolist()):
        out[block] += problem.counts[i]
    used: IntArray = out[out.reshape(len(out), -1).any(axis=1)]
    return used


@njit(cache=True, nogil=True)
def _exchange_until_stuck(load: npt.NDArray[np.int64], ranks: npt.NDArray[np.int64], ep_size: int) -> None:
    """Exchange pairs of experts while Σ_b max_p falls."""
    num_blocks, num_experts = load.shape
    sums = np.zeros((num_blocks, ep_size), dtype=np.int64)
    for e in range(num_experts):
        for b in range(num_blocks):
            sums[b, ranks[e]] += load[b, e]
    improved = True
    while improved:
        improved = False
        for e in range(num_experts):
            for f in range(e + 1, num_experts):
                p, q = ranks[e], ranks[f]
                if p == q:
                    continue
                change = 0
                for b in range(num_blocks):
                    before = after = 0
                    moved = load[b, f] - load[b, e]
                    for rank in range(ep_size):
                        before = max(before, sums[b, rank])
                        value = sums[b, rank]
                        if rank == p:
                            value += moved
                        elif rank == q:
                            value -= moved
                        after = max(after, value)
                    change += after - before
                if change < 0:
                    for b in range(num_blocks):
                        moved = load[b, f] - load[b, e]
                        sums[b, p] += moved
                        sums[b, q] -= moved
                    ranks[e], ranks[f] = q, p
                    improved = True


def start_ranks(load: IntArray, *, ep_size: int) -> IntArray:
    """A good placement of one layer: longest processing time with cardinality, then pair exchanges.

    Parameters
    ----------
    load : ndarray of int64, shape [B, E]
        Load of each expert in each block.
    ep_size : int
        P.

    Returns
    -------
    ndarray of int64, shape [E]
        Rank of each expert.
    """
    num_experts = load.shape[1]
    total = load.sum(axis=0)
    ranks = np.zeros(num_experts, dtype=np.int64)
    sums, owned = np.zeros(ep_size, dtype=np.int64), np.zeros(ep_size, dtype=np.int64)
    for e in np.argsort(-total, kind="stable").tolist():
        open_ranks = np.flatnonzero(owned < num_experts // ep_size)
        p = open_ranks[np.argmin(sums[open_ranks])]
        ranks[e] = p
        sums[p] += total[e]
        owned[p] += 1
    _exchange_until_stuck(np.ascontiguousarray(load), ranks, ep_size)
    return ranks


def _peak_sum(load: IntArray, ranks: IntArray, ep_size: int) -> int:
    return int(
        np.stack([load[:, ranks == p].sum(axis=1) for p in range(ep_size)], axis=1).max(axis=1).sum()
        if len(load)
        else 0
    )


def place_by_layer(
    problem: Problem,
    packing: Packing | None,
    run: Run,
    make_engine: Callable[[LinearModel], Engine],
    redundancy: Redundancy,
) -> Placement | None:
    """Place layer by layer, exactly: Σ_b max_p of the window or of the blocks of a packing.

    A layer whose start meets the combinatorial bound needs no engine.

    Parameters
    ----------
    problem : Problem
    packing : Packing or None
    run : Run
    make_engine : callable
        From a linear model to an engine for it.
    redundancy : Redundancy

    Returns
    -------
    Placement
    """
    level = AGGREGATE_LEVEL if packing is None else BLOCK_LEVEL
    begin = time.perf_counter()
    loads = block_loads(problem, packing)
    ep_size, num_layers = problem.ep_size, problem.num_layers
    ranks = np.stack([start_ranks(loads[:, layer], ep_size=ep_size) for layer in range(num_layers)])
    values = [_peak_sum(loads[:, layer], ranks[layer], ep_size) for layer in range(num_layers)]
    by_block = sum(placement_bound(block, ep_size) for block in loads)
    bounds: list[int] = np.maximum(by_block, placement_bound(loads.sum(axis=0), ep_size)).tolist()

    def current() -> Placement:
        return Placement.from_rank_of_expert(ranks, ep_size=ep_size)

    run.report(current())
    limit: Limit | None = None
    iterations = None if run.iteration_limit is None else float(run.iteration_limit)
    left = [layer for layer in range(num_layers) if bounds[layer] < values[layer]]
    for position, layer in enumerate(left):
        if run.stopped():
            limit = run.limit_reached() or Limit.TIME
            break
        if iterations is not None and iterations <= 0:
            limit = Limit.ITERATIONS
            break
        load = loads[:, layer]
        model = placement_model(load, redundancy, ep_size=ep_size)
        engine = make_engine(model.linear)
        engine.tighten(model.objective, values[layer] // model.unit)
        share = 1.0 / (len(left) - position)

        def read(
            assignment: Sequence[float],
            model: PlacementModel = model,
            layer: int = layer,
            load: IntArray = load,
        ) -> None:
            found = model.ranks(assignment)
            if (np.bincount(found, minlength=ep_size) != problem.num_experts // ep_size).any():
                return
            value = _peak_sum(load, found, ep_size)
            if value < values[layer]:
                ranks[layer], values[layer] = found, value
                run.report(current())

        budget = Budget(run.time_left() * share, None if iterations is None else iterations * share)
        hint = model.assignment(ranks[layer])
        outcome = engine.minimise(model.objective, hint, budget, run, read, lambda _: None)
        if iterations is not None:
            iterations -= outcome.iterations
        if outcome.bound is not None and outcome.bound * model.unit <= values[layer]:
            bounds[layer] = max(bounds[layer], outcome.bound * model.unit)
        if bounds[layer] < values[layer]:
            limit = outcome.limit or Limit.EXHAUSTED
        run.progress((position + 1) / len(left))
    value, bound = sum(values) * problem.expert_unit, sum(bounds) * problem.expert_unit
    proved = value == bound
    run.bound(level, bound)
    run.claim(
        level,
        value,
        bound,
        proved=proved,
        limit=None if proved else limit or Limit.EXHAUSTED,
        runtime=time.perf_counter() - begin,
    )
    return current()
