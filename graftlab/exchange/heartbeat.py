"""Send this rank's status to processes that cannot read its memory, whenever it has changed."""

from __future__ import annotations

import threading
from collections.abc import Callable

from graftlab.exchange.status_page import RankStatus, StatusPage

_REST = 0.05


class Heartbeat:
    """A thread that reads this process's own status page every ``rest`` seconds and sends what has changed.

    A change of ``details()`` also causes a report. A wait is reported only when two reads in a row have found it,
    because most waits end within microseconds. The thread ends when ``is_over()`` is true.
    """

    def __init__(
        self,
        page: StatusPage,
        send: Callable[[RankStatus], None],
        details: Callable[[], object],
        is_over: Callable[[], bool],
        rest: float = _REST,
    ) -> None:
        self._page = page
        self._send = send
        self._details = details
        self._is_over = is_over
        self._rest = rest

    def start(self) -> None:
        threading.Thread(target=self._run, name="graftlab-heartbeat", daemon=True).start()

    def _run(self) -> None:
        rest = threading.Event()
        reported: object = None
        before: object = None
        while not self._is_over():
            # The details are read first: then a wait that the page shows has outlasted the arrival of everything they
            # count.
            details = self._details()
            try:
                status = self._page.read()
            except ValueError:
                # The exchange was closed, and its memory unmapped.
                return
            now = (details, status)
            if now != reported and (status.state != "waiting" or now == before):
                self._send(status)
                reported = now
            before = now
            rest.wait(self._rest)
