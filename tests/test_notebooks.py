"""Notebooks are stripped, titled, free of logic, and use public names only.

``experiments/run_notebooks.py`` executes them.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import routepack_opt

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NAMES = ["01_quickstart", "02_backends_and_bounds", "03_ablation", "04_score_what_you_run", "05_paper_tables"]
#: Statements that would be logic; comprehensions for a table are not.
LOGIC = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.If, ast.Try, ast.With,
    ast.Assert,
)  # fmt: skip
OUTSIDE = {"numpy", "pandas", "matplotlib"}


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def code(path: Path) -> list[ast.Module]:
    """Code cells without their IPython magics."""
    cells = []
    for cell in content(path)["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            cells.append(ast.parse("\n".join(line for line in lines if not line.startswith("%"))))
    return cells


def public(module: types.ModuleType, name: str) -> bool:
    return name in module.__all__


def dotted(node: ast.Attribute) -> list[str]:
    parts = [node.attr]
    value: ast.expr = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return [value.id, *reversed(parts)] if isinstance(value, ast.Name) else []


def test_the_five_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stripped_and_titled(path: Path) -> None:
    notebook = content(path)
    first = notebook["cells"][0]
    assert first["cell_type"] == "markdown"
    assert "".join(first["source"]).startswith("# ")
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_logic(path: Path) -> None:
    for cell in code(path):
        for node in ast.walk(cell):
            assert not isinstance(node, LOGIC), f"line {getattr(node, 'lineno', '?')}: {type(node).__name__}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_public_names(path: Path) -> None:
    used = []
    for cell in code(path):
        for node in ast.walk(cell):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.split(".")[0]
                    assert alias.name == "routepack_opt" or top in OUTSIDE or top in sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                assert node.module is not None
                top = node.module.split(".")[0]
                if top == "routepack_opt":
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        assert not alias.name.startswith("_")
                        assert getattr(module, alias.name, None) or importlib.import_module(
                            f"{node.module}.{alias.name}"
                        )
                else:
                    assert top in OUTSIDE or top in sys.stdlib_module_names
            elif isinstance(node, ast.Attribute) and (names := dotted(node))[:1] == ["rp"]:
                used.append(names[1])
                assert public(routepack_opt, names[1]), ".".join(names)
                target = getattr(routepack_opt, names[1])
                if isinstance(target, types.ModuleType) and len(names) > 2:
                    assert public(target, names[2]), ".".join(names)
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")
    assert used, "the notebook does not use the package"
