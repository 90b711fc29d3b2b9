"""Faults planted in copies of transformers' source: the truth is the edited line, and a verdict is to find it."""

from __future__ import annotations

import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graftlab as gl

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(900)]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
MORE = {
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
]


def source_of(family: str) -> str:
    """The family's file as a module outside its package."""
    found = importlib.util.find_spec(f"transformers.models.{family}.modeling_{family}")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text(encoding="utf-8")
    text = re.sub(r"^from \.\.\.(\S*)", lambda m: f"from transformers.{m[1]}".rstrip("."), text, flags=re.MULTILINE)
    return re.sub(r"^from \.(?=\w)", f"from transformers.models.{family}.", text, flags=re.MULTILINE)


def planted(fault: Planted, folder: Path) -> tuple[Path, int]:
    """Write the edited copy; returns it and the number of its wrong line."""
    text = source_of(fault.family)
    begin = text.index(fault.old, text.index(fault.after) if fault.after else 0)
    path = folder / f"modeling_{fault.family}.py"
    path.write_text(text[:begin] + fault.new + text[begin + len(fault.old) :], encoding="utf-8")
    return path, text.count("\n", 0, begin) + 1


def loaded(path: str) -> ModuleType:
    name = f"planted_{abs(hash(path))}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run(family: str, path: str, attention: str) -> Any:
    """The right model on the baseline, that of the copy on the target, with the same weights."""
    import transformers

    warnings.simplefilter("ignore")
    me = gl.here()
    is_target = me is not None and me.side == "target"
    name = CLASSES[family]
    sizes = {**SIZES, **MORE[family]}
    if family == "gpt2":
        sizes |= {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation="eager" if is_target else attention)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
        elif not weight.any():
            weight.data = 0.5 * torch.randn(weight.shape, generator=generator)
    if is_target:
        right, model = model, getattr(loaded(path), f"{name}Model")(config).eval()
        model.load_state_dict(right.state_dict())
    ids = torch.randint(1, 96, (2, 12), generator=generator)
    with torch.no_grad(), gl.watch(model):
        return model(ids, use_cache=False)[0] if family != "bert" else model(ids)[0]


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as opened:
        yield opened


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
    assert set(zip(confirmed["file"], confirmed["line"], strict=True)) <= {(str(path), line)}, verdict


@pytest.mark.parametrize("family", CLASSES)
def test_an_unedited_copy_with_another_attention_has_no_lines(family: str, session: gl.Session, tmp_path: Path) -> None:
    path = tmp_path / f"modeling_{family}.py"
    path.write_text(source_of(family), encoding="utf-8")
    attention = "eager" if family == "gemma2" else "sdpa"
    verdict = session.verdict(run, run, args=(family, str(path), attention))
    assert (verdict.named, len(verdict.lines)) == ([], 0), verdict
