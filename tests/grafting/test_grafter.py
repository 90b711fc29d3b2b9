"""A rank's grafter: runs, steps and plans, sending and declining, and the resulting rows.

All ranks are in this process, with an exchange that never waits; ``test_pairing.py`` has real processes.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld, Sent, Unpackable
from kit.refusals import exactly
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.base.world import RunInfo
from graftlab.grafting.tensors import plain_tensor
from graftlab.rows.schema import Row
from graftlab.taps.extras import ExtrasWithLayout


def told(rows: list[Row]) -> list[tuple[str, str, str]]:
    """The reports of a grafter."""
    return [(f"{row.side}[{row.rank}]", row.name, row.status) for row in rows]


# ---- both sides reach a tap -----------------------------------------------------------------------------------------


def test_tap_of_both_sides_is_compared_in_one_row() -> None:
    world = GrafterWorld()
    sent = torch.ones(2)
    assert world.baseline.tap("h", sent, layer=3) is sent
    own = torch.full((2,), 2.0, requires_grad=True)
    assert world.target.tap("h", own, layer=3) is own
    world.end()
    assert told(world.rows) == [("target[0]", "h", "compared")]
    (row,) = world.rows
    assert (row.run, row.step, row.order, row.occurrence, row.plan_version) == (0, 0, 1, 0, 0)
    assert (row.rel_l2, row.senders, row.tags["layer"]) == (1.0, [0], 3)
    assert row.seconds > 0


@pytest.mark.parametrize(("way", "receiver"), [("b2t", "target"), ("t2b", "baseline")])
def test_graft_overwrites_only_its_receiver(way: str, receiver: str) -> None:
    world = GrafterWorld(**{way: "layer == 3"})
    sides = {"baseline": (world.baseline, 1.0), "target": (world.target, 2.0)}
    sending, receiving = sorted(sides, key=lambda side: side == receiver)
    went_on = {}
    for side in (sending, receiving):
        rank, value = sides[side]
        own = torch.full((2,), value)
        assert rank.tap("h", own, layer=3) is own
        went_on[side] = own.tolist()[0]
    assert went_on == {sending: sides[sending][1], receiving: sides[sending][1]}
    assert told(world.rows) == [(f"{receiver}[0]", "h", "grafted")]
    assert world.rows[0].direction == way


def test_each_rank_gets_its_part_by_the_layouts_that_both_sides_declare() -> None:
    world, whole = GrafterWorld(2, 2, b2t="True"), torch.arange(16.0).view(4, 4)
    columns, both_ends = "shard(dim=1, mesh='tp')", "shard(dim=0, mesh='tp', order='zigzag')"
    for rank, part in zip(world.baselines, whole.chunk(2, 1), strict=True):
        rank.tap("h", part, extras=ExtrasWithLayout(columns, None))
    for rank, part in zip(world.targets, (whole[[0, 3]], whole[[1, 2]]), strict=True):
        own = torch.zeros(2, 4)
        rank.tap("h", own, extras=ExtrasWithLayout(both_ends, None))
        assert torch.equal(own, part)
    assert [row.status for row in world.rows] == ["grafted"] * 2


def test_replaced_value_is_a_new_tensor() -> None:
    world = GrafterWorld(b2t="True")
    world.baseline.tap("h", 1.0)
    own = torch.full((2,), 2.0)
    result = world.target.tap("h", own, replace=True)
    assert (result.tolist(), own.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def test_a_tensor_that_cannot_be_written_is_replaced_in_what_the_tap_returns() -> None:
    world = GrafterWorld(b2t="True")
    world.baseline.tap("h", torch.tensor([1.0, 2.0]))
    own = torch.zeros(1).expand(2)
    with pytest.warns(gl.GraftWarning, match="only gl.tap's result carries the graft"):
        result = world.target.tap("h", own)
    assert (result.tolist(), own.tolist()) == ([1.0, 2.0], [0.0, 0.0])


def test_callable_is_called_only_for_a_matched_tap_and_returned_itself() -> None:
    world = GrafterWorld(compare="name == 'wanted'")
    made: list[str] = []

    def value(name: str) -> torch.Tensor:
        made.append(name)
        return torch.ones(2)

    for name in ("wanted", "other"):
        lazy = lambda name=name: value(name)  # noqa: E731 - two distinct callables
        assert world.baseline.tap(name, lazy) is lazy
    assert made == ["wanted"]


def test_what_is_sent_has_no_graph_and_its_own_extras_without_the_layout() -> None:
    world = GrafterWorld()
    extras = {"scale": 2.0}
    world.baseline.tap("h", torch.ones(2, requires_grad=True), extras=ExtrasWithLayout("shard(dim=0)", extras))
    world.baseline.tap("k", torch.ones(2), extras=ExtrasWithLayout(None, extras))
    (first,), (second,) = (of_ranks.values() for of_ranks in world.post.sent.values())
    assert isinstance(first, Sent)
    assert isinstance(second, Sent)
    assert (first.tensor.requires_grad, first.extras.extras, second.extras.extras) == (  # type: ignore[attr-defined]
        *(False, extras, extras),
    )


def test_a_users_function_inside_a_tap_keeps_other_threads_out_while_it_waits() -> None:
    world = GrafterWorld()
    let_go, _ = world.target.exchange.shared
    found: list[bool] = []
    world.baseline.tap("h", 1.0)
    world.target.tap("h", lambda: found.append(let_go()) or torch.ones(2))
    assert found == [False]


def test_grafts_and_tensors_sent_for_them_are_logged_at_the_end_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    world = GrafterWorld(b2t="True")
    with caplog.at_level("INFO", logger="graftlab"):
        world.baseline.tap("h", 1.0)
        world.target.tap("h", 1.0)
        assert not caplog.messages
        world.step()
        assert [each.split(" at tap")[0] for each in caplog.messages] == [
            *("baseline[0] sent b2t", "target[0] grafted b2t")
        ]


def test_numbers_of_every_dtype_travel_unless_several_share_a_byte() -> None:
    # Without those of the old quantisation and half a complex number, of which torch warns.
    made = {each for each in vars(torch).values() if isinstance(each, torch.dtype) and "q" not in str(each)}
    made.discard(torch.complex32)
    travels = {each for each in made if not isinstance(plain_tensor(torch.empty(2, dtype=each)), str)}
    left_out = {str(each).removeprefix("torch.") for each in made - travels}
    whole = {*(torch.int8, torch.int16, torch.int32, torch.int64), *(torch.uint8, torch.uint16, torch.uint32)}
    assert travels >= {*whole, torch.uint64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64}
    assert {"uint4", "int4", "uint1", "bits8"} <= left_out


def test_repeated_taps_meet_by_occurrence() -> None:
    world = GrafterWorld(b2t="True")
    for value in (1.0, 2.0, 3.0):
        world.baseline.tap("h", value)
    assert [world.target.tap("h", 0.0)[0].item() for _ in range(2)] == [1.0, 2.0]
    world.end()
    assert [(row.status, row.occurrence) for row in world.rows] == [("unmatched", 2), ("grafted", 0), ("grafted", 1)]


def test_an_overlap_raises_and_names_the_tags_and_both_filters() -> None:
    world = GrafterWorld(b2t="layer == 3", t2b="name == 'h'")
    with pytest.raises(
        gl.GraftOverlapError,
        match=exactly(
            "tap 'h' matches both b2t and t2b on target[0], tags {'name': 'h', 'step': 0, 'side': "
            "'target', 'rank': 0, 'recompute_status': 'original', 'layer': 3}; change one filter so that "
            "each tap has one direction (b2t='layer == 3', t2b=\"name == 'h'\")"
        ),
    ):
        world.target.tap("h", 1.0, layer=3)
    assert not world.rows


# ---- one side alone reaches it --------------------------------------------------------------------------------------


def test_unrequested_tensor_is_unmatched_after_the_step() -> None:
    world = GrafterWorld()
    world.baseline.tap("only here", 1.0)
    world.baseline.grafter.step()
    assert not world.rows, "the target may still come to it"
    world.target.grafter.step()
    world.end()
    assert told(world.rows) == [("baseline[0]", "only here", "unmatched")]
    (row,) = world.rows
    assert (row.step, row.direction, row.shape, row.rel_l2) == (0, "b2t", [2], None)


def test_row_of_a_dead_receiver_admits_that_its_request_is_unknown() -> None:
    world = GrafterWorld(compare="True")
    world.baseline.tap("x", 1.0)
    world.post.lost = "target[0] died"
    world.end()
    (row,) = world.rows
    assert (row.status, row.error) == (
        "unmatched",
        "target[0] died, and can no longer report whether it requested this tap",
    )


def test_tensor_without_a_sender_is_missing_or_timed_out() -> None:
    world = GrafterWorld(b2t="True")
    assert world.target.tap("late", 2.0).tolist() == [2.0, 2.0]
    world.baseline.grafter.end_run()
    world.target.tap("never", 2.0)
    assert told(world.rows) == [("target[0]", "late", "timeout"), ("target[0]", "never", "missing")]
    assert [row.error for row in world.rows] == [
        "baseline[0] did not reach this tap within 5 s",
        "baseline[0] ended the step without this tap",
    ]


def test_receipts_memory_is_released_after_success_and_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrafterWorld()
    for name in ("fine", "failed", "interrupted"):
        world.baseline.tap(name, torch.ones(3) if name == "failed" else 1.0)
    world.target.tap("fine", 1.0)
    world.target.tap("failed", 1.0)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("graftlab.grafting.receive_pipeline.measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        world.target.tap("interrupted", 1.0)
    assert world.target.exchange.released == 3


def test_full_buffer_gives_a_row_and_no_receiver_waits() -> None:
    world = GrafterWorld()
    world.post.is_full = True
    assert world.baseline.tap("h", 1.0).tolist() == [1.0, 1.0]
    assert told(world.rows) == [("baseline[0]", "h", "timeout")]
    assert "could not publish tap 'h'" in str(world.rows[0].error)
    world.target.tap("h", 1.0)
    assert told(world.target.rows) == [("target[0]", "h", "missing")]


def test_unpicklable_extras_give_a_failed_row_and_no_receiver_waits() -> None:
    world = GrafterWorld()
    world.baseline.tap("h", 1.0, extras=Unpackable())
    world.target.tap("h", 1.0)
    assert told(world.rows) == [("baseline[0]", "h", "failed"), ("target[0]", "h", "missing")]
    assert "of gl.tap('h') on baseline[0] cannot be pickled" in str(world.rows[0].error)
    assert world.rows[1].error == "baseline[0] did not send this tap"


@pytest.mark.parametrize("value", ["text", None, 7j, torch.ones(2).to_sparse(), torch.ones(2, device="meta")], ids=str)
def test_unsendable_value_is_skipped_with_one_warning_and_no_wait(value: Any) -> None:
    world = GrafterWorld()
    with pytest.warns(gl.GraftWarning, match=r"gl.tap\('h'\) on baseline\[0\]: .*the tap is skipped"):
        assert world.baseline.tap("h", value) is value
    # A second warning would be an error here.
    assert world.baseline.tap("h", value) is value
    world.target.tap("h", 1.0)
    assert told(world.rows) == [("target[0]", "h", "missing")]


def test_few_taps_get_a_warning_for_one_reason() -> None:
    world = GrafterWorld(b2t="True")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for name in "abcabcde":
            world.baseline.tap(name, torch.ones(2, device="meta"))
        world.baseline.tap("e", torch.ones(2).to_sparse())
    texts = [str(each.message) for each in shown]
    assert [text.partition(" on ")[0] for text in texts] == [f"gl.tap('{name}')" for name in "abce"]
    assert ["further taps get no warning of this" in text for text in texts] == [False, False, True, False]


# ---- filters that look at the rank ----------------------------------------------------------------------------------


def test_a_rank_that_the_plan_leaves_out_declines_and_its_tap_still_counts() -> None:
    world = GrafterWorld(2, 2, b2t="rank == 0 or layer == 1", compare=None)
    for rank in world.baselines:
        for layer in (0, 0, 1):
            rank.tap("h", 10.0 + rank.place.rank, layer=layer)
    went_on = [[rank.tap("h", 20.0, layer=layer)[0].item() for layer in (0, 0, 1)] for rank in world.targets]
    # Of layer 0 rank 1 neither sends nor receives.
    assert went_on == [[10.0, 10.0, 10.0], [20.0, 20.0, 11.0]]
    assert [key.occurrence for key in world.baselines[1].exchange.declined] == [0, 1]
    assert [(row.rank, row.senders, row.occurrence) for row in world.rows] == [
        *[(0, [0], 0), (0, [0], 1), (0, [0, 1], 0)],
        (1, [0, 1], 0),
    ]
    assert world.rows[0].note == "baseline[1] did not send this tap"


def test_where_ranks_decide_alike_nothing_is_declined() -> None:
    world = GrafterWorld(2, 2, compare="layer == 1")
    for rank in world.ranks:
        for layer in (0, 1):
            rank.tap("h", 1.0, layer=layer)
    assert not any(rank.exchange.declined for rank in world.ranks)


def test_taps_of_one_value_in_parts_meet_whatever_their_rank_tags() -> None:
    world = GrafterWorld(2, 1)
    for rank in world.baselines:
        rank.tap("h", 1.0, tp_rank=rank.place.rank)
    world.target.tap("h", torch.ones(4), tp_rank=0)
    assert [(row.status, row.senders, row.tags["tp_rank"]) for row in world.rows] == [("compared", [0, 1], 0)]


def test_tag_that_is_none_pairs_with_an_absent_one() -> None:
    world = GrafterWorld()
    world.baseline.tap("h", 1.0, layer=None, phase="decode")
    world.target.tap("h", 1.0, phase="decode")
    assert told(world.rows) == [("target[0]", "h", "compared")]


# ---- what is asked without reaching a tap ---------------------------------------------------------------------------


def test_action_of_a_tap_can_be_queried_without_calling_it() -> None:
    world = GrafterWorld(2, 2, b2t="rank == 1", compare=None)
    grafter = world.target.grafter
    action = grafter.action("h", {"layer": 3})
    assert action is not None
    assert action.direction is None
    everywhere = grafter.actions_of_side("h", {"layer": 3})
    assert [(each.graft, grafter.sends(each)) for each in everywhere] == [(False, False), (True, False)]
    assert world.baseline.grafter.sends(everywhere[1])
    assert not world.target.rows
    world.end()
    assert grafter.action("h", {}) is None


def test_a_tap_in_several_pairs_has_the_action_with_the_largest_effect() -> None:
    world = GrafterWorld(pairs=[("a", "h"), ("b", "h")], b2t="baseline_name == 'b'")
    action = world.target.grafter.action("h", {})
    assert action is not None
    assert action.graft
    (own,) = world.target.grafter.actions_of_side("h", {})
    assert own.graft


def test_a_call_in_no_pair_has_a_row_on_its_side() -> None:
    sending = GrafterWorld(pairs=[("drop#1", "drop.1")])
    receiving = GrafterWorld(pairs=[("drop.1", "drop#1")])
    sending.baseline.tap("drop", 1.0)
    receiving.target.tap("drop", 1.0)
    error = "the plan has no pair for this call of 'drop' in the step"
    assert [(row.status, row.error) for row in (*sending.rows, *receiving.rows)] == [
        ("unmatched", error),
        ("missing", error),
    ]


def test_an_era_lasts_as_long_as_actions_stay_as_they_are() -> None:
    world = GrafterWorld()
    grafter = world.target.grafter
    first = grafter.decision_epoch
    world.target.tap("h", 1.0)
    world.step()
    assert grafter.decision_epoch is first is not None
    world.edit(b2t="layer == 3")
    assert grafter.decision_epoch is first
    world.step()
    second = grafter.decision_epoch
    assert second is not first
    world.edit(compare="step == 3")
    world.step()
    third = grafter.decision_epoch
    world.step()
    assert len({id(decision_epoch) for decision_epoch in (second, third, grafter.decision_epoch)}) == 3
    world.end()
    assert grafter.decision_epoch is None


# ---- runs, steps and plans ------------------------------------------------------------------------------------------


def test_taps_do_nothing_outside_runs_and_in_one_sided_runs() -> None:
    world = GrafterWorld()
    world.end()
    world.target.grafter.step()
    assert world.target.grafter.next_step == 1
    assert not world.target.grafter.may_take("h")
    for participants in (None, [0]):
        if participants:
            world.begin(1, 1, participants)
        value = torch.ones(2)
        assert world.baseline.tap("h", value, layer=[]) is value
    world.baseline.grafter.step()
    assert not world.rows
    assert not world.baseline.tags_seen


def test_steps_count_on_over_runs_and_order_and_occurrences_begin_anew() -> None:
    world = GrafterWorld()
    for run in (0, 1):
        if run:
            world.begin(run, first_step=world.target.grafter.next_step)
        for _ in range(2):
            world.baseline.tap("h", 1.0)
            world.target.tap("h", 1.0)
            world.step()
        world.end()
    rows = world.target.rows
    assert [(row.run, row.step, row.order, row.occurrence) for row in rows] == [
        *[(0, 0, 1, 0), (0, 1, 1, 0)],
        *[(1, 3, 1, 0), (1, 4, 1, 0)],
    ]
    assert [row.tags["step"] for row in rows] == [0, 1, 3, 4]


def test_a_tag_set_is_reported_with_the_step_in_which_it_was_first_reached() -> None:
    world = GrafterWorld(compare="False")
    world.target.tap("h", 1.0)
    world.step()
    for layer in (None, 3):
        world.target.tap("h", 1.0, layer=layer)
    assert [(tags["step"], tags.get("layer")) for tags in world.target.tags_seen] == [(0, None), (1, None), (1, 3)]


def test_plan_takes_effect_at_the_next_step_on_all_ranks() -> None:
    world = GrafterWorld()
    for rank in (world.baseline, world.target):
        rank.tap("h", 1.0)
    world.edit(b2t="True")
    for rank in (world.baseline, world.target):
        rank.tap("h", 1.0)
    world.step()
    for rank in (world.baseline, world.target):
        rank.tap("h", 1.0)
    assert [(row.status, row.plan_version) for row in world.rows] == [("compared", 0), ("compared", 0), ("grafted", 1)]
    assert [rank.plans for rank in world.ranks] == [[(0, 0), (1, 1)]] * 2


def test_plan_known_only_to_the_leader_reaches_others_with_the_step() -> None:
    world = GrafterWorld()
    plan = world.plan.edit(b2t="True")
    world.baseline.grafter.offer_plan(plan)
    world.step()
    assert [rank.grafter.plan.version for rank in world.ranks] == [1, 1]


def test_plan_known_only_to_a_follower_waits_for_the_leader() -> None:
    world = GrafterWorld()
    world.target.grafter.offer_plan(world.plan.edit(b2t="True"))
    world.step()
    assert [rank.grafter.plan.version for rank in world.ranks] == [0, 0]
    world.end()
    # Between runs there is nothing to agree upon.
    assert world.target.grafter.plan.version == 1
    # It is in force from the step that the next run begins with.
    assert world.target.plans == [(0, 0), (1, 2)]


def test_an_edit_that_came_before_an_older_run_begins_is_in_force_from_the_next_step() -> None:
    world = GrafterWorld()
    world.end()
    older = world.plan
    world.edit(b2t="True")
    world.plan = older
    world.begin(run=1, first_step=1)
    assert [rank.grafter.plan.version for rank in world.ranks] == [0, 0]
    world.step()
    assert [rank.grafter.plan.version for rank in world.ranks] == [1, 1]


def test_step_without_the_leaders_announcement_compares_nothing() -> None:
    world = GrafterWorld()
    world.target.grafter.step()
    value = torch.ones(2)
    assert world.target.tap("h", value) is value
    assert told(world.rows) == [("target[0]", "gl.step", "timeout")]
    (row,) = world.rows
    assert (row.step, row.direction, row.shape, row.senders) == (1, None, None, [])
    assert "baseline[0], which announces the plan of each step, did not begin step 1 within 5 s" in str(row.error)
    assert "baseline[0]: idle" in str(row.error)


def test_nothing_is_compared_after_the_leaders_death_and_one_row_has_the_reason() -> None:
    """It may have announced a new plan to some ranks only, and two plans in one step would pair the wrong taps."""
    world = GrafterWorld()
    world.post.gone[0] = "died"
    for _ in range(3):
        world.target.grafter.step()
        world.target.tap("h", torch.ones(2))
    assert told(world.rows) == [("target[0]", "gl.step", "missing")]
    (row,) = world.rows
    assert row.step == 1
    assert "baseline[0], which announces the plan of each step, died before it began step 1" in str(row.error)
    assert "from this step to the end of this run no tap is compared here" in str(row.error)


def test_the_run_after_a_leaders_death_is_compared_and_a_second_death_is_reported() -> None:
    world = GrafterWorld(b2t="True")
    world.post.gone[0] = "died"
    world.target.grafter.step()
    world.target.grafter.end_run()
    world.target.grafter.close_run()
    world.target.grafter.begin_run(RunInfo(2, 2, (0, 1)), world.target.grafter.plan)
    world.target.tap("h", torch.ones(2))
    world.target.grafter.step()
    assert [(row.name, row.step) for row in world.rows] == [("gl.step", 1), ("h", 2), ("gl.step", 3)]


def test_side_with_more_steps_continues_with_the_plan_in_force() -> None:
    world = GrafterWorld(b2t="True")
    world.baseline.grafter.end_run()
    world.target.grafter.step()
    world.target.tap("h", 1.0)
    assert [(row.status, row.step) for row in world.rows] == [("missing", 1)]


def test_status_page_shows_the_ranks_position() -> None:
    world = GrafterWorld()
    page = world.target.page
    assert page.read().state == "running"
    world.baseline.tap("h", 1.0)
    world.target.tap("h", 1.0)
    look = page.read()
    assert (look.state, look.step, look.taps, look.tap, look.plan_version) == ("running", 0, 1, "h", 0)
    world.target.exchange.on_wait([0])
    assert (page.read().state, page.read().awaits) == ("waiting", (0,))
    world.target.exchange.on_wait([])
    assert (page.read().state, page.read().awaits) == ("running", ())
    world.end()
    assert page.read().state == "idle"
    world.begin(run=1, first_step=1)
    assert (page.read().step, page.read().tap) == (1, "")


# ---- activation checkpointing ---------------------------------------------------------------------------------------


def forward(world: GrafterWorld, side: str, scale: float) -> None:
    rank = world.baseline if side == "baseline" else world.target

    def block(x: torch.Tensor) -> torch.Tensor:
        return rank.tap("h", x * scale).sin()

    checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()


def test_a_recomputed_forward_meets_the_other_sides_recomputed_one() -> None:
    world = GrafterWorld(compare="True", b2t="recompute_status == 'recompute'")
    forward(world, "baseline", 1.0)
    forward(world, "target", 2.0)
    world.end()
    assert [(row.status, row.tags["recompute_status"], row.occurrence) for row in world.rows] == [
        ("compared", "original", 0),
        ("grafted", "recompute", 0),
    ]


def test_forward_that_only_one_side_recomputes_has_status_recomputed() -> None:
    world = GrafterWorld()
    forward(world, "baseline", 1.0)
    world.target.tap("h", 1.0)
    world.end()
    assert [(row.status, row.tags["recompute_status"]) for row in world.rows] == [
        ("recomputed", "recompute"),
        ("compared", "original"),
    ]


def test_a_recomputed_tap_that_the_sender_lacks_has_the_reason_as_a_note() -> None:
    world = GrafterWorld()
    world.baseline.tap("h", 1.0)
    world.baseline.grafter.end_run()
    forward(world, "target", 1.0)
    assert [(row.status, row.note, row.error) for row in world.rows] == [
        ("compared", None, None),
        ("recomputed", "baseline[0] ended the step without this tap", None),
    ]
