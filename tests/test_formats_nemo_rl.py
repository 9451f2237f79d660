"""NeMo-RL envelopes in, shards out and back."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import nemo_rl
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

E, K, L = 16, 4, 3


def routes(rows: int, seed: int = 0) -> npt.NDArray[np.int64]:
    order = np.argsort(np.random.default_rng(seed).random((rows, L, E)), axis=2)
    return order[:, :, :K].astype(np.int64)


@settings(max_examples=30, deadline=None)
@given(experts=st.sampled_from([2, 128, 129, 257, 32_768, 32_769]), rows=st.integers(0, 5), seed=st.integers(0, 99))
def test_envelopes_round_trip(experts: int, rows: int, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(-1, experts, size=(rows, 2, 3))
    envelope = nemo_rl.encode(ids, num_experts=experts)
    assert (nemo_rl.decode(envelope) == ids).all()
    width = {2: "int8", 128: "int8", 129: "int16", 257: "int16", 32_768: "int16", 32_769: "int32"}[experts]
    assert envelope.startswith(f"nrlre1:{width}:{rows}x2x3:")


@pytest.mark.parametrize(
    ("envelope", "words"),
    [
        (7, "int; an nrlre1 text envelope"),
        ("nrlre2:int8:1x1x1:AA==", "begins 'nrlre2"),
        ("nrlre1:float:1x1x1:AA==", "begins 'nrlre1:float"),
        ("nrlre1:int16:2x1x1:AAA=", "2 bytes, but 2x1x1 of int16 are 4"),
        ("nrlre1:int8:1x1x1:A", "not base64"),
    ],
)
def test_envelopes_that_are_refused(envelope: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        nemo_rl.decode(envelope)
    assert words in str(caught.value)


def test_encoding_refuses_ids_that_do_not_exist() -> None:
    with pytest.raises(InvalidInputError, match=r"outside -1\.\.3"):
        nemo_rl.encode([[[4]]], num_experts=4)


def test_missing_routes_and_the_arange_tail_are_masked(tmp_path: Path) -> None:
    ids = routes(8)
    tail = np.broadcast_to(np.arange(K), (1, L, K))
    gap = np.full((1, L, K), -1)
    value = {"length": 10, "routed_experts": nemo_rl.encode(np.concatenate([gap, ids, tail]), num_experts=E)}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(value))
    batch, coverage = formats.read("nemo-rl", [path], num_experts=E, uncovered="ignore")
    assert (batch.counts[0, 0] == np.bincount(ids[:, 0].ravel(), minlength=E)).all()
    assert coverage.rows_negative.tolist() == [1]
    assert coverage.rows_arange.tolist() == [1]
    assert coverage.rows_missing[0].tolist() == [1] * L
    with pytest.raises(InvalidInputError, match="2 of 10 tokens have no route"):
        formats.read("nemo-rl", [path], num_experts=E)


def test_a_stream_holds_one_sample_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps({"length": 2001, "routed_experts": nemo_rl.encode(routes(2000), num_experts=E)})
    path.write_text(f"{line}\n" * 150)
    formats.read("nemo-rl", [path], num_experts=E)  # compile and import before measuring
    tracemalloc.start()
    batch, _ = formats.read("nemo-rl", [path], num_experts=E)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch.num_samples == 150
    assert peak < path.stat().st_size / 8


def test_partial_missing_rows_are_refused(tmp_path: Path) -> None:
    ids = routes(8)
    ids[3, 1, 2] = -1
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"length": 9, "id": "s", "routed_experts": nemo_rl.encode(ids, num_experts=E)}))
    with pytest.raises(InvalidInputError, match=r"sample 0 \(s\), row 3, layer 1: 1 of 4 ids are -1"):
        formats.read("nemo-rl", [path], num_experts=E)


def test_duplicate_ids_in_a_row_are_refused_on_request(tmp_path: Path) -> None:
    ids = routes(8)
    ids[3, 1, 3] = ids[3, 1, 1]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"length": 9, "routed_experts": nemo_rl.encode(ids, num_experts=E)}))
    with pytest.raises(InvalidInputError, match="is repeated in one token's top-4"):
        formats.read("nemo-rl", [path], num_experts=E, check_distinct=True)


# ---------------------------------------------------------------------- shards


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
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=12, ep_size=2, dp_size=2, num_rows=2, **options)
    return problem, Plan.from_arrays(problem, [0, 0, 0, 1, 0], [0, 1, 1, 0, 0])


def test_export_reads_back_and_scores_the_same() -> None:
    problem, plan = planted()
    exported = nemo_rl.export(problem, plan)
    packing = nemo_rl.import_packing(problem, exported.content)
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)
    assert sorted(exported.content["sorted_indices"]) == list(range(problem.num_samples))
    lengths = np.array(exported.content["micro_batch_lengths"])
    assert lengths.shape == (4, 1, 3)
    assert lengths.sum() == problem.lengths.sum()
    assert exported.notes == ()


def test_padded_lengths_use_the_alignment_and_dummies_fill_empty_microbatches() -> None:
    problem, plan = uneven(length_alignment=4)
    with pytest.raises(InvalidInputError, match=r"NeMo-RL cannot express an empty microbatch.*min_samples_per_cell=1"):
        nemo_rl.export(problem, plan)
    exported = nemo_rl.export(problem, plan, pad="dummy")
    assert exported.content["micro_batch_lengths"] == [[[12, 4]], [[16, 4]]]
    assert exported.content["micro_batch_indices"] == [[[[0, 2], [2, 3]]], [[[0, 2], [2, 3]]]]
    assert exported.content["sorted_indices"] == [0, 4, 3, 1, 2, 5]
    assert nemo_rl.import_packing(problem, exported.content) == plan.packing


def test_uneven_shards_are_said() -> None:
    problem, _ = uneven()
    plan = Plan.from_arrays(problem, [0, 1, 0, 1, 0], [0, 0, 1, 1, 1])
    exported = nemo_rl.export(problem, plan)
    assert "equal_samples_per_slot=True" in exported.notes[-1]
    assert exported.content["elem_counts_per_gb"] == [[2], [3]]


def content(**change: object) -> dict[str, object]:
    problem, plan = uneven()
    return {**nemo_rl.export(problem, plan, pad="dummy").content, **change}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"micro_batch_indices": [[[[0, 2], [1, 3]]], [[[0, 2], [2, 3]]]]}, "[1, 3) does not follow 2"),
        ({"micro_batch_indices": [[[[0, 2]]], [[[0, 2], [2, 3]]]]}, "ranges end at 2 of 3 samples"),
        ({"sorted_indices": [0, 4, 3, 1, 2]}, "shards hold 6 samples, sorted_indices 5"),
        ({"sorted_indices": [0, 4, 3, 1, 1, 5]}, "sample 1 is in"),
        ({"num_dummies": 0}, "sample 5 is outside 0..4"),
    ],
)
def test_shards_that_are_no_packing(change: dict[str, object], words: str) -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        nemo_rl.import_packing(problem, content(**change))
    assert words in str(caught.value)


def test_missing_keys_are_all_named() -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        nemo_rl.import_packing(problem, {})
    assert len(caught.value.faults) == 3
