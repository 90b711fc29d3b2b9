"""The lines of source at which one tap differs, without a verdict on other taps."""

from __future__ import annotations

import difflib
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pandas as pd

from graftlab.base.html import bundle
from graftlab.errors import SessionError
from graftlab.judging.judge import runs_of
from graftlab.judging.line_runs import LineSearch
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import RunFilters
from graftlab.verdict.added import added_frame, one_sided_filter
from graftlab.verdict.lines import DifferingLine, lines_frame, lines_in_words
from graftlab.verdict.source_view import source_view

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore


@dataclass(frozen=True)
class TapLines:
    """The result of ``session.lines``: where a tap's error arises when all earlier taps have equal values.

    ``added`` is that error, as ``rel_l2`` on the rank where it is largest, ``floor`` the rounding of its dtype, 0 for
    whole numbers. If numbers are finite on one side alone, or all 0 on the baseline, ``added`` is infinite.

    >>> session.lines("hidden", forward, forward, args=(x,)).text
    "'hidden' adds no more than rounding: from equal inputs, both sides compute the same."
    """

    tap: str
    added: float
    floor: float
    found: Sequence[DifferingLine]
    remarks: Sequence[str] = ()
    """Sentences on what could not be traced or confirmed."""

    @property
    def frame(self) -> pd.DataFrame:
        """The lines: a row for each, as in :attr:`graftlab.Verdict.lines`."""
        return lines_frame(self.found)

    @property
    def text(self) -> str:
        """How far apart the sides are at the tap, and the first line of each side."""
        return "\n".join([self._headline, *lines_in_words(self.found, [self.tap]), *self.remarks])

    @property
    def _headline(self) -> str:
        if self.added == 0:
            return f"{self.tap!r} adds no more than rounding: from equal inputs, both sides compute the same."
        if math.isinf(self.added):
            far = f"{self.tap!r} adds a difference above any rounding: numbers are finite, or not 0, on one side alone."
        elif self.floor == 0:
            far = f"{self.tap!r} adds {self.added:.2g}, and numbers of its dtype are not rounded."
        else:
            far = f"{self.tap!r} adds {self.added:.2g}, {self.added / self.floor:.2g} x the rounding of its dtype."
        return far if self.found or self.remarks else f"{far} No operation was found that causes this."

    def __repr__(self) -> str:
        return f"<TapLines of {self.tap}>\n{self.text}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        remarks = "".join(f"<p>{html.escape(each)}</p>" for each in self.remarks)
        return bundle(repr(self), f"<p><b>{html.escape(self._headline)}</b></p>{source_view(self.found)}{remarks}")


def lines_of_tap(session: SessionCore, tap: str, request: VerdictRequest) -> TapLines:
    """See :meth:`graftlab.session.Session.lines`."""
    with runs_of(session, request) as runs:
        if runs.recorded:
            raise SessionError(
                "lines: the baseline is a recording, which has no operations to compare with; session.verdict() names "
                "the tap"
            )
        compared = runs.both("without grafts", RunFilters(compare="True"))
        grafted = runs.both("what each tap adds", RunFilters(b2t="True"))
        one_sided = one_sided_filter(pd.concat([compared, grafted]))
        frame = added_frame(runs.to_be_grafted(grafted), {})
        mine = frame["name"] == tap
        if not mine.any():
            mine = frame["group"] == tap
        if not mine.any():
            names = list(dict.fromkeys([*frame["name"], *frame["group"]]))
            close = difflib.get_close_matches(tap, names, n=3)
            others = f"did you mean {', '.join(map(repr, close))}?" if close else f"measured: {', '.join(names[:8])}"
            raise SessionError(f"lines: no tap {tap!r} was measured on both sides in this call; {others}")
        frame.loc[mine, "group"] = tap
        rows = frame[mine]
        if rows["ratio"].isna().any():
            raise SessionError(
                f"lines: {tap!r} has no pair of finite numbers in some call, so how far it differs is unknown; "
                "session.lines of the first tap with a number that is not finite may tell why"
            )
        if not (rows["ratio"] > request.threshold).any():
            return TapLines(tap, 0.0, 0.0, ())
        worst = rows.iloc[int(rows["ratio"].to_numpy().argmax())]
        search = LineSearch(runs, frame, request.threshold, one_sided)
        search.trace([tap])
        search.confirm()
        found = [replace(each, group=tap) for each in search.lines]
        # Numbers that are finite on one side alone are not part of what is added.
        is_above_any = math.isinf(worst["ratio"]) and worst["floor"] > 0
        added = math.inf if is_above_any else float(worst["added"])
        return TapLines(tap, added, float(worst["floor"]), found, search.remarks)
