"""EPLB: physical and logical expert maps, in both directions.

A map without replicas is a placement: one physical slot for every logical
expert, slot s on EP rank s // (E / P). Maps with replicas cannot be expressed in
this model and are refused. Format of the three maps: DeepSeek EPLB,
``rebalance_experts``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray, integer_array
from routepack_opt.counting import layer_numbers
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.payloads import Export, to_numpy
from routepack_opt.plan import Placement, Plan, placement_faults
from routepack_opt.problem import Problem

__all__ = ["export", "import_placement", "placement_maps"]


def placement_maps(
    problem: Problem,
    plan: Plan,
    *,
    moe_layers: Sequence[int] | None = None,
    num_hidden_layers: int | None = None,
) -> IntArray:
    """Logical expert in each physical slot, int64 [L or num_hidden_layers, E].

    Parameters
    ----------
    problem, plan : Problem, Plan
    moe_layers : sequence of int, optional
        Absolute layer number of each planned layer; other layers get the identity.
    num_hidden_layers : int, optional
        Layers of the model; given with ``moe_layers``.

    Raises
    ------
    InvalidInputError
        If the plan has no layers or belongs to another problem, or the layer
        numbers do not fit.
    """
    faults = Faults()
    if plan.problem_fingerprint != problem.fingerprint:
        faults.add("the plan belongs to another problem (fingerprints differ)")
    faults.extend(placement_faults(problem, plan.placement))
    if problem.num_layers == 0:
        faults.add("the problem has no recorded routing, so there is no placement to export")
    is_number = isinstance(num_hidden_layers, int) and not isinstance(num_hidden_layers, bool)
    if num_hidden_layers is not None and not is_number:
        faults.add(f"num_hidden_layers is {num_hidden_layers!r}; it must be an integer")
    if (moe_layers is None) != (num_hidden_layers is None):
        faults.add("moe_layers and num_hidden_layers are given together or not at all")
    faults.raise_if_any("export")
    expert_of_slot = plan.placement.expert_of_slot
    if moe_layers is None or num_hidden_layers is None:
        return expert_of_slot
    layers = checked_layers(moe_layers, problem.num_layers, num_hidden_layers=num_hidden_layers)
    whole = np.tile(np.arange(problem.num_experts, dtype=np.int64), (num_hidden_layers, 1))
    whole[layers] = expert_of_slot
    return whole


def checked_layers(moe_layers: Sequence[int], num_layers: int, *, num_hidden_layers: int | None = None) -> list[int]:
    """Absolute layer numbers, one for each planned layer.

    Raises
    ------
    InvalidInputError
        If their number differs, or one is negative, repeated or beyond the model.
    """
    faults = Faults()
    layers = layer_numbers(moe_layers)
    if len(layers) != num_layers:
        faults.add(f"moe_layers names {len(layers)} layers; the problem has {num_layers}")
    if len(set(layers)) != len(layers):
        faults.add("moe_layers names a layer twice")
    for layer in layers:
        if layer < 0 or (num_hidden_layers is not None and layer >= num_hidden_layers):
            faults.add(f"moe_layers names layer {layer}; the model has {num_hidden_layers}")
    faults.raise_if_any("export")
    return layers


def export(problem: Problem, plan: Plan) -> Export:
    """The three maps of EPLB for a placement without replicas.

    Returns
    -------
    Export
        ``physical_to_logical_map`` [L][E], ``logical_to_physical_map`` [L][E][1] and
        ``expert_count`` [L][E] of ones.
    """
    expert_of_slot = placement_maps(problem, plan)
    return Export(
        "eplb",
        {
            "physical_to_logical_map": expert_of_slot.tolist(),
            "logical_to_physical_map": plan.placement.slot_of_expert[:, :, None].tolist(),
            "expert_count": np.ones_like(expert_of_slot).tolist(),
        },
        ("placement only: the packing is not part of this format, and the loss does not depend on placement",),
    )


def import_placement(
    physical_to_logical_map: npt.ArrayLike,
    *,
    ep_size: int,
    moe_layers: Sequence[int] | None = None,
) -> Placement:
    """Turn someone's map into a placement that can be scored.

    Parameters
    ----------
    physical_to_logical_map : array-like of int, shape [layers, slots]
        Logical expert in each physical slot; a tensor or nested lists.
    ep_size : int
        P; slot s is on rank s // (slots / P).
    moe_layers : sequence of int, optional
        Rows of the map to take, when it covers dense layers too.

    Returns
    -------
    Placement

    Raises
    ------
    InvalidInputError
        If an expert has replicas or no slot: the layer and the expert are named.
    """
    faults = Faults()
    found = integer_array(
        to_numpy(physical_to_logical_map, "physical_to_logical_map"),
        "physical_to_logical_map",
        faults,
        ndim=2,
        element="layer",
    )
    faults.raise_if_any("EPLB map")
    assert found is not None
    if moe_layers is not None:
        layers = [int(layer) for layer in moe_layers]
        for layer in layers:
            if not 0 <= layer < len(found):
                faults.add(f"moe_layers names layer {layer}; the map has {len(found)}")
        faults.raise_if_any("EPLB map")
        found = found[layers]
    num_layers, num_slots = found.shape
    slot_of_expert = np.full((num_layers, num_slots), -1, dtype=np.int64)
    for layer in range(num_layers):
        row = found[layer]
        if row.min(initial=0) < 0 or (num_slots and row.max() >= num_slots):
            slot = int(np.flatnonzero((row < 0) | (row >= num_slots))[0])
            faults.add(f"layer {layer}, slot {slot}: expert {row[slot]} is outside 0..{num_slots - 1}")
            continue
        copies = np.bincount(row, minlength=num_slots)
        if (copies > 1).any():
            expert = int(np.argmax(copies))
            faults.add(
                f"layer {layer}: expert {expert} has {copies[expert]} physical slots; replicas cannot be expressed here"
            )
            continue
        slot_of_expert[layer, row] = np.arange(num_slots)
    faults.raise_if_any("EPLB map")
    if num_layers == 0:
        raise InvalidInputError("the map has no layers", context="EPLB map")
    return Placement.from_slots(slot_of_expert, ep_size=ep_size)
