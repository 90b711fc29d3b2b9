"""The published package's own grafter, measured beside graftlab where ``sglang`` is installed."""

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
from benchmarks.reference import ReferencePlace, ReferenceWorld

_PACKAGE = "sglang"
_MODULE = "sglang.srt.debug_utils.dumper"
_HOST = "127.0.0.1"


class PublishedGrafter:
    """1+1 ranks with the package's grafter. ``note`` has the reason where it could not be measured."""

    def __init__(self, ranks: ReferenceWorld | None, note: str) -> None:
        self._ranks = ranks
        self.note = note

    def graft(self, size: int, dtype: str, repeats: int) -> list[Times] | None:
        """Time its grafts on each rank; None where they cannot be measured."""
        if self._ranks is None:
            return None
        try:
            times: list[Times] = self._ranks.run(_graft, size, dtype, repeats)
        except Exception as error:
            # The package may be of any version, and the table must not depend on it.
            *_, last = str(error).splitlines() or [type(error).__name__]
            self._ranks, self.note = None, f"{_PACKAGE}: could not be measured: {last}"
            return None
        return times


@contextmanager
def grafter(b2t: str) -> Iterator[PublishedGrafter]:
    """Start the package's grafter with this filter, and stop it at the end of the ``with``."""
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


def _configure(place: ReferencePlace, folder: str, *, b2t: str, port: int) -> None:
    # It reads its configuration from the environment when it is imported. Its printing and saving are switched off.
    settings: dict[str, Any] = {
        "ENABLE": 1,
        "DIR": folder,
        "EXP_NAME": "benchmark",
        "ENABLE_OUTPUT_FILE": 0,
        "ENABLE_OUTPUT_CONSOLE": 0,
        "GRAFTER_ENABLE": 1,
        "GRAFTER_ROLE": place.side,
        "GRAFTER_B2T_FILTER": b2t,
        "GRAFTER_MASTER_ADDRESS": _HOST,
        "GRAFTER_MASTER_PORT": port,
        "GRAFTER_BASELINE_WORLD_SIZE": place.baseline,
        "GRAFTER_TARGET_WORLD_SIZE": place.target,
        "GRAFTER_BACKEND": "gloo",
    }
    os.environ.update({f"DUMPER_{name}": str(value) for name, value in settings.items()})


def _graft(place: ReferencePlace, size: int, dtype: str, repeats: int) -> Times:
    dumper = importlib.import_module(_MODULE).dumper
    tap = functools.partial(dumper.dump, save=False)
    return graft_repeatedly(tap, dumper.step, place.side, place.rank, size, dtype, repeats)
