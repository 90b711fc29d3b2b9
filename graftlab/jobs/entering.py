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
from graftlab.exchange.channel import Channel
from graftlab.jobs.distant_host import DistantHost
from graftlab.jobs.greeting import Fetch, Join, Joined, Membership, Refused, Share, hear, our_version, tell
from graftlab.jobs.headless import start_host
from graftlab.jobs.linking import is_own_address
from graftlab.jobs.meeting import Meeting
from graftlab.jobs.relay import Relay
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import receive_descriptors, send_descriptors
from graftlab.ranks.own_place import own_backend, own_device

# Seconds between two attempts to find who holds the session, on another machine.
_ASK_AGAIN = 0.5
# So many hosts are started before a job gives up: each may end, for its last job is gone, just as another comes.
_HOSTS = 3
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
class Entry:
    """What the host has handed over. With a ``carrier`` it is on another machine, or is reached as if it were."""

    joined: Joined
    channel: Channel
    bell: socket.socket
    token: str | None
    carrier: Relay | None = None


class _TakenYetError(SessionError):
    """Another process has the place, which may be gone without anybody having noticed."""


class Entrance:
    """Asks for a place, until it is there or the config's time is over."""

    def __init__(self, place: Place, config: GraftConfig) -> None:
        self._place = place
        self._config = config
        self._deadline = time.monotonic() + config.timeout
        self._token = config.join_token()
        self._from_afar = False
        # At the last try.
        self._met_stranger = False

    def remaining(self) -> float:
        """Seconds until the deadline; never quite none."""
        return max(0.001, self._deadline - time.monotonic())

    def enter(self) -> Entry:
        """Raises :class:`ConfigError` for settings that do not fit, :class:`SessionError` where nobody lets it in."""
        rest = threading.Event()
        last = time.monotonic() + min(_MIND_CHANGES, self.remaining())
        while True:
            try:
                return self._enter()
            except _TakenYetError:
                if time.monotonic() + _ASK_AGAIN > last:
                    raise
            rest.wait(_ASK_AGAIN)

    def _enter(self) -> Entry:
        endpoint = self._config.endpoint
        if endpoint is None:
            with Meeting(self._config.meeting) as meeting:
                return self._enter_here(meeting, None)
        try:
            if is_own_address(endpoint.host) and not self._somebody_listens(endpoint):
                # Nobody holds the session yet, or one of the jobs' own does, which is in the folder too.
                with Meeting(self._config.meeting) as meeting:
                    return self._enter_here(meeting, endpoint)
            return self._enter_from_afar(endpoint)
        except socket.gaierror as error:
            raise ConfigError(f"address (GRAFTLAB_ADDRESS) is {endpoint}, and {endpoint.host}: {error}") from error

    def _somebody_listens(self, endpoint: Endpoint) -> bool:
        try:
            socket.create_connection(endpoint, timeout=self.remaining()).close()
        except OSError:
            return False
        return True

    def _enter_here(self, meeting: Meeting, endpoint: Endpoint | None) -> Entry:
        host: subprocess.Popen[bytes] | None = None
        for _ in range(_HOSTS):
            with meeting.locked():
                connection = meeting.connect(self.remaining())
                if connection is None:
                    listener = meeting.listen()
                    assert listener is not None
                    with listener:
                        host = start_host(self._config, meeting, listener, self._token_to_listen(meeting, endpoint))
                    connection = meeting.connect(self.remaining())
            if connection is None:
                continue
            with connection:
                entry = self._ask(connection, None)
            if entry is not None:
                return entry
            # It ended before it answered: for the last of its jobs was gone, or because it could not begin.
        log = meeting.folder / "host.log"
        ended = "" if host is None else f" (exit code {host.poll()})"
        raise SessionError(f"whoever held the session in {meeting.folder} ended before it answered{ended}; see {log}")

    def _token_to_listen(self, meeting: Meeting, endpoint: Endpoint | None) -> str | None:
        """The token of the session that this job starts, for jobs on other machines; told where nobody gave one."""
        if endpoint is None:
            return None
        if self._token is None:
            self._token = meeting.own_token()
            sys.stderr.write(
                f"graftlab listens at {endpoint} for jobs on other machines; they join with GRAFTLAB_TOKEN="
                f"{self._token}\n"
            )
        return self._token

    def _enter_from_afar(self, endpoint: Endpoint) -> Entry:
        if self._token is None:
            raise ConfigError(
                f"token (GRAFTLAB_TOKEN) is not given, nor is token_file (GRAFTLAB_TOKEN_FILE); address is {endpoint}, "
                f"where jobs on several machines meet: who listens there has printed the token, or `graftlab token "
                f"FILE` makes one beforehand"
            )
        rest = threading.Event()
        while True:
            entry = self._ask_from_afar(endpoint, None)
            if entry is not None:
                return entry
            if self.remaining() < _ASK_AGAIN:
                guess = "is somebody listening there, and does a firewall let TCP pass?"
                raise SessionError(
                    f"nobody with this session's token answered at {endpoint} within {self._config.timeout:g} s: "
                    f"{_STRANGER if self._met_stranger else guess}"
                )
            rest.wait(_ASK_AGAIN)

    def _ask_from_afar(self, endpoint: Endpoint, membership: Membership | None) -> Entry | None:
        assert self._token is not None
        limit = min(_ANSWER_LIMIT, self.remaining()) if membership is None else _ANSWER_LIMIT
        distant = DistantHost(endpoint, self._token)
        try:
            answer = distant.ask(self._join(membership), limit)
            if answer is None:
                self._note_stranger(endpoint, distant.is_stranger)
                return None
            reply, early = answer
            joined = self._accepted(reply)
            channel, bell, carrier = distant.open_line(early)
        except BaseException:
            distant.close()
            raise
        self._from_afar = True
        return Entry(joined, channel, bell, self._token, carrier)

    def _note_stranger(self, endpoint: Endpoint, is_stranger: bool) -> None:
        """Say at once what waiting will hardly change: nothing else is heard of it until the time is over."""
        if is_stranger and not self._met_stranger:
            logger.warning("%s: at %s %s. This job goes on trying", self._config.role, endpoint, _STRANGER)
        self._met_stranger = is_stranger

    def come_back(self, membership: Membership, segment: int | None) -> Entry | None:
        """What another host hands over to a process that is in a graft world already; None where none listens.

        ``segment`` is the descriptor of its memory, if the host is to look into that.
        """
        endpoint = self._config.endpoint
        if self._from_afar and endpoint is not None:
            return self._ask_from_afar(endpoint, membership)
        with Meeting(self._config.meeting) as meeting:
            connection = meeting.connect(self._config.timeout)
            if connection is None:
                return None
            with connection:
                return self._ask(connection, membership, segment)

    def _ask(
        self, connection: socket.socket, membership: Membership | None, segment: int | None = None
    ) -> Entry | None:
        """What the host hands over; None where it ended before it answered."""
        connection.settimeout(self.remaining() if membership is None else self._config.timeout)
        try:
            tell(connection, self._join(membership))
            if segment is not None:
                send_descriptors(connection, [segment])
            reply = hear(connection)
            if reply is None:
                return None
            joined = self._accepted(reply)
            channel, bell = receive_descriptors(connection, joined.descriptors)
        except (ConnectionError, EOFError):
            return None
        except TimeoutError:
            raise SessionError(
                f"whoever holds the session in {self._config.meeting} did not answer within "
                f"{self._config.timeout:g} s. A process of the jobs' own may take so long to start: a larger timeout "
                f"(GRAFTLAB_TIMEOUT) waits longer; its log is host.log there"
            ) from None
        line = Channel(socket.socket(fileno=channel)), socket.socket(fileno=bell)
        return Entry(joined, *line, joined.token)

    def fetch(self, world: int) -> tuple[Share, list[int]]:
        """What this rank shares with all others in a world, from the holder of the session, on this machine."""
        place = self._place
        fetch = Fetch(world, place.side, place.rank, place.world_size, place.other_world_size, os.getpid())
        with Meeting(self._config.meeting) as meeting:
            connection = meeting.connect(self._config.timeout)
            if connection is None:
                raise SessionError("whoever held the session went away")
            with connection:
                connection.settimeout(self._config.timeout)
                tell(connection, fetch)
                reply = hear(connection)
                if isinstance(reply, Refused):
                    raise SessionError(reply.error)
                if not isinstance(reply, Share):
                    raise SessionError(f"the holder of the session answered {type(reply).__name__}")
                return reply, receive_descriptors(connection, reply.descriptors)

    def _join(self, membership: Membership | None) -> Join:
        return Join(
            version=our_version(),
            side=self._place.side,
            rank=self._place.rank,
            world_size=self._place.world_size,
            other_world_size=self._place.other_world_size,
            pid=os.getpid(),
            device=str(own_device()),
            backend=own_backend(),
            plan=to_wire(self._config.plan()) if membership is None else None,
            membership=membership,
            first_step=self._config.first_step,
        )

    def _accepted(self, reply: Any) -> Joined:
        if isinstance(reply, Refused):
            if reply.again:
                raise _TakenYetError(reply.error)
            raise ConfigError(reply.error) if reply.settings else SessionError(reply.error)
        if not isinstance(reply, Joined):
            raise SessionError(f"the holder of the session answered {type(reply).__name__}")
        return reply
