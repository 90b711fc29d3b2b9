"""The source with which another notebook makes a transform again: whole, or refused with what it reads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
from kit.refusals import exactly

from graftlab.errors import TransformError
from graftlab.transforms.code import source_to_share
from graftlab.transforms.spec import TransformSpec

SCALE, NAMES, HELD = 0.5, ("a", 2, None), [1]


class Local:
    @staticmethod
    def half(value: Any) -> Any:
        return value


def plain(graft_input: Any) -> Any:
    return graft_input.own * SCALE + math.pi + len(NAMES) + Fraction(1, 2)


def within(offset: float) -> Callable[[Any], Any]:
    def moved(graft_input: Any) -> Any:
        return graft_input.own + offset * SCALE

    return moved


def logged(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def call(graft_input: Any) -> Any:
        return function(graft_input)

    return call


@logged
def wrapped(graft_input: Any) -> Any:
    return graft_input.own * 2


def with_default(graft_input: Any, factor: float = 2.0, *, names: Any = ("a",)) -> Any:
    return graft_input.own * factor * len(names)


def with_list(graft_input: Any, factor: Any = [1]) -> Any:  # noqa: B006
    return graft_input.own * factor[0]


def with_named_list(graft_input: Any, *, factor: Any = [1]) -> Any:  # noqa: B006
    return graft_input.own * factor[0]


def reads_list(graft_input: Any) -> Any:
    return graft_input.own * HELD[0]


def with_named_default(graft_input: Any, factor: float = SCALE, *, ä: float = -SCALE * 2, b: int = 3) -> Any:
    return graft_input.own * factor * ä * b


def of_numbers(graft_input: object, *more: int) -> object:
    return graft_input.own  # type: ignore[attr-defined]


def in_comprehension(graft_input: Any) -> Any:
    SCALES = [1]
    return sum(SCALE * each for each in graft_input.received_list) + (lambda x: x * len(NAMES))(SCALES[0])


half = Local.half


def reads_method(graft_input: Any) -> Any:
    return half(graft_input.own)


one_lambda = lambda graft_input: graft_input.own * 3  # noqa: E731
two_lambdas = [lambda graft_input: graft_input.own, lambda graft_input: graft_input.own * 2]


@pytest.mark.parametrize(
    ("function", "lines"),
    [
        (
            plain,
            [
                "from __future__ import annotations",
                "SCALE = 0.5",
                "import math as math",
                "NAMES = ('a', 2, None)",
                "from fractions import Fraction as Fraction",
                "def plain(graft_input: Any) -> Any:",
                "    return graft_input.own * SCALE + math.pi + len(NAMES) + Fraction(1, 2)",
            ],
        ),
        (
            within(1.5),
            [
                "from __future__ import annotations",
                "SCALE = 0.5",
                "offset = 1.5",
                "def moved(graft_input: Any) -> Any:",
                "    return graft_input.own + offset * SCALE",
            ],
        ),
        (
            wrapped,
            [
                "from __future__ import annotations",
                "def wrapped(graft_input: Any) -> Any:",
                "    return graft_input.own * 2",
            ],
        ),
        (
            with_default,
            [
                "from __future__ import annotations",
                'def with_default(graft_input: Any, factor: float = 2.0, *, names: Any = ("a",)) -> Any:',
                "    return graft_input.own * factor * len(names)",
            ],
        ),
        (
            with_named_default,
            [
                "from __future__ import annotations",
                "def with_named_default(graft_input: Any, factor: float = 0.5, *, ä: float = -1.0, b: int = 3) -> Any:",
                "    return graft_input.own * factor * ä * b",
            ],
        ),
        (
            in_comprehension,
            [
                "from __future__ import annotations",
                "SCALE = 0.5",
                "NAMES = ('a', 2, None)",
                "def in_comprehension(graft_input: Any) -> Any:",
                "    SCALES = [1]",
                "    return sum(SCALE * each for each in graft_input.received_list) + "
                "(lambda x: x * len(NAMES))(SCALES[0])",
            ],
        ),
        (
            of_numbers,
            [
                "def of_numbers(graft_input: object, *more: int) -> object:",
                "    return graft_input.own  # type: ignore[attr-defined]",
            ],
        ),
        (one_lambda, ["transform = lambda graft_input: graft_input.own * 3"]),
    ],
)
def test_the_source_has_the_values_and_modules_that_a_function_reads(function: Any, lines: list[str]) -> None:
    text = source_to_share(TransformSpec.of(function))
    assert text.splitlines() == lines
    given = SimpleNamespace(own=2.0, received_list=[1.0, 3.0])
    assert TransformSpec.of(text).load()(given) == function(given)  # type: ignore[arg-type]


OF_NO_DEFAULT = "the default of a parameter is not a plain value; compute it in the function"


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (with_list, OF_NO_DEFAULT),
        (with_named_list, OF_NO_DEFAULT),
        (reads_list, "it reads 'HELD', a list of its notebook; define that in the function"),
        (reads_method, "it reads 'half', a function of its notebook; define that in the function"),
        (two_lambdas[1], "several functions begin on its line; define it with def"),
    ],
)
def test_a_function_that_reads_anything_else_is_refused(function: Any, why: str) -> None:
    spec = TransformSpec.of(function)
    with pytest.raises(TransformError, match=exactly(f"the transform {spec.label} cannot be written as code: {why}")):
        source_to_share(spec)


def test_text_is_shared_as_it_is() -> None:
    for text in ("def transform(graft_input):\n    return graft_input.own\n", "math.sin"):
        assert source_to_share(TransformSpec.of(text)) == text
