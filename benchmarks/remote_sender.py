"""``python -m benchmarks.remote_sender PORT RANKS ROWS`` stands for ranks on other machines.

Each rank sends one row ROWS times on its own connection. The token and the row are read from the standard input. It
imports nothing slow.
"""

from __future__ import annotations

import sys
import time

import zmq

from graftlab.exchange.keys import Keys, derive_keys

# Rows in one message of a rank.
_AT_ONCE = 8
_NEW_AT_ONCE = 50
_LIMIT = 120.0


def _connect(port: int, count: int, token: str) -> list[zmq.Socket[bytes]]:
    keys, context, made = derive_keys(token), zmq.Context(), []
    context.set(zmq.MAX_SOCKETS, count + 16)
    # The listener ends some of more than a hundred connections that have not proved who they are; a rank tries again.
    for start in range(0, count, _NEW_AT_ONCE):
        made += _connected(context, keys, port, range(start, min(count, start + _NEW_AT_ONCE)))
    return made


def _connected(
    context: zmq.Context[zmq.Socket[bytes]], keys: Keys, port: int, numbers: range
) -> list[zmq.Socket[bytes]]:
    made = []
    for number in numbers:
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
        assert socket.recv() == b"w"
    return made


def main() -> None:
    port, ranks, rows = map(int, sys.argv[1:])
    token = sys.stdin.buffer.readline().decode().strip()
    sockets = _connect(port, ranks, token)
    for number, socket in enumerate(sockets):
        socket.send(b"%d" % number)
    for socket in sockets:
        # The answer to each, so that all are connected.
        socket.recv()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    row = sys.stdin.buffer.read()
    worked = time.process_time()
    for start in range(0, rows, _AT_ONCE):
        bundle = row * min(_AT_ONCE, rows - start)
        for socket in sockets:
            socket.send(bundle)
    for socket in sockets:
        # The server closes the connection when it has all rows.
        socket.recv()
    print(time.process_time() - worked)


if __name__ == "__main__":
    main()
