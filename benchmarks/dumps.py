"""The cost for a serving thread of recording a request: pickling, writing the journal, and queueing."""

from __future__ import annotations

import time

from benchmarks.lines import Line, Setup, Spread
from graftlab.requests import RequestDumper

_OUTPUT_TOKENS = 256


def measure(setup: Setup) -> list[Line]:
    dumper = RequestDumper(setup.folder / "dumps", threshold=1_000_000, crash_folder=setup.folder / "crash")
    try:
        taken = [_add(dumper, number) for number in range(setup.repeats(2000) + 50)][50:]
    finally:
        dumper.close()
    return [
        Line("dumps", f"RequestDumper.add, {_OUTPUT_TOKENS} output tokens, journal included", "s", Spread.of(taken))
    ]


def _add(dumper: RequestDumper, number: int) -> float:
    request = {"rid": f"req-{number}", "input_ids": list(range(128)), "max_new_tokens": _OUTPUT_TOKENS}
    response = {
        "output_ids": list(range(_OUTPUT_TOKENS)),
        "text": "word " * _OUTPUT_TOKENS,
        "meta_info": {"id": number},
    }
    began = time.perf_counter()
    acknowledged = dumper.add(request, response, 1.0, 2.0)
    taken = time.perf_counter() - began
    if not acknowledged:
        raise RuntimeError(f"request {number} was not acknowledged")
    return taken
