"""The thread that writes recorded requests into files, and is their only owner once it has taken them from the inbox.

Everything between it and the serving threads goes through queues that need no lock: a signal handler may run while the
main thread is inside any of them. For the same reason the thread itself does not log: the interrupted main
thread may hold the log's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import queue
import re
import secrets
import shlex
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from graftlab.requests.journal import Journal, packed
from graftlab.requests.pickling import RequestWriteError, pickle_in_steps
from graftlab.requests.records import Dropped, RecordedRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Note = tuple[int, str]
Kind = Literal["flush", "retire", "crash", "close", "repeat"]

# Options whose values must not appear in files that people share.
_SECRET = re.compile(r"--?(?:[\w-]*[-_])?(?:token|secret|password|api[-_]key)", re.IGNORECASE)
# Seconds between the tries of a full buffer, after one and after many failures.
_FIRST_RETRY, _LAST_RETRY = 1.0, 60.0


@dataclass(frozen=True)
class DumpSettings:
    """Settings that can change while requests are recorded. Without a ``folder`` they are only kept for a crash."""

    folder: Path | None
    threshold: int
    exclude_meta_keys: tuple[str, ...]


@dataclass(eq=False)
class OpenRequest:
    """A request that is being served. ``over`` once it is recorded as finished, or written as unfinished."""

    record: RecordedRequest
    over: bool = False


@dataclass(frozen=True)
class QueuedRequest:
    """A finished request that waits to be written, only to a crash dump if ``for_crash``.

    ``number`` is its number in the journal, ``finished_at`` when it finished by the monotonic clock.
    """

    record: RecordedRequest
    open_request: OpenRequest | None
    for_crash: bool
    number: int
    finished_at: float = math.inf


@dataclass(frozen=True)
class Answer:
    """The result of an order: whether no request waits any longer, and the crash's file if one was written."""

    done: bool
    path: Path | None
    notes: list[Note]


@dataclass(frozen=True)
class _Order:
    kind: Kind
    reason: str
    folder: Path | None
    log_here: bool
    reply: queue.SimpleQueue[Answer] = field(default_factory=queue.SimpleQueue)


class DumpWriter:
    """Writes the requests that serving threads put into ``inbox``: a full buffer at a time, or all when ordered."""

    def __init__(
        self, settings: DumpSettings, crash_folder: Path | None, crash_window: float, server_args: Any, max_waiting: int
    ) -> None:
        self.settings = settings
        self.inbox: deque[QueuedRequest] = deque()
        self.open_requests: dict[int, OpenRequest] = {}
        self.refused: queue.SimpleQueue[None] = queue.SimpleQueue()  # counts without a lock
        self.written = 0
        self.dying = 0  # the number of signals and exceptions being handled that may end the process
        self._crash_folder = crash_folder
        self._crash_window = crash_window
        self._server_args = server_args
        self._max_waiting = max_waiting
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._called = False
        self._held: deque[QueuedRequest] = deque()
        self._passing: deque[QueuedRequest] = deque(maxlen=max_waiting)
        # Requests already in files that a crash's file shall include too, each with the path of its file.
        self._recent: deque[tuple[QueuedRequest, str]] = deque(maxlen=max_waiting)
        self._troubles: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._is_in_trouble = False
        self._refusals = 0
        self._failures = 0
        self._retry_at: float | None = None
        self._paths: deque[tuple[float, str]] = deque(maxlen=1000)
        self._token = secrets.token_hex(4)
        self._journal = Journal(self._token, lambda: self._content([], [], {}))
        self._numbers = itertools.count(1)
        self._started = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="graftlab-requests", daemon=True)

    # ---- for any thread, and for signal handlers ---------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Finished requests that are in no file yet."""
        return len(self.inbox) + len(self._held)

    @property
    def limit(self) -> int:
        """How many may wait; at least two files, or none would ever be full."""
        return max(self._max_waiting, 2 * self.settings.threshold)

    def start(self) -> None:
        if self._started.acquire(blocking=False):  # taken once and for all
            try:
                self._thread.start()
            except BaseException:
                self._started.release()
                raise

    def abandon(self) -> None:
        """Leave everything to the parent, in a forked process."""
        self._journal.abandon()

    def call(self) -> None:
        """Wake the thread to look into the inbox."""
        if not self._called:
            self._called = True
            self.start()
            self._orders.put(None)

    def accept(self, record: RecordedRequest, open_request: OpenRequest | None) -> None:
        """Queue a finished request, after writing it into the journal."""
        for_crash = self.settings.folder is None
        folder = self._crash_folder or self.settings.folder
        assert folder is not None
        payload, finished_at = _packed(record), _finished_at(record)

        def put(number: int) -> None:
            self.inbox.append(QueuedRequest(record, open_request, for_crash, number, finished_at))

        if self.dying:
            # It is not acknowledged, and the crash's file may have it as unfinished.
            put(0)
            return
        is_gone, error = self._journal.accept(folder, payload, put)
        if error is not None and not self._is_in_trouble:
            self._troubles.put(
                f"the journal in {folder} cannot be written: {error}; until it can, a process that is killed loses the "
                "requests that are in memory"
            )
        if is_gone:
            self.order("repeat")
        elif (error is not None) != self._is_in_trouble:
            self.call()
        self._is_in_trouble = error is not None

    def order(
        self,
        kind: Kind,
        reason: str = "",
        folder: Path | None = None,
        log_here: bool = True,
    ) -> _Order:
        """Queue an order behind all that was recorded before. With ``log_here`` the thread logs its notes itself."""
        order = _Order(kind, reason, folder or self.settings.folder, log_here)
        self.start()
        self._orders.put(order)
        return order

    def wait(self, order: _Order, timeout: float | None) -> Answer | None:
        """Return the answer to an order; None when it does not arrive within ``timeout`` seconds."""
        if threading.current_thread() is self._thread:
            return None  # called by an object being pickled: the answer could never arrive
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            # A closed thread does not answer, and the thread may close at any moment.
            ended = self._thread.ident is not None and not self._thread.is_alive()
            try:
                return order.reply.get(timeout=0 if ended else min(left, 0.05))
            except queue.Empty:
                if ended:
                    return Answer(not self.waiting, None, [])
        return None

    # ---- the thread's own --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        order: _Order | None = None
        while order is None or order.kind != "close":
            pause = None if self._retry_at is None else max(0.0, self._retry_at - time.monotonic())
            try:
                order = self._orders.get(timeout=pause)
            except queue.Empty:
                order = None
            notes: list[Note] = []
            path, done = None, False
            try:
                path = self._obey(order, notes)
                done = not self._held
            except BaseException as error:  # recorded objects may raise anything, wherever they are used
                notes.append((logging.ERROR, f"requests wait because the writer failed: {type(error).__name__}"))
            if order is not None:
                order.reply.put(Answer(done, path, notes))
            if notes and (order is None or order.log_here):
                # A separate thread, because it may have to wait for the log's lock.
                with contextlib.suppress(RuntimeError):  # no thread can be started, and requests matter more than logs
                    threading.Thread(target=log, args=(notes,), name="graftlab-requests-log", daemon=True).start()

    def _obey(self, order: _Order | None, notes: list[Note]) -> Path | None:
        if order is None:
            self._called = False
        self._take_in()
        while not self._troubles.empty():
            notes.append((logging.WARNING, self._troubles.get()))
        if order is None:
            self._write_full(notes)
            self._journal.tidy(self._lowest)
        elif order.kind == "repeat":
            self._repeat(notes)
        elif order.kind == "flush":
            self._write_all([order.folder], notes)
        elif order.kind == "retire":
            # If a new folder was set meanwhile, all requests can go there.
            if self.settings.folder is None:
                self._write_all([order.folder], notes)
        elif order.kind == "crash":
            return self._crash(order, notes)
        else:
            self._close(order, notes)
        return None

    def _write_full(self, notes: list[Note]) -> None:
        if self._retry_at is not None and time.monotonic() < self._retry_at:
            return
        self._retry_at = None
        settings = self.settings
        while settings.folder is not None and len(self._held) >= settings.threshold:
            if not self._write_held([settings.folder], settings.threshold, notes):
                break

    def _take_in(self) -> None:
        while self.inbox:
            finished = self.inbox.popleft()
            if finished.open_request is not None:
                if finished.open_request.over and self.dying:
                    continue  # the crash's file has it as unfinished
                finished.open_request.over = True
            (self._passing if finished.for_crash else self._held).append(finished)
        while not self.refused.empty():
            self.refused.get()
            self._refusals += 1
        while self._passing and not self._is_recent(self._passing[0]):
            self._passing.popleft()
        while self._recent and not self._is_recent(self._recent[0][0]):
            self._recent.popleft()

    def _is_recent(self, finished: QueuedRequest) -> bool:
        return not time.monotonic() - finished.finished_at > self._crash_window

    def _write_all(self, folders: list[Path | None], notes: list[Note]) -> None:
        while self._held and self._write_held(folders, self.settings.threshold, notes):
            pass

    def _write_held(self, folders: Iterable[Path | None], count: int, notes: list[Note]) -> bool:
        written = list(itertools.islice(self._held, count))
        path = self._write("", folders, written, {}, notes)
        if path is None:
            self._failures += 1
            self._retry_at = time.monotonic() + min(_FIRST_RETRY * 2.0 ** (self._failures - 1), _LAST_RETRY)
            return False
        for finished in written:
            self._held.popleft()
            self._recent.append((finished, str(path)))
        self._failures, self._retry_at = 0, None
        self._journal.tidy(self._lowest, force=True)
        return True

    def _crash(self, order: _Order, notes: list[Note]) -> Path | None:
        recent = [*self._passing, *(finished for finished in self._held if self._is_recent(finished))]
        old = [finished for finished in self._held if not self._is_recent(finished)]
        still_open = self._still_open()
        folders = [self._crash_folder, order.folder]
        path = None
        if recent or still_open or self._recent:
            # A crash's file is complete in itself: it repeats and marks requests that are in other files.
            again = list(self._recent)
            marks = [*(name for _, name in again), *[None] * len(recent), *["unfinished"] * len(still_open)]
            since = time.monotonic() - self._crash_window
            before = [str(name) for written, name in self._paths if written >= since]
            crash = {"crash": {"reason": order.reason, "files": before, "marks": marks}}
            in_flight = [QueuedRequest(open_request.record, open_request, True, 0) for open_request in still_open]
            path = self._write("crash_", folders, [*recent, *in_flight], crash, notes, [each for each, _ in again])
            if path is not None:
                for open_request in still_open:
                    open_request.over = True
                self._passing.clear()
                self._recent.clear()
                self._held = deque(old)
        if self._held:
            self._write_all(folders[::-1], notes)
        # An interrupted `add` may hold the journal, and cannot continue before this is over.
        self._journal.tidy(self._lowest, force=True, patience=0.1)
        return path

    def _close(self, order: _Order, notes: list[Note]) -> None:
        if order.folder is not None:
            for open_request in self._still_open():
                open_request.over = True
                self._held.append(QueuedRequest(open_request.record, open_request, False, 0))
        self._write_all([order.folder, self._crash_folder], notes)
        # Requests kept only for a crash are no longer needed.
        self._passing.clear()
        self._journal.tidy(self._lowest, force=True, patience=1.0)
        if self._held:
            where = ", ".join(str(path) for path in self._journal.paths if path.exists())
            fate = f"are in no file but the journal {where}" if where else "are lost: they could not be written"
            notes.append((logging.ERROR, f"{len(self._held)} recorded requests {fate}"))

    def _lowest(self) -> int | None:
        """Return the lowest number of a request that no whole file has."""
        heads = [waiting[0].number for waiting in (self._held, self._passing, self.inbox) if waiting]
        # Requests that arrived while a signal was handled have no number.
        return min(filter(None, heads), default=None)

    def _repeat(self, notes: list[Note]) -> None:
        """Write the requests that are only in memory again, after their segment has vanished."""
        for finished in [*self._held, *self._passing]:
            try:
                self._journal.repeat(finished.number, _packed(finished.record))
            except OSError as error:
                notes.append((logging.WARNING, f"the journal cannot be written: {error}"))
                return

    def _still_open(self) -> list[OpenRequest]:
        return [open_request for open_request in self.open_requests.copy().values() if not open_request.over]

    def _write(
        self,
        prefix: str,
        folders: Iterable[Path | None],
        written: list[QueuedRequest],
        more: dict[str, Any],
        notes: list[Note],
        again: Sequence[QueuedRequest] = (),
    ) -> Path | None:
        """Write one file in the first folder that accepts it; None if none does. ``again`` are in files already."""
        refusals = self._refusals
        dropped: list[Dropped] = []
        if refusals:
            dropped = [{"where": f"{refusals} requests", "reason": f"refused because {self.limit} were waiting"}]
        content = self._content([*again, *written], dropped, more)
        for folder in dict.fromkeys(folder for folder in folders if folder is not None):
            name = f"{prefix}{time.strftime('%Y-%m-%d_%H-%M-%S')}_{self._token}_{next(self._numbers):06d}.pkl"
            try:
                # A folder that has vanished is made again.
                folder.mkdir(parents=True, exist_ok=True)
                self._journal.mark(folder / name, [finished.number for finished in written])
                gone, failures = write_whole(folder / name, lambda file: pickle_in_steps(content, file))
            except (OSError, RequestWriteError) as error:
                more_refused = f"; {refusals} more were refused" if refusals else ""
                text = (
                    f"cannot write {len(written)} requests into {folder}: {error}; {self.waiting} wait in memory, "
                    f"where at most {self.limit} may, and the next flush tries again{more_refused}"
                )
                notes.append((logging.ERROR, text))
                continue
            self._refusals = 0
            self.written += len(written)
            self._paths.append((time.monotonic(), str(folder / name)))
            notes += [(logging.WARNING, f"the requests of {folder / name}: {failure}") for failure in failures]
            notes += [(logging.WARNING, f"{folder / name}: {item['where']}: {item['reason']}") for item in gone]
            notes.append((logging.INFO, f"wrote {len(written)} requests to {folder / name}"))
            return folder / name
        return None

    def _content(
        self, written: Sequence[QueuedRequest], dropped: list[Dropped], more: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "server_args": self._server_args,
            "requests": [tuple(finished.record) for finished in written],
            "launch_command": launch_command(),
            "dropped": dropped,
            **more,
        }


def _packed(record: RecordedRequest) -> bytes:
    return packed({"server_args": None, "requests": [tuple(record)], "dropped": []})


def _finished_at(record: RecordedRequest) -> float:
    """When a request finished, by a clock that continues where the computer's time is set meanwhile."""
    # A time that is not a number must not cause the loss of the request.
    try:
        return time.monotonic() - (time.time() - float(record.finished or "nan"))
    except Exception:
        return math.inf


def launch_command() -> str:
    """Return the command line that started this process, quoted for a shell, with ``***`` for its secrets."""
    words: list[str] = []
    for word in map(str, sys.orig_argv):
        option, equals, _ = word.partition("=")
        if equals and _SECRET.fullmatch(option):
            word = f"{option}=***"
        elif words and _SECRET.fullmatch(words[-1]):
            word = "***"
        words.append(word)
    return shlex.join(words)


def log(notes: list[Note]) -> None:
    for level, text in notes:
        logger.log(level, "%s", text)


def write_whole(path: Path, fill: Callable[[IO[bytes]], T]) -> T:
    """Write a file that appears whole or not at all, survives a power cut, and is readable by its owner alone.

    Raises OSError, and the errors of ``fill``.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            result = fill(file)
            file.flush()
            os.fsync(descriptor)
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # The file exists; not every file system can make its name durable too.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return result
