"""What both editors say about plans, as HTML: what is in one, and from which step on the ranks use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.widgets.filter_view import code, quiet

_RANKS_SHOWN = 16


def adoption(version: int, adopted: Mapping[str, int], alive: Sequence[str], closed: bool) -> str:
    """From which step on each rank that is alive uses the plan."""
    if closed or not alive:
        return quiet(f"Plan {version} was the last one." if closed else f"Plan {version}; no rank is alive.")
    steps: dict[int, list[str]] = {}
    for rank in alive:
        if rank in adopted:
            steps.setdefault(adopted[rank], []).append(rank)
    waiting = [rank for rank in alive if rank not in adopted]
    if not waiting and len(steps) == 1 and len(alive) > 1:
        parts = [f"used from step {next(iter(steps))} on by all {len(alive)} ranks"]
    else:
        parts = [f"used from step {step} on by {_ranks(ranks)}" for step, ranks in sorted(steps.items())]
        if waiting:
            parts.append(f"not yet used by {_ranks(waiting)}")
    state = "waiting" if waiting else "everywhere"
    return f'<div class="{state}" role="status"><b>Plan {version}</b>: {"; ".join(parts)}.</div>'


def _ranks(ranks: Sequence[str]) -> str:
    others = len(ranks) - _RANKS_SHOWN
    return ", ".join(ranks[:_RANKS_SHOWN]) + (f" and {others} others" if others > 0 else "")


def described(plan: GraftPlan) -> str:
    """An earlier plan in a line."""
    texts = {name: getattr(plan, name) or "" for name in FILTERS}
    filters = [f"{name} {code(text)}" for name, text in texts.items() if text.strip()]
    transforms = [f"transform {code(spec.described)}" for spec in plan.transforms]
    parts = [*(filters or ["no filters"]), *(transforms or [f"transform {code('default')}"])]
    if plan.rename:
        parts.append(f"{len(plan.rename)} renames" if len(plan.rename) > 1 else "1 rename")
    if plan.pairs:
        parts.append(f"{len(plan.pairs)} pairs" if len(plan.pairs) > 1 else "1 pair")
    return f'<span class="plan"><b>{plan.version}</b> {" · ".join(parts)}</span>'
