"""Small programs of the zoo, each with a fault of one kind: recurrences, convolutions, normalisation, attention.

A program is a function of one flag: whether it is wrong, or, for a benign variant, whether it computes the same
differently. It taps its own tensors, draws its own weights, and runs in a few milliseconds. Its truth is written down
beforehand: the groups that a verdict must name, or words that its first sentence must contain.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.taps.calls import tap
from graftlab.taps.watch import watch

Body = Callable[[bool], object]


@dataclass(frozen=True)
class Program:
    """One program of the zoo.

    ``truth`` are the groups that a verdict must name. ``says``, for a fault that no tap can show, are phrases; the
    verdict's first sentence must contain one of them. Of a benign variant, ``cancels`` are groups whose effects cancel
    each other, and ``minor`` are groups that differ without any effect: a verdict may report just that.
    """

    name: str
    area: str
    body: Body
    truth: frozenset[str] = frozenset()
    says: tuple[str, ...] = ()
    cancels: frozenset[str] = frozenset()
    minor: frozenset[str] = frozenset()
    is_benign: bool = False
    regime: str = "program"


PROGRAMS: list[Program] = []
CALLS: Counter[str] = Counter()
"""How often this process has called each program that counts its calls."""


def fault(area: str, *truth: str, says: tuple[str, ...] = ()) -> Callable[[Body], Body]:
    """Register a faulty program. Its name names the specimen, its docstring states the fault."""

    def register(body: Body) -> Body:
        PROGRAMS.append(Program(body.__name__, area, body, frozenset(truth), says))
        return body

    return register


def benign(area: str, *cancels: str, minor: tuple[str, ...] = ()) -> Callable[[Body], Body]:
    """Register a program whose flag changes its arithmetic and not its mathematics."""

    def register(body: Body) -> Body:
        program = Program(body.__name__, area, body, cancels=frozenset(cancels), minor=frozenset(minor), is_benign=True)
        PROGRAMS.append(program)
        return body

    return register


def forget_calls() -> None:
    """Let every program count its calls from zero again."""
    CALLS.clear()


def count_call(name: str) -> int:
    """The number of earlier calls in this process, from 0."""
    CALLS[name] += 1
    return CALLS[name] - 1


def draws(seed: int) -> Callable[..., Tensor]:
    """A function from a shape to the next random tensor, scaled as a layer's weights are."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])


# ---- state space models ---------------------------------------------------------------------------------------------


def scan(decay: Tensor, inputs: Tensor, reset_every: int | None = None) -> Tensor:
    """The states [time, ...] of ``state = decay * state + input``; zeroed every ``reset_every`` steps."""
    state, states = torch.zeros_like(inputs[0]), []
    for at in range(inputs.shape[0]):
        state = inputs[at] + (0 if reset_every and at % reset_every == 0 else decay[at] * state)
        states.append(state)
    return torch.stack(states)


def ssm(draw: Callable[..., Tensor], wrong: str) -> Tensor:
    """Two Mamba layers over 24 steps, 8 channels and 4 states, with the fault named ``wrong`` in the second."""
    x, log_decay = draw(24, 8) * 3, torch.arange(1.0, 5.0).log()
    for i in range(2):
        is_here, w_dt, w_b, w_c, skip = i == 1, draw(8, 8), draw(4, 8), draw(4, 8), draw(8) + 1
        raw = x @ w_dt.T
        dt = tap(f"layers.{i}.dt", raw.exp() if wrong == "softplus" and is_here else F.softplus(raw))
        b, c = tap(f"layers.{i}.b", x @ w_b.T), tap(f"layers.{i}.c", x @ w_c.T)
        decay = -log_decay.exp() * dt[..., None]
        decay = tap(f"layers.{i}.decay", 1 + decay if wrong == "euler" and is_here else decay.exp())
        inputs = tap(f"layers.{i}.inputs", (dt * x)[..., None] * b[:, None])
        states = tap(f"layers.{i}.states", scan(decay, inputs, 8 if wrong == "chunks" and is_here else None))
        y = tap(f"layers.{i}.y", (states * c[:, None]).sum(-1))
        x = tap(f"layers.{i}.out", F.layer_norm(x + y + (0 if wrong == "skip" and is_here else skip * x), (8,)))
    return x


@fault("ssm", "layers.*.dt")
def ssm_step_size_without_softplus(wrong: bool) -> object:
    """The step size is exponentiated."""
    return ssm(draws(1), "softplus" if wrong else "")


@fault("ssm", "layers.*.decay")
def ssm_discretised_by_euler(wrong: bool) -> object:
    """The decay is 1 + dt * A, not exp(dt * A)."""
    return ssm(draws(2), "euler" if wrong else "")


@fault("ssm", "layers.*.states")
def ssm_state_lost_between_chunks(wrong: bool) -> object:
    """A chunked scan begins each chunk from zero."""
    return ssm(draws(3), "chunks" if wrong else "")


@fault("ssm", "layers.*.out")
def ssm_without_its_skip(wrong: bool) -> object:
    """The direct path D * x is missing."""
    return ssm(draws(4), "skip" if wrong else "")


# ---- convolutions ---------------------------------------------------------------------------------------------------


@fault("convolution", "conv2")
def convolution_padded_by_reflection(wrong: bool) -> object:
    """The second convolution reflects the image at its border, which should be zero."""
    draw = draws(5)
    x = tap("conv1", F.conv2d(draw(2, 3, 10, 10) * 3, draw(6, 3, 3, 3), padding=1))
    padded = F.pad(F.relu(x), (1, 1, 1, 1), mode="reflect" if wrong else "constant")
    x = tap("conv2", F.conv2d(padded, draw(6, 6, 3, 3)))
    return tap("out", x.mean((2, 3)) @ draw(5, 6).T)


@fault("convolution", "layers.*.conv")
def causal_convolution_one_step_late(wrong: bool) -> object:
    """One layer's causal convolution does not see the present step."""
    draw = draws(6)
    x = draw(2, 8, 20) * 4
    for i in range(3):
        padded = F.pad(x, (4, 0) if wrong and i == 2 else (3, 0))[..., :23]
        x = tap(f"layers.{i}.out", x + F.silu(tap(f"layers.{i}.conv", F.conv1d(padded, draw(8, 1, 4), groups=8))))
    return x.mean(-1)


@fault("convolution", "up")
def transposed_convolution_flipped(wrong: bool) -> object:
    """The kernel of an upsampling convolution is converted with its sides mirrored."""
    draw = draws(7)
    x = tap("down", F.conv2d(draw(1, 3, 8, 8) * 3, draw(4, 3, 2, 2), stride=2))
    kernel = draw(4, 3, 2, 2)
    x = tap("up", F.conv_transpose2d(x.tanh(), kernel.flip(-1) if wrong else kernel, stride=2))
    return tap("out", x.sigmoid())


# ---- normalisation in both modes ------------------------------------------------------------------------------------


def watched(model: nn.Module, x: Tensor, seed: int) -> object:
    """The model's output, with each module's output tapped, and weights that depend on the seed alone."""
    draw = draws(seed)
    for weight in model.parameters():
        weight.copy_(draw(*weight.shape) + (1 if weight.ndim == 1 else 0))
    with watch(model):
        return model(x)


def cnn() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Flatten()
    )


@fault("batch norm", "*")
def batch_norm_left_in_eval(wrong: bool) -> object:
    """In training, one norm uses its running statistics. All members of a Sequential are one group."""
    model = cnn()
    model[4].train(not wrong)
    return watched(model, draws(8)(4, 3, 8, 8) * 5 + 0.5, 8)


@fault("batch norm", "norm")
def batch_norm_momentum_turned_around(wrong: bool) -> object:
    """Running statistics keep 10 %, not 90 %: two training steps agree, and the evaluation after them does not."""
    draw = draws(9)
    norm, weight = nn.BatchNorm1d(8, momentum=0.9 if wrong else 0.1), draw(8, 8)
    for is_training in (True, True, False):
        x = tap("linear", (draw(6, 8) * 3 + 1) @ weight.T)
        x = tap("out", tap("norm", norm.train(is_training)(x)).tanh())
    return x


@fault("batch norm", "norm")
def batch_norm_with_tensorflows_eps(wrong: bool) -> object:
    """In evaluation, the variance is small and eps is 1e-3 rather than 1e-5."""
    draw = draws(10)
    x = tap("linear", draw(6, 8) * 0.1 @ draw(8, 8).T)
    norm = nn.BatchNorm1d(8, eps=1e-3 if wrong else 1e-5).eval()
    assert norm.running_var is not None
    norm.running_var.fill_(0.01)
    return tap("out", tap("norm", norm(x)) @ draw(4, 8).T)


@fault("batch norm", "norm")
def batch_norm_over_padding(wrong: bool) -> object:
    """In training, the statistics include the padded steps of short sequences."""
    draw = draws(11)
    x, real = tap("linear", draw(3, 6, 8) * 3 + 1), torch.arange(6) < torch.tensor([[6], [4], [2]])
    seen = x[torch.ones_like(real) if wrong else real]
    x = tap("norm", (x - seen.mean(0)) / (seen.var(0, correction=0) + 1e-5).sqrt())
    return tap("out", (x * real[..., None]).sum(1))


@fault("group norm", "norm")
def group_norm_in_other_groups(wrong: bool) -> object:
    """Channels are interleaved over the groups."""
    draw = draws(12)
    x = tap("conv", F.conv2d(draw(2, 3, 6, 6) * 3, draw(8, 3, 3, 3)))
    if wrong:
        x = F.group_norm(torch.unflatten(x, 1, (4, 2)).transpose(1, 2).flatten(1, 2), 2)
        x = tap("norm", torch.unflatten(x, 1, (2, 4)).transpose(1, 2).flatten(1, 2))
    else:
        x = tap("norm", F.group_norm(x, 2))
    return tap("out", F.silu(x).mean((2, 3)))


# ---- recurrent networks ---------------------------------------------------------------------------------------------


def lstm(draw: Callable[..., Tensor], x: Tensor, order: str = "ifgo", forget: float = 0.0) -> Tensor:
    """The hidden states [time, channels] of an LSTM by hand, whose gates are stored in ``order``."""
    channels = x.shape[-1]
    w_x, w_h = draw(4 * channels, channels), draw(4 * channels, channels)
    hidden = cell = torch.zeros(channels)
    states = []
    for step in x:
        gates = tap("gates", w_x @ step + w_h @ hidden)
        gate = dict(zip(order, gates.chunk(4), strict=True))
        kept = (gate["f"] + forget).sigmoid() * cell
        cell = tap("cell", kept + gate["i"].sigmoid() * gate["g"].tanh())
        hidden = tap("hidden", gate["o"].sigmoid() * cell.tanh())
        states.append(hidden)
    return torch.stack(states)


@fault("lstm", "cell", "hidden")
def lstm_gates_in_the_order_of_cudnn(wrong: bool) -> object:
    """The weights of the gates are read as i, f, o, g."""
    draw = draws(13)
    return lstm(draw, draw(8, 8) * 3, "ifog" if wrong else "ifgo")


@fault("lstm", "cell")
def lstm_forget_bias_added_twice(wrong: bool) -> object:
    """A conversion adds the forget gate's bias of 1, which the weights contain already."""
    draw = draws(14)
    return lstm(draw, draw(8, 8) * 3, forget=1.0 if wrong else 0.0)


@fault("lstm", "output[0]", "output[1][0]", "output[1][1]")
def lstm_hidden_state_reversed_in_time(wrong: bool) -> object:
    """A watched bidirectional LSTM whose target processes the sequence from its end, and returns it so."""
    model = nn.LSTM(6, 5, bidirectional=True)
    x = draws(15)(7, 2, 6) * 3
    return watched(model, x.flip(0) if wrong else x, 15)
