"""Files in folders that another user may have filled: only regular files are opened, and no link is followed."""

from __future__ import annotations

import contextlib
import errno
import grp
import io
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

# More than any file that is read at once needs, and less than fills a machine.
_MOST_BYTES = 1 << 30


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, folder: int | None = None) -> int:
    """Open a regular file and return its descriptor; a file that this makes is for this user alone.

    A pipe is refused at once, without its other end. With ``folder``, a descriptor, the path begins there. Raises
    OSError.
    """
    try:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(error.errno, "it is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


@contextlib.contextmanager
def opened(folder: Path, *inside: str) -> Iterator[io.FileIO]:
    """Open a regular file in a folder, or in a folder of it, for reading; nothing outside of it. Raises OSError."""
    for name in inside:
        if not name or "/" in name or "\0" in name or name in (".", ".."):
            raise OSError(errno.EINVAL, f"{name!r:.80} is not the name of a file in the folder")
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
    place = os.open(folder, flags)
    try:
        for name in inside[:-1]:
            further = os.open(name, flags | os.O_NOFOLLOW, dir_fd=place)
            os.close(place)
            place = further
        descriptor = open_regular(inside[-1], folder=place)
    finally:
        os.close(place)
    with io.FileIO(descriptor, "rb") as file:
        yield file


def read_all(folder: Path, *inside: str, most: int = _MOST_BYTES) -> bytes:
    """The bytes of a file, opened as :func:`opened` does. Raises OSError, also for one of more than ``most``."""
    with opened(folder, *inside) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size >> 20:,} MiB, and at most {most >> 20:,} are read")
        return file.readall()


def open_named(path: str | Path) -> int:
    """Open a regular file that the user has named, who may have named a link to it. Raises OSError."""
    return open_regular(os.path.realpath(path))


def has_room(folder: Path) -> bool:
    """Whether the disk of a folder takes anything more; True if that cannot be found out."""
    try:
        return os.statvfs(folder).f_bavail > 0
    except OSError:
        return True


def others_can_write(folder: Path) -> bool:
    """Whether other users can make files in a folder, by its mode. Raises OSError."""
    found = folder.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private(found.st_gid)


def _is_private(group: int) -> bool:
    """Whether a group is that of this user alone, as many systems make one for each user."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
