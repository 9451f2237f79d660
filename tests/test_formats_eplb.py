"""EPLB maps out and in."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from routepack_opt import synthetic
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import eplb
from routepack_opt.plan import Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

LINEAR = CostModel((OperatorClass("attention", Fraction(1), Fraction(0)),))


def planted() -> tuple[Problem, Plan]:
    problem, plan = synthetic.planted(
        num_rows=3, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    return problem, plan


def test_maps_read_back_score_the_same() -> None:
    problem, plan = planted()
    content = eplb.export(problem, plan).content
    placement = eplb.import_placement(content["physical_to_logical_map"], ep_size=4)
    assert placement == plan.placement
    assert evaluate(problem, Plan.of(problem, placement, plan.packing)) == evaluate(problem, plan)
    physical = np.array(content["physical_to_logical_map"])
    logical = np.array(content["logical_to_physical_map"])
    assert logical.shape == (2, 16, 1)
    for layer in range(2):
        assert (physical[layer, logical[layer, :, 0]] == np.arange(16)).all()
    assert (np.array(content["expert_count"]) == 1).all()


def test_rows_of_moe_layers_are_taken() -> None:
    problem, plan = planted()
    whole = eplb.placement_maps(problem, plan, moe_layers=[1, 3], num_hidden_layers=5)
    assert whole[[0, 2, 4]].tolist() == [list(range(16))] * 3
    assert eplb.import_placement(whole, ep_size=4, moe_layers=[1, 3]) == plan.placement


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[0, 0, 1, 2]], "layer 0: expert 0 has 2 physical slots; replicas cannot be expressed"),
        ([[0, 1, 2, 3], [0, 1, 2, 4]], "layer 1, slot 3: expert 4 is outside 0..3"),
        ([[0, 1, -1, 2]], "layer 0, slot 2: expert -1"),
        ([[0.0, 1.0]], "dtype float64"),
        ([0, 1], "must have 2"),
        (np.zeros((0, 4), dtype=int), "no layers"),
    ],
)
def test_maps_that_are_no_placement(rows: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        eplb.import_placement(rows, ep_size=2)  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_layers": [1, 2]}, "given together"),
        ({"moe_layers": [1], "num_hidden_layers": 4}, "moe_layers names 1 layers; the problem has 2"),
        ({"moe_layers": [1, 1], "num_hidden_layers": 4}, "names a layer twice"),
        ({"moe_layers": [1, 4], "num_hidden_layers": 4}, "names layer 4; the model has 4"),
    ],
)
def test_layer_numbers_that_do_not_fit(options: dict[str, object], words: str) -> None:
    problem, plan = planted()
    with pytest.raises(InvalidInputError) as caught:
        eplb.placement_maps(problem, plan, **options)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_problems_without_routing_have_no_placement() -> None:
    problem = Problem.from_arrays([3, 4], capacity=10, ep_size=2, dp_size=2, num_rows=1, cost=LINEAR)
    plan = Plan.from_arrays(problem, [0, 0], [0, 1])
    with pytest.raises(InvalidInputError, match="no recorded routing"):
        eplb.export(problem, plan)


def test_contiguous_is_the_identity() -> None:
    placement = eplb.import_placement([list(range(8))] * 3, ep_size=4)
    assert placement == Placement.contiguous(3, 8, ep_size=4)


@pytest.mark.skipif("ROUTEPACK_DATA" not in os.environ, reason="ROUTEPACK_DATA is not set: no published map")
def test_published_map_with_replicas_is_refused_by_name() -> None:
    path = Path(os.environ["ROUTEPACK_DATA"]) / "eplb_readme_golden" / "example.json"
    example = json.loads(path.read_text())
    with pytest.raises(InvalidInputError) as caught:
        eplb.import_placement(example["physical_to_logical_map"], ep_size=example["num_gpus"])
    assert caught.value.faults == tuple(
        f"layer {layer}: expert {expert} has {copies} physical slots; replicas cannot be expressed here"
        for layer, (expert, copies) in enumerate(
            max(((e, row.count(e)) for e in range(12)), key=lambda pair: (pair[1], -pair[0]))
            for row in example["physical_to_logical_map"]
        )
    )
