"""What a server records and logs of its requests, and how that is changed while it runs."""

from __future__ import annotations

import json
import logging
import reprlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graftlab.errors import DumpError
from graftlab.requests.dump import RequestDumper
from graftlab.requests.records import RecordedRequest

logger = logging.getLogger(__name__)

# How much of a request or response the log shows at level 2.
_SHORT = 2048


@dataclass(frozen=True)
class LoggingSettings:
    """What :func:`configure` changes. ``dump_requests_folder`` is empty where requests are not dumped.

    ``log_requests_level`` sets what the log shows of a request: 0 its id and duration, 1 its metadata too, 2 shortened
    inputs and outputs too, 3 complete ones.
    """

    log_requests: bool
    log_requests_level: int
    dump_requests_folder: str
    dump_requests_threshold: int
    dump_requests_exclude_meta_keys: tuple[str, ...]


class RequestLogging:
    """Logs and dumps each request of a server under the settings in force. Any thread may call it.

    With ``root``, :meth:`change` accepts only dump folders below it, after following links.

    >>> from graftlab.requests import RequestDumper, RequestLogging
    >>> requests = RequestLogging(RequestDumper(None))
    >>> requests.settings.log_requests
    False
    """

    def __init__(
        self,
        dumper: RequestDumper,
        log_requests: bool = False,
        log_requests_level: int = 0,
        *,
        root: Path | None = None,
    ) -> None:
        self.dumper = dumper
        self.root = root
        self._log = (log_requests, log_requests_level)
        self._changes = threading.Lock()

    @property
    def settings(self) -> LoggingSettings:
        dump = self.dumper.settings
        return LoggingSettings(*self._log, str(dump.folder or ""), dump.threshold, dump.exclude_meta_keys)

    def change(self, **changes: Any) -> LoggingSettings:
        """Change fields of :class:`LoggingSettings`, all or none, and return the settings then in force.

        Raises :class:`~graftlab.errors.DumpError` for a folder that cannot be made or is not allowed.
        """
        with self._changes:
            new = replace(self.settings, **changes)
            wanted = changes.get("dump_requests_folder")
            if wanted and self.root and not Path(wanted).resolve().is_relative_to(self.root.resolve()):
                raise DumpError(f"requests may be dumped below {self.root} on this server, not into {wanted}")
            folder = Path(new.dump_requests_folder).absolute() if new.dump_requests_folder else None
            keys = new.dump_requests_exclude_meta_keys
            # The part that can fail comes first.
            self.dumper.apply(
                replace(
                    self.dumper.settings, folder=folder, threshold=new.dump_requests_threshold, exclude_meta_keys=keys
                )
            )
            self._log = (new.log_requests, new.log_requests_level)
            return self.settings

    def finished(self, request: Any, response: Any, created: float, finished: float) -> bool:
        """Log and dump a finished request; returns as :meth:`~graftlab.requests.RequestDumper.add`. Never raises."""
        acknowledged = self.dumper.add(request, response, created, finished)
        wanted, level = self._log
        if wanted:
            try:
                logger.info("%s", _line(RecordedRequest(request, response, created, finished), level))
            except Exception:
                logger.exception("a request was not logged")
        return acknowledged


def configure(requests: RequestLogging, body: bytes | str | Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Answer a server's ``POST /configure_logging``: the HTTP status, and what to send back as JSON.

    ``body`` is a JSON object of fields of :class:`LoggingSettings`, only those to change; ``null`` leaves
    one as it is. An empty list of keys keeps every key, an empty folder ends dumping. 200 comes with the settings now
    in force. An unknown name or an invalid value gives 400 with ``{"error": reason}``, and changes nothing.

    >>> from graftlab.requests import RequestDumper, RequestLogging, configure
    >>> requests = RequestLogging(RequestDumper(None))
    >>> configure(requests, '{"log_requests": true}')[0], configure(requests, '{"log_request": true}')[0]
    (200, 400)
    """
    try:
        return 200, asdict(requests.change(**_changes(body)))
    except (ValueError, DumpError) as error:
        return 400, {"error": str(error)}


def _changes(body: bytes | str | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(body, (bytes, str)):
        try:
            body = json.loads(body, object_pairs_hook=_once)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"the body is not JSON: {error}") from None
    if not isinstance(body, Mapping):
        raise ValueError(f"the body is a JSON object of settings, not {_shown(body)}")
    if unknown := [name for name in body if name not in _RULES]:
        raise ValueError(f"there is no setting {_shown(unknown[0])}; the settings are {', '.join(_RULES)}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        expected, is_right = _RULES[name]
        if not is_right(value):
            raise ValueError(f"{name} is {expected}, not {_shown(value)}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name occurs twice in {_shown([name for name, _ in pairs])}")
    return found


# In Python a bool is an int; in these settings it is not.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "log_requests": ("true or false", lambda value: isinstance(value, bool)),
    "log_requests_level": ("a whole number from 0 to 3", lambda value: type(value) is int and 0 <= value <= 3),
    "dump_requests_folder": ("the path of a folder", lambda value: isinstance(value, str) and "\0" not in value),
    "dump_requests_threshold": ("a whole number of at least 1", lambda value: type(value) is int and value >= 1),
    "dump_requests_exclude_meta_keys": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(key, str) for key in value),
    ),
}


def _shown(value: Any) -> str:
    return reprlib.repr(value)


def _line(record: RecordedRequest, level: int) -> str:
    seconds = record.finished - record.created if record.finished is not None and record.created is not None else 0.0
    line = f"request {record.rid!r} took {seconds:.3f} s"
    meta = record.response.get("meta_info") if isinstance(record.response, dict) else None
    if level >= 1:
        line += f", meta_info {_cut(meta, level)}"
    if level >= 2:
        line += f", in {_cut(record.request, level)}, out {_cut(record.response, level)}"
    return line


def _cut(value: Any, level: int) -> str:
    text = repr(value)
    return text if level >= 3 or len(text) <= _SHORT else f"{text[:_SHORT]}..."
