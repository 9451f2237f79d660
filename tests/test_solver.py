from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from routepack_opt.errors import SolverClaimError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.score import LEVELS
from routepack_opt.solver import Run, Solver, component_spec


def problem() -> Problem:
    counts = np.zeros((6, 2, 4), dtype=np.int64)
    counts[:, :, 0] = 5
    return Problem.from_arrays(np.full(6, 5), counts, top_k=1, capacity=30, ep_size=2, dp_size=2, num_rows=2)


def cells(found: Problem, *, bad: bool) -> Packing:
    """Everything in one cell (bad), or dealt over the four (good)."""
    return Packing.from_cells(np.zeros(6, dtype=int) if bad else np.arange(6) % 4, dp_size=found.dp_size)


@dataclass(frozen=True)
class Scripted(Solver):
    """A component with parameters and nothing else."""

    name: ClassVar[str] = "scripted"
    depth: int = 3
    weights: tuple[float, ...] = (1.0,)


def test_spec_names_what_differs_from_the_defaults() -> None:
    assert Scripted().spec == "scripted"
    assert Scripted(depth=4, weights=(1.0, 2.0)).spec == "scripted(depth=4, weights=(1.0, 2.0))"
    assert component_spec(object()) == "object"
    assert Scripted().available() is None
    assert Scripted().unsupported(problem()) is None


def test_stop_interrupt_and_time() -> None:
    event = threading.Event()
    run = Run(problem(), stop=event.is_set)
    assert not run.stopped()
    assert run.limit_reached() is None
    run.note_limit(Limit.ITERATIONS)
    assert run.limit_reached() is Limit.ITERATIONS
    event.set()
    assert run.sub(Scripted()).stopped()
    assert run.limit_reached() is Limit.INTERRUPTED
    caught = Run(problem())
    caught.interrupt()
    assert caught.stopped()
    assert Run(problem(), time_limit=0).limit_reached() is Limit.TIME


def test_a_limit_is_felt_only_by_who_asks() -> None:
    late = Run(problem(), time_limit=0)
    child = late.sub(Scripted())
    assert late.limit_felt() is None
    child.note_limit(Limit.ITERATIONS)
    assert late.limit_felt() is Limit.ITERATIONS
    assert child.stopped()
    assert late.limit_felt() is Limit.TIME
    own_clock = Run(problem(), time_limit=0)
    assert own_clock.time_left() == 0
    assert own_clock.limit_felt() is Limit.TIME
    early = Run(problem(), time_limit=60)
    assert early.time_left() > 0
    assert not early.stopped()
    assert early.limit_felt() is None
    early.interrupt()
    assert early.limit_felt() is Limit.INTERRUPTED


def test_reports_need_their_other_half() -> None:
    run = Run(problem())
    with pytest.raises(SolverClaimError, match="without a placement"):
        run.report(cells(problem(), bad=False))
    assert not run.report(Placement.contiguous(2, 4, ep_size=2))
    assert run.best is None


def test_stages_add_up() -> None:
    run = Run(problem())
    for _ in range(2):
        with run.stage("packing"):
            pass
    assert list(run.trace().stages) == ["packing"]
    run.bound(LEVELS[0], 3)
    assert run.trace().bounds[0].bound == 3


def test_same_seed_same_stream() -> None:
    runs = [Run(problem(), seed=7) for _ in range(2)]
    first = [run.sub(Scripted()).rng.integers(1 << 40) for run in runs]
    second = [run.sub(Scripted()).rng.integers(1 << 40) for run in runs]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first[0] != second[0]
    assert Run(problem(), seed=7).rng.integers(1 << 40) == Run(problem(), seed=7).rng.integers(1 << 40)


def test_sub_runs_share_budget_and_archive() -> None:
    run = Run(problem(), iteration_limit=100, time_limit=10)
    child = run.sub(Scripted(), 0.25)
    assert child.iteration_limit == 25
    assert 0 < child.time_left() <= 2.5
    child.placement = Placement.contiguous(2, 4, ep_size=2)
    assert child.report(cells(problem(), bad=True))
    assert not child.report(cells(problem(), bad=True))
    assert run.best is not None
    assert run.trace().incumbents[0].solver == "scripted"


@pytest.mark.parametrize(
    "claim",
    [
        {"level": "nonsense", "value": 1, "bound": None, "proved": False, "limit": Limit.TIME},
        {"level": LEVELS[0], "value": 1, "bound": 1, "proved": True, "limit": Limit.TIME},
        {"level": LEVELS[0], "value": 1, "bound": 0, "proved": True, "limit": None},
        {"level": LEVELS[0], "value": 1, "bound": 2, "proved": False, "limit": Limit.TIME},
        {"level": LEVELS[0], "value": 1, "bound": None, "proved": False, "limit": None},
    ],
)
def test_senseless_claims_are_refused(claim: dict[str, Any]) -> None:
    run = Run(problem())
    with pytest.raises(SolverClaimError):
        run.claim(claim.pop("level"), claim.pop("value"), claim.pop("bound"), **claim)
