"""Names that differ between the sides: the rename that would pair them, or other advice."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Collection

import pandas as pd

from graftlab.rows.schema import MEASURED

# At most this many names are compared. A valid rule shows in fewer.
_TRIED = 60
# The least share of names that must pair, on the side with fewer names.
_ENOUGH = 0.8


def suggested_rename(frame: pd.DataFrame) -> str | None:
    """The rename to try after a run in which nothing paired, if one rule would pair most names; else None.

    Taps that were not sent are ``missing`` on the receiver; taps that were not requested are ``unmatched`` on the
    sender.
    """
    statuses = frame["status"].value_counts()
    missing, unmatched = int(statuses.get("missing", 0)), int(statuses.get("unmatched", 0))
    if any(status in statuses for status in MEASURED) or not missing or not unmatched:
        return None
    names = {
        side: dict.fromkeys(frame.loc[frame["side"] == side, "name"].astype(str)) for side in ("baseline", "target")
    }
    found = _rule(names["target"], names["baseline"]), _rule(names["baseline"], names["target"])
    for side, rule in zip(("target", "baseline"), found, strict=True):
        if rule is not None:
            pattern, new, pairs, words = rule
            return (
                f"{missing} missing, {unmatched} unmatched: {side} names {words}. "
                f"%graft rename {side} {shlex.quote(pattern)} {shlex.quote(new)} pairs {pairs} names, as does "
                f"session.edit(rename={{{side!r}: {{{pattern!r}: {new!r}}}}})"
            )
    return None


def pairing_advice(frame: pd.DataFrame, of_jobs: bool) -> str | None:
    """Advice if taps of both sides could not be compared, or if no names are equal; otherwise None.

    ``of_jobs`` means that the sides are jobs, which a match records in the steps that they make anyway.
    """
    failed = "The taps that both sides have could not be compared, for the reason below"
    has_failed = bool((frame["status"] == "failed").any())
    ours, theirs = (
        set(frame.loc[(frame["status"] == status) & (frame["side"] == side), "name"])
        for side, status in (("baseline", "unmatched"), ("target", "missing"))
    )
    if not ours or not theirs or ours & theirs:
        return failed if has_failed else None
    what = f"{failed}, and the others have no name in common"
    if not has_failed:
        what = "Both sides have taps, and none of their names are equal"
    rename = suggested_rename(frame)
    if rename is not None:
        return f"{what}: {rename}"
    magic, call = ("%graft match", "session.match()") if of_jobs else ("%graft match EXPR", "session.match(...)")
    return f"{what}: pair them by value with {magic}, or with {call}, and apply the result with session.edit(pairs=...)"


def _rule(names: Collection[str], others: Collection[str]) -> tuple[str, str, int, str] | None:
    """The pattern and replacement that turn most of ``names`` into ``others``, their number, and the rule in words."""
    known = set(others)
    prefixes = Counter(
        name[: -len(other)]
        for name in list(names)[:_TRIED]
        for other in known
        if name != other and name.endswith(other)
    )
    words: Counter[tuple[str, str]] = Counter()
    for name in list(names)[:_TRIED]:
        for other in list(known)[:_TRIED]:
            parts, their = name.split("."), other.split(".")
            differ = [(a, b) for a, b in zip(parts, their, strict=False) if a != b]
            # Numbers distinguish layers and are not words.
            if len(parts) == len(their) and len(differ) == 1 and not any(each.isdigit() for each in differ[0]):
                words[differ[0]] += 1
    rules = [(f"^{re.escape(prefix)}", "", f"start with {prefix!r}") for prefix, _ in prefixes.most_common(3)]
    rules += [
        (rf"(?<![^.]){re.escape(old)}(?![^.])", new, f"have {old!r} for {new!r}")
        for (old, new), _ in words.most_common(3)
    ]
    best: tuple[str, str, int, str] | None = None
    for pattern, new, said in rules:
        pairs = len({re.sub(pattern, new, name) for name in names} & known)
        if pairs >= _ENOUGH * min(len(set(names)), len(known)) and (best is None or pairs > best[2]):
            best = (pattern, new, pairs, said)
    return best
