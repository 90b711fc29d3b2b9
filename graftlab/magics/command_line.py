"""Parses the line of a ``%graft`` magic.

Expressions are taken from the line unchanged, so that their quotes and brackets survive.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shlex

from IPython.core.error import UsageError

from graftlab.magics.subcommands import COMMANDS, PLOT_KINDS, Command, HelpRequest, overview
from graftlab.plan.plan import FILTER_MEANINGS

FILTER_OPTIONS = tuple(f"--{name}" for name in FILTER_MEANINGS)
CELL_TARGETS = ("baseline", "target", "both", "transform")

# Methods and functions of a session that are called differently here.
_OF_METHODS = {"launch": "up", "edit": "filter", "execute": "run", "dashboard": "ui", "close": "down"}

_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# The name of an option, unless it is inside a string of an expression.
_STRING_OR_OPTION = re.compile(rf"{_STRING}|(?:^|(?<=\s))(?P<option>--[a-zA-Z][\w-]*|-h)(?=\s|=|$)", re.DOTALL)


def parse(line: str) -> tuple[str, argparse.Namespace]:
    """Parse a line into the subcommand and its arguments.

    Raises UsageError for mistakes, :class:`HelpRequest` when the line asks for help.
    """
    name, _, rest = line.strip().partition(" ")
    if name == "help" and rest.strip() in COMMANDS:
        name, rest = rest.strip(), "-h"
    elif name in ("", "-h", "--help", "help"):
        raise HelpRequest(overview())
    command = COMMANDS.get(name)
    if command is None:
        if name.partition("[")[0] in CELL_TARGETS:
            raise UsageError(f"%graft: write %%graft {name}, with two %, on the first line of a cell")
        near = [_OF_METHODS[name]] if name in _OF_METHODS else difflib.get_close_matches(name, COMMANDS, n=1)
        hint = "".join(f"; did you mean {close!r}?" for close in near)
        raise UsageError(f"%graft: unknown command {name!r}{hint or '; %graft lists the commands'}")
    if command.raw == "filters":
        return name, _parse_filters(command, rest)
    if command.raw == "where":
        name_given, where = split_where(rest)
        return name, command.parser.parse_args([*_split(name, name_given), *where])
    if command.raw == "COMMAND":
        rank, _, text = rest.strip().partition(" ")
        arguments = command.parser.parse_args([rank] if rank else [])
        arguments.command = text.strip()
        return name, arguments
    if command.raw in ("EXPR", "[EXPR]"):
        return name, _parse_expression(command, rest)
    arguments = command.parser.parse_args(_split(name, rest))
    if name == "plot":
        _choose_plot(arguments)
    return name, arguments


def _choose_plot(arguments: argparse.Namespace) -> None:
    """Set the kind where the line leaves it out. Raises UsageError for an argument that the kind does not take."""
    kind = arguments.kind
    if arguments.verdict:
        given = (arguments.kind, arguments.step, arguments.steps, arguments.noise_floor, arguments.tags)
        if any(each is not None for each in given):
            raise UsageError("%graft plot --verdict takes a tap, and with it --dims, and no other option")
        if arguments.dims is not None and not arguments.tap:
            raise UsageError("%graft plot --verdict --dims: name a tap")
        return
    if kind is None:
        of_tap = "history" if arguments.tags is None and arguments.dims is None else "heatmap"
        kind = of_tap if arguments.tap else "over_steps" if arguments.steps is not None else "divergence"
    options = {
        "TAP": arguments.tap,
        "--step": arguments.step,
        "--steps": arguments.steps,
        "--noise-floor": arguments.noise_floor,
        "--tags": arguments.tags,
        "--dims": arguments.dims,
    }
    for argument in (name for name, value in options.items() if value is not None):
        if argument not in PLOT_KINDS[kind]:
            kinds = ", ".join(each for each, takes in PLOT_KINDS.items() if argument in takes)
            raise UsageError(f"%graft plot: {argument} goes with the kinds {kinds}, not with {kind}")
    if "TAP" in PLOT_KINDS[kind] and not arguments.tap:
        raise UsageError(f"%graft plot --kind {kind}: name a tap")
    arguments.kind = kind


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise UsageError(f"%graft {name}: {error}") from None


def _parse_filters(command: Command, rest: str) -> argparse.Namespace:
    options = [found for found in _STRING_OR_OPTION.finditer(rest) if found["option"]]
    starts = [*(found.start() for found in options), len(rest)]
    before = rest[: starts[0]].strip()
    if before:
        command.parser.error(f"write one of {', '.join(FILTER_OPTIONS)} before the expression {before!r}")
    given: list[str] = []
    for found, end in zip(options, starts[1:], strict=True):
        option, text = found["option"], rest[found.end() : end].strip().removeprefix("=").strip()
        if option not in FILTER_OPTIONS:
            given.append(option)
        elif text:
            given.append(f"{option}={_unquoted(text)}")
        else:
            command.parser.error(f'{option} needs an expression; "" matches nothing')
    return command.parser.parse_args(given)


def split_where(rest: str) -> tuple[str, list[str]]:
    """Split a line at ``--where``: the text before it, and the option with its expression as one argparse word."""
    found = next((found for found in _STRING_OR_OPTION.finditer(rest) if found["option"] == "--where"), None)
    if found is None:
        return rest, []
    text = _unquoted(rest[found.end() :].strip().removeprefix("=").strip())
    if not text.strip():
        raise UsageError("%graft transform: --where needs a filter; leave it out to transform the grafted taps")
    return rest[: found.start()], [f"--where={text}"]


def _unquoted(text: str) -> str:
    """The text without the quotes around it, which belong to the command line, not to the expression."""
    if re.fullmatch(_STRING, text, re.DOTALL):
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    return text


def _leading_option(command: Command) -> re.Pattern[str]:
    """Match one of the command's options, with its value, before an expression that may begin with a minus sign."""
    flags, valued = (
        "|".join(
            re.escape(option)
            for action in command.parser._actions
            if (action.nargs == 0) is is_flag
            for option in action.option_strings
        )
        for is_flag in (True, False)
    )
    return re.compile(rf"(?:{flags})(?:\s+|$)|(?:{valued})(?:\s+|=)\S+(?:\s+|$)")


def _parse_expression(command: Command, rest: str) -> argparse.Namespace:
    text = rest.strip()
    after = re.search(r"\s(?:-o|--out)(?:\s+|=)(?P<out>\w+)$", text)
    words: list[str] = []
    option = _leading_option(command)
    while (before := option.match(text)) is not None:
        words, text = words + _split("run", before.group()), text[before.end() :]
    if not words and after is not None:
        words, text = ["-o", after["out"]], text[: after.start()]
    arguments = command.parser.parse_args(words)
    if not text.strip() and command.raw == "EXPR":
        command.parser.error(f"give an expression, such as `{command.parser.prog} forward(batch)`")
    if re.search(r"\s--out=?$", text):
        command.parser.error("--out takes the name of a variable, such as `--out run`")
    if re.match(r"-o\b|--\w", text.lstrip()):
        # Python would read two minus signs, and complain about something else.
        command.parser.parse_args(text.split()[:1])
    arguments.expression = text.strip()
    return arguments
