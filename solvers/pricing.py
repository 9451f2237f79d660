"""Column generation where the columns of a packing are too many to list.

A column is a set of samples that fits one block; its *reduced cost* under
multipliers u is its work less Σ_i u_i over its samples. For any integers u, the
least reduced cost v of all columns makes Σ_i u_i + R · G · v a lower bound on the
total work of every packing (Lagrange; Farley 1990, doi:10.1287/opre.38.5.922;
for G = 1 the total is level 1, else a G-th of it bounds level 1).

*Pricing* finds v without a list: depth-first search over sets of samples, one
subtree for each first sample. A set with work A whose layer l is heaviest on rank
p(l) can only grow to a work of at least A + Σ_l (added load on p(l)): this makes
a linear gain u_i − Σ_l load(i, l, p(l)) for each sample that may still join, and a
fractional knapsack over the room left bounds the gains of all of them (in
integers: any price per token makes a valid bound, Dantzig's is only the best).
A second bound takes the mean of that and of the loads averaged over all ranks.
Attention enters with its largest sample or its average cell. Everything is in
int64 after the multipliers have been rounded, so the bounds are exact.

*Generation* (Gilmore & Gomory 1961, doi:10.1287/opre.9.6.849) alternates a linear
master program with pricing, first with few nodes for each first sample, then
exhaustively; multipliers are the mean of the master's and the best so far
(Wentges 1997, weighted Dantzig-Wolfe decomposition) until that finds nothing.
Exhaustive passes grow about tenfold from 32 to 40 samples in blocks of two cells:
at 40 and more the time limit ends generation with the bound reached so far.
*Within* lists every column whose reduced cost is at most a limit:
with the limit at the distance between bound and a known packing no better packing
is lost (Baldacci, Christofides & Mingozzi 2008, doi:10.1007/s10107-007-0178-5).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray
from routepack_opt.highs import silent_highs

__all__ = ["Blocks", "Generation", "Master", "Priced", "exact_work", "list_within", "price", "split_block", "work_unit"]

_NEVER = 2**62
#: Nodes that the split of one column may take; a harder one keeps its lower bound.
_SPLIT_NODES = 300
#: Nodes for each first sample before pricing is exhaustive.
_NODE_LIMITS = (400, 10_000)
#: Exhaustive pricing first looks for columns that gain more than this share of the mean block: a bound comes early.
_SLACKS = (2e-3, 2e-4, 0.0)
#: Weight of the best multipliers so far against the master's, which jump about.
_SMOOTHING = 0.5


class Blocks(NamedTuple):
    """The samples as the kernels see them, in descending order of length."""

    lengths: IntArray  # [N] aligned tokens
    attention: IntArray  # [N, S]
    loads: IntArray  # [N, L, P] work units
    num_cells: int  # of a block
    capacity: int
    least_samples: int  # of a cell

    def sizes(self, num_blocks: int) -> tuple[int, int, int]:
        """Least tokens, fewest and most samples of a block in a packing of all samples into ``num_blocks``."""
        least = int(self.lengths.sum()) - (num_blocks - 1) * self.num_cells * self.capacity
        needed = self.least_samples * self.num_cells
        return least, max(1, needed), len(self.lengths) - needed * (num_blocks - 1)


class Priced(NamedTuple):
    """Outcome of one pricing pass."""

    least: int | None  # no column has a reduced cost below this; None if the search was cut short
    masks: IntArray  # the best column of each first sample below the threshold
    works: IntArray
    costs: IntArray  # reduced costs


def price(
    blocks: Blocks,
    num_blocks: int,
    multipliers: IntArray,
    *,
    scale: int,
    threshold: int,
    node_limit: int,
    flag: npt.NDArray[np.uint8],
) -> Priced:
    """Find the columns of least reduced cost below a threshold.

    Parameters
    ----------
    blocks : Blocks
    num_blocks : int
        Blocks that share the samples; it limits how little one may hold.
    multipliers : int64 [N]
        Multipliers, in work units times ``scale``.
    scale : int
    threshold : int
        Only reduced costs below this matter.
    node_limit : int
        Nodes for each first sample.
    flag : uint8 [1]
        Non-zero to stop.

    Returns
    -------
    Priced
        ``least`` is min(``threshold``, least reduced cost) if the search was
        exhaustive, or a lower bound on it where the best split of a block
        took too many nodes.
    """
    n = len(blocks.lengths)
    masks, works = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    exact = np.zeros(n, dtype=np.uint8)
    limits = np.full(n, threshold, dtype=np.int64)
    arguments = _arguments(blocks, num_blocks, multipliers, scale)
    arguments += (limits, masks, works, exact, False, node_limit, flag)
    status = _search(*arguments)
    found = np.flatnonzero(masks != 0)
    least = int(limits.min()) if status >= 0 else None
    return Priced(least, masks[found], works[found], limits[found])


def list_within(
    blocks: Blocks,
    num_blocks: int,
    multipliers: IntArray,
    *,
    scale: int,
    limit: int,
    most_columns: int,
    flag: npt.NDArray[np.uint8],
) -> tuple[IntArray, IntArray, npt.NDArray[np.uint8]] | None:
    """List every column of reduced cost at most ``limit``.

    Parameters
    ----------
    blocks, num_blocks, multipliers, scale, flag
        As of `price`.
    limit : int
    most_columns : int

    Returns
    -------
    tuple or None
        Masks, works, and whether each work is exact (else it is a lower
        bound); None if there are more than ``most_columns`` or ``flag`` was
        raised.
    """
    masks, works = np.empty(most_columns, dtype=np.int64), np.empty(most_columns, dtype=np.int64)
    exact = np.empty(most_columns, dtype=np.uint8)
    limits = np.full(len(blocks.lengths), limit + 1, dtype=np.int64)
    arguments = _arguments(blocks, num_blocks, multipliers, scale)
    arguments += (limits, masks, works, exact, True, _NEVER, flag)
    count = int(_search(*arguments))
    if count < 0:
        return None
    return masks[:count].copy(), works[:count].copy(), exact[:count].copy()


def _arguments(blocks: Blocks, num_blocks: int, multipliers: IntArray, scale: int) -> tuple[Any, ...]:
    # First samples in order of gain per token: late ones have little that may join them.
    gain = multipliers - scale * (
        blocks.loads.mean(axis=2).sum(axis=1) + blocks.attention.sum(axis=1) / blocks.num_cells
    )
    sequence = np.argsort(-gain / blocks.lengths, kind="stable").astype(np.int64)
    return (sequence, multipliers, scale, *blocks, *blocks.sizes(num_blocks))


def work_unit(most: int) -> float:
    """Work units in which a total of ``most`` is a number that a linear program handles well."""
    return max(1.0, most / 1e4)


class Master:
    """The linear program over the columns known so far.

    Every sample is in one column and there are as many columns as blocks. A column
    for each of these rows, costlier than any packing, keeps the program feasible.

    Parameters
    ----------
    num_samples : int
    num_blocks : int
    most : int
        Total work of a known packing, or an upper limit on any.
    empty_blocks : bool
        Whether blocks may hold nothing: there may be fewer columns than blocks.
    unit : float
        Costs of the program, and so its duals, are in work units divided by this.
    cuts : int64 [K], optional
        Sets of three samples: at most one of the columns chosen may hold two of them.

    Attributes
    ----------
    masks : int64
        The columns, in the order they came.
    """

    def __init__(
        self,
        num_samples: int,
        num_blocks: int,
        *,
        most: int,
        empty_blocks: bool,
        unit: float,
        cuts: IntArray | None = None,
    ) -> None:
        self.masks = np.zeros(0, dtype=np.int64)
        self.unit = unit
        self._num_samples, self._most = num_samples, most
        self._cuts: list[int] = [] if cuts is None else cuts.tolist()
        self._lp: Any = silent_highs()
        infinity = float("inf")
        for _ in range(num_samples):
            self._lp.addRow(1.0, 1.0, 0, [], [])
        self._lp.addRow(0.0 if empty_blocks else float(num_blocks), float(num_blocks), 0, [], [])
        for _ in self._cuts:
            self._lp.addRow(-infinity, 1.0, 0, [], [])
        for row in range(num_samples + 1):
            self._lp.addCol(2.0 * most / self.unit, 0.0, infinity, 1, [row], [1.0])

    def add(self, masks: IntArray, works: IntArray) -> None:
        """Add columns."""
        if not len(masks):
            return
        n = self._num_samples
        starts: list[int] = []
        indices: list[int] = []
        for mask in masks.tolist():
            starts.append(len(indices))
            indices += [i for i in range(n) if mask >> i & 1]
            indices.append(n)
            indices += [n + 1 + k for k, triple in enumerate(self._cuts) if (mask & triple).bit_count() >= 2]
        self._lp.addCols(
            len(masks),
            np.asarray(works, dtype=np.float64) / self.unit,
            np.zeros(len(masks)),
            np.full(len(masks), np.inf),
            len(indices),
            np.asarray(starts, dtype=np.int32),
            np.asarray(indices, dtype=np.int32),
            np.ones(len(indices)),
        )
        self.masks = np.concatenate([self.masks, masks])

    def solve(self) -> npt.NDArray[np.float64]:
        """Solve, and return the duals: of the samples, of the number of blocks, of the cuts."""
        self._lp.run()
        return np.asarray(self._lp.getSolution().row_dual, dtype=np.float64)

    def guess(self, lengths: IntArray) -> npt.NDArray[np.float64]:
        """Duals to start from: work in proportion to tokens, a better choice of columns than that of no columns."""
        share = lengths / lengths.sum() * (self._most / self.unit)
        return np.concatenate([share, np.zeros(1 + len(self._cuts))])

    def values(self) -> npt.NDArray[np.float64]:
        """How much of each column the last solution takes."""
        return np.asarray(self._lp.getSolution().col_value, dtype=np.float64)[self._num_samples + 1 :]


class Generation:
    """The linear relaxation by column generation, with an exact integer bound.

    Parameters
    ----------
    blocks : Blocks
    num_blocks : int
    most : int
        Total work of a known packing, or an upper limit on any.
    scale : int
        Multipliers are in work units / ``scale``.
    empty_blocks : bool
        Whether blocks may hold nothing.
    flag : uint8 [1]
        Non-zero to stop.
    on_bound : callable
        Called with each better bound on the total work.
    """

    def __init__(
        self,
        blocks: Blocks,
        num_blocks: int,
        *,
        most: int,
        scale: int,
        empty_blocks: bool,
        flag: npt.NDArray[np.uint8],
        on_bound: Callable[[int], None],
    ) -> None:
        self.blocks, self.num_blocks = blocks, num_blocks
        self.most, self.scale, self.empty_blocks = most, scale, empty_blocks
        self.flag, self.on_bound = flag, on_bound
        self.scaled_bound = -_NEVER
        self.multipliers = np.zeros(len(blocks.lengths), dtype=np.int64)
        self.constant = 0
        self._limit = 2 * most * scale  # of a multiplier
        self._master = Master(
            len(blocks.lengths), num_blocks, most=most, empty_blocks=empty_blocks, unit=work_unit(most)
        )

    @property
    def bound(self) -> int:
        """Lower bound on the total work."""
        return -(-self.scaled_bound // self.scale)

    def add(self, masks: IntArray, works: IntArray) -> int:
        """Add columns that the master does not have; how many."""
        fresh = ~np.isin(masks, self._master.masks)
        self._master.add(masks[fresh], works[fresh])
        return int(fresh.sum())

    def run(self) -> bool:
        """Generate columns until none prices out or ``flag`` is raised; whether it came to the end."""
        n = len(self.blocks.lengths)
        unit = self._master.unit
        guess: npt.NDArray[np.float64] | None = self._master.guess(self.blocks.lengths)
        tolerance = int(1e-9 * self.most * self.scale) + 1
        smoothing = _SMOOTHING
        while not self.flag[0]:
            duals, guess = self._master.solve() if guess is None else guess, None
            if smoothing and self.scaled_bound > 0:
                center = np.append(self.multipliers, self.constant) / (unit * self.scale)
                duals = smoothing * center + (1 - smoothing) * duals
            scaled = np.floor(duals * (unit * self.scale))
            scaled = np.clip(scaled, -self._limit, self._limit).astype(np.int64)
            multipliers, threshold = scaled[:n], int(scaled[n]) - tolerance
            stages = [(limit, 0.0) for limit in _NODE_LIMITS] + [(_NEVER, slack) for slack in _SLACKS]
            for node_limit, slack in stages:
                below = threshold - int(slack * self.most * self.scale / self.num_blocks)
                if self._price(multipliers, below, node_limit) or self.flag[0]:
                    break
                if node_limit == _NEVER and self.scaled_bound > self.most * self.scale:
                    return True
            else:
                if not smoothing:
                    return True
                smoothing = 0.0
                continue
            smoothing = _SMOOTHING
        return False

    def _price(self, multipliers: IntArray, threshold: int, node_limit: int) -> int:
        found = price(
            self.blocks, self.num_blocks, multipliers,
            scale=self.scale, threshold=threshold, node_limit=node_limit, flag=self.flag,
        )  # fmt: skip
        if found.least is not None:
            constant = min(found.least, 0) if self.empty_blocks else found.least
            bound = int(multipliers.sum()) + self.num_blocks * constant
            if bound > self.scaled_bound:
                self.scaled_bound, self.multipliers, self.constant = bound, multipliers, constant
                self.on_bound(self.bound)
        return self.add(found.masks, found.works)


@njit(cache=True, nogil=True)
def _knapsack(
    gains: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    count: int,
    room: int,
    ratios: npt.NDArray[np.float64],
    order: npt.NDArray[np.int64],
) -> Any:
    """Upper bound on the gains of items that fit ``room``: room · ρ + Σ max(0, gain − ρ · tokens) for one ρ ≥ 0."""
    total = np.int64(0)
    weight = np.int64(0)
    for k in range(count):
        total += gains[k]
        weight += tokens[k]
    if weight <= room:
        return total
    for k in range(count):
        ratio = gains[k] / tokens[k]
        at = k
        while at > 0 and ratios[at - 1] < ratio:
            ratios[at] = ratios[at - 1]
            order[at] = order[at - 1]
            at -= 1
        ratios[at] = ratio
        order[at] = k
    left = room
    each = np.int64(0)
    for at in range(count):
        k = order[at]
        left -= tokens[k]
        if left < 0:
            each = gains[k] // tokens[k]
            break
    each = min(each, np.int64(1152921504606846976) // max(np.int64(1), np.int64(room)))
    bound = each * room
    for k in range(count):
        bound += max(np.int64(0), gains[k] - each * tokens[k])
    return min(bound, total)


@njit(cache=True, nogil=True)
def _search(
    sequence: npt.NDArray[np.int64],
    multipliers: npt.NDArray[np.int64],
    scale: int,
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    least: int,
    fewest: int,
    most: int,
    limits: npt.NDArray[np.int64],
    masks: npt.NDArray[np.int64],
    works: npt.NDArray[np.int64],
    exact: npt.NDArray[np.uint8],
    collect: bool,
    node_limit: int,
    flag: npt.NDArray[np.uint8],
) -> int:
    """Sets of samples of reduced cost below ``limits``, by first sample.

    With ``collect`` all of them, and their number or −1 if there are too many; else the best of each first sample,
    which lowers the limit. −1 if the search was cut short.
    """
    n, num_classes = attention.shape
    _, num_layers, num_ranks = loads.shape
    room = num_cells * capacity
    suffix = np.zeros(n + 1, dtype=np.int64)  # tokens of the samples from a position on
    share = np.zeros((n, num_classes), dtype=np.int64)  # scaled attention of an average cell, rounded down
    mean = np.zeros(n, dtype=np.int64)  # scaled work with loads averaged over ranks, rounded down
    for k in range(n - 1, -1, -1):
        i = sequence[k]
        suffix[k] = suffix[k + 1] + lengths[i]
        for s in range(num_classes):
            share[i, s] = scale * attention[i, s] // num_cells
            mean[i] += share[i, s]
        tokens_sum = np.int64(0)
        for layer in range(num_layers):
            for p in range(num_ranks):
                tokens_sum += loads[i, layer, p]
        mean[i] += scale * tokens_sum // max(1, num_ranks)
    held = np.zeros((n + 1, num_layers, num_ranks), dtype=np.int64)
    heaviest = np.zeros(num_layers, dtype=np.int64)
    sums = np.zeros((n + 1, num_classes), dtype=np.int64)
    shares = np.zeros((n + 1, num_classes), dtype=np.int64)
    peak = np.zeros((n + 1, num_classes), dtype=np.int64)
    growing = np.zeros(num_classes, dtype=np.bool_)
    tokens = np.zeros(n + 1, dtype=np.int64)
    sets = np.zeros(n + 1, dtype=np.int64)
    duals = np.zeros(n + 1, dtype=np.int64)
    linear = np.zeros(n + 1, dtype=np.int64)  # reduced cost with averages
    following = np.zeros(n + 1, dtype=np.int64)
    floor = np.zeros(n + 1, dtype=np.int64)  # a set holding the current one costs at least this less gains
    gain_after = np.zeros((n + 1, n + 1), dtype=np.int64)
    gains = np.empty(n, dtype=np.int64)
    both_gains = np.empty(n, dtype=np.int64)
    gain_tokens = np.empty(n, dtype=np.int64)
    both_tokens = np.empty(n, dtype=np.int64)
    ratios = np.empty(n, dtype=np.float64)
    order = np.empty(n, dtype=np.int64)
    never = np.int64(4611686018427387904)
    depth = 0
    count = 0
    nodes = 0
    lead = 0
    cut_short = False
    while depth >= 0:
        at = following[depth]
        if at >= n or tokens[depth] + suffix[at] < least or depth >= most:
            depth -= 1
            continue
        if depth == 0:
            lead = at
            nodes = 0
        elif floor[depth] - gain_after[depth, at] >= limits[lead]:
            depth -= 1
            continue
        following[depth] = at + 1
        i = sequence[at]
        if tokens[depth] + lengths[i] > room:
            continue
        nodes += 1
        if nodes > node_limit:
            cut_short = True
            depth = 0
            continue
        if nodes & 255 == 0 and flag[0]:
            return -1
        deeper = depth + 1
        tokens[deeper] = tokens[depth] + lengths[i]
        sets[deeper] = sets[depth] | (np.int64(1) << i)
        duals[deeper] = duals[depth] + multipliers[i]
        linear[deeper] = linear[depth] + mean[i] - multipliers[i]
        expert = np.int64(0)
        for layer in range(num_layers):
            largest = np.int64(-1)
            for p in range(num_ranks):
                value = held[depth, layer, p] + loads[i, layer, p]
                held[deeper, layer, p] = value
                if value > largest:
                    largest = value
                    heaviest[layer] = p
            expert += max(np.int64(0), largest)
        low = expert  # a lower bound on the work of the set
        base = expert * scale - duals[deeper]
        for s in range(num_classes):
            sums[deeper, s] = sums[depth, s] + attention[i, s]
            shares[deeper, s] = shares[depth, s] + share[i, s]
            peak[deeper, s] = max(peak[depth, s], attention[i, s])
            low += max(peak[deeper, s], -(-sums[deeper, s] // num_cells))
            growing[s] = shares[deeper, s] >= peak[deeper, s] * scale
            base += max(shares[deeper, s], peak[deeper, s] * scale)
        floor[deeper] = base
        if tokens[deeper] >= least and deeper >= fewest and low * scale - duals[deeper] < limits[lead]:
            if flag[0]:
                return -1
            work = np.int64(
                exact_work(sets[deeper], lengths, attention, loads, num_cells, capacity, least_samples, _SPLIT_NODES)
            )
            sure = work >= 0
            if not sure:
                work = low
            if work < never:
                cost = work * scale - duals[deeper]
                if cost < limits[lead]:
                    if collect:
                        if count == len(masks):
                            return -1
                        masks[count] = sets[deeper]
                        works[count] = work
                        exact[count] = sure
                        count += 1
                    else:
                        limits[lead] = cost
                        masks[lead] = sets[deeper]
                        works[lead] = work
                        exact[lead] = sure
        # What may still join: gains under the heaviest ranks, and under the mean of these and all ranks.
        left = room - tokens[deeper]
        found = 0
        both = 0
        gain_after[deeper, n] = 0
        for next_at in range(n - 1, at, -1):
            j = sequence[next_at]
            gain_after[deeper, next_at] = gain_after[deeper, next_at + 1]
            if lengths[j] > left:
                continue
            added = np.int64(0)
            for layer in range(num_layers):
                added += loads[j, layer, heaviest[layer]]
            gain = multipliers[j] - added * scale
            for s in range(num_classes):
                if growing[s]:
                    gain -= share[j, s]
            if gain > 0:
                gains[found] = gain
                gain_tokens[found] = lengths[j]
                found += 1
                gain_after[deeper, next_at] += gain
            gain += multipliers[j] - mean[j]
            if gain > 0:
                both_gains[both] = gain
                both_tokens[both] = lengths[j]
                both += 1
        if base - _knapsack(gains, gain_tokens, found, left, ratios, order) >= limits[lead]:
            continue
        if base + linear[deeper] - _knapsack(both_gains, both_tokens, both, left, ratios, order) >= 2 * limits[lead]:
            continue
        following[deeper] = at + 1
        depth = deeper
    return -1 if cut_short else count


@njit(cache=True, nogil=True)
def split_block(
    members: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    node_limit: int,
    cells: npt.NDArray[np.int64],
) -> Any:
    """Least Σ_s max_cell of the attention work of a block, by branch and bound.

    Members come in descending order of length; ``cells`` receives the best cell of each. Returns 2**62 if the samples
    do not fit, and −1 if more than ``node_limit`` nodes were needed.
    """
    m = len(members)
    num_classes = attention.shape[1]
    floors = np.zeros(num_classes, dtype=np.int64)
    for s in range(num_classes):
        total = np.int64(0)
        for k in range(m):
            total += attention[members[k], s]
        floors[s] = -(-total // num_cells)
    load = np.zeros((num_cells, num_classes), dtype=np.int64)
    room = np.full(num_cells, capacity, dtype=np.int64)
    held = np.zeros(num_cells, dtype=np.int64)
    peak = np.zeros((m + 1, num_classes), dtype=np.int64)
    peak[0] = floors
    sequence = np.empty((m + 1, num_cells), dtype=np.int64)  # cells to try, by the value they lead to
    leads_to = np.empty((m + 1, num_cells), dtype=np.int64)
    length = np.zeros(m + 1, dtype=np.int64)
    tried = np.full(m + 1, -1, dtype=np.int64)
    lowest = floors.sum()
    for s in range(num_classes):
        largest = np.int64(0)
        for k in range(m):
            largest = max(largest, attention[members[k], s])
        lowest += max(np.int64(0), largest - floors[s])
    best = np.int64(4611686018427387904)
    nodes = 0
    k = 0
    while k >= 0:
        if k == m:
            filled = True
            for c in range(num_cells):
                if held[c] < least_samples:
                    filled = False
            value = peak[m].sum()
            if filled and value < best:
                best = value
                for j in range(m):
                    cells[j] = sequence[j, tried[j]]
                if best <= lowest:
                    return best
            k -= 1
            continue
        i = members[k]
        if tried[k] < 0:
            count = 0
            empty_seen = False
            for c in range(num_cells):
                if held[c] == 0:
                    if empty_seen:
                        continue  # empty cells are the same
                    empty_seen = True
                if room[c] < lengths[i]:
                    continue
                value = np.int64(0)
                for s in range(num_classes):
                    value += max(peak[k, s], load[c, s] + attention[i, s])
                at = count
                while at > 0 and (
                    leads_to[k, at - 1] > value
                    or (leads_to[k, at - 1] == value and room[sequence[k, at - 1]] < room[c])
                ):
                    leads_to[k, at] = leads_to[k, at - 1]
                    sequence[k, at] = sequence[k, at - 1]
                    at -= 1
                leads_to[k, at] = value
                sequence[k, at] = c
                count += 1
            length[k] = count
        else:  # take it out of its cell again
            c = sequence[k, tried[k]]
            room[c] += lengths[i]
            held[c] -= 1
            for s in range(num_classes):
                load[c, s] -= attention[i, s]
        tried[k] += 1
        if tried[k] >= length[k] or leads_to[k, tried[k]] >= best:
            tried[k] = -1
            k -= 1
            continue
        nodes += 1
        if nodes > node_limit:
            return np.int64(-1)
        c = sequence[k, tried[k]]
        room[c] -= lengths[i]
        held[c] += 1
        for s in range(num_classes):
            load[c, s] += attention[i, s]
            peak[k + 1, s] = max(peak[k, s], load[c, s])
        k += 1
        tried[k] = -1
    return best


@njit(cache=True, nogil=True)
def exact_work(
    mask: int,
    lengths: npt.NDArray[np.int64],
    attention: npt.NDArray[np.int64],
    loads: npt.NDArray[np.int64],
    num_cells: int,
    capacity: int,
    least_samples: int,
    node_limit: int,
) -> Any:
    """Work of a block with its best split; 2**62 if the samples do not fit its cells, −1 beyond the node limit."""
    n = len(lengths)
    members = np.empty(n, dtype=np.int64)
    m = 0
    for i in range(n):
        if (mask >> i) & 1:
            members[m] = i
            m += 1
    members = members[:m]
    cells = np.zeros(m, dtype=np.int64)
    work = np.int64(split_block(members, lengths, attention, num_cells, capacity, least_samples, node_limit, cells))
    if work < 0 or work >= np.int64(4611686018427387904):
        return work
    for layer in range(loads.shape[1]):
        largest = np.int64(0)
        for p in range(loads.shape[2]):
            value = np.int64(0)
            for k in range(m):
                value += loads[members[k], layer, p]
            largest = max(largest, value)
        work += largest
    return work
