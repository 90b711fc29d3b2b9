"""The plans of a session: which edit an undo or a redo applies to, and that lent plans are none of the user's."""

from __future__ import annotations

from typing import Any

import pytest
from kit.refusals import exactly

from graftlab.control.plans import Plans
from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan


@pytest.fixture
def plans() -> Plans:
    made = Plans([])
    made.publish(GraftPlan())
    return made


def edit(plans: Plans, **changes: Any) -> GraftPlan:
    plan = plans.newest.edit(**changes)
    plans.publish_edit(plan)
    return plan


def revert(plans: Plans, action: Any) -> GraftPlan:
    wanted = plans.wanted(action)
    plan = plans.newest.edit(b2t=wanted.b2t, keep=wanted.keep)
    change = plans.revert(action, plan)
    assert change.plan is plans.newest is plan
    return plan


def test_edits_are_undone_from_the_last_to_the_first_and_made_again(plans: Plans) -> None:
    for layer in range(3):
        edit(plans, b2t=f"layer == {layer}")
    assert [revert(plans, "undo").b2t for _ in range(3)] == ["layer == 1", "layer == 0", None]
    with pytest.raises(SessionError, match=r"session.undo: there is no edit of the plan to undo"):
        plans.wanted("undo")
    assert [revert(plans, "redo").b2t for _ in range(2)] == ["layer == 0", "layer == 1"]
    # A new edit rules out what was undone before it.
    edit(plans, keep="True")
    with pytest.raises(SessionError, match=r"session.redo: there is no edit of the plan to redo"):
        plans.wanted("redo")
    assert revert(plans, "undo").b2t == "layer == 1"


def test_an_edit_that_changes_nothing_is_none_to_undo(plans: Plans) -> None:
    edit(plans, b2t="layer == 1")
    revert(plans, "undo")
    edit(plans, keep=None)
    assert plans.last("undo") is None
    assert plans.wanted("redo").b2t == "layer == 1"


def test_an_edit_while_a_plan_is_lent_is_undone_to_the_plan_before_both(plans: Plans) -> None:
    own = edit(plans, b2t="layer == 1")
    plans.publish_temporary(own.edit(b2t="True"))
    edit(plans, b2t="layer == 2")
    assert plans.wanted("undo").b2t == "layer == 1"


def test_a_lent_plan_equal_to_the_one_before_is_restored_as_a_new_version(plans: Plans) -> None:
    own = edit(plans, compare="True")
    plans.restore(as_new=True)
    assert plans.newest is own
    plans.publish_temporary(own.edit(compare="True"))
    plans.restore()
    assert plans.newest.version == own.version + 1
    plans.restore(as_new=True)
    assert (plans.newest.version, plans.is_lent, plans.lasting()[-1]) == (own.version + 2, False, own)
    # A plan that the user has published meanwhile is newer than all orders.
    mine = edit(plans, keep="True")
    plans.restore(as_new=True)
    assert plans.newest is mine


def test_lent_plans_are_restored_and_not_undone(plans: Plans) -> None:
    own = edit(plans, keep="layer == 1")
    plans.restore()
    assert plans.newest is own
    plans.publish_temporary(own.edit(b2t="True"))
    assert plans.is_lent
    assert plans.lasting()[-1] is own
    with pytest.raises(
        SessionError,
        match=exactly(
            "session.undo: the plan in force is that of a verdict, a match or a comparison, which restores "
            "yours at its end. Stop it, or wait"
        ),
    ):
        plans.wanted("undo")
    # Published again, it is still lent.
    plans.publish_as(9)
    assert (plans.newest.version, plans.newest.b2t, plans.is_lent) == (9, "True", True)
    plans.restore()
    assert (plans.newest.version, plans.newest.b2t, plans.newest.keep, plans.is_lent) == (10, None, "layer == 1", False)
    assert revert(plans, "undo").keep is None
    plans.publish_as(20)
    assert plans.lasting()[-1].version == plans.newest.version == 20
    listed = plans.all()
    listed.clear()
    assert plans.newest.version == 20
