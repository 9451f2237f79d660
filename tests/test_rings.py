"""Rings of samples: every sample in the ring of its cell, whatever moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.rings import PAIR_WINDOW, change_ring, join, one_for_two, trade_places


class Rings:
    """Samples dealt to cells, with the rings beside them."""

    def __init__(self, cell_of_sample, num_cells):
        self.cell_of_sample = np.array(cell_of_sample)
        self.num_cells = num_cells
        self.num_samples = len(cell_of_sample)
        self.following = np.arange(self.num_samples + num_cells, dtype=np.int32)
        self.previous = self.following.copy()
        for i, cell in enumerate(cell_of_sample):
            join(self.following, self.previous, i, self.num_samples + cell)

    def members(self, cell):
        head = self.num_samples + cell
        found, at = [], self.following[head]
        while at != head:
            found.append(int(at))
            assert self.previous[self.following[at]] == at
            at = self.following[at]
        return found

    def check(self):
        for cell in range(self.num_cells):
            assert sorted(self.members(cell)) == np.flatnonzero(self.cell_of_sample == cell).tolist()


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_rings_follow_every_move(seed):
    rng = np.random.default_rng(seed)
    num_cells = int(rng.integers(2, 6))
    rings = Rings(rng.integers(0, num_cells, int(rng.integers(2, 12))), num_cells)
    rings.check()
    for _ in range(20):
        i, j = (int(k) for k in rng.integers(0, rings.num_samples, 2))
        a, b = rings.cell_of_sample[[i, j]]
        if a != b and rng.random() < 0.5:
            trade_places(rings.following, rings.previous, i, j)
            rings.cell_of_sample[[i, j]] = b, a
        else:
            target = int((a + rng.integers(1, num_cells)) % num_cells)
            change_ring(rings.following, rings.previous, i, rings.num_samples + target)
            rings.cell_of_sample[i] = target
        rings.check()


@given(st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_the_other_half_is_drawn_from_the_cell_and_around_the_length_of_both(seed):
    rng = np.random.default_rng(seed)
    num_samples = int(rng.integers(2, 20))
    rings = Rings(rng.integers(0, 2, num_samples), 2)
    lengths = np.append(np.sort(rng.integers(1, 30, num_samples)), 0)
    for j in range(num_samples):
        cell = set(rings.members(int(rings.cell_of_sample[j])))
        draws = [one_for_two(rings.following, lengths, j, steps, 0) for steps in range(1, len(cell))]
        # Every other sample of the cell exactly once.
        assert sorted(k for _, k in draws) == sorted(cell - {j})
        for i, k in draws:
            place = int(np.searchsorted(lengths[:-1], lengths[j] + lengths[k]))
            assert i == place - PAIR_WINDOW


@pytest.mark.parametrize("offset", [0, 3, 2 * PAIR_WINDOW - 1])
def test_the_offset_shifts_the_one(offset):
    rings = Rings([0, 0, 1, 1], 2)
    lengths = np.array([1, 2, 3, 9, 0])
    i, k = one_for_two(rings.following, lengths, 0, 1, offset)
    assert (i, k) == (2 - PAIR_WINDOW + offset, 1)
