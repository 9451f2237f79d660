"""Question: what does an ablation say, pair by pair? (Each study file states its own question.)

Command: ``python experiments/ablations/report.py experiments/ablations/packing_objective.toml …``
runs what is not finished of each study (``--jobs`` at a time), then prints the mean
first level of every planner, its certified gap, and its paired difference from the
study's reference with intervals and Holm-adjusted p-values. ``--out`` is the folder
above the results, ``--figure`` also saves a forest plot of the differences.

The unit of pairing is a drawn problem (family seed or step): each is planned once by
every planner, so pairs are independent. Expected rows stand in the README beside
this script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from routepack_opt import study
from routepack_opt.errors import RoutePackError

#: Of every study: the column whose levels are compared, the level they are compared with, and what splits the tests.
REFERENCES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "placement": ("label", "lpt+annealing", ("case",)),
    "placement-exact": ("label", "lpt+annealing", ("case",)),
    "packing-objective": ("label", "both", ("case",)),
    "energy-weights": ("label", "paper", ("case",)),
    "seeding": ("label", "all three", ("iteration_limit",)),
    "population": ("label", "base", ("case",)),
    "resampling": ("packer.resampling", "True", ("packer.num_chains",)),
    "extra-rows": ("label", "lpt+annealing", ("case",)),
    "cluster-size": ("label", "lpt+annealing", ("case",)),
    "correlation": ("label", "lpt+annealing", ("case",)),
    "capacity": ("label", "lpt+annealing", ("case",)),
    "staleness": ("case", "exact", ("label",)),
}


def tidy(table: study.StudyTable) -> pd.DataFrame:
    """Rows of a study with ``case`` (the problem without its draw) and ``draw`` (the seed or step drawn)."""
    frame = table.to_frame()
    frame["case"] = frame["problem"].str.replace(r", (seed|step) \d+", "", regex=True)
    frame["draw"] = frame["problem"].str.extract(r"((?:seed|step) \d+)", expand=False).fillna("-")
    frame["gap_percent"] = 100 * pd.to_numeric(frame["gap"])
    return frame


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean first level and gap of every case, planner and limit over the draws."""
    keys = ["case", "label", *(["iteration_limit"] if frame["iteration_limit"].nunique() > 1 else [])]
    grouped = frame.groupby(keys, sort=False, dropna=False)
    found = grouped.agg(
        draws=("draw", "nunique"),
        found=("max_shard_work", "count"),
        rows=("num_rows", "median"),
        first_level=("max_shard_work", "mean"),
        gap_percent=("gap_percent", "mean"),
        seconds=("runtime", "median"),
    )
    result: pd.DataFrame = found.reset_index()
    return result


def compared(frame: pd.DataFrame, name: str) -> study.Comparison:
    """Every level of the study's factor against its reference, pair by pair."""
    factor, reference, by = REFERENCES[name]
    return study.compare(frame, reference=reference, factor=factor, by=by, pair_on=("draw", "seed"))


def report(path: Path, out: Path, num_jobs: int, figure: bool) -> None:
    """Run and print one study."""
    table = study.run(path, out=out / path.stem, num_jobs=num_jobs, keep_going=True)
    if table.name not in REFERENCES:
        raise SystemExit(f"{path}: no reference is known for the study {table.name!r}; add it to REFERENCES")
    frame = tidy(table)
    print(f"\n## {table.name}: {table.question}\n")
    if table.failed:
        print(f"{len(table.failed)} of {len(table)} runs failed; the first: {table.failed[0].get('error')}\n")
    print(study.markdown(means(frame)))
    comparison = compared(frame, table.name)
    print(f"\nDifference of the first level from {comparison.factor} {comparison.reference!r}, pair by pair:\n")
    print(comparison.to_markdown())
    if figure:
        save(comparison, out / f"{path.stem}.pdf")


def save(comparison: study.Comparison, path: Path) -> None:
    """Save the forest plot of the differences."""
    from matplotlib import pyplot

    from routepack_opt import plot

    effects: Any = comparison.effects()
    figure, axes = pyplot.subplots(layout="constrained")
    plot.forest(effects, ax=axes)
    figure.savefig(path)
    pyplot.close(figure)
    print(f"\nforest plot: {path}")


def main() -> None:
    """Run the studies named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("studies", nargs="+", type=Path, help="study files")
    parser.add_argument("--out", type=Path, default=Path("results/ablations"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--figure", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in arguments.studies:
        try:
            report(path, arguments.out, arguments.jobs, arguments.figure)
        except RoutePackError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
