"""Where a rank is, told from time to time to those that cannot look into its memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

from graftlab.exchange.status_page import RankStatus, StatusPage

_REST = 0.05


class Heartbeat:
    """A thread that looks into this process's own page, and tells what is new there.

    What else may be new is in ``details``: they are told with it, and for their sake. A wait is told at the second
    look alone, for one that just ends is no wait. It ends when ``is_over`` says so.
    """

    def __init__(
        self,
        page: StatusPage,
        tell: Callable[[RankStatus], None],
        details: Callable[[], object],
        is_over: Callable[[], bool],
        rest: float = _REST,
    ) -> None:
        self._page = page
        self._tell = tell
        self._details = details
        self._is_over = is_over
        self._rest = rest

    def start(self) -> None:
        threading.Thread(target=self._run, name="graftlab-beacon", daemon=True).start()

    def _run(self) -> None:
        rest = threading.Event()
        told: object = None
        before: object = None
        while not self._is_over():
            # In this order: who waits, has had what had come before.
            details = self._details()
            try:
                look = self._page.read()
            except ValueError:
                # The memory was let go of, with all who were told.
                return
            now = (details, look)
            if now != told and (look.state != "waiting" or now == before):
                self._tell(look)
                told = now
            before = now
            rest.wait(self._rest)
