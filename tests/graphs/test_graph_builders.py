"""Registries as they are used: any sequence of batches, memory that several share, and the slots of an engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.graph_buffers import MAX_BS, MAX_TOKENS, buffer_of, content, extract, fill, make, on_devices, ones, registry_of
from kit.refusals import exactly
from torch import Tensor

from graftlab.engine import PADDING_SLOT, ForwardBatch
from graftlab.errors import GraphError, RequestError
from graftlab.graphs import (
    CudaGraphBufferRegistry,
    ForwardInputBuffers,
    GraphSlot,
    PaddingPolicy,
    build_decode_registry,
    build_prefill_registry,
    clear_input_buffer_pool,
    share_input_buffer,
)
from graftlab.graphs import registry as graph_registry
from graftlab.graphs.builders import _head
from graftlab.requests.identity import NO_ROOM, PADDING_ID

PAD = -5


@pytest.fixture(autouse=True)
def own_pool() -> Iterator[None]:
    clear_input_buffer_pool()
    yield
    clear_input_buffer_pool()


# ---- any sequence of fills ------------------------------------------------------------------------------------------

SPECS = [(policy, axis, copied) for policy in PaddingPolicy for axis in ("bs", "tokens") for copied in (True, False)]
SLOTS_ON = st.lists(st.booleans(), min_size=len(SPECS), max_size=len(SPECS))


@dataclass
class Model:
    """A buffer as a list of numbers, and what a fill is said to do to each of them."""

    policy: PaddingPolicy
    copied: bool
    values: list[int]

    def fill(self, source: list[int] | None, raw: int, padded: int) -> None:
        for place in range(padded):
            if self.copied and source is not None and place < raw:
                self.values[place] = source[place]
            elif place < raw and not self.copied:
                continue
            elif self.policy is PaddingPolicy.ZERO:
                self.values[place] = 0
            elif self.policy is PaddingPolicy.FILL_SENTINEL:
                self.values[place] = PAD


@st.composite
def sizes(draw: st.DrawFn) -> dict[str, int]:
    padded_bs, padded_num_tokens = draw(st.integers(0, MAX_BS)), draw(st.integers(0, MAX_TOKENS))
    return {
        "raw_bs": draw(st.integers(0, padded_bs)),
        "padded_bs": padded_bs,
        "raw_num_tokens": draw(st.integers(0, padded_num_tokens)),
        "padded_num_tokens": padded_num_tokens,
    }


@on_devices
@examples(60)
@given(
    steps=st.lists(st.tuples(sizes(), SLOTS_ON, SLOTS_ON), min_size=1, max_size=8),
    most_plans=st.sampled_from([1, 3, 256]),
    at_once=st.booleans(),
)
def test_any_sequence_of_fills_does_what_filling_number_by_number_does(
    device: str, steps: list[tuple[dict[str, int], list[bool], list[bool]]], most_plans: int, at_once: bool
) -> None:
    names = [str(place) for place in range(len(SPECS))]
    registry = registry_of(device=device)
    models = []
    for name, (policy, axis, copied) in zip(names, SPECS, strict=True):
        registry.register_slot(
            make(name, axis=axis, padding_policy=policy, pad_value=PAD, copy_from_batch=copied, device=device)
        )
        at_first = PAD if policy in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE) else 0
        models.append(Model(policy, copied, [at_first] * (MAX_BS if axis == "bs" else MAX_TOKENS)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_registry, "_MOST_PLANS", most_plans)
        if not at_once:
            patch.setattr(graph_registry, "foreach_copy", None)
        number = 0
        for step, present, small in steps:
            batch = SimpleNamespace()
            for place, (_, axis, _) in enumerate(SPECS):
                what = "bs" if axis == "bs" else "num_tokens"
                raw, padded = step[f"raw_{what}"], step[f"padded_{what}"]
                # No number comes twice, so that a stale one shows.
                values = [number + each for each in range(1, raw + 1)] if present[place] else None
                number += raw
                models[place].fill(values, raw, padded)
                dtype = torch.int32 if small[place] else torch.int64
                setattr(batch, names[place], None if values is None else torch.tensor(values, dtype=dtype).to(device))
            registry.fill_from(batch, **step)
            assert [content(registry, name) for name in names] == [model.values for model in models]
            padded_sizes = {key: size for key, size in step.items() if key.startswith("padded")}
            view = registry.extract_buffer(**padded_sizes, forward_batch_template=batch)
            for place, (_, axis, copied) in enumerate(SPECS):
                shown = getattr(view, names[place])
                if copied and not present[place]:
                    assert shown is None
                else:
                    padded = step["padded_bs" if axis == "bs" else "padded_num_tokens"]
                    assert shown.tolist() == models[place].values[:padded]


# ---- the pool -------------------------------------------------------------------------------------------------------


@on_devices
def test_one_spec_has_one_memory_whatever_its_shapes(device: str) -> None:
    first = share_input_buffer("x", torch.arange(12, device=device))
    second = share_input_buffer("x", torch.zeros(3, 4, dtype=torch.int64, device=device))
    assert second.tolist() == torch.arange(12).view(3, 4).tolist()
    second[2, 3] = -1
    assert first[11] == -1


def test_another_name_size_dtype_or_device_has_another_memory() -> None:
    tensors = [
        share_input_buffer("x", torch.zeros(4)),
        share_input_buffer("y", torch.zeros(4)),
        share_input_buffer("x", torch.zeros(5)),
        share_input_buffer("x", torch.zeros(4, dtype=torch.int32)),
        share_input_buffer("x", torch.zeros(4, device="meta")),
    ]
    assert len({(each.data_ptr(), each.device) for each in tensors}) == len(tensors)
    assert share_input_buffer("x", torch.ones(4)).data_ptr() == tensors[0].data_ptr()


def test_a_buffer_that_other_shapes_cannot_be_laid_over_is_refused() -> None:
    with pytest.raises(
        GraphError,
        match=exactly("buffer 'x' of shape [3, 2] has strides [1, 3]; only contiguous buffers can be shared"),
    ):
        share_input_buffer("x", torch.zeros(2, 3).t())


def test_a_cleared_pool_starts_anew_and_takes_nothing_away() -> None:
    first = share_input_buffer("x", ones(4))
    clear_input_buffer_pool()
    second = share_input_buffer("x", ones(4, 2))
    assert first.tolist() == [1] * 4
    assert second.tolist() == [2] * 4


def test_threads_that_come_at_once_get_one_memory() -> None:
    start, found = threading.Barrier(8), []

    def share() -> None:
        start.wait(30)
        found.append(share_input_buffer("x", torch.zeros(4)).data_ptr())

    threads = [threading.Thread(target=share) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


# Name, shape, dtype: some of one number of elements, which may share, and some of one name only, which may not.
SHARED_SPECS = [
    ("a", (8,), torch.int64),
    ("a", (8, 2), torch.int64),
    ("a", (16,), torch.int64),
    ("a", (8,), torch.int32),
    ("b", (8,), torch.int64),
    ("c", (8, 2), torch.float32),
    ("c", (16, 1), torch.float32),
]
REGISTRY = st.tuples(st.lists(st.sampled_from(SHARED_SPECS), unique_by=lambda spec: spec[0]), st.booleans())


@given(st.lists(REGISTRY, min_size=2, max_size=4))
def test_registries_built_in_any_order_share_what_they_should_and_nothing_else(
    built: list[tuple[list[tuple[str, tuple[int, ...], torch.dtype]], bool]],
) -> None:
    clear_input_buffer_pool()
    keys: dict[tuple[int, str], object] = {}
    registries = []
    for place, (specs, share_pool) in enumerate(built):
        registry = registry_of(share_pool=share_pool)
        for name, shape, dtype in specs:
            registry.register_slot(make(name, shape_fn=lambda bs, tokens, shape=shape: shape, dtype=dtype))
            key = (name, torch.Size(shape).numel(), dtype)
            keys[place, name] = key if share_pool else (place, *key)
        registries.append(registry)
    memory = {each: buffer_of(registries[each[0]], each[1]).untyped_storage().data_ptr() for each in keys}
    for one in keys:
        for other in keys:
            assert (memory[one] == memory[other]) == (keys[one] == keys[other])


def test_pool_memory_is_filled_once_only_for_fill_once_slots() -> None:
    once: dict[str, Any] = {"padding_policy": PaddingPolicy.FILL_ONCE, "pad_value": 7}
    first = registry_of(make(), share_pool=True)
    fill(first, 3, x=ones(3, 5))
    assert content(registry_of(make(), share_pool=True)) == [5, 5, 5, 0, 0, 0, 0, 0]
    assert content(registry_of(make(**once), share_pool=True)) == [7] * 8


def test_an_adopted_tensor_does_not_become_the_pools() -> None:
    own = ones(MAX_BS)
    registry_of(share_pool=True).register_slot(make(), bind=own)
    other = registry_of(make(), share_pool=True)
    assert buffer_of(other).data_ptr() != own.data_ptr()
    assert content(other) == [0] * MAX_BS


# ---- builders -------------------------------------------------------------------------------------------------------

# What is safe in the tail of each.
SAFE = {
    "input_ids": 0,
    "positions": 0,
    "out_cache_loc": PADDING_SLOT,
    "req_pool_indices": 0,
    "seq_lens": 1,
    "seq_lens_cpu": 1,
    "mrope_positions": 0,
    "encoder_lens": 0,
    "rids_int": PADDING_ID,
    "bootstrap_room_ids_int": NO_ROOM,
}
PER_TOKEN = {"input_ids", "positions", "out_cache_loc", "mrope_positions"}
OPTIONAL = ["mrope_positions", "encoder_lens", "rids_int", "bootstrap_room_ids_int"]


def build(kind: str, device: str = "cpu", **options: Any) -> CudaGraphBufferRegistry:
    builder = {"decode": build_decode_registry, "prefill": build_prefill_registry}[kind]
    return builder(device=device, max_bs=MAX_BS, max_num_tokens=MAX_TOKENS, **{"request_ids": True, **options})


kinds = pytest.mark.parametrize("kind", ["decode", "prefill"])


@on_devices
@kinds
def test_a_builder_makes_the_slots_of_a_batch(kind: str, device: str) -> None:
    registry = build(kind, device)
    assert registry.slot_names() == list(SAFE)
    for name in SAFE:
        slot, buffer = registry.get_slot(name), buffer_of(registry, name)
        per_token = kind == "prefill" and name in PER_TOKEN
        length = MAX_TOKENS if per_token else MAX_BS
        assert slot.axis == ("tokens" if per_token else "bs")
        assert slot.padding_policy.resets
        assert buffer.shape == ((3, length) if name == "mrope_positions" else (length,))
        assert buffer.dtype == torch.int64
        assert buffer.device.type == ("cpu" if name == "seq_lens_cpu" else device)
        # A capture before the first fill reads values that are as safe as a tail's.
        assert buffer.unique().tolist() == [SAFE[name]]


def test_a_decode_without_a_size_for_tokens_has_one_for_each_request() -> None:
    assert build_decode_registry("cpu", 5).max_num_tokens == 5


@kinds
def test_the_slot_for_paddings_keys_and_values_can_be_another(kind: str) -> None:
    assert buffer_of(build(kind, padding_slot=99), "out_cache_loc").unique().tolist() == [99]


@kinds
@pytest.mark.parametrize("wrap", [dict, lambda found: SimpleNamespace(**found)], ids=["mapping", "attributes"])
def test_a_builder_adopts_the_buffers_that_a_source_has(kind: str, wrap: Any) -> None:
    length = MAX_TOKENS if kind == "prefill" else MAX_BS
    own = {"positions": ones(length, 4), "rids_int": ones(MAX_BS, 5), "seq_lens": None}
    registry = build(kind, source=wrap(own))
    for name in SAFE:
        adopted = own.get(name) is not None
        assert (buffer_of(registry, name) is own.get(name)) == adopted
    assert content(registry, "positions") == [4] * length


@kinds
def test_a_builder_adopts_the_buffers_of_another_registry(kind: str) -> None:
    first = build(kind)
    second = build(kind, source=first)
    assert all(buffer_of(second, name) is buffer_of(first, name) for name in SAFE)


@pytest.mark.parametrize(
    ("found", "needed", "taken"),
    [
        ((8, 3), (4, 3), (4, 3)),
        ((8, 3), (8, 2), (8, 2)),
        ((4, 3), (4, 3), None),
        ((4, 3), (8, 2), None),
        ((8,), (4, 3), None),
    ],
)
def test_of_a_larger_buffer_its_head_is_taken(found: Any, needed: Any, taken: Any) -> None:
    buffer = torch.zeros(found)
    head = _head(buffer, needed)
    assert head.data_ptr() == buffer.data_ptr()
    assert (head is buffer) == (taken is None)
    assert head.shape == (taken or found)


def test_what_two_kinds_of_registry_cannot_share_by_adoption_is_named() -> None:
    with pytest.raises(
        GraphError,
        match=exactly(
            "slot 'input_ids': cannot adopt a tensor of shape [8], torch.int64, on cpu; allowed is a "
            "tensor of shape [16], torch.int64, on cpu"
        ),
    ):
        build("prefill", source=build("decode"))


def test_registries_of_both_kinds_share_through_the_pool_what_has_one_size() -> None:
    prefill, decode = build("prefill", share_pool=True), build("decode", share_pool=True)
    shared = {name for name in SAFE if buffer_of(prefill, name).data_ptr() == buffer_of(decode, name).data_ptr()}
    assert shared == set(SAFE) - PER_TOKEN


def batch_of(kind: str, bs: int, num_tokens: int, start: int, absent: set[str], device: str) -> ForwardBatch:
    """No number in it is one of another batch's, or of SAFE."""

    def numbers(name: str) -> Tensor | None:
        if name in absent:
            return None
        count = num_tokens if name in PER_TOKEN and kind == "prefill" else bs
        found = torch.arange(start, start + 3 * count).view(3, count)
        on = "cpu" if name == "seq_lens_cpu" else device
        return (found if name == "mrope_positions" else found[0]).to(on)

    return ForwardBatch(mode=kind, **{name: numbers(name) for name in SAFE})  # type: ignore[arg-type]


@on_devices
@kinds
@examples(40)
@given(
    steps=st.lists(st.tuples(sizes(), st.sets(st.sampled_from(OPTIONAL))), min_size=2, max_size=8),
    share_pool=st.booleans(),
)
def test_no_graph_of_an_engine_ever_reads_a_stale_value(
    device: str, kind: str, steps: list[tuple[dict[str, int], set[str]]], share_pool: bool
) -> None:
    registry = build(kind, device, share_pool=share_pool)
    for number, (step, absent) in enumerate(steps, start=1):
        batch = batch_of(kind, step["raw_bs"], step["raw_num_tokens"], 1000 * number, absent, device)
        registry.fill_from(batch, **step)
        view = registry.extract_buffer(
            padded_bs=step["padded_bs"], padded_num_tokens=step["padded_num_tokens"], forward_batch_template=batch
        )
        for name, safe in SAFE.items():
            what = "num_tokens" if name in PER_TOKEN and kind == "prefill" else "bs"
            raw, padded = step[f"raw_{what}"], step[f"padded_{what}"]
            # What a captured graph reads, whatever the batch shows.
            read = registry.get_slot(name).slice_for(step["padded_bs"], step["padded_num_tokens"])
            head, tail = read[..., :raw], read[..., raw:]
            assert read.shape[-1] == padded
            assert tail.numel() == (tail == safe).sum()
            if name in absent:
                assert getattr(view, name) is None
                assert head.numel() == (head == safe).sum()
            else:
                assert getattr(view, name).tolist() == read.tolist()
                assert head.tolist() == getattr(batch, name).tolist()


# ---- builders' options ----------------------------------------------------------------------------------------------


@kinds
def test_the_lengths_of_padding_requests_can_be_others(kind: str) -> None:
    registry = build(kind, seq_len_fill_value=7, encoder_len_fill_value=3)
    for name, value in {"seq_lens": 7, "seq_lens_cpu": 7, "encoder_lens": 3}.items():
        registry.get_slot(name).buffer.fill_(99)  # type: ignore[union-attr]
        assert registry.get_slot(name).pad_value == value
    registry.fill_from(
        SimpleNamespace(seq_lens=ones(2, 5), encoder_lens=ones(2, 6)),
        raw_bs=2,
        padded_bs=4,
        raw_num_tokens=2,
        padded_num_tokens=4,
    )
    assert content(registry, "seq_lens")[:5] == [5, 5, 7, 7, 99]
    assert content(registry, "encoder_lens")[:5] == [6, 6, 3, 3, 99]


@kinds
def test_slots_that_few_models_have_exist_on_request(kind: str) -> None:
    assert not build(kind, is_encoder_decoder=False).has_slot("encoder_lens")
    asked = build(kind, enable_mamba_track=True, enable_num_token_non_padded=True, require_gathered_buffer=True)
    new = set(asked.slot_names()) - set(build(kind).slot_names())
    only = {
        "decode": {"global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu"},
        "prefill": {"mamba_track_seqlens"},
    }
    assert new == {"mamba_track_indices", "mamba_track_mask", "num_token_non_padded", "global_num_tokens"} | only[kind]
    assert buffer_of(asked, "mamba_track_mask").dtype == torch.bool
    batch = SimpleNamespace(mamba_track_indices=ones(2, 5), mamba_track_mask=torch.tensor([True, True]))
    asked.fill_from(batch, raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=4)
    assert content(asked, "mamba_track_indices")[:4] == [5, 5, 0, 0]
    assert content(asked, "mamba_track_mask")[:4] == [True, True, False, False]


@kinds
def test_numbers_of_tokens_are_computed_whatever_the_batch_says(kind: str) -> None:
    registry = build(kind, enable_num_token_non_padded=True, require_gathered_buffer=True)
    told = torch.tensor(2, dtype=torch.int32)
    for said, expected in ((None, 3), (told, 2), (1, 1), (told.view(1), 2), (None, 3)):
        batch = SimpleNamespace(global_num_tokens=torch.tensor([99]), num_token_non_padded=said)
        registry.fill_from(batch, raw_bs=3, padded_bs=4, raw_num_tokens=3, padded_num_tokens=4)
        assert content(registry, "num_token_non_padded") == [expected]
        assert content(registry, "global_num_tokens") == [4]


def test_a_decode_of_several_tokens_a_request_has_them_along_the_token_axis() -> None:
    registry = build_decode_registry("cpu", 3, num_tokens_per_bs=4)
    assert registry.max_num_tokens == 12
    assert {name: buffer_of(registry, name).shape[-1] for name in ("input_ids", "mrope_positions", "seq_lens")} == {
        "input_ids": 12,
        "mrope_positions": 12,
        "seq_lens": 3,
    }
    registry.fill_from(
        SimpleNamespace(input_ids=ones(8, 5), seq_lens=ones(2, 6)),
        raw_bs=2,
        padded_bs=3,
        raw_num_tokens=8,
        padded_num_tokens=12,
    )
    assert content(registry, "input_ids") == [5] * 8 + [0] * 4
    assert content(registry, "seq_lens") == [6, 6, 1]
    with pytest.raises(GraphError, match=exactly("num_tokens_per_bs=0; each request needs at least one token")):
        build_decode_registry("cpu", 3, num_tokens_per_bs=0)


@kinds
def test_dtypes_are_those_that_are_chosen(kind: str) -> None:
    registry = build(kind, cache_loc_dtype=torch.int32, dtypes={"seq_lens": torch.int32})
    dtypes = {name: buffer_of(registry, name).dtype for name in ("out_cache_loc", "seq_lens", "seq_lens_cpu")}
    assert dtypes == {"out_cache_loc": torch.int32, "seq_lens": torch.int32, "seq_lens_cpu": torch.int64}
    with pytest.raises(
        GraphError,
        match=exactly(
            "slot 'seq_lens': got a source of torch.int64, which would lose data as torch.int32; it must "
            "hold every value without loss. If the values do fit, convert them in a source_fn"
        ),
    ):
        registry.fill_from(
            SimpleNamespace(seq_lens=ones(1)), raw_bs=1, padded_bs=1, raw_num_tokens=1, padded_num_tokens=1
        )
    with pytest.raises(
        GraphError,
        match=exactly(
            "dtypes are given for ['lens'], which are not slots here; the slots are "
            "['bootstrap_room_ids_int', 'encoder_lens', 'input_ids', 'mrope_positions', 'out_cache_loc', "
            "'positions', 'req_pool_indices', 'rids_int', 'seq_lens', 'seq_lens_cpu']"
        ),
    ):
        build(kind, dtypes={"lens": torch.int32})


@kinds
def test_what_a_source_has_is_adopted_as_it_is(kind: str) -> None:
    """Smaller integers, and more room than is needed."""
    own = {
        "seq_lens": torch.full((MAX_BS,), 5, dtype=torch.int32),
        "input_ids": ones(MAX_TOKENS + 3, 6),
        "mrope_positions": torch.full((3, MAX_TOKENS + 3), 7),
    }
    registry = build(kind, source=own)
    for name, theirs in own.items():
        ours = buffer_of(registry, name)
        assert (ours.data_ptr(), ours.dtype) == (theirs.data_ptr(), theirs.dtype)
        assert ours.unique().tolist() == theirs.unique().tolist()
    assert buffer_of(registry, "input_ids").shape == (MAX_TOKENS if kind == "prefill" else MAX_BS,)
    for wrong in (
        {"seq_lens": torch.zeros(MAX_BS)},
        {"seq_lens": ones(MAX_BS - 1)},
        {"seq_lens": ones(MAX_BS, 1)[None]},
    ):
        with pytest.raises(GraphError, match="slot 'seq_lens': cannot adopt"):
            build(kind, source=wrong)
    with pytest.raises(
        GraphError,
        match=exactly(
            "slot 'seq_lens': cannot adopt a tensor of shape [8], torch.int32, on cpu; allowed is a tensor "
            "of shape [8], torch.int64, on cpu"
        ),
    ):
        build(kind, source=own, dtypes={"seq_lens": torch.int64})


# ---- identities -----------------------------------------------------------------------------------------------------


@kinds
def test_identities_have_no_memory_until_they_are_switched_on(kind: str) -> None:
    registry = build(kind, request_ids=False)
    names = registry.slot_names()
    assert [registry.get_slot(name).buffer for name in ("rids_int", "bootstrap_room_ids_int")] == [None, None]
    batch = SimpleNamespace(rids_int=ones(2, 7))
    sizes = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    registry.fill_from(batch, **sizes)
    assert extract(registry, batch, 4).rids_int is batch.rids_int
    slot = registry.enable_slot("rids_int")
    assert slot is registry.get_slot("rids_int") is registry.enable_slot("rids_int")
    assert registry.slot_names() == names
    registry.fill_from(batch, **sizes)
    assert extract(registry, batch, 4).rids_int.tolist() == [7, 7, PADDING_ID, PADDING_ID]
    with pytest.raises(GraphError, match="no slot 'nothing'"):
        registry.enable_slot("nothing")


def test_a_slot_whose_buffer_cannot_be_made_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = build("decode", request_ids=False)
    names, slot = registry.slot_names(), registry.get_slot("rids_int")

    def no_room(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as full:
        for maker in ("empty", "full", "zeros"):
            full.setattr(torch, maker, no_room)
        with pytest.raises(torch.OutOfMemoryError):
            registry.enable_slot("rids_int")
    assert registry.slot_names() == names
    assert registry.get_slot("rids_int") is slot
    assert registry.enable_slot("rids_int").buffer is not None


# ---- the buffers by name --------------------------------------------------------------------------------------------


def test_buffers_are_had_by_name_as_graphs_read_them() -> None:
    registry = build("decode", request_ids=False)
    buffers = registry.buffers
    assert isinstance(buffers, ForwardInputBuffers)
    seq_lens = buffers.seq_lens
    assert seq_lens is buffer_of(registry, "seq_lens")
    registry.fill_from(
        SimpleNamespace(seq_lens=ones(2, 5)), raw_bs=2, padded_bs=2, raw_num_tokens=2, padded_num_tokens=2
    )
    assert seq_lens.tolist()[:3] == [5, 5, 1]
    assert buffers.rids_int is None
    registry.enable_slot("rids_int")
    assert buffers.rids_int is buffer_of(registry, "rids_int")
    assert dir(buffers) == sorted(registry.slot_names())
    with pytest.raises(
        AttributeError,
        match=exactly(
            "there is no buffer 'lens'; the buffers are ['input_ids', 'positions', 'out_cache_loc', "
            "'req_pool_indices', 'seq_lens', 'seq_lens_cpu', 'mrope_positions', 'encoder_lens', "
            "'rids_int', 'bootstrap_room_ids_int']"
        ),
    ):
        _ = buffers.lens
    with pytest.raises(
        AttributeError, match=exactly("buffer 'seq_lens' cannot be another tensor: graphs read this one. Write into it")
    ):
        buffers.seq_lens = ones(2)
    # They are a source like any other.
    assert buffer_of(build("decode", source=buffers, request_ids=False), "seq_lens") is seq_lens


# ---- what SGLang's builders have -------------------------------------------------------------------------------------


def test_the_published_global_numbers_of_tokens_are_the_padded_number() -> None:
    names = ("global_num_tokens_gpu", "global_num_tokens_for_logprob_gpu")
    gathered = build("decode", require_gathered_buffer=True, require_mlp_tp_gather=True, dp_size=3)
    # Each rank of data parallelism has its own number only where they gather.
    alone = build("decode", register_global_num_tokens=True, dp_size=3)
    for registry, expected in ((gathered, [4, 4, 4]), (alone, [0])):
        fill(registry, 3, 4)
        view = extract(registry, SimpleNamespace(global_num_tokens_gpu=None), 4)
        assert view.global_num_tokens_gpu.tolist() == expected
        assert [content(registry, name) for name in names] == [expected] * 2
    absent = build("decode", require_gathered_buffer=True, register_global_num_tokens=False)
    assert not any(absent.has_slot(name) for name in names)


@pytest.mark.parametrize(("number", "parts"), [(5, [2, 2, 1, 0]), (8, [2, 2, 2, 2]), (0, [0, 0, 0, 0])])
def test_the_number_of_tokens_is_cut_to_the_attentions_tensor_parallel_rank(number: int, parts: list[int]) -> None:
    options: dict[str, Any] = {"enable_num_token_non_padded": True, "attn_tp_size": 4}
    for rank, part in enumerate(parts):
        for more, expected in (
            ({"require_gathered_buffer": True}, part),
            ({"require_gathered_buffer": True, "enable_prefill_cp": True}, number),
            ({}, number),
        ):
            registry = build("decode", attn_tp_rank=rank, **options, **more)
            # Each fill cuts the batch's number anew.
            for _ in range(2):
                fill(registry, 8, 8, num_token_non_padded=torch.tensor(number, dtype=torch.int32))
            assert content(registry, "num_token_non_padded") == [expected]
    with pytest.raises(GraphError, match="attn_tp_rank=4 of attn_tp_size=4 is not a rank"):
        build("decode", attn_tp_rank=4, **options)


def test_embeddings_are_written_by_the_model_and_only_their_padding_is_reset() -> None:
    registry = build("prefill", is_multimodal=True, hidden_size=2, embed_dtype=torch.bfloat16)
    embeds = buffer_of(registry, "input_embeds")
    assert (embeds.shape, embeds.dtype) == ((MAX_TOKENS, 2), torch.bfloat16)
    embeds.fill_(1)
    fill(registry, 3, 5, input_embeds=torch.full((3, 2), 7.0))
    assert embeds[:, 0].tolist() == [1, 1, 1, 0, 0] + [1] * (MAX_TOKENS - 5)
    assert not build("prefill", is_multimodal=True, register_input_embeds=False).has_slot("input_embeds")
    with pytest.raises(
        GraphError,
        match=exactly(
            "is_multimodal needs hidden_size and embed_dtype for the slot input_embeds, not 0 and None; "
            "register_input_embeds=False leaves it out"
        ),
    ):
        build("prefill", is_multimodal=True)


def test_what_a_source_has_beside_the_batch_takes_as_many_rows_as_arrive() -> None:
    source = SimpleNamespace(
        pp_proxy_tensors={"hidden_states": torch.zeros(4, 2)},
        ngram_embedding_info=SimpleNamespace(column_starts=ones(4, 9), req_lens=ones(4, 9)),
        rids_int=ones(MAX_BS, 3),
    )
    registry = build("decode", source=source)
    assert buffer_of(registry, "rids_int") is source.rids_int
    batch = SimpleNamespace(
        ngram_embedding_info=SimpleNamespace(column_starts=ones(2, 5), req_lens=ones(3, 6)), rids_int=ones(2, 8)
    )
    sizes: dict[str, Any] = {"raw_bs": 2, "padded_bs": 4, "raw_num_tokens": 2, "padded_num_tokens": 4}
    registry.fill_from(batch, **sizes, pp_proxy_tensors=SimpleNamespace(tensors={"hidden_states": torch.ones(3, 2)}))
    assert source.pp_proxy_tensors["hidden_states"][:, 0].tolist() == [1, 1, 1, 0]
    assert source.ngram_embedding_info.column_starts.tolist() == [5, 5, 9, 9]
    assert source.ngram_embedding_info.req_lens.tolist() == [6, 6, 6, 9]
    assert source.rids_int.tolist() == [8, 8, PADDING_ID, PADDING_ID, 3, 3, 3, 3]
    registry.fill_from(batch, **sizes)
    assert source.pp_proxy_tensors["hidden_states"][:, 0].tolist() == [1, 1, 1, 0]


def test_an_extracted_batch_has_the_padded_size() -> None:
    registry = build("decode")
    batch = fill(registry, 3, 4, seq_lens=ones(3), batch_size=3)
    assert (extract(registry, batch, 4).batch_size, batch.batch_size) == (4, 3)
    # A batch that computes its size has that of its tensors.
    assert extract(registry, SimpleNamespace(seq_lens=ones(3)), 4).seq_lens.shape == (4,)


def test_slots_and_builders_take_the_published_arguments() -> None:
    def shape(bs: int, tokens: int) -> tuple[int, ...]:
        return (tokens,)

    slot = GraphSlot("x", shape, torch.int64, "tokens", torch.device("cpu"), PaddingPolicy.ZERO, None, True, False)
    assert (slot.device, slot.padding_policy, slot.copy_from_batch) == (torch.device("cpu"), PaddingPolicy.ZERO, False)
    named = GraphSlot(name="x", shape_fn=shape, dtype=torch.int64, copy_from_fb=False)
    assert (named.axis, named.copy_from_batch) == ("tokens", False)
    # Another registry's copy is made of it.
    registry_of(named)
    assert not registry_of(named).get_slot("x").copy_from_batch
    for make_registry in (build_decode_registry, build_prefill_registry):
        assert make_registry(device="cpu", max_bs=2, max_num_token=6).max_num_tokens == 6
        with pytest.raises(
            GraphError, match=exactly("max_num_tokens and max_num_token are two names of one number; give one of them")
        ):
            make_registry("cpu", 2, 6, max_num_token=6)
    with pytest.raises(RuntimeError):
        build("decode").get_slot("none")


@kinds
def test_the_environment_switches_request_ids_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not build(kind, request_ids=None).get_slot("rids_int").enabled
    monkeypatch.setenv("GRAFTLAB_REQUEST_IDS", "1")
    assert build(kind, request_ids=None).get_slot("rids_int").enabled
    assert not build(kind, request_ids=False).get_slot("rids_int").enabled
    monkeypatch.setenv("GRAFTLAB_REQUEST_IDS", "perhaps")
    with pytest.raises(RequestError, match="GRAFTLAB_REQUEST_IDS is 'perhaps'; it takes 1 or 0"):
        build(kind, request_ids=None)


def test_buffers_are_moved_into_the_pool_before_a_capture() -> None:
    first, second = build("decode"), build("decode")
    assert buffer_of(first, "seq_lens").data_ptr() != buffer_of(second, "seq_lens").data_ptr()
    first.buffers.share_buffers()
    second.buffers.share_buffers()
    assert all(buffer_of(first, name).data_ptr() == buffer_of(second, name).data_ptr() for name in SAFE)
    fill(second, 2, 4, seq_lens=ones(2, 5))
    assert first.buffers.seq_lens[:4].tolist() == [5, 5, 1, 1]  # type: ignore[index]
