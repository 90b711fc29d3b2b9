"""The forkserver of a warm script, which need not import torch anew either.

It is forked off the script before that begins, and waits. When multiprocessing is about to start a forkserver, it takes
over the command, with the descriptors, the environment and the folder that it would have got as a new interpreter; so
it is a child of the script as any other, and from then on runs what any other does.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

_COMMAND = "from multiprocessing.forkserver import main"
# Above whatever number a descriptor has in the script.
_HIGH = 1000


def prepare() -> None:
    """Fork; the script continues, and its first forkserver is the fork."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_forkserver(theirs)
    theirs.close()
    usual = multiprocessing.util.spawnv_passfds

    def start(path: Any, args: Sequence[str], passed: Sequence[int]) -> int:
        if not args[-1].startswith(_COMMAND):
            return int(usual(path, args, passed))
        multiprocessing.util.spawnv_passfds = usual
        told = json.dumps({"command": args[-1], "env": dict(os.environ), "cwd": os.getcwd(), "numbers": [*passed]})
        with ours:
            socket.send_fds(ours, [len(told.encode()).to_bytes(8, "little")], [*passed])
            ours.sendall(told.encode())
        return pid

    multiprocessing.util.spawnv_passfds = start


def _become_forkserver(asks: socket.socket) -> None:
    # The stop button is for the script.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size, descriptors, *_ = socket.recv_fds(asks, 8, 8)
    if not size:
        os._exit(0)  # the script has ended, and needed none
    request = b""
    while len(request) < int.from_bytes(size, "little"):
        request += asks.recv(1 << 16)
    asks.close()
    told = json.loads(request)
    high = [fcntl.fcntl(each, fcntl.F_DUPFD, _HIGH) for each in descriptors]
    for descriptor, number in zip(high, told["numbers"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for descriptor in set(descriptors) - set(told["numbers"]):
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*first, *(each for each in sys.path if each not in first)]
    sys.argv[:] = ["-c"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        exec(told["command"], {"__name__": "__main__"})
    except KeyboardInterrupt:
        # The stop button, while it imports: gone at once, or the next launch would take it for one that works.
        os._exit(1)
    sys.exit()
