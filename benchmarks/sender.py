"""``python -m benchmarks.sender ROWS DESCRIPTOR ...`` stands for many ranks of this machine.

It reads one row from its standard input, and sends it ROWS times over each socket, in turns. It imports nothing slow.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

# Rows that one rank sends before the next rank's turn.
_AT_ONCE = 8


def _send(row: bytes, rows: int, descriptors: Sequence[int]) -> None:
    ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for start in range(0, rows, _AT_ONCE):
        piece = row * min(_AT_ONCE, rows - start)
        for end in ends:
            end.sendall(piece)


if __name__ == "__main__":
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    _send(sys.stdin.buffer.read(), int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
