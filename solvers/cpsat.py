"""CP-SAT (Google OR-Tools) as packer, placer and joint planner, exact and lexicographic.

Perron & Didier, CP-SAT (https://developers.google.com/optimization/cp/cp_solver).
The models are those of :mod:`routepack_opt.solvers.formulation`, the level loop
that of :mod:`routepack_opt.solvers.levels`.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from routepack_opt.errors import InvalidInputError
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.solver import Run
from routepack_opt.solvers.formulation import LinearModel
from routepack_opt.solvers.levels import Budget, LevelSolver, Outcome

__all__ = ["CpSat"]

#: CP-SAT keeps sums in int64; a constraint must stay well inside.
_ACTIVITY_LIMIT = 2**62
#: Deterministic seconds of CP-SAT that one iteration stands for.
_SECONDS_PER_ITERATION = 1e-3
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class CpSat(LevelSolver):
    """Exact by CP-SAT: packing, placement, or both at once.

    One iteration is a millisecond of CP-SAT's deterministic time. Under an
    iteration limit one worker searches, whatever the number of threads, so that
    the result is reproducible.

    The parameters are those of :class:`routepack_opt.solvers.levels.LevelSolver`.
    """

    name: ClassVar[str] = "cpsat"

    def available(self) -> str | None:
        """Why CP-SAT cannot run here."""
        return None if importlib.util.find_spec("ortools") else "the package 'ortools' is not installed"

    def unsupported(self, problem: Problem) -> str | None:
        """Why the exact integers of ``problem`` do not fit CP-SAT, or nothing."""
        work = sum(int(problem.attention_work[s].sum()) for s in range(len(problem.cost.attention)))
        work += int(problem.batch.routed_tokens.sum()) * problem.top_k * problem.num_layers * problem.expert_unit
        # Largest activities: block (2 x work) and num_shards x level against the total.
        activity = (problem.num_shards + 1) * work
        if activity >= _ACTIVITY_LIMIT:
            return (
                f"{problem.num_shards + 1} x total work {work} reaches 2^62, the range of CP-SAT's sums; round alpha "
                "and beta to fewer bits"
            )
        return None

    def make_engine(self, linear: LinearModel) -> _Engine:
        """Build the CP-SAT model of a linear model."""
        return _Engine(linear)


class _Engine:
    """One CP-SAT model of a :class:`LinearModel`."""

    def __init__(self, linear: LinearModel) -> None:
        from ortools.sat.python import cp_model

        activity = linear.largest_activity
        if activity >= _ACTIVITY_LIMIT:
            raise InvalidInputError(
                f"a constraint can reach {activity}, above 2^62, the range of CP-SAT's sums", context="cpsat"
            )
        self._model: Any = cp_model.CpModel()
        self._variables = [
            self._model.new_int_var(lower, upper, name)
            for name, lower, upper in zip(linear.names, linear.lower, linear.upper, strict=True)
        ]
        for position, constraint in enumerate(linear.constraints):
            linear.poll(position)
            expression = cp_model.LinearExpr.weighted_sum(
                [self._variables[v] for v in constraint.variables], list(constraint.coefficients)
            )
            if constraint.sense == "<=":
                added = self._model.add(expression <= constraint.right)
            elif constraint.sense == ">=":
                added = self._model.add(expression >= constraint.right)
            else:
                added = self._model.add(expression == constraint.right)
            added.with_name(constraint.name)

    @property
    def model(self) -> Any:
        """The CpModel."""
        return self._model

    def tighten(self, variable: int, value: int) -> None:
        """Add ``variable <= value``."""
        self._model.add(self._variables[variable] <= value)

    def minimise(
        self,
        variable: int,
        hint: Sequence[int] | None,
        budget: Budget,
        run: Run,
        on_solution: Callable[[Sequence[float]], None],
        on_bound: Callable[[float], None],
    ) -> Outcome:
        """Minimise one variable; the solve runs in a thread of its own so that a stop or Ctrl-C gets through."""
        from ortools.sat.python import cp_model

        self._model.minimize(self._variables[variable])
        self._model.clear_hints()
        if hint is not None:
            for handle, value in zip(self._variables, hint, strict=True):
                self._model.add_hint(handle, value)
        fault = self._model.validate()
        if fault:
            raise InvalidInputError(f"CP-SAT refuses the model: {fault}", context="cpsat")
        solver: Any = cp_model.CpSolver()
        solver.parameters.random_seed = run.seed % 2**31
        solver.parameters.num_workers = 1 if budget.iterations is not None else run.num_threads
        solver.parameters.catch_sigint_signal = False
        if budget.seconds < float("inf"):
            solver.parameters.max_time_in_seconds = budget.seconds
        if budget.iterations is not None:
            solver.parameters.max_deterministic_time = budget.iterations * _SECONDS_PER_ITERATION
        solver.best_bound_callback = on_bound
        variables = self._variables
        errors: list[BaseException] = []

        class Watch(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                try:
                    on_solution([self.value(handle) for handle in variables])
                except BaseException as error:
                    errors.append(error)
                    self.stop_search()

        status: list[Any] = []

        def work() -> None:
            try:
                status.append(solver.solve(self._model, Watch()))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, name="cpsat", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                run.progress()
                if run.stopped():
                    solver.stop_search()
        except BaseException:
            while thread.is_alive():
                solver.stop_search()
                thread.join(_POLL_SECONDS)
            raise
        if errors:
            raise errors[0]
        response = solver.response_proto
        used = float(response.deterministic_time) / _SECONDS_PER_ITERATION
        if status[0] == cp_model.MODEL_INVALID:
            raise InvalidInputError("CP-SAT calls the model invalid", context="cpsat")
        if status[0] == cp_model.INFEASIBLE:
            return Outcome(None, True, None, used)
        if status[0] in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            on_solution([solver.value(handle) for handle in variables])
        limit = run.limit_reached()
        if limit is None and status[0] != cp_model.OPTIMAL:
            limit = Limit.TIME if budget.iterations is None or used < budget.iterations * 0.99 else Limit.ITERATIONS
        return Outcome(int(response.inner_objective_lower_bound), False, limit, used)
