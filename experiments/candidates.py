"""Question: which refinements of the joint planner are worth their time, and which are not?

Command: ``python experiments/candidates.py`` (``--case NAME``, ``--seeds N``,
``--time-limit S``, ``--part NAME`` to choose). ``ROUTEPACK_DATA`` adds the
recorded counts of gpt-oss-20b.

Three parts, gaps in % of the any-placement bound, medians over seeds:

* ``options``: variants that are options of the planners, in equal time.
  One-for-two moves in annealing (``pair_share``), the share of the first packing
  spent on the spread (``leveling``, packing for a fixed placement), long turns
  against one mixed annealing run (``mixed``), the number of turns (``rounds``).
* ``cells``: the finished plan's cells of every block packed anew, exactly
  (CP-SAT on the samples of one block; routing does not matter there).
* ``pairs``: pairs of blocks of one shard packed anew, exactly, under the
  finished placement.

Expected rows: one-for-two moves take 0.01 to 0.03 points off ``lpt+annealing``;
mixing helps where packing has much of the choice (gpt-oss-20b and the recorded
trace, 4 experts a rank: 0.03 to 0.15 points) and costs where placement has it
(0.05); three turns are better than one, eight no better than three. Exact
polishing of cells or pairs finds nothing worth its seconds on the families and
gpt-oss-20b; on the trace, small as it is, four blocks give 0.03 points.
"""

from __future__ import annotations

import argparse
import platform
from itertools import combinations
from statistics import median

import benchmark_quality
import numpy as np
import numpy.typing as npt

import routepack_opt as rp
from routepack_opt import bounds
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.planning import pack, solve
from routepack_opt.problem import Problem
from routepack_opt.result import Result, Status
from routepack_opt.score import evaluate
from routepack_opt.solvers.alternating import packing_leads

OPTIONS = (
    "lpt+annealing",
    "lpt+annealing(pair_share=0.05)",
    "lpt+leveling(spread_share=0.0)",
    "lpt+leveling",
    "lpt+leveling(spread_share=0.6)",
    "alternating",
    "alternating(mixed=False)",
    "alternating(mixed=True)",
    "alternating(rounds=1)",
    "alternating(rounds=8)",
)
CASES = ("tiny-low", "flash-p8-low", "tiny-high", "trace", "gpt-oss-20b-c2048")


def gap(result: Result, bound: bounds.Bound) -> float:
    """First level above the bound, in %."""
    assert result.score is not None, f"no plan: {result.reason}"
    found = bounds.gap(result.score, bound)
    assert found is not None
    return 100 * found


def compare_options(name: str, problems: list[Problem], options: argparse.Namespace) -> None:
    """One line a variant."""
    lowest = [bounds.best_bound(problem) for problem in problems]
    print(f"\n{name}: {problems[0]!r}; packing leads {packing_leads(problems[0]):.2f}")
    for spec in OPTIONS:
        solve(problems[0], spec, time_limit=0.2, num_threads=options.threads)
        gaps = [
            gap(
                solve(problem, spec, time_limit=options.time_limit, seed=seed, num_threads=options.threads),
                low,
            )
            for seed, (problem, low) in enumerate(zip(problems, lowest, strict=True))
        ]
        print(f"  {spec:36s} {median(gaps):8.3f} {min(gaps):8.3f} .. {max(gaps):.3f}", flush=True)


def part_of(problem: Problem, samples: npt.NDArray[np.int64], num_rows: int, *, routed: bool) -> Problem:
    """The problem of some samples alone: one shard, so many rows."""
    return Problem.from_arrays(
        problem.lengths[samples],
        problem.counts[samples] if routed else None,
        top_k=problem.top_k if routed else None,
        routed_tokens=problem.batch.routed_tokens[samples] if routed else None,
        capacity=problem.capacity,
        ep_size=problem.ep_size,
        dp_size=problem.dp_size // problem.num_shards,
        num_shards=1,
        num_rows=num_rows,
        cost=problem.cost,
    )


def polish(name: str, problem: Problem, options: argparse.Namespace, *, pairs: bool) -> None:
    """Pack the blocks of a finished plan anew, one or two at a time, exactly."""
    result = solve(problem, "alternating", time_limit=options.time_limit, num_threads=options.threads)
    bound = bounds.best_bound(problem)
    assert result.plan is not None
    packing = result.plan.packing
    shard = problem.shard_of_slot[packing.dp_slot_of_sample]
    place = np.empty(problem.dp_size, dtype=np.int64)
    for slots in problem.shards:
        place[list(slots)] = np.arange(len(slots))
    chosen = [
        (g, rows)
        for g in range(problem.num_shards)
        for rows in combinations(range(problem.num_rows), 2 if pairs else 1)
    ]
    chosen = [chosen[k] for k in np.random.default_rng(0).permutation(len(chosen))[: options.blocks]]
    saved, proved, improved = 0.0, 0, 0
    for g, rows in chosen:
        samples = np.flatnonzero((shard == g) & np.isin(packing.row_of_sample, rows))
        part = part_of(problem, samples, len(rows), routed=pairs)
        now = Packing.from_arrays(
            np.searchsorted(rows, packing.row_of_sample[samples]), place[packing.dp_slot_of_sample[samples]]
        )
        placement = result.plan.placement
        if not pairs:
            placement = Placement.contiguous(0, 0, ep_size=problem.ep_size)
        again = pack(
            part, "cpsat", placement=placement, warm_start=now, time_limit=options.block_seconds, num_threads=2
        )
        assert again.score is not None
        before = evaluate(part, Plan.of(part, placement, now)).total_work
        # The parts may count work in another unit.
        gain = (before - again.score.total_work) / part.unit_denominator * problem.unit_denominator
        saved += gain
        improved += gain > 0
        proved += again.levels[0].status is Status.OPTIMAL
    share = 100 * saved / problem.num_shards / bound.value
    what = "pairs of blocks" if pairs else "blocks"
    print(
        f"  {name:20s} gap {gap(result, bound):.3f} %: {len(chosen)} {what} for {options.block_seconds:g} s "
        f"each: {improved} better, {proved} proven, together {share:.4f} points of gap",
        flush=True,
    )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", help="case of benchmark_quality.py; repeat")
    parser.add_argument("--part", action="append", choices=("options", "cells", "pairs"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8, help="blocks or pairs tried for exact polishing")
    parser.add_argument("--block-seconds", type=float, default=5.0)
    options = parser.parse_args()
    available = benchmark_quality.cases()
    chosen = options.case or [name for name in CASES if name in available]
    if unknown := [name for name in chosen if name not in available]:
        raise SystemExit(f"unknown case {', '.join(unknown)}; choose from {', '.join(available)}")
    rp.warm_up()
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, {options.time_limit:g} s")
    parts = options.part or ["options", "cells", "pairs"]
    if "options" in parts:
        for name in chosen:
            compare_options(name, [available[name](seed) for seed in range(options.seeds)], options)
    for part in ("cells", "pairs"):
        if part in parts:
            print(f"\nexact polishing: {part}")
            for name in chosen:
                polish(name, available[name](0), options, pairs=part == "pairs")


if __name__ == "__main__":
    main()
