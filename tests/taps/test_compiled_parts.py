"""What taps in compiled code are made of, without a compiler: text for tags, and how a tensor lies in memory."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.errors import FilterError, TagError
from graftlab.layouts import Layout
from graftlab.taps import compiled


@pytest.mark.parametrize(
    ("tensor", "overlaps", "is_dense"),
    [
        (torch.zeros(3, 4), False, True),
        (torch.zeros(3, 4).T, False, True),
        (torch.zeros(2, 1, 3).transpose(0, 2), False, True),
        (torch.zeros(8)[::2], False, False),
        (torch.zeros(4, 4)[:, :3], False, False),
        (torch.tensor(1.0), False, True),
        (torch.zeros(1).expand(3), True, False),
        (torch.zeros(1, 4).expand(3, 4), True, False),
        (torch.zeros(7).unfold(0, 3, 1), True, False),
        # Each window begins with the last number of the one before it.
        (torch.zeros(7).unfold(0, 3, 2), True, False),
        (torch.zeros(6).unfold(0, 3, 3), False, True),
    ],
)
def test_how_a_tensor_lies_in_memory_is_known(tensor: torch.Tensor, overlaps: bool, is_dense: bool) -> None:
    assert compiled._overlaps_itself(tensor) == overlaps
    assert overlaps or compiled._is_dense(tensor) == is_dense


def test_tags_in_compiled_code_are_text_numbers_or_none() -> None:
    assert compiled.as_text("gl.tap('x')", {"a": None, "b": True, "c": 1.5, "d": "x"}) == [
        *("a=None", "b=True", "c=1.5", "d='x'")
    ]
    for wrong in (object(), [1], torch.ones(1)):
        with pytest.raises(TagError, match=r"tag 'a' of gl.tap\('x'\) has the type .* in compiled code a tag is text"):
            compiled.as_text("gl.tap('x')", {"a": wrong})


def test_what_a_graph_cannot_contain_is_refused_before_anything_is_shown() -> None:
    x: Any = torch.ones(2)
    with pytest.raises(TagError, match=exactly("gl.tap: the name must be a string")):
        compiled.tap(3, x, None, {})
    with pytest.raises(TagError, match=r"layout of gl.tap\('x'\): in compiled code a layout is given as text"):
        compiled.tap("x", x, None, {}, layout=Layout())


def test_a_choice_of_taps_that_is_no_filter_leaves_the_one_before() -> None:
    before = compiled._choice
    with pytest.raises(FilterError):
        gl.compile_taps("name ==")
    assert compiled._choice == before


@pytest.mark.parametrize(
    ("state", "expected"), [({"aot_compilation": True}, True), ({"aot_compilation": 0}, False), ({}, False)]
)
def test_only_a_compilation_ahead_of_time_is_taken_for_one(
    state: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch._inductor.virtualized", SimpleNamespace(V=SimpleNamespace(**state)))  # type: ignore[arg-type]
    assert compiled._is_for_aot_inductor() is expected
    monkeypatch.delitem(sys.modules, "torch._inductor.virtualized")
    assert compiled._is_for_aot_inductor() is False


def test_each_set_of_names_has_a_choice_that_ends_with_its_block() -> None:
    before = compiled._choice
    chosen = []
    for names in (("a",), ("b", "c"), ("a",)):
        with compiled.only_taps(names):
            chosen.append(compiled._choice)
            assert [each for each in "abc" if compiled._is_chosen(each, (), str(compiled._choice))] == [*names]
        assert compiled._choice == before
    assert len({*chosen}) == 2
    assert chosen[0] == chosen[2]
