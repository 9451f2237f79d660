from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import breakdown, evaluate, packing_violations, violations

COST = CostModel(
    (OperatorClass("mla", Fraction(1, 3), Fraction(7, 2)), OperatorClass("kda", Fraction(5, 4), Fraction(0)))
)


def build(seed: int, **changes: Any) -> tuple[Problem, Plan]:
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(1, 9))
    lengths = rng.integers(1, 20, num_samples)
    counts = np.zeros((num_samples, 2, 4), dtype=np.int64)
    for i, t in enumerate(lengths):
        for layer in range(2):
            first = int(rng.integers(0, t + 1))
            counts[i, layer] = [first, t - first, first, t - first]
    options: dict[str, Any] = {
        "capacity": 200,
        "ep_size": 2,
        "dp_size": 4,
        "num_shards": 2,
        "num_rows": 2,
        "cost": COST,
        "top_k": 2,
    }
    problem = Problem.from_arrays(lengths, counts, **(options | changes))
    slots = np.stack([rng.permutation(4) for _ in range(2)])
    plan = Plan.from_arrays(
        problem, rng.integers(0, problem.num_rows, num_samples), rng.integers(0, problem.dp_size, num_samples), slots
    )
    return problem, plan


def reference(problem: Problem, plan: Plan) -> tuple[Fraction, Fraction, Fraction]:
    """The cost of the model, written down with fractions, sample by sample."""
    c = problem.capacity
    block = {}
    for r in range(problem.num_rows):
        for g, shard in enumerate(problem.shards):
            cost = Fraction(0)
            for operator in problem.cost.attention:
                cells = []
                for d in shard:
                    inside = [int(problem.lengths[i]) for i in plan.packing.samples_of_cell(r, d)]
                    cells.append(
                        operator.alpha * Fraction(sum(inside), c)
                        + operator.beta * Fraction(sum(t * t for t in inside), c * c)
                    )
                cost += max(cells)
            members = [i for d in shard for i in plan.packing.samples_of_cell(r, d)]
            for layer in range(problem.num_layers):
                load = [0] * problem.ep_size
                for i in members:
                    for expert in range(problem.num_experts):
                        rank = plan.placement.rank_of_expert[layer, expert]
                        load[rank] += int(problem.counts[i, layer, expert])
                cost += Fraction(max(load), c)
            block[r, g] = cost
    shard_sums = [sum(block[r, g] for r in range(problem.num_rows)) for g in range(problem.num_shards)]
    return Fraction(max(shard_sums)), Fraction(sum(shard_sums)), max(block.values())


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_levels_equal_the_definition(seed: int) -> None:
    problem, plan = build(seed)
    score = evaluate(problem, plan)
    for level, exact in zip(score.levels, reference(problem, plan), strict=True):
        assert Fraction(level, score.unit_denominator) == exact


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_symmetries_do_not_change_the_score(seed: int, symmetry: int) -> None:
    problem, plan = build(seed)
    rng = np.random.default_rng(symmetry)
    rows, slots = plan.packing.row_of_sample, plan.packing.dp_slot_of_sample
    relabelled_slots = np.array([*rng.permutation([0, 1]), *rng.permutation([2, 3])])[slots]
    exchanged = np.where(rng.random() < 0.5, (relabelled_slots + 2) % 4, relabelled_slots)
    row_of = np.stack([rng.permutation(2), rng.permutation(2)])[exchanged // 2, rows]
    ranks = np.stack([rng.permutation(2) for _ in range(2)])
    placement = Placement.from_rank_of_expert(
        np.take_along_axis(ranks, plan.placement.rank_of_expert, axis=1), ep_size=2
    )
    other = Plan.of(problem, placement, Packing.from_arrays(row_of, exchanged))
    assert evaluate(problem, other) == evaluate(problem, plan)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_packing_cannot_remove_window_skew(seed: int) -> None:
    problem, plan = build(seed)
    detail = breakdown(problem, plan)
    peaks = detail.rank_load.max(axis=3).sum(axis=(0, 1))
    assert (peaks >= detail.rank_load.sum(axis=(0, 1)).max(axis=1)).all()
    assert int(detail.rank_load.sum()) == 2 * problem.num_layers * problem.batch.num_tokens


def test_balanced_window_need_not_balance_a_row() -> None:
    counts = np.array([[[10, 0]], [[0, 10]]])
    problem = Problem.from_arrays([10, 10], counts, top_k=1, capacity=10, ep_size=2, dp_size=1)
    plan = Plan.from_arrays(problem, [0, 1], [0, 0])
    detail = evaluate(problem, plan).breakdown
    assert detail.rank_load.sum(axis=(0, 1)).tolist() == [[10, 10]]
    assert detail.rank_load.max(axis=3).sum() == 20


def test_every_violation_is_listed() -> None:
    problem, _ = build(0, capacity=20, num_rows=None, min_samples_per_cell=0)
    crowded = Plan.from_arrays(problem, np.zeros(problem.num_samples, int), np.zeros(problem.num_samples, int))
    wrong = violations(problem, crowded)
    if problem.batch.num_tokens > 20:
        assert any("above the capacity 20" in line for line in wrong)
        with pytest.raises(InvalidInputError, match="infeasible plan"):
            evaluate(problem, crowded)
    outside = Packing.from_arrays([99] * problem.num_samples, [50] * problem.num_samples)
    assert len(packing_violations(problem, outside)) == 2 * problem.num_samples
    short = Packing.from_arrays([0], [0])
    if problem.num_samples > 1:
        assert "has 1 samples" in packing_violations(problem, short)[0]


def test_alignment_empty_cells_and_equal_counts_are_checked() -> None:
    lengths = [5, 5, 5, 5]
    problem = Problem.from_arrays(
        lengths,
        capacity=12,
        ep_size=2,
        cost=COST,
        length_alignment=8,
        num_rows=2,
        min_samples_per_cell=1,
        equal_samples_per_slot=True,
    )
    fine = Plan.from_arrays(problem, [0, 0, 1, 1], [0, 1, 0, 1])
    assert violations(problem, fine) == []
    found = violations(problem, Plan.from_arrays(problem, [0, 0, 0, 1], [0, 0, 1, 0]))
    assert any("16 aligned tokens in 2 samples" in line for line in found)
    assert any("row 1, DP slot 1): empty" in line for line in found)
    assert any("DP slot 0: 3 samples; equal_samples_per_slot asks for 2" in line for line in found)


def test_plans_of_another_problem_or_row_count_are_violations() -> None:
    problem, plan = build(1)
    other, _ = build(2)
    assert any("another problem" in line or "samples" in line for line in violations(other, plan))
    assert any("rows" in line for line in violations(problem.replace(num_rows=3), plan))


def test_scores_compare_rows_first_and_only_within_a_problem() -> None:
    problem, plan = build(3)
    score = evaluate(problem, plan)
    more_rows = problem.replace(num_rows=5)
    later = evaluate(more_rows, Plan.from_arrays(more_rows, plan.packing.row_of_sample, plan.packing.dp_slot_of_sample))
    assert score < later
    assert score == evaluate(problem, plan)
    assert hash(score) == hash(evaluate(problem, plan))
    other = evaluate(*build(3, cost=None))
    if other.unit_denominator != score.unit_denominator:
        with pytest.raises(InvalidInputError, match="not comparable"):
            _ = score < other
    assert score.to_dict()["total_work"] == score.levels[1]
    assert score.values[0] == score.levels[0] / score.unit_denominator


def test_without_routing_only_attention_counts() -> None:
    problem = Problem.from_arrays([4, 6], capacity=10, ep_size=2, cost=COST)
    score = evaluate(problem, Plan.from_arrays(problem, [0, 0], [0, 1]))
    assert score.breakdown.expert.tolist() == [[0]]
    assert score.breakdown.attention.tolist() == [[int(problem.attention_work.max(axis=1).sum())]]
