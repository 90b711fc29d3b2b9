"""``python -m benchmarks.simulated_ranks HOST PORT FIRST LAST BASELINE TARGET`` stands for ranks on other machines.

It speaks for the world ranks from FIRST to LAST - 1 of a session: each connects, adopts plans, and makes as many rows
in a run as its expression says, without a model. The session's token and a row are read from the standard input.
"""

from __future__ import annotations

import select
import sys

from graftlab.base.world import Place
from graftlab.exchange.channel import frames_in
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.tcp import RouterSocket, TcpChannel
from graftlab.jobs.handshake import JoinAccepted, JoinRequest, pack_handshake, unpack_handshake
from graftlab.jobs.proxy import SERVER_NAME
from graftlab.ranks.messages import (
    Contact,
    Evaluate,
    FromRank,
    Hello,
    LinkReport,
    PlanAdopted,
    PlanUpdate,
    RunDone,
    RunRequest,
    RunSettled,
    WorldStart,
    pack,
    unpack_to_rank,
)

_PREFIX = 8
# Rows in one message of a rank.
_AT_ONCE = 8


class SimulatedRank:
    """One rank's end of its connection to the notebook."""

    def __init__(self, place: Place, host: str, port: int, token: str, row: bytes) -> None:
        self.place, self._host, self._row = place, host, row
        self.router = RouterSocket(derive_keys(token), b"simulated %d" % place.world_rank)
        self._channel: TcpChannel = self.router.connect(SERVER_NAME, host, port)
        self._joined = False
        request = JoinRequest(
            side=place.side,
            rank=place.rank,
            world_size=place.world_size,
            other_world_size=place.other_world_size,
            pid=1,
            device="cpu",
            backend="gloo",
            plan=None,
            rejoin=None,
        )
        self._channel.send(pack_handshake(request))

    def work(self) -> bool:
        """Handle what has arrived; False when the session has closed the connection."""
        for frame in self._channel.receive():
            if self._joined:
                for start, end in frames_in(frame):
                    self._handle(frame[start:end])
                continue
            answer = unpack_handshake(frame)
            if not isinstance(answer, JoinAccepted):
                raise ValueError(f"{self.place.label}: the notebook answered {answer}")
            self._joined = True
            number = self.place.world_rank
            self._send(Contact(number, "", b"", b"%d" % number, self._host, 1))
            self._send(LinkReport(1, (), tuple(n for n in range(len(self.place.everyone())) if n != number)))
        return not self._channel.closed

    def _handle(self, frame: bytes) -> None:
        message = unpack_to_rank(frame)
        if isinstance(message, WorldStart):
            self._send(Hello(1))
        elif isinstance(message, RunRequest):
            rows = int(message.work.source) if isinstance(message.work, Evaluate) else 0
            for start in range(0, rows, _AT_ONCE):
                self._channel.send(self._row * min(_AT_ONCE, rows - start))
            info = message.info
            self._send(RunDone(info.run, None, None))
            self._send(RunSettled(info.run, info.first_step + 1))
        elif isinstance(message, PlanUpdate):
            self._send(PlanAdopted(message.plan.version, 1))

    def _send(self, message: FromRank) -> None:
        packed = pack(message)
        self._channel.send(len(packed).to_bytes(_PREFIX, "little") + packed)


def main() -> None:
    host, *numbers = sys.argv[1:]
    port, first, last, baseline, target = map(int, numbers)
    token = sys.stdin.buffer.readline().decode().strip()
    row = sys.stdin.buffer.read()
    everyone = Place("baseline", 0, baseline, target).everyone()
    ranks = [SimulatedRank(place, host, port, token, row) for place in everyone[first:last]]
    by_descriptor = {rank.router.fileno(): rank for rank in ranks}
    poller = select.epoll()
    for descriptor in by_descriptor:
        poller.register(descriptor, select.EPOLLIN)
    while by_descriptor:
        for descriptor, _ in poller.poll():
            if not by_descriptor[descriptor].work():
                poller.unregister(descriptor)
                by_descriptor.pop(descriptor).router.close()


if __name__ == "__main__":
    main()
