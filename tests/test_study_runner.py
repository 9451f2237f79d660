"""Every job runs once; a kill loses nothing that was finished; failures are rows; backends agree."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from routepack_opt import planning, registry, study
from routepack_opt.errors import InvalidInputError, MissingExtraError
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.study import runner
from routepack_opt.study.table import MEASURED
from routepack_opt.testing import tiny_problem

PLANNERS = ["contiguous+ffd", "round_robin_experts+randomized_best_fit", "contiguous+annealing"]


def write_design(
    folder: Path, planners: list[str], *, seeds: int = 2, limits: str = "iteration_limit = 100", problems: int = 2
) -> Path:
    for k in range(problems):
        problem = tiny_problem(k, num_samples=6, num_shards=2, shard_size=1, num_layers=2, ep_size=2)
        problem.save(folder / f"p{k}.npz")
    path = folder / "design.toml"
    path.write_text(
        f"""schema = "routepack-study/1"
name = "small"
question = "Does every run come back?"
seeds = {seeds}
{limits}
planners = {json.dumps(planners)}
[[problems]]
file = {json.dumps([f"p{k}.npz" for k in range(problems)])}
""",
        encoding="utf-8",
    )
    return path


def comparable(table: study.StudyTable) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in table]


@pytest.fixture
def saboteur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Third-party packers, found by entry points in every process: one kills its process, one raises."""
    home = tmp_path / "third_party"
    info = home / "saboteur-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saboteur\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[routepack_opt.solvers]\nkiller = saboteur:Killer\nraiser = saboteur:Raiser\n"
    )
    (home / "saboteur.py").write_text(
        textwrap.dedent(
            '''
            import dataclasses, os, signal
            from pathlib import Path
            from typing import ClassVar
            from routepack_opt.solver import Solver
            from routepack_opt.solvers.seeds import Ffd

            @dataclasses.dataclass(frozen=True)
            class Killer(Solver):
                """Kill this process the first time (or always), then pack."""
                name: ClassVar[str] = "killer"
                marker: str = ""
                always: bool = False

                def pack(self, problem, placement, run):
                    if self.always or not Path(self.marker).exists():
                        Path(self.marker).touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    return Ffd().pack(problem, placement, run)

            @dataclasses.dataclass(frozen=True)
            class Raiser(Solver):
                """Raise unless the marker exists."""
                name: ClassVar[str] = "raiser"
                marker: str = ""

                def pack(self, problem, placement, run):
                    if not Path(self.marker).exists():
                        raise RuntimeError("no marker")
                    return Ffd().pack(problem, placement, run)
            '''
        )
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(home), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(home))
    registry._entry_points.cache_clear()
    yield home
    registry._entry_points.cache_clear()
    sys.modules.pop("saboteur", None)


def test_rows_hold_what_the_run_was_and_found(tmp_path: Path) -> None:
    path = write_design(tmp_path, PLANNERS)
    table = study.run(path, progress=False)
    assert len(table) == 2 * 3 * 2
    assert table.folder == tmp_path / "design.results"
    row = table.rows[4]
    problem = Problem.load(tmp_path / "p0.npz")
    again = planning.solve(problem, "contiguous+annealing", iteration_limit=100, seed=0, num_threads=1)
    assert again.score is not None
    assert (row["problem"], row["planner"], row["seed"]) == ("p0", "contiguous+annealing", 0)
    assert row["problem_fingerprint"] == problem.fingerprint
    assert [row[f"{name}_units"] for name in ("max_shard_work", "total_work", "max_row_work")] == list(
        again.score.levels
    )
    assert row["max_shard_work"] == again.score.values[0]
    assert row["gap"] == pytest.approx(row["max_shard_work_units"] / row["max_shard_work_bound_units"] - 1)
    assert row["parameters"]["packer"]["num_chains"] >= 1
    assert row["versions"]["numpy"]
    assert row["machine"]["processors"] >= 1
    assert {level["name"] for level in row["levels"]} == {"max_shard_work", "total_work", "max_row_work"}
    history = table.history(row)
    assert history["incumbents"][-1]["levels"] == list(again.score.levels)
    frame = table.to_frame()
    assert frame["packer.num_chains"].notna().sum() == 4
    assert str(frame["max_shard_work_units"].dtype) == "Int64"
    assert len(study.load(table.folder)) == 12


def test_finished_rows_are_not_run_again_and_new_ones_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_design(tmp_path, PLANNERS[:1])
    first = study.run(path, progress=False)
    ran: list[str] = []
    real = runner.execute

    def counted(job: Any, *, keep_plan: bool = False) -> dict[str, Any]:
        ran.append(job.planner)
        return real(job, keep_plan=keep_plan)

    monkeypatch.setattr(runner, "execute", counted)
    assert [dict(row) for row in study.run(path, progress=False)] == [dict(row) for row in first]
    assert ran == []
    write_design(tmp_path, PLANNERS[:2])
    table = study.run(path, progress=False)
    assert len(table) == 8
    assert set(ran) == {PLANNERS[1]}
    assert len(ran) == 4


def test_plans_are_kept_on_request(tmp_path: Path) -> None:
    path = write_design(tmp_path, PLANNERS[:1], limits="iteration_limit = 10\nkeep_plans = true")
    table = study.run(path, progress=False)
    problem = Problem.load(tmp_path / "p0.npz")
    plan = Plan.load(table.folder / table.rows[0]["plan"], problem)
    assert evaluate(problem, plan).max_shard_work == table.rows[0]["max_shard_work_units"]


def test_stale_knowledge_is_scored_on_the_truth(tmp_path: Path) -> None:
    path = write_design(tmp_path, ["lpt+ffd"], seeds=1)
    path.write_text(path.read_text() + "missing_share = 0.5\n")
    row = study.run(path, progress=False).rows[0]
    problem = Problem.load(tmp_path / "p0.npz")
    assert row["problem_fingerprint"] == problem.fingerprint
    assert row["status"] == "feasible"
    assert row["levels"] == []
    assert row["max_shard_work_units"] >= row["max_shard_work_bound_units"]


def test_errors_are_rows_raised_at_the_end_and_tried_again(tmp_path: Path, saboteur: Path) -> None:
    marker = tmp_path / "marker"
    path = write_design(tmp_path, ["contiguous+ffd", f"contiguous+raiser(marker='{marker}')"], seeds=1)
    with pytest.raises(runner.StudyError, match=r"2 of 4 runs failed.*RuntimeError: no marker") as caught:
        study.run(path, progress=False)
    assert [row["status"] for row in caught.value.table] == ["feasible", "error", "feasible", "error"]
    assert "no marker" in caught.value.table.rows[1]["traceback"]
    table = study.run(path, progress=False, keep_going=True)
    assert len(table.failed) == 2
    assert table.summary()["failed"].tolist() == [0, 1, 0, 1]
    marker.touch()
    assert not study.run(path, progress=False).failed


def test_results_of_another_version_or_study_are_not_touched(tmp_path: Path) -> None:
    path = write_design(tmp_path, PLANNERS[:1])
    out = tmp_path / "out"
    out.mkdir()
    (out / "study.json").write_text('{"schema": "routepack-study-results/0", "name": "small"}')
    before = {file: file.read_bytes() for file in out.rglob("*")}
    with pytest.raises(InvalidInputError, match="nothing in it is overwritten"):
        study.run(path, out=out, progress=False)
    assert {file: file.read_bytes() for file in out.rglob("*")} == before
    (out / "study.json").write_text('{"schema": "routepack-study-results/1", "name": "large"}')
    with pytest.raises(InvalidInputError, match="holds the study 'large', not 'small'"):
        study.run(path, out=out, progress=False)
    (out / "study.json").unlink()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInputError, match="is not empty and holds no study"):
        study.run(path, out=out, progress=False)


def test_arguments_are_checked_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_design(tmp_path, PLANNERS[:1])
    with pytest.raises(InvalidInputError, match="did you mean 'dask'"):
        study.run(path, backend="dusk")
    with pytest.raises(InvalidInputError, match="num_jobs is 0"):
        study.run(path, num_jobs=0)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else real(name, *rest))
    with pytest.raises(MissingExtraError, match=r"routepack-opt\[ray\]"):
        study.run(path, backend="ray")
    assert not (tmp_path / "design.results").exists()


def test_a_damaged_row_is_named(tmp_path: Path) -> None:
    path = write_design(tmp_path, PLANNERS[:1])
    table = study.run(path, progress=False)
    damaged = table.folder / "rows" / f"{table.rows[0]['key']}.json"
    damaged.write_text(damaged.read_text()[:50])
    with pytest.raises(InvalidInputError, match=damaged.name):
        study.run(path, progress=False)


def test_an_interrupted_run_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_design(tmp_path, PLANNERS[:1])
    real = planning.solve

    def interrupted(*args: Any, **options: Any) -> Any:
        return real(*args, **options, stop=lambda: True)

    monkeypatch.setattr(planning, "solve", interrupted)
    # FFD finishes in spite of the flag; annealing stops at once and says so.
    write_design(tmp_path, ["contiguous+annealing"])
    with pytest.raises(KeyboardInterrupt):
        study.run(path, progress=False)
    assert list((tmp_path / "design.results" / "rows").glob("*.json")) == []


def test_killed_study_resumes_without_running_finished_rows(tmp_path: Path) -> None:
    path = write_design(tmp_path, ["contiguous+annealing"], seeds=3, limits="time_limit = 0.4")
    code = f"from routepack_opt import study; study.run({str(path)!r}, progress=False)"
    rows = tmp_path / "design.results" / "rows"
    search = os.pathsep.join(sys.path)
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": search})
    deadline = time.monotonic() + 120
    while len(list(rows.glob("[!.]*.json"))) < 2 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {file: file.read_bytes() for file in rows.glob("[!.]*.json")}
    assert 2 <= len(finished) < 6
    for content in finished.values():
        assert json.loads(content)["status"] == "feasible"
    (rows / ".half-written.json").touch()  # what a kill in the middle of a write leaves behind
    table = study.run(path, progress=False)
    assert len(table) == 6
    assert not table.failed
    assert {file: file.read_bytes() for file in finished} == finished


def test_loky_gives_the_rows_of_this_process_and_survives_a_killed_worker(tmp_path: Path, saboteur: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    planners = ["contiguous+ffd", "contiguous+annealing", f"contiguous+killer(marker='{marker}')"]
    path = write_design(tmp_path, planners)
    alone = study.run(path, out=tmp_path / "alone", progress=False)
    marker.unlink()
    together = study.run(path, out=tmp_path / "together", num_jobs=2, progress=False)
    assert marker.exists(), "no worker was killed"
    assert comparable(together) == comparable(alone)


def test_a_run_that_always_kills_its_worker_says_so(tmp_path: Path, saboteur: Path) -> None:
    planners = ["contiguous+ffd", f"contiguous+killer(marker='{tmp_path / 'm'}', always=True)"]
    path = write_design(tmp_path, planners, seeds=1, problems=1)
    table = study.run(path, num_jobs=2, progress=False, keep_going=True)
    assert [row["status"] for row in table] == ["feasible", "lost"]
    assert "TerminatedWorkerError" in table.rows[1]["error"]


@pytest.mark.parametrize("backend", ["dask", "ray"])
def test_local_clusters_give_the_rows_of_loky(tmp_path: Path, saboteur: Path, backend: str) -> None:
    """A worker of the cluster is killed on the way; every row still comes."""
    pytest.importorskip("distributed" if backend == "dask" else "ray", reason=f"the extra {backend!r} is not installed")
    marker = tmp_path / "marker"
    marker.touch()
    path = write_design(tmp_path, ["contiguous+ffd", f"contiguous+killer(marker='{marker}')"])
    expected = study.run(path, out=tmp_path / "loky", progress=False)
    marker.unlink()
    out = tmp_path / backend
    script = tmp_path / "cluster.py"
    script.write_text(
        f"""from routepack_opt import study
if __name__ == "__main__":
    study.run({str(path)!r}, out={str(out)!r}, backend={backend!r}, num_jobs=2, progress=False)
"""
    )
    search = os.pathsep.join([str(saboteur), *sys.path])
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert marker.exists(), "no worker was killed"
    table = study.run(path, out=out, progress=False)
    assert comparable(table) == comparable(expected)
