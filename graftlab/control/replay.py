"""Replay of recorded requests on both sides: which requests diverge, and at which tap first."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from graftlab.base.progress import LongWait
from graftlab.base.tags import display_tags
from graftlab.control.run import Run
from graftlab.diffs.measure import measure
from graftlab.errors import DumpError, RequestError, WaitInterrupted
from graftlab.ranks.remote_functions import Feed, feed_batches
from graftlab.requests.journal import SUFFIX
from graftlab.requests.loading import load_dump
from graftlab.requests.records import Dump, Opaque, RecordedRequest
from graftlab.verdict.order import require_floor

if TYPE_CHECKING:
    import pandas as pd

    from graftlab.control.core import SessionCore

logger = logging.getLogger(__name__)

COLUMNS = (
    *("rid", "index", "step", "status", "same_tokens", "first_divergent", "first_rel_l2", "final_difference"),
    *("baseline_as_recorded", "target_as_recorded", "error"),
)

# How a dump names a part of a request that it could not keep unchanged.
_LOST = re.compile(r"(?:the key of )?requests\[(\d+)\]\.request")
_KEPT_BY_ATTRIBUTES = "kept by its attributes"
_APART = (
    "not compared: the functions call gl.step(), and after another number of steps this batch begins in step "
    "{baseline} on the baseline and in step {target} on the target; leave the calls out"
)


@dataclass(frozen=True)
class SkippedRequest:
    """A recorded request that was not replayed, and why. ``index`` is its place among the requests read."""

    rid: str
    index: int
    reason: str


@dataclass(frozen=True)
class Replay:
    """The result of a replay. ``run`` is its run, each batch in a new step; ``skipped`` are the damaged requests."""

    run: Run
    summary: pd.DataFrame
    skipped: list[SkippedRequest]

    @property
    def frame(self) -> pd.DataFrame:
        """The rows, one per tap and receiving rank; the tag ``rid`` names the request, or those of the batch."""
        return self.run.frame

    def __repr__(self) -> str:
        counts = self.summary["status"].value_counts()
        facts = [f"{n} {status}" for status, n in counts.items()]
        if others := int(self.summary["same_tokens"].eq(False).sum()):
            facts.append(f"{others} with different tokens")
        if divergent := int(self.summary["first_divergent"].notna().sum()):
            facts.append(f"{divergent} with a divergent tap")
        return f"<Replay of {len(self.summary)} requests: {', '.join(facts)}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": f"{self!r}\n{self.summary}", "text/html": self.summary.to_html(max_rows=20)}


def replay(
    session: SessionCore,
    path: str | Path,
    baseline: Feed,
    target: Feed,
    *,
    batch_size: int = 1,
    limit: int | None = None,
    noise_floor: float | Literal["dtype"] = "dtype",
    trusted: bool = False,
) -> Replay:
    """See :meth:`graftlab.session.Session.replay`."""
    for name, value in (("batch_size", batch_size), ("limit", limit)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise RequestError(f"replay: {name} must be a whole number of at least 1, not {value!r}")
    if noise_floor != "dtype":
        require_floor(noise_floor)
    chosen = _read(Path(path), trusted)[:limit]
    skipped = [
        SkippedRequest(_rid(i, each.record), i, each.lost) for i, each in enumerate(chosen) if each.lost is not None
    ]
    for each in skipped:
        logger.warning("replay of %s: request %d (%s) is skipped: %s", path, each.index, each.rid, each.reason)
    good = [(index, each.record) for index, each in enumerate(chosen) if each.lost is None]
    if not good:
        why = "; ".join(f"{each.rid}: {each.reason}" for each in skipped)
        raise RequestError(f"{path} holds no request that can be replayed: {why or 'it is empty'}")
    batches = [good[start : start + batch_size] for start in range(0, len(good), batch_size)]
    names = [",".join(_rid(index, record) for index, record in batch) for batch in batches]
    requests = [[record.request for _, record in batch] for batch in batches]
    run = session.start(
        partial(feed_batches, baseline),
        partial(feed_batches, target),
        args=(list(zip(names, requests, strict=True)),),
    )

    def ended() -> int:
        # A step counts as ended when the next one begins, and none follows the last.
        return len(batches) if run.done and not run.failing else min(run.steps, len(batches) - 1)

    try:
        run.wait(bar=LongWait("replay", "batches", ended, total=len(batches), where=run.where))
    except KeyboardInterrupt:
        session.interrupt()
        raise WaitInterrupted(
            f"the replay was stopped after {run.steps} of {len(batches)} batches, and its code on the "
            "ranks was interrupted; session.runs[-1].frame has the rows until then"
        ) from None
    summary = _summary(run, batches, noise_floor)
    return Replay(run, _with_skipped(summary, skipped), skipped)


@dataclass(frozen=True)
class _RequestAsRead:
    """A recorded request, and the reason if it cannot be replayed."""

    record: RecordedRequest
    lost: str | None


def _read(path: Path, trusted: bool) -> list[_RequestAsRead]:
    """The requests of a file, or of all files in a folder, sorted by name and so by time."""
    if not path.is_dir():
        return _read_file(path, trusted)
    whole = sorted(file for file in path.glob("*.pkl") if not file.name.startswith("."))
    files = [*whole, *sorted(path.glob(f"*{SUFFIX}"))]
    if not files:
        raise DumpError(
            f"there are no recorded requests in the folder {path}: no file in it ends in .pkl or {SUFFIX}. A dumper "
            "writes a file when its threshold is reached, and at flush() and close()"
        )
    names = {file.name for file in files}
    return [each for file in files for each in _read_file(file, trusted, names)]


def _read_file(path: Path, trusted: bool, names: Collection[str] = ()) -> list[_RequestAsRead]:
    """The requests of a file. Of a crash dump, those that another of these files also has are left out."""
    try:
        dump = load_dump(path, trusted)
    except OSError as error:
        raise DumpError(f"{path} cannot be read: {error.strerror or error}") from error
    except DumpError as error:
        if not error.requests:
            raise
        logger.warning("%s; these are replayed", error)
        return [_RequestAsRead(record, _damage(record)) for record in error.requests]
    lost = _lost(dump)
    marks = _marks(dump)
    return [
        _RequestAsRead(record, lost.get(index) or _damage(record))
        for index, record in enumerate(dump["requests"])
        if not names or Path(marks.get(index, "")).name not in names
    ]


def _marks(dump: Dump) -> dict[int, str]:
    """For a crash dump: the other file that has each request, by the request's number."""
    crash = dump.get("crash")
    marks = crash.get("marks") if isinstance(crash, dict) else None
    found = enumerate(marks) if isinstance(marks, list) else ()
    return {index: mark for index, mark in found if isinstance(mark, str)}


def _lost(dump: Dump) -> dict[int, str]:
    """The requests that the file could not keep unchanged, and why."""
    found: dict[int, str] = {}
    for dropped in dump["dropped"]:
        match = _LOST.match(str(dropped["where"]))
        if match is not None and not str(dropped["reason"]).startswith(_KEPT_BY_ATTRIBUTES):
            found.setdefault(
                int(match[1]), f"{dropped['where']} was not kept when it was recorded: {dropped['reason']}"
            )
    return found


def _damage(record: RecordedRequest) -> str | None:
    request = record.request
    fields = request.state if isinstance(request, Opaque) else request
    if isinstance(fields, Mapping) or hasattr(fields, "__dict__") or hasattr(fields, "__dataclass_fields__"):
        return None
    return f"a request has named fields, and this is a {type(request).__name__}"


def _rid(index: int, record: RecordedRequest) -> str:
    return record.rid or f"#{index}"


# ---- the summary ----------------------------------------------------------------------------------------------------


def _summary(
    run: Run, batches: list[list[tuple[int, RecordedRequest]]], noise_floor: float | Literal["dtype"]
) -> list[dict[str, Any]]:
    from graftlab.plots import first_divergent
    from graftlab.verdict.summary import distances

    # Every rank of a side gets every request, so the first rank stands for its side.
    answers = {"baseline": run.baseline[0], "target": run.target[0]}
    began = {
        side: [run.first_step + number if fed.step is None else fed.step for number, fed in enumerate(each)]
        for side, each in answers.items()
    }
    of_batch = _rows_by_batch(run.frame, began)
    lines = []
    for number, batch in enumerate(batches):
        rows = of_batch.get(number)
        sides = {side: each[number] for side, each in answers.items()}
        errors = [f"{side}: {fed.error}" for side, fed in sides.items() if fed.error is not None]
        steps = {side: each[number] for side, each in began.items()}
        apart = "" if len({*steps.values()}) == 1 else _APART.format(**steps)
        names = [_rid(*each) for each in batch]
        for position, (index, record) in enumerate(batch):
            own = None if rows is None else _of_request(rows, names[position], names)
            suspect = None if own is None else first_divergent(own, noise_floor=noise_floor)
            ours, theirs = (fed.outputs[position] for fed in sides.values())
            recorded = _tokens(record.response)
            lines.append(
                {
                    "rid": _rid(index, record),
                    "index": index,
                    "step": steps["baseline"],
                    "status": "failed" if errors else "replayed",
                    "same_tokens": _same(_tokens(ours), _tokens(theirs)),
                    "first_divergent": None if suspect is None else _tap(suspect),
                    "first_rel_l2": math.nan if suspect is None else distances(suspect.to_frame().T)[0],
                    "final_difference": _final_difference(ours, theirs, own),
                    "baseline_as_recorded": _same(_tokens(ours), recorded),
                    "target_as_recorded": _same(_tokens(theirs), recorded),
                    "error": "\n".join([*errors, apart] if apart else errors) or None,
                }
            )
    return lines


def _rows_by_batch(frame: pd.DataFrame, began: Mapping[str, Sequence[int]]) -> dict[Any, pd.DataFrame]:
    """The rows of each batch, by its number. ``began`` has the step in which each batch began, by side."""
    numbers = np.zeros(len(frame), dtype=int)
    for side, steps in began.items():
        own = (frame["side"] == side).to_numpy()
        numbers[own] = np.searchsorted(steps, frame["step"].to_numpy()[own], side="right") - 1
    return dict(iter(frame.groupby(numbers)))


def _of_request(rows: pd.DataFrame, rid: str, batch: Sequence[str]) -> pd.DataFrame:
    """The rows of a batch without those whose tag ``rid`` names another of its requests alone."""
    others = {*batch} - {rid}
    return rows[[tags.get("rid") not in others for tags in rows["tags"]]]


def _with_skipped(lines: list[dict[str, Any]], skipped: Sequence[SkippedRequest]) -> pd.DataFrame:
    import pandas as pd

    lines = [
        *lines,
        *({"rid": s.rid, "index": s.index, "status": "skipped", "error": s.reason} for s in skipped),
    ]
    frame = pd.DataFrame(lines, columns=list(COLUMNS)).astype({"index": "Int64", "step": "Int64"})
    frame[["first_rel_l2", "final_difference"]] = frame[["first_rel_l2", "final_difference"]].astype("float64")
    return frame.iloc[sorted(range(len(frame)), key=lambda i: _sort_key(lines[i]))].reset_index(drop=True)


def _sort_key(line: dict[str, Any]) -> tuple[Any, ...]:
    """A sort key, worst first: failures, then differing tokens, then the largest difference; skipped requests last."""
    difference = line.get("final_difference", math.nan)
    return (
        {"failed": 0, "replayed": 1, "skipped": 2}[line["status"]],
        line.get("same_tokens") is not False,
        math.isnan(difference),
        # NaN is in no order.
        0.0 if math.isnan(difference) else -difference,
        line.get("first_divergent") is None,
        line["index"],
    )


def _tap(row: Any) -> str:
    # The summary has a column for the request's id.
    given = {tag: value for tag, value in display_tags(row["tags"]).items() if tag != "rid"}
    return str(row["name"]) + (f" ({', '.join(f'{k}={v}' for k, v in given.items())})" if given else "")


def _tokens(output: Any) -> list[Any] | str | None:
    """The tokens, or else the text, of an output in one of the common forms."""
    if isinstance(output, Mapping):
        for key in ("output_ids", "token_ids", "text"):
            if output.get(key) is not None:
                return _tokens(output[key])
        return None
    if isinstance(output, torch.Tensor):
        return None if output.is_floating_point() or output.is_complex() else output.flatten().tolist()
    if isinstance(output, np.ndarray):
        return output.flatten().tolist() if output.dtype.kind in "biu" else None
    if isinstance(output, (list, tuple)) and all(isinstance(item, (int, np.integer)) for item in output):
        return [int(item) for item in output]
    return output if isinstance(output, str) else None


def _same(one: Any, other: Any) -> bool | None:
    if one is None or other is None or isinstance(one, str) != isinstance(other, str):
        return None
    return bool(one == other)


def _final_difference(ours: Any, theirs: Any, rows: Any) -> float:
    """``rel_l2`` of the returned logits if there are any, else of the last measured tap.

    Infinite where values that are not finite differ.
    """
    from graftlab.verdict.summary import distances

    x, y = (each.get("logits") if isinstance(each, Mapping) else each for each in (ours, theirs))
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) and x.shape == y.shape and x.is_floating_point():
        stats = measure(x, y)
        return math.inf if stats.nonfinite_differ else stats.rel_l2
    measured = None if rows is None else rows[~np.isnan(distances(rows))]
    if measured is None or not len(measured):
        return math.nan
    # Orders count within a step.
    last = measured[measured["step"] == measured["step"].max()]
    last = last[last["order"] == last["order"].max()]
    return float(distances(last).max())
