"""Integer linear models of packing, placing and joint planning, as plain data for exact backends.

:mod:`routepack_opt.solvers.cpsat` and :mod:`routepack_opt.solvers.milp`
translate the same :class:`LinearModel`: the same variables and constraints by
the same names in the same order, so that a difference between the backends is
a difference between engines.

With x[i, r, d] = 1 where sample i lies in cell (r, d), a packing model is

- ``assign``: every sample in one cell; ``capacity``: aligned tokens of a cell;
  ``filled`` and ``equal``: the optional rules on samples a cell and a DP slot;
- ``attention``: A[s, r, g] ≥ Σ_i work[s, i] · x[i, r, d] for the slots d of shard g;
- ``expert``: M[l, r, g] ≥ Σ_i W[i, l, p] · Σ_{d in g} x[i, r, d] for the ranks p;
- ``block``, ``shard``, ``total``, ``row``: J = Σ_s A + Σ_l M and the three levels.

A joint model decides ownership o[l, e, p] too. The load q[r, g, l, e, p] an
expert brings to a rank is Σ_i a[i, l, e] · Σ_d x[i, r, d] on its owner and 0
elsewhere, which ``carried`` (Σ_p q = load) and ``owned`` (q ≤ o · largest load)
say linearly and exactly.

**Symmetry.** Shards, rows of a shard, slots of a block and rank labels of a
layer are interchangeable. Value precedence keeps one labelling of each plan:
samples come in descending order of length, experts in descending order of
load, and label k may be used only after label k − 1 was (Law & Lee 2004,
doi:10.1007/978-3-540-30201-8_28, here as linear inequalities on prefixes).

**Scaling.** Common factors of the attention work of a class and of all loads
are divided out; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray
from routepack_opt.bounds import placement_bound
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem

__all__ = [
    "BuildStopped",
    "Constraint",
    "LinearModel",
    "PackingModel",
    "PlacementModel",
    "Redundancy",
    "joint_model",
    "packing_model",
    "placement_model",
]


#: Value precedence is written for this many of the longest samples; later ones find nearly every label in use.
_ORDERED_SAMPLES = 64


@dataclass(frozen=True)
class Redundancy:
    """What a model holds beyond a correct formulation; none of it cuts off every optimum.

    Attributes
    ----------
    symmetry : bool
        Value precedence on shards, rows, slots and ranks.
    rank_sums : bool
        P · M ≥ K · tokens of the block, from the loads of all ranks.
    window_loads : bool
        Σ_{r,g} M[l, r, g] is at least the largest rank load of the window.
    attention_averages : bool
        |𝒟_g| · A[s, r, g] is at least the attention work of the block.
    area_bounds : bool
        Constant lower bounds on the levels: the averages over blocks and shards.
    """

    symmetry: bool = True
    rank_sums: bool = True
    window_loads: bool = True
    attention_averages: bool = True
    area_bounds: bool = True


class BuildStopped(Exception):
    """The time ran out, or a stop came, while a model was built."""


@dataclass(frozen=True)
class Constraint:
    """One linear constraint: Σ coefficients · variables, sense, right-hand side; all integers."""

    name: str
    variables: tuple[int, ...]
    coefficients: tuple[int, ...]
    sense: str
    right: int


@dataclass
class LinearModel:
    """Integer variables and linear constraints by name, in a fixed order.

    Attributes
    ----------
    names : list of str
    lower, upper : list of int
        Domain of each variable.
    derived : list of bool
        True where a minimal solution makes the variable integral by itself (the
        maxima and levels), so that a MIP engine need not branch on it.
    constraints : list of Constraint
    stop : callable, optional
        Asked while a model is built; True raises :class:`BuildStopped`. Large
        models take longer to write down than some callers have.
    """

    names: list[str] = field(default_factory=list)
    lower: list[int] = field(default_factory=list)
    upper: list[int] = field(default_factory=list)
    derived: list[bool] = field(default_factory=list)
    constraints: list[Constraint] = field(default_factory=list)
    stop: Callable[[], bool] | None = None

    def variable(self, name: str, upper: int, *, lower: int = 0, derived: bool = False) -> int:
        """Add a variable and return its index."""
        self.names.append(name)
        self.lower.append(int(lower))
        self.upper.append(int(upper))
        self.derived.append(derived)
        return len(self.names) - 1

    def add(self, name: str, terms: Sequence[tuple[int, int]], sense: str, right: int) -> None:
        """Add a constraint from (coefficient, variable) pairs; zero coefficients are dropped."""
        self.poll(len(self.constraints))
        kept = [(int(coefficient), variable) for coefficient, variable in terms if coefficient]
        self.constraints.append(
            Constraint(
                name,
                tuple(variable for _, variable in kept),
                tuple(coefficient for coefficient, _ in kept),
                sense,
                int(right),
            )
        )

    def poll(self, position: int) -> None:
        """Raise :class:`BuildStopped` if building is to end; asks at every 32nd position.

        Raises
        ------
        BuildStopped
        """
        if self.stop is not None and position % 32 == 0 and self.stop():
            raise BuildStopped

    @property
    def largest_activity(self) -> int:
        """Largest Σ |coefficient| · largest |value| + |right-hand side| of any constraint."""
        return max(
            (
                abs(constraint.right)
                + sum(
                    abs(c) * max(abs(self.lower[v]), abs(self.upper[v]))
                    for c, v in zip(constraint.coefficients, constraint.variables, strict=True)
                )
                for constraint in self.constraints
            ),
            default=0,
        )

    def broken(self, values: Sequence[int]) -> list[str]:
        """Names of the constraints and domains that an assignment breaks, computed in exact integers."""
        found = [
            name
            for name, value, lower, upper in zip(self.names, values, self.lower, self.upper, strict=True)
            if not lower <= value <= upper
        ]
        for constraint in self.constraints:
            total = sum(c * int(values[v]) for c, v in zip(constraint.coefficients, constraint.variables, strict=True))
            holds = {
                "<=": total <= constraint.right,
                ">=": total >= constraint.right,
                "==": total == constraint.right,
            }[constraint.sense]
            if not holds:
                found.append(constraint.name)
        return found


def _common_factor(values: npt.NDArray[np.int64]) -> int:
    return (int(np.gcd.reduce(values, axis=None)) if values.size else 0) or 1


@dataclass
class PackingModel:
    """A packing or joint model with the way back to decisions.

    Attributes
    ----------
    linear : LinearModel
    problem : Problem
    placement : Placement or None
        Fixed placement; None in a joint model.
    levels : tuple of int
        Variables of the three levels.
    unit : int
        Work units of one unit of a level variable.
    """

    linear: LinearModel
    problem: Problem
    placement: Placement | None
    levels: tuple[int, int, int]
    unit: int
    _order: IntArray
    _cells: dict[tuple[int, int, int], int]
    _attention: dict[tuple[int, int, int], tuple[int, int]]
    _expert: dict[tuple[int, int, int], int]
    _block: dict[tuple[int, int], int]
    _shard: list[int]
    _load_factor: int
    _owner: dict[tuple[int, int, int], int]
    _carried: dict[tuple[int, int, int, int, int], int]
    _symmetry: bool

    def packing(self, values: Sequence[float]) -> Packing:
        """Read the packing off an assignment of all variables; the largest x of a sample counts."""
        rows = np.zeros(self.problem.num_samples, dtype=np.int64)
        slots = np.zeros(self.problem.num_samples, dtype=np.int64)
        best = np.full(self.problem.num_samples, -1.0)
        for (i, r, d), variable in self._cells.items():
            if values[variable] > best[i]:
                best[i], rows[i], slots[i] = values[variable], r, d
        return Packing.from_arrays(rows, slots)

    def placement_of(self, values: Sequence[float]) -> Placement:
        """Read the placement off an assignment, or return the fixed one.

        Raises
        ------
        InvalidInputError
            If the ownership read is no placement.
        """
        if self.placement is not None:
            return self.placement
        problem = self.problem
        ranks = np.zeros((problem.num_layers, problem.num_experts), dtype=np.int64)
        best = np.full((problem.num_layers, problem.num_experts), -1.0)
        for (layer, e, p), variable in self._owner.items():
            if values[variable] > best[layer, e]:
                best[layer, e], ranks[layer, e] = values[variable], p
        return Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)

    def assignment(self, placement: Placement, packing: Packing) -> list[int]:
        """Values of all variables for a feasible plan, relabelled to obey the symmetry constraints.

        Parameters
        ----------
        placement : Placement
            Ignored where the model fixes one.
        packing : Packing

        Returns
        -------
        list of int
            In the order of the variables.
        """
        problem = self.problem
        rows, slots = packing.row_of_sample, packing.dp_slot_of_sample
        if self._symmetry:
            rows, slots = _canonical_packing(problem, self._order, rows, slots)
        shards = problem.shard_of_slot[slots]
        fixed = self.placement
        if fixed is None:
            ranks = placement.rank_of_expert
            if self._symmetry:
                ranks = _canonical_ranks(ranks, problem.counts.sum(axis=0, dtype=np.int64))
            fixed = Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)
        values = [0] * len(self.linear.names)
        for i in range(problem.num_samples):
            values[self._cells[i, int(rows[i]), int(slots[i])]] = 1
        for (s, r, g), (variable, factor) in self._attention.items():
            cells = [
                int(problem.attention_work[s, (rows == r) & (slots == slot)].sum()) // factor
                for slot in problem.shards[g]
            ]
            values[variable] = max(cells)
        load = fixed.rank_load(problem)
        for (layer, r, g), variable in self._expert.items():
            inside = (rows == r) & (shards == g)
            values[variable] = int(load[inside, layer].sum(axis=0, dtype=np.int64).max()) // self._load_factor
        for (layer, e, p), variable in self._owner.items():
            values[variable] = int(fixed.rank_of_expert[layer, e] == p)
        for (r, g, layer, e, p), variable in self._carried.items():
            if fixed.rank_of_expert[layer, e] == p:
                inside = (rows == r) & (shards == g)
                values[variable] = int(problem.counts[inside, layer, e].sum(dtype=np.int64)) // self._load_factor
        blocks = {}
        for (r, g), variable in self._block.items():
            work = sum(
                values[self._attention[s, r, g][0]] * self._attention[s, r, g][1]
                for s in range(len(problem.cost.attention))
            )
            work += sum(values[self._expert[layer, r, g]] for layer in range(problem.num_layers)) * (
                problem.expert_unit * self._load_factor
            )
            blocks[r, g] = values[variable] = work // self.unit
        sums = [sum(blocks[r, g] for r in range(problem.num_rows)) for g in range(problem.num_shards)]
        for g, variable in enumerate(self._shard):
            values[variable] = sums[g]
        values[self.levels[0]] = max(sums)
        values[self.levels[1]] = sum(sums)
        values[self.levels[2]] = max(blocks.values())
        return values


def _canonical_packing(problem: Problem, order: IntArray, rows: IntArray, slots: IntArray) -> tuple[IntArray, IntArray]:
    """Relabel shards, rows and slots by first use in the order of samples."""
    shards = problem.shard_of_slot[slots]
    new_shard: dict[int, int] = {}
    new_row: dict[int, dict[int, int]] = {}
    new_slot: dict[tuple[int, int], dict[int, int]] = {}
    new_rows, new_slots = np.empty_like(rows), np.empty_like(slots)
    for i in order.tolist():
        g, r, d = int(shards[i]), int(rows[i]), int(slots[i])
        h = new_shard.setdefault(g, len(new_shard))
        row_names = new_row.setdefault(g, {})
        row = row_names.setdefault(r, len(row_names))
        # Slots keep their column through all rows of the shard where slots must hold equal numbers of samples.
        names = new_slot.setdefault((g, -1 if problem.equal_samples_per_slot else r), {})
        k = names.setdefault(d, len(names))
        new_rows[i], new_slots[i] = row, problem.shards[h][k]
    return new_rows, new_slots


def _canonical_ranks(ranks: IntArray, loads: IntArray) -> IntArray:
    """Relabel the ranks of each layer by first use in descending order of expert load."""
    out = np.empty_like(ranks)
    for layer in range(ranks.shape[0]):
        names: dict[int, int] = {}
        for e in np.argsort(-loads[layer], kind="stable").tolist():
            out[layer, e] = names.setdefault(int(ranks[layer, e]), len(names))
    return out


def packing_model(
    problem: Problem,
    placement: Placement,
    redundancy: Redundancy,
    *,
    stop: Callable[[], bool] | None = None,
) -> PackingModel:
    """Model of packing under a fixed placement.

    Parameters
    ----------
    problem : Problem
    placement : Placement
    redundancy : Redundancy
    stop : callable, optional
        Asked while the model is built; True raises :class:`BuildStopped`.

    Returns
    -------
    PackingModel
    """
    return _model(problem, placement, redundancy, stop)


def joint_model(problem: Problem, redundancy: Redundancy, *, stop: Callable[[], bool] | None = None) -> PackingModel:
    """Model of placement and packing together; sizes grow with R · G · L · E · P, so for small problems."""
    return _model(problem, None, redundancy, stop)


def _model(
    problem: Problem, placement: Placement | None, redundancy: Redundancy, stop: Callable[[], bool] | None
) -> PackingModel:
    linear = LinearModel(stop=stop)
    num_samples, num_rows, num_slots = problem.num_samples, problem.num_rows, problem.dp_size
    num_shards, num_layers, ep_size = problem.num_shards, problem.num_layers, problem.ep_size
    num_experts, num_classes = problem.num_experts, len(problem.cost.attention)
    joint = placement is None and num_layers > 0
    samples, rows = range(num_samples), range(num_rows)
    shards = [list(shard) for shard in problem.shards]
    order = np.argsort(-problem.lengths, kind="stable").astype(np.int64)
    aligned = problem.aligned_lengths

    # Exact scaling: loads and each class's attention work are counted in their greatest common divisors.
    if placement is None or not num_layers:
        loads = problem.counts.astype(np.int64)
    else:
        loads = placement.rank_load(problem).astype(np.int64)
    load_factor = _common_factor(loads)
    loads = loads // load_factor
    factors = [_common_factor(problem.attention_work[s]) for s in range(num_classes)]
    attention = [problem.attention_work[s] // factors[s] for s in range(num_classes)]
    weights = [*factors, *([problem.expert_unit * load_factor] if num_layers else [])]
    unit = gcd(*weights)
    expert_weight = problem.expert_unit * load_factor // unit
    attention_weights = [factor // unit for factor in factors]
    tokens = loads.sum(axis=2) if num_layers else np.zeros((num_samples, 0), dtype=np.int64)  # [N, L]
    window = loads.sum(axis=0)  # [L, P] or, joint, [L, E]

    # Largest conceivable values: everything in one block.
    attention_top = [int(work.sum()) for work in attention]
    expert_top = [int(tokens[:, layer].sum()) for layer in range(num_layers)]
    work_top = sum(w * top for w, top in zip(attention_weights, attention_top, strict=True))
    work_top += expert_weight * sum(expert_top)

    # Variables.
    x = {
        (i, r, d): linear.variable(f"x_{i}_{r}_{d}", 1) for i in order.tolist() for r in rows for d in range(num_slots)
    }
    owner: dict[tuple[int, int, int], int] = {}
    carried: dict[tuple[int, int, int, int, int], int] = {}
    if joint:
        for layer in range(num_layers):
            for e in range(num_experts):
                for p in range(ep_size):
                    owner[layer, e, p] = linear.variable(f"o_{layer}_{e}_{p}", 1)
        for r in rows:
            for g in range(num_shards):
                for layer in range(num_layers):
                    for e in range(num_experts):
                        for p in range(ep_size):
                            carried[r, g, layer, e, p] = linear.variable(
                                f"q_{r}_{g}_{layer}_{e}_{p}", int(window[layer, e]), derived=True
                            )
    a_max: dict[tuple[int, int, int], tuple[int, int]] = {}
    m_max: dict[tuple[int, int, int], int] = {}
    block: dict[tuple[int, int], int] = {}
    for r in rows:
        for g in range(num_shards):
            for s in range(num_classes):
                a_max[s, r, g] = (linear.variable(f"A_{s}_{r}_{g}", attention_top[s], derived=True), factors[s])
            for layer in range(num_layers):
                m_max[layer, r, g] = linear.variable(f"M_{layer}_{r}_{g}", expert_top[layer], derived=True)
            block[r, g] = linear.variable(f"J_{r}_{g}", work_top, derived=True)
    shard = [linear.variable(f"U_{g}", work_top, derived=True) for g in range(num_shards)]
    levels = (
        linear.variable("max_shard_work", work_top, derived=True),
        linear.variable("total_work", work_top, derived=True),
        linear.variable("max_row_work", work_top, derived=True),
    )

    # Which cells are feasible.
    for i in samples:
        linear.add(f"assign_{i}", [(1, x[i, r, d]) for r in rows for d in range(num_slots)], "==", 1)
    for r in rows:
        for d in range(num_slots):
            terms = [(int(aligned[i]), x[i, r, d]) for i in samples]
            linear.add(f"capacity_{r}_{d}", terms, "<=", problem.capacity)
            if problem.min_samples_per_cell:
                linear.add(f"filled_{r}_{d}", [(1, x[i, r, d]) for i in samples], ">=", 1)
    if problem.equal_samples_per_slot:
        for d in range(num_slots):
            terms = [(1, x[i, r, d]) for i in samples for r in rows]
            linear.add(f"equal_{d}", terms, "==", num_samples // num_slots)

    # Which placements are.
    if joint:
        for layer in range(num_layers):
            for e in range(num_experts):
                linear.add(f"place_{layer}_{e}", [(1, owner[layer, e, p]) for p in range(ep_size)], "==", 1)
            for p in range(ep_size):
                terms = [(1, owner[layer, e, p]) for e in range(num_experts)]
                linear.add(f"slots_{layer}_{p}", terms, "==", num_experts // ep_size)

    # What a block costs.
    for r in rows:
        for g, slots in enumerate(shards):
            inside = [(i, x[i, r, d]) for i in samples for d in slots]
            for s in range(num_classes):
                for d in slots:
                    terms = [(int(attention[s][i]), x[i, r, d]) for i in samples]
                    linear.add(f"attention_{s}_{r}_{g}_{d}", [*terms, (-1, a_max[s, r, g][0])], "<=", 0)
                if redundancy.attention_averages and len(slots) > 1:
                    terms = [(int(attention[s][i]), variable) for i, variable in inside]
                    linear.add(f"average_{s}_{r}_{g}", [*terms, (-len(slots), a_max[s, r, g][0])], "<=", 0)
            for layer in range(num_layers):
                top = m_max[layer, r, g]
                if joint:
                    for e in range(num_experts):
                        terms = [(int(loads[i, layer, e]), variable) for i, variable in inside]
                        terms += [(-1, carried[r, g, layer, e, p]) for p in range(ep_size)]
                        linear.add(f"carried_{r}_{g}_{layer}_{e}", terms, "==", 0)
                        for p in range(ep_size):
                            pair = [(1, carried[r, g, layer, e, p]), (-int(window[layer, e]), owner[layer, e, p])]
                            linear.add(f"owned_{r}_{g}_{layer}_{e}_{p}", pair, "<=", 0)
                for p in range(ep_size):
                    if joint:
                        terms = [(1, carried[r, g, layer, e, p]) for e in range(num_experts)]
                    else:
                        terms = [(int(loads[i, layer, p]), variable) for i, variable in inside]
                    linear.add(f"expert_{layer}_{r}_{g}_{p}", [*terms, (-1, top)], "<=", 0)
                if redundancy.rank_sums and ep_size > 1:
                    terms = [(int(tokens[i, layer]), variable) for i, variable in inside]
                    linear.add(f"ranks_{layer}_{r}_{g}", [*terms, (-ep_size, top)], "<=", 0)
            terms = [(attention_weights[s], a_max[s, r, g][0]) for s in range(num_classes)]
            terms += [(expert_weight, m_max[layer, r, g]) for layer in range(num_layers)]
            linear.add(f"block_{r}_{g}", [*terms, (-1, block[r, g])], "==", 0)
            linear.add(f"row_{r}_{g}", [(1, block[r, g]), (-1, levels[2])], "<=", 0)
    for g in range(num_shards):
        linear.add(f"shard_{g}", [*((1, block[r, g]) for r in rows), (-1, shard[g])], "==", 0)
        linear.add(f"first_{g}", [(1, shard[g]), (-1, levels[0])], "<=", 0)
    linear.add("total", [*((1, variable) for variable in shard), (-1, levels[1])], "==", 0)

    # What follows anyway.
    least_loads = placement_bound(window, ep_size).tolist() if joint else window.max(axis=1, initial=0).tolist()
    if redundancy.window_loads:
        for layer in range(num_layers):
            terms = [(1, m_max[layer, r, g]) for r in rows for g in range(num_shards)]
            linear.add(f"window_{layer}", terms, ">=", least_loads[layer])
    if redundancy.area_bounds:
        size = len(shards[0])
        least = expert_weight * sum(least_loads)
        least += sum(w * -(-top // size) for w, top in zip(attention_weights, attention_top, strict=True))
        linear.add("area_total", [(1, levels[1])], ">=", least)
        linear.add("area_shard", [(1, levels[0])], ">=", -(-least // num_shards))
        linear.add("area_row", [(1, levels[2])], ">=", -(-least // (num_rows * num_shards)))
        linear.add("area_levels", [(num_shards, levels[0]), (-1, levels[1])], ">=", 0)
    if redundancy.symmetry:
        _precedence(linear, problem, order, x)
        if joint:
            for layer in range(num_layers):
                experts = np.argsort(-window[layer], kind="stable").tolist()
                for position, e in enumerate(experts):
                    for p in range(1, ep_size):
                        terms = [(-1, owner[layer, before, p - 1]) for before in experts[:position]]
                        linear.add(f"rank_order_{layer}_{e}_{p}", [(1, owner[layer, e, p]), *terms], "<=", 0)
    return PackingModel(
        linear=linear,
        problem=problem,
        placement=placement if placement is not None or joint else _no_placement(problem),
        levels=levels,
        unit=unit,
        _order=order,
        _cells=x,
        _attention=a_max,
        _expert=m_max,
        _block=block,
        _shard=shard,
        _load_factor=load_factor,
        _owner=owner,
        _carried=carried,
        _symmetry=redundancy.symmetry,
    )


def _no_placement(problem: Problem) -> Placement:
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def _precedence(
    linear: LinearModel,
    problem: Problem,
    order: IntArray,
    x: dict[tuple[int, int, int], int],
) -> None:
    """Label k of shards, rows and slots only after label k − 1, in descending order of length."""
    samples, rows = order[:_ORDERED_SAMPLES].tolist(), range(problem.num_rows)
    for position, i in enumerate(samples):
        before = samples[:position]
        for g, slots in enumerate(problem.shards):
            if g:
                terms = [(1, x[i, r, d]) for r in rows for d in slots]
                terms += [(-1, x[j, r, d]) for j in before for r in rows for d in problem.shards[g - 1]]
                linear.add(f"shard_order_{i}_{g}", terms, "<=", 0)
            for r in rows:
                if r:
                    terms = [(1, x[i, r, d]) for d in slots]
                    terms += [(-1, x[j, r - 1, d]) for j in before for d in slots]
                    linear.add(f"row_order_{i}_{r}_{g}", terms, "<=", 0)
                for previous, d in pairwise(slots):
                    if problem.equal_samples_per_slot:
                        if r == 0:
                            terms = [(1, x[i, row, d]) for row in rows]
                            terms += [(-1, x[j, row, previous]) for j in before for row in rows]
                            linear.add(f"slot_order_{i}_{g}_{d}", terms, "<=", 0)
                    else:
                        terms = [(1, x[i, r, d]), *((-1, x[j, r, previous]) for j in before)]
                        linear.add(f"slot_order_{i}_{r}_{g}_{d}", terms, "<=", 0)


@dataclass
class PlacementModel:
    """Model of one layer's placement: least Σ_b max_p of the load of each block b.

    Attributes
    ----------
    linear : LinearModel
    objective : int
        Variable to minimise.
    unit : int
        Load of one unit of the objective.
    """

    linear: LinearModel
    objective: int
    unit: int
    _owner: dict[tuple[int, int], int]
    _load: IntArray
    _symmetry: bool

    def ranks(self, values: Sequence[float]) -> IntArray:
        """Read the rank of each expert off an assignment, int64 [E]."""
        num_experts = self._load.shape[1]
        ranks = np.zeros(num_experts, dtype=np.int64)
        best = np.full(num_experts, -1.0)
        for (e, p), variable in self._owner.items():
            if values[variable] > best[e]:
                best[e], ranks[e] = values[variable], p
        return ranks

    def assignment(self, ranks: IntArray) -> list[int]:
        """Values of all variables for the rank of each expert."""
        if self._symmetry:
            ranks = _canonical_ranks(ranks[None], self._load.sum(axis=0)[None])[0]
        num_ranks = 1 + max(p for _, p in self._owner)
        values = [0] * len(self.linear.names)
        for (e, p), variable in self._owner.items():
            values[variable] = int(ranks[e] == p)
        tops = [max(int(self._load[b, ranks == p].sum()) for p in range(num_ranks)) for b in range(self._load.shape[0])]
        for b, top in enumerate(tops):
            values[self.objective - len(tops) + b] = top
        values[self.objective] = sum(tops)
        return values


def placement_model(load: npt.ArrayLike, redundancy: Redundancy, *, ep_size: int) -> PlacementModel:
    """Model of the placement of one layer.

    Parameters
    ----------
    load : array-like of int, shape [B, E]
        Load of each expert in each block; one block (the window) for the
        aggregate placement.
    redundancy : Redundancy
        ``symmetry``, ``rank_sums`` and ``window_loads`` apply.
    ep_size : int
        P; divides E.

    Returns
    -------
    PlacementModel
    """
    array = np.asarray(load, dtype=np.int64)
    unit = _common_factor(array)
    array = array // unit
    num_blocks, num_experts = array.shape
    linear = LinearModel()
    owner = {(e, p): linear.variable(f"o_{e}_{p}", 1) for e in range(num_experts) for p in range(ep_size)}
    top = [linear.variable(f"M_{b}", int(array[b].sum()), derived=True) for b in range(num_blocks)]
    objective = linear.variable("work", int(array.sum()), derived=True)
    least = placement_bound(array, ep_size).tolist()
    for e in range(num_experts):
        linear.add(f"place_{e}", [(1, owner[e, p]) for p in range(ep_size)], "==", 1)
    for p in range(ep_size):
        linear.add(f"slots_{p}", [(1, owner[e, p]) for e in range(num_experts)], "==", num_experts // ep_size)
    for b in range(num_blocks):
        for p in range(ep_size):
            terms = [(int(array[b, e]), owner[e, p]) for e in range(num_experts)]
            linear.add(f"expert_{b}_{p}", [*terms, (-1, top[b])], "<=", 0)
        if redundancy.rank_sums:
            linear.add(f"least_{b}", [(1, top[b])], ">=", least[b])
    linear.add("sum", [*((1, variable) for variable in top), (-1, objective)], "==", 0)
    if redundancy.window_loads:
        whole = int(placement_bound(array.sum(axis=0)[None], ep_size)[0])
        linear.add("window", [(1, objective)], ">=", whole)
    if redundancy.symmetry:
        experts = np.argsort(-array.sum(axis=0), kind="stable").tolist()
        for position, e in enumerate(experts):
            for p in range(1, ep_size):
                terms = [(-1, owner[before, p - 1]) for before in experts[:position]]
                linear.add(f"rank_order_{e}_{p}", [(1, owner[e, p]), *terms], "<=", 0)
    return PlacementModel(linear, objective, unit, owner, array, redundancy.symmetry)
