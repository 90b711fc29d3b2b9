"""Rows of one tensor are found in another by value; which of several equal ones, by the rows beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.layouts.row_alignment import FoundRows, ShownRows, _drawn, aligned, rows_between

PAD = 0


def found(whole: list[int], part: list[int], place: int = -1, lengths: tuple[int, int] = (0, 0)) -> list[int]:
    """Where rows of token ids are found."""
    outer, inner = (np.array(rows, dtype=np.float64)[:, None] for rows in (whole, part))
    index: list[int] = aligned(outer, inner, 0.0, place, lengths)[0].tolist()
    return index


@pytest.mark.parametrize(
    ("whole", "part", "place", "lengths", "rows"),
    [
        pytest.param([5, 6, 7], [7, 8, 5], -1, (0, 0), [2, -1, 0], id="a row that the whole lacks"),
        pytest.param([1, 2, 9, 1, 2, 3], [1, 2, 3], -1, (0, 0), [3, 4, 5], id="the longest stretch"),
        pytest.param([1, 2, 8, 1, 2, 9], [1, 2], 2, (0, 0), [3, 4], id="of equal stretches that behind the place"),
        pytest.param([1, 2, 8, 1, 2, 9], [1, 2, 8], 2, (0, 0), [0, 1, 2], id="the longest before that at the place"),
        pytest.param([1, 8, 1, 9, 1], [1], 1, (0, 0), [2], id="a single row behind the place"),
        pytest.param([8, 1, 9, 1], [1], -1, (0, 0), [3], id="a single row without a place: the last"),
        pytest.param([1, 2, 5, 1, 2, 6], [1, 2], -1, (0, 0), [0, 1], id="of equal stretches the first"),
        pytest.param([3, 1, 2, 9, 5, 1, 2, 8], [1, 2, 7, 9], -1, (0, 0), [5, 6, -1, 3], id="one that ends a sequence"),
        pytest.param([3, 2, 3, 2], [2], -1, (2, 0), [3], id="a single row beside sequences: the last"),
        pytest.param([3, 3, 3, 1], [3], -1, (2, 0), [0], id="a single row at the beginning of sequences"),
        pytest.param(
            [3, 3, 4, 3], [3, 5, 1, 4, 4, 3], -1, (0, 0), [0, -1, -1, -1, 2, 3], id="a row alone gives way to a stretch"
        ),
        pytest.param([1, 1], [1, 1, 1], -1, (0, 0), [0, 1, -1], id="no row twice"),
        pytest.param([1, 2, 3, 4], [3, 4, 1, 2], -1, (0, 0), [2, 3, 0, 1], id="another order"),
        # Sequences of one length on both sides.
        pytest.param([1, 2, 3, 1, 2, 4], [1, 2, 4, 1, 2, 3], -1, (3, 3), [3, 4, 5, 0, 1, 2], id="swapped sequences"),
        pytest.param([1, 2, 1, 2], [1, 2, 1, 2], -1, (2, 2), [0, 1, 2, 3], id="equal sequences in their places"),
        pytest.param([1, 2, 3, 4], [1, 4], -1, (2, 2), [0, -1], id="a sequence has rows of one sequence"),
        pytest.param([1, 2, 3, 4], [2, 1], -1, (4, 2), [1, -1], id="a sequence has its rows in their order"),
        pytest.param([1, 2, 7, 3, 5, 4], [3, 9, 4], -1, (3, 3), [3, -1, 5], id="behind a row that the whole lacks"),
        pytest.param([1, 2, 9, 3, 5, 6], [1, 8, 3], -1, (3, 3), [0, -1, -1], id="not in another sequence"),
        # One side packed, the other padded.
        pytest.param([1, 2, 3, 4, 5], [1, 9, 3], -1, (0, 3), [0, -1, -1], id="packed rows follow each other"),
        pytest.param(
            [1, 2, 3, 4, 9, 1, 5], [9, 1, 2, 3], -1, (0, 2), [4, 5, 1, 2], id="the end of the sequence before"
        ),
        pytest.param(
            [5, 1, 9, 2, 3, 4, 6, 8, 9], [8, 9, 2, 3, 4], -1, (3, 0), [7, 8, 3, 4, 5], id="the row before a sequence"
        ),
        pytest.param(
            [1, 2, 3, PAD, 1, 4, PAD, PAD],
            [1, 4, 1, 2, 3],
            -1,
            (4, 0),
            [4, 5, 0, 1, 2],
            id="unpadded, sorted otherwise",
        ),
        pytest.param(
            [1, 4, 1, 2, 3], [1, 2, 3, PAD, 1, 4, PAD, PAD], -1, (0, 4), [2, 3, 4, -1, 0, 1, -1, -1], id="padded"
        ),
    ],
)
def test_equal_rows_are_distinguished_by_those_beside_them(
    whole: list[int], part: list[int], place: int, lengths: tuple[int, int], rows: list[int]
) -> None:
    assert found(whole, part, place, lengths) == rows


def test_the_part_of_rows_that_is_unique_is_returned() -> None:
    outer = np.array([[1.0], [2.0], [2.0], [3.0]])
    assert aligned(outer, outer, 0.0)[1] == (1 + 0.5 + 0.5 + 1) / 4
    assert aligned(outer, np.array([[7.0]]), 0.0)[1] == 0.0


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Sequences that begin alike and differ then, an order of some of them, and a length to pad to."""
    count = draw(st.integers(1, 5))
    common = draw(st.lists(st.integers(1, 3), max_size=3))
    sequences = [[*common, 10 + n, *draw(st.lists(st.integers(1, 3), max_size=4)), 20 + n] for n in range(count)]
    order = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
    return sequences, order, max(map(len, sequences)) + draw(st.integers(0, 2))


@given(batches())
def test_sequences_that_begin_alike_are_found_whole_in_any_order(case: tuple[list[list[int]], list[int], int]) -> None:
    sequences, order, width = case
    begins = np.cumsum([0, *map(len, sequences)]).tolist()
    packed = [token for each in sequences for token in each]
    padded = [token for each in sequences for token in (*each, *[PAD] * (width - len(each)))]
    part = [token for n in order for token in sequences[n]]
    part_padded = [token for n in order for token in (*sequences[n], *[PAD] * (width - len(sequences[n])))]

    def tokens(index: list[int], rows: list[int]) -> list[int]:
        """The places of what is no padding."""
        return [place for place, token in zip(index, rows, strict=True) if token != PAD]

    in_packed = [begins[n] + at for n in order for at in range(len(sequences[n]))]
    in_padded = [n * width + at for n in order for at in range(len(sequences[n]))]
    several = width if len(order) > 1 else 0
    assert found(packed, part) == in_packed
    assert tokens(found(packed, part_padded, -1, (0, several)), part_padded) == in_packed
    if len(sequences) > 1:
        assert found(padded, part, -1, (width, 0)) == in_padded
        assert tokens(found(padded, part_padded, -1, (width, several)), part_padded) == in_padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_values_are_found_despite_rounding(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    whole = torch.randn(300, 24, generator=generator)
    order = torch.arange(300).reshape(15, 20)[torch.randperm(15, generator=generator)[:10]].flatten()
    part = whole[order].to(dtype).reshape(10, 20, 24)
    rows = rows_between([ShownRows.of(whole[None])], [ShownRows.of(part)])
    assert (rows.of, rows.into) == ((1, 300), (10, 20))
    assert rows.index.tolist() == order.tolist()


def test_rows_of_complex_values_are_known_by_both_parts() -> None:
    values = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    complex_rows = ShownRows.of(torch.view_as_complex(values))
    assert (complex_rows.dims, complex_rows.numbers) == ((3,), ShownRows.of(values.flatten(1)).numbers)


def test_values_that_differ_by_more_than_rounding_are_not_found() -> None:
    whole = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(3))
    for dtype, expected in ((torch.float32, {-1}), (torch.bfloat16, set(range(40)))):
        rows = rows_between([ShownRows.of(whole.to(dtype))], [ShownRows.of((whole * 1.01).to(dtype))])
        assert set(rows.index.tolist()) == expected


def test_rows_are_shown_alike_on_every_rank() -> None:
    value = torch.ones(3, 11)
    shown = []
    for seed in (1, 2):
        _drawn.cache_clear()
        torch.manual_seed(seed)
        shown.append(ShownRows.of(value))
    assert shown[0] == shown[1]


def test_the_smaller_side_is_looked_for_in_the_larger() -> None:
    whole, part = ShownRows.of(torch.tensor([[4, 5, 6, 7, 8]])), ShownRows.of(torch.tensor([[6, 7, 8, 9]]))
    assert rows_between([whole], [part]).index.tolist() == [2, 3, 4, -1]
    rows = rows_between([part], [whole])
    assert (rows.of, rows.into, rows.index.tolist()) == ((1, 4), (1, 5), [-1, -1, 0, 1, 2])


def test_the_inverse_of_found_rows_has_the_part_of_each_row() -> None:
    found = FoundRows((5,), (4,), np.array([2, -1, 0, 4]))
    turned = found.inverse
    assert (turned.of, turned.into, turned.index.tolist()) == ((4,), (5,), [2, -1, 0, -1, 3])
    assert turned.inverse.index.tolist() == found.index.tolist()
    # Rows of another width are none of these.
    wide, narrow = ShownRows.of(torch.ones(3, 4)), ShownRows.of(torch.ones(3, 2))
    assert rows_between([wide], [narrow]).index.tolist() == [-1] * 3


def test_decode_steps_begin_where_the_one_before_ended() -> None:
    whole = ShownRows.of(torch.tensor([1, 2, 7, 7, 7]))
    calls = [ShownRows.of(torch.tensor(rows)) for rows in ([1, 2], [7], [7], [7])]
    assert [rows_between([whole], calls[: n + 1]).index.tolist() for n in range(4)] == [[0, 1], [2], [3], [4]]
    # One of several calls beside several begins anywhere.
    two, all_five = ShownRows.of(torch.tensor([7, 8])), ShownRows.of(torch.arange(5))
    assert rows_between([two], [all_five, ShownRows.of(torch.tensor([8]))]).index.tolist() == [1]
    assert rows_between([calls[0], whole], [calls[0], calls[1]]).index.tolist() == [4]


def test_rows_of_another_kind_are_not_found() -> None:
    ids, values = ShownRows.of(torch.tensor([1, 2, 3])), ShownRows.of(torch.ones(2, 4))
    assert rows_between([ids], [values]).index.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("length", "part", "rows"),
    [
        (0, [300, 140, 301], [-1, -1, -1]),
        (0, [140, 300, 301], [-1, -1, -1]),
        (0, [140], [40]),
        (0, [300, *range(140, 150)], [-1, *range(40, 50)]),
        (0, [*range(140, 150), 170], [*range(40, 50), -1]),
        # Of sequences of two, a whole one.
        (2, [300, 104, 105, 301], [-1, 4, 5, -1]),
        (2, [300, 105, 301], [-1, -1, -1]),
        # Of sequences of twenty, what follows in the same one.
        (20, [*range(100, 110), 112], [*range(10), 12]),
        (20, [*range(100, 110), 132], [*range(10), -1]),
        (20, [*range(100, 110), 300, 112], [*range(10), -1, -1]),
    ],
)
def test_a_few_words_that_two_batches_share_are_no_sequence(length: int, part: list[int], rows: list[int]) -> None:
    whole = torch.arange(100, 200)
    shown = ShownRows.of(whole.reshape(-1, length) if length else whole)
    assert rows_between([shown], [ShownRows.of(torch.tensor(part))]).index.tolist() == rows


def test_rows_that_match_by_chance_are_free_for_the_sequence_that_has_them() -> None:
    whole = ShownRows.of(torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 1, 0, 1, 1]]))
    # The rest of the first sequence, between rows that are of both by chance.
    part = ShownRows.of(torch.tensor([9, 1, 0, 0, 0, 0, 1, 0, 0]))
    assert rows_between([whole], [part]).index.tolist() == [-1, 1, 2, 3, 4, 5, -1, -1, -1]
