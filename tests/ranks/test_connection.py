"""A rank's connection wakes the session for what it should read at once, and for rows only when they pile up."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from graftlab.ranks.connection import ControlConnection


def test_rows_wake_the_session_once_when_more_wait_than_the_socket_holds() -> None:
    channel, wake = Mock(backed_up=False), Mock()
    line = ControlConnection(channel, wake)
    woken: list[int] = []

    def sees(is_full: bool) -> None:
        channel.backed_up = is_full
        line.seen({"name": "x"})
        woken.append(wake.send.call_count)

    for is_full in (False, True, True, False, True, True):
        sees(is_full)
    assert woken == [0, 1, 1, 1, 2, 2]
    line.adopted(3, 7)
    assert wake.send.call_count == 3
    # Its session has ended, or is awake.
    wake.send.side_effect = BrokenPipeError
    line.adopted(4, 8)
    assert channel.send.call_count == 8


def test_a_connection_has_room_for_bursts_and_never_waits_to_wake() -> None:
    done: Any = Mock()
    ControlConnection(done.channel, done.wake)
    done.channel.make_room.assert_called_once_with(4 << 20)
    done.wake.setblocking.assert_called_once_with(False)
