"""What the shared-memory exchange is made of: the allocator, the segment, the channel and the status page."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing
from hypothesis import example, given
from hypothesis import strategies as st
from kit.exchange_scripts import write_without_end
from kit.int8_tensor import Int8Tensor
from kit.mailboxes import DEADLINE, Descriptors, eager_threads, in_background
from kit.refusals import exactly
from kit.values import assert_values

from graftlab.base.tags import TapKey
from graftlab.base.world import MAX_RANKS, Place, RunInfo
from graftlab.exchange.arena import ALIGNMENT, PAGE, Allocator, Arena, create_segment
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.contract import Contribution, Receipt
from graftlab.exchange.frames import (
    ChunkFrame,
    ChunkReplyFrame,
    DeclineFrame,
    DeviceLocation,
    PublishFrame,
    StatusFrame,
    StepEndFrame,
    YieldFrame,
    YieldQueryFrame,
    decode,
)
from graftlab.exchange.peers import Peer, Peers, RemoteStatusPage
from graftlab.exchange.receiver import Receiver
from graftlab.exchange.status_page import RankStatus, StatusPage, WireStatus
from graftlab.exchange.tcp import FrameWithPayload
from graftlab.exchange.waiter_threads import WaiterThreads, _Waiter
from graftlab.ranks import forkserver

SEGMENT = PAGE + 64 * ALIGNMENT

# ---- the allocator --------------------------------------------------------------------------------------------------

# Reserve this number of bytes, or release the reservation with this index.
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 24 * ALIGNMENT)),
        st.tuples(st.just("release"), st.integers(0, 100)),
    ),
    max_size=60,
)


def holes(taken: dict[int, int]) -> list[tuple[int, int]]:
    """The stretches of the segment's data part that are not taken."""
    found, position = [], PAGE
    for offset, size in [*sorted(taken.items()), (SEGMENT, 0)]:
        if offset > position:
            found.append((position, offset - position))
        position = offset + size
    return found


@given(operations)
def test_the_allocator_is_first_fit_and_merges_released_holes(
    steps: list[tuple[str, int]],
) -> None:
    allocator = Allocator(SEGMENT)
    taken: dict[int, int] = {}
    for what, number in steps:
        if what == "take":
            need = max(1, -(-number // ALIGNMENT)) * ALIGNMENT
            first_fit = next((offset for offset, size in holes(taken) if size >= need), None)
            # The model knows only whole holes, so this also says: no overlap, inside the segment, and holes joined.
            assert allocator.take(number) == first_fit
            if first_fit is not None:
                taken[first_fit] = need
        elif taken:
            offset = sorted(taken)[number % len(taken)]
            del taken[offset]
            allocator.release(offset)
        assert allocator.bytes_in_use == sum(taken.values())
    for offset in taken:
        allocator.release(offset)
    assert allocator.take(SEGMENT - PAGE) == PAGE


def test_allocations_leave_out_the_first_page_and_suit_every_dtype() -> None:
    allocator = Allocator(SEGMENT)
    offsets = [allocator.take(1), allocator.take(65), allocator.take(0)]
    assert offsets == [PAGE, PAGE + ALIGNMENT, PAGE + 3 * ALIGNMENT]
    assert all(offset % max(torch.complex128.itemsize, ALIGNMENT) == 0 for offset in offsets if offset is not None)


# ---- the segment ----------------------------------------------------------------------------------------------------


def test_a_reader_sees_what_the_owner_writes_and_cannot_write_itself() -> None:
    descriptor, size = create_segment()
    owner, reader = Arena(descriptor, size, writable=True), Arena(descriptor, size, writable=False)
    os.close(descriptor)
    owner.window(PAGE, 24, torch.float64, (3,)).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert reader.window(PAGE, 24, torch.float64, (3,)).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(TypeError, match="readonly"):
        reader.map[PAGE] = 1


def test_a_segment_stays_mapped_while_a_tensor_of_it_exists() -> None:
    descriptor, size = create_segment()
    owner, reader = (Arena(descriptor, size, writable=is_owner) for is_owner in (True, False))
    os.close(descriptor)
    owner.window(PAGE, 4, torch.float32, (1,)).fill_(3.0)
    held = reader.window(PAGE, 4, torch.float32, (1,))
    reader.close()
    assert not reader.map.closed
    assert held.tolist() == [3.0]
    owner.close()
    assert owner.map.closed


def test_of_a_tensor_class_the_numbers_that_it_stands_for_are_stored() -> None:
    values = torch.arange(-6.0, 6.0).view(3, 4)
    descriptor, size = create_segment()
    arena = Arena(descriptor, size, writable=True)
    os.close(descriptor)
    # Its own memory, if it has any, holds something else.
    stored = Int8Tensor.of(values)
    arena.store(PAGE, 48, stored)
    assert arena.window(PAGE, 48, torch.float32, (3, 4)).equal(stored.dequantize())


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)], ids=str)
def test_a_window_on_no_bytes_keeps_its_shape(shape: tuple[int, ...]) -> None:
    descriptor, size = create_segment()
    window = Arena(descriptor, size, writable=True).window(0, 0, torch.int16, shape)
    os.close(descriptor)
    assert window.shape == shape
    assert window.dtype is torch.int16


@pytest.mark.parametrize("has_memfd", [True, False])
def test_a_segment_has_no_name_anywhere(has_memfd: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    descriptor, size = create_segment()
    arena = Arena(descriptor, size, writable=True)
    os.close(descriptor)
    arena.window(PAGE, 1, torch.uint8, (1,)).fill_(1)
    assert list(tmp_path.iterdir()) == []
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "graftlab" in name]


def test_a_failed_segment_leaves_no_open_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def refuse(descriptor: int, size: int) -> None:
        seen.append(descriptor)
        raise OSError("no room")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="no room"):
        create_segment()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(seen[0])


# ---- the channel ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[SocketChannel, SocketChannel]]:
    one, other = (SocketChannel(end) for end in socket.socketpair())
    yield one, other
    one.close()
    other.close()


def receive(channel: SocketChannel, count: int) -> list[bytes]:
    """Receive ``count`` frames, or all until the end of the stream."""
    frames: list[bytes] = []

    def work() -> list[bytes]:
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        while len(frames) < count and not channel.closed:
            poller.poll()
            frames.extend(channel.receive())
        return frames

    return in_background(work).result(DEADLINE)


# Around the sizes at which the way of a frame changes: one write or two, one read or several.
sizes = st.lists(st.sampled_from([0, 1, 7, 65535, 65536, 65537, 1 << 20, (1 << 20) + 5]), max_size=12)


@given(sizes)
def test_frames_arrive_whole_and_in_order(lengths: list[int]) -> None:
    one, other = (SocketChannel(end) for end in socket.socketpair())
    frames = [os.urandom(length) for length in lengths]
    for frame in frames:
        one.send(frame)
    assert receive(other, len(frames)) == frames
    one.close()
    other.close()


def test_a_frame_that_the_socket_takes_in_parts_is_sent_once() -> None:
    class Short(socket.socket):
        """Takes at most three bytes at a time."""

        def send(self, data: Any, flags: int = 0) -> int:
            return super().send(data[:3], flags)

    end, other_end = socket.socketpair()
    one, other = SocketChannel(Short(fileno=end.detach())), SocketChannel(other_end)
    for frame in (b"the first", b"the second"):
        one.send(frame)
    one.close()
    assert receive(other, 3) == [b"the first", b"the second"]
    other.close()


def test_sending_never_waits_for_the_reader(ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    frames = [os.urandom(1 << 20) for _ in range(32)] + [str(number).encode() for number in range(20_000)]

    def send_all() -> None:
        for frame in frames:
            one.send(frame)

    in_background(send_all).result(DEADLINE)  # the other end has read nothing yet
    assert not one.drain(0)
    assert receive(other, len(frames)) == frames
    assert one.drain(DEADLINE)


@pytest.mark.parametrize("size", [3, 1 << 17])
def test_a_frame_waits_behind_earlier_ones_even_if_there_is_room(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    end, other = socket.socketpair()
    one = SocketChannel(end)
    # Nothing is sent in the background.
    monkeypatch.setattr("graftlab.exchange.channel.threading.Thread", Mock())
    while not one.backed_up:
        one.send(bytes(1 << 12))
    other.setblocking(False)

    def read() -> int:
        found = 0
        with contextlib.suppress(BlockingIOError):
            while data := other.recv(1 << 20):
                found += len(data)
        return found

    assert read()
    one.send(bytes(size))
    assert read() == 0
    one.close()
    other.close()


def test_a_child_may_use_a_channel_that_a_thread_of_its_parent_was_using() -> None:
    end, other = socket.socketpair()
    one = SocketChannel(end)
    with one._sending:
        child = os.fork()
        if not child:
            signal.alarm(5)
            one.send(b"dropped")
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    assert other.recv(1) == b""
    other.close()


@pytest.mark.slow
def test_frames_of_several_threads_are_not_torn(ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    with eager_threads():
        done = [
            in_background(lambda letter=letter: [one.send(letter * (1 + 700 * number)) for number in range(200)])
            for letter in (b"a", b"b", b"c")
        ]
        frames = receive(other, 600)
    assert all(len(set(frame)) == 1 for frame in frames)
    for letter in b"abc":
        assert [len(frame) for frame in frames if frame[0] == letter] == [1 + 700 * number for number in range(200)]
    for future in done:
        future.result(DEADLINE)


@given(st.lists(st.binary(max_size=30), max_size=8), st.data())
def test_a_stream_cut_anywhere_gives_whole_frames_only(frames: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(len(frame).to_bytes(8, "little") + frame for frame in frames)
    pieces = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    raw, end = socket.socketpair()
    channel = SocketChannel(end)
    received: list[bytes] = []
    for start, stop in zip([0, *pieces], pieces, strict=False):
        raw.sendall(stream[start:stop])
        received += channel.receive()
    raw.close()
    received += channel.receive() + channel.receive()
    # The last piece that was sent ends where the stream was cut for good.
    whole, position = [], 0
    for frame in frames:
        position += 8 + len(frame)
        if pieces and position <= pieces[-1]:
            whole.append(frame)
    assert received == whole
    assert channel.closed
    channel.close()


def test_memory_is_returned_once_however_often_it_is_released() -> None:
    released: list[str] = []
    receipt = Receipt([Contribution(0, torch.ones(2), None)], on_release=lambda: released.append("once"))
    for _ in range(2):
        receipt.release()
        # What refers to the senders' memory is not kept.
        assert receipt.contributions == []
    assert released == ["once"]


def test_programs_that_this_process_starts_inherit_no_connection() -> None:
    ours, theirs = socket.socketpair()
    # As one that came over another socket is.
    ours.set_inheritable(True)
    channel = SocketChannel(ours)
    assert not os.get_inheritable(channel.fileno())
    channel.close()
    theirs.close()


def test_whole_frames_arrive_as_one_bundle_and_a_part_waits_for_its_rest() -> None:
    raw, end = socket.socketpair()
    channel = SocketChannel(end)
    one, other = ((3).to_bytes(8, "little") + b"abc"), (2).to_bytes(8, "little") + b"de"
    raw.sendall(one + other[:9])
    assert channel.receive_bundle() == one
    raw.sendall(other[9:])
    assert channel.receive_bundle() == other
    assert channel.receive_bundle() == b""
    raw.close()
    channel.close()


class Connection:
    """A channel that notes what is sent; the ranks behind it need no process."""

    closed = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.sent.append(frame)

    def close(self) -> None:
        self.closed = True


def peers_of(**pages: RankStatus) -> tuple[Any, list[Peer]]:
    """The other side's ranks, all remote and in the run, with their statuses."""
    found = []
    for rank, status in enumerate(pages.values()):
        page = RemoteStatusPage()
        page.latest = status
        connection: Any = Connection()
        found.append(Peer(Place("target", rank, 1, len(pages)), connection, None, page, in_run=True))
    me = Place("baseline", 0, 1, len(pages))
    return SimpleNamespace(place=me, others=found, by_rank={each.world_rank: each for each in found}), found


def test_peers_are_in_rank_order_however_they_were_connected() -> None:
    links: Any = {rank: (SimpleNamespace(fileno=lambda: 0), None) for rank in (3, 1, 2)}
    peers = Peers(Place("baseline", 0, 1, 3), links, timeout=1.0)
    assert [*peers.by_rank] == [each.place.world_rank for each in peers.others] == [1, 2, 3]


def test_a_rank_is_known_to_wait_until_it_is_gone_or_may_have_what_it_waits_for() -> None:
    waits, other = (RankStatus("waiting", since=7.0, awaits=(rank,)) for rank in (0, 2))
    peers, (first, second, third, last) = peers_of(a=waits, b=waits, c=waits, d=other)
    assert Peers.ranks_waiting_for_me(peers) == {(each.world_rank, 7.0) for each in (first, second, third)}
    first.gone, second.in_run, third.sent = "died", False, 1
    assert Peers.ranks_waiting_for_me(peers) == set()
    third.confirmed = 1
    assert Peers.ranks_waiting_for_me(peers) == {(third.world_rank, 7.0)}
    # Nor is anything sent to those that are gone or in no run.
    Peers.send_status(peers, waits)
    assert [len(each.channel.sent) for each in (first, second, third, last)] == [0, 0, 1, 1]  # type: ignore[attr-defined]
    third.received = 5
    assert Peers.received_counts(peers) == [0, 0, 5, 0]


def test_a_descriptor_is_waited_for_until_the_last_rank_behind_it_is_lost() -> None:
    peers, (first, second) = peers_of(a=RankStatus(), b=RankStatus())
    gone: list[Peer] = []
    peers._by_descriptor, peers._poller, peers.waiters = {5: [first, second]}, Mock(), Mock()
    peers._on_gone = gone.append
    Peers._lose(peers, first, 5, "died")
    assert (first.gone, peers._by_descriptor) == ("died", {5: [second]})
    assert not peers._poller.mock_calls + peers.waiters.mock_calls
    Peers._lose(peers, second, 5, "was disconnected")
    assert (gone, peers._by_descriptor) == ([first, second], {})
    # A poller with a closed descriptor would wake for it again and again.
    peers._poller.unregister.assert_called_once_with(5)
    peers.waiters.forget.assert_called_once_with(5)


def test_a_thread_no_longer_waits_for_what_was_forgotten() -> None:
    reader, writer = os.pipe()
    threads = WaiterThreads([reader])
    os.write(writer, b"x")
    threads.forget(reader)
    threads.wait(0)
    assert threads._idle[0].follows == frozenset()
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_ranks_that_wait_for_each_other_ask_and_answer_only_if_no_thread_may_end_it() -> None:
    waits, key = RankStatus("waiting", awaits=(0,)), TapKey(4, "h", (), "original", 0)
    peers, (first, second, elsewhere) = peers_of(a=waits, b=waits, c=RankStatus("waiting", awaits=(2,)))
    peers.waiters = SimpleNamespace(several=False)
    nothing: Any = None
    receiver = Receiver(peers, 1 << 20, nothing, nothing)

    def sent() -> list[list[Any]]:
        found = [[decode(frame) for frame in each.channel.sent] for each in (first, second, elsewhere)]  # type: ignore[attr-defined]
        for each in (first, second, elsewhere):
            each.channel.sent.clear()  # type: ignore[attr-defined]
        return found

    receiver._query_mutual_waits(7, key)
    assert sent() == [[YieldQueryFrame(7, False)], [YieldQueryFrame(7, False)], []]
    receiver.on_decline(first, DeclineFrame(key))
    receiver._query_mutual_waits(8, key)
    assert sent() == [[], [YieldQueryFrame(8, True)], []]
    # Another thread may be about to reach what the other rank waits for.
    peers.waiters.several = True
    receiver._query_mutual_waits(9, key)
    for is_several, awaited in ((True, [key]), (False, []), (False, [key, key]), (False, [key])):
        peers.waiters.several = is_several
        receiver._awaited = dict(enumerate(awaited))
        for each in (first, second):
            receiver.on_yield_query(each, YieldQueryFrame(3, False))
    # The first has sent what this rank waits for.
    assert sent() == [[], [YieldFrame(3)], []]


@pytest.mark.parametrize(("failure", "said"), [(None, None), ("no file '/\udcff'", "no file '/?'")])
def test_the_error_of_a_gpu_is_sent_whatever_text_it_quotes(failure: str | None, said: str | None) -> None:
    peers, (peer,) = peers_of(a=RankStatus())
    nothing: Any = None
    receiver = Receiver(peers, 1 << 20, nothing, nothing)
    receiver._reader.open = lambda *_: failure  # type: ignore[method-assign]
    receiver.on_chunk(peer, ChunkFrame(0, b""))
    assert [decode(frame) for frame in peer.channel.sent] == [ChunkReplyFrame(said)]  # type: ignore[attr-defined]


def test_all_ranks_are_gone_once_each_was_lost_or_hung_up() -> None:
    peers, (first, second) = peers_of(a=RankStatus(), b=RankStatus())
    all_gone: Any = Peers.all_gone
    assert not all_gone.fget(peers)
    assert Peers.lost(peers) == ""
    first.gone = "died"
    assert Peers.lost(peers) == "target[0] died"
    assert not all_gone.fget(peers)
    second.channel.close()
    assert all_gone.fget(peers)
    closed: list[str] = []
    first.arena = SimpleNamespace(close=lambda: closed.append("arena"))  # type: ignore[assignment]
    Peers.close(peers)
    assert (first.channel.closed, closed) == (True, ["arena"])


def test_a_repeated_status_of_another_machine_keeps_the_time_of_the_first() -> None:
    peers, (peer,) = peers_of(a=RankStatus("waiting", step=3, taps=7, since=5.0, awaits=(0,)))
    for taps, kept in ((7, True), (8, False)):
        report = WireStatus.of(RankStatus("waiting", step=3, taps=taps, since=time.monotonic() - 1, awaits=(0,)))
        Peers.on_status(peers, peer, StatusFrame(report, 2))
        assert (peer.page.read().taps, peer.page.read().since == 5.0) == (taps, kept)
    assert peer.confirmed == 2


def test_only_ranks_that_have_not_answered_are_late() -> None:
    peers, (first, second) = peers_of(a=RankStatus(), b=RankStatus("waiting", step=4, since=1e12))
    key = TapKey(4, "h", (), "original", 0)
    first.inbox[4][key] = None
    peers.timeout = 2.0
    receiver: Any = SimpleNamespace(_peers=peers)
    late = f"target[1] did not reach this tap within 2 s: {second.page.read()}"
    assert Receiver._why_unanswered(receiver, key, False) == {1: late}


def test_a_tensor_of_another_machine_arrives_with_its_frame_or_is_refused() -> None:
    peers, (peer,) = peers_of(a=RankStatus())
    key = TapKey(4, "h", (), "original", 0)
    published = PublishFrame(key, 1, "float32", (2,), 8, None, None)
    came = FrameWithPayload(b"")
    came.payload = [memoryview(b"12345678")]
    began = time.monotonic()
    Peers._note_remote(peers, peer, published, came)
    assert peer.page.read().since >= began
    assert (peer.received, [bytes(each) for each in peer.attached]) == (1, [b"12345678"])
    assert (peer.page.read().tap, peer.page.read().step, peer.page.read().state) == ("h", 4, "running")
    # What came with one frame is not taken for that of the next.
    Peers._note_remote(peers, peer, StepEndFrame(4), b"")
    assert (peer.received, list(peer.attached)) == (1, [])
    location = DeviceLocation(0, 0, 0, b"")
    with pytest.raises(ValueError, match=exactly("its tensor is in the memory of another machine's GPU")):
        Peers._note_remote(peers, peer, PublishFrame(key, 1, "float32", (2,), 8, location, None), b"")
    with pytest.raises(ValueError, match=exactly("it is a handle of another machine's GPU memory")):
        Peers._note_remote(peers, peer, ChunkFrame(0, b""), b"")
    assert peer.received == 1


def test_frames_sent_before_the_end_still_arrive(ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    one.send(b"last words")
    one.close()
    assert receive(other, 2) == [b"last words"]
    assert other.closed


def test_a_frame_for_an_end_that_is_gone_is_dropped(ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    other.close()
    for _ in range(3):
        one.send(b"small")
        one.send(bytes(1 << 20))
    assert one.drain(DEADLINE)
    assert one.receive() == []
    assert one.closed


@pytest.mark.parametrize("who", ["sender", "reader"])
def test_unsent_frames_are_dropped_when_either_end_closes(who: str, ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    one.send(bytes(32 << 20))
    poller = select.poll()
    poller.register(other.fileno(), select.POLLIN)
    # More than a socket holds, so by now a thread of the sender's waits for room.
    while len(other._received) < 4 << 20:
        poller.poll()
        assert other.receive() == []
    assert not one.drain(0)
    (one if who == "sender" else other).close()
    assert one.drain(DEADLINE)


def test_a_closed_channel_neither_sends_nor_receives(ends: tuple[SocketChannel, SocketChannel]) -> None:
    one, other = ends
    other.send(b"unread")
    one.close()
    one.send(b"too late")
    assert one.receive() == []
    assert receive(other, 1) == []


# ---- the status page -------------------------------------------------------------------------------------------


def a_page() -> tuple[Arena, StatusPage]:
    descriptor, size = create_segment()
    arena = Arena(descriptor, size, writable=True)
    os.close(descriptor)
    return arena, StatusPage(arena.map)


@given(
    st.sampled_from(["starting", "idle", "running", "waiting"]),
    st.integers(-1, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.text(st.characters(), max_size=600),
    st.sets(st.integers(0, MAX_RANKS - 1)),
)
@example("idle", 0, 0, 0, "x" + "\N{GREEK SMALL LETTER LAMDA}" * 300, set())  # cut in the middle of a letter
@example("idle", 0, 0, 0, "half of a surrogate pair: \ud800", set())
def test_what_is_written_is_read(state: str, step: int, version: int, taps: int, tap: str, awaits: set[int]) -> None:
    arena, page = a_page()
    page.write(state, step=step, plan_version=version, taps=taps, tap=tap, awaits=awaits)
    look = StatusPage(arena.map).read()
    assert (look.state, look.step, look.plan_version, look.taps) == (state, step, version, taps)
    assert look.awaits == tuple(sorted(awaits))
    readable = tap.encode("utf-8", "replace").decode()
    assert readable.startswith(look.tap)
    assert look.tap == readable or len(look.tap.encode()) > 500


def test_an_unwritten_status_page_reads_starting() -> None:
    assert str(a_page()[1].read()) == "starting"


@pytest.mark.parametrize(
    ("look", "text"),
    [
        (RankStatus("idle", tap="q"), "idle"),
        (RankStatus("waiting", step=3, since=0.0, tap="q"), "waiting at tap 'q' of step 3 for "),
        (RankStatus("running", step=3, since=0.0, tap="q"), "last seen at tap 'q' of step 3"),
        (RankStatus("running", step=3, since=0.0), "last seen before its first tap of step 3"),
    ],
    ids=["idle", "waiting", "running", "before the first tap"],
)
def test_rank_status_in_words(look: RankStatus, text: str) -> None:
    assert text in str(look)


def test_the_age_of_a_status_follows_the_clock_of_the_machine_that_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("graftlab.exchange.status_page.time", clock)
    status = RankStatus("waiting", step=3, since=92.5, tap="q")
    assert str(status) == "waiting at tap 'q' of step 3 for 7.5 s"
    sent = WireStatus.of(status)
    clock.monotonic = lambda: 5000.0
    assert sent.restore().since == 4992.5
    assert str(sent.restore()) == "waiting at tap 'q' of step 3 for 7.5 s"
    # One that has only just been written may seem to be of a later moment.
    assert str(RankStatus("waiting", step=3, since=5000.5)) == "waiting before its first tap of step 3 for 0.0 s"


class Stopped:
    """A page whose writer is stopped before its write number ``at``."""

    def __init__(self, page: Any, at: int) -> None:
        self._page = page
        self._left = at

    def __setitem__(self, where: slice, data: bytes) -> None:
        if self._left == 0:
            raise InterruptedError
        self._left -= 1
        self._page[where] = data


@pytest.mark.parametrize(
    "write",
    [
        lambda page: page.write("waiting", step=9, plan_version=9, taps=9, tap="nine", awaits=[3]),
        lambda page: page.pass_tap(9, 9, 9, "nine"),
    ],
    ids=["state", "tap"],
)
@pytest.mark.parametrize("before", range(4))
def test_a_writer_stopped_half_way_leaves_the_previous_status(before: int, write: Callable[[StatusPage], None]) -> None:
    arena, page = a_page()
    for number in range(before):
        page.write("running", step=number, plan_version=number, taps=number, tap=str(number))
    was = page.read()
    page._page = Stopped(arena.map, at=1)  # type: ignore[assignment]
    with pytest.raises(InterruptedError):
        write(page)
    assert StatusPage(arena.map).read() == was


def test_the_status_of_a_running_rank_is_its_last_tap() -> None:
    _, page = a_page()
    page.write("waiting", step=1, plan_version=2, taps=3, tap="before", awaits=[3])
    for number, name in enumerate(["q", "k", "q"]):
        page.pass_tap(4, 5, 6 + number, name)
    look = page.read()
    assert (look.state, look.step, look.plan_version, look.taps, look.tap) == ("running", 4, 5, 8, "q")
    assert look.awaits == ()


def test_of_a_long_tap_name_the_beginning_is_shown() -> None:
    _, page = a_page()
    for write in (page.pass_tap, lambda *args: page.write("running", step=4, plan_version=5, taps=6, tap=args[-1])):
        write(4, 5, 6, "layer" * 20_000)
        look = page.read()
        assert look.tap != "layer" * 20_000
        assert ("layer" * 20_000).startswith(look.tap)
        assert (look.state, look.step, look.taps) == ("running", 4, 6)
        assert len(look.tap) > 50


def test_tap_names_that_never_repeat_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.exchange.status_page._NAMES_LIMIT", 5)
    _, page = a_page()
    for number in range(23):
        page.pass_tap(0, 0, number, f"request {number}")
        assert page.read().tap == f"request {number}"
        assert len(page._names) <= 5


@pytest.mark.ranks
def test_a_reader_never_sees_a_half_written_status() -> None:
    descriptor, size = create_segment()
    page = StatusPage(Arena(descriptor, size, writable=False).map)
    forkserver.prepare()
    context = torch.multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    writer = context.Process(target=write_without_end, args=(Descriptors([descriptor]), size, theirs), daemon=True)
    with forkserver.hidden_main():
        writer.start()
    try:
        assert line.poll(DEADLINE)
        looks = [page.read() for _ in range(20_000)]
    finally:
        line.send("stop")
        writer.join(DEADLINE)
        writer.kill()
        os.close(descriptor)
    assert [look for look in looks if not look.step == look.plan_version == look.taps == int(look.tap)] == []
    assert looks[-1].step > looks[0].step


def test_a_segment_first_used_in_inference_mode_is_writable_outside_it() -> None:
    descriptor, _ = create_segment()
    arena = Arena(descriptor, SEGMENT, writable=True)
    os.close(descriptor)
    for mode in (True, False):
        with torch.inference_mode(mode):
            window = arena.window(PAGE, 12, torch.float32, (3,))
            window.copy_(torch.full((3,), float(mode)))
            assert not window.is_inference()
    assert window.tolist() == [0.0] * 3


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(RankStatus)


def test_a_waiting_thread_wakes_for_each_of_its_descriptors() -> None:
    pipes = [os.pipe() for _ in range(3)]
    looker = _Waiter()
    try:
        for readers in ({0}, {0, 1}, {1, 2}, {2}, set()):
            looker.follow(frozenset(pipes[at][0] for at in readers))
            for at, (reader, writer) in enumerate(pipes):
                os.write(writer, b"x")
                found = looker.wait(DEADLINE if at in readers else 0)
                assert found == ([(reader, select.POLLIN)] if at in readers else [])
                os.read(reader, 1)
        os.eventfd_write(looker.wake, 1)
        assert looker.wait(DEADLINE) == [(looker.wake, select.POLLIN)]
    finally:
        for descriptor in (each for pair in pipes for each in pair):
            os.close(descriptor)


def test_a_thread_waits_for_seconds_as_its_poller_counts_them() -> None:
    waiter, poller = _Waiter(), Mock()
    waiter.poller = poller
    waiter.wait(0.25)
    waiter.wait(-1.0)
    assert [call.args for call in poller.poll.mock_calls] == [(250.0,), (0.0,)]


def test_a_thread_that_no_longer_waits_is_not_woken() -> None:
    reader, writer = os.pipe()
    threads = WaiterThreads([reader])
    assert not threads.wait(0.01)
    threads.wake()
    # Otherwise its next wait would be over at once.
    assert not threads.wait(0)
    os.write(writer, b"x")
    assert not threads.wait(DEADLINE)
    for descriptor in (reader, writer):
        os.close(descriptor)


@pytest.mark.parametrize("is_free", [True, False])
def test_a_waiting_thread_takes_back_only_what_it_has_let_go(is_free: bool) -> None:
    threads, taken = WaiterThreads([]), Mock()
    threads.let_go, threads.take_back = lambda: is_free, taken
    assert not threads.wait(0)
    assert taken.called is is_free


def a_peer(**known: Any) -> Peer:
    channel: Any = None
    return Peer(Place("target", 1, 2, 1), channel, None, RemoteStatusPage(), **known)


@pytest.mark.parametrize(
    ("gone", "in_run", "run_ended", "why"),
    [
        ("", True, False, "ended the step without this tap"),
        ("", True, True, "ended the run without this tap"),
        ("", False, False, "takes no part in this run"),
        ("died", True, False, "died"),
        ("died", False, False, "died"),
        # It had done its part before it died.
        ("died", True, True, "ended the run without this tap"),
    ],
)
def test_a_rank_that_sent_nothing_has_the_reason_that_came_first(
    gone: str, in_run: bool, run_ended: bool, why: str
) -> None:
    peer = a_peer(gone=gone, in_run=in_run, run_ended=run_ended, ended_step=3)
    assert peer.why_absent() == f"target[1] {why}"
    assert peer.is_past(3)
    assert peer.is_past(4) == peer.has_settled() == (gone != "" or run_ended or not in_run)


@pytest.mark.parametrize(("participants", "takes_part"), [((0, 2), True), ((0, 1), False)])
def test_a_run_begins_with_nothing_of_an_earlier_one(participants: tuple[int, ...], takes_part: bool) -> None:
    before = a_peer(
        run_ended=True,
        ended_step=99,
        announced={7: b"plan"},
        announced_step=7,
        carried={1: ()},
        # What it has to give back, and what was counted, are of no run.
        to_release=[4],
        bytes_to_release=5,
        received=3,
        sent=2,
        confirmed=1,
    )
    before.inbox[7]["a key"] = None  # type: ignore[index]
    before.begin_run(RunInfo(2, 5, participants))
    after = a_peer(in_run=takes_part, ended_step=4, to_release=[4], bytes_to_release=5, received=3, sent=2, confirmed=1)
    after.page = before.page
    assert before == after


def test_after_a_large_tensor_small_ones_are_released_in_batches_again() -> None:
    receiver: Any = SimpleNamespace(_large=100)
    receiver._send_releases = lambda peer: Receiver._send_releases(receiver, peer)
    peer, sent = a_peer(), Mock()
    peer.send = sent  # type: ignore[method-assign]
    for number, nbytes in enumerate((150, 10, 20, 80)):
        published: Any = SimpleNamespace(id=number, nbytes=nbytes)
        Receiver._release(receiver, [(peer, published)])
    assert [list(call.args[0].ids) for call in sent.mock_calls] == [[0], [1, 2, 3]]
