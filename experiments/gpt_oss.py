"""Plan the real per-sample routing of gpt-oss-20b with the planners of the main comparison.

Question: what do the paper's planner and its baselines reach on real routing of a real model?
Command: ``ROUTEPACK_DATA=... python experiments/gpt_oss.py``
Expected: one table a capacity (4096 and 2048): score, certified gap, CV and seconds for each planner.

The counts are decode tokens only (prompts were not recorded), so the lengths
are the routed tokens; P 8, D 8, G 1, cost preset gpt-oss-20b.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import numpy as np

import routepack_opt as rp

PLANNERS = [
    "contiguous+ffd",
    "lpt+ffd",
    "lpt+length_annealing",
    "lpt+annealing",
    "alternating",
]


def load(folder: Path, capacity: int, *, ep_size: int = 8, dp_size: int = 8, num_shards: int = 1) -> rp.Problem:
    """The recorded counts as a problem."""
    with np.load(folder / "routing_gptoss20b_per_sample" / "counts.npz", allow_pickle=False) as archive:
        counts = next(archive[name] for name in archive.files if archive[name].ndim == 3)
    routed = counts[:, 0].sum(axis=1, dtype=np.int64) // 4
    return rp.Problem.from_arrays(
        routed,
        counts,
        top_k=4,
        capacity=capacity,
        ep_size=ep_size,
        dp_size=dp_size,
        num_shards=num_shards,
        cost="gpt-oss-20b",
    )


def main() -> None:
    """Print one comparison a capacity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capacity", type=int, action="append", help="tokens of a cell; default 4096 and 2048")
    parser.add_argument("--planner", action="append", help="planner spec; repeat")
    parser.add_argument("--time-limit", type=float, default=2.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-shards", type=int, default=1)
    options = parser.parse_args()
    folder = os.environ.get("ROUTEPACK_DATA")
    if not folder:
        raise SystemExit("set ROUTEPACK_DATA to the folder of the public data sets")
    rp.warm_up()
    print(
        f"python {platform.python_version()}, numpy {np.__version__}, {platform.machine()}, {os.cpu_count()} processors"
    )
    for capacity in options.capacity or [4096, 2048]:
        problem = load(Path(folder), capacity, num_shards=options.num_shards)
        runs = rp.compare(
            problem, options.planner or PLANNERS, time_limit=options.time_limit, seeds=options.seeds, progress=False
        )
        print(f"\n{runs!r}", flush=True)


if __name__ == "__main__":
    main()
