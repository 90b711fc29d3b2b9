"""A verdict in words: what was not looked at, then what is computed differently, and what it does to the output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch

from graftlab.verdict.causes import Causes
from graftlab.verdict.groups import kind_of_group, numbers_in

NOT_LOOKED_AT = "Not looked at: "
"""How a sentence begins that says what the verdict does not speak of."""


@dataclass(frozen=True)
class OfJobs:
    """What is to be said of jobs, or of a baseline that is a recording.

    ``constant`` is the floor of every tap where it was not measured, ``floor`` the word for such a floor. ``first`` are
    sentences that stand before the conclusion, ``unseen`` says what was not looked at, ``of_named`` what has to be said
    of whatever is named, and ``last`` what has become of the jobs.
    """

    constant: float | None
    floor: str
    first: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    of_named: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What the runs of a verdict came to. ``target_ranks`` is how many there are."""

    frame: pd.DataFrame
    threshold: float
    target_ranks: int
    unseen: Sequence[str] = ()
    not_repeated: Sequence[str] = ()
    causes: Mapping[str, Causes] = field(default_factory=dict)
    """By the group of the output that they were measured at."""
    hints: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    data: Sequence[str] = ()
    """Sentences on what both sides were given differently: inputs, weights, settings."""
    inputs: Sequence[str] = ()
    """The groups of which the sentences of ``data`` speak: those that show what the model was given, above all."""
    following: Sequence[str] = ()
    """The groups of gradients that are other because the values that are named are."""
    target_not_repeated: Sequence[str] = ()
    """Taps at which the target differs from itself; looked for where something is named."""
    of_jobs: OfJobs | None = None
    """What is to be said of jobs, which nobody can call again."""

    @property
    def named(self) -> list[str]:
        return list(dict.fromkeys(self.frame.loc[~self.frame["label"].isin(("clean", "inherited")), "group"]))


def text_of(findings: Findings) -> str:
    """The verdict's text, its most important sentence first."""
    lines = []
    if findings.not_repeated:
        lines.append(_not_repeatable("baseline", findings.not_repeated))
    if findings.target_not_repeated:
        lines.append(_not_repeatable("target", findings.target_not_repeated))
    lines += findings.of_jobs.first if findings.of_jobs else ()
    lines += findings.data
    lines += [f"{NOT_LOOKED_AT}{line}" for line in findings.unseen]
    lines += _conclusion(findings)
    lines += [f"Hint ({group}): {hint}." for group, hint in findings.hints.items()]
    lines += findings.remarks
    lines += findings.of_jobs.last if findings.of_jobs else ()
    return "\n".join(lines)


def _not_repeatable(side: str, taps: Sequence[str]) -> str:
    shown = ", ".join(taps[:3]) + (f" and {len(taps) - 3} more" if len(taps) > 3 else "")
    return (
        f"The {side} does not repeat itself: run twice, it differs at {shown}. Nothing below can be relied on. Turn "
        "dropout off (model.eval()), seed the random numbers inside the function, and start each call from the same "
        "state (caches, weights)."
    )


def _conclusion(findings: Findings) -> list[str]:
    frame, named = findings.frame, findings.named
    if not len(frame):
        return ["Nothing was compared: no tap was measured on both sides. Put gl.tap or gl.watch into both functions."]
    computed = [group for group in named if group not in findings.inputs]
    if not computed:
        lines = [_nothing_named(findings)]
    else:
        blamed = [group for group in computed if _label(frame, group) == "culprit"]
        lines = [_computed_otherwise(findings, group) for group in blamed]
        for group in (g for g in computed if _label(frame, g) != "culprit"):
            what = _computed_otherwise(findings, group).rstrip(".")
            lines.append(what + {"minor": ", which the output does not show.", "cancels": "."}[_label(frame, group)])
    if findings.following:
        lines.append(_following(findings.following))
    for output, causes in findings.causes.items():
        lines += _effects(output, causes, findings)
    if named and (frame["label"] == "inherited").any():
        lines.append("Everything else is inherited.")
    return lines


def _nothing_named(findings: Findings) -> str:
    # Of what the model was given the sentences before this one have spoken.
    frame = findings.frame[~findings.frame["group"].isin(list(findings.inputs))]
    if not len(frame):
        return "Apart from inputs no tap was measured on both sides. Put gl.tap or gl.watch into both functions."
    top = frame["ratio"].max()
    coarse = [d for d in pd.unique(frame["dtype"]) if _is_coarse(d)]
    measured = (
        f"{frame['group'].nunique()} groups of taps, at most {top:.2g} x the {_floor(findings)}, threshold "
        f"{_number(findings)}"
    )
    if coarse:
        return f"Nothing above {' and '.join(coarse)} rounding ({measured}); run the target in float32 to look closer."
    if findings.of_jobs is not None and findings.of_jobs.constant is not None:
        most = f"{_number(findings)} x the {_floor(findings)} of {findings.of_jobs.constant:.1g}"
        return f"Of what was looked at, nothing adds more than {most} ({measured})."
    if findings.unseen or findings.not_repeated:
        return f"Of what was looked at, nothing adds more than rounding ({measured})."
    return f"No tap adds more than rounding does ({measured})."


def _floor(findings: Findings) -> str:
    return f"{findings.of_jobs.floor}floor" if findings.of_jobs else "floor"


def _is_coarse(dtype: str) -> bool:
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize < 4


def _number(findings: Findings) -> str:
    return f"{findings.threshold:g}"


def _label(frame: pd.DataFrame, group: str) -> str:
    labels = frame.loc[(frame["group"] == group) & ~frame["label"].isin(("clean", "inherited")), "label"]
    return str(labels.iloc[0])


def _computed_otherwise(findings: Findings, group: str) -> str:
    frame = findings.frame
    rows = frame[(frame["group"] == group)]
    over = rows[rows["ratio"] > findings.threshold]
    worst = over.iloc[int(over["ratio"].to_numpy().argmax())]
    size = (
        "not finite on one side"
        if math.isinf(worst["ratio"]) and not math.isinf(worst["added"]) and worst["floor"]
        else f"added {worst['added']:.2g}, {worst['ratio']:.2g} x the {_floor(findings)}"
    )
    details = [size, worst["dtype"]]
    if worst["aligned_by"] is not None and not pd.isna(worst["aligned_by"]):
        details.append(f"aligned by {worst['aligned_by']}")
    where = _layers(rows, over) + _ranks(over, findings.target_ranks)
    what = described(group)
    # The name of a tap stays as it is.
    what = what[0].upper() + what[1:] if kind_of_group(group) else what
    return f"{what} is computed differently{where} ({', '.join(details)})."


def _following(groups: Sequence[str]) -> str:
    shown = ", ".join(described(group) for group in groups[:3]) + (
        f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    )
    return f"Its backward differs as well, as it has to: {shown}. Mend the forward before you judge these."


_OF_KIND = {
    None: "{}",
    "input": "the input {}",
    "grad": "the gradient of {}",
    "param_grad": "the gradient of the weight {}",
    "optimizer": "the optimizer's {}",
    "param": "the update of the weight {}",
}


def described(group: str) -> str:
    """A group as a sentence speaks of it.

    >>> described("layers.*.q@grad")
    'the gradient of layers.*.q'
    """
    kind = kind_of_group(group)
    return _OF_KIND[kind].format(group.removesuffix(f"@{kind}") if kind else group)


def _layers(rows: pd.DataFrame, over: pd.DataFrame) -> str:
    every, wrong = (sorted({numbers_in(name)[:1] for name in each["name"]}) for each in (rows, over))
    if every == [()]:
        every, wrong = (sorted({_layer_tag(tags) for tags in each["tags"]}) for each in (rows, over))
    if every == [()]:
        return ""
    numbers = [n[0] for n in wrong if n]
    shown = spans(numbers)
    layers = f" in layer{'s' if len(numbers) > 1 else ''} {shown}"
    return layers + (f" of {spans([n[0] for n in every if n])}" if len(wrong) < len(every) else "")


def _layer_tag(tags: Mapping[str, Any]) -> tuple[int, ...]:
    layer = tags.get("layer")
    return (int(layer),) if isinstance(layer, (int, np.integer)) else ()


def _ranks(over: pd.DataFrame, count: int) -> str:
    if count == 1:
        return ""
    wrong = sorted(set(over["rank"]))
    return " on all ranks" if len(wrong) == count else f" on rank{'s' if len(wrong) > 1 else ''} {spans(wrong)} alone"


def spans(numbers: Sequence[int]) -> str:
    """Sorted whole numbers in few characters: ``0-3, 7``.

    >>> spans([0, 1, 2, 3, 7])
    '0-3, 7'
    """
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)


def _effects(output: str, causes: Causes, findings: Findings) -> list[str]:
    groups = ", ".join(causes.labels)
    # Of a model that is watched as a whole the last tap is called so.
    named = "" if output == "output" else f" {output}"
    output = f", {described(output)}," if kind_of_group(output) else named
    if math.isnan(causes.restored):
        return [f"What {groups} do to the output{output} could not be measured."]
    if not causes.restored <= findings.threshold:
        return [
            f"With the baseline's {groups} the output{output} is still {causes.restored:.2g} x its floor: something "
            "acts outside of the taps. State that is written before its tap (a KV cache) is such a thing; tap it."
        ]
    lines = []
    if causes.total <= findings.threshold:
        lines.append(f"The output{output} agrees all the same ({causes.total:.2g} x its floor).")
    else:
        lines.append(
            f"With the baseline's {groups} the output{output} agrees ({causes.restored:.2g} x its floor; "
            f"{causes.total:.2g} x without)."
        )
    lines += [f"{', '.join(sorted(each))} cancel each other." for each in causes.cancelling if len(each) > 1]
    if causes.cut_short:
        lines.append("There are more sets that might cancel than were tried.")
    return lines
