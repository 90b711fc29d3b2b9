"""The comparison of an optimizer's step that both sides hold: its inputs, and its results from equal inputs."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from graftlab.base.tap_groups import group_of, kind_of
from graftlab.base.text import counted, first_of, listed
from graftlab.base.world import SIDES, other_side
from graftlab.comparison.answers import Comparison, ReasonedAnswer, answer_of
from graftlab.comparison.gradients import GradientFindings, judge_gradients
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.control.core import lend_plan, restore_plan
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DTYPES_OF_16_BITS, assumed_floor, roundoff
from graftlab.plan.pairs import PairRule
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import OfUpdate, repeat_call
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import added_frame, coarser_dtype, records
from graftlab.verdict.findings import Findings
from graftlab.verdict.wording import NOT_CHECKED

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal
    from graftlab.session import Session

# Rounding in earlier updates may have moved weights and states apart.
_DRIFT = 100.0
_ONCE = 8.0
# The same update, from gradients that are summed in another order, differs by less than this part of it.
_OF_UPDATE = 0.01
_FROM_PARTS = "Each of the target's ranks has its part of the gradients when the step begins; the step"


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
    with _paired_as_in_updates(session, baseline[0], target[0]):
        if states := _pairs_of_states(session.plan.pairs, baseline[0], target[0]):
            session.edit(pairs=[*session.plan.pairs, *states])
        show = OfUpdate(HeldUpdate.show_inputs)
        given = _compared(session, show, show)
        rows = records(given[given["status"].isin(MEASURED)])
        # A closure computes the gradients within the step, from values tapped there.
        has_closure = any(each.has_closure for each in (*baseline, *target))
        has_gradients = any(kind_of(row["tags"]) == "param_grad" for row in rows)
        gradients = GradientFindings() if has_closure else judge_gradients(rows, baseline, target, known)
        fused = _fused(session.plan.pairs, baseline[0])
        settings = _differing_settings(baseline[0], target[0], rows, fused)
        step = _judge_step(repeats, choice, rows, gradients, len(target), names_lines=not settings)
    if step.from_parts:
        # The first sentence is on the parts, which the step makes whole; those on factors may explain another update.
        others = gradients.sentences[1:] if step.verdict.named else ()
        gradients = replace(gradients, sentences=others, named=())
    on_step, findings = _on_step(step, gradients, has_closure, has_gradients)
    findings = _without_lines_after_states(findings)
    findings = replace(
        findings,
        frame=pd.concat([_gradient_frame(given, gradients.named), findings.frame], ignore_index=True),
        inputs=[*findings.inputs, *(f"{group_of(name)}@param_grad" for name in gradients.named)],
    )
    moved = [
        f"The {side}'s step of {each[0].optimizer} cannot be replayed: from the same weights, gradients and state it "
        "computes a different update. Do not rely on anything below."
        for side, each in (("baseline", baseline), ("target", target))
        if any(one.not_repeated for one in each)
    ]
    parted = [*_without_state(given, rows, baseline[0], target[0]), *_parted(rows)]
    conclusion = ReasonedAnswer(answer_of(step.verdict.findings, not moved, True))
    if not (has_closure or has_gradients):
        conclusion.doubt("No gradient was compared: those of the two sides have no names and shapes in common.")
    conclusion.doubt(step.hidden or step.small)
    conclusion.doubt(gradients.rounding, gradients.losses)
    if not moved and (parted or gradients.sentences or step.tried or settings):
        conclusion.answer = "differ"
    may_lack = has_gradients and not has_closure
    lacking = _without_partner(baseline, target, rows, proposal is not None, fused) if may_lack else []
    apart, elsewhere = _updated_elsewhere(baseline[0], target[0], rows)
    # In 16 bits weights may differ by as much as a small update before the next one.
    is_wide = {*baseline[0].dtypes.values(), *target[0].dtypes.values()} == {"float32"}
    may_follow = conclusion.answer == "agree" and bool(apart) and is_wide and not lacking
    if apart or lacking:
        conclusion.doubt("All that was compared agrees.", *apart, *lacking)
    return Comparison(
        findings,
        step.verdict.runs,
        session,
        proposal,
        conclusion.answer,
        (
            *conclusion.reasons,
            *moved,
            *parted,
            *gradients.sentences,
            *step.tried,
            # A trainer's own optimizer may compute the same: its class alone is no difference.
            *_differing_classes(baseline[0], target[0]),
            *settings,
            *on_step,
            *(f"{NOT_CHECKED}{each}" for each in (*gradients.unseen, *_not_taken(step.taken))),
            *((*apart, *lacking) if conclusion.answer == "differ" else ()),
        ),
        left_to_next_update=elsewhere if may_follow else (),
        equal_weights=_equal_weights(rows),
        is_last=step.hidden is not None,
    )


@contextlib.contextmanager
def _paired_as_in_updates(session: Session, baseline: UpdateDescription, target: UpdateDescription) -> Iterator[None]:
    """Without the pairs that hold in calls alone, in the block."""
    of_calls = session.plan.pairs
    of_update = _with_names_of_updates(of_calls, baseline, target)
    if len(of_update) == len(of_calls):
        yield
        return
    session.edit(pairs=of_update)
    try:
        yield
    finally:
        # Closing it may be what has ended the runs.
        if not session.closed:
            session.edit(pairs=of_calls)


def _with_names_of_updates(
    pairs: Sequence[PairRule], baseline: UpdateDescription, target: UpdateDescription
) -> list[PairRule]:
    """The pairs without those of weights that have equal names in the updates, and others in calls.

    A fused loss calls a model without its head, in which a weight's name lacks the beginning.
    """
    return [
        rule
        for rule in pairs
        if rule.target in target.dtypes or not (rule.baseline in baseline.dtypes and rule.baseline in target.dtypes)
    ]


@dataclass(frozen=True)
class _Step:
    """A step that was judged: ``taken`` are the rows of its equal inputs.

    ``from_parts`` means that each of the target's ranks had its own part of the gradients. ``small`` is a sentence on
    a difference that is small beside the update, ``hidden`` one on a difference that rounding explains, and ``tried``
    one on parts from which the target computes another.
    """

    verdict: Verdict
    taken: pd.DataFrame
    from_parts: bool = False
    small: str | None = None
    hidden: str | None = None
    tried: tuple[str, ...] = ()


def _judge_step(
    repeats: Repeats,
    choice: JudgingChoice,
    rows: Sequence[Mapping[str, Any]],
    gradients: GradientFindings,
    ranks: int,
    names_lines: bool,
) -> _Step:
    """Judge both sides' steps from equal inputs; if the target's may add up its ranks' gradients, from these parts.

    ``names_lines`` says to look for the lines of source at which the steps differ.
    """
    session = repeats.session
    may_add = bool(gradients.parts) and repeats.in_place
    from_parts = _update_from_parts(session, gradients, choice.threshold) if may_add else None
    taken = take_equal_inputs(session)
    if from_parts is None:
        # Swaps show which of a model's values matter; all results of an update do.
        verdict = repeats.verdict(choice, explain="lines" if names_lines else False)
        # The step may reduce them, and make a mistake in that.
        tried = "From its ranks' own gradients the target's step does not compute the baseline's update."
        return _Step(verdict, taken, tried=(tried,) if may_add else ())
    # From the ranks' own parts, whose sum is rounded differently, later weights would be further apart.
    in_parts = {*gradients.named, *gradients.small}
    own = {row.get("target_name") or row["name"] for row in rows if row["name"] in in_parts}
    session.run(None, OfUpdate(partial(HeldUpdate.divide_gradients, by=gradients.parts, names=own)))
    frame, hidden = from_parts
    small = _small_difference(session, gradients.parts)
    return _Step(
        Verdict(Findings(frame, choice.threshold, ranks), 1), taken, from_parts=True, small=small, hidden=hidden
    )


def _on_step(
    step: _Step, gradients: GradientFindings, has_closure: bool, has_gradients: bool
) -> tuple[list[str], Findings]:
    """Sentences on what the step computes from equal inputs, and its findings without what follows from them."""
    findings = step.verdict.findings
    computed = bool({*findings.named} - {*findings.rounding.groups})
    if step.from_parts:
        does = (
            "makes one update of them, and from equal weights and state it is a different one"
            if computed
            else "adds them up, and from equal weights and state both sides compute the same update"
        )
        return [f"{_FROM_PARTS} {does}."], findings
    if not computed:
        rounded = ", but round differently" if findings.named else ""
        return [f"From equal weights, gradients and state both sides compute the same update{rounded}."], findings
    if has_closure:
        remarks = ["From equal weights and state both sides compute different steps."]
        if _differs_in_first_call(findings):
            return remarks, findings
        remarks.append("The closure's first call agrees; its later calls use weights that the step has changed.")
        return remarks, _model_inherits(findings)
    if not has_gradients:
        return ["The updates differ, and no gradient was compared."], findings
    alone = not (gradients.sentences or step.tried)
    return ["The gradients agree, and the updates computed from them differ."] if alone else [], findings


def _pairs_of_states(
    pairs: Sequence[PairRule], baseline: UpdateDescription, target: UpdateDescription
) -> list[PairRule]:
    """The pairs of the optimizers' states of weights that are paired under other names, without those already there.

    A state in its weight's shape has its layout. A number, such as that of steps, has one partner, also where its
    weight is a part of the other side's. Any other, such as a sum over rows, has one only if the weights are alike:
    those of a transposed weight are sums over columns.
    """
    found = []
    known = {name for rule in pairs for name in (rule.baseline, rule.target)}
    for rule in pairs:
        ours, theirs = baseline.states.get(rule.baseline, {}), target.states.get(rule.target, {})
        for key in (key for key in ours if key in theirs):
            names = f"{rule.baseline}.{key}", f"{rule.target}.{key}"
            like_weight = _is_like_weight(baseline, rule.baseline, key) and _is_like_weight(target, rule.target, key)
            may_pair = ours[key] == theirs[key] and (rule.layout == "same" or math.prod(ours[key]) == 1)
            if known >= {*names} or not (like_weight or (may_pair and known.isdisjoint(names))):
                continue
            known |= {*names}
            layout = rule.layout if like_weight else "same"
            found.append(replace(rule, baseline=names[0], target=names[1], layout=layout))
    return found


def _fused(pairs: Sequence[PairRule], baseline: UpdateDescription) -> dict[str, str]:
    """The baseline's weight by the name of each of the target's that is a part of it, which is their pair's name."""
    return {
        rule.target: rule.baseline
        for rule in pairs
        if rule.is_part and rule.whole == "baseline" and rule.baseline in baseline.dtypes
    }


def _is_like_weight(update: UpdateDescription, name: str, key: str) -> bool:
    return name in update.gradients and update.states[name][key] == update.gradients[name].shape


def _update_from_parts(
    session: Session, gradients: GradientFindings, threshold: float
) -> tuple[pd.DataFrame, str | None] | None:
    """The weights after an update from the ranks' own parts of the gradients, in the form of a verdict's frame, and a
    sentence if rounding may hide a mistake.

    None if some of these weights were not compared, or if most differ, and on the ranks too: then the target's step
    does not add up the parts.
    """
    take_equal_inputs(session, "kind != 'param_grad'")
    # How far the update moves each weight: its error may be small beside the weight.
    moved, after = (_weights_after(session, each) for each in (OfUpdate(HeldUpdate.show_unchanged), repeat_call))
    sizes = {_place(row): row["rel_l2"] or 0.0 for row in records(moved)}
    rows = records(after)
    compared = {row["name"] for row in rows}
    beyond = [
        row
        for row in rows
        if row["nonfinite_differ"] or not (row["rel_l2"] or 0.0) <= _OF_UPDATE * sizes.get(_place(row), 0.0)
    ]
    # An update may be as small as one rounding of its weight, and Adam makes noise as large as any gradient.
    rounded = [
        row
        for row in beyond
        if row["name"] in gradients.small or (coarser_dtype(row) in DTYPES_OF_16_BITS and _is_rounding(row, 1))
    ]
    differing = {row["name"] for row in beyond} - {row["name"] for row in rounded}
    if not {*gradients.named} <= compared or (2 * len(differing) >= len(compared) and not _are_equal_on_ranks(rows)):
        return None
    frame = added_frame(after, {}, constant=assumed_floor(after["dtype"].dropna())[0])
    is_named = frame["name"].isin(differing)
    # A verdict names what is above the threshold, and here that is a part of the update, not of the weight.
    floor = frame["name"].map({row["name"]: _OF_UPDATE * sizes.get(_place(row), 0.0) / threshold for row in rows})
    ratio = (frame["added"] / floor).fillna(0.0)
    ratio = ratio.where(is_named, ratio.clip(upper=threshold))
    found = frame.assign(
        label=is_named.map({True: "culprit", False: "clean"}),
        floor=floor,
        ratio=ratio.mask(is_named & ~(ratio > threshold), math.inf),
    )
    if not rounded:
        return found, None
    names = [*dict.fromkeys(row["name"] for row in rounded)]
    most = max(row["rel_l2"] or 0.0 for row in rounded)
    return found, (
        f"After the update {first_of(names, 4)} {'differs' if len(names) == 1 else 'differ'} by more than "
        f"{_OF_UPDATE:.0%} of it (rel_l2 {most:.2g}). That update, or its gradients, is little more than rounding, "
        "which may hide a mistake. Compare both sides in float32 to find out."
    )


def _are_equal_on_ranks(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each weight of these rows is the same on all of the target's ranks, which are several."""
    found = defaultdict(list)
    for row in rows:
        found[row["name"], row["occurrence"]].append((row["mean_target"], row["std_target"]))
    return all(len(each) > 1 and len({*each}) == 1 for each in found.values())


def _small_difference(session: Session, parts: int) -> str | None:
    """A sentence if, from gradients that add up to the baseline's, the updated weights differ by more than rounding."""
    rows = records(_weights_after(session, repeat_call))
    # Halves, or fourths, add up to the same number, which leaves the update alone to round.
    times = _DRIFT if parts & (parts - 1) else _ONCE
    apart = {row["name"]: row["rel_l2"] or 0.0 for row in rows if not _is_rounding(row, times)}
    if not apart:
        return None
    return (
        f"The updates agree to {_OF_UPDATE:.0%} of themselves. From gradients that add up to the baseline's, "
        f"{first_of([*apart], 4)} still {'differs' if len(apart) == 1 else 'differ'} by more than rounding (rel_l2 "
        f"{max(apart.values()):.2g}), as where gradients are sent in 16 bits, or a term such as weight decay differs."
    )


def _weights_after(session: Session, target: Callable[[], Any]) -> pd.DataFrame:
    """The rows of the weights that the baseline's update and this function of the target show."""
    frame = _compared(session, repeat_call, target)
    return frame[frame["status"].isin(MEASURED) & (frame["tags"].map(kind_of) == "param")]


def _compared(
    session: Session, baseline: Callable[[], Any], target: Callable[[], Any], b2t: str | None = None
) -> pd.DataFrame:
    """The rows of a run of these functions in which every tap is compared."""
    try:
        lend_plan(session, b2t=b2t, t2b=None, compare="True", keep=None)
        return session.run(baseline, target).frame
    finally:
        restore_plan(session)


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["name"], row.get("target_name"), row["rank"]


def take_equal_inputs(session: Session, which: str = "True") -> pd.DataFrame:
    """Let repetitions of the target's held update begin with the baseline's values; returns the rows of the grafts.

    ``which`` is a filter that chooses the inputs.
    """
    take = OfUpdate(HeldUpdate.take_inputs)
    return _compared(session, take, take, which)


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


def _without_lines_after_states(findings: Findings) -> Findings:
    """The findings without lines for weights whose optimizer state differs too: the state's lines are nearer the fault.

    A step writes its states before it reads them, and in a first step unrelated values are equal by chance.
    """
    named = findings.frame[findings.frame["group"].isin(findings.named)]
    states = {name for name, tags in zip(named["name"], named["tags"], strict=True) if kind_of(tags) == "optimizer"}
    weights = {name.rpartition(".")[0] for name in states}
    return replace(findings, lines=[each for each in findings.lines if each.tap not in weights])


def _without_partner(
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    rows: Sequence[Mapping[str, Any]],
    are_matched: bool,
    fused: Mapping[str, str],
) -> list[str]:
    """A sentence on each side's weights whose gradients were not compared, and so neither were their updates."""
    pairs = [
        (row["name"], row.get("target_name") or row["name"]) for row in rows if kind_of(row["tags"]) == "param_grad"
    ]
    parts = {name for name, _ in pairs}
    # A fused weight is compared if each of its parts is.
    wholes = {*fused.values()} - {whole for part, whole in fused.items() if part not in parts}
    pairs += [(whole, "") for whole in wholes]
    shares, advice = ("name or values", "") if are_matched else ("name", "; --match pairs weights by value")
    sentences = []
    for place, (side, own) in enumerate(zip(SIDES, (baseline, target), strict=True)):
        known = {pair[place] for pair in pairs}
        trained = dict.fromkeys(name for each in own for name in each.gradients)
        left = [name for name in trained if name not in known]
        if left:
            sentences.append(
                f"The gradients of {len(left)} of the {side}'s {len(trained)} weights were not compared, because no "
                f"weight of the {other_side(side)} has the same {shares}: {first_of(left, 4)}{advice}."
            )
    return sentences


def _updated_elsewhere(
    baseline: UpdateDescription, target: UpdateDescription, rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], tuple[str, ...]]:
    """A sentence on the weights that one side's held step updates, and another optimizer of the other side; and their
    names on the baseline.
    """
    pairs = [(row["name"], row.get("target_name") or row["name"]) for row in rows if kind_of(row["tags"]) == "param"]
    sentences, every = [], []
    for place, (side, own, other) in enumerate((("baseline", baseline, target), ("target", target, baseline))):
        not_here = {*other.elsewhere, *other.frozen}
        names = [pair[0] for pair in pairs if pair[place] in own.elsewhere and pair[1 - place] not in not_here]
        if names:
            every += names
            sentences.append(
                f"The update of {first_of([*names], 4)} was not compared in this step: on the {side} another optimizer "
                f"than this {own.optimizer} updates them. The weights before the next update show the result."
            )
    return sentences, tuple(every)


def _equal_weights(rows: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The weights that differ before this update by no more than one rounding, so that a small update shows too."""
    apart = {row["name"] for row in rows if kind_of(row["tags"]) == "param" and not _is_rounding(row, 1)}
    return frozenset(row["name"] for row in rows if kind_of(row["tags"]) == "param") - apart


def _parted(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on weights and states that differ before the update by more than earlier updates' rounding."""
    sentences: list[str] = []
    for kind, what in (("param", "The weights already differ"), ("optimizer", "The optimizer's state already differs")):
        differing = [row["name"] for row in rows if kind_of(row["tags"]) == kind and not _is_rounding(row)]
        if differing:
            sentences.append(f"{what} before this update: {first_of([*differing], 4)}.")
    return sentences


def _without_state(
    given: pd.DataFrame,
    rows: Sequence[Mapping[str, Any]],
    baseline: UpdateDescription,
    target: UpdateDescription,
) -> list[str]:
    """A sentence on each optimizer without state of weights for which the other, of the same class, has some."""
    if baseline.optimizer != target.optimizer:
        return []
    pairs = [(row["name"], row.get("target_name") or row["name"]) for row in rows if kind_of(row["tags"]) == "param"]
    states = given[given["tags"].map(kind_of) == "optimizer"]
    compared = {name.rpartition(".")[0] for name in states.loc[states["status"].isin(MEASURED), "name"]}
    # A fused weight's state has no partner, but is there.
    alone = [
        {name.rpartition(".")[::2] for name in states.loc[states["status"] == status, "name"]}
        for status in ("unmatched", "missing")
    ]
    sentences = []
    for place, side in enumerate(SIDES):
        lacking = {weight for weight, _ in alone[place]}
        own = {weight for weight, _ in alone[1 - place]}
        partners = {pair[place]: pair[1 - place] for pair in pairs if pair[0] not in compared}
        # Another optimizer of the other side has the state of what it updates.
        own |= {*(target, baseline)[place].elsewhere}
        names = [each for each in partners if each in lacking and partners[each] not in own]
        if names:
            keys = sorted({key for weight, key in alone[place] if weight in names})
            sentences.append(
                f"Before this update the {other_side(side)}'s {target.optimizer} has no state of "
                f"{counted(len(names), 'weight')} ({first_of(names, 2)}), and the {side}'s has {listed(keys)}."
            )
    return sentences


def _is_rounding(row: Mapping[str, Any], times: float = _DRIFT) -> bool:
    """Whether two tensors differ by no more than earlier updates' rounding, or this many roundings."""
    dtype = coarser_dtype(row)
    # A weight of 16 bits is rounded once an update, and the target begins each with the baseline's.
    if kind_of(row["tags"]) == "param" and dtype in DTYPES_OF_16_BITS:
        times = min(times, _ONCE)
    return not row["nonfinite_differ"] and (row["rel_l2"] or 0.0) <= times * roundoff(dtype)


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
    baseline: UpdateDescription,
    target: UpdateDescription,
    rows: Sequence[Mapping[str, Any]],
    fused: Mapping[str, str],
) -> list[str]:
    """Sentences on differing settings, with both sides' values.

    ``fused`` has the baseline's weight by the name of each pair with a part of it.
    """
    sentences: list[str] = []
    pairs = {row["name"]: row.get("target_name") or row["name"] for row in rows if kind_of(row["tags"]) == "param"}
    for setting in sorted({**baseline.settings, **target.settings}, key=lambda each: each == "initial_lr"):
        if setting == "initial_lr" and any("optimizer's lr " in line for line in sentences):
            # A scheduler's initial rate shows in the rate itself.
            continue
        ours, theirs = baseline.settings.get(setting, {}), target.settings.get(setting, {})
        differing: dict[tuple[Any, Any], list[str]] = {}
        for name, partner in pairs.items():
            one, other = ours.get(fused.get(name, name)), theirs.get(partner)
            if one is not None and other is not None and one != other:
                differing.setdefault((one, other), []).append(name)
        for (one, other), names in differing.items():
            where = "" if len(names) == len(pairs) else f", for {first_of([*names], 4)}"
            verb = "are" if isinstance(one, tuple) else "is"
            sentences.append(
                f"The optimizer's {setting} {verb} {one} on the baseline and {other} on the target{where}."
            )
    dtypes = {
        name: (baseline.dtypes.get(fused.get(name, name)), target.dtypes.get(partner))
        for name, partner in pairs.items()
    }
    if apart := [name for name, (one, other) in dtypes.items() if one != other]:
        one, other = dtypes[apart[0]]
        sentences.append(
            f"The weights are {one} on the baseline and {other} on the target: {first_of([*apart], 4)}. "
            "An update that is smaller than their rounding is lost."
        )
    return sentences
