"""What a file of recorded requests is made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict


class RecordedRequest(NamedTuple):
    """One request as it was served; ``created`` and ``finished`` are seconds since the epoch.

    ``finished`` is None of a request that was still being served, and then ``response`` is None as well. Files hold
    plain tuples of these four, so that a reader without graftlab can make sense of them.
    """

    request: Any
    response: Any = None
    created: float | None = None
    finished: float | None = None

    @property
    def rid(self) -> str | None:
        """The request's own id: its key or attribute ``rid``, where that is a string."""
        request = self.request.state if isinstance(self.request, Opaque) else self.request
        rid = request.get("rid") if isinstance(request, dict) else getattr(request, "rid", None)
        return rid if isinstance(rid, str) else None


class Dropped(TypedDict):
    """One thing that a file holds in another way than it was given, or not at all, and why."""

    where: str
    reason: str


class Dump(TypedDict):
    """A file of recorded requests. A crash's file has ``crash`` too: its reason, and the files written before it."""

    server_args: Any
    requests: list[RecordedRequest]
    launch_command: str
    dropped: list[Dropped]


@dataclass(eq=False)
class Opaque:
    """Stands for an object whose class was not to be imported, with whatever the file holds about it.

    ``args`` are the arguments it was to be made with, None where the file names the class or function itself; ``state``
    is mostly the dict of its attributes; ``items`` are what was put into it: elements, or pairs of key and value.
    """

    class_name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        # What it holds may hold it again, and may be as deep as a file cares to make it.
        return f"Opaque({self.class_name!r})"
