"""Input meant to break things: every case gives a clear error, none a wrong answer."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from routepack_opt import bounds, planning
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError, SolverClaimError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.registry import parse
from routepack_opt.result import Limit
from routepack_opt.score import evaluate
from routepack_opt.solver import AGGREGATE_LEVEL, Run, Solver

ONE = CostModel((OperatorClass("a", Fraction(1), Fraction(0)),))
COUNTS = np.array([[[3, 1, 2, 2]]] * 4)


def make(**changes: Any) -> Problem:
    options: dict[str, Any] = {"top_k": 2, "capacity": 8, "ep_size": 2, "dp_size": 2} | changes
    return Problem.from_arrays([4] * 4, COUNTS, **options)


def test_rank_loads_beyond_int32_are_refused_and_those_just_below_are_exact() -> None:
    counts = np.full((1, 1, 8), 2**29, dtype=np.uint32)
    with pytest.raises(InvalidInputError, match="one rank can get 4294967296 routed tokens"):
        Problem.from_arrays([2**29], counts, top_k=8, capacity=2**29, ep_size=1)
    fits = Problem.from_arrays([2**29], counts, top_k=8, capacity=2**29, ep_size=8)
    score = evaluate(fits, Plan.from_arrays(fits, [0], [0]))
    assert score.breakdown.rank_load.max() == 2**29
    assert score.levels[0] == 2**29 * fits.expert_unit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": 2**61}, "capacity is"),
        ({"capacity": 2**70}, "capacity is"),
        ({"length_alignment": 2**61}, "length_alignment is"),
        ({"top_k": 2**70}, "top_k is"),
        ({"dp_size": 2**40}, "dp_size"),
        ({"num_rows": 10**12}, "num_rows is|limit"),
        ({"num_rows": 10**8}, "limit of 10000000 cells"),
        ({"dp_size": None, "shards": 3}, "lists of DP slots"),
        ({"sample_ids": "abcd"}, "string"),
        ({"min_samples_per_cell": 1.0}, "must be 0 or 1"),
        ({"cost": CostModel}, "cost is"),
    ],
)
def test_sizes_that_would_wrap_or_exhaust_memory(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    "call",
    [
        lambda: CostModel(("a",)),  # type: ignore[arg-type]
        lambda: Problem.from_batch(None, capacity=3, cluster=None),  # type: ignore[arg-type]
        lambda: Problem.from_window(np.full((2, 1, 2), 2**62), ep_size=1),
        lambda: Placement.from_rank_of_expert([[0, 0, 1, 1]], ep_size=0),
        lambda: Placement.from_rank_of_expert([[0, 0, 1, 1]], ep_size=2.0),  # type: ignore[arg-type]
        lambda: Placement.contiguous(-1, 4, ep_size=2),
        lambda: Placement.contiguous(1, 4, ep_size=2).remap(np.array([[[2**64 - 1]]], dtype=np.uint64)),
        lambda: Packing.from_cells([0, 1], dp_size=0),
        lambda: planning.solve(make(), previous=3),  # type: ignore[arg-type]
        lambda: planning.solve(make(), ("lpt", "ffd", "ffd")),
        lambda: planning.place(make(), packing=3),  # type: ignore[arg-type]
        lambda: planning.pack(make(), placement=3),  # type: ignore[arg-type]
        lambda: planning.pack(make(), warm_start=3),  # type: ignore[arg-type]
        lambda: planning.compare(make(), None),  # type: ignore[arg-type]
        lambda: planning.compare(make(), ["lpt+ffd"], seeds=1.5),  # type: ignore[arg-type]
        lambda: planning.compare(make(), ["lpt+ffd"], seeds="12"),  # type: ignore[arg-type]
        lambda: planning.compare(make(), ["lpt+ffd"], seeds=[1.7]),  # type: ignore[list-item]
        lambda: parse("lpt(refine={[]:1})+ffd"),
        lambda: parse("lpt(max_exchange=2.0)+ffd"),
        lambda: parse(f"lpt+annealing(swap_window={2**70})"),
        lambda: parse(f"lpt+annealing(initial_rise={10**400})"),
        lambda: parse("lpt+annealing(initial_temperature=1, final_temperature=2)"),
        lambda: parse("lpt+annealing(attention_weight=0, routing_weight=0)"),
        lambda: parse("lpt+annealing(energy_weights=(1e308, 1, 1))"),
    ],
)
def test_api_errors_are_the_packages_own(call: Any) -> None:
    with pytest.raises(InvalidInputError):
        call()


def test_scores_and_bounds_of_other_problems_do_not_mix() -> None:
    other = Problem.from_arrays([4] * 4, np.array([[[4, 4, 0, 0]]] * 4), top_k=2, capacity=8, ep_size=2, dp_size=2)
    score = planning.solve(make(), "lpt+ffd", iteration_limit=3).score
    assert score is not None
    with pytest.raises(InvalidInputError, match="different problems"):
        bounds.gap(score, bounds.best_bound(other))
    foreign = planning.solve(other, "lpt+ffd", iteration_limit=3).score
    assert foreign is not None
    with pytest.raises(InvalidInputError, match="different problems"):
        _ = score < foreign


def test_seeds_and_limits_of_numpy_integers_are_plain_afterwards() -> None:
    import json

    runs = planning.compare(make(), ["lpt+ffd"], seeds=np.array([1, 2]), iteration_limit=int(np.int64(9)))  # type: ignore[arg-type]
    assert [result.seed for result in runs] == [1, 2]
    result = planning.solve(make(), "lpt+ffd", iteration_limit=np.int64(9))  # type: ignore[arg-type]
    json.dumps(result.to_dict())


class Liar(Solver):
    """A placer that claims a wrong value."""

    name = "liar"

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement:
        del packing
        run.claim(AGGREGATE_LEVEL, 1, 1, proved=True, limit=None)
        return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def test_false_claims_of_placers_are_errors() -> None:
    with pytest.raises(SolverClaimError, match="claims aggregate_expert_work"):
        planning.place(make(), Liar())


def test_proofs_belong_to_the_plan_that_comes_back() -> None:
    # A warm start with another placement and the same levels must not inherit a fixed-placement proof.
    problem = make(cost=ONE)
    result = planning.solve(problem, "contiguous+cpsat", time_limit=20)
    assert result.plan is not None
    slots = result.plan.placement.slot_of_expert[:, ::-1]
    other = Plan.of(problem, Placement.from_slots(slots, ep_size=2), result.plan.packing)
    again = planning.solve(problem, "contiguous+cpsat", time_limit=20, warm_start=other)
    contiguous = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=2)
    assert again.placement == contiguous


def test_many_chains_keep_the_time_limit() -> None:
    result = planning.solve(make(), "lpt+annealing(num_chains=20000)", time_limit=0.05)
    assert result.limit is Limit.TIME
    assert result.plan is not None


def test_numbers_in_the_other_byte_order_are_the_same_numbers() -> None:
    swapped = Problem.from_arrays(np.array([4] * 4, ">i4"), COUNTS.astype(">u2"), top_k=2, capacity=8, ep_size=2)
    assert swapped.fingerprint == make().fingerprint
    placement = Placement.from_slots(np.array([[1, 0, 3, 2]], ">i8"), ep_size=2)
    assert placement == Placement.from_slots([[1, 0, 3, 2]], ep_size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Problem.from_arrays([4] * 4, [[[3, 1]], [[3]], 1, 2], capacity=8, ep_size=2), "counts is ragged"),
        (
            lambda: Problem.from_arrays(np.ma.array([4] * 4, mask=[0, 0, 0, 1]), COUNTS, capacity=8, ep_size=2),
            "lengths has masked entries",
        ),
        (
            lambda: Problem.from_arrays([4] * 4, np.ma.array(COUNTS, mask=COUNTS > 2), capacity=8, ep_size=2),
            "counts has masked entries",
        ),
        (lambda: make(sample_ids=["a\0", "b", "c", "d"]), r"sample_ids\[0\] is 'a\\x00'"),
        (lambda: make(sample_ids=["\ud800", "b", "c", "d"]), r"sample_ids\[0\]"),
        (lambda: make(prove_rows=float("inf")), "prove_rows is inf"),
        (lambda: Placement.from_slots([[0, 1], [0]], ep_size=2), "slot_of_expert is ragged"),
        (lambda: Placement.contiguous(1, 4.0, ep_size=2), "sizes must be integers"),  # type: ignore[arg-type]
        (lambda: CostModel(None), "attention is None"),  # type: ignore[arg-type]
        (lambda: CostModel(OperatorClass("a", 1, 0)), "it must hold OperatorClass"),  # type: ignore[arg-type]
        (lambda: planning.solve("p.npz"), "problem is str; it must be a Problem"),  # type: ignore[arg-type]
        (lambda: planning.place(None), "problem is NoneType"),  # type: ignore[arg-type]
        (lambda: planning.pack({}), "problem is dict"),  # type: ignore[arg-type]
        (lambda: planning.compare(None, ["lpt+ffd"]), "problem is NoneType"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_input_at_all_is_said_plainly(call: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        call()


def test_numpy_numbers_are_numbers() -> None:
    result = planning.solve(make(prove_rows=np.float32(0.5)), "lpt+ffd", time_limit=np.float32(0.5))
    assert result.settings["time_limit"] == 0.5
    assert planning.solve(make(), "lpt+ffd", time_limit=np.int64(1)).plan is not None


def test_a_file_cut_or_changed_anywhere_is_refused_or_the_same(tmp_path: Path) -> None:
    problem, path, damaged = make(sample_ids=list("abcd")), tmp_path / "p.npz", tmp_path / "q.npz"
    problem.save(path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    flipped = []
    for place in rng.integers(0, len(whole), 60).tolist():
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        flipped.append(bytes(changed))
    for content in [*(whole[:size] for size in range(0, len(whole), 61)), *flipped]:
        damaged.write_bytes(content)
        try:
            read = Problem.load(damaged)
        except InvalidInputError:
            continue
        assert read.fingerprint == problem.fingerprint
