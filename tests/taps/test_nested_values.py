"""Tensors inside values are tapped by their places, grafts reach them there, and threads may have other handlers."""

from __future__ import annotations

import contextlib
import threading
from collections import UserDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from kit.grafters import become_rank
from torch import Tensor, nn

import graftlab as gl
from graftlab.taps import calls
from graftlab.taps.extras import ExtrasWithLayout, carried, carrying, resolved, together, unpicklable_part
from graftlab.taps.nested import PlacedArguments, tap_in_tuples, tap_inside
from graftlab.taps.outermost_calls import OutermostCalls
from graftlab.taps.routing import handled_by, taps_within

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Output:
    logits: Tensor
    cache: Any = None
    derived: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    state: Tensor


def zeros(name: str, tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if name.endswith("!") or "first" in name or "[0]" in name else tensor


def names_in(value: Any, **more: Any) -> list[str]:
    found: list[str] = []
    tap_inside("x", value, lambda name, tensor: found.append(name) or tensor, **more)  # type: ignore[func-returns-value]
    return found


def test_each_tensor_has_the_name_of_its_place() -> None:
    one = torch.ones(1)
    value = {"a": [one, (one, 3)], "b": Pair(one, None), "c": Output(one, {"k": one}), "d": Output, "e": "text"}
    assert names_in(value) == ["x.a[0]", "x.a[1][0]", "x.b[0]", "x.c.logits", "x.c.cache.k"]
    assert names_in(one) == ["x"]
    deep: Any = one
    for _ in range(6):
        deep = [deep]
    assert names_in(deep) == ["x" + "[0]" * 6]
    assert names_in([deep]) == []


def test_a_value_without_a_graft_is_the_same_object_and_one_with_it_a_copy() -> None:
    one, other = torch.ones(1), torch.ones(2)
    values: list[Any] = [(one, other), [one, other], Pair(one, other), {"first": one, "b": other}, Output(one, [other])]
    for value in values:
        assert tap_inside("x", value, lambda name, tensor: tensor) is value
    for value in values[:4]:
        made = tap_inside("x", value, zeros)
        assert type(made) is type(value)
        assert made is not value
        first, second = made.values() if isinstance(made, dict) else made
        assert first.tolist() == [0.0]
        assert second is other
    assert one.tolist() == [1.0]
    made = tap_inside("x", values[4], zeros)
    assert made.logits is one
    assert made.cache[0].tolist() == [0.0, 0.0]
    assert values[4].cache[0] is other
    read_only = tap_inside("x", MappingProxyType({"first": one}), zeros)
    assert read_only["first"].tolist() == [0.0]
    wrapped = UserDict({"first": one})
    assert type(tap_inside("x", wrapped, zeros)) is UserDict
    assert wrapped["first"] is one


def test_only_tuples_are_looked_into_where_the_callee_may_write() -> None:
    one = torch.ones(1)
    found: list[str] = []
    value = (one, [one], (one, {"k": one}))
    assert tap_in_tuples("x", value, lambda name, tensor: found.append(name) or tensor) is value  # type: ignore[func-returns-value]
    assert found == ["x[0]", "x[2][0]"]
    made = tap_in_tuples("x", value, lambda name, tensor: tensor * 0)
    assert made[0].tolist() == made[2][0].tolist() == [0.0]
    assert made[1] is value[1]
    assert one.tolist() == [1.0]


def test_arguments_have_their_own_values_again_where_the_call_wrote_nothing() -> None:
    cache, frozen, output = [torch.ones(1), torch.ones(1)], Frozen(torch.ones(1)), Output(torch.ones(1))
    mapping = {"first": torch.ones(1)}
    before = [*cache, frozen.state, output.logits, mapping["first"]]
    placed = PlacedArguments()

    def graft(name: str, tensor: Tensor) -> Tensor:
        return tensor + 1

    given = [placed.tap("x", value, graft) for value in (cache, frozen, output, mapping, (cache[0],))]
    assert given[0] is cache
    assert given[2] is output
    assert given[3] is mapping
    assert cache[0].tolist() == output.logits.tolist() == mapping["first"].tolist() == [2.0]
    # What nothing can be written to is copied.
    assert given[1] is not frozen
    assert given[1].state.tolist() == [2.0]
    assert isinstance(given[4], tuple)
    placed.take_back()
    after = [*cache, frozen.state, output.logits, mapping["first"]]
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert all(each.tolist() == [1.0] for each in after)


@pytest.mark.parametrize("inference", [False, True])
def test_what_a_call_writes_into_its_arguments_stays(inference: bool) -> None:
    with torch.inference_mode(inference):
        cache = [torch.ones(1), torch.ones(1), torch.ones(1), torch.ones(1)]
        written, replaced, shrunk, own = cache
        placed = PlacedArguments()
        placed.tap("x", cache, lambda name, tensor: tensor + 1)
        cache[0].add_(5)
        cache[1] = new = torch.full((1,), 9.0)
        cache[2].resize_(0)
        del cache[3]
        placed.take_back()
    assert cache[0] is written
    assert written.tolist() == [7.0]
    assert cache[1] is new
    assert replaced.tolist() == own.tolist() == [1.0]
    # A graft that the call has given another shape cannot be written back.
    assert shrunk.tolist() == [1.0]
    assert len(cache) == 3


def test_inner_extras_precede_outer_ones_and_those_of_the_tap_both() -> None:
    assert carried() is None
    with carrying({"a": 1, "b": 1}):
        with contextlib.suppress(ValueError), carrying({"b": 2}):
            assert carried() == {"a": 1, "b": 2}
            assert resolved(lambda: {"a": 3}) == {"a": 3, "b": 2}
            assert resolved(ExtrasWithLayout("b s", {"c": 4})) == {"a": 1, "b": 2, "c": 4}
            assert resolved("text") == "text"
            raise ValueError("bad")
        around = carried()
        assert around == {"a": 1, "b": 1}
        # A copy, so that a receiver's changes do not stay.
        assert together(around, None) == around
        assert together(around, None) is not around
    assert carried() is None
    assert resolved(None) is None
    assert together({}, {"a": 1}) == {"a": 1}


def test_the_innermost_part_that_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    assert unpicklable_part({"a": 1, "b": [2, {"c": lock}]}) == "extras['b'][1]['c']"
    assert unpicklable_part((1, lock)) == "extras[1]"
    assert unpicklable_part(lock) == "extras"


class Handler:
    def __init__(self) -> None:
        self.reached: list[str] = []
        self.newest: tuple[Any, ...] = ()

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        self.reached.append(name)
        self.newest = value, extras, dict(tags), replace
        return value

    def step(self) -> None: ...


def test_the_taps_of_one_thread_have_another_handler_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    become_rank(monkeypatch, "target")
    usual, outer, inner = calls.tap_handler(), Handler(), Handler()
    entered: list[str] = []

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    def tap_elsewhere() -> None:
        thread = threading.Thread(target=gl.tap, args=("elsewhere", torch.ones(1)))
        thread.start()
        thread.join()

    with handled_by(outer):
        gl.tap("a", torch.ones(1))
        tap_elsewhere()
        with contextlib.suppress(ValueError), handled_by(inner):
            gl.tap("b", torch.ones(1))
            raise ValueError("bad")
        gl.tap("c", torch.ones(1))
        with taps_within(around):
            calls.tap_handler().tap("d", 1, {"scale": 2}, {"layer": 3}, True)  # type: ignore[union-attr]
        assert outer.newest == (1, {"scale": 2}, {"layer": 3}, True)
        with handled_by(None):
            gl.tap("e", torch.ones(1))
        gl.tap("f", torch.ones(1))
    assert (outer.reached, inner.reached) == (["a", "c", "d", "f"], ["b"])
    assert entered == ["in", "out"]
    assert calls.tap_handler() is usual
    gl.tap("g", torch.ones(1))
    assert outer.reached[-1] == "f"


def test_calls_inside_a_generator_of_a_model_are_not_outermost() -> None:
    seen: list[str] = []
    inner = nn.Linear(1, 1)

    class Streams(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            received = None
            for _ in range(2):
                received = yield self.inner(x), received
            return "end"

    def note(module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    own = nn.Module.__call__
    with OutermostCalls(note, lambda module, result: seen.append("after")):
        items = Streams()(torch.ones(1))
        assert next(items)[1] is None
        inner(torch.ones(1))
        assert items.send("sent")[1] == "sent"
        with pytest.raises(StopIteration) as ended:
            next(items)
        nn.Identity()(torch.ones(1))
        inner(torch.ones(1))
    assert ended.value.value == "end"
    assert seen == ["Streams", "after", "Linear", "after", "Linear", "after"]
    assert nn.Module.__call__ is own
    inner(torch.ones(1))
    assert len(seen) == 6


def test_after_an_error_before_a_call_the_next_one_is_outermost() -> None:
    seen: list[nn.Module] = []

    def before(module: nn.Module, *_: Any) -> None:
        seen.append(module)
        if len(seen) == 1:
            raise KeyboardInterrupt

    model = nn.Linear(1, 1)
    with OutermostCalls(before, lambda module, result: None):
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
        model(torch.ones(1))
    assert seen == [model, model]
