"""Question: how do time and memory grow with samples, layers, experts, ranks and blocks; what does a large step cost?

Command: ``python experiments/scaling.py`` (``--growth``, ``--middle`` or ``--large``
for one part; ``--figure FILE`` keeps the figure of the growth rows, ``--csv FILE``
their measurements). Growth rows are thread-CPU seconds, best of a few repeats,
over four or five sizes of one quantity; the exponent is the slope of log time on
log size with its 95 % Student interval. The large parts run in a process of their
own, so that peak memory is theirs; counts are uint16 and stay so.

Expected rows: exponents of at most 1 where the complexity is linear (within the
interval), 2 for the pair merging of blocks; proposals nearly flat in N, but not
quite: an exponent of about 0.3 between 512 and 8192 samples; N 2048, L 40,
E 256, P 32 planned in at most 10 s; N 8192, L 60, E 512, P 64, D 256, G 4 in at
most 60 s and 6 GB.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

import routepack_opt as rp
from routepack_opt import bounds, synthetic
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.moves import BlockLoads, MoveTables
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.planning import solve
from routepack_opt.problem import Problem
from routepack_opt.score import evaluate
from routepack_opt.solvers import leveling, replacing
from routepack_opt.solvers.lpt import lpt_ranks
from routepack_opt.solvers.seeds import EdpAwarePair, RandomizedBestFit

#: (paper symbol, meaning, name in this package)
SYMBOLS = (
    ("n", "samples of a step", "N, num_samples"),
    ("B", "bins a seed fills = cells; blocks where it merges pairs", "R·D cells, R·G blocks"),
    ("R*", "rows", "R, num_rows"),
    ("q", "seeds", "len(annealing.seeds)"),
    ("P", "EP ranks", "P, ep_size"),
    ("P_pop", "chains of the population", "annealing.num_chains"),
    ("N_T", "temperature levels", "annealing.num_levels"),
    ("K", "moves of a chain at one level", "annealing.moves_per_level"),
    ("F", "evaluation of a whole schedule", "score.evaluate"),
    ("A_route", "aggregation of routing counts", "bounds.window_load, replacing.sum_blocks"),
    ("L, E, G, D", "layers, experts, shards, DP slots", "the same"),
)
COST = CostModel(
    (
        OperatorClass("linear", Fraction(264), Fraction(0)),
        OperatorClass("softmax", Fraction(15), Fraction(93)),
    )
)


def pooled(
    num_samples: int = 512,
    *,
    num_layers: int = 8,
    num_experts: int = 64,
    ep_size: int = 8,
    num_shards: int = 2,
    samples_per_cell: int = 4,
) -> Problem:
    """A problem of any size at no cost: samples drawn from a pool of 64; 16 DP slots, rows follow the samples."""
    rng = np.random.default_rng(0)
    pool = np.clip(np.exp(rng.normal(6.0, 0.6, 64)), 32, 2000).astype(np.int64)
    share = rng.dirichlet(np.full(num_experts, 3.0), size=(64, num_layers))
    counts = np.floor(share * pool[:, None, None]).astype(np.int64)
    counts[:, :, 0] += pool[:, None] - counts.sum(axis=2)
    chosen = rng.integers(0, 64, num_samples)
    rows = max(1, num_samples // (16 * samples_per_cell))
    capacity = max(int(1.15 * pool[chosen].sum() / (16 * rows)), 4096)
    return Problem.from_arrays(
        pool[chosen],
        counts.astype(np.uint16)[chosen],
        top_k=1,
        capacity=capacity,
        ep_size=ep_size,
        dp_size=16,
        num_shards=num_shards,
        num_rows=rows,
        cost=COST,
    )


def contiguous(problem: Problem) -> Placement:
    """The identity placement."""
    return Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)


def seconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Thread-CPU seconds, best of a few calls after one that is not counted."""
    work()
    best = np.inf
    for _ in range(repeats):
        start = time.thread_time()
        work()
        best = min(best, time.thread_time() - start)
    return float(best)


def slope(sizes: npt.ArrayLike, times: npt.ArrayLike) -> tuple[float, float, float]:
    """Exponent of a power law and its 95 % interval."""
    fit = stats.linregress(np.log(sizes), np.log(times))
    half = stats.t.ppf(0.975, len(np.asarray(sizes)) - 2) * fit.stderr
    return float(fit.slope), float(fit.slope - half), float(fit.slope + half)


def rows_of_growth() -> dict[str, tuple[str, str, str, list[int], Callable[[int], Callable[[], Any]]]]:
    """Row name → (term of the bound, quantity varied, expected exponent, sizes, size → work)."""

    def aggregate(**fixed: int) -> Callable[[int, str], Callable[[], Any]]:
        def build(size: int, name: str) -> Callable[[], Any]:
            problem = pooled(**{**fixed, name: size})
            blocks = np.arange(problem.num_samples) % 16
            return lambda: replacing.sum_blocks(problem.counts, blocks, num_blocks=16)

        return build

    def lpt(num_layers: int, num_experts: int, ep_size: int) -> Callable[[], Any]:
        load = np.random.default_rng(0).integers(1, 10**6, (num_layers, num_experts))
        return lambda: lpt_ranks(load, ep_size, refine=False)

    def seed(size: int) -> Callable[[], Any]:
        problem = pooled(size, num_layers=1, num_experts=8)
        return lambda: RandomizedBestFit().cells(problem, np.random.default_rng(0))

    def pairs(size: int) -> Callable[[], Any]:
        problem = pooled(size, num_layers=8, num_experts=64)
        placement = contiguous(problem)
        placement.rank_load(problem)
        return lambda: EdpAwarePair().cells(problem, placement, np.random.default_rng(0))

    def schedule(problem: Problem) -> tuple[Placement, Packing]:
        cells = np.arange(problem.num_samples) % problem.num_cells
        return contiguous(problem), Packing.from_cells(cells, dp_size=problem.dp_size)

    def evaluation(size: int) -> Callable[[], Any]:
        problem = pooled(size)
        placement, _ = schedule(problem)
        packing = leveling.level(problem, np.random.default_rng(0), num_proposals=2000)
        assert packing is not None
        plan = Plan.of(problem, placement, packing)
        return lambda: evaluate(problem, plan)

    def loads(problem: Problem) -> BlockLoads:
        placement, _ = schedule(problem)
        packing = leveling.level(problem, np.random.default_rng(0), num_proposals=2000)
        assert packing is not None
        tables = MoveTables.of(problem, placement)
        return BlockLoads(tables, packing.row_of_sample, packing.dp_slot_of_sample)

    def walk(problem: Problem) -> Callable[[], Any]:
        state = loads(problem)
        stream = np.array([1], dtype=np.uint64)
        weight = 1.0 / problem.unit_denominator
        heat = 3e-4 * state.levels[1] * weight / (problem.num_rows * problem.num_shards)
        return lambda: state.walk(stream, num_proposals=60_000, temperature=heat, energy_weights=(weight, weight, 0.0))

    def copy(size: int) -> Callable[[], Any]:
        problem = pooled(size)
        state = loads(problem)
        other = BlockLoads(state.tables, *state.packing())
        return lambda: [state.copy_from(other) for _ in range(50)]

    def spread(size: int) -> Callable[[], Any]:
        problem = pooled(size, num_layers=1, num_experts=8)
        return lambda: leveling.level(problem, np.random.default_rng(0), num_proposals=200_000)

    def visits(num_blocks: int, num_experts: int, ep_size: int) -> Callable[[], Any]:
        load = np.random.default_rng(0).integers(1, 10**4, (1, num_blocks, num_experts)).astype(np.int32)
        start = np.arange(num_experts)[None] // (num_experts // ep_size)
        return lambda: replacing.fit_ranks(load, start, ep_size=ep_size, sweeps=4000 / num_experts, descent=False)

    by_samples = aggregate(num_layers=16, num_experts=128)
    by_layers = aggregate(num_samples=512, num_experts=128)
    by_experts = aggregate(num_samples=512, num_layers=16)
    return {
        "aggregate counts, N": ("A_route", "N", "1", [256, 512, 1024, 2048], lambda n: by_samples(n, "num_samples")),
        "aggregate counts, L": ("A_route", "L", "1", [8, 16, 32, 64], lambda n: by_layers(n, "num_layers")),
        "aggregate counts, E": ("A_route", "E", "≤ 1", [64, 128, 256, 512], lambda n: by_experts(n, "num_experts")),
        "LPT, L": ("L(E log E + EP)", "L", "1", [16, 32, 64, 128], lambda n: lpt(n, 256, 16)),
        "LPT, E": ("L(E log E + EP)", "E", "1", [64, 128, 256, 512, 1024], lambda n: lpt(64, n, 16)),
        "LPT, P": ("L(E log E + EP)", "P", "≤ 1", [8, 16, 32, 64], lambda n: lpt(64, 512, n)),
        "seed packing, N (cells grow along)": ("nB log B", "N", "≤ 2", [512, 1024, 2048, 4096], seed),
        "pair merging, blocks": ("B²GLP", "N", "2", [1024, 2048, 4096, 8192], pairs),
        "evaluation, N": ("qR*(F + log R*)", "N", "1", [512, 1024, 2048, 4096], evaluation),
        "chain copies, N": ("P_pop(n + qR*)", "N", "≤ 1", [512, 1024, 2048, 4096, 8192], copy),
        "proposals, N": ("N_T·K·(LP + RG)", "N", "0", [512, 1024, 2048, 4096, 8192], lambda n: walk(pooled(n))),
        "proposals, L": (
            "N_T·K·(LP + RG)",
            "L",
            "≤ 1",
            [16, 32, 64, 128],
            lambda n: walk(pooled(512, num_layers=n, num_experts=16)),
        ),
        "proposals, P": (
            "N_T·K·(LP + RG)",
            "P",
            "≤ 1",
            [8, 16, 32, 64],
            lambda n: walk(pooled(512, num_layers=16, ep_size=n)),
        ),
        "spread proposals, N": ("leveling: O(S)", "N", "0", [512, 1024, 2048, 4096, 8192], spread),
        "expert visits, E": ("replacing: O(E·B)", "E", "1", [64, 128, 256, 512], lambda n: visits(16, n, 8)),
        "expert visits, blocks": ("replacing: O(E·B)", "B", "1", [8, 16, 32, 64, 128], lambda n: visits(n, 256, 8)),
        "expert visits, P": ("replacing: O(E·B)", "P", "0", [4, 8, 16, 32], lambda n: visits(16, 256, n)),
    }


def growth(options: argparse.Namespace) -> None:
    """Measure and print the growth rows and the symbol table."""
    print("\nSymbols of the paper's bound and the names used here")
    for symbol, meaning, name in SYMBOLS:
        print(f"  {symbol:12s} {meaning:56s} {name}")
    print(
        f"\n  {'row':36s} {'term':20s} {'over':5s} {'expected':>8s} {'exponent':>9s} {'95 % interval':>16s}   seconds"
    )
    measured: list[dict[str, Any]] = []
    for name, (term, quantity, expected, sizes, build) in rows_of_growth().items():
        times = [seconds(build(size)) for size in sizes]
        found, low, high = slope(sizes, times)
        measured += [
            {"row": name, "term": term, "quantity": quantity, "size": size, "seconds": value}
            for size, value in zip(sizes, times, strict=True)
        ]
        listed = "  ".join(f"{size}: {value * 1e3:.3g} ms" for size, value in zip(sizes, times, strict=True))
        print(
            f"  {name:36s} {term:20s} {quantity:5s} {expected:>8s} {found:9.2f} [{low:6.2f}, {high:5.2f}]   {listed}",
            flush=True,
        )
    print("\nBytes of a chain and of the tables all chains share, N 512 to 8192 (L 8, P 8)")
    for size in (512, 2048, 8192):
        problem = pooled(size)
        tables = MoveTables.of(problem, contiguous(problem))
        shared = sum(array.nbytes for array in tables.kernel_tables if isinstance(array, np.ndarray))
        packing = leveling.level(problem, np.random.default_rng(0), num_proposals=0)
        assert packing is not None
        state = BlockLoads(tables, packing.row_of_sample, packing.dp_slot_of_sample)
        own = sum(array.nbytes for array in state._state)
        print(f"  N {size:5d}: tables {shared / 2**20:8.2f} MiB, chain {own / 2**20:8.2f} MiB")
    frame = pd.DataFrame(measured)
    if options.csv:
        frame.to_csv(options.csv, index=False)
    if options.figure:
        draw(frame, options.figure)


def draw(frame: pd.DataFrame, path: Path) -> None:
    """One small panel a row: seconds against size, log-log, with the fitted line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(frame["row"]))
    columns = 4
    figure, axes = plt.subplots(
        -(-len(names) // columns), columns, figsize=(11, 2.1 * -(-len(names) // columns)), layout="constrained"
    )
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes.flat, names, strict=False):
        part = frame[frame["row"] == name]
        exponent, low, high = slope(part["size"], part["seconds"])
        fit = np.exp(np.polyval(np.polyfit(np.log(part["size"]), np.log(part["seconds"]), 1), np.log(part["size"])))
        axis.loglog(part["size"], part["seconds"], "o", markersize=4)
        axis.loglog(part["size"], fit, "-", linewidth=1, label=f"{exponent:.2f} [{low:.2f}, {high:.2f}]")
        axis.set_title(name, fontsize=8)
        axis.set_xlabel(part["quantity"].iloc[0], fontsize=7)
        axis.set_ylabel("s", fontsize=7)
        axis.tick_params(labelsize=6)
        axis.legend(fontsize=6, frameon=False)
    figure.savefig(path, dpi=150)


SHAPES: dict[str, dict[str, int]] = {
    "middle": {
        "num_samples": 2048,
        "num_layers": 40,
        "num_experts": 256,
        "ep_size": 32,
        "dp_size": 64,
        "num_shards": 2,
    },
    "large": {
        "num_samples": 8192,
        "num_layers": 60,
        "num_experts": 512,
        "ep_size": 64,
        "dp_size": 256,
        "num_shards": 4,
    },
}
LIMITS = {"middle": (10.0, None), "large": (60.0, 6.0)}


def plan_once(name: str, options: argparse.Namespace) -> None:
    """Plan one large step in this process and print every stage."""
    shape = SHAPES[name]
    threads = options.threads
    routing = synthetic.RoutingModel(
        num_layers=shape["num_layers"],
        num_experts=shape["num_experts"],
        popularity_sd=0.35,
        block_sd=0.1,
        domain_sd=0.32,
        group_sd=0.38,
        sample_sd=0.52,
    )
    rp.warm_up(["alternating"])
    start = time.perf_counter()
    arrays = synthetic.generate_arrays(
        routing, synthetic.LengthModel(mean=7946.0), num_samples=shape["num_samples"], seed=1
    )
    counts = arrays.counts.astype(np.uint16, copy=False)
    drawn = time.perf_counter() - start
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begin = time.perf_counter()
    problem = Problem.from_arrays(
        arrays.lengths,
        counts,
        top_k=routing.top_k,
        capacity=32_768,
        ep_size=shape["ep_size"],
        dp_size=shape["dp_size"],
        num_shards=shape["num_shards"],
        cost=COST,
    )
    built = time.perf_counter() - begin
    result = solve(problem, options.planner, time_limit=options.time_limit, num_threads=threads, progress=False)
    whole = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    best = bounds.best_bound(problem)
    assert result.score is not None
    most_seconds, most_gib = LIMITS[name]
    print(f"\n{name}: {problem!r}\n  counts {counts.nbytes / 2**20:.0f} MiB ({counts.dtype}), drawn in {drawn:.1f} s")
    stages = ", ".join(f"{stage} {value:.2f} s" for stage, value in result.trace.stages.items())
    print(f"  problem checked and built {built:.2f} s; {options.planner}: {result.runtime:.2f} s ({stages})")
    print(f"  gap {100 * bounds.gap(result.score, best):.3f} %, R {problem.num_rows}")  # type: ignore[operator]
    for point in result.trace.incumbents:
        print(f"    after {point.time:6.2f} s: {100 * (point.levels[0] / best.value - 1):.3f} %")
    verdict = "reached" if whole <= most_seconds and (most_gib is None or peak <= most_gib) else "MISSED"
    print(
        f"  from counts to plan {whole:.2f} s, peak memory {peak:.2f} GiB ({base:.2f} before planning); target "
        f"{most_seconds:.0f} s" + (f", {most_gib:.0f} GiB" if most_gib else "") + f": {verdict}",
        flush=True,
    )


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--middle", action="store_true")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--planner", default="alternating")
    parser.add_argument("--time-limit", type=float, help="seconds of the planner in the large parts; default 8 and 40")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--here", choices=sorted(SHAPES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        options.time_limit = options.time_limit or {"middle": 8.0, "large": 40.0}[options.here]
        plan_once(options.here, options)
        return
    everything = not (options.growth or options.middle or options.large)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors")
    if options.growth or everything:
        rp.warm_up()
        growth(options)
    for name in SHAPES:
        if getattr(options, name) or everything:
            command = [sys.executable, __file__, "--here", name, "--planner", options.planner]
            command += ["--threads", str(options.threads)]
            if options.time_limit:
                command += ["--time-limit", str(options.time_limit)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
