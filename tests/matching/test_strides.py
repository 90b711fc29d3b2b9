"""Strides are fitted to values alone, and put into the words of a layout that gives the tensor again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from torch import Tensor

from graftlab.layouts import parse_layout
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.search import find
from graftlab.matching.sketch import EXTREMES, alike, covers, flat_values, sketch_of
from graftlab.matching.strides import (
    Lookup,
    Strides,
    _splits,
    fit,
    fit_places,
    permutations,
    reorderings,
    sampled,
    slices,
)
from graftlab.matching.wording import layout_of


def fitted(whole: Tensor, part: Tensor, tolerance: float = 1e-9) -> str | None:
    elements = sampled(part.numel(), sketch_of(part))
    values = flat_values(part)
    found = fit(Lookup(flat_values(whole)), whole.numel(), elements, values[elements], part.shape, tolerance)
    if found is None:
        return None
    assert np.array_equal(found.taken(flat_values(whole)), values)
    layout = layout_of(found, whole.shape, part.shape)
    assert torch.equal(layout.local(whole), part), layout
    return layout.text


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "made", "text"),
    [
        ((12, 8), "a b -> b a", "a b -> b a"),
        ((2, 9, 24), "b s (h d) -> b h s d, h=4", "rearrange('a b (c d) -> a c b d', d=6)"),
        ((2, 4, 9, 6), "b h s d -> b s (h d)", "a b c d -> a c (b d)"),
        ((18, 24), "(h two d) e -> (h d two) e, two=2, d=3", "rearrange('(a b c) d -> (a c b) d', b=2, c=3)"),
        ((36, 8), "part(index=1, of=[1, 1, 1])", "part(index=1, of=[1, 1, 1], dim=0)"),
        ((36, 8), "part(index=2, of=[1, 1, 1], groups=4)", "part(index=2, of=[1, 1, 1], dim=0, groups=4)"),
        ((48, 8), "part(index=0, of=[4, 2])", "part(index=0, of=[2, 1], dim=0)"),
        ((48, 8), "part(index=1, of=[4, 1, 1], groups=2)", "part(index=4, of=[1, 1, 1, 1, 1, 1], dim=0, groups=2)"),
        ((48, 8), "part(index=0, of=[4, 1, 1], groups=2)", "part(index=0, of=[2, 1], dim=0, groups=2)"),
        ((8, 36), "part(index=1, of=[1, 1, 1], dim=1) | a b -> b a", "part(index=1, of=[1, 1, 1], dim=1) | a b -> b a"),
        ((20, 6), "window(dim=0, start=2, length=18)", "part(index=1, of=[1, 9], dim=0)"),
        ((4, 6, 5), "a b c -> a (b r) c, r=3", "rearrange('a b c -> a (b d) c', d=3)"),
        ((4, 6, 5), "a b c -> 1 (a b) c", "a b c -> 1 (a b) c"),
        ((4, 6), "a b -> a 1 b", "a b -> a 1 b"),
    ],
)
def test_a_layout_is_found_and_written_in_einops_notation(shape: tuple[int, ...], made: str, text: str) -> None:
    whole = random(*shape)
    assert fitted(whole, parse_layout(made).local(whole)) == text


@examples(150)
@given(st.data())
def test_every_found_layout_reproduces_the_tensor(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 4, 5]), min_size=3, max_size=5))
    whole = random(*sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    view = whole.permute(order)
    for dim in range(view.dim()):
        if data.draw(st.integers(0, 3)) == 0 and view.numel() > 60:
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
    merge = data.draw(st.integers(0, view.dim() - 2))
    part = view.flatten(merge, merge + 1)
    # Its dimensions are merged too, so that they must be found.
    flat = whole.flatten(1, 2)
    text = fitted(flat, part)
    if part.numel() >= 24:
        assert text is not None


def test_unrelated_values_have_no_layout() -> None:
    assert fitted(random(36, 8), random(12, 8, seed=1)) is None
    whole = random(36, 8)
    shuffled = whole.flatten()[torch.randperm(whole.numel(), generator=torch.Generator().manual_seed(1))]
    assert fitted(whole, shuffled.reshape(36, 8)) is None


@pytest.mark.parametrize(
    ("shape", "made"),
    [
        ((2, 7, 48), "part(index=1, of=[1, 1, 1], dim=2)"),
        ((2, 7, 48), "part(index=2, of=[1, 1, 1], dim=2) | a b c -> b a c"),
        ((2, 7, 48), "part(index=0, of=[4, 1, 1], dim=2) | a b (h d) -> a h b d, d=8"),
        ((2, 7, 48), "part(index=2, of=[4, 1, 1], dim=2)"),
        ((2, 7, 40), "part(index=1, of=[3, 2], dim=2)"),
        ((2, 7, 48), "part(index=1, of=[1, 1, 1], dim=2, groups=4) | a b (h d) -> a h b d, d=4"),
        ((6, 7, 8), "part(index=1, of=[1, 1, 1], dim=0)"),
    ],
)
def test_the_parts_tried_under_noise_include_the_usual_ones(shape: tuple[int, ...], made: str) -> None:
    whole = random(*shape)
    part = parse_layout(made).local(whole)
    found = [
        each for each in slices(shape, part.shape) if np.array_equal(each.taken(flat_values(whole)), flat_values(part))
    ]
    assert found
    assert torch.equal(layout_of(found[0], whole.shape, part.shape).local(whole), part)
    assert all(each.fits(whole.numel()) for each in slices(shape, part.shape))


@pytest.mark.parametrize("size", [2, 3])
def test_the_arrangements_tried_under_noise_split_a_dimension_in_either_order(size: int) -> None:
    whole = random(6, 5)
    made = parse_layout(f"(a b) c -> b (a c), b={size}").local(whole)
    assert any(
        np.array_equal(each.taken(flat_values(whole)), flat_values(made)) for each in permutations((6, 5), made.shape)
    )


@pytest.mark.parametrize("text", ["a (b c) -> a (c b), c=12", "(a b) c -> (b a) c, b=6", "(a b) c -> c (b a), b=6"])
def test_a_rounded_weight_is_found_in_an_order_that_no_shape_shows(text: str) -> None:
    # As a head that reads channels and patches. Of uniform numbers in 16 bits, hardly one is unique.
    weight = torch.rand(24, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    layout = parse_layout(text)
    found = find(RecordedTap.of("head", weight), RecordedTap.of("head", layout.local(weight).contiguous()))
    assert found is not None
    assert found.exact
    assert torch.equal(found.layout.local(weight), layout.local(weight))


def test_a_tensor_as_large_as_the_whole_is_not_a_part() -> None:
    assert list(slices((2, 6), (2, 6))) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_is_found_with_its_features_flattened_in_another_order(dtype: torch.dtype) -> None:
    weight = random(24, 384).to(dtype)
    made = parse_layout("a (b c) -> a (c b), c=12").local(weight)
    found = find(RecordedTap.of("w", weight), RecordedTap.of("v", made))
    assert found is not None
    assert found.exact
    assert torch.equal(found.layout.local(weight), made)
    shuffled = made.flatten()[torch.randperm(made.numel())].view_as(made)
    assert find(RecordedTap.of("w", weight), RecordedTap.of("v", shuffled)) is None


def test_reorderings_split_dimensions_anywhere_and_differ_from_each_other() -> None:
    found = list(reorderings((4, 6)))
    assert len({tuple(each.places(np.arange(24)).tolist()) for each in found}) > 20
    assert all(sorted(each.places(np.arange(24)).tolist()) == [*range(24)] for each in found)


@pytest.mark.parametrize(("part", "of"), [(0, [1, 1, 1]), (2, [1, 1, 1]), (0, [4, 1, 1]), (1, [4, 1, 1])])
def test_a_part_is_found_under_a_half_width_dtypes_noise(part: int, of: list[int]) -> None:
    x, weight = random(2, 11, 48), random(48, 96, seed=1)
    layout = parse_layout(f"part(index={part}, of={of}, dim=2) | a b c -> b a c")
    # Not the rounded values alone: sums of rounded products.
    narrow = layout.local(x.bfloat16() @ weight.bfloat16())
    found = find(RecordedTap.of("qkv", (x @ weight).float()), RecordedTap.of("part", narrow))
    assert found is not None
    assert torch.equal(found.layout.local(x @ weight), layout.local(x @ weight))
    unrelated = random(*narrow.shape, seed=2).bfloat16() * narrow.std()
    assert find(RecordedTap.of("qkv", (x @ weight).float()), RecordedTap.of("part", unrelated)) is None


def test_a_part_is_found_under_the_rounding_of_another_order_of_sums() -> None:
    whole, layout = random(36, 48), parse_layout("part(index=1, of=[1, 1, 1], groups=4) | a b -> b a")
    rounded = whole * (1 + 1e-5 * random(36, 48, seed=1))
    found = find(RecordedTap.of("x", whole.float()), RecordedTap.of("y", layout.local(rounded).float()))
    assert found is not None
    assert torch.equal(found.layout.local(whole), layout.local(whole))


@pytest.mark.parametrize("large", [4, 5])
def test_a_value_has_the_place_of_the_only_near_one(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.matching.strides._LARGE", large)
    held = np.array([5.0, 1.0, 3.0, 3.2])
    # Within the tolerance, on either side; in between; with two that are near.
    values = np.array([1.05, 0.95, 1.2, 0.8, 3.0])
    for lookup, (first, second) in ((Lookup(held), (0, 1)), (Lookup(held, np.array([9, 7, 5, 3])), (9, 7))):
        assert lookup.unique(values, 0.1).tolist() == [second, second, -1, -1, -1]
        assert lookup.unique(np.array([5.0, 0.0, 1.0]), 0.1).tolist() == [first, -1, second]
        # All places are only worth sorting in a small tensor.
        assert ("places" in vars(lookup)) == (large > len(held))


@pytest.mark.parametrize("shape", [(6,), (4, 9), (4, 3, 12), (2, 6, 5, 8)])
def test_each_split_of_a_shape_has_all_of_its_elements(shape: tuple[int, ...]) -> None:
    splits = list(_splits(shape))
    assert splits[0] == shape
    assert {math.prod(each) for each in splits} == {math.prod(shape)}
    assert all(1 not in each for each in splits)
    # One dimension in two, two of them, and one in three.
    assert {len(each) - len(shape) for each in splits} <= {0, 1, 2}


def test_each_arrangement_that_is_tried_has_all_elements_of_the_whole() -> None:
    # No place is taken by one that cannot fit, since only the first ones are tried.
    assert {math.prod(each.radices) for each in permutations((6, 4), (4, 3, 2))} == {24}
    assert {math.prod(each.radices) for each in permutations((1, 5), (2, 5))} == {5}


def test_a_sketch_counts_numbers_that_are_not_finite() -> None:
    values = torch.arange(100.0)
    values[3:5], values[50] = math.nan, math.inf
    sketch = sketch_of(values)
    assert (sketch.nonfinite, sketch.numel) == (3, 100)
    assert sketch.rms == pytest.approx(float(values[values.isfinite()].square().mean().sqrt()))
    # They cannot be compared.
    assert sketch.extremes.tolist() == [each for each in range(99, -1, -1) if each not in (3, 4, 50)][:EXTREMES]
    assert sketch_of(torch.full((4,), math.nan)).nonfinite == 4


def test_the_extremes_of_a_sketch_are_its_largest_magnitudes_first_the_largest() -> None:
    values = torch.arange(1.0, 1001.0) * torch.tensor([1.0, -1.0]).repeat(500)
    sketch = sketch_of(values)
    assert sketch.places.tolist() == list(range(999, 999 - EXTREMES, -1))
    assert sketch.extremes.tolist() == values[sketch.places].tolist()
    assert (len(sketch.extremes), len(sketch.quantiles)) == (64, 33)
    # Of equal ones, the first.
    assert sketch_of(torch.ones(1000)).places.tolist() == list(range(EXTREMES))


def test_strides_are_fitted_only_to_enough_places_that_show_them_and_only_if_all_do() -> None:
    whole = flat_values(random(400))
    lookup = Lookup(whole)

    def found(values: np.ndarray, shape: tuple[int, ...] = (160,)) -> Strides | None:
        return fit(lookup, 400, np.arange(len(values)), values, shape, 1e-9)

    for known, is_found in ((19, False), (20, True), (160, True)):
        values = np.concatenate([whole[40 : 40 + known], np.full(160 - known, 50.0)])
        assert found(values) == (Strides(40, (160,), (1,)) if is_found else None)
    # All of these are in the first row, so that they show no distance between rows.
    assert found(whole[:16], (4, 16)) is None
    wrong = whole[:160].copy()
    wrong[150] = whole[399]
    assert found(wrong) is None


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(2, 4), st.sampled_from([1, 2, 5, 12, 60])), min_size=1, max_size=3),
)
def test_places_of_strides_have_strides_again(offset: int, digits: list[tuple[int, int]]) -> None:
    made = Strides(offset, *(tuple(each) for each in zip(*digits, strict=True)))
    count = math.prod(made.radices)
    places = made.places(np.arange(count))
    largest = int(places.max())
    assert (made.fits(largest + 1), made.fits(largest)) == (True, False)
    assert np.array_equal(made.taken(np.arange(largest + 1)), places)
    found = fit_places(places, made.radices)
    assert found is not None
    assert np.array_equal(found.places(np.arange(count)), places)
    # One element has a place, too.
    assert fit_places(places[-1:], (1,)) == Strides(largest, (1,), (1,))


def test_tensors_with_other_numbers_of_finite_elements_are_not_alike() -> None:
    sketch = sketch_of(torch.arange(100.0))
    broken = torch.arange(100.0)
    broken[50] = math.nan
    near, far = torch.arange(100.0) * 1.001, torch.arange(100.0) * 1.1
    others = (torch.arange(100.0).flip(0), near, far, torch.arange(101.0), broken)
    assert [alike(sketch, sketch_of(each), 1e-2) for each in others] == [True, True, False, False, False]
    lost = sketch_of(torch.full((100,), math.nan))
    assert not alike(lost, lost, 1e-2)


def test_a_whole_covers_parts_within_its_range_up_to_rounding() -> None:
    whole = sketch_of(torch.arange(100.0))
    ranges = [(0.0, 99.0), (20.0, 30.0), (0.0, 100.0), (-1.0, 99.0), (0.0, 102.0), (-2.0, 99.0)]
    found = [covers(whole, sketch_of(torch.linspace(*each, 16)), 1e-2) for each in ranges]
    assert found == [True, True, True, True, False, False]
    lost = sketch_of(torch.full((100,), math.nan))
    assert not covers(whole, lost, 1e-2)
    assert not covers(lost, whole, 1e-2)


def test_one_number_unlike_thousands_of_others_is_seen() -> None:
    for at in (0, 5000, 9999):
        for other in (-1.0, 1.0):
            values = torch.zeros(10_000)
            values[at] = other
            assert not sketch_of(values).constant
    assert sketch_of(torch.zeros(10_000)).constant


@pytest.mark.parametrize(
    ("found", "whole", "shape", "text"),
    [
        (Strides(0, (24,), (1,)), (24,), (4, 6), "rearrange('(a b) -> a b', b=6)"),
        (Strides(0, (24,), (1,)), (4, 6), (24,), "a b -> (a b)"),
        (Strides(0, (24,), (1,)), (2, 12), (8, 3), "rearrange('a (b c) -> (a b) c', c=3)"),
        (Strides(0, (24,), (1,)), (4, 6), (4, 6), "same"),
        (Strides(0, (6, 4), (1, 6)), (4, 6), (6, 4), "a b -> b a"),
        (Strides(0, (6, 4), (1, 6)), (4, 6), (24,), "a b -> (b a)"),
        (Strides(6, (6,), (1,)), (4, 6), (6,), "window(dim=0, start=1, length=1) | 1 a -> a"),
        (Strides(18, (6,), (1,)), (4, 6), (6,), "window(dim=0, start=-1, length=1) | 1 a -> a"),
        (Strides(12, (12,), (1,)), (4, 6), (2, 6), "part(index=1, of=[1, 1], dim=0)"),
        (Strides(0, (3, 6), (6, 1)), (4, 6), (3, 6), "part(index=0, of=[3, 1], dim=0)"),
    ],
)
def test_strides_are_put_into_words_whatever_digits_they_were_found_in(
    found: Strides, whole: tuple[int, ...], shape: tuple[int, ...], text: str
) -> None:
    layout = layout_of(found, whole, shape)
    assert layout.text == text
    values = torch.arange(math.prod(whole))
    assert layout.local(values.reshape(whole)).flatten().tolist() == found.taken(values.numpy()).tolist()


def test_a_few_extreme_values_that_are_near_show_no_partner() -> None:
    for size, is_found in ((7, False), (8, True)):
        taps = [RecordedTap.of(name, random(size), keep=False) for name in "xy"]
        found = find(taps[0], taps[1])
        assert (found is not None) == is_found
        if found is not None:
            assert (found.sampled, found.exact, found.rel) == (True, False, 0.0)
