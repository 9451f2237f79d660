"""Joint planning by turns: pack for an ideal placement, place for that packing, repack, place again.

The paper places experts for the load of the window first and packs for that
placement second, once. Which experts should share a rank depends on what the
blocks are, though: minimising Σ_{r,g} max_p W itself over placements, for the
packing just found, removes most of what packing could not. So the order is
turned around here.

1. Pack as if every placement were perfect: attention work plus routed tokens
   over P (:mod:`routepack_opt.solvers.leveling`), optionally with a share of
   the routing term under a placement for the window.
2. Place experts for the blocks of that packing, all layers in parallel
   (:mod:`routepack_opt.solvers.replacing`).
3. Anneal the packing gently on the exact score under the new placement, place
   again, and so on; the best plan by the exact lexicographic score is kept.

Where there are few experts a rank, packing has more to choose than placement
and has to be annealed in earnest. Steps 2 and 3 then become one annealing run
that cools once: short walks over packings and single visits of every expert,
each at the temperature of the moment, take turns.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from routepack_opt.errors import Faults
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Limit
from routepack_opt.solver import Run, Solver
from routepack_opt.solvers import leveling, replacing
from routepack_opt.solvers.annealing import Annealing

__all__ = ["Alternating"]

#: Visits of an expert in the first placement under a time limit: something good for every layer, soon.
_FIRST_SWEEPS = 1.0
#: What the descent at the end of a placement costs, in sweeps (measured: 2 at P = 8, 4 at P = 16).
_DESCENT_SWEEPS = 4.0
#: Visits of an expert without any limit.
_DEFAULT_SWEEPS = 40.0
#: Most visits of an expert in one placement, however much time there is.
_MOST_SWEEPS = 1000.0
#: Proposals of a repacking without any limit.
_REPACK_PROPOSALS = 200_000
#: Problems of at most so many samples are started anew, again and again, while the budget lasts; larger ones use it up
#: in one go. Proposals of one start for each of their samples, and visits of each of their experts.
_SMALL = 64
_SMALL_PROPOSALS = 2_000
_SMALL_SWEEPS = 40.0
#: Starts of a small problem without any limit.
_SMALL_STARTS = 8
#: Routing weight of the second, third, ... start of a small problem, under the best placement so far; then again from
#: the planner's own.
_SMALL_WEIGHTS = (0.5, 1.0)

#: Turns, if nothing else is asked for.
_ROUNDS = 3
_REPACK = leveling.Schedule(first=5e-5, last=2e-6, exchange_share=0.02)
#: How much hotter a repacking starts where all the choice is packing's.
_HOT_REPACK = 6.0
#: From this share of packing on, expert swaps and packing moves are mixed in one annealing run, at temperatures of
#: repacking times this factor to the power of the share, in so many turns.
_MIXED_FROM = 0.3
_HOT_MIXED = 64.0
_MIXED_TURNS = 20
#: Share of the budget of a mixed run for the first packing.
_MIXED_SHARE = 0.15
#: Visits of an expert in the placement a mixed run starts from.
_MIXED_SWEEPS = 10.0
#: Temperature of expert swaps in a mixed run, at its start and its end.
_MIXED_PLACEMENT = (2e-3, 2e-4)
#: Share of the first packing spent on the spread where placement has all the choice.
_SPREAD_SHARE = 0.6


@dataclass(frozen=True)
class Alternating(Solver):
    """Packs for an ideal placement, places for the blocks of that packing, repacks, places again.

    Attributes
    ----------
    rounds : int or None
        Turns: placements, each followed by a repacking; the time limit ends them
        earlier. Default: 3.
    mixed : bool or None
        Mix expert swaps and packing moves in one annealing run instead of taking
        long turns. Default: where packing has much of the choice, see
        :func:`packing_leads`, but not on problems of at most 64 samples, under a
        ``move_limit``, or where ``rounds`` or ``sweeps`` are given, which are of
        turns and refused beside ``mixed=True``.
    packing_share : float or None
        Share of the budget for the first packing; half of it is the share of
        every repacking but the last, which takes what is left. Default: a quarter,
        and up to three quarters where the routing weight is high; 0.15 of a mixed run.
    routing_weight : float or None
        Share, in 0..1, of the routing term in the first packing; above 0 a
        placement for the window comes first. Default: by how much there is to
        choose, see :func:`packing_leads`; next to nothing with 32 experts a rank.
    sweeps : float or None
        Visits of each expert in the placement of a turn. Default: what the time
        limit allows; 40 without one.
    window_tolerance : float
        How far above the mean rank the window load of the hottest rank may be
        put, relative.
    move_price : int
        Routed tokens of Σ max_p that one expert more off its previous rank must
        save; counts only where a previous placement is known.
    move_limit : int or None
        Most experts of a layer that may leave their previous rank.

    Notes
    -----
    An iteration is one proposal of a packing move or one visit of an expert (one
    expert priced against all experts of the other ranks). Under an iteration
    limit the result depends on problem, parameters and seed only.
    """

    name: ClassVar[str] = "alternating"
    rounds: int | None = None
    mixed: bool | None = None
    packing_share: float | None = None
    routing_weight: float | None = None
    sweeps: float | None = None
    window_tolerance: float = 0.02
    move_price: int = 0
    move_limit: int | None = None

    def __post_init__(self) -> None:
        faults = Faults()
        rounds = self.rounds
        if rounds is not None and (isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1):
            faults.add(f"rounds is {rounds!r}; it must be None or an integer of at least 1")
        if self.mixed is not None and not isinstance(self.mixed, bool):
            faults.add(f"mixed is {self.mixed!r}; it must be True, False or None")
        if self.mixed is True:
            for name in ("rounds", "sweeps"):
                if getattr(self, name) is not None:
                    faults.add(
                        f"{name} is {getattr(self, name)!r}, but mixed=True takes no turns; leave one of them out"
                    )
        share, weight = self.packing_share, self.routing_weight
        if share is not None and (not _is_number(share) or not 0 < share < 1):
            faults.add(f"packing_share is {share!r}; it must be None or a number between 0 and 1")
        if weight is not None and (not _is_number(weight) or not 0 <= weight <= 1):
            faults.add(f"routing_weight is {weight!r}; it must be None or a number in 0..1")
        if self.sweeps is not None and (not _is_number(self.sweeps) or not 0 < self.sweeps <= _MOST_SWEEPS):
            faults.add(f"sweeps is {self.sweeps!r}; it must be None or a number above 0, at most {_MOST_SWEEPS:g}")
        faults.extend(replacing.option_faults(self.window_tolerance, self.move_price, self.move_limit))
        faults.raise_if_any(self.name)

    def plan(self, problem: Problem, run: Run) -> Plan | None:
        """Plan; None if no feasible packing is found."""
        return _Turns(self, problem, run).plan()


def _between(first: float, last: float, fraction: float) -> float:
    """Geometric interpolation."""
    return first * math.exp(math.log(last / first) * fraction)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def packing_leads(problem: Problem) -> float:
    """How much of the balance of experts is better left to packing than to placement, in 0..1.

    The square of packing's share in the number of choices, log₂ of the ways to
    fill cells against log₂ of the ways to fill ranks: with few experts a rank a
    placement cannot follow a packing, with many it can follow any. The square
    was fitted to the best routing weights over experts a rank, samples a block
    and noise.
    """
    if not problem.num_layers:
        return 0.0
    cells = problem.num_samples * math.log(max(2, problem.num_cells))
    per_rank = problem.num_experts // problem.ep_size
    ways = math.lgamma(problem.num_experts + 1) - problem.ep_size * math.lgamma(per_rank + 1)
    return (cells / (cells + problem.num_layers * ways)) ** 2


class _Turns:
    """One run of the planner: its budget and where it stands."""

    def __init__(self, options: Alternating, problem: Problem, run: Run) -> None:
        self.options = options
        self.problem = problem
        self.run = run
        self.planned = False
        self.iterations_left = run.iteration_limit
        self.visit_seconds: float | None = None
        self.small = problem.num_samples <= _SMALL
        self.seed = int(run.rng.integers(2**62))
        leads = packing_leads(problem)
        self.weight = leads if options.routing_weight is None else options.routing_weight
        self.rounds = options.rounds or _ROUNDS
        # Where few experts may move, every placement starts from the previous one, so short visits lead nowhere.
        limited = options.move_limit is not None and run.previous_placement is not None
        turns = self.small or limited or options.rounds is not None or options.sweeps is not None
        self.mixed = leads >= _MIXED_FROM and not turns if options.mixed is None else options.mixed
        heat = math.pow(_HOT_MIXED, leads) if self.mixed else 1.0
        self.schedule = replace(
            _REPACK,
            first=_REPACK.first * (heat if self.mixed else math.pow(_HOT_REPACK, leads)),
            last=_REPACK.last * heat,
        )
        share = _MIXED_SHARE if self.mixed else 0.25 + 0.5 * self.weight
        self.share = share if options.packing_share is None else options.packing_share

    def plan(self) -> Plan | None:
        """Take turns until the budget is used up; the best plan of the run."""
        limited = self.run.iteration_limit is not None or math.isfinite(self.run.time_left())
        start = 0
        while start == 0 or (self.small and not self.exhausted() and (limited or start < _SMALL_STARTS)):
            if not self.take_turns(start):
                break
            start += 1
        return self.run.best

    def take_turns(self, start: int) -> bool:
        """Pack, then place and repack in turns; False if no packing is found."""
        problem, run = self.problem, self.run
        if not problem.num_layers:
            empty = Placement.contiguous(0, 0, ep_size=problem.ep_size)
            packing = self.first_packing(empty, start, share=1.0, weight=0.0)
            if packing is not None:
                self.archive(Plan.of(problem, empty, packing))
            return packing is not None
        ranks = self.start_ranks()
        guide = None
        weight = self.weight if self.weight >= 1 / 64 else 0.0
        turned = start % (len(_SMALL_WEIGHTS) + 1)
        if turned and run.best is not None:
            guide, weight = run.best.placement, _SMALL_WEIGHTS[turned - 1]
        elif weight > 0:
            with run.stage("window placement"):
                guide = self.window_placement(ranks)
        with run.stage("packing"):
            packing = self.first_packing(guide, start, share=self.share, weight=weight)
        if packing is None:
            run.explain("no packing within capacity and rows was found to start from")
            return False
        if math.isfinite(run.time_left()) and not self.small:
            ranks = self.replace(packing, ranks, _FIRST_SWEEPS, number=(start, 0), descent=False)
            self.archive(Plan.of(problem, self.placement(ranks), packing))
        if self.mixed:
            self.mix(packing, ranks, start)
            return True
        for turn in range(self.rounds):
            if self.planned and self.exhausted():
                break
            sweeps = self.affordable_sweeps(self.rounds - turn)
            ranks = self.replace(packing, ranks, sweeps, number=(start, 1 + turn))
            placement = self.placement(ranks)
            self.archive(Plan.of(problem, placement, packing))
            if self.exhausted():
                break
            share = 1.0 if turn + 1 == self.rounds and not self.small else self.share / 2.0
            packing = self.repack(placement, packing, share=share, number=(start, turn))
            self.archive(Plan.of(problem, placement, packing))
            run.progress(None if self.small else (turn + 1) / self.rounds)
        return True

    def mix(self, packing: Packing, ranks: npt.NDArray[np.int32], start: int) -> None:
        """One annealing run over packings and placements: short walks and single visits of every expert in turn."""
        problem, run, schedule = self.problem, self.run, self.schedule
        ranks = self.replace(packing, ranks, _MIXED_SWEEPS, number=(start, 1))
        begin, seconds = run.time(), run.time_left()
        iterations = self.iterations_left
        visits = problem.num_layers * problem.num_experts
        walk = max(1, (_REPACK_PROPOSALS if iterations is None else iterations // _MIXED_TURNS) - visits)
        stream = self.generator(2, (start, 0)).integers(0, 2**64, size=1, dtype=np.uint64)
        for turn in range(_MIXED_TURNS):
            placement = self.placement(ranks)
            self.archive(Plan.of(problem, placement, packing))
            if self.exhausted():
                return
            with run.stage("repacking"):
                loads = BlockLoads(MoveTables.of(problem, placement), packing.row_of_sample, packing.dp_slot_of_sample)
                until = begin + seconds * (turn + 1) / _MIXED_TURNS
                done = leveling.polish(
                    loads,
                    stream,
                    replace(
                        schedule,
                        first=_between(schedule.first, schedule.last, turn / _MIXED_TURNS),
                        last=_between(schedule.first, schedule.last, (turn + 1) / _MIXED_TURNS),
                    ),
                    num_proposals=None if math.isfinite(seconds) and iterations is None else walk,
                    seconds=until - run.time() if math.isfinite(seconds) else math.inf,
                    clock=run.time,
                    heated=False,
                    stopped=run.stopped,
                )
            self.spend(done)
            self.archive(Plan.of(problem, placement, Packing.from_arrays(*loads.best_packing())))
            packing = Packing.from_arrays(*loads.packing())
            warm = _between(*_MIXED_PLACEMENT, (turn + 1) / _MIXED_TURNS)
            ranks = self.replace(packing, ranks, 1.0, number=(start, 2 + turn), temperatures=(warm, 0.3 * warm))
            run.progress((turn + 1) / _MIXED_TURNS)
        self.archive(Plan.of(problem, self.placement(ranks), packing))

    # -- budget -----------------------------------------------------------------------------------------------

    def exhausted(self) -> bool:
        return self.run.stopped() or (self.iterations_left is not None and self.iterations_left <= 0)

    def interrupted(self) -> bool:
        return self.run.stopped() and self.run.limit_reached() is Limit.INTERRUPTED

    def generator(self, purpose: int, number: tuple[int, int]) -> np.random.Generator:
        """Randomness of one step, the same whatever came before it."""
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=(purpose, *number)))

    def spend(self, iterations: int) -> None:
        if self.iterations_left is not None:
            self.iterations_left -= iterations

    def affordable_sweeps(self, turns_left: int) -> float:
        """Visits of each expert that the budget of this turn pays for."""
        problem, run, options = self.problem, self.run, self.options
        sweeps = options.sweeps
        experts = problem.num_layers * problem.num_experts
        if self.small:
            return min(sweeps or _SMALL_SWEEPS, _SMALL_SWEEPS)
        if self.iterations_left is not None:
            share = self.iterations_left * (1.0 - self.share / 2.0) / turns_left
            sweeps = min(sweeps or _MOST_SWEEPS, max(share / experts, 1.0 / problem.num_experts))
        left = run.time_left()
        if math.isfinite(left) and self.visit_seconds is not None:
            share = left * (1.0 - self.share / 2.0) / turns_left
            affordable = 0.97 * share / (self.visit_seconds * experts) - _DESCENT_SWEEPS
            sweeps = min(sweeps or _MOST_SWEEPS, max(affordable, 1.0))
        return sweeps or _DEFAULT_SWEEPS

    # -- turns ------------------------------------------------------------------------------------------------

    def start_ranks(self) -> npt.NDArray[np.int32]:
        problem, run = self.problem, self.run
        if run.previous_placement is not None:
            placement = run.previous_placement
        elif run.warm_start is not None:
            placement = run.warm_start.placement
        else:
            placement = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
        return placement.rank_of_expert.astype(np.int32)

    def placement(self, ranks: npt.NDArray[np.int32]) -> Placement:
        return Placement.from_rank_of_expert(ranks, ep_size=self.problem.ep_size)

    def window_placement(self, start: npt.NDArray[np.int32]) -> Placement:
        """A quick placement for the window load, what the routing term of the first packing is taken under."""
        problem, run = self.problem, self.run
        load = replacing.sum_blocks(
            problem.counts,
            np.zeros(problem.num_samples, dtype=np.int64),
            num_blocks=1,
            num_threads=run.num_threads,
        )
        fit = replacing.fit_ranks(
            load, start, ep_size=problem.ep_size, sweeps=1.0, num_threads=run.num_threads, stopped=run.stopped
        )
        return self.placement(fit.rank_of_expert)

    def first_packing(self, guide: Placement | None, start: int, *, share: float, weight: float) -> Packing | None:
        problem, run = self.problem, self.run
        tables = leveling.ideal_tables(problem, guide, routing_weight=weight)
        iterations = None if run.iteration_limit is None else max(1, int(run.iteration_limit * share))
        if self.small:
            wanted = _SMALL_PROPOSALS * problem.num_samples
            left = self.iterations_left
            iterations = wanted if left is None else max(1, min(wanted, int(left * share)))
        if self.small and guide is not None and weight >= 1.0:
            # Like with like is a strong habit on a handful of samples: every third start has none.
            packer = Annealing(num_chains=4)
            child = run.sub(packer, placement=guide)
            child.iteration_limit = iterations
            self.spend(iterations or 0)
            return packer.pack(problem, guide, child)
        leveler, schedule = leveling.Leveling(num_chains=1), leveling.Schedule()
        if not self.small:
            # The more the routing term weighs, the more there is to do on the exact levels, and the hotter.
            leveler = leveling.Leveling(spread_share=max(0.1, _SPREAD_SHARE * (1.0 - weight)))
            schedule = leveling.Schedule(first=5e-5 * 6.0**weight, last=5e-6 * 2.0**weight)
        found = leveling.search(
            problem,
            tables,
            run,
            leveler,
            schedule=schedule,
            rng=self.generator(0, (start, 0)),
            seconds=run.time_left() * share,
            iterations=iterations,
        )
        self.spend(iterations or 0)
        return None if found is None else Packing.from_arrays(*found.best_packing())

    def replace(
        self,
        packing: Packing,
        start: npt.NDArray[np.int32],
        sweeps: float,
        *,
        number: tuple[int, int],
        descent: bool = True,
        temperatures: tuple[float, float] = (replacing.FIRST_TEMPERATURE, replacing.LAST_TEMPERATURE),
    ) -> npt.NDArray[np.int32]:
        """Place for the blocks of a packing; never worse than the start there."""
        problem, run, options = self.problem, self.run, self.options
        blocks = packing.row_of_sample * problem.num_shards + problem.shard_of_slot[packing.dp_slot_of_sample]
        limited = bool(options.move_price) or options.move_limit is not None
        home = None if run.previous_placement is None or not limited else run.previous_placement.rank_of_expert
        with run.stage("placement"):
            begin = time.perf_counter()
            load = replacing.sum_blocks(
                problem.counts,
                blocks,
                num_blocks=problem.num_rows * problem.num_shards,
                num_threads=run.num_threads,
            )
            fit = replacing.fit_ranks(
                load,
                start,
                ep_size=problem.ep_size,
                seed=int(self.generator(1, number).integers(2**62)),
                sweeps=sweeps,
                first_temperature=temperatures[0],
                last_temperature=temperatures[1],
                descent=descent,
                home=home,
                move_price=options.move_price if home is not None else 0,
                move_limit=options.move_limit if home is not None else None,
                window_tolerance=options.window_tolerance,
                num_threads=1 if self.small else run.num_threads,
                # The first, short pass is finished even if the time is over: half a placement is worse than none.
                stopped=run.stopped if descent else self.interrupted,
            )
            experts = problem.num_layers * problem.num_experts
            if fit.complete:
                visits = (sweeps + descent * _DESCENT_SWEEPS) * experts
                self.visit_seconds = (time.perf_counter() - begin) / visits
        self.spend(round(sweeps * experts))
        return fit.rank_of_expert

    def repack(self, placement: Placement, packing: Packing, *, share: float, number: tuple[int, int]) -> Packing:
        """Anneal a packing gently under a placement; the best one met by the exact score."""
        problem, run = self.problem, self.run
        with run.stage("repacking"):
            loads = BlockLoads(MoveTables.of(problem, placement), packing.row_of_sample, packing.dp_slot_of_sample)
            seconds = run.time_left() * share
            proposals: int | None = None if math.isfinite(seconds) else _REPACK_PROPOSALS
            if self.iterations_left is not None:
                proposals = max(1, int(self.iterations_left * share))
            if self.small:
                wanted = _SMALL_PROPOSALS * problem.num_samples // 2
                proposals = wanted if proposals is None else min(wanted, proposals)
            done = leveling.polish(
                loads,
                self.generator(2, number).integers(0, 2**64, size=1, dtype=np.uint64),
                self.schedule,
                num_proposals=proposals,
                seconds=seconds,
                clock=run.time,
                stopped=run.stopped,
            )
        self.spend(done)
        return Packing.from_arrays(*loads.best_packing())

    def archive(self, plan: Plan) -> None:
        """Hand a plan in; the run keeps the best one by the exact score."""
        self.run.report(plan)
        self.planned = True
