"""The lines as text: a table for the terminal, a shorter one for docs/speed.md, and JSON with everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.lines import Line, quantity

_GIB = 1 << 30


def headline(facts: dict[str, Any]) -> str:
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / _GIB:.0f} GiB; {facts['kernel']}; "
        f"Python {facts['python']}, torch {facts['torch']}, CUDA {facts['cuda']}; {facts['date']}, "
        f"load {facts['load_average_before']:.2f}"
    )


def plain(facts: dict[str, Any], lines: Sequence[Line]) -> str:
    """Aligned columns. ``+-`` is half the distance of the quartiles, in percent of the median."""
    heads = ["", "graftlab", "+-", "reference", "ratio", "sglang", "limit", "of it", "budget", ""]
    rows = [_cells(line) for line in lines]
    # Leave out a column without figures.
    used = [i for i, head in enumerate(heads) if head != "sglang" or any(row[i] for row in rows)]
    table = [[row[i] for i in used] for row in [heads, *rows]]
    # A line without figures is a sentence, which may be longer than a name.
    widths = [max(len(row[i]) for row in table if i or any(row[1:])) for i in range(len(used))]
    text = []
    for row in table:
        first, *rest = row
        figures = [
            cell.ljust(width) if i >= len(rest) - 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(rest, widths[1:], strict=True))
        ]
        text.append("  ".join([first.ljust(widths[0]), *figures]).rstrip())
    return "\n".join([headline(facts), _limits(facts), "", *text])


def markdown(facts: dict[str, Any], lines: Sequence[Line]) -> str:
    """The table of docs/speed.md: ratios to the reference and shares of the limit; other figures only where needed."""
    text = [
        "| | x faster than the reference | of the machine's limit | figure | budget | |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        if line.in_docs and line.ours is not None:
            ratio = "" if line.ratio is None else f"{line.ratio:.3g}"
            share = "" if line.share is None else f"{line.share:.0%}"
            told = any(budget.of == "figure" for budget in line.budgets) or not (ratio or share)
            figure = quantity(line.ours.median, line.unit) if told else ""
            text.append(f"| {line.name} | {ratio} | {share} | {figure} | {line.budget_text()} | {_verdict(line)} |")
    return "\n".join([*text, "", headline(facts) + "."])


def to_json(facts: dict[str, Any], lines: Sequence[Line]) -> str:
    def described(line: Line) -> dict[str, Any]:
        judged = [{**asdict(budget), "met": line.met(budget)} for budget in line.budgets]
        return {**asdict(line), "ratio": line.ratio, "share": line.share, "budgets": judged, "met": line.all_met}

    return json.dumps({"machine": facts, "lines": [described(line) for line in lines]}, indent=1) + "\n"


def _limits(facts: dict[str, Any]) -> str:
    return (
        f"one core reads {quantity(facts['read_bandwidth']['median'], 'B/s')} and copies "
        f"{quantity(facts['copy_bandwidth']['median'], 'B/s')}"
    )


def _cells(line: Line) -> list[str]:
    if line.ours is None:
        return [": ".join(filter(None, (line.name, line.note))), *[""] * 9]
    median = line.ours.median
    spread = 50 * (line.ours.upper - line.ours.lower) / median if median and line.ours.count > 1 else None
    return [
        line.name,
        quantity(median, line.unit),
        "" if spread is None else f"{spread:.0f}%",
        "" if line.reference is None else quantity(line.reference.median, line.unit),
        "" if line.ratio is None else f"{line.ratio:.3g}x",
        "" if line.published is None else quantity(line.published.median, line.unit),
        "" if line.limit is None else quantity(line.limit, line.unit),
        "" if line.share is None else f"{line.share:.0%}",
        line.budget_text(),
        "  ".join(filter(None, (_verdict(line), line.note))),
    ]


def _verdict(line: Line) -> str:
    return "" if line.all_met is None else "met" if line.all_met else "missed"
