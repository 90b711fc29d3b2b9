"""Models that read more than tokens and places get it in every runner: three positions a token, or encoder lengths."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from kit.cells import every_pair
from kit.recorded_kernels import record_kernels
from kit.refusals import exactly
from kit.support import SMALL_MODEL
from torch import Tensor

from graftlab.engine import (
    BreakableGraphRunner,
    DecodeGraphRunner,
    DraftGraphRunner,
    EagerRunner,
    Engine,
    ForwardBatch,
    KVCache,
    PrefillGraphRunner,
    Request,
    RunnerFactory,
)
from graftlab.engine.encoder import EncoderAttention
from graftlab.engine.runners.graph import GraphRunner
from graftlab.errors import GraphError
from graftlab.graphs import clear_input_buffer_pool
from graftlab.models import CrossAttend, CrossAttentionTransformer, MultimodalTransformer, Transformer

CONFIG = dataclasses.replace(SMALL_MODEL, max_positions=48)
IMAGE, SEPARATOR = 7, 5
GARBAGE = -(10**9)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    clear_input_buffer_pool()
    yield
    torch.set_num_threads(before)


@functools.cache
def model(name: str) -> Transformer:
    built = {
        "plain": lambda: Transformer(CONFIG, 3),
        "mrope": lambda: MultimodalTransformer(CONFIG, 3, sections=(1, 1, 2), image_token=IMAGE, image_width=2),
        "encoder": lambda: CrossAttentionTransformer(CONFIG, 3, separator=SEPARATOR),
    }[name]()
    # In float64, no rounding can turn one likeliest token into another.
    return built.double().requires_grad_(False)


def drafting(name: str) -> RunnerFactory:
    return lambda each, cache: DraftGraphRunner(each, cache, draft=model(name))


RUNNERS: dict[str, RunnerFactory] = {
    "decode": DecodeGraphRunner,
    "prefill": PrefillGraphRunner,
    "both": partial(PrefillGraphRunner, decode=DecodeGraphRunner),
    "breakable": BreakableGraphRunner,
    "broken": partial(BreakableGraphRunner, breaks={"blocks.0.attention": torch.clone}),
    "draft": drafting("plain"),
}
FIELDS = {"mrope": "mrope_positions", "encoder": "encoder_lens"}
runners = pytest.mark.parametrize("kind", RUNNERS)
models = pytest.mark.parametrize("name", FIELDS)


def prompts(count: int = 9) -> list[Request]:
    """With images of several sizes, and sources of several lengths; some with neither."""
    rng, requests = random.Random(0), []
    for i in range(count):
        image, source = [IMAGE] * rng.choice([0, 1, 3, 6]), rng.choices(range(8, 61), k=rng.choice([0, 2, 9]))
        ids = [*source, *([SEPARATOR] if source else []), *image, *rng.choices(range(8, 61), k=rng.randint(1, 9))]
        requests.append(Request(f"r{i}", tuple(ids), rng.randint(2, 12), temperature=rng.choice([0.0, 0.8]), seed=i))
    return requests


def served(engine: Engine) -> dict[str, list[int]]:
    requests = prompts()
    answers = engine.generate(requests)
    return {request.rid: answer["output_ids"] for request, answer in zip(requests, answers, strict=True)}


@functools.cache
def expected(name: str) -> dict[str, list[int]]:
    return served(Engine(model(name)))


def over(source: Sequence[int], built: CrossAttentionTransformer) -> CrossAttend:
    """Attention of all tokens over one source, head by head."""

    def attend(layer: int, q: Tensor) -> Tensor:
        if not source:
            return torch.zeros_like(q)
        keys, values = (each[layer] for each in built.encode(torch.tensor(source)))
        shared = q.shape[2] // keys.shape[1]
        out = torch.empty_like(q)
        for head in range(q.shape[2]):
            scores = q[:, :, head] @ keys[:, head // shared].T / math.sqrt(q.shape[3])
            out[:, :, head] = scores.softmax(dim=-1) @ values[:, head // shared]
        return out

    return attend


# ---- the models -----------------------------------------------------------------------------------------------------


def test_patches_have_grid_positions_and_text_continues_after_them() -> None:
    built = model("mrope")
    assert isinstance(built, MultimodalTransformer)
    prompt = [1, *[IMAGE] * 5, 2, 3, IMAGE, 4]
    assert built.mrope_positions(prompt, 12).tolist() == [
        [0, 1, 1, 1, 1, 1, 4, 5, 6, 7, 8, 9],
        [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9],
        [0, 1, 2, 1, 2, 1, 4, 5, 6, 7, 8, 9],
    ]
    # A piece of a prompt, and a token IMAGE that the model itself put out, which is text.
    assert built.mrope_positions(prompt, 3).tolist() == [[0, 1, 1], [0, 1, 1], [0, 1, 2]]
    assert built.mrope_positions([1, IMAGE, IMAGE], 6)[:, 3:].tolist() == [[3, 4, 5]] * 3


def test_each_section_of_the_head_turns_by_its_own_position() -> None:
    built, plain = model("mrope"), model("plain")
    positions = torch.tensor([[[3, 4]], [[7, 1]], [[0, 9]]])
    mixed = built._angles(positions, torch.float64)
    alone = [plain._angles(row, torch.float64) for row in positions]
    planes = [0, 1, 2, 2]  # sections=(1, 1, 2)
    for which in (0, 1):
        for plane, row in enumerate(planes):
            assert torch.equal(mixed[which][..., plane], alone[row][which][..., plane])


@models
def test_without_images_and_sources_they_are_the_plain_transformer(name: str) -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(model(name)(ids), model("plain")(ids))


def test_what_a_model_cannot_be_made_of_is_refused() -> None:
    make = partial(MultimodalTransformer, CONFIG, image_token=1, image_width=2)
    for sections in ((1, 1, 1), (2, 2), (-1, 1, 4)):
        with pytest.raises(ValueError, match="add up to half of head_dim: 4"):
            make(sections=sections)
    with pytest.raises(ValueError, match=exactly("image_width must be at least 1, got 0")):
        make(sections=(1, 1, 2), image_width=0)
    with pytest.raises(ValueError, match=exactly("image_token=61 is not in the vocabulary of 61")):
        make(sections=(1, 1, 2), image_token=61)
    with pytest.raises(ValueError, match=exactly("separator=61 is not in the vocabulary of 61")):
        CrossAttentionTransformer(CONFIG, separator=61)
    with pytest.raises(
        ValueError, match=exactly("positions must have three rows of input_ids' shape, [3, 1, 2], got [1, 2]")
    ):
        model("mrope")(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]))


# ---- the eager engine, against the model without a cache ------------------------------------------------------------


@pytest.mark.slow
@models
def test_the_eager_engine_gives_the_uncached_models_tokens(name: str) -> None:
    built = model(name)
    requests = [dataclasses.replace(request, temperature=0.0) for request in prompts()]
    answers = Engine(built, max_prefill_tokens=7).generate(requests)
    for request, answer in zip(requests, answers, strict=True):
        ids = list(request.input_ids)
        while len(ids) < len(request.input_ids) + request.max_new_tokens:
            if isinstance(built, MultimodalTransformer):
                logits = built(torch.tensor([ids]), built.mrope_positions(request.input_ids, len(ids))[:, None])
            else:
                assert isinstance(built, CrossAttentionTransformer)
                source = request.input_ids[: built.source_len(request.input_ids)]
                logits = built(torch.tensor([ids]), cross_attend=over(source, built))
            ids.append(int(logits[0, -1].argmax()))
        assert answer["output_ids"] == ids[len(request.input_ids) :]


def test_a_row_of_the_cache_forgets_the_source_of_its_last_request() -> None:
    def answer(engine: Engine, ids: list[int]) -> list[int]:
        return engine.generate([ids], max_new_tokens=8)[0]["output_ids"]

    for short in ([9, SEPARATOR, 3, 4], [3, 4]):
        used, fresh = Engine(model("encoder"), max_requests=1), Engine(model("encoder"), max_requests=1)
        answer(used, [*range(10, 25), SEPARATOR, 1])
        assert answer(used, short) == answer(fresh, short)


# ---- every runner ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name", "device"), every_pair(RUNNERS, FIELDS, ("cpu", "kernels")))
def test_every_runner_gives_the_eager_engines_tokens(
    kind: str, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where garbage lies between two forwards in all that a replay may read."""
    if device == "kernels":
        record_kernels(monkeypatch)
    engine = Engine(model(name), runner=RUNNERS[kind], max_requests=5, max_prefill_tokens=20)
    runner = engine.runner
    assert isinstance(runner, GraphRunner)

    def poison(batch: ForwardBatch | None) -> None:
        for each in (runner, *(inner for inner in vars(runner).values() if isinstance(inner, GraphRunner))):
            slot = each.registry.get_slot(FIELDS[name])
            assert slot.buffer is not None
            slot.buffer.fill_(GARBAGE)
            if each.encoder is not None:
                each.encoder._rows.fill_(GARBAGE)
                each.encoder._visible.logical_not_()

    poison(None)
    engine.on_step = poison
    assert served(engine) == expected(name)
    assert 1 <= runner.captures < runner.replays


@pytest.mark.slow
@runners
@models
def test_what_the_model_reads_comes_through_the_registrys_slot(kind: str, name: str) -> None:
    engine = Engine(model(name), runner=RUNNERS[kind])
    runner = engine.runner
    assert isinstance(runner, GraphRunner)
    slot = runner.registry.get_slot(FIELDS[name])
    # The batch is as ever, and the slot shows something else.
    object.__setattr__(slot, "source_fn", lambda batch, ctx: torch.zeros_like(getattr(batch, FIELDS[name])))
    assert served(engine) != expected(name)


@models
def test_a_runner_that_replays_nothing_gives_the_same_tokens(name: str) -> None:
    engine = Engine(model(name), runner=BreakableGraphRunner)
    assert isinstance(engine.runner, BreakableGraphRunner)
    engine.runner.eager = True
    assert served(engine) == expected(name)
    assert engine.runner.captures == 0


@pytest.mark.slow
def test_a_draft_may_have_multimodal_positions_too() -> None:
    engine = Engine(model("mrope"), runner=drafting("mrope"))
    assert served(engine) == expected("mrope")
    runner = engine.runner
    assert isinstance(runner, DraftGraphRunner)
    # The draft is the model, so that every greedy guess comes true where its positions are right.
    requests = [dataclasses.replace(request, temperature=0.0, max_new_tokens=9) for request in prompts()]
    guessed, accepted = runner.guessed, runner.accepted
    engine.generate(requests)
    assert runner.accepted - accepted == runner.guessed - guessed > 0


def test_a_draft_whose_inputs_no_batch_has_is_refused() -> None:
    with pytest.raises(
        GraphError,
        match=exactly(
            "the draft has cross-attention, but its cache gets no encoder states; use a draft without it, "
            "or a DecodeGraphRunner"
        ),
    ):
        Engine(model("encoder"), runner=drafting("encoder"))
    with pytest.raises(
        GraphError,
        match=exactly(
            "the draft has multimodal rotary positions, and batches of this model have none; use a draft without them"
        ),
    ):
        Engine(model("plain"), runner=drafting("mrope"))


def test_a_batch_or_cache_without_what_the_model_reads_is_refused() -> None:
    cache = KVCache(
        2, 2, 8, max_requests=1, max_context=4, max_tokens=4, dtype=torch.float64, device=torch.device("cpu")
    )
    with pytest.raises(
        GraphError,
        match=exactly(
            "the model has cross-attention, and its cache has no room for encoder states; make the cache "
            "with encoder_states=True, as Engine does for such a model"
        ),
    ):
        EagerRunner(model("encoder"), cache)
    one = torch.tensor([1])
    batch = ForwardBatch("decode", one, one - 1, one, one - 1, one, one)
    with pytest.raises(
        GraphError, match=exactly("the model has multimodal rotary positions, and the batch has no mrope_positions")
    ):
        EagerRunner(model("mrope"), cache).forward(batch)
    engine = Engine(model("encoder"), max_requests=1)
    with pytest.raises(GraphError, match=exactly("the model has cross-attention, and the batch has no encoder_lens")):
        engine.runner.forward(batch)
    with pytest.raises(GraphError, match=exactly("EncoderAttention has room for 1 tokens, and the batch has 2")):
        EncoderAttention(engine.cache, 1).prepare_metadata(
            dataclasses.replace(batch, input_ids=torch.tensor([1, 2]), encoder_lens=one)
        )


def test_padding_and_requests_without_a_source_attend_to_nothing() -> None:
    cache = Engine(model("encoder"), max_requests=3).cache
    assert Engine(model("plain")).cache.encoder_keys is None
    assert cache.encoder_keys is not None
    cache.encoder_keys.fill_(torch.nan)
    states = torch.randn(2, 5, *cache.encoder_keys.shape[3:], dtype=torch.float64)
    for row in (1, 2):
        cache.write_encoder(row, states, row * states)
    attention, one = EncoderAttention(cache, 6), torch.tensor([1])
    plain = ForwardBatch("decode", one, one - 1, one, one - 1, one, one)

    def attend(rows: list[int], lens: list[int], tokens: int) -> Tensor:
        batch = dataclasses.replace(
            plain,
            input_ids=torch.ones(tokens, dtype=torch.int64),
            req_pool_indices=torch.tensor(rows),
            seq_lens_cpu=torch.ones(len(rows), dtype=torch.int64),
            encoder_lens=torch.tensor(lens),
        )
        attention.prepare_metadata(batch)
        return attention.attend(0, torch.ones(tokens, 1, CONFIG.num_heads, CONFIG.head_dim, dtype=torch.float64))

    full = attend([1, 2, 1, 2], [5, 5, 1, 0], 4)
    torch.testing.assert_close(full[1], 2 * full[0])
    assert full[2].abs().sum() > 0
    assert full[3].abs().sum() == 0
    # Fewer requests than before, then fewer tokens than requests.
    assert attend([2], [5], 4)[1:].abs().sum() == 0
    torch.testing.assert_close(attend([2, 1], [5, 5], 1), full[1:2])
