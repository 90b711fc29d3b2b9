"""Grafts under autograd: what the backward pass sees, also with checkpointing and ``torch.compile``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import graftlab as gl

POINT = [0.5, -1.0, 2.0]


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def slope() -> float:
    return 3.0 if gl.here().side == "baseline" else 5.0


def gradient_through(upstream: str, downstream: str, how: str) -> tuple[list[float], list[float]]:
    """``downstream(tap(upstream(x)))``: the tapped value and the gradient of x."""
    x = torch.tensor(POINT, requires_grad=True)
    h = UPSTREAM[upstream](x, slope())
    if how == "statement":
        gl.tap("h", h)
    else:
        h = gl.tap("h", h)
    y = DOWNSTREAM[downstream](h)
    y.sum().backward()
    return h.detach().clone().tolist(), x.grad.tolist()


UPSTREAM = {
    # Keeps nothing of its output.
    "mul": lambda x, a: x * a,
    "linear": lambda x, a: torch.nn.functional.linear(x, a * (torch.eye(3) + 0.25)),
    # These keep their output for the backward.
    "exp": lambda x, a: torch.exp(x * a / 10),
    "tanh": lambda x, a: torch.tanh(x * a),
    "softmax": lambda x, a: torch.softmax(x * a, 0),
    "relu": lambda x, a: torch.relu(x * (a - 4)),
    # A view of what it kept.
    "view of exp": lambda x, a: torch.exp(x * a / 10).view(3, 1)[:, 0],
}
DOWNSTREAM = {
    "square": lambda h: h**2,
    "matmul": lambda h: torch.outer(h, h),
    "exp": lambda h: h.exp(),
}


def replaced_by_watch(upstream: str) -> tuple[list[float], list[float], list[float], bool]:
    """The module keeps the very tensor that it returned; a graft must not write into it."""

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.own = UPSTREAM[upstream](x, slope())
            return self.own

    model = Block()
    x = torch.tensor(POINT, requires_grad=True)
    with gl.watch(model):
        h = model(x)
    (h**2).sum().backward()
    return h.detach().tolist(), model.own.detach().tolist(), x.grad.tolist(), h is model.own


def graft_a_parameter() -> dict[str, Any]:
    linear = torch.nn.Linear(3, 3, bias=False)
    torch.nn.init.constant_(linear.weight, slope())
    before = linear.weight
    returned = gl.tap("weight", linear.weight)
    x = torch.tensor(POINT)
    linear(x).sum().backward()
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    optimizer.step()
    return {
        "same": returned is before and linear.weight is before,
        "leaf": linear.weight.is_leaf and linear.weight.requires_grad,
        "gradient": linear.weight.grad[0].tolist(),
        "after the step": linear.weight[0].tolist(),
    }


def checkpointed(use_reentrant: bool) -> list[float]:
    x = torch.tensor(POINT, requires_grad=True)

    def segment(x: torch.Tensor) -> torch.Tensor:
        h = x * slope()
        h = gl.tap("inside", h)
        return h**2

    y = checkpoint(segment, x, use_reentrant=use_reentrant)
    y = gl.tap("outside", y)
    y.sum().backward()
    return x.grad.tolist()


def tapped_in_hooks() -> None:
    x = torch.tensor(POINT, requires_grad=True)
    h = x * 2
    h.register_hook(lambda gradient: gl.tap("gradient", gradient))
    h.sum().backward()


class Tapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.linspace(-1.0, 1.0, parameter.numel()).view_as(parameter) + number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with gl.tags(phase="prefill"):
            h = gl.tap("hidden", self.first(x), layer=0)
        return gl.tap("out", self.second(h).relu())


def compiled_forward(scale: float) -> list[float]:
    """The compiled model lives as long as the rank, so that later runs meet the code compiled in the first."""
    here = gl.here()
    if "compiled" not in here.vars:
        here.vars["compiled"] = torch.compile(Tapped(), backend="eager")
    x = torch.tensor(POINT) * (1.0 if here.side == "baseline" else scale)
    return here.vars["compiled"](x).tolist()


# ---- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["returned", "statement"])
@pytest.mark.parametrize("downstream", DOWNSTREAM)
@pytest.mark.parametrize("upstream", ["mul", "linear"])
def test_upstream_gradients_are_those_of_h_plus_detached_difference(
    upstream: str, downstream: str, how: str, session: gl.Session
) -> None:
    session.edit(b2t="True")
    run = session.run(gradient_through, gradient_through, args=(upstream, downstream, how))

    x = torch.tensor(POINT, requires_grad=True)
    received = UPSTREAM[upstream](torch.tensor(POINT), 3.0)
    own = UPSTREAM[upstream](x, 5.0)
    DOWNSTREAM[downstream](own + (received - own).detach()).sum().backward()
    value, gradient = run.target[0]
    assert value == received.tolist()
    torch.testing.assert_close(torch.tensor(gradient), x.grad)
    # A gradient that a plain copy_ would have cut off.
    assert x.grad.abs().min() > 0


@pytest.mark.ranks
@pytest.mark.parametrize("upstream", ["exp", "tanh", "softmax", "relu", "view of exp"])
def test_earlier_op_that_saved_the_tensor_sees_the_grafted_value(upstream: str, session: gl.Session) -> None:
    session.edit(b2t="True")
    run = session.run(gradient_through, gradient_through, args=(upstream, "square", "returned"))
    value, gradient = run.target[0]

    received = UPSTREAM[upstream](torch.tensor(POINT), 3.0)
    assert value == received.tolist()
    # d(sum h^2)/dh = 2h, then each op's own backward formula, in terms of its output.
    after = 2 * received
    through = {
        "exp": after * received * 0.5,
        "view of exp": after * received * 0.5,
        "tanh": after * (1 - received**2) * 5.0,
        "softmax": received * (after - (after * received).sum()) * 5.0,
        "relu": after * (received > 0) * 1.0,
    }[upstream]
    torch.testing.assert_close(torch.tensor(gradient), through)


@pytest.mark.ranks
def test_comparison_does_not_change_gradients(session: gl.Session) -> None:
    run = session.run(gradient_through, gradient_through, args=("exp", "square", "returned"))
    x = torch.tensor(POINT, requires_grad=True)
    (UPSTREAM["exp"](x, 5.0) ** 2).sum().backward()
    torch.testing.assert_close(torch.tensor(run.target[0][1]), x.grad)


@pytest.mark.ranks
@pytest.mark.parametrize("upstream", ["exp", "mul"])
def test_watch_replaces_the_output_and_keeps_the_modules_tensor(upstream: str, session: gl.Session) -> None:
    session.edit(b2t="True")
    run = session.run(replaced_by_watch, replaced_by_watch, args=(upstream,))
    returned, kept, gradient, same = run.target[0]

    x = torch.tensor(POINT, requires_grad=True)
    received = UPSTREAM[upstream](torch.tensor(POINT), 3.0)
    own = UPSTREAM[upstream](x, 5.0)
    assert returned == received.tolist()
    assert kept == own.tolist()
    assert not same
    # The module's own backward works on what it made, not on the graft.
    ((own + (received - own).detach()) ** 2).sum().backward()
    torch.testing.assert_close(torch.tensor(gradient), x.grad)
    # The sender's own output passes through as it is.
    assert run.baseline[0][3]


@pytest.mark.ranks
def test_a_leaf_parameter_can_be_grafted(session: gl.Session) -> None:
    session.edit(b2t="True")
    result = session.run(graft_a_parameter, graft_a_parameter).target[0]
    assert result["same"]
    assert result["leaf"]
    assert result["gradient"] == POINT
    # 3.0 came from the baseline; the optimizer steps from there.
    assert result["after the step"] == [3.0 - value for value in POINT]


# ---- checkpointing --------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recompute_status_distinguishes_recomputed_and_original_forward(
    use_reentrant: bool, session: gl.Session
) -> None:
    run = session.run(checkpointed, checkpointed, args=(use_reentrant,))
    frame = run.frame
    assert list(zip(frame["name"], frame["recompute_status"], frame["status"], strict=True)) == [
        ("inside", "original", "compared"),
        ("outside", "original", "compared"),
        ("inside", "recompute", "compared"),
    ]
    # Each is a first occurrence: the recomputation does not count on from the original.
    assert frame["occurrence"].tolist() == [0, 0, 0]


@pytest.mark.ranks
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_filters_can_graft_both_or_either_pass(use_reentrant: bool, session: gl.Session) -> None:
    x = torch.tensor(POINT)
    session.edit(b2t="name == 'inside'")
    run = session.run(checkpointed, checkpointed, args=(use_reentrant,))
    # d(h^2)/dx = 2 h * 5, h = 3x from the baseline.
    torch.testing.assert_close(torch.tensor(run.target[0]), 2 * 3 * x * 5)

    session.edit(b2t="name == 'inside' and recompute_status == 'original'")
    run = session.run(checkpointed, checkpointed, args=(use_reentrant,))
    # The backward works on the recomputed h = 5x.
    torch.testing.assert_close(torch.tensor(run.target[0]), 2 * 5 * x * 5)
    assert run.frame["status"].tolist() == ["grafted", "compared", "compared"]

    session.edit(b2t="recompute_status == 'recompute'")
    run = session.run(checkpointed, checkpointed, args=(use_reentrant,))
    torch.testing.assert_close(torch.tensor(run.target[0]), 2 * 3 * x * 5)
    assert run.frame["status"].tolist() == ["compared", "compared", "grafted"]


@pytest.mark.ranks
def test_tap_in_a_backward_hook_is_not_a_recomputation(session: gl.Session) -> None:
    run = session.run(tapped_in_hooks, tapped_in_hooks)
    assert run.frame["name"].tolist() == ["gradient"]
    assert run.frame["recompute_status"].tolist() == ["original"]


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_tap_in_a_compiled_model_works_and_breaks_no_graph_without_a_session() -> None:
    model = Tapped()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.tensor(POINT)
    assert compiled(x).equal(model(x))


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:this plan does nothing")
def test_a_tap_in_a_compiled_model_works_in_a_session_under_every_plan(session: gl.Session) -> None:
    model = Tapped()
    x = torch.tensor(POINT)
    expected, other = model(x).tolist(), model(2 * x).tolist()
    assert expected != other

    run = session.run(compiled_forward, compiled_forward, args=(2.0,))
    assert run.target == [other]
    assert run.frame[["name", "status"]].values.tolist() == [["hidden", "compared"], ["out", "compared"]]
    assert run.frame["layer"].tolist()[0] == 0
    assert run.frame["phase"].tolist()[0] == "prefill"

    # The code was compiled under another plan, and must not remember its decisions.
    session.edit(b2t="name == 'hidden' and phase == 'prefill'")
    run = session.run(compiled_forward, compiled_forward, args=(2.0,))
    assert run.target == [expected]
    assert run.frame["status"].tolist() == ["grafted", "compared"]
    assert run.frame["max_abs"].tolist()[1] == 0.0

    session.edit(b2t=None, t2b="name == 'out'", compare=None)
    run = session.run(compiled_forward, compiled_forward, args=(2.0,))
    assert run.baseline == run.target == [other]
    assert run.frame[["name", "side", "status"]].values.tolist() == [["out", "baseline", "grafted"]]

    session.edit(t2b=None)
    run = session.run(compiled_forward, compiled_forward, args=(3.0,))
    assert run.baseline == [expected]
    assert len(run.frame) == 0


@pytest.mark.ranks
def test_a_compiled_model_keeps_its_taps_apart_by_step(session: gl.Session) -> None:
    def steps() -> list[list[float]]:
        outputs = []
        for _ in range(3):
            outputs.append(compiled_forward(2.0))
            gl.step()
        return outputs

    session.edit(b2t="name == 'out' and step % 2 == 0")
    run = session.run(steps, steps)
    out = run.frame[run.frame["name"] == "out"]
    assert out["status"].tolist() == ["grafted" if step % 2 == 0 else "compared" for step in out["step"]]
    assert (out["step"] - out["step"].iloc[0]).tolist() == [0, 1, 2]
    assert out["occurrence"].tolist() == [0, 0, 0]
