"""Recording requests in a serving process without delaying it, and without losing any that were acknowledged."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from graftlab.errors import DumpError
from graftlab.requests.crash import CrashWatch
from graftlab.requests.records import RecordedRequest
from graftlab.requests.writing import Answer, DumpSettings, DumpWriter, OpenRequest, log

logger = logging.getLogger(__name__)

# Seconds that the end of a process waits for its requests to reach the disk.
CRASH_PATIENCE = 20.0
CLOSE_PATIENCE = 60.0


class RequestDumper:
    """Records requests into files of ``threshold`` each, which :func:`~graftlab.requests.load_dump` reads.

    ``folder`` is made if it does not exist; None records for a crash only, and nothing without a ``crash_folder``. Keys
    in ``exclude_meta_keys`` are left out of what is recorded of ``response["meta_info"]``. ``server_args`` are
    written into each file. At most ``max_waiting`` finished requests wait for a disk that fails (or two files, if that
    is more); then new ones are refused.

    **What is acknowledged.** A request for which :meth:`add` returned True is on disk, and stays there whatever ends
    the process: SIGKILL, SIGHUP, an abort, ``os._exit``. Until it is in a whole file it is in the journal: one or more
    files ``*.journal`` in ``crash_folder`` (or ``folder``). ``load_dump`` reads them, and each is removed once whole
    files have all of its requests. Only a power cut may lose a request, unless a :meth:`flush` begun after its
    ``add`` has returned True. If the journal cannot be written, there is a warning, and requests wait in memory alone.
    Whole files appear whole or not at all; an interrupted write leaves a hidden ``.*.tmp``, which readers ignore. A
    folder that has vanished is made again.

    :meth:`close`, a normal exit, :meth:`dump_before_crash`, and, with ``catch_crashes``, SIGTERM, SIGQUIT and an
    uncaught exception leave every request in a whole file; a journal that stays has none of them.

    **A crash** writes one file, into ``crash_folder`` (or ``folder``), with the requests finished in the last
    ``crash_window`` seconds, and those begun and not finished, their ``response`` and ``finished`` None. It is read on
    its own, so it has requests too that are in files already. ``crash["marks"]`` has an entry for each request: the
    path of the other file that has it, ``"unfinished"``, or None. At most ``max_waiting`` requests are held for that.
    Requests finished before that and not yet written go into an ordinary file. A request that finishes while the
    process ends is not written again; where a signal does not end the process after all, it is, with its response.

    ``add`` pickles the request where it is called. Whole files are pickled later, in the writer's thread: do not change
    requests, or what is inside of responses, after ``add``. Any thread may call any method. A forked process has
    nothing to write.

    Raises :class:`~graftlab.errors.DumpError` where a folder cannot be made, and with ``catch_crashes`` outside of the
    main thread; ValueError for a ``threshold`` below 1.

    >>> from graftlab.requests import RequestDumper
    >>> dumper = RequestDumper(session.folder / "served", threshold=100)
    >>> dumper.add({"rid": "req-0", "text": "hello"}, {"text": "world"}, created=0.0, finished=1.5)
    True
    >>> dumper.close()
    True
    """

    def __init__(
        self,
        folder: str | Path | None,
        threshold: int = 1000,
        exclude_meta_keys: Iterable[str] = ("routed_experts", "hidden_states"),
        crash_folder: str | Path | None = None,
        crash_window: float = 300.0,
        server_args: Any = None,
        *,
        catch_crashes: bool = False,
        max_waiting: int = 20_000,
    ) -> None:
        settings = _checked(DumpSettings(_path(folder), threshold, tuple(exclude_meta_keys)))
        self._for_crashes = _made(_path(crash_folder))
        self._rest = (self._for_crashes, crash_window, server_args, max_waiting)
        self._writer = DumpWriter(settings, *self._rest)
        self._closed = False
        self._watch = CrashWatch(self._last_act, self._went_on) if catch_crashes else None
        self._writer.start()
        atexit.register(self.close)
        _dumpers.add(self)

    @property
    def settings(self) -> DumpSettings:
        return self._writer.settings

    @property
    def written(self) -> int:
        """How many requests are in files, unfinished ones among them."""
        return self._writer.written

    @property
    def waiting(self) -> int:
        """How many finished requests are in memory alone."""
        return self._writer.waiting

    def begin(self, request: Any, created: float) -> bool:
        """Register a request that is being served, so that a crash before its ``add`` records it as unfinished.

        Requests are compared by identity: pass the same object to :meth:`add`, or to :meth:`forget`.
        Returns whether it is acknowledged. Never raises.
        """
        writer = self._writer
        if self._is_off(writer) or len(writer.open_requests) >= writer.limit:
            return False
        writer.open_requests[id(request)] = OpenRequest(RecordedRequest(request, None, created, None))
        return not (self._closed or writer.dying)

    def forget(self, request: Any) -> None:
        """Drop a request that was begun and will not be recorded."""
        self._writer.open_requests.pop(id(request), None)

    def add(self, request: Any, response: Any, created: float, finished: float) -> bool:
        """Record a finished request; times are seconds since the epoch. Returns whether it is acknowledged.

        It is not if the dumper is closed or off, if too many wait, or while the process ends. Never raises, never waits
        for the disk (the operating system writes the journal), and changes none of the objects.
        """
        try:
            return self._add(request, response, created, finished)
        except Exception:
            logger.exception("a request was not recorded")
            return False

    def flush(self, timeout: float | None = None) -> bool:
        """Write all waiting requests; True if every earlier ``add`` is on disk, and that within ``timeout`` seconds."""
        writer = self._writer
        answer = writer.wait(writer.order("flush", log_here=timeout is not None), timeout)
        if timeout is None:
            _log(answer)
        return answer is not None and answer.done

    def close(self) -> bool:
        """Write all waiting and unfinished requests, and stop recording; True if none is lost.

        Where ``folder`` fails, ``crash_folder`` is tried. Called at a normal exit as well.
        """
        writer = self._writer
        self._closed = True
        answer = writer.wait(writer.order("close", log_here=False), CLOSE_PATIENCE)
        _log(answer)
        if self._watch is not None:
            self._watch.stop()
        atexit.unregister(self.close)
        return answer is not None and answer.done

    def dump_before_crash(self, reason: str = "asked for") -> Path | None:
        """Write the crash's file; return None if it would have nothing new, or cannot be written.

        A request is written once: a second call writes those that are new since the first. Never raises, and waits
        at most 20 s. Safe in a signal handler.
        """
        writer = self._writer
        answer = writer.wait(writer.order("crash", reason, log_here=False), CRASH_PATIENCE)
        if answer is None:
            answer = Answer(False, None, [(logging.ERROR, f"the crash was not written within {CRASH_PATIENCE:g} s")])
        # The signal may have interrupted a write to the log, whose lock is then held.
        with contextlib.suppress(Exception):
            log(answer.notes)
        return answer.path

    def apply(self, settings: DumpSettings) -> None:
        """Change folder, threshold and excluded keys from the next request on.

        Waiting requests go into the new folder, or into the old one if recording ends. Raises
        :class:`~graftlab.errors.DumpError` for a folder that cannot be made and ValueError for a threshold below 1, and
        then changes nothing.
        """
        writer = self._writer
        before = writer.settings
        writer.settings = after = _checked(settings, before)
        if after.folder is None and before.folder is not None:
            writer.order("retire", folder=before.folder)
        writer.call()

    def _add(self, request: Any, response: Any, created: float, finished: float) -> bool:
        writer = self._writer
        if self._is_off(writer):
            return False
        if writer.waiting >= writer.limit:
            writer.refused.put(None)
            writer.call()
            return False
        settings = writer.settings
        open_request = writer.open_requests.get(id(request))
        record = RecordedRequest(request, _without(settings.exclude_meta_keys, response), created, finished)
        writer.accept(record, open_request)
        # Only now, so that a crash in between finds it in one of the two places.
        if open_request is not None:
            writer.open_requests.pop(id(request), None)
        if writer.waiting >= settings.threshold:
            writer.call()
        # Read after the record was put down: a crash that began later takes it in.
        return not (self._closed or writer.dying)

    def _last_act(self, reason: str) -> None:
        """Write the crash's file; nothing is acknowledged from here on."""
        self._writer.dying += 1
        self.dump_before_crash(reason)

    def _went_on(self) -> None:
        self._writer.dying -= 1

    def _is_off(self, writer: DumpWriter) -> bool:
        return self._closed or (writer.settings.folder is None and self._for_crashes is None)

    def _start_over(self) -> None:
        """Begin again in a forked process: the waiting requests and the thread are the parent's."""
        before = self._writer
        self._writer = DumpWriter(before.settings, *self._rest)
        before.abandon()


_dumpers: weakref.WeakSet[RequestDumper] = weakref.WeakSet()


def _after_fork() -> None:
    for dumper in list(_dumpers):
        dumper._start_over()


os.register_at_fork(after_in_child=_after_fork)


def _without(keys: tuple[str, ...], response: Any) -> Any:
    """Return the response without these keys in a copy of its ``meta_info``."""
    if not issubclass(type(response), dict):
        return response
    # Copies, since servers change such dicts once the response is sent.
    copy: dict[Any, Any] = dict(response)
    meta: Any = copy.get("meta_info")
    if issubclass(type(meta), dict):
        copy["meta_info"] = meta = dict(meta)
        for key in keys:
            meta.pop(key, None)
    return copy


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None or folder == "" else Path(folder).absolute()


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DumpError(f"the folder {folder} for recorded requests cannot be made: {error}") from error
    return folder


def _checked(settings: DumpSettings, before: DumpSettings | None = None) -> DumpSettings:
    if settings.threshold < 1:
        raise ValueError(f"threshold is the number of requests in a file, at least 1, not {settings.threshold}")
    folder = _path(settings.folder)
    # A folder that has vanished since is made again before the next write.
    if before is None or folder != before.folder:
        _made(folder)
    return replace(settings, folder=folder)


def _log(answer: Answer | None) -> None:
    if answer is not None:
        log(answer.notes)
