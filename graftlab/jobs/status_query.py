"""The status query: another process of the same user asks the session server about a session of jobs."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from graftlab.base.files import read_all
from graftlab.control.core import SessionCore
from graftlab.errors import ConfigError, SessionError
from graftlab.jobs.handshake import (
    RankReport,
    RequestRefused,
    StatusQuery,
    StatusReply,
    TapReport,
    receive_handshake,
    send_handshake,
)
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.rows.newest import LiveTaps
from graftlab.verdict.conclusion import difference_of
from graftlab.verdict.facts import tap_name

# Seconds to wait for the answer, since ranks may be slow to send their stacks.
_LIMIT = 30.0
# How many of the taps that differ the most are listed.
_TAPS = 12


def query_status(folder: Path, *, stacks: bool = False) -> StatusReply | None:
    """Ask the session that writes into this run folder for its status; None if no session of jobs does.

    Raises :class:`SessionError` if it is not a run folder, and if no answer arrives.
    """
    where = _rendezvous_of(folder)
    if where is None:
        return None
    try:
        with Rendezvous(where) as rendezvous:
            connection = rendezvous.connect(_LIMIT)
            if connection is None:
                return None
            with connection:
                return _ask(connection, stacks)
    except (ConfigError, OSError) as error:
        raise SessionError(f"{folder}: {error}") from error


def _ask(connection: socket.socket, stacks: bool) -> StatusReply | None:
    send_handshake(connection, StatusQuery(stacks))
    try:
        reply = receive_handshake(connection)
    except TimeoutError:
        raise SessionError(f"no answer arrived within {_LIMIT:g} s") from None
    if isinstance(reply, RequestRefused):
        raise SessionError(reply.error)
    if reply is not None and not isinstance(reply, StatusReply):
        raise SessionError(f"the session server answered {type(reply).__name__}")
    return reply


def _rendezvous_of(folder: Path) -> Path | None:
    """Return the rendezvous folder of this run folder's jobs, usually the run folder itself."""
    try:
        description = json.loads(read_all(folder, "session.json"))
    except FileNotFoundError:
        raise SessionError(f"{folder} is not a run folder: it has no session.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise SessionError(f"{folder / 'session.json'} cannot be read: {error}") from error
    rendezvous = description.get("rendezvous") if isinstance(description, dict) else None
    return None if not isinstance(rendezvous, str) or not Path(rendezvous).is_dir() else Path(rendezvous)


def answer_status_query(session: SessionCore, taps: LiveTaps, *, stacks: bool) -> StatusReply:
    """Answer a status query. With ``stacks`` this waits for every rank's stacks."""
    ranks = session.ranks
    code = session.stacks() if stacks else {}
    reports = []
    for rank, line in zip(ranks, session.status().to_dict("records"), strict=True):
        named = {str(name): "" if value is None or value is pd.NA else str(value) for name, value in line.items()}
        reports.append(RankReport(rank.label, named, code.get(rank.label, "")))
    # Infinite where values that are not finite differ.
    apart = [(row, difference) for row in taps.look() if (difference := difference_of(row)) >= 0]
    apart.sort(key=lambda each: each[1], reverse=True)
    furthest = [
        TapReport(tap_name(row.name, row.tags), row.tags.get("step"), f"{row.side}[{row.rank}]", row.status, difference)
        for row, difference in apart[:_TAPS]
    ]
    return StatusReply(repr(session), session.row_count, taps.behind, reports, furthest)


def format_status(reply: StatusReply) -> str:
    """Format the ranks, and the taps that differ the most, as text."""
    text = [reply.summary, "", _table([rank.columns for rank in reply.ranks])]
    if reply.taps:
        names = ("tap", "step", "rank", "status", "rel_l2")
        values = ((tap.name, str(tap.step), tap.rank, tap.status, f"{tap.rel_l2:.3g}") for tap in reply.taps)
        taps = [dict(zip(names, each, strict=True)) for each in values]
        behind = f" ({reply.behind:,} rows not read yet)" if reply.behind else ""
        text += ["", f"furthest apart, by each tap's newest row{behind}:", _table(taps)]
    return "\n".join(text)


def format_stacks(reply: StatusReply) -> str:
    """Format the stacks of each rank's threads."""
    return "\n".join(f"--- {rank.label}\n{rank.stacks or '(no process)'}" for rank in reply.ranks)


def _table(lines: Sequence[dict[str, str]]) -> str:
    """Format columns side by side, leaving out the empty ones."""
    names = [name for name in lines[0] if any(line[name] for line in lines)]
    widths = [max(len(name), *(len(line[name]) for line in lines)) for name in names]
    rows = [names, *([line[name] for name in names] for line in lines)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
