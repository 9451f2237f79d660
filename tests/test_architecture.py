"""The house rules that a reader can check only by walking every file: imports, names, packaging."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "routepack_opt"

#: Modules by layer; a module may import from its own layer's earlier modules and from lower layers.
LAYERS: list[set[str]] = [
    {"errors"},
    {"arrays", "files", "highs", "rings", "splitmix"},
    {"rows", "cost", "batch", "counting"},
    {"problem"},
    {"plan", "recorded"},
    {"score", "bounds", "metrics", "moves", "migration", "materialization", "synthetic", "formats"},
    {"result", "simulation"},
    {"solver"},
    {"solvers"},
    {"registry"},
    {"planning"},
    {"sequence", "testing"},
    {"study", "plot"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: Same-layer imports that are part of the design.
WITHIN_LAYER = {
    ("metrics", "score"),
    ("bounds", "score"),
    ("moves", "score"),
    ("arrays", "files"),
    ("batch", "counting"),
    ("counting", "batch"),
    ("materialization", "migration"),
    ("synthetic", "metrics"),
    ("study", "plot"),
}
#: What may import these packages at all (lazily or not).
CONFINED = {
    "ortools": {"solvers.cpsat", "rows"},
    "pulp": {"solvers.milp", "solvers.columns"},
    "highspy": {"highs", "bounds", "rows", "solvers.milp", "solvers.columns"},
    "torch": {"materialization", "formats.sglang"},
    "ray": {"study"},
    "dask": {"study"},
    "distributed": {"study"},
    "matplotlib": {"plot", "study"},
}
#: Never imported at module level in the library: they cost more than they are worth to who does not use them.
LAZY = {
    "ortools",
    "pulp",
    "highspy",
    "torch",
    "ray",
    "dask",
    "distributed",
    "matplotlib",
    "pandas",
    "networkx",
    "joblib",
}


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "solvers" in path.relative_to(PACKAGE).parts[:1]:
            continue
        found[".".join(path.relative_to(PACKAGE).with_suffix("").parts)] = path
    for path in sorted((ROOT / "solvers").glob("*.py")):
        found[f"solvers.{path.stem}"] = path
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imports(path: Path) -> list[tuple[str, bool]]:
    """Imported dotted names, and whether each import runs when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            inside.update(ast.walk(node))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found += [(f"{node.module}.{alias.name}", node not in inside) for alias in node.names]
    return found


def own(name: str) -> str | None:
    """The module of the package that an imported dotted name belongs to."""
    parts = name.split(".")
    if parts[0] != "routepack_opt" or len(parts) == 1:
        return None
    return parts[1]


@pytest.mark.parametrize("name", [name for name in modules() if name not in ("__init__", "")])
def test_imports_go_one_way(name: str) -> None:
    top = name.split(".")[0]
    assert top in LEVEL, f"{name} has no place in the layers"
    for target, _ in imports(modules()[name]):
        other = own(target)
        if other is None or other == top or other == "__version__":
            continue
        assert other in LEVEL, f"{name} imports {target}, which has no place in the layers"
        allowed = LEVEL[other] < LEVEL[top] or (top, other) in WITHIN_LAYER
        assert allowed, f"{name} imports {target}: against the direction of imports"


@pytest.mark.parametrize("name", sorted(modules()))
def test_heavy_packages_are_confined_and_lazy(name: str) -> None:
    for target, eager in imports(modules()[name]):
        package = target.split(".")[0]
        if package in CONFINED:
            top = name if name.startswith(("solvers.", "formats.")) else name.split(".")[0]
            assert top in CONFINED[package], f"{name} imports {package}"
        assert not (eager and package in LAZY), f"{name} imports {package} when it is imported"


def test_solvers_name_no_registry_planning_or_study() -> None:
    for name, path in modules().items():
        if name.startswith("solvers"):
            for target, _ in imports(path):
                assert own(target) not in {"registry", "planning", "study", "cli", "plot", "sequence", "testing"}, (
                    f"{name} imports {target}"
                )


def test_library_names_solvers_only_as_strings() -> None:
    for name, path in modules().items():
        if not name.startswith("solvers") and name not in ("moves",):
            for target, _ in imports(path):
                assert own(target) != "solvers", f"{name} imports {target}; solvers are named by string"


def test_every_module_has_its_test_and_docstring() -> None:
    for name, path in modules().items():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name} has no docstring"
        parts = name.split(".")
        if name == "" or parts[-1].startswith("__") or name in ("solvers", "formats", "study"):
            continue
        stem = {"solvers": parts[-1], "formats": f"formats_{parts[-1]}", "study": f"study_{parts[-1]}"}.get(
            parts[0], parts[0]
        )
        assert (ROOT / "tests" / f"test_{stem}.py").is_file(), f"{name} has no tests/test_{stem}.py"


def test_no_catch_all_modules() -> None:
    for name in modules():
        assert name.split(".")[-1] not in {"utils", "util", "core", "base", "helpers", "common", "misc"}


def test_package_import_is_light() -> None:
    code = (
        "import sys, routepack_opt\n"
        "heavy = {'numba', 'scipy', 'pandas', 'matplotlib', 'ortools', 'pulp', 'torch', 'networkx', 'pydantic'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    package = importlib.import_module("routepack_opt")
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError):
        _ = package.no_such_name


def test_bare_solvers_import_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import solvers"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ran.returncode != 0
    assert "routepack_opt.solvers" in ran.stderr


def test_declared_packages_are_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = set(project["tool"]["setuptools"]["packages"])
    wanted = {"routepack_opt", "routepack_opt.solvers"} | {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in PACKAGE.rglob("__init__.py")
        if "solvers" not in path.parts
    }
    assert declared == wanted
    assert all(">=" in line for line in project["project"]["dependencies"])
