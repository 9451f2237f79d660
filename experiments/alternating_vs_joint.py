"""Question: how far is planning by turns from the joint optimum where that can be proved, and how far is the hierarchy?

Command: ``python experiments/alternating_vs_joint.py`` (``--seeds 10``, ``--time-limit 10``
seconds of the exact planner a problem). Random small problems; the joint optimum
is proved by CP-SAT over placement and packing together. The hierarchy is solved
to optimality in both steps (``cpsat+cpsat``): best placement for the window, then
best packing for it. Values are the first level, in % above the joint optimum;
problems whose joint optimum is not proved in time are counted and left out.

Expected rows: the hierarchy 1-8 % above the joint optimum on average with two to
four experts a rank; planning by turns at the optimum in two thirds of the
problems or more and at most 0.7 % above it on average. (Seven samples on a few
cells are coarse: a single misplaced one is worth up to 4 %.)
"""

from __future__ import annotations

import argparse

import numpy as np

from routepack_opt import testing
from routepack_opt.errors import InvalidInputError
from routepack_opt.planning import solve
from routepack_opt.problem import Problem
from routepack_opt.result import Status

HIERARCHY = "cpsat+cpsat"


def small(seed: int, experts_per_rank: int) -> Problem:
    """Two shards of one or two slots, two layers, two ranks."""
    return testing.tiny_problem(
        seed,
        num_samples=7,
        num_shards=2,
        num_layers=2,
        ep_size=2,
        experts_per_rank=experts_per_rank,
    )


def above(value: int, optimum: int) -> float:
    """Distance from the optimum in %."""
    return 100.0 * (value - optimum) / optimum


def main() -> None:
    """Print one row for each number of experts a rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=10.0)
    parser.add_argument("--iterations", type=int, default=300_000, help="of planning by turns")
    parser.add_argument("--experts-per-rank", type=int, action="append", help="repeat; default 1 to 4")
    options = parser.parse_args()
    planners = {
        "hierarchy, exact": (HIERARCHY, {"time_limit": options.time_limit}),
        **{
            spec: (spec, {"iteration_limit": options.iterations})
            for spec in ("alternating", "alternating(rounds=4)", "alternating(routing_weight=0.5)")
        },
    }
    print(f"{'E/P':>4s} {'proved':>7s}  {'planner':44s} {'mean %':>8s} {'worst %':>8s} {'optimal':>8s}")
    for experts_per_rank in options.experts_per_rank or [1, 2, 3, 4]:
        found: dict[str, list[float]] = {name: [] for name in planners}
        proved = 0
        for seed in range(options.seeds):
            try:
                problem = small(seed, experts_per_rank)
            except InvalidInputError:
                continue
            joint = solve(problem, "cpsat", time_limit=options.time_limit, progress=False)
            if joint.levels[0].status is not Status.OPTIMAL or joint.score is None:
                continue
            proved += 1
            for name, (spec, limit) in planners.items():
                result = solve(problem, spec, seed=seed, progress=False, **limit)
                if result.score is not None:
                    found[name].append(above(result.score.max_shard_work, joint.score.max_shard_work))
        for name, values in found.items():
            if values:
                print(
                    f"{experts_per_rank:4d} {proved:3d}/{options.seeds:3d}  {name:44s} {np.mean(values):8.3f} "
                    f"{np.max(values):8.3f} {np.mean(np.array(values) == 0):8.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
