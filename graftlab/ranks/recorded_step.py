"""A held call or update that a process can make only once. Its record is a file, which the rank's next process reads.

The notebook sends these functions to ranks by their names. See :mod:`graftlab.grafting.self_graft`, which does all of
this in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftlab.base.tap_groups import group_of
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import (
    RepeatComparer,
    SelfGraft,
    SelfGrafter,
    changed_results,
    in_words,
    note_returned,
    of_paired_names,
)
from graftlab.grafting.tap_records import CallKey, SelfGraftRecorder, TapRecord
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.holding import repeat_call
from graftlab.taps.calls import here
from graftlab.taps.routing import handled_by


@dataclass(frozen=True)
class RecordSummary:
    """A rank's report of its record: the taps' names, in order, and the tensors that the step returned."""

    taps: tuple[str, ...]
    results: dict[str, torch.Tensor]
    skipped: tuple[str, ...]
    not_recorded: int


def record_step(folder: str, budget: int) -> RecordSummary:
    """Make the step, and write a record of at most ``budget`` bytes of its taps into this folder."""
    recorder = SelfGraftRecorder(budget)
    with handled_by(recorder):
        returned = repeat_call()
    results = {path: tensor.detach().to("cpu", copy=True) for path, tensor in returned.items()}
    try:
        torch.save((recorder.taps, results), _file(folder))
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as a RuntimeError about its archive.
        _file(folder).unlink(missing_ok=True)
        reason = str(error).partition("\n")[0]
        raise SessionError(
            f"the record of the step, which is compared with another start of the script, cannot be written to "
            f"{_file(folder)}: {reason}; make room there, or set GRAFTLAB_HOME to another disk"
        ) from error
    names = dict.fromkeys(place[0] for place in recorder.taps)
    return RecordSummary(tuple(names), results, tuple(recorder.skipped), recorder.not_recorded)


def compare_with_record(folder: str) -> list[str]:
    """Make the step; returns the taps, in order, or the results, that differ from the record."""
    taps, results = _read(folder)
    repeat = RepeatComparer(taps)
    with handled_by(repeat):
        again = repeat_call()
    on_cpu = {path: tensor.detach().cpu() for path, tensor in again.items()}
    return repeat.differences() or in_words(changed_results(results, on_cpu))


def graft_record(
    folder: str, dtypes: Mapping[str, str] | None, plan: GraftPlan, keep: Sequence[str], *, resets: bool
) -> SelfGraft:
    """Make the step with each tap moved by one rounding, and with ``resets`` overwritten by its record.

    ``dtypes``, ``plan`` and ``keep`` are as for :func:`graftlab.ranks.remote_functions.graft_baseline_into_itself`.
    """
    taps, results = _read(folder)
    names = partial(plan.paired_names, "baseline")
    found = SelfGraft()
    for recorded in taps.values():
        groups = (group_of(name, recorded.tags) for name in names(recorded.place[0]))
        found.last.update({group: recorded.value.cpu() for group in groups if group in keep})
    grafter = SelfGrafter(taps, of_paired_names(dtypes, names), int(not resets), resets=resets)
    with handled_by(grafter):
        again = repeat_call()
    if resets:
        found.added = grafter.rows
    else:
        found.outputs = grafter.rows
        note_returned(found, results, {path: tensor.detach().cpu() for path, tensor in again.items()})
    return found


def _file(folder: str) -> Path:
    me = here()
    assert me is not None
    return Path(folder) / f"{me.side}-{me.rank}.pt"


def _read(folder: str) -> tuple[dict[CallKey, TapRecord], dict[str, torch.Tensor]]:
    # The rank's own file, in its session's folder: tensors of any device and dtype, with their tags.
    read: Any = torch.load(_file(folder), weights_only=False)
    taps, results = read
    return taps, results
