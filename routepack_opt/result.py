"""What a run claims: statuses, levels with bounds, the trace of incumbents, the result."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.score import Score

__all__ = ["BoundPoint", "Incumbent", "LevelResult", "Limit", "Result", "Status", "Trace"]


class Status(enum.Enum):
    """What is claimed about a solve or one of its levels."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NO_SOLUTION = "no-solution"


class Limit(enum.Enum):
    """Why a run ended without a proof.

    TIME, ITERATIONS and INTERRUPTED say that something was cut off, or made
    shorter to keep to the limit; EXHAUSTED is a heuristic that simply finished,
    on time or not.
    """

    TIME = "time"
    ITERATIONS = "iterations"
    INTERRUPTED = "interrupted"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True)
class LevelResult:
    """One lexicographic level of a solve.

    Attributes
    ----------
    name : str
        ``max_shard_work``, ``total_work``, ``max_row_work``; for a placement alone
        ``aggregate_expert_work`` or ``block_expert_work``.
    value : int or None
        Value of the plan at this level, work units.
    bound : int or None
        Proven lower bound among plans whose earlier levels are at most the
        stated values, within the scope of the result.
    status : Status
    limit : Limit or None
        Set iff the status is FEASIBLE or NO_SOLUTION.
    runtime : float
        Seconds spent on the level; 0.0 where a solver treats all levels at once.
    """

    name: str
    value: int | None
    bound: int | None
    status: Status
    limit: Limit | None
    runtime: float

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping."""
        return {
            "name": self.name,
            "value": self.value,
            "bound": self.bound,
            "status": self.status.value,
            "limit": None if self.limit is None else self.limit.value,
            "runtime": self.runtime,
        }


@dataclass(frozen=True)
class Incumbent:
    """A best plan so far.

    Attributes
    ----------
    time : float
        Seconds since the start of the run.
    levels : tuple of int
        Exact levels of the plan.
    solver : str
        Who reported it.
    """

    time: float
    levels: tuple[int, int, int]
    solver: str


@dataclass(frozen=True)
class BoundPoint:
    """A proven bound on one level at a time of the run.

    Attributes
    ----------
    time : float
        Seconds since the start of the run.
    level : str
    bound : int
        Work units.
    """

    time: float
    level: str
    bound: int


@dataclass(frozen=True)
class Trace:
    """History of a run.

    Attributes
    ----------
    incumbents : tuple of Incumbent
        Strictly improving.
    bounds : tuple of BoundPoint
    stages : mapping of str to float
        Wall seconds by stage, such as ``placement`` and ``packing``.
    """

    incumbents: tuple[Incumbent, ...] = ()
    bounds: tuple[BoundPoint, ...] = ()
    stages: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Outcome of one run; a time-out is a result too.

    Attributes
    ----------
    status : Status
        OPTIMAL only if every level is proved within ``scope``.
    limit : Limit or None
        Set iff the status is FEASIBLE or NO_SOLUTION.
    scope : str
        ``fixed-placement``: claims hold for the placement used;
        ``any-placement``: for every placement.
    levels : tuple of LevelResult
    plan : Plan or None
    placement : Placement or None
        Also set where only a placement was asked for.
    score : Score or None
        Of ``plan``, by the evaluator.
    trace : Trace
    planner : str
        Canonical spec.
    seed : int
    runtime : float
        Wall seconds of the run.
    reason : str
        Proof of infeasibility or why nothing was found; else empty.
    num_rows, num_rows_bound : int
        R and its proven lower bound.
    num_threads : int
    settings : mapping
        Limits the run was given.
    """

    status: Status
    limit: Limit | None
    scope: str
    levels: tuple[LevelResult, ...]
    plan: Plan | None
    placement: Placement | None
    score: Score | None
    trace: Trace
    planner: str
    seed: int
    runtime: float
    reason: str
    num_rows: int
    num_rows_bound: int
    num_threads: int
    settings: Mapping[str, float | int | None]

    @property
    def packing(self) -> Packing | None:
        """The packing of ``plan``."""
        return None if self.plan is None else self.plan.packing

    def to_dict(self) -> dict[str, Any]:
        """The result as a JSON object, exact integers, without the plan."""
        return {
            "planner": self.planner,
            "seed": self.seed,
            "status": self.status.value,
            "scope": self.scope,
            "limit": None if self.limit is None else self.limit.value,
            "levels": [level.to_dict() for level in self.levels],
            "score": None if self.score is None else self.score.to_dict(),
            "runtime": self.runtime,
            "reason": self.reason,
            "num_rows": self.num_rows,
            "num_rows_bound": self.num_rows_bound,
            "num_threads": self.num_threads,
            "settings": dict(self.settings),
            "stages": dict(self.trace.stages),
        }

    def __repr__(self) -> str:
        found = repr(self.score) if self.score is not None else (repr(self.placement) if self.placement else "no plan")
        limit = "" if self.limit is None else f", limit {self.limit.value}"
        reason = f", {self.reason}" if self.reason else ""
        return (
            f"Result({self.planner}, seed {self.seed}: {self.status.value} ({self.scope}{limit}){reason}, {found}, "
            f"{self.runtime:.2f} s)"
        )
