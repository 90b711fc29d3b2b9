"""By what built files tell which sources they were made from. `hatch_build.py` loads this file alone, without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

KERNEL_SOURCES = Path("graftlab", "diffs", "c")


def kernel_sources(folder: Path) -> list[Path]:
    """The files in this folder that the kernel is made from."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def fingerprint(paths: Iterable[Path]) -> str:
    """Sixteen digits that change with the names and the contents of these files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
