"""Two ranks whose GPUs are joined directly: one end, from the first word to the last.

A receive that waits for its send keeps a part of the GPU busy, and a send that waits for its receive does too. And two
ends that issue a send each, or the same transfers in another order, wait for each other for good. So a receiver first
asks, a sender answers when its GPU has made the copy, and the end that leads says which transfer is next, in whatever
direction; both issue it at that word.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from graftlab.exchange.tcp import RemoteChannel
from graftlab.exchange.wire_frames import (
    Failed,
    Fetch,
    Go,
    NotThere,
    Ready,
    There,
    UniqueId,
    WireFrame,
    decode,
    encode,
)
from graftlab.exchange.wire_gpu import Communicator, Copy, Transfer, WireGpu
from graftlab.exchange.wire_request import Request

logger = logging.getLogger(__name__)

# Seconds to wait at the end for the device to let go of what was under way.
_ABORT_LIMIT = 2.0

# Memory that the device may touch for as long as the process lives.
_never_given_back: list[object] = []


class Pair:
    """One end of a pair, on the wire thread; only :attr:`is_joined` and :attr:`failure` are for others.

    ``find`` gets what is staged under a number, if it has so many bytes. ``leads`` is for one of the two. ``me`` and
    ``label`` are the ranks in words, this one and the other.
    """

    def __init__(
        self,
        gpu: WireGpu,
        me: str,
        label: str,
        *,
        leads: bool,
        limit: Callable[[], float],
        find: Callable[[int, int], Copy | None],
        on_change: Callable[[], None],
    ) -> None:
        self.is_joined = False
        self.failure = ""
        self._gpu = gpu
        self._me = me
        self._label = label
        self._leads = leads
        self._limit = limit
        self._find = find
        self._on_change = on_change
        self._channel: RemoteChannel | None = None
        self._communicator: Communicator | None = None
        self._is_ready = self._other_is_ready = False
        self._since = time.monotonic()
        # What this rank's taps wait for, and what the other has asked for and was not sent yet, by number.
        self._wanted: dict[int, Request] = {}
        self._asked: dict[int, Copy] = {}
        # Of those, the ones of which nothing was said yet, because the GPU is not past the copy.
        self._copying: list[int] = []
        # What both ends can issue, in the order in which they will: the numbers, and whether this end sends.
        self._turns: deque[tuple[int, bool]] = deque()
        self._under_way: tuple[Transfer, int, bool, float] | None = None
        self._aborting: threading.Thread | None = None

    # ---- what the wire thread calls -----------------------------------------------------------------------------

    def connect(self, channel: RemoteChannel) -> None:
        """This is how the other end is spoken to."""
        self._channel = channel

    @property
    def is_connected(self) -> bool:
        return self._channel is not None

    @property
    def is_busy(self) -> bool:
        """Whether there is something to look at again soon."""
        return not self.failure and bool(
            self._under_way or self._turns or self._copying or (self._channel and not self.is_joined)
        )

    def want(self, request: Request) -> None:
        """Fetch this, or say why not."""
        if self.failure or self._channel is None:
            request.end(None, self.failure or f"{self._label} was not reached yet")
            return
        self._wanted[request.number] = request
        self._send(Fetch(request.number, request.nbytes))

    def work(self) -> None:
        """Go on with what can be gone on with; never waits. What goes wrong ends the pair, and nothing else."""
        if self.failure:
            return
        try:
            if self._channel is not None:
                self._listen(self._channel)
            if not self.failure and not self.is_joined:
                self._go_on_joining()
            if not self.failure:
                self._look_at_copies()
                self._go_on()
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")

    def give_up(self, request: Request, why: str) -> None:
        """Nobody waits for this any more. One that waits on the device must be ended there, with all else."""
        if request.begun and self._wanted.get(request.number) is request:
            self.fail(why)

    # ---- joining ------------------------------------------------------------------------------------------------

    def _go_on_joining(self) -> None:
        if time.monotonic() - self._since > self._limit():
            self.fail(f"the two were not joined within {self._limit():g} s")
            return
        if self._channel is None or not self._channel.linked:
            return
        if self._communicator is None:
            if self._leads:
                unique_id = self._gpu.new_id()
                self._send(UniqueId(unique_id))
                self._communicator = self._gpu.join(0, unique_id)
            return
        if not self._is_ready and self._communicator.is_ready():
            self._is_ready = True
            self._send(Ready())
        if self._is_ready and self._other_is_ready:
            self.is_joined = True
            logger.info("%s and %s are joined by %s", self._me, self._label, self._gpu.name)
            self._on_change()

    # ---- what the other end says --------------------------------------------------------------------------------

    def _listen(self, channel: RemoteChannel) -> None:
        for data in channel.receive():
            if not self.failure:
                self._take(decode(data))
        if channel.closed and not self.failure:
            left = channel.said_goodbye
            self.fail(
                f"{self._label} has left" if left else f"{self._label} died, or the network between us failed",
                is_expected=left,
            )

    def _take(self, frame: WireFrame) -> None:
        if isinstance(frame, UniqueId):
            if self._leads or self._communicator is not None:
                raise ValueError("an id that nobody waits for")
            self._communicator = self._gpu.join(1, frame.id)
        elif isinstance(frame, Ready):
            self._other_is_ready = True
        elif isinstance(frame, Failed):
            self.fail(f"{self._label} has given it up: {frame.why}", tell=False)
        elif isinstance(frame, Fetch):
            self._on_fetch(frame)
        elif isinstance(frame, NotThere):
            request = self._wanted.pop(frame.number, None)
            if request is not None:
                request.end(None, f"{self._label} does not hold it any more")
        elif isinstance(frame, There) and self._leads:
            self._turns.append((frame.number, False))
        elif isinstance(frame, Go) and not self._leads:
            self._turns.append((frame.number, not frame.to_you))
        else:
            raise ValueError(f"{type(frame).__name__} is for the other end to hear")

    def _on_fetch(self, frame: Fetch) -> None:
        copy = self._find(frame.number, frame.nbytes)
        if copy is None:
            self._send(NotThere(frame.number))
        else:
            # Held from now on, whatever its receiver says meanwhile.
            self._asked[frame.number] = copy
            self._copying.append(frame.number)

    # ---- transfers ----------------------------------------------------------------------------------------------

    def _look_at_copies(self) -> None:
        for number in list(self._copying):
            if self._asked[number].is_made():
                self._copying.remove(number)
                if self._leads:
                    self._turns.append((number, True))
                else:
                    self._send(There(number))

    def _go_on(self) -> None:
        if self._under_way is not None and not self._has_ended(*self._under_way):
            return
        communicator = self._communicator
        if not self._turns or communicator is None or not self._is_ready:
            return
        number, sends = self._turns.popleft()
        if self._leads:
            self._send(Go(number, to_you=sends))
        if sends:
            transfer = communicator.send(self._asked[number].bytes)
        else:
            # Asked for by a tap that may have given it up: it is on its way all the same.
            request = self._wanted[number]
            request.begun = True
            transfer = communicator.receive(request.nbytes)
        self._under_way = (transfer, number, sends, time.monotonic())

    def _has_ended(self, transfer: Transfer, number: int, sends: bool, since: float) -> bool:
        if not transfer.is_done():
            if time.monotonic() - since > self._limit():
                self.fail(f"a transfer took longer than {self._limit():g} s")
            return False
        self._under_way = None
        if sends:
            del self._asked[number]
        else:
            self._wanted.pop(number).end(transfer.bytes)
        return True

    # ---- the end ------------------------------------------------------------------------------------------------

    def fail(self, why: str, *, tell: bool = True, is_expected: bool = False) -> None:
        """Give the pair up, for good: whatever is published from now on takes the other way."""
        if self.failure:
            return
        # A message of CUDA's may quote a path, which need not be Unicode.
        why = self.failure = why.encode("utf-8", "replace").decode()
        was_joined, self.is_joined = self.is_joined, False
        logger.log(
            logging.INFO if is_expected else logging.WARNING,
            "tensors between %s and %s go through the hosts' memory and TCP from now on, and not by %s: %s",
            self._me,
            self._label,
            self._gpu.name,
            why,
        )
        if tell and self._channel is not None:
            self._send(Failed(why))
        if self._channel is not None:
            self._channel.close()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            # Memory that the device may still touch is held until it does so no more, if that is never.
            held = (self._under_way, dict(self._asked))
            self._aborting = threading.Thread(
                target=self._abort, args=(communicator, held), name="graftlab-wire-abort", daemon=True
            )
            try:
                self._aborting.start()
            except RuntimeError:
                # The interpreter ends, and starts no threads any more.
                self._aborting = None
                self._abort(communicator, held)
        self._under_way = None
        self._asked, self._copying = {}, []
        self._turns.clear()
        wanted, self._wanted = self._wanted, {}
        for request in wanted.values():
            request.end(None, why)
        if was_joined:
            self._on_change()

    def _abort(self, communicator: Communicator, held: object) -> None:
        try:
            communicator.abort()
        except Exception as error:
            _never_given_back.append(held)
            logger.warning("%s could not end what joined it to %s: %s", self._me, self._label, error)

    def close(self) -> None:
        """Be there no more."""
        self.fail("this rank has left", tell=False, is_expected=True)
        if self._aborting is not None:
            self._aborting.join(_ABORT_LIMIT)

    def _send(self, frame: WireFrame) -> None:
        assert self._channel is not None
        self._channel.send(encode(frame))
