"""The subcommands and options of ``%graft``: one table for parsing, help and completion.

Expressions are taken from the line unchanged, so that their quotes and brackets survive.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import keyword
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from IPython.core.error import UsageError

from graftlab.base import limits
from graftlab.base.text import positive
from graftlab.plan.plan import FILTER_MEANINGS

FILTER_OPTIONS = tuple(f"--{name}" for name in FILTER_MEANINGS)
CELL_TARGETS = ("baseline", "target", "both", "transform")

PLOT_KINDS: dict[str, tuple[str, ...]] = {
    "divergence": ("--step", "--noise-floor"),
    "over_steps": ("--steps", "--noise-floor"),
    "history": ("TAP",),
    "ranks": ("TAP",),
    "heatmap": ("TAP", "--tags", "--dims"),
    "histogram": ("TAP", "--tags"),
    "scatter": ("TAP", "--tags"),
}
"""The kinds of ``%graft plot``, each with the arguments that it takes; one that takes a tap needs it."""

_STRING = r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\""""
# The name of an option, unless it is inside a string of an expression.
_STRING_OR_OPTION = re.compile(rf"{_STRING}|(?:^|(?<=\s))(?P<option>--[a-zA-Z][\w-]*|-h)(?=\s|=|$)", re.DOTALL)


class HelpRequest(Exception):
    """Raised when the user asks for help; ``text`` is the help."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _MagicParser(argparse.ArgumentParser):
    """An argparse parser that raises where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}\n{self.format_usage().strip()}\nsee `{self.prog} -h`")

    def print_help(self, file: Any = None) -> NoReturn:
        raise HelpRequest(self.format_help())


@dataclass(frozen=True)
class Command:
    """One subcommand. ``raw`` names the part of the line that is kept unchanged.

    Completion offers ``options``, and ``choices``, the values that an option can have.
    """

    parser: argparse.ArgumentParser
    raw: str | None = None
    summary: str = ""
    options: tuple[str, ...] = field(default=())
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)


def _add_ranks(command: argparse.ArgumentParser) -> None:
    command.add_argument("-b", "--baseline", type=positive, metavar="N", default=1, help="baseline ranks (default 1)")
    command.add_argument("-t", "--target", type=positive, metavar="N", default=1, help="target ranks (default 1)")


def _add_out(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-o",
        "--out",
        type=_variable,
        metavar="NAME",
        default="session",
        help="assign the session to this (default session)",
    )


def _add_keep_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--keep-rows",
        type=positive,
        metavar="N",
        help="how many rows to keep in memory for the next frame; larger frames are read from disk (default all)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, not {text!r}")
    return seconds


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = -1.0
    if not 0 <= amount < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return amount


def _cluster(text: str) -> str:
    """Return the address of a Ray cluster as ``ray.init`` takes it."""
    if not text.startswith("ray:") or text in ("ray:", "ray://"):
        raise argparse.ArgumentTypeError(f"expected ray:auto, ray:HOST:PORT or ray://HOST:PORT, not {text!r}")
    return text if text.startswith("ray://") else text.removeprefix("ray:")


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = ("", ":", "") if text == "all" else text.partition(":")
    if not colon or not all(part.strip().isdecimal() or not part.strip() for part in (first, last)):
        raise argparse.ArgumentTypeError(f"expected steps A:B, such as 0:100 or 50:, or `all`, not {text!r}")
    return (int(first) if first.strip() else None, int(last) if last.strip() else None)


def _tag(text: str) -> tuple[str, Any]:
    tag, equals, value = text.partition("=")
    if not equals or not tag.isidentifier():
        raise argparse.ArgumentTypeError(f"expected TAG=VALUE, such as layer=3, not {text!r}")
    try:
        return tag, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        # A text: its quotes, if any, were removed when the line was split.
        return tag, value


def _dims(text: str) -> tuple[int, ...]:
    try:
        dims = tuple(int(part) for part in text.split(","))
    except ValueError:
        dims = ()
    if len(dims) not in (1, 2):
        raise argparse.ArgumentTypeError(f"expected one or two dimensions R,C, such as 0,2, not {text!r}")
    return dims


def _variable(text: str) -> str:
    if not text.isidentifier() or keyword.iskeyword(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid variable name")
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
        parser.add_argument("-o", "--out", type=_variable, metavar="NAME", help=f"assign {result} to this variable")
        return parser

    up = command("up", "Start the ranks and assign the session to the variable `session`.")
    _add_ranks(up)
    up.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPUs, or cpu without one)")
    up.add_argument("--backend", help="collective backend of each side's process group (default: nccl or gloo)")
    up.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"time limit for starting, and for each wait in a tap or a collective (default {limits.TIMEOUT:g})",
    )
    up.add_argument(
        "--start-method", choices=("forkserver", "spawn"), default="forkserver", help="how ranks are started"
    )
    _add_out(up)
    _add_keep_rows(up)
    up.add_argument(
        "--on",
        type=_cluster,
        metavar="ray:ADDRESS",
        help="start the ranks on a Ray cluster: ray:auto, ray:HOST:PORT or ray://HOST:PORT (default: on this machine)",
    )
    up.add_argument(
        "--gpus-per-rank",
        type=_amount,
        metavar="N",
        help="GPUs for each rank on a cluster (default 1); with 0, each rank gets one CPU",
    )
    up.add_argument("--replace", action="store_true", help="close the open session and its ranks first")

    listen = command("listen", "Wait for jobs that another launcher starts, and show how they join.")
    _add_ranks(listen)
    listen.add_argument("--folder", help="folder for rows, in which jobs find this session (default: a new one)")
    listen.add_argument("--append", action="store_true", help="continue in a folder with rows, and take over its jobs")
    listen.add_argument(
        "--address",
        metavar="tcp://HOST:PORT",
        help="listen there too, for jobs on other machines; they need the printed token",
    )
    listen.add_argument(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"how long to wait for jobs; a tap waits half as long (default {limits.TIMEOUT:g})",
    )
    _add_keep_rows(listen)
    _add_out(listen)

    command("status", "Show what each rank is doing now.")
    command("stacks", "Show the Python stack of every thread of each rank.")
    command("interrupt", "Raise KeyboardInterrupt in the code that the ranks run; the ranks stay alive.")
    command(
        "restart",
        "Replace the ranks with new ones under the same plan; their variables are lost, and nothing is rerun.",
    )
    debug = command(
        "debug",
        "Inspect the last failure on a rank, at a prompt or with one pdb command.\n\n"
        "Commands: w (stack), u and d (up and down), l (source), p EXPR, pp EXPR, a (arguments), or an expression.",
        raw="COMMAND",
        usage="%%graft debug [-h] [RANK [COMMAND]]",
    )
    debug.add_argument("rank", nargs="?", metavar="RANK", help="such as target[1] (default: the first that failed)")
    command("down", "End the ranks; rows and logs stay on disk.")

    log = command("log", "Show the end of a rank's log.")
    log.add_argument(
        "rank", nargs="?", metavar="RANK", default="both", help="baseline, target, both (default), or such as target[1]"
    )
    log.add_argument("-n", "--lines", type=positive, metavar="N", default=50, help="number of lines (default 50)")

    expression(
        "run",
        "Evaluate an expression on both sides as one step, with the names that %%graft cells defined.",
        "the Run",
    )
    expression(
        "verdict",
        "Name the computations that differ on the target, and tell causes from inherited differences.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, the\n"
        "verdict judges jobs in the steps that they run anyway.",
        "the Verdict",
        raw="[EXPR]",
    )
    expression(
        "lines",
        "Show the lines of source at which a tap's error arises.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, they\n"
        "evaluate the expression of the newest run, and jobs are traced in the steps that they run anyway.",
        "the lines",
        more="TAP ",
        raw="[EXPR]",
    )
    expression(
        "compare",
        "Match taps by value if their names differ, name the computations that differ, and plot the errors.\n\n"
        "Both sides evaluate the expression several times, each time from the same state of the models that it calls.\n"
        "The models need no taps: their modules are tapped meanwhile, unless the expression has taps itself.",
        "the comparison",
    )
    compiled = expression(
        "compiled",
        "Tell whether torch.compile changes the result of an expression, and where.\n\n"
        "The baseline evaluates it eagerly, the target compiled, several times each, so it must be repeatable.",
        "the comparison",
        more="[--backend NAME] [--fullgraph] [--grad-mode MODE] ",
    )
    compiled.add_argument("--backend", metavar="NAME", help="torch.compile's backend (default inductor)")
    compiled.add_argument(
        "--grad-mode",
        choices=("grad", "no_grad", "inference_mode"),
        help="the gradient mode to compile for (default: the mode of the call)",
    )
    compiled.add_argument("--fullgraph", action="store_true", help="fail on a graph break")
    expression(
        "match",
        "Pair the taps of both sides by their values, whatever their names.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, the taps\n"
        "of jobs are matched in the steps that they run anyway.",
        "the proposal",
        raw="[EXPR]",
    )
    expression(
        "check",
        "Find tensors on which the target's ranks should agree and do not; only the target evaluates the expression.",
        "the Check",
    )

    replay = command(
        "replay",
        "Send recorded requests to both sides, one batch per step, and list those that diverge, worst first.\n\n"
        "Each side's function takes a list of requests and returns one output for each. It is defined in the\n"
        "notebook, or in that side's %%graft cells.",
    )
    replay.add_argument("file", metavar="FILE", help="file that a RequestDumper wrote, or its folder")
    replay.add_argument(
        "--baseline", metavar="NAME", default="generate", help="the baseline's function (default generate)"
    )
    replay.add_argument("--target", metavar="NAME", default="generate", help="the target's function (default generate)")
    replay.add_argument("--batch-size", type=positive, metavar="N", default=1, help="requests per step (default 1)")
    replay.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    replay.add_argument("-o", "--out", type=_variable, metavar="NAME", help="assign the Replay to this variable")

    filter_ = command(
        "filter",
        'Edit the plan\'s filters; the others stay, "" matches nothing. Without options, show the plan.\n\n'
        "An expression ends at the next option; quotes around it are optional:\n"
        "  %graft filter --b2t search('attn', name) and layer < 4 --keep \"step == 0\"",
        raw="filters",
    )
    for filter_name, meaning in FILTER_MEANINGS.items():
        filter_.add_argument(f"--{filter_name}", metavar="EXPR", help=f"taps {meaning}")

    transform = command(
        "transform",
        "Use a function of the notebook, or a dotted path, as the transform.\n\n"
        "It applies to the taps that the plan grafts, or with --where to the taps that the filter matches, including\n"
        "compared ones. The expression ends with the line; quotes around it are optional:\n"
        "  %graft transform unfuse --where name == 'qkv'",
        raw="where",
    )
    transform.add_argument(
        "name", metavar="NAME", help="function or dotted path; `default` restores the default transform"
    )
    transform.add_argument("--where", metavar="EXPR", help="filter of the taps to transform")

    rename = command(
        "rename",
        "Rewrite the names of one side's taps by a regular expression before pairing.\n\n"
        "The rule is added to the current ones; the first that matches a name applies. Without arguments, show them.",
    )
    rename.add_argument("side", nargs="?", choices=("baseline", "target"), help="side whose names are rewritten")
    rename.add_argument("pattern", nargs="?", metavar="REGEX", help="pattern to replace, as in re.sub")
    rename.add_argument("replacement", nargs="?", default="", metavar="TEXT", help='replacement (default "")')
    rename.add_argument("--clear", action="store_true", help="remove the current rules first")

    command("undo", "Take back the last edit of the plan, of any of its parts, and show what that changes.")
    command("redo", "Make the edit again that `%graft undo` took back, and show what that changes.")

    frame = command("frame", "Show the rows of the newest run that has rows, as a pandas frame.")
    frame.add_argument("--all", action="store_true", help="show the rows of all runs")
    frame.add_argument("-o", "--out", type=_variable, metavar="NAME", help="assign the frame to this variable")

    plot = command("plot", "Plot the taps of the newest run: of its last step, of all its steps, or one tap.")
    plot.add_argument("tap", nargs="?", metavar="TAP", help="the name of one tap")
    plot.add_argument(
        "--kind",
        choices=tuple(PLOT_KINDS),
        help="default: divergence, or over_steps with --steps, or history with a tap, or heatmap with a tap and --tags "
        "or --dims; heatmap, histogram and scatter "
        "need a kept pair",
    )
    plot.add_argument(
        "--verdict",
        action="store_true",
        help="draw the newest verdict; with a tap that it names, where the tensors of that tap differ",
    )
    plot.add_argument("--step", type=int, metavar="N", help="divergence: this step instead of the last")
    plot.add_argument(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="over_steps: steps from A up to but excluding B; `all` for every step",
    )
    plot.add_argument(
        "--noise-floor",
        type=_amount,
        metavar="X",
        help="divergence and over_steps: differences up to X count as rounding",
    )
    plot.add_argument(
        "--tags",
        nargs="+",
        type=_tag,
        metavar="TAG=VALUE",
        help="heatmap, histogram and scatter: which pair of the tap, such as layer=3 step=0 rank=1",
    )
    plot.add_argument(
        "--dims",
        type=_dims,
        metavar="R,C",
        help="heatmap, and --verdict with a tap: the dimensions to show as rows and columns (default the last two)",
    )
    report = command("report", "Write a report of the session as one HTML page, to attach to an issue.")
    report.add_argument("file", nargs="?", metavar="FILE", default="report.html", help="path (default report.html)")
    report.add_argument("--tensors", action="store_true", help="add pictures of the kept pairs, which show values")
    command("ui", "Show the dashboard: ranks and taps live, the editors of the plan, and the logs.")
    return {name: _with_completion(command) for name, command in found.items()}


def _with_completion(command: Command) -> Command:
    options = {option: action for action in command.parser._actions for option in action.option_strings}
    choices = {option: tuple(action.choices) for option, action in options.items() if action.choices}
    return replace(command, options=tuple(options), choices=choices)


COMMANDS = _commands()


GROUPS: dict[str, tuple[str, ...]] = {
    "Start and end": ("up", "listen", "restart", "down"),
    "Compare": ("run", "compare", "verdict", "lines", "check", "match", "compiled", "replay"),
    "The plan": ("filter", "transform", "rename", "undo", "redo"),
    "Look": ("ui", "frame", "plot", "report"),
    "The ranks": ("status", "log", "stacks", "interrupt", "debug"),
}
"""The subcommands by what they are for, as the overview lists them."""


def overview() -> str:
    """All subcommands in groups, shown by ``%graft`` alone, ``%graft?`` and after mistakes."""
    lines = []
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  %graft {name:<10} {COMMANDS[name].summary.splitlines()[0]}" for name in names)]
    lines += [
        "Cells:",
        "  %%graft baseline   Run this cell on the baseline's ranks (also: target, both, target[1]).",
        "  %%graft transform  Use this cell as the transform (also: --where EXPR).",
        "`%graft NAME -h` shows the options of one command.",
    ]
    return "\n".join(lines)


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
        hint = "".join(f"; did you mean {close!r}?" for close in difflib.get_close_matches(name, COMMANDS, n=1))
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
