"""Single stages of a verdict, with given runs: what is measured, what is named, and what nothing explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.verdict_stages import JOBS, Made, naming, taps

from graftlab.diffs.rounding import assumed_floor
from graftlab.judging import effects, judgement, measurement
from graftlab.judging import naming as groups_named
from graftlab.judging.attempts import Attempts
from graftlab.judging.effects import Effects
from graftlab.judging.evidence import Evidence
from graftlab.judging.judgement import Judgement
from graftlab.judging.measurement import Measurement
from graftlab.judging.mechanisms import LentWeights
from graftlab.judging.naming import Naming, name_groups
from graftlab.judging.partial_sums import Summands
from graftlab.verdict.causes import Causes
from graftlab.verdict.first_step import FirstDifference
from graftlab.verdict.gradient_scaling import GradientScaling
from graftlab.verdict.model_data import AGREES_WITH_THE_BASELINES, BEGINNINGS, BELOW, WITH_THE_BASELINES
from graftlab.verdict.optimizer_settings import NO_SETTINGS, SETTINGS
from graftlab.verdict.returned_values import AccumulatedFloors
from graftlab.verdict.rounds_differently import RoundingGroups


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


class Differences:
    """What a verdict asks about unexplained differences, with a sentence for each."""

    found = ("no tap explains",)

    def __init__(self, *given: Any) -> None:
        self.given = given

    def not_compared(self, with_lost: bool) -> list[str]:
        return [f"not compared, with lost: {with_lost}"]

    def after_last_tap(self, all_grafted: bool) -> list[str]:
        return ["after the last tap"] if all_grafted else []

    def no_tap_explains(self, is_grafted: bool) -> list[str]:
        return list(self.found)

    def only_sometimes(self, again: object, returned: object, count: int) -> list[str]:
        return [f"only sometimes: {again}, {returned}, {count}"]

    def without_partner(self, last: object, chosen: object) -> list[str]:
        return [f"without partner: {last}" + (f", chosen: {chosen}" if chosen else "")]

    def __getattr__(self, name: str) -> Any:
        return lambda: [name]


@pytest.fixture
def unexplained(made: Made, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(judgement, "UnexplainedDifferences", Differences)
    made.evidence = replace(
        made.evidence,
        returned=SimpleNamespace(has_whole_numbers=True),  # type: ignore[arg-type]
        floors=SimpleNamespace(last_tap=lambda: "last", returned_not_repeated=[]),  # type: ignore[arg-type]
    )
    made.runs.both = lambda why, wanted: made.note((why, wanted.compare), "again")
    made.runs.returned = "results"
    made.evidence = replace(made.evidence, compared=pd.DataFrame({"dtype": ["float32"]}))
    made.runs.recorded, made.runs.unseen_choices = False, lambda compared: (None, True)

    def sentences(named: Sequence[str] = (), has_taps: bool = True, **more: Any) -> tuple[list[str], ...]:
        made.naming = naming(named, **more)
        return Judgement(made.runs)._unexplained(made.evidence, made.naming, has_taps=has_taps)

    return sentences


@pytest.mark.parametrize(
    ("explained", "graft_weights", "named", "left"),
    [
        (["b", "c"], False, ["a"], ["b", "c"]),
        (["b", "c"], True, ["a", "b", "c"], []),
        # Something must be named, and so must be the place where the jobs first differed.
        (["a", "b", "c"], False, ["a", "b", "c"], []),
        (["a", "b"], False, ["a", "c"], ["b"]),
    ],
)
def test_what_diverged_weights_explain_is_listed_beside_what_is_named(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    explained: list[str],
    graft_weights: bool,
    named: list[str],
    left: list[str],
) -> None:
    monkeypatch.setattr(judgement, "explained_by_weights", lambda frame, groups, weights, threshold: explained)
    group = None if len(explained) == 3 else "a"
    made.runs.request.graft_weights = graft_weights
    made.naming = naming(("a", "b", "c"), data=[f"{BEGINNINGS['param']}: w. {BELOW}"])
    first = FirstDifference(0, "the first", False, group)
    said = Judgement(made.runs)._leave_out_diverged(made.evidence, made.naming, first)
    assert (made.naming.named, made.naming.diverged, len(said)) == (named, left, bool(left))
    assert all(each in said[0] for each in left)
    assert (BELOW in made.naming.data[0]) == (not left)


def test_where_nothing_is_named_every_difference_is_reported(
    unexplained: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, without_output, written = unexplained()
    assert found == [
        "after the last tap",
        "written",
        "lost_gradients",
        "no tap explains",
        "only sometimes: again, results, 7",
    ]
    assert made.asked == [("without grafts again", "True")]
    assert without_output == ["lost", "without partner: last", "turned"]
    assert written == []
    assert made.naming.unseen == ["not compared, with lost: False"]
    # A user who names the output has chosen what counts.
    made.runs.request.output = "logits"
    assert unexplained()[1] == ["without partner: last, chosen: logits", "turned"]
    assert made.naming.unseen == ["not compared, with lost: True"]
    made.asked.clear()
    # A target that differs from itself needs no other run to show it.
    assert "only sometimes" not in str(unexplained(target_not_repeated=["h"])[0])
    made.evidence = replace(made.evidence, returned=None)
    assert "only sometimes" not in str(unexplained()[0])
    assert made.asked == []
    made.evidence = replace(made.evidence, grafted=taps("failed"))
    assert "after the last tap" not in unexplained()[0]
    made.runs.raised = object()
    assert unexplained()[1] == []


def test_where_all_agree_whole_numbers_are_no_output(
    unexplained: Any, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "whole_numbers_alone" not in unexplained()[1]
    for name in ("written", "lost_gradients"):
        monkeypatch.setattr(Differences, name, lambda self: [], raising=False)
    monkeypatch.setattr(Differences, "after_last_tap", lambda self, all_grafted: [])
    monkeypatch.setattr(Differences, "found", ())
    assert unexplained() == ([], ["lost", "without partner: last", "turned", "whole_numbers_alone"], [])
    assert "whole_numbers_alone" not in unexplained(has_taps=False)[1]
    made.runs.unseen_choices = lambda compared: (math.nan, True)
    # One sentence on them is enough.
    assert unexplained()[1][-1] == "whole_numbers_alone"
    said = "The returned whole numbers, such as tokens, agree. Whether the values"
    assert unexplained(has_taps=False)[1][-1].startswith(said)
    made.runs.unseen_choices = lambda compared: (0.02, True)
    (differing,) = unexplained(has_taps=False)[0]
    assert "but the values from which they were chosen differ by 0.02" in differing
    made.runs.unseen_choices = lambda compared: (None, False)
    assert unexplained(has_taps=False)[:2] == ([], ["lost", "without partner: last", "turned"])
    assert made.naming.unseen[-1].startswith(
        "from which values the returned whole numbers, such as tokens, were chosen"
    )
    made.runs.unseen_choices = lambda compared: (math.nan, True)
    made.evidence = replace(made.evidence, returned=SimpleNamespace(has_whole_numbers=False))  # type: ignore[arg-type]
    assert unexplained(has_taps=False)[1][-1] == "turned"
    made.evidence = replace(made.evidence, returned=None)
    assert unexplained(has_taps=False)[1][-1] == "turned"
    made.runs.recorded = True
    assert unexplained(has_taps=False)[1][-1].startswith(said)


def test_weights_that_differ_by_little_are_no_difference_of_functions_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "nearly_equal_weights", lambda compared, threshold: "nearly equal")
    weights = [f"{BEGINNINGS['param']}: w. {BELOW}"]

    def said(unexplained: Sequence[str] = (), lent: LentWeights | None = None, **more: Any) -> list[str]:
        made.naming = naming((), **{"data": [*weights], **more})
        evidence = replace(made.evidence, weights=lent or LentWeights())
        found = Judgement(made.runs)._nearly_equal_weights(evidence, made.naming, unexplained)
        # The sentence replaces the one on the weights.
        assert made.naming.data == ([] if found else more.get("data", weights))
        return found

    assert said() == ["nearly equal"]
    assert said(["something"]) == said(maybe_explained=["a line"]) == said(following=["a@grad"]) == []
    assert said(data=[*weights, f"{BEGINNINGS['input']}: x."]) == []
    # In a step of jobs the same weights may have been equal before, and what they lend is what differs.
    assert said(job_remarks=JOBS) == said(lent=LentWeights(taps("compared"))) == []
    monkeypatch.setattr(judgement, "nearly_equal_weights", lambda compared, threshold: None)
    assert said() == []


def test_differences_that_data_may_explain_follow_the_data(unexplained: Any, made: Made) -> None:
    found, *_ = unexplained(data_differs=True)
    assert found == ["after the last tap", "written", "lost_gradients"]
    assert made.naming.maybe_explained == ["no tap explains The differences above may explain it."]
    assert made.asked == []


def test_beside_a_named_group_only_what_comes_after_the_taps_is_reported(unexplained: Any, made: Made) -> None:
    assert unexplained(("b",)) == (["after the last tap"], [], ["written", "lost_gradients"])
    assert made.naming.unseen == ["not compared, with lost: True"]
    assert unexplained(("b",), inputs=["b"])[0][-1].startswith("only sometimes")
    assert unexplained(not_repeated=["b"]) == ([], [], [])


OUTPUT: Any = SimpleNamespace(
    name="logits",
    title="logits",
    group="d",
    end=(0, 9),
    tags={},
    all=[SimpleNamespace(group="d")],
    is_beside=lambda group: False,
)


class Swapping:
    """Swaps that find these causes."""

    def __init__(self, made: Made, *found: Causes | None, measurable: bool = True) -> None:
        self._made, self._found, self._measurable = made, list(found), measurable
        self.not_swapped: dict[str, Any] = {}
        self.unlike_ranks: dict[str, Any] = {}

    def can_measure(self, groups: Sequence[str], output: Any) -> bool:
        return self._measurable

    def causes(self, groups: Any, settled: Any, output: Any, threshold: float, *, by_size: Any) -> Causes | None:
        self._made.note(("causes", tuple(groups), tuple(settled), tuple(by_size)), None)
        return self._found.pop(0)

    def with_and_without(self, groups: Any, output: Any) -> tuple[float, float]:
        self._made.note(("with and without", tuple(groups)), None)
        return self._found.pop(0)  # type: ignore[return-value]


@pytest.fixture
def swapped(made: Made) -> Made:
    made.evidence = replace(made.evidence, selves=[object()], outputs=[OUTPUT])  # type: ignore[list-item]
    made.runs.baseline_changed = lambda: made.note("baseline", [])
    made.runs.without_dependents = lambda groups: made.note(("dependents", tuple(groups)), [])
    return made


def effects_of(made: Made, swaps: Any) -> Effects:
    return Effects(made.runs, made.evidence, made.naming, swaps, Attempts(made.runs.session))


def causes_of(made: Made, *found: Causes | None, measurable: bool = True) -> tuple[dict[str, Causes], list[str]]:
    swaps: Any = Swapping(made, *found, measurable=measurable)
    return effects_of(made, swaps).causes()


def test_the_effect_of_what_comes_before_an_output_is_measured_at_it(swapped: Made) -> None:
    swapped.naming = naming(("b", "c"), following=["d"], scaled=["e"])
    causes, remarks = causes_of(swapped, Causes({"b": "culprit", "c": "minor"}, total=9.0))
    assert causes == {"logits": Causes({"b": "culprit", "c": "minor"}, total=9.0)}
    assert remarks == []
    assert swapped.asked == [("causes", ("b", "c"), ("d", "e"), ("b", "c")), "baseline", ("dependents", ("c",))]
    # A group behind the output cannot move it.
    swapped.evidence = replace(swapped.evidence, outputs=[SimpleNamespace(**{**vars(OUTPUT), "end": (0, 1)})])  # type: ignore[list-item]
    swapped.asked.clear()
    causes, remarks = causes_of(swapped, Causes({"b": "culprit"}, total=9.0))
    assert swapped.asked[0] == ("causes", ("b",), ("d", "e"), ("b",))
    assert remarks == ["The effect of c on the output was not measured."]
    swapped.asked.clear()
    assert causes_of(swapped, measurable=False)[0] == {}
    # Gradients are computed after the output.
    swapped.naming.named = ["b@grad"]
    assert causes_of(swapped)[0] == {}
    assert swapped.asked == ["baseline", "baseline"]
    swapped.naming = naming(("b", "c"))
    assert causes_of(swapped, None)[0] == {}


def test_minor_groups_on_which_nothing_depends_are_outputs_themselves(swapped: Made) -> None:
    swapped.runs.without_dependents = lambda groups: swapped.note(("dependents", tuple(groups)), ["b"])
    labels = {"b": "minor", "c": "culprit", "d": "minor", "b@grad": "minor"}
    causes, remarks = causes_of(swapped, Causes(labels, total=9.0))
    # The output itself and gradients are never asked about.
    assert swapped.asked[-1] == ("dependents", ("b",))
    assert causes["logits"].labels == {**labels, "b": "culprit"}
    assert any(each.startswith("No later tap depends on b") for each in remarks)
    swapped.asked.clear()
    causes_of(swapped, Causes({"b": "culprit"}, total=9.0))
    assert swapped.asked[-1] == "baseline"


def test_an_output_that_agrees_at_its_end_may_differ_in_earlier_steps(
    swapped: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effects, "earlier_steps", lambda frame, output, floors, limit: (2,) if limit == 5.0 else ())
    assert causes_of(swapped, Causes({"b": "minor"}, total=1.0))[0]["logits"].earlier == (2,)
    assert causes_of(swapped, Causes({"b": "minor"}, total=9.0))[0]["logits"].earlier == ()


def test_swaps_against_a_baseline_that_changed_meanwhile_count_for_nothing(swapped: Made) -> None:
    swapped.runs.baseline_changed = lambda: ["a"]
    causes, (said,) = causes_of(swapped, Causes({"b": "culprit"}, total=9.0))
    assert causes == {}
    assert "the same values at a" in said


def can_swap(made: Made) -> bool:
    return causes_of(made, Causes({"b": "culprit"}, total=9.0))[0] != {}


def test_code_is_swapped_only_where_the_effect_can_be_measured(swapped: Made) -> None:
    assert can_swap(swapped)
    more: dict[str, Any]
    for more in ({"not_repeated": ["b"]}, {"job_remarks": JOBS, "target_not_repeated": ["b"]}):
        swapped.naming = naming(**more)
        assert not can_swap(swapped)
    for more in ({"target_not_repeated": ["b"]}, {"job_remarks": JOBS}):
        swapped.naming = naming(**more)
        assert can_swap(swapped)
    for name, value in (("recorded", True), ("raised", object())):
        before = getattr(swapped.runs, name)
        setattr(swapped.runs, name, value)
        assert not can_swap(swapped)
        setattr(swapped.runs, name, before)
    swapped.runs.request.explain = False
    assert not can_swap(swapped)
    swapped.runs.request.explain = True
    swapped.evidence = replace(swapped.evidence, selves=[])
    assert not can_swap(swapped)


def test_the_effect_of_rounding_differently_is_measured_where_nothing_is_named(
    swapped: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = RoundingGroups(("a", "b"))
    swapped.runs.request.constant_floor = None
    monkeypatch.setattr(effects, "rounds_differently", lambda frame, named: found)

    def assert_none(found: RoundingGroups) -> None:
        # From Python 3.13 on, dataclasses with equal NaNs are not equal.
        assert (found.groups, found.equal, found.dtypes, found.output) == ((), 0, (), "")
        assert math.isnan(found.restored)
        assert math.isnan(found.total)

    def rounding(*measured: Any, **more: Any) -> RoundingGroups:
        swapped.naming = naming(**{"named": (), **more})
        swaps: Any = Swapping(swapped, *measured)
        return effects_of(swapped, swaps).of_rounding()

    assert rounding((0.1, 0.4)) == found.with_effect("logits", 0.1, 0.4)
    # In any tensor parallel target sums over ranks round differently, which explains little.
    assert_none(rounding((0.3, 0.4)))
    assert len(swapped.asked) == 2
    assert repr(rounding(named=("a",))) == repr(found)
    assert_none(rounding(not_repeated=["b"]))
    monkeypatch.setattr(effects, "rounds_differently", lambda frame, named: RoundingGroups(("d",)))
    unmeasured = rounding()
    assert (unmeasured.groups, unmeasured.output) == (("d",), "")
    monkeypatch.setattr(effects, "rounds_differently", lambda frame, named: RoundingGroups())
    assert_none(rounding())
    monkeypatch.setattr(effects, "rounds_differently", lambda frame, named: found)
    swapped.runs.request.explain = False
    assert repr(rounding()) == repr(found)
    swapped.runs.request.explain = True
    # A gradient is no output of code that rounds.
    swapped.evidence = replace(
        swapped.evidence,
        outputs=[SimpleNamespace(**{**vars(OUTPUT), "tags": {"kind": "grad"}})],  # type: ignore[list-item]
    )
    assert repr(rounding()) == repr(found)
    assert len(swapped.asked) == 2
    # What stands out is a doubt where nothing is named, also beside sums over ranks.
    monkeypatch.setattr(effects, "taps_that_stand_out", lambda frame: "x adds far more.")
    assert rounding().stands_out == "x adds far more."
    assert rounding(named=("a",)).stands_out == ""
    swapped.runs.request.constant_floor = 0.05
    assert rounding().stands_out == ""
    swapped.runs.request.constant_floor = None
    swapped.evidence = replace(swapped.evidence, outputs=[OUTPUT])
    assert rounding((0.3, 0.4)).stands_out == "x adds far more."


def test_the_effect_of_quantised_modules_is_measured_where_nothing_else_is_named(swapped: Made) -> None:
    floors = SimpleNamespace(of_output=lambda group: SimpleNamespace(rel_l2=0.1))

    def quantised(*measured: Any, output: Any = OUTPUT, groups: tuple[str, ...] = ("a",), **more: Any) -> Any:
        swapped.evidence = replace(swapped.evidence, outputs=[output], floors=floors)  # type: ignore[arg-type]
        swapped.naming = naming(**{"named": (), **more})
        swapped.naming.quantised = SimpleNamespace(text=["Quantised."], outputs=lambda frame, named: groups)  # type: ignore[assignment]
        swapped.asked.clear()
        swaps: Any = Swapping(swapped, *measured)
        return effects_of(swapped, swaps).of_quantised()

    last = "With the baseline's outputs there, the output logits is off by 0.4; with the target's it is off by 0.6."
    assert quantised((0.4, 0.6)) == (["Quantised.", last], True)
    assert swapped.asked == [("with and without", ("a",))]
    # Up to the threshold times the output's floor that is all there is.
    assert quantised((0.6, 0.6))[1] is False
    whole = SimpleNamespace(**{**vars(OUTPUT), "name": "output"})
    assert quantised((0.0, 0.6), output=whole)[0][1] == (
        "With the baseline's outputs there, the output is bit-equal; with the target's it is off by 0.6."
    )
    for more in ({"groups": ()}, {"groups": ("d",)}, {"named": ("b",)}, {"not_repeated": ["b"]}):
        assert quantised(**more) == (["Quantised."], False)
        assert swapped.asked == []
    swapped.runs.request.explain = False
    assert quantised() == (["Quantised."], False)


# ---- what is named ---------------------------------------------------------------------------------------------------


class Floors:
    """Floors of a baseline that was run against itself."""

    not_repeated: Sequence[str] = ()
    returned_not_repeated: Sequence[str] = ()

    def of_groups(self) -> str:
        return "of groups"

    def of_taps(self) -> str:
        return "of taps"

    def of_wholes(self) -> str:
        return "of wholes"

    def accumulated(self, constant: float | None) -> AccumulatedFloors:
        return AccumulatedFloors({}, {}, constant)


@pytest.fixture
def given(made: Made, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of what names groups, by its name."""
    given: dict[str, Any] = {}

    def stub(name: str, result: Any) -> None:
        def called(*args: Any, **options: Any) -> Any:
            given[name] = (args, options)
            return result

        monkeypatch.setattr(groups_named, name, called)

    stub("added_frame", naming().frame)
    stub("judged_until_sketch", (naming().frame, "not judged since"))
    stub("not_in_twin", ["not in the twin"])
    stub("unseen_taps", ["unseen"])
    stub("differing_taps", ["differs"])
    stub("differing_data", ["data"])
    stub("data_of_jobs", ["data of jobs"])
    stub("contradicting_pairs", ["contradiction"])
    stub("compared_in_part", ["in part"])
    stub("input_names", {"x"})
    stub("computed_between_calls", set())
    stub("gradient_scaling", GradientScaling())
    made.evidence = replace(made.evidence, floors=Floors(), settings="settings")  # type: ignore[arg-type]
    made.runs.before, made.runs.has_twin = "plan", False
    made.runs.request.constant_floor = None
    made.runs.to_be_grafted = lambda rows: ("to be grafted", len(rows))
    made.runs.job_remarks = lambda compared, grafted, not_repeated: None
    return given


def named_in(made: Made, weights: LentWeights | None = None) -> Naming:
    return name_groups(made.runs, replace(made.evidence, weights=LentWeights() if weights is None else weights))


def test_groups_are_named_by_what_was_measured_over_its_floors(given: dict[str, Any], made: Made) -> None:
    found: Any = named_in(made)
    (rows, floors), options = given["added_frame"]
    assert rows is made.evidence.grafted
    assert floors == "of groups"
    assert options.pop("compared") is made.evidence.compared
    # Nothing was run against itself, so rounding is assumed.
    assert options == {
        "own": "of taps",
        "constant": assumed_floor(["float32"])[0],
        "allowed": {},
        "wholes": "of wholes",
    }
    assert found.accumulated.constant == options["constant"]
    assert (found.named, found.differing, found.given) == (["b", "c"], ["differs"], {"x"})
    assert given["differing_taps"][1] == {"leave": {"x"}}
    assert found.unseen == ["not in the twin", "unseen", "in part", "not judged since"]
    assert (found.contradictions, found.data) == (["contradiction"], ["data"])
    assert given["differing_data"][1] == {"of_weights": BELOW, "settings": "settings"}
    assert given["unseen_taps"][0][1] == ("to be grafted", 4)
    made.evidence = replace(made.evidence, selves=[object()], grafted=made.evidence.grafted.iloc[:0])  # type: ignore[list-item]
    assert named_in(made).accumulated.constant is None
    # Where that run failed, nothing was to be grafted.
    assert given["unseen_taps"][0][1] == ("to be grafted", 0)
    made.evidence.floors.not_repeated = ["b"]  # type: ignore[misc]
    found = named_in(made, LentWeights(failure="no room"))
    assert (found.differing, found.not_repeated) == ([], ["b"])
    assert "the target's code with the baseline's weights: no room" in found.unseen


def test_gradients_that_follow_or_are_scaled_are_not_named(
    given: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = SimpleNamespace(groups=("b",), text="scaled by 2", taken_out_of=lambda frame: frame)
    monkeypatch.setattr(groups_named, "gradient_scaling", lambda *_: scaling)
    monkeypatch.setattr(groups_named, "consequences", lambda frame, named, threshold: [*named])
    found = named_in(made)
    assert (found.named, found.following, found.scaled, found.inputs) == ([], ["c"], ("b",), ["b"])
    assert found.data[-1] == "scaled by 2"


def test_jobs_have_their_own_floor_and_data(given: dict[str, Any], made: Made) -> None:
    jobs = replace(JOBS, constant=3e-3, unseen=("other steps",))
    made.runs.job_remarks = lambda compared, grafted, not_repeated: jobs
    found = named_in(made)
    assert found.job_remarks is jobs
    assert (found.accumulated.constant, found.data) == (3e-3, ["data of jobs"])
    assert "other steps" in found.unseen
    assert "differing_data" not in given


def test_only_weights_that_were_lent_explain_nothing_more(
    given: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = LentWeights(made.evidence.compared)

    def differs(*data: str, weights: LentWeights | None = None) -> bool:
        monkeypatch.setattr(groups_named, "differing_data", lambda *_, **__: list(data))
        return named_in(made, weights).data_differs

    param = BEGINNINGS["param"]
    assert not differs()
    assert not differs(weights=lent)
    assert differs(param)
    assert not differs(param, weights=lent)
    assert differs(param, "The inputs differ", weights=lent)
    assert differs("The inputs differ")


def test_where_nothing_differs_with_the_baselines_weights_that_is_said(
    given: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_weights = WITH_THE_BASELINES
    lent = LentWeights(made.evidence.compared)
    monkeypatch.setattr(groups_named, "differing_data", lambda *_, of_weights, **__: [of_weights])
    monkeypatch.setattr(groups_named, "judged_until_sketch", lambda *_: (naming(()).frame, ""))
    monkeypatch.setattr(groups_named, "differing_taps", lambda *_, **__: [])
    assert named_in(made, lent).data == [AGREES_WITH_THE_BASELINES]
    assert named_in(made).data == [BELOW]
    for beyond, said in (([], AGREES_WITH_THE_BASELINES), (["logits"], of_weights)):
        made.evidence = replace(
            made.evidence,
            returned=SimpleNamespace(beyond=lambda *_, beyond=beyond: beyond),  # type: ignore[arg-type]
        )
        assert named_in(made, lent).data == [said]
    made.evidence = replace(made.evidence, returned=None)
    monkeypatch.setattr(groups_named, "differing_taps", lambda *_, **__: ["differs"])
    assert named_in(made, lent).data == [of_weights]


@pytest.mark.parametrize(
    ("inputs", "not_repeated", "clears"), [([], [], False), (["b"], [], True), (["b"], ["h"], False)]
)
def test_inputs_that_differ_name_no_computation(inputs: list[str], not_repeated: list[str], clears: bool) -> None:
    assert naming(("b",), inputs=inputs, not_repeated=not_repeated).clears is clears


def test_partners_that_taps_have_now_are_sought_of_outdated_pairs_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.runs.present_pairs = lambda: made.note("present pairs", [])
    monkeypatch.setattr(judgement, "learned_from_other_code", lambda outdated: f"learned: {outdated}")
    monkeypatch.setattr(judgement, "with_present_partners", lambda outdated, *_: outdated)
    for outdated, found in (([], ([], None)), (["a"], (["a"], "learned: ['a']"))):
        monkeypatch.setattr(judgement, "outdated_pairs", lambda *_, outdated=outdated: outdated)
        made.asked.clear()
        assert Judgement(made.runs)._outdated_pairs(made.evidence, made.naming) == found
        assert made.asked == ["present pairs"] * len(outdated)


def test_masked_values_are_left_out_where_something_differs_and_nothing_is_named(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_masked: tuple[Any, list[str]] = (naming(("b", "d")).frame, ["b"])
    monkeypatch.setattr(judgement, "without_masked_values", lambda *_: made.note("masked", without_masked))
    monkeypatch.setattr(judgement, "left_out", lambda names: f"left out: {names}")

    def unmasked(*named: str, **more: Any) -> list[str]:
        made.naming = naming(named, **{"differing": ["b"], **more})
        return Judgement(made.runs)._unmask(made.evidence, made.naming)

    assert unmasked(following=["d"]) == ["left out: ['b']"]
    assert made.naming.frame is without_masked[0]
    assert made.naming.named == ["b"]
    assert unmasked(following=["d"], scaled=["b"]) == []
    assert made.naming.named == []
    made.asked.clear()
    assert unmasked(differing=[]) == []
    assert unmasked("b") == []
    assert made.asked == []
    without_masked = naming(()).frame, ["b"]
    assert unmasked() == []
    without_masked = naming(("b",)).frame, []
    assert unmasked() == []


def test_the_origin_of_errors_is_sought_of_named_values_alone(
    given: dict[str, Any], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judgement, "added_frame", groups_named.added_frame)  # type: ignore[attr-defined]

    def sought(frame: Any, named: Sequence[str], rows: Any, added: Any, threshold: float) -> Any:
        added(rows)
        return made.note(tuple(named), "origins")

    hints: Any = SimpleNamespace(origins=sought)

    def origins(*named: str, **more: Any) -> Any:
        made.naming = naming(**more)
        made.naming.named = list(named)
        return Judgement(made.runs)._origins(made.evidence, made.naming, hints)

    made.runs.shows_module_inputs = True
    made.runs.request.constant_floor = None
    assert origins("b", "c", "d@grad", inputs=["c"]) == "origins"
    assert made.asked == [("b",)]
    assert given["added_frame"][1] == {"own": "of taps", "constant": assumed_floor(["float32"])[0]}
    made.evidence = replace(made.evidence, selves=[object()])  # type: ignore[list-item]
    origins("b")
    assert given["added_frame"][1]["constant"] is None
    made.asked.pop()
    made.runs.request.constant_floor = 0.05
    made.evidence = replace(made.evidence, selves=[])
    origins("b")
    assert given["added_frame"][1]["constant"] == 0.05
    made.asked.pop()
    assert origins("c", "d@grad", inputs=["c"]) is None
    assert origins("b", not_repeated=["a"]) is None
    made.runs.request.explain = False
    assert origins("b") is None
    made.runs.request.explain = True
    made.runs.shows_module_inputs = False
    assert origins("b") is None
    made.runs.recorded = True
    assert origins("b", "c").not_compared == {"b": (), "c": ()}
    assert made.asked == [("b",)]


def test_taps_of_one_side_are_sought_before_the_worst_tap_of_each_named_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(judgement, "only_before", lambda rows, worst: seen.update(worst) or {})
    rows = [("b", "x", 7.0, "culprit"), ("b", "y", 9.0, "culprit"), ("b", "z", 9.0, "culprit")]
    rows += [("c@grad", "c", 9.0, "culprit"), ("d", "d", 1.0, "clean")]
    frame = pd.DataFrame(rows, columns=["group", "name", "ratio", "label"])
    judgement._only_before(SimpleNamespace(grafted=None), frame)  # type: ignore[arg-type]
    assert {group: each["name"] for group, each in seen.items()} == {"b": "y"}


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(made: Made, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Runs that note the values of their filters, and return what they were made with as their result."""

    def both(why: str, filters: Any) -> pd.DataFrame:
        made.note((why, filters.b2t, filters.compare, filters.keep), None)
        made.runs.returned = SimpleNamespace(differences=[SimpleNamespace(path=why)], compared=True)
        return taps("grafted" if filters.b2t else "compared", b=0.1)

    made.runs.both = both
    made.runs.before = SimpleNamespace(pairs=())
    made.runs.pair = None
    made.runs.baseline_against_itself = lambda rows, keep: made.note(("itself", len(rows), tuple(keep)), [])
    made.runs.leave_out = lambda which: made.note(("left out", *which), None)
    made.runs.return_weights = lambda: made.note("weights returned", None)
    monkeypatch.setattr(measurement, "settings_difference", lambda rows, pair: NO_SETTINGS)
    monkeypatch.setattr(measurement, "split_calls", lambda rows: {("q", None): {}})
    monkeypatch.setattr(LentWeights, "of", classmethod(lambda cls, *_: cls()))
    return made


def measurement_of(made: Made) -> Measurement:
    return Measurement(made.runs, Attempts(made.runs.session))


PLAIN = ("without grafts", None, "True", SETTINGS)
GRAFTED = ("what each tap adds", "True", None, None)


def test_a_verdict_measures_without_grafts_then_with_all_then_the_baseline_itself(
    measured: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "find_outputs", lambda rows, output, paths: [OUTPUT] if paths else [])
    evidence = measurement_of(measured).evidence
    assert measured.asked == [PLAIN, GRAFTED, ("itself", 4, ("d",))]
    assert evidence.returned.differences[0].path == "without grafts"  # type: ignore[union-attr]
    assert evidence.returned_grafted.differences[0].path == "what each tap adds"  # type: ignore[union-attr]
    assert (evidence.outputs, evidence.settings) == ([OUTPUT], NO_SETTINGS)


def test_with_the_baselines_weights_that_run_is_judged(measured: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    lent = taps("compared")

    def lend(runs: Any, compared: Any, threshold: float) -> LentWeights:
        runs.returned = SimpleNamespace(differences=[SimpleNamespace(path="lent")])
        return LentWeights(lent)

    monkeypatch.setattr(LentWeights, "of", staticmethod(lend))
    evidence = measurement_of(measured).evidence
    assert evidence.compared is lent
    assert evidence.returned.differences[0].path == "lent"  # type: ignore[union-attr]


def test_without_the_grafted_run_no_output_is_measured(measured: Made) -> None:
    both = measured.runs.both
    measured.raising = {"what each tap adds"}
    evidence = measurement_of(measured).evidence
    assert (len(evidence.grafted), evidence.returned_grafted, evidence.outputs) == (0, None, [])
    # The floors are of what the other run compared.
    assert measured.asked[-1] == ("itself", 4, ())
    assert measured.runs.both is both


def test_calls_that_do_not_pair_are_left_out_where_a_result_is_compared(measured: Made) -> None:
    without = measurement_of(measured)
    without.leave_out_split_calls()
    assert without.split == {("q", None): {}}
    assert measured.asked[3:] == [
        ("left out", ("q", None)),
        "weights returned",
        PLAIN,
        GRAFTED,
        measured.asked[2],
    ]

    def is_left_out() -> bool:
        without = measurement_of(measured)
        without.leave_out_split_calls()
        return without.split != {}

    assert is_left_out()
    measured.runs.before.pairs = ("a pair",)
    assert not is_left_out()
    measured.runs.before.pairs = ()
    measured.runs.request.output = "d"
    assert not is_left_out()
    measured.runs.request.output = None
    both = measured.runs.both
    for nothing in (None, SimpleNamespace(compared=False, differences=[])):

        def returns_nothing(why: str, filters: Any, nothing: Any = nothing) -> pd.DataFrame:
            rows = both(why, filters)
            measured.runs.returned = nothing
            return rows  # type: ignore[no-any-return]

        measured.runs.both = returns_nothing
        assert not is_left_out()


def test_each_kind_of_tap_that_was_left_out_has_its_sentence(measured: Made) -> None:
    without = measurement_of(measured)
    assert without.not_compared == []
    without.split = {("q", None): {"baseline": 1, "target": 2}}
    without.sums = {"a": Summands(["a"], [])}
    without.parts = {"w@param_grad": ["w"]}
    without.averages = ["loss"]
    without.undone = {"e": {"e": 2.0}}
    begins = [sentence.partition(":")[0] for sentence in without.not_compared]
    assert begins == [
        "1 tap (q)",
        "a",
        "the gradients of the weight w",
        "loss on each rank of the target",
        "e (2 times)",
    ]


def test_partial_sums_are_sought_where_module_inputs_show_and_nothing_failed(
    measured: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "partial_sums", lambda runs, rows, limits: measured.note("sums", {}))
    for shows, failed, seeks in ((True, [], True), (False, [], False), (True, ["failed"], False)):
        measured.runs.shows_module_inputs = shows
        without = measurement_of(measured)
        without._attempt.failed += failed
        before = without.evidence
        measured.asked.clear()
        without.leave_out_partial_sums()
        assert without.evidence is before
        assert without.sums == {}
        assert ("sums" in measured.asked) is seeks


def test_groups_are_named_once_until_something_else_is_measured(
    measured: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    named_of: list[Evidence] = []

    def name(runs: Any, evidence: Evidence) -> Any:
        named_of.append(evidence)
        return SimpleNamespace(named=["b", f"d{len(named_of)}"])

    monkeypatch.setattr(measurement, "name_groups", name)
    monkeypatch.setattr(measurement, "scaled_taps", lambda runs, evidence, named: {"b": {"b": 2.0}})
    measured.runs.take_back = lambda which: measured.note(("taken back", *which), None)
    without = measurement_of(measured)
    before, first = without.evidence, without.naming()
    assert without.naming() is first
    # Without the tap others are named, so it is compared again. What was run since may count in a job's remarks.
    without.leave_out_undone_factors()
    assert (without.evidence, without.undone) == (before, {})
    assert without.naming() is not first
    assert [each is before for each in named_of] == [True, False, True]
    # One that is undone stays left out, and what is named without it is known.
    monkeypatch.setattr(measurement, "is_undone", lambda *_: True)
    without.leave_out_undone_factors()
    assert without.undone == {"b": {"b": 2.0}}
    assert without.naming().named == ["b", "d4"]
    assert named_of[-1] is without.evidence
