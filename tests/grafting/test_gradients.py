"""Taps of gradients: in the order of the backward pass, grafted out of place, absent without gradients."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld

import graftlab as gl
from graftlab.taps import calls
from graftlab.taps.routing import handled_by


class Recorder:
    """A handler that records each call, and grafts configured values."""

    def __init__(self, grafts: Callable[[str, Any], Any] = lambda name, value: value) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self._grafts = grafts

    def tap(self, name: str, value: Any, extras: Any, tags: Any, replace: bool = False) -> Any:
        self.calls.append((name, dict(tags)))
        return self._grafts(name, value) if tags.get("kind") == "grad" else value


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(calls, "_grafter", recorder)
    monkeypatch.setattr(calls, "_handler", recorder)
    return recorder


# ---- in this process ------------------------------------------------------------------------------------------------


def test_gradients_are_tapped_in_the_order_of_the_backward_pass(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    a = gl.tap("a", x * 2, grad=True, layer=1)
    gl.tap("b", a * 3, grad=True).sum().backward()
    assert recorder.calls == [
        ("a", {"layer": 1}),
        ("b", {}),
        ("b", {"kind": "grad"}),
        ("a", {"layer": 1, "kind": "grad"}),
    ]


def test_no_gradient_is_tapped_without_grad(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    gl.tap("a", x * 2).sum().backward()
    assert recorder.calls == [("a", {})]


def test_tensor_without_requires_grad_has_no_gradient_tap(recorder: Recorder) -> None:
    gl.tap("a", torch.ones(3), grad=True)
    gl.tap("number", 3, grad=True)
    with torch.no_grad():
        gl.tap("b", torch.ones(3, requires_grad=True) * 2, grad=True)
    assert [tags for _, tags in recorder.calls] == [{}, {}, {}]


def test_the_tags_around_a_tap_are_those_of_its_gradient(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    with gl.tags(phase="train"):
        y = gl.tap("a", x * 2, grad=True)
    y.sum().backward()
    assert recorder.calls[-1] == ("a", {"phase": "train", "kind": "grad"})


def test_backward_in_a_different_thread_uses_the_forwards_tap_handler(recorder: Recorder) -> None:
    own = Recorder()
    x = torch.ones(3, requires_grad=True)
    with handled_by(own):
        y = gl.tap("a", x * 2, grad=True).sum()
        thread = threading.Thread(target=y.backward)
        thread.start()
        thread.join()
    assert own.calls == [("a", {}), ("a", {"kind": "grad"})]
    assert recorder.calls == []


class Tapping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        gl.tap("inside", gradients[0])
        return gradients[0] * 2


def test_a_tap_on_the_engines_thread_has_the_handler_of_the_one_that_waits(recorder: Recorder) -> None:
    def run_in_thread(work: Callable[[], Any]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    # By its name, graftlab knows that the thread waits for the engine.
    def _engine_run_backward(work: Callable[[], Any]) -> None:
        run_in_thread(work)

    def without_a_frame(y: torch.Tensor) -> None:
        engine: Any = torch.autograd.Variable._execution_engine
        engine.run_backward((y,), (torch.ones(()),), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def made() -> torch.Tensor:
        tapped: torch.Tensor = Tapping.apply(torch.ones(3, requires_grad=True))  # type: ignore[no-untyped-call]
        return tapped.sum()

    own = Recorder()
    with handled_by(own):
        _engine_run_backward(functools.partial(without_a_frame, made()))
        assert (own.calls, recorder.calls) == ([("inside", {})], [])
        # Nor does this thread wait for the engine, or the other one is called by Python.
        run_in_thread(functools.partial(without_a_frame, made()))
        _engine_run_backward(made().backward)
    assert (own.calls, recorder.calls) == ([("inside", {})], [("inside", {})] * 2)


def test_no_hook_is_installed_outside_a_session() -> None:
    x = torch.ones(3, requires_grad=True)
    y = gl.tap("a", x * 2, grad=True)
    assert not y._backward_hooks


# ---- taps in a user's hooks ------------------------------------------------------------------------------------------


def branches_with_a_hook(
    rank: Any, upstream: float, *, hook: Callable[[Callable[[Any], Any]], Callable[..., Any]]
) -> tuple[float, float]:
    """y = a + b, whose branches share one gradient in autograd. ``hook`` makes b's hook from a function that taps."""
    x, z = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    a, b = x * 1, z * 1
    b.register_hook(hook(lambda gradient: rank.tap("gradient", gradient)))
    ((a + b) * upstream).backward()
    return x.grad.item(), z.grad.item()


def test_a_gradient_tapped_in_a_hook_is_replaced_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrafterWorld(b2t="True")
    returned = functools.partial(branches_with_a_hook, hook=lambda tap: tap)
    assert returned(world.baseline, 16.0) == (16.0, 16.0)
    with pytest.warns(gl.GraftWarning, match="only gl.tap's result has the graft; return that from the hook"):
        assert returned(world.target, 1.0) == (1.0, 16.0)
    assert [row.status for row in world.rows] == ["grafted"]


@pytest.mark.parametrize(
    "hook",
    [
        lambda tap: lambda g: tap(g.view(1)).view(()),
        lambda tap: lambda *gradients, number=0: tap(gradients[number].view(1)).view(()),
    ],
    ids=["one argument", "any arguments"],
)
def test_a_view_of_a_gradient_in_a_helper_of_the_hook_is_not_written_either(hook: Any) -> None:
    world = GrafterWorld(b2t="True")
    in_a_view = functools.partial(branches_with_a_hook, hook=hook)
    in_a_view(world.baseline, 16.0)
    with pytest.warns(gl.GraftWarning, match="return that from the hook"):
        assert in_a_view(world.target, 1.0) == (1.0, 16.0)


def test_a_gradient_among_several_arguments_of_a_backward_is_not_written() -> None:
    world = GrafterWorld(b2t="True")

    def gradients_of(rank: Any, scale: float) -> tuple[float, float]:
        class Passed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return x.clone(), x.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
                return rank.tap("second", gradients[1])

        x, y = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
        # The engine passes one tensor to both summands.
        ((Passed.apply(x)[1] + y) * scale).backward()
        return x.grad.item(), y.grad.item()

    assert gradients_of(world.baseline, 16.0) == (16.0, 16.0)
    with pytest.warns(gl.GraftWarning, match="only gl.tap's result has the graft"):
        assert gradients_of(world.target, 1.0) == (16.0, 1.0)


def test_a_tensor_that_a_backward_made_itself_is_written_in_place() -> None:
    world = GrafterWorld(b2t="True")

    def gradient_of(rank: Any, scale: float) -> float:
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x * scale

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                own = gradient * scale
                rank.tap("own", own)
                return own

        x = torch.ones((), requires_grad=True)

        def accumulated(leaf: torch.Tensor) -> None:
            rank.tap("accumulated", leaf.grad)

        x.register_post_accumulate_grad_hook(accumulated)
        Scaled.apply(x).backward()
        return x.grad.item()

    assert gradient_of(world.baseline, 5.0) == 5.0
    assert gradient_of(world.target, 7.0) == 5.0
    assert [row.status for row in world.rows] == ["grafted"] * 2


# ---- grafts, on ranks -----------------------------------------------------------------------------------------------


def added_branches() -> tuple[float, float]:
    """y = a + b, whose branches share one gradient tensor in autograd; b, made last, has it first, and is tapped."""
    x, z = torch.ones((), requires_grad=True), torch.ones((), requires_grad=True)
    a, b = x * 1, z * 1
    b = gl.tap("b", b, grad=True)
    upstream = 16.0 if gl.here().side == "baseline" else 1.0
    ((a + b) * upstream).backward()
    return x.grad.item(), z.grad.item()


@pytest.mark.ranks
def test_a_gradient_that_branches_share_is_not_written(session: gl.Session) -> None:
    session.edit(b2t="kind == 'grad'", compare=None)
    run = session.run(added_branches, added_branches)
    assert run.baseline == [(16.0, 16.0)]
    # b's gradient is the baseline's; a's stays the target's own, as would not be so had the shared tensor been written.
    assert run.target == [(1.0, 16.0)]
    (row,) = run.frame.to_dict("records")
    assert (row["name"], row["kind"], row["status"]) == ("b", "grad", "grafted")


def leafs_gradient() -> float:
    x = torch.ones((), requires_grad=True)
    gain = 5.0 if gl.here().side == "baseline" else 7.0
    gl.tap("x", x, grad=True)
    (x * gain).backward()
    return x.grad.item()


@pytest.mark.ranks
def test_the_gradient_of_a_leaf_is_grafted_into_its_grad(session: gl.Session) -> None:
    session.edit(b2t="kind == 'grad'", compare=None)
    assert session.run(leafs_gradient, leafs_gradient).target == [5.0]


def watched(grads: bool) -> tuple[list[str], float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
    x = torch.ones(1, 2, requires_grad=True)
    gain = 2.0 if gl.here().side == "baseline" else 3.0
    with gl.watch(model, grads=grads):
        (model(x).sum() * gain).backward()
    return x.grad.sum().item()


@pytest.mark.ranks
def test_watch_taps_the_gradient_of_each_output(session: gl.Session) -> None:
    session.edit(b2t="kind == 'grad'", compare="True")
    run = session.run(watched, watched, args=(True,))
    frame = run.frame
    assert frame["name"].tolist() == ["0", "1", "output", "1", "output", "0"] or frame["name"].tolist() == [
        *("0", "1", "output", "output", "1", "0")
    ]
    assert frame["kind"].fillna("value").tolist() == ["value"] * 3 + ["grad"] * 3
    assert run.target == pytest.approx(run.baseline)
    assert session.run(watched, watched, args=(False,)).frame["name"].tolist() == ["0", "1", "output"]
