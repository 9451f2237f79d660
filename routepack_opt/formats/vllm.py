"""vLLM: routed experts of requests in, expert maps out.

Shapes seen in the wild, all read without importing vLLM:

- one array per completion, [rows, layers, K], with rows = tokens or tokens - 1 of
  prompt and completion together, over all hidden layers (dense ones zero) or the
  MoE layers only, int32, uint8 or uint16;
- the prompt's part apart, in ``RequestOutput.prompt_routed_experts``, prefix-cached
  rows -1, and None for a preempted request;
- over HTTP: base64 of a ``.npy`` file, or nested lists, optionally without a first
  part of the prompt (``routed_experts_prompt_start``), which then counts as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats.eplb import placement_maps
from routepack_opt.formats.payloads import (
    AnyArray,
    Export,
    Recording,
    SampleRoutes,
    decode_base64,
    integer_ids,
    json_lines,
    json_samples,
    npy_bytes,
    read_samples,
)
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem

__all__ = ["decode", "export", "read_files", "read_outputs"]

LAYOUTS = ("physical-to-logical", "expert-map")


def decode(payload: Any, what: str = "routed_experts") -> AnyArray:
    """Ids [rows, layers, K] of an HTTP payload: base64 of ``.npy`` bytes, or nested lists.

    Raises
    ------
    InvalidInputError
        If the payload is neither, truncated or pickled.
    """
    if isinstance(payload, str | bytes):
        return integer_ids(npy_bytes(decode_base64(payload, what), what), what)
    return integer_ids(payload, what)


def _completions(outputs: Iterable[Any]) -> Iterator[SampleRoutes]:
    for number, request in enumerate(outputs):
        request_id = str(getattr(request, "request_id", number))
        prompt = getattr(request, "prompt_token_ids", None)
        if prompt is None:
            raise InvalidInputError(f"request {request_id}: prompt_token_ids is None; the length is unknown")
        prompt_part = getattr(request, "prompt_routed_experts", None)
        for index, completion in enumerate(request.outputs):
            name = f"{request_id}/{getattr(completion, 'index', index)}"
            part = getattr(completion, "routed_experts", None)
            if part is None:
                raise InvalidInputError(
                    f"request {name}: routed_experts is None; the request was preempted, or routing was not recorded"
                )
            ids = integer_ids(part, f"request {name}")
            length = len(prompt) + len(completion.token_ids)
            if prompt_part is not None:
                first = integer_ids(prompt_part, f"request {name}, prompt")
                if len(first) != len(prompt):
                    raise InvalidInputError(f"request {name}: {len(first)} prompt rows for {len(prompt)} prompt tokens")
                if first.shape[1:] != ids.shape[1:]:
                    raise InvalidInputError(
                        f"request {name}: prompt ids have shape {list(first.shape)}, completion ids {list(ids.shape)}"
                    )
                ids = np.concatenate([first, ids])
            yield SampleRoutes(ids, length, name, request_id)


def read_outputs(
    outputs: Iterable[Any],
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    check_distinct: bool = False,
) -> Recording:
    """Count the routing of ``LLM.generate`` outputs.

    Parameters
    ----------
    outputs : iterable of RequestOutput-like
        Each with ``prompt_token_ids`` and ``outputs`` (``token_ids``,
        ``routed_experts``), optionally ``request_id`` and ``prompt_routed_experts``.
        Every completion is a sample, every request a prompt group.
    num_experts : int
        E.
    moe_layers : sequence of int, optional
        Absolute numbers of the MoE layers, needed when ids cover dense layers too.
    physical_to_logical : array-like of int, shape [L, slots], optional
        Needed when the engine balanced experts and recorded physical ids.
    uncovered, check_distinct
        As in :func:`routepack_opt.counting.count_routing`.

    Returns
    -------
    Recording

    Raises
    ------
    InvalidInputError
        Naming the request, if routes are None, shapes differ, or ids are refused.
    """
    return read_samples(
        _completions(outputs),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def _choices(lines: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """One object per sample: a response with choices is taken apart."""
    for where, value in lines:
        if "choices" not in value:
            yield where, value
            continue
        shared = {key: value[key] for key in ("prompt_token_ids", "prompt_tokens", "group_id", "uid") if key in value}
        usage = value.get("usage")
        if isinstance(usage, dict) and "prompt_tokens" in usage:
            shared.setdefault("prompt_tokens", usage["prompt_tokens"])
        name = value.get("request_id", value.get("id"))
        if name is not None:
            shared.setdefault("group_id", name)
        choices = value["choices"]
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise InvalidInputError(f"{where}: choices must be a list of objects")
        for k, choice in enumerate(choices):
            sample = {**shared, **choice}
            if name is not None:
                sample["sample_id"] = f"{name}/{choice.get('index', k)}"
            if "token_ids" in choice and "prompt_token_ids" not in sample:
                sample.setdefault("completion_tokens", len(choice["token_ids"]))
            yield where, sample


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
    """Stream JSON Lines of HTTP responses, or of one object per sample.

    A response has ``choices`` (``token_ids``, ``routed_experts``) and
    ``prompt_token_ids`` or ``usage.prompt_tokens``; an object per sample has
    ``routed_experts`` (or ``segments`` of turns) and its length. Parameters as in
    :func:`read_outputs`; ``progress`` shows a bar.
    """
    return read_samples(
        json_samples(_choices(json_lines(paths, progress=progress)), decode),
        num_experts=num_experts,
        moe_layers=moe_layers,
        physical_to_logical=physical_to_logical,
        uncovered=uncovered,
        check_distinct=check_distinct,
    )


def export(
    problem: Problem,
    plan: Plan,
    *,
    layout: str = "physical-to-logical",
    moe_layers: Sequence[int] | None = None,
    num_hidden_layers: int | None = None,
) -> Export:
    """Placement as JSON lists.

    Parameters
    ----------
    problem, plan : Problem, Plan
    layout : {"physical-to-logical", "expert-map"}
        ``physical-to-logical``: one list per layer, entry s the logical expert in
        physical slot s; slot s is on EP rank s // (E / P). ``expert-map``: [L][P][E],
        the local slot of expert e on rank p, -1 where the rank does not own it.
    moe_layers : sequence of int, optional
        Absolute layer numbers of the L planned layers, with ``num_hidden_layers``:
        dense layers get the identity.
    num_hidden_layers : int, optional
        Layers of the model.

    Returns
    -------
    Export
    """
    if layout not in LAYOUTS:
        raise InvalidInputError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
    expert_of_slot = placement_maps(problem, plan, moe_layers=moe_layers, num_hidden_layers=num_hidden_layers)
    notes = ("placement only: the packing is not part of this format, and the loss does not depend on placement",)
    if layout == "physical-to-logical":
        return Export("vllm", expert_of_slot.tolist(), notes)
    num_layers, num_experts = expert_of_slot.shape
    per_rank = num_experts // problem.ep_size
    maps = np.full((num_layers, problem.ep_size, num_experts), -1, dtype=np.int64)
    for layer in range(num_layers):
        slots = np.arange(num_experts)
        maps[layer, slots // per_rank, expert_of_slot[layer]] = slots % per_rank
    return Export("vllm", maps.tolist(), notes)
