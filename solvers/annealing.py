"""Population annealing over packings for a fixed placement."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray
from routepack_opt.errors import Faults
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import WORK_LIMIT, Problem
from routepack_opt.result import Limit
from routepack_opt.solver import Run, Solver
from routepack_opt.solvers.seeds import EdpAwarePair, Ffd, RandomizedBestFit, WindowShuffle

__all__ = ["Annealing"]

Levels = tuple[int, int, int]

#: Proposals of one kernel call: about 10 ms at the largest shapes, so that a run can be stopped.
_SLICE = 32_768
#: Proposals of a run that has neither a time nor an iteration limit.
_DEFAULT_PROPOSALS = 8_000_000
#: Largest count a parameter may ask for.
_MOST = 10**9
_SEEDS = ("ffd", "window_shuffle", "randomized_best_fit", "edp_aware_pair")
_SCHEDULES = ("geometric", "linear")


@dataclass(frozen=True)
class Annealing(Solver):
    """Population annealing: parallel Metropolis chains, resampled between temperature levels.

    A population of chains starts from diverse seeds with the fixed number of
    rows. At each temperature every chain makes a sweep of random moves (swaps of
    samples close in length, relocations, exchanges of blocks between shards)
    accepted by the Metropolis rule on the energy
    𝓔 = w₀·s₀ + w₁·s₁ + w₂·s₂ of the three levels of the score in J units
    (float64). Between levels the population is resampled systematically with
    Boltzmann weights exp(−Δβ·𝓔). The best packing any trajectory met is
    archived, compared by the exact integer levels, so the incumbent never gets
    worse; it is what comes back.

    Attributes
    ----------
    num_chains : int
        Chains of the population.
    seeds : tuple of str
        Seeding operators (names of :mod:`routepack_opt.solvers.seeds`), used in
        turn, each time with fresh randomness. A warm start replaces the first.
        ``edp_aware_pair`` is left out where slots must hold equal numbers of samples.
    resampling : bool
        Resample between levels; off: independent chains.
    num_levels : int
        Temperature levels.
    moves_per_level : int, optional
        Proposals of one chain at one temperature. Default: the time or iteration
        limit divided among chains and levels (without any limit: 8 million
        proposals in all).
    schedule : str
        'geometric' or 'linear' from the first to the last temperature.
    initial_temperature, final_temperature : float, optional
        In J units. Default: ``initial_rise`` and ``final_rise`` times the mean
        rise of the first level among moves that raise it, sampled after a short
        descent.
    initial_rise, final_rise : float
        See above. A move of mean rise is accepted with probability
        exp(−1 / rise). Default of ``initial_rise``: 0.15; 0.5 below 128 samples, where
        one move is a large part of a packing and a cold start is a trap.
    energy_weights : tuple of float
        w₀, w₁, w₂; the paper has (1, 10⁻⁶, 10⁻⁹). With so small a w₁ the shards that
        are not the heaviest wander freely, which costs about 0.05 points of gap.
    attention_weight, routing_weight : float
        Weights of attention and expert work in energy and archive; (1, 1) is the
        score. ``routing_weight=0`` is length-only annealing. Weights are taken as
        fractions with denominators up to 1000, so that levels stay exact integers.
    relocation_share, exchange_share, pair_share : float
        Share of relocations, block exchanges and one-for-two moves (one sample for
        two of its length) among proposals; the rest are swaps. The paper has no
        one-for-two moves; ``experiments/candidates.py`` shows what a share of 0.05
        is worth.
    swap_window : int
        Largest distance of swap partners in the order of lengths.

    Notes
    -----
    Population annealing: K. Hukushima, Y. Iba, AIP Conf. Proc. 690 (2003) 200,
    doi:10.1063/1.1632130; J. Machta, Phys. Rev. E 82 (2010) 026704,
    doi:10.1103/PhysRevE.82.026704. Systematic resampling: J. Carpenter,
    P. Clifford, P. Fearnhead, IEE Proc. Radar Sonar Navig. 146 (1999) 2,
    doi:10.1049/ip-rsn:19990255. Metropolis rule: doi:10.1063/1.1699114.

    Deviations from the paper's description: few chains with long sweeps instead
    of a large population; w₁ = 1 instead of 10⁻⁶; moves are priced incrementally
    (:class:`routepack_opt.moves.BlockLoads`) instead of by re-scoring the plan;
    the temperature range is calibrated per problem; under a time limit the length
    of a sweep follows the measured speed. Every kind of move is symmetric, or corrected
    for where it is not.

    Under an iteration limit (proposals of all chains together) the result
    depends on problem, parameters and seed only, not on the number of threads.
    """

    name: ClassVar[str] = "annealing"
    num_chains: int = 4
    seeds: tuple[str, ...] = ("window_shuffle", "randomized_best_fit", "edp_aware_pair")
    resampling: bool = True
    num_levels: int = 40
    moves_per_level: int | None = None
    schedule: str = "geometric"
    initial_temperature: float | None = None
    final_temperature: float | None = None
    initial_rise: float | None = None
    final_rise: float = 0.002
    energy_weights: tuple[float, float, float] = (1.0, 1.0, 1e-9)
    attention_weight: float = 1.0
    routing_weight: float = 1.0
    relocation_share: float = 0.25
    exchange_share: float = 0.005
    pair_share: float = 0.0
    swap_window: int = 16

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("num_chains", "num_levels", "swap_window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
                faults.add(f"{name} is {value!r}; it must be an integer in 1..{_MOST}")
        if self.moves_per_level is not None and (
            isinstance(self.moves_per_level, bool)
            or not isinstance(self.moves_per_level, int)
            or self.moves_per_level < 1
        ):
            faults.add(f"moves_per_level is {self.moves_per_level!r}; it must be an integer of at least 1 or None")
        if not isinstance(self.resampling, bool):
            faults.add(f"resampling is {self.resampling!r}; it must be True or False")
        if self.schedule not in _SCHEDULES:
            faults.add(f"schedule is {self.schedule!r}; it must be one of {', '.join(_SCHEDULES)}")
        seeds = (self.seeds,) if isinstance(self.seeds, str) else self.seeds
        if not isinstance(seeds, tuple | list) or not seeds or any(seed not in _SEEDS for seed in seeds):
            faults.add(f"seeds is {self.seeds!r}; it must name some of {', '.join(_SEEDS)}")
        else:
            object.__setattr__(self, "seeds", tuple(seeds))
        for name in ("initial_rise", "final_rise", "initial_temperature", "final_temperature"):
            value = getattr(self, name)
            if value is None and name != "final_rise":
                continue
            if not _is_number(value) or value <= 0:
                faults.add(f"{name} is {value!r}; it must be a number above 0")
        for name in ("attention_weight", "routing_weight"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value <= 1000:
                faults.add(f"{name} is {value!r}; it must be a number in 0..1000")
        if self.attention_weight == self.routing_weight == 0:
            faults.add("attention_weight and routing_weight are both 0, so there is nothing to minimise")
        first, last = self.initial_temperature, self.final_temperature
        if _is_number(first) and _is_number(last) and last > first:  # type: ignore[operator]
            faults.add(f"final_temperature {last!r} is above initial_temperature {first!r}; annealing cools")
        weights = self.energy_weights
        if (
            not isinstance(weights, tuple | list)
            or len(weights) != 3
            or not all(_is_number(weight) and 0 <= weight <= 1e6 for weight in weights)
            or sum(weights) <= 0
        ):
            faults.add(f"energy_weights is {weights!r}; it must be three numbers in 0..1e6, not all 0")
        else:
            object.__setattr__(self, "energy_weights", tuple(float(weight) for weight in weights))
        shares = (self.relocation_share, self.exchange_share, self.pair_share)
        if not all(_is_number(share) and 0 <= share <= 1 for share in shares) or sum(shares) > 1:
            faults.add(
                f"relocation_share is {shares[0]!r}, exchange_share {shares[1]!r} and pair_share {shares[2]!r}; they "
                "must be shares of 0..1 that add up to at most 1"
            )
        faults.raise_if_any(self.name)

    def unsupported(self, problem: Problem) -> str | None:
        """Refuses when every seeding operator refuses."""
        if problem.equal_samples_per_slot and set(self.seeds) == {"edp_aware_pair"}:
            return EdpAwarePair().unsupported(problem)
        return None

    def pack(self, problem: Problem, placement: Placement, run: Run) -> Packing | None:
        """Pack for a placement; None if no seed is feasible."""
        population = _Population(self, problem, placement, run)
        if not population.chains:
            return None
        try:
            with population:
                population.anneal()
        except KeyboardInterrupt:
            run.interrupt()
        return population.best_packing()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _weighted_tables(
    problem: Problem, placement: Placement, attention: float, routing: float
) -> tuple[MoveTables, float]:
    """Tables whose work is the weighted work, and how many of its units make one J."""
    shares = [Fraction(weight).limit_denominator(1000) for weight in (attention, routing)]
    common = math.lcm(*(share.denominator for share in shares))
    attention_factor, routing_factor = (int(share * common) for share in shares)
    shrink = math.gcd(attention_factor, routing_factor) or 1
    attention_factor, routing_factor, scale = attention_factor // shrink, routing_factor // shrink, common / shrink
    rank_load = placement.rank_load(problem)
    attention_work, expert_unit = problem.attention_work, problem.expert_unit
    if max(attention_factor, routing_factor) > 1:
        total = int(attention_work.sum()) * attention_factor
        total += int(rank_load.sum(dtype=np.int64)) * expert_unit * routing_factor
        while total >= WORK_LIMIT:
            # Beyond int64 the weights are rounded: only the ratio of the two parts matters.
            attention_factor, routing_factor = attention_factor // 2, routing_factor // 2
            total, scale = total // 2, scale / 2
    tables = MoveTables(
        rank_load,
        attention_work * attention_factor,
        expert_unit=expert_unit * routing_factor,
        aligned_lengths=problem.aligned_lengths,
        capacity=problem.capacity,
        num_rows=problem.num_rows,
        shard_of_slot=problem.shard_of_slot,
        min_samples_per_cell=problem.min_samples_per_cell,
        equal_samples_per_slot=problem.equal_samples_per_slot,
    )
    return tables, float(problem.unit_denominator) * scale


def _seed_cells(name: str, problem: Problem, placement: Placement, rng: np.random.Generator) -> IntArray | None:
    if name == "ffd":
        return Ffd().cells(problem, rng)
    if name == "window_shuffle":
        return WindowShuffle().cells(problem, rng)
    if name == "randomized_best_fit":
        return RandomizedBestFit().cells(problem, rng)
    return EdpAwarePair().cells(problem, placement, rng)


class _Population:
    """Chains, their generators, the archive over all of them, and the threads that walk them."""

    def __init__(self, options: Annealing, problem: Problem, placement: Placement, run: Run) -> None:
        self.options = options
        self.problem = problem
        self.run = run
        self.tables, unit = _weighted_tables(problem, placement, options.attention_weight, options.routing_weight)
        self.unit = unit
        # The run keeps the best incumbent by the true score. Under other weights that would pick among them by
        # what the variant is meant not to see, so only its own best is handed in, at the end.
        self.plain = options.attention_weight == options.routing_weight == 1
        self.weights = tuple(weight / unit for weight in options.energy_weights)
        self.rng = run.rng
        self.proposals = 0
        self.limit = run.iteration_limit
        self.halt = threading.Event()
        self.pool: ThreadPoolExecutor | None = None
        self.chains: list[BlockLoads] = []
        self.streams: list[npt.NDArray[np.uint64]] = []
        self.best: tuple[Levels, tuple[IntArray, IntArray]] | None = None
        self.best_chain_levels: Levels | None = None
        self.reported: Levels | None = None
        self.report_time = -math.inf
        self._start(placement)

    # -- start ------------------------------------------------------------------------------------------------

    def _start(self, placement: Placement) -> None:
        problem, options, run = self.problem, self.options, self.run
        starts: list[tuple[IntArray, IntArray]] = []
        if run.warm_start is not None:
            packing = run.warm_start.packing
            starts.append((packing.row_of_sample, packing.dp_slot_of_sample))
        seeds = [name for name in options.seeds if name != "edp_aware_pair" or not problem.equal_samples_per_slot]
        k = 0
        while len(starts) < options.num_chains:
            if starts and run.stopped():
                break
            cells = _seed_cells(seeds[k % len(seeds)], problem, placement, self.rng)
            k += 1
            if cells is None:
                break
            starts.append((cells // problem.dp_size, cells % problem.dp_size))
            if len(starts) == 1 and run.warm_start is None and self.plain:
                run.report(Packing.from_arrays(*starts[0]))
        if not starts:
            run.explain(
                f"no packing into {problem.num_rows} rows x {problem.dp_size} DP slots of {problem.capacity} tokens "
                "was found to start from"
            )
            return
        for row, slot in starts:
            if self.chains and run.stopped():
                break
            self.chains.append(BlockLoads(self.tables, row, slot))
        for k in range(len(starts), options.num_chains):
            if run.stopped():
                break
            chain = BlockLoads(self.tables, *starts[k % len(starts)])
            self.chains.append(chain)
        self.streams = [self.rng.integers(0, 2**64, size=1, dtype=np.uint64) for _ in self.chains]
        self._archive()

    def __enter__(self) -> _Population:
        threads = min(self.run.num_threads, len(self.chains))
        if threads > 1:
            self.pool = ThreadPoolExecutor(threads, thread_name_prefix="annealing")
        return self

    def __exit__(self, *error: object) -> None:
        self.halt.set()
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)

    # -- walking ----------------------------------------------------------------------------------------------

    def _stopped(self) -> bool:
        return self.halt.is_set() or self.run.stopped()

    def _sweep(self, chain: int, num_proposals: int, temperature: float) -> int:
        """Walk one chain in slices; fewer proposals only if the run is stopped."""
        options, done = self.options, 0
        while done < num_proposals and not self._stopped():
            step = min(_SLICE, num_proposals - done)
            self.chains[chain].walk(
                self.streams[chain],
                num_proposals=step,
                temperature=temperature,
                energy_weights=self.weights,
                relocation_share=options.relocation_share,
                exchange_share=options.exchange_share,
                pair_share=options.pair_share,
                swap_window=options.swap_window,
            )
            done += step
        return done

    def _sweep_all(self, num_proposals: Sequence[int], temperature: float) -> None:
        if self.pool is None:
            for chain, count in enumerate(num_proposals):
                self.proposals += self._sweep(chain, count, temperature)
        else:
            futures = [
                self.pool.submit(self._sweep, chain, count, temperature) for chain, count in enumerate(num_proposals)
            ]
            try:
                for future in futures:
                    self.proposals += future.result()
            except BaseException:
                self.halt.set()
                raise
        self._archive()

    def _archive(self) -> None:
        for chain in self.chains:
            if self.best is None or chain.best_levels < self.best[0]:
                self.best = (chain.best_levels, chain.best_packing())

    def _report(self, *, force: bool = False) -> None:
        """Hand the incumbent to the run, at most every tenth of a second."""
        assert self.best is not None
        now = time.perf_counter()
        if not self.plain:
            return
        if self.best[0] != self.reported and (force or now - self.report_time > 0.1):
            self.reported, self.report_time = self.best[0], now
            self.run.report(self._as_packing())

    def _as_packing(self) -> Packing:
        assert self.best is not None
        return Packing.from_arrays(*self.best[1])

    def best_packing(self) -> Packing:
        """The archived packing."""
        return self._as_packing()

    # -- temperatures -----------------------------------------------------------------------------------------

    def _energies(self) -> npt.NDArray[np.float64]:
        levels = np.array([chain.levels for chain in self.chains], dtype=np.float64)
        energies: npt.NDArray[np.float64] = levels @ np.array(self.weights)
        return energies

    def _mean_rise(self) -> float:
        """Mean rise of the energy, over the chains, among random near swaps that raise the first level."""
        rises = []
        n = self.tables.num_samples
        order = self.tables.sample_of_index
        for chain in self.chains[:4]:
            for _ in range(64):
                k = int(self.rng.integers(n))
                other = k + int(self.rng.integers(1, self.options.swap_window + 1))
                if other >= n:
                    continue
                change = chain.swap_change(int(order[k]), int(order[other]))
                energy = sum(weight * part for weight, part in zip(self.weights, change, strict=True))
                if change.max_shard_work > 0:
                    rises.append(energy)
        if rises:
            return float(np.mean(rises))
        return max(float(self._energies().mean()) * 1e-4, 1e-300)

    def _temperatures(self) -> list[float]:
        options = self.options
        first, last = options.initial_temperature, options.final_temperature
        if first is None or last is None:
            rise = self._mean_rise()
            share = options.initial_rise
            if share is None:
                share = 0.15 if self.tables.num_samples >= 128 else 0.5
            first = share * rise if first is None else first
            last = min(options.final_rise * rise if last is None else last, first)
        count = options.num_levels
        if count == 1:
            return [last]
        if options.schedule == "linear":
            return [first + (last - first) * k / (count - 1) for k in range(count)]
        return [first * (last / first) ** (k / (count - 1)) for k in range(count)]

    # -- the run ----------------------------------------------------------------------------------------------

    def _quota(self, levels_left: int, speed: float) -> list[int]:
        """Proposals of every chain at the next level."""
        num_chains = len(self.chains)
        counts = []
        if self.options.moves_per_level is not None:
            counts.append(self.options.moves_per_level * num_chains)
        if self.limit is not None:
            counts.append(-(-(self.limit - self.proposals) // levels_left))
        seconds = self.run.time_left()
        if seconds < math.inf and self.options.moves_per_level is None:
            counts.append(max(int(seconds * speed / levels_left), num_chains))
        if not counts:
            counts.append(_DEFAULT_PROPOSALS // self.options.num_levels)
        total = min(counts)
        if self.limit is not None:
            total = min(total, self.limit - self.proposals)
        return [total // num_chains + (chain < total % num_chains) for chain in range(num_chains)]

    def _descend(self) -> float:
        """A short walk at temperature zero; returns proposals per second of all threads together."""
        count = 8 * self.tables.num_samples
        if self.limit is not None:
            count = min(count, self.limit // (10 * len(self.chains)))
        start, before = time.perf_counter(), self.proposals
        self._sweep_all([count] * len(self.chains), 0.0)
        return (self.proposals - before) / max(time.perf_counter() - start, 1e-6)

    def anneal(self) -> None:
        """Walk through all temperature levels, or until the run is stopped."""
        options = self.options
        speed = self._descend()
        self._report()
        temperatures = self._temperatures()
        for level, temperature in enumerate(temperatures):
            if self._stopped() or (self.limit is not None and self.proposals >= self.limit):
                break
            if level and options.resampling and len(self.chains) > 1:
                self._resample(1.0 / temperature - 1.0 / temperatures[level - 1])
            start, before = time.perf_counter(), self.proposals
            self._sweep_all(self._quota(len(temperatures) - level, speed), temperature)
            elapsed = time.perf_counter() - start
            if elapsed > 1e-3 and self.proposals > before:
                speed = (self.proposals - before) / elapsed
            self._report()
            self.run.progress((level + 1) / len(temperatures))
        if self.limit is not None and self.proposals >= self.limit:
            self.run.note_limit(Limit.ITERATIONS)
        elif self.run.time_left() < math.inf and options.moves_per_level is None:
            self.run.note_limit(Limit.TIME)
        self._report(force=True)

    def _resample(self, inverse_step: float) -> None:
        """Systematic resampling with weights exp(−Δβ·𝓔)."""
        energies = self._energies()
        weights = np.exp(-inverse_step * (energies - energies.min()))
        ticks = (np.arange(len(weights)) + self.rng.random()) / len(weights)
        chosen = np.searchsorted(np.cumsum(weights / weights.sum()), ticks).clip(max=len(weights) - 1)
        copies = np.bincount(chosen, minlength=len(weights))
        spare = [parent for parent in range(len(copies)) for _ in range(copies[parent] - 1)]
        for chain in np.flatnonzero(copies == 0):
            self.chains[chain].copy_from(self.chains[spare.pop()])
