"""The command line: ``graftlab zoo``, also as ``python -m graftlab zoo``."""

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
    arguments = parser.parse_args(argv)
    return command.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
