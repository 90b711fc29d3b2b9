"""The heat map of a tap that a verdict has kept, over other dimensions if it has the tensors; others are refused."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.control import verdicts
from graftlab.control.verdicts import Verdict
from graftlab.diffs.maps import difference_map
from graftlab.errors import SessionError
from graftlab.plots import verdict as figures
from graftlab.plots.style import NotebookFigure, new_axes
from graftlab.verdict.findings import Findings, ShownMap

PAIR = torch.zeros(2, 3, 4), torch.arange(24.0).view(2, 3, 4)
AGAIN = "set session.edit(keep=...), run again and call session.plot.heatmap"


def verdict(**pairs: tuple[torch.Tensor, torch.Tensor] | None) -> Verdict:
    """A verdict with a map of each group, and with these tensors."""
    frame = pd.DataFrame([{"name": f"{group}.0", "group": group, "label": "culprit", "added": 1.0} for group in pairs])
    maps = {group: ShownMap(group, difference_map(*PAIR), pair=pair) for group, pair in pairs.items()}
    return Verdict(Findings(frame, 5.0, 1, maps=maps), 3)


def test_a_map_is_drawn_over_the_dimensions_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "draw_shown_map", lambda shown, found, **more: drawn.append((shown.title, found.dims)))
    for options in ({}, {"dims": (0, 1)}):
        verdict(a=PAIR, b=None).plot("a.0", **options)
    verdict(a=PAIR, b=None).plot("b")
    assert drawn == [("a", (1, 2)), ("a", (0, 1)), ("b", (1, 2))]


def test_a_map_that_is_not_kept_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict.plot('c'): this verdict has no heat map of that tap; it has those of a, b. "
            f"For another tap, {AGAIN}"
        ),
    ):
        verdict(a=PAIR, b=None).plot("c")
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict.plot('b', dims=...): its tensors are too large to be kept with the verdict. "
            f"{AGAIN[0].upper()}{AGAIN[1:]}(dims=...)"
        ),
    ):
        verdict(a=PAIR, b=None).plot("b", dims=(0, 1))


def test_a_figure_in_axes_of_the_caller_has_no_canvas() -> None:
    more = {"step": 0, "order": 0, "ratio": 9.0, "floor": 0.1, "error": 1.0, "error_ratio": 9.0}
    made = Verdict(Findings(verdict(a=None).frame.assign(tags=[{}], **more), 5.0, 1), 3)
    figure: Any = made.plot()
    assert figure.interactive is not None
    own, ax = new_axes(None, 4.0, 4.0)
    assert isinstance(own, NotebookFigure)
    assert made.plot(ax=ax) is own
    assert own.interactive is None


def test_the_table_of_a_group_has_its_largest_ratio_also_beside_taps_without_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verdicts, "text_of", lambda findings: "the text")
    monkeypatch.setattr(verdicts, "parts_of", lambda findings: ([], ["the text"], []))
    frame = pd.concat([verdict(a=None).frame] * 3).assign(ratio=[math.nan, 7.25, 6.0], floor=0.1, alone=0.0)
    found = dataclasses.replace(verdict(a=None).findings, frame=frame)
    assert "7.25" in Verdict(found, 3)._repr_mimebundle_()["text/html"]


@pytest.mark.parametrize(
    ("inconclusive", "says"), [((), "nothing named"), (("The runs differ.",), "nothing named, and something differs")]
)
def test_a_verdict_that_names_nothing_says_whether_something_differs(
    inconclusive: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "text_of", lambda findings: "the text")
    found = verdict(a=None).findings
    found = dataclasses.replace(found, frame=found.frame.assign(label="clean"), inconclusive=inconclusive)
    assert repr(Verdict(found, 3)) == f"<Verdict of 3 runs: {says}>\nthe text"
