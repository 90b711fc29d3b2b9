"""Differences that no named group explains: of taps, of returned values, and after the last tap."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import pandas as pd

from graftlab.base.tap_groups import is_data, is_value, kind_of, kind_of_group
from graftlab.base.text import first_of
from graftlab.base.world import SIDES, Side
from graftlab.diffs.results import (
    is_written,
    value_in_words,
)
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR, assumed_floor, roundoff
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import (
    coarser_dtype,
    in_more_calls,
    is_spread,
    largest_over_rms,
    measured_rows,
    of_cancelled_part,
    ratio,
    rows_where,
)
from graftlab.verdict.order import tap_codes
from graftlab.verdict.returned_values import AccumulatedFloors, ReturnedValues, ValueDifference

OF_A_RESULT = re.compile(r"((?:.*\.)?output)([.\[].*)")
"""The name of a tap at a part of what a model returns: the result's name, and the part."""


# ---- taps -----------------------------------------------------------------------------------------------------------


def differing_taps(
    compared: pd.DataFrame, floors: AccumulatedFloors, threshold: float, leave: Collection[str] = ()
) -> list[ValueDifference]:
    """The taps of a run without grafts that differ by more than rounding adds up to, in execution order.

    Weights and other data, and the taps of the names in ``leave``, are left out.
    """
    found: dict[str, ValueDifference] = {}
    for row in sorted(measured_rows(compared), key=lambda row: (row["in_run"], row["order"])):
        if is_data(row["tags"]) or row["name"] in leave:
            continue
        floor = floors.of_tap(row["name"], kind_of(row["tags"]), coarser_dtype(row), largest_over_rms(row))
        over = ratio(row, floor if floors.constant is not None else of_cancelled_part(row, floor, floors.wholes))
        if over > threshold and (row["name"] not in found or over > found[row["name"]].times):
            distance = math.inf if row["nonfinite_differ"] else row["rel_l2"]
            found[row["name"]] = ValueDifference(row["name"], distance, over, is_spread=is_spread(row))
    return list(found.values())


def cut_graphs(compared: pd.DataFrame, named: Sequence[str]) -> list[str]:
    """A sentence for each side that lacks the gradients of taps whose values both sides have, if gradients are named.

    Whatever comes before such a tap gets less gradient, and may be named for it. ``compared`` are the rows of a run
    without grafts.
    """
    if not any(kind_of_group(group) in ("grad", "param_grad") for group in named):
        return []
    kinds = pd.Series([kind_of(tags) for tags in compared["tags"]], index=compared.index, dtype=object)
    is_measured = compared["status"].isin(MEASURED)
    of_both = set(compared.loc[kinds.isna() & is_measured, "name"])
    lacking = of_both - set(compared.loc[(kinds == "grad") & is_measured, "name"])
    sentences = []
    for side, other, names in _on_one_side(compared[(kinds == "grad") & compared["name"].isin(lacking)]):
        has, it = ("has", "it") if len(names) == 1 else ("have", "them")
        sentences.append(
            f"{first_of(names)} {has} a gradient on the {side} only: the {other}'s graph is cut where its code "
            f"reads {it} (detach, no_grad), or nothing reads {it}. Gradients of what comes before {it} may differ "
            "for that reason."
        )
    return sentences


def _on_one_side(rows: pd.DataFrame) -> Iterator[tuple[Side, Side, list[str]]]:
    """Each side that alone has some of these rows' taps, the other side, and the taps' names."""
    alone = rows[rows["status"].isin(("missing", "unmatched"))]
    for side, other in (SIDES, SIDES[::-1]):
        if names := list(dict.fromkeys(alone.loc[alone["side"] == side, "name"])):
            yield side, other, names


_BEYOND_ROUNDING = 1e-2
"""No rounding of float32 adds up to this in the values from which tokens are chosen."""


def on_unseen_choices(distance: float | None, compared: pd.DataFrame, threshold: float) -> tuple[list[str], list[str]]:
    """A sentence on whole numbers which may agree by chance, or one if they do.

    ``distance`` is how far apart the values are from which they were chosen (rel_l2, an estimate), NaN if unknown, and
    None if they are shown. Up to one rounding, of float32 or of the taps' dtype, they agree.
    """
    dtypes = [str(dtype) for dtype in compared["dtype"].dropna().unique()]
    rounding = max([DEFAULT_NOISE_FLOOR, *map(roundoff, dtypes)])
    if distance is None or distance <= rounding:
        return [], []
    advice = (
        "neither a tap nor a returned value shows them: tap them (gl.tap), such as the probabilities from which a "
        "token is drawn, or return them."
    )
    agree = "The returned whole numbers, such as tokens, agree"
    if math.isnan(distance):
        return [f"{agree}. Whether the values from which they were chosen agree is not known: {advice}"], []
    most = max(_BEYOND_ROUNDING, threshold * assumed_floor(dtypes)[0])
    sentence = f"{agree}, but the values from which they were chosen differ by {distance:.2g}, and {advice}"
    return ([], [sentence]) if distance > most else ([sentence], [])


# ---- in words -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnexplainedDifferences:
    """The sentences that a verdict reports first: on differences that no named group explains.

    ``compared`` are the rows of a run without grafts, ``taps`` those that differ there. ``returned`` and
    ``returned_grafted`` are the functions' results in that run, and in the run in which every tap was grafted; None for
    jobs. ``names_left`` are taps of the model's inputs, ``values_left`` returned values that differ between runs of the
    baseline, in words.
    """

    compared: pd.DataFrame
    taps: Sequence[ValueDifference]
    returned: ReturnedValues | None
    returned_grafted: ReturnedValues | None
    floors: AccumulatedFloors
    threshold: float
    names_left: Collection[str] = ()
    values_left: Collection[str] = ()

    @cached_property
    def _last(self) -> str | None:
        """The last tap of the forward pass that was measured."""
        rows = [row for row in measured_rows(self.compared) if is_value(row["tags"])]
        return str(max(rows, key=lambda row: (row["in_run"], row["order"]))["name"]) if rows else None

    @cached_property
    def _in_more_calls(self) -> str | None:
        """The subject of a sentence on calls of tapped values that one side alone makes; None if there are none."""
        rows = self.compared
        plain = [is_value(tags) for tags in rows["tags"]]
        more = in_more_calls(rows, rows[rows["status"].isin(("missing", "unmatched")) & pd.Series(plain, rows.index)])
        if not len(more):
            return None
        side = more["side"].iloc[0]
        return f"Further calls of {first_of(list(dict.fromkeys(more['name'])))}, which the {side} alone makes,"

    def _beyond(self, returned: ReturnedValues | None) -> list[ValueDifference]:
        return returned.beyond(self.floors, self.threshold, self.values_left) if returned else []

    @cached_property
    def _returned(self) -> list[ValueDifference]:
        return [each for each in self._beyond(self.returned) if not each.is_written]

    @cached_property
    def _after_last_tap(self) -> list[ValueDifference]:
        """The returned values that differ although every tap has the baseline's value."""
        found = [each for each in self._beyond(self.returned_grafted) if not each.is_written]
        # Grafts into copies may not reach the model, which then returns the error of its last tap.
        last_differs = any(each.what == self._last for each in self.taps)
        return [] if last_differs and found == self._returned else found

    def not_compared(self, *, with_lost: bool) -> list[str]:
        """Sentences on returned values that were not compared; ``with_lost`` on those that the target lacks, too."""
        returned = self.returned or ReturnedValues()
        sentences = [f"{what}, which the baseline does not repeat." for what in self.values_left]
        return sentences + [f"{what}." for what in (*returned.left, *(returned.lost if with_lost else ()))]

    def lost(self) -> list[str]:
        """A sentence if one side returns less: agreement of the rest does not clear the target."""
        if self.returned is None or not self.returned.lost:
            return []
        name = "" if self._last is None else f", such as {self._last}"
        lost = self.returned.lost
        which = ", which was" if len(lost) == 1 else ". These were"
        return [
            f"{_capital('; '.join(lost))}{which} therefore not compared. If this is intended, name the tap that counts "
            f"(output=, or --output){name}."
        ]

    def after_last_tap(self, *, all_grafted: bool = True) -> list[str]:
        """A sentence if something is computed differently after the last tap, or beside all taps.

        Unless ``all_grafted``, a tap that has no baseline's value may be the reason.
        """
        if not self._after_last_tap:
            return []
        worst = max(self._after_last_tap, key=attrgetter("times"))
        if self._last is None:
            return [f"{_capital(worst.what)} differs {worst.size}, and no tap was measured on both sides."]
        if more := self._in_more_calls:
            return [
                f"With the baseline's value at every tap that has a partner, {worst.what} differs {worst.size}. {more} "
                "may explain it."
            ]
        if not all_grafted:
            return [f"With the baseline's value at every tap that could be grafted, {worst.what} differs {worst.size}."]
        # If the parts of a result have taps, nothing comes after them: a cache is written before.
        where = "that no tap shows" if OF_A_RESULT.fullmatch(self._last) else f"after the last tap, {self._last},"
        return [
            f"Something {where} is computed differently: with the baseline's value at every tap, {worst.what} still "
            f"differs {worst.size}."
        ]

    def written(self) -> list[str]:
        """A sentence if a call writes different state although every tap has the baseline's value.

        If the model writes into one of its inputs, a graft of that input replaces the tensor, so only the run without
        grafts shows what is written.
        """
        grafted = self.returned_grafted or ReturnedValues()
        seen = {value_in_words(each.path) for each in grafted.differences}
        found = [each for each in self._beyond(grafted) if each.is_written]
        found += [each for each in self._beyond(self.returned) if each.is_written and each.what not in seen]
        if not found:
            return []
        worst = max(found, key=attrgetter("times"))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        grafts = ", with the baseline's value at every tap" if worst.what in seen else ""
        return [f"{_capital(worst.what)}{more} differs {worst.size}{grafts}."]

    def lost_gradients(self) -> list[str]:
        """A sentence for each side on weights of both sides whose gradients only that side computes."""
        rows = self.compared
        kinds = pd.Series([kind_of(tags) for tags in rows["tags"]], index=rows.index, dtype=object)
        of_both = set(rows.loc[(kinds == "param") & rows["status"].isin(MEASURED), "name"])
        sentences = []
        for side, other, names in _on_one_side(rows[(kinds == "param_grad") & rows["name"].isin(of_both)]):
            have, them = ("has a gradient", "it") if len(names) == 1 else ("have gradients", "them")
            sentences.append(
                f"{first_of(names)} {have} on the {side} only: the {other}'s result does not depend on {them}, or "
                "its graph is cut (detach, no_grad, requires_grad=False)."
            )
        return sentences

    def turned(self) -> list[str]:
        """A sentence if returned whole numbers differ, and rounding alone would change some of them.

        Such a number may be a token chosen near a tie, or chosen wrongly.
        """
        for path, rel_l2, dtypes, _ in self.returned.differences if self.returned else ():
            what = value_in_words(path)
            if is_written(path) or any(map(roundoff, dtypes)) or what in self.values_left or not rel_l2 > 0:
                continue
            if all(each.what != what for each in self._returned):
                return [
                    f"{_capital(what)} differs in whole numbers, by {rel_l2:.2g}. Rounding alone would change some of "
                    f"them (by {self.floors.of_returned(path, dtypes):.2g}), so these may be choices near a tie, or a "
                    "mistake: compare the values from which they were chosen."
                ]
        return []

    def whole_numbers_alone(self) -> list[str]:
        """A sentence if nothing but whole numbers was compared, which may agree although their origins differ."""
        if self.returned is None or not self.returned.are_whole_numbers:
            return []
        if self._last is None:
            other = "let both sides make the same calls"
        elif self._are_chosen_untapped:
            other = "tap them (gl.tap)"
        else:
            return []
        return [
            "Nothing but whole numbers was compared, such as tokens. They agree, but the values from which they were "
            f"chosen may differ: return those too, or {other}."
        ]

    @property
    def _are_chosen_untapped(self) -> bool:
        """Whether inputs or weights have numbers that round, and no value that is computed from them."""
        rounds: dict[bool, bool] = {True: False, False: False}
        for row in measured_rows(self.compared):
            is_value = kind_of(row["tags"]) is None
            rounds[is_value] |= roundoff(coarser_dtype(row)) > 0
        return rounds[False] and not rounds[True]

    def no_tap_explains(self, *, is_grafted: bool = True) -> list[str]:
        """A sentence if something differs in the run without grafts. For verdicts that name no group.

        Unless ``is_grafted``, the run in which every tap was grafted has failed.
        """
        and_no_tap = "and no tapped value explains it" if is_grafted else "and what each tap adds to it is not known"
        returned = [] if self._after_last_tap else self._returned
        output = next((each for each in self.taps if each.what == self._last), None)
        if returned:
            worst = max(returned, key=attrgetter("times"))
            sentence = f"{_capital(worst.what)} differs {worst.size}, {and_no_tap}."
        elif output:
            sentence = f"The output {output.what} differs {output.size}, {and_no_tap}."
        elif spread := [each for each in self.taps if each.is_spread]:
            first, *others = spread
            more = f" (and {len(others)} more)" if others else ""
            agrees = "" if _whole(first.what) == _whole(self._last or "") else "; the output agrees"
            return [f"{first.what}{more} differs {first.size}, {and_no_tap}{agrees}."]
        else:
            return []
        inner = [each for each in self.taps if each is not output]
        return [sentence + (f" The first tap that differs is {inner[0].what} {inner[0].size}." if inner else "")]

    def only_sometimes(self, again: pd.DataFrame, returned: ReturnedValues | None, run: int) -> list[str]:
        """A sentence if another run without grafts, of this number, shows different differences."""
        now = {each.what for each in differing_taps(again, self.floors, self.threshold, self.names_left)}
        now |= {each.what for each in self._beyond(returned) if not each.is_written}
        then = {each.what for each in (*self.taps, *self._returned)}
        if now == then:
            return []
        if not now:
            return [
                f"The target does not repeat itself: it differed in the first run and agrees in run {run}. Check "
                "what only its first calls do: warm-up, lazy initialisation, autotuning, caches that are still empty."
            ]
        return [
            f"The target does not repeat itself: run {run} differs at other taps than the first. Check the state that "
            "it keeps between calls."
        ]

    def without_partner(self, last_of_baseline: str | None, chosen: str | None = None) -> list[str]:
        """A sentence if the output was not compared: a side's last tap has no partner, and no value is returned.

        ``chosen`` is the tap that the user named as the output.
        """
        if self.returned is not None and self.returned.compared:
            return []
        if chosen is not None:
            other_number = self._last_calls_alone(chosen)
            return [] if other_number is None else [other_number]
        alone = []
        measured = rows_where(self.compared, self.compared["status"].isin(MEASURED))
        if last_of_baseline is not None and last_of_baseline not in set(measured["name"]):
            alone.append(f"the baseline's last tap, {last_of_baseline},")
        elif other_number := self._last_calls_alone(last_of_baseline or self._last):
            return [other_number]
        if (last := self._last_of_target()) is not None:
            alone.append(f"the target's last tap, {last},")
        if not alone or self._last is None:
            return []
        has = "has" if len(alone) == 1 else "have"
        return [
            f"The output was not compared: {' and '.join(alone)} {has} no partner. The last tap that was compared is "
            f"{self._last}. Return the output from both functions, pair it (session.edit(pairs=...)), or name the tap "
            "that counts (output=, or --output)."
        ]

    def _last_calls_alone(self, last: str | None) -> str | None:
        """A sentence if this tap is compared, but one side's last calls of it have no partner."""
        rows = self.compared[self.compared["name"] == last]
        # The backward pass shows gradients of the same name, and those of the first call last.
        rows = rows[[is_value(tags) for tags in rows["tags"]]] if len(rows) else rows
        rows = rows.sort_values(["step", "order"], kind="stable")
        for more, fewer, status in (("baseline", "target", "unmatched"), ("target", "baseline", "missing")):
            alone = rows["side"].eq(more) & rows["status"].eq(status)
            if len(rows) and alone.iloc[-1]:
                # Each rank has a row of its own.
                calls = tap_codes(rows, "step", "occurrence")[0]
                lost = len({*calls[alone]})
                return (
                    f"The {fewer} makes fewer calls: {lost} of the {more}'s {len({*calls})} calls of {last} "
                    f"lack{'s' * (lost == 1)} a partner, the last included, so the target is not cleared."
                )
        return None

    def _last_of_target(self) -> str | None:
        """The last tap of the target's forward pass, if it has no partner."""
        own = self.compared[self.compared["side"] == "target"]
        own = own[[is_value(tags) for tags in own["tags"]]] if len(own) else own
        if not len(own):
            return None
        last = own.sort_values(["step", "order"], kind="stable").iloc[-1]
        return str(last["name"]) if last["status"] in ("missing", "unmatched") else None


def _whole(name: str) -> str:
    """The name of the whole value, for a tap that shows a part of it."""
    return name.partition("[")[0]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
