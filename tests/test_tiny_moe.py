"""The tiny model: packing, replay and recorded routing mean what the planner takes them for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the optional extra torch")


def load_experiment(name: str) -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "experiments" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny_moe = load_experiment("tiny_moe")


@pytest.fixture(scope="module")
def model() -> object:
    config = tiny_moe.TinyMoEConfig(
        num_layers=2, num_experts=8, top_k=2, hidden_size=16, expert_size=8, num_heads=2, balance_weight=0.01
    )
    return tiny_moe.TinyMoE(config, seed=3, dtype=torch.float64)


@pytest.fixture(scope="module")
def rollouts(model: object) -> list[object]:
    prompts = [b"a", b"hello", b"xyz 12", b"hello"]
    generator = torch.Generator().manual_seed(0)
    return tiny_moe.sample_rollouts(model, prompts, max_length=24, generator=generator)  # type: ignore[no-any-return]


def test_recorded_routing_is_that_of_a_forward_pass(model: object, rollouts: list[object]) -> None:
    model.eval()  # type: ignore[attr-defined]
    for rollout, prompt in zip(rollouts, [b"a", b"hello", b"xyz 12", b"hello"], strict=True):
        assert bytes(rollout.ids[: rollout.prompt_length].tolist()) == prompt
        # The last sampled token never enters the model.
        assert rollout.routed_ids.shape == (len(rollout.ids) - 1, 2, 2)
        assert torch.equal(model(rollout.ids[None, :-1]).routed_ids[0], rollout.routed_ids)
        ended = int(rollout.ids[-1]) == tiny_moe.END_OF_SAMPLE
        assert ended or len(rollout.ids) == 24
        assert tiny_moe.END_OF_SAMPLE not in rollout.ids[:-1].tolist()


def test_samples_of_a_group_differ(rollouts: list[object]) -> None:
    assert rollouts[1].ids.tolist() != rollouts[3].ids.tolist()


def test_a_packed_row_is_its_samples_one_by_one(model: object, rollouts: list[object]) -> None:
    samples = [rollout.ids for rollout in rollouts]
    ids, segment_ids = tiny_moe.pack_rows(samples, [[2, 0], [3, 1]])
    packed = model(ids, segment_ids)
    for row, members in enumerate([[2, 0], [3, 1]]):
        for i in members:
            where = segment_ids[row] == i
            alone = model(samples[i][None])
            np.testing.assert_allclose(packed.logits[row, where].detach(), alone.logits[0].detach(), rtol=0, atol=1e-12)
            assert torch.equal(packed.routed_ids[row, where], alone.routed_ids[0])
    assert int((segment_ids == tiny_moe.PADDING_SEGMENT).sum()) == abs(
        len(samples[2]) + len(samples[0]) - len(samples[3]) - len(samples[1])
    )


def test_replay_uses_the_given_experts(model: object, rollouts: list[object]) -> None:
    ids = rollouts[1].ids[None]
    free = model(ids)
    replayed = model(ids, None, free.routed_ids)
    assert torch.equal(replayed.logits, free.logits)
    other = (free.routed_ids + 1) % 8
    forced = model(ids, None, other)
    assert torch.equal(forced.routed_ids, other)
    assert float((forced.logits - free.logits).detach().abs().max()) > 1e-6


def test_padding_is_neither_counted_nor_trained(model: object) -> None:
    model.train()
    ids = torch.randint(1, 256, (1, 9), generator=torch.Generator().manual_seed(1))
    segment_ids = torch.zeros_like(ids)
    for layer in model.layers:
        layer.mlp.router.tokens_per_expert.zero_()
    plain = model(ids, segment_ids)
    counted = [layer.mlp.router.tokens_per_expert.clone() for layer in model.layers]
    padded_ids = torch.nn.functional.pad(ids, (0, 5), value=7)
    padded_segments = torch.nn.functional.pad(segment_ids, (0, 5), value=tiny_moe.PADDING_SEGMENT)
    for layer in model.layers:
        layer.mlp.router.tokens_per_expert.zero_()
    padded = model(padded_ids, padded_segments)
    for layer, wanted in zip(model.layers, counted, strict=True):
        assert torch.equal(layer.mlp.router.tokens_per_expert, wanted)
        assert int(wanted.sum()) == 9 * 2
    np.testing.assert_allclose(padded.balance_loss.detach(), plain.balance_loss.detach(), rtol=1e-12)
    np.testing.assert_allclose(padded.logits[:, :9].detach(), plain.logits.detach(), rtol=0, atol=1e-12)


def test_the_correction_bias_selects_but_does_not_weigh(model: object) -> None:
    router = model.layers[0].mlp.router
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    ids, weights, probabilities = router(x, None)
    router.score_correction_bias[6] = 10.0
    try:
        biased_ids, biased_weights, biased_probabilities = router(x, None)
    finally:
        router.score_correction_bias.zero_()
    assert (biased_ids == 6).any(1).all()
    assert torch.equal(biased_probabilities, probabilities)
    expected = probabilities.gather(1, biased_ids)
    assert torch.allclose(biased_weights, expected / expected.sum(1, keepdim=True))
    assert not (ids == 6).any(1).all()
    assert torch.allclose(weights.sum(1), torch.ones(5, dtype=torch.float64))


def test_bad_prompts_are_refused(model: object) -> None:
    for prompts in ([], [b""], [b"x" * 24]):
        with pytest.raises(ValueError, match="every prompt"):
            tiny_moe.sample_rollouts(model, prompts, max_length=24, generator=torch.Generator())
