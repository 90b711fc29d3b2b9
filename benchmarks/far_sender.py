"""``python -m benchmarks.far_sender PORT RANKS A_HOST ROWS`` stands for ranks on other machines: each sends one row so
many times. With ``A_HOST`` more than 0 so many of them share a connection, as jobs do that have an agent; else each has
its own. The token and the row come on the standard input. It imports nothing that takes time.
"""

from __future__ import annotations

import struct
import sys
import time

import zmq

from graftlab.exchange.keys import derive_keys
from graftlab.jobs.trunk import DATA, HELLO, HOST, OPEN, pack_part

# Rows that one rank says within the time for which they gather.
_AT_ONCE = 8
_LIMIT = 120.0


def _connect(port: int, count: int, token: str) -> list[zmq.Socket[bytes]]:
    """So many connections, each as a Post makes it."""
    keys, context, made = derive_keys(token), zmq.Context(), []
    context.set(zmq.MAX_SOCKETS, count + 16)
    for number in range(count):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"far %d" % number)
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public)
        socket.setsockopt(zmq.RCVTIMEO, int(_LIMIT * 1000))
        socket.set_hwm(0)
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b"h")
        made.append(socket)
    for socket in made:
        assert socket.recv() == b"w", HOST
    return made


def main() -> None:
    port, ranks, a_host, rows = map(int, sys.argv[1:])
    token = sys.stdin.buffer.readline().decode().strip()
    sockets = _connect(port, ranks // max(1, a_host), token)
    for number, socket in enumerate(sockets):
        if not a_host:
            socket.send(b"%d" % number)
            continue
        socket.send(HELLO)
        assert socket.recv() == HELLO
        parts = b""
        for line in range(a_host):
            word = b"%d" % (number * a_host + line)
            parts += pack_part(line, OPEN) + pack_part(line, DATA, struct.pack("<I", len(word)) + word)
        socket.send(parts)
    for socket in sockets:
        # All of them are let in.
        socket.recv()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    row = sys.stdin.buffer.read()
    worked = time.process_time()
    for start in range(0, rows, _AT_ONCE):
        bundle = row * min(_AT_ONCE, rows - start)
        message = b"".join(pack_part(line, DATA, bundle) for line in range(a_host)) if a_host else bundle
        for socket in sockets:
            socket.send(message)
    for socket in sockets:
        # The word that the other end has gone, which it does when it has all rows.
        socket.recv()
    print(time.process_time() - worked)


if __name__ == "__main__":
    main()
