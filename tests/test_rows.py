"""Row counts: packings against bounds, bounds against brute force, proofs of hard cases."""

from __future__ import annotations

import time
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import rows
from routepack_opt.errors import InvalidInputError
from routepack_opt.rows import BinCount, RowCount, least_bins_bound, least_rows, pack_bins, prove_bins


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """Exact by trying, for the longest item left, every subset that fits beside it."""

    @cache
    def solve(left: tuple[int, ...]) -> int:
        if not left:
            return 0
        best = len(left)
        rest = left[1:]
        for mask in range(1 << len(rest)):
            beside = [length for k, length in enumerate(rest) if mask >> k & 1]
            if left[0] + sum(beside) <= capacity:
                best = min(best, 1 + solve(tuple(length for k, length in enumerate(rest) if not mask >> k & 1)))
        return best

    return solve(tuple(sorted(lengths, reverse=True)))


instances = st.integers(5, 60).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), min_size=1, max_size=8), st.just(capacity))
)
larger = st.integers(20, 400).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), min_size=1, max_size=60), st.just(capacity))
)


def assert_packing(bin_of_item, lengths, capacity):
    used = np.bincount(bin_of_item, weights=lengths)
    assert bin_of_item.shape == (len(lengths),)
    assert used.max() <= capacity
    assert used.min() > 0  # numbered without gaps


@given(instances)
@settings(max_examples=150, deadline=None)
def test_bound_below_optimum_below_packing(case):
    lengths, capacity = case
    best = fewest_bins(lengths, capacity)
    bound, method = least_bins_bound(lengths, capacity)
    packing = pack_bins(lengths, capacity)
    assert_packing(packing, lengths, capacity)
    assert -(-sum(lengths) // capacity) <= bound <= best <= packing.max() + 1
    assert method in ("area bound L1", "Martello-Toth L2")


@given(instances)
@settings(max_examples=60, deadline=None)
def test_the_proof_finds_the_optimum(case):
    lengths, capacity = case
    proof = prove_bins(lengths, capacity, time_limit=20)
    assert_packing(proof.bin_of_item, lengths, capacity)
    assert proof.proven
    assert proof.num_bins == fewest_bins(lengths, capacity) == proof.bin_of_item.max() + 1


@given(instances)
@settings(max_examples=40, deadline=None)
def test_pattern_generation_alone_agrees_with_brute_force(case):
    lengths, capacity = case
    best = fewest_bins(lengths, capacity)
    patterns = rows._Patterns(np.array(lengths), capacity)
    _, proof = patterns.relax(patterns.demand, None, np.inf)
    assert proof.bound <= best
    found, _, impossible = patterns.search(best, time.perf_counter() + 60)
    assert not impossible
    assert_packing(patterns.assign(found, np.array(lengths)), lengths, capacity)
    if best > 1:
        candidates = patterns._enumerate(proof, best - 1)
        assert patterns._choose(candidates, best - 1, np.inf) == (None, True)


@given(larger)
@settings(max_examples=80, deadline=None)
def test_largest_first_subset_sum_packs(case):
    lengths, capacity = case
    packing = rows._largest_first_subset_sum(np.array(lengths), capacity)
    assert_packing(packing, lengths, capacity)
    # The first bin is filled as well as the longest item allows.
    longest = max(lengths)
    rest = list(lengths)
    rest.remove(longest)
    reachable = {0}
    for length in rest:
        reachable |= {value + length for value in reachable if value + length <= capacity - longest}
    assert np.bincount(packing, weights=lengths)[0] == longest + max(reachable)


@given(larger)
@settings(max_examples=60, deadline=None)
def test_bound_is_the_best_threshold(case):
    lengths, capacity = case
    values = np.array(lengths)
    best = -(-values.sum() // capacity)
    for threshold in range(capacity // 2 + 1):
        alone = values[values > capacity - threshold]
        large = values[(values <= capacity - threshold) & (2 * values > capacity)]
        small = values[(values >= threshold) & (2 * values <= capacity)]
        room = len(large) * capacity - large.sum()
        best = max(best, len(alone) + len(large) + max(0, -(-(small.sum() - room) // capacity)))
    assert least_bins_bound(lengths, capacity)[0] == best


def test_l2_sees_what_the_area_does_not():
    assert least_bins_bound([6, 6, 6], 10) == (3, "Martello-Toth L2")
    assert least_bins_bound([5, 5, 5], 10) == (2, "area bound L1")
    assert least_bins_bound([7, 7, 4, 4], 10) == (3, "area bound L1")


def test_best_fit_decreasing_by_hand():
    # 7 | 6 | 5 | 3 → beside 7 (room 3, the least that holds it) | 3 → beside 6 | 2 → beside 5 | 2 → beside 5
    assert pack_bins([2, 3, 5, 6, 7, 3, 2], 10).tolist() == [2, 0, 2, 1, 0, 1, 2]


def test_num_bins_is_a_promise():
    lengths = [6, 6, 5, 5, 4, 4, 3, 3, 2, 2]  # 40 in four bins of 10
    assert pack_bins(lengths, 10, num_bins=4).max() == 3
    # Best fit decreasing needs five bins here, filling around the longest item four.
    tricky = [46, 33, 32, 30, 29, 25, 22, 20, 20, 18, 18, 17, 17, 13, 12, 12, 12, 11, 8, 5]
    needed = pack_bins(tricky, 80).max() + 1
    assert needed > fewest_by_filling(tricky, 80)
    assert pack_bins(tricky, 80, num_bins=needed - 1).max() == needed - 2
    with pytest.raises(InvalidInputError, match="need at least 4 bins"):
        pack_bins(lengths, 10, num_bins=3)


def fewest_by_filling(lengths, capacity):
    return rows._largest_first_subset_sum(np.array(lengths), capacity).max() + 1


@pytest.mark.parametrize("exponent", [9, 12])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_capacities_around_powers_of_two_and_equal_lengths(exponent, offset):
    capacity = 2**exponent + offset
    third = capacity // 3
    assert least_rows([third] * 30, capacity, 5) == RowCount(2, 2, "best-fit decreasing", "area bound L1")
    half = capacity // 2 + 1
    counted = least_rows([half] * 30, capacity, 5)
    assert (counted.num_rows, counted.bound, counted.bound_method) == (6, 6, "Martello-Toth L2")


def test_rows_round_bins_up_and_say_what_is_proven():
    counted = least_rows([6, 6, 6], 10, 2)
    assert counted == RowCount(2, 2, "best-fit decreasing", "Martello-Toth L2")
    assert counted.proven
    assert "proven" in repr(counted)
    assert "not proven" in repr(RowCount(3, 2, "a", "b"))
    with pytest.raises(InvalidInputError, match="bound 4 above"):
        RowCount(3, 4, "a", "b")


def hard_triplets(seed: int, num_bins: int) -> tuple[np.ndarray, int]:
    """Three items a bin, no room left: heuristics always open another bin."""
    rng = np.random.default_rng(seed)
    first = rng.integers(380, 490, size=num_bins)
    second = rng.integers(251, (1000 - first) // 2 + 1)
    return np.concatenate([first, second, 1000 - first - second]), 1000


@pytest.mark.parametrize("seed", range(3))
def test_exact_rows_where_heuristics_miss(seed):
    lengths, capacity = hard_triplets(seed, 20)
    plain = least_rows(lengths, capacity, 1)
    exact = least_rows(lengths, capacity, 1, exact=True, time_limit=30)
    assert plain.num_rows == 21
    assert plain.bound == exact.bound == exact.num_rows == 20
    assert exact.method in ("diving in column generation", "pattern search")
    # In rows of seven cells 21 bins are as good as 20: nothing to prove.
    assert least_rows(lengths, capacity, 7, exact=True, time_limit=0).proven


def test_exact_bound_where_every_simple_bound_is_short():
    # Fourteen items of 49 tokens: five bins leave one token free, but 4+4 wastes two, and 4+3+3 runs out of threes.
    lengths = [4] * 7 + [3] * 7
    assert least_bins_bound(lengths, 10)[0] == 5
    proof = prove_bins(lengths, 10, time_limit=20)
    assert proof.num_bins == proof.bound == fewest_bins(lengths, 10) == 6
    assert proof.bound_method in ("column generation", "exhaustive pattern search")
    assert "proven" in repr(proof)


def test_without_time_the_proof_is_what_is_known():
    lengths, capacity = hard_triplets(0, 20)
    proof = prove_bins(lengths, capacity, time_limit=0)
    assert isinstance(proof, BinCount)
    assert_packing(proof.bin_of_item, lengths, capacity)
    assert (proof.num_bins, proof.bound) == (21, 20)
    assert not proof.proven
    assert "not proven" in repr(proof)


def test_all_faults_at_once():
    with pytest.raises(InvalidInputError) as caught:
        least_rows([5, 0, 12, -3], 10, 0, time_limit=-1)
    faults = caught.value.faults
    assert len(faults) == 5
    assert "sample 2 has length 12, above the capacity 10" in faults
    assert "sample 1 has length 0, it must be at least 1" in faults
    for bad in ([], [[1]], [1.5], [True]):
        with pytest.raises(InvalidInputError):
            least_bins_bound(bad, 10)
    with pytest.raises(InvalidInputError, match="capacity must be an integer"):
        pack_bins([1], 2.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="finite"):
        prove_bins([1], 2, time_limit=float("inf"))


def test_large_batches_are_counted_and_proven():
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(8.2, 1.0, size=8192).astype(np.int64) + 1, 32_768)
    counted = least_rows(lengths, 32_768, 32)
    assert counted.proven
    assert counted.num_rows == -(-int(lengths.sum()) // (32 * 32_768))
