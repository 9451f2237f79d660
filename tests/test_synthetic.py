"""Generated routing: exact sums, seeds, frozen families, stress kinds, planted optima."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from routepack_opt import synthetic
from routepack_opt.bounds import LEVELS, best_bound
from routepack_opt.errors import InvalidInputError
from routepack_opt.score import evaluate, violations
from routepack_opt.synthetic import LengthModel, RoutingModel

SMALL = RoutingModel(num_layers=3, num_experts=16, top_k=4, num_blocks=4, num_domains=2)
SHORT = LengthModel(least=8, most=400, mean=90.0)


# ------------------------------------------------------------------ generator


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    num_samples=st.integers(1, 40),
    sd=st.floats(0, 3),
    spike_rate=st.floats(0, 0.5),
    top_k=st.integers(1, 8),
)
def test_counts_are_a_possible_routing(seed: int, num_samples: int, sd: float, spike_rate: float, top_k: int) -> None:
    model = replace(SMALL, top_k=top_k, sample_sd=sd, spike_rate=spike_rate, spike=3.0)
    arrays = synthetic.generate_arrays(model, SHORT, num_samples=num_samples, seed=seed)
    assert (arrays.counts.sum(axis=2, dtype=np.int64) == top_k * arrays.routed_tokens[:, None]).all()
    assert (arrays.counts.max(axis=(1, 2)) <= arrays.routed_tokens).all()
    assert (arrays.routed_tokens == arrays.lengths - 1).all()
    assert arrays.lengths.min() >= SHORT.least
    assert arrays.lengths.max() <= SHORT.most


def test_same_seed_same_bytes_and_steps_share_popularity() -> None:
    def draw(seed: int, step: int) -> synthetic.SyntheticArrays:
        return synthetic.generate_arrays(SMALL, SHORT, num_samples=64, seed=seed, step=step)

    first, again, next_step, other = draw(4, 0), draw(4, 0), draw(4, 1), draw(5, 0)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first.counts, next_step.counts)

    def correlation(a: synthetic.SyntheticArrays, b: synthetic.SyntheticArrays) -> float:
        return float(np.corrcoef(a.counts.sum(axis=0).ravel(), b.counts.sum(axis=0).ravel())[0, 1])

    assert correlation(first, next_step) > 0.8
    assert correlation(first, other) < 0.5


def test_samples_do_not_depend_on_how_many_follow() -> None:
    """The first chunk of a longer batch is that of a shorter one, lengths apart from their common scale."""
    fixed = LengthModel(least=50, most=50, mean=50.0)
    few = synthetic.generate_arrays(replace(SMALL, num_domains=1), fixed, num_samples=32, seed=1)
    many = synthetic.generate_arrays(replace(SMALL, num_domains=1), fixed, num_samples=96, seed=1)
    assert np.array_equal(few.counts, many.counts[:32])


def test_mean_length_is_met_and_groups_correlate() -> None:
    model = LengthModel(sd=0.8, domain_share=0.0, group_share=0.7, least=8, most=4000, mean=600.0)
    lengths, group, _ = synthetic.generate_lengths(model, num_samples=4000, group_size=8, seed=2)
    assert lengths.mean() == pytest.approx(600, rel=0.01)
    log = np.log(lengths)
    within = log.reshape(-1, 8).var(axis=1, ddof=1).mean()
    assert within / log.var() == pytest.approx(0.3, abs=0.08)
    assert (np.diff(group) >= 0).all()
    assert group.max() == 499


def test_noise_raises_distance_and_groups_share_routing() -> None:
    calm = replace(SMALL, group_sd=0.0, sample_sd=0.1, domain_sd=0.0)
    noisy = replace(calm, sample_sd=0.9)
    grouped = replace(calm, group_sd=0.9)

    def total_variation(model: RoutingModel) -> float:
        arrays = synthetic.generate_arrays(model, SHORT, num_samples=128)
        return synthetic.routing_statistics(arrays.counts, arrays.lengths, ep_size=4, top_k=4).total_variation

    assert total_variation(noisy) > 1.5 * total_variation(calm)
    arrays = synthetic.generate_arrays(grouped, SHORT, num_samples=128)
    share = arrays.counts / arrays.counts.sum(axis=2, keepdims=True)
    same = 0.5 * np.abs(share[0::8] - share[1::8]).sum(axis=2).mean()
    different = 0.5 * np.abs(share[0:-8:8] - share[8::8]).sum(axis=2).mean()
    assert same < 0.75 * different


def test_long_samples_use_wider_counts() -> None:
    long = LengthModel(least=70_000, most=70_000, mean=70_000.0)
    arrays = synthetic.generate_arrays(replace(SMALL, top_k=8, spike_rate=0.2, spike=4.0), long, num_samples=2)
    assert arrays.counts.dtype == np.uint32
    assert (arrays.counts.sum(axis=2) == 8 * 69_999).all()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: LengthModel(sd=-1.0), "sd is -1.0"),
        (lambda: LengthModel(domain_share=0.7, group_share=0.7), "above 1"),
        (lambda: LengthModel(least=10, most=5), "least <= most"),
        (lambda: LengthModel(mean=1e9), "mean is 1000000000.0"),
        (lambda: LengthModel(sd=float("nan")), "sd is nan"),
        (lambda: RoutingModel(num_layers=0), "num_layers is 0"),
        (lambda: RoutingModel(top_k=128), "below the 128 experts"),
        (lambda: RoutingModel(num_blocks=7), "not divisible by num_blocks 7"),
        (lambda: RoutingModel(spike_rate=2.0), "spike_rate is 2.0"),
        (lambda: synthetic.generate_arrays(SMALL, SHORT, num_samples=0), "num_samples is 0"),
        (lambda: synthetic.generate_arrays(SMALL, SHORT, num_samples=2, seed=-1), "seed is -1"),
        (lambda: synthetic.generate_arrays(SMALL, SHORT, num_samples=2, popularity=np.zeros((2, 2))), "[3, 16]"),
        (
            lambda: synthetic.generate_arrays(
                SMALL, SHORT, num_samples=2, popularity=np.where(np.arange(16) < 4, 0, -np.inf) * np.ones((3, 1))
            ),
            "layer 0: 4 experts can be chosen; top-4 needs more",
        ),
        (lambda: synthetic.family("flash-p8-lo"), "did you mean 'flash-p8-low'"),
        (lambda: synthetic.stress("hot_ranks"), "did you mean 'hot_rank'"),
        (lambda: synthetic.stress("balanced", heat=3.0), "heat changes nothing for 'balanced'"),
        (lambda: synthetic.stress("hot_rank", heat=1.0), "heat is 1.0"),
        (lambda: synthetic.stress("hot_rank", ep_size=7), "not divisible by ep_size 7"),
        (lambda: synthetic.planted(samples_per_cell=4), "multiple of 3"),
        (lambda: synthetic.planted(fill=0.5), "fill is 0.5"),
        (lambda: synthetic.planted(num_experts=12, top_k=8, ep_size=4), "at most half"),
        (lambda: synthetic.planted(dp_size=5), "5 DP slots are not divisible by 2 shards"),
    ],
)
def test_bad_parameters_are_named(build: object, words: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        build()  # type: ignore[operator]
    assert words in str(caught.value)


# ------------------------------------------------------------------- families


def statistics_of(name: str) -> dict[str, object]:
    text = resources.files("routepack_opt.data").joinpath("families.toml").read_text(encoding="utf-8")
    found: dict[str, object] = tomllib.loads(text)["statistics"][name]
    return found


def test_families_cover_the_announced_sizes() -> None:
    assert len(synthetic.families()) == 12
    sizes = {}
    for name in synthetic.families():
        values = synthetic.family_parameters(name)
        sizes.setdefault(name.removesuffix("-" + values["noise"]), set()).add(
            (values["num_samples"], values["ep_size"], values["dp_size"], values["routing"]["num_experts"])
        )
        assert values["capacity"] == 32_768
        assert values["num_shards"] == 2
    assert sizes == {
        "tiny": {(512, 8, 16, 128)},
        "flash-p8": {(512, 8, 16, 256)},
        "flash-p16": {(1024, 16, 32, 256)},
        "flash-p32": {(2048, 32, 64, 256)},
    }


@pytest.mark.parametrize("name", ["tiny-low", "tiny-gpt-oss-like", "flash-p8-high"])
def test_family_is_what_its_frozen_statistics_say(name: str) -> None:
    problem = synthetic.family(name)
    assert problem.num_rows == 8
    assert problem.rows.proven
    assert 0.95 <= problem.fill <= 1.0
    assert problem.top_k == 8
    frozen = statistics_of(name)
    measured = synthetic.routing_statistics(problem.counts, problem.lengths, ep_size=8, top_k=8)
    for key in ("load_cv", "imbalance", "sample_imbalance", "sample_imbalance_lpt", "total_variation", "most_visited"):
        assert getattr(measured, key) == pytest.approx(frozen[key], abs=2e-3), key
    assert list(measured.length_quantiles) == frozen["length_quantiles"]


@pytest.mark.parametrize("name", ["tiny-gpt-oss-like", "flash-p8-gpt-oss-like"])
def test_gpt_oss_like_families_resemble_recorded_routing(name: str) -> None:
    family, recorded = statistics_of(name), statistics_of("gpt-oss-20b (recorded)")
    assert family["total_variation"] == pytest.approx(recorded["total_variation"], abs=0.02)
    for key, tolerance in (("load_cv", 0.15), ("imbalance", 0.25), ("sample_imbalance", 0.1)):
        assert family[key] == pytest.approx(recorded[key], abs=tolerance), key
    assert family["sample_imbalance_lpt"] == pytest.approx(recorded["sample_imbalance_lpt"], abs=0.15)


@pytest.mark.skipif("ROUTEPACK_DATA" not in os.environ, reason="ROUTEPACK_DATA is not set: no recorded routing")
def test_recorded_statistics_are_reproduced() -> None:
    with np.load(Path(os.environ["ROUTEPACK_DATA"]) / "routing_gptoss20b_per_sample" / "counts.npz") as archive:
        measured = synthetic.routing_statistics(archive["a"], ep_size=8, top_k=4)
    assert measured.load_cv == pytest.approx((0.71, 1.03), abs=0.005)
    assert measured.imbalance == pytest.approx((1.43, 1.78), abs=0.005)
    assert measured.sample_imbalance == pytest.approx((1.86, 2.54), abs=0.006)
    assert measured.sample_imbalance_lpt == pytest.approx((1.75, 2.45), abs=0.005)
    assert measured.total_variation == pytest.approx(0.31, abs=0.005)


def test_other_steps_and_seeds_of_a_family() -> None:
    first, step, seed = (synthetic.family("tiny-low", **options) for options in ({}, {"step": 1}, {"seed": 7}))
    assert first.fingerprint == synthetic.family("tiny-low").fingerprint
    assert len({first.fingerprint, step.fingerprint, seed.fingerprint}) == 3


# --------------------------------------------------------------------- stress


def rank_load(kind: str, **options: int) -> np.ndarray:
    batch = synthetic.stress(kind, **options)
    load = batch.expert_load()
    return load.reshape(load.shape[0], 8, -1).sum(axis=2)


def imbalance(load: np.ndarray) -> float:
    return float((load.max(axis=1) / load.mean(axis=1)).mean())


def test_stress_kinds_are_uneven_as_announced() -> None:
    found = {kind: imbalance(rank_load(kind)) for kind in synthetic.STRESS_KINDS}
    assert found["balanced"] < 1.02
    assert found["hot_rank"] > 3
    assert found["rotating"] > 3
    assert found["spread_heat"] < 1.2
    assert 1.3 < found["hot_experts"] < found["hot_rank"]
    assert synthetic.stress("zero_load").expert_load().min() == 0
    assert rank_load("zero_load").min() == 0


def test_the_hot_rank_rotates() -> None:
    hottest = [int(rank_load("rotating", step=step).sum(axis=0).argmax()) for step in range(9)]
    assert np.diff(hottest[:9]).tolist().count(1) >= 7
    assert hottest[8] == hottest[0]
    still = {int(rank_load("hot_rank", step=step).sum(axis=0).argmax()) for step in range(3)}
    assert len(still) == 1


def test_the_burst_is_one_long_group() -> None:
    batch = synthetic.stress("burst", num_samples=40, group_size=6)
    assert batch.group_ids is not None
    last = batch.group_ids == batch.group_ids.max()
    assert last.sum() == 6
    assert (batch.lengths[last] == 4096).all()
    share = batch.counts[last].sum(axis=0) / batch.counts[last].sum(axis=(0, 2))[0]
    top = np.sort(share, axis=1)[:, -8:].sum(axis=1)
    assert (top > 0.45).all()


# -------------------------------------------------------------------- planted

PLANTS = [
    {"num_rows": 3, "ep_size": 4, "dp_size": 4, "num_layers": 2, "num_experts": 16, "top_k": 2, "mean_length": 120},
    {"num_rows": 2, "ep_size": 8, "dp_size": 6, "num_layers": 2, "num_experts": 32, "top_k": 3, "mean_length": 300},
    {"num_rows": 4, "ep_size": 2, "dp_size": 2, "num_shards": 1, "num_layers": 1, "num_experts": 4, "top_k": 2},
    {"num_rows": 1, "ep_size": 4, "dp_size": 8, "num_layers": 2, "num_experts": 8, "top_k": 1, "noise": 1.0},
]


@pytest.mark.parametrize("options", PLANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_planted_plan_meets_the_bound_on_every_level(options: dict[str, int], seed: int) -> None:
    problem, plan = synthetic.planted(samples_per_cell=3, seed=seed, **options)  # type: ignore[arg-type]
    assert violations(problem, plan) == []
    assert problem.rows.proven
    score = evaluate(problem, plan)
    for value, level in zip(score.levels, LEVELS, strict=True):
        assert best_bound(problem, level).value == value, level
    assert len(np.unique(problem.lengths)) > 1


def test_planted_at_production_scale() -> None:
    problem, plan = synthetic.planted(cost="ling-3.0-tiny")
    assert (problem.num_samples, problem.num_layers, problem.num_experts) == (768, 23, 128)
    assert violations(problem, plan) == []
    assert best_bound(problem).value == evaluate(problem, plan).levels[0]
    contiguous = synthetic.routing_statistics(problem.counts, problem.lengths, ep_size=8, top_k=8)
    assert contiguous.sample_imbalance[0] > 1.2
