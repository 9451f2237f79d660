"""Plan every optimizer step of a small MoE policy, and show that planning does not change training.

Question
    Does rollout -> routing replay -> plan -> materialize -> train give the same policy as training
    without a plan, and what does the plan change in projected work?
Command
    python experiments/tiny_moe_rl.py            (extra: pip install 'routepack-opt[torch]')
Expected
    One line a step: EP-rank CV and projected work of the unplanned layout (contiguous experts,
    first-fit decreasing) and of the plan, planning time, experts and bytes moved, and both losses,
    equal to rounding. The last line compares all parameters and moments. Under two minutes on one core.

Two copies of one policy take the same rollouts. The unplanned copy keeps its experts and packs by
length alone. The planned copy moves experts (weights, router rows and biases, Adam moments), packs
by the plan and replays the recorded routing in slot numbers. Rollouts come from the planned copy:
what it records are slots, which are counted as logical experts. The policy gradient is REINFORCE with
advantages relative to the prompt group (arXiv:2402.03300 §4.1, without clipping and KL term); its
per-token loss is normalised by the tokens of the window, so uneven rows do not bias it.

All of it runs in one process; work and CV are those the plan projects for P ranks and D slots.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from record_trace import DOMAINS, Corpus, attention_classes, train
from tiny_moe import EXPERT_STATE, Rollout, TinyMoE, TinyMoEConfig, pack_rows, sample_rollouts
from torch import Tensor

import routepack_opt as rp
from routepack_opt.cost import CostModel, OperatorClass
from routepack_opt.counting import count_routing
from routepack_opt.materialization import bytes_of_expert, materialize, optimizer_state_by_name, permute_state
from routepack_opt.migration import transfers


def reward(rollout: Rollout) -> float:
    """Share of response bytes that are digits: nothing worth learning, but it can be learned in a few steps."""
    response = bytes(rollout.ids[rollout.prompt_length :].tolist())
    return sum(48 <= byte < 58 for byte in response) / max(1, len(response))


def group_advantages(rewards: Sequence[float], group_size: int) -> list[float]:
    """Reward minus the mean of its prompt group, over the group's standard deviation."""
    groups = np.asarray(rewards).reshape(-1, group_size)
    centred = groups - groups.mean(1, keepdims=True)
    return [float(a) for a in (centred / (groups.std(1, keepdims=True) + 1e-6)).ravel()]


class Policy:
    """A model, its optimizer, and the layout its experts are in."""

    def __init__(self, model: TinyMoE, placement: rp.Placement) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.placement = placement

    def move(self, placement: rp.Placement) -> int:
        """Materialize a placement; the bytes sent between ranks of one expert-parallel group."""
        moves = transfers(
            placement,
            self.placement,
            bytes_of_expert=bytes_of_expert(
                self.model.state_dict(),
                num_layers=placement.num_layers,
                num_experts=placement.num_experts,
                optimizer_state=optimizer_state_by_name(self.model, self.optimizer),
                family=EXPERT_STATE,
            ),
        )
        materialize(self.model, placement, previous=self.placement, optimizer=self.optimizer, family=EXPERT_STATE)
        self.placement = placement
        return moves.total_bytes

    def step(
        self,
        packing: rp.Packing,
        problem: rp.Problem,
        samples: Sequence[Tensor],
        routed_ids: Sequence[np.ndarray],
        prompt_lengths: Sequence[int],
        advantages: Sequence[float],
    ) -> float:
        """One optimizer step, row by row; every cell of a row is one packed sequence."""
        self.model.train()
        self.optimizer.zero_grad()
        num_tokens = sum(len(ids) - start for ids, start in zip(samples, prompt_lengths, strict=True))
        total = 0.0
        for r in range(problem.num_rows):
            cells = [packing.samples_of_cell(r, d).tolist() for d in range(problem.dp_size)]
            cells = [cell for cell in cells if cell]
            if not cells:
                continue
            inputs, segment_ids = pack_rows([ids[:-1] for ids in samples], cells)
            targets, _ = pack_rows([ids[1:] for ids in samples], cells)
            weights = torch.zeros(inputs.shape, dtype=self.model.head.dtype)
            replay = torch.arange(problem.top_k).expand(*inputs.shape, problem.num_layers, -1).clone()
            for c, cell in enumerate(cells):
                for i in cell:
                    where = (segment_ids[c] == i).nonzero().flatten()
                    replay[c, where] = torch.from_numpy(self.placement.remap(routed_ids[i].astype(np.int64)))
                    weights[c, where[prompt_lengths[i] - 1 :]] = advantages[i] / num_tokens
            logits = self.model(inputs, segment_ids, replay).logits
            log_probability = logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            loss = -(weights * log_probability).sum()
            loss.backward()
            total += loss.item()
        self.optimizer.step()
        return total


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both copies and print one line a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps")
    parser.add_argument("--warm-up", type=int, default=40, help="language-model steps before")
    parser.add_argument("--groups", type=int, default=8, help="prompts of a step")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts of a prompt")
    parser.add_argument("--max-length", type=int, default=192, help="longest sample, prompt included")
    parser.add_argument("--capacity", type=int, default=512, help="tokens of a cell")
    parser.add_argument("--planner", default="lpt(refine=True)+annealing", help="planner spec")
    parser.add_argument("--time-limit", type=float, default=1.0, help="seconds of planning a step")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="of parameters and moments")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, prompts, sampling and planning")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)

    config = TinyMoEConfig(num_layers=4, num_experts=16, top_k=2, hidden_size=64, expert_size=48, balance_weight=0.001)
    ep_size, dp_size, num_shards = 4, 4, 2
    corpus = Corpus(seed=options.seed, max_length=options.max_length)
    model = TinyMoE(config, seed=options.seed, dtype=getattr(torch, options.dtype))
    train(model, corpus, num_steps=options.warm_up, num_rows=2, row_length=512, seed=options.seed + 1)
    contiguous = rp.Placement.contiguous(config.num_layers, config.num_experts, ep_size=ep_size)
    plain, planned = Policy(model, contiguous), Policy(copy.deepcopy(model), contiguous)
    cost = CostModel(
        tuple(
            OperatorClass(entry["name"], Fraction(entry["alpha"]), Fraction(entry["beta"]))
            for entry in attention_classes(
                config, capacity=options.capacity, shard_size=dp_size // num_shards, ep_size=ep_size
            )
        )
    )
    rp.warm_up()
    rng = np.random.default_rng(options.seed + 2)
    generator = torch.Generator().manual_seed(options.seed + 3)

    print(
        f"{'step':>4} {'reward':>6} {'tokens':>6} {'R':>2} | {'EP CV before':>12} {'after':>6} | "
        f"{'row CV before':>13} {'after':>6} | {'work before':>11} {'after':>7} {'change':>7} | {'plan s':>6} "
        f"{'moved':>5} {'MB':>6} | {'loss unplanned':>14} {'planned':>12} {'difference':>10}"
    )
    for step in range(options.steps):
        prompts = [
            corpus.draw(DOMAINS[rng.integers(len(DOMAINS))], rng, held_out=True).prompt for _ in range(options.groups)
        ]
        rollouts = sample_rollouts(
            planned.model,
            [prompt for prompt in prompts for _ in range(options.group_size)],
            max_length=options.max_length,
            generator=generator,
        )
        lengths = [len(rollout.ids) for rollout in rollouts]
        counted = count_routing(
            np.concatenate([rollout.routed_ids.numpy() for rollout in rollouts]),
            np.concatenate([[0], np.cumsum([len(rollout.routed_ids) for rollout in rollouts])]),
            num_experts=config.num_experts,
            lengths=lengths,
            physical_to_logical=planned.placement.expert_of_slot,
            sentinels=(),
        )
        problem = rp.Problem.from_arrays(
            counted.lengths,
            counted.counts,
            routed_tokens=counted.routed_tokens,
            top_k=counted.top_k,
            capacity=options.capacity,
            ep_size=ep_size,
            dp_size=dp_size,
            num_shards=num_shards,
            cost=cost,
        )
        before = rp.solve(problem, "contiguous+ffd", seed=options.seed)
        after = rp.solve(
            problem,
            options.planner,
            time_limit=options.time_limit,
            seed=options.seed,
            previous=planned.placement,
            progress=False,
        )
        to_logical = planned.placement.inverse()
        routed_ids = [to_logical.remap(rollout.routed_ids.numpy()) for rollout in rollouts]
        rewards = [reward(rollout) for rollout in rollouts]
        batch = (
            [rollout.ids for rollout in rollouts],
            routed_ids,
            [rollout.prompt_length for rollout in rollouts],
            group_advantages(rewards, options.group_size),
        )
        num_moves = transfers(after.placement, planned.placement).num_moves
        sent = planned.move(after.placement)
        loss_planned = planned.step(after.packing, problem, *batch)
        loss_plain = plain.step(before.packing, problem, *batch)
        figures = [rp.measure(problem, result.plan, result.score) for result in (before, after)]
        work = [figure.joint_bottleneck for figure in figures]
        print(
            f"{step:4d} {np.mean(rewards):6.3f} {sum(lengths):6d} {problem.num_rows:2d} | "
            f"{figures[0].global_cv:12.4f} {figures[1].global_cv:6.4f} | {figures[0].row_cv:13.4f} "
            f"{figures[1].row_cv:6.4f} | {work[0]:11.2f} {work[1]:7.2f} {100 * (work[1] / work[0] - 1):+6.1f}% | "
            f"{after.runtime:6.2f} {num_moves:5d} {sent / 1e6:6.2f} | {loss_plain:14.8f} {loss_planned:12.8f} "
            f"{abs(loss_plain - loss_planned):10.1e}",
            flush=True,
        )
    final = permute_state(
        planned.model.state_dict(),
        contiguous,
        previous=planned.placement,
        optimizer_state=optimizer_state_by_name(planned.model, planned.optimizer),
        family=EXPERT_STATE,
    )
    worst = max(
        float((tensor - final.state[name]).abs().max())
        for name, tensor in plain.model.state_dict().items()
        if tensor.is_floating_point()
    )
    kept = optimizer_state_by_name(plain.model, plain.optimizer)
    worst_moment = max(
        float((value - final.optimizer_state[name][key]).abs().max())
        for name, entry in kept.items()
        for key, value in entry.items()
    )
    print(
        f"after {options.steps} steps, planned mapped back against unplanned: largest difference of a parameter "
        f"{worst:.1e}, of a moment {worst_moment:.1e} ({options.dtype})"
    )


if __name__ == "__main__":
    main()
