"""Which partners are tried first for taps that have none."""

from __future__ import annotations

import torch

from graftlab.layouts import parse_layout
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.suspects import FIRST, MOST, OPTIONS, copies, suspects


def tap(name: str, order: int, seed: int) -> RecordedTap:
    return RecordedTap.of(name, torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)), order=order)


def test_of_equally_likely_partners_the_one_at_the_same_distance_is_first() -> None:
    # Three taps of the baseline have the same values and names alike; the target has two taps that only it has first.
    baseline = [tap("start", 5, 0), tap("x.1", 4, 1), tap("x.2", 7, 1), tap("x.3", 9, 1)]
    target = [tap("begin", 10, 0), tap("y", 12, 1)]
    proposal = Proposal((Pair("start", "begin"),))
    assert [pair.baseline for pair in suspects(baseline, target, proposal)] == ["x.2", "x.3", "x.1"]


def test_partners_like_trusted_ones_are_first_and_like_those_tried_in_vain_last() -> None:
    baseline = [tap("x.1", 1, 1), tap("y.1", 1, 1), tap("z.1", 1, 1)]
    target = [tap("other.1", 1, 1)]
    trusted, in_vain = [Pair("z.2", "other.2")], [("x.2", "other.2")]
    found = suspects(baseline, target, Proposal(()), trusted, in_vain)
    assert [pair.baseline for pair in found] == ["z.1", "y.1", "x.1"]


def test_partners_of_constant_taps_and_of_pairs_are_not_tried() -> None:
    flat = RecordedTap.of("flat", torch.ones(4, 4), order=2)
    baseline = [tap("paired", 0, 0), tap("guessed", 1, 1), flat]
    target = [tap("p", 0, 0), tap("g", 1, 1), RecordedTap.of("f", torch.ones(4, 4), order=2), tap("x", 3, 2)]
    proposal = Proposal((Pair("paired", "p"), Pair("guessed", "g", sureness="guess")))
    found = [(pair.baseline, pair.target) for pair in suspects(baseline, target, proposal)]
    assert found == [("guessed", "g"), ("guessed", "x")]
    # What was tried in vain is not tried again.
    left = suspects(baseline, target, proposal, in_vain=[("guessed", "g")])
    assert [(pair.baseline, pair.target) for pair in left] == [("guessed", "x")]


def test_a_tap_of_the_same_kind_of_module_is_likelier_unless_the_kind_is_unknown() -> None:
    def of_kind(name: str, kind: str) -> RecordedTap:
        return RecordedTap.of(name, torch.eye(4) + 1, kind=kind, order=1)

    baseline = [of_kind("a", ""), of_kind("b", "Linear")]
    for kind, first in (("Linear", "b"), ("", "a"), ("Embedding", "a")):
        assert next(suspects(baseline, [of_kind("y", kind)], Proposal(()))).baseline == first


def test_a_few_partners_of_the_first_places_are_tried_in_however_many_layers() -> None:
    target = [tap(f"{place}.{layer}", 10 * layer + n, 1) for layer in range(9) for n, place in enumerate("stuvwxyz")]
    baseline = [tap(f"a.{number}", number, 1) for number in range(20)]
    found = [*suspects(baseline, target, Proposal(()))]
    tried = list(dict.fromkeys(pair.target for pair in found))
    assert {name[0] for name in tried} == set("stuvwxyz"[:FIRST])
    assert len(tried) == 9 * FIRST
    assert len(found) == OPTIONS * len(tried)
    # The likeliest partner of every tap is tried before the second of any.
    assert sorted(pair.target for pair in found[: len(tried)]) == sorted(tried)
    many = [tap(f"x.{layer}", layer, 1) for layer in range(MOST + 5)]
    assert len({pair.target for pair in suspects(baseline, many, Proposal(()))}) == MOST


def test_partners_have_as_many_elements_and_are_tried_in_the_layouts_of_other_pairs() -> None:
    value = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    turned = value.transpose(0, 1).contiguous()
    of_complex = RecordedTap.of("c", torch.view_as_complex(torch.randn(24, 2)), order=0)
    baseline = [RecordedTap.of("h", value), RecordedTap.of("fewer", value[:1]), of_complex]
    proposal = Proposal((Pair("other", "its", parse_layout("a b c -> b a c")),))
    (pair,) = suspects([*baseline, tap("other", 0, 5)], [RecordedTap.of("y", turned), tap("its", 0, 5)], proposal)
    assert (pair.baseline, pair.layout.text, pair.sureness) == ("h", "a b c -> b a c", "guess")
    # A flat tensor of another shape is tried in the order of its elements.
    (pair,) = suspects(baseline[:1], [RecordedTap.of("y", value.flatten())], Proposal(()))
    assert torch.equal(pair.layout.local(value), value.flatten())


def test_values_that_were_not_kept_are_fetched_from_their_own_side() -> None:
    a, y = (torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    baseline, target = [RecordedTap.of("a", a, keep=False)], [RecordedTap.of("y", y, keep=False)]
    ours, theirs = {"a": a}, {"y": y}
    found = suspects(baseline, target, Proposal(()), fetch_baseline=ours.get, fetch_target=theirs.get)
    assert [(pair.baseline, pair.target) for pair in found] == [("a", "y")]


def test_the_finite_numbers_show_how_alike_two_taps_are() -> None:
    own = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    masked = own.clone()
    masked[0, 1], masked[2, 3] = float("nan"), float("-inf")
    found = suspects([tap("other", 0, 5), RecordedTap.of("a", masked)], [RecordedTap.of("y", own)], Proposal(()))
    assert [pair.baseline for pair in found] == ["a", "other"]


def test_a_tap_that_passes_on_a_grafted_tensor_is_a_copy_of_it() -> None:
    baseline = [tap("given", 0, 0), tap("passed on", 1, 0), tap("other", 2, 1)]
    baseline.append(RecordedTap.of("twice", torch.cat(2 * [baseline[0].value])))  # type: ignore[list-item]
    is_copy = copies(baseline, Pair("given", "y"))
    assert [is_copy(Pair(each.name, "z")) for each in baseline] == [True, True, False, False]
