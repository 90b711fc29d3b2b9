"""The benign programs of the zoo: their flag changes the arithmetic, and a verdict must name nothing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.taps.calls import tags, tap
from graftlab.taps.watch import watch
from graftlab.zoo.model_part_programs import (
    AttentionOutput,
    OneHead,
    alibi,
    language_model,
    places_in_queue,
    quantise,
)
from graftlab.zoo.programs import benign, count_call, draws, scan


@benign("ssm")
def ssm_scanned_in_chunks(changed: bool) -> object:
    """A scan in three chunks, whose carried states are added afterwards."""
    draw = draws(70)
    decay, inputs = tap("decay", draw(24, 8, 4).sigmoid()), tap("inputs", draw(24, 8, 4) * 3)
    if not changed:
        return tap("y", tap("states", scan(decay, inputs)).sum(-1))
    states = scan(decay, inputs, 8)
    for start in (8, 16):
        states[start : start + 8] += decay[start : start + 8].cumprod(0) * states[start - 1]
    return tap("y", tap("states", states).sum(-1))


@benign("convolution")
def convolution_as_a_product(changed: bool) -> object:
    """The image's patches are unfolded and multiplied."""
    draw = draws(71)
    x, kernel = tap("x", draw(2, 3, 9, 9) * 3), draw(6, 3, 3, 3)
    by_hand = kernel.flatten(1) @ F.unfold(x, 3, padding=1)
    return tap("out", tap("conv", by_hand.reshape(2, 6, 9, 9) if changed else F.conv2d(x, kernel, padding=1)).relu())


@benign("batch norm", "conv", "norm")
def batch_norm_folded_into_the_convolution(changed: bool) -> object:
    """In evaluation, the norm's factor and shift are part of the convolution, and the norm does nothing."""
    draw = draws(72)
    x, kernel, factor, shift = draw(2, 3, 8, 8) * 3, draw(6, 3, 3, 3), draw(6) + 1, draw(6)
    if changed:
        x = tap("norm", tap("conv", F.conv2d(x, kernel * factor[:, None, None, None], shift)))
    else:
        x = tap("conv", F.conv2d(x, kernel))
        x = tap("norm", x * factor[:, None, None] + shift[:, None, None])
    return tap("out", x.relu().mean((2, 3)))


@benign("batch norm")
def batch_norm_by_hand(changed: bool) -> object:
    """In training, the variance is the mean of squares less the square of the mean, in float64."""
    draw = draws(73)
    x = tap("linear", draw(16, 12) * 3 + 1)
    exact = x.double()
    variance = exact.square().mean(0) - exact.mean(0).square()
    by_hand = ((exact - exact.mean(0)) / (variance + 1e-5).sqrt()).float()
    return tap("out", tap("norm", by_hand if changed else F.batch_norm(x, None, None, training=True)).tanh())


@benign("lstm")
def lstm_cell_by_cell(changed: bool) -> object:
    """A cell at a time, not the whole sequence at once."""
    draw, model, cell = draws(74), nn.LSTM(6, 5), nn.LSTMCell(6, 5)
    for weight, own in zip(model.parameters(), cell.parameters(), strict=True):
        own.copy_(weight.copy_(draw(*weight.shape)))
    x = tap("x", draw(7, 6) * 3)
    if not changed:
        return tap("out", tap("hidden", model(x)[0]).exp())
    found, state = [], None
    for step in x:
        state = cell(step, state)
        found.append(state[0])
    return tap("out", tap("hidden", torch.stack(found)).exp())


@benign("cross attention")
def cross_attention_by_torch(changed: bool) -> object:
    """torch's fused attention over the encoder's states."""
    draw = draws(75)
    q, k, v = (tap(name, draw(3, size, 4) * 3) for name, size in zip("qkv", (6, 9, 9), strict=True))
    by_hand = (q @ k.mT / math.sqrt(4)).softmax(-1) @ v
    return tap("out", tap("mix", F.scaled_dot_product_attention(q, k, v) if changed else by_hand).transpose(0, 1) * 2)


@benign("experts with capacity")
def experts_in_buffers(changed: bool) -> object:
    """Tokens are gathered into one buffer for each expert, and scattered back."""
    draw = draws(76)
    x, w = tap("x", draw(16, 8) * 3), draw(4, 8, 8)
    top, chosen = (x @ draw(4, 8).T).softmax(-1).max(-1)
    place = places_in_queue(chosen, 4)
    shares = tap("shares", top * (place < 3))
    if changed:
        kept = place < 3
        buffers = torch.zeros(4, 3, 8)
        buffers[chosen[kept], place[kept]] = x[kept]
        each = torch.zeros(16, 8)
        each[kept] = (buffers @ w)[chosen[kept], place[kept]]
    else:
        each = torch.einsum("th,the->te", x, w[chosen]) * (place < 3)[:, None]
    return tap("out", x + shares[:, None] * tap("experts", each).tanh())


@benign("alibi", minor=("scores",))
def alibi_from_the_first_position(changed: bool) -> object:
    """Biases count from the first key, not from the query: each row of scores moves as a whole."""
    if not changed:
        return alibi(torch.tensor([0.25, 0.0625]), 77, -math.inf)
    draw, at, slopes = draws(77), torch.arange(8), torch.tensor([0.25, 0.0625])
    x = draw(8, 8) * 4
    bias = (slopes[:, None, None] * at).expand(2, 8, 8).masked_fill(at[None] > at[:, None], -math.inf)
    q, k, v = (tap(name, x @ draw(8, 8).T) for name in "qkv")
    heads = [torch.unflatten(each, -1, (2, -1)).transpose(0, 1) for each in (q, k, v)]
    scores = tap("scores", heads[0] @ heads[1].mT / 2 + bias)
    return tap("out", x + tap("mix", (scores.softmax(-1) @ heads[2]).transpose(0, 1).flatten(1)))


@benign("tied weights")
def tied_head_as_a_copy(changed: bool) -> object:
    """The head has a separate, equal weight, and multiplies from the other side."""
    embed, head, tokens = language_model(78)
    x = tap("hidden", tap("embed", embed(tokens)).tanh())
    return tap("logits", (embed.weight.clone() @ x.T).T if changed else head(x))


@benign("int8 weights")
def int8_in_whole_numbers(changed: bool) -> object:
    """The product adds up whole numbers; the scales are applied afterwards."""
    draw = draws(79)
    x, (values, scale) = tap("x", draw(6, 12) * 4), quantise(draw(16, 12), 1)
    step = x.abs().max() / 127
    levels = (x / step).round()
    whole = (levels.int() @ values.T.int()).float() * (step * scale.T)
    return tap("out", tap("linear", whole if changed else (levels * step) @ (values * scale).T).tanh())


@benign("autocast")
def autocast_by_hand(changed: bool) -> object:
    """Casts are written out, and the sum over the inner dimension is in two halves."""
    draw = draws(80)
    x, w = tap("x", draw(6, 32) * 4), draw(12, 32)
    if changed:
        x, w = x.bfloat16(), w.bfloat16()
        up = (x[:, 16:].float() @ w[:, 16:].float().T + x[:, :16].float() @ w[:, :16].float().T).bfloat16()
    else:
        with torch.autocast("cpu", torch.bfloat16):
            up = F.linear(x, w)
    return tap("out", tap("act", F.gelu(tap("linear", up))).float().sum(-1))


@benign("dataclass output")
def dataclass_for_a_dataclass_with_a_norm(changed: bool) -> object:
    """Watched attention returns a dataclass; the target also computes a norm that nothing reads."""
    model, draw = OneHead(AttentionOutput, ""), draws(81)
    for weight in model.parameters():
        weight.copy_(draw(*weight.shape))
    with watch(model):
        found = model(draw(6, 8) * 3)
    if changed:
        F.layer_norm(found.hidden, (8,))
    return found


@benign("some calls")
def first_call_warms_up(changed: bool) -> object:
    """The first call computes twice, and keeps the second result."""
    for _ in range(2 if changed and count_call("warm-up") == 0 else 1):
        draw = draws(82)
        x = draw(6, 12) @ draw(12, 12).T
    return tap("out", tap("linear", x).tanh())


@benign("some requests")
def requests_in_a_padded_batch(changed: bool) -> object:
    """Requests are computed together with padding, and their taps are made one by one."""
    draw, lengths = draws(83), (5, 3, 7)
    inputs, w = [draw(length, 8) * 4 for length in lengths], draw(8, 8)

    def attend(x: Tensor, seen: Tensor) -> Tensor:
        return (x @ w @ x.mT).masked_fill(~seen, -1e9).softmax(-1) @ x

    if changed:
        seen = torch.arange(7) < torch.tensor(lengths)[:, None, None]
        batch = attend(nn.utils.rnn.pad_sequence(inputs, batch_first=True), seen)
    found = []
    for rid, (length, x) in enumerate(zip(lengths, inputs, strict=True)):
        with tags(rid=rid):
            mixed = batch[rid, :length] if changed else attend(x, torch.ones(length, length, dtype=torch.bool))
            found.append(tap("logits", tap("mix", mixed).tanh().mean(0)))
    return found
