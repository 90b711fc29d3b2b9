"""Several threads of one rank reach taps at once: waits are separate, and steps wait for all threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from kit.grafters import GrafterWorld
from kit.mailboxes import DEADLINE, in_background
from kit.support import wait_for_file

import graftlab as gl
from graftlab.base.tags import TapKey
from graftlab.errors import GraftWarning
from graftlab.exchange.contract import Receipt


class Slow:
    """Makes a rank's exchange wait for the taps of that name until it is released."""

    def __init__(self, world: GrafterWorld, name: str) -> None:
        exchange = world.target.exchange
        self.waits, self.goes_on = threading.Event(), threading.Event()
        self._name, self._receive = name, exchange.receive
        self.let_go: Callable[[], bool]
        self.take_back: Callable[[], None]
        self.let_go, self.take_back = exchange.shared
        exchange.receive = self._wait_first  # type: ignore[method-assign]

    def _wait_first(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        if key.name == self._name:
            is_free = self.let_go()
            self.waits.set()
            assert self.goes_on.wait(DEADLINE)
            if is_free:
                self.take_back()
        return self._receive(key, near)


def test_waiting_tap_does_not_block_other_threads_and_order_is_by_arrival() -> None:
    world = GrafterWorld(compare="True")
    for name in ("slow", "a", "b"):
        world.baseline.tap(name, 1.0)
    slow = Slow(world, "slow")
    waiting = in_background(lambda: world.target.tap("slow", 2.0))
    assert slow.waits.wait(DEADLINE)
    for name in ("a", "b"):
        in_background(lambda name=name: world.target.tap(name, 1.0)).result(DEADLINE)  # type: ignore[misc]
    assert [row.name for row in world.rows] == ["a", "b"]
    slow.goes_on.set()
    waiting.result(DEADLINE)
    assert [(row.name, row.status, row.order, row.step) for row in world.rows] == [
        ("a", "compared", 2, 0),
        ("b", "compared", 3, 0),
        ("slow", "compared", 1, 0),
    ]


@pytest.mark.parametrize("ending", ["step", "end_run"])
def test_step_ends_after_the_taps_of_all_threads(ending: str) -> None:
    world = GrafterWorld(compare="True")
    world.baseline.tap("slow", 1.0)
    world.baseline.grafter.step()
    slow = Slow(world, "slow")
    waiting = in_background(lambda: world.target.tap("slow", 1.0))
    assert slow.waits.wait(DEADLINE)
    ended = in_background(getattr(world.target.grafter, ending))
    # It holds nothing up meanwhile.
    in_background(lambda: world.target.tap("other", 1.0)).result(DEADLINE)
    assert not ended.done()
    slow.goes_on.set()
    waiting.result(DEADLINE)
    ended.result(DEADLINE)
    assert [(row.name, row.status, row.step) for row in world.target.rows if row.name == "slow"] == [
        ("slow", "compared", 0)
    ]


def test_function_called_by_a_tap_may_wait_in_its_own_tap() -> None:
    world = GrafterWorld(compare="True")
    world.baseline.tap("inner", 1.0)
    world.baseline.tap("outer", 1.0)
    slow = Slow(world, "inner")

    def value() -> torch.Tensor:
        shown: torch.Tensor = world.target.tap("inner", 1.0)
        return shown

    waiting = in_background(lambda: world.target.tap("outer", value))
    assert slow.waits.wait(DEADLINE)
    slow.goes_on.set()
    waiting.result(DEADLINE)
    assert [(row.name, row.status) for row in world.target.rows] == [("inner", "compared"), ("outer", "compared")]


def test_two_threads_at_one_tap_in_a_step_warn_unless_tags_differ() -> None:
    world = GrafterWorld(compare="True")
    for _ in range(3):
        world.target.tap("x", 1.0)
    with pytest.warns(GraftWarning, match=r"'x'.* two threads .* gl.tags"):
        in_background(lambda: world.target.tap("x", 1.0)).result(DEADLINE)
    world.target.grafter.step()
    # A different thread in a different step, or with different tags, is fine.
    in_background(lambda: world.target.tap("x", 1.0)).result(DEADLINE)
    world.target.tap("x", 1.0, lane=1)


def test_an_interrupt_at_the_very_start_of_a_tap_leaves_the_rank_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrafterWorld(compare="True")
    world.baseline.tap("x", 1.0)

    class Interrupted(set[int]):
        def add(self, thread: int) -> None:
            super().add(thread)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.target.grafter, "_at_work", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            world.target.tap("x", 1.0)
        assert world.target.grafter._at_work == set()
    world.target.tap("x", 1.0)
    assert [row.status for row in world.target.rows] == ["compared"]


@pytest.mark.ranks
def test_while_one_thread_waits_at_a_tap_those_of_another_are_compared(tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"

    def baseline() -> None:
        for number in range(20):
            gl.tap("fast", torch.ones(3), number=number)
        # A target whose thread is held up by the other one never gets there.
        wait_for_file(done)
        gl.tap("slow", torch.ones(3))

    def target() -> float:
        def wait_at_the_slow_one() -> None:
            begun.touch()
            gl.tap("slow", torch.ones(3))

        thread = threading.Thread(target=wait_at_the_slow_one)
        thread.start()
        wait_for_file(begun)
        for number in range(20):
            gl.tap("fast", torch.ones(3), number=number)
        done.touch()
        thread.join()
        return float(number)

    with gl.launch(1, 1) as session:
        frame = session.run(baseline, target).frame
    assert set(frame["status"]) == {"compared"}
    assert len(frame) == 21
