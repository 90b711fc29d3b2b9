"""Names, tags and texts of a user's code are shown as they are: none becomes markup of a notebook or a page."""

from __future__ import annotations

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.in_process import a_row

from graftlab.base import jupyter, live
from graftlab.base.html import cell, rest_of
from graftlab.control.ranks_table import titled_table
from graftlab.diffs.maps import difference_map
from graftlab.plan.changes import PlanChange
from graftlab.plan.plan import GraftPlan
from graftlab.plots.verdict import unfolding_maps
from graftlab.rows.rendering import RowsFrame
from graftlab.rows.store import to_frame
from graftlab.verdict.findings import ShownMap
from graftlab.verdict.lines import DifferingLine
from graftlab.verdict.source_view import source_view

HOSTILE = '<img src=x>&"'


def plan_with(text: str) -> GraftPlan:
    condition = f"name == {text!r}"
    return GraftPlan(
        *(condition, condition, condition, condition),
        transform=[(condition, "math.sin")],
        rename={"target": {text: text}},
        pairs=[(text, text)],
    )


def markup_of(shown: Any) -> str:
    found: str = shown._repr_mimebundle_()["text/html"]
    return found


def of_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    file = tmp_path / f"{HOSTILE.replace('/', '')}.py"
    file.write_text(f"x = {HOSTILE!r}\n")
    line: Any = DifferingLine.__new__(DifferingLine)
    values = dict.fromkeys(DifferingLine.__dataclass_fields__)
    values |= {
        "group": HOSTILE,
        "side": "target",
        "file": str(file),
        "line": 1,
        "source": HOSTILE,
        "operation": HOSTILE,
    }
    values |= {"confirmed": False, "state": (), "written": (), "stack": (HOSTILE,), "arguments": (), "shapes": ()}
    for name, value in values.items():
        object.__setattr__(line, name, value)
    return source_view([line])


def of_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    shown: list[str] = []
    monkeypatch.setattr(live, "publisher", lambda: lambda bundle, **_: shown.append(bundle["text/html"]))
    live.LiveText().show(HOSTILE)
    return shown[0]


def of_link(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    found = jupyter.file_link(HOSTILE, HOSTILE)
    monkeypatch.setattr(jupyter, "_path_on_server", lambda file: file)
    return found + jupyter.file_link(HOSTILE, HOSTILE)


def of_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    tags = {"name": HOSTILE, HOSTILE: HOSTILE, "phase": HOSTILE, "step": 0, "side": "target", "rank": 0}
    rows = [a_row(name=HOSTILE, tags=tags | {"layer": layer}, note=HOSTILE, error=HOSTILE) for layer in range(3)]
    return RowsFrame(to_frame(rows))._repr_html_() or ""


MADE: dict[str, Callable[[pytest.MonkeyPatch, Path], str]] = {
    "plan": lambda *_: markup_of(plan_with(HOSTILE)),
    "change of a plan": lambda *_: markup_of(PlanChange(GraftPlan(), plan_with(HOSTILE))),
    "lines of source": of_lines,
    "live text": of_live,
    "link to a file": of_link,
    "rows": of_rows,
    "maps": lambda *_: unfolding_maps({HOSTILE: ShownMap(HOSTILE * 2, difference_map(torch.ones(2, 2), torch.eye(2)))}),
    "table of ranks": lambda *_: titled_table("a session", HOSTILE, [], False, {}, {"target": HOSTILE}),
    "cell": lambda *_: f"{cell(HOSTILE)}{rest_of(2, 'rows', HOSTILE)}",
}


@pytest.mark.parametrize("make", MADE.values(), ids=list(MADE))
def test_text_of_a_user_is_no_markup(
    make: Callable[[pytest.MonkeyPatch, Path], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = make(monkeypatch, tmp_path)
    assert "<img src=x>" not in page
    assert html.escape("<img src=x>&", quote=False) in page
