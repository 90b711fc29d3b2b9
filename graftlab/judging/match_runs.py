"""The runs of a match: both sides record their taps, then the target again with the matches grafted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from graftlab.base.progress import LongWait, report_progress
from graftlab.base.shipping import Packed
from graftlab.base.text import counted
from graftlab.base.world import Side
from graftlab.control.core import internals_of, lend_plan
from graftlab.control.pickles import open_value
from graftlab.control.run import state_of
from graftlab.control.work import arguments, pack_callees, refuse_invalid_expressions
from graftlab.errors import LayoutError, SessionError
from graftlab.judging.job_steps import JobSteps
from graftlab.judging.match_shards import with_shards
from graftlab.layouts import RankLayout
from graftlab.matching.output_parts import with_outputs_in_parts
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import BUDGET, RecordedTap
from graftlab.matching.rounds import INTERRUPTED, ROUNDS, match_in_rounds, match_once
from graftlab.matching.row_outputs import with_outputs_in_rows
from graftlab.plan.pairs import PairRule, TapCallName
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.match_recorder import MatchGraft, MatchRecord, forget_match, record_taps, recorded_value
from graftlab.ranks.messages import Acknowledgement, AskMatch, MatchResult, RecordStep
from graftlab.ranks.remote_functions import Callee

if TYPE_CHECKING:
    from typing_extensions import Self

    from graftlab.control.core import SessionCore

SENT = 1 << 28
"""Bytes of values that each rank sends at once. Of all others it sends sketches, and the values on request."""


def match(
    session: SessionCore,
    baseline: Callee | None = None,
    target: Callee | None = None,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    rounds: int = ROUNDS,
    budget: int = BUDGET,
    sent: int = SENT,
) -> Proposal:
    """See :meth:`graftlab.session.Session.match`."""
    if not (isinstance(rounds, int) and isinstance(budget, int)) or rounds < 0 or budget <= 0:
        raise SessionError(f"match: rounds must be at least 0 and budget above 0, not {rounds!r} and {budget!r}")
    given = arguments("match", args, kwargs)
    if not all(rank.takes_work for rank in session.ranks):
        if baseline is not None or target is not None or any(given):
            raise SessionError(
                "match: these ranks are jobs that another launcher started, and cannot be given code to run: "
                "baseline=, target=, args= and kwargs= are for a launched session. session.match() matches what the "
                "jobs do"
            )
        matching: _Match = _MatchedSteps(session, budget, sent)
    else:
        default = internals_of(session).default_callees
        baseline = default.get("baseline") if baseline is None else baseline
        target = default.get("target") if target is None else target
        for side, callee in (("baseline", baseline), ("target", target)):
            if not (isinstance(callee, str) or callable(callee)):
                raise SessionError(f"match: {side}= must be a function or an expression, not {type(callee).__name__}")
        assert baseline is not None
        assert target is not None
        refuse_invalid_expressions(baseline, target)
        matching = _MatchedRuns(session, baseline, target, *given, budget, sent)
    with matching:
        return matching.proposal(rounds)


class _Match:
    """One match in progress: what its ranks recorded, joined to taps of whole tensors. A context manager.

    ``varies`` says whether each record may be of another batch.
    """

    varies: ClassVar[bool] = False

    def __init__(self, session: SessionCore, budget: int, sent: int) -> None:
        self._session = session
        self._budget, self._sent = budget, sent
        self._runs = 0
        self._began = time.monotonic()
        self._notes: dict[str, None] = {}
        self._moved = 0
        self._order: dict[Side, tuple[str, ...]] = {}
        self._skipped: dict[Side, dict[str, str]] = {"baseline": {}, "target": {}}
        # Of the newest run: both sides' taps, and what each of the target's ranks recorded of those in which they
        # differ.
        self._baseline_taps: list[RecordedTap] = []
        self._target_taps: list[RecordedTap] = []
        self._parts: dict[str, Sequence[RecordedTap]] = {}
        # The target's weights that several ranks have alike.
        self._copies: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError

    def _record(self, grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        """See :data:`graftlab.matching.rounds.Record`."""
        raise NotImplementedError

    def _fetch(self, side: Side, name: str) -> Tensor | None:
        """Fetch a value that only a rank has."""
        raise NotImplementedError

    def _progress(self, grafts: Sequence[Pair] = ()) -> str:
        """The number of the run, how many of the target's taps have a partner, and the seconds so far.

        The total is unknown: each run decides whether another follows.
        """
        if not self._runs:
            return "run 1"
        paired = len({pair.target for pair in grafts})
        seconds = time.monotonic() - self._began
        return f"run {self._runs + 1}, {paired} of {counted(len(self._order['target']), 'tap')} paired, {seconds:.0f} s"

    def proposal(self, rounds: int) -> Proposal:
        fetch: dict[str, Any] = {
            "fetch_baseline": partial(self._fetch, "baseline"),
            "fetch_target": partial(self._fetch, "target"),
        }
        if rounds == 0:
            found = match_once(*self._record(()), **fetch)
        else:
            found = match_in_rounds(self._record, rounds, varies=self.varies, **fetch)
        for paired in (with_outputs_in_rows, with_outputs_in_parts):
            found = paired(found, self._baseline_taps, self._target_taps)
        has_parts = rounds > 0 and bool(self._parts) and len(self._session.select("baseline")) == 1
        if has_parts and not self.varies and INTERRUPTED not in found.notices:
            # In the run before, taps before these may have had no graft yet. Jobs may have no further step.
            try:
                self._record(tuple(pair for pair in found.pairs if pair.sureness != "guess"))
            except KeyboardInterrupt:
                found = replace(found, notices=(*found.notices, INTERRUPTED))
        same = _same_parts(found, self._copies)
        problems = (*found.problems, *same, *self._notes)
        found = replace(
            found,
            problems=problems,
            moved=self._moved,
            unmatched_baseline={**found.unmatched_baseline, **self._skipped["baseline"]},
            unmatched_target={**found.unmatched_target, **self._skipped["target"]},
            order=self._order,
            wrong_weights=(*found.wrong_weights, *same),
        )
        return with_shards(found, self._baseline_taps, self._parts) if has_parts else found

    def _in_order(
        self, baseline: list[RecordedTap], target: list[RecordedTap]
    ) -> tuple[list[RecordedTap], list[RecordedTap]]:
        self._baseline_taps, self._target_taps = baseline, target
        self._order = {"baseline": tuple(tap.name for tap in baseline), "target": tuple(tap.name for tap in target)}
        taps = f"{len(baseline)} and {counted(len(target), 'tap')}"
        report_progress(f"matching, the values of {taps} in run {self._runs}")
        return baseline, target

    # ---- ranks --------------------------------------------------------------------------------------------------

    def _whole_taps(self, ranks: Sequence[MatchRecord], side: Side) -> list[RecordedTap]:
        """Join the records of a side's ranks into taps of whole tensors."""
        for rank, records in enumerate(ranks):
            self._moved += sum(tap.value.nbytes for tap in records.taps if tap.value is not None)
            for note in records.notes:
                self._note(f"{side}[{rank}]: {note}" if len(ranks) > 1 else f"{side}: {note}")
        skipped = self._skipped[side]
        skipped.clear()
        if side == "target":
            self._parts.clear()
            self._copies.clear()
        layouts = {name: layout for records in reversed(ranks) for name, layout in records.layouts.items()}
        for records in reversed(ranks):
            skipped.update(records.skipped)
        if len(ranks) == 1 and not layouts:
            return ranks[0].taps
        by_name = [{tap.name: tap for tap in records.taps} for records in ranks]
        taps = []
        for tap in _in_one_order([records.taps for records in ranks]):
            held = [each[tap.name] for each in by_name if tap.name in each]
            joined = self._joined(tap, held, layouts.get(tap.name), len(ranks))
            if isinstance(joined, str):
                skipped[tap.name] = joined
                if side == "target" and tap.name not in layouts and len(held) == len(ranks):
                    self._parts[tap.name] = held
            else:
                taps.append(joined)
                if side == "target" and len(held) > 1 and tap.name not in layouts and tap.tags.get("kind") == "param":
                    self._copies.add(tap.name)
        return taps

    def _joined(
        self, tap: RecordedTap, held: Sequence[RecordedTap], layout: RankLayout | None, ranks: int
    ) -> RecordedTap | str:
        if layout is None:
            # A stage of a pipeline, or an expert of one rank, has its whole tensor where it runs.
            if all(each.shape == tap.shape and _alike(each, tap) for each in held):
                return tap
            return (
                "its ranks hold different tensors, and which part of the whole each has is not known: "
                "declare it with gl.tap(layout=...), or tap a DTensor"
            )
        if len(held) < ranks:
            return f"only {len(held)} of {ranks} ranks have it"
        values = [held[rank].value for rank in layout.layout.mesh.ranks if rank < len(held)]
        if len(values) < layout.layout.mesh.size or any(value is None for value in values):
            return f"its parts ({layout.layout}) were not all kept, so there is no whole tensor to match"
        try:
            whole = layout.layout.join([value for value in values if value is not None], layout.shape).whole
        except LayoutError as error:
            return str(error)
        made = RecordedTap.of(tap.name, whole, kind=tap.kind, order=tap.order)
        made.tags = tap.tags
        return made

    def _note(self, text: str) -> None:
        self._notes[text] = None


class _MatchedRuns(_Match):
    """Calls both sides' functions: the baseline once, since its record does not change, and the target once a round."""

    def __init__(
        self,
        session: SessionCore,
        baseline: Callee,
        target: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        budget: int,
        sent: int,
    ) -> None:
        super().__init__(session, budget, sent)
        [self._baseline] = pack_callees({"baseline": baseline}, args, kwargs)
        [self._target] = pack_callees({"target": target}, args, kwargs)
        self._recorded: list[RecordedTap] = []
        self._values: dict[str, Tensor] = {}
        self._grafted: dict[str, list[Pair]] = {}

    def __exit__(self, *_: object) -> None:
        if not self._session.closed and not any(not run.done for run in self._session.runs[-1:]):
            self._session.run(forget_match, forget_match)

    def _record(self, grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        """Run the target; the baseline runs once."""
        new, gone = self._changed(grafts)
        given = self._budget, self._sent
        ours = None if self._runs else partial(record_taps, self._baseline, *given, {}, None)
        # A match that was stopped may have left its grafts on the ranks.
        theirs = partial(record_taps, self._target, *given, Packed.of(new), gone if self._runs else None)
        title = f"matching, {self._progress(grafts)}"
        self._moved += sum(graft.value.nbytes for grafted in new.values() for graft in grafted)
        run = self._session.start(ours, theirs)
        try:
            run.wait(bar=LongWait(title, "taps", lambda: 0))
        except KeyboardInterrupt:
            self._session.interrupt()
            raise
        records = run.baseline, run.target
        state_of(run).forget_results()
        if not self._runs:
            self._recorded = self._whole_taps(records[0], "baseline")
            for tap in self._recorded:
                if tap.value is not None:
                    self._values[tap.name] = tap.value
        self._runs += 1
        return self._in_order(self._recorded, self._whole_taps(records[1], "target"))

    def _changed(self, grafts: Sequence[Pair]) -> tuple[dict[str, list[MatchGraft]], list[str]]:
        """The grafts to add for the next run, and the target's taps to graft no longer."""
        wanted: dict[str, list[Pair]] = {}
        for pair in grafts:
            wanted.setdefault(pair.target, []).append(pair)
        new: dict[str, list[MatchGraft]] = {}
        for name, pairs in wanted.items():
            if self._grafted.get(name) == pairs:
                continue
            made = [
                MatchGraft(pair.layout, pair.whole, value) for pair in pairs if (value := self._value(pair)) is not None
            ]
            if made:
                new[name] = made
        gone = [name for name in self._grafted if name not in wanted]
        self._grafted = wanted
        return new, gone

    def _value(self, pair: Pair) -> Tensor | None:
        found = self._values.get(pair.baseline)
        if found is None:
            found = self._fetch("baseline", pair.baseline)
            if found is not None:
                self._values[pair.baseline] = found
        if found is None:
            self._note(f"{pair.baseline} was not kept, so {pair.target} was not grafted to match the taps after it")
        return found

    def _fetch(self, side: Side, name: str) -> Tensor | None:
        work: dict[str, Any] = {side: partial(recorded_value, name)}
        run = self._session.run(**work)
        values: list[Tensor | None] = run.baseline if side == "baseline" else run.target
        # Runs of a session keep their results, and together these may be as large as the model.
        state_of(run).forget_results()
        self._moved += sum(value.nbytes for value in values if value is not None)
        return next((value for value in values if value is not None), None)


class _MatchedSteps(_Match):
    """Records steps that jobs make anyway, both sides in each. Pairs are grafted by a plan, as the jobs' own are.

    The data may differ from step to step, and grafted state stays in the target.
    """

    varies = True

    def __init__(self, session: SessionCore, budget: int, sent: int) -> None:
        super().__init__(session, budget, sent)
        self._jobs = JobSteps(session, "matching", "A match takes two steps of the jobs for each of its rounds")

    def __enter__(self) -> Self:
        self._jobs.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._jobs.__exit__(*error)

    def _record(self, grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        version = self._session.plan.version + 1
        rules = tuple(
            PairRule(_call(pair.baseline), _call(pair.target), pair.layout.text, pair.whole, pair.sureness)
            for pair in grafts
        )
        for rank in self._session.ranks:
            names = {TapCallName.of(rule.name(rank.place.side)).name for rule in rules}
            order = RecordStep(version, tuple(sorted(names)), self._budget, self._sent)
            self._jobs.ask(rank, order, Acknowledgement)
        plan = lend_plan(
            self._session,
            pairs=rules,
            b2t=_GRAFTED if rules else "False",
            t2b=None,
            compare=None,
            keep=None,
            transform=None,
        )
        why = self._progress(grafts)
        if plan.version != version or self._jobs.after(why, version, 1) is None:
            raise SessionError("match: the plan was edited during the match. Do not edit it until the match is done")
        self._runs += 1
        return self._in_order(*(self._whole_taps(self._records(side), side) for side in ("baseline", "target")))

    def _records(self, side: Side) -> list[MatchRecord]:
        records = []
        for rank in self._session.select(side):
            record = self._recorded_on(rank, None)
            if not isinstance(record, MatchRecord):
                raise SessionError(f"match: {rank.label} recorded nothing in this step; its log has the reason")
            records.append(record)
        return records

    def _fetch(self, side: Side, name: str) -> Tensor | None:
        ranks = self._session.select(side)
        value: Tensor | None = next(
            (each for rank in ranks if (each := self._recorded_on(rank, name)) is not None), None
        )
        self._moved += 0 if value is None else value.nbytes
        return value

    def _recorded_on(self, rank: RankHandle, value: str | None) -> Any:
        packed = self._jobs.ask(rank, AskMatch(value), MatchResult).packed
        return None if packed is None else open_value(rank, packed)


# Weights and optimizer state are not grafted, because that could not be undone.
_GRAFTED = "not (kind == 'param' or kind == 'optimizer')"


def _call(name: str) -> str:
    """The name of one call in a pair. Without its occurrence it would stand for all calls."""
    return name if "#" in name else f"{name}#0"


def _same_parts(found: Proposal, copies: Collection[str]) -> list[str]:
    """Sentences on weights whose one part all ranks of the target have, while none has the rest."""
    places = Counter(pair.baseline for pair in found.pairs)
    return [
        f"All ranks of the target have the same part of {TapCallName.of(pair.baseline).name} in "
        f"{TapCallName.of(pair.target).name}, and none has the rest"
        for pair in found.pairs
        if pair.target in copies and pair.whole == "baseline" and pair.layout.leaves_out and places[pair.baseline] == 1
    ]


def _in_one_order(ranks: Sequence[Sequence[RecordedTap]]) -> list[RecordedTap]:
    """The taps of all ranks, each once: those of the first rank, and where others run between or after them."""
    merged = list(ranks[0])
    for taps in ranks[1:]:
        names = {tap.name for tap in merged}
        last = max((at for at, tap in enumerate(taps) if tap.name in names), default=-1)
        before: list[RecordedTap] = []
        for at, tap in enumerate(taps):
            if tap.name in names:
                if before:
                    place = next(n for n, each in enumerate(merged) if each.name == tap.name)
                    merged[place:place] = before
                    before = []
            elif at > last:
                merged.append(tap)
            else:
                before.append(tap)
    for place, tap in enumerate(merged):
        tap.order = place
    return merged


def _alike(one: RecordedTap, other: RecordedTap) -> bool:
    """Whether two ranks hold the same tensor, judged by their sketches."""
    mine, theirs = (torch.from_numpy(each.sketch.extremes.copy()) for each in (one, other))
    return mine.shape == theirs.shape and bool(torch.allclose(mine, theirs, rtol=1e-5, atol=0, equal_nan=True))
