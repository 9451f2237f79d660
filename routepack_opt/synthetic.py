"""Seeded routing batches: families at production scale, stress cases, planted problems with a known optimum.

Per layer, a sample routes to expert e in proportion to exp of a sum of normal
effects: popularity (shared by all), the domain of its prompt, its prompt
group, and itself. Fine-grained experts are visited by bursts, so a sample may
also *spike*: a few experts take a large share of its tokens. Lengths are
log-normal with a domain and a group effect and a cap, so that lengths and
routing are correlated through both.

Counts are drawn by a normal approximation of sampling top_k experts without
replacement: x_e = M π_e + sqrt(M π_e (1 - π_e)) z_e with π_e the probability
that a token visits e, clipped to 0..M, scaled to a sum of top_k · M and rounded
systematically, so that every sum is exact and every draw costs the same
whatever M is. Same numpy, same seed: same bytes.

The benchmark families are frozen in ``data/families.toml``; see
:func:`families` and :func:`family`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from routepack_opt.arrays import IntArray
from routepack_opt.batch import RoutingBatch
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown
from routepack_opt.plan import Packing, Placement, Plan
from routepack_opt.problem import Cluster, Problem

__all__ = [
    "STRESS_KINDS",
    "LengthModel",
    "PlantedProblem",
    "RoutingModel",
    "RoutingStatistics",
    "SyntheticArrays",
    "families",
    "family",
    "family_parameters",
    "generate",
    "generate_lengths",
    "generate_arrays",
    "planted",
    "routing_statistics",
    "stress",
]

AnyArray = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

_CHUNK = 32


@dataclass(frozen=True)
class LengthModel:
    """Log-normal lengths with prompt groups and a cap.

    Attributes
    ----------
    sd : float
        Standard deviation of the log length.
    domain_share, group_share : float
        Shares of that variance between domains, and between prompt groups of a
        domain; the rest is between samples of a group. Their sum is at most 1.
    least, most : int
        Shortest and longest length; longer draws are cut to ``most``, as a
        generation limit does.
    mean : float
        Mean length after the cut, met by scaling.
    """

    sd: float = 0.8
    domain_share: float = 0.2
    group_share: float = 0.4
    least: int = 64
    most: int = 28_672
    mean: float = 8_192.0

    def __post_init__(self) -> None:
        faults = Faults()
        _in_range(faults, self, "sd", 0.0, 5.0)
        _in_range(faults, self, "domain_share", 0.0, 1.0)
        _in_range(faults, self, "group_share", 0.0, 1.0)
        if self.domain_share + self.group_share > 1.0:
            faults.add(f"domain_share + group_share is {self.domain_share + self.group_share}, above 1")
        if not 2 <= self.least <= self.most < 2**31:
            faults.add(f"lengths must satisfy 2 <= least <= most < 2^31; got {self.least} and {self.most}")
        elif not self.least <= self.mean <= self.most:
            faults.add(f"mean is {self.mean}, outside least {self.least} .. most {self.most}")
        faults.raise_if_any("length model")


@dataclass(frozen=True)
class RoutingModel:
    """How tokens choose experts; every ``sd`` is on the log of an expert's weight.

    Attributes
    ----------
    num_layers, num_experts, top_k : int
        L, E and K.
    popularity_sd, popularity_spread : float
        Popularity shared by all samples; layers range over
        ``popularity_sd · (1 ± popularity_spread)``.
    block_sd, num_blocks : float, int
        Popularity shared by ``num_blocks`` runs of neighbouring experts, which makes
        a contiguous placement uneven.
    num_domains, domain_sd : int, float
        Domains of prompts (frequencies fall as 1 / (d + 1)) and their effect.
    group_sd : float
        Effect of the prompt, shared by the rollouts of a group.
    sample_sd : float
        Idiosyncratic effect of a sample.
    spike_rate, spike : float
        Spikes a sample has per expert and layer, and what one adds to the log weight.
    spike_shared : float
        Fraction of the spikes shared by the rollouts of a group.
    most_visited : float
        Largest probability that a token visits one expert.
    """

    num_layers: int = 23
    num_experts: int = 128
    top_k: int = 8
    popularity_sd: float = 0.6
    popularity_spread: float = 0.35
    block_sd: float = 0.25
    num_blocks: int = 8
    num_domains: int = 6
    domain_sd: float = 0.3
    group_sd: float = 0.3
    sample_sd: float = 0.5
    spike_rate: float = 0.0
    spike: float = 0.0
    spike_shared: float = 0.5
    most_visited: float = 0.97

    def __post_init__(self) -> None:
        faults = Faults()
        for name in ("num_layers", "num_experts", "top_k", "num_blocks", "num_domains"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                faults.add(f"{name} is {value!r}; it must be an integer of at least 1")
        faults.raise_if_any("routing model")
        if self.top_k >= self.num_experts and self.num_experts > 1:
            faults.add(f"top_k is {self.top_k}; it must be below the {self.num_experts} experts")
        if self.num_experts % self.num_blocks:
            faults.add(f"{self.num_experts} experts are not divisible by num_blocks {self.num_blocks}")
        for name in ("popularity_sd", "block_sd", "domain_sd", "group_sd", "sample_sd", "spike"):
            _in_range(faults, self, name, 0.0, 5.0)
        _in_range(faults, self, "popularity_spread", 0.0, 1.0)
        _in_range(faults, self, "spike_rate", 0.0, 1.0)
        _in_range(faults, self, "spike_shared", 0.0, 1.0)
        _in_range(faults, self, "most_visited", 0.01, 1.0)
        faults.raise_if_any("routing model")


class SyntheticArrays(NamedTuple):
    """What a generated batch consists of.

    Attributes
    ----------
    lengths : ndarray of int64, shape [N]
        Tokens.
    counts : ndarray of uint16 or uint32, shape [N, L, E]
        Routed tokens.
    routed_tokens : ndarray of int64, shape [N]
        ``lengths`` - 1: the last token is never forwarded.
    group_ids, domains : ndarray of int64, shape [N]
        Prompt group and domain of each sample; groups are contiguous.
    """

    lengths: IntArray
    counts: AnyArray
    routed_tokens: IntArray
    group_ids: IntArray
    domains: IntArray


def _in_range(faults: Faults, owner: Any, name: str, least: float, most: float) -> None:
    value = getattr(owner, name)
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        faults.add(f"{name} is {value!r}; it must be a number in {least:g}..{most:g}")


def _check_sizes(num_samples: int, group_size: int, seed: int, step: int) -> None:
    faults = Faults()
    for name, value, least in (
        ("num_samples", num_samples, 1),
        ("group_size", group_size, 1),
        ("seed", seed, 0),
        ("step", step, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            faults.add(f"{name} is {value!r}; it must be an integer of at least {least}")
    faults.raise_if_any("synthetic batch")


def generate_lengths(
    model: LengthModel,
    *,
    num_samples: int,
    group_size: int = 8,
    num_domains: int = 1,
    seed: int = 0,
    step: int = 0,
) -> tuple[IntArray, IntArray, IntArray]:
    """Draw lengths with their prompt groups and domains.

    Parameters
    ----------
    model : LengthModel
    num_samples, group_size : int
        N, and rollouts of a prompt (the last group may be smaller).
    num_domains : int
        Domains of prompts; frequencies fall as 1 / (d + 1).
    seed, step : int
        The seed fixes the domains, the step draws new prompts and samples.

    Returns
    -------
    lengths, group_ids, domains : ndarray of int64, shape [N]
        Groups are numbered in order and contiguous.
    """
    _check_sizes(num_samples, group_size, seed, step)
    shared = np.random.default_rng([seed, 1])
    rng = np.random.default_rng([seed, 2, step])
    num_groups = -(-num_samples // group_size)
    frequency = 1.0 / np.arange(1, num_domains + 1)
    domain_effect = shared.standard_normal(num_domains)
    domain_of_group = rng.choice(num_domains, size=num_groups, p=frequency / frequency.sum())
    group_effect = rng.standard_normal(num_groups)
    group = np.arange(num_samples, dtype=np.int64) // group_size
    domain = domain_of_group[group].astype(np.int64)
    own = rng.standard_normal(num_samples)
    log = model.sd * (
        math.sqrt(model.domain_share) * domain_effect[domain]
        + math.sqrt(model.group_share) * group_effect[group]
        + math.sqrt(max(0.0, 1.0 - model.domain_share - model.group_share)) * own
    )
    shape = np.exp(log)
    low, high = model.least / shape.max(), model.most / shape.min()
    for _ in range(60):
        scale = math.sqrt(low * high)
        if np.clip(np.rint(scale * shape), model.least, model.most).mean() < model.mean:
            low = scale
        else:
            high = scale
    lengths = np.clip(np.rint(low * shape), model.least, model.most).astype(np.int64)
    return lengths, group, domain


@njit(cache=True, nogil=True)
def _water_fill(row: AnyArray, total: float, most: float) -> None:
    """Scale ``row`` to the sum ``total`` with no entry above ``most`` (total ≤ most · nonzero entries)."""
    for _ in range(50):
        free = 0.0
        fixed = 0.0
        for e in range(row.shape[0]):
            if row[e] >= most:
                row[e] = most
                fixed += most
            else:
                free += row[e]
        if free <= 0.0:
            return
        scale = (total - fixed) / free
        again = False
        for e in range(row.shape[0]):
            if row[e] < most:
                row[e] *= scale
                again |= row[e] > most
        if not again:
            return


@njit(cache=True, nogil=True)
def _draw(
    weights: AnyArray,
    tokens: AnyArray,
    top_k: int,
    noise: AnyArray,
    offsets: AnyArray,
    most_visits: float,
    counts: AnyArray,
) -> None:
    """Counts [n, L, E] of ``tokens`` [n] from log weights [n, L, E], normal noise and uniform offsets [n, L]."""
    num_experts = weights.shape[2]
    row = np.empty(num_experts, dtype=np.float64)
    for i in range(weights.shape[0]):
        m = float(tokens[i])
        for layer in range(weights.shape[1]):
            highest = -np.inf
            for e in range(num_experts):
                highest = max(highest, weights[i, layer, e])
            usable = 0
            for e in range(num_experts):
                row[e] = math.exp(weights[i, layer, e] - highest)
                if row[e] < 1e-30:
                    row[e] = 0.0
                usable += row[e] > 0.0
            cap = most_visits if usable * most_visits > top_k else 1.0
            total = 0.0
            for e in range(num_experts):
                total += row[e]
            for e in range(num_experts):
                row[e] *= top_k / total
            _water_fill(row, float(top_k), cap)
            for e in range(num_experts):
                share = row[e]
                x = m * share + math.sqrt(m * share * max(0.0, 1.0 - share)) * noise[i, layer, e]
                if share > 0.0:
                    x = max(x, 0.02 * m * share)
                row[e] = min(m, x)
            total = 0.0
            for e in range(num_experts):
                total += row[e]
            for e in range(num_experts):
                row[e] *= top_k * m / total
            _water_fill(row, top_k * m, m)
            running = offsets[i, layer]
            before = 0
            left = top_k * int(tokens[i])
            last = 0
            for e in range(num_experts):
                if row[e] <= 0.0:
                    continue
                running += row[e]
                upto = math.floor(running)
                count = min(upto - before, left, int(tokens[i]))
                counts[i, layer, e] = count
                left -= count
                before = upto
                last = e
            e = last
            while left > 0:  # rounding errors of the running sum: at most a few tokens
                if row[e] > 0.0 and counts[i, layer, e] < tokens[i]:
                    counts[i, layer, e] += 1
                    left -= 1
                e = e - 1 if e > 0 else num_experts - 1


def _shared_effects(model: RoutingModel, seed: int) -> tuple[FloatArray, FloatArray]:
    """Log popularity [L, E] and domain effects [domains, L, E]."""
    rng = np.random.default_rng([seed, 3])
    shape = (model.num_layers, model.num_experts)
    spread = rng.permutation(np.linspace(-1.0, 1.0, model.num_layers)) if model.num_layers > 1 else np.zeros(1)
    sd = model.popularity_sd * (1.0 + model.popularity_spread * spread)
    popularity = rng.standard_normal(shape) * sd[:, None]
    block = rng.standard_normal((model.num_layers, model.num_blocks)) * model.block_sd
    popularity += np.repeat(block, model.num_experts // model.num_blocks, axis=1)
    domain = rng.standard_normal((model.num_domains, *shape), dtype=np.float32) * np.float32(model.domain_sd)
    return popularity.astype(np.float32), domain


def _spikes(rng: np.random.Generator, log: FloatArray, rate: float, spike: float) -> None:
    """Add ``spike`` to a Poisson number of places of each row [..., E] in place."""
    flat = log.reshape(-1, log.shape[-1])
    number = rng.poisson(rate * flat.shape[1], size=flat.shape[0])
    row = np.repeat(np.arange(flat.shape[0]), number)
    place = rng.integers(0, flat.shape[1], size=len(row))
    flat[row, place] += np.float32(spike)


def generate_arrays(
    routing: RoutingModel,
    lengths: LengthModel,
    *,
    num_samples: int,
    group_size: int = 8,
    seed: int = 0,
    step: int = 0,
    popularity: npt.ArrayLike | None = None,
) -> SyntheticArrays:
    """Draw one optimizer step.

    Parameters
    ----------
    routing, lengths : RoutingModel, LengthModel
    num_samples, group_size : int
        N, and rollouts of a prompt.
    seed, step : int
        The seed fixes popularity and domains, the step draws new prompts and samples.
    popularity : array-like of float, shape [L, E], optional
        Log weights to use instead of drawn popularity; -inf for an expert no token chooses.

    Returns
    -------
    SyntheticArrays

    Raises
    ------
    InvalidInputError
        If a size is out of range, or fewer than top_k + 1 experts of a layer can be chosen.
    """
    token_lengths, group, domain = generate_lengths(
        lengths,
        num_samples=num_samples,
        group_size=group_size,
        num_domains=routing.num_domains,
        seed=seed,
        step=step,
    )
    base, domain_effect = _shared_effects(routing, seed)
    if popularity is not None:
        base = np.asarray(popularity, dtype=np.float32)
        if base.shape != (routing.num_layers, routing.num_experts) or np.isnan(base).any():
            raise InvalidInputError(
                f"popularity must be [{routing.num_layers}, {routing.num_experts}] without NaN; got {list(base.shape)}",
                context="synthetic batch",
            )
        usable = np.isfinite(base).sum(axis=1)
        if usable.min() <= routing.top_k:
            layer = int(usable.argmin())
            raise InvalidInputError(
                f"layer {layer}: {usable[layer]} experts can be chosen; top-{routing.top_k} needs more",
                context="synthetic batch",
            )
    rng = np.random.default_rng([seed, 4, step])
    shape = (routing.num_layers, routing.num_experts)
    routed = token_lengths - 1
    counts = np.zeros((num_samples, *shape), dtype=np.uint16 if int(routed.max()) <= 65535 else np.uint32)
    shared_rate = routing.spike_rate * routing.spike_shared
    own_rate = routing.spike_rate - shared_rate
    effect = np.empty(shape, dtype=np.float32)
    current = -1
    log = np.empty((_CHUNK, *shape), dtype=np.float32)
    noise = np.empty((_CHUNK, *shape), dtype=np.float32)
    for start in range(0, num_samples, _CHUNK):
        stop = min(num_samples, start + _CHUNK)
        n = stop - start
        rng.standard_normal(out=log[:n], dtype=np.float32)
        log[:n] *= np.float32(routing.sample_sd)
        if own_rate > 0 and routing.spike > 0:
            _spikes(rng, log[:n], own_rate, routing.spike)
        for i in range(start, stop):
            if group[i] != current:
                current = int(group[i])
                rng.standard_normal(out=effect, dtype=np.float32)
                effect *= np.float32(routing.group_sd)
                if shared_rate > 0 and routing.spike > 0:
                    _spikes(rng, effect, shared_rate, routing.spike)
                effect += base
                effect += domain_effect[domain[i]]
            log[i - start] += effect
        rng.standard_normal(out=noise[:n], dtype=np.float32)
        offsets = rng.random((n, routing.num_layers))
        _draw(log[:n], routed[start:stop], routing.top_k, noise[:n], offsets, routing.most_visited, counts[start:stop])
    return SyntheticArrays(token_lengths, counts, routed, group, domain)


class RoutingStatistics(NamedTuple):
    """How uneven a batch is; imbalance is max ÷ mean over EP ranks.

    Attributes
    ----------
    load_cv : tuple of float
        Population std ÷ mean of the window's expert loads: mean and max over layers.
    imbalance : tuple of float
        Of the window under the contiguous placement: mean and max over layers.
    sample_imbalance : tuple of float
        Of single samples under the contiguous placement: mean and 95th percentile
        over samples and layers.
    sample_imbalance_lpt : tuple of float
        The same after placing experts by descending window load (LPT, E / P a rank).
    total_variation : float
        ½ Σ_e |share of e in a sample − in the window|, mean over samples and layers.
    most_visited : float
        Share of a sample's tokens that visit its most visited expert: median
        over samples and layers.
    length_quantiles : tuple of int
        Minimum, 5th, 25th, 50th, 75th and 95th percentile and maximum of the lengths.
    """

    load_cv: tuple[float, float]
    imbalance: tuple[float, float]
    sample_imbalance: tuple[float, float]
    sample_imbalance_lpt: tuple[float, float]
    total_variation: float
    most_visited: float
    length_quantiles: tuple[int, ...]


def _lpt_ranks(load: IntArray, ep_size: int) -> IntArray:
    """Ranks [L, E] by longest processing time with E / P experts a rank, ties to lower indices."""
    num_layers, num_experts = load.shape
    ranks = np.empty((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        rank_load = np.zeros(ep_size)
        free = np.full(ep_size, num_experts // ep_size)
        for expert in np.argsort(-load[layer], kind="stable"):
            rank = int(np.argmin(np.where(free > 0, rank_load, np.inf)))
            ranks[layer, expert] = rank
            rank_load[rank] += load[layer, expert]
            free[rank] -= 1
    return ranks


def _imbalance_of_samples(counts: AnyArray, ranks: IntArray, ep_size: int) -> npt.NDArray[np.float64]:
    order = np.argsort(ranks, axis=1, kind="stable")
    sorted_counts = np.take_along_axis(counts, order[None], axis=2)
    load = sorted_counts.reshape(*counts.shape[:2], ep_size, -1).sum(axis=3, dtype=np.int64)
    result: npt.NDArray[np.float64] = load.max(axis=2) / load.mean(axis=2)
    return result


def routing_statistics(
    counts: npt.ArrayLike, lengths: npt.ArrayLike | None = None, *, ep_size: int, top_k: int | None = None
) -> RoutingStatistics:
    """Measure how uneven recorded or generated routing is.

    Parameters
    ----------
    counts : array-like of int, shape [N, L, E]
    lengths : array-like of int, shape [N], optional
        Tokens of each sample; default: routed tokens.
    ep_size : int
        P; divides E.
    top_k : int, optional
        K, for ``most_visited`` and default lengths; read off the counts and
        lengths when missing, else 1.

    Returns
    -------
    RoutingStatistics
    """
    array = np.asarray(counts)
    if array.ndim != 3 or array.shape[2] % ep_size:
        raise InvalidInputError(f"counts must be [N, L, E] with E divisible by {ep_size}; got {list(array.shape)}")
    num_layers, num_experts = array.shape[1:]
    load = array.sum(axis=0, dtype=np.int64)
    rank_load = load.reshape(num_layers, ep_size, -1).sum(axis=2)
    window = rank_load.max(axis=1) / rank_load.mean(axis=1)
    contiguous = np.broadcast_to(np.arange(num_experts) // (num_experts // ep_size), load.shape)
    single = _imbalance_of_samples(array, contiguous, ep_size)
    placed = _imbalance_of_samples(array, _lpt_ranks(load, ep_size), ep_size)
    share = load / load.sum(axis=1, keepdims=True)
    sums = array[:, 0].sum(axis=1, dtype=np.int64)
    if top_k is None:
        top_k = 1 if lengths is None else max(1, round(float(sums.sum() / np.asarray(lengths).sum())))
    token_lengths = sums // top_k if lengths is None else np.asarray(lengths)
    distance = np.empty(array.shape[:2])
    visited = np.empty(array.shape[:2])
    for i in range(array.shape[0]):
        own = array[i] / sums[i]
        distance[i] = 0.5 * np.abs(own - share).sum(axis=1)
        visited[i] = own.max(axis=1) * top_k
    cv = load.std(axis=1) / load.mean(axis=1)
    quantiles = np.quantile(token_lengths, [0, 0.05, 0.25, 0.5, 0.75, 0.95, 1], method="nearest")
    return RoutingStatistics(
        load_cv=(float(cv.mean()), float(cv.max())),
        imbalance=(float(window.mean()), float(window.max())),
        sample_imbalance=(float(single.mean()), float(np.quantile(single, 0.95))),
        sample_imbalance_lpt=(float(placed.mean()), float(np.quantile(placed, 0.95))),
        total_variation=float(distance.mean()),
        most_visited=float(np.median(visited)),
        length_quantiles=tuple(int(q) for q in quantiles),
    )


def generate(
    routing: RoutingModel,
    lengths: LengthModel,
    *,
    num_samples: int,
    group_size: int = 8,
    seed: int = 0,
    step: int = 0,
) -> RoutingBatch:
    """Draw one optimizer step as a batch; see :func:`generate_arrays`."""
    return _batch(
        generate_arrays(routing, lengths, num_samples=num_samples, group_size=group_size, seed=seed, step=step),
        routing.top_k,
    )


def _batch(arrays: SyntheticArrays, top_k: int) -> RoutingBatch:
    return RoutingBatch.from_arrays(
        arrays.lengths,
        arrays.counts,
        top_k=top_k,
        routed_tokens=arrays.routed_tokens,
        group_ids=arrays.group_ids,
    )


# ------------------------------------------------------------------- families


@cache
def _family_file() -> dict[str, Any]:
    text = resources.files("routepack_opt.data").joinpath("families.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def families() -> tuple[str, ...]:
    """Names of the frozen benchmark families, such as ``"flash-p8-low"``."""
    return tuple(_family_file()["family"])


def _family(name: str) -> Mapping[str, Any]:
    known = _family_file()["family"]
    unknown = refuse_unknown([name], list(known), "family")
    if unknown:
        raise InvalidInputError(unknown)
    found: Mapping[str, Any] = known[name]
    return found


def family_parameters(name: str) -> dict[str, Any]:
    """Everything that defines a frozen family, for tables and reports.

    Returns
    -------
    dict
        ``num_samples``, ``group_size``, ``seed``, ``capacity``, ``ep_size``,
        ``dp_size``, ``num_shards``, ``cost``, ``noise``, and the fields of
        ``lengths`` and ``routing`` as dicts.
    """
    entry = _family(name)
    document = _family_file()
    return {
        **document["common"],
        **{key: value for key, value in entry.items() if key != "model"},
        "lengths": asdict(LengthModel(**document["lengths"])),
        "routing": asdict(
            RoutingModel(**document["model"][entry["model"]], **document["noise"][entry["model"]][entry["noise"]])
        ),
    }


def family(name: str, *, seed: int | None = None, step: int = 0) -> Problem:
    """Draw the problem of a frozen family.

    Parameters
    ----------
    name : str
        One of :func:`families`.
    seed : int, optional
        Default: the frozen seed. Quality figures are comparable for equal
        seeds and steps only.
    step : int
        Optimizer step: new prompts and samples from the same popularity.

    Returns
    -------
    Problem

    Raises
    ------
    InvalidInputError
        If the name is unknown (the nearest one is named).
    """
    values = family_parameters(name)
    batch = generate(
        RoutingModel(**values["routing"]),
        LengthModel(**values["lengths"]),
        num_samples=values["num_samples"],
        group_size=values["group_size"],
        seed=values["seed"] if seed is None else seed,
        step=step,
    )
    return Problem.from_batch(
        batch,
        capacity=values["capacity"],
        cluster=Cluster.from_sizes(
            ep_size=values["ep_size"], dp_size=values["dp_size"], num_shards=values["num_shards"]
        ),
        cost=values["cost"],
    )


# ------------------------------------------------------------- stress families

STRESS_KINDS: Final = (
    "balanced",
    "hot_experts",
    "hot_rank",
    "spread_heat",
    "zero_load",
    "rotating",
    "burst",
)
"""Kinds of :func:`stress`."""


def stress(
    kind: str,
    *,
    num_samples: int = 128,
    num_layers: int = 8,
    num_experts: int = 64,
    top_k: int = 4,
    ep_size: int = 8,
    heat: float = 8.0,
    lengths: LengthModel | None = None,
    group_size: int = 8,
    seed: int = 0,
    step: int = 0,
) -> RoutingBatch:
    """Draw a batch that is hard, or easy, for one known reason.

    ``balanced``
        The control: every expert alike, no noise.
    ``hot_experts``
        One expert in 32 (at least one) of every layer is ``heat`` times as popular.
    ``hot_rank``
        The experts a contiguous placement gives to one EP rank are ``heat`` times as popular.
    ``spread_heat``
        The same heat on as many experts, spread over the layer: contiguous placement
        does well by luck, a placement by load does not need it.
    ``zero_load``
        A whole contiguous rank and a quarter of the other experts are never chosen.
    ``rotating``
        ``hot_rank`` with the rank moving on by one every step.
    ``burst``
        The last prompt group generates up to the length limit and lives on
        2 · top_k experts.

    Parameters
    ----------
    kind : str
        One of :data:`STRESS_KINDS`.
    num_samples, num_layers, num_experts, top_k, ep_size, group_size : int
        N, L, E, K, P and rollouts of a prompt. E is divisible by P.
    heat : float
        How many times as popular, above 1. Unused by ``balanced`` and ``zero_load``,
        where it must stay at its default.
    lengths : LengthModel, optional
        Default: lengths up to 4,096 with mean 1,200.
    seed, step : int
        The seed fixes which experts are hot, the step draws new samples.

    Returns
    -------
    RoutingBatch
    """
    faults = Faults()
    faults.extend(refuse_unknown([kind], list(STRESS_KINDS), "kind of stress"))
    if ep_size < 1 or num_experts % max(1, ep_size):
        faults.add(f"{num_experts} experts are not divisible by ep_size {ep_size}")
    if not heat > 1.0 or not math.isfinite(heat):
        faults.add(f"heat is {heat!r}; it must be a finite number above 1")
    elif kind in ("balanced", "zero_load") and heat != 8.0:
        faults.add(f"heat changes nothing for {kind!r}; leave it out")
    faults.raise_if_any("stress batch")
    _check_sizes(num_samples, group_size, seed, step)
    noise = 0.0 if kind == "balanced" else 0.2
    model = RoutingModel(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        popularity_sd=0.0,
        block_sd=0.0,
        num_blocks=1,
        num_domains=1,
        domain_sd=0.0,
        group_sd=noise,
        sample_sd=noise,
    )
    token_lengths = LengthModel(least=32, most=4_096, mean=1_200.0) if lengths is None else lengths
    rng = np.random.default_rng([seed, 5])
    per_rank = num_experts // ep_size
    popularity = np.zeros((num_layers, num_experts), dtype=np.float32)
    gain = np.float32(math.log(heat))
    if kind in ("hot_rank", "spread_heat", "rotating"):
        rank = (int(rng.integers(ep_size)) + (step if kind == "rotating" else 0)) % ep_size
        popularity[:, rank * per_rank : (rank + 1) * per_rank] = gain
        if kind == "spread_heat":
            popularity = _dealt(popularity, rank, per_rank, ep_size)
    elif kind == "hot_experts":
        for layer in range(num_layers):
            popularity[layer, rng.choice(num_experts, max(1, num_experts // 32), replace=False)] = gain
    elif kind == "zero_load":
        idle = int(rng.integers(ep_size))
        others = np.setdiff1d(np.arange(num_experts), np.arange(idle * per_rank, (idle + 1) * per_rank))
        popularity[:, idle * per_rank : (idle + 1) * per_rank] = -np.inf
        for layer in range(num_layers):
            unused = rng.choice(others, min(len(others) // 4, max(0, len(others) - top_k - 1)), replace=False)
            popularity[layer, unused] = -np.inf
    num_burst = min(group_size, num_samples - 1) if kind == "burst" else 0
    arrays = generate_arrays(
        model,
        token_lengths,
        num_samples=num_samples - num_burst,
        group_size=group_size,
        seed=seed,
        step=step,
        popularity=popularity,
    )
    if num_burst:
        hot = np.zeros_like(popularity)
        for layer in range(num_layers):
            hot[layer, rng.choice(num_experts, min(num_experts, 2 * top_k), replace=False)] = gain
        at_limit = LengthModel(least=token_lengths.most, most=token_lengths.most, mean=float(token_lengths.most))
        burst = generate_arrays(
            model, at_limit, num_samples=num_burst, group_size=group_size, seed=seed + 1, step=step, popularity=hot
        )
        burst = burst._replace(group_ids=burst.group_ids + arrays.group_ids.max() + 1)
        arrays = SyntheticArrays(*(np.concatenate(pair) for pair in zip(arrays, burst, strict=True)))
    return _batch(arrays, top_k)


def _dealt(popularity: FloatArray, rank: int, per_rank: int, ep_size: int) -> FloatArray:
    """Exchange the experts of the hot rank so that every rank has an equal share of them, if it can."""
    dealt = popularity.copy()
    for j in range(per_rank):
        source, target = rank * per_rank + j, (j % ep_size) * per_rank + j
        dealt[:, [source, target]] = dealt[:, [target, source]]
    return dealt


# -------------------------------------------------------------------- planted


class PlantedProblem(NamedTuple):
    """A problem with a plan that is optimal by construction.

    Attributes
    ----------
    problem : Problem
    plan : Plan
        Meets the average attention and the average expert load in every block, so
        no plan of any placement scores better on any level.
    """

    problem: Problem
    plan: Plan


@njit(cache=True, nogil=True)
def _balanced_rank_loads(first: AnyArray, row_total: AnyArray, column_total: int, most: AnyArray) -> AnyArray:
    """Integers [n, P] near ``first`` with exact row totals and equal column totals.

    Iterative proportional fitting, then rounding down and dealing the missing
    units to the columns that lack most.
    """
    n, num_columns = first.shape
    x = first.copy()
    for _ in range(60):
        for p in range(num_columns):
            total = 0.0
            for i in range(n):
                total += x[i, p]
            for i in range(n):
                x[i, p] = min(x[i, p] * column_total / total, float(most[i]))
        for i in range(n):
            total = 0.0
            for p in range(num_columns):
                total += x[i, p]
            for p in range(num_columns):
                x[i, p] *= row_total[i] / total
    result = np.empty((n, num_columns), dtype=np.int64)
    row_lack = row_total.copy()
    column_lack = np.full(num_columns, column_total, dtype=np.int64)
    for i in range(n):
        for p in range(num_columns):
            result[i, p] = min(math.floor(x[i, p]), most[i])
            row_lack[i] -= result[i, p]
            column_lack[p] -= result[i, p]
    for p in range(num_columns):
        while column_lack[p] < 0:
            i = int(np.argmax(result[:, p]))
            result[i, p] -= 1
            column_lack[p] += 1
            row_lack[i] += 1
    for i in range(n):
        while row_lack[i] > 0:
            best = -1
            for p in range(num_columns):
                if result[i, p] < most[i] and (best < 0 or column_lack[p] > column_lack[best]):
                    best = p
            result[i, best] += 1
            row_lack[i] -= 1
            column_lack[best] -= 1
    # Row totals are exact; move single units within rows until the columns are too.
    while True:
        over = int(np.argmin(column_lack))
        if column_lack[over] == 0:
            return result
        under = int(np.argmax(column_lack))
        for i in range(n):
            if result[i, over] > 0 and result[i, under] < most[i]:
                result[i, over] -= 1
                result[i, under] += 1
                column_lack[over] += 1
                column_lack[under] -= 1
                break


@njit(cache=True, nogil=True)
def _spread_in_ranks(rank_load: AnyArray, weights: AnyArray, tokens: AnyArray, counts: AnyArray) -> None:
    """Spread rank loads [n, P] of one layer over each rank's experts by weights [n, E], at most ``tokens`` each."""
    n, num_ranks = rank_load.shape
    per_rank = weights.shape[1] // num_ranks
    row = np.empty(per_rank, dtype=np.float64)
    for i in range(n):
        for p in range(num_ranks):
            total = 0.0
            for e in range(per_rank):
                row[e] = weights[i, p * per_rank + e]
                total += row[e]
            for e in range(per_rank):
                row[e] *= rank_load[i, p] / total
            _water_fill(row, float(rank_load[i, p]), float(tokens[i]))
            left = rank_load[i, p]
            running = 0.0
            before = 0
            for e in range(per_rank):
                running += row[e]
                upto = math.floor(running + 0.5)
                count = max(0, min(upto - before, left, tokens[i]))
                counts[i, p * per_rank + e] = count
                left -= count
                before = upto
            e = 0
            while left > 0:
                if counts[i, p * per_rank + e] < tokens[i]:
                    counts[i, p * per_rank + e] += 1
                    left -= 1
                e = (e + 1) % per_rank


def planted(
    *,
    num_rows: int = 8,
    ep_size: int = 8,
    dp_size: int = 16,
    num_shards: int = 2,
    num_layers: int = 23,
    num_experts: int = 128,
    top_k: int = 8,
    samples_per_cell: int = 6,
    fill: float = 0.97,
    mean_length: int = 5_000,
    noise: float = 0.5,
    cost: CostModel | str | None = None,
    seed: int = 0,
) -> PlantedProblem:
    """Build a problem backwards from a perfect plan, so that the optimum equals the bound.

    Every cell holds triples of samples c + {0, 4k, 5k} or c + {k, 2k, 6k} (an ideal
    Prouhet-Tarry-Escott pair of degree 2: equal sums and equal sums of squares),
    so all cells have the same T and Q while lengths differ. In every block and
    layer, the samples' noisy rank loads are rounded to integers whose column
    sums are exactly equal. Experts are then relabelled layer by layer and the
    samples shuffled.

    Parameters
    ----------
    num_rows, ep_size, dp_size, num_shards, num_layers, num_experts, top_k : int
        R, P, D, G, L, E, K.
    samples_per_cell : int
        Samples of a cell; a multiple of 3.
    fill : float
        Tokens of a cell ÷ capacity, above (R - 1) / R so that fewer rows cannot hold the batch.
    mean_length : int
        About the mean length in tokens, at least 30.
    noise : float
        Standard deviation of the log rank load and the log expert weight of a sample.
    cost : CostModel or str, optional
        Cost model or preset name. Default: one class with α = β = L.
    seed : int

    Returns
    -------
    PlantedProblem

    Raises
    ------
    InvalidInputError
        If a size is out of range or does not divide.
    """
    faults = Faults()
    for label, value, least in (
        ("num_rows", num_rows, 1),
        ("ep_size", ep_size, 1),
        ("dp_size", dp_size, 1),
        ("num_shards", num_shards, 1),
        ("num_layers", num_layers, 1),
        ("num_experts", num_experts, 1),
        ("top_k", top_k, 1),
        ("samples_per_cell", samples_per_cell, 3),
        ("mean_length", mean_length, 30),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
            faults.add(f"{label} is {value!r}; it must be an integer of at least {least}")
    faults.raise_if_any("planted problem")
    if samples_per_cell % 3:
        faults.add(f"samples_per_cell is {samples_per_cell}; it must be a multiple of 3")
    if num_experts % ep_size:
        faults.add(f"{num_experts} experts are not divisible by ep_size {ep_size}")
    if dp_size % num_shards:
        faults.add(f"{dp_size} DP slots are not divisible by {num_shards} shards")
    if top_k > num_experts or 2 * top_k > num_experts:
        faults.add(f"top_k is {top_k}; it must be at most half of the {num_experts} experts")
    if not (num_rows - 1) / num_rows < fill <= 1.0:
        faults.add(f"fill is {fill!r}; it must be above {(num_rows - 1) / num_rows:.3f} and at most 1")
    if not 0.0 <= noise <= 2.0:
        faults.add(f"noise is {noise!r}; it must be in 0..2")
    faults.raise_if_any("planted problem")
    rng = np.random.default_rng([seed, 6])
    shard_size = dp_size // num_shards
    num_triples = samples_per_cell // 3
    per_rank = num_experts // ep_size
    # Block tokens times K must divide evenly over the ranks.
    grain = ep_size // math.gcd(ep_size, top_k * shard_size)
    share = rng.dirichlet(np.full(num_triples, 3.0)) * num_triples
    k = np.maximum(1, np.rint(share * mean_length / 6 * rng.uniform(0.6, 1.4, num_triples) / grain)).astype(np.int64)
    c = np.maximum(1, np.rint(share * mean_length / grain) - 3 * k).astype(np.int64)
    pattern = np.array([[0, 4, 5], [1, 2, 6]], dtype=np.int64)
    num_cells = num_rows * dp_size
    variant = rng.integers(0, 2, size=(num_cells, num_triples))
    cell_lengths = grain * (c[None, :, None] + k[None, :, None] * pattern[variant])
    lengths = cell_lengths.reshape(num_cells, samples_per_cell)
    cell_tokens = int(lengths[0].sum())
    capacity = max(int(lengths.max()), math.floor(cell_tokens / fill))
    if capacity * (num_rows - 1) * dp_size >= cell_tokens * num_cells:
        raise InvalidInputError(
            f"lengths of about {mean_length} tokens are too short to round to fill {fill}", context="planted problem"
        )
    cluster = Cluster.from_sizes(ep_size=ep_size, dp_size=dp_size, num_shards=num_shards)
    cell = np.arange(num_cells).reshape(num_rows, dp_size)
    dtype = np.uint16 if int(lengths.max()) <= 65535 else np.uint32
    counts = np.zeros((num_cells * samples_per_cell, num_layers, num_experts), dtype=dtype)
    popularity = rng.standard_normal((num_layers, num_experts)) * noise
    for row in range(num_rows):
        for slots in cluster.shards:
            cells = cell[row, list(slots)]
            samples = (cells[:, None] * samples_per_cell + np.arange(samples_per_cell)).ravel()
            tokens = lengths[cells].ravel()
            most = np.minimum(top_k, per_rank) * tokens
            column_total = top_k * int(tokens.sum()) // ep_size
            for layer in range(num_layers):
                share_of_rank = np.exp(rng.standard_normal((len(samples), ep_size)) * noise)
                share_of_rank /= share_of_rank.sum(axis=1, keepdims=True)
                first = np.minimum(share_of_rank * (top_k * tokens)[:, None], 0.95 * most[:, None])
                rank_load = _balanced_rank_loads(first, top_k * tokens, column_total, most)
                weights = np.exp(popularity[layer] + rng.standard_normal((len(samples), num_experts)) * noise)
                out = np.zeros((len(samples), num_experts), dtype=np.int64)
                _spread_in_ranks(rank_load, weights, tokens, out)
                counts[samples, layer] = out
    slot_of_expert = np.stack([rng.permutation(num_experts) for _ in range(num_layers)])
    counts = np.take_along_axis(counts, slot_of_expert[None], axis=2)
    order = rng.permutation(num_cells * samples_per_cell)
    cell_of_sample = np.repeat(np.arange(num_cells), samples_per_cell)[order]
    problem = Problem.from_batch(
        RoutingBatch.from_arrays(lengths.ravel()[order], counts[order], top_k=top_k),
        capacity=capacity,
        cluster=cluster,
        cost=CostModel((OperatorClass("attention", Fraction(num_layers), Fraction(num_layers)),))
        if cost is None
        else cost,
        num_rows=num_rows,
    )
    packing = Packing.from_arrays(cell_of_sample // dp_size, cell_of_sample % dp_size)
    plan = Plan.of(problem, Placement.from_slots(slot_of_expert, ep_size=ep_size), packing)
    return PlantedProblem(problem, plan)
