"""Processes that tests watch end: who belongs to whom, who is still there, and what was left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from kit.deadline import DEADLINE
from kit.support import wait_until


def family(pid: int) -> set[int]:
    """The process and everything that it, and those it started, have started."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                # The name in parentheses may hold anything, so what follows is counted from its end.
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def stop_process(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: the signal alone returns before that."""
    os.kill(pid, signal.SIGSTOP)

    def has_stopped() -> bool:
        states = [entry.read_text().rpartition(")")[2].split()[0] for entry in Path(f"/proc/{pid}/task").glob("*/stat")]
        return bool(states) and set(states) <= {"T", "t"}

    wait_until(has_stopped, f"the stop of process {pid}")


def watch(pids: Iterable[int]) -> dict[int, int]:
    """Descriptors that tell when these processes end; taken while they live, so that no other can take their number."""
    watched = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            watched[pid] = os.pidfd_open(pid)
    return watched


def still_there(watched: dict[int, int]) -> list[int]:
    """Wait for the processes to end; those that have not when the deadline comes."""
    poller = select.poll()
    names = {descriptor: pid for pid, descriptor in watched.items()}
    for descriptor in names:
        poller.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + DEADLINE
    while names and time.monotonic() < deadline:
        for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            poller.unregister(descriptor)
            os.close(descriptor)
            del names[descriptor]
    return sorted(names.values())


def descriptors() -> set[tuple[str, str]]:
    """What this process has open: the number of each descriptor, and what it is of."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own is closed by now
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def shared_memory_left(before: set[str]) -> set[str]:
    """What is new in shared memory since ``before``, once its other users have had time to clean up."""
    deadline = time.monotonic() + DEADLINE
    poller = select.poll()
    while (left := set(os.listdir("/dev/shm")) - before) and time.monotonic() < deadline:
        poller.poll(20)
    return left
