"""Baselines from practice: textbook parts against prtpy, feasibility or a reason everywhere."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import prtpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.registry import BUILT_IN, component
from routepack_opt.rows import least_bins_bound
from routepack_opt.score import packing_violations
from routepack_opt.solver import Packer, Run
from routepack_opt.solvers import practice
from routepack_opt.solvers.practice import (
    EplbBalanced,
    FfdDealt,
    KarmarkarKarp,
    KkFfdFallback,
    KkSwap,
    LeastLoaded,
    MffdDealt,
    NextFit,
    RoundRobin,
    RoundRobinExperts,
    SplitSortChunk,
)

NAMES = [name for name, where in BUILT_IN.items() if ":" in where and ".practice:" in where]
PACKERS: list[Any] = [
    RoundRobin(),
    NextFit(),
    NextFit(fit="first"),
    FfdDealt(),
    FfdDealt(largest_first=True),
    MffdDealt(),
    MffdDealt(largest_first=True),
    KarmarkarKarp(),
    KarmarkarKarp(repair=True),
    KarmarkarKarp(equal_size=True),
    KarmarkarKarp(equal_size=True, repair=True),
    KkFfdFallback(),
    SplitSortChunk(),
    KkSwap(),
    KkSwap(max_swaps=0),
    LeastLoaded(),
]
lengths_lists = st.lists(st.integers(1, 60), min_size=1, max_size=24)


def make_problem(
    lengths: list[int],
    *,
    capacity: int = 60,
    dp_size: int = 2,
    num_shards: int = 1,
    num_rows: int | None = None,
    seed: int = 0,
    **options: int | bool,
) -> Problem:
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, 4, size=(len(lengths), 2))
    counts = np.zeros((len(lengths), 2, 4), dtype=np.int64)
    for i, length in enumerate(lengths):
        for layer in range(2):
            counts[i, layer, experts[i, layer]] = length
    return Problem.from_arrays(
        lengths,
        counts,
        top_k=1,
        capacity=capacity,
        ep_size=2,
        dp_size=dp_size,
        num_shards=num_shards,
        num_rows=num_rows,
        **options,  # type: ignore[arg-type]
    )


def pack(problem: Problem, packer: Packer, *, stop: bool = False) -> tuple[Packing | None, str]:
    """The packing and what the run says about it."""
    placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    run = Run(problem, placement=placement, stop=lambda: stop)
    packing = packer.pack(problem, placement, run)
    return packing, run._record.explanation


def cell_sums(problem: Problem, packing: Packing) -> np.ndarray:
    sums = np.zeros(problem.num_cells, dtype=np.int64)
    np.add.at(sums, packing.cells(problem), problem.lengths)
    return sums


# --- textbook parts against a library -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=30, unique=True), st.integers(1, 6))
def test_differencing_gives_the_sums_of_prtpy(work: list[int], num_sets: int) -> None:
    sets = practice.differencing(work, num_sets)
    assert sets is not None
    assert sorted(item for part in sets for item in part) == list(range(len(work)))
    theirs = prtpy.partition(algorithm=prtpy.partitioning.kk, numbins=num_sets, items=work, outputtype=prtpy.out.Sums)
    assert sorted(sum(work[item] for item in part) for part in sets) == sorted(int(value) for value in theirs)


def test_differencing_of_the_textbook_example_misses_the_even_split() -> None:
    sets = practice.differencing([8, 7, 6, 5, 4], 2)
    assert sets is not None
    assert [sum([8, 7, 6, 5, 4][item] for item in part) for part in sets] == [16, 14]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_equal_size_differencing_keeps_cardinality(num_sets: int, each: int, seed: int) -> None:
    work = np.random.default_rng(seed).integers(1, 1000, num_sets * each).tolist()
    sets = practice.differencing(work, num_sets, equal_size=True)
    assert sets is not None
    assert [len(part) for part in sets] == [each] * num_sets
    # Each of the initial groups differs by at most its own spread, and differencing never adds spreads up.
    ordered = sorted(work)
    spread = max(ordered[k + num_sets - 1] - ordered[k] for k in range(0, len(work), num_sets))
    sums = [sum(work[item] for item in part) for part in sets]
    assert max(sums) - min(sums) <= spread


def test_equal_size_differencing_refuses_an_uneven_number() -> None:
    with pytest.raises(ValueError, match="5 items do not split into 2 sets"):
        practice.differencing([1, 2, 3, 4, 5], 2, equal_size=True)


@settings(max_examples=60, deadline=None)
@given(lengths_lists)
def test_first_fit_decreasing_gives_the_bins_of_prtpy(lengths: list[int]) -> None:
    array = np.array(lengths)
    bins = practice.first_fit(array, 60, practice._descending(array))
    assert bins is not None
    theirs = prtpy.pack(algorithm=prtpy.packing.first_fit_decreasing, binsize=60, items=lengths)
    assert [[lengths[item] for item in items] for items in bins] == theirs


@settings(max_examples=60, deadline=None)
@given(lengths_lists, st.integers(1, 6))
def test_least_loaded_gives_the_sums_of_prtpy_greedy(lengths: list[int], num_bins: int) -> None:
    bins, refused = practice.least_loaded(np.array(lengths), 10**9, num_bins)
    assert refused is None
    theirs = prtpy.partition(
        algorithm=prtpy.partitioning.greedy, numbins=num_bins, items=lengths, outputtype=prtpy.out.Sums
    )
    assert sorted(sum(lengths[item] for item in items) for items in bins) == sorted(int(value) for value in theirs)


@settings(max_examples=60, deadline=None)
@given(lengths_lists)
def test_bins_hold_every_item_once_within_capacity(lengths: list[int]) -> None:
    array = np.array(lengths)
    bound, _ = least_bins_bound(array, 60)
    mffd = practice.modified_first_fit_decreasing(array, 60)
    assert mffd is not None
    for bins in (practice.next_fit(array, 60), mffd):
        assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
        assert all(items and array[items].sum() <= 60 for items in bins)
        assert len(bins) >= bound
    # Next fit never leaves two neighbouring bins that one could hold.
    sums = [array[items].sum() for items in practice.next_fit(array, 60)]
    assert all(a + b > 60 for a, b in pairwise(sums))


def test_modified_first_fit_decreasing_by_hand() -> None:
    # Large 34 and 31; medium 25; small 12, 11, 15, tiny 5. Forward: 25 joins 34 (room 26 -> 1). Backward: 31 has no
    # medium, the two smallest small (11, 12) fit its room of 29: 11, then the largest that fits beside it, 15.
    # 12 and 5 fit no large bin any more (rooms 1 and 3) and share a new one.
    lengths = np.array([34, 31, 25, 12, 11, 15, 5])
    assert practice.modified_first_fit_decreasing(lengths, 60) == [[0, 2], [1, 4, 5], [3, 6]]


def test_modified_beats_plain_first_fit_decreasing_where_pairs_of_small_items_matter() -> None:
    # FFD puts a 16 beside the 33 and needs a third bin; two 12s fit beside the 33 and 16 + 16 + 16 + 12 fill a bin.
    lengths = np.array([33, 16, 16, 16, 12, 12, 12])
    mffd = practice.modified_first_fit_decreasing(lengths, 60)
    ffd = practice.first_fit(lengths, 60, practice._descending(lengths))
    assert mffd is not None
    assert ffd is not None
    assert (len(mffd), len(ffd)) == (2, 3)


# --- the fixed grid -------------------------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    lengths = draw(lengths_lists)
    num_shards = draw(st.sampled_from([1, 2]))
    dp_size = num_shards * draw(st.integers(1, 2))
    alignment = draw(st.sampled_from([1, 1, 4]))
    options: dict[str, int | bool] = {"length_alignment": alignment}
    problem = make_problem(lengths, dp_size=dp_size, num_shards=num_shards, **options)
    num_rows = problem.num_rows + draw(st.integers(0, 2))
    if len(lengths) >= num_rows * dp_size:
        options["min_samples_per_cell"] = draw(st.sampled_from([0, 1]))
    if len(lengths) % dp_size == 0:
        options["equal_samples_per_slot"] = draw(st.booleans())
    return make_problem(lengths, dp_size=dp_size, num_shards=num_shards, num_rows=num_rows, **options)


@settings(max_examples=50, deadline=None)
@given(problems())
def test_a_feasible_plan_or_a_reason_always(problem: Problem) -> None:
    for packer in PACKERS:
        refusal = packer.unsupported(problem)
        if refusal is not None:
            assert "equal_samples_per_slot" in refusal or "divisible" in refusal
            continue
        packing, explanation = pack(problem, packer)
        if packing is None:
            assert f"cannot satisfy R = {problem.num_rows} rows x D = {problem.dp_size} slots" in explanation
        else:
            assert packing_violations(problem, packing) == []
        assert pack(problem, packer) == (packing, explanation)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=24), st.sampled_from([1, 2, 4]))
def test_with_room_for_everything_every_packer_finds_a_plan(lengths: list[int], dp_size: int) -> None:
    problem = make_problem(lengths, capacity=500, dp_size=dp_size, num_rows=2)
    for packer in PACKERS:
        if packer.unsupported(problem) is None:
            packing, explanation = pack(problem, packer)
            assert packing is not None, explanation


def test_many_samples_leave_no_cell_empty_where_none_may_be() -> None:
    problem = make_problem([10] * 24, capacity=60, dp_size=4, num_rows=3, min_samples_per_cell=1)
    for packer in PACKERS:
        packing, explanation = pack(problem, packer)
        assert packing is not None, (packer.spec, explanation)
        assert np.bincount(packing.cells(problem), minlength=12).min() >= 1


def test_karmarkar_karp_says_where_it_breaks_the_capacity_and_repair_mends_it() -> None:
    # No linear term keeps the textbook example: squares would reorder it, so work is made linear by a huge factor.
    problem = make_problem([8, 7, 6, 5, 4], capacity=15, dp_size=2, num_rows=1)
    packing, reason = pack(problem, KarmarkarKarp(linear_work=10**9))
    assert packing is None
    assert "16 tokens in 3 samples are above the capacity 15" in reason
    packing, reason = pack(problem, KarmarkarKarp(linear_work=10**9, repair=True))
    assert packing is not None
    assert sorted(cell_sums(problem, packing)) == [15, 15]
    assert "broke the capacity of 1 of 2 cells; mended by 1 moves" in reason


def test_fallback_is_taken_and_said_only_where_karmarkar_karp_breaks_the_capacity() -> None:
    problem = make_problem([8, 7, 6, 5, 4], capacity=15, dp_size=2, num_rows=1)
    packing, reason = pack(problem, KkFfdFallback())
    assert packing is not None
    assert sorted(cell_sums(problem, packing)) == [15, 15]
    assert reason.startswith("kk_ffd_fallback fell back to first-fit decreasing")
    packing, reason = pack(problem.replace(capacity=16), KkFfdFallback())
    assert packing is not None
    assert sorted(cell_sums(problem, packing)) == [14, 16]
    assert reason == ""


def test_eight_equal_samples_that_fit_no_two_together_need_eight_cells() -> None:
    with pytest.raises(InfeasibleProblemError):
        make_problem([7] * 8, capacity=8, dp_size=7, num_rows=1)
    problem = make_problem([7] * 8, capacity=8, dp_size=8, num_rows=1)
    for packer in PACKERS:
        packing, explanation = pack(problem, packer)
        assert packing is not None, explanation
        assert np.bincount(packing.cells(problem), minlength=8).tolist() == [1] * 8


def test_next_fit_opens_bins_that_first_fit_does_not_need() -> None:
    problem = make_problem([40, 30, 20, 30], capacity=60, dp_size=2, num_rows=1)
    packing, reason = pack(problem, NextFit())
    assert packing is None
    assert "it opens 3 bins" in reason
    packing, _ = pack(problem, NextFit(fit="first"))
    assert packing is not None
    assert sorted(cell_sums(problem, packing)) == [60, 60]


def test_round_robin_keeps_arrival_order_over_slots() -> None:
    problem = make_problem([9, 8, 7, 6, 5, 4], capacity=60, dp_size=3, num_rows=1)
    packing, _ = pack(problem, RoundRobin())
    assert packing is not None
    assert packing.dp_slot_of_sample.tolist() == [0, 1, 2, 0, 1, 2]


def test_bins_are_dealt_in_turn_and_fullest_first_on_request() -> None:
    # FFD bins: 60, 55 (50 + 5), 40, 35: to slots 0, 1, 0, 1.
    problem = make_problem([60, 50, 5, 40, 35], capacity=60, dp_size=2, num_rows=2)
    packing, _ = pack(problem, FfdDealt())
    assert packing is not None
    assert cell_sums(problem, packing).tolist() == [60, 55, 40, 35]
    assert packing.dp_slot_of_sample.tolist() == [0, 1, 1, 0, 1]
    # Both 30 open bins, each takes a 25 and one a 5: the second bin of slot 0 is the fuller one once it is sorted.
    problem = make_problem([31, 30, 30, 29, 29, 28, 31], capacity=60, dp_size=2, num_rows=2)
    packing, _ = pack(problem, FfdDealt(largest_first=True))
    assert packing is not None
    sums = cell_sums(problem, packing).reshape(2, 2)
    assert (sums[0] >= sums[1]).all()


@settings(max_examples=40, deadline=None)
@given(problems())
def test_split_sort_chunk_rows_descend_in_squares(problem: Problem) -> None:
    if SplitSortChunk().unsupported(problem):
        return
    packing, _ = pack(problem, SplitSortChunk())
    if packing is None:
        return
    squares = np.zeros(problem.num_cells, dtype=np.int64)
    np.add.at(squares, packing.cells(problem), problem.lengths**2)
    assert (np.diff(squares) <= 0).all()


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
)
def test_swaps_end_where_no_swap_with_the_costliest_slot_helps(num_slots: int, each: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cost = rng.integers(1, 100, num_slots * each).tolist()
    slots = [list(range(d * each, (d + 1) * each)) for d in range(num_slots)]

    def value(of: list[list[int]]) -> tuple[int, int]:
        totals = [sum(cost[index] for index in mine) for mine in of]
        return max(totals), max(totals) - min(totals)

    before = value(slots)
    once = [list(mine) for mine in slots]
    assert practice._swap_bins(once, cost, max_swaps=1, stopped=lambda: False) <= 1
    swaps = practice._swap_bins(slots, cost, max_swaps=10**6, stopped=lambda: False)
    after = value(slots)
    assert after <= value(once) <= before
    assert (swaps == 0) == (after == before)
    totals = [sum(cost[index] for index in mine) for mine in slots]
    high = totals.index(max(totals))
    for low in range(num_slots):
        for a in range(each):
            for b in range(each):
                if low == high:
                    continue
                trial = [list(mine) for mine in slots]
                trial[high][a], trial[low][b] = trial[low][b], trial[high][a]
                assert value(trial) >= after


def test_swapping_bins_lowers_the_costliest_slot() -> None:
    lengths = np.random.default_rng(5).integers(5, 60, 64).tolist()
    problem = make_problem(lengths, dp_size=8)

    def largest(packer: KkSwap) -> int:
        packing, explanation = pack(problem.replace(num_rows=problem.num_rows + 1), packer)
        assert packing is not None, explanation
        work = np.array(practice._mean_work(problem))
        return int(np.bincount(packing.dp_slot_of_sample, weights=work, minlength=8).max())

    assert largest(KkSwap()) < largest(KkSwap(max_swaps=0))


def test_a_stopped_run_returns_nothing_and_says_so() -> None:
    problem = make_problem([10] * 200, capacity=60, dp_size=4)
    for packer in (NextFit(fit="first"), FfdDealt(), MffdDealt(), KarmarkarKarp(), KkFfdFallback(), KkSwap()):
        packing, reason = pack(problem, packer, stop=True)
        assert packing is None
        assert reason == f"{packer.name} was stopped before it had packed every sample"


# --- placers --------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_balanced_ranks_is_list_scheduling_with_free_slots(ep_size: int, each: int, num_layers: int, seed: int) -> None:
    load = np.random.default_rng(seed).integers(0, 8, (num_layers, ep_size * each))
    ranks = practice.balanced_ranks(load, ep_size)
    for layer in range(num_layers):
        sums, free = [0] * ep_size, [each] * ep_size
        for expert in sorted(range(ep_size * each), key=lambda e: (-load[layer, e], e)):
            rank = min((p for p in range(ep_size) if free[p]), key=lambda p: (sums[p], p))
            assert ranks[layer, expert] == rank
            sums[rank] += load[layer, expert]
            free[rank] -= 1


def test_two_experts_a_rank_are_paired_optimally_here() -> None:
    load = np.array([[9, 8, 7, 3, 2, 1]])
    ranks = practice.balanced_ranks(load, 3)
    peak = max(int(load[ranks == p].sum()) for p in range(3))
    pairings = [
        max(sum(load[0, list(pair)]) for pair in pairs)
        for pairs in combinations(list(combinations(range(6), 2)), 3)
        if len({expert for pair in pairs for expert in pair}) == 6
    ]
    assert peak == min(pairings) == 10


def test_placers_place_for_the_window_and_ignore_the_packing() -> None:
    problem = make_problem([30, 20, 10, 5, 5, 5], seed=3)
    packing, _ = pack(problem, LeastLoaded())
    run = Run(problem)
    assert RoundRobinExperts().place(problem, None, run).rank_of_expert.tolist() == [[0, 1, 0, 1]] * 2  # type: ignore[union-attr]
    eplb = EplbBalanced().place(problem, None, run)
    assert eplb is not None
    assert eplb == EplbBalanced().place(problem, packing, run)
    window = eplb.rank_load(problem).sum(axis=0, dtype=np.int64)
    contiguous = Placement.contiguous(2, 4, ep_size=2).rank_load(problem).sum(axis=0, dtype=np.int64)
    assert (window.max(axis=1) <= contiguous.max(axis=1)).all()


# --- options --------------------------------------------------------------------------------------------------------


def test_every_baseline_is_registered_with_its_own_name() -> None:
    assert len(NAMES) == 11
    for name in NAMES:
        built = component(name)
        assert built.name == name
        assert type(built).__name__ in practice.__all__
        assert fields(built) is not None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("next_fit(fit='best')", "fit is 'best'"),
        ("ffd_dealt(largest_first=1)", "largest_first is 1"),
        ("mffd_dealt(largest_first='yes')", "largest_first is 'yes'"),
        ("kk_swap(max_swaps=-1)", "max_swaps is -1"),
        ("karmarkar_karp(equal=True)", "did you mean 'equal_size'"),
    ],
)
def test_bad_parameters_are_named(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        component(spec)
    assert message in str(caught.value)


def test_all_bad_parameters_are_reported_at_once() -> None:
    with pytest.raises(InvalidInputError) as caught:
        KarmarkarKarp(equal_size=2, repair="x", linear_work=-1)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 3


def test_equal_size_names_the_numbers_that_do_not_divide() -> None:
    problem = make_problem([5] * 7, dp_size=2)
    assert "7 samples divisible by dp_size 2" in str(KarmarkarKarp(equal_size=True).unsupported(problem))
    assert KarmarkarKarp().unsupported(problem) is None
