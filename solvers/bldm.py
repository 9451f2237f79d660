"""Expert placement by the balanced largest differencing method."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import IntArray
from routepack_opt.bounds import window_load
from routepack_opt.errors import InvalidInputError
from routepack_opt.plan import Packing, Placement
from routepack_opt.problem import Problem
from routepack_opt.solver import Run, Solver
from routepack_opt.solvers.lpt import checked_load, claimed_placement, refined_ranks, refinement_faults

__all__ = ["Bldm", "bldm_ranks"]


def bldm_ranks(load: npt.ArrayLike, ep_size: int, *, refine: bool = False, max_exchange: int = 2) -> IntArray:
    """Balance expert loads by differencing, E / P experts a rank, every layer on its own.

    Experts by (load descending, index ascending) are cut into E / P groups of
    P. Each group starts as a partial placement with one expert a rank. The two
    partial placements with the largest differences between their most and
    least loaded rank are combined, most loaded with least loaded and so on,
    until one is left: every rank then holds one expert of each group.

    That is also its weakness: one expert of every group ends on every rank, so
    a rank with a very hot expert cannot be given the coldest ones of all. Loads
    with a heavy tail, which routing has, end far above the optimum; exchanges
    (``refine``) repair it.

    Parameters
    ----------
    load : array-like of int, shape [L, E]
        Load of each expert, at least 0.
    ep_size : int
        P, a divisor of E.
    refine : bool
        Whether to apply :func:`routepack_opt.solvers.lpt.refined_ranks` afterwards.
    max_exchange : int
        See there; without effect unless ``refine``.

    Returns
    -------
    rank_of_expert : ndarray of int64, shape [L, E]

    Raises
    ------
    InvalidInputError
        If E is not divisible by P or a load is negative.

    References
    ----------
    W. Michiels, J. Korst, E. Aarts, J. van Leeuwen, "Performance ratios for the
    differencing method applied to the balanced number partitioning problem",
    STACS 2003, LNCS 2607, 583-595, doi:10.1007/3-540-36494-3_51 (section 2).
    """
    array = checked_load(load, ep_size)
    num_layers, num_experts = array.shape
    ranks = np.zeros_like(array)
    for layer in range(num_layers):
        order = np.argsort(-array[layer], kind="stable")
        # A heap entry: (−difference, number, loads descending by rank, experts by rank).
        heap: list[tuple[int, int, IntArray, list[list[int]]]] = []
        for number, start in enumerate(range(0, num_experts, ep_size)):
            group = order[start : start + ep_size]
            sums = array[layer, group]
            heap.append((-int(sums[0] - sums[-1]), number, sums, [[int(expert)] for expert in group]))
        heapq.heapify(heap)
        number = len(heap)
        while len(heap) > 1:
            _, _, first, mine = heapq.heappop(heap)
            _, _, second, theirs = heapq.heappop(heap)
            combined = first + second[::-1]
            by_load = np.argsort(-combined, kind="stable")
            merged = [mine[p] + theirs[ep_size - 1 - p] for p in by_load]
            combined = combined[by_load]
            heapq.heappush(heap, (-int(combined[0] - combined[-1]), number, combined, merged))
            number += 1
        if heap:
            for p, group_of_rank in enumerate(heap[0][3]):
                ranks[layer, group_of_rank] = p
    if refine:
        ranks = refined_ranks(array, ranks, ep_size, max_exchange=max_exchange)
    return ranks


@dataclass(frozen=True)
class Bldm(Solver):
    """Balanced largest differencing on the window load; every layer on its own.

    Parameters
    ----------
    refine : bool
        Exchange experts afterwards, as ``lpt`` does.
    max_exchange : int
        Most experts that change sides in one exchange, 1–4; used by ``refine``.

    See Also
    --------
    bldm_ranks : the same on plain arrays, with the source.
    """

    refine: bool = False
    max_exchange: int = 2
    name: ClassVar[str] = "bldm"

    def __post_init__(self) -> None:
        faults = refinement_faults(self.refine, self.max_exchange)
        if faults:
            raise InvalidInputError(faults, context="bldm")

    def unsupported(self, problem: Problem) -> str | None:
        """Why the component cannot treat ``problem``; None if it can."""
        return None if problem.num_layers else "it has no routing counts, so there are no experts to place"

    def place(self, problem: Problem, packing: Packing | None, run: Run) -> Placement | None:
        """Balance the window load.

        Parameters
        ----------
        problem : Problem
        packing : Packing or None
            Not looked at: this placer balances the window, whatever the blocks.
        run : Run
            With a previous placement, ranks and slots are renamed so that few experts move.
        """
        ranks = bldm_ranks(window_load(problem), problem.ep_size, refine=self.refine, max_exchange=self.max_exchange)
        return claimed_placement(problem, ranks, packing, run)
