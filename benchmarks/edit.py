"""The time from an edit of the plan until it is in force on every rank, with idle ranks."""

from __future__ import annotations

import time

import graftlab as gl
from benchmarks import worlds
from benchmarks.lines import Budget, Line, Setup, Spread

# A pause that is short beside the figure, and lets the thread run that reads from the ranks.
_LOOK = 1e-4


def measure(setup: Setup) -> list[Line]:
    lines = []
    for ranks in (1, 2):
        with worlds.session(setup, ranks, ranks) as session:
            taken = [_edit(session, layer) for layer in range(setup.repeats(50) + 3)][3:]
        lines.append(
            Line(
                "edit",
                f"plan edit to effect, {2 * ranks} idle ranks",
                "s",
                Spread.of(taken),
                budgets=(Budget("figure", "at most", 0.05),),
                in_docs=ranks == 2,
            )
        )
    return lines


def _edit(session: gl.Session, layer: int) -> float:
    began = time.perf_counter()
    plan = session.edit(b2t=f"search('attn', name) and layer < {layer}")
    while len(session.adopted(plan.version)) < len(session.ranks):
        time.sleep(_LOOK)
    return time.perf_counter() - began
