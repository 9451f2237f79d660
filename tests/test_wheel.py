"""What is installed is what is in the repository: the wheel, the source distribution, and an import of each."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "routepack_opt", "solvers")


def build(source: Path, out: Path, *kinds: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__", "*.nbi", "*.nbc", "*.egg-info")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    out = tmp_path_factory.mktemp("dist")
    build(source, out, "--sdist", "--wheel")
    sdist = next(out.glob("*.tar.gz"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    from_sdist = tmp_path_factory.mktemp("from_sdist")
    build(next(unpacked.iterdir()), from_sdist, "--wheel")
    return {"wheel": next(out.glob("*.whl")), "sdist": sdist, "again": next(from_sdist.glob("*.whl"))}


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module_and_data_file_once(distributions: dict[str, Path]) -> None:
    found = contents(distributions["wheel"])
    wanted = {f"routepack_opt/solvers/{path.name}" for path in (ROOT / "solvers").glob("*.py")}
    for path in (ROOT / "routepack_opt").rglob("*"):
        relative = path.relative_to(ROOT / "routepack_opt")
        kept = path.suffix == ".py" or path.name == "py.typed" or relative.parts[0] == "data"
        if path.is_file() and kept and relative.parts[0] != "solvers" and "__pycache__" not in relative.parts:
            wanted.add(f"routepack_opt/{relative.as_posix()}")
    assert found == wanted


def test_wheel_from_sdist_is_the_same_wheel(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as first, zipfile.ZipFile(distributions["again"]) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())
        for name in contents(distributions["wheel"]):
            assert first.read(name) == second.read(name)


def test_the_wheel_works_away_from_the_repository(distributions: dict[str, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import routepack_opt as rp, sys\n"
        "assert rp.__file__.startswith(sys.argv[1]), rp.__file__\n"
        "import routepack_opt.solvers\n"
        "problem = rp.load_trace()\n"
        "print(rp.solve(problem, 'lpt+ffd').status.value)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{code}", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "feasible"
