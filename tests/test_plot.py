"""Figures show the numbers they are given: artists, labels and values, not just the absence of a crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from routepack_opt import bounds, planning, plot, simulation
from routepack_opt.errors import InvalidInputError
from routepack_opt.metrics import measure
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import BoundPoint, Incumbent, LevelResult, Limit, Result, Status, Trace
from routepack_opt.score import LEVELS, evaluate
from routepack_opt.testing import tiny_problem


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def problem() -> Problem:
    return tiny_problem(3, num_samples=7, num_shards=2, shard_size=2, num_layers=3, ep_size=2, experts_per_rank=2)


def first_fit(problem: Problem, order: np.ndarray) -> Packing:
    free = np.full(problem.num_cells, problem.capacity)
    cells = np.empty(problem.num_samples, dtype=np.int64)
    for i in order:
        cells[i] = np.flatnonzero(free >= problem.aligned_lengths[i])[0]
        free[cells[i]] -= problem.aligned_lengths[i]
    return Packing.from_cells(cells, dp_size=problem.dp_size)


@pytest.fixture(scope="module")
def plan(problem: Problem) -> Plan:
    placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    return Plan.of(problem, placement, first_fit(problem, np.argsort(-problem.aligned_lengths)))


@pytest.fixture(scope="module")
def other(problem: Problem, plan: Plan) -> Plan:
    reverse = np.tile(np.array([0, 2, 1, 3]), (problem.num_layers, 1))
    return Plan.of(problem, Placement.from_slots(reverse, ep_size=problem.ep_size), plan.packing)


def result(
    problem: Problem,
    plan: Plan | None,
    *,
    planner: str = "contiguous+ffd",
    seed: int = 0,
    steps: tuple[tuple[float, float], ...] = ((0.01, 1.0),),
    bounds: tuple[tuple[float, float], ...] = (),
    runtime: float = 1.0,
) -> Result:
    """A result whose trace has the factors ``steps`` above the plan's first level at the given times."""
    score = None if plan is None else evaluate(problem, plan)
    levels = (None, None, None) if score is None else score.levels
    incumbents = () if score is None else tuple(
        Incumbent(time, (round(score.max_shard_work * factor), *score.levels[1:]), planner) for time, factor in steps
    )  # fmt: skip
    points = () if score is None else tuple(
        BoundPoint(time, LEVELS[0], round(score.max_shard_work * factor)) for time, factor in bounds
    )  # fmt: skip
    status = Status.NO_SOLUTION if plan is None else Status.FEASIBLE
    return Result(
        status=status,
        limit=Limit.TIME,
        scope="fixed-placement",
        levels=tuple(
            LevelResult(name, value, None, status, Limit.TIME, 0.0) for name, value in zip(LEVELS, levels, strict=True)
        ),
        plan=plan,
        placement=None if plan is None else plan.placement,
        score=score,
        trace=Trace(incumbents, points),
        planner=planner,
        seed=seed,
        runtime=runtime,
        reason="",
        num_rows=problem.num_rows,
        num_rows_bound=problem.rows.bound,
        num_threads=1,
        settings={"time_limit": 1.0, "iteration_limit": None},
    )


def texts(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.texts]


# ------------------------------------------------------------------------------------------------- one plan


def test_rank_load_shows_load_over_mean_of_both_plans_on_one_scale(problem: Problem, plan: Plan, other: Plan) -> None:
    ax = plot.rank_load(problem, result(problem, plan), other)
    meshes = ax.collections
    assert len(meshes) == 2
    for mesh, shown in zip(meshes, (plan, other), strict=True):
        window = evaluate(problem, shown).breakdown.rank_load.sum(axis=(0, 1))
        expected = (window / window.mean(axis=1, keepdims=True)).T
        np.testing.assert_allclose(np.asarray(mesh.get_array()).reshape(expected.shape), expected)
    assert meshes[0].get_clim() == meshes[1].get_clim()
    low, high = meshes[0].get_clim()
    every = np.concatenate([np.ravel(mesh.get_array()) for mesh in meshes])
    assert low <= every.min()
    assert high >= every.max()
    words = " ".join(texts(ax))
    assert "contiguous+ffd" in words
    assert "after" in words
    for shown in (plan, other):
        spread = 100 * (measure(problem, shown).global_cv or 0.0)
        assert f"CV {spread:.1f} %" in words or f"CV {spread:.2f} %" in words
    assert ax.get_xlabel() == "MoE layer"
    assert ax.get_ylabel() == "EP rank"
    assert ax.figure.get_figwidth() == plot.COLUMN_WIDTH


def test_rank_load_of_one_block(problem: Problem, plan: Plan) -> None:
    ax = plot.rank_load(problem, plan, block=(0, 1))
    load = evaluate(problem, plan).breakdown.rank_load[0, 1]
    expected = load.T * load.shape[1] / max(1, load[0].sum()) if load.any() else np.ones(load.T.shape)
    np.testing.assert_allclose(np.asarray(ax.collections[0].get_array()).reshape(expected.shape), expected)
    with pytest.raises(InvalidInputError, match=r"block \(row, shard\) is \(99, 0\)"):
        plot.rank_load(problem, plan, block=(99, 0))


def test_rank_load_draws_on_the_axes_it_is_given(problem: Problem, plan: Plan) -> None:
    _, ax = plt.subplots()
    assert plot.rank_load(problem, plan, ax=ax) is ax
    assert plot.shard_rows(problem, plan, ax=ax) is ax


def test_heat_map_and_stacks_are_readable_in_greyscale() -> None:
    def lightness(color: Any) -> float:
        return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114)))

    shades = mpl.colormaps["YlGnBu"](np.linspace(0, 1, 64))[:, :3] @ np.array([0.299, 0.587, 0.114])
    assert (np.diff(shades) < 0).all()
    assert lightness(plot.EXPERT_COLOR) - lightness(plot.ATTENTION_COLOR) > 0.3
    for before, after in zip(plot.COLORS, plot.COLORS[1:], strict=False):
        assert abs(lightness(before) - lightness(after)) > 0.08
    assert len(set(zip(map(str, plot.DASHES), plot.MARKERS, strict=True))) == len(plot.COLORS)


def test_refusals_name_the_result(problem: Problem, plan: Plan) -> None:
    elsewhere = tiny_problem(4, num_samples=7, num_shards=2, shard_size=2, num_layers=3, ep_size=2, experts_per_rank=2)
    with pytest.raises(InvalidInputError, match="before belongs to another problem"):
        plot.rank_load(elsewhere, plan)
    with pytest.raises(InvalidInputError, match="holds no plan"):
        plot.shard_rows(problem, result(problem, None))
    with pytest.raises(InvalidInputError, match="it must be a Result or a Plan"):
        plot.shard_rows(problem, {"x": 3})  # type: ignore[dict-item]
    with pytest.raises(InvalidInputError, match="no result or plan"):
        plot.shard_rows(problem, [])
    plain = tiny_problem(5, num_layers=0)
    with pytest.raises(InvalidInputError, match="no routing counts"):
        plot.rank_load(plain, plan)


def test_shard_rows_stacks_attention_and_expert_work_of_every_row(problem: Problem, plan: Plan, other: Plan) -> None:
    bound = evaluate(problem, plan).max_shard_work * 3 // 4
    ax = plot.shard_rows(problem, {"today": plan, "planned": other}, bound=bound)
    unit = problem.unit_denominator
    widths = np.array([patch.get_width() for patch in ax.patches]).reshape(2, problem.num_shards, problem.num_rows, 2)
    for shown, part in zip((plan, other), widths, strict=True):
        detail = evaluate(problem, shown).breakdown
        np.testing.assert_allclose(part[..., 0], detail.attention.T / unit)
        np.testing.assert_allclose(part[..., 1], detail.expert.T / unit)
    bold = [text.get_text() for text in ax.texts if text.get_weight() == "bold"]
    scores = [evaluate(problem, shown).max_shard_work for shown in (plan, other)]
    assert bold[0] == "today"
    assert any(text.startswith(f"{scores[0] / unit:,.4g}") for text in bold)
    assert any(text.startswith(f"{scores[1] / unit:,.4g}") for text in bold)
    if scores[1] != scores[0]:
        assert any("%" in text for text in bold)
    dashed = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert [float(line.get_xdata()[0]) for line in dashed] == [bound / unit]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["attention", "expert", "proven bound"]


# ------------------------------------------------------------------------------------------------ over time


def test_convergence_draws_the_gap_of_every_incumbent(problem: Problem, plan: Plan) -> None:
    run = result(problem, plan, steps=((0.01, 1.5), (0.1, 1.2), (0.4, 1.0)), runtime=2.0)
    value = evaluate(problem, plan).max_shard_work
    bound = value - value // 10
    ax = plot.convergence(run, bound=bound)
    (line,) = [line for line in ax.lines if len(line.get_xdata()) == 4]
    np.testing.assert_allclose(line.get_xdata(), [0.01, 0.1, 0.4, 2.0])
    levels = [incumbent.levels[0] for incumbent in run.trace.incumbents]
    np.testing.assert_allclose(line.get_ydata(), [100 * (level / bound - 1) for level in [*levels, levels[-1]]])
    assert texts(ax) == [f"{100 * (value / bound - 1):.{2 if value / bound < 1.1 else 1}f} %"]
    assert ax.get_xscale() == "log"
    assert "gap" in ax.get_ylabel()


def test_convergence_of_seeds_is_the_median_within_the_range(problem: Problem, plan: Plan) -> None:
    runs = [
        result(problem, plan, planner="lpt+annealing", seed=seed, steps=((0.1, 1.6), (1.0, 1.0 + 0.1 * seed)))
        for seed in range(3)
    ]
    ax = plot.convergence(runs)
    value = evaluate(problem, plan).max_shard_work / problem.unit_denominator
    assert ax.lines[0].get_ydata()[-1] == pytest.approx(1.1 * value, rel=0.01)
    (band,) = ax.collections
    vertices = band.get_paths()[0].vertices
    assert vertices[:, 1].min() == pytest.approx(value)
    assert vertices[:, 1].max() == pytest.approx(1.6 * value, rel=0.01)
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["lpt+annealing"]


def test_convergence_without_a_bound_draws_work_and_reported_bounds(problem: Problem, plan: Plan) -> None:
    run = result(problem, plan, planner="cpsat", bounds=((0.05, 0.5), (0.2, 0.4), (0.5, 0.9)))
    ax = plot.convergence({"exact": run})
    value = evaluate(problem, plan).max_shard_work / problem.unit_denominator
    below = ax.lines[1].get_ydata()
    np.testing.assert_allclose(below, np.array([0.5, 0.5, 0.9, 0.9]) * value, rtol=0.01)
    assert "J" in ax.get_ylabel()


def test_convergence_of_histories_is_that_of_their_results(problem: Problem, plan: Plan) -> None:
    run = result(problem, plan, planner="cpsat", steps=((0.1, 1.5), (0.4, 1.0)), bounds=((0.2, 0.5),))
    history = {
        "unit_denominator": problem.unit_denominator,
        "runtime": run.runtime,
        "incumbents": [{"time": point.time, "levels": list(point.levels)} for point in run.trace.incumbents],
        "bounds": [{"time": point.time, "level": point.level, "bound": point.bound} for point in run.trace.bounds],
    }
    ours, theirs = plot.convergence(run), plot.convergence({"cpsat": [history]})
    assert len(ours.lines) == len(theirs.lines) == 2
    for one, other in zip(ours.lines, theirs.lines, strict=True):
        np.testing.assert_array_equal(one.get_xydata(), other.get_xydata())
    with pytest.raises(InvalidInputError, match="different work units"):
        plot.convergence({"a": history, "b": history | {"unit_denominator": 1}})
    with pytest.raises(InvalidInputError, match="it must be a Result or a history"):
        plot.convergence({"a": 3})


def test_convergence_refuses_what_has_no_gap(problem: Problem, plan: Plan) -> None:
    with pytest.raises(InvalidInputError, match="bound is 0"):
        plot.convergence(result(problem, plan), bound=0)
    with pytest.raises(InvalidInputError, match="no result has an incumbent"):
        plot.convergence([result(problem, None)])
    with pytest.raises(InvalidInputError, match="below the proven bound"):
        plot.convergence(result(problem, plan), bound=evaluate(problem, plan).max_shard_work + 1)


# --------------------------------------------------------------------------------------------- modelled time


def test_gantt_shows_busy_and_waiting_time_of_every_device(problem: Problem, plan: Plan) -> None:
    trainer = simulation.Trainer(seconds_per_unit=0.5, fixed_seconds=0.2)
    timeline = simulation.simulate(problem, plan, trainer)
    ax = plot.gantt(timeline)
    wide = {
        color: sum(patch.get_width() for patch in ax.patches if to_rgb(patch.get_facecolor()[:3]) == to_rgb(color))
        for color in (plot.ATTENTION_COLOR, plot.EXPERT_COLOR)
    }
    assert wide[plot.ATTENTION_COLOR] == pytest.approx(timeline.attention_busy.sum())
    assert wide[plot.EXPERT_COLOR] == pytest.approx(timeline.expert_busy.sum())
    assert any(patch.get_hatch() == "////" and patch.get_width() == pytest.approx(0.2) for patch in ax.patches)
    assert ax.lines[0].get_xdata()[0] == pytest.approx(timeline.step_time)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["shard 0", "shard 1"]
    assert f"{100 * timeline.busy_share:.1f} % busy" in ax.get_xlabel()


def test_admission_marks_the_critical_path() -> None:
    schedule = simulation.Stages(placement=0.1, packing=2.0, auxiliary=1.5, actor=1.0, admission=0.2).schedule()
    ax = plot.admission(schedule)
    names = [label.get_text() for label in ax.get_yticklabels()]
    dark = {
        names[round(patch.get_y() + patch.get_height() / 2)]
        for patch in ax.patches
        if to_rgb(patch.get_facecolor()[:3]) == to_rgb(plot.COLORS[0])
    }
    assert dark == set(schedule.critical_path)
    assert ax.lines[-1].get_xdata()[0] == schedule.total == pytest.approx(2.7)


def test_sensitivity_marks_where_packing_begins_to_delay() -> None:
    stages = simulation.Stages(placement=0.1, packing=1.0, auxiliary=1.5, actor=1.0, admission=0.2)
    varied = simulation.sensitivity(stages, "packing", np.linspace(0, 4, 9))
    ax = plot.sensitivity(varied, measured=1.0)
    np.testing.assert_allclose(np.interp(varied.seconds, *ax.lines[0].get_data()), varied.total)
    # max(T_LPT, T_aux) + T_actor - T_LPT = 2.4 s
    assert ax.lines[1].get_xdata()[0] == pytest.approx(2.4)
    assert "exposed from 2.4 s" in texts(ax)
    with pytest.raises(InvalidInputError, match="vary packing, actor"):
        plot.sensitivity({"a": varied, "b": simulation.sensitivity(stages, "actor", [1.0])})


# -------------------------------------------------------------------------------------------------- studies


def test_performance_profile_draws_its_columns() -> None:
    profile = pd.DataFrame({"a": [0.5, 0.75, 1.0], "b": [0.5, 0.5, 0.5]}, index=[1.0, 1.01, 1.1])
    ax = plot.performance_profile(profile)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [50, 75, 100])
    np.testing.assert_allclose(ax.lines[1].get_xdata(), profile.index)
    with pytest.raises(InvalidInputError, match=r"\[0, 1\]"):
        plot.performance_profile(profile * 2)
    with pytest.raises(InvalidInputError, match="ascending"):
        plot.performance_profile(profile.iloc[::-1])
    with pytest.raises(InvalidInputError, match="empty"):
        plot.performance_profile(profile.iloc[:0])


def test_frontier_is_the_share_proven_with_its_interval() -> None:
    rows = pd.DataFrame(
        {
            "planner": ["cpsat"] * 4 + ["milp"] * 2,
            "num_samples": [8, 8, 12, 12, 8, 12],
            "status": ["optimal", "optimal", "optimal", "feasible", "feasible", "no-solution"],
        }
    )
    ax = plot.frontier(rows)
    shares = [list(container.lines[0].get_ydata()) for container in ax.containers]
    assert shares == [[100, 50], [0, 0]]
    upper = ax.containers[0].lines[2][0].get_segments()[1][:, 1]
    # Wilson interval of 1 in 2 at 95 %: 9.45 % to 90.55 %.
    np.testing.assert_allclose(upper, [9.453, 90.547], atol=1e-2)
    with pytest.raises(InvalidInputError, match="column 'status' is missing"):
        plot.frontier(rows.drop(columns="status"))


def test_forest_fills_what_excludes_zero() -> None:
    effects = pd.DataFrame(
        {"name": ["a", "b"], "effect": [-2.0, 0.1], "low": [-3.0, -0.5], "high": [-1.0, 0.7], "group": ["x", "x"]}
    )
    ax = plot.forest(effects, label="change of work")
    markers = [line for line in ax.lines if line.get_marker() == "o"]
    assert [line.get_markerfacecolor() == line.get_color() for line in markers] == [True, False]
    assert [float(line.get_xdata()[0]) for line in markers] == [-2.0, 0.1]
    assert texts(ax) == ["x", "−2.00 [−3.00, −1.00]", "+0.10 [−0.50, +0.70]"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.get_xlabel() == "change of work (%)"
    with pytest.raises(InvalidInputError, match="outside its interval"):
        plot.forest(effects.assign(low=1.0))


def test_pareto_front_holds_only_what_nothing_dominates() -> None:
    rows = pd.DataFrame(
        {
            "planner": ["a", "a", "b", "b", "c"],
            "time_limit": [1, 2, 1, 2, 1],
            "runtime": [1.0, 2.0, 1.5, 2.5, 0.1],
            "gap": [0.02, 0.01, 0.03, 0.015, 0.2],
        }
    )
    ax = plot.pareto(rows)
    front = next(line for line in ax.lines if line.get_label() == "non-dominated")
    np.testing.assert_allclose(front.get_xdata()[:-1], [0.1, 1.0, 2.0])
    np.testing.assert_allclose(front.get_ydata()[:-1], [20, 2, 1])
    np.testing.assert_allclose(ax.containers[0].lines[0].get_ydata(), [2, 1])
    with pytest.raises(InvalidInputError, match="no row has both"):
        plot.pareto(rows.assign(gap=np.nan))


# ------------------------------------------------------------------------------------------------- composed


def test_comparison_composes_the_runs(problem: Problem) -> None:
    runs = planning.compare(problem, ["contiguous+ffd", "round_robin_experts+ffd"], iteration_limit=100)
    figure = plot.comparison(problem, runs)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    legends = [legend.get_title().get_text() for ax in figure.axes if (legend := ax.get_legend()) is not None]
    assert "a  Routed tokens by EP rank and layer" in titles
    assert legends == ["b  Work of each shard, row after row", "c  Best plan so far"]
    assert figure.get_figwidth() == plot.PAGE_WIDTH
    (line,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert line.get_xdata()[0] == runs.bound.value / problem.unit_denominator
    figure.canvas.draw()


def test_comparison_without_routing_has_no_heat_map() -> None:
    plain = tiny_problem(3, num_samples=7, num_shards=2, shard_size=2, num_layers=0)
    plan = Plan.of(
        plain, Placement.contiguous(0, 0, ep_size=plain.ep_size), first_fit(plain, np.argsort(-plain.aligned_lengths))
    )
    bound = bounds.best_bound(plain, LEVELS[0])
    figure = plot.comparison(plain, planning.Runs(plain, (result(plain, plan),), bound))
    assert [ax.get_legend().get_title().get_text()[0] for ax in figure.axes] == ["a", "b"]


# --------------------------------------------------------------------------------------------------- export


def test_save_is_a_vector_with_the_same_bytes_each_time(tmp_path: Path, problem: Problem, plan: Plan) -> None:
    for name in ("one.svg", "two.svg", "one.pdf", "two.pdf"):
        plot.save(plot.shard_rows(problem, plan), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.pdf").read_bytes() == (tmp_path / "two.pdf").read_bytes()
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.pdf", "one.svg", "two.pdf", "two.svg"]
    with pytest.raises(InvalidInputError, match=r"\.pdf, \.svg, \.eps or \.png"):
        plot.save(plot.shard_rows(problem, plan), tmp_path / "figure.gif")


def test_style_ends_with_the_figure(problem: Problem, plan: Plan) -> None:
    before = dict(mpl.rcParams)
    plot.rank_load(problem, plan)
    assert dict(mpl.rcParams) == before
    with plot.style():
        assert mpl.rcParams["pdf.fonttype"] == 42


def test_repeated_planners_are_told_apart_by_seed(problem: Problem, plan: Plan) -> None:
    ax = plot.shard_rows(problem, [result(problem, plan, seed=1), result(problem, plan, seed=2)])
    headings = [text.get_text() for text in ax.texts if "ffd" in text.get_text()]
    assert headings == ["contiguous+ffd, seed 1", "contiguous+ffd, seed 2"]
