"""The command ``graftlab compare BASELINE TARGET``."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
import traceback
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from graftlab.base.progress import reported_to
from graftlab.base.world import Side
from graftlab.comparison.sides import (
    WRONG_USAGE,
    command_of,
    function_in_file,
    kind_of_sides,
    refuse_wrong_usage,
)
from graftlab.errors import ConfigError, FilterError, GraftError
from graftlab.filters.expressions import compile_filter

# The comparison itself is imported only when needed: every command of graftlab imports this module for its arguments,
# and a job that attaches must not import pandas.
if TYPE_CHECKING:
    from graftlab.comparison.answers import Comparison
    from graftlab.jobs.script_process import ScriptProcess
    from graftlab.recordings.recorded_side import RecordedSide

_AGREE, _DIFFER, _INCONCLUSIVE = 0, 1, 2
# The code by which a shell reports a command that SIGINT has ended.
_INTERRUPTED = 130
# EX_SOFTWARE of sysexits.h: an error within the program.
_FAILED = 70
_EXIT_CODES = {"agree": _AGREE, "differ": _DIFFER, "inconclusive": _INCONCLUSIVE}
EPILOG = (
    "exit codes: 0, the sides agree to rounding; 1, they differ; 2, inconclusive, with the reason; 64, wrong usage; "
    "70, graftlab itself failed; 130, interrupted"
)
_OF_SCRIPTS = ("calls", "training", "model", "ranks", "inject", "keep_going", "restart")
# By what is compared: how it is named, and the options that would have no effect. Some have errors of their own below.
_WITHOUT_EFFECT = {
    "functions": ("two functions", (*_OF_SCRIPTS, "backend")),
    "recording": ("a folder and a function", (*_OF_SCRIPTS, "backend")),
    "scripts": ("scripts", ("device", "backend")),
    "compiled": (
        "--compiled",
        (*_OF_SCRIPTS, "pattern", "backward", "functions", "inside", "match", "output", "floor"),
    ),
}
# Seconds without a terminal between two reports.
_PATIENCE = 15.0
_SHOWN = 100
# Seconds for which a side's ranks may wait for its others before that is said to be perhaps in vain.
_LONG = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    refuse_wrong_usage(parser)
    side = "a script, a command in quotes, or FILE.py:FUNCTION, which returns a model or takes the inputs itself"
    parser.add_argument(
        "baseline", metavar="BASELINE", help=f"the side that you trust: {side}; or a folder of recorded values"
    )
    parser.add_argument(
        "target", metavar="TARGET", nargs="?", help="the side to check: a script, a command or a function, as above"
    )
    parser.add_argument(
        "--compiled",
        action="store_true",
        help="compare BASELINE, a function or the model that it returns, with its compiled form",
    )
    parser.add_argument("--backend", metavar="NAME", help="the backend for --compiled (default: inductor)")
    parser.add_argument(
        "--inputs", metavar="FILE.py:NAME", help="for functions: the models' inputs, or a function that returns them"
    )
    parser.add_argument(
        "--pattern",
        metavar="TEXT",
        help="for a folder: how its files are named without suffix, such as {index}_{name} or step{step}.{name}",
    )
    parser.add_argument(
        "--backward",
        action="store_true",
        help="for functions: also compare a backward pass (a script's call gets one if its results require gradients)",
    )
    scripts = parser.add_argument_group("scripts and commands")
    scripts.add_argument("--calls", type=int, default=4, help="judge at most this many calls of models (default: 4)")
    scripts.add_argument(
        "--training",
        action="store_true",
        help="compare training: the target starts with the baseline's weights, and an optimizer must make a step",
    )
    scripts.add_argument(
        "--model",
        metavar="NAME",
        help="compare only the calls of models of this class, or of one model, such as Net[1], the second Net called",
    )
    scripts.add_argument(
        "--ranks", metavar="B,T", help="the number of ranks of each side (default: read from torchrun's options)"
    )
    scripts.add_argument(
        "--inject", action="store_true", help="use this copy of graftlab in an environment that has none"
    )
    scripts.add_argument("--keep-going", action="store_true", help="let the scripts continue after the answer")
    scripts.add_argument(
        "--no-restart",
        dest="restart",
        action="store_false",
        help="answer `inconclusive`, rather than start the scripts again, if a call or update cannot be repeated",
    )
    judging = parser.add_argument_group("what is compared")
    judging.add_argument("--include", metavar="FILTER", help="tap the modules that match, such as \"type == 'Linear'\"")
    judging.add_argument(
        "--functions", metavar="NAME,...", default="", help="also tap calls of these torch functions inside the model"
    )
    judging.add_argument(
        "--inside", metavar="FILTER", help="tap the values inside the forward of the modules that match"
    )
    match = judging.add_mutually_exclusive_group()
    match.add_argument("--match", action="store_true", default=None, help="pair taps by value, whatever their names")
    match.add_argument("--no-match", dest="match", action="store_false", help="pair taps only by name")
    judging.add_argument("--output", metavar="TAP", help="the tap that counts as the output (default: the last)")
    judging.add_argument("--floor", type=float, metavar="REL_L2", help="the noise floor (default: measured)")
    judging.add_argument(
        "--threshold", type=float, default=5.0, help="multiple of the floor that a tap may add (default: 5)"
    )
    answer = parser.add_argument_group("the answer")
    answer.add_argument(
        "--report", type=Path, metavar="FILE", help="where to write the HTML page (default: the run folder)"
    )
    answer.add_argument("--open", action="store_true", help="open the page in a browser")
    answer.add_argument("--json", action="store_true", help="print the answer as JSON")
    answer.add_argument("--folder", type=Path, help="the run folder (default: a new one, see `graftlab runs`)")
    parser.add_argument("--device", help="for functions: cpu, cuda or cuda:N (default: the GPUs, if any)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for a side (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    """Compare, print the answer, write the report; returns the exit code."""
    out = sys.stdout
    # Output of the models goes to stderr, so that stdout has only the answer.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        try:
            return _run(arguments, out)
        except Exception:
            # Python would end with 1, which says that the sides differ.
            text = "graftlab itself failed, and nothing was concluded; please report the lines above"
            sys.stderr.write(f"{traceback.format_exc()}graftlab compare: {text}\n")
            if arguments.json:
                _write_json(out, {"answer": "inconclusive", "exit_code": _FAILED, "text": text})
            return _FAILED


def _run(arguments: argparse.Namespace, out: TextIO) -> int:
    try:
        if arguments.compiled:
            return _run_compiled(arguments, out)
        with _Progress() as progress, reported_to(progress.show):
            compared = _compared(arguments, progress)
    except ConfigError as error:
        sys.stderr.write(f"graftlab compare: {error}\n")
        return WRONG_USAGE
    except GraftError as error:
        # Nothing was concluded, and the reason is in the message.
        if arguments.json:
            _write_json(out, {"answer": "inconclusive", "exit_code": _INCONCLUSIVE, "text": str(error)})
        else:
            sys.stderr.write(f"graftlab compare: {error}\n")
        return _INCONCLUSIVE
    except KeyboardInterrupt as interrupt:
        from graftlab.comparison.answers import known_at

        known = known_at(interrupt) or ["Nothing was judged yet."]
        text = f"interrupted; both sides have ended. {' '.join(known)}"
        if arguments.json:
            _write_json(out, {"answer": "inconclusive", "exit_code": _INTERRUPTED, "text": text})
        else:
            sys.stderr.write(f"graftlab compare: {text}\n")
        return _INTERRUPTED
    with compared.session:
        page = _reported(arguments, compared.session.folder, compared.report)
        if arguments.json:
            _write_json(out, _as_json(compared, page))
        else:
            out.write(f"{compared.text}\n\n{_where(page)}\n")
    return _EXIT_CODES[compared.answer]


def _run_compiled(arguments: argparse.Namespace, out: TextIO) -> int:
    from graftlab.comparison.functions import compare_with_compiled
    from graftlab.control.report import write_report

    if arguments.target is not None:
        raise ConfigError("--compiled takes one function, which is compared with its compiled form; leave TARGET out")
    _refuse_without_effect(arguments, "compiled")
    _check_filter("--include", arguments.include)
    session, found, answer = compare_with_compiled(
        function_in_file(arguments.baseline),
        None if arguments.inputs is None else function_in_file(arguments.inputs),
        {} if arguments.backend is None else {"backend": arguments.backend},
        include=arguments.include,
        threshold=arguments.threshold,
        device=arguments.device,
        timeout=arguments.timeout,
        folder=arguments.folder,
    )
    with session:
        page = _reported(arguments, session.folder, lambda path: write_report(session, path, found.verdict, False))
        told = {"answer": answer, "exit_code": _EXIT_CODES[answer], "named": found.verdict.named, "text": found.text}
        if arguments.json:
            _write_json(out, {**told, "report": page and str(page), "folder": str(session.folder)})
        else:
            out.write(f"{found.text}\n\n{_where(page)}\n")
    return _EXIT_CODES[answer]


def _reported(arguments: argparse.Namespace, folder: Path, write: Callable[[Path], Path]) -> Path | None:
    """Write the report, and open it if asked for; None if it cannot be written, which must not hide the answer."""
    path = arguments.report or folder / "report.html"
    try:
        page = write(path)
    except Exception as error:
        if not isinstance(error, OSError):
            sys.stderr.write(traceback.format_exc())
        sys.stderr.write(f"graftlab compare: the report could not be written to {path}: {error}\n")
        return None
    if arguments.open:
        webbrowser.open(page.resolve().as_uri())
    return page


def _where(page: Path | None) -> str:
    return "There is no report." if page is None else f"The report is {page}"


def _compared(arguments: argparse.Namespace, progress: _Progress) -> Comparison:
    from graftlab.comparison.functions import compare
    from graftlab.comparison.repeats import JudgingChoice
    from graftlab.comparison.scripts import ScriptChoice, compare_scripts
    from graftlab.jobs.script_launcher import ScriptSettings
    from graftlab.ranks.held_call import WatchChoice

    if arguments.target is None:
        raise ConfigError("the following argument is required: TARGET, or --compiled")
    kind = kind_of_sides(arguments.baseline, arguments.target)
    _refuse_without_effect(arguments, kind)
    judging = JudgingChoice(
        arguments.match, arguments.output, "auto" if arguments.floor is None else arguments.floor, arguments.threshold
    )
    for option, text in (("--include", arguments.include), ("--inside", arguments.inside)):
        _check_filter(option, text)
    functions = tuple(name.strip() for name in arguments.functions.split(",") if name.strip())
    if arguments.pattern is not None and kind != "recording":
        raise ConfigError("--pattern is for a BASELINE that is a folder of arrays")
    if kind != "scripts":
        inputs = None if arguments.inputs is None else function_in_file(arguments.inputs)
        return compare(
            _recorded_side(arguments) if kind == "recording" else function_in_file(arguments.baseline),
            function_in_file(arguments.target),
            inputs,
            backward=arguments.backward,
            match=judging.match,
            output=judging.output,
            floor=judging.floor,
            threshold=judging.threshold,
            include=arguments.include,
            functions=functions,
            inside=arguments.inside,
            device=arguments.device,
            timeout=arguments.timeout,
            folder=arguments.folder,
        )
    if arguments.inputs is not None:
        raise ConfigError("--inputs is for two functions, FILE.py:FUNCTION; a script makes its own inputs")
    if arguments.backward:
        raise ConfigError(
            "--backward is for two functions; a script that needs gradients is judged with a backward pass"
        )
    if arguments.calls < 1:
        raise ConfigError(f"--calls {arguments.calls}: give at least 1")
    ranks = _given_ranks(arguments.ranks)
    baseline, target = command_of(arguments.baseline, ranks[0]), command_of(arguments.target, ranks[1])
    settings = ScriptSettings(
        WatchChoice(arguments.include, functions, arguments.inside),
        arguments.model,
        arguments.inject,
        arguments.timeout,
    )
    choice = ScriptChoice(
        settings,
        judging,
        arguments.calls,
        arguments.training,
        arguments.keep_going,
        arguments.restart,
        arguments.folder,
    )
    return compare_scripts(baseline, target, choice, progress.wait_for, progress.announce)


def _refuse_without_effect(arguments: argparse.Namespace, kind: str) -> None:
    """Raise :class:`ConfigError` for a given option that does not apply to what is compared."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    defaults = parser.parse_args(["BASELINE"])
    what, options = _WITHOUT_EFFECT[kind]
    for name in options:
        value = getattr(arguments, name)
        if value != getattr(defaults, name):
            negated = {"restart": "no_restart", "match": "match" if value else "no_match"}
            option = f"--{negated.get(name, name).replace('_', '-')}"
            raise ConfigError(f"{option} has no effect on {what}; leave it out")


def _check_filter(option: str, text: str | None) -> None:
    """Raise :class:`ConfigError` for a filter that cannot be read, before a program is started."""
    if text is not None:
        try:
            compile_filter(text)
        except FilterError as error:
            raise ConfigError(f"{option}: {error}") from error


def _recorded_side(arguments: argparse.Namespace) -> RecordedSide:
    """The baseline in a folder. Raises :class:`ConfigError` for options that do not apply to it."""
    from graftlab.recordings.recording import Recording

    if arguments.backward:
        raise ConfigError("--backward is for two functions; a folder of recorded values computes no backward pass")
    if arguments.pattern is None:
        return Recording.open(arguments.baseline)
    return Recording.from_files(arguments.baseline, pattern=arguments.pattern)


def _given_ranks(text: str | None) -> list[int | None]:
    if text is None:
        return [None, None]
    counts = text.split(",")
    if len(counts) != 2 or not all(count.strip().isdecimal() and int(count) > 0 for count in counts):
        raise ConfigError(f"--ranks {text!r}: give two numbers, of the baseline's and the target's ranks, such as 1,2")
    return [int(count) for count in counts]


# ---- progress and answer --------------------------------------------------------------------------------------------


class _Progress:
    """Reports the comparison's progress on stderr: on a terminal in one line that is rewritten, otherwise in a line now
    and then, and when one side has called its model. A context manager.
    """

    def __init__(self) -> None:
        self._began = self._reported_at = time.monotonic()
        self._reported: str | None = None
        self._is_terminal = sys.stderr.isatty()
        # When some ranks of this side, but not all, were first seen to wait in a call.
        self._held_in_part: dict[Side, float] = {}

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def wait_for(self, processes: Sequence[ScriptProcess], missing: Sequence[str]) -> None:
        """Show the ranks that have not called a model yet, with the last line of one's output."""
        waiting = f"waiting for {', '.join(missing)} to call a model"
        last = next((p.last_lines(1) for p in processes if any(label.startswith(p.side) for label in missing)), "")
        self._show(waiting, f" · {last.strip()}", at_once=len(missing) < len(processes))
        for process in processes:
            behind = [label for label in missing if label.startswith(process.side)]
            if 0 < len(behind) < process.command.ranks:
                self._note_held_in_part(process.side, behind)
            elif self._held_in_part.get(process.side) != math.inf:
                # Scripts may be started again.
                self._held_in_part.pop(process.side, None)

    def _note_held_in_part(self, side: Side, behind: Sequence[str]) -> None:
        """Say once, after a while, that the ranks which are held may be what those that are ``behind`` wait for."""
        since, now = self._held_in_part.setdefault(side, time.monotonic()), time.monotonic()
        if now - since > _LONG:
            self._held_in_part[side] = math.inf
            self.announce(
                f"Since {now - since:.0f} s other ranks of the {side} wait in their first call, which is held until "
                f"{', '.join(behind)} {'makes a call' if len(behind) == 1 else 'make calls'}, too. If that needs their "
                "result first, as the next stage of a pipeline does, these calls cannot be compared: press Ctrl-C, and "
                "run all stages in one process."
            )

    def show(self, title: str) -> None:
        """Show the present activity."""
        self._show(title, "", at_once=False)

    def announce(self, sentence: str) -> None:
        """Show a sentence that stays."""
        sys.stderr.write(f"\r\x1b[2K{sentence}\n" if self._is_terminal else f"{sentence}\n")
        sys.stderr.flush()

    def _show(self, what: str, more: str, *, at_once: bool) -> None:
        now = time.monotonic()
        times = f" · {now - self._began:.0f} s"
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[2K{f'{what}{times}{more}'[:_SHOWN]}")
        elif self._reported != what and (at_once or now - self._reported_at > _PATIENCE):
            self._reported, self._reported_at = what, now
            sys.stderr.write(f"{what}{times}\n")
        sys.stderr.flush()


def _as_json(compared: Comparison, page: Path | None) -> dict[str, Any]:
    return {
        "answer": compared.answer,
        "exit_code": _EXIT_CODES[compared.answer],
        "named": compared.named,
        "labels": compared.labels,
        "runs": compared.runs,
        "way": "started again" if compared.starts else "held",
        "starts": compared.starts,
        "pairs": None if compared.match is None else len(compared.match.pairs),
        "text": compared.text,
        "report": page and str(page),
        "folder": str(compared.session.folder),
    }


def _write_json(out: TextIO, answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer, indent=2) + "\n")
