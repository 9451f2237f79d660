"""Successive steps: placements carried over, moves counted and priced, warm packings, faults all at once."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from routepack_opt import bounds, testing
from routepack_opt.batch import RoutingBatch
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Placement, Plan
from routepack_opt.planning import pack, solve
from routepack_opt.problem import Cluster, Problem
from routepack_opt.score import evaluate, packing_violations, violations
from routepack_opt.sequence import carry_packing, plan_sequence

COST = CostModel((OperatorClass("softmax", Fraction(1), Fraction(2)),))


def batch(step, num_samples=48):
    """Samples of a model whose popular experts drift from step to step."""
    rng = np.random.default_rng((7, step))
    popularity = np.random.default_rng(0).gamma(1.0, size=(3, 16)) + 0.1 * step * np.arange(16)
    lengths = np.clip(np.exp(rng.normal(5.5, 0.5, num_samples)), 20, 900).astype(np.int64)
    counts = np.stack(
        [
            np.stack([rng.multinomial(t, rng.dirichlet(2 + 8 * layer / layer.sum())) for layer in popularity])
            for t in lengths
        ]
    )
    return RoutingBatch.from_arrays(lengths, counts, top_k=1)


def problem_of(step, **options):
    return Problem.from_batch(
        batch(step, **options),
        capacity=1400,
        cluster=Cluster.from_sizes(ep_size=4, dp_size=8, num_shards=2),
        cost=COST,
    )


@pytest.fixture(scope="module")
def problems():
    return [problem_of(step) for step in range(3)]


def test_every_step_starts_where_the_last_one_ended(problems):
    plans = plan_sequence(problems, iteration_limit=20_000, expert_bytes=1000)
    assert len(plans) == 3
    assert plans[0].moved_experts is None
    for before, step in zip(plans.steps, plans.steps[1:], strict=False):
        assert violations(step.problem, step.result.plan) == []
        moved = (step.result.placement.rank_of_expert != before.result.placement.rank_of_expert).sum()
        assert step.moved_experts == moved
        assert step.moved_bytes == 1000 * moved
        assert step.gap == bounds.gap(step.result.score.max_shard_work, bounds.best_bound(step.problem).value)
        assert step.gap >= 0
    assert plans.placement == plans[2].result.placement
    frame = plans.to_frame()
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["replaced"].all()
    assert "alternating" in repr(plans)


def test_a_price_moves_fewer_experts_and_a_limit_holds(problems):
    options = {"iteration_limit": 20_000, "previous": Placement.contiguous(3, 16, ep_size=4)}
    free, priced, limited = (
        plan_sequence(problems, f"alternating({parameters})", **options)
        for parameters in ("", "move_price=300", "move_limit=4")
    )
    moved = [sum(step.moved_experts for step in plans.steps) for plans in (free, priced, limited)]
    assert moved[1] < moved[0]
    for before, step in zip((None, *limited.steps), limited.steps, strict=False):
        home = options["previous"] if before is None else before.result.placement
        assert (step.result.placement.rank_of_expert != home.rank_of_expert).sum(axis=1).max() <= 4


def test_steps_in_between_keep_the_placement(problems):
    plans = plan_sequence(problems, place_every=2, iteration_limit=20_000)
    assert [step.replaced for step in plans.steps] == [True, False, True]
    assert plans[1].moved_experts == 0
    assert plans[1].result.placement == plans[0].result.placement
    assert plans[1].result.planner == "leveling"


def test_batches_are_planned_like_a_problem(problems):
    by_batch = plan_sequence([batch(0), batch(1)], like=problems[0], iteration_limit=10_000)
    by_problem = plan_sequence(
        [problems[0].replace(batch=batch(0)), problems[0].replace(batch=batch(1))], iteration_limit=10_000
    )
    for one, other in zip(by_batch.steps, by_problem.steps, strict=True):
        assert one.result.plan.to_dict() == other.result.plan.to_dict()


def test_a_carried_packing_keeps_the_order_of_lengths(problems):
    first = solve(problems[0], "lpt+leveling", iteration_limit=5_000)
    carried = carry_packing(problems[0], first.plan, problems[0])
    assert evaluate(problems[0], Plan.of(problems[0], first.placement, carried)).breakdown.cell_tokens.tolist() == (
        first.score.breakdown.cell_tokens.tolist()
    )
    assert carry_packing(problem_of(1, num_samples=40), first.plan, problems[0]) is None
    moved = carry_packing(problems[1], first.plan, problems[0])
    if moved is not None:
        assert packing_violations(problems[1], moved) == []
        warm = pack(problems[1], "leveling", placement=first.placement, warm_start=moved, iteration_limit=100)
        assert warm.score <= evaluate(problems[1], Plan.of(problems[1], first.placement, moved))


def test_hierarchical_planners_are_followed_too(problems):
    plans = plan_sequence(problems[:2], "lpt+leveling", iteration_limit=5_000)
    assert plans.planner == "lpt+leveling"
    assert plans[1].moved_experts < 3 * 16


def test_an_interrupted_step_ends_the_sequence(problems):
    plans = plan_sequence(problems, time_limit=5.0, stop=lambda: True)
    assert len(plans) <= 1


def test_all_faults_are_named_at_once(problems):
    with pytest.raises(InvalidInputError) as error:
        plan_sequence([batch(0), 3], place_every=0, expert_bytes=-1)
    assert len(error.value.faults) == 4
    with pytest.raises(InvalidInputError, match="nothing to plan"):
        plan_sequence([])
    with pytest.raises(InvalidInputError, match="must agree"):
        plan_sequence([problems[0], testing.tiny_problem(1, num_layers=2, ep_size=2)])
