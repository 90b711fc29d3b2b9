"""Taps on torch functions inside a model, which implementations with different modules share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit.recorder import Recorder
from kit.refusals import exactly

import graftlab as gl


def attention(fault: float = 1.0, raises: bool = False) -> Any:
    """One module on the baseline, two on the target."""
    attend = torch.nn.functional.scaled_dot_product_attention

    class Whole(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if raises:
                raise RuntimeError("in the forward")
            for _ in range(2):
                x = attend(x, x * fault, value=x)
            return x.softmax(-1)

    class Inner(Whole):
        pass

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = Whole() if gl.here().side == "baseline" else Outer()
    x = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(0))
    named = ("scaled_dot_product_attention", "softmax")
    with gl.watch(model, include="name == 'nothing'", functions=named):
        try:
            out = model(x).sum().item()
        except RuntimeError:
            out = None
        # Outside of the model the functions show nothing.
        attend(x, x, x)
    attend(x, x, x)
    return out


@pytest.mark.ranks
def test_inputs_and_outputs_of_a_function_pair_whatever_the_modules(session: gl.Session) -> None:
    frame = session.run(attention, attention).frame
    names = [f"scaled_dot_product_attention.{each}" for each in ("in[0]", "in[1]", "in.value", "out")]
    assert frame["name"].tolist() == [*names, *names, "softmax.in[0]", "softmax.out"]
    assert frame["occurrence"].tolist() == [0] * 4 + [1] * 4 + [0] * 2
    assert set(frame["status"]) == {"compared"}
    assert frame["rel_l2"].max() == 0


@pytest.mark.ranks
def test_function_receives_the_grafted_argument(session: gl.Session) -> None:
    session.edit(b2t="name == 'scaled_dot_product_attention.in[1]'")
    run = session.run(attention, lambda: attention(2.0))
    assert run.baseline == run.target
    assert run.frame.loc[run.frame["status"] == "grafted", "rel_l2"].tolist()[0] == pytest.approx(1.0)


@pytest.mark.ranks
def test_a_forward_that_raises_leaves_nothing_tapped(session: gl.Session) -> None:
    assert len(session.run(lambda: attention(raises=True), lambda: attention(raises=True)).frame) == 0


def test_functions_that_torch_has_not_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match=exactly("torch has no function 'scaled_product'; write 'scaled_dot_product_attention' or 'softmax'"),
    ):
        gl.watch(model, functions=["scaled_product"])
    # Some are nowhere but in torch.linalg.
    assert gl.watch(model, functions=["svdvals", "softmax"]).names == ["output"]
    with pytest.raises(TypeError, match=exactly("functions is a sequence of names, such as ('softmax',)")):
        gl.watch(model, functions="softmax")


def test_functions_are_tapped_until_the_models_call_ends_however_it_ends(recorder: Recorder) -> None:
    class Softmax(torch.nn.Module):
        def forward(self, x: torch.Tensor, fails: bool) -> torch.Tensor:
            x = x.softmax(-1)
            if fails:
                raise RuntimeError("in the forward")
            return x

    model, x = Softmax(), torch.ones(2)
    with gl.watch(model, functions=["softmax"], exclude="True"):
        model(x, False)
        with pytest.raises(RuntimeError, match="in the forward"):
            model(x, True)
        x.softmax(-1)
    assert recorder.names == ["softmax.in[0]", "softmax.out"] * 2
