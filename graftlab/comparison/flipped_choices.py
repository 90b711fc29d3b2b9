"""What rounding moves in one call, such as a router's choice or a state, and a later call inherits through a cache."""

from __future__ import annotations

from collections.abc import Mapping

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import first_of
from graftlab.control.verdicts import Verdict
from graftlab.verdict.added import NOT_NAMED, records
from graftlab.verdict.pair_contradictions import is_on_pairs
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.wording import NOT_CHECKED

_NARROW = ("bfloat16", "float16")
# A query may read mainly the few tokens that were moved, so it differs by more than their whole sequence. A state sums
# what rounding moves in each token.
_MOST = 10.0


def moved_by_flips(compared: Verdict) -> dict[str, float]:
    """How far each tap of 16 bits is off (rel_l2) in a call in which nothing is named, if by far more than rounding.

    From equal inputs these taps agree, so rounding has flipped a choice before them.
    """
    found = compared.findings
    is_unexplained = found.unexplained and not (found.only_without_grafts and found.in_float32 is not None)
    if {*found.named} - {*found.rounding.groups} or found.data or is_unexplained:
        return {}
    moved: dict[str, float] = {}
    for row in records(found.frame):
        if row["dtype"] not in _NARROW or kind_of(row["tags"]) is not None:
            continue
        off, added = row["error_ratio"], row["ratio"]
        if off is not None and added is not None and off > found.threshold >= added:
            moved[row["name"]] = max(moved.get(row["name"], 0.0), row["error"])
    return moved


def doubts_after_flips(compared: Verdict, flipped: Mapping[str, float]) -> list[str]:
    """Sentences on why a call that differs may be right; none if it cannot be.

    ``flipped`` has how far taps were off in earlier calls, see :func:`moved_by_flips`. If those calls wrote a cache
    that was not compared, it is off likewise, and so is what reads it: in the modules whose own taps were off.
    """
    found = compared.findings
    if not flipped or found.data or found.unexplained or found.following or found.origins is None:
        return []
    named = [row for row in records(found.frame) if row["label"] not in (*NOT_NAMED, ROUNDS_DIFFERENTLY)]
    groups = list(dict.fromkeys(row["group"] for row in named))
    if not named or not {*groups} <= {*found.origins.not_compared}:
        return []
    by_module: dict[str, float] = {}
    for name, off in flipped.items():
        by_module[_module_of(name)] = max(by_module.get(_module_of(name), 0.0), off)
    moved = {row["name"]: by_module.get(_module_of(row["name"]), 0.0) for row in named}
    if any(row["dtype"] not in _NARROW or row["added"] > _MOST * moved[row["name"]] for row in named):
        return []
    worst = max(named, key=lambda row: row["added"])
    name, module = worst["name"], _module_of(worst["name"])
    return [
        f"In an earlier call rounding to {worst['dtype']} alone had moved taps in {module} by up to "
        f"{moved[name]:.2g}, as where it changes a router's choice. What that call wrote, such as a cache, was not "
        f"compared, so {name}, which adds {worst['added']:.2g} here, may be right, and whatever is named below. "
        "Compare both sides in float32 to find out.",
        f"{NOT_CHECKED}what earlier calls wrote for {first_of(groups)}, such as a cache.",
    ]


def moved_by_rounding(compared: Verdict) -> dict[str, float]:
    """How far the taps of a module are off (rel_l2), by its path, in a call of 32 bits or more in which all agree."""
    found = compared.findings
    if found.named or found.unexplained or not all(map(is_on_pairs, found.data)):
        return {}
    moved: dict[str, float] = {}
    for row in records(found.frame):
        if row["dtype"] not in _NARROW and kind_of(row["tags"]) is None and row["error"] is not None:
            module = _module_of(row["name"])
            moved[module] = max(moved.get(module, 0.0), row["error"])
    return moved


def doubts_after_rounding(compared: Verdict, moved: Mapping[str, float]) -> list[str]:
    """Sentences on why a call that differs may be right; none if it cannot be.

    ``moved`` has how far modules were off in earlier calls, see :func:`moved_by_rounding`. The state that those calls
    wrote, such as a recurrent one, is off likewise, and so is what reads it. That may be a verdict's only finding if
    the state was not compared. A difference that changes the output is none of these.
    """
    found = compared.findings
    if found.unexplained or found.following or found.origins is None or not all(map(is_on_pairs, found.data)):
        return []
    named = [row for row in records(found.frame) if row["label"] not in NOT_NAMED]
    groups = list(dict.fromkeys(row["group"] for row in named))
    if not named or not {*groups} <= {*found.origins.not_compared}:
        return []
    if not found.causes or not all(each.agrees and not each.cancelling for each in found.causes.values()):
        return []
    if any(row["dtype"] in _NARROW or row["added"] > _MOST * moved.get(_module_of(row["name"]), 0.0) for row in named):
        return []
    worst = max(named, key=lambda row: row["added"])
    return [
        f"{worst['name']} adds {worst['added']:.2g} here, and the output still agrees. In earlier calls rounding alone "
        f"had moved taps in its module by up to {moved[_module_of(worst['name'])]:.2g}. What these calls wrote, such "
        "as a state or a cache, was not compared, so whatever is named below may be right. Compare both sides in "
        "float64 to find out.",
        f"{NOT_CHECKED}what earlier calls wrote for {first_of(groups)}, such as a state or a cache.",
    ]


def _module_of(name: str) -> str:
    """The path of the module that a tap is in."""
    return name.rpartition(".")[0]
