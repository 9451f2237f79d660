"""Joint planning by turns: feasible, reproducible, near the joint optimum, better than placing for the window."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import bounds, testing
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.plan import Placement
from routepack_opt.planning import solve
from routepack_opt.problem import Problem
from routepack_opt.result import Status
from routepack_opt.score import evaluate, violations
from routepack_opt.solvers.alternating import Alternating, packing_leads
from routepack_opt.synthetic import family


@pytest.fixture(scope="module")
def problem():
    whole = family("tiny-low")
    return Problem.from_arrays(
        whole.lengths[:128],
        whole.counts[:128],
        top_k=whole.top_k,
        capacity=whole.capacity,
        ep_size=8,
        dp_size=16,
        num_shards=2,
        cost="ling-3.0-tiny",
    )


@pytest.fixture(scope="module")
def few(problem):
    """Two experts a rank, six layers."""
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(16, 2.0), size=(problem.num_samples, 6))
    return Problem.from_arrays(
        problem.lengths,
        rng.multinomial(problem.lengths[:, None], share),
        top_k=1,
        capacity=problem.capacity,
        ep_size=8,
        dp_size=16,
        num_shards=2,
        cost=CostModel((OperatorClass("softmax", Fraction(1), Fraction(1, 4)),)),
    )


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_plans_are_feasible_and_above_the_bound(seed):
    problem = testing.tiny_problem(seed)
    result = solve(problem, "alternating", iteration_limit=2000, seed=seed)
    assert result.status in (Status.FEASIBLE, Status.NO_SOLUTION)
    if result.plan is None:
        return
    assert violations(problem, result.plan) == []
    assert evaluate(problem, result.plan) == result.score
    assert result.score.max_shard_work >= bounds.best_bound(problem).value


def test_tiny_problems_end_near_the_joint_optimum():
    gaps = []
    for seed in range(12):
        problem = testing.tiny_problem(seed, num_samples=5, num_layers=2, ep_size=2, experts_per_rank=2)
        best = evaluate(problem, testing.brute_force(problem))
        found = solve(problem, "alternating(rounds=4)", iteration_limit=40_000, seed=0).score
        assert found >= best
        gaps.append(found.max_shard_work / best.max_shard_work - 1)
    assert np.mean(gaps) < 0.02
    assert np.median(gaps) == 0


def test_beats_placing_for_the_window(problem):
    hierarchical = solve(problem, "replacing+leveling", iteration_limit=400_000, seed=0).score
    by_turns = solve(problem, "alternating", iteration_limit=400_000, seed=0).score
    assert by_turns.max_shard_work < hierarchical.max_shard_work


@pytest.mark.parametrize("mixed", [False, True])
def test_same_seed_same_plan_for_any_number_of_threads(problem, mixed):
    spec = f"alternating(mixed={mixed})"
    one, two = (solve(problem, spec, iteration_limit=100_000, seed=5, num_threads=k) for k in (1, 2))
    assert one.plan.to_dict() == two.plan.to_dict()


def test_few_experts_a_rank_mix_and_many_take_turns(problem, few):
    assert packing_leads(few) > 0.3 > packing_leads(problem)
    for case in (few, problem):
        plans = {
            mixed: solve(case, Alternating(mixed=mixed), iteration_limit=200_000, seed=1).plan.to_dict()
            for mixed in (None, False, True)
        }
        assert (plans[None] == plans[True]) == (case is few)
        assert (plans[None] == plans[False]) == (case is problem)


@pytest.mark.parametrize("spec", ["rounds=2", "sweeps=3.0"])
def test_what_is_said_of_turns_makes_turns(few, spec):
    plans = [
        solve(few, f"alternating({options})", iteration_limit=200_000, seed=1).plan.to_dict()
        for options in (spec, f"{spec}, mixed=False", "mixed=True")
    ]
    assert plans[0] == plans[1] != plans[2]
    with pytest.raises(InvalidInputError, match="mixed=True takes no turns"):
        solve(few, f"alternating({spec}, mixed=True)", iteration_limit=1000)


def test_mixing_is_done_where_it_is_asked_for(few):
    small = Problem.from_arrays(
        few.lengths[:48],
        few.counts[:48],
        top_k=few.top_k,
        capacity=few.capacity,
        ep_size=8,
        dp_size=16,
        num_shards=2,
        cost=few.cost,
    )
    plans = {}
    for mixed in (None, False, True):
        result = solve(small, Alternating(mixed=mixed), iteration_limit=60_000, seed=0)
        assert violations(small, result.plan) == []
        plans[mixed] = result.plan.to_dict()
    assert plans[None] == plans[False] != plans[True]


def test_mixing_keeps_to_a_limit_of_moves_and_to_time(problem):
    previous = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    result = solve(problem, "alternating(mixed=True, move_limit=4)", iteration_limit=100_000, previous=previous)
    assert (result.placement.rank_of_expert != previous.rank_of_expert).sum(axis=1).max() <= 4
    result = solve(problem, "alternating(mixed=True)", time_limit=0.4)
    assert violations(problem, result.plan) == []
    assert evaluate(problem, result.plan) == result.score


def test_a_warm_start_is_never_lost(problem):
    good = solve(problem, "alternating", iteration_limit=400_000, seed=0)
    again = solve(problem, "alternating", iteration_limit=2_000, seed=1, warm_start=good.plan)
    assert again.score <= good.score


def test_limits_and_prices_hold_experts_back(problem):
    previous = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    moved = []
    for spec in (
        "alternating",
        "alternating(move_price=20000)",
        "alternating(move_limit=8)",
        "alternating(move_limit=0)",
    ):
        result = solve(problem, spec, iteration_limit=100_000, previous=previous)
        moved.append((result.placement.rank_of_expert != previous.rank_of_expert).sum(axis=1))
    assert moved[1].sum() < moved[0].sum()
    assert moved[2].max() <= 8
    assert moved[3].sum() == 0


def test_a_routing_weight_changes_the_first_packing(problem):
    scores = {
        weight: solve(problem, f"alternating(rounds=1, routing_weight={weight})", iteration_limit=60_000).score.levels
        for weight in (0.0, 0.2, 1.0)
    }
    assert len(set(scores.values())) == 3


def test_problems_without_routing_are_packed_only():
    problem = testing.tiny_problem(4, num_layers=0)
    result = solve(problem, "alternating", iteration_limit=3000)
    assert violations(problem, result.plan) == []


def test_stops_when_told(problem):
    asked = []

    def stop():
        asked.append(True)
        return len(asked) > 3

    result = solve(problem, "alternating", time_limit=60, stop=stop)
    assert result.runtime < 30


def test_the_least_samples_of_cells_are_kept():
    for seed in range(6):
        try:
            problem = testing.tiny_problem(seed, num_samples=7, min_samples_per_cell=1)
        except InfeasibleProblemError:
            continue
        plan = solve(problem, "alternating", iteration_limit=2000).plan
        assert plan is None or violations(problem, plan) == []


def test_refuses_what_cannot_be_meant():
    with pytest.raises(InvalidInputError) as error:
        Alternating(rounds=0, mixed=1, packing_share=1.0, routing_weight=2, sweeps=-1, move_price=-1)
    assert len(error.value.faults) == 6
