"""The command line: ``graftlab zoo`` and ``graftlab runs``, also as ``python -m graftlab zoo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from graftlab.errors import GraftError


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="graftlab", description="Find where two implementations of one model part.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summary = "score session.verdict on planted faults and benign variants, as a self-test of this machine"
    zoo = commands.add_parser("zoo", help=summary, description=summary)
    from graftlab.zoo import command

    command.add_arguments(zoo)
    zoo.set_defaults(run=command.run)
    summary = "list the folders of past and open sessions, and remove the oldest"
    runs = commands.add_parser("runs", help=summary, description=summary)
    runs.add_argument("--prune", action="store_true", help="remove what is over the budgets, never an open one")
    runs.add_argument("--gib", type=float, help="budget of all in GiB (default: $GRAFTLAB_RUNS_GIB or 10)")
    runs.add_argument("--days", type=float, help="budget of each in days (default: $GRAFTLAB_RUNS_DAYS or 30)")
    runs.add_argument(
        "folder", nargs="?", type=Path, help="where they lie (default: $GRAFTLAB_HOME or ~/.graftlab, runs)"
    )
    runs.set_defaults(run=_runs)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except GraftError as error:
        parser.error(str(error))


def _runs(arguments: argparse.Namespace) -> int:
    from graftlab.control import past_runs
    from graftlab.control.run_folder import home

    if arguments.prune:
        removed = past_runs.prune(arguments.folder, arguments.gib, arguments.days)
        sys.stdout.write(f"removed:\n{past_runs.told(removed)}\n\nleft:\n")
    sys.stdout.write(past_runs.told(past_runs.find_runs(arguments.folder or home() / "runs")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
