"""Line and branch coverage by room: the suite runs under coverage.py, with the processes that it starts.

``python tests/coverage_by_room.py -n 2 --dist worksteal tests/rows`` passes its arguments to pytest and prints a table:
the rooms, and the modules with most that no test runs; with ``--lines ROOM`` each such line and branch of a room.
A process that is killed leaves no data, so what only such a process runs counts as not covered.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
FOLDER = CHECKOUT / "build" / "coverage"
WORST = 20
CONFIGURATION = f"""
[run]
branch = true
parallel = true
# Ranks are forks of the forkserver; they end by os._exit, or by a signal.
patch = subprocess, fork, _exit
sigterm = true
source = {CHECKOUT / "graftlab"}
data_file = {FOLDER / "data"}
disable_warnings = no-data-collected, module-not-measured, already-imported, couldnt-parse

[report]
exclude_also =
    if TYPE_CHECKING:
    @overload
    raise NotImplementedError
    ^ *\\.\\.\\.$
    if __name__ == .__main__.:
"""


class Measured(NamedTuple):
    """How many lines and branches there are, and how many of them ran."""

    lines: int
    lines_run: int
    branches: int
    branches_run: int

    @classmethod
    def of(cls, summary: dict[str, Any]) -> Measured:
        names = ("num_statements", "covered_lines", "num_branches", "covered_branches")
        return cls(*(summary[name] for name in names))

    @classmethod
    def together(cls, parts: Iterable[Measured]) -> Measured:
        return cls(*map(sum, zip(*parts, strict=True)))

    def __str__(self) -> str:
        branches = f"{self.branches_run / self.branches:8.1%}" if self.branches else f"{'-':>8}"
        return f"{self.lines:7}{self.lines_run / max(self.lines, 1):8.1%}{self.branches:8}{branches}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", metavar="ROOM", help="print what of a room no test runs")
    parser.add_argument("--again", action="store_true", help="run no tests; show the last measurement")
    options, tests = parser.parse_known_args(argv)
    code = 0 if options.again else measure(tests)
    files = json.loads((FOLDER / "report.json").read_text())["files"]
    if options.lines:
        show_lines(files, options.lines)
    else:
        show_table(files)
    return code


def measure(tests: Sequence[str]) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    settings = FOLDER / "coverage.ini"
    settings.write_text(CONFIGURATION)
    coverage = [sys.executable, "-m", "coverage"]
    code = subprocess.run([*coverage, "run", f"--rcfile={settings}", "-m", "pytest", *tests], check=False).returncode
    for words in (["combine", "-q"], ["json", "-q", "-o", str(FOLDER / "report.json")]):
        subprocess.run([*coverage, words[0], f"--rcfile={settings}", *words[1:]], check=True)
    return code


def show_table(files: dict[str, Any]) -> None:
    of_file = {module_of(path): Measured.of(report["summary"]) for path, report in files.items()}
    of_room = collections.defaultdict(list)
    for module, measured in of_file.items():
        of_room[room_of(module)].append(measured)
    rooms = {name: Measured.together(parts) for name, parts in sorted(of_room.items())}
    least_run = sorted(of_file, key=lambda module: missing(of_file[module]), reverse=True)
    say(f"{'room':32}{'lines':>7}{'run':>8}{'branches':>8}{'run':>8}")
    for name, measured in [*rooms.items(), ("all", Measured.together(of_file.values()))]:
        say(f"{name:32}{measured}")
    say("\nmost lines and branches that do not run")
    for module in least_run[:WORST]:
        say(f"{module:32}{of_file[module]}")


def missing(measured: Measured) -> int:
    return measured.lines - measured.lines_run + measured.branches - measured.branches_run


def show_lines(files: dict[str, Any], room: str) -> None:
    for path, report in sorted(files.items()):
        if room in (module_of(path), room_of(module_of(path))):
            text = (CHECKOUT / path).read_text().splitlines()
            for line in report["missing_lines"]:
                say(f"{path}:{line}: {text[line - 1]}")
            for start, end in report["missing_branches"]:
                if end not in report["missing_lines"]:
                    say(f"{path}:{start}: {text[abs(start) - 1].strip()}  [never to {'the end' if end < 0 else end}]")


def module_of(path: str) -> str:
    return os.path.relpath(CHECKOUT / path, CHECKOUT / "graftlab").removesuffix(".py")


def room_of(module: str) -> str:
    return module.split("/")[0] if "/" in module else "modules"


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
