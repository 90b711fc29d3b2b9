"""Every exchange's promise on interrupts: the call ends, with no other effect.

As in a rank, taps run on the main thread, and a signal's handler raises where it may.
"""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import pytest
import torch
from kit.implementations import MakeWorld
from kit.mailboxes import DEADLINE, MIB, Mailbox, World, in_background, key, settles

from graftlab.exchange.interrupts import is_interruptible_at

# What Python drops it warns of.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

A_MIB = torch.zeros(MIB, dtype=torch.uint8)
ROUNDS = 200


class Interrupted(BaseException):
    """Raised by the handler."""


class Interrupter:
    """Signals the main thread all the time; the handler raises once in each call of :meth:`interrupt`.

    If Python drops the exception, as it does with any that is raised while an object is collected, it raises again.
    """

    def __init__(self) -> None:
        self.armed = False
        self._again_from = 0.0
        self._only_in_waits = False
        self.held_back = 0

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.armed or time.monotonic() < self._again_from:
            return
        in_exchange = frame is not None and frame.f_globals["__name__"].startswith("graftlab.exchange.")
        if not is_interruptible_at(frame) or (self._only_in_waits and not in_exchange):
            self.held_back += in_exchange
            return
        self._again_from = time.monotonic() + 1.0
        raise Interrupted

    def interrupt(self, call: Callable[[], object], *, only_in_waits: bool = False) -> None:
        """Make the call and end it by an exception; with ``only_in_waits``, when the exchange itself waits."""
        self._only_in_waits = only_in_waits
        with pytest.raises(Interrupted):
            self._call(call)

    def _call(self, call: Callable[[], object]) -> None:
        self._again_from = 0.0
        self.armed = True
        try:
            call()
        finally:
            self.armed = False

    def signal_until(self, over: threading.Event, thread: int) -> None:
        while not over.wait(0.0002):
            signal.pthread_kill(thread, signal.SIGUSR2)


@pytest.fixture
def interrupter() -> Iterator[Interrupter]:
    made, over = Interrupter(), threading.Event()
    before = signal.signal(signal.SIGUSR2, made.handle)
    signalling = in_background(lambda: made.signal_until(over, threading.main_thread().ident or 0))
    yield made
    made.armed = False
    over.set()
    signalling.result(DEADLINE)
    signal.signal(signal.SIGUSR2, before)


# ---- waits ----------------------------------------------------------------------------------------------------------


def receives(rank: Mailbox) -> None:
    rank.receive(key("x"))


def publishes_into_a_full_buffer(rank: Mailbox) -> None:
    for number in range(3):
        rank.publish(key("down", occurrence=number), A_MIB)


def listens_to_the_leader(rank: Mailbox) -> None:
    rank.exchange.announcements(1, 1)


def ends_and_settles(rank: Mailbox) -> None:
    rank.exchange.end_run()
    settles(rank)


@pytest.mark.parametrize("wait", [receives, publishes_into_a_full_buffer, listens_to_the_leader, ends_and_settles])
def test_an_interrupt_ends_any_wait(
    wait: Callable[[Mailbox], None], a_world: MakeWorld, interrupter: Interrupter
) -> None:
    with a_world(1, 1, budget=2 * MIB) as world:
        waiter, peer = world.begin().mailboxes
        interrupter.interrupt(lambda: wait(waiter), only_in_waits=True)
        # No peer counts it as waiting, and the tensor can still be received.
        peer.publish(key("x"), 5.0)
        peer.exchange.announce(1, b"begin")
        if wait is not ends_and_settles:
            assert waiter.take(key("x")) == [5.0]
            assert waiter.exchange.announcements(1, 1) == [b"begin"]
        world.end(step=0)
        assert [waiter.bytes_in_use(), peer.bytes_in_use()] == [0, 0]


# ---- any moment -----------------------------------------------------------------------------------------------------


def tap_on_and_on(rank: Mailbox, first_step: int, goes_on: Callable[[], bool]) -> None:
    """Publish and receive, five taps a step, and check what comes."""
    mine, theirs = ("down", "up") if rank.place.side == "baseline" else ("up", "down")
    for rank.step in itertools.count(first_step):
        for number in range(5):
            if not goes_on():
                return
            rank.publish(key(mine, rank.step, number), torch.full((100,), 10.0 * rank.step + number), list(range(200)))
            receipt = rank.receive(key(theirs, rank.step, number))
            for contribution in receipt.contributions:
                assert contribution.tensor.tolist() == [10.0 * rank.step + number] * 100
                assert contribution.extras == list(range(200))
            receipt.release()
        rank.exchange.end_step(rank.step)


def end(rank: Mailbox) -> int:
    """End the run wherever it is; the step that it had come to."""
    rank.exchange.end_step(rank.step)
    rank.exchange.end_run()
    assert settles(rank)
    return rank.step


@pytest.mark.slow
def test_an_exchange_still_works_after_an_interrupt_at_any_moment(a_world: MakeWorld, interrupter: Interrupter) -> None:
    with a_world(1, 1) as world:
        step = 0
        for run in range(ROUNDS):
            world.begin(run, step)
            over = threading.Event()

            def other_side(step: int = step, over: threading.Event = over) -> int:
                tap_on_and_on(world.target, step, lambda: not over.is_set())
                return end(world.target)

            others = in_background(other_side)
            interrupter.interrupt(partial(tap_on_and_on, world.baseline, step, lambda: True))
            over.set()
            step = max(end(world.baseline), others.result(DEADLINE)) + 1
        assert interrupter.held_back > 0
        assert [each.bytes_in_use() for each in world.mailboxes] == [0, 0]
        world.begin(ROUNDS, step)
        world.baseline.publish(key("x", step), 1.0)
        assert world.target.take(key("x", step)) == [1.0]


# ---- where an exception may be raised -------------------------------------------------------------------------------


def test_exceptions_are_allowed_outside_an_exchange_but_not_in_its_callbacks(world: World) -> None:
    seen: list[bool] = []

    def look(number: int, frame: FrameType | None) -> None:
        seen.append(is_interruptible_at(frame))

    before = signal.signal(signal.SIGUSR2, look)
    try:
        signal.raise_signal(signal.SIGUSR2)
        world.target.exchange.timeout = 0.01
        world.target.exchange.on_wait = lambda awaits: signal.raise_signal(signal.SIGUSR2)
        world.target.receive(key("x"))
    finally:
        signal.signal(signal.SIGUSR2, before)
    # Before the wait, when it begins, and when it ends.
    assert seen == [True, False, False]
    assert is_interruptible_at(None)
