"""What can be judged, and what is concluded from rows alone, without a rank."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from kit.refusals import exactly
from kit.verdict_stages import taps

from graftlab.control.verdicts import Verdict
from graftlab.errors import SessionError
from graftlab.judging import judge
from graftlab.judging.judge import judge_rows, judge_runs, of_functions, runs_of
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.plots import verdict as plots_of_verdicts
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.verdict.added import added_frame, labelled
from graftlab.verdict.findings import Findings
from graftlab.verdict.gradient_scaling import GradientScaling
from graftlab.verdict.model_data import RunData

# ---- what can be judged ----------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SimpleNamespace(default_callees={}, verdicts=[], ranks=[SimpleNamespace(takes_work=True)] * 2)
    monkeypatch.setattr(judge, "internals_of", lambda session: session)
    return made


def test_each_side_has_its_own_default_function(session: Any) -> None:
    for given in ({"baseline": "f"}, {"target": "g"}, {}):
        with pytest.raises(
            SessionError,
            match=exactly(
                "give baseline= and target=, the functions to judge; only a session that listens "
                "for jobs judges without them, in the steps that the jobs make anyway"
            ),
        ):
            of_functions(session, VerdictRequest(given.get("baseline"), given.get("target")))
    session.default_callees = {"baseline": "f", "target": "g"}
    found = of_functions(session, VerdictRequest(None, None))
    assert (found.baseline, found.target) == ("f", "g")
    found = of_functions(session, VerdictRequest("own", None))
    assert (found.baseline, found.target) == ("own", "g")
    with pytest.raises(SessionError, match="is not valid Python"):
        of_functions(session, VerdictRequest("1 +", None))


def test_what_only_jobs_take_is_refused_for_functions(session: Any) -> None:
    for more in ({"steps": 2}, {"graft_weights": True}):
        with pytest.raises(
            SessionError,
            match=exactly(
                "verdict: steps= and graft_weights= are for a session that listens for jobs. A function that "
                "is called for each run makes all of its steps, and begins from the same weights"
            ),
        ):
            of_functions(session, VerdictRequest("f", "g", **more))  # type: ignore[arg-type]


def test_a_recording_can_be_the_baseline_and_has_no_floor(session: Any) -> None:
    class Recording(RecordedSide):
        def _load(self, *_: Any) -> Any:
            raise NotImplementedError

        _read_index = _load

    recording: Any = object.__new__(Recording)
    assert of_functions(session, VerdictRequest(recording, "g")).baseline is recording
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: the target is a recording, which computes nothing from what is grafted into it, so "
            "what each tap adds cannot be measured. Make it the baseline, or give the code that was "
            "recorded; session.plot.divergence() shows the differences as they are"
        ),
    ):
        of_functions(session, VerdictRequest("f", recording))
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: exact= measures a floor, and the baseline is a recording, which has none: leave it "
            "out, and give floor= where the assumed floor does not suit"
        ),
    ):
        of_functions(session, VerdictRequest(recording, "g", exact="h"))


def test_one_job_among_the_ranks_is_judged_as_jobs_are(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "StepRuns", lambda session, request: ("steps", request))
    monkeypatch.setattr(judge, "CalledRuns", lambda session, request: ("calls", request.baseline))
    assert runs_of(session, VerdictRequest("f", "g")) == ("calls", "f")
    session.ranks = [SimpleNamespace(takes_work=True), SimpleNamespace(takes_work=False)]
    request = VerdictRequest(None, None, steps=2)
    assert runs_of(session, request) == ("steps", request)
    for more in ({"baseline": "f"}, {"target": "g"}, {"exact": "h"}, {"args": (1,)}, {"kwargs": {"x": 1}}):
        with pytest.raises(
            SessionError,
            match=exactly(
                "verdict: these ranks are jobs that another launcher started, and cannot be given code to "
                "run: baseline=, target=, exact=, args= and kwargs= are for a launched session. "
                "session.verdict() judges what the jobs do"
            ),
        ):
            runs_of(session, replace(request, **more))  # type: ignore[arg-type]


def test_a_verdict_is_added_to_those_of_its_session(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Runs:
        is_open = False

        def __enter__(self) -> None:
            self.is_open = True

        def __exit__(self, *_: object) -> None:
            self.is_open = False

    runs: Any = Runs()
    runs.session = session
    monkeypatch.setattr(judge, "Judgement", lambda runs: SimpleNamespace(verdict=lambda: ("a verdict", runs.is_open)))
    assert judge_runs(runs) == ("a verdict", True)  # type: ignore[comparison-overlap]
    assert session.verdicts == [("a verdict", True)]
    assert not runs.is_open


# ---- rows alone ------------------------------------------------------------------------------------------------------

COMPARED, GRAFTED = taps("compared", b=0.1, c=0.1), taps("grafted", b=0.1)


def verdict_of(**more: Any) -> Verdict:
    given: dict[str, Any] = {
        "compared": COMPARED,
        "grafted": GRAFTED,
        "others": GRAFTED.iloc[:0],
        "shown": RunData(COMPARED.iloc[:0], None),
        "sizes": (1, 1),
        "ungrafted": COMPARED.iloc[:0],
        "floor": None,
        "threshold": 5.0,
        "where": "step 3 of run 0",
    }
    return judge_rows(**{**given, **more})


def test_rows_are_judged_by_what_each_tap_adds_over_the_given_floor() -> None:
    verdict = verdict_of()
    assert (verdict.named, verdict.runs) == (["b"], 0)
    assert dict(zip(verdict.frame["name"], verdict.frame["error"], strict=True))["c"] == 0.1
    assert verdict.labels["c"] == "inherited"
    found = verdict.findings
    assert (found.threshold, found.target_ranks) == (5.0, 1)
    assert found.job_remarks is not None
    assert "step 3 of run 0" in found.job_remarks.basis[0]
    assert found.remarks == found.job_remarks.of_named != ()
    assert verdict_of(floor=0.1).named == []
    assert verdict_of(threshold=1e9).named == []
    cleared = verdict_of(grafted=taps("grafted"))
    assert (cleared.named, cleared.findings.remarks) == ([], ())
    for wrong in ({"floor": -1.0}, {"threshold": -1.0}):
        with pytest.raises(SessionError, match="above 0, not -1"):
            verdict_of(**wrong)


def test_a_figure_that_is_drawn_into_given_axes_is_not_interactive() -> None:
    verdict = verdict_of()
    figure: Any = verdict.plot()
    assert figure.interactive is not None
    figure.interactive = None
    assert verdict.plot(ax=figure.axes[0]) is figure
    assert figure.interactive is None


def test_rows_of_misaligned_steps_allow_no_conclusion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "find_misaligned_steps", lambda rows: SimpleNamespace(sentence="Shifted by 1."))
    verdict = verdict_of()
    assert (verdict.findings.inconclusive, verdict.named) == (["Shifted by 1."], [])
    assert set(verdict.frame["label"]) == {"unmeasured"}
    assert verdict.findings.job_remarks is not None


def test_the_first_step_that_differs_is_sought_before_the_grafted_one(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []

    def first(rows: Any, floors: Any, threshold: float, ranks: tuple[int, int]) -> Any:
        steps.append((sorted(set(rows["step"])), floors.constant is not None, threshold, ranks))
        return SimpleNamespace(sentence="First in step 1.")

    monkeypatch.setattr(judge, "first_difference", first)
    monkeypatch.setattr(judge, "find_misaligned_steps", lambda rows: None)
    ungrafted = COMPARED.assign(step=[1, 2, 3, 4])
    found = verdict_of(grafted=GRAFTED.assign(step=3), ungrafted=ungrafted).findings
    assert found.job_remarks is not None
    assert found.job_remarks.first == ("First in step 1.",)
    verdict_of(grafted=GRAFTED.iloc[:0], ungrafted=ungrafted)
    assert steps == [([1, 2], True, 5.0, (1, 1)), ([1, 2, 3, 4], True, 5.0, (1, 1))]


def test_inputs_that_differ_in_rows_are_data_and_name_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "input_names", lambda rows: {"b"} if rows is COMPARED else set())
    monkeypatch.setattr(judge, "data_of_jobs", lambda shown, grafted, threshold: ["The inputs already differ: b."])
    found = verdict_of().findings
    assert (found.inputs, found.data[0]) == (["b"], "The inputs already differ: b.")
    monkeypatch.setattr(judge, "input_names", lambda rows: set() if rows is COMPARED else {"b"})
    assert verdict_of().findings.inputs == ["b"]


def test_scaled_gradients_and_what_follows_are_not_named_from_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[Any] = []

    def scaling(frame: Any, computed: Any, named: Any, *given: Any) -> Any:
        sizes.append(given)
        return SimpleNamespace(groups=("b",), text="scaled by 2", taken_out_of=lambda frame: frame)

    grafted = taps("grafted", b=0.1, c=0.1, d=0.1)
    monkeypatch.setattr(judge, "gradient_scaling", scaling)
    monkeypatch.setattr(judge, "consequences", lambda frame, named, threshold: [each for each in named if each != "d"])
    monkeypatch.setattr(judge, "extra_calls", lambda rows, named: [f"extra at {', '.join(named)}"])
    monkeypatch.setattr(judge, "unseen_of", lambda rows: ["unseen"])
    verdict = verdict_of(grafted=grafted, sizes=(2, 4))
    found = verdict.findings
    assert sizes == [(2, 4, 5.0)]
    assert (verdict.named, found.following, found.inputs) == (["d"], ["c"], ["b"])
    assert found.data == ["scaled by 2"]
    assert (found.extra_calls, found.unseen[0]) == (["extra at d"], "unseen")
    # Without the numbers of ranks a factor proves nothing.
    monkeypatch.setattr(judge, "consequences", lambda frame, named, threshold: [])
    assert verdict_of(grafted=grafted, sizes=None).named == ["b", "c", "d"]
    assert len(sizes) == 1
    assert not GradientScaling().groups


def test_a_notebook_shows_a_line_for_each_named_group_with_its_worst_tap() -> None:
    rows = pd.concat([taps("grafted", a=0.1, b=0.2, c=0.0), taps("grafted", a=0.3)])
    frame = added_frame(rows, {}, compared=rows, constant=1e-2)
    page = Verdict(Findings(labelled(frame, ("a", "b"), (), {}, 5.0), 5.0, 1), 3)._repr_mimebundle_()["text/html"]
    head, body = page[page.index("<thead>") :].split("</thead>")
    assert re.findall("<th class.*?>(.*?)</th>", head) == ["group", "label", "added", "floor", "ratio", "alone"]
    a, b = (re.findall("<td.*?>(.*?)</td>", line)[:5] for line in body.split("</tr>")[:2])
    assert a == ["a", "culprit", "3.00e-01", "1.00e-02", "3.00e+01"]
    assert b == ["b", "culprit", "2.00e-01", "1.00e-02", "2.00e+01"]


@pytest.mark.parametrize(
    ("less", "more"),
    [*itertools.pairwise(("unmeasured", "clean", "inherited", "rounds differently", "cancels", "minor", "culprit"))],
)
def test_a_group_has_the_most_serious_label_of_its_taps(less: str, more: str) -> None:
    frame = pd.DataFrame({"group": ["a", "a", "b", "a"], "label": [less, more, less, less]})
    assert Verdict(Findings(frame, 5.0, 1), 3).labels == {"a": more, "b": less}


def test_a_verdicts_figure_has_its_threshold_and_the_options_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Mock()
    monkeypatch.setattr(plots_of_verdicts, "added_errors", drawn)
    frame = pd.DataFrame({"group": ["a"], "label": ["clean"]})
    assert Verdict(Findings(frame, 7.0, 1), 3).plot(ax=None) is drawn.return_value
    drawn.assert_called_once_with(frame, threshold=7.0, ax=None)


def test_a_tap_has_the_name_that_it_has_in_the_target() -> None:
    rows = taps("grafted", a=0.1, b=0.2)
    named = rows.assign(target_name=[None, "theirs", "c", "d"])
    assert added_frame(named, {}, constant=1e-2)["target_name"].tolist() == ["a", "theirs", "c", "d"]
