"""What engines record in, what trainers consume out: one module a framework, both directions.

Reading
    ``READERS`` maps a format name to ``"module:function"``. Every function is
    ``read_files(paths, *, num_experts, uncovered="refuse", ...) -> Recording``
    with ``paths`` a sequence of path-likes and further keywords of its own;
    ``Recording`` is the pair (:class:`~routepack_opt.batch.RoutingBatch`,
    :class:`~routepack_opt.counting.Coverage`). :func:`read` looks the name up
    and refuses keywords the reader does not know. The modules also read objects
    in memory (``vllm.read_outputs``, ``verl.read``, ...), without importing any
    framework.

Writing
    ``EXPORTERS`` maps a target name to ``"module:function"``. Every function is
    ``export(problem, plan, *, ...) -> Export``: what the target reads, exactly,
    plus notes people should see. :func:`export` writes it to a file and returns
    the notes. Targets that take a packing have an importer, so that a packing made
    elsewhere becomes a :class:`~routepack_opt.plan.Packing` to be scored, broken
    capacities included.

Window loads
    ``trtllm`` and the recorder dumps of ``sglang`` hold loads of micro-steps, not
    of samples; read as a batch, every micro-step is one sample. Use
    ``read_load`` of these modules with
    :meth:`~routepack_opt.problem.Problem.from_window` to plan placement only.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from routepack_opt import files
from routepack_opt.errors import InvalidInputError, refuse_unknown
from routepack_opt.formats.payloads import Export, Recording
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem

__all__ = ["EXPORTERS", "READERS", "export", "option_names", "read"]

READERS: Final[dict[str, str]] = {
    "ids": "routepack_opt.formats.ids:read_files",
    "megatron": "routepack_opt.formats.megatron:read_files",
    "nemo-rl": "routepack_opt.formats.nemo_rl:read_files",
    "prime-rl": "routepack_opt.formats.prime_rl:read_files",
    "sglang": "routepack_opt.formats.sglang:read_files",
    "trtllm": "routepack_opt.formats.trtllm:read_files",
    "verl": "routepack_opt.formats.verl:read_files",
    "vllm": "routepack_opt.formats.vllm:read_files",
}
"""Payload formats: name to reader."""

EXPORTERS: Final[dict[str, str]] = {
    "eplb": "routepack_opt.formats.eplb:export",
    "megatron": "routepack_opt.formats.megatron:export",
    "megatron-placement": "routepack_opt.formats.megatron:export_placement",
    "miles": "routepack_opt.formats.grids:export_slime",
    "nemo-rl": "routepack_opt.formats.nemo_rl:export",
    "prime-rl": "routepack_opt.formats.prime_rl:export",
    "sglang": "routepack_opt.formats.sglang:export",
    "slime": "routepack_opt.formats.grids:export_slime",
    "torchtitan": "routepack_opt.formats.grids:export_torchtitan",
    "trtllm": "routepack_opt.formats.trtllm:export",
    "tunix": "routepack_opt.formats.grids:export_tunix",
    "verl": "routepack_opt.formats.verl:export",
    "vllm": "routepack_opt.formats.vllm:export",
}
"""Targets of a plan: name to exporter."""


def _load(table: dict[str, str], name: str, what: str) -> Callable[..., Any]:
    unknown = refuse_unknown([name], sorted(table), what)
    if unknown:
        raise InvalidInputError(unknown)
    module, _, function = table[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def option_names(name: str, *, export: bool = False) -> tuple[str, ...]:
    """Keywords a reader (or, with ``export``, an exporter) takes, in its own order."""
    function = _load(EXPORTERS if export else READERS, name, "target" if export else "payload format")
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


def _refuse_options(name: str, function: Callable[..., Any], options: dict[str, Any], *, export: bool) -> None:
    """Refuse options that the format does not know, and the lack of those it cannot do without."""
    known = option_names(name, export=export)
    faults = refuse_unknown(list(options), known, f"option of {name!r}")
    if faults and not known:
        faults = [f"{name!r} takes no options; got {', '.join(options)}"]
    given = {*options, "num_experts"}
    for parameter in inspect.signature(function).parameters.values():
        required = parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        if required and parameter.name not in given:
            faults.append(f"{name!r} needs the option {parameter.name}")
    if faults:
        raise InvalidInputError(faults)


def read(
    name: str, paths: Sequence[files.PathLike], *, num_experts: int, uncovered: str = "refuse", **options: Any
) -> Recording:
    """Read recorded routing from files.

    Parameters
    ----------
    name : str
        One of ``READERS``.
    paths : sequence of path-like
        Files, or the folder of a calibration.
    num_experts : int
        E, logical experts of a layer.
    uncovered : {"refuse", "scale", "ignore"}
        What to do with tokens that have no route; see
        :func:`routepack_opt.counting.count_routing`.
    **options
        Keywords of the format's ``read_files``; others are refused.

    Returns
    -------
    Recording
        (batch, coverage).

    Raises
    ------
    InvalidInputError
        If the name or an option is unknown, or the reader refuses the files.
    """
    function = _load(READERS, name, "payload format")
    _refuse_options(name, function, options, export=False)
    if isinstance(paths, str | os.PathLike):
        raise InvalidInputError(f"paths is {str(paths)!r}; give a list of files")
    if not paths:
        raise InvalidInputError(f"no file is given to read {name!r} from")
    found: Recording = function(paths, num_experts=num_experts, uncovered=uncovered, **options)
    return found


def export(name: str, problem: Problem, plan: Plan, path: files.PathLike, **options: Any) -> tuple[str, ...]:
    """Write a plan in a framework's own form.

    Parameters
    ----------
    name : str
        One of ``EXPORTERS``.
    problem, plan : Problem, Plan
    path : path-like
        File to write.
    **options
        Keywords of the target's exporter; others are refused.

    Returns
    -------
    tuple of str
        What the file does not say by itself.

    Raises
    ------
    InvalidInputError
        If the name or an option is unknown, or the target cannot express the plan;
        the option that helps is named.
    """
    function = _load(EXPORTERS, name, "target")
    _refuse_options(name, function, options, export=True)
    found: Export = function(problem, plan, **options)
    found.save(path)
    return found.notes
