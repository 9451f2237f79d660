"""Question: what does incremental evaluation of moves buy over re-scoring the schedule at every move?

Command: ``python experiments/ablations/rescoring.py`` (tiny-low, 3 seeds, 1 second a
walk; about a minute); ``--family``, ``--seeds``, ``--seconds`` choose otherwise.

One Metropolis chain with one temperature schedule over wall time, from one start
(bins of FFD dealt in turn), moves of the same kinds; only the evaluation differs:

- ``incremental``: :class:`routepack_opt.moves.BlockLoads`, O(L·P + G) a move;
- ``full re-score``: compiled too, loads kept up to date in O(L·P), then every
  block's hottest ranks and slowest slots looked at again, O(R·G·L·P), as the
  paper's complexity has it; moves that break a capacity are refused first, so
  that both evaluate the same share of proposals.

Expected rows: proposals per second 20 to 30 times higher incrementally; much the
same quality at equal proposals (the two draw their moves alike, not identically); a
first level about 0.5 to 1 % of the start lower at equal seconds.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt import planning
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.synthetic import families, family

Array = npt.NDArray[Any]
#: First and last temperature, in mean rises of the first level by a random swap.
HOT, COLD = 0.5, 0.005


@njit(cache=True, nogil=True)
def rescored(
    load: Array, attention: Array, cell: Array, num_cells: int, shard_of_cell: Array, num_shards: int, unit: int
) -> Any:
    """First and second level from block loads [B, P, L] and cell work [S, cells]: the whole schedule, every time."""
    num_blocks, ep_size, num_layers = load.shape
    num_classes = attention.shape[0]
    per_block = num_cells // num_blocks
    shard = np.zeros(num_shards, np.int64)
    for block in range(num_blocks):
        work = 0
        for layer in range(num_layers):
            peak = load[block, 0, layer]
            for p in range(1, ep_size):
                peak = max(peak, load[block, p, layer])
            work += peak
        work *= unit
        for s in range(num_classes):
            slowest = attention[s, cell[block * per_block]]
            for k in range(1, per_block):
                slowest = max(slowest, attention[s, cell[block * per_block + k]])
            work += slowest
        shard[shard_of_cell[cell[block * per_block]]] += work
    return shard.max(), shard.sum()


@njit(cache=True, nogil=True)
def shift(load: Array, attention: Array, used: Array, tables: Any, i: int, source: int, target: int) -> None:
    """Take sample i out of one cell and put it into another; −1 is no cell."""
    rank_load, work, lengths, block_of_cell = tables
    for sign, cell in ((-1, source), (1, target)):
        used[cell] += sign * lengths[i]
        for s in range(attention.shape[0]):
            attention[s, cell] += sign * work[s, i]
        block = block_of_cell[cell]
        for p in range(load.shape[1]):
            for layer in range(load.shape[2]):
                load[block, p, layer] += sign * rank_load[i, p, layer]


@njit(cache=True, nogil=True)
def walk_rescoring(
    rng: np.random.Generator,
    num_proposals: int,
    temperature: float,
    weights: Array,
    capacity: int,
    unit: int,
    tables: Any,
    state: Any,
    cell_order: Array,
    shard_of_cell: Array,
    num_shards: int,
    by_length: Array,
) -> None:
    """Metropolis walk that re-scores the schedule at every fitting proposal; ``state`` changes."""
    cell_of, load, attention, used, current = state
    lengths = tables[2]
    num_cells, num_samples = used.shape[0], cell_of.shape[0]
    for _ in range(num_proposals):
        i, j, target = 0, -1, 0
        if rng.random() < 0.25:
            i = rng.integers(0, num_samples)
            target = rng.integers(0, num_cells)
            if target == cell_of[i] or used[target] + lengths[i] > capacity:
                continue
        else:
            place = rng.integers(0, num_samples)
            other = place + rng.integers(-16, 17)
            if other == place or other < 0 or other >= num_samples:
                continue
            i, j = by_length[place], by_length[other]
            target = cell_of[j]
            change = lengths[i] - lengths[j]
            if target == cell_of[i] or used[target] + change > capacity or used[cell_of[i]] - change > capacity:
                continue
        source = cell_of[i]
        shift(load, attention, used, tables, i, source, target)
        if j >= 0:
            shift(load, attention, used, tables, j, target, source)
        first, second = rescored(load, attention, cell_order, num_cells, shard_of_cell, num_shards, unit)
        rise = (first - current[0]) * weights[0] + (second - current[1]) * weights[1]
        if rise <= 0 or rng.random() < np.exp(-rise / temperature):
            current[0], current[1] = first, second
            current[2] = min(current[2], first)
            cell_of[i] = target
            if j >= 0:
                cell_of[j] = source
        else:
            shift(load, attention, used, tables, i, target, source)
            if j >= 0:
                shift(load, attention, used, tables, j, source, target)


class Incremental:
    """The project's kernel."""

    def __init__(self, problem: Problem, placement: Placement, packing: Packing, seed: int) -> None:
        self.loads = BlockLoads.of(problem, placement, packing)
        self.stream = np.array([seed + 1], dtype=np.uint64)

    def walk(self, num_proposals: int, temperature: float, weights: Array) -> None:
        """Go on walking."""
        self.loads.walk(
            self.stream,
            num_proposals=num_proposals,
            temperature=temperature,
            energy_weights=(weights[0], weights[1], 0.0),
            exchange_share=0.0,
        )

    @property
    def best(self) -> int:
        """Best first level met, work units."""
        return self.loads.best_levels[0]


class Rescoring:
    """The same walk with the schedule re-scored at every move."""

    def __init__(self, problem: Problem, placement: Placement, packing: Packing, seed: int) -> None:
        rows, slots = packing.row_of_sample, packing.dp_slot_of_sample
        num_cells, num_shards = problem.num_cells, problem.num_shards
        shard_of_cell = np.tile(problem.shard_of_slot, problem.num_rows)
        block_of_cell = np.arange(num_cells) // problem.dp_size * num_shards + shard_of_cell
        self.cell_order = np.argsort(block_of_cell, kind="stable")
        rank_load = np.ascontiguousarray(placement.rank_load(problem).astype(np.int32).transpose(0, 2, 1))
        self.tables = (rank_load, problem.attention_work, problem.aligned_lengths, block_of_cell)
        cell = rows * problem.dp_size + slots
        load = np.zeros((problem.num_rows * num_shards, problem.ep_size, problem.num_layers), dtype=np.int32)
        np.add.at(load, block_of_cell[cell], rank_load)
        attention = np.zeros((len(problem.attention_work), num_cells), dtype=np.int64)
        used = np.zeros(num_cells, dtype=np.int64)
        np.add.at(used, cell, problem.aligned_lengths)
        for s, work in enumerate(problem.attention_work):
            np.add.at(attention[s], cell, work)
        first, second = rescored(
            load, attention, self.cell_order, num_cells, shard_of_cell, num_shards, problem.expert_unit
        )
        score = evaluate(problem, Plan.of(problem, placement, packing))
        assert (first, second) == score.levels[:2]
        self.state = (cell.copy(), load, attention, used, np.array([first, second, first]))
        self.fixed = (shard_of_cell, num_shards, np.argsort(problem.aligned_lengths, kind="stable"))
        self.problem, self.rng = problem, np.random.default_rng(seed)

    def walk(self, num_proposals: int, temperature: float, weights: Array) -> None:
        """Go on walking."""
        walk_rescoring(
            self.rng,
            num_proposals,
            temperature,
            weights,
            self.problem.capacity,
            self.problem.expert_unit,
            self.tables,
            self.state,
            self.cell_order,
            *self.fixed,
        )

    @property
    def best(self) -> int:
        """Best first level met, work units."""
        return int(self.state[4][2])


def mean_rise(problem: Problem, placement: Placement, packing: Packing, seed: int) -> float:
    """Mean rise of the first level by a random swap that raises it, work units."""
    loads = BlockLoads(MoveTables.of(problem, placement), packing.row_of_sample, packing.dp_slot_of_sample)
    rng = np.random.default_rng(seed)
    rises = []
    for _ in range(2000):
        i, j = rng.choice(problem.num_samples, 2, replace=False).tolist()
        if loads.can_swap(i, j):
            rise = loads.swap_change(i, j).max_shard_work
            if rise > 0:
                rises.append(rise)
    return float(np.mean(rises))


def anneal(
    walker: Incremental | Rescoring, hot: float, weights: Array, *, step: int, seconds: float | None, proposals: int
) -> tuple[float, int]:
    """Walk with a geometric schedule over thread time, or over proposals.

    Returns
    -------
    proposals a second, proposals
    """
    done, used = 0, 0.0
    begin = time.thread_time()
    while used < 1:
        walker.walk(step, HOT * hot * (COLD / HOT) ** used, weights)
        done += step
        used = done / proposals if seconds is None else (time.thread_time() - begin) / seconds
    return done / (time.thread_time() - begin), done


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--family", choices=families(), default="tiny-low")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.seconds <= 0:
        parser.error("--seeds must be at least 1 and --seconds above 0")
    problem = family(arguments.family)
    placement = planning.place(problem, "lpt").placement
    packing = planning.pack(problem, "ffd_dealt", placement=placement, iteration_limit=1).packing
    if placement is None or packing is None:
        raise SystemExit("no start was found")
    weights = np.array([1.0, 1e-6])
    start = evaluate(problem, Plan.of(problem, placement, packing)).values[0]
    rows: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(arguments.seeds):
        hot = mean_rise(problem, placement, packing, seed)
        budget = 0
        for name, kind, step, seconds in (
            ("full re-score", Rescoring, 200, arguments.seconds),
            ("incremental", Incremental, 5000, arguments.seconds),
            ("incremental, as many proposals", Incremental, 200, None),
        ):
            kind(problem, placement, packing, seed).walk(10, hot, weights)  # compile
            walker = kind(problem, placement, packing, seed)
            speed, done = anneal(walker, hot, weights, step=step, seconds=seconds, proposals=budget)
            rows.setdefault(name, []).append((speed, done, problem.units(walker.best)))
            budget = budget or done
    print(f"{arguments.family}: {problem}; {arguments.seeds} seeds, {arguments.seconds:g} s of thread time a walk")
    print(f"start: first level {start:,.2f}\n")
    print("| evaluation | proposals a second | proposals | first level, mean | below start % |")
    print("|---|---|---|---|---|")
    for name, found in rows.items():
        speed, proposals, level = np.mean(found, axis=0)
        print(f"| {name} | {speed:,.0f} | {proposals:,.0f} | {level:,.2f} | {100 * (1 - level / start):.2f} |")
    factor = np.mean([f[0] for f in rows["incremental"]]) / np.mean([f[0] for f in rows["full re-score"]])
    print(f"\nincremental evaluation: {factor:.0f} times the proposals a second")


if __name__ == "__main__":
    main()
