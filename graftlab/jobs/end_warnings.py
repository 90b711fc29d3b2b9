"""Warnings at the end of a job: nothing was measured, or a filter matched no tap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from graftlab.base.tags import PLACE_TAGS
from graftlab.base.text import first_of
from graftlab.config import PREFIX, GraftConfig
from graftlab.filters.check import FilterCheck, check_summary
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.rows.schema import MEASURED

_IN_VAIN = ("failed", "missing", "timeout")


def nothing_measured(
    taps: Sequence[Mapping[str, object]], statuses: Mapping[str, int], errors: Mapping[str, str], folder: Path
) -> str:
    """Return a sentence if a rank reached no tap, or nothing that it was to receive was measured; else ``""``.

    ``statuses`` counts its rows by status; ``errors`` has the last error of each status.
    """
    if not taps:
        return (
            "no tap was reached here, so nothing was compared: put gl.tap or gl.watch into the code, or set "
            "GRAFTLAB_WATCH=True"
        )
    received = {status: count for status, count in statuses.items() if status in _IN_VAIN}
    if not received or any(statuses.get(status) for status in MEASURED):
        return ""
    found = "; ".join(
        f"{count:,} {status}" + (f" ({errors[status].splitlines()[0]})" if errors.get(status) else "")
        for status, count in received.items()
    )
    names = list(dict.fromkeys(str(tags["name"]) for tags in taps))
    shown = first_of(names)
    hint = (
        ""
        if "failed" in received
        else " A tap pairs with one of the same name and tags in the same step of the other job."
    )
    return (
        f"nothing was compared here: everything that this job's taps ({shown}) should have received was {found}.{hint} "
        f"gl.load_run({str(folder)!r}) has the rows of both sides"
    )


def unmatched_filters(config: GraftConfig, plan: GraftPlan, taps: Sequence[Mapping[str, object]]) -> list[str]:
    """Return a sentence for each filter of the environment that is in force and matches none of these taps.

    A filter that names a step, a side or a rank is left out, because ``taps`` has each tap of one rank as it was first.
    """
    sentences = []
    for name in FILTERS:
        field = f"{name}_filter"
        text = getattr(config, field)
        if not taps or not (text or "").strip() or text != getattr(plan, name):
            continue
        check = FilterCheck(text)
        check.catch_up(taps)
        if check.filter is not None and not check.hits and not check.filter.names & PLACE_TAGS:
            sentences.append(
                f"{field} ({PREFIX}{field.upper()}) is {text!r} and matched no tap here: {check_summary(check, taps)}"
            )
    return sentences
