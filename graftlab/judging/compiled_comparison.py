"""A comparison of compiled code with eager code: whether their results agree, and where they part."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import pandas as pd

from graftlab.base import shipping
from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.base.world import Side
from graftlab.control.core import restore_plan, start_under
from graftlab.control.run import Run
from graftlab.control.verdicts import Verdict
from graftlab.control.work import arguments, refuse_invalid_expressions
from graftlab.diffs.results import ResultFloor, Results, distance, tensors_of, unit_of
from graftlab.errors import SessionError, WaitInterrupted
from graftlab.grafting.self_graft import RoundedResults
from graftlab.judging.judge import judge
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.plan.plan import PlanEdit
from graftlab.ranks.compiled_pieces import MiscompiledLine, PieceSearch
from graftlab.ranks.compiled_runs import (
    CallInMode,
    CompilerSearch,
    runs_without_gradients,
    search_compiler,
    why_not_compiled_whole,
)
from graftlab.ranks.remote_functions import Callee, call_in_float64, round_callee
from graftlab.taps.compiled_calls import CompiledCall, GradMode
from graftlab.verdict.lines import INDENT

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore

# A result farther off than this many times rounding was computed differently; a nearer one was rounded differently.
_PARTED = 5.0
_MOST_AT_AN_END = 3
"""How many miscompiled lines the text shows at most from the beginning of the list, and from its end."""


@dataclass(frozen=True)
class CompiledComparison:
    """The result of ``session.compare_compiled``: the verdict with taps in the graph, and the results without them.

    ``untapped`` and ``tapped`` are the distances (``rel_l2``) between the compiled and the eager result, without any
    tap in the graphs and with all of them; NaN where the function returns neither tensors nor numbers. ``floor`` is how
    far rounding alone moves the eager result, measured with each tap moved by one unit in its last place, and from the
    same function in float64. ``exact`` has the distances of three results from that float64 result: the eager one, the
    compiled one without taps, and the compiled one with taps; NaN where the function does not run in float64. ``fused``
    is the tap that makes the difference: with it and all earlier taps in the graph the results agree, with only the
    earlier ones they differ; None where the result is as near without taps.

    ``grad_mode`` is the mode that was judged: None for the caller's own. ``other_mode`` is the distance between the
    compiled and the eager result in the other mode that was tried (without gradients, if the caller's own was judged);
    None if only one mode was tried. ``not_whole`` is the reason why the call could not be compiled as a whole; then the
    modules that it calls were compiled one by one. ``switches`` are the settings of ``torch._inductor.config`` that
    together make the result right, by name. ``stage`` is torch's most complete backend that gives the right result,
    where no switch makes inductor right. ``pieces`` has the lines of source whose compiled code is wrong, see
    :attr:`lines`; None where the result is right.

    >>> session.compare_compiled(forward, args=(x,), backend="eager").fused is None
    True
    """

    verdict: Verdict
    untapped: float
    tapped: float
    floor: float
    exact: tuple[float, float, float]
    fused: str | None
    graphs: int
    not_in_float64: str | None = None
    grad_mode: GradMode | None = None
    other_mode: float | None = None
    not_whole: str | None = None
    switches: Mapping[str, object] = field(default_factory=dict)
    stage: str | None = None
    pieces: PieceSearch | None = None

    @property
    def lines(self) -> pd.DataFrame:
        """The lines of source whose compiled code is wrong: a row for each, in the order of execution.

        Columns: ``file``, ``line``, ``source``, ``operations`` (the names of the captured graph's operations that come
        from it) and ``stack`` (the line and its callers, innermost first).
        """
        found = () if self.pieces is None else self.pieces.lines
        names = [each.name for each in fields(MiscompiledLine)]
        return pd.DataFrame([[getattr(each, name) for name in names] for each in found], columns=names)

    @property
    def text(self) -> str:
        """The conclusion."""
        return "\n".join([self._of_results(), *self._of_call(), self.verdict.text])

    def _of_results(self) -> str:
        if math.isnan(self.untapped):
            return (
                "The function returns no finite tensor or number, so its results with and without taps could not be "
                "compared."
            )
        if self.untapped == self.tapped == 0:
            return "Compiled, its result is equal to the eager one, without taps and with them."
        apart = f"Compiled without taps its result is {_far(self.untapped)}, with taps {_far(self.tapped)}."
        return " ".join([apart, self._of_rounding(), *self._of_float64()])

    def _of_call(self) -> list[str]:
        """Return which of several possible calls was judged."""
        remarks = []
        if self.not_whole is not None:
            remarks.append(
                f"torch.compile cannot compile this call as a whole ({self.not_whole}). The modules that it calls were "
                "compiled one by one, as by module.compile(), and the rest ran uncompiled."
            )
        if self.other_mode is not None and self.grad_mode is None:
            agrees = self.other_mode <= _PARTED * self.floor
            found = "agrees too" if agrees else f"is {self.other_mode:.1e} from the eager one, which is no better"
            remarks.append(
                f"Judged as it is called, with gradients. Compiled without them (torch.no_grad), its result {found}."
            )
        elif self.other_mode is not None:
            remarks.append(
                "Judged without gradients (torch.no_grad), because there the result is farther off. The call itself "
                f"computes gradients, and compiled so its result is {_far(self.other_mode)}."
            )
        elif self.grad_mode is not None:
            remarks.append(f"Judged under {self.grad_mode}, as grad_mode says.")
        if self.switches:
            named = " and ".join(f"torch._inductor.config.{name} = {value}" for name, value in self.switches.items())
            together = ", together but not one alone," if len(self.switches) > 1 else ""
            remarks.append(
                f"With {named}{together} the compiled result is right: the mistake is in what that switches off."
            )
        elif self.stage is not None:
            remarks.append(
                f"No setting of inductor makes the compiled result right; backend={self.stage!r} does, which runs "
                "fewer steps of the compiler."
            )
        return [*remarks, *self._of_lines()]

    def _of_lines(self) -> list[str]:
        """Return the lines of source whose compiled code is wrong."""
        if self.pieces is None:
            return []
        if not self.pieces.is_right_uncompiled:
            return [
                "The graphs that torch captures give a wrong result even when none of them is compiled: the code "
                "computes something else while it is captured, as where it asks torch.compiler.is_compiling()."
            ]
        if not (lines := self.pieces.lines):
            return []
        places = [str(each.stack[0]) for each in lines]
        width = max(map(len, places))
        listed = [
            f"{INDENT}{place.ljust(width)}  {each.source}  [{', '.join(each.operations)}]"
            for place, each in zip(places, lines, strict=True)
        ]
        if len(listed) > 2 * _MOST_AT_AN_END:
            between = f"{INDENT}... {len(listed) - 2 * _MOST_AT_AN_END} more in comparison.lines"
            listed = [*listed[:_MOST_AT_AN_END], between, *listed[-_MOST_AT_AN_END:]]
        head = (
            "Only this line's compiled code is wrong; with everything else uncompiled, the result is just as wrong:"
            if len(lines) == 1
            else "The compiled code of these lines is wrong, though everything else is uncompiled; without the first "
            "or the last of their operations it is right:"
        )
        return [head, *listed]

    def _of_rounding(self) -> str:
        limit, floor = _PARTED * self.floor, f"rounding alone changes the eager result by {self.floor:.1e}"
        if self.fused is not None:
            return (
                f"They differ only without the tap {self.fused!r} in the graph: the compiler fuses across it, and "
                f"the fused code is wrong ({floor}), which no row can show. gl.compile_taps chooses the taps of "
                f"a graph."
            )
        if max(self.untapped, self.tapped) <= limit:
            return f"That is within rounding: {floor}."
        if self.tapped <= limit:
            return (
                f"Without taps that is more than rounding ({floor}), but less than {_PARTED:g} times the "
                f"difference with taps, so no single tap can be identified as the cause."
            )
        if self.verdict.named:
            return f"That is more than rounding: {floor}."
        return (
            f"That is more than rounding ({floor}), though no tap adds as much: the computation between the last tap "
            f"and the result differs. Tap the result."
        )

    def _of_float64(self) -> list[str]:
        eager, *compiled = self.exact
        if self.not_in_float64 is not None:
            return [
                f"The function does not run in float64 ({self.not_in_float64}), so the floors do not include how "
                f"much less fused code rounds: a small excess over them may not be a mistake."
            ]
        far = f"The same function in float64 is {eager:.1e} from the eager result"
        without = f"{far} and {max(compiled):.1e} from the compiled one"
        if not math.isfinite(eager):
            return [f"{without}: the eager result is not finite in places where it should be."]
        if max(compiled) <= eager:
            blameless = "" if self.fused or self.verdict.named else " and is not at fault"
            return [f"{without}, which rounds less often{blameless}."]
        return [f"{without}."]

    def __repr__(self) -> str:
        return f"<CompiledComparison of {self.graphs} compilations>\n{self.text}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        first = f"<p><b>{html.escape(self._of_results())}</b></p>"
        for each in self._of_call():
            style = ' style="font-family: monospace; white-space: pre-wrap"' if each.startswith(INDENT) else ""
            first += f"<p{style}>{html.escape(each)}</p>"
        return bundle(repr(self), first + self.verdict._repr_mimebundle_()["text/html"])


def compare_compiled(
    session: SessionCore,
    function: Callee,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    threshold: float,
    grad_mode: GradMode | None = None,
) -> CompiledComparison:
    """See :meth:`graftlab.session.Session.compare_compiled`."""
    args, kwargs = arguments("compare_compiled", args, kwargs)
    if isinstance(function, str) and (args or kwargs):
        raise SessionError(f"compare_compiled: {function!r} is an expression, which takes no args; write them into it")
    refuse_invalid_expressions(function)
    if grad_mode not in (None, *get_args(GradMode)):
        raise SessionError(f"compare_compiled: grad_mode is {grad_mode!r}; it takes {', '.join(get_args(GradMode))}")
    packed = None if isinstance(function, str) else shipping.pack_function(function)
    call = CompiledCall(function if isinstance(function, str) else None, packed, dict(options), (), grad_mode)
    compiled = _CompiledRuns(session, function, call, args, kwargs)
    compiled.choose_what_is_compiled()
    untapped, exact_untapped = compiled.distances((), "without taps in the graph")
    other_mode = None
    if grad_mode is None and compiled.runs_without_gradients():
        # Without gradients, torch compiles a different program, and the caller may use that one.
        without = compiled.in_mode("no_grad")
        found, exact = without.distances((), "without taps in the graph, and without gradients")
        other_mode = found
        if found > _PARTED * without.floor.rel_l2 and not untapped > _PARTED * compiled.floor.rel_l2:
            compiled, other_mode, untapped, exact_untapped = without, untapped, found, exact
    floor = compiled.floor
    request = VerdictRequest(
        compiled.function,
        replace(compiled.call, names=None),
        exact=None if floor.error is not None else partial(call_in_float64, compiled.function),
        threshold=threshold,
        args=args,
        kwargs=kwargs,
    )
    verdict = judge(session, request)
    tapped, exact_tapped = compiled.distances(None, "with every tap in the graph")
    names = list(dict.fromkeys(str(name) for name in verdict.frame["name"]))
    fused = None
    if untapped > _PARTED * max(tapped, floor.rel_l2):
        fused = compiled.first_that_mends(names, untapped, tapped)
    mistake = compiled.search() if untapped > _PARTED * floor.rel_l2 else None
    return CompiledComparison(
        verdict,
        untapped,
        tapped,
        floor.rel_l2,
        (floor.exact, exact_untapped, exact_tapped),
        fused,
        compiled.graphs,
        floor.error,
        compiled.call.mode,
        other_mode,
        compiled.not_whole,
        {} if mistake is None else mistake.settings,
        None if mistake is None else mistake.stage,
        None if mistake is None else mistake.pieces,
    )


class _CompiledRuns:
    """Runs the function eager on the baseline and compiled on the target, with some taps in its graphs."""

    def __init__(
        self,
        session: SessionCore,
        function: Callee,
        call: CompiledCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._session = session
        self._plain = function
        self._args, self._kwargs = args, kwargs
        self.call = call
        self.not_whole: str | None = None
        self.graphs = 0
        self._floor: ResultFloor | None = None

    @property
    def function(self) -> Callee:
        """The eager call, in its mode."""
        return self._plain if self.call.mode is None else CallInMode(self._plain, self.call.mode)

    def in_mode(self, mode: GradMode) -> _CompiledRuns:
        """Return the runs of the same call in this mode."""
        changed = _CompiledRuns(self._session, self._plain, replace(self.call, mode=mode), self._args, self._kwargs)
        changed.not_whole, changed.graphs = self.not_whole, self.graphs
        return changed

    def choose_what_is_compiled(self) -> None:
        """Compile the call as a whole, or else the modules that it calls. Raises :class:`RunError` if neither works."""
        self.graphs += 1
        try_call = partial(why_not_compiled_whole, self.call, self._args, self._kwargs)
        run = self._run("what torch.compile can compile", None, try_call)
        self.not_whole = next((reason for reason in run.target if reason is not None), None)
        if self.not_whole is not None:
            self.call = replace(self.call, by_modules=True)

    def runs_without_gradients(self) -> bool:
        """Whether the call computes gradients without needing them itself."""
        ask = partial(runs_without_gradients, self._plain, self._args, self._kwargs)
        return all(self._run("whether the call computes gradients", ask, None).baseline)

    def search(self) -> CompilerSearch:
        """Find the compiler's step that is wrong, and the lines of source that it miscompiles."""
        limit = _PARTED * self.floor.rel_l2
        search = partial(search_compiler, self._plain, self.call, limit, self._args, self._kwargs)
        found: list[CompilerSearch] = list(
            self._run("which step of the compiler is wrong, and where", None, search).target
        )
        self.graphs += max(each.compilations for each in found)
        alike = all(each.settings == found[0].settings for each in found)
        return found[0] if alike else replace(found[0], settings={})

    @property
    def floor(self) -> ResultFloor:
        """How far rounding alone moves the eager result; known after the first call of :meth:`distances`."""
        assert self._floor is not None
        return self._floor

    def distances(self, names: tuple[str, ...] | None, title: str) -> tuple[float, float]:
        """The distances between the compiled and the eager result, and between each of them and the float64 result.

        Each is a rel_l2, on the rank where it is largest.
        """
        self.graphs += 1
        target = replace(self.call, names=names)
        run = self._run(f"compilation {self.graphs}, {title}", self.function, target, self._args, self._kwargs)
        expected, found = _results(run.baseline), _results(run.target)
        apart = distance(expected, found)
        if self._floor is None:
            self._floor = self._measured(expected, found)
        return apart, distance(self._floor.in_float64, found) if self._floor.error is None else math.nan

    def first_that_mends(self, names: list[str], untapped: float, tapped: float) -> str:
        """Find the first tap that makes the results agree when it is in the graph with all taps before it."""
        limit = math.sqrt(untapped * max(tapped, self.floor.rel_l2))
        parted, agreed = 0, len(names)
        while agreed - parted > 1:
            middle = (parted + agreed) // 2
            if self.distances(tuple(names[:middle]), f"with {middle} of {len(names)} taps")[0] > limit:
                parted = middle
            else:
                agreed = middle
        return names[agreed - 1]

    def _measured(self, expected: Results, found: Results) -> ResultFloor:
        call = partial(round_callee, self.function, self._args, self._kwargs, self._session.options.keep_budget)
        ranks: list[RoundedResults] = list(self._run("the eager result against itself", call, None).baseline)
        error = next((each.error for each in ranks if each.error is not None), None)
        in_float64 = _results([each.exact for each in ranks])
        return ResultFloor(
            moved=distance(expected, _results([each.moved for each in ranks])),
            exact=math.nan if error is not None else distance(in_float64, expected),
            unit=unit_of(expected, found),
            in_float64=in_float64,
            error=error,
        )

    def _run(
        self,
        title: str,
        baseline: Callee | None,
        target: Callee | None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run:
        rows = self._session.row_count
        # A graft of the plan in force would repair the difference.
        nothing: PlanEdit = {"b2t": "False", "t2b": "False", "compare": "False", "keep": None}
        callees: dict[Side, Callee | None] = {"baseline": baseline, "target": target}
        before = len(self._session.runs)
        try:
            run, _ = start_under(self._session, nothing, callees, args, kwargs)
            return run.wait(bar=LongWait(title, "rows", lambda: self._session.row_count - rows))
        except KeyboardInterrupt:
            if len(self._session.runs) > before:
                self._session.interrupt()
            raise WaitInterrupted(
                f"the comparison with compiled code was stopped ({title}); its code on the ranks was interrupted, and "
                "the plan from before is in force again"
            ) from None
        finally:
            restore_plan(self._session)


def _results(ranks: Sequence[Any]) -> Results:
    return [tensors_of(each) for each in ranks]


def _far(distance: float) -> str:
    return f"{distance:.1e} from the eager one" if distance else "equal to the eager one"
