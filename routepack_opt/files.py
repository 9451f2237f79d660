"""Files that are never half-written, arrays that are never pickled, digests that identify content.

Every writer in the package goes through :func:`atomic_path`: the data is
written to a temporary file beside the target and renamed over it, so that a
reader sees the old file or the new one, whatever kills the writer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt.errors import InvalidInputError

__all__ = [
    "array_digest",
    "atomic_path",
    "canonical_json",
    "read_json",
    "read_npz",
    "write_json",
    "write_npz",
    "write_text",
]

PathLike = str | os.PathLike[str]


@contextlib.contextmanager
def atomic_path(path: PathLike) -> Iterator[Path]:
    """Give a temporary path that replaces ``path`` when the block ends without an error.

    Parameters
    ----------
    path : path-like
        The file to create or replace. Its folder must exist.

    Yields
    ------
    pathlib.Path
        A file in the same folder with the same suffix, to be written by the caller.

    Raises
    ------
    InvalidInputError
        If the folder of ``path`` does not exist or ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise InvalidInputError(f"{target} is a folder; name a file")
    if not target.parent.is_dir():
        raise InvalidInputError(f"the folder {target.parent} of {target.name} does not exist; create it first")
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def canonical_json(value: Any, *, indent: int | None = None) -> str:
    """Serialise with sorted keys; NaN and infinities are refused."""
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(value, sort_keys=True, allow_nan=False, indent=indent, separators=separators)


def write_text(path: PathLike, text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: PathLike, value: Any, *, indent: int | None = None) -> None:
    """Write canonical JSON atomically."""
    write_text(path, canonical_json(value, indent=indent) + "\n")


def read_json(path: PathLike, *, what: str) -> Any:
    """Read a JSON document.

    Raises
    ------
    InvalidInputError
        If the file is missing, is no JSON, or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            raise InvalidInputError(f"key repeated: {', '.join(repeated)}", context=f"{what} {path}")
        return dict(pairs)

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"cannot read {what} {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{what} {path} is not UTF-8 text: {error}") from error
    try:
        return json.loads(text, object_pairs_hook=unique)
    except InvalidInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} {path} is not JSON (truncated?): {error}") from error


def write_npz(path: PathLike, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays as a compressed ``.npz`` atomically; the bytes depend on the arrays only.

    Raises
    ------
    InvalidInputError
        If an array has dtype object, or the name does not end in ``.npz``.
    """
    if Path(path).suffix != ".npz":
        raise InvalidInputError(f"{path} must end in .npz")
    objects = [name for name, array in arrays.items() if array.dtype.hasobject]
    if objects:
        raise InvalidInputError([f"array {name!r} holds Python objects" for name in objects])
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            member = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(member, "w", force_zip64=True) as stream:
                # 0-d arrays must stay 0-d, which ascontiguousarray would not keep.
                plain = array if array.flags.c_contiguous else np.ascontiguousarray(array)
                np.lib.format.write_array(stream, plain, allow_pickle=False)


def read_npz(
    path: PathLike, *, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Read named arrays without ever unpickling.

    Parameters
    ----------
    path : path-like
        An ``.npz`` file.
    what : str
        What the file should hold, for messages.
    required, optional : tuple of str
        The array names; any other name is a fault.

    Raises
    ------
    InvalidInputError
        If the file is missing, truncated, damaged, holds pickled objects, lacks
        a required array or holds an unknown one.
    """
    context = f"{what} {path}"
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise InvalidInputError("a single .npy array, not an .npz archive", context=context)
        with loaded as archive:
            names = set(archive.files)
            faults = [f"array {name!r} is missing" for name in required if name not in names]
            faults += [f"unknown array {name!r}" for name in sorted(names - set(required) - set(optional))]
            if faults:
                raise InvalidInputError(faults, context=context)
            return {name: archive[name] for name in (*required, *optional) if name in names}
    except InvalidInputError:
        raise
    except OSError as error:
        raise InvalidInputError(f"cannot be read: {error.strerror or error}", context=context) from error
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, zipfile.LargeZipFile) as error:
        raise InvalidInputError(
            f"damaged, truncated or pickled, so it was not read: {error}", context=context
        ) from error
    except Exception as error:  # zlib.error and struct.error have no common base
        raise InvalidInputError(f"damaged: {error}", context=context) from error


def array_digest(parts: Mapping[str, npt.NDArray[Any] | str | int]) -> str:
    """SHA-256 over named arrays and scalars, independent of memory layout and of integer width.

    Parameters
    ----------
    parts : mapping
        Names to integer arrays, strings or ints. Integer arrays of any width
        digest alike when their values are alike.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in sorted(parts):
        part = parts[name]
        digest.update(name.encode() + b"\0")
        if isinstance(part, np.ndarray):
            digest.update(repr(part.shape).encode())
            flat = part.reshape(part.shape[0], -1) if part.ndim > 1 and part.shape[0] else part.reshape(1, -1)
            width = "<i8"
            if part.dtype.kind == "u" and part.dtype.itemsize <= 4:
                width = "<u2" if not part.size or int(part.max()) < 2**16 else "<u4"
            rows = max(1, (1 << 20) // max(1, flat.shape[1]))
            for start in range(0, flat.shape[0], rows):
                block = np.ascontiguousarray(flat[start : start + rows], dtype=width)
                if block.size:
                    digest.update(block.reshape(-1).view(np.uint8).data)
        else:
            digest.update(repr(part).encode())
        digest.update(b"\1")
    return digest.hexdigest()
