"""The rank's end of its control connection to the session."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import RankStatus, WireStatus
from graftlab.ranks.messages import FromRank, PlanAdopted, StatusUpdate, TapSeen, pack, pack_row
from graftlab.rows.schema import Row

# Room for some thousand rows: bursts fit into the socket, so no thread of the rank has to send them.
_SEND_BUFFER = 4 << 20


class ControlConnection:
    """Sends messages and rows, from any thread. A grafter reports to it.

    The session lets rows gather for a moment before it reads them; a byte on the ``wake`` socket makes it read at once.
    """

    def __init__(self, channel: SocketChannel, wake: socket.socket) -> None:
        self._set_ends(channel, wake)

    def _set_ends(self, channel: SocketChannel, wake: socket.socket) -> None:
        channel.make_room(_SEND_BUFFER)
        wake.setblocking(False)
        self.channel, self._wake_socket, self._was_full = channel, wake, False

    def send(self, message: FromRank) -> None:
        """Send a message that the session should read at once."""
        self.channel.send(pack(message))
        self._wake()

    def send_status(self, status: RankStatus) -> None:
        """Send the rank's status, to a session that cannot read its status page."""
        self.channel.send(pack(StatusUpdate(WireStatus.of(status))))

    # ---- what the grafter reports -------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        self._send_later(pack_row(row))

    def seen(self, tags: dict[str, Any]) -> None:
        self._send_later(pack(TapSeen(tags)))

    def adopted(self, version: int, step: int) -> None:
        self.send(PlanAdopted(version, step))

    def _send_later(self, frame: bytes | bytearray) -> None:
        """Send a frame that the session may read later, with others."""
        self.channel.send(frame)
        # Wake the session once when more rows wait than the socket holds.
        is_full = self.channel.backed_up
        if is_full and not self._was_full:
            self._wake()
        self._was_full = is_full

    def _wake(self) -> None:
        # A full socket wakes the session anyway; a closed one has no reader to wake.
        with contextlib.suppress(OSError):
            self._wake_socket.send(b"!")
