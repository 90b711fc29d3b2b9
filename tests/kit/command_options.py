"""The options of all commands: those of ``graftlab``, and those of ``%graft``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from graftlab import __main__ as command_line
from graftlab.magics import subcommands


def options_of_commands() -> Iterator[tuple[str, argparse.Action]]:
    """Yields each option with its command, such as ``%graft check``."""
    _, commands = command_line._parsers()
    for name, parser in commands.items():
        yield from ((f"graftlab {name}", action) for action in parser._actions)
    for name, command in subcommands.COMMANDS.items():
        yield from ((f"%graft {name}", action) for action in command.parser._actions)
