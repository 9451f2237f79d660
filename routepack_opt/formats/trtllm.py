"""TensorRT-LLM: the calibration folder of the expert load balancer in, its YAML out.

The folder holds ``meta_info.json`` (``num_experts``, ``num_experts_per_token``) and one
``rank<r>.safetensors`` per rank with loads [E] under the keys ``<iteration>_<layer>``. Loads
of some ranks only are no loads: partial sets are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routepack_opt import files
from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.eplb import checked_layers, placement_maps
from routepack_opt.formats.payloads import Export, Recording, by_layer_number, require_ranks
from routepack_opt.formats.sglang import micro_steps
from routepack_opt.plan import Placement, Plan
from routepack_opt.problem import Problem

__all__ = ["Calibration", "export", "import_placement", "read_calibration", "read_files", "read_load"]

_RANK = re.compile(r"rank(\d+)\.safetensors")
_KEY = re.compile(r"(\d+)_(\d+)")


class Calibration(NamedTuple):
    """Loads of a calibration run.

    Attributes
    ----------
    load : ndarray of int64, shape [iterations, L, E]
        Routed tokens, summed over ranks.
    layers : tuple of int
        Absolute layer numbers.
    top_k : int
        Experts per token.
    """

    load: IntArray
    layers: tuple[int, ...]
    top_k: int


def read_calibration(folder: files.PathLike, *, num_ranks: int | None = None) -> Calibration:
    """Read a calibration folder.

    Parameters
    ----------
    folder : path-like
    num_ranks : int, optional
        Ranks that recorded. Default: the highest rank found plus one, which cannot
        notice that the last ranks are missing.

    Raises
    ------
    InvalidInputError
        If a file is missing or damaged, ranks or their keys are incomplete, or
        layers of an iteration disagree on the tokens.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    root = Path(folder)
    meta = files.read_json(root / "meta_info.json", what="calibration")
    faults = Faults()
    for key in ("num_experts", "num_experts_per_token"):
        value = meta.get(key) if isinstance(meta, dict) else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            faults.add(f"meta_info.json: {key} is {value!r}; it must be an integer of at least 1")
    faults.raise_if_any("calibration")
    num_experts, top_k = meta["num_experts"], meta["num_experts_per_token"]
    found = {int(match[1]): path for path in sorted(root.iterdir()) if (match := _RANK.fullmatch(path.name))}
    if not found:
        raise InvalidInputError(f"{root} holds no rank<r>.safetensors", context="calibration")
    require_ranks(found, num_ranks, "calibration")
    total: dict[tuple[int, int], IntArray] = {}
    keys_of_rank: dict[int, set[tuple[int, int]]] = {}
    for rank, path in sorted(found.items()):
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise InvalidInputError(f"{path.name} is truncated or damaged: {error}", context="calibration") from error
        keys_of_rank[rank] = set()
        for name, tensor in tensors.items():
            match = _KEY.fullmatch(name)
            if match is None:
                faults.add(f"{path.name}: key {name!r}; '<iteration>_<layer>' was expected")
                continue
            if tensor.dtype.kind not in "iu" or tensor.shape != (num_experts,):
                faults.add(
                    f"{path.name}, {name}: {tensor.dtype} {list(tensor.shape)}; integers [{num_experts}] were expected"
                )
                continue
            if tensor.size and tensor.min() < 0:
                faults.add(f"{path.name}, {name}: negative load {tensor.min()}")
            place = (int(match[1]), int(match[2]))
            keys_of_rank[rank].add(place)
            total[place] = total.get(place, np.zeros(num_experts, dtype=np.int64)) + tensor.astype(np.int64)
    for rank, keys in keys_of_rank.items():
        missing = sorted(set(total) - keys)
        if missing:
            faults.add(
                f"rank {rank} lacks {len(missing)} of {len(total)} keys, such as {missing[0][0]}_{missing[0][1]}"
            )
    iterations = sorted({iteration for iteration, _ in total})
    layers = sorted({layer for _, layer in total})
    for iteration in iterations:
        gone = [layer for layer in layers if (iteration, layer) not in total]
        if gone:
            faults.add(f"iteration {iteration} lacks layer {gone[0]}")
    faults.raise_if_any("calibration")
    if not total:
        raise InvalidInputError("no loads are recorded", context="calibration")
    load = np.stack([np.stack([total[iteration, layer] for layer in layers]) for iteration in iterations])
    return Calibration(load, tuple(layers), top_k)


def read_load(
    paths: Sequence[files.PathLike], *, num_experts: int | None = None, num_ranks: int | None = None
) -> IntArray:
    """Loads [W, L, E] of one calibration folder, for :meth:`routepack_opt.problem.Problem.from_window`."""
    return _only(paths, num_experts, num_ranks).load


def read_files(
    paths: Sequence[files.PathLike], *, num_experts: int, uncovered: str = "refuse", num_ranks: int | None = None
) -> Recording:
    """Read one calibration folder as a batch with one sample per iteration.

    Parameters
    ----------
    paths : sequence of path-like
        One folder.
    num_experts : int
        E; must agree with the folder.
    uncovered : {"refuse"}
        Loads have no uncovered tokens; other policies are refused.
    num_ranks : int, optional
        Ranks that recorded.

    Returns
    -------
    Recording
    """
    if uncovered != "refuse":
        raise InvalidInputError("uncovered changes nothing for a calibration; leave it out")
    calibration = _only(paths, num_experts, num_ranks)
    used = calibration.load[calibration.load.any(axis=(1, 2))]
    return micro_steps(used, top_k=calibration.top_k)


def _only(paths: Sequence[files.PathLike], num_experts: int | None, num_ranks: int | None) -> Calibration:
    if len(paths) != 1:
        raise InvalidInputError(f"{len(paths)} folders are given; a calibration is one")
    calibration = read_calibration(paths[0], num_ranks=num_ranks)
    if num_experts is not None and calibration.load.shape[2] != num_experts:
        raise InvalidInputError(
            f"the calibration has {calibration.load.shape[2]} experts; num_experts is {num_experts}"
        )
    return calibration


def export(
    problem: Problem, plan: Plan, *, moe_layers: Sequence[int] | None = None, layer_updates_per_iter: int = 0
) -> Export:
    """Placement as the YAML of the expert load balancer.

    Parameters
    ----------
    problem, plan : Problem, Plan
    moe_layers : sequence of int, optional
        Absolute layer number of each planned layer; default 0 .. L - 1.
    layer_updates_per_iter : int
        Layers the engine may rebalance per iteration; 0 keeps the plan.

    Returns
    -------
    Export
        ``num_slots``, ``initial_global_assignments`` {layer: expert of each slot},
        ``layer_updates_per_iter``.
    """
    updates = layer_updates_per_iter
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 0:
        raise InvalidInputError(f"layer_updates_per_iter is {updates!r}; it must be an integer of at least 0")
    maps = placement_maps(problem, plan)
    numbers = range(problem.num_layers) if moe_layers is None else checked_layers(moe_layers, problem.num_layers)
    content = {
        "num_slots": problem.num_experts,
        "initial_global_assignments": {int(n): row for n, row in zip(numbers, maps.tolist(), strict=True)},
        "layer_updates_per_iter": layer_updates_per_iter,
    }
    notes = ["placement only: the packing is not part of this format, and the loss does not depend on placement"]
    if moe_layers is None:
        notes.append("layers are numbered from 0; give moe_layers if the model has dense layers")
    return Export("trtllm", content, tuple(notes), kind="yaml")


def import_placement(source: Mapping[str, Any] | files.PathLike, *, ep_size: int) -> Placement:
    """Turn ``initial_global_assignments`` (a mapping, or the YAML file) into a placement; layers in ascending number.

    Raises
    ------
    InvalidInputError
        If the key is missing or an expert has replicas or no slot.
    """
    from routepack_opt.formats.eplb import import_placement as from_map

    value: Any = source
    if not isinstance(source, Mapping):
        import yaml

        try:
            value = yaml.safe_load(Path(source).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InvalidInputError(f"{source} cannot be read: {error}") from error
    assignments = value.get("initial_global_assignments") if isinstance(value, Mapping) else None
    if not isinstance(assignments, Mapping) or not assignments:
        raise InvalidInputError("initial_global_assignments is missing", context="load balancer configuration")
    return from_map(by_layer_number(assignments, "initial_global_assignments"), ep_size=ep_size)
