from __future__ import annotations

from typing import Any

import pytest

from routepack_opt import registry
from routepack_opt.errors import InvalidInputError
from routepack_opt.solver import Packer, Placer, Planner, component_spec


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("a+b", ["a", "b"]),
        ("a(x=1+2)+b", ["a(x=1+2)", "b"]),
        ("a(x='+')+b(y=[1, 2])", ["a(x='+')", "b(y=[1, 2])"]),
        ("a", ["a"]),
    ],
)
def test_splits_at_top_level_plus(spec: str, parts: list[str]) -> None:
    assert registry.split(spec) == parts


@pytest.mark.parametrize(
    "spec",
    [
        "contiguous+ffd",
        "lpt+annealing",
        "lpt+length_annealing",
        "lpt(refine=False)+annealing(num_chains=8)",
        "cpsat+cpsat",
        "cpsat",
        "milp",
        "alternating",
        "bldm+columns",
        "eplb_balanced+karmarkar_karp",
    ],
)
def test_canonical_text_is_a_fixed_point(spec: str) -> None:
    canonical = registry.canonical(registry.parse(spec))
    assert registry.canonical(registry.parse(canonical)) == canonical


def test_defaults_are_left_out_and_aliases_come_back() -> None:
    assert registry.canonical(registry.parse("lpt(refine=True) + annealing()")) == "lpt+annealing"
    assert registry.canonical(registry.parse("lpt+annealing(routing_weight=0)")) == "lpt+length_annealing"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("lpt+anealing", "did you mean 'annealing'"),
        ("lptt+anealing", "2 faults"),
        ("lpt+annealing(num_chain=8)", "did you mean 'num_chains'"),
        ("lpt(8)+ffd", "given by name"),
        ("lpt+annealing(num_chains=eight)", "no Python literal"),
        ("lpt+annealing(num_chains=8, num_chains=9)", "SyntaxError|stands twice|no planner component"),
        ("lpt+annealing(**x)", "not part of the grammar"),
        ("lpt", "is a placer, not a joint planner"),
        ("annealing", "is a packer, not a joint planner"),
        ("ffd+lpt", "2 faults"),
        ("a+b+c", "has 3 parts"),
        ("", "is empty"),
        ("lpt+length_annealing(routing_weight=1)", "the alias already sets routing_weight"),
        ("lpt+annealing(", "no planner component"),
        ("contiguous(x=1)+ffd", "parameter"),
        ("lpt.refine+ffd", "no planner component"),
    ],
)
def test_bad_specs_are_named(spec: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        registry.parse(spec)


@pytest.mark.parametrize("name", registry.names())
def test_every_component_builds_with_defaults_and_is_described(name: str) -> None:
    built = registry.component(name)
    assert isinstance(built, Placer | Packer | Planner)
    assert component_spec(built) == registry.component(component_spec(built)).spec
    with pytest.raises(InvalidInputError):
        registry.component(f"{name}(no_such_parameter=1)")


def test_table_of_planners() -> None:
    rows = {row.name: row for row in registry.planners()}
    assert set(rows) == set(registry.names())
    assert rows["lpt"].roles == ("placer",)
    assert rows["annealing"].roles == ("packer",)
    assert set(rows["cpsat"].roles) == {"placer", "packer", "planner"}
    for row in rows.values():
        assert row.roles, row
        assert row.summary, row
        assert row.unavailable is None, row


def test_entry_points_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from routepack_opt.solvers.lpt import Contiguous

    class Point:
        name = "theirs"

        def load(self) -> Any:
            return Contiguous

    registry._entry_points.cache_clear()
    registry._class.cache_clear()
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: [Point()] if "routepack" in group else [])
    try:
        assert "theirs" in registry.names()
        assert isinstance(registry.component("theirs"), Contiguous)
    finally:
        registry._entry_points.cache_clear()
        registry._class.cache_clear()
