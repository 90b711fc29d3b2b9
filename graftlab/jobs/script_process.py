"""The process of a script's command: how it is started, how it ended, and the last lines of its output."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graftlab.base.files import has_room
from graftlab.base.world import Side
from graftlab.errors import LaunchError, without_torch
from graftlab.ranks.process_end import end_programs_of

_LAST_LINES = 20
# Lines read for each line shown, because some are left out.
_READ_PER_SHOWN = 8


@dataclass(frozen=True)
class ScriptCommand:
    """How to start one side: its command, number of ranks, folder, and changes of the environment."""

    arguments: tuple[str, ...]
    ranks: int = 1
    folder: str | None = None
    variables: Mapping[str, str] | None = None

    @property
    def text(self) -> str:
        """The command as typed."""
        return shlex.join(self.arguments)


class ScriptProcess:
    """The process of one side's command, with the programs that it starts and their output."""

    def __init__(self, side: Side, command: ScriptCommand, log: Path, environment: Mapping[str, str]) -> None:
        """Raises :class:`LaunchError` if the command cannot be started."""
        self.side, self.command, self.log = side, command, log
        self.keeps_going = False
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        # A script that is started again appends to its log.
        self._log_begins = os.fstat(descriptor).st_size
        try:
            self._process = subprocess.Popen(
                command.arguments,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                cwd=command.folder,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"the {side} `{command.text}` cannot be started: {error}") from error
        finally:
            os.close(descriptor)
        self.ended = os.pidfd_open(self._process.pid)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def is_done(self) -> bool:
        """Whether the command has ended successfully."""
        return self._process.poll() == 0

    def wait(self, timeout: float) -> bool:
        """Wait for its end; False if it has not ended within ``timeout`` seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def how_it_ended(self) -> str:
        """Describe how it ended, such as ``"ended with exit code 1"``."""
        code = self._process.poll()
        if code is None:
            return "runs"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    @property
    def exit_code(self) -> int | None:
        """The exit code of the command; None while it runs."""
        return self._process.poll()

    def last_lines(self, most: int = _LAST_LINES) -> str:
        """The last lines of its output, without torch's frames in tracebacks."""
        try:
            text = self.log.read_bytes()[self._log_begins :].decode("utf-8", errors="replace")
        except OSError as error:
            return f"(its output cannot be read: {error})"
        # Read only the end of a long log.
        lines = _without_frames_between(text.splitlines()[-_READ_PER_SHOWN * most :])
        shown = "\n".join(lines[-most:]) or "(nothing)"
        if not has_room(self.log.parent):
            # The script then fails when it prints, and its traceback is missing too.
            shown += f"\n(the disk of {self.log.parent} is full, so its last output is missing)"
        return shown

    def kill(self) -> None:
        """End it and the programs that it has started, unless the script is to continue."""
        if not self.keeps_going:
            end_programs_of(self._process.pid)

    def release(self) -> None:
        """End it as :meth:`kill` does, and close this process's connections to it."""
        if self.ended < 0:
            # Its pid may belong to another process by now.
            return
        self.kill()
        if not self.keeps_going:
            self._process.wait()
        os.close(self.ended)
        self.ended = -1


# The lines of a traceback, markers included, with which a model's call passes through this package.
_OF_COMPARISON = re.compile(
    r'(?:^ *File "[^"\n]*[/\\]graftlab[/\\](?:jobs|taps)[/\\][^"\n]*", line .*\n(?:^ {4,}(?!File ").*\n)*)+',
    re.MULTILINE,
)


def _without_frames_between(lines: Sequence[str]) -> list[str]:
    """Leave out torch's and this package's frames of tracebacks, which alone may exceed the lines that are shown."""
    text = "".join(f"{line}\n" for line in lines)
    return without_torch(_OF_COMPARISON.sub("", text))[0].splitlines()
