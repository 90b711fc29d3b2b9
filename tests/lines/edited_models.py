# mypy: disable-error-code="no-any-return,index,operator"
"""Small models whose source a test edits, to plant a mistake in a line: parts that other tests' models lack."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graftlab as gl


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim) * 0.2 + 1)

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        normed = x * torch.rsqrt(variance + 1e-6)
        return normed * self.weight


class Scan(nn.Module):
    """A selective scan."""

    def __init__(self, dim: int = 16, state: int = 4) -> None:
        super().__init__()
        self.norm = Norm(dim)
        self.into = nn.Linear(dim, 2 * dim)
        self.parts = nn.Linear(dim, 2 * state + dim)
        self.log_a = nn.Parameter(torch.randn(dim, state) * 0.3)
        self.skip = nn.Parameter(torch.randn(dim))
        self.out = nn.Linear(dim, dim)
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, dim=-1)
        u = F.silu(u)
        b, c, dt = self.parts(u).split([self.state, self.state, u.shape[-1]], dim=-1)
        dt = F.softplus(dt)
        decay = torch.exp(-dt.unsqueeze(-1) * torch.exp(self.log_a))
        driven = dt.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h = torch.zeros(x.shape[0], u.shape[-1], self.state)
        ys = []
        for t in range(x.shape[1]):
            h = decay[:, t] * h + driven[:, t]
            y = (h * c[:, t].unsqueeze(1)).sum(-1)
            ys.append(y)
        y = torch.stack(ys, dim=1)
        y = y + self.skip * u
        y = y * F.silu(gate)
        return x + self.out(y)


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """A mixture of experts, two for each token."""

    def __init__(self, dim: int = 16, number: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(dim, number)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(number))
        self.shared = Expert(dim)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.router(flat).softmax(dim=-1)
        weights, chosen = scores.topk(2, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, which = torch.where(chosen == number)
            got = expert(flat[token])
            got = got * weights[token, which].unsqueeze(-1)
            out.index_add_(0, token, got)
        out = out + self.shared(flat)
        return x + out.view_as(x)


def turned(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def angles(length: int, dim: int, base: float = 10000.0, offset: int = 0) -> Tensor:
    inverse = base ** (-torch.arange(0, dim, 2).float() / dim)
    positions = torch.arange(offset, offset + length).float()
    return torch.outer(positions, inverse).repeat(1, 2)


class Rotary(nn.Module):
    """Attention with rotary positions in a part of each head, and soft-capped scores."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = Norm(dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        q = self.q_norm(q)
        n = q.shape[-1] // 2
        angle = angles(t, n)
        cos, sin = angle.cos(), angle.sin()
        q = torch.cat((q[..., :n] * cos + turned(q[..., :n]) * sin, q[..., n:]), dim=-1)
        k = torch.cat((k[..., :n] * cos + turned(k[..., :n]) * sin, k[..., n:]), dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = 3.0 * torch.tanh(scores / 3.0)
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        probs = scores.softmax(dim=-1)
        out = (probs @ v).transpose(1, 2).reshape(b, t, d)
        return x + self.o_proj(out)


class Cached(nn.Module):
    """Decodes with a cache of keys and values in a sliding window."""

    def __init__(self, dim: int = 32, heads: int = 4, window: int = 6) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.reset()

    def reset(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (p(x).view(b, t, self.heads, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        angle = angles(t, q.shape[-1], offset=self.seen)
        q = q * angle.cos() + turned(q) * angle.sin()
        k = k * angle.cos() + turned(k) * angle.sin()
        if self.keys is not None and self.values is not None:
            k = torch.cat((self.keys, k), dim=2)
            v = torch.cat((self.values, v), dim=2)
        self.seen += t
        self.keys = k[:, :, -self.window :]
        self.values = v[:, :, -self.window :]
        at = torch.arange(self.seen - t, self.seen).unsqueeze(1)
        to = torch.arange(self.seen - k.shape[2], self.seen)
        mask = (to <= at) & (to > at - self.window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.o_proj(out.transpose(1, 2).reshape(b, t, d))


class Cell(nn.Module):
    """An LSTM written by hand."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.x = nn.Linear(dim, 4 * dim)
        self.h = nn.Linear(dim, 4 * dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], x.shape[2])
        outs = []
        for t in range(x.shape[1]):
            i, f, g, o = (self.x(x[:, t]) + self.h(h)).chunk(4, dim=-1)
            i, f, o = i.sigmoid(), (f + 1).sigmoid(), o.sigmoid()
            c = f * c + i * torch.tanh(g)
            h = o * torch.tanh(c)
            outs.append(h)
        return self.norm(torch.stack(outs, dim=1))


class Cross(nn.Module):
    """Attention to another sequence, with relative positions and a padding mask."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.bias = nn.Embedding(9, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor) -> Tensor:
        q = self.split(self.q_proj(self.norm1(x)))
        k = self.split(self.k_proj(memory))
        v = self.split(self.v_proj(memory))
        distance = torch.arange(k.shape[2]).unsqueeze(0) - torch.arange(q.shape[2]).unsqueeze(1)
        bucket = distance.clamp(-4, 4) + 4
        bias = self.bias(bucket).permute(2, 0, 1)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        scores = scores + bias
        padded = torch.arange(k.shape[2]) >= lengths.unsqueeze(1)
        scores = scores.masked_fill(padded[:, None, None], -1e9)
        probs = torch.softmax(scores, dim=-1)
        out = torch.einsum("bhqk,bhkd->bhqd", probs, v)
        out = out.transpose(1, 2).flatten(2)
        return self.norm2(x + self.o_proj(out))


class Unet(nn.Module):
    """A block of a diffusion model: down, up, a skip connection, and the time."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, dim, 3, padding=1)
        self.norm = nn.GroupNorm(4, dim, eps=1e-3)
        self.down = nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1)
        self.time = nn.Linear(16, 4 * dim)
        self.middle = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1)
        self.up = nn.Conv2d(3 * dim, dim, 3, padding=1)
        self.last = nn.Conv2d(dim, 3, 1)

    def embed(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(8) / 8)
        args = t[:, None] * frequencies
        return torch.cat([args.cos(), args.sin()], dim=-1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.first(x)
        skip = F.silu(self.norm(h))
        h = self.down(skip)
        scale, shift = self.time(self.embed(t))[:, :, None, None].chunk(2, dim=1)
        h = h * (1 + scale) + shift
        h = F.silu(self.middle(h))
        h = F.interpolate(h, scale_factor=2, mode="nearest")
        h = torch.cat([h, skip], dim=1)
        h = F.silu(self.up(h))
        return self.last(h)


class Quantised(nn.Module):
    """A linear layer in int8, with a scale for each output and each token."""

    def __init__(self, dim: int = 32, out: int = 24) -> None:
        super().__init__()
        weight = torch.randn(out, dim)
        self.register_buffer("scale", weight.abs().amax(1) / 127)
        self.register_buffer("weight", (weight / self.scale[:, None]).round().to(torch.int8))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        amax = x.abs().amax(dim=-1, keepdim=True)
        step = amax / 127
        q = (x / step).round().clamp(-128, 127).to(torch.int8)
        acc = q.to(torch.int32) @ self.weight.to(torch.int32).t()
        y = acc.float() * step
        y = y * self.scale
        return y + self.bias


class Quantising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(32)
        self.proj = Quantised()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.proj(self.norm(x)))


class Decaying(nn.Module):
    """Linear attention with decay, gated, and a depthwise convolution before."""

    def __init__(self, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.conv = nn.Conv1d(dim, dim, 3, groups=dim)
        self.qkvg = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        padded = F.pad(x.transpose(1, 2), (2, 0))
        h = F.silu(self.conv(padded)).transpose(1, 2)
        q, k, v, g = (each.view(b, t, self.heads, -1).transpose(1, 2) for each in self.qkvg(h).chunk(4, dim=-1))
        gamma = 1 - 2.0 ** (-5 - torch.arange(self.heads).float())
        steps = torch.arange(t)
        distance = (steps[:, None] - steps[None, :]).clamp(min=0)
        decay = gamma[:, None, None] ** distance * torch.ones(t, t).tril()
        scores = (q @ k.transpose(-1, -2)) * decay
        y = scores @ v
        y = y / scores.abs().sum(-1, keepdim=True).clamp(min=1.0)
        y = F.layer_norm(y, y.shape[-1:])
        y = y * F.silu(g)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 8, 16), torch.randn(2, 8, 32)


def run_scan() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Scan()
    return model, lambda: model(inputs()[0])


def run_experts() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Experts()
    return model, lambda: model(inputs()[0])


def run_rotary() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = nn.Sequential(Rotary(), Rotary())
    return model, lambda: model(inputs()[1])


def run_cached() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Cached()

    def decode() -> Tensor:
        model.reset()
        h = model(inputs()[1])
        for _ in range(4):
            gl.step()
            h = model(h[:, -1:])
        return h

    return model, decode


def run_cell() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Cell()
    return model, lambda: model(inputs()[0])


def run_cross() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Cross()
    return model, lambda: model(inputs()[1], torch.randn(2, 7, 32), torch.tensor([5, 7]))


def run_unet() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Unet()
    return model, lambda: model(torch.randn(2, 3, 8, 8), torch.tensor([3.0, 40.0]))


def run_quantised() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Quantising()
    return model, lambda: model(inputs()[1])


def run_decaying() -> tuple[nn.Module, Callable[[], Tensor]]:
    model = Decaying()
    return model, lambda: model(inputs()[0])
