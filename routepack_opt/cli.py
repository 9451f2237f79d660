"""The command line: tables and progress for people, one JSON object for machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from routepack_opt import __version__, files
from routepack_opt.errors import Faults, InvalidInputError, InvalidPlanError, RoutePackError

__all__ = ["app", "main"]

#: What the parser raises for unknown options, commands and values; typer does not export the class itself.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _Commands(TyperGroup):
    """The commands; under ``--json`` a wrong command line is a JSON object on stdout too, not usage text on stderr."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run; options and errors as in the parent."""
        given = list(sys.argv[1:] if args is None else args)
        options = given[: given.index("--")] if "--" in given else given
        if not standalone_mode or "--json" not in options:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except _UsageError as error:
            _emit_error(error.format_message(), [error.format_message()])
            code = error.exit_code
        except typer.Abort:
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(
    name="routepack-opt",
    cls=_Commands,
    help="Expert placement and attention-aware data packing for Mixture-of-Experts RL training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
study_app = typer.Typer(help="Designed comparisons: problems x planners x parameters x seeds.", no_args_is_help=True)
app.add_typer(study_app, name="study")

out = Console(width=None if sys.stdout.isatty() else 120)
err = Console(stderr=True, width=None if sys.stderr.isatty() else 120)

TRACE = "trace"
DEFAULT_PLANNERS = ["contiguous+ffd", "lpt+ffd", "lpt+length_annealing", "lpt+annealing"]

ProblemArgument = Annotated[
    str, typer.Argument(help="Problem file (.npz, routepack-problem/1), or 'trace' for the recorded trace.")
]
OptionalProblem = Annotated[
    str, typer.Argument(help="Problem file (.npz, routepack-problem/1); default: the recorded trace.")
]
PlanArgument = Annotated[Path, typer.Argument(help="Plan file (.json, routepack-plan/1).")]
PlannerOption = Annotated[str, typer.Option("--planner", "-p", help="Planner spec, such as 'lpt+annealing'.")]
PlannersOption = Annotated[list[str] | None, typer.Option("--planner", "-p", help="Planner spec; repeat for several.")]
TimeOption = Annotated[float | None, typer.Option("--time-limit", help="Wall seconds for each run.")]
IterationOption = Annotated[
    int | None, typer.Option("--iteration-limit", help="Solver iterations; alone it makes a run reproducible.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of all randomness; always recorded.")]
ThreadsOption = Annotated[int | None, typer.Option("--threads", help="Threads; default: all processors.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ProveOption = Annotated[
    float,
    typer.Option("--prove-rows", help="Seconds for an exact proof of the least rows where the bound leaves a gap."),
]

Command = TypeVar("Command", bound=Callable[..., Any])


def _reported(command: Command) -> Command:
    """Turn the package's errors into a message and exit code 2."""

    @wraps(command)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except (RoutePackError, OSError) as error:
            faults = list(error.faults) if isinstance(error, InvalidInputError) else [str(error)]
            if options.get("as_json"):
                _emit_error(str(error), faults)
            else:
                err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from None

    return wrapped  # type: ignore[return-value]


def _load(problem: str, prove_rows: float = 0.0) -> Any:
    if problem == TRACE and not Path(problem).exists():
        from routepack_opt.recorded import load_trace

        return load_trace()
    from routepack_opt.problem import Problem

    return Problem.load(problem, prove_rows=prove_rows)


def _emit(value: dict[str, Any]) -> None:
    print(json.dumps(value, sort_keys=True, allow_nan=False))


def _emit_error(error: str, faults: Sequence[str]) -> None:
    print(files.canonical_json({"error": error, "faults": list(faults)}))


def _print_frame(frame: Any, title: str) -> None:
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in frame.columns:
        numeric = column not in ("planner", "status", "problem")
        width = max([len(str(column)), *(len(str(value)) for value in frame[column])]) if numeric else None
        table.add_column(str(column), justify="right" if numeric else "left", no_wrap=numeric, min_width=width)
    for row in frame.itertuples(index=False):
        table.add_row(*(escape(str(value)) for value in row))
    out.print(table)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
@_reported
def solve(
    problem: ProblemArgument,
    planner: PlannerOption = "lpt+annealing",
    time_limit: TimeOption = None,
    iteration_limit: IterationOption = None,
    seed: SeedOption = 0,
    threads: ThreadsOption = None,
    warm_start: Annotated[Path | None, typer.Option(help="Plan to start from and never end above.")] = None,
    plan_out: Annotated[Path | None, typer.Option("--out", help="Where the plan is written.")] = None,
    prove_rows: ProveOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Plan one problem with one planner."""
    from routepack_opt import planning
    from routepack_opt.plan import Plan

    if plan_out is not None:
        _check_folder(plan_out, problem)
    loaded = _load(problem, prove_rows)
    result = planning.solve(
        loaded,
        planner,
        time_limit=time_limit,
        iteration_limit=iteration_limit,
        seed=seed,
        num_threads=threads,
        warm_start=None if warm_start is None else Plan.load(warm_start, loaded),
        progress=False if as_json else None,
    )
    if plan_out is not None and result.plan is not None:
        result.plan.save(plan_out)
    if as_json:
        _emit(result.to_dict() | {"out": None if plan_out is None or result.plan is None else str(plan_out)})
    else:
        out.print(escape(repr(loaded)))
        _print_levels(loaded, result)
        if plan_out is not None:
            out.print(f"plan written to {escape(str(plan_out))}" if result.plan else "no plan found, none written")


def _print_levels(problem: Any, result: Any) -> None:
    limit = f", limit {result.limit.value}" if result.limit else ""
    reason = f": {result.reason}" if result.reason else ""
    out.print(
        f"{escape(result.planner)}  [bold]{result.status.value}[/] ({result.scope}{limit}), {result.runtime:.2f} s, "
        f"seed {result.seed}{escape(reason)}"
    )
    table = Table(header_style="bold")
    for column in ("level", "value (J)", "bound (J)", "status"):
        table.add_column(column, justify="left" if column in ("level", "status") else "right")
    for level in result.levels:
        table.add_row(
            level.name,
            "-" if level.value is None else f"{problem.units(level.value):,.4f}",
            "-" if level.bound is None else f"{problem.units(level.bound):,.4f}",
            level.status.value + (f" ({level.limit.value})" if level.limit else ""),
        )
    out.print(table)


@app.command()
@_reported
def evaluate(problem: ProblemArgument, plan: PlanArgument, as_json: JsonOption = False) -> None:
    """Score a plan exactly, or list everything that is wrong with it."""
    from routepack_opt import metrics
    from routepack_opt import score as scoring
    from routepack_opt.plan import Plan

    loaded = _load(problem)
    value = None
    try:
        found = Plan.load(plan, loaded)
    except InvalidPlanError as error:
        wrong = list(error.faults)
    else:
        wrong = scoring.violations(loaded, found)
        value = None if wrong else scoring.evaluate(loaded, found)
    if as_json:
        _emit({"feasible": not wrong, "violations": wrong, "score": None if value is None else value.to_dict()})
    else:
        out.print(escape(repr(loaded)))
        if value is None:
            out.print(f"[bold red]infeasible[/]: {len(wrong)} violations")
            for fault in wrong:
                out.print(f"  - {escape(fault)}")
        else:
            out.print(escape(repr(value)))
            for name, number in metrics.measure(loaded, found, value).to_dict().items():
                out.print(f"  {name} = {number}")


@app.command()
@_reported
def compare(
    problem: OptionalProblem = TRACE,
    planner: PlannersOption = None,
    time_limit: TimeOption = None,
    iteration_limit: IterationOption = None,
    seed: SeedOption = 0,
    seeds: Annotated[int, typer.Option(help="Runs of each planner, with seeds SEED, SEED + 1, ...")] = 1,
    threads: ThreadsOption = None,
    figure: Annotated[Path | None, typer.Option(help="Save the comparison figure (.pdf, .svg or .png).")] = None,
    prove_rows: ProveOption = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Run several planners on one problem, beside one proven bound."""
    from routepack_opt import planning

    if figure is not None:
        _check_figure(figure)
    if seeds < 1:
        raise InvalidInputError(f"--seeds is {seeds}; it must be at least 1")
    loaded = _load(problem, prove_rows)
    runs = planning.compare(
        loaded,
        planner or DEFAULT_PLANNERS,
        time_limit=time_limit,
        iteration_limit=iteration_limit,
        seeds=list(range(seed, seed + seeds)),
        num_threads=threads,
        progress=False if as_json else None,
    )
    saved = None
    if figure is not None:
        from routepack_opt import plot

        saved = str(figure)
        save_figure(plot.comparison(loaded, runs), figure)
    if as_json:
        _emit(
            {
                "problem": loaded.fingerprint,
                "bound": runs.bound.value,
                "bound_method": runs.bound.method,
                "unit_denominator": loaded.unit_denominator,
                "runs": [result.to_dict() | {"gap": runs.gap(result)} for result in runs],
                "figure": saved,
            }
        )
        return
    out.print(escape(repr(loaded)))
    _print_frame(runs.formatted(), f"work in units of J; gap to {runs.bound.scope} bound by {runs.bound.method}")
    if saved:
        out.print(f"figure written to {escape(saved)}")


def _check_folder(path: Path, *inputs: str | Path) -> None:
    """Refuse before the work is done what could not be written after it, or only over an input."""
    for source in inputs:
        if path.exists() and Path(source).exists() and path.samefile(source):
            raise InvalidInputError(f"{path} is what is read; writing there would destroy it, name another file")
    if path.is_dir():
        raise InvalidInputError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise InvalidInputError(f"the folder {path.parent} of {path.name} does not exist; create it first")
    if not os.access(path.parent, os.W_OK):
        raise InvalidInputError(f"the folder {path.parent} of {path.name} is not writable")


def _check_figure(path: Path) -> None:
    if path.suffix not in (".pdf", ".svg", ".png"):
        raise InvalidInputError(f"figure {path} must end in .pdf, .svg or .png")
    _check_folder(path)


def save_figure(figure: Any, path: Path) -> None:
    """Save a Matplotlib figure atomically."""
    from routepack_opt import plot as figures

    figures.save(figure, path)


@app.command()
@_reported
def bound(
    problem: ProblemArgument,
    plan: Annotated[Path | None, typer.Option("--plan", help="Also the bounds for this plan's placement.")] = None,
    prove_rows: ProveOption = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Proven lower bounds on every level, and which rows count is proven by what."""
    from routepack_opt import bounds
    from routepack_opt.plan import Plan

    loaded = _load(problem, prove_rows)
    placement = None if plan is None else Plan.load(plan, loaded).placement
    found = bounds.problem_bounds(loaded, placement)
    if as_json:
        _emit(
            {
                "problem": loaded.fingerprint,
                "num_rows": loaded.num_rows,
                "num_rows_bound": loaded.rows.bound,
                "num_rows_method": loaded.rows.method,
                "num_rows_bound_method": loaded.rows.bound_method,
                "num_rows_bound_stored": loaded.rows.stored,
                "unit_denominator": loaded.unit_denominator,
                "bounds": [
                    {"level": item.level, "scope": item.scope, "value": item.value, "method": item.method}
                    for item in found
                ],
            }
        )
        return
    out.print(escape(repr(loaded)))
    out.print(f"rows: {escape(repr(loaded.rows))}")
    table = Table(header_style="bold")
    for column in ("level", "scope", "bound (J)", "method"):
        table.add_column(column, justify="right" if column == "bound (J)" else "left")
    for item in found:
        table.add_row(item.level, item.scope, f"{loaded.units(item.value):,.4f}", item.method)
    out.print(table)


@app.command()
@_reported
def planners(as_json: JsonOption = False) -> None:
    """Every planner component with its parameters."""
    from routepack_opt import registry

    rows = registry.planners()
    if as_json:
        _emit(
            {
                "planners": [
                    {
                        "name": row.name,
                        "roles": list(row.roles),
                        "parameters": {key: repr(value) for key, value in row.parameters.items()},
                        "summary": row.summary,
                        "unavailable": row.unavailable,
                    }
                    for row in rows
                ]
            }
        )
        return
    table = Table(header_style="bold", show_lines=False)
    for column in ("name", "roles", "what it does", "parameters"):
        table.add_column(column, overflow="fold")
    for row in rows:
        parameters = ", ".join(f"{key}={value!r}" for key, value in row.parameters.items())
        state = f" [red](unavailable: {escape(row.unavailable)})[/]" if row.unavailable else ""
        table.add_row(row.name, ", ".join(row.roles), escape(row.summary) + state, escape(parameters))
    out.print(table)


@app.command()
@_reported
def generate(
    family: Annotated[str, typer.Argument(help="Family name; see --list.")] = "",
    problem_out: Annotated[Path | None, typer.Option("--out", help="Problem file to write (.npz).")] = None,
    seed: SeedOption = 0,
    show: Annotated[bool, typer.Option("--list", help="List the families.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a synthetic problem of a frozen family."""
    from routepack_opt import synthetic

    if show:
        if as_json:
            _emit({"families": list(synthetic.families())})
        else:
            for name in synthetic.families():
                out.print(name)
        return
    if not family or problem_out is None:
        raise InvalidInputError("name a family and --out FILE.npz, or use --list")
    _check_folder(problem_out)
    made = synthetic.family(family, seed=seed)
    made.save(problem_out)
    if as_json:
        _emit({"problem": made.fingerprint, "family": family, "seed": seed, "out": str(problem_out)})
    else:
        out.print(escape(repr(made)))
        out.print(f"written to {escape(str(problem_out))}")


@app.command("export")
@_reported
def export_plan(
    plan: PlanArgument,
    problem: Annotated[str, typer.Option("--problem", help="The plan's problem file, or 'trace'.")],
    to: Annotated[str, typer.Option("--to", help="Framework; see 'routepack-opt export --help'.")],
    path: Annotated[Path, typer.Option("--out", help="File to write.")],
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE for the format (VALUE: JSON or text).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan in a framework's own form."""
    from routepack_opt import formats
    from routepack_opt.plan import Plan

    _check_folder(path, problem, plan)
    loaded = _load(problem)
    found = Plan.load(plan, loaded)
    written = formats.export(to, loaded, found, path, **_options(option or []))
    if as_json:
        _emit({"to": to, "out": str(path), "notes": list(written)})
    else:
        out.print(f"written to {escape(str(path))}")
        for note in written:
            out.print(f"  {escape(note)}")


@app.command()
@_reported
def count(
    sources: Annotated[list[Path], typer.Argument(help="Recorded routing; 'ids': an .npz of ids and offsets.")],
    source_format: Annotated[str, typer.Option("--from", help="Payload format; 'ids' reads plain arrays.")] = "ids",
    problem_out: Annotated[Path | None, typer.Option("--out", help="Problem file to write (.npz).")] = None,
    num_experts: Annotated[int, typer.Option("--num-experts", help="E, logical experts of a layer.")] = 0,
    capacity: Annotated[int, typer.Option("--capacity", help="C, tokens of a cell.")] = 0,
    ep_size: Annotated[int, typer.Option("--ep-size", help="P, EP ranks.")] = 0,
    dp_size: Annotated[int | None, typer.Option("--dp-size", help="D; default: shards x EP ranks.")] = None,
    num_shards: Annotated[int, typer.Option("--num-shards", help="G, EDP shards.")] = 1,
    cost: Annotated[str | None, typer.Option("--cost", help="Cost preset, such as 'gpt-oss-20b'.")] = None,
    uncovered: Annotated[str, typer.Option("--uncovered", help="Tokens without a route: refuse, scale or ignore.")] = (
        "refuse"
    ),
    option: Annotated[
        list[str] | None, typer.Option("--option", help="NAME=VALUE for the format (VALUE: JSON or text).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Turn recorded routing into a problem file."""
    from routepack_opt import formats
    from routepack_opt.problem import Cluster, Problem

    faults = Faults()
    if problem_out is None:
        faults.add("--out FILE.npz is missing")
    for flag, value in (("--num-experts", num_experts), ("--capacity", capacity), ("--ep-size", ep_size)):
        if value < 1:
            faults.add(f"{flag} is {value or 'missing'}; it must be at least 1")
    faults.raise_if_any("count")
    assert problem_out is not None
    _check_folder(problem_out, *sources)
    batch, coverage = formats.read(
        source_format, sources, num_experts=num_experts, uncovered=uncovered, **_options(option or [])
    )
    made = Problem.from_batch(
        batch,
        capacity=capacity,
        cluster=Cluster.from_sizes(ep_size=ep_size, dp_size=dp_size, num_shards=num_shards),
        cost=cost,
    )
    made.save(problem_out)
    if as_json:
        _emit({"problem": made.fingerprint, "out": str(problem_out), "coverage": coverage.to_dict()})
    else:
        out.print(escape(repr(made)))
        out.print(escape(repr(coverage)))
        out.print(f"written to {escape(str(problem_out))}")


#: Arguments of the readers and exporters that the commands fill in.
_FLAGS = {"name", "problem", "plan", "path", "paths", "num_experts", "uncovered"}


def _options(given: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    faults = Faults()
    for item in given:
        name, sign, value = item.partition("=")
        if not sign or not name.isidentifier():
            faults.add(f"--option {item!r}; write NAME=VALUE")
            continue
        if name in _FLAGS:
            faults.add(f"--option {item!r}; {name} is not an option of the format, the command says it itself")
            continue
        try:
            options[name] = json.loads(value)
        except (ValueError, RecursionError):
            options[name] = value
    faults.raise_if_any("options")
    return options


@app.command()
@_reported
def plot(
    problem: ProblemArgument,
    plans: Annotated[list[Path], typer.Argument(help="One plan, or two: before and after.")],
    figure: Annotated[Path, typer.Option("--out", help="Figure to write (.pdf, .svg or .png).")],
    as_json: JsonOption = False,
) -> None:
    """Rank-load heat map of a plan, or of two side by side."""
    from routepack_opt import plot as figures
    from routepack_opt.plan import Placement, Plan

    _check_figure(figure)
    if len(plans) > 2:
        raise InvalidInputError(f"{len(plans)} plans are given; one or two can be drawn")
    loaded = _load(problem)
    found = [Plan.load(path, loaded) for path in plans]
    if len(found) == 1:
        contiguous = Placement.contiguous(loaded.num_layers, loaded.num_experts, ep_size=loaded.ep_size)
        found.insert(0, Plan.of(loaded, contiguous, found[0].packing))
    save_figure(figures.rank_load(loaded, found[0], found[1]), figure)
    if as_json:
        _emit({"out": str(figure)})
    else:
        out.print(f"figure written to {escape(str(figure))}")


@study_app.command("run")
@_reported
def study_run(
    design: Annotated[Path, typer.Argument(help="Study design (.toml).")],
    folder: Annotated[Path | None, typer.Option("--out", help="Results folder; default: beside the design.")] = None,
    backend: Annotated[str, typer.Option(help="joblib backend: loky, ray or dask.")] = "loky",
    jobs: Annotated[int, typer.Option("--jobs", help="Processes.")] = 1,
    keep_going: Annotated[bool, typer.Option(help="Do not fail at the end when runs failed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study; finished rows are kept and not run again."""
    from routepack_opt import study

    table = study.run(design, out=folder, backend=backend, num_jobs=jobs, keep_going=keep_going, progress=not as_json)
    if as_json:
        _emit(table.to_dict())
    else:
        out.print(escape(table.question))
        _print_frame(table.formatted(), f"{table.name}: {len(table)} rows in {table.folder}")


def main() -> None:
    """Entry point of ``routepack-opt``."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    app()
