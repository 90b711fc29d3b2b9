"""Why the session server refuses a process that asks to be a rank, and whether it may ask again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.errors import GraftError, MessageError, SessionError
from graftlab.jobs import session_server
from graftlab.jobs.handshake import JoinRequest, RequestRefused, pack_handshake, unpack_handshake
from graftlab.jobs.session_server import SessionServer


def asks(baseline: int = 1, target: int = 2, **more: Any) -> Any:
    """A request of target[1]."""
    fields = dict.fromkeys(JoinRequest.__struct_fields__)
    return SimpleNamespace(
        **fields | {"side": "target", "rank": 1, "world_size": target, "other_world_size": baseline, "pid": 7} | more
    )


def server(occupied: bool = False, has_begun: bool = False, tcp: bool = False, resumed: bool = False) -> Any:
    """The server of one baseline rank and two target ranks; ``occupied`` says whether target[1] has joined."""
    rank = SimpleNamespace(label="target[1]", pid=41, place=SimpleNamespace(world_rank=2))
    return SimpleNamespace(
        _session=SimpleNamespace(options=SimpleNamespace(baseline=1, target=2)),
        _rank_of=lambda join: rank,
        _membership=SimpleNamespace(occupied={2} if occupied else set(), has_begun=has_begun),
        _tcp_listener=object() if tcp else None,
        _agreed=None,
        _name="session",
        _resumed=resumed,
    )


def test_a_job_of_other_world_sizes_is_refused_with_all_four() -> None:
    refused = SessionServer._objection(server(), asks(baseline=2, target=3))
    assert refused is not None
    assert refused.error == (
        "target_world_size is 3 and baseline_world_size 2 in this job; the session has 1 baseline and 2 target ranks"
    )
    assert (refused.settings, refused.again) == (True, False)
    assert SessionServer._objection(server(), asks()) is None


@pytest.mark.parametrize(
    ("has_begun", "tcp", "runs", "again"),
    [
        # Before the run begins, no process that died has a successor: it is the second of one role.
        (False, False, False, False),
        (False, True, True, False),
        (True, False, True, False),
        # Afterwards its process may be gone without the server having noticed, as on a machine that has vanished.
        (True, False, False, True),
        (True, True, True, True),
    ],
)
def test_a_second_process_of_a_rank_may_ask_again_only_if_the_first_may_be_gone(
    has_begun: bool, tcp: bool, runs: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_server, "_is_running", lambda pid: {41: runs}[pid])
    refused = SessionServer._objection(server(occupied=True, has_begun=has_begun, tcp=tcp), asks())
    assert refused is not None
    assert refused.error == (
        "target[1] has joined already, as pid 41. Should this job be the baseline (GRAFTLAB_ROLE)? A second pair of "
        "jobs needs a separate folder (GRAFTLAB_RUN_DIR)"
    )
    assert (refused.settings, refused.again) == (False, again)


def test_a_rank_of_another_sessions_run_is_refused_once_this_session_has_ranks() -> None:
    def objection(resumed: bool, of: str = "other", alone: bool = False) -> Any:
        made = server(occupied=True, resumed=resumed)
        made._membership.occupied = set() if alone else {0}
        return SessionServer._objection(made, asks(rejoin=SimpleNamespace(session=of)))

    refused = objection(False)
    assert refused.error == "target[1] is in a run of another session, and this session already has its own run"
    assert (refused.settings, refused.again) == (False, False)
    # A session that took over the ranks of an earlier one, the rank's own, and one without ranks.
    assert objection(True) is objection(False, "session") is objection(False, alone=True) is None


@pytest.mark.parametrize(
    ("frame", "error", "kind"),
    [
        (b"no handshake", "a message that begins with b'no h' is not a handshake of graftlab", MessageError),
        (b"", "0 bytes are not a handshake of graftlab", MessageError),
        (None, "wire version 2", SessionError),
    ],
)
def test_a_far_process_learns_why_its_first_message_was_not_read(
    frame: bytes | None, error: str, kind: type[GraftError], monkeypatch: pytest.MonkeyPatch
) -> None:
    if frame is None:
        with monkeypatch.context() as other:
            other.setattr("graftlab.jobs.handshake.WIRE_VERSION", 2)
            frame = pack_handshake(RequestRefused("of another release", settings=False))
    sent: list[bytes] = []
    far: Any = SimpleNamespace(send=sent.append)
    with pytest.raises(kind, match=error):
        SessionServer._accept_tcp(server(), far, frame)
    (answer,) = map(unpack_handshake, sent)
    assert answer.error.startswith("the handshake could not be read: ")
    assert error in answer.error
    assert (answer.settings, answer.again) == (False, False)
