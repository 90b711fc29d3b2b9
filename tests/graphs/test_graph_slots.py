"""Slots of captured graphs: what contradicts itself is refused, views begin where buffers begin, no copy loses data."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.graph_buffers import MAX_BS, buffer_of, content, extract, fill, make, on_devices, ones, registry_of
from kit.refusals import exactly
from kit.tensors import COPYABLE, random_bits
from torch import Tensor

from graftlab.errors import GraphError
from graftlab.graphs import CudaGraphBufferRegistry, FillContext, GraphSlot, PaddingPolicy
from graftlab.graphs import registry as graph_registry
from graftlab.graphs.registry import copy_all, is_lossless
from graftlab.graphs.tap_sites import cut, rows_of

NEEDS_VALUE = [PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE]
RESETS = [PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO]


# ---- construction ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["batch", "", None, 0])
def test_an_axis_that_is_none_of_the_three_is_refused_with_the_slots_name(axis: Any) -> None:
    with pytest.raises(GraphError, match=r"slot 'x': axis=.*'bs', 'tokens' or 'none'"):
        make(axis=axis)


@pytest.mark.parametrize("policy", PaddingPolicy)
def test_a_buffer_without_an_axis_has_no_tail_to_reset(policy: PaddingPolicy) -> None:
    if policy in RESETS:
        with pytest.raises(GraphError, match=r"slot 'x': axis='none' has no tail"):
            make(axis="none", padding_policy=policy, pad_value=1)
    else:
        assert make(axis="none", padding_policy=policy, pad_value=1).axis == "none"


@pytest.mark.parametrize("policy", PaddingPolicy)
def test_only_policies_that_write_a_value_need_one(policy: PaddingPolicy) -> None:
    if policy in NEEDS_VALUE:
        with pytest.raises(GraphError, match=rf"slot 'x': PaddingPolicy\.{policy.name} needs a pad_value"):
            make(padding_policy=policy)
    else:
        make(padding_policy=policy)
    make(padding_policy=policy, pad_value=0)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(-1, torch.uint8), (2**31, torch.int32), (0.5, torch.int64), (float("nan"), torch.int64), (1e6, torch.float16)],
)
@pytest.mark.parametrize("policy", NEEDS_VALUE)
def test_a_value_that_the_dtype_cannot_hold_is_refused(policy: PaddingPolicy, value: float, dtype: torch.dtype) -> None:
    with pytest.raises(GraphError, match=rf"slot 'x': pad_value=.* cannot be written as {dtype}"):
        make(padding_policy=policy, pad_value=value, dtype=dtype)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (-(2**63), torch.int64),
        (0.1, torch.bfloat16),
        (float("-inf"), torch.float16),
        (float("nan"), torch.float32),
        (True, torch.bool),
    ],
)
def test_a_value_that_the_dtype_holds_up_to_rounding_is_taken(value: float, dtype: torch.dtype) -> None:
    assert make(padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=value, dtype=dtype).fill_value is value


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"padding_policy": "zero"}, "padding_policy='zero'; it must be one of .*PaddingPolicy.KEEP_PAD"),
        ({"axis": "none", "slice_fn": lambda buffer, n: buffer}, "slice_fn would never be called"),
        ({"copy_from_batch": False, "source_fn": lambda batch, ctx: None}, "source_fn would never be called"),
    ],
)
def test_contradictory_slot_options_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(GraphError, match=f"slot 'x': .*{fault}"):
        make(**options)


def test_a_context_takes_the_four_sizes_and_what_the_pipeline_passed_on() -> None:
    ctx = FillContext(1, 2, 3, 4)
    assert (ctx.raw_bs, ctx.padded_bs, ctx.raw_num_tokens, ctx.padded_num_tokens) == (1, 2, 3, 4)
    assert ctx.pp_proxy_tensors is None
    assert FillContext(1, 2, 3, 4, pp_proxy_tensors="proxies").pp_proxy_tensors == "proxies"


# ---- views ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("axis", "expected"), [("bs", 2), ("tokens", 5), ("none", 9)])
def test_the_slice_is_a_view_along_the_slots_own_axis(axis: Any, expected: int) -> None:
    buffer = torch.arange(18).view(9, 2)
    view = make(axis=axis, buffer=buffer).slice_for(2, 5)
    assert view.tolist() == buffer[:expected].tolist()
    view.fill_(-1)
    assert (buffer[:expected] == -1).all()
    assert (buffer[expected:] != -1).all()


def test_a_slice_function_chooses_the_axis() -> None:
    buffer = torch.arange(12).view(3, 4)
    slot = make(axis="tokens", slice_fn=lambda buffer, n: buffer[:, :n], buffer=buffer)
    assert slot.slice_for(99, 2).tolist() == [[0, 1], [4, 5], [8, 9]]
    assert slot.slice_for(99, 0).shape == (3, 0)


@pytest.mark.parametrize("size", [-1, 5])
def test_a_size_that_the_buffer_does_not_have_is_refused_and_not_clipped(size: int) -> None:
    with pytest.raises(GraphError, match=rf"slot 'x': got a size of {size} along its axis 'bs'"):
        make(buffer=torch.zeros(4)).slice_for(size, 0)


def test_a_slot_without_a_buffer_says_what_to_do() -> None:
    with pytest.raises(GraphError, match="slot 'x': no buffer yet; enable the slot and register it first"):
        make().slice_for(1, 1)


@pytest.mark.parametrize(
    "slice_fn",
    [
        lambda buffer, n: buffer[:n].clone(),
        lambda buffer, n: buffer[8 - n :],
        lambda buffer, n: buffer[: 2 * n : 2],
        lambda buffer, n: buffer[:n].view(torch.float64),
        lambda buffer, n: n,
    ],
    ids=["a copy", "the end", "every second", "another dtype", "no tensor"],
)
def test_a_slice_function_has_to_give_a_beginning_of_the_buffer(slice_fn: Any) -> None:
    registry = CudaGraphBufferRegistry("cpu", 8, 8, False)
    with pytest.raises(
        GraphError,
        match=exactly("slot 'x': slice_fn(buffer, 0) is not a view of the buffer that begins where the buffer begins"),
    ):
        registry.register_slot(make(slice_fn=slice_fn))
    assert not registry.has_slot("x")


@pytest.mark.parametrize(
    "slice_fn",
    [lambda buffer, n: buffer[:n, :n], lambda buffer, n: buffer[: 8 - n]],
    ids=["both axes", "shrinking"],
)
def test_a_slice_function_has_to_grow_along_one_axis(slice_fn: Any) -> None:
    registry = CudaGraphBufferRegistry("cpu", 8, 8, False)
    with pytest.raises(GraphError, match=r"slot 'x': slice_fn gives .* it must grow along one axis"):
        registry.register_slot(make(shape_fn=lambda bs, tokens: (bs, bs), slice_fn=slice_fn))


# ---- policies -------------------------------------------------------------------------------------------------------

# What is in the buffer at first, after [1, 2, 3, 4, 5], and after a batch of [8, 9] that followed it.
AFTER = {
    PaddingPolicy.KEEP_PAD: ([0] * 8, [1, 2, 3, 4, 5, 0, 0, 0], [8, 9, 3, 4, 5, 0, 0, 0]),
    PaddingPolicy.FOREACH_COPY: ([0] * 8, [1, 2, 3, 4, 5, 0, 0, 0], [8, 9, 3, 4, 5, 0, 0, 0]),
    PaddingPolicy.ZERO: ([0] * 8, [1, 2, 3, 4, 5, 0, 0, 0], [8, 9, 0, 0, 0, 0, 0, 0]),
    PaddingPolicy.FILL_SENTINEL: ([7] * 8, [1, 2, 3, 4, 5, 7, 7, 7], [8, 9, 7, 7, 7, 7, 7, 7]),
    PaddingPolicy.FILL_ONCE: ([7] * 8, [1, 2, 3, 4, 5, 7, 7, 7], [8, 9, 3, 4, 5, 7, 7, 7]),
}


@on_devices
@pytest.mark.parametrize("policy", PaddingPolicy)
def test_each_policy_leaves_its_own_tail(policy: PaddingPolicy, device: str) -> None:
    registry = registry_of(make(padding_policy=policy, pad_value=7), device=device)
    at_first, after, shrunk = AFTER[policy]
    assert content(registry) == at_first
    fill(registry, 5, x=torch.tensor([1, 2, 3, 4, 5], device=device))
    assert content(registry) == after
    fill(registry, 2, x=torch.tensor([8, 9], device=device))
    assert content(registry) == shrunk


@pytest.mark.parametrize("policy", [PaddingPolicy.ZERO, PaddingPolicy.FILL_SENTINEL])
def test_what_lies_past_the_padded_size_is_left_alone(policy: PaddingPolicy) -> None:
    registry = registry_of()
    registry.register_slot(make(padding_policy=policy, pad_value=7), bind=ones(MAX_BS, 5))
    fill(registry, 2, padded=4, x=ones(2))
    assert content(registry)[4:] == [5] * 4


@pytest.mark.parametrize("axis", ["bs", "tokens"])
def test_a_batch_of_the_same_size_is_padded_anew_to_another_size(axis: Any) -> None:
    registry = registry_of(make(axis=axis, padding_policy=PaddingPolicy.ZERO))
    raw = {"raw_bs": 2, "raw_num_tokens": 2}
    other = {"padded_bs": 4, "padded_num_tokens": 4}
    for padded in (4, 7, 5):
        buffer_of(registry).fill_(9)
        sizes = {**raw, **other, "padded_bs" if axis == "bs" else "padded_num_tokens": padded}
        registry.fill_from(SimpleNamespace(x=ones(2)), **sizes)
        assert content(registry)[:8] == [1] * 2 + [0] * (padded - 2) + [9] * (8 - padded)


@on_devices
def test_a_slice_function_decides_where_head_and_tail_are(device: str) -> None:
    slot = make(
        axis="tokens",
        shape_fn=lambda bs, tokens: (3, tokens),
        slice_fn=lambda buffer, n: buffer[:, :n],
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=-1,
    )
    registry = registry_of(slot, device=device)
    slot.buffer.fill_(9)
    batch = fill(registry, 2, padded=4, x=torch.tensor([[1, 2], [3, 4], [5, 6]], device=device))
    assert content(registry) == [[1, 2, -1, -1] + [9] * 12, [3, 4, -1, -1] + [9] * 12, [5, 6, -1, -1] + [9] * 12]
    assert extract(registry, batch, 4).x.tolist() == [[1, 2, -1, -1], [3, 4, -1, -1], [5, 6, -1, -1]]
    # The head is no part of what is reset, so the batch may be there already.
    fill(registry, 1, padded=4, x=slot.buffer[:, :1])
    assert extract(registry, batch, 4).x.tolist() == [[1, -1, -1, -1], [3, -1, -1, -1], [5, -1, -1, -1]]


def test_a_slice_may_be_longer_than_the_batch() -> None:
    slot = make(
        shape_fn=lambda bs, tokens: (bs + 1,),
        slice_fn=lambda buffer, n: buffer[: n + 1],
        padding_policy=PaddingPolicy.FILL_SENTINEL,
        pad_value=-1,
    )
    registry = registry_of(slot)
    fill(registry, 2, padded=4, x=torch.tensor([0, 3, 5]))
    assert content(registry)[:5] == [0, 3, 5, -1, -1]


def test_a_buffer_without_an_axis_is_filled_whole() -> None:
    registry = registry_of(make(axis="none", padding_policy=PaddingPolicy.FILL_ONCE, pad_value=7))
    assert content(registry) == [7] * 4
    batch = fill(registry, 2, x=torch.arange(4))
    assert content(registry) == [0, 1, 2, 3]
    assert extract(registry, batch).x.tolist() == [0, 1, 2, 3]
    with pytest.raises(
        GraphError,
        match=exactly("slot 'x': got a source of shape [2]; allowed is [4], and the whole slot has room for [4]"),
    ):
        fill(registry, 2, x=torch.arange(2))


def test_tokens_and_requests_are_padded_each_on_their_own() -> None:
    sentinel: dict[str, Any] = {"padding_policy": PaddingPolicy.FILL_SENTINEL, "pad_value": -1}
    registry = registry_of(make("r", **sentinel), make("t", axis="tokens", **sentinel))
    for name in ("r", "t"):
        buffer_of(registry, name).fill_(9)
    batch = SimpleNamespace(r=ones(2), t=ones(5))
    registry.fill_from(batch, raw_bs=2, padded_bs=3, raw_num_tokens=5, padded_num_tokens=7)
    assert content(registry, "r") == [1] * 2 + [-1] + [9] * 5
    assert content(registry, "t") == [1] * 5 + [-1] * 2 + [9] * 9


# ---- copies ---------------------------------------------------------------------------------------------------------

LOSSLESS = [
    (torch.int32, torch.int64),
    (torch.uint8, torch.int16),
    (torch.bool, torch.int64),
    (torch.bool, torch.bfloat16),
    (torch.int16, torch.float32),
    (torch.int32, torch.float64),
    (torch.int8, torch.bfloat16),
    (torch.uint8, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.float64),
    (torch.float32, torch.complex64),
]
LOSSY = [
    (torch.int64, torch.int32),
    (torch.uint8, torch.int8),
    (torch.int8, torch.uint8),
    (torch.int32, torch.float32),
    (torch.int64, torch.float64),
    (torch.int16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.int64),
    (torch.complex64, torch.float32),
    (torch.int64, torch.bool),
]


@pytest.mark.parametrize(("source", "destination"), LOSSLESS)
def test_a_dtype_goes_into_one_that_holds_all_its_numbers(source: torch.dtype, destination: torch.dtype) -> None:
    assert is_lossless(source, destination)


@pytest.mark.parametrize(("source", "destination"), LOSSY)
def test_a_dtype_does_not_go_into_one_that_lacks_some_number(source: torch.dtype, destination: torch.dtype) -> None:
    assert not is_lossless(source, destination)


def numbers_of(dtype: torch.dtype) -> Tensor:
    """All of a small dtype; of a larger, its ends, its neighbours of powers of two, and random patterns."""
    if dtype.itemsize <= 2 and dtype != torch.bool:
        patterns = torch.arange(256 ** min(dtype.itemsize, 2))
        return patterns.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    found = [random_bits(dtype, 500)]
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        limits = torch.iinfo(dtype)
        near = {sign * 2**power + more for sign in (-1, 1) for power in range(64) for more in (-1, 0, 1)}
        inside = [each for each in near | {limits.min, limits.max} if limits.min <= each <= limits.max]
        found.append(torch.tensor(inside, dtype=dtype))
    return torch.cat(found)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_what_is_called_lossless_is_the_same_number_afterwards() -> None:
    pairs = [
        (own, into) for own, into in itertools.product(COPYABLE, repeat=2) if own != into and is_lossless(own, into)
    ]
    assert len(pairs) > len(LOSSLESS)
    for source, destination in pairs:
        numbers = numbers_of(source)
        copied = torch.empty(numbers.shape, dtype=destination).copy_(numbers)
        if source.is_floating_point or source.is_complex:
            wide = torch.complex128 if destination.is_complex else torch.float64
            # A NaN stays some NaN.
            torch.testing.assert_close(
                copied.to(wide), numbers.to(wide), rtol=0, atol=0, equal_nan=True, msg=f"{source} into {destination}"
            )
        else:
            # Python compares an int and a float exactly.
            assert copied.tolist() == numbers.tolist(), (source, destination)


@pytest.mark.skipif(graph_registry.foreach_copy is None, reason="this release of torch has no foreach copy")
@pytest.mark.parametrize(("source", "destination"), [*LOSSLESS, (torch.int64, torch.int64)])
def test_many_at_once_and_one_by_one_give_the_same(
    source: torch.dtype, destination: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(4,), (3, 5), (), (0,), (2, 0)]
    sources = [random_bits(source, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    transposed = random_bits(source, 6, 2).t()
    sources.append(transposed)

    def copied() -> list[Tensor]:
        destinations = [torch.ones(each.shape, dtype=destination) for each in sources]
        copy_all(destinations, sources)
        return destinations

    at_once = copied()
    monkeypatch.setattr(graph_registry, "foreach_copy", None)
    for one, other, given in zip(at_once, copied(), sources, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(one, given.to(destination), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("padded", "rows", "of"),
    [((4, 8), 8, "tokens"), ((4, 8), 4, "requests"), ((4, 8), 5, None), ((8, 8), 8, "tokens")],
)
def test_rows_are_those_of_tokens_where_both_axes_are_padded_alike(
    padded: tuple[int, int], rows: int, of: str | None
) -> None:
    ctx = FillContext(raw_bs=2, padded_bs=padded[0], raw_num_tokens=5, padded_num_tokens=padded[1])
    tensor = torch.arange(float(rows))[:, None]
    assert rows_of(tensor, ctx) == of
    left = {"tokens": 5, "requests": 2, None: rows}[of]
    assert len(cut(tensor, rows_of(tensor, ctx), ctx)) == left


def test_a_registered_slots_fields_cannot_be_changed() -> None:
    slot = make(padding_policy=PaddingPolicy.FILL_SENTINEL, pad_value=-1)
    registry_of(slot)
    with pytest.raises(AttributeError, match=exactly("slot 'x': pad_value cannot be changed; make another slot")):
        slot.pad_value = 3
    assert slot.pad_value == -1


def test_a_hook_in_the_place_of_enabled_is_not_taken_for_true() -> None:
    def hook(buffer: Tensor, batch: Any, ctx: FillContext) -> None: ...

    with pytest.raises(GraphError, match=r"enabled=.*hook.*; it must be bool"):
        GraphSlot("x", make().shape_fn, torch.int64, "bs", None, PaddingPolicy.KEEP_PAD, None, hook)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"enabled": print}, "enabled=<built-in function print>; it must be bool"),
        ({"enabled": 1}, "enabled=1; it must be bool"),
        ({"copy_from_batch": None}, "copy_from_batch=None; it must be bool"),
        ({"dtype": "int64"}, "dtype='int64'; it must be dtype"),
        ({"dtype": int}, "it must be dtype"),
        ({"device": 0}, "device=0; it must be device or str or None"),
        ({"buffer": [0]}, r"buffer=\[0\]; it must be Tensor or None"),
        ({"pad_value": "0", "padding_policy": PaddingPolicy.FILL_SENTINEL}, "pad_value='0'; it must be"),
        ({"shape_fn": (4,)}, r"shape_fn=\(4,\); it must be a function"),
        ({"post_fill": True}, "post_fill=True; it must be a function"),
        ({"slice_fn": 3}, "slice_fn=3; it must be a function"),
        ({"source_fn": "x"}, "source_fn='x'; it must be a function"),
    ],
)
def test_a_field_of_another_type_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(GraphError, match=rf"slot 'x': .*{says}"):
        make(**wrong)


def test_a_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(GraphError, match=exactly("slot 3: name=3; it must be str")):
        make(3)  # type: ignore[arg-type]
