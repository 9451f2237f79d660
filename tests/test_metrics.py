from __future__ import annotations

import numpy as np
import pytest

from routepack_opt.metrics import coefficient_of_variation, imbalance, measure, relative_change
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem


def problem() -> Problem:
    counts = np.array([[[6, 0, 0, 0]], [[0, 2, 2, 2]], [[1, 1, 1, 1]]])
    return Problem.from_arrays([6, 6, 4], counts, top_k=1, capacity=10, ep_size=2, dp_size=2, num_rows=1)


def test_cv_and_imbalance_by_hand() -> None:
    assert coefficient_of_variation([[1.0, 3.0], [2.0, 2.0], [0.0, 0.0]]).tolist() == [0.5, 0.0, 0.0]
    assert imbalance([[1.0, 3.0], [0.0, 0.0]]).tolist() == [1.5, 1.0]


def test_figures_by_hand() -> None:
    found = problem()
    plan = Plan.from_arrays(found, [0, 0, 0], [0, 1, 0])
    figures = measure(found, plan)
    # contiguous: rank 0 has experts 0, 1: 6 + 2 + 2 = 10; rank 1: 4 + 2 = 6; one block
    assert figures.global_cv == pytest.approx(2 / 8)
    assert figures.row_cv == pytest.approx(2 / 8)
    assert figures.ep_peak == 10
    assert figures.hottest_rank == 10
    assert figures.imbalance_max == pytest.approx(10 / 8)
    assert figures.joint_bottleneck == pytest.approx(10 / 10)
    assert figures.attention_work == 0
    assert figures.fill == pytest.approx(16 / 20)
    assert figures.max_cell_tokens == 10
    assert figures.empty_cells == 0


def test_change_between_two_plans() -> None:
    found = problem()
    before = measure(found, Plan.from_arrays(found, [0, 0, 0], [0, 1, 0]))
    after = measure(found, Plan.from_arrays(found, [0, 0, 0], [0, 1, 1], [[0, 2, 3, 1]]))
    change = relative_change(before, after)
    # slots 0 2 3 1: rank 0 owns experts 0 and 3: 7 + 3 = 10, the same; rank peak unchanged
    assert change["ep_peak"] == 0
    assert change["attention_work"] is None
    assert change["empty_cells"] is None


def test_infeasible_plans_can_be_measured() -> None:
    found = problem()
    crowded = Plan.from_arrays(found, [0, 0, 0], [0, 0, 0])
    figures = measure(found, crowded)
    assert figures.max_cell_tokens == 16
    assert figures.empty_cells == 1


def test_without_routing() -> None:
    from fractions import Fraction

    from routepack_opt.cost import CostModel, OperatorClass

    cost = CostModel((OperatorClass("a", Fraction(1), Fraction(0)),))
    plain = Problem.from_arrays([4, 6], capacity=10, ep_size=2, cost=cost)
    figures = measure(plain, Plan.from_arrays(plain, [0, 0], [0, 1]))
    assert figures.global_cv is None
    assert figures.ep_peak == 0
    assert figures.joint_bottleneck == pytest.approx(0.6)
