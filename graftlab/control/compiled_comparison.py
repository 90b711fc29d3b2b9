"""A comparison of compiled code with eager code: whether they compute the same, and where not."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from graftlab.base import shipping
from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.base.world import Side
from graftlab.control.core import start_under
from graftlab.control.judge import judge
from graftlab.control.run import Run
from graftlab.control.verdict_request import VerdictRequest
from graftlab.control.verdicts import Verdict
from graftlab.control.work import arguments
from graftlab.diffs.results import ResultFloor, Results, distance, tensors_of, unit_of
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import RoundedResults
from graftlab.plan.plan import PlanEdit
from graftlab.ranks.remote_functions import Callee, call_in_float64, round_callee
from graftlab.taps.compiled_calls import CompiledCall

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore

# A result farther off than this many times rounding is a different computation; a nearer one is rounded differently.
_PARTED = 5.0


@dataclass(frozen=True)
class CompiledComparison:
    """The result of ``session.compare_compiled``: the verdict with taps in the graph, and the results without them.

    ``untapped`` and ``tapped`` are the distances of the compiled result from the eager one, as ``rel_l2``, without any
    tap in the graphs and with all of them; NaN where the function returns neither tensors nor numbers. ``floor`` is how
    far rounding alone moves the eager result, measured with each tap moved by one unit in its last place, and from the
    same function in float64. ``exact`` are the distances from that float64 result: of the eager result, of the compiled
    one without taps, and of that with taps; NaN where the function does not run in float64. ``fused`` is the tap that
    makes the difference: the results agree with it and all earlier taps in the graph, and differ with only the earlier
    ones; None where the result is as near without taps.

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

    @property
    def text(self) -> str:
        """The conclusion."""
        return f"{self._of_results()}\n{self.verdict.text}"

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
            f"That is more than rounding ({floor}), though no tap adds as much: what is computed between the last tap "
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
        return bundle(repr(self), first + self.verdict._repr_mimebundle_()["text/html"])


def compare_compiled(
    session: SessionCore,
    function: Callee,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    threshold: float,
) -> CompiledComparison:
    """See :meth:`graftlab.session.Session.compare_compiled`."""
    args, kwargs = arguments("compare_compiled", args, kwargs)
    if isinstance(function, str) and (args or kwargs):
        raise SessionError(f"compare_compiled: {function!r} is an expression, which takes no args; write them into it")
    packed = None if isinstance(function, str) else shipping.pack_function(function)
    compiled = _CompiledRuns(session, function, packed, args, kwargs, dict(options))
    untapped, exact_untapped = compiled.distances((), "without taps in the graph")
    floor = compiled.floor
    request = VerdictRequest(
        function,
        CompiledCall(_source(function), packed, options),
        exact=None if floor.error is not None else partial(call_in_float64, function),
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
    return CompiledComparison(
        verdict,
        untapped,
        tapped,
        floor.rel_l2,
        (floor.exact, exact_untapped, exact_tapped),
        fused,
        compiled.graphs,
        floor.error,
    )


def _source(function: Callee) -> str | None:
    return function if isinstance(function, str) else None


class _CompiledRuns:
    """Runs the function eager on the baseline and compiled on the target, with some taps in its graphs."""

    def __init__(
        self,
        session: SessionCore,
        function: Callee,
        packed: bytes | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: dict[str, Any],
    ) -> None:
        self._session = session
        self._function = function
        self._packed = packed
        self._args, self._kwargs = args, kwargs
        self._options = options
        self.graphs = 0
        self._floor: ResultFloor | None = None

    @property
    def floor(self) -> ResultFloor:
        """How far rounding moves the eager result; known after the first call of :meth:`distances`."""
        assert self._floor is not None
        return self._floor

    def distances(self, names: tuple[str, ...] | None, title: str) -> tuple[float, float]:
        """The distances of the compiled result from the eager one, and from that in float64.

        Each is a rel_l2, on the rank where it is largest.
        """
        self.graphs += 1
        target = CompiledCall(_source(self._function), self._packed, self._options, names)
        run = self._run(f"compilation {self.graphs}, {title}", self._function, target, self._args, self._kwargs)
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
        call = partial(round_callee, self._function, self._args, self._kwargs, self._session.options.keep_budget)
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
        baseline: Callee,
        target: Callee | None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Run:
        rows, before = self._session.row_count, self._session.plan
        # A graft of the plan in force would repair the difference.
        nothing: PlanEdit = {"b2t": "False", "t2b": "False", "compare": "False", "keep": None}
        callees: dict[Side, Callee | None] = {"baseline": baseline, "target": target}
        run, plan = start_under(self._session, nothing, callees, args, kwargs)
        try:
            return run.wait(bar=LongWait(title, "rows", lambda: self._session.row_count - rows))
        except KeyboardInterrupt:
            self._session.interrupt()
            raise
        finally:
            # A newer plan was published by the user, and stays.
            if self._session.plan.version == plan.version:
                self._session.edit(b2t=before.b2t, t2b=before.t2b, compare=before.compare, keep=before.keep)


def _results(ranks: Sequence[Any]) -> Results:
    return [tensors_of(each) for each in ranks]


def _far(distance: float) -> str:
    return f"{distance:.1e} from the eager one" if distance else "equal to the eager one"
