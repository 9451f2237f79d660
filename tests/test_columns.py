"""Set partitioning over block columns: exact at every capacity, truthful where it gives up."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Status
from routepack_opt.rows import pack_bins
from routepack_opt.score import evaluate
from routepack_opt.solvers.columns import Columns
from routepack_opt.solvers.pricing import exact_work, split_block
from routepack_opt.testing import brute_force, subset_optimum, tiny_problem


def placement_of(problem: Problem) -> Placement:
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def routed_problem(seed: int, num_samples: int, num_rows: int, num_shards: int, shard_size: int) -> Problem:
    """Production-like lengths, so that one unit of work is tiny."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(300, 4000, size=num_samples)
    counts = np.stack([rng.multinomial(length, rng.dirichlet(np.ones(8)), size=3) for length in lengths])
    cells = num_rows * num_shards * shard_size
    capacity = max(int(lengths.max()), int(lengths.sum() * 1.2 / cells))
    cost = CostModel((OperatorClass("a", Fraction(3, 7), 0), OperatorClass("b", 0, Fraction(5, 11))))
    while True:
        try:
            pack_bins(lengths, capacity, num_bins=cells)
            break
        except InvalidInputError:
            capacity += 50
    return Problem.from_arrays(
        lengths, counts, top_k=1, capacity=capacity, ep_size=4, dp_size=num_shards * shard_size,
        num_shards=num_shards, num_rows=num_rows, cost=cost,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("start_share", [0.0, 0.5])
def test_tiny_problems_are_solved_to_all_levels(seed: int, start_share: float) -> None:
    problem = tiny_problem(seed)
    result = planning.pack(problem, Columns(start_share=start_share), iteration_limit=4000, num_threads=1)
    best = evaluate(problem, brute_force(problem, placement_of(problem))).levels
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == best


@pytest.mark.parametrize(
    "shape", [(12, 3, 1, 2), (12, 2, 2, 1), (13, 4, 1, 1), (12, 1, 2, 2)], ids=lambda shape: "x".join(map(str, shape))
)
def test_production_capacities_match_the_subset_reference(shape: tuple[int, int, int, int]) -> None:
    problem = routed_problem(3, *shape)
    result = planning.pack(problem, "columns", iteration_limit=50_000, num_threads=1)
    best = evaluate(problem, subset_optimum(problem, placement_of(problem))).levels
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == best


def test_three_shards() -> None:
    problem = tiny_problem(9, num_samples=6, num_shards=3, shard_size=1, extra_rows=0)
    assert problem.num_shards == 3
    result = planning.pack(problem, "columns", iteration_limit=4000)
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == evaluate(problem, brute_force(problem, placement_of(problem))).levels


@pytest.mark.parametrize("cuts", [True, False])
def test_twenty_samples_in_four_rows_are_proved(cuts: bool) -> None:
    problem = routed_problem(5, 20, 4, 1, 2)
    result = planning.pack(problem, Columns(cuts=cuts), iteration_limit=200_000, num_threads=1)
    assert result.status is Status.OPTIMAL
    assert {point.level for point in result.trace.bounds} == {level.name for level in result.levels}
    for level in result.levels:
        points = [point.bound for point in result.trace.bounds if point.level == level.name]
        assert points == sorted(points)
        assert points[-1] <= level.value


def test_min_samples_per_cell() -> None:
    base = tiny_problem(5, num_samples=6, num_shards=1, shard_size=2, extra_rows=0)
    problem = base.replace(min_samples_per_cell=1, num_rows=2)
    result = planning.pack(problem, "columns", iteration_limit=4000)
    assert result.status is Status.OPTIMAL
    assert result.score is not None
    assert result.score.levels == evaluate(problem, brute_force(problem, placement_of(problem))).levels


def test_infeasibility_is_proved() -> None:
    cost = CostModel((OperatorClass("a", 1, 1),))
    problem = Problem.from_arrays([4, 7, 7, 5, 5, 6, 5, 6], capacity=15, ep_size=1, dp_size=1, num_rows=3, cost=cost)
    result = planning.pack(problem, "columns", iteration_limit=1000)
    assert result.status is Status.INFEASIBLE
    assert "3 rows" in result.reason


def test_giving_up_keeps_plan_and_says_so() -> None:
    problem = routed_problem(5, 20, 4, 1, 2)
    result = planning.pack(problem, Columns(max_columns=100), iteration_limit=20_000)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.EXHAUSTED)
    assert all(level.status is Status.FEASIBLE for level in result.levels)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "shape", [(12, 3, 1, 2), (12, 2, 2, 1), (12, 4, 1, 1), (11, 2, 1, 2)], ids=lambda shape: "x".join(map(str, shape))
)
@pytest.mark.parametrize("extra", [{}, {"min_samples_per_cell": 1}, {"length_alignment": 64}], ids=str)
def test_pricing_instead_of_a_list_bounds_and_proves(
    seed: int, shape: tuple[int, int, int, int], extra: dict[str, int]
) -> None:
    base = routed_problem(seed, *shape)
    problem = base.replace(**extra, capacity=base.capacity + 64, cost=base.cost)
    best = evaluate(problem, subset_optimum(problem, placement_of(problem))).levels
    bounded = planning.pack(problem, Columns(max_columns=1), iteration_limit=3000, num_threads=1)
    for level, value in zip(bounded.levels[:2], best[:2], strict=True):
        assert level.bound is not None
        assert level.bound <= value
        assert level.bound > 0.8 * value
    # Too few for all columns, enough for those that a better packing may use.
    solved = planning.pack(problem, Columns(max_columns=400, start_share=0.9), iteration_limit=50_000, num_threads=1)
    assert solved.status is Status.OPTIMAL
    assert solved.score is not None
    assert solved.score.levels == best


def test_pricing_proves_infeasibility() -> None:
    cost = CostModel((OperatorClass("a", 1, 1),))
    problem = Problem.from_arrays([4, 7, 7, 5, 5, 6, 5, 6], capacity=15, ep_size=1, dp_size=1, num_rows=3, cost=cost)
    listed = planning.pack(problem, Columns(max_columns=60), iteration_limit=1000)
    assert listed.status is Status.INFEASIBLE


def test_no_time_and_interrupts() -> None:
    problem = routed_problem(5, 24, 2, 2, 4)
    none = planning.pack(problem, "columns", time_limit=0)
    assert (none.status, none.limit, none.plan) == (Status.NO_SOLUTION, Limit.TIME, None)
    cells = pack_bins(problem.lengths, problem.capacity, num_bins=problem.num_cells)
    warm = Packing.from_cells(cells, dp_size=problem.dp_size)
    polls: list[int] = []

    def stop() -> bool:
        polls.append(1)
        return len(polls) > 10

    result = planning.pack(problem, Columns(start_share=0.0), time_limit=60, warm_start=warm, stop=stop)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    assert result.runtime < 30


@pytest.mark.parametrize("seed", range(5))
def test_best_split_of_a_block(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(1, 12, size=6))[::-1].astype(np.int64)
    attention = rng.integers(0, 30, size=(6, 2)).astype(np.int64)
    loads = rng.integers(0, 9, size=(6, 2, 3)).astype(np.int64)
    capacity, cells = 20, np.zeros(6, dtype=np.int64)
    members = np.arange(6, dtype=np.int64)
    best = None
    for least, choice in product((0, 1), product(range(2), repeat=6)):
        used = np.bincount(choice, weights=lengths, minlength=2)
        if used.max() > capacity or (least and np.bincount(choice, minlength=2).min() == 0):
            continue
        cost = sum(int(np.bincount(choice, weights=attention[:, s], minlength=2).max()) for s in range(2))
        best = cost if best is None else min(best, cost)
    value = split_block(members, lengths, attention, 2, capacity, 0, 2**62, cells)
    if best is None:
        assert value == 2**62
        return
    assert value == best
    assert sum(int(np.bincount(cells, weights=attention[:, s], minlength=2).max()) for s in range(2)) == best
    assert np.bincount(cells, weights=lengths).max() <= capacity
    whole = exact_work(63, lengths, attention, loads, 2, capacity, 0, 2**62)
    assert whole == best + int(loads.sum(axis=0).max(axis=1).sum())


def test_what_it_cannot_treat_is_refused() -> None:
    cost = CostModel((OperatorClass("a", 1, 1),))
    many = Problem.from_arrays(np.ones(63, dtype=int), capacity=64, ep_size=1, dp_size=1, cost=cost)
    assert "63 samples" in (Columns().unsupported(many) or "")
    equal = Problem.from_arrays(
        [1, 1], capacity=2, ep_size=1, dp_size=2, num_rows=1, cost=cost, equal_samples_per_slot=True
    )
    assert "equal_samples_per_slot" in (Columns().unsupported(equal) or "")
    with pytest.raises(InvalidInputError) as caught:
        Columns(max_columns=0, cuts=1, start_share=1.0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3
