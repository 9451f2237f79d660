"""Migration: which experts change rank between two placements, and how to make them few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray, integer_array, read_only
from routepack_opt.errors import Faults
from routepack_opt.plan import Placement

__all__ = ["Transfer", "Transfers", "relabel", "slot_sources", "transfers"]


class Transfer(NamedTuple):
    """One expert that changes slot; slots are physical, 0..E−1, bytes are those of one replica."""

    layer: int
    expert: int
    from_rank: int
    from_slot: int
    to_rank: int
    to_slot: int
    num_bytes: int


def slot_sources(placement: Placement, previous: Placement) -> IntArray:
    """Slot of the previous layout that each slot of the new layout is filled from.

    Parameters
    ----------
    placement, previous : Placement
        New and old placement of the same layers and experts; the ranks may differ.

    Returns
    -------
    ndarray of int64, shape [L, E]
        ``state_new[slot] = state_old[sources[l, slot]]``.

    Raises
    ------
    InvalidInputError
        If layers or experts differ.
    """
    _refuse_different_shapes(placement, previous, same_ranks=False)
    sources = np.take_along_axis(previous.slot_of_expert, placement.expert_of_slot, axis=1)
    return read_only(sources)


def relabel(placement: Placement, previous: Placement) -> Placement:
    """Rename ranks and slots so that the fewest experts move; which experts share a rank stays.

    Rank labels of a layer and slots inside a rank do not change any load, so they are free.
    Per layer the labels are the linear assignment that keeps most experts where they are
    (SciPy's modified Jonker–Volgenant algorithm, doi:10.1109/TAES.2016.140952); among equally
    good ones a label that stays itself is preferred. Experts that stay keep their slot, the
    others fill the free slots of their rank in the order of their numbers.

    Parameters
    ----------
    placement : Placement
        The wanted grouping of experts.
    previous : Placement
        What the ranks hold now.

    Returns
    -------
    Placement
        The same grouping with the least number of experts that change rank in every layer, and
        no expert that changes slots inside its rank.

    Raises
    ------
    InvalidInputError
        If layers, experts or ranks differ.

    Notes
    -----
    Only loads of a single layer decide a score, so labels of different layers are independent.
    """
    from scipy.optimize import linear_sum_assignment

    _refuse_different_shapes(placement, previous, same_ranks=True)
    ep_size, num_slots = placement.ep_size, placement.experts_per_rank
    slots = np.empty_like(placement.slot_of_expert)
    for layer in range(placement.num_layers):
        new_rank, old_rank = placement.rank_of_expert[layer], previous.rank_of_expert[layer]
        kept = np.zeros((ep_size, ep_size), dtype=np.int64)
        np.add.at(kept, (new_rank, old_rank), 1)
        gain = kept * (ep_size + 1) + np.eye(ep_size, dtype=np.int64)
        label = linear_sum_assignment(gain, maximize=True)[1].astype(np.int64)
        rank = label[new_rank]
        stays = rank == old_rank
        slots[layer, stays] = previous.slot_of_expert[layer, stays]
        taken = np.zeros(placement.num_experts, dtype=np.bool_)
        taken[slots[layer, stays]] = True
        free = np.flatnonzero(~taken)
        movers = np.flatnonzero(~stays)
        # Movers by (rank, expert) meet free slots, which ascend by rank and count the same per rank.
        slots[layer, movers[np.argsort(rank[movers], kind="stable")]] = free
    assert num_slots * ep_size == placement.num_experts
    return Placement.from_slots(slots, ep_size=ep_size)


@dataclass(frozen=True, eq=False)
class Transfers:
    """Every expert that changes slot between two placements, by layer and expert.

    Attributes
    ----------
    layer, expert : ndarray of int64, shape [M]
        Which expert of which MoE layer.
    from_slot, to_slot : ndarray of int64, shape [M]
        Physical slot before and after.
    num_bytes : ndarray of int64, shape [M]
        State of the expert in one expert-parallel group. Each of the groups holds a copy of
        every expert and moves its own.
    num_layers, num_experts, ep_size : int
        L, E, P.
    sized : bool
        Whether sizes were given; without them every expert counts as one byte.
    """

    layer: IntArray
    expert: IntArray
    from_slot: IntArray
    to_slot: IntArray
    num_bytes: IntArray
    num_layers: int
    num_experts: int
    ep_size: int
    sized: bool = True

    @property
    def from_rank(self) -> IntArray:
        """EP rank that holds the expert before, int64 [M]."""
        return self.from_slot // (self.num_experts // self.ep_size)

    @property
    def to_rank(self) -> IntArray:
        """EP rank that holds the expert after, int64 [M]."""
        return self.to_slot // (self.num_experts // self.ep_size)

    @property
    def crosses(self) -> npt.NDArray[np.bool_]:
        """Whether the expert leaves its rank, bool [M]; the others are copies inside a rank."""
        crosses: npt.NDArray[np.bool_] = self.from_rank != self.to_rank
        return crosses

    @property
    def num_moves(self) -> int:
        """Experts that change rank."""
        return int(self.crosses.sum())

    @property
    def total_bytes(self) -> int:
        """Bytes sent between ranks of one expert-parallel group."""
        return int(self.num_bytes[self.crosses].sum())

    @property
    def moves_of_layer(self) -> IntArray:
        """Experts that change rank in each layer, int64 [L]."""
        return np.bincount(self.layer[self.crosses], minlength=self.num_layers).astype(np.int64)

    @property
    def link_bytes(self) -> IntArray:
        """Bytes from rank to rank, int64 [P, P]; the diagonal holds copies inside a rank."""
        matrix = np.zeros((self.ep_size, self.ep_size), dtype=np.int64)
        np.add.at(matrix, (self.from_rank, self.to_rank), self.num_bytes)
        return matrix

    @property
    def busiest_rank_bytes(self) -> int:
        """Most bytes that one rank sends or receives: what bounds the time of the exchange."""
        links = self.link_bytes
        np.fill_diagonal(links, 0)
        return int(max(links.sum(1).max(), links.sum(0).max()))

    def __len__(self) -> int:
        return len(self.layer)

    def __iter__(self) -> Iterator[Transfer]:
        columns = (
            self.layer, self.expert, self.from_rank, self.from_slot, self.to_rank, self.to_slot, self.num_bytes,
        )  # fmt: skip
        for values in zip(*(column.tolist() for column in columns), strict=True):
            yield Transfer(*values)

    def table(self, *, limit: int | None = 20) -> str:
        """Dry run as text: one line an expert that moves, then totals.

        Parameters
        ----------
        limit : int, optional
            Lines written out; further ones are counted. None writes all.
        """
        rows = list(self)
        shown = rows if limit is None else rows[:limit]
        lines = ["layer expert   from rank/slot     to rank/slot        bytes"]
        lines += [
            f"{t.layer:5d} {t.expert:6d} {t.from_rank:8d} / {t.from_slot:<5d}{t.to_rank:8d} / {t.to_slot:<5d}"
            f"{t.num_bytes:13,d}"
            for t in shown
        ]
        if len(rows) > len(shown):
            lines.append(f"... and {len(rows) - len(shown)} more")
        return "\n".join([*lines, repr(self)])

    def __repr__(self) -> str:
        local = len(self) - self.num_moves
        inside = f", {local} copied inside a rank" if local else ""
        sizes = f"; {self.total_bytes:,} bytes an EP group, busiest rank {self.busiest_rank_bytes:,}"
        if not self.sized:
            sizes = f"; sizes not given, busiest rank {self.busiest_rank_bytes:,} experts"
        return f"Transfers({self.num_moves} of {self.num_layers * self.num_experts} experts change rank{inside}{sizes})"


def transfers(
    placement: Placement, previous: Placement, *, bytes_of_expert: int | Sequence[int] | IntArray | None = None
) -> Transfers:
    """List every expert whose slot differs between two placements.

    Parameters
    ----------
    placement, previous : Placement
        New and old placement. Call `relabel` first, or labels that carry no meaning count as
        moves.
    bytes_of_expert : int or array-like of int, shape [L], optional
        State of one expert, in bytes: parameters, moments, master weights
        (:func:`routepack_opt.materialization.bytes_of_expert` measures it). Without it the byte
        totals count experts.

    Raises
    ------
    InvalidInputError
        If layers, experts or ranks differ, or a size is negative or of wrong number.
    """
    _refuse_different_shapes(placement, previous, same_ranks=True)
    faults = Faults()
    given = 1 if bytes_of_expert is None else bytes_of_expert
    sizes = integer_array(np.atleast_1d(np.asarray(given)), "bytes_of_expert", faults, ndim=1)
    faults.raise_if_any("transfers")
    assert sizes is not None
    if len(sizes) not in (1, placement.num_layers):
        faults.add(f"bytes_of_expert has {len(sizes)} entries; give one or {placement.num_layers}, one a layer")
    for index in np.flatnonzero(sizes < 0):
        faults.add(f"bytes_of_expert[{index}] is {sizes[index]}; it must be at least 0")
    faults.raise_if_any("transfers")
    layer, expert = np.nonzero(placement.slot_of_expert != previous.slot_of_expert)
    return Transfers(
        layer=read_only(layer.astype(np.int64)),
        expert=read_only(expert.astype(np.int64)),
        from_slot=read_only(previous.slot_of_expert[layer, expert]),
        to_slot=read_only(placement.slot_of_expert[layer, expert]),
        num_bytes=read_only(np.broadcast_to(sizes, placement.num_layers)[layer]),
        num_layers=placement.num_layers,
        num_experts=placement.num_experts,
        ep_size=placement.ep_size,
        sized=bytes_of_expert is not None,
    )


def _refuse_different_shapes(placement: Placement, previous: Placement, *, same_ranks: bool) -> None:
    faults = Faults()
    pairs = [
        ("layers", placement.num_layers, previous.num_layers),
        ("experts", placement.num_experts, previous.num_experts),
    ]
    if same_ranks:
        pairs.append(("EP ranks", placement.ep_size, previous.ep_size))
    for noun, new, old in pairs:
        if new != old:
            faults.add(f"the new placement has {new} {noun}, the previous one {old}; they must agree")
    faults.raise_if_any("migration")
