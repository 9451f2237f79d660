"""prime-rl payloads in, micro-batches out and back."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import prime_rl
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

K, L = 4, 3


def routes(rows: int, experts: int, seed: int = 0) -> npt.NDArray[np.int64]:
    order = np.argsort(np.random.default_rng(seed).random((rows, L, experts)), axis=2)
    return order[:, :, :K].astype(np.int64)


@pytest.mark.parametrize(("experts", "dtype"), [(16, "uint8"), (256, "uint8"), (257, "uint16")])
def test_payloads_round_trip_in_the_width_the_experts_need(experts: int, dtype: str) -> None:
    ids = routes(6, experts)
    ids[0, 0, 0] = experts - 1
    payload = prime_rl.encode(ids, num_experts=experts)
    assert payload["dtype"] == dtype
    assert (prime_rl.decode(payload) == ids).all()
    raw = SimpleNamespace(data=base64.b64decode(payload["data"]), shape=payload["shape"], dtype=dtype)
    assert (prime_rl.decode(raw) == ids).all()


def test_zero_padding_is_not_expert_zero(tmp_path: Path) -> None:
    ids = routes(6, 16)
    padded = np.concatenate([ids, np.zeros((5, L, K), dtype=np.int64)])
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"length": 7, "routed_experts": prime_rl.encode(padded, num_experts=16)}))
    batch, coverage = formats.read("prime-rl", [path], num_experts=16)
    assert (batch.counts[0, 0] == np.bincount(ids[:, 0].ravel(), minlength=16)).all()
    assert coverage.rows_zero.tolist() == [5]
    assert coverage.rows_padded.tolist() == [5]
    assert batch.routed_tokens.tolist() == [6]


def test_turns_carry_their_own_start(tmp_path: Path) -> None:
    ids = routes(9, 16)
    parts = [prime_rl.encode(ids[:5], num_experts=16), prime_rl.encode(ids[4:], num_experts=16, start=4)]
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"length": 10, "segments": [{"routed_experts": part} for part in parts]}))
    batch, _ = formats.read("prime-rl", [path], num_experts=16)
    assert batch.counts[0].sum() == 9 * L * K
    assert (batch.counts[0, 1] == np.bincount(ids[:, 1].ravel(), minlength=16)).all()


def payload(**change: object) -> dict[str, object]:
    return {**prime_rl.encode(routes(2, 16), num_experts=16), **change}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "dtype is missing"),
        (payload(dtype="float32"), "dtype is 'float32'"),
        (payload(shape=[2, 3]), "shape is [2, 3]"),
        (payload(shape="ab"), "shape is 'ab'"),
        (payload(shape=[3, 3, 4]), "24 bytes, but [3, 3, 4] of uint8 are 36"),
        (payload(data="*"), "not base64"),
        (payload(start=-1), "start is -1"),
    ],
)
def test_payloads_that_are_refused(value: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        prime_rl.decode(value)
    assert words in str(caught.value)


def test_encoding_has_no_place_for_missing_routes() -> None:
    with pytest.raises(InvalidInputError, match=r"outside 0\.\.3"):
        prime_rl.encode([[[-1]]], num_experts=4)
    with pytest.raises(InvalidInputError, match="uint16 holds 65536"):
        prime_rl.encode([[[1]]], num_experts=70_000)


def test_export_reads_back_and_scores_the_same() -> None:
    problem, plan = synthetic.planted(
        num_rows=3, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    content = prime_rl.export(problem, plan).content
    packing = prime_rl.import_packing(problem, content)
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)
    assert [len(worker) for worker in content["micro_batches"]] == [3] * 4
    with pytest.raises(InvalidInputError, match="micro_batches is missing"):
        prime_rl.import_packing(problem, {})


def test_workers_out_of_samples_get_dummies_on_request() -> None:
    counts = np.full((3, 1, 2), 4, dtype=np.int64)
    problem = Problem.from_arrays([4, 4, 4], counts, top_k=2, capacity=5, ep_size=2, dp_size=2, num_rows=2)
    plan = Plan.from_arrays(problem, [0, 0, 1], [0, 1, 0])
    with pytest.raises(InvalidInputError, match=r'prime-rl cannot express.*pad="dummy"'):
        prime_rl.export(problem, plan)
    exported = prime_rl.export(problem, plan, pad="dummy")
    assert exported.content["micro_batches"] == [[[0], [2]], [[1], [3]]]
    assert prime_rl.import_packing(problem, exported.content) == plan.packing
