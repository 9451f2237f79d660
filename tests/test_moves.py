"""Incremental evaluation: every delta equals a fresh evaluation, walks keep what they promise."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInputError
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.score import evaluate
from routepack_opt.solvers.seeds import RandomizedBestFit
from routepack_opt.testing import tiny_problem

Array = npt.NDArray[np.int64]


class Case:
    """A random instance on plain arrays, with its own evaluation from the definition."""

    def __init__(self, seed: int, **given_sizes: int) -> None:
        rng = np.random.default_rng(seed)

        def size(name: str, low: int, high: int) -> int:
            drawn = int(rng.integers(low, high + 1))
            return given_sizes.get(name, drawn)

        self.n, self.layers, self.ranks = size("n", 1, 14), size("layers", 0, 19), size("ranks", 1, 13)
        self.shards, self.shard_size, self.rows = size("shards", 1, 3), size("shard_size", 1, 3), size("rows", 1, 3)
        self.classes, self.unit = size("classes", 0, 3), size("unit", 0, 5)
        top = size("top", 1, 90)
        self.load = rng.integers(0, top + 1, (self.n, self.layers, self.ranks))
        self.work = rng.integers(0, 1000, (self.classes, self.n))
        self.lengths = rng.integers(1, 9, self.n)
        self.capacity = int(rng.integers(8, 30))
        self.shard_of_slot = rng.permutation(np.repeat(np.arange(self.shards), self.shard_size))
        self.least = size("least", 0, 1)
        self.row = rng.integers(0, self.rows, self.n)
        self.slot = rng.integers(0, len(self.shard_of_slot), self.n)
        self.rng = rng

    def tables(self, **changes: Any) -> MoveTables:
        options: dict[str, Any] = {
            "expert_unit": self.unit,
            "aligned_lengths": self.lengths,
            "capacity": self.capacity,
            "num_rows": self.rows,
            "shard_of_slot": self.shard_of_slot,
            "min_samples_per_cell": self.least,
        }
        return MoveTables(self.load, self.work, **{**options, **changes})

    def blocks(self, row: Array, slot: Array) -> Array:
        work = np.zeros((self.rows, self.shards), dtype=np.int64)
        for r, g in product(range(self.rows), range(self.shards)):
            inside = (row == r) & (self.shard_of_slot[slot] == g)
            expert = self.load[inside].sum(axis=0).max(axis=1).sum() if self.layers else 0
            work[r, g] = self.unit * expert
            for s in range(self.classes):
                cells = [self.work[s, inside & (slot == d)].sum() for d in np.flatnonzero(self.shard_of_slot == g)]
                work[r, g] += max(cells)
        return work

    def levels(self, row: Array, slot: Array) -> tuple[int, int, int]:
        work = self.blocks(row, slot)
        return int(work.sum(axis=0).max()), int(work.sum()), int(work.max())

    def tokens(self, row: Array, slot: Array) -> Array:
        tokens = np.zeros((self.rows, len(self.shard_of_slot)), dtype=np.int64)
        np.add.at(tokens, (row, slot), self.lengths)
        return tokens


def check(case: Case, loads: BlockLoads, row: Array, slot: Array) -> None:
    """What BlockLoads says of a packing is what the definition says."""
    assert loads.levels == case.levels(row, slot)
    assert np.array_equal(loads.block_work, case.blocks(row, slot))
    assert np.array_equal(loads.cell_tokens, case.tokens(row, slot))
    assert loads.cell_samples.sum() == case.n
    held_row, held_slot = loads.packing()
    assert np.array_equal(held_row, row)
    assert np.array_equal(held_slot, slot)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_every_move_changes_the_levels_by_what_it_was_priced_at(seed: int) -> None:
    case = Case(seed)
    loads = BlockLoads(case.tables(), case.row, case.slot)
    row, slot = case.row.copy(), case.slot.copy()
    check(case, loads, row, slot)
    best = loads.levels
    for _ in range(25):
        before = loads.levels
        kind = int(case.rng.integers(4))
        i, j = (int(x) for x in case.rng.integers(0, case.n, 2))
        new_row, new_slot = row.copy(), slot.copy()
        if kind == 0:
            r, d = int(case.rng.integers(case.rows)), int(case.rng.integers(len(case.shard_of_slot)))
            new_row[i], new_slot[i] = r, d
            change, allowed = loads.relocate_change(i, r, d), loads.can_relocate(i, r, d)
            left = int(((row == row[i]) & (slot == slot[i])).sum()) - 1
            stays = (row[i], slot[i]) == (r, d)
            assert allowed == (stays or (case.tokens(new_row, new_slot)[r, d] <= case.capacity and left >= case.least))
            apply = lambda: loads.relocate(i, r, d)  # noqa: E731, B023
        elif kind == 1:
            new_row[[i, j]], new_slot[[i, j]] = row[[j, i]], slot[[j, i]]
            change, allowed = loads.swap_change(i, j), loads.can_swap(i, j)
            after = case.tokens(new_row, new_slot)
            grown = after > case.tokens(row, slot)
            assert allowed == (not bool((after[grown] > case.capacity).any()))
            apply = lambda: loads.swap(i, j)  # noqa: E731, B023
        elif kind == 2:
            k = int(case.rng.integers(case.n))
            if len({i, j, k}) < 3 or (row[j], slot[j]) != (row[k], slot[k]):
                with pytest.raises(InvalidInputError, match=r"not three different|not in one cell"):
                    loads.swap_pair(i, j, k)
                continue
            pair = (int(j), k)
            new_row[[i, *pair]], new_slot[[i, *pair]] = row[[j, i, i]], slot[[j, i, i]]
            change, allowed = loads.swap_pair_change(i, *pair), loads.can_swap_pair(i, *pair)
            after = case.tokens(new_row, new_slot)
            grown = after > case.tokens(row, slot)
            left = int(((new_row == row[j]) & (new_slot == slot[j])).sum())
            stays = (row[i], slot[i]) == (row[j], slot[j])
            assert allowed == (stays or (not bool((after[grown] > case.capacity).any()) and left >= case.least))
            apply = lambda: loads.swap_pair(i, *pair)  # noqa: E731, B023
        else:
            (ra, rb), (ga, gb) = case.rng.integers(0, case.rows, 2), case.rng.integers(0, case.shards, 2)
            for r, g, to_r, to_g in ((ra, ga, rb, gb), (rb, gb, ra, ga)):
                source, target = np.flatnonzero(case.shard_of_slot == g), np.flatnonzero(case.shard_of_slot == to_g)
                for d, to_d in zip(source, target, strict=True):
                    moved = (row == r) & (slot == d)
                    new_row[moved], new_slot[moved] = to_r, to_d
            block = int(ra), int(ga), int(rb), int(gb)
            change, allowed = loads.exchange_change(*block), True
            apply = lambda: loads.exchange(*block)  # noqa: E731, B023
        after_levels = case.levels(new_row, new_slot)
        assert change == tuple(b - a for a, b in zip(before, after_levels, strict=True))
        assert loads.levels == before
        if not allowed:
            with pytest.raises(InvalidInputError, match="breaks capacity"):
                apply()
            check(case, loads, row, slot)
            continue
        assert apply() == change
        row, slot = new_row, new_slot
        check(case, loads, row, slot)
        best = min(best, loads.levels)
        assert loads.best_levels == best == case.levels(*loads.best_packing())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 30.0, 3000.0]),
    pair_share=st.sampled_from([0.0, 0.3, 0.7]),
)
def test_walks_keep_capacity_minimum_and_exact_levels(seed: int, temperature: float, pair_share: float) -> None:
    case = Case(seed)
    options: dict[str, Any] = {
        "num_proposals": 400,
        "temperature": temperature,
        "energy_weights": (1.0, 0.5, 0.25),
        "pair_share": pair_share,
    }
    loads = BlockLoads(case.tables(), case.row, case.slot)
    overfull = case.tokens(case.row, case.slot).clip(min=case.capacity)
    held = loads.cell_samples.clip(max=case.least)
    start = loads.levels
    rng = np.array([seed], dtype=np.uint64)
    counts = loads.walk(rng, **options)
    assert counts.proposed == 400 >= counts.fitting >= counts.evaluated >= counts.accepted >= counts.improved
    row, slot = loads.packing()
    check(case, loads, row, slot)
    assert loads.best_levels == case.levels(*loads.best_packing())
    assert loads.best_levels <= min(start, loads.levels)
    # Blocks may have been exchanged, so cells are compared as multisets.
    assert case.tokens(row, slot).max() <= overfull.max()
    if overfull.max() == case.capacity:
        assert case.tokens(row, slot).max() <= case.capacity
    assert (loads.cell_samples >= case.least).sum() >= (held >= case.least).sum()
    again = BlockLoads(case.tables(), case.row, case.slot)
    again.walk(np.array([seed], dtype=np.uint64), **options)
    assert np.array_equal(again.packing(), (row, slot))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_walk_at_temperature_zero_never_raises_the_energy(seed: int) -> None:
    case = Case(seed)
    loads = BlockLoads(case.tables(), case.row, case.slot)
    rng = np.array([seed], dtype=np.uint64)
    energy = sum(loads.levels)
    for turn in range(20):
        pairs = 0.5 * (turn % 2)
        loads.walk(rng, num_proposals=10, temperature=0.0, energy_weights=(1.0, 1.0, 1.0), pair_share=pairs)
        assert sum(loads.levels) <= energy
        energy = sum(loads.levels)


@pytest.mark.parametrize(("relocation_share", "pair_share"), [(0.25, 0.0), (0.05, 0.9)])
def test_a_walk_samples_the_boltzmann_distribution(relocation_share: float, pair_share: float) -> None:
    case = Case(3, n=4, layers=3, ranks=3, shards=2, shard_size=1, rows=2, classes=2, unit=4, least=0)
    case.capacity = int(case.lengths.max()) + 6
    cells = [(r, d) for r in range(2) for d in range(2)]
    energy_of, sizes_of = {}, {}
    for choice in product(cells, repeat=4):
        row, slot = (np.array(part) for part in zip(*choice, strict=True))
        if case.tokens(row, slot).max() <= case.capacity:
            levels = case.levels(row, slot)
            energy_of[choice] = levels[0] + 0.5 * levels[1] + 0.25 * levels[2]
            sizes_of[choice] = max(choice.count(cell) for cell in cells)
    values = np.array(list(energy_of.values()))
    temperature = float(values.std())
    weights = np.exp(-(values - values.min()) / temperature)
    weights /= weights.sum()
    expected = float((weights * values).sum())
    # A feasible start: the samples spread over the four cells.
    loads = BlockLoads(case.tables(), [0, 0, 1, 1], [0, 1, 0, 1])
    rng = np.array([7], dtype=np.uint64)
    seen = []
    visits = dict.fromkeys(energy_of, 0)
    for _ in range(24_000):
        loads.walk(
            rng,
            num_proposals=16,
            temperature=temperature,
            energy_weights=(1.0, 0.5, 0.25),
            relocation_share=relocation_share,
            pair_share=pair_share,
        )
        a, b, c = loads.levels
        seen.append(a + 0.5 * b + 0.25 * c)
        visits[tuple((int(r), int(d)) for r, d in zip(*loads.packing(), strict=True))] += 1
    # The standard error is about 0.01 standard deviations; uniform sampling would be off by more than 0.5.
    assert abs(np.mean(seen) - expected) < 0.04 * temperature
    assert abs(values.mean() - expected) > 0.3 * temperature
    # How crowded cells are is what a missing correction of one for two would shift, by 0.03 and more.
    shares = np.array(list(visits.values())) / len(seen)
    crowd = np.array(list(sizes_of.values()))
    for size in np.unique(crowd):
        assert abs(shares[crowd == size].sum() - weights[crowd == size].sum()) < 0.015


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_levels_are_those_of_the_evaluator(seed: int) -> None:
    problem = tiny_problem(seed)
    rng = np.random.default_rng(seed)
    ranks = (
        np.stack(
            [rng.permutation(np.arange(problem.num_experts)) // (problem.num_experts // problem.ep_size)]
            * problem.num_layers
        )
        if problem.num_layers
        else np.zeros((0, 0), dtype=np.int64)
    )
    placement = Placement.from_rank_of_expert(ranks, ep_size=problem.ep_size)
    cells = RandomizedBestFit(near=1.0).cells(problem, rng)
    assert cells is not None
    packing = Packing.from_cells(cells, dp_size=problem.dp_size)
    loads = BlockLoads.of(problem, placement, packing)
    assert loads.levels == evaluate(problem, Plan.of(problem, placement, packing)).levels
    for _ in range(10):
        i, j = (int(x) for x in rng.integers(0, problem.num_samples, 2))
        if loads.can_swap(i, j):
            loads.swap(i, j)
        r, d = int(rng.integers(problem.num_rows)), int(rng.integers(problem.dp_size))
        if loads.can_relocate(i, r, d):
            loads.relocate(i, r, d)
    moved = Packing.from_arrays(*loads.packing())
    assert loads.levels == evaluate(problem, Plan.of(problem, placement, moved)).levels


def test_loads_beyond_uint16_are_exact() -> None:
    case = Case(11, n=9, layers=5, ranks=4, top=2**26, unit=3, rows=2, shards=2)
    loads = BlockLoads(case.tables(), case.row, case.slot)
    check(case, loads, case.row, case.slot)
    loads.walk(np.array([1], dtype=np.uint64), num_proposals=500, temperature=1e6, energy_weights=(1.0, 1.0, 0.0))
    check(case, loads, *loads.packing())
    options: dict[str, Any] = {"num_proposals": 500, "temperature": 1e6, "energy_weights": (1.0, 1.0, 0.0)}
    counts = loads.walk(np.array([2], dtype=np.uint64), pair_share=0.7, **options)
    assert counts.accepted > 0
    check(case, loads, *loads.packing())


def test_equal_slots_stay_equal() -> None:
    case = Case(5, n=12, rows=3, shards=2, shard_size=2)
    case.row, case.slot = np.arange(12) // 4, np.arange(12) % 4
    case.lengths[:], case.capacity = np.arange(12) % 3 + 1, 9
    loads = BlockLoads(case.tables(equal_samples_per_slot=True, min_samples_per_cell=0), case.row, case.slot)
    counts = loads.walk(
        np.array([1], dtype=np.uint64),
        num_proposals=3000,
        temperature=1e9,
        energy_weights=(1.0, 1.0, 1.0),
        pair_share=0.3,
    )
    assert counts.accepted > 100
    assert np.array_equal(np.bincount(loads.packing()[1], minlength=4), [3, 3, 3, 3])
    assert (loads.cell_samples != 1).any()
    with pytest.raises(InvalidInputError, match="equal numbers"):
        loads.exchange(0, 0, 0, 1)
    held = int(loads.packing()[1][0])
    assert not loads.can_relocate(0, 0, (held + 1) % 4)


def test_a_copy_walks_on_alone() -> None:
    case = Case(8, n=10, rows=2, shards=2, layers=4, unit=2)
    tables = case.tables()
    first, second = BlockLoads(tables, case.row, case.slot), BlockLoads(tables, [0] * 10, [0] * 10)
    second.copy_from(first)
    check(case, second, case.row, case.slot)
    second.walk(np.array([2], dtype=np.uint64), num_proposals=200, temperature=1e9, energy_weights=(1.0, 0.0, 0.0))
    check(case, first, case.row, case.slot)
    other = BlockLoads(case.tables(), case.row, case.slot)
    with pytest.raises(InvalidInputError, match="MoveTables"):
        other.copy_from(first)


def test_bad_input_is_named() -> None:
    case = Case(2, n=6, layers=2, ranks=2, rows=2, shards=2, shard_size=1, classes=1)
    with pytest.raises(InvalidInputError, match="int32 limit"):
        MoveTables(
            np.full((3, 1, 1), 2**30),
            np.zeros((0, 3), dtype=np.int64),
            expert_unit=1,
            aligned_lengths=[1, 1, 1],
            capacity=3,
            num_rows=1,
            shard_of_slot=[0],
        )
    with pytest.raises(InvalidInputError) as caught:
        MoveTables(
            case.load.astype(np.float64),
            -1 - case.work,
            expert_unit=1,
            aligned_lengths=case.lengths,
            capacity=3,
            num_rows=0,
            shard_of_slot=[0, 0, 1],
        )
    assert len(caught.value.faults) == 4
    with pytest.raises(InvalidInputError, match=r"rank_load has shape \(6,\)"):
        MoveTables(
            np.zeros(6, dtype=np.int64),
            case.work,
            expert_unit=1,
            aligned_lengths=case.lengths,
            capacity=3,
            num_rows=1,
            shard_of_slot=[0],
        )
    tables = case.tables()
    with pytest.raises(InvalidInputError) as caught:
        BlockLoads(tables, [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, -1])
    assert caught.value.faults == (
        "row_of_sample: sample 5 has 2; it must be in 0..1",
        "dp_slot_of_sample: sample 5 has -1; it must be in 0..1",
    )
    with pytest.raises(InvalidInputError, match=r"must be \[6\]"):
        BlockLoads(tables, [0], [0])
    loads = BlockLoads(tables, [0] * 6, [0] * 6)
    for call in (
        lambda: loads.can_swap(0, 6),
        lambda: loads.relocate_change(0, 2, 0),
        lambda: loads.relocate_change(0, 0, 2),
        lambda: loads.exchange_change(0, 0, 0, 2),
    ):
        with pytest.raises(InvalidInputError, match="outside"):
            call()
    rng = np.zeros(1, dtype=np.uint64)
    for share in (-0.1, 0.75):
        with pytest.raises(InvalidInputError, match=f"pair_share {share}"):
            loads.walk(rng, num_proposals=1, temperature=0.0, energy_weights=(1.0, 0.0, 0.0), pair_share=share)
