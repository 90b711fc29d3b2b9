"""The data of ``explorer.js``, the interactive figure and table of taps in notebooks, the dashboard and reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftlab.base.text import counted, failed_on, shortened
from graftlab.rows.schema import in_tables
from graftlab.verdict.conclusion import Conclusion
from graftlab.verdict.summary import not_compared

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCRIPT = Path(__file__).with_suffix(".js")

# JSON has no infinity; the script shows values from about here on as infinite.
_INFINITE = 1e308
_NOTE_LIMIT = 300


@dataclass(frozen=True)
class Canvas:
    """A figure of taps as ``explorer.js`` shows it.

    ``open`` returns pictures of the pair of tensors of the tap with this index, by what each shows. It raises
    :class:`GraftError` where no pair is kept. ``with_floor`` returns the state under another noise floor, or under the
    assumed one for None.
    """

    state: Mapping[str, Any]
    open: Callable[[int], Mapping[str, Figure]]
    with_floor: Callable[[float | None], Mapping[str, Any]] | None = None


def without_headline(canvas: Canvas) -> Canvas:
    """Return the canvas for below its conclusion in words. Under another floor it has its own."""
    return replace(canvas, state={**canvas.state, "headline": ""})


def taps(found: Conclusion) -> dict[str, Any]:
    """What of the state changes only when other taps come: their labels, in execution order.

    A tap that is received in both directions has two lines; the label of the second includes its direction.
    """
    labels: list[str] = []
    seen: set[str] = set()
    for line in found.lines:
        label = line.name if line.name not in seen else f"{line.name} {line.row.direction}"
        seen.add(label)
        labels.append(label)
    return {"label": labels, "order": list(range(1, len(labels) + 1))}


def figures(found: Conclusion, count: str = "") -> dict[str, Any]:
    """The part of the state that changes with every step; ``count`` is shown beside the table."""
    rows = [line.row for line in found.lines]
    return {
        "status": [row.status for row in rows],
        "value": [rounded(row.rel_l2) for row in rows],
        "columns": _columns(),
        **{name: [rounded(getattr(row, name)) for row in rows] for name in in_tables()},
        "nonfinite": [row.nonfinite_differ or 0 for row in rows],
        "badness": [rounded(line.badness) for line in found.lines],
        "worst": [f"{row.side}[{row.rank}]" for row in rows],
        "highest": [rounded(line.worst) for line in found.lines],
        "since": [line.since for line in found.lines],
        "step": [row.step for row in rows],
        "plan": [row.plan_version for row in rows],
        "way": [row.direction or "" if row.status == "grafted" else "" for row in rows],
        "note": [(row.error or row.note or row.aligned_by or "").partition("\n")[0][:_NOTE_LIMIT] for row in rows],
        "floor": found.floor,
        "notes": [] if found.first is None else [[found.first, f"first divergent: {found.lines[found.first].name}"]],
        "headline": headline(found),
        "count": count,
    }


def _columns() -> list[list[str]]:
    """The title of each column of the table, its name in the state, and whether it has text, counts or numbers."""
    return [
        ["order", "order", "count"],
        ["tap", "label", "text"],
        ["status", "status", "text"],
        ["rel_l2", "value", "number"],
        *([name, name, "number"] for name in in_tables()),
        ["non-finite", "nonfinite", "count"],
        ["worst on", "worst", "text"],
        ["step", "step", "count"],
        ["plan", "plan", "count"],
        ["largest in run", "highest", "number"],
        ["above the floor since step", "since", "count"],
        ["direction", "way", "text"],
        ["note", "note", "text"],
    ]


def headline(found: Conclusion, failing: Mapping[str, str] | None = None) -> str:
    """The conclusion so far, shown first. ``failing`` has what went wrong in the run, by rank."""
    if not found.lines:
        return "Nothing was compared yet."
    rows = [line.row for line in found.lines]
    steps = sorted({row.step for row in rows})
    plans = sorted({row.plan_version for row in rows})
    when = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    plan = f"plan {plans[0]}" if len(plans) == 1 else f"plans {plans[0]} to {plans[-1]}"
    lost = not_compared(Counter(row.status for row in rows))
    unseen = f" Not compared: {lost}." if lost else ""
    sentence = found.sentences[0] if found.sentences else "nothing was measured"
    elsewhere = (each for each in (found.earlier, found.nonfinite) if each)
    earlier = "".join(f" {each[0].upper()}{each[1:]}." for each in elsewhere)
    why = shortened(next(iter(failing.values())), 120).rstrip(": ") if failing else ""
    failed = f" {failed_on(failing)} ({why})" if failing else ""
    return f"Run {rows[0].run}{failed}, {when}, {plan}, {counted(len(rows), 'tap')}: {sentence}.{earlier}{unseen}"


def rounded(value: float | None) -> float | None:
    """Round to the digits that are shown; None for NaN."""
    if value is None or math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else _INFINITE
