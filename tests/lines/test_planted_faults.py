"""Faults planted in copies of public models' source: the truth is the edited line, and a verdict is to find it."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kit import public_ports

import graftlab as gl

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "gpt2": {},
    "bert": {},
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4}
    | {"num_experts_per_tok": 2, "norm_topk_prob": True, "decoder_sparse_step": 1},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8},
}
CLASSES = {"llama": "Llama", "gpt2": "GPT2", "bert": "Bert", "qwen3_moe": "Qwen3Moe", "gemma2": "Gemma2"}


@dataclass(frozen=True)
class Planted:
    """An edit of a source file. ``old`` occurs once, after ``after``; ``attention`` is that of the right model."""

    family: str
    old: str
    new: str
    after: str = ""
    attention: str = "eager"


FAULTS = [
    Planted("llama", "key_states.transpose(2, 3)) * scaling", "key_states.transpose(2, 3)) * 0.3"),
    Planted("llama", "key_states.transpose(2, 3)) * scaling", "key_states.transpose(2, 3)) * 0.3", attention="sdpa"),
    Planted("llama", "return torch.cat((-x2, x1), dim=-1)", "return torch.cat((x2, -x1), dim=-1)"),
    Planted("llama", "k_embed = (k * cos) + (rotate_half(k) * sin)", "k_embed = (k * cos) - (rotate_half(k) * sin)"),
    Planted("llama", "cos = emb.cos() * self", "cos = emb.bfloat16().cos().float() * self"),
    Planted("llama", "torch.rsqrt(variance + self.variance_epsilon)", "torch.rsqrt(variance + 1e-2)"),
    Planted(
        "llama", "self.act_fn(self.gate_proj(x)) * self.up_proj(x)", "self.act_fn(self.up_proj(x)) * self.gate_proj(x)"
    ),
    Planted("llama", "hidden_states = residual + hidden_states", "hidden_states = residual + 0.9 * hidden_states"),
    Planted(
        "llama",
        "value_states = repeat_kv(value, module.num_key_value_groups)",
        "value_states = value.repeat(1, module.num_key_value_groups, 1, 1)",
        attention="sdpa",
    ),
    Planted("gpt2", "hidden_states = self.act(hidden_states)", "hidden_states = nn.functional.relu(hidden_states)"),
    Planted(
        "gpt2",
        "attn_output = attn_output.transpose(1, 2)",
        "attn_output = attn_output.transpose(1, 2).flip(2)",
        "def eager_attention_forward",
    ),
    Planted("gpt2", "position_embeds = self.wpe(position_ids)", "position_embeds = self.wpe(position_ids + 1)"),
    Planted(
        "bert",
        "hidden_states = self.LayerNorm(hidden_states + input_tensor)",
        "hidden_states = self.LayerNorm(hidden_states)",
        "class BertOutput",
    ),
    Planted(
        "bert",
        "embeddings = embeddings + position_embeddings",
        "embeddings = embeddings + position_embeddings.roll(1, 1)",
    ),
    Planted(
        "bert",
        "attn_weights = nn.functional.softmax(attn_weights, dim=-1)",
        "attn_weights = nn.functional.softmax(attn_weights * 1.02, dim=-1)",
        attention="sdpa",
    ),
    Planted(
        "qwen3_moe",
        "router_top_value /= router_top_value.sum(dim=-1, keepdim=True)",
        "router_top_value /= router_probs.sum(dim=-1, keepdim=True)",
    ),
    Planted(
        "qwen3_moe",
        "router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)",
        "router_probs = torch.sigmoid(router_logits)",
    ),
    Planted("gemma2", "output = output * (1.0 + self.weight.float())", "output = output * self.weight.float()"),
    Planted("gemma2", "attn_weights = torch.tanh(attn_weights)", "attn_weights = torch.sigmoid(attn_weights)"),
    Planted("litgpt", "roped = (x * cos) + (rotated * sin)", "roped = (x * cos) - (rotated * sin)"),
    Planted("litgpt", "scale = scale * self.mscale * self.mscale", "scale = scale * 1.3"),
    Planted("litgpt", "x = self.transformer.wte(idx)", "x = self.transformer.wte(idx).bfloat16().float()"),
    Planted("timm", "x = x + pos_embed", "x = x + pos_embed.flip(1)", "original timm"),
    Planted("timm", "x = x + self.drop_path2(", "x = x + 0.95 * self.drop_path2("),
    Planted("timm", "x = x.mean(dim=1)", "x = x.amax(dim=1)"),
]
EFFECTS = {"scale = scale * 1.3": "y = F.scaled_dot_product_attention("}
"""For a number that Python computes: the line at which it takes effect."""


def module_of(family: str) -> str:
    return {"timm": "timm.models.vision_transformer", "litgpt": "litgpt.model"}.get(
        family, f"transformers.models.{family}.modeling_{family}"
    )


def source_of(family: str) -> str:
    """The family's file as a module outside its package."""
    name = module_of(family)
    try:
        public_ports.declare_vision_operators()
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: pip install 'graftlab[pairs]'")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text(encoding="utf-8")
    text = re.sub(r"^from \.\.\.(\S*)", lambda m: f"from transformers.{m[1]}".rstrip("."), text, flags=re.MULTILINE)
    return re.sub(r"^from \.(?=\w)", f"from {name.rpartition('.')[0]}.", text, flags=re.MULTILINE)


def planted(fault: Planted, folder: Path) -> tuple[Path, int]:
    """Write the edited copy; returns it and the number of its wrong line."""
    text = source_of(fault.family)
    begin = text.index(fault.old, text.index(fault.after) if fault.after else 0)
    text = text[:begin] + fault.new + text[begin + len(fault.old) :]
    path = folder / f"{module_of(fault.family).rpartition('.')[2]}.py"
    path.write_text(text, encoding="utf-8")
    effect = EFFECTS.get(fault.new)
    return path, text.count("\n", 0, begin if effect is None else text.index(effect, begin)) + 1


def loaded(path: str) -> ModuleType:
    name = f"planted_{abs(hash(path))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def made(family: str, module: Any, attention: str) -> torch.nn.Module:
    """A small model of a family, from the classes of this module."""
    if family == "timm":
        model: torch.nn.Module = module.VisionTransformer(
            img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=7, global_pool="avg"
        )
        return model
    if family == "litgpt":
        sizes = {"n_layer": 3, "n_head": 4, "n_query_groups": 2, "n_embd": 48, "intermediate_size": 80}
        config = importlib.import_module("litgpt").Config(
            block_size=64,
            padded_vocab_size=96,
            mlp_class_name="LLaMAMLP",
            norm_class_name="RMSNorm",
            rotary_percentage=1.0,
            **sizes,
        )
        model = module.GPT(config)
        return model
    sizes = SIZES | MORE[family]
    if family == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    name = CLASSES[family]
    config = getattr(importlib.import_module("transformers"), f"{name}Config")(**sizes, attn_implementation=attention)
    model = getattr(module, f"{name}Model")(config)
    return model


def run(family: str, path: str, attention: str) -> Any:
    """The right model on the baseline, that of the copy on the target, with the same weights."""
    warnings.simplefilter("ignore")
    public_ports.declare_vision_operators()
    me = gl.here()
    is_target = me is not None and me.side == "target"
    torch.manual_seed(0)
    model = made(family, importlib.import_module(module_of(family)), attention).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        elif not weight.any():
            weight.data = 0.5 * torch.randn(weight.shape, generator=generator)
    if is_target:
        right, model = model, made(family, loaded(path), "eager").eval()
        model.load_state_dict(right.state_dict())
    given = torch.randint(1, 96, (2, 12), generator=generator)
    if family == "timm":
        given = torch.randn(2, 3, 32, 32, generator=generator)
    more = {"use_cache": False} if family in CLASSES and family != "bert" else {}
    with torch.no_grad(), gl.watch(model):
        found = model(given, **more)
        return found if isinstance(found, torch.Tensor) else found[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.family}-{fault.new[:30]}-{fault.attention}")
def test_the_edited_line_is_among_the_first_three(fault: Planted, session: gl.Session, tmp_path: Path) -> None:
    path, line = planted(fault, tmp_path)
    verdict = session.verdict(run, run, args=(fault.family, str(path), fault.attention))
    assert verdict.named, verdict
    frame = verdict.lines
    first = [group.head(3) for _, group in frame.groupby(["group", "side"], sort=False)]
    # An operation that the copy lacks, or that changes nothing, is a line of the original, which is as long.
    places = {
        (Path(file).name, number) for each in first for file, number in zip(each["file"], each["line"], strict=True)
    }
    assert (path.name, line) in places, verdict
    confirmed = frame[frame["confirmed"]]
    shown = {(Path(file).name, number) for file, number in zip(confirmed["file"], confirmed["line"], strict=True)}
    assert shown <= {(path.name, line)}, verdict


@pytest.mark.parametrize("family", [*CLASSES, "litgpt", "timm"])
def test_an_unedited_copy_with_another_attention_has_no_lines(family: str, session: gl.Session, tmp_path: Path) -> None:
    path = tmp_path / f"{module_of(family).rpartition('.')[2]}.py"
    path.write_text(source_of(family), encoding="utf-8")
    attention = "eager" if family == "gemma2" else "sdpa"
    verdict = session.verdict(run, run, args=(family, str(path), attention))
    assert (verdict.named, len(verdict.lines)) == ([], 0), verdict
