"""MILP through PuLP: the same model as CP-SAT, and claims that floating point can carry."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Status
from routepack_opt.rows import pack_bins
from routepack_opt.score import evaluate
from routepack_opt.solver import Run
from routepack_opt.solvers import milp
from routepack_opt.solvers.cpsat import CpSat
from routepack_opt.solvers.formulation import Redundancy, joint_model
from routepack_opt.solvers.milp import Milp, safe_bound
from routepack_opt.testing import brute_force, tiny_problem

NODES = 10_000_000
ENGINES = [
    pytest.param(
        engine,
        marks=pytest.mark.skipif(
            Milp(engine=engine).available() is not None, reason=f"optional: {Milp(engine=engine).available()}"
        ),
    )
    for engine in ("highs", "cbc")
]


def production_problem() -> Problem:
    """Few samples at a production capacity: one unit of work is far below any tolerance."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(2000, 9000, size=8)
    counts = np.stack([rng.multinomial(length, rng.dirichlet(np.ones(4)), size=2) for length in lengths])
    cost = CostModel((OperatorClass("a", Fraction(3, 7), Fraction(5, 11)),))
    return Problem.from_arrays(
        lengths, counts, top_k=1, capacity=32_768, ep_size=2, dp_size=2, num_shards=1, num_rows=1, cost=cost
    )


def test_both_backends_build_the_same_names_in_the_same_order() -> None:
    linear = joint_model(tiny_problem(10), Redundancy()).linear
    cpsat = CpSat().make_engine(linear).model
    milp = Milp().make_engine(linear).model
    assert [variable.name for variable in cpsat.proto.variables] == linear.names
    assert {variable.name for variable in milp.variables()} == set(linear.names)
    wanted = [constraint.name for constraint in linear.constraints]
    assert [constraint.name for constraint in cpsat.proto.constraints] == wanted
    assert list(milp._constraints) == wanted


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [3, 10])
def test_joint_optimum_of_tiny_problems(engine: str, seed: int) -> None:
    problem = tiny_problem(seed)
    result = planning.solve(problem, Milp(engine=engine), iteration_limit=NODES, num_threads=1)
    assert result.score is not None
    assert result.status is Status.OPTIMAL
    assert result.score.levels == evaluate(problem, brute_force(problem)).levels


@pytest.mark.parametrize("engine", ENGINES)
def test_nothing_is_called_optimal_below_the_tolerance(engine: str) -> None:
    problem = production_problem()
    exact = planning.pack(problem, "cpsat", iteration_limit=200_000, num_threads=1)
    result = planning.pack(problem, Milp(engine=engine), iteration_limit=NODES, num_threads=1)
    assert exact.status is Status.OPTIMAL
    assert exact.score is not None
    assert result.status is Status.FEASIBLE
    first = result.levels[0]
    assert first.bound is not None
    assert first.value is not None
    assert first.bound <= exact.score.levels[0] <= first.value
    assert first.value - first.bound <= 1e-5 * first.value


def test_relaxation_gives_a_bound_and_no_plan() -> None:
    problem = tiny_problem(2)
    result = planning.pack(problem, "milp(relaxation=True)", iteration_limit=1)
    best = evaluate(problem, brute_force(problem, Placement.contiguous(0, 0, ep_size=problem.ep_size))).levels
    assert result.plan is None
    assert result.status is Status.NO_SOLUTION
    found = [point.bound for point in result.trace.bounds if point.level == "max_shard_work"]
    assert 0 < max(found) <= best[0]
    warm = planning.pack(problem, "cpsat", iteration_limit=100_000, num_threads=1).packing
    kept = planning.pack(problem, "milp(relaxation=True)", iteration_limit=1, warm_start=warm)
    assert kept.packing == warm
    assert kept.levels[0].bound == max(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_infeasibility_is_proved_by_the_cells_alone(engine: str) -> None:
    cost = CostModel((OperatorClass("a", 1, 1),))
    problem = Problem.from_arrays([5, 6, 7, 5, 6, 7, 7], capacity=15, ep_size=1, dp_size=1, num_rows=3, cost=cost)
    result = planning.pack(problem, Milp(engine=engine), iteration_limit=NODES)
    assert result.status is Status.INFEASIBLE
    assert "3 rows" in result.reason


@pytest.mark.parametrize("engine", ENGINES)
def test_placer_meets_cpsat(engine: str) -> None:
    problem = tiny_problem(5, num_layers=2, ep_size=2, experts_per_rank=2)
    result = planning.place(problem, Milp(engine=engine), iteration_limit=NODES, num_threads=1)
    exact = planning.place(problem, "cpsat", iteration_limit=NODES, num_threads=1)
    assert result.levels[0].value == exact.levels[0].value
    assert result.status is Status.OPTIMAL


def long_search() -> tuple[Problem, Packing]:
    """A problem that no engine finishes in a minute, and a packing to start from."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(100, 900, size=30)
    cost = CostModel((OperatorClass("a", 1, 2),))
    problem = Problem.from_arrays(lengths, capacity=3000, ep_size=1, dp_size=4, num_rows=3, cost=cost)
    return problem, Packing.from_cells(pack_bins(lengths, 3000, num_bins=12), dp_size=4)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_interrupt_keeps_the_warm_start(engine: str) -> None:
    problem, warm = long_search()
    polls: list[int] = []

    def stop() -> bool:
        polls.append(1)
        return len(polls) > 8

    result = planning.pack(problem, Milp(engine=engine), time_limit=20, warm_start=warm, stop=stop, num_threads=1)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    assert result.runtime < 15
    none = planning.pack(problem, Milp(engine=engine), time_limit=0)
    assert (none.status, none.plan) == (Status.NO_SOLUTION, None)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Engines started during the test."""
    processes: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            if "-solution" in self.args:  # type: ignore[operator]
                processes.append(self)

    monkeypatch.setattr(milp.subprocess, "Popen", Recorded)
    return processes


@pytest.mark.parametrize("polls", [0, 40])
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_a_stop_leaves_no_process(engine: str, polls: int, started: list[subprocess.Popen[bytes]]) -> None:
    problem, warm = long_search()
    asked: list[int] = []

    def stop() -> bool:
        asked.extend([1] * len(started))
        return len(asked) > polls

    result = planning.pack(problem, Milp(engine=engine), time_limit=600, warm_start=warm, stop=stop, num_threads=1)
    assert (result.status, result.limit) == (Status.FEASIBLE, Limit.INTERRUPTED)
    assert result.score is not None
    assert result.score <= evaluate(problem, planning.pack(problem, "ffd", warm_start=warm).plan)
    assert [process.returncode is None for process in started] == [False]


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_an_error_in_the_run_leaves_no_process(engine: str, started: list[subprocess.Popen[bytes]]) -> None:
    problem, warm = long_search()

    def stop() -> bool:
        if started:
            raise RuntimeError("the caller is broken")
        return False

    with pytest.raises(RuntimeError, match="broken"):
        planning.pack(problem, Milp(engine=engine), time_limit=600, warm_start=warm, stop=stop, num_threads=1)
    assert [process.returncode is None for process in started] == [False]


def child(text: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # it has come as far as it must
    process.stdout.close()
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="optional: processes are killed at once on Windows")
def test_a_process_is_asked_to_end_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "_GRACE_SECONDS", 0.1)
    polite = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(3))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    deaf = polite.replace("lambda *_: sys.exit(3)", "signal.SIG_IGN")
    for run in (Run(tiny_problem(2), stop=lambda: True), Run(tiny_problem(2), time_limit=0)):
        heard, killed = child(polite), child(deaf)
        assert not milp._await(heard, run)
        assert heard.returncode == 3
        assert not milp._await(killed, run)
        assert killed.returncode == -9
    quick = child("print('ready', flush=True)")
    assert milp._await(quick, Run(tiny_problem(2), time_limit=60))
    late = child("import time; print('ready', flush=True); time.sleep(0.05)")
    monkeypatch.setattr(milp, "_GRACE_SECONDS", 60.0)
    assert milp._await(late, Run(tiny_problem(2), time_limit=0))  # by its own clock, soon after


def test_what_cbc_says_is_believed_only_where_it_was_left_alone() -> None:
    engine = Milp(engine="cbc").make_engine(joint_model(tiny_problem(2), Redundancy()).linear)
    short = {variable.name: f"X{k:07d}" for k, variable in enumerate(engine.model.variables())}
    rows = "\n".join(f"{k} {name} 1 0" for k, name in enumerate(short.values()))
    done = engine._read_cbc(f"Optimal - objective value 1\n{rows}\n", "", short, True)
    assert done.optimal
    assert done.values == [1.0] * len(short)
    disturbed = engine._read_cbc(f"Optimal - objective value 1\n{rows}\n", "Lower bound: 1", short, False)
    assert not disturbed.optimal
    assert disturbed.values == done.values
    assert not disturbed.log
    for status in ("Infeasible - objective value 0", "Integer infeasible - objective value 0"):
        assert engine._read_cbc(f"{status}\n** 0 X0000000 1 0\n", "", short, True).infeasible
        assert not engine._read_cbc(f"{status}\n** 0 X0000000 1 0\n", "", short, False).infeasible
    for status in ("Stopped on time (no integer solution - continuous used) - objective value 3", ""):
        nothing = engine._read_cbc(f"{status}\n{rows}", "", short, True)
        assert (nothing.infeasible, nothing.optimal, nothing.values) == (False, False, None)
    stopped = engine._read_cbc(f"Stopped on time - objective value 3\n{rows}", "Stopped on time", short, True)
    assert not stopped.optimal
    assert stopped.values == done.values


def test_unknown_engines_and_bad_parameters_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="knows no solver 'nonsense'"):
        planning.pack(tiny_problem(2), "milp(engine='nonsense')")
    with pytest.raises(InvalidInputError) as caught:
        Milp(engine="", relaxation=2, level_share=0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3


def test_safe_bound_takes_the_tolerance_off() -> None:
    assert safe_bound(100.0) == 100
    assert safe_bound(100.00005) == 100
    assert safe_bound(100.01) == 101
    assert safe_bound(1e9) == 999_999_000


def test_milp_needs_pulp_only_when_it_runs() -> None:
    assert importlib.util.find_spec("pulp") is not None
    assert Milp().available() is None
