"""Mutation testing: small faults are put into the code one at a time, and the tests of its room should fail.

``python tests/mutants.py --sample 60 --seed 1`` draws 60 faults from all rooms, as many of each kind: those of
:mod:`faults` and Cosmic Ray's operators. It tries each in a copy of the checkout, and prints those that no test
noticed. A survivor is a test to write, or a fault that changes nothing; only a person can tell which.

A fault meets first the fast tests that run its line, those of its room before others, and if they notice nothing, the
tests of its room that start processes. Which test runs which line is measured once (:mod:`tests_by_line`), and one
process has the fast tests collected for all faults (:mod:`live_faults`).
"""

from __future__ import annotations

import argparse
import ast
import collections
import difflib
import importlib
import itertools
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from faults import Fault, faults_of, is_fault
from live_faults import CollectedTests
from tests_by_line import FAST, TestsByLine

SLOW = "(ranks or slow) and not browser and not soak"
# Seconds. A test that hangs fails at its own time limit, which is shorter.
LIMIT = 600.0
UNDECIDED = "undecided"
# What takes seconds to import, and is nothing of the package's.
IMPORTED = ("torch", "torch.distributed", "torch._dynamo", "pandas", "matplotlib.pyplot", "hypothesis", "ipywidgets")
CHECKOUT = Path(__file__).resolve().parents[1]
# Modules beside the rooms, by the tests that hold them.
MODULES = {
    "__init__": "tests/test_public_names.py",
    "__main__": "tests/test_graftlab_command.py",
    "config": "tests/jobs",
    "demo": "tests/test_packaging.py",
    "doctor": "tests/test_doctor.py",
    "errors": "tests/base",
    "loaded_run": "tests/control",
    "pytest_plugin": "tests/comparison",
    "session": "tests/control",
}
ROOMS = sorted([path.parent.name for path in (CHECKOUT / "graftlab").glob("*/__init__.py")] + [*MODULES])
# How many files are searched for what Cosmic Ray can make of them.
FILES_OF_OPERATORS = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if each fault was found, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--sample", type=int, default=60, help="how many faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws others (%(default)s)")
    parser.add_argument("--only", type=int, nargs=2, metavar=("FIRST", "LAST"), help="try these of the sample alone")
    parser.add_argument("--by-lines", action="store_true", help="draw lines and the fault next to each, not kinds")
    parser.add_argument("--fast", action="store_true", help="leave out the tests that start processes or take seconds")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of fast tests for a fault (%(default)s)")
    options = parser.parse_args(argv)
    by_line = TestsByLine.measured([tests_of_room(room) for room in ROOMS])
    with tempfile.TemporaryDirectory(prefix="graftlab-mutants-") as folder:
        # Faults are written into files, which no other process should read.
        copy = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build"))
        os.chdir(copy)
        sys.path[:0] = [str(copy), str(copy / "tests")]
        os.environ |= {"PYTHONPATH": str(copy), "GRAFTLAB_FUZZ": "0.2", "OMP_NUM_THREADS": "1"}
        for name in IMPORTED:
            importlib.import_module(name)
        draw = draw_by_lines if options.by_lines else draw_by_kinds
        drawn = draw(options.rooms, options.sample, random.Random(options.seed))
        say(f"{len(drawn)} faults in {', '.join(options.rooms)}, seed {options.seed}")
        trial = Trial(by_line, CollectedTests(FAST, LIMIT), options.budget, options.fast)
        outcomes = []
        first, last = options.only or (1, len(drawn))
        drawn = drawn[first - 1 : last]
        for number, fault in enumerate(drawn, first):
            outcomes.append(trial.outcome(fault))
            show(fault, outcomes[-1], f"{number}/{last}")
    decided = [(fault, found) for fault, found in zip(drawn, outcomes, strict=True) if found != UNDECIDED]
    for title, key in (("room", room_of), ("kind", lambda fault: fault.kind)):
        say(f"\n{title:14}found  of")
        counts = collections.Counter(key(fault) for fault, _ in decided)
        killed = collections.Counter(key(fault) for fault, found in decided if found)
        for name in sorted(counts):
            say(f"{name:14}{killed[name]:5}{counts[name]:4}")
    killed_at_all = sum(1 for _, found in decided if found)
    say(f"\n{killed_at_all} of {len(decided)} found ({killed_at_all / max(len(decided), 1):.0%})")
    return 0 if killed_at_all == len(decided) else 1


def show(fault: Fault, found: str, number: str) -> None:
    """Print how one fault ended, and the fault itself if no test noticed it."""
    word = found if found == UNDECIDED else "found" if found else "SURVIVED"
    say(f"{number} {word} {fault.kind} {fault.path}:{fault.line} {found if '::' in found else ''}")
    if word == "SURVIVED":
        before, after = fault.path.read_text().splitlines(), fault.applied().splitlines()
        say("\n".join(itertools.islice(difflib.unified_diff(before, after, n=2, lineterm=""), 2, None)))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def draw_by_kinds(rooms: Sequence[str], count: int, chance: random.Random) -> list[Fault]:
    """``count`` faults, as many of each kind; within a kind, each that can be made is as likely."""
    files = [path for room in rooms for path in files_of(room)]
    by_kind: dict[str, list[Fault]] = collections.defaultdict(list)
    for path in files:
        for fault in faults_of(path):
            by_kind[fault.kind].append(fault)
    by_kind["operator"] = faults_of_operators(files, chance)
    for found in by_kind.values():
        chance.shuffle(found)
    turns = itertools.zip_longest(*(filter(is_fault, by_kind[kind]) for kind in sorted(by_kind)))
    return list(itertools.islice(filter(None, itertools.chain.from_iterable(turns)), count))


def draw_by_lines(rooms: Sequence[str], count: int, chance: random.Random) -> list[Fault]:
    """For each of ``count`` lines one of the faults that are nearest to it; each line is as likely."""
    lines = [(path, line) for room in rooms for path in files_of(room) for line in whole_file(path)]
    found: dict[Path, list[Fault]] = {}
    drawn: list[Fault] = []
    for path, line in chance.sample(lines, len(lines)):
        of_path = found.setdefault(path, faults_of(path))
        distance = min((abs(each.line - line) for each in of_path), default=0)
        near = [each for each in of_path if abs(each.line - line) <= distance and each not in drawn and is_fault(each)]
        drawn += chance.sample(near, min(1, len(near)))
        if len(drawn) == count:
            break
    return drawn


def files_of(room: str) -> list[Path]:
    return [Path(f"graftlab/{room}.py")] if room in MODULES else sorted(Path("graftlab", room).glob("*.py"))


def faults_of_operators(files: Sequence[Path], chance: random.Random) -> list[Fault]:
    """What Cosmic Ray can make of some of these files."""
    longest_first = sorted(files, key=lambda path: -path.stat().st_size * chance.random())
    with use_db("faults.sqlite", WorkDB.Mode.create) as database:
        init(longest_first[:FILES_OF_OPERATORS], database, {})
        # An annotation is no code here, and most uses of | are in one.
        found = [mutation for item in database.work_items for mutation in item.mutations]
    found = sorted((each for each in found if "BitOr" not in each.operator_name), key=repr)
    drawn = chance.sample(found, min(len(found), 200))
    faults = []
    for each in drawn:
        operator = get_operator(each.operator_name)(**(each.operator_args or {}))
        source = each.module_path.read_text()
        if code := mutate_code(source, operator, each.occurrence):
            faults.append(Fault("operator", each.module_path, each.start_pos[0], 0, len(source.encode()), code))
    return faults


def room_of(fault: Fault) -> str:
    return fault.path.with_suffix("").parts[1]


def tests_of_room(room: str) -> str:
    return MODULES.get(room, f"tests/{room}")


class Trial:
    """Puts faults into the files of a copy, one at a time, and runs the tests that should notice."""

    def __init__(self, by_line: TestsByLine, collected: CollectedTests, budget: float, fast: bool) -> None:
        self._by_line = by_line
        self._collected = collected
        self._budget = budget
        self._fast = fast
        self._written = int(time.time())

    def outcome(self, fault: Fault) -> str:
        """The test that fails first; blank if none does, and :data:`UNDECIDED` if the tests ran out of time."""
        original, changed = fault.path.read_text(), fault.applied()
        self._write(fault.path, changed)
        try:
            found = self._first_failure(fault, original, changed)
        finally:
            self._write(fault.path, original)
        # A test that also fails without the fault noticed nothing: the machine was busy.
        return UNDECIDED if "::" in found and first_failure([found]) else found

    def _first_failure(self, fault: Fault, original: str, changed: str) -> str:
        folder = tests_of_room(room_of(fault))
        lines = lines_that_reach(fault.path, fault.line)
        chosen = self._by_line.of(fault.path, lines, folder, self._budget)
        # A function that runs on import, such as a decorator, runs in no test: only a new process shows what it makes.
        is_of_import = not chosen
        chosen = chosen or self._by_line.of(fault.path, whole_file(fault.path), folder, self._budget / 4)
        found = None if is_of_import else self._collected.first_failure(fault.path, original, changed, chosen)
        # Reads the files alone.
        noticed = found or self._collected.first_failure(fault.path, original, original, ["tests/test_layout.py"])
        selections = []
        if found is None:
            # Any import of the module shows what keeps it from being imported, and no line shows which tests read a
            # table or a default.
            selections = [["-m", FAST, "tests/test_public_names.py", "tests/test_interfaces.py", folder]]
            selections += [chosen] if chosen else []
        if not self._fast:
            selections.append(["-m", SLOW, folder])
        return noticed or next((found for tests in selections if (found := first_failure(tests))), "")

    def _write(self, path: Path, text: str) -> None:
        """Each time with a later time of change: by its seconds Python knows bytecode of an older text."""
        path.write_text(text)
        self._written += 1
        os.utime(path, (self._written, self._written))


def lines_that_reach(path: Path, line: int) -> range:
    """Lines that run with the code at ``line``; where it runs on import, those that may depend on it."""
    around = _around(path, line)
    functions = [node for node in around if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if not functions:
        return whole_file(path)
    innermost = around[-1]
    if innermost in functions:
        # Its defaults.
        return range(functions[-1].body[0].lineno, (innermost.end_lineno or 0) + 1)
    body = getattr(innermost, "body", None)
    end = max(body[0].lineno, innermost.lineno + 1) if body else (innermost.end_lineno or 0) + 1
    return range(innermost.lineno, end)


def whole_file(path: Path) -> range:
    return range(1, len(path.read_bytes().splitlines()) + 1)


def _around(path: Path, line: int) -> list[ast.stmt | ast.excepthandler]:
    """The statements that a line is in, the innermost last."""
    nodes = ast.walk(ast.parse(path.read_bytes()))
    around = [node for node in nodes if isinstance(node, (ast.stmt, ast.excepthandler)) and _has(node, line)]
    return sorted(around, key=lambda node: (node.lineno, -(node.end_lineno or 0)))


def _has(node: ast.stmt | ast.excepthandler, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def first_failure(tests: Sequence[str]) -> str:
    """The test that fails first, in a fork of this process; blank if all pass."""
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if not process:
            run_tests(tests, output.fileno())
        code = wait(process)
        output.seek(0)
        # Names of cases may have spaces.
        noticed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output.read(), re.MULTILINE)
    if code is None:
        return UNDECIDED
    if code in (0, 5):
        return ""
    return str(noticed[0]) if noticed else "they did not begin"


def run_tests(tests: Sequence[str], output: int) -> NoReturn:
    """In a fork: run these tests in a process group that can be ended as a whole."""
    code = 3
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        code = int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *tests]))
    finally:
        os._exit(code)


def wait(process: int) -> int | None:
    """The exit code of a fork; None if it takes longer than :data:`LIMIT`."""
    ended = os.pidfd_open(process)
    try:
        in_time, _, _ = select.select([ended], [], [], LIMIT)
    finally:
        os.close(ended)
    if not in_time:
        os.killpg(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status) if in_time else None


if __name__ == "__main__":
    sys.exit(main())
