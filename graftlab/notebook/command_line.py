"""The words of ``%graft``: one table of subcommands and options that parsing, help and completion all read.

Expressions are taken from the line as they stand, so that their quotes and brackets survive.
"""

from __future__ import annotations

import argparse
import re
import shlex
from dataclasses import dataclass, field
from typing import Any, NoReturn

from IPython.core.error import UsageError

FILTER_OPTIONS = ("--b2t", "--t2b", "--compare", "--keep")
CELL_TARGETS = ("baseline", "target", "both", "transform")


class HelpShown(Exception):
    """The user asked for help; ``text`` is it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().strip()}\n`{self.prog} -h` tells more")

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpShown(self.format_help())


@dataclass(frozen=True)
class Command:
    """One subcommand. ``raw`` names the part of the line that is kept as it stands."""

    parser: argparse.ArgumentParser
    raw: str | None = None
    summary: str = ""
    options: tuple[str, ...] = field(default=())


def _commands() -> dict[str, Command]:
    found: dict[str, Command] = {}

    def command(name: str, summary: str, raw: str | None = None) -> argparse.ArgumentParser:
        parser = _Parser(
            prog=f"%graft {name}",
            description=summary,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        found[name] = Command(parser, raw, summary)
        return parser

    up = command("up", "Start the ranks; the session is also the notebook's variable `session`.")
    up.add_argument("-b", "--baseline", type=int, default=1, help="baseline ranks (default 1)")
    up.add_argument("-t", "--target", type=int, default=1, help="target ranks (default 1)")
    up.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPUs if there are any)")
    up.add_argument("--backend", help="collective backend of each side's group (default: nccl or gloo)")
    up.add_argument("--timeout", type=float, default=60.0, help="seconds, for the start and every wait (default 60)")
    up.add_argument("--start-method", choices=("forkserver", "spawn"), default="forkserver", help="of the ranks")
    up.add_argument("-o", "--out", default="session", help="name of the variable that gets the session")

    command("status", "Show where each rank is at this moment.")
    command("stacks", "Show where each rank's threads are in the code.")
    command("interrupt", "Raise KeyboardInterrupt in the code that the ranks run; the ranks go on.")
    command("down", "End the ranks; rows and logs stay.")

    log = command("log", "Show the end of a rank's log.")
    log.add_argument("rank", nargs="?", default="both", help="baseline, target, both, or one such as target[1]")
    log.add_argument("-n", "--lines", type=int, default=50, help="how many lines (default 50)")

    run = command(
        "run", "Evaluate an expression where the %%graft cells of each side ran, on both sides as one step.", raw="EXPR"
    )
    run.add_argument("-o", "--out", help="name of the variable that gets the Run")

    filter_ = command(
        "filter",
        'Edit the plan\'s filters; what is not given stays, "" matches nothing. Without options, show the plan.\n\n'
        "An expression goes on until the next option; quotes around it are optional:\n"
        "  %graft filter --b2t search('attn', name) and layer < 4 --keep \"step == 0\"",
        raw="filters",
    )
    filter_.add_argument("--b2t", metavar="EXPR", help="taps grafted from the baseline into the target")
    filter_.add_argument("--t2b", metavar="EXPR", help="taps grafted from the target into the baseline")
    filter_.add_argument("--compare", metavar="EXPR", help="taps measured, and left alone")
    filter_.add_argument("--keep", metavar="EXPR", help="taps whose pair of tensors is held for plots")

    transform = command("transform", "Use a function of the notebook, or a dotted path, as the transform.")
    transform.add_argument("name", help="function or dotted path; `default` goes back to the default transform")

    frame = command("frame", "Show the rows of the newest run as a frame.")
    frame.add_argument("--all", action="store_true", help="of all runs")
    frame.add_argument("-o", "--out", help="name of the variable that gets the frame")

    plot = command("plot", "Plot the newest run tap by tap, or one tap.")
    plot.add_argument("tag", nargs="?", metavar="TAG", help="a tap's name")
    plot.add_argument(
        "--kind",
        choices=("divergence", "history", "heatmap", "histogram", "scatter", "ranks"),
        help="default: divergence, or history when a tap is given; heatmap, histogram and scatter need a kept pair",
    )
    plot.add_argument("--noise-floor", type=float, help="draws the line below which differences are rounding")
    return {
        name: Command(c.parser, c.raw, c.summary, tuple(o for a in c.parser._actions for o in a.option_strings))
        for name, c in found.items()
    }


COMMANDS = _commands()


def overview() -> str:
    """All subcommands, for ``%graft`` alone and for mistakes."""
    lines = [f"  %graft {name:<10} {command.summary.splitlines()[0]}" for name, command in COMMANDS.items()]
    lines += [
        "  %%graft baseline   run this cell on the baseline's ranks (also: target, both, target[1])",
        "  %%graft transform  the cell is the transform",
        "`%graft NAME -h` tells more about one of them.",
    ]
    return "\n".join(lines)


def parse(line: str) -> tuple[str, argparse.Namespace]:
    """The subcommand and its arguments. Raises UsageError for mistakes, :class:`HelpShown` when help was asked for."""
    name, _, rest = line.strip().partition(" ")
    if name in ("", "-h", "--help"):
        raise HelpShown(overview())
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"%graft: there is no {name!r}\n{overview()}")
    if command.raw == "filters":
        return name, _parse_filters(command, rest)
    if command.raw == "EXPR":
        return name, _parse_expression(command, rest)
    return name, command.parser.parse_args(_split(name, rest))


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"%graft {name}: {error}") from None


def _parse_filters(command: Command, rest: str) -> argparse.Namespace:
    pieces = re.split(r"(?:^|\s)(--?[a-zA-Z][\w-]*)(?=\s|=|$)", rest)
    if pieces[0].strip():
        command.parser.error(f"an expression needs its option first: {pieces[0].strip()!r}")
    given: list[str] = []
    for option, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if option in FILTER_OPTIONS:
            given.append(f"{option}={_unquoted(text.strip().removeprefix('=').strip())}")
        else:
            given.append(option)
    return command.parser.parse_args(given)


def _unquoted(text: str) -> str:
    """Without quotes around the whole, which belong to the command line and not to the expression."""
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" and text[0] not in text[1:-1]:
        return text[1:-1]
    return text


def _parse_expression(command: Command, rest: str) -> argparse.Namespace:
    text = rest.strip()
    before = re.match(r"(?:-h|--help)(?:\s|$)|(?:-o|--out)(?:\s+|=)(?P<out>\S+)(?:\s+|$)", text)
    after = re.search(r"\s(?:-o|--out)(?:\s+|=)(?P<out>\w+)$", text)
    words: list[str] = []
    if before is not None:
        words, text = _split("run", before.group()), text[before.end() :]
    elif after is not None:
        words, text = ["-o", after["out"]], text[: after.start()]
    arguments = command.parser.parse_args(words)
    if not text.strip():
        command.parser.error("an expression is needed, such as `%graft run forward(batch)`")
    if text.lstrip().startswith("-o"):
        command.parser.error("-o needs a name")
    arguments.expression = text.strip()
    return arguments
