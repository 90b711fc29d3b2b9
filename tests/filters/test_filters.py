"""Filters give Python's results, are refused with a position when they are made, and never raise on a rank."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.values import assert_values

from graftlab.errors import FilterError, GraftError
from graftlab.filters.expressions import HELPERS, MAX_DEPTH, MAX_LENGTH, Filter, compile_filter

TAGS: dict[str, object] = {"name": "attn_out", "layer": 3, "step": 0, "side": "target", "scale": 0.5, "last": False}


def refusal(expression: str) -> FilterError:
    with pytest.raises(FilterError) as caught:
        compile_filter(expression)
    assert caught.value.expression == expression
    return caught.value


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("search('attn', name) and layer < 4 and step == 0", True),
        ("search('mlp', name) or layer == 3", True),
        ("match('out', name)", False),
        ("fullmatch('attn_out', name)", True),
        ("fullmatch('attn', name)", False),
        (r"search('\d', layer)", True),
        ("search(name, 'the attn_out of a block')", True),
        ("search('attn.*', name) is not None", True),
        ("search('mlp.*', name) is not None", False),
        ("search('mlp.*', name) is None and match('out', name) is None and fullmatch('attn', name) is None", True),
        ("search('x', missing) is None", True),
        (r"search(r'(\w+)_(out)', name).group(2) == 'out' and search(r'(\w+)_(out)', name)[1] == 'attn'", True),
        (r"search(r'(?P<part>\w+)_', name).group('part') == 'attn'", True),
        (r"int(search(r'(\d+)', 'layers.12.attn').group(1)) < 13", True),
        (r"search(r'((?:a|t)+)', name).group(1) == 'att'", True),
        (r"search('mlp', name).group(1) is None and search('attn', name)[7] is None", True),
        ("len(search('attn', name)) is None and search('attn', name)[:1] is None", True),
        ("layer.group(0) is None and name.group(0) is None", True),
        ("layer in (1, 2, 3) and side not in ['baseline']", True),
        ("layer in {4, 5}", False),
        ("'attn' in name", True),
        ("2 < layer <= 3 < 10", True),
        ("2 < layer <= 2 < 10", False),
        ("layer % 2 == 1 and layer // 2 == 1 and layer / 2 == 1.5", True),
        ("-layer + 1 == -2 and +layer * 2 - 1 == 5", True),
        ("not last", True),
        ("(layer if last else step) == 0", True),
        ("last is False and missing is None and name is not None", True),
        ("True", True),
        ("'a non-empty text is true'", True),
        ("0.0", False),
        ("()", False),
    ],
)
def test_an_expression_answers_as_its_python_reads(expression: str, expected: bool) -> None:
    assert compile_filter(expression).matches(TAGS) is expected


@pytest.mark.parametrize("expression", [None, "", "   ", "\n\t\n", "# layer == 3", "\n # layer == 3 \n"])
def test_none_blank_and_a_comment_match_nothing(expression: str | None) -> None:
    chosen = compile_filter(expression)
    assert not chosen.matches(TAGS)
    assert chosen.text == (expression or "")
    assert chosen.names == frozenset()


@pytest.mark.parametrize(
    "expression",
    [
        "  layer == 3  ",
        "\n\nlayer == 3\n",
        "layer == 3\n  and step == 0",
        "\r\n layer\r\n == 3",
        "layer == 3 # why",
        "(\nlayer\n)",
    ],
)
def test_white_space_and_line_breaks_are_free(expression: str) -> None:
    assert compile_filter(expression).matches(TAGS)


def test_a_filter_may_be_as_long_and_as_nested_as_the_limits() -> None:
    longest = "layer == 3" + " " * (MAX_LENGTH - 10)
    assert compile_filter(longest).matches(TAGS)
    assert refusal(f"{longest} ").position == MAX_LENGTH
    deepest = "(" * MAX_DEPTH + "layer == 3" + ")" * MAX_DEPTH
    assert compile_filter(deepest).matches(TAGS)
    assert refusal(f"({deepest})").position == MAX_DEPTH


@pytest.mark.parametrize("operation", ["<", "<=", ">", ">="])
@pytest.mark.parametrize("sides", [("absent", "3"), ("3", "absent"), ("absent", "absent"), ("absent", "other")])
def test_ordering_against_an_absent_tag_is_false_and_its_negation_true(operation: str, sides: tuple[str, str]) -> None:
    expression = f"{sides[0]} {operation} {sides[1]}"
    assert not compile_filter(expression).matches({})
    assert compile_filter(f"not ({expression})").matches({})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("recompute_status == 'original'", True),
        ("recompute_status == 'disabled'", True),
        ("'disabled' == recompute_status", True),
        ("recompute_status != 'disabled'", False),
        ("recompute_status != 'original'", False),
        ("recompute_status != 'recompute'", True),
        ("recompute_status in {'disabled', 'recompute'}", True),
        ("recompute_status not in ('disabled', 'recompute')", False),
        ("recompute_status == 3", False),
        ("recompute_status != 3", True),
    ],
)
def test_a_pass_that_is_not_repeated_is_original_and_disabled(expression: str, expected: bool) -> None:
    assert compile_filter(expression).matches({"recompute_status": "original"}) is expected


# What the page on filters says of a tag `absent`.
ABSENT = {
    "absent == 3": False,
    "absent != 3": True,
    "absent == None": True,
    "absent != None": False,
    "absent == other": True,
    "absent is None": True,
    "absent is not None": False,
    "absent in (1, 2)": False,
    "absent not in (1, 2)": True,
    "absent in (1, None)": True,
    "absent not in (1, None)": False,
    "absent in {1, absent}": True,
    "not (absent in (1, 2))": True,
    "absent in 'text'": False,
    "absent not in 'text'": False,
    "'x' in absent": False,
    "'x' not in absent": False,
    "not ('x' in absent)": True,
    "absent < 3": False,
    "not absent < 3": True,
    "absent": False,
    "not absent": True,
}


@pytest.mark.parametrize(("expression", "expected"), ABSENT.items())
def test_an_absent_tag_is_pythons_none(expression: str, expected: bool) -> None:
    assert compile_filter(expression).matches({}) is expected
    try:
        assert bool(eval(expression, {"absent": None, "other": None})) is expected
    except TypeError:
        # Where Python has no answer, neither a comparison nor its opposite matches.
        assert not expected or expression.startswith("not ")


def test_filters_page_describes_absent_tags_correctly() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "filters.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Taps without the tag")
    told = re.findall(r"^\| `(.+)` \| (true|false) \|$", section.partition("\n## ")[0], re.MULTILINE)
    assert len(told) == 20
    for expression, said in told:
        assert compile_filter(expression).matches({"name": "x"}) is (said == "true"), expression
    assert {expression.replace("layer", "absent") for expression, _ in told} >= {
        "absent not in (1, 2)",
        "absent in (1, None)",
        "'x' not in absent",
        "not absent < 3",
    }


@pytest.mark.parametrize(
    "expression", ["name < 3", "3 >= name", "layer in 3", "3 not in layer", "3 in name", "[1] in {1}"]
)
def test_impossible_comparisons_and_searches_are_false(expression: str) -> None:
    assert not compile_filter(expression).matches(TAGS)


@pytest.mark.parametrize(
    "calculation",
    [
        "absent + 1",
        "1 - absent",
        "-absent",
        "+name",
        "name + 'x'",
        "name * 3",
        "name % 2",
        "1 / 0",
        "1 // 0",
        "layer % 0",
    ],
)
def test_arithmetic_without_numbers_is_none(calculation: str) -> None:
    assert compile_filter(f"({calculation}) is None").matches(TAGS)
    assert not compile_filter(f"({calculation}) < 1").matches(TAGS)


@pytest.mark.parametrize("helper", HELPERS)
def test_a_helper_takes_any_value_and_finds_nothing_in_an_absent_one(helper: str) -> None:
    assert not compile_filter(f"{helper}('', absent)").matches({})
    assert compile_filter(f"{helper}('3', layer)").matches(TAGS)
    assert not compile_filter(f"{helper}(pattern, name)").matches({**TAGS, "pattern": "("})
    assert not compile_filter(f"{helper}(pattern, name)").matches(TAGS)
    assert not compile_filter(f"{helper}(layer, name)").matches(TAGS)


FAMILIAR = [
    "name.startswith('attn')",
    "name.startswith(('mlp', 'attn'))",
    "name.endswith('out')",
    "name.upper() == 'ATTN_OUT' and name.upper().lower() == name",
    "name.strip('t') == 'attn_ou' and ' x '.strip() == 'x'",
    "name.split('_') == ['attn', 'out']",
    "name.split('_')[1] == 'out' and name.split('_')[-1][:2] == 'ou'",
    "name[0] == 'a' and name[-3:] == 'out' and name[::-1] == 'tuo_ntta' and (1, 2)[1] == 2",
    "len(name) == 8 and len((1, 2)) == 2",
    "layer in range(2, 5) and layer not in range(0, 3) and 4 in range(0, 9, 2)",
    "int('3') == layer and float('0.5') == 0.5 and str(layer) == '3'",
    "int(name.split('_')[0] == 'attn') == 1",
    "min(layer, 7) == 3 and max((1, layer)) == 3 and abs(-layer) == 3",
    "any(part in name for part in ('q', 'attn'))",
    "all(part in name for part in name.split('_'))",
    "any(layer == i for i in range(3, 10) if i % 2 == 1)",
    "not any(layer == i for i in range(3, 10) if i % 2 == 0)",
    "not any(layer == i for i in range(10) if i < 8 if i % 2 == 0)",
    "all(layer == i for i in range(10) if i > 2 if i < 4)",
    "not all(layer == i for i in (2, 3)) and not all(part in name for part in ('attn', 'mlp'))",
    "all(layer == i for i in ()) and not any(layer == i for i in ())",
    "max(layer, 7) == 7 and min((2, layer)) == 2 and not all((1, 0)) and any((0, 1))",
    "any(c == '_' for c in name) and all((1, True)) and not any([0, None])",
    "any(layer == layer for layer in [9])",
]


@pytest.mark.parametrize("expression", FAMILIAR)
def test_common_python_expressions_mean_the_same(expression: str) -> None:
    assert eval(expression, {**TAGS}) is True
    assert compile_filter(expression).matches(TAGS)
    assert not compile_filter(f"not ({expression})").matches(TAGS)


def test_generator_variable_is_not_a_tag() -> None:
    assert compile_filter("any(part in name for part in parts if x)").names == {"name", "parts", "x"}
    # Outside of it, it is one.
    assert compile_filter("any(x for x in (0,)) or x").names == {"x"}
    assert compile_filter("any(x for x in (0,)) or x").matches({"x": 1})


@pytest.mark.parametrize(
    "expression",
    [
        "absent.lower()",
        "layer.lower()",
        "name.strip(3)",
        "name.startswith(absent)",
        "len(absent)",
        "len(layer)",
        "int(name)",
        "int(absent)",
        "float(name)",
        "abs(name)",
        "min(layer, name)",
        "min(())",
        "max(absent)",
        "range(name)",
        "name[99]",
        "name['x']",
        "layer[0]",
        "absent[0]",
        "name.split('_')[7]",
        "name.split('')",
        "any(x for x in layer)",
        "any(x for x in absent)",
        "all(x for x in range(10 ** 9))".replace("10 ** 9", "1000000000"),
        "max(range(1000000000000))",
        "any(x == x for x in range(1000000000000000000000000))",
        "long.lower()",
        "any(c == 'a' for c in long)",
        "int(digits)",
    ],
)
def test_operations_without_a_result_return_none_at_once(expression: str) -> None:
    tags = {**TAGS, "long": "a" * 10**6, "digits": "9" * 90_000}
    assert compile_filter(f"({expression}) is None").matches(tags)


def test_methods_and_functions_run_no_code_of_a_tags_class() -> None:
    class Trap(str):
        def _caught(self, *_: object) -> str:
            raise AssertionError("code of a tag ran")

        lower = split = __len__ = __getitem__ = _caught  # type: ignore[assignment]

    trap = {"name": str.__new__(Trap, "X.Y")}
    for expression in ("name.lower() == 'x.y'", "name.split('.')[1] == 'Y'", "len(name) == 3", "name[0] == 'X'"):
        assert compile_filter(expression).matches(trap)
    assert compile_filter("any(c == 'Y' for c in name)").matches(trap)


REFUSED = [
    # expression, position, a part of what is said of it
    ("layer == 1 and name.upper", 15, "attributes"),
    ("layer == 1 and os.system('x')", 15, "the methods are startswith"),
    ("name.__class__()", 0, "not a method"),
    ("name.lower.upper()", 0, "attributes"),
    ("name.split(sep='.')", 11, "keyword"),
    ("len()", 0, "0 arguments, not 1"),
    ("range(1, 2, 3, 4)", 0, "4 arguments, not 1 to 3"),
    ("min(name, default=3)", 10, "keyword"),
    ("any(x for x in y for y in z)", 3, "nested generators"),
    ("any(all(x for x in 'a') for y in 'b')", 7, "nested generators"),
    ("any(x for x, y in name)", 10, "one variable"),
    ("any(x for x in max(name))", 15, "iterates over a tag"),
    ("max(x for x in name)", 3, "only allowed as the one argument of any"),
    ("eval('1')", 0, "not a helper"),
    ("lenn(name) == 1", 0, "did you mean 'len'"),
    ("lambda: layer", 0, "lambda"),
    ("layer in [x for x in (1, 2)]", 9, "comprehensions"),
    ("layer in {x for x in (1, 2)}", 9, "comprehensions"),
    ("  x for x in layer", 2, "only allowed as the one argument of any"),
    ("{1: 2}", 0, "dicts"),
    ("step == 0 and (n := layer)", 15, "=="),
    (" n := layer", 1, "=="),
    ("(n := layer) name", 1, "side by side"),
    ("name == f'{layer}'", 8, "f-strings"),
    ("layer in (1, *others)", 13, "'*'"),
    ("search(*both)", 7, "'*'"),
    ("search('a', string=name)", 12, "keyword"),
    ("search('a', **tags)", 12, "keyword"),
    ("layer ** 2 == 4", 0, "'**'"),
    ("1 == layer @ 2", 5, "'@'"),
    ("1 == layer << 2", 5, "'<<'"),
    ("1 == layer >> 2", 5, "'>>'"),
    ("last & last", 0, "'and'"),
    ("last | last", 0, "'or'"),
    ("last ^ last", 0, "'!='"),
    ("1 == ~layer", 5, "'not'"),
    ("1 == 2j", 5, "2j"),
    ("name == b'x'", 8, "b'x'"),
    ("layer == ...", 9, "Ellipsis"),
    ("(yield)", 1, "Yield"),
    ("serach('a', name)", 0, "did you mean 'search'"),
    ("1 == layer(3)", 5, "tags cannot be called"),
    ("__import__('os')", 0, "not a helper"),
    ("(layer or step)(3)", 1, "only a helper"),
    ("step == 0 and search", 14, "helper, not a tag"),
    ("match == 1", 0, "helper, not a tag"),
    ("search('a')", 0, "1 argument, not a pattern and a tag; write search('pattern', tag)"),
    ("search('a', name, 1)", 0, "3 arguments"),
    ("step == 0 and search('a(', name)", 21, "bad pattern"),
    ("search('a{99999999999999999999}', name)", 7, "bad pattern"),
    ("search(None, name)", 7, "not text"),
    ("layer == 1, step == 2", 0, "comma"),
    # not Python at all
    ("layer <", 7, "too early"),
    ("layer < 4 and  ", 13, "too early"),
    ("layer = 4", 6, "'=='"),
    ("layer < 4 && step == 0", 10, "'and'"),
    ("layer < 4 || step == 0", 10, "'or'"),
    ("!last", 0, "'not'"),
    ("name == '=' and !last", 16, "'not'"),
    ("layer ? 1 : 2", 6, "not a Python expression"),
    ("step == 0 layer == 3", 0, "side by side"),
    ("import os", 0, "not a Python expression"),
    ("layer == 3; step == 0", 10, "not a Python expression"),
    ("step\u00a0== 0 and layer", 4, "U+00A0"),
    # brackets and strings
    ("(layer == 1", 0, "never closed"),
    ("step == 0 and search('a', name", 20, "never closed"),
    ("layer == 1)", 10, "closes nothing"),
    ("layer == 1) or (step == 0", 10, "closes nothing"),
    ("layer in [1, 2)", 14, "write ]"),
    ("name == 'attn", 8, "never closed"),
    ("search('attn(, name)", 7, "never closed"),
    ("search('attn', name) == True", 24, "a match is never True or False"),
    ("False is match('attn', name)", 0, "a match is never True or False"),
    # characters
    ("layer\0", 5, "null"),
    ("layer == '\ud800'", 10, "surrogate"),
    # positions count characters, over several lines and beyond ASCII
    ("name == 'naïve ☃ 🦜' and x.y", 24, "attributes"),
    ("naïve == 1 and\n  '🦜' == x.y", 24, "attributes"),
    ("layer == 1\r\nand step.x", 16, "attributes"),
    ("layer == 1\rand step.x", 15, "attributes"),
    ("'''\n\n''' == name and\n\n\ta.b", 23, "attributes"),
    ("'ü' == name and\n'☃' $ name", 20, "not a Python expression"),
]


@pytest.mark.parametrize(("expression", "position", "said"), REFUSED)
def test_bad_expression_is_refused_with_position_and_correction(expression: str, position: int, said: str) -> None:
    error = refusal(expression)
    assert said in error.message
    assert error.position == position
    assert isinstance(error, GraftError)
    assert isinstance(error, ValueError)
    assert f"position {position}" in str(error)


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 60 + "layer" + ")" * 60,
        " and ".join(["layer == 3"] * 500),
        "layer == 3 or " * 500 + "step == 0",
        "layer in (" + "1, " * 2000 + "3)",
    ],
)
def test_a_long_but_shallow_expression_is_fine(expression: str) -> None:
    assert compile_filter(expression).matches(TAGS)


@pytest.mark.parametrize(
    "expression",
    [
        "(" * 150 + "layer" + ")" * 150,
        "not " * 1000 + "layer",
        "not " * 150 + "layer",
        "-" * 9000 + "1",
        "1" + "+1" * 4000,
        "a" + ".b" * 4000,
        "1 if layer else " * 500 + "2",
        "search('" + "(" * 4900 + ")" * 4900 + "', name)",
    ],
)
def test_deep_nesting_is_refused(expression: str) -> None:
    refusal(expression)


def test_a_paste_of_100_kb_is_refused_without_parsing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not ast.parse itself, which pytest needs to show a failure.
    monkeypatch.setattr(
        "graftlab.filters.expressions.parse_expression", lambda *args: pytest.fail("the text was parsed")
    )
    error = refusal("layer == 1 and " * 7000)
    assert str(MAX_LENGTH) in error.message
    assert len(str(error)) < 1000


@pytest.mark.parametrize("value", [True, 3, b"layer == 3", ["layer == 3"], lambda tags: True])
def test_filter_other_than_text_is_refused(value: object) -> None:
    with pytest.raises(FilterError, match="a filter is text"):
        compile_filter(value)  # type: ignore[arg-type]


def test_warnings_of_the_parser_and_of_re_are_not_passed_on() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = compile_filter(r"search('\d', layer) and layer is 3 and not search('[[z]', name)")
    assert chosen.matches(TAGS)


class Awkward:
    """A tag's value whose every operation raises."""

    def _raise(self, *_: object) -> bool:
        raise RuntimeError("awkward")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __str__ = __contains__ = __add__ = _raise  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


OPERATIONS = """
    x; not x; x == 1; x != 1; x < 1; 1 >= x; x in (1, 2); 1 in x; 1 not in x; x + 1 < 2; -x == 1; x / 0.5 > 1; x and x;
    x or 1; 1 if x else 2; {x} == {1}; search('a', x); match(x, 'a'); x * 1e308 * 1e308 > 1; x // 3 == 1; x % 3 == 1
"""


@pytest.mark.parametrize("expression", OPERATIONS.split(";"))
def test_no_value_of_a_tag_makes_a_filter_raise(expression: str) -> None:
    for value in (Awkward(), torch.ones(3), [1, [2]], {1}, 10**400, float("nan"), object()):
        assert compile_filter(expression).matches({"x": value}) in (True, False)


@pytest.mark.parametrize(
    ("expression", "fits", "too_much"),
    [
        ("len(x) > 5", "a" * 100_000, "a" * 100_001),
        ("x.startswith('a')", "a" * 100_000, "a" * 100_001),
        ("len(x.split(',')) > 5", "," * 999, "," * 1_000),
        ("any(part for part in x)", (1,) * 1_000, (1,) * 1_001),
    ],
)
def test_what_is_too_long_or_has_too_many_items_gives_nothing(expression: str, fits: object, too_much: object) -> None:
    assert compile_filter(expression).matches({"x": fits})
    assert not compile_filter(expression).matches({"x": too_much})


def test_an_absent_tag_has_a_text() -> None:
    assert compile_filter("str(phase) == 'None'").matches({})


def test_incomparable_values_are_unequal() -> None:
    for value in (Awkward(), torch.ones(3)):
        assert compile_filter("x != 1").matches({"x": value})
        assert not compile_filter("x == 1").matches({"x": value})


def test_a_filter_is_a_value_equal_and_pickled_by_its_text() -> None:
    chosen = compile_filter("search('attn', name) and layer < 4")
    assert chosen == compile_filter("search('attn', name) and layer < 4")
    assert hash(chosen) == hash(compile_filter(chosen.text))
    assert chosen != compile_filter("layer < 4")
    assert chosen.names == {"name", "layer"}
    assert repr(chosen) == """Filter("search('attn', name) and layer < 4")"""
    for twin in (pickle.loads(pickle.dumps(chosen)), copy.deepcopy(chosen), eval(repr(chosen), {"Filter": Filter})):
        assert twin == chosen
        assert twin.names == chosen.names
        assert twin.matches(TAGS)
    with pytest.raises(AttributeError):
        chosen.text = "True"  # type: ignore[misc]


def test_nothing_of_the_process_is_within_reach() -> None:
    assert not compile_filter("print or open or __builtins__ or __name__ or compile_filter").matches({})


# -- Python itself as the judge --------------------------------------------------------------------------------------


@st.composite
def numeric(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.integers(0, 5 if depth else 2))
    if kind == 0:
        return draw(st.sampled_from(["layer", "step", "scale", "last"]))
    if kind <= 2:
        return repr(draw(st.integers(-9, 9) if kind == 1 else st.floats(-4, 4, width=16)))
    left, right = draw(numeric(depth - 1)), draw(numeric(depth - 1))
    if kind == 3:
        return f"({draw(st.sampled_from('-+'))}{left})"
    if kind == 4:
        return f"({left} if {draw(condition(depth - 1))} else {right})"
    return f"({left} {draw(st.sampled_from(['+', '-', '*', '/', '//', '%', 'and', 'or']))} {right})"


@st.composite
def textual(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.integers(0, 2 if depth else 1))
    if kind == 0:
        return draw(st.sampled_from(["name", "side"]))
    if kind == 1:
        return repr(draw(st.text(st.sampled_from("atn_o'\"\\ é☃\n"), max_size=4)))
    return f"({draw(textual(depth - 1))} {draw(st.sampled_from(['and', 'or']))} {draw(textual(depth - 1))})"


@st.composite
def condition(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.integers(0, 5 if depth else 3))
    operand = draw(st.sampled_from([numeric, textual]))(max(depth - 1, 0))
    if kind == 0:
        orderings = draw(st.lists(st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), min_size=1, max_size=3))
        return draw(operand) + "".join(f" {ordering} {draw(operand)}" for ordering in orderings)
    if kind == 1:
        items = ", ".join(draw(st.lists(operand, min_size=1, max_size=3)))
        collection = draw(st.sampled_from(["[{}]", "({},)", "{{{}}}"])).format(items)
        return f"{draw(operand)} {draw(st.sampled_from(['in', 'not in']))} {collection}"
    if kind == 2:
        pattern = draw(st.sampled_from(["'attn'", r"r'\w+_'", "'a|t$'", "'^$'", "side"]))
        return f"{draw(st.sampled_from(HELPERS))}({pattern}, {draw(textual(1))})"
    if kind == 3:
        constant = draw(st.sampled_from(["None", "True", "False"]))
        return f"{draw(st.sampled_from(['last', 'name']))} {draw(st.sampled_from(['is', 'is not']))} {constant}"
    left, right = draw(condition(depth - 1)), draw(condition(depth - 1))
    if kind == 4:
        return f"not ({left})"
    return f"({left}) {draw(st.sampled_from(['and', 'or', '==', '!=']))} ({right})"


TAG_SETS = st.fixed_dictionaries(
    {
        "layer": st.integers(-3, 9),
        "step": st.integers(0, 2),
        "scale": st.floats(-2, 2, width=16),
        "last": st.booleans(),
        "name": st.text(st.sampled_from("atn_o☃"), max_size=6),
        "side": st.sampled_from(["baseline", "target"]),
    }
)


@given(condition(), TAG_SETS)
def test_random_expressions_evaluate_as_in_python(expression: str, tags: Mapping[str, object]) -> None:
    helpers = {name: getattr(re, name) for name in HELPERS}
    chosen = compile_filter(expression)
    assert chosen.names <= tags.keys()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = bool(eval(expression, {"__builtins__": {}, **helpers, **tags}))
    except ZeroDivisionError:
        assert chosen.matches(tags) in (True, False)
    else:
        assert chosen.matches(tags) is expected


WORDS = """
    name layer 'attn' 1 ( ) [ ] { } , and or not in is == = < + - if else search . : := lambda for * ** f'{ }' é && !
    None await yield ; # \\ @ ~
"""
ANY_TEXT = st.one_of(
    st.text(),
    st.text(st.sampled_from("ab1'\"()[]{}.,:=<>!&|*+-%/~@# \n\r\t\\\f☃\0")),
    st.lists(st.sampled_from([*WORDS.split(), "\n"]), max_size=12).map(" ".join),
)


@given(ANY_TEXT, st.dictionaries(st.sampled_from(["a", "b", "name", "layer"]), st.none() | st.integers() | st.text()))
def test_arbitrary_text_is_a_filter_or_a_filter_error(expression: str, tags: Mapping[str, object]) -> None:
    try:
        chosen = compile_filter(expression)
    except FilterError as error:
        refused = error
    else:
        assert chosen.matches(tags) in (True, False)
        return
    assert 0 <= refused.position <= len(expression)
    assert refused.message


@pytest.mark.parametrize("text", ["x.y", "a,b", "x for x in y"])
@pytest.mark.parametrize("blanks", [1, 4, 5, 40])
def test_the_place_of_a_fault_counts_the_blanks_before_the_text(blanks: int, text: str) -> None:
    with pytest.raises(FilterError) as refused:
        compile_filter(" " * blanks + text)
    assert refused.value.position == blanks


@pytest.mark.parametrize(
    ("expression", "may"),
    [
        ("", False),
        ("# nothing", False),
        ("name == 'layers.3'", False),
        ("'layers.1.attn.q' == name", True),
        ("name in ('head', 'layers.1.attn.q')", True),
        ("name in ('head', 'norm')", False),
        ("name in 'layers'", True),
        ("name == 'norm' and search('q', name)", False),
        ("name == 'norm' or search('q', name)", True),
        ("not name == 'norm'", True),
        ("not name != 'norm'", False),
        ("name != 'norm'", True),
        ("name not in ('norm',)", True),
        ("not (True or layer == 3)", False),
        ("rank == 0 and False", False),
        ("layer in (1, 2)", True),
        ("name == other", True),
        ("'a' < name < 'b'", True),
        ("name == 'norm' if layer else False", True),
    ],
)
def test_a_names_beginning_tells_where_a_filter_cannot_match(expression: str, may: bool) -> None:
    assert compile_filter(expression).may_match("layers.1.attn.") is may


NAMES = st.sampled_from(["a.b", "a.c", "b"])


@given(
    st.recursive(
        st.sampled_from(["name == 'a.b'", "name in ('b', 'a.c')", "name != 'b'", "layer", "True", "search('a', name)"]),
        lambda inner: st.one_of(
            st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda parts: f"({' '.join(parts)})"),
            inner.map(lambda part: f"(not {part})"),
        ),
        max_leaves=6,
    ),
    NAMES,
    st.booleans(),
)
def test_a_filter_that_matches_may_match(expression: str, name: str, layer: bool) -> None:
    chosen = compile_filter(expression)
    if chosen.matches({"name": name, "layer": layer}):
        assert chosen.may_match(name[:2])


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(Filter)
