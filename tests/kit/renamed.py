"""A small decoder, and a port of it with other names, whose weights are fused and transposed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS = 32, 4, 3, 50


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            project(x).view(batch, tokens, HEADS, -1).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(heads.transpose(1, 2).reshape(batch, tokens, WIDTH))


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = _SelfAttention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_norm(x))
        return x + self.down(F.gelu(self.up(self.post_norm(x))))


class Reference(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class _Conv1D(nn.Module):
    """A linear layer with a transposed weight."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(given, made)), nn.Parameter(torch.zeros(made))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = _Conv1D(WIDTH, 3 * WIDTH), _Conv1D(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (part.view(batch, tokens, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(WIDTH, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(heads.transpose(1, 2).reshape(batch, tokens, WIDTH))


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = _Conv1D(WIDTH, 4 * WIDTH), _Conv1D(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = _Attention(), _MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Port(nn.Module):
    """``tied``: the head's weight is the embedding's, and not a copy."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


@torch.no_grad()
def reference() -> Reference:
    """A reference with random weights, the same in each call."""
    torch.manual_seed(1)
    model = Reference()
    for weight in model.parameters():
        weight.copy_(0.15 * torch.randn_like(weight) + (1 if weight.dim() == 1 else 0))
    return model.eval()


@torch.no_grad()
def port(tied: bool = True) -> Port:
    """A port of the reference with its weights."""
    given, model = reference(), Port(tied)
    model.wte.weight.copy_(given.embed.weight)
    model.wpe.weight.copy_(given.pos.weight)
    model.head.weight.copy_(given.embed.weight)
    model.ln_f.load_state_dict(given.norm.state_dict())
    for block, layer in zip(model.h, given.layers, strict=True):
        block.ln_1.load_state_dict(layer.input_norm.state_dict())
        block.ln_2.load_state_dict(layer.post_norm.state_dict())
        ours = layer.self_attn
        fused = (ours.q_proj, ours.k_proj, ours.v_proj)
        block.attn.c_attn.weight.copy_(torch.cat([each.weight for each in fused]).T)
        block.attn.c_attn.bias.copy_(torch.cat([each.bias for each in fused]))
        for linear, conv in (
            (ours.o_proj, block.attn.c_proj),
            (layer.up, block.mlp.c_fc),
            (layer.down, block.mlp.c_proj),
        ):
            conv.weight.copy_(linear.weight.T)
            conv.bias.copy_(linear.bias)
    return model.eval()
