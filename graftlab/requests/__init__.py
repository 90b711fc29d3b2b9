"""Requests as a serving process saw them: recorded without getting in its way, and read back without trust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graftlab.requests.dump import RequestDumper
from graftlab.requests.loading import load_dump
from graftlab.requests.records import Dropped, Dump, Opaque, RecordedRequest
from graftlab.requests.request_id import request_id_to_int
from graftlab.requests.settings import LoggingSettings, RequestLogging, configure
from graftlab.requests.writing import DumpSettings

if TYPE_CHECKING:
    from graftlab.requests.identity import bootstrap_rooms_tensor, request_ids_tensor

__all__ = [
    "Dropped",
    "Dump",
    "DumpSettings",
    "LoggingSettings",
    "Opaque",
    "RecordedRequest",
    "RequestDumper",
    "RequestLogging",
    "bootstrap_rooms_tensor",
    "configure",
    "load_dump",
    "request_id_to_int",
    "request_ids_tensor",
]

_IDENTITY = ("bootstrap_rooms_tensor", "request_ids_tensor")


def __getattr__(name: str) -> Any:
    if name not in _IDENTITY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Only now, since it needs torch, for which a command line that posts settings need not wait.
    from graftlab.requests import identity

    return getattr(identity, name)
