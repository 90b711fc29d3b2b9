"""Mutation testing: small faults are put into the code one at a time, and the tests of its room should fail.

``python tests/mutants.py --sample 60 --seed 1`` draws 60 faults from all rooms, as many of each kind: those of
:mod:`faults` and Cosmic Ray's operators. It tries each in a copy of the checkout, and prints those that no test
noticed. A survivor is a test to write, or a fault that changes nothing; only a person can tell which.

A fault meets first the fast tests of its room, and if those notice nothing, the room's others, which start processes.
"""

from __future__ import annotations

import argparse
import collections
import difflib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from faults import Fault, faults_of, is_fault

FAST = "not ranks and not slow and not browser and not soak"
SLOW = "(ranks or slow) and not browser and not soak"
# A room's tests take a minute or two; a fault that makes them hang is found by then.
LIMIT = 400.0
CHECKOUT = Path(__file__).resolve().parents[1]
# Modules beside the rooms, by the tests that hold them.
MODULES = {
    "__init__": "tests/test_public_names.py",
    "__main__": "tests/test_packaging.py",
    "config": "tests/jobs",
    "demo": "tests/test_packaging.py",
    "doctor": "tests/test_packaging.py",
    "errors": "tests/base",
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
    parser.add_argument("--fast", action="store_true", help="leave out the tests that start processes or take seconds")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="graftlab-mutants-") as folder:
        # Faults are written into files, which no other process should read.
        copy = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        # A file that is changed and put back within a second would be taken for the one that was compiled.
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        drawn = draw(options.rooms, options.sample, random.Random(options.seed))
        say(f"{len(drawn)} faults in {', '.join(options.rooms)}, seed {options.seed}")
        kinds = [FAST] if options.fast else [FAST, SLOW]
        rooms = sorted({room_of(fault) for fault in drawn})
        # Once more, for a test that fails on a busy machine alone.
        failing = [room for room in rooms if fails(room) and fails(room)]
        if failing:
            say(f"the tests of {', '.join(failing)} fail without a fault; nothing was tried")
            return 1
        found = [is_found(fault, kinds, f"{number}/{len(drawn)}") for number, fault in enumerate(drawn, 1)]
    for title, key in (("room", room_of), ("kind", lambda fault: fault.kind)):
        say(f"\n{title:14}found  of")
        counts = collections.Counter(key(fault) for fault in drawn)
        killed = collections.Counter(key(fault) for fault, one in zip(drawn, found, strict=True) if one)
        for name in sorted(counts):
            say(f"{name:14}{killed[name]:5}{counts[name]:4}")
    say(f"\n{sum(found)} of {len(drawn)} found ({sum(found) / max(len(drawn), 1):.0%})")
    return 0 if all(found) else 1


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def draw(rooms: Sequence[str], count: int, chance: random.Random) -> list[Fault]:
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


def command(which: str, room: str) -> list[str]:
    tests = MODULES.get(room, f"tests/{room}")
    return ["-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", which, tests]


def fails(room: str) -> str:
    """The first fast test of a room that fails without a fault."""
    return first_failure(command(FAST, room))


def is_found(fault: Fault, kinds: Sequence[str], number: str) -> bool:
    """Put the fault into its file, run the tests until one fails, and take it out again."""
    original = fault.path.read_text()
    changed = fault.applied()
    fault.path.write_text(changed)
    try:
        by = next((by for kind in kinds if (by := first_failure(command(kind, room_of(fault))))), "")
    finally:
        fault.path.write_text(original)
    say(f"{number} {'found' if by else 'SURVIVED'} {fault.kind} {fault.path}:{fault.line} {by}")
    if not by:
        lines = difflib.unified_diff(original.splitlines(), changed.splitlines(), n=2, lineterm="")
        say("\n".join(itertools.islice(lines, 2, None)))
    return bool(by)


def first_failure(arguments: Sequence[str]) -> str:
    """The test that fails first; blank if all pass."""
    with tempfile.TemporaryFile("w+") as output:
        # Not a pipe: processes that the tests have started may hold its end open after a time limit.
        run = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, start_new_session=True)
        try:
            code = run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            return "they hang"
        output.seek(0)
        noticed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output.read(), re.MULTILINE)
    if code in (0, 5):
        return ""
    return str(noticed[0]) if noticed else "they did not begin"


if __name__ == "__main__":
    sys.exit(main())
