"""CP-SAT: what it claims, and how it ends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Status
from routepack_opt.rows import pack_bins
from routepack_opt.score import evaluate
from routepack_opt.solvers.cpsat import CpSat
from routepack_opt.testing import brute_force, every_placement, tiny_problem

PLENTY = 200_000  # milliseconds of deterministic time


def medium_problem() -> Problem:
    """Too large to be proved at once; plans are easy to find."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(100, 900, size=40)
    counts = np.zeros((40, 4, 8), dtype=np.int64)
    for i, length in enumerate(lengths):
        counts[i] = rng.multinomial(length, rng.dirichlet(np.ones(8)), size=4)
    return Problem.from_arrays(
        lengths, counts, top_k=1, capacity=3000, ep_size=4, dp_size=4, num_shards=2, num_rows=4,
        cost=CostModel((OperatorClass("a", 1, 2),)),
    )  # fmt: skip


def first_packing(problem: Problem) -> Packing:
    cells = pack_bins(problem.aligned_lengths, problem.capacity, num_bins=problem.num_cells)
    return Packing.from_cells(cells, dp_size=problem.dp_size)


def infeasible_problem() -> Problem:
    """Three cells of 15 that the simple row bound thinks enough for these eight samples, and that are not."""
    cost = CostModel((OperatorClass("a", 1, 1),))
    return Problem.from_arrays([4, 7, 7, 5, 5, 6, 5, 6], capacity=15, ep_size=1, dp_size=1, num_rows=3, cost=cost)


@pytest.mark.parametrize("flag", [None, "symmetry", "rank_sums", "window_loads", "attention_averages", "area_bounds"])
def test_every_formulation_variant_has_the_same_optimum(flag: str | None) -> None:
    solver = CpSat() if flag is None else dataclasses.replace(CpSat(), **{flag: False})
    problem = tiny_problem(25)
    result = planning.solve(problem, solver, iteration_limit=PLENTY, num_threads=1)
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == evaluate(problem, brute_force(problem)).levels
    assert [level.bound for level in result.levels] == list(result.score.levels)


@pytest.mark.parametrize("rule", ["min_samples_per_cell", "equal_samples_per_slot", "length_alignment"])
def test_rules_of_the_problem_are_obeyed(rule: str) -> None:
    lengths = np.array([9, 8, 7, 6, 5, 3])
    problem = Problem.from_arrays(
        lengths, capacity=24, ep_size=1, dp_size=2, num_shards=2, num_rows=2,
        cost=CostModel((OperatorClass("a", 1, 3),)), **{rule: 4 if rule == "length_alignment" else True + 0 if
        rule == "min_samples_per_cell" else True},
    )  # fmt: skip
    result = planning.pack(problem, "cpsat", iteration_limit=PLENTY, num_threads=1)
    best = brute_force(problem, Placement.contiguous(0, 0, ep_size=1))
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == evaluate(problem, best).levels


def test_placer_is_exact_for_the_window() -> None:
    problem = tiny_problem(5, num_layers=2, ep_size=2, experts_per_rank=2)
    result = planning.place(problem, "cpsat", iteration_limit=PLENTY, num_threads=1)
    load = problem.counts.sum(axis=0, dtype=np.int64)
    least = min(
        sum(max(int(load[layer, ranks[layer] == p].sum()) for p in range(2)) for layer in range(2))
        for ranks in (placement.rank_of_expert for placement in every_placement(problem))
    )
    assert result.status is Status.OPTIMAL
    assert result.levels[0].value == least * problem.expert_unit


def test_infeasibility_is_proved_with_a_reason() -> None:
    result = planning.pack(infeasible_problem(), "cpsat", iteration_limit=PLENTY, num_threads=1)
    assert result.status is Status.INFEASIBLE
    assert result.limit is None
    assert result.plan is None
    assert "3 rows" in result.reason


def test_no_time_gives_no_solution_or_the_warm_start() -> None:
    problem = medium_problem()
    result = planning.pack(problem, "cpsat", time_limit=0)
    assert (result.status, result.limit, result.plan) == (Status.NO_SOLUTION, Limit.TIME, None)
    warm = first_packing(problem)
    kept = planning.pack(problem, "cpsat", time_limit=0, warm_start=warm)
    assert (kept.status, kept.limit) == (Status.FEASIBLE, Limit.TIME)
    assert kept.packing == warm
    joint = planning.solve(problem, "cpsat+cpsat", time_limit=0)
    assert joint.status is Status.NO_SOLUTION


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_an_interrupt_keeps_the_best_plan(error: type[BaseException] | None) -> None:
    problem = medium_problem()
    polls = []

    def stop() -> bool:
        polls.append(1)
        if len(polls) > 12 and error is not None:
            raise error
        return len(polls) > 12

    warm = first_packing(problem)
    result = planning.pack(problem, "cpsat", time_limit=60, warm_start=warm, stop=stop, num_threads=1)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    assert result.runtime < 50
    assert result.score is not None
    assert result.score <= evaluate(problem, planning.Plan.of(problem, result.placement, warm))


def test_an_iteration_limit_is_reproducible_and_truthful() -> None:
    problem = medium_problem()
    warm = first_packing(problem)
    runs = [
        planning.pack(problem, "cpsat", iteration_limit=60, seed=3, num_threads=threads, warm_start=warm)
        for threads in (1, 2)
    ]
    assert runs[0].packing == runs[1].packing
    assert (runs[0].status, runs[0].limit) == (Status.FEASIBLE, Limit.ITERATIONS)
    assert runs[0].levels[0].bound is not None
    assert runs[0].levels[0].bound <= runs[0].levels[0].value


def test_numbers_beyond_its_range_are_refused_before_the_model_is_built() -> None:
    cost = CostModel((OperatorClass("a", 2**40 + 1, 0),))
    lengths = np.full(8, 2**16 - 1)
    problem = Problem.from_arrays(lengths, capacity=2**17, ep_size=1, dp_size=8, num_shards=8, num_rows=1, cost=cost)
    reason = CpSat().unsupported(problem)
    assert reason is not None
    assert "2^62" in reason


def test_the_trace_holds_incumbents_and_bounds() -> None:
    problem = tiny_problem(25)
    result = planning.solve(problem, "cpsat", iteration_limit=PLENTY, num_threads=1)
    levels = [incumbent.levels for incumbent in result.trace.incumbents]
    assert levels == sorted(levels, reverse=True)
    assert {point.level for point in result.trace.bounds} == {level.name for level in result.levels}
    for level in result.levels:
        assert all(point.bound <= level.value for point in result.trace.bounds if point.level == level.name)
