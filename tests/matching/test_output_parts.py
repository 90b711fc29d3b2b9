"""What is left of an output is paired, where its other parts have partners."""

from __future__ import annotations

import pytest
import torch

from graftlab.layouts import Part, parse_layout
from graftlab.matching.output_parts import with_outputs_in_parts
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap

PARTS = {"output[0]": (2, 6, 4), "output[1]": (2, 6, 5), "output[2]": (2, 6, 3)}
WHOLE = {"output": (2, 6, 12)}
FIRST, SECOND, THIRD = (parse_layout(f"part(index={n}, of=[4, 5, 3], dim=2)") for n in range(3))


def taps(shapes: dict[str, tuple[int, ...]]) -> list[RecordedTap]:
    return [RecordedTap.of(name, torch.randn(shape)) for name, shape in shapes.items()]


def made(*pairs: Pair, parts: dict[str, tuple[int, ...]] = PARTS, whole: str = "target") -> list[tuple[str, str, str]]:
    """The pairs that are added, checked on both sides."""
    of_parts = {name: "no partner" for name in parts if name not in {pair.inner for pair in pairs}}
    sides = (taps(parts), taps(WHOLE)) if whole == "target" else (taps(WHOLE), taps(parts))
    alone = (of_parts, {}) if whole == "target" else ({}, of_parts)
    before = Proposal(pairs, *alone, ("output is compared only in part: it contains x", "another problem"))
    found = with_outputs_in_parts(before, *sides)
    new = [pair for pair in found.pairs if pair not in pairs]
    assert found.pairs[: len(pairs)] == pairs
    if not new:
        assert found is before
        return []
    assert found.problems == ("another problem",)
    (one,) = new
    assert (one.whole, one.sureness) == (whole, "rule")
    assert one.note == "what is left of output beside " + ", ".join(pair.inner for pair in pairs)
    left = found.unmatched_baseline if whole == "target" else found.unmatched_target
    assert [*left] == [name for name in of_parts if name != one.inner]
    return [(one.baseline, one.target, one.layout.text)]


@pytest.mark.parametrize(
    ("known", "left", "layout"),
    [
        ({"output[1]": SECOND, "output[2]": THIRD}, "output[0]", "part(index=0, of=[4, 8], dim=2)"),
        ({"output[0]": FIRST, "output[2]": THIRD}, "output[1]", "part(index=1, of=[4, 5, 3], dim=2)"),
        ({"output[0]": FIRST, "output[1]": SECOND}, "output[2]", "part(index=1, of=[9, 3], dim=2)"),
    ],
)
def test_the_rest_of_an_output_is_the_other_output_of_its_shape(known: dict[str, Part], left: str, layout: str) -> None:
    pairs = [Pair(name, "output", each, "target") for name, each in known.items()]
    assert made(*pairs) == [(left, "output", layout)]
    pairs = [Pair("output", name, each, "baseline") for name, each in known.items()]
    assert made(*pairs, whole="baseline") == [("output", left, layout)]


def test_a_rest_of_another_shape_or_of_two_candidates_has_no_partner() -> None:
    known = Pair("output[1]", "output", SECOND, "target"), Pair("output[2]", "output", THIRD, "target")
    assert made(*known, parts={**PARTS, "output[0]": (2, 4, 6)}) == []
    assert made(*known, parts={**PARTS, "output[3]": (2, 6, 4)}) == []
    # Two parts are left, apart from each other or together, or nothing is known.
    assert made(Pair("output[1]", "output", SECOND, "target")) == []
    assert made(Pair("output[0]", "output", FIRST, "target")) == []
    assert made() == []
    # A module's tap is no output, and a guess is not known.
    hidden = {**PARTS, "head": (2, 6, 4)}
    del hidden["output[0]"]
    assert made(*known, parts=hidden) == []
    guess = Pair("output[1]", "output", SECOND, "target", sureness="guess")
    assert made(guess, known[1]) == []


def test_an_output_without_a_rest_stays() -> None:
    every = [Pair(f"output[{n}]", "output", each, "target") for n, each in enumerate((FIRST, SECOND, THIRD))]
    assert made(*every) == []
