"""Debugging the last failure on a rank from the notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftlab.control.queries import AskRank
from graftlab.errors import SessionError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import AskPostMortem, PostMortem

ENDS = ("q", "quit", "exit")


def post_mortem(ranks: Sequence[RankHandle], on: str, command: str, ask: AskRank) -> str:
    """Send a command to the debugger on this one rank, and return its answer."""
    if len(ranks) != 1:
        labels = ", ".join(rank.label for rank in ranks)
        raise SessionError(f"{on!r} is more than one rank; name one of {labels}")
    return ask(ranks[0], AskPostMortem(command), PostMortem).text


def prompt(label: str, ask: Callable[[str], str], read: Callable[[str], str], write: Callable[[str], object]) -> None:
    """Read debugger commands and show each answer, until ``q``, the end of the input or the stop button."""
    write(f"{ask('')}\n\nw: the frames, u and d: up and down, l: the source, p EXPR: a value, q: the end\n")
    last = ""
    while True:
        try:
            command = read(f"({label}) ").strip() or last
        except (EOFError, KeyboardInterrupt):
            return
        if command in ENDS:
            return
        last = command
        try:
            answer = ask(command) if command else ""
        except SessionError as error:
            answer = str(error)
        if answer:
            write(f"{answer}\n")
