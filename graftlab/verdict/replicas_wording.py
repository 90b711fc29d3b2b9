"""The text of a check of one side's ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from graftlab.base.tap_groups import described, is_data, numbers_in
from graftlab.base.text import counted, first_of, spans
from graftlab.verdict.replicas import FROM_GROUP, ReplicaComparison, TapAcrossRanks, unreduced

# Later groups mostly inherit the difference.
_MOST_TOLD = 3


def text_of_check(checked: ReplicaComparison, inputs: Sequence[str]) -> str:
    """The conclusion, after the sentences on what was not checked. ``inputs`` are the taps of the model's inputs."""
    lines = []
    if checked.skipped:
        lines.append(f"Not checked: {', '.join(checked.skipped[:4])} show no tensor to compare.")
    if checked.missing:
        lines.append(f"Not checked, because some ranks do not reach them: {first_of(checked.missing, 4)}.")
    if not checked.taps:
        return "\n".join([*lines, "Nothing was compared: no tap was reached on every rank. Add gl.tap or gl.watch."])
    lost = dict.fromkeys(
        each.name for each in checked.taps if all(shown.has_no_number for shown in each.shown.values())
    )
    if lost:
        have = "has" if len(lost) == 1 else "have"
        lines.append(f"Not checked: {first_of([*lost], 4)} {have} no finite number on any rank.")
    differing = [each for each in checked.taps if each.name in inputs and each.relation != "agrees"]
    if differing:
        names = ", ".join(dict.fromkeys(each.name for each in differing))
        lines.append(
            f"The ranks' inputs differ: {names}. Under data parallelism they must; values computed from them then "
            "differ too, and are not judged here. Under tensor parallelism this is the fault."
        )
    found = judged(checked, inputs)
    lines += _sentences(checked, found)
    own = sorted({each.group for each in checked.taps if each.relation == "own data"})
    agree = len({each.group for each in checked.taps if each.relation == "agrees" and each.name not in lost})
    if not found:
        lines.append(
            f"The {checked.world_size} ranks agree where they hold copies ({counted(agree, 'group')} of taps)."
            if agree or len(lost) < len({each.name for each in checked.taps})
            else "Nothing was compared: no tap has a finite number."
        )
    if own:
        groups = "1 group of taps is" if len(own) == 1 else f"{len(own)} groups of taps are"
        lines.append(
            f"{groups} each rank's own, as shards are: {first_of(own, 4)}. Only a baseline can tell whether "
            "they are the right shards."
        )
    return "\n".join(lines)


def judged(checked: ReplicaComparison, inputs: Sequence[str]) -> list[TapAcrossRanks]:
    """The copies that differ, without values if the ranks have different inputs."""
    differ = any(each.name in inputs and each.relation != "agrees" for each in checked.taps)
    found = [each for each in checked.disagreeing if each.name not in inputs]
    if differ:
        found = [each for each in found if each.kind not in (None, "grad") or not each.layout.startswith("inferred")]
    return found


def _sentences(checked: ReplicaComparison, found: Sequence[TapAcrossRanks]) -> list[str]:
    """A paragraph for each kind of value: its first group, with the layer where it begins, and all others."""
    kinds: dict[tuple[bool, str | None], dict[str, list[TapAcrossRanks]]] = {}
    for each in found:
        what = described(each.group)
        if is_data(each.tags):
            what = f"{each.group.rpartition('@')[0]}, as it was given ({each.kind}),"
        kinds.setdefault((is_data(each.tags), each.kind), {}).setdefault(what, []).append(each)
    lines = []
    for (is_given, kind), groups in kinds.items():
        (what, rows), *others = groups.items()
        ranks = sorted({rank for each in rows for rank in each.ranks})
        what = what[0].upper() + what[1:] if kind else what
        differ = f"rank {ranks[0]} differs" if len(ranks) == 1 else f"ranks {spans(ranks)} differ"
        size, layout = _size(rows)
        lines.append(
            f"{what} should be equal on the ranks but is not{_layers(rows, first=True)}: {differ} from the first copy "
            f"({size}; {layout}).{_reason(checked, rows[0])}"
        )
        if others:
            later = first_of([f"{what}{_layers(rows)} ({_size(rows)[0]})" for what, rows in others], _MOST_TOLD)
            inherited = "" if is_given or kind not in (None, "grad") else ", and may have inherited it"
            lines[-1] += f" Later ones differ too{inherited}: {later}."
    if any(each.layout.startswith("inferred") for each in found):
        lines.append(
            "Layouts were inferred from the values, so a difference may be intended. State with layouts= what each "
            "rank holds."
        )
    return lines


def _size(rows: Sequence[TapAcrossRanks]) -> tuple[str, str]:
    """The largest difference in words, and its layout."""
    worst = max(rows, key=lambda each: each.apart)
    far = "shapes differ, or some ranks are not finite" if math.isinf(worst.apart) else f"rel_l2 {worst.apart:.2g}"
    return far, worst.layout


def _layers(rows: Sequence[TapAcrossRanks], *, first: bool = False) -> str:
    layers = [n[0] for each in rows if (n := numbers_in(each.name))]
    if not layers:
        return ""
    distinct = sorted(set(layers))
    if len(distinct) == 1:
        return f" in layer {layers[0]}"
    begins = f", layer {layers[0]} first" if first else ""
    return f" in layers {spans(distinct)}{begins}"


def _reason(checked: ReplicaComparison, first: TapAcrossRanks) -> str:
    partial = unreduced(checked.taps[: list(checked.taps).index(first)], first)
    if partial is not None:
        return (
            f" All of that difference is in {partial.name}, whose values differ on each rank: a partial sum that was "
            "not reduced."
        )
    if first.layout.startswith(FROM_GROUP):
        return " It looks like a partial sum that was not reduced here."
    if first.kind == "param_grad":
        return " Gradients of replicated weights must be reduced over the ranks before the optimizer's step."
    return ""
