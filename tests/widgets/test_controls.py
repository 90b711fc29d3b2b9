"""The controls of the editors: each has a name and a hint, and text arrives when it is whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ipywidgets as widgets
import pytest
from kit.pages import Browser, descendants

from graftlab.plan.plan import GraftPlan
from graftlab.widgets.draft_box import DraftBox
from graftlab.widgets.panel import Panel, close_all
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.rename_list import RenameList
from graftlab.widgets.tap_chooser import TapChooser
from graftlab.widgets.version_list import VersionList

CONTROLS = {
    "draft": [
        ("ChoiceButtons", "", "", ""),
        ("NameBox", "", "Function or dotted path", "a function of the notebook, or package.module.function"),
        (
            *("NameBox", "where", "Filter of the taps to transform"),
            "blank: where the plan grafts; or a filter (True: all taps, including compared ones)",
        ),
    ],
    "taps": [
        ("Menu", "Try on", "", ""),
        ("Text", "", "Find a tap to try on", "find a tap"),
        ("Button", "Keep all taps", "Set the plan's keep filter to True", ""),
    ],
    "renames": [
        ("Button", "Renames (0)", "Show", ""),
        ("Dropdown", "Names of the", "", ""),
        ("Text", "that match", "", r"regular expression, such as ^model\."),
        ("Text", "become", "", "replacement; may be empty"),
        ("Button", "Add rule", "Add this rule and publish the rules", ""),
    ],
    "versions": [
        ("Button", "Versions (1)", "Show", ""),
        ("Menu", "", "Earlier transforms", ""),
        ("Button", "Compare", "Show the differences from the editor", ""),
        ("Button", "Load", "Load it into the editor without applying it", ""),
        ("Button", "Restore", "Publish it again", ""),
    ],
}


@pytest.fixture
def arrives_on() -> str:
    return "another thread"


@pytest.fixture
def panel(simulated: Browser) -> Iterator[Panel]:
    session: Any = type(
        "Session", (), {"closed": False, "row_count": 0, "taps": (), "plan": GraftPlan(), "plans": ()}
    )()
    refresher_of(session).interval = 1000
    made = Panel(session)
    yield made
    made.close()


def made_in(panel: Panel, name: str) -> widgets.Widget:
    if name == "draft":
        return DraftBox("text", lambda draft: "")
    if name == "taps":
        return TapChooser(panel, list)
    if name == "renames":
        renames = RenameList(panel)
        renames.show(GraftPlan(), closed=False)
        return renames
    versions = VersionList(panel)
    versions.follow([GraftPlan()])
    return versions


@pytest.mark.parametrize("name", CONTROLS)
def test_every_control_has_its_name_and_its_hint(name: str, panel: Panel) -> None:
    made = made_in(panel, name)
    kinds = (widgets.Button, widgets.Text, widgets.Dropdown, widgets.ToggleButtons, widgets.Combobox)
    found = [
        each for each in descendants(made) if isinstance(each, kinds) and "graftlab-source" not in each._dom_classes
    ]
    assert [
        (
            type(each).__name__,
            each.description,
            each.tooltip or "",
            getattr(each, "placeholder", "").replace("\u200b", ""),
        )
        for each in found
    ] == CONTROLS[name]
    # Only what is sought is looked for with each letter.
    assert [each.continuous_update for each in found if isinstance(each, widgets.Text)] == [name == "taps"] * sum(
        isinstance(each, widgets.Text) for each in found
    )
    close_all(made)


def test_each_kind_of_draft_is_explained(simulated: Browser) -> None:
    box = DraftBox("text", lambda draft: "")
    assert box.kinds.tooltips == (
        "Write the transform here",
        "Use a function of the notebook, or one that can be imported",
        "Pair by rank, or concatenate and slice shards",
    )
    box.propose(["a", "b", "a"])
    assert box.name.options == ("a", "b")
    assert {"torch", "gl", "graft_input.tags", "graft_input.received_list"} <= {*box.editor.completions}
    close_all(box)
