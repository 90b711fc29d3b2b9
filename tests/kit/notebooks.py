"""Notebooks as files. nbformat takes seconds to import, so it is imported when one is read or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    import nbformat

    return nbformat.read(path, as_version=4)


def write(path: Path, *cells: str) -> None:
    """A notebook for Python with these code cells."""
    import nbformat

    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    document.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(document, path)


def validate(document: Any) -> None:
    """Raise what nbformat raises where a document is not what the format says."""
    import nbformat

    nbformat.validate(document)
