from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack_opt.cost import Architecture, CostModel, OperatorClass, calibrate, preset_names, rational
from routepack_opt.errors import InvalidInputError


@pytest.mark.parametrize("capacity", [32_768, 8_192])
def test_olmoe_coefficients_by_hand(capacity: int) -> None:
    # OLMoE-1B-7B: hidden 2048, 16 layers, 16 heads of 128, experts of width 1024, 64 experts.
    f_exp = 6 * 2048 * 1024
    f_lin = 2 * (4 * 2048 * 2048)
    f_pair = 2 * 16 * 128  # QK and PV, 2 operations a multiply-add, causal half
    model = CostModel.from_preset("olmoe-1b-7b", capacity=capacity, shard_size=4, ep_size=8, bits=40)
    softmax, dense = model.attention
    assert softmax.name == "softmax"
    assert float(softmax.alpha) == pytest.approx(16 * f_lin / f_exp * 4 / 8, rel=1e-9)
    assert float(softmax.beta) == pytest.approx(capacity * 16 * f_pair / f_exp * 4 / 8, rel=1e-9)
    router_and_head = 16 * 2 * 2048 * 64 + 2 * 2048 * 50_304
    assert float(dense.alpha) == pytest.approx(router_and_head / f_exp * 4 / 8, rel=1e-9)
    assert dense.beta == 0


def test_mla_and_kda_by_hand() -> None:
    tiny = Architecture.from_preset("ling-3.0-tiny")
    (kda, kda_layers, kda_lin, kda_pair), (mla, mla_layers, mla_lin, mla_pair) = tiny.operator_operations()
    assert (kda, kda_layers, mla, mla_layers) == ("kda", 18, "mla", 6)
    assert tiny.num_moe_layers == 23
    assert kda_pair == 0
    width = 16 * 128
    assert kda_lin == 2 * (4 * 1536 * width + 2 * (1536 * 128 + 128 * width) + 1536 * 16) + 16 * (
        6 * 128**2 + 3 * 64 * 128 + 64**2
    )
    query = 1536 * 256 + 256 * 16 * 192
    key_value = 1536 * (512 + 64) + 512 * 16 * 256
    assert mla_lin == 2 * (query + key_value + 16 * 128 * 1536)
    assert mla_pair == 16 * (192 + 128)


def test_layer_counts_of_the_presets() -> None:
    flash = Architecture.from_preset("ling-3.0-flash")
    assert (flash.num_layers, flash.num_moe_layers) == (42, 40)
    assert [layers for _, layers, _, _ in flash.operator_operations()] == [35, 7]
    for name in preset_names():
        architecture = Architecture.from_preset(name)
        assert sum(layers for _, layers, _, _ in architecture.operator_operations()) == architecture.num_layers


@given(st.floats(min_value=1e-9, max_value=1e12), st.integers(min_value=2, max_value=40))
def test_rational_keeps_the_stated_precision(value: float, bits: int) -> None:
    rounded = rational(value, bits=bits)
    assert abs(rounded - Fraction(value)) <= Fraction(value) / 2**bits
    assert rounded.denominator & (rounded.denominator - 1) == 0
    while rounded.denominator == 1 and rounded.numerator % 2 == 0 and rounded:
        rounded /= 2
    assert rounded.numerator < 2**bits


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_rational_refuses(value: float) -> None:
    with pytest.raises(InvalidInputError):
        rational(value)
    assert rational(0.0) == 0


def test_operator_class_refuses_floats_and_negatives() -> None:
    with pytest.raises(InvalidInputError) as caught:
        OperatorClass("mla", 0.5, Fraction(-1))  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2
    assert OperatorClass("x", 1, 0).alpha == Fraction(1)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="stands twice"):
        CostModel((OperatorClass("a", Fraction(1), Fraction(0)), OperatorClass("a", Fraction(1), Fraction(0))))


def test_presets_name_the_nearest_and_check_overrides() -> None:
    with pytest.raises(InvalidInputError, match=r"did you mean 'ling-3\.0-tiny'"):
        Architecture.from_preset("ling-3.0-tony")
    with pytest.raises(InvalidInputError) as caught:
        Architecture.from_preset(
            "ling-3.0-tiny", overrides={"hiden": 5, "mla.head": 3, "mha.heads": 3, "hidden": 0, "top_k": True}
        )
    assert len(caught.value.faults) == 5
    bent = Architecture.from_preset("ling-3.0-tiny", overrides={"expert_intermediate": 1024, "mla.heads": 8})
    assert bent.expert_operations == 6 * 1536 * 1024
    assert bent.operator_operations()[1][3] == 8 * 320


def test_a_bent_preset_is_not_derived_again() -> None:
    sizes = {"capacity": 1024, "shard_size": 2, "ep_size": 2}
    assert CostModel.from_preset("olmoe-1b-7b", **sizes).preset == "olmoe-1b-7b"
    assert CostModel.from_preset("olmoe-1b-7b", **sizes, dense=False).preset is None
    assert CostModel.from_preset("olmoe-1b-7b", **sizes, overrides={"hidden": 1024}).preset is None


def test_denominator_is_the_least_common_one() -> None:
    model = CostModel(
        (OperatorClass("a", Fraction(1, 6), Fraction(3, 4)), OperatorClass("b", Fraction(2, 9), Fraction(0)))
    )
    assert model.denominator == 36


def test_calibration_recovers_planted_coefficients() -> None:
    rng = np.random.default_rng(3)
    tokens, squares, expert = rng.uniform(0.2, 1, 200), rng.uniform(0.01, 1, 200), rng.uniform(10, 40, 200)
    seconds = 0.004 + 2e-3 * (25.0 * tokens + 60.0 * squares + expert)
    fit = calibrate(tokens, squares, expert, seconds, names=["mla"], bits=30)
    assert float(fit.cost.attention[0].alpha) == pytest.approx(25.0, rel=1e-6)
    assert float(fit.cost.attention[0].beta) == pytest.approx(60.0, rel=1e-6)
    assert fit.seconds_per_unit == pytest.approx(2e-3, rel=1e-6)
    assert fit.seconds_fixed == pytest.approx(0.004, rel=1e-4)
    assert fit.r_squared == pytest.approx(1.0)


def test_calibration_refuses_what_it_cannot_fit() -> None:
    with pytest.raises(InvalidInputError) as caught:
        calibrate([1.0, float("nan")], [1.0], [-1.0, 2.0], [1.0, 2.0])
    assert len(caught.value.faults) >= 3
    rows = np.linspace(1, 2, 8)
    with pytest.raises(InvalidInputError, match="no weight"):
        calibrate(rows, rows**2, np.zeros(8), rows)
