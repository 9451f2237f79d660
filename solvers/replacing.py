"""Placement for a packing that is already known: which experts share a rank, judged block by block.

The usual placers balance the load of the whole window. What a step really
waits for is Σ_{r,g} max_p W, the hottest rank of every block, and for a known
packing that can be minimised directly, layer by layer: experts change ranks
two at a time, and Σ_b max_p over the B = R·G blocks is recomputed in O(B).

Two searches follow each other in every layer.

1. *Spread annealing.* The landscape of Σ_b max_p is full of plateaus (a swap
   that avoids every hottest rank changes nothing), so the first search lowers
   the spread Σ_{b,p} (W_{b,p} − mean)² instead, whose change is

       d·(W_p − W_q) + |d|²,   d = A_f − A_e   (half of it, over the blocks),

   when expert e of rank p and f of rank q change places. One step takes one
   expert and prices its exchange with *all* experts of the other ranks in a
   single pass over the loads: O(B) each, a handful of vector instructions for
   eight of them. The exchange is drawn from the Boltzmann distribution over
   all candidates by the Gumbel-max rule (Maddison, Tarlow & Minka 2014,
   arXiv:1411.0030), with the noise read from a table; the temperature falls
   geometrically (Kirkpatrick, Gelatt & Vecchi 1983, doi:10.1126/science.220.4598.671).
   Candidates of different ranks do not form one closed set, so this is a
   heuristic relative of a heat-bath sampler, not one.
2. *Peak descent.* Steepest pairwise exchanges on the true Σ_b max_p, exact
   integers, until no exchange of two experts improves.

Measured against descent on the true objective alone the spread search reaches
less than half the remaining imbalance in the same time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.solver import Run, Solver
from routepack_opt.splitmix import next_number

__all__ = ["Fit", "Replacing", "fit_ranks", "sum_blocks"]

_alloca: Any = cgutils.alloca_once
_tuple_type: Any = types.Tuple

_LANES = 8  # slots of a rank are padded to a multiple of this
_TILE = 32  # float loads are stored [slot tile, block, lane]
_NOISE = 4096  # entries of the noise table
_CHUNK = 15_000_000  # block loads one kernel call may look at: 10-20 ms

FIRST_TEMPERATURE = 0.02
LAST_TEMPERATURE = 2e-4


def _data(context: Any, builder: Any, call: Any, arguments: Any, k: int) -> Any:
    return context.make_array(call.args[k])(context, builder, arguments[k]).data


def _vector_tools(builder: Any, element: Any) -> tuple[Any, Any, Any, Any]:
    """Vector type of eight elements and helpers that load, store and broadcast it."""
    vector = ir.VectorType(element, _LANES)
    lane = ir.IntType(32)

    def load(base: Any, index: Any) -> Any:
        return builder.load(builder.bitcast(builder.gep(base, [index]), vector.as_pointer()), align=4)

    def store(value: Any, base: Any, index: Any) -> None:
        builder.store(value, builder.bitcast(builder.gep(base, [index]), vector.as_pointer()), align=4)

    def splat(value: Any) -> Any:
        undefined = ir.Constant(vector, ir.Undefined)
        one = builder.insert_element(undefined, value, ir.Constant(lane, 0))
        return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(lane, _LANES), [0] * _LANES))

    return vector, load, store, splat


def _best_swap_code(
    typing_context: Any,
    loads: Any,
    direction: Any,
    own: Any,
    shift: Any,
    noise: Any,
    noise_start: Any,
    temperature: Any,
    num_blocks: Any,
    num_slots: Any,
) -> Any:
    """Price the exchange of one expert with the one in every slot; return the least noisy price and its slot.

    The price of slot f is ``own[f] + shift[f] + Σ_b direction[b]·loads[f, b] − temperature·noise[noise_start + f]``
    with ``loads`` in tiles of 32 slots; the number of slots is a multiple of 32.
    """
    signature = _tuple_type((types.float32, types.int64))(
        loads, direction, own, shift, noise, types.int64, types.float32, types.int64, types.int64
    )

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        single, word, half = ir.FloatType(), ir.IntType(64), ir.IntType(32)
        vector, load, _, splat = _vector_tools(builder, single)
        indices, _, _, splat_index = _vector_tools(builder, half)
        load_data, direction_data, own_data, shift_data, noise_data = (
            _data(context, builder, call, arguments, k) for k in range(5)
        )
        noise_start, temperature, num_blocks, num_slots = arguments[5:9]
        fast = ("fast",)
        scale = splat(temperature)
        least = _alloca(builder, vector)
        builder.store(ir.Constant(vector, [1e30] * _LANES), least)
        found = _alloca(builder, indices)
        builder.store(ir.Constant(indices, None), found)
        lanes = ir.Constant(indices, list(range(_LANES)))
        width = ir.Constant(word, _TILE)
        with cgutils.for_range_slice(builder, ir.Constant(word, 0), num_slots, width, word) as (first, _):
            offsets = [builder.add(first, ir.Constant(word, k)) for k in range(0, _TILE, _LANES)]
            sums = [_alloca(builder, vector) for _ in offsets]
            for total, offset in zip(sums, offsets, strict=True):
                builder.store(builder.fadd(load(own_data, offset), load(shift_data, offset), flags=fast), total)
            row = _alloca(builder, word)
            builder.store(builder.mul(first, num_blocks), row)
            with cgutils.for_range(builder, num_blocks) as blocks:
                factor = splat(builder.load(builder.gep(direction_data, [blocks.index])))
                at = builder.load(row)
                for k, total in enumerate(sums):
                    value = load(load_data, builder.add(at, ir.Constant(word, k * _LANES)))
                    product = builder.fmul(factor, value, flags=fast)
                    builder.store(builder.fadd(builder.load(total), product, flags=fast), total)
                builder.store(builder.add(at, width), row)
            for total, offset in zip(sums, offsets, strict=True):
                drawn = builder.fmul(scale, load(noise_data, builder.add(noise_start, offset)), flags=fast)
                value = builder.fsub(builder.load(total), drawn, flags=fast)
                held = builder.load(least)
                better = builder.fcmp_ordered("<", value, held)
                builder.store(builder.select(better, value, held), least)
                here = builder.add(splat_index(builder.trunc(offset, half)), lanes)
                builder.store(builder.select(better, here, builder.load(found)), found)
        held, places = builder.load(least), builder.load(found)
        price = builder.extract_element(held, ir.Constant(half, 0))
        slot = builder.extract_element(places, ir.Constant(half, 0))
        for k in range(1, _LANES):
            value = builder.extract_element(held, ir.Constant(half, k))
            better = builder.fcmp_ordered("<", value, price)
            price = builder.select(better, value, price)
            slot = builder.select(better, builder.extract_element(places, ir.Constant(half, k)), slot)
        return context.make_tuple(builder, call.return_type, [price, builder.zext(slot, word)])

    return signature, generate


_best_swap: Any = intrinsic(_best_swap_code)


def _weigh_code(
    typing_context: Any,
    matrix: Any,
    start: Any,
    stride: Any,
    weights: Any,
    weight_start: Any,
    weight_stride: Any,
    num_blocks: Any,
    out: Any,
    out_start: Any,
) -> Any:
    """``out[out_start + k] += Σ_b weights[weight_start + b·weight_stride] · matrix[start + b·stride + k]``, k < 8."""
    signature = types.void(
        matrix, types.int64, types.int64, weights, types.int64, types.int64, types.int64, out, types.int64
    )

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        vector, load, store, splat = _vector_tools(builder, ir.FloatType())
        matrix_data = _data(context, builder, call, arguments, 0)
        weight_data = _data(context, builder, call, arguments, 3)
        out_data = _data(context, builder, call, arguments, 7)
        start, stride = arguments[1:3]
        weight_start, weight_stride, num_blocks = arguments[4:7]
        out_start = arguments[8]
        fast = ("fast",)
        total = _alloca(builder, vector)
        builder.store(load(out_data, out_start), total)
        at, weight_at = _alloca(builder, word), _alloca(builder, word)
        builder.store(start, at)
        builder.store(weight_start, weight_at)
        with cgutils.for_range(builder, num_blocks):
            weight = splat(builder.load(builder.gep(weight_data, [builder.load(weight_at)])))
            product = builder.fmul(weight, load(matrix_data, builder.load(at)), flags=fast)
            builder.store(builder.fadd(builder.load(total), product, flags=fast), total)
            builder.store(builder.add(builder.load(at), stride), at)
            builder.store(builder.add(builder.load(weight_at), weight_stride), weight_at)
        store(builder.load(total), out_data, out_start)
        return context.get_dummy_value()

    return signature, generate


_weigh: Any = intrinsic(_weigh_code)


def _swap_peaks_code(
    typing_context: Any,
    loads: Any,
    start: Any,
    without: Any,
    with_it: Any,
    others: Any,
    num_blocks: Any,
    num_lanes: Any,
    peaks: Any,
) -> Any:
    """``peaks[k] = Σ_b max(without[b] + a, with_it[b] − a, others[b])`` with a = load of the k-th expert of a rank.

    ``without``: its rank p without expert e; ``with_it``: the other rank with e
    on top; ``others``: largest of the remaining ranks. The loads of a rank are
    stored ``[block, lane]`` from ``start`` on; lanes are a multiple of eight.
    """
    signature = types.void(loads, types.int64, without, with_it, others, types.int64, types.int64, peaks)

    def generate(context: Any, builder: Any, call: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        vector, load, store, splat = _vector_tools(builder, ir.IntType(32))
        load_data = _data(context, builder, call, arguments, 0)
        start = arguments[1]
        sides = [_data(context, builder, call, arguments, k) for k in (2, 3, 4)]
        num_blocks, num_lanes = arguments[5:7]
        peak_data = _data(context, builder, call, arguments, 7)
        position = _alloca(builder, word)
        builder.store(ir.Constant(word, 0), position)

        def largest(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def tiles(count: int) -> None:
            head, body, leave = (
                builder.append_basic_block(f"tile{count}.{part}") for part in ("head", "body", "leave")
            )
            builder.branch(head)
            builder.position_at_end(head)
            first = builder.load(position)
            following = builder.add(first, ir.Constant(word, count * _LANES))
            builder.cbranch(builder.icmp_signed("<=", following, num_lanes), body, leave)
            builder.position_at_end(body)
            sums = [_alloca(builder, vector) for _ in range(count)]
            for total in sums:
                builder.store(ir.Constant(vector, None), total)
            row = _alloca(builder, word)
            builder.store(builder.add(start, first), row)
            with cgutils.for_range(builder, num_blocks) as blocks:
                low, high, rest = (splat(builder.load(builder.gep(side, [blocks.index]))) for side in sides)
                at = builder.load(row)
                for k, total in enumerate(sums):
                    value = load(load_data, builder.add(at, ir.Constant(word, k * _LANES)))
                    top = largest(largest(builder.add(low, value), builder.sub(high, value)), rest)
                    builder.store(builder.add(builder.load(total), top), total)
                builder.store(builder.add(at, num_lanes), row)
            for k, total in enumerate(sums):
                store(builder.load(total), peak_data, builder.add(first, ir.Constant(word, k * _LANES)))
            builder.store(following, position)
            builder.branch(head)
            builder.position_at_end(leave)

        tiles(4)
        tiles(1)
        return context.get_dummy_value()

    return signature, generate


_swap_peaks: Any = intrinsic(_swap_peaks_code)


@njit(cache=True, nogil=True)
def _sum_blocks(
    counts: npt.NDArray[Any],
    block_of_sample: IntArray,
    out: npt.NDArray[np.int32],
    start: int,
    stop: int,
    first_layer: int,
    last_layer: int,
) -> None:
    """out[l, b, :] += counts[i, l, :] for samples start..stop and layers first..last."""
    num_experts = counts.shape[2]
    for i in range(start, stop):
        block = block_of_sample[i]
        for layer in range(first_layer, last_layer):
            source = counts[i, layer]
            target = out[layer, block]
            for expert in range(num_experts):
                target[expert] += np.int32(source[expert])


@njit(cache=True, nogil=True)
def _fill_slots(
    rank_of_expert: npt.NDArray[np.int32], num_ranks: int, num_lanes: int, expert_of_slot: npt.NDArray[np.int32]
) -> None:
    """Experts of each rank in ascending order from slot p · num_lanes on; −1 where padding."""
    expert_of_slot[:] = -1
    filled = np.zeros(num_ranks, dtype=np.int64)
    for expert in range(rank_of_expert.shape[0]):
        p = rank_of_expert[expert]
        expert_of_slot[p * num_lanes + filled[p]] = expert
        filled[p] += 1


@njit(cache=True, nogil=True)
def _fill_spread(
    load: npt.NDArray[np.int32], expert_of_slot: npt.NDArray[np.int32], centred: npt.NDArray[np.float32]
) -> float:
    """Loads less the mean of their block, scaled to a mean square expert of 1, in slot tiles; returns the scale."""
    num_blocks, num_experts = load.shape
    square = 0.0
    mean = np.zeros(num_blocks)
    for block in range(num_blocks):
        for expert in range(num_experts):
            mean[block] += load[block, expert]
        mean[block] /= num_experts
        for expert in range(num_experts):
            square += (load[block, expert] - mean[block]) ** 2
    scale = math.sqrt(square / num_experts)
    centred[:] = np.float32(0.0)
    if scale > 0.0:
        for slot in range(expert_of_slot.shape[0]):
            expert = expert_of_slot[slot]
            if expert >= 0:
                base = (slot // _TILE) * num_blocks * _TILE + slot % _TILE
                for block in range(num_blocks):
                    centred[base + block * _TILE] = np.float32((load[block, expert] - mean[block]) / scale)
    return scale


@njit(cache=True, nogil=True)
def _set_own(
    centred: npt.NDArray[np.float32],
    rank_spread: npt.NDArray[np.float32],
    squares: npt.NDArray[np.float32],
    p: int,
    num_lanes: int,
    num_blocks: int,
    num_columns: int,
    own: npt.NDArray[np.float32],
) -> None:
    """own[f] = |A_f|² − A_f·W_p for the experts of rank p: the part of a price that depends on f and its rank.

    ``rank_spread`` holds −W; padding keeps its prohibitive price.
    """
    for slot in range(p * num_lanes, (p + 1) * num_lanes, _LANES):
        for k in range(slot, slot + _LANES):
            own[k] = squares[k]
        base = (slot // _TILE) * num_blocks * _TILE + slot % _TILE
        _weigh(centred, base, _TILE, rank_spread, p, num_columns, num_blocks, own, slot)


@njit(cache=True, nogil=True)
def _anneal_spread(
    centred: npt.NDArray[np.float32],
    expert_of_slot: npt.NDArray[np.int32],
    home_of_expert: npt.NDArray[np.int32],
    num_ranks: int,
    per_rank: int,
    num_lanes: int,
    num_blocks: int,
    price: float,
    limit: int,
    temperature: float,
    ratio: float,
    num_steps: int,
    rng: npt.NDArray[np.uint64],
    noise: npt.NDArray[np.float32],
) -> int:
    """Spread annealing; each step prices the exchange of one expert with all of the other ranks.

    ``price`` is in halves of the scaled spread for each expert off its home rank
    (``home_of_expert`` is empty without homes); at most ``limit`` experts may be.
    Returns the number of exchanges.
    """
    num_slots = expert_of_slot.shape[0]
    num_experts = num_ranks * per_rank
    num_columns = -(-num_ranks // _LANES) * _LANES
    rank_spread = np.zeros(num_blocks * num_columns, dtype=np.float32)  # −W
    squares = np.full(num_slots, np.float32(1e30), dtype=np.float32)
    own = np.full(num_slots, np.float32(1e30), dtype=np.float32)
    shift = np.zeros(num_slots, dtype=np.float32)
    picked_load = np.empty(num_blocks, dtype=np.float32)
    direction = np.empty(num_blocks, dtype=np.float32)
    rank_shift = np.empty(num_columns, dtype=np.float32)
    homes = home_of_expert.shape[0] > 0
    moves = 0
    for rank in range(num_ranks):
        for slot in range(rank * num_lanes, rank * num_lanes + per_rank):
            base = (slot // _TILE) * num_blocks * _TILE + slot % _TILE
            squares[slot] = np.float32(0.0)
            for block in range(num_blocks):
                value = centred[base + block * _TILE]
                rank_spread[block * num_columns + rank] -= value
                squares[slot] += value * value
            if homes and home_of_expert[expert_of_slot[slot]] != rank:
                moves += 1
    for rank in range(num_ranks):
        _set_own(centred, rank_spread, squares, rank, num_lanes, num_blocks, num_columns, own)
    half_price = np.float32(price)
    exchanges = 0
    for _ in range(num_steps):
        bits = next_number(rng)
        picked = np.int64(((bits >> np.uint64(32)) * np.uint64(num_experts)) >> np.uint64(32))
        noise_start = np.int64(bits & np.uint64(_NOISE - 1))
        now = np.float32(temperature)
        stay = -now * noise[np.int64((bits >> np.uint64(12)) & np.uint64(_NOISE - 1))]
        temperature *= ratio
        p: Any = picked // per_rank
        e = p * num_lanes + picked % per_rank
        base_e = (e // _TILE) * num_blocks * _TILE + e % _TILE
        for block in range(num_blocks):
            value = centred[base_e + block * _TILE]
            picked_load[block] = value
            direction[block] = -rank_spread[block * num_columns + p] - np.float32(2.0) * value
        for column in range(0, num_columns, _LANES):
            for k in range(column, column + _LANES):
                rank_shift[k] = np.float32(0.0)
            _weigh(rank_spread, column, num_columns, picked_load, 0, 1, num_blocks, rank_shift, column)
        constant = squares[e] + rank_shift[p]
        for q in range(num_ranks):
            change = constant - rank_shift[q]
            if q == p:
                change = np.float32(1e30)
            for slot in range(q * num_lanes, (q + 1) * num_lanes, _LANES):
                for k in range(slot, slot + _LANES):
                    shift[k] = change
        if homes:
            home = home_of_expert[expert_of_slot[e]]
            for q in range(num_ranks):
                if q == p:
                    continue
                leaving = (1 if home != q else 0) - (1 if home != p else 0)
                for slot in range(q * num_lanes, q * num_lanes + per_rank):
                    other = home_of_expert[expert_of_slot[slot]]
                    more = leaving + (1 if other != p else 0) - (1 if other != q else 0)
                    if moves + more > limit and more > 0:
                        shift[slot] = np.float32(1e30)
                    else:
                        shift[slot] += half_price * np.float32(more)
        least, f = _best_swap(centred, direction, own, shift, noise, noise_start, now, num_blocks, num_slots)
        if least < stay:
            q = f // num_lanes
            base_f = (f // _TILE) * num_blocks * _TILE + f % _TILE
            for block in range(num_blocks):
                x = picked_load[block]
                y = centred[base_f + block * _TILE]
                centred[base_e + block * _TILE] = y
                centred[base_f + block * _TILE] = x
                rank_spread[block * num_columns + p] += x - y
                rank_spread[block * num_columns + q] += y - x
            square = squares[e]
            squares[e] = squares[f]
            squares[f] = square
            if homes:
                home = home_of_expert[expert_of_slot[e]]
                other = home_of_expert[expert_of_slot[f]]
                moves += (1 if home != q else 0) - (1 if home != p else 0)
                moves += (1 if other != p else 0) - (1 if other != q else 0)
            expert = expert_of_slot[e]
            expert_of_slot[e] = expert_of_slot[f]
            expert_of_slot[f] = expert
            _set_own(centred, rank_spread, squares, p, num_lanes, num_blocks, num_columns, own)
            _set_own(centred, rank_spread, squares, q, num_lanes, num_blocks, num_columns, own)
            exchanges += 1
    return exchanges


@njit(cache=True, nogil=True)
def _fill_loads(
    load: npt.NDArray[np.int32],
    expert_of_slot: npt.NDArray[np.int32],
    num_lanes: int,
    loads: npt.NDArray[np.int32],
    rank_load: npt.NDArray[np.int32],
) -> None:
    """Loads in slot order, [rank, block, lane] flat, and their sums [rank · block]."""
    num_blocks = load.shape[0]
    loads[:] = 0
    rank_load[:] = 0
    for slot in range(expert_of_slot.shape[0]):
        expert = expert_of_slot[slot]
        if expert >= 0:
            p = slot // num_lanes
            base = p * num_blocks * num_lanes + slot % num_lanes
            for block in range(num_blocks):
                loads[base + block * num_lanes] = load[block, expert]
                rank_load[p * num_blocks + block] += load[block, expert]


@njit(cache=True, nogil=True)
def _peaks(rank_load: npt.NDArray[np.int32], num_ranks: int, num_blocks: int) -> int:
    """Σ_b max_p."""
    total: Any = 0
    for block in range(num_blocks):
        top = np.int32(0)
        for p in range(num_ranks):
            top = max(top, rank_load[p * num_blocks + block])
        total += top
    return total  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _descend_peaks(
    loads: npt.NDArray[np.int32],
    rank_load: npt.NDArray[np.int32],
    expert_of_slot: npt.NDArray[np.int32],
    home_of_expert: npt.NDArray[np.int32],
    num_ranks: int,
    per_rank: int,
    num_lanes: int,
    num_blocks: int,
    price: int,
    limit: int,
    num_scans: int,
    state: IntArray,
) -> None:
    """Steepest exchanges of one expert with one rank on Σ_b max_p + price · moves.

    ``state`` carries the search from call to call: next expert, scans without
    an exchange, exchanges, scans. The search is over once a full round of
    E · (P − 1) scans found nothing.
    """
    without = np.empty(num_blocks, dtype=np.int32)
    with_it = np.empty(num_blocks, dtype=np.int32)
    others = np.empty(num_blocks, dtype=np.int32)
    top = np.empty(num_blocks, dtype=np.int32)
    second = np.empty(num_blocks, dtype=np.int32)
    owner = np.empty(num_blocks, dtype=np.int32)
    peaks = np.empty(num_lanes, dtype=np.int32)
    homes = home_of_expert.shape[0] > 0
    num_experts = num_ranks * per_rank
    full_round = num_experts * (num_ranks - 1)
    current = _peaks(rank_load, num_ranks, num_blocks)
    moves = 0
    if homes:
        for slot in range(expert_of_slot.shape[0]):
            if expert_of_slot[slot] >= 0 and home_of_expert[expert_of_slot[slot]] != slot // num_lanes:
                moves += 1
    idle = state[1]
    scans = 0
    while scans < num_scans and idle < full_round:
        picked = state[0]
        state[0] = (picked + 1) % num_experts
        p = picked // per_rank
        lane = picked % per_rank
        stale = True
        for turn in range(1, num_ranks):
            q = (p + turn) % num_ranks
            if stale:
                for block in range(num_blocks):
                    top[block] = -1
                    second[block] = -1
                    owner[block] = -1
                for other in range(num_ranks):
                    if other != p:
                        for block in range(num_blocks):
                            value = rank_load[other * num_blocks + block]
                            if value > top[block]:
                                second[block] = top[block]
                                top[block] = value
                                owner[block] = other
                            elif value > second[block]:
                                second[block] = value
                stale = False
            base_e = p * num_blocks * num_lanes + lane
            for block in range(num_blocks):
                load = loads[base_e + block * num_lanes]
                without[block] = rank_load[p * num_blocks + block] - load
                with_it[block] = rank_load[q * num_blocks + block] + load
                others[block] = second[block] if owner[block] == q else top[block]
            _swap_peaks(loads, q * num_blocks * num_lanes, without, with_it, others, num_blocks, num_lanes, peaks)
            scans += 1
            best = -1
            best_value: Any = current
            best_more = 0
            if homes:
                home = home_of_expert[expert_of_slot[p * num_lanes + lane]]
                leaving = (1 if home != q else 0) - (1 if home != p else 0)
                for k in range(per_rank):
                    other = home_of_expert[expert_of_slot[q * num_lanes + k]]
                    more = leaving + (1 if other != p else 0) - (1 if other != q else 0)
                    if moves + more > limit and more > 0:
                        continue
                    value = np.int64(peaks[k]) + price * more
                    if value < best_value:
                        best = k
                        best_value = value
                        best_more = more
            else:
                least = peaks[0]
                for k in range(1, per_rank):
                    least = min(least, peaks[k])
                if least < current:
                    best_value = np.int64(least)
                    best = 0
                    while peaks[best] != least:
                        best += 1
            if best < 0:
                idle += 1
                if idle >= full_round:
                    break
                continue
            base_f = q * num_blocks * num_lanes + best
            for block in range(num_blocks):
                x = loads[base_e + block * num_lanes]
                y = loads[base_f + block * num_lanes]
                loads[base_e + block * num_lanes] = y
                loads[base_f + block * num_lanes] = x
                rank_load[p * num_blocks + block] += y - x
                rank_load[q * num_blocks + block] += x - y
            expert = expert_of_slot[p * num_lanes + lane]
            expert_of_slot[p * num_lanes + lane] = expert_of_slot[q * num_lanes + best]
            expert_of_slot[q * num_lanes + best] = expert
            current = best_value - price * best_more
            moves += best_more
            state[2] += 1
            idle = 0
            stale = True
    state[1] = idle
    state[3] += scans


class Fit(NamedTuple):
    """Ranks found for the blocks of a packing.

    Attributes
    ----------
    rank_of_expert : ndarray of int32, shape [L, E]
    peaks : ndarray of int64, shape [L]
        Σ_b max_p W of each layer, routed tokens.
    windows : ndarray of int64, shape [L]
        max_p Σ_b W of each layer, routed tokens.
    moves : ndarray of int64, shape [L]
        Experts off their home rank; zeros without homes.
    trials : int
        Exchanges of two experts that were priced.
    thread_seconds : float
        CPU seconds of all threads.
    complete : bool
        False if the search was stopped before every layer was finished.
    """

    rank_of_expert: npt.NDArray[np.int32]
    peaks: IntArray
    windows: IntArray
    moves: IntArray
    trials: int
    thread_seconds: float
    complete: bool


def sum_blocks(
    counts: npt.NDArray[Any],
    block_of_sample: npt.ArrayLike,
    *,
    num_blocks: int,
    num_threads: int = 1,
) -> npt.NDArray[np.int32]:
    """Load of every expert in every block.

    Parameters
    ----------
    counts : ndarray of unsigned int, shape [N, L, E]
        Routed tokens.
    block_of_sample : array-like of int, shape [N]
        Block r · G + g of each sample.
    num_blocks : int
        B.
    num_threads : int
        Layers are shared out among threads.

    Returns
    -------
    ndarray of int32, shape [L, B, E]
        Routed tokens; the caller sees to it that they fit (a problem does).
    """
    blocks = np.ascontiguousarray(block_of_sample, dtype=np.int64)
    num_samples, num_layers, num_experts = counts.shape
    out = np.zeros((num_layers, num_blocks, num_experts), dtype=np.int32)
    edges = [num_layers * k // num_threads for k in range(num_threads + 1)]
    step = max(1, 20_000_000 // max(1, num_layers * num_experts))

    def add(part: int) -> None:
        for start in range(0, num_samples, step):
            stop = min(start + step, num_samples)
            _sum_blocks(counts, blocks, out, start, stop, edges[part], edges[part + 1])

    if num_threads == 1:
        add(0)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(add, range(num_threads)))
    return out


@cache
def _noise_table(num_slots: int) -> npt.NDArray[np.float32]:
    """Standard Gumbel noise; one fixed table, read from random positions."""
    uniform = np.random.default_rng(20140104).random(_NOISE + num_slots)
    table: npt.NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    table.setflags(write=False)
    return table


def fit_ranks(
    block_load: npt.NDArray[np.int32],
    start: npt.ArrayLike,
    *,
    ep_size: int,
    seed: int = 0,
    sweeps: float = 40.0,
    first_temperature: float = FIRST_TEMPERATURE,
    last_temperature: float = LAST_TEMPERATURE,
    descent: bool = True,
    home: npt.ArrayLike | None = None,
    move_price: int = 0,
    move_limit: int | None = None,
    window_tolerance: float = 0.02,
    num_threads: int = 1,
    stopped: Callable[[], bool] | None = None,
) -> Fit:
    """Assign experts to ranks so that Σ_b max_p W is small in every layer.

    Parameters
    ----------
    block_load : ndarray of int32, shape [L, B, E]
        Routed tokens of each block and expert, see :func:`sum_blocks`.
    start : array-like of int, shape [L, E]
        Rank of each expert to start from, E / P experts a rank.
    ep_size : int
        P.
    seed : int
        Every layer draws from a stream of its own.
    sweeps : float
        Spread annealing visits every expert this often on average; 0 leaves the
        descent alone.
    first_temperature, last_temperature : float
        In units of the mean square of an expert's centred block loads.
    descent : bool
        Finish with the descent on Σ_b max_p.
    home : array-like of int, shape [L, E], optional
        Rank each expert is on now; needed by the two options below.
    move_price : int
        Routed tokens that Σ_b max_p of a layer must fall for one expert more
        off its home rank.
    move_limit : int, optional
        Most experts of a layer that may be off their home rank; ``start`` is
        then ``home``.
    window_tolerance : float
        A layer keeps its start if max_p of the window load would otherwise rise
        above all of: the start's, (1 + tolerance) times the mean rank, and the
        mean rank plus the heaviest expert (loads come in experts; nothing finer
        can be asked of few). Σ_b max_p is never below max_p of the window, so the
        search itself holds the window back.
    num_threads : int
        Layers are shared out; the result does not depend on it.
    stopped : callable, optional
        Asked every 20 ms or so; layers not finished keep the better of their
        start and what was found.

    Returns
    -------
    Fit
        In no layer is Σ_b max_p + price · moves worse than at the start.
    """
    num_layers, num_blocks, num_experts = block_load.shape
    # Fresh arrays: numba compiles a kernel once more for read-only ones.
    begin = np.array(start, dtype=np.int32, order="C")
    homes = None if home is None else np.array(home, dtype=np.int32, order="C")
    if homes is not None and move_limit is not None:
        begin = homes
    per_rank = num_experts // max(1, ep_size)
    num_lanes = -(-per_rank // _LANES) * _LANES
    num_slots = -(-ep_size * num_lanes // _TILE) * _TILE
    noise = _noise_table(num_slots)
    peak_of_normals = NormalDist().inv_cdf((ep_size - 0.375) / (ep_size + 0.25)) if ep_size > 1 else 1.0
    ranks = begin.copy()
    peaks = np.zeros(num_layers, dtype=np.int64)
    windows = np.zeros(num_layers, dtype=np.int64)
    moved = np.zeros(num_layers, dtype=np.int64)
    lock = threading.Lock()
    counted = {"trials": 0, "halted": 0}
    seconds: list[float] = []
    no_home = np.zeros(0, dtype=np.int32)
    trivial = ep_size == 1 or (per_rank <= 1 and homes is None)

    def value_of(layer: int, rank_of_expert: npt.NDArray[np.int32]) -> tuple[int, int, int]:
        by_rank = np.argsort(rank_of_expert, kind="stable")
        load = block_load[layer][:, by_rank].reshape(num_blocks, ep_size, per_rank).sum(axis=2, dtype=np.int64)
        away = 0 if homes is None else int((rank_of_expert != homes[layer]).sum())
        return int(load.max(axis=1).sum()), int(load.sum(axis=0).max()), away

    def search(layer: int) -> None:
        clock = time.thread_time()
        halt = stopped is not None and stopped()
        total = int(block_load[layer].sum(dtype=np.int64))
        # The kernels add whole layers in int32; beyond that the search sees coarser loads, the values stay exact.
        shift = max(0, total.bit_length() - 31)
        load = np.ascontiguousarray(block_load[layer]) >> shift
        before = value_of(layer, begin[layer])
        peaks[layer], windows[layer], moved[layer] = before
        trials = 0
        if not trivial and not halt:
            home_of_expert = no_home if homes is None else homes[layer]
            limit = num_experts if move_limit is None else move_limit
            slots = np.empty(num_slots, dtype=np.int32)
            _fill_slots(begin[layer], ep_size, num_lanes, slots)
            stream = np.random.SeedSequence(seed, spawn_key=(layer,))
            rng = stream.generate_state(1, np.uint64).astype(np.uint64)
            centred = np.empty(num_slots * num_blocks, dtype=np.float32)
            steps = round(sweeps * num_experts)
            if steps and _fill_spread(load, slots, centred) > 0.0:
                chunk = max(1, _CHUNK // (num_blocks * num_slots))
                ratio = (last_temperature / first_temperature) ** (1.0 / max(1, steps - 1))
                done = 0
                while done < steps and not halt:
                    part = min(chunk, steps - done)
                    price = 0.0
                    if move_price:
                        price = _spread_price(load, slots, num_lanes, ep_size, peak_of_normals) * (
                            move_price / 2**shift
                        )
                    _anneal_spread(
                        centred,
                        slots,
                        home_of_expert,
                        ep_size,
                        per_rank,
                        num_lanes,
                        num_blocks,
                        price,
                        limit,
                        first_temperature * ratio**done,
                        ratio,
                        part,
                        rng,
                        noise,
                    )
                    done += part
                    halt = stopped is not None and stopped()
                trials += done * (num_experts - per_rank)
            loads = np.empty(ep_size * num_blocks * num_lanes, dtype=np.int32)
            rank_load = np.empty(ep_size * num_blocks, dtype=np.int32)
            _fill_loads(load, slots, num_lanes, loads, rank_load)
            if descent:
                state = np.zeros(4, dtype=np.int64)
                chunk = max(1, _CHUNK // (num_blocks * num_lanes))
                full_round = num_experts * (ep_size - 1)
                while state[1] < full_round and not halt:
                    _descend_peaks(
                        loads,
                        rank_load,
                        slots,
                        home_of_expert,
                        ep_size,
                        per_rank,
                        num_lanes,
                        num_blocks,
                        move_price >> shift,
                        limit,
                        chunk,
                        state,
                    )
                    halt = stopped is not None and stopped()
                trials += int(state[3]) * per_rank
            found = np.empty(num_experts, dtype=np.int32)
            used = np.flatnonzero(slots >= 0)
            found[slots[used]] = used // num_lanes
            after = value_of(layer, found)
            mean = -(-total // ep_size)
            heaviest = int(block_load[layer].sum(axis=0, dtype=np.int64).max())
            guarded = after[1] <= max(before[1], math.floor(mean * (1.0 + window_tolerance)), mean + heaviest)
            if guarded and after[0] + move_price * after[2] < before[0] + move_price * before[2]:
                ranks[layer] = found
                peaks[layer], windows[layer], moved[layer] = after
        with lock:
            counted["trials"] += trials
            counted["halted"] += int(halt)
            seconds.append(time.thread_time() - clock)

    if num_threads == 1:
        for layer in range(num_layers):
            search(layer)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(search, range(num_layers)))
    return Fit(ranks, peaks, windows, moved, counted["trials"], math.fsum(seconds), not counted["halted"])


def _spread_price(
    load: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int32],
    num_lanes: int,
    ep_size: int,
    peak_of_normals: float,
) -> float:
    """What one routed token of Σ_b max_p is worth in halves of the scaled spread, for loads near normal.

    With spread V over B blocks and P ranks, Σ_b max_p exceeds the mean by about
    c · B · sqrt(V / (B·P)), c the expected largest of P standard normals.
    """
    num_blocks, num_experts = load.shape
    wide = load.astype(np.float64)
    wide -= wide.mean(axis=1, keepdims=True)
    scale = float((wide**2).sum()) / num_experts
    rank_of_expert = np.empty(num_experts, dtype=np.int64)
    used = np.flatnonzero(slots >= 0)
    rank_of_expert[slots[used]] = used // num_lanes
    spread = math.fsum(float((wide[:, rank_of_expert == p].sum(axis=1) ** 2).sum()) for p in range(ep_size))
    spread = max(spread, 1e-6 * scale)
    return float(math.sqrt(spread * ep_size / num_blocks) / (peak_of_normals * scale))


@dataclass(frozen=True)
class Replacing(Solver):
    """Places experts for the blocks of a known packing, Σ_{r,g} max_p W, by swaps in every layer.

    Without a packing the window counts as one block, which makes it a swap
    search for the window load.

    Parameters
    ----------
    sweeps : float
        Visits of each expert in the spread annealing of a layer, above 0. An
        iteration limit or a time limit shortens it.
    window_tolerance : float
        See :func:`fit_ranks`.
    move_price : int
        Routed tokens of Σ max_p that one expert more off its previous rank must
        save; counts only where the run knows a previous placement.
    move_limit : int or None
        Most experts of a layer that may leave their previous rank.

    Notes
    -----
    An iteration is one visit: one expert of one layer priced against all
    experts of the other ranks.
    """

    sweeps: float = 40.0
    window_tolerance: float = 0.02
    move_price: int = 0
    move_limit: int | None = None

    name = "replacing"

    def __post_init__(self) -> None:
        faults = Faults()
        if isinstance(self.sweeps, bool) or not isinstance(self.sweeps, int | float) or not 0 < self.sweeps < math.inf:
            faults.add(f"sweeps is {self.sweeps!r}; it must be a number above 0")
        faults.extend(option_faults(self.window_tolerance, self.move_price, self.move_limit))
        faults.raise_if_any("replacing")

    def unsupported(self, problem: Problem) -> str | None:
        """Problems without routing have no experts to place."""
        return None if problem.num_layers else "the problem has no routing counts"

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Place experts for the blocks of ``packing``, or for the window."""
        if packing is None:
            blocks = np.zeros(problem.num_samples, dtype=np.int64)
            num_blocks = 1
        else:
            blocks = packing.row_of_sample * problem.num_shards
            blocks = blocks + problem.shard_of_slot[packing.dp_slot_of_sample]
            num_blocks = problem.num_rows * problem.num_shards
        load = sum_blocks(problem.counts, blocks, num_blocks=num_blocks, num_threads=run.num_threads)
        previous = run.previous_placement
        if previous is None:
            previous = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
        home = None if run.previous_placement is None else previous.rank_of_expert
        ranks = improve_ranks(
            load,
            previous.rank_of_expert,
            run,
            ep_size=problem.ep_size,
            sweeps=float(self.sweeps),
            window_tolerance=self.window_tolerance,
            home=home if self.move_price or self.move_limit is not None else None,
            move_price=self.move_price,
            move_limit=self.move_limit,
        ).rank_of_expert
        return Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)


def option_faults(window_tolerance: object, move_price: object, move_limit: object) -> list[str]:
    """What is wrong with the options that :class:`Replacing` and planners built on it share."""
    faults = []
    if (
        isinstance(window_tolerance, bool)
        or not isinstance(window_tolerance, int | float)
        or not 0 <= window_tolerance < math.inf
    ):
        faults.append(f"window_tolerance is {window_tolerance!r}; it must be a number of at least 0")
    if isinstance(move_price, bool) or not isinstance(move_price, int) or move_price < 0:
        faults.append(f"move_price is {move_price!r}; it must be routed tokens, an integer of at least 0")
    if move_limit is not None and (isinstance(move_limit, bool) or not isinstance(move_limit, int) or move_limit < 0):
        faults.append(f"move_limit is {move_limit!r}; it must be None or experts a layer, an integer of at least 0")
    return faults


def improve_ranks(
    block_load: npt.NDArray[np.int32],
    start: npt.ArrayLike,
    run: Run,
    *,
    ep_size: int,
    sweeps: float,
    window_tolerance: float,
    home: npt.ArrayLike | None,
    move_price: int,
    move_limit: int | None,
) -> Fit:
    """:func:`fit_ranks` within the budget of a run.

    Under a time limit a short pass of two sweeps comes first, so that every
    layer has something good before any has something very good; its time tells
    how many sweeps the pass after it can afford. Under an iteration limit alone
    the sweeps are cut to what the limit allows.
    """
    num_layers, _, num_experts = block_load.shape
    if run.iteration_limit is not None:
        sweeps = min(sweeps, run.iteration_limit / max(1, num_layers * num_experts))
    seed = int(run.rng.integers(2**63))

    def fit(begin: npt.ArrayLike, amount: float, stream: int) -> Fit:
        return fit_ranks(
            block_load,
            begin,
            ep_size=ep_size,
            seed=seed + stream,
            sweeps=amount,
            home=home,
            move_price=move_price,
            move_limit=move_limit,
            window_tolerance=window_tolerance,
            num_threads=run.num_threads,
            stopped=run.stopped,
        )

    if math.isinf(run.time_left()):
        return fit(start, sweeps, 0)
    clock = time.perf_counter()
    first = fit(start, min(2.0, sweeps), 0)
    spent = time.perf_counter() - clock
    affordable = 0.9 * run.time_left() / max(spent, 1e-9) * 2.0
    amount = min(sweeps, affordable)
    if amount < 3.0 or run.stopped():
        return first
    second = fit(first.rank_of_expert, amount, 1)
    return second._replace(
        trials=first.trials + second.trials, thread_seconds=first.thread_seconds + second.thread_seconds
    )
