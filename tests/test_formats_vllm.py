"""vLLM outputs in their historical shapes, HTTP payloads, expert maps."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import vllm
from routepack_opt.formats.eplb import import_placement

E, K, DENSE, MOE = 16, 4, [0, 2], [1, 3, 4]
Ids = npt.NDArray[np.int64]


def routes(rows: int, seed: int = 0) -> Ids:
    order = np.argsort(np.random.default_rng(seed).random((rows, len(MOE), E)), axis=2)
    return order[:, :, :K].astype(np.int64)


def expected(ids: Ids) -> Ids:
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=E) for layer in range(ids.shape[1])])


def all_layers(ids: Ids) -> Ids:
    """Dense layers as zeros, as older versions record them."""
    whole = np.zeros((len(ids), len(DENSE) + len(MOE), K), dtype=ids.dtype)
    whole[:, MOE] = ids
    return whole


def request(prompt: int, *completions: tuple[int, object], prompt_part: object = None) -> SimpleNamespace:
    outputs = [
        SimpleNamespace(index=index, token_ids=list(range(tokens)), routed_experts=ids)
        for index, (tokens, ids) in enumerate(completions)
    ]
    return SimpleNamespace(
        request_id="r7", prompt_token_ids=list(range(prompt)), outputs=outputs, prompt_routed_experts=prompt_part
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32])
@pytest.mark.parametrize("extra", [0, 1])
def test_combined_rows_over_moe_layers(dtype: type[np.integer], extra: int) -> None:
    """Tokens - 1 rows, or tokens rows."""
    ids = routes(8 + extra)
    batch, coverage = vllm.read_outputs([request(5, (4, ids.astype(dtype)))], num_experts=E, moe_layers=MOE)
    assert (batch.counts[0] == expected(ids)).all()
    assert batch.lengths.tolist() == [9]
    assert batch.routed_tokens.tolist() == [8 + extra]
    assert coverage.rows_missing.max() == 0


def test_all_hidden_layers_with_dense_ones_zero() -> None:
    ids = routes(8)
    batch, _ = vllm.read_outputs([request(5, (4, all_layers(ids).astype(np.int32)))], num_experts=E, moe_layers=MOE)
    assert (batch.counts[0] == expected(ids)).all()
    with pytest.raises(InvalidInputError, match=r"layer 0: all 4 ids are 0.*left out with moe_layers"):
        vllm.read_outputs([request(5, (4, all_layers(ids).astype(np.int32)))], num_experts=E)


def test_prompt_part_apart_with_a_cached_prefix() -> None:
    ids = routes(9).astype(np.int16)
    prompt = ids[:5].copy()
    prompt[:2] = -1
    outputs = [request(5, (4, ids[5:]), prompt_part=prompt)]
    with pytest.raises(InvalidInputError, match="2 of 9 tokens have no route"):
        vllm.read_outputs(outputs, num_experts=E)
    batch, coverage = vllm.read_outputs(outputs, num_experts=E, uncovered="ignore")
    assert (batch.counts[0] == expected(ids[2:].astype(np.int64))).all()
    assert coverage.rows_negative.tolist() == [2]
    scaled, _ = vllm.read_outputs(outputs, num_experts=E, uncovered="scale")
    assert scaled.routed_tokens.tolist() == [9]
    assert (scaled.counts.sum(axis=2) == K * 9).all()


def test_completions_are_samples_and_requests_are_groups() -> None:
    batch, _ = vllm.read_outputs(
        [request(2, (3, routes(4, 1)), (5, routes(6, 2))), request(2, (1, routes(2, 3)))], num_experts=E
    )
    assert batch.lengths.tolist() == [5, 7, 3]
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 0, 0]
    assert batch.sample_ids is None


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (request(5, (4, None)), "request r7/0: routed_experts is None; the request was preempted"),
        (request(5, (4, routes(10))), "10 rows with routes for 9 tokens"),
        (request(5, (4, routes(6))), "3 of 9 tokens have no route"),
        (request(5, (4, np.zeros((8, 3, K), dtype=int))), "no route at all in layer 0"),
        (request(5, (4, routes(4)), prompt_part=routes(3)), "3 prompt rows for 5 prompt tokens"),
        (request(5, (4, routes(4)), prompt_part=routes(5)[:, :2]), "prompt ids have shape [5, 2, 4]"),
        (request(5, (4, routes(8)[:, :, :1] * 0.5)), "dtype float64"),
        (request(5, (4, np.full((8, 3, K), 255, dtype=np.uint8))), "id 255 is outside the experts 0..15 (-1 cast"),
    ],
)
def test_outputs_that_are_refused(output: SimpleNamespace, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        vllm.read_outputs([output], num_experts=E)
    assert words in str(caught.value)


def test_physical_ids_are_mapped_to_logical_experts() -> None:
    ids = routes(8)
    permutation = np.stack([np.random.default_rng(s).permutation(E) for s in range(3)])
    physical = np.stack([np.argsort(permutation[layer])[ids[:, layer]] for layer in range(3)], axis=1)
    batch, _ = vllm.read_outputs([request(5, (4, physical))], num_experts=E, physical_to_logical=permutation)
    assert (batch.counts[0] == expected(ids)).all()


# ------------------------------------------------------------------------ HTTP


def npy(ids: Ids, dtype: type[np.integer]) -> str:
    stream = io.BytesIO()
    np.save(stream, ids.astype(dtype))
    return base64.b64encode(stream.getvalue()).decode()


def test_http_payloads_and_nested_lists_stream_from_json_lines(tmp_path: Path) -> None:
    one, two, three = routes(8, 1), routes(4, 2), routes(5, 3)
    lines = [
        {
            "request_id": "q",
            "prompt_token_ids": [1] * 5,
            "choices": [{"index": 0, "token_ids": [1] * 4, "routed_experts": npy(one, np.uint8)}],
        },
        {"usage": {"prompt_tokens": 2}, "choices": [{"token_ids": [1] * 3, "routed_experts": two.tolist()}]},
        {"sample_id": "s", "num_tokens": 6, "routed_experts": npy(three, np.int32), "group_id": "q"},
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    batch, _ = formats.read("vllm", [path], num_experts=E, moe_layers=MOE, progress=True)
    assert batch.lengths.tolist() == [9, 5, 6]
    for i, ids in enumerate((one, two, three)):
        assert (batch.counts[i] == expected(ids)).all()
    assert batch.sample_ids == ("q/0", "1", "s")
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 1, 0]


def test_a_dropped_prompt_prefix_counts_as_missing(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    value = {"length": 20, "routed_experts_prompt_start": 12, "routed_experts": npy(routes(7), np.uint8)}
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInputError, match="13 of 20 tokens have no route"):
        vllm.read_files([path], num_experts=E)
    _, coverage = vllm.read_files([path], num_experts=E, uncovered="ignore")
    assert coverage.rows_missing[0].tolist() == [12] * 3


def test_turns_join_with_the_later_one_winning(tmp_path: Path) -> None:
    ids = routes(9)
    stale = ids[:5].copy()
    stale[4] = routes(1, 99)[0]
    value = {
        "length": 10,
        "segments": [
            {"start": 0, "routed_experts": npy(stale, np.int16)},
            {"start": 4, "routed_experts": npy(ids[4:], np.int16)},
        ],
    }
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(value))
    batch, _ = vllm.read_files([path], num_experts=E)
    assert (batch.counts[0] == expected(ids)).all()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"length": 9}, "x.jsonl:1: routed_experts is missing or null"),
        ({"routed_experts": "AAAA", "length": 9}, "no .npy"),
        ({"routed_experts": "A", "length": 9}, "not base64"),
        ({"routed_experts": [[[1, 2]], [[1]]], "length": 2}, "is"),
        ({"routed_experts": [[[1, 2]]]}, "its length is unknown"),
        ({"segments": 3, "length": 2}, "segments must be a list"),
        ({"segments": [{"start": 0}], "length": 2}, "segment 0 must have start and routed_experts"),
        ({"sample_id": "s", "routed_experts": [[[1, 1, 1]]], "length": 2}, "sample 0 (s), row 0, layer 0: all 3 ids"),
    ],
)
def test_lines_that_are_refused(tmp_path: Path, value: dict[str, object], words: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(value))
    with pytest.raises(InvalidInputError) as caught:
        vllm.read_files([path], num_experts=E)
    assert words in str(caught.value)


def test_an_empty_stream_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(InvalidInputError, match="no sample was found"):
        vllm.read_files([tmp_path / "x.jsonl"], num_experts=E)


# ------------------------------------------------------------------- placement


def test_maps_read_back_as_the_placement() -> None:
    problem, plan = synthetic.planted(
        num_rows=2, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    lists = vllm.export(problem, plan).content
    assert import_placement(lists, ep_size=4) == plan.placement
    maps = np.array(vllm.export(problem, plan, layout="expert-map").content)
    assert maps.shape == (2, 4, 16)
    owners = (maps >= 0).argmax(axis=1)
    assert ((maps >= 0).sum(axis=1) == 1).all()
    assert (owners == plan.placement.rank_of_expert).all()
    local = maps.max(axis=1)
    assert (owners * 4 + local == plan.placement.slot_of_expert).all()
    whole = vllm.export(problem, plan, moe_layers=[1, 2], num_hidden_layers=3).content
    assert whole[0] == list(range(16))
    assert whole[1:] == lists
    with pytest.raises(InvalidInputError, match="layout is 'map'"):
        vllm.export(problem, plan, layout="map")
