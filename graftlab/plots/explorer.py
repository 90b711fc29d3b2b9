"""The data of ``explorer.js``, the interactive figure and table of taps in the dashboard and in reports."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from graftlab.base.text import counted
from graftlab.rows.schema import in_tables
from graftlab.verdict.conclusion import Conclusion
from graftlab.verdict.summary import not_compared

SCRIPT = Path(__file__).with_suffix(".js")

# JSON has no infinity; the script shows values from about here on as infinite.
_INFINITE = 1e308
_NOTE_LIMIT = 300


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
        "value": [_number(row.rel_l2) for row in rows],
        "differences": in_tables(),
        **{name: [_number(getattr(row, name)) for row in rows] for name in in_tables()},
        "nonfinite": [row.nonfinite_differ or 0 for row in rows],
        "badness": [_number(line.badness) for line in found.lines],
        "worst": [f"{row.side}[{row.rank}]" for row in rows],
        "highest": [_number(line.worst) for line in found.lines],
        "since": [line.since for line in found.lines],
        "step": [row.step for row in rows],
        "plan": [row.plan_version for row in rows],
        "way": [row.direction or "" for row in rows],
        "note": [(row.error or row.note or row.aligned_by or "").partition("\n")[0][:_NOTE_LIMIT] for row in rows],
        "floor": found.floor,
        "first": found.first,
        "headline": headline(found),
        "count": count,
    }


def headline(found: Conclusion) -> str:
    """The conclusion so far, shown first."""
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
    earlier = f" {found.earlier[0].upper()}{found.earlier[1:]}." if found.earlier else ""
    return f"Run {rows[0].run}, {when}, {plan}, {counted(len(rows), 'tap')}: {sentence}.{earlier}{unseen}"


def _number(value: float | None) -> float | None:
    """Round to the digits that are shown."""
    if value is None or math.isnan(value):
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else _INFINITE
