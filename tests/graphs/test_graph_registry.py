"""The registry of a captured graph's buffers: filled in three phases or not at all, never showing a stale value."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.graph_buffers import (
    MAX_BS,
    MAX_TOKENS,
    PADDED,
    buffer_of,
    content,
    extract,
    fill,
    make,
    on_devices,
    ones,
    registry_of,
)
from kit.refusals import exactly
from torch import Tensor

from graftlab.engine import ForwardBatch, SamplingBatchInfo
from graftlab.errors import GraphError
from graftlab.graphs import CudaGraphBufferRegistry, FillContext, PaddingPolicy
from graftlab.graphs import registry as graph_registry

# ---- registering ----------------------------------------------------------------------------------------------------


@on_devices
def test_a_slot_gets_a_buffer_of_its_shape_dtype_and_device(device: str) -> None:
    registry = registry_of(
        make("a", dtype=torch.float16),
        make("b", axis="tokens", shape_fn=lambda bs, tokens: (tokens, bs), device="cpu"),
        device=device,
    )
    assert registry.slot_names() == ["a", "b"]
    assert registry.has_slot("a")
    assert not registry.has_slot("c")
    a, b = buffer_of(registry, "a"), buffer_of(registry, "b")
    assert (a.shape, a.dtype, a.device.type) == ((MAX_BS,), torch.float16, device)
    assert (b.shape, b.dtype, b.device.type) == ((MAX_TOKENS, MAX_BS), torch.int64, "cpu")


def test_what_registering_returns_is_the_slot_with_its_buffer() -> None:
    registry, slot = registry_of(), make()
    assert registry.register_slot(slot) is slot is registry.get_slot("x")
    assert slot.buffer is not None


def test_a_second_slot_of_a_name_is_refused_and_the_first_stays() -> None:
    registry = registry_of(make())
    first = registry.get_slot("x")
    with pytest.raises(GraphError, match="slot 'x': a slot of this name exists already"):
        registry.register_slot(make())
    assert registry.get_slot("x") is first


def test_a_missing_slot_is_an_error_that_lists_the_slots() -> None:
    with pytest.raises(GraphError, match=r"no slot 'z'; the slots are \['a', 'b'\]"):
        registry_of(make("a"), make("b")).get_slot("z")


def test_one_slot_in_two_registries_has_a_buffer_in_each() -> None:
    slot = make()
    first, second = registry_of(slot), registry_of(slot)
    assert buffer_of(first) is slot.buffer
    assert buffer_of(first).data_ptr() != buffer_of(second).data_ptr()


@on_devices
@pytest.mark.parametrize("given_to", ["bind", "slot"])
def test_a_tensor_is_adopted_as_it_is(given_to: str, device: str) -> None:
    own = ones(MAX_BS, 7, device=device)
    for policy in PaddingPolicy:
        registry = registry_of(device=device)
        if given_to == "bind":
            registry.register_slot(make(padding_policy=policy, pad_value=3), bind=own)
        else:
            registry.register_slot(make(padding_policy=policy, pad_value=3, buffer=own))
        assert buffer_of(registry) is own
        assert own.tolist() == [7] * MAX_BS


@pytest.mark.parametrize(
    ("tensor", "got"),
    [
        (torch.zeros(MAX_BS + 1, dtype=torch.int64), r"shape \[9\], torch.int64, on cpu"),
        (torch.zeros(MAX_BS, 1, dtype=torch.int64), r"shape \[8, 1\], torch.int64, on cpu"),
        (torch.zeros(MAX_BS, dtype=torch.int32), r"shape \[8\], torch.int32, on cpu"),
        (torch.zeros(MAX_BS, dtype=torch.int64, device="meta"), r"shape \[8\], torch.int64, on meta"),
    ],
)
def test_a_tensor_of_another_kind_is_not_adopted(tensor: Tensor, got: str) -> None:
    registry = registry_of()
    with pytest.raises(GraphError, match=rf"slot 'x': cannot adopt .*{got}; allowed is .*\[8\], torch.int64, on cpu"):
        registry.register_slot(make(), bind=tensor)
    assert not registry.has_slot("x")


@pytest.mark.parametrize("shape", [(), (MAX_BS - 1,)])
def test_a_shape_without_room_for_the_largest_batch_is_refused(shape: tuple[int, ...]) -> None:
    registry = registry_of()
    with pytest.raises(GraphError, match=r"slot 'x': got a size of [08] along its axis 'bs'; its shape is \[7?\]"):
        registry.register_slot(make(shape_fn=lambda bs, tokens: shape))
    assert not registry.has_slot("x")


def test_negative_maxima_are_refused() -> None:
    with pytest.raises(GraphError, match=exactly("max_bs=-1 and max_num_tokens=4 cannot be negative")):
        CudaGraphBufferRegistry("cpu", -1, 4, False)


def test_a_slot_that_is_off_has_a_name_and_nothing_else() -> None:
    def hook(buffer: Tensor, batch: Any, ctx: FillContext) -> None:
        raise AssertionError("a slot that is off has no hooks")

    def source(batch: Any, ctx: FillContext) -> Tensor:
        raise AssertionError("a slot that is off asks for no source")

    registry = registry_of(make(enabled=False, post_fill=hook, source_fn=source), make("y"))
    assert registry.has_slot("x")
    assert registry.get_slot("x").buffer is None
    # As long as it is off, its field may be anything.
    batch = fill(registry, 2, x="no tensor", y=ones(2))
    assert extract(registry, batch).x == "no tensor"
    with pytest.raises(GraphError, match="slot 'x': a slot of this name exists already"):
        registry.register_slot(make())


# ---- absent fields, sources -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [{}, {"x": None}])
@pytest.mark.parametrize("policy", PaddingPolicy)
def test_a_graph_reads_nothing_of_an_earlier_batch_where_the_field_is_absent(
    policy: PaddingPolicy, absent: dict[str, None]
) -> None:
    registry = registry_of(make(padding_policy=policy, pad_value=7))
    fill(registry, 5, x=torch.arange(1, 6))
    before = content(registry)
    fill(registry, 3, **absent)
    expected = {PaddingPolicy.ZERO: [0] * 6, PaddingPolicy.FILL_SENTINEL: [7] * 6}.get(policy, before[:6])
    assert content(registry)[:6] == expected


def test_an_absent_field_is_carried_and_not_shown_stale() -> None:
    registry = registry_of(make("x"), make("y"))
    full = fill(registry, 3, x=ones(3), y=ones(3))
    assert extract(registry, full).x.shape == (PADDED,)
    without = fill(registry, 3, x=None, y=ones(3))
    view = extract(registry, without)
    assert view.x is None
    assert view.y.shape == (PADDED,)
    # Also in a template that has it, such as the batch of the capture.
    assert extract(registry, full).x is full.x
    fill(registry, 3, x=ones(3), y=ones(3))
    assert extract(registry, full).x.shape == (PADDED,)
    assert extract(registry, without).x is None


def test_a_field_that_the_batch_does_not_have_is_not_added_to_it() -> None:
    registry = registry_of(make("x"), make("derived", copy_from_batch=False))
    assert vars(extract(registry, fill(registry, 2))) == {}


def test_a_source_function_is_asked_in_place_of_the_field() -> None:
    asked = []

    def source(batch: Any, ctx: FillContext) -> Tensor | None:
        asked.append(ctx)
        return None if ctx.pp_proxy_tensors is None else ctx.pp_proxy_tensors["hidden"]

    registry = registry_of(make(source_fn=source, dtype=torch.float32))
    batch = SimpleNamespace(x=None)
    sizes = {"raw_bs": 2, "padded_bs": 3, "raw_num_tokens": 2, "padded_num_tokens": 4}
    proxies = {"hidden": torch.tensor([0.5, 1.5])}
    registry.fill_from(batch, **sizes, pp_proxy_tensors=proxies)
    assert asked == [FillContext(2, 3, 2, 4, proxies)]
    assert content(registry)[:3] == [0.5, 1.5, 0.0]
    assert extract(registry, batch, 3).x.tolist() == [0.5, 1.5, 0.0]
    # And where it has nothing, the field is absent.
    registry.fill_from(batch, **sizes)
    assert extract(registry, batch, 3).x is None


def test_a_slot_that_is_not_copied_belongs_to_its_hook() -> None:
    def count(buffer: Tensor, batch: Any, ctx: FillContext) -> None:
        buffer[: ctx.raw_bs] += 1

    registry = registry_of(make(copy_from_batch=False, padding_policy=PaddingPolicy.ZERO, post_fill=count))
    fill(registry, 5, x=ones(5, 99))
    batch = fill(registry, 3, x=None)
    # The head is what the hook made of it, and the tail is reset before it all the same.
    assert content(registry)[:PADDED] == [2, 2, 2, 0, 0, 0]
    assert extract(registry, batch).x.tolist() == [2, 2, 2, 0, 0, 0]


# ---- phases ---------------------------------------------------------------------------------------------------------


def test_tails_come_first_then_copies_then_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, list[int], list[int]]] = []
    real_copy_all = graph_registry.copy_all

    def look(what: str) -> None:
        happened.append((what, content(registry, "a")[:3], content(registry, "b")[:3]))

    def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
        look("copies")
        real_copy_all(destinations, sources)

    policy: dict[str, Any] = {"padding_policy": PaddingPolicy.FILL_SENTINEL, "pad_value": -1}
    registry = registry_of(
        make("a", **policy, post_fill=lambda *args: look("hook of a")),
        make("b", **policy, post_fill=lambda *args: look("hook of b")),
    )
    monkeypatch.setattr(graph_registry, "copy_all", copy_all)
    fill(registry, 3, 3, a=ones(3, 8), b=ones(3, 9))
    happened.clear()
    fill(registry, 1, 3, a=ones(1), b=ones(1, 2))
    assert happened == [
        ("copies", [8, -1, -1], [9, -1, -1]),
        ("hook of a", [1, -1, -1], [2, -1, -1]),
        ("hook of b", [1, -1, -1], [2, -1, -1]),
    ]


def test_a_hook_gets_the_whole_buffer_the_batch_and_the_sizes_also_without_the_field() -> None:
    calls = []
    registry = registry_of(make(post_fill=lambda *args: calls.append(args)))
    for source in (ones(2), None):
        batch = fill(registry, 2, x=source)
        buffer, seen, ctx = calls.pop()
        assert buffer is buffer_of(registry)
        assert seen is batch
        assert ctx == FillContext(2, PADDED, 2, PADDED)


@pytest.mark.skipif(graph_registry.foreach_copy is None, reason="this release of torch has no foreach copy")
def test_copies_go_together_by_device_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def foreach_copy(destinations: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        calls.append(sorted((str(into.dtype), str(own.dtype)) for into, own in zip(destinations, sources, strict=True)))
        torch._foreach_copy_(destinations, sources, non_blocking)

    monkeypatch.setattr(graph_registry, "foreach_copy", foreach_copy)
    wide = {name: make(name) for name in "abcd"}
    registry = registry_of(*wide.values(), make("e", dtype=torch.float32), make("f"))
    small = torch.int32
    narrow = {"b": ones(2, dtype=small), "d": ones(2, dtype=small)}
    fill(registry, 2, a=ones(2), c=ones(2), e=ones(2, dtype=torch.float32), **narrow)
    assert sorted(calls) == [
        [("torch.float32", "torch.float32")],
        [("torch.int64", "torch.int32")] * 2,
        [("torch.int64", "torch.int64")] * 2,
    ]


def test_sizes_without_end_do_not_fill_the_memory_with_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_registry, "_MOST_PLANS", 3)
    registry = registry_of(make())
    for size in [*range(1, MAX_BS + 1), *range(1, MAX_BS + 1)]:
        extract(registry, fill(registry, size, size, x=ones(size)), size)
        assert content(registry)[:size] == [1] * size
        assert len(registry._plans) <= 3
        assert len(registry._views) <= 3


# ---- errors, before anything was written ----------------------------------------------------------------------------


SIZES = {"raw_bs": 3, "padded_bs": 6, "raw_num_tokens": 5, "padded_num_tokens": 10}


def refused(match: str, sizes: dict[str, int], **fields: Any) -> None:
    """Three slots, and the last is at fault: neither resets nor copies nor hooks may have happened."""
    policy: dict[str, Any] = {"padding_policy": PaddingPolicy.FILL_SENTINEL, "pad_value": -1}
    hooked: list[object] = []
    registry = registry_of(
        make("r", **policy, post_fill=lambda *args: hooked.append(args)),
        make("t", axis="tokens", **policy),
        make("last", dtype=torch.int32, **policy),
    )
    good = {"r": ones(3), "t": ones(5), "last": ones(3, dtype=torch.int32)}
    # What is right about other batches must not be taken for right about this one, nor may it be later.
    registry.fill_from(SimpleNamespace(**good), **SIZES)
    registry.fill_from(SimpleNamespace(**{**good, "last": None}), **SIZES)
    for _ in range(2):
        for name in good:
            buffer_of(registry, name).fill_(9)
        hooked.clear()
        with pytest.raises(GraphError, match=match):
            registry.fill_from(SimpleNamespace(**{**good, **fields}), **sizes)
        assert {name: set(content(registry, name)) for name in good} == {name: {9} for name in good}
        assert hooked == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"padded_bs": 9}, r"raw_bs=3 and padded_bs=9; allowed is .* <= 8 \(max_bs\), .*\['r', 'last'\]"),
        ({"raw_bs": 7}, "raw_bs=7 and padded_bs=6; allowed is 0 <= raw <= padded"),
        ({"raw_bs": -1}, "raw_bs=-1"),
        ({"padded_num_tokens": 17}, r"padded_num_tokens=17; allowed is .* <= 16 \(max_num_tokens\), .*\['t'\]"),
        ({"raw_num_tokens": 11}, "raw_num_tokens=11 and padded_num_tokens=10"),
    ],
)
def test_impossible_sizes_are_refused(change: dict[str, int], match: str) -> None:
    refused(match, {**SIZES, **change})


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (ones(MAX_BS + 1), r"shape \[9\]; allowed is \[3\] with raw_bs=3, and the whole slot has room for \[8\]"),
        (ones(4), r"shape \[4\]; allowed is \[3\]"),
        # Neither may be stretched over the batch.
        (ones(1), r"shape \[1\]; allowed is \[3\]"),
        (torch.tensor(1), r"shape \[\]; allowed is \[3\]"),
        (ones(3).view(3, 1), r"shape \[3, 1\]; allowed is \[3\]"),
        (ones(3), "torch.int64, which would lose data as torch.int32"),
        (torch.ones(3), "torch.float32, which would lose data as torch.int32"),
        ([1, 2, 3], "got list from the batch; it must be a tensor"),
        (0, "got int from the batch; it must be a tensor"),
    ],
)
def test_a_source_that_does_not_fit_its_slot_is_refused(source: object, match: str) -> None:
    refused(f"slot 'last': .*{match}", SIZES, last=source)


def test_a_source_function_that_raises_leaves_the_buffers_as_they_were() -> None:
    def broken(batch: Any, ctx: FillContext) -> Tensor:
        raise RuntimeError("no such thing")

    registry = registry_of(make("x", padding_policy=PaddingPolicy.ZERO), make("y", source_fn=broken))
    buffer_of(registry).fill_(9)
    with pytest.raises(RuntimeError, match="no such thing"):
        fill(registry, 2, x=ones(2))
    assert content(registry) == [9] * MAX_BS


@pytest.mark.parametrize("sizes", [(9, 4), (4, 17), (-1, 4)])
def test_impossible_sizes_are_not_extracted(sizes: tuple[int, int]) -> None:
    registry = registry_of(make())
    with pytest.raises(GraphError, match="allowed is"):
        registry.extract_buffer(
            padded_bs=sizes[0], padded_num_tokens=sizes[1], forward_batch_template=SimpleNamespace(x=ones(2))
        )


# ---- sources that lie in the buffers --------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize("at_once", [True, False])
def test_a_source_may_lie_in_the_buffers(at_once: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not at_once:
        monkeypatch.setattr(graph_registry, "foreach_copy", None)
    registry = registry_of(*(make(name, padding_policy=PaddingPolicy.ZERO) for name in "abc"), device=device)
    a, b = buffer_of(registry, "a"), buffer_of(registry, "b")
    start = {name: torch.arange(1, 7, device=device) + 10 * place for place, name in enumerate("abc")}

    fill(registry, 6, **start)
    # Its own place.
    fill(registry, 3, a=a[:3], b=start["b"][:3], c=start["c"][:3])
    assert content(registry, "a") == [1, 2, 3, 0, 0, 0, 0, 0]

    fill(registry, 6, **start)
    # Its own tail, which the reset would have wiped; and each other's heads, which the copies would have.
    fill(registry, 3, a=b[:3], b=a[:3], c=buffer_of(registry, "c")[3:6])
    assert [content(registry, name)[:6] for name in "abc"] == [
        [11, 12, 13, 0, 0, 0],
        [1, 2, 3, 0, 0, 0],
        [24, 25, 26, 0, 0, 0],
    ]

    fill(registry, 6, **start)
    # Its own place, moved by less than its length, and backwards.
    fill(registry, 4, a=a[1:5], b=b[:4].flip(0), c=start["c"][:4])
    assert content(registry, "a")[:6] == [2, 3, 4, 5, 0, 0]
    assert content(registry, "b")[:6] == [14, 13, 12, 11, 0, 0]


def test_a_source_with_other_strides_at_the_slots_own_place_is_read_as_it_is() -> None:
    buffer = torch.arange(16).view(4, 4)
    slot = make(axis="none", shape_fn=lambda bs, tokens: (4, 4), buffer=buffer)
    registry = registry_of(slot)
    fill(registry, 2, x=buffer.t())
    assert buffer.tolist() == torch.arange(16).view(4, 4).t().tolist()


def test_a_source_that_is_the_slots_own_place_as_another_dtype_is_read_as_it_is() -> None:
    registry = registry_of(make())
    buffer = buffer_of(registry)
    buffer.copy_(torch.arange(1, 9))
    expected = buffer.view(torch.int32)[:4].tolist()
    fill(registry, 4, x=buffer.view(torch.int32)[:4])
    assert content(registry)[:4] == expected


def test_an_adopted_buffer_may_have_gaps() -> None:
    wide = torch.full((MAX_BS, 2), 9)
    registry = registry_of()
    registry.register_slot(make(padding_policy=PaddingPolicy.ZERO), bind=wide[:, 0])
    fill(registry, 2, padded=4, x=ones(2))
    assert wide[:, 0].tolist() == [1, 1, 0, 0, 9, 9, 9, 9]
    assert wide[:, 1].tolist() == [9] * MAX_BS


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_source_may_be_written_again_as_soon_as_the_fill_is_done(pinned: bool) -> None:
    registry = registry_of(make("to", padding_policy=PaddingPolicy.ZERO), make("back", device="cpu"), device="cuda")
    source = torch.arange(PADDED, pin_memory=pinned)
    for step in range(200):
        source.copy_(torch.arange(PADDED) + step)
        fill(registry, PADDED, to=source, back=torch.arange(PADDED, device="cuda") * step)
        source.fill_(-1)
        assert content(registry, "back")[:PADDED] == (torch.arange(PADDED) * step).tolist()
        assert content(registry, "to")[:PADDED] == (torch.arange(PADDED) + step).tolist()


# ---- autograd -------------------------------------------------------------------------------------------------------


def test_a_source_that_requires_grad_leaves_the_buffer_out_of_autograd() -> None:
    registry = registry_of(make(dtype=torch.float32, padding_policy=PaddingPolicy.ZERO))
    batch = fill(registry, 2, x=torch.ones(2, requires_grad=True))
    assert not buffer_of(registry).requires_grad
    assert not extract(registry, batch).x.requires_grad


def test_a_registry_works_inside_and_outside_inference_mode_wherever_it_was_made() -> None:
    with torch.inference_mode():
        registry = registry_of(make(padding_policy=PaddingPolicy.ZERO))
        batch = fill(registry, 3, x=ones(3))
        view = extract(registry, batch)
    view.x.add_(1)
    fill(registry, 2, x=ones(2))
    fill(registry, 3, x=batch.x)
    with torch.inference_mode():
        fill(registry, 4, x=ones(4))
    assert content(registry) == [1, 1, 1, 1, 0, 0, 0, 0]


# ---- what is shown --------------------------------------------------------------------------------------------------


def decode_batch(size: int, **changes: Any) -> ForwardBatch:
    def numbers(start: int) -> Tensor:
        return torch.arange(start, start + size)

    rids, seq_lens = numbers(700), numbers(40)
    info = SamplingBatchInfo(torch.zeros(size), numbers(50), seq_lens, numbers(60), True, rids_int=rids)
    batch = ForwardBatch(
        mode="decode",
        input_ids=numbers(10),
        positions=numbers(20),
        out_cache_loc=numbers(30),
        req_pool_indices=numbers(0),
        seq_lens=seq_lens,
        seq_lens_cpu=numbers(40),
        rids_int=rids,
        request_ids=tuple(f"r{place}" for place in range(size)),
        sampling_info=info,
    )
    return dataclasses.replace(batch, **changes)


def test_a_batch_is_shown_with_views_of_the_buffers_and_its_other_fields() -> None:
    registry = registry_of(make("input_ids", padding_policy=PaddingPolicy.ZERO), make("mrope_positions"))
    batch = decode_batch(3)
    registry.fill_from(batch, raw_bs=3, padded_bs=PADDED, raw_num_tokens=3, padded_num_tokens=PADDED)
    view = extract(registry, batch)
    assert type(view) is ForwardBatch
    assert view.input_ids.tolist() == [10, 11, 12, 0, 0, 0]
    assert view.input_ids.data_ptr() == buffer_of(registry, "input_ids").data_ptr()
    assert view.positions is batch.positions
    assert view.request_ids == batch.request_ids
    assert view.mrope_positions is None
    # The batch itself is as it was.
    assert batch.input_ids.tolist() == [10, 11, 12]


def test_the_sampling_info_shows_the_batchs_own_tensors_as_the_batch_does() -> None:
    registry = registry_of(make("rids_int", padding_policy=PaddingPolicy.ZERO), make("positions"))
    batch = decode_batch(3)
    registry.fill_from(batch, raw_bs=3, padded_bs=PADDED, raw_num_tokens=3, padded_num_tokens=PADDED)
    view = extract(registry, batch)
    assert view.sampling_info.rids_int is view.rids_int
    assert view.rids_int.tolist() == [700, 701, 702, 0, 0, 0]
    # Its own positions are another thing of the same name.
    assert view.sampling_info.positions is batch.sampling_info.positions
    assert batch.sampling_info.rids_int is batch.rids_int
    assert batch.rids_int.shape == (3,)


def test_the_sampling_info_shows_an_equal_copy_of_the_identities_as_the_batch_does() -> None:
    registry = registry_of(make("rids_int", padding_policy=PaddingPolicy.ZERO), make("positions"))
    batch = decode_batch(3)
    for rids, expected in ((batch.rids_int.clone(), [700, 701, 702, 0, 0, 0]), (torch.arange(3), [0, 1, 2])):
        info = dataclasses.replace(batch.sampling_info, rids_int=rids, positions=batch.positions.clone())
        shown = dataclasses.replace(batch, sampling_info=info)
        registry.fill_from(shown, raw_bs=3, padded_bs=PADDED, raw_num_tokens=3, padded_num_tokens=PADDED)
        view = extract(registry, shown)
        assert view.sampling_info.rids_int.tolist() == expected
        assert view.sampling_info.positions is info.positions


def test_views_of_all_sizes_begin_where_the_buffer_begins() -> None:
    registry = registry_of(make())
    template = fill(registry, 1, x=ones(1))
    places = {extract(registry, template, size).x.data_ptr() for size in range(1, MAX_BS + 1)}
    assert places == {buffer_of(registry).data_ptr()}


def test_a_runner_of_no_size_has_a_registry_and_one_of_less_is_refused() -> None:
    registry = CudaGraphBufferRegistry("cpu", 0, 0)
    assert (registry.max_bs, registry.max_num_tokens) == (0, 0)
    for sizes in ((-1, 4), (4, -1)):
        with pytest.raises(GraphError, match="cannot be negative"):
            CudaGraphBufferRegistry("cpu", *sizes)
