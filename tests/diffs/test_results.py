"""What two calls return, compared wherever the tensors are in their results."""

from __future__ import annotations

import math
import pickle
from collections import deque, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from graftlab.diffs import results
from graftlab.diffs.results import (
    NamedTensors,
    ResultFloor,
    compare_named,
    compare_results,
    distance,
    named_tensors,
    unit_of,
    value_in_words,
    values_of_other_shapes,
    with_tensors,
    written_on_one_side,
    written_path,
)


@dataclass
class Output:
    logits: Tensor
    past: list[Any] = field(default_factory=list)


Pair = namedtuple("Pair", ["hidden", "loss"])


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_sparse_results_are_compared_by_their_numbers_and_not_by_what_they_store(
    layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = torch.tensor([[0, 1, 1], [2, 0, 0]])
    with_two = torch.sparse_coo_tensor(places, torch.tensor([1.0, 2.0, 3.0]), (2, 3), check_invariants=True)
    whole = torch.sparse_coo_tensor(places[:, :2], torch.tensor([1.0, 5.0]), (2, 3), check_invariants=True)
    found = whole.to_sparse_csr() if layout == "csr" else whole
    for limit, paths in ((1 << 24, [""]), (1, [".indices()", ".values()"])):
        monkeypatch.setattr(results, "_MOST_DENSE", limit)
        assert list(named_tensors(found)) == paths
        assert [each.rel_l2 for each in compare_named(named_tensors(with_two), named_tensors(found)).differences] == [
            *(0.0 for _ in paths)
        ]
        other = compare_named(named_tensors(with_two), named_tensors(2 * found)).differences
        assert other[-1].rel_l2 == pytest.approx(1.0)


def test_complex_results_round_like_their_parts() -> None:
    assert unit_of([[torch.ones(2, dtype=torch.complex64)]]) == unit_of([[torch.ones(2)]]) > 0
    assert unit_of([[torch.ones(2, dtype=torch.int32)]]) == 0


def test_tensors_are_found_in_mappings_sequences_named_tuples_and_dataclasses() -> None:
    result = {"out": Output(torch.ones(2), [torch.zeros(1), None]), "pair": Pair(torch.ones(1), 0.5), 3: True}
    assert list(named_tensors(result)) == [
        *("['out'].logits", "['out'].past[0]", "['pair'].hidden", "['pair'].loss", "[3]"),
    ]
    assert list(named_tensors(torch.ones(1))) == [""]
    # What a held call returns has been named already.
    assert list(named_tensors(pickle.loads(pickle.dumps(named_tensors(result))))) == list(named_tensors(result))


class Answer:
    """Neither a dataclass nor a tuple, as a server's answer may be."""

    def __init__(self, text: str, scores: Any) -> None:
        self.text, self.scores, self._cached = text, scores, torch.ones(1)


def test_arrays_texts_and_attributes_of_objects_are_compared() -> None:
    one = [Answer("a token", np.ones((2, 3), np.float32)), b"bytes", np.int64(3), np.array(["one", "two"])]
    assert list(named_tensors(one)) == ["[0].text", "[0].scores", "[1]", "[2]", "[3][0]", "[3][1]"]
    other = [Answer("a token more", np.full((2, 3), 1.5, np.float32)), b"bytes", np.int64(3), np.array(["one", "too"])]
    differences, left, *_ = compare_results(one, other)
    assert [each.path for each in differences if each.rel_l2] == ["[0].text", "[0].scores", "[3][1]"]
    assert left == []


class Slotted:
    __slots__ = ("_own", "logits", "loss")

    def __init__(self, loss: float) -> None:
        self.logits, self.loss, self._own = torch.ones(2), loss, 3


class Stop(Enum):
    LENGTH = "length"
    TOKEN = "token"


@pytest.mark.parametrize(
    ("one", "other", "paths"),
    [
        (Slotted(0.5), Slotted(0.7), [".logits", ".loss"]),
        (deque([1.0, torch.ones(1)]), deque([1.0, torch.zeros(1)]), ["[0]", "[1]"]),
        ({3, 1}, frozenset({1, 4}), [""]),
        ({"a", "b"}, {"a", "c"}, ["[0]", "[1]"]),
        (Stop.LENGTH, Stop.TOKEN, [""]),
    ],
    ids=["slots", "queue", "set of numbers", "set of texts", "enum"],
)
def test_what_a_result_holds_in_slots_queues_sets_and_enums_is_compared(one: Any, other: Any, paths: list[str]) -> None:
    assert list(named_tensors(one)) == paths
    assert [each.rel_l2 for each in compare_results(one, one).differences] == [0.0] * len(paths)
    assert compare_results(one, other).differences[-1].rel_l2 > 0
    # Objects in a set have no order that both sides share.
    assert not named_tensors({torch.ones(1), torch.ones(2)})


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.float16, np.float64, np.complex64])
def test_arrays_of_every_kind_of_number_are_compared(dtype: Any) -> None:
    values = np.array([0, 1, 1]).astype(dtype)
    [found] = named_tensors({"mask": values}).values()
    assert (found.numpy().dtype, found.tolist()) == (values.dtype, values.tolist())


def test_whole_numbers_in_lists_do_not_round() -> None:
    (difference,), *_ = compare_results([5], [6])
    assert difference.dtypes == ("int64", "int64")
    (huge,), *_ = compare_results([2**70], [2**71])
    assert huge.rel_l2 == 1.0


def test_another_number_of_tokens_is_a_result_of_another_shape() -> None:
    assert compare_results({"ids": [3, 4, 5]}, {"ids": [3, 4]}).reshaped == [
        "the result's ['ids'] has the shape [3] on the baseline and [2] on the target"
    ]


@pytest.mark.parametrize(("layers", "more"), [(1, ""), (2, ", and so has 1 more"), (3, ", and so have 2 more")])
def test_values_of_the_same_two_shapes_are_stated_once(layers: int, more: str) -> None:
    one, other = ({"keys": [torch.ones(size, 2)] * layers, "seen": torch.ones(size)} for size in (3, 4))
    keys, seen = compare_results(one, other).reshaped
    assert keys.endswith(f"['keys'][0] has the shape [3, 2] on the baseline and [4, 2] on the target{more}")
    assert seen.endswith("['seen'] has the shape [3] on the baseline and [4] on the target")


def test_state_that_calls_write_is_paired_by_its_own_place_alone() -> None:
    returned = {"": torch.ones(2), written_path("cache[0]"): torch.ones(2), written_path("mine"): torch.ones(3)}
    other = {"x": torch.ones(2), written_path("cache[0]"): torch.zeros(2), written_path("theirs"): torch.ones(3)}
    differences, left, *_ = compare_named(returned, other)
    assert [(each.path, each.rel_l2) for each in differences] == [("", 0.0), (written_path("cache[0]"), 1.0)]
    # Ports keep state of their own.
    assert left == []
    assert written_on_one_side(returned, other) == [
        "what only the baseline's call writes, to mine",
        "what only the target's call writes, to theirs",
    ]
    (said,) = values_of_other_shapes({written_path("k"): torch.ones(2)}, {written_path("k"): torch.ones(3)})
    assert said == "What the call writes to k has the shape [2] on the baseline and [3] on the target."


def test_a_result_that_contains_itself_ends() -> None:
    result: list[Any] = [torch.ones(1)]
    result.append(result)
    assert list(named_tensors(result)) == ["[0]"]


def test_values_are_paired_by_place_and_the_others_are_reported() -> None:
    differences, left, lost, reshaped = compare_results(
        {"a": torch.ones(4), "b": torch.ones(2), "c": torch.ones(1)},
        {"b": torch.ones(3), "a": torch.full((4,), 1.5), "d": torch.ones(1)},
    )
    assert [(each.path, each.rel_l2) for each in differences] == [("['a']", 0.5)]
    assert left == ["only the target returns the result's ['d']"]
    assert reshaped == ["the result's ['b'] has the shape [2] on the baseline and [3] on the target"]
    assert lost == ["only the baseline returns the result's ['c']"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_that_explains_a_difference_is_known(dtype: torch.dtype) -> None:
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    noisy = 8 * x + torch.randn(4, 9, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = {"eighth": x / 8, "eightfold": 8 * x, "noisy": noisy, "equal": x, "few": x[:1, :3] * 8}
    found = compare_named(dict.fromkeys(results, x) | {"few": x[:1, :3]}, results).differences
    factors = {each.path: each.factor for each in found}
    assert factors["eighth"] == pytest.approx(1 / 8)
    assert factors["eightfold"] == pytest.approx(8)
    assert [factors[name] for name in ("noisy", "equal", "few")] == [None] * 3


def test_whole_numbers_have_no_factor() -> None:
    x = torch.arange(1, 13)
    (found,) = compare_named({"x": x}, {"x": 2 * x}).differences
    assert found.factor is None


def test_a_list_that_is_longer_on_one_side_is_not_compared_in_part_alone() -> None:
    two, three = [[torch.ones(2)] * 2, ["a", "b"]], [[torch.ones(2)] * 3, ["a", "b", "c"]]
    assert compare_results(two, three).lost == ["only the target returns the result's [0][2], the result's [1][2]"]
    assert compare_results(three, two).lost == ["only the baseline returns the result's [0][2], the result's [1][2]"]
    # A tuple's further part, such as a cache, is another value.
    more = compare_results((torch.ones(2),), (torch.ones(2), torch.ones(3)))
    assert (more.left, more.lost) == (["only the target returns the result's [1]"], [])


def test_a_list_that_is_empty_on_one_side_is_not_compared() -> None:
    tokens = compare_results({"tokens": [], "x": 1.0}, {"tokens": [4, 2], "x": 1.0})
    assert tokens.reshaped == ["the result's ['tokens'] has the shape [0] on the baseline and [2] on the target"]
    texts = compare_results({"texts": [], "x": 1.0}, {"texts": ["a"], "x": 1.0})
    assert texts.lost == ["only the target returns the result's ['texts'][0]"]
    assert compare_results({"texts": ["a"], "x": 1.0}, {"texts": [], "x": 1.0}).lost == [
        "only the baseline returns the result's ['texts'][0]"
    ]
    # Two empty lists are alike, and show nothing.
    assert compare_results([], []) == ([], [], [], [])
    assert compare_results({"tokens": [], "x": 1.0}, {"x": 1.0}) == compare_results({"x": 1.0}, {"x": 1.0})


@pytest.mark.parametrize("name", ["past_key_values", "kv_cache", "Cache"])
def test_a_cache_that_only_the_baseline_returns_is_left_out(name: str) -> None:
    x = torch.ones(2)
    compared = compare_results({"logits": x, name: ((x, x),)}, {"logits": x})
    assert (compared.lost, len(compared.left)) == ([], 1)
    assert compare_results({"logits": x, "loss": x}, {"logits": x}).lost


def test_an_argument_that_only_the_baseline_returns_is_left_out() -> None:
    x = torch.ones(2)
    expected = NamedTensors({"logits": x, "memory": x})
    assert compare_named(expected, {"logits": x}).lost
    expected.passed_on = {"memory"}
    copies = with_tensors(expected, {path: tensor.clone() for path, tensor in expected.items()})
    compared = compare_named(copies, {"logits": x})
    assert (compared.lost, compared.left) == ([], ["only the baseline returns the result's memory"])
    # If both return it, it is compared.
    assert [each.rel_l2 for each in compare_named(copies, {"logits": x, "memory": 2 * x}).differences] == [0, 1]


def test_a_cache_in_a_tuple_of_results_is_known_by_the_names_of_its_parts() -> None:
    x = torch.ones(2)
    expected = {f"[1].layers[0].{name}": x for name in ("keys", "values", "conv_states[0]", "recurrent_states[0]")}
    compared = compare_named({"[0]": x, **expected}, {"[0]": x})
    assert (compared.lost, len(compared.left)) == ([], 1)
    # A value of another name is part of the result.
    assert compare_named({"[0]": x, "[1].layers[0].scores": x}, {"[0]": x}).lost


def test_values_without_a_common_place_are_paired_by_order_or_by_shape() -> None:
    by_order, *_ = compare_results((torch.ones(2), torch.ones(2)), {"x": torch.ones(2), "y": torch.zeros(2)})
    assert [(each.path, each.rel_l2) for each in by_order] == [("[0]", 0.0), ("[1]", 1.0)]
    by_shape, left, *_ = compare_results(torch.ones(2, 3), {"logits": torch.ones(2, 3), "hidden": torch.ones(4)})
    assert [each.path for each in by_shape] == [""]
    assert left == ["only the target returns the result's ['hidden']"]


def test_numbers_of_python_round_as_what_they_were_computed_in() -> None:
    numbers = torch.randn(20, generator=torch.Generator().manual_seed(0))
    for found, dtype in ((numbers, "float32"), (numbers.double() / 3, "float64")):
        assert [each.dtypes for each in compare_results(found[0].item(), found[0].item()).differences] == [(dtype,) * 2]
        # A long list, as of log-probabilities, is one value. Of few, each counts for itself.
        (whole,) = compare_results(found.tolist(), found.tolist()).differences
        assert whole == ("", 0.0, (dtype, dtype), None)
        assert len(compare_results(found[:5].tolist(), found[:5].tolist()).differences) == 5
    assert compare_results(numbers.tolist(), numbers[:19].tolist()).reshaped
    (lost,) = compare_results([math.nan] * 16, [1.0] * 16).differences
    assert lost.rel_l2 == math.inf


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_batch_of_one_is_compared_with_its_sequence(tokens: int) -> None:
    """An engine returns the bare logits of its tokens, and a model of a batch an output with a cache."""
    logits = torch.randn(1, tokens, 8)
    output = {"logits": logits, "past_key_values": torch.ones(1, 2, tokens, 4)}
    for factor in (1.0, 1.5):
        compared = compare_results(output, factor * logits[0])
        assert [each.path for each in compared.differences] == ["['logits']"]
        assert compared.differences[0].rel_l2 == pytest.approx(factor - 1.0)
        assert (compared.lost, compared.reshaped) == ([], [])
    # Of two that could be meant, neither is; nor is a sequence of another length.
    assert compare_results({**output, "hidden": logits[0]}, logits.squeeze()[None, None]).lost
    assert compare_results(output, torch.randn(tokens + 1, 8)).lost


def test_values_of_one_name_may_lack_a_batch_of_one_where_taps_are_matched_by_value() -> None:
    x = torch.randn(1, 5, 8)
    for name in ((), ("logits",)):
        ours, theirs = (dict.fromkeys(name, each) if name else each for each in (x, 2 * x[0]))
        (found,) = compare_results(ours, theirs, matched=True).differences
        assert found.rel_l2 == pytest.approx(1.0)
        # Code that is the same on both sides has lost a dimension there.
        assert compare_results(ours, theirs).reshaped
    assert compare_results(x, x[0, :4], matched=True).reshaped
    assert compare_results(x, x[0].T, matched=True).reshaped


def test_logits_of_the_last_position_alone_are_compared_with_the_last_of_all() -> None:
    whole = torch.randn(2, 5, 8)
    for last in (whole[:, -1:], whole[:, -1]):
        cache = {"past_key_values": torch.ones(2)}
        for one, other in (({"logits": last, **cache}, whole), (last, whole), ({"logits": whole, **cache}, last)):
            compared = compare_results(one, other)
            assert [each.rel_l2 for each in compared.differences] == [0.0]
            assert (compared.lost, compared.reshaped) == ([], [])
            assert any("only the last position was compared" in each for each in compared.left)
    # A small difference there counts, and a large one does not show that these are the same positions.
    assert compare_results(whole[:, -1] * 1.01, whole).differences[0].rel_l2 > 1e-3
    assert compare_results(torch.randn(2, 8), whole).reshaped
    # A target that returns less under the baseline's name has lost the rest.
    assert compare_results(whole, whole[:, -1]).reshaped
    assert values_of_other_shapes({"": whole}, {"": whole[:, -1]})
    assert not values_of_other_shapes({"": whole[:, -1]}, {"": whole})
    # The values of a different position are no result to clear a target with.
    for one, other in ((whole, whole[:, 3]), ({"logits": whole[:, 3]}, whole), (whole, {"logits": whole[:, 3]})):
        found = compare_results(one, other)
        assert (found.differences, len(found.lost)) == ([], 1)
        assert found.lost[0].endswith("; the smaller has the values of position 3, from 0, of the larger")
    # Zeros, or a number or two, are alike by chance.
    assert compare_results(torch.zeros(2, 8), torch.zeros(2, 5, 8)).reshaped
    assert compare_results(torch.ones(2, 2), torch.ones(2, 5, 2)).reshaped


def test_of_equal_values_the_last_place_counts_and_distances_are_the_baselines() -> None:
    row = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(0))
    whole = row.expand(2, 5, 8)
    for one, other, rel_l2 in ((row * 1.05, whole, 0.05 / 1.05), ({"x": whole}, row * 1.05, 0.05)):
        compared = compare_results(one, other)
        assert [each.rel_l2 for each in compared.differences] == [pytest.approx(rel_l2, rel=1e-4)]
        assert compared.lost == []


def test_the_numbers_of_a_set_are_in_one_order() -> None:
    assert named_tensors({8, 1, 16})[""].tolist() == [1, 16, 8]


def test_state_that_is_written_in_other_shapes_is_left_to_calls_without_grafts() -> None:
    one, other = ({"": torch.ones(2), written_path("k"): torch.ones(size)} for size in (2, 3))
    assert compare_named(one, other)[1:] == ([], [], [])


@pytest.mark.parametrize(
    ("ours", "theirs", "matched", "said"),
    [
        ((2, 3), (2, 3), False, False),
        ((2, 3), (3, 2), False, True),
        ((2, 3), (3, 2), True, False),
        ((2, 3), (2, 4), True, True),
        ((2, 3), (2, 4), False, True),
    ],
)
def test_matched_values_may_have_another_shape_of_as_many_numbers(
    ours: tuple[int, ...], theirs: tuple[int, ...], matched: bool, said: bool
) -> None:
    found = values_of_other_shapes({"x": torch.ones(ours)}, {"x": torch.ones(theirs)}, matched=matched)
    text = f"The returned value x has the shape {list(ours)} on the baseline and {list(theirs)} on the target."
    assert found == ([text] if said else [])


def test_single_numbers_of_other_names_are_no_pair() -> None:
    one = {"x": torch.ones(3), "loss": torch.tensor(1.0)}
    other = {"y": torch.ones(3), "accuracy": torch.tensor(0.5), "z": torch.ones(5)}
    compared = compare_named(one, other)
    assert [each.path for each in compared.differences] == ["x"]
    assert compared.lost == ["only the baseline returns the result's loss"]


def test_a_factor_explains_a_small_difference_only_if_little_of_that_is_left() -> None:
    x, noise = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    found = compare_named(dict.fromkeys("ab", x), {"a": 1.01 * x, "b": 1.01 * x + 0.002 * noise}).differences
    assert [each.factor for each in found] == [pytest.approx(1.01), None]


def test_whole_numbers_of_other_dtypes_are_compared_by_their_values() -> None:
    narrow, wide = torch.tensor([1, 2], dtype=torch.int32), torch.tensor([1, 2])
    assert [each.rel_l2 for each in compare_results(narrow, wide).differences] == [0.0]
    huge = torch.tensor([2**60 + 1])
    assert [each.rel_l2 for each in compare_results(huge, huge - 1).differences] == [2.0**-53]


NAN_ALONE, ONES, TWOS = torch.tensor([math.nan]), torch.ones(2), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    ("expected", "found", "apart"),
    [
        ([[ONES]], [[TWOS]], 1.0),
        ([[ONES]], [[ONES], [TWOS], [ONES]], 1.0),
        ([[ONES], [TWOS]], [[ONES], [ONES]], 0.5),
        ([[NAN_ALONE, ONES]], [[NAN_ALONE, TWOS]], 1.0),
        ([[NAN_ALONE]], [[NAN_ALONE]], math.nan),
        ([[ONES]], [[ONES, ONES]], math.inf),
        ([[]], [[]], math.nan),
        ([[ONES]], [[ONES[:1]]], math.inf),
    ],
)
def test_the_distance_of_results_is_the_largest_of_all_ranks(expected: Any, found: Any, apart: float) -> None:
    assert distance(expected, found) == pytest.approx(apart, nan_ok=True)


@pytest.mark.parametrize(
    ("expected", "found", "rel_l2"),
    [
        ([1.0, math.inf], [1.0, math.inf], 0.0),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, math.inf], [1.0, -math.inf], math.inf),
        ([1.0, math.nan], [1.0, 1.0], math.inf),
        ([0.0, 0.0], [0.0, 1.0], math.inf),
    ],
)
def test_numbers_that_are_not_finite_are_equal_only_to_themselves(
    expected: list[float], found: list[float], rel_l2: float
) -> None:
    (difference,), *_ = compare_results(torch.tensor(expected), torch.tensor(found))
    assert difference.rel_l2 == rel_l2


@given(st.recursive(st.just(0.0), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner)))
def test_a_result_equals_itself_and_no_value_is_lost(result: Any) -> None:
    differences, left, *_ = compare_results(result, result)
    # An empty list has nothing to compare.
    assert [each.path for each in differences] == [path for path, each in named_tensors(result).items() if each.numel()]
    assert not left
    assert all(each.rel_l2 == 0 for each in differences)


def test_imaginary_parts_and_whole_numbers_beyond_float64_count() -> None:
    (imaginary,), *_ = compare_results(torch.tensor([1 + 1j, 2.0]), torch.tensor([1 + 2j, 2.0]))
    assert imaginary.rel_l2 == pytest.approx(1 / 6**0.5)
    large = torch.tensor([2**60, 3])
    (whole,), *_ = compare_results(large, large + torch.tensor([1, 0]))
    assert whole.rel_l2 > 0
    (same,), *_ = compare_results(large, large.clone())
    assert same.rel_l2 == 0
    (kinds,), *_ = compare_results(torch.tensor([1.0, 2.0]), torch.tensor([1 + 0j, 2.0]))
    assert kinds.rel_l2 == 0


@pytest.mark.parametrize(
    ("moved", "exact", "expected"),
    [
        (3e-3, 4e-3, 5e-3),
        (3e-3, math.nan, 3e-3),
        (math.inf, 4e-3, 4e-3),
        (math.nan, math.inf, 1e-3),
        # Rounding is never less than one unit.
        (1e-5, 1e-5, 1e-3),
        (0.0, 0.0, 1e-3),
    ],
)
def test_a_result_is_rounded_by_at_least_one_unit(moved: float, exact: float, expected: float) -> None:
    assert ResultFloor(moved, exact, 1e-3, [], None).rel_l2 == pytest.approx(expected)


def test_values_of_a_result_in_words() -> None:
    words = [value_in_words(path) for path in ("", "['logits']", written_path("cache[0]"))]
    assert words == ["the returned value", "the returned value ['logits']", "what the call writes to cache[0]"]
