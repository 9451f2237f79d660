"""The cost of attention beside expert work: α and β per operator class, from operation counts or measured.

A block costs A + E in units of *one routed token through one expert on one
device, divided by C* (C the token capacity of a cell). For an operator class
s with n_s layers, ``f_lin`` operations a token and ``f_pair`` operations a
token pair (causal ½ included), beside ``f_exp`` operations a routed token,

    α_s = n_s · (f_lin / f_exp) · |D_g| / P
    β_s = C · n_s · (f_pair / f_exp) · |D_g| / P

where |D_g| is the number of DP slots of an EDP shard and P the EP size; the
factor |D_g| / P accounts for TP and CP, since P · ETP = |D_g| · TP · CP. β
carries a C because T and Q are normalised by C and C². Both are derived again
whenever C or the cluster changes.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown

__all__ = [
    "Architecture",
    "Calibration",
    "CostModel",
    "OperatorClass",
    "calibrate",
    "preset_names",
    "rational",
]

#: Significant bits kept when an operation-count ratio is made rational: relative error ≤ 2⁻¹².
PRECISION_BITS = 12


def rational(value: float | Fraction, *, bits: int = PRECISION_BITS) -> Fraction:
    """Round to ``bits`` significant binary digits: m · 2^e with m < 2^bits.

    Parameters
    ----------
    value : float or Fraction
        A finite number of at least 0.
    bits : int
        Significant bits; the relative error is at most 2^-bits.

    Returns
    -------
    Fraction
        With a power of two as denominator, which keeps integer work small when
        the capacity is a power of two.

    Raises
    ------
    InvalidInputError
        If the value is negative or not finite.
    """
    if not isinstance(value, Fraction):
        if not np.isfinite(value):
            raise InvalidInputError(f"{value} is no finite number")
        value = Fraction(value)
    if value < 0:
        raise InvalidInputError(f"{value} is negative")
    if value == 0:
        return Fraction(0)
    exponent = value.numerator.bit_length() - value.denominator.bit_length() - bits
    scale = Fraction(2) ** exponent
    mantissa = round(value / scale)
    while mantissa >= 1 << bits:
        exponent += 1
        scale = Fraction(2) ** exponent
        mantissa = round(value / scale)
    return mantissa * scale


@dataclass(frozen=True)
class OperatorClass:
    """One class of attention-like operators: cost α · T + β · Q of a cell.

    Attributes
    ----------
    name : str
        Such as ``"mla"``.
    alpha : Fraction
        Cost per C tokens, ≥ 0.
    beta : Fraction
        Cost per C² squared tokens, ≥ 0; 0 for linear attention.
    """

    name: str
    alpha: Fraction
    beta: Fraction

    def __post_init__(self) -> None:
        faults = Faults()
        if not isinstance(self.name, str) or not self.name:
            faults.add(f"operator class name {self.name!r}; it must be a non-empty string")
        for letter, value in (("alpha", self.alpha), ("beta", self.beta)):
            if isinstance(value, bool) or not isinstance(value, Fraction | int):
                faults.add(
                    f"operator class {self.name!r}: {letter} is {value!r}; give a Fraction or an int (cost.rational "
                    "turns a float into one)"
                )
            elif value < 0:
                faults.add(f"operator class {self.name!r}: {letter} is {value}; it must be at least 0")
        faults.raise_if_any()
        object.__setattr__(self, "alpha", Fraction(self.alpha))
        object.__setattr__(self, "beta", Fraction(self.beta))

    def __repr__(self) -> str:
        return f"{self.name}(α {float(self.alpha):.4g}, β {float(self.beta):.4g})"


@dataclass(frozen=True)
class Architecture:
    """A Mixture-of-Experts transformer as operation counts see it.

    Attributes
    ----------
    name : str
        Preset name.
    hidden, num_layers, num_dense_layers, num_experts, top_k : int
        Model width, all layers, leading dense layers, experts a MoE layer, experts a token.
    expert_intermediate, shared_intermediate, dense_intermediate, vocabulary : int
        FFN widths (gated: three matrices) and vocabulary; 0 where there is none.
    attention : tuple of dict
        Operator classes: ``kind`` (``kda``, ``mla``, ``softmax``, ``window``), ``layers`` and sizes.
    assumed : tuple of str
        Values that are not public and were assumed.
    """

    name: str
    hidden: int
    num_layers: int
    num_dense_layers: int
    num_experts: int
    top_k: int
    expert_intermediate: int
    shared_intermediate: int
    dense_intermediate: int
    vocabulary: int
    attention: tuple[Mapping[str, Any], ...]
    assumed: tuple[str, ...] = ()

    @property
    def num_moe_layers(self) -> int:
        """L, layers with routed experts."""
        return self.num_layers - self.num_dense_layers

    @property
    def expert_operations(self) -> int:
        """f_exp: forward operations of one token through one gated expert, 6 · hidden · intermediate."""
        return 6 * self.hidden * self.expert_intermediate

    def operator_operations(self) -> list[tuple[str, int, int, Fraction]]:
        """Forward operations by operator class.

        Returns
        -------
        list of (name, layers, f_lin, f_pair)
            Operations a layer per token, and per token pair of a sample's t² pairs
            (the causal half is in f_pair). Backward doubles everything alike.
        """
        return [
            (str(entry["name"]), int(entry["layers"]), *_attention_operations(self.hidden, entry))
            for entry in self.attention
        ]

    def dense_operations(self) -> int:
        """Forward operations a token outside attention and routed experts.

        Dense FFN layers, shared experts, routers and the LM head, all layers together.
        """
        return (
            self.num_dense_layers * 6 * self.hidden * self.dense_intermediate
            + self.num_moe_layers * 6 * self.hidden * self.shared_intermediate
            + self.num_moe_layers * 2 * self.hidden * self.num_experts
            + 2 * self.hidden * self.vocabulary
        )

    @classmethod
    def from_preset(cls, name: str, *, overrides: Mapping[str, Any] | None = None) -> Architecture:
        """Read a preset.

        Parameters
        ----------
        name : str
            One of :func:`preset_names`.
        overrides : mapping, optional
            Replacements of top-level sizes, or of an operator class's size as
            ``"mla.heads"``.

        Raises
        ------
        InvalidInputError
            If the name or an override is unknown, or an override is no positive int.
        """
        presets = _presets()
        faults = Faults()
        faults.extend(refuse_unknown([name], list(presets), "cost preset"))
        faults.raise_if_any()
        values = dict(presets[name])
        attention = [dict(entry) for entry in values.pop("attention")]
        assumed = tuple(values.pop("assumed"))
        for key, value in (overrides or {}).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                faults.add(f"override {key!r} is {value!r}; it must be an integer of at least 0")
                continue
            target, _, size = key.rpartition(".")
            if not target:
                unknown = refuse_unknown([key], list(values), "override")
                faults.extend(unknown)
                if not unknown:
                    values[key] = value
                continue
            entries = [entry for entry in attention if entry["name"] == target]
            if not entries:
                faults.extend(refuse_unknown([target], [entry["name"] for entry in attention], "operator class"))
                continue
            sizes = [known for known in entries[0] if known not in ("name", "kind")]
            unknown = refuse_unknown([size], sizes, f"size of {target}")
            faults.extend(unknown)
            if not unknown:
                entries[0][size] = value
        for key in ("hidden", "num_layers", "num_experts", "top_k", "expert_intermediate"):
            if values[key] < 1:
                faults.add(f"{key} is {values[key]}; it must be at least 1")
        faults.raise_if_any(f"cost preset {name!r}")
        return cls(name=name, attention=tuple(attention), assumed=assumed, **values)


def _attention_operations(hidden: int, entry: Mapping[str, Any]) -> tuple[int, Fraction]:
    """(f_lin, f_pair) of one attention layer; matrix products count 2 operations a multiply-add."""
    kind = entry["kind"]
    heads = entry["heads"]
    if kind == "mla":
        query_key = entry["qk_nope"] + entry["qk_rope"]
        if entry["q_lora"]:
            query = hidden * entry["q_lora"] + entry["q_lora"] * heads * query_key
        else:
            query = hidden * heads * query_key
        key_value = hidden * (entry["kv_lora"] + entry["qk_rope"])
        key_value += entry["kv_lora"] * heads * (entry["qk_nope"] + entry["v"])
        output = heads * entry["v"] * hidden
        return 2 * (query + key_value + output), Fraction(heads * (query_key + entry["v"]))
    size = entry["head_dim"]
    if kind == "kda":
        width = heads * size
        # q, k, v, output; decay and output gates through a rank-head_dim bottleneck; β per head.
        projections = 4 * hidden * width + 2 * (hidden * size + size * width) + hidden * heads
        chunk = entry["chunk"]
        # Kimi Linear (arXiv:2510.26692), complexity analysis: 6 d_h² + 3 C d_h + C² a token and head.
        recurrence = heads * (6 * size * size + 3 * chunk * size + chunk * chunk)
        return 2 * projections + recurrence, Fraction(0)
    projections = hidden * heads * size * 2 + 2 * hidden * entry["kv_heads"] * size
    if kind == "softmax":
        return 2 * projections, Fraction(2 * heads * size)
    if kind == "window":
        # Every token attends to `window` others once the window is full: linear in t.
        return 2 * projections + 4 * heads * size * entry["window"], Fraction(0)
    raise InvalidInputError(f"operator kind {kind!r} is unknown; known: kda, mla, softmax, window")


@cache
def _presets() -> dict[str, dict[str, Any]]:
    text = resources.files("routepack_opt").joinpath("data/models.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def preset_names() -> tuple[str, ...]:
    """Names accepted by ``cost=`` and :meth:`CostModel.from_preset`."""
    return tuple(_presets())


@dataclass(frozen=True)
class CostModel:
    """Attention-like operator classes with exact rational coefficients.

    Attributes
    ----------
    attention : tuple of OperatorClass
        May be empty: then only expert work counts.
    preset : str or None
        The architecture the coefficients came from, so that they can be derived
        again for another capacity or cluster.
    """

    attention: tuple[OperatorClass, ...] = ()
    preset: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.attention, str) or not isinstance(self.attention, Iterable):
            raise InvalidInputError(
                f"attention is {self.attention!r}; it must hold OperatorClass", context="cost model"
            )
        object.__setattr__(self, "attention", tuple(self.attention))
        strangers = [item for item in self.attention if not isinstance(item, OperatorClass)]
        if strangers:
            raise InvalidInputError([f"attention holds {item!r}; it must hold OperatorClass" for item in strangers])
        names = [operator.name for operator in self.attention]
        faults = Faults()
        for name in sorted({name for name in names if names.count(name) > 1}):
            faults.add(f"operator class {name!r} stands twice")
        faults.raise_if_any("cost model")

    @property
    def denominator(self) -> int:
        """q, the least common denominator of every α and β."""
        q = 1
        for operator in self.attention:
            q = int(np.lcm.reduce(np.array([q, operator.alpha.denominator, operator.beta.denominator], dtype=object)))
        return q

    @classmethod
    def from_architecture(
        cls,
        architecture: Architecture,
        *,
        capacity: int,
        shard_size: int,
        ep_size: int,
        dense: bool = True,
        bits: int = PRECISION_BITS,
    ) -> CostModel:
        """Derive α and β from operation counts.

        Parameters
        ----------
        architecture : Architecture
        capacity : int
            C, tokens of a cell.
        shard_size : int
            |D_g|, DP slots of an EDP shard.
        ep_size : int
            P.
        dense : bool
            Add one more class (β = 0) for dense FFN layers, shared experts,
            routers and the LM head.
        bits : int
            Significant bits of α and β, see :func:`rational`.

        Returns
        -------
        CostModel
        """
        expert = architecture.expert_operations
        spread = Fraction(shard_size, ep_size)
        classes = []
        for name, layers, f_lin, f_pair in architecture.operator_operations():
            alpha = Fraction(layers * f_lin, expert) * spread
            beta = capacity * layers * f_pair / expert * spread
            classes.append(OperatorClass(name, rational(alpha, bits=bits), rational(beta, bits=bits)))
        if dense:
            alpha = Fraction(architecture.dense_operations(), expert) * spread
            classes.append(OperatorClass("dense", rational(alpha, bits=bits), Fraction(0)))
        return cls(tuple(classes), preset=architecture.name)

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        capacity: int,
        shard_size: int,
        ep_size: int,
        dense: bool = True,
        bits: int = PRECISION_BITS,
        overrides: Mapping[str, Any] | None = None,
    ) -> CostModel:
        """Derive α and β of a named architecture; see :meth:`from_architecture`.

        With ``overrides``, ``dense=False`` or other ``bits`` the result stands for
        itself (its ``preset`` is None): it is then not derived again by
        :meth:`Problem.replace`, which asks for a new cost model instead.
        """
        model = cls.from_architecture(
            Architecture.from_preset(name, overrides=overrides),
            capacity=capacity,
            shard_size=shard_size,
            ep_size=ep_size,
            dense=dense,
            bits=bits,
        )
        plain = not overrides and dense and bits == PRECISION_BITS
        return model if plain else cls(model.attention)

    def __repr__(self) -> str:
        classes = ", ".join(repr(operator) for operator in self.attention) or "expert work only"
        return f"CostModel({classes}{f'; {self.preset}' if self.preset else ''})"


@dataclass(frozen=True)
class Calibration:
    """Coefficients measured on a machine.

    Attributes
    ----------
    cost : CostModel
        α and β relative to the measured expert term.
    seconds_per_unit : float
        Seconds of one unit of J.
    seconds_fixed : float
        Seconds a microbatch takes whatever is in it.
    residual : float
        Root mean square error, seconds.
    r_squared : float
        Share of the variance explained.
    """

    cost: CostModel
    seconds_per_unit: float
    seconds_fixed: float
    residual: float
    r_squared: float


def calibrate(
    tokens: npt.ArrayLike,
    squares: npt.ArrayLike,
    expert: npt.ArrayLike,
    seconds: npt.ArrayLike,
    *,
    names: Sequence[str] = ("attention",),
    bits: int = PRECISION_BITS,
) -> Calibration:
    """Fit α and β by non-negative least squares on measured microbatches.

    The model is seconds = c₀ + c · (Σ_s (α_s T_s + β_s Q_s) + E), all coefficients ≥ 0
    (Lawson and Hanson, *Solving Least Squares Problems*, 1974, ch. 23).

    Parameters
    ----------
    tokens, squares : array-like of float, shape [M] or [M, S]
        T = Σ t / C and Q = Σ (t / C)² of the slowest cell of each measured block,
        per operator class.
    expert : array-like of float, shape [M]
        E = (1/C) Σ_l max_p W of each measured block.
    seconds : array-like of float, shape [M]
        Measured time of each block.
    names : sequence of str
        Operator class names, S of them.
    bits : int
        Significant bits of the rational coefficients.

    Returns
    -------
    Calibration

    Raises
    ------
    InvalidInputError
        If shapes differ, a value is not finite or negative, there are fewer rows
        than coefficients, or the fit gives the expert term no weight (α and β
        are relative to it).
    """
    from scipy.optimize import nnls

    faults = Faults()
    columns = []
    for label, value in (("tokens", tokens), ("squares", squares), ("expert", expert), ("seconds", seconds)):
        array = np.asarray(value, dtype=np.float64)
        if array.ndim == 1:
            array = array[:, None]
        if not np.isfinite(array).all() or (array < 0).any():
            row = int(np.argwhere(~np.isfinite(array) | (array < 0))[0][0])
            faults.add(f"{label}, row {row}: {array[row]}; measurements must be finite and at least 0")
        columns.append(array)
    t, q, e, y = columns
    num_classes = len(names)
    for label, array, width in (("tokens", t, num_classes), ("squares", q, num_classes), ("expert", e, 1)):
        if array.shape != (len(y), width):
            faults.add(f"{label} has shape {array.shape}; {len(y)} measured rows and {width} columns are needed")
    if len(y) < 2 * num_classes + 2:
        faults.add(f"{len(y)} measured rows for {2 * num_classes + 2} coefficients")
    faults.raise_if_any("calibration")
    design = np.hstack([t, q, e, np.ones_like(y)])
    scale = np.where(design.max(axis=0) > 0, design.max(axis=0), 1.0)
    solution, residual = nnls(design / scale, y[:, 0])
    coefficients = solution / scale
    unit = float(coefficients[-2])
    if unit <= 0:
        raise InvalidInputError(
            "the measurements give expert work no weight, and attention is measured against it: vary the expert load "
            "of the measured blocks independently of their tokens",
            context="calibration",
        )
    classes = tuple(
        OperatorClass(
            name,
            rational(float(coefficients[s]) / unit, bits=bits),
            rational(float(coefficients[num_classes + s]) / unit, bits=bits),
        )
        for s, name in enumerate(names)
    )
    spread = float(((y - y.mean()) ** 2).sum())
    return Calibration(
        cost=CostModel(classes),
        seconds_per_unit=unit,
        seconds_fixed=float(coefficients[-1]),
        residual=float(residual / np.sqrt(len(y))),
        r_squared=1.0 - float(residual**2) / spread if spread > 0 else 1.0,
    )
