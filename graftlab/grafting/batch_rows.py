"""The rows of a batch that taps have shown on this rank, and the layouts of pairs for such a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import get_ident

import torch

from graftlab.base.tags import TagItems
from graftlab.layouts import Layout, Rows
from graftlab.layouts.row_alignment import ShownRows, rows_between
from graftlab.plan.pairs import PairRule

RowsOfTaps = Mapping[str, Sequence[ShownRows]]
"""For each tap that shows rows, its calls in this step so far."""


class BatchRows:
    """The rows that taps have shown in one step, by the thread and the tags around their calls.

    So two requests that are computed at once, each with its own tag around it, do not mix up their rows.
    """

    def __init__(self) -> None:
        self._shown: list[tuple[str, int, TagItems, ShownRows]] = []

    def show(self, name: str, tensor: torch.Tensor, around: TagItems) -> None:
        """Remember the rows of a call. A tensor that has none is left out."""
        if tensor.dim() > tensor.is_floating_point() and not tensor.is_complex():
            self._shown.append((name, get_ident(), around, ShownRows.of(tensor)))

    def of(self, rule: PairRule, is_whole: bool, around: TagItems) -> RowsOfTaps | None:
        """The rows that a pair needs on this side, for a call in this place; None if it needs none."""
        steps = rule.row_steps
        if not steps:
            return None
        names = {step.of if is_whole else step.into for step in steps}
        return {name: self._calls(name, around) for name in names}

    def _calls(self, name: str, around: TagItems) -> list[ShownRows]:
        thread = get_ident()
        return [
            shown
            for known, of_thread, tags, shown in self._shown
            if known == name and of_thread == thread and all(tag in around for tag in tags)
        ]


def for_batch(layout: Layout, whole: RowsOfTaps, part: RowsOfTaps) -> Layout:
    """The layout with the rows that both sides have shown. If one side has shown none, it cannot be applied."""
    steps = [
        step.with_found(rows_between(of, into))
        if isinstance(step, Rows) and (of := whole.get(step.of)) and (into := part.get(step.into))
        else step
        for step in layout.steps
    ]
    return replace(layout, steps=tuple(steps))
