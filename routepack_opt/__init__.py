"""Expert placement and attention-aware data packing for Mixture-of-Experts RL training.

Rollout records every sample's token length and, per MoE layer, which experts
its tokens were routed to. Before the optimizer step, the planner decides which
EP rank owns which expert (placement) and which samples share a microbatch on
which data-parallel slot (packing), minimising lexicographically the slowest
EDP shard, the total projected work and the worst row::

    import routepack_opt as rp

    problem = rp.load_trace()
    runs = rp.compare(problem, ["contiguous+ffd", "lpt+annealing"], time_limit=2)
    runs
    rp.plot.comparison(problem, runs)

Public names are imported when they are first used, so that ``import
routepack_opt`` stays fast.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routepack_opt import bounds as bounds
    from routepack_opt import cost as cost
    from routepack_opt import formats as formats
    from routepack_opt import metrics as metrics
    from routepack_opt import migration as migration
    from routepack_opt import moves as moves
    from routepack_opt import plot as plot
    from routepack_opt import rows as rows
    from routepack_opt import score as score
    from routepack_opt import simulation as simulation
    from routepack_opt import study as study
    from routepack_opt import synthetic as synthetic
    from routepack_opt.batch import RoutingBatch as RoutingBatch
    from routepack_opt.cost import CostModel as CostModel
    from routepack_opt.cost import OperatorClass as OperatorClass
    from routepack_opt.errors import InfeasibleProblemError as InfeasibleProblemError
    from routepack_opt.errors import InvalidInputError as InvalidInputError
    from routepack_opt.errors import RoutePackError as RoutePackError
    from routepack_opt.metrics import measure as measure
    from routepack_opt.plan import Packing as Packing
    from routepack_opt.plan import Placement as Placement
    from routepack_opt.plan import Plan as Plan
    from routepack_opt.planning import Runs as Runs
    from routepack_opt.planning import compare as compare
    from routepack_opt.planning import pack as pack
    from routepack_opt.planning import place as place
    from routepack_opt.planning import solve as solve
    from routepack_opt.planning import warm_up as warm_up
    from routepack_opt.problem import Cluster as Cluster
    from routepack_opt.problem import Problem as Problem
    from routepack_opt.recorded import load_trace as load_trace
    from routepack_opt.registry import planners as planners
    from routepack_opt.result import Limit as Limit
    from routepack_opt.result import Result as Result
    from routepack_opt.result import Status as Status
    from routepack_opt.score import evaluate as evaluate
    from routepack_opt.score import violations as violations
    from routepack_opt.sequence import plan_sequence as plan_sequence


__version__ = "0.1.0"

_NAMES: dict[str, tuple[str, str]] = {
    "RoutingBatch": ("batch", "RoutingBatch"),
    "CostModel": ("cost", "CostModel"),
    "OperatorClass": ("cost", "OperatorClass"),
    "RoutePackError": ("errors", "RoutePackError"),
    "InvalidInputError": ("errors", "InvalidInputError"),
    "InfeasibleProblemError": ("errors", "InfeasibleProblemError"),
    "measure": ("metrics", "measure"),
    "Packing": ("plan", "Packing"),
    "Placement": ("plan", "Placement"),
    "Plan": ("plan", "Plan"),
    "Runs": ("planning", "Runs"),
    "compare": ("planning", "compare"),
    "pack": ("planning", "pack"),
    "place": ("planning", "place"),
    "solve": ("planning", "solve"),
    "warm_up": ("planning", "warm_up"),
    "Cluster": ("problem", "Cluster"),
    "Problem": ("problem", "Problem"),
    "planners": ("registry", "planners"),
    "Limit": ("result", "Limit"),
    "Result": ("result", "Result"),
    "Status": ("result", "Status"),
    "evaluate": ("score", "evaluate"),
    "violations": ("score", "violations"),
    "plan_sequence": ("sequence", "plan_sequence"),
    "load_trace": ("recorded", "load_trace"),
}
_MODULES = (
    "bounds",
    "cost",
    "formats",
    "metrics",
    "migration",
    "moves",
    "plot",
    "rows",
    "score",
    "simulation",
    "study",
    "synthetic",
)

__all__ = ["__version__", *_NAMES, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module, attribute = _NAMES[name]
        value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
