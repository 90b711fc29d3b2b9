"""More programs of the zoo: faults outside every tap, in some calls, and in some requests."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.taps.calls import tags, tap
from graftlab.zoo.programs import count_call, draws, fault

AFTER = "after the last tap"
SOMETIMES = ("does not repeat itself", "no tapped value explains it")


def hidden_states(seed: int) -> Tensor:
    """Two tapped layers over [position, channels]."""
    draw = draws(seed)
    x = draw(6, 12) * 4
    for i in range(2):
        x = tap(f"layers.{i}.out", x + (x @ draw(12, 12).T).tanh())
    return x


# ---- after the last tap ---------------------------------------------------------------------------------------------


@fault("after the last tap", says=(AFTER,))
def temperature_after_the_last_tap(wrong: bool) -> object:
    """The returned probabilities have another temperature."""
    return (hidden_states(40) / (0.9 if wrong else 1.0)).softmax(-1)


@fault("after the last tap", says=(AFTER,))
def pooling_of_another_token(wrong: bool) -> object:
    """A sentence embedding is the last token's, not the first one's."""
    return F.normalize(hidden_states(41)[-1 if wrong else 0], dim=-1)


@fault("after the last tap", says=(AFTER,))
def loss_over_padding(wrong: bool) -> object:
    """The returned loss includes the padded targets; the logits beside it are right."""
    logits, targets = hidden_states(42), torch.tensor([3, 1, 4, 1, 0, 0])
    return {"logits": logits, "loss": F.cross_entropy(logits, targets, ignore_index=-100 if wrong else 0)}


@fault("after the last tap", says=(AFTER,))
def outputs_swapped_in_a_tuple(wrong: bool) -> object:
    """Mean and deviation are returned in the other order."""
    mean, deviation = hidden_states(43).reshape(6, 2, 6).unbind(1)
    return (deviation, mean) if wrong else (mean, deviation)


@dataclass
class ModelOutput:
    """What a model returns."""

    logits: Tensor
    balance: Tensor | None = None


@fault("after the last tap", says=(AFTER,))
def balancing_loss_in_a_dataclass(wrong: bool) -> object:
    """A field of the returned dataclass is a mean where it should be a sum."""
    x = hidden_states(44)
    squares = x.softmax(-1).mean(0).square()
    return ModelOutput(x, squares.mean() if wrong else squares.sum())


@fault("after the last tap", says=(AFTER,))
def greedy_tokens_of_a_smaller_vocabulary(wrong: bool) -> object:
    """Greedy decoding leaves out the last part of the vocabulary; whole numbers are returned."""
    return hidden_states(45)[:, : 4 if wrong else None].argmax(-1)


@fault("after the last tap", says=(AFTER,))
def metric_as_a_number(wrong: bool) -> object:
    """The function returns a perplexity as a Python number, with the logarithm's base mistaken."""
    loss = F.cross_entropy(hidden_states(46), torch.arange(6)).item()
    return {"perplexity": 2**loss if wrong else math.exp(loss)}


@fault("after the last tap", says=(AFTER,))
def results_in_the_order_of_length(wrong: bool) -> object:
    """Requests are sorted by length for batching, and returned in that order."""
    lengths, found = [5, 2, 4], []
    x = hidden_states(47)
    for rid in sorted(range(3), key=lambda i: lengths[i]) if wrong else range(3):
        found.append(x[: lengths[rid]].mean(0))
    return torch.stack(found)


@fault("no tap on both sides", says=("was not compared",))
def head_under_another_name(wrong: bool) -> object:
    """The head is wrong, has another name on the target, and nothing is returned."""
    x = hidden_states(48)
    tap("lm_head" if wrong else "head", x @ draws(49)(5, 12).T * (1.5 if wrong else 1.0))
    return None


@fault("no tap on both sides", says=("no tap was measured on both sides", "no tapped value explains it"))
def nothing_tapped_but_an_input(wrong: bool) -> object:
    """The only tap shows the tokens; the model's output is returned."""
    draw, tokens = draws(50), tap("tokens", torch.tensor([3, 1, 2]))
    x = draw(5, 8)[tokens]
    return x.sigmoid() if wrong else x.tanh()


@fault("between taps", "layers.*.out")
def residual_overwritten_after_its_tap(wrong: bool) -> object:
    """One layer's norm works in place on the residual stream, whose tap has shown it already."""
    draw = draws(51)
    x = tap("embed", draw(6, 12) * 4)
    for i in range(3):
        h = x.sub_(x.mean(-1, keepdim=True)) if wrong and i == 1 else x - x.mean(-1, keepdim=True)
        x = tap(f"layers.{i}.out", x + (h @ draw(12, 12).T).tanh())
    return x


# ---- in some calls --------------------------------------------------------------------------------------------------


def layers_with_one_scaled(seed: int, factor: float) -> Tensor:
    """Three tapped layers, one of them multiplied by ``factor``."""
    draw = draws(seed)
    x = draw(6, 12) * 4
    for i in range(3):
        act = tap(f"layers.{i}.act", (x @ draw(12, 12).T).tanh() * (factor if i == 1 else 1.0))
        x = tap(f"layers.{i}.out", x + act)
    return x


@fault("some calls", says=SOMETIMES)
def first_call_before_its_scale_is_loaded(wrong: bool) -> object:
    """A scale is loaded lazily, after the first call has used the default."""
    return layers_with_one_scaled(52, 1.2 if wrong and count_call("lazy scale") == 0 else 1.0)


@fault("some calls", says=SOMETIMES)
def first_call_returns_the_warm_up(wrong: bool) -> object:
    """A captured graph's first call returns its warm-up's buffer, after the last tap."""
    x = hidden_states(53)
    return torch.zeros_like(x) if wrong and count_call("captured") == 0 else x


@fault("some calls", says=SOMETIMES)
def every_second_buffer_is_stale(wrong: bool) -> object:
    """One of two alternating buffers is not refreshed."""
    return layers_with_one_scaled(54, 1.3 if wrong and count_call("buffers") % 2 == 0 else 1.0)


@fault("some calls", says=SOMETIMES)
def every_third_call_tunes_its_kernel(wrong: bool) -> object:
    """An autotuner tries a wrong kernel in one of three calls."""
    return layers_with_one_scaled(55, 0.7 if wrong and count_call("tuning") % 3 == 2 else 1.0)


@fault("some calls", "norm", says=SOMETIMES)
def statistics_carried_from_call_to_call(wrong: bool) -> object:
    """Each call moves a running mean that the next one subtracts."""
    draw, calls = draws(56), count_call("statistics")
    x = tap("linear", draw(6, 12) * 4 + 1)
    carried = x.mean(0) * (1 - 0.9**calls) if wrong else 0.0
    return tap("out", tap("norm", x - carried).tanh())


@fault("some calls", "dropped", says=("does not repeat itself",))
def dropout_left_on(wrong: bool) -> object:
    """The target is in training mode, and its random numbers are not seeded."""
    x = hidden_states(57)
    return tap("out", tap("dropped", F.dropout(x, 0.2, training=wrong)) @ draws(58)(5, 12).T)


# ---- in some requests -----------------------------------------------------------------------------------------------


def serve(seed: int, wrong: str) -> object:
    """Attention over five requests of unlike lengths, whose taps carry the request's id; the fault is ``wrong``."""
    draw = draws(seed)
    w_q, w_k, w_v, head, found = draw(8, 8), draw(8, 8), draw(8, 8), draw(5, 8), []
    cache: dict[int, Tensor] = {}
    for rid, length in enumerate((7, 16, 9, 32, 12)):
        x = draw(length, 8) * 4
        with tags(rid=rid):
            q, k, v = tap("q", x @ w_q.T), tap("k", x @ w_k.T), tap("v", x @ w_v.T)
            slot = rid % 2
            if wrong == "cache" and rid == 2:
                v = torch.cat([cache[slot][:3], v[3:]])
            cache[slot] = v
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            if wrong == "blocks" and length % 16 == 0:
                seen[:, -1] = False
            if wrong == "window" and length > 10:
                seen &= torch.ones(length, length, dtype=torch.bool).triu(-9)
            scores = (q @ k.T / math.sqrt(8)).masked_fill(~seen, -math.inf)
            mixed = tap("mix", scores.softmax(-1) @ v)
            rows = mixed * 1.5 if wrong == "rows" and rid == 3 else mixed
            found.append(tap("logits", rows @ head.T))
    return found


@fault("some requests", "mix")
def last_key_lost_in_whole_blocks(wrong: bool) -> object:
    """Requests whose length is a multiple of 16 do not see their last key."""
    return serve(60, "blocks" if wrong else "")


@fault("some requests", "mix")
def window_over_long_requests(wrong: bool) -> object:
    """Requests of more than ten tokens see a window of ten."""
    return serve(61, "window" if wrong else "")


@fault("some requests", "mix")
def cache_of_an_earlier_request(wrong: bool) -> object:
    """One request finds an earlier request's values in its slot of the cache, which no tap shows."""
    return serve(62, "cache" if wrong else "")


@fault("some requests", "logits")
def adapter_on_one_request(wrong: bool) -> object:
    """One request of five is served with a different adapter before the head."""
    return serve(63, "rows" if wrong else "")
