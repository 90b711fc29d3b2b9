"""Requests as a serving process saw them: recorded without getting in its way, and read back without trust."""

from graftlab.requests.dump import RequestDumper
from graftlab.requests.loading import load_dump
from graftlab.requests.records import Dropped, Dump, Opaque, RecordedRequest
from graftlab.requests.settings import LoggingSettings, RequestLogging, configure
from graftlab.requests.writing import DumpSettings

__all__ = [
    "Dropped",
    "Dump",
    "DumpSettings",
    "LoggingSettings",
    "Opaque",
    "RecordedRequest",
    "RequestDumper",
    "RequestLogging",
    "configure",
    "load_dump",
]
