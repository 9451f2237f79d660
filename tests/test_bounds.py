"""Bounds against brute force on hundreds of tiny problems, piece by piece and whole."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import bounds, testing
from routepack_opt.bounds import (
    Bound,
    aggregate_load,
    attention_bound,
    best_bound,
    gap,
    placement_bound,
    problem_bounds,
    window_load,
)
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import LEVELS, breakdown, evaluate

FEW = 30_000


def contiguous(problem):
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def optimum(problem, placement=None):
    return dict(zip(LEVELS, evaluate(problem, testing.brute_force(problem, placement)).levels, strict=True))


def random_packings(problem, rng, tries):
    for _ in range(tries):
        packing = Packing.from_cells(
            rng.integers(0, problem.num_cells, size=problem.num_samples), dp_size=problem.dp_size
        )
        plan = Plan.of(problem, contiguous(problem), packing)
        detail = breakdown(problem, plan)
        used = np.zeros(problem.num_cells, dtype=np.int64)
        np.add.at(used, packing.cells(problem), problem.aligned_lengths)
        if used.max() <= problem.capacity:
            yield detail


def test_every_bound_of_a_fixed_placement_holds():
    checked = 0
    tight: Counter[str] = Counter()
    for seed in range(300):
        problem = testing.tiny_problem(seed)
        if problem.num_cells**problem.num_samples > FEW:
            continue
        placement = contiguous(problem)
        best = optimum(problem, placement)
        for bound in problem_bounds(problem, placement):
            # A bound for any placement holds for this one too.
            assert bound.value <= best[bound.level], (seed, bound)
            if bound.scope == "fixed-placement":
                tight[bound.level] += bound.value == best[bound.level]
        checked += 1
    assert checked > 120
    assert all(tight[level] > 10 for level in LEVELS)


def test_every_bound_of_any_placement_holds():
    checked = tight = 0
    for seed in range(300):
        problem = testing.tiny_problem(seed, num_layers=1 + seed % 2, ep_size=2, experts_per_rank=2)
        if problem.num_cells**problem.num_samples > FEW // 9:
            continue
        best = optimum(problem)
        for bound in problem_bounds(problem):
            assert bound.scope == "any-placement"
            assert bound.value <= best[bound.level], (seed, bound)
            tight += bound.value == best[bound.level]
        checked += 1
    assert checked > 80
    assert tight > 50


def test_a_fixed_placement_never_has_the_weaker_bound():
    for seed in range(40):
        problem = testing.tiny_problem(seed, num_layers=2, ep_size=2, experts_per_rank=2)
        for level in LEVELS:
            fixed = best_bound(problem, level, contiguous(problem))
            free = best_bound(problem, level)
            assert (fixed.scope, free.scope) == bounds.SCOPES
            assert fixed.value >= free.value


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_placement_bound_is_below_the_best_grouping(ep_size, per_rank, seed):
    rng = np.random.default_rng(seed)
    load = rng.integers(0, rng.choice([2, 10, 1000]), size=(1, ep_size * per_rank))
    items = tuple(range(load.shape[1]))
    best = min(max(int(load[0, list(g)].sum()) for g in groups) for groups in testing._groupings(items, per_rank))
    assert placement_bound(load, ep_size)[0] <= best


@pytest.mark.parametrize(
    ("load", "ep_size", "bound"),
    [
        ([5, 5, 5, 5], 2, 10),  # average
        ([9, 2, 1, 1], 2, 10),  # largest with the smallest
        ([6, 6, 6, 0, 0, 0], 2, 12),  # two of the three largest on one rank, and nothing else
        ([6, 6, 6, 1, 1, 1], 2, 13),
        ([7, 3], 1, 10),
        ([4, 3, 2, 1], 4, 4),
    ],
)
def test_placement_bound_by_hand(load, ep_size, bound):
    assert placement_bound([load], ep_size).tolist() == [bound]


def test_placement_bound_refuses_nonsense():
    with pytest.raises(InvalidInputError) as caught:
        placement_bound([[1, -2, 3]], 2)
    assert len(caught.value.faults) == 2
    assert placement_bound(np.zeros((0, 4), dtype=np.int64), 2).shape == (0,)


def test_aggregate_load_is_the_sum_over_blocks():
    problem = testing.tiny_problem(6, num_layers=3, ep_size=3, experts_per_rank=2)
    placement = next(testing.every_placement(problem))
    plan = testing.brute_force(problem, placement)
    load = aggregate_load(problem, placement)
    assert (evaluate(problem, plan).breakdown.rank_load.sum(axis=(0, 1)) == load).all()
    assert (load.sum(axis=1) == window_load(problem).sum(axis=1)).all()
    with pytest.raises(InvalidInputError, match="ep_size 2"):
        aggregate_load(problem, Placement.contiguous(3, 6, ep_size=2))


def test_cell_limits_hold_for_random_feasible_packings():
    checked = 0
    for seed in range(40):
        problem = testing.tiny_problem(seed, num_layers=0, num_samples=7, num_shards=2, shard_size=2, extra_rows=1)
        lengths, group = bounds._samples_by_length(problem)
        rng = np.random.default_rng(seed)
        for s in range(len(problem.cost.attention)):
            per_token, per_square = problem.attention_coefficients(s)
            density = per_token + per_square * lengths
            lower, upper = bounds._cell_limits(lengths, density, group, problem.num_cells, problem.capacity)
            least = bounds._least_group_maxima(lower, upper, 2)
            for detail in random_packings(problem, rng, 12):
                work = np.sort(detail.cell_work[s].ravel())[::-1]
                sums = np.concatenate([[0], np.cumsum(work)])
                assert (lower <= sums).all()
                assert (sums <= upper).all()
                maxima = detail.cell_work[s].reshape(problem.num_rows, 2, 2).max(axis=2).sum()
                assert least <= maxima
                checked += 1
    assert checked > 100


@given(st.integers(0, 2**31), st.sampled_from([1, 3, 50]))
@settings(max_examples=40, deadline=None)
def test_any_multipliers_give_a_valid_cell_bound(seed, scale):
    rng = np.random.default_rng(seed)
    work = np.sort(rng.integers(0, 1000, size=12))[::-1]
    sums = np.concatenate([[0], np.cumsum(work)])
    lower = np.maximum(0, sums - rng.integers(0, 5, size=13))
    upper = sums + rng.integers(0, 5, size=13)
    lower[0] = upper[0] = 0
    lower[12] = upper[12] = sums[12]
    multipliers = rng.integers(0, scale * bounds._MULTIPLIER_SCALE, size=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_concavity_multipliers", lambda *_: multipliers)
        assert bounds._least_group_maxima(lower, upper, 3) <= work[::3].sum()
    assert bounds._least_group_maxima(sums, sums, 3) == work[::3].sum()


def one_long_sample(shard_size=2):
    """One sample that fills a cell and short ones that cannot make another cell as expensive."""
    return Problem.from_arrays(
        [64] + [8] * 24,
        capacity=64,
        ep_size=1,
        dp_size=shard_size,
        num_rows=2,
        cost=CostModel((OperatorClass("softmax", Fraction(0), Fraction(1)),)),
    )


def test_the_cell_bound_sees_a_lonely_long_sample():
    # Work t²: one cell of 64² and three of 8·8². The long sample's block pays 4096, the other one 512.
    problem = one_long_sample()
    average, cells = attention_bound(problem)
    unit = problem.attention_coefficients(0)[1]
    assert average == unit * (4096 + 3 * 512) // 2
    assert cells == unit * (4096 + 512)
    best = best_bound(problem, "total_work")
    assert best.value == cells
    assert "attention cells" in best.method
    # The row with the long sample must cost as much; here area says less.
    assert best_bound(problem, "max_row_work").value == unit * 4096


def test_without_neighbours_the_average_is_exact():
    problem = one_long_sample().replace(cluster=one_long_sample().cluster, num_rows=4)
    single = Problem.from_arrays(problem.lengths, capacity=64, ep_size=1, dp_size=1, num_rows=4, cost=problem.cost)
    average, cells = attention_bound(single)
    assert average == cells == single.attention_work.sum()


def test_longest_sample_in_filled_cells():
    # Two cells of 10 and 19 tokens: the cell of the 7 must take at least 9 tokens, so 2 of the 3s' and so on.
    problem = Problem.from_arrays(
        [7, 4, 3, 3, 2],
        capacity=10,
        ep_size=1,
        dp_size=1,
        num_rows=2,
        cost=CostModel((OperatorClass("linear", Fraction(1), Fraction(0)),)),
    )
    token = problem.attention_coefficients(0)[0]
    forced = [bound for bound in problem_bounds(problem) if bound.method == "longest sample in filled cells"]
    assert [bound.value for bound in forced] == [9 * token]
    assert optimum(problem, contiguous(problem))["max_row_work"] >= 10 * token


def test_gap_is_relative_to_the_bound():
    assert gap(110, 100) == pytest.approx(0.1)
    assert gap(100, 100) == 0.0
    assert gap(None, 100) is None
    assert gap(5, None) is None
    assert gap(0, 0) == 0.0
    assert gap(3, 0) is None
    with pytest.raises(InvalidInputError, match="below the proven bound"):
        gap(99, 100)


def test_gap_of_a_score_needs_the_same_rows():
    problem = testing.tiny_problem(4, num_layers=1, ep_size=2)
    score = evaluate(problem, testing.brute_force(problem, contiguous(problem)))
    for level in LEVELS:
        bound = best_bound(problem, level)
        expected = score.levels[LEVELS.index(level)] / bound.value - 1
        assert gap(score, bound) == pytest.approx(expected)
    with pytest.raises(InvalidInputError, match="no gap across rows"):
        gap(score, replace(bound, num_rows=bound.num_rows + 1))
    with pytest.raises(InvalidInputError, match="three levels"):
        gap(score, 3)


def test_bounds_name_their_method_and_refuse_unknown_levels():
    problem = testing.tiny_problem(2, num_layers=2, ep_size=2, num_shards=2)
    for bound in problem_bounds(problem, contiguous(problem)):
        assert isinstance(bound, Bound)
        assert bound.method
        assert bound.num_rows == problem.num_rows
        assert str(bound.value) in repr(bound)
    with pytest.raises(InvalidInputError, match="level 'row' is none of"):
        best_bound(problem, "row")


def test_bounds_without_routing_and_without_attention():
    plain = testing.tiny_problem(1, num_layers=0)
    assert best_bound(plain).value > 0
    routed = testing.tiny_problem(1, num_layers=2, ep_size=2, experts_per_rank=2)
    routed = routed.replace(cost=CostModel())
    assert attention_bound(routed) == (0, 0)
    total = placement_bound(window_load(routed), 2).sum() * routed.expert_unit
    assert best_bound(routed, "total_work").value == total
