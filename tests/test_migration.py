"""Transfers and least-move relabelling, against brute force."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInputError
from routepack_opt.migration import relabel, slot_sources, transfers
from routepack_opt.plan import Placement


def random_placement(rng: np.random.Generator, num_layers: int, num_experts: int, ep_size: int) -> Placement:
    slots = rng.permuted(np.tile(np.arange(num_experts), (num_layers, 1)), axis=1)
    return Placement.from_slots(slots, ep_size=ep_size)


def least_moves(placement: Placement, previous: Placement) -> list[int]:
    """Fewest experts that change rank in each layer, over all P! labels."""
    least = []
    for layer in range(placement.num_layers):
        new, old = placement.rank_of_expert[layer], previous.rank_of_expert[layer]
        labels = (np.array(p) for p in permutations(range(placement.ep_size)))
        least.append(min(int((label[new] != old).sum()) for label in labels))
    return least


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**32 - 1))
def test_relabelling_moves_as_few_experts_as_brute_force(
    ep_size: int, num_slots: int, num_layers: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = num_layers, ep_size * num_slots, ep_size
    previous, wanted = random_placement(rng, *size), random_placement(rng, *size)
    relabelled = relabel(wanted, previous)
    moves = transfers(relabelled, previous)
    assert moves.moves_of_layer.tolist() == least_moves(wanted, previous)
    # Nothing is copied inside a rank, and the grouping is the wanted one.
    assert len(moves) == moves.num_moves
    for layer in range(num_layers):
        for ranks in (wanted.rank_of_expert[layer], relabelled.rank_of_expert[layer]):
            groups = {frozenset(np.flatnonzero(ranks == p).tolist()) for p in range(ep_size)}
            assert groups == {
                frozenset(np.flatnonzero(wanted.rank_of_expert[layer] == p).tolist()) for p in range(ep_size)
            }
    assert moves.num_moves <= transfers(wanted, previous).num_moves


def test_only_labels_changed_moves_nothing() -> None:
    rng = np.random.default_rng(5)
    previous = random_placement(rng, 3, 32, 8)
    shuffled = Placement.from_slots((previous.slot_of_expert + 4) % 32, ep_size=8)
    assert transfers(shuffled, previous).num_moves == 3 * 32
    assert relabel(shuffled, previous) == previous
    assert len(transfers(relabel(shuffled, previous), previous)) == 0


def test_a_label_that_stays_itself_wins_ties() -> None:
    # Every new rank takes one expert of every old rank: all labellings keep one expert a rank.
    previous = Placement.contiguous(1, 9, ep_size=3)
    wanted = Placement.from_rank_of_expert([[0, 1, 2] * 3], ep_size=3)
    assert relabel(wanted, previous).rank_of_expert.tolist() == [[0, 1, 2] * 3]


def test_transfer_list_of_a_hand_made_swap() -> None:
    previous = Placement.contiguous(2, 6, ep_size=3)
    # Layer 1: experts 1 and 4 trade places; experts 2 and 3 trade slots inside rank 1.
    wanted = Placement.from_slots([[0, 1, 2, 3, 4, 5], [0, 4, 3, 2, 1, 5]], ep_size=3)
    moves = transfers(wanted, previous, bytes_of_expert=[7, 10])
    assert [tuple(t) for t in moves] == [
        (1, 1, 0, 1, 2, 4, 10),
        (1, 2, 1, 2, 1, 3, 10),
        (1, 3, 1, 3, 1, 2, 10),
        (1, 4, 2, 4, 0, 1, 10),
    ]
    assert moves.num_moves == 2
    assert moves.total_bytes == 20
    assert moves.busiest_rank_bytes == 10
    assert moves.link_bytes.tolist() == [[0, 0, 10], [0, 20, 0], [10, 0, 0]]
    assert moves.moves_of_layer.tolist() == [0, 2]
    assert "2 of 12 experts change rank, 2 copied inside a rank; 20 bytes" in repr(moves)
    text = moves.table(limit=1)
    assert "... and 3 more" in text
    assert len(moves.table(limit=None).splitlines()) == 1 + 4 + 1
    assert len(transfers(relabel(wanted, previous), previous)) == 2
    assert repr(transfers(wanted, previous)).endswith("sizes not given, busiest rank 1 experts)")


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_replaying_the_list_turns_one_layout_into_the_other(seed: int) -> None:
    rng = np.random.default_rng(seed)
    previous, wanted = random_placement(rng, 2, 12, 3), random_placement(rng, 2, 12, 3)
    layout = previous.expert_of_slot.copy()
    for move in transfers(wanted, previous):
        assert previous.expert_of_slot[move.layer, move.from_slot] == move.expert
        layout[move.layer, move.to_slot] = move.expert
    np.testing.assert_array_equal(layout, wanted.expert_of_slot)
    sources = slot_sources(wanted, previous)
    np.testing.assert_array_equal(np.take_along_axis(previous.expert_of_slot, sources, axis=1), layout)


def test_different_shapes_are_refused_at_once() -> None:
    small, large = Placement.contiguous(2, 8, ep_size=4), Placement.contiguous(3, 12, ep_size=3)
    for call in (relabel, transfers):
        with pytest.raises(InvalidInputError) as caught:
            call(small, large)
        assert len(caught.value.faults) == 3
    with pytest.raises(InvalidInputError) as caught:
        slot_sources(small, large)
    assert len(caught.value.faults) == 2


@pytest.mark.parametrize("sizes", [[1, 2, 3], [-1, 4], [1.5, 2.0], [True, False]])
def test_bad_sizes_are_refused(sizes: list[object]) -> None:
    placement = Placement.contiguous(2, 8, ep_size=4)
    with pytest.raises(InvalidInputError):
        transfers(placement, placement, bytes_of_expert=sizes)  # type: ignore[arg-type]
