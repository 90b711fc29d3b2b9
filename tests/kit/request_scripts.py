"""Serving processes that are killed: run as ``python request_scripts.py FOLDER COUNT SEED``, without torch.

Each is forked off, records requests from three threads, and ends in one of six ways at a random moment. What was
acknowledged to it stands in its file ``acknowledged``, which outlives the process as it is written without a buffer.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

from graftlab.requests import RequestDumper

FATES = ("SIGKILL", "SIGHUP", "SIGABRT", "SIGTERM", "SIGQUIT", "exception")


class _Planned(Exception):
    """The uncaught exception that one of the fates is."""


def serve(folder: Path, fate: str, seed: int, tell: int) -> None:
    """Record until the end comes; the first flush is reported: from then on requests can be lost."""
    chance = random.Random(seed)
    log = os.open(folder / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    dumper = RequestDumper(folder / "dumps", 20, crash_folder=folder / "crash", catch_crashes=True)
    pause = threading.Event()

    def work(name: str, flush_every: int, until: int) -> None:
        for number in range(until):
            request = {"rid": f"{name}-{number}"}
            began = number % 3 > 0 and dumper.begin(request, time.time())
            if began:
                os.write(log, f"begun {name}-{number}\n".encode())
            if number % 2:
                pause.wait(0.0003)
            if dumper.add(request, {"text": "x", "meta_info": {"hidden_states": object()}}, time.time(), time.time()):
                os.write(log, f"added {name}-{number}\n".encode())
            if number % flush_every == flush_every - 1 and dumper.flush():
                os.write(log, f"flushed {name}-{number}\n".encode())
                os.write(tell, b".")

    for name, flush_every in (("a", 7), ("b", 1_000_000)):
        threading.Thread(target=work, args=(name, flush_every, 1_000_000), daemon=True).start()
    work("main", 1_000_000, chance.randrange(60) if fate == "exception" else 1_000_000)
    raise _Planned


def run(folder: Path, fate: str, seed: int, early: bool) -> int:
    """Fork a process and end it, ``early`` maybe before it records anything; its status as ``subprocess`` gives it."""
    folder.mkdir(parents=True)
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready)
        if early:
            os.write(tell, b".")
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        serve(folder, fate, seed, tell)
    os.close(tell)
    os.read(ready, 1)
    if fate != "exception":
        # The moment is what the test is about, so nothing is waited for but time.
        threading.Event().wait(random.Random(seed).uniform(0.0, 0.04))
        os.kill(child, getattr(signal, fate))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(ready)
    return status


def main(base: Path, count: int, seed: int) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for index in range(count):
        fate = FATES[index % len(FATES)]
        folder = base / str(index)
        status = run(folder, fate, seed + index, early=index // len(FATES) % 4 == 0)
        sys.stdout.write(
            json.dumps({"folder": str(folder), "fate": fate, "status": status, "seed": seed + index}) + "\n"
        )
        sys.stdout.flush()
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
