"""What every exchange promises to a rank of several threads: one that waits keeps no other from its own tap."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kit.implementations import MakeWorld
from kit.mailboxes import DEADLINE, Mailbox, World, in_background, key

from graftlab.base.tags import TapKey
from graftlab.exchange.interrupts import is_interruptible_at


class Shared:
    """A mailbox that several threads use, as a grafter's do."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.lock = threading.Lock()
        mailbox.exchange.share(self._let_go, self._take_back)

    def _let_go(self) -> bool:
        self.lock.release()
        return True

    def _take_back(self) -> None:
        self.lock.acquire()

    def take(self, of: TapKey) -> list[Any]:
        with self.lock:
            return self.mailbox.take(of)

    def publish(self, to: TapKey, value: float) -> None:
        with self.lock:
            self.mailbox.publish(to, value)


def test_a_waiting_thread_keeps_no_other_from_its_tap(world: World) -> None:
    sender, receiver = world.baseline, Shared(world.target)
    late = in_background(lambda: receiver.take(key("late")))
    world.target.until_it_waits()
    for number in range(3):
        early = in_background(lambda number=number: receiver.take(key("early", occurrence=number)))  # type: ignore[misc]
        sender.publish(key("early", occurrence=number), float(number))
        assert early.result(DEADLINE) == [number]
    # A thread may send while another waits, too.
    receiver.publish(key("back"), 7.0)
    assert sender.take(key("back")) == [7.0]
    assert not late.done()
    sender.publish(key("late"), 5.0)
    assert late.result(DEADLINE) == [5.0]


def test_each_thread_gets_its_tensor_whichever_thread_reads_it(world: World) -> None:
    sender, receiver = world.baseline, Shared(world.target)
    order = list(range(40))
    waiting = {number: in_background(lambda number=number: receiver.take(key(f"t{number}"))) for number in order}  # type: ignore[misc]
    world.target.until_it_waits()
    random.Random(3).shuffle(order)
    for number in order:
        sender.publish(key(f"t{number}"), float(number))
    assert {number: each.result(DEADLINE) for number, each in waiting.items()} == {n: [n] for n in order}


def test_threads_of_both_sides_may_wait_for_each_other_without_yielding(world: World) -> None:
    baseline, target = Shared(world.baseline), Shared(world.target)

    def asks_first(rank: Shared, mine: str, theirs: str) -> Callable[[], list[Any]]:
        def go() -> list[Any]:
            got = rank.take(key(theirs))
            rank.publish(key(mine), 1.0)
            return got

        return go

    # From then on a waiting rank may still send what others wait for, from a different thread.
    for rank in (baseline, target):
        rank.publish(key("early"), 0.0)
        in_background(lambda rank=rank: rank.publish(key("early", occurrence=1), 0.0)).result(DEADLINE)  # type: ignore[misc]
    # Each side's first thread waits for what the other side's second one has yet to send.
    one = in_background(asks_first(baseline, "b1", "t2"))
    other = in_background(asks_first(target, "t1", "b2"))
    world.baseline.until_it_waits()
    world.target.until_it_waits()
    baseline.publish(key("b2"), 2.0)
    target.publish(key("t2"), 3.0)
    assert one.result(DEADLINE) == [3.0]
    assert other.result(DEADLINE) == [2.0]
    assert (baseline.take(key("t1")), target.take(key("b1"))) == ([1.0], [1.0])


def test_a_wait_reports_the_ranks_that_all_threads_wait_for(a_world: MakeWorld) -> None:
    with a_world(2, 1) as world:
        world.begin()
        seen: list[list[int]] = []
        receiver = Shared(world.target)
        usual = world.target.exchange.on_wait

        def on_wait(awaits: Any) -> None:
            seen.append(list(awaits))
            usual(awaits)

        world.target.exchange.on_wait = on_wait
        world.mailboxes[0].publish(key("a"), 1.0)
        world.deliver()
        first = in_background(lambda: receiver.take(key("a")))
        world.target.until_it_waits()
        second = in_background(lambda: receiver.take(key("b")))
        while len(seen) < 2:
            receiver.lock.acquire()
            receiver.lock.release()
        world.mailboxes[1].publish(key("a"), 2.0)
        assert first.result(DEADLINE) == [1.0, 2.0]
        for sender in world.mailboxes[:2]:
            sender.publish(key("b"), 3.0)
        assert second.result(DEADLINE) == [3.0, 3.0]
        assert seen == [[1], [0, 1], [0, 1], []]


def test_an_interrupted_wait_leaves_the_lock_and_other_waits_unchanged(world: World) -> None:
    sender, receiver = world.baseline, Shared(world.target)
    other = in_background(lambda: receiver.take(key("other")))
    world.target.until_it_waits()

    def stop(number: int, frame: Any) -> None:
        waits = frame is not None and str(frame.f_globals["__name__"]).startswith("graftlab.exchange.")
        if waits and is_interruptible_at(frame):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Again and again, until it comes where it may.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with pytest.raises(KeyboardInterrupt):
            receiver.take(key("never"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not receiver.lock.locked()
    sender.publish(key("other"), 1.0)
    assert other.result(DEADLINE) == [1.0]
