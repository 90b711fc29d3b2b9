"""Patterns of filters agree with `re`, and always end: with a result, or with an error that names them."""

from __future__ import annotations

import ast
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

import graftlab as gl
from graftlab.base import sources
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
    with pytest.raises(
        gl.FilterError,
        match=exactly(
            "the rename '^(a|a?b?|aa)+c$' -> 'x' takes more than 0.05 s on "
            "'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!c' (62 characters); write it "
            "without nested repeats"
        ),
    ) as told_:
        plan.rewrite("target", NAME)
    assert repr(ENDLESS[0]) in str(told_.value)
    assert plan.rewrite("baseline", NAME) == NAME


def test_pattern_that_blocks_re_forever_gets_a_result() -> None:
    assert not compile_filter("search('(a+)+$', name)").matches({"name": "a" * 60 + "!"})


@pytest.mark.usefixtures("short_limit")
def test_filter_check_bounds_patterns_too() -> None:
    taps = [{"name": "x"}]
    check = FilterCheck(f"name == 'x' or search({ENDLESS[0]!r}, name)")
    check.catch_up(taps)
    assert check.hits == [0]
    taps.append({"name": NAME})
    check.catch_up(taps)
    # What it matched before is not what it matches.
    assert check.hits == []
    assert "takes more than 0.05 s" in check_summary(check, taps)
    other = FilterCheck(f"name == {ENDLESS[0]!r}")
    other.catch_up(taps)
    assert check_summary(other, taps).startswith("0 of 2 seen")


@pytest.mark.parametrize(("pattern", "parts"), [("(abc){5000,}", "20,004"), ("(?:(ab){99}){99}", "30,000")])
def test_a_pattern_that_grows_when_its_repeats_are_written_out_is_refused(pattern: str, parts: str) -> None:
    with pytest.raises(
        FilterError,
        match=exactly(
            f"the pattern {pattern} has {parts} parts when its repeats are written out, and takes too much memory; at "
            "most 10,000 are allowed, so write it with fewer repeats inside repeats"
        ),
    ):
        bounded(pattern, "search")


def test_more_repeats_allow_re_only_shorter_texts() -> None:
    from graftlab.filters.patterns import _longest_for_re

    patterns = ("abc", "a*", "a*b*", "a+b?c*", "(a*)*")
    assert [_longest_for_re(pattern) for pattern in patterns] == [None, 3162, 215, 56, 0]


def test_unbounded_pattern_that_only_re_can_parse_is_refused() -> None:
    for make in (lambda pattern: bounded(pattern, "search"), lambda pattern: bounded_rewrite(pattern, "")):
        with pytest.raises(
            FilterError, match=r"may take forever, and its time cannot be limited \(unknown property .*\): \(a"
        ):
            make("(a+)+[[:foo:]]")
        assert make("[[:foo:]]")("a]") is None


@pytest.mark.parametrize(
    "pattern",
    ["(a)+x{e}", "(a)+x{e<=1}y", "(a)+[{]{2}{i}", r"(a)+\{d}", "(a)+x{1,2}{", "(a)+x{,1}{}", "(a)+[^]{s}]{s}"],
)
def test_braces_that_mean_nothing_to_re_mean_nothing(pattern: str) -> None:
    for text in ("aax{e}", "aay", "ax{e<=1}y", "axy", "a{{{i}", "a{d}", "axx{", "ax{}", "a{}", "aX{s}", "a", ""):
        found = bounded(pattern, "fullmatch")(text)
        assert (found is None) == (re.fullmatch(pattern, text) is None), text


@pytest.mark.parametrize(
    ("pattern", "longest"), [("a", None), ("a*b", 3162), ("a+b?", 215), ("a{2}b*c?", 56), ("(a)+", 0), ("(a|b){2}", 0)]
)
def test_texts_up_to_a_length_that_re_is_done_with_soon_take_no_longer_than_re(
    pattern: str, longest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Limited:
        def search(self, text: str, timeout: float) -> str:
            return f"limited to {timeout:g} s"

        def subn(self, replacement: str, text: str, timeout: float) -> tuple[str, int]:
            return f"limited to {timeout:g} s", 1

    monkeypatch.setattr(patterns, "_compile_limited", lambda pattern: Limited())
    for find in (bounded(pattern, "search"), bounded_rewrite(pattern, "")):
        if longest is None:
            assert find("-" * 100_000) is None
        else:
            assert find("-" * (longest + 1)) == "limited to 0.25 s"
            assert "limited" not in str(find("-" * longest))


def test_a_filter_warns_of_nothing_even_where_warnings_are_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_filter(r"search('\d\.[[a]b', name)").matches({"name": "1.ab"})
        with pytest.raises(DeprecationWarning):
            warnings.warn("of the user's own", DeprecationWarning, stacklevel=1)
        with pytest.raises(SyntaxError, match="invalid escape"):
            compile(r"'\d'", "<cell>", "eval")


def test_filters_do_not_restore_another_threads_temporary_warning_filters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    another = warnings.catch_warnings()

    def while_the_other_thread_ends_its_block(*args: Any, **kwargs: Any) -> Any:
        another.__exit__(None, None, None)
        return ast.parse(*args, **kwargs)

    with warnings.catch_warnings():
        another.__enter__()
        warnings.simplefilter("error", BytesWarning)
        # Not ast.parse itself, which pytest needs to show a failure.
        with monkeypatch.context() as patch:
            patch.setattr(sources, "ast", SimpleNamespace(parse=while_the_other_thread_ends_its_block))
            compile_filter("match('it was never compiled before', name)")
        assert ("error", None, BytesWarning, None, 0) not in warnings.filters


@pytest.mark.parametrize(
    "pattern",
    [
        "(((a{100}){100}){100}){4}",
        "((ab){0,100}c){1,100}",
        "(" * 11 + "a" + "{2})" * 11,
        "(" * 40 + "a" + "+)" * 40,
        "(?:" * 20 + "ab" + ")+?" * 20,
    ],
)
def test_a_pattern_that_would_fill_the_memory_is_refused_unread(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns.regex, "compile", lambda *given: pytest.fail("regex writes the repeats out"))
    refused = "parts when its repeats are written out"
    for helper in ("search", "match", "fullmatch"):
        with pytest.raises(FilterError, match=refused):
            bounded(pattern, helper)
        with pytest.raises(FilterError, match=refused):
            gl.GraftPlan(compare=f"{helper}('{pattern}', name)")
    with pytest.raises(FilterError, match=refused):
        bounded_rewrite(pattern, "b")
    with pytest.raises(gl.PlanError, match=refused):
        gl.GraftPlan(rename={"target": {pattern: "b"}})
    assert refused in check_summary(FilterCheck(f"search('{pattern}', name)"), [])


@pytest.mark.parametrize("pattern", ["a{10000}", r"layers\.\d{1,3}\.(attn|mlp)", "([a-z]{2,8}_?){1,20}x", "((a+)+)+b"])
def test_patterns_of_usual_size_are_no_error(pattern: str) -> None:
    for text in ("layers.12.attn", "attn_outx", "aab"):
        assert (bounded(pattern, "search")(text) is None) == (re.search(pattern, text) is None)
