"""Plain arrays of ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from routepack_opt import formats
from routepack_opt.errors import InvalidInputError
from routepack_opt.formats import ids as plain

IDS = np.array([[[0, 1]], [[2, 3]], [[1, 3]], [[3, 0]]], dtype=np.int16)


def test_written_ids_are_counted(tmp_path: Path) -> None:
    plain.write_ids(tmp_path / "x.npz", IDS, [0, 3, 4], lengths=[4, 2])
    batch, coverage = formats.read("ids", [tmp_path / "x.npz"], num_experts=4)
    assert batch.counts[:, 0].tolist() == [[1, 2, 1, 2], [1, 0, 0, 1]]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.routed_tokens.tolist() == [3, 1]
    assert coverage.fraction == 1.0


def test_names_and_groups_are_kept(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "x.npz",
        ids=IDS,
        offsets=[0, 2, 4],
        sample_ids=np.array(["a", "b"]),
        group_ids=np.array([7, 7]),
    )
    batch, _ = plain.read_files([tmp_path / "x.npz"], num_experts=4)
    assert batch.sample_ids == ("a", "b")
    assert batch.group_ids is not None
    assert batch.group_ids.tolist() == [0, 0]


def test_policy_is_recorded_in_the_batch(tmp_path: Path) -> None:
    plain.write_ids(tmp_path / "x.npz", IDS, [0, 3, 4], lengths=[9, 2])
    with pytest.raises(InvalidInputError, match="sample 0: 6 of 9 tokens have no route"):
        plain.read_files([tmp_path / "x.npz"], num_experts=4)
    batch, coverage = plain.read_files([tmp_path / "x.npz"], num_experts=4, uncovered="scale")
    assert batch.uncovered == coverage.uncovered == "scale"
    assert batch.counts[0, 0].tolist() == [3, 6, 3, 6]
    ignored, _ = plain.read_files([tmp_path / "x.npz"], num_experts=4, uncovered="ignore")
    assert ignored.routed_tokens.tolist() == [3, 1]


def test_files_that_are_refused(tmp_path: Path) -> None:
    plain.write_ids(tmp_path / "x.npz", IDS, [0, 3, 4])
    with pytest.raises(InvalidInputError, match="2 files are given"):
        plain.read_files([tmp_path / "x.npz"] * 2, num_experts=4)
    np.savez(tmp_path / "y.npz", ids=IDS)
    with pytest.raises(InvalidInputError, match="'offsets' is missing"):
        plain.read_files([tmp_path / "y.npz"], num_experts=4)
    np.savez(tmp_path / "z.npz", ids=IDS, offsets=[0, 4], group_ids=[1, 2])
    with pytest.raises(InvalidInputError, match="group_ids has 2 entries for 1 samples"):
        plain.read_files([tmp_path / "z.npz"], num_experts=4)
