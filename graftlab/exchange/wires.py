"""The direct way between the GPUs of two hosts, as one rank has it: its wire thread, and what it has staged there.

A tensor is copied on its own device and stays there until its receivers fetch it. The thread answers them, whatever the
rank itself does meanwhile: two that wait for each other's tensors would wait for good if each answered only where it
waits itself. It has a socket of its own for that. Where two ranks are not joined this way yet, or not any more, tensors
go through the hosts' memory as all others do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graftlab.errors import warn
from graftlab.exchange.frames import WireLocation
from graftlab.exchange.keys import Keys
from graftlab.exchange.tcp import Post
from graftlab.exchange.wire_gpu import Copy, WireGpu
from graftlab.exchange.wire_pair import Pair
from graftlab.exchange.wire_request import Request

logger = logging.getLogger(__name__)

SMALLEST = 64 << 10
"""Tensors of fewer bytes go along with their frames: to ask for one takes three words between the hosts."""

# How long the thread looks again and again at what is under way, and how long it rests between two looks after that, or
# when nothing is.
_SPIN = 0.0003
_REST = 0.001
_IDLE = 0.5
# Seconds for the last word to be on its way; the other end may just be leaving, too.
_LINGER = 0.2
# Seconds to wait at the end for the thread.
_CLOSE_LIMIT = 5.0


@dataclass(frozen=True)
class Partner:
    """The other end of a pair to be: its rank, and where its wire thread listens."""

    world_rank: int
    label: str
    name: bytes
    address: str
    port: int


class Wires:
    """Implements :class:`.staging.Staging` for receivers that are joined this way.

    It listens from the beginning, at ``address``, and joins once :meth:`begin` says whom. ``on_change`` is for its
    owner to set, and called on the wire thread when :meth:`joined` has changed.
    """

    def __init__(
        self,
        gpu: WireGpu,
        keys: Keys,
        name: bytes,
        address: str,
        ports: Sequence[int] = (0,),
        *,
        smallest: int = SMALLEST,
    ) -> None:
        """Raises OSError where it cannot listen there."""
        self.kind = gpu.name
        self.on_change: Callable[[], None] = lambda: None
        self.timeout = 60.0
        self.bytes_in_use = 0
        self._gpu = gpu
        self._label = ""
        self._smallest = max(1, smallest)
        self._post = Post(keys, name, address, ports, linger=_LINGER)
        self.port = self._post.port
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # What the taps' threads have staged, and ask for: the only things that they share with the wire thread.
        self._lock = threading.Lock()
        self._staged: dict[int, Copy] = {}
        self._last = 0
        self._words: deque[Callable[[], None]] = deque()
        self._partners: dict[int, tuple[Partner, Pair]] = {}
        self._noted = False
        self._over = False
        self._thread: threading.Thread | None = None

    def begin(self, label: str, world_rank: int, partners: Iterable[Partner], timeout: float) -> None:
        """Join these ranks, in the background. With ``timeout`` seconds for that, and for each transfer."""
        self._label, self.timeout = label, timeout
        for each in partners:
            pair = Pair(
                self._gpu,
                label,
                each.label,
                leads=world_rank < each.world_rank,
                limit=lambda: self.timeout,
                find=self._find,
                on_change=lambda: self.on_change(),
            )
            self._partners[each.world_rank] = (each, pair)
            if world_rank > each.world_rank:
                pair.connect(self._post.connect(each.name, each.address, each.port))
        self._thread = threading.Thread(target=self._run, name="graftlab-wire", daemon=True)
        self._thread.start()

    def joined(self) -> tuple[int, ...]:
        """With whom it is joined now, by world rank."""
        return tuple(sorted(rank for rank, (_, pair) in self._partners.items() if pair.is_joined))

    # ---- the sender's side, on the taps' threads ----------------------------------------------------------------

    def put(self, tensor: torch.Tensor, nbytes: int, receivers: set[int]) -> WireLocation | None:
        if nbytes < self._smallest or not self._gpu.takes(tensor):
            return None
        for rank in receivers:
            found = self._partners.get(rank)
            if found is None or not found[1].is_joined:
                return None
        try:
            copy = self._gpu.copy(tensor, nbytes)
        except Exception as error:
            # A device without room, say; if it is broken it will fail on the other way, too.
            if not self._noted:
                self._noted = True
                warn(
                    f"gl.tap on {self._label}: a tensor goes through the host's memory, because it cannot be copied on "
                    f"its device ({type(error).__name__}: {error})"
                )
            return None
        with self._lock:
            self._last += 1
            number = self._last
            self._staged[number] = copy
            self.bytes_in_use += nbytes
        return WireLocation(number)

    def release(self, location: WireLocation) -> None:
        with self._lock:
            copy = self._staged.pop(location.number, None)
            if copy is not None:
                self.bytes_in_use -= copy.bytes.numel()

    def _find(self, number: int, nbytes: int) -> Copy | None:
        with self._lock:
            copy = self._staged.get(number)
        return copy if copy is not None and copy.bytes.numel() == nbytes else None

    # ---- the receiver's side, on the taps' threads --------------------------------------------------------------

    def ask(self, sender: int, location: WireLocation, nbytes: int) -> Request:
        """Begin to fetch the bytes at that location of a sender's. Raises RuntimeError that says why that cannot be."""
        found = self._partners.get(sender)
        if found is None:
            raise RuntimeError("it is on a GPU to which there is no direct way")
        pair = found[1]
        request = Request(location.number, nbytes)
        self._tell(lambda: pair.want(request))
        return request

    def collect(self, sender: int, request: Request, wait: Callable[[Callable[[], bool]], bool]) -> torch.Tensor:
        """What was asked for, on this rank's own device.

        ``wait`` calls what it is given, which waits, and may let others use the exchange meanwhile. Raises RuntimeError
        that says why it cannot be had.
        """
        partner, pair = self._partners[sender]
        limit = self.timeout
        if not wait(lambda: request.wait(limit)):
            why = f"it did not come from the GPU of {partner.label} within {limit:g} s"
            self._tell(lambda: pair.give_up(request, why))
            raise RuntimeError(why)
        if request.received is None:
            raise RuntimeError(request.failure)
        self._gpu.hand_over(request.received)
        return request.received

    # ---- the wire thread ----------------------------------------------------------------------------------------

    def _tell(self, word: Callable[[], None]) -> None:
        """Have this called on the wire thread. Raises RuntimeError where that has ended."""
        with self._lock:
            if self._over:
                raise RuntimeError("this rank has left")
            self._words.append(word)
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        pairs = [pair for _, pair in self._partners.values()]
        try:
            self._gpu.begin_thread()
            self._serve(pairs)
        except Exception as error:
            logger.exception("%s: the direct way between GPUs failed", self._label)
            for pair in pairs:
                pair.fail(f"{type(error).__name__}: {error}")
        finally:
            for pair in pairs:
                pair.close()
            self._post.close()
            with self._lock:
                self._over = True
            # Whoever was not heard yet is told that nobody is there.
            self._hear()
            os.close(self._wake)

    def _serve(self, pairs: Sequence[Pair]) -> None:
        poller = select.poll()
        for descriptor in (self._post.fileno(), self._wake):
            poller.register(descriptor, select.POLLIN)
        expected = {partner.name: pair for partner, pair in self._partners.values()}
        calm_since = 0.0
        while not self._over:
            self._hear()
            self._admit(expected)
            for pair in pairs:
                pair.work()
            if not any(pair.is_busy for pair in pairs):
                ready, calm_since = poller.poll(_IDLE * 1000), 0.0
            else:
                calm_since = calm_since or time.monotonic()
                ready = poller.poll(0 if time.monotonic() - calm_since < _SPIN else _REST * 1000)
            if ready:
                calm_since = 0.0

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._words:
            self._words.popleft()()

    def _admit(self, expected: Mapping[bytes, Pair]) -> None:
        """Take those who have connected; nobody else of the session has anything to say here."""
        self._post.pump()
        for channel in self._post.channels():
            if channel.endpoint:
                continue
            pair = expected.get(channel.name)
            if pair is None or pair.failure:
                channel.close()
            elif not pair.is_connected:
                pair.connect(channel)

    def close(self) -> None:
        """End it: whatever is under way is called off."""
        with self._lock:
            was_over, self._over = self._over, True
            if not was_over:
                os.eventfd_write(self._wake, 1)
        if self._thread is not None:
            self._thread.join(_CLOSE_LIMIT)
        elif not was_over:
            self._post.close()
            os.close(self._wake)
