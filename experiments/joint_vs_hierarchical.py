"""How much does deciding the placement before the packing cost?

Question
    The hierarchy places experts for the window load and packs for that placement. How far above the joint optimum of
    the first level is (LPT + exact packing), and (exact placement + exact packing), with the best and the worst of all
    placements that tie for the window load? Does it depend on the experts a rank holds?
Command
    python experiments/joint_vs_hierarchical.py --seeds 30 --out results/joint_vs_hierarchical.jsonl
Rows
    One JSON line per problem with exact integer levels; rows already in the file are not run again. The table gives the
    excess over the joint optimum in per cent.

Problems: 8 samples, 2 rows of 2 slots, 2 layers, 2 ranks with 1 to 4 experts each, routing by prompt groups with
idiosyncratic samples, short lengths so that window loads tie. The joint optimum is proved by CP-SAT, packings by
dynamic programming over subsets.
"""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from routepack_opt import planning, rows
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.plan import Placement, Plan
from routepack_opt.problem import Problem
from routepack_opt.result import Status
from routepack_opt.score import evaluate
from routepack_opt.synthetic import LengthModel, RoutingModel, generate_arrays
from routepack_opt.testing import every_placement, subset_optimum

EP_SIZE, NUM_LAYERS = 2, 2
#: Tied placements looked at per problem.
MOST_TIED = 400


def make_problem(experts_per_rank: int, seed: int) -> Problem:
    """Draw one tiny problem."""
    routing = RoutingModel(
        num_layers=NUM_LAYERS, num_experts=EP_SIZE * experts_per_rank, top_k=1, num_blocks=EP_SIZE, num_domains=3
    )
    arrays = generate_arrays(routing, LengthModel(mean=60, least=8, most=180), num_samples=8, group_size=2, seed=seed)
    lengths = np.asarray(arrays.lengths, dtype=np.int64)
    capacity = max(int(lengths.max()), -(-int(lengths.sum()) * 100 // (4 * 85)))
    while True:
        try:
            rows.pack_bins(lengths, capacity, num_bins=4)
            break
        except ValueError:
            capacity += 5
    cost = CostModel(
        (OperatorClass("linear", Fraction(1), Fraction(0)), OperatorClass("quadratic", Fraction(1, 4), Fraction(1)))
    )
    return Problem.from_arrays(
        lengths,
        arrays.counts,
        top_k=1,
        routed_tokens=arrays.routed_tokens,
        capacity=capacity,
        ep_size=EP_SIZE,
        dp_size=2,
        num_rows=2,
        cost=cost,
    )


def tied_placements(problem: Problem) -> list[Placement]:
    """Every placement with the least Σ_l max_p of the window load, rank labels counted as one; layer by layer."""
    window = problem.counts.sum(axis=0, dtype=np.int64)
    options: list[list[np.ndarray[Any, Any]]] = []
    groupings = sorted({tuple(p.rank_of_expert[0].tolist()) for p in every_placement(_one_layer(problem))})
    for layer in range(problem.num_layers):
        peaks = {
            ranks: max(int(window[layer, np.asarray(ranks) == p].sum()) for p in range(problem.ep_size))
            for ranks in groupings
        }
        least = min(peaks.values())
        options.append([np.asarray(ranks) for ranks, peak in peaks.items() if peak == least])
    return [
        Placement.from_rank_of_expert(np.stack(choice), ep_size=problem.ep_size)
        for choice in islice(product(*options), MOST_TIED)
    ]


def _one_layer(problem: Problem) -> Problem:
    return Problem.from_arrays(
        problem.lengths,
        problem.counts[:, :1],
        top_k=problem.top_k,
        routed_tokens=problem.batch.routed_tokens,
        capacity=problem.capacity,
        ep_size=problem.ep_size,
        dp_size=problem.dp_size,
        num_rows=problem.num_rows,
        cost=problem.cost,
    )


def run_one(experts_per_rank: int, seed: int, *, time_limit: float, threads: int) -> dict[str, Any]:
    """Levels of the hierarchy and of the joint optimum for one problem."""
    problem = make_problem(experts_per_rank, seed)
    lpt = planning.place(problem, "lpt").placement
    assert lpt is not None
    plans = [subset_optimum(problem, placement) for placement in [lpt, *tied_placements(problem)]]
    scores = [evaluate(problem, plan).levels for plan in plans]
    best: Plan = plans[min(range(len(plans)), key=lambda k: scores[k])]
    joint = planning.solve(
        problem, "cpsat", time_limit=time_limit, seed=seed, num_threads=threads, warm_start=best, progress=False
    )
    assert joint.score is not None
    return {
        "experts_per_rank": experts_per_rank,
        "seed": seed,
        "joint": list(joint.score.levels),
        "joint_proved": joint.levels[0].status is Status.OPTIMAL,
        "joint_runtime": round(joint.runtime, 3),
        "lpt": list(scores[0]),
        "tied": len(scores) - 1,
        "exact_best": list(min(scores[1:])),
        "exact_worst": list(max(scores[1:])),
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows saved so far; an unfinished last line is ignored."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def table(rows_: list[dict[str, Any]]) -> str:
    """Excess over the joint optimum of the first level, per cent, by experts a rank."""
    lines = [
        f"{'E/P':>4} {'planner':<28} {'problems':>8} {'mean':>7} {'median':>7} {'95 %':>7} {'worst':>7} {'equal':>6}"
    ]
    for experts in [*sorted({row["experts_per_rank"] for row in rows_}), None]:
        group = [
            row for row in rows_ if row["joint_proved"] and (experts is None or row["experts_per_rank"] == experts)
        ]
        for key, label in (
            ("lpt", "LPT + exact packing"),
            ("exact_best", "exact placement, best tie"),
            ("exact_worst", "exact placement, worst tie"),
        ):
            excess = np.array([100 * (row[key][0] / row["joint"][0] - 1) for row in group])
            if not len(excess):
                continue
            lines.append(
                f"{'all' if experts is None else experts:>4} {label:<28} {len(excess):>8} {excess.mean():>7.3f} "
                f"{np.median(excess):>7.3f} {np.quantile(excess, 0.95):>7.3f} {excess.max():>7.3f} "
                f"{np.mean(excess == 0):>6.0%}"
            )
    left = sum(not row["joint_proved"] for row in rows_)
    lines.append(f"{left} problems whose joint optimum was not proved are left out")
    return "\n".join(lines)


def main() -> None:
    """Run the missing problems, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=30, help="problems for each number of experts a rank")
    parser.add_argument("--experts-per-rank", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the joint optimum")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/joint_vs_hierarchical.jsonl"))
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {(row["experts_per_rank"], row["seed"]) for row in read_rows(options.out)}
    for seed in range(options.seeds):
        for experts in options.experts_per_rank:
            if (experts, seed) in done:
                continue
            row = run_one(experts, seed, time_limit=options.time_limit, threads=options.threads)
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(row) + "\n")
    print(table(read_rows(options.out)))


if __name__ == "__main__":
    main()
