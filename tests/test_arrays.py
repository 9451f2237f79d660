from __future__ import annotations

import numpy as np
import pytest

from routepack_opt.arrays import integer_array, read_only
from routepack_opt.errors import Faults


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([True, False], "bool"),
        ([1.0, 2.0], "float64"),
        ([1.0, float("nan")], "sample 1 is nan"),
        ([1.0, float("inf")], "sample 1 is inf"),
        (["1", "2"], "must hold integers"),
        ([[1, 2]], "it must have 1"),
        ([[1], [1, 2]], "ragged"),
        (np.array([2**63], dtype=np.uint64), "above the int64 range"),
        ([None, 1], "must hold integers"),
        (float("nan"), "float64"),
        (3, "0 axes"),
        (np.ma.array([1, 2], mask=[0, 1]), "masked"),
    ],
)
def test_what_is_no_integer_is_refused(value: object, message: str) -> None:
    faults = Faults()
    assert integer_array(value, "x", faults, ndim=1) is None  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        faults.raise_if_any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_width_is_widened_exactly(dtype: type) -> None:
    largest = min(np.iinfo(dtype).max, np.iinfo(np.int64).max)
    faults = Faults()
    array = integer_array(np.array([0, largest], dtype=dtype), "x", faults, ndim=1)
    assert not faults
    assert array is not None
    assert array.dtype == np.int64
    assert array.tolist() == [0, largest]


def test_read_only_refuses_writes_and_leaves_the_original() -> None:
    original = np.arange(3)
    view = read_only(original)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 5
    original[0] = 7
    assert view[0] == 7


def test_result_does_not_alias_its_input() -> None:
    original = np.arange(3)
    array = integer_array(original, "x", Faults(), ndim=1)
    assert array is not None
    original[0] = 9
    assert array[0] == 0
