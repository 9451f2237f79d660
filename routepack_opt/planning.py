"""The shared runner: ``solve``, ``place``, ``pack`` and ``compare``.

Every planner runs through here: timed, seeded, cancellable; its plan is
evaluated again and a claim that differs is an error, not a row in a table.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack_opt import bounds, metrics, migration, registry
from routepack_opt import score as scoring
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import Faults, InvalidInputError, SolverClaimError, refuse_unknown
from routepack_opt.plan import Packing, Placement, Plan, placement_faults
from routepack_opt.problem import Problem
from routepack_opt.result import LevelResult, Limit, Result, Status
from routepack_opt.score import LEVELS, Score, packing_violations, violations
from routepack_opt.solver import AGGREGATE_LEVEL, BLOCK_LEVEL, Claim, Packer, Placer, Planner, Progress, Run

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DEFAULT_TIME_LIMIT", "PLACER_SHARE", "Runs", "compare", "pack", "place", "solve", "warm_up"]

log = logging.getLogger(__name__)

#: Seconds a planner gets when neither a time limit nor an iteration limit is given.
DEFAULT_TIME_LIMIT = 2.0
#: Share of the time limit that the placer of ``placer+packer`` may use; the packer gets all that is left. Iterations
#: are counted by each component for itself: the placer may use this share of the limit, the packer the whole.
PLACER_SHARE = 0.25

_WARM = CostModel(
    (OperatorClass("attention", Fraction(1), Fraction(1)), OperatorClass("dense", Fraction(1), Fraction(0)))
)

#: Enough for every stage of a planner to run once.
_WARM_ITERATIONS = 2_000
_warmed: set[str] = set()

Stop = Callable[[], bool]
ProgressCallback = Callable[[Progress], None]


def solve(
    problem: Problem,
    planner: str | object = "lpt+annealing",
    *,
    time_limit: float | None = None,
    iteration_limit: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    warm_start: Plan | None = None,
    previous: Placement | None = None,
    stop: Any = None,
    on_progress: ProgressCallback | None = None,
    progress: bool | None = None,
) -> Result:
    """Plan placement and packing.

    Parameters
    ----------
    problem : Problem
    planner : str, object or (placer, packer)
        A spec such as ``"lpt+annealing"`` (see :mod:`routepack_opt.registry`), a
        component with ``plan``, or a pair of components.
    time_limit : float, optional
        Wall seconds; default 2 s unless ``iteration_limit`` is given. A placer
        in ``placer+packer`` gets at most a quarter of it. A planner of one pass,
        such as ``lpt+ffd``, finishes whatever the limit.
    iteration_limit : int, optional
        Budget in the solver's iterations. Alone (no time limit) it makes the run
        reproducible byte for byte for any number of threads.
    seed : int
        At least 0.
    num_threads : int, optional
        Default: the processors this process may use.
    warm_start : Plan, optional
        A feasible plan of this problem; the result is never worse.
    previous : Placement, optional
        Where the experts are now: ranks and slots are relabelled, at no cost in the
        score, so that the fewest experts move (:mod:`routepack_opt.migration`).
    stop : callable or object with ``is_set()``, optional
        Asked often; True ends the run with its best plan, limit INTERRUPTED.
    on_progress : callable, optional
        Called with :class:`Progress`, at most ten times a second.
    progress : bool, optional
        A progress bar; default: for budgets above two seconds where someone watches.

    Returns
    -------
    Result
        A time-out or an interrupt (Ctrl-C) is a result with its best plan.

    Raises
    ------
    InvalidInputError
        If an argument is invalid, or the planner cannot treat this problem or
        run on this installation.
    SolverClaimError
        If the solver claims what the evaluator refutes.
    """
    _require_problem(problem, "planning")
    built = _build(planner)
    faults = Faults()
    if isinstance(built, tuple) and len(built) != 2:
        faults.add(f"planner is a tuple of {len(built)}; give a pair (placer, packer) or a joint planner")
    elif isinstance(built, tuple):
        if not isinstance(built[0], Placer):
            faults.add(f"{built[0]!r} has no place(problem, packing, run)")
        if not isinstance(built[1], Packer):
            faults.add(f"{built[1]!r} has no pack(problem, placement, run)")
    elif not isinstance(built, Planner):
        faults.add(f"{planner!r} has no plan(problem, run); give a pair (placer, packer) or a joint planner")
    faults.raise_if_any("planning")
    faults.extend(_refusals(problem, _parts(problem, built)))
    faults.extend(_warm_start_faults(problem, warm_start))
    faults.extend(_previous_faults(problem, previous))
    run, settings = _start(
        problem,
        faults,
        time_limit=time_limit,
        iteration_limit=iteration_limit,
        seed=seed,
        num_threads=num_threads,
        warm_start=warm_start,
        previous=previous,
        stop=stop,
        on_progress=on_progress,
    )
    name = registry.canonical(built)
    joint = not isinstance(built, tuple)
    scope = str(getattr(built, "scope", "any-placement")) if joint else "fixed-placement"

    def decide() -> Plan | None:
        if isinstance(built, tuple):
            return _hierarchical(problem, built[0], built[1], run)
        child = run.sub(built)
        with run.stage("plan"):
            found: Plan | None = built.plan(problem, child)
        run.adopt(child)
        return found

    with _bar(run, progress, settings, name):
        plan = _guard(decide, run)
    return _conclude(problem, plan, run, name=name, scope=scope, settings=settings)


def place(
    problem: Problem,
    placer: str | object = "lpt",
    *,
    packing: Packing | Result | None = None,
    time_limit: float | None = None,
    iteration_limit: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    previous: Placement | None = None,
    stop: Any = None,
    on_progress: ProgressCallback | None = None,
    progress: bool | None = None,
) -> Result:
    """Place experts only.

    Parameters
    ----------
    problem : Problem
    placer : str or object
        A placer spec or component.
    packing : Packing or Result, optional
        Place for the blocks of this packing instead of for the window load.
    time_limit, iteration_limit, seed, num_threads, previous, stop, on_progress, progress
        See :func:`solve`.

    Returns
    -------
    Result
        ``result.placement``; its one level is Σ_l max_p of the window load
        (``aggregate_expert_work``) or, with a packing, Σ_{r,g,l} max_p W
        (``block_expert_work``), in work units. With a packing ``plan`` and
        ``score`` are set too.
    """
    _require_problem(problem, "place")
    built = _one(placer, Placer, "placer")
    if isinstance(packing, Result):
        packing = packing.packing
    faults = Faults()
    faults.extend(_refusals(problem, (built,)))
    if not problem.num_layers:
        faults.add("the problem has no routing counts, so there are no experts to place")
    if packing is not None and not isinstance(packing, Packing):
        faults.add(f"packing is {packing!r}; it must be a Packing or a Result")
    elif packing is not None:
        faults.extend(packing_violations(problem, packing))
    faults.extend(_previous_faults(problem, previous))
    run, settings = _start(
        problem,
        faults,
        time_limit=time_limit,
        iteration_limit=iteration_limit,
        seed=seed,
        num_threads=num_threads,
        warm_start=None,
        previous=previous,
        stop=stop,
        on_progress=on_progress,
    )
    run.packing = packing
    name = registry.canonical(built)
    with _bar(run, progress, settings, name):
        child = run.sub(built)
        with run.stage("placement"):
            placement = _guard(lambda: built.place(problem, packing, child), run)
    run.adopt(child)
    runtime = run.time()
    returned = placement
    if placement is None:
        placement = run._record.best_placement
    level = AGGREGATE_LEVEL if packing is None else BLOCK_LEVEL
    value = None
    plan = score = None
    if placement is not None:
        found = placement_faults(problem, placement)
        if found:
            raise SolverClaimError(f"{name} returned a placement that does not fit: {'; '.join(found)}")
        if previous is not None:
            placement = migration.relabel(placement, previous)
        if packing is not None and run.best_score is not None:
            known = scoring.evaluate(problem, Plan.of(problem, placement, packing))
            if run.best_score.breakdown.expert.sum() < known.breakdown.expert.sum():
                assert run.best is not None
                placement = run.best.placement
        if packing is None:
            value = int(bounds.aggregate_load(problem, placement).max(axis=1).sum()) * problem.expert_unit
        else:
            plan = Plan.of(problem, placement, packing)
            score = scoring.evaluate(problem, plan)
            value = int(score.breakdown.expert.sum())
    for claim in run.claims:
        if returned is not None and claim.level == level and claim.value not in (None, value):
            raise SolverClaimError(f"{name} claims {level} = {claim.value}; the evaluator finds {value}")
    levels = _levels((level,), (value,), run)
    status, limit = _overall(levels)
    return Result(
        status=status,
        limit=limit,
        scope="any-placement",
        levels=levels,
        plan=plan,
        placement=placement,
        score=score,
        trace=run.trace(),
        planner=name,
        seed=seed,
        runtime=runtime,
        reason=run._record.infeasible or run._record.explanation,
        num_rows=problem.num_rows,
        num_rows_bound=problem.rows.bound,
        num_threads=run.num_threads,
        settings=settings,
    )


def pack(
    problem: Problem,
    packer: str | object = "annealing",
    *,
    placement: Placement | Result | None = None,
    time_limit: float | None = None,
    iteration_limit: int | None = None,
    seed: int = 0,
    num_threads: int | None = None,
    warm_start: Plan | Packing | None = None,
    stop: Any = None,
    on_progress: ProgressCallback | None = None,
    progress: bool | None = None,
) -> Result:
    """Pack samples only, for a fixed placement.

    Parameters
    ----------
    problem : Problem
    packer : str or object
        A packer spec or component.
    placement : Placement or Result, optional
        Default: contiguous, as a trainer without placement has it.
    warm_start : Plan or Packing, optional
        A feasible packing to start from; the result is never worse.
    time_limit, iteration_limit, seed, num_threads, stop, on_progress, progress
        See :func:`solve`.

    Returns
    -------
    Result
        Its scope is ``fixed-placement``.
    """
    _require_problem(problem, "pack")
    built = _one(packer, Packer, "packer")
    if isinstance(placement, Result):
        if placement.placement is None:
            raise InvalidInputError("the result handed in as placement holds none", context="pack")
        placement = placement.placement
    fixed = (
        Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
        if placement is None
        else placement
    )
    faults = Faults()
    if not isinstance(fixed, Placement):
        raise InvalidInputError(f"placement is {fixed!r}; it must be a Placement or a Result", context="pack")
    faults.extend(placement_faults(problem, fixed))
    faults.extend(_refusals(problem, (built,)))
    if isinstance(warm_start, Packing):
        warm_start = None if faults else Plan.of(problem, fixed, warm_start)
    faults.extend(_warm_start_faults(problem, warm_start))
    if isinstance(warm_start, Plan) and warm_start.placement != fixed:
        warm_start = Plan.of(problem, fixed, warm_start.packing)
    run, settings = _start(
        problem,
        faults,
        time_limit=time_limit,
        iteration_limit=iteration_limit,
        seed=seed,
        num_threads=num_threads,
        warm_start=warm_start,
        previous=None,
        stop=stop,
        on_progress=on_progress,
    )
    run.placement = fixed
    name = registry.canonical(built)
    with _bar(run, progress, settings, name):
        child = run.sub(built)
        with run.stage("packing"):
            packing = _guard(lambda: built.pack(problem, fixed, child), run)
    run.adopt(child)
    plan = None if packing is None else Plan.of(problem, fixed, packing)
    return _conclude(problem, plan, run, name=name, scope="fixed-placement", settings=settings)


def warm_up(planners: Sequence[str | object] = ("lpt+annealing", "alternating")) -> None:
    """Compile the kernels of some planners, or load them from numba's cache, before time matters.

    Plans tiny problems with 16- and 32-bit loads, so that the first real step
    does not pay for compilation (tens of seconds once on a new machine, a second
    or two with a warm cache). Only built-in components are warmed up, each
    planner once a process.

    Parameters
    ----------
    planners : sequence of str or object
        The planners that will be used, see :func:`solve`.
    """
    for planner in planners:
        built = _build(planner)
        name = registry.canonical(built)
        parts = built if isinstance(built, tuple) else (built,)
        if name in _warmed or not all(type(part).__module__.startswith("routepack_opt.") for part in parts):
            continue
        for length, dtype in ((8, np.uint16), (40_000, np.uint32)):
            counts = np.full((8, 2, 8), length // 4, dtype=dtype)
            problem = Problem.from_arrays(
                np.full(8, length), counts, top_k=2, capacity=2 * length, ep_size=4, dp_size=4, num_shards=2, cost=_WARM
            )
            if not _refusals(problem, _parts(problem, built)):
                solve(problem, built, iteration_limit=_WARM_ITERATIONS, num_threads=1, progress=False)
        _warmed.add(name)


def _hierarchical(problem: Problem, placer: Placer, packer: Packer, run: Run) -> Plan | None:
    """The paper's order: place for the window load, then pack for that placement."""
    if problem.num_layers:
        child = run.sub(placer, PLACER_SHARE)
        with run.stage("placement"):
            placement = placer.place(problem, None, child)
        if placement is None:
            return None
        found = placement_faults(problem, placement)
        if found:
            raise SolverClaimError(f"the placer returned a placement that does not fit: {'; '.join(found)}")
    else:
        placement = Placement.contiguous(0, 0, ep_size=problem.ep_size)
    warm = run.warm_start
    if warm is not None and warm.placement != placement:
        warm = Plan.of(problem, placement, warm.packing)
    child = run.sub(packer, placement=placement, warm_start=warm)
    with run.stage("packing"):
        packing = packer.pack(problem, placement, child)
    run.adopt(child)
    return None if packing is None else Plan.of(problem, placement, packing)


def _require_problem(problem: Any, context: str) -> None:
    if not isinstance(problem, Problem):
        raise InvalidInputError(
            f"problem is {type(problem).__name__}; it must be a Problem (Problem.load reads one from a file)",
            context=context,
        )


def _build(planner: Any) -> Any:
    return registry.parse(planner) if isinstance(planner, str) else planner


def _parts(problem: Problem, built: Any) -> tuple[Any, ...]:
    """The components that will be asked: without routing there is nothing to place."""
    if not isinstance(built, tuple):
        return (built,)
    return built if problem.num_layers else built[1:]


def _one(given: Any, protocol: Any, role: str) -> Any:
    built = registry.component(given) if isinstance(given, str) else given
    if not isinstance(built, protocol):
        raise InvalidInputError(f"{given!r} is no {role}", context=role)
    return built


def _refusals(problem: Problem, parts: Sequence[Any]) -> list[str]:
    faults = []
    for part in parts:
        name = registry.canonical(part)
        reason = part.available() if hasattr(part, "available") else None
        if reason:
            faults.append(f"{name} cannot run here: {reason}")
            continue
        reason = part.unsupported(problem) if hasattr(part, "unsupported") else None
        if reason:
            faults.append(f"{name} cannot treat this problem: {reason}")
    return faults


def _warm_start_faults(problem: Problem, warm_start: Any) -> list[str]:
    if warm_start is None:
        return []
    if not isinstance(warm_start, Plan):
        return [f"warm_start is {type(warm_start).__name__}; it must be a Plan"]
    return [f"warm_start: {fault}" for fault in violations(problem, warm_start)]


def _previous_faults(problem: Problem, previous: Any) -> list[str]:
    if previous is None:
        return []
    if not isinstance(previous, Placement):
        return [f"previous is {previous!r}; it must be a Placement"]
    return [f"previous: {fault}" for fault in placement_faults(problem, previous)]


def default_num_threads() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def _start(
    problem: Problem,
    faults: Faults,
    *,
    time_limit: float | None,
    iteration_limit: int | None,
    seed: int,
    num_threads: int | None,
    warm_start: Plan | None,
    previous: Placement | None,
    stop: Any,
    on_progress: ProgressCallback | None,
) -> tuple[Run, dict[str, float | int | None]]:
    if time_limit is not None and (
        isinstance(time_limit, bool)
        or not isinstance(time_limit, int | float | np.integer | np.floating)
        or not 0 <= time_limit < float("inf")
    ):
        faults.add(f"time_limit is {time_limit!r}; it must be seconds, finite and at least 0")
    for label, value, least in (
        ("iteration_limit", iteration_limit, 1),
        ("seed", seed, 0),
        ("num_threads", num_threads, 1),
    ):
        if value is None and label != "seed":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            faults.add(f"{label} is {value!r}; it must be an integer of at least {least}")
    if stop is not None and not callable(stop) and not hasattr(stop, "is_set"):
        faults.add(f"stop is {stop!r}; it must be callable or have is_set()")
    if on_progress is not None and not callable(on_progress):
        faults.add(f"on_progress is {on_progress!r}; it must be callable")
    faults.raise_if_any("planning")
    if time_limit is None and iteration_limit is None:
        time_limit = DEFAULT_TIME_LIMIT
    threads = default_num_threads() if num_threads is None else int(num_threads)
    # Fingerprint and derived arrays belong to the problem, not to the planner's budget.
    _ = problem.fingerprint, problem.attention_work, problem.aligned_lengths
    run = Run(
        problem,
        seed=int(seed),
        time_limit=None if time_limit is None else float(time_limit),
        iteration_limit=None if iteration_limit is None else int(iteration_limit),
        num_threads=threads,
        warm_start=warm_start,
        previous_placement=previous,
        stop=stop.is_set if hasattr(stop, "is_set") else stop,
        on_progress=on_progress,
    )
    if warm_start is not None:
        run._solver = "warm start"
        run.report(warm_start)
    return run, {
        "time_limit": None if time_limit is None else float(time_limit),
        "iteration_limit": None if iteration_limit is None else int(iteration_limit),
    }


def _guard(decide: Callable[[], Any], run: Run) -> Any:
    try:
        return decide()
    except KeyboardInterrupt:
        run._record.interrupted = True
        log.info("interrupted; keeping the best plan so far")
        return None


def _conclude(
    problem: Problem,
    plan: Plan | None,
    run: Run,
    *,
    name: str,
    scope: str,
    settings: Mapping[str, float | int | None],
) -> Result:
    runtime = run.time()
    record = run._record
    returned: Score | None = None
    if plan is not None:
        found = violations(problem, plan)
        if found:
            raise SolverClaimError(f"{name} returned an infeasible plan: {'; '.join(found[:5])}")
        returned = scoring.evaluate(problem, plan)
        by_level = dict(zip(LEVELS, returned.levels, strict=True))
        for claim in run.claims:
            if claim.level in by_level and claim.value is not None and claim.value != by_level[claim.level]:
                raise SolverClaimError(
                    f"{name} claims {claim.level} = {claim.value}; the evaluator finds {by_level[claim.level]}"
                )
        run.report(plan)
    best, score = record.best, record.best_score
    if returned is not None and score is not None and returned.levels == score.levels:
        # Claims are about the plan that came back, not about an equally good one met on the way.
        best, score = plan, returned
    reason = record.infeasible
    proof = bool(reason)
    if reason and best is not None:
        raise SolverClaimError(f"{name} claims infeasibility ({reason}), but a feasible plan is known")
    values: tuple[int | None, ...] = (None, None, None) if score is None else score.levels
    if score is not None and (returned is None or returned.levels != score.levels):
        # The archive (a warm start, an earlier incumbent) holds a better plan than came back. A proof cannot stand
        # against it; a bound on the first level holds for every plan in scope, later bounds lean on claimed values.
        same_placement = best is not None and plan is not None and best.placement == plan.placement
        in_scope = scope == "any-placement" or plan is None or same_placement
        if returned is not None and in_scope and any(claim.proved for claim in run.claims):
            raise SolverClaimError(f"{name} claims optimality of {returned.levels}, but {score.levels} is known")
        run.claims = [
            replace(claim, value=None, proved=False, limit=claim.limit or Limit.EXHAUSTED)
            for claim in run.claims
            if claim.level == LEVELS[0] and in_scope
        ]
    plan = best
    if plan is not None and run.previous_placement is not None and problem.num_layers:
        # Labels of ranks and slots inside a rank cost nothing, so they are chosen for the fewest moves.
        plan = Plan.of(problem, migration.relabel(plan.placement, run.previous_placement), plan.packing)
        score = scoring.evaluate(problem, plan)
    levels = _levels(LEVELS, values, run)
    status, limit = _overall(levels)
    if proof:
        status, limit = Status.INFEASIBLE, None
        levels = tuple(LevelResult(level, None, None, Status.INFEASIBLE, None, 0.0) for level in LEVELS)
    return Result(
        status=status,
        limit=limit,
        scope=scope,
        levels=levels,
        plan=plan,
        placement=None if plan is None else plan.placement,
        score=score,
        trace=run.trace(),
        planner=name,
        seed=run.seed,
        runtime=runtime,
        reason=reason or record.explanation,
        num_rows=problem.num_rows,
        num_rows_bound=problem.rows.bound,
        num_threads=run.num_threads,
        settings=settings,
    )


def _levels(names: Sequence[str], values: Sequence[int | None], run: Run) -> tuple[LevelResult, ...]:
    claims: dict[str, Claim] = {claim.level: claim for claim in run.claims}
    stopped = run.limit_felt()
    results = []
    proved_before = True
    for name, value in zip(names, values, strict=True):
        claim = claims.get(name)
        bound = None if claim is None else claim.bound
        runtime = 0.0 if claim is None else claim.runtime
        if value is not None and bound is not None and bound > value:
            raise SolverClaimError(f"level {name}: the claimed bound {bound} is above the value {value} of the plan")
        if value is None:
            results.append(LevelResult(name, None, bound, Status.NO_SOLUTION, stopped or _limit(claim), runtime))
            proved_before = False
        elif claim is not None and claim.proved and claim.value == value and proved_before:
            results.append(LevelResult(name, value, bound, Status.OPTIMAL, None, runtime))
        else:
            results.append(LevelResult(name, value, bound, Status.FEASIBLE, _limit(claim, stopped), runtime))
            proved_before = False
    return tuple(results)


def _limit(claim: Claim | None, stopped: Limit | None = None) -> Limit:
    if claim is not None and claim.limit is not None:
        return claim.limit
    return stopped or Limit.EXHAUSTED


def _overall(levels: Sequence[LevelResult]) -> tuple[Status, Limit | None]:
    for level in levels:
        if level.status is not Status.OPTIMAL:
            return level.status, level.limit
    return Status.OPTIMAL, None


def _chain(first: ProgressCallback | None, second: ProgressCallback) -> ProgressCallback:
    if first is None:
        return second

    def both(state: Progress) -> None:
        first(state)
        second(state)

    return both


def someone_watches() -> bool:
    """Whether a progress bar would be seen: a terminal, or a notebook."""
    if sys.stderr.isatty():
        return True
    kernel = sys.modules.get("IPython")
    shell = kernel.get_ipython() if kernel is not None else None
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def _bar(run: Run, progress: bool | None, settings: Mapping[str, float | int | None], name: str) -> Iterator[None]:
    """Show a progress bar while the block runs, where one is wanted, beside the caller's own callback."""
    limit = settings["time_limit"]
    wanted = progress if progress is not None else (limit or 0) > 2 and someone_watches()
    if not wanted:
        yield
        return
    from tqdm.auto import tqdm

    with tqdm(total=round(limit, 1) if limit else None, desc=name, unit="s", leave=False) as bar:

        def update(state: Progress) -> None:
            bar.n = round(min(state.time, limit) if limit else state.time, 1)
            if state.best is not None:
                bar.set_postfix_str(f"best {state.best[0]:.6g}", refresh=False)
            bar.refresh()

        run._record.on_progress = _chain(run._record.on_progress, update)
        yield


@dataclass(frozen=True, repr=False)
class Runs:
    """Results of several planners on one problem.

    ``runs[planner]`` is that planner's best result, ``runs.best`` the best of
    all; printing it gives the comparison table.

    Attributes
    ----------
    problem : Problem
    results : tuple of Result
        In the order planners and seeds were given.
    bound : Bound
        Best proven any-placement bound on the first level.
    """

    problem: Problem
    results: tuple[Result, ...]
    bound: bounds.Bound
    _frames: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def planners(self) -> list[str]:
        """Planner specs in order."""
        return list(dict.fromkeys(result.planner for result in self.results))

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __getitem__(self, planner: str) -> Result:
        name = registry.canonical(registry.parse(planner))
        faults = refuse_unknown([name], self.planners, "planner of this comparison")
        if faults:
            raise InvalidInputError(faults)
        return _best([result for result in self.results if result.planner == name])

    @property
    def best(self) -> Result:
        """The result with the best plan.

        Raises
        ------
        InvalidInputError
            If no planner found a plan.
        """
        best = _best(list(self.results))
        if best.score is None:
            raise InvalidInputError("no planner found a plan; give more time or another planner")
        return best

    def gap(self, result: Result) -> float | None:
        """Relative gap of a result's first level to :attr:`bound`; None without a plan."""
        return bounds.gap(result.score, self.bound)

    def to_frame(self) -> pd.DataFrame:
        """One row a run: planner, seed, status, limit, levels in units of J, gap, metrics, seconds."""
        import pandas as pd

        if "runs" not in self._frames:
            rows = []
            for result in self.results:
                row: dict[str, Any] = {
                    "planner": result.planner,
                    "seed": result.seed,
                    "status": result.status.value,
                    "limit": None if result.limit is None else result.limit.value,
                    "scope": result.scope,
                    "num_rows": result.num_rows,
                    "gap": self.gap(result),
                    "runtime": result.runtime,
                }
                for level, name in enumerate(LEVELS):
                    row[name] = None if result.score is None else result.score.values[level]
                if result.plan is not None:
                    row |= metrics.measure(self.problem, result.plan, result.score).to_dict()
                rows.append(row)
            self._frames["runs"] = pd.DataFrame(rows)
        frame: pd.DataFrame = self._frames["runs"]
        return frame.copy()

    def table(self) -> pd.DataFrame:
        """The printed table: one row a planner, medians over seeds.

        Columns: score levels in units of J, certified gap in %, EP-rank CV of the
        window and within blocks, EP peak relative to the first planner, wall seconds.
        """
        import pandas as pd

        frame = self.to_frame()
        rows = []
        first_peak: float | None = None
        for planner in self.planners:
            part = frame[frame["planner"] == planner]
            solved = part[part["max_shard_work"].notna()]
            row: dict[str, Any] = {"planner": planner, "status": "/".join(dict.fromkeys(part["status"]))}
            if len(solved):
                peak = float(solved["ep_peak"].median())
                first_peak = peak if first_peak is None else first_peak
                gap_values = solved["gap"].dropna()
                row |= {
                    "shard work": solved["max_shard_work"].median(),
                    "total work": solved["total_work"].median(),
                    "worst row": solved["max_row_work"].median(),
                    "gap %": 100 * gap_values.median() if len(gap_values) else None,
                }
                if self.problem.num_layers:
                    row |= {
                        "CV %": 100 * solved["global_cv"].median(),
                        "row CV %": 100 * solved["row_cv"].median(),
                        "EP peak %": 100 * (peak / first_peak - 1) if first_peak else None,
                    }
            row["s"] = part["runtime"].median()
            rows.append(row)
        return pd.DataFrame(rows)

    def formatted(self) -> pd.DataFrame:
        """:meth:`table` with numbers as text, as it is printed."""
        table = self.table()
        digits = {"gap %": 2, "CV %": 2, "row CV %": 2, "EP peak %": 2, "s": 2}
        for column in table.columns:
            if column not in ("planner", "status"):
                places = digits.get(column, 3)
                table[column] = [
                    "-" if value is None or value != value else f"{value:,.{places}f}" for value in table[column]
                ]
        return table

    def _head(self) -> str:
        bound = self.bound
        value = self.problem.units(bound.value)
        return f"bound on {bound.level}: {value:,.3f} J, {bound.scope}, by {bound.method}"

    def __repr__(self) -> str:
        return f"{self.problem!r}\n{self._head()}\n{self.formatted().to_string(index=False)}"

    def _repr_html_(self) -> str:
        return f"<p>{self.problem!r}<br>{self._head()}</p>{self.formatted().to_html(index=False)}"


def _seed_list(seeds: Any, faults: Faults) -> list[int]:
    """Seeds from a count or from a list of seeds."""
    if isinstance(seeds, int | np.integer) and not isinstance(seeds, bool) and seeds >= 1:
        return list(range(int(seeds)))
    if (
        isinstance(seeds, Sequence | np.ndarray)
        and not isinstance(seeds, str)
        and len(seeds)
        and all(isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0 for seed in seeds)
    ):
        return [int(seed) for seed in seeds]
    faults.add(f"seeds is {seeds!r}; it must be a count of at least 1 or a list of integers of at least 0")
    return []


def _best(results: list[Result]) -> Result:
    solved = [result for result in results if result.score is not None]
    if not solved:
        return results[0]
    best = solved[0]
    for result in solved[1:]:
        assert result.score is not None
        assert best.score is not None
        if result.score < best.score:
            best = result
    return best


def compare(
    problem: Problem,
    planners: Sequence[str | object],
    *,
    time_limit: float | None = None,
    iteration_limit: int | None = None,
    seeds: int | Sequence[int] = 1,
    num_threads: int | None = None,
    previous: Placement | None = None,
    stop: Any = None,
    progress: bool | None = None,
) -> Runs:
    """Run several planners on one problem and hold them against one proven bound.

    Kernels are compiled before the clocks start (:func:`warm_up`).

    Parameters
    ----------
    problem : Problem
    planners : sequence of str or object
        Specs or components, see :func:`solve`. All are checked before the first runs.
    seeds : int or sequence of int
        Seeds 0..n−1, or the seeds themselves.
    time_limit, iteration_limit, num_threads, previous, stop
        For each run, see :func:`solve`.
    progress : bool, optional
        A bar over runs; default: where someone watches and there is more than a run.

    Returns
    -------
    Runs
    """
    _require_problem(problem, "comparison")
    faults = Faults()
    if isinstance(planners, str):
        planners = [planners]
    if not isinstance(planners, Sequence) or not planners:
        raise InvalidInputError(
            f"planners is {planners!r}; no planner is named; give a list of specs", context="comparison"
        )
    built = []
    for planner in planners:
        try:
            parsed = _build(planner)
        except InvalidInputError as error:
            faults.extend(error.faults)
            continue
        faults.extend(_refusals(problem, _parts(problem, parsed)))
        built.append(parsed)
    seed_list = _seed_list(seeds, faults)
    faults.raise_if_any("comparison")
    jobs = [(planner, seed) for planner in built for seed in seed_list]
    warm_up(built)
    wanted = progress if progress is not None else len(jobs) > 1 and someone_watches()
    from tqdm.auto import tqdm

    results = []
    for planner, seed in tqdm(jobs, desc="comparing", unit="run", disable=not wanted, leave=False):
        results.append(
            solve(
                problem,
                planner,
                time_limit=time_limit,
                iteration_limit=iteration_limit,
                seed=seed,
                num_threads=num_threads,
                previous=previous,
                stop=stop,
                progress=False,
            )
        )
        if results[-1].limit is Limit.INTERRUPTED:
            break
    best = bounds.best_bound(problem, LEVELS[0])
    return Runs(problem, tuple(results), best)
