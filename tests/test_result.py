from __future__ import annotations

import json

import numpy as np
import pytest

from routepack_opt import planning
from routepack_opt.problem import Problem
from routepack_opt.result import LevelResult, Limit, Status
from routepack_opt.score import LEVELS


@pytest.fixture
def result() -> planning.Result:
    counts = np.zeros((4, 1, 2), dtype=np.int64)
    counts[:, 0, 0] = 5
    problem = Problem.from_arrays(np.full(4, 5), counts, top_k=1, capacity=10, ep_size=2, dp_size=1)
    return planning.solve(problem, "lpt+ffd")


def test_result_as_json_is_exact_and_complete(result: planning.Result) -> None:
    value = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [level["name"] for level in value["levels"]] == list(LEVELS)
    assert all(isinstance(level["value"], int) for level in value["levels"])
    assert value["score"]["max_shard_work"] == value["levels"][0]["value"]
    assert {"status", "scope", "limit", "runtime", "planner", "seed", "num_rows", "num_rows_bound"} <= set(value)
    assert value["num_rows"] == value["num_rows_bound"] == 2


def test_result_reads_well(result: planning.Result) -> None:
    text = repr(result)
    assert "lpt+ffd" in text
    assert "feasible" in text
    assert "limit exhausted" in text
    assert result.packing is not None
    assert result.plan is not None
    assert result.packing == result.plan.packing


def test_level_as_mapping_uses_none_for_unknown() -> None:
    level = LevelResult("total_work", None, None, Status.NO_SOLUTION, Limit.TIME, 0.0)
    assert level.to_dict() == {
        "name": "total_work",
        "value": None,
        "bound": None,
        "status": "no-solution",
        "limit": "time",
        "runtime": 0.0,
    }
