"""The ``%graft`` and ``%%graft`` magics: each parses its line and calls a method of the session."""

from __future__ import annotations

import argparse
import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.core.pylabtools import select_figure_formats
from IPython.display import display

from graftlab.base.text import counted, listed
from graftlab.base.world import SIDES, Side
from graftlab.comparison.closer_look import rounding_may_hide_mistakes
from graftlab.comparison.functions import compare_expression
from graftlab.control.core import callees_of, internals_of
from graftlab.control.interrupt_report import interrupt_and_report
from graftlab.control.post_mortems import prompt
from graftlab.control.run import Run, state_of
from graftlab.errors import RunError, WaitInterrupted
from graftlab.filters.check import FilterCheck, check_summary
from graftlab.launching import launch
from graftlab.magics import command_line, subcommands
from graftlab.plan.changes import PlanChange
from graftlab.ranks.forkserver import warm_up
from graftlab.remote.ray_cluster import Ray
from graftlab.session import Session, listen
from graftlab.verdict.conclusion import newest_run


def load(shell: InteractiveShell) -> None:
    """Register the magics and their completion, and show figures as pictures."""
    magics = GraftMagics(shell)
    # After %reload_ext the session stays open.
    magics.session = next((old.session for old in reversed(magics_of_completion) if old.shell is shell), None)
    shell.register_magics(magics)
    select_figure_formats(shell, {"png"})  # type: ignore[no-untyped-call]
    if shell.Completer is not None:
        matchers = shell.Completer.custom_matchers
        matchers[:] = [m for m in matchers if getattr(m, "__name__", "") != complete_graft.__name__]
        magics_of_completion.append(magics)
        matchers.append(complete_graft)
    # So that the first launch finds a process that has already imported torch.
    warm_up()


# The options by which `%graft up` compares the open session with the requested one.
_OPTIONS_OF_UP = ("baseline", "target", "device", "backend", "timeout", "start_method", "keep_rows", "on")


@magics_class
class GraftMagics(Magics):
    """``%graft`` and ``%%graft``. ``session`` comes from ``%graft up``, or is the notebook's variable `session`."""

    session: Session | None = None

    @no_var_expand
    @line_cell_magic
    def graft(self, line: str, cell: str | None = None) -> Any:
        """Run a line or a cell."""
        try:
            if cell is not None:
                return self._cell(line.strip(), cell)
            name, arguments = command_line.parse(line)
            return getattr(self, f"_{name}")(arguments)
        except subcommands.HelpRequest as help_:
            sys.stdout.write(help_.text + "\n")
            return None
        except RunError as error:
            if not (advice := self._on_names_of_the_notebook(error)):
                raise
            raise RunError(f"{error}\n\n{advice}", error.failures) from None
        except WaitInterrupted:
            raise
        except KeyboardInterrupt:
            raise WaitInterrupted(f"%graft {line.split()[0]} was stopped") from None

    # What `%graft?` shows.
    graft.__doc__ = f"Run two implementations side by side, and compare them.\n\n{subcommands.overview()}"

    def open_session(self) -> Session | None:
        """The open session that commands apply to, if any."""
        own, variable = self.session, self._namespace().get("session")
        if (own is None or own.closed) and isinstance(variable, Session):
            # Made by gl.launch and assigned to `session`.
            own = self.session = variable
        return None if own is None or own.closed else own

    def _open(self) -> Session:
        session = self.open_session()
        if session is None:
            last = self.session
            rows = f". The rows of the closed session are in session.frame and in {last.folder}" if last else ""
            raise UsageError(f"%graft: no session is open; `%graft up -b 1 -t 2` starts one{rows}")
        return session

    def _on_names_of_the_notebook(self, error: RunError) -> str:
        """What to do about names that the ranks lack and the notebook has; blank if there are none."""
        missing = dict.fromkeys(re.findall(r"NameError: name '(\w+)' is not defined", str(error)))
        if not (known := [name for name in missing if name in self._namespace()]):
            return ""
        exist, them = ("exists", "it") if len(known) == 1 else ("exist", "them")
        return (
            f"{listed(list(map(repr, known)))} {exist} in the notebook, not on the ranks: define {them} there in a "
            "`%%graft both` cell, or give session.run(baseline=..., target=...) functions, which may use variables of "
            "the notebook"
        )

    def _cell(self, where: str, cell: str) -> None:
        if where in ("", "-h", "--help"):
            raise subcommands.HelpRequest(subcommands.overview())
        session = self._open()
        place, option = command_line.split_where(where)
        if place.strip() == "transform":
            session.edit(transform=(option[0].partition("=")[2], cell) if option else cell)
            return
        if where not in ("baseline", "target", "both") and where not in [rank.label for rank in session.ranks]:
            labels = ", ".join(["baseline", "target", "both", "transform", *(rank.label for rank in session.ranks)])
            line = where.split(maxsplit=1)[0]
            hint = f"; write `%graft {line}`, with one %, for a line" if line in subcommands.COMMANDS else ""
            raise UsageError(f"%%graft: {where!r} is not a place to run a cell; use one of {labels}{hint}")
        run = session.execute(cell, where)
        for rank, value in _values_by_rank(run):
            if value is not None:
                sys.stdout.write(f"{rank}:\n")
                display(value)  # type: ignore[no-untyped-call]
                _close_pyplot_figure(value)

    def _up(self, arguments: argparse.Namespace) -> Session:
        arguments.on = _cluster_of(arguments)
        before = self.open_session()
        if before is not None:
            gone = ", ".join(rank.label for rank in before.ranks if not rank.alive)
            if not arguments.replace and not gone:
                return self._keep(before, arguments)
            sys.stdout.write(f"closing the open session{f': {gone} ended' if gone else ''}\n")
            before.close()
        self.session = launch(
            arguments.baseline,
            arguments.target,
            device=arguments.device,
            backend=arguments.backend,
            timeout=arguments.timeout,
            start_method=arguments.start_method,
            keep_rows=arguments.keep_rows,
            on=arguments.on,
        )
        self._assign(arguments.out, self.session)
        return self.session

    def _listen(self, arguments: argparse.Namespace) -> Session:
        before = self.open_session()
        if before is not None:
            raise UsageError(
                "%graft listen: a session is already open; `%graft down` closes it, and its jobs keep running"
            )
        self.session = listen(
            arguments.baseline,
            arguments.target,
            timeout=arguments.timeout,
            folder=arguments.folder,
            append=arguments.append,
            address=arguments.address,
            keep_rows=arguments.keep_rows,
        )
        self._assign(arguments.out, self.session)
        return self.session

    def _keep(self, session: Session, arguments: argparse.Namespace) -> Session:
        """Keep the open session if it matches the requested options. Raises UsageError if it does not."""
        asked = {name: getattr(arguments, name) for name in _OPTIONS_OF_UP}
        other = {name: getattr(session.options, name) for name in asked}
        if not all(rank.takes_work for rank in session.ranks):
            raise UsageError(
                "%graft up: the open session is a session of jobs; `%graft down` closes it, and its jobs keep running"
            )
        if asked != other:
            runs = counted(len(session.runs), "run")
            changed = ", ".join(
                f"{name} {other[name]} -> {asked[name]}" for name in asked if asked[name] != other[name]
            )
            busy = ", one still running" if session.runs and not session.runs[-1].done else ""
            raise UsageError(
                f"%graft up: a session with other options is open ({changed}). Closing it loses everything on its "
                f"{len(session.ranks)} ranks: models, variables, kept tensors ({runs} so far"
                f"{busy}; {session.row_count:,} rows stay in {session.folder}). To close it, add --replace"
            )
        sys.stdout.write(
            "the open session already matches; keeping it and everything on its ranks "
            "(`%graft up --replace` starts a new one)\n"
        )
        self._assign(arguments.out, session)
        return session

    def _status(self, arguments: argparse.Namespace) -> Any:
        return self._open().status()

    def _stacks(self, arguments: argparse.Namespace) -> None:
        for label, stack in self._open().stacks().items():
            sys.stdout.write(f"--- {label}\n{stack}\n")

    def _interrupt(self, arguments: argparse.Namespace) -> None:
        sys.stdout.write("\n".join(interrupt_and_report(self._open())) + "\n")

    def _debug(self, arguments: argparse.Namespace) -> None:
        session = self._open()
        failed = list(session.runs[-1].failures) if session.runs else []
        rank = arguments.rank or (failed[0] if failed else None)
        if rank is None:
            raise UsageError("%graft debug: nothing failed in the newest run")
        if arguments.command or not self._has_stdin():
            answer = session.post_mortem(rank, arguments.command)
            hint = "" if arguments.command else f"\n`%graft debug {rank} p EXPR` shows a value; also w, u, d, l, a"
            sys.stdout.write(f"{answer}{hint}\n")
            return
        prompt(rank, lambda command: session.post_mortem(rank, command), input, sys.stdout.write)

    def _has_stdin(self) -> bool:
        """Whether a person can answer `input()`; false where a notebook is executed without a browser."""
        kernel = getattr(self.shell, "kernel", None)
        return bool(getattr(kernel, "_allow_stdin", False)) if kernel is not None else sys.stdin.isatty()

    def _restart(self, arguments: argparse.Namespace) -> Session:
        session = self._open()
        session.restart()
        sys.stdout.write(
            "new ranks run under the same plan; what cells had defined on the ranks is lost, and nothing was rerun\n"
        )
        return session

    def _down(self, arguments: argparse.Namespace) -> None:
        session = self._open()
        session.close()
        sys.stdout.write(f"rows and logs are in {session.folder}\n")

    def _log(self, arguments: argparse.Namespace) -> None:
        sys.stdout.write(self._open().log(arguments.rank, arguments.lines) + "\n")

    def _run(self, arguments: argparse.Namespace) -> Run:
        session = self._open()
        run = session.start(*callees_of(session, arguments.expression))
        # Before the wait: a run that fails or whose wait is stopped has rows too.
        self._assign(arguments.out, run)
        return run.wait()

    def _verdict(self, arguments: argparse.Namespace) -> Any:
        session, judged = self._open(), arguments.expression or None
        self._require_code(session, "verdict", judged)
        verdict = session.verdict(*callees_of(session, judged))
        self._assign(arguments.out, verdict)
        if judged and not internals_of(session).default_callees and rounding_may_hide_mistakes(verdict):
            print(f"`%graft compare {judged}` judges it in float32 too, where rounding hides no mistake.")
        return verdict

    def _lines(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        tap, _, expression = arguments.expression.partition(" ")
        if not tap:
            raise UsageError("%graft lines: give the name of a tap, such as `%graft lines layers.3.attn model(x)`")
        judged = expression.strip() or None
        # Jobs run anyway, and scripts that are held in the session have code to call already.
        takes_work = all(rank.takes_work for rank in session.ranks)
        if judged is None and takes_work and not internals_of(session).default_callees:
            judged = self._newest_expression(session)
        lines = session.lines(tap, *callees_of(session, judged))
        self._assign(arguments.out, lines)
        return lines

    @staticmethod
    def _require_code(session: Session, command: str, expression: str | None) -> None:
        """Raise UsageError without an expression, unless the session's ranks have code to call already."""
        takes_work = all(rank.takes_work for rank in session.ranks)
        if expression is None and takes_work and not internals_of(session).default_callees:
            raise UsageError(f"%graft {command}: give an expression, such as `%graft {command} model(x)`")

    @staticmethod
    def _newest_expression(session: Session) -> str:
        """Return the newest expression that both sides have evaluated."""
        for run in reversed(session.runs):
            code = state_of(run).code
            text = code.get("baseline")
            if not isinstance(text, str) or text.startswith("#") or code.get("target") != text:
                continue
            if not run.failures:
                return text
        raise UsageError("%graft lines: no run evaluated an expression on both sides; give one after the tap's name")

    def _compare(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        if recorded := internals_of(session).default_callees:
            raise UsageError(
                f"%graft compare: the {next(iter(recorded))} is a recording, which computes nothing; "
                f"`%graft verdict {arguments.expression}` judges against it, and `%graft match {arguments.expression}` "
                "pairs taps by their values"
            )
        compared = compare_expression(session, arguments.expression)
        self._assign(arguments.out, compared)
        if len(compared.frame):
            display(compared.plot())  # type: ignore[no-untyped-call]
        return compared

    def _compiled(self, arguments: argparse.Namespace) -> Any:
        options = {"fullgraph": arguments.fullgraph}
        if arguments.backend is not None:
            options["backend"] = arguments.backend
        comparison = self._open().compare_compiled(arguments.expression, grad_mode=arguments.grad_mode, **options)
        self._assign(arguments.out, comparison)
        return comparison

    def _match(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        matched = arguments.expression or None
        self._require_code(session, "match", matched)
        proposal = session.match(*callees_of(session, matched))
        self._assign(arguments.out, proposal)
        return session.match_editor(proposal)

    def _check(self, arguments: argparse.Namespace) -> Any:
        check = self._open().check(target=arguments.expression)
        self._assign(arguments.out, check)
        return check

    def _replay(self, arguments: argparse.Namespace) -> Any:
        session, names = self._open(), self._namespace()
        # A name that the notebook lacks is looked up on the ranks, among the names of the %%graft cells.
        functions = [names.get(name, name) for name in (arguments.baseline, arguments.target)]
        result = session.replay(
            Path(arguments.file).expanduser(), *functions, batch_size=arguments.batch_size, limit=arguments.limit
        )
        self._assign(arguments.out, result)
        return result

    def _filter(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        changes = {name: text for name, text in vars(arguments).items() if text is not None}
        if not changes:
            return session.plan
        plan = session.edit(**changes)
        for name, text in changes.items():
            check = FilterCheck(text)
            check.catch_up(session.taps)
            sys.stdout.write(f"{name}: {check_summary(check, session.taps)}\n")
        return plan

    def _transform(self, arguments: argparse.Namespace) -> Any:
        session, name = self._open(), arguments.name
        if name not in self._namespace() and name != "default" and name.isidentifier():
            raise UsageError(
                f"%graft transform: the notebook has no function {name!r}; define it, or give a dotted path such as "
                "package.module.function"
            )
        if name == "default":
            if arguments.where is not None:
                raise UsageError("%graft transform default: applies where no other transform does; leave out --where")
            return session.edit(transform=None)
        transform = self._namespace().get(name, name)
        return session.edit(transform=transform if arguments.where is None else (arguments.where, transform))

    def _rename(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        rules: dict[Side, dict[str, str]] = {}
        for side, pattern, replacement in () if arguments.clear else session.plan.rename:
            rules.setdefault(side, {})[pattern] = replacement
        if arguments.side is not None:
            if not arguments.pattern:
                raise UsageError(f"%graft rename {arguments.side}: give a regular expression, such as '^model\\.'")
            rules.setdefault(arguments.side, {})[arguments.pattern] = arguments.replacement
        elif not arguments.clear:
            return session.plan
        return session.edit(rename=rules or None)

    def _undo(self, arguments: argparse.Namespace) -> PlanChange:
        return self._open().undo()

    def _redo(self, arguments: argparse.Namespace) -> PlanChange:
        return self._open().redo()

    def _frame(self, arguments: argparse.Namespace) -> Any:
        session = self._open()
        frame = session.frame
        if len(frame) and not arguments.all:
            # Cells are runs too, and most of them have no rows.
            frame = newest_run(frame, internals_of(session).set_aside)
        self._assign(arguments.out, frame)
        return frame

    def _plot(self, arguments: argparse.Namespace) -> Any:
        plot = self._open().plot
        if arguments.verdict:
            return plot.verdict(arguments.tap, **({} if arguments.dims is None else {"dims": arguments.dims}))
        options = {} if arguments.noise_floor is None else {"noise_floor": arguments.noise_floor}
        if arguments.kind == "divergence":
            return plot.divergence(step=arguments.step, **options)
        if arguments.kind == "over_steps":
            steps = None
            if arguments.steps is not None:
                first, last = arguments.steps
                steps = range(first or 0, sys.maxsize if last is None else last)
            return plot.over_steps(steps=steps, **options)
        names = list(dict.fromkeys(str(tap["name"]) for tap in self._open().taps))
        if names and arguments.tap not in names:
            close = ", ".join(repr(name) for name in get_close_matches(arguments.tap, names, n=3, cutoff=0.4))
            hint = (
                f"did you mean {close}?"
                if close
                else f"the taps are {', '.join(map(repr, names[:5]))}"
                + (f" and {len(names) - 5} others" if len(names) > 5 else "")
            )
            raise UsageError(f"%graft plot: no tap is called {arguments.tap!r}; {hint}")
        of_pair = dict(arguments.tags or ())
        if arguments.dims is not None:
            of_pair["dims"] = arguments.dims
        return getattr(plot, arguments.kind)(arguments.tap, **of_pair)

    def _report(self, arguments: argparse.Namespace) -> None:
        path = self._open().report(arguments.file, tensors=arguments.tensors)
        sys.stdout.write(f"{path} ({path.stat().st_size / 1024:,.0f} KiB)\n")

    def _ui(self, arguments: argparse.Namespace) -> Any:
        return self._open().dashboard()

    def _assign(self, name: str | None, value: object) -> None:
        if name:
            self._namespace()[name] = value

    def _namespace(self) -> dict[str, Any]:
        assert self.shell is not None
        names: dict[str, Any] = self.shell.user_ns
        return names


def _cluster_of(arguments: argparse.Namespace) -> Ray | None:
    """The cluster on which `%graft up` starts ranks, if not on this machine."""
    gpus = arguments.gpus_per_rank
    if arguments.on is None:
        if gpus is not None:
            raise UsageError("%graft up --gpus-per-rank: is for ranks on a cluster; add --on, or choose --device")
        return None
    gpus = 1.0 if gpus is None else gpus
    return Ray(arguments.on, resources={"GPU": gpus} if gpus else {"CPU": 1})


def _values_by_rank(run: Run) -> list[tuple[str, Any]]:
    values = {"baseline": iter(run.baseline), "target": iter(run.target)}
    return [(rank.label, next(values[rank.place.side])) for rank in run.participants]


def _close_pyplot_figure(value: object) -> None:
    """Close a figure of pyplot, which would otherwise show it a second time."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and isinstance(value, pyplot.Figure):
        pyplot.close(value)


# The magics whose session completion uses; those of the newest shell are last.
magics_of_completion: list[GraftMagics] = []


@context_matcher()  # type: ignore[untyped-decorator]
def complete_graft(context: CompletionContext) -> SimpleMatcherResult:
    """Complete subcommands, options, ranks and tap names after ``%graft`` and ``%%graft``."""
    line = (
        context.current_line_with_cursor if hasattr(context, "current_line_with_cursor") else context.line_with_cursor
    )
    before = line[: context.cursor_position]
    words = before.split()
    if not words or words[0] not in ("%graft", "%%graft"):
        return SimpleMatcherResult(completions=[])
    token = "" if before.endswith(" ") else words[-1]
    previous = words[1:] if before.endswith(" ") else words[1:-1]
    session = magics_of_completion[-1].open_session() if magics_of_completion else None
    ranks = [rank.label for rank in session.ranks] if session is not None else []
    if words[0] == "%%graft":
        choices = [*command_line.CELL_TARGETS, *ranks] if not previous else []
    elif not previous:
        choices = list(subcommands.COMMANDS)
    else:
        command = subcommands.COMMANDS.get(previous[0])
        choices = list(command.options) if command is not None else []
        if command is not None and previous[-1] in command.choices:
            choices = list(command.choices[previous[-1]])
        elif previous[0] == "log":
            choices += ["baseline", "target", "both", *ranks]
        elif previous == ["debug"]:
            choices += ranks
        elif previous == ["rename"]:
            choices += SIDES
        elif (previous[0] == "plot" or previous == ["lines"]) and session is not None:
            choices += [str(name) for name in dict.fromkeys(tags["name"] for tags in session.taps)]
    found = [SimpleCompletion(choice, type="param") for choice in choices if choice.startswith(token)]
    return SimpleMatcherResult(completions=found, suppress=bool(found), matched_fragment=token)
