"""Sessions, runs and plans as HTML: renderings of what their own attributes say, and nothing more."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graftlab.plan import GraftPlan
    from graftlab.run import Run
    from graftlab.session import Session

# Titles of columns whose cells are numbers.
_NUMBERS = frozenset({"step", "plan", "taps", "rel_l2", "max_abs", "non-finite"})
_MEANINGS = {
    "b2t": "grafted from the baseline into the target",
    "t2b": "grafted from the target into the baseline",
    "compare": "measured and left alone",
    "keep": "both tensors held for plots",
}


def session_html(session: Session) -> str:
    """What a notebook shows for a session."""
    title = f"session of {session.options.baseline} + {session.options.target} ranks"
    facts = f"{len(session.runs)} runs, {session.row_count:,} rows, plan {session.plan.version}, {session.folder}"
    return f"<b>{title}</b> {html.escape(facts)}{ranks_table(session)}"


def run_html(run: Run) -> str:
    """What a notebook shows for a run: how its taps ended, and the largest difference."""
    if not run.done:
        return f"<b>run {run.number}</b> going on; {html.escape(run.where())}"
    failed = ", ".join(run.failures)
    state = f"failed on {html.escape(failed)}" if failed else "done"
    frame = run.frame
    counts = frame["status"].value_counts()
    facts = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no taps"
    lines = [f"<b>run {run.number}</b> {state}; {facts}"]
    measured = frame[frame["rel_l2"].notna()]
    if len(measured):
        worst = measured.iloc[int(measured["rel_l2"].argmax())]
        place = html.escape(f"{worst['name']} on {worst['side']}[{worst['rank']}]")
        lines.append(f"largest rel_l2 {worst['rel_l2']:.2e} at {place}")
    return "<br>".join(lines)


def plan_html(plan: GraftPlan) -> str:
    """What a notebook shows for a plan: a line for each part."""
    lines = []
    for name, meaning in _MEANINGS.items():
        text = getattr(plan, name)
        shown = f"<code>{html.escape(text)}</code>" if text and text.strip() else "nothing"
        lines.append(f"<tr>{cell(name)}<td>{shown}</td>{cell(meaning, 'quiet')}</tr>")
    transform = "default" if plan.transform is None else plan.transform.label
    lines.append(f"<tr>{cell('transform')}{cell(transform)}{cell('')}</tr>")
    for side, pattern, replacement in plan.rename:
        lines.append(f"<tr>{cell('rename')}{cell(f'{pattern} -> {replacement}')}{cell(f'names of the {side}')}</tr>")
    return f"<b>plan {plan.version}</b>{table(('', '', ''), lines)}"


def bundle(plain: str, rich: str) -> dict[str, str]:
    """A MIME bundle for ``_repr_mimebundle_``."""
    return {"text/plain": plain, "text/html": rich}


def ranks_table(session: Session) -> str:
    """The strip of ranks: what :meth:`Session.status` says, in a line each."""
    lines = []
    for rank in session.ranks:
        look = rank.whereabouts()
        if session.closed:
            state, kind = "closed", "quiet"
        elif not rank.alive:
            state, kind = f"gone: {rank.how_it_ended()}", "bad"
        else:
            state, kind = look.state, ""
        if look.awaits and rank.alive:
            state += " for " + ", ".join(session.ranks[other].label for other in look.awaits)
        cells = [
            cell(rank.label),
            cell(rank.pid),
            cell(rank.seat.device),
            cell(state, kind),
            cell(look.step if look.step >= 0 else "-", "number"),
            cell(look.plan_version, "number"),
            cell(f"{look.taps:,}", "number"),
            cell(shortened(look.tap, 60)),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return table(("rank", "pid", "device", "state", "step", "plan", "taps", "last tap"), lines)


def table(head: tuple[str, ...], lines: list[str]) -> str:
    titles = "".join(f'<th class="{"number" if title in _NUMBERS else ""}">{title}</th>' for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def cell(value: object, kind: str = "") -> str:
    return f'<td class="{kind}">{html.escape(str(value))}</td>'


def number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2e}"


def shortened(text: str, limit: int) -> str:
    """Without its middle: the beginnings and the ends of module names tell them apart."""
    return text if len(text) <= limit else f"{text[: limit // 2 - 1]}…{text[-limit // 2 :]}"
