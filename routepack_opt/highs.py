"""HiGHS without its banner: recent versions print one line when the first solver of a process is built."""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

__all__ = ["silent_highs"]

_lock = threading.Lock()
_announced = False


def silent_highs() -> Any:
    """Build a HiGHS solver that writes nothing to the terminal, one thread.

    HiGHS 1.16 prints its version when the first solver of a process is
    constructed, before any option can be set. The line would break the output
    of commands that promise a single JSON object; so file descriptor 1 points
    to the null device while the first solver is built. Whoever builds solvers
    through another library can call this once before.

    Returns
    -------
    highspy.Highs
    """
    highspy: Any = importlib.import_module("highspy")
    global _announced
    with _lock:
        solver = highspy.Highs() if _announced else _build_unseen(highspy)
        _announced = True
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    return solver


def _build_unseen(highspy: Any) -> Any:
    try:
        kept = os.dup(1)
    except OSError:  # no standard output at all: nothing to keep clean
        return highspy.Highs()
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, 1)
        finally:
            os.close(null)
        return highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
