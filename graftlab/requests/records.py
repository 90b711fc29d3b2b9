"""The contents of a file of recorded requests."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict


class RecordedRequest(NamedTuple):
    """One request as it was served; ``created`` and ``finished`` are seconds since the epoch.

    ``finished`` is None for a request that was still being served, and then ``response`` is None as well. Files hold
    plain tuples of these four, so that a reader without graftlab can use them.
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
    """An object that a file holds in a different form, or not at all, and the reason."""

    where: str
    reason: str


class Dump(TypedDict):
    """A file of recorded requests.

    A crash's file has ``crash`` too, a dict of its ``reason``, the ``files`` written before it, and ``marks``, one for
    each request: the path of the other file that has it, ``"unfinished"``, or None. So has a journal.
    """

    server_args: Any
    requests: list[RecordedRequest]
    launch_command: str
    dropped: list[Dropped]


@dataclass(eq=False)
class Opaque:
    """Stands for an object whose class must not be imported, with everything that the file holds about it.

    ``args`` are the arguments it was to be made with, None where the file names the class or function itself; ``state``
    is mostly the dict of its attributes; ``items`` are its contents: elements, or pairs of key and value.
    """

    class_name: str
    args: tuple[Any, ...] | None = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        # Its contents may contain it again, and may be nested arbitrarily deep.
        return f"Opaque({self.class_name!r})"


def recognised(item: Sequence[Any]) -> RecordedRequest:
    """Return the record in a tuple of a file, whatever program wrote it and in whatever order.

    The first item is the request. Of the others, numbers are times, in the order of time; text is the request's id; and
    anything else is the response. Raises ValueError for a tuple that fits no such order.
    """
    if len(item) == len(RecordedRequest._fields) and _is_time(item[2]) and _is_time(item[3]):
        request, response, created, finished = item
        if not _is_time(response) or response is None:
            return RecordedRequest(request, response, created, finished)
    if not item or _is_time(item[0]) or isinstance(item[0], str):
        raise ValueError(f"a tuple of {_kinds(item)} does not begin with a request")
    request, *others = item
    times = [each for each in others if each is not None and _is_time(each)]
    ids = [each for each in others if isinstance(each, str)]
    responses = [each for each in others if not _is_time(each) and not isinstance(each, str)]
    if len(times) > 2 or len(ids) > 1 or len(responses) > 1:
        raise ValueError(
            f"a tuple of {_kinds(item)} has {len(times)} times, {len(ids)} ids and {len(responses)} responses after "
            "the request; at most two, one and one are allowed"
        )
    if times != sorted(times):
        raise ValueError(f"a tuple of {_kinds(item)} has the times {times}, the later one first")
    created, finished = [*times, None, None][:2]
    record = RecordedRequest(request, responses[0] if responses else None, created, finished)
    return record if not ids or record.rid == ids[0] else record._replace(request=_named(request, ids[0], record.rid))


def _named(request: Any, rid: str, known: str | None) -> Any:
    if known is not None:
        raise ValueError(f"the request's own id is {known!r}, and the tuple has {rid!r}")
    if isinstance(request, Mapping):
        return {**request, "rid": rid}
    if isinstance(request, Opaque) and isinstance(request.state, dict):
        request.state["rid"] = rid
        return request
    raise ValueError(f"the tuple has the id {rid!r}, and a {type(request).__name__} cannot hold it")


def _is_time(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _kinds(item: Sequence[Any]) -> str:
    return "(" + ", ".join("None" if each is None else type(each).__name__ for each in item) + ")"
