"""The references themselves: brute force against the evaluator, the subset DP, and a kit that catches bad solvers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import ClassVar

import numpy as np
import pytest

from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.score import evaluate, violations
from routepack_opt.solver import Solver
from routepack_opt.testing import (
    ConformanceError,
    brute_force,
    check_solver,
    every_placement,
    subset_optimum,
    tiny_problem,
)


def contiguous(problem):
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def test_brute_force_finds_what_the_evaluator_calls_best():
    for seed in range(12):
        problem = tiny_problem(seed, num_samples=4, min_samples_per_cell=0, extra_rows=0)
        if problem.num_cells > 3:
            continue
        placement = contiguous(problem)
        scores = []
        for cells in product(range(problem.num_cells), repeat=4):
            plan = Plan.of(problem, placement, Packing.from_cells(cells, dp_size=problem.dp_size))
            if not violations(problem, plan):
                scores.append(evaluate(problem, plan))
        assert evaluate(problem, brute_force(problem, placement)) == min(scores)


def test_joint_brute_force_is_the_best_over_placements():
    problem = tiny_problem(2, num_samples=5, num_layers=2, ep_size=2, experts_per_rank=2, num_shards=2, shard_size=1)
    joint = evaluate(problem, brute_force(problem))
    assert joint == min(evaluate(problem, brute_force(problem, placement)) for placement in every_placement(problem))
    assert len(list(every_placement(problem))) == 3**2


def test_subset_optimum_equals_brute_force():
    checked = 0
    for seed in range(44):
        problem = tiny_problem(seed, min_samples_per_cell=seed % 2) if seed % 2 == 0 else _filled(seed)
        if problem is None or problem.num_shards > 2 or problem.num_cells**problem.num_samples > 30_000:
            continue
        placement = contiguous(problem)
        try:
            best = brute_force(problem, placement)
        except InfeasibleProblemError:
            with pytest.raises(InfeasibleProblemError):
                subset_optimum(problem, placement)
            continue
        assert evaluate(problem, subset_optimum(problem, placement)).levels == evaluate(problem, best).levels
        checked += 1
    assert checked > 12


def _filled(seed):
    try:
        return tiny_problem(seed, min_samples_per_cell=1, num_shards=1 + seed % 4 // 2, extra_rows=0)
    except InfeasibleProblemError:
        return None


def test_subset_optimum_goes_where_brute_force_cannot():
    problem = tiny_problem(3, num_samples=13, num_shards=2, shard_size=1, num_layers=2, ep_size=2, extra_rows=0)
    with pytest.raises(InvalidInputError, match="too many to try"):
        brute_force(problem, contiguous(problem))
    plan = subset_optimum(problem, contiguous(problem))
    best = evaluate(problem, plan)
    # No relocation of one sample improves an optimum.
    cells = plan.packing.cells(problem)
    for i, cell in product(range(problem.num_samples), range(problem.num_cells)):
        moved = cells.copy()
        moved[i] = cell
        other = Plan.of(problem, plan.placement, Packing.from_cells(moved, dp_size=problem.dp_size))
        if not violations(problem, other):
            assert best <= evaluate(problem, other)
    with pytest.raises(InvalidInputError, match="two shards"):
        subset_optimum(tiny_problem(0, num_shards=3), contiguous(tiny_problem(0, num_shards=3)))


def test_infeasible_problems_have_no_plan():
    # 19 tokens in two cells of 10, but no cell holds three samples: no bound on rows sees it.
    problem = Problem.from_arrays(
        [4, 4, 4, 4, 3], capacity=10, ep_size=1, dp_size=1, num_rows=2, cost=tiny_problem(0, num_layers=0).cost
    )
    for reference in (brute_force, subset_optimum):
        with pytest.raises(InfeasibleProblemError, match="all were tried"):
            reference(problem, contiguous(problem))
    assert brute_force(problem.replace(num_rows=3), contiguous(problem)).num_rows == 3


def test_tiny_problems_vary_and_repeat():
    problems = [tiny_problem(seed) for seed in range(50)]
    assert [p.fingerprint for p in problems] == [tiny_problem(seed).fingerprint for seed in range(50)]
    assert {p.num_shards for p in problems} == {1, 2, 3}
    assert {p.cluster.shard_size for p in problems} == {1, 2}
    assert {p.num_layers for p in problems} == {0, 1, 2, 3}
    assert {p.ep_size for p in problems if p.num_layers} == {1, 2, 3}
    assert {p.length_alignment for p in problems} == {1, 2, 4}
    assert {len(p.cost.attention) for p in problems} == {0, 1, 2}
    assert any(p.cost.denominator % 7 == 0 for p in problems)
    assert any(operator.beta == 0 for p in problems for operator in p.cost.attention)
    assert any((p.batch.routed_tokens < p.lengths).any() for p in problems)
    assert any(len(np.unique(p.lengths)) < p.num_samples for p in problems)


@pytest.mark.parametrize(
    ("spec", "roles"),
    [("contiguous", ("placer",)), ("lpt(refine=False)", ("placer",)), ("ffd", ("packer",)), ("bldm", ("placer",))],
)
def test_fast_built_ins_conform(spec, roles):
    report = check_solver(spec)
    assert report.roles == roles
    assert report.solver == spec
    assert report.num_runs >= 20
    assert report.refused == ()
    assert sum(report.statuses.values()) == report.num_runs


@dataclass(frozen=True)
class Spread(Solver):
    """Sample i in cell i modulo their number, wherever that is feasible."""

    name: ClassVar[str] = "spread"

    def pack(self, problem, placement, run):
        packing = Packing.from_cells(np.arange(problem.num_samples) % problem.num_cells, dp_size=problem.dp_size)
        if violations(problem, Plan.of(problem, placement, packing)):
            return None
        return packing


def test_a_third_partys_packer_conforms():
    report = check_solver(Spread())
    assert report.roles == ("packer",)
    assert report.statuses.get("no-solution", 0) > 0


@dataclass(frozen=True)
class Boastful(Spread):
    def pack(self, problem, placement, run):
        packing = super().pack(problem, placement, run)
        if packing is not None:
            value = evaluate(problem, Plan.of(problem, placement, packing)).levels[0]
            run.claim("max_shard_work", value, value, proved=True, limit=None)
        return packing


@dataclass(frozen=True)
class Infeasible(Spread):
    def pack(self, problem, placement, run):
        return Packing.from_cells(np.zeros(problem.num_samples, dtype=np.int64), dp_size=problem.dp_size)


@dataclass(frozen=True)
class Defeatist(Spread):
    def pack(self, problem, placement, run):
        run.claim_infeasible("it looks hard")


@dataclass(frozen=True)
class ThreadDependent(Spread):
    def pack(self, problem, placement, run):
        order = np.arange(problem.num_samples) + run.num_threads
        packing = Packing.from_cells(order % problem.num_cells, dp_size=problem.dp_size)
        return None if violations(problem, Plan.of(problem, placement, packing)) else packing


@dataclass(frozen=True)
class GlobalDice(Spread):
    def pack(self, problem, placement, run):
        np.random.random()  # noqa: NPY002
        return super().pack(problem, placement, run)


@dataclass(frozen=True)
class Impatient(Spread):
    def pack(self, problem, placement, run):
        if run.stopped():
            raise RuntimeError("no time")
        return super().pack(problem, placement, run)


@dataclass(frozen=True)
class Optimist(Spread):
    def pack(self, problem, placement, run):
        packing = super().pack(problem, placement, run)
        if packing is not None:
            value = evaluate(problem, Plan.of(problem, placement, packing)).levels[0]
            run.claim("max_shard_work", value, value - 1, proved=False, limit=Limit.EXHAUSTED)
        return packing


@dataclass(frozen=True)
class Silent(Spread):
    def unsupported(self, problem):
        return "" if problem.num_shards > 1 else None


@dataclass(frozen=True)
class NoRole:
    name: ClassVar[str] = "no_role"


@dataclass
class Thawed(Solver):
    name: ClassVar[str] = "thawed"
    setting: list[int] = field(default_factory=list)

    def pack(self, problem, placement, run):
        return None


@pytest.mark.parametrize(
    ("solver", "complaint"),
    [
        (Boastful(), "claimed optimal, brute force has|claims optimality of"),
        (Infeasible(), "SolverClaimError: .*infeasible plan"),
        (Defeatist(), "claimed infeasible|claims infeasibility"),
        (ThreadDependent(), "another decision with two threads"),
        (GlobalDice(), "global random number generator"),
        (Impatient(), "RuntimeError: no time"),
        (Optimist(), "is above the optimum"),
        (Silent(), r"unsupported\(\): the reason is ''"),
        (NoRole(), "none of place"),
        (Thawed(), "no frozen dataclass"),
    ],
)
def test_the_kit_catches(solver, complaint):
    with pytest.raises(ConformanceError, match=complaint) as caught:
        check_solver(solver)
    assert caught.value.faults
