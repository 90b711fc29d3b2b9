"""The HTML of filters and plans, and what their inputs mean, as a whole."""

from __future__ import annotations

import re

import pytest

from graftlab.errors import FilterError, GraftWarning
from graftlab.plan.plan import GraftPlan
from graftlab.widgets import filter_view, plan_view
from graftlab.widgets.draft_box import DraftBox
from graftlab.widgets.drafts import Draft


@pytest.mark.parametrize(
    ("expression", "position", "before", "after"),
    [
        ("a ==", 4, "a ==", ""),
        ("x" * 80, 40, "x" * 40, "x" * 40),
        ("x" * 81, 40, "x" * 40, "x" * 40 + "…"),
        ("x" * 81, 41, "…" + "x" * 40, "x" * 40),
        ("x" * 200, 100, "…" + "x" * 40, "x" * 40 + "…"),
        ("a <\nb", 3, "a &lt;", "⏎b"),
    ],
)
def test_a_fault_is_shown_in_forty_characters_on_each_side(
    expression: str, position: int, before: str, after: str
) -> None:
    shown = filter_view.fault_html(FilterError("it <ends>", expression, position))
    caret = f'<span class="unseen" aria-hidden="true">{before}</span><b>^</b>'
    assert shown == (
        f'<div class="fault bad" role="alert"><pre>{before}{after}\n{caret}</pre>it &lt;ends&gt; '
        f"(at position {position})</div>"
    )


def test_the_text_of_a_fault_is_one_line_around_it() -> None:
    assert str(FilterError("it ends", "a ==\nb", 5)) == "it ends (at position 5)\n    a == b\n         ^"
    assert str(FilterError("it ends", "y" * 61 + "x" * 61, 61)).splitlines()[1:] == [
        "    " + "y" * 60 + "x" * 60,
        "    " + " " * 60 + "^",
    ]
    assert str(FilterError("it ends")) == "it ends"


def test_an_earlier_plan_is_one_line_with_all_its_parts() -> None:
    def words(plan: GraftPlan) -> str:
        return re.sub("<[^>]*>", "", plan_view.plan_html(plan))

    with pytest.warns(GraftWarning):
        nothing = GraftPlan(version=3, compare="")
    assert words(nothing) == "3 no filters · transform default"
    rename = {"target": {"^m": "", "^n": ""}, "baseline": {"^o": ""}}
    plan = GraftPlan().edit(b2t="layer < 2", compare=None, keep="True", rename=rename, pairs=[("a", "b")])  # type: ignore[arg-type]
    assert words(plan) == f"{plan.version} b2t layer &lt; 2 · keep True · transform default · 3 renames · 1 pair"


def test_a_plan_says_from_which_steps_its_ranks_use_it() -> None:
    def said(adopted: dict[str, int], *alive: str, closed: bool = False) -> str:
        return re.sub("<[^>]*>", "", plan_view.adoption(7, adopted, alive, closed))

    every = {"baseline[0]": 3, "target[0]": 3, "target[1]": 5}
    assert said(every, "baseline[0]", "target[0]") == "Plan 7: used from step 3 on by all 2 ranks."
    assert said(every, "baseline[0]") == "Plan 7: used from step 3 on by baseline[0]."
    both = "used from step 3 on by baseline[0], target[0]; used from step 5 on by target[1]"
    assert said(dict(reversed(every.items())), *every) == f"Plan 7: {both}."
    assert said(every, closed=True) == "The last plan was version 7."
    assert said(every) == "Plan 7; no rank is alive."
    many = {f"target[{number}]": 2 for number in range(18)}
    named = ", ".join([*many][:16])
    assert said({**many, "target[17]": 1}, *many).endswith(f"used from step 2 on by {named} and 1 others.")


@pytest.mark.parametrize(
    ("kind", "draft"),
    [
        ("text", Draft("text", " a text ", "layer == 1")),
        ("name", Draft("name", "a.name", "layer == 1")),
        ("default", Draft("default")),
    ],
)
def test_a_draft_is_what_its_kinds_inputs_hold(kind: str, draft: Draft) -> None:
    values = {"kind": kind, "name": " a.name ", "text": " a text ", "where": " layer == 1\n"}
    assert DraftBox.of(values) == draft
