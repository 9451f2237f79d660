from __future__ import annotations

import pytest

from routepack_opt.errors import Faults, InfeasibleProblemError, InvalidInputError, MissingExtraError, refuse_unknown


def test_all_faults_are_raised_at_once() -> None:
    faults = Faults(limit=3)
    assert not faults
    faults.raise_if_any("nothing")
    faults.extend([f"fault {k}" for k in range(5)])
    with pytest.raises(InvalidInputError, match="context") as caught:
        faults.raise_if_any("context")
    assert caught.value.faults == ("fault 0", "fault 1", "fault 2", "... and 2 more")
    assert "fault 2" in str(caught.value)


def test_one_fault_reads_as_one_line() -> None:
    error = InvalidInputError("too long", context="sample 3")
    assert str(error) == "sample 3: too long"
    assert isinstance(error, ValueError)


def test_error_class_is_kept() -> None:
    faults = Faults()
    faults.add("no room")
    with pytest.raises(InfeasibleProblemError):
        faults.raise_if_any(error=InfeasibleProblemError)


def test_missing_extra_says_what_to_install() -> None:
    assert "routepack-opt[torch]" in str(MissingExtraError("torch", extra="torch", purpose="materialization"))


def test_unknown_names_come_with_the_nearest() -> None:
    assert refuse_unknown(["anealing"], ["annealing", "lpt"], "planner") == [
        "unknown planner 'anealing'; did you mean 'annealing'?"
    ]
    assert "known: a, b" in refuse_unknown(["zzz"], ["a", "b"], "planner")[0]
    assert refuse_unknown(["a"], ["a"], "planner") == []
