"""Groups that round differently: in low precision, the only ones that are not bit-equal for equal inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pandas as pd
import torch

from graftlab.base.tap_groups import kind_of_group
from graftlab.base.text import first_of
from graftlab.diffs.rounding import roundoff

LABEL = "rounds differently"
_MOST_SHOWN = 6
# A tap stands out if it adds more than this many times the median of the taps of its dtype, and this many times one
# rounding. In ten families of transformers in bfloat16 against float32, no tap added more than 2.6 medians or 1.6
# roundings.
_MEDIANS, _ROUNDINGS, _FEWEST = 4.0, 2.5, 8
_TO_LOOK = "A run in float32 shows whether it is a mistake."
_LOOKED = (
    "In {}, from weights and buffers rounded alike, the sides agree. So it is rounding, of these numbers or in the "
    "code, and may still be too much."
)


@dataclass(frozen=True)
class RoundingGroups:
    """The groups, and the number of groups that were always bit-equal.

    ``restored`` is the distance of an output with the baseline's code at these groups, ``total`` the distance without
    (rel_l2); NaN if not measured. ``stands_out`` is a sentence on taps that add far more than the others do.
    """

    groups: tuple[str, ...] = ()
    equal: int = 0
    dtypes: tuple[str, ...] = ()
    output: str = ""
    restored: float = math.nan
    total: float = math.nan
    stands_out: str = ""

    def is_doubtful(self, in_float32: float | None) -> bool:
        """Whether there may be a mistake; of the groups only if no runs in float32 have shown that there is none."""
        return bool(self.stands_out) or (in_float32 is None and bool(self.groups))

    def with_effect(self, output: str, restored: float, total: float) -> RoundingGroups:
        """Return a copy with the distances measured at an output."""
        return replace(self, output=output, restored=restored, total=total)

    @property
    def explains_output(self) -> bool:
        """Whether the baseline's code at these groups brings the output at least halfway back."""
        return math.isnan(self.total) or self.restored <= self.total / 2

    def sentences(
        self, in_float32: float | None = None, weights: Sequence[str] = (), looked_in: str = "float32"
    ) -> list[str]:
        """A verdict's sentences on them.

        ``in_float32`` is the largest ratio of its runs in float32, or in the dtype ``looked_in``, if they name nothing;
        ``weights`` are those of the groups that already differ, in words.
        """
        look = _TO_LOOK if in_float32 is None else _LOOKED.format(looked_in)
        first = [f"{self.stands_out} {look}"] if self.stands_out else []
        if not self.groups:
            return first
        shown = first_of(self.groups, _MOST_SHOWN)
        several = len(self.groups) > 1
        verb, are = ("round", "they are") if several else ("rounds", "it is")
        found = (
            f"{shown} {verb} differently: from equal inputs {are} never bit-equal, and the other {self.equal} groups "
            f"of {' and '.join(self.dtypes)} taps always are."
        )
        how = _computes(several)
        if weights:
            why = f"That may be because of weights that already differ: {first_of(weights)}."
        elif in_float32 is None:
            why = (
                f"So {how}, or with a mistake that is smaller than one rounding. A run in float32 shows only the "
                "mistake."
            )
        else:
            why = f"In {looked_in} the sides agree, so only the rounding differs: {how}."
        sentences = [*first, f"{found} {why}"]
        if not math.isnan(self.total):
            now = "bit-equal" if self.restored == 0 else f"off by {self.restored:.2g}"
            # The last tap of a model that is watched as a whole has this name.
            output = "the output" if self.output == "output" else f"the output {self.output}"
            sentences.append(
                f"With the baseline's {shown} {output} is {now}; with the target's it is off by {self.total:.2g}."
            )
        return sentences


def rounds_differently(frame: pd.DataFrame, named: Sequence[str]) -> RoundingGroups:
    """Find the groups of low precision that are never bit-equal from equal inputs, where most others always are.

    ``frame`` is :func:`.added.added_frame`'s. Groups that are already ``named``, and rows with different dtypes, which
    cannot be bit-equal, are left out.
    """
    return _never_equal(frame, named, "group")


def sentence_on_single_taps(frame: pd.DataFrame) -> str | None:
    """A sentence on taps of low precision that are never bit-equal from equal inputs, where most others always are.

    That is how a mistake in one layer alone shows, which :func:`rounds_differently` does not find. ``frame`` is as
    there, of a verdict that names nothing. None if there are no such taps.
    """
    found = _never_equal(frame, (), "name")
    if not found.groups:
        return None
    several = len(found.groups) > 1
    return (
        f"{first_of(found.groups, _MOST_SHOWN)} {'are' if several else 'is'} not bit-equal from equal inputs, and the "
        f"other {found.equal} taps of {' and '.join(found.dtypes)} are. So {_computes(several)}, or with a mistake "
        "within the floor. A run in float32 shows only the mistake."
    )


def _computes(several: bool) -> str:
    # Equal inputs are those of the taps before: a projection may be right, and the attention before it not tapped.
    if several:
        return "they, or code before them that is not tapped, compute in a different order or precision"
    return "it, or code before it that is not tapped, computes in a different order or precision"


def taps_that_stand_out(frame: pd.DataFrame) -> str:
    """A sentence on taps of low precision that add far more than the others, though less than the floor allows.

    A floor has room for the rounding of unusual code, and a mistake of a few percent has room in it too. ``frame`` is
    as in :func:`rounds_differently`. Empty if there are no such taps.
    """
    of_values = frame["group"].map(lambda group: kind_of_group(group) is None).astype(bool)
    rows = frame[frame["added"].notna() & frame["dtype"].map(_is_coarse).astype(bool) & of_values]
    found = []
    for dtype, same in rows.groupby("dtype", sort=False):
        median = float(same["added"].median())
        far = same[same["added"] > max(_MEDIANS * median, _ROUNDINGS * roundoff(str(dtype)))]
        if len(same) < _FEWEST or not len(far):
            continue
        names = list(dict.fromkeys(far["name"]))
        verb, up_to = ("add", "up to ") if len(names) > 1 else ("adds", "")
        sizes = f"{up_to}{far['added'].max():.2g}, their median is {median:.2g}"
        found.append(
            f"{first_of(names, _MOST_SHOWN)} {verb} far more than other taps of {dtype} ({sizes}), which rounding "
            "hardly explains."
        )
    return " ".join(found)


def _never_equal(frame: pd.DataFrame, named: Sequence[str], by: str) -> RoundingGroups:
    """Find what is never bit-equal, among groups or single taps (``by`` their column), where most is always."""
    comparable = frame[frame["added"].notna() & frame["cast"].isna()]
    rows = comparable[comparable["dtype"].map(_is_coarse).astype(bool)]
    # What the model is given was not computed from equal inputs.
    given = rows["group"].map(lambda group: kind_of_group(group) in ("input", "param"))
    rows = rows[~(rows["group"].isin(list(named)) | given.astype(bool))]
    if not len(rows):
        return RoundingGroups()
    differs = (rows["added"] > 0).groupby(rows[by], sort=False)
    always, never = differs.all(), ~differs.any()
    groups, equal = [str(g) for g in always.index[always]], int(never.sum())
    if not groups or equal <= len(groups) or 2 * equal < len(always):
        return RoundingGroups()
    return RoundingGroups(tuple(groups), equal, tuple(dict.fromkeys(rows["dtype"])))


def _is_coarse(name: object) -> bool:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 2
