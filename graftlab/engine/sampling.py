"""The next token of each request: the likeliest, or one drawn by the request's own seed."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlab.engine.batch import SamplingBatchInfo


def sample(logits: Tensor, info: SamplingBatchInfo) -> Tensor:
    """Token ids ``[B]`` (int64) from logits ``[B, V]``.

    A draw is the argmax of ``logits / temperature`` plus Gumbel noise, which draws from their softmax (Gumbel 1954).
    The noise depends only on seed, position and token, so neither the rest of the batch nor its order matters.
    """
    greedy = logits.argmax(dim=-1)
    if info.all_greedy:
        return greedy
    # In float64 no temperature above 0 can make a logit overflow.
    exact = logits.double()
    # All that tie with the last of the top k stay in.
    likely = exact.sort(dim=-1, descending=True).values
    least = likely.gather(1, (info.top_ks.clamp(max=exact.shape[1]) - 1)[:, None])
    draws = info.temperatures > 0
    scaled = exact / torch.where(draws, info.temperatures, 1).double()[:, None]
    noisy = scaled + gumbel_noise(info.seeds, info.positions, exact.shape[1])
    return torch.where(draws, noisy.masked_fill(exact < least, -torch.inf).argmax(dim=-1), greedy)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """``[B, V]`` float64: independent Gumbel noise for each of the V tokens at each request's position.

    A hash and not a generator: the same on every device, and it works inside a captured graph.
    """
    tokens = torch.arange(vocab_size, device=seeds.device)
    key = _mix(_mix(seeds) + positions)[:, None]
    # 52 bits and a half: both 0 and 1 stay out, where the logarithms have no value.
    uniform = ((_mix(key + tokens) & (2**52 - 1)).double() + 0.5) / 2**52
    noise: Tensor = -(-uniform.log()).log()
    return noise


def _mix(x: Tensor) -> Tensor:
    """One output of SplitMix64 (Steele, Lea and Flood 2014) for each int64, whose overflow wraps as the unsigned's."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right with zeros from the left, because int64 would repeat its sign."""
    shifted: Tensor = (x >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned
