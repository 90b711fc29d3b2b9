"""The remarks on a filter that matches few or none of the taps seen."""

from __future__ import annotations

import pytest

from graftlab.filters.check import TAP_LIMIT, FilterCheck, check_summary, matched_by_both, unknown_tags
from graftlab.filters.expressions import compile_filter


def tap(name: str, **tags: object) -> dict[str, object]:
    return {"name": name, "step": 0, "side": "baseline", "rank": 0, "recompute_status": "original", **tags}


TAPS = [tap("model.layers.0.attn", layer=0), tap("model.layers.1.attn", layer=1), tap("logits", phase="decode")]


def said(text: str, taps: list[dict[str, object]] = TAPS) -> str:
    check = FilterCheck(text)
    check.catch_up(taps)
    return check_summary(check, taps)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer < 4", "2 of 3 seen"),
        ("nme == 'logits'", "0 of 3 seen; no tap has the tag 'nme'; did you mean 'name'?"),
        ("name == 'logit'", "0 of 3 seen"),  # it occurs in a name, so nothing else may be meant
        ("name == 'lgits'", "0 of 3 seen; did you mean 'logits'?"),
        ("search('atn$', name)", "0 of 3 seen"),
        ("search('model.layers.1.atn', name)", "0 of 3 seen; did you mean 'model.layers.1.attn'?"),
        ("phase == 'decoed'", "0 of 3 seen; did you mean 'decode'?"),
        ("phase == 'decode' or name == 'lgits'", "1 of 3 seen"),
        ("batch == 3", "0 of 3 seen; no tap has the tag 'batch'"),
        (
            "name in ('lgits', 'logts', 'loits', 'ogits')",
            "0 of 3 seen; did you mean 'logits'?; did you mean 'logits'?; did you mean 'logits'?",
        ),
        ("  ", "matches nothing"),
        ("# off", "0 of 3 seen"),
    ],
)
def test_a_text_is_summed_up_in_a_line(text: str, expected: str) -> None:
    assert said(text) == expected


def test_invalid_filter_text_reports_the_fault() -> None:
    assert "the expression ends too early" in said("layer <")


def test_before_any_tap_was_seen_nothing_is_counted() -> None:
    assert said("layer < 4", []) == "no tap has been seen yet"


def test_taps_are_tested_up_to_the_limit() -> None:
    many = [tap("x", layer=number) for number in range(TAP_LIMIT + 5)]
    assert said("layer >= 0", many) == "10,000 of the first 10,000 of 10,005 seen"
    assert said("layer >= 9_999", many[:TAP_LIMIT]) == "1 of 10,000 seen"


def both(b2t: str, t2b: str) -> list[int]:
    checks = {"b2t": FilterCheck(b2t), "t2b": FilterCheck(t2b)}
    for check in checks.values():
        check.catch_up(TAPS)
    return list(matched_by_both(checks))


def test_taps_that_both_directions_match_are_found() -> None:
    assert both("layer >= 0", "layer == 1 or name == 'logits'") == [1]
    assert both("layer == 0", "layer == 1") == []
    assert both("layer >= 0", "") == []


@pytest.mark.parametrize("place", ["step == 0", "side == 'baseline'", "rank < 1"])
def test_where_and_when_a_tap_was_first_seen_proves_no_overlap(place: str) -> None:
    assert both(f"layer == 0 and {place}", "layer == 0") == []


def test_first_few_of_many_unknown_tags_are_named() -> None:
    filter_ = compile_filter("a == b == c == d == e == f")
    assert filter_ is not None
    assert unknown_tags(filter_, {"name"}) == {"a": None, "b": None, "c": None}
