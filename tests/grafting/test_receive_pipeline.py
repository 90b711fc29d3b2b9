"""The receive pipeline from one receipt to the row and the resulting tensor: every possible result."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graftlab as gl
from graftlab.base.world import Place
from graftlab.diffs.measure import measure
from graftlab.exchange.contract import Contribution, Receipt
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.receive_pipeline import ReceivePipeline
from graftlab.grafting.tap_rows import TapCall, TapResult, row_of
from graftlab.grafting.tensors import SentExtras
from graftlab.layouts import Layout, RankLayout
from graftlab.plan.plan import Action, GraftPlan
from graftlab.rows.schema import STATISTICS, Row
from graftlab.transforms import GraftTransformInput, Outcome, TransformSpec

TARGET = Place("target", 0, 1, 2)
COMPARE, GRAFT = Action("b2t"), Action("b2t", graft=True)
KEEP, GRAFT_AND_KEEP = Action("b2t", keep=True), Action("b2t", graft=True, keep=True)
PATH = "graftlab.transforms.align_by_request"


def of_all_taps(transform: Callable[..., Any] | TransformSpec) -> TransformSpec:
    return replace(TransformSpec.draft(transform), where="True")


def call(own: torch.Tensor, action: Action = COMPARE, place: Place = TARGET) -> TapCall:
    tags = {"name": "h", "step": 4, "side": place.side, "rank": place.rank, "recompute_status": "original", "layer": 3}
    return TapCall(2, 4, 9, tags, action, place, plan_version=5, occurrence=1, began=0.0, tensor=own)


def receipt(*sent: Any, **more: Any) -> Receipt:
    """What each of the ranks sent, in rank order; None for one that sent nothing."""
    tensors = [(rank, torch.as_tensor(value)) for rank, value in enumerate(sent) if value is not None]
    return Receipt([Contribution(rank, tensor, None) for rank, tensor in tensors], **more)


class Receiver:
    """ReceivePipeline, with what they keep and what they tell the user."""

    def __init__(self, transform: Callable[..., Any] | TransformSpec | None = None, budget: int = 1 << 20) -> None:
        self.kept = KeptPairs(budget)
        self.told: list[tuple[str, str]] = []
        self.pipeline = ReceivePipeline(self.kept, lambda name, what: self.told.append((name, what)))
        self.is_given = transform is not None
        self.pipeline.adopt(GraftPlan(transform=[] if transform is None else [of_all_taps(transform)]))

    def take(self, call: TapCall, came: Receipt, **more: Any) -> TapResult:
        if self.is_given:
            call = call._replace(action=replace(call.action, transform=0))
        return self.pipeline.take(call, None, came, **more)


def first(graft_input: GraftTransformInput) -> torch.Tensor:
    return graft_input.received_list[0]


def taken(own: torch.Tensor, came: Receipt, action: Action = COMPARE, **more: Any) -> tuple[TapResult, Row]:
    handler = Receiver(**more)
    made = call(own, action)
    result = handler.take(made, came)
    handler.pipeline.log_grafts()
    return result, row_of(made, result, 0.5)


# ---- compared and grafted -------------------------------------------------------------------------------------------


def test_a_comparison_measures_and_touches_nothing() -> None:
    own, theirs = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    result, row = taken(own, receipt(theirs))
    assert (row.status, result.result, own.tolist()) == ("compared", None, [1.0, 2.0])
    assert {name: getattr(row, name) for name in STATISTICS} == asdict(measure(theirs, own))
    assert (row.senders, row.note, row.error) == ([0], None, None)


def test_row_names_the_tap_the_place_and_the_step() -> None:
    _, row = taken(torch.ones(2, 3, dtype=torch.float16), receipt(torch.ones(2, 3)))
    assert (row.run, row.step, row.order, row.name, row.plan_version, row.occurrence) == (2, 4, 9, "h", 5, 1)
    assert (row.direction, row.side, row.rank, row.seconds) == ("b2t", "target", 0, 0.5)
    assert (row.shape, row.dtype, row.tags["layer"]) == ([2, 3], "float16", 3)


def test_graft_overwrites_the_tensor_and_the_row_has_the_difference_before() -> None:
    own, theirs = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    before = asdict(measure(theirs, own.clone()))
    result, row = taken(own, receipt(theirs), GRAFT)
    assert (row.status, own.tolist()) == ("grafted", [1.0, 4.0])
    assert result.result is own
    assert {name: getattr(row, name) for name in STATISTICS} == before


def test_one_of_several_senders_that_differ_is_never_grafted() -> None:
    own = torch.tensor([1.0, 2.0])
    _, row = taken(own, receipt([1.0, 2.0], [4.0, 4.0]))
    assert (row.status, row.rel_l2) == ("compared", 0.0)
    assert "the senders are not replicas (sender 1: 2 elements differ, by up to 3)" in (row.note or "")
    _, row = taken(own, receipt([3.0, 2.0], [4.0, 4.0]), GRAFT)
    assert (row.status, own.tolist()) == ("failed", [1.0, 2.0])
    assert "so it is not grafted; if these are partial sums or shards" in (row.error or "")


def test_graft_with_replace_does_not_change_the_tensor() -> None:
    own = torch.tensor([1.0, 2.0])
    result = Receiver().take(call(own, GRAFT), receipt(torch.tensor([3.0, 4.0])), replaced=own)
    assert own.tolist() == [1.0, 2.0]
    assert result.result is not own
    assert result.result is not None
    assert result.result.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(("direction", "rel_l2"), [("b2t", 1.0), ("t2b", 0.5)])
def test_difference_is_relative_to_the_baseline_in_both_directions(direction: Any, rel_l2: float) -> None:
    place = TARGET if direction == "b2t" else Place("baseline", 0, 1, 1)
    made = call(torch.tensor([2.0]), Action(direction), place)
    result = Receiver().take(made, receipt(torch.tensor([1.0])))
    row = row_of(made, result, 0.0)
    assert (row.direction, row.side, row.rel_l2) == (direction, place.side, rel_l2)


def test_transforms_result_is_converted_and_the_row_records_it() -> None:
    own = torch.zeros(2)
    _, row = taken(own, receipt(torch.tensor([1, 2])), GRAFT, transform=first)
    assert (row.status, row.cast, row.dtype) == ("grafted", "int64 -> float32", "float32")
    assert own.tolist() == [1.0, 2.0]


def test_row_names_the_transform_of_the_measured_value() -> None:
    handler = Receiver()
    handler.pipeline.adopt(GraftPlan(b2t="True", transform=[("layer == 3", first), ("True", PATH)]))
    rows = [
        row_of(made, handler.take(made, receipt(torch.ones(2))), 0.0)
        for made in (call(torch.ones(2), Action("b2t", transform=which)) for which in (0, 1, None))
    ]
    assert [row.transform for row in rows] == ["first", PATH, None]
    assert [row.status for row in rows] == ["compared"] * 3


def test_shards_are_joined_as_the_row_describes() -> None:
    own = torch.zeros(4)
    _, row = taken(own, receipt(torch.ones(2), torch.full((2,), 3.0)), GRAFT)
    assert own.tolist() == [1.0, 1.0, 3.0, 3.0]
    assert row.senders == [0, 1]
    assert row.aligned_by is not None


def test_rows_that_are_paired_are_counted() -> None:
    def two_rows(graft_input: GraftTransformInput) -> Outcome:
        return Outcome(graft_input.received_list[0], rows=(torch.tensor([0, 2]),), rows_unmatched=1)

    _, row = taken(torch.zeros(3, 2), receipt(torch.ones(3, 2)), transform=two_rows)
    assert (row.status, row.rows_matched, row.rows_unmatched, row.numel) == ("compared", 2, 1, 4)

    def no_rows(graft_input: GraftTransformInput) -> Outcome:
        return Outcome(graft_input.target, rows=(torch.tensor([], dtype=torch.int64),), rows_unmatched=0)

    # An empty batch lacks nothing.
    _, row = taken(torch.zeros(0, 2), receipt(torch.ones(0, 2)), transform=no_rows)
    assert (row.status, row.rows_matched, row.rows_unmatched) == ("compared", 0, 0)


@pytest.mark.parametrize(("action", "note"), [(COMPARE, None), (GRAFT, "one row is a guess")])
def test_what_makes_a_graft_doubtful_is_noted_of_grafts_alone(action: Action, note: str | None) -> None:
    def guesses(graft_input: GraftTransformInput) -> Outcome:
        return Outcome(graft_input.received_list[0], caveat="one row is a guess")

    _, row = taken(torch.zeros(2), receipt(torch.ones(2)), action, transform=guesses)
    assert (row.status, row.note) == ("grafted" if note else "compared", note)


# ---- nothing to measure ---------------------------------------------------------------------------------------------


def unmeasured(row: Row) -> bool:
    return all(getattr(row, name) is None for name in STATISTICS)


@pytest.mark.parametrize(("timed_out", "status"), [(False, "missing"), (True, "timeout")])
def test_row_without_contributions_has_the_reason(timed_out: bool, status: str) -> None:
    own = torch.ones(2)
    came = receipt(absent={0: "baseline[0] died", 1: "baseline[1] is late"}, timed_out=timed_out)
    result, row = taken(own, came, GRAFT_AND_KEEP)
    assert (row.status, row.error) == (status, "baseline[0] died; baseline[1] is late")
    assert (row.senders, row.note, row.shape, own.tolist()) == ([], None, [2], [1.0, 1.0])
    assert result.result is None
    assert unmeasured(row)


def test_missing_senders_are_noted_beside_others() -> None:
    came = receipt(None, torch.ones(2), absent={0: "baseline[0] died"})
    _, row = taken(torch.ones(2), came, transform=first)
    assert (row.status, row.senders, row.note, row.error) == ("compared", [1], "baseline[0] died", None)


def test_extras_that_cannot_be_loaded_fail_the_tap(caplog: pytest.LogCaptureFixture) -> None:
    own = torch.zeros(2)
    unreadable = {0: "the extras of baseline[0] cannot be loaded here"}
    came = receipt(torch.ones(2), unreadable=unreadable, absent={1: "baseline[1] died"})
    with caplog.at_level(logging.ERROR):
        result, row = taken(own, came, GRAFT)
    assert (row.status, row.senders, result.result, own.tolist()) == ("failed", [0], None, [0.0, 0.0])
    assert row.error == "the extras of baseline[0] cannot be loaded here"
    assert "target[0]: tap 'h' failed: the extras of" in caplog.text
    assert row.note == "baseline[1] died"
    assert unmeasured(row)


def test_tap_is_missing_if_senders_have_none_of_its_rows() -> None:
    def none_of_them(graft_input: GraftTransformInput) -> Outcome:
        return Outcome(graft_input.target, rows=(torch.tensor([], dtype=torch.int64),), rows_unmatched=3)

    handler = Receiver(none_of_them)
    made = call(torch.zeros(3), GRAFT_AND_KEEP)
    row = row_of(made, handler.take(made, receipt(torch.ones(3))), 0.0)
    assert (row.status, row.rows_matched, row.rows_unmatched) == ("missing", 0, 3)
    assert row.error == "no sender has any row of this batch"
    assert unmeasured(row), "a difference of zero would read as agreement"
    assert not handler.kept.tags(failed=True)


# ---- transforms that fail -------------------------------------------------------------------------------------------


def raises(graft_input: GraftTransformInput) -> torch.Tensor:
    raise ValueError("the wrong layout")


def leaves(graft_input: GraftTransformInput) -> torch.Tensor:
    raise SystemExit(3)


def misshapen(graft_input: GraftTransformInput) -> torch.Tensor:
    return graft_input.target[:1]


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (raises, "ValueError: the wrong layout"),
        (leaves, "SystemExit: 3"),
        (misshapen, "TransformError: the transform returned shape [1]"),
    ],
)
def test_failed_transform_leaves_the_tensor_and_its_error_is_in_the_row(
    transform: Callable[..., Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = torch.ones(2)
    came = receipt(None, torch.zeros(2), absent={0: "baseline[0] died"})
    with caplog.at_level(logging.ERROR):
        result, row = taken(own, came, GRAFT, transform=transform)
    assert (row.status, result.result, own.tolist()) == ("failed", None, [1.0, 1.0])
    assert row.error is not None
    assert row.error.startswith(says)
    assert (row.senders, row.note) == ([1], "baseline[0] died")
    assert "target[0]: the transform failed at tap 'h'" in caplog.text
    assert unmeasured(row)


@pytest.mark.parametrize("action", [COMPARE, KEEP], ids=["compared", "kept"])
def test_a_tap_that_cannot_be_measured_fails_and_the_model_continues(
    action: Action, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written_meanwhile(one: torch.Tensor, other: torch.Tensor) -> Any:
        raise RuntimeError("their largest difference was not found again")

    monkeypatch.setattr("graftlab.grafting.receive_pipeline.measure", written_meanwhile)
    made = call(torch.ones(2), action, Place("target", 0, 1, 1))
    result = Receiver().take(made, receipt(torch.zeros(2)))
    row = row_of(made, result, 0.5)
    assert (row.status, result.result) == ("failed", None)
    assert str(row.error).startswith("RuntimeError: their largest difference was not found again")
    assert unmeasured(row)


def test_traceback_begins_at_the_users_line() -> None:
    _, row = taken(torch.ones(2), receipt(torch.zeros(2)), transform=raises)
    assert row.error is not None
    _, _, traceback = row.error.partition("\n\n")
    assert os.path.dirname(gl.__file__) not in traceback
    assert 'raise ValueError("the wrong layout")' in traceback


def test_an_interrupt_is_not_a_failure_of_the_transform() -> None:
    def interrupted(graft_input: GraftTransformInput) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        taken(torch.ones(2), receipt(torch.zeros(2)), transform=interrupted)


@pytest.mark.parametrize("error", [gl.TransformError("no module named 'mine'"), SystemExit("no module named 'mine'")])
def test_a_transform_that_cannot_be_loaded_here_fails_each_tap(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(spec: TransformSpec) -> None:
        raise error

    monkeypatch.setattr(TransformSpec, "load", cannot)
    _, row = taken(torch.ones(2), receipt(torch.zeros(2)), transform=TransformSpec("path", "mine.f"))
    assert (row.status, row.transform) == ("failed", "mine.f")
    assert "the plan's transform mine.f cannot be loaded on this rank: no module named 'mine'" in str(row.error)


# ---- keep, notes and the log ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", [KEEP, GRAFT_AND_KEEP], ids=["compared", "grafted"])
def test_both_values_are_kept_as_they_were_before_the_graft(action: Action) -> None:
    handler = Receiver()
    handler.take(call(torch.tensor([1.0]), action), receipt(torch.tensor([2.0])))
    pair = handler.kept.find("h", {"layer": 3, "step": 4})
    assert pair is not None
    assert pair.baseline is not None
    assert pair.target is not None
    assert (pair.baseline.tolist(), pair.target.tolist()) == ([2.0], [1.0])


def test_what_was_measured_of_both_sides_is_kept() -> None:
    def both(graft_input: GraftTransformInput) -> Outcome:
        return Outcome(graft_input.received_list[0], measured=(torch.tensor([3.0]), torch.tensor([4.0])))

    handler = Receiver(both)
    handler.take(call(torch.tensor([1.0]), KEEP), receipt(torch.tensor([2.0])))
    pair = handler.kept.find("h", {})
    assert pair is not None
    assert (pair.baseline, pair.target) == (torch.tensor([3.0]), torch.tensor([4.0]))


def test_nothing_is_kept_that_the_plan_does_not_keep() -> None:
    handler = Receiver()
    handler.take(call(torch.tensor([1.0]), GRAFT), receipt(torch.tensor([2.0])))
    assert not handler.kept.tags(failed=True)


def test_failed_transforms_input_is_kept_for_another_try() -> None:
    handler = Receiver(raises)
    handler.take(call(torch.tensor([1.0]), KEEP), receipt(torch.tensor([2.0])))
    assert not handler.kept.tags()
    pair = handler.kept.find("h", {}, failed=True)
    assert pair is not None
    assert pair.graft_input.received_list[0].tolist() == [2.0]


def test_a_row_has_every_note_there_is() -> None:
    """Who did not send, why nothing was kept, and why the tensor itself could not be written."""
    own = torch.zeros(1).expand(2)
    came = receipt(None, torch.tensor([1.0, 2.0]), absent={0: "baseline[0] died"})
    handler = Receiver(first, budget=4)
    made = call(own, GRAFT_AND_KEEP)
    result = handler.take(made, came)
    note = str(row_of(made, result, 0.0).note)
    assert note.startswith("baseline[0] died; not kept: ")
    assert "; the tensor is expanded or overlaps itself" in note
    assert handler.told == [("h", note.rpartition("; ")[2])]
    assert result.result is not None
    assert result.result.tolist() == [1.0, 2.0]


def test_a_graft_is_a_line_in_the_log_and_a_comparison_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="graftlab"):
        taken(torch.tensor([1.0, 3.0]), receipt(torch.tensor([2.0, torch.nan])))
        assert not caplog.records
        taken(torch.tensor([1.0, 3.0]), receipt(torch.tensor([2.0, torch.nan])), GRAFT)
    (line,) = caplog.messages
    before, after = line.split(" overridden by ")
    assert before == "target[0] grafted b2t at tap 'h' step 4: float32[2] cpu (mean=1 std=0 min=1 max=1)"
    assert after.startswith("float32[2] cpu (mean=2 std=0 min=2 max=2 nonfinite=1) from ranks [0]; rel_diff=2.000e-01")
    caplog.clear()
    # In the other direction the receiver is the baseline.
    with caplog.at_level(logging.INFO, logger="graftlab"):
        handler = Receiver()
        place = Place("baseline", 0, 1, 1)
        handler.take(call(torch.tensor([1.0]), Action("t2b", graft=True), place), receipt(torch.tensor([2.0])))
        handler.pipeline.log_grafts()
    assert "cpu (mean=1 std=0 min=1 max=1) overridden by float32[1] cpu (mean=2 std=0" in caplog.messages[0]


def test_the_log_has_the_extras_on_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    handler = Receiver()
    extras = {"fill": 1.5, "ids": torch.arange(3), "names": ["a" * 100]}
    came = Receipt([Contribution(0, torch.ones(2), extras)])
    with caplog.at_level(logging.INFO, logger="graftlab"):
        handler.take(call(torch.zeros(2), GRAFT), came)
        handler.pipeline.note_sent(call(torch.zeros(2), GRAFT, Place("baseline", 0, 1, 2)), extras)
        handler.pipeline.note_sent(call(torch.zeros(2), GRAFT), None)
        handler.take(call(torch.zeros(2), GRAFT), receipt(torch.ones(2)))
        handler.pipeline.log_grafts()
    received, sent, bare, without = caplog.messages
    assert "extras" not in without
    shown = "{'fill': 1.5, 'ids': int64[3], 'names': ['aaaaaaaaaaaa...aaaaaaaaaaaaa']}"
    assert received.endswith(f"; extras=[{shown}]")
    assert sent == f"baseline[0] sent b2t at tap 'h' step 4: float32[2] cpu; extras={shown}"
    assert bare.endswith("float32[2] cpu")


def test_log_lines_are_not_formatted_at_a_higher_log_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    described: list[torch.Tensor] = []
    monkeypatch.setattr(
        "graftlab.grafting.receive_pipeline._described", lambda *given: described.append(given[0]) or ""
    )
    with caplog.at_level(logging.WARNING, logger="graftlab"):
        taken(torch.ones(2), receipt(torch.zeros(2)), GRAFT)
    assert not described


def test_batched_log_lines_keep_their_time_and_none_is_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    moments = iter(range(1000, 2000))
    clock = SimpleNamespace(time=lambda: next(moments) + 0.25)
    monkeypatch.setattr("graftlab.grafting.receive_pipeline.time", clock)
    handler = Receiver()
    with caplog.at_level(logging.INFO, logger="graftlab"):
        for _ in range(100):
            handler.take(call(torch.ones(2), GRAFT), receipt(torch.zeros(2)))
        assert 0 < len(caplog.records) < 100
        handler.pipeline.log_grafts()
    assert [(record.created, record.msecs) for record in caplog.records] == [(1000.25 + n, 250.0) for n in range(100)]


# ---- what the transform is given ------------------------------------------------------------------------------------


def test_transform_knows_receiver_and_senders() -> None:
    def checks(given: GraftTransformInput) -> torch.Tensor:
        assert (given.senders, given.received_extras_list, given.target_extras) == ([1], [{"scale": 2.0}], "mine")
        assert (given.direction, given.recv_rank, given.recv_world_size, given.send_world_size) == ("b2t", 0, 1, 2)
        assert (given.tags["name"], given.tags["step"], given.tags["layer"]) == ("h", 4, 3)
        assert not given.target.requires_grad
        return given.received_list[0]

    came = Receipt([Contribution(1, torch.ones(2), {"scale": 2.0})], absent={0: "baseline[0] died"})
    made = call(torch.zeros(2, requires_grad=True), Action("b2t", transform=0))
    result = Receiver(checks).pipeline.take(made, "mine", came)
    assert (result.status, result.error) == ("compared", None)


@pytest.mark.parametrize("kind", ["alike", "dtype", "shards", "one silent", "said layout", "sent extras", "inference"])
def test_fast_path_gives_the_default_transforms_result(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = {
        "said layout": SentExtras("its own", RankLayout(Layout(), (4,))),
        "sent extras": SentExtras("its own"),
    }.get(kind)

    def comes_of(action: Action, place: Place) -> str:
        count = place.other_world_size
        sent = [torch.arange(4.0, dtype=torch.float64 if kind == "dtype" else None) + 10 * at for at in range(count)]
        if kind == "shards":
            sent = [each[: 4 // count] for each in sent]
        absent = {0: "baseline[0] died"} if kind == "one silent" else {}
        contributions = [Contribution(at, each, carried) for at, each in enumerate(sent) if at not in absent]
        with torch.inference_mode(kind == "inference"):
            own = torch.full((4,), 2.0)
        handler, made = Receiver(), call(own, action, place)
        result = handler.take(made, Receipt(contributions, absent=absent))
        kept = [pair.value.tolist() for _, pair in handler.kept._pairs if pair.value is not None]
        row = row_of(made, result, 0.0)._replace(error=result.error and result.error.partition("\n")[0])
        return repr((row, own.tolist(), kept, result.result is None))

    cases = [
        (action, Place("target", rank, world_size, senders))
        for action in (COMPARE, GRAFT, KEEP, GRAFT_AND_KEEP)
        for senders, world_size, rank in ((1, 1, 0), (2, 1, 0), (2, 2, 0), (2, 2, 1), (1, 2, 1), (3, 2, 1))
    ]
    found = [comes_of(*case) for case in cases]
    monkeypatch.setattr("graftlab.grafting.receive_pipeline._sent_as_it_is", lambda call, receipt: None)
    assert found == [comes_of(*case) for case in cases]


@pytest.mark.parametrize("layout", ["a b -> b a", "same"])
def test_a_pairs_layout_and_names_are_the_transforms_to_know(layout: str) -> None:
    def sees(given: GraftTransformInput) -> torch.Tensor:
        assert (given.pair is None) == (layout == "same")
        assert given.whole == "received"
        assert given.tags.items() >= {"baseline_name": "b.x", "target_name": "t.x", "layer": 3}.items()
        return given.received_list[0]

    plan = GraftPlan(pairs=[("b.x", "t.x", layout)])
    (pairing,) = plan.pairings("target", "t.x", {"layer": 3})
    made = call(torch.ones(2, 2), Action("b2t", transform=0))._replace(pairing=pairing)
    result = Receiver(sees).pipeline.take(made, None, receipt(torch.ones(2, 2)))
    assert (result.status, result.error) == ("compared", None)


def test_the_senders_own_name_is_noted_where_no_rule_names_the_pair() -> None:
    sent = SentExtras(None, name="own.x")
    # A sender may be too old to pass one.
    came = Receipt([Contribution(n, torch.ones(2), each) for n, each in enumerate((None, SentExtras(None), sent))])
    plan = GraftPlan(pairs=[("b.x", "t.x")])
    (ruled,) = plan.pairings("target", "t.x", {})
    for pairing, names in (
        (ruled, ("b.x", "t.x")),
        (replace(ruled, rule=None, baseline_name=None), ("own.x", "t.x")),
    ):
        made = call(torch.ones(2))._replace(pairing=pairing)
        named, _ = Receiver().pipeline.take_named(made, None, came, None, None, None)
        assert named.pairing is not None
        assert (named.pairing.baseline_name, named.pairing.target_name) == names
    made = call(torch.ones(2), Action("t2b"), Place("baseline", 0, 2, 1))
    made = made._replace(pairing=replace(ruled, rule=None, target_name=None))
    named, _ = Receiver().pipeline.take_named(made, None, came, None, None, None)
    assert named.pairing is not None
    assert (named.pairing.baseline_name, named.pairing.target_name) == ("b.x", "own.x")
