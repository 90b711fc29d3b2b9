"""Machines made of network namespaces: each with an address, on one switch.

Nothing of it touches the network of the host: the switch is a bridge in a namespace too. For what graftlab
keeps in ``/tmp`` each machine has a separate folder, so that no socket on the disk leads from one to another.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import warm
from kit.job_scripts import environment

_numbers = itertools.count()


class Machine:
    """One of them. ``address`` is how the others reach it."""

    def __init__(self, name: str, address: str, plug: str, tmp: str) -> None:
        self.name = name
        self.address = address
        self._plug = plug
        self._tmp = tmp

    def start(self, *arguments: object, **extra: str) -> warm.Running:
        """Run Python with these arguments there, with this environment beside the test's."""
        network = f"/run/netns/{self.name}"
        return warm.start(
            arguments, environment(extra), network=network, own_folder=(str(_tmp()), self._tmp), children=True
        )

    def packets(self) -> dict[str, int]:
        """Linux counts its TCP packets: ``RetransSegs`` were lost, ``TCPOFOQueue`` out of order."""
        found: dict[str, int] = {}
        for file in ("snmp", "netstat"):
            shown = subprocess.run(
                ["ip", "netns", "exec", self.name, "cat", f"/proc/net/{file}"],
                capture_output=True,
                text=True,
                check=True,
            )
            lines = shown.stdout.splitlines()
            for names, counts in zip(lines[::2], lines[1::2], strict=True):
                found |= zip(names.split()[1:], map(int, counts.split()[1:]), strict=True)
        return found

    def unplug(self) -> None:
        """Its cable is out."""
        _ip("-n", self._plug.partition(" ")[0], "link", "set", self._plug.partition(" ")[2], "down")

    def plug_in(self) -> None:
        _ip("-n", self._plug.partition(" ")[0], "link", "set", self._plug.partition(" ")[2], "up")


@contextlib.contextmanager
def machines(count: int, *, delay: float = 0.0, lost: float = 0.0, jitter: float = 0.0) -> Iterator[list[Machine]]:
    """Machines on one switch, each behind a cable that takes these seconds and loses this share of packets.

    With ``jitter`` each packet takes up to that many seconds more, so that packets overtake each other.

    Skips the test where they cannot be made.
    """
    try:
        with _machines(count, delay, lost, jitter) as made:
            yield made
    except NoMachines as error:
        pytest.skip(str(error))


class NoMachines(Exception):
    """What is missing."""


@contextlib.contextmanager
def _machines(count: int, delay: float, lost: float, jitter: float) -> Iterator[list[Machine]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoMachines("network namespaces need the command ip, and root")
    is_slow = bool(delay or lost or jitter)
    base = f"gl{os.getpid()}x{next(_numbers)}"
    switch = f"{base}s"
    _tmp().mkdir(mode=0o700, exist_ok=True)
    made = []
    folders = contextlib.ExitStack()
    try:
        _ip("netns", "add", switch)
        made.append(switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        found = []
        names = [f"{base}m{number}" for number in range(count)]
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        if is_slow:
            folders.callback(_end, _start_wire(delay, lost, jitter, switch, *names))
        for number, name in enumerate(names):
            address, plug = f"10.77.0.{number + 1}", f"p{number}"
            if not is_slow:
                _ip("-n", switch, "link", "add", plug, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", plug, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            found.append(
                Machine(name, address, f"{switch} {plug}", folders.enter_context(tempfile.TemporaryDirectory()))
            )
        yield found
    finally:
        folders.close()
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _start_wire(*arguments: object) -> subprocess.Popen[str]:
    if not os.access("/dev/net/tun", os.W_OK):
        raise NoMachines("slow cables need /dev/net/tun")
    wire = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("wire.py")), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wire.stdout is not None
    if wire.stdout.readline() != "ready\n":
        raise NoMachines("slow cables cannot be made here")
    return wire


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def _tmp() -> Path:
    return Path("/tmp") / f"graftlab-{os.getuid()}"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoMachines(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
