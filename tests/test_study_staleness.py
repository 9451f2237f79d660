"""Expected counts are valid counts that follow the shares."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt.errors import InvalidInputError
from routepack_opt.study.staleness import expected_counts, expert_shares, from_shares, with_missing
from routepack_opt.testing import tiny_problem


@settings(deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    tokens=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    skew=st.sampled_from([0.05, 0.5, 5.0]),
)
def test_expected_counts_are_valid_counts(
    seed: int, num_experts: int, top_k: int, tokens: list[int], skew: float
) -> None:
    top_k = min(top_k, num_experts)
    shares = np.random.default_rng(seed).dirichlet(np.full(num_experts, skew), size=3)
    counts = expected_counts(shares, np.array(tokens), top_k=top_k)
    np.testing.assert_array_equal(counts.sum(axis=2), np.repeat(top_k * np.array(tokens)[:, None], 3, axis=1))
    assert (counts <= np.array(tokens)[:, None, None]).all()


def test_expected_counts_follow_shares_that_no_cap_binds() -> None:
    shares = np.array([[0.4, 0.3, 0.2, 0.1]])
    counts = expected_counts(shares, np.array([1000, 7]), top_k=2)
    np.testing.assert_array_equal(counts[0, 0], [800, 600, 400, 200])
    assert np.abs(counts[1, 0] - 14 * shares[0]).max() < 1


def test_a_capped_expert_gives_its_rest_to_the_others_in_proportion() -> None:
    counts = expected_counts(np.array([[0.8, 0.1, 0.1]]), np.array([100]), top_k=2)
    np.testing.assert_array_equal(counts[0, 0], [100, 50, 50])


def test_shares_of_a_problem_give_its_window_back() -> None:
    problem = tiny_problem(1, num_samples=6, num_layers=2, ep_size=2, experts_per_rank=2)
    known = from_shares(problem, expert_shares(problem))
    np.testing.assert_array_equal(known.lengths, problem.lengths)
    assert known.num_rows == problem.num_rows
    window, truth = (one.counts.sum(axis=0, dtype=np.int64) for one in (known, problem))
    assert np.abs(window - truth).max() <= problem.num_samples
    with pytest.raises(InvalidInputError, match="shares have shape"):
        from_shares(problem, np.ones((1, 4)) / 4)


def test_missing_samples_and_only_they_change() -> None:
    problem = tiny_problem(1, num_samples=6, num_layers=2, ep_size=2, experts_per_rank=2)
    known = with_missing(problem, share=0.5, seed=3)
    changed = [i for i in range(6) if not np.array_equal(known.counts[i], problem.counts[i])]
    assert len(changed) <= 3
    assert changed
    assert with_missing(problem, share=0.0) is problem
    with pytest.raises(InvalidInputError, match="share is 1"):
        with_missing(problem, share=1)
