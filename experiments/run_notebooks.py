"""Execute every notebook of a folder in a fresh kernel; fail at the first cell that raises.

Question: do the notebooks run as they stand?
Command: ``python experiments/run_notebooks.py notebooks``
Expected: one line a notebook with its wall time; exit code 0.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Run the notebooks named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--timeout", type=int, default=300, help="seconds for each cell")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.ipynb"))
    if not paths:
        raise SystemExit(f"no notebook in {options.folder}")
    for path in paths:
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(
            notebook, timeout=options.timeout, resources={"metadata": {"path": str(options.folder)}}
        )
        client.execute()
        print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
