"""Annealing: optimal on tiny problems, same bytes for any number of threads, never worse than its start."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import InfeasibleProblemError, InvalidInputError
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.registry import component
from routepack_opt.score import Score, evaluate, packing_violations
from routepack_opt.solver import Run
from routepack_opt.solvers.annealing import Annealing
from routepack_opt.testing import brute_force, tiny_problem

COST = CostModel(
    (OperatorClass("linear", Fraction(1, 3), Fraction(0)), OperatorClass("full", Fraction(0), Fraction(2)))
)


def contiguous(problem: Problem) -> Placement:
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def make_run(problem: Problem, **options: Any) -> Run:
    return Run(problem, placement=contiguous(problem), **options)


def pack(options: Annealing, problem: Problem, **run_options: Any) -> Packing | None:
    return options.pack(problem, contiguous(problem), make_run(problem, **run_options))


def value(problem: Problem, packing: Packing | None) -> Score:
    assert packing is not None
    assert packing_violations(problem, packing) == []
    return evaluate(problem, Plan.of(problem, contiguous(problem), packing))


def routed_problem(seed: int, *, num_samples: int = 40, equal_lengths: bool = False, **changes: Any) -> Problem:
    """A problem of a few dozen samples with skewed routing."""
    rng = np.random.default_rng(seed)
    lengths = np.full(num_samples, 30) if equal_lengths else rng.integers(5, 60, num_samples)
    counts = np.stack([rng.multinomial(t, rng.dirichlet(np.full(8, 0.5)), size=3) for t in lengths])
    options: dict[str, Any] = {
        "top_k": 1,
        "routed_tokens": lengths,
        "capacity": 120,
        "ep_size": 4,
        "dp_size": 4,
        "num_shards": 2,
        "cost": COST,
    }
    # With top-1 routing no expert gets more tokens than the sample has.
    return Problem.from_arrays(lengths, counts, **{**options, **changes})


@pytest.mark.parametrize("least", [0, 1])
def test_the_optimum_of_tiny_problems_is_found(least: int) -> None:
    compared = 0
    for seed in range(60):
        try:
            problem = tiny_problem(seed, min_samples_per_cell=least)
        except InfeasibleProblemError:
            continue
        if problem.num_cells**problem.num_samples > 100_000:
            continue
        best = evaluate(problem, brute_force(problem, contiguous(problem)))
        found = value(problem, pack(Annealing(num_levels=10), problem, iteration_limit=40_000))
        # The first level is what the walk is after; ties on it are settled by the archive only.
        assert found >= best
        assert found.levels[0] == best.levels[0]
        compared += 1
    assert compared >= 20


@pytest.mark.parametrize("options", [Annealing(), Annealing(num_chains=5, resampling=False, schedule="linear")])
def test_same_seed_same_bytes_for_any_number_of_threads(options: Annealing) -> None:
    problem = routed_problem(1)
    packings = [pack(options, problem, iteration_limit=60_000, seed=3, num_threads=threads) for threads in (1, 2, 3, 8)]
    first = packings[0]
    assert first is not None
    for other in packings[1:]:
        assert other is not None
        assert other.row_of_sample.tobytes() == first.row_of_sample.tobytes()
        assert other.dp_slot_of_sample.tobytes() == first.dp_slot_of_sample.tobytes()
    assert pack(options, problem, iteration_limit=60_000, seed=4) != first


def test_incumbents_never_get_worse_and_the_best_comes_back() -> None:
    problem = routed_problem(2)
    run = make_run(problem, iteration_limit=200_000)
    packing = Annealing().pack(problem, contiguous(problem), run)
    levels = [incumbent.levels for incumbent in run.trace().incumbents]
    assert levels == sorted(levels, reverse=True)
    assert len(levels) > 1
    assert value(problem, packing).levels == levels[-1]


def test_more_proposals_and_routing_awareness_pay() -> None:
    problem = routed_problem(5, num_samples=60)
    start = value(problem, component("ffd").pack(problem, contiguous(problem), make_run(problem)))
    blind = value(problem, pack(component("length_annealing"), problem, iteration_limit=100_000))
    full = value(problem, pack(Annealing(), problem, iteration_limit=100_000))
    assert full < blind
    assert full < start
    # The blind one minimises attention, which is all it sees.
    attention = [int(score.breakdown.attention.sum(axis=0).max()) for score in (blind, start)]
    assert attention[0] <= attention[1]


def test_one_for_two_is_a_move_of_its_own() -> None:
    problem = routed_problem(5, num_samples=48)
    scores = []
    for share in (0.0, 0.3):
        options = Annealing(pair_share=share)
        packings = [pack(options, problem, iteration_limit=40_000, seed=2, num_threads=k) for k in (1, 2)]
        scores.append(value(problem, packings[0]))
        assert scores[-1] == value(problem, packings[1])
    assert scores[0] != scores[1]


def test_length_annealing_does_not_look_at_routing() -> None:
    problem = routed_problem(6)
    rng = np.random.default_rng(0)
    other = Problem.from_arrays(
        problem.lengths,
        rng.permutation(problem.counts, axis=2),
        top_k=1,
        routed_tokens=problem.batch.routed_tokens,
        capacity=120,
        ep_size=4,
        dp_size=4,
        num_shards=2,
        cost=COST,
    )
    options = Annealing(routing_weight=0, seeds=("window_shuffle", "randomized_best_fit"))
    assert pack(options, problem, iteration_limit=20_000) == pack(options, other, iteration_limit=20_000)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_warm_start_never_gets_worse(seed: int) -> None:
    problem = routed_problem(seed, num_samples=16)
    good = pack(Annealing(), problem, iteration_limit=20_000, seed=seed)
    assert good is not None
    plan = Plan.of(problem, contiguous(problem), good)
    again = pack(Annealing(num_levels=2), problem, iteration_limit=200, seed=seed + 1, warm_start=plan)
    assert value(problem, again) <= evaluate(problem, plan)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    alignment=st.sampled_from([1, 7, 16]),
    least=st.sampled_from([0, 1]),
    num_shards=st.sampled_from([1, 2, 4]),
)
def test_capacity_alignment_and_cell_minimum_hold(seed: int, alignment: int, least: int, num_shards: int) -> None:
    problem = routed_problem(
        seed, length_alignment=alignment, min_samples_per_cell=least, num_shards=num_shards, capacity=128
    )
    value(problem, pack(Annealing(initial_temperature=1e9, num_levels=3), problem, iteration_limit=3_000, seed=seed))


def test_equal_samples_per_slot_hold() -> None:
    problem = routed_problem(9, equal_samples_per_slot=True, num_rows=5)
    start = value(problem, component("ffd").pack(problem, contiguous(problem), make_run(problem)))
    assert value(problem, pack(Annealing(), problem, iteration_limit=50_000)) < start


def test_problems_with_a_part_missing() -> None:
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    no_routing = Problem.from_arrays(lengths, capacity=20, ep_size=2, dp_size=2, num_shards=1, cost=COST)
    assert (
        value(no_routing, pack(Annealing(), no_routing, iteration_limit=20_000)).levels[0]
        == (evaluate(no_routing, brute_force(no_routing, contiguous(no_routing))).levels[0])
    )
    no_attention = routed_problem(3, cost=None)
    assert len(no_attention.attention_work) == 0
    start = value(no_attention, component("ffd").pack(no_attention, contiguous(no_attention), make_run(no_attention)))
    assert value(no_attention, pack(Annealing(), no_attention, iteration_limit=20_000)) < start
    blind = pack(component("length_annealing"), no_attention, iteration_limit=2_000)
    assert value(no_attention, blind).levels[1] > 0


def test_equal_lengths_and_a_single_sample() -> None:
    equal = routed_problem(4, equal_lengths=True)
    start = value(equal, component("ffd").pack(equal, contiguous(equal), make_run(equal)))
    assert value(equal, pack(Annealing(), equal, iteration_limit=20_000)) < start
    single = routed_problem(4, num_samples=1)
    assert value(single, pack(Annealing(), single, iteration_limit=1_000)).levels[0] > 0


def test_a_start_with_an_empty_row_does_not_trap_the_walk() -> None:
    problem = routed_problem(7, num_samples=64, num_rows=6, capacity=160)
    level = value(problem, pack(Annealing(), problem, iteration_limit=100_000))
    packing = component("ffd").pack(problem, contiguous(problem), make_run(problem))
    warm = Plan.of(problem, contiguous(problem), packing)
    assert np.unique(packing.row_of_sample).size < 6
    trapped = value(problem, pack(Annealing(), problem, iteration_limit=100_000, warm_start=warm))
    assert trapped.levels[0] <= 1.02 * level.levels[0]


def test_weights_reach_the_archive_exactly() -> None:
    problem = routed_problem(8)
    placement = contiguous(problem)
    by_weight = {
        weight: pack(Annealing(routing_weight=weight), problem, iteration_limit=60_000) for weight in (0.0, 0.05, 1.0)
    }

    def weighted(packing: Packing | None, weight: Fraction) -> Fraction:
        assert packing is not None
        from routepack_opt.score import breakdown

        parts = breakdown(problem, Plan.of(problem, placement, packing))
        work = parts.attention + 0 * parts.expert
        shard = [Fraction(int(work[:, g].sum())) + weight * int(parts.expert[:, g].sum()) for g in range(2)]
        return max(shard)

    for weight in (Fraction(0), Fraction(1, 20), Fraction(1)):
        own = weighted(by_weight[float(weight)], weight)
        assert all(own <= weighted(other, weight) * Fraction(1002, 1000) for other in by_weight.values())


def test_an_iteration_limit_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from routepack_opt.moves import BlockLoads, WalkCounts

    walked: list[int] = []
    original = BlockLoads.walk

    def counting(self: BlockLoads, *args: Any, **options: Any) -> WalkCounts:
        walked.append(options["num_proposals"])
        return original(self, *args, **options)

    monkeypatch.setattr(BlockLoads, "walk", counting)
    problem = routed_problem(1)
    for limit in (1, 3, 1000, 100_001):
        walked.clear()
        pack(Annealing(), problem, iteration_limit=limit)
        assert sum(walked) == limit
    walked.clear()
    pack(Annealing(moves_per_level=50, num_levels=3, num_chains=2), problem, iteration_limit=10_000)
    assert sum(walked) == 2 * 8 * problem.num_samples + 3 * 2 * 50
    # No call is long enough to keep an interrupt waiting.
    walked.clear()
    pack(Annealing(), problem, iteration_limit=2_000_000)
    assert max(walked) <= 32_768


def test_a_stopped_run_returns_a_feasible_packing() -> None:
    problem = routed_problem(1)
    for threads in (1, 2):
        packing = pack(Annealing(), problem, stop=lambda: True, num_threads=threads)
        assert value(problem, packing).levels[0] > 0
        packing = pack(Annealing(), problem, time_limit=0.0, num_threads=threads)
        assert value(problem, packing).levels[0] > 0


def test_none_and_a_reason_without_a_start() -> None:
    problem = Problem.from_arrays([12, 12, 7, 5, 13, 13, 9], capacity=24, ep_size=1, num_rows=3, cost=COST)
    run = make_run(problem)
    assert Annealing().pack(problem, contiguous(problem), run) is None
    assert "to start from" in run._record.explanation


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("annealing(num_chains=0)", "num_chains is 0"),
        ("annealing(num_levels=True)", "num_levels is True"),
        ("annealing(swap_window=1.5)", "swap_window is 1.5"),
        ("annealing(moves_per_level=0)", "moves_per_level is 0"),
        ("annealing(resampling=1)", "resampling is 1"),
        ("annealing(schedule='steps')", "schedule is 'steps'"),
        ("annealing(seeds=())", r"seeds is \(\)"),
        ("annealing(seeds=('ffd', 'magic'))", "seeds is"),
        ("annealing(initial_rise=0)", "initial_rise is 0"),
        ("annealing(final_temperature=-1.0)", "final_temperature is -1.0"),
        ("annealing(routing_weight=-1)", "routing_weight is -1"),
        ("annealing(energy_weights=(1, 2))", "energy_weights is"),
        ("annealing(energy_weights=(0, 0, 0))", "energy_weights is"),
        ("annealing(relocation_share=0.9, exchange_share=0.2)", "add up to at most 1"),
        ("annealing(pair_share=0.8)", "pair_share 0.8; they must be shares of 0..1 that add up to at most 1"),
        ("annealing(num_chain=4)", "num_chains"),
    ],
)
def test_bad_parameters_are_named(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        component(spec)


def test_specs_are_canonical() -> None:
    assert component("annealing(seeds=['ffd'])").spec == "annealing(seeds=('ffd',))"
    assert component("length_annealing").routing_weight == 0
    assert component("annealing").spec == "annealing"
