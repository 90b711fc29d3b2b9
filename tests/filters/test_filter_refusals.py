"""What a filter refuses: all of what is said, with the place and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.refusals import ids, refusal

from graftlab.filters.expressions import compile_filter

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: compile_filter(3),
        "a filter is text, not int; write it in quotes, for example \"name == 'attn_out'\"",
    ),
    (
        lambda: compile_filter("name == 'a"),
        "this string is never closed; write ' at its end (at position 8)\n    name == 'a\n            ^",
    ),
    (
        lambda: compile_filter("(name == 'a'"),
        "this ( is never closed; write ) (at position 0)\n    (name == 'a'\n    ^",
    ),
    (
        lambda: compile_filter("(layer in [1, 2"),
        "this [ is never closed; write ] (at position 10)\n    (layer in [1, 2\n              ^",
    ),
    (
        lambda: compile_filter("name == 'a')"),
        "this ) closes nothing; delete it, or open it before (at position 11)\n    name == 'a')\n               ^",
    ),
    (
        lambda: compile_filter("(name == 'a']"),
        "this ] closes a (; write ) (at position 12)\n    (name == 'a']\n                ^",
    ),
    (
        lambda: compile_filter("name = 'a'"),
        "'=' is not an operator here; write '==' (at position 5)\n    name = 'a'\n         ^",
    ),
    (
        lambda: compile_filter("name == 'a' && layer == 1"),
        "'&&' is not an operator here; write 'and' (at position 12)\n    name == 'a' && layer == 1\n                ^",
    ),
    (
        lambda: compile_filter("layer <"),
        "the expression ends too early; finish it (at position 7)\n    layer <\n           ^",
    ),
    (
        lambda: compile_filter("search(pattern='a', text=name)"),
        "keyword arguments are not allowed; write search('pattern', tag) (at position 7)\n"
        "    search(pattern='a', text=name)\n"
        "           ^",
    ),
    (
        lambda: compile_filter("search(3, name)"),
        "the pattern is 3, not text; write search('pattern', tag) (at position 7)\n    search(3, name)\n           ^",
    ),
    (
        lambda: compile_filter("search('(', name)"),
        "bad pattern (missing ), unterminated subpattern at position 0); correct it, or write a "
        "backslash before a special character (at position 7)\n"
        "    search('(', name)\n"
        "           ^",
    ),
    (
        lambda: compile_filter("len(obj=name)"),
        "keyword arguments are not allowed; write them by position in len() (at position 4)\n"
        "    len(obj=name)\n"
        "        ^",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_a_filter_that_is_none_shows_the_place_and_what_to_write(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
