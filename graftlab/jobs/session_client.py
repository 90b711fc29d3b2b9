"""Asks a session server to admit this process as a rank, and starts a server if none listens."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from graftlab.base.world import Place
from graftlab.config import Endpoint, GraftConfig
from graftlab.errors import ConfigError, SessionError
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.handshake import (
    JoinAccepted,
    JoinRequest,
    RejoinState,
    RequestRefused,
    WorldShare,
    WorldShareRequest,
    ask,
    receive_handshake,
    send_handshake,
)
from graftlab.jobs.headless import start_headless_server
from graftlab.jobs.peer_connector import is_own_address
from graftlab.jobs.proxy import Proxy, TcpSessionClient
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import receive_descriptors, send_descriptors
from graftlab.ranks.own_place import own_backend, own_device

# Seconds between two requests.
_ASK_AGAIN = 0.5
# How many session servers a job tries to reach: a server may end with its last job just as this one asks.
_SERVERS = 3
# Seconds for which a job asks again while the server believes the rank's last process to be alive. The server notices
# after about 20 seconds that a machine has vanished.
_RANK_TAKEN_LIMIT = 30.0
# Seconds to wait for the answer of a session server on another machine before asking again.
_ANSWER_LIMIT = 15.0
_UNAUTHENTICATED = (
    "the process that listens there has a different token, or is not graftlab: GRAFTLAB_TOKEN (GRAFTLAB_TOKEN_FILE) "
    "must be the token that the session has printed, and GRAFTLAB_ADDRESS its address"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinResult:
    """The session server's answer; with a ``proxy`` if it was reached over TCP."""

    answer: JoinAccepted
    channel: SocketChannel
    wake: socket.socket
    token: str | None
    proxy: Proxy | None = None


class _RankTakenError(SessionError):
    """Raised when another process is this rank. It may be gone without the server having noticed."""


class SessionClient:
    """Asks to be admitted as a rank, until the config's ``timeout`` is over."""

    def __init__(self, place: Place, config: GraftConfig) -> None:
        self._place = place
        self._config = config
        self._deadline = time.monotonic() + config.timeout
        self._token = config.join_token()
        self._joined_over_network = False
        # Whether the last request reached a process with a different token.
        self._reached_unauthenticated = False

    def remaining(self) -> float:
        """Seconds until the deadline, but at least a millisecond."""
        return max(0.001, self._deadline - time.monotonic())

    def join(self) -> JoinResult:
        """Raises :class:`ConfigError` for settings that do not fit, :class:`SessionError` if no server admits it."""
        rest = threading.Event()
        last = time.monotonic() + min(_RANK_TAKEN_LIMIT, self.remaining())
        while True:
            try:
                return self._try_to_join()
            except _RankTakenError:
                if time.monotonic() + _ASK_AGAIN > last:
                    raise
            rest.wait(_ASK_AGAIN)

    def _try_to_join(self) -> JoinResult:
        endpoint = self._config.endpoint
        if endpoint is None:
            with Rendezvous(self._config.rendezvous) as rendezvous:
                return self._join_here(rendezvous, None)
        try:
            if is_own_address(endpoint.host) and not self._is_listening(endpoint):
                # No session exists yet, or a headless one, which also listens at the rendezvous.
                with Rendezvous(self._config.rendezvous) as rendezvous:
                    return self._join_here(rendezvous, endpoint)
            return self._join_over_network(endpoint)
        except socket.gaierror as error:
            raise ConfigError(
                f"address (GRAFTLAB_ADDRESS) is {endpoint}, and {endpoint.host} cannot be resolved: {error}"
            ) from error

    def _is_listening(self, endpoint: Endpoint) -> bool:
        try:
            socket.create_connection(endpoint, timeout=self.remaining()).close()
        except OSError:
            return False
        return True

    def _join_here(self, rendezvous: Rendezvous, endpoint: Endpoint | None) -> JoinResult:
        server: subprocess.Popen[bytes] | None = None
        for _ in range(_SERVERS):
            with rendezvous.locked():
                connection = rendezvous.connect(self.remaining())
                if connection is None:
                    listener = rendezvous.listen()
                    assert listener is not None
                    with listener:
                        server = start_headless_server(
                            self._config, rendezvous, listener, self._token_to_listen(rendezvous, endpoint)
                        )
                    connection = rendezvous.connect(self.remaining())
            if connection is None:
                continue
            with connection:
                result = self._ask(connection, None)
            if result is not None:
                return result
            # The server ended before it answered: its last job was gone, or it could not begin.
        log = rendezvous.folder / "session-server.log"
        ended = "" if server is None else f" (exit code {server.poll()})"
        raise SessionError(f"the session server in {rendezvous.folder} ended before it answered{ended}; see {log}")

    def _token_to_listen(self, rendezvous: Rendezvous, endpoint: Endpoint | None) -> str | None:
        """Return the token of the session that this job starts; print it if the config has none."""
        if endpoint is None:
            return None
        if self._token is None:
            self._token = rendezvous.session_token()
            sys.stderr.write(
                f"graftlab listens at {endpoint} for jobs on other machines; they join with GRAFTLAB_TOKEN="
                f"{self._token}\n"
            )
        return self._token

    def _join_over_network(self, endpoint: Endpoint) -> JoinResult:
        if self._token is None:
            raise ConfigError(
                f"token (GRAFTLAB_TOKEN) is not given, nor is token_file (GRAFTLAB_TOKEN_FILE); address is {endpoint}, "
                f"where jobs on several machines meet: the session that listens there has printed the token, or "
                f"`graftlab token FILE` makes one beforehand"
            )
        rest = threading.Event()
        while True:
            result = self._ask_over_network(endpoint, None)
            if result is not None:
                return result
            if self.remaining() < _ASK_AGAIN:
                guess = "does a session listen there, and is TCP allowed through the firewall?"
                raise SessionError(
                    f"no session with this token answered at {endpoint} within {self._config.timeout:g} s: "
                    f"{_UNAUTHENTICATED if self._reached_unauthenticated else guess}"
                )
            rest.wait(_ASK_AGAIN)

    def _ask_over_network(self, endpoint: Endpoint, state: RejoinState | None) -> JoinResult | None:
        assert self._token is not None
        limit = min(_ANSWER_LIMIT, self.remaining()) if state is None else _ANSWER_LIMIT
        client = TcpSessionClient(endpoint, self._token)
        try:
            reply = client.ask(self._request(state), limit)
            if reply is None:
                self._warn_of_unauthenticated(endpoint, client.reached_unauthenticated)
                return None
            message, early = reply
            answer = self._accepted(message)
            channel, wake, proxy = client.open_connection(early)
        except BaseException:
            client.close()
            raise
        self._joined_over_network = True
        return JoinResult(answer, channel, wake, self._token, proxy)

    def _warn_of_unauthenticated(self, endpoint: Endpoint, is_unauthenticated: bool) -> None:
        """Warn at once, because waiting will hardly help, and the job is silent until its time is over."""
        if is_unauthenticated and not self._reached_unauthenticated:
            logger.warning("%s: at %s %s. This job keeps trying", self._config.role, endpoint, _UNAUTHENTICATED)
        self._reached_unauthenticated = is_unauthenticated

    def rejoin(self, state: RejoinState, segment: int | None) -> JoinResult | None:
        """Join the session that listens now, or return None if none does.

        ``segment`` is the descriptor of this rank's memory, if the server is to read its status page there.
        """
        endpoint = self._config.endpoint
        if self._joined_over_network and endpoint is not None:
            return self._ask_over_network(endpoint, state)
        with Rendezvous(self._config.rendezvous) as rendezvous:
            connection = rendezvous.connect(self._config.timeout)
            if connection is None:
                return None
            with connection:
                return self._ask(connection, state, segment)

    def _ask(
        self, connection: socket.socket, state: RejoinState | None, segment: int | None = None
    ) -> JoinResult | None:
        """Send the request and return the answer; None if the server ended before answering."""
        connection.settimeout(self.remaining() if state is None else self._config.timeout)
        try:
            send_handshake(connection, self._request(state))
            if segment is not None:
                send_descriptors(connection, [segment])
            reply = receive_handshake(connection)
            if reply is None:
                return None
            answer = self._accepted(reply)
            channel, wake = receive_descriptors(connection, answer.descriptors)
        except (ConnectionError, EOFError):
            return None
        except TimeoutError:
            raise SessionError(
                f"the session server in {self._config.rendezvous} did not answer within {self._config.timeout:g} s. "
                f"One that a job started may take that long to start: a larger timeout (GRAFTLAB_TIMEOUT) waits "
                f"longer; its log is session-server.log there"
            ) from None
        ends = SocketChannel(socket.socket(fileno=channel)), socket.socket(fileno=wake)
        return JoinResult(answer, *ends, answer.token)

    def fetch_share(self, world: int) -> tuple[WorldShare, list[int]]:
        """Fetch this rank's descriptors of a world from the session server on this machine."""
        place = self._place
        sizes = place.world_size, place.other_world_size
        request = WorldShareRequest(world, place.side, place.rank, *sizes, os.getpid())
        with Rendezvous(self._config.rendezvous) as rendezvous:
            connection = rendezvous.connect(self._config.timeout)
            if connection is None:
                raise SessionError("the session server has ended")
            with connection:
                connection.settimeout(self._config.timeout)
                reply = ask(connection, request, WorldShare, SessionError)
                return reply, receive_descriptors(connection, reply.descriptors)

    def _request(self, state: RejoinState | None) -> JoinRequest:
        return JoinRequest(
            side=self._place.side,
            rank=self._place.rank,
            world_size=self._place.world_size,
            other_world_size=self._place.other_world_size,
            pid=os.getpid(),
            device=str(own_device()),
            backend=own_backend(),
            plan=to_wire(self._config.plan()) if state is None else None,
            rejoin=state,
            first_step=self._config.first_step,
        )

    def _accepted(self, reply: Any) -> JoinAccepted:
        if isinstance(reply, RequestRefused):
            if reply.again:
                raise _RankTakenError(reply.error)
            raise ConfigError(reply.error) if reply.settings else SessionError(reply.error)
        if not isinstance(reply, JoinAccepted):
            raise SessionError(f"the session server answered {type(reply).__name__}")
        return reply
