"""Weights, gradients and optimizer state as taps: the same names and numbers for every kind of step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.recorder import Recorder
from kit.refusals import exactly
from kit.support import FSDP_ON_CPU, not_on, reset
from torch import nn

import graftlab as gl
from graftlab.taps import training
from graftlab.taps.training import tap_gradients


@pytest.fixture(scope="module")
def one_and_two() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        hidden = self.norm(torch.tanh(self.first(x)))
        out = self.last(hidden) + self.table
        return out if mask is None else out * mask


def made(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(size: int = 8) -> torch.Tensor:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(1))


def is_target() -> bool:
    me = gl.here()
    assert me is not None
    return me.side == "target"


def kinds(frame: Any) -> list[tuple[str, str]]:
    return list(zip(frame["name"], frame["kind"], strict=True))


# ---- weights and inputs ---------------------------------------------------------------------------------------------


def called(times: int, scale: float = 1.0) -> None:
    model = made()
    if is_target():
        model.first.weight.data *= scale
    with gl.watch(model, include="type == 'Net' or name == 'first.weight'", params=True, inputs=True):
        for _ in range(times):
            model(batch(), mask=torch.ones(4))


@pytest.mark.ranks
def test_weights_buffers_and_inputs_are_taps_before_the_values(session: gl.Session) -> None:
    frame = session.run(called, called, args=(1,)).frame
    assert [(name, kind if isinstance(kind, str) else "value") for name, kind in kinds(frame)] == [
        ("first.weight", "param"),
        ("table", "param"),
        ("input.x", "input"),
        ("input.mask", "input"),
        ("output", "value"),
    ]
    assert set(frame["status"]) == {"compared"}


@pytest.mark.ranks
def test_weights_are_shown_once_a_step(session: gl.Session) -> None:
    names = list(session.run(called, called, args=(3,)).frame["name"])
    assert names.count("first.weight") == 1
    assert names.count("input.x") == 3


def replaced(scale: float) -> list[float]:
    seen = []

    class Echo(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(float(x.sum()))
            return x

    given = torch.full((4,), scale if is_target() else 1.0)
    echo = Echo()
    with gl.watch(echo, inputs=True, exclude="True"):
        echo(given)
    return [*seen, float(given.sum())]


@pytest.mark.ranks
def test_grafted_input_is_replaced_without_changing_the_callers_tensor(session: gl.Session) -> None:
    session.edit(b2t="kind == 'input'")
    assert session.run(replaced, replaced, args=(3.0,)).target == [[4.0, 12.0]]


def wrapped() -> list[str]:
    model: Any = torch.compile(made(), backend="eager") if is_target() else made()
    with gl.watch(model, params=True, inputs=True, include="name in ('norm.weight', 'norm')"):
        model(batch())
    return gl.watch(model, params=True, include="name in ('norm.weight', 'norm')").names


@pytest.mark.ranks
def test_a_compiled_model_has_the_same_names(session: gl.Session) -> None:
    run = session.run(wrapped, wrapped)
    assert run.baseline == run.target == [["norm.weight", "norm"]]
    compared = run.frame[run.frame["status"] == "compared"]
    assert [n for n in compared["name"] if n != "norm"] == ["norm.weight", "input.x"]


# ---- a step of training ---------------------------------------------------------------------------------------------


def trained(ours: dict[str, Any], theirs: dict[str, Any], kind: str = "AdamW", parts: int = 1) -> None:
    """One training step; on the target with different options, the batch split into parts."""
    options, parts = (theirs, parts) if is_target() else (ours, 1)
    model = made()
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
    with gl.watch_training(model, optimizer):
        for part in batch().chunk(parts):
            (model(part).square().mean() / parts).backward()
        optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": False}])
def test_however_a_step_is_made_its_taps_are_the_same(session: gl.Session, options: dict[str, Any]) -> None:
    frame = session.run(trained, trained, args=({"foreach": False}, options)).frame
    assert set(frame["status"]) == {"compared"}
    assert frame["rel_l2"].max() < 1e-5
    of_weight = frame[frame["name"].str.startswith("first.weight")]
    assert kinds(of_weight) == [
        ("first.weight", "param_grad"),
        *((f"first.weight.{state}", "optimizer") for state in ("step", "exp_avg", "exp_avg_sq")),
        ("first.weight", "param"),
    ]
    settings = frame[frame["name"].str.startswith("optimizer.")]
    assert {"optimizer.lr", "optimizer.weight_decay", "optimizer.betas[0]", "optimizer.eps"} <= set(settings["name"])
    assert set(settings["shape"].map(tuple)) == {(6,)}


@pytest.mark.ranks
def test_gradients_are_shown_as_they_were_accumulated(session: gl.Session) -> None:
    frame = session.run(trained, trained, args=({}, {}, "SGD", 4)).frame
    gradients = frame[frame["kind"] == "param_grad"]
    assert len(gradients) == 6
    assert gradients["rel_l2"].max() < 1e-5


def scaled(fused: bool, grafted: float = 0.0) -> float:
    model = made()
    # The first step of Adam is the same for a gradient and its double.
    kind = torch.optim.SGD if grafted else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=is_target())
    with gl.watch_training(model, optimizer):
        scaler.scale(model(batch()).square().mean() * (2 if is_target() and grafted else 1)).backward()
        scaler.step(optimizer)
    scaler.update()
    return float(model.first.weight.sum())


@pytest.mark.ranks
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_shown_without_a_scalers_factor(session: gl.Session, fused: bool) -> None:
    frame = session.run(scaled, scaled, args=(fused,)).frame
    assert frame.loc[frame["kind"] == "param_grad", "rel_l2"].max() < 1e-5
    assert frame["rel_l2"].max() < 1e-4


@pytest.mark.ranks
def test_a_grafted_gradient_counts_under_a_scaler(session: gl.Session) -> None:
    session.edit(b2t="kind == 'param_grad'", compare=None)
    run = session.run(scaled, scaled, args=(True, 1.0))
    assert run.frame["rel_l2"].min() > 0.9
    assert run.baseline[0] == pytest.approx(run.target[0], rel=1e-5)


def distributed(how: str) -> None:
    import torch.distributed as dist

    model: Any = made()
    rows = batch()
    if is_target():
        me = gl.here()
        assert me is not None
        if how == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for part in (model.first, model.last, model):
                fully_shard(part, mesh=mesh)
        rows = rows.chunk(2)[me.rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=how == "fsdp2")
    values = "name in ('output', 'first', 'norm', 'last')"
    with gl.watch(model, params=True, exclude=values), gl.watch_training(model, optimizer):
        model(rows).square().mean().backward()
        optimizer.step()


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ddp", pytest.param("fsdp2", marks=not_on("2.6", FSDP_ON_CPU))])
def test_a_distributed_step_is_compared_with_one_of_a_single_process(one_and_two: gl.Session, how: str) -> None:
    frame = reset(one_and_two).run(distributed, distributed, args=(how,)).frame
    assert set(frame["status"]) == {"compared"}, frame[frame["status"] != "compared"][["name", "kind", "error"]]
    assert frame["rel_l2"].max() < 1e-4
    assert {"param", "param_grad", "optimizer"} <= set(frame["kind"])
    sliced = frame[(frame["name"] == "first.weight") & (frame["kind"] == "param_grad")]
    assert set(sliced["aligned_by"].fillna("")) == ({""} if how == "ddp" else {"layout"})


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_step_shows_settings_gradients_state_and_weights_in_their_order(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": [model[1].weight], "betas": (0.5, 0.25)}]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.125), fused=False)
    with gl.watch_training(model, optimizer, prefix="m.") as watched:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert watched.names == ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]
    shown = dict(recorder.shown)
    # One value for each trained weight; NaN for one that the optimizer does not have.
    assert torch.allclose(
        shown["m.optimizer.lr optimizer"], torch.tensor([0.5, 0.125, math.nan]).double(), equal_nan=True
    )
    assert shown["m.optimizer.betas[1] optimizer"][:2].tolist() == [0.999, 0.25]
    assert not any("foreach" in name or "fused" in name or "params" in name for name in shown)
    gradients = [name for name in recorder.names if name.endswith("param_grad")]
    assert sorted(gradients) == ["m.0.weight param_grad", "m.1.bias param_grad", "m.1.weight param_grad"]
    assert gradients[-1] == "m.0.weight param_grad", "the first layer's gradient is computed last"
    after = recorder.names[recorder.names.index(gradients[-1]) + 1 :]
    assert after[:4] == [
        f"m.0.weight{each}" for each in (".step optimizer", ".exp_avg optimizer", ".exp_avg_sq optimizer", " param")
    ]
    assert "m.0.bias param" not in after
    assert recorder.tags["m.0.weight param"] == {"kind": "param", "updated": True}


def test_gradients_come_in_the_order_of_their_own_steps_backward_pass(recorder: Recorder) -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gl.watch_training(model, optimizer):
        orders = []
        for weights in ((0, 1), (1, 0), (0,), ()):
            for which in weights:
                model[which].weight.sum().backward()
            recorder.shown.clear()
            optimizer.step()
            orders.append([name for name in recorder.names if name.endswith("param_grad")])
    first, last = "0.weight param_grad", "1.weight param_grad"
    # Those without a gradient in this step have that of an earlier one, the last weights first.
    assert orders == [[first, last], [last, first], [first, last], [last, first]]


@pytest.mark.parametrize("is_grafted", [False, True])
def test_a_scalers_factor_is_left_out_and_put_back_with_a_graft(is_grafted: bool, recorder: Recorder) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([0.1, 0.2, 0.3]) * 3
    given, before = weight.grad, weight.grad.clone()
    optimizer: Any = torch.optim.SGD([weight], lr=1.0)
    optimizer.grad_scale = torch.tensor(3.0)
    if is_grafted:
        recorder.grafts["w param_grad"] = lambda value: value + 1
    tap_gradients(recorder, optimizer, [("w", weight), ("none", nn.Parameter(torch.ones(1)))])
    assert weight.grad is given
    assert torch.equal(recorder.shown[0][1], before / 3)
    # Where nothing was grafted, dividing and multiplying again would round.
    assert torch.equal(given, ((before / 3 + 1) * 3) if is_grafted else before)
    optimizer.grad_scale = None
    recorder.grafts.clear()
    tap_gradients(recorder, optimizer, [("w", weight)])
    assert torch.equal(recorder.shown[1][1], before if not is_grafted else (before / 3 + 1) * 3)


def test_outside_a_session_nothing_of_training_is_hooked() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    with gl.watch_training(model, optimizer) as watched:
        assert "first.weight" in watched.names
        model(batch()).square().mean().backward()
        optimizer.step()
        hooked = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        hooked += [weight._post_accumulate_grad_hooks or {} for weight in model.parameters()]
        assert not any(hooked)
        assert not any(weight._backward_hooks for weight in model.parameters())


def test_the_names_of_watched_weights_are_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.taps, "tap_handler", lambda: object())
    model = made()
    with gl.watch_training(model, torch.optim.SGD(model.parameters())) as watched:
        assert watched.names == [name for name, _ in model.named_parameters()]


def test_optimizer_of_a_different_model_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=exactly(
            "gl.watch_training: none of the optimizer's 6 tensors is a weight of the model. Create the "
            "optimizer after the model is wrapped, sharded or moved"
        ),
    ):
        gl.watch_training(made(), torch.optim.SGD(made().parameters()))


def test_optimizers_foreign_tensors_warn() -> None:
    model = made()
    optimizer = torch.optim.SGD([*model.parameters(), torch.ones(2, requires_grad=True)])
    with pytest.warns(gl.GraftWarning, match="1 of the optimizer's 7 tensors are not weights of this model"):
        gl.watch_training(model, optimizer)


@pytest.mark.parametrize("given", [(None, None), (made(), None)])
def test_unwatchable_arguments_are_refused(given: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"gl.watch_training taps a torch"):
        gl.watch_training(*given)


# ---- the order of gradients ------------------------------------------------------------------------------------------


class NormDefinedLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


def backward_once() -> None:
    torch.manual_seed(0)
    model = NormDefinedLast()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gl.watch_training(model, optimizer):
        model(batch()).square().mean().backward()
        optimizer.step()


@pytest.mark.ranks
def test_gradients_of_weights_are_tapped_in_the_order_of_the_backward_pass(session: gl.Session) -> None:
    session.edit(compare="kind == 'param_grad'")
    frame = session.run(backward_once, backward_once).frame
    rows = frame[frame["status"] == "compared"].sort_values("order")
    modules = list(dict.fromkeys(name.split(".")[0] for name in rows["name"]))
    assert modules == ["head", "norm", "embed"]
