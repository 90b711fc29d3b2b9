"""Notebooks as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from traitlets.config import Config

from kit import kernels


def read(path: Path) -> Any:
    import nbformat  # later than a worker of pytest collects its tests

    return nbformat.read(path, as_version=4)


def write(path: Path, *cells: str) -> None:
    """A notebook for Python with these code cells."""
    path.write_text(json.dumps(document(*cells)), encoding="utf-8")


def document(*cells: str) -> dict[str, Any]:
    empty = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    return {
        "cells": [{**empty, "id": f"cell-{number}", "source": cell} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def validate(document: Any) -> None:
    """Raise what nbformat raises where a document is not what the format says."""
    import nbformat

    nbformat.validate(document)


def execute(notebook: Path, tmp_path: Path, imports: tuple[str, ...] = (), *, warm_scripts: bool = True) -> list[Any]:
    """Run a notebook as a person would, in its folder; returns the outputs of its code cells.

    What takes seconds to import in the kernel and in each rank may be imported once, before: ``imports``. Scripts that
    cells start have imported torch before; those that graftlab compares must not, since it holds them as Python starts.
    """
    from nbclient import NotebookClient

    import graftlab

    kernels.start_warm()
    document = read(notebook)
    kernel = {"transport": "ipc", "connection_file": str(tmp_path / "kernel.json")}
    client = NotebookClient(
        document,
        timeout=100,
        kernel_name="python3",
        resources={"metadata": {"path": str(notebook.parent)}},
        config=Config({"KernelManager": kernel}),
    )
    package = str(Path(graftlab.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    client.execute(
        env={
            **os.environ,
            "PYTHONPATH": path,
            kernels.IMPORTS: " ".join(imports),
            kernels.CHILDREN: "1" if warm_scripts else "",
        }
    )
    return [output for cell in document.cells for output in cell.get("outputs", [])]


def texts(outputs: list[Any]) -> str:
    """The text that outputs show, one after the other."""
    return "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)
