"""Tables say what the rows say, in pandas, Markdown, LaTeX and CSV."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from routepack_opt.errors import InvalidInputError
from routepack_opt.study.table import RESULTS_SCHEMA, StudyTable, latex, load, markdown


def row(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "key": "k",
        "study": "s",
        "problem": "p",
        "recipe": {"family": "tiny-low", "routing": {"sample_sd": 0.5}},
        "planner": "contiguous+ffd",
        "label": "today",
        "parameters": {"placer": {"name": "contiguous"}, "packer": {"name": "ffd"}},
        "seed": 0,
        "time_limit": None,
        "iteration_limit": 10,
        "status": "feasible",
        "error": None,
        "max_shard_work": 2.5,
        "max_shard_work_units": 4611686018427387903,
        "gap": 0.05,
        "runtime": 0.25,
        "stages": {"packing": 0.1},
        "metrics": {"global_cv": 0.2, "row_cv": 0.3},
        "versions": {"numpy": "2"},
        "machine": {"node": "a"},
        "history": None,
    }
    return base | changes


def failed(**changes: Any) -> dict[str, Any]:
    kept = {name: value for name, value in row().items() if name not in ("metrics", "gap", "max_shard_work", "runtime")}
    return kept | {"status": "error", "error": "ValueError: no", "max_shard_work_units": None} | changes


def table(*rows: dict[str, Any], folder: Path = Path()) -> StudyTable:
    return StudyTable("s", "why?", folder, rows)


def test_frame_flattens_and_keeps_exact_integers() -> None:
    frame = table(row(), failed(seed=1)).to_frame()
    assert frame["max_shard_work_units"].iloc[0] == 4611686018427387903
    assert frame["max_shard_work_units"].isna().tolist() == [False, True]
    for name, value in {
        "problem.family": "tiny-low",
        "problem.routing.sample_sd": 0.5,
        "packer.name": "ffd",
        "stage.packing": 0.1,
        "version.numpy": "2",
        "machine.node": "a",
        "row_cv": 0.3,
    }.items():
        assert frame[name].iloc[0] == value


def test_summary_is_the_median_over_seeds_without_failed_runs() -> None:
    rows = [row(seed=k, gap=gap, max_shard_work=work) for k, (gap, work) in enumerate([(0.1, 3.0), (0.2, 4.0)])]
    summary = table(*rows, failed(seed=2)).summary()
    assert len(summary) == 1
    (line,) = summary.to_dict("records")
    assert (line["problem"], line["planner"], line["runs"], line["failed"]) == ("p", "today", 3, 1)
    assert line["shard work"] == 3.5
    assert line["gap %"] == pytest.approx(15.0)
    assert line["worst %"] == pytest.approx(20.0)
    assert "why?" in repr(table(*rows))
    assert "failed" not in table(*rows).formatted()
    assert table(*rows, failed(seed=2)).formatted()["failed"].tolist() == ["1"]
    only_failed = table(failed()).summary().to_dict("records")[0]
    assert pd.isna(only_failed["gap %"])
    assert pd.isna(only_failed["optimal %"])


def test_limits_stand_in_the_summary_where_they_differ() -> None:
    summary = table(row(), row(iteration_limit=20)).summary()
    assert summary["iteration_limit"].tolist() == [10, 20]
    assert "iteration_limit" not in table(row(), row(seed=1)).summary()


def test_markdown_and_latex_write_the_same_cells_escaped() -> None:
    frame = pd.DataFrame({"who|which": ["a_b", "c&d"], "gap %": [-1.25, None], "n": [1, 20000]})
    assert markdown(frame).splitlines() == [
        "| who\\|which | gap % | n |",
        "|---|---:|---:|",
        "| a_b | -1.25 | 1 |",
        "| c&d | - | 20,000 |",
    ]
    text = latex(frame, caption="50 % of it", label="tab:x", bold=["n"])
    assert text.splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{50 \% of it}",
        r"\label{tab:x}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"who|which & gap \% & n \\",
        r"\midrule",
        r"a\_b & $-$1.25 & \textbf{1} \\",
        r"c\&d & - & 20,000 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    with pytest.raises(InvalidInputError, match="did you mean 'gap %'"):
        latex(frame, bold=["gap"])
    for write in (markdown, latex):
        with pytest.raises(InvalidInputError, match="no column"):
            write(pd.DataFrame())


def test_csv_is_the_tidy_table(tmp_path: Path) -> None:
    table(row(), row(seed=1)).to_csv(tmp_path / "rows.csv")
    again = pd.read_csv(tmp_path / "rows.csv")
    assert again["seed"].tolist() == [0, 1]
    assert again["max_shard_work_units"].tolist() == [4611686018427387903] * 2


def test_load_refuses_what_is_no_study(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"study\.json is missing"):
        load(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "study.json").write_text(json.dumps({"schema": "routepack-study-results/9", "name": "s"}))
    with pytest.raises(InvalidInputError, match="routepack-study-results/9"):
        load(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps({"schema": RESULTS_SCHEMA, "name": "s", "question": "q"}))
    for k in (1, 0):
        (tmp_path / "rows" / f"k{k}.json").write_text(json.dumps(row(seed=k)))
    found = load(tmp_path)
    assert [one["seed"] for one in found] == [0, 1]
    assert (found.name, found.question) == ("s", "q")
    with pytest.raises(InvalidInputError, match="has no history"):
        found.history(found.rows[0])
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["planner"] == "contiguous+ffd"
