"""Question: how uneven are the frozen families, beside routing that real models produced?

Command: ``python experiments/family_statistics.py`` prints the table;
``--write`` also replaces the statistics at the end of the families' data file,
``--only NAME`` measures some families. Real data is read from the folder in
``ROUTEPACK_DATA`` when it is set: per-sample counts of gpt-oss-20b (E 32, top-4,
4 experts a rank at P 8) and window loads of OLMoE-1B-7B (E 64, top-8, layers 0,
7 and 15, where per-sample figures do not exist).

Expected rows: gpt-oss-20b CV 0.71 (max 1.03), imbalance 1.43/1.78, per sample
1.86/2.54 contiguous and 1.75/2.45 after LPT, TV 0.31; the families
``*-gpt-oss-like`` near it at P 8; ``*-low`` per sample after LPT 1.33/1.61 (Tiny)
and 1.24/1.41 (Flash). At P 16 and P 32 a rank holds fewer experts of the same
routing, so imbalance grows.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import routepack_opt.data
from routepack_opt import files
from routepack_opt.synthetic import RoutingStatistics, families, family, routing_statistics

MARKER = "# --- statistics, written by experiments/family_statistics.py ---"
EP_SIZE = 8


def real_data(folder: Path) -> Iterator[tuple[str, RoutingStatistics]]:
    """Statistics of recorded routing."""
    with np.load(folder / "routing_gptoss20b_per_sample" / "counts.npz") as archive:
        yield "gpt-oss-20b (recorded)", routing_statistics(archive["a"], ep_size=EP_SIZE, top_k=4)
    with np.load(folder / "routing_olmoe_allenai_domain_counts" / "counts.npz") as archive:
        domains = [name for name in archive.files if name.startswith("olmoe__")]
        window = np.stack([archive[name] for name in sorted(domains)]).astype(np.int64)
    # Domains stand in for samples: their imbalance and distance are those of whole corpora.
    yield "OLMoE-1B-7B (domains)", routing_statistics(window, ep_size=EP_SIZE, top_k=8)


def row(name: str, ep_size: int, s: RoutingStatistics, *, lengths: bool = True) -> str:
    """One line of the table."""
    quantiles = " ".join(f"{q}" for q in s.length_quantiles) if lengths else "-"
    return (
        f"{name:24s} {ep_size:3d}  {s.load_cv[0]:.2f}/{s.load_cv[1]:.2f}  {s.imbalance[0]:.2f}/{s.imbalance[1]:.2f}  "
        f"{s.sample_imbalance[0]:.2f}/{s.sample_imbalance[1]:.2f}  "
        f"{s.sample_imbalance_lpt[0]:.2f}/{s.sample_imbalance_lpt[1]:.2f}  {s.total_variation:.2f}  "
        f"{s.most_visited:.2f}  {quantiles}"
    )


def section(name: str, ep_size: int, s: RoutingStatistics) -> str:
    """The statistics of one data set as TOML."""

    def pair(values: tuple[float, float]) -> str:
        return f"[{values[0]:.3f}, {values[1]:.3f}]"

    return "\n".join(
        [
            f'[statistics."{name}"]',
            f"ep_size = {ep_size}",
            f"load_cv = {pair(s.load_cv)}",
            f"imbalance = {pair(s.imbalance)}",
            f"sample_imbalance = {pair(s.sample_imbalance)}",
            f"sample_imbalance_lpt = {pair(s.sample_imbalance_lpt)}",
            f"total_variation = {s.total_variation:.3f}",
            f"most_visited = {s.most_visited:.3f}",
            f"length_quantiles = {list(s.length_quantiles)}",
            "",
        ]
    )


def main() -> None:
    """Print the table; with ``--write`` also store it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=families(), help="measure this family (repeatable)")
    parser.add_argument("--write", action="store_true", help="replace the statistics in the data file")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write stores all families; leave out --only")
    print("load CV: mean/max over layers; imbalance: window, mean/max over layers, contiguous; per sample: mean/p95;")
    print("lengths: min, 5, 25, 50, 75, 95 %, max; visit: median share of a sample's tokens at its most visited expert")
    print("name                       P  load CV    imbalance  per sample after LPT  TV    visit length quantiles")
    parts = []
    folder = os.environ.get("ROUTEPACK_DATA")
    if folder is None:
        print("(ROUTEPACK_DATA is not set: no recorded data)")
        if options.write:
            parser.error("--write needs ROUTEPACK_DATA for the recorded rows")
    else:
        for name, statistics in real_data(Path(folder)):
            print(row(name, EP_SIZE, statistics, lengths="gpt" in name), flush=True)
            parts.append(section(name, EP_SIZE, statistics))
    for name in options.only or families():
        problem = family(name)
        statistics = routing_statistics(problem.counts, problem.lengths, ep_size=problem.ep_size, top_k=problem.top_k)
        print(row(name, problem.ep_size, statistics), f" R {problem.num_rows} fill {problem.fill:.3f}", flush=True)
        parts.append(section(name, problem.ep_size, statistics))
    if options.write:
        path = Path(next(iter(routepack_opt.data.__path__))) / "families.toml"
        head = path.read_text(encoding="utf-8").split(MARKER)[0].rstrip("\n")
        files.write_text(path, f"{head}\n\n{MARKER}\n\n" + "\n".join(parts))


if __name__ == "__main__":
    main()
