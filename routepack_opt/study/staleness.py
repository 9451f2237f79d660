"""What a planner knows when routing is stale or missing: expected counts instead of recorded ones.

A plan made on such a problem has the same lengths, cells and rows as on the
true one, so that it can be scored there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray
from routepack_opt.batch import RoutingBatch
from routepack_opt.errors import InvalidInputError
from routepack_opt.problem import Problem

__all__ = ["expected_counts", "expert_shares", "from_shares", "with_missing"]


def expert_shares(problem: Problem, samples: npt.NDArray[np.bool_] | None = None) -> npt.NDArray[np.float64]:
    """Share of a layer's routed tokens that each expert gets, float64 [L, E].

    Parameters
    ----------
    problem : Problem
    samples : ndarray of bool, shape [N], optional
        Samples that count; default: all.
    """
    counts = problem.counts if samples is None else problem.counts[samples]
    load = counts.sum(axis=0, dtype=np.int64).astype(np.float64)
    total = load.sum(axis=1, keepdims=True)
    even = np.full_like(load, 1.0 / max(1, load.shape[1]))
    shares: npt.NDArray[np.float64] = np.divide(load, total, out=even, where=total > 0)
    return shares


def expected_counts(shares: npt.NDArray[np.float64], routed_tokens: IntArray, *, top_k: int) -> npt.NDArray[np.uint32]:
    """Counts of samples that follow the shares as closely as integers can.

    Parameters
    ----------
    shares : ndarray of float64, shape [L, E]
        Rows sum to 1.
    routed_tokens : ndarray of int64, shape [N]
        M_i.
    top_k : int
        K; every layer of a sample sums to K · M_i and no count exceeds M_i.

    Returns
    -------
    ndarray of uint32, shape [N, L, E]
        Largest remainders get the tokens that rounding down leaves.
    """
    visits = _visit_probability(shares, top_k)
    counts = np.empty((len(routed_tokens), *shares.shape), dtype=np.uint32)
    for i, tokens in enumerate(np.asarray(routed_tokens).tolist()):
        exact = visits * tokens
        whole = np.minimum(np.floor(exact + 1e-9), tokens)
        left = (top_k * tokens - whole.sum(axis=1)).astype(np.int64)
        rest = np.where(whole < tokens, exact - whole, -np.inf)
        order = np.argsort(-rest, axis=1, kind="stable")
        position = np.empty_like(order)
        np.put_along_axis(position, order, np.broadcast_to(np.arange(shares.shape[1]), order.shape), axis=1)
        counts[i] = whole + (position < left[:, None])
    return counts


def _visit_probability(shares: npt.NDArray[np.float64], top_k: int) -> npt.NDArray[np.float64]:
    """Probability that a token visits an expert: K · share, what lies above 1 given to the others in proportion."""
    if top_k > shares.shape[1]:
        raise InvalidInputError(f"top_k {top_k} is above the {shares.shape[1]} experts")
    floor = np.maximum(shares, 1e-12)
    visits: npt.NDArray[np.float64] = np.minimum(1.0, top_k * floor)
    for _ in range(shares.shape[1]):
        full = visits >= 1.0
        missing = top_k - visits.sum(axis=1, keepdims=True)
        if (missing < 1e-9).all():
            break
        open_sum = np.where(full, 0.0, visits).sum(axis=1, keepdims=True)
        factor = 1.0 + np.divide(missing, open_sum, out=np.zeros_like(missing), where=open_sum > 0)
        visits = np.where(full, 1.0, np.minimum(1.0, visits * factor))
    return visits


def _with_counts(problem: Problem, counts: npt.NDArray[np.unsignedinteger]) -> Problem:
    batch = RoutingBatch.from_arrays(
        problem.lengths,
        counts,
        top_k=problem.top_k,
        routed_tokens=problem.batch.routed_tokens,
        sample_ids=problem.batch.sample_ids,
        group_ids=problem.batch.group_ids,
    )
    return problem.replace(batch=batch, num_rows=problem.num_rows)


def from_shares(problem: Problem, shares: npt.NDArray[np.float64]) -> Problem:
    """The problem as seen by a planner that knows only expert shares, such as those of the step before.

    Raises
    ------
    InvalidInputError
        If the shares are of another number of layers or experts.
    """
    if shares.shape != (problem.num_layers, problem.num_experts):
        raise InvalidInputError(
            f"shares have shape {shares.shape}, the problem {problem.num_layers} layers x {problem.num_experts} experts"
        )
    return _with_counts(problem, expected_counts(shares, problem.batch.routed_tokens, top_k=problem.top_k))


def with_missing(problem: Problem, *, share: float, seed: int = 0) -> Problem:
    """The problem as seen by a planner that lacks the routing of some samples.

    Parameters
    ----------
    problem : Problem
    share : float
        Samples without routing ÷ N, at least 0 and below 1; rounded to whole
        samples, one stays known.
    seed : int
        Which samples.

    Returns
    -------
    Problem
        Missing counts are replaced by the expert shares of the known samples.
    """
    if not 0 <= share < 1:
        raise InvalidInputError(f"share is {share}; it must be at least 0 and below 1")
    missing = min(round(share * problem.num_samples), problem.num_samples - 1)
    if not missing or not problem.num_layers:
        return problem
    chosen = np.random.default_rng(seed).permutation(problem.num_samples)[:missing]
    known = np.ones(problem.num_samples, dtype=bool)
    known[chosen] = False
    counts = problem.counts.astype(np.uint32)
    shares = expert_shares(problem, known)
    counts[~known] = expected_counts(shares, problem.batch.routed_tokens[~known], top_k=problem.top_k)
    return _with_counts(problem, counts)
