"""Mistakes planted by an edit of one line of a model's source: the truth is that line."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch

import graftlab as gl

pytestmark = [pytest.mark.ranks, pytest.mark.soak, pytest.mark.timeout(900)]

SOURCE = Path(__file__).with_name("edited_models.py")


@dataclass(frozen=True)
class Planted:
    """An edit of one line of the source of a model, which ``run_NAME`` makes. ``old`` is part of that line."""

    model: str
    old: str
    new: str


FAULTS = [
    Planted("scan", "dt = F.softplus(dt)", "dt = F.softplus(dt + 0.1)"),
    Planted("scan", "y = y + self.skip * u", "y = y + 0 * u"),
    Planted("scan", "y = y + self.skip * u", "pass"),
    Planted("scan", "h = decay[:, t] * h + driven[:, t]", "h = decay[:, t - 1] * h + driven[:, t]"),
    Planted("scan", "b, c, dt = self.parts(u)", "c, b, dt = self.parts(u)"),
    Planted("scan", "u, gate = self.into", "gate, u = self.into"),
    Planted("scan", "torch.exp(self.log_a)", "torch.exp(self.log_a).flip(1)"),
    Planted("experts", "weights = weights / weights.sum(dim=-1, keepdim=True)", "weights = weights * 1.0"),
    Planted(
        "experts", "weights, chosen = scores.topk(2, dim=-1)", "weights, chosen = scores.topk(2, dim=-1, largest=False)"
    ),
    Planted("experts", "scores = self.router(flat).softmax(dim=-1)", "scores = self.router(flat).softmax(dim=0)"),
    Planted("experts", "weights[token, which].unsqueeze(-1)", "weights[token, 1 - which].unsqueeze(-1)"),
    Planted("experts", "out = out + self.shared(flat)", "out = out + 2 * self.shared(flat)"),
    Planted(
        "rotary", "q[..., :n] * cos + turned(q[..., :n]) * sin", "q[..., :n] * cos + turned(turned(q[..., :n])) * sin"
    ),
    Planted("rotary", "k[..., :n] * cos + turned(k[..., :n]) * sin", "k[..., :n] * cos - turned(k[..., :n]) * sin"),
    Planted("rotary", "return torch.cat((-b, a), dim=-1)", "return torch.cat((b, -a), dim=-1)"),
    Planted("rotary", ".repeat(1, 2)", ".repeat_interleave(2, 1)"),
    Planted("rotary", "q = self.q_norm(q)", "q = self.q_norm(self.q_norm(q))"),
    Planted("rotary", "scores = 3.0 * torch.tanh(scores / 3.0)", "scores = 2.0 * torch.tanh(scores / 2.0)"),
    Planted("rotary", "scores = 3.0 * torch.tanh(scores / 3.0)", "pass"),
    Planted(
        "rotary",
        "mask = torch.ones(t, t, dtype=torch.bool).tril()",
        "mask = torch.ones(t, t, dtype=torch.bool).tril(1)",
    ),
    Planted("rotary", "math.sqrt(q.shape[-1])", "math.sqrt(x.shape[-1])"),
    Planted("rotary", "probs = scores.softmax(dim=-1)", "probs = scores.softmax(dim=-2)"),
    Planted("cached", "self.keys = k[:, :, -self.window :]", "self.keys = k[:, :, : self.window]"),
    Planted("cached", "(to > at - self.window)", "(to >= at - self.window)"),
    Planted("cached", "offset=self.seen", "offset=max(self.seen - 1, 0)"),
    Planted("cached", "v = torch.cat((self.values, v), dim=2)", "v = torch.cat((self.values.flip(2), v), dim=2)"),
    Planted("cell", "i, f, g, o = (self.x", "i, g, f, o = (self.x"),
    Planted("cell", "(f + 1).sigmoid()", "f.sigmoid()"),
    Planted("cell", "h = o * torch.tanh(c)", "h = o * c"),
    Planted("cell", "c = f * c + i * torch.tanh(g)", "c = f * c + torch.tanh(g)"),
    Planted("cross", "v = self.split(self.v_proj(memory))", "v = self.split(self.v_proj(memory.flip(1)))"),
    Planted("cross", "bucket = distance.clamp(-4, 4) + 4", "bucket = (-distance).clamp(-4, 4) + 4"),
    Planted("cross", "padded = torch.arange(k.shape[2]) >= lengths", "padded = torch.arange(k.shape[2]) > lengths"),
    Planted("cross", "scores = scores + bias", "pass"),
    Planted("cross", "return self.norm2(x + self.o_proj(out))", "return self.norm2(self.norm1(x) + self.o_proj(out))"),
    Planted("cross", "out = out.transpose(1, 2).flatten(2)", "out = out.reshape(x.shape)"),
    Planted("unet", "eps=1e-3", "eps=1e-1"),
    Planted("unet", "nn.GroupNorm(4, dim", "nn.GroupNorm(2, dim"),
    Planted(
        "unet",
        "return torch.cat([args.cos(), args.sin()], dim=-1)",
        "return torch.cat([args.sin(), args.cos()], dim=-1)",
    ),
    Planted("unet", "h = torch.cat([h, skip], dim=1)", "h = torch.cat([h, h[:, :8]], dim=1)"),
    Planted("unet", 'mode="nearest"', 'mode="bilinear"'),
    Planted("unet", "h = h * (1 + scale) + shift", "h = h * scale + shift"),
    Planted("unet", "torch.arange(8) / 8", "torch.arange(8) / 7"),
    Planted("quantised", "y = y * self.scale", "y = y * self.scale.mean()"),
    Planted("quantised", "step = amax / 127", "step = amax / 128"),
    Planted("quantised", "(x / step).round()", "(x / step).trunc()"),
    Planted("quantised", "amax = x.abs().amax(dim=-1, keepdim=True)", "amax = x.abs().amax()"),
    Planted("decaying", "F.pad(x.transpose(1, 2), (2, 0))", "F.pad(x.transpose(1, 2), (1, 1))"),
    Planted("decaying", "(-5 - torch.arange(self.heads).float())", "(-4 - torch.arange(self.heads).float())"),
    Planted("decaying", "torch.ones(t, t).tril()", "torch.ones(t, t).triu()"),
    Planted("decaying", "y = F.layer_norm(y, y.shape[-1:])", "pass"),
    Planted("decaying", "y = y * F.silu(g)", "y = y * F.silu(g) * 1.1"),
    Planted("decaying", ".clamp(min=1.0)", ".clamp(min=2.0)"),
]
EFFECTS = {
    "offset=max(self.seen - 1, 0)": "positions = torch.arange(",
    "eps=1e-1": "skip = F.silu(self.norm(h))",
    "nn.GroupNorm(2, dim": "skip = F.silu(self.norm(h))",
}
"""For a number that Python computes, or keeps: the line at which it takes effect."""


def planted(fault: Planted, folder: Path) -> tuple[Path, int]:
    """Write the edited copy; returns it and the number of its wrong line."""
    text = SOURCE.read_text(encoding="utf-8")
    begin = text.index(f"class {fault.model.title()}")
    begin = text.index(fault.old, begin if fault.old in text[begin:] else 0)
    text = text[:begin] + fault.new + text[begin + len(fault.old) :]
    path = folder / SOURCE.name
    path.write_text(text, encoding="utf-8")
    effect = EFFECTS.get(fault.new)
    return path, text.count("\n", 0, begin if effect is None else text.index(effect)) + 1


def loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"edited_{abs(hash(path))}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, path: str) -> torch.Tensor:
    """The model of the source on the baseline, that of the copy on the target."""
    me = gl.here()
    assert me is not None
    module = loaded(path if me.side == "target" else str(SOURCE))
    torch.manual_seed(0)
    model, call = getattr(module, f"run_{name}")()
    torch.manual_seed(1)
    with torch.no_grad(), gl.watch(model):
        result: torch.Tensor = call()
        return result


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.model}-{fault.new[:40]}")
def test_the_edited_line_is_among_the_first_three(fault: Planted, session: gl.Session, tmp_path: Path) -> None:
    path, line = planted(fault, tmp_path)
    verdict = session.verdict(run, run, args=(fault.model, str(path)))
    assert verdict.named, verdict
    frame = verdict.lines
    # A line that the copy lacks is one of the original, which has as many.
    first = {number for _, group in frame.groupby(["group", "side"], sort=False) for number in group.head(3)["line"]}
    assert line in first, verdict
    confirmed = frame[frame["confirmed"]]
    assert {*confirmed["line"]} <= {line}, verdict


@pytest.mark.parametrize("model", dict.fromkeys(fault.model for fault in FAULTS))
def test_an_unedited_copy_has_no_lines(model: str, session: gl.Session, tmp_path: Path) -> None:
    path = tmp_path / SOURCE.name
    path.write_text(SOURCE.read_text(encoding="utf-8"), encoding="utf-8")
    verdict = session.verdict(run, run, args=(model, str(path)))
    assert (verdict.named, len(verdict.lines)) == ([], 0), verdict
