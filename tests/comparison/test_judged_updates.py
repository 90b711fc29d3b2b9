"""What is concluded of held updates from given rows and a given verdict, without a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from kit.refusals import exactly
from kit.rows import tap

from graftlab.comparison import held_updates
from graftlab.comparison.answers import Comparison
from graftlab.comparison.gradients import GradientFindings
from graftlab.comparison.held_updates import _differing_settings, judge_held_updates
from graftlab.comparison.repeats import JudgingChoice
from graftlab.control.verdicts import Verdict
from graftlab.errors import RunError
from graftlab.plan.pairs import PairRule
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import OfUpdate, repeat_call
from graftlab.rows.store import to_frame
from graftlab.verdict.added import added_frame, labelled
from graftlab.verdict.findings import Findings
from graftlab.verdict.rounds_differently import RoundingGroups

SHOW, TAKE = OfUpdate(HeldUpdate.show_inputs), OfUpdate(HeldUpdate.take_inputs)


def update(**more: Any) -> UpdateDescription:
    made = object.__new__(UpdateDescription)
    usual = {
        "optimizer": "AdamW",
        "not_repeated": False,
        "has_closure": False,
        "settings": {},
        "gradients": {"w": None},
        "dtypes": {"w": "float32"},
        "states": {},
        "frozen": (),
        "elsewhere": (),
    }
    made.__dict__.update({**usual, **more})
    return made


def rows(*given: tuple[str, str | None, float], status: str = "compared", **more: Any) -> pd.DataFrame:
    return to_frame(
        [
            tap(name, order, apart, own={} if kind is None else {"kind": kind}, status=status, **more)
            for order, (name, kind, apart) in enumerate(given)
        ]
    )


GIVEN = (("w", "param", 0.0), ("w", "param_grad", 0.0))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is given, and what was done."""
    made = SimpleNamespace(given=rows(*GIVEN), taken=rows(*GIVEN), done=[], explained=[])
    made.gradients, made.named = GradientFindings(), ()
    made.rounding, made.data, made.following, made.after, made.moved, made.of_sums = (
        [],
        [],
        (),
        None,
        None,
        rows(("w", "param", 0.0)),
    )

    def run(*functions: Any) -> Any:
        made.done.append(functions)
        is_divided = any(isinstance(each, tuple) and each[0] is None for each in made.done)
        after = made.of_sums if is_divided else made.after
        frames: dict[Any, Any] = {SHOW: made.given, repeat_call: after, OfUpdate(HeldUpdate.show_unchanged): made.moved}
        return SimpleNamespace(frame=frames.get(functions[1], made.taken))

    session: Any = SimpleNamespace(run=run, plan=SimpleNamespace(pairs=()))
    monkeypatch.setattr(held_updates, "lend_plan", lambda session, **plan: made.done.append(dict(sorted(plan.items()))))
    monkeypatch.setattr(held_updates, "restore_plan", lambda session: made.done.append("restored"))
    monkeypatch.setattr(held_updates, "judge_gradients", lambda *given: made.gradients)

    def verdict(choice: Any, *, explain: object) -> Verdict:
        made.explained.append(explain)
        apart = [(name, kind, 0.1 if name in made.named else 0.0) for name, kind in made.taps]
        frame = added_frame(rows(*apart, status="grafted"), {}, compared=rows(*apart), constant=1e-6)
        named = [group for group in frame["group"] if group.partition("@")[0] in made.named]
        labels = labelled(frame, named, made.following, {}, 5.0)
        rounding = RoundingGroups(tuple(made.rounding))
        more = {"data": made.data, "following": made.following, "rounding": rounding, "lines": made.lines}
        more["inputs"] = made.inputs
        return Verdict(Findings(labels, 5.0, 1, **more), 3)

    made.taps, made.lines, made.inputs = [("w", "param")], [], ["w@optimizer"]
    made.repeats = SimpleNamespace(session=session, verdict=verdict, in_place=True)
    return made


def judged(made: Any, ours: Any = None, theirs: Any = None) -> Comparison:
    updates = [ours or update()], [theirs or update()]
    return judge_held_updates(made.repeats, *updates, JudgingChoice(), None, {})


def test_equal_updates_agree_and_the_target_began_with_the_baselines_values(made: Any) -> None:
    compared = judged(made)
    assert (compared.answer, compared.named, compared.runs) == ("agree", [], 3)
    assert compared.remarks == ("From equal weights, gradients and state both sides compute the same update.",)
    nothing: dict[str, str | None] = {"b2t": None, "compare": "True", "keep": None, "t2b": None}
    assert made.done == [
        nothing,
        (SHOW, SHOW),
        "restored",
        {**nothing, "b2t": "True"},
        (TAKE, TAKE),
        "restored",
    ]


def test_states_are_compared_under_the_names_of_paired_weights(made: Any) -> None:
    made.repeats.session.plan.pairs = (PairRule("w", "W"),)
    edited: list[Any] = []
    made.repeats.session.edit = lambda **changes: edited.append(changes) or made.done.append("edited")
    judged(made, *(update(states={name: {"step": ()}}, gradients={}, dtypes={name: "float32"}) for name in "wW"))
    assert edited == [{"pairs": [PairRule("w", "W"), PairRule("w.step", "W.step")]}]
    assert made.done[0] == "edited"


@pytest.mark.parametrize("closed", [False, True])
def test_pairs_of_calls_are_in_force_again_after_an_update_that_names_pair(made: Any, closed: bool) -> None:
    session, pair = made.repeats.session, PairRule("w", "body.w")
    session.plan.pairs, session.closed = (pair,), False
    edited: list[Any] = []
    session.edit = lambda **changes: edited.append(changes)
    updates = [update(dtypes={"w": "float32"}) for _ in range(2)]
    judged(made, *updates)
    assert edited == [{"pairs": []}, {"pairs": (pair,)}]
    # The reason of a failure is not replaced by one of a closed session.
    session.closed, session.run = closed, Mock(side_effect=RunError("stopped"))
    with pytest.raises(RunError, match=exactly("stopped")):
        judged(made, *updates)
    assert edited[2:] == [{"pairs": []}, *([] if closed else [{"pairs": (pair,)}])]
    assert made.done[-1] == "restored"


def test_a_different_update_differs_from_equal_values(made: Any) -> None:
    made.named = ("w",)
    compared = judged(made)
    assert (compared.answer, compared.named) == ("differ", ["w@param"])
    assert compared.remarks[-1] == "The gradients agree, and the updates computed from them differ."
    made.gradients = GradientFindings(sentences=("A gradient differs.",), named=("w",), unseen=("one gradient.",))
    made.data = ["The weights already differ"]
    compared = judged(made)
    assert compared.remarks == ("A gradient differs.", "Not checked: one gradient.")
    assert compared.findings.data == ["The weights already differ"]
    assert compared.findings.inputs == ["w@optimizer", "w@param_grad"]
    assert compared.named == ["w@param_grad", "w@param"]


def test_an_update_that_only_rounds_differently_is_not_said_to_differ(made: Any) -> None:
    made.named = ("w",)
    made.rounding = ["w@param"]
    compared = judged(made)
    assert compared.answer == "inconclusive"
    said = "From equal weights, gradients and state both sides compute the same update, but round differently."
    assert compared.remarks == (said,)


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_an_update_that_cannot_be_replayed_clears_nothing_and_blames_nothing(side: str, made: Any) -> None:
    moved = update(not_repeated=True)
    made.given = rows(("w", "param", 0.3), GIVEN[1])
    compared = judged(made, *((moved, None) if side == "baseline" else (None, moved)))
    assert compared.answer == "inconclusive"
    assert compared.remarks[0].startswith(f"The {side}'s step of AdamW cannot be replayed")


@pytest.mark.parametrize("apart", [1e-6, 1e-4])
def test_a_step_that_adds_up_the_gradients_of_its_ranks_agrees_by_its_result(apart: float, made: Any) -> None:
    made.given = rows(*GIVEN, ("u", "param_grad", 0.0))
    made.gradients = GradientFindings(sentences=("A reduction is missing.",), named=("w",), parts=2)
    made.after, made.moved = rows(("w", "param", apart)), rows(*((name, "param", 1e-3) for name in "wuv"))
    compared = judged(made)
    divided = [each[1] for each in made.done if isinstance(each, tuple) and each[0] is None]
    # Other gradients may have been added up before the step.
    assert [each.method.keywords for each in divided] == ([{"by": 2, "names": {"w"}}] if apart < 1e-5 else [])
    assert {"b2t": "kind != 'param_grad'", "compare": "True", "keep": None, "t2b": None} in made.done
    # Each plan that was lent was taken back.
    assert sum(isinstance(each, dict) for each in made.done) == made.done.count("restored")
    if apart < 1e-5:
        assert (compared.answer, compared.named) == ("agree", [])
        assert compared.remarks[0].startswith("Each of the target's ranks has its part of the gradients when the step")
    else:
        assert (compared.answer, compared.named) == ("differ", ["w@param_grad"])
        tried = "From its ranks' own gradients the target's step does not compute the baseline's update."
        assert compared.remarks[:2] == ("A reduction is missing.", tried)
    made.done.clear()
    # A weight that was not compared shows nothing.
    made.after = rows(("v", "param", 0.0))
    made.done.clear()
    assert judged(made).answer == "differ"
    # Of most weights the update agrees, so the step adds up the parts.
    made.after = rows(("w", "param", 1e-4), *((name, "param", 0.0) for name in "uv"))
    made.done.clear()
    compared = judged(made)
    assert (compared.answer, compared.named) == ("differ", ["w@param"])
    # A difference that is small beside the weight, and not beside its update.
    made.after = rows(("w", "param", 1.1e-6), *((name, "param", 0.0) for name in "uv"))
    made.moved = rows(*((name, "param", 1e-5) for name in "wuv"))
    made.done.clear()
    assert "The update of the weight w is computed differently" in judged(made).text
    assert compared.remarks[0].endswith("one update of them, and from equal weights and state it is a different one.")
    # What is not a number on one side alone differs, though its distance is not known.
    made.after = rows(("w", "param", 0.0), nonfinite_differ=1)
    made.after = pd.concat([made.after, rows(*((name, "param", 0.0) for name in "uv"))], ignore_index=True)
    made.done.clear()
    compared = judged(made)
    assert (compared.answer, compared.named) == ("differ", ["w@param"])
    assert compared.findings.frame["ratio"].tolist() == [float("inf"), 0.0, 0.0]
    # Where scripts are started for each run, the parts are not tried, and nothing is said of them.
    made.after, made.repeats.in_place = rows(("w", "param", 0.0)), False
    compared = judged(made)
    assert (compared.answer, "From its ranks' own" in compared.text) == ("differ", False)


@pytest.mark.parametrize(
    ("parts", "apart", "answer"), [(2, 1e-6, "inconclusive"), (2, 1e-7, "agree"), (3, 1e-6, "agree")]
)
def test_a_step_that_adds_up_gradients_is_tried_with_equal_sums_too(
    parts: int, apart: float, answer: str, made: Any
) -> None:
    """Weight decay that is left out, or another eps, moves a weight by much less than 1 % of an update."""
    made.gradients = GradientFindings(sentences=("A reduction is missing.",), named=("w",), parts=parts)
    made.after, made.moved = rows(("w", "param", 1e-6)), rows(("w", "param", 1e-2))
    made.of_sums = rows(("w", "param", apart))
    # Three thirds of a number are rounded.
    compared = judged(made)
    assert (compared.answer, compared.named) == (answer, [])
    told = "The updates agree to 1% of themselves. From gradients that add up to the"
    assert compared.remarks[0].startswith(told) is (answer == "inconclusive")


@pytest.mark.parametrize(
    ("dtype", "apart", "small", "answer"),
    [
        # One rounding of the weight, which is large beside its update.
        ("bfloat16", 3e-3, (), "inconclusive"),
        ("bfloat16", 5e-3, (), "differ"),
        ("bfloat16", 1e-5, (), "agree"),
        # Adam's update from a gradient that is noise is as large as any.
        ("bfloat16", 5e-3, ("v",), "inconclusive"),
        ("float32", 5e-3, ("v",), "inconclusive"),
        ("float32", 3e-3, (), "differ"),
    ],
)
def test_rounding_beside_a_small_update_from_parts_is_neither_cleared_nor_blamed(
    dtype: str, apart: float, small: tuple[str, ...], answer: str, made: Any
) -> None:
    made.gradients = GradientFindings(sentences=("A reduction is missing.",), named=("w",), parts=2, small=small)
    made.given = rows(("w", "param", 0.0), ("w", "param_grad", 0.0), ("v", "param_grad", 0.0))
    made.after = rows(("w", "param", 0.0), ("v", "param", apart), ("u", "param", 0.0), dtype=dtype)
    made.moved = rows(*((name, "param", 1e-2) for name in "wvu"), dtype=dtype)
    made.of_sums = rows(("w", "param", 0.0), dtype=dtype)
    compared = judged(made)
    assert (compared.answer, compared.is_last) == (answer, answer == "inconclusive")
    assert compared.remarks[0].startswith("After the update v differs by more") is (answer == "inconclusive")
    assert compared.named == (["v@param"] if answer == "differ" else [])
    assert bool((compared.findings.frame["ratio"] > compared.findings.threshold).any()) is (answer == "differ")
    # What the step adds up must be its parts, also where they are noise.
    divided = [each[1].method.keywords for each in made.done if isinstance(each, tuple) and each[0] is None]
    assert divided == [{"by": 2, "names": {"w", *small}}]
    if answer == "agree":
        # It is a tenth of the 1 % that is allowed, which is five times the floor.
        assert compared.findings.frame["ratio"].max() == pytest.approx(0.5)


@pytest.mark.parametrize("other_mean", [0.25, 0.5])
def test_a_step_after_which_all_ranks_have_equal_weights_reduces_gradients(other_mean: float, made: Any) -> None:
    sentences = ("A reduction is missing.", "The baseline multiplies its gradients by 0.5.")
    made.gradients = GradientFindings(sentences=sentences, named=("w", "v"), parts=2)
    made.moved = rows(("w", "param", 1e-3), ("v", "param", 1e-3))
    far = [
        rows(("w", "param", 1e-2), ("v", "param", 1e-2), rank=rank, mean_target=mean, std_target=1.0)
        for rank, mean in enumerate((0.25, other_mean))
    ]
    made.after = pd.concat(far, ignore_index=True)
    compared = judged(made)
    assert compared.answer == "differ"
    if other_mean == 0.25:
        assert compared.remarks[0] == sentences[1]
        assert compared.remarks[1].endswith("from equal weights and state it is a different one.")
        assert compared.named == ["w@param", "v@param"]
    else:
        assert compared.remarks[:2] == sentences
    # One rank shows nothing.
    made.after = far[0]
    made.done.clear()
    assert judged(made).remarks[0] == sentences[0]


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_weight_that_another_optimizer_updates_is_left_to_the_next_update(side: str, made: Any) -> None:
    split = update(elsewhere=("w",), optimizer="Muon")
    compared = judged(made, *((split, None) if side == "baseline" else (None, split)))
    assert (compared.answer, compared.left_to_next_update) == ("inconclusive", ("w",))
    assert compared.equal_weights == {"w"}
    assert compared.remarks[1].startswith(f"The update of w was not compared in this step: on the {side} another optim")
    # In 16 bits the weights before the next update would not show it.
    narrow = [update(elsewhere=each, dtypes={"w": "bfloat16"}) for each in (("w",), ())]
    compared = judged(made, *(narrow if side == "baseline" else reversed(narrow)))
    assert (compared.answer, compared.left_to_next_update) == ("inconclusive", ())
    mixed = [update(elsewhere=each, dtypes={"w": "float32", "v": "bfloat16"}) for each in (("w",), ())]
    assert judged(made, *(mixed if side == "baseline" else reversed(mixed))).left_to_next_update == ()
    # So it is if only one side has such weights.
    for sides in ((mixed[0], update()), (split, mixed[1])):
        assert judged(made, *(sides if side == "baseline" else reversed(sides))).left_to_next_update == ()
    # A weight whose gradient was not compared would not be judged by the next update either.
    lacking = update(elsewhere=("w",), gradients={"w": None, "v": None})
    compared = judged(made, *((lacking, None) if side == "baseline" else (None, lacking)))
    assert (compared.answer, compared.left_to_next_update) == ("inconclusive", ())
    both = judged(made, split, split)
    assert (both.answer, both.left_to_next_update) == ("agree", ())
    # Rounding of earlier updates, or a small update that one side has not made.
    made.given = rows(("w", "param", 3e-7), GIVEN[1])
    assert (judged(made).answer, judged(made).equal_weights) == ("agree", frozenset())
    frozen = update(frozen=("w",))
    assert judged(made, *((split, frozen) if side == "baseline" else (frozen, split))).answer == "agree"


@pytest.mark.parametrize(("side", "status"), [("baseline", "missing"), ("target", "unmatched")])
def test_an_optimizer_without_the_state_that_the_other_one_has_is_named(side: str, status: str, made: Any) -> None:
    states = rows(("w.exp_avg", "optimizer", 0.0), ("w.step", "optimizer", 0.0), status=status)
    made.given = pd.concat([made.given, states], ignore_index=True)
    compared = judged(made)
    other = "target" if side == "baseline" else "baseline"
    said = (
        f"Before this update the {side}'s AdamW has no state of 1 weight (w), and the {other}'s has exp_avg and step."
    )
    assert (compared.answer, compared.remarks[0]) == ("differ", said)
    # One that has some of its states has only fewer, as without amsgrad.
    given = made.given
    made.given = pd.concat([given, rows(("w.exp_avg_sq", "optimizer", 0.0))], ignore_index=True)
    assert judged(made).answer == "agree"
    made.given = given
    # A second optimizer has the state of its weights.
    split = update(elsewhere=("w",))
    assert judged(made, *((split, None) if side == "baseline" else (None, split))).answer == "inconclusive"
    # Other optimizers may call theirs something else, or keep it elsewhere.
    assert judged(made, theirs=update(optimizer="OwnAdamW")).answer == "agree"


def test_optimizers_of_other_classes_that_compute_the_same_update_agree(made: Any) -> None:
    classes = "The optimizer is AdamW on the baseline and OwnAdamW on the target."
    compared = judged(made, theirs=update(optimizer="OwnAdamW"))
    assert (compared.answer, compared.remarks[0]) == ("agree", classes)
    made.named = ("w",)
    compared = judged(made, theirs=update(optimizer="OwnAdamW"))
    assert (compared.answer, compared.remarks[0]) == ("differ", classes)


def test_an_update_that_one_of_several_ranks_cannot_replay_clears_nothing(made: Any) -> None:
    ranks = [update(), update(not_repeated=True)]
    compared = judge_held_updates(made.repeats, [update()], ranks, JudgingChoice(), None, {})
    assert compared.answer == "inconclusive"
    assert compared.remarks[0].startswith("The target's step of AdamW cannot be replayed")


def test_weights_and_states_that_differ_before_the_update_differ_by_more_than_drift(made: Any) -> None:
    made.given = rows(("w", "param", 0.3), ("v", "param", 1e-6), ("w.exp_avg", "optimizer", 0.3), GIVEN[1])
    compared = judged(made)
    assert compared.answer == "differ"
    assert compared.remarks[:2] == (
        "The weights already differ before this update: w.",
        "The optimizer's state already differs before this update: w.exp_avg.",
    )
    made.given = rows(("w", "param", 1e-6), GIVEN[1])
    assert judged(made).answer == "agree"
    # Not a number on one side only.
    made.given = rows(("w", "param", 0.0), GIVEN[1], nonfinite_differ=1)
    assert judged(made).remarks[0] == "The weights already differ before this update: w."


def test_what_could_not_be_grafted_or_compared_is_said(made: Any) -> None:
    made.taken = rows(*GIVEN, status="failed")
    assert judged(made).remarks[-1] == (
        "Not checked: the update from equal values for w: the baseline's value could not be grafted there."
    )
    # A gradient of one side proves nothing of the update.
    made.taken = made.given
    made.given = rows(GIVEN[0])
    compared = judged(made)
    assert compared.answer == "inconclusive"
    assert compared.remarks[0].startswith("No gradient was compared")
    made.given = pd.concat([rows(GIVEN[0]), rows(GIVEN[1], status="missing")])
    assert judged(made).answer == "inconclusive"
    assert judged(made, update(has_closure=True)).answer == "agree"


def test_gradients_that_16_bits_may_have_rounded_leave_an_update_inconclusive(made: Any) -> None:
    made.gradients = GradientFindings(rounding="16 bits may explain it.", losses="The losses differ.")
    compared = judged(made)
    assert (compared.answer, compared.named) == ("inconclusive", [])
    assert compared.remarks[:2] == ("16 bits may explain it.", "The losses differ.")
    made.named = ("w",)
    assert judged(made).answer == "differ"


def test_weights_whose_gradients_have_no_partner_are_not_cleared(made: Any) -> None:
    ours, theirs = update(gradients={"w": None, "v": None}), update(gradients={"w": None, "qkv": None})
    compared = judged(made, ours, theirs)
    assert compared.answer == "inconclusive"
    left = "The gradients of 1 of the {}'s 2 weights were not compared, because no weight of the {} has the same name"
    assert compared.remarks[:3] == (
        "All that was compared agrees.",
        f"{left.format('baseline', 'target')}: v; --match pairs weights by value.",
        f"{left.format('target', 'baseline')}: qkv; --match pairs weights by value.",
    )
    made.gradients = GradientFindings(sentences=("A gradient differs.",), named=("w",))
    compared = judged(made, ours)
    assert (compared.answer, compared.remarks[0]) == ("differ", "A gradient differs.")
    assert compared.remarks[-1] == f"{left.format('baseline', 'target')}: v; --match pairs weights by value."
    # Each rank may have the weights of a part of the model.
    stages = [update(), update(gradients={"v": None})]
    parts = judge_held_updates(made.repeats, [update()], stages, JudgingChoice(), None, {})
    assert parts.remarks[-1] == f"{left.format('target', 'baseline')}: v; --match pairs weights by value."
    # A closure computes them within the step.
    within = update(gradients={"w": None, "v": None}, has_closure=True)
    assert not any("were not compared" in each for each in judged(made, within, update(has_closure=True)).remarks)
    proposal: Any = SimpleNamespace()
    matched = judge_held_updates(made.repeats, [ours], [update()], JudgingChoice(), proposal, {})
    assert matched.remarks[-1] == f"{left.format('baseline', 'target')} or values: v."


def test_a_closure_computes_its_gradients_in_the_step(made: Any) -> None:
    made.gradients = GradientFindings(sentences=("A gradient differs.",))
    made.named, made.taps, made.following = ("w", "h"), [("h", None), ("w", "param")], ("x@grad",)
    compared = judged(made, None, update(has_closure=True))
    assert compared.remarks == ("From equal weights and state both sides compute different steps.",)
    assert set(compared.named) == {"h", "w@param"}
    # A value of a later call of the closure may follow from the weights, which the step has moved.
    later = held_updates._differs_in_first_call
    try:
        held_updates._differs_in_first_call = lambda findings: False
        compared = judged(made, update(has_closure=True))
    finally:
        held_updates._differs_in_first_call = later
    assert compared.named == ["w@param"]
    assert compared.findings.following == ()
    assert compared.remarks[-1].startswith("The closure's first call agrees; its later calls use weights that")


def test_a_value_of_the_closures_first_call_does_not_follow_from_the_step() -> None:
    def first(kind: str | None = None, **changes: Any) -> bool:
        frame = added_frame(rows(("h", kind, 0.1), status="grafted"), {}, constant=1e-6).assign(label="culprit")
        return held_updates._differs_in_first_call(Findings(frame.assign(**changes), 5.0, 1))

    assert first()
    # So it is with a gradient of the model's values, and not with what the step writes.
    assert [first(kind) for kind in ("grad", "param", "optimizer", "param_grad")] == [True, False, False, False]
    assert not first(occurrence=1)
    assert not first(ratio=1.0)
    assert not first(label="clean")


def test_values_of_later_calls_stay_named_if_nothing_else_is() -> None:
    given = rows(("h", None, 0.1), ("w", "param", 0.1), status="grafted")
    frame = labelled(added_frame(given, {}, constant=1e-6), ["h", "w@param"], (), {}, 5.0)
    assert held_updates._model_inherits(Findings(frame, 5.0, 1)).named == ["w@param"]
    assert held_updates._model_inherits(Findings(frame[frame["name"] == "h"], 5.0, 1)).named == ["h"]


def test_lines_of_source_are_searched_unless_settings_explain_the_update(made: Any) -> None:
    judged(made)
    compared = judged(made, update(settings={"lr": {"w": 0.1}}), update(settings={"lr": {"w": 0.2}}))
    assert made.explained == ["lines", False]
    # They differ also where the update that they make is the same by chance, such as a first step.
    assert (compared.answer, compared.named) == ("differ", [])
    assert compared.remarks[0] == "The optimizer's lr is 0.1 on the baseline and 0.2 on the target."


def test_settings_are_compared_by_weight_and_said_once() -> None:
    def said(ours: Any, theirs: Any, *names: str) -> list[str]:
        given = [{"name": name, "tags": {"kind": "param"}} for name in names or ("w", "v")]
        dtypes = dict.fromkeys(("w", "v"), "float32")
        return _differing_settings(
            update(settings=ours, dtypes=dtypes), update(settings=theirs, dtypes=dtypes), given, {}
        )

    both = {"w": 0.1, "v": 0.1}
    assert said({"lr": both}, {"lr": both}) == []
    twice = {"w": 0.2, "v": 0.2}
    assert said({"lr": both, "initial_lr": both}, {"lr": twice, "initial_lr": twice}) == [
        "The optimizer's lr is 0.1 on the baseline and 0.2 on the target."
    ]
    assert said({"initial_lr": both}, {"initial_lr": twice}) == [
        "The optimizer's initial_lr is 0.1 on the baseline and 0.2 on the target."
    ]
    assert said({"lr": both}, {"lr": {"w": 0.1, "v": 0.3}}) == [
        "The optimizer's lr is 0.1 on the baseline and 0.3 on the target, for v."
    ]
    assert said({"betas": {"w": (0.9, 0.99)}}, {"betas": {"w": (0.9, 0.95)}}, "w") == [
        "The optimizer's betas are (0.9, 0.99) on the baseline and (0.9, 0.95) on the target."
    ]
    assert said({"lr": both}, {}) == []


def test_weights_of_another_dtype_are_listed_by_the_baselines_names() -> None:
    given = [
        {"name": name, "target_name": partner, "tags": {"kind": "param"}}
        for name, partner in (("v", None), ("w", "t.w"), ("u", "t.u"))
    ]
    given.append({"name": "w", "target_name": None, "tags": {"kind": "param_grad"}})
    ours = update(dtypes={"v": "float32", "w": "float32", "u": "float64"})
    theirs = update(dtypes={"v": "float32", "t.w": "bfloat16", "t.u": "float16"})
    assert _differing_settings(ours, theirs, given, {}) == [
        "The weights are float32 on the baseline and bfloat16 on the target: w, u. An update that is "
        "smaller than their rounding is lost.",
    ]


def test_losses_that_differ_beside_equal_gradients_leave_an_update_inconclusive(made: Any) -> None:
    made.gradients = GradientFindings(losses="The gradients agree, and the losses differ.")
    compared = judged(made)
    assert (compared.answer, compared.remarks[0]) == ("inconclusive", "The gradients agree, and the losses differ.")
    made.named = ("w",)
    assert judged(made).answer == "differ"


def test_no_lines_are_shown_for_a_weight_whose_state_differs_too(made: Any) -> None:
    # In a first step, the square root of a wrong second moment may be a value that only the target has.
    made.taps = [("w.v", "optimizer"), ("w", "param"), ("u", "param")]
    made.lines = [SimpleNamespace(tap=name) for name, _ in made.taps]
    made.named = ("w.v", "w", "u")
    assert [each.tap for each in judged(made).findings.lines] == ["w.v", "u"]
    made.named = ("w", "u")
    assert [each.tap for each in judged(made).findings.lines] == ["w.v", "w", "u"]
