"""Run a study: every job once, each finished row a file, safe to kill at any moment.

A results folder holds

- ``study.json``: schema, name and question;
- ``rows/<key>.json``: one finished run each, written to a temporary file and renamed,
  so that it is there as a whole or not at all; ``<key>`` digests what decides the run;
- ``history/<key>.json``: incumbents, bounds and stage times of the run;
- ``plans/<key>.json``: its plan, if the design says ``keep_plans``.

Runs go through joblib: processes of this machine (``loky``), or a Ray or Dask
cluster by name. Workers only compute; the folder is written here.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import logging
import os
import platform
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from routepack_opt import bounds, files, metrics, planning
from routepack_opt.errors import Faults, MissingExtraError, RoutePackError, refuse_unknown
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit, Result, Status
from routepack_opt.score import LEVELS, evaluate
from routepack_opt.study.design import Design, Job
from routepack_opt.study.table import StudyTable, open_folder, row_path

__all__ = ["BACKENDS", "StudyError", "execute", "results_folder", "run"]

log = logging.getLogger(__name__)

#: joblib backends by name.
BACKENDS = ("loky", "ray", "dask")
#: Rounds in which runs of lost workers are tried together again before they run one by one.
_ROUNDS = 2
_PACKAGES = ("routepack-opt", "numpy", "numba", "scipy", "ortools", "pulp", "highspy", "joblib")


class StudyError(RoutePackError, RuntimeError):
    """Some runs of a study failed; every other row is in the results folder.

    Attributes
    ----------
    table : StudyTable
        All rows, the failed ones with ``error``.
    """

    def __init__(self, message: str, table: StudyTable) -> None:
        super().__init__(message)
        self.table = table


def results_folder(path: files.PathLike) -> Path:
    """Where the rows of a design go unless told otherwise: beside it, ``<name>.results``."""
    return Path(path).with_suffix(".results")


def run(
    path: files.PathLike,
    *,
    out: files.PathLike | None = None,
    backend: str = "loky",
    num_jobs: int = 1,
    progress: bool | None = None,
    keep_going: bool = False,
) -> StudyTable:
    """Run what is not finished yet.

    Parameters
    ----------
    path : path-like
        The design, see :mod:`routepack_opt.study.design`.
    out : path-like, optional
        Results folder; created if missing. Default: :func:`results_folder`.
    backend : str
        ``loky``: processes here; one job runs in this process. ``ray``, ``dask``:
        the cluster this process is connected to (``RAY_ADDRESS``,
        ``DASK_SCHEDULER_ADDRESS``), else a local one of ``num_jobs`` workers.
    num_jobs : int
        Runs at a time. Time-limited runs that share a processor get less done.
    progress : bool, optional
        A bar with the time left; default: where someone watches.
    keep_going : bool
        Return although runs failed; else :class:`StudyError` is raised at the end.

    Returns
    -------
    StudyTable
        Every row of the design, in its order. Failed runs are rows with
        ``status`` "error" (the run raised) or "lost" (its worker died each time);
        they are run again the next time.

    Raises
    ------
    InvalidInputError
        If the design has faults, or ``out`` holds something else: nothing is run or
        overwritten.
    MissingExtraError
        If the backend is not installed.
    StudyError
        If runs failed and ``keep_going`` is false.
    """
    faults = Faults()
    faults.extend(refuse_unknown([backend], BACKENDS, "backend"))
    if isinstance(num_jobs, bool) or not isinstance(num_jobs, int) or num_jobs < 1:
        faults.add(f"num_jobs is {num_jobs!r}; it must be an integer of at least 1")
    faults.raise_if_any("study")
    _needed(backend)
    design = Design.load(path)
    folder = results_folder(path) if out is None else Path(out)
    open_folder(folder, name=design.name, question=design.question)
    jobs = {job.key: job for job in design.jobs}
    rows = {key: row for key in jobs if (row := _finished(folder, key)) is not None}
    todo = [job for key, job in jobs.items() if key not in rows]
    log.info("study %s: %d rows, %d of them finished before", design.name, len(jobs), len(rows))
    from tqdm.auto import tqdm

    wanted = progress if progress is not None else planning.someone_watches()
    with tqdm(total=len(jobs), initial=len(rows), desc=design.name, unit="run", disable=not wanted) as bar:
        for job, outcome in _outcomes(todo, backend, num_jobs, design.keep_plans):
            row = outcome["row"]
            row["study"] = design.name
            if outcome["history"] is not None:
                row["history"] = f"history/{job.key}.json"
                files.write_json(folder / row["history"], outcome["history"])
            if outcome["plan"] is not None:
                row["plan"] = f"plans/{job.key}.json"
                files.write_json(folder / row["plan"], outcome["plan"])
            files.write_json(row_path(folder, job.key), row, indent=1)
            rows[job.key] = row
            bar.update()
    table = StudyTable(
        name=design.name,
        question=design.question,
        folder=folder,
        rows=tuple(_relabelled(rows[key], jobs[key]) for key in jobs),
    )
    failed = table.failed
    if failed and not keep_going:
        first = failed[0]
        raise StudyError(
            f"{len(failed)} of {len(jobs)} runs failed; the first: {first['problem']}, {first['planner']}, seed "
            f"{first['seed']}: {first['error']}. The other rows are in {folder}; running again tries the failed ones",
            table,
        )
    return table


def _relabelled(row: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """A row under the labels of the present design; a relabelled study keeps its rows."""
    return {**row, "problem": job.case.label, "label": job.label}


def _finished(folder: Path, key: str) -> dict[str, Any] | None:
    path = row_path(folder, key)
    if not path.is_file():
        return None
    row: dict[str, Any] = files.read_json(path, what="row")
    return None if row.get("status") in ("error", "lost") else row


# -------------------------------------------------------------------------------------------------- workers


def _needed(backend: str) -> None:
    for name in {"loky": (), "ray": ("ray",), "dask": ("dask", "distributed")}[backend]:
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError(name, extra=backend, purpose=f"the study backend {backend!r}")


def _outcomes(
    jobs: Sequence[Job], backend: str, num_jobs: int, keep_plans: bool
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Outcomes as they come in; when a worker dies its runs are tried again, then one by one."""
    if backend == "loky" and num_jobs == 1:
        for job in jobs:
            yield job, execute(job, keep_plan=keep_plans)
        return
    left = dict(enumerate(jobs))
    with _backend(backend, num_jobs):
        for attempt in range(_ROUNDS):
            if not left:
                return
            try:
                for index, outcome in _stream(left, backend, num_jobs, keep_plans):
                    yield left.pop(index), outcome
            except Exception as error:
                log.warning(
                    "a worker was lost in round %d (%s: %s); %d runs are tried again",
                    attempt + 1,
                    type(error).__name__,
                    str(error).split("\n")[0],
                    len(left),
                )
        for index in list(left):
            try:
                ((_, outcome),) = _stream({index: left[index]}, backend, num_jobs, keep_plans)
            except Exception as error:
                outcome = _failed(left[index], "lost", error)
            yield left.pop(index), outcome


def _stream(
    jobs: Mapping[int, Job], backend: str, num_jobs: int, keep_plans: bool
) -> Iterator[tuple[int, dict[str, Any]]]:
    from joblib import Parallel, delayed

    # joblib runs one job in this process, which a crash would take with it.
    workers = max(2, num_jobs)
    calls = [delayed(_indexed)(index, job, keep_plans) for index, job in jobs.items()]
    if backend == "ray":
        # joblib's Ray backend hands results over only when a call ends: rows are saved batch by batch.
        with Parallel(n_jobs=workers, batch_size=1) as parallel:
            for start in range(0, len(calls), 2 * workers):
                yield from parallel(calls[start : start + 2 * workers])
        return
    parallel = Parallel(n_jobs=workers, batch_size=1, return_as="generator_unordered")
    yield from parallel(calls)


def _indexed(index: int, job: Job, keep_plans: bool) -> tuple[int, dict[str, Any]]:
    return index, execute(job, keep_plan=keep_plans)


@contextlib.contextmanager
def _backend(name: str, num_jobs: int) -> Iterator[None]:
    from joblib import parallel_config

    workers = max(2, num_jobs)
    with contextlib.ExitStack() as stack:
        if name == "ray":
            import ray
            from ray.util.joblib import register_ray

            if not ray.is_initialized():
                local: dict[str, Any] = (
                    {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
                )
                ray.init(log_to_driver=False, logging_level=logging.ERROR, **local)
                stack.callback(ray.shutdown)
            register: Any = register_ray
            register()
        elif name == "dask":
            import dask
            from distributed import Client, LocalCluster, get_client

            start_cluster: Any = LocalCluster
            connect: Any = Client
            try:
                get_client()
            except ValueError:
                address = dask.config.get("scheduler-address", None)
                if address is None:
                    address = stack.enter_context(
                        start_cluster(
                            n_workers=workers,
                            threads_per_worker=1,
                            dashboard_address=None,
                            silence_logs=logging.CRITICAL,
                        )
                    )
                stack.enter_context(connect(address))
        stack.enter_context(parallel_config(backend=name, n_jobs=workers))
        yield


# --------------------------------------------------------------------------------------------------- one run

_problems: OrderedDict[str, tuple[Problem, Problem]] = OrderedDict()


def _problem_of(job: Job) -> tuple[Problem, Problem]:
    """Build a case, or take it from the two this process used last."""
    name = files.canonical_json({"recipe": job.case.recipe, "path": job.case.path})
    if name not in _problems:
        _problems[name] = job.case.build()
        while len(_problems) > 2:
            _problems.popitem(last=False)
    _problems.move_to_end(name)
    return _problems[name]


def execute(job: Job, *, keep_plan: bool = False) -> dict[str, Any]:
    """Run one job in this process.

    Returns
    -------
    dict
        ``row``, ``history`` and ``plan`` as JSON objects; the last two may be None.
        An exception of the run becomes a row with ``status`` "error".
    """
    start = time.perf_counter()
    try:
        problem, known = _problem_of(job)
        if job.time_limit is not None:
            planning.warm_up([job.planner])
        result = planning.solve(
            known,
            job.planner,
            time_limit=job.time_limit,
            iteration_limit=job.iteration_limit,
            seed=job.seed,
            num_threads=job.num_threads,
            progress=False,
        )
        if result.limit is Limit.INTERRUPTED:
            raise KeyboardInterrupt
        row, plan = _measured(problem, known, result)
    except Exception as error:
        return _failed(job, "error", error)
    row = {**_identity(job), **row, "seconds": time.perf_counter() - start}
    history = {
        "unit_denominator": problem.unit_denominator,
        "runtime": result.runtime,
        "incumbents": [
            {"time": point.time, "levels": list(point.levels), "solver": point.solver}
            for point in result.trace.incumbents
        ],
        "bounds": [{"time": point.time, "level": point.level, "bound": point.bound} for point in result.trace.bounds],
    }
    return {"row": row, "history": history, "plan": plan.to_dict() if keep_plan and plan is not None else None}


def _identity(job: Job) -> dict[str, Any]:
    return {
        "key": job.key,
        "problem": job.case.label,
        "recipe": dict(job.case.recipe),
        "planner": job.planner,
        "label": job.label,
        "parameters": {role: dict(values) for role, values in job.parameters.items()},
        "seed": job.seed,
        "time_limit": job.time_limit,
        "iteration_limit": job.iteration_limit,
        "num_threads": job.num_threads,
        "error": None,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "machine": _machine(),
    }


def _failed(job: Job, status: str, error: BaseException) -> dict[str, Any]:
    text = f"{type(error).__name__}: {error}"
    row = {
        **_identity(job),
        "status": status,
        "error": text,
        "traceback": "".join(traceback.format_exception(error)) if status == "error" else None,
    }
    return {"row": row, "history": None, "plan": None}


def _measured(problem: Problem, known: Problem, result: Result) -> tuple[dict[str, Any], Plan | None]:
    """What a row says of a result; a plan made on another problem is scored on the true one, without claims."""
    plan, score = result.plan, result.score
    status, limit = result.status.value, None if result.limit is None else result.limit.value
    levels = [level.to_dict() for level in result.levels]
    if known is not problem:
        levels = []
        if plan is not None:
            plan = Plan.of(problem, plan.placement, plan.packing)
            score = evaluate(problem, plan)
            status, limit = Status.FEASIBLE.value, limit or Limit.EXHAUSTED.value
    best = {name: bounds.best_bound(problem, name) for name in LEVELS}
    limits = {name: (bound.value, bound.method) for name, bound in best.items()}
    if known is problem and result.scope == "any-placement":
        claimed = {level.name: level.bound for level in result.levels[:1] if level.bound is not None}
        for name, value in claimed.items():
            if value > limits[name][0]:
                limits[name] = (value, result.planner)
    row: dict[str, Any] = {
        "problem_fingerprint": problem.fingerprint,
        "num_samples": problem.num_samples,
        "num_layers": problem.num_layers,
        "num_experts": problem.num_experts,
        "top_k": problem.top_k,
        "capacity": problem.capacity,
        "ep_size": problem.ep_size,
        "dp_size": problem.dp_size,
        "num_shards": problem.num_shards,
        "num_rows": problem.num_rows,
        "num_rows_bound": problem.rows.bound,
        "unit_denominator": problem.unit_denominator,
        "status": status,
        "limit": limit,
        "scope": result.scope,
        "reason": result.reason,
        "levels": levels,
        "bound": problem.units(limits[LEVELS[0]][0]),
        "bound_method": limits[LEVELS[0]][1],
        "runtime": result.runtime,
        "stages": dict(result.trace.stages),
    }
    for k, name in enumerate(LEVELS):
        row[name] = None if score is None else score.values[k]
        row[f"{name}_units"] = None if score is None else score.levels[k]
        row[f"{name}_bound_units"] = limits[name][0]
    row["gap"] = None if score is None else bounds.gap(score.max_shard_work, limits[LEVELS[0]][0])
    row["gap_fixed_placement"] = None
    row["metrics"] = None
    if plan is not None and score is not None:
        fixed = bounds.best_bound(problem, LEVELS[0], plan.placement)
        row["gap_fixed_placement"] = bounds.gap(score, fixed)
        row["metrics"] = metrics.measure(problem, plan, score).to_dict()
    return row, plan


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@cache
def _machine() -> dict[str, Any]:
    return {
        "node": platform.node(),
        "system": f"{platform.system()} {platform.machine()}",
        "processors": planning.default_num_threads(),
    }
