"""The engine gives what the model alone would, whatever else it serves, and loses neither requests nor room."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.refusals import exactly
from kit.support import SMALL_MODEL

import graftlab as gl
from graftlab.engine import (
    PADDING_SLOT,
    ByteTokenizer,
    EagerRunner,
    Engine,
    KVCache,
    Request,
    SamplingBatchInfo,
    SlotAllocator,
    build_model,
    masked_attention,
    sample,
    sampling,
)
from graftlab.errors import RequestError
from graftlab.models import ModelConfig, TensorParallelTransformer, Transformer, causal_attention
from graftlab.requests.identity import bootstrap_rooms_tensor, request_ids_tensor
from graftlab.taps.extras import carried

CONFIG = SMALL_MODEL


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are far too small for a second thread, which would only wait for the first."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def model(window: int | None = None) -> Transformer:
    # In float64, no rounding can turn one likeliest token into another.
    return Transformer(dataclasses.replace(CONFIG, sliding_window=window), seed=3).double().requires_grad_(False)


@functools.cache
def decoded(prompt: tuple[int, ...], count: int, window: int | None = None) -> list[int]:
    """Greedy decoding by the model alone, without a cache: all of it again for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(window)(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def workload(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    return [
        Request(f"r{i}", tuple(rng.choices(range(61), k=rng.randint(1, 30))), rng.randint(1, 12)) for i in range(count)
    ]


def outputs(engine: Engine, requests: list[Request], **options: Any) -> list[list[int]]:
    return [response["output_ids"] for response in engine.generate(requests, **options)]


def everything_free(engine: Engine) -> bool:
    cache = engine.cache
    return engine.status() == {
        "running": 0,
        "waiting": 0,
        "free_requests": cache.max_requests,
        "free_tokens": cache.max_tokens,
        "runner": engine.runner.status(),
    }


# ---- the same tokens ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "limits",
    [
        {"max_requests": 1},
        {"max_requests": 16, "max_prefill_tokens": 64},
        {"max_requests": 8, "max_tokens": 90},
        {"max_requests": 5, "max_prefill_tokens": 7},
    ],
    ids=["one at a time", "large batches", "little cache", "prompts in pieces"],
)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.soak)])
def test_many_requests_get_the_tokens_of_decoding_without_a_cache(
    limits: dict[str, int], count: int, window: int | None
) -> None:
    requests, engine, rng = workload(count), Engine(model(window), **limits), random.Random(1)
    rng.shuffle(requests)
    arriving, finished = list(requests), {}
    while arriving or engine.live:
        for _ in range(min(len(arriving), rng.choice([0, 0, 1, 2, 20]))):
            engine.add(arriving.pop())
        finished.update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    assert finished == {r.rid: decoded(r.input_ids, r.max_new_tokens, window) for r in requests}
    assert everything_free(engine)


@pytest.mark.slow
def test_the_window_is_felt_by_the_workload() -> None:
    assert [decoded(r.input_ids, r.max_new_tokens) for r in workload(20)] != [
        decoded(r.input_ids, r.max_new_tokens, 5) for r in workload(20)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_dtypes_serve_too(dtype: str) -> None:
    tiny = build_model("tiny", dtype=dtype)
    assert not any(module.training for module in tiny.modules())
    engine = Engine(tiny, max_prefill_tokens=10)
    (response,) = engine.generate(["some text"], max_new_tokens=1)
    with torch.no_grad():
        logits = tiny(torch.tensor([list(b"some text")]))[0, -1]
    # Rounding may choose between tokens that are as good as equally likely.
    assert logits.max() - logits[response["output_ids"][0]] <= 0.02 * logits.abs().max()
    assert engine.cache.keys.dtype == tiny.embedding.weight.dtype


def test_unused_slots_are_never_read() -> None:
    engine = Engine(model(5), max_requests=4)
    engine.cache.keys.fill_(torch.nan)
    engine.cache.values.fill_(torch.nan)
    requests = workload(10)
    assert outputs(engine, requests) == [decoded(r.input_ids, r.max_new_tokens, 5) for r in requests]


@examples(30)
@given(tokens=st.integers(1, 6), before=st.integers(0, 5), window=st.sampled_from([None, 1, 3]))
def test_masked_attention_is_causal_attention_under_its_mask(tokens: int, before: int, window: int | None) -> None:
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = before + tokens
    q, k, v = draw(2, tokens, 4, 8), draw(2, total, 2, 8), draw(2, total, 2, 8)
    age = torch.arange(before, total)[:, None] - torch.arange(total)
    visible = (age >= 0) & (age < (window or total))
    expected = causal_attention(q, k, v, window)
    torch.testing.assert_close(masked_attention(q, k, v, visible.expand(2, -1, -1)), expected)


def test_an_exception_in_a_forward_loses_nothing() -> None:
    class Failing(EagerRunner):
        forwards = 0

        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch)
            self.forwards += 1
            if self.forwards % 2:
                raise ArithmeticError("now and then")
            return logits

    completes_though_every_other_step_fails(Engine(model(), runner=Failing, max_prefill_tokens=20), workload(10))


def completes_though_every_other_step_fails(engine: Engine, requests: list[Any]) -> None:
    finished = {}
    for request in requests:
        engine.add(request)
    while engine.live:
        with pytest.raises(ArithmeticError):
            engine.step()
        finished.update((done.request.rid, done.response["output_ids"]) for done in engine.step())
    assert finished == {r.rid: decoded(r.input_ids, r.max_new_tokens) for r in requests}


def test_an_exception_after_a_forward_loses_nothing() -> None:
    seen: list[Any] = []

    def now_and_then(batch: Any) -> None:
        seen.append(batch)
        if len(seen) % 2:
            raise ArithmeticError("now and then")

    completes_though_every_other_step_fails(Engine(model(), on_step=now_and_then), workload(3))


# ---- room -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9)), st.randoms(use_true_random=False))
def test_an_allocator_hands_nothing_out_twice_and_loses_nothing(sizes: list[int], rng: random.Random) -> None:
    allocator, held = SlotAllocator(20, first=1), []
    for size in sizes:
        got = allocator.allocate(size)
        taken = sum(map(len, held))
        assert (got is None) == (size > 20 - taken)
        if got is not None:
            held.append(got)
        everyone = [slot for slots in held for slot in slots]
        assert len(set(everyone)) == len(everyone)
        assert set(everyone) <= set(range(1, 21))
        assert allocator.available == 20 - len(everyone)
        if held and rng.random() < 0.5:
            allocator.free(held.pop(rng.randrange(len(held))))
    for slots in held:
        allocator.free(slots)
    assert sorted(allocator.allocate(20) or []) == list(range(1, 21))


@pytest.mark.parametrize(("slots", "wrong"), [([1, 1], [1, 1]), ([1, 2], [2]), ([0], [0])])
def test_slots_that_are_not_handed_out_are_named_and_cannot_be_freed(slots: list[int], wrong: list[int]) -> None:
    allocator = SlotAllocator(4)
    assert allocator.allocate(2) == [0, 1]
    allocator.free([0])
    with pytest.raises(ValueError, match=re.escape(f"slots {wrong} are not allocated, or given twice, so they cannot")):
        allocator.free(slots)
    assert allocator.available == 3


@examples(40)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 12), st.integers(1, 6)),
            st.tuples(st.just("abort"), st.integers(0, 5)),
            st.tuples(st.just("step")),
        ),
        max_size=40,
    )
)
def test_no_sequence_of_arrivals_and_aborts_leaks_room(doings: list[tuple[Any, ...]]) -> None:
    engine = Engine(model(), max_requests=3, max_tokens=25, max_prefill_tokens=6)
    finished: list[Any] = []
    for number, (kind, *numbers) in enumerate(doings):
        if kind == "add":
            length, count = numbers
            engine.add(Request(f"r{number}", tuple(range(length)), count))
        elif kind == "abort" and len(engine.live) > numbers[0]:
            finished.append(engine.abort(engine.live[numbers[0]]))
        else:
            finished += engine.step()
        assert engine.status()["running"] <= 3
        assert engine.cache.available_slots >= 0
    while engine.live:
        finished += engine.step()
    assert everything_free(engine)
    assert len({done.request.rid for done in finished}) == len(finished) == sum(d[0] == "add" for d in doings)
    for done in finished:
        got, request = done.response["output_ids"], done.request
        assert got == decoded(request.input_ids, request.max_new_tokens)[: len(got)]


def test_the_cache_refuses_what_never_fits_and_what_was_given_back() -> None:
    cache = KVCache(
        1, 1, 2, max_requests=1, max_context=8, max_tokens=6, dtype=torch.float32, device=torch.device("cpu")
    )
    for tokens in (0, 7):
        with pytest.raises(ValueError, match="from 1 to 6"):
            cache.reserve(tokens)
    wide = KVCache(
        1, 1, 2, max_requests=1, max_context=4, max_tokens=6, dtype=torch.float32, device=torch.device("cpu")
    )
    with pytest.raises(ValueError, match="from 1 to 4"):
        wide.reserve(5)
    place = cache.reserve(2)
    assert place is not None
    assert cache.table[place.row, :3].tolist() == [*place.slots, PADDING_SLOT]
    # Slots are left, but no row.
    assert cache.reserve(2) is None
    cache.release(place)
    with pytest.raises(
        ValueError, match=exactly("slots [1, 2] are not allocated, or given twice, so they cannot be freed")
    ):
        cache.release(place)
    assert (cache.available_rows, cache.available_slots) == (1, 6)


def test_requests_are_let_in_as_they_come() -> None:
    engine = Engine(model(), max_tokens=20)
    engine.add(Request("first", tuple(range(10)), 4))
    engine.add(Request("large", tuple(range(10)), 4))
    engine.add(Request("small", (1,), 1))
    ended = []
    while engine.live:
        ended += [done.request.rid for done in engine.step()]
    # The small one had room beside the first, and did not overtake.
    assert ended == ["first", "small", "large"]


# ---- batches --------------------------------------------------------------------------------------------------------


def test_batches_keep_the_limits_and_say_where_everything_is() -> None:
    batches: list[Any] = []
    engine = Engine(model(), max_requests=4, max_prefill_tokens=16, on_step=batches.append)
    tables: list[torch.Tensor] = []
    forward = engine.runner.forward

    def looked_at(batch: Any) -> torch.Tensor:
        tables.append(engine.cache.table.clone())
        return forward(batch)

    engine.runner.forward = looked_at  # type: ignore[method-assign]
    requests = {request.rid: request for request in workload(20)}
    engine.generate(requests.values())
    assert {batch.mode for batch in batches} == {"prefill", "decode"}
    assert len(batches) == len(tables)
    computed = dict.fromkeys(requests, 0)
    for batch, table in zip(batches, tables, strict=True):
        assert 1 <= batch.batch_size <= 4
        assert batch.num_tokens <= 16
        assert torch.equal(batch.seq_lens, batch.seq_lens_cpu)
        lens = [1] * batch.batch_size if batch.mode == "decode" else batch.extend_lens_cpu.tolist()
        assert (batch.extend_lens_cpu is None) == (batch.mode == "decode")
        assert len(set(batch.out_cache_loc.tolist()) - {PADDING_SLOT}) == batch.num_tokens
        places = zip(batch.request_ids, lens, batch.seq_lens_cpu.tolist(), batch.req_pool_indices.tolist(), strict=True)
        start = 0
        for rid, extend, total, row in places:
            assert total - extend == computed[rid]
            computed[rid] = total
            here = slice(start, start := start + extend)
            assert batch.positions[here].tolist() == list(range(total - extend, total))
            assert torch.equal(batch.out_cache_loc[here], table[row, total - extend : total])
            prompt = requests[rid].input_ids
            if batch.mode == "prefill":
                assert batch.input_ids[here].tolist() == list(prompt[total - extend : total])
        assert start == batch.num_tokens
        assert batch.last_tokens().tolist() == torch.tensor(lens).cumsum(0).sub(1).tolist()
    # The last token of each is never computed: nothing follows it.
    assert computed == {rid: len(r.input_ids) + r.max_new_tokens - 1 for rid, r in requests.items()}


def test_a_prefill_holds_as_many_tokens_as_fit_and_counts_none_twice() -> None:
    batches: list[Any] = []
    engine = Engine(model(), max_prefill_tokens=16, on_step=batches.append)
    engine.generate([Request(f"r{n}", tuple(range(n, n + length)), 2) for n, length in enumerate((20, 6, 10))])
    prefills = [batch for batch in batches if batch.mode == "prefill"]
    # What is left of a prompt leaves the rest of the batch to the prompts after it.
    assert [dict(zip(batch.request_ids, batch.extend_lens_cpu.tolist(), strict=True)) for batch in prefills] == [
        {"r0": 16},
        {"r0": 4, "r1": 6, "r2": 6},
        {"r2": 4},
    ]


def test_identities_are_on_batches_from_the_moment_they_are_asked_for() -> None:
    batches: list[Any] = []
    engine = Engine(model(), on_step=batches.append)
    engine.add(Request("a", (1, 2), 4, bootstrap_room=7))
    engine.add(Request("请求-1", (3,), 4))
    engine.step()
    engine.request_ids = True
    engine.step()
    engine.step()
    engine.request_ids = False
    engine.step()
    off, *on, off_again = batches
    for batch in (off, off_again):
        for holder in (batch, batch.sampling_info):
            assert holder.rids_int is None
            assert holder.bootstrap_room_ids_int is None
    for batch in on:
        for holder in (batch, batch.sampling_info):
            assert torch.equal(holder.rids_int, request_ids_tensor(["a", "请求-1"], "cpu"))
            assert torch.equal(holder.bootstrap_room_ids_int, bootstrap_rooms_tensor([7, None], "cpu"))


def test_identities_travel_with_every_tap_of_a_batch_that_has_them() -> None:
    whole: Any = copy.deepcopy(model())
    seen: list[dict[str, Any]] = []
    whole.blocks[1].register_forward_pre_hook(lambda *_: seen.append(dict(carried() or {})))
    engine = Engine(whole, request_ids=True)
    engine.generate([Request("a", (1, 2, 3), 2)])
    prefill, decode = ({name: each.tolist() for name, each in extras.items()} for extras in seen)
    rids = request_ids_tensor(["a"], "cpu").tolist()
    assert (prefill, decode) == ({"rids_int": rids, "request_lens": [3]}, {"rids_int": rids})
    engine.request_ids = False
    seen.clear()
    engine.generate([(1, 2, 3)], 2)
    assert seen == [{}, {}]
    assert carried() is None


@pytest.mark.ranks
def test_taps_tell_prefill_from_decode_and_a_split_model_is_served_alike() -> None:
    def serve(config: ModelConfig, split: bool) -> list[list[int]]:
        torch.set_num_threads(1)
        whole = TensorParallelTransformer(config, seed=3) if split else Transformer(config, seed=3)
        engine = Engine(whole.double(), max_prefill_tokens=8)
        return [response["output_ids"] for response in engine.generate([[1, 2, 3], [4, 5, 6, 7, 8, 9]], 3)]

    with gl.launch(baseline=1, target=2) as session:
        run = session.run(
            baseline=lambda config: serve(config, False), target=lambda config: serve(config, True), args=(CONFIG,)
        )
        expected = [decoded((1, 2, 3), 3), decoded((4, 5, 6, 7, 8, 9), 3)]
        assert run.baseline + run.target == [expected] * 3
        rows = run.frame
    assert set(rows["status"]) == {"compared"}
    assert rows["rel_l2"].max() < 1e-12
    # Eight tokens of the prompts and the ninth, then a token of each for as long as both continue.
    embeds = rows[(rows["name"] == "embed") & (rows["rank"] == 0)].sort_values("order")
    assert embeds["phase"].tolist() == ["prefill", "prefill", "decode", "decode"]
    assert [shape[0] for shape in embeds["shape"]] == [8, 1, 2, 2]


# ---- sampling -------------------------------------------------------------------------------------------------------


def info(temperatures: list[float], seeds: list[int], positions: list[int], top_ks: list[int]) -> SamplingBatchInfo:
    return SamplingBatchInfo(
        torch.tensor(temperatures),
        torch.tensor(seeds),
        torch.tensor(positions),
        torch.tensor(top_ks),
        all_greedy=not any(temperatures),
    )


@pytest.mark.slow
def test_a_draw_does_not_depend_on_what_else_is_served() -> None:
    requests = [
        dataclasses.replace(r, temperature=1.0 + i % 3, seed=i, top_k=[None, 5][i % 2])
        for i, r in enumerate(workload(30))
    ]
    alone = [outputs(Engine(model()), [request])[0] for request in requests]
    together = outputs(Engine(model(), max_requests=30), requests)
    backwards = outputs(Engine(model(), max_requests=3, max_prefill_tokens=5), requests[::-1])[::-1]
    assert alone == together == backwards
    assert alone != outputs(Engine(model()), [dataclasses.replace(r, seed=r.seed + 1) for r in requests])
    # Greedy requests beside them stay greedy.
    mixed = [dataclasses.replace(r, temperature=0.0) if i % 2 else r for i, r in enumerate(requests)]
    got = outputs(Engine(model(), max_requests=30), mixed)
    assert got[::2] == alone[::2]
    assert got[1::2] == [decoded(r.input_ids, r.max_new_tokens) for r in requests[1::2]]


def test_draws_follow_the_softmax_of_the_logits_by_temperature() -> None:
    draws, logits = 20_000, torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    for over_seeds in (True, False):
        running, still = list(range(draws)), [5] * draws
        seeds, positions = (running, still) if over_seeds else (still, running)
        drawn = sample(logits.expand(draws, -1), info([1.5] * draws, seeds, positions, [5] * draws))
        counts = drawn.bincount(minlength=5).double()
        expected = draws * (logits / 1.5).softmax(0).double()
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < 23.5  # one in 10,000 with 4 degrees of freedom


def test_only_the_likeliest_k_are_drawn_and_no_temperature_is_too_small() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9]).expand(500, -1)
    seeds, zeros = list(range(500)), [0] * 500
    assert set(sample(logits, info([50.0] * 500, seeds, zeros, [2] * 500)).tolist()) == {1, 3}
    assert set(sample(logits, info([50.0] * 500, seeds, zeros, [9] * 500)).tolist()) == {0, 1, 2, 3}
    assert set(sample(logits, info([1e-44] * 500, seeds, zeros, [4] * 500)).tolist()) == {1}


def test_the_noise_is_the_published_generators_and_the_same_everywhere() -> None:
    states = [sampling._signed((1234567 + i * 0x9E3779B97F4A7C15) % 2**64) for i in range(3)]
    assert [number % 2**64 for number in sampling._mix(torch.tensor(states)).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    noise = sampling.gumbel_noise(torch.tensor([0, 2**63 - 1]), torch.tensor([0, 9]), 1000)
    assert noise.isfinite().all()
    assert not torch.equal(noise[0], noise[1])


# ---- requests -------------------------------------------------------------------------------------------------------


def test_a_response_says_how_it_came_about() -> None:
    engine = Engine(build_model("tiny"))
    (response,) = engine.generate(["prompt"], max_new_tokens=3)
    meta = response["meta_info"]
    assert (meta["finish_reason"], meta["prompt_tokens"], meta["completion_tokens"]) == ("length", 6, 3)
    assert 0 <= meta["queue_seconds"] <= meta["first_token_seconds"] <= meta["total_seconds"]
    assert response["text"] == ByteTokenizer().decode(response["output_ids"])


def test_the_times_of_a_request_are_when_it_began_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 200))
    wall = SimpleNamespace(time=lambda: 5000.0, monotonic=lambda: float(next(clock)))
    monkeypatch.setattr("graftlab.engine.engine.time", wall)
    engine = Engine(model())
    engine.add(Request("a", (1, 2), 3))
    (done,) = [each for _ in range(3) for each in engine.step()]
    meta = done.response["meta_info"]
    # It arrived at 100, began at 101 and had its first token at 102.
    assert (meta["queue_seconds"], meta["first_token_seconds"]) == (1.0, 2.0)
    assert (done.created, done.finished) == (5000.0, 5000.0 + meta["total_seconds"])


def test_without_a_limit_every_token_may_be_drawn() -> None:
    hot = {"temperature": 5.0, "max_new_tokens": 8}
    free, limited, likeliest = Engine(model()).generate(
        [Request("a", (1, 2), **hot), Request("b", (1, 2), top_k=61, **hot), Request("c", (1, 2), top_k=1, **hot)]
    )
    assert free["output_ids"] == limited["output_ids"] != likeliest["output_ids"] == decoded((1, 2), 8)


def test_a_stop_token_ends_the_output() -> None:
    whole = decoded((1, 2, 3), 8)
    stop = whole[2]
    (response,) = Engine(model()).generate([(1, 2, 3)], 8, stop_token_ids=[60, stop])
    assert response["output_ids"] == whole[: whole.index(stop) + 1]
    assert response["meta_info"]["finish_reason"] == "stop"


def test_an_aborted_request_keeps_what_it_has() -> None:
    engine = Engine(model(), max_requests=1)
    engine.add(Request("running", (1, 2, 3), 9))
    engine.add(Request("waiting", (1, 2, 3), 9))
    for _ in range(4):
        assert engine.step() == []
    running, waiting = engine.abort("running"), engine.abort("waiting", error="broken")
    assert running is not None
    assert waiting is not None
    assert running.response["output_ids"] == decoded((1, 2, 3), 9)[:4]
    assert running.response["meta_info"]["finish_reason"] == "abort"
    assert waiting.response["output_ids"] == []
    assert waiting.response["meta_info"]["first_token_seconds"] is None
    assert waiting.response["meta_info"]["error"] == "broken"
    assert engine.abort("running") is None
    assert engine.step() == []
    assert everything_free(engine)


def test_a_recorded_request_is_served_again_as_it_was() -> None:
    engine = Engine(build_model("tiny"))
    for fields in (
        {"rid": "a", "text": "some text", "temperature": 1, "seed": 4, "max_new_tokens": 5},
        {"input_ids": [1, 2, 3], "stop_token_ids": [4], "top_k": None},
    ):
        request = Request.from_dict(fields, engine.tokenizer)
        again = Request.from_dict(request.as_dict(), engine.tokenizer)
        assert again == request
        assert outputs(engine, [request.as_dict()]) == outputs(engine, [request])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "text or input_ids"),
        ({"text": "x", "input_ids": [1]}, "text or input_ids"),
        ({"text": 5}, "text must be a string, got 5"),
        ({"text": "\ud800"}, "cannot be written in UTF-8"),
        ({"text": ""}, "prompt is empty"),
        ({"input_ids": []}, "prompt is empty"),
        ({"input_ids": 7}, "input_ids must be a list of token ids, got 7"),
        ({"input_ids": [1, True]}, r"input_ids\[1\] must be an int, got True"),
        ({"input_ids": [-1]}, r"input_ids\[0\] must be from 0"),
        ({"text": "x", "max_new_tokens": 0}, "max_new_tokens must be from 1"),
        ({"text": "x", "max_new_tokens": 2.0}, "max_new_tokens must be an int, got 2.0"),
        ({"text": "x", "temperature": -1}, "temperature must be from 0 to"),
        ({"text": "x", "temperature": float("nan")}, "temperature must be from 0 to 1e.06, got nan"),
        ({"text": "x", "temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"text": "x", "temperature": 10**400}, "temperature must be from 0 to"),
        ({"text": "x", "seed": 2**63}, "seed must be from 0 to"),
        ({"text": "x", "top_k": 0}, "top_k must be from 1"),
        ({"text": "x", "bootstrap_room": -(2**63) - 1}, "bootstrap_room must be from"),
        ({"text": "x", "bootstrap_room": "7"}, "bootstrap_room must be an int"),
        ({"text": "x", "stop_token_ids": [None]}, r"stop_token_ids\[0\] must be an int"),
        ({"text": "x", "rid": 5}, "a request id is a string"),
        ({"text": "x", "temprature": 1}, "no field 'temprature'; the fields are rid, input_ids"),
    ],
)
def test_an_impossible_request_is_refused_by_field(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Request.from_dict(fields, ByteTokenizer())


def test_a_request_that_can_never_be_served_is_refused_at_once() -> None:
    engine = Engine(model(), max_context=40, max_tokens=20)
    with pytest.raises(RequestError, match="token id 61 is not in the model's vocabulary of 61"):
        engine.add(Request("a", (61,)))
    with pytest.raises(
        RequestError,
        match=exactly(
            "1 prompt tokens and max_new_tokens=40 are 41 tokens, more than a request may have (40); "
            "shorten the prompt or ask for less"
        ),
    ):
        engine.add(Request("a", (1,), 40))
    with pytest.raises(RequestError, match="21 tokens would be in the cache, which has room for 20"):
        engine.add(Request("a", (1, 2), 20))
    Engine(model(), max_context=40).check(Request("a", (1,), 39))
    engine.add(Request("a", (1,), 20))
    with pytest.raises(
        RequestError, match=exactly("a request with the id 'a' is not over yet; ids of live requests must be unique")
    ):
        engine.add(Request("a", (1,)))
    with pytest.raises(
        RuntimeError,
        match=exactly(
            "generate() needs the engine for itself, and 1 requests are still live; finish them with "
            "step(), or abort() them"
        ),
    ):
        engine.generate([[1]])
    assert engine.live == ["a"]


def test_a_workload_with_a_request_that_is_refused_leaves_nothing_behind() -> None:
    engine = Engine(model())
    with pytest.raises(RequestError, match=exactly("token id 61 is not in the model's vocabulary of 61")):
        engine.generate([[1], [61]])
    assert everything_free(engine)
    assert outputs(engine, [Request("a", (1,), 3)]) == [decoded((1,), 3)]


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"max_requests": 0}, "Engine: max_requests must be an int of at least 1, got 0"),
        ({"max_tokens": True}, "Engine: max_tokens must be an int of at least 1, got True"),
        ({"max_prefill_tokens": 1.5}, "Engine: max_prefill_tokens must be an int of at least 1, got 1.5"),
        ({"max_context": 65}, "Engine: max_context=65 exceeds the model's max_positions=64"),
    ],
)
def test_impossible_limits_are_refused(limits: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=exactly(reason)):
        Engine(model(), **limits)


@given(st.text())
def test_text_survives_its_tokens(text: str) -> None:
    assert ByteTokenizer().decode(ByteTokenizer().encode(text)) == text


def test_tokens_that_are_no_text_decode_to_the_replacement_character() -> None:
    assert ByteTokenizer().decode([104, 105, 300, 0xC3, 33]) == "hi\ufffd\ufffd!"


def test_models_are_known_by_name() -> None:
    assert build_model("tiny", sliding_window=7).config.sliding_window == 7
    assert build_model("tiny", dtype="bfloat16").embedding.weight.dtype == torch.bfloat16
    with pytest.raises(ValueError, match=exactly("there is no model 'huge'; the models are tiny, small")):
        build_model("huge")
    with pytest.raises(
        ValueError, match=exactly("there is no dtype 'int8'; the dtypes are float64, float32, bfloat16, float16")
    ):
        build_model(dtype="int8")


def test_a_runner_that_is_made_already_is_refused_with_what_to_give_instead() -> None:
    engine = Engine(model())
    with pytest.raises(
        TypeError,
        match=exactly(
            "Engine: runner is called as runner(model, cache), and got a EagerRunner; give the class, as "
            "runner=DecodeGraphRunner, with options through functools.partial"
        ),
    ):
        Engine(model(), runner=engine.runner)  # type: ignore[arg-type]
