"""Errors that say what to change: every fault of an input is reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

__all__ = [
    "Faults",
    "InfeasibleProblemError",
    "InvalidInputError",
    "InvalidPlanError",
    "MissingExtraError",
    "RoutePackError",
    "SolverClaimError",
    "refuse_unknown",
]


class RoutePackError(Exception):
    """Root of every error this package raises on purpose."""


class InvalidInputError(RoutePackError, ValueError):
    """Input that no plan could be right for.

    Parameters
    ----------
    faults : sequence of str
        Everything wrong with the input, each naming the element, its value
        and the limit it breaks.
    context : str, optional
        What was being built or read.
    """

    def __init__(self, faults: Sequence[str] | str, *, context: str = "") -> None:
        self.faults: tuple[str, ...] = (faults,) if isinstance(faults, str) else tuple(faults)
        self.context = context
        head = f"{context}: " if context else ""
        if len(self.faults) == 1:
            text = head + self.faults[0]
        else:
            text = head + f"{len(self.faults)} faults\n" + "\n".join(f"  - {fault}" for fault in self.faults)
        super().__init__(text)


class InfeasibleProblemError(InvalidInputError):
    """A well-formed problem that provably has no feasible plan; the faults are the proofs."""


class InvalidPlanError(InvalidInputError):
    """A placement or packing that cannot be one of this problem, such as slots that are no permutation."""


class MissingExtraError(RoutePackError, ImportError):
    """An optional dependency is needed and not installed.

    Parameters
    ----------
    package : str
        The import name that is missing.
    extra : str
        The extra of ``routepack-opt`` that installs it.
    purpose : str
        What needs it.
    """

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package!r}: install it with pip install 'routepack-opt[{extra}]'"
        )


class SolverClaimError(RoutePackError, AssertionError):
    """A solver claimed a value, bound or feasibility that the evaluator refutes."""


class Faults:
    """Collects faults so that all of them are raised in one error.

    Parameters
    ----------
    limit : int
        Faults kept word for word; further ones are counted.
    """

    def __init__(self, *, limit: int = 20) -> None:
        self._limit = limit
        self._faults: list[str] = []
        self._unlisted = 0

    def add(self, fault: str) -> None:
        """Record one fault."""
        if len(self._faults) < self._limit:
            self._faults.append(fault)
        else:
            self._unlisted += 1

    def extend(self, faults: Sequence[str]) -> None:
        """Record several faults."""
        for fault in faults:
            self.add(fault)

    def __bool__(self) -> bool:
        return bool(self._faults)

    def raise_if_any(self, context: str = "", *, error: type[InvalidInputError] = InvalidInputError) -> None:
        """Raise one error with every recorded fault, if there is any.

        Raises
        ------
        InvalidInputError
            If at least one fault was recorded.
        """
        if not self._faults:
            return
        faults = list(self._faults)
        if self._unlisted:
            faults.append(f"... and {self._unlisted} more")
        raise error(faults, context=context)


def refuse_unknown(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Faults for names that are not known, each with the nearest known one."""
    faults = []
    for item in given:
        if item not in known:
            near = difflib.get_close_matches(item, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
            faults.append(f"unknown {what} {item!r}{hint}")
    return faults
