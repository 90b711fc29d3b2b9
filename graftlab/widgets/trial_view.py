"""The HTML of the transform editor: trials, the transform in force and whether it fails, and diffs."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from graftlab.base.html import cell, table
from graftlab.base.tags import RESERVED_TAGS
from graftlab.base.text import shortened
from graftlab.diffs.measure import DiffStats
from graftlab.grafting.trial import Trial
from graftlab.plan.plan import GraftPlan
from graftlab.rows.rendering import written
from graftlab.rows.schema import DIFFERENCES, Row
from graftlab.transforms import TransformSpec
from graftlab.transforms.spec import each_of
from graftlab.widgets.drafts import Version, label_of

STYLE = """
.graftlab-trial .verdict { white-space: pre-wrap; overflow-wrap: anywhere }
.graftlab-trial table { border-collapse: collapse; margin: 2px 0 6px; font-size: 12px; line-height: 1.5 }
.graftlab-trial th { text-align: left; font-weight: 600; border-bottom: 1px solid var(--gl-rule) }
.graftlab-trial th, .graftlab-trial td { padding: 1px 14px 1px 0; white-space: nowrap }
.graftlab-trial th:nth-child(2), .graftlab-trial th:nth-child(3) { text-align: right }
.graftlab-trial td.number { font-family: var(--gl-code); text-align: right }
.graftlab-trial td.code { font-family: var(--gl-code) }
.graftlab-trial pre, .graftlab-diff pre {
  margin: 2px 0; padding: 4px 8px; max-height: 260px; overflow: auto; font-size: 12px; line-height: 1.4;
  border: 1px solid var(--gl-rule); background: none; color: inherit; white-space: pre-wrap; overflow-wrap: anywhere;
}
.graftlab-diff .added { background: color-mix(in srgb, var(--gl-good) 16%, transparent) }
.graftlab-diff .gone { background: color-mix(in srgb, var(--gl-bad) 16%, transparent) }
.graftlab-diff .place { color: var(--gl-faint) }
.graftlab-diff span { display: block }
"""

# The line of the exception in a traceback, which unlike the others is not indented.
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Warning|Exit|Interrupt)\b")
_ERROR_SHOWN = 300


def summary(error: str) -> str:
    """The end of a traceback in a few lines, or the first line of any other error text."""
    lines = error.splitlines()
    if "Traceback (most recent call last):" not in lines or lines[0].startswith("the draft called"):
        return lines[0] if lines else ""
    starts = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
    # Custom exceptions may have any name; theirs is the last unindented line.
    starts = starts or [number for number, line in enumerate(lines) if line[:1].strip()]
    return "\n".join(lines[starts[-1] :][:4])


def trial_html(trial: Trial) -> str:
    """The result of a trial: where it ran, its inputs and output, the difference before and after, its prints."""
    parts = [_outcome(trial)]
    if trial.note is not None:
        parts.append(f'<div class="note">{html.escape(trial.note)}</div>')
    if trial.target is not None:
        parts.append(_tensors(trial))
    if trial.after is not None:
        parts.append(_differences(trial))
    if trial.error is not None and "\n" in trial.error:
        parts.append(f'<div class="quiet">traceback</div><pre>{html.escape(trial.error)}</pre>')
    if trial.printed:
        parts.append(f'<div class="quiet">printed</div><pre class="printed">{html.escape(trial.printed)}</pre>')
    return f'<div class="graftlab-trial">{"".join(parts)}</div>'


def _outcome(trial: Trial) -> str:
    where = f" on <b>{html.escape(_place(trial))}</b>" if trial.tags else ""
    if trial.error is not None:
        what = html.escape(summary(trial.error))
        return f'<div class="bad verdict" role="alert">✗ failed{where}: {what}</div>'
    if trial.seconds is None:
        return '<div class="good verdict">✓ loads; not run on any tensors</div>'
    return f'<div class="good verdict">✓ ran{where} in {duration(trial.seconds)}</div>'


def _place(trial: Trial) -> str:
    tags = trial.tags
    own = [f"{name}={value}" for name, value in tags.items() if name not in RESERVED_TAGS]
    return " · ".join([str(tags["name"]), *own, f"{tags['side']}[{tags['rank']}]", f"step {tags['step']}"])


def duration(seconds: float) -> str:
    """Format seconds with a unit that leaves one to four digits before the point."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _tensors(trial: Trial) -> str:
    returned = "-" if trial.result is None else trial.result + (f"  ({trial.cast})" if trial.cast else "")
    received = ", ".join(trial.received)
    lines = [
        f"<tr>{cell(what)}{cell(text, 'code')}</tr>"
        for what, text in (("received", received), ("target", str(trial.target)), ("returned", returned))
    ]
    return f"<table><tbody>{''.join(lines)}</tbody></table>"


def _differences(trial: Trial) -> str:
    lines = []
    for name in DIFFERENCES:
        before, after = _value(trial.before, name), _value(trial.after, name)
        if name == "nonfinite_differ" and not before and not after:
            continue
        numbers = "".join(cell(written(name, value), "number") for value in (before, after))
        lines.append(f"<tr>{cell(name)}{numbers}{cell(_change(before, after), 'quiet')}</tr>")
    return table(("difference", "before" + ("" if trial.before else " (failed)"), "with the draft", ""), lines)


def _value(stats: DiffStats | None, name: str) -> float | None:
    return None if stats is None else getattr(stats, name)


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    if before == after:
        return "= same"
    return "↓ smaller" if after < before else "↑ larger" if after > before else ""


def in_force_html(version: Version, applied: bool, plan: GraftPlan) -> str:
    """The transform in force, where it applies, and whether the editor has an unpublished draft."""
    where = ", ".join(where_text(spec, plan) for spec in each_of(version.spec))
    what = f"In force: <b>{html.escape(label_of(version.spec))}</b>, since plan {version.plan}"
    what += f" · {html.escape(where)}" if where else ""
    return what if applied else f'{what} · <span class="unapplied">● edited, not applied</span>'


def where_text(spec: TransformSpec, plan: GraftPlan) -> str:
    """The taps that a transform applies to, in words."""
    if spec.where is not None:
        return f"where {spec.where}"
    return "where the plan grafts" + (" (nowhere)" if plan.grafts_nothing else "")


def failure_warning(plan: GraftPlan, rows: Sequence[Row]) -> str:
    """A warning if the transform in force fails, by the newest row of each tap and rank; empty otherwise."""
    of_plan = [row for row in rows if row.plan_version == plan.version]
    failed = [row for row in of_plan if row.status == "failed"]
    if not failed:
        return ""
    row = failed[-1]
    why = html.escape(shortened(str(row.error).partition("\n\n")[0], _ERROR_SHOWN))
    place = html.escape(f"{row.name} on {row.side}[{row.rank}], step {row.step}")
    return (
        f'<div class="failing"><span class="bad" role="status">✗ fails in {len(failed)} of the newest {len(of_plan)} '
        f'rows: {why}</span> <span class="quiet">({place}; the run continues with the unchanged tensor)</span></div>'
    )


def progress_html(what: str, waiting: int) -> str:
    more = f" ({waiting} waiting)" if waiting else ""
    return f'<span role="status"><span class="spinner"></span>{html.escape(what)}{more}</span>'


def difference_html(lines: Sequence[str]) -> str:
    """A unified diff."""
    if not lines:
        return '<div class="graftlab-diff"><span class="quiet">no differences</span></div>'
    kinds = {"+": "added", "-": "gone", "@": "place"}
    shown = [
        f'<span class="{"place" if line[:3] in ("+++", "---") else kinds.get(line[:1], "")}">{html.escape(line)}</span>'
        for line in lines
    ]
    return f'<div class="graftlab-diff"><pre>{"".join(shown)}</pre></div>'
