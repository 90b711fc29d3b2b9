"""The extras of a tap in a captured function: tensors have a place of their own, all else must stay as it was."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kit.refusals import exactly
from torch import Tensor

from graftlab.errors import GraphError
from graftlab.graphs import FillContext
from graftlab.graphs.static_extras import StaticExtras

PADDED = FillContext(raw_bs=4, padded_bs=4, raw_num_tokens=8, padded_num_tokens=8)
BATCH = FillContext(raw_bs=2, padded_bs=4, raw_num_tokens=5, padded_num_tokens=8)


class Pair(NamedTuple):
    left: Any
    right: Any


def extras(own: Any, around: Any = None) -> StaticExtras:
    return StaticExtras("x", around, own, torch.zeros(1), PADDED)


def shown(given: Any) -> Any:
    """With lists in place of tensors."""
    if isinstance(given, Tensor):
        return given.tolist()
    if type(given) is dict:
        return {key: shown(value) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        return type(given)(*map(shown, given)) if hasattr(given, "_fields") else type(given)(map(shown, given))
    return given


def test_the_batch_that_was_replayed_last_is_given_without_its_padding() -> None:
    def made(value: float) -> dict[str, Any]:
        return {
            "tokens": torch.arange(8.0) + value,
            "requests": torch.arange(4.0) + value,
            # One each request, though its length is that of no batch's requests.
            "request_lens": torch.arange(8) + int(value),
            "scale": [torch.tensor(value), Pair(torch.full((3,), value), "max")],
        }

    with torch.inference_mode():
        static = extras(made(0.0))
    static.update(None, made(10.0))
    assert shown(static.given(BATCH)) == {
        "tokens": [10.0, 11.0, 12.0, 13.0, 14.0],
        "requests": [10.0, 11.0],
        "request_lens": [10, 11],
        "scale": [10.0, Pair([10.0] * 3, "max")],
    }
    before = static.given(BATCH)["requests"]
    static.update(None, made(20.0))
    assert before.tolist() == [20.0, 21.0], "one place for all batches"
    assert not before.is_inference()


def test_extras_that_are_set_around_are_given_too() -> None:
    static = extras({"own": torch.ones(4)}, {"around": torch.ones(8), "name": "a"})
    static.update({"around": torch.full((8,), 2.0), "name": "a"}, {"own": torch.full((4,), 3.0)})
    assert shown(static.given(BATCH)) == {"around": [2.0] * 5, "name": "a", "own": [3.0] * 2}


def test_a_callable_is_called_for_each_batch_and_may_have_the_batchs_own_size() -> None:
    made: dict[str, Any] = {}
    static = extras(lambda: dict(made), {"around": torch.ones(4)})
    static.update({"around": torch.ones(4)}, lambda: {})
    for rids, lens in ((torch.arange(4), torch.arange(2)), (torch.arange(2), torch.arange(4))):
        made |= {"rids_int": rids, "request_lens": lens, "tokens": torch.arange(8), "n": 3}
        assert shown(static.given(BATCH)) == {
            "around": [1.0] * 2,
            "rids_int": [0, 1],
            "request_lens": [0, 1],
            "tokens": [0, 1, 2, 3, 4],
            "n": 3,
        }


def test_a_parameter_is_read_where_it_lies_and_must_be_the_same() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    static = extras({"w": weight})
    static.update(None, {"w": weight})
    static.update(None, {"w": weight.detach()})
    assert static.given(BATCH)["w"] is weight
    with pytest.raises(
        GraphError,
        match=exactly(
            "tap 'x' in a captured function: extras['w'] is on cpu and was created again this time. No "
            "Python runs there at a replay, which would repeat the values of the capture. Make it a tensor "
            "that the graph computes, or give extras=lambda: {...}, which is called on the host at each "
            "replay"
        ),
    ):
        static.update(None, {"w": torch.nn.Parameter(torch.ones(3))})


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"a": torch.ones(2)}, {"a": torch.ones(3)}, r"extras['a'] was a tensor of another shape or dtype, or none"),
        ({"a": torch.ones(2)}, {"a": torch.ones(2).double()}, r"extras['a'] was a tensor of another shape or dtype"),
        ({"a": torch.ones(2)}, {"a": 2.0}, r"extras['a'] was a tensor of another shape or dtype, or none, this time"),
        ({"a": 1}, {"a": 1, "b": [2, 3]}, r"had the entries ['extras['a']', 'extras['b'][0]', 'extras['b'][1]'] this"),
        ({"a": 1}, {"a": 2}, "extras['a'] was the int 1 at one time, and the int 2 at another"),
        ({"a": 1}, {"a": True}, "extras['a'] was the int 1 at one time, and the bool True at another"),
        ({"a": "x" * 58}, {"a": "y" * 59}, f"was the str '{'x' * 58}' at one time, and the str '{'y' * 56}... at"),
        ({"a": lambda: 1}, {"a": lambda: 1}, "extras['a'] was the function"),
        ({"a": 1}, lambda: {"a": 1}, "extras were a callable at one time and not at another"),
    ],
)
def test_changed_extras_are_named(first: Any, then: Any, said: str) -> None:
    with pytest.raises(GraphError) as refused:
        extras(first).update(None, then)
    assert said.replace('"', "'") in str(refused.value).replace('"', "'")
    assert "No Python runs there at a replay" in str(refused.value)


def test_equal_values_and_those_that_pickle_alike_are_the_same() -> None:
    class Opaque:
        def __init__(self, value: int) -> None:
            self.value = value

        def __reduce__(self) -> Any:
            return int, (self.value,)

    class Unequal(Opaque):
        def __eq__(self, other: object) -> bool:
            raise RuntimeError

        __hash__ = None  # type: ignore[assignment]

    for make in (lambda: 1.5, lambda: float("nan"), lambda: np.arange(3), lambda: Opaque(3), lambda: Unequal(3)):
        extras({"a": make()}).update(None, {"a": make()})
    for first, then in ((Opaque(3), Opaque(4)), (Unequal(3), Unequal(4)), (np.arange(3), np.arange(4))):
        with pytest.raises(GraphError):
            extras({"a": first}).update(None, {"a": then})
    # Those of a capture with the same sizes are compared where both have them.
    extras({"a": 1, "b": 2}).compare({("a",): 1})
    with pytest.raises(GraphError):
        extras({"a": 1, "b": 2}).compare({("b",): 3})


def test_identities_are_cut_by_requests_even_where_tokens_are_as_many() -> None:
    padded = FillContext(raw_bs=4, padded_bs=4, raw_num_tokens=4, padded_num_tokens=4)
    made = {"rids_int": torch.arange(4), "other": torch.arange(4)}
    static = StaticExtras("x", None, lambda: made, torch.zeros(1), padded)
    batch = FillContext(raw_bs=2, padded_bs=4, raw_num_tokens=3, padded_num_tokens=4)
    assert shown(static.given(batch)) == {"rids_int": [0, 1], "other": [0, 1, 2]}


def test_a_single_number_under_the_name_of_one_for_each_request_is_given_whole() -> None:
    static = extras(lambda: {"rids_int": torch.tensor(7)})
    static.update(None, lambda: {})
    assert shown(static.given(BATCH)) == {"rids_int": 7}
