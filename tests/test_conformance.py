"""Every built-in component, aliases included, passes the public conformance kit."""

from __future__ import annotations

import pytest

from routepack_opt import registry
from routepack_opt.testing import check_solver

#: What a component may refuse of the battery; everything else must be treated.
MAY_REFUSE = ("equal_samples_per_slot", "min_samples_per_cell", "routing", "counts", "repair")


@pytest.mark.parametrize("name", registry.names())
def test_component_conforms(name: str) -> None:
    report = check_solver(name, iteration_limit=500)
    assert report.roles
    assert report.num_runs >= 10
    for reason in report.refused:
        assert any(word in reason for word in MAY_REFUSE), f"{name} refuses for another reason: {reason}"
