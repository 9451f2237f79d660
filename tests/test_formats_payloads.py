"""What the formats share: tables, arrays, PyTorch files, turns, dummies."""

from __future__ import annotations

import base64
import collections
import copy
import io
import json
import pickle
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from routepack_opt import formats, synthetic
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import grids, megatron, nemo_rl, payloads, prime_rl, sglang, trtllm, verl
from routepack_opt.formats.payloads import Segment, join_segments
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate, violations

LINEAR = CostModel((OperatorClass("attention", Fraction(1), Fraction(0)),))

Case = tuple[Problem, Plan]


def planted() -> Case:
    problem, plan = synthetic.planted(
        num_rows=3, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    return problem, plan


def uneven(**options: int) -> Case:
    """Five samples in two rows of two slots; cell (1, 1) is empty."""
    counts = np.zeros((5, 1, 4), dtype=np.int64)
    lengths = np.array([7, 5, 5, 4, 3])
    counts[:, 0, 0] = lengths
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=10, ep_size=2, dp_size=2, num_rows=2, **options)
    return problem, Plan.from_arrays(problem, [0, 0, 0, 1, 0], [0, 1, 1, 0, 0])


# --------------------------------------------------------------------- tables


@pytest.mark.parametrize("name", sorted(formats.READERS))
def test_readers_exist_and_take_the_common_options(name: str) -> None:
    assert {"num_experts", "uncovered"} <= set(formats.option_names(name))


@pytest.mark.parametrize("name", sorted(formats.EXPORTERS))
def test_every_exporter_writes_a_file_and_says_what_the_loss_needs(name: str, tmp_path: Path) -> None:
    problem, plan = planted()
    notes = formats.export(name, problem, plan, tmp_path / "plan.out")
    text = (tmp_path / "plan.out").read_text()
    assert "loss" in text + " ".join(notes)
    if name != "trtllm":
        content = json.loads(text)
        if "sample_weight_numerators" in content:
            assert content["sample_weight_numerators"] == problem.lengths.tolist()
            assert content["sample_weight_denominator"] == problem.lengths.sum()
            assert "whole window" in content["loss_normalization"]


def test_unknown_names_and_options_are_refused_with_the_nearest(tmp_path: Path) -> None:
    problem, plan = planted()
    with pytest.raises(InvalidInputError, match="did you mean 'nemo-rl'"):
        formats.export("nemorl", problem, plan, tmp_path / "x")
    with pytest.raises(InvalidInputError, match="did you mean 'pad'"):
        formats.export("verl", problem, plan, tmp_path / "x", padd="dummy")
    with pytest.raises(InvalidInputError, match="takes no options; got pad"):
        formats.export("tunix", problem, plan, tmp_path / "x", pad="dummy")
    with pytest.raises(InvalidInputError, match="did you mean 'vllm'"):
        formats.read("vlm", [tmp_path], num_experts=4)
    with pytest.raises(InvalidInputError, match="no file is given"):
        formats.read("vllm", [], num_experts=4)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(formats.EXPORTERS))
def test_a_plan_of_another_problem_is_refused(name: str, tmp_path: Path) -> None:
    problem, _ = planted()
    other, plan = uneven()
    assert other.fingerprint != problem.fingerprint
    with pytest.raises(InvalidInputError, match="fingerprints differ"):
        formats.export(name, problem, plan, tmp_path / "x")


# --------------------------------------------------------------------- arrays


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "ids is None"),
        ([[1, 2], [3]], "ids is"),
        ([[[1.5]]], "dtype float64"),
        ([[[True]]], "dtype bool"),
        ([[1]], "must be [rows, layers, K]"),
    ],
)
def test_ids_that_are_no_integer_arrays(value: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        payloads.integer_ids(value, "ids")
    assert words in str(caught.value)


def test_npy_bytes_never_unpickle() -> None:
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InvalidInputError, match="pickled"):
        payloads.npy_bytes(stream.getvalue(), "ids")
    with pytest.raises(InvalidInputError, match="truncated"):
        payloads.npy_bytes(b"\x93NUMPY\x01\x00", "ids")


def test_base64_is_strict() -> None:
    assert payloads.decode_base64(base64.b64encode(b"abc").decode(), "x") == b"abc"
    for bad in ("abc", "a*==", 5):
        with pytest.raises(InvalidInputError, match="x is"):
            payloads.decode_base64(bad, "x")


# -------------------------------------------------------------- PyTorch files


def torch_file(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


class Danger:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (exec, ("raise SystemExit('executed')",))


def test_torch_files_are_read_without_running_them(tmp_path: Path) -> None:
    path = torch_file(tmp_path / "x.pt", pickle.dumps({"a": Danger()}))
    with pytest.raises(InvalidInputError, match=r"names builtins\.exec; only tensors"):
        payloads.read_torch(path)


def test_torch_files_of_containers(tmp_path: Path) -> None:
    value = {"rank": 3, "names": ["a", None], "rate": 0.5, "more": collections.OrderedDict(x=(1, 2))}
    assert payloads.read_torch(torch_file(tmp_path / "x.pt", pickle.dumps(value, protocol=2))) == value


def test_damaged_torch_files(tmp_path: Path) -> None:
    (tmp_path / "no.pt").write_bytes(b"PK\x03\x04 but no more")
    with pytest.raises(InvalidInputError, match="truncated, damaged"):
        payloads.read_torch(tmp_path / "no.pt")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        payloads.read_torch(tmp_path / "absent.pt")
    with pytest.raises(InvalidInputError, match="damaged"):
        payloads.read_torch(torch_file(tmp_path / "cut.pt", pickle.dumps({"a": 1})[:-3]))
    with zipfile.ZipFile(tmp_path / "empty.pt", "w") as archive:
        archive.writestr("readme", "")
    with pytest.raises(InvalidInputError, match=r"no data\.pkl"):
        payloads.read_torch(tmp_path / "empty.pt")


def test_torch_files_agree_with_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    value = {
        "counts": base,
        "column": base[1:, 2],
        "turned": base.t(),
        "small": [torch.tensor([1, -1], dtype=torch.int16), torch.tensor(7)],
        "bytes": torch.tensor([255], dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "empty": torch.zeros((0, 3)),
    }
    torch.save(value, tmp_path / "x.pt")
    read = payloads.read_torch(tmp_path / "x.pt")
    assert set(read) == set(value)
    for name in ("counts", "column", "turned", "bytes", "flags", "empty"):
        assert np.array_equal(read[name], value[name].numpy()), name
        assert read[name].dtype == value[name].numpy().dtype
    assert read["small"][0].tolist() == [1, -1]
    assert read["small"][1].item() == 7


def test_tensors_outside_their_storage_are_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    torch.save({"a": torch.zeros(1000, dtype=torch.int64)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        names = archive.namelist()
        pickled = archive.read(next(name for name in names if name.endswith("data.pkl")))
    torch_file(tmp_path / "cut.pt", pickled, {"0": b"\0" * 80})
    with pytest.raises(InvalidInputError, match="storage 0 holds 10 numbers; 1000 were announced"):
        payloads.read_torch(tmp_path / "cut.pt")


# ---------------------------------------------------------------------- turns


def rows(*values: int) -> npt.NDArray[np.int16]:
    """One layer, K = 2: row v is [v, v + 1]; -1 a placeholder."""
    return np.array([[[v, v + 1]] if v >= 0 else [[-1, -1]] for v in values], dtype=np.int16)


def test_the_later_turn_wins_the_boundary_row() -> None:
    """Turn 1 gives a stale row 2 for its last token; turn 2 forwards that token."""
    joined = join_segments([Segment(0, rows(1, 2, 9)), Segment(2, rows(3, 4))])
    assert joined[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_turns_without_a_boundary_row_join() -> None:
    joined = join_segments([Segment(0, rows(1, 2)), Segment(2, rows(3, 4))])
    assert joined[:, 0, 0].tolist() == [1, 2, 3, 4]


def test_cached_rows_of_a_later_turn_do_not_erase_routes() -> None:
    joined = join_segments([Segment(0, rows(1, 2, 3)), Segment(0, rows(-1, -1, -1, 4))])
    assert joined[:, 0, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        ([], "no segments"),
        ([Segment(0, rows(1)), Segment(3, rows(2))], "segment 1: starts at token 3, but routes end at token 1: a gap"),
        ([Segment(-1, rows(1))], "starts at -1"),
        ([Segment(0, rows(1, 2, 3)), Segment(2, rows(1)), Segment(1, rows(1))], "before segment 1 at 2"),
        ([Segment(0, rows(1)), Segment(1, np.zeros((1, 2, 2), dtype=int))], "segment 1: shape [1, 2, 2]"),
    ],
)
def test_turns_that_do_not_join(segments: list[Segment], words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        join_segments(segments)
    assert words in str(caught.value)


# ---------------------------------------------------------------------- ranks


def test_partial_rank_sets_are_refused() -> None:
    payloads.require_ranks([1, 0, 2], 3, "dumps")
    for ranks, words in (
        ([0, 2], "1 of 3 ranks are missing: 1"),
        ([0, 1], "missing: 2"),
        ([0, 0, 1, 2], "there twice"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            payloads.require_ranks(ranks, 3, "dumps")
    with pytest.raises(InvalidInputError, match="rank 3 is outside"):
        payloads.require_ranks([0, 1, 2, 3], 3, "dumps")


# ----------------------------------------------------------------- JSON Lines


def test_json_lines_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": ')
    lines = payloads.json_lines([path], progress=False)
    assert next(lines) == ("x.jsonl:1", {"a": 1})
    with pytest.raises(InvalidInputError, match=r"x\.jsonl:3 is not JSON"):
        next(lines)
    path.write_text("[1]\n")
    with pytest.raises(InvalidInputError, match=r"x\.jsonl:1 is a JSON list"):
        list(payloads.json_lines([path], progress=True))
    with pytest.raises(InvalidInputError, match="is no file"):
        list(payloads.json_lines([tmp_path / "absent"], progress=False))


def test_json_lines_hold_one_line_at_a_time(tmp_path: Path) -> None:
    """Nothing after a line is read before the line is used."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n' * 1000 + "no json\n")
    lines = payloads.json_lines([path], progress=False)
    assert [next(lines)[1]["a"] for _ in range(1000)] == [1] * 1000


@pytest.mark.parametrize(
    ("value", "length"),
    [
        ({"length": 5}, 5),
        ({"num_tokens": 6}, 6),
        ({"prompt_token_ids": [1, 2], "token_ids": [3]}, 3),
        ({"prompt_tokens": 4, "completion_tokens": 3}, 7),
    ],
)
def test_lengths_of_json_samples(value: dict[str, object], length: int) -> None:
    assert payloads.tokens_of(value, "x") == length


@pytest.mark.parametrize("value", [{}, {"length": 0}, {"length": 1.5}, {"length": True}, {"prompt_tokens": 4}])
def test_unknown_lengths_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match="x: "):
        payloads.tokens_of(value, "x")


# ----------------------------------------------------------- cells and dummies


def test_cells_hold_every_sample_once_in_its_cell() -> None:
    problem, plan = planted()
    cells = payloads.cells_of_plan(problem, plan)
    assert sorted(i for slot in cells for cell in slot for i in cell) == list(range(problem.num_samples))
    packing = payloads.packing_from_cells(problem, cells)
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)


def test_dummies_fill_empty_cells_and_even_out_counts() -> None:
    problem, plan = uneven()
    cells, added, notes = payloads.padded_cells(
        problem, plan, pad="dummy", target="x", allow_empty=False, equal_counts=True
    )
    assert cells == [[[0, 4], [3]], [[1, 2], [5]]]
    assert added == 1
    assert "loss weight 0" in notes[0]
    assert payloads.packing_from_cells(problem, cells, num_dummies=added) == plan.packing


def test_dummies_that_do_not_fit_are_refused() -> None:
    """One sample fills each cell of slot 1, so that slot 1 cannot get the second sample it lacks."""
    problem = Problem.from_arrays([10, 10, 9, 1, 10], capacity=10, ep_size=1, dp_size=2, num_rows=2, cost=LINEAR)
    plan = Plan.from_arrays(problem, [0, 1, 0, 0, 1], [1, 1, 0, 0, 0])
    assert violations(problem, plan) == []
    with pytest.raises(InvalidInputError, match=r"no room for a dummy in \(row 0, DP slot 1\): 10 of 10 tokens"):
        payloads.padded_cells(problem, plan, pad="dummy", target="x", allow_empty=False, equal_counts=True)


def test_unknown_pads_are_refused() -> None:
    problem, plan = uneven()
    with pytest.raises(InvalidInputError, match="pad is 'zeros'; it must be one of none, dummy"):
        payloads.padded_cells(problem, plan, pad="zeros", target="x", allow_empty=True, equal_counts=False)


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([[[0, 1, 2, 3]]], "sample 4 is in no microbatch"),
        ([[[0, 1, 2, 3, 4, 4]]], "sample 4 is in (row 0, DP rank 0) and again"),
        ([[[0, 1, 2, 3, 4, 9]]], "sample 9 is outside 0..4"),
        ([[[0, 1, 2, 3, 4]], [], []], "3 DP ranks; the problem has dp_size 2"),
    ],
)
def test_packings_that_are_none(cells: list[list[list[int]]], words: str) -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        payloads.packing_from_cells(problem, cells)
    assert words in str(caught.value)


def test_a_packing_above_the_capacity_is_imported_for_violations_to_list() -> None:
    problem, plan = uneven()
    packing = payloads.packing_from_cells(problem, [[[0, 1, 2, 3, 4]], []])
    found = violations(problem, Plan.of(problem, plan.placement, packing))
    assert found == ["cell (row 0, DP slot 0): 24 tokens in 5 samples are above the capacity 10"]


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("vllm", "[" * 100_000, "is not JSON"),
        ("vllm", '{"length": ' + "9" * 5000 + "}", "is not JSON"),
        ("vllm", '{"choices": null}', "x.jsonl:1: choices must be a list of objects"),
        ("vllm", '{"choices": [1]}', "choices must be a list of objects"),
        ("vllm", '{"length": 1' + "0" * 30 + ', "routed_experts": [[[0, 1]]]}', "above the limit 2147483647"),
        ("prime-rl", '{"segments": 3, "length": 2}', "segments must be a list"),
        ("nemo-rl", '{"routed_experts": "nrlre1:int8:0x9' + "0" * 30 + 'x1:", "length": 2}', "no shape of an array"),
        ("sglang", '{"meta_info": 3}', "meta_info is 3"),
        ("sglang", '{"segments": 3, "length": 2}', "segments must be a list"),
        ("sglang", '{"segments": [3], "length": 2}', "segment 0 must be an object"),
        ("sglang", '{"segments": [{"meta_info": 3}], "length": 2}', "segment 0 must be an object"),
    ],
)
def test_lines_that_are_no_samples_are_named(tmp_path: Path, name: str, line: str, words: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(line + "\n")
    options: dict[str, int] = {"num_layers": 1, "top_k": 2} if name == "sglang" else {}
    with pytest.raises(InvalidInputError, match=words):
        formats.read(name, [path], num_experts=4, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 10**30}, "num_experts is 1000000000000000000000000000000, above the limit"),
        ({"moe_layers": 1}, "moe_layers has 0 axes"),
        ({"moe_layers": "x"}, "moe_layers has dtype"),
        ({"moe_layers": [0.5]}, "moe_layers has dtype float64"),
        ({"check_distinct": "maybe"}, "check_distinct is 'maybe'"),
    ],
)
def test_options_of_the_wrong_kind_are_named(tmp_path: Path, options: dict[str, object], words: str) -> None:
    np.savez(tmp_path / "ids.npz", ids=np.array([[[0, 1]], [[2, 3]]]), offsets=np.array([0, 2]))
    (tmp_path / "ids.jsonl").write_text('{"length": 2, "routed_experts": [[[0, 1]], [[2, 3]]]}\n')
    for name, path in (("ids", "ids.npz"), ("vllm", "ids.jsonl")):
        with pytest.raises(InvalidInputError, match=words):
            formats.read(name, [tmp_path / path], **({"num_experts": 4} | options))  # type: ignore[arg-type]


def test_a_missing_option_and_a_path_for_a_list_are_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'sglang' needs the option top_k"):
        formats.read("sglang", [tmp_path / "x.jsonl"], num_experts=4)
    with pytest.raises(InvalidInputError, match="num_layers is 0; it must be an integer of at least 1"):
        sglang.decode([[[0, 1]]], num_layers=0, top_k=2)
    with pytest.raises(InvalidInputError, match="give a list of files"):
        formats.read("ids", str(tmp_path / "ids.npz"), num_experts=4)  # type: ignore[arg-type]
    np.savez(tmp_path / "v.npz", routed_experts=np.zeros((1, 2, 1, 2), dtype=int), lengths=np.array([np.nan]))
    with pytest.raises(InvalidInputError, match="lengths has dtype float64"):
        formats.read("verl", [tmp_path / "v.npz"], num_experts=4)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("trtllm", {"layer_updates_per_iter": "x"}, "layer_updates_per_iter is 'x'"),
        ("trtllm", {"moe_layers": 3}, "moe_layers has 0 axes"),
        ("megatron-placement", {"moe_layers": "x"}, "moe_layers has dtype"),
        ("vllm", {"moe_layers": [0, 1], "num_hidden_layers": "x"}, "num_hidden_layers is 'x'"),
    ],
)
def test_exporters_name_options_of_the_wrong_kind(
    tmp_path: Path, target: str, options: dict[str, object], words: str
) -> None:
    problem, plan = planted()
    with pytest.raises(InvalidInputError, match=words):
        formats.export(target, problem, plan, tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


IMPORTERS: dict[str, Any] = {
    "megatron": megatron.import_packing,
    "nemo-rl": nemo_rl.import_packing,
    "prime-rl": prime_rl.import_packing,
    "slime": grids.import_slime,
    "torchtitan": grids.import_torchtitan,
    "tunix": grids.import_tunix,
    "verl": lambda problem, content: verl.import_packing(
        problem, content["partitions"], content["micro_bsz_idx"], num_dummies=content["num_dummies"]
    ),
}
READ_KEYS: dict[str, tuple[str, ...]] = {
    "megatron": ("sample_id_groups", "num_dummies"),
    "nemo-rl": ("sorted_indices", "micro_batch_indices", "elem_counts_per_gb", "num_dummies"),
    "prime-rl": ("micro_batches", "num_dummies"),
    "slime": ("partitions", "micro_batch_indices", "num_dummies"),
    "torchtitan": ("grid",),
    "tunix": ("packs", "pack_size"),
    "verl": ("partitions", "micro_bsz_idx", "num_dummies"),
}


def spoilt(value: Any) -> list[Any]:
    """The value with its first entry at each depth replaced by things that cannot stand there."""
    strangers: list[Any] = [None, "x", 1.5, True, {}]
    if isinstance(value, list) and value:
        return [*strangers, *([entry, *value[1:]] for entry in spoilt(value[0])), 3]
    return [*strangers, [], [1]]


@pytest.mark.parametrize("name", list(IMPORTERS))
def test_what_is_no_packing_of_a_format_is_refused_at_every_depth(name: str, tmp_path: Path) -> None:
    problem, plan = planted()
    path = tmp_path / "export"
    formats.export(name, problem, plan, path)
    content = json.loads(path.read_text())
    assert evaluate(problem, Plan.of(problem, plan.placement, IMPORTERS[name](problem, content)))
    for key in READ_KEYS[name]:
        for value in spoilt(content.get(key, 0)):
            with pytest.raises(InvalidInputError):
                IMPORTERS[name](problem, copy.deepcopy(content) | {key: value})
    if name != "verl":
        for nothing in (None, [], "x", {}):
            with pytest.raises(InvalidInputError):
                IMPORTERS[name](problem, nothing)


def test_places_of_what_is_no_integer_are_named() -> None:
    assert payloads.listed(np.array([[1, 2]]), "x", depth=2) == [[1, 2]]
    assert payloads.listed([(np.int64(1),)], "x", depth=2) == [[1]]
    with pytest.raises(InvalidInputError, match=r"x\[1\]\[0\] is 1\.5; it must be an integer"):
        payloads.listed([[1], [1.5]], "x", depth=2)
    with pytest.raises(InvalidInputError, match=r"x\[0\] is 'ab'; it must be a list"):
        payloads.listed(["ab"], "x", depth=2)


@pytest.mark.parametrize("layers", [{"x": [0, 1]}, {"1": [0, 1], 1: [0, 1]}, {True: [0, 1]}, {"-1": [0, 1]}])
def test_layers_without_a_number_are_refused(layers: dict[object, list[int]]) -> None:
    with pytest.raises(InvalidInputError, match="layer numbers"):
        megatron.import_placement({"layers": layers}, ep_size=1)
    with pytest.raises(InvalidInputError, match="layer numbers"):
        trtllm.import_placement({"initial_global_assignments": layers}, ep_size=1)
