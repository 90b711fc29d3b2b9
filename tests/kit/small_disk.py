"""Disks that are full: a file system of few KiB in a folder of the test."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, kib: int = 1024) -> Iterator[Path]:
    """Mount an empty file system of this size there; skips the test where this user may not."""
    folder.mkdir(exist_ok=True)
    options = ["mount", "-t", "tmpfs", "-o", f"size={kib}k,mode=700", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(options, capture_output=True).returncode:
        pytest.skip("needs root, and the right to mount, for a disk of few KiB")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk to its last byte; returns the file that does, so that the test can make room again."""
    path = folder / "other files"
    with open(path, "ab", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return path
