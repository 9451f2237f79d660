"""Counting routed ids: exact sums, masked placeholders, refused nonsense."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.counting import RoutingCounter, count_routing
from routepack_opt.errors import InvalidInputError

Ids = npt.NDArray[np.int64]


def draw(rng: np.random.Generator, rows: int, layers: int, experts: int, top_k: int) -> Ids:
    """Distinct ids per row and layer."""
    order = np.argsort(rng.random((rows, layers, experts)), axis=2)
    return order[:, :, :top_k].astype(np.int64)


def naive(ids: Ids, offsets: npt.NDArray[np.int64], experts: int) -> Ids:
    """One addition per id."""
    counts = np.zeros((len(offsets) - 1, ids.shape[1], experts), dtype=np.int64)
    for i in range(len(offsets) - 1):
        for row in ids[offsets[i] : offsets[i + 1]]:
            for layer, chosen in enumerate(row):
                for expert in chosen:
                    counts[i, layer, expert] += 1
    return counts


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("top_k", [1, 3, 4, 8])
def test_counts_equal_one_addition_per_id(dtype: type[np.integer], top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    ids = draw(rng, 40, 5, 16, top_k)
    offsets = np.array([0, 7, 8, 40])
    result = count_routing(ids.astype(dtype), offsets, num_experts=16)
    assert (result.counts == naive(ids, offsets, 16)).all()
    assert result.counts.dtype == np.uint16
    assert result.routed_tokens.tolist() == [7, 1, 32]
    assert result.top_k == top_k
    assert not result.counts.flags.writeable


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    layers=st.integers(1, 4),
    experts=st.integers(6, 40),
    top_k=st.integers(2, 5),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_permuting_samples_or_relabelling_experts_permutes_the_counts(
    seed: int, layers: int, experts: int, top_k: int, rows: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    parts = [draw(rng, n, layers, experts, top_k).astype(np.int16) for n in rows]
    offsets = np.concatenate([[0], np.cumsum(rows)])
    base = count_routing(np.concatenate(parts), offsets, num_experts=experts, sentinels=("negative",)).counts
    order = rng.permutation(len(parts))
    moved = np.concatenate([[0], np.cumsum([rows[i] for i in order])])
    shuffled = np.concatenate([parts[i] for i in order])
    assert (count_routing(shuffled, moved, num_experts=experts).counts == base[order]).all()
    relabel = rng.permutation(experts)
    relabelled = count_routing(relabel[np.concatenate(parts)].astype(np.uint8), offsets, num_experts=experts).counts
    assert (relabelled[:, :, relabel] == base).all()
    assert (base.sum(axis=2) == top_k * np.array(rows)[:, None]).all()


def test_histogram_does_not_overflow_uint16() -> None:
    """70,000 rows of the same pair: each expert is counted 70,000 times."""
    ids = np.zeros((70_000, 1, 2), dtype=np.int16)
    ids[:, 0, 0] = 3
    ids[:, 0, 1] = 1
    result = count_routing(ids, num_experts=4)
    assert result.counts[0, 0].tolist() == [0, 70_000, 0, 70_000]
    assert result.counts.dtype == np.uint32


def test_flush_inside_a_sample_keeps_every_id() -> None:
    """More rows than 65535 // K between two flushes, on the packed path."""
    rng = np.random.default_rng(0)
    one = draw(rng, 1, 2, 16, 8)
    ids = np.repeat(one, 20_000, axis=0).astype(np.int16)
    counts = count_routing(ids, num_experts=16).counts
    assert (counts == 20_000 * naive(one, np.array([0, 1]), 16)).all()


def test_stream_equals_batch() -> None:
    rng = np.random.default_rng(1)
    parts = [draw(rng, n, 3, 32, 4).astype(np.int32) for n in (3, 9, 1)]
    counter = RoutingCounter(num_experts=32)
    for i, part in enumerate(parts):
        counter.add(part, length=len(part) + 1, sample_id=f"s{i}")
    stream = counter.finish()
    batch = count_routing(
        np.concatenate(parts), [0, 3, 12, 13], num_experts=32, lengths=[4, 10, 2], sample_ids=["s0", "s1", "s2"]
    )
    assert (stream.counts == batch.counts).all()
    assert stream.lengths.tolist() == [4, 10, 2]
    assert stream.routed_tokens.tolist() == batch.routed_tokens.tolist() == [3, 9, 1]
    assert stream.coverage.to_dict() == batch.coverage.to_dict()
    assert counter.num_samples == 3


# --------------------------------------------------------------- placeholders


def placeholder(kind: str, rows: int, layers: int, top_k: int) -> Ids:
    if kind == "negative":
        return np.full((rows, layers, top_k), -1)
    if kind == "zero":
        return np.zeros((rows, layers, top_k), dtype=np.int64)
    return np.broadcast_to(np.arange(top_k), (rows, layers, top_k)).copy()


@pytest.mark.parametrize("kind", ["negative", "zero", "arange"])
@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_placeholder_rows_are_masked_and_counted(kind: str, dtype: type[np.integer]) -> None:
    rng = np.random.default_rng(2)
    real = draw(rng, 6, 4, 16, 4)
    ids = np.concatenate([real[:2], placeholder(kind, 1, 4, 4), real[2:], placeholder(kind, 2, 4, 4)]).astype(dtype)
    result = count_routing(ids, num_experts=16, lengths=[8], uncovered="ignore")
    assert (result.counts[0] == naive(real, np.array([0, 6]), 16)[0]).all()
    coverage = result.coverage
    assert coverage.rows_present.tolist() == [9]
    assert coverage.rows_read.tolist() == [[6] * 4]
    assert coverage.rows_expected.tolist() == [7]
    assert coverage.rows_missing.tolist() == [[1] * 4]
    assert coverage.rows_padded.tolist() == [2]
    by_kind = {
        "negative": coverage.rows_negative,
        "zero": coverage.rows_zero,
        "arange": coverage.rows_arange,
    }
    assert {name: rows.tolist() for name, rows in by_kind.items()} == {
        name: [3 if name == kind else 0] for name in by_kind
    }
    assert result.routed_tokens.tolist() == [6]
    assert "1 missing" in str(coverage)


def test_zero_rows_are_routes_when_top_k_is_one() -> None:
    result = count_routing(np.zeros((5, 3, 1), dtype=np.int16), num_experts=4)
    assert result.counts[0, :, 0].tolist() == [5, 5, 5]


def test_short_arange_rows_are_routes() -> None:
    """One layer of two experts: [0, 1] is an ordinary route."""
    ids = np.array([[[0, 1]], [[1, 0]], [[0, 1]]])
    assert count_routing(ids, num_experts=2).counts[0, 0].tolist() == [3, 3]


def test_arange_rows_are_counted_when_not_masked() -> None:
    ids = placeholder("arange", 3, 6, 8)
    counts = count_routing(ids, num_experts=16, sentinels=("negative", "zero")).counts
    assert counts[0, :, :8].tolist() == [[3] * 8] * 6


@pytest.mark.parametrize(("kind", "words"), [("negative", "row of -1"), ("zero", "row of zeros")])
def test_placeholders_that_are_not_masked_are_refused(kind: str, words: str) -> None:
    ids = np.concatenate([draw(np.random.default_rng(0), 2, 2, 8, 2), placeholder(kind, 1, 2, 2)])
    with pytest.raises(InvalidInputError, match=rf"sample 0, row 2.*{words}"):
        count_routing(ids, num_experts=8, sentinels=())


def test_rows_marked_invalid_are_not_read() -> None:
    rng = np.random.default_rng(3)
    real = draw(rng, 5, 2, 8, 2)
    ids = np.concatenate([np.full((2, 2, 2), 99), real])
    result = count_routing(ids, num_experts=8, valid=np.arange(7) >= 2)
    assert (result.counts == naive(real, np.array([0, 5]), 8)).all()
    assert result.coverage.rows_present.tolist() == [5]
    assert result.lengths.tolist() == [5]


# -------------------------------------------------------------------- refusals


def refused(ids: npt.ArrayLike, **options: object) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        count_routing(ids, **{"num_experts": 8, **options})  # type: ignore[arg-type]
    return caught.value


def good(rows: int = 3, layers: int = 2, experts: int = 8, top_k: int = 3) -> Ids:
    return draw(np.random.default_rng(5), rows, layers, experts, top_k)


def test_id_out_of_range_names_sample_row_layer_and_value() -> None:
    ids = good()
    ids[2, 1, 1] = 8
    error = refused(ids, sample_ids=["prompt-7"])
    assert error.faults == ("sample 0 (prompt-7), row 2, layer 1: id 8 is outside the experts 0..7",)


def test_minus_one_in_part_of_a_row() -> None:
    ids = good()
    ids[1, 0, 2] = -1
    assert "row 1, layer 0: 1 of 3 ids are -1" in refused(ids.astype(np.int16)).faults[0]


def test_other_negative_ids_are_out_of_range() -> None:
    ids = good()
    ids[0, 0, :] = -2
    assert "id -2 is outside" in refused(ids.astype(np.int32)).faults[0]


@pytest.mark.parametrize("value", [2**31, 2**40, -(2**40)])
def test_ids_beyond_32_bits_are_out_of_range(value: int) -> None:
    ids = good()
    ids[1, 1, 0] = value
    assert f"layer 1: id {value} is outside the experts 0..7" in refused(ids).faults[0]


def test_minus_one_cast_to_uint8() -> None:
    """255 is out of range for 64 experts and a valid id for 256, where K equal ids give it away."""
    ids = draw(np.random.default_rng(6), 4, 2, 64, 3)
    ids[3] = 255
    few = refused(ids.astype(np.uint8), num_experts=64)
    assert "id 255 is outside the experts 0..63 (-1 cast to uint8?)" in few.faults[0]
    many = refused(ids.astype(np.uint8), num_experts=256)
    assert "row 3, layer 0: all 3 ids are 255 (-1 cast to uint8?)" in many.faults[0]


def test_int8_cannot_hide_minus_one_when_experts_exceed_its_range() -> None:
    ids = np.array([[[3, 5]], [[-1, -1]]], dtype=np.int8)
    result = count_routing(ids, num_experts=256)
    assert result.counts.sum() == 2
    assert result.coverage.rows_negative.tolist() == [1]


def test_more_than_256_experts_need_wider_ids() -> None:
    """E = 257: id 256 counts in uint16."""
    ids = np.array([[[256, 3]]], dtype=np.uint16)
    assert count_routing(ids, num_experts=257).counts[0, 0, 256] == 1


@pytest.mark.parametrize("top_k", [2, 3, 4, 8])
def test_k_equal_ids_are_refused(top_k: int) -> None:
    ids = draw(np.random.default_rng(7), 5, 3, 16, top_k).astype(np.int16)
    ids[4, 2] = 9
    assert refused(ids, num_experts=16).faults == (
        f"sample 0, row 4, layer 2: all {top_k} ids are 9, which no top-{top_k} router can give",
    )


def test_dense_layer_of_zeros_names_the_option() -> None:
    ids = good()
    ids[:, 0] = 0
    error = refused(ids)
    assert len(error.faults) == 3
    assert "a dense layer is left out with moe_layers" in error.faults[0]
    assert (count_routing(ids, num_experts=8, moe_layers=[1]).counts == naive(ids[:, 1:], np.array([0, 3]), 8)).all()


def test_repeated_ids_beyond_the_first_two_need_the_full_check() -> None:
    ids = np.array([[[1, 2, 2, 3]], [[4, 5, 6, 7]]], dtype=np.int16)
    assert count_routing(ids, num_experts=8).counts[0, 0, 2] == 2
    assert "id 2 is repeated" in refused(ids, check_distinct=True).faults[0]
    assert "id 1 is repeated" in refused(ids[:, :, [0, 0, 1, 3]]).faults[0]


def test_expert_counted_more_often_than_rows() -> None:
    ids = np.array([[[1, 2, 2]]] * 3, dtype=np.int16)
    assert "expert 2 is counted more often than there are rows" in refused(ids).faults[0]


def test_every_fault_is_reported_at_once() -> None:
    ids = good(rows=6)
    ids[0, 0, 0] = 99
    ids[3, 1] = 5
    ids[5, 0, 1] = -1
    faults = refused(ids).faults
    assert len(faults) == 3
    assert [fault.split(",")[1] for fault in faults] == [" row 0", " row 3", " row 5"]


def test_long_lists_of_faults_are_counted() -> None:
    error = refused(np.full((40, 1, 3), 77))
    assert len(error.faults) == 17
    assert error.faults[-1] == "... and 24 more"


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        (np.zeros((2, 2)), {}, "dtype float64"),
        (np.zeros((2, 2), dtype=int), {}, "must be [rows, layers, K]"),
        (np.zeros((2, 2, 2), dtype=bool), {}, "dtype bool"),
        (np.zeros((2, 0, 2), dtype=int), {}, "at least one layer"),
        (good(), {"num_experts": 0}, "num_experts is 0"),
        (good(), {"num_experts": 2}, "K = 3 experts a token, above num_experts = 2"),
        (good(), {"offsets": [0, 2]}, "offsets must run from 0 to the 3 rows"),
        (good(), {"offsets": [0, 2, 1, 3]}, "offsets fall from 2 to 1 at sample 1"),
        (good(), {"lengths": [3, 3]}, "lengths has 2 entries for 1 samples"),
        (good(), {"lengths": [2]}, "3 rows with routes for 2 tokens"),
        (good(), {"valid": [1, 1, 1]}, "valid must be bool [3]"),
        (good(), {"moe_layers": [0, 2]}, "moe_layers names layer 2; the ids have layers 0..1"),
        (good(), {"moe_layers": [1, 1]}, "names a layer twice"),
        (good(), {"moe_layers": []}, "moe_layers is empty"),
        (good(), {"uncovered": "guess"}, "uncovered is 'guess'"),
        (good(), {"sentinels": ["nil"]}, "unknown kind of placeholder row 'nil'"),
        (good(), {"sample_ids": ["a", "b"]}, "sample_ids has 2 entries"),
        (good(), {"physical_to_logical": [[0] * 8]}, "has 1 layers for 2 MoE layers"),
        (good(), {"physical_to_logical": [[8] * 8] * 2}, "expert 8 is outside 0..7"),
    ],
)
def test_bad_arguments(ids: npt.ArrayLike, options: dict[str, object], words: str) -> None:
    assert words in str(refused(ids, **options))


# ---------------------------------------------------------- layers and mapping


@pytest.mark.parametrize("layers", [[0, 2], [1, 2], [3, 1]])
@pytest.mark.parametrize("top_k", [2, 4])
def test_moe_layers_select_positions_in_the_given_order(layers: list[int], top_k: int) -> None:
    ids = draw(np.random.default_rng(8), 7, 4, 16, top_k).astype(np.int16)
    other = np.setdiff1d(np.arange(4), layers)
    ids[:, other] = 0
    result = count_routing(ids, num_experts=16, moe_layers=layers)
    assert (result.counts == naive(ids[:, layers].astype(np.int64), np.array([0, 7]), 16)).all()
    ids[3, layers[0], 0] = 16
    assert f"row 3, layer {layers[0]}:" in refused(ids, num_experts=16, moe_layers=layers).faults[0]


def test_physical_ids_are_mapped_and_replicas_added() -> None:
    physical = np.array([[[0, 5]], [[4, 1]], [[5, 4]]], dtype=np.int16)
    mapping = [[2, 0, 1, 3, 2, 1]]
    counts = count_routing(physical, num_experts=4, physical_to_logical=mapping).counts
    assert counts[0, 0].tolist() == [1, 2, 3, 0]


def test_ids_in_unused_physical_slots_are_refused() -> None:
    error = refused(np.array([[[0, 2]]]), num_experts=2, physical_to_logical=[[0, 1, -1]])
    assert "tokens went to physical slot 2, which physical_to_logical leaves unused" in error.faults[0]


# ------------------------------------------------------------ uncovered tokens


def test_one_missing_last_token_is_usual_and_two_are_refused() -> None:
    ids = good(rows=5)
    assert count_routing(ids, num_experts=8, lengths=[6]).routed_tokens.tolist() == [5]
    error = refused(ids, lengths=[7])
    assert "2 of 7 tokens have no route" in error.faults[0]
    assert "uncovered='scale' or 'ignore'" in error.faults[0]


def test_ignore_keeps_the_counts_and_says_what_they_cover() -> None:
    ids = good(rows=5)
    result = count_routing(ids, num_experts=8, lengths=[50], uncovered="ignore")
    assert result.routed_tokens.tolist() == [5]
    assert result.coverage.uncovered == "ignore"
    assert result.coverage.fraction == pytest.approx(5 / 49)
    assert result.counts.sum() == 5 * 2 * 3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 12), extra=st.integers(0, 100_000))
def test_scaling_is_exact_and_nearest(seed: int, rows: int, extra: int) -> None:
    ids = draw(np.random.default_rng(seed), rows, 3, 7, 2)
    length = rows + extra
    plain = naive(ids, np.array([0, rows]), 7)[0]
    result = count_routing(ids, num_experts=7, lengths=[length], uncovered="scale", sentinels=("negative",))
    scaled = result.counts[0].astype(np.int64)
    assert (scaled.sum(axis=1) == 2 * length).all()
    assert (np.abs(scaled * rows - plain * length) < rows).all()
    assert scaled.max() <= length
    assert result.routed_tokens.tolist() == [length]


def test_scaling_breaks_ties_towards_the_lower_expert() -> None:
    ids = np.array([[[0, 1]], [[2, 3]]])
    counts = count_routing(ids, num_experts=4, lengths=[3], uncovered="scale").counts
    assert counts[0, 0].tolist() == [2, 2, 1, 1]


def test_layers_that_cover_different_tokens() -> None:
    ids = good(rows=4)
    ids[2, 1] = -1
    assert "layer 1 has 3 routes, layer 0 has 4" in refused(ids).faults[0]
    result = count_routing(ids, num_experts=8, uncovered="scale")
    assert result.coverage.rows_read.tolist() == [[4, 3]]
    assert result.coverage.rows_missing.tolist() == [[0, 1]]
    assert (result.counts.sum(axis=2) == 12).all()


@pytest.mark.parametrize("uncovered", ["refuse", "scale", "ignore"])
def test_a_sample_without_any_route_is_refused(uncovered: str) -> None:
    ids = np.concatenate([good(), placeholder("negative", 2, 2, 3)])
    error = refused(ids, offsets=[0, 3, 5], uncovered=uncovered)
    assert any("sample 1: no route at all in layer 0 (2 rows, none usable)" in fault for fault in error.faults)


# --------------------------------------------------------------------- counter


def test_counter_names_the_sample_and_stays_usable() -> None:
    counter = RoutingCounter(num_experts=8)
    counter.add(good(), length=3, sample_id="a")
    with pytest.raises(InvalidInputError, match=r"sample 1 \(b\).*id 8 is outside"):
        counter.add(np.full((1, 2, 3), 8), length=1, sample_id="b")
    with pytest.raises(InvalidInputError, match="1 layers and top-2; the samples before it have 2 layers and top-3"):
        counter.add(np.array([[[0, 1]]]), length=1)
    with pytest.raises(InvalidInputError, match="length 0"):
        counter.add(good(), length=0)
    assert counter.finish().counts.shape == (1, 2, 8)


def test_empty_counter_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="no sample was added"):
        RoutingCounter(num_experts=8).finish()


# --------------------------------------------------------------- recorded data


@pytest.mark.skipif("ROUTEPACK_DATA" not in os.environ, reason="ROUTEPACK_DATA is not set: no recorded routing")
def test_recorded_ids_of_gpt_oss_reproduce_the_recorded_counts() -> None:
    folder = Path(os.environ["ROUTEPACK_DATA"]) / "routing_gptoss20b_per_sample"
    with np.load(folder / "tokens_64samples.npz") as ids, np.load(folder / "counts.npz") as counts:
        result = count_routing(ids["ids"], ids["offsets"], num_experts=32)
        assert (result.counts == counts["a"][ids["sample"]]).all()
    assert result.coverage.fraction == 1.0
