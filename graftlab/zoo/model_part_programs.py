"""More programs of the zoo: attention, experts, tied and quantised weights, autocast, outputs that are structures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.taps.calls import tap
from graftlab.taps.watch import watch
from graftlab.zoo.programs import draws, fault, watched

# ---- attention ------------------------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, heads: int) -> Tensor:
    """Attention over [time, channels], whose scores are tapped with their bias."""
    q, k, v = (torch.unflatten(x, -1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    scores = tap("scores", q @ k.mT / math.sqrt(q.shape[-1]) + bias)
    return tap("mix", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))


@fault("cross attention", "k", "v")
def cross_attention_over_its_own_states(wrong: bool) -> object:
    """Keys and values are projected from the decoder's states, not from the encoder's."""
    draw = draws(20)
    x, encoded = tap("x", draw(6, 12) * 4), tap("encoded", draw(6, 12) * 4)
    q, source = tap("q", x @ draw(12, 12).T), x if wrong else encoded
    k, v = tap("k", source @ draw(12, 12).T), tap("v", source @ draw(12, 12).T)
    return tap("out", x + attend(q, k, v, 0.0, 3) @ draw(12, 12).T)


@fault("cross attention", "scores")
def cross_attention_with_a_causal_mask(wrong: bool) -> object:
    """The decoder's causal mask is used for the encoder's keys too."""
    draw = draws(21)
    x, encoded = draw(6, 12) * 4, draw(9, 12) * 4
    q, k, v = tap("q", x @ draw(12, 12).T), tap("k", encoded @ draw(12, 12).T), tap("v", encoded @ draw(12, 12).T)
    bias = torch.full((6, 9), torch.finfo(x.dtype).min / 2).triu(1) if wrong else 0.0
    return tap("out", x + attend(q, k, v, bias, 3) @ draw(12, 12).T)


@fault("cross attention", "scores")
def cross_attention_to_padding(wrong: bool) -> object:
    """The encoder's last two positions are padding, and are not masked."""
    draw = draws(22)
    x, encoded = draw(6, 12) * 4, draw(9, 12) * 4
    q, k, v = tap("q", x @ draw(12, 12).T), tap("k", encoded @ draw(12, 12).T), tap("v", encoded @ draw(12, 12).T)
    bias = torch.zeros(9).index_fill(0, torch.tensor([7, 8]), 0.0 if wrong else -1e9)
    return tap("out", x + attend(q, k, v, bias, 3) @ draw(12, 12).T)


def buckets(distance: Tensor, is_both_ways: bool) -> Tensor:
    """T5's buckets of relative positions: four exact ones, and four whose width grows."""
    half = 4 if is_both_ways else 0
    first = (distance > 0) * half
    far = distance.abs() if is_both_ways else (-distance).clamp(min=0)
    grown = 2 + (far.clamp(min=1) / 2).log2().floor().long()
    return first + torch.where(far < 2, far, grown.clamp(max=3 if is_both_ways else 7))


@fault("relative bias", "bias")
def relative_bias_with_one_way_buckets(wrong: bool) -> object:
    """An encoder's buckets are those of a decoder."""
    draw = draws(23)
    x, table = draw(10, 12) * 4, draw(8, 3) * 3
    at = torch.arange(10)
    bias = tap("bias", table[buckets(at[None] - at[:, None], not wrong)].movedim(-1, 0))
    mixed = attend(x @ draw(12, 12).T, x @ draw(12, 12).T, x @ draw(12, 12).T, bias, 3)
    return tap("out", x + mixed)


@fault("relative bias", "layers.*.scores")
def relative_bias_in_the_first_layer_alone(wrong: bool) -> object:
    """Later layers should reuse the first one's bias, and have none."""
    draw = draws(24)
    x, bias = draw(8, 12) * 4, draw(8, 8) * 5
    for i in range(3):
        q, k, v = (tap(f"layers.{i}.{name}", x @ draw(12, 12).T) for name in "qkv")
        scores = q @ k.T / math.sqrt(12)
        scores = tap(f"layers.{i}.scores", scores if wrong and i else scores + bias)
        x = tap(f"layers.{i}.out", F.layer_norm(x + scores.softmax(-1) @ v, (12,)))
    return x


def alibi(slopes: Tensor, draw_seed: int, masked: float) -> object:
    """Causal attention with linear biases of these slopes, one for each head, and ``masked`` for later keys."""
    draw, heads = draws(draw_seed), len(slopes)
    x, at = draw(8, 4 * heads) * 4, torch.arange(8)
    bias = slopes[:, None, None] * (at[None] - at[:, None])
    bias = bias.masked_fill(at[None] > at[:, None], masked)
    q, k, v = (tap(name, x @ draw(4 * heads, 4 * heads).T) for name in "qkv")
    return tap("out", x + attend(q, k, v, bias, heads))


@fault("alibi", "scores")
def alibi_slopes_of_six_heads(wrong: bool) -> object:
    """Six is not a power of two: two slopes come from between those of four heads, not from a series of six."""
    four = [2.0**-i for i in (2, 4, 6, 8)]
    slopes = [2.0 ** (-8 * i / 6) for i in range(1, 7)] if wrong else [*four, 2.0**-1, 2.0**-3]
    return alibi(torch.tensor(slopes), 25, -math.inf)


@fault("alibi", "scores")
def alibi_slopes_of_one_rank_for_all_heads(wrong: bool) -> object:
    """The second half of the heads has the slopes of the first half."""
    slopes = torch.tensor([2.0**-i for i in (2, 4, 6, 8)])
    return alibi(slopes[:2].repeat(2) if wrong else slopes, 26, -1e9)


# ---- experts --------------------------------------------------------------------------------------------------------


def places_in_queue(chosen: Tensor, experts: int) -> Tensor:
    """How many earlier tokens chose the same expert, for each token's choice."""
    hot = F.one_hot(chosen, experts)
    return ((hot.cumsum(0) - 1) * hot).sum(-1)


@fault("experts with capacity", "shares")
def experts_take_one_token_too_many(wrong: bool) -> object:
    """The capacity of three is compared with <= rather than <."""
    draw = draws(27)
    x = tap("x", draw(16, 8) * 3)
    top, chosen = (x @ draw(4, 8).T).softmax(-1).max(-1)
    shares = tap("shares", top * (places_in_queue(chosen, 4) < (4 if wrong else 3)))
    each = tap("experts", torch.einsum("th,the->te", x, draw(4, 8, 8)[chosen]).tanh())
    return tap("out", x + shares[:, None] * each)


@fault("experts with capacity", "out")
def experts_drop_the_residual_too(wrong: bool) -> object:
    """A token over the capacity loses its residual stream."""
    draw = draws(28)
    x = tap("x", draw(16, 8) * 3)
    top, chosen = (x @ draw(4, 8).T).softmax(-1).max(-1)
    kept = places_in_queue(chosen, 4) < 3
    shares = tap("shares", top * kept)
    each = tap("experts", torch.einsum("th,the->te", x, draw(4, 8, 8)[chosen]).tanh())
    x = tap("out", (x * kept[:, None] if wrong else x) + shares[:, None] * each)
    return tap("logits", x @ draw(5, 8).T)


@fault("experts with capacity", "shares")
def experts_normalise_before_they_drop(wrong: bool) -> object:
    """The shares of a token's two experts are normalised before one of them drops it, not after."""
    draw = draws(29)
    x = tap("x", draw(16, 8) * 3)
    top, chosen = (x @ draw(4, 8).T).softmax(-1).topk(2)
    kept = (places_in_queue(chosen.flatten(), 4) < 6).reshape(16, 2) * top
    whole = top if wrong else kept
    shares = tap("shares", kept / whole.sum(-1, keepdim=True).clamp(min=1e-9))
    each = tap("experts", torch.einsum("th,tkhe->tke", x, draw(4, 8, 8)[chosen]).tanh())
    return tap("out", x + (shares[..., None] * each).sum(1))


# ---- tied and quantised weights -------------------------------------------------------------------------------------


def language_model(draw_seed: int) -> tuple[nn.Embedding, nn.Linear, Tensor]:
    """An embedding, a head that shares its weight, and tokens."""
    draw, embed, head = draws(draw_seed), nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    embed.weight.copy_(draw(11, 8) * 3)
    head.weight = embed.weight
    return embed, head, torch.randint(0, 11, (12,), generator=torch.Generator().manual_seed(draw_seed))


@fault("tied weights", "logits")
def tied_head_keeps_the_weight_of_before(wrong: bool) -> object:
    """Fine-tuned weights are loaded into the embedding; an untied head keeps the earlier ones."""
    embed, head, tokens = language_model(30)
    if wrong:
        head.weight = nn.Parameter(embed.weight.clone())
    embed.weight.add_(0.1 * draws(31)(11, 8))
    return tap("logits", head(tap("hidden", tap("embed", embed(tokens)).tanh())))


@fault("tied weights", "embed")
def tied_embedding_scaled_twice(wrong: bool) -> object:
    """The embedding's factor of sqrt(8) is applied twice."""
    embed, head, tokens = language_model(32)
    x = tap("embed", embed(tokens) * math.sqrt(8) * (math.sqrt(8) if wrong else 1.0))
    return tap("logits", head(tap("hidden", x.tanh())))


def quantise(weight: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """int8 values, and the scale of each row (``dim`` 1), of each column (0), or of all."""
    scale = (weight.abs().amax() if dim is None else weight.abs().amax(dim, keepdim=True)) / 127
    return (weight / scale).round().to(torch.int8), scale


@fault("int8 weights", "layers.*.up")
def int8_scale_of_the_whole_tensor(wrong: bool) -> object:
    """One layer has one scale for its weight instead of one for each row."""
    draw = draws(33)
    x = draw(6, 12) * 4
    for i in range(3):
        rows = torch.linspace(0.1, 2, 24)[:, None]
        values, scale = quantise(draw(24, 12) * rows, None if wrong and i == 1 else 1)
        up = tap(f"layers.{i}.up", x @ (values * scale).T)
        x = tap(f"layers.{i}.out", F.layer_norm(x + up.relu() @ draw(12, 24).T, (12,)))
    return x


@fault("int8 weights", "down")
def int8_zero_point_ignored(wrong: bool) -> object:
    """Activations are quantised to uint8 with a zero point that the product's correction leaves out."""
    draw = draws(34)
    x = tap("up", draw(6, 12) * 4 @ draw(16, 12).T)
    step, (values, scale) = (x.max() - x.min()) / 255, quantise(draw(12, 16), 1)
    zero = (-x.min() / step).round()
    levels = (x / step + zero).round().clamp(0, 255)
    products = (levels - (0 if wrong else zero)) @ values.float().T
    return tap("out", tap("down", products * step * scale.T).tanh())


# ---- autocast -------------------------------------------------------------------------------------------------------


@fault("autocast", "linear")
def autocast_keeps_a_stale_copy(wrong: bool) -> object:
    """A weight is updated inside of one autocast block, which keeps using its bfloat16 copy of the earlier weight."""
    draw, layer = draws(35), nn.Linear(12, 12)
    layer.weight.copy_(draw(12, 12))
    layer.bias.zero_()
    x, update = draw(6, 12) * 4, draw(12, 12)
    with torch.enable_grad():
        for _ in range(1 if wrong else 2):
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(2 if wrong else 1):
                    x = tap("out", tap("linear", layer(x)).float().tanh())
                    with torch.no_grad():
                        layer.weight.add_(update)
    return x.detach()


@fault("autocast", "layers.*.act")
def autocast_with_another_activation(wrong: bool) -> object:
    """The target's activation is a sigmoid's, in bfloat16 as the layers around it."""
    draw = draws(36)
    x = draw(6, 12) * 4
    with torch.autocast("cpu", torch.bfloat16):
        for i in range(2):
            up = tap(f"layers.{i}.up", F.linear(x, draw(24, 12)))
            act = tap(f"layers.{i}.act", up * up.sigmoid() if wrong else F.gelu(up))
            x = tap(f"layers.{i}.out", x + F.linear(act, draw(12, 24)))
    return x


# ---- outputs that are structures ------------------------------------------------------------------------------------


@dataclass
class AttentionOutput:
    """What a watched module returns."""

    hidden: Tensor
    weights: Tensor
    lengths: tuple[int, ...] = ()


class OneHead(nn.Module):
    """One head over [time, channels]; returns a dataclass or a tuple, with the fault named ``wrong``."""

    def __init__(self, returns: type, wrong: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.returns, self.wrong = returns, wrong

    def forward(self, x: Tensor) -> AttentionOutput | tuple[Tensor, Tensor]:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.T / math.sqrt(8)
        weights = (scores * 1.1 if self.wrong == "scale" else scores).softmax(-1)
        hidden = self.out(weights @ v)
        if self.wrong == "logarithm":
            weights = weights.log()
        return AttentionOutput(hidden, weights) if self.returns is AttentionOutput else (hidden, weights)


@fault("dataclass output", "output.weights")
def dataclass_with_logarithms_of_its_weights(wrong: bool) -> object:
    """One field holds the logarithms of what it should; nothing reads it."""
    found = watched(OneHead(AttentionOutput, "logarithm" if wrong else ""), draws(37)(6, 8) * 3, 37)
    assert isinstance(found, AttentionOutput)
    return found.hidden


@fault("tuple output", "attention.out", "attention[1]")
def tuple_of_attention_with_another_scale(wrong: bool) -> object:
    """The scale is wrong: of the watched modules' outputs, the weights and the output projection depend on it."""
    model = nn.Module()
    model.attention, model.head = OneHead(tuple, "scale" if wrong else ""), nn.Linear(8, 5)
    draw = draws(38)
    for weight in model.parameters():
        weight.copy_(draw(*weight.shape) if weight.ndim == 2 else torch.zeros(weight.shape))
    with watch(model):
        hidden, _ = model.attention(draw(6, 8) * 3)
        return tap("logits", model.head(hidden))
