"""Source text that is no file (cells, expressions, transforms), made known to tracebacks."""

from __future__ import annotations

import linecache


def install_source(filename: str, source: str) -> None:
    """Let tracebacks show the lines of this source."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def source_of(filename: str) -> str | None:
    """The source that goes by this name and is no file; None where there is none, or it is a file."""
    entry = linecache.cache.get(filename)
    # Entries with a modification time are files, which any process can read itself.
    if entry is None or len(entry) != 4 or entry[1] is not None:
        return None
    return "".join(entry[2])
