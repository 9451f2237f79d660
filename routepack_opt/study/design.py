"""The design of a study: a TOML file, checked as a whole before anything runs.

.. code-block:: toml

    schema = "routepack-study/1"
    name = "packing-objective"
    question = "What is each term of the packing objective worth?"
    seeds = 5                             # seeds 0..4, or a list of seeds
    iteration_limit = 200_000             # and/or time_limit = 2.0 (seconds); a list sweeps
    num_threads = 1                       # of one run; default 1
    keep_plans = false                    # store every plan beside its row

    [[problems]]
    family = "flash-p8-low"               # a frozen family of routepack_opt.synthetic
    seed = [1, 2, 3]                      # of the problem; default: the frozen seed
    step = 0

    [[problems]]
    name = "noise"                        # label in tables; default: the source
    family = "flash-p8-low"
    routing = { sample_sd = [0.0, 0.5] }  # fields of RoutingModel / LengthModel

    [[problems]]
    file = "batch.npz"                    # routepack-problem/1, relative to this file
    capacity = [16_384, 32_768]
    extra_rows = [0, 1]

    [[problems]]
    trace = true                          # the recorded trace of the package
    missing_share = [0.0, 0.1]

    [[planners]]
    spec = "contiguous+ffd"

    [[planners]]
    spec = "lpt+annealing"
    name = "annealing"                    # label; default: the spec
    vary = { routing_weight = [0, 1], num_chains = [4, 16] }

Wherever a problem takes a value it takes a list, and lists are crossed. Planners
may also be written as plain strings: ``planners = ["contiguous+ffd", "cpsat"]``.

Problem tables: exactly one source of ``family``, ``synthetic``, ``planted``,
``file``, ``trace``.

================================ ====================================================================
``family``                       a frozen family; ``seed``, ``step``, ``num_samples``, ``group_size``,
                                 ``routing``, ``lengths`` change the draw
``synthetic = true``             :func:`routepack_opt.synthetic.generate` with the same keys;
                                 ``num_samples``, ``capacity`` and ``ep_size`` are then needed
``planted = {…}``                keywords of :func:`routepack_opt.synthetic.planted`, beside ``seed``
``file``                         a problem file
``trace = true``                 the recorded trace
``capacity``, ``ep_size``,       replace what the source has (see
``dp_size``, ``num_shards``,     :meth:`routepack_opt.problem.Problem.replace`)
``length_alignment``,
``min_samples_per_cell``,
``equal_samples_per_slot``
``cost``                         a preset, ``"none"`` (expert work only), or a list of tables
                                 ``{name, alpha, beta}`` with ``"p/q"`` or integers
``extra_rows``                   rows above the fewest found
``knowledge``                    ``"exact"``, or ``"previous_step"``: planned with the expert shares of
                                 the step before, scored on the true routing (generated sources)
``missing_share``                share of samples whose routing the planner does not know
================================ ====================================================================

``vary`` of a planner crosses component parameters; where placer and packer share
a name, write ``"placer.x"`` or ``"packer.x"``. ``time_limit`` and
``iteration_limit`` in a planner table replace those of the study.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from routepack_opt import files, registry, synthetic
from routepack_opt.cost import CostModel, OperatorClass, preset_names
from routepack_opt.errors import Faults, InvalidInputError, refuse_unknown
from routepack_opt.problem import Cluster, Problem, validation_faults
from routepack_opt.recorded import load_trace
from routepack_opt.solver import component_spec
from routepack_opt.study import staleness

__all__ = ["Case", "Design", "Job", "SCHEMA"]

SCHEMA = "routepack-study/1"
SOURCES = ("family", "synthetic", "planted", "file", "trace")
KNOWLEDGE = ("exact", "previous_step")
_REPLACED = ("capacity", "length_alignment", "min_samples_per_cell", "equal_samples_per_slot")
_CLUSTER = ("ep_size", "dp_size", "num_shards")
_DRAWN = ("seed", "step", "num_samples", "group_size", "routing", "lengths")

Number = int | float
IntOrList = int | list[int]
BoolOrList = bool | list[bool]
NumberOrList = int | float | list[int | float]


class _Operator(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    alpha: int | str
    beta: int | str


class _Problem(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str | None = None
    family: str | list[str] | None = None
    synthetic: bool | None = None
    planted: dict[str, Any] | None = None
    file: str | list[str] | None = None
    trace: bool | None = None
    seed: IntOrList | None = None
    step: IntOrList | None = None
    num_samples: IntOrList | None = None
    group_size: IntOrList | None = None
    routing: dict[str, Any] | None = None
    lengths: dict[str, Any] | None = None
    capacity: IntOrList | None = None
    ep_size: IntOrList | None = None
    dp_size: IntOrList | None = None
    num_shards: IntOrList | None = None
    length_alignment: IntOrList | None = None
    min_samples_per_cell: IntOrList | None = None
    equal_samples_per_slot: BoolOrList | None = None
    cost: str | list[str] | list[_Operator] | None = None
    extra_rows: IntOrList | None = None
    knowledge: str | list[str] | None = None
    missing_share: NumberOrList | None = None


class _Planner(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    spec: str
    name: str | None = None
    vary: dict[str, list[Any]] = {}
    time_limit: NumberOrList | None = None
    iteration_limit: IntOrList | None = None


class _Study(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    schema_: str = ""
    name: str
    question: str = ""
    seeds: IntOrList = 1
    time_limit: NumberOrList | None = None
    iteration_limit: IntOrList | None = None
    num_threads: int = 1
    keep_plans: bool = False
    problems: list[_Problem]
    planners: list[str | _Planner]


@dataclass(frozen=True)
class Case:
    """One problem of a study: how to build it, as plain values.

    Attributes
    ----------
    label : str
        Unique within the study.
    recipe : mapping
        Everything that decides the problem; files by the digest of their content.
    path : str
        Of a file source; else empty.
    """

    label: str
    recipe: Mapping[str, Any]
    path: str = ""

    def build(self) -> tuple[Problem, Problem]:
        """Build the problem plans are scored on, and the one the planner sees.

        Returns
        -------
        problem, known : Problem
            The same object unless ``knowledge`` or ``missing_share`` say otherwise.

        Raises
        ------
        InvalidInputError, InfeasibleProblemError
            If the recipe yields no valid problem.
        """
        recipe = dict(self.recipe)
        problem = self._changed(self._source(recipe), recipe)
        known = problem
        if recipe.get("knowledge", "exact") == "previous_step":
            step = int(recipe.get("step", 0))
            before = self._source({**recipe, "step": step - 1})
            known = staleness.from_shares(known, staleness.expert_shares(before))
        if recipe.get("missing_share", 0):
            known = staleness.with_missing(known, share=float(recipe["missing_share"]), seed=int(recipe.get("seed", 0)))
        return problem, known

    def _source(self, recipe: Mapping[str, Any]) -> Problem:
        if "file" in recipe:
            return Problem.load(self.path)
        if "trace" in recipe:
            return load_trace()
        if "planted" in recipe:
            seed = {"seed": recipe["seed"]} if "seed" in recipe else {}
            return synthetic.planted(**recipe["planted"], **seed).problem
        values: dict[str, Any]
        if "family" in recipe:
            values = synthetic.family_parameters(recipe["family"])
        else:
            values = {"seed": 0, "group_size": 8, "routing": {}, "lengths": {}, "num_shards": 1, "cost": None}
        for name in ("seed", "num_samples", "group_size"):
            if name in recipe:
                values[name] = recipe[name]
        values["routing"] = {**values["routing"], **recipe.get("routing", {})}
        values["lengths"] = {**values["lengths"], **recipe.get("lengths", {})}
        if "synthetic" in recipe:
            values |= {name: recipe[name] for name in ("capacity", *_CLUSTER) if name in recipe}
        batch = synthetic.generate(
            synthetic.RoutingModel(**values["routing"]),
            synthetic.LengthModel(**values["lengths"]),
            num_samples=values["num_samples"],
            group_size=values["group_size"],
            seed=values["seed"],
            step=recipe.get("step", 0),
        )
        cluster = Cluster.from_sizes(
            ep_size=values["ep_size"], dp_size=values.get("dp_size"), num_shards=values["num_shards"]
        )
        cost = _cost_model(recipe["cost"]) if "cost" in recipe else values["cost"]
        return Problem.from_batch(batch, capacity=values["capacity"], cluster=cluster, cost=cost)

    def _changed(self, problem: Problem, recipe: Mapping[str, Any]) -> Problem:
        changes: dict[str, Any] = {name: recipe[name] for name in _REPLACED if name in recipe}
        if any(name in recipe for name in _CLUSTER):
            changes["cluster"] = Cluster.from_sizes(
                ep_size=recipe.get("ep_size", problem.ep_size),
                dp_size=recipe.get("dp_size", problem.dp_size),
                num_shards=recipe.get("num_shards", problem.num_shards),
            )
        if "cost" in recipe:
            changes["cost"] = _cost_model(recipe["cost"])
        if changes:
            problem = problem.replace(**changes)
        if recipe.get("extra_rows", 0):
            problem = problem.replace(num_rows=problem.num_rows + int(recipe["extra_rows"]))
        return problem


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes
    ----------
    case : Case
    planner : str
        Canonical spec.
    label : str
        Of the planner in tables.
    parameters : mapping
        All parameters, defaults included, by ``placer``, ``packer`` or ``planner``.
    seed : int
    time_limit : float or None
    iteration_limit : int or None
    num_threads : int
    """

    case: Case
    planner: str
    label: str
    parameters: Mapping[str, Mapping[str, Any]]
    seed: int
    time_limit: float | None
    iteration_limit: int | None
    num_threads: int

    @property
    def key(self) -> str:
        """Name of the row: a digest of everything that decides the run."""
        text = files.canonical_json(
            {
                "recipe": self.case.recipe,
                "planner": self.planner,
                "parameters": self.parameters,
                "seed": self.seed,
                "time_limit": self.time_limit,
                "iteration_limit": self.iteration_limit,
                "num_threads": self.num_threads,
            }
        )
        return hashlib.sha256(text.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class Design:
    """A checked design.

    Attributes
    ----------
    name, question : str
    cases : tuple of Case
    jobs : tuple of Job
        In the order of the file: problems, planners, limits, seeds.
    keep_plans : bool
    digest : str
        Of the file's text.
    """

    name: str
    question: str
    cases: tuple[Case, ...]
    jobs: tuple[Job, ...]
    keep_plans: bool
    digest: str

    @classmethod
    def load(cls, path: files.PathLike) -> Design:
        """Read and check a design.

        Parameters
        ----------
        path : path-like
            A TOML file.

        Raises
        ------
        InvalidInputError
            With every fault of the file: unknown keys, planners, parameters and
            families with the nearest known name, values out of range, planners
            that cannot run on this installation.
        """
        context = f"study {path}"
        try:
            raw = Path(path).read_bytes()
            document = tomllib.loads(raw.decode("utf-8"))
        except OSError as error:
            raise InvalidInputError(f"cannot be read: {error.strerror or error}", context=context) from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"no TOML: {error}", context=context) from error
        faults = Faults()
        study = _validated(document, faults, context)
        cases = _cases(study.problems, Path(path).parent, faults)
        jobs = _jobs(study, cases, faults)
        faults.raise_if_any(context)
        keys = [job.key for job in jobs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            twins = [job for job in jobs if job.key == key]
            faults.add(f"{twins[0].case.label}, {twins[0].planner}, seed {twins[0].seed} stands {len(twins)} times")
        faults.raise_if_any(context)
        return cls(study.name, study.question, cases, jobs, study.keep_plans, hashlib.sha256(raw).hexdigest())


# ------------------------------------------------------------------------------------------------- checking


def _validated(document: dict[str, Any], faults: Faults, context: str) -> _Study:
    if document.get("schema") != SCHEMA:
        raise InvalidInputError(f"schema is {document.get('schema')!r}; this reads {SCHEMA!r}", context=context)
    document = {key: value for key, value in document.items() if key != "schema"}
    known = [name for name in _Study.model_fields if name != "schema_"]
    unknown = refuse_unknown(sorted(set(document) - set(known)), known, "key")
    for section, model in (("problems", _Problem), ("planners", _Planner)):
        entries = document.get(section, [])
        for k, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                extra = sorted(set(entry) - set(model.model_fields))
                unknown += [
                    f"{section}[{k}]: {fault}" for fault in refuse_unknown(extra, list(model.model_fields), "key")
                ]
    faults.extend(unknown)
    try:
        study = _Study.model_validate(document)
    except ValidationError as error:
        faults.extend(
            [fault for fault in validation_faults(error, "study") if "extra inputs are not permitted" not in fault]
        )
        faults.raise_if_any(context)
        raise
    faults.raise_if_any(context)
    if not study.name.strip():
        faults.add("name is empty")
    if not study.problems:
        faults.add("problems is empty")
    if not study.planners:
        faults.add("planners is empty")
    if study.num_threads < 1:
        faults.add(f"num_threads is {study.num_threads}; it must be at least 1")
    return study


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _crossed(values: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Every combination of listed values (nested tables too), and the names that vary, dotted."""
    flat: dict[str, list[Any]] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": _listed(item) for inner, item in value.items()}
        else:
            flat[name] = _listed(value)
    varied = [name for name, options in flat.items() if len(options) > 1]
    for combination in itertools.product(*flat.values()):
        out: dict[str, Any] = {}
        for name, value in zip(flat, combination, strict=True):
            outer, _, inner = name.partition(".")
            if inner:
                out.setdefault(outer, {})[inner] = value
            else:
                out[outer] = value
        yield out, varied


def _cases(problems: Sequence[_Problem], folder: Path, faults: Faults) -> tuple[Case, ...]:
    cases: list[Case] = []
    for k, problem in enumerate(problems):
        where = f"problems[{k}]"
        given = problem.model_dump(exclude_none=True)
        name = given.pop("name", None)
        sources = [source for source in SOURCES if source in given]
        if len(sources) != 1:
            faults.add(
                f"{where} has {' and '.join(sources) or 'no source'}; exactly one of {', '.join(SOURCES)} is needed"
            )
            continue
        source = sources[0]
        before = bool(faults)
        _check_problem(given, source, where, faults)
        if not before and faults:
            continue
        cost = given.pop("cost", None)
        costs: list[Any] = [None]
        if cost is not None:
            costs = cost if isinstance(cost, list) and all(isinstance(item, str) for item in cost) else [cost]
        for one in costs:
            for recipe, varied in _crossed(given):
                if one is not None:
                    recipe["cost"] = one
                shown = [*varied, *(["cost"] if len(costs) > 1 else [])]
                cases += _case(recipe, shown, name, source, folder, where, faults)
    labels = [case.label for case in cases]
    for label in sorted({label for label in labels if labels.count(label) > 1}):
        faults.add(f"the problem label {label!r} stands {labels.count(label)} times; give names")
    return tuple(cases)


def _case(
    recipe: dict[str, Any],
    varied: Sequence[str],
    name: str | None,
    source: str,
    folder: Path,
    where: str,
    faults: Faults,
) -> list[Case]:
    path = ""
    label = name
    if source == "file":
        file = folder / recipe["file"]
        label = label or Path(recipe["file"]).stem
        if not file.is_file():
            faults.add(f"{where}: the file {recipe['file']} does not exist")
            return []
        path = str(file.resolve())
        recipe["file"] = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    label = label or (recipe["family"] if source == "family" else source)
    for dotted in varied:
        outer, _, inner = dotted.partition(".")
        if dotted != source:
            value = recipe[outer][inner] if inner else recipe[outer]
            label += f", {(inner or outer).replace('_', ' ')} {value}"
        elif name is not None:
            label += f", {Path(recipe['file']).stem if source == 'file' else recipe[outer]}"
    return [Case(label, recipe, path)]


def _check_problem(given: Mapping[str, Any], source: str, where: str, faults: Faults) -> None:
    drawn = source in ("family", "synthetic")
    if source in ("synthetic", "trace") and given[source] is not True:
        faults.add(f"{where}: {source} is {given[source]!r}; write true or leave it out")
    allowed = _DRAWN if drawn else ("seed",) if source == "planted" else ()
    for name in _DRAWN:
        if name in given and name not in allowed and not (name == "seed" and "missing_share" in given):
            faults.add(f"{where}: {name} changes nothing for the source {source}; leave it out")
    if source == "family":
        for unknown in refuse_unknown(_listed(given["family"]), list(synthetic.families()), "family"):
            faults.add(f"{where}: {unknown}")
    if source == "synthetic":
        for name in ("num_samples", "capacity", "ep_size"):
            if name not in given:
                faults.add(f"{where}: {name} is needed for the source synthetic")
    for name, model in (("routing", synthetic.RoutingModel), ("lengths", synthetic.LengthModel)):
        known = [field.name for field in dataclasses.fields(model)]
        for unknown in refuse_unknown(list(given.get(name, {})), known, f"field of {name}"):
            faults.add(f"{where}: {unknown}")
    if source == "planted":
        known = [name for name in _keywords(synthetic.planted) if name != "seed"]
        for unknown in refuse_unknown(list(given["planted"]), known, "keyword of planted"):
            faults.add(f"{where}: {unknown}")
    for value in _listed(given.get("knowledge", [])):
        for unknown in refuse_unknown([value], KNOWLEDGE, "knowledge"):
            faults.add(f"{where}: {unknown}")
        if value == "previous_step" and not drawn:
            faults.add(f"{where}: knowledge = 'previous_step' needs a generated source, not {source}")
        if value == "previous_step" and any(step < 1 for step in _listed(given.get("step", 0))):
            faults.add(f"{where}: knowledge = 'previous_step' needs step of at least 1")
    for value in _listed(given.get("missing_share", [])):
        if not 0 <= value < 1:
            faults.add(f"{where}: missing_share is {value}; it must be at least 0 and below 1")
    for name, least in (("extra_rows", 0), ("seed", 0), ("step", 0)):
        for value in _listed(given.get(name, [])):
            if value < least:
                faults.add(f"{where}: {name} is {value}; it must be at least {least}")
    cost = given.get("cost", [])
    for value in _listed(cost):
        if isinstance(value, str):
            for unknown in refuse_unknown([value], ["none", *preset_names()], "cost preset"):
                faults.add(f"{where}: {unknown}")
    if isinstance(cost, list) and cost and not isinstance(cost[0], str):
        try:
            _cost_model(cost)
        except (InvalidInputError, ValueError, ZeroDivisionError) as error:
            faults.add(f"{where}: cost: {error}")


def _keywords(function: Any) -> list[str]:
    code = function.__code__
    return list(code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount])


def _cost_model(cost: Any) -> CostModel | str:
    if cost == "none":
        return CostModel()
    if isinstance(cost, str):
        return cost
    return CostModel(
        tuple(OperatorClass(entry["name"], Fraction(entry["alpha"]), Fraction(entry["beta"])) for entry in cost)
    )


# ------------------------------------------------------------------------------------------------- planners


def _jobs(study: _Study, cases: Sequence[Case], faults: Faults) -> tuple[Job, ...]:
    seeds = list(range(study.seeds)) if isinstance(study.seeds, int) else study.seeds
    if not seeds:
        faults.add(f"seeds is {study.seeds!r}; it must be a count of at least 1 or a list of seeds")
    for seed in seeds:
        if seed < 0:
            faults.add(f"seeds holds {seed}; seeds are at least 0")
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated:
        faults.add(f"seeds holds {', '.join(map(str, repeated))} more than once")
    variants: list[tuple[str, str, dict[str, dict[str, Any]], list[tuple[float | None, int | None]]]] = []
    for k, entry in enumerate(study.planners):
        where = f"planners[{k}]"
        planner = _Planner(spec=entry) if isinstance(entry, str) else entry
        limits = _limits(study, planner, where, faults)
        for spec, label, parameters in _variants(planner, where, faults):
            variants.append((spec, label, parameters, limits))
    labels = [(spec, label) for spec, label, _, _ in variants]
    for label in sorted({label for _, label in labels}):
        specs = {spec for spec, other in labels if other == label}
        if len(specs) > 1:
            faults.add(f"the planner label {label!r} names {len(specs)} planners: {', '.join(sorted(specs))}")
    return tuple(
        Job(case, spec, label, parameters, seed, time_limit, iteration_limit, study.num_threads)
        for case in cases
        for spec, label, parameters, limits in variants
        for time_limit, iteration_limit in limits
        for seed in seeds
    )


def _limits(study: _Study, planner: _Planner, where: str, faults: Faults) -> list[tuple[float | None, int | None]]:
    own = planner.time_limit is not None or planner.iteration_limit is not None
    times = planner.time_limit if own else study.time_limit
    iterations = planner.iteration_limit if own else study.iteration_limit
    if times is None and iterations is None:
        faults.add(f"{where}: neither time_limit nor iteration_limit is given, here or for the study")
        return []
    for value in [] if times is None else _listed(times):
        if isinstance(value, bool) or not 0 < value < float("inf"):
            faults.add(f"{where}: time_limit is {value}; it must be seconds above 0")
    for value in [] if iterations is None else _listed(iterations):
        if value < 1:
            faults.add(f"{where}: iteration_limit is {value}; it must be at least 1")
    return [
        (None if time is None else float(time), iteration)
        for time in _listed(times)
        for iteration in _listed(iterations)
    ]


def _variants(planner: _Planner, where: str, faults: Faults) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    try:
        built = registry.parse(planner.spec)
    except InvalidInputError as error:
        faults.extend([f"{where}: {fault}" for fault in error.faults])
        return []
    parts = built if isinstance(built, tuple) else (built,)
    roles = ("placer", "packer") if isinstance(built, tuple) else ("planner",)
    targets: dict[str, tuple[int, str]] = {}
    for name, options in planner.vary.items():
        role, dot, field = name.rpartition(".")
        owners = [k for k, part in enumerate(parts) if field in _fields(part) and (not dot or roles[k] == role)]
        if not options:
            faults.add(f"{where}: vary.{name} lists no value")
        if len(owners) > 1:
            faults.add(
                f"{where}: {field!r} is a parameter of placer and packer; write 'placer.{field}' or 'packer.{field}'"
            )
        elif not owners:
            known = [f"{roles[k]}.{own}" if dot else own for k, part in enumerate(parts) for own in _fields(part)]
            faults.extend(
                [f"{where}: {fault}" for fault in refuse_unknown([name], known, f"parameter of {planner.spec}")]
            )
        else:
            targets[name] = (owners[0], field)
    if len(targets) < len(planner.vary):
        return []
    found = []
    for combination in itertools.product(*planner.vary.values()):
        changed = list(parts)
        try:
            for name, value in zip(planner.vary, combination, strict=True):
                k, field = targets[name]
                changed[k] = dataclasses.replace(changed[k], **{field: value})
            spec = "+".join(component_spec(part) for part in changed)
            rebuilt = registry.parse(spec)
        except (InvalidInputError, TypeError, ValueError) as error:
            faults.add(
                f"{where}: {', '.join(f'{n} = {v!r}' for n, v in zip(planner.vary, combination, strict=True))}: {error}"
            )
            continue
        spec = registry.canonical(rebuilt)
        for part in changed:
            reason = part.available() if hasattr(part, "available") else None
            if reason:
                faults.add(f"{where}: {component_spec(part)} cannot run here: {reason}")
        label = spec if planner.name is None else planner.name
        if planner.name is not None:
            varied = [
                f"{name.rpartition('.')[2].replace('_', ' ')} {value}"
                for name, value in zip(planner.vary, combination, strict=True)
                if len(planner.vary[name]) > 1
            ]
            label = ", ".join([planner.name, *varied])
        parameters = {role: _values(part) for role, part in zip(roles, changed, strict=True)}
        found.append((spec, label, parameters))
    return found


def _fields(part: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(part) if field.init] if dataclasses.is_dataclass(part) else []


def _values(part: Any) -> dict[str, Any]:
    return {"name": str(getattr(part, "name", type(part).__name__))} | {
        name: _plain(getattr(part, name)) for name in _fields(part)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) or value is None else repr(value)
