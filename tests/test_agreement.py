"""Every exact backend against brute force on a generated family of tiny problems, to the last digit.

G 1-3, one or two slots a shard, 0-3 layers, 1-3 ranks, alignment 1-4, odd denominators, beta = 0, equal samples.
CP-SAT must prove everything; the floating-point backends may leave levels unproved, which are counted, but never claim
wrongly.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from routepack_opt import bounds, planning
from routepack_opt.plan import Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Result, Status
from routepack_opt.score import evaluate
from routepack_opt.testing import brute_force, tiny_problem

SEEDS = tuple(range(8))
PLENTY = 300_000
MILP = ("milp", "milp(engine='cbc')")

claims: Counter[tuple[str, str]] = Counter()


@cache
def family(seed: int) -> Problem:
    return tiny_problem(seed)


@cache
def packing_optimum(seed: int) -> tuple[int, int, int]:
    problem = family(seed)
    return evaluate(problem, brute_force(problem, contiguous(problem))).levels


@cache
def joint_optimum(seed: int) -> tuple[int, int, int]:
    return evaluate(family(seed), brute_force(family(seed))).levels


def contiguous(problem: Problem) -> Placement:
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def check(result: Result, best: tuple[int, int, int], name: str) -> None:
    """No claim is wrong: values are feasible, bounds hold, OPTIMAL levels are optimal."""
    assert result.score is not None
    assert result.score.levels >= best
    earlier_optimal = True
    for level, optimum in zip(result.levels, best, strict=True):
        claims[name, level.status.value] += 1
        if level.status is Status.OPTIMAL:
            assert level.value == optimum
            assert level.bound == optimum
        elif level.bound is not None and earlier_optimal:
            assert level.bound <= optimum
        earlier_optimal = earlier_optimal and level.value == optimum


def available(spec: str) -> bool:
    return planning._build(spec).available() is None


@pytest.mark.parametrize("seed", SEEDS)
def test_cpsat_equals_brute_force(seed: int) -> None:
    problem = family(seed)
    packed = planning.pack(problem, "cpsat", iteration_limit=PLENTY, num_threads=1)
    joint = planning.solve(problem, "cpsat", iteration_limit=PLENTY, num_threads=1)
    for result, best in ((packed, packing_optimum(seed)), (joint, joint_optimum(seed))):
        assert result.status is Status.OPTIMAL
        check(result, best, "cpsat")
    assert joint.score is not None
    assert packed.score is not None
    assert joint.score <= packed.score


@pytest.mark.parametrize("seed", SEEDS)
def test_columns_equal_brute_force(seed: int) -> None:
    result = planning.pack(family(seed), "columns", iteration_limit=2000, num_threads=1)
    assert result.status is Status.OPTIMAL
    check(result, packing_optimum(seed), "columns")


@pytest.mark.parametrize("seed", SEEDS[:5])
@pytest.mark.parametrize("spec", MILP)
def test_milp_claims_nothing_wrong(seed: int, spec: str) -> None:
    if not available(spec):
        pytest.skip(f"optional engine of {spec} is missing")
    problem = family(seed)
    check(planning.pack(problem, spec, iteration_limit=PLENTY, num_threads=1), packing_optimum(seed), spec)
    check(planning.solve(problem, spec, iteration_limit=PLENTY, num_threads=1), joint_optimum(seed), f"{spec} joint")


@pytest.mark.parametrize("seed", SEEDS)
def test_joint_never_above_the_hierarchy_nor_heuristics_below_the_optimum(seed: int) -> None:
    problem = family(seed)
    best = joint_optimum(seed)
    # Placers refuse a problem without routing counts.
    for planner in ("cpsat+cpsat", "lpt+annealing", "contiguous+ffd") if problem.num_layers else ("cpsat",):
        result = planning.solve(problem, planner, iteration_limit=20_000, num_threads=1)
        if result.score is not None:
            assert result.score.levels >= best, planner
    for level, optimum in zip(("max_shard_work", "total_work"), best[:2], strict=True):
        bound = bounds.best_bound(problem, level)
        assert bound is None or bound.value <= optimum


def test_unproved_levels_are_counted() -> None:
    """Shown with ``pytest -rP``: how many levels each backend proved and how many it left."""
    assert claims["cpsat", "feasible"] == 0
    assert claims["columns", "feasible"] == 0
    for name in sorted({name for name, _ in claims}):
        proved, left = claims[name, "optimal"], claims[name, "feasible"]
        print(f"{name}: {proved} levels proved, {left} left unproved")
        assert proved > left
