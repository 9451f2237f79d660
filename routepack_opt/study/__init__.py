"""Studies: problems × planners × parameters × seeds, run once each, resumable, with tables and tests.

:func:`run` reads a design (its format is described in
:mod:`routepack_opt.study.design`), runs what is not yet in the results folder
and returns a :class:`StudyTable`; :func:`load` reads a results folder;
:func:`compare` holds planners, or levels of any factor, against a reference with
paired tests and intervals.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from routepack_opt.study.design import Design as Design
    from routepack_opt.study.runner import StudyError as StudyError
    from routepack_opt.study.runner import run as run
    from routepack_opt.study.statistics import Comparison as Comparison
    from routepack_opt.study.statistics import bonferroni as bonferroni
    from routepack_opt.study.statistics import bootstrap_interval as bootstrap_interval
    from routepack_opt.study.statistics import compare as compare
    from routepack_opt.study.statistics import gaps as gaps
    from routepack_opt.study.statistics import holm as holm
    from routepack_opt.study.statistics import paired_test as paired_test
    from routepack_opt.study.statistics import performance_profile as performance_profile
    from routepack_opt.study.statistics import primal_integral as primal_integral
    from routepack_opt.study.statistics import time_to_target as time_to_target
    from routepack_opt.study.table import StudyTable as StudyTable
    from routepack_opt.study.table import latex as latex
    from routepack_opt.study.table import load as load
    from routepack_opt.study.table import markdown as markdown
    from routepack_opt.study.table import written as written

_NAMES = {
    "Comparison": "statistics",
    "Design": "design",
    "StudyError": "runner",
    "StudyTable": "table",
    "bonferroni": "statistics",
    "bootstrap_interval": "statistics",
    "compare": "statistics",
    "gaps": "statistics",
    "holm": "statistics",
    "latex": "table",
    "load": "table",
    "markdown": "table",
    "paired_test": "statistics",
    "performance_profile": "statistics",
    "primal_integral": "statistics",
    "run": "runner",
    "time_to_target": "statistics",
    "written": "table",
}

__all__ = [*_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
