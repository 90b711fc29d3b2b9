"""Mutation testing: small faults are put into the code one at a time, and the fast tests of its room should fail.

``python tests/mutants.py --count 60 --seed 1`` draws so many faults from all that Cosmic Ray can make in the rooms that
matter, tries each in a copy of the checkout, and prints those that no test noticed. A survivor is a test to write, or a
fault that changes nothing; only a person can tell which.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome, WorkItem

ROOMS = ("filters", "diffs", "exchange", "grafting", "transforms", "rows", "requests", "graphs")
FAST = "not ranks and not slow and not browser and not soak"
# A room's tests take seconds; a fault that makes them hang is found by then.
LIMIT = 120.0
CHECKOUT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 if each fault was found, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--count", type=int, default=60, help="how many faults (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws others (%(default)s)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="graftlab-mutants-") as folder:
        # Faults are written into files, which nobody else should meet.
        copy = Path(folder) / "checkout"
        shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        found = faults(options.rooms)
        drawn = random.Random(options.seed).sample(found, min(options.count, len(found)))
        sys.stdout.write(f"{len(drawn)} of {len(found)} faults in {', '.join(options.rooms)}, seed {options.seed}\n")
        sys.stdout.flush()
        if not all(passes(room) for room in options.rooms):
            sys.stdout.write("the tests fail without a fault; nothing was tried\n")
            return 1
        survivors = [diff for number, item in enumerate(drawn, 1) if (diff := survives(item, number, len(drawn)))]
    killed = len(drawn) - len(survivors)
    sys.stdout.write("\n".join([*survivors, f"{killed} of {len(drawn)} found ({killed / max(len(drawn), 1):.0%})\n"]))
    return 1 if survivors else 0


def faults(rooms: Sequence[str]) -> list[WorkItem]:
    """All faults that can be made in these rooms."""
    files = [path for room in rooms for path in sorted(Path("graftlab", room).glob("*.py"))]
    with use_db("faults.sqlite", WorkDB.Mode.create) as database:
        init(files, database, {})
        # An annotation is no code here, and most uses of | are in one.
        items = [item for item in database.work_items if "BitOr" not in item.mutations[0].operator_name]
    return sorted(items, key=lambda item: (str(item.mutations[0].module_path), repr(item.mutations)))


def command(room: str) -> str:
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "-m", FAST]
    return shlex.join([sys.executable, "-m", "pytest", *options, f"tests/{room}"])


def passes(room: str) -> bool:
    return subprocess.run(shlex.split(command(room)), stdout=subprocess.DEVNULL, check=False).returncode == 0


def survives(item: WorkItem, number: int, count: int) -> str:
    """The fault, where no test noticed it; blank where one did."""
    (mutation,) = item.mutations
    result = mutate_and_test(item.mutations, command(mutation.module_path.parts[1]), LIMIT)
    survived = result.test_outcome == TestOutcome.SURVIVED
    place = f"{mutation.module_path}:{mutation.start_pos[0]}"
    sys.stdout.write(f"{number}/{count} {'SURVIVED' if survived else 'found'} {place} {mutation.operator_name}\n")
    sys.stdout.flush()
    return f"\n{place}\n{result.diff}" if survived else ""


if __name__ == "__main__":
    sys.exit(main())
