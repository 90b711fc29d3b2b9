"""The heat map of a tap that a verdict has kept, over other dimensions if it has the tensors; others are refused."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from kit.refusals import exactly

from graftlab.control.verdicts import Verdict
from graftlab.diffs.maps import difference_map
from graftlab.errors import SessionError
from graftlab.plots import verdict as figures
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
