"""Lines that only one side has: the change that is proposed makes the sides agree, and names that line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.lines.dataflow import Dataflow
from graftlab.lines.first_lost import first_lost
from graftlab.lines.operations import OperationRecorder
from graftlab.lines.remedies import LostPart, Remedy, _of_same_shape
from graftlab.lines.traces import SliceTrace, slice_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
Function = Callable[[Tensor], Tensor]


def trace(function: Function, recorder: OperationRecorder | None = None) -> tuple[SliceTrace, Tensor]:
    """The operations between an input that counts as a tap and the result."""
    recorder = recorder or OperationRecorder()
    with recorder:
        x = X.clone()
        recorder.set_by_tap(x, "x", changed=False)
        result = function(x)
        number = recorder.read(result)
    return slice_of(recorder, number), result


def remedies(baseline: Function, target: Function) -> list[Remedy]:
    return first_lost([trace(baseline)[0]], [trace(target)[0]], 0).remedies


def cures(remedy: Remedy, baseline: Function, target: Function) -> bool:
    """Whether the target agrees with the baseline after the change."""
    theirs = OperationRecorder()
    shown: dict[int, Tensor] = {}

    def show(index: int) -> Callable[[Tensor], Tensor]:
        return lambda result: shown.setdefault(index, result.clone())

    partners = [each for each in (remedy.partner, *remedy.grafted.values()) if each is not None]
    theirs.replaced.update({index: show(index) for index in partners})
    expected = trace(baseline, theirs)[1]
    ours = OperationRecorder()
    ours.passed.update(remedy.passed)
    for index, number in remedy.fed.items():
        assert remedy.partner is not None
        ours.fed[index] = (number, lambda value: shown[remedy.partner].reshape(value.shape))  # type: ignore[index]
    for index, partner in remedy.grafted.items():
        ours.replaced[index] = lambda result, partner=partner: shown[partner].reshape(result.shape)  # type: ignore[misc]
    assert {*remedy.changes} == {*ours.passed, *ours.fed, *ours.replaced}, "every operation that the run changes"
    return torch.allclose(trace(target, ours)[1], expected, atol=1e-6)


def project(x: Tensor) -> Tensor:
    return (x @ WEIGHT).tanh()


def scaled(x: Tensor) -> Tensor:
    x = x * 1.05
    return (x @ WEIGHT).tanh()


def clamped_in_place(x: Tensor) -> Tensor:
    x = x + 1
    x.clamp_(max=1.0)
    return (x @ WEIGHT).tanh()


def raised(x: Tensor) -> Tensor:
    x = x + 1
    return (x @ WEIGHT).tanh()


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * 0.8 - second * 0.6, second * 0.8 + first * 0.6], -1)


def turned_once(x: Tensor) -> Tensor:
    return F.relu(turned(x))


def turned_twice(x: Tensor) -> Tensor:
    x = turned(turned(x))
    return F.relu(x)


@pytest.mark.parametrize(
    ("baseline", "target", "line"),
    [
        (project, scaled, "x = x * 1.05"),
        (raised, clamped_in_place, "x.clamp_(max=1.0)"),
        (turned_once, turned_twice, "x = turned(turned(x))"),
    ],
)
def test_an_operation_of_only_the_target_is_left_out(baseline: Function, target: Function, line: str) -> None:
    found = remedies(baseline, target)
    helping = [each for each in found if cures(each, baseline, target)]
    assert {each.operation.frames[0].source for each in helping} == {line}
    assert all(each.side == "target" and each.is_one_sided for each in helping)
    # What is left out is certain to be right only after a run.
    assert not any(each.is_certain for each in found)


@pytest.mark.parametrize(
    ("baseline", "target", "line"), [(scaled, project, "x = x * 1.05"), (clamped_in_place, raised, "x.clamp_(max=1.0)")]
)
def test_an_operation_that_the_target_lacks_is_put_in(baseline: Function, target: Function, line: str) -> None:
    helping = [each for each in remedies(baseline, target) if cures(each, baseline, target)]
    assert {(each.side, each.operation.frames[0].source) for each in helping} == {("baseline", line)}
    assert all(each.reader is not None and each.reader.index == min(each.fed) for each in helping)
    assert all(each.reader is None for each in remedies(target, baseline) if each.side == "target")


def test_a_last_operation_that_the_target_lacks_needs_no_run() -> None:
    def halved(x: Tensor) -> Tensor:
        return project(x) / 2

    (found,) = remedies(halved, project)
    assert (found.side, found.is_certain) == ("baseline", True)
    assert found.operation.frames[0].source == "return project(x) / 2"
    # Two operations on two lines: neither alone is what the target lacks.
    assert not any(each.is_certain for each in remedies(lambda x: halved(x).sin(), project))

    def sorted_later(x: Tensor) -> Tensor:
        h = project(x) / 2
        return h.roll(1, 0)

    # The first of two has all of the result's numbers, in another order.
    assert not any(each.is_certain for each in remedies(sorted_later, project))


def test_a_line_that_computes_in_another_order_is_replaced_as_a_whole() -> None:
    def inside(x: Tensor) -> Tensor:
        return F.relu(x.tanh() + X) * 2

    def outside(x: Tensor) -> Tensor:
        return (F.relu(x.tanh()) + X) * 2

    helping = [each for each in remedies(inside, outside) if each.grafted and cures(each, inside, outside)]
    assert [each.operation.frames[0].source for each in helping] == ["return (F.relu(x.tanh()) + X) * 2"]
    # The result of a collective may arrive after it has returned.
    (one, _), (other, _) = trace(inside), trace(outside)
    *before, last = other.operations
    waiting = replace(other, operations=(*before, replace(last, is_collective=True)))
    assert not any(each.grafted for each in first_lost([one], [waiting], 0).remedies)


def test_no_line_is_replaced_that_reads_another_value() -> None:
    def angle(sign: int) -> Function:
        def shifted(x: Tensor) -> Tensor:
            apart = sign * (torch.arange(8.0) - torch.arange(8.0)[:, None])
            bucket = (apart > 0).float() * 3
            return x @ bucket

        return shifted

    found = remedies(angle(1), angle(-1))
    assert not any(each.grafted and "bucket =" in each.operation.frames[0].source for each in found)


def test_no_line_is_replaced_by_a_result_of_another_shape() -> None:
    def whole(x: Tensor) -> Tensor:
        y = x * x
        return y.mean()

    def part(x: Tensor) -> Tensor:
        y = x[..., :4] * x[..., :4]
        return y.mean()

    assert not any(each.grafted for each in remedies(whole, part))


# ---- what hid the line ----------------------------------------------------------------------------------------------


def test_a_factor_of_zero_does_not_hide_a_wrong_value() -> None:
    def scan(sign: int) -> Function:
        def scanned(x: Tensor) -> Tensor:
            decay = (sign * x).exp()
            state = torch.zeros(8)
            for row in range(3):
                state = decay[row] * state + x[row]
            return state

        return scanned

    found = first_lost([trace(scan(1))[0]], [trace(scan(-1))[0]], 0)
    assert found.target[0].operation.frames[0].source == "decay = (sign * x).exp()"


def test_values_that_the_baseline_computed_for_another_tap_are_not_blamed() -> None:
    def reading(which: int) -> SliceTrace:
        recorder = OperationRecorder()
        with recorder:
            x = X.clone()
            recorder.set_by_tap(x, "x", changed=False)
            values = (x.tanh(), x.sin())
            chosen = values[which]
            number = recorder.read(chosen @ WEIGHT)
            recorder.read(values[1 - which] * 2)
        return slice_of(recorder, number)

    found = first_lost([reading(0)], [reading(1)], 0)
    assert [each.operation.name for each in found.target if not each.is_later] == ["mm"]


def test_weights_that_the_run_itself_builds_are_not_operations() -> None:
    def normed(scales: bool) -> Function:
        def norm(x: Tensor) -> Tensor:
            y = x * x.pow(2).mean(-1, keepdim=True).rsqrt()
            return weight * y if scales else y

        return norm

    with OperationRecorder() as recorder:
        weight = torch.nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(2)))
        weight.data = weight.data * 2
        x = X.clone()
        recorder.set_by_tap(x, "x", changed=False)
        number = recorder.read(normed(True)(x))
    (found,) = first_lost([slice_of(recorder, number)], [trace(normed(False))[0]], 0).baseline
    assert found.operation.name == "mul"
    assert [each.name for each in found.state] == ["weight"]


def skipped(factor: float) -> Function:
    def add(x: Tensor) -> Tensor:
        y = x.tanh()
        y = y + factor * x
        return (y @ WEIGHT).tanh()

    return add


def hidden(after: float) -> Function:
    def hide(x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[-1]) > after
        y = x.masked_fill(mask, 0.0)
        return (y @ WEIGHT).tanh()

    return hide


def test_an_idle_operation_is_replaced_only_if_its_line_makes_its_arguments() -> None:
    helping = [each for each in remedies(skipped(0.5), skipped(0.0)) if cures(each, skipped(0.5), skipped(0.0))]
    assert {(each.side, each.operation.frames[0].source) for each in helping} == {("target", "y = y + factor * x")}
    # The line of the mask is at fault, not that which uses it.
    found = remedies(hidden(2), hidden(50))
    assert not [each for each in found if "masked_fill" in each.operation.frames[0].source]


def test_an_operation_with_different_arguments_on_both_sides_is_lacking_on_neither() -> None:
    # Hidden in both ways, the values are those of the baseline.
    assert not [each for each in remedies(hidden(2), hidden(4)) if each.is_one_sided]


def test_the_value_that_the_baseline_reads_there_is_tried_first() -> None:
    def plain(x: Tensor) -> Tensor:
        z = (x @ WEIGHT).tanh()
        return z.cumsum(0)

    def gated(x: Tensor) -> Tensor:
        z = (x @ WEIGHT).tanh()
        z = torch.lerp(x, z, 0.25)
        return z.cumsum(0)

    def gated_other_way(x: Tensor) -> Tensor:
        z = (x @ WEIGHT).tanh()
        z = torch.lerp(z, x, 0.25)
        return z.cumsum(0)

    for target in (gated, gated_other_way):
        assert cures(remedies(plain, target)[0], plain, target)


# ---- what could replace a result ------------------------------------------------------------------------------------


def value(*shape: int, dtype: torch.dtype = torch.float32, sources: tuple[int, ...] = (), **more: Any) -> Any:
    return SimpleNamespace(shape=shape, dtype=dtype, sources=sources, **{"tap": None, "is_parameter": False, **more})


def test_a_result_may_be_replaced_by_known_values_of_its_shape() -> None:
    values = {
        1: value(2, 3),
        2: value(3),
        3: value(2, 3, dtype=torch.bfloat16),
        4: value(2, 3, is_parameter=True),
        5: value(2, 3),
        # Another arrangement of the value 7, and of 8; the tap's value is not looked behind.
        6: value(3, 2, sources=(20,)),
        7: value(2, 3),
        8: value(2, 3),
        9: value(3, 2, sources=(21,), tap="x"),
        # Computed from the value 11, and arranged by the region itself.
        10: value(3, 2, sources=(22,)),
        11: value(2, 3),
        12: value(3, 2, sources=(23,)),
        13: value(2, 3),
        14: value(2, 3),
    }
    operations = [
        SimpleNamespace(index=index, only_arranges=index != 22, inputs=[read])
        for index, read in ((20, 7), (21, 8), (22, 11), (23, 13))
    ]
    trace: Any = SimpleNamespace(values=values, operations=operations)
    part = LostPart(Dataflow(trace), [], [], lambda number: number != 5)
    region: Any = SimpleNamespace(made=14, inputs=[1, 2, 3, 4, 5, 6, 9, 10, 12], indices={23})
    assert _of_same_shape(region, part) == [1, 7]
