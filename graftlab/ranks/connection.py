"""The rank's end of its line to the notebook."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from graftlab.exchange.channel import Channel
from graftlab.ranks.messages import FromRank, PlanAdopted, TapSeen, pack, pack_row
from graftlab.rows.schema import Row

# Some thousand rows: what comes faster than the notebook reads it costs the model's thread no turns of another one.
_ROOM = 4 << 20


class Line:
    """Sends messages and rows, from any thread; also what a grafter reports to.

    The notebook lets rows gather for a moment before it looks again; the bell asks it to look now.
    """

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        self.channel = channel
        channel.make_room(_ROOM)
        bell.setblocking(False)
        self._bell = bell
        self._rung = False

    def reconnect(self, channel: Channel, bell: socket.socket) -> None:
        """Go on with another notebook, on its channel."""
        channel.make_room(_ROOM)
        bell.setblocking(False)
        self._bell.close()
        self.channel, self._bell, self._rung = channel, bell, False

    def send(self, message: FromRank) -> None:
        """Send what somebody may wait for."""
        self.channel.send(pack(message))
        self._ring()

    # ---- what the grafter reports -------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        self._post(pack_row(row))

    def seen(self, tags: dict[str, Any]) -> None:
        self._post(pack(TapSeen(tags)))

    def adopted(self, version: int, step: int) -> None:
        self.send(PlanAdopted(version, step))

    def _post(self, frame: bytes) -> None:
        """Send what may wait with others of its kind."""
        self.channel.send(frame)
        # More rows than the socket holds: ring once.
        backed_up = self.channel.backed_up
        if backed_up and not self._rung:
            self._ring()
        self._rung = backed_up

    def _ring(self) -> None:
        # A full bell is ringing already, and one without a notebook rings for nobody.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")
