"""What the formats share: arrays out of payloads, samples into counts, cells in and out of plans.

Nothing here imports a framework, and nothing executes what a file says: ``.npy``
and ``.npz`` are read without pickles, and PyTorch files through an unpickler
that builds tensors, containers and numbers and refuses every other name.
"""

from __future__ import annotations

import base64
import binascii
import collections
import io
import json
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.arrays import IntArray
from routepack_opt.batch import RoutingBatch
from routepack_opt.counting import Coverage, RoutingCounter, RoutingCounts, layer_numbers
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.plan import Packing, Plan
from routepack_opt.problem import Problem

__all__ = [
    "LOSS_NOTE",
    "PADS",
    "Export",
    "Recording",
    "SampleRoutes",
    "Segment",
    "array_of_bytes",
    "by_layer_number",
    "cells_of_plan",
    "checked_plan",
    "decode_base64",
    "encode_base64",
    "integer_ids",
    "join_segments",
    "json_lines",
    "listed",
    "loss_fields",
    "npy_bytes",
    "num_dummies_of",
    "packing_from_cells",
    "padded_cells",
    "read_samples",
    "read_torch",
    "recording",
    "require_keys",
    "require_ranks",
    "to_numpy",
    "tokens_of",
]

AnyArray = npt.NDArray[Any]

LOSS_NOTE: Final = (
    "normalise the loss by the loss tokens of the whole window: microbatches hold uneven numbers of tokens, so a mean "
    "per microbatch would weigh their tokens unevenly"
)
"""What every consumer of a packing has to do."""


class Recording(NamedTuple):
    """A batch and what its routing covers."""

    batch: RoutingBatch
    coverage: Coverage


@dataclass(frozen=True)
class Export:
    """A plan in a framework's own form.

    Attributes
    ----------
    target : str
        Name of the format.
    content : object
        JSON-able; exactly what the target reads.
    notes : tuple of str
        What people should know and the target has no place for.
    kind : {"json", "yaml"}
        How the content is written.
    """

    target: str
    content: Any
    notes: tuple[str, ...] = ()
    kind: str = "json"

    def to_text(self) -> str:
        """Serialise the content."""
        if self.kind == "yaml":
            import yaml

            return str(yaml.safe_dump(self.content, sort_keys=True, default_flow_style=None, width=1_000_000))
        return files.canonical_json(self.content) + "\n"

    def save(self, path: files.PathLike) -> None:
        """Write the content to a file, atomically."""
        files.write_text(path, self.to_text())


# -------------------------------------------------------------------- arrays


def to_numpy(value: Any, what: str) -> AnyArray:
    """Turn a tensor, array or nested list into NumPy without importing its framework.

    Parameters
    ----------
    value : object
        Anything with ``detach().cpu().numpy()`` (PyTorch), ``__array__``, or
        nested sequences.
    what : str
        Name in messages.

    Raises
    ------
    InvalidInputError
        If it is None, ragged or no array.
    """
    if value is None:
        raise InvalidInputError(f"{what} is None")
    try:
        if hasattr(value, "detach") and hasattr(value, "cpu"):
            value = value.detach().cpu().numpy()
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidInputError(f"{what} is no array: {error}") from error
    if array.dtype.hasobject:
        raise InvalidInputError(f"{what} is ragged or holds objects that are no numbers")
    return array


def integer_ids(value: Any, what: str) -> AnyArray:
    """Ids as an integer array [rows, layers, K] of whatever integer dtype they came in."""
    array = to_numpy(value, what)
    if array.size == 0 and array.dtype.kind == "f":
        array = array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{what}: ids have dtype {array.dtype}; they must be integers")
    if array.ndim != 3:
        raise InvalidInputError(f"{what}: ids have shape {list(array.shape)}; they must be [rows, layers, K]")
    return array


def decode_base64(text: Any, what: str) -> bytes:
    """Strict base64.

    Raises
    ------
    InvalidInputError
        If it is no text or no base64.
    """
    if isinstance(text, bytes):
        text = text.decode("latin-1")
    if not isinstance(text, str):
        raise InvalidInputError(f"{what} is {type(text).__name__}; it must be base64 text")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInputError(f"{what} is not base64 (truncated?): {error}") from error


def encode_base64(array: AnyArray, dtype: str) -> str:
    """Base64 of an array's numbers, little-endian, in C order."""
    data = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<")).tobytes()
    return base64.b64encode(data).decode()


def array_of_bytes(data: bytes, dtype: str, shape: tuple[int, ...], what: str, *, shown: str) -> AnyArray:
    """Little-endian numbers in C order as an array of the announced shape.

    Parameters
    ----------
    data : bytes
    dtype : str
        Name of the NumPy dtype.
    shape : tuple of int
    what : str
        Name in messages.
    shown : str
        The shape in messages, as the format writes it.

    Raises
    ------
    InvalidInputError
        If there are more or fewer bytes than the shape needs.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    wanted = int(np.prod(shape, dtype=object)) * stored.itemsize
    if len(data) != wanted:
        raise InvalidInputError(f"{what}: {len(data)} bytes, but {shown} of {dtype} are {wanted} (truncated?)")
    try:
        return np.frombuffer(data, dtype=stored).reshape(shape)
    except (ValueError, OverflowError) as error:  # no bytes at all, and an axis beyond what an array can have
        raise InvalidInputError(f"{what}: {shown} is no shape of an array: {error}") from error


def npy_bytes(data: bytes, what: str) -> AnyArray:
    """Read the bytes of a ``.npy`` file, never a pickle."""
    try:
        loaded = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise InvalidInputError(f"{what} is no .npy (truncated, damaged or pickled): {error}") from error
    if not isinstance(loaded, np.ndarray):
        raise InvalidInputError(f"{what} is an .npz; one .npy array was expected")
    return loaded


# ------------------------------------------------------------- PyTorch files

_STORAGES: Final = {
    "ByteStorage": np.uint8,
    "CharStorage": np.int8,
    "ShortStorage": np.int16,
    "IntStorage": np.int32,
    "LongStorage": np.int64,
    "HalfStorage": np.float16,
    "FloatStorage": np.float32,
    "DoubleStorage": np.float64,
    "BoolStorage": np.bool_,
}


class _Storage(NamedTuple):
    name: str


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *_rest: Any) -> AnyArray:
    if not isinstance(storage, np.ndarray):
        raise InvalidInputError("a tensor without storage")
    size, stride = tuple(int(n) for n in size), tuple(int(n) for n in stride)
    last = int(offset) + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) if all(size) else int(offset)
    if min((*size, *stride, int(offset)), default=0) < 0 or (all(size) and last >= storage.size):
        raise InvalidInputError("a tensor that reaches outside its storage")
    step = storage.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(storage[int(offset) :], size, [s * step for s in stride], writeable=False)
    return view.copy()


class _TensorUnpickler(pickle.Unpickler):
    """Builds tensors, containers and numbers; refuses every other name."""

    def __init__(self, stream: Any, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(stream)
        self._archive = archive
        self._prefix = prefix
        self._loaded: dict[str, AnyArray] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor")}:
            return _rebuild_tensor
        if module in ("torch", "torch.storage") and name in _STORAGES:
            return _Storage(name)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        raise InvalidInputError(f"it names {module}.{name}; only tensors, containers and numbers are read")

    def persistent_load(self, pid: Any) -> AnyArray:
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], _Storage)):
            raise InvalidInputError("it refers to something that is no tensor storage")
        key, count = str(pid[2]), int(pid[4])
        if key not in self._loaded:
            data = self._archive.read(f"{self._prefix}data/{key}")
            array: AnyArray = np.frombuffer(data, dtype=_STORAGES[pid[1].name])
            if array.size < count:
                raise InvalidInputError(f"storage {key} holds {array.size} numbers; {count} were announced")
            self._loaded[key] = array
        return self._loaded[key]


def read_torch(path: files.PathLike) -> Any:
    """Read a file of ``torch.save`` into NumPy arrays and containers, without PyTorch and without running it.

    Parameters
    ----------
    path : path-like
        A file in the zip format (PyTorch ≥ 1.6).

    Raises
    ------
    InvalidInputError
        If the file is missing, damaged, in the old format, or holds anything but
        tensors, containers, text and numbers; nothing it names is called.
    """
    context = f"PyTorch file {path}"
    try:
        with zipfile.ZipFile(path) as archive:
            found = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
            if len(found) != 1:
                raise InvalidInputError("no data.pkl inside; not written by torch.save", context=context)
            prefix = found[0].removesuffix("data.pkl")
            order = f"{prefix}byteorder"
            if order in archive.namelist() and archive.read(order) not in (b"", b"little"):
                raise InvalidInputError("big-endian numbers", context=context)
            return _TensorUnpickler(io.BytesIO(archive.read(found[0])), archive, prefix).load()
    except InvalidInputError as error:
        raise InvalidInputError(error.faults, context=context) from error
    except zipfile.BadZipFile as error:
        raise InvalidInputError("truncated, damaged, or in the format before PyTorch 1.6", context=context) from error
    except OSError as error:
        raise InvalidInputError(f"cannot be read: {error.strerror or error}", context=context) from error
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to spell
        raise InvalidInputError(f"damaged: {type(error).__name__}: {error}", context=context) from error


# ------------------------------------------------------------------- samples


class SampleRoutes(NamedTuple):
    """Routes of one sample, as a reader hands them to the counter.

    Attributes
    ----------
    ids : ndarray of int, shape [rows, layers, K]
        Any integer dtype.
    length : int
        Tokens of the sample.
    sample_id, group_id : str or None
        Name, and name of its prompt group.
    valid : ndarray of bool, shape [rows], or None
        Rows to read.
    """

    ids: AnyArray
    length: int
    sample_id: str | None = None
    group_id: str | None = None
    valid: AnyArray | None = None


class Segment(NamedTuple):
    """Routes of one turn: ``ids`` [rows, layers, K] of tokens ``start`` and following."""

    start: int
    ids: AnyArray


def join_segments(segments: Sequence[Segment], what: str = "sample") -> AnyArray:
    """Join the turns of a rollout; where two turns have a route for a token, the later turn wins.

    The last token of a turn is not forwarded in that turn, so the row of the
    boundary token comes from the next one. A placeholder row of a later turn
    (-1, or zeros with K ≥ 2; a cached prefix, say) does not erase a route.

    Parameters
    ----------
    segments : sequence of Segment
        In the order of the turns.
    what : str
        Name in messages.

    Returns
    -------
    ndarray of int, shape [rows, layers, K]

    Raises
    ------
    InvalidInputError
        If a turn starts beyond the end of what is recorded, before zero, or before
        the turn it follows, or shapes differ.
    """
    if not segments:
        raise InvalidInputError(f"{what}: no segments")
    shape = segments[0].ids.shape[1:]
    faults = Faults()
    end = 0
    previous = 0
    for k, (start, ids) in enumerate(segments):
        if ids.shape[1:] != shape:
            faults.add(f"{what}, segment {k}: shape {list(ids.shape)}, segment 0 has {list(segments[0].ids.shape)}")
        if start < 0:
            faults.add(f"{what}, segment {k}: starts at {start}")
        elif start < previous:
            faults.add(f"{what}, segment {k}: starts at {start}, before segment {k - 1} at {previous}")
        # The boundary token may be missing from the earlier turn, but not the one before it.
        elif start > end:
            faults.add(f"{what}, segment {k}: starts at token {start}, but routes end at token {end}: a gap")
        previous = max(previous, start)
        end = max(end, start + len(ids))
    faults.raise_if_any()
    dtype = np.result_type(*(ids.dtype for _, ids in segments))
    joined = np.zeros((end, *shape), dtype=dtype)
    filled = np.zeros(end, dtype=bool)
    for start, ids in segments:
        placeholder = (ids == -1).all(axis=(1, 2)) if ids.dtype.kind == "i" else np.zeros(len(ids), dtype=bool)
        if shape[1] >= 2:
            placeholder |= (ids == 0).all(axis=(1, 2))
        part = slice(start, start + len(ids))
        take = ~placeholder | ~filled[part]
        joined[part][take] = ids[take]
        filled[part] = True
    return joined


def read_samples(
    samples: Iterable[SampleRoutes],
    *,
    num_experts: int,
    moe_layers: Sequence[int] | None,
    physical_to_logical: npt.ArrayLike | None,
    uncovered: str,
    check_distinct: bool,
) -> Recording:
    """Count a stream of samples, one in memory at a time.

    ``moe_layers`` are absolute layer numbers; ids whose layer axis is as long as
    the list are taken to hold the MoE layers only.
    """
    counter: RoutingCounter | None = None
    groups: list[str | None] = []
    for sample in samples:
        if counter is None:
            layers = None if moe_layers is None else layer_numbers(moe_layers)
            if layers is not None and sample.ids.ndim == 3 and sample.ids.shape[1] == len(layers):
                layers = None
            counter = RoutingCounter(
                num_experts=num_experts,
                moe_layers=layers,
                physical_to_logical=physical_to_logical,
                uncovered=uncovered,
                check_distinct=check_distinct,
            )
        counter.add(sample.ids, length=sample.length, valid=sample.valid, sample_id=sample.sample_id)
        groups.append(sample.group_id)
    if counter is None:
        raise InvalidInputError("no sample was found")
    return recording(counter.finish(), groups)


def recording(counts: RoutingCounts, groups: Sequence[str | None] = ()) -> Recording:
    """Build the batch of counted samples; groups are numbered by first appearance."""
    names = counts.coverage.sample_ids
    group_ids: IntArray | None = None
    if any(group is not None for group in groups):
        numbers: dict[str, int] = {}
        keys = [f"\0{i}" if group is None else group for i, group in enumerate(groups)]
        group_ids = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    batch = RoutingBatch.from_arrays(
        counts.lengths,
        counts.counts,
        top_k=counts.top_k,
        routed_tokens=counts.routed_tokens,
        sample_ids=names if names is not None and len(set(names)) == len(names) else None,
        group_ids=group_ids,
        uncovered="scale" if counts.coverage.uncovered == "scale" else "ignore",
    )
    return Recording(batch, counts.coverage)


def json_lines(paths: Sequence[files.PathLike], *, progress: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of JSON Lines files with where they stand, one line in memory at a time.

    Parameters
    ----------
    paths : sequence of path-like
        Read one after another; empty lines are skipped.
    progress : bool
        Show a bar of bytes read.

    Yields
    ------
    where : str
        ``"file:line"``.
    value : dict

    Raises
    ------
    InvalidInputError
        If a file is missing, or a line is no JSON object.
    """
    from tqdm.auto import tqdm

    sources = [Path(path) for path in paths]
    for source in sources:
        if not source.is_file():
            raise InvalidInputError(f"{source} is no file")
    total = sum(source.stat().st_size for source in sources)
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=not progress) as bar:
        for source in sources:
            with source.open("rb") as stream:
                for number, line in enumerate(stream, 1):
                    bar.update(len(line))
                    if not line.strip():
                        continue
                    where = f"{source.name}:{number}"
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise InvalidInputError(f"{where} is not JSON (truncated?): {error}") from error
                    if not isinstance(value, dict):
                        raise InvalidInputError(f"{where} is a JSON {type(value).__name__}; an object was expected")
                    yield where, value


def tokens_of(value: Mapping[str, Any], what: str) -> int:
    """Tokens of a sample described by a JSON object.

    ``length`` or ``num_tokens``; else prompt and response from
    ``prompt_token_ids`` and ``token_ids``, or ``prompt_tokens`` and ``completion_tokens``.

    Raises
    ------
    InvalidInputError
        If none of these is there, or it is no positive integer.
    """
    for key in ("length", "num_tokens"):
        if key in value:
            return _positive(value[key], f"{what}: {key}")
    if isinstance(value.get("prompt_token_ids"), list) and isinstance(value.get("token_ids"), list):
        return _positive(len(value["prompt_token_ids"]) + len(value["token_ids"]), f"{what}: tokens")
    if "prompt_tokens" in value and "completion_tokens" in value:
        prompt = _positive(value["prompt_tokens"], f"{what}: prompt_tokens", least=0)
        return prompt + _positive(value["completion_tokens"], f"{what}: completion_tokens", least=0)
    raise InvalidInputError(
        f"{what}: its length is unknown; give length, num_tokens, prompt_token_ids and token_ids, or prompt_tokens "
        "and completion_tokens"
    )


def _positive(value: Any, what: str, *, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInputError(f"{what} is {value!r}; it must be an integer of at least {least}")
    return value


def json_samples(
    lines: Iterable[tuple[str, dict[str, Any]]],
    decode: Callable[[Any, str], AnyArray],
) -> Iterator[SampleRoutes]:
    """Samples of JSON objects: ``routed_experts`` or ``segments``, a length, optional names.

    ``segments`` is a list of ``{"start": first token, "routed_experts": payload}``
    in the order of the turns. ``sample_id`` (or ``id``, ``request_id``) names the
    sample, ``group_id`` (or ``uid``) its prompt group.
    """
    for where, value in lines:
        name = _first(value, "sample_id", "id", "request_id")
        what = where if name is None else f"{where} ({name})"
        if "segments" in value:
            if not isinstance(value["segments"], list) or "routed_experts" in value:
                raise InvalidInputError(f"{what}: segments must be a list, and stand instead of routed_experts")
            parts = []
            for k, part in enumerate(value["segments"]):
                if not isinstance(part, dict) or "routed_experts" not in part or "start" not in part:
                    raise InvalidInputError(f"{what}: segment {k} must have start and routed_experts")
                start = _positive(part["start"], f"{what}, segment {k}: start", least=0)
                parts.append(Segment(start, decode(part["routed_experts"], f"{what}, segment {k}")))
            ids = join_segments(parts, what)
        elif value.get("routed_experts") is None:
            raise InvalidInputError(f"{what}: routed_experts is missing or null (a preempted request has none)")
        else:
            ids = decode(value["routed_experts"], what)
        yield SampleRoutes(ids, tokens_of(value, what), name, _first(value, "group_id", "uid"))


def _first(value: Mapping[str, Any], *keys: str) -> str | None:
    for key in keys:
        if value.get(key) is not None:
            return str(value[key])
    return None


def require_ranks(ranks: Iterable[int], num_ranks: int | None, what: str) -> None:
    """Refuse an incomplete set of ranks: loads summed over some ranks only are no loads.

    Raises
    ------
    InvalidInputError
        Naming the ranks that are missing or twice there.
    """
    found = sorted(ranks)
    wanted = num_ranks if num_ranks is not None else (found[-1] + 1 if found else 0)
    faults = Faults()
    missing = sorted(set(range(wanted)) - set(found))
    if missing:
        faults.add(f"{what}: {len(missing)} of {wanted} ranks are missing: {', '.join(map(str, missing[:8]))}")
    twice = sorted({rank for rank in found if found.count(rank) > 1})
    if twice:
        faults.add(f"{what}: rank {twice[0]} is there twice")
    beyond = [rank for rank in found if rank >= wanted]
    if beyond:
        faults.add(f"{what}: rank {beyond[0]} is outside 0..{wanted - 1}")
    faults.raise_if_any()


# --------------------------------------------------------------- plans, cells

Cells = list[list[list[int]]]

PADS: Final = ("none", "dummy")
"""How an exporter may fill what a plan leaves empty or uneven."""


def checked_plan(problem: Problem, plan: Plan) -> None:
    """Refuse a plan made for another problem, or with samples outside the grid.

    Raises
    ------
    InvalidInputError
        Naming what differs. Broken capacities are passed on: a consumer may check.
    """
    faults = Faults()
    if plan.problem_fingerprint != problem.fingerprint:
        faults.add("the plan belongs to another problem (fingerprints differ)")
    packing = plan.packing
    if packing.num_samples != problem.num_samples:
        faults.add(f"the plan has {packing.num_samples} samples, the problem {problem.num_samples}")
    else:
        for i in np.flatnonzero(packing.row_of_sample >= problem.num_rows).tolist():
            faults.add(f"sample {i}: row {packing.row_of_sample[i]} is outside 0..{problem.num_rows - 1}")
        for i in np.flatnonzero(packing.dp_slot_of_sample >= problem.dp_size).tolist():
            faults.add(f"sample {i}: DP slot {packing.dp_slot_of_sample[i]} is outside 0..{problem.dp_size - 1}")
    faults.raise_if_any("export")


def cells_of_plan(problem: Problem, plan: Plan) -> Cells:
    """Samples of every cell, ascending: ``cells[dp_slot][row]``."""
    checked_plan(problem, plan)
    cells: Cells = [[[] for _ in range(problem.num_rows)] for _ in range(problem.dp_size)]
    rows, slots = plan.packing.row_of_sample.tolist(), plan.packing.dp_slot_of_sample.tolist()
    for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        cells[slot][row].append(i)
    return cells


def padded_cells(
    problem: Problem, plan: Plan, *, pad: str, target: str, allow_empty: bool, equal_counts: bool
) -> tuple[Cells, int, tuple[str, ...]]:
    """Cells of a plan, filled with dummies where the target needs it and ``pad`` allows it.

    Dummies are numbered N, N + 1, ...; each is one token with loss weight 0.

    Parameters
    ----------
    problem, plan : Problem, Plan
    pad : {"none", "dummy"}
    target : str
        Name in messages.
    allow_empty : bool
        Whether the target can express an empty microbatch.
    equal_counts : bool
        Whether dummies should also make the numbers of samples per DP slot equal.

    Returns
    -------
    cells : list [D][R] of list of int
    num_dummies : int
    notes : tuple of str

    Raises
    ------
    InvalidInputError
        If a cell is empty and neither allowed nor padded, or a dummy does not fit.
    """
    if pad not in PADS:
        raise InvalidInputError(f"pad is {pad!r}; it must be one of {', '.join(PADS)}")
    cells = cells_of_plan(problem, plan)
    empty = [(row, slot) for slot, rows in enumerate(cells) for row, cell in enumerate(rows) if not cell]
    counts = [sum(map(len, rows)) for rows in cells]
    uneven = len(set(counts)) > 1
    if pad == "none":
        if empty and not allow_empty:
            shown = ", ".join(f"(row {row}, DP slot {slot})" for row, slot in empty[:4])
            raise InvalidInputError(
                f"{target} cannot express an empty microbatch, and {len(empty)} cells are empty: {shown}; export with "
                'pad="dummy", or plan with min_samples_per_cell=1',
                context="export",
            )
        notes: tuple[str, ...] = ()
        if uneven and equal_counts:
            notes = (
                f"DP slots hold {min(counts)} to {max(counts)} samples: a driver that splits the batch evenly cannot "
                'take that; export with pad="dummy", or plan with equal_samples_per_slot=True',
            )
        return cells, 0, notes
    aligned = -(-1 // problem.length_alignment) * problem.length_alignment
    used = [[int(problem.aligned_lengths[cell].sum()) for cell in rows] for rows in cells]
    next_id = problem.num_samples

    def add(slot: int, row: int) -> None:
        nonlocal next_id
        if used[slot][row] + aligned > problem.capacity:
            raise InvalidInputError(
                f"no room for a dummy in (row {row}, DP slot {slot}): {used[slot][row]} of {problem.capacity} tokens "
                "are taken; plan with equal_samples_per_slot=True or min_samples_per_cell=1 instead",
                context="export",
            )
        cells[slot][row].append(next_id)
        used[slot][row] += aligned
        next_id += 1

    if not allow_empty:
        for row, slot in empty:
            add(slot, row)
    if equal_counts:
        counts = [sum(map(len, rows)) for rows in cells]
        for slot, count in enumerate(counts):
            for _ in range(max(counts) - count):
                add(slot, int(np.argmin(used[slot])))
    added = next_id - problem.num_samples
    notes = (
        (f"{added} dummies (ids from {problem.num_samples}, one token each) must carry loss weight 0",) if added else ()
    )
    return cells, added, notes


def require_keys(content: Any, keys: Sequence[str], context: str) -> None:
    """Refuse what lacks a key, naming all that are missing.

    Raises
    ------
    InvalidInputError
        If a key is missing, or ``content`` is no mapping.
    """
    if not isinstance(content, Mapping):
        raise InvalidInputError(f"the content is {content!r:.40}; an object was expected", context=context)
    faults = Faults()
    for key in keys:
        if key not in content:
            faults.add(f"{key} is missing")
    faults.raise_if_any(context)


def listed(value: Any, what: str, *, depth: int) -> Any:
    """Integers in lists in lists, ``depth`` deep, as Python's own; ``depth`` 0 is an integer.

    Raises
    ------
    InvalidInputError
        Naming the place of what is no list, or no integer.
    """
    if hasattr(value, "tolist"):  # arrays and tensors
        value = value.tolist()
    if depth == 0:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInputError(f"{what} is {value!r:.40}; it must be an integer")
        return value
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidInputError(f"{what} is {value!r:.40}; it must be a list")
    return [listed(item, f"{what}[{k}]", depth=depth - 1) for k, item in enumerate(value)]


def by_layer_number(rows: Mapping[Any, Any], what: str) -> list[Any]:
    """Entries of a mapping from layer numbers, in ascending number.

    Raises
    ------
    InvalidInputError
        If a key is no layer number, or two keys are the same one.
    """
    numbers: dict[int, Any] = {}
    for key, row in rows.items():
        text = str(key)
        if isinstance(key, bool) or not text.isdecimal() or int(text) in numbers:
            raise InvalidInputError(f"{what} has the key {key!r:.40}; layer numbers, each once, were expected")
        numbers[int(text)] = row
    return [numbers[number] for number in sorted(numbers)]


def num_dummies_of(content: Mapping[str, Any]) -> int:
    """Dummies that an export was filled up with."""
    return _positive(content.get("num_dummies", 0), "num_dummies", least=0)


def packing_from_cells(
    problem: Problem, cells: Sequence[Sequence[Sequence[int]]], *, num_dummies: int = 0, what: str = "cells"
) -> Packing:
    """Turn someone's microbatches into a packing that can be scored.

    Parameters
    ----------
    problem : Problem
    cells : sequence [D][rows] of sequences of int
        Sample ids of each microbatch of each DP rank. Ranks may have different
        numbers of microbatches.
    num_dummies : int
        Ids N .. N + num_dummies - 1 are padding and left out.
    what : str
        Name of the cells in messages.

    Returns
    -------
    Packing
        Broken capacities and rows beyond the problem's are kept, for
        :func:`routepack_opt.score.violations` to list.

    Raises
    ------
    InvalidInputError
        If a sample is missing, repeated or unknown, or there are more DP ranks
        than the problem has slots: each is named.
    """
    cells = listed(cells, what, depth=3)
    faults = Faults()
    num_samples = problem.num_samples
    rows = np.full(num_samples, -1, dtype=np.int64)
    slots = np.full(num_samples, -1, dtype=np.int64)
    if len(cells) > problem.dp_size:
        faults.add(f"{len(cells)} DP ranks; the problem has dp_size {problem.dp_size}")
    for slot, microbatches in enumerate(cells):
        for row, cell in enumerate(microbatches):
            for i in cell:
                if not 0 <= i < num_samples:
                    if not num_samples <= i < num_samples + num_dummies:
                        faults.add(f"(row {row}, DP rank {slot}): sample {i} is outside 0..{num_samples - 1}")
                elif rows[i] >= 0:
                    faults.add(
                        f"{problem.batch.sample_name(i)} is in (row {rows[i]}, DP rank {slots[i]}) and again in (row "
                        f"{row}, DP rank {slot})"
                    )
                else:
                    rows[i], slots[i] = row, slot
    for i in np.flatnonzero(rows < 0).tolist():
        faults.add(f"{problem.batch.sample_name(i)} is in no microbatch")
    faults.raise_if_any("packing")
    return Packing.from_arrays(rows, slots)


def loss_fields(problem: Problem) -> dict[str, Any]:
    """How to weigh the loss: the statement, Σ t_i, and t_i of every sample (weight of its mean = t_i ÷ Σ t_i)."""
    return {
        "loss_normalization": LOSS_NOTE,
        "sample_weight_numerators": problem.lengths.tolist(),
        "sample_weight_denominator": int(problem.lengths.sum()),
    }
