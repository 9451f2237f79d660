"""Arithmetic of the modelled paper tables: gains, fits, baselines kept apart, settings not mixed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from routepack_opt import files


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "experiments" / "paper_tables.py"
    spec = importlib.util.spec_from_file_location("paper_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up(tables: ModuleType, **step_times: float) -> dict[str, list[dict[str, Any]]]:
    """Two equal steps of both presets with given step times; planners without one found nothing."""
    names = {planner: planner.replace("+", "_") for planner in tables.PLANNERS}
    step = {
        planner: (
            {"step_time": step_times[name], "metrics": {"global_cv": 0.1, "attention_work": 2.0, "ep_peak": 4}}
            | {"stages": {"placement": 0.1, "packing": 0.9}}
            if name in step_times
            else {"status": "no-solution", "reason": "cannot"}
        )
        for planner, name in names.items()
    }
    for record in step.values():
        if "metrics" in record:
            record["metrics"]["joint_bottleneck"] = record["step_time"]  # type: ignore[index]
    return {preset: [step, step] for preset in ("tiny", "flash")}


def test_gain_is_of_throughput_and_diluted_by_fixed_time(tables: ModuleType) -> None:
    one, two = np.array([2.0]), np.array([1.0])
    assert tables.gain(one, two, one, 0.0) == pytest.approx([1.0])
    # Half of the reference step is fixed: 2 + 2 against 1 + 2 seconds.
    assert tables.gain(one, two, one, 0.5) == pytest.approx([1 / 3])


def test_gains_of_one_baseline_multiply_and_baselines_are_not_mixed(tables: ModuleType) -> None:
    runs = made_up(
        tables,
        contiguous_ffd=12.0,
        lpt_ffd=10.0,
        contiguous_annealing=10.5,
        lpt_annealing=9.0,
        **{f"contiguous_{tables.FULLEST_FIRST}": 11.0},
    )
    rows = {(r["packing baseline"], r["preset"], r["effect"]): r for r in tables.throughput_table(runs)}
    found = {effect: rows["ffd", "tiny", effect]["modelled %"] for effect in ("rerouting", "packing on top", "both")}
    assert found == pytest.approx({"rerouting": 20.0, "packing on top": 100 / 9, "both": 100 / 3})
    assert (1 + found["rerouting"] / 100) * (1 + found["packing on top"] / 100) == pytest.approx(
        1 + found["both"] / 100
    )
    assert rows[tables.FULLEST_FIRST, "tiny", "both"]["modelled %"] == pytest.approx(200 / 9)
    # LPT with the other baseline found nothing: no figure, not a figure of the other baseline.
    assert "modelled %" not in rows[tables.FULLEST_FIRST, "tiny", "rerouting"]
    assert rows[tables.FULLEST_FIRST, "tiny", "rerouting"]["steps"] == 0


def test_fixed_share_is_fitted_on_one_preset_and_says_when_it_cannot_be_met(tables: ModuleType) -> None:
    runs = made_up(tables, contiguous_ffd=12.0, lpt_ffd=11.0, lpt_annealing=10.0)
    rows = tables.fixed_share_table(runs)
    tiny = next(r for r in rows if r["fitted on"] == "tiny" and r["shown for"] == "tiny (fitted)")
    assert tiny["met"]
    assert tiny["both %"] == pytest.approx(8.85, abs=0.01)
    # (12 + F) / (10 + F) = 1.0885 and F = 12 f / (1 - f).
    fixed = (12 - 1.0885 * 10) / 0.0885
    assert tiny["fixed share (fitted)"] == pytest.approx(fixed / (12 + fixed), abs=1e-4)
    short = made_up(tables, contiguous_ffd=12.0, lpt_ffd=11.9, lpt_annealing=11.8)
    row = tables.fixed_share_table(short)[0]
    assert row["fixed share (fitted)"] == 0.0
    assert not row["met"]


def test_decomposition_compares_within_one_block(tables: ModuleType) -> None:
    runs = made_up(tables, lpt_ffd=10.0, lpt_length_annealing=9.5, lpt_annealing=9.0, contiguous_ffd=12.0)
    rows = {
        (r["length-only baseline"], r["figure"]): r.get("modelled %")
        for r in tables.decomposition_table(runs)
        if r["preset"] == "tiny"
    }
    assert rows["ffd", "joint bottleneck"] == pytest.approx(-10.0)
    assert rows["length_annealing", "joint bottleneck"] == pytest.approx(-100 * 0.5 / 9.5)
    assert rows["ffd", "EP peaks"] == 0.0
    assert rows[tables.FULLEST_FIRST, "EP peaks"] is None


def test_runs_of_other_settings_are_refused(tables: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "tiny-low-skew1" / "step-000.json"
    path.parent.mkdir(parents=True)
    settings = {"noise": "low", "skew": 1.0, "iteration_limit": 5}
    record = {"step_time": 1.0, "parameters": tables.parameters("lpt+ffd")}
    files.write_json(path, {"schema": tables.SCHEMA, "settings": settings, "planners": {"lpt+ffd": record}})
    found = tables.collect(tmp_path, ["tiny"], "low", 1, 1.0, ["lpt+ffd"], {"iteration_limit": 5})
    assert found == {"tiny": [{"lpt+ffd": record}]}
    with pytest.raises(SystemExit, match="choose another --out"):
        tables.collect(tmp_path, ["tiny"], "low", 1, 1.0, ["lpt+ffd"], {"iteration_limit": 6})


def test_popularity_skew_moves_the_imbalance_of_a_contiguous_placement(tables: ModuleType) -> None:
    def imbalance(skew: float) -> float:
        problem = tables.draw("tiny", "low", 0, skew)
        by_rank = problem.batch.expert_load().reshape(problem.num_layers, problem.ep_size, -1).sum(axis=2)
        return float((by_rank.max(axis=1) / by_rank.mean(axis=1)).mean())

    assert imbalance(2.0) > imbalance(1.0) > 1.0
