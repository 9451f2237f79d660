"""Nested lists: the schedules of slime and miles, the grid of torchtitan, the packs of tunix, in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.payloads import (
    Export,
    listed,
    loss_fields,
    num_dummies_of,
    packing_from_cells,
    padded_cells,
    require_keys,
)
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem

__all__ = [
    "export_slime",
    "export_torchtitan",
    "export_tunix",
    "import_slime",
    "import_torchtitan",
    "import_tunix",
]


def export_slime(problem: Problem, plan: Plan, *, pad: str = "none") -> Export:
    """Packing as ``build_dp_schedule`` of slime and miles returns it, for one optimizer step.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
        ``dummy`` puts one-token dummies (ids N and up, loss weight 0) into empty micro-batches.

    Returns
    -------
    Export
        ``partitions`` [D] of sample ids, ``micro_batch_indices`` [D][R] indices into the
        rank's partition, ``num_microbatches`` [1] and ``global_batch_sizes`` [1].

    Raises
    ------
    InvalidInputError
        If a micro-batch is empty and ``pad`` is ``none``.
    """
    cells, num_dummies, notes = padded_cells(
        problem, plan, pad=pad, target="slime", allow_empty=False, equal_counts=False
    )
    indices: list[list[list[int]]] = []
    for rows in cells:
        start = 0
        indices.append([])
        for cell in rows:
            indices[-1].append(list(range(start, start + len(cell))))
            start += len(cell)
    content = {
        "partitions": [[i for cell in rows for i in cell] for rows in cells],
        "micro_batch_indices": indices,
        "num_microbatches": [problem.num_rows],
        "global_batch_sizes": [problem.num_samples + num_dummies],
        "num_dummies": num_dummies,
        **loss_fields(problem),
    }
    return Export("slime", content, notes)


def import_slime(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn ``partitions`` and ``micro_batch_indices`` into a packing that can be scored.

    Raises
    ------
    InvalidInputError
        If a key is missing, an index is out of range, or samples are missing or repeated.
    """
    require_keys(content, ["partitions", "micro_batch_indices"], "slime packing")
    partitions = listed(content["partitions"], "partitions", depth=2)
    indices = listed(content["micro_batch_indices"], "micro_batch_indices", depth=3)
    if len(partitions) != len(indices):
        raise InvalidInputError(
            f"{len(partitions)} partitions, but micro_batch_indices of {len(indices)} ranks", context="slime packing"
        )
    faults = Faults()
    cells: list[list[list[int]]] = []
    for rank, (part, micro) in enumerate(zip(partitions, indices, strict=True)):
        cells.append([])
        for k, local in enumerate(micro):
            for j in local:
                if not 0 <= j < len(part):
                    faults.add(f"rank {rank}, micro-batch {k}: index {j} is outside its {len(part)} samples")
            cells[-1].append([part[j] for j in local if 0 <= j < len(part)])
    faults.raise_if_any("slime packing")
    return packing_from_cells(problem, cells, num_dummies=num_dummies_of(content))


def export_torchtitan(problem: Problem, plan: Plan, *, num_microbatches: int | None = None) -> Export:
    """Packing as a grid [G][M][D] of sample ids: G groups of M microbatches for D ranks.

    Parameters
    ----------
    problem, plan : Problem, Plan
    num_microbatches : int, optional
        M; divides R. Default: R, one group.

    Returns
    -------
    Export
        ``grid``; an empty entry is a row of padding only.

    Raises
    ------
    InvalidInputError
        If R is no multiple of ``num_microbatches``.
    """
    size = problem.num_rows if num_microbatches is None else num_microbatches
    if isinstance(size, bool) or not isinstance(size, int) or size < 1 or problem.num_rows % size:
        raise InvalidInputError(
            f"num_microbatches is {size!r}; it must divide the {problem.num_rows} rows of the plan", context="export"
        )
    cells, _, notes = padded_cells(problem, plan, pad="none", target="torchtitan", allow_empty=True, equal_counts=False)
    rows = [[cells[slot][row] for slot in range(problem.dp_size)] for row in range(problem.num_rows)]
    content = {
        "grid": [rows[start : start + size] for start in range(0, problem.num_rows, size)],
        "seq_len": problem.capacity,
        **loss_fields(problem),
    }
    return Export("torchtitan", content, notes)


def import_torchtitan(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn a grid [G][M][D] into a packing that can be scored; groups follow one another as rows.

    Raises
    ------
    InvalidInputError
        If ``grid`` is missing, or samples are missing, repeated or unknown.
    """
    require_keys(content, ["grid"], "torchtitan packing")
    grid = listed(content["grid"], "grid", depth=4)
    return packing_from_cells(problem, _by_rank([row for group in grid for row in group]))


def export_tunix(problem: Problem, plan: Plan) -> Export:
    """Packing as packs of sample ids; pack k is (row k // D, DP slot k % D).

    Returns
    -------
    Export
        ``packs`` [R · D] of sample ids, ``pack_size`` D; an empty pack is padding only.
    """
    cells, _, notes = padded_cells(problem, plan, pad="none", target="tunix", allow_empty=True, equal_counts=False)
    packs = [cells[slot][row] for row in range(problem.num_rows) for slot in range(problem.dp_size)]
    content = {
        "packs": packs,
        "pack_size": problem.dp_size,
        "max_token_budget": problem.capacity,
        **loss_fields(problem),
    }
    return Export("tunix", content, notes)


def import_tunix(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn packs back into a packing that can be scored.

    Raises
    ------
    InvalidInputError
        If a key is missing, packs do not fill rows of ``pack_size``, or samples are
        missing, repeated or unknown.
    """
    require_keys(content, ["packs", "pack_size"], "tunix packing")
    packs = listed(content["packs"], "packs", depth=2)
    size = listed(content["pack_size"], "pack_size", depth=0)
    if size < 1 or len(packs) % size:
        raise InvalidInputError(f"{len(packs)} packs are no multiple of pack_size {size}", context="tunix packing")
    return packing_from_cells(problem, _by_rank([packs[k : k + size] for k in range(0, len(packs), size)]))


def _by_rank(rows: Sequence[Sequence[Sequence[int]]]) -> list[list[Sequence[int]]]:
    """Rows [R][D] as [D][R]; short rows leave their last ranks empty."""
    width = max((len(row) for row in rows), default=0)
    return [[row[rank] if rank < len(row) else [] for row in rows] for rank in range(width)]
