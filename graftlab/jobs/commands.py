"""The commands of jobs: ``attach`` runs a script as one; ``status``, ``watch`` and ``stacks`` show a session."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from pathlib import Path

from graftlab.config import PREFIX, GraftConfig
from graftlab.errors import ConfigError, GraftError
from graftlab.jobs.attach import warn_never_joined
from graftlab.jobs.on_import import prepare
from graftlab.jobs.status_query import format_stacks, format_status, query_status

_CLEAR = "\x1b[H\x1b[2J"


def add_attach_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-m", dest="as_module", action="store_true", help="SCRIPT is a module, not a file")
    parser.add_argument(
        "-s",
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting, such as role=target; the environment's GRAFTLAB_<NAME> wins",
    )
    parser.add_argument("script", help="the file or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the arguments of the script")


def attach_script(arguments: argparse.Namespace) -> int:
    """Run the script as ``python script.py`` would; it joins at its first tap."""
    try:
        for pair in arguments.set:
            # Checked first, so that the error names this command line.
            GraftConfig.from_kv_pairs([pair])
            name, _, text = pair.partition("=")
            os.environ.setdefault(f"{PREFIX}{name.upper()}", text)
        os.environ[f"{PREFIX}ENABLE"] = "1"
        GraftConfig.from_env().require_complete()
        if not arguments.as_module and not os.path.exists(arguments.script):
            raise ConfigError(f"{arguments.script} does not exist; use -m for a module")
    except ConfigError as error:
        # The command line or the environment is wrong, so a traceback would not help.
        sys.stderr.write(f"graftlab attach: {error}\n")
        return 2
    # Does nothing if the import of graftlab has already prepared the job.
    prepare()
    sys.argv = [arguments.script, *arguments.arguments]
    try:
        if arguments.as_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(arguments.script)))
            runpy.run_path(arguments.script, run_name="__main__")
    finally:
        warn_never_joined(arguments.script)
    return 0


def add_status_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="the session's run folder")
    if what == "watch":
        parser.add_argument(
            "--every", type=float, default=1.0, metavar="SECONDS", help="between two updates (default 1)"
        )
    parser.set_defaults(run=_watch if what == "watch" else _show, what=what)


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
