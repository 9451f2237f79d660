"""The interface between the shared runner and solver components.

A component is a frozen dataclass whose fields are its parameters. It has one
or more of three methods, each returning its decision or None:

- ``place(problem, packing, run)``: a :class:`Placer`;
- ``pack(problem, placement, run)``: a :class:`Packer`;
- ``plan(problem, run)``: a :class:`Planner` (joint).

Components never score themselves. They report incumbents and claims to the
:class:`Run` they are handed; the runner re-evaluates and refuses false claims.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from routepack_opt import score as scoring
from routepack_opt.errors import InvalidInputError, SolverClaimError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import BoundPoint, Incumbent, Limit, Trace
from routepack_opt.score import LEVELS, Score

__all__ = ["Claim", "Packer", "Placer", "Planner", "Progress", "Run", "Solver", "component_spec"]

#: Level of a placement on its own: Σ_l max_p of the window load, in work units.
AGGREGATE_LEVEL = "aggregate_expert_work"
#: Level of a placement for a given packing: Σ_{r,g,l} max_p W, in work units.
BLOCK_LEVEL = "block_expert_work"


class Solver:
    """Base of the built-in components; third parties may derive from it or only match the protocols.

    Attributes
    ----------
    name : str
        Name in planner specs.
    scope : str
        What an optimality claim of ``plan`` covers.
    """

    name: ClassVar[str]
    scope: ClassVar[str] = "any-placement"

    def available(self) -> str | None:
        """Why the component cannot run on this installation; None if it can."""
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Why the component cannot treat ``problem``; None if it can."""
        del problem
        return None

    @property
    def spec(self) -> str:
        """Canonical spec: the name, and the parameters that differ from their defaults."""
        return component_spec(self)


@runtime_checkable
class Placer(Protocol):
    """Chooses the EP rank of every expert."""

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Place experts for the window load, or for the blocks of ``packing`` if one is given."""


@runtime_checkable
class Packer(Protocol):
    """Chooses the cell of every sample for a fixed placement."""

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack samples."""


@runtime_checkable
class Planner(Protocol):
    """Chooses placement and packing together."""

    def plan(self, problem: Problem, run: Run) -> Plan | None:
        """Plan."""


def component_spec(component: object) -> str:
    """Canonical spec of a component: ``name(parameter=value, ...)``, defaults left out."""
    name = str(getattr(component, "name", type(component).__name__))
    if not dataclasses.is_dataclass(component):
        return name
    parts = []
    for parameter in dataclasses.fields(component):
        value = getattr(component, parameter.name)
        default = parameter.default
        if default is dataclasses.MISSING and parameter.default_factory is not dataclasses.MISSING:
            default = parameter.default_factory()
        if value != default or type(value) is not type(default):
            parts.append(f"{parameter.name}={value!r}")
    return f"{name}({', '.join(parts)})" if parts else name


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a solver says of one level.

    Attributes
    ----------
    level : str
    value : int or None
        Value of the decision it returns, work units.
    bound : int or None
        Proven lower bound.
    proved : bool
        value is optimal given the earlier levels.
    limit : Limit or None
        Why it is not proved.
    runtime : float
        Seconds spent on the level.
    """

    level: str
    value: int | None
    bound: int | None
    proved: bool
    limit: Limit | None
    runtime: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """Handed to ``on_progress``.

    Attributes
    ----------
    time : float
        Seconds since the start.
    time_limit : float or None
    fraction : float or None
        Share of the budget used, if the solver knows.
    best : tuple of int or None
        Levels of the incumbent.
    """

    time: float
    time_limit: float | None
    fraction: float | None
    best: tuple[int, int, int] | None


class _Record:
    """State shared by a run and its sub-runs: one clock, one archive, one lock."""

    def __init__(
        self,
        problem: Problem,
        *,
        stop: Callable[[], bool] | None,
        on_progress: Callable[[Progress], None] | None,
        time_limit: float | None,
    ) -> None:
        self.problem = problem
        self.start = time.perf_counter()
        self.time_limit = time_limit
        self.stop = stop
        self.on_progress = on_progress
        self.lock = threading.Lock()
        self.best: Plan | None = None
        self.best_score: Score | None = None
        self.best_placement: Placement | None = None
        self.incumbents: list[Incumbent] = []
        self.bounds: list[BoundPoint] = []
        self.stages: dict[str, float] = {}
        self.interrupted = False
        self.told_time_is_up = False
        self.time_left_asked = False
        self.infeasible = ""
        self.explanation = ""
        self.limit: Limit | None = None
        self.notified = 0.0


class Run:
    """One run of one component: its budget, its randomness, and where it reports.

    Attributes
    ----------
    seed : int
        All randomness derives from it.
    num_threads : int
        Threads or workers the component may use.
    iteration_limit : int or None
        Budget in the component's own iterations (annealing: Metropolis proposals).
        Under it alone the result depends on nothing but problem, spec and seed.
    warm_start : Plan or None
        A feasible plan to start from and never end above.
    placement : Placement or None
        The fixed placement a packer works for.
    packing : Packing or None
        The fixed packing a placer works for.
    previous_placement : Placement or None
        Where the experts are now, for placers that count moves.
    claims : list of Claim
    """

    def __init__(
        self,
        problem: Problem,
        *,
        seed: int = 0,
        time_limit: float | None = None,
        iteration_limit: int | None = None,
        num_threads: int = 1,
        warm_start: Plan | None = None,
        placement: Placement | None = None,
        packing: Packing | None = None,
        previous_placement: Placement | None = None,
        stop: Callable[[], bool] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self._record = _Record(problem, stop=stop, on_progress=on_progress, time_limit=time_limit)
        self._entropy: tuple[int, ...] = (seed,)
        self._children = 0
        self._deadline = math.inf if time_limit is None else self._record.start + time_limit
        self._solver = ""
        self.seed = seed
        self.num_threads = num_threads
        self.iteration_limit = iteration_limit
        self.warm_start = warm_start
        self.placement = placement
        self.packing = packing
        self.previous_placement = previous_placement
        self.claims: list[Claim] = []

    @property
    def rng(self) -> np.random.Generator:
        """A fresh generator of this run; the same one at every access."""
        return np.random.default_rng(np.random.SeedSequence(self._entropy))

    def time(self) -> float:
        """Seconds since the outermost run started."""
        return time.perf_counter() - self._record.start

    def time_left(self) -> float:
        """Seconds left of this run's share; inf without a time limit, never below 0."""
        self._record.time_left_asked = True
        return self._time_left()

    def _time_left(self) -> float:
        return max(0.0, self._deadline - time.perf_counter())

    def stopped(self) -> bool:
        """Whether to return now: out of time, cancelled, or interrupted. Ask at least every 50 ms."""
        record = self._record
        if record.interrupted:
            return True
        if record.stop is not None and record.stop():
            record.interrupted = True
            return True
        if time.perf_counter() < self._deadline:
            return False
        record.told_time_is_up = True
        return True

    def limit_reached(self) -> Limit | None:
        """INTERRUPTED or TIME if that is why :meth:`stopped` is true, else what :meth:`note_limit` said."""
        if self._record.interrupted:
            return Limit.INTERRUPTED
        return Limit.TIME if time.perf_counter() >= self._deadline else self._record.limit

    def limit_felt(self) -> Limit | None:
        """The limit that cut something off in this run or a part of it; None if everything simply finished.

        TIME only where a component was told that its time is up, or where the
        time is up and a component had asked how much of it is left, to keep to
        it by a clock of its own. One that asks neither cannot have been cut off,
        however late it is. Otherwise as :meth:`limit_reached`.
        """
        record = self._record
        if record.interrupted:
            return Limit.INTERRUPTED
        late = record.time_left_asked and time.perf_counter() >= self._deadline
        return Limit.TIME if record.told_time_is_up or late else record.limit

    def interrupt(self) -> None:
        """Note a Ctrl-C that the component caught itself, to return the best it has."""
        self._record.interrupted = True

    def progress(self, fraction: float | None = None) -> None:
        """Tell the caller how far the run is; cheap, at most ten calls a second get through."""
        record = self._record
        now = self.time()
        if record.on_progress is None or now - record.notified < 0.1:
            return
        record.notified = now
        best = None if record.best_score is None else record.best_score.levels
        record.on_progress(Progress(now, record.time_limit, fraction, best))

    def report(self, decision: Placement | Packing | Plan) -> bool:
        """Hand in an incumbent; the runner evaluates it and keeps the best.

        Parameters
        ----------
        decision : Placement, Packing or Plan
            Joined with the placement or packing of this run where it is not a
            whole plan. A placement without any packing is kept aside.

        Returns
        -------
        bool
            Whether it is better than everything reported before.

        Raises
        ------
        SolverClaimError
            If the decision is infeasible: a solver must never report such a plan.
        """
        record = self._record
        plan = self._complete(decision)
        if plan is None:
            if isinstance(decision, Placement):
                record.best_placement = decision
            return False
        try:
            value = scoring.evaluate(record.problem, plan)
        except InvalidInputError as error:
            found = "; ".join(error.faults[:5])
            raise SolverClaimError(f"{self._solver or 'the solver'} reported an infeasible plan: {found}") from error
        with record.lock:
            if record.best_score is not None and not value < record.best_score:
                return False
            record.best, record.best_score, record.best_placement = plan, value, plan.placement
            record.incumbents.append(Incumbent(self.time(), value.levels, self._solver))
        self.progress()
        return True

    def _complete(self, decision: Placement | Packing | Plan) -> Plan | None:
        problem = self._record.problem
        if isinstance(decision, Plan):
            return decision
        if isinstance(decision, Packing):
            if self.placement is None:
                raise SolverClaimError("a packing was reported in a run without a placement; report a Plan")
            return Plan.of(problem, self.placement, decision)
        return None if self.packing is None else Plan.of(problem, decision, self.packing)

    @property
    def best(self) -> Plan | None:
        """The best plan reported so far by anyone in this run."""
        return self._record.best

    @property
    def best_score(self) -> Score | None:
        """Score of :attr:`best`."""
        return self._record.best_score

    def bound(self, level: str, bound: int) -> None:
        """Record a proven lower bound on a level for the history (work units)."""
        with self._record.lock:
            self._record.bounds.append(BoundPoint(self.time(), level, int(bound)))

    def claim(
        self,
        level: str,
        value: int | None,
        bound: int | None,
        *,
        proved: bool,
        limit: Limit | None,
        runtime: float = 0.0,
    ) -> None:
        """State what is known of a level when the component returns.

        Parameters
        ----------
        level : str
            One of ``LEVELS``, or a placement level.
        value : int or None
            Value of the decision returned; must equal the evaluator's.
        bound : int or None
            Proven lower bound given the earlier levels.
        proved : bool
        limit : Limit or None
            Set iff not proved.
        runtime : float
            Seconds spent on the level.
        """
        if level not in (*LEVELS, AGGREGATE_LEVEL, BLOCK_LEVEL):
            raise SolverClaimError(f"unknown level {level!r}")
        if proved == (limit is not None):
            raise SolverClaimError(f"level {level}: proved={proved} with limit {limit}; exactly one of them holds")
        if proved and (value is None or bound is None or bound != value):
            raise SolverClaimError(f"level {level}: proved with value {value} and bound {bound}")
        if value is not None and bound is not None and bound > value:
            raise SolverClaimError(f"level {level}: bound {bound} above the value {value}")
        self.claims = [claim for claim in self.claims if claim.level != level]
        self.claims.append(Claim(level, value, bound, proved, limit, runtime))

    def claim_infeasible(self, reason: str) -> None:
        """State that no feasible plan exists, and why; then return None."""
        self._record.infeasible = reason

    def explain(self, reason: str) -> None:
        """Say why nothing (better) was found: no proof, only a reason for the person who reads the result."""
        self._record.explanation = reason

    def note_limit(self, limit: Limit) -> None:
        """Say which budget shaped the search, where the component itself kept to it (annealing schedules do)."""
        self._record.limit = limit

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the wall time of a block to a named stage of the trace."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._record.lock:
                stages = self._record.stages
                stages[name] = stages.get(name, 0.0) + time.perf_counter() - start

    def sub(
        self,
        solver: object,
        share: float = 1.0,
        *,
        placement: Placement | None = None,
        packing: Packing | None = None,
        warm_start: Plan | None = None,
    ) -> Run:
        """A run for a component inside this one.

        Parameters
        ----------
        solver : object
            The component, for the history.
        share : float
            Share of the time left and of the iteration limit, in (0, 1].
        placement, packing : optional
            What is fixed for the component.
        warm_start : Plan, optional
            Default: this run's.

        Returns
        -------
        Run
            Same clock, archive and cancellation; its randomness is a stream of
            its own, numbered by the order of creation.
        """
        child = object.__new__(Run)
        child._record = self._record
        child._entropy = (*self._entropy, self._children)
        self._children += 1
        child._children = 0
        left = self._time_left()
        child._deadline = min(self._deadline, time.perf_counter() + share * left) if left < math.inf else math.inf
        child._solver = component_spec(solver)
        child.seed = int(np.random.SeedSequence(child._entropy).generate_state(1, np.uint32)[0])
        child.num_threads = self.num_threads
        child.iteration_limit = (
            None if self.iteration_limit is None else max(1, math.floor(share * self.iteration_limit))
        )
        child.warm_start = self.warm_start if warm_start is None else warm_start
        child.placement = self.placement if placement is None else placement
        child.packing = self.packing if packing is None else packing
        child.previous_placement = self.previous_placement
        child.claims = []
        return child

    def adopt(self, child: Run, *levels: str) -> None:
        """Take over a sub-run's claims (all of them, or the named levels)."""
        for claim in child.claims:
            if not levels or claim.level in levels:
                self.claims = [mine for mine in self.claims if mine.level != claim.level]
                self.claims.append(claim)

    def trace(self) -> Trace:
        """The history so far."""
        record = self._record
        return Trace(tuple(record.incumbents), tuple(record.bounds), dict(record.stages))
