"""TensorRT-LLM calibration folders in, load balancer YAML out and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from routepack_opt import formats, synthetic
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import trtllm
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate

E, K, LAYERS = 8, 2, (3, 4)


def calibration(folder: Path, *, ranks: int = 2, skip: tuple[int, str] | None = None) -> np.ndarray:
    """Loads [iterations, layers, E], written in parts by the ranks; the second iteration is idle."""
    rng = np.random.default_rng(0)
    load = np.zeros((3, 2, E), dtype=np.int64)
    (folder / "meta_info.json").write_text(json.dumps({"num_experts": E, "num_experts_per_token": K}))
    for rank in range(ranks):
        tensors = {}
        for iteration, tokens in enumerate((10, 0, 20)):
            for position, layer in enumerate(LAYERS):
                part = rng.multinomial(tokens * K, np.full(E, 1 / E)).astype(np.int32)
                load[iteration, position] += part
                if skip != (rank, f"{iteration}_{layer}"):
                    tensors[f"{iteration}_{layer}"] = part
        save_file(tensors, folder / f"rank{rank}.safetensors")
    return load


def test_loads_are_summed_over_ranks(tmp_path: Path) -> None:
    load = calibration(tmp_path)
    found = trtllm.read_calibration(tmp_path, num_ranks=2)
    assert (found.load == load).all()
    assert found.layers == LAYERS
    assert found.top_k == K
    problem = Problem.from_window(trtllm.read_load([tmp_path]), ep_size=4)
    assert problem.num_rows == 2
    batch, coverage = formats.read("trtllm", [tmp_path], num_experts=E)
    assert batch.lengths.tolist() == [20, 40]
    assert batch.top_k == K
    assert coverage.fraction == 1.0


def test_partial_rank_sets_are_refused(tmp_path: Path) -> None:
    calibration(tmp_path)
    with pytest.raises(InvalidInputError, match="1 of 3 ranks are missing: 2"):
        trtllm.read_calibration(tmp_path, num_ranks=3)
    (tmp_path / "rank0.safetensors").unlink()
    with pytest.raises(InvalidInputError, match="1 of 2 ranks are missing: 0"):
        trtllm.read_calibration(tmp_path)


def test_ranks_without_an_iteration_are_named(tmp_path: Path) -> None:
    calibration(tmp_path, skip=(1, "2_4"))
    with pytest.raises(InvalidInputError, match="rank 1 lacks 1 of 6 keys, such as 2_4"):
        trtllm.read_calibration(tmp_path)


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"cannot read calibration"):
        trtllm.read_calibration(tmp_path)
    (tmp_path / "meta_info.json").write_text('{"num_experts": 0}')
    with pytest.raises(InvalidInputError) as caught:
        trtllm.read_calibration(tmp_path)
    assert len(caught.value.faults) == 2
    (tmp_path / "meta_info.json").write_text(json.dumps({"num_experts": E, "num_experts_per_token": K}))
    with pytest.raises(InvalidInputError, match="holds no rank"):
        trtllm.read_calibration(tmp_path)
    (tmp_path / "rank0.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(InvalidInputError, match=r"rank0\.safetensors is truncated or damaged"):
        trtllm.read_calibration(tmp_path)
    save_file({"a": np.zeros(E, dtype=np.int32), "0_1": np.zeros(3, dtype=np.int32)}, tmp_path / "rank0.safetensors")
    with pytest.raises(InvalidInputError) as caught:
        trtllm.read_calibration(tmp_path)
    assert len(caught.value.faults) == 2


def test_options_that_change_nothing_are_refused(tmp_path: Path) -> None:
    calibration(tmp_path)
    with pytest.raises(InvalidInputError, match="uncovered changes nothing"):
        formats.read("trtllm", [tmp_path], num_experts=E, uncovered="scale")
    with pytest.raises(InvalidInputError, match="has 8 experts; num_experts is 16"):
        formats.read("trtllm", [tmp_path], num_experts=16)
    with pytest.raises(InvalidInputError, match="2 folders are given"):
        formats.read("trtllm", [tmp_path, tmp_path], num_experts=E)


def test_yaml_reads_back_and_scores_the_same(tmp_path: Path) -> None:
    problem, plan = synthetic.planted(
        num_rows=2, ep_size=4, dp_size=4, num_layers=2, num_experts=16, top_k=2, samples_per_cell=3, mean_length=120
    )
    formats.export("trtllm", problem, plan, tmp_path / "x.yaml", moe_layers=[3, 10], layer_updates_per_iter=2)
    text = (tmp_path / "x.yaml").read_text()
    assert "num_slots: 16" in text
    assert "layer_updates_per_iter: 2" in text
    placement = trtllm.import_placement(tmp_path / "x.yaml", ep_size=4)
    assert placement == plan.placement
    assert evaluate(problem, Plan.of(problem, placement, plan.packing)) == evaluate(problem, plan)
    exported = trtllm.export(problem, plan)
    assert set(exported.content["initial_global_assignments"]) == {0, 1}
    assert any("numbered from 0" in note for note in exported.notes)


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="initial_global_assignments is missing"):
        trtllm.import_placement({}, ep_size=2)
    with pytest.raises(InvalidInputError, match="replicas cannot be expressed"):
        trtllm.import_placement({"initial_global_assignments": {0: [0, 0, 1, 2]}}, ep_size=2)
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(InvalidInputError, match="cannot be read"):
        trtllm.import_placement(tmp_path / "x.yaml", ep_size=2)
    problem, plan = synthetic.planted(
        num_rows=1, ep_size=2, dp_size=2, num_layers=1, num_experts=4, top_k=1, samples_per_cell=3, mean_length=100
    )
    with pytest.raises(InvalidInputError, match="layer_updates_per_iter is -1"):
        trtllm.export(problem, plan, layer_updates_per_iter=-1)
