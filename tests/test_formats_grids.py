"""slime and miles schedules, torchtitan grids and tunix packs, out and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from routepack_opt import synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import grids
from routepack_opt.formats.payloads import Export
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

PAIRS: dict[str, tuple[Callable[..., Export], Callable[..., Packing]]] = {
    "slime": (grids.export_slime, grids.import_slime),
    "torchtitan": (grids.export_torchtitan, grids.import_torchtitan),
    "tunix": (grids.export_tunix, grids.import_tunix),
}


def planted() -> tuple[Problem, Plan]:
    problem, plan = synthetic.planted(
        num_rows=4, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    return problem, plan


def uneven() -> tuple[Problem, Plan]:
    """Five samples in two rows of two slots; cell (1, 1) is empty."""
    lengths = np.array([7, 5, 5, 4, 3])
    counts = np.zeros((5, 1, 4), dtype=np.int64)
    counts[:, 0, 0] = lengths
    problem = Problem.from_arrays(lengths, counts, top_k=1, capacity=10, ep_size=2, dp_size=2, num_rows=2)
    return problem, Plan.from_arrays(problem, [0, 0, 0, 1, 0], [0, 1, 1, 0, 0])


@pytest.mark.parametrize("name", PAIRS)
def test_export_reads_back_and_scores_the_same(name: str) -> None:
    problem, plan = planted()
    export, read = PAIRS[name]
    packing = read(problem, export(problem, plan).content)
    assert packing == plan.packing
    assert evaluate(problem, Plan.of(problem, plan.placement, packing)) == evaluate(problem, plan)


def test_slime_schedule_keeps_its_invariants() -> None:
    problem, plan = planted()
    content = grids.export_slime(problem, plan).content
    assert sorted(i for part in content["partitions"] for i in part) == list(range(problem.num_samples))
    assert content["num_microbatches"] == [problem.num_rows]
    assert content["global_batch_sizes"] == [problem.num_samples]
    for part, micro in zip(content["partitions"], content["micro_batch_indices"], strict=True):
        assert len(micro) == problem.num_rows
        assert sorted(j for indices in micro for j in indices) == list(range(len(part)))
        for indices in micro:
            assert problem.lengths[[part[j] for j in indices]].sum() <= problem.capacity


def test_slime_with_an_empty_micro_batch() -> None:
    problem, plan = uneven()
    with pytest.raises(
        InvalidInputError, match=r'slime cannot express.*pad="dummy", or plan with min_samples_per_cell'
    ):
        grids.export_slime(problem, plan)
    content = grids.export_slime(problem, plan, pad="dummy").content
    assert content["partitions"] == [[0, 4, 3], [1, 2, 5]]
    assert content["global_batch_sizes"] == [6]
    assert grids.import_slime(problem, content) == plan.packing


def test_torchtitan_groups_of_microbatches() -> None:
    problem, plan = planted()
    grid = grids.export_torchtitan(problem, plan, num_microbatches=2).content["grid"]
    assert [len(group) for group in grid] == [2, 2]
    assert {len(row) for group in grid for row in group} == {4}
    assert grids.import_torchtitan(problem, {"grid": grid}) == plan.packing
    for bad in (3, 0, True):
        with pytest.raises(InvalidInputError, match="must divide the 4 rows"):
            grids.export_torchtitan(problem, plan, num_microbatches=bad)


@pytest.mark.parametrize("name", ["torchtitan", "tunix"])
def test_empty_rows_are_padding_where_the_target_has_it(name: str) -> None:
    problem, plan = uneven()
    export, read = PAIRS[name]
    content = export(problem, plan).content
    assert read(problem, content) == plan.packing
    flat = content["packs"] if name == "tunix" else content["grid"][0]
    assert flat == ([[0, 4], [1, 2], [3], []] if name == "tunix" else [[[0, 4], [1, 2]], [[3], []]])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("slime", {}, "partitions is missing"),
        ("slime", {"partitions": [[0]], "micro_batch_indices": []}, "1 partitions, but micro_batch_indices of 0"),
        ("slime", {"partitions": [[0, 1, 2, 3, 4]], "micro_batch_indices": [[[0, 5]]]}, "index 5 is outside its 5"),
        ("slime", {"partitions": [[0, 1, 2, 3]], "micro_batch_indices": [[[0, 1, 2, 3]]]}, "sample 4 is in no"),
        ("torchtitan", {}, "grid is missing"),
        ("torchtitan", {"grid": [[[[0, 1], [2]]]]}, "sample 3 is in no microbatch"),
        ("tunix", {}, "pack_size is missing"),
        ("tunix", {"packs": [[0], [1], [2]], "pack_size": 2}, "3 packs are no multiple of pack_size 2"),
        ("tunix", {"packs": [[0, 1, 2], [3, 4, 4]], "pack_size": 2}, "sample 4 is in"),
    ],
)
def test_grids_that_are_no_packing(name: str, content: dict[str, Any], words: str) -> None:
    problem, _ = uneven()
    with pytest.raises(InvalidInputError) as caught:
        PAIRS[name][1](problem, content)
    assert words in str(caught.value)
