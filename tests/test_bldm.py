"""Balanced largest differencing: its definition, its strength on smooth loads and its weakness on skew."""

from __future__ import annotations

import numpy as np
import pytest

from routepack_opt import testing
from routepack_opt.bounds import placement_bound
from routepack_opt.errors import InvalidInputError
from routepack_opt.planning import place
from routepack_opt.solvers.bldm import Bldm, bldm_ranks
from routepack_opt.solvers.lpt import lpt_ranks, rank_loads


def test_follows_its_definition():
    # Groups (9, 8), (7, 4), (4, 1): differences 1, 3, 3. The two with 3 are combined first:
    # 7+1, 4+4 = 8, 8 (difference 0); then 9+8, 8+8.
    load = np.array([[9, 8, 7, 4, 4, 1]])
    assert sorted(rank_loads(load, bldm_ranks(load, 2), 2)[0].tolist()) == [16, 17]


@pytest.mark.parametrize(("num_experts", "ep_size"), [(12, 3), (64, 8), (8, 8), (6, 1)])
def test_every_rank_owns_one_expert_of_each_group(num_experts, ep_size):
    rng = np.random.default_rng(num_experts)
    load = rng.integers(0, 1000, size=(4, num_experts))
    ranks = bldm_ranks(load, ep_size)
    for layer in range(4):
        order = np.argsort(-load[layer], kind="stable")
        for group in order.reshape(-1, ep_size):
            assert sorted(ranks[layer, group]) == list(range(ep_size))


def test_smooth_loads_end_at_the_bound():
    rng = np.random.default_rng(1)
    load = rng.integers(9000, 10_000, size=(10, 256))
    excess = rank_loads(load, bldm_ranks(load, 8), 8).max(axis=1) / placement_bound(load, 8) - 1
    assert excess.max() < 1e-4


def test_skewed_loads_are_its_weakness_and_exchanges_repair_it():
    rng = np.random.default_rng(2)
    load = np.rint(rng.lognormal(0, 0.9, size=(10, 128)) * 1000).astype(np.int64)
    bound = placement_bound(load, 8)
    bldm = rank_loads(load, bldm_ranks(load, 8), 8).max(axis=1) / bound - 1
    lpt = rank_loads(load, lpt_ranks(load, 8, refine=False), 8).max(axis=1) / bound - 1
    refined = rank_loads(load, bldm_ranks(load, 8, refine=True), 8).max(axis=1) / bound - 1
    assert bldm.mean() > 0.1
    assert bldm.mean() > 5 * lpt.mean()
    assert refined.max() < 1e-3


def test_one_hot_expert_keeps_its_neighbours():
    # The hot expert's rank must still take one expert of each group: 100 + 1, never 100 + 0.
    load = np.array([[100, 1, 1, 0]])
    assert rank_loads(load, bldm_ranks(load, 2), 2).max() == 100
    load = np.array([[100, 9, 8, 7]])
    assert rank_loads(load, bldm_ranks(load, 2), 2).max() == 107
    load = np.array([[100, 9, 8, 7, 1, 1]])
    assert rank_loads(load, bldm_ranks(load, 2), 2).max() > placement_bound(load, 2)[0] == 102


def test_solver_places_and_refuses_bad_parameters():
    problem = testing.tiny_problem(3, num_layers=2, ep_size=2, experts_per_rank=3)
    plain, refined = (place(problem, Bldm(refine=refine)) for refine in (False, True))
    assert refined.levels[0].value <= plain.levels[0].value
    assert plain.levels[0].bound == refined.levels[0].bound
    assert Bldm(max_exchange=1).spec == "bldm(max_exchange=1)"
    with pytest.raises(InvalidInputError, match="refine is 'yes'"):
        Bldm(refine="yes")  # type: ignore[arg-type]
    assert "no routing" in Bldm().unsupported(testing.tiny_problem(3, num_layers=0))
