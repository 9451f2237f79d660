"""The recorded trace that comes with the package: real routing of a small Mixture-of-Experts model.

``data/tiny_moe_trace.md`` is its data card: how it was made, hashes,
statistics beside gpt-oss-20b and beside the same model untrained.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
import numpy.typing as npt

from routepack_opt import files
from routepack_opt.problem import Problem

__all__ = ["load_trace", "load_trace_ids", "trace_card"]


def load_trace() -> Problem:
    """Load the recorded trace as a problem.

    Returns
    -------
    Problem
        Change cluster, capacity or cost with :meth:`Problem.replace`.
    """
    with resources.as_file(resources.files("routepack_opt").joinpath("data/tiny_moe_trace.npz")) as path:
        return Problem.load(path)


def load_trace_ids() -> dict[str, npt.NDArray[np.integer]]:
    """Load the raw routed expert ids of a few samples of the trace.

    Returns
    -------
    dict
        ``ids``: int [T, L, K], routed experts of every forwarded token, samples
        one after another; ``offsets``: int64 [n + 1], where each begins;
        ``samples``: int64 [n], their positions in the trace.
    """
    with resources.as_file(resources.files("routepack_opt").joinpath("data/tiny_moe_trace_ids.npz")) as path:
        return files.read_npz(path, what="trace ids", required=("ids", "offsets", "samples"))


def trace_card() -> str:
    """The data card of the trace, Markdown."""
    return resources.files("routepack_opt").joinpath("data/tiny_moe_trace.md").read_text(encoding="utf-8")
