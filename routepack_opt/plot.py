"""Every figure: data in, ``ax`` in and out, readable in greyscale and at the width of a paper column.

Each function draws on the ``ax`` it is given, or on a new figure of column
width, and returns the axes; composed figures return the figure. Colours differ
in lightness, lines differ in dash and marker as well, so that nothing is lost
in print. :func:`save` exports vectors with embedded fonts, the same bytes for
the same figure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from routepack_opt import bounds, files
from routepack_opt.arrays import IntArray
from routepack_opt.bounds import Bound
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.metrics import coefficient_of_variation, imbalance
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Result
from routepack_opt.score import LEVELS, Breakdown, breakdown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from routepack_opt.planning import Runs
    from routepack_opt.simulation import Schedule, Sensitivity, Timeline

__all__ = [
    "COLUMN_WIDTH",
    "PAGE_WIDTH",
    "admission",
    "comparison",
    "convergence",
    "forest",
    "frontier",
    "gantt",
    "pareto",
    "performance_profile",
    "rank_load",
    "save",
    "sensitivity",
    "shard_rows",
    "style",
]

#: Inches of one column and of a page of two columns.
COLUMN_WIDTH = 3.3
PAGE_WIDTH = 6.9

#: Lightness rises unevenly along the list: neighbours differ in greyscale as well.
COLORS = ("#14213d", "#d9822b", "#9b2f5f", "#45b0a6", "#62666d", "#d4b13f")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1.2)), "-")
MARKERS = ("o", "s", "^", "D", "v", "P")
ATTENTION_COLOR, EXPERT_COLOR = "#2b4c7e", "#f0b55f"

_RC: dict[str, Any] = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "axes.axisbelow": True,
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.hashsalt": "routepack",
}

#: Keeps a label legible over lines.
_WHITE: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Context in which own figures look like the ones of this module.

    Only the settings it makes are put back: a notebook backend that switches
    itself on inside stays on.
    """
    import matplotlib as mpl

    settings: Any = mpl.rcParams
    before = {name: settings[name] for name in _RC}
    settings.update(_RC)
    try:
        yield
    finally:
        settings.update(before)


def _styled(draw: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> R:
        with style():
            return draw(*args, **kwargs)

    return styled


def _axes(ax: Axes | None, height: float, *, width: float = COLUMN_WIDTH) -> Axes:
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    _, made = plt.subplots(figsize=(width, height), layout="constrained")
    return made


def save(figure: Figure | Axes, path: files.PathLike) -> None:
    """Write a figure atomically; the suffix decides the format (pdf and svg are vectors).

    Parameters
    ----------
    figure : Figure or Axes
    path : path-like
        Ends in ``.pdf``, ``.svg``, ``.eps`` or ``.png``.

    Raises
    ------
    InvalidInputError
        If the suffix is another one or the folder does not exist.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".pdf", ".svg", ".eps", ".png"):
        raise InvalidInputError(f"{path}: a figure is written as .pdf, .svg, .eps or .png, not {suffix or 'nothing'!r}")
    whole: Any = getattr(figure, "figure", figure) if not hasattr(figure, "savefig") else figure
    no_date: dict[str, Any] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(suffix, {})
    with style(), files.atomic_path(path) as temporary:
        whole.savefig(temporary, format=suffix[1:], metadata=no_date)


# --------------------------------------------------------------------------------------------- what is drawn


def _plan_of(item: Result | Plan, label: str) -> Plan:
    if isinstance(item, Plan):
        return item
    if item.plan is None:
        raise InvalidInputError(f"{label} holds no plan (status {item.status.value}); nothing to draw")
    return item.plan


def _named(items: Any) -> dict[str, Result | Plan]:
    """Give every result or plan a label: its key, its planner (and seed where that repeats), or a number."""
    if isinstance(items, Result | Plan):
        items = [items]
    if isinstance(items, Mapping):
        named = dict(items)
    elif hasattr(items, "planners") and hasattr(items, "results"):
        named = {planner: items[planner] for planner in items.planners}
    else:
        named = {}
        given = list(items)
        planners = [item.planner for item in given if isinstance(item, Result)]
        for k, item in enumerate(given):
            if isinstance(item, Result):
                label = item.planner
                if planners.count(label) > 1:
                    label = f"{label}, seed {item.seed}"
            else:
                label = f"plan {k + 1}"
            while label in named:
                label += "'"
            named[label] = item
    faults = Faults()
    if not named:
        faults.add("no result or plan is given")
    for label, item in named.items():
        if not isinstance(item, Result | Plan):
            faults.add(f"{label} is {type(item).__name__}; it must be a Result or a Plan")
    faults.raise_if_any("figure")
    return named


def _detail(problem: Problem, item: Result | Plan, label: str) -> Breakdown:
    plan = _plan_of(item, label)
    if plan.problem_fingerprint != problem.fingerprint:
        raise InvalidInputError(f"{label} belongs to another problem (fingerprints differ)", context="figure")
    if isinstance(item, Result) and item.score is not None:
        return item.score.breakdown
    return breakdown(problem, plan)


def _limit(results: Any, bound: int | Bound | None) -> int | None:
    """The bound that is drawn, work units: the one given, else the one ``Runs`` carry."""
    found = getattr(results, "bound", None) if bound is None else bound
    if not isinstance(found, Bound):
        return found
    if found.level != LEVELS[0]:
        raise InvalidInputError(f"the bound is on {found.level}; the figure shows {LEVELS[0]}")
    return found.value


def _columns(frame: Any, needed: Sequence[str], what: str) -> None:
    missing = [name for name in needed if name not in frame.columns]
    if missing:
        raise InvalidInputError(
            [f"column {name!r} is missing; there are {', '.join(map(str, frame.columns))}" for name in missing],
            context=what,
        )
    if not len(frame):
        raise InvalidInputError("the table has no row", context=what)


def _signed(value: float, digits: int = 1) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _figures(value: float) -> str:
    """Four significant figures, trailing zeros kept, no exponent."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 3 - int(np.floor(np.log10(abs(value)))))}f}"


def _short(label: str, width: int) -> str:
    return label if len(label) <= width else label[: width - 1] + "…"


def _look(k: int) -> dict[str, Any]:
    return {"color": COLORS[k % len(COLORS)], "linestyle": DASHES[k % len(DASHES)]}


def _inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes."""
    box, place = ax.figure.bbox, ax.get_position()
    dpi = ax.figure.dpi
    return float(box.width * place.width / dpi), float(box.height * place.height / dpi)


def _legend_above(ax: Axes, handles: Sequence[Any] | None = None, *, handle_em: float = 2.2) -> None:
    """A legend above the axes, where it covers no data, in as many columns as fit."""
    if handles is None:
        handles = ax.get_legend_handles_labels()[0]
    room = 1.1 * _inches(ax)[0]
    inches = [0.2 + 0.097 * handle_em + 0.056 * len(str(handle.get_label())) for handle in handles]
    columns = len(handles)
    while columns > 1 and sum(part.max() for part in np.array_split(np.array(inches), columns)) > room:
        columns -= 1
    ax.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=columns, handlelength=handle_em,
        columnspacing=1.2, borderaxespad=0.0,
    )  # fmt: skip


def _series(rows: Any) -> str:
    """Column that tells planners apart: their labels where a study gives them."""
    return "label" if "label" in rows.columns else "planner"


def _light_grid(ax: Axes, axis: str) -> None:
    ax.grid(axis=axis, color="0.88", linewidth=0.5)  # type: ignore[arg-type]


def _plain_ticks(axis: Any) -> None:
    """Numbers such as 0.5, 1, 20 instead of powers of ten on a logarithmic axis, as many as read well."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    decades = np.log10(high / low) if low > 0 else 9.0
    subs = (1.0, 2.0, 5.0) if decades < 2.2 else (1.0, 3.0) if decades < 3.5 else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


# ------------------------------------------------------------------------------------------------- one plan


@_styled
def rank_load(
    problem: Problem,
    before: Result | Plan,
    after: Result | Plan | None = None,
    *,
    block: tuple[int, int] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Heat map of routed tokens by EP rank and MoE layer, before and after, on one colour scale.

    Parameters
    ----------
    problem : Problem
        With routing counts.
    before, after : Result or Plan
        ``after`` below ``before``; one panel without ``after``.
    block : (int, int), optional
        Row and EDP shard whose load is shown; default: the whole window.
    ax : Axes, optional

    Returns
    -------
    Axes
        Load divided by the mean over ranks of its layer; 1 is balanced. Each
        panel states the EP-rank CV (mean over layers) and the worst ratio.

    Raises
    ------
    InvalidInputError
        If the problem has no routing, a result has no plan or belongs to
        another problem, or the block does not exist.
    """
    from matplotlib.ticker import MaxNLocator

    if not problem.num_layers:
        raise InvalidInputError("the problem has no routing counts, so ranks have no load to draw")
    if block is not None and not (0 <= block[0] < problem.num_rows and 0 <= block[1] < problem.num_shards):
        raise InvalidInputError(
            f"block (row, shard) is {block}; the problem has {problem.num_rows} rows and {problem.num_shards} shards"
        )
    given = {"before": before} if after is None else {"before": before, "after": after}
    panels: list[tuple[str, npt.NDArray[np.float64], float, float]] = []
    for role, item in given.items():
        load = _detail(problem, item, role).rank_load
        layers = load.sum(axis=(0, 1)) if block is None else load[block]
        mean = layers.mean(axis=1, keepdims=True)
        relative = np.divide(layers, mean, out=np.ones(layers.shape), where=mean > 0).T
        name = item.planner if isinstance(item, Result) else role
        panels.append((name, relative, float(coefficient_of_variation(layers).mean()), float(imbalance(layers).max())))
    ax = _axes(ax, 1.35 if after is None else 2.3)
    num_ranks, num_layers = problem.ep_size, problem.num_layers
    low = min(float(relative.min()) for _, relative, _, _ in panels)
    high = max(float(relative.max()) for _, relative, _, _ in panels)
    if high - low < 0.02:
        low, high = low - 0.01, high + 0.01
    head, top = 0.26 * num_ranks, 0.0
    ticks: list[float] = []
    names: list[str] = []
    mesh: Any = None
    for name, relative, spread, worst in panels:
        top += head
        mesh = ax.pcolormesh(
            np.arange(num_layers + 1) - 0.5,
            top + np.arange(num_ranks + 1),
            relative,
            cmap="YlGnBu",
            vmin=low,
            vmax=high,
            edgecolors="face",
            linewidth=0.15,
        )
        numbers = f"CV {100 * spread:.{1 if spread >= 0.01 else 2}f} %, worst {worst:.2f}×"
        ax.annotate(
            _short(name, 34), (-0.5, top), (0, 2), textcoords="offset points", ha="left", va="bottom", weight="bold"
        )
        ax.annotate(numbers, (num_layers - 0.5, top), (0, 2), textcoords="offset points", ha="right", va="bottom")
        shown = [0, num_ranks - 1] if num_ranks > 8 else range(num_ranks) if num_ranks <= 4 else range(0, num_ranks, 2)
        ticks += [top + rank + 0.5 for rank in shown]
        names += [str(rank) for rank in shown]
        top += num_ranks
    ax.set_yticks(ticks, names)
    ax.set_xlim(-0.5, num_layers - 0.5)
    ax.set_ylim(top, 0.0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlabel("MoE layer")
    ax.set_ylabel("EP rank")
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    bar = ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=28, fraction=0.06)
    where = "window" if block is None else f"row {block[0]}, shard {block[1]}"
    bar.set_label(f"load / mean of the layer ({where})", fontsize=7)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7, length=2)
    return ax


@_styled
def shard_rows(
    problem: Problem,
    results: Result | Plan | Sequence[Result | Plan] | Mapping[str, Result | Plan] | Runs,
    *,
    bound: int | Bound | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Work of every EDP shard, row after row, attention and expert work stacked.

    A bar is a shard's time line: its length is U_g, its segments the rows, each
    split into attention (dark) and expert work (light).

    Parameters
    ----------
    problem : Problem
    results : Result, Plan, sequence, mapping of label to them, or Runs
    bound : int or Bound, optional
        Proven bound on the first level, work units; default: that of ``Runs``.
    ax : Axes, optional

    Returns
    -------
    Axes
        x in units of J. The longest shard of each plan, its score, is set in
        bold with its change against the first plan.

    Raises
    ------
    InvalidInputError
        If a result has no plan or belongs to another problem.
    """
    limit = _limit(results, bound)
    named = _named(results)
    details = {label: _detail(problem, item, label) for label, item in named.items()}
    unit = problem.unit_denominator
    num_shards = problem.num_shards
    lines = len(named) * (num_shards + 1.07)
    ax = _axes(ax, 0.7 + 0.16 * lines)
    longest = max(int(detail.shard.max()) for detail in details.values()) / unit
    first_score = int(next(iter(details.values())).shard.max())
    y = 0.0
    ticks: list[float] = []
    names: list[str] = []
    for label, detail in details.items():
        y += 0.82
        ax.annotate(
            _short(label, 52), (0, y - 0.4), (0, 0), textcoords="offset points", weight="bold", va="center", ha="left",
            bbox=_WHITE, zorder=4,
        )  # fmt: skip
        y += 0.4
        score = int(detail.shard.max())
        for g in range(num_shards):
            start = 0.0
            for r in range(problem.num_rows):
                attention, expert = int(detail.attention[r, g]) / unit, int(detail.expert[r, g]) / unit
                ax.barh(y, attention, left=start, height=0.78, color=ATTENTION_COLOR, linewidth=0)
                ax.barh(y, expert, left=start + attention, height=0.78, color=EXPERT_COLOR, linewidth=0)
                start += attention + expert
                if r + 1 < problem.num_rows:
                    ax.plot([start, start], [y - 0.39, y + 0.39], color="white", linewidth=1.0, solid_capstyle="butt")
            worst = int(detail.shard[g]) == score
            text = _figures(start)
            if worst and score != first_score and first_score:
                text += f" ({_signed(100 * (score / first_score - 1))} %)"
            ax.annotate(
                text, (start, y), (4, 0), textcoords="offset points", va="center", fontsize=7,
                weight="bold" if worst else "normal", bbox=_WHITE,
                zorder=4,
            )  # fmt: skip
            ticks.append(y)
            names.append(f"shard {g}" if num_shards > 1 else "")
            y += 1.0
        y -= 0.15
    if limit is not None:
        ax.axvline(limit / unit, color="black", linewidth=0.8, linestyle=(0, (3, 2)), zorder=3)
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 0.15, 0.0)
    ax.set_xlim(0, longest * 1.27)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("work J, rows in order of execution")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        Patch(color=ATTENTION_COLOR, label="attention"),
        Patch(color=EXPERT_COLOR, label="expert"),
    ]
    if limit is not None:
        handles.append(Line2D([], [], color="black", linewidth=0.8, linestyle=(0, (3, 2)), label="proven bound"))
    _legend_above(ax, handles, handle_em=1.6)
    return ax


# ------------------------------------------------------------------------------------------------ over time


@dataclass(frozen=True)
class _Curve:
    """Incumbents of one run: first levels (work units) over time, and bounds reported on the way."""

    times: npt.NDArray[np.float64]
    values: IntArray
    bounds: tuple[tuple[float, int], ...]
    runtime: float
    unit: int


def _curve(run: Any, label: str) -> _Curve | None:
    """The curve of a result, or of a history as a study stores it; None without an incumbent."""
    if isinstance(run, Result):
        points = [(point.time, point.levels[0]) for point in run.trace.incumbents]
        reported = [(point.time, point.bound) for point in run.trace.bounds if point.level == LEVELS[0]]
        runtime, unit = run.runtime, 1 if run.score is None else run.score.unit_denominator
    elif isinstance(run, Mapping) and {"incumbents", "bounds", "runtime", "unit_denominator"} <= set(run):
        points = [(point["time"], point["levels"][0]) for point in run["incumbents"]]
        reported = [(point["time"], point["bound"]) for point in run["bounds"] if point["level"] == LEVELS[0]]
        runtime, unit = run["runtime"], run["unit_denominator"]
    else:
        raise InvalidInputError(f"{label} is {type(run).__name__}; it must be a Result or a history of a study")
    if not points:
        return None
    times, values = zip(*points, strict=True)
    return _Curve(np.array(times), np.array(values, dtype=np.int64), tuple(reported), runtime, unit)


def _curves(results: Any) -> dict[str, list[_Curve]]:
    """Runs by label: several seeds of one planner are one line."""
    if isinstance(results, Result):
        results = [results]
    by_label: dict[str, list[Any]] = {}
    if isinstance(results, Mapping):
        for label, given in results.items():
            by_label[str(label)] = list(given) if isinstance(given, Sequence) else [given]
    else:
        for result in results:
            by_label.setdefault(str(getattr(result, "planner", "run")), []).append(result)
    found = {
        label: [curve for run in runs if (curve := _curve(run, label)) is not None] for label, runs in by_label.items()
    }
    found = {label: curves for label, curves in found.items() if curves}
    if not found:
        raise InvalidInputError("no result has an incumbent to draw", context="convergence")
    if len({curve.unit for curves in found.values() for curve in curves}) > 1:
        raise InvalidInputError("the results are of problems with different work units", context="convergence")
    return found


def _gaps(levels: npt.NDArray[np.float64], limit: int) -> npt.NDArray[np.float64]:
    """Gaps in %, by the one function that derives them."""
    flat = [100 * (bounds.gap(int(level), limit) or 0.0) for level in np.ravel(levels)]
    return np.array(flat).reshape(levels.shape)


def _at(times: npt.NDArray[np.float64], values: IntArray, grid: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Value of a step curve on a grid of times that starts no earlier than the curve."""
    return values[np.searchsorted(times, grid, side="right") - 1].astype(np.float64)


@_styled
def convergence(
    results: Result | Sequence[Result] | Mapping[str, Any] | Runs,
    *,
    bound: int | Bound | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Incumbent over time, with bounds.

    Results of one planner under several seeds become one line, their median,
    inside the band from best to worst.

    Parameters
    ----------
    results : Result, sequence, Runs, or mapping
        A mapping of labels holds results, histories of a study
        (:meth:`routepack_opt.study.StudyTable.history`), or lists of either.
    bound : int or Bound, optional
        Proven bound on the first level, work units; default: that of ``Runs``.
        With it the gap in % is drawn, without it the work in units of J.
    ax : Axes, optional

    Returns
    -------
    Axes
        Bounds that exact solvers report over time are drawn where no ``bound``
        is given, as thin lines from below.

    Raises
    ------
    InvalidInputError
        If no result has an incumbent, ``bound`` is not positive or above a value,
        or the results are of problems with different work units.
    """
    limit = _limit(results, bound)
    if limit is not None and limit <= 0:
        raise InvalidInputError(f"bound is {limit}; a gap needs a bound above 0")
    curves_of = _curves(results)
    every = [curve for curves in curves_of.values() for curve in curves]
    ax = _axes(ax, 2.2)
    unit = every[0].unit
    end = max(max(curve.runtime, float(curve.times[-1])) for curve in every)
    start = max(1e-4, min(float(curve.times[0]) for curve in every))
    finals: list[tuple[float, str, str]] = []
    drawn: list[npt.NDArray[np.float64]] = []
    for k, (label, curves) in enumerate(curves_of.items()):
        first = max(float(curve.times[0]) for curve in curves)
        grid = np.unique(np.concatenate([curve.times for curve in curves] + [np.array([end])]))
        grid = np.maximum(grid[grid >= first], start)
        levels = np.stack([_at(curve.times, curve.values, np.maximum(grid, first)) for curve in curves])
        shown = _gaps(levels, limit) if limit is not None else levels / unit
        middle = np.median(shown, axis=0)
        look = _look(k)
        mark = MARKERS[k % len(MARKERS)]
        marked = list(range(0, len(grid) - 1, max(1, len(grid) // 8)))
        ax.plot(
            grid, middle, drawstyle="steps-post", label=_short(label, 40), marker=mark, markevery=marked,
            markersize=3.2, **look,
        )  # fmt: skip
        if len(curves) > 1:
            ax.fill_between(
                grid, shown.min(axis=0), shown.max(axis=0), step="post", color=look["color"], alpha=0.18, linewidth=0
            )
        if limit is None:
            for curve in curves:
                if curve.bounds:
                    best = np.maximum.accumulate([value / unit for _, value in curve.bounds])
                    times = np.maximum([time for time, _ in curve.bounds] + [end], start)
                    ax.plot(
                        times, [*best, best[-1]], drawstyle="steps-post", linewidth=0.7, color=look["color"],
                        linestyle=look["linestyle"],
                    )  # fmt: skip
        drawn.append(middle)
        text = f"{middle[-1]:.{2 if middle[-1] < 10 else 1}f} %" if limit is not None else _figures(float(middle[-1]))
        finals.append((float(middle[-1]), text, look["color"]))
    every_value = np.concatenate(drawn)
    if end / start > 20:
        ax.set_xscale("log")
    if limit is not None and every_value.min() > 0 and every_value.max() / every_value.min() > 8:
        ax.set_yscale("log")
    elif limit is not None:
        ax.set_ylim(bottom=0)
    ax.set_xlim(start * 0.85 if end / start > 20 else 0.0, end)
    for which, axis in (("x", ax.xaxis), ("y", ax.yaxis)):
        if (ax.get_xscale() if which == "x" else ax.get_yscale()) == "log":
            _plain_ticks(axis)
    _end_labels(ax, finals)
    _light_grid(ax, "both")
    ax.set_xlabel("seconds")
    ax.set_ylabel("gap to the proven bound (%)" if limit is not None else "max shard work (J)")
    _legend_above(ax)
    return ax


def _end_labels(ax: Axes, finals: Sequence[tuple[float, str, str]]) -> None:
    """Write each curve's last value to the right of the axes, moved apart where they would overlap."""
    logarithmic = ax.get_yscale() == "log"
    low, high = ax.get_ylim()

    def fraction(value: float) -> float:
        if logarithmic:
            return float(np.log(value / low) / np.log(high / low))
        return (value - low) / (high - low)

    least = 0.115 / max(_inches(ax)[1], 0.5)
    previous = -1.0
    for value, text, color in sorted(finals):
        place = max(fraction(value), previous + least)
        previous = place
        ax.annotate(
            text, (1.0, place), (3, 0), xycoords="axes fraction", textcoords="offset points", va="center",
            fontsize=7, color=color, annotation_clip=False,
        )  # fmt: skip


# --------------------------------------------------------------------------------------------- modelled time


@_styled
def gantt(timeline: Timeline, *, ax: Axes | None = None) -> Axes:
    """One modelled step, a line a device: attention, expert work, and where devices wait.

    Parameters
    ----------
    timeline : Timeline
        From :func:`routepack_opt.simulation.simulate`.
    ax : Axes, optional

    Returns
    -------
    Axes
        White gaps between grey waiting are the rows' ends; time that no plan
        changes is hatched at the end.
    """
    from matplotlib.patches import Patch

    num_rows, num_shards, num_devices = timeline.num_rows, timeline.num_shards, timeline.num_devices
    lanes = num_shards * (num_devices + 1) - 1
    ax = _axes(ax, 0.75 + min(3.2, max(0.9, 0.085 * lanes)))
    gap = 0.004 * timeline.step_time
    handles: list[Any] = [
        Patch(color=ATTENTION_COLOR, label="attention"),
        Patch(color=EXPERT_COLOR, label="expert"),
        Patch(color="0.86", label="waiting"),
    ]
    for g in range(num_shards):
        top = g * (num_devices + 1)
        y = top + np.arange(num_devices)
        for r in range(num_rows):
            start, split, end = timeline.start[r, g], timeline.attention_end[r, g], timeline.end[r, g]
            ax.barh(y, max(0.0, end - start - gap), left=start, height=0.86, color="0.86", linewidth=0)
            ax.barh(y, timeline.attention_busy[r, g], left=start, height=0.86, color=ATTENTION_COLOR, linewidth=0)
            ax.barh(y, timeline.expert_busy[r, g], left=split, height=0.86, color=EXPERT_COLOR, linewidth=0)
        if timeline.bubble[g] > 0:
            ax.barh(
                y, timeline.bubble[g], left=timeline.end[:, g].max(), height=0.86, color="white", edgecolor="0.6",
                hatch="....", linewidth=0,
            )  # fmt: skip
    if timeline.bubble.max() > 0:
        handles.append(Patch(facecolor="white", edgecolor="0.6", hatch="....", label="pipeline bubble"))
    if timeline.fixed_seconds > 0:
        begin = timeline.step_time - timeline.fixed_seconds
        ax.barh(
            (lanes - 1) / 2, timeline.fixed_seconds, left=begin, height=lanes - 0.14, color="white", edgecolor="0.6",
            hatch="////", linewidth=0,
        )  # fmt: skip
        handles.append(Patch(facecolor="white", edgecolor="0.6", hatch="////", label="unchanged by plans"))
    ax.axvline(timeline.step_time, color="black", linewidth=0.8)
    ax.set_yticks(
        [g * (num_devices + 1) + (num_devices - 1) / 2 for g in range(num_shards)],
        [f"shard {g}" for g in range(num_shards)],
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylim(lanes - 0.4, -0.6)
    ax.set_xlim(0, timeline.step_time * 1.01)
    approximate = ", pipeline approximated" if timeline.approximate else ""
    busy = f"{100 * timeline.busy_share:.1f} % busy"
    ax.set_xlabel(f"modelled seconds (step {timeline.step_time:.4g}, {busy}{approximate})")
    _legend_above(ax, handles, handle_em=1.6)
    return ax


@_styled
def admission(schedule: Schedule, *, ax: Axes | None = None) -> Axes:
    """Admission of a planned step: tasks in time, the critical path dark, slack as a thin line.

    Parameters
    ----------
    schedule : Schedule
        From ``Stages(...).schedule()`` or ``JointStages(...).schedule()``.
    ax : Axes, optional

    Returns
    -------
    Axes
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ax = _axes(ax, 0.75 + 0.2 * len(schedule.tasks))
    reach = max(schedule.total, max(task.end + task.slack for task in schedule.tasks))
    for k, task in enumerate(schedule.tasks):
        critical = task.name in schedule.critical_path
        ax.barh(
            k, task.end - task.start, left=task.start, height=0.62, color=COLORS[0] if critical else "0.75", linewidth=0
        )
        if task.slack > 1e-9 * max(1.0, schedule.total):
            ax.plot([task.end, task.end + task.slack], [k, k], color="0.55", linewidth=1.0, marker="|", markevery=[1])
        ax.annotate(
            f"{task.end - task.start:.3g} s", (task.end + task.slack, k), (3, 0), textcoords="offset points",
            va="center", fontsize=7, bbox=_WHITE, zorder=4,
        )  # fmt: skip
    ax.axvline(schedule.total, color="black", linewidth=0.8, linestyle=(0, (3, 2)))
    ax.set_yticks(range(len(schedule.tasks)), [task.name for task in schedule.tasks])
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_ylim(len(schedule.tasks) - 0.4, -0.6)
    ax.set_xlim(0, reach * 1.14)
    ax.set_xlabel(f"seconds (admitted after {schedule.total:.3g}, planning exposed {schedule.exposed:.3g})")
    handles: list[Any] = [
        Patch(color=COLORS[0], label="critical path"),
        Patch(color="0.75", label="beside it"),
        Line2D([], [], color="0.55", linewidth=1.0, label="slack"),
    ]
    _legend_above(ax, handles, handle_em=1.6)
    return ax


@_styled
def sensitivity(
    result: Sensitivity | Mapping[str, Sensitivity], *, measured: float | None = None, ax: Axes | None = None
) -> Axes:
    """Time until admission against the duration of one stage.

    Parameters
    ----------
    result : Sensitivity, or mapping of label to Sensitivity
        From :func:`routepack_opt.simulation.sensitivity`; several of the same stage.
    measured : float, optional
        Measured duration of the stage, seconds, marked by a vertical line.
    ax : Axes, optional

    Returns
    -------
    Axes
        Flat while planning hides behind other work; a dot marks where it begins
        to delay admission.

    Raises
    ------
    InvalidInputError
        If the results vary different stages.
    """
    named = dict(result) if isinstance(result, Mapping) else {"": result}
    stages = list(dict.fromkeys(one.stage for one in named.values()))
    if len(stages) != 1:
        raise InvalidInputError(f"the results vary {', '.join(stages) or 'nothing'}; one stage is needed")
    ax = _axes(ax, 2.0)
    for k, (label, one) in enumerate(named.items()):
        order = np.argsort(one.seconds, kind="stable")
        seconds, total, slack = one.seconds[order], one.total[order], one.slack[order]
        hidden = total - one.exposed[order]
        knots = []
        for j in np.flatnonzero((slack[:-1] >= 0) & (slack[1:] < 0)):
            at = float(seconds[j] + slack[j] / (slack[j] - slack[j + 1]) * (seconds[j + 1] - seconds[j]))
            knots.append((at, float(np.interp(at, seconds, hidden))))
        xs, ys = np.array([*zip(seconds, total, strict=True), *knots]).T
        along = np.argsort(xs, kind="stable")
        ax.plot(xs[along], ys[along], label=_short(label, 40), **_look(k))
        for at, level in knots:
            ax.plot(at, level, "o", color=COLORS[k % len(COLORS)])
            ax.annotate(
                f"exposed from {at:.3g} s", (at, level), (-3, 6), textcoords="offset points", ha="right", va="bottom",
                fontsize=7, bbox=_WHITE, zorder=4,
            )  # fmt: skip
    if measured is not None:
        ax.axvline(measured, color="black", linewidth=0.8, linestyle=(0, (3, 2)))
        ax.annotate(
            f"measured {measured:.3g} s", (measured, 0.98), (3, 0), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=7, va="top",
        )  # fmt: skip
    _light_grid(ax, "both")
    ax.set_xlabel(f"{stages[0]} (s)")
    ax.set_ylabel("time until admission (s)")
    if any(named):
        _legend_above(ax)
    return ax


# -------------------------------------------------------------------------------------------------- studies


@_styled
def performance_profile(profile: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Share of problems each planner solves within a factor of the best (Dolan & Moré, 10.1007/s101070100263).

    Parameters
    ----------
    profile : DataFrame
        Index: the factor τ ≥ 1, ascending. One column a planner, shares in [0, 1].
    ax : Axes, optional

    Returns
    -------
    Axes

    Raises
    ------
    InvalidInputError
        If the table is empty or holds anything but shares.
    """
    values = np.asarray(profile, dtype=float)
    factors = np.asarray(profile.index, dtype=float)
    faults = Faults()
    if not values.size:
        faults.add("the table is empty")
    elif not ((values >= 0) & (values <= 1)).all():
        faults.add("shares must lie in [0, 1]")
    if factors.size and (factors.min() < 1 or (np.diff(factors) <= 0).any()):
        faults.add("the index must be factors of at least 1, ascending")
    faults.raise_if_any("performance profile")
    ax = _axes(ax, 2.2)
    for k, name in enumerate(profile.columns):
        ax.plot(
            factors, 100 * values[:, k], drawstyle="steps-post", label=_short(str(name), 40),
            marker=MARKERS[k % len(MARKERS)], markevery=max(1, len(factors) // 7), markersize=3.2, **_look(k),
        )  # fmt: skip
    if factors[-1] > 5:
        ax.set_xscale("log")
        _plain_ticks(ax.xaxis)
    ax.set_xlim(factors[0], factors[-1])
    ax.set_ylim(0, 103)
    _light_grid(ax, "both")
    ax.set_xlabel("factor τ of the best planner's value")
    ax.set_ylabel("problems within τ (%)")
    ax.legend(loc="lower right")
    return ax


def _wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share (10.1080/01621459.1927.10502953)."""
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * np.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return float(centre - half), float(centre + half)


@_styled
def frontier(rows: pd.DataFrame, *, x: str = "num_samples", ax: Axes | None = None) -> Axes:
    """Share of runs proven optimal against problem size, with 95 % Wilson intervals.

    Parameters
    ----------
    rows : DataFrame
        One row a run with the columns ``planner`` (or ``label``), ``status`` and ``x``.
    x : str
        Column of the size.
    ax : Axes, optional

    Returns
    -------
    Axes

    Raises
    ------
    InvalidInputError
        If a column is missing or there is no row.
    """
    series = _series(rows)
    _columns(rows, [series, "status", x], "frontier")
    ax = _axes(ax, 2.1)
    planners = list(dict.fromkeys(rows[series]))
    sizes = np.array(sorted(set(rows[x])), dtype=float)
    step = float(np.diff(sizes).min()) if len(sizes) > 1 else 1.0
    for k, planner in enumerate(planners):
        part = rows[rows[series] == planner]
        at, shares, below, above = [], [], [], []
        for size in sorted(set(part[x])):
            proven = part.loc[part[x] == size, "status"].eq("optimal")
            share = float(proven.mean())
            low, high = _wilson(int(proven.sum()), len(proven))
            at.append(float(size) + 0.12 * step * (k - (len(planners) - 1) / 2))
            shares.append(100 * share)
            below.append(100 * max(0.0, share - low))
            above.append(100 * max(0.0, high - share))
        look = _look(k)
        ax.errorbar(
            at, shares, yerr=[below, above], label=_short(str(planner), 40), marker=MARKERS[k % len(MARKERS)],
            elinewidth=0.7, capsize=1.5, capthick=0.7, **look,
        )  # fmt: skip
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.set_ylim(-4, 104)
    _light_grid(ax, "y")
    ax.set_xlabel("samples N" if x == "num_samples" else x.replace("_", " "))
    ax.set_ylabel("runs proven optimal (%)")
    ax.legend(loc="lower left")
    return ax


@_styled
def forest(effects: pd.DataFrame, *, unit: str = "%", label: str = "", ax: Axes | None = None) -> Axes:
    """Effects with their intervals, one line each, as an ablation table drawn to scale.

    Parameters
    ----------
    effects : DataFrame
        Columns ``name``, ``effect``, ``low``, ``high``; optional ``reference``
        (bool): lines that are compared against, drawn hollow; optional ``group``:
        a heading above each run of equal values.
    unit : str
        Unit of the effects.
    label : str
        Label of the x axis; default: ``effect``.
    ax : Axes, optional

    Returns
    -------
    Axes
        Filled markers: the interval excludes 0. The numbers stand at the right.

    Raises
    ------
    InvalidInputError
        If a column is missing, an interval does not hold its effect, or there is no row.
    """
    _columns(effects, ["name", "effect", "low", "high"], "forest plot")
    faults = Faults()
    for name, effect, low, high in zip(
        effects["name"], effects["effect"], effects["low"], effects["high"], strict=True
    ):
        if not low <= effect <= high:
            faults.add(f"{name}: the effect {effect} is outside its interval [{low}, {high}]")
    faults.raise_if_any("forest plot")
    groups = list(effects["group"]) if "group" in effects.columns else [""] * len(effects)
    headings = sum(1 for k, group in enumerate(groups) if group and (k == 0 or groups[k - 1] != group))
    ax = _axes(ax, 0.65 + 0.17 * (len(effects) + headings))
    digits = 2 if float(np.abs(effects[["effect", "low", "high"]].to_numpy(dtype=float)).max()) < 10 else 1
    y = 0.0
    ticks, names = [], []
    previous = ""
    for k in range(len(effects)):
        row = effects.iloc[k]
        if groups[k] and groups[k] != previous:
            ax.annotate(
                str(groups[k]), (0, y), (-4, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                ha="right", va="center", weight="bold", annotation_clip=False,
            )  # fmt: skip
            y += 1.0
        previous = groups[k]
        effect, low, high = float(row["effect"]), float(row["low"]), float(row["high"])
        clear = low > 0 or high < 0
        color = COLORS[0]
        ax.plot([low, high], [y, y], color=color, linewidth=1.2, solid_capstyle="butt")
        ax.plot(effect, y, "o", color=color, markerfacecolor=color if clear else "white", markersize=4.2)
        text = f"{_signed(effect, digits)} [{_signed(low, digits)}, {_signed(high, digits)}]"
        ax.annotate(
            text, (1.0, y), (4, 0), xycoords=("axes fraction", "data"), textcoords="offset points", va="center",
            fontsize=7, annotation_clip=False,
        )  # fmt: skip
        ticks.append(y)
        names.append(_short(str(row["name"]), 40))
        y += 1.0
    ax.axvline(0, color="0.4", linewidth=0.7, linestyle=(0, (3, 2)), zorder=0)
    ax.set_yticks(ticks, names)
    ax.set_ylim(y - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    _light_grid(ax, "x")
    ax.margins(x=0.08)
    ax.locator_params(axis="x", nbins=5)
    ax.set_xlabel(f"{label or 'effect'} ({unit})" if unit else label or "effect")
    return ax


@_styled
def pareto(
    rows: pd.DataFrame, *, x: str = "runtime", y: str = "gap", percent: bool = True, ax: Axes | None = None
) -> Axes:
    """Quality against time: a planner's medians over its runs, with quartiles, and the non-dominated front.

    Parameters
    ----------
    rows : DataFrame
        One row a run: ``planner`` (or ``label``), the columns ``x`` and ``y``, and optionally
        ``time_limit``; runs of one planner under several limits are joined by a line.
    x, y : str
        Columns; smaller is better in both.
    percent : bool
        ``y`` is a share, drawn in %.
    ax : Axes, optional

    Returns
    -------
    Axes

    Raises
    ------
    InvalidInputError
        If a column is missing, or no row has both values.
    """
    series = _series(rows)
    _columns(rows, [series, x, y], "time and quality")
    complete = rows[rows[x].notna() & rows[y].notna()]
    if not len(complete):
        raise InvalidInputError(f"no row has both {x!r} and {y!r}", context="time and quality")
    ax = _axes(ax, 2.3)
    scale = 100.0 if percent else 1.0
    centres: list[tuple[float, float]] = []
    for k, planner in enumerate(dict.fromkeys(complete[series])):
        part = complete[complete[series] == planner]
        limits: Iterable[Any] = [None]
        if "time_limit" in part.columns and part["time_limit"].nunique() > 1:
            limits = sorted(part["time_limit"].dropna().unique())
        at = []
        for limit in limits:
            some = part if limit is None else part[part["time_limit"] == limit]
            quartiles = [np.percentile(some[name].to_numpy(dtype=float), [25, 50, 75]) for name in (x, y)]
            at.append((quartiles[0], scale * quartiles[1]))
        medians = np.array([(across[1], up[1]) for across, up in at])
        spread = [np.abs(np.array([(q[1] - q[0], q[2] - q[1]) for q in column]).T) for column in zip(*at, strict=True)]
        look = _look(k)
        ax.errorbar(
            medians[:, 0], medians[:, 1], xerr=spread[0], yerr=spread[1], label=_short(str(planner), 40),
            marker=MARKERS[k % len(MARKERS)], elinewidth=0.7, **look,
        )  # fmt: skip
        centres += [(float(across), float(up)) for across, up in medians]
    front: list[tuple[float, float]] = []
    for across, up in sorted(centres):
        if not front or up < front[-1][1]:
            front.append((across, up))
    xs, ys = np.array([point[0] for point in centres]), np.array([point[1] for point in centres])
    if xs.min() > 0 and xs.max() / xs.min() > 8:
        ax.set_xscale("log")
    if ys.min() > 0 and ys.max() / ys.min() > 8:
        ax.set_yscale("log")
    ax.margins(0.12)
    ax.autoscale_view()
    right = ax.get_xlim()[1]
    ax.plot(
        [*(point[0] for point in front), right], [*(point[1] for point in front), front[-1][1]],
        drawstyle="steps-post", color="0.75", linewidth=3.0, zorder=0, label="non-dominated",
    )  # fmt: skip
    ax.set_xlim(right=right)
    for name, axis in ((ax.get_xscale(), ax.xaxis), (ax.get_yscale(), ax.yaxis)):
        if name == "log":
            _plain_ticks(axis)
    _light_grid(ax, "both")
    ax.set_xlabel("seconds" if x in ("runtime", "seconds") else x.replace("_", " "))
    ax.set_ylabel("gap to the proven bound (%)" if y == "gap" and percent else y.replace("_", " "))
    handles, _ = ax.get_legend_handles_labels()
    _legend_above(ax, [*handles[1:], handles[0]])
    return ax


# ------------------------------------------------------------------------------------------------- composed


@_styled
def comparison(problem: Problem, runs: Runs, *, width: float = PAGE_WIDTH) -> Figure:
    """The main figure of a comparison: rank load before and after, work by shard and row, gap over time.

    Parameters
    ----------
    problem : Problem
        Without routing counts there is no heat map.
    runs : Runs
        From :func:`routepack_opt.planning.compare`; "before" is its first
        planner, "after" the best one.
    width : float
        Inches.

    Returns
    -------
    Figure

    Raises
    ------
    InvalidInputError
        If no planner, or not the first one, found a plan.
    """
    import matplotlib.pyplot as plt
    from matplotlib.font_manager import FontProperties
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    first, best = runs[runs.planners[0]], runs.best
    solved = {planner: runs[planner] for planner in runs.planners if runs[planner].plan is not None}
    shown = solved
    if len(solved) > 4:
        shown = {result.planner: result for result in (first, best)}
    top = 0.95 + 0.16 * len(shown) * (problem.num_shards + 1.07)
    layout = ConstrainedLayoutEngine(h_pad=0.06, w_pad=0.06)
    figure = plt.figure(figsize=(width, top + 2.25), layout=layout)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.0, 1.08), height_ratios=(top, 2.25))
    column = 1 if problem.num_layers else slice(0, 2)
    shards = figure.add_subplot(grid[0, column])
    over_time = figure.add_subplot(grid[1, column])
    letters = iter("abc")
    if problem.num_layers:
        loads = figure.add_subplot(grid[:, 0])
        rank_load(problem, first, best, ax=loads)
        loads.set_title(f"{next(letters)}  Routed tokens by EP rank and layer", loc="left", fontsize=8.5)
    shard_rows(problem, shown, bound=runs.bound, ax=shards)
    convergence(runs, ax=over_time)
    for ax, title in ((shards, "Work of each shard, row after row"), (over_time, "Best plan so far")):
        legend = ax.get_legend()
        assert legend is not None
        legend.set_title(f"{next(letters)}  {title}", prop=FontProperties(size=8.5))
        legend.set_alignment("left")
    return figure
