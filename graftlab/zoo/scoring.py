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
from graftlab.session import launch
from graftlab.taps.calls import here
from graftlab.zoo.controls import CONTROLS
from graftlab.zoo.faults import FAULTS, Specimen, math_of, weights_of
from graftlab.zoo.model import Cache, Config, Math, Model, RankShard, make_weights, shard_weights

if TYPE_CHECKING:
    from graftlab.session import Session


@dataclass(frozen=True)
class Scored:
    """The verdict on one specimen. ``labels`` are those of the named groups, in order."""

    specimen: Specimen
    labels: dict[str, str]
    runs: int
    seconds: float
    text: str

    @property
    def is_control(self) -> bool:
        return self.specimen in CONTROLS

    @property
    def blamed(self) -> set[str]:
        """The named groups that are not labelled ``cancels`` or ``rounds differently``."""
        return {group for group, label in self.labels.items() if label not in ("cancels", "rounds differently")}

    @property
    def exact(self) -> bool:
        """Whether exactly the groups of the truth are named, and none that should cancel is blamed."""
        truth, cancels = self.specimen.truth, self.specimen.cancels
        return truth <= set(self.labels) <= truth | cancels and not self.blamed & cancels

    @property
    def first_right(self) -> bool:
        return bool(self.labels) and next(iter(self.labels)) in self.specimen.truth

    @property
    def innocents(self) -> set[str]:
        return set(self.labels) - self.specimen.truth - self.specimen.cancels

    @property
    def alarm(self) -> bool:
        """Whether a group of a benign variant is blamed."""
        return self.is_control and bool(self.blamed)


def score(only: str | None = None, names: Sequence[str] | None = None, *, explain: bool = True) -> Iterator[Scored]:
    """Judge the specimens one by one: all, those of one area or regime, or those with these names."""
    chosen = [
        each
        for each in (*FAULTS, *CONTROLS)
        if (only is None or only in (each.area, each.regime)) and (names is None or each.name in names)
    ]
    for world_size in (1, 2):
        of_size = [each for each in chosen if _target_ranks(each) == world_size]
        if of_size:
            with launch(baseline=1, target=world_size) as session:
                for specimen in of_size:
                    yield judge_specimen(session, specimen, explain=explain)


def _target_ranks(specimen: Specimen) -> int:
    return 2 if specimen.regime.startswith("tp") else 1


def judge_specimen(session: Session, specimen: Specimen, *, explain: bool = True) -> Scored:
    """Run one verdict, in a session with the number of target ranks that the specimen's regime needs."""
    began = time.perf_counter()
    kind = "control" if specimen in CONTROLS else "fault"
    verdict = session.verdict(run_specimen, run_specimen, args=(kind, specimen.name), explain=explain)
    labels = {group: verdict.labels[group] for group in verdict.named}
    return Scored(specimen, labels, verdict.runs, time.perf_counter() - began, verdict.text)


def summary(scored: Iterable[Scored]) -> str:
    """The score in a few lines."""
    every = list(scored)
    faults = [each for each in every if not each.is_control]
    controls = [each for each in every if each.is_control]
    lines = [
        f"{len(faults)} faults: {sum(each.exact for each in faults)} named exactly, "
        f"{sum(each.first_right for each in faults)} first right, "
        f"{sum(bool(each.innocents) for each in faults)} with an innocent named",
        f"{len(controls)} benign controls: {sum(each.alarm for each in controls)} alarms, "
        f"{sum(not each.exact for each in controls)} with a group named that should not be",
    ]
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


def make_tokens(config: Config) -> torch.Tensor:
    """[batch, position], the same in every process."""
    tokens = torch.randint(0, config.vocab, (2, 12), generator=torch.Generator().manual_seed(1))
    # One fault needs this token.
    tokens[0, 3] = 0
    return tokens


# ---- the command line -----------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    areas = sorted({each.area for each in (*FAULTS, *CONTROLS)} | {each.regime for each in FAULTS})
    parser.add_argument("--only", metavar="AREA", choices=areas, help=f"one of {', '.join(areas)}")
    parser.add_argument("--no-explain", action="store_true", help="skip the swaps that find the cause")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each specimen, then the score; returns 0 if no innocent group was named."""
    found = []
    warnings.simplefilter("ignore", GraftWarning)
    for each in score(arguments.only, explain=not arguments.no_explain):
        found.append(each)
        sys.stdout.write(_line(each) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + summary(found) + "\n")
    return int(any(each.alarm or each.innocents for each in found))


def _line(each: Scored) -> str:
    mark = "exact" if each.exact and not each.alarm else "ALARM" if each.is_control else "WRONG"
    named = ", ".join(f"{group} ({label})" for group, label in each.labels.items()) or "nothing"
    truth = "" if each.exact else f"; expected: {', '.join(sorted(each.specimen.truth)) or 'nothing'}"
    return f"{mark}  {each.specimen.area}: {each.specimen.name}: {named}{truth}"
