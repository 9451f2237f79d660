"""Planner specs: the grammar, the built-in table, third-party entry points.

A spec is ``placer+packer`` or one joint planner; each part is a name with
optional parameters, Python literals by keyword::

    contiguous+ffd
    lpt(refine=True)+annealing(num_chains=8)
    cpsat
    alternating(rounds=2)

The same text is canonical in the API, on the command line, in study files and
in tables. An alias stands for a component with parameters.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
from functools import cache
from importlib import metadata
from typing import Any

from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown
from routepack_opt.solver import Packer, Placer, Planner, component_spec

__all__ = ["ALIASES", "BUILT_IN", "Description", "canonical", "component", "names", "parse", "planners"]

#: Built-in components: name → where it lives. Nothing is imported before it is asked for.
BUILT_IN: dict[str, str] = {
    "contiguous": "routepack_opt.solvers.lpt:Contiguous",
    "lpt": "routepack_opt.solvers.lpt:Lpt",
    "bldm": "routepack_opt.solvers.bldm:Bldm",
    "ffd": "routepack_opt.solvers.seeds:Ffd",
    "window_shuffle": "routepack_opt.solvers.seeds:WindowShuffle",
    "randomized_best_fit": "routepack_opt.solvers.seeds:RandomizedBestFit",
    "edp_aware_pair": "routepack_opt.solvers.seeds:EdpAwarePair",
    "annealing": "routepack_opt.solvers.annealing:Annealing",
    "leveling": "routepack_opt.solvers.leveling:Leveling",
    "replacing": "routepack_opt.solvers.replacing:Replacing",
    "alternating": "routepack_opt.solvers.alternating:Alternating",
    "cpsat": "routepack_opt.solvers.cpsat:CpSat",
    "milp": "routepack_opt.solvers.milp:Milp",
    "columns": "routepack_opt.solvers.columns:Columns",
    "round_robin_experts": "routepack_opt.solvers.practice:RoundRobinExperts",
    "eplb_balanced": "routepack_opt.solvers.practice:EplbBalanced",
    "round_robin": "routepack_opt.solvers.practice:RoundRobin",
    "next_fit": "routepack_opt.solvers.practice:NextFit",
    "ffd_dealt": "routepack_opt.solvers.practice:FfdDealt",
    "mffd_dealt": "routepack_opt.solvers.practice:MffdDealt",
    "karmarkar_karp": "routepack_opt.solvers.practice:KarmarkarKarp",
    "kk_ffd_fallback": "routepack_opt.solvers.practice:KkFfdFallback",
    "split_sort_chunk": "routepack_opt.solvers.practice:SplitSortChunk",
    "kk_swap": "routepack_opt.solvers.practice:KkSwap",
    "least_loaded": "routepack_opt.solvers.practice:LeastLoaded",
}

#: Named variants.
ALIASES: dict[str, str] = {
    "length_annealing": "annealing(routing_weight=0)",
}

ENTRY_POINT_GROUP = "routepack_opt.solvers"


@dataclasses.dataclass(frozen=True)
class Description:
    """One component as the table of planners shows it.

    Attributes
    ----------
    name : str
    roles : tuple of str
        Of ``placer``, ``packer``, ``planner``.
    parameters : mapping of str to object
        Defaults by name.
    summary : str
        First line of the docstring.
    unavailable : str or None
        Why it cannot run here.
    """

    name: str
    roles: tuple[str, ...]
    parameters: dict[str, Any]
    summary: str
    unavailable: str | None


@cache
def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def names() -> list[str]:
    """Every component and alias name, sorted."""
    return sorted({*BUILT_IN, *ALIASES, *_entry_points()})


@cache
def _class(name: str) -> type:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    if name in _entry_points():
        loaded = _entry_points()[name].load()
        if not isinstance(loaded, type):
            raise InvalidInputError(f"entry point {name!r} of group {ENTRY_POINT_GROUP} is no class")
        return loaded
    raise InvalidInputError(refuse_unknown([name], names(), "planner component"))


def _parse_component(text: str) -> tuple[str, dict[str, Any]]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidInputError(f"{text!r} is no planner component; write name or name(parameter=value, ...)") from None
    if isinstance(tree, ast.Name):
        return tree.id, {}
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise InvalidInputError(f"{text!r} is no planner component; write name or name(parameter=value, ...)")
    faults = Faults()
    if tree.args:
        faults.add(f"{text!r}: parameters are given by name, such as {tree.func.id}(parameter=value)")
    parameters: dict[str, Any] = {}
    for keyword in tree.keywords:
        if keyword.arg is None:
            faults.add(f"{text!r}: ** is not part of the grammar")
            continue
        if keyword.arg in parameters:
            faults.add(f"{text!r}: parameter {keyword.arg!r} stands twice")
        try:
            parameters[keyword.arg] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            faults.add(f"{text!r}: the value of {keyword.arg!r} is no Python literal (text needs quotes)")
    faults.raise_if_any("planner spec")
    return tree.func.id, parameters


def component(text: str) -> Any:
    """Build one component from its spec.

    Parameters
    ----------
    text : str
        ``name`` or ``name(parameter=value, ...)``.

    Returns
    -------
    object
        A frozen dataclass with one or more of ``place``, ``pack``, ``plan``.

    Raises
    ------
    InvalidInputError
        If the name or a parameter is unknown (with the nearest known one), or
        the component refuses a value.
    """
    name, parameters = _parse_component(text)
    if name in ALIASES:
        name, preset = _parse_component(ALIASES[name])
        repeated = sorted(set(preset) & set(parameters))
        if repeated:
            raise InvalidInputError(f"{text!r}: the alias already sets {', '.join(repeated)}", context="planner spec")
        parameters = {**preset, **parameters}
    cls = _class(name)
    known = [parameter.name for parameter in dataclasses.fields(cls) if parameter.init]
    faults = refuse_unknown(list(parameters), known, f"parameter of {name}")
    if faults and not known:
        faults = [f"{name} has no parameters; got {', '.join(parameters)}"]
    if faults:
        raise InvalidInputError(faults, context="planner spec")
    try:
        return cls(**parameters)
    except InvalidInputError as error:
        raise InvalidInputError(error.faults, context=f"planner spec {text!r}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(str(error), context=f"planner spec {text!r}") from error


def split(spec: str) -> list[str]:
    """Split a spec at its top-level ``+``."""
    parts, depth, quote, start = [], 0, "", 0
    for position, letter in enumerate(spec):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "+" and depth == 0:
            parts.append(spec[start:position])
            start = position + 1
    return [*parts, spec[start:]]


def parse(spec: str) -> tuple[Any, Any] | Any:
    """Build the components of a planner spec.

    Returns
    -------
    (placer, packer) or planner

    Raises
    ------
    InvalidInputError
        If a name or parameter is unknown, or a component has not the role its place asks for.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise InvalidInputError(f"planner spec {spec!r} is empty or no string; try 'lpt+annealing'")
    parts = split(spec)
    if len(parts) > 2:
        raise InvalidInputError(
            f"planner spec {spec!r} has {len(parts)} parts; write placer+packer or one joint planner"
        )
    faults = Faults()
    built = []
    for part in parts:
        try:
            built.append(component(part))
        except InvalidInputError as error:
            faults.extend(error.faults)
    faults.raise_if_any(f"planner spec {spec!r}")
    if len(built) == 1:
        if not isinstance(built[0], Planner):
            role = "placer" if isinstance(built[0], Placer) else "packer"
            hint = f"{spec}+annealing" if role == "placer" else f"lpt+{spec}"
            raise InvalidInputError(f"{spec!r} is a {role}, not a joint planner; write for instance {hint!r}")
        return built[0]
    if not isinstance(built[0], Placer):
        faults.add(f"{parts[0]!r} places no experts; the part before + must be a placer")
    if not isinstance(built[1], Packer):
        faults.add(f"{parts[1]!r} packs no samples; the part after + must be a packer")
    faults.raise_if_any(f"planner spec {spec!r}")
    return built[0], built[1]


def planners() -> list[Description]:
    """Every component with its roles, parameters and whether it can run here."""
    rows = []
    for name in names():
        if name in ALIASES:
            built = component(name)
            summary = f"Short for {ALIASES[name]}."
        else:
            try:
                cls = _class(name)
            except ImportError as error:
                rows.append(Description(name, (), {}, "", f"cannot be imported: {error}"))
                continue
            built = cls()
            summary = (cls.__doc__ or "").strip().split("\n")[0]
        roles = tuple(
            role
            for role, protocol in (("placer", Placer), ("packer", Packer), ("planner", Planner))
            if isinstance(built, protocol)
        )
        parameters = {parameter.name: getattr(built, parameter.name) for parameter in dataclasses.fields(built)}
        reason = built.available() if hasattr(built, "available") else None
        rows.append(Description(name, roles, parameters, summary, reason))
    return rows


def canonical(built: tuple[Any, Any] | Any) -> str:
    """The canonical text of parsed components: defaults left out, an alias where one says exactly this."""
    parts = built if isinstance(built, tuple) else (built,)
    return "+".join(_alias_of(component_spec(part)) for part in parts)


def _alias_of(spec: str) -> str:
    for alias, target in ALIASES.items():
        if spec.partition("(")[0] == target.partition("(")[0] and spec == component_spec(component(target)):
            return alias
    return spec
