"""A look at held calls in more bits, where rounding to 16 bits may hide a mistake."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graftlab.base.tap_groups import group_of, kind_of_group
from graftlab.base.text import counted, first_of
from graftlab.comparison.answers import answer_of, moves
from graftlab.comparison.repeats import JudgingChoice, NoCloserLookError, Repeats
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DTYPES_OF_16_BITS, roundoff
from graftlab.errors import GraftError
from graftlab.plan.pairs import TapCallName
from graftlab.verdict.added import NOT_NAMED
from graftlab.verdict.findings import Findings
from graftlab.verdict.wording import NOT_CHECKED

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal

# Kinds of taps that show what a call is given.
_GIVEN = ("input", "param")
# Four roundings at random add about five times as much as one.
_MOVED = 3.0
# The most roundings to float32 that a long sum is taken to add, and how many times less is left of them in float64.
_FEW_ROUNDINGS = 32.0
_SHRINKS = 3.0


@dataclass(frozen=True)
class CloserLook:
    """The verdict after a look at the same call in more bits, and sentences on it.

    ``may_be_rounding`` says whether weights that the target alone has, rounded to 16 bits, may explain what differs.
    ``doubt`` is a sentence on what 16 bits may hide, if the look failed.
    """

    verdict: Verdict
    said: tuple[str, ...] = ()
    may_be_rounding: bool = False
    doubt: str | None = None


def in_more_bits(
    repeats: Repeats,
    verdict: Verdict,
    choice: JudgingChoice,
    proposal: Proposal | None,
    is_first: bool,
    unnamed: Collection[str] = (),
) -> CloserLook:
    """Look at the same call in float32, if 16 bits may hide a mistake, or rounded state may explain a difference, and
    in float64, if a few roundings to float32 may.

    ``unnamed`` are the baseline's taps of values whose names the target has not; without a ``proposal`` they have no
    partner.
    """
    if (of_state := _if_state_rounds(repeats, verdict, choice, is_first)) is not None:
        return of_state
    if (of_sums := _if_sums_round(repeats, verdict, choice)) is not None:
        return of_sums
    try:
        wide = _closer_look(repeats, verdict, choice, is_first)
    except NoCloserLookError as error:
        why = f"{NOT_CHECKED}the same call in float32: {error}."
        return CloserLook(verdict, (why,), doubt=_between_few_taps(verdict, proposal, unnamed))
    except GraftError as error:
        # The verdict on the call itself stands.
        why = f"{NOT_CHECKED}the same call in float32, which failed: {str(error).splitlines()[0]}"
        return CloserLook(verdict, (why,), doubt=_between_few_taps(verdict, proposal, unnamed))
    if wide is None:
        return CloserLook(verdict)
    found = wide.findings
    if found.in_float32 is None:
        narrow = dict.fromkeys(each for each in verdict.frame["dtype"] if each in DTYPES_OF_16_BITS)
        dtypes = " and ".join(narrow) or verdict.findings.computed_in
        what = (
            "no tapped value explains the difference" if verdict.findings.unexplained else "the calls agree to rounding"
        )
        merged = _merged_weights(found, narrow, proposal) if proposal is not None else None
        merged = merged or _rounded_alone(repeats, found, choice, proposal, is_first)
        said = f"In {dtypes} {what}. In {found.looked_in}, from the same numbers, they differ:"
        return CloserLook(wide, (merged, said) if merged else (said,), may_be_rounding=merged is not None)
    if found.is_rounding_possible and found.choices:
        chosen = found.choices[0]
        sentence = (
            f"In {found.looked_in}, from the same numbers, the calls agree. In 16 bits they differ from a choice on "
            f"({chosen.operation.partition('(')[0]}, {chosen.stack[0]}): rounding may have made what it chooses from "
            "equal or changed its order, or the target rounds more, or has other code for 16 bits."
        )
        return CloserLook(wide, (sentence,))
    if not found.unexplained:
        return CloserLook(wide)
    sentence = (
        f"In {found.looked_in}, from the same numbers, the calls agree. In 16 bits they differ, though every module "
        "agrees from equal inputs: rounding may have changed a choice, such as a router's, or the target rounds more."
    )
    return CloserLook(wide, (sentence,))


def _between_few_taps(verdict: Verdict, proposal: Proposal | None, unnamed: Collection[str]) -> str | None:
    """A sentence if most of the baseline's taps of values have no partner, so that rounding adds up between the others
    and hides more; else None.
    """
    frame = verdict.frame
    values = frame[frame["ratio"].notna() & ~frame["group"].map(kind_of_group).isin(_GIVEN)]
    left = {*unnamed}
    if proposal is not None:
        parsed = map(TapCallName.of, proposal.unmatched_baseline)
        left = {each.name for each in parsed if (each.tags or {}).get("kind") is None}
    # A tap may have a partner in some calls alone.
    left -= {*values["name"]}
    compared, alone = len({*values["name"]}), len(left)
    if compared >= alone:
        return None
    narrow = [each for each in DTYPES_OF_16_BITS if each in {*frame["dtype"]}] or [verdict.findings.computed_in]
    were = "was" if compared == 1 else "were"
    return (
        f"{counted(compared, 'tap')} of values {were} compared, and {alone} of the baseline's have no partner. Between "
        f"so few, rounding to {' and '.join(narrow)} adds up, and may hide a mistake. Compare both in float32."
    )


def _if_state_rounds(repeats: Repeats, verdict: Verdict, choice: JudgingChoice, is_first: bool) -> CloserLook | None:
    """Look at a call in float32 that differs, where one side alone keeps state, such as a cache, in 16 bits.

    The floor of float32 has no room for the rounding of that state. If all that is named is within it, and the calls
    agree with the state in float32, the rounding may explain it. If they differ even then, that shows what else does.
    None if there is no such state, or the calls cannot run so.
    """
    found, frame = verdict.findings, verdict.frame
    # State that is an argument is an input.
    computed = frame[frame["group"].map(kind_of_group) != "input"]
    if found.data or not len(computed) or computed["dtype"].isin(DTYPES_OF_16_BITS).any():
        return None
    if answer_of(replace(found, contradicting_pairs=()), True, True) != "differ":
        return None
    try:
        state = repeats.state_in_16_bits()
        wide = repeats.in_float32(choice, is_first=is_first) if state else None
    except GraftError:
        return None
    if wide is None or wide.findings.data:
        return None
    dtypes = sorted({str(each).removeprefix("torch.") for each in state.values()})
    which = f"One side alone has {first_of([*state])} in {' and '.join(dtypes)}."
    runs = verdict.runs + wide.runs
    answer = answer_of(replace(wide.findings, contradicting_pairs=()), True, True)
    if answer == "differ" and wide.named:
        said = f"{which} With these in float32, from the same numbers, they differ:"
        return CloserLook(Verdict(wide.findings, runs), (said,))
    named = frame[~frame["label"].isin(NOT_NAMED)]
    room = choice.threshold * max(map(roundoff, dtypes))
    if answer != "agree" or found.unexplained or not (named["added"] <= room).all():
        return None
    sentence = (
        f"{which} With these in float32, from the same numbers, the calls agree. So their rounding may explain what "
        f"follows (up to {named['added'].max():.2g}), and so may code that runs in 16 bits alone."
    )
    return CloserLook(Verdict(found, runs), (sentence,), may_be_rounding=True)


def _if_sums_round(repeats: Repeats, verdict: Verdict, choice: JudgingChoice) -> CloserLook | None:
    """Look at a call in float64 that differs in float32 by a few roundings, as where the target has folded a norm into
    its weights, or adds in another order.

    None unless it agrees then, and all that was named differs far less, by no more than weights that are rounded
    differently: a mistake is as large in float64, where the calls ask the same of their operators.
    """
    found, frame, one = verdict.findings, verdict.frame, roundoff("float32")
    named = frame[~frame["label"].isin(NOT_NAMED)]
    if choice.floor != "auto" or found.data or found.unexplained or not len(named):
        return None
    if not ((named["dtype"] == "float32") & (named["added"] <= _FEW_ROUNDINGS * one)).all():
        return None
    if frame["dtype"].isin(DTYPES_OF_16_BITS).any():
        return None
    try:
        wide = repeats.in_float64(choice)
    except GraftError:
        return None
    if answer_of(replace(wide.findings, contradicting_pairs=()), True, True) != "agree":
        return None
    added = wide.frame.groupby("group")["added"].max()
    rests = [(float(added.get(row["group"], math.inf)), row["added"]) for _, row in named.iterrows()]
    if not all(rest <= min(2 * one, before / _SHRINKS) for rest, before in rests):
        return None
    groups = [*dict.fromkeys(named["group"])]
    differ = f"{first_of(groups)} {'differs' if len(groups) == 1 else 'differ'}"
    sentence = (
        f"In float32 {differ} by up to {named['added'].max():.2g} from equal inputs, and in float64, from the same "
        f"numbers, by {max(rest for rest, _ in rests):.2g}: they only round differently."
    )
    return CloserLook(Verdict(wide.findings, verdict.runs + wide.runs), (sentence,))


def rounding_may_hide_mistakes(verdict: Verdict) -> bool:
    """Whether nothing is named of calls that round to 16 bits, and are not bit-equal."""
    found, frame = verdict.findings, verdict.frame
    if answer_of(_if_rounding(found), True, True) != "agree":
        return False
    narrow = frame.loc[frame["dtype"].isin(DTYPES_OF_16_BITS), "added"]
    # Bit-equal calls are right.
    return bool((found.after_taps and len(narrow)) or (narrow > 0).any() or (found.computed_in and moves(found)))


def _if_rounding(found: Findings) -> Findings:
    """The findings of a verdict if its differences are rounding, and its pairs are right."""
    return replace(
        found, contradicting_pairs=(), in_float32=0.0, unexplained=(), rounding=replace(found.rounding, stands_out="")
    )


def _closer_look(repeats: Repeats, verdict: Verdict, choice: JudgingChoice, is_first: bool) -> Verdict | None:
    """The verdict of the same runs in float32, if rounding to 16 bits may hide a mistake; otherwise None.

    That of float32 where it names something. Otherwise it is the given one, whose differences are rounding then.

    Raises :class:`NoCloserLookError` with the reason if float32 shows nothing.
    """
    found, frame, cleared = verdict.findings, verdict.frame, _if_rounding(verdict.findings)
    if not rounding_may_hide_mistakes(verdict):
        if frame["dtype"].isin(DTYPES_OF_16_BITS).any() and answer_of(found, True, True) == "agree":
            repeats.note_equal()
        if not (found.choices and frame["dtype"].isin(DTYPES_OF_16_BITS).any()):
            return None
    wide = repeats.in_float32(choice, is_first=is_first)
    is_given = (wide.frame["group"].map(kind_of_group) == "input") & (wide.frame["added"] == 0)
    still = [*wide.frame.loc[~is_given & wide.frame["dtype"].isin(DTYPES_OF_16_BITS), "name"]]
    # In float64, operators that compute nothing leave 16 bits, and each of the others was looked at.
    if still and wide.findings.looked_in == "float32":
        raise NoCloserLookError(f"these compute in 16 bits even then: {first_of([*dict.fromkeys(still)], 4)}")
    # It computes in more bits now, from numbers of 16 bits.
    wide = replace(wide, findings=replace(wide.findings, computed_in=""))
    answer = answer_of(replace(wide.findings, contradicting_pairs=()), True, True)
    runs = verdict.runs + wide.runs
    if answer == "agree" and (not found.unexplained or found.only_without_grafts):
        # Where one side alone has 16 bits, the rounding of its numbers, which both have now, may be the mistake.
        rounding = found.rounding if frame["cast"].notna().any() else cleared.rounding
        ratio = float(wide.frame["ratio"].max()) if len(wide.frame) else 0.0
        looked = replace(found, in_float32=ratio, looked_in=wide.findings.looked_in, rounding=rounding)
        return Verdict(looked, runs)
    if found.named and not rounding_may_hide_mistakes(verdict):
        return None
    # Weights that differ by one rounding differ in float32, and whatever reads them.
    is_of_code = (wide.named or wide.findings.unexplained) and (wide.findings.weights_lent or not wide.findings.data)
    if answer == "differ" and is_of_code:
        return Verdict(wide.findings, runs)
    if answer == "agree":
        return None
    why = "it is inconclusive" if answer == "inconclusive" else "weights that are rounded differently differ in it"
    raise NoCloserLookError(why)


def _merged_weights(wide: Findings, dtypes: Collection[str], proposal: Proposal) -> str | None:
    """A sentence if all that differs in float32 has weights without a partner, as merged ones are, and differs by no
    more than their rounding to these dtypes; else None.
    """
    named = wide.frame[~wide.frame["label"].isin(NOT_NAMED)]
    if wide.unexplained or not len(named) or not (named["added"] <= max(map(roundoff, dtypes), default=0.0)).all():
        return None
    parsed = map(TapCallName.of, proposal.unmatched_baseline)
    alone = [each.name for each in parsed if (each.tags or {}).get("kind") == "param"]
    modules: dict[str, set[str]] = defaultdict(set)
    for pair in proposal.pairs:
        # Some taps have the target's name in a verdict.
        modules[TapCallName.of(pair.target).name].add(TapCallName.of(pair.baseline).name)
    merged: dict[str, None] = {}
    for name, group in zip(named["name"], named["group"], strict=True):
        own = [name, *modules[name]]
        # A folded batch norm is a module beside the one that has its scale now.
        beside = [each.rpartition(".")[0] for each in own if "." in each]
        if any(weight.startswith(f"{each}.") for weight in alone for each in own):
            merged[group] = None
            continue
        found = [weight.rpartition(".")[0] for weight in alone if any(weight.startswith(f"{each}.") for each in beside)]
        if not found:
            return None
        merged.update(dict.fromkeys(map(group_of, found)))
    return (
        f"Weights of {first_of([*merged])} have no partner, as where the target has merged them with others. Their "
        f"rounding to {' and '.join(dtypes)} may explain what follows (up to {named['added'].max():.2g}), and so may a "
        "mistake. Merge them on both sides, or compare both in float32."
    )


def _rounded_alone(
    repeats: Repeats, wide: Findings, choice: JudgingChoice, proposal: Proposal | None, is_first: bool
) -> str | None:
    """A sentence if other roundings of the target's weights and other constants without a partner, such as a table that
    the baseline computes in each call, move all that differs in more bits about as far as it differs; else None.
    """
    named = wide.frame[~wide.frame["label"].isin(NOT_NAMED)]
    if wide.unexplained or wide.data or not len(named):
        return None
    parsed = map(TapCallName.of, proposal.unmatched_target if proposal is not None else ())
    alone = dict.fromkeys(each.name for each in parsed if (each.tags or {}).get("kind") == "param")
    try:
        alone |= dict.fromkeys(repeats.constants_of_target_alone())
        if not alone:
            return None
        moved = repeats.in_float32(choice, is_first=is_first, rounded_otherwise=[*alone], explain=False)
    except GraftError:
        return None
    added = moved.frame.groupby("group")["added"].max()
    if not all(added.get(row["group"], 0.0) >= _MOVED * row["added"] for _, row in named.iterrows()):
        return None
    them, their = ("it", "its") if len(alone) == 1 else ("them", "their")
    return (
        f"The target alone has {first_of([*alone])}, in 16 bits. With other roundings of {them}, what follows differs "
        f"by several times as much. So {their} rounding may explain it, where the baseline computes a table in each "
        "call, or has apart what the target has merged; and so may a mistake. Compare both in float32."
    )
