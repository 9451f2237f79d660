"""SGLang responses, recorder dumps and expert locations."""

from __future__ import annotations

import base64
import json
import pickle
import zipfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import sglang
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

E, K, L = 16, 4, 3
Ids = npt.NDArray[np.int32]


def routes(rows: int, seed: int = 0) -> Ids:
    order = np.argsort(np.random.default_rng(seed).random((rows, L, E)), axis=2)
    return order[:, :, :K].astype(np.int32)


def expected(ids: Ids) -> npt.NDArray[np.int64]:
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=E) for layer in range(L)])


def raw(ids: Ids) -> str:
    return base64.b64encode(np.ascontiguousarray(ids, dtype="<i4").tobytes()).decode()


def response(ids: object, prompt: int, completion: int, **more: object) -> dict[str, object]:
    payload = raw(ids) if isinstance(ids, np.ndarray) else ids
    meta = {"id": "a", "prompt_tokens": prompt, "completion_tokens": completion, "routed_experts": payload}
    return {"meta_info": meta, **more}


OPTIONS = {"num_experts": E, "num_layers": L, "top_k": K}


def test_headerless_payload() -> None:
    ids = routes(8)
    batch, coverage = sglang.read_responses([response(ids, 5, 4)], **OPTIONS)
    assert (batch.counts[0] == expected(ids)).all()
    assert batch.lengths.tolist() == [9]
    assert batch.sample_ids == ("a",)
    assert coverage.fraction == 1.0


def test_values_and_valid_mask() -> None:
    ids = routes(8)
    mask = [True] * 6 + [False] * 2
    payload = {"values": raw(ids), "valid_mask": mask}
    batch, _ = sglang.read_responses([response(payload, 5, 4)], uncovered="ignore", **OPTIONS)
    assert (batch.counts[0] == expected(ids[:6])).all()


def test_rows_before_the_start_are_missing() -> None:
    with pytest.raises(InvalidInputError, match="5 of 13 tokens have no route"):
        sglang.read_responses([response(routes(8), 9, 4)], **OPTIONS)


def test_turns_with_start_lengths() -> None:
    ids = routes(9)
    stale = ids[:5].copy()
    stale[4] = routes(1, 5)[0]
    turns = [
        {"meta_info": {"routed_experts": raw(stale), "routed_experts_start_len": 0}},
        {"meta_info": {"routed_experts": raw(ids[4:]), "routed_experts_start_len": 4}},
    ]
    batch, _ = sglang.read_responses([{"length": 10, "segments": turns}], **OPTIONS)
    assert (batch.counts[0] == expected(ids)).all()
    turns[1]["meta_info"]["routed_experts_start_len"] = 6
    with pytest.raises(InvalidInputError, match="starts at token 6, but routes end at token 5: a gap"):
        sglang.read_responses([{"length": 10, "segments": turns}], **OPTIONS)


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({}, "is empty; the server did not return routed experts"),
        (None, "meta_info has no routed_experts"),
        ("AAAA", "3 bytes are no whole number of int32"),
        (base64.b64encode(b"\0" * 4 * 7).decode(), "7 ids are no multiple of num_layers 3 x top_k 4"),
        ({"values": "", "mask": []}, "has the keys mask, values"),
        ({"values": raw(routes(2)), "valid_mask": [True]}, "valid_mask has shape [1] for 2 rows"),
        (raw(np.full((8, L, K), E, dtype=np.int32)), "id 16 is outside the experts 0..15"),
    ],
)
def test_payloads_that_are_refused(payload: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        sglang.read_responses([response(payload, 5, 4)], **OPTIONS)
    assert words in str(caught.value)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(response(routes(8, s), 5, 4) | {"group_id": "g"}) for s in range(3)))
    with pytest.raises(InvalidInputError, match="num_layers is needed"):
        formats.read("sglang", [path], num_experts=E, top_k=K)
    batch, _ = formats.read("sglang", [path], **OPTIONS)
    assert batch.num_samples == 3
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 0, 0]
    with pytest.raises(InvalidInputError, match="num_ranks changes nothing"):
        formats.read("sglang", [path], num_ranks=2, **OPTIONS)


# -------------------------------------------------------------------- recorder


def dump(path: Path, value: object) -> Path:
    """Lists stand for tensors here; PyTorch files themselves are tested with the shared readers."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
    return path


def window() -> npt.NDArray[np.int64]:
    """Four steps of two MoE layers: equal totals in every layer."""
    rng = np.random.default_rng(1)
    return np.stack([np.stack([rng.multinomial(40 * s, np.full(E, 1 / E)) for _ in range(2)]) for s in range(1, 5)])


def test_stat_dump_drops_unused_steps_and_dense_layers(tmp_path: Path) -> None:
    load = window()
    recorded = np.zeros((7, 3, E), dtype=np.int64)
    recorded[2:6, 1:] = load
    path = dump(tmp_path / "x.pt", {"rank": 0, "logical_count": recorded.tolist()})
    found = sglang.read_recorder([path])
    assert (found == load).all()
    problem = Problem.from_window(found, ep_size=4)
    assert problem.num_rows == 4
    batch, coverage = formats.read("sglang", [path], num_experts=E, top_k=4)
    assert batch.lengths.tolist() == [10, 20, 30, 40]
    assert (batch.counts == load).all()
    assert coverage.fraction == 1.0
    with pytest.raises(InvalidInputError, match="one is read at a time"):
        sglang.read_recorder([path, path])
    with pytest.raises(InvalidInputError, match="num_layers changes nothing for recorder dumps"):
        formats.read("sglang", [path], num_experts=E, top_k=4, num_layers=2)
    with pytest.raises(InvalidInputError, match="has 16 experts a layer; num_experts is 8"):
        sglang.read_recorder([path], num_experts=8)


def per_pass(tmp_path: Path, ranks: tuple[int, ...], *, drop: tuple[int, int] | None = None) -> list[Path]:
    load = window()
    mapping = [list(range(E - 1, -1, -1))] * 2
    paths = []
    for rank in ranks:
        share = load // 2 if rank == 0 else load - load // 2
        records = [
            {"forward_pass_id": s, "rank": rank, "global_physical_count": share[s][:, ::-1].tolist()}
            for s in range(4)
            if (rank, s) != drop
        ]
        value = {"records": records, "last_physical_to_logical_map": mapping}
        paths.append(dump(tmp_path / f"x_{rank}.pt", value))
    return paths


def test_per_pass_dumps_are_summed_over_a_complete_set_of_ranks(tmp_path: Path) -> None:
    assert (sglang.read_recorder(per_pass(tmp_path, (0, 1)), num_ranks=2) == window()).all()


@pytest.mark.parametrize(
    ("ranks", "drop", "num_ranks", "words"),
    [
        ((1,), None, None, "1 of 2 ranks are missing: 0"),
        ((0,), None, 2, "1 of 2 ranks are missing: 1"),
        ((0, 1), (1, 2), 2, "pass 2: rank 1 has no record of it, 1 of 2 ranks do"),
    ],
)
def test_partial_rank_sets_are_refused(
    tmp_path: Path, ranks: tuple[int, ...], drop: tuple[int, int] | None, num_ranks: int | None, words: str
) -> None:
    with pytest.raises(InvalidInputError, match=words):
        sglang.read_recorder(per_pass(tmp_path, ranks, drop=drop), num_ranks=num_ranks)


def test_per_token_dumps_leave_padding_out(tmp_path: Path) -> None:
    """-1 must not be added to the last expert."""
    ids = [[[0, 3], [1, 2], [-1, -1]], [[3, 2], [0, 1], [-1, -1]]]
    records = [{"forward_pass_id": 0, "rank": 0, "topk_ids_of_layer": ids}]
    found = sglang.read_recorder([dump(tmp_path / "x.pt", {"records": records})], num_experts=4)
    assert found.tolist() == [[[1, 1, 1, 1], [1, 1, 1, 1]]]
    with pytest.raises(InvalidInputError, match="num_experts must be given"):
        sglang.read_recorder([tmp_path / "x.pt"])
    records[0]["topk_ids_of_layer"] = [[[0, 4]]]
    with pytest.raises(InvalidInputError, match=r"layer 0, token 0: id 4 is outside 0\.\.3"):
        sglang.read_recorder([dump(tmp_path / "y.pt", {"records": records})], num_experts=4)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"rank": 0, "tokens": []}, "unsupported recorder dump with the keys rank, tokens"),
        ([1, 2], "holds a list"),
        ({"records": [{"rank": 0, "forward_pass_id": 0, "input_ids": [1]}]}, "unsupported record with the keys"),
        ({"records": [{"forward_pass_id": 0}]}, "records name 0 ranks"),
        ({"logical_count": [[[0, 0]]]}, "no routed token"),
        ({"logical_count": [[[-1, 2]]]}, "negative counts"),
        (
            {"records": [{"rank": 0, "forward_pass_id": 0, "global_physical_count": [[1, 2]]}]},
            "last_physical_to_logical_map is missing",
        ),
    ],
)
def test_dumps_that_are_refused(tmp_path: Path, value: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        sglang.read_recorder([dump(tmp_path / "x.pt", value)])
    assert words in str(caught.value)


def test_micro_steps_need_layers_that_agree() -> None:
    load = window()
    load[1, 0, 3] += 1
    with pytest.raises(InvalidInputError, match="micro-step 1: layers routed"):
        sglang.micro_steps(load, top_k=1)


def test_recorded_window_can_be_placed(tmp_path: Path) -> None:
    problem = Problem.from_window(window(), ep_size=4)
    packing = Packing.one_sample_per_row(problem)
    plan = Plan.from_arrays(problem, packing.row_of_sample, packing.dp_slot_of_sample)
    sglang.export(problem, plan).save(tmp_path / "location.json")
    assert sglang.import_location(tmp_path / "location.json", ep_size=4) == plan.placement


# ------------------------------------------------------------------- placement


def test_location_reads_back_and_scores_the_same(tmp_path: Path) -> None:
    problem, plan = synthetic.planted(
        num_rows=2, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    notes = formats.export("sglang", problem, plan, tmp_path / "x.json", moe_layers=[1, 2], num_hidden_layers=4)
    assert "loss" in notes[0]
    assert set(json.loads((tmp_path / "x.json").read_text())) == {"physical_to_logical_map"}
    placement = sglang.import_location(tmp_path / "x.json", ep_size=4, moe_layers=[1, 2])
    assert placement == plan.placement
    assert evaluate(problem, Plan.of(problem, placement, plan.packing)) == evaluate(problem, plan)
    torch_like = dump(tmp_path / "x.pt", json.loads((tmp_path / "x.json").read_text()))
    assert sglang.import_location(torch_like, ep_size=4, moe_layers=[1, 2]) == placement
    with pytest.raises(InvalidInputError, match="has the key physical_to_logical_map"):
        sglang.import_location({"logical_count": []}, ep_size=4)
