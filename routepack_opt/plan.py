"""Decisions: which EP rank owns which expert (placement), which cell holds which sample (packing)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from pydantic import BaseModel, ConfigDict, ValidationError

from routepack_opt import files
from routepack_opt.arrays import IntArray, integer_array, plain_array, read_only
from routepack_opt.errors import Faults, InvalidInputError, InvalidPlanError
from routepack_opt.problem import Problem, most_rank_load, validation_faults

__all__ = ["Packing", "Placement", "Plan"]

SCHEMA = "routepack-plan/1"


@njit(cache=True, nogil=True)
def _sum_by_rank(
    counts: npt.NDArray[Any], rank_of_expert: npt.NDArray[Any], out: npt.NDArray[Any], start: int, stop: int
) -> None:
    """out[i, l, p] = Σ_{e on p} counts[i, l, e] for samples start..stop."""
    _, num_layers, num_experts = counts.shape
    for i in range(start, stop):
        for layer in range(num_layers):
            for expert in range(num_experts):
                out[i, layer, rank_of_expert[layer, expert]] += counts[i, layer, expert]


@dataclass(frozen=True, eq=False)
class Placement:
    """Expert placement: per layer, a permutation of logical experts onto physical expert slots.

    Attributes
    ----------
    slot_of_expert : ndarray of int64, shape [L, E]
        π_l(e): physical slot of logical expert e. Slot s belongs to EP rank s // (E / P).
    ep_size : int
        P.
    """

    slot_of_expert: IntArray
    ep_size: int
    _checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not self._checked:
            raise TypeError("use Placement.from_slots(...), which validates")

    @classmethod
    def from_slots(cls, slot_of_expert: npt.ArrayLike, *, ep_size: int) -> Placement:
        """Validate slots.

        Parameters
        ----------
        slot_of_expert : array-like of int, shape [L, E]
        ep_size : int
            P; divides E.

        Raises
        ------
        InvalidInputError
            If a layer is no permutation of 0..E−1, naming slots missing and taken twice.
        """
        faults = Faults()
        value = plain_array(slot_of_expert, "slot_of_expert", faults)
        faults.raise_if_any("placement")
        assert value is not None
        if value.size == 0 and value.ndim == 1:
            value = value.reshape(0, 0).astype(np.int64)
        array = integer_array(value, "slot_of_expert", faults, ndim=2, element="layer")
        if isinstance(ep_size, bool) or not isinstance(ep_size, int | np.integer) or ep_size < 1:
            faults.add(f"ep_size is {ep_size!r}; it must be an integer of at least 1")
        faults.raise_if_any("placement")
        assert array is not None
        num_experts = array.shape[1]
        if num_experts % ep_size:
            faults.add(f"{num_experts} expert slots are not divisible by ep_size {ep_size}")
        wanted = np.arange(num_experts)
        for layer in np.flatnonzero((np.sort(array, axis=1) != wanted).any(axis=1)):
            row = array[layer]
            outside = row[(row < 0) | (row >= num_experts)]
            inside = row[(row >= 0) & (row < num_experts)]
            twice = np.flatnonzero(np.bincount(inside, minlength=num_experts) > 1)
            parts = []
            if len(outside):
                parts.append(f"slot {outside[0]} is outside 0..{num_experts - 1}")
            if len(twice):
                parts.append(f"slot {twice[0]} is taken {int((row == twice[0]).sum())} times")
            faults.add(f"layer {layer}: {'; '.join(parts)}; it must be a permutation of 0..{num_experts - 1}")
        faults.raise_if_any("placement")
        return cls(read_only(array), int(ep_size), _checked=True)

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, *, ep_size: int) -> Placement:
        """The identity: rank p owns experts p·E/P .. (p+1)·E/P − 1, as most trainers place them."""
        for size in (num_layers, num_experts):
            if isinstance(size, bool) or not isinstance(size, int | np.integer):
                raise InvalidInputError(f"{num_layers} layers x {num_experts} experts: sizes must be integers")
        if min(num_layers, num_experts) < 0:
            raise InvalidInputError(f"{num_layers} layers x {num_experts} experts: sizes must not be negative")
        return cls.from_slots(
            np.broadcast_to(np.arange(num_experts, dtype=np.int64), (num_layers, num_experts)),
            ep_size=ep_size,
        )

    @classmethod
    def from_rank_of_expert(cls, rank_of_expert: npt.ArrayLike, *, ep_size: int) -> Placement:
        """Build slots from ranks; inside a rank, slots follow the expert index.

        Parameters
        ----------
        rank_of_expert : array-like of int, shape [L, E]
            EP rank of each logical expert, E / P experts a rank.
        ep_size : int
            P.

        Raises
        ------
        InvalidInputError
            If a rank is out of range or does not own exactly E / P experts.
        """
        faults = Faults()
        if isinstance(ep_size, bool) or not isinstance(ep_size, int | np.integer) or ep_size < 1:
            faults.add(f"ep_size is {ep_size!r}; it must be an integer of at least 1")
        ranks = integer_array(rank_of_expert, "rank_of_expert", faults, ndim=2, element="layer")
        faults.raise_if_any("placement")
        assert ranks is not None
        num_layers, num_experts = ranks.shape
        if num_experts % ep_size:
            faults.add(f"{num_experts} experts are not divisible by ep_size {ep_size}")
        for layer, expert in np.argwhere((ranks < 0) | (ranks >= ep_size))[:5]:
            faults.add(f"layer {layer}, expert {expert}: rank {ranks[layer, expert]} is outside 0..{ep_size - 1}")
        faults.raise_if_any("placement")
        for layer in range(num_layers):
            owned = np.bincount(ranks[layer], minlength=ep_size)
            for rank in np.flatnonzero(owned != num_experts // ep_size):
                faults.add(
                    f"layer {layer}, rank {rank}: owns {owned[rank]} experts; every rank owns exactly "
                    f"{num_experts // ep_size}"
                )
        faults.raise_if_any("placement")
        expert_of_slot = np.argsort(ranks, axis=1, kind="stable")
        slots = np.empty_like(ranks)
        np.put_along_axis(
            slots,
            expert_of_slot,
            np.broadcast_to(np.arange(num_experts, dtype=np.int64), ranks.shape),
            axis=1,
        )
        return cls.from_slots(slots, ep_size=ep_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.slot_of_expert.shape[0])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.slot_of_expert.shape[1])

    @property
    def experts_per_rank(self) -> int:
        """S = E / P, expert slots of a rank."""
        return self.num_experts // self.ep_size

    @cached_property
    def rank_of_expert(self) -> IntArray:
        """EP rank that owns each logical expert, int64 [L, E]."""
        return read_only(self.slot_of_expert // max(1, self.experts_per_rank))

    @cached_property
    def expert_of_slot(self) -> IntArray:
        """Logical expert in each physical slot (physical → logical map), int64 [L, E]."""
        experts = np.empty_like(self.slot_of_expert)
        order = np.broadcast_to(np.arange(self.num_experts, dtype=np.int64), self.slot_of_expert.shape)
        np.put_along_axis(experts, self.slot_of_expert, order, axis=1)
        return read_only(experts)

    def inverse(self) -> Placement:
        """The placement that undoes this one: slots and experts change roles."""
        return Placement.from_slots(self.expert_of_slot, ep_size=self.ep_size)

    def remap(self, ids: npt.ArrayLike) -> npt.NDArray[Any]:
        """Turn recorded logical expert ids into physical slots, for replay in the planned layout.

        Parameters
        ----------
        ids : array-like of int, shape [..., L, K]
            Routed logical experts. Rows of −1 (no route recorded) stay −1.

        Returns
        -------
        ndarray, same shape; the input's dtype if it can hold slot E − 1 (and −1 where used), else int32

        Raises
        ------
        InvalidInputError
            If an id is neither −1 nor in 0..E−1, or the layer axis is not L.
        """
        array = np.asarray(ids)
        if array.dtype.kind not in "iu" or array.ndim < 2 or array.shape[-2] != self.num_layers:
            raise InvalidInputError(
                f"ids have dtype {array.dtype} and shape {array.shape}; integers [..., {self.num_layers}, K] needed",
                context="remapping routed ids",
            )
        wide = array.astype(np.int64)
        outside = (wide < -1) | (wide >= self.num_experts) | ((wide < 0) & (array > 0))
        if outside.any():
            place = tuple(int(k) for k in np.argwhere(outside)[0])
            raise InvalidInputError(
                f"id {wide[place]} at {place} is neither -1 nor in 0..{self.num_experts - 1}",
                context="remapping routed ids",
            )
        table = np.concatenate([self.slot_of_expert, np.full((self.num_layers, 1), -1)], axis=1)
        layers = np.arange(self.num_layers)[:, None]
        dtype = array.dtype if np.iinfo(array.dtype).max >= self.num_experts - 1 else np.dtype(np.int32)
        return table[layers, wide].astype(dtype)

    def rank_load(self, problem: Problem) -> npt.NDArray[Any]:
        """Routed tokens each sample lands on each rank, [N, L, P], uint16 where that always fits, else int32.

        The result is cached for the last problem asked about.
        """
        cached = self.__dict__.get("_rank_load")
        if cached is not None and cached[0] is problem:
            return cached[1]  # type: ignore[no-any-return]
        faults = placement_faults(problem, self)
        if faults:
            raise InvalidInputError(faults, context="placement")
        most = int(problem.batch.routed_tokens.max())
        largest = most_rank_load(problem.num_experts, problem.ep_size, problem.top_k, most) if self.num_layers else 0
        dtype = np.uint16 if largest < 2**16 else np.int32
        load = np.zeros((problem.num_samples, self.num_layers, self.ep_size), dtype=dtype)
        if self.num_layers:
            for start in range(0, problem.num_samples, 64):
                stop = min(start + 64, problem.num_samples)
                _sum_by_rank(problem.counts, self.rank_of_expert, load, start, stop)
        load.setflags(write=False)
        self.__dict__["_rank_load"] = (problem, load)
        return load

    def expert_work(self, problem: Problem) -> IntArray:
        """Expert work of each sample on each rank, int64 [N, L, P], work units."""
        return self.rank_load(problem).astype(np.int64) * problem.expert_unit

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        return self.ep_size == other.ep_size and np.array_equal(self.slot_of_expert, other.slot_of_expert)

    def __hash__(self) -> int:
        return hash((self.ep_size, self.slot_of_expert.tobytes()))

    def __repr__(self) -> str:
        moved = int((self.rank_of_expert != np.arange(self.num_experts) // max(1, self.experts_per_rank)).sum())
        total = self.slot_of_expert.size
        return (
            f"Placement(L {self.num_layers}, E {self.num_experts}, P {self.ep_size}, "
            f"{moved} of {total} experts off their contiguous rank)"
        )


@dataclass(frozen=True, eq=False)
class Packing:
    """Data packing: the cell of every sample.

    Attributes
    ----------
    row_of_sample, dp_slot_of_sample : ndarray of int64, shape [N]
        Row r and DP slot d of the cell that holds each sample.
    """

    row_of_sample: IntArray
    dp_slot_of_sample: IntArray
    _checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not self._checked:
            raise TypeError("use Packing.from_arrays(...), which validates")

    @classmethod
    def from_arrays(cls, row_of_sample: npt.ArrayLike, dp_slot_of_sample: npt.ArrayLike) -> Packing:
        """Validate and freeze; whether the cells hold their samples is for :func:`score.violations` to say.

        Raises
        ------
        InvalidInputError
            If the arrays are no integers, differ in length, or hold negative numbers.
        """
        faults = Faults()
        rows = integer_array(row_of_sample, "row_of_sample", faults, ndim=1)
        slots = integer_array(dp_slot_of_sample, "dp_slot_of_sample", faults, ndim=1)
        faults.raise_if_any("packing")
        assert rows is not None
        assert slots is not None
        if len(rows) != len(slots):
            faults.add(f"row_of_sample has {len(rows)} entries, dp_slot_of_sample {len(slots)}")
        for name, array in (("row", rows), ("DP slot", slots)):
            for i in np.flatnonzero(array < 0)[:5]:
                faults.add(f"sample {i}: {name} {array[i]} is negative")
        faults.raise_if_any("packing")
        return cls(read_only(rows), read_only(slots), _checked=True)

    @classmethod
    def from_cells(cls, cells: npt.ArrayLike, *, dp_size: int) -> Packing:
        """Build from flat cell numbers r · D + d, int [N]."""
        faults = Faults()
        if isinstance(dp_size, bool) or not isinstance(dp_size, int | np.integer) or dp_size < 1:
            faults.add(f"dp_size is {dp_size!r}; it must be an integer of at least 1")
        flat = integer_array(cells, "cells", faults, ndim=1)
        faults.raise_if_any("packing")
        assert flat is not None
        return cls.from_arrays(flat // dp_size, flat % dp_size)

    @classmethod
    def one_sample_per_row(cls, problem: Problem) -> Packing:
        """Sample i in row i on DP slot 0: the fixed micro-steps of :meth:`Problem.from_window`.

        Raises
        ------
        InvalidInputError
            If the problem has fewer rows than samples.
        """
        if problem.num_rows < problem.num_samples:
            raise InvalidInputError(
                f"{problem.num_samples} samples for {problem.num_rows} rows; one row a sample needs as many"
            )
        return cls.from_arrays(np.arange(problem.num_samples), np.zeros(problem.num_samples, dtype=np.int64))

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.row_of_sample)

    def cells(self, problem: Problem) -> IntArray:
        """Flat cell r · D + d of each sample, int64 [N]."""
        return self.row_of_sample * problem.dp_size + self.dp_slot_of_sample

    def samples_of_cell(self, row: int, dp_slot: int) -> IntArray:
        """Samples of one cell, ascending, int64."""
        return np.flatnonzero((self.row_of_sample == row) & (self.dp_slot_of_sample == dp_slot))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Packing):
            return NotImplemented
        return np.array_equal(self.row_of_sample, other.row_of_sample) and np.array_equal(
            self.dp_slot_of_sample, other.dp_slot_of_sample
        )

    def __hash__(self) -> int:
        return hash((self.row_of_sample.tobytes(), self.dp_slot_of_sample.tobytes()))

    def __repr__(self) -> str:
        cells = len(np.unique(np.stack([self.row_of_sample, self.dp_slot_of_sample]), axis=1).T)
        rows = int(self.row_of_sample.max()) + 1 if self.num_samples else 0
        return f"Packing(N {self.num_samples} in {cells} cells, rows 0..{rows - 1})"


@dataclass(frozen=True)
class Plan:
    """A placement and a packing of one problem.

    Attributes
    ----------
    placement : Placement
    packing : Packing
    num_rows : int
        R the plan was made for.
    problem_fingerprint : str
        Which problem it belongs to.
    """

    placement: Placement
    packing: Packing
    num_rows: int
    problem_fingerprint: str

    @classmethod
    def of(cls, problem: Problem, placement: Placement, packing: Packing) -> Plan:
        """Join two decisions made for ``problem``."""
        return cls(placement, packing, problem.num_rows, problem.fingerprint)

    @classmethod
    def from_arrays(
        cls,
        problem: Problem,
        row_of_sample: npt.ArrayLike,
        dp_slot_of_sample: npt.ArrayLike,
        slot_of_expert: npt.ArrayLike | None = None,
    ) -> Plan:
        """Make a plan someone else computed scorable.

        Parameters
        ----------
        problem : Problem
        row_of_sample, dp_slot_of_sample : array-like of int, shape [N]
        slot_of_expert : array-like of int, shape [L, E], optional
            Default: contiguous.

        Raises
        ------
        InvalidPlanError
            With every fault of either decision. Broken capacities are not faults
            here: :func:`routepack_opt.score.violations` lists them.
        """
        faults = Faults()
        packing = placement = None
        try:
            packing = Packing.from_arrays(row_of_sample, dp_slot_of_sample)
        except InvalidInputError as error:
            faults.extend(error.faults)
        try:
            if slot_of_expert is None:
                placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
            else:
                placement = Placement.from_slots(slot_of_expert, ep_size=problem.ep_size)
        except InvalidInputError as error:
            faults.extend(error.faults)
        if placement is not None:
            faults.extend(placement_faults(problem, placement))
        if packing is not None and packing.num_samples != problem.num_samples:
            faults.add(f"the packing has {packing.num_samples} samples, the problem {problem.num_samples}")
        faults.raise_if_any("plan", error=InvalidPlanError)
        assert packing is not None
        assert placement is not None
        return cls.of(problem, placement, packing)

    def save(self, path: files.PathLike) -> None:
        """Write the exchange format ``routepack-plan/1`` (JSON, integers only) atomically."""
        files.write_json(path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """The exchange format as a JSON object."""
        return {
            "schema": SCHEMA,
            "problem": self.problem_fingerprint,
            "num_rows": self.num_rows,
            "slot_of_expert": self.placement.slot_of_expert.tolist(),
            "row_of_sample": self.packing.row_of_sample.tolist(),
            "dp_slot_of_sample": self.packing.dp_slot_of_sample.tolist(),
        }

    @classmethod
    def load(cls, path: files.PathLike, problem: Problem) -> Plan:
        """Read a plan of ``problem``.

        Raises
        ------
        InvalidInputError
            If the file is damaged, or belongs to a problem of another fingerprint or R.
        InvalidPlanError
            If its decisions cannot be a plan of the problem (no permutation, wrong N).
        """
        return cls.from_dict(files.read_json(path, what="plan"), problem, context=f"plan {path}")

    @classmethod
    def from_dict(cls, value: Any, problem: Problem, *, context: str = "plan") -> Plan:
        """Read the exchange format from a JSON object; see :meth:`load`."""
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            found = value.get("schema") if isinstance(value, dict) else type(value).__name__
            raise InvalidInputError(f"schema is {found!r}; this reads {SCHEMA!r}", context=context)
        try:
            raw = _PlanFile.model_validate({key: item for key, item in value.items() if key != "schema"})
        except ValidationError as error:
            raise InvalidInputError(validation_faults(error, "plan"), context=context) from error
        faults = Faults()
        if raw.problem != problem.fingerprint:
            faults.add(
                f"the plan belongs to the problem {raw.problem}, this problem is {problem.fingerprint}: lengths, "
                "counts, capacity, rows, cluster or cost differ"
            )
        if raw.num_rows != problem.num_rows:
            faults.add(f"the plan has {raw.num_rows} rows, the problem {problem.num_rows}")
        faults.raise_if_any(context)
        try:
            return cls.from_arrays(problem, raw.row_of_sample, raw.dp_slot_of_sample, raw.slot_of_expert)
        except InvalidPlanError as error:
            raise InvalidPlanError(error.faults, context=context) from error

    def __repr__(self) -> str:
        return f"Plan(R {self.num_rows}, {self.placement!r}, {self.packing!r})"


class _PlanFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    problem: str
    num_rows: int
    slot_of_expert: list[list[int]]
    row_of_sample: list[int]
    dp_slot_of_sample: list[int]


def placement_faults(problem: Problem, placement: Placement) -> list[str]:
    """Why a placement does not fit a problem; empty if it does."""
    faults = []
    if placement.ep_size != problem.ep_size:
        faults.append(f"the placement is for ep_size {placement.ep_size}, the problem has {problem.ep_size}")
    if (placement.num_layers, placement.num_experts) != (problem.num_layers, problem.num_experts):
        faults.append(
            f"the placement has {placement.num_layers} layers x {placement.num_experts} experts, the problem "
            f"{problem.num_layers} x {problem.num_experts}"
        )
    return faults
