"""Mutation testing: small faults are put into the code one at a time, and the fast tests of its room should fail.

``python tests/mutants.py --count 60 --seed 1`` draws 60 faults from all that Cosmic Ray can make in the rooms that
matter, tries each in a copy of the checkout, and prints those that no test noticed. A survivor is a test to write, or a
fault that changes nothing; only a person can tell which.

The fast tests run once before, with coverage.py, so that a fault meets the tests that come past its line and no others.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem
from coverage import CoverageData

ROOMS = ("filters", "diffs", "exchange", "grafting", "transforms", "rows", "requests", "graphs")
FAST = "not ranks and not slow and not browser and not soak"
# A room's tests take seconds; a fault that makes them hang is found by then.
LIMIT = 240.0
CHECKOUT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if each fault was found, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--count", type=int, default=60, help="how many faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws others (%(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="graftlab-mutants-") as folder:
        # Faults are written into files, which no other process should read.
        copy = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        found = faults(options.rooms)
        random.Random(options.seed).shuffle(found)
        drawn = list(itertools.islice(filter(is_python, found), options.count))
        say(f"{len(drawn)} of {len(found)} faults in {', '.join(options.rooms)}, seed {options.seed}")
        rooms = sorted({room_of(item) for item in drawn})
        # Once more, for a test that fails on a busy machine alone.
        failing = [room for room in rooms if not passes(room) and not passes(room)]
        if failing:
            say(f"the tests of {', '.join(failing)} fail without a fault; nothing was tried")
            return 1
        survivors = [diff for number, item in enumerate(drawn, 1) if (diff := survives(item, number, len(drawn)))]
    killed = len(drawn) - len(survivors)
    say("\n".join([*survivors, f"{killed} of {len(drawn)} found ({killed / max(len(drawn), 1):.0%})"]))
    return 1 if survivors else 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def faults(rooms: Sequence[str]) -> list[WorkItem]:
    """All faults that can be made in these rooms."""
    files = [path for room in rooms for path in sorted(Path("graftlab", room).glob("*.py"))]
    with use_db("faults.sqlite", WorkDB.Mode.create) as database:
        init(files, database, {})
        # An annotation is no code here, and most uses of | are in one.
        items = [item for item in database.work_items if "BitOr" not in item.mutations[0].operator_name]
    return sorted(items, key=lambda item: (str(item.mutations[0].module_path), repr(item.mutations)))


def is_python(item: WorkItem) -> bool:
    """Whether a fault leaves Python; ``**kwargs`` with another operator does not, and says nothing of the tests."""
    (mutation,) = item.mutations
    operator = get_operator(mutation.operator_name)(**(mutation.operator_args or {}))
    code = mutate_code(mutation.module_path.read_text(), operator, mutation.occurrence)
    try:
        compile(code or "", str(mutation.module_path), "exec")
    except SyntaxError:
        return False
    return code is not None


def room_of(item: WorkItem) -> str:
    return str(item.mutations[0].module_path.parts[1])


def command(*tests: str) -> list[str]:
    return ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", FAST, *tests]


def passes(room: str) -> bool:
    """Run a room's fast tests, and note which of them comes past which line."""
    Path(f"{room}.ini").write_text("[run]\ndynamic_context = test_function\n")
    coverage = ["-m", "coverage", "run", f"--rcfile={room}.ini", f"--data-file={room}.coverage"]
    coverage.append(f"--include=graftlab/{room}/*")
    run = [sys.executable, *coverage, *command(f"tests/{room}")]
    return subprocess.run(run, stdout=subprocess.DEVNULL, check=False).returncode == 0


def tests_of(item: WorkItem) -> list[str]:
    """The tests that come past a fault; all of the room where one may do so while it is imported or set up."""
    (mutation,) = item.mutations
    room = room_of(item)
    data = CoverageData(f"{room}.coverage")
    data.read()
    contexts = data.contexts_by_lineno(str(mutation.module_path.resolve()))
    names = {name for line in lines_of(mutation.module_path, mutation.start_pos[0]) for name in contexts.get(line, ())}
    if "" in names:
        return [f"tests/{room}"]
    wanted = {name.rpartition(".")[2] for name in names}
    return [
        f"{path}::{name}"
        for path in sorted(Path("tests", room).glob("test_*.py"))
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
        if name in wanted
    ]


def lines_of(path: Path, line: int) -> range:
    """The lines of the statement that this one is in; of one with a body, those before it."""
    ranges = [range(line, line + 1)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or line):
            ranges.append(range(node.lineno, min([(node.end_lineno or line) + 1, *_bodies(node)])))
    return next(each for each in reversed(ranges) if line in each)


def _bodies(node: ast.stmt) -> Iterator[int]:
    """Where the statements within a statement begin, with their decorators."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield min(each.lineno for each in ast.walk(inner) if hasattr(each, "lineno"))


def survives(item: WorkItem, number: int, count: int) -> str:
    """The fault, where no test noticed it; blank where one did."""
    (mutation,) = item.mutations
    tests = tests_of(item)
    # Where no test comes past the line, it still has to be put in for its diff.
    run = shlex.join([sys.executable, *(command(*tests) if tests else ["-c", ""])])
    result = mutate_and_test(item.mutations, run, LIMIT)
    survived = result.test_outcome == TestOutcome.SURVIVED
    place = f"{mutation.module_path}:{mutation.start_pos[0]}"
    noticed = re.findall(r"^(?:FAILED|ERROR) (\S+)", result.output or "", re.MULTILINE)
    by = "" if survived else f", {noticed[0]}" if noticed else ", it hung or did not begin"
    say(f"{number}/{count} {'SURVIVED' if survived else 'found'} {place} {mutation.operator_name}{by}")
    return f"\n{place}\n{result.diff}" if survived else ""


if __name__ == "__main__":
    sys.exit(main())
