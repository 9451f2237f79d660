"""The linear models: every feasible plan satisfies them, and their levels are the evaluator's."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate, packing_violations
from routepack_opt.solvers.formulation import (
    LinearModel,
    PackingModel,
    Redundancy,
    joint_model,
    packing_model,
    placement_model,
)
from routepack_opt.testing import every_placement, tiny_problem

BARE = Redundancy(False, False, False, False, False)


def random_packings(problem: Problem, seed: int, count: int) -> list[Packing]:
    rng = np.random.default_rng(seed)
    found: list[Packing] = []
    for _ in range(5000):
        packing = Packing.from_cells(rng.integers(0, problem.num_cells, problem.num_samples), dp_size=problem.dp_size)
        if not packing_violations(problem, packing):
            found.append(packing)
        if len(found) == count:
            break
    return found


def level_works(model: PackingModel, values: list[int]) -> tuple[int, ...]:
    return tuple(values[variable] * model.unit for variable in model.levels)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("redundancy", [Redundancy(), BARE], ids=["full", "bare"])
def test_every_feasible_plan_satisfies_both_models(seed: int, redundancy: Redundancy) -> None:
    problem = tiny_problem(seed)
    packings = random_packings(problem, seed, 6)
    assert packings
    placements = list(every_placement(problem))
    for k, packing in enumerate(packings):
        placement = placements[k * 7 % len(placements)]
        levels = evaluate(problem, Plan.of(problem, placement, packing)).levels
        for model in (packing_model(problem, placement, redundancy), joint_model(problem, redundancy)):
            values = model.assignment(placement, packing)
            assert model.linear.broken(values) == []
            assert level_works(model, values) == levels


@pytest.mark.parametrize("rules", [{"min_samples_per_cell": 1}, {"equal_samples_per_slot": True}])
def test_rules_on_cells_and_slots_are_part_of_the_model(rules: dict[str, bool]) -> None:
    problem = Problem.from_arrays(
        [5, 4, 4, 3, 2, 2, 1, 1], capacity=11, ep_size=1, dp_size=4, num_shards=2, num_rows=1,
        cost=CostModel((OperatorClass("a", Fraction(1, 3), Fraction(2)),)), **rules,
    )  # fmt: skip
    placement = Placement.contiguous(0, 0, ep_size=1)
    model = packing_model(problem, placement, Redundancy())
    good = Packing.from_arrays(np.zeros(8, dtype=int), [3, 2, 1, 0, 0, 1, 2, 3])
    assert model.linear.broken(model.assignment(placement, good)) == []
    unequal = Packing.from_arrays(np.zeros(8, dtype=int), [0, 1, 2, 2, 0, 1, 1, 1])
    broken = model.linear.broken(model.assignment(placement, unequal))
    assert any(name.startswith(("filled", "equal")) for name in broken)


def test_labels_do_not_matter_once_symmetry_is_broken() -> None:
    problem = tiny_problem(10)  # two shards of two slots
    packing = random_packings(problem, 1, 1)[0]
    placement = next(every_placement(problem))
    model = joint_model(problem, Redundancy())
    swapped = {slot: other for a, b in [problem.shards] for slot, other in zip(a + b, b + a, strict=True)}
    mirrored = Packing.from_arrays(packing.row_of_sample, [swapped[int(d)] for d in packing.dp_slot_of_sample])
    relabelled = Placement.from_rank_of_expert(problem.ep_size - 1 - placement.rank_of_expert, ep_size=problem.ep_size)
    assert model.assignment(placement, packing) == model.assignment(relabelled, mirrored)
    names = model.linear.names
    free = joint_model(problem, BARE)
    assert free.linear.names == names
    assert free.assignment(placement, packing) != free.assignment(relabelled, mirrored)


def test_decisions_come_back_from_an_assignment() -> None:
    problem = tiny_problem(3)
    placement = list(every_placement(problem))[-1]
    packing = random_packings(problem, 5, 1)[0]
    model = joint_model(problem, BARE)
    values = model.assignment(placement, packing)
    assert model.packing(values) == packing
    assert model.placement_of(values) == placement


def test_common_factors_are_divided_out_exactly() -> None:
    lengths = np.array([60, 40, 20, 80])
    counts = np.stack([lengths // 2, lengths - lengths // 2], axis=1)[:, None]
    cost = CostModel((OperatorClass("a", Fraction(7), Fraction(0)),))
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=100, ep_size=2, dp_size=1, num_rows=2, cost=cost)
    placement = Placement.contiguous(1, 2, ep_size=2)
    model = packing_model(problem, placement, Redundancy())
    largest = max(max(map(abs, constraint.coefficients)) for constraint in model.linear.constraints)
    assert largest < int(problem.attention_work.max())
    packing = Packing.from_arrays([0, 0, 1, 1], [0, 0, 0, 0])
    values = model.assignment(placement, packing)
    assert level_works(model, values) == evaluate(problem, Plan.of(problem, placement, packing)).levels


def test_broken_names_what_is_violated() -> None:
    linear = LinearModel()
    a, b = linear.variable("a", 3), linear.variable("b", 5, lower=1)
    linear.add("sum", [(2, a), (1, b), (0, a)], "<=", 7)
    linear.add("apart", [(1, b), (-1, a)], ">=", 1)
    assert linear.constraints[0].variables == (a, b)
    assert linear.broken([1, 3]) == []
    assert linear.broken([3, 3]) == ["sum", "apart"]
    assert linear.broken([4, 0]) == ["a", "b", "sum", "apart"]
    assert linear.largest_activity == 2 * 3 + 5 + 7


@pytest.mark.parametrize("seed", range(4))
def test_placement_model_prices_ranks_exactly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.integers(0, 50, size=(3, 6)) * 4
    model = placement_model(load, Redundancy(), ep_size=3)
    ranks = rng.permutation(np.repeat(np.arange(3), 2))
    values = model.assignment(ranks)
    assert model.linear.broken(values) == []
    wanted = sum(max(int(block[ranks == p].sum()) for p in range(3)) for block in load)
    assert values[model.objective] * model.unit == wanted
    found = model.ranks(values)
    assert sorted(load[:, found == p].sum() for p in range(3)) == sorted(load[:, ranks == p].sum() for p in range(3))
