"""The commands ``graftlab status``, ``watch`` and ``stacks``, which show a session of jobs in a terminal."""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

from graftlab.errors import GraftError
from graftlab.jobs.status_query import format_stacks, format_status, query_status

_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the session's run folder")
    if what == "watch":
        parser.add_argument(
            "--every", type=float, default=1.0, metavar="SECONDS", help="between two updates (default 1)"
        )
    parser.set_defaults(run={"status": _status, "watch": _watch, "stacks": _stacks}[what], what=what)


def _status(arguments: argparse.Namespace) -> int:
    return _show(arguments)


def _stacks(arguments: argparse.Namespace) -> int:
    return _show(arguments)


def _show(arguments: argparse.Namespace) -> int:
    stacks = arguments.what == "stacks"
    try:
        reply = query_status(arguments.folder, stacks=stacks)
    except GraftError as error:
        sys.stderr.write(f"graftlab {arguments.what}: {error}\n")
        return 2
    if reply is None:
        sys.stderr.write(
            f"graftlab {arguments.what}: no session of jobs is open in {arguments.folder}; gl.load_run reads the rows "
            f"of a session that has ended\n"
        )
        return 1
    sys.stdout.write((format_stacks(reply) if stacks else format_status(reply)) + "\n")
    return 0


def _watch(arguments: argparse.Namespace) -> int:
    """Show the status again and again, until the session ends or the user presses Ctrl-C."""
    rest = threading.Event()
    updates = 0
    try:
        while True:
            reply = query_status(arguments.folder)
            if reply is None:
                if not updates:
                    return _show(arguments)
                sys.stdout.write("the session has ended\n")
                return 0
            sys.stdout.write((_CLEAR if sys.stdout.isatty() else "\n" if updates else "") + format_status(reply) + "\n")
            sys.stdout.flush()
            updates += 1
            rest.wait(max(0.05, arguments.every))
    except GraftError as error:
        sys.stderr.write(f"graftlab watch: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0
