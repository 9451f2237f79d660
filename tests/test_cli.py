from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from routepack_opt import cli
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem

runner = CliRunner()


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    rng = np.random.default_rng(2)
    lengths = rng.integers(5, 40, 24)
    counts = np.zeros((24, 3, 8), dtype=np.uint16)
    for i, t in enumerate(lengths):
        for layer in range(3):
            for _ in range(t):
                counts[i, layer, rng.choice(8, 2, replace=False, p=[0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05])] += 1
    path = tmp_path / "problem.npz"
    Problem.from_arrays(lengths, counts, capacity=128, ep_size=4, num_shards=1).save(path)
    return path


def run(*arguments: object) -> Result:
    return runner.invoke(cli.app, [str(argument) for argument in arguments])


def machine(*arguments: object) -> Any:
    ran = run(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    return json.loads(ran.stdout)


def test_solve_then_evaluate(problem: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    solved = machine(
        "solve",
        problem,
        "--planner",
        "lpt+annealing",
        "--iteration-limit",
        5000,
        "--seed",
        3,
        "--threads",
        1,
        "--out",
        plan,
    )
    assert solved["status"] == "feasible"
    assert solved["scope"] == "fixed-placement"
    assert solved["limit"] == "iterations"
    assert solved["seed"] == 3
    assert solved["planner"] == "lpt+annealing"
    assert [level["name"] for level in solved["levels"]] == ["max_shard_work", "total_work", "max_row_work"]
    assert solved["num_rows"] >= solved["num_rows_bound"] >= 1
    evaluated = machine("evaluate", problem, plan)
    assert evaluated["feasible"]
    assert evaluated["violations"] == []
    assert evaluated["score"] == solved["score"]
    assert all(isinstance(value, int) for value in evaluated["score"].values())


def test_same_seed_same_bytes(problem: Path, tmp_path: Path) -> None:
    plans = [tmp_path / f"{threads}.json" for threads in (1, 2)]
    for threads, plan in zip((1, 2), plans, strict=True):
        machine("solve", problem, "--iteration-limit", 20000, "--threads", threads, "--out", plan)
    assert plans[0].read_bytes() == plans[1].read_bytes()


def test_people_get_tables(problem: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    ran = run("solve", problem, "--planner", "lpt+ffd", "--out", plan)
    assert ran.exit_code == 0
    assert "max_shard_work" in ran.stdout
    assert "plan written" in ran.stdout
    assert "Score(" in run("evaluate", problem, plan).stdout
    assert "any-placement" in run("bound", problem, "--plan", plan).stdout
    assert "annealing" in run("planners").stdout


def test_infeasible_plans_are_evaluated_not_refused(problem: Path, tmp_path: Path) -> None:
    found = Problem.load(problem)
    plan = Plan.from_arrays(found, np.zeros(24, int), np.zeros(24, int))
    path = tmp_path / "plan.json"
    plan.save(path)
    evaluated = machine("evaluate", problem, path)
    assert not evaluated["feasible"]
    assert evaluated["score"] is None
    assert "above the capacity 128" in evaluated["violations"][0]
    assert "infeasible" in run("evaluate", problem, path).stdout
    value = plan.to_dict()
    value["slot_of_expert"][1] = [0] * 8
    path.write_text(json.dumps(value))
    assert "permutation" in machine("evaluate", problem, path)["violations"][0]


def test_compare_and_its_figure(problem: Path, tmp_path: Path) -> None:
    figure = tmp_path / "f.png"
    compared = machine(
        "compare", problem, "-p", "contiguous+ffd", "-p", "lpt+ffd", "--iteration-limit", 1000, "--figure", figure
    )
    assert [row["planner"] for row in compared["runs"]] == ["contiguous+ffd", "lpt+ffd"]
    assert all(row["gap"] >= 0 for row in compared["runs"])
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert run("compare", problem, "-p", "lpt+ffd", "--seeds", 2).exit_code == 0


def test_plot_of_plans(problem: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    machine("solve", problem, "-p", "lpt+ffd", "--out", plan)
    for plans in ([plan], [plan, plan]):
        out = tmp_path / "g.svg"
        assert machine("plot", problem, *plans, "--out", out)["out"] == str(out)
        assert "<svg" in out.read_text()
    assert run("plot", problem, plan, plan, plan, "--out", tmp_path / "h.svg").exit_code == 2


def test_generate_lists_and_writes(tmp_path: Path) -> None:
    families = machine("generate", "--list")["families"]
    assert families
    assert run("generate", "no-such-family", "--out", tmp_path / "x.npz").exit_code == 2
    assert run("generate").exit_code == 2


def test_count_from_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    ids = np.stack([np.stack([rng.choice(8, 2, replace=False) for _ in range(3)]) for _ in range(50)]).astype(np.int16)
    np.savez(tmp_path / "ids.npz", ids=ids, offsets=np.array([0, 20, 50]))
    counted = machine(
        "count", tmp_path / "ids.npz", "--num-experts", 8, "--capacity", 64, "--ep-size", 4, "--out", tmp_path / "p.npz"
    )
    made = Problem.load(tmp_path / "p.npz")
    assert made.fingerprint == counted["problem"]
    assert made.batch.routed_tokens.tolist() == [20, 30]
    for layer in range(3):
        assert np.array_equal(made.counts[0, layer], np.bincount(ids[:20, layer].ravel(), minlength=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve", "no.npz"], "cannot be read"),
        (["solve", "{problem}", "-p", "lpt+anealing"], "did you mean 'annealing'"),
        (["solve", "{problem}", "--time-limit", "-1"], "time_limit is -1"),
        (["solve", "{problem}", "-p", "lpt+ffd", "--out", "{folder}/none/plan.json"], "does not exist"),
        (["compare", "{problem}", "--figure", "x.bmp"], "must end in"),
        (["compare", "{problem}", "--seeds", "0"], "--seeds is 0"),
        (["count", "x.npz", "--out", "y.npz"], "3 faults"),
        (["evaluate", "{problem}", "no.json"], "cannot read"),
        (["export", "no.json", "--problem", "{problem}", "--to", "verl", "--out", "x"], "cannot read"),
    ],
)
def test_errors_are_clear_and_exit_with_2(problem: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    filled = [text.format(problem=problem, folder=tmp_path) for text in arguments]
    ran = run(*filled)
    assert ran.exit_code == 2
    assert message in " ".join(ran.stderr.split())
    as_json = run(*filled, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout)["faults"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solve", "trace", "--bogus"], "--bogus"),
        (["solve", "trace", "-z"], "-z"),
        (["nosuch"], "nosuch"),
        (["solve"], "problem"),
        (["solve", "trace", "--seed", "x"], "--seed"),
        (["solve", "trace", "too", "many"], "too many"),
        (["export", "plan.json", "--problem", "trace"], "--to"),
        (["study", "nosuch"], "nosuch"),
        ([], "--json"),
    ],
)
def test_a_wrong_command_line_is_json_where_json_is_asked_for(arguments: list[str], message: str) -> None:
    ran = run("--json", *arguments) if not arguments else run(*arguments, "--json")
    assert ran.exit_code == 2
    error = json.loads(ran.stdout)
    assert set(error) == {"error", "faults"}
    assert message in error["error"]
    assert error["faults"] == [error["error"]]
    assert not ran.stderr
    if arguments:
        people = run(*arguments)
        assert people.exit_code == 2
        assert not people.stdout
        assert "Usage:" in people.stderr


def test_json_after_two_dashes_is_an_argument() -> None:
    ran = run("nosuch", "--", "--json")
    assert ran.exit_code == 2
    assert not ran.stdout
    assert "nosuch" in ran.stderr


def test_a_trailing_option_without_its_value() -> None:
    ran = run("solve", "trace", "--json", "--seed")
    assert ran.exit_code == 2
    assert "--seed" in json.loads(ran.stdout)["error"]


def test_an_input_is_never_written_over(problem: Path, tmp_path: Path) -> None:
    plan, ids = tmp_path / "plan.json", tmp_path / "ids.npz"
    machine("solve", problem, "-p", "lpt+ffd", "--out", plan)
    np.savez(ids, ids=np.array([[[0, 1]], [[2, 3]]]), offsets=np.array([0, 2]))
    (tmp_path / "link.npz").symlink_to(problem)
    before = {path: path.read_bytes() for path in (problem, plan, ids)}
    for arguments in (
        ["solve", problem, "-p", "lpt+ffd", "--out", problem],
        ["solve", problem, "-p", "lpt+ffd", "--out", tmp_path / "link.npz"],
        ["export", plan, "--problem", problem, "--to", "verl", "--out", problem],
        ["export", plan, "--problem", problem, "--to", "verl", "--out", plan],
        ["count", ids, "--out", ids, "--num-experts", 4, "--capacity", 8, "--ep-size", 2],
    ):
        ran = run(*arguments)
        assert ran.exit_code == 2
        assert "is what is read" in " ".join(ran.stderr.split())
    assert before == {path: path.read_bytes() for path in before}
    # A plan may replace the one it started from.
    machine("solve", problem, "--warm-start", plan, "--iteration-limit", 100, "--out", plan)


def test_version_and_help() -> None:
    from routepack_opt import __version__

    assert run("--version").stdout.strip() == __version__
    assert "compare" in run("--help").stdout
