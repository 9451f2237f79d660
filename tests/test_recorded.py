from __future__ import annotations

import hashlib
import re
from importlib import resources

import numpy as np

from routepack_opt.metrics import coefficient_of_variation
from routepack_opt.recorded import load_trace, load_trace_ids, trace_card


def test_the_trace_is_a_valid_problem() -> None:
    problem = load_trace()
    assert problem.num_samples >= 128
    assert problem.num_layers >= 4
    assert problem.rows.proven
    assert (problem.batch.routed_tokens == problem.lengths - 1).all()
    assert problem.batch.group_ids is not None
    assert len(problem.cost.attention) >= 1
    load = problem.batch.expert_load()
    assert 0.1 < coefficient_of_variation(load).mean() < 2


def test_raw_ids_reproduce_the_counts() -> None:
    problem = load_trace()
    raw = load_trace_ids()
    for k, i in enumerate(raw["samples"].tolist()):
        ids = raw["ids"][raw["offsets"][k] : raw["offsets"][k + 1]]
        assert len(ids) == problem.batch.routed_tokens[i]
        for layer in range(problem.num_layers):
            counted = np.bincount(ids[:, layer].ravel().astype(np.int64), minlength=problem.num_experts)
            assert np.array_equal(counted, problem.counts[i, layer])


def test_the_card_names_the_files_as_they_are() -> None:
    card = trace_card()
    for name in ("tiny_moe_trace.npz", "tiny_moe_trace_ids.npz"):
        data = resources.files("routepack_opt").joinpath(f"data/{name}").read_bytes()
        assert hashlib.sha256(data).hexdigest() in card
    assert re.search(r"untrained", card)
