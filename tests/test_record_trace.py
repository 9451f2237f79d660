"""The recorded trace and its card: statistics by hand, files as the card says."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from routepack_opt.recorded import load_trace, load_trace_ids

torch = pytest.importorskip("torch", reason="needs the optional extra torch")

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "routepack_opt" / "data"


def load_experiment(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "experiments" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load_experiment("tiny_moe")
record_trace = load_experiment("record_trace")


def test_statistics_of_a_hand_made_batch() -> None:
    # One layer, four experts, two ranks; two samples of one group, two groups of another domain.
    counts = np.array([[[2, 2, 0, 0]], [[1, 1, 1, 1]], [[4, 0, 0, 4]], [[2, 0, 1, 1]]], dtype=np.uint16)
    statistics = record_trace.routing_statistics(
        counts,
        np.array([2, 2, 4, 3]),
        ep_size=2,
        group_of_sample=np.array([0, 0, 1, 2]),
        domain_of_sample=np.array(list("aabb")),
    )
    load = np.array([9, 3, 2, 6])
    wanted = {
        "load_cv_mean": load.std() / load.mean(),
        "imbalance_contiguous_max": 12 / 10,
        "imbalance_lpt_mean": 11 / 10,  # {9, 2} and {6, 3}
        "sample_imbalance_contiguous_mean": (2 + 1 + 1 + 1) / 4,
        "sample_imbalance_lpt_mean": (1 + 1 + 1 + 3 / 2) / 4,
        "tv": np.mean([0.5 * np.abs(row / row.sum() - load / 20).sum() for row in counts[:, 0]]),
        "tv_same_group": 0.5,
        "tv_same_domain": 0.25,
        "tv_other_domain": (0.5 + 0.5 + 0.5 + 0.25) / 4,
        "length_q00": 2,
        "length_q50": 2.5,
        "length_q100": 4,
    }
    assert {name: statistics[name] for name in wanted} == pytest.approx(wanted)


def test_the_card_describes_the_files() -> None:
    card = (DATA / "tiny_moe_trace.md").read_text(encoding="utf-8")
    for name in ("tiny_moe_trace.npz", "tiny_moe_trace_ids.npz"):
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() in card
    problem = load_trace()
    domains = np.array([name.split("-")[0] for name in problem.batch.sample_ids])
    groups = problem.batch.group_ids
    statistics = record_trace.routing_statistics(
        problem.counts, problem.lengths, ep_size=8, group_of_sample=groups, domain_of_sample=domains
    )
    for label, key in record_trace.ROWS:
        cell = re.search(rf"^\| {re.escape(label)} \| ([\d.]+) \|", card, re.MULTILINE)
        assert cell is not None, label
        assert float(cell[1]) == pytest.approx(statistics[key], abs=0.5 if key.startswith("length") else 5e-4)
    assert f"{problem.num_samples} samples, {problem.lengths.sum()} tokens" in card


def test_the_problem_carries_the_cost_of_the_model() -> None:
    problem = load_trace()
    config = record_trace.TinyMoEConfig()
    classes = record_trace.attention_classes(
        config, capacity=problem.capacity, shard_size=problem.cluster.shard_size, ep_size=problem.ep_size
    )
    assert [(c.name, str(c.alpha), str(c.beta)) for c in problem.cost.attention] == [
        (c["name"], c["alpha"], c["beta"]) for c in classes
    ]
    # By hand: 6 layers · 8·128²/(6·128·64) · 4/8 = 8, and C · 6 · 2·128/(6·128·64) · 4/8 = 32.
    assert [(c["alpha"], c["beta"]) for c in classes] == [("8", "32"), ("2/3", "0")]


def test_raw_ids_give_the_counts() -> None:
    problem, raw = load_trace(), load_trace_ids()
    parts = [raw["ids"][a:b] for a, b in zip(raw["offsets"][:-1], raw["offsets"][1:], strict=True)]
    counts = record_trace.counts_of_routed_ids(parts, problem.num_experts)
    np.testing.assert_array_equal(counts, problem.counts[raw["samples"]])
    assert [len(part) for part in parts] == (problem.lengths[raw["samples"]] - 1).tolist()


def test_generated_documents_are_right_and_seeded() -> None:
    for seed in range(20):
        document = record_trace.arithmetic_document(np.random.default_rng(seed))
        terms = [int(term) for term in document.prompt.split()[1:]]
        assert document.text.decode().endswith(f"#{sum(terms)}")
        again = record_trace.arithmetic_document(np.random.default_rng(seed))
        assert again == document
        series = record_trace.series_document(np.random.default_rng(seed))
        _, start, _, stop, _, step = series.prompt.decode().split()
        assert series.text.decode() == " ".join(map(str, range(int(start), int(stop) + 1, int(step))))
    for domain, make in record_trace.GENERATED.items():
        sizes = [len(make(np.random.default_rng(seed)).text) for seed in range(60)]
        assert max(sizes) > 4 * min(sizes), domain


def test_prompts_come_from_documents_held_out() -> None:
    corpus = record_trace.Corpus(seed=0, max_length=400)
    rng = np.random.default_rng(0)
    for domain in ("code", "prose"):
        trained = set(corpus._train[domain])
        drawn = [corpus.draw(domain, rng, held_out=True) for _ in range(200)]
        # The library repeats some short functions; the bulk must be new.
        assert sum(document in trained for document in drawn) < 40
        assert len(set(drawn)) > 30
        assert all(len(document.prompt) + len(document.text) < 400 for document in drawn)
