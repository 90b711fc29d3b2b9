"""Runners of captured graphs give the eager engine's tokens, and nothing of an earlier batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.graph_buffers import on_devices
from kit.recorded_kernels import record_kernels
from kit.refusals import exactly
from kit.support import SMALL_MODEL
from torch import Tensor

from graftlab.engine import (
    PADDING_SLOT,
    BreakableGraphRunner,
    DecodeGraphRunner,
    DraftGraphRunner,
    EagerRunner,
    Engine,
    ForwardBatch,
    GraphAttention,
    KVCache,
    PrefillGraphRunner,
    Request,
    RunnerFactory,
)
from graftlab.engine.attention import AttentionBackend
from graftlab.engine.graph_attention import UnpaddedAttention
from graftlab.engine.runners.draft import VerifyAttention
from graftlab.engine.runners.graph import GraphRunner
from graftlab.errors import GraphError
from graftlab.graphs import PaddingPolicy, build_prefill_registry, clear_input_buffer_pool
from graftlab.graphs.capture import CudaCapturer
from graftlab.graphs.captured_function import CapturedFunction
from graftlab.graphs.slots import FillContext
from graftlab.models import Transformer
from graftlab.requests.identity import NO_ROOM, PADDING_ID
from graftlab.requests.request_id import request_id_to_int

CONFIG = dataclasses.replace(SMALL_MODEL, max_positions=48)

# No index, length or identity of any batch: a table that is read with it raises.
GARBAGE = -(10**9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are far too small for a second thread, which would only wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    clear_input_buffer_pool()
    yield
    torch.set_num_threads(before)


@pytest.fixture(
    params=[
        "cpu",
        "kernels",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where to run; "kernels" is the CPU, on which only those are captured."""
    if request.param == "kernels":
        record_kernels(monkeypatch)
        return "cpu"
    return str(request.param)


@functools.cache
def model(device: str = "cpu", window: int | None = None) -> Transformer:
    # In float64, no rounding can turn one likeliest token into another.
    built = Transformer(dataclasses.replace(CONFIG, sliding_window=window), seed=3)
    return built.double().requires_grad_(False).to(device)


@functools.cache
def draft(device: str = "cpu") -> Transformer:
    """One layer with the model's own weights, so that some of its guesses come true."""
    small = Transformer(dataclasses.replace(CONFIG, num_layers=1), seed=3).double().requires_grad_(False)
    small.load_state_dict(model().state_dict(), strict=False)
    return small.to(device)


RUNNERS: dict[str, RunnerFactory] = {
    "decode": DecodeGraphRunner,
    "prefill": PrefillGraphRunner,
    "both": partial(PrefillGraphRunner, decode=DecodeGraphRunner),
    "draft": lambda model, cache: DraftGraphRunner(model, cache, draft=draft(cache.table.device.type)),
    "breakable": BreakableGraphRunner,
    "broken": partial(BreakableGraphRunner, breaks={"blocks.0.attention": torch.clone, "blocks.1": torch.clone}),
}
runners = pytest.mark.parametrize("kind", RUNNERS)


def workload(count: int, seed: int = 0) -> list[Request]:
    """Some greedy, some drawn, some in bootstrap rooms."""
    rng = random.Random(seed)
    return [
        Request(
            f"r{i}",
            tuple(rng.choices(range(61), k=rng.randint(1, 30))),
            rng.randint(1, 12),
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=i,
            bootstrap_room=rng.choice([None, 100 + i]),
        )
        for i in range(count)
    ]


def served(engine: Engine, requests: list[Request], seed: int = 1) -> dict[str, list[int]]:
    """Outputs of requests that arrive at random moments."""
    rng, arriving, outputs = random.Random(seed), list(requests), {}
    rng.shuffle(arriving)
    while arriving or engine.live:
        for _ in range(min(len(arriving), rng.choice([0, 0, 1, 2, 20]))):
            engine.add(arriving.pop())
        outputs.update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    return outputs


@functools.cache
def expected(count: int, window: int | None = None, seed: int = 0) -> dict[str, list[int]]:
    return served(Engine(model(window=window), max_requests=16), workload(count, seed))


def graphs_of(engine: Engine) -> GraphRunner:
    assert isinstance(engine.runner, GraphRunner)
    return engine.runner


def replays_of(runner: GraphRunner) -> Callable[[], int]:
    """How many there were since the last call."""
    before = runner.replays

    def more() -> int:
        nonlocal before
        count, before = runner.replays - before, runner.replays
        return count

    return more


def poison(runner: GraphRunner) -> None:
    """Put garbage wherever a replay may look that is not filled before it."""
    for inner in vars(runner).values():
        if isinstance(inner, GraphRunner):
            poison(inner)
    for name in runner.registry.slot_names():
        slot = runner.registry.get_slot(name)
        assert slot.enabled is (slot.buffer is not None)
        # Identities have no memory before they are used.
        if slot.buffer is not None:
            slot.buffer.fill_(GARBAGE)
    if isinstance(runner.attention, GraphAttention | VerifyAttention):
        runner.attention._slots.fill_(GARBAGE)
        runner.attention._visible.logical_not_()
    if isinstance(runner.attention, VerifyAttention):
        runner.attention._rows.fill_(GARBAGE)
    for cached in (runner.cache.keys, runner.cache.values):
        cached[:, PADDING_SLOT] = torch.nan


# ---- the eager engine's tokens --------------------------------------------------------------------------------------


@pytest.mark.slow
@runners
@pytest.mark.parametrize(
    ("limits", "window"),
    [
        ({"max_requests": 1}, 5),
        ({"max_requests": 16, "max_prefill_tokens": 64}, None),
        ({"max_requests": 8, "max_tokens": 90}, 5),
        ({"max_requests": 5, "max_prefill_tokens": 7}, None),
    ],
    ids=["one at a time", "large batches", "little cache", "prompts in pieces"],
)
@pytest.mark.parametrize("count", [16, pytest.param(200, marks=pytest.mark.soak)])
@on_devices
def test_many_requests_get_the_eager_engines_tokens(
    limits: dict[str, int], window: int | None, kind: str, count: int, device: str
) -> None:
    engine = Engine(model(device, window), runner=RUNNERS[kind], **limits)
    assert served(engine, workload(count)) == expected(count, window)
    runner = graphs_of(engine)
    # A graph for each size, and every other step a mere replay.
    assert 1 <= runner.captures < runner.replays / (count / 25)


@pytest.mark.slow
@runners
def test_no_replay_reads_what_no_fill_wrote(kind: str, device: str) -> None:
    engine = Engine(model(device), runner=RUNNERS[kind], max_prefill_tokens=20, request_ids=True)
    runner = graphs_of(engine)
    engine.on_step = lambda batch: poison(runner)
    poison(runner)
    assert served(engine, workload(20)) == expected(20)


@runners
def test_a_policy_that_keeps_the_tail_is_felt(kind: str) -> None:
    """That the test above can fail: the slot of the tokens' places, its tail not reset."""
    engine = Engine(model(), runner=RUNNERS[kind])
    runner = graphs_of(engine)
    object.__setattr__(runner.registry.get_slot("out_cache_loc"), "padding_policy", PaddingPolicy.KEEP_PAD)
    engine.on_step = lambda batch: poison(runner)
    poison(runner)
    with pytest.raises((IndexError, RuntimeError)):
        served(engine, workload(30))


@examples(20)
@given(
    kind=st.sampled_from(list(RUNNERS)),
    doings=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 12), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 5)),
            st.just(("step",)),
            st.just(("step",)),
            st.just(("identities",)),
            st.just(("poison",)),
        ),
        max_size=40,
    ),
)
def test_batches_that_grow_and_shrink_in_any_order_are_those_of_the_eager_engine(
    kind: str, doings: list[tuple[Any, ...]]
) -> None:
    limits = {"max_requests": 6, "max_tokens": 60, "max_prefill_tokens": 9}
    engines = [Engine(model(), runner=runner, **limits) for runner in (EagerRunner, RUNNERS[kind])]
    ends: list[list[Any]] = [[], []]
    for number, (what, *numbers) in enumerate([*doings, *[("step",)] * 200]):
        if what == "poison":
            poison(graphs_of(engines[1]))
        for engine, ended in zip(engines, ends, strict=True):
            if what == "add":
                length, count = numbers
                engine.add(Request(f"r{number}", tuple((number * 7 + i) % 61 for i in range(length)), count))
            elif what == "abort" and len(engine.live) > numbers[0]:
                ended.append(engine.abort(engine.live[numbers[0]]))
            elif what == "identities":
                engine.request_ids = not engine.request_ids
            elif what == "step":
                ended += engine.step()
    outputs = [[(done.request.rid, done.response["output_ids"]) for done in ended] for ended in ends]
    assert outputs[0] == outputs[1]
    assert not engines[1].live


@pytest.mark.slow
@runners
def test_a_forward_that_is_repeated_gives_the_same(kind: str) -> None:
    steps = itertools.count()

    def fail(batch: ForwardBatch) -> None:
        if next(steps) % 3:
            raise ArithmeticError("now and then")

    engine, outputs = Engine(model(), runner=RUNNERS[kind], max_prefill_tokens=20, on_step=fail), {}
    for request in workload(10):
        engine.add(request)
    while engine.live:
        with contextlib.suppress(ArithmeticError):
            outputs.update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    assert outputs == expected(10)


def test_of_the_graphs_of_one_size_the_least_recently_used_is_dropped_beyond_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = 0
    released: list[int] = []

    class BrokenElsewhere(CapturedFunction):
        """A graph that suits one plan alone, and is broken where no other is."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.plan = wanted

        @property
        def broken_at(self) -> frozenset[int]:
            return frozenset({self.plan})

        def suits(self) -> bool:
            return self.plan == wanted

        def release(self) -> None:
            released.append(self.plan)
            super().release()

    monkeypatch.setattr("graftlab.engine.runners.graph.CapturedFunction", BrokenElsewhere)
    engine = Engine(model(), runner=DecodeGraphRunner, max_requests=1)
    captured = []
    for plan in (0, 1, 2, 3, 4, 5, 6, 7, 0, 8, 1):
        wanted = plan
        engine.generate([Request("r", (1, 2), 2)])
        captured.append(graphs_of(engine).captures)
    assert captured == [1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10]
    assert released == [1, 2]
    assert graphs_of(engine).status()["graphs"] == 8


@runners
def test_logits_are_the_callers_own(kind: str) -> None:
    engine = Engine(model(), runner=RUNNERS[kind])
    kept: list[tuple[Tensor, Tensor]] = []
    forward = engine.runner.forward

    def keeping(batch: ForwardBatch) -> Tensor:
        logits = forward(batch)
        kept.append((logits, logits.clone()))
        return logits

    engine.runner.forward = keeping  # type: ignore[method-assign]
    served(engine, workload(10))
    assert all(torch.equal(logits, then) for logits, then in kept)


@pytest.mark.slow
@runners
def test_no_python_runs_when_kernels_are_replayed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the stand-in for CUDA graphs is one."""
    record_kernels(monkeypatch)
    engine = Engine(model(), runner=RUNNERS[kind], max_requests=4)
    runner, ran = graphs_of(engine), []
    monkeypatch.setattr(type(runner), "_call_model", counted(type(runner)._call_model, ran, runner))
    served(engine, workload(30))
    # Three runs to warm up, and the one that is captured.
    assert len(ran) == 4 * runner.captures < runner.replays


def counted(method: Any, ran: list[None], owner: GraphRunner) -> Any:
    def call(self: GraphRunner, *args: Any) -> Tensor:
        if self is owner:
            ran.append(None)
        return method(self, *args)

    return call


@pytest.mark.slow
@runners
def test_a_graph_holds_nothing_of_the_batch_it_was_captured_with(kind: str) -> None:
    held: list[weakref.ref[Any]] = []

    def look(batch: ForwardBatch) -> None:
        assert batch.sampling_info is not None
        held.extend(weakref.ref(each) for each in (batch, batch.input_ids, batch.sampling_info.seeds))

    engine = Engine(model(), runner=RUNNERS[kind], on_step=look)
    served(engine, workload(10))
    gc.collect()
    assert engine.status()["running"] == 0
    assert [each() for each in held if each() is not None] == []


@pytest.mark.slow
@runners
def test_graphs_may_be_captured_in_inference_mode_and_replayed_outside_it(kind: str) -> None:
    engine = Engine(model(), runner=RUNNERS[kind])
    with torch.inference_mode():
        inside = served(engine, workload(10))
    assert inside == served(engine, workload(10)) == expected(10)


# ---- metadata -------------------------------------------------------------------------------------------------------


class Changing:
    """A backend whose metadata is a list at one call and a tuple at the next, of the lengths it was made for."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.prepared: list[type] = []
        self.used: list[type] = []
        self.metadata: Any = None

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        self.backend.prepare_metadata(batch)
        self.prepared.append((list, tuple)[len(self.prepared) % 2])
        self.metadata = self.prepared[-1](batch.seq_lens_cpu.tolist())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == 0:
            self.used.append(type(self.metadata))
        return self.backend.attend(layer, q, k, v)


@pytest.mark.parametrize("kind", ["decode", "prefill", "breakable"])
def test_metadata_is_made_before_every_replay_whatever_it_was_at_the_capture(kind: str) -> None:
    backend: list[Changing] = []

    def runner(model: Transformer, cache: KVCache) -> GraphRunner:
        static = GraphAttention(cache, None, 32)
        backend.append(Changing(UnpaddedAttention(cache, None) if kind == "prefill" else static))
        if kind == "decode":
            return DecodeGraphRunner(model, cache, attention=backend[0], batch_sizes=[4])
        maker = PrefillGraphRunner if kind == "prefill" else BreakableGraphRunner
        return maker(model, cache, attention=backend[0], token_sizes=[32])

    engine = Engine(model(), runner=runner, max_requests=4, max_prefill_tokens=32)
    replays, lengths = replays_of(graphs_of(engine)), []

    def look(batch: ForwardBatch) -> None:
        if replays():
            lengths.append((batch.seq_lens_cpu.tolist(), list(backend[0].metadata)))

    engine.on_step = look
    assert served(engine, workload(12)) == expected(12)
    runner, changing = graphs_of(engine), backend[0]
    # One for each capture, and a separate one for each replay.
    assert runner.captures == (2 if kind == "breakable" else 1)
    assert len(changing.prepared) == runner.replays + runner.captures
    assert changing.used == changing.prepared
    assert {list, tuple} == set(changing.used[2:])
    assert all(seen == [*own, *[1] * (4 - len(own))] for own, seen in lengths)


# ---- identities -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@runners
def test_identities_are_read_in_the_graph_and_padded_with_the_padding_id(kind: str, device: str) -> None:
    engine = Engine(model(device), runner=RUNNERS[kind], max_requests=7, request_ids=True)
    runner, paddings = graphs_of(engine), set()
    replays, rooms_of = replays_of(runner), {request.rid: request.bootstrap_room for request in workload(20)}

    def look(batch: ForwardBatch) -> None:
        if not replays():
            assert runner.row_ids is None
            return
        assert runner.row_ids is not None
        rids, rooms = (each.tolist() for each in runner.row_ids)
        # A draft's guesses spare some of the requests the forward.
        there = [rid for rid in batch.request_ids if kind != "draft" or request_id_to_int(rid) in rids]
        padding = len(rids) - len(there)
        paddings.add(padding)
        assert rids == [request_id_to_int(rid) for rid in there] + [PADDING_ID] * padding
        own = [rooms_of[rid] for rid in there]
        assert rooms == [NO_ROOM if room is None else room for room in own] + [NO_ROOM] * padding

    engine.on_step = look
    while runner.replays < (30 if device == "cpu" else 1000):
        served(engine, workload(20))
    assert len(paddings) > 1


@pytest.mark.slow
@runners
def test_identities_that_are_switched_on_are_captured_with_the_next_batch(kind: str, device: str) -> None:
    engine = Engine(model(device), runner=RUNNERS[kind], max_requests=1)
    runner = graphs_of(engine)
    replays, captures, seen = replays_of(runner), [], []
    engine.on_step = lambda batch: seen.append(runner.row_ids and runner.row_ids[0].tolist()) if replays() else None
    for i, request_ids in enumerate((False, True, False)):
        engine.request_ids = request_ids
        seen.clear()
        engine.generate([Request(f"r{i}", (1, 2, 3), 9)])
        captures.append(runner.captures)
        assert seen
        assert all(ids[0] == request_id_to_int("r1") if request_ids else ids is None for ids in seen)
    # A graph for each of the sizes again, with them; and none when they go, since those without are still there.
    assert captures == [captures[0], 2 * captures[0], 2 * captures[0]]


def test_identities_of_a_batch_are_its_sampling_infos_too_in_what_is_replayed() -> None:
    views: list[ForwardBatch] = []

    class Looking(GraphAttention):
        def prepare_metadata(self, batch: ForwardBatch) -> None:
            views.append(batch)
            super().prepare_metadata(batch)

    def runner(model: Transformer, cache: KVCache) -> DecodeGraphRunner:
        return DecodeGraphRunner(model, cache, attention=Looking(cache, None, cache.max_requests))

    served(Engine(model(), runner=runner, request_ids=True), workload(10))
    for view in views:
        assert view.sampling_info is not None
        assert view.rids_int is view.sampling_info.rids_int is not None
        assert view.bootstrap_room_ids_int is view.sampling_info.bootstrap_room_ids_int is not None


# ---- sizes ----------------------------------------------------------------------------------------------------------


def test_a_decode_larger_than_any_graph_goes_to_the_other_runner() -> None:
    engine = Engine(model(), runner=partial(DecodeGraphRunner, batch_sizes=[2, 3]), max_requests=8)
    sizes: dict[int, int] = {}
    runner = graphs_of(engine)
    replays = replays_of(runner)

    def look(batch: ForwardBatch) -> None:
        count = replays()
        assert count == (batch.mode == "decode" and batch.batch_size <= 3)
        if batch.mode == "decode":
            sizes[batch.batch_size] = count

    engine.on_step = look
    assert served(engine, workload(30)) == expected(30)
    assert set(sizes.values()) == {0, 1}


@pytest.mark.parametrize(
    "runner", [partial(DecodeGraphRunner, batch_sizes=[4, 16]), partial(PrefillGraphRunner, token_sizes=[32])]
)
def test_a_replay_has_the_sizes_of_its_batch_and_of_its_graph(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[FillContext] = []
    replay = CapturedFunction.replay

    def noted(function: CapturedFunction, prepare: Any, ctx: FillContext) -> Any:
        found.append(ctx)
        return replay(function, prepare, ctx)

    monkeypatch.setattr(CapturedFunction, "replay", noted)
    engine = Engine(model(), runner=runner, max_requests=16, max_prefill_tokens=20)
    replayed: list[int] = []

    def look(batch: ForwardBatch) -> None:
        for ctx in found:
            assert (ctx.raw_bs, ctx.raw_num_tokens) == (batch.batch_size, batch.num_tokens)
            assert ctx.padded_num_tokens in (4, 16, 32)
            replayed.append(ctx.padded_num_tokens - ctx.raw_num_tokens)
        found.clear()

    engine.on_step = look
    served(engine, workload(8))
    assert any(replayed)


@pytest.mark.parametrize("sizes", [[], [0], [9], [-1, 2]])
def test_sizes_without_room_are_refused(sizes: list[int]) -> None:
    with pytest.raises(GraphError, match=r"batch_sizes=.*sizes must be from 1 to 8"):
        Engine(model(), runner=partial(DecodeGraphRunner, batch_sizes=sizes))


def test_attention_for_graphs_refuses_more_tokens_than_its_buffers_hold() -> None:
    engine = Engine(model(), runner=lambda model, cache: EagerRunner(model, cache, GraphAttention(cache, None, 3)))
    with pytest.raises(GraphError, match=exactly("GraphAttention has room for 3 tokens, and the batch has 4")):
        engine.generate([[1, 2, 3, 4]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "prefill", "both", "breakable"])
def test_a_runner_has_the_window_of_its_model_unless_it_is_given_attention(kind: str) -> None:
    engine = Engine(model(window=5), runner=RUNNERS[kind], max_requests=2, max_prefill_tokens=8)
    runner: Any = graphs_of(engine)
    found = [each.attention.sliding_window for each in (runner, getattr(runner, "decode", runner))]
    assert found == [5, 5]


@pytest.mark.parametrize("window", [None, 5])
def test_attention_for_graphs_gives_the_numbers_of_the_eager_one(window: int | None, device: str) -> None:
    """Prefills in pieces, and decodes; both runners write the same into one cache."""

    class Both(EagerRunner):
        def __init__(self, model: Transformer, cache: KVCache) -> None:
            super().__init__(model, cache)
            self.other = EagerRunner(model, cache, GraphAttention(cache, window, 16))

        def forward(self, batch: ForwardBatch) -> Tensor:
            logits, keys = super().forward(batch), self.attention.cache.keys.clone()  # type: ignore[attr-defined]
            torch.testing.assert_close(self.other.forward(batch), logits)
            torch.testing.assert_close(self.attention.cache.keys, keys)  # type: ignore[attr-defined]
            return logits

    engine = Engine(model(device, window), runner=Both, max_prefill_tokens=16)
    assert served(engine, workload(20)) == expected(20, window)


# ---- pieces and breaks ----------------------------------------------------------------------------------------------


def test_a_prefill_larger_than_any_graph_is_eager() -> None:
    engine = Engine(model(), runner=partial(PrefillGraphRunner, token_sizes=[4, 12]), max_prefill_tokens=20)
    runner, sizes = graphs_of(engine), {}
    replays = replays_of(runner)

    def look(batch: ForwardBatch) -> None:
        sizes[batch.num_tokens] = count = replays()
        assert count == (batch.mode == "prefill" and batch.num_tokens <= 12)

    engine.on_step = look
    assert served(engine, workload(30)) == expected(30)
    assert set(sizes.values()) == {0, 1}


@pytest.mark.parametrize("runner", [PrefillGraphRunner, BreakableGraphRunner])
def test_token_sizes_without_room_are_refused(runner: Any) -> None:
    registry = build_prefill_registry("cpu", 8, 16)
    with pytest.raises(
        GraphError, match=exactly("token_sizes=[4, 17]; sizes must be from 1 to 16, the largest that fits")
    ):
        Engine(model(), runner=partial(runner, registry=registry, token_sizes=[4, 17]))


@pytest.mark.parametrize("runner", [PrefillGraphRunner, BreakableGraphRunner])
def test_a_given_registry_has_room_for_the_tokens_of_each_request(runner: Any) -> None:
    registry = build_prefill_registry("cpu", 8, 16)
    Engine(model(), runner=partial(runner, registry=registry, token_sizes=[4]))
    assert registry.has_slot("extend_lens_cpu")


@pytest.mark.slow
def test_runners_over_tokens_share_a_registry() -> None:
    registry = build_prefill_registry("cpu", 8, 64)
    breakable = Engine(model(), runner=partial(BreakableGraphRunner, registry=registry))
    pieces = Engine(model(), runner=partial(PrefillGraphRunner, registry=registry))
    assert graphs_of(breakable).registry is graphs_of(pieces).registry is registry
    ended: dict[str, dict[str, list[int]]] = {"breakable": {}, "pieces": {}}
    # In turn, so that each finds what the other left.
    for request in workload(20):
        breakable.add(request)
        pieces.add(request)
    while breakable.live or pieces.live:
        for name, engine in (("breakable", breakable), ("pieces", pieces)):
            ended[name].update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    assert ended["breakable"] == ended["pieces"] == expected(20)


def halved(value: Tensor) -> Tensor:
    return value / 2


@functools.cache
def expected_halved(count: int, *names: str) -> dict[str, list[int]]:
    """By an eager engine in which the outputs of these modules are halved."""
    own = copy.deepcopy(model())
    for name in names:
        own.get_submodule(name).register_forward_hook(lambda module, args, output: halved(output))
    return served(Engine(own), workload(count))


@pytest.mark.slow
def test_the_hosts_output_continues_through_the_next_graph(device: str) -> None:
    names = ("blocks.0.attention.q_proj", "blocks.1.mlp", "final_norm")
    engine = Engine(model(device), runner=partial(BreakableGraphRunner, breaks=dict.fromkeys(names, halved)))
    assert served(engine, workload(20)) == expected_halved(20, *names) != expected(20)


def test_a_break_sees_the_values_of_its_batch(device: str) -> None:
    seen: list[Tensor] = []
    wanted: list[Tensor] = []

    def see(value: Tensor) -> Tensor:
        seen.append(value.cpu().clone())
        return value

    own = copy.deepcopy(model())
    own.blocks[1].mlp.register_forward_hook(lambda module, args, output: wanted.append(output))
    engine = Engine(model(device), runner=partial(BreakableGraphRunner, breaks={"blocks.1.mlp": see}))
    replays, latest = replays_of(graphs_of(engine)), []

    def look(batch: ForwardBatch) -> None:
        assert replays() == 1
        # The last is the replay's; those before it were runs of a capture.
        latest.append(seen[-1][: batch.num_tokens])

    engine.on_step = look
    served(engine, workload(10))
    served(Engine(own), workload(10))
    torch.testing.assert_close(latest, wanted)


@pytest.mark.slow
def test_another_function_at_a_break_needs_no_capture_and_another_module_needs_one(device: str) -> None:
    engine = Engine(model(device), runner=BreakableGraphRunner)
    runner = engine.runner
    assert isinstance(runner, BreakableGraphRunner)
    captures, mlp = [], "blocks.0.mlp"
    for breaks, tokens in (
        ({}, expected(10)),
        ({mlp: halved}, expected_halved(10, mlp)),
        ({mlp: torch.clone}, expected(10)),
        ({mlp: halved}, expected_halved(10, mlp)),
        ({}, expected(10)),
        ({mlp: halved, "blocks.1": halved}, expected_halved(10, mlp, "blocks.1")),
    ):
        runner.breaks = breaks
        assert served(engine, workload(10)) == tokens
        captures.append(runner.captures)
    each = captures[0]
    assert captures == [each, 2 * each, 2 * each, 2 * each, 2 * each, 3 * each]


def test_a_break_that_cannot_be_leaves_the_engine_and_the_model_as_they_were() -> None:
    engine = Engine(model(), runner=BreakableGraphRunner)
    runner = engine.runner
    assert isinstance(runner, BreakableGraphRunner)
    with pytest.raises(GraphError, match=r"breaks at \['blocks.7'\], which are not modules of the model; .*'blocks.1'"):
        runner.breaks = {"blocks.7": halved}
    runner.breaks = {"blocks.0": lambda value: value[0]}
    request = workload(1)[0]
    engine.add(request)
    with pytest.raises(
        GraphError,
        match=exactly(
            "the break after 'blocks.0' returned torch.float64 of shape [1, 32] on cpu; it takes the "
            "place of torch.float64 of shape [32, 1, 32] on cpu in a graph"
        ),
    ):
        engine.step()
    assert runner.captures == 0
    assert not any(module._forward_hooks for module in engine.model.modules())
    runner.breaks = {}
    while engine.live:
        finished = engine.step()
    assert finished[0].response["output_ids"] == expected(1)[request.rid]


def test_a_value_the_host_returns_unchanged_is_not_copied_onto_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of inference mode a tensor that was made inside of it refuses even that."""
    record_kernels(monkeypatch)
    capturer, seen = CudaCapturer(torch.device("cpu")), []

    def look(value: Tensor) -> Tensor:
        seen.append(value.tolist())
        return value

    with torch.inference_mode():
        buffer = torch.ones(2)
        on_host = capturer.on_host(look)
        graph = capturer.capture(lambda: (on_host(buffer),))
    assert graph.replay()[0] is buffer
    assert seen[-1] == [1.0, 1.0]


# ---- guesses --------------------------------------------------------------------------------------------------------


def drafting(draft: Transformer, window: int | None = None, **options: Any) -> tuple[Engine, DraftGraphRunner]:
    engine = Engine(model(window=window), runner=partial(DraftGraphRunner, draft=draft, **options))
    assert isinstance(engine.runner, DraftGraphRunner)
    return engine, engine.runner


# A window of 4 tokens is shorter than the 6 that one forward verifies.
@pytest.mark.parametrize(("ahead", "window"), [(1, None), (3, None), (5, 4)])
def test_a_draft_that_is_always_right_spares_all_other_forwards(ahead: int, window: int | None) -> None:
    engine, runner = drafting(model(window=window), window, ahead=ahead)
    request = Request("r", (1, 2, 3), 25)
    (response,) = engine.generate([request])
    (alone,) = Engine(model(window=window)).generate([request])
    assert response["output_ids"] == alone["output_ids"]
    # The first of the tokens comes from the prefill.
    assert runner.replays == 24 / (ahead + 1)
    assert runner.accepted == runner.guessed == runner.replays * ahead


@pytest.mark.slow
def test_a_draft_that_is_never_right_changes_nothing() -> None:
    wrong = copy.deepcopy(model())
    # Whatever the model finds likeliest, this one finds least likely.
    wrong.lm_head.weight.neg_()
    engine, runner = drafting(wrong)
    requests = [dataclasses.replace(request, temperature=0.0) for request in workload(20)]
    assert served(engine, requests) == served(Engine(model()), requests)
    assert runner.accepted == 0 < runner.guessed


@pytest.mark.slow
def test_some_guesses_of_a_smaller_model_come_true() -> None:
    engine, runner = drafting(draft())
    assert served(engine, workload(30)) == expected(30)
    assert 0 < runner.accepted < runner.guessed


@pytest.mark.slow
def test_guesses_continue_to_the_end_of_the_longest_request() -> None:
    engine, _ = drafting(draft(), ahead=5)
    requests = [Request(f"r{i}", (i,), CONFIG.max_positions - 1) for i in range(3)]
    assert served(engine, requests) == served(Engine(model()), requests)


@pytest.mark.slow
def test_guesses_for_a_request_are_not_used_for_another_of_its_name() -> None:
    eager = Engine(model())
    tails = {i: eager.generate([[i]], max_new_tokens=3)[0]["output_ids"] for i in range(61)}
    # They choose the same token first, at the same place, and then part.
    one, other = next((i, j) for i in tails for j in tails if tails[i][0] == tails[j][0] and tails[i] != tails[j])
    engine, _ = drafting(draft())
    for start in (one, other):
        assert engine.generate([Request("r", (start,), 3)])[0]["output_ids"] == tails[start]


def test_guesses_leave_the_cache_of_the_eager_engine() -> None:
    """Nothing of a guess lies in it before it came true: not in slots of the request, nor in anyone else's."""
    engine, _ = drafting(draft())
    eager = Engine(model())
    for request in workload(8):
        engine.add(request)
        eager.add(request)
    while engine.live:
        assert [done.request.rid for done in engine.step()] == [done.request.rid for done in eager.step()]
        for ours, theirs in ((engine.cache.keys, eager.cache.keys), (engine.cache.values, eager.cache.values)):
            torch.testing.assert_close(ours[:, PADDING_SLOT + 1 :], theirs[:, PADDING_SLOT + 1 :])


def test_the_graphs_of_both_models_share_their_buffers_with_a_decode_runner() -> None:
    _, runner = drafting(draft())
    decode = DecodeGraphRunner(model(), runner.cache, share_pool=True)

    def memory(each: GraphRunner) -> dict[str, int]:
        buffers = {name: each.registry.get_slot(name).buffer for name in each.registry.slot_names()}
        return {name: buffer.data_ptr() for name, buffer in buffers.items() if buffer is not None}

    assert memory(runner.draft) == memory(decode)
    shared = set(memory(runner).items()) & set(memory(decode).items())
    per_request = {"req_pool_indices", "seq_lens", "seq_lens_cpu", "encoder_lens"}
    assert {name for name, _ in shared} == per_request


@pytest.mark.slow
def test_engines_that_share_buffers_take_turns_without_harm() -> None:
    engines = [drafting(draft())[0], Engine(model(), runner=partial(DecodeGraphRunner, share_pool=True))]
    outputs: list[dict[str, list[int]]] = [{}, {}]
    for request in workload(20):
        for engine in engines:
            engine.add(request)
    while any(engine.live for engine in engines):
        for engine, ended in zip(engines, outputs, strict=True):
            ended.update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    assert outputs == [expected(20), expected(20)]


def test_a_draft_that_cannot_guess_for_the_model_is_refused() -> None:
    other = Transformer(dataclasses.replace(CONFIG, vocab_size=60))
    with pytest.raises(
        GraphError,
        match=exactly(
            "the draft has a vocabulary of 60 tokens, and the model has 61; a guessed token would be a "
            "different token to the model"
        ),
    ):
        drafting(other)
    with pytest.raises(
        GraphError, match=exactly("ahead=0; guess at least one token ahead, or use a DecodeGraphRunner")
    ):
        drafting(draft(), ahead=0)
