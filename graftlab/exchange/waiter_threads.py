"""Several threads of one rank, each waiting for a tap of its own.

The exchange has one owner at a time. A thread that waits for other ranks gives it up meanwhile, so that the next one
may send, receive, and wait as well. What comes is read by whoever is there first, and it wakes the others.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable

from graftlab.exchange.interrupts import interruptible


class _Waiter:
    """What one thread waits with: for descriptors, or to be woken by a thread that has read what came."""

    def __init__(self) -> None:
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.poller = select.poll()
        self.poller.register(self.wake, select.POLLIN)
        self.follows: frozenset[int] = frozenset()
        weakref.finalize(self, os.close, self.wake)

    def follow(self, descriptors: frozenset[int]) -> None:
        if self.follows is not descriptors:
            for gone in self.follows - descriptors:
                self.poller.unregister(gone)
            for new in descriptors - self.follows:
                self.poller.register(new, select.POLLIN)
            self.follows = descriptors

    @interruptible
    def wait(self, seconds: float) -> list[tuple[int, int]]:
        return self.poller.poll(max(0.0, seconds) * 1000)


class WaiterThreads:
    """The threads that use one exchange. All calls come from the thread that owns it at the moment."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self.let_go: Callable[[], bool] = lambda: False
        self.take_back: Callable[[], None] = lambda: None
        self.several = False
        """Whether more than one thread has ever used the exchange in one step."""
        self._thread = 0
        self._descriptors = frozenset(descriptors)
        self._idle: list[_Waiter] = []
        self._waiting: list[_Waiter] = []

    def begin_step(self) -> None:
        self._thread = 0

    def note(self) -> None:
        """The calling thread uses the exchange."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.several |= self._thread != 0
            self._thread = self._thread or thread

    def forget(self, descriptor: int) -> None:
        """Nothing comes from this one any more."""
        self._descriptors -= {descriptor}

    def wait(self, seconds: float) -> bool:
        """Wait until something can be read, or another thread has read something; True in the latter case.

        Other threads may own the exchange meanwhile.
        """
        looker = self._idle.pop() if self._idle else _Waiter()
        looker.follow(self._descriptors)
        self._waiting.append(looker)
        # An interrupt is raised in the wait itself alone, because the rest is the exchange's: see .interrupts.
        is_free = self.let_go()
        try:
            ready = looker.wait(seconds)
        finally:
            if is_free:
                self.take_back()
            self._waiting.remove(looker)
            self._idle.append(looker)
        if not any(descriptor == looker.wake for descriptor, _ in ready):
            return False
        os.eventfd_read(looker.wake)
        return True

    def wake(self) -> None:
        """Something was read, which others may wait for."""
        for looker in self._waiting:
            os.eventfd_write(looker.wake, 1)
