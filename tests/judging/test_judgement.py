"""What a verdict concludes from the rows of its runs, without a rank: the runs are given, and what they lack fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.rows import tap

from graftlab.control.verdicts import Verdict
from graftlab.diffs.results import ResultDifference
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging import measurement
from graftlab.judging.attempts import Attempts
from graftlab.judging.judgement import Judgement
from graftlab.judging.measurement import Measurement
from graftlab.judging.partial_sums import Summands
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns
from graftlab.plan.plan import GraftPlan
from graftlab.rows.store import to_frame
from graftlab.verdict.returned_values import ReturnedValues

NAMES = ("a", "b", "c")


def taps(status: str = "compared", **differences: float) -> pd.DataFrame:
    """The taps in their order, with these differences."""
    rows = [tap(name, order, differences.get(name, 0.0), status=status) for order, name in enumerate(NAMES)]
    return to_frame(rows)


def returned(rel_l2: float) -> ReturnedValues:
    return ReturnedValues((ResultDifference("", rel_l2, ("float32", "float32")),))


class Runs(VerdictRuns):
    """Runs whose rows and results are given by what the run is for."""

    def __init__(
        self, frames: Mapping[str, tuple[pd.DataFrame, float]], again: Sequence[str] = (), **request: Any
    ) -> None:
        session: Any = SimpleNamespace(
            plan=GraftPlan(), closed=False, options=SimpleNamespace(baseline=1, target=1), ranks=[]
        )
        super().__init__(session, VerdictRequest("f", "g", **{"explain": False, **request}))
        self.frames = frames
        self.made: list[str] = []
        self.again = list(again)

    def both(self, why: str, wanted: RunFilters) -> pd.DataFrame:
        self.made.append(why)
        self.count += 1
        if why not in self.frames:
            raise SessionError(f"{why}: a rank died")
        frame, apart = self.frames[why]
        self.returned = returned(apart)
        return frame

    def baseline_against_itself(self, rows: pd.DataFrame, keep: Sequence[str]) -> list[SelfGraft]:
        return []

    def return_weights(self) -> None:
        self.made.append("weights returned")
        super().return_weights()

    def target_against_itself(self) -> list[str]:
        self.made.append("target")
        return self.again


PLAIN, GRAFTED = "without grafts", "what each tap adds"


def verdict_of(compared: Any, grafted: Any, **more: Any) -> tuple[Verdict, Runs]:
    runs = Runs({PLAIN: compared, GRAFTED: grafted, **more.pop("frames", {})}, **more)
    return Judgement(runs).verdict(), runs


def test_taps_and_results_that_agree_are_reported_to_agree() -> None:
    verdict, runs = verdict_of((taps(), 0.0), (taps("grafted"), 0.0))
    assert verdict.named == []
    assert verdict.findings.failed == []
    # It names nothing only after the target was run against itself.
    assert runs.made == [PLAIN, GRAFTED, "target"]
    assert not verdict.findings.unexplained
    assert verdict.text.startswith("No tap adds more than rounding (3 groups of taps"), verdict.text


def test_a_result_that_differs_while_nothing_is_named_is_the_first_sentence() -> None:
    again = {"without grafts again": (taps(), 0.2)}
    verdict, _ = verdict_of((taps(), 0.2), (taps("grafted"), 0.2), frames=again)
    assert verdict.named == []
    assert verdict.findings.unexplained, verdict.text
    assert verdict.text.startswith(verdict.findings.unexplained[0]), verdict.text


def test_a_difference_that_another_run_lacks_is_reported_as_such() -> None:
    verdict, runs = verdict_of(
        (taps(c=0.2), 0.2), (taps("grafted"), 0.0), frames={"without grafts again": (taps(), 0.0)}
    )
    assert runs.made[-1] == "without grafts again"
    assert any("run" in each for each in verdict.findings.unexplained[1:]), verdict.text
    assert not verdict.findings.only_without_grafts


@pytest.mark.parametrize(("grafted", "only"), [(0.0, True), (0.1, False)])
def test_what_differs_only_without_grafts_is_known(grafted: float, only: bool) -> None:
    again = {"without grafts again": (taps(b=0.2, c=0.2), 0.2)}
    verdict, _ = verdict_of((taps(b=0.2, c=0.2), 0.2), (taps("grafted"), grafted), frames=again)
    assert verdict.findings.unexplained
    assert verdict.findings.only_without_grafts is only


def test_a_target_that_differs_from_itself_is_not_cleared() -> None:
    verdict, runs = verdict_of((taps(), 0.0), (taps("grafted"), 0.0), again=["b"])
    assert runs.made[-1] == "target"
    assert list(verdict.findings.target_not_repeated) == ["b"]
    assert "b" in verdict.text.partition("\n")[0], verdict.text


def test_a_run_that_fails_is_reported_and_clears_nothing() -> None:
    rows = taps(b=0.1, c=0.2), 0.2
    verdict = Judgement(Runs({PLAIN: rows, "without grafts again": rows})).verdict()
    (said,) = verdict.findings.failed
    assert said.startswith("The run in which every tap was grafted failed, so its results are missing: what each tap")
    assert verdict.named == []
    assert not verdict.findings.only_without_grafts
    assert said in verdict.text
    assert "agree" not in verdict.text.partition("\n")[0], verdict.text


def test_differing_inputs_come_before_what_may_follow_from_them() -> None:
    def with_input(status: str, **differences: float) -> pd.DataFrame:
        own = tap("x", 0, differences.pop("x", 0.0), status=status, own={"kind": "input"})
        rest = [tap(n, o, differences.get(n, 0.0), status=status) for o, n in enumerate(NAMES, 1)]
        return to_frame([own, *rest])

    verdict, _ = verdict_of(
        (with_input("compared", x=0.3, a=0.3, b=0.3, c=0.3), 0.3), (with_input("grafted", x=0.3), 0.0)
    )
    # They are no mistake of the target's code.
    assert verdict.named == ["x@input"]
    assert verdict.text.startswith("The inputs already differ: x"), verdict.text
    assert not verdict.findings.unexplained
    assert any("The differences above may explain it." in each for each in verdict.findings.data)


def test_the_tap_that_adds_an_error_is_named_beside_weights_that_differ() -> None:
    def rows(status: str, **differences: float) -> pd.DataFrame:
        # Weights are never grafted.
        weights = [tap("w", 0, 0.2, own={"kind": "param"})] if status == "compared" else []
        made = [
            *weights,
            *(tap(name, order, differences.get(name, 0.0), status=status) for order, name in enumerate(NAMES, 2)),
        ]
        return to_frame(made)

    verdict, runs = verdict_of((rows("compared", b=0.1, c=0.2), 0.2), (rows("grafted", b=0.1), 0.0))
    found = verdict.findings
    assert verdict.named == ["b"]
    assert set(verdict.frame.loc[verdict.frame["group"] == "b", "label"]) == {"culprit"}
    assert "b is computed differently" in verdict.text
    assert "target" not in runs.made
    assert [*found.weights] == ["w"]
    assert not found.weights_lent
    assert "The weights already differ: w" in verdict.text


def test_partial_sums_are_left_out_of_new_runs_from_the_targets_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is computed from a summand shows that it is one in the second run; then nothing new is found.
    found = iter([{name: Summands([name], [])} for name in "bcc"])
    monkeypatch.setattr(measurement, "partial_sums", lambda runs, grafted, limits: next(found))
    runs = Runs({PLAIN: (taps(), 0.0), GRAFTED: (taps("grafted"), 0.0)})
    runs.shows_module_inputs = True
    verdict = Judgement(runs).verdict()
    assert runs.made == [PLAIN, GRAFTED, *["weights returned", PLAIN, GRAFTED] * 2, "target"]
    assert "fullmatch('b|c', name)" in str(runs.changes(RunFilters(compare="True"))["compare"])
    assert any("b" in each for each in verdict.findings.unseen), verdict.findings.unseen


def test_summands_found_later_keep_the_limit_of_the_output_they_are_summed_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, float]] = []
    found = iter([{"b": Summands(["b"], [])}, {}])

    def sums(runs: Any, grafted: pd.DataFrame, limits: dict[str, float]) -> dict[str, Summands]:
        asked.append(limits)
        return next(found)

    monkeypatch.setattr(measurement, "partial_sums", sums)
    monkeypatch.setattr(measurement, "next_taps", lambda grafted, names: {"c": "b"} if names == {"b"} else {})
    monkeypatch.setattr(measurement, "quantised_limits", lambda compared: {"b": 0.25})
    runs = Runs({PLAIN: (taps(), 0.0), GRAFTED: (taps("grafted"), 0.0)})
    runs.shows_module_inputs = True
    Judgement(runs).verdict()
    assert asked == [{"b": 0.25}, {"b": 0.25, "c": 0.25}]


@pytest.mark.parametrize(("wrong", "named"), [((), False), ((), True), (("b",), False)])
def test_parts_of_gradients_are_left_out_unless_something_is_named_without_them_too(
    wrong: tuple[str, ...], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([{"b@grad": Summands(["b"], [*wrong])}] * 2)

    def sums(runs: Any, grafted: pd.DataFrame, *, kinds: Any) -> dict[str, Summands]:
        return next(found)

    monkeypatch.setattr(measurement, "partial_sums", sums)
    without = (taps("grafted", c=0.2 * named), 0.0)
    runs = Runs({PLAIN: (taps(), 0.0), GRAFTED: without}, gradient_parts=True)
    measured = Measurement(runs, Attempts(runs.session))
    measured.leave_out_parts_of_gradients()
    parts = measured.parts
    again = ["weights returned", PLAIN, GRAFTED]
    if wrong:
        # Nothing is left out, and nothing measured again.
        assert (parts, runs.made) == ({}, [PLAIN, GRAFTED])
    elif named:
        assert (parts, runs.made) == ({}, [PLAIN, GRAFTED, *again, *again])
    else:
        assert (parts, runs.made) == ({"b@grad": ["b"]}, [PLAIN, GRAFTED, *again])
    left = str(runs.changes(RunFilters(compare="True"))["compare"])
    assert ("fullmatch('b', name) and kind == 'grad'" in left) is (not wrong and not named)
