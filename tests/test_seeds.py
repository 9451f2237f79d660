"""Seeding packers: feasible whenever a packing is known, repairs, balance, determinism."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.registry import component
from routepack_opt.score import evaluate, packing_violations
from routepack_opt.solver import Run
from routepack_opt.solvers import seeds
from routepack_opt.solvers.seeds import EdpAwarePair, Ffd, RandomizedBestFit, WindowShuffle
from routepack_opt.testing import tiny_problem

SEEDS: list[Any] = [
    Ffd(),
    WindowShuffle(),
    WindowShuffle(window=1, level=False),
    RandomizedBestFit(),
    RandomizedBestFit(near=0.0, level=False),
    EdpAwarePair(),
]
COST = CostModel((OperatorClass("linear", 1, 0), OperatorClass("full", 0, 1)))


def contiguous(problem: Problem) -> Placement:
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def pack(solver: Any, problem: Problem, seed: int = 0) -> Packing | None:
    placement = contiguous(problem)
    packing: Packing | None = solver.pack(problem, placement, Run(problem, seed=seed, placement=placement))
    return packing


def lengths_problem(lengths: list[int], **options: Any) -> Problem:
    defaults: dict[str, Any] = {"capacity": max(lengths), "ep_size": 1, "dp_size": 1, "cost": COST}
    return Problem.from_arrays(lengths, **{**defaults, **options})


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), least=st.sampled_from([0, 1]))
def test_every_seed_is_feasible_on_random_problems(seed: int, least: int) -> None:
    try:
        problem = tiny_problem(seed, min_samples_per_cell=least)
    except InfeasibleProblemError:
        return
    for solver in SEEDS:
        packing = pack(solver, problem, seed)
        # tiny_problem takes R from a packing that the repair finds again.
        assert packing is not None
        assert packing_violations(problem, packing) == []
        assert pack(solver, problem, seed) == packing


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    dp_size=st.integers(1, 4),
    alignment=st.sampled_from([1, 3, 8]),
)
def test_the_rows_of_the_problem_are_enough(lengths: list[int], dp_size: int, alignment: int) -> None:
    problem = lengths_problem(lengths, capacity=40, dp_size=dp_size, length_alignment=alignment)
    for solver in SEEDS:
        packing = pack(solver, problem)
        assert packing is not None
        assert packing_violations(problem, packing) == []


@settings(max_examples=30, deadline=None)
@given(per_slot=st.integers(1, 6), dp_size=st.integers(1, 4), seed=st.integers(0, 1000))
def test_equal_samples_per_slot_is_honoured(per_slot: int, dp_size: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 20, per_slot * dp_size).tolist()
    problem = lengths_problem(
        lengths,
        capacity=40,
        dp_size=dp_size,
        num_rows=per_slot,
        equal_samples_per_slot=True,
        min_samples_per_cell=seed % 2,
    )
    for solver in (Ffd(), WindowShuffle(), RandomizedBestFit()):
        packing = pack(solver, problem)
        assert packing is not None
        assert packing_violations(problem, packing) == []
    assert "equal_samples_per_slot" in (EdpAwarePair().unsupported(problem) or "")


@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [
        ([6, 8, 6, 3, 2, 11, 2, 9, 10, 6], 21),  # best fit repairs it
        ([9, 2, 7, 8, 4, 9, 7, 6, 2, 3], 19),  # subset sums do
        ([10, 4, 7, 9, 5, 9, 8, 10], 21),  # random orders do
    ],
)
def test_tight_rows_are_repaired(lengths: list[int], capacity: int) -> None:
    array = np.array(lengths)
    first_fit = seeds._fill(seeds._descending(array), array, capacity, 3, False, 0, np.zeros(len(array)))
    assert first_fit.min() == -1
    problem = lengths_problem(lengths, capacity=capacity, num_rows=3)
    for solver in SEEDS:
        packing = pack(solver, problem)
        assert packing is not None
        assert packing_violations(problem, packing) == []


def test_none_and_a_reason_when_nothing_fits() -> None:
    # No three of these fit 24 with 12 or 13 among them unless 5 is one of them: three bins are not enough.
    problem = lengths_problem([12, 12, 7, 5, 13, 13, 9], capacity=24, num_rows=3)
    placement = contiguous(problem)
    for solver in SEEDS:
        run = Run(problem, placement=placement)
        assert solver.pack(problem, placement, run) is None
        assert "3 rows x 1 DP slots of 24 tokens" in run._record.explanation


def test_level_cells_leave_no_row_empty() -> None:
    lengths = np.random.default_rng(0).integers(5, 60, 200).tolist()
    problem = lengths_problem(lengths, capacity=400, dp_size=4, num_rows=8)
    for solver in (WindowShuffle(), RandomizedBestFit(), EdpAwarePair()):
        packing = pack(solver, problem)
        assert packing is not None
        tokens = np.zeros(32, dtype=np.int64)
        np.add.at(tokens, packing.cells(problem), problem.lengths)
        assert tokens.max() <= 1.3 * tokens.mean()
        assert tokens.min() >= 0.5 * tokens.mean()
    greedy = pack(Ffd(), problem)
    assert greedy is not None
    assert len(np.unique(greedy.cells(problem))) < 32


def test_first_fit_decreasing_is_dealt_as_documented() -> None:
    problem = lengths_problem([7, 6, 5, 4, 3, 2], capacity=9, dp_size=2)
    # Bins {7, 2}, {6, 3}, {5, 4}: 9, 9, 9 tokens; row 0 takes bins 0, 1 in slots 0, 1; row 1 bin 2 in slot 0.
    packing = pack(Ffd(), problem)
    assert packing is not None
    assert problem.num_rows == 2
    assert packing.row_of_sample.tolist() == [0, 0, 1, 1, 0, 0]
    assert packing.dp_slot_of_sample.tolist() == [0, 1, 0, 0, 1, 0]


def test_pairs_join_complementary_loads() -> None:
    # Samples load one of two ranks; a block of two cells is cheapest with one of each kind.
    kinds = np.arange(16) % 2
    counts = np.zeros((16, 1, 2), dtype=np.int64)
    counts[np.arange(16), 0, kinds] = 10
    problem = Problem.from_arrays(
        np.full(16, 10), counts, top_k=1, capacity=10, ep_size=2, dp_size=4, num_shards=2, num_rows=4
    )
    packing = pack(EdpAwarePair(), problem)
    assert packing is not None
    score = evaluate(problem, Plan.of(problem, contiguous(problem), packing))
    assert score.levels[1] == 8 * 10 * problem.expert_unit
    assert score.levels[0] == 4 * 10 * problem.expert_unit


def test_pairs_beat_shuffled_lengths_on_skewed_routing() -> None:
    rng = np.random.default_rng(4)
    counts = rng.multinomial(40, rng.dirichlet(np.full(8, 0.3), size=(64, 3)))
    problem = Problem.from_arrays(
        np.full(64, 40), counts, top_k=1, routed_tokens=np.full(64, 40), capacity=80, ep_size=4, dp_size=8, num_shards=2
    )
    work = {}
    for solver in (EdpAwarePair(), WindowShuffle()):
        packing = pack(solver, problem)
        assert packing is not None
        work[solver.name] = evaluate(problem, Plan.of(problem, contiguous(problem), packing)).levels[1]
    assert work["edp_aware_pair"] < 0.97 * work["window_shuffle"]


def test_odd_blocks_are_grown() -> None:
    kinds = np.arange(18) % 3
    counts = np.zeros((18, 1, 3), dtype=np.int64)
    counts[np.arange(18), 0, kinds] = 10
    problem = Problem.from_arrays(
        np.full(18, 10), counts, top_k=1, capacity=10, ep_size=3, dp_size=6, num_shards=2, num_rows=3
    )
    packing = pack(EdpAwarePair(), problem)
    assert packing is not None
    score = evaluate(problem, Plan.of(problem, contiguous(problem), packing))
    assert score.levels[1] == 6 * 10 * problem.expert_unit


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("window_shuffle(window=0)", "window is 0"),
        ("window_shuffle(window=True)", "window is True"),
        ("window_shuffle(level=1)", "level is 1"),
        ("randomized_best_fit(near=1.5)", "near is 1.5"),
        ("randomized_best_fit(level='yes')", "level is 'yes'"),
        ("edp_aware_pair(window=2.5)", "window is 2.5"),
        ("ffd(window=3)", "no parameters"),
    ],
)
def test_bad_parameters_are_named(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        component(spec)
