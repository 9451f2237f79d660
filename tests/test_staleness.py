"""What the staleness experiment lets a planner believe, and that a step of it runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from routepack_opt import files
from routepack_opt.problem import Problem


@pytest.fixture(scope="module")
def staleness() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "experiments" / "staleness.py"
    spec = importlib.util.spec_from_file_location("staleness", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def routed_problem() -> Problem:
    rng = np.random.default_rng(1)
    lengths = rng.integers(5, 50, 12)
    counts = np.zeros((12, 2, 4), dtype=np.int64)
    for i, length in enumerate(lengths):
        for layer in range(2):
            counts[i, layer] = rng.multivariate_hypergeometric([length] * 4, 2 * length)
    return Problem.from_arrays(lengths, counts, top_k=2, capacity=128, ep_size=2, dp_size=2)


def test_missing_samples_are_believed_to_route_like_the_rest_and_keep_their_totals(staleness: ModuleType) -> None:
    problem = routed_problem()
    missing = np.arange(12) % 3 == 0
    prior = staleness.visits(problem, ~missing)
    assert prior.sum(axis=1) == pytest.approx([2.0, 2.0])
    believed = staleness.believed_counts(problem, missing, prior)
    assert (believed[~missing] == problem.counts[~missing]).all()
    assert (believed.sum(axis=2) == 2 * problem.lengths[:, None]).all()
    assert (believed <= problem.lengths[:, None, None]).all()
    off = np.abs(believed[missing] - prior * problem.lengths[missing][:, None, None])
    assert off.max() <= 1


def test_belief_never_sends_a_token_to_an_expert_twice(staleness: ModuleType) -> None:
    problem = routed_problem()
    # Every token visits expert 0; the rest spreads: floors leave remainders that expert 0 cannot take.
    prior = np.array([[1.0, 0.34, 0.33, 0.33]] * 2)
    believed = staleness.believed_counts(problem, np.ones(12, dtype=bool), prior)
    assert (believed[:, :, 0] == problem.lengths[:, None]).all()
    assert (believed.sum(axis=2) == 2 * problem.lengths[:, None]).all()


def test_an_old_placement_loses_where_heat_rotates(staleness: ModuleType) -> None:
    rows = staleness.run_step("rotating", 4, 20_000)
    fresh = rows["fresh"]["step_time"]
    assert rows["placement lag 1"]["step_time"] > 1.1 * fresh
    assert rows["contiguous"]["step_time"] > 1.5 * fresh
    assert rows["placement lag 1"]["global_cv"] > 10 * rows["fresh"]["global_cv"]


def test_results_of_other_settings_are_not_mixed_in(
    staleness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny-low"
    folder.mkdir()
    files.write_json(folder / "step-004.json", {"schema": staleness.SCHEMA, "settings": {"iteration_limit": 7}})
    monkeypatch.setattr("sys.argv", ["staleness.py", "--steps", "1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="other settings"):
        staleness.main()
