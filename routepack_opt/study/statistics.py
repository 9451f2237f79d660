"""Comparisons others can rerun and trust: gaps, profiles, anytime measures, paired tests, intervals.

Pairs are runs of two planners (or of two levels of any factor) on the same
problem under the same limits and seed. Where a test has nothing to stand on
(too few pairs, missing values, no variation) there is a message instead of a
p-value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from routepack_opt import bounds
from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown
from routepack_opt.study.table import StudyTable, latex, markdown, written

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "Comparison",
    "Interval",
    "PairedTest",
    "bonferroni",
    "bootstrap_interval",
    "compare",
    "gaps",
    "holm",
    "paired_test",
    "performance_profile",
    "primal_integral",
    "time_to_target",
]

FloatArray = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------------------------ intervals


@dataclass(frozen=True)
class Interval:
    """An estimate and its interval.

    Attributes
    ----------
    value, low, high : float
    level : float
        Confidence.
    """

    value: float
    low: float
    high: float
    level: float

    def __repr__(self) -> str:
        return f"{self.value:.6g} [{self.low:.6g}, {self.high:.6g}] ({self.level:.0%})"


def _sample(values: npt.ArrayLike, what: str, *, least: int) -> FloatArray:
    try:
        array = np.asarray(values, dtype=np.float64).ravel()
    except (TypeError, ValueError):
        raise InvalidInputError(f"{what} hold something else than numbers") from None
    missing = int(np.isnan(array).sum())
    if missing:
        raise InvalidInputError(f"{what}: {missing} of {array.size} values are missing (NaN)")
    if np.isinf(array).any():
        raise InvalidInputError(f"{what} hold an infinite value")
    if array.size < least:
        raise InvalidInputError(f"{what}: {array.size} values; at least {least} are needed")
    return array


def bootstrap_interval(
    values: npt.ArrayLike,
    *,
    statistic: str | Callable[[FloatArray], float] = "median",
    level: float = 0.95,
    num_resamples: int = 4_000,
    seed: int = 0,
) -> Interval:
    """Bias-corrected and accelerated bootstrap interval (Efron 1987, 10.1080/01621459.1987.10478410).

    Parameters
    ----------
    values : array-like of float, shape [n]
    statistic : str or callable
        ``median``, ``mean``, or a function of an array.
    level : float
        Confidence, in (0, 1).
    num_resamples, seed : int

    Returns
    -------
    Interval
        Both ends equal the value where all values are equal. Where the
        acceleration is undefined (the jackknife does not vary), percentiles are used.

    Raises
    ------
    InvalidInputError
        If values are missing or fewer than two, or an argument is out of range.
    """
    array = _sample(values, "values", least=2)
    faults = Faults()
    if not 0 < level < 1:
        faults.add(f"level is {level}; it must be in (0, 1)")
    if num_resamples < 100:
        faults.add(f"num_resamples is {num_resamples}; it must be at least 100")
    named: dict[str, Callable[..., Any]] = {"median": np.median, "mean": np.mean}
    if isinstance(statistic, str):
        faults.extend(refuse_unknown([statistic], list(named), "statistic"))
    faults.raise_if_any("bootstrap")
    measure: Callable[..., Any] = named[statistic] if isinstance(statistic, str) else statistic
    value = float(measure(array))
    if np.ptp(array) == 0:
        return Interval(value, value, value, level)
    from scipy.special import ndtr, ndtri

    rng = np.random.default_rng(seed)
    draws = array[rng.integers(0, array.size, (num_resamples, array.size))]
    if isinstance(statistic, str):
        replicates = np.asarray(measure(draws, axis=1))
    else:
        replicates = np.array([measure(draw) for draw in draws])
    left = np.array([measure(np.delete(array, k)) for k in range(array.size)])
    away = left.mean() - left
    spread = float((away**2).sum())
    tails = np.array([(1 - level) / 2, (1 + level) / 2])
    below = float(((replicates < value).sum() + 0.5 * (replicates == value).sum()) / num_resamples)
    if spread > 0 and 0 < below < 1:
        bias = float(ndtri(below))
        acceleration = float((away**3).sum()) / (6 * spread**1.5)
        shifted = bias + ndtri(tails)
        tails = ndtr(bias + shifted / (1 - acceleration * shifted))
    low, high = np.quantile(replicates, tails)
    return Interval(value, float(low), float(high), level)


# ------------------------------------------------------------------------------------------------ adjusting


def _p_values(values: Sequence[float]) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or ((array < 0) | (array > 1)).any():
        raise InvalidInputError("p-values must be a list of numbers in [0, 1] (NaN: not tested)")
    return array


def bonferroni(values: Sequence[float]) -> FloatArray:
    """Bonferroni-adjusted p-values; NaN stands for "not tested" and does not count.

    Raises
    ------
    InvalidInputError
        If a value lies outside [0, 1].
    """
    array = _p_values(values)
    adjusted: FloatArray = np.minimum(1.0, array * np.count_nonzero(~np.isnan(array)))
    return adjusted


def holm(values: Sequence[float]) -> FloatArray:
    """Holm-adjusted p-values (Holm 1979, Scand. J. Statist. 6, 65-70); NaN stands for "not tested".

    Raises
    ------
    InvalidInputError
        If a value lies outside [0, 1].
    """
    array = _p_values(values)
    adjusted = np.full(array.shape, np.nan)
    tested = np.flatnonzero(~np.isnan(array))
    order = tested[np.argsort(array[tested], kind="stable")]
    steps = array[order] * (len(order) - np.arange(len(order)))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(steps)) if len(order) else steps
    return adjusted


# ------------------------------------------------------------------------------------------------- pair tests


@dataclass(frozen=True)
class PairedTest:
    """Paired comparison of two groups, two-sided.

    Attributes
    ----------
    num_pairs : int
    difference : float or None
        Mean of b − a.
    low, high : float or None
        Student interval of the mean difference.
    t_p, wilcoxon_p : float or None
        p-values of the paired t-test and of the Wilcoxon signed-rank test.
    effect_size : float or None
        d_z: mean difference ÷ standard deviation of the differences.
    rank_biserial : float or None
        (R⁺ − R⁻) / (R⁺ + R⁻) of the signed ranks, in [−1, 1] (Kerby 2014, 10.2466/11.IT.3.1).
    message : str
        Why something is None, or a caution; else empty.
    """

    num_pairs: int
    difference: float | None
    low: float | None
    high: float | None
    t_p: float | None
    wilcoxon_p: float | None
    effect_size: float | None
    rank_biserial: float | None
    message: str

    def to_dict(self) -> dict[str, Any]:
        """Plain mapping."""
        return asdict(self)


def paired_test(a: npt.ArrayLike, b: npt.ArrayLike, *, level: float = 0.95) -> PairedTest:
    """Test whether paired values differ.

    Parameters
    ----------
    a, b : array-like of float, shape [n]
        Paired by position.
    level : float
        Confidence of the interval.

    Returns
    -------
    PairedTest
        With missing values, fewer than two pairs or differences that are all equal
        there is a message and no p-value.

    Raises
    ------
    InvalidInputError
        If the groups differ in length, or ``level`` is out of range.
    """
    from scipy import stats

    first, second = (np.asarray(values, dtype=np.float64).ravel() for values in (a, b))
    if len(first) != len(second):
        raise InvalidInputError(f"the groups have {len(first)} and {len(second)} values; pairs are needed")
    if not 0 < level < 1:
        raise InvalidInputError(f"level is {level}; it must be in (0, 1)")
    nothing: dict[str, Any] = dict.fromkeys(
        ("difference", "low", "high", "t_p", "wilcoxon_p", "effect_size", "rank_biserial")
    )
    missing = int((np.isnan(first) | np.isnan(second)).sum())
    if missing:
        return PairedTest(len(first), **nothing, message=f"{missing} of {len(first)} pairs have a missing value")
    if len(first) < 2:
        count = "no pair" if not len(first) else "one pair"
        return PairedTest(len(first), **nothing, message=f"{count}: a test needs at least two")
    change = second - first
    size, mean = len(change), float(change.mean())
    if np.ptp(change) <= 1e-12 * max(1e-300, float(np.abs(change).max())):
        nothing["difference"] = mean
        shown = "0" if mean == 0 else f"{mean:.6g}"
        return PairedTest(size, **nothing, message=f"all {size} differences are {shown}: nothing varies, no test")
    deviation = float(change.std(ddof=1))
    half = float(stats.t.ppf((1 + level) / 2, size - 1)) * deviation / math.sqrt(size)
    nonzero = change[change != 0]
    ranks = stats.rankdata(np.abs(nonzero))
    biserial = float((ranks * np.sign(nonzero)).sum() / ranks.sum())
    least = 2.0 ** (1 - len(nonzero))
    caution = f"with {len(nonzero)} differing pairs no Wilcoxon p is below {least:.3g}" if least > 0.05 else ""
    exact = len(nonzero) <= 50 and len(np.unique(np.abs(nonzero))) == len(nonzero) == size
    return PairedTest(
        num_pairs=size,
        difference=mean,
        low=mean - half,
        high=mean + half,
        t_p=float(stats.ttest_rel(second, first).pvalue),
        wilcoxon_p=float(stats.wilcoxon(change, method="exact" if exact else "auto").pvalue),
        effect_size=mean / deviation,
        rank_biserial=biserial,
        message=caution,
    )


# -------------------------------------------------------------------------------------------------- compare


def _frame(table: Any) -> pd.DataFrame:
    frame: pd.DataFrame = table.to_frame() if isinstance(table, StudyTable) else table
    return frame


def _needs(frame: Any, names: Sequence[str], what: str) -> None:
    missing = [name for name in dict.fromkeys(names) if name not in frame.columns]
    if missing:
        raise InvalidInputError(
            [fault for name in missing for fault in refuse_unknown([name], list(map(str, frame.columns)), "column")],
            context=what,
        )
    if not len(frame):
        raise InvalidInputError("the table has no row", context=what)


def gaps(table: StudyTable | pd.DataFrame) -> pd.DataFrame:
    """The rows with their gaps among all rows of the same problem.

    Adds ``best_known_units`` (smallest first level of any row),
    ``best_bound_units`` (largest any-placement bound of any row),
    ``gap_to_best`` and ``gap_to_bound``, relative; missing where a run found no
    plan. Problems are told apart by fingerprint, which includes the rows R.
    """
    import pandas as pd

    frame = _frame(table).copy()
    _needs(frame, ["problem_fingerprint", "max_shard_work_units", "max_shard_work_bound_units"], "gaps")
    by_problem = frame.groupby("problem_fingerprint")
    frame["best_known_units"] = by_problem["max_shard_work_units"].transform("min")
    frame["best_bound_units"] = by_problem["max_shard_work_bound_units"].transform("max")

    def gap(value: Any, reference: Any) -> float | None:
        return None if pd.isna(value) or pd.isna(reference) else bounds.gap(int(value), int(reference))

    for name, reference in (("gap_to_best", "best_known_units"), ("gap_to_bound", "best_bound_units")):
        pairs = zip(frame["max_shard_work_units"], frame[reference], strict=True)
        frame[name] = pd.Series([gap(value, other) for value, other in pairs], index=frame.index, dtype=float)
    return frame


@dataclass(frozen=True, repr=False)
class Comparison:
    """Levels of a factor against a reference.

    Attributes
    ----------
    factor, reference, value : str
        Column compared, its level compared against, and the column of values.
    relative : bool
        Differences are in % of the reference's value, pair by pair.
    level : float
        Confidence of the intervals.
    rows : tuple of mapping
        One a group and level.
    """

    factor: str
    reference: str
    value: str
    relative: bool
    level: float
    rows: tuple[Mapping[str, Any], ...]

    def to_frame(self) -> pd.DataFrame:
        """One row a comparison: group columns, the factor, num_pairs, difference, low, high, effect sizes, p-values
        raw and adjusted (``_holm``, ``_bonferroni``), bootstrap interval of the median, message.
        """
        import pandas as pd

        return pd.DataFrame(self.rows)

    def effects(self) -> pd.DataFrame:
        """What :func:`routepack_opt.plot.forest` draws: name, effect, low, high, and group where there are groups."""
        import pandas as pd

        rows = []
        for row in self.rows:
            if row["low"] is None and row["difference"] is None:
                continue
            low = row["difference"] if row["low"] is None else row["low"]
            high = row["difference"] if row["high"] is None else row["high"]
            entry = {"name": str(row[self.factor]), "effect": row["difference"], "low": low, "high": high}
            if row["group"]:
                entry["group"] = row["group"]
            rows.append(entry)
        if not rows:
            raise InvalidInputError("no comparison has an effect: " + "; ".join(str(r["message"]) for r in self.rows))
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """The short table: who, pairs, difference with its interval, Holm-adjusted p-values, note."""
        import pandas as pd

        unit = " %" if self.relative else ""
        rows = []
        for row in self.rows:
            shown = {"group": row["group"]} if any(other["group"] for other in self.rows) else {}
            shown |= {
                self.factor: row[self.factor],
                "pairs": row["num_pairs"],
                f"difference{unit}": row["difference"],
                f"low{unit}": row["low"],
                f"high{unit}": row["high"],
                "t p (Holm)": row["t_p_holm"],
                "Wilcoxon p (Holm)": row["wilcoxon_p_holm"],
                "d_z": row["effect_size"],
                "note": row["message"] or "",
            }
            rows.append(shown)
        return pd.DataFrame(rows)

    def _printed(self) -> pd.DataFrame:
        table = self.table()
        for name in ("t p (Holm)", "Wilcoxon p (Holm)"):
            table[name] = [_p_text(value) for value in table[name]]
        if not table["note"].any():
            table = table.drop(columns="note")
        return table

    def to_markdown(self) -> str:
        """The short table in Markdown."""
        return markdown(self._printed())

    def to_latex(self, *, caption: str = "", label: str = "") -> str:
        """The short table in LaTeX (booktabs)."""
        return latex(self._printed(), caption=caption, label=label)

    def __repr__(self) -> str:
        head = f"{self.value} against {self.factor} = {self.reference}" + (" (in % of it)" if self.relative else "")
        return f"{head}\n{written(self._printed()).to_string(index=False)}"

    def _repr_html_(self) -> str:
        head = f"{self.value} against {self.factor} = {self.reference}" + (" (in % of it)" if self.relative else "")
        return f"<p>{head}</p>{written(self._printed()).to_html(index=False)}"


def _p_text(value: Any) -> str:
    if value is None or math.isnan(value):
        return "-"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def compare(
    table: StudyTable | pd.DataFrame,
    *,
    reference: str,
    factor: str = "label",
    value: str = "max_shard_work",
    relative: bool = True,
    by: Sequence[str] = ("problem",),
    pair_on: Sequence[str] = ("problem", "time_limit", "iteration_limit", "seed"),
    level: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """Compare every level of a factor with a reference level, pair by pair.

    Parameters
    ----------
    table : StudyTable or DataFrame
    reference : str
        Level compared against, such as a planner's label.
    factor : str
        Column whose levels are compared; default: the planners' labels.
    value : str
        Column of values; smaller is better for the levels of a score.
    relative : bool
        Differences in % of the reference's value.
    by : sequence of str
        Columns that split the tests into groups; ``()`` pools everything, which
        treats runs on different problems as exchangeable.
    pair_on : sequence of str
        Columns that make a pair. Those constant under the factor may be left in;
        one that changes with the factor must be left out.
    level : float
        Confidence of the intervals.
    seed : int
        Of the bootstrap.

    Returns
    -------
    Comparison
        p-values are adjusted (Holm, Bonferroni) over all its tests.

    Raises
    ------
    InvalidInputError
        If a column or the reference is unknown (nearest name given), pairs are not
        unique, or plans of different numbers of rows R would be compared.
    """
    frame = _frame(table)
    _needs(frame, [factor, value, *by, *pair_on], "comparison")
    levels = [str(name) for name in dict.fromkeys(frame[factor].dropna())]
    faults = Faults()
    faults.extend(refuse_unknown([str(reference)], levels, factor))
    if len(levels) < 2:
        faults.add(f"{factor} has one level; there is nothing to compare")
    faults.raise_if_any("comparison")
    keys = [name for name in pair_on if name != factor]
    rows: list[dict[str, Any]] = []
    groups = frame.groupby(list(by), sort=False, dropna=False) if by else [((), frame)]
    for names, part in groups:
        group = ", ".join(str(name) for name in names) if frame[list(by)].drop_duplicates().shape[0] > 1 else ""
        base = part[part[factor].astype(str) == str(reference)]
        for name in levels:
            if name == str(reference):
                continue
            other = part[part[factor].astype(str) == name]
            if not len(other) and not len(base):
                continue
            row: dict[str, Any] = dict(zip(by, names, strict=True))
            row |= {"group": group, factor: name, **_paired(base, other, keys, value, relative, level, seed)}
            rows.append(row)
    for test in ("t_p", "wilcoxon_p"):
        raw = [math.nan if row[test] is None else row[test] for row in rows]
        for adjusted, values in (("holm", holm(raw)), ("bonferroni", bonferroni(raw))):
            for row, one in zip(rows, values, strict=True):
                row[f"{test}_{adjusted}"] = None if math.isnan(one) else float(one)
    return Comparison(factor, str(reference), value, relative, level, tuple(rows))


def _paired(
    base: Any, other: Any, keys: list[str], value: str, relative: bool, level: float, seed: int
) -> dict[str, Any]:
    columns = [*keys, value, *(["num_rows"] if "num_rows" in base.columns else [])]
    for side in (base, other):
        repeated = side[side.duplicated(keys)]
        if len(repeated):
            where = ", ".join(f"{name} {repeated.iloc[0][name]}" for name in keys)
            raise InvalidInputError(f"pairs are not unique: several rows with {where}; add a column to pair_on")
    filled = [
        side[columns].assign(**{name: side[name].fillna("-").astype(str) for name in keys}) for side in (base, other)
    ]
    joined = filled[0].merge(filled[1], on=keys, how="outer", suffixes=("_a", "_b"), indicator=True)
    single = int((joined["_merge"] != "both").sum())
    pairs = joined[joined["_merge"] == "both"]
    if "num_rows_a" in pairs and (pairs["num_rows_a"] != pairs["num_rows_b"]).any():
        first = pairs[pairs["num_rows_a"] != pairs["num_rows_b"]].iloc[0]
        if not (np.isnan(first["num_rows_a"]) or np.isnan(first["num_rows_b"])):
            raise InvalidInputError(
                f"plans of {first['num_rows_a']} and {first['num_rows_b']} rows would be compared: plans of different "
                "R are ordered by R first; compare within equal R",
                context="comparison",
            )
    a = pairs[f"{value}_a"].to_numpy(dtype=float)
    b = pairs[f"{value}_b"].to_numpy(dtype=float)
    if relative:
        zero = a == 0
        scale = np.where(zero, np.nan, np.abs(a)) / 100
        a, b = a / scale, b / scale
    test = paired_test(a, b, level=level)
    message = test.message
    if single:
        message = f"{single} runs have no partner" + (f"; {message}" if message else "")
    row = test.to_dict() | {"message": message, "median": None, "median_low": None, "median_high": None}
    if test.difference is not None:
        interval = bootstrap_interval(b - a, level=level, seed=seed)
        row |= {"median": interval.value, "median_low": interval.low, "median_high": interval.high}
    return row


# ------------------------------------------------------------------------------------- profiles and time


def performance_profile(
    table: StudyTable | pd.DataFrame,
    *,
    value: str = "max_shard_work",
    factor: str = "label",
    pair_on: Sequence[str] = ("problem_fingerprint", "time_limit", "iteration_limit", "seed"),
    num_points: int = 200,
) -> pd.DataFrame:
    """Share of instances each level of a factor solves within τ of the best (Dolan & Moré, 10.1007/s101070100263).

    Parameters
    ----------
    table : StudyTable or DataFrame
    value : str
        Column of positive values, smaller is better; a missing value never counts.
    factor : str
    pair_on : sequence of str
        Columns that make an instance.
    num_points : int
        Factors τ from 1 to the largest ratio.

    Returns
    -------
    DataFrame
        Index τ, a column a level: input of :func:`routepack_opt.plot.performance_profile`.

    Raises
    ------
    InvalidInputError
        If a column is missing, values are not above 0 or instances not unique.
    """
    import pandas as pd

    frame = _frame(table)
    _needs(frame, [factor, value, *pair_on], "performance profile")
    keys = [name for name in pair_on if name != factor]
    if frame.duplicated([*keys, factor]).any():
        raise InvalidInputError(f"several rows of one {factor} and instance; add a column to pair_on")
    names = [frame[name].fillna("-").astype(str) for name in keys]
    wide = frame.assign(instance=["|".join(parts) for parts in zip(*names, strict=True)]).pivot(
        index="instance", columns=factor, values=value
    )
    wide = wide[list(dict.fromkeys(frame[factor]))].astype(float)
    if (wide <= 0).any(axis=None):
        raise InvalidInputError(f"{value} holds values that are not above 0; a ratio needs positive ones")
    best = wide.min(axis=1)
    if best.isna().any():
        raise InvalidInputError(f"{int(best.isna().sum())} instances were solved by nobody; leave them out knowingly")
    ratios = wide.div(best, axis=0).to_numpy()
    largest = float(np.nanmax(ratios))
    factors = np.linspace(1.0, max(largest, 1.001), num_points)
    shares = [(ratios <= tau * (1 + 1e-12)).mean(axis=0) for tau in factors]
    return pd.DataFrame(shares, index=pd.Index(factors, name="tau"), columns=wide.columns)


def _curve(history: Any) -> list[tuple[float, int]]:
    if isinstance(history, Mapping):
        return [(float(point["time"]), int(point["levels"][0])) for point in history["incumbents"]]
    trace = getattr(history, "trace", history)
    return [(float(point.time), int(point.levels[0])) for point in trace.incumbents]


def primal_integral(history: Any, *, best: int, horizon: float) -> float:
    """Mean primal gap over time (Berthold 2013, 10.1016/j.orl.2013.08.007), in [0, 1]; smaller is better.

    Parameters
    ----------
    history : mapping, Result or Trace
        As :meth:`StudyTable.history` returns it, or of a run.
    best : int
        Best known first level, work units.
    horizon : float
        Seconds up to which time counts, above 0.

    Returns
    -------
    float
        The integral of the gap divided by the horizon. The gap is
        (value − best) / value, and 1 until there is a plan: Berthold's, for values
        and ``best`` of one sign.

    Raises
    ------
    InvalidInputError
        If the horizon is not above 0, or an incumbent is better than ``best``.
    """
    if not 0 < horizon < math.inf:
        raise InvalidInputError(f"horizon is {horizon}; it must be seconds above 0")
    area, time, gap = 0.0, 0.0, 1.0
    for at, level in _curve(history):
        if level < best:
            raise InvalidInputError(f"an incumbent of {level} is better than best = {best}")
        if at >= horizon:
            break
        area += gap * (at - time)
        time, gap = at, 0.0 if level == best else (level - best) / level
    return (area + gap * (horizon - time)) / horizon


def time_to_target(history: Any, *, target: int) -> float | None:
    """Seconds until the first incumbent with a first level of at most ``target`` work units; None if never.

    Parameters
    ----------
    history : mapping, Result or Trace
    target : int
    """
    for at, level in _curve(history):
        if level <= target:
            return at
    return None
