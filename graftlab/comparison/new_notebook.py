"""``graftlab new NOTEBOOK BASELINE TARGET``: a notebook that compares these two sides, ready to be executed."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from graftlab.comparison.sides import WRONG_USAGE, Kind, command_of, function_in_file, kind_of_sides, refuse_wrong_usage
from graftlab.errors import ConfigError, GraftError

EPILOG = "exit codes: 0, the notebook is written; 64, wrong usage, and nothing is written"

_HOW: dict[Kind, str] = {
    "functions": "Each function runs in a separate process, and both models get the same inputs.",
    "recording": (
        "The baseline is a recording and computes nothing. The target's function runs in a separate process,\n"
        "and its model must get the recorded inputs."
    ),
    "scripts": "Both scripts run as they are, until they call a model. There they wait, and the call is repeated.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    refuse_wrong_usage(parser)
    parser.add_argument("notebook", metavar="NOTEBOOK", type=Path, help="the file to write, such as my_bug.ipynb")
    parser.add_argument(
        "baseline",
        metavar="BASELINE",
        help="the side that you trust: a script, a command in quotes, FILE.py:FUNCTION, or the folder of a recording",
    )
    parser.add_argument("target", metavar="TARGET", help="the other side: a script, a command or FILE.py:FUNCTION")
    parser.add_argument(
        "--inputs", metavar="FILE.py:NAME", help="for functions: the models' inputs, or a function that returns them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the notebook; returns the exit code."""
    notebook: Path = arguments.notebook
    try:
        document = notebook_of(notebook, arguments.baseline, arguments.target, arguments.inputs)
        _write(notebook, document)
    except GraftError as error:
        sys.stderr.write(f"graftlab new: {error}\n")
        return WRONG_USAGE
    sys.stdout.write(f"{notebook} is written. Open it with: jupyter lab {notebook}\n")
    return 0


def notebook_of(notebook: Path, baseline: str, target: str, inputs: str | None = None) -> dict[str, Any]:
    """Make the document of a notebook at this path that compares two sides, given as on a command line.

    Raises :class:`ConfigError` if the sides do not exist or cannot be compared, and :class:`RecordingError` if the
    baseline is a folder without a recording.
    """
    if notebook.suffix != ".ipynb":
        raise ConfigError(f"{notebook} is not the name of a notebook; give one that ends in .ipynb")
    if notebook.exists():
        raise ConfigError(f"{notebook} exists and is not overwritten; give another name, or remove it first")
    kind = kind_of_sides(baseline, target)
    if kind == "scripts":
        if inputs is not None:
            raise ConfigError("--inputs is for functions, FILE.py:FUNCTION; a script makes its own inputs")
        command_of(baseline, None)
        command_of(target, None)
    else:
        for text in [baseline, target, inputs] if kind == "functions" else [target, inputs]:
            if text is not None:
                function_in_file(text)
        if kind == "recording":
            from graftlab.recordings.recording import Recording

            Recording.open(baseline)
    return _document(_cells(notebook, kind, baseline, target, inputs))


def _cells(notebook: Path, kind: Kind, baseline: str, target: str, inputs: str | None) -> list[tuple[str, str]]:
    here = Path.cwd()
    folder = [] if notebook.resolve().parent == here else ["import os", ""]
    moved = [] if not folder else ["", f"os.chdir({str(here)!r})  # the folder that the paths below start from"]
    sides = ", ".join(json.dumps(text, ensure_ascii=False) for text in (baseline, target, inputs) if text is not None)
    return [
        (
            "markdown",
            f"# Where does the target differ?\n\nThe baseline, which is trusted, is `{baseline}`. The target is "
            f"`{target}`.\n{_HOW[kind]}",
        ),
        ("code", "\n".join([*folder, "import graftlab as gl", *moved, "", "%load_ext graftlab"])),
        (
            "markdown",
            "## The answer\n\nThe text names the computation that differs, or says that none does, and ends with what "
            "was not checked.",
        ),
        ("code", f"comparison = gl.compare({sides})\ncomparison"),
        (
            "markdown",
            "## Every tap\n\nA point is the output of a module, in the order of execution. A filled point is the error "
            "that arose at the tap itself, a\nhollow one the error in a plain run. Points above the dashed line are "
            'more than rounding. `comparison.plot("NAME")` shows where the\ntensors of a named group differ.',
        ),
        ("code", "comparison.plot()"),
        (
            "markdown",
            "## The taps that add most\n\n`added` is the error that arose at a tap, and `ratio` is `added` over its "
            "noise floor.",
        ),
        (
            "code",
            'columns = ["name", "rank", "added", "floor", "ratio", "label"]\n'
            'comparison.frame.sort_values("ratio", ascending=False)[columns].head(8)',
        ),
        (
            "markdown",
            "## After a change\n\nEdit the code, restart the kernel and run all cells: each side then starts in a new "
            'process. `comparison.report("report.html")`\nwrites this as a page. The last cell ends the processes of '
            "both sides.",
        ),
        (
            "code",
            'comparison.session.close()\nprint("The sides", comparison.answer, *comparison.named)',
        ),
    ]


def _document(cells: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "cells": [
            {
                "cell_type": kind,
                "id": f"cell-{number}",
                "metadata": {},
                "source": source.splitlines(keepends=True),
                **({"execution_count": None, "outputs": []} if kind == "code" else {}),
            }
            for number, (kind, source) in enumerate(cells, 1)
        ],
        "metadata": {
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _write(notebook: Path, document: dict[str, Any]) -> None:
    try:
        # A file that has appeared in the meantime is not overwritten either.
        with notebook.open("x", encoding="utf-8") as file:
            json.dump(document, file, indent=1, ensure_ascii=False)
            file.write("\n")
    except FileExistsError:
        raise ConfigError(f"{notebook} has been made meanwhile, and is not overwritten; give another name") from None
    except OSError as error:
        # Half a notebook would be in the way of the next try.
        notebook.unlink(missing_ok=True)
        raise ConfigError(f"{notebook} cannot be written: {error.strerror}; give another path") from error
