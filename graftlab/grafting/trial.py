"""A trial of a transform's draft: runs it once on a kept pair, and reports the result."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graftlab.diffs.measure import DiffStats, measure
from graftlab.errors import TransformError
from graftlab.grafting.kept import KeptPair
from graftlab.plan.plan import GraftPlan, filters_of, first_for
from graftlab.transforms import TransformSpec, compare, dtype_name, run_transform, user_traceback
from graftlab.transforms.spec import Specs, each_of

# A draft may print megabytes, or raise an error as long. A reader has no use for more than this.
PRINTED_LIMIT = 10_000


@dataclass(frozen=True)
class Trial:
    """The result of trying a draft. If ``error`` is None, it can be applied.

    ``received``, ``target`` and ``result`` are shapes and dtypes as text. ``before`` compares the target with the
    result of the transform in force when the pair was kept (None if it failed), ``after`` with the draft's result;
    ``cast`` describes conversions for that. ``seconds`` is the draft's run time. ``error_line`` is the line of the
    draft's source with the error, from 1. ``note`` says if the plan would not apply the draft at this tap.
    """

    tags: dict[str, Any] = field(default_factory=dict)
    received: list[str] = field(default_factory=list)
    target: str | None = None
    result: str | None = None
    before: DiffStats | None = None
    after: DiffStats | None = None
    cast: str | None = None
    seconds: float | None = None
    printed: str = ""
    error: str | None = None
    error_line: int | None = None
    note: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


class _BoundedText(io.TextIOBase):
    """Keeps the first characters written, and counts the rest."""

    def __init__(self) -> None:
        self.text, self.dropped = "", 0

    def write(self, text: str) -> int:
        kept = text[: PRINTED_LIMIT - len(self.text)]
        self.text += kept
        self.dropped += len(text) - len(kept)
        return len(text)

    def shown(self) -> str:
        return self.text + (f"\n... and {self.dropped} more characters" if self.dropped else "")


def try_draft(drafts: Specs, kept: KeptPair | None, device: str, plan: GraftPlan | None = None) -> Trial:
    """Load the draft and, given a pair, run it once. Errors of the draft are in the result.

    From several drafts, the first that matches the pair's tap runs; without a pair, all are loaded. ``plan`` decides
    whether the tap is grafted; without a plan it is.
    """
    specs = each_of(drafts)
    if kept is None:
        trials = [_try_one(spec, None, device, None) for spec in specs]
        return next((trial for trial in trials if not trial.ok), trials[-1])
    which = first_for(filters_of(specs), kept.tags, plan is None or plan.action_for(kept.tags).graft)
    if which is not None:
        return _try_one(specs[which], kept, device, None)
    if len(specs) > 1:
        where = "; ".join(spec.described for spec in specs)
        return replace(_described(kept), error=f"none of these transforms matches this tap: {where}")
    if specs[0].where is None:
        note = "the plan does not graft this tap, so it would not be applied here; give it a filter that matches"
    else:
        note = "its filter does not match this tap, so it would not be applied here"
    return _try_one(specs[0], kept, device, note)


def _try_one(draft: TransformSpec, kept: KeptPair | None, device: str, note: str | None) -> Trial:
    trial = Trial()
    printed = _BoundedText()
    try:
        if kept is not None:
            trial = _described(kept)
        with _shown_in(printed):
            transform = draft.load()
        if kept is not None:
            graft_input = replace(
                kept.graft_input,
                target=kept.graft_input.target.to(device),
                received_list=[tensor.to(device) for tensor in kept.graft_input.received_list],
            )
            began = time.perf_counter()
            with _shown_in(printed):
                outcome = run_transform(transform, graft_input)
            trial = replace(trial, seconds=time.perf_counter() - began)
            trial = replace(
                trial, result=_in_words(outcome.value), after=compare(outcome, graft_input), cast=outcome.cast
            )
    except (Exception, SystemExit) as error:
        called_exit = f"the draft called exit({error.code!r})\n" if isinstance(error, SystemExit) else ""
        trial = replace(trial, error=_cut(called_exit + user_traceback(error)), error_line=_line_of(error, draft))
    return replace(trial, printed=printed.shown(), note=note)


@contextlib.contextmanager
def _shown_in(printed: _BoundedText) -> Iterator[None]:
    """Capture the draft's output, but not graftlab's own messages, such as that about a missing kernel."""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield


def _cut(text: str) -> str:
    """Cut the middle of a long text, because the ends of a traceback matter most."""
    dropped = len(text) - PRINTED_LIMIT
    if dropped <= 0:
        return text
    half = PRINTED_LIMIT // 2
    return f"{text[:half]}\n... {dropped} more characters ...\n{text[-half:]}"


def _described(kept: KeptPair) -> Trial:
    return Trial(
        tags=kept.tags,
        received=[_in_words(tensor) for tensor in kept.graft_input.received_list],
        target=_in_words(kept.graft_input.target),
        before=None if kept.baseline is None or kept.target is None else measure(kept.baseline, kept.target),
    )


def _in_words(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"


def _line_of(error: BaseException, draft: TransformSpec) -> int | None:
    """Return the line of the draft's source in which the error occurred."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, SyntaxError):
            return cause.lineno
        lines = [
            frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == draft.filename
        ]
        if lines:
            return lines[-1]
        cause = cause.__cause__ if isinstance(cause, TransformError) else None
    return None
