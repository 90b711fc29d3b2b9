"""What a rank records of its taps for a match, and what it overwrites with the tensors of pairs that are matched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.grafters import StandInGrafter, become_rank

import graftlab as gl
from graftlab.layouts import parse_layout
from graftlab.matching import recorded_taps
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.sketch import sketch_of
from graftlab.ranks import match_recorder
from graftlab.ranks.match_recorder import (
    MatchGraft,
    MatchRecord,
    StepRecord,
    forget_match,
    record_taps,
    recorded_value,
)
from graftlab.taps.calls import Here

X, Y = torch.arange(8.0).reshape(2, 4), torch.arange(8.0, 16.0).reshape(2, 4)
PLENTY = 1 << 20


@pytest.fixture
def grafter(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInGrafter]:
    yield become_rank(monkeypatch, "target", x=X)
    forget_match()


pytestmark = pytest.mark.usefixtures("grafter")


def record(code: Callable[..., Any] | str, *args: Any, **given: Any) -> MatchRecord:
    options: dict[str, Any] = {"budget": PLENTY, "send": PLENTY, "grafts": {}, "forget": [], **given}
    kwargs = options.pop("kwargs", {})
    return record_taps(code if isinstance(code, str) else partial(code, *args, **kwargs), **options)


def taps() -> None:
    gl.tap("x", X)
    gl.tap("y", Y)
    gl.tap("x", Y)


def values(found: MatchRecord) -> dict[str, Any]:
    return {tap.name: None if tap.value is None else tap.value.tolist() for tap in found.taps}


# ---- what is recorded -----------------------------------------------------------------------------------------------


def test_values_are_sent_up_to_a_limit_and_the_others_held_for_later_calls() -> None:
    found = record(taps, send=64)
    assert values(found) == {"x": X.tolist(), "y": Y.tolist(), "x#1": None}
    held = recorded_value("x#1")
    assert held is not None
    assert held.tolist() == Y.tolist()
    assert recorded_value("x") is None
    # Those of an earlier run are dropped.
    assert [*values(record(taps, send=63)).values()] == [X.tolist(), None, None]
    assert recorded_value("y") is not None
    record(lambda: gl.tap("z", X))
    assert recorded_value("y") is None


@pytest.mark.parametrize("send", [8, 0])
def test_values_of_a_device_are_sent_or_held_on_the_host(send: int) -> None:
    on_host = torch.ones(2)
    on_device = Mock(numel=lambda: 2, element_size=lambda: 4, cpu=lambda: on_host)
    tap = RecordedTap.of("x", on_host)
    assert tap.elements is not None
    tap.value = on_device
    recorder: Any = SimpleNamespace(taps=[tap], layouts={}, skipped={}, notes=[])
    held: dict[str, RecordedTap] = {}
    (found,) = match_recorder._record_of(recorder, send, held).taps
    kept = held["x"].value if held else None
    assert (found.value, kept) == ((on_host, None) if send else (None, on_host))
    assert "elements" not in vars(found)


def tap_weight(name: str, weight: torch.Tensor) -> None:
    gl.tap(name, weight, kind="param")


def test_weights_beyond_what_is_sent_stay_and_take_nothing_from_the_budget() -> None:
    weight = torch.arange(8.0)

    def code() -> None:
        tap_weight("w", weight)
        gl.tap("x", X)

    found = record(code, budget=X.nbytes, send=X.nbytes)
    # Values that are computed come first: a weight can be fetched later too.
    assert values(found) == {"w[kind=param]": None, "x": X.tolist()}
    fetched = recorded_value("w[kind=param]")
    assert fetched is not None
    assert fetched.tolist() == weight.tolist()
    assert fetched.data_ptr() != weight.data_ptr()


def test_parts_of_a_whole_are_sent_before_other_values() -> None:
    def code() -> None:
        gl.tap("x", X)
        gl.tap("part", Y, layout="shard(0)", kind="param")

    assert values(record(code, send=Y.nbytes)) == {"x": None, "part[kind=param]": Y.tolist()}


def test_a_weight_that_was_not_copied_has_no_value_once_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_taps, "COPIED_WEIGHTS", 0)
    weight = torch.arange(8.0)
    record(lambda: tap_weight("w", weight), send=0)
    assert recorded_value("w[kind=param]") is not None
    weight[2] = 2.5
    assert recorded_value("w[kind=param]") is None
    # One that has changed within the run is not sent either.
    found = record(lambda: (tap_weight("w", weight), weight.add_(1)))
    assert values(found) == {"w[kind=param]": None}


def test_a_copied_weight_has_its_value_of_the_run_even_if_training_changes_it() -> None:
    weight = torch.arange(8.0)
    found = record(lambda: (tap_weight("w", weight), weight.add_(1)))
    assert values(found) == {"w[kind=param]": list(range(8))}
    held = record(lambda: (tap_weight("w", weight), weight.add_(1)), send=0)
    assert values(held) == {"w[kind=param]": None}
    fetched = recorded_value("w[kind=param]")
    assert fetched is not None
    assert fetched.tolist() == list(range(1, 9))


@pytest.mark.parametrize("budget", [32, 31])
def test_a_weight_that_is_computed_from_codes_is_kept_only_within_the_budget(budget: int) -> None:
    scaled = {"quantisation_scale": torch.tensor(0.5)}
    codes, weight = torch.arange(8, dtype=torch.int8), torch.arange(8.0)

    def code() -> None:
        gl.tap("of codes", codes, extras=scaled, kind="param")

    for each in (code, lambda: gl.tap("made", lambda: weight / 2, kind="param")):
        (found,) = record(each, budget=budget, send=0).taps
        assert found.digest is not None
        kept = recorded_value(found.name)
        assert (kept is None) == (budget < 32)
        assert kept is None or kept.tolist() == (weight / 2).tolist()


@pytest.mark.parametrize("offset", [0, 3])
def test_a_weight_whose_memory_was_released_has_no_value(monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    monkeypatch.setattr(recorded_taps, "COPIED_WEIGHTS", 0)
    whole = torch.arange(16.0)
    weight = whole[offset:]
    for send in (PLENTY, 0):
        found = record(lambda: tap_weight("w", weight), send=send)
        kept = values(found)["w[kind=param]"] if send else recorded_value("w[kind=param]")
        assert kept is not None
    # As FSDP does after the forward pass of a module.
    for left in (15, offset):
        whole.untyped_storage().resize_(4 * left)
        assert recorded_value("w[kind=param]") is None
    whole = torch.arange(16.0)
    weight = whole[offset:]
    found = record(lambda: (tap_weight("w", weight), whole.untyped_storage().resize_(0)))
    assert values(found) == {"w[kind=param]": None}
    assert found.taps[0].digest is not None


def test_an_unchanged_weight_is_sketched_once_in_all_runs_of_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(recorded_taps, "sketch_of", lambda value: made.append(value.numel()) or sketch_of(value))
    weight = torch.arange(8.0)
    found = [record(lambda: tap_weight("w", weight)).taps[0] for _ in range(2)]
    assert made == [8]
    assert found[0].sketch is found[1].sketch
    weight[0] = -3.0
    (changed,) = record(lambda: tap_weight("w", weight)).taps
    assert made == [8, 8]
    assert changed.sketch.quantiles[0] == -3.0
    forget_match()
    record(lambda: tap_weight("w", weight))
    assert made == [8, 8, 8]


def test_beyond_the_budget_taps_are_recorded_without_their_values() -> None:
    found = record(taps, budget=95)
    assert values(found) == {"x": X.tolist(), "y": Y.tolist(), "x#1": None}
    assert recorded_value("x#1") is None


def test_the_code_is_a_function_with_arguments_or_an_expression_on_the_rank() -> None:
    found = record(lambda x, *, y: gl.tap("sum", x + y), X, kwargs={"y": Y})
    assert values(found) == {"sum": (X + Y).tolist()}
    assert values(record("__import__('graftlab').tap('x', x)")) == {"x": X.tolist()}


def test_what_is_no_tensor_is_named_with_the_reason() -> None:
    def code() -> None:
        for name, value in (("empty", torch.empty(0)), ("text", "a"), ("x", X), ("meta", X.to("meta"))):
            gl.tap(name, value)
        gl.tap("none", torch.empty(0), layout="shard(dim=0, mesh='tp')")

    found = record(code)
    assert [tap.name for tap in found.taps] == ["x"]
    assert sorted(found.skipped) == ["empty", "meta", "none", "text"]
    assert found.layouts == {}


def test_later_steps_are_left_alone_and_reported_once(grafter: StandInGrafter) -> None:
    def code() -> None:
        gl.tap("x", X)
        gl.step()
        gl.tap("y", Y)
        gl.tap("z", Y)

    found = record(code)
    assert [tap.name for tap in found.taps] == ["x"]
    assert found.notes == ["taps after the first gl.step() are not matched"]


def test_taps_that_checkpointing_runs_again_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter(["", "recompute", "recompute"])
    monkeypatch.setattr(match_recorder, "recompute_status", lambda: next(statuses))
    found = record(taps)
    assert values(found) == {"x": X.tolist()}
    assert found.notes == ["taps that activation checkpointing runs again are not matched"]


def test_layouts_are_recorded_and_one_that_cannot_be_is_a_note() -> None:
    def code() -> None:
        gl.tap("whole", X)
        gl.tap("split", X, layout="shard(dim=0, mesh='tp')")
        gl.tap("unread", X, layout="shard(dim=")

    found = record(code)
    assert [tap.name for tap in found.taps] == ["whole", "split", "unread"]
    assert {name: each.layout.text for name, each in found.layouts.items()} == {"split": "shard(dim=0, mesh='tp')"}
    (note,) = found.notes
    assert note.startswith("unread: ")


def test_a_layout_that_these_ranks_do_not_determine_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_recorder, "here", lambda: Here("target", 0, 4, torch.device("cpu"), {}))
    found = record(lambda: gl.tap("x", X, layout="t[tp] h[cp]"))
    assert (values(found), found.layouts) == ({"x": X.tolist()}, {})
    (note,) = found.notes
    assert note.startswith("x: t[tp] h[cp]: it is unknown how 4 ranks are split over ['tp', 'cp']")


# ---- what is overwritten --------------------------------------------------------------------------------------------


def shown_with(grafts: dict[str, list[MatchGraft]], value: torch.Tensor = X, **given: Any) -> tuple[Any, MatchRecord]:
    got: list[Any] = []
    found = record(lambda: got.append(gl.tap("x", value.clone())), grafts=grafts, **given)
    return got[0], found


def test_a_matched_pairs_tensor_overwrites_the_tap_after_it_is_recorded() -> None:
    graft = MatchGraft(parse_layout("same"), "baseline", Y.double())
    shown, found = shown_with({"x": [graft]})
    assert torch.equal(shown, Y)
    assert shown.dtype == X.dtype
    assert values(found) == {"x": X.tolist()}
    # It stays in force until it is forgotten.
    assert torch.equal(shown_with({})[0], Y)
    assert torch.equal(shown_with({}, forget=["x", "unknown"])[0], X)


def test_a_tensor_that_a_tap_makes_itself_is_overwritten_and_its_function_returned() -> None:
    made, got = X.clone(), list[Any]()

    def make() -> torch.Tensor:
        return made

    found = record(lambda: got.append(gl.tap("x", make)), grafts={"x": [MatchGraft(parse_layout("same"), "target", Y)]})
    assert (values(found), made.tolist()) == ({"x": X.tolist()}, Y.tolist())
    assert got == [make]


def test_a_new_match_drops_what_a_stopped_one_left_in_force() -> None:
    left = MatchGraft(parse_layout("same"), "baseline", Y)
    shown_with({"x": [left], "other": [left]})
    assert torch.equal(shown_with({"other": [left]}, forget=None)[0], X)


def test_the_end_of_a_match_releases_its_grafts_and_its_values() -> None:
    shown_with({"x": [MatchGraft(parse_layout("same"), "baseline", Y)]}, send=0)
    assert recorded_value("x") is not None
    forget_match()
    assert recorded_value("x") is None
    assert torch.equal(shown_with({})[0], X)


def test_a_graft_is_laid_out_in_the_direction_of_its_pair() -> None:
    part = parse_layout("part(index=1, of=[1, 1], dim=0)")
    shown, _ = shown_with({"x": [MatchGraft(part, "baseline", torch.cat([X, Y]))]})
    assert torch.equal(shown, Y)
    # The model continues in its own dtype.
    wide, _ = shown_with({"x": [MatchGraft(part, "baseline", torch.cat([X, Y]).double())]}, forget=["x"])
    assert (wide.dtype, wide.tolist()) == (X.dtype, Y.tolist())
    # Several parts of a whole: the rest of it stays the target's.
    both = [MatchGraft(parse_layout(f"part(index={n}, of=[1, 1], dim=0)"), "target", Y[n : n + 1]) for n in (0, 1)]
    assert torch.equal(shown_with({"x": both[1:]}, forget=["x"])[0], torch.stack([X[0], Y[1]]))
    assert torch.equal(shown_with({"x": both}, forget=["x"])[0], Y)


def test_a_graft_that_does_not_fit_is_a_note_and_changes_nothing() -> None:
    shown, found = shown_with({"x": [MatchGraft(parse_layout("same"), "baseline", torch.ones(3, 3))]})
    assert torch.equal(shown, X)
    (note,) = found.notes
    assert note.startswith("x could not be grafted to match the taps after it: ")


# ---- one step of a job ----------------------------------------------------------------------------------------------


def test_the_first_step_under_a_plan_is_recorded_under_the_names_in_pairs() -> None:
    passed: list[str] = []

    def grafter_tap(name: str, value: Any, extras: Any, tags: Any, replace: bool) -> Any:
        passed.append(name)
        return Y

    record = StepRecord(["x"], PLENTY, 32, grafter_tap)
    handler = record.handler_at(5)
    assert torch.equal(handler.tap("x", X, None, {}), Y)
    assert torch.equal(handler.tap("y", X, None, {}), X)
    assert record.found is None
    handler = record.handler_at(6)
    assert handler.tap("x", X, None, {}) is X
    assert passed == ["x"]
    found: Any = record.found
    assert values(found) == {"x": X.tolist(), "y": None}
    held = record.value_held("y")
    assert held is not None
    assert held.tolist() == X.tolist()
    assert record.value_held("x") is None
    record.handler_at(7)
    assert record.found is found


def test_a_step_of_a_job_is_recorded_whatever_its_number() -> None:
    """A job may have called gl.step() since the plan came."""
    record = StepRecord([], PLENTY, PLENTY, lambda name, value, *rest: value)
    handler = record.handler_at(5)
    gl.step()
    handler.tap("x", X, None, {})
    record.handler_at(6)
    found: Any = record.found
    assert (values(found), found.notes) == ({"x": X.tolist()}, [])
