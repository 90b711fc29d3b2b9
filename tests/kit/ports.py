"""Pairs of implementations that share no name, with the right conversion of the weights written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graftlab.matching.recorded_taps import SketchRecorder

State = dict[str, Tensor]


@dataclass
class Port:
    """A baseline, a target with the baseline's weights in it, and how both are called."""

    baseline: nn.Module
    target: nn.Module
    convert: Callable[[State], State]
    run: Callable[[nn.Module], Any]

    def states(self) -> tuple[State, State]:
        """Copies of both states, to plant mistakes in."""
        pair = self.baseline.state_dict(), self.target.state_dict()
        return tuple({name: value.clone() for name, value in state.items()} for state in pair)  # type: ignore[return-value]


def ported(baseline: nn.Module, target: nn.Module, convert: Callable[[State], State], run: Callable[..., Any]) -> Port:
    target.load_state_dict(convert(baseline.state_dict()))
    return Port(baseline.eval(), target.eval(), convert, run)


# ---- BERT with the weights of MiniLM, and torch.nn.TransformerEncoder ------------------------------------------------


class Encoder(nn.Module):
    """BERT without its pooler, of torch's own layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.layer_norm_eps
        self.tokens = nn.Embedding(config.vocab_size, hidden)
        self.positions = nn.Embedding(config.max_position_embeddings, hidden)
        self.segments = nn.Embedding(config.type_vocab_size, hidden)
        self.norm = nn.LayerNorm(hidden, eps=eps)
        layer = nn.TransformerEncoderLayer(
            hidden, config.num_attention_heads, config.intermediate_size, 0.0, "gelu", eps, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.num_hidden_layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1])) + self.segments(torch.zeros_like(ids))
        out: Tensor = self.encoder(self.norm(x))
        return out


def encoder_from_bert(state: State) -> State:
    new = {
        "tokens.weight": state["embeddings.word_embeddings.weight"],
        "positions.weight": state["embeddings.position_embeddings.weight"],
        "segments.weight": state["embeddings.token_type_embeddings.weight"],
        "norm.weight": state["embeddings.LayerNorm.weight"],
        "norm.bias": state["embeddings.LayerNorm.bias"],
    }
    layers = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.layer."))
    for n in range(layers):
        old, to = f"encoder.layer.{n}.", f"encoder.layers.{n}."
        for last in ("weight", "bias"):
            qkv = [state[f"{old}attention.self.{name}.{last}"] for name in ("query", "key", "value")]
            new[f"{to}self_attn.in_proj_{last}"] = torch.cat(qkv)
            new[f"{to}self_attn.out_proj.{last}"] = state[f"{old}attention.output.dense.{last}"]
            new[f"{to}linear1.{last}"] = state[f"{old}intermediate.dense.{last}"]
            new[f"{to}linear2.{last}"] = state[f"{old}output.dense.{last}"]
            new[f"{to}norm1.{last}"] = state[f"{old}attention.output.LayerNorm.{last}"]
            new[f"{to}norm2.{last}"] = state[f"{old}output.LayerNorm.{last}"]
    return new


def token_ids(vocabulary: int, rows: int = 2, tokens: int = 11) -> Tensor:
    return torch.randint(1, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(0))


def shaken(model: nn.Module, seed: int) -> nn.Module:
    """With no parameter at its initial value: norms that are not 1, biases that are not 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))
    return model


# ---- Llama, and graftlab's own transformer ---------------------------------------------------------------------------


def transformer_from_llama(state: State) -> State:
    new = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "lm_head.weight": state["lm_head.weight"],
    }
    layers = 1 + max(int(name.split(".")[2]) for name in state if ".layers." in name)
    for n in range(layers):
        old, to = f"model.layers.{n}.", f"blocks.{n}."
        new[f"{to}attn_norm.weight"] = state[f"{old}input_layernorm.weight"]
        new[f"{to}mlp_norm.weight"] = state[f"{old}post_attention_layernorm.weight"]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            new[f"{to}attention.{name}.weight"] = state[f"{old}self_attn.{name}.weight"]
        for name in ("gate_proj", "up_proj", "down_proj"):
            new[f"{to}mlp.{name}.weight"] = state[f"{old}mlp.{name}.weight"]
    return new


# ---- GPT-2, whose matrices are transposed, and one written by hand ---------------------------------------------------


class HandBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.merge = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            each(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(attended.transpose(1, 2).flatten(2))
        out: Tensor = x + self.narrow(self.gelu(self.widen(self.norm2(x))))
        return out


class HandGPT(nn.Module):
    def __init__(self, vocabulary: int, positions: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(positions, width)
        self.stack = nn.ModuleList(HandBlock(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.stack:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def hand_from_gpt2(state: State) -> State:
    new = {
        "words.weight": state["wte.weight"],
        "places.weight": state["wpe.weight"],
        "last.weight": state["ln_f.weight"],
        "last.bias": state["ln_f.bias"],
    }
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("h."))
    for n in range(layers):
        old, to = f"h.{n}.", f"stack.{n}."
        for index, name in enumerate(("query", "key", "value")):
            new[f"{to}{name}.weight"] = state[f"{old}attn.c_attn.weight"].chunk(3, dim=1)[index].T.contiguous()
            new[f"{to}{name}.bias"] = state[f"{old}attn.c_attn.bias"].chunk(3)[index].clone()
        for mine, theirs in (("attn.c_proj", "merge"), ("mlp.c_fc", "widen"), ("mlp.c_proj", "narrow")):
            new[f"{to}{theirs}.weight"] = state[f"{old}{mine}.weight"].T.contiguous()
            new[f"{to}{theirs}.bias"] = state[f"{old}{mine}.bias"]
        for mine, theirs in (("ln_1", "norm1"), ("ln_2", "norm2")):
            for last in ("weight", "bias"):
                new[f"{to}{theirs}.{last}"] = state[f"{old}{mine}.{last}"]
    return new


# ---- taps without a session ------------------------------------------------------------------------------------------


def record_taps(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    grafts: dict[str, Callable[[Tensor], Tensor]] | None = None,
    budget: int = 1 << 30,
) -> SketchRecorder:
    """What every module's output showed in one run; ``grafts`` replace a tap's tensor after it was recorded."""
    recorder = SketchRecorder(
        {name or "output": type(module).__name__ for name, module in model.named_modules()}, budget
    )

    def shown(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            recorder.tap(name, value, None, {})
            return grafts[name](value) if grafts and name in grafts else value
        if isinstance(value, (tuple, list)):
            return type(value)(shown(f"{name}[{index}]", item) for index, item in enumerate(value))
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = shown(f"{name}.{key}", item)
        return value

    hooks = [
        module.register_forward_hook(lambda module, args, output, name=name: shown(name or "output", output))
        for name, module in model.named_modules()
    ]
    with torch.no_grad():
        run(model)
    for hook in hooks:
        hook.remove()
    return recorder
