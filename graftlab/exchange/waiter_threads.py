"""Let several threads of one rank wait for different taps at the same time.

One thread at a time owns the exchange. A thread that waits for other ranks releases it meanwhile, so that the next
thread can send, receive and wait too. The first thread to own it again reads the frames that have arrived, and wakes
the others.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable

from graftlab.exchange.interrupts import interruptible


class _Waiter:
    """One thread's wait: for descriptors, or for a wake-up by another thread that has read from them."""

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
    """The threads that use one exchange. Only the thread that owns the exchange calls its methods."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self.let_go: Callable[[], bool] = lambda: False
        self.take_back: Callable[[], None] = lambda: None
        self.several = False
        """Whether more than one thread has used the exchange within one step, in any step so far."""
        self._thread = 0
        self._descriptors = frozenset(descriptors)
        self._idle: list[_Waiter] = []
        self._waiting: list[_Waiter] = []

    def begin_step(self) -> None:
        self._thread = 0

    def note(self) -> None:
        """Record that the calling thread uses the exchange."""
        thread = threading.get_ident()
        if thread != self._thread:
            self.several |= self._thread != 0
            self._thread = self._thread or thread

    def forget(self, descriptor: int) -> None:
        """Stop waiting for this descriptor: its connection has ended."""
        self._descriptors -= {descriptor}

    def wait(self, seconds: float) -> bool:
        """Wait until a descriptor is readable, or another thread has read from one; True in the latter case.

        Other threads may own the exchange meanwhile.
        """
        waiter = self._idle.pop() if self._idle else _Waiter()
        waiter.follow(self._descriptors)
        self._waiting.append(waiter)
        # An interrupt may be raised only in the wait itself, see .interrupts.
        is_free = self.let_go()
        try:
            ready = waiter.wait(seconds)
        finally:
            if is_free:
                self.take_back()
            self._waiting.remove(waiter)
            self._idle.append(waiter)
        if not any(descriptor == waiter.wake for descriptor, _ in ready):
            return False
        os.eventfd_read(waiter.wake)
        return True

    def wake(self) -> None:
        """Wake all waiting threads: one of them may wait for a frame that this thread has read."""
        for waiter in self._waiting:
            os.eventfd_write(waiter.wake, 1)
