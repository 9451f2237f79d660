"""Question: how many published instances with known optima are found and proven, and in what time?

Command: ``ROUTEPACK_DATA=... python experiments/known_optima.py [--time-limit 10] [--every 1]``

Families, all from the folder named by ``ROUTEPACK_DATA``:

- *bin packing* (Falkenauer u and t, Waescher, hard28): row counts with one DP
  slot, :func:`routepack_opt.rows.prove_bins`;
- *balanced partition*: one layer of expert loads, experts padded with zero
  loads to a multiple of the ranks; LPT, exchanges of up to four experts, kicks;
- *triplets as placement*: three experts a rank, the optimum is the capacity.
  Local search is shown beside the bin-packing proof, whose packing is such a
  placement because no bin can hold four of these items;
- *P||Cmax*: jobs without cardinality. :func:`placement_bound` on loads padded
  with zeros up to as many slots a rank as jobs is cardinality-free; it must
  not pass the known upper value.

Found: the value equals the known optimum. Proven: value and our own bound are
equal. Expected rows: bin packing all found and proven in about seven seconds of
CPU at most, so that a slower or shared machine leaves one or two of hard28
(BPP144, BPP419) open at ten; partitions three quarters, the rest one to a few
units off; triplets by local search none, as bins all; P||Cmax never above, and
equal on every closed instance.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt.bounds import placement_bound
from routepack_opt.rows import prove_bins
from routepack_opt.solvers.lpt import kicked_ranks, lpt_ranks, rank_loads

IntArray = npt.NDArray[np.int64]
Outcome = tuple[str, bool, bool, float, float]  # name, found, proven, wall and CPU seconds


def data_folder() -> Path:
    """The folder of the instances, from the environment."""
    folder = os.environ.get("ROUTEPACK_DATA")
    if not folder:
        raise SystemExit("set ROUTEPACK_DATA to the folder that holds the instances")
    return Path(folder)


def bin_packing_instances(folder: Path) -> Iterator[tuple[str, IntArray, int, int]]:
    """Name, lengths, capacity and optimum of the 180 instances."""
    root = folder / "packing_falkenauer_hard28_mit"
    with (root / "known_optima.csv").open() as file:
        optimum = {row["name"]: int(row["optimum"]) for row in csv.DictReader(file)}
    for path in sorted((root / "Falkenauer").glob("*.txt")):
        words = path.read_text().split()
        at = 1
        for _ in range(int(words[0])):
            name, capacity, count = words[at], round(float(words[at + 1])), int(words[at + 2])
            lengths = np.array([round(float(word)) for word in words[at + 4 : at + 4 + count]], dtype=np.int64)
            at += 4 + count
            yield f"Falkenauer_{name}", lengths, capacity, optimum[f"Falkenauer_{name}"]
    for part in ("Triplets", "Waescher", "hard28"):
        for path in sorted((root / part).glob("*.txt")):
            words = path.read_text().split()
            lengths = np.array([int(word) for word in words[2:]], dtype=np.int64)
            yield path.stem, lengths, int(words[1]), optimum[path.stem]


def partition_instances(folder: Path) -> Iterator[tuple[str, IntArray, int, int]]:
    """Name, values (descending, so that the published solution does not show), groups and optimum."""
    root = folder / "partition_bmnp_ccby"
    with (root / "verified.csv").open() as file:
        optimum = {row["file"].replace("/JSON/", "__").replace("/", "__"): row for row in csv.DictReader(file)}
    for path in sorted(root.glob("*.json")):
        published = json.loads(path.read_text())["partition"]
        values = np.array(sorted((v for group in published["subsets"] for v in group), reverse=True), dtype=np.int64)
        row = optimum[path.name]
        yield path.stem, values, int(published["k"]), int(row["optimum_makespan"])


def machine_instances(folder: Path) -> Iterator[tuple[str, IntArray, int, int, int]]:
    """Name, jobs, machines, known lower and upper value of the P||Cmax instances."""
    root = folder / "pcmax_franca_frangioni_mit"
    with (root / "bounds.csv").open() as file:
        known = {row["name"]: (int(row["lower"]), int(row["upper"])) for row in csv.DictReader(file)}
    for line in (root / "instances.jsonl").read_text().splitlines():
        instance = json.loads(line)
        lower, upper = known[instance["name"]]
        yield instance["name"], np.array(instance["p"], dtype=np.int64), int(instance["m"]), lower, upper


def padded(values: IntArray, ep_size: int) -> IntArray:
    """One layer of loads, zeros added until the number of experts is a multiple of the ranks."""
    load = np.zeros((1, -(-values.size // ep_size) * ep_size), dtype=np.int64)
    load[0, : values.size] = values
    return load


def place_exactly(values: IntArray, ep_size: int, time_limit: float, *, seed: int = 0) -> tuple[int, int]:
    """Value and bound of one layer: LPT, larger and larger exchanges, then kicks until the time is over."""
    end = time.perf_counter() + time_limit
    load = padded(values, ep_size)
    bound = int(placement_bound(load, ep_size)[0])
    for size in (2, 4):
        ranks = lpt_ranks(load, ep_size, max_exchange=size)
        value = int(rank_loads(load, ranks, ep_size).max())
        if value == bound:
            return value, bound
    ranks = kicked_ranks(
        load,
        ranks,
        ep_size,
        kicks=10**9,
        rng=np.random.default_rng(seed),
        max_exchange=4,
        stopped=lambda: time.perf_counter() > end,
    )
    return int(rank_loads(load, ranks, ep_size).max()), bound


def row_count(lengths: IntArray, capacity: int, optimum: int, time_limit: float) -> tuple[bool, bool]:
    """Found and proven for one bin-packing instance; the packing is checked."""
    proof = prove_bins(lengths, capacity, time_limit=time_limit)
    used = np.zeros(proof.num_bins, dtype=np.int64)
    np.add.at(used, proof.bin_of_item, lengths)
    if used.max() > capacity or proof.bound > optimum or proof.num_bins < optimum:
        raise AssertionError(f"{proof} is wrong: the optimum is {optimum}")
    return proof.num_bins == optimum, proof.proven


def triplet_placement(lengths: IntArray, capacity: int, time_limit: float) -> tuple[bool, bool]:
    """Placement of three experts a rank, through the bins."""
    ep_size = lengths.size // 3
    proof = prove_bins(lengths, capacity, time_limit=time_limit)
    if proof.num_bins != ep_size:
        return False, False
    ranks = proof.bin_of_item[None]
    if (np.bincount(ranks[0], minlength=ep_size) != 3).any():
        raise AssertionError("a bin of a triplet instance does not hold three items")
    value = int(rank_loads(lengths[None], ranks, ep_size).max())
    return value == capacity, value == int(placement_bound(lengths[None], ep_size)[0])


def report(title: str, outcomes: list[Outcome], *, verbose: bool) -> None:
    """Print one family."""
    found = sum(outcome[1] for outcome in outcomes)
    proven = sum(outcome[2] for outcome in outcomes)
    wall = np.array([outcome[3] for outcome in outcomes])
    cpu = np.array([outcome[4] for outcome in outcomes])
    print(
        f"{title:34} {len(outcomes):5} {found:6} {proven:7} {np.median(wall):9.3f} {wall.max():8.2f} "
        f"{np.median(cpu):9.3f} {cpu.max():8.2f}",
        flush=True,
    )
    if verbose:
        missed = [name for name, was_found, was_proven, *_ in outcomes if not (was_found and was_proven)]
        if missed:
            print("    open:", ", ".join(missed))


def partition(values: IntArray, ep_size: int, optimum: int, time_limit: float) -> tuple[bool, bool]:
    """Found and proven for one layer of loads."""
    value, bound = place_exactly(values, ep_size, time_limit)
    if bound > optimum or value < optimum:
        raise AssertionError(f"value {value} and bound {bound} around the optimum {optimum}")
    return value == optimum, value == bound


def timed(name: str, call: Callable[..., tuple[bool, bool]], *arguments: Any) -> Outcome:
    """Run one instance."""
    wall, cpu = time.perf_counter(), time.process_time()
    found, proven = call(*arguments)
    return name, bool(found), bool(proven), time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds an instance")
    parser.add_argument("--every", type=int, default=1, help="take every n-th instance")
    parser.add_argument("--family", action="append", choices=("bins", "partition", "triplets", "machines"))
    arguments = parser.parse_args()
    wanted = arguments.family or ["bins", "partition", "triplets", "machines"]
    folder, limit, every = data_folder(), arguments.time_limit, arguments.every
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}, limit {limit} s")
    prove_bins([4] * 7 + [3] * 7, 10, time_limit=60)  # compile before the clock runs
    lpt_ranks(np.arange(12)[None], 3, max_exchange=4)
    print(f"{'family':34} {'num':>5} {'found':>6} {'proven':>7} {'wall med':>9} {'max':>8} {'CPU med':>9} {'max':>8}")
    if "bins" in wanted:
        groups: dict[str, list[Outcome]] = {}
        for name, lengths, capacity, optimum in list(bin_packing_instances(folder))[::every]:
            family, _, rest = name.partition("_")
            group = f"bins Falkenauer {rest[0]}" if family == "Falkenauer" else f"bins {family}"
            groups.setdefault(group, []).append(timed(name, row_count, lengths, capacity, optimum, limit))
        for group, outcomes in groups.items():
            report(group, outcomes, verbose=True)
        report("bins, all", [outcome for outcomes in groups.values() for outcome in outcomes], verbose=False)
    if "partition" in wanted:
        cases = list(partition_instances(folder))[::every]
        report("balanced partition", [timed(case[0], partition, *case[1:], limit) for case in cases], verbose=True)
    if "triplets" in wanted:
        triplets = [case for case in bin_packing_instances(folder) if case[0].startswith("Falkenauer_t")][::every]
        report(
            "triplets, local search (1 s)",
            [
                timed(name, partition, lengths, lengths.size // 3, capacity, 1.0)
                for name, lengths, capacity, _ in triplets
            ],
            verbose=False,
        )
        report(
            "triplets, as bins",
            [timed(name, triplet_placement, lengths, capacity, limit) for name, lengths, capacity, _ in triplets],
            verbose=True,
        )
    if "machines" in wanted:
        above = equal = closed = 0
        better = 0
        instances = list(machine_instances(folder))[::every]
        start = time.process_time()
        for _, jobs, machines, lower, upper in instances:
            load = np.zeros((1, machines * jobs.size), dtype=np.int64)
            load[0, : jobs.size] = jobs
            bound = int(placement_bound(load, machines)[0])
            above += bound > upper
            closed += lower == upper
            equal += lower == upper == bound
            better += bound > lower
        print(
            f"P||Cmax bound: {len(instances)} instances, above the known upper value {above}, closed {closed}, "
            f"equal there {equal}, above the listed lower value {better}, {time.process_time() - start:.2f} s CPU"
        )


if __name__ == "__main__":
    main()
