"""The order of features within heads: which orders of two parameters can be those of one attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from graftlab.layouts import parse_layout
from graftlab.matching.heads import _agree, _along, _head_size, _Heads, _order, _strides, odd_gates, odd_heads
from graftlab.matching.pair import Pair
from graftlab.matching.recorded_taps import RecordedTap

HALVES = "rearrange('(h i two) d -> (h two i) d', i=2, two=2)"
PLAIN, IN_TWOS, IN_FOURS = [0, 1, 2, 3, 4, 5, 6, 7], [1, 0, 3, 2, 5, 4, 7, 6], [0, 2, 1, 3, 4, 6, 5, 7]
TURNED = [0, 2, 4, 6, 1, 3, 5, 7]


def heads(order: Sequence[int]) -> _Heads:
    made = np.array(order)
    return _Heads(Pair("a", "b"), made, _head_size(made))


@pytest.mark.parametrize(
    ("order", "size"),
    [
        *((PLAIN, None), (IN_TWOS, 2), (IN_FOURS, 4), (TURNED, None)),
        # Not all heads alike, and whole heads in another order.
        *(([1, 0, 2, 3], None), ([2, 3, 0, 1], None), ([1, 0], None), ([1, 2, 0, 4, 5, 3], 3)),
    ],
)
def test_the_size_of_heads_is_the_smallest_that_all_rows_repeat(order: list[int], size: int | None) -> None:
    assert _head_size(np.array(order)) == size


def test_an_order_is_stated_in_words() -> None:
    assert heads(PLAIN).words == "in the same order"
    assert heads(IN_FOURS).words == "reordered in heads of 4 rows"
    assert heads(TURNED).words == "in another order"


@pytest.mark.parametrize(
    ("order", "extents"),
    [(TURNED, (4, 2)), ([0, 4, 1, 5, 2, 6, 3, 7], (2, 4)), (PLAIN, None), ([0, 2, 1, 3], (2, 2)), ([0, 2, 3, 1], None)],
)
def test_a_transposition_of_whole_heads_has_two_extents(order: list[int], extents: tuple[int, int] | None) -> None:
    assert _strides(np.array(order)) == extents
    assert _strides(np.array([0])) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        *((PLAIN, PLAIN, True), (IN_TWOS, IN_TWOS, True), (IN_FOURS, IN_FOURS, True)),
        # Fewer heads of keys, in the same order.
        *((PLAIN[:4], PLAIN, True), (IN_TWOS[:4], IN_TWOS, True), (IN_FOURS[:4], IN_FOURS, True)),
        *((PLAIN, IN_FOURS, False), (IN_TWOS, IN_FOURS, False), (PLAIN[:4], IN_FOURS, False)),
        # Heads of one size, each in another order.
        (IN_FOURS, [3, 1, 2, 0, 7, 5, 6, 4], False),
        ([0, 2, 3, 1], TURNED, True),
        # One head of keys in another order.
        ([1, 0, 2, 3], IN_FOURS, False),
        # Whole heads in another order fit where one of two extents is the same, and the parameters differ in size.
        ([0, 2, 1, 3], TURNED, True),
        ([0, 4, 1, 5, 2, 6, 3, 7], TURNED, False),
        # What is no such order may be right.
        ([3, 1, 0, 2], TURNED, True),
    ],
)
def test_two_orders_can_be_those_of_one_attention(one: list[int], other: list[int], expected: bool) -> None:
    assert _agree(heads(one), heads(other)) == _agree(heads(other), heads(one)) == expected


def test_the_dimension_along_which_values_vary_is_found() -> None:
    rows = torch.arange(3)[:, None].expand(3, 2)
    for values, dim in ((rows, 0), (rows.T, 1)):
        found = _along(values)
        assert found is not None
        assert (found[0], found[1].tolist()) == (dim, [0, 1, 2])
    assert _along(torch.arange(6).reshape(3, 2)) is None


def test_the_order_of_a_layout_is_that_of_rows_or_for_outputs_of_columns() -> None:
    def order(text: str, *shape: int, columns: bool = False, whole: str = "baseline") -> list[int] | None:
        found = _order(Pair("a", "b", parse_layout(text), whole), shape, columns=columns)  # type: ignore[arg-type]
        return None if found is None else found.tolist()

    assert order("same", 4, 3) == order("same", 4) == [0, 1, 2, 3]
    assert order("same", 3, 4, columns=True) == order("a b -> b a", 4, 3, columns=True) == [0, 1, 2, 3]
    assert order(HALVES, 8, 3) == IN_FOURS
    # A part counts from its own first row.
    assert order(f"part(index=1, of=[1, 1], dim=0) | {HALVES}", 16, 3) == IN_FOURS
    # A target that is the whole has the places of the baseline's rows.
    turned = "rearrange('(a b) d -> (b a) d', b=2)"
    assert order(turned, 8, 3) == TURNED
    assert order(turned, 8, 3, whole="target") == np.argsort(TURNED).tolist()
    for shape in ((), (2, 2, 2), (1, 3), (5, 3)):
        assert order(HALVES, *shape) is None
    assert order("same", 4, columns=True) is None
    assert order("(a b) c -> a (b c), a=2", 4, 3) is None


def test_queries_and_keys_of_other_orders_are_named_unless_known_to_be_wrong() -> None:
    def named(odd: Sequence[str] = (), **layouts: str) -> list[str]:
        pairs = [
            Pair(f"a.{role}_proj.weight", f"b.{role}_proj.weight", parse_layout(text)) for role, text in layouts.items()
        ]
        items = {pair.baseline: RecordedTap.of(pair.baseline, torch.zeros(8, 8)) for pair in pairs}
        return [each.tap for each in odd_heads(pairs, items, {}, odd)]

    assert named(q=HALVES, k="same") == ["b.k_proj.weight"]
    assert named(q=HALVES, k=HALVES) == named(q="same", k="same") == named(q=HALVES) == []
    assert named(v=HALVES, o="same") == ["b.o_proj.weight"]
    assert named(v="same", o="same", q=HALVES, k=HALVES) == []
    assert named(("b.q_proj.weight",), q=HALVES, k="same") == []


def test_gates_of_one_layer_in_another_order_are_named() -> None:
    turned = "rearrange('(two a b) -> (two b a)', two=1, a=2)"

    def named(
        *texts: str, names: Sequence[str] = ("bias_ih_l0", "bias_hh_l0", "bias_ih_l1", "bias_hh_l1")
    ) -> list[str]:
        pairs = [Pair(f"a.{name}", f"b.{name}", parse_layout(text)) for name, text in zip(names, texts, strict=False)]
        items = {pair.baseline: RecordedTap.of(pair.baseline, torch.zeros(8)) for pair in pairs}
        return [each.tap for each in odd_gates(pairs, items)]

    assert named("same", "same", "same", turned) == ["b.bias_hh_l1"]
    assert named(turned, "same", "same", "same") == ["b.bias_ih_l0"]
    # Another layer, direction or module may have another order.
    assert named("same", "same", turned, turned) == []
    assert named("same", turned, names=("bias_ih_l0", "bias_ih_l0_reverse")) == []
    assert named("same", turned, names=("x.bias_ih", "y.bias_ih")) == []
    assert named("same", turned, names=("x.bias_ih", "x.bias_hh")) == ["b.x.bias_hh"]
    assert named("same", turned, names=("x.bias", "x.other")) == []
