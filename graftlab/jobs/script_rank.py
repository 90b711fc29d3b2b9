"""A script's process as a rank: it joins where the script first calls its model, and works while the script waits."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graftlab.base.world import Place, Side
from graftlab.errors import ConfigError, GraftError
from graftlab.exchange.channel import SocketChannel
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.handshake import HoldAccepted, HoldRequest, ask
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.plan.wire import from_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.descriptors import make_exchange, receive_descriptors
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_update import HeldUpdate
from graftlab.ranks.holding import ScriptEnd, UnitKind, held_unit, hold, release_call
from graftlab.ranks.messages import RunRequest
from graftlab.ranks.namespace import Namespace
from graftlab.ranks.own_place import own_backend, own_device, own_rank
from graftlab.ranks.process_end import die_with_notebook
from graftlab.ranks.worker import Rank

_CLAIM = "-is-a-process"
# Seconds to wait for the answer of the process that compares.
_ANSWER_LIMIT = 60.0


def forget_claims(folder: Path) -> None:
    """Let other processes become the ranks of a comparison in this folder."""
    for claim in folder.glob(f"*{_CLAIM}"):
        claim.unlink()


def _claim_rank(folder: Path, side: Side, rank: int) -> bool:
    """Whether this process is the first of a rank to call a model, and so becomes that rank.

    A script may start other processes, whose environment names the same rank.
    """
    try:
        os.close(os.open(folder / f"{side}-{rank}{_CLAIM}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except (FileExistsError, FileNotFoundError):
        return False
    return True


class ScriptRank(Rank):
    """A rank whose main loop runs while its script waits in a held call or update."""

    choice: WatchChoice
    _next_unit: tuple[UnitKind, int] | None = None
    _has_begun = False
    _is_over = False

    def __init__(self, hold_nothing: Callable[[], None], death_pipe: int, *given: Any) -> None:
        self._hold_nothing = hold_nothing
        self._death_pipe = death_pipe
        self._runs = 0
        super().__init__(*given)
        atexit.register(self._report_end, os.getpid())

    def waits_in(self, kind: UnitKind, number: int) -> bool:
        """Whether the script waits in this call or update. It does not wait in those before the chosen one."""
        if self._next_unit not in (None, (kind, number)):
            return False
        self._next_unit = None
        return True

    def skip_to(self, kind: UnitKind, number: int) -> None:
        """Let the script continue to this call or update, unless it is already there."""
        if held_unit() != (kind, number):
            self._next_unit = (kind, number)
            release_call()

    def hold(self, call: HeldCall | HeldUpdate) -> None:
        """Repeat this call or update as the notebook asks, until it is released."""
        hold(call)
        with self._interruptible():
            if not self._has_begun:
                self._has_begun = True
                self.begin()
            while not call.is_released and not self._control.stopping:
                self.handle_next()
        if self._control.stopping:
            # The comparison is over, and the script ends with it.
            self._line.channel.drain(5.0)
            os._exit(0)

    def _run(self, request: RunRequest) -> None:
        super()._run(request)
        self._runs += 1

    def _report_end(self, process: int) -> None:
        """Answer the notebook's next request by the script's end: it calls no model again.

        The exit code of its command would not tell, because collective libraries may abort while a process ends.
        """
        if os.getpid() != process or self._is_over:
            return
        error = getattr(sys, "last_value", None)
        hold(ScriptEnd(None if error is None else f"{type(error).__name__}: {error}"))
        runs = self._runs
        while self._runs == runs and not self._control.stopping:
            self.handle_next()
        self._is_over = True
        self._line.channel.drain(5.0)

    def end(self) -> None:
        if not self._is_over:
            super().end()

    def leave(self) -> None:
        """Let the script continue without graftlab, even when the notebook ends."""
        self._is_over = True
        self._hold_nothing()
        release_call()
        fcntl.fcntl(self._death_pipe, fcntl.F_SETFL, fcntl.fcntl(self._death_pipe, fcntl.F_GETFL) & ~os.O_ASYNC)

    @contextlib.contextmanager
    def _interruptible(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            # Python handles signals only on the main thread, which runs the script's own code.
            yield
            return
        before = signal.signal(signal.SIGINT, self.on_interrupt)
        self._takes_interrupts = True
        try:
            yield
        finally:
            self._takes_interrupts = False
            signal.signal(signal.SIGINT, before)

    _takes_interrupts = False

    def _interrupt(self, run: int) -> None:
        if self._takes_interrupts:
            super()._interrupt(run)


_rank: ScriptRank | None = None


def skip_to(kind: UnitKind, number: int) -> None:
    """Let this process continue to a call or an update. The notebook sends this function to ranks by its name."""
    assert _rank is not None
    _rank.skip_to(kind, number)


def leave() -> None:
    """End this process's part of the comparison. The notebook sends this function to ranks by its name."""
    assert _rank is not None
    _rank.leave()


def become_rank(folder: Path, side: Side, hold_nothing: Callable[[], None]) -> ScriptRank | None:
    """Become a rank, or end the process with the reason why it cannot. Returns None if another process is this rank."""
    global _rank
    try:
        if not _claim_rank(folder, side, own_rank()[0]):
            return None
        _rank = _join(folder, side, hold_nothing)
    except (GraftError, OSError, EOFError) as error:
        sys.stderr.write(f"graftlab compare: {error}\n")
        sys.stderr.flush()
        # A script might catch an exception, and then continue without being compared.
        os._exit(1)
    return _rank


def _join(folder: Path, side: Side, hold_nothing: Callable[[], None]) -> ScriptRank:
    rank, size, _ = own_rank()
    device = own_device()
    with Rendezvous(folder) as rendezvous:
        connection = rendezvous.connect(_ANSWER_LIMIT)
    if connection is None:
        raise ConfigError(f"the comparison in {folder} is over")
    with connection:
        connection.settimeout(_ANSWER_LIMIT)
        request = HoldRequest(side, rank, size, os.getpid(), str(device), own_backend())
        answer = ask(connection, request, HoldAccepted, ConfigError)
        *shared, line, wake, death_pipe = receive_descriptors(connection, answer.descriptors)
    die_with_notebook(death_pipe)
    place = Place(side, rank, size, answer.other_world_size)
    exchange, own = make_exchange(
        place, shared, answer.segment_size, budget=answer.buffer_budget, timeout=answer.tap_timeout
    )
    joined = ScriptRank(
        hold_nothing,
        death_pipe,
        place,
        device,
        from_wire(answer.plan),
        exchange,
        own,
        KeptPairs(answer.keep_budget),
        ControlConnection(SocketChannel(socket.socket(fileno=line)), socket.socket(fileno=wake)),
        Namespace(sys.modules["__main__"]),
    )
    joined.choice = WatchChoice(answer.include, answer.functions, answer.inside)
    return joined
