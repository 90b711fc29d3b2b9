"""The results of a verdict's runs, as a value from which its text and its answer are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch

from graftlab.diffs.maps import DifferenceMap
from graftlab.verdict.added import NOT_NAMED
from graftlab.verdict.causes import Causes
from graftlab.verdict.hints import Hint
from graftlab.verdict.lines import DifferingLine, first_choices
from graftlab.verdict.origins import ErrorOrigins
from graftlab.verdict.rounds_differently import RoundingGroups


@dataclass(frozen=True)
class JobRemarks:
    """Sentences for a verdict on jobs, or on a baseline that is a recording.

    ``constant`` is the floor of every tap if it was not measured, ``floor`` the adjective for such a floor. ``first``
    has sentences that may overturn the conclusion, ``basis`` its basis, ``unseen`` what was not checked, ``of_named`` a
    caveat if anything is named, and ``last`` how the verdict changed the jobs.
    """

    constant: float | None
    floor: str
    first: tuple[str, ...] = ()
    basis: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    of_named: tuple[str, ...] = ()
    last: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShownMap:
    """A map of where two tensors differ, their description, and a hint at the change, if there is one.

    ``pair`` has the tensors, if they are small enough to be kept with the verdict.
    """

    title: str
    found: DifferenceMap
    hint: Hint | None = None
    pair: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Findings:
    """The results of a verdict's runs, with the number of target ranks."""

    frame: pd.DataFrame
    threshold: float
    target_ranks: int
    unseen: Sequence[str] = ()
    may_be_inherited: Sequence[str] = ()
    """Sentences on reasons why named groups may be innocent."""
    not_repeated: Sequence[str] = ()
    causes: Mapping[str, Causes] = field(default_factory=dict)
    """The causes, by the title of the output at which they were measured: its group, or the name of a result with
    parts.
    """
    hints: Mapping[str, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    data: Sequence[str] = ()
    """Sentences on differing data of both sides: inputs, weights, settings."""
    contradicting_pairs: Sequence[str] = ()
    """A sentence on pairs of the plan that contradict their names or each other, if there are any."""
    quantised: Sequence[str] = ()
    """Sentences on weights that one side alone has in 8 bits, and on what these explain."""
    inputs: Sequence[str] = ()
    """The groups that the sentences of ``data`` cover, mainly those of the model's inputs."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """The groups of weights that already differ, each in words."""
    weights_lent: bool = False
    """Whether the target had the baseline's weights where they differ."""
    following: Sequence[str] = ()
    """The groups of gradients that differ because named values differ."""
    target_not_repeated: Sequence[str] = ()
    """Taps at which the target differs from itself."""
    job_remarks: JobRemarks | None = None
    """Set for jobs, because a verdict cannot call them again."""
    unexplained: Sequence[str] = ()
    """Sentences on differences that no named group explains."""
    only_without_grafts: bool = False
    """Whether these show only where no tap has the baseline's value."""
    not_grafted: Sequence[str] = ()
    """A sentence on taps before named ones whose difference the grafts could not take out."""
    without_output: Sequence[str] = ()
    """A sentence if nothing is named and the output was not compared."""
    failed: Sequence[str] = ()
    """Sentences on stages of the verdict that failed."""
    rounding: RoundingGroups = field(default_factory=RoundingGroups)
    """The groups that round differently. They are among the named ones."""
    in_float32: float | None = None
    """The largest ratio of the same runs in float32, if they name nothing either; set for a call of 16 bits."""
    looked_in: str = "float32"
    """The dtype of those runs: float64 if only the call's operators, and not its numbers, could be widened."""
    after_taps: float = 0.0
    """How far the returned values are apart (rel_l2) in the run in which every tap was grafted."""
    gradient_parts: Sequence[str] = ()
    """Groups of gradients that were not compared, because each rank has only a summand."""
    computed_in: str = ""
    """The coarsest dtype of 16 bits in which the baseline computes what the taps show in more bits; blank if none."""
    maps: Mapping[str, ShownMap] = field(default_factory=dict)
    """Where the tensors of a culprit differ, by group."""
    origins: ErrorOrigins | None = None
    """Where the errors of named values arise; None if the inputs of modules were not compared."""
    pairing_advice: str | None = None
    """Advice if both sides have taps and no names pair."""
    lines: Sequence[DifferingLine] = ()
    """The lines of source at which the named groups' errors arise."""
    only_returned: bool = False
    """Whether calls do not pair, so that the returned values stand for what they compute."""
    extra_calls: Sequence[str] = ()
    """Sentences on named taps that one side reaches more often, so that calls may be paired wrongly."""
    only_before: Mapping[str, str] = field(default_factory=dict)
    """Sentences on values that only one side shows before a named tap, by its group."""
    raised: str | None = None
    """A sentence on the exception of one side, up to which the sides are compared; None if both return."""
    inconclusive: Sequence[str] = ()
    """Sentences on why grafts prove nothing, such as pairs that no longer hold."""

    @property
    def is_rounding_possible(self) -> bool:
        """Whether rounding may have changed a choice, which explains what differs: in more bits the calls agree."""
        is_named = bool({*self.named} - {*self.rounding.groups})
        return self.in_float32 is not None and (bool(self.choices) if is_named else self.only_without_grafts)

    @property
    def choices(self) -> list[DifferingLine]:
        """The lines that choose among values, such as a router's ``topk``, if all named groups differ from one on."""
        groups = [each for each in self.named if each not in self.rounding.groups]
        return [] if self.data else first_choices(self.lines, groups)

    @property
    def named(self) -> list[str]:
        return list(dict.fromkeys(self.frame.loc[~self.frame["label"].isin(NOT_NAMED), "group"]))
