"""The published package's own grafter, measured beside ours where ``sglang`` happens to be installed."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.loops import Times, graft_repeatedly
from benchmarks.reference import ReferenceWorld, Seat

_PACKAGE = "sglang"
_MODULE = "sglang.srt.debug_utils.dumper"
_HOST = "127.0.0.1"


class PublishedGrafter:
    """1+1 ranks with the package's grafter. ``note`` says whether it could be measured."""

    def __init__(self, ranks: ReferenceWorld | None, note: str) -> None:
        self._ranks = ranks
        self.note = note

    def graft(self, size: int, dtype: str, repeats: int) -> list[Times] | None:
        """How long its grafts take on each rank; None where they cannot be measured."""
        if self._ranks is None:
            return None
        try:
            times: list[Times] = self._ranks.run(_graft, size, dtype, repeats)
        except Exception as error:
            # It is somebody else's package, in whatever version: our table does not depend on it.
            *_, last = str(error).splitlines() or [type(error).__name__]
            self._ranks, self.note = None, f"{_PACKAGE}: could not be measured: {last}"
            return None
        return times


@contextmanager
def grafter(b2t: str) -> Iterator[PublishedGrafter]:
    """The package's grafter with this filter, for as long as the ``with`` lasts."""
    if importlib.util.find_spec(_PACKAGE) is None:
        yield PublishedGrafter(None, f"{_PACKAGE}: not installed, so not measured")
        return
    with ExitStack() as stack:
        world = ReferenceWorld(1, 1, join=functools.partial(_configure, b2t=b2t, port=_free_port()))
        yield PublishedGrafter(stack.enter_context(world), f"{_PACKAGE}: measured beside the reference")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _configure(seat: Seat, folder: str, *, b2t: str, port: int) -> None:
    # It reads its configuration from the environment when it is imported. What it would print and save is turned off.
    settings: dict[str, Any] = {
        "ENABLE": 1,
        "DIR": folder,
        "EXP_NAME": "benchmark",
        "ENABLE_OUTPUT_FILE": 0,
        "ENABLE_OUTPUT_CONSOLE": 0,
        "GRAFTER_ENABLE": 1,
        "GRAFTER_ROLE": seat.side,
        "GRAFTER_B2T_FILTER": b2t,
        "GRAFTER_MASTER_ADDRESS": _HOST,
        "GRAFTER_MASTER_PORT": port,
        "GRAFTER_BASELINE_WORLD_SIZE": seat.baseline,
        "GRAFTER_TARGET_WORLD_SIZE": seat.target,
        "GRAFTER_BACKEND": "gloo",
    }
    os.environ.update({f"DUMPER_{name}": str(value) for name, value in settings.items()})


def _graft(seat: Seat, size: int, dtype: str, repeats: int) -> Times:
    dumper = importlib.import_module(_MODULE).dumper
    tap = functools.partial(dumper.dump, save=False)
    return graft_repeatedly(tap, dumper.step, seat.side, seat.rank, size, dtype, repeats)
