"""LPT placement and its refinement: cardinality, monotonicity, proofs, previous placements."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import testing
from routepack_opt.bounds import placement_bound, window_load
from routepack_opt.errors import InvalidInputError
from routepack_opt.migration import transfers
from routepack_opt.plan import Placement
from routepack_opt.planning import place
from routepack_opt.result import Limit, Status
from routepack_opt.solvers.lpt import Contiguous, Lpt, kicked_ranks, lpt_ranks, rank_loads, refined_ranks


@st.composite
def loads(draw):
    ep_size = draw(st.integers(1, 5))
    per_rank = draw(st.integers(1, 6))
    num_layers = draw(st.integers(1, 3))
    high = draw(st.sampled_from([1, 7, 1000, 10**12]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    return rng.integers(0, high + 1, size=(num_layers, ep_size * per_rank)), ep_size


@given(loads())
@settings(max_examples=150, deadline=None)
def test_every_rank_owns_its_share_and_refinement_never_hurts(case):
    load, ep_size = case
    plain = lpt_ranks(load, ep_size, refine=False)
    per_rank = load.shape[1] // ep_size
    previous = rank_loads(load, plain, ep_size).max(axis=1)
    bound = placement_bound(load, ep_size)
    for ranks in (plain, *(refined_ranks(load, plain, ep_size, max_exchange=k) for k in (1, 2, 3, 4))):
        for layer in ranks:
            assert (np.bincount(layer, minlength=ep_size) == per_rank).all()
        total = rank_loads(load, ranks, ep_size)
        assert (total.sum(axis=1) == load.sum(axis=1)).all()
        assert (total.max(axis=1) <= previous).all()
        assert (total.max(axis=1) >= bound).all()


@given(loads())
@settings(max_examples=60, deadline=None)
def test_no_exchange_of_one_or_two_improves_a_refined_placement(case):
    load, ep_size = case
    ranks = lpt_ranks(load, ep_size)
    bound = placement_bound(load, ep_size)
    for layer in range(load.shape[0]):
        total = rank_loads(load, ranks, ep_size)[layer]
        heavy = int(total.argmax())
        if (total == total.max()).sum() > 1 or total[heavy] == bound[layer]:
            continue
        mine = load[layer, ranks[layer] == heavy]
        pairs = [a + b for i, a in enumerate(mine) for b in mine[:i]]
        for other in range(ep_size):
            theirs = load[layer, ranks[layer] == other]
            other_pairs = [a + b for i, a in enumerate(theirs) for b in theirs[:i]]
            for upper, lower in ((mine, theirs), (pairs, other_pairs)):
                for a in upper:
                    for b in lower:
                        assert max(total[heavy] - (a - b), total[other] + (a - b)) >= total[heavy] or other == heavy


def test_plain_lpt_follows_its_definition():
    # 9 → 0, 8 → 1, 5 → 1 (13 there), 5 → 0 (14), 4 → 1: full after three; 1 → 0.
    load = np.array([[5, 9, 1, 8, 5, 4]])
    assert lpt_ranks(load, 2, refine=False).tolist() == [[1, 0, 0, 1, 0, 1]]
    # Without free slots the least loaded rank is passed over.
    assert rank_loads(load, lpt_ranks(load, 2, refine=False), 2).tolist() == [[15, 17]]
    # 9 with two others to make 16 does not exist: 17 is optimal and above the bound.
    assert rank_loads(load, lpt_ranks(load, 2), 2).max() == 17
    assert placement_bound(load, 2).tolist() == [16]


def test_refinement_reaches_the_bound_at_production_size():
    rng = np.random.default_rng(3)
    load = np.rint(rng.lognormal(0, 0.4, size=(6, 256)) * 5000).astype(np.int64)
    for ep_size in (8, 16):
        total = rank_loads(load, lpt_ranks(load, ep_size), ep_size)
        assert (total.max(axis=1) - placement_bound(load, ep_size) <= 2).all()
        contiguous = load.reshape(6, ep_size, -1).sum(axis=2)
        assert total.std(axis=1).max() < 0.001 * contiguous.std(axis=1).min()


def test_three_for_three_finds_what_pairs_miss():
    rng = np.random.default_rng(0)
    load = rng.integers(1, 10**6, size=(8, 24))
    by_size = [rank_loads(load, lpt_ranks(load, 2, max_exchange=k), 2).max(axis=1).sum() for k in (1, 2, 3)]
    assert by_size[0] > by_size[1] > by_size[2]


def test_kicks_reach_the_bound_where_refinement_stops_short():
    rng = np.random.default_rng(4)
    load = rng.integers(1, 10**5, size=(4, 40))
    bound = placement_bound(load, 5)
    refined = lpt_ranks(load, 5, max_exchange=3)
    kicked = kicked_ranks(load, refined, 5, kicks=300, rng=np.random.default_rng(0), max_exchange=3)
    before, after = (rank_loads(load, ranks, 5).max(axis=1) - bound for ranks in (refined, kicked))
    assert (after <= before).all()
    assert before.sum() > 0
    assert after.sum() < before.sum() / 2
    again = kicked_ranks(load, refined, 5, kicks=300, rng=np.random.default_rng(0), max_exchange=3)
    assert (again == kicked).all()
    halted = kicked_ranks(load, refined, 5, kicks=300, rng=rng, max_exchange=3, stopped=lambda: True)
    assert (halted == refined).all()


@given(loads(), st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_kicks_never_hurt_and_keep_cardinality(case, seed):
    load, ep_size = case
    refined = lpt_ranks(load, ep_size)
    kicked = kicked_ranks(load, refined, ep_size, kicks=5, rng=np.random.default_rng(seed))
    for layer in kicked:
        assert (np.bincount(layer, minlength=ep_size) == load.shape[1] // ep_size).all()
    assert (rank_loads(load, kicked, ep_size).max(axis=1) <= rank_loads(load, refined, ep_size).max(axis=1)).all()


def test_ties_are_broken_by_expert_and_rank():
    load = np.full((2, 8), 5)
    assert lpt_ranks(load, 4).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2
    assert lpt_ranks(np.zeros((1, 4), dtype=np.int64), 2).tolist() == [[0, 0, 1, 1]]


def test_one_rank_and_no_layer():
    assert lpt_ranks(np.arange(6)[None], 1).tolist() == [[0] * 6]
    assert lpt_ranks(np.zeros((0, 4), dtype=np.int64), 2).shape == (0, 4)


def test_bad_loads_are_refused_together():
    with pytest.raises(InvalidInputError, match="7 experts are not divisible by ep_size 2"):
        lpt_ranks(np.ones((1, 7), dtype=np.int64), 2)
    with pytest.raises(InvalidInputError, match="layer 0, expert 1: load -4 is negative"):
        lpt_ranks([[3, -4]], 2)
    with pytest.raises(InvalidInputError, match="dtype float64"):
        lpt_ranks([[0.5, 1.0]], 2)
    with pytest.raises(InvalidInputError, match=r"2\^62"):
        lpt_ranks([[2**61, 2**61]], 2)
    with pytest.raises(InvalidInputError, match="every rank must own 1 experts"):
        refined_ranks([[1, 2]], [[0, 0]], 2)
    with pytest.raises(InvalidInputError, match="max_exchange is 5"):
        refined_ranks([[1, 2]], [[0, 1]], 2, max_exchange=5)
    with pytest.raises(InvalidInputError, match="kicks is 3 with refine=False"):
        Lpt(refine=False, kicks=3)
    with pytest.raises(InvalidInputError) as caught:
        Lpt(refine=1, max_exchange=0)  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2


def test_the_claim_is_proven_exactly_when_the_bound_is_met():
    proven = open_ = 0
    for seed in range(40):
        problem = testing.tiny_problem(seed, num_layers=2, ep_size=2, experts_per_rank=3)
        result = place(problem, Lpt())
        load = window_load(problem)
        value = rank_loads(load, result.placement.rank_of_expert, 2).max(axis=1).sum() * problem.expert_unit
        least = min(
            rank_loads(load, other.rank_of_expert, 2).max(axis=1).sum() for other in testing.every_placement(problem)
        )
        level = result.levels[0]
        assert level.value == value
        assert level.bound <= least * problem.expert_unit <= value
        if result.status is Status.OPTIMAL:
            proven += 1
            assert level.bound == level.value
        else:
            open_ += 1
            assert result.limit is Limit.EXHAUSTED
    assert proven > 5
    assert open_ > 0


def test_previous_placement_only_renames_ranks():
    problem = testing.tiny_problem(5, num_layers=3, ep_size=3, experts_per_rank=2)
    fresh = place(problem, Lpt()).placement
    renamed = fresh.rank_of_expert[:, :].copy()
    previous = Placement.from_rank_of_expert((renamed + 1) % 3, ep_size=3)
    again = place(problem, Lpt(), previous=previous).placement
    assert len(transfers(again, previous)) == 0
    assert again == previous


def test_contiguous_stays_and_placers_need_routing():
    problem = testing.tiny_problem(8, num_layers=2, ep_size=2, experts_per_rank=2)
    assert place(problem, Contiguous()).placement.rank_of_expert.tolist() == [[0, 0, 1, 1]] * 2
    bare = testing.tiny_problem(8, num_layers=0)
    assert "no routing" in Contiguous().unsupported(bare)
    assert "no routing" in Lpt().unsupported(bare)
