"""The answer of a comparison: whether both sides agree, differ, or cannot be judged."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from graftlab.base.tap_groups import is_output
from graftlab.control.report import write_report
from graftlab.control.verdicts import Verdict
from graftlab.diffs.results import ResultDifference
from graftlab.diffs.rounding import assumed_floor
from graftlab.errors import WaitInterrupted
from graftlab.verdict.findings import Findings
from graftlab.verdict.wording import NOT_CHECKED

if TYPE_CHECKING:
    from graftlab.matching.proposal import Proposal
    from graftlab.session import Session

Answer = Literal["agree", "differ", "inconclusive"]
NOT_COMPARED = "The results of the two calls could not be compared, so the taps that agree do not clear the target."


# The default repr would contain the whole frame.
@dataclass(frozen=True, repr=False)
class Comparison(Verdict):
    """The answer of :func:`graftlab.compare`: a verdict, the session that gave it, and the match by which taps pair.

    ``match`` is None where names pair. ``answer`` is ``"agree"`` (to rounding), ``"differ"``, located or not, or
    ``"inconclusive"``, with the reason in the text.
    """

    session: Session = field(repr=False)
    match: Proposal | None = field(repr=False)
    answer: Answer
    remarks: tuple[str, ...] = ()
    """Sentences of the comparison before those of the verdict, the most important first."""
    how: str = ""
    """A sentence on how the runs were made."""
    starts: int = 0
    """How often the scripts were started again; 0 if calls were held."""
    has_other_batch: bool = False
    """Whether a call was not judged because the sides have different batches."""
    left_to_next_update: tuple[str, ...] = ()
    """The weights that another optimizer updates on one side, of an update that agrees but for them. If they are equal
    before the next update, this one agrees.
    """
    equal_weights: frozenset[str] = frozenset()
    """The weights that are equal to one rounding before an update."""
    lacks_result: bool = False
    """Whether a call agrees but for its result, which could not be compared."""
    is_last: bool = False
    """Whether rounding moves the weights so far apart in this update that nothing after it can be judged."""

    def with_result(self) -> Comparison:
        """This comparison of a call that lacks its result, once another call has shown that it agrees."""
        remarks = tuple(each for each in self.remarks if each != NOT_COMPARED)
        findings = replace(self.findings, without_output=())
        return replace(self, findings=findings, remarks=remarks, answer="agree", lacks_result=False)

    @property
    def text(self) -> str:
        first, last = self._remarks()
        return "\n".join(filter(None, [*first, super().text, *last]))

    def _remarks(self) -> tuple[list[str], list[str]]:
        """The remarks that may overturn the verdict, which come before it, and those that come after it."""
        first = [each for each in self.remarks if not each.startswith(NOT_CHECKED)]
        return first, [each for each in [*self.remarks, self.how] if each and each not in first]

    def _html(self) -> str:
        first, last = self._remarks()
        bold = "".join(f"<p><b>{html.escape(each)}</b></p>" for each in first)
        return bold + super()._html() + "".join(f"<p>{html.escape(each)}</p>" for each in last)

    def report(self, path: str | Path = "report.html", *, tensors: bool = False) -> Path:
        """Write the comparison as one page; returns its path. See :meth:`graftlab.Session.report`."""
        return write_report(self.session, path, self, tensors)


class ReasonedAnswer:
    """An answer that is still being found, and sentences on why it is what it is."""

    def __init__(self, answer: Answer, reasons: list[str] | None = None) -> None:
        self.answer: Answer = answer
        self.reasons = [] if reasons is None else reasons
        self.has_other_batch = False

    def doubt(self, *why: str | None) -> None:
        """Withdraw an agreement for these reasons, if there are any. Other answers stay, without the reasons."""
        reasons = [each for each in why if each]
        if reasons and self.withdraw_agreement():
            self.reasons += reasons

    def withdraw_agreement(self, instead: Answer = "inconclusive") -> bool:
        """Replace ``"agree"``, and no other answer. Returns whether it was replaced."""
        agreed = self.answer == "agree"
        if agreed:
            self.answer = instead
        return agreed


class ComparisonStopped(WaitInterrupted):
    """The stop button ended a comparison and both its sides. ``known`` has the sentences on what it had found."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known = " ".join(known) or "Nothing was judged yet."
        super().__init__(f"the comparison was stopped, and both sides have ended. {self.known}")


def known_at(interrupt: KeyboardInterrupt) -> list[str]:
    """A sentence on what an interrupted comparison has found. A wait's own message is on runs, which have ended."""
    if isinstance(interrupt, ComparisonStopped):
        return [interrupt.known]
    return [] if isinstance(interrupt, WaitInterrupted) else [each for each in interrupt.args if isinstance(each, str)]


def answer_of(findings: Findings, trusted: bool, results_compared: bool) -> Answer:
    """The answer that a verdict's findings give. ``trusted`` is false for a call that cannot be repeated.

    Pairs that contradict each other are a mistake only if it shows in what was computed, and clear nothing.
    """
    if not trusted or findings.not_repeated or findings.target_not_repeated:
        return "inconclusive"
    named = {*findings.named} - {*findings.rounding.groups}
    if findings.data or findings.following:
        return "differ"
    if named or findings.unexplained:
        return "inconclusive" if findings.is_rounding_possible else "differ"
    if findings.raised or findings.inconclusive:
        # Nothing was judged, so that nothing is named proves nothing.
        return "inconclusive"
    is_hidden = findings.computed_in and findings.in_float32 is None and moves(findings)
    if findings.quantised or findings.rounding.is_doubtful(findings.in_float32) or is_hidden:
        # There is room for a mistake.
        return "inconclusive"
    measured = findings.frame["ratio"].notna().any() if len(findings.frame) else findings.only_returned
    is_shown = results_compared or _shows_output(findings)
    if findings.failed or findings.without_output or not measured or not is_shown or findings.contradicting_pairs:
        return "inconclusive"
    return "agree"


def moves(findings: Findings) -> bool:
    """Whether some tap or returned value differs from its partner, or none shows whether it does."""
    return findings.only_returned or bool(findings.after_taps) or bool((findings.frame["added"] > 0).any())


def _shows_output(findings: Findings) -> bool:
    """Whether numbers of a model's output, the tap of this name, were compared."""
    return any(map(is_output, findings.frame.loc[findings.frame["ratio"].notna(), "name"]))


def is_beyond_rounding(difference: ResultDifference, threshold: float) -> bool:
    """Whether results differ by more than ``threshold`` times the rounding assumed for their dtypes."""
    return difference.rel_l2 > threshold * assumed_floor(difference.dtypes)[0]
