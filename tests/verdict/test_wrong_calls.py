"""Which calls of a group are wrong, and what they have in common."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.verdict.wrong_calls import common_rule, which_calls


def words(calls: list[dict[str, Any]], wrong: set[int]) -> str:
    rows = [
        {"step": call.pop("step", 0), "occurrence": call.pop("occurrence", 0), "tags": call}
        for call in map(dict, calls)
    ]
    frame = pd.DataFrame(rows)
    return which_calls(frame, frame.iloc[sorted(wrong)])


def test_calls_that_are_all_wrong_need_no_words() -> None:
    assert words([{"t": t} for t in range(4)], {0, 1, 2, 3}) == ""


def test_the_layers_of_a_call_are_one_call() -> None:
    assert words([{"layer": layer, "t": 0} for layer in range(3)], {1}) == ""


def test_calls_with_their_tags_in_another_order_are_one_call() -> None:
    assert words([{"a": 1, "t": 0}, {"t": 0, "a": 1}, {"t": 0, "a": 1}], {1}) == ""


def test_the_ranks_of_a_call_are_one_call() -> None:
    assert words([{"tp_rank": rank, "t": t} for rank in range(2) for t in range(2)], {0, 3}) == ""


def test_a_tag_that_alone_decides_is_named_with_its_rule() -> None:
    lengths = [8, 16, 24, 32, 40, 48]
    assert words([{"length": n} for n in lengths], {1, 3, 5}) == (
        " in calls with length=16, 32, 48 of 8, 16, 24, 32, 40, 48 (all multiples of 16 and no others)"
    )
    assert words([{"phase": p, "t": t} for p in ("prefill", "decode") for t in range(3)], {3, 4, 5}) == (
        " in calls with phase=decode (1 of 2 values)"
    )
    # Values that have no order among themselves.
    assert words([{"phase": p, "t": t} for p in (0, "decode", "prefill") for t in range(3)], {3, 4, 5}) == (
        " in calls with phase=decode (1 of 3 values)"
    )


def test_steps_from_one_on_are_a_range() -> None:
    assert words([{"step": n} for n in range(20)], set(range(12, 20))) == " from step 12 on (of 0-19)"
    assert words([{"step": n} for n in range(20)], {3, 4}) == " in steps 3-4 of 0-19"
    assert words([{"token": n} for n in range(20)], set(range(12, 20))) == " in calls from token=12 on (of 0-19)"
    assert words([{"occurrence": n} for n in range(4)], {1}) == " in occurrence 1 of 0-3"
    # The last one alone is no range.
    assert words([{"step": n} for n in range(4)], {3}) == " in step 3 of 0-3"


def test_the_size_of_a_dimension_is_named_where_a_rule_holds_for_it() -> None:
    lengths = [7, 32, 20, 48, 41]
    frame = pd.DataFrame(
        [{"step": n, "occurrence": 0, "tags": {}, "shape": [1, length, 8]} for n, length in enumerate(lengths)]
    )
    assert which_calls(frame, frame.iloc[[1, 3]]) == (
        " in calls whose dim 1 has 32, 48 of 7, 20, 32, 41, 48 elements (all multiples of 16 and no others)"
    )
    # A call without a tensor has no size.
    frame.loc[5] = {"step": 5, "occurrence": 0, "tags": {}, "shape": None}
    assert which_calls(frame, frame.iloc[[1, 3]]).startswith(" in calls whose dim 1 has 32, 48 of 7, 20")
    frame = frame.drop(index=5)
    # A right call of the same size is an exception.
    frame.at[4, "shape"] = [1, 48, 8]
    assert which_calls(frame, frame.iloc[[1, 3]]) == " in steps 1, 3 of 0-4"


def test_calls_without_a_common_part_are_counted_and_the_first_ones_listed() -> None:
    calls = [{"rid": rid, "t": t} for rid in range(4) for t in range(40)]
    wrong = {40 * (n % 3) + n + 3 for n in range(8)}
    assert words(calls, wrong) == (
        " in 8 of 160 calls: rid=0 t=3, rid=0 t=6, rid=0 t=9, rid=1 t=4, rid=1 t=7, rid=1 t=10, ..."
    )
    # The caller's own tags come before the numbers that graftlab counts.
    both = [{"step": step, "t": t} for step in range(3) for t in range(3)]
    assert words(both, {1, 3}) == " in 2 of 9 calls: t=1 step=0, t=0 step=1"
    # A tag that some calls lack decides nothing.
    assert words([{}, {"t": 1}, {"t": 2}], {1}) == " in 1 of 3 calls: t=1"


@pytest.mark.parametrize(
    ("wrong", "every", "rule"),
    [
        ({1, 3, 5}, range(6), "all odd numbers and no others"),
        ({0, 2, 4}, range(6), "all even numbers and no others"),
        ({3, 6}, range(8), ""),
        ({1, 3}, range(6), ""),
        ({1, 3, 5}, {1, 2, 3, 5}, ""),
        ({32, 48}, {7, 20, 32, 41, 48}, "all multiples of 16 and no others"),
        ({4, 8}, {1, 4, 7, 8, 9}, ""),
        ({32, 48}, {20, 32, 41, 48}, ""),
    ],
)
def test_a_rule_needs_enough_numbers_and_no_exception(wrong: set[int], every: Any, rule: str) -> None:
    assert common_rule(wrong, set(every)) == rule


def test_of_two_parts_that_decide_the_one_with_a_rule_is_named() -> None:
    lengths = [8, 16, 24, 32, 40, 48]
    calls = [{"rid": f"r{n}", "length": length} for n, length in enumerate(lengths)]
    assert words(calls, {1, 3, 5}) == (
        " in calls with length=16, 32, 48 of 8, 16, 24, 32, 40, 48 (all multiples of 16 and no others)"
    )


def test_a_size_that_a_right_call_has_too_decides_nothing() -> None:
    lengths = [7, 32, 20, 48, 41, 32]
    frame = pd.DataFrame({"step": 0, "occurrence": n, "tags": {}, "shape": [size]} for n, size in enumerate(lengths))
    assert "elements" not in which_calls(frame, frame.iloc[[1, 3]])
    assert "elements" in which_calls(frame[:5], frame.iloc[[1, 3]])
    # A wrong call without a tensor has no size.
    frame.loc[6] = {"step": 0, "occurrence": 6, "tags": {}, "shape": None}
    without = frame.drop(index=5)
    assert "elements" not in which_calls(without, without.loc[[1, 3, 6]])


def test_calls_are_listed_with_the_tags_that_they_have() -> None:
    calls: list[dict[str, Any]] = [{"t": 0}, {"t": 0, "a": 1}, {"t": 1}, {"t": 1, "a": 1}]
    assert words(calls, {0, 3}) == " in 2 of 4 calls: t=0, t=1 a=1"
