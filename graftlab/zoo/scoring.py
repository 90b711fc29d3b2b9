"""Scores ``session.verdict`` on each fault and each benign variant of the zoo, and runs ``graftlab zoo``."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graftlab.errors import GraftWarning
from graftlab.launching import launch
from graftlab.taps.calls import here
from graftlab.verdict.lines import DifferingLine
from graftlab.zoo import benign_programs, model_part_programs, quantised_programs, unseen_programs
from graftlab.zoo.controls import CONTROLS
from graftlab.zoo.faults import FAULTS, Specimen, math_of, weights_of
from graftlab.zoo.line_truth import has_line, is_right
from graftlab.zoo.model import Cache, Config, Math, Model, RankShard, make_weights, shard_weights
from graftlab.zoo.programs import PROGRAMS, Program, forget_calls

if TYPE_CHECKING:
    from graftlab.session import Session


STATED = (
    "no tapped value explains it",
    "after the last tap",
    "does not repeat itself",
    "was not compared",
    "no tap was measured on both sides",
)
"""Phrases of a verdict's first sentence that state a difference which no named group explains."""
PROGRAM_MODULES = (model_part_programs, unseen_programs, quantised_programs, benign_programs)
"""Imported for the programs that they register."""
SPECIMENS: tuple[Specimen | Program, ...] = (*FAULTS, *CONTROLS, *PROGRAMS)


@dataclass(frozen=True)
class Scored:
    """The verdict on one specimen. ``labels`` are those of the named groups, in order."""

    specimen: Specimen | Program
    labels: dict[str, str]
    runs: int
    seconds: float
    text: str
    lines: Sequence[DifferingLine] = ()
    """The reported lines of source: for each named group and side up to three, the most telling first."""

    @property
    def is_control(self) -> bool:
        return is_control(self.specimen)

    @property
    def blamed(self) -> set[str]:
        """The named groups but those labelled ``cancels`` or ``rounds differently``, or rightly ``minor``."""
        minor = {group for group in self._may_be_minor if self.labels.get(group) == "minor"}
        blamed = {group for group, label in self.labels.items() if label not in ("cancels", "rounds differently")}
        return blamed - minor

    @property
    def _may_be_minor(self) -> frozenset[str]:
        return self.specimen.minor if isinstance(self.specimen, Program) else frozenset()

    @property
    def exact(self) -> bool:
        """Whether exactly the groups of the truth are named, and none that should cancel is blamed.

        For a fault that no tap shows, whether the first sentence contains what it must.
        """
        truth, cancels = self.specimen.truth, self.specimen.cancels | self._may_be_minor
        if self.is_control and self.reports_difference:
            return False
        if self.says and not self.states(self.says):
            return False
        return truth <= set(self.labels) <= truth | cancels and not self.blamed & cancels

    @property
    def says(self) -> tuple[str, ...]:
        """The phrases of a fault that no tap shows."""
        return self.specimen.says if isinstance(self.specimen, Program) else ()

    @property
    def honest(self) -> bool:
        """Whether a fault is not named, and the first sentence states that something differs all the same."""
        return not self.exact and not self.innocents and not self.is_control and self.reports_difference

    @property
    def silent(self) -> bool:
        """Whether a fault is cleared: no group of the truth is named, and the first sentence states no difference."""
        return not self.is_control and not set(self.labels) & self.specimen.truth and not self.reports_difference

    @property
    def reports_difference(self) -> bool:
        """Whether the first sentence states a difference that no named group explains."""
        return self.states(STATED)

    def states(self, phrases: Sequence[str]) -> bool:
        """Whether the first sentence contains one of these phrases."""
        first = self.text.partition("\n")[0]
        return any(phrase in first for phrase in phrases)

    @property
    def first_right(self) -> bool:
        """Whether the first named group is one of the truth, or rightly none is named."""
        return next(iter(self.labels)) in self.specimen.truth if self.labels else self.exact

    @property
    def innocents(self) -> set[str]:
        return set(self.labels) - self.specimen.truth - self.specimen.cancels - self._may_be_minor

    @property
    def place_of_line(self) -> int | None:
        """The place of the mistake's line among the reported ones of a named group and side, from 1; None if absent."""
        places: dict[tuple[str, str], int] = {}
        found = []
        for line in self.lines:
            place = places[line.group, line.side] = places.get((line.group, line.side), 0) + 1
            if is_right(self.specimen, line):
                found.append(place)
        return min(found, default=None)

    @property
    def wrongly_confirmed(self) -> list[DifferingLine]:
        """The confirmed lines that are not the mistake's."""
        return [line for line in self.lines if line.confirmed and not is_right(self.specimen, line)]

    @property
    def alarm(self) -> bool:
        """Whether a group of a benign variant is blamed, or a difference is reported that no group explains."""
        return self.is_control and (bool(self.blamed) or self.reports_difference)


def score(only: str | None = None, names: Sequence[str] | None = None, *, explain: bool = True) -> Iterator[Scored]:
    """Judge the specimens one by one: all, those of one area or regime, or those with these names."""
    chosen = [
        each
        for each in SPECIMENS
        if (only is None or only in (each.area, each.regime)) and (names is None or each.name in names)
    ]
    for world_size in (1, 2):
        of_size = [each for each in chosen if _target_ranks(each) == world_size]
        if of_size:
            with launch(baseline=1, target=world_size) as session:
                for specimen in of_size:
                    yield judge_specimen(session, specimen, explain=explain)


def is_control(specimen: Specimen | Program) -> bool:
    """Whether the specimen is a benign variant."""
    return specimen.is_benign if isinstance(specimen, Program) else specimen in CONTROLS


def _target_ranks(specimen: Specimen | Program) -> int:
    return 2 if specimen.regime.startswith("tp") else 1


def judge_specimen(session: Session, specimen: Specimen | Program, *, explain: bool = True) -> Scored:
    """Run one verdict, in a session with the number of target ranks that the specimen's regime needs."""
    began = time.perf_counter()
    if isinstance(specimen, Program):
        session.run(forget_calls, forget_calls)
        verdict = session.verdict(run_program, run_program, args=(specimen.name,), explain=explain)
    else:
        kind = "control" if specimen in CONTROLS else "fault"
        verdict = session.verdict(run_specimen, run_specimen, args=(kind, specimen.name), explain=explain)
    labels = {group: verdict.labels[group] for group in verdict.named}
    return Scored(specimen, labels, verdict.runs, time.perf_counter() - began, verdict.text, verdict.findings.lines)


def summary(scored: Iterable[Scored]) -> str:
    """The score in a few lines."""
    every = list(scored)
    faults = [each for each in every if not each.is_control]
    controls = [each for each in every if each.is_control]
    lines = [
        f"{len(faults)} faults: {sum(each.exact for each in faults)} named exactly, "
        f"{sum(each.first_right for each in faults)} first right, "
        f"{sum(bool(each.innocents) for each in faults)} with an innocent named, "
        f"{sum(each.honest for each in faults)} not named but reported as unexplained, "
        f"{sum(each.silent for each in faults)} cleared",
        f"{len(controls)} benign controls: {sum(each.alarm for each in controls)} alarms, "
        f"{sum(not each.exact for each in controls)} with a group named that should not be",
    ]
    located = [each for each in faults if has_line(each.specimen) and each.labels]
    places = [each.place_of_line for each in located]
    confirmed = sum(line.confirmed for each in every for line in each.lines)
    lines.append(
        f"{len(located)} named faults at a line of source: {places.count(1)} with the right line first, "
        f"{sum(place is not None for place in places)} among the first three; {confirmed} lines confirmed, "
        f"{sum(len(each.wrongly_confirmed) for each in every)} of them wrong; "
        f"{sum(bool(each.lines) for each in controls)} benign controls with lines"
    )
    if every:
        lines.append(
            f"{sum(each.runs for each in every)} runs, {sum(each.seconds for each in every):.0f} s "
            f"({sum(each.seconds for each in every) / len(every):.2f} s a verdict)"
        )
    return "\n".join(lines)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def run_specimen(kind: str, name: str) -> Any:
    """Run the zoo's model on this rank, with the specimen's arithmetic and weights on the target."""
    me = here()
    assert me is not None
    specimen = next(each for each in (CONTROLS if kind == "control" else FAULTS) if each.name == name)
    config, shard = Config(), RankShard(me.rank, me.world_size)
    weights, math = make_weights(config), Math
    if me.side == "target":
        weights, math = weights_of(specimen, weights), math_of(specimen)
        if specimen.dtype is not None:
            weights = {key: weight.to(specimen.dtype) for key, weight in weights.items()}
    own = shard_weights(weights, shard)
    tokens = make_tokens(config)
    if "backward" in specimen.regime:
        model = Model(math(config, shard), {k: w.requires_grad_() for k, w in own.items()}, grad=True)
        model.math.loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        return None
    model = Model(math(config, shard), own)
    with torch.no_grad():
        if specimen.regime != "decode":
            model(tokens)
            return None
        cache, prompt = Cache(), 8
        model(tokens[:, :prompt], cache)
        for at in range(prompt, tokens.shape[1]):
            model(tokens[:, at : at + 1], cache)
    return None


def run_program(name: str) -> object:
    """Run a program on this rank: as it should be on the baseline, with its fault or its change on the target."""
    me = here()
    assert me is not None
    program = next(each for each in PROGRAMS if each.name == name)
    with torch.no_grad():
        return program.body(me.side == "target")


def make_tokens(config: Config) -> torch.Tensor:
    """[batch, position], the same in every process."""
    tokens = torch.randint(0, config.vocab, (2, 12), generator=torch.Generator().manual_seed(1))
    # One fault needs this token.
    tokens[0, 3] = 0
    return tokens


# ---- the command line -----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    areas = sorted({each.area for each in SPECIMENS} | {each.regime for each in SPECIMENS})
    parser.add_argument("--only", metavar="AREA", choices=areas, help=f"one of {', '.join(areas)}")
    parser.add_argument("--lines", action="store_true", help="also print the place of the mistake's line of source")
    parser.add_argument("--no-explain", action="store_true", help="skip the swaps that find the cause")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each specimen, then the score; returns 0 if no innocent group was named."""
    found = []
    warnings.simplefilter("ignore", GraftWarning)
    for each in score(arguments.only, explain=not arguments.no_explain):
        found.append(each)
        sys.stdout.write(_line(each) + (_line_of_source(each) if arguments.lines else "") + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + summary(found) + "\n")
    return int(any(each.alarm or each.innocents or each.silent for each in found))


def _line(each: Scored) -> str:
    mark = (
        "exact"
        if each.exact and not each.alarm
        else "ALARM"
        if each.is_control
        else "honest"
        if each.honest
        else "WRONG"
    )
    named = ", ".join(f"{group} ({label})" for group, label in each.labels.items()) or "nothing"
    if each.says:
        named += f"; {each.text.partition(chr(10))[0]}"
    wanted = sorted(each.specimen.truth) + [f"a sentence with '{' or '.join(each.says)}'"] * bool(each.says)
    truth = "" if each.exact else f"; expected: {', '.join(wanted) or 'nothing'}"
    return f"{mark}  {each.specimen.area}: {each.specimen.name}: {named}{truth}"


def _line_of_source(each: Scored) -> str:
    """What the verdict reported of the mistake's line, as further lines of text."""
    if each.is_control or not has_line(each.specimen):
        return "".join(f"\n    reported: {line.stack[0]} {line.source}" for line in each.lines if each.is_control)
    place = each.place_of_line
    wrong = "".join(f"\n    WRONGLY CONFIRMED: {line.stack[0]} {line.source}" for line in each.wrongly_confirmed)
    if place is not None:
        return f"\n    its line of source: number {place} of those reported{wrong}"
    shown = "".join(f"\n    reported: {line.side} {line.stack[0]} {line.source}" for line in each.lines)
    return f"\n    its line of source was not reported{shown}{wrong}"
