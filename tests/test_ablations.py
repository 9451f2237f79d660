"""The ablation studies are valid designs whose reports have a reference, and a report runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.study import Design

FOLDER = Path(__file__).resolve().parent.parent / "experiments" / "ablations"
STUDIES = sorted(FOLDER.glob("*.toml"))

TINY = """
schema = "routepack-study/1"
name = "packing-objective"
iteration_limit = 3000
[[problems]]
synthetic = true
seed = [1, 2, 3]
num_samples = 24
capacity = 8192
ep_size = 2
dp_size = 2
routing = { num_layers = 2, num_experts = 8, top_k = 2, num_blocks = 2 }
lengths = { mean = 1500.0, most = 6000 }
[[planners]]
spec = "contiguous+annealing"
name = "both"
[[planners]]
spec = "contiguous+ffd"
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ablation_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_is_valid_pairs_are_independent_and_the_reference_is_run(path: Path) -> None:
    design = Design.load(path)
    factor, reference, _ = load("report").REFERENCES[design.name]
    assert design.question.endswith("?")
    # One run a planner and drawn problem: several would not be independent.
    assert {job.seed for job in design.jobs} == {0}
    assert all(job.iteration_limit is not None for job in design.jobs if job.time_limit is None)
    labels = {job.label for job in design.jobs}
    if factor == "label":
        assert reference in labels
    elif factor == "case":
        assert any(case.label.startswith(f"{reference}, ") for case in design.cases)
    else:
        assert any("resampling=False" in job.planner for job in design.jobs)
    frozen = {"tiny": 20260, "flash-p8": 20261}
    assert not {case.recipe.get("seed") for case in design.cases} & set(frozen.values())


def test_the_readme_lists_every_study() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    for path in [*STUDIES, FOLDER / "rescoring.py"]:
        assert f"`{path.name}`" in text
    assert len(STUDIES) == 12


def test_report_prints_means_and_paired_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = tmp_path / "tiny.toml"
    study.write_text(TINY, encoding="utf-8")
    report = load("report")
    report.report(study, tmp_path / "results", 1, False)
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if line.startswith("| synthetic |")]
    assert len(rows) == 2
    assert all(line.split("|")[3].strip() == "3" for line in rows)
    difference = [line for line in shown.splitlines() if line.startswith("| contiguous+ffd")]
    assert len(difference) == 1
    assert float(difference[0].split("|")[3]) >= 0.0


def test_full_rescoring_keeps_the_exact_score_and_both_walks_improve() -> None:
    rescoring = load("rescoring")
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 40)
    counts = np.stack([[rng.multinomial(t, rng.dirichlet(np.ones(4))) for _ in range(3)] for t in lengths])
    problem = Problem.from_arrays(
        lengths, counts, top_k=1, capacity=256, ep_size=2, dp_size=4, num_shards=2, num_rows=3
    )
    placement = planning.place(problem, "contiguous").placement
    packing = planning.pack(problem, "ffd_dealt", iteration_limit=1).packing
    assert placement is not None
    assert packing is not None
    start = evaluate(problem, Plan.of(problem, placement, packing)).levels[0]
    weights = np.array([1.0, 1e-6])
    hot = rescoring.mean_rise(problem, placement, packing, 0)
    for kind in (rescoring.Rescoring, rescoring.Incremental):
        walker = kind(problem, placement, packing, 0)
        _, done = rescoring.anneal(walker, hot, weights, step=100, seconds=None, proposals=2000)
        assert done == 2000
        assert walker.best < start
    walker = rescoring.Rescoring(problem, placement, packing, 1)
    walker.walk(500, hot, weights)
    cells = Packing.from_cells(walker.state[0], dp_size=problem.dp_size)
    score = evaluate(problem, Plan.of(problem, placement, cells))
    assert tuple(walker.state[4][:2]) == score.levels[:2]
