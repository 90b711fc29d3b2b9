"""Read files of recorded requests without running any of their code."""

from __future__ import annotations

import pickle
import reprlib
from functools import partial
from pathlib import Path
from typing import Any, cast

from graftlab.base.files import open_named
from graftlab.base.text import counted
from graftlab.errors import DumpError
from graftlab.requests.budget import BudgetExceeded
from graftlab.requests.journal import is_journal, read_journal
from graftlab.requests.records import Dump, RecordedRequest, recognised
from graftlab.requests.unpickling import PickleReader, PickleReadError


def load_dump(path: str | Path, trusted: bool = False) -> Dump:
    """Read a file that a :class:`~graftlab.requests.RequestDumper`, or another program in the same form, wrote.

    The form is a pickled dict whose ``"requests"`` are tuples ``(request, response, created, finished)``; they come as
    :class:`~graftlab.requests.RecordedRequest`. Tuples in other orders, such as ``(request, created, response, rid)``,
    are recognised by their content. Builtin data, torch tensors (on the CPU), numpy arrays and requests of
    the kit's own engine are made; anything else becomes an :class:`~graftlab.requests.Opaque` that names its class and
    holds what the file says about it. Nothing that a file names is imported or called. With ``trusted``, plain pickle
    reads the file: use it only for your own files.

    Raises :class:`~graftlab.errors.DumpError` for a file that ends early, is damaged or is something else, with the
    byte up to which it could be read and the requests before it, and for tuples that cannot be recognised, with those
    that can; OSError where there is no file to read.

    >>> from graftlab.requests import RequestDumper, load_dump
    >>> dumper = RequestDumper(session.folder / "loaded")
    >>> dumper.add({"rid": "req-0", "text": "hello"}, {"text": "world"}, created=0.0, finished=1.5)
    True
    >>> dumper.close()
    True
    >>> (path,) = (session.folder / "loaded").glob("*.pkl")
    >>> load_dump(path)["requests"][0].request
    {'rid': 'req-0', 'text': 'hello'}
    """
    with open(open_named(path), "rb") as file:
        data = file.read()
    if is_journal(Path(path), data):
        found = read_journal(Path(path), data, pickle.loads if trusted else partial(_read, path))
    elif trusted:
        try:
            found = pickle.loads(data)
        except Exception as error:
            _read(path, data)  # reports the place, if the bytes are at fault
            raise DumpError(f"{path} cannot be read by plain pickle: {type(error).__name__}: {error}") from error
    else:
        found = _read(path, data)
    if not isinstance(found, dict) or not isinstance(found.get("requests"), list):
        keys = f" with the keys {reprlib.repr(list(found))}" if isinstance(found, dict) else ""
        raise DumpError(
            f"{path} is readable to its end, but holds no recorded requests: it is a {type(found).__name__}{keys}, not "
            f"a dict with a list under 'requests'"
        )
    dump = {"server_args": None, "launch_command": "", "dropped": [], **found}
    # Only a RequestDumper lists what it dropped; its tuples always have the same order.
    dump["requests"], faults = _records(found["requests"], in_our_order="dropped" in found)
    if faults:
        raise DumpError(
            f"{path} holds records that cannot be recognised: {'; '.join(faults[:3])} "
            f"({len(faults)} of {len(found['requests'])}); the others are this error's `requests`",
            requests=dump["requests"],
        )
    return cast(Dump, dump)


def _read(path: str | Path, data: bytes) -> Any:
    try:
        reader = PickleReader()
        found = reader.read(data)
        reader.budget.require_shallow(found)
        return found
    except BudgetExceeded as error:
        raise DumpError(f"{path} is readable to its end, but not accepted: {error}") from None
    except PickleReadError as error:
        requests, _ = _records([item for item in error.reader.list_under("requests") if isinstance(item, tuple)])
        raise DumpError(
            f"{path} is readable up to byte {error.offset} of {len(data)}, with "
            f"{counted(len(requests), 'whole request')} before it, which this error's `requests` has: {error.reason}",
            error.offset,
            requests,
        ) from None


def _records(items: list[Any], in_our_order: bool = False) -> tuple[list[RecordedRequest], list[str]]:
    """Return the records, and the faults of items that are not records."""
    records, faults = [], []
    for index, item in enumerate(items):
        try:
            if in_our_order and isinstance(item, tuple) and len(item) == len(RecordedRequest._fields):
                records.append(RecordedRequest._make(item))
                continue
            # Replay reports an item that is not a tuple, by its number.
            records.append(recognised(item) if isinstance(item, tuple) else RecordedRequest(item))
        except ValueError as error:
            faults.append(f"number {index}: {error}")
    return records, faults
