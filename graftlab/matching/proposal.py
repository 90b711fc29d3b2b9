"""A proposal: pairs of taps with layouts and sureness, and the taps without a partner."""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from graftlab.base.html import bundle, cell, marked_up, number, rest_of, table
from graftlab.base.text import counted
from graftlab.base.world import Side
from graftlab.layouts import Layout, parse_layout
from graftlab.matching.generalising import general_pairs
from graftlab.matching.names import numbers_of, pattern_of
from graftlab.matching.pair import SURENESS, Pair
from graftlab.plan.pairs import PairRule, TapCallName

if TYPE_CHECKING:
    import pandas as pd

# The most lines of a table in a notebook.
_SHOWN_LINES = 20
_SHOWN_NOTICES = 4
COLUMNS = ("target_name", "baseline_name", "matched_by", "match_rel", "layout", "whole", "note")


@dataclass(frozen=True)
class Proposal:
    """The result of a match, in the execution order of the target's taps.

    ``unmatched_baseline`` and ``unmatched_target`` map taps without a partner to the reason. ``problems`` are sentences
    on contradictions, such as a tap whose layout differs from its neighbours'. ``notices`` are on findings that are
    unusual but may be right, such as rows in another order. ``moved`` is the number of bytes of values sent to or from
    the notebook. ``order`` has each side's taps in execution order, if known.
    """

    pairs: tuple[Pair, ...]
    unmatched_baseline: dict[str, str] = field(default_factory=dict)
    unmatched_target: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    moved: int = field(default=0, kw_only=True)
    order: Mapping[Side, Sequence[str]] = field(default_factory=dict, kw_only=True)
    unpaired_rows: str = field(default="", kw_only=True)
    """A sentence if both sides have rows, other than padding, without a partner; blank otherwise."""
    wrong_weights: tuple[str, ...] = field(default=(), kw_only=True)
    """The problems of weights: values of another weight, or a layout unlike their neighbours'."""
    odd_orders: tuple[str, ...] = field(default=(), kw_only=True)
    """Sentences on weights that give q and k, or v and o, of one attention different orders of features, and on square
    matrices that are not transposed as others are."""
    unfit: frozenset[str] = field(default=frozenset(), kw_only=True)
    """The baseline's taps whose layouts do not fit a later call, and that a match of that call did not find."""

    def __len__(self) -> int:
        return len(self.pairs)

    def of_target(self, name: str) -> list[Pair]:
        """The pairs of one target tap."""
        return [pair for pair in self.pairs if pair.target == name]

    def of_baseline(self, name: str) -> list[Pair]:
        """The pairs of one baseline tap."""
        return [pair for pair in self.pairs if pair.baseline == name]

    @property
    def graftable(self) -> tuple[Pair, ...]:
        """The pairs that the values confirm, so that grafts may rely on them."""
        return tuple(pair for pair in self.pairs if pair.by_value)

    def accept(self, *targets: str) -> Proposal:
        """The same proposal, with the pairs of these target taps confirmed."""
        return replace(self, pairs=tuple(_confirmed(p) if p.target in targets else p for p in self.pairs))

    def reject(self, *targets: str) -> Proposal:
        """The same proposal without the pairs of these target taps."""
        kept = tuple(pair for pair in self.pairs if pair.target not in targets)
        gone = {pair.target: "rejected" for pair in self.pairs if pair.target in targets}
        lost = {p.baseline: "rejected" for p in self.pairs if p.target in targets} | self.unmatched_baseline
        still = {pair.baseline for pair in kept}
        return replace(
            self,
            pairs=kept,
            unmatched_target={**self.unmatched_target, **gone},
            unmatched_baseline={name: why for name, why in lost.items() if name not in still},
        )

    def with_layouts_of(self, other: Proposal, taps: Collection[str]) -> Proposal:
        """The same pairs, with the layouts that a match of another call found for these taps of the baseline.

        A pair that it did not find has the layout of its namesakes in other layers, or keeps its own.
        """
        found = {(pair.baseline, pair.target): pair.layout for pair in other.pairs if pair.by_value}
        alike: dict[tuple[str, str, str], set[Layout]] = defaultdict(set)
        for pair in self.pairs:
            if (layout := found.get((pair.baseline, pair.target))) is not None:
                alike[_pattern_of(pair)].add(layout)

        def fitting(pair: Pair) -> Pair:
            if TapCallName.of(pair.baseline).name not in taps:
                return pair
            layouts = alike[_pattern_of(pair)]
            usual = next(iter(layouts)) if len(layouts) == 1 else pair.layout
            return replace(pair, layout=found.get((pair.baseline, pair.target), usual))

        pairs = tuple(map(fitting, self.pairs))
        fits = {new.baseline for old, new in zip(self.pairs, pairs, strict=True) if new.layout != old.layout}
        left = frozenset(taps) - {TapCallName.of(name).name for name in fits}
        return replace(self, pairs=pairs, unpaired_rows=other.unpaired_rows, unfit=self.unfit | left)

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each pair, then one for each tap without a partner, which has the reason as ``note``."""
        import pandas as pd

        rows: list[dict[str, object]] = [
            {
                "target_name": pair.target,
                "baseline_name": pair.baseline,
                "matched_by": pair.sureness,
                "match_rel": pair.rel,
                "layout": pair.layout.text,
                "whole": pair.whole,
                "note": pair.note,
            }
            for pair in self.pairs
        ]
        rows += [{"target_name": name, "note": why} for name, why in self.unmatched_target.items()]
        rows += [{"baseline_name": name, "note": why} for name, why in self.unmatched_baseline.items()]
        return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"match_rel": "float64"})

    def to_code(self) -> str:
        """``session.edit(pairs=[...])``, ready to paste. Pairs that repeat in several layers are one line."""
        lines = [f"    {rule!r}," for rule in self.rules()]
        return "\n".join(["session.edit(", "    pairs=[", *(f"    {line}" for line in lines), "    ],", ")"])

    def rules(self) -> list[dict[str, str]]:
        """The pairs as plain values: ``baseline``, ``target`` and, where it is not ``same``, ``layout`` and ``whole``.

        ``{n}`` in both names stands for every number there for which both sides have a tap, ``{n+1}`` for the next
        number. Guesses are left out.
        """
        written: list[dict[str, str]] = []
        # Pairs of all layers are one line, however sure each is.
        for group in folded(replace(pair, sureness="near") for pair in self._general()):
            baseline, target = written_as(group)
            rule = {"baseline": baseline, "target": target}
            if group[0].layout.steps:
                rule |= {"layout": group[0].layout.text, "whole": group[0].whole}
            written.append(rule)
        return written

    def plan_pairs(self) -> tuple[PairRule, ...]:
        """The pairs for a plan, one per tap and layer, without guesses, which must never be grafted."""
        return tuple(
            PairRule(pair.baseline, pair.target, pair.layout.text, pair.whole, pair.sureness, pair.rel)
            for pair in self._general()
        )

    def _general(self) -> list[Pair]:
        """The pairs for all calls of their taps, without guesses."""
        names: dict[Side, list[str]] = {
            "baseline": [*(pair.baseline for pair in self.pairs), *self.unmatched_baseline],
            "target": [*(pair.target for pair in self.pairs), *self.unmatched_target],
        }
        order = {side: list(dict.fromkeys([*self.order.get(side, ()), *known])) for side, known in names.items()}
        # If a tap was reached several times, its plain name means only the first call.
        several = {side: {name.rpartition("#")[0] for name in known if "#" in name} for side, known in order.items()}

        def call(side: Side, name: str) -> str:
            return f"{name}#0" if name in several[side] else name

        written = [
            replace(pair, baseline=call("baseline", pair.baseline), target=call("target", pair.target))
            for pair in self.pairs
            if pair.sureness != "guess"
        ]
        return general_pairs(written, {side: [call(side, name) for name in known] for side, known in order.items()})

    @property
    def summary(self) -> str:
        """A sentence on how many of the target's taps have a partner, how they were matched, and the problems."""
        targets = {pair.target for pair in self.pairs}
        total = len(targets) + len(self.unmatched_target)
        found = Counter(pair.sureness for pair in self.pairs)
        by = ", ".join(f"{found[each]} {each}" for each in SURENESS if found[each]) or "none"
        text = f"{len(targets)} of {total} target taps have a partner ({by})"
        if self.unmatched_baseline:
            left = len(self.unmatched_baseline)
            text += f"; {counted(left, 'baseline tap')} {'has' if left == 1 else 'have'} none"
        if self.problems:
            text += f"; {counted(len(self.problems), 'problem')}"
        return text

    def __repr__(self) -> str:
        return "\n  ".join([f"<graftlab.Proposal: {self.summary}>", *self.notices[:_SHOWN_NOTICES]])

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        lines = []
        groups = folded(self.pairs)
        for group in groups[:_SHOWN_LINES]:
            baseline, target = written_as(group)
            worst = max((pair.rel for pair in group if pair.rel is not None), default=None)
            count = f"x{len(group)}" if len(group) > 1 else ""
            note = _note_of([pair.note for pair in group if pair.note])
            layout = group[0].layout.text + (" (of the target)" if group[0].whole == "target" else "")
            names = map(cell, (target, baseline, count, group[0].sureness))
            cells = (
                *names,
                cell(number(worst), "number"),
                marked_up(f'<span style="white-space:nowrap">{html.escape(layout)}</span>'),
                cell(note),
            )
            lines.append(f"<tr>{''.join(cells)}</tr>")
        lines += rest_of(len(groups) - _SHOWN_LINES, "lines", "session.match_editor(proposal), proposal.frame")
        head = ("target", "baseline", "layers", "matched by", "rel_l2", "layout", "note")
        rich = f"<b>{html.escape(self.summary)}</b>{table(head, lines)}"
        if self.problems:
            rich += "".join(f"<p>{html.escape(problem)}</p>" for problem in self.problems[:_SHOWN_LINES])
        rich += "".join(f"<p>{html.escape(notice)}</p>" for notice in self.notices[:_SHOWN_LINES])
        for side, left in (("target", self.unmatched_target), ("baseline", self.unmatched_baseline)):
            if left:
                alone = _folded_alone(left)
                rows = [f"<tr>{cell(name)}{cell(why)}</tr>" for name, why in alone[:_SHOWN_LINES]]
                rows += rest_of(len(alone) - _SHOWN_LINES, "lines", "proposal.frame")
                rich += table((f"{side} without a partner", "why"), rows)
        return bundle(repr(self), rich)


def _folded_alone(left: Mapping[str, str]) -> list[tuple[str, str]]:
    """Taps without a partner and the reasons. Taps that differ only in numbers share a line."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, why in left.items():
        groups.setdefault((pattern_of(name), pattern_of(why)), []).append((name, why))
    return [
        each[0]
        if len(each) == 1
        else (f"{each[0][0]} … {each[-1][0]} ({len(each)} taps)", _note_of([w for _, w in each]))
        for each in groups.values()
    ]


def _note_of(notes: Sequence[str]) -> str:
    """The notes of a group of pairs. Of notes that differ only in numbers, the first and the number of others."""
    alike: dict[str, list[str]] = {}
    for note in dict.fromkeys(notes):
        alike.setdefault(re.sub(r"\d[\d.e+-]*", "#", note), []).append(note)
    return "; ".join(
        first if not more else f"{first} (and similarly, with different numbers, in {counted(len(more), 'more layer')})"
        for first, *more in alike.values()
    )


def pairs_of(rules: Sequence[dict[str, str]]) -> tuple[Pair, ...]:
    """The pairs of rules without ``{n}``, as in :meth:`Proposal.rules`."""
    return tuple(
        Pair(
            rule["baseline"],
            rule["target"],
            parse_layout(rule.get("layout", "")),
            "target" if rule.get("whole") == "target" else "baseline",
            "confirmed",
        )
        for rule in rules
    )


def _confirmed(pair: Pair) -> Pair:
    return pair if pair.by_value else replace(pair, sureness="confirmed", note="accepted by hand")


def _pattern_of(pair: Pair) -> tuple[str, str, str]:
    return pattern_of(pair.baseline), pattern_of(pair.target), pair.whole


def folded(pairs: Iterable[Pair]) -> list[list[Pair]]:
    """Pairs in groups: those of a group differ only in numbers, by the same step on both sides."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        mine, theirs = numbers_of(pair.baseline), numbers_of(pair.target)
        # Only the first number is folded; later ones are part of the name.
        step = (mine[0] - theirs[0], mine[1:], theirs[1:]) if mine and theirs else (mine, theirs)
        key = (pattern_of(pair.baseline), pattern_of(pair.target), pair.layout.text, pair.whole, pair.sureness, step)
        groups.setdefault(key, []).append(pair)
    return list(groups.values())


def written_as(group: Sequence[Pair]) -> tuple[str, str]:
    """Both names of a group of pairs, with ``{n}`` for the numbers that differ."""
    first = group[0]
    if len(group) == 1:
        return first.baseline, first.target
    shift = numbers_of(first.target)[0] - numbers_of(first.baseline)[0]
    return _with_number(first.baseline, "{n}"), _with_number(first.target, f"{{n{shift:+d}}}" if shift else "{n}")


def _with_number(name: str, index: str) -> str:
    first = str(numbers_of(name)[0])
    start = next(place for place in range(len(name)) if name.startswith(first, place))
    return name[:start] + index + name[start + len(first) :]
