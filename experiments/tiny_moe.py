"""A small byte-level Mixture-of-Experts language model that records and replays its routing.

The model exists so that every claim about planned layouts can be tested on something that
trains on one core: rows may hold several samples (attention stays inside a sample), every
forward pass returns the expert ids of every token and layer, and a forward pass may be given
recorded ids instead (routing replay: the router's probabilities of *those* experts are used).

Experts are stored fused, ``[num_experts, out, in]``, as inference engines do; they are taken
apart with ``unbind``, because indexing a fused weight inside a loop builds one gradient of the
full size per expert.

Architecture: pre-norm transformer with rotary positions (doi:10.1016/j.neucom.2023.127063),
softmax attention, and a top-k router with renormalised probabilities and the load-balancing
loss of Switch Transformers (https://jmlr.org/papers/v23/21-0998.html, eq. 4).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from routepack_opt.materialization import Family, TensorPattern

END_OF_SAMPLE = 0
"""Byte that ends a sample; text never contains it."""

PADDING_SEGMENT = -1
"""Segment id of padding positions of a packed row."""


EXPERT_STATE = Family(
    "tiny-moe",
    (
        TensorPattern(r"layers\.(?P<layer>\d+)\.mlp\.experts\.(?:gate_up|down)_proj(?:_bias)?", "expert"),
        TensorPattern(r"layers\.(?P<layer>\d+)\.mlp\.router\.weight", "router"),
        TensorPattern(
            r"layers\.(?P<layer>\d+)\.mlp\.router\.(?:bias|score_correction_bias|tokens_per_expert)", "per_expert"
        ),
    ),
)
"""Where `TinyMoE` keeps what has to move with its experts."""


@dataclass(frozen=True)
class TinyMoEConfig:
    """Sizes of a `TinyMoE`.

    Parameters
    ----------
    num_layers : int
        Transformer blocks; all of them are MoE layers.
    num_experts, top_k : int
        Logical experts a layer and routed experts a token.
    hidden_size, expert_size, num_heads : int
        Widths of the residual stream and of one expert's inner layer; attention heads.
    vocab_size : int
        Token ids; 256 for bytes.
    balance_weight : float
        Weight of the load-balancing loss.
    """

    num_layers: int = 6
    num_experts: int = 32
    top_k: int = 4
    hidden_size: int = 128
    expert_size: int = 64
    num_heads: int = 4
    vocab_size: int = 256
    balance_weight: float = 0.01
    rotary_base: float = 10_000.0


class TinyMoEOutput(NamedTuple):
    """What one forward pass returns.

    ``logits`` float [B, T, vocab]; ``routed_ids`` int64 [B, T, L, K], most probable expert
    first; ``balance_loss`` scalar, already weighted.
    """

    logits: Tensor
    routed_ids: Tensor
    balance_loss: Tensor


class RMSNorm(nn.Module):
    """Root-mean-square normalisation with a gain."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Router(nn.Module):
    """Scores experts; a correction bias may shift the selection but not the weights.

    ``score_correction_bias`` (as in DeepSeek-V3, arXiv:2412.19437 §2.1.2) is zero unless set;
    ``tokens_per_expert`` counts routed tokens since it was last reset. Both are per expert and
    therefore have to move with the experts.
    """

    score_correction_bias: Tensor
    tokens_per_expert: Tensor

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts))
        self.register_buffer("score_correction_bias", torch.zeros(config.num_experts))
        self.register_buffer("tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64))
        nn.init.normal_(self.weight, std=config.hidden_size**-0.5)

    def forward(self, x: Tensor, routed_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Route ``x`` float [T, d]; return ids [T, K], weights [T, K], probabilities [T, E]."""
        probabilities = functional.linear(x, self.weight, self.bias).softmax(-1)
        if routed_ids is None:
            routed_ids = (probabilities + self.score_correction_bias).topk(self.top_k, dim=-1).indices
        weights = probabilities.gather(-1, routed_ids)
        return routed_ids, weights / weights.sum(-1, keepdim=True), probabilities


class Experts(nn.Module):
    """All experts of a layer, fused along their first axis."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        num_experts, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(num_experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner))
        self.down_proj_bias = nn.Parameter(torch.zeros(num_experts, hidden))
        nn.init.normal_(self.gate_up_proj, std=hidden**-0.5)
        nn.init.normal_(self.down_proj, std=inner**-0.5 / (2 * config.num_layers) ** 0.5)

    def forward(self, x: Tensor, routed_ids: Tensor, weights: Tensor) -> Tensor:
        """Mix the experts ``routed_ids`` [T, K] of tokens ``x`` [T, d] by ``weights`` [T, K]."""
        num_tokens, top_k = routed_ids.shape
        flat_ids = routed_ids.reshape(-1)
        order = flat_ids.argsort(stable=True)
        sizes = torch.bincount(flat_ids, minlength=self.gate_up_proj.shape[0]).tolist()
        inputs = x.index_select(0, order // top_k).split(sizes)
        outputs = [
            self._expert(part, *parameters)
            for part, *parameters in zip(
                inputs,
                self.gate_up_proj.unbind(),
                self.gate_up_proj_bias.unbind(),
                self.down_proj.unbind(),
                self.down_proj_bias.unbind(),
                strict=True,
            )
            if len(part)
        ]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        mixed = torch.cat(outputs).index_select(0, place).view(num_tokens, top_k, -1)
        return (mixed * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def _expert(x: Tensor, gate_up: Tensor, gate_up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        gate, up = functional.linear(x, gate_up, gate_up_bias).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, down, down_bias)


class SparseMLP(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.balance_weight = config.balance_weight
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, routed_ids: Tensor | None, counted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mixture [B, T, d], the ids [B, T, K] and the weighted balance loss."""
        rows, row_length, hidden = x.shape
        flat = x.reshape(-1, hidden)
        given = None if routed_ids is None else routed_ids.reshape(rows * row_length, -1)
        ids, weights, probabilities = self.router(flat, given)
        mixed = self.experts(flat, ids, weights)
        counted_ids, counted_probabilities = ids, probabilities
        if counted is not None:
            keep = counted.reshape(-1)
            counted_ids, counted_probabilities = ids[keep], probabilities[keep]
        load = torch.bincount(counted_ids.reshape(-1), minlength=self.num_experts)
        if self.training:
            self.router.tokens_per_expert += load
        share = load.to(x.dtype) / max(counted_ids.numel(), 1)
        loss = self.balance_weight * self.num_experts * (share * counted_probabilities.mean(0)).sum()
        return mixed.view(rows, row_length, hidden), ids.view(rows, row_length, -1), loss


class Attention(nn.Module):
    """Causal softmax attention with rotary positions."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.rotary_base = config.rotary_base
        self.qkv_proj = nn.Parameter(torch.empty(3 * config.hidden_size, config.hidden_size))
        self.out_proj = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size))
        nn.init.normal_(self.qkv_proj, std=config.hidden_size**-0.5)
        nn.init.normal_(self.out_proj, std=config.hidden_size**-0.5 / (2 * config.num_layers) ** 0.5)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values, each [B, heads, T, head size]."""
        rows, row_length, hidden = x.shape
        parts = functional.linear(x, self.qkv_proj).view(rows, row_length, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        half = hidden // self.num_heads // 2
        frequencies = self.rotary_base ** (-torch.arange(half, dtype=x.dtype) / half)
        angles = positions.to(x.dtype).unsqueeze(-1) * frequencies
        cosine, sine = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        return _rotate(query, cosine, sine), _rotate(key, cosine, sine), value

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Let every query see every key; heads joined and projected, [B, T, d]."""
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.out_proj)

    def mix_runs(self, query: Tensor, key: Tensor, value: Tensor, runs: Sequence[tuple[int, bool]]) -> Tensor:
        """Attend causally inside every run of the rows laid end to end.

        The work is the sum of squared run lengths, not the squared row length: what packing
        plans reckon with. ``runs`` holds (length, is a sample); padding attends to nothing.
        """
        rows, _, row_length, head_size = query.shape
        flat = [part.transpose(1, 2).reshape(1, -1, self.num_heads, head_size) for part in (query, key, value)]
        parts = [part.transpose(1, 2).split([size for size, _ in runs], dim=2) for part in flat]
        mixed = [
            functional.scaled_dot_product_attention(q, k, v, is_causal=True) if real else torch.zeros_like(q)
            for q, k, v, (_, real) in zip(*parts, runs, strict=True)
        ]
        joined = torch.cat(mixed, dim=2).transpose(1, 2).reshape(rows, row_length, -1)
        return functional.linear(joined, self.out_proj)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Block(nn.Module):
    """Attention and mixture of experts, each behind a norm and a residual connection."""

    def __init__(self, config: TinyMoEConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = RMSNorm(config.hidden_size)
        self.mlp = SparseMLP(config)


class TinyMoE(nn.Module):
    """Byte-level MoE language model.

    Parameters
    ----------
    config : TinyMoEConfig
    seed : int
        Seed of the initial weights; the global generator is left as it was.
    dtype : torch.dtype
        Of every parameter.
    """

    def __init__(self, config: TinyMoEConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size))
            self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.final_norm = RMSNorm(config.hidden_size)
            self.head = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * config.hidden_size**-0.5)
        self.to(dtype)

    def forward(
        self, ids: Tensor, segment_ids: Tensor | None = None, routed_ids: Tensor | None = None
    ) -> TinyMoEOutput:
        """Run packed rows.

        Parameters
        ----------
        ids : Tensor, int64 [B, T]
            Token ids.
        segment_ids : Tensor, int64 [B, T], optional
            Sample of every position; a sample is one contiguous run and sees only itself.
            `PADDING_SEGMENT` marks padding, which is routed nowhere that counts. Default: one
            sample a row.
        routed_ids : Tensor, int64 [B, T, L, K], optional
            Recorded expert ids to replay; the router's probabilities of those experts are used.
        """
        if segment_ids is None:
            segment_ids = torch.zeros_like(ids)
        counted = segment_ids != PADDING_SEGMENT
        positions, runs = _runs(segment_ids)
        x = functional.embedding(ids, self.embedding)
        chosen, balance_loss = [], x.new_zeros(())
        for index, layer in enumerate(self.layers):
            projected = layer.attention.project(layer.attention_norm(x), positions)
            x = x + layer.attention.mix_runs(*projected, runs)
            given = None if routed_ids is None else routed_ids[:, :, index]
            mixed, layer_ids, layer_loss = layer.mlp(layer.mlp_norm(x), given, counted)
            x = x + mixed
            chosen.append(layer_ids)
            balance_loss = balance_loss + layer_loss
        logits = functional.linear(self.final_norm(x), self.head)
        return TinyMoEOutput(logits, torch.stack(chosen, dim=2), balance_loss)


def _runs(segment_ids: Tensor) -> tuple[Tensor, list[tuple[int, bool]]]:
    """Positions inside runs of equal segment ids, int64 [B, T], and the runs of all rows in order."""
    index = torch.arange(segment_ids.shape[1]).expand_as(segment_ids)
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    starts[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    positions = index - torch.where(starts, index, 0).cummax(1).values
    where = starts.flatten().nonzero().flatten()
    sizes = torch.diff(where, append=torch.tensor([segment_ids.numel()]))
    real = segment_ids.flatten()[where] != PADDING_SEGMENT
    return positions, list(zip(sizes.tolist(), real.tolist(), strict=True))


class Rollout(NamedTuple):
    """One sampled sample.

    ``ids`` int64 [t]: prompt and response; ``routed_ids`` int64 [t − 1, L, K]: the experts of
    every token that was forwarded (the last one never is).
    """

    ids: Tensor
    routed_ids: Tensor
    prompt_length: int


@torch.no_grad()
def sample_rollouts(
    model: TinyMoE,
    prompts: Sequence[bytes],
    *,
    max_length: int,
    generator: torch.Generator,
    temperature: float = 1.0,
) -> list[Rollout]:
    """Continue every prompt until `END_OF_SAMPLE` or ``max_length`` tokens.

    All samples advance together, one token a step, with a key/value cache; a sample that ends
    leaves the batch. Routing is recorded in the steps that sample, as an inference engine does,
    not recomputed.
    """
    config = model.config
    heads, head_size = config.num_heads, config.hidden_size // config.num_heads
    num = len(prompts)
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    if num == 0 or int(prompt_lengths.min()) < 1 or int(prompt_lengths.max()) >= max_length:
        raise ValueError("every prompt needs at least one byte and fewer than max_length")
    ids = torch.zeros(num, max_length, dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        ids[index, : len(prompt)] = torch.tensor(list(prompt))
    routed = torch.zeros(num, max_length, config.num_layers, config.top_k, dtype=torch.int64)
    lengths = torch.full((num,), max_length)
    alive = torch.arange(num)
    grown = (num, heads, 0, head_size)
    keys = [model.embedding.new_zeros(grown) for _ in model.layers]
    values = [model.embedding.new_zeros(grown) for _ in model.layers]
    was_training = model.training
    model.eval()
    for position in range(max_length - 1):
        if position == keys[0].shape[2]:
            room = model.embedding.new_zeros(len(alive), heads, 128, head_size)
            keys = [torch.cat((cache, room), dim=2) for cache in keys]
            values = [torch.cat((cache, room), dim=2) for cache in values]
        x = functional.embedding(ids[alive, position], model.embedding).unsqueeze(1)
        positions = torch.full((len(alive), 1), position)
        for index, layer in enumerate(model.layers):
            query, key, value = layer.attention.project(layer.attention_norm(x), positions)
            keys[index][:, :, position] = key[:, :, 0]
            values[index][:, :, position] = value[:, :, 0]
            seen = slice(position + 1)
            x = x + layer.attention.mix(query, keys[index][:, :, seen], values[index][:, :, seen])
            mixed, layer_ids, _ = layer.mlp(layer.mlp_norm(x), None, None)
            x = x + mixed
            routed[alive, position, index] = layer_ids[:, 0]
        logits = functional.linear(model.final_norm(x), model.head)[:, 0] / temperature
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        in_prompt = position + 1 < prompt_lengths[alive]
        following = torch.where(in_prompt, ids[alive, position + 1], drawn)
        ids[alive, position + 1] = following
        ended = ~in_prompt & (following == END_OF_SAMPLE)
        if bool(ended.any()):
            lengths[alive[ended]] = position + 2
            stays = ~ended
            alive = alive[stays]
            keys = [cache[stays] for cache in keys]
            values = [cache[stays] for cache in values]
            if len(alive) == 0:
                break
    model.train(was_training)
    return [
        Rollout(ids[i, : int(t)].clone(), routed[i, : int(t) - 1].clone(), int(prompt_lengths[i]))
        for i, t in enumerate(lengths)
    ]


def pack_rows(samples: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Lay samples out in padded rows.

    Parameters
    ----------
    samples : sequence of Tensor
        Token ids of every sample, int64 [t_i].
    rows : sequence of sequence of int
        Samples of every row, in order.

    Returns
    -------
    ids, segment_ids : Tensor, int64 [B, T]
        T is the longest row; segment ids are sample indices.
    """
    width = max(1, max(sum(len(samples[i]) for i in row) for row in rows))
    ids = torch.full((len(rows), width), END_OF_SAMPLE, dtype=torch.int64)
    segment_ids = torch.full((len(rows), width), PADDING_SEGMENT, dtype=torch.int64)
    for r, row in enumerate(rows):
        start = 0
        for i in row:
            stop = start + len(samples[i])
            ids[r, start:stop] = samples[i]
            segment_ids[r, start:stop] = i
            start = stop
    return ids, segment_ids
