"""The descriptors that ranks share: which rank gets which, and that all arrive and none stays open."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from graftlab.base.world import Place
from graftlab.errors import LaunchError
from graftlab.ranks import descriptors
from graftlab.ranks.descriptors import SharedDescriptors, receive_descriptors, send_descriptors

PLACES = Place("baseline", 0, 1, 2).everyone()


def test_each_rank_gets_all_segments_its_own_sockets_and_the_store_of_its_side(tmp_path: Path) -> None:
    shared = SharedDescriptors(PLACES)
    shared.make(tmp_path)
    first, second, third = (shared.of(place) for place in PLACES)
    assert first[:3] == second[:3] == third[:3] == shared.segments
    assert len({*first, *second, *third}) == 3 + 6 + 2
    assert [len(each) for each in (first, second, third)] == [6] * 3
    assert second[-1] == third[-1] != first[-1]
    # Each socket's other end is that of the other rank.
    os.write(first[3], b"x")
    assert os.read(second[3], 1) == b"x"
    os.write(third[4], b"y")
    assert os.read(second[4], 1) == b"y"
    shared.release()
    for descriptor in {*first, *second, *third}:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    shared.release()


def test_descriptors_of_jobs_have_no_store() -> None:
    shared = SharedDescriptors(PLACES)
    shared.make()
    assert len(shared.of(PLACES[0])) == 5
    shared.release()


def test_a_limit_of_the_system_is_named_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(descriptors, "create_segment", fails)
    with pytest.raises(LaunchError, match="shared memory and sockets for 3 ranks: too many open files; fewer ranks"):
        SharedDescriptors(PLACES).make()


def test_more_descriptors_than_a_message_holds_arrive_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_DESCRIPTORS_A_MESSAGE", 2)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = [os.memfd_create(str(number)) for number in range(5)]
        for number, descriptor in enumerate(sent):
            os.write(descriptor, b"x" * number)
        send_descriptors(ours, sent)
        received = receive_descriptors(theirs, 5)
        assert [os.fstat(each).st_size for each in received] == [0, 1, 2, 3, 4]
        # A program that is started meanwhile does not inherit them.
        assert not any(os.get_inheritable(each) for each in received)
        for descriptor in (*sent, *received):
            os.close(descriptor)
        # Linux takes at most 253 in one message.
        monkeypatch.undo()
        with open(os.devnull, "rb") as null:
            send_descriptors(ours, [null.fileno()] * 300)
        received = receive_descriptors(theirs, 300)
        assert len(received) == 300
        for descriptor in received:
            os.close(descriptor)
        ours.close()
        with pytest.raises(EOFError, match="the notebook ended before this rank had started"):
            receive_descriptors(theirs, 1)
