"""Placement for a known packing: optimum on tiny layers, never worse, limits and prices, one result for any threads."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import testing
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.planning import place
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.solver import Run
from routepack_opt.solvers.replacing import Replacing, fit_ranks, sum_blocks


def blocks_of(problem, packing):
    return packing.row_of_sample * problem.num_shards + problem.shard_of_slot[packing.dp_slot_of_sample]


def peaks_of(load, ranks, ep_size):
    """Σ_b max_p of every layer, from the definition."""
    return np.array(
        [
            np.array([layer[:, row == p].sum(axis=1) for p in range(ep_size)]).max(axis=0).sum()
            for layer, row in zip(load.astype(np.int64), ranks, strict=True)
        ]
    )


def random_load(seed, num_layers, num_blocks, ep_size, per_rank, high=1000):
    rng = np.random.default_rng(seed)
    popularity = rng.gamma(0.8, size=(num_layers, 1, ep_size * per_rank))
    load = popularity * rng.gamma(3.0, size=(num_layers, num_blocks, ep_size * per_rank)) * high
    return load.astype(np.int32)


def contiguous(num_layers, ep_size, per_rank):
    return np.tile(np.arange(ep_size * per_rank) // per_rank, (num_layers, 1))


@st.composite
def layers(draw):
    ep_size = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 11))
    shape = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    load = random_load(draw(st.integers(0, 2**32 - 1)), *shape, ep_size, per_rank, draw(st.sampled_from([0, 3, 10**4])))
    return load, ep_size, per_rank


@given(layers(), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_ranks_keep_their_size_and_no_layer_gets_worse(case, seed):
    load, ep_size, per_rank = case
    start = contiguous(len(load), ep_size, per_rank)
    fit = fit_ranks(load, start, ep_size=ep_size, seed=seed, sweeps=3.0)
    for row in fit.rank_of_expert:
        assert (np.bincount(row, minlength=ep_size) == per_rank).all()
    assert (fit.peaks == peaks_of(load, fit.rank_of_expert, ep_size)).all()
    assert (fit.peaks <= peaks_of(load, start, ep_size)).all()
    totals = load.sum(axis=2, dtype=np.int64)
    assert (fit.peaks >= (-(-totals // ep_size)).sum(axis=1)).all()
    window = np.array(
        [
            [layer.sum(axis=0)[row == p].sum() for p in range(ep_size)]
            for layer, row in zip(load.astype(np.int64), fit.rank_of_expert, strict=True)
        ]
    )
    assert (fit.windows == window.max(axis=1)).all()
    assert fit.complete


@given(layers())
@settings(max_examples=30, deadline=None)
def test_no_exchange_of_two_experts_improves_the_result(case):
    load, ep_size, per_rank = case
    fit = fit_ranks(load, contiguous(len(load), ep_size, per_rank), ep_size=ep_size, sweeps=2.0, window_tolerance=1e9)
    for layer, row in enumerate(fit.rank_of_expert):
        for e in range(len(row)):
            for f in range(e):
                if row[e] != row[f]:
                    other = row.copy()
                    other[e], other[f] = row[f], row[e]
                    assert peaks_of(load[layer : layer + 1], [other], ep_size)[0] >= fit.peaks[layer]


@pytest.mark.parametrize("seed", range(6))
def test_finds_the_optimum_of_small_layers(seed):
    load = random_load(seed, 2, 4, 2, 4)
    start = contiguous(2, 2, 4)
    best = np.full(2, np.iinfo(np.int64).max)
    for row in set(permutations([0] * 4 + [1] * 4)):
        best = np.minimum(best, peaks_of(load, [np.array(row)] * 2, 2))
    found = np.min([fit_ranks(load, start, ep_size=2, seed=k, sweeps=30.0).peaks for k in range(3)], axis=0)
    assert (found == best).all()


def test_beats_descent_from_the_same_start():
    load = random_load(3, 4, 12, 8, 16)
    start = contiguous(4, 8, 16)
    ideal = load.sum(dtype=np.int64) / 8
    descent = fit_ranks(load, start, ep_size=8, sweeps=0.0).peaks.sum() / ideal - 1
    annealed = fit_ranks(load, start, ep_size=8, sweeps=20.0).peaks.sum() / ideal - 1
    assert annealed < 0.8 * descent


def test_same_seed_same_ranks_for_any_number_of_threads():
    load = random_load(5, 7, 6, 4, 6)
    start = contiguous(7, 4, 6)
    one, three = (fit_ranks(load, start, ep_size=4, seed=9, num_threads=k) for k in (1, 3))
    assert (one.rank_of_expert == three.rank_of_expert).all()
    assert one.trials == three.trials
    other = fit_ranks(load, start, ep_size=4, seed=10)
    assert (one.rank_of_expert != other.rank_of_expert).any()


@given(st.integers(0, 1000), st.integers(0, 14))
@settings(max_examples=25, deadline=None)
def test_the_limit_on_moves_holds_in_every_layer(seed, limit):
    load = random_load(seed, 3, 5, 4, 5)
    home = contiguous(3, 4, 5)
    fit = fit_ranks(load, home, ep_size=4, sweeps=5.0, home=home, move_limit=limit)
    away = (fit.rank_of_expert != home).sum(axis=1)
    assert (away <= limit).all()
    assert (fit.moves == away).all()
    if limit >= 4:
        assert (fit.peaks < peaks_of(load, home, 4)).any()


def test_a_price_on_moves_buys_each_move_with_peak_load():
    load = random_load(1, 4, 6, 4, 8)
    home = contiguous(4, 4, 8)
    before = peaks_of(load, home, 4)
    previous = None
    for price in (0, 50, 400, 10**7):
        fit = fit_ranks(load, home, ep_size=4, home=home, move_price=price)
        assert (fit.peaks + price * fit.moves <= before).all()
        if previous is not None:
            assert fit.moves.sum() <= previous
        previous = fit.moves.sum()
    assert previous == 0


def test_loads_beyond_int32_are_searched_coarsely_and_valued_exactly():
    load = random_load(2, 1, 6, 4, 4).astype(np.int64)
    load = (load * (2**33 // load.sum()) + 1).astype(np.int32)
    assert load.sum(dtype=np.int64) > 2**31
    fit = fit_ranks(load, contiguous(1, 4, 4), ep_size=4)
    assert (fit.peaks == peaks_of(load, fit.rank_of_expert, 4)).all()
    assert fit.peaks[0] < peaks_of(load, contiguous(1, 4, 4), 4)[0]


def test_the_window_guard_keeps_the_start():
    load = random_load(4, 3, 8, 4, 4)
    start = fit_ranks(load.sum(axis=1, keepdims=True), contiguous(3, 4, 4), ep_size=4, sweeps=50.0).rank_of_expert
    window = fit_ranks(load, start, ep_size=4, sweeps=0.0, descent=False).windows
    for tolerance in (0.0, 0.01):
        fit = fit_ranks(load, start, ep_size=4, window_tolerance=tolerance)
        mean = -(-load.sum(axis=(1, 2), dtype=np.int64) // 4)
        one_expert = mean + load.sum(axis=1, dtype=np.int64).max(axis=1)
        assert (fit.windows <= np.maximum(np.maximum(window, np.floor(mean * (1 + tolerance))), one_expert)).all()


def test_block_sums_do_not_depend_on_threads():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 60_000, size=(9, 3, 8)).astype(np.uint16)
    blocks = rng.integers(0, 4, size=9)
    expected = np.stack([counts[blocks == b].sum(axis=0, dtype=np.int64) for b in range(4)], axis=1)
    for threads in (1, 2, 5):
        assert (sum_blocks(counts, blocks, num_blocks=4, num_threads=threads) == expected).all()


@pytest.mark.parametrize("seed", range(8))
def test_as_a_placer_it_reaches_the_best_placement_of_a_fixed_packing(seed):
    problem = testing.tiny_problem(seed, num_layers=2, ep_size=2, experts_per_rank=2)
    packing = testing.brute_force(problem, Placement.contiguous(2, 4, ep_size=2)).packing
    result = place(problem, "replacing(window_tolerance=9)", packing=packing, iteration_limit=4000, seed=1)
    found = int(result.score.breakdown.expert.sum())
    best = min(
        int(evaluate(problem, Plan.of(problem, placement, packing)).breakdown.expert.sum())
        for placement in testing.every_placement(problem)
    )
    assert found == best


def test_fixed_micro_steps_of_a_recorder():
    rng = np.random.default_rng(7)
    load = np.stack([rng.multinomial(4000, rng.dirichlet(np.full(32, 0.7)), size=3) for _ in range(6)])
    problem = Problem.from_window(load, ep_size=4)
    packing = Packing.one_sample_per_row(problem)
    window = place(problem, "replacing", iteration_limit=3000).placement
    blocks = place(problem, "replacing", packing=packing, iteration_limit=3000).placement
    values = [
        int(evaluate(problem, Plan.of(problem, placement, packing)).breakdown.expert.sum())
        for placement in (blocks, window, Placement.contiguous(3, 32, ep_size=4))
    ]
    assert values[0] < values[1] < values[2]


def test_moves_are_counted_from_the_previous_placement():
    problem = testing.tiny_problem(3, num_layers=2, ep_size=2, experts_per_rank=2)
    previous = Placement.from_rank_of_expert([[1, 0, 1, 0], [0, 1, 0, 1]], ep_size=2)
    run = Run(problem, previous_placement=previous, iteration_limit=500)
    placement = Replacing(move_limit=0).place(problem, None, run)
    assert (placement.rank_of_expert == previous.rank_of_expert).all()


def test_a_stopped_search_returns_the_start():
    load = random_load(5, 2, 6, 4, 6)
    start = contiguous(2, 4, 6)
    fit = fit_ranks(load, start, ep_size=4, stopped=lambda: True)
    assert (fit.rank_of_expert == start).all()
    assert not fit.complete


def test_refuses_what_cannot_be_meant():
    with pytest.raises(InvalidInputError) as error:
        Replacing(sweeps=0, window_tolerance=-1, move_price=1.5, move_limit=-2)
    assert len(error.value.faults) == 4
    problem = testing.tiny_problem(0, num_layers=0)
    assert Replacing().unsupported(problem)
