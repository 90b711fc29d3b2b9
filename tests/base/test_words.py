"""Names and numbers in running text, in options and in cells of tables."""

from __future__ import annotations

import argparse
import math

import pytest
from kit.refusals import exactly

from graftlab.base.html import cell, marked_up, number, rest_of, table
from graftlab.base.text import counted, failed_on, first_of, listed, numbered, positive, shortened, spans


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert shortened("model.layers.0", 14) == "model.layers.0"
    assert shortened("model.layers.0.attention.query", 12) == "model….query"
    assert shortened("model.layers.0", 13) == "model…ayers.0"


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (math.nan, "-"), (0.0, "0.00e+00"), (1234.5, "1.23e+03")])
def test_a_number_that_is_absent_is_a_dash(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("numbers", "shown"), [([3], "step 3"), ([0, 1, 2, 5], "steps 0-2, 5"), ({4, 2}, "steps 2, 4")]
)
def test_numbered_things_are_listed_in_spans_behind_their_noun(numbers: list[int], shown: str) -> None:
    assert numbered("step", numbers) == shown


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (counted(1, "run"), "1 run"),
        (counted(0, "run"), "0 runs"),
        (counted(2000, "run"), "2,000 runs"),
        (listed([]), ""),
        (listed(["q"]), "q"),
        (listed(["q", "k"]), "q and k"),
        (listed(["q", "k", "v"], "or"), "q, k or v"),
        (listed(["q", "k", "v", "o"], most=4), "q, k, v and o"),
        (listed(["q", "k", "v", "o", "x"], most=4), "q, k, v and 2 more"),
        (listed(["q", "k"], most=1), "q, k"),
        (first_of([]), ""),
        (first_of(["a", "b", "c"]), "a, b, c"),
        (first_of(["a", "b", "c", "d"]), "a, b, c and 1 more"),
        (first_of([str(n) for n in range(1002)], 1), "0 and 1,001 more"),
        (spans([]), ""),
        (spans([7, 3, 2, 1, 0, 3]), "0-3, 7"),
        (spans([1, 3, 5]), "1, 3, 5"),
        (spans([-1, 0, 4, 5]), "-1-0, 4-5"),
    ],
)
def test_counts_and_lists_are_written_as_a_sentence_has_them(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ({"target[0]": "ValueError: x"}, "failed on target[0]"),
        (
            {"target[0]": "KeyboardInterrupt", "target[1]": "KeyboardInterrupt: x"},
            "interrupted on target[0], target[1]",
        ),
        ({"baseline[0]": "KeyboardInterrupt", "target[0]": "ValueError"}, "failed on baseline[0], target[0]"),
    ],
)
def test_a_run_is_interrupted_only_if_nothing_else_went_wrong(failing: dict[str, str], said: str) -> None:
    assert failed_on(failing) == said


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "", "x", "00"])
def test_an_option_that_counts_takes_whole_numbers_of_at_least_one(text: str) -> None:
    assert positive("12") == 12
    with pytest.raises(
        argparse.ArgumentTypeError, match=exactly(f"expected a whole number of at least 1, not {text!r}")
    ):
        positive(text)


LEFT, RIGHT = 'style="text-align:left"', 'style="text-align:right;white-space:nowrap"'


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        (cell("a<b"), f'<td class="" {LEFT}>a&lt;b</td>'),
        (cell(3, "number"), f'<td class="number" {RIGHT}>3</td>'),
        (cell("x", "quiet number"), f'<td class="quiet number" {RIGHT}>x</td>'),
        (marked_up("<b>x</b>"), f'<td class="" {LEFT}><b>x</b></td>'),
        (table(("", ""), ["<tr>x</tr>", "<tr>y</tr>"]), "<table><tbody><tr>x</tr><tr>y</tr></tbody></table>"),
        (
            table(("", "step", "own"), [], numbers=("own",)),
            f'<table><thead><tr><th class="" {LEFT}></th><th class="number" {RIGHT}>step</th>'
            f'<th class="number" {RIGHT}>own</th></tr></thead><tbody></tbody></table>',
        ),
        ("".join(rest_of(0, "rows", "frame")), ""),
        ("".join(rest_of(-2, "rows", "frame")), ""),
        (
            "".join(rest_of(1234, "rows", "a < b")),
            f'<tr><td colspan="9" {LEFT}>and 1,234 rows more: <code>a &lt; b</code></td></tr>',
        ),
    ],
)
def test_a_table_has_a_header_where_a_title_is_given_and_numbers_on_the_right(markup: str, expected: str) -> None:
    assert markup == expected
