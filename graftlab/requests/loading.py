"""Files of recorded requests, read back without running anything of theirs."""

from __future__ import annotations

import pickle
import reprlib
from pathlib import Path
from typing import Any, cast

from graftlab.errors import DumpError
from graftlab.requests.records import Dump, RecordedRequest
from graftlab.requests.unpickling import Reader, Unreadable


def load_dump(path: str | Path, trusted: bool = False) -> Dump:
    """A file that a :class:`~graftlab.requests.RequestDumper` wrote, or another program in the same form.

    The form is a pickled dict whose ``"requests"`` are tuples ``(request, response, created, finished)``; they come as
    :class:`~graftlab.requests.RecordedRequest`. Builtin data, torch tensors (on the CPU), numpy arrays and the kit's
    own dataclasses are made; anything else becomes an :class:`~graftlab.requests.Opaque` that names its class and holds
    what the file says about it. Nothing else is imported, and nothing called. With ``trusted``, plain pickle reads the
    file: only for files of your own.

    Raises :class:`~graftlab.errors.DumpError` for a file that ends early, is damaged or is something else, with the
    byte up to which it could be read and the requests before it; OSError where there is no file to read.

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
    data = Path(path).read_bytes()
    if trusted:
        try:
            found = pickle.loads(data)
        except Exception as error:
            _read(path, data)  # says where, if the bytes are at fault
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
    dump["requests"] = [_record(item) for item in found["requests"]]
    return cast(Dump, dump)


def _read(path: str | Path, data: bytes) -> Any:
    try:
        return Reader().read(data)
    except Unreadable as error:
        requests = [_record(item) for item in error.reader.list_under("requests") if _is_record(item)]
        raise DumpError(
            f"{path} is readable up to byte {error.offset} of {len(data)}, with {len(requests)} whole requests before "
            f"it, which are this error's `requests`: {error.reason}",
            error.offset,
            requests,
        ) from None


def _is_record(item: Any) -> bool:
    return isinstance(item, tuple) and len(item) == len(RecordedRequest._fields)


def _record(item: Any) -> RecordedRequest:
    # What is no record is left for replay to report, by its number among the others.
    return RecordedRequest(*item) if _is_record(item) else RecordedRequest(item)
