"""The comparison of an optimizer's step that both sides hold: its inputs, and its results from equal inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd

from graftlab.base.tap_groups import group_of, kind_of
from graftlab.base.text import first_of
from graftlab.base.world import SIDES, other_side
from graftlab.comparison.answers import Comparison, answer_of
from graftlab.comparison.gradients import GradientFindings, judge_gradients
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.control.core import lend_plan, restore_plan
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.plan.pairs import PairRule
from graftlab.ranks.held_call import show_inputs, take_inputs
from graftlab.ranks.held_update import UpdateDescription
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import added_frame, coarser_dtype, records
from graftlab.verdict.wording import NOT_CHECKED, Findings

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal
    from graftlab.session import Session

# Rounding in earlier updates may have moved weights and states apart.
_DRIFT = 100.0


def judge_held_updates(
    repeats: Repeats,
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    choice: JudgingChoice,
    proposal: Proposal | None,
    known: Mapping[str, float],
) -> Comparison:
    """Judge the updates that both sides hold, by their ranks' descriptions.

    ``known`` has, by weight, the distance of its gradients in a call that agrees.
    """
    session = repeats.session
    if states := _pairs_of_states(session.plan.pairs, baseline[0], target[0]):
        session.edit(pairs=[*session.plan.pairs, *states])
    try:
        lend_plan(session, b2t=None, t2b=None, compare="True", keep=None)
        given = session.run(show_inputs, show_inputs).frame
    finally:
        restore_plan(session)
    taken = take_equal_inputs(session)
    rows = records(given[given["status"].isin(MEASURED)])
    # A closure computes the gradients within the step, from values tapped there.
    has_closure = any(each.has_closure for each in (*baseline, *target))
    gradients = GradientFindings() if has_closure else judge_gradients(rows, baseline, target, known)
    # Swaps and lines of source show where a model's values arise, but an update is the code of a single optimizer.
    verdict = repeats.verdict(choice, explain=False)
    moved = [
        f"The {side}'s step of {each[0].optimizer} cannot be replayed: from the same weights, gradients and state it "
        "computes a different update. Do not rely on anything below."
        for side, each in (("baseline", baseline), ("target", target))
        if any(one.not_repeated for one in each)
    ]
    settings = _differing_settings(baseline[0], target[0], rows)
    # A trainer's own optimizer may compute the same: its class alone is no difference.
    classes = _differing_classes(baseline[0], target[0])
    parted = _parted(rows)
    remarks = [*moved, *parted, *gradients.sentences, *classes, *settings]
    findings = verdict.findings
    computed = bool(findings.named)
    has_gradients = any(kind_of(row["tags"]) == "param_grad" for row in rows)
    if not computed:
        remarks.append("From equal weights, gradients and state both sides compute the same update.")
    elif has_closure:
        remarks.append("From equal weights and state both sides compute different steps.")
        if not _differs_in_first_call(findings):
            remarks.append("The closure's first call agrees; its later calls use weights that the step has changed.")
            findings = _model_inherits(findings)
    elif not has_gradients:
        remarks.append("The updates differ, and no gradient was compared.")
    elif not gradients.sentences:
        remarks.append("The gradients agree, and the updates computed from them differ.")
    remarks += [f"{NOT_CHECKED}{each}" for each in (*gradients.unseen, *_not_taken(taken))]
    findings = replace(
        findings,
        frame=pd.concat([_gradient_frame(given, gradients.named), findings.frame], ignore_index=True),
        inputs=[*findings.inputs, *(f"{group_of(name)}@param_grad" for name in gradients.named)],
    )
    answer = answer_of(verdict.findings, not moved, True)
    if answer == "agree" and not has_closure and not has_gradients:
        answer = "inconclusive"
        remarks.insert(0, "No gradient was compared: those of the two sides have no names and shapes in common.")
    if answer == "agree" and gradients.losses:
        answer = "inconclusive"
        remarks.insert(0, gradients.losses)
    if not moved and (parted or gradients.sentences or settings):
        answer = "differ"
    lacking = [] if has_closure or not has_gradients else _without_partner(baseline, target, rows)
    if answer == "agree" and lacking:
        answer = "inconclusive"
        remarks[:0] = ["All that was compared agrees.", *lacking]
    elif answer == "differ":
        remarks += lacking
    return Comparison(findings, verdict.runs, session, proposal, answer, tuple(remarks))


def _pairs_of_states(
    pairs: Sequence[PairRule], baseline: UpdateDescription, target: UpdateDescription
) -> list[PairRule]:
    """The pairs of the optimizers' states of weights that are paired under other names, without those already there.

    A state in its weight's shape has its layout. Another, such as a number of steps, has one partner of equal shape,
    also where its weight is a part of the other side's.
    """
    found = []
    known = {name for rule in pairs for name in (rule.baseline, rule.target)}
    for rule in pairs:
        ours, theirs = baseline.states.get(rule.baseline, {}), target.states.get(rule.target, {})
        for key in (key for key in ours if key in theirs):
            names = f"{rule.baseline}.{key}", f"{rule.target}.{key}"
            like_weight = _is_like_weight(baseline, rule.baseline, key) and _is_like_weight(target, rule.target, key)
            if known >= {*names} or not (like_weight or (ours[key] == theirs[key] and known.isdisjoint(names))):
                continue
            known |= {*names}
            layout = rule.layout if like_weight else "same"
            found.append(replace(rule, baseline=names[0], target=names[1], layout=layout))
    return found


def _is_like_weight(update: UpdateDescription, name: str, key: str) -> bool:
    return name in update.gradients and update.states[name][key] == update.gradients[name].shape


def take_equal_inputs(session: Session) -> pd.DataFrame:
    """Let repetitions of the target's held update begin with the baseline's values; returns the rows of the grafts."""
    try:
        lend_plan(session, b2t="True", t2b=None, compare="True", keep=None)
        return session.run(take_inputs, take_inputs).frame
    finally:
        restore_plan(session)


def _gradient_frame(given: pd.DataFrame, named: Sequence[str]) -> pd.DataFrame:
    """The rows of these weights' gradients, in the form of a verdict's frame."""
    kinds = given["tags"].map(kind_of)
    chosen = given[(kinds == "param_grad") & given["name"].isin(named)]
    frame = added_frame(chosen, {}, constant=assumed_floor(chosen["dtype"].dropna())[0])
    return frame.assign(label="culprit")


def _of_model(findings: Findings) -> pd.Series[bool]:
    """A mask of the rows that are named values or gradients of the model, not of the update."""
    kinds = findings.frame["tags"].map(kind_of)
    return (kinds.isna() | (kinds == "grad")) & findings.frame["group"].isin(findings.named)


def _differs_in_first_call(findings: Findings) -> bool:
    """Whether a value or a gradient of the model is named in the closure's first call."""
    over = findings.frame["ratio"] > findings.threshold
    return bool((_of_model(findings) & over & (findings.frame["occurrence"] == 0)).any())


def _model_inherits(findings: Findings) -> Findings:
    """The findings without the model's values, which may follow from the step, if anything else is named."""
    of_model = _of_model(findings)
    if not (findings.frame["group"].isin(findings.named) & ~of_model).any():
        return findings
    frame = findings.frame.assign(label=findings.frame["label"].mask(of_model, "inherited"))
    return replace(findings, frame=frame, following=())


def _without_partner(
    baseline: Sequence[UpdateDescription], target: Sequence[UpdateDescription], rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """A sentence on each side's weights whose gradients were not compared, and so neither were their updates."""
    pairs = [
        (row["name"], row.get("target_name") or row["name"]) for row in rows if kind_of(row["tags"]) == "param_grad"
    ]
    sentences = []
    for place, (side, own) in enumerate(zip(SIDES, (baseline, target), strict=True)):
        known = {pair[place] for pair in pairs}
        trained = dict.fromkeys(name for each in own for name in each.gradients)
        left = [name for name in trained if name not in known]
        if left:
            sentences.append(
                f"The gradients of {len(left)} of the {side}'s {len(trained)} weights were not compared, because no "
                f"weight of the {other_side(side)} has the same name or values: {first_of(left, 4)}."
            )
    return sentences


def _parted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on weights and states that differ before the update by more than earlier updates' rounding."""
    sentences: list[str] = []
    for kind, what in (("param", "The weights already differ"), ("optimizer", "The optimizer's state already differs")):
        differing = [
            row["name"]
            for row in rows
            if kind_of(row["tags"]) == kind
            and (row["nonfinite_differ"] or not (row["rel_l2"] or 0.0) <= _DRIFT * roundoff(coarser_dtype(row)))
        ]
        if differing:
            sentences.append(f"{what} before this update: {first_of([*differing], 4)}.")
    return sentences


def _not_taken(taken: pd.DataFrame) -> list[str]:
    """A sentence on inputs that the target's update could not take from the baseline."""
    left = taken[~taken["status"].isin(MEASURED)]
    if not len(left):
        return []
    names = first_of([*dict.fromkeys(left["name"])], 4)
    return [f"the update from equal values for {names}: the baseline's value could not be grafted there."]


def _differing_classes(baseline: UpdateDescription, target: UpdateDescription) -> list[str]:
    """A sentence on optimizers of different classes."""
    if baseline.optimizer == target.optimizer:
        return []
    return [f"The optimizer is {baseline.optimizer} on the baseline and {target.optimizer} on the target."]


def _differing_settings(
    baseline: UpdateDescription, target: UpdateDescription, rows: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Sentences on differing settings, with both sides' values."""
    sentences: list[str] = []
    pairs = {row["name"]: row.get("target_name") or row["name"] for row in rows if kind_of(row["tags"]) == "param"}
    for setting in sorted({**baseline.settings, **target.settings}, key=lambda each: each == "initial_lr"):
        if setting == "initial_lr" and any("optimizer's lr " in line for line in sentences):
            # A scheduler's initial rate shows in the rate itself.
            continue
        ours, theirs = baseline.settings.get(setting, {}), target.settings.get(setting, {})
        differing: dict[tuple[Any, Any], list[str]] = {}
        for name, partner in pairs.items():
            one, other = ours.get(name), theirs.get(partner)
            if one is not None and other is not None and one != other:
                differing.setdefault((one, other), []).append(name)
        for (one, other), names in differing.items():
            where = "" if len(names) == len(pairs) else f", for {first_of([*names], 4)}"
            verb = "are" if isinstance(one, tuple) else "is"
            sentences.append(
                f"The optimizer's {setting} {verb} {one} on the baseline and {other} on the target{where}."
            )
    apart = [name for name, partner in pairs.items() if baseline.dtypes.get(name) != target.dtypes.get(partner)]
    if apart:
        one, other = baseline.dtypes.get(apart[0]), target.dtypes.get(pairs[apart[0]])
        sentences.append(
            f"The weights are {one} on the baseline and {other} on the target: {first_of([*apart], 4)}. "
            "An update that is smaller than their rounding is lost."
        )
    return sentences
