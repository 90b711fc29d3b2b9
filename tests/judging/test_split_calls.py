"""Calls into which each side divides its work differently are not compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from graftlab.comparison.answers import answer_of
from graftlab.judging.split_calls import not_paired, split_calls
from graftlab.verdict.added import COLUMNS
from graftlab.verdict.findings import Findings
from graftlab.verdict.wording import text_of

UNFIT = (
    "TransformError: the default transform cannot make a tensor of shape [8] (rank 0 of 1) from [22] (senders [0] of 1)"
)


def rows(*given: tuple[str, str, dict[str, Any]], error: str = UNFIT) -> pd.DataFrame:
    """A row for each status, name and tags. Those that one side has alone are the target's."""
    return pd.DataFrame(
        [
            {
                "status": status,
                "side": "target",
                "name": name,
                "tags": tags,
                "step": 0,
                "rank": 0,
                "error": error if status == "failed" else None,
            }
            for status, name, tags in given
        ],
        columns=["status", "side", "name", "tags", "step", "rank", "error"],
    )


CHUNKS = [("failed", "embed", {}), ("compared", "embed", {}), ("unmatched", "embed", {})]


def test_calls_of_other_shapes_and_another_number_do_not_pair() -> None:
    found = split_calls(rows(*CHUNKS, ("compared", "scale", {}), ("unmatched", "scale", {}), ("compared", "head", {})))
    assert found == {("embed", None): {"baseline": 2, "target": 3}, ("scale", None): {"baseline": 1, "target": 2}}
    (said,) = not_paired(found)
    assert said.startswith("2 taps (embed, scale): ")
    assert "(2 calls on the baseline and 3 on the target, of other shapes)" in said


@pytest.mark.parametrize(
    "found",
    [
        rows(),
        # One call more, after those that pair.
        rows(("compared", "embed", {}), ("unmatched", "embed", {})),
        # A wrong shape, in as many calls.
        rows(("failed", "embed", {}), ("compared", "embed", {})),
        rows(*CHUNKS, error="ValueError: a transform of the user's own"),
        # A weight is no call, and a recomputed call is another's.
        rows(*((status, name, {"kind": "param"}) for status, name, _ in CHUNKS)),
        rows(*CHUNKS[:2], ("unmatched", "embed", {"recompute_status": "recompute"})),
        # One side's own taps.
        rows(("failed", "embed", {}), ("unmatched", "norm", {})),
    ],
)
def test_other_calls_pair_in_their_order(found: pd.DataFrame) -> None:
    assert split_calls(found) == {}
    assert not_paired(split_calls(found)) == []


def test_returned_values_alone_clear_a_target_whose_calls_do_not_pair() -> None:
    nothing = pd.DataFrame(columns=list(COLUMNS))
    assert answer_of(Findings(nothing, 5.0, 1), True, True) == "inconclusive"
    found = Findings(nothing, 5.0, 1, only_returned=True)
    assert answer_of(found, True, True) == "agree"
    assert answer_of(found, True, False) == "inconclusive"
    assert answer_of(replace(found, contradicting_pairs=["k has the values of v."]), True, True) == "inconclusive"
    assert text_of(found) == "The returned values agree to rounding; nothing else was compared."
    far = Findings(nothing, 5.0, 1, only_returned=True, unexplained=["The returned value differs by 0.1."])
    assert answer_of(far, True, True) == "differ"
    assert text_of(far) == "The returned value differs by 0.1."
