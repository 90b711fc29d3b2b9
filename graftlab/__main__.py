"""The command line: ``graftlab zoo`` and the others, also as ``python -m graftlab zoo``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="graftlab", description="Find where two implementations of one model part.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    summary = "score session.verdict on planted faults and benign variants, as a self-test of this machine"
    zoo = commands.add_parser("zoo", help=summary, description=summary)
    from graftlab.zoo import command

    command.add_arguments(zoo)
    zoo.set_defaults(run=command.run)
    from graftlab.jobs import script

    summary = "run a script as a job that joins the graft world which the environment names; see docs/attach.md"
    attach = commands.add_parser("attach", help=summary, description=summary)
    script.add_arguments(attach)
    attach.set_defaults(run=script.run)
    arguments = parser.parse_args(argv)
    code: int = arguments.run(arguments)
    return code


if __name__ == "__main__":
    sys.exit(main())
