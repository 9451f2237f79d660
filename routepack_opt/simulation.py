"""Modelled step time of a plan, and when planning is hidden behind the rest of a step.

Two models, neither of which replaces a measurement:

* :func:`simulate` runs a plan on a modelled trainer. Inside an EDP shard a row
  is lockstep: every operator class waits for its slowest DP slot, every MoE
  layer for its hottest EP rank. Shards accumulate independently and meet once,
  at the end of the step. Time that no plan changes (communication, optimizer,
  embeddings) is a constant.
* :class:`Stages` and :class:`JointStages` are the admission schedules of a
  planned optimizer step as task graphs, with their critical path and slack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from routepack_opt.arrays import read_only
from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown
from routepack_opt.plan import Plan
from routepack_opt.problem import Problem
from routepack_opt.score import breakdown, violations

if TYPE_CHECKING:
    import networkx as nx
    import pandas as pd

__all__ = [
    "JointStages",
    "Schedule",
    "Sensitivity",
    "Stages",
    "Task",
    "Timeline",
    "Trainer",
    "sensitivity",
    "simulate",
]

FloatArray = npt.NDArray[np.float64]

#: What happens between the rows of different EDP shards.
SYNCHRONIZATIONS = ("step", "row")


def _seconds(faults: Faults, name: str, value: Any, *, above: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        faults.add(f"{name} is {value!r}; it must be a number of seconds")
    elif not math.isfinite(value) or value < 0 or (above and value == 0):
        faults.add(f"{name} is {value}; it must be finite and {'above' if above else 'at least'} 0")


@dataclass(frozen=True)
class Trainer:
    """A modelled trainer.

    Attributes
    ----------
    seconds_per_unit : float
        Seconds a block of J = 1 takes (forward and backward): one routed token
        through one expert on one device, times C.
    fixed_seconds : float
        Seconds of a step that no plan changes, after the last row.
    synchronization : str
        ``"step"``: shards meet once, at the end of the step (PP = 1, ZeRO-1/2).
        ``"row"``: they meet after every row, as FSDP and ZeRO-3 gathers make them:
        the step then takes Σ_r max_g J.
    pipeline_stages : int
        PP. Above 1 an *approximation*: stages of equal share, forward and backward
        of a row as one task, rows in order. Then the rows are a proportionate flow
        shop, whose makespan is Σ_r J_r / PP + (PP − 1) · max_r J_r / PP for each
        shard: the second term is the bubble. Interleaved schedules have less.

    References
    ----------
    Proportionate flow shop: S. S. Panwalkar, M. L. Smith, C. Koulamas, "Review of
    the ordered and proportionate flow shop scheduling research", Naval Res. Logist.
    60 (2013) 46-55.
    """

    seconds_per_unit: float = 1.0
    fixed_seconds: float = 0.0
    synchronization: str = "step"
    pipeline_stages: int = 1

    def __post_init__(self) -> None:
        faults = Faults()
        _seconds(faults, "seconds_per_unit", self.seconds_per_unit, above=True)
        _seconds(faults, "fixed_seconds", self.fixed_seconds)
        faults.extend(refuse_unknown([str(self.synchronization)], SYNCHRONIZATIONS, "synchronization"))
        if isinstance(self.pipeline_stages, bool) or not isinstance(self.pipeline_stages, int | np.integer):
            faults.add(f"pipeline_stages is {self.pipeline_stages!r}; it must be an integer")
        elif self.pipeline_stages < 1:
            faults.add(f"pipeline_stages is {self.pipeline_stages}; it must be at least 1")
        faults.raise_if_any("trainer")

    def calibrate(
        self, problem: Problem, plan: Plan, *, step_time: float | None = None, fixed_share: float = 0.0
    ) -> Trainer:
        """Scale this trainer so that a reference plan takes a known time.

        Parameters
        ----------
        problem : Problem
        plan : Plan
            The reference, such as what the trainer runs today.
        step_time : float, optional
            Seconds of a step under the reference plan; default: keep
            ``seconds_per_unit`` and only add the fixed time.
        fixed_share : float
            Share of the reference step that no plan changes, in [0, 1).

        Returns
        -------
        Trainer
        """
        faults = Faults()
        if step_time is not None:
            _seconds(faults, "step_time", step_time, above=True)
        if isinstance(fixed_share, bool) or not isinstance(fixed_share, int | float) or not 0 <= fixed_share < 1:
            faults.add(f"fixed_share is {fixed_share!r}; it must be at least 0 and below 1")
        faults.raise_if_any("trainer")
        planned = simulate(problem, plan, replace(self, fixed_seconds=0.0)).step_time
        if step_time is None:
            return replace(self, fixed_seconds=planned * fixed_share / (1 - fixed_share))
        return replace(
            self,
            seconds_per_unit=self.seconds_per_unit * step_time * (1 - fixed_share) / planned,
            fixed_seconds=step_time * fixed_share,
        )


@dataclass(frozen=True, eq=False)
class Timeline:
    """One modelled optimizer step, by shard, row and device.

    A shard has lcm(|𝒟_g|, P) modelled devices; device k works for DP slot
    ``slot_of_device[k]`` of its shard and is EP rank ``rank_of_device[k]``. Layers are
    summed up: a row shows its attention time first, its expert time after it.
    Times are seconds from the start of the step.

    Attributes
    ----------
    step_time : float
        Until the step has ended everywhere, fixed time included.
    tokens : int
        Tokens of the batch.
    start, attention_end, end : ndarray of float64, shape [R, G]
        When a row starts, its last attention operator ends, and it ends.
    attention_busy, expert_busy : ndarray of float64, shape [R, G, n]
        Seconds each device computes in the row; what is missing to the row's
        attention and expert time is waiting.
    bubble : ndarray of float64, shape [G]
        Pipeline bubble; 0 for PP = 1.
    fixed_seconds : float
    slot_of_device, rank_of_device : ndarray of int64, shape [n]
        Index of the DP slot within the shard, and EP rank.
    approximate : bool
        Whether the pipeline approximation was used.
    """

    step_time: float
    tokens: int
    start: FloatArray
    attention_end: FloatArray
    end: FloatArray
    attention_busy: FloatArray
    expert_busy: FloatArray
    bubble: FloatArray
    fixed_seconds: float
    slot_of_device: npt.NDArray[np.int64]
    rank_of_device: npt.NDArray[np.int64]
    approximate: bool

    @property
    def num_rows(self) -> int:
        """R."""
        return int(self.start.shape[0])

    @property
    def num_shards(self) -> int:
        """G."""
        return int(self.start.shape[1])

    @property
    def num_devices(self) -> int:
        """n, modelled devices of a shard."""
        return int(self.attention_busy.shape[2])

    @property
    def throughput(self) -> float:
        """Tokens a second."""
        return self.tokens / self.step_time

    @property
    def shard_time(self) -> FloatArray:
        """Seconds until each shard is done with its rows, bubble included, [G]."""
        time: FloatArray = self.end.max(axis=0) + self.bubble
        return time

    @property
    def busy_share(self) -> float:
        """Device seconds computed over device seconds of the step."""
        busy = float(self.attention_busy.sum() + self.expert_busy.sum())
        return busy / (self.step_time * self.num_shards * self.num_devices)

    def gain_over(self, other: Timeline) -> float:
        """Relative gain in token throughput over another step; 0.05 is five per cent faster."""
        return self.throughput / other.throughput - 1

    def to_frame(self) -> pd.DataFrame:
        """One line a device and row: shard, device, dp_slot, ep_rank, row, start, attention_busy, attention_end,
        expert_busy, end.

        A device computes from ``start`` for ``attention_busy`` seconds, waits until
        ``attention_end``, computes for ``expert_busy`` seconds and waits until ``end``.
        """
        import pandas as pd

        shape = (self.num_rows, self.num_shards, self.num_devices)
        row, shard, device = (axis.ravel() for axis in np.indices(shape))

        def spread(values: FloatArray) -> FloatArray:
            flat: FloatArray = np.broadcast_to(values[:, :, None], shape).ravel()
            return flat

        frame = pd.DataFrame(
            {
                "shard": shard,
                "device": device,
                "dp_slot": self.slot_of_device[device],
                "ep_rank": self.rank_of_device[device],
                "row": row,
                "start": spread(self.start),
                "attention_busy": self.attention_busy.ravel(),
                "attention_end": spread(self.attention_end),
                "expert_busy": self.expert_busy.ravel(),
                "end": spread(self.end),
            }
        )
        ordered: pd.DataFrame = frame.sort_values(["shard", "device", "row"], ignore_index=True)
        return ordered

    def __repr__(self) -> str:
        approximation = ", pipeline approximation" if self.approximate else ""
        return (
            f"Timeline({self.step_time:.4g} s, {self.throughput:,.0f} tokens/s, R {self.num_rows}, "
            f"G {self.num_shards}, busy {self.busy_share:.1%}{approximation})"
        )


def simulate(
    problem: Problem, plan: Plan, trainer: Trainer | None = None, *, noise: float = 0.0, seed: int = 0
) -> Timeline:
    """Run one optimizer step of a plan on a modelled trainer.

    Parameters
    ----------
    problem : Problem
    plan : Plan
        Feasible.
    trainer : Trainer, optional
        Default: one second a unit of J, no fixed time.
    noise : float
        Standard deviation of the log of each block's duration; factors are
        log-normal with mean 1, drawn row by row. 0: none.
    seed : int
        Of the noise; the same seed gives two plans the same factors.

    Returns
    -------
    Timeline

    Raises
    ------
    InvalidInputError
        If the plan is infeasible or a parameter is out of range.
    """
    trainer = Trainer() if trainer is None else trainer
    faults = Faults()
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < math.inf:
        faults.add(f"noise is {noise!r}; it must be finite and at least 0")
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        faults.add(f"seed is {seed!r}; it must be an integer of at least 0")
    faults.extend(violations(problem, plan))
    faults.raise_if_any("simulation")
    detail = breakdown(problem, plan)
    num_rows, num_shards = problem.num_rows, problem.num_shards
    shard_size, ep_size = problem.cluster.shard_size, problem.ep_size
    num_devices = math.lcm(shard_size, ep_size)
    slot_of_device = np.arange(num_devices) * shard_size // num_devices
    rank_of_device = np.arange(num_devices) * ep_size // num_devices
    scale = trainer.seconds_per_unit / problem.unit_denominator / trainer.pipeline_stages
    factor = np.full((num_rows, num_shards), scale)
    if noise:
        draws = np.random.default_rng(seed).standard_normal((num_rows, num_shards))
        factor = factor * np.exp(noise * draws - noise * noise / 2)
    attention = detail.attention * factor
    duration = detail.block * factor
    # [R, D] -> [R, G, slots of the shard] -> devices
    by_slot = detail.cell_work.sum(axis=0)
    by_shard = np.stack([by_slot[:, list(shard)] for shard in problem.shards], axis=1)
    attention_busy = by_shard[:, :, slot_of_device] * factor[:, :, None]
    by_rank = detail.rank_load.sum(axis=2, dtype=np.int64) * problem.expert_unit
    expert_busy = by_rank[:, :, rank_of_device] * factor[:, :, None]
    if trainer.synchronization == "row":
        lockstep = duration.max(axis=1)
        start = np.repeat((np.cumsum(lockstep) - lockstep)[:, None], num_shards, axis=1)
        longest = np.full(num_shards, lockstep.max())
        shard_time = np.full(num_shards, lockstep.sum())
    else:
        start = np.cumsum(duration, axis=0) - duration
        longest = duration.max(axis=0)
        shard_time = duration.sum(axis=0)
    bubble = (trainer.pipeline_stages - 1) * longest
    return Timeline(
        step_time=float((shard_time + bubble).max()) + trainer.fixed_seconds,
        tokens=problem.batch.num_tokens,
        start=read_only(start),
        attention_end=read_only(start + attention),
        end=read_only(start + duration),
        attention_busy=read_only(attention_busy),
        expert_busy=read_only(expert_busy),
        bubble=read_only(bubble),
        fixed_seconds=trainer.fixed_seconds,
        slot_of_device=read_only(slot_of_device),
        rank_of_device=read_only(rank_of_device),
        approximate=trainer.pipeline_stages > 1,
    )


# --- admission ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One task of an admission schedule.

    Attributes
    ----------
    name : str
    start, end : float
        Earliest times, seconds.
    slack : float
        Seconds the task can be late without delaying the end.
    """

    name: str
    start: float
    end: float
    slack: float


@dataclass(frozen=True)
class Schedule:
    """An admission schedule worked out.

    Attributes
    ----------
    total : float
        Seconds until the planned step is admitted, T_target.
    tasks : tuple of Task
        In topological order.
    critical_path : tuple of str
        One longest chain of tasks, from the first to the last.
    exposed : float
        Seconds by which planning delays admission, against the same schedule with
        planning that takes no time.
    """

    total: float
    tasks: tuple[Task, ...]
    critical_path: tuple[str, ...]
    exposed: float

    def task(self, name: str) -> Task:
        """One task by name.

        Raises
        ------
        InvalidInputError
            If the schedule has no such task.
        """
        faults = refuse_unknown([name], [task.name for task in self.tasks], "task")
        if faults:
            raise InvalidInputError(faults, context="schedule")
        return next(task for task in self.tasks if task.name == name)

    def to_frame(self) -> pd.DataFrame:
        """One line a task: task, start, end, slack, critical."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "task": task.name,
                    "start": task.start,
                    "end": task.end,
                    "slack": task.slack,
                    "critical": task.name in self.critical_path,
                }
                for task in self.tasks
            ]
        )


class _Stages:
    """What both schedules share; durations are the dataclass fields, the graph is the subclass's."""

    _edges: Sequence[tuple[str, str]]
    _planning: Sequence[str]

    def _durations(self) -> dict[str, float]:
        return {stage.name: float(getattr(self, stage.name)) for stage in fields(self)}  # type: ignore[arg-type]

    def _check(self) -> None:
        faults = Faults()
        for name in (stage.name for stage in fields(self)):  # type: ignore[arg-type]
            _seconds(faults, name, getattr(self, name))
        faults.raise_if_any("admission schedule")

    def graph(self) -> nx.DiGraph[str]:
        """The task graph: nodes with ``seconds``, edges from what must end before."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        for name, seconds in self._durations().items():
            graph.add_node(name, seconds=seconds)
        graph.add_edges_from(self._edges)
        return graph

    def schedule(self) -> Schedule:
        """Earliest times, slack and critical path."""
        durations = self._durations()
        free = dict.fromkeys(self._planning, 0.0)
        unplanned, _, _ = _earliest(self.graph(), durations | free)
        total, tasks, path = _earliest(self.graph(), durations)
        return Schedule(total, tasks, path, total - unplanned)


def _earliest(graph: nx.DiGraph[str], seconds: Mapping[str, float]) -> tuple[float, tuple[Task, ...], tuple[str, ...]]:
    import networkx as nx

    order = list(nx.lexicographical_topological_sort(graph))
    start: dict[str, float] = {}
    end: dict[str, float] = {}
    for name in order:
        start[name] = max((end[before] for before in graph.predecessors(name)), default=0.0)
        end[name] = start[name] + seconds[name]
    total = max(end.values())
    tail: dict[str, float] = {}
    for name in reversed(order):
        tail[name] = seconds[name] + max((tail[after] for after in graph.successors(name)), default=0.0)
    # A task late by what separates the longest chain through it from the longest chain delays nothing.
    tasks = tuple(Task(name, start[name], end[name], max(0.0, total - start[name] - tail[name])) for name in order)
    path = [min((name for name in order if end[name] == total), key=order.index)]
    while True:
        before = list(graph.predecessors(path[-1]))
        if not before:
            break
        path.append(max(sorted(before), key=lambda name: end[name]))
    return total, tasks, tuple(reversed(path))


@dataclass(frozen=True)
class Stages(_Stages):
    """Admission of a step planned hierarchically (place, then pack): the paper's schedule.

    Placement and auxiliary work (reference and old-policy passes) start together.
    The actor's expert state can move once both are done, for it needs only the
    placement; packing runs beside it. Admission waits for the packing and the actor:

        T_target = max{T_LPT + T_pack, max(T_LPT, T_aux) + T_actor} + T_admit

    Attributes
    ----------
    placement : float
        T_LPT, seconds of expert placement.
    packing : float
        T_pack, seconds of data packing.
    auxiliary : float
        T_aux, seconds of work that needs no plan.
    actor : float
        T_actor, seconds to bring the actor into the planned layout.
    admission : float
        T_admit, seconds to hand the packed batch over.
    """

    placement: float
    packing: float
    auxiliary: float
    actor: float
    admission: float

    _edges = (
        ("placement", "packing"),
        ("placement", "actor"),
        ("auxiliary", "actor"),
        ("packing", "admission"),
        ("actor", "admission"),
    )
    _planning = ("placement", "packing")

    def __post_init__(self) -> None:
        self._check()

    @classmethod
    def from_measured(cls, stages: Mapping[str, float], *, auxiliary: float, actor: float, admission: float) -> Stages:
        """From the measured stages of a run, such as ``result.trace.stages`` of a ``placer+packer``.

        Raises
        ------
        InvalidInputError
            If ``placement`` or ``packing`` was not measured: the planner is a joint one.
        """
        missing = [name for name in ("placement", "packing") if name not in stages]
        if missing:
            raise InvalidInputError(
                f"no {' and no '.join(missing)} among the measured stages ({', '.join(sorted(stages)) or 'none'}); "
                "a joint planner has JointStages",
                context="admission schedule",
            )
        return cls(
            placement=stages["placement"],
            packing=stages["packing"],
            auxiliary=auxiliary,
            actor=actor,
            admission=admission,
        )

    @property
    def target(self) -> float:
        """T_target by the closed form, seconds."""
        return max(self.placement + self.packing, max(self.placement, self.auxiliary) + self.actor) + self.admission

    @property
    def slack(self) -> float:
        """max(T_LPT, T_aux) + T_actor − T_LPT − T_pack: what packing may take longer; negative if it is exposed."""
        return max(self.placement, self.auxiliary) + self.actor - self.placement - self.packing

    @property
    def packing_hidden(self) -> bool:
        """The sufficient condition T_LPT + T_pack ≤ max(T_LPT, T_aux) + T_actor."""
        return self.placement + self.packing <= max(self.placement, self.auxiliary) + self.actor

    @property
    def packing_budget(self) -> float:
        """Longest T_pack, seconds, that delays nothing."""
        return max(self.placement, self.auxiliary) + self.actor - self.placement


@dataclass(frozen=True)
class JointStages(_Stages):
    """Admission of a step planned jointly: the placement is final only when planning ends.

        T = max(T_plan, T_aux) + T_actor + T_admit

    Attributes
    ----------
    planning : float
        T_plan, seconds of joint planning.
    auxiliary, actor, admission : float
        See :class:`Stages`.
    """

    planning: float
    auxiliary: float
    actor: float
    admission: float

    _edges = (("planning", "actor"), ("auxiliary", "actor"), ("actor", "admission"))
    _planning = ("planning",)

    def __post_init__(self) -> None:
        self._check()

    @property
    def target(self) -> float:
        """T by the closed form, seconds."""
        return max(self.planning, self.auxiliary) + self.actor + self.admission

    @property
    def slack(self) -> float:
        """T_aux − T_plan: what planning may take longer; negative if it is exposed."""
        return self.auxiliary - self.planning


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """How an admission schedule answers to one stage.

    Attributes
    ----------
    stage : str
    seconds : ndarray of float64, shape [K]
        Durations tried.
    total, exposed : ndarray of float64, shape [K]
        T_target and the delay by planning.
    slack : ndarray of float64, shape [K]
        What planning may take longer without delaying admission: of the varied stage
        if it is one of planning, else the least of all planning stages. Where
        planning is exposed, −``exposed``.
    """

    stage: str
    seconds: FloatArray
    total: FloatArray
    exposed: FloatArray
    slack: FloatArray


def sensitivity(stages: Stages | JointStages, stage: str, seconds: npt.ArrayLike) -> Sensitivity:
    """Vary one stage of an admission schedule.

    Parameters
    ----------
    stages : Stages or JointStages
    stage : str
        Field to vary, such as ``"packing"``.
    seconds : array-like of float, shape [K]
        Durations to try.

    Returns
    -------
    Sensitivity

    Raises
    ------
    InvalidInputError
        If the stage is unknown or a duration is negative or not finite.
    """
    names = [field.name for field in fields(stages)]
    faults = Faults()
    faults.extend(refuse_unknown([stage], names, "stage"))
    values = np.asarray(seconds, dtype=np.float64)
    if values.ndim != 1:
        faults.add(f"seconds have shape {values.shape}; a list is needed")
    faults.raise_if_any("sensitivity")
    durations = stages._durations()
    varied = [type(stages)(**{**durations, stage: float(value)}) for value in values]
    schedules = [one.schedule() for one in varied]
    watched = [stage] if stage in stages._planning else list(stages._planning)

    def slack(schedule: Schedule) -> float:
        return min(schedule.task(name).slack for name in watched)

    return Sensitivity(
        stage=stage,
        seconds=read_only(values),
        total=read_only(np.array([one.total for one in schedules])),
        exposed=read_only(np.array([one.exposed for one in schedules])),
        slack=read_only(np.array([-one.exposed if one.exposed > 0 else slack(one) for one in schedules])),
    )
