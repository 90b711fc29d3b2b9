"""Patterns of filters agree with `re`, and always end: with a result, or with an error that names them."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graftlab as gl
from graftlab.errors import FilterError
from graftlab.filters import patterns
from graftlab.filters.check import FilterCheck, check_summary
from graftlab.filters.expressions import compile_filter
from graftlab.filters.patterns import bounded, bounded_rewrite

# `re` takes years for these. `regex` sees through many such patterns at once, and not through these two.
ENDLESS = [r"^(a|a?b?|aa)+c$", r"^(a|aa|aaa)+c$"]
NAME = "a" * 60 + "!c"


@given(st.text("ab.*+?|()[]{}^$\\d1,", max_size=12), st.text("ab1", max_size=30))
def test_bounded_patterns_find_the_same_as_re(pattern: str, text: str) -> None:
    for helper in ("search", "match", "fullmatch"):
        try:
            expected = getattr(re.compile(pattern), helper)(text)
        except (re.error, OverflowError):
            continue
        try:
            found = bounded(pattern, helper)(text)
        except gl.FilterError:
            continue
        assert (found is None) == (expected is None)


@given(
    st.text("ab.*+?|()[]{}^$1,", max_size=12),
    st.sampled_from(["", "-", r"<\1>", r"\g<0>\n", "{0}"]),
    st.text("ab1", max_size=30),
)
def test_bounded_renames_give_the_same_as_re(pattern: str, replacement: str, text: str) -> None:
    try:
        re.compile(f"{pattern}|").sub(replacement, "")
        found = re.search(pattern, text)
        expected = re.sub(pattern, replacement, text) if found else None
    except (re.error, IndexError, OverflowError):
        return
    try:
        rewrite = bounded_rewrite(pattern, replacement)
    except gl.FilterError:
        return
    assert rewrite(text) == expected
    with pytest.MonkeyPatch.context() as patch:
        # As it is with texts that are longer.
        patch.setattr(patterns, "_FEW_STEPS", 0)
        assert bounded_rewrite(pattern, replacement)(text) == expected


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 0.05)


@pytest.mark.parametrize("pattern", ENDLESS)
@pytest.mark.usefixtures("short_limit")
def test_a_pattern_without_end_is_an_error_that_names_it(pattern: str) -> None:
    filter_ = compile_filter(f"search({pattern!r}, name)")
    with pytest.raises(gl.FilterError, match=r"takes more than 0\.05 s on 'aaaa") as told_:
        filter_.matches({"name": NAME})
    assert repr(pattern) in str(told_.value)
    with pytest.raises(gl.FilterError, match="takes more than"):
        compile_filter("search(tag, name)").matches({"name": NAME, "tag": pattern})


@pytest.mark.usefixtures("short_limit")
def test_a_rename_without_end_is_an_error_that_names_it() -> None:
    plan = gl.GraftPlan(rename={"target": {ENDLESS[0]: "x"}})
    with pytest.raises(gl.FilterError, match=r"the rename .* -> 'x' takes more than 0\.05 s on 'aaaa") as told_:
        plan.rewrite("target", NAME)
    assert repr(ENDLESS[0]) in str(told_.value)
    assert plan.rewrite("baseline", NAME) == NAME


def test_pattern_that_blocks_re_forever_gets_a_result() -> None:
    assert not compile_filter("search('(a+)+$', name)").matches({"name": "a" * 60 + "!"})


@pytest.mark.usefixtures("short_limit")
def test_filter_check_bounds_patterns_too() -> None:
    taps = [{"name": NAME}]
    assert refused in check_summary(FilterCheck(f"search('{pattern}', name)"), [])


@pytest.mark.parametrize("pattern", ["a{10000}", r"layers\.\d{1,3}\.(attn|mlp)", "([a-z]{2,8}_?){1,20}x", "((a+)+)+b"])
def test_patterns_of_usual_size_are_no_error(pattern: str) -> None:
    for text in ("layers.12.attn", "attn_outx", "aab"):
        assert (bounded(pattern, "search")(text) is None) == (re.search(pattern, text) is None)
