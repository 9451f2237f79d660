from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routepack_opt.batch import RoutingBatch
from routepack_opt.errors import InvalidInputError

LENGTHS = [3, 5]
COUNTS = np.array([[[3, 2, 1, 0], [1, 1, 2, 2]], [[5, 0, 5, 0], [2, 3, 3, 2]]])


def make(**changes: Any) -> RoutingBatch:
    values: dict[str, Any] = {"lengths": LENGTHS, "counts": COUNTS, "top_k": 2}
    values |= changes
    return RoutingBatch.from_arrays(values.pop("lengths"), values.pop("counts"), **values)


def test_sizes_and_loads() -> None:
    batch = make()
    assert (batch.num_samples, batch.num_layers, batch.num_experts, batch.top_k) == (2, 2, 4, 2)
    assert batch.expert_load().tolist() == [[8, 2, 6, 0], [3, 4, 5, 4]]
    assert batch.routed_tokens.tolist() == LENGTHS
    assert "N 2" in repr(batch)
    with pytest.raises(ValueError, match="read-only"):
        batch.counts[0, 0, 0] = 1


def test_top_k_and_routed_tokens_are_read_off_the_counts() -> None:
    assert make(top_k=None).top_k == 2
    last_not_forwarded = make(lengths=[4, 6])
    assert last_not_forwarded.routed_tokens.tolist() == [3, 5]
    assert make(lengths=[4, 6], top_k=None, routed_tokens=[3, 5]).top_k == 2


def test_unsigned_counts_are_not_copied() -> None:
    counts = COUNTS.astype(np.uint16)
    assert np.shares_memory(make(counts=counts).counts, counts)
    assert make(counts=COUNTS).counts.dtype == np.uint16


def test_without_routing() -> None:
    batch = make(counts=None, top_k=None)
    assert (batch.num_layers, batch.num_experts, batch.top_k) == (0, 0, 0)
    assert "no routing" in repr(batch)
    assert batch.take([1]).lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [], "counts": None, "top_k": None}, "N = 0"),
        ({"lengths": [0, 5]}, "sample 0: length 0"),
        ({"lengths": [3, -5]}, "sample 1: length -5"),
        ({"lengths": [3, 2**31]}, "above the limit"),
        ({"lengths": [3.0, 5.0]}, "must hold integers"),
        ({"lengths": [float("nan"), 5.0]}, "sample 0 is nan"),
        ({"lengths": [True, True]}, "bool"),
        ({"counts": COUNTS.astype(float)}, "counts has dtype float64"),
        ({"counts": COUNTS > 2}, "counts has dtype bool"),
        ({"counts": COUNTS[:1]}, "counts has 1 samples"),
        ({"counts": COUNTS[0]}, r"must be \[N, L, E\]"),
        ({"counts": COUNTS[:, :0]}, "no layers"),
        ({"counts": COUNTS - 1}, "negative"),
        ({"counts": COUNTS + 2**31}, "above the limit"),
        ({"counts": COUNTS + np.eye(4, dtype=int)[0]}, "sample 0, layer 0: counts sum to 7"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 5, "routed_tokens": LENGTHS}, "above the 4 experts"),
        ({"top_k": None, "lengths": [7, 5]}, "cannot be read off"),
        ({"routed_tokens": [3, 6]}, "sample 1: 6 routed tokens"),
        ({"routed_tokens": [0, 5]}, "sample 0: 0 routed tokens"),
        ({"routed_tokens": [3]}, "routed_tokens has 1 entries"),
        ({"sample_ids": ["a"]}, "sample_ids has 1"),
        ({"sample_ids": ["a", "a"]}, "repeats 'a'"),
        ({"group_ids": [1]}, "group_ids has 1"),
        ({"uncovered": "drop"}, "uncovered is 'drop'"),
        ({"counts": None}, "top_k is given without counts"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        make(**changes)


def test_one_expert_above_the_routed_tokens_is_refused() -> None:
    counts = COUNTS.copy()
    counts[0, 0] = [4, 2, 0, 0]  # sums to 6 = 2 x 3, but no token goes to an expert twice
    with pytest.raises(InvalidInputError, match="one expert has 4 tokens, above the 3 routed"):
        make(counts=counts)


def test_all_faults_at_once_with_sample_names() -> None:
    with pytest.raises(InvalidInputError) as caught:
        make(lengths=[0, -1], sample_ids=["p/0", "p/1"], group_ids=[1.5, 2.0])
    assert len(caught.value.faults) == 3
    assert "sample 1 (p/1)" in str(caught.value)


def test_take_keeps_names_and_refuses_bad_indices() -> None:
    batch = make(sample_ids=["a", "b"], group_ids=[7, 8])
    part = batch.take([1])
    assert part.sample_ids == ("b",)
    assert part.group_ids is not None
    assert part.group_ids.tolist() == [8]
    with pytest.raises(InvalidInputError) as caught:
        batch.take([0, 0, 2])
    assert len(caught.value.faults) == 2


def test_construction_without_validation_is_refused() -> None:
    with pytest.raises(TypeError, match="from_arrays"):
        RoutingBatch(np.array([1]), COUNTS.astype(np.uint16), np.array([1]), 2)
