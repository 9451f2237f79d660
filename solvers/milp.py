"""Mixed-integer programming through PuLP as packer, placer and joint planner, lexicographic.

The models are those of :mod:`routepack_opt.solvers.formulation`, with the same
variables and constraints by the same names in the same order as
:mod:`routepack_opt.solvers.cpsat`; only the maxima and levels are continuous,
because a minimum makes them integral by itself.

MIP engines compute in floating point with tolerances. Everything they return
is rounded to a decision and evaluated in integers, and a bound b counts as
⌈b − 10⁻⁶ · max(1, |b|)⌉ work units. A level is therefore called optimal only
where 10⁻⁶ of its value is less than one unit of work; beyond that the level
stays feasible with the bound the engine supports.

PuLP reports ``Optimal`` when an engine runs out of time. HiGHS is asked for its
status and dual bound directly. The CBC executable that PuLP finds is started
here, on the file that PuLP writes, so that it can be stopped; its bound is read
off its log. Of other engines only a solution status of optimal is believed.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from routepack_opt.errors import Faults
from routepack_opt.highs import silent_highs
from routepack_opt.result import Limit
from routepack_opt.solver import Run
from routepack_opt.solvers.formulation import LinearModel
from routepack_opt.solvers.levels import Budget, LevelSolver, Outcome

__all__ = ["Milp"]

log = logging.getLogger(__name__)

#: What an engine's objective may be off, relative to max(1, |objective|).
_TOLERANCE = 1e-6
#: Variables and rows are scaled by powers of two so that numbers stay below this.
_LARGEST_NUMBER = 2**20
_POLL_SECONDS = 0.02
#: How long a process may take to end by itself when its time is up, and again when it was asked to end.
_GRACE_SECONDS = 1.0
_FEASIBILITY = re.compile(r"(assign|capacity|filled|equal|shard_order|row_order|slot_order)_")


@dataclass(frozen=True)
class Milp(LevelSolver):
    """Exact by mixed-integer programming, as far as floating-point tolerances reach.

    One iteration is a branch-and-bound node. A stop takes effect at once with
    HiGHS, and within seconds with CBC, whose process is asked to hand in what it
    has and killed if it does not. Other engines are run by PuLP, which keeps
    their processes to itself: they are left to their own time limit.

    Parameters
    ----------
    engine : str
        ``"highs"``, ``"cbc"``, or the name of another PuLP solver such as ``"SCIP_CMD"``.
    relaxation : bool
        Solve only the linear relaxation: its bound on the first level is
        claimed, and the warm start (if any) is returned.
    symmetry, rank_sums, window_loads, attention_averages, area_bounds, level_share
        See :class:`routepack_opt.solvers.levels.LevelSolver`.
    """

    engine: str = "highs"
    relaxation: bool = False
    name: ClassVar[str] = "milp"

    def _check(self, faults: Faults) -> None:
        if not isinstance(self.engine, str) or not self.engine:
            faults.add(f"engine is {self.engine!r}; it must be 'highs', 'cbc' or the name of a PuLP solver")

    def available(self) -> str | None:
        """Why the engine cannot run here."""
        if not importlib.util.find_spec("pulp"):
            return "the package 'pulp' is not installed"
        if self.engine == "highs":
            return None if importlib.util.find_spec("highspy") else "the package 'highspy' is not installed"
        import pulp

        names = _engine_names(self.engine)
        known = pulp.listSolvers()
        if not any(name in known for name in names):
            return f"PuLP knows no solver {self.engine!r}; it knows {', '.join(sorted(set(known)))}"
        available = pulp.listSolvers(onlyAvailable=True)
        return None if any(name in available for name in names) else f"PuLP cannot find {self.engine!r} here"

    def make_engine(self, linear: LinearModel) -> _Engine:
        """Build the PuLP problem of a linear model."""
        return _Engine(linear, self.engine, self.relaxation)


def _engine_names(engine: str) -> tuple[str, ...]:
    return {"cbc": ("PULP_CBC_CMD", "COIN_CMD"), "highs": ("HiGHS",)}.get(engine, (engine,))


def safe_bound(bound: float, *, extra: float = 0.0) -> int:
    """Largest integer that a floating-point lower bound supports, tolerance taken off."""
    return math.ceil(bound - extra - _TOLERANCE * max(1.0, abs(bound)))


class _Engine:
    """One PuLP problem of a :class:`LinearModel`."""

    def __init__(self, linear: LinearModel, engine: str, relaxation: bool) -> None:
        self._linear = linear
        self._engine = engine
        self._relaxation = relaxation
        with warnings.catch_warnings():
            # PuLP 3 announces the interface of PuLP 4, which older releases do not have.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._build(linear)

    def _build(self, linear: LinearModel) -> None:
        import pulp

        self._problem: Any = pulp.LpProblem("routepack", pulp.LpMinimize)
        # Value of a variable = scale · value in the engine; powers of two, so nothing is rounded.
        self._scale = [
            2.0 ** max(0, upper.bit_length() - _LARGEST_NUMBER.bit_length()) if derived else 1.0
            for upper, derived in zip(linear.upper, linear.derived, strict=True)
        ]
        self._variables = [
            pulp.LpVariable(name, lower / scale, upper / scale, pulp.LpContinuous if derived else pulp.LpInteger)
            for name, lower, upper, derived, scale in zip(
                linear.names, linear.lower, linear.upper, linear.derived, self._scale, strict=True
            )
        ]
        self._problem.addVariables(self._variables)
        self._problem.setObjective(pulp.LpAffineExpression([(self._variables[0], 1.0)]))
        senses = {"<=": pulp.LpConstraintLE, ">=": pulp.LpConstraintGE, "==": pulp.LpConstraintEQ}
        for position, constraint in enumerate(linear.constraints):
            linear.poll(position)
            terms = [
                (self._variables[v], c * self._scale[v])
                for v, c in zip(constraint.variables, constraint.coefficients, strict=True)
            ]
            largest = max((abs(c) for _, c in terms), default=1.0)
            divisor = 2.0 ** max(0, math.frexp(largest)[1] - _LARGEST_NUMBER.bit_length())
            expression = pulp.LpAffineExpression([(variable, c / divisor) for variable, c in terms])
            self._problem.addConstraint(
                pulp.LpConstraint(expression, senses[constraint.sense], constraint.name, constraint.right / divisor)
            )

    @property
    def model(self) -> Any:
        """The LpProblem."""
        return self._problem

    def tighten(self, variable: int, value: int) -> None:
        """Lower the upper bound of a variable."""
        self._variables[variable].upBound = value / self._scale[variable]

    def minimise(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        """Minimise one variable."""
        import pulp

        self._problem.setObjective(pulp.LpAffineExpression([(self._variables[variable], 1.0)]))
        solve = self._with_highs if self._engine == "highs" else self._with_process
        outcome = solve(variable, hint, budget, run, on_solution, on_bound)
        if outcome.infeasible and hint is None and not self._assignment_infeasible(budget, run):
            # Floating point may have lost a tight cost row; only the cells themselves prove infeasibility.
            run.explain("the engine calls the model infeasible in floating point, which proves nothing")
            return Outcome(None, False, Limit.EXHAUSTED)
        return outcome

    def _assignment_infeasible(self, budget: Budget, run: Run) -> bool:
        """Whether the engine refutes the assignment constraints alone, whose coefficients are small integers."""
        linear, cells = self._linear, LinearModel()
        kept = [constraint for constraint in linear.constraints if _FEASIBILITY.match(constraint.name)]
        index: dict[int, int] = {}
        for constraint in kept:
            for v in constraint.variables:
                if v not in index:
                    index[v] = cells.variable(linear.names[v], linear.upper[v], lower=linear.lower[v])
            terms = zip(constraint.coefficients, (index[v] for v in constraint.variables), strict=True)
            cells.add(constraint.name, list(terms), constraint.sense, constraint.right)
        engine = _Engine(cells, self._engine, False)
        solve = engine._with_highs if self._engine == "highs" else engine._with_process
        return solve(0, None, budget, run, lambda _: None, lambda _: None).infeasible

    def _values(self, raw: Sequence[float | None]) -> list[float]:
        return [(value or 0.0) * scale for value, scale in zip(raw, self._scale, strict=True)]

    def _with_highs(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        import highspy
        import pulp

        silent_highs()  # PuLP builds the solver itself; the banner is out of the way now
        interface = pulp.HiGHS(
            msg=False,
            mip=not self._relaxation,
            threads=run.num_threads,
            gapRel=0.0,
            gapAbs=1e-9,
            timeLimit=budget.seconds if budget.seconds < math.inf else None,
            random_seed=run.seed % 2**31,
            primal_feasibility_tolerance=1e-9,
            dual_feasibility_tolerance=1e-9,
            mip_feasibility_tolerance=1e-9,
        )
        if budget.iterations is not None:
            interface.optionsDict["mip_max_nodes"] = max(1, int(budget.iterations))
        interface.createAndConfigureSolver(self._problem)
        interface.buildSolverModel(self._problem)
        solver: Any = self._problem.solverModel
        column = [handle.index for handle in self._variables]
        scale = self._scale[variable]
        if hint is not None:
            solution = highspy.HighsSolution()
            values = [0.0] * len(column)
            for position, value, divisor in zip(column, hint, self._scale, strict=True):
                values[position] = value / divisor
            solution.col_value = values
            solver.setSolution(solution)
        errors: list[BaseException] = []

        def improving(event: Any) -> None:
            try:
                found = event.data_out.mip_solution
                on_solution(self._values([found[position] for position in column]))
            except BaseException as error:
                errors.append(error)

        last = [-math.inf]

        def logged(event: Any) -> None:
            bound = float(event.data_out.mip_dual_bound)
            if math.isfinite(bound) and bound > last[0]:
                last[0] = bound
                on_bound(bound * scale)

        if not self._relaxation:
            solver.cbMipImprovingSolution += improving
            solver.cbMipLogging += logged
        solver.HandleUserInterrupt = True
        _in_thread(solver.run, run, solver.cancelSolve)
        if errors:
            raise errors[0]
        status = solver.getModelStatus()
        info = solver.getInfo()
        optimal = status == highspy.HighsModelStatus.kOptimal
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Outcome(None, True, None)
        if self._relaxation:
            ended = Limit.EXHAUSTED if optimal else run.limit_reached() or Limit.TIME
            return Outcome(safe_bound(info.objective_function_value * scale) if optimal else None, False, ended)
        nodes = max(float(info.mip_node_count), 0.0)
        found = solver.getSolution()
        if found.value_valid:
            on_solution(self._values([found.col_value[position] for position in column]))
        bound = float(info.mip_dual_bound)
        limit: Limit | None = None
        if not optimal:
            limit = run.limit_reached() or (
                Limit.ITERATIONS if status == highspy.HighsModelStatus.kSolutionLimit else Limit.TIME
            )
        return Outcome(safe_bound(bound * scale) if math.isfinite(bound) else None, False, limit, nodes)

    def _with_process(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        scale = self._scale[variable]
        ended = self._run_cbc(hint, budget, run) if self._engine == "cbc" else self._run_pulp(budget, run)
        if ended is None:
            return Outcome(None, False, run.limit_reached() or Limit.TIME)
        if ended.infeasible:
            return Outcome(None, True, None)
        if ended.values is not None and not self._relaxation:
            on_solution(self._values(ended.values))
        objective = None if ended.values is None else ended.values[variable]
        bound: int | None = None
        if ended.optimal and objective is not None:
            bound = safe_bound(objective * scale)
        else:
            stated = re.search(r"^Lower bound:\s+(\S+)", ended.log, re.MULTILINE)
            if stated:
                bound = safe_bound(float(stated[1]) * scale, extra=1e-3 * scale)
        limit = None
        if self._relaxation:
            limit = Limit.EXHAUSTED if ended.optimal else run.limit_reached() or Limit.TIME
        elif not ended.optimal:
            limit = run.limit_reached() or (Limit.ITERATIONS if "Stopped on node limit" in ended.log else Limit.TIME)
        nodes = re.search(r"^Enumerated nodes:\s+(\d+)", ended.log, re.MULTILINE)
        if bound is not None:
            on_bound(float(bound))
        return Outcome(bound, False, limit, float(nodes[1]) if nodes else 0.0)

    def _solver(self, **options: Any) -> Any:
        """The PuLP solver of the engine."""
        import pulp

        available = pulp.listSolvers(onlyAvailable=True)
        name = next(name for name in _engine_names(self._engine) if name in available)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return pulp.getSolver(name, msg=False, **options)

    def _run_pulp(self, budget: Budget, run: Run) -> _Ended | None:
        """Let PuLP run its solver; None if it was given up or crashed."""
        import pulp

        limit = {"timeLimit": max(budget.seconds, 0.01)} if budget.seconds < math.inf else {}
        interface, problem = self._solver(mip=not self._relaxation, **limit), self._problem
        try:
            if not _in_thread(lambda: problem.solve(interface), run, None):
                return None
        except pulp.PulpSolverError as error:  # stopped before it wrote a solution, or crashed
            log.warning("%s ended without a result: %s", self._engine, error)
            return None
        solved = problem.sol_status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible)
        return _Ended(
            infeasible=problem.status == pulp.LpStatusInfeasible or problem.sol_status == pulp.LpSolutionInfeasible,
            optimal=problem.sol_status == pulp.LpSolutionOptimal,
            values=[handle.varValue for handle in self._variables] if solved else None,
            log="",
        )

    def _run_cbc(self, hint: Sequence[int] | None, budget: Budget, run: Run) -> _Ended | None:
        """Run CBC on files of its own; None if it was killed or crashed."""
        begin = time.monotonic()
        path = self._solver().path
        with tempfile.TemporaryDirectory(prefix="routepack-") as name:
            folder = Path(name)
            model, start, solution, engine_log = (folder / f"model.{end}" for end in ("mps", "mst", "sol", "log"))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                _, short, _, _ = self._problem.writeMPS(str(model), rename=1)
            arguments = [path, str(model)]
            if hint is not None:
                value_of = {
                    handle.name: value / divisor
                    for handle, value, divisor in zip(self._variables, hint, self._scale, strict=True)
                }
                lines = [f"{i} {short_name} {value_of[name]} 0\n" for i, (name, short_name) in enumerate(short.items())]
                start.write_text("Stopped on time - objective value 0\n" + "".join(lines), encoding="utf-8")
                arguments += ["-mips", str(start)]
            if budget.seconds < math.inf:
                arguments += ["-sec", str(max(budget.seconds - (time.monotonic() - begin), 0.01))]
            arguments += ["-primalTolerance", "1e-9", "-randomCbcSeed", str(run.seed % 2**31)]
            arguments += ["-ratio", "0.0", "-allow", "0.0", "-threads", str(run.num_threads), "-timeMode", "elapsed"]
            if budget.iterations is not None:
                arguments += ["-maxNodes", str(max(1, int(budget.iterations)))]
            arguments += ["-initialSolve" if self._relaxation else "-solve", "-printingOptions", "all"]
            arguments += ["-solution", str(solution)]
            with engine_log.open("wb") as stream:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                )
                undisturbed = _await(process, run)
            if process.returncode or not solution.exists():
                if undisturbed:
                    log.warning("cbc ended without a result, exit code %d", process.returncode)
                return None
            return self._read_cbc(
                solution.read_text(errors="replace"), engine_log.read_text(errors="replace"), short, undisturbed
            )

    def _read_cbc(self, solution: str, text: str, short: dict[str, str], undisturbed: bool) -> _Ended:
        """Read CBC's solution file: a line with its status, then a line for every row and column."""
        words, *rows = [line.split() for line in solution.splitlines()] or [[]]
        # "Stopped on time - objective value 12", where there is a solution; else "Stopped on time (no integer ...".
        found = words[:1] == ["Optimal"] or (words[:1] == ["Stopped"] and words[3:5] == ["-", "objective"])
        values: list[float | None] | None = None
        if found:
            value_of: dict[str, float] = {}
            for row in rows:
                _, name, value, *_ = row[1:] if row[0] == "**" else row
                value_of[name] = float(value)
            values = [value_of.get(short[handle.name]) for handle in self._variables]
        return _Ended(
            infeasible=undisturbed and words[:1] in (["Infeasible"], ["Integer"]),
            optimal=undisturbed and words[:1] == ["Optimal"] and "Stopped on" not in text,
            values=values,
            log=text if undisturbed else "",
        )


@dataclass(frozen=True)
class _Ended:
    """How a process ended.

    Attributes
    ----------
    infeasible, optimal : bool
        What the engine says of the model.
    values : list of float, optional
        Of every variable, as the engine scales it; None without a solution.
    log : str
        The engine's own log, if it is known.
    """

    infeasible: bool
    optimal: bool
    values: list[float | None] | None
    log: str


def _await(process: subprocess.Popen[bytes], run: Run) -> bool:
    """Wait for a process and poll for a stop; whether it ended by itself. It has ended in any case.

    Out of time it may end by its own clock, which started later. After that, or
    at once if the run is interrupted, it is asked to end, and at last killed.
    """
    late = asked = math.inf
    try:
        while True:
            try:
                process.wait(_POLL_SECONDS)
                return asked == math.inf
            except subprocess.TimeoutExpired:
                run.progress()
            if not run.stopped():
                continue
            now = time.monotonic()
            late = min(late, now)
            if asked < math.inf:
                if now > asked + _GRACE_SECONDS:
                    process.kill()
            elif run.limit_reached() is Limit.INTERRUPTED or now > late + _GRACE_SECONDS:
                asked = now
                if sys.platform == "win32":
                    process.kill()
                else:
                    process.send_signal(signal.SIGINT)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _in_thread(work: Callable[[], Any], run: Run, cancel: Callable[[], None] | None) -> bool:
    """Run an engine in a thread of its own and poll for a stop; whether it finished."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, name="milp", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_SECONDS)
            run.progress()
            if run.stopped() and thread.is_alive():
                if cancel is not None:
                    cancel()
                elif run.limit_reached() is Limit.INTERRUPTED:
                    return False
    except BaseException:
        while cancel is not None and thread.is_alive():
            cancel()
            thread.join(_POLL_SECONDS)
        raise
    if errors:
        raise errors[0]
    return True
