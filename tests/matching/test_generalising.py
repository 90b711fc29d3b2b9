"""A pair that was learned from some calls holds for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlab.base.world import Side
from graftlab.layouts import Layout, parse_layout
from graftlab.matching.generalising import general_layouts, general_pairs
from graftlab.matching.matcher import match_taps
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder
from graftlab.plan.pairs import Pairing
from graftlab.plan.plan import GraftPlan

REQUESTS = {0: 37, 1: 23}
STEPS = 3
LAYERS = 3

Show = Callable[..., None]


def recorder_of(program: Callable[[Show], None]) -> SketchRecorder:
    recorder = SketchRecorder()
    program(lambda name, value, **tags: recorder.tap(name, value, None, tags))
    return recorder


def matched(baseline: Callable[[Show], None], target: Callable[[Show], None]) -> Proposal:
    return match_taps(recorder_of(baseline).taps, recorder_of(target).taps)


def hidden(rid: int, t: int, layer: int, what: int) -> Tensor:
    """What one layer computes of a request: of all tokens at first, then of one a step."""
    seed = torch.Generator().manual_seed(1000 * rid + 100 * t + 10 * layer + what)
    return torch.randn(2, REQUESTS[rid] if t == 0 else 1, 8, generator=seed)


def served(requests: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    for rid in requests:
        for t in range(STEPS):
            for layer in range(LAYERS):
                yield rid, t, layer


def tagged(show: Show) -> None:
    for rid, t, layer in served((0, 1)):
        show("q", hidden(rid, t, layer, 0), layer=layer, rid=rid, t=t)
        show("out", hidden(rid, t, layer, 1), layer=layer, rid=rid, t=t)


def counted(requests: Sequence[int] = (0, 1)) -> Callable[[Show], None]:
    """The same in code that has no tags, and keeps only the last token of each layer's output."""

    def program(show: Show) -> None:
        for rid, t, layer in served(requests):
            show(f"blocks.{layer}.query", hidden(rid, t, layer, 0).transpose(0, 1).contiguous())
            show(f"blocks.{layer}.last", hidden(rid, t, layer, 1)[:, -1:].clone())

    return program


def seen(pairing: Pairing) -> tuple[Any, ...]:
    return pairing.name, pairing.key, pairing.tags, None if pairing.rule is None else pairing.rule.layout


def test_tags_that_number_requests_and_steps_are_left_open() -> None:
    proposal = matched(tagged, counted())
    assert len(proposal.graftable) == 2 * len(REQUESTS) * STEPS * LAYERS
    assert proposal.rules() == [
        {
            "baseline": "q[layer={n},rid=*,t=*]",
            "target": "blocks.{n}.query",
            "layout": "a b c -> b a c",
            "whole": "baseline",
        },
        {
            "baseline": "out[layer={n},rid=*,t=*]",
            "target": "blocks.{n}.last",
            "layout": "window(dim=1, start=-1, length=1)",
            "whole": "baseline",
        },
    ]
    plan = GraftPlan(pairs=proposal)  # type: ignore[arg-type]
    (mine,) = plan.pairings("baseline", "out", {"layer": 2, "rid": 8, "t": 900})
    (theirs,) = plan.pairings("target", "blocks.2.last", {})
    assert seen(mine) == seen(theirs)


def test_one_call_is_enough_where_both_sides_have_its_tags() -> None:
    def once(name: str) -> Callable[[Show], None]:
        return lambda show: (
            [show(name, hidden(0, 0, layer, 0), layer=layer, rid=7, t=0) for layer in range(LAYERS)] and None
        )

    assert matched(once("q"), once("attn.q")).rules() == [{"baseline": "q", "target": "attn.q"}]


def test_calls_in_another_order_keep_the_tags_that_tell_them_apart() -> None:
    proposal = matched(tagged, counted((1, 0)))
    assert len(proposal.graftable) == 2 * len(REQUESTS) * STEPS * LAYERS
    # The calls of request 0 come last on the target, so an open tag would pair different requests.
    assert not any("*" in rule["baseline"] for rule in proposal.rules())
    assert {pair.target for pair in proposal.of_baseline("q[layer=1,rid=0,t=0]")} == {"blocks.1.query#3"}


def test_a_layer_is_never_left_open_even_if_there_is_one() -> None:
    def one(show: Show) -> None:
        show("q", hidden(0, 0, 0, 0), layer=0, t=0)

    proposal = matched(one, lambda show: show("blocks.0.query", hidden(0, 0, 0, 0)))
    assert proposal.rules() == [{"baseline": "q[layer=0,t=*]", "target": "blocks.0.query"}]


def test_a_general_pair_is_as_sure_and_as_near_as_the_weakest_of_its_calls() -> None:
    order: Any = {side: tuple(f"x[t={t}]" for t in range(3)) for side in ("baseline", "target")}
    pairs = [
        Pair(f"x[t={t}]", f"x[t={t}]", sureness=sureness, rel=rel)
        for t, (sureness, rel) in enumerate((("near", 1e-6), ("near", 3e-6), ("exact", 0.0)))
    ]
    (found,) = general_pairs(pairs, order)
    assert (found.baseline, found.sureness, found.rel) == ("x", "near", 3e-6)


def test_calls_that_match_in_different_layouts_keep_their_own() -> None:
    def general(*layouts: str) -> list[Pair]:
        pairs = [Pair(f"x[t={t}]", f"y[t={t}]", parse_layout(layout)) for t, layout in enumerate(layouts)]
        order = {"baseline": [each.baseline for each in pairs], "target": [each.target for each in pairs]}
        return general_pairs(pairs, order)  # type: ignore[arg-type]

    assert [(each.baseline, each.layout.text) for each in general("a b -> b a", "same")] == [
        ("x[t=0]", "a b -> b a"),
        ("x[t=1]", "same"),
    ]
    assert [(each.baseline, each.target) for each in general("same", "same")] == [("x", "y")]


def test_a_split_is_written_by_the_size_that_all_calls_share() -> None:
    def flat(show: Show) -> None:
        for t in range(STEPS):
            show("x", hidden(0, t, 0, 0).reshape(-1, 8))

    def batched(show: Show) -> None:
        for t in range(STEPS):
            show("y", hidden(0, t, 0, 0))

    (rule,) = matched(flat, batched).rules()
    assert rule["layout"] == "rearrange('(a b) c -> a b c', a=2)"
    assert (rule["baseline"], rule["target"]) == ("x", "y")


def test_a_layout_is_given_to_all_calls_only_if_it_fits_the_values_of_each() -> None:
    whole, one = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)[None] + 1
    last = "window(dim=0, start=-1, length=1)"

    def layouts(decoded: Tensor, sureness: Any = "exact", side: Side = "baseline") -> list[str]:
        outer = {"x": RecordedTap.of("x", whole), "x#1": RecordedTap.of("x#1", one)}
        inner = {"y": RecordedTap.of("y", whole[-1:]), "y#1": RecordedTap.of("y#1", decoded)}
        pairs = [
            Pair(*(("x", "y") if side == "baseline" else ("y", "x")), parse_layout(last), side, "exact", 0.0),
            Pair(*(("x#1", "y#1") if side == "baseline" else ("y#1", "x#1")), Layout(), side, sureness, 0.0),
        ]
        sides = (outer, inner) if side == "baseline" else (inner, outer)
        return [pair.layout.text for pair in general_layouts(pairs, *sides)]

    assert layouts(one) == layouts(one, side="target") == [last, last]
    assert layouts(one * 1.01) == [last, "same"]
    # A pair that no values show has no layout to give, nor to be changed.
    assert layouts(one, "rule") == [last, "same"]


@pytest.mark.parametrize(("tags", "kept"), [("layer={n},t={t}", "layer={n},t=*"), ("n={n},t={t}", "n={n},t=*")])
def test_a_tag_that_is_a_number_of_the_partners_name_is_kept(tags: str, kept: str) -> None:
    calls = [(n, t) for t in (0, 1) for n in (0, 1)]
    pairs = [Pair(f"q[{tags.format(n=n, t=t)}]", f"b.{n}.q" + "#1" * t) for n, t in calls]
    order: Any = {"baseline": [each.baseline for each in pairs], "target": [each.target for each in pairs]}
    found = [(pair.baseline, pair.target) for pair in general_pairs(pairs, order)]
    assert found == [(f"q[{kept.format(n=n)}]", f"b.{n}.q") for n in (0, 1)]


def test_a_layout_of_a_longer_call_is_given_to_calls_of_other_lengths_on_either_side() -> None:
    last, second = (f"window(dim=0, start={start}, length=1)" for start in (-1, 1))
    long, short = (torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows)) for rows in (3, 2))
    outer = {"x": RecordedTap.of("x", long), "x#1": RecordedTap.of("x#1", short)}
    inner = {"y": RecordedTap.of("y", long[-1:]), "y#1": RecordedTap.of("y#1", short[1:])}
    for whole, sides in (("baseline", (outer, inner)), ("target", (inner, outer))):
        names = [tuple(f"{'x' if side is outer else 'y'}{call}" for side in sides) for call in ("", "#1")]
        pairs = [Pair(*names[0], parse_layout(last), whole), Pair(*names[1], parse_layout(second), whole)]  # type: ignore[arg-type]
        assert [pair.layout.text for pair in general_layouts(pairs, *sides)] == [last, last]


def general(*names: tuple[str, str], more: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """The general names of pairs of calls in their order; ``more`` are calls of either side before them."""
    order: Any = {
        side: list(dict.fromkeys([*(name for each, name in more if each == side), *(pair[n] for pair in names)]))
        for n, side in enumerate(("baseline", "target"))
    }
    return [(pair.baseline, pair.target) for pair in general_pairs([Pair(*each) for each in names], order)]


def test_a_tag_is_left_out_only_if_all_calls_have_it_alike() -> None:
    assert general(("q[t=0]", "y[t=0]"), ("q[t=1]", "y[t=1]")) == [("q", "y")]
    assert general(("q[t=0]", "y[t=0]"), ("q[t=1]", "y[t=5]")) == [("q[t=*]", "y[t=*]")]
    assert general(("q[t=0]", "y[t=0]"), ("q[t=1]", "y")) == [("q[t=*]", "y[t=*]"), ("q[t=*]", "y")]


def test_a_tag_that_is_no_number_is_open_though_the_partners_name_has_numbers() -> None:
    assert general(("q[t=decode]", "b.0.y")) == [("q[t=*]", "b.0.y")]


def test_open_tags_join_no_calls_that_have_other_partners() -> None:
    pairs = [("q[t=0]", "y[kind=a]"), ("q[t=1]", "y[kind=b]#1")]
    assert general(*pairs, more=[("target", "y[kind=b]")]) == pairs
