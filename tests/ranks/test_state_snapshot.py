"""What a snapshot brings back, and what it finds written since."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, MutableMapping, MutableSequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import graftlab as gl
from graftlab.ranks.state_snapshot import StateSnapshot, tensors_by_path

NAN = float("nan")


def nested(levels: int, leaf: Any) -> Any:
    for _ in range(levels):
        leaf = SimpleNamespace(inner=leaf)
    return leaf


def write(at: torch.Tensor) -> None:
    at.data.fill_(5.0)


@pytest.mark.parametrize("depth", [0, 3, 6])
@pytest.mark.parametrize(
    "hold", [lambda x: [x], lambda x: deque([x]), lambda x: (x,), lambda x: {"k": x}, lambda x: frozenset([x])]
)
def test_a_tensor_in_a_container_below_objects_is_brought_back(hold: Callable[[Any], Any], depth: int) -> None:
    tensor = torch.zeros(2)
    snapshot = StateSnapshot([nested(depth, hold(tensor)) if depth < 6 else nested(6, tensor)])
    write(tensor)
    snapshot.restore()
    assert tensor.tolist() == [0.0, 0.0]


def test_containers_have_their_items_in_their_order_again() -> None:
    first, second = torch.zeros(1), torch.ones(1)
    items, queue, names, table = [first, second], deque([1, 2]), {"a"}, {"x": first, "y": second}
    replaced, turned = {"k": first}, {"x": first, "y": second}
    snapshot = StateSnapshot([items, queue, names, table, replaced, turned])
    turned["x"] = turned.pop("x")
    replaced["k"] = second
    items.reverse()
    queue.appendleft(0)
    names |= {"b"}
    names -= {"a"}
    table["x"] = table.pop("y")
    snapshot.restore()
    assert [id(each) for each in items] == [id(first), id(second)]
    assert (list(queue), names, [*table], [*turned]) == ([1, 2], {"a"}, ["x", "y"], ["x", "y"])
    assert table["x"] is first
    assert replaced["k"] is first


@pytest.mark.parametrize("shape", [(3,), (2,), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("how", ["resized", "other data"])
def test_a_tensor_has_its_shape_and_dtype_again(how: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(2)
    view = tensor[1:]
    snapshot = StateSnapshot([[tensor]])
    for _ in range(2):
        if how == "resized":
            tensor.resize_(shape).zero_()
        else:
            tensor.data = torch.zeros(shape, dtype=dtype)
        snapshot.restore()
        assert (tensor.dtype, tensor.tolist()) == (torch.float32, [1.0, 1.0])
    assert view.tolist() == [1.0]


@pytest.mark.parametrize("read", [torch.conj, lambda x: x.conj().imag, lambda x: x.real.T])
def test_a_tensor_that_is_conjugated_as_it_is_read_is_brought_back(read: Callable[[Any], Any]) -> None:
    tensor = read(torch.full((2, 2), 1 + 2j))
    before = tensor.tolist()
    snapshot = StateSnapshot([[tensor]])
    write(tensor)
    found, _ = snapshot.written({"x": tensor}, 1 << 20)
    assert found["x"].tolist() == tensor.tolist() != before
    snapshot.restore()
    assert tensor.tolist() == before
    assert snapshot.written({"x": tensor}, 1 << 20) == ({}, [])


def test_attributes_that_were_added_since_are_gone_again() -> None:
    model, held = nn.Linear(1, 1), SimpleNamespace(x=1)
    snapshot = StateSnapshot([model, held])
    model.cache = held.y = torch.zeros(1)
    model.eval()
    del held.x
    snapshot.restore()
    assert not hasattr(model, "cache")
    assert model.training
    assert vars(held) == {"x": 1}


class Layer(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)


@pytest.mark.parametrize(
    ("state", "draw"),
    [
        (None, lambda _: torch.rand(3).tolist()),
        (None, lambda _: random.random()),
        (None, lambda _: np.random.random()),
        (torch.Generator().manual_seed(1), lambda state: torch.rand(3, generator=state).tolist()),
        (Layer(), lambda state: torch.rand(3, generator=state.generator).tolist()),
        (random.Random(1), lambda state: state.random()),
        (np.random.default_rng(1), lambda state: state.random()),
    ],
)
def test_random_numbers_are_drawn_again_as_often_as_the_state_is_brought_back(
    state: Any, draw: Callable[[Any], Any]
) -> None:
    snapshot = StateSnapshot([{"x": state}])
    first = draw(state)
    for _ in range(2):
        draw(state)
        snapshot.restore()
        assert draw(state) == first


@pytest.mark.parametrize("expand", [lambda x: x.expand(3, 2), lambda x: x.unfold(0, 1, 1).expand(2, 4)])
def test_an_expanded_tensor_is_brought_back_with_what_it_shows(expand: Callable[[Any], Any]) -> None:
    base = torch.zeros(2)
    shown = expand(base)
    snapshot = StateSnapshot([shown, base])
    base += 1
    snapshot.restore()
    assert (base.tolist(), shown.tolist()) == ([0.0, 0.0], torch.zeros_like(shown).tolist())


def test_an_object_is_looked_at_once_even_if_it_holds_itself() -> None:
    held: list[Any] = [torch.zeros(1)]
    held.append(held)
    snapshot = StateSnapshot([held])
    write(held[0])
    snapshot.restore()
    assert held[0].tolist() == [0.0]


@pytest.mark.parametrize("levels", range(10))
def test_submodules_are_covered_however_deeply_they_nest(levels: int) -> None:
    model: nn.Module = nn.BatchNorm1d(2)
    norm = model
    for _ in range(levels):
        model = nn.Sequential(model)
    snapshot = StateSnapshot([model])
    assert snapshot.written({"": model}, 1 << 20) == ({}, [])
    model(torch.randn(4, 2))
    snapshot.restore()
    assert (norm.num_batches_tracked, norm.running_mean.tolist()) == (0, [0.0, 0.0])


@pytest.mark.parametrize("weights", [False, True])
def test_values_of_weights_are_brought_back_on_request_alone(weights: bool) -> None:
    model = nn.Linear(1, 1)
    before = model.weight.item()
    snapshot = StateSnapshot([model], weights=True) if weights else StateSnapshot([model])
    write(model.weight)
    snapshot.restore()
    assert model.weight.item() == (before if weights else 5.0)


def test_gradients_have_their_values_and_their_memory_again() -> None:
    weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    weight.sum().backward()
    gradient = weight.grad
    assert gradient is not None
    snapshot = StateSnapshot([weight, other])
    gradient += 1
    weight.grad = torch.zeros(2)
    other.sum().backward()
    snapshot.restore()
    assert weight.grad is gradient
    assert gradient.tolist() == [1.0, 1.0]
    assert other.grad is None


def test_hooks_that_a_model_installs_in_a_call_are_gone_again_and_taps_stay() -> None:
    calls: list[str] = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "is_hooked"):
                self.is_hooked = True
                self.register_forward_hook(lambda *_: calls.append("own"))
            return super().forward(x)

    net = Net(2, 2)
    net.register_forward_pre_hook(lambda *_: calls.append("before"))
    snapshot = StateSnapshot([net])
    with gl.watch(net):
        watching = [*net._forward_hooks], [*net._forward_pre_hooks]
        for _ in range(2):
            net(torch.ones(2))
            snapshot.restore()
        assert ([*net._forward_hooks], [*net._forward_pre_hooks]) == watching
        assert calls == ["before", "own"] * 2


def test_hooks_of_sharding_stay_although_a_call_installs_them() -> None:
    net = nn.Linear(2, 2)
    snapshot = StateSnapshot([net])
    net.register_forward_pre_hook(partial(partial(torch.distributed.is_available)))
    net.register_forward_pre_hook(partial(print))
    snapshot.restore()
    (hook,) = net._forward_pre_hooks.values()
    assert hook() == torch.distributed.is_available()


def test_an_optimizer_keeps_hooks_that_were_installed_since() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.sum().backward()
    optimizer = torch.optim.Adam([weight])
    snapshot = StateSnapshot([optimizer], weights=True)
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    snapshot.restore()
    assert (len(optimizer.state), weight.tolist()) == (0, [1.0, 1.0])
    optimizer.step()
    assert len(calls) == 2


@pytest.mark.parametrize("value", [torch.zeros(2, device="meta"), torch.eye(2).to_sparse(), print, int])
def test_what_has_no_plain_memory_is_left_as_it_is(value: Any) -> None:
    snapshot = StateSnapshot([[value]])
    snapshot.restore()
    assert snapshot.written({"it": [value]}, 1 << 20) == ({}, [])


def test_what_has_not_changed_is_not_written_to() -> None:
    """Its memory may be read-only, as that of a mapped file."""

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.name() == "aten::copy_":
                copied.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    copied: list[int] = []
    kept, changed = torch.tensor([1.0, NAN]), torch.tensor([1.0, NAN])
    snapshot = StateSnapshot([kept, changed])
    changed.add_(1)
    with Copies():
        snapshot.restore()
    assert copied == [changed.data_ptr()]
    assert changed[0] == 1.0


def test_containers_that_have_not_changed_are_not_filled_again() -> None:
    """Code may go through one in another thread, and a subclass may count what is put in."""
    filled: list[str] = []

    class Items(list[int]):
        def clear(self) -> None:
            filled.append("list")
            super().clear()

    class Table(dict[str, int]):
        def clear(self) -> None:
            filled.append("dict")
            super().clear()

    items, table = Items([1, 2]), Table(x=1)
    snapshot = StateSnapshot([items, table])
    snapshot.restore()
    assert filled == []
    items.append(3)
    table["y"] = 2
    snapshot.restore()
    assert (filled, items, table) == (["list", "dict"], [1, 2], {"x": 1})


# ---- what was written since ------------------------------------------------------------------------------------------


def test_only_elements_with_new_values_are_written() -> None:
    x = torch.tensor([1.0, NAN, 3.0, NAN])
    same, scalar = torch.tensor([NAN, 2.0]), torch.tensor(NAN)
    snapshot = StateSnapshot([x, same, scalar])
    x[2:] = torch.tensor([7.0, 8.0])
    # A number that is none any more is a new value.
    lost = torch.tensor([1.0, 2.0])
    of_lost = StateSnapshot([lost])
    lost[1] = NAN
    assert str(of_lost.written({"lost": lost}, 8)[0]["lost"].tolist()) == "[0.0, nan]"
    found, left = snapshot.written({"x": x, "same": same, "scalar": scalar}, 1 << 20)
    assert {path: each.tolist() for path, each in found.items()} == {"x": [0.0, 0.0, 7.0, 8.0]}
    assert left == []
    x.zero_()
    assert found["x"].tolist() == [0.0, 0.0, 7.0, 8.0]


def test_new_and_resized_tensors_are_written_whole_and_are_copies() -> None:
    model = nn.BatchNorm1d(2)
    cache: dict[str, Any] = {"k": torch.zeros(2)}
    snapshot = StateSnapshot([model, cache])
    cache["k"].resize_(3).fill_(1.0)
    cache["v"] = [torch.ones(1)]
    found, _ = snapshot.written({"": model, "cache": cache}, 1 << 20)
    assert {path: each.tolist() for path, each in found.items()} == {"cache['k']": [1.0] * 3, "cache['v'][0]": [1.0]}
    write(cache["v"][0])
    assert found["cache['v'][0]"].tolist() == [1.0]
    kept = torch.tensor([2.0, 3.0])
    snapshot = StateSnapshot([kept])
    kept.data = torch.tensor([2.0, 4.0], dtype=torch.float64)
    assert snapshot.written({"x": kept}, 1 << 20)[0]["x"].tolist() == [2.0, 4.0]


def test_paths_of_buffers_and_attributes_are_those_of_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    model.last = torch.zeros(2)
    snapshot = StateSnapshot([model])
    model(torch.randn(4, 2))
    write(model.last)
    written, _ = snapshot.written({"": model}, 1 << 20)
    assert sorted(written) == ["0.num_batches_tracked", "0.running_mean", "0.running_var", "last"]


@pytest.mark.parametrize(("kind", "place"), [(dict, "['k']"), (list, "[0]")])
def test_what_was_written_to_a_cache_that_is_a_container_includes_its_attributes(kind: type, place: str) -> None:
    class Cache(kind):  # type: ignore[misc]
        """As some caches are: a container of keys and values, with their number beside them."""

    held, length = torch.zeros(1), torch.zeros(1)
    cache = Cache({"k": held} if kind is dict else [held])
    cache.length = length
    snapshot = StateSnapshot([cache])
    write(held)
    write(length)
    assert sorted(snapshot.written({"c": cache}, 1 << 20)[0]) == sorted([f"c{place}", "c.length"])
    snapshot.restore()
    assert (held.tolist(), length.tolist()) == ([0.0], [0.0])


@pytest.mark.parametrize("hold", [lambda x: [x], lambda x: {"k": x}, lambda x: SimpleNamespace(x=x)])
def test_the_paths_of_tensors_end_at_a_depth_however_deep_their_containers_are(hold: Callable[[Any], Any]) -> None:
    value: Any = torch.zeros(1)
    for levels in range(3000):
        assert levels > 5 or len([*tensors_by_path({"held": value})]) == 1
        value = hold(value)
    assert [*tensors_by_path({"held": value})] == []


def test_tensors_without_room_are_named_and_smaller_ones_before_them_kept() -> None:
    one, two = torch.zeros(2), torch.zeros(100)
    snapshot = StateSnapshot([one, two])
    write(one)
    write(two)
    found, left = snapshot.written({"one": one, "two": two}, 408)
    assert (sorted(found), left) == (["one", "two"], [])
    found, left = snapshot.written({"one": one, "two": two}, 407)
    assert (sorted(found), left) == (["one"], ["two"])


@pytest.mark.parametrize("kind", ["list", "deque", "dict", "object"])
def test_a_container_may_grow_while_what_was_written_is_read(kind: str) -> None:
    class Growing(torch.Tensor):
        """Another thread adds to its container while it is read."""

        def detach(self) -> torch.Tensor:
            if kind == "object":
                setattr(holder, f"more{len(vars(holder))}", 0)
            elif isinstance(holder, MutableMapping):
                holder[len(holder)] = 0
            else:
                holder.append(0)
            return super().detach()

    tensors = [torch.zeros(2).as_subclass(Growing) for _ in range(2)]
    kinds: dict[str, Callable[[], Any]] = {"list": list, "deque": deque, "dict": dict, "object": SimpleNamespace}
    holder = kinds[kind]()
    if isinstance(holder, MutableSequence):
        holder.extend(tensors)
    elif isinstance(holder, dict):
        holder.update(enumerate(tensors))
    else:
        holder.a, holder.b = tensors
    snapshot = StateSnapshot([])
    found, _ = snapshot.written({"x": holder}, 1 << 20)
    assert len(found) == 2


def test_the_state_with_which_torch_shards_a_model_is_not_written_by_it() -> None:
    class Shards:
        __module__ = "torch.distributed.fsdp._fully_shard"

        def __init__(self) -> None:
            self.data = torch.zeros(4)

    model = nn.Linear(2, 2)
    model.shards = Shards()  # type: ignore[assignment]
    snapshot = StateSnapshot([model])
    model.shards.data = torch.ones(4)
    assert snapshot.written({"": model}, 1 << 20) == ({}, [])
