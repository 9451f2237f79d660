"""References for tests of solvers: tiny problems, brute force, a DP over subsets, a conformance check.

Everything here is slow on purpose and shares no code with the solvers: the
brute force tries every assignment and evaluates it from the definition.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import numpy as np
from numba import njit

from routepack_opt import planning, registry
from routepack_opt.arrays import IntArray
from routepack_opt.bounds import aggregate_load
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InfeasibleProblemError, InvalidInputError, RoutePackError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Result, Status
from routepack_opt.score import LEVELS, evaluate, violations
from routepack_opt.solver import Packer, Placer, Planner

__all__ = [
    "Conformance",
    "ConformanceError",
    "brute_force",
    "check_solver",
    "every_placement",
    "subset_optimum",
    "tiny_problem",
]

#: Assignments of samples to cells the brute force is willing to try, over all placements.
MAX_ASSIGNMENTS = 30_000_000
#: Samples the DP over subsets is willing to treat.
MAX_SUBSET_SAMPLES = 14
_NO_COST = np.int64(2**62)


def tiny_problem(
    seed: int,
    *,
    num_samples: int | None = None,
    num_shards: int | None = None,
    shard_size: int | None = None,
    num_layers: int | None = None,
    ep_size: int | None = None,
    experts_per_rank: int | None = None,
    extra_rows: int | None = None,
    min_samples_per_cell: int = 0,
) -> Problem:
    """Make a random problem small enough to be solved by trying everything.

    What is not given is drawn: N 4–7, G 1–3, |D_g| 1–2, L 0–3, P 1–3, E / P 1–2,
    capacities that are not round, alignment 1–4, no to two operator classes with
    odd denominators or β = 0, equal samples, recorded tokens below the length.

    Parameters
    ----------
    seed : int
        Same seed and arguments, same problem.
    num_samples, num_shards, shard_size, num_layers, ep_size, experts_per_rank : int, optional
        N, G, |D_g|, L, P, E / P.
    extra_rows : int, optional
        Rows beyond the fewest found; drawn 0 or 1.
    min_samples_per_cell : int
        0 or 1; with 1 there may be no feasible plan.

    Returns
    -------
    Problem
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 20240229]))

    def pick(given: int | None, low: int, high: int) -> int:
        drawn = int(rng.integers(low, high + 1))
        return drawn if given is None else given

    n = pick(num_samples, 4, 7)
    shards = pick(num_shards, 1, 3)
    size = pick(shard_size, 1, 2)
    layers = pick(num_layers, 0, 3)
    ranks = pick(ep_size, 1, 3)
    experts = ranks * pick(experts_per_rank, 1, 2)
    more_rows = pick(extra_rows, 0, 1)
    alignment = int(rng.choice([1, 1, 2, 4]))
    capacity = int(rng.integers(13, 40))
    longest = capacity // alignment * alignment
    lengths = rng.integers(1, longest + 1, size=n)
    lengths = np.where(rng.random(n) < 0.5, -(-lengths // 3), lengths)
    lost = np.minimum(rng.integers(0, 2, size=n), lengths - 1)
    top_k = int(rng.integers(1, min(2, experts) + 1))
    counts = np.zeros((n, layers, experts), dtype=np.uint16)
    popularity = rng.gamma(0.7, size=(layers, experts)) + 0.05
    for i, layer in product(range(n), range(layers)):
        share = popularity[layer] * rng.gamma(1.0, size=experts) + 1e-9
        for _ in range(int(lengths[i] - lost[i])):
            counts[i, layer, rng.choice(experts, size=top_k, replace=False, p=share / share.sum())] += 1
    if rng.random() < 0.4:  # ties: one sample twice
        source, target = rng.choice(n, size=2, replace=False)
        lengths[target], lost[target], counts[target] = lengths[source], lost[source], counts[source]
    operators = []
    for name in ("linear", "quadratic")[: int(rng.integers(0, 3)) if layers else 2]:
        alpha = Fraction(int(rng.integers(0, 5)), int(rng.choice([1, 2, 3, 7])))
        beta = Fraction(int(rng.integers(1, 9)), int(rng.choice([1, 4, 5])))
        operators.append(OperatorClass(name, alpha, beta if name == "quadratic" else Fraction(0)))
    if not layers:
        operators[1] = OperatorClass("quadratic", Fraction(1, 3), Fraction(5, 2))

    def build(num_rows: int | None) -> Problem:
        return Problem.from_arrays(
            lengths,
            counts if layers else None,
            top_k=top_k if layers else None,
            routed_tokens=lengths - lost if layers else None,
            capacity=capacity,
            ep_size=ranks,
            dp_size=shards * size,
            num_shards=shards,
            num_rows=num_rows,
            length_alignment=alignment,
            min_samples_per_cell=min_samples_per_cell,
            cost=CostModel(tuple(operators)),
        )

    problem = build(None)
    return build(problem.num_rows + more_rows) if more_rows else problem


def every_placement(problem: Problem) -> Iterator[Placement]:
    """All placements of a problem, rank labels and slots inside a rank counted as one.

    Yields
    ------
    Placement
    """
    experts, ranks = problem.num_experts, problem.ep_size
    options = list(_groupings(tuple(range(experts)), experts // ranks)) if experts else [[]]
    for choice in product(options, repeat=problem.num_layers):
        rank_of_expert = np.zeros((problem.num_layers, experts), dtype=np.int64)
        for layer, groups in enumerate(choice):
            for rank, group in enumerate(groups):
                rank_of_expert[layer, list(group)] = rank
        yield Placement.from_rank_of_expert(rank_of_expert, ep_size=ranks)


def _groupings(items: tuple[int, ...], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not items:
        yield []
        return
    for rest in combinations(items[1:], size - 1):
        group = (items[0], *rest)
        left = tuple(item for item in items if item not in group)
        for groups in _groupings(left, size):
            yield [group, *groups]


def brute_force(problem: Problem, placement: Placement | None = None) -> Plan:
    """Find a lexicographically optimal plan by trying every assignment of samples to cells.

    Parameters
    ----------
    problem : Problem
        With at most 3·10⁷ assignments (R·D)^N, times the placements if none is given.
    placement : Placement, optional
        None: all placements are tried too, which gives the joint optimum.

    Returns
    -------
    Plan

    Raises
    ------
    InvalidInputError
        If the problem is too large.
    InfeasibleProblemError
        If no assignment is feasible.
    """
    placements = [placement] if placement is not None else list(every_placement(problem))
    if problem.num_cells**problem.num_samples * len(placements) > MAX_ASSIGNMENTS:
        raise InvalidInputError(
            f"{problem.num_cells} cells, {problem.num_samples} samples and {len(placements)} placements are too many "
            "to try"
        )
    best: Plan | None = None
    best_levels = np.full(3, _NO_COST)
    slots_of_shard = np.array(problem.shards, dtype=np.int64)
    for candidate in placements:
        work = np.ascontiguousarray(candidate.expert_work(problem))
        levels, cells = _try_all(
            problem.aligned_lengths,
            np.ascontiguousarray(problem.attention_work),
            work,
            slots_of_shard,
            problem.num_rows,
            problem.capacity,
            problem.min_samples_per_cell,
            problem.equal_samples_per_slot,
        )
        if tuple(levels) < tuple(best_levels):
            best_levels = levels
            best = Plan.of(problem, candidate, Packing.from_cells(cells, dp_size=problem.dp_size))
    if best is None:
        raise InfeasibleProblemError("no assignment of samples to cells is feasible: all were tried")
    return best


@njit(cache=True, nogil=True)
def _try_all(
    aligned: IntArray,
    attention: IntArray,
    expert: IntArray,
    slots_of_shard: IntArray,
    num_rows: int,
    capacity: int,
    min_samples: int,
    equal_samples: bool,
) -> Any:
    num_samples, num_layers, num_ranks = expert.shape
    num_classes = attention.shape[0]
    num_shards, size = slots_of_shard.shape
    num_slots = num_shards * size
    num_cells = num_rows * num_slots
    cell = np.zeros(num_samples, np.int64)
    best = np.full(3, 2**62, np.int64)
    best_cell = np.zeros(num_samples, np.int64)
    used = np.zeros(num_cells, np.int64)
    held = np.zeros(num_cells, np.int64)
    work = np.zeros((num_classes, num_cells), np.int64)
    load = np.zeros((num_layers, num_ranks), np.int64)
    while True:
        used[:] = 0
        held[:] = 0
        for i in range(num_samples):
            used[cell[i]] += aligned[i]
            held[cell[i]] += 1
        feasible = True
        for c in range(num_cells):
            if used[c] > capacity or held[c] < min_samples:
                feasible = False
        if feasible and equal_samples:
            for d in range(num_slots):
                count = 0
                for r in range(num_rows):
                    count += held[r * num_slots + d]
                if count * num_slots != num_samples:
                    feasible = False
        if feasible:
            work[:] = 0
            for i in range(num_samples):
                for s in range(num_classes):
                    work[s, cell[i]] += attention[s, i]
            largest_shard = 0
            total = 0
            largest_row = 0
            for g in range(num_shards):
                shard = 0
                for r in range(num_rows):
                    block = 0
                    for s in range(num_classes):
                        top = 0
                        for k in range(size):
                            top = max(top, work[s, r * num_slots + slots_of_shard[g, k]])
                        block += top
                    load[:] = 0
                    for i in range(num_samples):
                        for k in range(size):
                            if cell[i] == r * num_slots + slots_of_shard[g, k]:
                                for layer in range(num_layers):
                                    for p in range(num_ranks):
                                        load[layer, p] += expert[i, layer, p]
                    for layer in range(num_layers):
                        top = 0
                        for p in range(num_ranks):
                            top = max(top, load[layer, p])
                        block += top
                    shard += block
                    largest_row = max(largest_row, block)
                total += shard
                largest_shard = max(largest_shard, shard)
            better = largest_shard < best[0] or (
                largest_shard == best[0] and (total < best[1] or (total == best[1] and largest_row < best[2]))
            )
            if better:
                best[0], best[1], best[2] = largest_shard, total, largest_row
                best_cell[:] = cell
        at = 0
        while at < num_samples and cell[at] == num_cells - 1:
            cell[at] = 0
            at += 1
        if at == num_samples:
            return best, best_cell
        cell[at] += 1


def subset_optimum(problem: Problem, placement: Placement) -> Plan:
    """Find a lexicographically optimal packing by dynamic programming over subsets of samples.

    The cheapest block for every subset is found by splitting it over the cells;
    a shard's best use of a subset in R rows follows by recursion on (total,
    largest block), which is exact because a minimal total has minimal totals as
    parts. With two shards the subset of the first one is tried in full.

    Parameters
    ----------
    problem : Problem
        N ≤ 14, |D_g| ≤ 2, G ≤ 2, no ``equal_samples_per_slot``.
    placement : Placement

    Returns
    -------
    Plan

    Raises
    ------
    InvalidInputError
        If the problem is beyond these sizes.
    InfeasibleProblemError
        If there is no feasible packing.
    """
    size, num_shards, num_samples = problem.cluster.shard_size, problem.num_shards, problem.num_samples
    if num_samples > MAX_SUBSET_SAMPLES or size > 2 or num_shards > 2 or problem.equal_samples_per_slot:
        raise InvalidInputError(
            f"N {num_samples}, {size} slots a shard, G {num_shards}: the subset reference treats N <= "
            f"{MAX_SUBSET_SAMPLES}, two slots a shard, two shards, and no equal_samples_per_slot"
        )
    attention, halves = _subset_attention(
        problem.aligned_lengths,
        np.ascontiguousarray(problem.attention_work),
        size,
        problem.capacity,
        problem.min_samples_per_cell,
    )
    cost = _subset_cost(attention, np.ascontiguousarray(placement.expert_work(problem)))
    total, largest, chosen = _subset_rows(cost, problem.num_rows)
    everything = (1 << num_samples) - 1
    last = total[problem.num_rows]
    shard_sets = [everything]
    if num_shards == 1:
        feasible = last[everything] < _NO_COST
    else:
        mine, theirs = last, last[::-1]  # complement of a subset: everything − subset
        allowed = np.flatnonzero((mine < _NO_COST) & (theirs < _NO_COST))
        feasible = allowed.size > 0
        if feasible:
            row = largest[problem.num_rows]
            keys = np.stack(
                [
                    np.maximum(row[allowed], row[everything - allowed]),
                    mine[allowed] + theirs[allowed],
                    np.maximum(mine[allowed], theirs[allowed]),
                ]
            )
            subset = int(allowed[np.lexsort(keys)[0]])
            shard_sets = [subset, everything - subset]
    if not feasible:
        raise InfeasibleProblemError("no partition of the samples into feasible blocks exists: all were tried")
    rows = np.zeros(num_samples, dtype=np.int64)
    slots = np.zeros(num_samples, dtype=np.int64)
    for shard, remaining in enumerate(shard_sets):
        left = remaining
        for r in range(problem.num_rows, 0, -1):
            block = int(chosen[r][left])
            left -= block
            for i in range(num_samples):
                if block >> i & 1:
                    rows[i] = r - 1
                    slots[i] = problem.shards[shard][0 if int(halves[block]) >> i & 1 else size - 1]
    return Plan.of(problem, placement, Packing.from_arrays(rows, slots))


@njit(cache=True, nogil=True)
def _subset_attention(aligned: IntArray, attention: IntArray, size: int, capacity: int, min_samples: int) -> Any:
    """Least attention of a block holding each subset, and the samples in its first cell."""
    num_classes, num_samples = attention.shape
    num_subsets = 1 << num_samples
    used = np.zeros(num_subsets, np.int64)
    work = np.zeros((num_subsets, num_classes), np.int64)
    for subset in range(1, num_subsets):
        i = 0
        while not (subset >> i) & 1:
            i += 1
        before = subset & (subset - 1)
        used[subset] = used[before] + aligned[i]
        for s in range(num_classes):
            work[subset, s] = work[before, s] + attention[s, i]
    best = np.full(num_subsets, 2**62, np.int64)
    first = np.zeros(num_subsets, np.int64)
    for subset in range(num_subsets):
        part = subset
        while True:
            other = subset ^ part
            feasible = used[part] <= capacity and used[other] <= capacity
            if size == 1 and other != 0:
                feasible = False
            if min_samples > 0 and (part == 0 or (size == 2 and other == 0)):
                feasible = False
            if feasible:
                value = 0
                for s in range(num_classes):
                    value += max(work[part, s], work[other, s])
                if value < best[subset]:
                    best[subset] = value
                    first[subset] = part
            if part == 0:
                break
            part = (part - 1) & subset
    return best, first


@njit(cache=True, nogil=True)
def _subset_cost(attention: IntArray, expert: IntArray) -> Any:
    num_samples, num_layers, num_ranks = expert.shape
    cost = attention.copy()
    load = np.zeros((num_layers, num_ranks), np.int64)
    for subset in range(cost.size):
        if cost[subset] >= 2**62:
            continue
        load[:] = 0
        for i in range(num_samples):
            if (subset >> i) & 1:
                for layer in range(num_layers):
                    for p in range(num_ranks):
                        load[layer, p] += expert[i, layer, p]
        for layer in range(num_layers):
            top = 0
            for p in range(num_ranks):
                top = max(top, load[layer, p])
            cost[subset] += top
    return cost


@njit(cache=True, nogil=True)
def _subset_rows(cost: IntArray, num_rows: int) -> Any:
    """Least (total, largest block) of each subset in 0..R rows, and the last row's block."""
    num_subsets = cost.size
    total = np.full((num_rows + 1, num_subsets), 2**62, np.int64)
    largest = np.full((num_rows + 1, num_subsets), 2**62, np.int64)
    chosen = np.zeros((num_rows + 1, num_subsets), np.int64)
    total[0, 0] = 0
    largest[0, 0] = 0
    for r in range(1, num_rows + 1):
        for subset in range(num_subsets):
            part = subset
            while True:
                rest = subset ^ part
                if cost[part] < 2**62 and total[r - 1, rest] < 2**62:
                    value = total[r - 1, rest] + cost[part]
                    top = max(largest[r - 1, rest], cost[part])
                    if value < total[r, subset] or (value == total[r, subset] and top < largest[r, subset]):
                        total[r, subset] = value
                        largest[r, subset] = top
                        chosen[r, subset] = part
                if part == 0:
                    break
                part = (part - 1) & subset
    return total, largest, chosen


class ConformanceError(RoutePackError, AssertionError):
    """A solver breaks the contract of its protocol.

    Attributes
    ----------
    faults : tuple of str
        Everything found, each naming the problem and what was run.
    """

    def __init__(self, name: str, faults: list[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(f"{name} does not conform: {len(faults)} faults\n" + "\n".join(f"  - {x}" for x in faults))


@dataclass(frozen=True)
class Conformance:
    """What a conforming solver was checked on.

    Attributes
    ----------
    solver : str
        Canonical spec.
    roles : tuple of str
        Of ``placer``, ``packer``, ``planner``.
    num_runs : int
        Runs made.
    refused : tuple of str
        Reasons of ``available()`` and ``unsupported()``; what was refused was not checked.
    statuses : dict of str to int
        Results by status.
    """

    solver: str
    roles: tuple[str, ...]
    num_runs: int
    refused: tuple[str, ...]
    statuses: dict[str, int]


def check_solver(solver: str | object, *, iteration_limit: int = 2_000, time_limit: float = 10.0) -> Conformance:
    """Check a solver against its contract on a battery of tiny problems.

    The battery has shards and slots of several numbers, alignment, equal
    samples, problems without routing, without attention and with cells that
    must not be empty. In every role the solver has, its results must be

    - feasible, and claimed rightly: no bound above the optimum that brute force
      finds, OPTIMAL only at the optimum, INFEASIBLE only without a plan;
    - the same for the same seed, with one thread and two, under an iteration limit;
    - returned as a result, not an exception, with no time at all and when
      stopped at once;
    - never worse than a plan to start from;
    - made without touching the global random number generators.

    ``unsupported`` must give a reason as text, and the runner must pass it on.

    Parameters
    ----------
    solver : str or object
        Spec of one component, or the component.
    iteration_limit : int
        Budget of each run.
    time_limit : float
        Seconds within which a stopped run must return.

    Returns
    -------
    Conformance

    Raises
    ------
    ConformanceError
        With every fault found.
    """
    component: Any = registry.component(solver) if isinstance(solver, str) else solver
    name = registry.canonical(component)
    faults: list[str] = []
    roles = tuple(
        role
        for role, protocol in (("placer", Placer), ("packer", Packer), ("planner", Planner))
        if isinstance(component, protocol)
    )
    if not roles:
        faults.append("it has none of place(problem, packing, run), pack(problem, placement, run), plan(problem, run)")
    parameters: Any = getattr(type(component), "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        faults.append("it is no frozen dataclass; its fields are the parameters of the spec")
    if not isinstance(getattr(component, "name", None), str):
        faults.append("it has no class attribute 'name'")
    elif component.name in registry.names() and registry.component(name) != component:
        faults.append(f"its spec {name!r} builds another component")
    if faults:
        raise ConformanceError(name, faults)
    checker = _Checker(component, name, iteration_limit, time_limit)
    reason = component.available() if hasattr(component, "available") else None
    if reason is None:
        for label, problem in _battery():
            for role in roles:
                checker.check(f"{label}, as {role}", problem, role)
    else:
        checker.refuse("available()", reason)
    if checker.faults:
        raise ConformanceError(name, checker.faults)
    return Conformance(name, roles, checker.num_runs, tuple(dict.fromkeys(checker.refused)), checker.statuses)


def _battery() -> Iterator[tuple[str, Problem]]:
    small: dict[str, Any] = {"num_samples": 5, "ep_size": 2, "experts_per_rank": 2, "extra_rows": 0}
    yield "two shards", tiny_problem(1, **small, num_shards=2, shard_size=1, num_layers=2)
    yield "one shard of two", tiny_problem(2, **small, num_shards=1, shard_size=2, num_layers=2)
    yield "three shards", tiny_problem(11, **small, num_shards=3, shard_size=1, num_layers=1)
    yield "one rank", tiny_problem(4, **(small | {"ep_size": 1}), num_shards=1, shard_size=2, num_layers=1)
    yield "a spare row", tiny_problem(5, **(small | {"extra_rows": 1}), num_shards=1, shard_size=1, num_layers=2)
    yield "no routing", tiny_problem(6, **small, num_shards=1, shard_size=2, num_layers=0)
    no_attention = tiny_problem(7, **small, num_shards=2, shard_size=1, num_layers=2)
    yield "no attention", no_attention.replace(cost=CostModel())
    for seed in range(100):
        try:
            filled = tiny_problem(seed, **small, num_shards=1, shard_size=2, num_layers=1, min_samples_per_cell=1)
        except InfeasibleProblemError:
            continue
        yield "no empty cell", filled
        break


class _Checker:
    """Runs one component in one role after another and collects faults."""

    def __init__(self, component: Any, name: str, iteration_limit: int, time_limit: float) -> None:
        self.component = component
        self.name = name
        self.iteration_limit = iteration_limit
        self.time_limit = time_limit
        self.faults: list[str] = []
        self.refused: list[str] = []
        self.statuses: dict[str, int] = {}
        self.num_runs = 0

    def refuse(self, label: str, reason: object) -> None:
        if not isinstance(reason, str) or not reason.strip():
            self.faults.append(f"{label}: the reason is {reason!r}; it must be text, or None if there is none")
        else:
            self.refused.append(reason)

    def run(self, label: str, call: Callable[..., Result], **options: Any) -> Result | None:
        states = (random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002
        self.num_runs += 1
        try:
            result = call(seed=3, progress=False, **options)
        except Exception as error:
            self.faults.append(f"{label}: {type(error).__name__}: {error}")
            return None
        after = (random.getstate(), np.random.get_state(legacy=False))  # noqa: NPY002
        if states[0] != after[0] or repr(states[1]) != repr(after[1]):
            self.faults.append(f"{label}: it draws from a global random number generator")
        self.statuses[result.status.value] = self.statuses.get(result.status.value, 0) + 1
        return result

    def check(self, label: str, problem: Problem, role: str) -> None:
        if role == "placer" and not problem.num_layers:
            return  # the runner refuses it before the solver is asked
        placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
        call: Callable[..., Result]
        if role == "placer":

            def call(**options: Any) -> Result:
                return planning.place(problem, self.component, **options)

        elif role == "packer":

            def call(**options: Any) -> Result:
                return planning.pack(problem, self.component, placement=placement, **options)

        else:

            def call(**options: Any) -> Result:
                return planning.solve(problem, self.component, **options)

        reason = self.component.unsupported(problem) if hasattr(self.component, "unsupported") else None
        if reason is not None:
            self.refuse(f"{label}: unsupported()", reason)
            try:
                call(iteration_limit=1)
            except InvalidInputError as error:
                if str(reason) not in str(error):
                    self.faults.append(f"{label}: the refusal does not say {reason!r}")
            return
        best = self.best(problem, role, placement)
        limit = {"iteration_limit": self.iteration_limit}
        first = self.run(f"{label}, one thread", call, num_threads=1, **limit)
        second = self.run(f"{label}, two threads", call, num_threads=2, **limit)
        self.judge(label, problem, first, best)
        if (
            first is not None
            and second is not None
            and (first.plan, first.placement) != (second.plan, second.placement)
        ):
            self.faults.append(f"{label}: the same seed gives another decision with two threads")
        self.judge(f"{label}, no time", problem, self.run(f"{label}, no time", call, time_limit=0.0), best)
        start = time.perf_counter()
        stopped = self.run(f"{label}, stopped", call, stop=lambda: True, **limit)
        if time.perf_counter() - start > self.time_limit:
            self.faults.append(f"{label}: stopped at once, it returned after more than {self.time_limit} s")
        found = first is not None and first.status is not Status.NO_SOLUTION
        gave_up = stopped is not None and stopped.status is Status.NO_SOLUTION
        # A heuristic that never asks may finish; one that gave up because it was stopped must say so.
        if found and gave_up and stopped is not None and stopped.limit is not Limit.INTERRUPTED:
            self.faults.append(f"{label}: stopped without a plan, its limit is {stopped.limit}")
        self.judge(f"{label}, stopped", problem, stopped, best)
        if role != "placer" and best is not None:
            for what, start_plan in self.starts(problem, placement, None if role == "planner" else placement):
                warm = self.run(f"{label}, {what}", call, warm_start=start_plan, **limit)
                if warm is not None and (warm.score is None or warm.score > evaluate(problem, start_plan)):
                    self.faults.append(f"{label}: started from {what} it returns {warm.score}")

    @staticmethod
    def best(problem: Problem, role: str, placement: Placement) -> tuple[int, ...] | None:
        """Optimal levels; None if there is no feasible plan."""
        if role == "placer":
            return (
                min(
                    int(aggregate_load(problem, other).max(axis=1).sum()) * problem.expert_unit
                    for other in every_placement(problem)
                ),
            )
        try:
            return evaluate(problem, brute_force(problem, placement if role == "packer" else None)).levels
        except InfeasibleProblemError:
            return None

    @staticmethod
    def starts(problem: Problem, placement: Placement, fixed: Placement | None) -> Iterator[tuple[str, Plan]]:
        yield "an optimal plan", brute_force(problem, fixed)
        rng = np.random.default_rng(5)
        for _ in range(2_000):
            cells = rng.integers(0, problem.num_cells, size=problem.num_samples)
            plan = Plan.of(problem, placement, Packing.from_cells(cells, dp_size=problem.dp_size))
            if not violations(problem, plan):
                yield "a random plan", plan
                return

    def judge(self, label: str, problem: Problem, result: Result | None, best: tuple[int, ...] | None) -> None:
        if result is None:
            return
        if result.status is Status.INFEASIBLE:
            if best is not None:
                self.faults.append(f"{label}: claimed infeasible ({result.reason}), brute force has a plan")
            return
        if best is None:
            if result.plan is not None or result.status is not Status.NO_SOLUTION:
                self.faults.append(f"{label}: {result.status} where no plan is feasible")
            return
        if result.status is Status.NO_SOLUTION:
            if result.limit is None:
                self.faults.append(f"{label}: no solution and no limit that explains it")
            return
        if result.plan is not None:
            found = violations(problem, result.plan)
            if found:
                self.faults.append(f"{label}: infeasible plan: {'; '.join(found)}")
        for level, least in zip(result.levels, best, strict=True):
            exact = level.name == LEVELS[0] or len(best) == 1
            if level.status is Status.OPTIMAL and level.value != least:
                self.faults.append(f"{label}: {level.name} {level.value} claimed optimal, brute force has {least}")
                return
            if level.bound is not None and exact and level.bound > least:
                self.faults.append(f"{label}: bound {level.bound} on {level.name} is above the optimum {least}")
            if exact and level.value is not None and level.value < least:
                self.faults.append(f"{label}: {level.name} {level.value} is below the optimum {least}")
