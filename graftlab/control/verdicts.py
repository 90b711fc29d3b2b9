"""The result of ``session.verdict``: text, a frame and a figure."""

from __future__ import annotations

import html
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graftlab.base.html import bundle, cell, number, table
from graftlab.base.text import counted
from graftlab.errors import SessionError
from graftlab.verdict.added import LABELS
from graftlab.verdict.findings import Findings
from graftlab.verdict.lines import INDENT, lines_frame
from graftlab.verdict.origins import ErrorOrigin
from graftlab.verdict.source_view import source_view
from graftlab.verdict.wording import parts_of, text_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from graftlab.plots.explorer import Canvas


@dataclass(frozen=True)
class Verdict:
    """Which computation differs, whether it is the cause, and what is only inherited.

    ``runs`` is how many runs it took. See :meth:`graftlab.Session.verdict`.

    >>> verdict = session.verdict(forward, forward, args=(x,))
    >>> verdict.named
    []
    """

    findings: Findings
    runs: int

    @property
    def text(self) -> str:
        """The conclusion, after what may overturn it and before what was not examined."""
        return text_of(self.findings)

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each tap of each receiving rank, in execution order; ``step`` counts from 0 in each run.

        ``added`` is the error that arose at the tap, ``floor`` what rounding adds there and ``ratio`` their quotient;
        ``error`` and ``error_ratio`` are those of a run without grafts. ``alone`` is how far the group by itself moves
        the output, as a multiple of the output's floor. ``label`` is ``culprit``, ``minor``, ``cancels``,
        ``inherited``, ``clean``, or ``unmeasured`` where there is no pair of finite numbers.
        """
        return self.findings.frame

    @property
    def named(self) -> list[str]:
        """The groups of taps whose computation differs, in execution order."""
        return self.findings.named

    @property
    def labels(self) -> dict[str, str]:
        """The label of each group: the most serious of its taps' labels."""
        found: dict[str, str] = {}
        for group, label in zip(self.frame["group"], self.frame["label"], strict=True):
            found[group] = min(found.get(group, label), label, key=LABELS.index)
        return found

    @property
    def lines(self) -> pd.DataFrame:
        """The lines of source at which the named groups' errors arise: a row for each line of each side.

        For each group up to three lines of the target and of the baseline, the most telling first. ``operation`` is
        torch's operation at the line, with its arguments. ``confirmed`` means that the tap agrees once this operation
        alone has the baseline's value. ``is_suspect`` means that from here on values have a different order, sign or
        place, which may be intended. ``state`` and ``written`` are the caches and buffers that the line reads and the
        other side lacks, and the lines that wrote them last. ``tap``, ``step``, ``occurrence`` and ``rank`` identify
        the traced call. ``stack`` has all lines that led to the operation, innermost first. Empty where nothing was
        named or could be traced.
        """
        return lines_frame(self.findings.lines)

    @property
    def origins(self) -> tuple[ErrorOrigin, ...]:
        """Where the errors of named values arise: for each, the innermost module of both sides whose outputs differ for
        equal inputs. Empty where no module is watched, for jobs, and without ``explain``.
        """
        return () if self.findings.origins is None else self.findings.origins.found

    def plot(self, tap: str | None = None, **options: Any) -> Figure:
        """Added and inherited error of each tap over the floor, with the culprits marked.

        With ``tap``, a named group or a tap of one: a heat map of where its tensors differ, in the call that adds the
        most. If its module is right, the map is of the module's input. The verdict's hint is marked. ``dims`` are the
        dimensions to show, rows and columns; the other ``options`` are those of
        :func:`graftlab.plots.draw_difference_map`, such as ``ax``. Raises :class:`SessionError` for a tap whose tensors
        were not looked at: only those of culprits are, of at most 24 groups.

        >>> figure = session.verdict(forward, forward, args=(x,)).plot()
        """
        if tap is not None:
            return self._heat_map(tap, options)
        from graftlab.plots.style import NotebookFigure
        from graftlab.plots.verdict import added_errors

        figure = added_errors(self.frame, threshold=self.findings.threshold, **options)
        if isinstance(figure, NotebookFigure) and options.get("ax") is None:
            figure.interactive = self._canvas
        return figure

    def _canvas(self) -> Canvas:
        from graftlab.plots.explorer import Canvas
        from graftlab.plots.verdict import explored, worst_of_ranks

        groups = worst_of_ranks(self.frame)["group"]
        state = explored(self.frame, self.findings.threshold, self.text.partition("\n")[0])
        return Canvas(state, lambda tap: {"where the tensors differ": self._heat_map(str(groups.iloc[tap]), {})})

    def _heat_map(self, tap: str, options: dict[str, Any]) -> Figure:
        from graftlab.diffs.maps import difference_map
        from graftlab.plots.verdict import draw_shown_map

        maps = self.findings.maps
        groups = [tap, *dict.fromkeys(self.frame.loc[self.frame["name"] == tap, "group"])]
        shown = next((maps[group] for group in groups if group in maps), None)
        if shown is None:
            known = ", ".join(maps) or "none"
            raise SessionError(
                f"verdict.plot({tap!r}): this verdict has no heat map of that tap; it has those of {known}. For "
                "another tap, set session.edit(keep=...), run again and call session.plot.heatmap"
            )
        found, dims = shown.found, options.pop("dims", None)
        if dims is not None:
            if shown.pair is None:
                raise SessionError(
                    f"verdict.plot({tap!r}, dims=...): its tensors are too large to be kept with the verdict. Set "
                    "session.edit(keep=...), run again and call session.plot.heatmap(dims=...)"
                )
            found = difference_map(*shown.pair, dims=dims)
        return draw_shown_map(shown, found, **options)

    def __repr__(self) -> str:
        differs = self.findings.unexplained or self.findings.inconclusive
        nothing = "nothing named, and something differs" if differs else "nothing named"
        return f"<Verdict of {counted(self.runs, 'run')}: {', '.join(self.named) or nothing}>\n{self.text}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(repr(self), self._html())

    def _html(self) -> str:
        before, answer, after = parts_of(self.findings)
        # The remarks that may overturn the answer are as important as the answer.
        bold = len(before) + 1
        paragraphs = [*before, *answer, *after]
        first = "".join(f"<p><b>{html.escape(line)}</b></p>" for line in paragraphs[:bold])
        text = "".join(map(_paragraph, paragraphs[bold:]))
        labels = self.labels
        worst = self.frame.loc[self.frame["group"].isin(self.named)]
        lines = []
        for group in self.named:
            rows = worst[worst["group"] == group]
            row = rows.iloc[int(rows["ratio"].fillna(0).to_numpy().argmax())]
            cells = [cell(group), cell(labels[group])]
            cells += [cell(number(row[column]), "number") for column in ("added", "floor", "ratio", "alone")]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        head = ("group", "label", "added", "floor", "ratio", "alone")
        facts = text + (table(head, lines) if lines else "")
        if self._pictures:
            # Side by side; in a narrow window the pictures stand above the text. Both are in view at once.
            parts = "".join(f'<div style="flex:1 1 36em;min-width:0">{part}</div>' for part in (facts, self._pictures))
            facts = f'<div style="display:flex;flex-wrap:wrap-reverse;align-items:flex-end;gap:0 2em">{parts}</div>'
        return first + facts + source_view(self.findings.lines)

    @cached_property
    def _pictures(self) -> str:
        """Where the tensors of named groups differ: a line for each that unfolds its picture, also without a kernel."""
        shown = {group: self.findings.maps[group] for group in self.named if group in self.findings.maps}
        if not shown:
            return ""
        from graftlab.plots.verdict import unfolding_maps

        return unfolding_maps(shown)


def _paragraph(line: str) -> str:
    # Lines of source stand below each other, as in the text.
    return f"<pre>{html.escape(line)}</pre>" if line.startswith(INDENT) else f"<p>{html.escape(line)}</p>"
