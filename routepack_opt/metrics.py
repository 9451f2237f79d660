"""What a load-balance table shows of a plan, and how it changes between two plans."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import Score, breakdown

__all__ = ["Metrics", "coefficient_of_variation", "imbalance", "measure", "relative_change"]


@dataclass(frozen=True)
class Metrics:
    """Load-balance figures of one plan.

    Attributes
    ----------
    global_cv : float or None
        EP-rank CV of the window: mean over layers of population std / mean over
        ranks of Σ_{r,g} W. None without routing.
    row_cv : float or None
        The same within each block, averaged over non-empty blocks and layers.
    ep_peak : int
        Σ_{r,g,l} max_p W, routed tokens.
    joint_bottleneck : float
        max_g U_g in units of J.
    attention_work : float
        Σ_{r,g} A in units of J.
    imbalance_mean, imbalance_max : float or None
        max over ranks / mean over ranks of the window load, over layers.
    hottest_rank : int
        max_{r,g,l,p} W: routed tokens on the rank that runs out of memory first.
    fill : float
        Mean share of the capacity that tokens take, over all cells.
    max_cell_tokens : int
        Fullest cell, tokens.
    empty_cells : int
        Cells without a sample.
    """

    global_cv: float | None
    row_cv: float | None
    ep_peak: int
    joint_bottleneck: float
    attention_work: float
    imbalance_mean: float | None
    imbalance_max: float | None
    hottest_rank: int
    fill: float
    max_cell_tokens: int
    empty_cells: int

    def to_dict(self) -> dict[str, float | int | None]:
        """Plain mapping of the fields."""
        return asdict(self)


def coefficient_of_variation(load: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Population std / mean over the last axis; 0 where the mean is 0."""
    array = np.asarray(load, dtype=np.float64)
    mean = array.mean(axis=-1)
    spread: npt.NDArray[np.float64] = np.divide(array.std(axis=-1), mean, out=np.zeros_like(mean), where=mean > 0)
    return spread


def imbalance(load: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Max / mean over the last axis; 1 where the mean is 0."""
    array = np.asarray(load, dtype=np.float64)
    mean = array.mean(axis=-1)
    ratio: npt.NDArray[np.float64] = np.divide(array.max(axis=-1), mean, out=np.ones_like(mean), where=mean > 0)
    return ratio


def measure(problem: Problem, plan: Plan, score: Score | None = None) -> Metrics:
    """Compute the load-balance figures of a plan.

    Parameters
    ----------
    problem : Problem
    plan : Plan
        May break capacities: the figures then say what such a plan would cost.
    score : Score, optional
        Its breakdown is reused.
    """
    detail = breakdown(problem, plan) if score is None else score.breakdown
    global_cv = row_cv = imbalance_mean = imbalance_max = None
    ep_peak = hottest = 0
    if problem.num_layers:
        window = detail.rank_load.sum(axis=(0, 1))
        global_cv = float(coefficient_of_variation(window).mean())
        by_layer = imbalance(window)
        imbalance_mean, imbalance_max = float(by_layer.mean()), float(by_layer.max())
        filled = detail.rank_load.sum(axis=(2, 3)) > 0
        row_cv = float(coefficient_of_variation(detail.rank_load[filled]).mean())
        ep_peak = int(detail.rank_load.max(axis=3).sum())
        hottest = int(detail.rank_load.max())
    return Metrics(
        global_cv=global_cv,
        row_cv=row_cv,
        ep_peak=ep_peak,
        joint_bottleneck=int(detail.shard.max()) / problem.unit_denominator,
        attention_work=int(detail.attention.sum()) / problem.unit_denominator,
        imbalance_mean=imbalance_mean,
        imbalance_max=imbalance_max,
        hottest_rank=hottest,
        fill=int(detail.cell_tokens.sum()) / (problem.num_cells * problem.capacity),
        max_cell_tokens=int(detail.cell_tokens.max()),
        empty_cells=int((detail.cell_samples == 0).sum()),
    )


def relative_change(before: Metrics, after: Metrics) -> dict[str, float | None]:
    """(after − before) / before of every figure; None where a figure is unknown or ``before`` is 0."""
    change: dict[str, float | None] = {}
    old, new = before.to_dict(), after.to_dict()
    for name, value in old.items():
        other = new[name]
        change[name] = None if value is None or other is None or value == 0 else (other - value) / value
    return change
