"""Routed expert ids into routed-token counts, with a report of what was covered.

An inference engine records, for every forwarded token and MoE layer, the ids
of the K experts the token was routed to. Planning needs counts per sample,
layer and expert. :func:`count_routing` counts a whole batch of ids in memory,
:class:`RoutingCounter` takes one sample after another, so that a stream never
has to fit in memory. Both mask the placeholders engines write where they have
no route, refuse everything no router can produce, and say in a
:class:`Coverage` which tokens the counts stand for.

Rows without a route
    ===========  ==================================  ==============================
    name         row                                 written by
    ===========  ==================================  ==============================
    negative     -1 in every place of a layer        vLLM, NeMo-RL, tunix, SGLang
    zero         0 in every place of every layer     verl, prime-rl, older vLLM
    arange       0, 1, ..., K-1 in every layer       NeMo-RL and SkyRL tails
    ===========  ==================================  ==============================

    With K = 1, rows of zeros are genuine routes and are counted. An arange row
    could be genuine too; it is taken for a placeholder when a router without
    preference would write it with probability below 2⁻⁴⁰, that is when
    L · log2(E! / (E - K)!) ≥ 40.

One pass over the ids: each row is screened (largest id, first two ids of a
layer equal) and added to a flat uint16 histogram of the sample, which is
flushed before it can overflow. Only rows that fail the screen are looked at
closely. Distinctness beyond the first two ids of a layer is checked when a row
is looked at closely, or everywhere with ``check_distinct=True``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray, integer_array, read_only
from routepack_opt.batch import MAX_LENGTH
from routepack_opt.errors import Faults, InvalidInputError

__all__ = ["SENTINELS", "UNCOVERED", "Coverage", "RoutingCounter", "RoutingCounts", "count_routing", "layer_numbers"]

AnyArray = npt.NDArray[Any]

SENTINELS: Final = ("negative", "zero", "arange")
"""Kinds of rows that stand for "no route recorded"."""

UNCOVERED: Final = ("refuse", "scale", "ignore")
"""What to do with tokens that have no recorded route."""

_MOST_FAULTS = 16
_ARANGE_BITS = 40.0
# Kinds of faults the kernel reports.
_PARTIAL, _OUT_OF_RANGE, _EQUAL, _REPEATED, _ZERO_ROW, _NEGATIVE_ROW, _UNMAPPED, _EXCESS = range(8)
# Columns of the statistics array: rows present, masked as negative, zero and arange.
_PRESENT, _NEGATIVE, _ZERO, _ARANGE = range(4)


@njit(nogil=True)
def _largest(row: AnyArray) -> Any:
    top = row[0]
    for j in range(row.shape[0]):
        value = row[j]
        top = value if value > top else top
    return top


@njit(nogil=True)
def _add_packed(words: AnyArray, num_layers: int, top_k: int, width: Any, histogram: AnyArray, sign: Any) -> bool:
    """Add a row given as uint64 words of four 16-bit ids; true if two first ids of a layer are equal."""
    mask = np.uint64(0xFFFF)
    s16 = np.uint64(16)
    s32 = np.uint64(32)
    s48 = np.uint64(48)
    start = np.uint64(0)
    j = np.uint64(0)
    doubtful = False
    for _ in range(num_layers):
        word = words[j]
        doubtful |= ((word ^ (word >> s16)) & mask) == 0
        for _ in range(top_k >> 2):
            word = words[j]
            j += np.uint64(1)
            histogram[start + (word & mask)] += sign
            histogram[start + ((word >> s16) & mask)] += sign
            histogram[start + ((word >> s32) & mask)] += sign
            histogram[start + (word >> s48)] += sign
        start += width
    return doubtful


@njit(nogil=True)
def _add_eight(words: AnyArray, num_layers: int, width: Any, histogram: AnyArray, sign: Any) -> bool:
    """As :func:`_add_packed` for K = 8, unrolled."""
    mask = np.uint64(0xFFFF)
    s16 = np.uint64(16)
    s32 = np.uint64(32)
    s48 = np.uint64(48)
    two = np.uint64(2)
    start = np.uint64(0)
    j = np.uint64(0)
    doubtful = False
    for _ in range(num_layers):
        word = words[j]
        other = words[j + np.uint64(1)]
        j += two
        doubtful |= ((word ^ (word >> s16)) & mask) == 0
        histogram[start + (word & mask)] += sign
        histogram[start + ((word >> s16) & mask)] += sign
        histogram[start + ((word >> s32) & mask)] += sign
        histogram[start + (word >> s48)] += sign
        histogram[start + (other & mask)] += sign
        histogram[start + ((other >> s16) & mask)] += sign
        histogram[start + ((other >> s32) & mask)] += sign
        histogram[start + (other >> s48)] += sign
        start += width
    return doubtful


@njit(nogil=True)
def _add_plain(row: AnyArray, num_layers: int, top_k: int, width: Any, histogram: AnyArray, sign: Any) -> bool:
    """Add a row of unsigned ids; true if two first ids of a layer are equal."""
    start = np.uint64(0)
    j = np.uint64(0)
    doubtful = False
    for _ in range(num_layers):
        if top_k > 1:
            doubtful |= row[j] == row[j + np.uint64(1)]
        for _ in range(top_k):
            histogram[start + np.uint64(row[j])] += sign
            j += np.uint64(1)
        start += width
    return doubtful


@njit(nogil=True)
def _is_arange(row: AnyArray, num_layers: int, top_k: int) -> bool:
    for layer in range(num_layers):
        for k in range(top_k):
            if row[layer * top_k + k] != k:
                return False
    return True


@njit(nogil=True)
def _repeats(row: AnyArray, num_layers: int, top_k: int) -> bool:
    for layer in range(num_layers):
        first = layer * top_k
        for a in range(first + 1, first + top_k):
            for b in range(first, a):
                if row[a] == row[b]:
                    return True
    return False


@njit(nogil=True)
def _add_clean_rows(
    ids: AnyArray,
    words: AnyArray,
    packed: bool,
    start: int,
    stop: int,
    first_column: int,
    num_layers: int,
    top_k: int,
    width: Any,
    mask_arange: bool,
    check_distinct: bool,
    histogram: AnyArray,
) -> int:
    """Add rows from ``start`` on; the first row that needs a closer look, not added, or ``stop``."""
    one = np.uint16(1)
    minus_one = np.uint16(65535)
    columns = num_layers * top_k
    several = top_k > 1
    for t in range(start, stop):
        row = ids[t][first_column : first_column + columns]
        top = np.uint64(_largest(row))
        if top >= width or (top == 0 and several):
            return t
        if mask_arange and row[0] == 0 and _is_arange(row, num_layers, top_k):
            return t
        if check_distinct and _repeats(row, num_layers, top_k):
            return t
        if packed and top_k == 8:
            if _add_eight(words[t], num_layers, width, histogram, one):
                _add_eight(words[t], num_layers, width, histogram, minus_one)
                return t
        elif packed:
            if _add_packed(words[t], num_layers, top_k, width, histogram, one):
                _add_packed(words[t], num_layers, top_k, width, histogram, minus_one)
                return t
        elif _add_plain(row, num_layers, top_k, width, histogram, one):
            _add_plain(row, num_layers, top_k, width, histogram, minus_one)
            return t
    return stop


@njit(nogil=True)
def _note(faults: AnyArray, num_faults: int, kind: int, sample: int, row: int, layer: int, value: Any) -> int:
    if num_faults < faults.shape[0]:
        faults[num_faults, 0] = kind
        faults[num_faults, 1] = sample
        faults[num_faults, 2] = row
        faults[num_faults, 3] = layer
        faults[num_faults, 4] = np.int64(value)
    return num_faults + 1


@njit(nogil=True)
def _look_closely(
    row: AnyArray,
    at: int,
    sample: int,
    num_layers: int,
    top_k: int,
    num_slots: int,
    missing: Any,
    masks: AnyArray,
    histogram: AnyArray,
    rows_read: AnyArray,
    statistics: AnyArray,
    faults: AnyArray,
    num_faults: int,
) -> int:
    """Classify a row that failed the screen; count its genuine layers. ``missing`` is -1 as stored."""
    num_negative = 0
    num_zero = 0
    for j in range(row.shape[0]):
        if row[j] == missing and missing >= num_slots:
            num_negative += 1
        elif row[j] == 0:
            num_zero += 1
    if num_negative == row.shape[0]:
        if masks[0]:
            statistics[_NEGATIVE] += 1
            return num_faults
        return _note(faults, num_faults, _NEGATIVE_ROW, sample, at, 0, -1)
    if num_zero == row.shape[0] and top_k > 1:
        if masks[1]:
            statistics[_ZERO] += 1
            return num_faults
        return _note(faults, num_faults, _ZERO_ROW, sample, at, 0, 0)
    if masks[2] and _is_arange(row, num_layers, top_k):
        statistics[_ARANGE] += 1
        return num_faults
    before = num_faults
    for layer in range(num_layers):
        first = layer * top_k
        gaps = 0
        for j in range(first, first + top_k):
            if row[j] == missing and missing >= num_slots:
                gaps += 1
        if gaps == top_k:
            if not masks[0]:
                num_faults = _note(faults, num_faults, _NEGATIVE_ROW, sample, at, layer, -1)
            continue
        if gaps:
            num_faults = _note(faults, num_faults, _PARTIAL, sample, at, layer, gaps)
            continue
        for j in range(first, first + top_k):
            if row[j] >= num_slots:
                num_faults = _note(faults, num_faults, _OUT_OF_RANGE, sample, at, layer, row[j])
                break
        else:
            if top_k > 1:
                all_equal = True
                repeated = -1
                for a in range(first + 1, first + top_k):
                    if row[a] != row[first]:
                        all_equal = False
                    for b in range(first, a):
                        if row[a] == row[b]:
                            repeated = int(row[a])
                if all_equal:
                    num_faults = _note(faults, num_faults, _EQUAL, sample, at, layer, row[first])
                elif repeated >= 0:
                    num_faults = _note(faults, num_faults, _REPEATED, sample, at, layer, repeated)
    if num_faults > before:
        return num_faults
    any_gap = False
    for layer in range(num_layers):
        first = layer * top_k
        if row[first] == missing and missing >= num_slots:
            any_gap = True
            continue
        for j in range(first, first + top_k):
            histogram[layer * num_slots + np.int64(row[j])] += np.uint16(1)
        rows_read[layer] += 1
    if any_gap:
        statistics[_NEGATIVE] += 1
    return num_faults


@njit(nogil=True)
def _flush(
    histogram: AnyArray,
    expert_of_slot: AnyArray,
    sample: int,
    num_layers: int,
    num_slots: int,
    num_experts: int,
    counts: AnyArray,
    limit: Any,
    faults: AnyArray,
    num_faults: int,
) -> int:
    """Move the histogram into the counts [L, E] of a sample and clear it."""
    for layer in range(num_layers):
        for slot in range(num_slots):
            seen = np.int64(histogram[layer * num_slots + slot])
            if seen == 0:
                continue
            histogram[layer * num_slots + slot] = 0
            expert = slot
            if expert_of_slot.shape[0]:
                expert = expert_of_slot[layer, slot]
                if expert < 0:
                    num_faults = _note(faults, num_faults, _UNMAPPED, sample, -1, layer, slot)
                    continue
            total = np.int64(counts[layer, expert]) + seen
            if total > limit:
                num_faults = _note(faults, num_faults, _EXCESS, sample, -1, layer, expert)
            else:
                counts[layer, expert] = total
    return num_faults


@njit(cache=True, nogil=True)
def _count(
    ids: AnyArray,
    words: AnyArray,
    packed: bool,
    offsets: AnyArray,
    valid: AnyArray,
    first_column: int,
    num_layers: int,
    top_k: int,
    num_slots: int,
    num_experts: int,
    missing: Any,
    masks: AnyArray,
    check_distinct: bool,
    expert_of_slot: AnyArray,
    counts: AnyArray,
    limit: int,
    rows_read: AnyArray,
    statistics: AnyArray,
    faults: AnyArray,
) -> int:
    """Count every sample. ``ids`` unsigned [T, columns], a view with -1 stored as ``missing``."""
    num_faults = 0
    width = np.uint64(num_slots)
    columns = num_layers * top_k
    histogram = np.zeros(num_layers * num_slots, dtype=np.uint16)
    flush_every = 65535 // top_k
    use_valid = valid.shape[0] > 0
    for sample in range(offsets.shape[0] - 1):
        since_flush = 0
        clean = 0
        stop = offsets[sample + 1]
        t = offsets[sample]
        while t < stop:
            if use_valid and not valid[t]:
                t += 1
                continue
            if since_flush == flush_every:
                num_faults = _flush(
                    histogram,
                    expert_of_slot,
                    sample,
                    num_layers,
                    num_slots,
                    num_experts,
                    counts[sample],
                    limit,
                    faults,
                    num_faults,
                )
                since_flush = 0
            end = min(stop, t + flush_every - since_flush)
            if use_valid:
                run = t
                while run < end and valid[run]:
                    run += 1
                end = run
            reached = _add_clean_rows(
                ids,
                words,
                packed,
                t,
                end,
                first_column,
                num_layers,
                top_k,
                width,
                masks[2],
                check_distinct,
                histogram,
            )
            clean += reached - t
            since_flush += reached - t
            statistics[sample, _PRESENT] += reached - t
            t = reached
            if t < end:
                num_faults = _look_closely(
                    ids[t][first_column : first_column + columns],
                    t - offsets[sample],
                    sample,
                    num_layers,
                    top_k,
                    num_slots,
                    missing,
                    masks,
                    histogram,
                    rows_read[sample],
                    statistics[sample],
                    faults,
                    num_faults,
                )
                statistics[sample, _PRESENT] += 1
                since_flush += 1
                t += 1
        for layer in range(num_layers):
            rows_read[sample, layer] += clean
        num_faults = _flush(
            histogram,
            expert_of_slot,
            sample,
            num_layers,
            num_slots,
            num_experts,
            counts[sample],
            limit,
            faults,
            num_faults,
        )
    return num_faults


@njit(cache=True, nogil=True)
def _unbalanced(counts: AnyArray, rows_read: AnyArray, top_k: int) -> tuple[int, int, int]:
    """First sample and layer whose counts do not sum to ``top_k`` · rows read, and the sum; (-1, -1, 0) if none."""
    for i in range(counts.shape[0]):
        for layer in range(counts.shape[1]):
            total = np.int64(0)
            for expert in range(counts.shape[2]):
                total += np.int64(counts[i, layer, expert])
            if total != top_k * rows_read[i, layer]:
                return i, layer, int(total)
    return -1, -1, 0


@dataclass(frozen=True, eq=False, repr=False)
class Coverage:
    """What the rows of routed ids covered, per sample and layer.

    Attributes
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens of each sample.
    rows_expected : ndarray of int64, shape [N]
        Rows an engine can give: t - 1, since the last sampled token is never
        forwarded; t where that many were read.
    rows_present : ndarray of int64, shape [N]
        Rows given, placeholders included, rows marked invalid excluded.
    rows_read : ndarray of int64, shape [N, L]
        Rows counted.
    rows_padded : ndarray of int64, shape [N]
        Placeholder rows beyond the expected ones.
    rows_negative, rows_zero, rows_arange : ndarray of int64, shape [N]
        Placeholder rows by kind; a row with -1 in some layers only is
        counted in ``rows_negative``.
    uncovered : {"refuse", "scale", "ignore"}
        What was done about tokens without a route.
    sample_ids : tuple of str or None
        Names of the samples.
    """

    lengths: IntArray
    rows_expected: IntArray
    rows_present: IntArray
    rows_read: IntArray
    rows_padded: IntArray
    rows_negative: IntArray
    rows_zero: IntArray
    rows_arange: IntArray
    uncovered: str
    sample_ids: tuple[str, ...] | None = None

    @property
    def rows_missing(self) -> IntArray:
        """Expected rows that were not read, int64 [N, L]."""
        return self.rows_expected[:, None] - self.rows_read

    @property
    def fraction(self) -> float:
        """Rows read ÷ rows expected, over all samples and layers."""
        expected = int(self.rows_expected.sum()) * self.rows_read.shape[1]
        return int(self.rows_read.sum()) / expected if expected else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Totals over samples, for JSON."""
        incomplete = np.flatnonzero((self.rows_missing > 0).any(axis=1))
        return {
            "fraction": self.fraction,
            "num_samples": len(self.lengths),
            "num_tokens": int(self.lengths.sum()),
            "rows_expected": int(self.rows_expected.sum()),
            "rows_present": int(self.rows_present.sum()),
            "rows_read": int(self.rows_read.min(axis=1).sum()),
            "rows_missing": int(self.rows_missing.max(axis=1).sum()),
            "rows_padded": int(self.rows_padded.sum()),
            "rows_negative": int(self.rows_negative.sum()),
            "rows_zero": int(self.rows_zero.sum()),
            "rows_arange": int(self.rows_arange.sum()),
            "samples_with_missing_rows": len(incomplete),
            "uncovered": self.uncovered,
        }

    def __repr__(self) -> str:
        """Totals in one line, then the samples with missing rows."""
        total = self.to_dict()
        lines = [
            f"{total['num_samples']} samples, {total['num_tokens']:,} tokens: {total['rows_read']:,} of "
            f"{total['rows_expected']:,} expected rows read ({total['fraction']:.1%}), "
            f"{total['rows_missing']:,} missing, {total['rows_padded']:,} padded "
            f"(placeholders: {total['rows_negative']:,} of -1, {total['rows_zero']:,} of zeros, "
            f"{total['rows_arange']:,} of 0..K-1); uncovered tokens: {self.uncovered}"
        ]
        missing = self.rows_missing
        worst = np.argsort(-missing.max(axis=1), kind="stable")[:5]
        for i in worst[missing.max(axis=1)[worst] > 0]:
            name = f"sample {i}" if self.sample_ids is None else f"sample {i} ({self.sample_ids[i]})"
            least, most = int(missing[i].min()), int(missing[i].max())
            rows = f"{most}" if least == most else f"{least} to {most} (by layer)"
            lines.append(f"  {name}: {rows} of {self.rows_expected[i]} rows missing")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class RoutingCounts:
    """Counts of routed tokens and what they cover.

    Attributes
    ----------
    counts : ndarray of uint16 or uint32, shape [N, L, E]
        Tokens of sample i routed to logical expert e at layer l.
    lengths : ndarray of int64, shape [N]
        Tokens of each sample.
    routed_tokens : ndarray of int64, shape [N]
        M_i: tokens the counts stand for, Σ_e counts[i, l, e] = top_k · M_i.
    top_k : int
        Experts each token is routed to.
    coverage : Coverage
        Rows expected, read, missing and padded.
    """

    counts: npt.NDArray[np.unsignedinteger[Any]]
    lengths: IntArray
    routed_tokens: IntArray
    top_k: int
    coverage: Coverage


def count_routing(
    ids: npt.ArrayLike,
    offsets: npt.ArrayLike | None = None,
    *,
    num_experts: int,
    lengths: npt.ArrayLike | None = None,
    valid: npt.ArrayLike | None = None,
    moe_layers: Sequence[int] | None = None,
    physical_to_logical: npt.ArrayLike | None = None,
    uncovered: str = "refuse",
    sentinels: Sequence[str] = SENTINELS,
    check_distinct: bool = False,
    sample_ids: Sequence[str] | None = None,
) -> RoutingCounts:
    """Count routed expert ids of a whole batch.

    Parameters
    ----------
    ids : array-like of int, shape [T, layers, K]
        Expert ids, rows of all samples one after another; any integer dtype.
        The last axis is top_k.
    offsets : array-like of int, shape [N + 1], optional
        Rows ``offsets[i]:offsets[i + 1]`` belong to sample i. Default: one sample.
    num_experts : int
        E, logical experts of a layer.
    lengths : array-like of int, shape [N], optional
        Tokens of each sample; default: its rows that are not marked invalid.
    valid : array-like of bool, shape [T], optional
        Rows to read; others are treated as if they were not there.
    moe_layers : sequence of int, optional
        Positions on the layer axis that are MoE layers, for engines that
        record dense layers too. Default: all.
    physical_to_logical : array-like of int, shape [L, slots], optional
        Logical expert in each physical slot, when the engine balanced experts and
        recorded physical ids; -1 marks an unused slot.
    uncovered : {"refuse", "scale", "ignore"}
        What to do when more than the last token of a sample has no route.
        ``refuse`` raises. ``scale`` enlarges the counts of every sample that is not
        fully covered to its length, in integers by largest remainder (ties to the
        lower expert), so that M_i = t_i. ``ignore`` keeps the counts, and M_i says
        how many tokens they cover.
    sentinels : sequence of {"negative", "zero", "arange"}
        Kinds of placeholder rows that are masked; others are refused or, for
        ``arange``, counted.
    check_distinct : bool
        Compare all K ids of every row; several times the cost of counting.
    sample_ids : sequence of str, optional
        Names for messages and the coverage.

    Returns
    -------
    RoutingCounts

    Raises
    ------
    InvalidInputError
        With every fault found: an id outside 0..E-1 (-1 cast to uint8 is 255),
        K equal ids, -1 in part of a row, more routes than tokens, tokens without a
        route under ``uncovered="refuse"``, layers that cover different tokens, ...
    """
    array = _id_array(ids)
    faults = Faults()
    if offsets is None:
        bounds: IntArray | None = np.array([0, array.shape[0]], dtype=np.int64)
    else:
        bounds = integer_array(offsets, "offsets", faults, ndim=1, element="entry")
    if bounds is not None:
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != array.shape[0]:
            faults.add(f"offsets must run from 0 to the {array.shape[0]} rows of ids; got {_ends(bounds)}")
        elif (np.diff(bounds) < 0).any():
            i = int(np.flatnonzero(np.diff(bounds) < 0)[0])
            faults.add(f"offsets fall from {bounds[i]} to {bounds[i + 1]} at sample {i}")
    mask = None
    if valid is not None:
        mask = np.asarray(valid)
        if mask.dtype != np.bool_ or mask.shape != (array.shape[0],):
            faults.add(f"valid must be bool [{array.shape[0]}]; got {mask.dtype} {list(mask.shape)}")
    faults.raise_if_any("routed ids")
    assert bounds is not None
    reader = _Reader.create(
        array.shape, num_experts, moe_layers, physical_to_logical, uncovered, sentinels, check_distinct
    )
    num_samples = len(bounds) - 1
    token_lengths: IntArray | None = None
    if lengths is not None:
        token_lengths = integer_array(lengths, "lengths", faults, ndim=1)
        if token_lengths is not None and len(token_lengths) != num_samples:
            faults.add(f"lengths has {len(token_lengths)} entries for {num_samples} samples")
        faults.raise_if_any("routed ids")
    names = None if sample_ids is None else tuple(str(name) for name in sample_ids)
    if names is not None and len(names) != num_samples:
        raise InvalidInputError(f"sample_ids has {len(names)} entries for {num_samples} samples", context="routed ids")
    counts, rows_read, statistics = reader.count(array, bounds, mask, names)
    if token_lengths is None:
        token_lengths = statistics[:, _PRESENT].copy()
    return reader.finish(counts, rows_read, statistics, token_lengths, names)


class RoutingCounter:
    """Counts one sample after another; holds counts, never ids.

    The first sample fixes the number of layers and top_k.

    Parameters
    ----------
    num_experts, moe_layers, physical_to_logical, uncovered, sentinels, check_distinct
        As in :func:`count_routing`.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        moe_layers: Sequence[int] | None = None,
        physical_to_logical: npt.ArrayLike | None = None,
        uncovered: str = "refuse",
        sentinels: Sequence[str] = SENTINELS,
        check_distinct: bool = False,
    ) -> None:
        self._options = (
            num_experts,
            moe_layers,
            physical_to_logical,
            uncovered,
            tuple(sentinels),
            check_distinct,
        )
        _check_options(num_experts, uncovered, sentinels, check_distinct)
        self._reader: _Reader | None = None
        self._shape: tuple[int, int] | None = None
        self._counts: list[AnyArray] = []
        self._rows_read: list[IntArray] = []
        self._statistics: list[IntArray] = []
        self._lengths: list[int] = []
        self._names: list[str | None] = []

    @property
    def num_samples(self) -> int:
        """Samples counted so far."""
        return len(self._lengths)

    def add(
        self,
        ids: npt.ArrayLike,
        *,
        length: int,
        valid: npt.ArrayLike | None = None,
        sample_id: str | None = None,
    ) -> None:
        """Count one sample.

        Parameters
        ----------
        ids : array-like of int, shape [rows, layers, K]
            Routed ids of the sample, any integer dtype.
        length : int
            Tokens of the sample.
        valid : array-like of bool, shape [rows], optional
            Rows to read.
        sample_id : str, optional
            Name for messages.

        Raises
        ------
        InvalidInputError
            If the ids are refused; the sample is named, nothing was added.
        """
        name = f"sample {self.num_samples}" + ("" if sample_id is None else f" ({sample_id})")
        array = _id_array(ids, name)
        if isinstance(length, bool) or not isinstance(length, int | np.integer) or length < 1:
            raise InvalidInputError(f"{name}: length {length!r}; it must be an integer of at least 1")
        if length > MAX_LENGTH:
            raise InvalidInputError(f"{name}: length {length} is above the limit {MAX_LENGTH}")
        mask = None
        if valid is not None:
            mask = np.asarray(valid)
            if mask.dtype != np.bool_ or mask.shape != (array.shape[0],):
                raise InvalidInputError(
                    f"{name}: valid must be bool [{array.shape[0]}]; got {mask.dtype} {list(mask.shape)}"
                )
        shape = (int(array.shape[1]), int(array.shape[2]))
        if self._reader is None:
            self._reader = _Reader.create(array.shape, *self._options)
            self._shape = shape
        elif shape != self._shape:
            assert self._shape is not None
            raise InvalidInputError(
                f"{name}: ids have {shape[0]} layers and top-{shape[1]}; the samples before it have {self._shape[0]} "
                f"layers and top-{self._shape[1]}"
            )
        bounds = np.array([0, array.shape[0]], dtype=np.int64)
        counts, rows_read, statistics = self._reader.count(array, bounds, mask, (sample_id,), start=self.num_samples)
        self._counts.append(counts[0])
        self._rows_read.append(rows_read[0])
        self._statistics.append(statistics[0])
        self._lengths.append(int(length))
        self._names.append(sample_id)

    def finish(self) -> RoutingCounts:
        """Stack the samples, apply the policy for uncovered tokens and check every sum.

        Raises
        ------
        InvalidInputError
            As :func:`count_routing`, or if no sample was added.
        """
        if self._reader is None:
            raise InvalidInputError("no sample was added", context="routed ids")
        names: tuple[str, ...] | None = None
        if any(name is not None for name in self._names):
            names = tuple(str(i) if name is None else name for i, name in enumerate(self._names))
        dtype = np.result_type(*{array.dtype for array in self._counts})
        counts = np.empty((len(self._counts), *self._counts[0].shape), dtype=dtype)
        for i in range(len(self._counts)):
            counts[i] = self._counts[i]
            self._counts[i] = counts[i]
        return self._reader.finish(
            counts,
            np.stack(self._rows_read),
            np.stack(self._statistics),
            np.array(self._lengths, dtype=np.int64),
            names,
        )


def _ends(bounds: IntArray) -> str:
    return "nothing" if len(bounds) == 0 else f"{bounds[0]} .. {bounds[-1]} ({len(bounds)} entries)"


def _id_array(ids: npt.ArrayLike, name: str = "ids") -> AnyArray:
    array = np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise InvalidInputError(f"{name}: ids have dtype {array.dtype}; they must be integers", context="routed ids")
    if array.ndim != 3 or 0 in array.shape[1:]:
        raise InvalidInputError(
            f"{name}: ids have shape {list(array.shape)}; they must be [rows, layers, K] with at least one layer "
            f"and K >= 1",
            context="routed ids",
        )
    return array


def layer_numbers(moe_layers: Sequence[int]) -> list[int]:
    """Layer numbers as a list.

    Raises
    ------
    InvalidInputError
        If it is no list of integers.
    """
    faults = Faults()
    layers = integer_array(moe_layers, "moe_layers", faults, ndim=1, element="entry")
    faults.raise_if_any()
    assert layers is not None
    numbers: list[int] = layers.tolist()
    return numbers


def _check_options(num_experts: int, uncovered: str, sentinels: Sequence[str], check_distinct: bool) -> None:
    faults = Faults()
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | np.integer) or num_experts < 1:
        faults.add(f"num_experts is {num_experts!r}; it must be an integer of at least 1")
    elif num_experts > MAX_LENGTH:
        faults.add(f"num_experts is {num_experts}, above the limit {MAX_LENGTH}")
    if not isinstance(check_distinct, bool | np.bool_):
        faults.add(f"check_distinct is {check_distinct!r}; it must be True or False")
    if uncovered not in UNCOVERED:
        faults.add(f"uncovered is {uncovered!r}; it must be one of {', '.join(UNCOVERED)}")
    for kind in sentinels:
        if kind not in SENTINELS:
            faults.add(f"unknown kind of placeholder row {kind!r}; known: {', '.join(SENTINELS)}")
    faults.raise_if_any("routed ids")


@dataclass(frozen=True, eq=False)
class _Reader:
    """Options of a count, resolved for one shape of ids."""

    num_layers: int
    top_k: int
    num_experts: int
    columns: slice | IntArray
    expert_of_slot: IntArray
    num_slots: int
    uncovered: str
    masks: npt.NDArray[np.bool_]
    check_distinct: bool

    @classmethod
    def create(
        cls,
        shape: tuple[int, ...],
        num_experts: int,
        moe_layers: Sequence[int] | None,
        physical_to_logical: npt.ArrayLike | None,
        uncovered: str,
        sentinels: Sequence[str],
        check_distinct: bool,
    ) -> _Reader:
        _check_options(num_experts, uncovered, sentinels, check_distinct)
        faults = Faults()
        num_recorded, top_k = int(shape[1]), int(shape[2])
        columns: slice | IntArray = slice(0, num_recorded)
        num_layers = num_recorded
        if moe_layers is not None:
            layers = layer_numbers(moe_layers)
            num_layers = len(layers)
            if not layers:
                faults.add("moe_layers is empty")
            for layer in layers:
                if not 0 <= layer < num_recorded:
                    faults.add(f"moe_layers names layer {layer}; the ids have layers 0..{num_recorded - 1}")
            if len(set(layers)) != len(layers):
                faults.add("moe_layers names a layer twice")
            if layers and layers == list(range(layers[0], layers[0] + len(layers))):
                columns = slice(layers[0], layers[-1] + 1)
            else:
                columns = np.array(layers, dtype=np.int64)
        if top_k > num_experts:
            faults.add(f"ids have K = {top_k} experts a token, above num_experts = {num_experts}")
        expert_of_slot = np.empty((0, 0), dtype=np.int64)
        num_slots = num_experts
        if physical_to_logical is not None:
            found = integer_array(physical_to_logical, "physical_to_logical", faults, ndim=2, element="layer")
            if found is not None:
                if found.shape[0] != num_layers:
                    faults.add(f"physical_to_logical has {found.shape[0]} layers for {num_layers} MoE layers")
                for layer, slot in np.argwhere((found < -1) | (found >= num_experts)).tolist():
                    faults.add(
                        f"physical_to_logical, layer {layer}, slot {slot}: expert {found[layer, slot]} is outside "
                        f"0..{num_experts - 1}"
                    )
                expert_of_slot = found
                num_slots = int(found.shape[1])
        faults.raise_if_any("routed ids")
        masks = np.array([kind in sentinels for kind in SENTINELS])
        bits = num_layers * (math.lgamma(num_slots + 1) - math.lgamma(num_slots - top_k + 1)) / math.log(2)
        masks[2] &= bits >= _ARANGE_BITS
        return cls(
            num_layers=num_layers,
            top_k=top_k,
            num_experts=int(num_experts),
            columns=columns,
            expert_of_slot=expert_of_slot,
            num_slots=num_slots,
            uncovered=uncovered,
            masks=masks,
            check_distinct=bool(check_distinct),
        )

    def count(
        self,
        ids: AnyArray,
        bounds: IntArray,
        valid: AnyArray | None,
        names: Sequence[str | None] | None,
        *,
        start: int = 0,
    ) -> tuple[AnyArray, IntArray, IntArray]:
        """Counts [N, L, E], rows read [N, L] and row statistics [N, 4] of consecutive samples."""
        if ids.dtype.kind == "i" and self.num_slots > np.iinfo(ids.dtype).max:
            # -1 must not look like a valid id once the array is viewed as unsigned.
            wider = np.int16 if ids.dtype.itemsize == 1 else np.int32 if ids.dtype.itemsize == 2 else np.int64
            ids = ids.astype(wider)
        if ids.dtype.itemsize == 8:
            # 64-bit ids share the compiled 32-bit kernel; ids beyond it are out of range for any E.
            beyond = (
                np.argwhere((ids < -(2**31)) | (ids >= 2**31)) if ids.dtype.kind == "i" else np.argwhere(ids >= 2**31)
            )
            if len(beyond):
                row, layer, _ = beyond[0].tolist()
                raise InvalidInputError(
                    f"row {row} of all, layer {layer}: id {ids[tuple(beyond[0])]} is outside the experts "
                    f"0..{self.num_experts - 1}",
                    context="routed ids",
                )
            ids = ids.astype(np.int32)
        if not ids.dtype.isnative:
            ids = ids.astype(ids.dtype.newbyteorder("="))
        first_column = 0
        if not isinstance(self.columns, slice):
            ids = ids[:, self.columns]
        elif ids.flags.c_contiguous:
            first_column = self.columns.start * self.top_k
        else:
            ids = ids[:, self.columns]
        ids = np.ascontiguousarray(ids)
        flat = ids.reshape(ids.shape[0], -1)
        unsigned = flat.view(np.dtype(f"u{flat.dtype.itemsize}"))
        columns = self.num_layers * self.top_k
        packed = (
            unsigned.dtype.itemsize == 2
            and self.top_k % 4 == 0
            and first_column == 0
            and unsigned.shape[1] == columns
            and unsigned.ctypes.data % 8 == 0
        )
        words = unsigned.view(np.uint64) if packed else np.empty((0, 0), dtype=np.uint64)
        num_samples = len(bounds) - 1
        most_rows = int(np.diff(bounds).max(initial=0))
        dtype = np.uint16 if most_rows <= 65535 else np.uint32
        counts = np.zeros((num_samples, self.num_layers, self.num_experts), dtype=dtype)
        rows_read = np.zeros((num_samples, self.num_layers), dtype=np.int64)
        statistics = np.zeros((num_samples, 4), dtype=np.int64)
        found = np.zeros((_MOST_FAULTS, 5), dtype=np.int64)
        signed = ids.dtype.kind == "i"
        missing = np.uint64(np.iinfo(unsigned.dtype).max if signed else np.iinfo(np.uint64).max)
        total = _count(
            unsigned,
            words,
            packed,
            np.ascontiguousarray(bounds),
            np.empty(0, dtype=np.bool_) if valid is None else np.ascontiguousarray(valid),
            first_column,
            self.num_layers,
            self.top_k,
            self.num_slots,
            self.num_experts,
            missing,
            self.masks,
            self.check_distinct,
            self.expert_of_slot,
            counts,
            most_rows,
            rows_read,
            statistics,
            found,
        )
        if total:
            faults = Faults(limit=_MOST_FAULTS)
            for fault in found[:total].tolist():
                faults.add(self._describe(fault, ids.dtype, names, start))
            for _ in range(total - _MOST_FAULTS):
                faults.add("")
            faults.raise_if_any("routed ids")
        return counts, rows_read, statistics

    def _describe(self, fault: list[int], dtype: np.dtype[Any], names: Sequence[str | None] | None, start: int) -> str:
        kind, sample, row, layer, value = fault
        name = None if names is None else names[sample]
        layer_name = layer if isinstance(self.columns, slice) else int(self.columns[layer])
        if isinstance(self.columns, slice):
            layer_name += self.columns.start
        where = f"sample {start + sample}" + ("" if name is None else f" ({name})")
        where += f", layer {layer_name}" if row < 0 else f", row {row}, layer {layer_name}"
        if dtype.kind == "i" and value > np.iinfo(dtype).max:
            value -= 1 << (8 * dtype.itemsize)
        hint = ""
        if dtype == np.uint8 and value == 255:
            hint = " (-1 cast to uint8?)"
        elif dtype == np.uint16 and value == 65535:
            hint = " (-1 cast to uint16?)"
        slots = "physical slots" if len(self.expert_of_slot) else "experts"
        if kind == _PARTIAL:
            return f"{where}: {value} of {self.top_k} ids are -1; a route is missing as a whole or not at all"
        if kind == _OUT_OF_RANGE:
            return f"{where}: id {value} is outside the {slots} 0..{self.num_slots - 1}{hint}"
        if kind == _EQUAL:
            dense = "; a dense layer is left out with moe_layers" if value == 0 else ""
            return f"{where}: all {self.top_k} ids are {value}{hint}, which no top-{self.top_k} router can give{dense}"
        if kind == _REPEATED:
            return f"{where}: id {value} is repeated in one token's top-{self.top_k}"
        if kind == _ZERO_ROW:
            return f"{where}: a row of zeros, and 'zero' is not among the masked placeholders"
        if kind == _NEGATIVE_ROW:
            return f"{where}: a row of -1, and 'negative' is not among the masked placeholders"
        if kind == _UNMAPPED:
            return f"{where}: tokens went to physical slot {value}, which physical_to_logical leaves unused"
        return f"{where}: expert {value} is counted more often than there are rows: ids are repeated within a row"

    def finish(
        self,
        counts: AnyArray,
        rows_read: IntArray,
        statistics: IntArray,
        lengths: IntArray,
        names: tuple[str, ...] | None,
    ) -> RoutingCounts:
        """Apply the policy for uncovered tokens, check all sums, and report."""
        faults = Faults()

        def name(i: int) -> str:
            return f"sample {i}" if names is None else f"sample {i} ({names[i]})"

        least, most = rows_read.min(axis=1), rows_read.max(axis=1)
        for i in np.flatnonzero(most > lengths).tolist():
            faults.add(f"{name(i)}: {most[i]} rows with routes for {lengths[i]} tokens")
        for i in np.flatnonzero(least == 0).tolist():
            layer = int(np.argmin(rows_read[i]))
            faults.add(f"{name(i)}: no route at all in layer {layer} ({statistics[i, _PRESENT]} rows, none usable)")
        if self.uncovered != "scale":
            for i in np.flatnonzero((least != most) & (least > 0)).tolist():
                faults.add(
                    f"{name(i)}: layer {int(np.argmin(rows_read[i]))} has {least[i]} routes, layer "
                    f"{int(np.argmax(rows_read[i]))} has {most[i]}; only uncovered='scale' can even them out"
                )
        if self.uncovered == "refuse":
            for i in np.flatnonzero((lengths - least > 1) & (least > 0)).tolist():
                faults.add(
                    f"{name(i)}: {lengths[i] - least[i]} of {lengths[i]} tokens have no route (one, the last, is "
                    f"usual); choose uncovered='scale' or 'ignore' to go on"
                )
        faults.raise_if_any("routed ids")
        i, layer, total = _unbalanced(counts, rows_read, self.top_k)
        if i >= 0:
            raise InvalidInputError(
                f"{name(i)}, layer {layer}: counts sum to {total}, not to top_k {self.top_k} x "
                f"{rows_read[i, layer]} rows",
                context="routed ids",
            )
        expected = np.maximum(lengths - 1, most)
        present = statistics[:, _PRESENT]
        coverage = Coverage(
            lengths=read_only(lengths),
            rows_expected=read_only(expected),
            rows_present=read_only(present.copy()),
            rows_read=read_only(rows_read),
            rows_padded=read_only(np.maximum(present - expected, 0)),
            rows_negative=read_only(statistics[:, _NEGATIVE].copy()),
            rows_zero=read_only(statistics[:, _ZERO].copy()),
            rows_arange=read_only(statistics[:, _ARANGE].copy()),
            uncovered=self.uncovered,
            sample_ids=names,
        )
        routed = least.astype(np.int64)
        if self.uncovered == "scale":
            routed = lengths.copy()
            if int(lengths.max()) > np.iinfo(counts.dtype).max:
                counts = counts.astype(np.uint32)
            for i in np.flatnonzero((rows_read != lengths[:, None]).any(axis=1)).tolist():
                counts[i] = _scaled(counts[i], rows_read[i], int(lengths[i]), self.top_k)
        return RoutingCounts(
            counts=read_only(counts),
            lengths=read_only(lengths),
            routed_tokens=read_only(routed),
            top_k=self.top_k,
            coverage=coverage,
        )


def _scaled(counts: AnyArray, rows: IntArray, length: int, top_k: int) -> IntArray:
    """Counts [L, E] of ``rows`` [L] tokens enlarged to ``length`` tokens by largest remainder."""
    product = counts.astype(np.int64) * length
    scaled, remainder = np.divmod(product, rows[:, None])
    short = top_k * length - scaled.sum(axis=1)
    order = np.argsort(-remainder, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(order.shape[1])[None, :], axis=1)
    result: IntArray = scaled + (rank < short[:, None])
    return result
