"""Question: how fast are the placers, how much of the load CV do they remove, how far are they from the bound?

Command: ``python experiments/benchmark_placement.py [--repeats 7]``

Window loads of the frozen families (synthetic, seeded), the placers on plain
arrays, thread-CPU time, best of several runs. *CV cut* is the share of the
contiguous layout's EP-rank CV (mean over layers of std / mean over ranks) that
a placer removes; *attainable* is the cut of loads that sit at the bound of
every layer: where one expert is hotter than an average rank, no placement
without replicas reaches 100 %. *Excess* is Σ_l max_p load over Σ_l bound − 1.

Expected rows: lpt with exchanges of two within 10 ms for 40 × 256 → 32 and
within 0.2 points of the attainable cut; bldm far off alone, as good refined.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from routepack_opt import synthetic
from routepack_opt.bounds import placement_bound, window_load
from routepack_opt.solvers.bldm import bldm_ranks
from routepack_opt.solvers.lpt import lpt_ranks, rank_loads

IntArray = npt.NDArray[np.int64]

PLACERS: dict[str, Callable[[IntArray, int], IntArray]] = {
    "lpt(refine=False)": lambda load, ep_size: lpt_ranks(load, ep_size, refine=False),
    "lpt(max_exchange=1)": lambda load, ep_size: lpt_ranks(load, ep_size, max_exchange=1),
    "lpt": lambda load, ep_size: lpt_ranks(load, ep_size),
    "lpt(max_exchange=3)": lambda load, ep_size: lpt_ranks(load, ep_size, max_exchange=3),
    "bldm": lambda load, ep_size: bldm_ranks(load, ep_size),
    "bldm(refine=True)": lambda load, ep_size: bldm_ranks(load, ep_size, refine=True),
}


def cv(total: npt.NDArray[np.float64] | IntArray) -> float:
    """EP-rank CV, mean over layers."""
    return float((total.std(axis=1) / total.mean(axis=1)).mean())


def attainable(load: IntArray, ep_size: int) -> npt.NDArray[np.float64]:
    """Rank loads of a layer with its most loaded rank at the bound and the others level."""
    bound = placement_bound(load, ep_size).astype(np.float64)
    total = np.repeat((load.sum(axis=1) - bound)[:, None] / (ep_size - 1), ep_size, axis=1)
    total[:, 0] = bound
    return total


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--family", action="append", choices=synthetic.families(), help="default: all")
    arguments = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, "
        f"numpy {np.__version__}, numba {numba.__version__}"
    )
    print(
        f"{'family':24} {'L x E -> P':>14} {'placer':21} {'ms':>7} {'CV cut %':>9} {'attainable':>10} "
        f"{'excess':>9} {'at bound':>8}"
    )
    for family in arguments.family or synthetic.families():
        problem = synthetic.family(family)
        load, ep_size = window_load(problem), problem.ep_size
        num_layers, num_experts = load.shape
        contiguous = load.reshape(num_layers, ep_size, -1).sum(axis=2)
        best_cut = 100 * (1 - cv(attainable(load, ep_size)) / cv(contiguous))
        bound = placement_bound(load, ep_size)
        for name, placer in PLACERS.items():
            placer(load, ep_size)
            seconds = []
            for _ in range(arguments.repeats):
                start = time.thread_time()
                ranks = placer(load, ep_size)
                seconds.append(time.thread_time() - start)
            total = rank_loads(load, ranks, ep_size)
            top = total.max(axis=1)
            print(
                f"{family:24} {f'{num_layers} x {num_experts} -> {ep_size}':>14} {name:21} {min(seconds) * 1e3:7.2f} "
                f"{100 * (1 - cv(total) / cv(contiguous)):9.3f} {best_cut:10.3f} "
                f"{top.sum() / bound.sum() - 1:9.1e} {(top == bound).mean():8.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
