"""Incremental evaluation of packings under a fixed placement, compiled with numba.

A :class:`BlockLoads` holds one packing together with everything the cost of its
blocks is made of, so that the effect of moving a sample, swapping two samples
or exchanging the shards of two blocks is known in O(L·P + G) (all R·G blocks
are looked at only when the costliest one changes) instead of the O(R·G·L·P) of
a fresh evaluation. All quantities are the exact integers of
:mod:`routepack_opt.score`; only the energy of :meth:`BlockLoads.walk` is a
float64.

Three things make a move cheap:

* loads are int32 ``[block, rank, layer]`` with the layer innermost, so that
  the maximum over the ranks is a vertical SIMD maximum over eight or sixteen
  layers at once, written as LLVM vector instructions because LLVM does not
  vectorise the outer of two loops by itself;
* every block keeps the two largest cell loads of each attention operator
  class, so that the attention part of a move between blocks is O(1);
* an extra sample of length and load zero turns a relocation into a swap.

Swaps of *one for two* are for nearly full cells. There relocations fail for
capacity, and swapping two samples of nearly equal length changes loads by
little more than their difference; one sample for two whose lengths add up to
its own changes the loads, which do not grow in proportion to length, by much
more and still fits. Circular lists of the samples of every cell serve to draw
such pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults, InvalidInputError
from routepack_opt.rings import PAIR_WINDOW, change_ring, join, one_for_two, trade_places
from routepack_opt.splitmix import GOLDEN, mix

if TYPE_CHECKING:
    from routepack_opt.plan import Packing, Placement
    from routepack_opt.problem import Problem

__all__ = ["BlockLoads", "LevelChange", "MoveTables", "WalkCounts"]

Number = Any  # a scalar inside kernels, where numba infers the type

Index = np.uint64  # numba adds no test for negative indices to unsigned ones

_TILE = 8  # layers are padded to a multiple of this
_INT32_MAX = 2**31 - 1

# Positions in the int64 array of walk counters.
_PROPOSED, _FITTING, _EVALUATED, _ACCEPTED, _IMPROVED = range(5)


class LevelChange(NamedTuple):
    """Change of the three levels of the score, in integer work units.

    Attributes
    ----------
    max_shard_work : int
        Change of max_g Σ_r.
    total_work : int
        Change of Σ_g Σ_r.
    max_row_work : int
        Change of max_{r,g}.
    """

    max_shard_work: int
    total_work: int
    max_row_work: int


class WalkCounts(NamedTuple):
    """What happened to the proposals of one walk.

    Attributes
    ----------
    proposed : int
        Proposals drawn.
    fitting : int
        Proposals that change something and respect capacity and cell minimum.
    evaluated : int
        Proposals whose change of the score was computed in full.
    accepted : int
        Proposals accepted.
    improved : int
        Times a new best packing was archived.
    """

    proposed: int
    fitting: int
    evaluated: int
    accepted: int
    improved: int


class _Tables(NamedTuple):
    """Read-only inputs of the kernels; samples are in ascending order of length, the last one is zero."""

    loads: npt.NDArray[Any]  # uint16 or int32 [(N+1)·P·L], sample-major, layer innermost
    load_sums: IntArray  # [N+1], Σ_{l,p}
    attention: IntArray  # [(N+1)·S]
    lengths: IntArray  # [N+1], aligned tokens
    block_of_cell: npt.NDArray[np.int32]  # [cells]
    num_samples: int
    num_classes: int
    num_ranks: int
    num_layers: int  # padded
    num_shards: int
    num_rows: int
    shard_size: int
    capacity: int
    least_samples: int
    expert_unit: int
    fixed_slots: int  # 1: samples never leave their DP slot except by a swap


class _State(NamedTuple):
    """One packing and everything cached about it; ``block · shard_size + k`` is a cell."""

    cell_of_sample: npt.NDArray[np.int32]  # [N]
    fill: IntArray  # [cells], aligned tokens
    size: IntArray  # [cells], samples
    next_in_cell: npt.NDArray[np.int32]  # [N + cells]: circular lists of the samples of a cell; its head is N + cell
    previous_in_cell: npt.NDArray[np.int32]  # [N + cells]
    attention: IntArray  # [cells·S]
    peaks: IntArray  # [blocks·S·3]: largest cell load, its cell, second largest
    loads: npt.NDArray[np.int32]  # [blocks·P·L]
    load_sums: IntArray  # [blocks]
    expert: IntArray  # [blocks], Σ_l max_p, in routed tokens
    work: IntArray  # [blocks]
    row_of_block: IntArray  # [blocks]
    shard_of_block: IntArray  # [blocks]
    shard_work: IntArray  # [G]
    levels: IntArray  # [3]
    best_cell: npt.NDArray[np.int32]  # [N]: the archive
    best_row: IntArray  # [blocks]
    best_shard: IntArray  # [blocks]
    best_levels: IntArray  # [3]
    touched: npt.NDArray[np.int32]  # [N+1]: samples that differ from the archive; the last entry counts them
    is_touched: npt.NDArray[np.uint8]  # [N]


def _peak_sums_code(loads: Any, samples: Any, num_samples: int) -> Any:
    """Signature and code of :data:`_peak_sums` (two samples change places) and :data:`_peak_sums_of_pair` (three).

    Arguments of both are ``loads``, ``samples``, the offsets of two blocks in
    ``loads`` and of the samples in ``samples`` (the first sample leaves the first
    block, the others come from the second), the ranks and the layers, a multiple
    of eight. The loop over ranks is innermost and keeps the maxima of sixteen
    (then eight) layers in vector registers; all operands are addressed with one
    running index.
    """
    pair: Any = types.UniTuple
    alloca: Any = cgutils.alloca_once
    signature = pair(types.int64, 2)(loads, samples, *(types.uint64,) * (num_samples + 4))

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        loads_type, samples_type = call.args[:2]
        block_data = context.make_array(loads_type)(context, builder, arguments[0]).data
        sample_data = context.make_array(samples_type)(context, builder, arguments[1]).data
        blocks, moved, (num_ranks, num_layers) = arguments[2:4], arguments[4:-2], arguments[-2:]
        int32, int64 = ir.IntType(32), ir.IntType(64)
        sample_bits = samples_type.dtype.bitwidth
        sample_int = ir.IntType(sample_bits)
        streams = [(builder.gep(block_data, [offset]), int32, 4) for offset in blocks]
        streams += [(builder.gep(sample_data, [offset]), sample_int, sample_bits // 8) for offset in moved]
        wide = ir.VectorType(int64, _TILE)
        sums = [alloca(builder, wide) for _ in range(2)]
        for pointer in sums:
            builder.store(ir.Constant(wide, None), pointer)
        first_layer = alloca(builder, int64)
        builder.store(ir.Constant(int64, 0), first_layer)
        rank_span = builder.mul(num_ranks, num_layers)

        def tiles(width: int) -> None:
            vector = ir.VectorType(int32, width)
            maxima = [alloca(builder, vector) for _ in range(2)]
            position = alloca(builder, int64)
            head, body, rank, tail, leave = (
                builder.append_basic_block(f"tile{width}.{part}") for part in ("head", "body", "rank", "tail", "leave")
            )
            builder.branch(head)
            builder.position_at_end(head)
            layer = builder.load(first_layer)
            next_layer = builder.add(layer, ir.Constant(int64, width))
            builder.cbranch(builder.icmp_unsigned("<=", next_layer, num_layers), body, leave)
            builder.position_at_end(body)
            for pointer in maxima:
                builder.store(ir.Constant(vector, None), pointer)
            builder.store(layer, position)
            end = builder.add(layer, rank_span)
            builder.branch(rank)
            builder.position_at_end(rank)
            index = builder.load(position)
            values = []
            for base, element, alignment in streams:
                pointer = builder.bitcast(builder.gep(base, [index]), ir.VectorType(element, width).as_pointer())
                value = builder.load(pointer, align=alignment)
                values.append(value if element is int32 else builder.zext(value, vector))
            of_a, of_b, change, *returned = values
            for value in returned:
                change = builder.sub(change, value)
            for pointer, value in zip(maxima, (builder.sub(of_a, change), builder.add(of_b, change)), strict=True):
                held = builder.load(pointer)
                builder.store(builder.select(builder.icmp_signed(">", value, held), value, held), pointer)
            next_index = builder.add(index, num_layers)
            builder.store(next_index, position)
            builder.cbranch(builder.icmp_unsigned("<", next_index, end), rank, tail)
            builder.position_at_end(tail)
            for pointer, total in zip(maxima, sums, strict=True):
                value = builder.load(pointer)
                for part in range(0, width, _TILE):
                    lanes = [ir.Constant(int32, lane) for lane in range(part, part + _TILE)]
                    mask = ir.Constant(ir.VectorType(int32, _TILE), lanes)
                    piece = builder.shuffle_vector(value, ir.Constant(vector, ir.Undefined), mask)
                    builder.store(builder.add(builder.load(total), builder.zext(piece, wide)), total)
            builder.store(next_layer, first_layer)
            builder.branch(head)
            builder.position_at_end(leave)

        tiles(2 * _TILE)
        tiles(_TILE)
        results = []
        for pointer in sums:
            vector_sum = builder.load(pointer)
            total = builder.extract_element(vector_sum, ir.Constant(int32, 0))
            for lane in range(1, _TILE):
                total = builder.add(total, builder.extract_element(vector_sum, ir.Constant(int32, lane)))
            results.append(total)
        return context.make_tuple(builder, call.return_type, results)

    return signature, generate


def _peak_sums_of_two_code(
    typing_context: Any, loads: Any, samples: Any, a: Any, b: Any, i: Any, j: Any, num_ranks: Any, num_layers: Any
) -> Any:
    """Return Σ_l max_p of blocks a and b after sample i of the first and sample j of the second change places."""
    del typing_context, a, b, i, j, num_ranks, num_layers
    return _peak_sums_code(loads, samples, 2)


def _peak_sums_of_pair_code(
    typing_context: Any,
    loads: Any,
    samples: Any,
    a: Any,
    b: Any,
    i: Any,
    j: Any,
    k: Any,
    num_ranks: Any,
    num_layers: Any,
) -> Any:
    """Return Σ_l max_p of blocks a and b after sample i of the first and samples j, k of the second change places."""
    del typing_context, a, b, i, j, k, num_ranks, num_layers
    return _peak_sums_code(loads, samples, 3)


_peak_sums: Any = intrinsic(_peak_sums_of_two_code)
_peak_sums_of_pair: Any = intrinsic(_peak_sums_of_pair_code)


def _borrowed_code(typing_context: Any, arrays: Any) -> Any:
    """Return a named tuple whose arrays have no owner, so that no references are counted when they are handed on.

    Numba counts references atomically at every call that takes an array; that
    was a quarter of the time of a walk. The caller of the kernel holds the arrays.
    """
    del typing_context

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        fields = []
        for position, field in enumerate(call.args[0].types):
            value = builder.extract_value(arguments[0], position)
            if isinstance(field, types.Array):
                view = context.make_array(field)(context, builder, value)
                view.meminfo = ir.Constant(view.meminfo.type, None)
                view.parent = ir.Constant(view.parent.type, None)
                value = view._getvalue()
            fields.append(value)
        return context.make_tuple(builder, call.return_type, fields)

    return arrays(arrays), generate


_borrowed: Any = intrinsic(_borrowed_code)


@njit(cache=True, nogil=True, forceinline=True)
def _attention_change(
    sample_attention: IntArray,
    attention: IntArray,
    peaks: IntArray,
    shard_size: Number,
    num_classes: Number,
    i: Number,
    j: Number,
    k: Number | None,
    a: Number,
    b: Number,
    block_a: Number,
    block_b: Number,
) -> Any:
    """Change of Σ_s max over cells, for the block of cell ``a`` (losing i) and of ``b`` (losing j, and k if given)."""
    change_a = 0
    change_b = 0
    if block_a != block_b:
        for s in range(num_classes):
            x = sample_attention[Index(i * num_classes + s)] - sample_attention[Index(j * num_classes + s)]
            if k is not None:
                x -= sample_attention[Index(k * num_classes + s)]
            place = (block_a * num_classes + s) * 3
            top = peaks[Index(place)]
            rest = peaks[Index(place + 2)] if peaks[Index(place + 1)] == a else top
            change_a += max(rest, attention[Index(a * num_classes + s)] - x) - top
            place = (block_b * num_classes + s) * 3
            top = peaks[Index(place)]
            rest = peaks[Index(place + 2)] if peaks[Index(place + 1)] == b else top
            change_b += max(rest, attention[Index(b * num_classes + s)] + x) - top
    else:
        first = block_a * shard_size
        for s in range(num_classes):
            x = sample_attention[Index(i * num_classes + s)] - sample_attention[Index(j * num_classes + s)]
            if k is not None:
                x -= sample_attention[Index(k * num_classes + s)]
            top = max(attention[Index(a * num_classes + s)] - x, attention[Index(b * num_classes + s)] + x)
            for cell in range(first, first + shard_size):
                if cell != a and cell != b:
                    top = max(top, attention[Index(cell * num_classes + s)])
            change_a += top - peaks[Index((block_a * num_classes + s) * 3)]
    return change_a, change_b


@njit(cache=True, nogil=True, forceinline=True)
def _new_max_shard(shard_work: IntArray, shard_a: Number, shard_b: Number, change_a: Number, change_b: Number) -> Any:
    """max_g Σ_r after two shards change their work (added up when they are the same)."""
    top = np.int64(-1)
    for g in range(shard_work.shape[0]):
        work = shard_work[Index(g)]
        if g == shard_a:
            work += change_a
        if g == shard_b:
            work += change_b
        top = max(top, work)
    return top


@njit(cache=True, nogil=True, forceinline=True)
def _new_max_row(
    work: IntArray, old: Number, block_a: Number, block_b: Number, change_a: Number, change_b: Number
) -> Any:
    """max_{r,g} after two different blocks (or one, with ``change_b`` zero) change their work."""
    old_a = work[Index(block_a)]
    old_b = work[Index(block_b)]
    top = old_a + change_a
    if block_a != block_b:
        top = max(top, old_b + change_b)
    if top >= old:
        return top
    if old_a < old and old_b < old:
        return old
    for block in range(work.shape[0]):
        if block != block_a and block != block_b:
            top = max(top, work[Index(block)])
    return top


@njit(cache=True, nogil=True, forceinline=True)
def _new_levels(
    work: IntArray,
    shard_work: IntArray,
    shard_of_block: IntArray,
    levels: Any,
    weights: Any,
    block_a: Number,
    block_b: Number,
    change_a: Number,
    change_b: Number,
) -> Any:
    """First and third level after two blocks change their work, and the change of the energy."""
    shard_a = shard_of_block[Index(block_a)]
    shard_b = shard_of_block[Index(block_b)]
    new_0 = _new_max_shard(shard_work, shard_a, shard_b, change_a, change_b)
    new_2 = _new_max_row(work, levels[2], block_a, block_b, change_a, change_b)
    energy = weights[0] * (new_0 - levels[0]) + weights[1] * (change_a + change_b)
    energy += weights[2] * (new_2 - levels[2])
    return new_0, new_2, energy


@njit(cache=True, nogil=True)
def _find_peaks(
    attention: IntArray, peaks: IntArray, shard_size: Number, num_classes: Number, block: Number, s: Number
) -> None:
    """Find the two largest cell loads of one operator class in one block."""
    first = block * shard_size
    top = np.int64(-1)
    second = np.int64(0)  # a shard of one slot has no second cell: nothing remains without the first
    owner = first
    for cell in range(first, first + shard_size):
        load = attention[Index(cell * num_classes + s)]
        if load > top:
            second = max(top, second)
            top = load
            owner = cell
        else:
            second = max(second, load)
    k = (block * num_classes + s) * 3
    peaks[Index(k)] = top
    peaks[Index(k + 1)] = owner
    peaks[Index(k + 2)] = second


@njit(cache=True, nogil=True, forceinline=True)
def _change_attention(
    attention: IntArray,
    peaks: IntArray,
    shard_size: Number,
    num_classes: Number,
    block: Number,
    cell: Number,
    s: Number,
    x: Number,
) -> None:
    """Add ``x`` to the load of a cell; its block is searched only if a cell of the top two falls below the second."""
    place = cell * num_classes + s
    old = attention[Index(place)]
    new = old + x
    attention[Index(place)] = new
    k = (block * num_classes + s) * 3
    top = peaks[Index(k)]
    second = peaks[Index(k + 2)]
    if peaks[Index(k + 1)] == cell:
        if new >= second:
            peaks[Index(k)] = new
        else:
            _find_peaks(attention, peaks, shard_size, num_classes, block, s)
    elif new > top:
        peaks[Index(k)] = new
        peaks[Index(k + 1)] = cell
        peaks[Index(k + 2)] = top
    elif new >= second:
        peaks[Index(k + 2)] = new
    elif old == second:
        _find_peaks(attention, peaks, shard_size, num_classes, block, s)


@njit(cache=True, nogil=True, forceinline=True)
def _touch(touched: npt.NDArray[np.int32], is_touched: npt.NDArray[np.uint8], i: Number) -> None:
    """Note that a sample may differ from the archive; the last entry of ``touched`` counts."""
    if is_touched[Index(i)] == 0:
        is_touched[Index(i)] = 1
        last = touched.shape[0] - 1
        touched[Index(touched[Index(last)])] = i
        touched[Index(last)] += 1


@njit(cache=True, nogil=True, forceinline=True)
def _archive(
    cell_of_sample: npt.NDArray[np.int32],
    row_of_block: IntArray,
    shard_of_block: IntArray,
    best_cell: npt.NDArray[np.int32],
    best_row: IntArray,
    best_shard: IntArray,
    touched: npt.NDArray[np.int32],
    is_touched: npt.NDArray[np.uint8],
) -> None:
    """Copy what changed since the last archived packing."""
    last = touched.shape[0] - 1
    for k in range(touched[Index(last)]):
        i = touched[Index(k)]
        best_cell[Index(i)] = cell_of_sample[Index(i)]
        is_touched[Index(i)] = 0
    touched[Index(last)] = 0
    for block in range(row_of_block.shape[0]):
        best_row[Index(block)] = row_of_block[Index(block)]
        best_shard[Index(block)] = shard_of_block[Index(block)]


@njit(cache=True, nogil=True, forceinline=True)
def _shift_loads(
    loads: npt.NDArray[np.int32], sample_loads: npt.NDArray[Any], a: Any, b: Any, i: Any, j: Any, span: Any
) -> None:
    """Carry the loads of sample i from the block at ``a`` to that at ``b``, those of j back."""
    for place in range(span):
        x = np.int32(np.int32(sample_loads[i + place]) - np.int32(sample_loads[j + place]))
        loads[a + place] -= x
        loads[b + place] += x


@njit(cache=True, nogil=True, forceinline=True)
def _exchange(tables: _Tables, state: _State, i: Number, j: Number, a: Number, b: Number, changes: Any) -> None:
    """Apply: sample i moves from cell ``a`` to ``b``, j (or the zero sample) from ``b`` to ``a``; levels excepted.

    ``changes`` are those of the work of both blocks and of their Σ_l max_p.
    """
    change_a, change_b, expert_a, expert_b = changes
    block_a = np.int64(tables.block_of_cell[Index(a)])
    block_b = np.int64(tables.block_of_cell[Index(b)])
    cell_of_sample, touched, is_touched = state.cell_of_sample, state.touched, state.is_touched
    num_samples, num_classes, shard_size = tables.num_samples, tables.num_classes, tables.shard_size
    cell_of_sample[Index(i)] = b
    _touch(touched, is_touched, i)
    if j < num_samples:
        cell_of_sample[Index(j)] = a
        _touch(touched, is_touched, j)
        trade_places(state.next_in_cell, state.previous_in_cell, i, j)
    else:
        change_ring(state.next_in_cell, state.previous_in_cell, i, num_samples + b)
        state.size[Index(a)] -= 1
        state.size[Index(b)] += 1
    tokens = tables.lengths[Index(i)] - tables.lengths[Index(j)]
    state.fill[Index(a)] -= tokens
    state.fill[Index(b)] += tokens
    attention, peaks, sample_attention = state.attention, state.peaks, tables.attention
    for s in range(num_classes):
        x = sample_attention[Index(i * num_classes + s)] - sample_attention[Index(j * num_classes + s)]
        _change_attention(attention, peaks, shard_size, num_classes, block_a, a, s, -x)
        _change_attention(attention, peaks, shard_size, num_classes, block_b, b, s, x)
    state.work[Index(block_a)] += change_a
    state.shard_work[Index(state.shard_of_block[Index(block_a)])] += change_a
    if block_a != block_b:
        state.work[Index(block_b)] += change_b
        state.shard_work[Index(state.shard_of_block[Index(block_b)])] += change_b
        width = np.uint64(tables.num_ranks) * np.uint64(tables.num_layers)
        _shift_loads(
            state.loads,
            tables.loads,
            np.uint64(block_a) * width,
            np.uint64(block_b) * width,
            np.uint64(i) * width,
            np.uint64(j) * width,
            width,
        )
        sums = tables.load_sums[Index(i)] - tables.load_sums[Index(j)]
        state.load_sums[Index(block_a)] -= sums
        state.load_sums[Index(block_b)] += sums
        state.expert[Index(block_a)] += expert_a
        state.expert[Index(block_b)] += expert_b


@njit(cache=True, nogil=True)
def _block_peak_sum(tables: _Tables, loads: npt.NDArray[np.int32], block: Number) -> Any:
    """Σ_l max_p of one block from its loads."""
    span = np.uint64(tables.num_ranks) * np.uint64(tables.num_layers)
    zero = np.uint64(tables.num_samples) * span
    base = np.uint64(block) * span
    peak, _ = _peak_sums(
        loads, tables.loads, base, base, zero, zero, np.uint64(tables.num_ranks), np.uint64(tables.num_layers)
    )
    return peak


@njit(cache=True, nogil=True)
def _rebuild(tables: _Tables, state: _State) -> None:
    """Recompute every cached quantity from ``cell_of_sample`` and ``shard_of_block``."""
    num_classes = tables.num_classes
    span = tables.num_ranks * tables.num_layers
    sample_loads, sample_attention = tables.loads, tables.attention
    loads, attention, peaks, levels = state.loads, state.attention, state.peaks, state.levels
    state.fill[:] = 0
    state.size[:] = 0
    attention[:] = 0
    loads[:] = 0
    state.load_sums[:] = 0
    state.shard_work[:] = 0
    for i in range(tables.num_samples):
        cell = state.cell_of_sample[i]
        block = cell // tables.shard_size
        state.fill[cell] += tables.lengths[i]
        state.size[cell] += 1
        state.load_sums[block] += tables.load_sums[i]
        for s in range(num_classes):
            attention[cell * num_classes + s] += sample_attention[i * num_classes + s]
        for k in range(span):
            loads[block * span + k] += np.int32(sample_loads[i * span + k])
    for head in range(tables.num_samples, state.next_in_cell.shape[0]):
        state.next_in_cell[head] = head
        state.previous_in_cell[head] = head
    for i in range(tables.num_samples):
        join(state.next_in_cell, state.previous_in_cell, i, tables.num_samples + state.cell_of_sample[i])
    levels[:] = 0
    for block in range(state.work.shape[0]):
        work = np.int64(0)
        for s in range(num_classes):
            _find_peaks(attention, peaks, tables.shard_size, num_classes, block, s)
            work += peaks[(block * num_classes + s) * 3]
        state.expert[block] = _block_peak_sum(tables, loads, block) if tables.expert_unit != 0 else 0
        work += state.expert[block] * tables.expert_unit
        state.work[block] = work
        state.shard_work[state.shard_of_block[block]] += work
        levels[1] += work
        levels[2] = max(levels[2], work)
    for g in range(tables.num_shards):
        levels[0] = max(levels[0], state.shard_work[g])


@njit(cache=True, nogil=True, forceinline=True)
def _draw_pair(tables: _Tables, state: _State, high: Number, low: Number, extra: Number) -> Any:
    """Draw j, another sample k of its cell and an i about as long as both together; whether they may change places.

    ``high`` and ``extra`` are 32 and 64 random bits, ``low`` is 20.
    """
    num_samples = np.int64(tables.num_samples)
    cell_of_sample, size, lengths, fill = state.cell_of_sample, state.size, tables.lengths, state.fill
    j = np.int64((high * np.uint64(num_samples)) >> np.uint64(32))
    b = np.int64(cell_of_sample[Index(j)])
    size_b = size[Index(b)]
    if size_b < 2 or size_b <= tables.least_samples:
        return False, j, j, j
    steps = 1 + np.int64(((extra >> np.uint64(32)) * np.uint64(size_b - 1)) >> np.uint64(32))
    i, k = one_for_two(state.next_in_cell, lengths, j, steps, (low * (2 * PAIR_WINDOW)) >> 20)
    if i < 0 or i >= num_samples:
        return False, i, j, k
    a = np.int64(cell_of_sample[Index(i)])
    if a == b:
        return False, i, j, k
    tokens = lengths[Index(j)] + lengths[Index(k)] - lengths[Index(i)]
    capacity = tables.capacity
    return fill[Index(a)] + tokens <= capacity and fill[Index(b)] - tokens <= capacity, i, j, k


@njit(cache=True, nogil=True, forceinline=True)
def _price_pair(tables: _Tables, state: _State, i: Number, j: Number, k: Number, a: Number, b: Number) -> Any:
    """Exact changes of Σ_l max_p of two different blocks when i of cell ``a`` and j, k of ``b`` change places."""
    num_ranks, num_layers = np.uint64(tables.num_ranks), np.uint64(tables.num_layers)
    span = num_ranks * num_layers
    block_a = np.int64(tables.block_of_cell[Index(a)])
    block_b = np.int64(tables.block_of_cell[Index(b)])
    peak_a, peak_b = _peak_sums_of_pair(
        state.loads,
        tables.loads,
        np.uint64(block_a) * span,
        np.uint64(block_b) * span,
        np.uint64(i) * span,
        np.uint64(j) * span,
        np.uint64(k) * span,
        num_ranks,
        num_layers,
    )
    return peak_a - state.expert[Index(block_a)], peak_b - state.expert[Index(block_b)]


@njit(cache=True, nogil=True)
def _apply(tables: _Tables, state: _State, i: Number, j: Number, k: Number, a: Number, b: Number, changes: Any) -> None:
    """Apply: i moves from cell ``a`` to ``b``, j and k (each may be the zero sample) back; levels excepted."""
    _exchange(tables, state, i, j, a, b, changes)
    if k < tables.num_samples:
        _exchange(tables, state, k, np.int64(tables.num_samples), b, a, (0, 0, 0, 0))


@njit(cache=True, nogil=True, forceinline=True)
def _try_pair(
    tables: _Tables,
    state: _State,
    levels: Any,
    weights: Any,
    temperature: Number,
    uniform: Number,
    i: Number,
    j: Number,
    k: Number,
) -> Any:
    """Accept if ``uniform``, which may be above 1, is below the Boltzmann factor of i and j, k changing places.

    Returns 0 (refused by the lower bound), 1 (refused) or 2 (accepted and applied), and the new levels.
    """
    slack = temperature * (1.0 - uniform)  # −T ln u lies between this and this over u, also for u above 1
    a = np.int64(state.cell_of_sample[Index(i)])
    b = np.int64(state.cell_of_sample[Index(j)])
    block_a = np.int64(tables.block_of_cell[Index(a)])
    block_b = np.int64(tables.block_of_cell[Index(b)])
    work, shard_work, shard_of_block = state.work, state.shard_work, state.shard_of_block
    change_a, change_b = _attention_change(
        tables.attention,
        state.attention,
        state.peaks,
        tables.shard_size,
        tables.num_classes,
        i,
        j,
        k,
        a,
        b,
        block_a,
        block_b,
    )
    expert_a = 0
    expert_b = 0
    unit = tables.expert_unit
    if block_a != block_b and unit != 0:
        share = (1.0 - 1e-12) / tables.num_ranks
        sums = tables.load_sums[Index(i)] - tables.load_sums[Index(j)] - tables.load_sums[Index(k)]
        least_a = np.int64((state.load_sums[Index(block_a)] - sums) * share) - state.expert[Index(block_a)]
        least_b = np.int64((state.load_sums[Index(block_b)] + sums) * share) - state.expert[Index(block_b)]
        _, _, energy = _new_levels(
            work,
            shard_work,
            shard_of_block,
            levels,
            weights,
            block_a,
            block_b,
            change_a + least_a * unit,
            change_b + least_b * unit,
        )
        if energy * uniform > slack:
            return 0, levels[0], levels[1], levels[2]
        expert_a, expert_b = _price_pair(tables, state, i, j, k, a, b)
        change_a += expert_a * unit
        change_b += expert_b * unit
    new_0, new_2, energy = _new_levels(
        work, shard_work, shard_of_block, levels, weights, block_a, block_b, change_a, change_b
    )
    new_1 = levels[1] + change_a + change_b
    if energy * uniform > slack or energy > -temperature * np.log(uniform):
        return 1, levels[0], levels[1], levels[2]
    _apply(tables, state, i, j, k, a, b, (change_a, change_b, expert_a, expert_b))
    return 2, new_0, new_1, new_2


@njit(cache=True, nogil=True)
def _walk(
    tables: _Tables,
    state: _State,
    rng: npt.NDArray[np.uint64],
    counts: IntArray,
    temperature: Number,
    weight_0: Number,
    weight_1: Number,
    weight_2: Number,
    relocations: Number,
    exchanges: Number,
    pairs: Number,
    window: Number,
    num_proposals: Number,
) -> None:
    """Metropolis walk; ``relocations``, ``exchanges``, ``pairs`` are chances in 4096, weights are per work unit."""
    tables = _borrowed(tables)
    state = _borrowed(state)
    sample_loads = tables.loads
    sample_load_sums = tables.load_sums
    sample_attention = tables.attention
    lengths = tables.lengths
    block_of_cell = tables.block_of_cell
    cell_of_sample = state.cell_of_sample
    fill = state.fill
    size = state.size
    attention = state.attention
    peaks = state.peaks
    loads = state.loads
    load_sums = state.load_sums
    expert = state.expert
    work = state.work
    shard_work = state.shard_work
    row_of_block = state.row_of_block
    shard_of_block = state.shard_of_block
    touched = state.touched
    is_touched = state.is_touched
    best_cell = state.best_cell
    best_row = state.best_row
    best_shard = state.best_shard
    levels = state.levels
    num_samples, num_classes, shard_size = tables.num_samples, tables.num_classes, tables.shard_size
    num_blocks, num_cells = work.shape[0], fill.shape[0]
    num_slots = shard_size * tables.num_shards
    capacity, least_samples, unit = tables.capacity, tables.least_samples, tables.expert_unit
    num_ranks, num_layers = np.uint64(tables.num_ranks), np.uint64(tables.num_layers)
    span = num_ranks * num_layers
    # A hair below 1/P, so that rounding never lifts the average load of a rank.
    share = (1.0 - 1e-12) / tables.num_ranks
    weights = (weight_0, weight_1, weight_2)
    level_0, level_1, level_2 = levels[0], levels[1], levels[2]
    best_0, best_1, best_2 = state.best_levels[0], state.best_levels[1], state.best_levels[2]
    golden = np.uint64(GOLDEN)
    counter = rng[0]
    fitting = 0
    evaluated = 0
    accepted = 0
    improved = 0
    for _ in range(num_proposals):
        counter += golden
        bits = mix(counter)
        counter += golden
        uniform = (np.float64(mix(counter) >> np.uint64(11)) + 1.0) * (1.0 / 9007199254740992.0)
        slack = temperature * (1.0 - uniform)  # −T ln u lies between this and this over u
        kind = np.int64(bits & np.uint64(0xFFF))
        x = np.int64((bits >> np.uint64(12)) & np.uint64(0xFFFFF))
        high = bits >> np.uint64(32)
        if kind < exchanges:
            block_a = np.int64((high * np.uint64(num_blocks)) >> np.uint64(32))
            block_b = (x * num_blocks) >> 20
            shard_a = shard_of_block[Index(block_a)]
            shard_b = shard_of_block[Index(block_b)]
            if shard_a == shard_b:
                continue
            fitting += 1
            evaluated += 1
            change_a = work[Index(block_b)] - work[Index(block_a)]
            new_0 = _new_max_shard(shard_work, shard_a, shard_b, change_a, -change_a)
            energy = weight_0 * (new_0 - level_0)
            if energy > 0.0 and (energy * uniform > slack or energy > -temperature * np.log(uniform)):
                continue
            new_1 = level_1
            new_2 = level_2
            shard_work[Index(shard_a)] += change_a
            shard_work[Index(shard_b)] -= change_a
            shard_of_block[Index(block_a)] = shard_b
            shard_of_block[Index(block_b)] = shard_a
            row = row_of_block[Index(block_a)]
            row_of_block[Index(block_a)] = row_of_block[Index(block_b)]
            row_of_block[Index(block_b)] = row
        elif kind >= 4096 - pairs:
            counter += golden
            drawn, i, j, k = _draw_pair(tables, state, high, x, mix(counter))
            if not drawn:
                continue
            fitting += 1
            # Metropolis-Hastings: the pair is one of n_b − 1 with j, and would be one of n_a after the move.
            a = cell_of_sample[Index(i)]
            b = cell_of_sample[Index(j)]
            ratio = (size[Index(b)] - 1) / size[Index(a)]
            verdict, new_0, new_1, new_2 = _try_pair(
                tables, state, (level_0, level_1, level_2), weights, temperature, uniform / ratio, i, j, k
            )
            evaluated += verdict > 0
            if verdict < 2:
                continue
        else:
            i = np.int64((high * np.uint64(num_samples)) >> np.uint64(32))
            a = np.int64(cell_of_sample[Index(i)])
            if kind < exchanges + relocations:
                j = num_samples
                if tables.fixed_slots:
                    b = ((x * tables.num_rows) >> 20) * num_slots + a % num_slots
                else:
                    b = (x * num_cells) >> 20
                if a == b or size[Index(a)] <= least_samples:
                    continue
            else:
                distance = 1 + (((x >> 1) * window) >> 19)
                j = i + distance if x & 1 else i - distance
                if j < 0 or j >= num_samples:
                    continue
                b = np.int64(cell_of_sample[Index(j)])
                if a == b:
                    continue
            tokens = lengths[Index(i)] - lengths[Index(j)]
            if fill[Index(b)] + tokens > capacity or fill[Index(a)] - tokens > capacity:
                continue
            fitting += 1
            block_a = np.int64(block_of_cell[Index(a)])
            block_b = np.int64(block_of_cell[Index(b)])
            change_a, change_b = _attention_change(
                sample_attention, attention, peaks, shard_size, num_classes, i, j, None, a, b, block_a, block_b
            )
            expert_a = 0
            expert_b = 0
            if block_a != block_b and unit != 0:
                # Σ_l max_p is at least Σ_{l,p} / P: reject what fails even then.
                sums = sample_load_sums[Index(i)] - sample_load_sums[Index(j)]
                least_a = (
                    change_a + (np.int64((load_sums[Index(block_a)] - sums) * share) - expert[Index(block_a)]) * unit
                )
                least_b = (
                    change_b + (np.int64((load_sums[Index(block_b)] + sums) * share) - expert[Index(block_b)]) * unit
                )
                _, _, energy = _new_levels(
                    work,
                    shard_work,
                    shard_of_block,
                    (level_0, level_1, level_2),
                    weights,
                    block_a,
                    block_b,
                    least_a,
                    least_b,
                )
                if energy > 0.0 and energy * uniform > slack:
                    continue
                expert_a, expert_b = _peak_sums(
                    loads,
                    sample_loads,
                    np.uint64(block_a) * span,
                    np.uint64(block_b) * span,
                    np.uint64(i) * span,
                    np.uint64(j) * span,
                    num_ranks,
                    num_layers,
                )
                expert_a -= expert[Index(block_a)]
                expert_b -= expert[Index(block_b)]
                change_a += expert_a * unit
                change_b += expert_b * unit
            evaluated += 1
            new_0, new_2, energy = _new_levels(
                work,
                shard_work,
                shard_of_block,
                (level_0, level_1, level_2),
                weights,
                block_a,
                block_b,
                change_a,
                change_b,
            )
            new_1 = level_1 + change_a + change_b
            if energy > 0.0 and (energy * uniform > slack or energy > -temperature * np.log(uniform)):
                continue
            _exchange(tables, state, i, j, a, b, (change_a, change_b, expert_a, expert_b))
        level_0 = new_0
        level_1 = new_1
        level_2 = new_2
        accepted += 1
        if new_0 < best_0 or (new_0 == best_0 and (new_1 < best_1 or (new_1 == best_1 and new_2 < best_2))):
            improved += 1
            best_0 = new_0
            best_1 = new_1
            best_2 = new_2
            _archive(cell_of_sample, row_of_block, shard_of_block, best_cell, best_row, best_shard, touched, is_touched)
    rng[0] = counter
    levels[0] = level_0
    levels[1] = level_1
    levels[2] = level_2
    state.best_levels[0] = best_0
    state.best_levels[1] = best_1
    state.best_levels[2] = best_2
    counts[0] += num_proposals
    counts[1] += fitting
    counts[2] += evaluated
    counts[3] += accepted
    counts[4] += improved


@njit(cache=True, nogil=True)
def _move(tables: _Tables, state: _State, i: Number, j: Number, k: Number, a: Number, b: Number, apply: Number) -> Any:
    """Price, and carry out if asked, that sample i of cell ``a`` and j, k (or zero samples) of ``b`` change places."""
    block_a = np.int64(tables.block_of_cell[a])
    block_b = np.int64(tables.block_of_cell[b])
    change_a, change_b = _attention_change(
        tables.attention,
        state.attention,
        state.peaks,
        tables.shard_size,
        tables.num_classes,
        i,
        j,
        k,
        a,
        b,
        block_a,
        block_b,
    )
    expert_a = 0
    expert_b = 0
    if block_a != block_b and tables.expert_unit != 0:
        expert_a, expert_b = _price_pair(tables, state, i, j, k, a, b)
        change_a += expert_a * tables.expert_unit
        change_b += expert_b * tables.expert_unit
    level_0 = _new_max_shard(
        state.shard_work, state.shard_of_block[block_a], state.shard_of_block[block_b], change_a, change_b
    )
    level_0 -= state.levels[0]
    level_1 = change_a + change_b
    level_2 = _new_max_row(state.work, state.levels[2], block_a, block_b, change_a, change_b) - state.levels[2]
    if apply:
        _apply(tables, state, i, j, k, a, b, (change_a, change_b, expert_a, expert_b))
        state.levels[0] += level_0
        state.levels[1] += level_1
        state.levels[2] += level_2
    return level_0, level_1, level_2


class MoveTables:
    """Everything about a problem and a placement that packings share; build once, use for many.

    Parameters
    ----------
    rank_load : array-like of int, shape [N, L, P]
        Routed tokens of each sample per layer and EP rank. L may be 0.
    attention_work : array-like of int, shape [S, N]
        Work units of each sample per attention operator class. S may be 0.
    expert_unit : int
        Work units per routed token; 0 leaves the expert work out.
    aligned_lengths : array-like of int, shape [N]
        Tokens each sample takes of a cell.
    capacity : int
        C, tokens of a cell.
    num_rows : int
        R.
    shard_of_slot : array-like of int, shape [D]
        EDP shard of each DP slot; all shards equal in size.
    min_samples_per_cell : int
        0 or 1; relocations never leave fewer.
    equal_samples_per_slot : bool
        Relocations stay within a DP slot, blocks are not exchanged and walks leave
        out swaps of one for two, so that
        the number of samples of every slot stays what it is.

    Attributes
    ----------
    sample_of_index : ndarray of int64, shape [N]
        Samples in ascending order of (aligned length, attention work, index): the
        order in which swap partners are near.

    Raises
    ------
    InvalidInputError
        If shapes or values do not fit together, or the load of a rank over all
        samples exceeds int32.
    """

    def __init__(
        self,
        rank_load: npt.ArrayLike,
        attention_work: npt.ArrayLike,
        *,
        expert_unit: int,
        aligned_lengths: npt.ArrayLike,
        capacity: int,
        num_rows: int,
        shard_of_slot: npt.ArrayLike,
        min_samples_per_cell: int = 0,
        equal_samples_per_slot: bool = False,
    ) -> None:
        loads = np.asarray(rank_load)
        attention = np.asarray(attention_work)
        lengths = np.asarray(aligned_lengths).astype(np.int64)
        shards = np.asarray(shard_of_slot).astype(np.int64)
        faults = Faults()
        if loads.ndim != 3:
            faults.add(f"rank_load has shape {loads.shape}; it must be [N, L, P]")
        if attention.ndim != 2:
            faults.add(f"attention_work has shape {attention.shape}; it must be [S, N]")
        if lengths.ndim != 1 or lengths.size == 0:
            faults.add(f"aligned_lengths has shape {lengths.shape}; it must be [N] with N at least 1")
        faults.raise_if_any("move tables")
        num_samples = len(lengths)
        if len(loads) != num_samples:
            faults.add(f"rank_load has {len(loads)} samples, aligned_lengths {num_samples}")
        if attention.shape[1] != num_samples:
            faults.add(f"attention_work has {attention.shape[1]} samples, aligned_lengths {num_samples}")
        slots_of_shard = np.bincount(shards) if shards.size and shards.min() >= 0 else np.zeros(1, np.int64)
        if slots_of_shard.min() != slots_of_shard.max() or slots_of_shard.min() == 0:
            faults.add(f"shard_of_slot gives shards of {slots_of_shard.tolist()} slots; they must be equal, not empty")
        if num_rows < 1:
            faults.add(f"num_rows is {num_rows}; it must be at least 1")
        for name, array in (("rank_load", loads), ("attention_work", attention)):
            if array.dtype.kind not in "iu":
                faults.add(f"{name} has dtype {array.dtype}; it must hold integers")
            elif array.size and array.min() < 0:
                faults.add(f"{name} has a value below 0: {array.min()}")
        faults.raise_if_any("move tables")
        if loads.size and (top := int(loads.sum(axis=0, dtype=np.int64).max())) > _INT32_MAX:
            faults.add(f"{top} tokens on one rank and layer are above the int32 limit {_INT32_MAX} of the load arrays")
        faults.raise_if_any("move tables")
        self.num_samples = num_samples
        self.num_rows = int(num_rows)
        self.num_shards = len(slots_of_shard)
        self.shard_size = int(slots_of_shard[0])
        self.shard_of_slot: IntArray = shards
        # Position of every slot inside its shard, and the slots of a shard in ascending order.
        by_shard = np.argsort(shards, kind="stable")
        self._slots: IntArray = by_shard.reshape(self.num_shards, self.shard_size)
        self._place_in_shard: IntArray = np.empty(len(shards), dtype=np.int64)
        self._place_in_shard[by_shard] = np.tile(np.arange(self.shard_size), self.num_shards)
        self.sample_of_index: IntArray = np.lexsort(
            (np.arange(num_samples), attention.sum(axis=0, dtype=np.int64), lengths)
        ).astype(np.int64)
        self._index_of_sample: IntArray = np.empty(num_samples, dtype=np.int64)
        self._index_of_sample[self.sample_of_index] = np.arange(num_samples)
        num_layers, num_ranks = loads.shape[1:]
        padded = -(-num_layers // _TILE) * _TILE
        narrow = not loads.size or int(loads.max()) < 2**16
        flat = np.zeros((num_samples + 1, num_ranks, padded), dtype=np.uint16 if narrow else np.int32)
        flat[:num_samples, :, :num_layers] = loads.transpose(0, 2, 1)[self.sample_of_index]
        work = np.zeros((num_samples + 1, len(attention)), dtype=np.int64)
        work[:num_samples] = attention.T[self.sample_of_index]
        padded_lengths = np.zeros(num_samples + 1, dtype=np.int64)
        padded_lengths[:num_samples] = lengths[self.sample_of_index]
        self.kernel_tables = _Tables(
            loads=flat.reshape(-1),
            load_sums=flat.sum(axis=(1, 2), dtype=np.int64),
            attention=work.reshape(-1),
            lengths=padded_lengths,
            block_of_cell=np.repeat(np.arange(self.num_rows * self.num_shards, dtype=np.int32), self.shard_size),
            num_samples=num_samples,
            num_classes=len(attention),
            num_ranks=max(num_ranks, 1),
            num_layers=padded,
            num_shards=self.num_shards,
            num_rows=self.num_rows,
            shard_size=self.shard_size,
            capacity=int(capacity),
            least_samples=int(min_samples_per_cell),
            expert_unit=int(expert_unit) if loads.size else 0,
            fixed_slots=int(equal_samples_per_slot),
        )

    @classmethod
    def of(cls, problem: Problem, placement: Placement) -> MoveTables:
        """Take everything from a problem and a placement."""
        return cls(
            placement.rank_load(problem),
            problem.attention_work,
            expert_unit=problem.expert_unit,
            aligned_lengths=problem.aligned_lengths,
            capacity=problem.capacity,
            num_rows=problem.num_rows,
            shard_of_slot=problem.shard_of_slot,
            min_samples_per_cell=problem.min_samples_per_cell,
            equal_samples_per_slot=problem.equal_samples_per_slot,
        )


class BlockLoads:
    """A packing with the exact work of its blocks, kept current under moves.

    Four moves exist: *relocate* a sample to another cell, *swap* two samples,
    *swap a pair* of one cell with one sample of another, and *exchange* the
    places (row, shard) of two whole blocks. Each has a
    ``…_change`` method that prices it and a method that carries it out.

    Parameters
    ----------
    tables : MoveTables
        The problem side, shared by any number of packings.
    row_of_sample : array-like of int, shape [N]
        Row of each sample.
    dp_slot_of_sample : array-like of int, shape [N]
        DP slot of each sample.

    Raises
    ------
    InvalidInputError
        If a row or slot is out of range. Cells above capacity are accepted: moves
        may empty them, but never fill a cell beyond capacity.
    """

    def __init__(self, tables: MoveTables, row_of_sample: npt.ArrayLike, dp_slot_of_sample: npt.ArrayLike) -> None:
        self.tables = tables
        t = tables.kernel_tables
        num_blocks = t.num_rows * t.num_shards
        num_cells = num_blocks * t.shard_size
        n = t.num_samples
        self._state = _State(
            cell_of_sample=np.zeros(n, dtype=np.int32),
            fill=np.zeros(num_cells, dtype=np.int64),
            size=np.zeros(num_cells, dtype=np.int64),
            next_in_cell=np.zeros(n + num_cells, dtype=np.int32),
            previous_in_cell=np.zeros(n + num_cells, dtype=np.int32),
            attention=np.zeros(num_cells * t.num_classes, dtype=np.int64),
            peaks=np.zeros(num_blocks * t.num_classes * 3, dtype=np.int64),
            loads=np.zeros(num_blocks * t.num_ranks * t.num_layers, dtype=np.int32),
            load_sums=np.zeros(num_blocks, dtype=np.int64),
            expert=np.zeros(num_blocks, dtype=np.int64),
            work=np.zeros(num_blocks, dtype=np.int64),
            row_of_block=np.zeros(num_blocks, dtype=np.int64),
            shard_of_block=np.zeros(num_blocks, dtype=np.int64),
            shard_work=np.zeros(t.num_shards, dtype=np.int64),
            levels=np.zeros(3, dtype=np.int64),
            best_cell=np.zeros(n, dtype=np.int32),
            best_row=np.zeros(num_blocks, dtype=np.int64),
            best_shard=np.zeros(num_blocks, dtype=np.int64),
            best_levels=np.zeros(3, dtype=np.int64),
            touched=np.zeros(n + 1, dtype=np.int32),
            is_touched=np.zeros(n, dtype=np.uint8),
        )
        self._counts = np.zeros(5, dtype=np.int64)
        self.reset(row_of_sample, dp_slot_of_sample)

    @classmethod
    def of(cls, problem: Problem, placement: Placement, packing: Packing) -> BlockLoads:
        """Load a packing of a problem under a placement."""
        return cls(MoveTables.of(problem, placement), packing.row_of_sample, packing.dp_slot_of_sample)

    def reset(self, row_of_sample: npt.ArrayLike, dp_slot_of_sample: npt.ArrayLike) -> None:
        """Load another packing; the archive starts anew with it."""
        tables, state = self.tables, self._state
        rows = np.asarray(row_of_sample).astype(np.int64)
        slots = np.asarray(dp_slot_of_sample).astype(np.int64)
        faults = Faults()
        for name, array, limit in (
            ("row_of_sample", rows, tables.num_rows),
            ("dp_slot_of_sample", slots, len(tables.shard_of_slot)),
        ):
            if array.shape != (tables.num_samples,):
                faults.add(f"{name} has shape {array.shape}; it must be [{tables.num_samples}]")
            else:
                for i in np.flatnonzero((array < 0) | (array >= limit)):
                    faults.add(f"{name}: sample {i} has {array[i]}; it must be in 0..{limit - 1}")
        faults.raise_if_any("packing")
        block = rows * tables.num_shards + tables.shard_of_slot[slots]
        cells = block * tables.shard_size + tables._place_in_shard[slots]
        state.cell_of_sample[:] = cells[tables.sample_of_index]
        state.row_of_block[:], state.shard_of_block[:] = np.divmod(np.arange(len(state.work)), tables.num_shards)
        _rebuild(tables.kernel_tables, state)
        self.restart_archive()

    def restart_archive(self) -> None:
        """Make the current packing the best archived one."""
        state = self._state
        state.best_cell[:] = state.cell_of_sample
        state.best_row[:] = state.row_of_block
        state.best_shard[:] = state.shard_of_block
        state.best_levels[:] = state.levels
        state.touched[-1] = 0
        state.is_touched[:] = 0

    def copy_from(self, other: BlockLoads) -> None:
        """Take over packing and archive of another one with the same tables."""
        if other.tables is not self.tables:
            raise InvalidInputError("the two packings do not share their MoveTables")
        for field in _State._fields:
            getattr(self._state, field)[...] = getattr(other._state, field)

    # -- what it is now ---------------------------------------------------------------------------------------

    @property
    def levels(self) -> tuple[int, int, int]:
        """Work of the heaviest shard, all work, work of the heaviest block."""
        a, b, c = self._state.levels
        return int(a), int(b), int(c)

    @property
    def best_levels(self) -> tuple[int, int, int]:
        """The levels of the best packing archived."""
        a, b, c = self._state.best_levels
        return int(a), int(b), int(c)

    @property
    def block_work(self) -> IntArray:
        """Work of every block, int64 [R, G]."""
        tables, state = self.tables, self._state
        work = np.empty((tables.num_rows, tables.num_shards), dtype=np.int64)
        work[state.row_of_block, state.shard_of_block] = state.work
        return work

    @property
    def cell_tokens(self) -> IntArray:
        """Aligned tokens of every cell, int64 [R, D]."""
        return self._by_cell(self._state.fill)

    @property
    def cell_samples(self) -> IntArray:
        """Samples of every cell, int64 [R, D]."""
        return self._by_cell(self._state.size)

    def _by_cell(self, values: IntArray) -> IntArray:
        tables, state = self.tables, self._state
        table = np.empty((tables.num_rows, len(tables.shard_of_slot)), dtype=np.int64)
        table[state.row_of_block[:, None], tables._slots[state.shard_of_block]] = values.reshape(-1, tables.shard_size)
        return table

    def packing(self) -> tuple[IntArray, IntArray]:
        """Row and DP slot of every sample, int64 [N] each."""
        state = self._state
        return self._decoded(state.cell_of_sample, state.row_of_block, state.shard_of_block)

    def best_packing(self) -> tuple[IntArray, IntArray]:
        """Row and DP slot of every sample in the best packing archived, int64 [N] each."""
        state = self._state
        return self._decoded(state.best_cell, state.best_row, state.best_shard)

    def _decoded(
        self, cell_of_index: npt.NDArray[np.int32], row_of_block: IntArray, shard_of_block: IntArray
    ) -> tuple[IntArray, IntArray]:
        tables = self.tables
        blocks, places = np.divmod(cell_of_index[tables._index_of_sample].astype(np.int64), tables.shard_size)
        return row_of_block[blocks], tables._slots[shard_of_block[blocks], places]

    # -- moves ------------------------------------------------------------------------------------------------

    def _block(self, row: int, shard: int) -> int:
        tables = self.tables
        if not (0 <= row < tables.num_rows and 0 <= shard < tables.num_shards):
            raise InvalidInputError(
                f"block ({row}, {shard}) is outside {tables.num_rows} rows x {tables.num_shards} shards"
            )
        state = self._state
        return int(np.flatnonzero((state.row_of_block == row) & (state.shard_of_block == shard))[0])

    def _cell(self, row: int, dp_slot: int) -> int:
        tables = self.tables
        if not 0 <= dp_slot < len(tables.shard_of_slot):
            raise InvalidInputError(f"DP slot {dp_slot} is outside 0..{len(tables.shard_of_slot) - 1}")
        block = self._block(row, int(tables.shard_of_slot[dp_slot]))
        return block * tables.shard_size + int(tables._place_in_shard[dp_slot])

    def _index(self, sample: int) -> int:
        if not 0 <= sample < self.tables.num_samples:
            raise InvalidInputError(f"sample {sample} is outside 0..{self.tables.num_samples - 1}")
        return int(self.tables._index_of_sample[sample])

    def _fits(self, i: int, j: int, k: int, a: int, b: int) -> bool:
        t, state = self.tables.kernel_tables, self._state
        tokens = t.lengths[i] - t.lengths[j] - t.lengths[k]
        if a == b:
            return True
        # One cell loses a sample and the other gains one, except in a swap.
        loser = a if j == t.num_samples else b if k < t.num_samples else None
        if loser is not None and (
            state.size[loser] <= t.least_samples or (t.fixed_slots and self._slot_of_cell(a) != self._slot_of_cell(b))
        ):
            return False
        return bool(
            (tokens <= 0 or state.fill[b] + tokens <= t.capacity)
            and (tokens >= 0 or state.fill[a] - tokens <= t.capacity)
        )

    def _slot_of_cell(self, cell: int) -> int:
        block, place = divmod(cell, self.tables.shard_size)
        return int(self.tables._slots[self._state.shard_of_block[block], place])

    def _move(self, i: int, j: int, k: int, a: int, b: int, *, apply: bool) -> LevelChange:
        if a == b:
            return LevelChange(0, 0, 0)
        if apply and not self._fits(i, j, k, a, b):
            raise InvalidInputError("the move breaks capacity, the least samples of a cell or the slot of a sample")
        change = _move(self.tables.kernel_tables, self._state, i, j, k, a, b, apply)
        if apply:
            self._archive_if_better()
        return LevelChange(*(int(value) for value in change))

    def _archive_if_better(self) -> None:
        if self.levels < self.best_levels:
            self.restart_archive()

    def _relocation_arguments(self, sample: int, row: int, dp_slot: int) -> tuple[int, int, int, int, int]:
        i, zero = self._index(sample), self.tables.num_samples
        return i, zero, zero, int(self._state.cell_of_sample[i]), self._cell(row, dp_slot)

    def can_relocate(self, sample: int, row: int, dp_slot: int) -> bool:
        """Whether the move keeps capacity, the least samples of a cell and equal samples of slots."""
        return self._fits(*self._relocation_arguments(sample, row, dp_slot))

    def relocate_change(self, sample: int, row: int, dp_slot: int) -> LevelChange:
        """Price moving a sample to a cell, whether or not it fits there."""
        return self._move(*self._relocation_arguments(sample, row, dp_slot), apply=False)

    def relocate(self, sample: int, row: int, dp_slot: int) -> LevelChange:
        """Move a sample to a cell.

        Raises
        ------
        InvalidInputError
            If :meth:`can_relocate` denies it.
        """
        return self._move(*self._relocation_arguments(sample, row, dp_slot), apply=True)

    def _swap_arguments(self, sample: int, other: int) -> tuple[int, int, int, int, int]:
        i, j = self._index(sample), self._index(other)
        cells = self._state.cell_of_sample
        return i, j, self.tables.num_samples, int(cells[i]), int(cells[j])

    def can_swap(self, sample: int, other: int) -> bool:
        """Whether swapping two samples keeps capacity."""
        return self._fits(*self._swap_arguments(sample, other))

    def swap_change(self, sample: int, other: int) -> LevelChange:
        """Price swapping the cells of two samples, whether or not they fit."""
        return self._move(*self._swap_arguments(sample, other), apply=False)

    def swap(self, sample: int, other: int) -> LevelChange:
        """Swap the cells of two samples.

        Raises
        ------
        InvalidInputError
            If :meth:`can_swap` denies it.
        """
        return self._move(*self._swap_arguments(sample, other), apply=True)

    def _pair_arguments(self, sample: int, first: int, second: int) -> tuple[int, int, int, int, int]:
        i, j, k = self._index(sample), self._index(first), self._index(second)
        cells = self._state.cell_of_sample
        faults = Faults()
        if len({i, j, k}) < 3:
            faults.add(f"samples {sample}, {first} and {second} are not three different ones")
        if cells[j] != cells[k]:
            faults.add(f"samples {first} and {second} are not in one cell")
        faults.raise_if_any("pair")
        return i, j, k, int(cells[i]), int(cells[j])

    def can_swap_pair(self, sample: int, first: int, second: int) -> bool:
        """Whether a sample and a pair of another cell may change places.

        The move must keep capacity, the least samples of the cell of the pair and
        equal samples of slots. A pair in the cell of the sample stays where it is.

        Raises
        ------
        InvalidInputError
            If the three samples are not different or the two of the pair not in one
            cell; so do the other two methods.
        """
        return self._fits(*self._pair_arguments(sample, first, second))

    def swap_pair_change(self, sample: int, first: int, second: int) -> LevelChange:
        """Price swapping the cells of a sample and of a pair, whether or not they fit."""
        return self._move(*self._pair_arguments(sample, first, second), apply=False)

    def swap_pair(self, sample: int, first: int, second: int) -> LevelChange:
        """Swap the cells of a sample and of two samples that share another cell.

        Raises
        ------
        InvalidInputError
            If :meth:`can_swap_pair` denies it.
        """
        return self._move(*self._pair_arguments(sample, first, second), apply=True)

    def exchange_change(self, row: int, shard: int, other_row: int, other_shard: int) -> LevelChange:
        """Price exchanging the places of two blocks."""
        state = self._state
        a, b = self._block(row, shard), self._block(other_row, other_shard)
        shard_work = state.shard_work.copy()
        shard_work[shard] += state.work[b] - state.work[a]
        shard_work[other_shard] += state.work[a] - state.work[b]
        return LevelChange(int(shard_work.max() - state.levels[0]), 0, 0)

    def exchange(self, row: int, shard: int, other_row: int, other_shard: int) -> LevelChange:
        """Exchange the places of two blocks, cell by cell.

        Raises
        ------
        InvalidInputError
            If the samples of every slot must stay equal in number.
        """
        if self.tables.kernel_tables.fixed_slots:
            raise InvalidInputError("blocks are not exchanged when DP slots must keep equal numbers of samples")
        state = self._state
        change = self.exchange_change(row, shard, other_row, other_shard)
        pair = [self._block(row, shard), self._block(other_row, other_shard)]
        difference = state.work[pair[1]] - state.work[pair[0]]
        state.shard_work[shard] += difference
        state.shard_work[other_shard] -= difference
        state.levels[0] += change.max_shard_work
        state.row_of_block[pair] = state.row_of_block[pair[::-1]]
        state.shard_of_block[pair] = state.shard_of_block[pair[::-1]]
        self._archive_if_better()
        return change

    # -- walks ------------------------------------------------------------------------------------------------

    def walk(
        self,
        rng: npt.NDArray[np.uint64],
        *,
        num_proposals: int,
        temperature: float,
        energy_weights: Sequence[float],
        relocation_share: float = 0.25,
        exchange_share: float = 0.005,
        swap_window: int = 16,
        pair_share: float = 0.0,
    ) -> WalkCounts:
        """Propose random moves and accept them by the Metropolis rule; releases the GIL.

        The energy is Σ_k energy_weights[k] · level_k as float64. A swap takes a
        random sample and a partner at most ``swap_window`` places away in the
        order of lengths; a relocation takes a random sample and cell; an exchange
        takes two random blocks of different shards. These kinds are symmetric. A
        swap of one for two takes a random sample, another one of its cell and, as
        their counterpart, one of the eight samples around their total length in the
        order of lengths; from the other side the pair is drawn with a chance that is
        (n_b − 1) / n_a times as large, where n_a samples shared the cell of the one
        and n_b that of the pair, and the Hastings correction puts this ratio before
        the Boltzmann factor. So the walk samples the Boltzmann distribution over the
        packings it reaches. Moves that break capacity or the cell minimum count as rejected. The best
        packing by exact levels is archived on the way.

        Parameters
        ----------
        rng : ndarray of uint64, shape [1]
            State of the generator; advanced in place.
        num_proposals : int
        temperature : float
            In the unit of the energy, not negative; 0 accepts what does not raise the
            energy.
        energy_weights : sequence of 3 float
            Per work unit, not negative.
        relocation_share, exchange_share : float
            Share of relocations and of block exchanges among proposals; the rest
            are swaps. Rounded to 1/4096. Exchanges are off when there is one shard
            or slots keep equal numbers of samples.
        swap_window : int
            Largest distance of swap partners in the order of lengths.
        pair_share : float
            Share of swaps of one for two among proposals, rounded alike; the three
            shares add up to at most 1. Off when slots keep equal numbers of samples.
            At 0 they cost nothing and draw no random numbers.

        Returns
        -------
        WalkCounts

        Raises
        ------
        InvalidInputError
            If the shares are below 0 or add up to more than 1.

        Notes
        -----
        W. K. Hastings, Biometrika 57 (1970) 97, doi:10.1093/biomet/57.1.97.
        """
        t = self.tables.kernel_tables
        shares = (relocation_share, exchange_share, pair_share)
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise InvalidInputError(
                f"relocation_share is {shares[0]!r}, exchange_share {shares[1]!r} and pair_share {shares[2]!r}; they "
                "must not be below 0 nor add up to more than 1"
            )
        relocations = round(relocation_share * 4096)
        pairs = 0 if t.fixed_slots else round(pair_share * 4096)
        exchanges = round(exchange_share * 4096) if t.num_shards > 1 and not t.fixed_slots else 0
        w0, w1, w2 = (float(weight) for weight in energy_weights)
        before = self._counts.copy()
        _walk(
            t,
            self._state,
            rng,
            self._counts,
            float(temperature),
            w0,
            w1,
            w2,
            relocations,
            exchanges,
            pairs,
            min(int(swap_window), max(t.num_samples - 1, 1)),
            int(num_proposals),
        )
        return WalkCounts(*(int(x) for x in self._counts - before))
