"""Who holds the session, on another machine, as a job sees it: asked over TCP, which then carries the job's line."""

from __future__ import annotations

import secrets
import select
import socket
import time
from typing import Any

from graftlab.config import Endpoint
from graftlab.exchange.channel import Channel
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.tcp import RouterSocket
from graftlab.jobs.greeting import Join, pack, unpack
from graftlab.jobs.relay import HOST, Relay


class DistantHost:
    """A connection to it, which begins when this is made."""

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        self._post = RouterSocket(derive_keys(token), b"line " + secrets.token_hex(8).encode())
        self._channel = self._post.connect(HOST, *endpoint)

    @property
    def is_stranger(self) -> bool:
        """Whether somebody is there who has not proved to know the token; no process of graftlab, perhaps."""
        return self._channel.reached and not self._channel.linked

    def ask(self, join: Join, limit: float) -> tuple[Any, list[bytes]] | None:
        """Its answer, and the frames of the line that came with it; None where none came in time."""
        self._channel.send(pack(join))
        deadline = time.monotonic() + limit
        while (remaining := deadline - time.monotonic()) > 0:
            frames = self._channel.receive()
            if frames:
                return unpack(frames[0]), frames[1:]
            if self._channel.closed:
                break
            select.select([self._post], [], [], remaining)
        self.close()
        return None

    def open_line(self, early: list[bytes]) -> tuple[Channel, socket.socket, Relay]:
        """This job's end of the line, and its bell, which nobody hears here: the other end has one of its own."""
        line, far_line = socket.socketpair()
        bell, far_bell = socket.socketpair()
        relay = Relay(self._post)
        relay.join(self._channel, far_line, far_bell, early)
        return Channel(line), bell, relay

    def close(self) -> None:
        self._post.close()
