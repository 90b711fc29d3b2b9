"""What the transform editor shows of a trial, of the transform in force and of changes."""

from __future__ import annotations

import re

import pytest
from kit.pages import words
from kit.rows import row

from graftlab.diffs.measure import DiffStats
from graftlab.grafting.trial import Trial
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec
from graftlab.widgets import trial_view as view
from graftlab.widgets.drafts import Version
from graftlab.widgets.filter_view import overlap_message

TAGS = {"name": "<h>", "step": 3, "side": "target", "rank": 1, "layer": 2}
TRACE = "Traceback (most recent call last):\n  File a\nValueError: <no>\n"


def stats(rel_l2: float, **more: float) -> DiffStats:
    usual = dict.fromkeys(("rel_l2", "max_abs", "mean_abs", "cosine"), 0.5)
    return DiffStats(**{**usual, "numel": 4, "nonfinite_differ": 0, **more, "rel_l2": rel_l2})  # type: ignore[arg-type]


def test_a_trial_that_ran_shows_where_its_tensors_and_what_it_printed() -> None:
    trial = Trial(
        tags=TAGS,
        seconds=0.0123,
        note="a <note>",
        received=["float32 [2]", "float32 [3]"],
        target="float32 [5]",
        result="float16 [5]",
        cast="to float32",
        printed="<printed>",
    )
    shown = view.trial_html(trial)
    assert "✓ ran on <b>&lt;h&gt; · layer=2 · target[1] · step 3</b> in 12.3 ms" in shown
    assert '<div class="note">a &lt;note&gt;</div>' in shown
    assert "received float32 [2], float32 [3] target float32 [5] returned float16 [5] (to float32)" in words(shown)
    assert 'printed</div><pre class="printed">&lt;printed&gt;</pre>' in shown
    assert "traceback" not in shown
    assert view.trial_html(Trial(target="x")).count("<td") == 6
    assert "returned -" in words(view.trial_html(Trial(target="x")))
    assert "✓ loads; not run on any tensors" in view.trial_html(Trial())


def test_a_trial_that_failed_shows_why_and_a_traceback_if_it_has_one() -> None:
    shown = view.trial_html(Trial(tags=TAGS, error=TRACE, seconds=1.0))
    assert 'class="bad verdict" role="alert">✗ failed on <b>' in shown
    assert "</b>: ValueError: &lt;no&gt;</div>" in shown
    assert '<div class="quiet">traceback</div><pre>Traceback' in shown
    assert "traceback" not in view.trial_html(Trial(error="TransformError: the shapes differ"))


def test_differences_before_and_with_the_draft_stand_side_by_side() -> None:
    shown = view.trial_html(Trial(before=stats(0.5), after=stats(0.25, max_abs=0.5, mean_abs=0.75)))
    lines = [re.findall(r"<td[^>]*>([^<]*)</td>", line) for line in shown.split("<tr>")]
    rows = {line[0]: line[1:] for line in lines if line}
    assert [rows[name][-1] for name in ("rel_l2", "max_abs", "mean_abs")] == ["↓ smaller", "= same", "↑ larger"]
    assert [float(number) for number in rows["rel_l2"][:2]] == [0.5, 0.25]
    assert "nonfinite_differ" not in rows
    assert "nonfinite_differ" in view.trial_html(Trial(before=stats(0.5, nonfinite_differ=2), after=stats(0.5)))
    assert "before (failed)" in view.trial_html(Trial(after=stats(0.5)))
    assert "smaller" not in view.trial_html(Trial(after=stats(0.5)))


@pytest.mark.parametrize(
    ("seconds", "text"), [(2e-6, "2 µs"), (9.99e-4, "999 µs"), (1e-3, "1.0 ms"), (0.5, "500.0 ms"), (1.0, "1.00 s")]
)
def test_a_duration_has_a_unit_of_its_size(seconds: float, text: str) -> None:
    assert view.duration(seconds) == text


def test_the_transform_in_force_is_shown_with_its_filter_and_an_edited_draft() -> None:
    spec = TransformSpec(
        "source", "def transform(graft_input):\n    return graft_input.received_list[0]\n", where="name == '<x>'"
    )
    plan = GraftPlan(b2t="True")
    shown = view.in_force_html(Version(3, spec), True, plan)
    assert shown.endswith("since plan 3 · where name == &#x27;&lt;x&gt;&#x27;")
    assert view.in_force_html(Version(3, spec), False, plan).endswith("● edited, not applied</span>")
    everywhere = TransformSpec("source", spec.text)
    assert view.where_text(everywhere, plan) == "where the plan grafts"
    assert view.where_text(everywhere, GraftPlan()) == "where the plan grafts (nowhere)"
    assert Version(None, spec).label.startswith("not applied: ")
    assert Version(3, spec).label.endswith(", 2 lines, where name == '<x>'")
    assert Version(3, everywhere).label.endswith(", 2 lines")


def test_failures_of_the_transform_in_force_are_counted_among_the_rows_of_its_plan() -> None:
    failed = row("<h>", status="failed", error="no\n\nTraceback", plan_version=2, step=5, rank=1)
    rows = [row("a", plan_version=2), failed, row("b", status="failed", error="old", plan_version=1)]
    shown = view.failure_warning(GraftPlan(version=2), rows)
    assert words(shown) == (
        "✗ fails in 1 of the newest 2 rows: no (<h> on target[1], step 5; the run continues with the unchanged tensor)"
    )
    assert view.failure_warning(GraftPlan(version=2), rows[:1]) == ""
    assert view.failure_warning(GraftPlan(version=3), rows) == ""


def test_waiting_work_changed_lines_and_overlaps_are_said_in_words() -> None:
    assert words(view.progress_html("trying <x>", 0)) == "trying <x>"
    assert words(view.progress_html("trying", 2)) == "trying (2 waiting)"
    assert "no differences" in view.difference_html([])
    lines = ["--- a", "+++ b", "@@ -1 +1 @@", "-<old>", "+new", " same"]
    kinds = re.findall(r'<span class="(\w*)">', view.difference_html(lines))
    assert kinds == ["place", "place", "place", "gone", "added", ""]
    assert "&lt;old&gt;" in view.difference_html(lines)
    assert overlap_message(1).startswith("both b2t and t2b match 1 tap;")
    assert overlap_message(1200).startswith("both b2t and t2b match 1,200 taps;")
