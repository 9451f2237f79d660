"""Megatron-Core: router-replay lists in, sample groups, packing info and expert permutations out.

``RouterReplay`` holds one [tokens, K] array per MoE layer, or one buffer
[max_tokens, L, K]. EP rank r owns the contiguous experts r·E/P .. (r+1)·E/P - 1, so a
placement is realised by permuting router rows, expert weights and optimizer
state: expert e moves to slot ``slot_of_expert[l][e]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.arrays import integer_array
from routepack_opt.counting import count_routing
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.eplb import checked_layers, placement_maps
from routepack_opt.formats.payloads import (
    Export,
    Recording,
    by_layer_number,
    listed,
    loss_fields,
    num_dummies_of,
    packing_from_cells,
    padded_cells,
    read_torch,
    recording,
    require_keys,
    to_numpy,
)
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem

__all__ = ["export", "export_placement", "import_packing", "import_placement", "read", "read_files"]


def read(
    layers: Sequence[Any] | Any,
    cu_seqlens: npt.ArrayLike,
    *,
    num_experts: int,
    lengths: npt.ArrayLike | None = None,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Count the routing of router-replay data.

    Parameters
    ----------
    layers : sequence [L] of int [tokens, K], or int [max_tokens, L, K]
        One array per MoE layer, or the static buffer (rows beyond the last
        sequence are ignored).
    cu_seqlens : array-like of int, shape [N + 1]
        Rows ``cu_seqlens[i]:cu_seqlens[i + 1]`` belong to sample i.
    num_experts : int
        E.
    lengths : array-like of int, shape [N], optional
        Tokens of each sample; default: its rows.
    moe_layers, physical_to_logical, uncovered, check_distinct
        As in :func:`routepack_opt.counting.count_routing`.

    Returns
    -------
    Recording

    Raises
    ------
    InvalidInputError
        If layers differ in shape, or ids are refused.
    """
    faults = Faults()
    offsets = integer_array(to_numpy(cu_seqlens, "cu_seqlens"), "cu_seqlens", faults, ndim=1, element="entry")
    faults.raise_if_any("router replay")
    assert offsets is not None
    if hasattr(layers, "shape"):
        ids = to_numpy(layers, "router replay buffer")
        if ids.ndim != 3:
            raise InvalidInputError(
                f"the buffer has shape {list(ids.shape)}; [max_tokens, L, K] was expected", context="router replay"
            )
        if len(offsets) and offsets[-1] > len(ids):
            raise InvalidInputError(
                f"cu_seqlens ends at {offsets[-1]}; the buffer has {len(ids)} rows", context="router replay"
            )
        ids = ids[: int(offsets[-1]) if len(offsets) else 0]
    else:
        parts = [to_numpy(layer, f"layer {k}") for k, layer in enumerate(layers)]
        if not parts:
            raise InvalidInputError("no layers", context="router replay")
        for k, part in enumerate(parts):
            if part.ndim != 2 or part.shape != parts[0].shape:
                faults.add(f"layer {k}: shape {list(part.shape)}; layer 0 has {list(parts[0].shape)}")
        faults.raise_if_any("router replay")
        ids = np.stack(parts, axis=1)
    counts = count_routing(
        ids,
        offsets,
        num_experts=num_experts,
        lengths=lengths,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )
    return recording(counts)


def read_files(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Read one ``.npz`` or ``.pt`` file of router-replay data.

    ``.npz``: ``ids`` [max_tokens, L, K], ``cu_seqlens`` [N + 1], optional ``lengths``. ``.pt``: a
    dict with ``layers`` (list of [tokens, K]) or ``ids``, and ``cu_seqlens``. Other parameters as
    in :func:`read`.
    """
    if len(paths) != 1:
        raise InvalidInputError(f"{len(paths)} files are given; router replay is read from one")
    if Path(paths[0]).suffix == ".npz":
        data: Mapping[str, Any] = files.read_npz(
            paths[0], what="router replay", required=("ids", "cu_seqlens"), optional=("lengths",)
        )
    else:
        data = read_torch(paths[0])
        if not isinstance(data, Mapping) or "cu_seqlens" not in data or not {"layers", "ids"} & set(data):
            raise InvalidInputError("a dict with layers (or ids) and cu_seqlens was expected", context=str(paths[0]))
    return read(
        data["ids"] if "ids" in data else data["layers"],
        data["cu_seqlens"],
        num_experts=num_experts,
        lengths=data.get("lengths"),
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def export(problem: Problem, plan: Plan, *, pad: str = "none") -> Export:
    """Packing as sample groups of the data schedule, and as packing info per DP rank.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
        ``dummy`` puts one-token dummies (ids N and up, loss weight 0) into empty microbatches.

    Returns
    -------
    Export
        ``sample_id_groups`` [R][D] of sample ids, and per DP rank ``packing_info``: bins
        are rows; ``bin_seq_indices`` [R] sample ids, ``seq_starts`` [R] first padded
        position of each, ``seq_lengths`` [R] true tokens, ``seq_to_bin_idx`` {sample: bin},
        ``cu_seqlens`` and ``cu_seqlens_padded`` [R] (int32 range).

    Raises
    ------
    InvalidInputError
        If a microbatch is empty and ``pad`` is ``none``, or positions pass int32.
    """
    cells, num_dummies, notes = padded_cells(
        problem, plan, pad=pad, target="Megatron", allow_empty=False, equal_counts=False
    )
    if problem.capacity > np.iinfo(np.int32).max:
        raise InvalidInputError(f"capacity {problem.capacity} passes int32, which cu_seqlens has", context="export")
    true = [*problem.lengths.tolist(), *[1] * num_dummies]
    m = problem.length_alignment
    infos = []
    for rows in cells:
        ends = [np.cumsum([0, *(true[i] for i in cell)]).tolist() for cell in rows]
        padded = [np.cumsum([0, *(-(-true[i] // m) * m for i in cell)]).tolist() for cell in rows]
        infos.append(
            {
                "bin_seq_indices": rows,
                "seq_starts": [positions[:-1] for positions in padded],
                "seq_lengths": [[true[i] for i in cell] for cell in rows],
                "seq_to_bin_idx": {str(i): row for row, cell in enumerate(rows) for i in cell},
                "cu_seqlens": ends,
                "cu_seqlens_padded": padded,
            }
        )
    content = {
        "sample_id_groups": [[rows[row] for rows in cells] for row in range(problem.num_rows)],
        "packing_info": infos,
        "num_dummies": num_dummies,
        **loss_fields(problem),
    }
    return Export("megatron", content, notes)


def import_packing(problem: Problem, content: Mapping[str, Any]) -> Packing:
    """Turn ``sample_id_groups`` [microbatch][DP rank] into a packing that can be scored.

    Raises
    ------
    InvalidInputError
        If the key is missing, microbatches differ in their number of ranks, or
        samples are missing, repeated or unknown.
    """
    require_keys(content, ["sample_id_groups"], "Megatron packing")
    groups = listed(content["sample_id_groups"], "sample_id_groups", depth=3)
    widths = {len(group) for group in groups}
    if len(widths) > 1:
        raise InvalidInputError(f"microbatches have {min(widths)} to {max(widths)} ranks", context="Megatron packing")
    ranks = widths.pop() if widths else 0
    cells = [[group[rank] for group in groups] for rank in range(ranks)]
    return packing_from_cells(problem, cells, num_dummies=num_dummies_of(content))


def export_placement(problem: Problem, plan: Plan, *, moe_layers: Sequence[int] | None = None) -> Export:
    """Placement as a permutation per layer.

    Parameters
    ----------
    problem, plan : Problem, Plan
    moe_layers : sequence of int, optional
        Absolute layer number of each planned layer; default 0 .. L - 1.

    Returns
    -------
    Export
        ``layers``: {layer number: ``slot_of_expert`` [E]}; apply it to router rows, expert
        weights, biases, optimizer state and replayed ids alike.
    """
    placement_maps(problem, plan)
    numbers = range(problem.num_layers) if moe_layers is None else checked_layers(moe_layers, problem.num_layers)
    slots = plan.placement.slot_of_expert.tolist()
    content = {
        "ep_size": problem.ep_size,
        "layers": {str(number): row for number, row in zip(numbers, slots, strict=True)},
    }
    return Export(
        "megatron-placement",
        content,
        (
            "placement only: the packing is not part of this format, and the loss does not depend on placement",
            "permute router rows, expert weights, optimizer state and replayed ids together",
        ),
    )


def import_placement(content: Mapping[str, Any], *, ep_size: int) -> Placement:
    """Turn a permutation per layer back into a placement; layers in ascending number."""
    layers = content.get("layers") if isinstance(content, Mapping) else None
    if not isinstance(layers, Mapping) or not layers:
        raise InvalidInputError("layers is missing", context="Megatron placement")
    return Placement.from_slots(by_layer_number(layers, "layers"), ep_size=ep_size)
