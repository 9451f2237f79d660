from __future__ import annotations

import threading
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError, SolverClaimError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Status
from routepack_opt.score import LEVELS, evaluate
from routepack_opt.solver import BLOCK_LEVEL, Run, Solver


def problem() -> Problem:
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 9, 6)
    counts = np.zeros((6, 2, 4), dtype=np.int64)
    for i, t in enumerate(lengths):
        first = int(rng.integers(0, t + 1))
        counts[i] = [first, t - first, 0, 0]
    return Problem.from_arrays(lengths, counts, top_k=1, capacity=30, ep_size=2, dp_size=2, num_rows=2)


def cells(found: Problem, *, bad: bool) -> Packing:
    """Everything in one cell (bad), or dealt over the four (good)."""
    index = np.zeros(6, dtype=int) if bad else np.arange(6) % 4
    return Packing.from_cells(index, dp_size=found.dp_size)


@dataclass(frozen=True)
class Scripted(Solver):
    """Does what a test tells it."""

    name: ClassVar[str] = "scripted"
    behaviour: str = "good"

    def unsupported(self, found: Problem) -> str | None:
        return "told so" if self.behaviour == "unsupported" else None

    def available(self) -> str | None:
        return "not installed" if self.behaviour == "unavailable" else None

    def place(self, found: Problem, packing: Packing | None, run: Run) -> Placement | None:
        del packing, run
        return Placement.contiguous(found.num_layers, found.num_experts, ep_size=found.ep_size)

    def pack(self, found: Problem, placement: Placement, run: Run) -> Packing | None:
        good, bad = cells(found, bad=False), cells(found, bad=True)
        score = evaluate(found, Plan.of(found, placement, good))
        if self.behaviour == "good":
            return good
        if self.behaviour == "proved":
            for level, value in zip(LEVELS, score.levels, strict=True):
                run.claim(level, value, value, proved=True, limit=None)
            return good
        if self.behaviour == "first level proved":
            run.claim(LEVELS[0], score.levels[0], score.levels[0], proved=True, limit=None)
            run.claim(LEVELS[1], score.levels[1], 0, proved=False, limit=Limit.TIME)
            return good
        if self.behaviour == "wrong value":
            run.claim(LEVELS[0], score.levels[0] - 1, None, proved=False, limit=Limit.TIME)
            return good
        if self.behaviour == "wrong bound":
            run.claim(LEVELS[0], None, score.levels[0] + 1, proved=False, limit=Limit.TIME)
            return good
        if self.behaviour == "infeasible plan":
            return Packing.from_cells([99] * 6, dp_size=2)
        if self.behaviour == "infeasible report":
            run.report(Packing.from_cells([99] * 6, dp_size=2))
        if self.behaviour == "claims infeasible":
            run.claim_infeasible("no room")
        if self.behaviour == "claims infeasible after all":
            run.report(good)
            run.claim_infeasible("no room")
        if self.behaviour == "proves a bad plan":
            worse = evaluate(found, Plan.of(found, placement, bad))
            for level, value in zip(LEVELS, worse.levels, strict=True):
                run.claim(level, value, value, proved=True, limit=None)
            return bad
        if self.behaviour == "worse last":
            run.report(good)
            return bad
        if self.behaviour == "bound only":
            run.claim(LEVELS[0], None, 1, proved=False, limit=Limit.TIME)
        if self.behaviour == "bound and report":
            run.report(good)
            run.claim(LEVELS[0], None, 1, proved=False, limit=Limit.TIME)
            run.claim(LEVELS[1], None, 1, proved=False, limit=Limit.TIME)
        if self.behaviour == "waits":
            run.report(bad)
            while not run.stopped():
                run.progress(0.5)
        if self.behaviour == "Ctrl-C":
            run.report(good)
            raise KeyboardInterrupt
        if self.behaviour == "explains":
            run.explain("gave up")
        return None


def solve(behaviour: str, **options: Any) -> Any:
    return planning.solve(problem(), (Scripted(), Scripted(behaviour)), **options)


def test_plain_heuristic() -> None:
    result = solve("good")
    assert (result.status, result.limit, result.scope) == (Status.FEASIBLE, Limit.EXHAUSTED, "fixed-placement")
    assert [level.name for level in result.levels] == list(LEVELS)
    assert all(level.bound is None for level in result.levels)
    assert result.planner == "scripted+scripted"
    assert set(result.trace.stages) == {"placement", "packing"}
    assert len(result.trace.incumbents) == 1
    assert result.score == evaluate(problem(), result.plan)
    assert "feasible" in repr(result)


def test_proofs_level_by_level() -> None:
    full = solve("proved")
    assert (full.status, full.limit) == (Status.OPTIMAL, None)
    assert all(level.status is Status.OPTIMAL for level in full.levels)
    part = solve("first level proved")
    assert [level.status for level in part.levels] == [Status.OPTIMAL, Status.FEASIBLE, Status.FEASIBLE]
    assert (part.status, part.limit) == (Status.FEASIBLE, Limit.TIME)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("wrong value", "claims max_shard_work"),
        ("wrong bound", "above the value"),
        ("infeasible plan", "infeasible plan"),
        ("infeasible report", "reported an infeasible plan"),
        ("claims infeasible after all", "a feasible plan is known"),
    ],
)
def test_false_claims_are_errors(behaviour: str, message: str) -> None:
    with pytest.raises(SolverClaimError, match=message):
        solve(behaviour)


def test_infeasibility_and_no_solution() -> None:
    proof = solve("claims infeasible")
    assert (proof.status, proof.limit, proof.reason, proof.plan) == (Status.INFEASIBLE, None, "no room", None)
    assert all(level.status is Status.INFEASIBLE for level in proof.levels)
    nothing = solve("explains")
    assert (nothing.status, nothing.limit, nothing.reason) == (Status.NO_SOLUTION, Limit.EXHAUSTED, "gave up")
    assert all(level.value is None for level in nothing.levels)


def test_the_archive_never_regresses() -> None:
    result = solve("worse last")
    assert result.packing == cells(problem(), bad=False)
    best = planning.solve(problem(), (Scripted(), Scripted("good"))).plan
    warm = solve("waits", time_limit=0.05, warm_start=best)
    assert warm.score == evaluate(problem(), best)
    with pytest.raises(SolverClaimError, match="claims optimality"):
        solve("proves a bad plan", warm_start=best)


def test_time_limit_stop_and_interrupt() -> None:
    timed = solve("waits", time_limit=0.05)
    assert (timed.status, timed.limit) == (Status.FEASIBLE, Limit.TIME)
    event = threading.Event()
    event.set()
    stopped = solve("waits", time_limit=60, stop=event)
    assert (stopped.status, stopped.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    interrupted = solve("Ctrl-C", time_limit=60)
    assert (interrupted.status, interrupted.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    assert interrupted.plan is not None


def test_zero_time_is_a_result() -> None:
    result = solve("waits", time_limit=0)
    assert result.status in (Status.FEASIBLE, Status.NO_SOLUTION)
    assert result.limit is Limit.TIME


@pytest.mark.parametrize("planner", ["lpt+ffd", "contiguous+ffd", "lpt+edp_aware_pair"])
def test_one_pass_has_finished_however_little_time_it_had(planner: str) -> None:
    hurried = planning.solve(problem(), planner, time_limit=0)
    calm = planning.solve(problem(), planner, time_limit=60)
    assert (hurried.status, hurried.limit) == (calm.status, calm.limit) == (Status.FEASIBLE, Limit.EXHAUSTED)
    assert hurried.plan == calm.plan
    assert all(level.limit is Limit.EXHAUSTED for level in hurried.levels)
    placed = planning.place(problem(), "lpt", time_limit=0)
    assert placed.limit in (None, Limit.EXHAUSTED)
    nothing = solve("explains", time_limit=0)
    assert (nothing.status, nothing.limit) == (Status.NO_SOLUTION, Limit.EXHAUSTED)


@pytest.mark.parametrize("planner", ["lpt+annealing", "lpt+length_annealing", "alternating", "contiguous+columns"])
def test_what_was_cut_off_says_so(planner: str) -> None:
    assert planning.solve(problem(), planner, time_limit=0).limit is Limit.TIME


def test_a_placer_cut_off_at_its_share_counts() -> None:
    @dataclass(frozen=True)
    class Waiting(Scripted):
        def place(self, found: Problem, packing: Packing | None, run: Run) -> Placement | None:
            while not run.stopped():
                pass
            return super().place(found, packing, run)

    result = planning.solve(problem(), (Waiting(), Scripted()), time_limit=0.05)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.TIME)


def test_progress_is_reported() -> None:
    seen: list[Any] = []
    solve("waits", time_limit=0.35, on_progress=seen.append)
    assert len(seen) >= 2
    assert seen[-1].fraction == 0.5
    assert seen[-1].best is not None
    assert [state.time for state in seen] == sorted(state.time for state in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": -1}, "time_limit is -1"),
        ({"time_limit": float("nan")}, "time_limit is nan"),
        ({"iteration_limit": 0}, "iteration_limit is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"num_threads": 0}, "num_threads is 0"),
        ({"stop": 3}, "stop is 3"),
        ({"on_progress": 3}, "on_progress is 3"),
        ({"warm_start": 3}, "warm_start is int"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        solve("good", **options)


def test_refusals_come_before_the_run() -> None:
    with pytest.raises(InvalidInputError, match="cannot treat this problem: told so"):
        solve("unsupported")
    with pytest.raises(InvalidInputError, match="cannot run here: not installed"):
        solve("unavailable")
    with pytest.raises(InvalidInputError, match="is empty"):
        planning.solve(problem(), "")


def test_warm_start_of_another_problem_is_refused() -> None:
    other = problem().replace(num_rows=3)
    plan = Plan.of(other, Placement.contiguous(2, 4, ep_size=2), cells(other, bad=False))
    with pytest.raises(InvalidInputError, match="warm_start"):
        solve("good", warm_start=plan)


def test_place_alone_and_for_a_packing() -> None:
    found = problem()
    alone = planning.place(found, Scripted())
    assert alone.plan is None
    assert alone.placement is not None
    window = np.zeros((2, 2), dtype=np.int64)
    load = alone.placement.rank_load(found).sum(axis=0)
    window += load.astype(np.int64)
    assert alone.levels[0].value == int(window.max(axis=1).sum()) * found.expert_unit
    blocks = planning.place(found, Scripted(), packing=cells(found, bad=False))
    assert blocks.levels[0].name == BLOCK_LEVEL
    assert blocks.score is not None
    assert blocks.levels[0].value == int(blocks.score.breakdown.expert.sum())
    with pytest.raises(InvalidInputError, match="no placer"):
        planning.place(found, "annealing")


def test_pack_with_a_given_placement() -> None:
    found = problem()
    placement = Placement.from_slots([[1, 0, 3, 2], [3, 2, 1, 0]], ep_size=2)
    result = planning.pack(found, Scripted(), placement=placement, warm_start=cells(found, bad=True))
    assert result.placement == placement
    assert result.scope == "fixed-placement"
    assert planning.pack(found, Scripted(), placement=result).placement == placement
    assert planning.pack(found, Scripted()).placement == Placement.contiguous(2, 4, ep_size=2)
    with pytest.raises(InvalidInputError, match="ep_size 4"):
        planning.pack(found, Scripted(), placement=Placement.contiguous(2, 4, ep_size=4))


def test_compare_holds_results_against_one_bound() -> None:
    found = problem()
    runs = planning.compare(found, [(Scripted(), Scripted("good")), (Scripted(), Scripted("worse last"))], seeds=2)
    assert len(runs) == 4
    assert runs.bound.scope == "any-placement"
    assert runs.best.score is not None
    assert runs.gap(runs.best) is not None
    frame = runs.to_frame()
    assert list(frame["seed"]) == [0, 1, 0, 1]
    assert (frame["gap"] >= 0).all()
    assert "gap %" in repr(runs)
    assert "<table" in runs._repr_html_()


def test_compare_checks_everything_first() -> None:
    with pytest.raises(InvalidInputError) as caught:
        planning.compare(problem(), ["lptt+annealing", "contiguous+fdd"], seeds=0)
    assert len(caught.value.faults) == 3
    with pytest.raises(InvalidInputError, match="no planner"):
        planning.compare(problem(), [])


def test_previous_placement_costs_nothing_and_saves_moves() -> None:
    found = problem()
    shuffled = Placement.from_slots([[2, 3, 0, 1], [3, 2, 1, 0]], ep_size=2)
    plain = planning.solve(found, (Scripted(), Scripted()))
    kept = planning.solve(found, (Scripted(), Scripted()), previous=shuffled)
    assert kept.placement == shuffled  # contiguous up to labels, so nothing moves
    assert kept.score == plain.score
    assert planning.place(found, Scripted(), previous=shuffled).placement == shuffled


def test_packing_only_problems_need_no_placer() -> None:
    cost = CostModel((OperatorClass("a", Fraction(1), Fraction(2)),))
    plain = Problem.from_arrays([3, 5, 6, 2], capacity=8, ep_size=2, cost=cost)
    result = planning.solve(plain, "lpt+ffd")
    assert result.score is not None
    assert result.placement is not None
    assert result.placement.num_layers == 0
    assert len(planning.compare(plain, ["contiguous+ffd", "lpt+annealing"], iteration_limit=1000)) == 2


def test_warm_up_treats_every_planner_once() -> None:
    planning.warm_up(["lpt+ffd", (Scripted(), Scripted("infeasible plan"))])
    assert "lpt+ffd" in planning._warmed
    assert "scripted+scripted(behaviour='infeasible plan')" not in planning._warmed


def test_bounds_outlive_a_run_without_a_plan() -> None:
    bare = solve("bound only")
    assert (bare.status, bare.levels[0].bound, bare.levels[0].value) == (Status.NO_SOLUTION, 1, None)
    kept = solve("bound and report")
    assert kept.status is Status.FEASIBLE
    assert [level.bound for level in kept.levels] == [1, None, None]


def test_a_bar_runs_beside_the_callers_own_callback(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []
    result = solve("waits", time_limit=0.35, on_progress=seen.append, progress=True)
    assert result.score is not None
    assert seen
    assert "scripted" in capsys.readouterr().err
