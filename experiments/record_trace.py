"""Record the bundled routing trace: train a tiny MoE on free text, sample rollouts, keep their routing.

Question
    How is the small routing trace that ships with the package made, and what may it be taken for?
Command
    python experiments/record_trace.py            (extra: pip install 'routepack-opt[torch]')
Expected
    Three files in routepack_opt/data: ``tiny_moe_trace.npz`` (a problem file),
    ``tiny_moe_trace_ids.npz`` (raw expert ids of a few samples) and ``tiny_moe_trace.md`` (data
    card with the statistics beside those of the same model untrained and, when ROUTEPACK_DATA is
    set, of gpt-oss-20b). A few minutes on one core.

Text: the Python standard library that runs the script (source code and documentation) and
generated arithmetic, JSON records, word tasks and number series. Steps and seeds are fixed, not
minutes; another processor or torch build rounds differently and will draw other samples.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import re
import shlex
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tiny_moe import END_OF_SAMPLE, Rollout, TinyMoE, TinyMoEConfig, sample_rollouts
from torch import Tensor
from torch.nn import functional

from routepack_opt import files
from routepack_opt.problem import Problem

IntArray = NDArray[np.int64]
DATA = Path(__file__).resolve().parent.parent / "routepack_opt" / "data"


# --------------------------------------------------------------------------------------- text


@dataclass(frozen=True)
class Document:
    """A prompt and the text that continues it; the end marker is added when training."""

    prompt: bytes
    text: bytes


def code_documents(max_length: int) -> list[Document]:
    """Functions of the standard library: the signature is the prompt."""
    documents = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        lines = source.splitlines(keepends=True)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = "".join(lines[node.lineno - 1 : node.end_lineno])
                indent = len(text) - len(text.lstrip(" "))
                text = "".join(line[indent:] if line[:indent].isspace() else line for line in text.splitlines(True))
                head, colon, body = text.partition("):\n")
                if colon and "\n" not in head:
                    documents.append(Document((head + colon).encode(), body.encode()))
    return _usable(documents, max_length)


def prose_documents(max_length: int) -> list[Document]:
    """Paragraph runs of the language reference and the licence: the first words are the prompt."""
    root = Path(sysconfig.get_path("stdlib"))
    from pydoc_data.topics import topics

    texts = [str(text) for _, text in sorted(topics.items())]
    licence = root / "LICENSE.txt"
    if licence.exists():
        texts.append(licence.read_text(encoding="utf-8"))
    documents = []
    for text in texts:
        paragraphs = [re.sub(r"\s+", " ", part).strip() for part in text.split("\n\n")]
        paragraphs = [part for part in paragraphs if len(part) > 80 and part.isascii()]
        start = 0
        while start < len(paragraphs):
            num = 1 + (start * 7 + len(text)) % 3
            joined = "\n".join(paragraphs[start : start + num])
            cut = joined.find(" ", 24)
            documents.append(Document(joined[: cut + 1].encode(), joined[cut + 1 :].encode()))
            start += num
    return _usable(documents, max_length)


def _usable(documents: Sequence[Document], max_length: int) -> list[Document]:
    return [
        document
        for document in documents
        if document.prompt
        and b"\0" not in document.prompt + document.text
        and 40 <= len(document.prompt) + len(document.text) < max_length
    ]


WORDS = [
    *("apple", "river", "stone", "cloud", "green", "seven", "table", "music", "paper", "light"),
    *("winter", "garden", "bridge", "silver", "coffee", "window", "planet", "forest", "yellow"),
    *("market", "summer", "letter", "orange", "candle", "mirror", "engine", "valley"),
]
NAMES = [
    *("Ada", "Bo", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana"),
    *("Ivo", "Jun", "Kim", "Lea", "Max", "Nia", "Otto", "Pia"),
]


def arithmetic_document(rng: np.random.Generator) -> Document:
    """A running sum worked out step by step; the number of steps is heavy-tailed."""
    num_terms = min(40, 2 + int(rng.geometric(0.12)))
    terms = rng.integers(2, 60, size=num_terms).tolist()
    steps, total = [], terms[0]
    for term in terms[1:]:
        steps.append(f"{total}+{term}={total + term}")
        total += term
    return Document(f"sum {' '.join(map(str, terms))}\n".encode(), ("; ".join(steps) + f"\n#{total}").encode())


def json_document(rng: np.random.Generator) -> Document:
    """A list of records of one of three kinds."""
    kind = ("user", "order", "point")[rng.integers(3)]
    num = min(16, 1 + int(rng.geometric(0.25)))
    records: list[dict[str, Any]] = []
    for index in range(num):
        number = int(rng.integers(10, 99))
        if kind == "user":
            records.append({"id": index, "name": NAMES[rng.integers(len(NAMES))], "age": number})
        elif kind == "order":
            records.append({"id": index, "item": WORDS[rng.integers(len(WORDS))], "qty": number, "paid": number > 50})
        else:
            records.append({"x": number / 10, "y": int(rng.integers(10, 99)) / 10})
    body = ",\n ".join(json.dumps(record) for record in records)
    return Document(f"{num} {kind} records as JSON:\n".encode(), f"[{body}]".encode())


def word_document(rng: np.random.Generator) -> Document:
    """Reverse, sort, upper-case or spell a few words."""
    words = [WORDS[i] for i in rng.integers(len(WORDS), size=1 + int(rng.geometric(0.25)))][:14]
    task = ("reverse", "sort", "upper", "spell")[rng.integers(4)]
    answer = {
        "reverse": " ".join(word[::-1] for word in words),
        "sort": " ".join(sorted(words)),
        "upper": " ".join(word.upper() for word in words),
        "spell": ", ".join("-".join(word) for word in words),
    }[task]
    return Document(f"{task}: {' '.join(words)}\n".encode(), f"-> {answer}".encode())


def series_document(rng: np.random.Generator) -> Document:
    """Count from a number to another in steps."""
    step, num = int(rng.integers(1, 10)), min(180, 5 + int(rng.geometric(0.025)))
    start = int(rng.integers(0, 100))
    numbers = [start + step * k for k in range(num)]
    return Document(f"count {start} to {numbers[-1]} by {step}\n".encode(), " ".join(map(str, numbers)).encode())


GENERATED: dict[str, Callable[[np.random.Generator], Document]] = {
    "arithmetic": arithmetic_document,
    "json": json_document,
    "words": word_document,
    "series": series_document,
}
DOMAINS = ("code", "prose", *GENERATED)


class Corpus:
    """Documents of every domain; one in ten found documents is held out for prompts.

    The standard library repeats short functions, so a few held-out documents have a twin that is
    trained on; nothing here measures generalisation.
    """

    def __init__(self, *, seed: int, max_length: int) -> None:
        rng = np.random.default_rng(seed)
        found = {"code": code_documents(max_length), "prose": prose_documents(max_length)}
        self.digest = hashlib.sha256(
            b"\0".join(d.prompt + d.text for documents in found.values() for d in documents)
        ).hexdigest()
        self._train: dict[str, list[Document]] = {}
        self._held_out: dict[str, list[Document]] = {}
        for domain, documents in found.items():
            order = rng.permutation(len(documents))
            cut = len(documents) // 10
            self._held_out[domain] = [documents[i] for i in order[:cut]]
            self._train[domain] = [documents[i] for i in order[cut:]]
        self._max_length = max_length

    def draw(self, domain: str, rng: np.random.Generator, *, held_out: bool = False) -> Document:
        """One document of a domain."""
        if domain in GENERATED:
            while True:
                document = GENERATED[domain](rng)
                if len(document.prompt) + len(document.text) < self._max_length:
                    return document
        documents = (self._held_out if held_out else self._train)[domain]
        return documents[rng.integers(len(documents))]


# ----------------------------------------------------------------------------------- training


def training_batch(
    corpus: Corpus, rng: np.random.Generator, *, num_rows: int, row_length: int
) -> tuple[Tensor, Tensor]:
    """Rows filled with whole documents (the last one is cut), and the document of every byte."""
    ids = np.zeros((num_rows, row_length), dtype=np.int64)
    segment_ids = np.zeros((num_rows, row_length), dtype=np.int64)
    for r in range(num_rows):
        start, segment = 0, 0
        while start < row_length:
            document = corpus.draw(DOMAINS[rng.integers(len(DOMAINS))], rng)
            sample = np.frombuffer(document.prompt + document.text + bytes([END_OF_SAMPLE]), dtype=np.uint8)
            stop = min(row_length, start + len(sample))
            ids[r, start:stop] = sample[: stop - start]
            segment_ids[r, start:stop] = segment
            start, segment = stop, segment + 1
    return torch.from_numpy(ids), torch.from_numpy(segment_ids)


def next_token_loss(logits: Tensor, ids: Tensor, segment_ids: Tensor) -> Tensor:
    """Mean cross entropy of predicting the next byte of the same sample."""
    inside = segment_ids[:, 1:] == segment_ids[:, :-1]
    return functional.cross_entropy(logits[:, :-1][inside], ids[:, 1:][inside])


def train(model: TinyMoE, corpus: Corpus, *, num_steps: int, num_rows: int, row_length: int, seed: int) -> list[float]:
    """AdamW with warm-up and cosine decay; returns the loss of every step."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.01)
    losses = []
    model.train()
    started = time.perf_counter()
    for step in range(num_steps):
        ids, segment_ids = training_batch(corpus, rng, num_rows=num_rows, row_length=row_length)
        rate = 3e-3 * min(1.0, (step + 1) / 30) * (0.55 + 0.45 * float(np.cos(np.pi * step / num_steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        output = model(ids, segment_ids)
        loss = next_token_loss(output.logits, ids, segment_ids)
        optimizer.zero_grad()
        (loss + output.balance_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            load = torch.stack([layer.mlp.router.tokens_per_expert for layer in model.layers]).double()
            load_cv = float((load.std(1, correction=0) / load.mean(1)).mean())
            for layer in model.layers:
                layer.mlp.router.tokens_per_expert.zero_()
            took = time.perf_counter() - started
            print(f"step {step:4d}  loss {losses[-1]:.3f}  load CV {load_cv:.3f}  {took:5.0f} s", flush=True)
    return losses


# ------------------------------------------------------------------------------------- counts


def counts_of_routed_ids(routed_ids: Sequence[NDArray[Any]], num_experts: int) -> NDArray[np.uint16]:
    """Count expert ids [M_i, L, K] of every sample into uint16 [N, L, E]."""
    num_layers = routed_ids[0].shape[1]
    offset = np.arange(num_layers, dtype=np.int64)[None, :, None] * num_experts
    counts = [
        np.bincount((ids.astype(np.int64) + offset).ravel(), minlength=num_layers * num_experts) for ids in routed_ids
    ]
    return np.stack(counts).reshape(len(counts), num_layers, num_experts).astype(np.uint16)


@torch.no_grad()
def routed_ids_of_samples(model: TinyMoE, samples: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Route given samples, all tokens but the last, one sample a row."""
    model.eval()
    return [model(ids[None, :-1]).routed_ids[0].numpy() for ids in samples]


def lpt_rank_of_expert(load: IntArray, ep_size: int) -> IntArray:
    """Longest processing time first with equal cardinality (doi:10.1137/0117039): int64 [L, E]."""
    num_layers, num_experts = load.shape
    rank_of_expert = np.zeros((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        rank_load, free = np.zeros(ep_size, dtype=np.int64), np.full(ep_size, num_experts // ep_size)
        for expert in np.argsort(-load[layer], kind="stable"):
            rank = min((int(rank_load[p]), p) for p in range(ep_size) if free[p])[1]
            rank_of_expert[layer, expert] = rank
            rank_load[rank] += load[layer, expert]
            free[rank] -= 1
    return rank_of_expert


def rank_load(counts: NDArray[Any], rank_of_expert: IntArray, ep_size: int) -> IntArray:
    """Routed tokens [..., L, P] of counts [..., L, E] under an owner map [L, E]."""
    owner = rank_of_expert[:, :, None] == np.arange(ep_size)
    return np.einsum("...le,lep->...lp", counts.astype(np.int64), owner.astype(np.int64))


def routing_statistics(
    counts: NDArray[Any],
    lengths: IntArray,
    *,
    ep_size: int,
    group_of_sample: NDArray[Any] | None = None,
    domain_of_sample: NDArray[Any] | None = None,
) -> dict[str, float]:
    """Statistics that decide how hard a routing trace is to plan.

    Parameters
    ----------
    counts : ndarray, unsigned int [N, L, E]
        Routed tokens.
    lengths : ndarray, int64 [N]
        Tokens of every sample.
    ep_size : int
        Ranks P; experts are owned contiguously unless LPT is said.
    group_of_sample, domain_of_sample : ndarray [N], optional
        For the distance between samples of the same and of other groups and domains.

    Returns
    -------
    dict
        ``load_cv_*``: population std / mean over experts of the batch load, over layers.
        ``imbalance_*``: max / mean over ranks of the batch load, over layers.
        ``sample_imbalance_*``: the same of every sample and layer, mean and 95th percentile.
        ``tv``: total-variation distance of a sample's expert histogram to the batch's, mean over
        samples and layers. ``tv_same_group``, ``tv_same_domain``, ``tv_other_domain``: mean
        distance between two samples that share a group, a domain (not a group), neither.
        ``length_q*``: quantiles of the lengths.
    """
    num_layers, num_experts = counts.shape[1:]
    load = counts.sum(0, dtype=np.int64)
    contiguous = np.broadcast_to(np.arange(num_experts) // (num_experts // ep_size), (num_layers, num_experts))
    placements = {"contiguous": contiguous, "lpt": lpt_rank_of_expert(load, ep_size)}
    load_cv = load.std(1) / load.mean(1)
    statistics = {"load_cv_mean": load_cv.mean(), "load_cv_max": load_cv.max()}
    for name, rank_of_expert in placements.items():
        batch = rank_load(load, rank_of_expert, ep_size)
        imbalance = batch.max(1) / batch.mean(1)
        samples = rank_load(counts, rank_of_expert, ep_size)
        sample_imbalance = samples.max(2) / samples.mean(2)
        statistics |= {
            f"imbalance_{name}_mean": imbalance.mean(),
            f"imbalance_{name}_max": imbalance.max(),
            f"sample_imbalance_{name}_mean": sample_imbalance.mean(),
            f"sample_imbalance_{name}_p95": np.quantile(sample_imbalance, 0.95),
        }
    share = counts / counts.sum(2, keepdims=True)
    batch_share = load / load.sum(1, keepdims=True)
    statistics["tv"] = 0.5 * np.abs(share - batch_share).sum(2).mean()
    if group_of_sample is not None and domain_of_sample is not None:
        distance = np.stack([0.5 * np.abs(share - one).sum(2).mean(1) for one in share])
        same_group = group_of_sample[:, None] == group_of_sample
        same_domain = domain_of_sample[:, None] == domain_of_sample
        other = ~np.eye(len(share), dtype=bool)
        statistics |= {
            "tv_same_group": distance[same_group & other].mean(),
            "tv_same_domain": distance[same_domain & ~same_group].mean(),
            "tv_other_domain": distance[~same_domain].mean(),
        }
    for percent in (0, 5, 25, 50, 75, 95, 100):
        statistics[f"length_q{percent:02d}"] = np.quantile(lengths, percent / 100)
    return {name: float(value) for name, value in statistics.items()}


# -------------------------------------------------------------------------------------- files


def attention_classes(config: TinyMoEConfig, *, capacity: int, shard_size: int, ep_size: int) -> list[dict[str, str]]:
    """α and β of this model from its operation counts.

    In units of one routed token through one expert (6·d·F operations): projections take
    8·d² operations a token and layer, scores and mixing 2·d a token pair with the causal half
    included, the head 2·d·V a token. Both are multiplied by |𝒟_g|/P, β also by the capacity.
    """
    d, f_exp = config.hidden_size, 6 * config.hidden_size * config.expert_size
    share = Fraction(shard_size, ep_size)
    attention = config.num_layers * Fraction(8 * d * d, f_exp) * share
    pairs = capacity * config.num_layers * Fraction(2 * d, f_exp) * share
    head = Fraction(2 * d * config.vocab_size, f_exp) * share
    return [
        {"name": "softmax_attention", "alpha": str(attention), "beta": str(pairs)},
        {"name": "lm_head", "alpha": str(head), "beta": "0"},
    ]


def array_digest(array: NDArray[Any]) -> str:
    """SHA-256 of an array's bytes in C order, first 16 hex digits."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


# --------------------------------------------------------------------------------------- card

ROWS = (
    ("load CV, mean over layers", "load_cv_mean"),
    ("load CV, worst layer", "load_cv_max"),
    ("imbalance at P = 8, mean", "imbalance_contiguous_mean"),
    ("imbalance at P = 8, worst layer", "imbalance_contiguous_max"),
    ("imbalance after LPT, mean", "imbalance_lpt_mean"),
    ("per-sample imbalance, mean", "sample_imbalance_contiguous_mean"),
    ("per-sample imbalance, p95", "sample_imbalance_contiguous_p95"),
    ("per-sample imbalance after LPT, mean", "sample_imbalance_lpt_mean"),
    ("per-sample imbalance after LPT, p95", "sample_imbalance_lpt_p95"),
    ("TV distance to the batch", "tv"),
    ("TV, two samples of one group", "tv_same_group"),
    ("TV, one domain, other group", "tv_same_domain"),
    ("TV, other domain", "tv_other_domain"),
    ("length, least", "length_q00"),
    ("length, 5 %", "length_q05"),
    ("length, 25 %", "length_q25"),
    ("length, median", "length_q50"),
    ("length, 75 %", "length_q75"),
    ("length, 95 %", "length_q95"),
    ("length, most", "length_q100"),
)


def statistics_table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown table of statistics, one column a source."""
    lines = ["| statistic | " + " | ".join(columns) + " |", "|---|" + "---:|" * len(columns)]
    for label, key in ROWS:
        cells = []
        for statistics in columns.values():
            value = statistics.get(key)
            cells.append("–" if value is None else f"{value:.0f}" if key.startswith("length") else f"{value:.3f}")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpt_oss_statistics(ep_size: int) -> dict[str, float] | None:
    """Statistics of the real gpt-oss-20b counts below ROUTEPACK_DATA; None when it is unset."""
    root = os.environ.get("ROUTEPACK_DATA")
    if not root:
        return None
    with np.load(Path(root) / "routing_gptoss20b_per_sample" / "counts.npz", allow_pickle=False) as file:
        counts = file["counts"] if "counts" in file.files else file[file.files[0]]
    counts = counts.astype(np.int64)
    return routing_statistics(counts, counts[:, 0].sum(1) // 4, ep_size=ep_size)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, sample, record, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320, help="training steps")
    parser.add_argument("--rows", type=int, default=2, help="rows of a training step")
    parser.add_argument("--row-length", type=int, default=1024, help="bytes of a training row")
    parser.add_argument("--max-length", type=int, default=1024, help="longest sample, prompt included")
    parser.add_argument("--groups", type=int, default=40, help="prompts")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--ids-samples", type=int, default=8, help="samples whose raw expert ids are kept")
    parser.add_argument("--balance-weight", type=float, default=0.001, help="weight of the load-balancing loss")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches, prompts and sampling")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument(
        "--out", type=Path, default=DATA, help="folder that receives the files (default: routepack_opt/data)"
    )
    parser.add_argument("--show", type=int, default=0, help="print this many rollouts")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    command = shlex.join(["python", "experiments/record_trace.py", *(sys.argv[1:] if arguments is None else arguments)])

    config = TinyMoEConfig(balance_weight=options.balance_weight)
    corpus = Corpus(seed=options.seed, max_length=options.row_length)
    model = TinyMoE(config, seed=options.seed)
    losses = train(
        model,
        corpus,
        num_steps=options.steps,
        num_rows=options.rows,
        row_length=options.row_length,
        seed=options.seed + 1,
    )

    rng = np.random.default_rng(options.seed + 2)
    domains = [DOMAINS[g % len(DOMAINS)] for g in range(options.groups)]
    prompts = [corpus.draw(domain, rng, held_out=True).prompt for domain in domains]
    group_of_sample = np.repeat(np.arange(options.groups), options.group_size)
    domain_of_sample = np.repeat(np.array(domains), options.group_size)
    print(f"sampling {len(group_of_sample)} rollouts", flush=True)
    rollouts: list[Rollout] = sample_rollouts(
        model,
        [prompts[g] for g in group_of_sample],
        max_length=options.max_length,
        generator=torch.Generator().manual_seed(options.seed + 3),
    )
    lengths = np.array([len(rollout.ids) for rollout in rollouts], dtype=np.int64)
    routed_ids = [rollout.routed_ids.numpy().astype(np.uint8) for rollout in rollouts]
    routed_tokens = np.array([len(ids) for ids in routed_ids], dtype=np.int64)
    counts = counts_of_routed_ids(routed_ids, config.num_experts)
    untrained = TinyMoE(config, seed=options.seed)
    control = counts_of_routed_ids(
        routed_ids_of_samples(untrained, [rollout.ids for rollout in rollouts]), config.num_experts
    )
    for index in range(0, len(rollouts), max(1, len(rollouts) // max(1, options.show))):
        if options.show:
            print("-----", domain_of_sample[index], lengths[index])
            print(bytes(rollouts[index].ids.tolist()).decode("utf-8", errors="replace"))

    ep_size, shards, capacity = 8, [[0, 1, 2, 3], [4, 5, 6, 7]], 2 * options.max_length
    classes = attention_classes(config, capacity=capacity, shard_size=len(shards[0]), ep_size=ep_size)
    spec = {
        "schema": "routepack-problem/1",
        "capacity": capacity,
        "num_rows": None,
        "ep_size": ep_size,
        "shards": shards,
        "top_k": config.top_k,
        "length_alignment": 1,
        "min_samples_per_cell": 0,
        "attention": classes,
    }
    sample_ids = np.array([f"{d}-{g:02d}-{k}" for g, d in enumerate(domains) for k in range(options.group_size)])
    arrays: dict[str, NDArray[Any]] = {
        "lengths": lengths,
        "counts": counts,
        "routed_tokens": routed_tokens,
        "sample_ids": sample_ids,
        "group_ids": group_of_sample.astype(np.int64),
        "spec": np.array(json.dumps(spec, sort_keys=True)),
    }
    chosen = np.unique(np.linspace(0, len(rollouts) - 1, options.ids_samples).round().astype(np.int64))
    raw: dict[str, NDArray[Any]] = {
        "ids": np.concatenate([routed_ids[i] for i in chosen]),
        "offsets": np.concatenate([[0], np.cumsum(routed_tokens[chosen])]).astype(np.int64),
        "samples": chosen,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    contents = {"tiny_moe_trace.npz": arrays, "tiny_moe_trace_ids.npz": raw}
    for name, content in contents.items():
        files.write_npz(options.out / name, content)
    problem = Problem.load(options.out / "tiny_moe_trace.npz")
    print(problem)
    hashes = {name: hashlib.sha256((options.out / name).read_bytes()).hexdigest() for name in contents}
    grouping = {"group_of_sample": group_of_sample, "domain_of_sample": domain_of_sample}
    columns = {
        "this trace": routing_statistics(counts, lengths, ep_size=ep_size, **grouping),
        "same model, untrained": routing_statistics(control, lengths, ep_size=ep_size, **grouping),
    }
    reference = gpt_oss_statistics(ep_size)
    if reference is not None:
        columns["gpt-oss-20b"] = reference
    table = statistics_table(columns)
    seconds = time.perf_counter() - started
    card = CARD.format(
        command=command,
        seconds=seconds,
        cpu_seconds=time.process_time(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        threads=options.threads,
        steps=options.steps,
        tokens=options.steps * options.rows * options.row_length,
        first_loss=losses[0],
        last_loss=float(np.mean(losses[-25:])),
        contents=f"{len(lengths)} samples, {lengths.sum()} tokens, top-{config.top_k} of {config.num_experts} experts, "
        f"{config.num_layers} layers",
        groups=options.groups,
        group_size=options.group_size,
        num_layers=config.num_layers,
        num_experts=config.num_experts,
        top_k=config.top_k,
        hidden=config.hidden_size,
        inner=config.expert_size,
        balance=config.balance_weight,
        capped=int((lengths == options.max_length).sum()),
        max_length=options.max_length,
        capacity=capacity,
        num_rows=problem.num_rows,
        fill=100 * problem.fill,
        attention=", ".join(f"{c['name']} α = {c['alpha']}, β = {c['beta']}" for c in classes),
        corpus=corpus.digest,
        hashes="\n".join(f"| `{name}` | `{digest}` |" for name, digest in hashes.items()),
        arrays="\n".join(
            f"| `{name}` | {array.dtype} {list(array.shape)} | `{array_digest(array)}` |"
            for name, array in arrays.items()
            if array.ndim and array.dtype.kind in "iu"
        ),
        table=table,
        claims=claims(columns),
        by_domain="\n".join(
            f"| {domain} | {int((domain_of_sample == domain).sum())} | "
            + " | ".join(f"{np.quantile(lengths[domain_of_sample == domain], q):.0f}" for q in (0.0, 0.5, 1.0))
            + " |"
            for domain in DOMAINS
        ),
    )
    (options.out / "tiny_moe_trace.md").write_text(card, encoding="utf-8")
    print(table)
    print(f"{seconds:.0f} s; wrote {', '.join(hashes)} and tiny_moe_trace.md to {options.out}")


def claims(columns: dict[str, dict[str, float]]) -> str:
    """What the figures of the trained and the untrained model, side by side, allow to say."""
    trained, control = columns["this trace"], columns["same model, untrained"]
    lines = []
    for label, key, neutral in (
        ("Popularity skew (load CV, mean over layers)", "load_cv_mean", 0.0),
        ("Rank imbalance beyond 1 (contiguous, P = 8, mean)", "imbalance_contiguous_mean", 1.0),
        ("Per-sample imbalance beyond 1 (contiguous)", "sample_imbalance_contiguous_mean", 1.0),
        ("Per-sample imbalance beyond 1 (after LPT)", "sample_imbalance_lpt_mean", 1.0),
        ("Distance of a sample to the batch (TV)", "tv", 0.0),
        ("Distance between domains (TV)", "tv_other_domain", 0.0),
        ("Group structure (TV in one domain minus TV in one group)", "", 0.0),
    ):
        if key:
            ours, theirs = trained[key] - neutral, control[key] - neutral
        else:
            ours, theirs = (c["tv_same_domain"] - c["tv_same_group"] for c in (trained, control))
        verdict = f"untrained routing shows {100 * theirs / ours:.0f} % as much"
        lines.append(f"- {label}: {ours:.3f} trained, {theirs:.3f} untrained; {verdict}.")
    return "\n".join(lines)


CARD = """# tiny_moe_trace

Routing recorded from a small byte-level Mixture-of-Experts language model, bundled so that
everything in this package runs on measured input without a download. It is a stand-in for a
rollout trace, not a sample of a production model.

| file | holds |
|---|---|
| `tiny_moe_trace.npz` | a problem file: {contents} |
| `tiny_moe_trace_ids.npz` | raw ids of a few of them: `ids` uint8 [T, L, K], `offsets`, `samples` |

## How it was made

```
{command}
```

Python {python}, torch {torch}, NumPy {numpy}, {threads} thread(s); {cpu_seconds:.0f} s of processor
time, {seconds:.0f} s by the clock. Steps and seeds are fixed; another processor or torch build rounds
differently and draws other samples, so the hashes below identify these files and are not a
promise that a rerun elsewhere gives them.

1. Text: functions and language reference of the Python standard library that ran the script
   (PSF licence; SHA-256 of what was used `{corpus}`), and generated
   running sums, JSON records, word tasks and number series. Six domains, drawn alike.
2. Model: {num_layers} layers, hidden {hidden}, {num_experts} experts of width {inner}, top-{top_k}, weight of the
   load-balancing loss {balance}. {steps} AdamW steps over {tokens} bytes; loss {first_loss:.2f} at the first
   step, {last_loss:.2f} over the last 25, in nats a byte. It has learnt the forms (where a record or
   a sample ends), not the tasks.
3. Rollouts: {groups} prompts from held-out documents (short functions that the library repeats may
   have been seen all the same) or freshly generated, {group_size} rollouts each at temperature 1, until
   the end marker or {max_length} tokens ({capped} samples stopped there). Expert ids were recorded
   in the decoding steps themselves, prompt included; the last token of a sample is never
   forwarded, so `routed_tokens` = `lengths` - 1.

The problem in the file: P 8, D 8, shards [[0, 1, 2, 3], [4, 5, 6, 7]], capacity {capacity}, rows resolved
when read (R {num_rows} at the time of writing, fill {fill:.0f} %).
Attention classes from this model's operation counts: {attention}.

| domain | samples | least | median | most tokens |
|---|---:|---:|---:|---:|
{by_domain}

## Statistics

Load CV is the population standard deviation over the mean of the batch load of the experts of a layer;
imbalance is max / mean over 8 ranks; TV is the total-variation distance between expert
histograms of a layer, mean over layers. gpt-oss-20b: 703 samples of public per-sample routing
(github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, generated tokens only, capped at 511).

{table}

## What may be claimed

The control is the same model at its initial weights, reading the same bytes: whatever it shows
comes from the bytes and the architecture, not from learned specialisation. Only what exceeds it
may be called learned. Each column is one seed.

{claims}

The trace can be used to compare planners on input with real co-variation of length, domain and
routing. Nothing about the size of a gain on a large model follows from it.

## Hashes

| file | SHA-256 |
|---|---|
{hashes}

| array | dtype, shape | SHA-256 of its bytes, first 16 digits |
|---|---|---|
{arrays}
"""


if __name__ == "__main__":
    main()
