"""The comparison of a call that the target holds with a recording of a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pandas as pd

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import first_of
from graftlab.comparison.answers import Comparison, ReasonedAnswer, answer_of
from graftlab.comparison.call_remarks import not_checked, not_trusted
from graftlab.comparison.held_calls import enough_in_common
from graftlab.comparison.repeats import JudgingChoice
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR, DTYPES_OF_16_BITS
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import HeldCall
from graftlab.ranks.holding import OfCall, repeat_call
from graftlab.verdict.rounds_differently import sentence_on_single_taps
from graftlab.verdict.wording import NOT_CHECKED

if TYPE_CHECKING:
    from graftlab.recordings.recorded_side import RecordedSide
    from graftlab.session import Session

_NO_OUTPUT = (
    "No recorded value is known to be the model's output, so the taps that agree do not clear the target: name the tap "
    "that is (output=, or --output)."
)


def judge_against_recording(
    session: Session, baseline: RecordedSide, target: Sequence[CallDescription], choice: JudgingChoice
) -> Comparison:
    """Judge the call that the target holds, by its ranks' descriptions, against a recording of a call."""
    remarks = list(not_trusted((), target))
    proposal = None
    if choice.match or (choice.match is None and not enough_in_common(set(baseline.frame["name"]), {*target[0].taps})):
        proposal = session.match(baseline, repeat_call)
        session.edit(pairs=proposal)

    def judged(floor: float | Literal["auto"]) -> Verdict:
        return session.verdict(target=repeat_call, output=choice.output, floor=floor, threshold=choice.threshold)

    verdict = judged(choice.floor)
    trusted, hidden = not remarks, False
    if choice.floor == "auto" and verdict.named and not verdict.frame["dtype"].isin(DTYPES_OF_16_BITS).any():
        # The floor that is assumed for float32 does not suit results that are computed in 16 bits.
        (own,) = session.run(target=OfCall(HeldCall.own_rounding)).target[:1]
        if own is not None:
            hidden = True
            remarks.append(
                f"The target computes in {own[0]}: its results differ by up to {own[1]:.2g} (rel_l2) from those of the "
                f"same call in float64, which is taken as the floor. A mistake below {choice.threshold:g} times that "
                "is not seen."
            )
            verdict = judged(max(own[1], DEFAULT_NOISE_FLOOR))
    # A named output was compared, or there would be no verdict.
    conclusion = ReasonedAnswer(answer_of(verdict.findings, trusted, True), remarks)
    if choice.output is None and answer_of(verdict.findings, trusted, False) != "agree":
        conclusion.doubt(_NO_OUTPUT)
    if hidden:
        conclusion.withdraw_agreement()
    # A recording cannot run in float32, and its assumed floor is far above one rounding.
    conclusion.doubt(sentence_on_single_taps(verdict.frame))
    if conclusion.answer != "agree":
        remarks += _other_inputs(baseline.frame, session.frame)
    if sketched := baseline.sketched:
        remarks.append(
            f"{NOT_CHECKED}the single values of {first_of(sketched, 4)}: the recording has only sketches of them, "
            "which show how far two tensors are apart, and not where. They cannot be grafted."
        )
    remarks += [f"{NOT_CHECKED}{each}" for each in not_checked((), target)]
    return Comparison(verdict.findings, verdict.runs, session, proposal, conclusion.answer, tuple(remarks))


def _other_inputs(recorded: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """A sentence if a recorded call has an input of a different shape than the target's call."""
    own = rows[rows["side"] == "target"]
    own = own[[kind_of(tags) == "input" for tags in own["tags"]]] if len(own) else own
    # A model that is called several times has another shape of one input each time.
    shapes: dict[str, list[list[int]]] = {}
    for name, shape in zip(own["name"], own["shape"], strict=True):
        shapes.setdefault(str(name), []).append(list(shape))
    for name, shape in zip(recorded["name"], recorded["shape"], strict=True):
        if name in shapes and list(shape) not in shapes[name]:
            return [
                f"The recorded call has {name} of shape {list(shape)}, and the target's call {shapes[name][-1]}, so "
                "they do different work: give the target the recorded inputs, or record the baseline with the target's."
            ]
    return []
