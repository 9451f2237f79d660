"""Integer arrays checked once and frozen: no rounding, no silent widening of booleans or floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt.errors import Faults

__all__ = ["IntArray", "integer_array", "plain_array", "read_only"]

IntArray = npt.NDArray[np.int64]


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a read-only view of an array."""
    view = array.view()
    view.setflags(write=False)
    return view


def plain_array(value: npt.ArrayLike, name: str, faults: Faults) -> npt.NDArray[Any] | None:
    """Convert to an array of numbers in the machine's byte order; what is ragged or masked is a fault."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        faults.add(f"{name} has masked entries; fill them or leave them out")
        return None
    try:
        array = np.asarray(value)
    except ValueError as error:
        faults.add(f"{name} is ragged: {error}")
        return None
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def integer_array(
    value: npt.ArrayLike, name: str, faults: Faults, *, ndim: int, element: str = "sample"
) -> IntArray | None:
    """Convert to int64 without ever rounding; faults name the elements that are no integers.

    Parameters
    ----------
    value : array-like
        Integers of any width. Booleans, floats (NaN among them), strings and
        objects are refused.
    name : str
        Name of the array in messages.
    faults : Faults
        Where faults are recorded.
    ndim : int
        Required number of axes.
    element : str
        What one entry of the first axis is called in messages.

    Returns
    -------
    ndarray of int64 or None
        A fresh array, or None if a fault was recorded.
    """
    found = plain_array(value, name, faults)
    if found is None:
        return None
    array = found
    if array.dtype == np.bool_:
        faults.add(f"{name} has dtype bool; it must hold integers")
        return None
    if array.dtype.kind not in "iu":
        if array.size == 0 and array.dtype.kind == "f":
            array = array.astype(np.int64)
        else:
            where = ""
            if array.dtype.kind == "f" and array.ndim:
                bad = np.argwhere(~np.isfinite(array))
                if len(bad):
                    where = f"; {element} {int(bad[0][0])} is {array[tuple(bad[0])]}"
            faults.add(f"{name} has dtype {array.dtype}; it must hold integers{where}")
            return None
    if array.ndim != ndim:
        faults.add(f"{name} has {array.ndim} axes, shape {array.shape}; it must have {ndim}")
        return None
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and array.size and array.max() > np.iinfo(np.int64).max:
        first = int(np.argmax(array.reshape(array.shape[0], -1).max(axis=1) > np.iinfo(np.int64).max))
        faults.add(f"{name}: {element} {first} holds a value above the int64 range")
        return None
    return np.array(array, dtype=np.int64)
