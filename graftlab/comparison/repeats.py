"""The runs of a comparison: repetitions of the call that each rank holds, in float32 too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from graftlab.base.tap_groups import kind_of
from graftlab.base.tensor_bytes import as_bytes
from graftlab.base.text import counted
from graftlab.base.world import Side
from graftlab.control.run import Run
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR, roundoff
from graftlab.errors import GraftError, SessionError
from graftlab.judging.judge import judge
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import WEIGHT, HeldCall
from graftlab.ranks.holding import OfCall, repeat_call, widen_call, widen_operators
from graftlab.ranks.remote_functions import call_until_exception
from graftlab.ranks.stored_numbers import samples_of
from graftlab.ranks.widening import NARROW

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal
    from graftlab.session import Session

_NEAR = 0.1
"""Tensors further apart than this (rel_l2) are not the same to rounding."""


class NoCloserLookError(GraftError):
    """Why calls are not judged in more bits."""


@dataclass(frozen=True)
class JudgingChoice:
    """How held calls are judged: the arguments of the same names of :meth:`graftlab.Session.verdict`.

    ``match`` chooses whether taps are paired by value; None means only if their names do not pair, and with
    ``match_trained`` also if each side trains weights that the other has no name for.
    """

    match: bool | None = None
    output: str | None = None
    floor: float | Literal["auto"] = "auto"
    threshold: float = 5.0
    match_trained: bool = False


class Repeats:
    """Makes the runs of a judgement by repeating the ranks' held calls.

    ``in_place`` says that the ranks can repeat what they hold by themselves.
    """

    in_place = True

    def __init__(self, session: Session) -> None:
        self.session = session

    def _both(self, method: Callable[[HeldCall], object]) -> Run:
        """Call this method of the call that each rank holds."""
        return self.session.run(OfCall(method), OfCall(method))

    def match(self) -> Proposal:
        """Pair the taps by value. Raises :class:`MatchError`."""
        # A call that reaches some taps before its exception can still be paired.
        until_exception = partial(call_until_exception, repeat_call)
        return self.session.match(until_exception, until_exception)

    def unfit_taps(self) -> set[str]:
        """The baseline's taps whose pairs, which are in force, have a layout that does not fit this call."""
        frame = self.session.run(repeat_call, repeat_call).frame
        return set(frame.loc[frame["status"] == "failed", "name"])

    def have_other_parts(self) -> bool:
        """Whether the target's ranks have other parts of a weight of equal name than follow from their numbers.

        As where each has its q, k and v of a fused one.
        """
        frame = self.session.run(repeat_call, repeat_call).frame
        cut = frame[frame["aligned_by"].astype(str).str.startswith("slice") & (frame["status"] == "compared")]
        is_weight = [kind_of(tags) == "param" for tags in cut["tags"]]
        return bool((cut["rel_l2"] > _NEAR)[is_weight].any())

    def add_backward(self) -> str | None:
        """Include a backward pass in each run; returns the reason if that fails."""
        run = self._both(HeldCall.try_backward)
        failed = [each for each in (*run.baseline, *run.target) if each is not None]
        if failed:
            self._both(HeldCall.drop_backward)
            return str(failed[0])
        return None

    def verdict(
        self, choice: JudgingChoice, *, explain: bool | Literal["lines"] = True, gradient_parts: bool = False
    ) -> Verdict:
        """Judge these runs. ``gradient_parts`` says that the script may add up gradients over its ranks afterwards."""
        request = VerdictRequest(
            repeat_call,
            repeat_call,
            output=choice.output if explain is True else None,
            floor=choice.floor,
            threshold=choice.threshold,
            explain=explain,
            gradient_parts=gradient_parts,
        )
        return judge(self.session, request)

    def note_equal(self) -> None:
        """Note that these calls are bit-equal, so that what they write is, too."""
        self._both(HeldCall.note_equal)

    def in_float32(
        self, choice: JudgingChoice, *, is_first: bool, rounded_otherwise: Collection[str] = (), explain: bool = True
    ) -> Verdict:
        """Judge these runs in float32.

        Calls whose numbers of 16 bits are out of reach, as in a function that makes its model, run in float64, operator
        by operator. Earlier calls may have rounded this call's inputs, such as a cache, differently, so the target
        reads the baseline's. Unless the call ``is_first``, a target's tensor without a partner counts as such an input,
        if earlier calls may have written it. It is read as they would have left it in float32, where both sides know
        all of their state. The target's weights and buffers ``rounded_otherwise`` are moved by a few roundings, and so
        is the state that earlier calls have computed with them.

        Raises :class:`NoCloserLookError` if the numbers of both sides do not pair, or the calls round even then, and
        :class:`SessionError` if the calls cannot run in float32.
        """
        read = self._both(HeldCall.numbers)
        if len(read.baseline) not in (1, len(read.target)):
            ranks = counted(len(read.baseline), "rank")
            raise NoCloserLookError(f"the baseline has {ranks}, and the target {len(read.target)}")
        partners = read.baseline * len(read.target) if len(read.baseline) == 1 else read.baseline
        unequal = [_unequal_numbers(*each, is_first) for each in zip(partners, read.target, strict=True)]
        kept_of_baseline: Collection[str] = ()
        kept_of_target: Collection[str] = ()
        if any(isinstance(each, str) for each in unequal):
            known = self._both(HeldCall.known_state)
            kept_of_baseline, kept_of_target = _kept(read, known)
            excused = [{*each.unchanged, *kept_of_target} for each in known.target]
            each_side = zip(partners, read.target, excused, strict=True)
            unequal = [_unequal_numbers(one, other, is_first, may) for one, other, may in each_side]
        for each in unequal:
            if isinstance(each, str):
                raise NoCloserLookError(each)
        numbers = [each for each in unequal if not isinstance(each, str)]
        has = self._both(HeldCall.dtypes)
        baseline, target = has.baseline[0], has.target[0]
        ours = dtypes_to_round(baseline, target, partial(self._partners, "baseline"))
        theirs = dtypes_to_round(target, baseline, partial(self._partners, "target"))
        if ours is None or theirs is None:
            raise NoCloserLookError("weights of the two sides have different names and several dtypes")
        try:
            with tempfile.TemporaryDirectory(prefix="graftlab-", dir=self.session.folder) as folder:
                every = len(self.session.ranks)
                nothing: list[dict[str, Tensor]] = [{}] * len(read.baseline)
                moved = {each for path in rounded_otherwise for each in (path, path + WEIGHT)}
                moved |= {*kept_of_target} if moved else set()
                run = self.session.run(
                    partial(widen_call, nothing, ours, f"{folder}/baseline", every, kept=kept_of_baseline),
                    partial(widen_call, numbers, theirs, f"{folder}/target", every, kept_of_target, moved),
                )
            failure = _failure(run)
            if failure is None:
                return self.verdict(choice, explain=explain)
            self._both(HeldCall.narrow)
            # A rank whose operators cannot run in float64 would keep the others waiting.
            if len(self.session.ranks) > 2:
                raise SessionError(failure)
            run = self.session.run(
                partial(widen_operators, nothing[0], ours, kept_of_baseline),
                partial(widen_operators, numbers[0], theirs, kept_of_target, moved),
            )
            if _failure(run) is not None:
                raise SessionError(failure)
            # Writes into the call's own tensors still round to float32.
            floor = DEFAULT_NOISE_FLOOR if choice.floor == "auto" else choice.floor
            return self._with_operators_in_float64(replace(choice, floor=floor), explain)
        finally:
            if not self.session.closed:
                self._both(HeldCall.narrow)

    def in_float64(self, choice: JudgingChoice) -> Verdict:
        """Judge these runs with operators that compute in float64, over a floor of one rounding to float32, as weights
        and writes into the calls' tensors have.

        Raises :class:`SessionError` if the calls cannot run so, or have several ranks.
        """
        if len(self.session.ranks) > 2:
            raise SessionError("a rank whose operators cannot run in float64 would keep the others waiting")
        try:
            failure = _failure(self._both(partial(HeldCall.widen_operators, stored=True)))
            if failure is not None:
                raise SessionError(failure)
            return self._with_operators_in_float64(replace(choice, floor=roundoff("float32")), explain=False)
        finally:
            if not self.session.closed:
                self._both(HeldCall.narrow)

    def _with_operators_in_float64(self, choice: JudgingChoice, explain: bool) -> Verdict:
        verdict = self.verdict(choice, explain=explain)
        # What rounds even then would be taken for a mistake.
        run = self._both(HeldCall.left_in_16_bits)
        if left := sorted({dtype for each in (*run.baseline, *run.target) for dtype in each}):
            raise NoCloserLookError(f"writes into its tensors round to {' and '.join(left)} even then")
        return replace(verdict, findings=replace(verdict.findings, looked_in="float64"))

    def state_in_16_bits(self) -> dict[str, torch.dtype]:
        """The state that both sides' calls may read, one in 16 bits and the other in float32, by path.

        Nothing if there is such a weight, too.
        """
        has = self._both(HeldCall.dtypes)
        found = {}
        for path, one in has.baseline[0].items():
            dtypes = {one, has.target[0].get(path)}
            narrow = dtypes & {*NARROW}
            if torch.float32 in dtypes and narrow:
                (found[path],) = narrow
        return {} if any(path.endswith(WEIGHT) for path in found) else found

    def constants_of_target_alone(self) -> list[str]:
        """The paths of the target's constants of 16 bits, see :meth:`HeldCall.constants`, that the baseline lacks: not
        its weights, which may be stored fused.
        """
        has = self._both(HeldCall.constants)
        ours = has.baseline[0]
        alone = {
            path: each
            for path, each in has.target[0].items()
            if each.dtype in NARROW
            and path not in ours
            # Without a rule, the plan pairs each name with itself.
            and not {each.removesuffix(WEIGHT) for each in self._partners("target", path)} - {path}
            and not any(_is_equal(each, other) for other in ours.values())
        }
        if not alone:
            return []
        samples = [samples_of(each) for each in alone.values()]
        run = self.session.run(OfCall(partial(HeldCall.are_made_of_own, samples=samples)), None)
        return [path for path, is_own in zip(alone, run.baseline[0], strict=True) if not is_own]

    def _partners(self, side: Side, path: str) -> list[str]:
        """The paths of a weight's partners on the other side, as the plan pairs them."""
        pairs = self.session.plan.pairings(side, path.removesuffix(WEIGHT), {"kind": "param"})
        names = (each.target_name if side == "baseline" else each.baseline_name for each in pairs)
        return [f"{name}{WEIGHT}" for name in names if name is not None]


def described(run: Run) -> tuple[list[CallDescription], list[CallDescription]]:
    """The descriptions that the ranks of both sides returned. Raises :class:`SessionError` for a rank without one."""
    for side, results in (("baseline", run.baseline), ("target", run.target)):
        for rank, result in enumerate(results):
            if not isinstance(result, CallDescription):
                raise SessionError(f"compare: {side}[{rank}] did not describe its call: {result!r}")
    return run.baseline, run.target


def _failure(run: Run) -> str | None:
    """Why a rank cannot repeat its call in more bits; None if all can."""
    sides: dict[Side, list[Any]] = {"baseline": run.baseline, "target": run.target}
    failed = (f"{side}[{rank}]: {each}" for side in sides for rank, each in enumerate(sides[side]) if each is not None)
    return next(failed, None)


def _kept(read: Run, known: Run) -> tuple[frozenset[str], frozenset[str]]:
    """The paths of each side's state that has no partner and is known in float32; nothing unless all of it is."""
    if not all(isinstance(each, Mapping) for each in (*read.baseline, *read.target)):
        return frozenset(), frozenset()
    ours = {path for each in read.baseline for path in each}
    theirs = {path for each in read.target for path in each}
    kept: list[frozenset[str]] = []
    for states, alone in ((known.baseline, ours - theirs), (known.target, theirs - ours)):
        changed = {path for each in states for path in alone - each.unchanged}
        if not all(changed <= each.in_float32 for each in states):
            return frozenset(), frozenset()
        kept.append(frozenset(changed))
    return kept[0], kept[1]


def _unequal_numbers(
    baseline: object, target: object, may_lack: bool, excused: Collection[str] = ()
) -> dict[str, Tensor] | str:
    """The baseline's values of the tensors that differ from the target's; why they are unknown, if one of these has no
    partner, unless all may lack one, or it is ``excused``.
    """
    if not isinstance(baseline, Mapping) or not isinstance(target, Mapping):
        side = "target" if isinstance(baseline, Mapping) else "baseline"
        return f"the tensors that the {side}'s call reads are too large to be compared, or cannot be sent"
    found = {}
    renamed = [each for path, each in baseline.items() if path not in target]
    for path, value in target.items():
        partner = baseline.get(path)
        if partner is None and len(near := [each for each in renamed if _is_near(each, value)]) == 1:
            partner = near[0]
        if partner is not None and partner.shape != value.shape:
            partner = _part_near(partner, value)
        if partner is not None:
            # The baseline reads it rounded likewise; see dtypes_to_round().
            if not _is_equal(partner := partner.to(value.dtype), value):
                found[path] = partner
        elif not (may_lack or path in excused or any(_is_equal(each, value) for each in baseline.values())):
            return f"the target reads {path}, which earlier calls may have written, and the baseline has no such tensor"
    return found


def _part_near(whole: Tensor, value: Tensor) -> Tensor | None:
    """The part of ``whole`` that a rank has as ``value``, as of a cache whose heads are split; None if none is near."""
    if whole.dim() != value.dim():
        return None
    dims = [dim for dim, (one, other) in enumerate(zip(whole.shape, value.shape, strict=True)) if one != other]
    if len(dims) != 1 or not value.numel() or whole.shape[dims[0]] % value.shape[dims[0]]:
        return None
    parts = torch.split(whole, value.shape[dims[0]], dims[0])
    apart = [float((part.double() - value.double()).norm()) for part in parts]
    nearest = min(range(len(parts)), key=apart.__getitem__)
    return parts[nearest].contiguous() if apart[nearest] <= _NEAR * float(value.double().norm()) else None


def dtypes_to_round(
    own: Mapping[str, torch.dtype],
    other: Mapping[str, torch.dtype],
    partners_of: Callable[[str], Collection[str]] = lambda path: (),
) -> dict[str, torch.dtype] | None:
    """The dtypes to which a side's float32 tensors are rounded, by path: those of 16 bits that the other side has.

    ``partners_of`` gives the other side's weights that one in float32 is paired with. None if such a weight has no
    partner, or several of different dtypes, and the other side's weights are of several dtypes.
    """
    weights = {dtype for path, dtype in other.items() if path.endswith(WEIGHT)}
    found = {}
    for path, dtype in own.items():
        if dtype != torch.float32:
            continue
        partner = other.get(path)
        if partner is None and path.endswith(WEIGHT) and not weights.isdisjoint(NARROW):
            # Its partner has another name.
            known = {other[each] for each in partners_of(path) if each in other} or weights
            if len(known) > 1:
                return None
            (partner,) = known
        if partner in NARROW:
            found[path] = partner
    return found


def _is_near(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one value, perhaps rounded differently, such as an encoder's result."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return float((one.double() - other.double()).norm()) <= _NEAR * float(other.double().norm())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(as_bytes(one), as_bytes(other))
