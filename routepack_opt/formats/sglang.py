"""SGLang: routed experts of responses and recorder dumps in, expert locations in and out.

``meta_info["routed_experts"]`` is base64 of int32 numbers in C order without a
header, [tokens - 1 - start, hidden layers, K]; the caller knows layers and K. A fork
sends ``{"values": ..., "valid_mask": ...}``. The expert-distribution recorder
writes PyTorch files, which are read without running them
(:func:`routepack_opt.formats.payloads.read_torch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.arrays import IntArray, integer_array
from routepack_opt.batch import RoutingBatch
from routepack_opt.counting import Coverage
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.formats.eplb import import_placement, placement_maps
from routepack_opt.formats.payloads import (
    AnyArray,
    Export,
    Recording,
    SampleRoutes,
    Segment,
    decode_base64,
    integer_ids,
    join_segments,
    json_lines,
    read_samples,
    read_torch,
    require_ranks,
    to_numpy,
    tokens_of,
)
from routepack_opt.plan import Placement, Plan
from routepack_opt.problem import Problem

__all__ = [
    "decode",
    "export",
    "import_location",
    "micro_steps",
    "read_files",
    "read_load",
    "read_recorder",
    "read_responses",
]


def decode(
    payload: Any, *, num_layers: int, top_k: int, what: str = "routed_experts"
) -> tuple[AnyArray, AnyArray | None]:
    """Ids [rows, num_layers, top_k] and, from the fork's form, which rows are valid.

    Parameters
    ----------
    payload : str, bytes or mapping
        Base64 of int32 numbers without a header, or ``{"values", "valid_mask"}``.
    num_layers, top_k : int
        Layers recorded and K, which the payload does not say.
    what : str
        Name in messages.

    Raises
    ------
    InvalidInputError
        If the payload is empty or its size is no multiple of ``num_layers`` · ``top_k``.
    """
    for name, value in (("num_layers", num_layers), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise InvalidInputError(f"{name} is {value!r}; it must be an integer of at least 1")
    valid = None
    if isinstance(payload, Mapping):
        if not payload:
            raise InvalidInputError(f"{what} is empty; the server did not return routed experts")
        if set(payload) != {"values", "valid_mask"}:
            raise InvalidInputError(
                f"{what} has the keys {', '.join(sorted(payload))}; values and valid_mask were expected"
            )
        mask = to_numpy(payload["valid_mask"], f"{what}: valid_mask").astype(bool)
        payload = payload["values"]
        ids, _ = decode(payload, num_layers=num_layers, top_k=top_k, what=what)
        if mask.shape != (len(ids),):
            raise InvalidInputError(f"{what}: valid_mask has shape {list(mask.shape)} for {len(ids)} rows")
        return ids, mask
    if isinstance(payload, str | bytes):
        data = decode_base64(payload, what)
        if len(data) % 4:
            raise InvalidInputError(f"{what}: {len(data)} bytes are no whole number of int32 (truncated?)")
        flat: AnyArray = np.frombuffer(data, dtype="<i4")
    else:
        array = to_numpy(payload, what)
        if array.ndim == 3:
            return integer_ids(array, what), valid
        flat = array.reshape(-1)
    if flat.size % (num_layers * top_k):
        raise InvalidInputError(
            f"{what}: {flat.size} ids are no multiple of num_layers {num_layers} x top_k {top_k}; one of them is wrong"
        )
    return flat.reshape(-1, num_layers, top_k), valid


def _response_samples(
    responses: Iterable[tuple[str, Mapping[str, Any]]], num_layers: int, top_k: int
) -> Iterator[SampleRoutes]:
    for where, response in responses:
        meta = response.get("meta_info", response)
        if not isinstance(meta, Mapping):
            raise InvalidInputError(f"{where}: meta_info is {meta!r:.40}; an object was expected")
        name = meta.get("id", response.get("id"))
        what = where if name is None else f"{where} ({name})"
        group = response.get("group_id", meta.get("group_id"))
        length = tokens_of({**meta, **{k: v for k, v in response.items() if k != "meta_info"}}, what)
        if "segments" in response:
            parts = []
            if not isinstance(response["segments"], Sequence) or isinstance(response["segments"], str):
                raise InvalidInputError(f"{what}: segments must be a list")
            for k, part in enumerate(response["segments"]):
                part_meta = part.get("meta_info", part) if isinstance(part, Mapping) else None
                if not isinstance(part_meta, Mapping):
                    raise InvalidInputError(f"{what}: segment {k} must be an object, with meta_info or without")
                ids, valid = decode(part_meta.get("routed_experts"), num_layers=num_layers, top_k=top_k, what=what)
                if valid is not None:
                    ids = np.where(valid[:, None, None], ids, -1)
                start = part_meta.get("routed_experts_start_len", part.get("start"))
                if isinstance(start, bool) or not isinstance(start, int):
                    raise InvalidInputError(f"{what}, segment {k}: routed_experts_start_len is {start!r}")
                parts.append(Segment(start, ids))
            ids, valid = join_segments(parts, what), None
        else:
            if meta.get("routed_experts") is None:
                raise InvalidInputError(f"{what}: meta_info has no routed_experts")
            ids, valid = decode(meta["routed_experts"], num_layers=num_layers, top_k=top_k, what=what)
        yield SampleRoutes(
            ids, length, None if name is None else str(name), None if group is None else str(group), valid
        )


def read_responses(
    responses: Iterable[Mapping[str, Any]],
    *,
    num_experts: int,
    num_layers: int,
    top_k: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Count the routing of ``/generate`` responses.

    Parameters
    ----------
    responses : iterable of mapping
        Each with ``meta_info``: ``routed_experts``, ``prompt_tokens``,
        ``completion_tokens``, ``id``. Rows before ``routed_experts_start_len`` are
        missing from the payload and count as uncovered. Turns of one sample
        are given as ``segments`` of such objects, in order.
    num_experts : int
        E.
    num_layers, top_k : int
        Layers recorded and K.
    moe_layers, physical_to_logical, uncovered, check_distinct
        As for :func:`routepack_opt.formats.vllm.read_outputs`.

    Returns
    -------
    Recording
    """
    named = ((f"response {i}", response) for i, response in enumerate(responses))
    return read_samples(
        _response_samples(named, num_layers, top_k),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


# -------------------------------------------------------------------- recorder


def _mapped(load: AnyArray, physical_to_logical: AnyArray, num_experts: int | None, what: str) -> IntArray:
    """Loads of physical slots [L, slots] added up by logical expert."""
    if load.shape != physical_to_logical.shape:
        raise InvalidInputError(
            f"{what}: counts have shape {list(load.shape)}, last_physical_to_logical_map "
            f"{list(physical_to_logical.shape)}"
        )
    size = int(physical_to_logical.max()) + 1 if num_experts is None else num_experts
    if physical_to_logical.min() < 0 or physical_to_logical.max() >= size:
        raise InvalidInputError(f"{what}: last_physical_to_logical_map names experts outside 0..{size - 1}")
    result = np.zeros((load.shape[0], size), dtype=np.int64)
    for layer in range(load.shape[0]):
        np.add.at(result[layer], physical_to_logical[layer], load[layer].astype(np.int64))
    return result


def read_recorder(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int | None = None,
    num_ranks: int | None = None,
    moe_layers: Sequence[int] | None = None,
) -> IntArray:
    """Loads of micro-steps from expert-distribution recorder dumps, int64 [W, L, E].

    Parameters
    ----------
    paths : sequence of path-like
        One ``stat`` dump (already summed over ranks), or the ``per_pass`` or
        ``per_token`` dumps of all ranks.
    num_experts : int, optional
        E. Default: what the dump says.
    num_ranks : int, optional
        Ranks that recorded. Default: the highest rank found plus one, which
        cannot notice that the last ranks are missing.
    moe_layers : sequence of int, optional
        Layers to keep. Default: layers that saw any token.

    Returns
    -------
    ndarray of int64, shape [W, L, E]
        Micro-steps without a token (unused places of the ring buffer) are left
        out. Ready for :meth:`routepack_opt.problem.Problem.from_window`.

    Raises
    ------
    InvalidInputError
        If a file is refused, the mode is not known, or ranks or their passes are incomplete.
    """
    dumps = []
    for path in paths:
        loaded = read_torch(path)
        if not isinstance(loaded, Mapping):
            raise InvalidInputError(f"{path}: holds a {type(loaded).__name__}; a recorder dump is a dict")
        dumps.append((str(Path(path).name), loaded))
    if not dumps:
        raise InvalidInputError("no recorder dump is given")
    if all("logical_count" in dump for _, dump in dumps):
        if len(dumps) != 1:
            raise InvalidInputError(
                f"{len(dumps)} stat dumps are given; each is summed over all ranks already, so one is read at a time"
            )
        name, dump = dumps[0]
        faults = Faults()
        found = integer_array(
            to_numpy(dump["logical_count"], f"{name}: logical_count"), "logical_count", faults, ndim=3
        )
        faults.raise_if_any(name)
        assert found is not None
        load = found
    elif all("records" in dump for _, dump in dumps):
        load = _summed_passes(dumps, num_experts, num_ranks)
    else:
        name, dump = next((name, dump) for name, dump in dumps if "logical_count" not in dump and "records" not in dump)
        raise InvalidInputError(
            f"{name}: unsupported recorder dump with the keys {', '.join(sorted(map(str, dump)))}; stat dumps have "
            "logical_count, per_pass and per_token dumps have records"
        )
    if num_experts is not None and load.shape[2] != num_experts:
        raise InvalidInputError(f"the dump has {load.shape[2]} experts a layer; num_experts is {num_experts}")
    if load.size and load.min() < 0:
        raise InvalidInputError("the dump holds negative counts")
    totals = load.sum(axis=2)
    if moe_layers is None:
        kept = np.flatnonzero(totals.any(axis=0))
    else:
        kept = np.array([int(layer) for layer in moe_layers], dtype=np.int64)
        outside = kept[(kept < 0) | (kept >= load.shape[1])]
        if len(outside):
            raise InvalidInputError(f"moe_layers names layer {outside[0]}; the dump has {load.shape[1]}")
    window: IntArray = load[:, kept][totals.any(axis=1)]
    if not window.size:
        raise InvalidInputError("the dump holds no routed token")
    return window


def _summed_passes(
    dumps: Sequence[tuple[str, Mapping[str, Any]]], num_experts: int | None, num_ranks: int | None
) -> IntArray:
    passes: dict[int, dict[int, IntArray]] = {}
    ranks = []
    for name, dump in dumps:
        records = dump["records"]
        mapping = dump.get("last_physical_to_logical_map")
        mapping_array = None if mapping is None else to_numpy(mapping, f"{name}: last_physical_to_logical_map")
        of_file = {int(record["rank"]) for record in records if "rank" in record}
        if len(of_file) != 1:
            raise InvalidInputError(f"{name}: records name {len(of_file)} ranks; a dump is of one rank")
        rank = of_file.pop()
        ranks.append(rank)
        for record in records:
            number = int(record["forward_pass_id"])
            what = f"{name}, pass {number}"
            if "global_physical_count" in record:
                physical = to_numpy(record["global_physical_count"], what)
                if mapping_array is None:
                    raise InvalidInputError(f"{name}: last_physical_to_logical_map is missing")
                load = _mapped(physical, mapping_array, num_experts, what)
            elif "topk_ids_of_layer" in record:
                load = _token_load(to_numpy(record["topk_ids_of_layer"], what), mapping_array, num_experts, what)
            else:
                raise InvalidInputError(
                    f"{what}: unsupported record with the keys {', '.join(sorted(map(str, record)))}; "
                    "global_physical_count (per_pass) or topk_ids_of_layer (per_token) was expected"
                )
            of_pass = passes.setdefault(number, {})
            if rank in of_pass:
                load = load + of_pass[rank]
            of_pass[rank] = load
    require_ranks(ranks, num_ranks, "recorder dumps")
    faults = Faults()
    for number, of_pass in sorted(passes.items()):
        missing = sorted(set(ranks) - set(of_pass))
        if missing:
            faults.add(f"pass {number}: rank {missing[0]} has no record of it, {len(of_pass)} of {len(ranks)} ranks do")
    faults.raise_if_any("recorder dumps")
    summed: IntArray = np.stack([np.sum(list(of_pass.values()), axis=0) for _, of_pass in sorted(passes.items())])
    return summed


def _token_load(ids: AnyArray, mapping: AnyArray | None, num_experts: int | None, what: str) -> IntArray:
    """Loads [L, E] of ids [L, tokens, K] padded with -1; physical ids when a map is given."""
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise InvalidInputError(f"{what}: topk_ids_of_layer must be integers [layers, tokens, K]")
    size = mapping.shape[1] if mapping is not None else num_experts
    if size is None:
        raise InvalidInputError(f"{what}: num_experts must be given; the dump has no last_physical_to_logical_map")
    wide = ids.astype(np.int64)
    outside = np.argwhere((wide < -1) | (wide >= size))
    if len(outside):
        layer, token, k = outside[0].tolist()
        raise InvalidInputError(
            f"{what}, layer {layer}, token {token}: id {wide[layer, token, k]} is outside 0..{size - 1}"
        )
    load = np.stack([np.bincount(row[row >= 0], minlength=size) for row in wide.reshape(len(wide), -1)])
    return load if mapping is None else _mapped(load, mapping, num_experts, what)


def micro_steps(load: npt.ArrayLike, *, top_k: int) -> Recording:
    """A batch with one sample per micro-step of a window load [W, L, E].

    Raises
    ------
    InvalidInputError
        If layers of a micro-step differ in their total, or it is no multiple of ``top_k``.
    """
    faults = Faults()
    array = integer_array(load, "load", faults, ndim=3, element="micro-step")
    faults.raise_if_any("window")
    assert array is not None
    totals = array.sum(axis=2)
    for step in np.flatnonzero((totals != totals[:, :1]).any(axis=1) | (totals[:, 0] % top_k != 0)).tolist():
        faults.add(
            f"micro-step {step}: layers routed {totals[step].min()} to {totals[step].max()} tokens; all layers must "
            f"agree on a multiple of top_k {top_k} (a rank or a layer is missing?)"
        )
    faults.raise_if_any("window")
    tokens = totals[:, 0] // top_k
    batch = RoutingBatch.from_arrays(tokens, array, top_k=top_k, routed_tokens=tokens)
    none = np.zeros(len(tokens), dtype=np.int64)
    read = np.repeat(tokens[:, None], array.shape[1], axis=1)
    return Recording(batch, Coverage(tokens, tokens, tokens, read, none, none, none, none, "refuse"))


def read_load(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int | None = None,
    num_ranks: int | None = None,
    moe_layers: Sequence[int] | None = None,
) -> IntArray:
    """Same as :func:`read_recorder`, under the name all formats with window loads share."""
    return read_recorder(paths, num_experts=num_experts, num_ranks=num_ranks, moe_layers=moe_layers)


def read_files(
    paths: Sequence[files.PathLike],
    *,
    num_experts: int,
    top_k: int,
    num_layers: int | None = None,
    num_ranks: int | None = None,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
    progress: bool = False,
) -> Recording:
    """Stream JSON Lines of responses, or read recorder dumps (``.pt``) as micro-steps.

    Parameters
    ----------
    paths : sequence of path-like
    num_experts, top_k : int
        E and K.
    num_layers : int, optional
        Layers recorded; needed for responses, refused for dumps.
    num_ranks : int, optional
        Ranks that recorded; for dumps only.
    moe_layers : sequence of int, optional
        Absolute numbers of the MoE layers.
    physical_to_logical, uncovered, check_distinct, progress
        For responses, as in :func:`read_responses`; recorder dumps bring their own map.

    Returns
    -------
    Recording
    """
    if all(Path(path).suffix == ".pt" for path in paths):
        given = {
            "num_layers": num_layers is not None,
            "physical_to_logical": physical_to_logical is not None,
            "uncovered": uncovered != "refuse",
            "check_distinct": check_distinct,
            "progress": progress,
        }
        faults = [
            f"{name} changes nothing for recorder dumps; leave it out" for name, is_given in given.items() if is_given
        ]
        if faults:
            raise InvalidInputError(faults)
        return micro_steps(
            read_recorder(paths, num_experts=num_experts, num_ranks=num_ranks, moe_layers=moe_layers), top_k=top_k
        )
    faults = []
    if num_layers is None:
        faults.append("num_layers is needed: the payload has no header")
    if num_ranks is not None:
        faults.append("num_ranks changes nothing for responses; leave it out")
    if faults:
        raise InvalidInputError(faults)
    assert num_layers is not None
    return read_samples(
        _response_samples(json_lines(paths, progress=progress), num_layers, top_k),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


# ------------------------------------------------------------------- placement


def export(
    problem: Problem,
    plan: Plan,
    *,
    moe_layers: Sequence[int] | None = None,
    num_hidden_layers: int | None = None,
) -> Export:
    """Placement as the JSON that ``--init-expert-location`` reads.

    Parameters
    ----------
    problem, plan : Problem, Plan
    moe_layers : sequence of int, optional
        Absolute layer numbers of the planned layers; the map of the engine covers
        all hidden layers, dense ones get the identity.
    num_hidden_layers : int, optional
        Layers of the model; given with ``moe_layers``.

    Returns
    -------
    Export
        ``{"physical_to_logical_map": [layers][E]}``.
    """
    maps = placement_maps(problem, plan, moe_layers=moe_layers, num_hidden_layers=num_hidden_layers)
    notes = ["placement only: the packing is not part of this format, and the loss does not depend on placement"]
    if moe_layers is None:
        notes.append(
            f"the map has the {problem.num_layers} planned layers; give moe_layers and num_hidden_layers if the model "
            "has dense layers too"
        )
    return Export("sglang", {"physical_to_logical_map": maps.tolist()}, tuple(notes))


def import_location(
    source: Mapping[str, Any] | files.PathLike, *, ep_size: int, moe_layers: Sequence[int] | None = None
) -> Placement:
    """Turn an expert location (JSON or ``.pt`` file, or its mapping) into a placement that can be scored.

    Parameters
    ----------
    source : mapping or path-like
        With the key ``physical_to_logical_map``.
    ep_size : int
        P.
    moe_layers : sequence of int, optional
        Rows of the map to take.

    Returns
    -------
    Placement
    """
    if isinstance(source, Mapping):
        value: Any = source
    elif Path(source).suffix == ".pt":
        value = read_torch(source)
    else:
        value = files.read_json(source, what="expert location")
    if not isinstance(value, Mapping) or "physical_to_logical_map" not in value:
        raise InvalidInputError("an expert location has the key physical_to_logical_map", context="expert location")
    return import_placement(value["physical_to_logical_map"], ep_size=ep_size, moe_layers=moe_layers)
