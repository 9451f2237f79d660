"""A fast part of the published instances with known optima; the whole table is experiments/known_optima.py."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from routepack_opt.bounds import placement_bound
from routepack_opt.rows import least_rows

if not os.environ.get("ROUTEPACK_DATA"):
    pytest.skip("ROUTEPACK_DATA is not set: no published instances", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "known_optima.py"
spec = importlib.util.spec_from_file_location("known_optima", SCRIPT)
known_optima = importlib.util.module_from_spec(spec)
spec.loader.exec_module(known_optima)

FOLDER = Path(os.environ["ROUTEPACK_DATA"])
BINS = {name: case for name, *case in known_optima.bin_packing_instances(FOLDER)}
PARTITIONS = {name: case for name, *case in known_optima.partition_instances(FOLDER)}
MACHINES = list(known_optima.machine_instances(FOLDER))


def test_all_families_are_read():
    assert (len(BINS), len(PARTITIONS), len(MACHINES)) == (180, 31, 780)
    assert all(lengths.min() > 0 and lengths.max() <= capacity for lengths, capacity, _ in BINS.values())
    assert sum("Falkenauer_t" in name for name in BINS) == 55


@pytest.mark.parametrize("name", BINS)
def test_simple_bound_and_heuristic_enclose_every_optimum(name):
    lengths, capacity, optimum = BINS[name]
    counted = least_rows(lengths, capacity, 1)
    assert counted.bound <= optimum <= counted.num_rows


@pytest.mark.parametrize(
    "name",
    [
        "Falkenauer_u120_08",
        "Falkenauer_u250_13",
        "Falkenauer_t120_00",
        "Hard28_BPP119",  # the relaxation is one bin short
        "Waescher_TEST0022",
        "Waescher_TEST0065",
        "Waescher_TEST0014",
    ],
)
def test_hard_row_counts_are_proven(name):
    lengths, capacity, optimum = BINS[name]
    assert known_optima.row_count(lengths, capacity, optimum, 60.0) == (True, True)


def test_triplets_are_placements_of_three_experts_a_rank():
    lengths, capacity, _ = BINS["Falkenauer_t120_10"]
    assert known_optima.triplet_placement(lengths, capacity, 60.0) == (True, True)


@pytest.mark.parametrize("part", ["k-3-limit-334", "k-7-limit-143", "k-27-limit-38", "k-19-limit-53", "k-63-limit-16"])
def test_balanced_partitions_are_found_and_proven(part):
    (case,) = [case for name, case in PARTITIONS.items() if f"__{part}" in name]
    values, ep_size, optimum = case
    assert known_optima.place_exactly(values, ep_size, 0.0) == (optimum, optimum)


@pytest.mark.parametrize("name", PARTITIONS)
def test_partition_bounds_equal_the_optimum(name):
    values, ep_size, optimum = PARTITIONS[name]
    assert placement_bound(known_optima.padded(values, ep_size), ep_size).tolist() == [optimum]


def test_cardinality_free_bound_is_never_above_and_equal_on_closed_instances():
    closed = equal = 0
    for name, jobs, machines, lower, upper in MACHINES:
        load = np.zeros((1, machines * jobs.size), dtype=np.int64)
        load[0, : jobs.size] = jobs
        bound = int(placement_bound(load, machines)[0])
        assert bound <= upper, name
        closed += lower == upper
        equal += lower == upper == bound
    assert closed == equal == 439
