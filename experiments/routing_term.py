"""Question: once experts are placed for the packing, how much of the routing term in packing is still worth having?

Command: ``python experiments/routing_term.py`` (``--seeds 5``, ``--time-limit 1``; ``--csv FILE``).
The paper packs under a placement for the window and needs the routing term in
the packing objective. Here the packing weighs the term with 0, 0.1, 0.25, 0.5
or 1 of it (the rest as if ranks were balanced), and is left as it is
(``hierarchy``: placed for the window beforehand) or gets its experts placed
anew (``by turns``: one placement after the packing, equal time). Three factors
are varied one at a time around a base case of 8 ranks: experts a rank (E/P),
samples a block, and the routing noise of samples; figures are medians over
steps of the certified gap in %, beside the weight that is best.

Expected rows: in the hierarchy the gap falls with the weight everywhere; by
turns the best weight is 0 to 0.25, and the term is worth less than a tenth of
what it is worth in the hierarchy, except where a rank owns few experts.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import routepack_opt as rp
from routepack_opt import bounds, synthetic
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Cluster, Problem
from routepack_opt.score import evaluate
from routepack_opt.solver import Run
from routepack_opt.solvers import leveling, replacing
from routepack_opt.solvers.lpt import lpt_ranks

WEIGHTS = (0.0, 0.1, 0.25, 0.5, 1.0)
BASE = {"experts_per_rank": 16, "samples_per_cell": 4, "noise": 1.0}
FACTORS = {
    "experts_per_rank": [2, 4, 8, 16, 32],
    "samples_per_cell": [2, 4, 8, 16],
    "noise": [0.25, 0.5, 1.0, 2.0],
}
COST = CostModel(
    (OperatorClass("linear", Fraction(200), Fraction(0)), OperatorClass("softmax", Fraction(20), Fraction(90)))
)


def problem_of(experts_per_rank: int, samples_per_cell: int, noise: float, step: int) -> Problem:
    """8 ranks, 2 shards of 8 slots, 6 rows, 16 layers; noise 1 is the low-noise family."""
    cells = 6 * 16
    routing = synthetic.RoutingModel(
        num_layers=16,
        num_experts=8 * experts_per_rank,
        top_k=min(8, 2 * experts_per_rank),
        popularity_sd=0.35,
        block_sd=0.1,
        domain_sd=0.32,
        group_sd=0.38,
        sample_sd=0.52,
    )
    routing = replace(
        routing,
        **{name: noise * getattr(routing, name) for name in ("domain_sd", "group_sd", "sample_sd")},
    )
    mean = 0.94 * 32_768 / samples_per_cell
    batch = synthetic.generate(
        routing,
        synthetic.LengthModel(mean=mean, most=min(28_672, int(3.5 * mean))),
        num_samples=cells * samples_per_cell,
        seed=11,
        step=step,
    )
    return Problem.from_batch(
        batch, capacity=32_768, cluster=Cluster.from_sizes(ep_size=8, dp_size=16, num_shards=2), cost=COST
    )


def window_placement(problem: Problem) -> Placement:
    """LPT with exchanges for the load of the window."""
    return Placement.from_rank_of_expert(
        lpt_ranks(bounds.window_load(problem), problem.ep_size), ep_size=problem.ep_size
    )


def gaps(problem: Problem, weight: float, seed: int, seconds: float, threads: int) -> dict[str, float]:
    """Certified gap in % of both orders at one routing weight, each within ``seconds``."""
    window = window_placement(problem)
    bound = bounds.best_bound(problem).value
    tables = leveling.ideal_tables(problem, window, routing_weight=weight)

    def packed(share: float) -> Packing:
        run = Run(problem, seed=seed, time_limit=share, num_threads=threads)
        found = leveling.search(problem, tables, run, leveling.Leveling())
        assert found is not None
        return Packing.from_arrays(*found.best_packing())

    whole = packed(seconds)
    half = packed(seconds / 2)
    run = Run(problem, seed=seed, time_limit=seconds / 2, num_threads=threads)
    placed = replacing.Replacing(sweeps=1000.0).place(problem, half, run)
    assert placed is not None
    values = {"hierarchy": (window, whole), "by turns": (placed, half)}
    return {
        order: 100 * (evaluate(problem, Plan.of(problem, placement, packing)).max_shard_work / bound - 1)
        for order, (placement, packing) in values.items()
    }


def main() -> None:
    """Print a table a factor: gap by routing weight, for both orders."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds of each plan")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--factor", action="append", choices=sorted(FACTORS))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    rp.warm_up()
    rows: list[dict[str, Any]] = []
    for factor in options.factor or list(FACTORS):
        print(f"\n{factor}: certified gap in %, median over {options.seeds} steps, {options.time_limit} s a plan")
        print(
            f"  {'value':>6s} {'order':10s}" + "".join(f"{f'w {weight}':>9s}" for weight in WEIGHTS) + "   best  worth"
        )
        for value in FACTORS[factor]:
            setting = {**BASE, factor: value}
            for step in range(options.seeds):
                problem = problem_of(step=step, **setting)  # type: ignore[arg-type]
                for weight in WEIGHTS:
                    found = gaps(problem, weight, step, options.time_limit, options.threads)
                    rows += [
                        {"factor": factor, "value": value, "step": step, "weight": weight, "order": order, "gap": gap}
                        for order, gap in found.items()
                    ]
            frame = pd.DataFrame(rows)
            part = frame[(frame["factor"] == factor) & (frame["value"] == value)]
            for order in ("hierarchy", "by turns"):
                median = part[part["order"] == order].groupby("weight")["gap"].median()
                best = float(median.idxmin())
                worth = median[0.0] - median.min()
                print(
                    f"  {value:6} {order:10s}"
                    + "".join(f"{median[weight]:9.3f}" for weight in WEIGHTS)
                    + f" {best:6.2f} {worth:6.3f}",
                    flush=True,
                )
    if options.csv:
        pd.DataFrame(rows).to_csv(options.csv, index=False)


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    main()
