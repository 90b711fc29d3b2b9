"""The reference transformers compute what they say, and the split one computes the same as the whole one."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import math
import os
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.groups import run_ranks
from kit.refusals import exactly
from kit.support import SMALL_MODEL

from graftlab.models import (
    ModelConfig,
    RMSNorm,
    TensorParallelTransformer,
    Transformer,
    causal_attention,
    tensor_parallel,
    transformer,
)

CONFIG = SMALL_MODEL
IN_LAYER = ["attn_norm", "q", "k", "v", "attn_out", "attn_residual", "mlp_norm", "mlp_out", "mlp_residual"]
TAPS = [
    ("embed", None),
    *((name, layer) for layer in range(CONFIG.num_layers) for name in IN_LAYER),
    ("final_norm", None),
    ("logits", None),
]

# A vocabulary of 61 divides by neither 2 nor 4, so the last slice of the output layer is short; 64 divides.
SPLITS = {
    "kv heads split": (2, CONFIG),
    "tied embeddings": (2, dataclasses.replace(CONFIG, tie_embeddings=True, sliding_window=3)),
    "one kv head on two ranks": (2, dataclasses.replace(CONFIG, num_kv_heads=1, vocab_size=64)),
    "two kv heads on four ranks, tied": (4, dataclasses.replace(CONFIG, tie_embeddings=True)),
}
WORLD_SIZE = 4


def token_ids(config=CONFIG, tokens=9, rows=2):
    return torch.randint(config.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))


def relative_l2(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def digest(model):
    total = hashlib.sha256()
    for name, parameter in model.named_parameters():
        total.update(name.encode() + parameter.detach().numpy().tobytes())
    return total.hexdigest()


@contextmanager
def recorded_taps(replace=lambda name, tensor: tensor):
    """The (name, layer, tensor) of every tap in order; `replace` gives the tensor that the tap returns."""
    seen, layers = [], [None]

    def tap(name, tensor, **tags):
        assert not tags
        tensor = replace(name, tensor)
        seen.append((name, layers[-1], tensor.detach().clone()))
        return tensor

    @contextmanager
    def tags(layer):
        layers.append(layer)
        yield
        layers.pop()

    with mock.patch.object(transformer, "tap", tap), mock.patch.object(transformer, "tags", tags):
        yield seen


# --- one process --------------------------------------------------------------------------------


@torch.no_grad()
def reference_logits(model, input_ids):
    """The same model written down anew: a row, a head and a query at a time, rotated by complex numbers."""
    config, weight = model.config, {name: p.detach().double() for name, p in model.state_dict().items()}
    size, group = config.head_dim, config.num_heads // config.num_kv_heads
    window = config.sliding_window or config.max_positions

    def norm(x, name):
        return x / ((x * x).mean(-1, keepdim=True) + config.norm_eps) ** 0.5 * weight[name]

    def rotate(x):
        place, plane = torch.arange(len(x)).double(), torch.arange(size // 2).double()
        if config.long_after is not None and len(x) > config.long_after:
            place /= config.long_factor
        turn = torch.polar(
            torch.ones(len(x), size // 2).double(),
            torch.outer(place, config.rope_base ** (-2 * plane / size)),
        )
        turned = torch.complex(x[:, : size // 2], x[:, size // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], dim=1)

    def head(x, name, number):
        return x @ weight[name][number * size : (number + 1) * size].T

    rows = []
    for ids in input_ids:
        x = weight["embedding.weight"][ids]
        for layer in range(config.num_layers):
            block = f"blocks.{layer}."
            attention = block + "attention."
            normed = norm(x, block + "attn_norm.weight")
            heads = []
            for number in range(config.num_heads):
                q = rotate(head(normed, attention + "q_proj.weight", number))
                k = rotate(head(normed, attention + "k_proj.weight", number // group))
                v = head(normed, attention + "v_proj.weight", number // group)
                out = []
                for t in range(len(ids)):
                    seen = slice(max(0, t - window + 1), t + 1)
                    score = torch.exp(k[seen] @ q[t] / math.sqrt(size))
                    out.append(score @ v[seen] / score.sum())
                heads.append(torch.stack(out))
            x = x + torch.cat(heads, dim=1) @ weight[attention + "o_proj.weight"].T
            normed = norm(x, block + "mlp_norm.weight")
            gate = normed @ weight[block + "mlp.gate_proj.weight"].T
            up = normed @ weight[block + "mlp.up_proj.weight"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ weight[block + "mlp.down_proj.weight"].T
        head_name = "embedding.weight" if config.tie_embeddings else "lm_head.weight"
        rows.append(norm(x, "final_norm.weight") @ weight[head_name].T)
    return torch.stack(rows)


@st.composite
def configs(draw):
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return ModelConfig(
        vocab_size=draw(st.integers(2, 40)),
        hidden_size=heads * 2 * draw(st.integers(1, 3)),
        num_layers=draw(st.integers(1, 2)),
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 20)),
        max_positions=8,
        rope_base=draw(st.sampled_from([10.0, 10000.0, 1e6])),
        norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        sliding_window=draw(st.sampled_from([None, 1, 3])),
        tie_embeddings=draw(st.booleans()),
        long_after=draw(st.sampled_from([None, 1, 4])),
    )


@examples(20)
@given(config=configs(), seed=st.integers(0, 9), tokens=st.integers(1, 8))
def test_agrees_with_an_independent_float64_forward(config, seed, tokens):
    model = Transformer(config, seed).double()
    input_ids = token_ids(config, tokens, rows=1)
    torch.testing.assert_close(model(input_ids), reference_logits(model, input_ids), rtol=1e-9, atol=1e-9)


def test_float32_stays_within_rounding_of_float64():
    model = Transformer(CONFIG)
    assert relative_l2(model(token_ids()), reference_logits(model, token_ids())) < 2e-6


def test_bfloat16_keeps_its_dtype_and_stays_close():
    model, exact = Transformer(CONFIG).bfloat16(), Transformer(CONFIG)
    logits = model(token_ids())
    assert logits.dtype == torch.bfloat16
    assert relative_l2(logits, exact(token_ids())) < 0.05


def test_rms_norm_of_bfloat16_rounds_only_once():
    norm = RMSNorm(64, eps=1e-6)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm(x), expected.bfloat16(), rtol=0, atol=0)


def test_a_later_token_changes_nothing_before_it():
    model, before = Transformer(CONFIG), token_ids()
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % CONFIG.vocab_size
    changed = (model(before) != model(after)).any(dim=-1)
    assert not changed[:, :5].any()
    assert changed[:, 5:].all()


def test_a_token_outside_every_window_is_not_seen():
    # Each layer looks 2 tokens further back, so 2 layers reach 4 tokens back and not 5.
    model, before = Transformer(dataclasses.replace(CONFIG, sliding_window=3)), token_ids()
    after = before.clone()
    after[:, 1] = (after[:, 1] + 1) % CONFIG.vocab_size
    changed = (model(before) != model(after)).any(dim=-1)
    assert changed[0].tolist() == [False, *[True] * 5, *[False] * 3]


def test_only_the_distances_between_positions_matter():
    model, place = Transformer(CONFIG).double(), torch.arange(9).expand(2, 9)
    torch.testing.assert_close(model(token_ids(), place + 40), model(token_ids()), rtol=1e-9, atol=1e-9)
    assert relative_l2(model(token_ids(), place * 2), model(token_ids())) > 1e-2


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    grouped = Transformer(CONFIG)
    full = Transformer(dataclasses.replace(CONFIG, num_kv_heads=CONFIG.num_heads))
    weights = grouped.state_dict()
    for name in weights:
        if "k_proj" in name or "v_proj" in name:
            heads = weights[name].unflatten(0, (CONFIG.num_kv_heads, -1))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    torch.testing.assert_close(full(token_ids()), grouped(token_ids()), rtol=1e-5, atol=1e-5)


def test_weights_depend_on_the_seed_alone():
    expected, before = digest(Transformer(CONFIG, seed=3)), torch.get_rng_state()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert digest(Transformer(CONFIG, seed=3)) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert digest(Transformer(CONFIG, seed=4)) != expected
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_are_one_parameter():
    model = Transformer(dataclasses.replace(CONFIG, tie_embeddings=True))
    assert model.lm_head.weight is model.embedding.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_taps_come_in_order_with_their_layer():
    with recorded_taps() as seen:
        Transformer(CONFIG)(token_ids())
    assert [(name, layer) for name, layer, _ in seen] == TAPS
    shapes = {name: list(tensor.shape) for name, _, tensor in seen}
    assert shapes["q"] == [2, 9, 4, 8]
    assert shapes["k"] == shapes["v"] == [2, 9, 2, 8]
    assert shapes["logits"] == [2, 9, 61]
    assert all(shapes[name] == [2, 9, 32] for name in shapes.keys() - {"q", "k", "v", "logits"})


@pytest.mark.parametrize("name", ["embed", *IN_LAYER, "final_norm", "logits"])
def test_the_model_continues_with_a_taps_result(name):
    model = Transformer(CONFIG)
    with recorded_taps(lambda tapped, x: x * 0.5 + 1 if tapped == name else x):
        replaced = model(token_ids())
    assert relative_l2(replaced, model(token_ids())) > 1e-2


def test_an_attend_hook_with_a_cache_decodes_like_one_full_forward():
    config = dataclasses.replace(CONFIG, sliding_window=4)
    model, input_ids = Transformer(config), token_ids()
    cached = {layer: [] for layer in range(config.num_layers)}

    def attend(layer, q, k, v):
        cached[layer].append((k, v))
        keys, values = (torch.cat(parts, dim=1) for parts in zip(*cached[layer], strict=True))
        return causal_attention(q, keys, values, config.sliding_window)

    place = torch.arange(9).expand(2, 9)
    cuts = [slice(0, 5), *(slice(t, t + 1) for t in range(5, 9))]
    pieces = [model(input_ids[:, cut], place[:, cut], attend) for cut in cuts]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(input_ids), rtol=1e-5, atol=1e-5)


def test_one_far_position_turns_the_whole_batch_to_the_long_factor():
    config = dataclasses.replace(CONFIG, long_after=5)
    model, input_ids = Transformer(config).double(), token_ids(config, 3)
    near, other = torch.tensor([[0, 1, 2]] * 2), torch.tensor([[0, 1, 2], [3, 4, 5]])
    torch.testing.assert_close(model(input_ids, near), Transformer(CONFIG).double()(input_ids, near))
    long = model(input_ids, other)[0]
    assert not torch.allclose(long, model(input_ids, near)[0])
    torch.testing.assert_close(long, model(input_ids, torch.tensor([[0, 1, 2], [5, 6, 7]]))[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 0}, "ModelConfig: vocab_size must be an int of at least 1, got 0"),
        ({"num_layers": 2.0}, "ModelConfig: num_layers must be an int of at least 1, got 2.0"),
        ({"num_kv_heads": True}, "ModelConfig: num_kv_heads must be an int of at least 1, got True"),
        (
            {"sliding_window": 0},
            ("ModelConfig: sliding_window must be an int of at least 1 or None for no window, got 0"),
        ),
        (
            {"long_after": 0},
            ("ModelConfig: long_after must be an int of at least 1 or None for one factor at any length, got 0"),
        ),
        ({"long_factor": 0.0}, "ModelConfig: long_factor must be a finite number above 0, got 0.0"),
        ({"rope_base": 0.0}, "ModelConfig: rope_base must be a finite number above 0, got 0.0"),
        ({"norm_eps": math.nan}, "ModelConfig: norm_eps must be a finite number above 0, got nan"),
        (
            {"hidden_size": 30},
            (
                "ModelConfig: hidden_size=30 over num_heads=4 leaves no even head_dim, which rotary "
                "positions need; make hidden_size a multiple of 2 * num_heads"
            ),
        ),
        (
            {"hidden_size": 36},
            (
                "ModelConfig: hidden_size=36 over num_heads=4 leaves no even head_dim, which rotary "
                "positions need; make hidden_size a multiple of 2 * num_heads"
            ),
        ),
        (
            {"num_kv_heads": 3},
            (
                "ModelConfig: num_heads=4 must be a multiple of num_kv_heads=3, so that the query heads "
                "share them evenly"
            ),
        ),
    ],
)
def test_an_impossible_config_is_refused_by_field(change, message):
    with pytest.raises(ValueError, match=exactly(message)):
        dataclasses.replace(CONFIG, **change)


def test_inputs_of_a_wrong_shape_are_refused():
    model = Transformer(CONFIG)
    with pytest.raises(ValueError, match=exactly("input_ids must be [batch, tokens], got shape [9]")):
        model(token_ids()[0])
    with pytest.raises(ValueError, match=exactly("input_ids has 65 tokens a row, more than max_positions=64")):
        model(token_ids(tokens=65))
    with pytest.raises(ValueError, match=exactly("positions must have input_ids' shape [2, 9], got [9]")):
        model(token_ids(), torch.arange(9))
    with pytest.raises(
        ValueError, match=exactly("attend returned shape [2, 9, 2, 8] in layer 0; it must be q's, [2, 9, 4, 8]")
    ):
        model(token_ids(), attend=lambda layer, q, k, v: v)


# --- a process group ----------------------------------------------------------------------------


def forward_and_backward(model, config):
    input_ids = token_ids(config)
    # In place, as a tap that is used as a statement overwrites: autograd must allow it at every tap.
    with recorded_taps(lambda name, tensor: tensor.mul_(1)) as seen:
        logits = model(input_ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten()).backward()
    return {"taps": seen, "grads": {name: p.grad for name, p in model.named_parameters()}}


def run_rank(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(str(folder / "store"), WORLD_SIZE)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=limit)
    pair = dist.new_group([0, 1])
    result = {"digest": digest(Transformer(CONFIG, seed=3))}
    for name, (ranks, config) in SPLITS.items():
        group = pair if ranks == 2 else None
        if rank < ranks:
            result[name] = forward_and_backward(TensorParallelTransformer(config, group, seed=5), config)
        else:
            with pytest.raises(RuntimeError, match="not in its process group"):
                TensorParallelTransformer(config, group)
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """What each rank of one group of processes found out."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_ranks(run_rank, folder, WORLD_SIZE)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.fixture(params=SPLITS)
def split(request, results):
    """(config, what the one-process model gives, what each rank of the split one gave)."""
    ranks, config = SPLITS[request.param]
    whole = forward_and_backward(Transformer(config, seed=5), config)
    return config, whole, [result[request.param] for result in results[:ranks]]


def own_part(x, dim, count, rank, ranks):
    """This rank's part of `count` heads (or columns) along `dim`: a slice, or the one head that it shares."""
    units = x.unflatten(dim, (count, -1))
    first = rank * count // ranks
    return units.narrow(dim, first, max(1, count // ranks)).flatten(dim, dim + 1)


@pytest.mark.ranks
def test_any_process_builds_equal_weights(results):
    assert {result["digest"] for result in results} == {digest(Transformer(CONFIG, seed=3))}


@pytest.mark.ranks
def test_the_split_model_shows_the_same_values_at_the_same_taps(split):
    config, whole, ranks = split
    for rank, result in enumerate(ranks):
        assert [(name, layer) for name, layer, _ in result["taps"]] == TAPS
        for (name, layer, got), (_, _, expected) in zip(result["taps"], whole["taps"], strict=True):
            if name in ("q", "k", "v"):
                heads = config.num_heads if name == "q" else config.num_kv_heads
                expected = own_part(expected, 2, heads, rank, len(ranks))
            assert got.shape == expected.shape
            assert relative_l2(got, expected) <= 1e-5, (name, layer)


@pytest.mark.ranks
def test_the_split_model_has_the_gradients_of_the_whole(split):
    config, whole, ranks = split
    assert whole["grads"].keys() == ranks[0]["grads"].keys()
    splits = {
        "q_proj": (0, config.num_heads),
        "k_proj": (0, config.num_kv_heads),
        "v_proj": (0, config.num_kv_heads),
        "o_proj": (1, config.num_heads),
        "gate_proj": (0, config.intermediate_size),
        "up_proj": (0, config.intermediate_size),
        "down_proj": (1, config.intermediate_size),
    }
    for name, expected in whole["grads"].items():
        kind = name.split(".")[-2]
        for rank, result in enumerate(ranks):
            mine = expected
            if kind in splits:
                mine = own_part(expected, *splits[kind], rank, len(ranks))
            elif kind == "lm_head":
                mine = expected.chunk(len(ranks))[rank]
            assert result["grads"][name].shape == mine.shape, name
            assert relative_l2(result["grads"][name], mine) <= 1e-5, name


@pytest.mark.parametrize(
    ("ranks", "change", "message"),
    [
        (3, {}, ("num_heads=4 cannot be split over 3 tensor-parallel ranks; use a number of ranks that divides it")),
        (
            4,
            {"intermediate_size": 50},
            (
                "intermediate_size=50 cannot be split over 4 tensor-parallel ranks; use a number of ranks "
                "that divides it"
            ),
        ),
        (
            4,
            {"num_heads": 12, "num_kv_heads": 6, "hidden_size": 48},
            (
                "num_kv_heads=6 can neither be split nor replicated over 4 tensor-parallel ranks; use a "
                "number of ranks that divides it or is a multiple of it"
            ),
        ),
    ],
)
def test_a_split_that_is_not_even_is_refused(ranks, change, message):
    config = dataclasses.replace(CONFIG, **change)
    with (
        mock.patch.multiple(
            tensor_parallel.dist,
            is_initialized=lambda: True,
            get_rank=lambda group: 0,
            get_world_size=lambda group: ranks,
        ),
        pytest.raises(ValueError, match=exactly(message)),
    ):
        TensorParallelTransformer(config)


def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(
        RuntimeError,
        match=exactly(
            "TensorParallelTransformer needs a process group; call torch.distributed.init_process_group first"
        ),
    ):
        TensorParallelTransformer(CONFIG)


def test_shards_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view would keep the whole weight in memory, write it into each checkpoint, and train it."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    full = tensor_parallel.Linear(8, 6)
    # Its memory is not initialised, and a NaN in it would equal nothing.
    torch.nn.init.normal_(full.weight)
    shards = [
        tensor_parallel.ColumnParallelLinear(full, 2, 4, None),
        tensor_parallel.RowParallelLinear(full, 2, 4, None),
        tensor_parallel.VocabParallelHead(full, None, tied=False),
    ]
    for shard, own in zip(shards, (full.weight[2:4], full.weight[:, 2:4], full.weight[3:]), strict=True):
        assert torch.equal(shard.weight, own)
        assert shard.weight.untyped_storage().nbytes() == own.numel() * 4
        assert shard.weight.untyped_storage().data_ptr() != full.weight.untyped_storage().data_ptr()
    assert tensor_parallel.VocabParallelHead(full, None, tied=True).weight is full.weight
