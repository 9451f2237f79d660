"""Plans of successive optimizer steps: placements carried over, moves counted, packings started warm.

From step to step the experts stand where the last plan put them, so a
placement is worth something only if what it saves pays for the weights it
moves. Every step is planned with the previous placement known: ranks are
relabelled for the fewest moves, and a planner that counts moves
(``alternating(move_price=..., move_limit=...)``) holds experts back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt import bounds, planning, registry
from routepack_opt.batch import RoutingBatch
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan, placement_faults
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Result
from routepack_opt.score import LEVELS, packing_violations
from routepack_opt.solver import Planner

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["StepPlans", "Step", "carry_packing", "plan_sequence"]


@dataclass(frozen=True)
class Step:
    """One planned optimizer step.

    Attributes
    ----------
    problem : Problem
    result : Result
    replaced : bool
        Whether experts could move; else only samples were packed.
    moved_experts : int or None
        Experts, over all layers, that change their rank before the step; None
        for the first step if it had no placement to start from.
    moved_bytes : int or None
        ``moved_experts`` times the bytes of an expert, where those are known.
    bound : int or None
        Proven any-placement bound on the first level, work units.
    """

    problem: Problem
    result: Result
    replaced: bool
    moved_experts: int | None
    moved_bytes: int | None
    bound: int | None

    @property
    def gap(self) -> float | None:
        """Relative gap of the heaviest shard to :attr:`bound`; None if either is unknown."""
        if self.result.score is None:
            return None
        return bounds.gap(self.result.score.max_shard_work, self.bound)


@dataclass(frozen=True)
class StepPlans:
    """Planned steps in order; index and iterate them, or take the table.

    Attributes
    ----------
    steps : tuple of Step
    planner : str
        Canonical spec.
    """

    steps: tuple[Step, ...]
    planner: str

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> Step:
        return self.steps[index]

    @property
    def placement(self) -> Placement | None:
        """Where the experts stand after the last step."""
        for step in reversed(self.steps):
            if step.result.placement is not None:
                return step.result.placement
        return None

    def to_frame(self) -> pd.DataFrame:
        """One row a step: status, levels in units of J, gap, moved experts and bytes, seconds."""
        import pandas as pd

        rows = []
        for number, step in enumerate(self.steps):
            result = step.result
            row: dict[str, Any] = {
                "step": number,
                "planner": result.planner,
                "seed": result.seed,
                "status": result.status.value,
                "limit": None if result.limit is None else result.limit.value,
                "num_rows": result.num_rows,
                "replaced": step.replaced,
                "gap": step.gap,
                "moved_experts": step.moved_experts,
                "moved_bytes": step.moved_bytes,
                "runtime": result.runtime,
            }
            for level, name in enumerate(LEVELS):
                row[name] = None if result.score is None else result.score.values[level]
            rows.append(row)
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return f"{len(self.steps)} steps by {self.planner}\n{self.to_frame().to_string(index=False)}"


def carry_packing(problem: Problem, previous: Plan, previous_problem: Problem) -> Packing | None:
    """The previous step's packing, for new samples: the k-th longest takes the cell of the k-th longest.

    Parameters
    ----------
    problem : Problem
        Of the new step.
    previous : Plan
        Of the step before, ``previous_problem``.

    Returns
    -------
    Packing or None
        None if the grids or the numbers of samples differ, or a cell would be
        above capacity.
    """
    same_grid = (problem.num_rows, problem.dp_size, problem.num_samples) == (
        previous_problem.num_rows,
        previous_problem.dp_size,
        previous_problem.num_samples,
    )
    if not same_grid:
        return None
    source = np.argsort(previous_problem.aligned_lengths, kind="stable")
    target = np.argsort(problem.aligned_lengths, kind="stable")
    rows = np.empty(problem.num_samples, dtype=np.int64)
    slots = np.empty(problem.num_samples, dtype=np.int64)
    rows[target] = previous.packing.row_of_sample[source]
    slots[target] = previous.packing.dp_slot_of_sample[source]
    packing = Packing.from_arrays(rows, slots)
    return None if packing_violations(problem, packing) else packing


def plan_sequence(
    steps: Sequence[Problem | RoutingBatch],
    planner: str | object = "alternating",
    *,
    like: Problem | None = None,
    packer: str | object = "leveling",
    place_every: int = 1,
    previous: Placement | None = None,
    time_limit: float | None = None,
    iteration_limit: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    expert_bytes: int | None = None,
    stop: Any = None,
) -> StepPlans:
    """Plan successive optimizer steps, each from where the one before left the experts.

    Parameters
    ----------
    steps : sequence of Problem or RoutingBatch
        Problems may differ in samples and rows; experts and EP size must agree.
        Batches become problems with the cluster, cost and capacity of ``like``.
    planner : str or object
        For steps that may move experts.
    like : Problem, optional
        Needed if ``steps`` holds batches.
    packer : str or object
        For steps in between that keep the placement.
    place_every : int
        Experts may move in steps 0, place_every, 2·place_every, …
    previous : Placement, optional
        Where the experts are before the first step.
    time_limit, iteration_limit : optional
        Of every step, see :func:`routepack_opt.planning.solve`.
    seed : int
        Step k runs with seed + k.
    num_threads : int, optional
    expert_bytes : int, optional
        Bytes of one expert of one layer with everything that moves along.
    stop : callable or object with ``is_set()``, optional

    Returns
    -------
    StepPlans
        Ends early where a step was interrupted or found no plan.

    Raises
    ------
    InvalidInputError
        If steps do not fit one another, or an option is invalid.
    """
    faults = Faults()
    if not len(steps):
        faults.add("steps is empty; there is nothing to plan")
    for name, value, least in (("place_every", place_every, 1), ("expert_bytes", expert_bytes, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            faults.add(f"{name} is {value!r}; it must be an integer of at least {least}")
    problems: list[Problem] = []
    for number, step in enumerate(steps):
        if isinstance(step, Problem):
            problems.append(step)
        elif not isinstance(step, RoutingBatch):
            faults.add(f"step {number} is {type(step).__name__}; it must be a Problem or a RoutingBatch")
        elif like is None:
            faults.add(f"step {number} is a RoutingBatch; pass like=problem to say on which cluster it runs")
        else:
            try:
                problems.append(like.replace(batch=step))
            except InvalidInputError as error:
                faults.extend([f"step {number}: {fault}" for fault in error.faults])
    if problems and not faults:
        shape = (problems[0].num_layers, problems[0].num_experts, problems[0].ep_size)
        for number, problem in enumerate(problems):
            found = (problem.num_layers, problem.num_experts, problem.ep_size)
            if found != shape:
                faults.add(f"step {number} has (layers, experts, EP size) {found}, step 0 {shape}; they must agree")
        if previous is not None:
            faults.extend(placement_faults(problems[0], previous))
    faults.raise_if_any("sequence")
    built = registry.parse(planner) if isinstance(planner, str) else planner
    joint = isinstance(built, Planner)
    planned: list[Step] = []
    placement = previous
    for number, problem in enumerate(problems):
        replaced = placement is None or (number % place_every == 0 and problem.num_layers > 0)
        warm = None
        if planned and planned[-1].result.plan is not None and placement is not None:
            packing = carry_packing(problem, planned[-1].result.plan, planned[-1].problem)
            warm = None if packing is None else Plan.of(problem, placement, packing)
        if replaced:
            result = planning.solve(
                problem,
                built,
                time_limit=time_limit,
                iteration_limit=iteration_limit,
                seed=seed + number,
                num_threads=num_threads,
                warm_start=warm if joint else None,
                previous=placement,
                stop=stop,
            )
        else:
            result = planning.pack(
                problem,
                packer,
                placement=placement,
                time_limit=time_limit,
                iteration_limit=iteration_limit,
                seed=seed + number,
                num_threads=num_threads,
                warm_start=warm,
                stop=stop,
            )
        moved = None
        if placement is not None and result.placement is not None:
            moved = int((result.placement.rank_of_expert != placement.rank_of_expert).sum())
        bound = bounds.best_bound(problem)
        planned.append(
            Step(
                problem,
                result,
                replaced,
                moved,
                None if moved is None or expert_bytes is None else moved * expert_bytes,
                None if bound is None else bound.value,
            )
        )
        if result.placement is not None:
            placement = result.placement
        if result.plan is None or result.limit is Limit.INTERRUPTED:
            break
    return StepPlans(tuple(planned), registry.canonical(built))
