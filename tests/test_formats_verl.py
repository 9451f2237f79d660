"""verl batches in, reordered micro-batches out and back."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import verl
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate, violations

E, K, L = 16, 4, 3


def routes(rows: int, seed: int = 0) -> npt.NDArray[np.int16]:
    order = np.argsort(np.random.default_rng(seed).random((rows, L, E)), axis=2)
    return order[:, :, :K].astype(np.int16)


def batch_of(lengths: list[int], width: int, left: list[int]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Left-padded batch with a zero row for the last token, and the counts it holds."""
    ids = np.zeros((len(lengths), width, L, K), dtype=np.int16)
    mask = np.zeros((len(lengths), width), dtype=np.int64)
    counts = np.zeros((len(lengths), L, E), dtype=np.int64)
    for i, (length, pad) in enumerate(zip(lengths, left, strict=True)):
        ids[i, pad : pad + length - 1] = routes(length - 1, i)
        mask[i, pad : pad + length] = 1
        for layer in range(L):
            counts[i, layer] = np.bincount(routes(length - 1, i)[:, layer].ravel(), minlength=E)
    return {"routed_experts": ids, "attention_mask": mask}, counts


def planted() -> tuple[Problem, Plan]:
    problem, plan = synthetic.planted(
        num_rows=3, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    return problem, plan


def uneven() -> tuple[Problem, Plan]:
    """Five samples in two rows of two slots; cell (1, 1) is empty."""
    lengths = np.array([7, 5, 5, 4, 3])
    counts = np.zeros((5, 1, 4), dtype=np.int64)
    counts[:, 0, 0] = lengths
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=10, ep_size=2, dp_size=2, num_rows=2)
    return problem, Plan.from_arrays(problem, [0, 0, 0, 1, 0], [0, 1, 1, 0, 0])


# ---------------------------------------------------------------------- reader


def test_padding_is_never_credited_to_expert_zero() -> None:
    data, counts = batch_of([6, 9, 2], 12, [0, 3, 10])
    batch, coverage = verl.read(data, num_experts=E)
    assert (batch.counts == counts).all()
    assert batch.lengths.tolist() == [6, 9, 2]
    assert batch.routed_tokens.tolist() == [5, 8, 1]
    assert coverage.rows_zero.tolist() == [1, 1, 1]
    assert coverage.rows_missing.max() == 0


def test_data_proto_like_objects_with_prompt_groups() -> None:
    data, counts = batch_of([6, 9, 4], 12, [0, 3, 8])
    uid = np.array(["p", "q", "p"], dtype=object)
    batch, _ = verl.read(SimpleNamespace(batch=data, non_tensor_batch={"uid": uid}), num_experts=E)
    assert (batch.counts == counts).all()
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 1, 0]


def test_lengths_stand_in_for_the_mask_without_left_padding() -> None:
    data, counts = batch_of([6, 9, 4], 9, [0, 0, 0])
    batch, _ = verl.read({"routed_experts": data["routed_experts"], "lengths": [6, 9, 4]}, num_experts=E)
    assert (batch.counts == counts).all()
    without_last = data["routed_experts"][:, :8]
    batch, _ = verl.read({"routed_experts": without_last, "lengths": [6, 9, 4]}, num_experts=E)
    assert (batch.counts == counts).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    data, counts = batch_of([6, 9], 12, [2, 3])
    batch, _ = verl.read({key: torch.from_numpy(value) for key, value in data.items()}, num_experts=E)
    assert (batch.counts == counts).all()


def test_files(tmp_path: Path) -> None:
    one, first = batch_of([6, 9], 12, [2, 3])
    two, second = batch_of([5], 7, [0])
    np.savez(tmp_path / "a.npz", **one)
    np.savez(tmp_path / "b.npz", **two)
    batch, _ = formats.read("verl", [tmp_path / "a.npz", tmp_path / "b.npz"], num_experts=E)
    assert (batch.counts == np.concatenate([first, second])).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"routed_experts": None}, "routed_experts is None"),
        ({"attention_mask": np.zeros((2, 5))}, "attention_mask is [2, 5]; routed_experts covers 2 x 12"),
        ({"attention_mask": np.zeros((2, 12))}, "sample 0: attention_mask is all zero"),
        ({"routed_experts": np.zeros((2, 12, 3))}, "is float64 [2, 12, 3]"),
        ({"uid": ["a"]}, "uid has 1 entries for 2 samples"),
    ],
)
def test_batches_that_are_refused(change: dict[str, object], words: str) -> None:
    data, _ = batch_of([6, 9], 12, [2, 3])
    with pytest.raises(InvalidInputError) as caught:
        verl.read({**data, **change}, num_experts=E)
    assert words in str(caught.value)


def test_every_missing_column_is_named() -> None:
    with pytest.raises(InvalidInputError) as caught:
        verl.read({}, num_experts=E)
    assert len(caught.value.faults) == 2
    with pytest.raises(InvalidInputError, match="int has no batch"):
        verl.read(3, num_experts=E)


def test_a_truncated_recording_is_short_of_rows() -> None:
    data, _ = batch_of([6, 9], 12, [2, 3])
    data["routed_experts"][1, 5:8] = 0
    with pytest.raises(InvalidInputError, match="sample 1: 4 of 9 tokens have no route"):
        verl.read(data, num_experts=E)


# ---------------------------------------------------------------------- export


def test_export_reads_back_and_scores_the_same() -> None:
    problem, plan = planted()
    exported = verl.export(problem, plan)
    content = exported.content
    assert content["equal_count"]
    assert not exported.notes
    assert sorted(content["reorder"]) == list(range(problem.num_samples))
    assert content["reorder"] == [i for part in content["partitions"] for i in part]
    packing = verl.import_packing(problem, content["partitions"], content["micro_bsz_idx"])
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)


def test_empty_micro_batches_need_an_option_and_the_option_is_named() -> None:
    problem, plan = uneven()
    with pytest.raises(InvalidInputError) as caught:
        verl.export(problem, plan)
    assert "1 cells are empty: (row 1, DP slot 1)" in str(caught.value)
    assert 'pad="dummy"' in str(caught.value)
    assert "min_samples_per_cell=1" in str(caught.value)
    exported = verl.export(problem, plan, pad="dummy")
    content = exported.content
    assert content["partitions"] == [[0, 4, 3], [1, 2, 5]]
    assert content["micro_bsz_idx"] == [[[0, 1], [2]], [[0, 1], [2]]]
    assert content["equal_count"]
    assert content["num_dummies"] == 1
    assert "loss weight 0" in exported.notes[0]
    packing = verl.import_packing(problem, content["partitions"], content["micro_bsz_idx"], num_dummies=1)
    assert packing == plan.packing


def test_unequal_counts_are_said_and_the_option_is_named() -> None:
    problem, _ = uneven()
    plan = Plan.from_arrays(problem, [0, 1, 0, 1, 0], [0, 0, 1, 1, 1])
    exported = verl.export(problem, plan)
    assert not exported.content["equal_count"]
    assert "DP slots hold 2 to 3 samples" in exported.notes[0]
    assert "equal_samples_per_slot=True" in exported.notes[0]


def test_reorder_moves_every_column() -> None:
    problem, plan = planted()
    n = problem.num_samples
    data = {"input": np.arange(n) * 10, "text": [f"t{i}" for i in range(n)]}
    moved, micro = verl.reorder(data, problem, plan)
    order = verl.export(problem, plan).content["reorder"]
    assert (moved["input"] == np.array(order) * 10).all()
    assert moved["text"] == [f"t{i}" for i in order]
    start = 0
    for slot, rows in enumerate(micro):
        for row, indices in enumerate(rows):
            samples = moved["input"][start + np.array(indices)] // 10
            assert (plan.packing.row_of_sample[samples] == row).all()
            assert (plan.packing.dp_slot_of_sample[samples] == slot).all()
        start += sum(map(len, rows))
    with pytest.raises(InvalidInputError, match="input has 3 entries"):
        verl.reorder({"input": np.arange(3)}, problem, plan)


# ---------------------------------------------------------------------- import


def test_micro_batches_above_the_cap_are_imported_and_reported() -> None:
    """Eight samples of 7 tokens, cap 8, seven micro-batches: one holds 14 tokens."""
    counts = np.full((8, 1, 2), 7, dtype=np.int64)
    problem = Problem.from_arrays([7] * 8, counts, top_k=2, capacity=8, ep_size=1, dp_size=1, num_rows=8)
    packing = verl.import_packing(problem, [list(range(8))], [[[0, 7], [1], [2], [3], [4], [5], [6]]])
    plan = Plan.from_arrays(problem, packing.row_of_sample, packing.dp_slot_of_sample)
    assert violations(problem, plan) == [
        "cell (row 0, DP slot 0): 14 tokens in 2 samples are above the capacity 8",
    ]


def test_ranks_may_have_different_numbers_of_micro_batches() -> None:
    problem, plan = uneven()
    packing = verl.import_packing(problem, [[0, 4, 3], [1, 2]], [[[0, 1], [2]], [[0, 1]]])
    assert packing == plan.packing


@pytest.mark.parametrize(
    ("partitions", "micro", "words"),
    [
        ([[0, 1], [2, 3, 4]], [[[0, 1]]], "2 partitions, but micro_bsz_idx of 1 ranks"),
        ([[0, 1, 2, 3, 4]], [[[0, 1, 5]]], "rank 0, micro-batch 0: index 5 is outside its 5 samples"),
        ([[0, 1, 2, 3, 4]], [[[0, 1, 2, 3]]], "sample 4 is in no microbatch"),
        ([[0, 1, 2, 3, 3]], [[[0, 1, 2, 3, 4]]], "sample 3 is in (row 0, DP rank 0) and again"),
    ],
)
def test_packings_that_are_none(partitions: list[list[int]], micro: list[list[list[int]]], words: str) -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        verl.import_packing(problem, partitions, micro)
    assert words in str(caught.value)
