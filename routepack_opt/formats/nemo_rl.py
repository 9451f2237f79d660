"""NeMo-RL: routed experts in text envelopes in, shards of a batched dict out, and back.

An envelope is ``nrlre1:<dtype>:<S>x<L>x<K>:<base64>``, dtype int8, int16 or int32; -1
rows have no route, and a last row 0, 1, ..., K-1 is padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.payloads import (
    AnyArray,
    Export,
    Recording,
    array_of_bytes,
    decode_base64,
    encode_base64,
    integer_ids,
    json_lines,
    json_samples,
    listed,
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

_HEADER = re.compile(r"nrlre1:(int8|int16|int32):(\d+)x(\d+)x(\d+):")


def decode(envelope: Any, what: str = "routed_experts") -> AnyArray:
    """Ids [S, L, K] of an envelope.

    Raises
    ------
    InvalidInputError
        If the header is not known or the bytes are not those it announces.
    """
    if not isinstance(envelope, str):
        raise InvalidInputError(f"{what} is {type(envelope).__name__}; an nrlre1 text envelope was expected")
    header = _HEADER.match(envelope)
    if header is None:
        raise InvalidInputError(
            f"{what} begins {envelope[:24]!r}; 'nrlre1:<int8|int16|int32>:<S>x<L>x<K>:' was expected"
        )
    shape = tuple(int(n) for n in header.groups()[1:])
    data = decode_base64(envelope[header.end() :], what)
    return array_of_bytes(data, header[1], shape, what, shown="x".join(map(str, shape)))


def encode(ids: npt.ArrayLike, *, num_experts: int) -> str:
    """Envelope of ids [S, L, K], -1 for a missing route.

    Parameters
    ----------
    ids : array-like of int, shape [S, L, K]
    num_experts : int
        E; chooses int8 (E ≤ 128), int16 (E ≤ 32768) or int32.
    """
    array = integer_ids(ids, "ids")
    if array.size and (array.min() < -1 or array.max() >= num_experts):
        raise InvalidInputError(f"ids are outside -1..{num_experts - 1}: {array.min()}..{array.max()}")
    name = "int8" if num_experts <= 128 else "int16" if num_experts <= 32_768 else "int32"
    return f"nrlre1:{name}:{'x'.join(map(str, array.shape))}:{encode_base64(array, name)}"


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
    """Stream JSON Lines of one object per sample: ``routed_experts`` (an envelope) or ``segments``, and its length.

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
        json_samples(json_lines(paths, progress=progress), decode),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def export(problem: Problem, plan: Plan, *, pad: str = "none") -> Export:
    """Packing as ``shard_by_batch_size`` with sequence packing leaves it.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
        ``dummy`` puts one-token dummies (ids N and up, loss weight 0) into empty
        microbatches.

    Returns
    -------
    Export
        ``sorted_indices``: sample ids, shard after shard; per shard (DP slot)
        ``micro_batch_indices`` [1][R] half-open ranges of the shard's samples,
        ``micro_batch_lengths`` [1][R] padded tokens, ``elem_counts_per_gb`` [1].

    Raises
    ------
    InvalidInputError
        If a microbatch is empty and ``pad`` is ``none``.
    """
    cells, num_dummies, notes = padded_cells(
        problem, plan, pad=pad, target="NeMo-RL", allow_empty=False, equal_counts=False
    )
    aligned = [*problem.aligned_lengths.tolist()]
    aligned += [-(-1 // problem.length_alignment) * problem.length_alignment] * num_dummies
    ranges, lengths, elements = [], [], []
    for rows in cells:
        ends = np.cumsum([len(cell) for cell in rows]).tolist()
        ranges.append([[[end - len(cell), end] for cell, end in zip(rows, ends, strict=True)]])
        lengths.append([[sum(aligned[i] for i in cell) for cell in rows]])
        elements.append([ends[-1]])
    uneven = len({count for (count,) in elements}) > 1
    if uneven:
        notes += (
            "shards hold unequal numbers of samples (allow_uneven_shards); plan with equal_samples_per_slot=True if "
            "the trainer cannot take that",
        )
    content = {
        "sorted_indices": [i for rows in cells for cell in rows for i in cell],
        "micro_batch_indices": ranges,
        "micro_batch_lengths": lengths,
        "elem_counts_per_gb": elements,
        "num_dummies": num_dummies,
        **loss_fields(problem),
    }
    return Export("nemo-rl", content, notes)


def import_packing(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn a NeMo-RL sharding into a packing that can be scored.

    Parameters
    ----------
    problem : Problem
    content : mapping
        ``sorted_indices``, ``micro_batch_indices`` [shard][chunk][[start, end), ...] and
        ``elem_counts_per_gb`` [shard][chunk], optionally ``num_dummies``. Ranges
        of a chunk count from its first sample; chunks follow one another as rows.

    Returns
    -------
    Packing
        Broken capacities are kept for :func:`routepack_opt.score.violations` to list.

    Raises
    ------
    InvalidInputError
        If a key is missing, ranges do not tile a shard, or samples are missing or repeated.
    """
    require_keys(content, ["sorted_indices", "micro_batch_indices", "elem_counts_per_gb"], "NeMo-RL packing")
    order = listed(content["sorted_indices"], "sorted_indices", depth=1)
    shards = listed(content["micro_batch_indices"], "micro_batch_indices", depth=4)
    counts_of_shard = listed(content["elem_counts_per_gb"], "elem_counts_per_gb", depth=2)
    faults = Faults()
    if list(map(len, shards)) != list(map(len, counts_of_shard)):
        faults.add("micro_batch_indices and elem_counts_per_gb differ in their shards or chunks")
        faults.raise_if_any("NeMo-RL packing")
    cells: list[list[list[int]]] = []
    start = 0
    for shard, (chunks, counts) in enumerate(zip(shards, counts_of_shard, strict=True)):
        cells.append([])
        for chunk, (ranges, count) in enumerate(zip(chunks, counts, strict=True)):
            end = 0
            for ends in ranges:
                if len(ends) != 2:
                    faults.add(f"shard {shard}, chunk {chunk}: {ends} is no range [start, end)")
                    break
                first, last = ends
                if first != end or last < first or last > count:
                    faults.add(
                        f"shard {shard}, chunk {chunk}: range [{first}, {last}) does not follow {end} of {count}"
                    )
                    break
                cells[-1].append(order[start + first : start + last])
                end = last
            if end != count:
                faults.add(f"shard {shard}, chunk {chunk}: ranges end at {end} of {count} samples")
            start += count
    if start != len(order):
        faults.add(f"shards hold {start} samples, sorted_indices {len(order)}")
    faults.raise_if_any("NeMo-RL packing")
    return packing_from_cells(problem, cells, num_dummies=num_dummies_of(content))
