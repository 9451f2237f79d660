"""Question: how many routed ids per core-second does counting take, raw and end to end?

Command: ``python experiments/benchmark_counting.py``

Thread-CPU time, best of several runs, single thread. Ids are drawn without
replacement from a skewed popularity (Gumbel top-k), Flash-like: L 40, E 256,
K 8. Beside the throughput stands the clock the core really ran at (a chain of
dependent additions takes one cycle each) and what a bare histogram loop
without any check reaches: the loop is bound by one store per id, so ids per
cycle is the figure that carries over to another machine.

Expected rows (AMD EPYC 7003, one shared vCPU that did 1.3 G plain stores a second at the
time): bare loop 1.5-2.0, count_routing 1.0-1.5, np.bincount 0.1 G ids/s/core. A target in
ids per second needs a core that stores faster; compare ids per cycle.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import njit

from routepack_opt.counting import RoutingCounter, count_routing
from routepack_opt.formats import verl


@njit(cache=True, nogil=True)
def dependent_adds(n: int, start: int) -> int:
    """A chain of 2 n dependent one-cycle operations."""
    x = np.uint64(start)
    a = np.uint64(0x9E3779B97F4A7C15)
    for _ in range(n):
        x = (x + a) ^ a
    return int(x)


@njit(cache=True, nogil=True)
def bare_histogram(words: Any, num_layers: int, width: Any, histogram: Any) -> None:
    """Histogram of rows of uint64 words (four 16-bit ids each, K = 8) without any check."""
    one = np.uint16(1)
    mask = np.uint64(0xFFFF)
    s16 = np.uint64(16)
    s32 = np.uint64(32)
    s48 = np.uint64(48)
    for t in range(words.shape[0]):
        row = words[t]
        start = np.uint64(0)
        j = np.uint64(0)
        for _ in range(num_layers):
            for _ in range(2):
                word = row[j]
                j += np.uint64(1)
                histogram[start + (word & mask)] += one
                histogram[start + ((word >> s16) & mask)] += one
                histogram[start + ((word >> s32) & mask)] += one
                histogram[start + (word >> s48)] += one
            start += width


def cpu_seconds(call: Callable[[], object]) -> float:
    """Thread-CPU seconds of a call."""
    begin = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - begin) * 1e-9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    num_layers, num_experts, top_k = 40, 256, 8
    rng = np.random.default_rng(0)
    popularity = rng.gamma(1.5, size=(num_layers, num_experts)).astype(np.float32)
    base = np.log(popularity)
    ids = np.empty((options.tokens, num_layers, top_k), dtype=np.int16)
    for start in range(0, options.tokens, 1024):
        stop = min(options.tokens, start + 1024)
        noise = -np.log(rng.exponential(size=(stop - start, num_layers, num_experts)).astype(np.float32))
        ids[start:stop] = np.argpartition(-(base + noise), top_k, axis=2)[:, :, :top_k]
    cuts = np.sort(rng.choice(np.arange(1, options.tokens), options.samples - 1, replace=False))
    offsets = np.concatenate([[0], cuts, [options.tokens]])
    lengths = np.diff(offsets) + 1

    num_adds = 20_000_000
    histogram = np.zeros(num_layers * num_experts, dtype=np.uint16)
    words = ids.reshape(options.tokens, -1).view(np.uint64)
    width = np.uint64(num_experts)

    def stream() -> object:
        counter = RoutingCounter(num_experts=num_experts)
        for i in range(options.samples):
            counter.add(ids[offsets[i] : offsets[i + 1]], length=int(lengths[i]))
        return counter.finish()

    def run(array: Any, **more: Any) -> Callable[[], object]:
        return lambda: count_routing(array, offsets, num_experts=num_experts, lengths=lengths, **more)

    longest = int(np.diff(offsets).max())
    padded = np.zeros((options.samples, longest + 1, num_layers, top_k), dtype=np.int16)
    attention = np.zeros((options.samples, longest + 1), dtype=bool)
    for i in range(options.samples):
        part = ids[offsets[i] : offsets[i + 1]]
        padded[i, : len(part)] = part
        attention[i, : len(part) + 1] = True
    batch = {"routed_experts": padded, "attention_mask": attention}

    cases: dict[str, Callable[[], object]] = {
        "bare histogram, no checks, int16": lambda: bare_histogram(words, num_layers, width, histogram),
        "count_routing, end to end, int16": run(ids),
        "RoutingCounter, sample by sample, int16": stream,
        "verl.read, padded tensors to batch, int16": lambda: verl.read(batch, num_experts=num_experts),
        "count_routing, all K ids compared, int16": run(ids, check_distinct=True),
        "count_routing, end to end, uint8": run(ids.astype(np.uint8)),
        "count_routing, end to end, int32": run(ids.astype(np.int32)),
        "np.bincount with offsets, no checks, int16": lambda: np.bincount(
            (ids.astype(np.int64) + (np.arange(num_layers) * num_experts)[:, None]).ravel(),
            minlength=num_layers * num_experts,
        ),
    }

    def chain() -> object:
        return dependent_adds(num_adds, 1)

    chain()
    for call in cases.values():
        call()
    best = dict.fromkeys(cases, float("inf"))
    fastest_chain = float("inf")
    for _ in range(options.repeats):  # one round over all cases at a time, so that they share the machine's moods
        fastest_chain = min(fastest_chain, cpu_seconds(chain))
        for name, call in cases.items():
            best[name] = min(best[name], cpu_seconds(call))
    clock = 2 * num_adds / fastest_chain
    rows = [
        {
            "case": name,
            "g_ids_per_second": ids.size / seconds / 1e9,
            "ids_per_cycle": ids.size / seconds / clock,
        }
        for name, seconds in best.items()
    ]
    machine = {
        "processor": platform.processor() or platform.machine(),
        "clock_ghz": clock / 1e9,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "ids": ids.size,
    }
    if options.json:
        print(json.dumps({"machine": machine, "rows": rows}))
        return
    print(", ".join(f"{key} {value:.2f}" if key == "clock_ghz" else f"{key} {value}" for key, value in machine.items()))
    for row in rows:
        print(f"{row['case']:45s} {row['g_ids_per_second']:6.2f} G ids/s/core {row['ids_per_cycle']:6.2f} ids/cycle")


if __name__ == "__main__":
    main()
