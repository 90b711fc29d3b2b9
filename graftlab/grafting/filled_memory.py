"""Finds memory that code reads before writing it, as after ``torch.empty``: its results are right only by chance.

Such memory often has zeros, or the last call's values, so that two runs agree. A run in which torch fills new memory
with NaN, or the largest whole number, shows what depends on it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.deterministic

from graftlab.diffs.results import named_tensors
from graftlab.grafting.self_graft import RepeatComparer, changed_results, in_words
from graftlab.grafting.tap_records import SelfGraftRecorder
from graftlab.taps.routing import handled_by


@dataclass(frozen=True)
class Repetition:
    """The taps, in order, or else the results, that differ when a call is repeated, and when memory is filled.

    ``unwritten`` is empty if ``differing`` is not, and for compiled code, which would be compiled anew.
    """

    differing: list[str]
    unwritten: list[str]


def repeat_with_filled_memory(call: Callable[[], Any], *, budget: int) -> Repetition:
    """Run ``call`` twice without changes, and once more with new memory filled.

    Taps that do not fit into ``budget`` bytes are not compared.
    """
    record = SelfGraftRecorder(budget)
    with handled_by(record):
        result = {path: value.detach().clone() for path, value in named_tensors(call()).items()}

    def differences() -> list[str]:
        repeat = RepeatComparer(record.taps)
        with handled_by(repeat):
            again = call()
        return repeat.differences() or in_words(changed_results(result, again))

    differing = differences()
    if differing or has_compiled():
        return Repetition(differing, [])
    try:
        with _filled():
            return Repetition([], differences())
    except Exception as error:
        return Repetition([], [f"the call itself, which fails with {type(error).__name__}"])


def has_compiled() -> bool:
    """Whether this process has compiled code, which would be compiled anew under a mode of torch."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@contextmanager
def _filled() -> Iterator[None]:
    """Fill new memory, which torch does while it prefers deterministic algorithms."""
    memory: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode()
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Warnings of algorithms that are not deterministic.
        warnings.simplefilter("ignore")
        try:
            # Not use_deterministic_algorithms, which imports torch's compiler: seconds, and a hundred megabytes.
            torch.set_deterministic_debug_mode("warn")
            memory.fill_uninitialized_memory = True
            yield
        finally:
            torch.set_deterministic_debug_mode(before)
            memory.fill_uninitialized_memory = fills
