"""State permutation: the planned layout computes the same function and takes the same optimizer step.

Run as a script, the file forks the processes of the sharded test.
"""

from __future__ import annotations

import copy
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from routepack_opt import materialization
from routepack_opt.errors import InvalidInputError, MissingExtraError
from routepack_opt.materialization import (
    Family,
    TensorPattern,
    bytes_of_expert,
    exchange,
    families,
    materialize,
    optimizer_state_by_name,
    permute_state,
    register_family,
)
from routepack_opt.migration import relabel, transfers
from routepack_opt.plan import Placement

torch = pytest.importorskip("torch", reason="needs the optional extra torch")

ROOT = Path(__file__).resolve().parent.parent
TINY = {"num_layers": 2, "num_experts": 8, "top_k": 2, "hidden_size": 16, "expert_size": 8, "num_heads": 2}


def load_tiny_moe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_moe", ROOT / "experiments" / "tiny_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_moe"] = module
    spec.loader.exec_module(module)
    return module


tiny_moe = load_tiny_moe()
FAMILY: Family = tiny_moe.EXPERT_STATE


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_placement(seed: int, *, ep_size: int = 4, num_layers: int = 2, num_experts: int = 8) -> Placement:
    rng = np.random.default_rng(seed)
    return Placement.from_slots(rng.permuted(np.tile(np.arange(num_experts), (num_layers, 1)), axis=1), ep_size=ep_size)


LOGICAL = Placement.contiguous(2, 8, ep_size=4)


class Trainer:
    """A tiny MoE with Adam, a batch of samples, and their recorded routing."""

    def __init__(self, dtype: Any, *, warm_steps: int = 2) -> None:
        self.model = tiny_moe.TinyMoE(tiny_moe.TinyMoEConfig(**TINY), seed=1, dtype=dtype)
        with torch.no_grad():
            for layer in self.model.layers:
                layer.mlp.router.bias.copy_(torch.linspace(-0.3, 0.4, 8))
                layer.mlp.router.score_correction_bias.copy_(torch.linspace(0.02, -0.03, 8))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(2)
        self.samples = [torch.randint(1, 256, (int(t),), generator=generator) for t in (5, 17, 9, 20, 3, 8)]
        self.record()
        self.placement = LOGICAL
        for _ in range(warm_steps):
            self.step([[i] for i in range(len(self.samples))])

    def record(self) -> None:
        """Routing as the rollout engine saw it, in logical expert ids; the last token is not forwarded."""
        self.model.eval()
        with torch.no_grad():
            self.routed = [self.model(ids[None, :-1]).routed_ids[0].numpy() for ids in self.samples]
        self.model.train()

    def step(self, rows: Sequence[Sequence[int]]) -> float:
        """One Adam step over packed rows; every token weighs one over the tokens of the window."""
        self.optimizer.zero_grad()
        num_tokens = sum(len(ids) - 1 for ids in self.samples)
        total = 0.0
        for row in rows:
            ids, segment_ids = tiny_moe.pack_rows([s[:-1] for s in self.samples], [row])
            targets = torch.cat([self.samples[i][1:] for i in row])
            routed = np.concatenate([self.routed[i] for i in row])
            replay = torch.from_numpy(self.placement.remap(routed))[None]
            logits = self.model(ids, segment_ids, replay).logits[0]
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_tokens
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total

    def move(self, placement: Placement, *, with_optimizer: bool = True) -> None:
        materialize(
            self.model,
            placement,
            previous=self.placement,
            optimizer=self.optimizer if with_optimizer else None,
            family=FAMILY,
        )
        self.placement = placement

    def logical_state(self) -> dict[str, Any]:
        """Parameters, buffers and moments in logical order."""
        permuted = permute_state(
            self.model.state_dict(),
            LOGICAL,
            previous=self.placement,
            optimizer_state=optimizer_state_by_name(self.model, self.optimizer),
            family=FAMILY,
        )
        moments = {
            f"{name}:{key}": value
            for name, entry in permuted.optimizer_state.items()
            for key, value in entry.items()
            if torch.is_tensor(value)
        }
        return permuted.state | moments


def largest_difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


NATURAL = [[i] for i in range(6)]
PACKED = [[3, 0, 5], [2], [1, 4]]


# -------------------------------------------------------------------- the same function, the same step


def test_logits_are_equal_before_and_after() -> None:
    trainer = Trainer(torch.float64)
    ids, segment_ids = tiny_moe.pack_rows(trainer.samples, PACKED)
    before = trainer.model(ids, segment_ids)
    placement = random_placement(3)
    trainer.move(placement)
    after = trainer.model(ids, segment_ids)
    np.testing.assert_allclose(after.logits.detach(), before.logits.detach(), rtol=0, atol=1e-12)
    # The model now routes to slots: the same experts under their new numbers.
    np.testing.assert_array_equal(after.routed_ids, placement.remap(before.routed_ids.numpy()))
    replayed = trainer.model(ids, segment_ids, torch.from_numpy(placement.remap(before.routed_ids.numpy())))
    np.testing.assert_allclose(replayed.logits.detach(), before.logits.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_one_step_in_the_planned_layout_is_the_unplanned_step(dtype: str, tolerance: float) -> None:
    # float32: gradients agree to rounding, but Adam divides them by their own size, so a near-zero one
    # may turn into a visible part of a step (lr 1e-2); warm moments keep that at about 1e-7 here.
    plain, planned = Trainer(getattr(torch, dtype)), Trainer(getattr(torch, dtype))
    start = plain.logical_state()
    planned.move(random_placement(4))
    loss_plain, loss_planned = plain.step(NATURAL), planned.step(PACKED)
    assert loss_planned == pytest.approx(loss_plain, rel=1e-10 if dtype == "float64" else 1e-5)
    assert largest_difference(plain.logical_state(), planned.logical_state()) <= tolerance
    assert largest_difference(plain.logical_state(), start) > 1e-3


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_moments_left_behind_are_noticed(dtype: str) -> None:
    plain, planned = Trainer(getattr(torch, dtype)), Trainer(getattr(torch, dtype))
    planned.move(random_placement(4), with_optimizer=False)
    plain.step(NATURAL)
    planned.step(PACKED)
    state = permute_state(planned.model.state_dict(), LOGICAL, previous=planned.placement, family=FAMILY).state
    wanted = plain.model.state_dict()
    experts = [name for name in wanted if ".experts." in name]
    worst = max(float((state[name] - wanted[name]).abs().max()) for name in experts)
    assert worst > 1e-3


def test_a_new_placement_every_step() -> None:
    plain, planned = Trainer(torch.float64), Trainer(torch.float64)
    for step in range(3):
        plain.record()
        planned.routed = plain.routed
        planned.move(random_placement(10 + step))
        assert planned.step(PACKED if step % 2 else PACKED[::-1]) == pytest.approx(plain.step(NATURAL), rel=1e-10)
    planned.move(LOGICAL)
    assert largest_difference(plain.logical_state(), planned.logical_state()) <= 1e-10


def test_packing_alone_changes_nothing_beyond_rounding() -> None:
    plain, packed = Trainer(torch.float64), Trainer(torch.float64)
    plain.step(NATURAL)
    packed.step(PACKED)
    assert largest_difference(plain.logical_state(), packed.logical_state()) <= 1e-10


def test_inverse_restores_bit_for_bit_and_parameters_stay_the_same_objects() -> None:
    trainer = Trainer(torch.float32)
    objects = {name: id(p) for name, p in trainer.model.named_parameters()}
    before = copy.deepcopy(trainer.logical_state())
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    trainer.move(random_placement(6))
    trainer.move(random_placement(7))
    trainer.move(LOGICAL)
    assert {name: id(p) for name, p in trainer.model.named_parameters()} == objects
    after = trainer.logical_state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(gradients[name], p.grad) for name, p in trainer.model.named_parameters())


def test_in_place_and_pure_function_agree() -> None:
    trainer = Trainer(torch.float32)
    placement = random_placement(8)
    state = copy.deepcopy(trainer.model.state_dict())
    kept = copy.deepcopy(optimizer_state_by_name(trainer.model, trainer.optimizer))
    untouched = {name: tensor.clone() for name, tensor in state.items()}
    permuted = permute_state(state, placement, optimizer_state=kept, family=FAMILY)
    assert all(torch.equal(state[name], untouched[name]) for name in state)
    trainer.move(placement)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, permuted.state[name])
    for name, entry in optimizer_state_by_name(trainer.model, trainer.optimizer).items():
        for key, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(permuted.optimizer_state[name][key]))


# ------------------------------------------------------------------------------------ separate experts


class Separate(torch.nn.Module):
    """Mixtral-like names, one module an expert, dense mixture."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        block = torch.nn.Module()
        block.block_sparse_moe = torch.nn.Module()
        block.block_sparse_moe.gate = torch.nn.Linear(3, num_experts, bias=False)
        experts = []
        for _ in range(num_experts):
            expert = torch.nn.Module()
            for name, shape in (("w1", (3, 5)), ("w2", (5, 3)), ("w3", (3, 5))):
                setattr(expert, name, torch.nn.Linear(*shape, bias=False))
            experts.append(expert)
        block.block_sparse_moe.experts = torch.nn.ModuleList(experts)
        self.layers = torch.nn.ModuleList([block])

    def forward(self, x: Any, used: Sequence[int]) -> Any:
        moe = self.layers[0].block_sparse_moe
        weights = moe.gate(x).softmax(-1)
        return sum(
            weights[:, e : e + 1] * moe.experts[e].w2(moe.experts[e].w1(x).sigmoid() * moe.experts[e].w3(x))
            for e in used
        )


def test_separate_experts_move_with_moments_gradients_and_absent_state() -> None:
    torch.manual_seed(0)
    plain = Separate().double()
    planned = copy.deepcopy(plain)
    placement = Placement.from_slots([[2, 0, 3, 1]], ep_size=2)
    x = torch.randn(6, 3, dtype=torch.float64)
    stepped = []
    for model in (plain, planned):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(2):  # expert 3 never sees a token: no gradient, no moments
            optimizer.zero_grad()
            model(x, [0, 1, 2]).square().sum().backward()
            optimizer.step()
        stepped.append(optimizer)
    materialize(planned, placement, optimizer=stepped[1])
    experts = planned.layers[0].block_sparse_moe.experts
    assert experts[int(placement.slot_of_expert[0, 3])].w1.weight.grad is None
    assert experts[int(placement.slot_of_expert[0, 3])].w1.weight not in stepped[1].state
    assert torch.equal(
        experts[int(placement.slot_of_expert[0, 1])].w2.weight.grad,
        plain.layers[0].block_sparse_moe.experts[1].w2.weight.grad,
    )
    for model, optimizer, used in ((plain, stepped[0], [1, 3]), (planned, stepped[1], [0, 1])):
        optimizer.zero_grad()
        model(x, used).square().sum().backward()
        optimizer.step()
    restored = permute_state(planned.state_dict(), Placement.contiguous(1, 4, ep_size=2), previous=placement).state
    for name, wanted in plain.state_dict().items():
        np.testing.assert_allclose(restored[name], wanted, rtol=0, atol=1e-12)


def test_master_parameters_follow() -> None:
    model = Separate().bfloat16()
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(masters.values(), lr=0.1)
    for tensor in masters.values():
        tensor.grad = torch.ones_like(tensor) * tensor
    optimizer.step()
    placement = Placement.from_slots([[1, 2, 3, 0]], ep_size=2)
    wanted = {name: tensor.clone() for name, tensor in masters.items()}
    moments = {name: optimizer.state[tensor]["exp_avg"].clone() for name, tensor in masters.items()}
    materialize(model, placement, optimizer=optimizer, master_parameters=masters)
    for e, slot in enumerate(placement.slot_of_expert[0].tolist()):
        old, new = (f"layers.0.block_sparse_moe.experts.{k}.w1.weight" for k in (e, slot))
        assert torch.equal(masters[new], wanted[old])
        assert torch.equal(optimizer.state[masters[new]]["exp_avg"], moments[old])
    gate = "layers.0.block_sparse_moe.gate.weight"
    assert torch.equal(masters[gate][placement.slot_of_expert[0].tolist()], wanted[gate])
    with pytest.raises(InvalidInputError, match="neither a parameter"):
        materialize(model, placement, optimizer=optimizer)


# -------------------------------------------------------------------------------------- name patterns


def state_of(family: str, num_experts: int = 4) -> dict[str, Any]:
    """Two MoE layers (3 and 5) after dense ones; entry values say which expert they belong to."""
    e = num_experts

    def rows(*shape: int) -> Any:
        return torch.arange(e).reshape(e, *[1] * len(shape)).expand(e, *shape).clone().float()

    state: dict[str, Any] = {"model.layers.0.mlp.gate_proj.weight": torch.ones(e, 2)}
    for layer in (3, 5):
        hf, mcore = f"model.layers.{layer}.", f"module.decoder.layers.{layer}.mlp."
        mine: dict[str, Any] = {}
        if family in ("qwen3-moe", "olmoe", "deepseek-v3"):
            mine[hf + "mlp.gate.weight"] = rows(3)
            for k in range(e):
                for part in ("gate", "up", "down"):
                    mine[f"{hf}mlp.experts.{k}.{part}_proj.weight"] = torch.full((2, 3), float(k))
            mine[hf + "mlp.shared_expert_gate.weight"] = torch.ones(1, 3)
            if family == "deepseek-v3":
                mine[hf + "mlp.gate.e_score_correction_bias"] = rows()
                mine[hf + "mlp.shared_experts.up_proj.weight"] = torch.ones(e, 3)
        elif family == "mixtral":
            mine[hf + "block_sparse_moe.gate.weight"] = rows(3)
            for k in range(e):
                for part in ("w1", "w2", "w3"):
                    mine[f"{hf}block_sparse_moe.experts.{k}.{part}.weight"] = torch.full((2, 3), float(k))
        elif family == "gpt-oss":
            mine[hf + "mlp.router.weight"] = rows(3)
            mine[hf + "mlp.router.bias"] = rows()
            for part in ("gate_up_proj", "down_proj"):
                mine[f"{hf}mlp.experts.{part}"] = rows(3, 2)
                mine[f"{hf}mlp.experts.{part}_bias"] = rows(2)
        elif family == "sequential":
            mine[mcore + "router.weight"] = rows(3)
            mine[mcore + "router.expert_bias"] = rows()
            mine[mcore + "router.local_tokens_per_expert"] = rows()
            for k in range(e):
                for part in ("linear_fc1", "linear_fc2"):
                    mine[f"{mcore}experts.local_experts.{k}.{part}.weight"] = torch.full((2, 3), float(k))
        elif family == "te-grouped":
            mine[mcore + "router.weight"] = rows(3)
            for k in range(e):
                for part in ("linear_fc1", "linear_fc2"):
                    mine[f"{mcore}experts.{part}.weight{k}"] = torch.full((2, 3), float(k))
            mine[mcore + "experts.linear_fc1._extra_state"] = torch.empty(0)
        elif family == "grouped":
            mine[mcore + "router.weight"] = rows(3)
            mine[mcore + "experts.weight1"] = rows(3, 2).reshape(3, -1)
            mine[mcore + "experts.weight2"] = rows(2, 3).reshape(-1, 3)
        state |= mine
    return state


@pytest.mark.parametrize(
    "family", ["qwen3-moe", "olmoe", "mixtral", "deepseek-v3", "gpt-oss", "sequential", "te-grouped", "grouped"]
)
def test_every_family_is_recognised_and_restored(family: str) -> None:
    state = state_of(family)
    placement = Placement.from_slots([[2, 0, 3, 1], [1, 3, 0, 2]], ep_size=2)
    known = family if family in {known.name for known in families()} else "megatron-core"
    groups = 1 if known in ("deepseek-v3", "megatron-core") else None
    permuted = permute_state(state, placement, family=known, num_routing_groups=groups).state
    assert permuted.keys() == state.keys()
    moved = 0
    for name, tensor in permuted.items():
        if "shared" in name or "layers.0." in name or tensor.numel() == 0:
            assert tensor is state[name]
            continue
        wanted = placement.expert_of_slot[0 if "layers.3." in name else 1]
        separate = re.search(r"experts\.(?:local_experts\.)?(\d+)\.|linear_fc\d\.weight(\d+)$", name)
        if separate:
            assert (tensor == float(wanted[int(separate[1] or separate[2])])).all()
        else:
            np.testing.assert_array_equal(tensor.reshape(4, -1)[:, 0], wanted)
            assert (tensor.reshape(4, -1) == tensor.reshape(4, -1)[:, :1]).all()
        moved += 1
    assert moved >= 2 * 3
    logical = Placement.contiguous(2, 4, ep_size=2)
    restored = permute_state(permuted, logical, previous=placement, family=known, num_routing_groups=groups).state
    assert all(torch.equal(restored[name], state[name]) for name in state)


def test_auto_finds_the_family() -> None:
    placement = random_placement(0, num_experts=4, ep_size=2)
    for family in ("mixtral", "gpt-oss", "qwen3-moe"):
        expected = permute_state(state_of(family), placement, family=family).state
        found = permute_state(state_of(family), placement).state
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    # DeepSeek-V3 names beat Qwen3's, because the correction bias is recognised too.
    with pytest.raises(InvalidInputError, match="num_routing_groups"):
        permute_state(state_of("deepseek-v3"), placement)


def test_auto_does_not_leave_tensors_behind() -> None:
    # gpt-oss patterns fit the tiny model but for its correction bias and counters.
    model = tiny_moe.TinyMoE(tiny_moe.TinyMoEConfig(**TINY))
    with pytest.raises(InvalidInputError) as caught:
        permute_state(model.state_dict(), LOGICAL)
    assert sum("no pattern of the family claims it" in fault for fault in caught.value.faults) == 4
    state = state_of("mixtral") | {"model.layers.3.block_sparse_moe.experts.1.w1.lora_A.weight": torch.ones(1, 3)}
    with pytest.raises(InvalidInputError, match="lora_A"):
        permute_state(state, random_placement(0, num_experts=4, ep_size=2))


def test_group_limited_routing_keeps_groups_together() -> None:
    state = state_of("deepseek-v3")
    torn = Placement.from_slots([[0, 2, 1, 3], [0, 1, 2, 3]], ep_size=2)
    with pytest.raises(InvalidInputError, match="group 0 are filled from groups"):
        permute_state(state, torn, family="deepseek-v3", num_routing_groups=2)
    whole = Placement.from_slots([[3, 2, 1, 0], [1, 0, 2, 3]], ep_size=2)
    permute_state(state, whole, family="deepseek-v3", num_routing_groups=2)
    with pytest.raises(InvalidInputError, match="must divide"):
        permute_state(state, whole, family="deepseek-v3", num_routing_groups=3)


def test_registering_a_family() -> None:
    pattern = TensorPattern(r"blocks\.(?P<layer>\d+)\.w", "expert")
    router = TensorPattern(r"blocks\.(?P<layer>\d+)\.r", "router")
    mine = Family("test-blocks", (pattern, router))
    register_family(mine)
    register_family(mine)
    try:
        state = {"blocks.0.w": torch.arange(4.0), "blocks.0.r": torch.arange(4.0)}
        placement = Placement.from_slots([[3, 1, 0, 2]], ep_size=2)
        assert permute_state(state, placement).state["blocks.0.w"].tolist() == [2, 1, 3, 0]
        with pytest.raises(InvalidInputError, match="different family"):
            register_family(Family("test-blocks", (router, pattern)))
    finally:
        del materialization._FAMILIES["test-blocks"]
    with pytest.raises(InvalidInputError, match="auto"):
        register_family(Family("auto", (pattern, router)))
    with pytest.raises(InvalidInputError, match="role 'router'"):
        Family("x", (pattern,))
    with pytest.raises(InvalidInputError) as caught:
        TensorPattern(r"(?P<layer>\d+)", "weights", "separate")  # type: ignore[arg-type]
    assert len(caught.value.faults) == 2
    with pytest.raises(InvalidInputError, match="is none"):
        TensorPattern(r"(", "expert")


# ------------------------------------------------------------------------------------------ bad input


def test_all_faults_are_raised_at_once_and_nothing_is_changed() -> None:
    trainer = Trainer(torch.float32)
    router = trainer.model.layers[0].mlp.router
    router.weight = torch.nn.Parameter(router.weight[:7].detach().clone())
    experts = trainer.model.layers[1].mlp.experts
    trainer.optimizer.state[experts.down_proj]["exp_avg"] = torch.zeros(8, 3)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with pytest.raises(InvalidInputError) as caught:
        trainer.move(random_placement(1))
    text = str(caught.value)
    assert "7 router rows, not 8" in text
    assert "'exp_avg' of layers.1.mlp.experts.down_proj has shape (8, 3)" in text
    assert "neither a parameter of the module" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s.pop("model.layers.3.block_sparse_moe.gate.weight"), "layer 3: experts but no router"),
        (lambda s: s.pop("model.layers.5.block_sparse_moe.experts.2.w2.weight"), "3 experts, not 4; 2 missing"),
        (
            lambda s: s.update({"model.layers.5.block_sparse_moe.experts.4.w2.weight": torch.ones(2, 3)}),
            "5 experts, not 4; 4 beyond the last",
        ),
        (
            lambda s: s.update({"model.layers.5.block_sparse_moe.experts.1.w1.weight": torch.ones(1, 3)}),
            "experts must agree",
        ),
        (
            lambda s: s.update({"model.layers.3.block_sparse_moe.gate.weight": torch.ones(3, 3)}),
            "3 router rows, not 4",
        ),
        (
            lambda s: [s.pop(name) for name in list(s) if "layers.3.block_sparse_moe.experts" in name],
            "layer 3: a router but no expert",
        ),
        (lambda s: s.clear(), "no family matches"),
    ],
)
def test_damaged_state_dicts_are_refused(spoil: Any, message: str) -> None:
    state = state_of("mixtral")
    spoil(state)
    with pytest.raises(InvalidInputError) as caught:
        permute_state(state, random_placement(0, num_experts=4, ep_size=2))
    assert any(message in fault for fault in caught.value.faults)


def test_placements_that_do_not_fit_are_refused() -> None:
    state = state_of("mixtral")
    with pytest.raises(InvalidInputError, match="the placement has 3"):
        permute_state(state, random_placement(0, num_layers=3, num_experts=4, ep_size=2))
    with pytest.raises(InvalidInputError, match="not 8"):
        permute_state(state, random_placement(0))
    with pytest.raises(InvalidInputError, match="previous one 8"):
        permute_state(state, random_placement(0, num_experts=4, ep_size=2), previous=random_placement(0))
    with pytest.raises(InvalidInputError, match="permutation"):
        Placement.from_slots([[0, 0, 1, 2]], ep_size=2)
    with pytest.raises(InvalidInputError, match="unknown family 'mixtrl'"):
        permute_state(state, random_placement(0, num_experts=4, ep_size=2), family="mixtrl")
    stray = {"model.layers.9.w": {"exp_avg": torch.ones(1)}}
    with pytest.raises(InvalidInputError, match="no tensor of the model"):
        permute_state(state, random_placement(0, num_experts=4, ep_size=2), optimizer_state=stray)


def test_named_layers() -> None:
    state = state_of("mixtral")
    one = Placement.from_slots([[1, 0, 3, 2]], ep_size=2)
    permuted = permute_state(state, one, layers=[5]).state
    assert permuted["model.layers.5.block_sparse_moe.gate.weight"][:, 0].tolist() == [1, 0, 3, 2]
    assert permuted["model.layers.3.block_sparse_moe.gate.weight"][:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidInputError) as caught:
        permute_state(state, one, layers=[5, 7])
    assert len(caught.value.faults) == 2


def test_shared_tensors_are_refused() -> None:
    model = Separate()
    experts = model.layers[0].block_sparse_moe.experts
    experts[1].w1.weight = experts[0].w1.weight
    with pytest.raises(InvalidInputError, match="are one tensor"):
        materialize(model, random_placement(0, num_layers=1, num_experts=4, ep_size=2))


def test_sharded_tensors_are_refused() -> None:
    class Sharded(torch.Tensor):
        def to_local(self) -> None:
            raise AssertionError

    state = state_of("mixtral")
    name = "model.layers.3.block_sparse_moe.gate.weight"
    state[name] = state[name].as_subclass(Sharded)
    with pytest.raises(InvalidInputError, match=r"layers\.3.* is sharded over processes"):
        permute_state(state, random_placement(0, num_experts=4, ep_size=2))


def test_a_missing_torch_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError, match=r"routepack-opt\[torch\]"):
        permute_state({}, LOGICAL)


def test_bytes_of_an_expert() -> None:
    trainer = Trainer(torch.float32)
    kept = optimizer_state_by_name(trainer.model, trainer.optimizer)
    numbers = (2 * 8) * 16 + 2 * 8 + 16 * 8 + 16
    sizes = bytes_of_expert(trainer.model.state_dict(), num_layers=2, num_experts=8, family=FAMILY)
    assert sizes.tolist() == [4 * numbers] * 2
    sizes = bytes_of_expert(
        trainer.model.state_dict(), num_layers=2, num_experts=8, optimizer_state=kept, family=FAMILY
    )
    assert sizes.tolist() == [3 * 4 * numbers] * 2


# -------------------------------------------------------------------------------------------- sharded


def shard(state: dict[str, Any], placement: Placement, rank: int) -> dict[str, Any]:
    """What one EP rank holds of a state that lies in the placement's layout."""
    held = placement.experts_per_rank
    return {
        name: tensor[rank * held : (rank + 1) * held].clone() if ".experts." in name and tensor.ndim else tensor.clone()
        for name, tensor in state.items()
    }


def shard_optimizer_state(kept: dict[str, Any], placement: Placement, rank: int) -> dict[str, dict[str, Any]]:
    return {
        name: {key: shard({name: value}, placement, rank)[name] for key, value in entry.items()}
        for name, entry in kept.items()
    }


def run_rank(rank: int, world: int, folder: str) -> None:
    """One process: several exchanges against the unsharded permutation, then faults seen by all."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    pair = dist.new_group([1, 3])
    generator = torch.Generator().manual_seed(0)
    model = tiny_moe.TinyMoE(tiny_moe.TinyMoEConfig(**TINY))
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    kept = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(p.shape, generator=generator),
            "exp_avg_sq": torch.rand(p.shape, generator=generator),
        }
        for name, p in model.named_parameters()
    }
    for group, ep_size in ((None, world), (pair, 2)):
        if group is pair and rank not in (1, 3):
            continue
        me = dist.get_rank(group)
        layouts = [Placement.contiguous(2, 8, ep_size=ep_size)]
        layouts += [random_placement(seed, ep_size=ep_size) for seed in (21, 22)]
        layouts.append(relabel(random_placement(23, ep_size=ep_size), layouts[-1]))
        local, moments = shard(state, layouts[0], me), shard_optimizer_state(kept, layouts[0], me)
        for previous, placement in pairwise(layouts):
            moves = exchange(local, placement, previous, group=group, optimizer_state=moments, family=FAMILY)
            whole = permute_state(state, placement, optimizer_state=kept, family=FAMILY)
            wanted = shard(whole.state, placement, me)
            assert all(torch.equal(local[name], wanted[name]) for name in wanted)
            wanted_moments = shard_optimizer_state(whole.optimizer_state, placement, me)
            for name, entry in wanted_moments.items():
                for key, value in entry.items():
                    assert torch.equal(moments[name][key], value), (name, key)
            sizes = bytes_of_expert(state, num_layers=2, num_experts=8, optimizer_state=kept, family=FAMILY)
            assert moves.total_bytes == transfers(placement, previous, bytes_of_expert=sizes).total_bytes
            held = bytes_of_expert(
                local, num_layers=2, num_experts=8 // ep_size, optimizer_state=moments, family=FAMILY
            )
            assert held.tolist() == sizes.tolist()

    # A fault of one rank, and a disagreement, reach every rank before anything is sent.
    local = shard(state, LOGICAL, rank)
    if rank == 2:
        local["layers.1.mlp.experts.down_proj"] = local["layers.1.mlp.experts.down_proj"][:1]
    with pytest.raises(InvalidInputError) as caught:
        exchange(local, random_placement(30), LOGICAL, family=FAMILY)
    assert caught.value.faults == ("rank 2: layers.1.mlp.experts.down_proj has shape (1, 16, 8): 1 experts, not 2",)
    local = shard(state, LOGICAL, rank)
    with pytest.raises(InvalidInputError, match="rank 3 has another placement than rank 0"):
        exchange(local, random_placement(31 if rank == 3 else 30), LOGICAL, family=FAMILY)
    wanted = shard(state, LOGICAL, rank)
    assert all(torch.equal(local[name], wanted[name]) for name in wanted)
    with pytest.raises(InvalidInputError, match="for 2 EP ranks, the group has 4"):
        exchange(local, random_placement(30, ep_size=2), Placement.contiguous(2, 8, ep_size=2), family=FAMILY)
    dist.barrier()
    dist.destroy_process_group()


def test_exchange_between_processes_is_the_unsharded_permutation(tmp_path: Path) -> None:
    world = 4
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    # One fresh process imports everything and forks: four imports of torch would cost much.
    finished = subprocess.run(
        [sys.executable, __file__, str(world), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def run_all_ranks(world: int, folder: str) -> int:
    """Fork one process a rank; the number of them that failed."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=run_rank, args=(rank, world, folder)) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(run_all_ranks(int(sys.argv[1]), sys.argv[2]))
