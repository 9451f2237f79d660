"""The problem: a batch, a cluster, a cost model and a capacity, as exact integers.

Every solver, the evaluator and the bounds see the same two integer arrays:
``problem.attention_work[s, i]`` and ``placement.expert_work(problem)[i, l, p]``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import gcd
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from routepack_opt import files
from routepack_opt.arrays import IntArray, integer_array, read_only
from routepack_opt.batch import CountArray, RoutingBatch
from routepack_opt.cost import Architecture, CostModel, OperatorClass
from routepack_opt.errors import Faults, InfeasibleProblemError, InvalidInputError
from routepack_opt.rows import RowCount, least_bins_bound, least_rows

__all__ = ["Cluster", "Problem"]

SCHEMA = "routepack-problem/1"
#: Total work must stay below this, so that every sum of work fits int64 with room for one difference.
WORK_LIMIT = 2**62
#: Tokens of one rank, layer and window must fit the int32 load arrays of the kernels.
LOAD_LIMIT = 2**31 - 1
#: Limit of a capacity, an alignment and every other size, so that sums of them stay far inside int64.
SIZE_LIMIT = 2**31 - 1
#: Limit of R · D: every cell has an entry in several arrays.
CELL_LIMIT = 10**7


@dataclass(frozen=True)
class Cluster:
    """EP ranks and EDP shards.

    Attributes
    ----------
    ep_size : int
        P, EP ranks of one expert-parallel group.
    shards : tuple of tuple of int
        𝒟_g, the DP slots of each EDP shard: a partition of 0..D−1 into sets of
        equal size, in ascending order. The slots of one shard share one
        expert-parallel communicator.
    """

    ep_size: int
    shards: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        faults = Faults()
        _positive(faults, "ep_size", self.ep_size)
        try:
            shards = tuple(tuple(shard) for shard in self.shards)
        except TypeError:
            raise InvalidInputError(f"shards is {self.shards!r}; it must be lists of DP slots") from None
        for g, shard in enumerate(shards):
            for slot in shard:
                if isinstance(slot, bool) or not isinstance(slot, int | np.integer):
                    faults.add(f"shard {g} holds {slot!r}; DP slots are integers")
        faults.raise_if_any("cluster")
        shards = tuple(tuple(int(slot) for slot in shard) for shard in shards)
        if not shards:
            faults.add("shards is empty; at least one EDP shard is needed")
        sizes = {len(shard) for shard in shards}
        if len(sizes) > 1 or 0 in sizes:
            faults.add(
                "EDP shards must have one size above 0; got "
                + ", ".join(f"shard {g}: {len(shard)}" for g, shard in enumerate(shards))
            )
        owners: dict[int, list[int]] = {}
        for g, shard in enumerate(shards):
            for slot in shard:
                owners.setdefault(slot, []).append(g)
        num_slots = sum(len(shard) for shard in shards)
        for slot, shard_list in sorted(owners.items()):
            if len(shard_list) > 1:
                faults.add(
                    f"DP slot {slot} stands in shards {', '.join(map(str, shard_list))}; shards must not overlap"
                )
        missing = sorted(set(range(num_slots)) - set(owners))
        foreign = sorted(set(owners) - set(range(num_slots)))
        if missing or foreign:
            faults.add(
                f"shards must hold every DP slot 0..{num_slots - 1} once"
                + (f"; missing {missing}" if missing else "")
                + (f"; out of range {foreign}" if foreign else "")
            )
        faults.raise_if_any("cluster")
        object.__setattr__(self, "ep_size", int(self.ep_size))
        object.__setattr__(self, "shards", tuple(tuple(sorted(shard)) for shard in shards))

    @classmethod
    def from_sizes(cls, *, ep_size: int, dp_size: int | None = None, num_shards: int = 1) -> Cluster:
        """Build shards of consecutive DP slots.

        Parameters
        ----------
        ep_size : int
            P.
        dp_size : int, optional
            D, a multiple of ``num_shards``; default ``num_shards * ep_size``
            (one DP slot per EP rank: TP = CP = ETP = 1).
        num_shards : int
            G.

        Raises
        ------
        InvalidInputError
            If a size is below 1 or D is not divisible by G.
        """
        faults = Faults()
        _positive(faults, "ep_size", ep_size)
        _positive(faults, "num_shards", num_shards)
        if dp_size is not None:
            _positive(faults, "dp_size", dp_size)
        faults.raise_if_any("cluster")
        slots = num_shards * ep_size if dp_size is None else dp_size
        if slots > CELL_LIMIT:
            raise InvalidInputError(f"dp_size {slots} is above the limit {CELL_LIMIT}", context="cluster")
        if slots % num_shards:
            raise InvalidInputError(
                f"dp_size {slots} is not divisible by num_shards {num_shards}: EDP shards must be equal in size",
                context="cluster",
            )
        size = slots // num_shards
        return cls(ep_size, tuple(tuple(range(g * size, (g + 1) * size)) for g in range(num_shards)))

    @classmethod
    def from_parallel_sizes(
        cls, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1
    ) -> Cluster:
        """Derive DP slots and EDP shards from the sizes a trainer is launched with.

        Ranks are ordered as Megatron-Core orders them (tp, cp, then dp, then pp
        outermost; expert side etp, ep, then expert-dp): one DP slot is TP·CP
        consecutive devices, one EP group P·ETP consecutive devices, and an EDP
        shard holds the DP slots that lie in one EP group.

        Raises
        ------
        InvalidInputError
            If the sizes do not divide the world, or an EP group does not hold
            whole DP slots.
        """
        faults = Faults()
        sizes = {"world_size": world_size, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
        for name, value in sizes.items():
            _positive(faults, name, value)
        faults.raise_if_any("cluster")
        if world_size % (tp * pp * cp):
            faults.add(f"world_size {world_size} is not divisible by tp·pp·cp = {tp}·{pp}·{cp} = {tp * pp * cp}")
        if world_size % (ep * etp * pp):
            faults.add(f"world_size {world_size} is not divisible by ep·etp·pp = {ep}·{etp}·{pp} = {ep * etp * pp}")
        if (ep * etp) % (tp * cp):
            faults.add(
                f"an EP group of ep·etp = {ep * etp} devices does not hold whole DP slots of tp·cp = {tp * cp} devices"
            )
        faults.raise_if_any("cluster")
        return cls.from_sizes(
            ep_size=ep, dp_size=world_size // (tp * pp * cp), num_shards=world_size // (ep * etp * pp)
        )

    @property
    def dp_size(self) -> int:
        """D, DP slots of a row."""
        return len(self.shards) * len(self.shards[0])

    @property
    def num_shards(self) -> int:
        """G, EDP shards."""
        return len(self.shards)

    @property
    def shard_size(self) -> int:
        """|𝒟_g|, DP slots of one EDP shard."""
        return len(self.shards[0])

    @cached_property
    def shard_of_slot(self) -> IntArray:
        """EDP shard of each DP slot, int64 [D]."""
        shard_of_slot = np.empty(self.dp_size, dtype=np.int64)
        for g, shard in enumerate(self.shards):
            shard_of_slot[list(shard)] = g
        return read_only(shard_of_slot)

    def __repr__(self) -> str:
        return f"Cluster(P {self.ep_size}, D {self.dp_size}, G {self.num_shards})"


def _positive(faults: Faults, name: str, value: Any, *, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        faults.add(f"{name} is {value!r}; it must be an integer")
    elif value < least:
        faults.add(f"{name} is {value}; it must be at least {least}")
    elif value > SIZE_LIMIT:
        faults.add(f"{name} is {value}; it must be at most {SIZE_LIMIT}")


@dataclass(frozen=True, eq=False)
class Problem:
    """One planning problem; build it with :meth:`from_arrays`, :meth:`from_batch` or :meth:`load`.

    Attributes
    ----------
    batch : RoutingBatch
        Samples and their routing.
    cluster : Cluster
        EP ranks and EDP shards.
    cost : CostModel
        α_s, β_s of the attention operator classes.
    capacity : int
        C, tokens of one cell (row, DP slot).
    rows : RowCount
        R with its lower bound. Every planner uses this R.
    length_alignment : int
        m: a sample takes ⌈t/m⌉·m tokens of a cell. Padding costs no work.
    min_samples_per_cell : int
        0, or 1 where an empty microbatch would hang the trainer.
    equal_samples_per_slot : bool
        Every DP slot gets N / D samples over all rows, which some trainers require.
    """

    batch: RoutingBatch
    cluster: Cluster
    cost: CostModel
    capacity: int
    rows: RowCount
    length_alignment: int = 1
    min_samples_per_cell: int = 0
    equal_samples_per_slot: bool = False
    _checked: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if not self._checked:
            raise TypeError("use Problem.from_arrays(...) or Problem.from_batch(...), which validate")

    @classmethod
    def from_batch(
        cls,
        batch: RoutingBatch,
        *,
        capacity: int,
        cluster: Cluster,
        cost: CostModel | str | None = None,
        num_rows: int | RowCount | None = None,
        length_alignment: int = 1,
        min_samples_per_cell: int = 0,
        equal_samples_per_slot: bool = False,
        prove_rows: float = 0.0,
    ) -> Problem:
        """Validate, resolve the rows and freeze.

        Parameters
        ----------
        batch : RoutingBatch
        capacity : int
            C, tokens of a cell.
        cluster : Cluster
        cost : CostModel or str, optional
            A preset name (see :func:`routepack_opt.cost.preset_names`) is derived
            for this capacity and cluster. None: expert work only.
        num_rows : int or RowCount, optional
            R; default: the least number found, stored with its proven lower bound.
            A RowCount carries a bound that is known for these lengths; it is
            believed where the bounds computed here are lower.
        length_alignment, min_samples_per_cell, equal_samples_per_slot
            See the class.
        prove_rows : float
            Seconds an exact bin-packing proof may take when heuristic and bound
            on R do not meet; 0 skips it.

        Raises
        ------
        InvalidInputError
            With every fault of the input.
        InfeasibleProblemError
            If the input is well formed and provably no plan exists: an oversize
            sample, too few rows, fewer samples than cells that must not be empty.
        """
        faults = Faults()
        if not isinstance(batch, RoutingBatch):
            faults.add(f"batch is {type(batch).__name__}; it must be a RoutingBatch")
        _positive(faults, "capacity", capacity)
        _positive(faults, "length_alignment", length_alignment)
        if num_rows is not None and not isinstance(num_rows, RowCount):
            _positive(faults, "num_rows", num_rows)
        if (
            isinstance(min_samples_per_cell, bool)
            or not isinstance(min_samples_per_cell, int | np.integer)
            or min_samples_per_cell not in (0, 1)
        ):
            faults.add(f"min_samples_per_cell is {min_samples_per_cell!r}; it must be 0 or 1")
        if not isinstance(equal_samples_per_slot, bool | np.bool_):
            faults.add(f"equal_samples_per_slot is {equal_samples_per_slot!r}; it must be True or False")
        if not isinstance(cluster, Cluster):
            faults.add(f"cluster is {cluster!r}; it must be a Cluster")
        if (
            isinstance(prove_rows, bool)
            or not isinstance(prove_rows, int | float | np.integer | np.floating)
            or not 0 <= prove_rows < float("inf")
        ):
            faults.add(f"prove_rows is {prove_rows!r}; it must be seconds, finite and at least 0")
        faults.raise_if_any("problem")
        capacity, length_alignment = int(capacity), int(length_alignment)
        if batch.num_layers and batch.num_experts % cluster.ep_size:
            faults.add(
                f"{batch.num_experts} experts are not divisible by ep_size {cluster.ep_size}: every EP rank owns the "
                "same number of expert slots"
            )
        cost_model = _resolve_cost(cost, batch, capacity, cluster, faults)
        if not batch.num_layers and cost_model is not None and not cost_model.attention:
            faults.add("neither counts nor a cost model is given, so there is nothing to balance; pass one of them")
        aligned = -(-batch.lengths // length_alignment) * length_alignment
        for i in np.flatnonzero(aligned > capacity):
            padded = f" (aligned to {length_alignment}: {aligned[i]})" if length_alignment > 1 else ""
            faults.add(
                f"{batch.sample_name(int(i))}: length {batch.lengths[i]}{padded} is above the capacity C = {capacity} "
                "of a cell; raise capacity or drop the sample"
            )
        oversize = bool((aligned > capacity).any())
        if oversize:
            faults.raise_if_any("problem", error=InfeasibleProblemError)
        faults.raise_if_any("problem")
        assert cost_model is not None
        rows = _resolve_rows(batch, aligned, capacity, cluster, num_rows, float(prove_rows), faults)
        faults.raise_if_any("problem", error=InfeasibleProblemError)
        assert rows is not None
        num_cells = rows.num_rows * cluster.dp_size
        if min_samples_per_cell and batch.num_samples < num_cells:
            faults.add(
                f"min_samples_per_cell = 1 with {batch.num_samples} samples for {num_cells} cells "
                f"({rows.num_rows} rows x {cluster.dp_size} DP slots): some cell stays empty; use fewer DP slots or "
                "min_samples_per_cell = 0"
            )
        if equal_samples_per_slot and batch.num_samples % cluster.dp_size:
            faults.add(
                f"equal_samples_per_slot with {batch.num_samples} samples on {cluster.dp_size} DP slots: "
                f"{batch.num_samples} is not divisible by {cluster.dp_size}"
            )
        faults.raise_if_any("problem", error=InfeasibleProblemError)
        problem = cls(
            batch=batch,
            cluster=cluster,
            cost=cost_model,
            capacity=capacity,
            rows=rows,
            length_alignment=length_alignment,
            min_samples_per_cell=int(min_samples_per_cell),
            equal_samples_per_slot=bool(equal_samples_per_slot),
            _checked=True,
        )
        problem._refuse_overflow()
        return problem

    @classmethod
    def from_arrays(
        cls,
        lengths: npt.ArrayLike,
        counts: npt.ArrayLike | None = None,
        *,
        capacity: int,
        ep_size: int,
        dp_size: int | None = None,
        num_shards: int = 1,
        shards: Sequence[Sequence[int]] | None = None,
        top_k: int | None = None,
        routed_tokens: npt.ArrayLike | None = None,
        cost: CostModel | str | None = None,
        num_rows: int | RowCount | None = None,
        length_alignment: int = 1,
        min_samples_per_cell: int = 0,
        equal_samples_per_slot: bool = False,
        sample_ids: Sequence[str] | None = None,
        group_ids: npt.ArrayLike | None = None,
        prove_rows: float = 0.0,
    ) -> Problem:
        """Build a problem from plain arrays.

        Parameters
        ----------
        lengths : array-like of int, shape [N]
            Tokens of each sample.
        counts : array-like of int, shape [N, L, E], optional
            Routed tokens; without them only attention is balanced.
        capacity, cost, num_rows, length_alignment, min_samples_per_cell, equal_samples_per_slot, prove_rows
            See :meth:`from_batch`.
        ep_size, dp_size, num_shards : int
            P, D, G; see :meth:`Cluster.from_sizes`.
        shards : sequence of sequence of int, optional
            DP slots of each EDP shard, instead of ``dp_size`` and ``num_shards``.
        top_k, routed_tokens, sample_ids, group_ids
            See :meth:`RoutingBatch.from_arrays`.

        Raises
        ------
        InvalidInputError, InfeasibleProblemError
            With every fault of the batch, of the cluster and of their combination.
        """
        faults = Faults()
        batch = cluster = None
        try:
            batch = RoutingBatch.from_arrays(
                lengths,
                counts,
                top_k=top_k,
                routed_tokens=routed_tokens,
                sample_ids=sample_ids,
                group_ids=group_ids,
            )
        except InvalidInputError as error:
            faults.extend(error.faults)
        try:
            if shards is None:
                cluster = Cluster.from_sizes(ep_size=ep_size, dp_size=dp_size, num_shards=num_shards)
            elif dp_size is not None or num_shards != 1:
                faults.add("shards stands beside dp_size or num_shards; give one or the other")
            else:
                cluster = Cluster(ep_size, shards)  # type: ignore[arg-type]
        except InvalidInputError as error:
            faults.extend(error.faults)
        faults.raise_if_any("problem")
        assert batch is not None
        assert cluster is not None
        return cls.from_batch(
            batch,
            capacity=capacity,
            cluster=cluster,
            cost=cost,
            num_rows=num_rows,
            length_alignment=length_alignment,
            min_samples_per_cell=min_samples_per_cell,
            equal_samples_per_slot=equal_samples_per_slot,
            prove_rows=prove_rows,
        )

    @classmethod
    def from_window(cls, load: npt.ArrayLike, *, ep_size: int) -> Problem:
        """Placement only: the loads of fixed micro-steps, as expert-distribution recorders give them.

        Every micro-step becomes one sample in a row of its own (D = G = 1), so
        that Σ_rows Σ_l max_p W is the expert time of the window. Use it with
        :meth:`routepack_opt.plan.Packing.one_sample_per_row`.

        Parameters
        ----------
        load : array-like of int, shape [W, L, E]
            Routed tokens of each micro-step, layer and logical expert. Micro-steps
            without any token are dropped; within a micro-step every layer must
            have routed the same number.
        ep_size : int
            P.

        Raises
        ------
        InvalidInputError
            If layers of a micro-step differ in their total (a rank or a layer is
            missing from the recording), or the load is empty.
        """
        faults = Faults()
        array = integer_array(load, "load", faults, ndim=3, element="micro-step")
        faults.raise_if_any("window")
        assert array is not None
        if array.size and array.max() > LOAD_LIMIT:
            step, layer, expert = np.argwhere(array > LOAD_LIMIT)[0]
            faults.add(
                f"micro-step {step}, layer {layer}, expert {expert}: load {array[step, layer, expert]} is above the "
                f"limit {LOAD_LIMIT}"
            )
            faults.raise_if_any("window")
        if array.size and array.min() < 0:
            step, layer, expert = np.argwhere(array < 0)[0]
            faults.add(f"micro-step {step}, layer {layer}, expert {expert}: load {array[step, layer, expert]} < 0")
        totals = array.sum(axis=2)
        for step in np.flatnonzero((totals != totals[:, :1]).any(axis=1))[:10] if array.size else []:
            layer = int(np.flatnonzero(totals[step] != totals[step, 0])[0])
            faults.add(
                f"micro-step {step}: layer {layer} routed {totals[step, layer]} tokens, layer 0 {totals[step, 0]}; "
                "sum the recordings of all ranks first"
            )
        if not array.size or not totals.any():
            faults.add("load holds no routed token")
        faults.raise_if_any("window")
        used = array[totals[:, 0] > 0]
        tokens = used[:, 0].sum(axis=1)
        return cls.from_arrays(
            tokens,
            used,
            top_k=1,
            capacity=int(tokens.max()),
            ep_size=ep_size,
            dp_size=1,
            num_rows=len(used),
        )

    def _refuse_overflow(self) -> None:
        faults = Faults()
        q, h = self._denominator, self._divisor
        total = sum(self.attention_coefficients(s)[0] * self.batch.num_tokens for s in range(len(self.cost.attention)))
        squares = sum(int(t) * int(t) for t in self.batch.lengths)
        total += sum(self.attention_coefficients(s)[1] * squares for s in range(len(self.cost.attention)))
        routed = int(self.batch.routed_tokens.sum())
        total += self.expert_unit * self.batch.top_k * self.num_layers * routed
        if total >= WORK_LIMIT:
            faults.add(
                f"total work {total} reaches 2^62: exact integers do not fit (common denominator q = {q}, divisor "
                f"h = {h}); round alpha and beta to fewer bits (cost.rational(x, bits=...)) or choose a capacity that "
                "is a power of two"
            )
        most = most_rank_load(self.num_experts, self.ep_size, self.top_k, routed) if self.num_layers else 0
        if most > LOAD_LIMIT:
            faults.add(
                f"one rank can get {most} routed tokens of a layer in the window, above the limit {LOAD_LIMIT}; plan "
                "fewer samples at a time"
            )
        faults.raise_if_any("problem")

    def replace(
        self,
        *,
        batch: RoutingBatch | None = None,
        cluster: Cluster | None = None,
        cost: CostModel | str | None = None,
        capacity: int | None = None,
        num_rows: int | None = None,
        length_alignment: int | None = None,
        min_samples_per_cell: int | None = None,
        equal_samples_per_slot: bool | None = None,
    ) -> Problem:
        """Return a changed problem; what depends on the change is derived again.

        Rows are resolved again unless ``num_rows`` is given or nothing they
        depend on changes. A preset cost model is derived again for a new
        capacity or cluster; any other cost model must then be given.

        Raises
        ------
        InvalidInputError, InfeasibleProblemError
            As :meth:`from_batch`; also if C or the cluster changes and the cost
            model is neither a preset nor given.
        """
        scale_changes = (capacity is not None and capacity != self.capacity) or (
            cluster is not None
            and (cluster.shard_size, cluster.ep_size) != (self.cluster.shard_size, self.cluster.ep_size)
        )
        new_cost: CostModel | str = self.cost if cost is None else cost
        if cost is None and scale_changes and self.cost.attention:
            if self.cost.preset is None:
                raise InvalidInputError(
                    "alpha and beta depend on the capacity and the cluster: give the cost model of the new ones",
                    context="problem",
                )
            new_cost = self.cost.preset
        keep_rows = (
            num_rows is None
            and batch is None
            and capacity in (None, self.capacity)
            and length_alignment in (None, self.length_alignment)
            and (cluster is None or cluster.dp_size == self.dp_size)
        )
        return Problem.from_batch(
            self.batch if batch is None else batch,
            capacity=self.capacity if capacity is None else capacity,
            cluster=self.cluster if cluster is None else cluster,
            cost=new_cost,
            num_rows=self.rows if keep_rows else num_rows,
            length_alignment=self.length_alignment if length_alignment is None else length_alignment,
            min_samples_per_cell=self.min_samples_per_cell if min_samples_per_cell is None else min_samples_per_cell,
            equal_samples_per_slot=(
                self.equal_samples_per_slot if equal_samples_per_slot is None else equal_samples_per_slot
            ),
        )

    @property
    def lengths(self) -> IntArray:
        """t_i, tokens, int64 [N]."""
        return self.batch.lengths

    @property
    def counts(self) -> CountArray:
        """a_{i,l,e}, routed tokens, unsigned [N, L, E]."""
        return self.batch.counts

    @property
    def num_samples(self) -> int:
        """N."""
        return self.batch.num_samples

    @property
    def num_layers(self) -> int:
        """L, MoE layers with recorded routing."""
        return self.batch.num_layers

    @property
    def num_experts(self) -> int:
        """E, logical experts of a layer."""
        return self.batch.num_experts

    @property
    def top_k(self) -> int:
        """K, experts a token is routed to."""
        return self.batch.top_k

    @property
    def ep_size(self) -> int:
        """P, EP ranks."""
        return self.cluster.ep_size

    @property
    def dp_size(self) -> int:
        """D, DP slots of a row."""
        return self.cluster.dp_size

    @property
    def num_shards(self) -> int:
        """G, EDP shards."""
        return self.cluster.num_shards

    @property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """𝒟_g, DP slots of each EDP shard."""
        return self.cluster.shards

    @property
    def shard_of_slot(self) -> IntArray:
        """EDP shard of each DP slot, int64 [D]."""
        return self.cluster.shard_of_slot

    @property
    def num_rows(self) -> int:
        """R, rows (microbatches executed one after another)."""
        return self.rows.num_rows

    @property
    def num_cells(self) -> int:
        """R · D."""
        return self.num_rows * self.dp_size

    @cached_property
    def aligned_lengths(self) -> IntArray:
        """⌈t_i / m⌉ · m, tokens a sample takes of a cell, int64 [N]."""
        m = self.length_alignment
        return read_only(-(-self.lengths // m) * m)

    @property
    def fill(self) -> float:
        """Share of all cells' capacity that aligned lengths take."""
        return int(self.aligned_lengths.sum()) / (self.num_cells * self.capacity)

    @cached_property
    def _denominator(self) -> int:
        return self.cost.denominator

    @cached_property
    def _divisor(self) -> int:
        q, c = self._denominator, self.capacity
        divisor = q * c
        for operator in self.cost.attention:
            divisor = gcd(divisor, int(q * operator.alpha * c), int(q * operator.beta))
        return divisor

    @property
    def unit_denominator(self) -> int:
        """Work units of J = 1: work = unit_denominator · J, an integer."""
        return self._denominator * self.capacity**2 // self._divisor

    @property
    def expert_unit(self) -> int:
        """Work units of one routed token on one EP rank."""
        return self._denominator * self.capacity // self._divisor

    def attention_coefficients(self, s: int) -> tuple[int, int]:
        """Work units of operator class ``s`` per token and per squared token."""
        operator = self.cost.attention[s]
        q, h = self._denominator, self._divisor
        return int(q * operator.alpha * self.capacity) // h, int(q * operator.beta) // h

    @cached_property
    def attention_work(self) -> IntArray:
        """Attention work of each sample by operator class, int64 [S, N], work units.

        The work of a cell is the sum over its samples; the block pays the largest cell per class.
        """
        work = np.zeros((len(self.cost.attention), self.num_samples), dtype=np.int64)
        for s in range(len(self.cost.attention)):
            per_token, per_square = self.attention_coefficients(s)
            work[s] = per_token * self.lengths + per_square * self.lengths**2
        return read_only(work)

    def units(self, work: int) -> float:
        """Turn integer work into units of J (routed tokens through one expert, ÷ C)."""
        return float(Fraction(int(work), self.unit_denominator))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything that decides which plans are feasible and what they cost.

        ``"sha256:"`` and 64 hexadecimal digits over lengths, counts, routed tokens
        and the specification with its resolved rows; names and groups of samples
        do not enter.
        """
        return "sha256:" + files.array_digest(
            {
                "lengths": self.lengths,
                "counts": self.counts,
                "routed_tokens": self.batch.routed_tokens,
                "spec": files.canonical_json(self._spec()),
            }
        )

    def _spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = {
            "schema": SCHEMA,
            "capacity": self.capacity,
            "num_rows": self.num_rows,
            "ep_size": self.ep_size,
            "shards": [list(shard) for shard in self.shards],
            "top_k": self.top_k,
            "length_alignment": self.length_alignment,
            "min_samples_per_cell": self.min_samples_per_cell,
            "attention": [
                {"name": operator.name, "alpha": str(operator.alpha), "beta": str(operator.beta)}
                for operator in self.cost.attention
            ],
        }
        if self.equal_samples_per_slot:
            spec["equal_samples_per_slot"] = True
        return spec

    def save(self, path: files.PathLike) -> None:
        """Write the exchange format ``routepack-problem/1`` (``.npz``) atomically.

        ``row_count`` holds R with its lower bound, by what each was found, and a
        digest of the lengths and sizes the bound is about; it is no part of the
        fingerprint, and a file may lack it.
        """
        arrays: dict[str, npt.NDArray[Any]] = {
            "lengths": self.lengths,
            "counts": self.counts,
            "routed_tokens": self.batch.routed_tokens,
            "spec": np.array(files.canonical_json(self._spec())),
            "row_count": np.array(
                files.canonical_json(
                    {
                        "num_rows": self.num_rows,
                        "bound": self.rows.bound,
                        "method": self.rows.method,
                        "bound_method": self.rows.bound_method,
                        "proves": _rows_digest(self.lengths, self.capacity, self.length_alignment, self.dp_size),
                    }
                )
            ),
        }
        if self.batch.sample_ids is not None:
            arrays["sample_ids"] = np.array(self.batch.sample_ids)
        if self.batch.group_ids is not None:
            arrays["group_ids"] = self.batch.group_ids
        files.write_npz(path, arrays)

    @classmethod
    def load(cls, path: files.PathLike, *, prove_rows: float = 0.0) -> Problem:
        """Read the exchange format; ``num_rows: null`` is resolved now.

        Parameters
        ----------
        path : path-like
        prove_rows : float
            See :meth:`from_batch`.

        Raises
        ------
        InvalidInputError
            If the file is damaged, pickled, of another schema or invalid.

        Notes
        -----
        A stored lower bound on R is refused if it belongs to other lengths or
        sizes, is above R or contradicts the specification, and the simple bounds
        are computed again. Where the stored bound is above those, it is believed,
        because its proof may have taken minutes, and ``rows.stored`` says so;
        ``prove_rows`` makes the proof again, and what it reaches is not stored
        any more. Nothing but the claim that R is least depends on it.
        """
        arrays = files.read_npz(
            path,
            what="problem",
            required=("lengths", "counts", "spec"),
            optional=("routed_tokens", "sample_ids", "group_ids", "row_count"),
        )
        context = f"problem {path}"
        raw = _json_of(arrays["spec"], "spec", context)
        if isinstance(raw, dict) and raw.get("schema") != SCHEMA:
            raise InvalidInputError(f"schema is {raw.get('schema')!r}; this reads {SCHEMA!r}", context=context)
        try:
            spec = _Spec.model_validate(raw)
        except ValidationError as error:
            raise InvalidInputError(validation_faults(error, "spec"), context=context) from error
        faults = Faults()
        operators = []
        for entry in spec.attention:
            try:
                operators.append(OperatorClass(entry.name, _fraction(entry.alpha), _fraction(entry.beta)))
            except (ValueError, ZeroDivisionError) as error:
                faults.add(f"spec.attention {entry.name!r}: alpha {entry.alpha!r}, beta {entry.beta!r}: {error}")
        ids = arrays.get("sample_ids")
        if ids is not None and (ids.ndim != 1 or ids.dtype.kind not in "Uiu"):
            faults.add(f"sample_ids has dtype {ids.dtype} and shape {ids.shape}; it must be strings [N]")
        num_rows: int | RowCount | None = spec.num_rows
        if "row_count" in arrays:
            stored = _json_of(arrays["row_count"], "row_count", context)
            num_rows = _stored_rows(stored, arrays["lengths"], spec, faults)
        faults.raise_if_any(context)
        counts = arrays["counts"]
        has_routing = counts.ndim != 3 or (counts.shape[1] > 0 and counts.shape[2] > 0)
        try:
            return cls.from_arrays(
                arrays["lengths"],
                counts if has_routing else None,
                top_k=spec.top_k if has_routing else None,
                routed_tokens=arrays.get("routed_tokens"),
                capacity=spec.capacity,
                num_rows=num_rows,
                ep_size=spec.ep_size,
                shards=spec.shards,
                length_alignment=spec.length_alignment,
                min_samples_per_cell=spec.min_samples_per_cell,
                equal_samples_per_slot=spec.equal_samples_per_slot,
                cost=CostModel(tuple(operators)),
                sample_ids=None if ids is None else [str(name) for name in ids],
                group_ids=arrays.get("group_ids"),
                prove_rows=prove_rows,
            )
        except InfeasibleProblemError as error:
            raise InfeasibleProblemError(error.faults, context=context) from error
        except InvalidInputError as error:
            raise InvalidInputError(error.faults, context=context) from error

    def __repr__(self) -> str:
        rows = f"R {self.num_rows} ({'proven' if self.rows.proven else f'bound {self.rows.bound}'})"
        routing = f"L {self.num_layers}, E {self.num_experts}, top-{self.top_k}" if self.num_layers else "no routing"
        return (
            f"Problem(N {self.num_samples}, {routing}, P {self.ep_size}, D {self.dp_size}, G {self.num_shards}, "
            f"C {self.capacity:,}, {rows}, fill {self.fill:.1%})"
        )


def _json_of(text: npt.NDArray[Any], name: str, context: str) -> Any:
    if text.ndim or text.dtype.kind != "U":
        raise InvalidInputError(f"{name} is no JSON string", context=context)
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name} is no JSON: {error}", context=context) from error


def _rows_digest(lengths: npt.NDArray[Any], capacity: int, length_alignment: int, dp_size: int) -> str:
    """Digest of everything the least number of rows depends on."""
    return "sha256:" + files.array_digest(
        {"lengths": lengths, "capacity": capacity, "length_alignment": length_alignment, "dp_size": dp_size}
    )


def _stored_rows(raw: Any, lengths: npt.NDArray[Any], spec: _Spec, faults: Faults) -> int | RowCount | None:
    """The row count of a file, unless it contradicts the rest of the file; resolving it holds it against bounds."""
    try:
        found = _StoredRows.model_validate(raw)
    except ValidationError as error:
        faults.extend(validation_faults(error, "row_count"))
        return spec.num_rows
    if found.num_rows != spec.num_rows:
        faults.add(
            f"row_count is about {found.num_rows} rows, spec.num_rows is {spec.num_rows}; "
            "a file that is changed by hand does without row_count"
        )
    dp_size = sum(len(shard) for shard in spec.shards)
    checked = integer_array(lengths, "lengths", Faults(), ndim=1)  # from_arrays names the faults
    if checked is not None and found.proves != _rows_digest(checked, spec.capacity, spec.length_alignment, dp_size):
        faults.add(
            "row_count belongs to other lengths, capacity, length_alignment or DP slots than the file's; "
            "a file that is changed by hand does without row_count"
        )
    if faults:
        return spec.num_rows
    try:
        return RowCount(found.num_rows, found.bound, found.method, found.bound_method, stored=True)
    except InvalidInputError as error:
        faults.extend([f"row_count: {fault}" for fault in error.faults])
        return spec.num_rows


def _fraction(text: str) -> Fraction:
    """Read "p/q" or "p"; anything else, exponents among it, is refused."""
    if not re.fullmatch(r"-?\d{1,40}(/\d{1,40})?", text):
        raise ValueError("write p/q with at most 40 digits each")
    return Fraction(text)


class _OperatorSpec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    alpha: str
    beta: str


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    schema_: str | None = None
    capacity: int
    num_rows: int | None = None
    ep_size: int
    shards: list[list[int]]
    attention: list[_OperatorSpec]
    top_k: int | None = None
    length_alignment: int = 1
    min_samples_per_cell: int = 0
    equal_samples_per_slot: bool = False

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> _Spec:
        if isinstance(obj, dict):
            obj = {key: value for key, value in obj.items() if key != "schema"}
        return super().model_validate(obj, **options)


class _StoredRows(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    num_rows: int
    bound: int
    method: str = Field(max_length=100)
    bound_method: str = Field(max_length=100)
    proves: str


def most_rank_load(num_experts: int, ep_size: int, top_k: int, routed_tokens: int) -> int:
    """Most routed tokens one rank can get of a layer: no token goes to an expert twice."""
    return min(top_k, num_experts // ep_size) * routed_tokens


def validation_faults(error: ValidationError, root: str) -> list[str]:
    """Turn a pydantic error into faults that name the place, the value and what was expected."""
    faults = []
    for item in error.errors():
        place = ".".join([root, *(str(part) for part in item["loc"])])
        shown = "" if item["type"] == "missing" else f" (got {item['input']!r})"
        faults.append(f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}{shown}"[:300])
    return faults


def _resolve_cost(
    cost: CostModel | str | None, batch: RoutingBatch, capacity: int, cluster: Cluster, faults: Faults
) -> CostModel | None:
    if cost is None:
        return CostModel()
    if isinstance(cost, CostModel):
        return cost
    if not isinstance(cost, str):
        faults.add(f"cost is {cost!r}; it must be a CostModel, a preset name or None")
        return None
    try:
        architecture = Architecture.from_preset(cost)
    except InvalidInputError as error:
        faults.extend(error.faults)
        return None
    if batch.num_layers:
        for name, found, wanted in (
            ("MoE layers", batch.num_layers, architecture.num_moe_layers),
            ("experts", batch.num_experts, architecture.num_experts),
            ("experts a token", batch.top_k, architecture.top_k),
        ):
            if found != wanted:
                faults.add(
                    f"counts have {found} {name}, the preset {cost!r} has {wanted}; a preset weighs attention against "
                    "its own experts: use CostModel.from_preset(..., overrides=...) to bend it knowingly"
                )
    return CostModel.from_architecture(
        architecture, capacity=capacity, shard_size=cluster.shard_size, ep_size=cluster.ep_size
    )


def _resolve_rows(
    batch: RoutingBatch,
    aligned: IntArray,
    capacity: int,
    cluster: Cluster,
    num_rows: int | RowCount | None,
    prove_rows: float,
    faults: Faults,
) -> RowCount | None:
    if num_rows is None:
        return least_rows(aligned, capacity, cluster.dp_size, exact=prove_rows > 0, time_limit=prove_rows)
    stated = num_rows if isinstance(num_rows, RowCount) else None
    num_rows = int(num_rows.num_rows if isinstance(num_rows, RowCount) else num_rows)
    if num_rows * cluster.dp_size > CELL_LIMIT:
        faults.add(f"{num_rows} rows x {cluster.dp_size} DP slots are above the limit of {CELL_LIMIT} cells")
        return None
    bins, method = least_bins_bound(aligned, capacity)
    bound = -(-bins // cluster.dp_size)
    if bound <= num_rows and prove_rows > 0:
        proof = least_rows(aligned, capacity, cluster.dp_size, exact=True, time_limit=prove_rows)
        if proof.bound > bound:
            # Fewer bins than this would fit fewer rows.
            bound, bins, method = proof.bound, (proof.bound - 1) * cluster.dp_size + 1, proof.bound_method
    if bound > num_rows:
        cells = num_rows * cluster.dp_size
        total = int(aligned.sum())
        room = (
            f"{total} tokens are above the {cells * capacity} that {num_rows} rows x {cluster.dp_size} DP slots x "
            f"capacity {capacity} hold"
            if total > cells * capacity
            else f"the samples need at least {bins} cells (by {method}), {num_rows} rows have {cells}"
        )
        faults.add(f"num_rows = {num_rows} is too few: {room}; at least {bound} rows are needed")
        return None
    if stated is not None and stated.bound > bound:
        return stated
    return RowCount(num_rows, bound, "given" if stated is None else stated.method, method)
