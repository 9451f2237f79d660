"""Materialization: move experts, router rows and optimizer state so that the model stays the same function.

A placement π_l is realised by permuting everything that is indexed by expert: expert weights and
biases (separate modules or fused tensors), router rows, router and score-correction biases, load
counters, gradients, and whatever the optimizer keeps in the shape of a parameter (moments, master
weights). Recorded expert ids follow with :meth:`routepack_opt.plan.Placement.remap`. Nothing is
changed before everything has been checked.

Needs the extra ``torch``; importing this module does not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError, MissingExtraError
from routepack_opt.migration import Transfers, slot_sources, transfers
from routepack_opt.plan import Placement

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

    OptimizerState = Mapping[str, Mapping[str, Any]]

__all__ = [
    "Family",
    "PermutedState",
    "TensorPattern",
    "bytes_of_expert",
    "exchange",
    "families",
    "materialize",
    "optimizer_state_by_name",
    "permute_state",
    "register_family",
]


# ----------------------------------------------------------------------------------- families


@dataclass(frozen=True)
class TensorPattern:
    r"""Names of one kind of per-expert tensor.

    Parameters
    ----------
    regex : str
        Matched against the end of a name, at a dot: any prefix (``module.``, ``language_model.``)
        is accepted. Needs a group ``(?P<layer>\d+)``; separate experts also
        ``(?P<expert>\d+)``.
    role : {"expert", "router", "per_expert"}
        ``router`` is the matrix with one row an expert, which every MoE layer must have;
        ``per_expert`` is optional: biases, correction biases, load counters.
    layout : {"fused", "separate", "flat"}
        ``fused``: experts along axis 0; ``separate``: one tensor an expert; ``flat``: experts
        are equal consecutive runs of the flattened tensor (legacy Megatron GroupedMLP).
    """

    regex: str
    role: Literal["expert", "router", "per_expert"]
    layout: Literal["fused", "separate", "flat"] = "fused"

    def __post_init__(self) -> None:
        faults = Faults()
        if self.role not in ("expert", "router", "per_expert"):
            faults.add(f"role {self.role!r}; it must be expert, router or per_expert")
        if self.layout not in ("fused", "separate", "flat"):
            faults.add(f"layout {self.layout!r}; it must be fused, separate or flat")
        try:
            groups = set(re.compile(self.regex).groupindex)
        except re.error as error:
            faults.add(f"regex {self.regex!r} is none: {error}")
        else:
            wanted = {"layer", "expert"} if self.layout == "separate" else {"layer"}
            if groups != wanted:
                faults.add(
                    f"regex {self.regex!r} names the groups {sorted(groups)}; a {self.layout} pattern needs "
                    f"{sorted(wanted)}"
                )
        faults.raise_if_any("tensor pattern")

    def match(self, name: str) -> re.Match[str] | None:
        """Match the end of a parameter name."""
        return re.search(rf"(?:^|\.){self.regex}$", name)


@dataclass(frozen=True)
class Family:
    """Where a family of models keeps what is indexed by expert.

    Parameters
    ----------
    name : str
    patterns : tuple of TensorPattern
    group_limited : bool
        Whether the router may first choose groups of consecutive experts (DeepSeek-V3,
        arXiv:2412.19437 §2.1.2). Such routing is not invariant under every permutation, so the
        caller has to say ``num_routing_groups``.
    """

    name: str
    patterns: tuple[TensorPattern, ...]
    group_limited: bool = False

    def __post_init__(self) -> None:
        roles = {pattern.role for pattern in self.patterns}
        missing = [role for role in ("expert", "router") if role not in roles]
        if missing:
            raise InvalidInputError([f"no pattern has the role {role!r}" for role in missing], context=self.name)


_LAYER = r"layers\.(?P<layer>\d+)\."
_EXPERT = r"(?P<expert>\d+)"


def _family(name: str, *patterns: tuple[str, str, str], group_limited: bool = False) -> Family:
    return Family(
        name,
        tuple(
            TensorPattern(_LAYER + regex, role, layout)  # type: ignore[arg-type]
            for regex, role, layout in patterns
        ),
        group_limited=group_limited,
    )


_GATED = rf"mlp\.experts\.{_EXPERT}\.(?:gate|up|down)_proj\.(?:weight|bias|weight_scale_inv)"
_FUSED = r"mlp\.experts\.(?:gate_up_proj|down_proj)(?:_bias|_blocks|_scales|_scale_inv)?"

_FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _family(
            "qwen3-moe",
            (_GATED, "expert", "separate"),
            (_FUSED, "expert", "fused"),
            (r"mlp\.gate\.weight", "router", "fused"),
        ),
        _family(
            "olmoe",
            (_GATED, "expert", "separate"),
            (_FUSED, "expert", "fused"),
            (r"mlp\.gate\.weight", "router", "fused"),
        ),
        _family(
            "mixtral",
            (rf"block_sparse_moe\.experts\.{_EXPERT}\.w[123]\.weight", "expert", "separate"),
            (r"block_sparse_moe\.gate\.weight", "router", "fused"),
        ),
        _family(
            "deepseek-v3",
            (_GATED, "expert", "separate"),
            (_FUSED, "expert", "fused"),
            (r"mlp\.gate\.weight", "router", "fused"),
            (r"mlp\.gate\.e_score_correction_bias", "per_expert", "fused"),
            group_limited=True,
        ),
        _family(
            "gpt-oss",
            (_FUSED, "expert", "fused"),
            (r"mlp\.router\.weight", "router", "fused"),
            (r"mlp\.router\.bias", "per_expert", "fused"),
        ),
        _family(
            "megatron-core",
            (rf"mlp\.experts\.local_experts\.{_EXPERT}\.linear_fc[12]\.(?:weight|bias)", "expert", "separate"),
            (rf"mlp\.experts\.linear_fc1\.weight{_EXPERT}", "expert", "separate"),
            (rf"mlp\.experts\.linear_fc2\.weight{_EXPERT}", "expert", "separate"),
            (rf"mlp\.experts\.linear_fc1\.bias{_EXPERT}", "expert", "separate"),
            (rf"mlp\.experts\.linear_fc2\.bias{_EXPERT}", "expert", "separate"),
            (r"mlp\.experts\.weight[12]", "expert", "flat"),
            (r"mlp\.router\.weight", "router", "fused"),
            (r"mlp\.router\.bias", "per_expert", "fused"),
            (r"mlp\.router\.expert_bias", "per_expert", "fused"),
            (r"mlp\.router\.(?:local|global)_tokens_per_expert", "per_expert", "fused"),
            group_limited=True,
        ),
    )
}


def families() -> tuple[Family, ...]:
    """Known families, built-in ones first."""
    return tuple(_FAMILIES.values())


def register_family(family: Family) -> None:
    """Make a family known by its name; an equal one may be registered again.

    Raises
    ------
    InvalidInputError
        If another family has that name, or the name is ``auto``.
    """
    if family.name == "auto":
        raise InvalidInputError("the family name 'auto' is taken")
    if _FAMILIES.get(family.name, family) != family:
        raise InvalidInputError(f"a different family is registered as {family.name!r}; choose another name")
    _FAMILIES[family.name] = family


# ------------------------------------------------------------------------------------ binding


@dataclass(frozen=True)
class _Bundle:
    """Tensors of one kind in one layer: one name if fused or flat, one an expert if separate."""

    layer_index: int
    role: str
    layout: str
    names: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.names[0]


def _require_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("torch", extra="torch", purpose="materialization") from error
    return torch


def _bundles_of_family(family: Family, names: Iterable[str]) -> dict[int, dict[tuple[str, str, str], dict[int, str]]]:
    """Layer → (role, layout, name without the expert number) → expert (−1 if not separate) → name."""
    found: dict[int, dict[tuple[str, str, str], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    for name in names:
        for pattern in family.patterns:
            match = pattern.match(name)
            if match is None:
                continue
            expert, stem = -1, name
            if pattern.layout == "separate":
                start, stop = match.span("expert")
                expert, stem = int(match["expert"]), f"{name[:start]}*{name[stop:]}"
            found[int(match["layer"])][pattern.role, pattern.layout, stem][expert] = name
            break
    return found


def _choose_family(family: str | Family, names: Sequence[str], faults: Faults) -> Family | None:
    if isinstance(family, Family):
        return family
    if family != "auto":
        if family not in _FAMILIES:
            faults.add(f"unknown family {family!r}; known are {', '.join(_FAMILIES)}")
        return _FAMILIES.get(family)
    matched: dict[str, frozenset[str]] = {}
    for candidate in _FAMILIES.values():
        found = _bundles_of_family(candidate, names)
        roles = {role for kinds in found.values() for role, _, _ in kinds}
        if {"expert", "router"} <= roles:
            matched[candidate.name] = frozenset(
                name for kinds in found.values() for members in kinds.values() for name in members.values()
            )
    if not matched:
        faults.add(
            f"no family matches names like {', '.join(names[:3]) or '(none)'}; known are {', '.join(_FAMILIES)}, "
            "others can be passed as a Family"
        )
        return None
    most = max(len(members) for members in matched.values())
    best = [name for name, members in matched.items() if len(members) == most]
    if len({matched[name] for name in best}) > 1:
        faults.add(f"the names fit {' and '.join(best)} equally well; say which family it is")
        return None
    return _FAMILIES[best[0]]


def _bind(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    family: str | Family,
    num_layers: int,
    num_experts: int | None,
    num_held: int,
    layers: Sequence[int] | None,
    faults: Faults,
) -> list[_Bundle]:
    """Find every per-expert tensor.

    ``num_held`` is how many experts this process holds, ``num_experts`` how many rows a router
    must have, if that is known.
    """
    chosen = _choose_family(family, list(shapes), faults)
    if chosen is None:
        return []
    found = _bundles_of_family(chosen, shapes)
    with_experts = sorted(layer for layer, kinds in found.items() if any(kind[0] == "expert" for kind in kinds))
    for layer in sorted(set(found) - set(with_experts)):
        if any(kind[0] == "router" for kind in found[layer]):
            faults.add(f"layer {layer}: a router but no expert")
    if layers is not None:
        absent = [layer for layer in layers if layer not in with_experts]
        for layer in absent:
            faults.add(f"layer {layer} is named as a MoE layer but has no expert")
        if len(set(layers)) != len(layers):
            faults.add(f"layers {list(layers)} names a layer twice")
        with_experts = [layer for layer in layers if layer in found]
        if len(layers) != num_layers:
            faults.add(f"layers names {len(layers)} layers, the placement has {num_layers}")
    elif len(with_experts) != num_layers:
        faults.add(
            f"{len(with_experts)} layers with experts ({chosen.name}: {_span(with_experts)}), the placement has "
            f"{num_layers}"
        )
    bundles = []
    for index, layer in enumerate(with_experts):
        if not any(kind[0] == "router" for kind in found[layer]):
            faults.add(f"layer {layer}: experts but no router")
        for (role, layout, stem), members in found[layer].items():
            wanted = num_held if role == "expert" else num_experts
            if wanted is None:
                continue
            if layout == "separate":
                if sorted(members) != list(range(wanted)):
                    missing = sorted(set(range(wanted)) - set(members))
                    surplus = sorted(set(members) - set(range(wanted)))
                    parts = [f"{_span(missing)} missing"] if missing else []
                    parts += [f"{_span(surplus)} beyond the last"] if surplus else []
                    faults.add(f"{stem}: {len(members)} experts, not {wanted}; {', '.join(parts)}")
                    continue
                names = tuple(members[expert] for expert in range(wanted))
                if len({shapes[name] for name in names}) > 1:
                    odd = next(name for name in names if shapes[name] != shapes[names[0]])
                    faults.add(f"{odd} has shape {shapes[odd]}, {names[0]} has {shapes[names[0]]}; experts must agree")
                    continue
            else:
                names, shape = (members[-1],), shapes[members[-1]]
                if layout == "fused" and (not shape or shape[0] != wanted):
                    noun = "router rows" if role == "router" else "experts" if role == "expert" else "entries"
                    held = shape[0] if shape else 0
                    faults.add(f"{names[0]} has shape {shape}: {held} {noun}, not {wanted}")
                    continue
                if layout == "flat" and int(np.prod(shape)) % wanted:
                    faults.add(f"{names[0]} has shape {shape}, which does not divide into {wanted} experts")
                    continue
            bundles.append(_Bundle(index, role, layout, names))
    _refuse_unclaimed(found, shapes, faults)
    return bundles


def _refuse_unclaimed(
    found: Mapping[int, Mapping[tuple[str, str, str], Mapping[int, str]]],
    shapes: Mapping[str, tuple[int, ...]],
    faults: Faults,
) -> None:
    """Refuse tensors beside routers and experts that no pattern claims: left behind, they would be wrong."""
    claimed: set[str] = set()
    rows_of_container: dict[str, int | None] = {}
    for kinds in found.values():
        for (role, layout, stem), members in kinds.items():
            claimed.update(members.values())
            container = stem.partition("*")[0] if layout == "separate" else stem
            container = container[: container.rfind(".") + 1]
            if role == "expert":
                rows_of_container[container] = None
            elif role == "router":
                rows_of_container[container] = shapes[members[-1]][0] if shapes[members[-1]] else None
    for name, shape in shapes.items():
        if name in claimed or 0 in shape:
            continue
        for container, num_rows in rows_of_container.items():
            if name.startswith(container) and (num_rows is None or shape[:1] == (num_rows,)):
                faults.add(
                    f"{name}, shape {shape}, stands among per-expert tensors and no pattern of the family claims it"
                )
                break


def _span(numbers: Sequence[int]) -> str:
    """Short listing of numbers."""
    if len(numbers) > 6:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"


def _check_routing_groups(
    sources: IntArray, family: Family | None, num_routing_groups: int | None, faults: Faults
) -> None:
    num_experts = sources.shape[1]
    if num_routing_groups is None:
        if family is not None and family.group_limited:
            faults.add(
                f"family {family.name} may route by groups of experts: say num_routing_groups (1 if it does not, or "
                "if routing is always replayed)"
            )
        return
    if num_routing_groups < 1 or num_experts % num_routing_groups:
        faults.add(f"num_routing_groups is {num_routing_groups}; it must divide {num_experts} experts")
        return
    group_size = num_experts // num_routing_groups
    groups = (sources // group_size).reshape(len(sources), num_routing_groups, group_size)
    for layer, group in np.argwhere((groups != groups[:, :, :1]).any(2))[:5]:
        faults.add(
            f"placement layer {layer}: slots of routing group {group} are filled from groups "
            f"{sorted(set(groups[layer, group].tolist()))}; group-limited routing would choose other experts"
        )


def _check_optimizer_state(
    bundles: Sequence[_Bundle],
    shapes: Mapping[str, tuple[int, ...]],
    optimizer_state: OptimizerState,
    faults: Faults,
    *,
    complete: bool,
) -> None:
    """Refuse optimizer tensors that are not shaped like their parameter.

    ``complete``: separate experts must all keep the same entries, since a receiver has to know
    what comes.
    """
    torch = _require_torch()
    for name in optimizer_state:
        if name not in shapes:
            faults.add(f"optimizer state of {name!r}, which is no tensor of the model")
    for bundle in bundles:
        entries = [optimizer_state.get(name, {}) for name in bundle.names]
        for name, entry in zip(bundle.names, entries, strict=True):
            for key, value in entry.items():
                if isinstance(value, torch.Tensor) and value.ndim and tuple(value.shape) != shapes[name]:
                    faults.add(
                        f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, the parameter "
                        f"{shapes[name]}; it cannot be moved with the experts"
                    )
        if not complete or bundle.layout != "separate":
            continue
        for name, entry in zip(bundle.names, entries, strict=True):
            if set(entry) != set(entries[0]):
                faults.add(
                    f"optimizer state of {name} keeps {sorted(entry)}, {bundle.label} keeps {sorted(entries[0])}"
                )
            for key, value in entry.items():
                if not isinstance(value, torch.Tensor):
                    faults.add(f"optimizer state {key!r} of {name} is a {type(value).__name__}; only tensors are sent")


def _sharded(tensors: Mapping[str, Any]) -> list[str]:
    """Names of DTensors, whose shape is that of the whole tensor though the values are elsewhere."""
    return [name for name, tensor in tensors.items() if hasattr(tensor, "to_local")]


def _permuted(tensor: Tensor, sources: Tensor, layout: str) -> Tensor:
    """Fresh tensor with experts in new order."""
    sources = sources.to(tensor.device)
    if layout == "fused":
        return tensor.detach().index_select(0, sources)
    flat = tensor.detach().reshape(len(sources), -1)
    return flat.index_select(0, sources).reshape(tensor.shape)


# ------------------------------------------------------------------------------ pure function


@dataclass(frozen=True)
class PermutedState:
    """What `permute_state` returns: the tensors of the model and the optimizer's, by name."""

    state: dict[str, Tensor]
    optimizer_state: dict[str, dict[str, Any]]


def permute_state(
    state: Mapping[str, Tensor],
    placement: Placement,
    *,
    previous: Placement | None = None,
    optimizer_state: OptimizerState | None = None,
    family: str | Family = "auto",
    layers: Sequence[int] | None = None,
    num_routing_groups: int | None = None,
) -> PermutedState:
    """Put a whole (unsharded) state dict into the layout of a placement.

    Parameters
    ----------
    state : mapping of str to Tensor
        Parameters and buffers by name, e.g. ``module.state_dict()``. Left as it is.
    placement : Placement
        Wanted layout, [L, E].
    previous : Placement, optional
        Layout of ``state``; default: logical order (expert e in slot e). With
        ``placement=Placement.contiguous(...)`` and ``previous=`` the layout in use, the logical
        state comes back bit for bit.
    optimizer_state : mapping, optional
        Parameter name → entries of the optimizer, as `optimizer_state_by_name` gives them. Every
        tensor with axes must have the shape of its parameter.
    family : str or Family
        Name patterns; ``auto`` takes the known family that recognises most names. Say the family
        of models that only differ in how they route: DeepSeek-V2's names are Qwen3-MoE's.
    layers : sequence of int, optional
        Layer number in the names of every layer of the placement; default: the layers that
        have experts, ascending.
    num_routing_groups : int, optional
        Groups of consecutive experts that the router chooses first; required for families that
        may do so. The placement must then keep groups together. 1 where routing is replayed.

    Returns
    -------
    PermutedState
        Fresh tensors where something is indexed by expert, the same objects elsewhere.

    Raises
    ------
    InvalidInputError
        All faults at once: missing or surplus experts, router rows or layers, optimizer state of
        another shape, placements that do not fit, groups torn apart.
    MissingExtraError
        If torch is not installed.
    """
    torch = _require_torch()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    bundles, sources = _validated(
        shapes,
        placement,
        previous,
        family=family,
        layers=layers,
        num_routing_groups=num_routing_groups,
        optimizer_state=optimizer_state or {},
        sharded=_sharded(state),
    )
    new_state = dict(state)
    new_optimizer_state = {name: dict(entry) for name, entry in (optimizer_state or {}).items()}
    for bundle in bundles:
        index = torch.from_numpy(sources[bundle.layer_index].copy())
        if bundle.layout == "separate":
            order = index.tolist()
            for name, source in zip(bundle.names, order, strict=True):
                new_state[name] = state[bundle.names[source]].detach().clone()
                new_optimizer_state.pop(name, None)
            for name, source in zip(bundle.names, order, strict=True):
                entry = (optimizer_state or {}).get(bundle.names[source])
                if entry is not None:
                    new_optimizer_state[name] = {
                        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in entry.items()
                    }
            continue
        name = bundle.names[0]
        new_state[name] = _permuted(state[name], index, bundle.layout)
        for key, value in new_optimizer_state.get(name, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim:
                new_optimizer_state[name][key] = _permuted(value, index, bundle.layout)
    return PermutedState(new_state, new_optimizer_state)


def _validated(
    shapes: Mapping[str, tuple[int, ...]],
    placement: Placement,
    previous: Placement | None,
    *,
    family: str | Family,
    layers: Sequence[int] | None,
    num_routing_groups: int | None,
    optimizer_state: OptimizerState,
    sharded: Sequence[str],
) -> tuple[list[_Bundle], IntArray]:
    faults = Faults()
    faults.extend([f"{name} is sharded over processes; use exchange on the local tensors" for name in sharded])
    old = previous or Placement.contiguous(placement.num_layers, placement.num_experts, ep_size=placement.ep_size)
    bundles = _bind(
        shapes,
        family=family,
        num_layers=placement.num_layers,
        num_experts=placement.num_experts,
        num_held=placement.num_experts,
        layers=layers,
        faults=faults,
    )
    try:
        sources = slot_sources(placement, old)
    except InvalidInputError as error:
        faults.extend(error.faults)
    else:
        _check_routing_groups(sources, _choose_family(family, list(shapes), Faults()), num_routing_groups, faults)
    _check_optimizer_state(bundles, shapes, optimizer_state, faults, complete=False)
    faults.raise_if_any("materialization")
    return bundles, sources


# ----------------------------------------------------------------------------------- in place


def optimizer_state_by_name(
    module: nn.Module, optimizer: Optimizer, *, master_parameters: Mapping[str, Tensor] | None = None
) -> dict[str, MutableMapping[str, Any]]:
    """The optimizer's own entries by parameter name; parameters without state are left out.

    Parameters
    ----------
    module : torch.nn.Module
    optimizer : torch.optim.Optimizer
        Steps the module's parameters, or ``master_parameters``.
    master_parameters : mapping, optional
        Parameter name → high-precision copy, when the optimizer steps those.

    Raises
    ------
    InvalidInputError
        If the optimizer steps a tensor that is neither.
    """
    faults = Faults()
    found = _entries_by_name(module, optimizer, master_parameters or {}, faults)
    faults.raise_if_any("optimizer")
    return found


def _entries_by_name(
    module: nn.Module, optimizer: Optimizer, master_parameters: Mapping[str, Tensor], faults: Faults
) -> dict[str, MutableMapping[str, Any]]:
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    name_of |= {id(tensor): name for name, tensor in master_parameters.items()}
    found: dict[str, MutableMapping[str, Any]] = {}
    for g, group in enumerate(optimizer.param_groups):
        for k, parameter in enumerate(group["params"]):
            name = name_of.get(id(parameter))
            if name is None:
                faults.add(
                    f"optimizer group {g}, entry {k}, shape {tuple(parameter.shape)}: neither a parameter of the "
                    "module nor a master parameter"
                )
            elif parameter in optimizer.state:
                found[name] = optimizer.state[parameter]
    return found


def materialize(
    module: nn.Module,
    placement: Placement,
    *,
    previous: Placement | None = None,
    optimizer: Optimizer | None = None,
    master_parameters: Mapping[str, Tensor] | None = None,
    family: str | Family = "auto",
    layers: Sequence[int] | None = None,
    num_routing_groups: int | None = None,
) -> None:
    """Put a module and its optimizer into the layout of a placement, in place.

    Parameters, buffers, gradients (``grad`` and Megatron's ``main_grad``), master parameters and
    every optimizer entry shaped like its parameter are permuted; the module then computes the
    same function on slot numbers instead of expert numbers, and the next optimizer step is the
    same step. Parameters stay the same objects.

    Parameters
    ----------
    module : torch.nn.Module
        The whole model, unsharded.
    placement, previous, family, layers, num_routing_groups
        As in `permute_state`.
    optimizer : torch.optim.Optimizer, optional
        Leave it out only if there is none yet: moments left behind belong to other experts.
    master_parameters : mapping of str to Tensor, optional
        High-precision copies that the optimizer steps instead of the module's parameters.

    Raises
    ------
    InvalidInputError
        All faults at once, before anything is changed.
    """
    torch = _require_torch()
    masters = dict(master_parameters or {})
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = Faults()
    for name, master in masters.items():
        if shapes.get(name) != tuple(master.shape):
            faults.add(f"master parameter {name} has shape {tuple(master.shape)}, the model's {shapes.get(name)}")
    held = {} if optimizer is None else _entries_by_name(module, optimizer, masters, faults)
    try:
        bundles, sources = _validated(
            shapes,
            placement,
            previous,
            family=family,
            layers=layers,
            num_routing_groups=num_routing_groups,
            optimizer_state=held,
            sharded=_sharded(tensors),
        )
    except InvalidInputError as error:
        faults.extend(error.faults)
    else:
        seen: dict[int, str] = {}
        for name in (name for bundle in bundles for name in bundle.names):
            if seen.setdefault(id(tensors[name]), name) != name:
                faults.add(f"{name} and {seen[id(tensors[name])]} are one tensor; it would be permuted twice")
    faults.raise_if_any("materialization")

    stepped = {**dict(module.named_parameters()), **masters}
    with torch.no_grad():
        for bundle in bundles:
            index = torch.from_numpy(sources[bundle.layer_index].copy())
            for owners in ([tensors[name] for name in bundle.names], [masters.get(name) for name in bundle.names]):
                present = [owner for owner in owners if owner is not None]
                if present:
                    _permute_in_place(present, index, bundle.layout)
                    _permute_gradients(present, index, bundle.layout)
            if optimizer is None:
                continue
            if bundle.layout == "separate":
                entries = [held.get(name) for name in bundle.names]
                for name, source in zip(bundle.names, index.tolist(), strict=True):
                    entry = entries[source]
                    if entry is None:
                        optimizer.state.pop(stepped[name], None)
                    else:
                        optimizer.state[stepped[name]] = entry
            else:
                for value in held.get(bundle.names[0], {}).values():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        _permute_in_place([value], index, bundle.layout)


def _permute_in_place(tensors: Sequence[Tensor], sources: Tensor, layout: str) -> None:
    """Permute one fused tensor, or trade the values of separate ones."""
    if layout != "separate":
        tensors[0].copy_(_permuted(tensors[0], sources, layout))
        return
    copies = [tensor.detach().clone() for tensor in tensors]
    for tensor, source in zip(tensors, sources.tolist(), strict=True):
        tensor.copy_(copies[source])


def _permute_gradients(owners: Sequence[Tensor], sources: Tensor, layout: str) -> None:
    """Permute ``main_grad`` by value (it is a view of a buffer), ``grad`` by value or by owner."""
    attached = [getattr(owner, "main_grad", None) for owner in owners]
    main = [gradient for gradient in attached if gradient is not None]
    if main:
        _permute_in_place(main, sources, layout)
    gradients = [owner.grad for owner in owners]
    if layout == "separate":
        # An expert that saw no token has no gradient; that, too, moves with it.
        for owner, source in zip(owners, sources.tolist(), strict=True):
            owner.grad = gradients[source]
    elif gradients[0] is not None:
        _permute_in_place([gradients[0]], sources, layout)


# ------------------------------------------------------------------------------------ sharded


def _pieces(
    bundles: Sequence[_Bundle],
    tensors: Mapping[str, Tensor],
    optimizer_state: OptimizerState,
    num_held: int,
) -> list[tuple[int, list[Tensor]]]:
    """Every movable piece as (layer index, one view a held expert), in an order all ranks share."""
    torch = _require_torch()
    pieces: list[tuple[int, list[Tensor]]] = []
    for bundle in bundles:
        if bundle.role != "expert":
            continue
        keys = sorted(
            key for key, value in optimizer_state.get(bundle.label, {}).items() if isinstance(value, torch.Tensor)
        )
        sources: list[Mapping[str, Tensor]] = [tensors]
        sources += [{name: optimizer_state[name][key] for name in bundle.names} for key in keys]
        for source in sources:
            if bundle.layout == "separate":
                pieces.append((bundle.layer_index, [source[name].detach() for name in bundle.names]))
            else:
                tensor = source[bundle.names[0]].detach()
                if tensor.ndim:
                    views = tensor if bundle.layout == "fused" else tensor.view(num_held, -1)
                    pieces.append((bundle.layer_index, list(views.unbind(0))))
    return pieces


def bytes_of_expert(
    state: Mapping[str, Tensor],
    *,
    num_layers: int,
    num_experts: int,
    optimizer_state: OptimizerState | None = None,
    family: str | Family = "auto",
    layers: Sequence[int] | None = None,
) -> IntArray:
    """Bytes that move with one expert: its weights, biases and optimizer entries.

    Parameters
    ----------
    state, optimizer_state, family, layers
        As in `permute_state`.
    num_layers, num_experts : int
        L and the number of experts that ``state`` holds (E, or E / P on one rank).

    Returns
    -------
    ndarray of int64, shape [L]
        For :func:`routepack_opt.migration.transfers`. Router rows are left out: routers are
        replicated, every rank reorders its own.

    Raises
    ------
    InvalidInputError
        All faults of the state at once.
    """
    _require_torch()
    faults = Faults()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    bundles = _bind(
        shapes,
        family=family,
        num_layers=num_layers,
        num_experts=None,
        num_held=num_experts,
        layers=layers,
        faults=faults,
    )
    _check_optimizer_state(bundles, shapes, optimizer_state or {}, faults, complete=False)
    faults.raise_if_any("bytes of an expert")
    sizes = np.zeros(num_layers, dtype=np.int64)
    for layer, views in _pieces(bundles, state, optimizer_state or {}, num_experts):
        sizes[layer] += max(view.numel() * view.element_size() for view in views)
    return sizes


def _listed(faults: Faults) -> list[str]:
    try:
        faults.raise_if_any()
    except InvalidInputError as error:
        return list(error.faults)
    return []


def exchange(
    state: Mapping[str, Tensor],
    placement: Placement,
    previous: Placement,
    *,
    group: ProcessGroup | None = None,
    optimizer_state: OptimizerState | None = None,
    family: str | Family = "auto",
    layers: Sequence[int] | None = None,
    num_routing_groups: int | None = None,
) -> Transfers:
    """Move experts between the ranks of an expert-parallel group, in place.

    Every rank of the group calls it with its own tensors. Experts travel by the transfer list:
    one message a link and step, in bytes, holding weights, biases and optimizer entries of all
    experts that take that link. Routers and what else has one entry an expert are replicated;
    every rank reorders its copy. Gradients do not travel: call it between optimizer step and
    next backward pass.

    Parameters
    ----------
    state : mapping of str to Tensor
        This rank's tensors: E / P experts, numbered from 0 as Megatron-Core modules do (rank p
        holds slots p·E/P onwards), and whole routers.
    placement, previous : Placement
        Wanted and present layout; P is the size of the group. `migration.relabel` first, or
        experts move for the sake of labels.
    group : torch.distributed.ProcessGroup, optional
        The expert-parallel group; default: all processes.
    optimizer_state, family, layers, num_routing_groups
        As in `permute_state`; names and numbers are local. Separate experts must keep equal
        entries, all tensors.

    Returns
    -------
    Transfers
        What moved, with bytes.

    Raises
    ------
    InvalidInputError
        On every rank, before anything is sent, if any rank finds a fault or ranks disagree about
        the placements or about what an expert consists of.
    """
    torch = _require_torch()
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    kept = optimizer_state or {}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    num_held = placement.experts_per_rank
    faults = Faults()
    if placement.ep_size != world:
        faults.add(f"the placement is for {placement.ep_size} EP ranks, the group has {world}")
    bundles = _bind(
        shapes,
        family=family,
        num_layers=placement.num_layers,
        num_experts=placement.num_experts,
        num_held=num_held,
        layers=layers,
        faults=faults,
    )
    _check_optimizer_state(bundles, shapes, kept, faults, complete=True)
    moves: Transfers | None = None
    pieces: list[tuple[int, list[Tensor]]] = []
    sources = np.zeros((0, 0), dtype=np.int64)
    try:
        sources = slot_sources(placement, previous)
        moves = transfers(placement, previous)
    except InvalidInputError as error:
        faults.extend(error.faults)
    else:
        _check_routing_groups(sources, _choose_family(family, list(shapes), Faults()), num_routing_groups, faults)
    if not faults:
        pieces = _pieces(bundles, state, kept, num_held)
    signature = (
        placement.slot_of_expert.tolist(),
        previous.slot_of_expert.tolist(),
        [(layer, str(views[0].dtype), tuple(views[0].shape)) for layer, views in pieces],
    )
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (_listed(faults), signature), group=group)
    together = Faults()
    for r, (listed, _) in enumerate(gathered):
        together.extend([f"rank {r}: {fault}" for fault in listed])
    if not together:
        for r, (_, other) in enumerate(gathered):
            for noun, mine, theirs in zip(
                ("placement", "previous placement", "tensors of an expert"), gathered[0][1], other, strict=True
            ):
                if mine != theirs:
                    together.add(f"rank {r} has another {noun} than rank 0")
    together.raise_if_any("exchange")
    assert moves is not None

    pieces_of_layer: dict[int, list[list[Tensor]]] = defaultdict(list)
    sizes = np.zeros(placement.num_layers, dtype=np.int64)
    for layer, views in pieces:
        pieces_of_layer[layer].append(views)
        sizes[layer] += views[0].numel() * views[0].element_size()
    moves = transfers(placement, previous, bytes_of_expert=sizes)

    sends: dict[int, list[Tensor]] = defaultdict(list)
    expected: dict[int, list[Tensor]] = defaultdict(list)
    arrived: list[tuple[Tensor, Tensor]] = []
    for move in moves:
        for views in pieces_of_layer[move.layer]:
            if move.from_rank == rank == move.to_rank:
                arrived.append((views[move.to_slot % num_held], views[move.from_slot % num_held].clone()))
            elif move.from_rank == rank:
                sends[move.to_rank].append(views[move.from_slot % num_held].reshape(-1).view(torch.uint8))
            elif move.to_rank == rank:
                expected[move.from_rank].append(views[move.to_slot % num_held])
    peers = [r if group is None else dist.get_global_rank(group, r) for r in range(world)]
    operations: list[Any] = []
    buffers: dict[int, Tensor] = {}
    for shift in range(1, world):
        to_rank, from_rank = (rank + shift) % world, (rank - shift) % world
        if to_rank in sends:
            operations.append(dist.P2POp(dist.isend, torch.cat(sends[to_rank]), peers[to_rank], group))
        if from_rank in expected:
            num_bytes = sum(view.numel() * view.element_size() for view in expected[from_rank])
            buffers[from_rank] = torch.empty(num_bytes, dtype=torch.uint8, device=expected[from_rank][0].device)
            operations.append(dist.P2POp(dist.irecv, buffers[from_rank], peers[from_rank], group))
    for request in dist.batch_isend_irecv(operations) if operations else []:
        request.wait()
    for from_rank, views in expected.items():
        start = 0
        for view in views:
            stop = start + view.numel() * view.element_size()
            # A copy of the slice, since a view with a wider type needs an aligned start.
            arrived.append((view, buffers[from_rank][start:stop].clone().view(view.dtype).reshape(view.shape)))
            start = stop
    with torch.no_grad():
        for view, value in arrived:
            view.copy_(value)
        for bundle in bundles:
            if bundle.role == "expert":
                continue
            index = torch.from_numpy(sources[bundle.layer_index].copy())
            _permute_in_place([state[name] for name in bundle.names], index, bundle.layout)
            for name in bundle.names:
                for value in kept.get(name, {}).values():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        _permute_in_place([value], index, bundle.layout)
    return moves
