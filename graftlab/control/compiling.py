"""The question that compiled code raises: does it compute what eager code does, and where not?"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graftlab.base import shipping
from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.control.judging import judge
from graftlab.control.verdicts import Verdict
from graftlab.control.works import Callee
from graftlab.errors import SessionError
from graftlab.taps.compiled_calls import CompiledCall

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore

# So many times farther off without taps than with them is the work of fusion; less is another order of rounding.
_PARTED = 5.0


@dataclass(frozen=True)
class CompiledComparison:
    """What ``session.compare_compiled`` returns: the verdict with taps in the graph, and what only their absence shows.

    ``untapped`` and ``tapped`` are how far the compiled function's result is from the eager one's, as ``rel_l2``,
    without a tap in its graphs and with all of them; NaN where it returns neither tensors nor
    numbers. ``fused`` is the tap with which in the graph the two agree, and without which, those before it being in the
    graph, they part; None where the result is as near without taps.

    >>> session.compare_compiled(forward, args=(x,), backend="eager").fused is None
    True
    """

    verdict: Verdict
    untapped: float
    tapped: float
    fused: str | None
    graphs: int

    @property
    def text(self) -> str:
        """The conclusion."""
        return f"{self._of_fusion()}\n{self.verdict.text}"

    def _of_fusion(self) -> str:
        if math.isnan(self.untapped):
            return (
                "The function returns no tensor and no number, so what it computes without taps could not be compared."
            )
        if self.untapped == self.tapped == 0:
            return "Compiled, its result is equal to the eager one, without taps and with them."
        apart = f"Compiled without taps its result is {_far(self.untapped)}, with taps {_far(self.tapped)}."
        if self.fused is None:
            return apart
        return (
            f"{apart} They part only without the tap {self.fused!r} in the graph: the compiler fuses across it, and "
            f"what it makes of that is wrong, which no row can show. gl.compile_taps chooses the taps of a graph."
        )

    def __repr__(self) -> str:
        return f"<CompiledComparison of {self.graphs} compilations>\n{self.text}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        first = f"<p><b>{html.escape(self._of_fusion())}</b></p>"
        return bundle(repr(self), first + self.verdict._repr_mimebundle_()["text/html"])


def compare_compiled(
    session: SessionCore,
    function: Callee,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any],
    threshold: float,
) -> CompiledComparison:
    """See :meth:`graftlab.session.Session.compare_compiled`."""
    if isinstance(function, str) and (args or kwargs):
        raise SessionError(f"compare_compiled: {function!r} is an expression, which takes no args; write them into it")
    packed = None if isinstance(function, str) else shipping.pack_function(function)
    compiled = _Compiled(session, function, packed, tuple(args), dict(kwargs), dict(options))
    untapped = compiled.distance((), "without taps in the graph")
    verdict = judge(
        session,
        function,
        CompiledCall(_source(function), packed, options),
        threshold=threshold,
        args=args,
        kwargs=kwargs,
    )
    tapped = compiled.distance(None, "with every tap in the graph")
    names = list(dict.fromkeys(str(name) for name in verdict.frame["name"]))
    fused = None
    if untapped > _PARTED * max(tapped, compiled.rounding):
        fused = compiled.first_that_mends(names, untapped, tapped)
    return CompiledComparison(verdict, untapped, tapped, fused, compiled.graphs)


def _source(function: Callee) -> str | None:
    return function if isinstance(function, str) else None


class _Compiled:
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
        self.rounding = 0.0

    def distance(self, names: tuple[str, ...] | None, title: str) -> float:
        """How far the results are from each other, as rel_l2, on the ranks where it is farthest."""
        self.graphs += 1
        rows, before = self._session.row_count, self._session.plan
        # A graft of the plan in force would repair the very thing that is looked for.
        plan = self._session.edit(b2t="False", t2b="False", compare="False", keep=None)
        target = CompiledCall(_source(self._function), self._packed, self._options, names)
        run = self._session.start(self._function, target, args=self._args, kwargs=self._kwargs)
        try:
            title = f"compilation {self.graphs}, {title}"
            run.wait(bar=LongWait(title, "rows", lambda: self._session.row_count - rows))
        except KeyboardInterrupt:
            self._session.interrupt()
            raise
        finally:
            # Somebody else's newer plan is theirs.
            if self._session.plan.version == plan.version:
                self._session.edit(b2t=before.b2t, t2b=before.t2b, compare=before.compare, keep=before.keep)
        expected = [list(_tensors(result)) for result in run.baseline]
        found = [list(_tensors(result)) for result in run.target]
        if not any(expected) and not any(found):
            return math.nan
        if len(expected) != len(found) and len(expected) > 1:
            raise SessionError(
                f"compare_compiled: {len(expected)} baseline ranks return results and {len(found)} target ranks, "
                f"so whose belong together is not known; launch as many on both sides, or one as the baseline"
            )
        self.rounding = max(_rounding(tensor) for results in (*expected, *found) for tensor in results)
        pairs = zip(expected if len(expected) > 1 else expected * len(found), found, strict=True)
        return max(_farthest(one, other) for one, other in pairs)

    def first_that_mends(self, names: list[str], untapped: float, tapped: float) -> str:
        """The tap with which, and with all before it, the results agree, and with only those before it they part."""
        limit = math.sqrt(untapped * max(tapped, self.rounding))
        parted, agreed = 0, len(names)
        while agreed - parted > 1:
            middle = (parted + agreed) // 2
            if self.distance(tuple(names[:middle]), f"with {middle} of {len(names)} taps") > limit:
                parted = middle
            else:
                agreed = middle
        return names[agreed - 1]


def _tensors(result: Any) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, (int, float)):
        yield torch.tensor(result, dtype=torch.float64)
    elif isinstance(result, Mapping):
        for each in result.values():
            yield from _tensors(each)
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors(each)


def _farthest(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    if len(expected) != len(found):
        return math.inf
    return max((_rel_l2(one, other) for one, other in zip(expected, found, strict=True)), default=0.0)


def _rounding(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point else 0.0


def _rel_l2(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return math.inf
    one, other = expected.double(), found.double()
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()) or not torch.allclose(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    difference, size = float((one - other).norm()), float(one.norm())
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _far(distance: float) -> str:
    return f"{distance:.1e} from the eager one" if distance else "equal to the eager one"
