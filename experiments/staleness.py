"""Question: what does a plan lose when the routing it was made for is old or incomplete?

Command: ``python experiments/staleness.py`` (tiny-low, 5 steps, about a minute on
one core); ``--family`` takes any frozen family or ``rotating`` (a hot rank that moves
by one every step, the worst case for an old placement), ``--steps`` and
``--iteration-limit`` the size. Steps already in ``--out`` are not run again.

Every row plans with what would be known and scores with what really came:

- ``fresh``: LPT and packing on today's routing;
- ``placement lag k``: LPT on the routing of k steps ago, samples packed with
  today's routing for that placement;
- ``missing f``: a share f of today's samples has no recorded routing while
  planning; each is believed to route like the mean of the recorded ones (of the
  previous step's where none is recorded);
- ``length only``: no routing in the packing at all, fresh placement;
- ``contiguous``: no placement, guided packing.

Expected rows: in the frozen families (popularity stays, prompts change) an old
placement costs about half a per cent of step time, much the same at every lag, a
tenth of what ``contiguous`` costs; missing routing costs from 0.1 % (a tenth
missing) to 1 % (all missing, more than ``length only``). In ``rotating`` an old
placement loses a third or more at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from routepack_opt import files, metrics, planning, registry
from routepack_opt.cost import CostModel, OperatorClass, rational
from routepack_opt.plan import Placement, Plan
from routepack_opt.problem import Cluster, Problem
from routepack_opt.score import evaluate
from routepack_opt.study import staleness
from routepack_opt.synthetic import families, family, stress

SCHEMA = "routepack-staleness/1"
LAGS = (1, 2, 4)
MISSING = (0.1, 0.25, 0.5, 1.0)
#: First step that every lag can look back from.
FIRST = max(LAGS)


def draw(name: str, step: int) -> Problem:
    """The problem of one step of a frozen family, or of the rotating hot rank."""
    if name != "rotating":
        return family(name, step=step)
    batch = stress("rotating", step=step)
    classes = (
        OperatorClass("linear", rational(20.0), rational(0.0)),
        OperatorClass("quadratic", rational(0.0), rational(20.0)),
    )
    cluster = Cluster.from_sizes(ep_size=8, dp_size=8)
    return Problem.from_batch(batch, capacity=8192, cluster=cluster, cost=CostModel(classes))


def measure_plan(problem: Problem, plan: Plan) -> dict[str, Any]:
    """Score and figures of a plan on what really came."""
    score = evaluate(problem, plan)
    found = metrics.measure(problem, plan, score)
    return {"step_time": score.values[0], "global_cv": found.global_cv, "ep_peak": found.ep_peak}


def run_step(name: str, step: int, iteration_limit: int) -> dict[str, dict[str, Any]]:
    """Every row of one step."""
    truth = draw(name, step)
    rows: dict[str, dict[str, Any]] = {}

    def packed(problem: Problem, placement: Placement, packer: str = "annealing") -> Plan:
        result = planning.pack(
            problem, packer, placement=placement, iteration_limit=iteration_limit, num_threads=1, progress=False
        )
        if result.packing is None:
            raise SystemExit(f"{packer} found no packing of step {step}: {result.reason}")
        return Plan.of(truth, placement, result.packing)

    def placed(problem: Problem) -> Placement:
        placement = planning.place(problem, "lpt", num_threads=1).placement
        assert placement is not None
        return placement

    fresh = placed(truth)
    rows["fresh"] = measure_plan(truth, packed(truth, fresh))
    for lag in LAGS:
        rows[f"placement lag {lag}"] = measure_plan(truth, packed(truth, placed(draw(name, step - lag))))
    for share in MISSING:
        if share == 1:
            believed = staleness.from_shares(truth, staleness.expert_shares(draw(name, step - 1)))
        else:
            believed = staleness.with_missing(truth, share=share, seed=step)
        rows[f"missing {share:g}"] = measure_plan(truth, packed(believed, placed(believed)))
    rows["length only"] = measure_plan(truth, packed(truth, fresh, "length_annealing"))
    contiguous = Placement.contiguous(truth.num_layers, truth.num_experts, ep_size=truth.ep_size)
    rows["contiguous"] = measure_plan(truth, packed(truth, contiguous))
    return rows


def main() -> None:
    """Run, tabulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--family", choices=(*families(), "rotating"), default="tiny-low")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--iteration-limit", type=int, default=2_000_000, help="proposals of annealing a plan")
    parser.add_argument("--out", type=Path, default=Path("results/staleness"))
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.iteration_limit < 1:
        parser.error("--steps and --iteration-limit must be at least 1")
    folder = arguments.out / arguments.family
    folder.mkdir(parents=True, exist_ok=True)
    # All parameters, so that rows made with other defaults are not mixed in.
    settings = json.loads(
        json.dumps(
            {
                "iteration_limit": arguments.iteration_limit,
                "planner": [dataclasses.asdict(part) for part in registry.parse("lpt+annealing")],
            }
        )
    )
    steps = []
    for step in tqdm(range(FIRST, FIRST + arguments.steps), unit="step", leave=False):
        path = folder / f"step-{step:03d}.json"
        if path.exists():
            saved = files.read_json(path, what="step")
            if saved.get("schema") != SCHEMA or saved.get("settings") != settings:
                raise SystemExit(f"{path} was made with other settings: choose another --out, or remove it")
        else:
            rows = run_step(arguments.family, step, arguments.iteration_limit)
            saved = {"schema": SCHEMA, "settings": settings, "rows": rows}
            files.write_json(path, saved)
        steps.append(saved["rows"])
    print(f"family {arguments.family}, {arguments.steps} steps, {arguments.iteration_limit} proposals a plan\n")
    print("| planned with | step time, change % | worst step % | EP peaks, change % | EP-rank CV |")
    print("|---|---|---|---|---|")
    names = [f"placement lag {lag}" for lag in LAGS] + [f"missing {share:g}" for share in MISSING]
    for name in ["fresh", *names, "length only", "contiguous"]:
        time = np.array([100 * (rows[name]["step_time"] / rows["fresh"]["step_time"] - 1) for rows in steps])
        peak = np.array([100 * (rows[name]["ep_peak"] / rows["fresh"]["ep_peak"] - 1) for rows in steps])
        spread = np.mean([rows[name]["global_cv"] for rows in steps])
        print(f"| {name} | {time.mean():+.2f} | {time.max():+.2f} | {peak.mean():+.2f} | {spread:.5f} |")
    print("\nChanges are against the fresh plan of the same step.")


if __name__ == "__main__":
    main()
