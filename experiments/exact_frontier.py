"""Up to which size can packing be solved to proven optimality, by which backend and formulation?

Question
    For problems (N, R, G, |D_g|, L, P) of growing size: which share does each exact packer prove lexicographically
    optimal within the time limit, and how large is the gap of the first level where it does not?
Command
    python experiments/exact_frontier.py --time-limit 60 --threads 2 --out results/exact_frontier.jsonl
    python experiments/exact_frontier.py --plot results/exact_frontier.jsonl
Rows
    One JSON line per (case, seed, planner): proven or not, value and bound of each level, seconds. Rows already in the
    file are not run again, so an interrupted run continues.

Problems are synthetic: log-normal lengths with prompt groups, 4 experts a rank with top-2 routing, one linear and one
quadratic attention class of about the weight of the experts, cells filled to 85-90 % on average; the placement is
longest processing time with exchanges.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from routepack_opt import planning, rows
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.plan import Placement
from routepack_opt.problem import Problem
from routepack_opt.solvers.levels import start_ranks
from routepack_opt.synthetic import LengthModel, RoutingModel, generate_arrays


class Case(NamedTuple):
    """Sizes of one family: N, R, G, |D_g|, L, P."""

    num_samples: int
    num_rows: int
    num_shards: int
    shard_size: int
    num_layers: int
    ep_size: int


CASES = [
    Case(*sizes)
    for sizes in (
        (8, 2, 1, 2, 2, 2),
        (12, 2, 1, 2, 4, 4),
        (12, 2, 2, 2, 4, 4),
        (16, 2, 1, 2, 4, 4),
        (16, 4, 1, 2, 4, 4),
        (16, 2, 2, 2, 4, 4),
        (20, 2, 1, 4, 4, 4),
        (20, 4, 1, 2, 4, 4),
        (20, 2, 2, 2, 4, 4),
        (22, 4, 1, 2, 4, 4),
        (24, 2, 1, 4, 4, 4),
        (24, 3, 1, 4, 8, 4),
        (24, 4, 1, 2, 4, 4),
        (24, 6, 1, 2, 4, 4),
        (24, 2, 2, 4, 4, 4),
        (28, 7, 1, 2, 4, 4),
        (32, 8, 1, 2, 4, 4),
        (40, 10, 1, 2, 4, 4),
    )
]

PLANNERS = [
    "cpsat",
    "cpsat(symmetry=False)",
    "cpsat(rank_sums=False, window_loads=False, attention_averages=False, area_bounds=False)",
    "milp",
    "milp(engine='cbc')",
    "columns",
]


def make_problem(case: Case, seed: int) -> tuple[Problem, Placement]:
    """Draw a problem of a case and the placement to pack for."""
    routing = RoutingModel(
        num_layers=case.num_layers, num_experts=4 * case.ep_size, top_k=2, num_blocks=case.ep_size, num_domains=3
    )
    lengths = LengthModel(mean=1200, most=4096)
    arrays = generate_arrays(routing, lengths, num_samples=case.num_samples, group_size=4, seed=seed)
    cells = case.num_rows * case.num_shards * case.shard_size
    tokens = np.asarray(arrays.lengths, dtype=np.int64)
    capacity = max(int(tokens.max()), -(-int(tokens.sum()) * 100 // (cells * 90)))
    while True:
        try:
            rows.pack_bins(tokens, capacity, num_bins=cells)
            break
        except ValueError:
            capacity += -(-capacity // 50)
    weight = Fraction(case.num_layers * 2 * case.shard_size, case.ep_size)
    cost = CostModel(
        (
            OperatorClass("linear", weight / 2, Fraction(0)),
            OperatorClass("quadratic", weight / 8, weight / 2),
        )
    )
    problem = Problem.from_arrays(
        tokens,
        arrays.counts,
        top_k=2,
        routed_tokens=arrays.routed_tokens,
        capacity=capacity,
        ep_size=case.ep_size,
        dp_size=case.num_shards * case.shard_size,
        num_shards=case.num_shards,
        num_rows=case.num_rows,
        cost=cost,
    )
    load = problem.counts.sum(axis=0, dtype=np.int64)
    ranks = np.stack([start_ranks(load[None, layer], ep_size=case.ep_size) for layer in range(case.num_layers)])
    return problem, Placement.from_rank_of_expert(ranks, ep_size=case.ep_size)


def run_one(case: Case, seed: int, planner: str, *, time_limit: float, threads: int) -> dict[str, Any]:
    """Pack one problem and describe the outcome."""
    problem, placement = make_problem(case, seed)
    result = planning.pack(
        problem,
        planner,
        placement=placement,
        time_limit=time_limit,
        seed=seed,
        num_threads=threads,
        progress=False,
    )
    return {
        "case": list(case),
        "seed": seed,
        "planner": planner,
        "time_limit": time_limit,
        "threads": threads,
        "status": result.status.value,
        "limit": None if result.limit is None else result.limit.value,
        "runtime": round(result.runtime, 3),
        "levels": [level.to_dict() for level in result.levels],
        "fill": round(problem.fill, 4),
        "reason": result.reason,
    }


def gap_of(row: dict[str, Any]) -> float | None:
    """Relative gap of the first level, or None where value or bound is missing."""
    first = row["levels"][0]
    if first["value"] is None or first["bound"] is None:
        return None
    return float((first["value"] - first["bound"]) / first["value"])


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
    """Share proven, proven or closed to 1e-5 on the first level, median seconds and worst gap, by case and planner."""
    groups: dict[tuple[tuple[int, ...], str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows_:
        groups[tuple(row["case"]), row["planner"]].append(row)
    head = f"{'N,R,G,|D_g|,L,P':<18} {'planner':<28} {'proven':>7} {'level 1':>8} {'1e-5':>7}"
    lines = [f"{head} {'median s':>9} {'worst gap':>10}"]
    for (case, planner), group in sorted(groups.items()):
        proven = sum(row["status"] == "optimal" for row in group)
        first = sum(row["levels"][0]["status"] == "optimal" for row in group)
        gaps = [gap_of(row) for row in group]
        known = [gap for gap in gaps if gap is not None]
        close = sum(gap <= 1e-5 for gap in known)
        worst = "unknown" if len(known) < len(gaps) else f"{max(known):.3%}"
        lines.append(
            f"{','.join(map(str, case)):<18} {planner[:28]:<28} {proven:>3}/{len(group):<3} {first:>4}/{len(group):<3} "
            f"{close:>3}/{len(group):<3} "
            f"{float(np.median([row['runtime'] for row in group])):>9.2f} {worst:>10}"
        )
    return "\n".join(lines)


def plot(rows_: list[dict[str, Any]], path: Path) -> None:
    """Draw the share proven by case, one line a planner."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cases = sorted({tuple(row["case"]) for row in rows_})
    planners = list(dict.fromkeys(row["planner"] for row in rows_))
    figure, axes = plt.subplots(2, 1, figsize=(0.55 * len(cases) + 4, 6.5), sharex=True)
    for planner in planners:
        share, seconds = [], []
        for case in cases:
            group = [row for row in rows_ if tuple(row["case"]) == case and row["planner"] == planner]
            share.append(100 * np.mean([row["status"] == "optimal" for row in group]) if group else np.nan)
            seconds.append(np.median([row["runtime"] for row in group]) if group else np.nan)
        axes[0].plot(range(len(cases)), share, marker="o", label=planner[:40])
        axes[1].plot(range(len(cases)), seconds, marker="o")
    axes[0].set_ylabel("proven optimal (%)")
    axes[0].legend(fontsize=7)
    axes[1].set_ylabel("median seconds")
    axes[1].set_yscale("log")
    axes[1].set_xticks(range(len(cases)), [",".join(map(str, case)) for case in cases], rotation=60, fontsize=7)
    axes[1].set_xlabel("N, R, G, |D_g|, L, P")
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the missing rows, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a problem")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4, help="problems a case")
    parser.add_argument("--case", action="append", help="N,R,G,D_g,L,P; repeatable; default: the whole suite")
    parser.add_argument("--planner", action="append", help="packer spec; repeatable; default: every variant")
    parser.add_argument("--out", type=Path, default=Path("results/exact_frontier.jsonl"))
    parser.add_argument("--plot", type=Path, help="draw the figure of this file of rows beside it and stop")
    options = parser.parse_args()
    if options.plot:
        target = options.plot.with_suffix(".png")
        plot(read_rows(options.plot), target)
        print(table(read_rows(options.plot)))
        print(f"figure: {target}")
        return
    cases = [Case(*map(int, text.split(","))) for text in options.case] if options.case else CASES
    planners = options.planner or PLANNERS
    options.out.parent.mkdir(parents=True, exist_ok=True)
    done = {
        (tuple(row["case"]), row["seed"], row["planner"], row["time_limit"], row["threads"])
        for row in read_rows(options.out)
    }
    for case in cases:
        for planner in planners:
            for seed in range(options.seeds):
                if (tuple(case), seed, planner, options.time_limit, options.threads) in done:
                    continue
                start = time.perf_counter()
                row = run_one(case, seed, planner, time_limit=options.time_limit, threads=options.threads)
                with options.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
                print(
                    f"{','.join(map(str, case))} seed {seed} {planner}: {row['status']} in "
                    f"{time.perf_counter() - start:.1f} s",
                    file=sys.stderr,
                )
    print(table(read_rows(options.out)))


if __name__ == "__main__":
    main()
