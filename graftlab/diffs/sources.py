"""Fingerprints of the sources of built files. Stands apart because `hatch_build.py` loads this file without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

KERNEL_SOURCES = Path("graftlab", "diffs", "c")


def kernel_sources(folder: Path) -> list[Path]:
    """Return the kernel's source files in this folder."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def fingerprint(paths: Iterable[Path]) -> str:
    """Return sixteen digits that depend on the names and contents of these files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
