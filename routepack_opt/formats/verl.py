"""verl: routed experts of a batch in, a reordered batch and micro-batch indices out, and back.

``routed_experts`` is [bs, seqlen, L, K] beside ``attention_mask`` [bs, seqlen]: left
padding is masked, the row of the last token is zero. A rank's micro-batches are
lists of indices into the rank's own part of the batch (``micro_bsz_idx``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.payloads import (
    AnyArray,
    Export,
    Recording,
    SampleRoutes,
    listed,
    loss_fields,
    packing_from_cells,
    padded_cells,
    read_samples,
    read_torch,
    to_numpy,
)
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem

__all__ = ["export", "import_packing", "read", "read_files", "reorder"]


def _tensors(data: Any) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Tensors and non-tensors of a DataProto-like object, or a plain mapping."""
    if isinstance(data, Mapping):
        return data, data
    batch = getattr(data, "batch", None)
    if batch is None:
        raise InvalidInputError(f"{type(data).__name__} has no batch; a DataProto or a mapping of arrays was expected")
    return batch, getattr(data, "non_tensor_batch", None) or {}


def _has(mapping: Any, key: str) -> bool:
    return key in mapping.keys()  # noqa: SIM118 - TensorDict defines `in` on keys() only


def _samples(data: Any) -> Iterator[SampleRoutes]:
    tensors, others = _tensors(data)
    faults = Faults()
    if not _has(tensors, "routed_experts"):
        faults.add("routed_experts is missing; turn routing replay on in the rollout")
    if not _has(tensors, "attention_mask") and not _has(tensors, "lengths"):
        faults.add("attention_mask (or lengths, for batches without left padding) is missing")
    faults.raise_if_any("verl batch")
    ids = to_numpy(tensors["routed_experts"], "routed_experts")
    if ids.ndim != 4 or ids.dtype.kind not in "iu":
        raise InvalidInputError(
            f"routed_experts is {ids.dtype} {list(ids.shape)}; integers [batch, sequence, layers, K] were expected",
            context="verl batch",
        )
    num_samples, width = ids.shape[:2]
    mask: AnyArray | None = None
    if _has(tensors, "attention_mask"):
        mask = to_numpy(tensors["attention_mask"], "attention_mask")
        # The row of the last position may be absent: it is never forwarded.
        if mask.shape not in ((num_samples, width), (num_samples, width + 1)):
            raise InvalidInputError(
                f"attention_mask is {list(mask.shape)}; routed_experts covers {num_samples} x {width} positions",
                context="verl batch",
            )
        mask = mask != 0
    else:
        lengths = to_numpy(tensors["lengths"], "lengths")
        if lengths.dtype.kind not in "iu":
            raise InvalidInputError(f"lengths has dtype {lengths.dtype}; it must hold integers", context="verl batch")
        if lengths.shape != (num_samples,):
            raise InvalidInputError(f"lengths is {list(lengths.shape)} for {num_samples} samples", context="verl batch")
    names = to_numpy_text(others, "uid", num_samples)
    for i in range(num_samples):
        if mask is None:
            length = int(lengths[i])
            start, stop = 0, min(length, width)
            valid = None
        else:
            length = int(mask[i].sum())
            positions = np.flatnonzero(mask[i, :width])
            if not len(positions):
                raise InvalidInputError(f"sample {i}: attention_mask is all zero", context="verl batch")
            start, stop = int(positions[0]), int(positions[-1]) + 1
            valid = None if stop - start == len(positions) else mask[i, start:stop]
        yield SampleRoutes(ids[i, start:stop], length, None, None if names is None else names[i], valid)


def to_numpy_text(mapping: Mapping[str, Any], key: str, size: int) -> list[str] | None:
    """Texts of a non-tensor column, or None if it is not there."""
    if not _has(mapping, key):
        return None
    values = [str(value) for value in np.asarray(mapping[key], dtype=object).ravel().tolist()]
    if len(values) != size:
        raise InvalidInputError(f"{key} has {len(values)} entries for {size} samples", context="verl batch")
    return values


def read(
    data: Any,
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Count the routing of a batch in memory.

    Parameters
    ----------
    data : DataProto-like or mapping
        ``routed_experts`` int [bs, seqlen, L, K] and ``attention_mask`` [bs, seqlen];
        without left padding, ``lengths`` [bs] will do. ``uid`` (non-tensor) names
        the prompt group.
    num_experts : int
        E.
    moe_layers, physical_to_logical, uncovered, check_distinct
        As for :func:`routepack_opt.formats.vllm.read_outputs`.

    Returns
    -------
    Recording
        Lengths are true tokens; padding never counts.
    """
    return read_samples(
        _samples(data),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def read_files(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Read ``.npz`` or ``.pt`` files of the tensors :func:`read` takes, one batch a file."""

    def samples() -> Iterator[SampleRoutes]:
        for path in paths:
            if Path(path).suffix == ".npz":
                data: Any = files.read_npz(
                    path, what="verl batch", required=("routed_experts",), optional=("attention_mask", "lengths", "uid")
                )
            else:
                data = read_torch(path)
            yield from _samples(data)

    return read_samples(
        samples(),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def export(problem: Problem, plan: Plan, *, pad: str = "none") -> Export:
    """Packing as verl's driver and workers take it.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
        ``dummy`` appends one-token dummies (ids N and up, loss weight 0) until no
        micro-batch is empty and every rank has equally many samples.

    Returns
    -------
    Export
        ``reorder``: sample ids, rank after rank; ``partitions`` [D]: sample ids of each
        rank; ``micro_bsz_idx`` [D][R]: indices into the rank's own part;
        ``equal_count``: whether an even split of ``reorder`` gives the partitions.

    Raises
    ------
    InvalidInputError
        If a micro-batch is empty and ``pad`` is ``none``.
    """
    cells, num_dummies, notes = padded_cells(
        problem, plan, pad=pad, target="verl", allow_empty=False, equal_counts=True
    )
    partitions = [[i for cell in rows for i in cell] for rows in cells]
    micro: list[list[list[int]]] = []
    for rows in cells:
        start = 0
        micro.append([])
        for cell in rows:
            micro[-1].append(list(range(start, start + len(cell))))
            start += len(cell)
    content = {
        "reorder": [i for part in partitions for i in part],
        "partitions": partitions,
        "micro_bsz_idx": micro,
        "equal_count": len({len(part) for part in partitions}) == 1,
        "num_micro_batches": problem.num_rows,
        "max_token_len": problem.capacity,
        "num_dummies": num_dummies,
        **loss_fields(problem),
    }
    return Export("verl", content, notes)


def import_packing(
    problem: Problem,
    partitions: Sequence[Sequence[int]],
    micro_bsz_idx: Sequence[Sequence[Sequence[int]]],
    *,
    num_dummies: int = 0,
) -> Packing:
    """Turn the partitions and micro-batches of a verl run into a packing that can be scored.

    Parameters
    ----------
    problem : Problem
    partitions : sequence [D] of sequences of int
        Sample ids of each DP rank, as ``get_seqlen_balanced_partitions`` returns them.
    micro_bsz_idx : sequence [D][micro-batches] of sequences of int
        Indices into the rank's part, as ``rearrange_micro_batches`` returns them.
    num_dummies : int
        Ids N .. N + num_dummies - 1 are padding.

    Returns
    -------
    Packing
        Micro-batches above the capacity are kept;
        :func:`routepack_opt.score.violations` lists them.

    Raises
    ------
    InvalidInputError
        If ranks differ in number, or an index is out of range, repeated or missing.
    """
    partitions = listed(partitions, "partitions", depth=2)
    micro_bsz_idx = listed(micro_bsz_idx, "micro_bsz_idx", depth=3)
    num_dummies = listed(num_dummies, "num_dummies", depth=0)
    faults = Faults()
    if len(partitions) != len(micro_bsz_idx):
        faults.add(f"{len(partitions)} partitions, but micro_bsz_idx of {len(micro_bsz_idx)} ranks")
    faults.raise_if_any("verl packing")
    cells: list[list[list[int]]] = []
    for rank, (part, micro) in enumerate(zip(partitions, micro_bsz_idx, strict=True)):
        cells.append([])
        for k, indices in enumerate(micro):
            outside = [j for j in indices if not 0 <= j < len(part)]
            if outside:
                faults.add(f"rank {rank}, micro-batch {k}: index {outside[0]} is outside its {len(part)} samples")
            cells[-1].append([part[j] for j in indices if 0 <= j < len(part)])
    faults.raise_if_any("verl packing")
    return packing_from_cells(problem, cells, num_dummies=num_dummies)


def reorder(data: Mapping[str, Any], problem: Problem, plan: Plan) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """Reorder a batch by a plan: rank after rank, micro-batch after micro-batch.

    Parameters
    ----------
    data : mapping
        Arrays or tensors whose first axis is the sample.
    problem, plan : Problem, Plan

    Returns
    -------
    data : dict
        The same columns, reordered.
    micro_bsz_idx : list [D][R] of list of int
        Indices into each rank's part; see :func:`export` for uneven ranks.

    Raises
    ------
    InvalidInputError
        If a column does not have one entry per sample.
    """
    content = export(problem, plan).content
    order = content["reorder"]
    faults = Faults()
    for name, column in data.items():
        if len(column) != problem.num_samples:
            faults.add(f"{name} has {len(column)} entries for {problem.num_samples} samples")
    faults.raise_if_any("verl batch")
    moved = {
        name: [column[i] for i in order] if isinstance(column, list) else column[order] for name, column in data.items()
    }
    return moved, content["micro_bsz_idx"]
