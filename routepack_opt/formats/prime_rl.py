"""prime-rl: routed experts as raw bytes in, micro-batches per worker out, and back.

A payload is ``{"data", "shape": [seq, layers, K], "dtype", "start"}``, ``data`` bytes or
base64 of uint8 or uint16 numbers; padding rows are zero bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy.typing as npt

from routepack_opt import files
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats.payloads import (
    AnyArray,
    Export,
    Recording,
    Segment,
    array_of_bytes,
    decode_base64,
    encode_base64,
    integer_ids,
    json_lines,
    json_samples,
    loss_fields,
    num_dummies_of,
    packing_from_cells,
    padded_cells,
    read_samples,
    require_keys,
)
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem

__all__ = ["decode", "encode", "export", "import_packing", "read_files"]

_DTYPES: Final = ("uint8", "uint16", "int8", "int16", "int32", "int64")


def decode(payload: Any, what: str = "routed_experts") -> AnyArray:
    """Ids [seq, layers, K] of a payload.

    Raises
    ------
    InvalidInputError
        If a field is missing or the bytes are not those the shape announces.
    """
    return _decoded(payload, what).ids


def _decoded(payload: Any, what: str) -> Segment:
    fields: dict[str, Any]
    if not isinstance(payload, Mapping):
        fields = {name: getattr(payload, name, None) for name in ("data", "shape", "dtype", "start")}
    else:
        fields = dict(payload)
    missing = [name for name in ("data", "shape", "dtype") if fields.get(name) is None]
    if missing:
        raise InvalidInputError([f"{what}: {name} is missing" for name in missing])
    if fields["dtype"] not in _DTYPES:
        raise InvalidInputError(f"{what}: dtype is {fields['dtype']!r}; it must be one of {', '.join(_DTYPES)}")
    try:
        shape = tuple(int(n) for n in fields["shape"])
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{what}: shape is {fields['shape']!r}") from error
    if len(shape) != 3 or min(shape) < 0:
        raise InvalidInputError(f"{what}: shape is {list(shape)}; [seq, layers, K] was expected")
    data = fields["data"] if isinstance(fields["data"], bytes) else decode_base64(fields["data"], what)
    ids = array_of_bytes(data, fields["dtype"], shape, what, shown=str(list(shape)))
    start = fields.get("start") or 0
    if isinstance(start, bool) or not isinstance(start, int) or start < 0:
        raise InvalidInputError(f"{what}: start is {start!r}; it must be an integer of at least 0")
    return Segment(start, ids)


def encode(ids: npt.ArrayLike, *, num_experts: int, start: int = 0) -> dict[str, Any]:
    """Payload of ids [seq, layers, K]: uint8 for E ≤ 256, uint16 above.

    Raises
    ------
    InvalidInputError
        If an id is outside 0..E-1; this format has no place for a missing route.
    """
    array = integer_ids(ids, "ids")
    if num_experts > 65_536:
        raise InvalidInputError(f"num_experts is {num_experts}; uint16 holds 65536")
    if array.size and (array.min() < 0 or array.max() >= num_experts):
        raise InvalidInputError(f"ids are outside 0..{num_experts - 1}: {array.min()}..{array.max()}")
    name = "uint8" if num_experts <= 256 else "uint16"
    return {"data": encode_base64(array, name), "shape": list(array.shape), "start": start, "dtype": name}


def _with_starts(lines: Iterator[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give segments their payload's own start."""
    for where, value in lines:
        segments = value.get("segments")
        for part in segments if isinstance(segments, list) else []:
            if isinstance(part, dict) and isinstance(part.get("routed_experts"), dict):
                part.setdefault("start", part["routed_experts"].get("start", 0))
        yield where, value


def read_files(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
    progress: bool = False,
) -> Recording:
    """Stream JSON Lines of one object per sample: ``routed_experts`` (a payload) or ``segments``, and its length.

    Parameters
    ----------
    paths : sequence of path-like
    num_experts, moe_layers, physical_to_logical, uncovered, check_distinct
        As for :func:`routepack_opt.formats.vllm.read_outputs`.
    progress : bool
        Show a bar.

    Returns
    -------
    Recording
    """
    return read_samples(
        json_samples(_with_starts(json_lines(paths, progress=progress)), decode),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def export(problem: Problem, plan: Plan, *, pad: str = "none") -> Export:
    """Packing as micro-batches per worker.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
        ``dummy`` puts one-token dummies (ids N and up, zero loss) into empty micro-batches.

    Returns
    -------
    Export
        ``micro_batches`` [D][R] of sample ids; all workers have R of them.

    Raises
    ------
    InvalidInputError
        If a micro-batch is empty and ``pad`` is ``none``.
    """
    cells, num_dummies, notes = padded_cells(
        problem, plan, pad=pad, target="prime-rl", allow_empty=False, equal_counts=False
    )
    content = {
        "micro_batches": cells,
        "seq_len": problem.capacity,
        "num_dummies": num_dummies,
        **loss_fields(problem),
    }
    return Export("prime-rl", content, notes)


def import_packing(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn micro-batches [worker][k] of sample ids into a packing that can be scored.

    Raises
    ------
    InvalidInputError
        If ``micro_batches`` is missing, or samples are missing, repeated or unknown.
    """
    require_keys(content, ["micro_batches"], "prime-rl packing")
    return packing_from_cells(
        problem, content["micro_batches"], num_dummies=num_dummies_of(content), what="micro_batches"
    )
