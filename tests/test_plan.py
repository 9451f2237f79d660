from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInputError, InvalidPlanError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem


def random_problem(seed: int = 0, num_samples: int = 12, **changes: Any) -> Problem:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 30, num_samples)
    counts = np.zeros((num_samples, 3, 8), dtype=np.uint16)
    for i, t in enumerate(lengths):
        for layer in range(3):
            for _ in range(t):
                counts[i, layer, rng.choice(8, 2, replace=False)] += 1
    options: dict[str, Any] = {"capacity": 64, "ep_size": 4, "num_shards": 2} | changes
    return Problem.from_arrays(lengths, counts, **options)


permutations = st.integers(0, 2**32 - 1).map(
    lambda seed: np.stack([np.random.default_rng((seed, layer)).permutation(8) for layer in range(3)])
)


@given(permutations)
def test_maps_invert_each_other(slots: np.ndarray) -> None:
    placement = Placement.from_slots(slots, ep_size=4)
    rows = np.arange(3)[:, None]
    assert (placement.slot_of_expert[rows, placement.expert_of_slot] == np.arange(8)).all()
    assert placement.inverse().inverse() == placement
    assert np.array_equal(placement.rank_of_expert, slots // 2)
    again = Placement.from_rank_of_expert(placement.rank_of_expert, ep_size=4)
    assert np.array_equal(again.rank_of_expert, placement.rank_of_expert)


@given(permutations)
def test_rank_load_sums_counts_of_owned_experts(slots: np.ndarray) -> None:
    problem = random_problem()
    placement = Placement.from_slots(slots, ep_size=4)
    load = placement.rank_load(problem)
    for layer in range(3):
        for rank in range(4):
            owned = placement.rank_of_expert[layer] == rank
            assert np.array_equal(load[:, layer, rank], problem.counts[:, layer, owned].sum(axis=1))
    assert np.array_equal(placement.expert_work(problem), load.astype(np.int64) * problem.expert_unit)
    assert placement.rank_load(problem) is load


def test_remapped_ids_count_to_the_slots() -> None:
    placement = Placement.from_slots([[3, 2, 1, 0], [1, 0, 3, 2]], ep_size=2)
    ids = np.array([[[0, 1], [2, 3]], [[3, 2], [0, 1]], [[-1, -1], [-1, -1]]], dtype=np.int16)
    mapped = placement.remap(ids)
    assert mapped.dtype == np.int16
    assert mapped.tolist() == [[[3, 2], [3, 2]], [[0, 1], [1, 0]], [[-1, -1], [-1, -1]]]
    assert np.array_equal(placement.inverse().remap(mapped), ids)
    wide = Placement.contiguous(1, 512, ep_size=2).remap(np.array([[[255]]], dtype=np.uint8))
    assert wide.dtype == np.int32
    for bad, message in (
        ([[[4, 0], [0, 1]]], "id 4"),
        ([[[0, 1]]], r"\[\.\.\., 2, K\]"),
        ([[[0.5, 1], [1, 2]]], "dtype"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            placement.remap(np.array(bad))


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1, 2, 2]], "layer 0: slot 2 is taken 2 times"),
        ([[0, 1, 2, 4]], "slot 4 is outside 0..3"),
        ([[0, 1, 2, -1]], "slot -1"),
        ([[0.0, 1.0, 2.0, 3.0]], "integers"),
        ([0, 1, 2, 3], "it must have 2"),
    ],
)
def test_what_is_no_permutation_is_refused(slots: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Placement.from_slots(slots, ep_size=2)


def test_ranks_must_be_full() -> None:
    with pytest.raises(InvalidInputError, match="rank 0: owns 3 experts"):
        Placement.from_rank_of_expert([[0, 0, 0, 1]], ep_size=2)
    with pytest.raises(InvalidInputError, match="rank 2 is outside"):
        Placement.from_rank_of_expert([[0, 0, 1, 2]], ep_size=2)
    with pytest.raises(InvalidInputError, match="not divisible"):
        Placement.from_slots([[0, 1, 2]], ep_size=2)


def test_packing_is_checked() -> None:
    with pytest.raises(InvalidInputError) as caught:
        Packing.from_arrays([0, -1], [0, 0, -2])
    assert len(caught.value.faults) == 3
    packing = Packing.from_cells([0, 5, 5], dp_size=4)
    assert packing.row_of_sample.tolist() == [0, 1, 1]
    assert packing.samples_of_cell(1, 1).tolist() == [1, 2]
    assert packing == Packing.from_arrays([0, 1, 1], [0, 1, 1])
    assert hash(packing) == hash(Packing.from_cells([0, 5, 5], dp_size=4))
    assert "in 2 cells" in repr(packing)


def test_plan_round_trip(tmp_path: Path) -> None:
    problem = random_problem()
    plan = Plan.from_arrays(problem, np.zeros(12, int), np.arange(12) % 8, [[7, 6, 5, 4, 3, 2, 1, 0]] * 3)
    path = tmp_path / "plan.json"
    plan.save(path)
    back = Plan.load(path, problem)
    assert back.placement == plan.placement
    assert back.packing == plan.packing
    text = json.loads(path.read_text())
    assert list(text) == sorted(text)
    assert text["schema"] == "routepack-plan/1"


def test_plan_of_another_problem_is_refused(tmp_path: Path) -> None:
    problem, other = random_problem(), random_problem(1)
    path = tmp_path / "plan.json"
    Plan.from_arrays(problem, np.zeros(12, int), np.arange(12) % 8).save(path)
    with pytest.raises(InvalidInputError, match="belongs to the problem sha256:"):
        Plan.load(path, other)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schema": "x"}, InvalidInputError, "schema is 'x'"),
        ({"row_of_sample": [0.5] * 12}, InvalidInputError, "row_of_sample"),
        ({"extra": 1}, InvalidInputError, "extra"),
        ({"row_of_sample": [0] * 11}, InvalidPlanError, "has 11 entries"),
        ({"slot_of_expert": [[0] * 8] * 3}, InvalidPlanError, "taken 8 times"),
        ({"slot_of_expert": [list(range(8))]}, InvalidPlanError, "1 layers x 8 experts"),
        ({"num_rows": 77}, InvalidInputError, "77 rows"),
    ],
)
def test_bad_plan_files(tmp_path: Path, change: dict[str, Any], error: type[Exception], message: str) -> None:
    problem = random_problem()
    value = Plan.from_arrays(problem, np.zeros(12, int), np.arange(12) % 8).to_dict() | change
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(value))
    with pytest.raises(error, match=message):
        Plan.load(path, problem)


def test_plan_faults_come_together() -> None:
    with pytest.raises(InvalidPlanError) as caught:
        Plan.from_arrays(random_problem(), [0, -1], [0, 0], [[0, 0]])
    assert len(caught.value.faults) >= 2


def test_one_sample_per_row_needs_the_rows() -> None:
    problem = Problem.from_window(np.full((3, 2, 4), 5), ep_size=2)
    assert Packing.one_sample_per_row(problem).row_of_sample.tolist() == [0, 1, 2]
    with pytest.raises(InvalidInputError, match="one row a sample"):
        Packing.one_sample_per_row(random_problem())


def test_construction_without_validation_is_refused() -> None:
    with pytest.raises(TypeError):
        Placement(np.zeros((1, 2), dtype=np.int64), 1)
    with pytest.raises(TypeError):
        Packing(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
