"""Question: how many Metropolis proposals does annealing price per core-second, and what does that buy?

Command: ``python experiments/benchmark_annealing.py`` (``--only tiny-low`` for one row,
``--proposals N`` for a shorter run). The frozen low-noise families at EP 8, 16
and 32 are packed under an LPT placement. A whole schedule is walked: a descent,
then the temperatures of the default annealing, one chain. Rates are proposals
per second of thread-CPU time, best of several schedules; "full" is the share of
proposals whose change of the score was computed in full, the others break
capacity or the cell minimum, change nothing, or are refused by an exact bound
beforehand. Beside it, on the same problem and machine: the same walk in NumPy,
64 chains at once, and one chain that re-scores every block after each move.

Expected rows (two runs on two shared cores of an AMD EPYC, best schedule): 10.4
to 10.5 M proposals per core-second on Tiny, 7.3 to 8.8 M on Flash at P 8, 4.8 to
6.2 M at P 16, 2.3 to 4.0 M at P 32, with 58 to 70 % evaluated in full; 1.2 to 1.8
times as many on two threads; 50 to 150 times the NumPy walk, 800 to 5,000 times
the re-scoring one; 0.3 GB of memory. The column "target" holds 10, 12, 7 and 3 M
at 45 % in full: not reached at P 8 and P 16 there.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import threading
import time
from typing import Any

import llvmlite.binding  # type: ignore[import-untyped]
import numba
import numpy as np
import numpy.typing as npt

from routepack_opt import planning
from routepack_opt.moves import BlockLoads, MoveTables, WalkCounts
from routepack_opt.problem import Problem
from routepack_opt.solvers.annealing import Annealing
from routepack_opt.solvers.seeds import RandomizedBestFit
from routepack_opt.synthetic import family

#: Family, target in million proposals per core-second.
TARGETS = {"tiny-low": 10.0, "flash-p8-low": 12.0, "flash-p16-low": 7.0, "flash-p32-low": 3.0}
OPTIONS = Annealing()
INITIAL_RISE = 0.15  # of the default schedule at these sizes


class Walker:
    """One chain with the temperatures of the default schedule."""

    def __init__(self, problem: Problem, tables: MoveTables, seed: int) -> None:
        cells = RandomizedBestFit().cells(problem, np.random.default_rng(seed))
        assert cells is not None
        self.start = cells // problem.dp_size, cells % problem.dp_size
        self.weights = tuple(weight / problem.unit_denominator for weight in OPTIONS.energy_weights)
        self.loads = BlockLoads(tables, *self.start)
        self.rng = np.array([seed], dtype=np.uint64)
        self.descent = 8 * problem.num_samples
        self.walk(self.descent, 0.0)
        rise = mean_rise(self.loads, self.weights, np.random.default_rng(seed))
        ratio = OPTIONS.final_rise / INITIAL_RISE
        steps = np.arange(OPTIONS.num_levels) / (OPTIONS.num_levels - 1)
        self.temperatures = (INITIAL_RISE * rise * ratio**steps).tolist()

    def walk(self, num_proposals: int, temperature: float) -> WalkCounts:
        return self.loads.walk(
            self.rng, num_proposals=num_proposals, temperature=temperature, energy_weights=self.weights
        )

    def schedule(self, num_proposals: int) -> tuple[np.ndarray, float]:
        """Walk a whole schedule from the start; counts and thread-CPU seconds."""
        self.loads.reset(*self.start)
        total = np.zeros(5, dtype=np.int64)
        begin = time.thread_time()
        total += self.walk(self.descent, 0.0)
        for temperature in self.temperatures:
            left = num_proposals // len(self.temperatures)
            while left > 0:
                total += self.walk(min(left, 32_768), temperature)
                left -= 32_768
        return total, time.thread_time() - begin


def mean_rise(loads: BlockLoads, weights: tuple[float, ...], rng: np.random.Generator) -> float:
    """Mean rise of the energy among random near swaps that raise the first level."""
    rises = []
    order = loads.tables.sample_of_index
    for _ in range(256):
        k = int(rng.integers(len(order) - OPTIONS.swap_window))
        change = loads.swap_change(int(order[k]), int(order[k + int(rng.integers(1, OPTIONS.swap_window + 1))]))
        if change.max_shard_work > 0:
            rises.append(sum(weight * part for weight, part in zip(weights, change, strict=True)))
    return float(np.mean(rises))


class NumpyChains:
    """The same walk, vectorised over chains with NumPy: swaps and relocations, no exchanges."""

    def __init__(self, problem: Problem, walker: Walker, rank_load: npt.NDArray[Any], num_chains: int) -> None:
        t = walker.loads.tables
        self.num_chains, self.problem = num_chains, problem
        n, num_shards, size = problem.num_samples, problem.num_shards, problem.cluster.shard_size
        self.size, self.num_blocks = size, problem.num_rows * num_shards
        order = t.sample_of_index
        self.loads = np.zeros((n + 1, problem.ep_size, problem.num_layers), dtype=np.int32)
        self.loads[:n] = rank_load[order].transpose(0, 2, 1)
        self.attention = np.zeros((n + 1, len(problem.attention_work)), dtype=np.int64)
        self.attention[:n] = problem.attention_work.T[order]
        self.lengths = np.zeros(n + 1, dtype=np.int64)
        self.lengths[:n] = problem.aligned_lengths[order]
        row, slot = walker.start
        place = np.argsort(np.argsort(problem.shard_of_slot, kind="stable"), kind="stable") % size
        cell = (row * num_shards + problem.shard_of_slot[slot]) * size + place[slot]
        self.shard = np.arange(self.num_blocks) % num_shards
        self.cell = np.tile(cell[order], (num_chains, 1))
        num_cells = self.num_blocks * size
        fill = np.zeros(num_cells, dtype=np.int64)
        np.add.at(fill, cell[order], self.lengths[:n])
        self.fill = np.tile(fill, (num_chains, 1))
        attention = np.zeros((num_cells, self.attention.shape[1]), dtype=np.int64)
        np.add.at(attention, cell[order], self.attention[:n])
        self.of_cell = np.tile(attention, (num_chains, 1, 1))
        block = np.zeros((self.num_blocks, *self.loads.shape[1:]), dtype=np.int32)
        np.add.at(block, cell[order] // size, self.loads[:n])
        self.of_block = np.tile(block, (num_chains, 1, 1, 1))
        work = block.max(axis=1).sum(axis=1, dtype=np.int64) * problem.expert_unit
        work += attention.reshape(self.num_blocks, size, -1).max(axis=1).sum(axis=1)
        self.work = np.tile(work, (num_chains, 1))
        self.rng = np.random.default_rng(0)
        self.weights = walker.weights

    def levels(self, work: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        shard = work.reshape(self.num_chains, -1, self.problem.num_shards).sum(axis=1)
        parts = np.stack([shard.max(axis=1), shard.sum(axis=1), work.max(axis=1)], axis=1)
        energy: npt.NDArray[np.float64] = parts.astype(np.float64) @ np.array(self.weights)
        return energy

    def step(self, temperature: float) -> None:
        """One proposal in every chain."""
        chains, rng, n = np.arange(self.num_chains), self.rng, self.problem.num_samples
        i = rng.integers(0, n, self.num_chains)
        distance = rng.integers(1, OPTIONS.swap_window + 1, self.num_chains)
        j = i + np.where(rng.random(self.num_chains) < 0.5, distance, -distance)
        relocate = rng.random(self.num_chains) < OPTIONS.relocation_share
        valid = relocate | ((j >= 0) & (j < n))
        j = np.where(relocate, n, j.clip(0, n - 1))
        a = self.cell[chains, i]
        b = np.where(
            relocate, rng.integers(0, self.fill.shape[1], self.num_chains), self.cell[chains, j.clip(max=n - 1)]
        )
        tokens = self.lengths[i] - self.lengths[j]
        capacity = self.problem.capacity
        valid &= (a != b) & (self.fill[chains, b] + tokens <= capacity)
        valid &= self.fill[chains, a] - tokens <= capacity
        k = np.flatnonzero(valid)
        if not len(k):
            return
        i, j, a, b = i[k], j[k], a[k], b[k]
        block_a, block_b = a // self.size, b // self.size
        same = block_a == block_b
        moved = self.loads[i] - self.loads[j]
        load_a = self.of_block[k, block_a] - np.where(same[:, None, None], 0, moved)
        load_b = self.of_block[k, block_b] + np.where(same[:, None, None], 0, moved)
        x = self.attention[i] - self.attention[j]
        cells = np.arange(self.size)
        in_a = self.of_cell[k[:, None], block_a[:, None] * self.size + cells]
        in_b = self.of_cell[k[:, None], block_b[:, None] * self.size + cells]
        at_a, at_b = cells == (a % self.size)[:, None], cells == (b % self.size)[:, None]
        in_a = in_a - at_a[:, :, None] * x[:, None, :] + (at_b & same[:, None])[:, :, None] * x[:, None, :]
        in_b = in_b + at_b[:, :, None] * x[:, None, :] - (at_a & same[:, None])[:, :, None] * x[:, None, :]
        unit = self.problem.expert_unit
        new = self.work.copy()
        new[k, block_a] = load_a.max(axis=1).sum(axis=1, dtype=np.int64) * unit + in_a.max(axis=1).sum(axis=1)
        new[k, block_b] = load_b.max(axis=1).sum(axis=1, dtype=np.int64) * unit + in_b.max(axis=1).sum(axis=1)
        rise = (self.levels(new) - self.levels(self.work))[k]
        taken = rise <= -temperature * np.log(rng.random(len(k)) + 1e-300)
        k, i, j, a, b = k[taken], i[taken], j[taken], a[taken], b[taken]
        self.work[k] = new[k]
        self.of_block[k, block_a[taken]] = load_a[taken]
        self.of_block[k, block_b[taken]] = load_b[taken]
        self.of_cell[k, a] -= x[taken]
        self.of_cell[k, b] += x[taken]
        change = self.lengths[i] - self.lengths[j]
        self.fill[k, a] -= change
        self.fill[k, b] += change
        self.cell[k, i] = b
        swapped = j < n
        self.cell[k[swapped], j[swapped]] = a[swapped]

    def rescore(self) -> None:
        """Score the first chain from the loads of all its blocks, as after a move."""
        cells = self.of_cell[0].reshape(self.num_blocks, self.size, -1)
        work = self.of_block[0].max(axis=1).sum(axis=1, dtype=np.int64) * self.problem.expert_unit
        work = work + cells.max(axis=1).sum(axis=1)
        work.reshape(-1, self.problem.num_shards).sum(axis=0).max()


def numpy_rates(problem: Problem, walker: Walker, rank_load: npt.NDArray[Any]) -> tuple[float, float]:
    """Million proposals per core-second of 64 chains in NumPy, and of one chain that re-scores every move."""
    chains = NumpyChains(problem, walker, rank_load, 64)
    middle = walker.temperatures[len(walker.temperatures) // 2]
    best = 0.0
    for _ in range(3):
        begin = time.thread_time()
        for _ in range(40):
            chains.step(middle)
        best = max(best, 40 * 64 / (time.thread_time() - begin))
    single = NumpyChains(problem, walker, rank_load, 1)
    rescoring = 0.0
    for _ in range(3):
        begin = time.thread_time()
        for _ in range(60):
            single.step(middle)
            single.rescore()
        rescoring = max(rescoring, 60 / (time.thread_time() - begin))
    return best / 1e6, rescoring / 1e6


def two_threads(walkers: list[Walker], num_proposals: int) -> float:
    """Proposals per wall second of two chains on two threads over those of one chain alone."""
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        walkers[0].schedule(num_proposals)
        alone = time.perf_counter() - begin
        threads = [threading.Thread(target=walker.schedule, args=(num_proposals,)) for walker in walkers]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, 2 * alone / (time.perf_counter() - begin))
    return best


def clock() -> float:
    """GHz the core really runs at: a chain of dependent additions takes one cycle each."""
    begin = time.thread_time()
    dependent_additions(100_000_000, 1)
    return 0.2 / max(time.thread_time() - begin, 1e-9)


@numba.njit(cache=True, nogil=True)
def dependent_additions(n: int, start: int) -> int:
    """A chain of 2 n dependent one-cycle operations."""
    x = np.uint64(start)
    a = np.uint64(0x9E3779B97F4A7C15)
    for _ in range(n):
        x = (x + a) ^ a
    return int(x)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--proposals", type=int, default=2_000_000, help="proposals of one schedule")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    planning.warm_up(["lpt+annealing"])
    dependent_additions(1, 1)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; "
        f"LLVM target {llvmlite.binding.get_host_cpu_name()}; Python {platform.python_version()}, "
        f"numba {numba.__version__}, numpy {np.__version__}; clock {clock():.2f} GHz; "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'family':15s} {'target':>6s} {'M/s':>6s} {'median':>6s} {'full':>5s} {'fit':>5s} {'taken':>5s} "
        f"{'2 thr':>5s} {'NumPy x64':>10s} {'ratio':>6s} {'re-score':>9s} {'ratio':>6s}"
    )
    for name in arguments.only:
        problem = family(name)
        placed = planning.place(problem, "lpt")
        assert placed.placement is not None
        tables = MoveTables.of(problem, placed.placement)
        walkers = [Walker(problem, tables, seed) for seed in (1, 2)]
        rates, total = [], np.zeros(5, dtype=np.int64)
        for _ in range(arguments.repeats):
            counts, seconds = walkers[0].schedule(arguments.proposals)
            rates.append(counts[0] / seconds / 1e6)
            total += counts
        proposed, fitting, evaluated, accepted, _ = total
        vectorised, rescored = numpy_rates(problem, walkers[0], placed.placement.rank_load(problem))
        rate = max(rates)
        print(
            f"{name:15s} {TARGETS[name]:6.1f} {rate:6.2f} {float(np.median(rates)):6.2f} {evaluated / proposed:5.2f} "
            f"{fitting / proposed:5.2f} {accepted / proposed:5.2f} {two_threads(walkers, arguments.proposals):5.2f} "
            f"{vectorised:10.4f} {rate / vectorised:5.0f}x {rescored:9.5f} {rate / rescored:5.0f}x",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)
    print(f"peak memory of this process (generation, placement and all of the above): {peak / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
