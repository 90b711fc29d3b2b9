"""Outputs of a packed and a padded batch that differ are paired by the rows of a tap that agrees."""

from __future__ import annotations

from dataclasses import replace

import torch

from graftlab.layouts import Layout, parse_layout
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.row_outputs import with_outputs_in_rows

ROWS = parse_layout("gather(of=[2, 2], runs=[[0, 2], [3, 1]], into=[3])")
HEAD = Pair("head", "fc", ROWS)
OURS = {"head": (2, 2, 8), "output.logits": (2, 2, 8)}
THEIRS = {"fc": (3, 8), "output": (3, 8)}


def taps(shapes: dict[str, tuple[int, ...]]) -> list[RecordedTap]:
    return [RecordedTap.of(name, torch.randn(shape)) for name, shape in shapes.items()]


def paired(pair: Pair, ours: dict[str, tuple[int, ...]], theirs: dict[str, tuple[int, ...]]) -> list[tuple[str, str]]:
    alone = ({name: "no partner" for name in side if "output" in name} for side in (ours, theirs))
    found = with_outputs_in_rows(Proposal((pair,), *alone), taps(ours), taps(theirs))
    made = [each for each in found.pairs if each is not pair]
    assert all(each.layout == pair.layout and each.whole == pair.whole for each in made)
    assert all(each.baseline not in found.unmatched_baseline for each in made)
    assert all(each.target not in found.unmatched_target for each in made)
    # A plan has it, and no graft relies on it while taps are matched.
    assert all((each.sureness, each.note) == ("rule", "in the rows of head") for each in made)
    return [(each.baseline, each.target) for each in made]


def test_outputs_that_differ_have_the_rows_of_a_tap_that_agrees() -> None:
    assert paired(HEAD, OURS, THEIRS) == [("output.logits", "output")]
    assert paired(replace(HEAD, whole="target"), OURS, THEIRS) == [("output.logits", "output")]


def test_outputs_of_other_shapes_or_one_of_several_are_not_paired_by_rows() -> None:
    assert paired(HEAD, OURS, {**THEIRS, "output": (3, 4)}) == []
    assert paired(HEAD, {**OURS, "output.logits": (2, 3, 8)}, THEIRS) == []
    assert paired(HEAD, {**OURS, "output.hidden": (2, 2, 8)}, THEIRS) == []
    # In the same rows both sides' results are compared as they are, and a guess shows no rows.
    assert paired(replace(HEAD, layout=Layout()), {**OURS, "output.logits": (3, 8), "head": (3, 8)}, THEIRS) == []
    assert paired(replace(HEAD, sureness="guess"), OURS, THEIRS) == []


def test_an_output_that_is_the_other_sides_head_is_paired_with_its_output() -> None:
    """As where the target leaves out the factor after the head."""
    head = replace(HEAD, target="output")
    ours, theirs = taps(OURS), taps({"output": (3, 8)})
    found = with_outputs_in_rows(Proposal((head,), {"output.logits": "no partner"}), ours, theirs)
    assert [(pair.baseline, pair.target, pair.layout) for pair in found.pairs] == [("output.logits", "output", ROWS)]
    why = "has the values of an output, and output.logits and output are paired"
    assert (found.unmatched_baseline, found.unmatched_target) == ({"head": why}, {})
    # On the other side.
    head = replace(HEAD, baseline="output", target="fc")
    found = with_outputs_in_rows(
        Proposal((head,), {}, {"output": "no partner"}), taps({"output": (2, 2, 8)}), taps(THEIRS)
    )
    assert [(pair.baseline, pair.target) for pair in found.pairs] == [("output", "output")]
    assert [*found.unmatched_target] == ["fc"]
    # Outputs that have partners each stay as they are.
    both = Proposal((replace(HEAD, target="output"), replace(HEAD, baseline="output.logits")))
    assert with_outputs_in_rows(both, taps(OURS), taps(THEIRS)) is both
