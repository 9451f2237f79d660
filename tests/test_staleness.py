"""A step of the staleness experiment runs, and results of other settings are not mixed in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from routepack_opt import files


@pytest.fixture(scope="module")
def staleness() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "experiments" / "staleness.py"
    spec = importlib.util.spec_from_file_location("staleness", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_old_placement_loses_where_heat_rotates(staleness: ModuleType) -> None:
    rows = staleness.run_step("rotating", 4, 20_000)
    fresh = rows["fresh"]["step_time"]
    assert rows["placement lag 1"]["step_time"] > 1.1 * fresh
    assert rows["contiguous"]["step_time"] > 1.5 * fresh
    # Nobody recorded today's routing: the plan is as old as the placement of the step before.
    assert rows["missing 1"]["step_time"] > 1.1 * fresh
    assert rows["missing 0.1"]["step_time"] < 1.1 * fresh
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
