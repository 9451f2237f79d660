"""What rollout recorded: lengths and routed-token counts of the samples of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, integer_array, plain_array, read_only
from routepack_opt.errors import Faults

__all__ = ["MAX_LENGTH", "RoutingBatch"]

CountArray = npt.NDArray[np.unsignedinteger[Any]]

MAX_LENGTH = 2**31 - 1


@njit(cache=True, nogil=True)
def _row_sums_differ(
    counts: npt.NDArray[Any], expected: npt.NDArray[Any], limit: npt.NDArray[Any], most: int
) -> tuple[npt.NDArray[Any], int]:
    """Rows [i, l] whose sum is not ``expected[i]`` or whose largest entry passes ``limit[i]``."""
    found = np.zeros((most, 4), dtype=np.int64)
    total = 0
    num_samples, num_layers, num_experts = counts.shape
    for i in range(num_samples):
        for layer in range(num_layers):
            row = np.int64(0)
            largest = np.int64(0)
            for expert in range(num_experts):
                count = np.int64(counts[i, layer, expert])
                row += count
                largest = max(largest, count)
            if row != expected[i] or largest > limit[i]:
                if total < most:
                    found[total, 0] = i
                    found[total, 1] = layer
                    found[total, 2] = row
                    found[total, 3] = largest
                total += 1
    return found, total


def _smallest_unsigned(counts: npt.NDArray[Any]) -> CountArray:
    largest = int(counts.max()) if counts.size else 0
    dtype = np.min_scalar_type(largest) if largest > 255 else np.dtype(np.uint16)
    return counts.astype(dtype)


@dataclass(frozen=True, eq=False)
class RoutingBatch:
    """Samples of one optimizer step with their recorded routing.

    Build one with :meth:`from_arrays`, which validates; every array is read-only.

    Attributes
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens of each sample, at least 1.
    counts : ndarray of unsigned int, shape [N, L, E]
        ``counts[i, l, e]``: tokens of sample i that MoE layer l routed to logical
        expert e. L = 0 when no routing was recorded. Unsigned input is viewed,
        not copied (do not change it afterwards); signed input is copied into
        the smallest unsigned type.
    routed_tokens : ndarray of int64, shape [N]
        Tokens whose routing was recorded: Σ_e counts[i, l, e] = top_k · routed_tokens[i].
    top_k : int
        Experts each token is routed to; 0 when L = 0.
    sample_ids : tuple of str or None
        Names used in messages instead of positions.
    group_ids : ndarray of int64, shape [N], or None
        Prompt group of each sample.
    uncovered : str
        What was done with tokens whose routing is missing: ``"ignore"`` or ``"scale"``.
    """

    lengths: IntArray
    counts: CountArray
    routed_tokens: IntArray
    top_k: int
    sample_ids: tuple[str, ...] | None = None
    group_ids: IntArray | None = None
    uncovered: str = "ignore"
    _checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not self._checked:
            raise TypeError("use RoutingBatch.from_arrays(...), which validates")

    @classmethod
    def from_arrays(
        cls,
        lengths: npt.ArrayLike,
        counts: npt.ArrayLike | None = None,
        *,
        top_k: int | None = None,
        routed_tokens: npt.ArrayLike | None = None,
        sample_ids: Sequence[str] | None = None,
        group_ids: npt.ArrayLike | None = None,
        uncovered: str = "ignore",
    ) -> RoutingBatch:
        """Validate and freeze recorded arrays.

        Parameters
        ----------
        lengths : array-like of int, shape [N]
            Tokens of each sample, 1 ≤ t < 2³¹.
        counts : array-like of int, shape [N, L, E], optional
            Routed tokens per sample, layer and expert. Without it only attention can be planned.
        top_k : int, optional
            Experts per token; read off the counts when missing.
        routed_tokens : array-like of int, shape [N], optional
            Recorded tokens, 0 < M_i ≤ t_i. Read off the counts when ``top_k`` is
            given, else ``lengths``.
        sample_ids : sequence of str, optional
            Unique names of the samples.
        group_ids : array-like of int, shape [N], optional
            Prompt group of each sample.
        uncovered : {"ignore", "scale"}
            Recorded, not applied: how tokens without a route were treated when
            the counts were made.

        Returns
        -------
        RoutingBatch

        Raises
        ------
        InvalidInputError
            With every fault found: N = 0, lengths that are no positive integers,
            counts that are negative or whose rows do not sum to top_k · M_i, ...
        """
        faults = Faults()
        length_array = integer_array(lengths, "lengths", faults, ndim=1)
        if length_array is None:
            faults.raise_if_any("routing batch")
            raise AssertionError("unreachable")
        num_samples = len(length_array)
        names = _names(sample_ids, num_samples, faults)

        def name(i: int) -> str:
            return f"sample {i}" if names is None else f"sample {i} ({names[i]})"

        if num_samples == 0:
            faults.add("lengths is empty: N = 0; a problem needs at least one sample")
        for i in np.flatnonzero(length_array < 1):
            faults.add(f"{name(int(i))}: length {length_array[i]}; it must be at least 1")
        for i in np.flatnonzero(length_array > MAX_LENGTH):
            faults.add(f"{name(int(i))}: length {length_array[i]} is above the limit {MAX_LENGTH}")
        groups = None
        if group_ids is not None:
            groups = integer_array(group_ids, "group_ids", faults, ndim=1)
            if groups is not None and len(groups) != num_samples:
                faults.add(f"group_ids has {len(groups)} entries for {num_samples} samples")
        if uncovered not in ("ignore", "scale"):
            faults.add(f"uncovered is {uncovered!r}; it must be 'ignore' or 'scale'")
        if top_k is not None and not isinstance(top_k, bool) and isinstance(top_k, int) and top_k > MAX_LENGTH:
            faults.add(f"top_k is {top_k}, above the limit {MAX_LENGTH}")
            top_k = None
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1):
            faults.add(f"top_k is {top_k!r}; it must be an integer of at least 1")
            top_k = None
        routed = None
        if routed_tokens is not None:
            routed = integer_array(routed_tokens, "routed_tokens", faults, ndim=1)
            if routed is not None and len(routed) != num_samples:
                faults.add(f"routed_tokens has {len(routed)} entries for {num_samples} samples")
                routed = None
        if counts is None:
            count_array: CountArray = np.zeros((num_samples, 0, 0), dtype=np.uint16)
            if top_k is not None:
                faults.add("top_k is given without counts")
            top_k = 0
        else:
            found = _count_array(counts, num_samples, name, faults)
            faults.raise_if_any("routing batch")
            assert found is not None
            count_array = found
        faults.raise_if_any("routing batch")
        if count_array.shape[1] and num_samples:
            first = count_array[:, 0, :].sum(axis=1, dtype=np.int64)
            if top_k is None:
                base = length_array if routed is None else routed
                ratio, rest = divmod(int(first[0]), max(1, int(base[0])))
                if rest or ratio < 1:
                    faults.add(
                        f"top_k is not given and cannot be read off the counts: {name(0)}, layer 0 sums to "
                        f"{int(first[0])}, which is no multiple of its {int(base[0])} routed tokens"
                    )
                    faults.raise_if_any("routing batch")
                top_k = ratio
            elif routed is None:
                routed = first // top_k
        if routed is None:
            routed = length_array.copy()
        assert top_k is not None
        for i in np.flatnonzero((routed < 1) | (routed > length_array)):
            faults.add(
                f"{name(int(i))}: {routed[i]} routed tokens; there must be at least 1 and at most its length "
                f"{length_array[i]}"
            )
        if count_array.shape[1]:
            if top_k > count_array.shape[2]:
                faults.add(f"top_k is {top_k}, above the {count_array.shape[2]} experts")
            rows, total = _row_sums_differ(count_array, routed * top_k, routed, 10)
            for i, layer, row, largest in rows[: min(total, 10)].tolist():
                if row != int(routed[i]) * top_k:
                    faults.add(
                        f"{name(i)}, layer {layer}: counts sum to {row}; top_k {top_k} x {routed[i]} routed tokens "
                        f"= {int(routed[i]) * top_k}"
                    )
                else:
                    faults.add(
                        f"{name(i)}, layer {layer}: one expert has {largest} tokens, above the {routed[i]} routed"
                    )
            if total > 10:
                faults.add(f"{total - 10} more rows of counts with a wrong sum or an entry above the routed tokens")
        faults.raise_if_any("routing batch")
        return cls(
            lengths=read_only(length_array),
            counts=read_only(count_array),
            routed_tokens=read_only(routed),
            top_k=int(top_k),
            sample_ids=names,
            group_ids=None if groups is None else read_only(groups),
            uncovered=uncovered,
            _checked=True,
        )

    @property
    def num_samples(self) -> int:
        """N, samples of the batch."""
        return len(self.lengths)

    @property
    def num_layers(self) -> int:
        """L, MoE layers; 0 without recorded routing."""
        return int(self.counts.shape[1])

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer; 0 without recorded routing."""
        return int(self.counts.shape[2])

    @property
    def num_tokens(self) -> int:
        """Σ t_i."""
        return int(self.lengths.sum())

    def sample_name(self, i: int) -> str:
        """Name of sample ``i`` for messages."""
        return f"sample {i}" if self.sample_ids is None else f"sample {i} ({self.sample_ids[i]})"

    def expert_load(self) -> IntArray:
        """Window load Σ_i counts[i, l, e], int64 [L, E], routed tokens."""
        load: IntArray = self.counts.sum(axis=0, dtype=np.int64)
        return load

    def take(self, indices: npt.ArrayLike) -> RoutingBatch:
        """Return the batch of the samples at ``indices`` (int [n], each in range, none twice).

        Raises
        ------
        InvalidInputError
            If an index is out of range or repeated, or none is given.
        """
        faults = Faults()
        index = integer_array(indices, "indices", faults, ndim=1, element="entry")
        if index is not None:
            for i in index[(index < 0) | (index >= self.num_samples)]:
                faults.add(f"index {i} is outside 0..{self.num_samples - 1}")
            if len(np.unique(index)) != len(index):
                faults.add("an index is repeated")
        faults.raise_if_any("taking samples")
        assert index is not None
        return RoutingBatch.from_arrays(
            self.lengths[index],
            self.counts[index] if self.num_layers else None,
            top_k=self.top_k if self.num_layers else None,
            routed_tokens=self.routed_tokens[index],
            sample_ids=None if self.sample_ids is None else [self.sample_ids[i] for i in index],
            group_ids=None if self.group_ids is None else self.group_ids[index],
            uncovered=self.uncovered,
        )

    def __repr__(self) -> str:
        covered = int(self.routed_tokens.sum()) / self.num_tokens
        routing = (
            f"L {self.num_layers}, E {self.num_experts}, top-{self.top_k}, {covered:.1%} of tokens routed"
            if self.num_layers
            else "no routing"
        )
        shortest, longest = int(self.lengths.min()), int(self.lengths.max())
        return (
            f"RoutingBatch(N {self.num_samples}, {self.num_tokens:,} tokens, lengths {shortest}..{longest}, {routing})"
        )


def _names(sample_ids: Sequence[str] | None, num_samples: int, faults: Faults) -> tuple[str, ...] | None:
    if sample_ids is None:
        return None
    if isinstance(sample_ids, str):
        faults.add(f"sample_ids is the string {sample_ids!r}; it must be a list of names")
        return None
    names = tuple(str(name) for name in sample_ids)
    for i, name in enumerate(names):
        if "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
            faults.add(f"sample_ids[{i}] is {name!r}; it must be text that a file can hold, without NUL")
    if len(names) != num_samples:
        faults.add(f"sample_ids has {len(names)} entries for {num_samples} samples")
        return None
    if len(set(names)) != len(names):
        seen: set[str] = set()
        repeated = next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        faults.add(f"sample_ids repeats {repeated!r}")
    return names


def _count_array(counts: npt.ArrayLike, num_samples: int, name: Any, faults: Faults) -> CountArray | None:
    array = plain_array(counts, "counts", faults)
    if array is None:
        return None
    if array.dtype == np.bool_ or array.dtype.kind not in "iu":
        faults.add(f"counts has dtype {array.dtype}; it must hold integers")
        return None
    if array.ndim != 3:
        faults.add(f"counts has {array.ndim} axes, shape {array.shape}; it must be [N, L, E]")
        return None
    if array.shape[0] != num_samples:
        faults.add(f"counts has {array.shape[0]} samples, lengths has {num_samples}")
        return None
    if array.shape[1] == 0 or array.shape[2] == 0:
        faults.add(
            f"counts has shape {array.shape}: no layers or no experts; leave counts out when there is no routing"
        )
        return None
    if array.size:
        if array.dtype.kind == "i" and array.min() < 0:
            i, layer, expert = np.argwhere(array < 0)[0]
            faults.add(f"{name(int(i))}, layer {layer}, expert {expert}: count {array[i, layer, expert]} is negative")
            return None
        if array.max() > MAX_LENGTH:
            i, layer, expert = np.argwhere(array > MAX_LENGTH)[0]
            faults.add(
                f"{name(int(i))}, layer {layer}, expert {expert}: count {array[i, layer, expert]} is above the limit "
                f"{MAX_LENGTH}"
            )
            return None
    if array.dtype.kind == "u":
        return array
    return _smallest_unsigned(array)
