"""What a tap's thread and the wire thread share while a tensor is fetched from a GPU of another host."""

from __future__ import annotations

import threading

import torch

from graftlab.exchange.interrupts import merely_waits


class Request:
    """A tensor that a tap's thread waits for, while the wire thread fetches it."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        self.nbytes = nbytes
        self.received: torch.Tensor | None = None
        self.failure = ""
        # Whether its receive was issued.
        self.begun = False
        self._over = threading.Lock()
        self._over.acquire()

    def end(self, received: torch.Tensor | None, failure: str = "") -> None:
        """It is here, or why it will not be. On the wire thread, once."""
        self.received, self.failure = received, failure
        self._over.release()

    @merely_waits
    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, for one thread; whether it has."""
        return self._over.acquire(timeout=max(0.0, seconds))
