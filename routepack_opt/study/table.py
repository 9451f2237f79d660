"""Rows of a study as a table: pandas, Markdown, LaTeX (booktabs), CSV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routepack_opt import files
from routepack_opt.errors import InvalidInputError, refuse_unknown

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "MEASURED",
    "RESULTS_SCHEMA",
    "StudyTable",
    "latex",
    "load",
    "markdown",
    "open_folder",
    "row_path",
    "written",
]

RESULTS_SCHEMA = "routepack-study-results/1"
#: Columns that differ from run to run of one job: clocks and places.
MEASURED = ("started", "runtime", "seconds", "stages", "machine", "history")
_UNITS = re.compile(r"_units$|^unit_denominator$")


def row_path(folder: Path, key: str) -> Path:
    """File of one row."""
    return folder / "rows" / f"{key}.json"


def open_folder(folder: Path, *, name: str, question: str = "") -> None:
    """Create a results folder, or check that an existing one is this study's.

    Raises
    ------
    InvalidInputError
        If the folder holds other files, results of another schema version or
        another study. Nothing is changed then.
    """
    manifest = folder / "study.json"
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(f"{folder} is a file; name a folder", context="study results")
    if manifest.is_file():
        _check_manifest(folder, name)
    elif folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise InvalidInputError(
            f"{folder} is not empty and holds no study; nothing in it is overwritten: name another folder",
            context="study results",
        )
    for part in (folder, folder / "rows", folder / "history", folder / "plans"):
        part.mkdir(parents=True, exist_ok=True)
    if not manifest.is_file():
        files.write_json(manifest, {"schema": RESULTS_SCHEMA, "name": name, "question": question}, indent=1)


def _check_manifest(folder: Path, name: str | None) -> dict[str, Any]:
    manifest = files.read_json(folder / "study.json", what="study results")
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema != RESULTS_SCHEMA:
        raise InvalidInputError(
            f"{folder} holds results of schema {schema!r}, this version writes {RESULTS_SCHEMA!r}; nothing in it is "
            "overwritten: name another folder, or move it away",
            context="study results",
        )
    if name is not None and manifest.get("name") != name:
        raise InvalidInputError(
            f"{folder} holds the study {manifest.get('name')!r}, not {name!r}; name another folder",
            context="study results",
        )
    found: dict[str, Any] = manifest
    return found


def load(folder: files.PathLike) -> StudyTable:
    """Read every row of a results folder, ordered by problem, planner, limits and seed.

    Raises
    ------
    InvalidInputError
        If the folder holds no study or one of another schema version, or a row is damaged.
    """
    root = Path(folder)
    if not (root / "study.json").is_file():
        raise InvalidInputError(f"{root} holds no study results (study.json is missing)", context="study results")
    manifest = _check_manifest(root, None)
    # Names with a leading dot are rows that a killed writer never finished; they are not rows.
    rows = [files.read_json(path, what="row") for path in sorted((root / "rows").glob("[!.]*.json"))]

    def order(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return (row["problem"], row["planner"], row["time_limit"] or 0, row["iteration_limit"] or 0, row["seed"])

    return StudyTable(str(manifest["name"]), str(manifest.get("question", "")), root, tuple(sorted(rows, key=order)))


@dataclass(frozen=True, repr=False)
class StudyTable:
    """Rows of a study.

    Attributes
    ----------
    name, question : str
    folder : Path
        Where the rows and histories are.
    rows : tuple of mapping
        One a run, as stored.
    """

    name: str
    question: str
    folder: Path
    rows: tuple[Mapping[str, Any], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    @property
    def failed(self) -> list[Mapping[str, Any]]:
        """Rows of runs that raised or whose worker was lost."""
        return [row for row in self.rows if row["status"] in ("error", "lost")]

    def history(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Incumbents and bounds over time of one row (or of its key).

        Raises
        ------
        InvalidInputError
            If the row has no history (a failed run) or its file is gone.
        """
        reference = row.get("history")
        if not reference:
            raise InvalidInputError(f"row {row.get('key')} has no history (status {row.get('status')})")
        found: dict[str, Any] = files.read_json(self.folder / reference, what="history")
        return found

    def to_frame(self) -> pd.DataFrame:
        """Tidy table, one row a run.

        Nested values become dotted columns: ``problem.<key>`` of the recipe,
        ``placer.<parameter>``, ``packer.<parameter>`` or ``planner.<parameter>``,
        ``stage.<name>`` in seconds, ``version.<package>``, ``machine.<key>``;
        metrics stand under their own names. Levels and ``bound`` are in units of
        J, columns ending in ``_units`` exact integers (``Int64``).
        """
        import pandas as pd

        flat = [_flat(row) for row in self.rows]
        frame = pd.DataFrame(flat)
        for name in frame.columns:
            if _UNITS.search(str(name)):
                # From the rows, not from the frame: a missing value there turns integers into floats.
                frame[name] = pd.array([row.get(name) for row in flat], dtype="Int64")
        return frame

    def summary(self) -> pd.DataFrame:
        """Medians over seeds: one row a problem, planner and limit.

        Columns: runs, failed runs, share proven optimal, shard work (max shard work in
        units of J), gap % to the any-placement bound (median and worst), EP-rank CV % of
        the window and within blocks, wall seconds of a run.
        """
        import pandas as pd

        frame = self.to_frame()
        for name in ("max_shard_work", "gap", "runtime", "global_cv", "row_cv"):
            if name not in frame:
                frame[name] = None
            frame[name] = pd.to_numeric(frame[name])
        frame["failed"] = frame["status"].isin(["error", "lost"])
        frame["optimal"] = frame["status"].eq("optimal")
        keys = ["problem", "label", "time_limit", "iteration_limit"]
        keys = [key for key in keys if key in ("problem", "label") or frame[key].nunique(dropna=False) > 1]
        rows = []
        for values, part in frame.groupby(keys, sort=False, dropna=False):
            solved = part[~part["failed"]]
            row = dict(zip(keys, values, strict=True))
            row |= {
                "runs": len(part),
                "failed": int(part["failed"].sum()),
                "optimal %": 100 * float(solved["optimal"].mean()) if len(solved) else None,
                "shard work": solved["max_shard_work"].median(),
                "gap %": 100 * solved["gap"].median(),
                "worst %": 100 * solved["gap"].max(),
                "CV %": 100 * solved["global_cv"].median(),
                "row CV %": 100 * solved["row_cv"].median(),
                "s": solved["runtime"].median(),
            }
            rows.append(row)
        return pd.DataFrame(rows).rename(columns={"label": "planner"})

    def formatted(self) -> pd.DataFrame:
        """The summary as text, without columns that are all zero failures or proofs."""
        summary = self.summary()
        dull = [name for name in ("failed", "optimal %") if not summary[name].fillna(0).any()]
        return written(summary.drop(columns=dull))

    def to_csv(self, path: files.PathLike) -> None:
        """Write the tidy table as CSV, atomically."""
        files.write_text(path, self.to_frame().to_csv(index=False))

    def to_markdown(self) -> str:
        """The summary as a Markdown table."""
        return markdown(self.summary())

    def to_latex(self, *, caption: str = "", label: str = "") -> str:
        """The summary as a LaTeX table; see :func:`latex`."""
        return latex(self.summary(), caption=caption, label=label)

    def to_dict(self) -> dict[str, Any]:
        """The table as a JSON object."""
        return {
            "name": self.name,
            "question": self.question,
            "folder": str(self.folder),
            "failed": len(self.failed),
            "rows": [dict(row) for row in self.rows],
        }

    def __repr__(self) -> str:
        head = f"{self.name}: {len(self.rows)} rows" + (f", {len(self.failed)} failed" if self.failed else "")
        if self.question:
            head += f"\n{self.question}"
        return head if not self.rows else f"{head}\n{self.formatted().to_string(index=False)}"

    def _repr_html_(self) -> str:
        body = self.formatted().to_html(index=False) if self.rows else ""
        return f"<p>{self.name}: {self.question}</p>{body}"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "recipe":
            for key, item in value.items():
                if isinstance(item, Mapping):
                    flat |= {f"problem.{key}.{inner}": leaf for inner, leaf in item.items()}
                else:
                    flat[f"problem.{key}"] = item
        elif name == "parameters":
            flat |= {f"{role}.{key}": item for role, values in value.items() for key, item in values.items()}
        elif name in ("stages", "versions", "machine"):
            prefix = {"stages": "stage", "versions": "version", "machine": "machine"}[name]
            flat |= {f"{prefix}.{key}": item for key, item in value.items()}
        elif name == "metrics":
            flat |= value or {}
        else:
            flat[name] = value
    return flat


# --------------------------------------------------------------------------------------------------- writing


def _text(value: Any, digits: int) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,.{digits}f}"


def written(frame: pd.DataFrame) -> pd.DataFrame:
    """Every cell as the text a table shows, one number of digits a column; "-" for what is missing."""
    import pandas as pd

    out = {}
    for name in frame.columns:
        values = [None if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in frame[name]]
        plain: list[Any] = [getattr(value, "item", lambda value=value: value)() for value in values]
        numbers = [value for value in plain if isinstance(value, int | float) and not isinstance(value, bool)]
        largest = max(map(abs, numbers), default=0.0)
        whole = all(float(value).is_integer() for value in numbers)
        digits = 0 if whole else 2 if largest >= 100 or str(name).endswith("%") else 3 if largest >= 0.01 else 5
        out[str(name)] = [_text(value, digits) for value in plain]
    return pd.DataFrame(out, index=frame.index)


def _numeric(frame: pd.DataFrame) -> list[bool]:
    import pandas as pd

    return [pd.api.types.is_numeric_dtype(frame[name]) for name in frame.columns]


def markdown(frame: pd.DataFrame) -> str:
    """A table in Markdown, numbers aligned right.

    Raises
    ------
    InvalidInputError
        If the table has no column.
    """
    if not len(frame.columns):
        raise InvalidInputError("the table has no column")
    cells = written(frame)
    lines = [
        "| " + " | ".join(str(name).replace("|", "\\|") for name in cells.columns) + " |",
        "|" + "|".join("---:" if number else "---" for number in _numeric(frame)) + "|",
    ]
    for _, row in cells.iterrows():
        lines.append("| " + " | ".join(str(value).replace("|", "\\|") for value in row) + " |")
    return "\n".join(lines) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": r"$-$", "≤": r"$\leq$", "≥": r"$\geq$",
    "<": r"$<$", ">": r"$>$",
}  # fmt: skip


def _escaped(value: Any) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in str(value))


def latex(frame: pd.DataFrame, *, caption: str = "", label: str = "", bold: Sequence[str] = ()) -> str:
    r"""A table in LaTeX for the ``booktabs`` package.

    Parameters
    ----------
    frame : DataFrame
    caption, label : str
        With either, the tabular stands in a ``table`` environment.
    bold : sequence of str
        Columns whose smallest number is set in bold.

    Raises
    ------
    InvalidInputError
        If the table has no column, or ``bold`` names an unknown one.
    """
    if not len(frame.columns):
        raise InvalidInputError("the table has no column")
    faults = refuse_unknown(list(bold), [str(name) for name in frame.columns], "column")
    if faults:
        raise InvalidInputError(faults, context="LaTeX table")
    cells = written(frame)
    numeric = _numeric(frame)
    best = {name: frame[name].min() for name in bold}
    lines = [
        r"\begin{tabular}{" + "".join("r" if number else "l" for number in numeric) + "}",
        r"\toprule",
        " & ".join(_escaped(name) for name in cells.columns) + r" \\",
        r"\midrule",
    ]
    for k in range(len(cells)):
        shown = []
        for name in cells.columns:
            text = _escaped(cells[name].iloc[k])
            if text.startswith("-") and len(text) > 1:
                text = f"$-${text[1:]}"
            shown.append(rf"\textbf{{{text}}}" if name in best and frame[name].iloc[k] == best[name] else text)
        lines.append(" & ".join(shown) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if caption or label:
        lines = [
            r"\begin{table}",
            r"\centering",
            *([rf"\caption{{{_escaped(caption)}}}"] if caption else []),
            *([rf"\label{{{label}}}"] if label else []),
            *lines,
            r"\end{table}",
        ]
    return "\n".join(lines) + "\n"
