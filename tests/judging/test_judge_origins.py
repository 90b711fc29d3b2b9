"""A verdict tells a module that is wrong from one that is given something wrong, from equal inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graftlab as gl
from graftlab.errors import SessionError

pytestmark = pytest.mark.ranks

WIDTH = 16


class Attention(nn.Module):
    """Its faults are where no tap shows them: before its projections, or in the scores."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fault = fault

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.fault == "before":
            x = x * 1.01
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-1, -2) * (0.3 if self.fault == "scale" else 0.25)
        return self.o((scores + mask).softmax(-1) @ v)


class OtherAttention(nn.Module):
    """The same with other names, and a tuple as its output."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = attention.q, attention.k, attention.v, attention.o
        self.scale = 0.3 if attention.fault == "scale" else 0.25

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores = self.wq(hidden) @ self.wk(hidden).transpose(-1, -2) * self.scale
        return self.wo((scores + bias).softmax(-1) @ self.wv(hidden)), None


class Layer(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attn: nn.Module = Attention(fault)
        self.fault = fault

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        attended = self.attn(self.norm(x), mask.flip(0) if self.fault == "flipped" else mask)
        return x + (attended if isinstance(attended, torch.Tensor) else attended[0])


class Decoder(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(fault) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(len(x), len(x)).triu(1) * (-2.0 if self.fault == "mask" else -1.0)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


def decode(fault: str, renamed: bool = False) -> torch.Tensor:
    on_target = gl.here().side == "target"
    model = Decoder(fault if on_target else "")
    with torch.no_grad():
        if fault == "weight" and on_target:
            model.layers[1].attn.o.weight.mul_(1.1)
        if renamed and on_target:
            for layer in model.layers:
                layer.attn = OtherAttention(layer.attn)
        with gl.watch(model):
            return model(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)))


def found(verdict: Any) -> list[tuple[str, bool, dict[str, str]]]:
    return [(each.group, each.is_itself, dict(each.modules)) for each in verdict.origins]


def test_a_projection_is_right_where_the_scores_before_it_are_wrong(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode, args=("scale",))
    assert verdict.named == ["layers.*.attn.o"]
    assert verdict.text.startswith(
        "layers.*.attn is computed differently in layers 0-2, between q, k, v and o (o itself is right; added 0.0"
    )
    assert "itself" not in verdict.text.partition("\n")[2]
    (origin,) = verdict.origins
    layer = origin.tap.removesuffix(".o")
    assert origin.modules == {"baseline": layer, "target": layer}
    assert (origin.rank, origin.step, origin.occurrence, origin.is_itself) == (0, 0, 0, False)


class Stack(nn.Module):
    """Its fault is between its layers; the taps before the first layer are others than those before the second."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first, self.embed = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.first(x)
        h = self.embed(x)
        for mixer in self.mixers:
            h = mixer(h)
        for layer in self.layers:
            h = layer(torch.cat([skip, h] if self.fault else [h, skip], -1))
        return h


def stacked(fault: str) -> torch.Tensor:
    torch.manual_seed(0)
    model = Stack(fault if gl.here().side == "target" else "")
    with gl.watch(model, inputs=True), torch.no_grad():
        return gl.tap("logits", model(torch.randn(1, 6, WIDTH)))


def test_a_wrong_input_of_all_layers_has_one_sentence(session: gl.Session) -> None:
    verdict = session.verdict(stacked, stacked, args=("order",))
    assert verdict.named == ["layers.*"]
    assert verdict.text.startswith("The model is computed differently in layers 0-2, between ")
    assert verdict.text.count("layers.* itself is right") == 1


def test_modules_that_read_one_wrong_tensor_share_a_sentence(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode, args=("before",))
    assert verdict.named == ["layers.*.attn.q", "layers.*.attn.k", "layers.*.attn.v"]
    assert verdict.text.startswith(
        "layers.*.attn is computed differently in layers 0-2, between its inputs and q, k or v (q, k and v themselves "
        "are right; added 0."
    )
    assert verdict.text.count("is computed differently") == 1
    assert "\nThe values that only one side has begin here (not confirmed" in verdict.text
    assert "the target's values are 1.01 times the baseline's" in verdict.text
    assert "Tap that tensor to find out" not in verdict.text


def test_a_wrong_argument_of_a_module_around_is_named(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode, args=("mask",))
    assert verdict.text.startswith(
        "Input mask of layers.* is computed differently in layers 0-2, in the model's forward "
        "(layers.*.attn.o itself is right; added 0."
    )
    assert "of layers.0, the target's values are 2 times the baseline's" in verdict.text


def test_a_module_that_differs_from_equal_inputs_is_wrong_itself(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode, args=("weight",))
    assert verdict.text.startswith("layers.*.attn.o is computed differently in layer 1 of 0-2 (added 0.")
    assert "right" not in verdict.text
    assert found(verdict) == [
        ("layers.*.attn.o", True, {"baseline": "layers.1.attn.o", "target": "layers.1.attn.o"}),
    ]


PAIRS = [
    *((f"layers.{{n}}.attn.{name}", f"layers.{{n}}.attn.w{name}") for name in "qkvo"),
    ("layers.{n}.attn", "layers.{n}.attn[0]"),
]


@pytest.mark.parametrize(
    ("fault", "start", "end"),
    [
        (
            "scale",
            "layers.*.attn is computed differently in layers 0-2, between wq, wk, wv and wo (o itself is",
            "wo).",
        ),
        ("mask", "Input mask of layers.* is computed differently in layers 0-2, in the model's forward", "wo)."),
        # An argument that is unlike the other side's may not be the same one.
        (
            "flipped",
            "layers.*.attn is computed differently in layers 0-2, between wq, wk, wv and wo (o itself is right;",
            "wo). Or bias may differ, an input of layers.*.attn that was not compared.",
        ),
    ],
)
def test_modules_with_other_names_and_arguments_are_compared_by_their_pairs(
    session: gl.Session, fault: str, start: str, end: str
) -> None:
    before = session.edit(pairs=PAIRS).pairs
    verdict = session.verdict(decode, decode, args=(fault, True))
    assert session.plan.pairs == before
    session.edit(pairs=None)
    assert verdict.named == ["layers.*.attn.o"]
    first = verdict.text.partition("\n")[0]
    assert first.startswith(start)
    assert first.endswith(end)


class Recurrent(nn.Module):
    def __init__(self, wrong: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.wrong = wrong

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in range(5):
            x = self.cell(torch.tanh(x) * (1.1 if call == self.wrong else 1.0))
        return x


def recur() -> torch.Tensor:
    model = Recurrent(3 if gl.here().side == "target" else -1)
    with gl.watch(model), torch.no_grad():
        return model(torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH))


def test_each_call_of_a_shared_module_is_judged_by_its_own_inputs(session: gl.Session) -> None:
    verdict = session.verdict(recur, recur)
    assert verdict.named == ["cell"]
    assert [(each.occurrence, each.is_itself) for each in verdict.origins] == [(3, False)]
    # Its line is confirmed, so nothing suggests that the model was fed its own output.
    assert verdict.text.startswith(
        "The model is computed differently in occurrence 3 of 0-4, between one cell and the next (cell itself is right;"
    )


def without_modules() -> torch.Tensor:
    x = gl.tap("x", torch.linspace(-1, 1, 64).reshape(4, 16))
    return gl.tap("y", x.tanh() * (1.1 if gl.here().side == "target" else 1.0))


def test_nothing_is_said_of_modules_where_the_taps_are_in_functions(session: gl.Session) -> None:
    verdict = session.verdict(without_modules, without_modules)
    assert verdict.named == ["y"]
    assert verdict.origins == ()
    assert "inputs" not in verdict.text


def half_watched(watches: bool) -> torch.Tensor:
    """The baseline taps the projection by hand, so its inputs are seen on the target alone."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, WIDTH)
    x = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)
    if gl.here().side == "baseline":
        return gl.tap("output", model(x))
    with gl.watch(model), torch.no_grad():
        return model(x * 1.1)


def test_a_module_whose_inputs_have_no_partner_may_be_right(session: gl.Session) -> None:
    verdict = session.verdict(half_watched, half_watched, args=(True,))
    assert verdict.named == ["output"]
    assert ("The inputs of output were not compared: output itself may be right, and its input wrong.") in verdict.text


# ---- where in the tensor --------------------------------------------------------------------------------------------


def called_again() -> None:
    """One tap in two steps, each with three calls: only the second call of the first step is wrong, from row 4 on."""
    on_target = gl.here().side == "target"
    for step in range(2):
        x = gl.tap("x", torch.linspace(-1, 1, 96).reshape(8, 12))
        for call in range(3):
            y = x.sin() + call
            if on_target and (step, call) == (0, 1):
                y[4:] += torch.linspace(1, 2, 12).cos() * y[4:].square()
            gl.tap("y", y)
        gl.tap("out", x.mean(0))
        if step == 0:
            gl.step()


def test_hint_and_heat_map_are_of_the_call_that_is_wrong(session: gl.Session) -> None:
    verdict = session.verdict(called_again, called_again)
    assert verdict.labels["y"] in ("culprit", "minor")
    assert "in 1 of 6 calls: step=0 occurrence=1" in verdict.text
    assert "Hint (y): at y, the sides differ only at indices 4-7 of dim 0 (to the end)" in verdict.text
    (drawn,) = [axes for axes in verdict.plot("y").axes if axes.get_images()]
    assert drawn.get_title(loc="left").startswith("y, occurrence 1")
    assert "hint: the sides differ only at indices 4-7 of dim 0" in drawn.get_title(loc="left")
    (image,) = drawn.get_images()
    assert (image.get_array()[:4] == image.get_array().min()).all()
    assert len(session.plot.verdict("y").axes) == len(verdict.plot("y").axes)
    (turned,) = [axes for axes in verdict.plot("y", dims=(1, 0)).axes if axes.get_images()]
    assert turned.get_ylabel() == "dim 1  (element index)"
    shown = verdict._repr_mimebundle_()["text/html"]
    assert shown.count('<details class="graftlab-where"') == 1
    assert ">Where y differs, at y, occurrence 1</summary>" in shown
    assert "hint: the sides differ only at indices 4-7 of dim 0" in shown
    with pytest.raises(SessionError, match=r"no heat map of that tap; it has those of y\."):
        verdict.plot("x")


def test_the_heat_map_of_a_right_module_is_of_its_input(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode, args=("scale",))
    titles = [axes.get_title(loc="left") for axes in verdict.plot("layers.2.attn.o").axes]
    assert any(title.startswith("the input of layers.") for title in titles)
