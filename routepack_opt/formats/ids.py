"""Plain arrays: an ``.npz`` of routed ids and offsets, for recordings that come from no framework listed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.counting import count_routing
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats.payloads import Recording, recording

__all__ = ["read_files", "write_ids"]


def read_files(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int,
    uncovered: str = "refuse",
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    check_distinct: bool = False,
) -> Recording:
    """Read one ``.npz`` with ``ids`` [T, layers, K] and ``offsets`` [N + 1].

    Optional arrays: ``lengths`` [N] (default: rows), ``valid`` bool [T], ``group_ids`` [N],
    ``sample_ids`` str [N].

    Parameters
    ----------
    paths : sequence of path-like
        One file.
    num_experts, uncovered, moe_layers, physical_to_logical, check_distinct
        As in :func:`routepack_opt.counting.count_routing`.

    Returns
    -------
    Recording
    """
    if len(paths) != 1:
        raise InvalidInputError(f"{len(paths)} files are given; ids are read from one")
    arrays = files.read_npz(
        paths[0],
        what="routed ids",
        required=("ids", "offsets"),
        optional=("lengths", "valid", "group_ids", "sample_ids"),
    )
    names = None if "sample_ids" not in arrays else [str(name) for name in arrays["sample_ids"].tolist()]
    counts = count_routing(
        arrays["ids"],
        arrays["offsets"],
        num_experts=num_experts,
        lengths=arrays.get("lengths"),
        valid=arrays.get("valid"),
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
        sample_ids=names,
    )
    groups = [] if "group_ids" not in arrays else [str(group) for group in arrays["group_ids"].tolist()]
    if groups and len(groups) != len(counts.lengths):
        raise InvalidInputError(f"group_ids has {len(groups)} entries for {len(counts.lengths)} samples")
    return recording(counts, groups)


def write_ids(
    path: files.PathLike,
    ids: npt.NDArray[np.integer[Any]],
    offsets: npt.ArrayLike,
    *,
    lengths: npt.ArrayLike | None = None,
) -> None:
    """Write what :func:`read_files` reads.

    Parameters
    ----------
    path : path-like
        Ends in ``.npz``.
    ids : ndarray of int, shape [T, layers, K]
    offsets : array-like of int, shape [N + 1]
    lengths : array-like of int, shape [N], optional
    """
    arrays = {"ids": np.asarray(ids), "offsets": np.asarray(offsets, dtype=np.int64)}
    if lengths is not None:
        arrays["lengths"] = np.asarray(lengths, dtype=np.int64)
    files.write_npz(path, arrays)
