"""The text of a verdict: what was not checked, what is computed differently, and how that affects the output."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from graftlab.base.tap_groups import described, kind_of_group, numbers_in
from graftlab.base.text import counted, first_of, listed, numbered, spans
from graftlab.base.world import SIDES
from graftlab.diffs.rounding import roundoff
from graftlab.verdict.added import NOT_NAMED, records
from graftlab.verdict.causes import effects_in_words
from graftlab.verdict.findings import Findings, JobRemarks
from graftlab.verdict.lines import DifferingLine, first_places, lines_in_words
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.origins import (
    NOT_EXAMINED,
    ErrorOrigin,
    ErrorOrigins,
    origin_in_words,
    sentences_on,
    shared_origin,
)
from graftlab.verdict.wrong_calls import separate_sizes, which_calls

NOT_CHECKED = "Not checked: "
"""The beginning of a sentence on something that was not checked."""
ADD_TAPS = "Add gl.tap or gl.watch to both functions"


def text_of(findings: Findings) -> str:
    """The verdict's text: sentences that may overturn its conclusion, the conclusion, and all other caveats."""
    return "\n".join(line for part in parts_of(findings) for line in part)


def parts_of(findings: Findings) -> tuple[list[str], list[str], list[str]]:
    """The sentences before the conclusion, the conclusion, and those after it."""
    before = [*_raised(findings), *findings.inconclusive, *findings.not_grafted, *findings.unexplained]
    before += [*findings.without_output, *findings.extra_calls]
    # What is named goes beyond what quantising explains; the rest is only known within that.
    is_beyond = bool(_computed(findings))
    after = [*(findings.quantised if is_beyond else ()), *_hints(findings.hints), *findings.remarks]
    # If a group is named, a failed stage only leaves something out; if none is, that stage might have named one.
    (after if findings.named else before).extend(findings.failed)
    if findings.not_repeated:
        before.append(_not_repeatable("baseline", findings.not_repeated))
    if findings.target_not_repeated:
        before.append(_not_repeatable("target", findings.target_not_repeated))
    jobs = findings.job_remarks or JobRemarks(None, "")
    before += [*jobs.first, *findings.may_be_inherited, *(() if is_beyond else findings.quantised)]
    before += [*findings.contradicting_pairs, *_data(findings)]
    # A function's own code may have computed the inputs of its model.
    before += lines_in_words(findings.lines, list(dict.fromkeys(findings.inputs)))
    after += [*jobs.basis, *(f"{NOT_CHECKED}{line}" for line in findings.unseen), *jobs.last]
    return before, _conclusion(findings), after


def _raised(findings: Findings) -> list[str]:
    """A sentence on the exception of one side, and on the values before it."""
    if findings.raised is None:
        return []
    return [f"{findings.raised} {text_before_exception(findings)}"]


def text_before_exception(findings: Findings) -> str:
    """A sentence on the values before one side's exception."""
    if {*findings.named} - {*findings.rounding.groups} or findings.unexplained or findings.data:
        return "Before that, values already differ:"
    measured = findings.frame[findings.frame["ratio"].notna()]
    if not len(measured):
        return "No value before that was compared."
    last = measured["name"].iloc[int(measured["order"].argmax())]
    return f"The values before that agree to rounding, up to {last}, the last that was compared."


def _data(findings: Findings) -> list[str]:
    """The sentences on data, without weights that the sentences of their own modules state."""
    stated = {weight for group in _computed(findings) for weight in _weights_of(findings, group)}
    left = [words for weight, words in findings.weights.items() if weight not in stated]
    if not stated:
        return [*findings.data]
    weights = [f"{BEGINNINGS['param']}: {first_of(left, 6)}. The code that uses them is judged below."] if left else []
    others = [line for line in findings.data if not line.startswith(BEGINNINGS["param"])]
    return weights + others


def _weights_of(findings: Findings, group: str) -> list[str]:
    """The differing weights of the module whose output contains this group, or of the group's name."""
    if findings.weights_lent:
        return []
    names = (group, group.partition("[")[0])
    return [weight for weight in findings.weights if weight == group or weight.rpartition(".")[0] in names]


def _hints(hints: Mapping[str, str]) -> list[str]:
    """One line for each distinct hint, with the first group's tap."""
    same: dict[str, list[str]] = {}
    for group, hint in hints.items():
        # A hint begins with its tap and ends with its fit.
        same.setdefault(hint.partition(", ")[2].rpartition(" (explains")[0] or hint, []).append(group)
    return [f"Hint ({first_of(groups)}): {hints[groups[0]]}." for groups in same.values()]


def _not_repeatable(side: str, taps: Sequence[str]) -> str:
    shown = first_of(taps)
    return (
        f"The {side} does not repeat itself: run twice, it differs at {shown}. Do not rely on anything below. Turn "
        "dropout off (model.eval()), seed the random numbers inside the function, and start each call from the same "
        "state (caches, weights)."
    )


def reads_unwritten(values: Sequence[str]) -> list[str]:
    """A sentence on a target that depends on memory that it reads before it writes there."""
    if not values:
        return []
    return [
        "The target reads memory before anything is written to it: in a run whose new memory was filled with NaN, it "
        f"differs at {first_of(values)}. What agrees here may not agree elsewhere; look for torch.empty, empty_like "
        "and new_empty."
    ]


def _conclusion(findings: Findings) -> list[str]:
    frame, named = findings.frame, findings.named
    if findings.inconclusive or (findings.failed and not len(frame)):
        return []
    if not len(frame):
        if findings.only_returned:
            return _returned_alone(findings)
        return [f"Nothing was compared: no tap was measured on both sides. {findings.pairing_advice or ADD_TAPS}."]
    computed = _computed(findings)
    if not computed:
        lines = [*_rounding(findings), _nothing_named(findings)]
    else:
        lines = []
        sentences = _with_shared_origins(findings, _sentence_groups(frame, computed))
        for alike in _with_the_same_lines(sentences, findings.lines):
            lines += [_sentence_on(findings, groups) for groups in alike]
            groups = [group for groups in alike for group in groups]
            lines += lines_in_words(findings.lines, groups, are_several=len(alike) > 1)
        if findings.origins is not None:
            stated = [group for groups in sentences if _shared_origin(findings, groups) for group in groups]
            lines += sentences_on(findings.origins, stated)
        elif any(kind_of_group(group) is None for group in computed):
            lines.append(NOT_EXAMINED)
        if (shared := _may_share(findings, computed)) is not None:
            lines.append(shared)
    if computed:
        lines += _rounding(findings)
    if findings.following:
        lines.append(_following(findings.following))
    for output, causes in findings.causes.items():
        lines += effects_in_words(output, causes, findings.threshold)
    if named and (frame["label"] == "inherited").any():
        measured = " that was measured" if (findings.frame["label"] == "unmeasured").any() else ""
        lines.append(f"Everything else{measured} is inherited.")
    return lines


def _rounding(findings: Findings) -> list[str]:
    weights = [findings.weights[each] for group in findings.rounding.groups for each in _weights_of(findings, group)]
    return findings.rounding.sentences(findings.in_float32, weights, findings.looked_in)


_ENDINGS = {"culprit": "", "minor": ", without changing the output", "cancels": ", which others cancel"}


def _sentence_on(findings: Findings, groups: Sequence[str]) -> str:
    unsure = None
    if alike := _shared_origin(findings, groups):
        words = origin_in_words(alike)
        worst = _worst_of(findings, groups)
        details = "; ".join([words.right, _details(findings, worst)])
        what = f"{_clause(findings, words.subject, worst, is_before=True)}{words.between} ({details})"
        unsure = words.unsure
    elif len(groups) == 1:
        what = _one_group(findings, groups[0])
    else:
        what = _many_groups(findings, groups)
    weights = [findings.weights[weight] for group in groups for weight in _weights_of(findings, group)]
    ending = _ENDINGS[_label(findings.frame, groups[0])]
    ending += f", with weights that already differ: {first_of(weights)}" if weights else ""
    confirmed = any(line.confirmed and line.group in groups for line in findings.lines)
    alone = "" if confirmed else next(filter(None, map(findings.only_before.get, groups)), "")
    return " ".join(filter(None, [f"{what}{ending}.", unsure, alone]))


def _shared_origin(findings: Findings, groups: Sequence[str]) -> Sequence[ErrorOrigin]:
    return shared_origin(findings.origins, groups) if findings.origins is not None else []


def _with_shared_origins(findings: Findings, sentences: Sequence[list[str]]) -> list[list[str]]:
    """The groups of each sentence. Groups that are right, and have one wrong input at the same calls, share one."""
    found: list[list[str]] = []
    for groups in sentences:
        same = next((each for each in found if _have_one_sentence(findings, [*each, *groups])), None)
        if same is None:
            found.append(list(groups))
        else:
            same.extend(groups)
    return found


def _have_one_sentence(findings: Findings, groups: Sequence[str]) -> bool:
    ways = {(_label(findings.frame, group), _where(findings, group)) for group in groups}
    return len(ways) == 1 and bool(_shared_origin(findings, groups))


def _worst_of(findings: Findings, groups: Sequence[str]) -> str:
    """The group that adds the most."""
    return max(groups, key=lambda group: float(_over(findings, group)[1]["ratio"].max()))


def _with_the_same_lines(sentences: Sequence[list[str]], lines: Sequence[DifferingLine]) -> list[list[list[str]]]:
    """The groups of each sentence. Groups with the same first lines share one, as where a class has many users."""
    alike: dict[object, list[list[str]]] = {}
    for number, groups in enumerate(sentences):
        alike.setdefault(first_places(lines, groups) or number, []).append(groups)
    return list(alike.values())


def _computed(findings: Findings) -> list[str]:
    """The named groups that are not data and do not only round differently."""
    return [group for group in findings.named if group not in (*findings.inputs, *findings.rounding.groups)]


def _returned_alone(findings: Findings) -> list[str]:
    """A sentence if nothing but the returned values was compared, and they agree."""
    doubtful = findings.unexplained or findings.without_output
    return [] if doubtful else ["The returned values agree to rounding; nothing else was compared."]


def _nothing_named(findings: Findings) -> str:
    # Earlier sentences report the inputs.
    frame = findings.frame[~findings.frame["group"].isin(list(findings.inputs))]
    if not len(frame):
        return f"Apart from inputs, no tap was measured on both sides. {findings.pairing_advice or ADD_TAPS}."
    frame = frame[frame["ratio"].notna()]
    if not len(frame):
        nothing = "Apart from inputs, nothing" if findings.inputs else "Nothing"
        return f"{nothing} was compared: no tap has a number that is finite on both sides."
    top = frame["ratio"].max()
    coarse = [d for d in pd.unique(frame["dtype"]) if _is_coarse(d)]
    measured = (
        f"{counted(frame['group'].nunique(), 'group')} of taps, at most {top:.2g} x the {_floor(findings)}, threshold "
        f"{findings.threshold:g}"
    )
    if coarse:
        if findings.in_float32 is not None:
            measured += f"; in {findings.looked_in} {findings.in_float32:.2g} x"
        if findings.rounding.groups or findings.rounding.stands_out:
            return f"Nothing else is above {' and '.join(coarse)} rounding ({measured})."
        if findings.in_float32 is not None:
            wide = f"nor above float32's in {findings.looked_in}"
            return f"Nothing above {' and '.join(coarse)} rounding, {wide} ({measured})."
        rounded = {_own_dtypes(row) for row in records(frame) if _is_coarse(row["dtype"])}
        sides = [f"the {side}" for place, side in enumerate(SIDES) if any(_is_coarse(each[place]) for each in rounded)]
        which = sides[0] if len(sides) == 1 else "both sides"
        differs = bool(top or findings.after_taps)
        look = f"; run {which} in float32 for a closer look" if differs else ", and all are bit-equal"
        if differs and not top:
            measured += f"; the returned values differ by {findings.after_taps:.2g}, though all taps are bit-equal"
        return " ".join([*_casts(frame), f"Nothing above {' and '.join(coarse)} rounding ({measured}){look}."])
    if findings.job_remarks is not None and findings.job_remarks.constant is not None:
        most = f"{findings.threshold:g} x the {_floor(findings)} of {findings.job_remarks.constant:.1g}"
        return f"Nothing that was checked adds more than {most} ({measured})."
    if findings.computed_in and top:
        if findings.in_float32 is not None:
            measured += f"; in {findings.looked_in} {findings.in_float32:.2g} x"
        look = "" if findings.in_float32 is not None else "; compute in float32 on both sides for a closer look"
        rounding = f"{findings.computed_in} rounding, in which the baseline computes these values"
        return f"Nothing above {rounding} ({measured}){look}."
    repeats = not (findings.not_repeated or findings.target_not_repeated)
    doubtful = findings.unexplained or findings.without_output or findings.failed
    if doubtful or findings.unseen or findings.data or findings.contradicting_pairs or not repeats:
        return f"Nothing that was checked adds more than rounding ({measured})."
    return f"No tap adds more than rounding ({measured})."


def _casts(frame: pd.DataFrame) -> list[str]:
    """A sentence for each pair of dtypes that taps had on the two sides and that do not round alike."""
    groups: dict[tuple[str, str], dict[str, None]] = {}
    for row in records(frame):
        groups.setdefault(_own_dtypes(row), {})[row["group"]] = None
    sentences = []
    for (before, after), names in groups.items():
        if roundoff(before) == roundoff(after):
            continue
        coarser = after if roundoff(after) > roundoff(before) else before
        sentences.append(
            f"The target has {after} at {first_of(list(names))} where the baseline has {before}, so differences within "
            f"{coarser} rounding cannot be seen there."
        )
    return sentences


def _own_dtypes(row: Mapping[str, Any]) -> tuple[str, str]:
    """The dtypes that the baseline and the target had at this tap."""
    for each in str(row["cast"] or "").split(", "):
        before, _, after = each.partition(" -> ")
        # Leave out conversions that round nothing, such as those of devices.
        if after and roundoff(before) != roundoff(after):
            return before, after
    return row["dtype"], row["dtype"]


def _floor(findings: Findings) -> str:
    return f"{findings.job_remarks.floor}floor" if findings.job_remarks else "floor"


def _is_coarse(dtype: str) -> bool:
    found = getattr(torch, dtype, None)
    return isinstance(found, torch.dtype) and found.is_floating_point and found.itemsize < 4


def _label(frame: pd.DataFrame, group: str) -> str:
    labels = frame.loc[(frame["group"] == group) & ~frame["label"].isin(NOT_NAMED), "label"]
    return str(labels.iloc[0])


# Up to this many weights, states, updates or inputs have a sentence each; more of them share one.
_MOST_SENTENCES = 3


def _sentence_groups(frame: pd.DataFrame, groups: Sequence[str]) -> list[list[str]]:
    """The named groups by sentence, culprits first: many weights' gradients, states or updates share one.

    So do many tensors in one argument of the model, such as a cache.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        kind = kind_of_group(group)
        together = group.partition("[")[0] if kind == "input" else kind if kind in _OF_MANY else group
        alike.setdefault((together, _label(frame, group)), []).append(group)
    found: list[list[str]] = []
    for _, each in sorted(alike.items(), key=lambda item: item[0][1] != "culprit"):
        found += [each] if len(each) > _MOST_SENTENCES else [[group] for group in each]
    return found


def _over(findings: Findings, group: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The group's taps, and those that add more than rounding."""
    rows = findings.frame[findings.frame["group"] == group]
    return rows, rows[rows["ratio"] > findings.threshold]


def _size(findings: Findings, over: pd.DataFrame) -> tuple[pd.Series[Any], str]:
    """The tap that adds the most, and that amount in words."""
    worst = over.iloc[int(over["ratio"].to_numpy().argmax())]
    if math.isinf(worst["ratio"]) and not math.isinf(worst["added"]) and worst["floor"]:
        return worst, "not finite on one side"
    times = "above any floor" if math.isinf(worst["ratio"]) else f"{worst['ratio']:.2g} x the {_floor(findings)}"
    return worst, f"added {worst['added']:.2g}, {times}"


def _many_groups(findings: Findings, groups: Sequence[str]) -> str:
    """One clause on many weights, which also names the one that adds the most."""
    each = {group: _over(findings, group) for group in groups}
    every, over = (pd.concat([pair[which] for pair in each.values()]) for which in (0, 1))
    worst, size = _size(findings, over)
    kind = kind_of_group(groups[0])
    assert kind is not None
    shown = list(groups[:3])
    largest = worst["group"]
    if largest not in shown:
        shown[-1] = largest
    names = [group.removesuffix(f"@{kind}") + _layers(*each[group]) for group in shown]
    left = f" and {len(groups) - 3} more" if len(groups) > 3 else ""
    where = _when_of_many(every, over) + _ranks(over, findings.target_ranks)
    size = size.replace("added", "added up to", 1)
    what = f"{_OF_MANY[kind]} are computed differently{where}: {', '.join(names)}{left} ({size}, {worst['dtype']})"
    if kind != "param_grad" or (first := _first_backward(findings, over)) is None:
        return what
    return f"{first}; {what[0].lower()}{what[1:]}"


def _when_of_many(every: pd.DataFrame, over: pd.DataFrame) -> str:
    """The steps in which any of many groups is wrong; blank if it is all of them."""
    steps = [pd.DataFrame([{"step": n, "occurrence": 0, "tags": {}} for n in each["step"]]) for each in (every, over)]
    return which_calls(*steps)


def _first_backward(findings: Findings, over: pd.DataFrame) -> str | None:
    """The first wrong gradient of a weight in the order of the backward pass; None if another sentence names it."""
    of_weights = [kind_of_group(group) == "param_grad" for group in findings.frame["group"]]
    frame = findings.frame[of_weights].sort_values(["step", "order"], kind="stable")
    is_named = ((frame["ratio"] > findings.threshold) & ~frame["label"].isin(NOT_NAMED)).to_numpy(dtype=bool)
    at = int(is_named.argmax())
    first = frame.iloc[at]
    if first["group"] not in set(over["group"]):
        return None
    text = f"Going backward, the first weight whose gradient is computed differently is {first['name']}"
    before = frame.iloc[:at]
    before = before[(before["step"] == first["step"]) & (before["name"] != first["name"])]
    names = list(dict.fromkeys(before["name"]))
    differ = (before["ratio"] > findings.threshold) | (before["error_ratio"].astype(float) > findings.threshold)
    if not names or differ.any():
        return text
    return (
        f"{text} ({names[0]} before it agrees)"
        if len(names) == 1
        else f"{text} ({listed(names, most=4)} before it agree)"
    )


def _one_group(findings: Findings, group: str) -> str:
    what = described(group)
    # A tap's name keeps its case.
    what = what[0].upper() + what[1:] if kind_of_group(group) else what
    is_right = findings.origins is not None and findings.origins.are_right(group)
    may_be_its_input = findings.origins is not None and group in findings.origins.not_compared
    return f"{_clause(findings, what, group, is_right, may_be_its_input)} ({_details(findings, group)})"


def _clause(
    findings: Findings,
    subject: str,
    group: str,
    is_right: bool = False,
    may_be_its_input: bool = False,
    is_before: bool = False,
) -> str:
    """The clause that the subject is wrong, and where in the group, or ``is_before`` it."""
    where, verb, copula = _where(findings, group), "differs", "is"
    members = _layers(*_over(findings, group)) if is_before else ""
    if members.startswith((" in member ", " in members ")):
        # Unlike a layer, such a member does not contain what is before it, and the details name it.
        where = _without(members, where)
    if subject == "*":
        # The members of a model that is an nn.Sequential; a star alone is no name.
        members = _layers(*_over(findings, group))
        subject = f"The model's{members.removeprefix(' in')}"
        where = _without(members, where)
        if members.startswith(" in members"):
            verb, copula = "differ", "are"
    if may_be_its_input:
        subject += " or their inputs" if copula == "are" else " or its input"
    return f"{subject} {verb if is_right else f'{copula} computed differently'}{where}"


def _without(members: str, where: str) -> str:
    """Where a group is wrong, without the ``members`` that it begins with."""
    where = where.removeprefix(members)
    return f" in{where.removeprefix(' and')}" if where.startswith(" and") else where


def _where(findings: Findings, group: str) -> str:
    """The layers, the calls and the ranks at which a group is wrong; blank if that is everywhere."""
    rows, over = _over(findings, group)
    layers, calls = _layers(rows, over), which_calls(rows, over)
    when = f" and{calls.removeprefix(' in')}" if layers and calls.startswith(" in ") else calls
    return layers + when + _ranks(over, findings.target_ranks)


def _details(findings: Findings, group: str) -> str:
    """How much a group adds, and its worst tap."""
    rows, over = _over(findings, group)
    worst, size = _size(findings, over)
    details = [size, worst["dtype"]]
    if (inner := _inner(rows, over)) is not None:
        details.insert(0, inner)
    names = []
    if "*" in group:
        names.append(worst["name"])
    if worst["target_name"] != worst["name"]:
        names.append(f"the target's {worst['target_name']}")
    if names:
        details.append(f"{'most ' if over['name'].nunique() > 1 else ''}at {', '.join(names)}")
    if worst["aligned_by"] is not None and not pd.isna(worst["aligned_by"]):
        details.append(f"aligned by {worst['aligned_by']}")
    if sizes := separate_sizes(over, _layer_of):
        details.append(sizes)
    return ", ".join(details)


def _inner(rows: pd.DataFrame, over: pd.DataFrame) -> str | None:
    """The numbered modules of a layer that differ, unless all of them do: ``mlp.2 alone``."""
    modules = []
    parts = str(rows["group"].iloc[0]).split(".")
    stars = [place for place, part in enumerate(parts) if part == "*"]
    for number, place in enumerate(stars[1:], start=1):
        every, wrong = (sorted({numbers_in(name)[number] for name in each["name"]}) for each in (rows, over))
        if wrong != every:
            modules.append(f"{parts[place - 1]}.{spans(wrong)}")
    return f"{', '.join(modules)} alone" if modules else None


def _may_share(findings: Findings, groups: Sequence[str]) -> str | None:
    """A sentence if several named values may read one wrong tensor that no tap shows; otherwise None."""
    known = findings.origins or ErrorOrigins()
    values = [group for group in groups if kind_of_group(group) is None and not known.covers(group)]
    places = {}
    for group in values:
        _, over = _over(findings, group)
        tags = zip(over["step"], over["rank"], over["name"], over["tags"], strict=True)
        places[group] = {(step, rank, numbers_in(name)[:1] or _layer_tag(own)) for step, rank, name, own in tags}
    beside = [group for group in values if any(places[group] & places[other] for other in values if other != group)]
    if not beside:
        return None
    return (
        f"If {listed(beside, most=4)} read a tensor that no tap shows, such as a residual stream or positions, one "
        "mistake in it would explain them all. Tap that tensor to find out."
    )


def _following(groups: Sequence[str]) -> str:
    shown = first_of([described(group) for group in groups])
    return f"The backward pass therefore differs too: {shown}. Fix the forward pass before judging these."


_OF_MANY = {
    "input": "The inputs",
    "param_grad": "The gradients of weights",
    "optimizer": "The optimizer's states",
    "param": "The updates of weights",
}


def _layers(rows: pd.DataFrame, over: pd.DataFrame) -> str:
    every, wrong = (sorted({numbers_in(name)[:1] for name in each["name"]}) for each in (rows, over))
    one, many = _words_of_numbers(str(rows["group"].iloc[0]))
    if every == [()]:
        one, many = "layer ", "layers "
        every, wrong = (sorted({_layer_tag(tags) for tags in each["tags"]}) for each in (rows, over))
    if every == [()]:
        return ""
    numbers = [n[0] for n in wrong if n]
    shown = spans(numbers)
    layers = f" in {many if len(numbers) > 1 else one}{shown}"
    return layers + (f" of {spans([n[0] for n in every if n])}" if len(wrong) < len(every) else "")


_STACK = re.compile(r"(\w+_)?(layers?|(res)?blocks?|h|l)", re.IGNORECASE)
"""The names of lists whose elements are a model's layers."""
_OF_A_MODULE = ("weight", "bias")


def _words_of_numbers(group: str) -> tuple[str, str]:
    """The words before one number, and before several, for the numbers that a group's first star replaces.

    Only elements of a list with a usual name are layers. Elements numbered by a tap's last part are members, as of an
    ``nn.Sequential``. Others, such as experts or time steps, keep the name of their list.
    """
    kind = kind_of_group(group)
    parts = (group.removesuffix(f"@{kind}") if kind else group).split(".")
    star = parts.index("*") if "*" in parts else 0
    before, after = parts[star - 1] if star else "", parts[star + 1 :]
    if _STACK.fullmatch(before):
        return "layer ", "layers "
    of_weight = kind in _OF_MANY and len(after) > 0 and after[0] in _OF_A_MODULE
    if not before or not after or of_weight:
        return "member ", "members "
    return f"{before}.", f"{before}."


def _layer_of(row: pd.Series[Any]) -> int | None:
    numbers = numbers_in(row["name"])[:1] or _layer_tag(row["tags"])
    return numbers[0] if numbers else None


def _layer_tag(tags: Mapping[str, Any]) -> tuple[int, ...]:
    layer = tags.get("layer")
    return (int(layer),) if isinstance(layer, (int, np.integer)) else ()


def _ranks(over: pd.DataFrame, count: int) -> str:
    if count == 1:
        return ""
    wrong = set(over["rank"])
    return " on all ranks" if len(wrong) == count else f" on {numbered('rank', wrong)} alone"
