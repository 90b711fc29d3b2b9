"""``make matrix``: the whole suite with the releases of Python, torch and other packages that people have.

One session a cell. A cell whose interpreter is missing is skipped, and nox lists it.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import nox

nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = False


class Cell(NamedTuple):
    """The releases that a session installs; everything else is the newest that they allow."""

    python: str
    requirements: tuple[str, ...]


CELLS = {
    # The oldest of everything that pyproject.toml allows.
    "torch-2.6": Cell("3.10", ("torch==2.6.*", "numpy==1.26.*", "pandas==2.2.*", "jupyterlab==4.2.*")),
    "torch-2.9": Cell("3.11", ("torch==2.9.*",)),
    "torch-2.13": Cell("3.12", ("torch==2.13.*", "pandas==3.*")),
    "torch-2.14": Cell("3.13", ("torch==2.14.*",)),
    "torch-2.15": Cell("3.13", ("torch==2.15.*",)),
    "newest": Cell("3.14", ()),
}


def run_suite(session: nox.Session, cell: Cell) -> None:
    """Install the package with the cell's releases and run the suite; arguments after ``--`` go to pytest."""
    session.install("-e", ".[test]", *cell.requirements)
    session.run("python", "-m", "graftlab", "doctor")
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs)


for name, cell in CELLS.items():
    nox.session(partial(run_suite, cell=cell), python=cell.python, name=name)
