"""Many lines on one connection: each arrives in order and whole, and one that nobody reads stops no other."""

from __future__ import annotations

import contextlib
import select
import socket
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftlab.errors import MessageError
from graftlab.jobs.trunk import DATA, END, OPEN, TAKEN, WINDOW, Strand, Trunk, pack_part, parts_in


class Joined:
    """Both ends of a trunk, and a connection that delivers a message when told. Each line's near ends are here too."""

    def __init__(self) -> None:
        self.sent: dict[str, deque[bytes]] = {"jobs": deque(), "hub": deque()}
        self.jobs = Trunk(self.sent["jobs"].append, rings_near=False)
        self.hub = Trunk(self.sent["hub"].append, self._begin, rings_near=True)
        self.over: list[int] = []
        # What a job has of its line, and what the hub has, and the bells of both.
        self.near: list[socket.socket] = []
        self.bells: list[socket.socket] = []
        self.far: dict[int, socket.socket] = {}
        self.far_bells: dict[int, socket.socket] = {}

    def open(self) -> int:
        number = len(self.near)
        (ours, theirs), (bell, their_bell) = socket.socketpair(), socket.socketpair()
        self.near.append(ours)
        self.bells.append(bell)
        self.jobs.open(theirs, their_bell, lambda: self.over.append(number))
        return number

    def _begin(self, strand: Strand) -> None:
        (ours, theirs), (bell, their_bell) = socket.socketpair(), socket.socketpair()
        self.far[strand.number], self.far_bells[strand.number] = ours, bell
        strand.carry(theirs, their_bell)

    def work(self, which: str) -> None:
        trunk = self.jobs if which == "jobs" else self.hub
        trunk.work()
        trunk.flush()

    def deliver(self, to: str) -> None:
        sent = self.sent["hub" if to == "jobs" else "jobs"]
        if sent:
            (self.jobs if to == "jobs" else self.hub).hear(sent.popleft())

    def settle(self) -> None:
        """Until nothing is on its way any more."""
        idle = 0
        while idle < 2:
            idle += 1
            for which in ("jobs", "hub"):
                self.work(which)
                while self.sent["hub" if which == "jobs" else "jobs"]:
                    self.deliver(which)
                    idle = 0

    def close(self) -> None:
        for trunk in (self.jobs, self.hub):
            trunk.close()
        for end in (*self.near, *self.bells, *self.far.values(), *self.far_bells.values()):
            end.close()


def read_all(end: socket.socket) -> tuple[bytes, bool]:
    """What is there, and whether nothing follows."""
    end.setblocking(False)
    data = b""
    with contextlib.suppress(BlockingIOError):
        while True:
            more = end.recv(1 << 20)
            if not more:
                return data, True
            data += more
    return data, False


steps = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.integers(0, 3), st.binary(min_size=1, max_size=30)),
        st.tuples(st.just("answer"), st.integers(0, 3), st.binary(min_size=1, max_size=30)),
        st.tuples(st.just("large"), st.integers(0, 3), st.integers(1, 200_000)),
        st.tuples(st.sampled_from(["work", "deliver"]), st.sampled_from(["jobs", "hub"]), st.none()),
        st.tuples(st.just("end"), st.integers(0, 3), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(steps)
def test_whatever_comes_between_each_line_arrives_in_order_and_whole(told: list[tuple[str, object, object]]) -> None:
    joined = Joined()
    try:
        for _ in range(4):
            joined.open()
        said, answered, ended = [b""] * 4, [b""] * 4, [False] * 4
        for what, where, with_what in told:
            if what in ("work", "deliver"):
                getattr(joined, what)(where)
                continue
            assert isinstance(where, int)
            if what == "answer":
                if where in joined.far and not ended[where]:
                    assert isinstance(with_what, bytes)
                    joined.far[where].sendall(with_what)
                    answered[where] += with_what
            elif what == "end":
                if not ended[where]:
                    joined.near[where].shutdown(socket.SHUT_WR)
                ended[where] = True
            elif not ended[where]:
                assert isinstance(with_what, (bytes, int))
                data = with_what if isinstance(with_what, bytes) else bytes([where]) * with_what
                joined.near[where].setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    said[where] += data[: joined.near[where].send(data)]
        heard = [b""] * 4
        for _ in range(50):
            joined.settle()
            pieces = {number: read_all(end) for number, end in joined.far.items()}
            for number, (data, over) in pieces.items():
                heard[number] += data
                assert not over or ended[number]
            if all(heard[number] == said[number] for number in range(4)):
                break
        assert heard == said
        joined.settle()
        for number in range(4):
            back, _ = read_all(joined.near[number])
            if not ended[number]:
                assert back == answered[number]
            assert read_all(joined.far[number]) == (b"", ended[number])
        assert sorted(joined.over) == [number for number in range(4) if ended[number]]
        assert set(joined.hub.strands) == {number for number in range(4) if not ended[number]}
    finally:
        joined.close()


def test_a_line_that_nobody_reads_takes_its_window_and_no_more_and_stops_no_other() -> None:
    joined = Joined()
    try:
        stuck, other = joined.open(), joined.open()
        joined.settle()
        taken = 0
        joined.near[stuck].setblocking(False)
        for _ in range(1000):
            with contextlib.suppress(BlockingIOError):
                taken += joined.near[stuck].send(b"x" * (1 << 16))
            joined.settle()
        # Besides what is on its way both sockets hold some.
        assert WINDOW <= taken < WINDOW + (2 << 20)
        waiting = len(joined.hub.strands[stuck].waiting)
        assert waiting <= WINDOW
        # Nor is the processor kept busy with what cannot be done.
        assert [select.select([trunk.descriptors[0]], [], [], 0)[0] for trunk in (joined.jobs, joined.hub)] == [[], []]
        joined.near[other].sendall(b"goes on")
        joined.bells[other].send(b"!")
        joined.settle()
        assert read_all(joined.far[other])[0] == b"goes on"
        assert read_all(joined.far_bells[other])[0] == b"!"
        assert read_all(joined.far_bells[stuck])[0] == b""
        # Once it is read it goes on too.
        read = 0
        for _ in range(1000):
            read += len(read_all(joined.far[stuck])[0])
            joined.settle()
        assert read == taken
        joined.near[stuck].sendall(b"end")
        joined.settle()
        assert read_all(joined.far[stuck])[0] == b"end"
    finally:
        joined.close()


def test_what_a_line_said_before_it_was_let_in_goes_first_and_counts_once() -> None:
    joined = Joined()
    let_in = []
    joined.hub = Trunk(joined.sent["hub"].append, let_in.append, rings_near=True)
    try:
        joined.open()
        joined.near[0].sendall(b"word" * 1000)
        joined.settle()
        assert bytes(let_in[0].waiting) == b"word" * 1000
        joined._begin(let_in[0])
        joined.near[0].sendall(b"more")
        joined.settle()
        assert read_all(joined.far[0])[0] == b"word" * 1000 + b"more"
        assert let_in[0].owed == 4004
    finally:
        joined.close()


def test_what_was_said_before_an_end_is_still_read_after_it() -> None:
    joined = Joined()
    try:
        joined.open()
        joined.settle()
        said = bytes(2 << 20)
        sent = 0
        joined.near[0].setblocking(False)
        while sent < len(said):
            with contextlib.suppress(BlockingIOError):
                sent += joined.near[0].send(said[sent:])
            joined.settle()
        joined.near[0].close()
        joined.settle()
        assert joined.hub.strands[0].waiting
        assert joined.over == []
        heard, over = b"", False
        while not over:
            more, over = read_all(joined.far[0])
            heard += more
            joined.settle()
        assert heard == said
        assert joined.over == [0]
    finally:
        joined.close()


def test_what_several_lines_say_travels_as_one_message() -> None:
    joined = Joined()
    try:
        for _ in range(3):
            joined.open()
        joined.settle()
        for end in joined.near:
            end.sendall(b"row")
        joined.work("jobs")
        assert [[part.kind for part in parts_in(message)] for message in joined.sent["jobs"]] == [[DATA] * 3]
    finally:
        joined.close()


def test_the_end_of_the_connection_ends_every_line() -> None:
    joined = Joined()
    lines = [joined.open(), joined.open()]
    joined.settle()
    joined.far[0].sendall(b"last")
    joined.settle()
    joined.jobs.close()
    assert joined.over == lines
    assert [read_all(end) for end in joined.near] == [(b"last", True), (b"", True)]
    joined.close()


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (b"short", "breaks off in the head"),
        (pack_part(0, DATA, b"body")[:-1], "kind 1 with 4 bytes"),
        (pack_part(0, END + 1), "kind 5"),
        (pack_part(0, TAKEN, b"1"), "kind 3 with 1 bytes"),
        (pack_part(0, OPEN) * 2, "line 0 is begun by who may not, or twice"),
    ],
)
def test_a_message_that_is_none_is_refused(message: bytes, wrong: str) -> None:
    joined = Joined()
    try:
        with pytest.raises(MessageError, match=wrong):
            joined.hub.hear(message)
    finally:
        joined.close()
