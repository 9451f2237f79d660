"""Question: what does each bound add at real scale, by level and scope, and how far are real plans from it?

Command: ``python experiments/bounds_at_scale.py [--family NAME] [--time-limit 1] [--planted]``

For the frozen families (and planted problems, whose optimum is known), every
bound as a share of the plan that ``lpt+annealing`` finds: 100 % minus that is
the certified gap. The first line of a level is the simple bound (expert
aggregate and attention average); a method below it adds nothing and is shown
as such.

Expected rows: the attention cells add nothing where every DP slot can be
filled alike, up to some percent where few long samples carry the quadratic
work; the placement-free bound is within a few tokens of the bound of the LPT
placement; the worst-row level is decided by the area or by the longest sample.
"""

from __future__ import annotations

import argparse
import os
import platform
import time

from routepack_opt import planning, synthetic
from routepack_opt.bounds import gap, problem_bounds
from routepack_opt.problem import Problem
from routepack_opt.score import LEVELS


def show(name: str, problem: Problem, planner: str, time_limit: float) -> None:
    """Print every bound of one problem."""
    result = planning.solve(problem, planner, time_limit=time_limit, num_threads=1)
    if result.score is None or result.plan is None:
        print(f"{name}: no plan within {time_limit} s")
        return
    start = time.process_time()
    found = problem_bounds(problem, result.plan.placement)
    seconds = time.process_time() - start
    print(f"\n{name}: {problem}, {planner} {time_limit} s, all bounds in {seconds:.2f} s CPU")
    for level, value in zip(LEVELS, result.score.levels, strict=True):
        for scope in ("any-placement", "fixed-placement"):
            bounds = [bound for bound in found if bound.level == level and bound.scope == scope]
            simple = bounds[0].value
            best = max(bounds, key=lambda bound: bound.value)
            for bound in bounds:
                added = 100 * (bound.value / simple - 1) if simple else 0.0
                mark = "*" if bound is best else " "
                print(
                    f"  {level:15} {scope:16}{mark}{bound.method:55} {100 * bound.value / value:8.3f} % of the plan "
                    f"{added:+8.3f} % to the simple bound"
                )
            best_gap = gap(result.score, best)
            print(f"  {level:15} {scope:16} certified gap {'unknown' if best_gap is None else f'{best_gap:.3%}'}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", action="append", choices=synthetic.families(), help="default: all of P = 8")
    parser.add_argument("--planner", default="lpt+annealing")
    parser.add_argument("--time-limit", type=float, default=1.0)
    parser.add_argument("--planted", action="store_true", help="planted problems too")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} processors, Python {platform.python_version()}")
    chosen = arguments.family or [name for name in synthetic.families() if "p16" not in name and "p32" not in name]
    for name in chosen:
        show(name, synthetic.family(name), arguments.planner, arguments.time_limit)
    if arguments.planted:
        show("planted", synthetic.planted(seed=0).problem, arguments.planner, arguments.time_limit)


if __name__ == "__main__":
    main()
