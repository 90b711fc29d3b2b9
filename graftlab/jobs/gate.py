"""Where jobs of other machines come in: whoever holds the session listens there, and speaks for their lines."""

from __future__ import annotations

import socket
from collections.abc import Callable

from graftlab.config import Endpoint
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.tcp import RemoteChannel, RouterSocket
from graftlab.jobs.relay import HOST, Relay


class Gate:
    """Listens when it is made, at the endpoint, and lets nobody in before :meth:`open`.

    Who does not know the token does not come as far as to say a word.
    """

    def __init__(self, endpoint: Endpoint, token: str) -> None:
        """Raises OSError where it cannot listen there, and :class:`ConfigError` for a token that could be guessed."""
        self.token = token
        self._post = RouterSocket(derive_keys(token), HOST, endpoint.host, (endpoint.port,))
        self.endpoint = Endpoint(endpoint.host, self._post.port)
        self._relay: Relay | None = None

    def open(self, greet: Callable[[RemoteChannel, bytes], None]) -> None:
        """Hand the first word of each process that comes to ``greet``, on a thread of the gate's."""
        self._relay = Relay(self._post, greet)

    def carry(self, far: RemoteChannel, line: socket.socket, bell: socket.socket) -> None:
        """Pass on from now on what the process says on its line, and what it is told; for ``greet`` to call."""
        assert self._relay is not None
        self._relay.join(far, line, bell)

    def close(self) -> None:
        if self._relay is None:
            self._post.close()
        else:
            self._relay.close()
