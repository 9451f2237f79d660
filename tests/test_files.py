from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from routepack_opt import files
from routepack_opt.errors import InvalidInputError


def test_a_failing_writer_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    files.write_json(target, {"x": 1})

    def fail() -> None:
        with files.atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert files.read_json(target, what="test") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_missing_folder_and_folder_as_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="does not exist"):
        files.write_text(tmp_path / "no" / "a.txt", "x")
    with pytest.raises(InvalidInputError, match="is a folder"):
        files.write_text(tmp_path, "x")


def test_canonical_json_sorts_and_refuses_nan() -> None:
    assert files.canonical_json({"b": 1, "a": [2]}) == '{"a":[2],"b":1}'
    with pytest.raises(ValueError, match="JSON"):
        files.canonical_json(float("nan"))


@pytest.mark.parametrize(("text", "message"), [("{", "truncated"), ('{"a": 1, "a": 2}', "key repeated: a")])
def test_bad_json_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        files.read_json(path, what="plan")
    with pytest.raises(InvalidInputError, match="cannot read"):
        files.read_json(tmp_path / "none.json", what="plan")
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(InvalidInputError, match="UTF-8"):
        files.read_json(path, what="plan")


def test_npz_round_trip_keeps_bytes_dtypes_and_scalars(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.uint16).reshape(2, 3)[:, ::-1], "s": np.array("text"), "n": np.array(3)}
    first, second = tmp_path / "1.npz", tmp_path / "2.npz"
    files.write_npz(first, arrays)
    files.write_npz(second, arrays)
    assert first.read_bytes() == second.read_bytes()
    back = files.read_npz(first, what="test", required=("a", "s"), optional=("n", "absent"))
    assert back["a"].dtype == np.uint16
    assert np.array_equal(back["a"], arrays["a"])
    assert back["s"].shape == () == back["n"].shape


def test_npz_names_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    files.write_npz(path, {"a": np.arange(2), "odd": np.arange(1)})
    with pytest.raises(InvalidInputError) as caught:
        files.read_npz(path, what="test", required=("a", "b"))
    assert caught.value.faults == ("array 'b' is missing", "unknown array 'odd'")
    with pytest.raises(InvalidInputError, match=r"must end in \.npz"):
        files.write_npz(tmp_path / "x.bin", {"a": np.arange(2)})


def test_pickles_are_neither_written_nor_read(tmp_path: Path) -> None:
    objects = np.array([{"a": 1}], dtype=object)
    with pytest.raises(InvalidInputError, match="Python objects"):
        files.write_npz(tmp_path / "x.npz", {"a": objects})
    np.savez(tmp_path / "y.npz", a=objects)
    with pytest.raises(InvalidInputError, match="pickled"):
        files.read_npz(tmp_path / "y.npz", what="test", required=("a",))
    (tmp_path / "z.npz").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InvalidInputError, match="pickled"):
        files.read_npz(tmp_path / "z.npz", what="test", required=("a",))


@pytest.mark.parametrize("keep", [0, 1, 30, 200])
def test_truncated_npz_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "x.npz"
    files.write_npz(path, {"a": np.arange(1000)})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidInputError):
        files.read_npz(path, what="test", required=("a",))


def test_damaged_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    files.write_npz(path, {"a": np.arange(5000)})
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("a.npy").header_offset + 80
    data = bytearray(path.read_bytes())
    data[start : start + 40] = bytes(40)
    path.write_bytes(bytes(data))
    with pytest.raises(InvalidInputError):
        files.read_npz(path, what="test", required=("a",))
    np.save(tmp_path / "one.npy", np.arange(3))
    with pytest.raises(InvalidInputError, match="single"):
        files.read_npz(tmp_path / "one.npy", what="test", required=("a",))


def test_digest_depends_on_values_and_shape_only() -> None:
    a = np.arange(12, dtype=np.uint16).reshape(3, 4)
    assert files.array_digest({"a": a}) == files.array_digest({"a": np.asfortranarray(a.astype(np.uint32))})
    assert files.array_digest({"a": a}) != files.array_digest({"a": a.reshape(4, 3)})
    assert files.array_digest({"a": a, "b": 1}) != files.array_digest({"a": a, "b": 2})
    assert files.array_digest({"a": a[:0]}) != files.array_digest({"a": a})
