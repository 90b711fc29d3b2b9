"""The self-graft of a job: passes of whole steps, without lasting changes in the job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kit.grafters import StandInGrafter

import graftlab as gl
from graftlab.grafting.self_graft_in_steps import SelfGraftInSteps
from graftlab.taps import calls

BUDGET = 1 << 20
Tap = Callable[..., torch.Tensor]


class Job:
    """Makes its steps with whatever takes their taps."""

    def __init__(self, computes: Callable[[Tap, int], None], first: int = 0) -> None:
        self.computes = computes
        self.step = first

    def go(self, itself: SelfGraftInSteps, steps: int) -> SelfGraftInSteps:
        for _ in range(steps):
            handler = itself.handler_at(self.step)

            def tap(name: str, value: torch.Tensor, handler: object = handler, **tags: object) -> torch.Tensor:
                return handler.tap(name, value, None, tags)  # type: ignore[attr-defined, no-any-return]

            self.computes(tap, self.step)
            self.step += 1
        itself.handler_at(self.step)
        return itself


def steady(tap: Tap, step: int) -> None:
    x = tap("layers.0.x", torch.linspace(0.5, 2.0, 1000))
    tap("y", x * 3 - 1)


def moving(tap: Tap, step: int) -> None:
    x = tap("x", torch.ones(4))
    tap("y", x * step)


def test_repeat_pass_names_the_taps_that_differ_between_steps() -> None:
    same = Job(steady).go(SelfGraftInSteps(("record", "repeat"), budget=BUDGET), 2)
    assert (same.is_over, same.found.not_repeated) == (True, [])
    other = Job(moving).go(SelfGraftInSteps(("record", "repeat"), budget=BUDGET), 2)
    assert other.found.not_repeated == ["y"]


def test_it_is_over_only_when_the_last_step_of_the_last_pass_has_ended() -> None:
    job, itself = Job(steady), SelfGraftInSteps(("record", "repeat"), 2, budget=BUDGET)
    assert not job.go(itself, 3).is_over
    assert job.go(itself, 1).is_over
    # Later steps change nothing.
    assert job.go(itself, 3).found.not_repeated == []


def alternating(tap: Tap, step: int) -> None:
    tap("x", torch.full((4,), float(step % 2)))


def test_a_pass_of_several_steps_begins_at_a_multiple_of_their_number() -> None:
    itself, job = SelfGraftInSteps(("record", "repeat"), 2, budget=BUDGET), Job(alternating, first=3)
    assert not job.go(itself, 4).is_over
    repeats = job.go(itself, 1)
    assert (repeats.is_over, repeats.found.not_repeated) == (True, [])
    single = Job(alternating, first=3).go(SelfGraftInSteps(("record", "repeat"), 1, budget=BUDGET), 2)
    assert single.found.not_repeated == ["x"]


def test_later_self_graft_reuses_an_earlier_record_and_returns_kept_groups() -> None:
    job = Job(steady)
    first = job.go(SelfGraftInSteps(("record", "repeat"), budget=BUDGET, keep=("y",)), 2)
    assert torch.equal(first.found.last["y"], torch.linspace(0.5, 2.0, 1000) * 3 - 1)
    shown: list[torch.Tensor] = []

    def watched(tap: Tap, step: int) -> None:
        shown.append(tap("layers.0.x", torch.linspace(0.5, 2.0, 1000)))
        tap("y", shown[-1] * 3 - 1)

    job.computes = watched
    second = job.go(SelfGraftInSteps(("graft", "drift"), budget=BUDGET, before=first), 2)
    off = (shown[0] - torch.linspace(0.5, 2.0, 1000)).abs()
    assert (off > 0).all()
    assert off.max() < 3e-7
    added = {row.name: row.rel_l2 for row in second.found.added}
    assert added["layers.0.x"] == 0.0
    assert 0 < added["y"] < 1e-6
    assert {row.name for row in second.found.outputs} == {"layers.0.x", "y"}
    assert second.found.last == {}
    # And once more: whether it still shows what it showed.
    assert job.go(SelfGraftInSteps(("repeat",), budget=BUDGET, before=second), 1).found.not_repeated == []


def test_a_graft_pass_resets_each_tap_to_its_record_and_a_drift_pass_does_not() -> None:
    shown: list[float] = []

    def growing(tap: Tap, step: int) -> None:
        shown.append(float(tap("x", torch.tensor(1.0 + step))))

    Job(growing).go(SelfGraftInSteps(("record", "graft", "drift"), budget=BUDGET), 3)
    assert [round(each) for each in shown] == [1, 1, 3]


def test_a_pass_that_rests_changes_no_tap() -> None:
    shown: list[float] = []

    def growing(tap: Tap, step: int) -> None:
        shown.append(float(tap("x", torch.tensor(1.0 + step))))

    itself = Job(growing).go(SelfGraftInSteps(("record", "rest"), budget=BUDGET), 2)
    assert (shown, itself.found.added) == ([1.0, 2.0], [])


def test_weights_and_optimizer_state_are_never_grafted(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a rank, where tags around taps count.
    monkeypatch.setattr(calls, "_grafter", StandInGrafter())
    weight, state, value = torch.ones(4), torch.ones(4), torch.full((4,), 2.0)

    def step(tap: Tap, step: int) -> None:
        tap("w", weight, kind="param", updated=True)
        tap("w.exp_avg", state, kind="optimizer", updated=True)
        with gl.tags(kind="optimizer"):
            tap("w.exp_avg_sq", state, updated=True)
            # A tap's own tag comes first.
            tap("x", value, kind="grad")

    job = Job(step)
    resting = job.go(SelfGraftInSteps(("rest",), budget=BUDGET), 1)
    assert resting.is_over
    itself = job.go(SelfGraftInSteps(("record", "graft"), budget=BUDGET, before=resting), 2)
    assert [row.name for row in itself.found.added] == ["x"]
    assert (weight == 1).all()
    assert (state == 1).all()
    assert (value != 2).all()
