"""The subcommands of ``%graft`` with their options: one table for parsing, help and completion."""

from __future__ import annotations

import argparse
import ast
import keyword
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from IPython.core.error import UsageError

from graftlab.base import limits
from graftlab.base.text import positive
from graftlab.plan.plan import FILTER_MEANINGS

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

    name: str
    parser: argparse.ArgumentParser
    raw: str | None
    summary: str

    def add(self, *names: str, **settings: Any) -> None:
        """Add an argument; see :meth:`argparse.ArgumentParser.add_argument`."""
        self.parser.add_argument(*names, **settings)

    @property
    def options(self) -> tuple[str, ...]:
        return tuple(option for action in self.parser._actions for option in action.option_strings)

    @property
    def choices(self) -> dict[str, tuple[str, ...]]:
        chosen = [action for action in self.parser._actions if action.choices]
        return {option: tuple(action.choices or ()) for action in chosen for option in action.option_strings}


def _add_ranks(command: Command) -> None:
    command.add("-b", "--baseline", type=positive, metavar="N", default=1, help="baseline ranks (default 1)")
    command.add("-t", "--target", type=positive, metavar="N", default=1, help="target ranks (default 1)")


def _add_out(command: Command) -> None:
    command.add(
        "-o",
        "--out",
        type=_variable,
        metavar="NAME",
        default="session",
        help="assign the session to this (default session)",
    )


def _add_keep_rows(command: Command) -> None:
    command.add(
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


def _command(name: str, summary: str, raw: str | None = None, usage: str | None = None) -> Command:
    parser = _MagicParser(
        prog=f"%graft {name}",
        usage=usage,
        description=summary,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return Command(name, parser, raw, summary)


def _expression(
    name: str, summary: str, result: str, more: str = "", raw: Literal["EXPR", "[EXPR]"] = "EXPR"
) -> Command:
    made = _command(name, summary, raw=raw, usage=f"%%graft {name} [-h] [-o NAME] {more}{raw}")
    made.add("-o", "--out", type=_variable, metavar="NAME", help=f"assign {result} to this variable")
    return made


def _start_and_end() -> Iterator[Command]:
    up = _command("up", "Start the ranks and assign the session to the variable `session`.")
    _add_ranks(up)
    up.add("--device", help="cpu, cuda or cuda:N (default: the GPUs, or cpu without one)")
    up.add("--backend", help="collective backend of each side's process group (default: nccl or gloo)")
    up.add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"time limit for starting, and for each wait in a tap or a collective (default {limits.TIMEOUT:g})",
    )
    up.add("--start-method", choices=("forkserver", "spawn"), default="forkserver", help="how ranks are started")
    _add_out(up)
    _add_keep_rows(up)
    up.add(
        "--on",
        type=_cluster,
        metavar="ray:ADDRESS",
        help="start the ranks on a Ray cluster: ray:auto, ray:HOST:PORT or ray://HOST:PORT (default: on this machine)",
    )
    up.add(
        "--gpus-per-rank",
        type=_amount,
        metavar="N",
        help="GPUs for each rank on a cluster (default 1); with 0, each rank gets one CPU",
    )
    up.add("--replace", action="store_true", help="close the open session and its ranks first")
    yield up

    listen = _command("listen", "Wait for jobs that another launcher starts, and show how they join.")
    _add_ranks(listen)
    listen.add("--folder", help="folder for rows, in which jobs find this session (default: a new one)")
    listen.add("--append", action="store_true", help="continue in a folder with rows, and take over its jobs")
    listen.add(
        "--address",
        metavar="tcp://HOST:PORT",
        help="listen there too, for jobs on other machines; they need the printed token",
    )
    listen.add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        default=limits.TIMEOUT,
        help=f"how long to wait for jobs; a tap waits half as long (default {limits.TIMEOUT:g})",
    )
    _add_keep_rows(listen)
    _add_out(listen)
    yield listen

    yield _command(
        "restart",
        "Replace the ranks with new ones under the same plan; their variables are lost, and nothing is rerun.",
    )
    yield _command("down", "End the ranks; rows and logs stay on disk.")


def _compare() -> Iterator[Command]:
    yield _expression(
        "run",
        "Evaluate an expression on both sides as one step, with the names that %%graft cells defined.",
        "the Run",
    )
    yield _expression(
        "compare",
        "Match taps by value if their names differ, name the computations that differ, and plot the errors.\n\n"
        "Both sides evaluate the expression several times, each time from the same state of the models that it calls.\n"
        "The models need no taps: their modules are tapped meanwhile, unless the expression has taps itself.",
        "the comparison",
    )
    yield _expression(
        "verdict",
        "Name the computations that differ on the target, and tell causes from inherited differences.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, the\n"
        "verdict judges jobs in the steps that they run anyway.",
        "the Verdict",
        raw="[EXPR]",
    )
    yield _expression(
        "lines",
        "Show the lines of source at which a tap's error arises.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, they\n"
        "evaluate the newest that both have evaluated, and jobs are traced in the steps that they run anyway.",
        "the lines",
        more="TAP ",
        raw="[EXPR]",
    )
    yield _expression(
        "check",
        "Find tensors on which the target's ranks should agree and do not; only the target evaluates the expression.",
        "the Check",
    )
    yield _expression(
        "match",
        "Pair the taps of both sides by their values, whatever their names.\n\n"
        "Both sides evaluate the expression several times, so it must be repeatable. Without an expression, the taps\n"
        "of jobs are matched in the steps that they run anyway.",
        "the proposal",
        raw="[EXPR]",
    )

    compiled = _expression(
        "compiled",
        "Tell whether torch.compile changes the result of an expression, and where.\n\n"
        "The baseline evaluates it eagerly, the target compiled, several times each, so it must be repeatable.",
        "the comparison",
        more="[--backend NAME] [--fullgraph] [--grad-mode MODE] ",
    )
    compiled.add("--backend", metavar="NAME", help="torch.compile's backend (default inductor)")
    compiled.add(
        "--grad-mode",
        choices=("grad", "no_grad", "inference_mode"),
        help="the gradient mode to compile for (default: the mode of the call)",
    )
    compiled.add("--fullgraph", action="store_true", help="fail on a graph break")
    yield compiled

    replay = _command(
        "replay",
        "Send recorded requests to both sides, one batch per step, and list those that diverge, worst first.\n\n"
        "Each side's function takes a list of requests and returns one output for each. It is defined in the\n"
        "notebook, or in that side's %%graft cells.",
    )
    replay.add("file", metavar="FILE", help="file that a RequestDumper wrote, or its folder")
    replay.add("--baseline", metavar="NAME", default="generate", help="the baseline's function (default generate)")
    replay.add("--target", metavar="NAME", default="generate", help="the target's function (default generate)")
    replay.add("--batch-size", type=positive, metavar="N", default=1, help="requests per step (default 1)")
    replay.add("--limit", type=positive, metavar="N", help="only the first N requests")
    replay.add("-o", "--out", type=_variable, metavar="NAME", help="assign the Replay to this variable")
    yield replay


def _plan() -> Iterator[Command]:
    filter_ = _command(
        "filter",
        'Edit the plan\'s filters; the others stay, "" matches nothing. Without options, show the plan.\n\n'
        "An expression ends at the next option; quotes around it are optional:\n"
        "  %graft filter --b2t search('attn', name) and layer < 4 --keep \"step == 0\"",
        raw="filters",
    )
    for filter_name, meaning in FILTER_MEANINGS.items():
        filter_.add(f"--{filter_name}", metavar="EXPR", help=f"taps {meaning}")
    yield filter_

    transform = _command(
        "transform",
        "Use a function of the notebook, or a dotted path, as the transform.\n\n"
        "It applies to the taps that the plan grafts, or with --where to the taps that the filter matches, including\n"
        "compared ones. The expression ends with the line; quotes around it are optional:\n"
        "  %graft transform unfuse --where name == 'qkv'",
        raw="where",
    )
    transform.add("name", metavar="NAME", help="function or dotted path; `default` restores the default transform")
    transform.add("--where", metavar="EXPR", help="filter of the taps to transform")
    yield transform

    rename = _command(
        "rename",
        "Rewrite the names of one side's taps by a regular expression before pairing.\n\n"
        "The rule is added to the current ones; the first that matches a name applies. Without arguments, show them.",
    )
    rename.add("side", nargs="?", choices=("baseline", "target"), help="side whose names are rewritten")
    rename.add("pattern", nargs="?", metavar="REGEX", help="pattern to replace, as in re.sub")
    rename.add("replacement", nargs="?", default="", metavar="TEXT", help='replacement (default "")')
    rename.add("--clear", action="store_true", help="remove the current rules first")
    yield rename

    yield _command("undo", "Take back the last edit of the plan, of any of its parts, and show what that changes.")
    yield _command("redo", "Make the edit again that `%graft undo` took back, and show what that changes.")


def _look() -> Iterator[Command]:
    yield _command("ui", "Show the dashboard: ranks and taps live, the editors of the plan, and the logs.")

    frame = _command("frame", "Show the rows of the newest run that has rows, as a pandas frame.")
    frame.add("--all", action="store_true", help="show the rows of all runs")
    frame.add("-o", "--out", type=_variable, metavar="NAME", help="assign the frame to this variable")
    yield frame

    plot = _command("plot", "Plot the taps of the newest run: of its last step, of all its steps, or one tap.")
    plot.add("tap", nargs="?", metavar="TAP", help="the name of one tap")
    plot.add(
        "--kind",
        choices=tuple(PLOT_KINDS),
        help="default: divergence, or over_steps with --steps, or history with a tap, or heatmap with a tap and --tags "
        "or --dims; heatmap, histogram and scatter "
        "need a kept pair",
    )
    plot.add(
        "--verdict",
        action="store_true",
        help="draw the newest verdict; with a tap that it names, where the tensors of that tap differ",
    )
    plot.add("--step", type=int, metavar="N", help="divergence: this step instead of the last")
    plot.add(
        "--steps",
        type=_steps,
        metavar="A:B",
        help="over_steps: steps from A up to but excluding B; `all` for every step",
    )
    plot.add(
        "--noise-floor",
        type=_amount,
        metavar="X",
        help="divergence and over_steps: differences up to X count as rounding",
    )
    plot.add(
        "--tags",
        nargs="+",
        type=_tag,
        metavar="TAG=VALUE",
        help="heatmap, histogram and scatter: which pair of the tap, such as layer=3 step=0 rank=1",
    )
    plot.add(
        "--dims",
        type=_dims,
        metavar="R,C",
        help="heatmap, and --verdict with a tap: the dimensions to show as rows and columns (default the last two)",
    )
    yield plot

    report = _command("report", "Write a report of the session as one HTML page, to attach to an issue.")
    report.add("file", nargs="?", metavar="FILE", default="report.html", help="path (default report.html)")
    report.add("--tensors", action="store_true", help="add pictures of the kept pairs, which show values")
    yield report


def _ranks() -> Iterator[Command]:
    yield _command("status", "Show what each rank is doing now.")

    log = _command("log", "Show the end of a rank's log.")
    log.add(
        "rank", nargs="?", metavar="RANK", default="both", help="baseline, target, both (default), or such as target[1]"
    )
    log.add("-n", "--lines", type=positive, metavar="N", default=50, help="number of lines (default 50)")
    yield log

    yield _command("stacks", "Show the Python stack of every thread of each rank.")
    yield _command("interrupt", "Raise KeyboardInterrupt in the code that the ranks run; the ranks stay alive.")

    debug = _command(
        "debug",
        "Inspect the last failure on a rank, at a prompt or with one pdb command.\n\n"
        "Commands: w (stack), u and d (up and down), l (source), p EXPR, pp EXPR, a (arguments), or an expression.",
        raw="COMMAND",
        usage="%%graft debug [-h] [RANK [COMMAND]]",
    )
    debug.add("rank", nargs="?", metavar="RANK", help="such as target[1] (default: the first that failed)")
    yield debug


GROUPS = {
    "Start and end": tuple(_start_and_end()),
    "Compare": tuple(_compare()),
    "The plan": tuple(_plan()),
    "Look": tuple(_look()),
    "The ranks": tuple(_ranks()),
}
"""The subcommands by what they are for, as the overview lists them."""

COMMANDS = {each.name: each for group in GROUPS.values() for each in group}


def overview() -> str:
    """All subcommands in groups, shown by ``%graft`` alone, ``%graft?`` and after mistakes."""
    lines = []
    for title, group in GROUPS.items():
        lines += [f"{title}:", *(f"  %graft {each.name:<10} {each.summary.splitlines()[0]}" for each in group)]
    lines += [
        "Cells:",
        "  %%graft baseline   Run this cell on the baseline's ranks (also: target, both, target[1]).",
        "  %%graft transform  Use this cell as the transform (also: --where EXPR).",
        "`%graft NAME -h` shows the options of one command.",
    ]
    return "\n".join(lines)
