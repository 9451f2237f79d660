"""Pricing of block columns: exact against full enumeration, and bounds below every packing."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from routepack_opt.arrays import IntArray
from routepack_opt.solvers.pricing import Blocks, Generation, Master, exact_work, list_within, price

NEVER = 2**62


def draw(seed: int, *, least_samples: int = 0, num_cells: int = 2, num_samples: int = 9) -> Blocks:
    rng = np.random.default_rng(seed)
    lengths = np.sort(rng.integers(3, 20, size=num_samples))[::-1].astype(np.int64)
    attention = np.stack([lengths, lengths**2 // 4], axis=1) * rng.integers(1, 4)
    loads = np.stack([rng.multinomial(t, rng.dirichlet(np.ones(3)), size=2) for t in lengths]).astype(np.int64)
    return Blocks(lengths, attention.astype(np.int64), 2 * loads, num_cells, 31, least_samples)


def work_of(blocks: Blocks, mask: int) -> int:
    """Best work of a set by trying every split, or NEVER."""
    members = [i for i in range(len(blocks.lengths)) if mask >> i & 1]
    best = NEVER
    for cells in product(range(blocks.num_cells), repeat=len(members)):
        tokens = np.bincount(cells, weights=blocks.lengths[members], minlength=blocks.num_cells)
        held = np.bincount(cells, minlength=blocks.num_cells)
        if tokens.max() > blocks.capacity or held.min() < blocks.least_samples:
            continue
        attention = np.zeros((blocks.num_cells, blocks.attention.shape[1]), dtype=np.int64)
        np.add.at(attention, np.array(cells), blocks.attention[members])
        best = min(best, int(attention.max(axis=0).sum()))
    if best == NEVER:
        return best
    return best + int(blocks.loads[members].sum(axis=0).max(axis=1).sum())


def all_columns(blocks: Blocks) -> dict[int, int]:
    works = {mask: work_of(blocks, mask) for mask in range(1, 1 << len(blocks.lengths))}
    return {mask: work for mask, work in works.items() if work < NEVER}


def partition_optimum(columns: dict[int, int], num_samples: int, num_blocks: int, *, empty: bool) -> int | None:
    """Least total work of a partition, by dynamic programming over subsets."""
    full = (1 << num_samples) - 1
    best = {0: 0}
    seen: list[int] = []
    for _ in range(num_blocks):
        reached: dict[int, int] = {}
        for covered, value in best.items():
            lowest = ~covered & (covered + 1)
            for mask, work in columns.items():
                if not mask & covered and mask & lowest:
                    total = value + work
                    if total < reached.get(covered | mask, NEVER):
                        reached[covered | mask] = total
        if full in best and empty:
            seen.append(best[full])
        best = reached
    if full in best:
        seen.append(best[full])
    return min(seen) if seen else None


def costs_of(columns: dict[int, int], multipliers: IntArray, scale: int) -> dict[int, int]:
    return {
        mask: scale * work - sum(int(u) for i, u in enumerate(multipliers) if mask >> i & 1)
        for mask, work in columns.items()
    }


def random_multipliers(blocks: Blocks, seed: int, scale: int) -> IntArray:
    rng = np.random.default_rng(100 + seed)
    each = blocks.attention.sum(axis=1) * 0.6 + blocks.loads.mean(axis=2).sum(axis=1)
    return np.floor(each * rng.uniform(0.4, 1.8, size=len(each)) * scale).astype(np.int64) - int(rng.integers(0, 9))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("least_samples", "num_cells", "scale"), [(0, 2, 1), (1, 2, 16), (0, 1, 5), (1, 3, 1024)])
def test_pricing_equals_enumeration(seed: int, least_samples: int, num_cells: int, scale: int) -> None:
    num_samples = 8 if num_cells < 3 else 7
    blocks = draw(seed, least_samples=least_samples, num_cells=num_cells, num_samples=num_samples)
    num_blocks = 2 if num_cells > 1 else 4
    multipliers = random_multipliers(blocks, seed, scale)
    # Columns that leave the others too much, or too little, are in no packing; price() may leave them out.
    room = num_cells * blocks.capacity
    least = int(blocks.lengths.sum()) - (num_blocks - 1) * room
    most = num_samples - least_samples * num_cells * (num_blocks - 1)
    columns = {
        mask: work
        for mask, work in all_columns(blocks).items()
        if sum(int(t) for i, t in enumerate(blocks.lengths) if mask >> i & 1) >= least and mask.bit_count() <= most
    }
    costs = costs_of(columns, multipliers, scale)
    flag = np.zeros(1, dtype=np.uint8)
    found = price(
        blocks, num_blocks, multipliers, scale=scale, threshold=2**60, node_limit=NEVER, flag=flag
    )  # fmt: skip
    assert found.least == min(costs.values(), default=2**60)
    for mask, work, cost in zip(found.masks.tolist(), found.works.tolist(), found.costs.tolist(), strict=True):
        assert (columns[mask], costs[mask]) == (work, cost)
    if not costs:
        return
    limit = sorted(costs.values())[len(costs) // 3]
    listed = list_within(
        blocks, num_blocks, multipliers, scale=scale, limit=limit, most_columns=1000, flag=flag
    )  # fmt: skip
    assert listed is not None
    masks, works, exact = listed
    assert exact.all()
    assert dict(zip(masks.tolist(), works.tolist(), strict=True)) == {
        mask: work for mask, work in columns.items() if costs[mask] <= limit
    }
    assert list_within(
        blocks, num_blocks, multipliers, scale=scale, limit=limit, most_columns=len(masks) - 1, flag=flag
    ) is None  # fmt: skip


def test_only_what_is_below_the_threshold_is_found() -> None:
    blocks = draw(1, num_samples=8)
    multipliers = random_multipliers(blocks, 1, 4)
    flag = np.zeros(1, dtype=np.uint8)
    least = price(blocks, 3, multipliers, scale=4, threshold=2**60, node_limit=NEVER, flag=flag).least
    assert least is not None
    below = price(blocks, 3, multipliers, scale=4, threshold=least + 1, node_limit=NEVER, flag=flag)
    assert below.least == least
    assert (below.costs == least).all()
    none = price(blocks, 3, multipliers, scale=4, threshold=least, node_limit=NEVER, flag=flag)
    assert (none.least, len(none.masks)) == (least, 0)


def test_a_search_cut_short_proves_nothing() -> None:
    blocks = draw(2)
    multipliers = random_multipliers(blocks, 2, 1)
    flag = np.zeros(1, dtype=np.uint8)
    few = price(blocks, 4, multipliers, scale=1, threshold=2**60, node_limit=1, flag=flag)
    assert few.least is None
    assert len(few.masks)
    flag[0] = 1
    assert price(blocks, 4, multipliers, scale=1, threshold=2**60, node_limit=NEVER, flag=flag).least is None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("least_samples", [0, 1])
def test_bounds_stay_below_the_best_packing(seed: int, least_samples: int) -> None:
    num_blocks = 2 + seed % 3
    blocks = draw(10 + seed, least_samples=least_samples, num_samples=8)
    columns = all_columns(blocks)
    room = blocks.num_cells * blocks.capacity
    empty = least_samples == 0 and int(blocks.lengths.sum()) <= (num_blocks - 1) * room
    best = partition_optimum(columns, 8, num_blocks, empty=empty)
    alone = int(blocks.attention.sum() + blocks.loads.max(axis=2).sum())
    seen: list[int] = []
    generation = Generation(
        blocks, num_blocks, most=alone if best is None else best, scale=1024, empty_blocks=empty,
        flag=np.zeros(1, dtype=np.uint8), on_bound=seen.append,
    )  # fmt: skip
    assert generation.run()
    assert seen == sorted(seen)
    assert seen[-1] == generation.bound
    if best is None:
        return
    assert generation.bound <= best
    # The relaxation is at least as strong as loads and attention averaged over everything.
    average = int(blocks.attention.sum(axis=0).sum() // blocks.num_cells + blocks.loads.sum(axis=0).max(axis=1).sum())
    assert generation.bound >= average - 2
    # No column of a packing as good as the best one is left out.
    listed = list_within(
        blocks, num_blocks, generation.multipliers, scale=1024, most_columns=1000, flag=np.zeros(1, dtype=np.uint8),
        limit=generation.constant + best * 1024 - generation.scaled_bound,
    )  # fmt: skip
    assert listed is not None
    kept = {mask: columns[mask] for mask in listed[0].tolist()}
    assert partition_optimum(kept, 8, num_blocks, empty=empty) == best


def test_a_cut_forbids_half_of_each_of_three_pairs() -> None:
    # Three samples, every pair costs 2, every sample alone 10: half of each pair is best, but no packing.
    masks, works = np.array([3, 6, 5, 1, 2, 4]), np.array([2, 2, 2, 10, 10, 10])
    plain = Master(3, 3, most=30, empty_blocks=True, unit=1.0)
    plain.add(masks, works)
    duals = plain.solve()
    assert np.allclose(plain.values(), [0.5, 0.5, 0.5, 0, 0, 0])
    assert np.allclose(duals, [1, 1, 1, 0])
    cut = Master(3, 3, most=30, empty_blocks=True, unit=2.0, cuts=np.array([7]))
    cut.add(masks[:2], works[:2])
    cut.add(masks[2:], works[2:])
    assert cut.masks.tolist() == masks.tolist()
    duals = cut.solve()
    assert np.isclose(cut.values() @ works, 12)
    assert np.isclose(duals[:3].sum() + duals[4], 12 / 2)
    assert duals[4] < 0
    # As many columns as blocks, where no block may be empty.
    full = Master(3, 3, most=30, empty_blocks=False, unit=1.0)
    full.add(masks, works)
    full.solve()
    assert np.isclose(full.values() @ works, 30)


def test_sizes_of_a_block() -> None:
    blocks = draw(1, least_samples=1, num_samples=8)
    total = int(blocks.lengths.sum())
    assert blocks.sizes(1) == (total, 2, 8)
    assert blocks.sizes(3) == (total - 2 * 2 * 31, 2, 4)
    assert draw(1, num_samples=8).sizes(3) == (total - 2 * 2 * 31, 1, 8)


def test_work_of_a_block_is_that_of_its_best_split() -> None:
    blocks = draw(3, least_samples=1, num_samples=6)
    for mask in range(1, 64):
        work = exact_work(
            mask, blocks.lengths, blocks.attention, blocks.loads, blocks.num_cells, blocks.capacity,
            blocks.least_samples, NEVER,
        )  # fmt: skip
        assert work == work_of(blocks, mask)
