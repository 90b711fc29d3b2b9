"""How a job's process comes to its place in a session: whom it asks, where, and what it is handed."""

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
    JoinRefused,
    JoinRequest,
    RejoinState,
    WorldShare,
    WorldShareRequest,
    graftlab_version,
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

# Seconds between two attempts to find who holds the session, on another machine.
_ASK_AGAIN = 0.5
# So many hosts are started before a job gives up: each may end, for its last job is gone, just as another comes.
_SERVERS = 3
# Seconds for which a process is not let in because the one before it seems to be there: a machine that has vanished is
# noticed so late.
_MIND_CHANGES = 30.0
# Seconds for the answer of who holds the session, on another machine. Where none comes it is asked anew.
_ANSWER_LIMIT = 15.0
_STRANGER = (
    "somebody listens who has another token, or is no process of graftlab: GRAFTLAB_TOKEN (GRAFTLAB_TOKEN_FILE) must "
    "be the token that whoever holds the session has printed, and GRAFTLAB_ADDRESS the address"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JoinResult:
    """What the session server has sent; with a ``proxy`` it was reached over TCP."""

    joined: JoinAccepted
    channel: SocketChannel
    wake: socket.socket
    token: str | None
    proxy: Proxy | None = None


class _RankTakenError(SessionError):
    """Another process has the place, which may be gone without anybody having noticed."""


class SessionClient:
    """Asks for a place, until it is there or the config's time is over."""

    def __init__(self, place: Place, config: GraftConfig) -> None:
        self._place = place
        self._config = config
        self._deadline = time.monotonic() + config.timeout
        self._token = config.join_token()
        self._joined_over_network = False
        # At the last try.
        self._reached_stranger = False

    def remaining(self) -> float:
        """Seconds until the deadline; never quite none."""
        return max(0.001, self._deadline - time.monotonic())

    def join(self) -> JoinResult:
        """Raises :class:`ConfigError` for settings that do not fit, :class:`SessionError` where nobody lets it in."""
        rest = threading.Event()
        last = time.monotonic() + min(_MIND_CHANGES, self.remaining())
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
                # Nobody holds the session yet, or one of the jobs' own does, which is in the folder too.
                with Rendezvous(self._config.rendezvous) as rendezvous:
                    return self._join_here(rendezvous, endpoint)
            return self._join_over_network(endpoint)
        except socket.gaierror as error:
            raise ConfigError(f"address (GRAFTLAB_ADDRESS) is {endpoint}, and {endpoint.host}: {error}") from error

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
            # It ended before it answered: for the last of its jobs was gone, or because it could not begin.
        log = rendezvous.folder / "session-server.log"
        ended = "" if server is None else f" (exit code {server.poll()})"
        raise SessionError(
            f"whoever held the session in {rendezvous.folder} ended before it answered{ended}; see {log}"
        )

    def _token_to_listen(self, rendezvous: Rendezvous, endpoint: Endpoint | None) -> str | None:
        """The token of the session that this job starts, for jobs on other machines; told where nobody gave one."""
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
                f"where jobs on several machines meet: who listens there has printed the token, or `graftlab token "
                f"FILE` makes one beforehand"
            )
        rest = threading.Event()
        while True:
            result = self._ask_over_network(endpoint, None)
            if result is not None:
                return result
            if self.remaining() < _ASK_AGAIN:
                guess = "is somebody listening there, and does a firewall let TCP pass?"
                raise SessionError(
                    f"nobody with this session's token answered at {endpoint} within {self._config.timeout:g} s: "
                    f"{_STRANGER if self._reached_stranger else guess}"
                )
            rest.wait(_ASK_AGAIN)

    def _ask_over_network(self, endpoint: Endpoint, state: RejoinState | None) -> JoinResult | None:
        assert self._token is not None
        limit = min(_ANSWER_LIMIT, self.remaining()) if state is None else _ANSWER_LIMIT
        client = TcpSessionClient(endpoint, self._token)
        try:
            answer = client.ask(self._request(state), limit)
            if answer is None:
                self._warn_of_stranger(endpoint, client.reached_stranger)
                return None
            reply, early = answer
            joined = self._accepted(reply)
            channel, wake, proxy = client.open_connection(early)
        except BaseException:
            client.close()
            raise
        self._joined_over_network = True
        return JoinResult(joined, channel, wake, self._token, proxy)

    def _warn_of_stranger(self, endpoint: Endpoint, is_stranger: bool) -> None:
        """Say at once what waiting will hardly change: nothing else is heard of it until the time is over."""
        if is_stranger and not self._reached_stranger:
            logger.warning("%s: at %s %s. This job goes on trying", self._config.role, endpoint, _STRANGER)
        self._reached_stranger = is_stranger

    def rejoin(self, state: RejoinState, segment: int | None) -> JoinResult | None:
        """What another host hands over to a process that is in a graft world already; None where none listens.

        ``segment`` is the descriptor of its memory, if the host is to look into that.
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
        """What the host hands over; None where it ended before it answered."""
        connection.settimeout(self.remaining() if state is None else self._config.timeout)
        try:
            send_handshake(connection, self._request(state))
            if segment is not None:
                send_descriptors(connection, [segment])
            reply = receive_handshake(connection)
            if reply is None:
                return None
            joined = self._accepted(reply)
            channel, wake = receive_descriptors(connection, joined.descriptors)
        except (ConnectionError, EOFError):
            return None
        except TimeoutError:
            raise SessionError(
                f"whoever holds the session in {self._config.rendezvous} did not answer within "
                f"{self._config.timeout:g} s. A process of the jobs' own may take so long to start: a larger timeout "
                f"(GRAFTLAB_TIMEOUT) waits longer; its log is session-server.log there"
            ) from None
        line = SocketChannel(socket.socket(fileno=channel)), socket.socket(fileno=wake)
        return JoinResult(joined, *line, joined.token)

    def fetch_share(self, world: int) -> tuple[WorldShare, list[int]]:
        """What this rank shares with all others in a world, from the holder of the session, on this machine."""
        place = self._place
        request = WorldShareRequest(
            world, place.side, place.rank, place.world_size, place.other_world_size, os.getpid()
        )
        with Rendezvous(self._config.rendezvous) as rendezvous:
            connection = rendezvous.connect(self._config.timeout)
            if connection is None:
                raise SessionError("whoever held the session went away")
            with connection:
                connection.settimeout(self._config.timeout)
                send_handshake(connection, request)
                reply = receive_handshake(connection)
                if isinstance(reply, JoinRefused):
                    raise SessionError(reply.error)
                if not isinstance(reply, WorldShare):
                    raise SessionError(f"the holder of the session answered {type(reply).__name__}")
                return reply, receive_descriptors(connection, reply.descriptors)

    def _request(self, state: RejoinState | None) -> JoinRequest:
        return JoinRequest(
            version=graftlab_version(),
            side=self._place.side,
            rank=self._place.rank,
            world_size=self._place.world_size,
            other_world_size=self._place.other_world_size,
            pid=os.getpid(),
            device=str(own_device()),
            backend=own_backend(),
            plan=to_wire(self._config.plan()) if state is None else None,
            rejoins=state,
            first_step=self._config.first_step,
        )

    def _accepted(self, reply: Any) -> JoinAccepted:
        if isinstance(reply, JoinRefused):
            if reply.again:
                raise _RankTakenError(reply.error)
            raise ConfigError(reply.error) if reply.settings else SessionError(reply.error)
        if not isinstance(reply, JoinAccepted):
            raise SessionError(f"the holder of the session answered {type(reply).__name__}")
        return reply
