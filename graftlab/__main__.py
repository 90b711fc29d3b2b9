"""The commands of ``graftlab``, such as ``graftlab compare``, also as ``python -m graftlab compare``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR
from graftlab.errors import GraftError


def main(argv: Sequence[str] | None = None) -> int:
    from graftlab.comparison.sides import WRONG_USAGE
    from graftlab.jobs.attach import forget_first_tap
    from graftlab.jobs.commands import attach_script

    parser, commands = _parsers()
    given = list(sys.argv[1:] if argv is None else argv)
    if not given:
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    if not given[0].startswith("-") and given[0] not in commands:
        near = difflib.get_close_matches(given[0], commands, n=1)
        hint = f"did you mean {near[0]}?" if near else "`graftlab --help` lists the commands"
        sys.stderr.write(f"graftlab: unknown command {given[0]!r}; {hint}\n")
        return WRONG_USAGE
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        commands.get(arguments.command, parser).error(f"unrecognized arguments: {' '.join(unknown)}")
    if arguments.run is not attach_script:
        # The environment may ask jobs to join; this command is not one.
        forget_first_tap()
    code: int = arguments.run(arguments)
    return code


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command line, and those of its commands, by name."""
    from graftlab.comparison import command as compare_command
    from graftlab.comparison import new_notebook
    from graftlab.jobs import commands as job_commands
    from graftlab.zoo import scoring

    parser = argparse.ArgumentParser(
        prog="graftlab", description="Find where two implementations of one model diverge."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    summary = "run two scripts, commands or models side by side, and name the computation that differs"
    compare = commands.add_parser("compare", help=summary, description=summary, epilog=compare_command.EPILOG)
    compare_command.add_arguments(compare)
    compare.set_defaults(run=compare_command.run)
    summary = "write a ready-to-run notebook that compares two sides"
    new = commands.add_parser("new", help=summary, description=summary, epilog=new_notebook.EPILOG)
    new_notebook.add_arguments(new)
    new.set_defaults(run=new_notebook.run)
    summary = "run the quickstart notebook, or a different one, without a browser; print where its models diverge"
    demo = commands.add_parser("demo", help=summary, description=summary)
    demo.add_argument("notebook", nargs="?", type=Path, help="default: the quickstart")
    demo.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for the results (%(default)s)")
    demo.add_argument(
        "--noise-floor",
        type=float,
        default=DEFAULT_NOISE_FLOOR,
        help="largest rel_l2 that counts as equal (%(default)g)",
    )
    demo.add_argument("--timeout", type=float, default=600.0, help="time limit of a cell in seconds (%(default)g)")
    demo.set_defaults(run=_demo)
    summary = "copy the example notebooks into a folder"
    examples = commands.add_parser("examples", help=summary, description=summary)
    examples.add_argument("folder", type=Path, metavar="DIR", help="made if it does not exist")
    examples.set_defaults(run=_examples)
    summary = "check this installation (versions, kernel, GPUs, limits, front end), and say how to fix what is missing"
    commands.add_parser("doctor", help=summary, description=summary).set_defaults(run=_doctor)
    summary = "list the folders of past and open sessions, and remove the oldest"
    runs = commands.add_parser("runs", help=summary, description=summary)
    runs.add_argument("--prune", action="store_true", help="remove folders over the budgets, never an open session's")
    runs.add_argument("--gib", type=float, help="budget for all folders in GiB (default: $GRAFTLAB_RUNS_GIB or 10)")
    runs.add_argument(
        "--days", type=float, help="greatest age of a folder in days (default: $GRAFTLAB_RUNS_DAYS or 30)"
    )
    runs.add_argument(
        "folder", nargs="?", type=Path, help="where the folders are (default: runs in $GRAFTLAB_HOME or ~/.graftlab)"
    )
    runs.set_defaults(run=_runs)
    summary = "run a script as a job that joins a session named by environment variables; see docs/attach.md"
    attach = commands.add_parser("attach", help=summary, description=summary)
    job_commands.add_attach_arguments(attach)
    attach.set_defaults(run=job_commands.attach_script)
    for name, summary in (
        ("status", "show where each rank of a session of jobs is, and which taps differ most"),
        ("watch", "show what status shows, again and again until Ctrl-C"),
        ("stacks", "show the stack of each thread of each rank"),
    ):
        job_commands.add_status_arguments(commands.add_parser(name, help=summary, description=summary), name)
    summary = "write a token for jobs on several machines to a new file that only you can read"
    token = commands.add_parser("token", help=summary, description=summary)
    token.add_argument("file", type=Path, metavar="FILE", help="for GRAFTLAB_TOKEN_FILE; it must not exist yet")
    token.set_defaults(run=_token)
    summary = "self-test: score verdicts on planted faults and correct variants"
    zoo = commands.add_parser("zoo", help=summary, description=summary)
    scoring.add_arguments(zoo)
    zoo.set_defaults(run=scoring.run)
    return parser, commands.choices


def _demo(arguments: argparse.Namespace) -> int:
    from graftlab import demo

    return demo.run(arguments)


def _doctor(arguments: argparse.Namespace) -> int:
    from graftlab import doctor

    return doctor.run(arguments)


def _examples(arguments: argparse.Namespace) -> int:
    from graftlab.demo import copy_examples

    try:
        copies = copy_examples(arguments.folder)
    except GraftError as error:
        sys.stderr.write(f"graftlab examples: {error}\n")
        return 2
    sys.stdout.write("".join(f"{path}\n" for path in copies))
    return 0


def _token(arguments: argparse.Namespace) -> int:
    from graftlab.exchange.keys import new_token, write_token

    try:
        write_token(arguments.file, new_token())
    except FileExistsError:
        sys.stderr.write(f"graftlab token: {arguments.file} already exists; use that token, or remove the file first\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"graftlab token: {error}\n")
        return 2
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from graftlab.control import past_runs
    from graftlab.control.run_folder import home

    try:
        if arguments.prune:
            removed = past_runs.prune(arguments.folder, arguments.gib, arguments.days)
            sys.stdout.write(f"removed:\n{past_runs.runs_text(removed)}\n\nleft:\n")
        sys.stdout.write(past_runs.runs_text(past_runs.find_runs(arguments.folder or home() / "runs")) + "\n")
    except GraftError as error:
        sys.stderr.write(f"graftlab runs: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
