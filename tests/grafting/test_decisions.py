"""Decisions about taps on one rank, their caching, and the addresses of calls."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.base.tags import identity
from graftlab.base.world import Place
from graftlab.grafting import decisions as module
from graftlab.grafting.batch_rows import BatchRows
from graftlab.grafting.decisions import (
    Addresses,
    Decisions,
    PairedTaps,
    TapLookup,
    all_tags,
    given_tags,
    recompute_status,
)
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import Action, GraftPlan

BASELINE, TARGET = Place("baseline", 0, 1, 2), Place("target", 1, 2, 1)


def no_warning(name: str, what: str) -> None:
    raise AssertionError(f"{name}: {what}")


def asked(name: str = "h", around: Mapping[str, Any] | None = None, /, **own: Any) -> TapLookup:
    """A tap as the grafter asks about it."""
    return (name, tuple((around or {}).items()), *own.items())


def made(place: Place = TARGET, step: int = 0, taps: PairedTaps | None = None, **plan: Any) -> Decisions:
    return Decisions(GraftPlan(**plan), step, taps or paired(place=place))


def paired(report: Any = lambda tags: None, place: Place = TARGET) -> PairedTaps:
    return PairedTaps(place, report, no_warning)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each tap's filters are evaluated."""
    count: Counter[str] = Counter()
    original = GraftPlan.action_for

    def counting(plan: GraftPlan, tags: Mapping[str, object]) -> Action:
        count[str(tags["name"])] += 1
        return original(plan, tags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraftPlan, "action_for", counting)
        yield count


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "action", "baseline_sends"),
    [
        ({}, Action("b2t"), True),
        ({"b2t": "layer == 3"}, Action("b2t", graft=True), True),
        ({"t2b": "layer == 3"}, Action("t2b", graft=True), False),
        ({"compare": None, "keep": "True"}, Action("b2t", keep=True), True),
        ({"b2t": "True", "t2b": "True"}, Action(overlap=True), False),
    ],
    ids=["compare", "b2t", "t2b", "keep", "overlap"],
)
def test_a_decision_has_the_plans_action_and_the_sending_side(
    plan: dict[str, Any], action: Action, baseline_sends: bool
) -> None:
    for place in (BASELINE, TARGET):
        decision = made(place, **plan).of(asked(layer=3))
        assert decision is not None
        assert decision.action == action
        sends = action.direction is not None and (place.side == "baseline") is baseline_sends
        assert decision.sends is sends


def test_tap_that_no_filter_matches_does_nothing() -> None:
    assert made(compare="name == 'other'").of(asked()) is None


def test_tap_that_a_different_rank_may_use_still_has_a_decision() -> None:
    decision = made(compare="rank == 0").of(asked())
    assert decision is not None
    assert decision.action == Action()
    assert made(compare="tp_rank == 0").of(asked(tp_rank=1)) is not None


def test_a_tap_has_a_decision_if_only_a_later_pair_has_an_action() -> None:
    decision = made(pairs=[("a", "h"), ("b", "h")], compare="baseline_name == 'b'").of(asked())
    assert decision is not None
    assert [each.action for each in (decision, *decision.others)] == [Action(), Action("b2t")]


def test_rows_are_kept_by_the_names_of_each_side() -> None:
    rows, rule = BatchRows(), PairRule("h", "x", "rows(of='ids', into='tokens')", "baseline")
    for name in ("ids", "tokens", "other"):
        rows.show(name, torch.arange(3), ())
    # The whole has the rows of ids, its part those of tokens.
    assert [{*(rows.of(rule, is_whole, ()) or {})} for is_whole in (True, False)] == [{"ids"}, {"tokens"}]
    assert rows.of(PairRule("h", "x"), True, ()) is None


def test_filters_see_own_and_ambient_tags_with_own_tags_first() -> None:
    decision = made(step=7, compare="layer == 3 and phase == 'decode' and step == 7 and side == 'target'").of(
        asked("h", {"phase": "decode", "layer": 1}, layer=3)
    )
    assert decision is not None
    assert decision.tags == {
        **{"name": "h", "step": 7, "side": "target", "rank": 1, "recompute_status": "original"},
        **{"phase": "decode", "layer": 3},
    }
    assert decision.tags_at(9, "recompute") == {**decision.tags, "step": 9, "recompute_status": "recompute"}


def test_the_address_and_the_row_have_the_paired_name_and_the_pairing_the_sides_own() -> None:
    decisions = made(rename={"target": {r"^model\.": ""}})
    decision = decisions.of(asked("model.h", layer=1))
    assert decision is not None
    assert (decision.name, decision.tags["name"]) == ("h", "h")
    assert decision.pairing is not None
    assert (decision.pairing.baseline_name, decision.pairing.target_name) == ("h", "model.h")
    baseline = made(BASELINE, rename={"target": {r"^model\.": ""}}).of(asked("model.h"))
    assert baseline is not None
    assert baseline.name == "model.h"


@pytest.mark.parametrize("name", ["", None, 3, b"h", ["h"]], ids=repr)
def test_name_other_than_text_is_refused(name: Any) -> None:
    with pytest.raises(gl.TagError, match="the name must be a non-empty string"):
        made().of(asked(name))


@pytest.mark.parametrize("tag", ["name", "step", "side", "rank", "recompute_status"])
def test_a_tag_that_graftlab_sets_is_refused(tag: str) -> None:
    with pytest.raises(gl.TagError, match=rf"gl.tap\('h'\): the tags \['{tag}'\] are set by graftlab itself"):
        made().of(("h", (), (tag, 1)))


# ---- what is remembered ---------------------------------------------------------------------------------------------


def test_each_tag_set_is_decided_once() -> None:
    decisions = made(b2t="layer == 3", compare=None)
    with counted() as count:
        first = [decisions.of(asked(layer=layer)) for layer in (3, 4)]
        again = [decisions.of(asked(layer=layer)) for layer in (3, 4)]
    assert count["h"] == 2
    assert again[0] is first[0]
    assert again[1] is first[1] is None


def test_ambient_tags_are_part_of_the_cached_key() -> None:
    decisions = made(compare="phase == 'decode'")
    assert decisions.of(asked("h", {"phase": "prefill"})) is None
    assert decisions.of(asked("h", {"phase": "decode"})) is not None


def test_tags_that_cannot_be_hashed_are_decided_each_time() -> None:
    decisions = made(compare="2 in heads")
    with counted() as count:
        answers = [decisions.of(asked(heads=heads)) for heads in ({1, 2}, {1}, {1, 2})]
    assert [answer is not None for answer in answers] == [True, False, True]
    assert count["h"] == 3


def test_a_filter_that_looks_at_the_recomputation_is_asked_at_each_call() -> None:
    """One tag set is then decided in two ways."""
    decisions = made(compare="recompute_status == 'recompute'")
    found: list[bool] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        found.append(decisions.of(asked()) is not None)
        return x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert found == [False, True]
    assert not decisions.known


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(
    ("compare", "expected"),
    [
        ("recompute_status == 'disabled'", [False, False, True]),
        ("'disabled' != recompute_status", [True, True, False]),
        ("recompute_status in {'disabled', 'recompute'}", [False, True, True]),
        ("recompute_status == 'original'", [True, False, True]),
    ],
)
def test_outside_checkpointing_the_status_equals_disabled_too(
    compare: str, expected: list[bool], use_reentrant: bool
) -> None:
    decisions = made(compare=compare)
    found: list[bool] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        found.append(decisions.of(asked()) is not None)
        return x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    block(torch.ones(2))
    assert found == expected


def test_tag_sets_that_never_repeat_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DECISIONS_LIMIT", 5)
    decisions = made()
    for number in range(23):
        assert decisions.of(asked(rid=number)) is not None
        assert 1 <= len(decisions.known) <= 5


def test_plans_that_differ_only_in_filters_share_the_pairs_of_taps(monkeypatch: pytest.MonkeyPatch) -> None:
    taps, asked_for = paired(), []
    pairings = GraftPlan.pairings

    def counted(plan: GraftPlan, side: Any, name: str, given: Any) -> Any:
        asked_for.append(name)
        return pairings(plan, side, name, given)

    monkeypatch.setattr(GraftPlan, "pairings", counted)
    for step, graft in enumerate(("True", "layer == 3", "step == 2")):
        decision = made(step=step, taps=taps, b2t=graft).of(asked(layer=3))
        assert decision is not None
        assert decision.action.graft
    assert asked_for == ["h"]
    for name in ("k", "l"):
        found = made(taps=taps, rename={"target": {"h": name}}).of(asked(layer=3))
        assert found is not None
        assert (found.name, found.tags["name"]) == (name, name)
    for partner in ("a", "b"):
        found = made(taps=taps, pairs=(PairRule(partner, "h"),)).of(asked(layer=3))
        assert found is not None
        assert found.pairing is not None
        assert found.pairing.baseline_name == partner


def test_a_tensor_that_was_given_as_a_tag_is_not_kept_alive() -> None:
    taps = PairedTaps(TARGET, lambda tags: None, lambda name, what: None)
    value = torch.ones(2)
    gone = weakref.ref(value)
    assert made(taps=taps).of(asked(mask=value)) is not None
    del value
    assert gone() is None


def test_what_cannot_be_a_tag_is_left_out_with_a_warning_that_a_repeated_run_spares() -> None:
    said: list[tuple[str, str]] = []
    around, own = {"phase": "decode", "mask": None}, {"mask": torch.ones(2)}
    assert given_tags("h", around, own, lambda *each: said.append(each)) == ({"phase": "decode"}, False)
    [(name, warning)] = said
    assert (name, warning.partition(",")[0]) == ("h", "mask=Tensor cannot be a tag")
    assert given_tags("h", around, own, None) == ({"phase": "decode"}, False)
    assert given_tags("h", around, {}, no_warning) == (around, True)


# ---- what is seen ---------------------------------------------------------------------------------------------------


def test_each_tag_set_is_reported_once_under_any_plan() -> None:
    reported: list[dict[str, Any]] = []
    taps = paired(reported.append)
    for compare in ("False", "layer == 3", "recompute_status == 'original'"):
        decisions = made(taps=taps, compare=compare)
        for layer in (3, 4, 3):
            decisions.of(asked("h", {"dtype": torch.float16}, layer=layer))
    own = {"dtype": "torch.float16"}
    tags = {"name": "h", "step": 0, "side": "target", "rank": 1, "recompute_status": "original"}
    assert reported == [{**tags, **own, "layer": 3}, {**tags, **own, "layer": 4}]


def test_a_tag_set_is_reported_in_a_recomputation_too() -> None:
    reported: list[dict[str, Any]] = []
    decisions = made(taps=paired(reported.append), compare="recompute_status == 'recompute'")

    def block(x: torch.Tensor) -> torch.Tensor:
        decisions.of(asked())
        return x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert [tags["recompute_status"] for tags in reported] == ["original", "recompute"]


def test_a_limited_number_of_tag_sets_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SEEN_LIMIT", 3)
    reported: list[dict[str, Any]] = []
    decisions = made(taps=paired(reported.append))
    for number in range(9):
        decisions.of(asked(rid=number))
    assert [tags["rid"] for tags in reported] == [0, 1, 2]


# ---- addresses ------------------------------------------------------------------------------------------------------


def test_calls_of_one_tap_are_numbered_within_the_step() -> None:
    decisions = made()
    addresses = Addresses(4, no_warning)
    calls = [asked(layer=1), asked(layer=2), asked(layer=1), asked("k"), asked(layer=1)]
    keys = [addresses.next(decision) for call in calls if (decision := decisions.of(call))]
    assert [(key.name, key.occurrence) for key in keys] == [("h", 0), ("h", 0), ("h", 1), ("k", 0), ("h", 2)]
    assert {key.step for key in keys} == {4}
    decision = decisions.of(asked(layer=1))
    assert decision is not None
    assert Addresses(5, no_warning).next(decision).occurrence == 0


def test_a_pair_of_one_call_leaves_the_other_calls_of_its_tap_alone() -> None:
    decision, addresses = made(BASELINE, pairs=[("drop#1", "drop.1")]).of(asked("drop")), Addresses(0, no_warning)
    assert decision is not None
    calls = [[key and (key.name, key.occurrence) for _, key in addresses.of_pairs(decision)] for _ in range(3)]
    assert calls == [[None], [(decision.name, 0)], [None]]


def test_a_recomputed_forward_is_numbered_by_itself() -> None:
    decision, addresses = made().of(asked()), Addresses(0, no_warning)
    assert decision is not None
    found: list[tuple[str, int]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            key = addresses.next(decision)
            assert key.recompute_status == recompute_status()
            found.append((key.recompute_status, key.occurrence))
        return x.sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert found == [("original", 0), ("original", 1), ("recompute", 0), ("recompute", 1)]


own_tags = st.dictionaries(
    st.sampled_from(["layer", "phase", "tp_rank", "pp_rank"]),
    st.sampled_from([None, 0, 1, 1.0, True, "1", "decode", (1, 2), float("nan")]),
)


@given(own_tags, own_tags)
def test_two_calls_have_one_address_exactly_when_they_are_one_tap(one: dict[str, Any], other: dict[str, Any]) -> None:
    keys = []
    for place, own in ((BASELINE, one), (TARGET, other)):
        decision = made(place).of(asked(**own))
        assert decision is not None
        keys.append(Addresses(0, no_warning).next(decision))
    are_one = identity(all_tags("h", one, BASELINE, 0)) == identity(all_tags("h", other, TARGET, 0))
    assert (keys[0] == keys[1]) is are_one
