"""Megatron-Core: replay lists in, sample groups, packing info and permutations out and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import megatron
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

E, K, L = 16, 4, 3


def routes(rows: int, seed: int = 0) -> npt.NDArray[np.int64]:
    order = np.argsort(np.random.default_rng(seed).random((rows, L, E)), axis=2)
    return order[:, :, :K].astype(np.int64)


def planted() -> tuple[Problem, Plan]:
    problem, plan = synthetic.planted(
        num_rows=3, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    return problem, plan


def uneven(**options: int) -> tuple[Problem, Plan]:
    """Five samples in two rows of two slots; cell (1, 1) is empty."""
    lengths = np.array([7, 5, 5, 4, 3])
    counts = np.zeros((5, 1, 4), dtype=np.int64)
    counts[:, 0, 0] = lengths
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=16, ep_size=2, dp_size=2, num_rows=2, **options)
    return problem, Plan.from_arrays(problem, [0, 0, 0, 1, 0], [0, 1, 1, 0, 0])


# ---------------------------------------------------------------------- reader


def test_layer_lists_and_buffers_count_alike() -> None:
    ids = routes(9)
    layers = [ids[:, layer].astype(np.int32) for layer in range(L)]
    buffer = np.concatenate([ids, np.full((3, L, K), 99)]).astype(np.int16)
    listed, _ = megatron.read(layers, [0, 4, 9], num_experts=E)
    buffered, _ = megatron.read(buffer, [0, 4, 9], num_experts=E, lengths=[5, 5])
    assert (listed.counts == buffered.counts).all()
    assert (listed.counts[0, 2] == np.bincount(ids[:4, 2].ravel(), minlength=E)).all()
    assert listed.lengths.tolist() == [4, 5]
    assert buffered.lengths.tolist() == [5, 5]


def test_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", ids=routes(9).astype(np.int16), cu_seqlens=[0, 4, 9])
    batch, _ = formats.read("megatron", [tmp_path / "x.npz"], num_experts=E)
    assert batch.lengths.tolist() == [4, 5]
    with pytest.raises(InvalidInputError, match="2 files are given"):
        formats.read("megatron", [tmp_path / "x.npz"] * 2, num_experts=E)


def test_torch_file_of_layer_lists(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    ids = routes(9)
    value = {"layers": [torch.from_numpy(ids[:, layer]) for layer in range(L)], "cu_seqlens": torch.tensor([0, 9])}
    torch.save(value, tmp_path / "x.pt")
    batch, _ = formats.read("megatron", [tmp_path / "x.pt"], num_experts=E)
    assert (batch.counts[0, 1] == np.bincount(ids[:, 1].ravel(), minlength=E)).all()
    torch.save({"layers": []}, tmp_path / "y.pt")
    with pytest.raises(InvalidInputError, match="and cu_seqlens was expected"):
        formats.read("megatron", [tmp_path / "y.pt"], num_experts=E)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "no layers"),
        ([routes(9)[:, 0], routes(8)[:, 1]], "layer 1: shape [8, 4]; layer 0 has [9, 4]"),
        (routes(9)[:, 0], "[max_tokens, L, K] was expected"),
        (routes(8), "cu_seqlens ends at 9; the buffer has 8 rows"),
    ],
)
def test_replay_that_is_refused(layers: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        megatron.read(layers, [0, 9], num_experts=E)
    assert words in str(caught.value)


# --------------------------------------------------------------------- packing


def test_groups_read_back_and_score_the_same() -> None:
    problem, plan = planted()
    content = megatron.export(problem, plan).content
    packing = megatron.import_packing(problem, content)
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)
    assert len(content["sample_id_groups"]) == 3
    assert {len(group) for group in content["sample_id_groups"]} == {4}


def test_packing_info_says_the_same_as_the_groups() -> None:
    problem, plan = planted()
    content = megatron.export(problem, plan).content
    for slot, info in enumerate(content["packing_info"]):
        for row, samples in enumerate(info["bin_seq_indices"]):
            assert samples == content["sample_id_groups"][row][slot]
            ends = np.cumsum([0, *problem.lengths[samples]]).tolist()
            assert info["cu_seqlens"][row] == info["cu_seqlens_padded"][row] == ends
            assert info["seq_starts"][row] == ends[:-1]
            assert info["seq_lengths"][row] == problem.lengths[samples].tolist()
            assert all(info["seq_to_bin_idx"][str(i)] == row for i in samples)
            assert ends[-1] <= problem.capacity


def test_padded_positions_follow_the_alignment() -> None:
    problem, plan = uneven(length_alignment=4)
    with pytest.raises(InvalidInputError, match="Megatron cannot express an empty microbatch"):
        megatron.export(problem, plan)
    info = megatron.export(problem, plan, pad="dummy").content["packing_info"]
    assert info[0]["cu_seqlens"] == [[0, 7, 10], [0, 4]]
    assert info[0]["cu_seqlens_padded"] == [[0, 8, 12], [0, 4]]
    assert info[0]["seq_starts"] == [[0, 8], [0]]
    assert info[1]["seq_lengths"] == [[5, 5], [1]]
    assert info[1]["cu_seqlens_padded"] == [[0, 8, 16], [0, 4]]


def test_empty_groups_of_others_are_imported() -> None:
    """A scheduler that emits an empty first microbatch is still a packing."""
    problem, _ = uneven()
    packing = megatron.import_packing(problem, {"sample_id_groups": [[[], []], [[0, 1], [2, 3, 4]]]})
    assert packing.row_of_sample.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "sample_id_groups is missing"),
        ({"sample_id_groups": [[[0]], [[1], [2]]]}, "microbatches have 1 to 2 ranks"),
        ({"sample_id_groups": [[[0, 1, 2, 3], []]]}, "sample 4 is in no microbatch"),
        ({"sample_id_groups": []}, "sample 0 is in no microbatch"),
    ],
)
def test_groups_that_are_no_packing(content: dict[str, object], words: str) -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        megatron.import_packing(problem, content)
    assert words in str(caught.value)


# ------------------------------------------------------------------- placement


def test_permutations_read_back() -> None:
    problem, plan = planted()
    exported = megatron.export_placement(problem, plan, moe_layers=[3, 11])
    assert set(exported.content["layers"]) == {"3", "11"}
    assert any("optimizer state" in note for note in exported.notes)
    assert megatron.import_placement(exported.content, ep_size=4) == plan.placement
    assert megatron.import_placement(megatron.export_placement(problem, plan).content, ep_size=4) == plan.placement
    with pytest.raises(InvalidInputError, match="moe_layers names 1 layers"):
        megatron.export_placement(problem, plan, moe_layers=[3])
    with pytest.raises(InvalidInputError, match="layers is missing"):
        megatron.import_placement({}, ep_size=4)
    with pytest.raises(InvalidInputError, match="taken 2 times"):
        megatron.import_placement({"layers": {"0": [0, 0, 1, 2]}}, ep_size=2)
