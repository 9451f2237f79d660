"""Question: how good is the packing and placement a trainer uses today?

Command: ``python experiments/score_what_you_run.py``

Takes a batch, makes the micro-batches that verl-like balancing would make
(as lists of sample ids, the way a trainer logs them) and an expert map as EPLB or SGLang
would save it, imports both, and scores every combination beside the proven bound. Replace
``partitions``, ``micro_bsz_idx`` and ``physical_to_logical`` by your own.

Expected rows: contiguous experts 19.6 % above the bound, the imported map 9.5 %; what is left
is the packing, which did not look at routing.
"""

from __future__ import annotations

import itertools

import numpy as np

from routepack_opt.bounds import best_bound
from routepack_opt.formats import eplb, verl
from routepack_opt.plan import Placement, Plan
from routepack_opt.rows import pack_bins
from routepack_opt.score import evaluate, violations
from routepack_opt.synthetic import family


def main() -> None:
    """Print one line per combination."""
    problem = family("tiny-gpt-oss-like")

    # What a trainer logs: sample ids per DP rank, and per micro-batch positions within the rank.
    cells = pack_bins(problem.lengths, problem.capacity, num_bins=problem.num_cells)
    partitions, micro_bsz_idx = [], []
    for rank in range(problem.dp_size):
        members = [np.flatnonzero(cells == row * problem.dp_size + rank).tolist() for row in range(problem.num_rows)]
        partitions.append([i for cell in members for i in cell])
        ends = np.cumsum([0, *map(len, members)])
        micro_bsz_idx.append([list(range(a, b)) for a, b in itertools.pairwise(ends)])
    packing = verl.import_packing(problem, partitions, micro_bsz_idx)

    # What EPLB or SGLang saves: the logical expert in every physical slot. Here: heavy and light experts paired.
    load = problem.batch.expert_load()
    order = np.argsort(-load, axis=1, kind="stable")
    ranks = np.empty_like(order)
    snake = np.arange(problem.num_experts) % (2 * problem.ep_size)
    dealt = np.minimum(snake, 2 * problem.ep_size - 1 - snake)
    np.put_along_axis(ranks, order, np.broadcast_to(dealt, order.shape), axis=1)
    physical_to_logical = np.argsort(ranks, axis=1, kind="stable")
    balanced = eplb.import_placement(physical_to_logical, ep_size=problem.ep_size)

    bound = best_bound(problem)
    print(problem)
    contiguous = Placement.contiguous(problem.num_layers, problem.num_experts, ep_size=problem.ep_size)
    for name, placement in (("contiguous experts", contiguous), ("imported expert map", balanced)):
        plan = Plan.of(problem, placement, packing)
        broken = violations(problem, plan)
        if broken:
            print(f"{name}: infeasible: {broken[0]}")
            continue
        score = evaluate(problem, plan)
        gap = score.levels[0] / bound.value - 1
        print(f"{name:20s} slowest shard {score.values[0]:9.2f}  gap to the proven bound {gap:6.2%}")


if __name__ == "__main__":
    main()
