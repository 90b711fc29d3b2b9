"""The words of ``%graft``: one table of subcommands and options that parsing, help and completion all read.

Expressions are taken from the line as they stand, so that their quotes and brackets survive.
"""

from __future__ import annotations

import argparse
import difflib
import keyword
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from IPython.core.error import UsageError

from graftlab.base import limits
from graftlab.plan.plan import FILTER_MEANINGS

FILTER_OPTIONS = tuple(f"--{name}" for name in FILTER_MEANINGS)
CELL_TARGETS = ("baseline", "target", "both", "transform")

_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# An option's name, unless it stands in a string of an expression.
_STRING_OR_OPTION = re.compile(rf"{_STRING}|(?:^|(?<=\s))(?P<option>--[a-zA-Z][\w-]*|-h)(?=\s|=|$)", re.DOTALL)


class HelpShown(Exception):
    """The user asked for help; ``text`` is it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _MagicParser(argparse.ArgumentParser):
    """An argparse parser that raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().strip()}\n`{self.prog} -h` tells more")

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpShown(self.format_help())


@dataclass(frozen=True)
class Command:
    """One subcommand. ``raw`` names the part of the line that is kept as it stands.

    ``options`` and ``choices``, the values that an option can have, are what completion offers.
    """

    parser: argparse.ArgumentParser
    raw: str | None = None
    summary: str = ""
    options: tuple[str, ...] = field(default=())
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"seconds, more than 0, are needed, not {text!r}")
    return seconds


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = ("", ":", "") if text == "all" else text.partition(":")
    if not colon or not all(part.strip().isdecimal() or not part.strip() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"steps are A:B, such as 0:100 or 50:, or `all`, not {text!r}")
    return (int(first) if first.strip() else None, int(last) if last.strip() else None)


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name that a variable can have")
    return text


def _commands() -> dict[str, Command]:
    found: dict[str, Command] = {}

    def command(name: str, summary: str, raw: str | None = None, usage: str | None = None) -> argparse.ArgumentParser:
        parser = _MagicParser(
            prog=f"%graft {name}",
            usage=usage,
            description=summary,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        found[name] = Command(parser, raw, summary)
        return parser

    def expression(
        name: str, summary: str, result: str, more: str = "", raw: Literal["EXPR", "[EXPR]"] = "EXPR"
    ) -> argparse.ArgumentParser:
        parser = command(name, summary, raw=raw, usage=f"%%graft {name} [-h] [-o NAME] {more}{raw}")
        parser.add_argument(
            "-o", "--out", type=_variable, metavar="NAME", help=f"name of the variable that gets {result}"
        )
        return parser

    up = command("up", "Start the ranks; the session is also the notebook's variable `session`.")
    up.add_argument("-b", "--baseline", type=_count, metavar="N", default=1, help="baseline ranks (default 1)")
    up.add_argument("-t", "--target", type=_count, metavar="N", default=1, help="target ranks (default 1)")
    up.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPUs if there are any)")
    up.add_argument("--backend", help="collective backend of each side's group (default: nccl or gloo)")
    up.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"of the start, and of every wait of a tap or a collective (default {limits.TIMEOUT:g})",
    )
    up.add_argument("--start-method", choices=("forkserver", "spawn"), default="forkserver", help="of the ranks")
    up.add_argument(
        "-o", "--out", type=_variable, metavar="NAME", default="session", help="name of the session's variable"
    )
    up.add_argument("--replace", action="store_true", help="close the session that is open, with all that it holds")

    listen = command(
        "listen", "Wait for jobs that something else starts, and show how; the session is also the variable `session`."
    )
    listen.add_argument("-b", "--baseline", type=_count, metavar="N", default=1, help="baseline ranks (default 1)")
    listen.add_argument("-t", "--target", type=_count, metavar="N", default=1, help="target ranks (default 1)")
    listen.add_argument("--folder", help="where rows go and jobs look for this session (default: a new one)")
    listen.add_argument("--append", action="store_true", help="go on in a folder that has rows, and take over its jobs")
    listen.add_argument(
        "--address",
        metavar="tcp://HOST:PORT",
        help="listen there too, for jobs on other machines; they need the token that is printed",
    )
    listen.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"twice what every wait of a tap may take (default {limits.TIMEOUT:g})",
    )
    listen.add_argument(
        "-o", "--out", type=_variable, metavar="NAME", default="session", help="name of the session's variable"
    )

    command("status", "Show where each rank is at this moment.")
    command("stacks", "Show where each rank's threads are in the code.")
    command("interrupt", "Raise KeyboardInterrupt in the code that the ranks run; the ranks go on.")
    command(
        "restart", "Start the same ranks anew, with the same plan; what was on them is gone, and nothing is run again."
    )
    debug = command(
        "debug",
        "Look into the frames of the last failure on a rank, at a prompt, or with one command of pdb.\n\n"
        "Commands are w (the frames), u and d (up and down), l (the source), p EXPR, pp EXPR, a, or an expression.",
        raw="COMMAND",
        usage="%%graft debug [-h] [RANK [COMMAND]]",
    )
    debug.add_argument("rank", nargs="?", metavar="RANK", help="such as target[1]; default: the first that failed")
    command("down", "End the ranks; rows and logs stay.")

    log = command("log", "Show the end of a rank's log.")
    log.add_argument("rank", nargs="?", default="both", help="baseline, target, both, or one such as target[1]")
    log.add_argument("-n", "--lines", type=_count, metavar="N", default=50, help="how many lines (default 50)")

    expression(
        "run",
        "Evaluate an expression where the %%graft cells of each side ran, on both sides as one step.",
        "the Run",
    )
    expression(
        "verdict",
        "Tell which computation differs on the target, whether it is the cause, and what is only inherited.\n\n"
        "The expression is evaluated several times on both sides, and has to be repeatable. Jobs of a session that\n"
        "listens are judged in the steps that they make anyway, without an expression.",
        "the Verdict",
        raw="[EXPR]",
    )
    compiled = expression(
        "compiled",
        "Tell whether an expression computes the same when torch.compile compiles it, and where not.\n\n"
        "The baseline evaluates it as it is, the target compiled; several times, so it has to be repeatable.",
        "the comparison",
        more="[--backend NAME] [--fullgraph] ",
    )
    compiled.add_argument("--backend", metavar="NAME", help="torch.compile's backend (default inductor)")
    compiled.add_argument("--fullgraph", action="store_true", help="fail where the graph would break")
    expression(
        "match",
        "Find out by value which tap of the target is which of the baseline, whatever their names.\n\n"
        "The expression is evaluated several times on both sides, and has to be repeatable.",
        "the proposal",
    )
    expression(
        "check",
        "Tell what the target's ranks should agree on, and do not; the expression is evaluated on them alone.",
        "the Check",
    )

    replay = command(
        "replay",
        "Feed recorded requests to both sides, a step a batch, and show which diverge, the worst first.\n\n"
        "Both sides' functions get a list of requests and return as many outputs. They are functions of the\n"
        "notebook, or of the %%graft cells of their side.",
    )
    replay.add_argument("file", metavar="FILE", help="what a RequestDumper wrote, or the folder of it")
    replay.add_argument(
        "--baseline", metavar="NAME", default="generate", help="the baseline's function (default generate)"
    )
    replay.add_argument("--target", metavar="NAME", default="generate", help="the target's function (default generate)")
    replay.add_argument("--batch-size", type=_count, metavar="N", default=1, help="requests a step (default 1)")
    replay.add_argument("--limit", type=_count, metavar="N", help="only the first N requests")
    replay.add_argument("-o", "--out", type=_variable, metavar="NAME", help="name of the variable that gets the Replay")

    filter_ = command(
        "filter",
        'Edit the plan\'s filters; what is not given stays, "" matches nothing. Without options, show the plan.\n\n'
        "An expression goes on until the next option; quotes around it are optional:\n"
        "  %graft filter --b2t search('attn', name) and layer < 4 --keep \"step == 0\"",
        raw="filters",
    )
    for filter_name, meaning in FILTER_MEANINGS.items():
        filter_.add_argument(f"--{filter_name}", metavar="EXPR", help=f"taps {meaning}")

    transform = command(
        "transform",
        "Use a function of the notebook, or a dotted path, as the transform.\n\n"
        "It applies at the taps that the plan grafts; with --where at those that the filter matches, compared ones\n"
        "included. The expression goes on to the end of the line; quotes around it are optional:\n"
        "  %graft transform unfuse --where name == 'qkv'",
        raw="where",
    )
    transform.add_argument("name", help="function or dotted path; `default` goes back to the default transform")
    transform.add_argument("--where", metavar="EXPR", help="filter: the taps that it is for")

    rename = command(
        "rename",
        "Rewrite the names of one side's taps before they are paired, by a regular expression.\n\n"
        "A rule is added to those in force; the first that matches a name counts. Without arguments, show the rules.",
    )
    rename.add_argument("side", nargs="?", choices=("baseline", "target"), help="whose names")
    rename.add_argument("pattern", nargs="?", metavar="REGEX", help="what is replaced, as by re.sub")
    rename.add_argument("replacement", nargs="?", default="", metavar="TEXT", help='default: "", which drops it')
    rename.add_argument("--clear", action="store_true", help="drop the rules in force first")

    frame = command("frame", "Show the rows of the newest run that has any, as a frame.")
    frame.add_argument("--all", action="store_true", help="of all runs")
    frame.add_argument("-o", "--out", type=_variable, metavar="NAME", help="name of the variable that gets the frame")

    plot = command("plot", "Plot the last step of the newest run tap by tap, all its steps, or one tap.")
    plot.add_argument("tag", nargs="?", metavar="TAG", help="a tap's name")
    plot.add_argument(
        "--kind",
        choices=("divergence", "over_steps", "history", "heatmap", "histogram", "scatter", "ranks"),
        help="default: divergence, or history when a tap is given; heatmap, histogram and scatter need a kept pair",
    )
    plot.add_argument("--step", type=int, metavar="N", help="this step in place of the last one")
    plot.add_argument(
        "--steps", type=_steps, metavar="A:B", help="taps over these steps, B left out, as a heat map; `all` for all"
    )
    plot.add_argument("--noise-floor", type=float, help="draws the line below which differences are rounding")
    report = command("report", "Write what the session did and found as one page, to attach to an issue.")
    report.add_argument("file", nargs="?", metavar="FILE", default="report.html", help="default: report.html")
    report.add_argument("--tensors", action="store_true", help="with pictures of the kept pairs, which show values")
    command("ui", "Show the dashboard: every rank and tap live, the plan's editors, and the logs.")
    return {name: _with_completion(command) for name, command in found.items()}


def _with_completion(command: Command) -> Command:
    options = {option: action for action in command.parser._actions for option in action.option_strings}
    choices = {option: tuple(action.choices) for option, action in options.items() if action.choices}
    return replace(command, options=tuple(options), choices=choices)


COMMANDS = _commands()


def overview() -> str:
    """All subcommands, for ``%graft`` alone and for mistakes."""
    lines = [f"  %graft {name:<10} {command.summary.splitlines()[0]}" for name, command in COMMANDS.items()]
    lines += [
        "  %%graft baseline   run this cell on the baseline's ranks (also: target, both, target[1])",
        "  %%graft transform  the cell is the transform (also: --where EXPR)",
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
        if name.partition("[")[0] in CELL_TARGETS:
            raise UsageError(f"%graft: write %%graft {name}, with two %, on the first line of a cell")
        hint = "".join(f"; did you mean {close!r}?" for close in difflib.get_close_matches(name, COMMANDS, n=1))
        raise UsageError(f"%graft: there is no {name!r}{hint}\n{overview()}")
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
    return name, command.parser.parse_args(_split(name, rest))


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
            command.parser.error(f'{option} needs an expression; "" is the one that matches nothing')
    return command.parser.parse_args(given)


def split_where(rest: str) -> tuple[str, list[str]]:
    """What stands before ``--where``; and the option with its expression, as a word for argparse, if it is there."""
    found = next((found for found in _STRING_OR_OPTION.finditer(rest) if found["option"] == "--where"), None)
    if found is None:
        return rest, []
    text = _unquoted(rest[found.end() :].strip().removeprefix("=").strip())
    if not text.strip():
        raise UsageError("%graft transform: --where needs a filter; without it the plan's grafted taps are meant")
    return rest[: found.start()], [f"--where={text}"]


def _unquoted(text: str) -> str:
    """The text without quotes around all of it: those belong to the command line, not to the expression."""
    if re.fullmatch(_STRING, text, re.DOTALL):
        return text[1:-1].replace(f"\\{text[0]}", text[0])
    return text


# What may stand before an expression, which may itself begin with a minus sign.
_OPTION_BEFORE = re.compile(r"(?:-h|--help|--fullgraph)(?:\s+|$)|(?:-o|--out|--backend)(?:\s+|=)\S+(?:\s+|$)")


def _parse_expression(command: Command, rest: str) -> argparse.Namespace:
    text = rest.strip()
    after = re.search(r"\s(?:-o|--out)(?:\s+|=)(?P<out>\w+)$", text)
    words: list[str] = []
    while (before := _OPTION_BEFORE.match(text)) is not None:
        words, text = words + _split("run", before.group()), text[before.end() :]
    if not words and after is not None:
        words, text = ["-o", after["out"]], text[: after.start()]
    arguments = command.parser.parse_args(words)
    if not text.strip() and command.raw == "EXPR":
        command.parser.error(f"an expression is needed, such as `{command.parser.prog} forward(batch)`")
    if re.match(r"-o\b|--\w", text.lstrip()):
        # Python would read two minus signs, and complain about something else.
        command.parser.parse_args(text.split()[:1])
    arguments.expression = text.strip()
    return arguments
