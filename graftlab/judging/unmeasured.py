"""Sentences on what the runs of a verdict did not measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from graftlab.base.tap_groups import described, group_of, kind_of_group, place_in_blame
from graftlab.base.text import counted, first_of
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.swaps import OutputTap, Swaps
from graftlab.rows.schema import MEASURED
from graftlab.transforms.by_layout import SKETCHED
from graftlab.transforms.default import unfit_shapes
from graftlab.verdict.added import rows_where, unseen_of
from graftlab.verdict.causes import Causes
from graftlab.verdict.model_data import data_rows
from graftlab.verdict.wording import NOT_CHECKED


def unseen_taps(
    compared: pd.DataFrame, to_be_grafted: pd.DataFrame, grafted: pd.DataFrame, selves: Sequence[SelfGraft]
) -> list[str]:
    """Sentences on taps that a run lacks, that show no tensor, or whose floor was not recorded."""
    data = data_rows(compared)
    remarks = unseen_of(rows_where(data, ~data["status"].isin(MEASURED))) + unseen_of(grafted)
    measured = set(grafted.loc[grafted["status"].isin(MEASURED), "name"])
    lost = [
        n for n in dict.fromkeys(to_be_grafted.loc[to_be_grafted["status"].isin(MEASURED), "name"]) if n not in measured
    ]
    if lost:
        were = "was" if len(lost) == 1 else "were"
        remarks.append(f"{', '.join(lost[:4])} {were} measured without grafts, but not with them.")
    skipped = list(dict.fromkeys(name for each in selves for name in each.skipped))
    if skipped:
        verb = "shows" if len(skipped) == 1 else "show"
        remarks.append(f"{first_of(skipped, 4)} {verb} no comparable tensor on the baseline.")
    not_recorded = sum(each.not_recorded for each in selves)
    if not_recorded:
        remarks.append(
            f"the floor of {counted(not_recorded, 'tap')}, which did not fit the ranks' keep_budget; the largest floor "
            "of the others is used for them (launch with a larger keep_budget)."
        )
    return remarks


def not_in_twin(selves: Sequence[SelfGraft], has_twin: bool) -> list[str]:
    """A sentence on the taps whose floor lacks the distance from the request's twin."""
    if not has_twin:
        return []
    shown = {added.name for each in selves for added in each.exact}
    left = [n for n in dict.fromkeys(added.name for each in selves for added in each.added) if n not in shown]
    if not left:
        return []
    if not shown:
        return ["exact=, which reaches none of the baseline's taps: the floor is the same as without it."]
    return [f"{first_of(left, 4)} with exact=, which does not reach them; their floor is the same as without it."]


BEGIN_INPUT = "The input "
"""The beginning of a sentence on an input that could not be grafted."""


def not_grafted(grafted: pd.DataFrame, frame: pd.DataFrame, threshold: float) -> list[str]:
    """A sentence on taps before a named one that could not be grafted: later taps inherit a difference there."""
    over = frame[frame["ratio"] > threshold]
    last = max(zip(over["step"], over["order"], strict=True), default=(-1, -1))
    failed = grafted[grafted["status"] == "failed"]
    # A verdict counts steps from its run's first.
    steps = failed["step"] - grafted["step"].min()
    failed = failed[[place < last for place in zip(steps, failed["order"], strict=True)]]
    if not len(failed):
        return []
    groups = list(dict.fromkeys(map(group_of, failed["name"], failed["tags"])))
    first = groups[0]
    names = [each.removesuffix("@input") for each in groups]
    inherited = "later taps may have inherited their named error from there"
    shapes = unfit_shapes(str(failed.iloc[0]["error"]))
    if shapes is None:
        return [f"{NOT_CHECKED}{first_of(names)}, where nothing could be grafted: {inherited}."]
    also = f", and at {first_of(names[1:])}" if names[1:] else ""
    name = BEGIN_INPUT + names[0] if kind_of_group(first) == "input" else described(first)
    return [
        f"{name} has the shape {shapes[1]} on the baseline and {shapes[0]} on the target. Nothing could be grafted "
        f"there{also}, so {inherited}."
    ]


def judged_until_sketch(
    frame: pd.DataFrame, grafted: pd.DataFrame, threshold: float
) -> tuple[pd.DataFrame, str | None]:
    """The frame with the taps after the first differing sketch marked unmeasured, and a sentence if there are any.

    ``frame`` comes from :func:`.added.added_frame`, ``grafted`` are its rows. A sketch cannot be grafted, so its
    difference reaches all of these taps.
    """
    sketched = set(grafted.loc[grafted["note"].astype(str).str.contains(SKETCHED, regex=False), "name"])
    differs = frame["name"].isin(sketched) & (frame["ratio"] > threshold)
    if not differs.any():
        return frame, None
    order = list(zip(frame["step"], frame["order"], strict=True))
    first = min(place for place, is_one in zip(order, differs, strict=True) if is_one)
    behind = pd.Series([place > first for place in order], index=frame.index)
    if not behind.any():
        return frame, None
    name = next(n for n, place in zip(frame["name"], order, strict=True) if place == first)
    frame = frame.copy()
    frame.loc[behind, ["added", "ratio"]] = math.nan
    frame.loc[behind, "label"] = "unmeasured"
    count = frame.loc[behind, "name"].nunique()
    return frame, (
        f"the {count} taps after {name}: the recording has only a sketch of {name}, which cannot be grafted, so its "
        f"difference reaches them. Record the whole tensor (with a larger --graftlab-record-limit), or fix {name} and "
        "judge again."
    )


_JUDGED_LAST = place_in_blame("@grad")


def judged_at(group: str) -> int:
    """The kind of output at which a group's effect is measured, as a place in blame: the last value for inputs."""
    return max(place_in_blame(group), place_in_blame(""))


def effects_not_measured(
    named: Sequence[str], causes: Mapping[str, Causes], swaps: Swaps, outputs: Sequence[OutputTap] = ()
) -> list[str]:
    """Remarks on groups whose effect is unknown."""
    # An optimizer's update cannot affect the output of its own step.
    left = [g for g in named if judged_at(g) <= _JUDGED_LAST and not any(g in each.labels for each in causes.values())]
    left = [g for g in left if not any(each.is_beside(g) for each in outputs)]
    remarks = [f"The effect of {', '.join(left)} on the output was not measured."] if left else []
    if swaps.not_swapped:
        taps = ", ".join(list(swaps.not_swapped)[:4])
        remarks.append(f"Code could not be swapped at {taps}, where the sides would wait for each other.")
    if swaps.unlike_ranks:
        taps = ", ".join(list(swaps.unlike_ranks)[:4])
        remarks.append(
            f"How far the target's {taps} is off could not be measured in every swap: its ranks have different values "
            "there, and should have equal ones."
        )
    return remarks


def outputs_themselves(groups: Sequence[str]) -> list[str]:
    """Remarks on groups without dependents, whose effect no swap can show."""
    if not groups:
        return []
    if len(groups) == 1:
        what = "it is an output itself, or its tap shows a copy. A swap cannot show its effect."
    else:
        what = "they are outputs themselves, or their taps show copies. A swap cannot show their effect."
    return [f"No later tap depends on {', '.join(groups)}: {what}"]


def baseline_changed(taps: Sequence[str]) -> str:
    """A remark on taps at which the baseline no longer showed its values after the swaps."""
    return (
        f"After its code was swapped the baseline no longer showed the same values at {', '.join(taps[:3])}, "
        "so the swaps are left out."
    )
