"""What is no transform: all of what is said, with what was given and the signature to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.refusals import ids, refusal

from graftlab.transforms.code import source_to_share
from graftlab.transforms.spec import TransformSpec, specs_of

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: TransformSpec.of(3),
        "a transform is a dotted path, source text or a function, not int; its signature is `def "
        "transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`",
    ),
    (
        lambda: TransformSpec.of((" ", "math.sin")),
        "the filter of a transform is blank, which matches no tap; write 'True' for all taps, or "
        "give the transform without a filter for the taps that the plan grafts",
    ),
    (
        lambda: specs_of([3]),
        "a transform is a dotted path, source text or a function, not int; its signature is `def "
        "transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`",
    ),
    (
        lambda: TransformSpec.of(("name == 'a'",)),
        "a transform for certain taps is (filter, transform), e.g. (\"name == 'qkv'\", f), and several "
        "are a list of such pairs, not (\"name == 'a'\",)",
    ),
    (
        lambda: TransformSpec("path", "nowhere.at_all.f").load(),
        "transform 'nowhere.at_all.f': module 'nowhere.at_all' cannot be imported: No module named 'nowhere'",
    ),
    (
        lambda: TransformSpec("path", "math.nothing").load(),
        "transform 'math.nothing': module 'math' has no function 'nothing'",
    ),
    (
        lambda: TransformSpec("path", "math").load(),
        "transform 'math' is not a dotted path; write 'package.module.function', or pass the function itself",
    ),
    (
        lambda: TransformSpec("path", "math.pi").load(),
        "transform 'math.pi': module 'math' has no function 'pi'",
    ),
    (
        lambda: TransformSpec("source", "def transform(): return 1").load(),
        "transform transform (text 2af111) takes (), and is called with one argument; write `def "
        "transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`",
    ),
    (
        lambda: TransformSpec("source", "def transform(a, b, c): return 1").load(),
        "transform transform (text aa119a) takes (a, b, c), and is called with one argument; write "
        "`def transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`",
    ),
    (
        lambda: TransformSpec("source", "def transform(").load(),
        "the transform's source does not compile, line 1: '(' was never closed",
    ),
    (
        lambda: source_to_share(TransformSpec.of([].append)),
        "the transform list.append cannot be written as code: it is a builtin_function_or_method, "
        "not a function; write a function that calls it",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_what_is_no_transform_is_named_with_what_is(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
