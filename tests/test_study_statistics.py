"""Statistics against closed forms and scipy; messages where there is nothing to test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from routepack_opt.errors import InvalidInputError
from routepack_opt.study.statistics import (
    bonferroni,
    bootstrap_interval,
    compare,
    gaps,
    holm,
    paired_test,
    performance_profile,
    primal_integral,
    time_to_target,
)


def rows(values: dict[tuple[str, str], list[float | None]], **columns: Any) -> pd.DataFrame:
    """Rows of (problem, label) → value by seed."""
    return pd.DataFrame(
        [
            {
                "problem": problem,
                "problem_fingerprint": f"sha256:{problem}",
                "label": label,
                "seed": seed,
                "time_limit": None,
                "iteration_limit": 10,
                "num_rows": 4,
                "max_shard_work": value,
                **columns,
            }
            for (problem, label), numbers in values.items()
            for seed, value in enumerate(numbers)
        ]
    )


# ------------------------------------------------------------------------------------------------ intervals


def test_bootstrap_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = np.random.default_rng(1).normal(10, 2, 400)
    found = bootstrap_interval(values, statistic="mean", seed=3)
    half = 1.96 * values.std(ddof=1) / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03)
    assert bootstrap_interval(values, statistic="mean", seed=3) == found


def test_bootstrap_interval_agrees_with_scipy_on_a_skewed_sample() -> None:
    values = np.random.default_rng(2).lognormal(0, 1, 60)
    found = bootstrap_interval(values, statistic=lambda x: float(np.mean(x)), num_resamples=4000)
    theirs = stats.bootstrap((values,), np.mean, n_resamples=9999, rng=np.random.default_rng(0)).confidence_interval
    assert found.low == pytest.approx(theirs.low, rel=0.05)
    assert found.high == pytest.approx(theirs.high, rel=0.05)


def test_bootstrap_interval_of_equal_values_is_a_point() -> None:
    found = bootstrap_interval([3.0, 3.0, 3.0])
    assert (found.low, found.value, found.high) == (3, 3, 3)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([1.0], {}, "at least 2"),
        ([1.0, math.nan], {}, "1 of 2 values are missing"),
        ([1.0, math.inf], {}, "infinite"),
        (["a", "b"], {}, "something else than numbers"),
        ([1.0, 2.0], {"level": 1.0}, "level is 1.0"),
        ([1.0, 2.0], {"statistic": "meidan"}, "did you mean 'median'"),
        ([1.0, 2.0], {"num_resamples": 3}, "num_resamples is 3"),
    ],
)
def test_bootstrap_refusals(values: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        bootstrap_interval(values, **options)


# ------------------------------------------------------------------------------------------------ adjusting


def test_adjusted_p_values_of_a_known_example() -> None:
    raw = [0.01, 0.04, 0.03, math.nan, 0.005]
    np.testing.assert_allclose(holm(raw), [0.03, 0.06, 0.06, math.nan, 0.02])
    np.testing.assert_allclose(bonferroni(raw), [0.04, 0.16, 0.12, math.nan, 0.02])
    for adjust in (holm, bonferroni):
        with pytest.raises(InvalidInputError, match=r"\[0, 1\]"):
            adjust([1.5])


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_lies_between_raw_and_bonferroni_and_keeps_the_order(raw: list[float]) -> None:
    adjusted, most = holm(raw), bonferroni(raw)
    assert (adjusted >= np.array(raw) - 1e-15).all()
    assert (adjusted <= most + 1e-15).all()
    order = np.argsort(raw, kind="stable")
    assert (np.diff(adjusted[order]) >= 0).all()


# ------------------------------------------------------------------------------------------------ pair tests


def test_paired_test_is_scipys_with_effect_sizes() -> None:
    rng = np.random.default_rng(5)
    a = rng.normal(10, 1, 12)
    b = a + rng.normal(0.5, 0.4, 12)
    found = paired_test(a, b)
    assert found.t_p == pytest.approx(stats.ttest_rel(a, b).pvalue)
    assert found.wilcoxon_p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    interval = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    change = b - a
    assert found.effect_size == pytest.approx(change.mean() / change.std(ddof=1))
    ranks = stats.rankdata(np.abs(change))
    assert found.rank_biserial == pytest.approx((ranks[change > 0].sum() - ranks[change < 0].sum()) / ranks.sum())
    assert found.message == ""
    reverse = paired_test(b, a)
    assert reverse.difference == pytest.approx(-change.mean())
    assert reverse.t_p == pytest.approx(found.t_p)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([], [], "no pair"),
        ([1.0], [2.0], "one pair"),
        ([1.0, math.nan], [2.0, 3.0], "1 of 2 pairs have a missing value"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "all 3 differences are 0"),
        ([1.0, 2.0, 3.0], [2.0, 3.0, 4.0], "all 3 differences are 1"),
    ],
)
def test_nothing_to_test_is_a_message_and_no_p_value(a: list[float], b: list[float], message: str) -> None:
    found = paired_test(a, b)
    assert message in found.message
    assert found.t_p is None
    assert found.wilcoxon_p is None


def test_few_pairs_carry_a_caution() -> None:
    found = paired_test([1.0, 2.0, 3.0], [1.5, 2.75, 3.25])
    assert found.wilcoxon_p == pytest.approx(0.25)
    assert "no Wilcoxon p is below 0.25" in found.message
    with pytest.raises(InvalidInputError, match="3 and 2 values"):
        paired_test([1, 2, 3], [1, 2])


# -------------------------------------------------------------------------------------------------- compare


def test_compare_pairs_seeds_within_each_problem_and_adjusts_over_all_tests() -> None:
    frame = rows(
        {
            ("p", "old"): [10.0, 11.0, 12.0, 13.0, 14.0, 15.0],
            ("p", "new"): [9.0, 10.2, 11.1, 12.1, 12.9, 13.8],
            ("q", "old"): [20.0, 21.0, 22.0, 23.0, 24.0, 25.0],
            ("q", "new"): [20.1, 20.9, 22.2, 22.9, 24.3, 24.6],
        }
    )
    found = compare(frame.sample(frac=1, random_state=0), reference="old")
    by_problem = {row["problem"]: row for row in found.rows}
    change = 100 * (np.array([9.0, 10.2, 11.1, 12.1, 12.9, 13.8]) / np.arange(10.0, 16.0) - 1)
    assert by_problem["p"]["difference"] == pytest.approx(change.mean())
    assert by_problem["p"]["t_p"] == pytest.approx(stats.ttest_1samp(change, 0).pvalue)
    assert by_problem["p"]["t_p_bonferroni"] == pytest.approx(2 * by_problem["p"]["t_p"])
    assert by_problem["p"]["t_p_holm"] <= by_problem["p"]["t_p_bonferroni"]
    assert by_problem["p"]["median_low"] <= by_problem["p"]["median"] <= by_problem["p"]["median_high"]
    effects = found.effects()
    assert set(effects["group"]) == {"p", "q"}
    assert (effects["low"] <= effects["effect"]).all()
    assert "difference" in found.to_markdown()
    assert r"\toprule" in found.to_latex()
    absolute = compare(frame, reference="old", relative=False, by=())
    assert absolute.rows[0]["num_pairs"] == 12
    changes = [-1, -0.8, -0.9, -0.9, -1.1, -1.2, 0.1, -0.1, 0.2, -0.1, 0.3, -0.4]
    assert absolute.rows[0]["difference"] == pytest.approx(np.mean(changes))


def test_compare_says_what_is_missing_instead_of_a_p_value() -> None:
    frame = rows({("p", "old"): [1.0, 2.0, 3.0], ("p", "new"): [1.0, None, 2.0], ("p", "short"): [0.5, 1.5]})
    by_label = {row["label"]: row for row in compare(frame, reference="old").rows}
    assert "missing value" in by_label["new"]["message"]
    assert by_label["new"]["t_p_holm"] is None
    assert "1 runs have no partner" in by_label["short"]["message"]
    assert by_label["short"]["t_p"] is not None


def test_compare_of_any_factor() -> None:
    frame = rows({("p", "x"): [10.0, 12.0], ("q", "x"): [11.0, 13.5]}).assign(chains=[1, 1, 4, 4], problem="p")
    found = compare(frame, factor="chains", reference="1")
    assert found.rows[0]["chains"] == "4"
    assert found.rows[0]["difference"] == pytest.approx(100 * (1 / 10 + 1.5 / 12) / 2)


def test_compare_refusals() -> None:
    frame = rows({("p", "old"): [1.0, 2.0], ("p", "new"): [1.0, 2.0]})
    with pytest.raises(InvalidInputError, match="did you mean 'old'"):
        compare(frame, reference="odl")
    with pytest.raises(InvalidInputError, match="did you mean 'max_shard_work'"):
        compare(frame, reference="old", value="max_shard_wrok")
    with pytest.raises(InvalidInputError, match="one level"):
        compare(frame[frame["label"] == "old"], reference="old")
    with pytest.raises(InvalidInputError, match="pairs are not unique"):
        compare(frame, reference="old", pair_on=("problem",))
    with pytest.raises(InvalidInputError, match="no row"):
        compare(frame.iloc[:0], reference="old")
    other_rows = frame.assign(num_rows=[4, 4, 5, 5])
    with pytest.raises(InvalidInputError, match="compare within equal R"):
        compare(other_rows, reference="old")


# ------------------------------------------------------------------------------------- gaps, profiles, time


def test_gaps_are_to_the_best_of_all_rows_of_a_problem() -> None:
    frame = rows({("p", "a"): [None, None], ("q", "a"): [None]}).assign(
        max_shard_work_units=pd.array([110, None, 50], dtype="Int64"),
        max_shard_work_bound_units=pd.array([90, 100, 50], dtype="Int64"),
    )
    found = gaps(pd.concat([frame, frame.iloc[:1].assign(max_shard_work_units=105, seed=9)], ignore_index=True))
    assert found["gap_to_best"].tolist() == [pytest.approx(5 / 105), pytest.approx(math.nan, nan_ok=True), 0.0, 0.0]
    assert found["gap_to_bound"].iloc[[0, 2, 3]].tolist() == [pytest.approx(0.10), 0.0, pytest.approx(0.05)]


def test_performance_profile_counts_shares_within_a_factor() -> None:
    frame = rows({("p", "a"): [1.0, 2.0], ("p", "b"): [1.5, 1.0], ("q", "a"): [1.0], ("q", "b"): [None]})
    profile = performance_profile(frame, num_points=101)
    assert profile.index[0] == 1.0
    assert profile.index[-1] == 2.0
    assert profile.iloc[0].tolist() == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    assert profile.iloc[-1].tolist() == [1.0, pytest.approx(2 / 3)]
    assert profile.loc[profile.index <= 1.49, "b"].max() == pytest.approx(1 / 3)
    assert (np.diff(profile.to_numpy(), axis=0) >= 0).all()
    with pytest.raises(InvalidInputError, match="solved by nobody"):
        performance_profile(rows({("p", "a"): [None], ("p", "b"): [None]}))
    with pytest.raises(InvalidInputError, match="not above 0"):
        performance_profile(rows({("p", "a"): [0.0], ("p", "b"): [1.0]}))


def test_primal_integral_and_time_to_target_of_a_known_history() -> None:
    history = {"incumbents": [{"time": 1.0, "levels": [200, 0, 0]}, {"time": 3.0, "levels": [100, 0, 0]}]}
    # Gap 1 for 1 s, (200 - 100) / 200 for 2 s, 0 for 1 s.
    assert primal_integral(history, best=100, horizon=4.0) == pytest.approx((1 + 2 * 0.5) / 4)
    assert primal_integral(history, best=100, horizon=2.0) == pytest.approx((1 + 1 * 0.5) / 2)
    assert primal_integral({"incumbents": []}, best=100, horizon=2.0) == 1.0
    assert time_to_target(history, target=150) == 3.0
    assert time_to_target(history, target=200) == 1.0
    assert time_to_target(history, target=99) is None
    with pytest.raises(InvalidInputError, match="better than best"):
        primal_integral(history, best=150, horizon=4.0)
    with pytest.raises(InvalidInputError, match="horizon is 0"):
        primal_integral(history, best=100, horizon=0)
