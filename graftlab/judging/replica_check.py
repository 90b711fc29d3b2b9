"""A check of one side: its ranks run, and their tensors are compared with each other."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from graftlab.base.html import bundle
from graftlab.base.progress import LongWait
from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import is_data
from graftlab.base.world import Side
from graftlab.control.work import arguments, refuse_invalid_expressions
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError, WaitInterrupted
from graftlab.filters.expressions import compile_filter
from graftlab.layouts.replicas import Replicas, TapSketch, replicas_of
from graftlab.layouts.text import parse_layout
from graftlab.ranks.remote_functions import Callee, sketch_callee
from graftlab.verdict.replicas import ReplicaComparison, TapAcrossRanks, check_replicas
from graftlab.verdict.replicas_wording import judged, text_of_check

if TYPE_CHECKING:
    import pandas as pd

    from graftlab.control.core import SessionCore


@dataclass(frozen=True)
class ReplicaCheck:
    """Where the ranks of one side should agree and do not. See :meth:`graftlab.Session.check`."""

    checked: ReplicaComparison
    inputs: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The conclusion, after a list of what was not examined."""
        return text_of_check(self.checked, self.inputs)

    @property
    def found(self) -> list[str]:
        """The groups of taps that should be equal on the ranks and are not, the most likely cause first."""
        return list(dict.fromkeys(each.group for each in judged(self.checked, self.inputs)))

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each call of a tap, in execution order.

        ``relation`` is ``agrees``, ``disagrees`` or ``own data``; ``apart`` is the largest relative distance of a copy
        from the first one, ``ranks`` are those that differ, and ``layout`` is why the tensors are taken for copies:
        declared or inferred.
        """
        import pandas as pd

        columns = ("name", "group", "kind", "dtype", "relation", "apart", "ranks", "layout", "tags")
        lines = [_line(each) for each in self.checked.taps]
        return pd.DataFrame(lines, columns=list(columns))

    def __repr__(self) -> str:
        found = ", ".join(self.found) or "nothing found"
        return f"<ReplicaCheck of {self.checked.world_size} ranks: {found}>\n{self.text}"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(repr(self), "".join(f"<p>{html.escape(line)}</p>" for line in self.text.split("\n")))


def _line(held: TapAcrossRanks) -> dict[str, Any]:
    return {
        "name": held.name,
        "group": held.group,
        "kind": held.kind or "value",
        "dtype": held.dtype,
        "relation": held.relation,
        "apart": held.apart,
        "ranks": list(held.ranks),
        "layout": held.layout,
        "tags": own_tags(held.tags),
    }


def check(
    session: SessionCore,
    baseline: Callee | None,
    target: Callee | None,
    *,
    layouts: Mapping[str, str] | None,
    mesh: Mapping[str, int] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
) -> ReplicaCheck:
    """See :meth:`graftlab.session.Session.check`."""
    if (baseline is None) == (target is None):
        raise SessionError("check: give one side's function, baseline= or target=, which is run alone")
    refuse_invalid_expressions(baseline, target)
    side: Side = "target" if baseline is None else "baseline"
    given = arguments("check", args, kwargs)
    size = getattr(session.options, side)
    if size < 2:
        raise SessionError(f"check: the {side} has one rank, and a check compares several; launch {side}=2 or more")
    if mesh is not None and math.prod(mesh.values()) != size:
        raise SessionError(
            f"check: a mesh of {dict(mesh)} has {math.prod(mesh.values())} ranks, and the side has {size}; give "
            "mesh={name: size} whose sizes multiply to that"
        )
    declared = _DeclaredLayouts(layouts or {}, mesh, size)
    callee = baseline if target is None else target
    assert callee is not None
    results = _sketched(session, side, partial(sketch_callee, callee, *given))
    checked = check_replicas([shown for shown, _ in results], declared, _groups_along(mesh, size))
    skipped = list(dict.fromkeys(name for _, names in results for name in names))
    inputs = tuple(_inputs(results[0][0]))
    return ReplicaCheck(replace(checked, skipped=skipped), inputs)


def _sketched(session: SessionCore, side: Side, call: Callee) -> list[tuple[list[TapSketch], list[str]]]:
    """Run this on one side. The stop button also stops its code, since nothing but the check waits for it."""
    run = session.start(baseline=call) if side == "baseline" else session.start(target=call)
    steps = LongWait(f"check of the {side}'s ranks", "steps", lambda: run.steps)
    try:
        run.wait(bar=steps)
    except KeyboardInterrupt:
        session.interrupt()
        raise WaitInterrupted(
            f"the check was stopped, and its code on the {side}'s ranks was interrupted; the plan is unchanged"
        ) from None
    sketches: list[tuple[list[TapSketch], list[str]]] = getattr(run, side)
    return sketches


def _groups_along(mesh: Mapping[str, int] | None, size: int) -> dict[str, list[tuple[int, ...]]]:
    """For each mesh dimension with several ranks, the groups of ranks that differ only in that coordinate."""
    along: dict[str, list[tuple[int, ...]]] = {}
    if mesh is None or sum(extent > 1 for extent in mesh.values()) < 2:
        return along
    grid = np.arange(size).reshape(tuple(mesh.values()))
    for axis, (name, extent) in enumerate(mesh.items()):
        if extent > 1:
            groups = np.moveaxis(grid, axis, -1).reshape(-1, extent)
            along[name] = [tuple(group) for group in groups.tolist()]
    return along


class _DeclaredLayouts:
    """The layouts that the user declares, by filters over taps' names."""

    def __init__(self, layouts: Mapping[str, str], mesh: Mapping[str, int] | None, size: int) -> None:
        self._layouts = [(compile_filter(text), parse_layout(layout, mesh or size)) for text, layout in layouts.items()]

    def __call__(self, name: str) -> Replicas | None:
        found = next((layout for filter_, layout in self._layouts if filter_.matches({"name": name})), None)
        return None if found is None else replicas_of(found)


def _inputs(shown: Sequence[TapSketch]) -> list[str]:
    """The names of input taps: those of kind ``input``, and integers before all computation."""
    found: dict[str, None] = {}
    leads = True
    for each in shown:
        if is_data(each.tags):
            continue
        leads = leads and roundoff(each.dtype) == 0
        if leads or each.tags.get("kind") == "input":
            found[each.name] = None
    return list(found)
