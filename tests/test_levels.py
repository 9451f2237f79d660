"""The lexicographic loop around an exact engine, with engines that lie or give up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.bounds import placement_bound
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.result import Limit, Status
from routepack_opt.score import evaluate
from routepack_opt.solver import Run
from routepack_opt.solvers.cpsat import CpSat
from routepack_opt.solvers.formulation import LinearModel, Redundancy, packing_model
from routepack_opt.solvers.levels import Budget, Outcome, block_loads, solve_levels, start_ranks
from routepack_opt.testing import brute_force, tiny_problem


class Scripted:
    """An engine that returns prepared outcomes and assignments."""

    def __init__(self, outcomes: list[Outcome], assignments: list[list[int]]) -> None:
        self.outcomes = outcomes
        self.assignments = assignments
        self.tightened: list[tuple[int, int]] = []
        self.budgets: list[Budget] = []
        self.hints: list[bool] = []

    def tighten(self, variable: int, value: int) -> None:
        self.tightened.append((variable, value))

    def minimise(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        self.budgets.append(budget)
        self.hints.append(hint is not None)
        for assignment in self.assignments:
            on_solution(assignment)
        return self.outcomes.pop(0)


def setup(seed: int = 25) -> tuple:  # type: ignore[type-arg]
    problem = tiny_problem(seed)  # two shards, two rows
    placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    model = packing_model(problem, placement, Redundancy())
    plan = brute_force(problem, placement)
    return problem, placement, model, plan, evaluate(problem, plan).levels


def test_a_refuted_bound_is_dropped_not_claimed() -> None:
    problem, placement, model, plan, levels = setup()
    engine = Scripted(
        [
            Outcome(levels[0] // model.unit + 5, False, None),
            Outcome(0, False, Limit.TIME),
            Outcome(0, False, Limit.TIME),
        ],
        [model.assignment(placement, plan.packing)],
    )
    run = Run(problem, placement=placement)
    assert solve_levels(model, engine, run, level_share=0.5) is not None
    first = run.claims[0]
    assert first.value == levels[0]
    assert first.bound is None
    assert not first.proved


def test_false_infeasibility_beside_a_plan_is_not_claimed() -> None:
    problem, placement, model, plan, levels = setup()
    engine = Scripted([Outcome(None, True, None)] * 3, [])
    run = Run(problem, placement=placement, warm_start=plan)
    found = solve_levels(model, engine, run, level_share=0.5)
    assert found is not None
    assert evaluate(problem, found).levels == levels
    assert all(not claim.proved for claim in run.claims)
    assert all(engine.hints)


def test_levels_are_tightened_and_budgets_shared() -> None:
    problem, placement, model, plan, levels = setup()
    outcomes = [Outcome(level // model.unit, False, None, iterations=10.0) for level in levels]
    engine = Scripted(outcomes, [model.assignment(placement, plan.packing)])
    run = Run(problem, placement=placement, iteration_limit=100)
    solve_levels(model, engine, run, level_share=0.5)
    assert [claim.proved for claim in run.claims] == [True, True, True]
    assert [budget.iterations for budget in engine.budgets] == [50.0, 45.0, 80.0]
    assert dict(engine.tightened) == {
        variable: level // model.unit for variable, level in zip(model.levels, levels, strict=True)
    }


def test_infeasible_without_a_plan_is_claimed_with_its_reason() -> None:
    problem, placement, model, _, _ = setup()
    run = Run(problem, placement=placement)
    assert solve_levels(model, Scripted([Outcome(None, True, None)], []), run, level_share=0.5) is None
    assert f"{problem.num_rows} rows" in run._record.infeasible


def test_parameters_are_checked_all_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        CpSat(symmetry=1, level_share=1.0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("seed", range(6))
def test_start_ranks_fill_every_rank_and_respect_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.gamma(0.5, 100.0, size=(2, 24)).astype(np.int64)
    ranks = start_ranks(load, ep_size=4)
    assert np.bincount(ranks, minlength=4).tolist() == [6, 6, 6, 6]
    peak = sum(max(int(block[ranks == p].sum()) for p in range(4)) for block in load)
    assert peak >= int(placement_bound(load, 4).sum())


def test_block_loads_add_up_to_the_window() -> None:
    problem = tiny_problem(25)
    packing = Packing.from_arrays(
        np.arange(problem.num_samples) % problem.num_rows, np.arange(problem.num_samples) % problem.dp_size
    )
    assert (block_loads(problem, packing).sum(axis=0) == block_loads(problem, None)[0]).all()


def test_place_by_layer_needs_no_engine_where_the_bound_is_met() -> None:
    problem = tiny_problem(4, num_layers=2, ep_size=2, experts_per_rank=1)  # one expert a rank: nothing to choose

    class Refuses(CpSat):
        name = "refuses"

        def make_engine(self, linear: LinearModel) -> None:  # type: ignore[override]
            raise AssertionError("no engine is needed")

    result = planning.place(problem, Refuses(), iteration_limit=1)
    assert result.status is Status.OPTIMAL


def test_placing_for_blocks_beats_every_other_placement() -> None:
    from routepack_opt.testing import every_placement

    problem = tiny_problem(7, num_layers=1, ep_size=2, experts_per_rank=2, num_samples=6, num_shards=1)
    packing = brute_force(problem, Placement.contiguous(1, 4, ep_size=2)).packing
    result = planning.place(problem, CpSat(), packing=packing, iteration_limit=100_000, num_threads=1)
    best = min(
        int(evaluate(problem, Plan.of(problem, other, packing)).breakdown.expert.sum())
        for other in every_placement(problem)
    )
    assert result.status is Status.OPTIMAL
    assert result.levels[0].value == best
