"""A plan is one immutable value: invalid parts are refused when it is made, and both sides read it alike."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

from graftlab.errors import FilterError, GraftError, GraftWarning, PlanError, ShippingError, TransformError
from graftlab.plan.plan import Action, GraftPlan
from graftlab.transforms import GraftTransformInput, TransformSpec

# Of plans that can do nothing, which tests make for other reasons.
pytestmark = pytest.mark.filterwarnings("ignore:this plan does nothing", "ignore:this plan grafts no tap")

TAGS = {"name": "attn", "layer": 3, "step": 0, "side": "target", "rank": 1, "recompute_status": "original"}


def negated(graft_input: GraftTransformInput) -> torch.Tensor:
    return -graft_input.target


# ---- editing --------------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "b2t": "name == 'q'",
    "t2b": "layer < 2",
    "compare": None,
    "keep": "True",
    "transform": "def transform(g): return g.target",
    "rename": {"target": {"^model": "net"}},
}
WHAT_THEY_BECOME = {
    "transform": TransformSpec("source", "def transform(g): return g.target"),
    "rename": (("target", "^model", "net"),),
}


@given(st.lists(st.sets(st.sampled_from(sorted(CHANGES))), max_size=4))
def test_edit_changes_only_the_given_parts_and_increments_the_version(edits: list[set[str]]) -> None:
    plan, expected = GraftPlan(), dataclasses.asdict(GraftPlan())
    for number, names in enumerate(edits, start=1):
        before = plan
        plan = plan.edit(**{name: CHANGES[name] for name in names})
        expected |= {name: CHANGES[name] for name in names} | {"version": number}
        assert before.version == number - 1
    for name in expected.keys() & WHAT_THEY_BECOME.keys():
        if expected[name]:
            expected[name] = WHAT_THEY_BECOME[name]
    assert {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)} == expected


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_none_resets_a_part_of_the_plan(name: str) -> None:
    plan = GraftPlan().edit(**CHANGES).edit(**{name: None})
    assert getattr(plan, name) == (() if name == "rename" else None)


def test_a_plan_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GraftPlan().b2t = "True"  # type: ignore[misc]


@pytest.mark.parametrize("name", ["transform", "rename"])
def test_new_plan_accepts_the_same_arguments_as_an_edit(name: str) -> None:
    made = GraftPlan(**{name: CHANGES[name]})
    assert getattr(made, name) == WHAT_THEY_BECOME[name] == getattr(GraftPlan().edit(**{name: CHANGES[name]}), name)
    assert GraftPlan(transform=negated).transforms[0].load()(example()).tolist() == [-1.0]  # type: ignore[arg-type,union-attr]


def example() -> GraftTransformInput:
    return GraftTransformInput({}, [torch.zeros(1)], [None], torch.ones(1))


def test_plans_of_equal_parts_are_equal_and_hash_alike() -> None:
    one, other = (GraftPlan().edit(**CHANGES) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != one.edit()


# ---- what a plan says of a tap --------------------------------------------------------------------------------------

YES, NO, BLANK = "layer == 3", "layer == 4", "  "


@pytest.mark.parametrize(
    ("filters", "action"),
    [
        ({}, Action("b2t")),
        ({"compare": None}, Action()),
        ({"compare": BLANK}, Action()),
        ({"b2t": NO, "t2b": NO, "compare": NO, "keep": NO}, Action()),
        ({"b2t": YES}, Action("b2t", graft=True)),
        ({"t2b": YES}, Action("t2b", graft=True)),
        ({"t2b": YES, "compare": YES}, Action("t2b", graft=True)),
        ({"b2t": YES, "t2b": NO, "compare": None}, Action("b2t", graft=True)),
        ({"b2t": YES, "keep": YES}, Action("b2t", graft=True, keep=True)),
        ({"t2b": YES, "keep": YES}, Action("t2b", graft=True, keep=True)),
        ({"compare": None, "keep": YES}, Action("b2t", keep=True)),
        ({"compare": YES, "keep": YES}, Action("b2t", keep=True)),
        ({"b2t": YES, "t2b": YES}, Action(overlap=True)),
        ({"b2t": YES, "t2b": YES, "compare": YES, "keep": YES}, Action(overlap=True)),
    ],
    ids=str,
)
def test_grafting_precedes_comparing_and_keep_works_alone(filters: dict[str, str], action: Action) -> None:
    assert GraftPlan(**filters).action_for(TAGS) == action


@pytest.mark.parametrize(
    ("expression", "depends"),
    [
        ("rank == 0", True),
        ("side == 'target'", True),
        ("name == 'q' and tp_rank < 2", True),
        ("name == 'rank'", False),
        ("layer < 2 and step == 0", False),
        (None, False),
    ],
)
@pytest.mark.parametrize("which", ["b2t", "t2b", "compare", "keep"])
def test_a_plan_knows_whether_ranks_may_decide_differently(which: str, expression: str | None, depends: bool) -> None:
    assert GraftPlan(**{which: expression}).rank_dependent is depends


def test_a_plan_knows_every_tag_that_some_filter_looks_at() -> None:
    plan = GraftPlan(b2t="name == 'q'", t2b="layer < 2", compare="phase == 'decode'", keep="search('x', name)")
    assert plan.mentions == {"name", "layer", "phase"}


# ---- which transform is for a tap -----------------------------------------------------------------------------------

F, G, H = "torch.clone", "torch.neg", "torch.abs"


@pytest.mark.parametrize(
    ("transform", "grafted", "compared"),
    [
        (None, None, None),
        (F, 0, None),
        ((YES, F), 0, 0),
        ((NO, F), None, None),
        ([(NO, F), (YES, G)], 1, 1),
        ([(YES, F), (YES, G)], 0, 0),
        ([(NO, F), G, (YES, H)], 1, 2),
        ([F], 0, None),
        ([], None, None),
        (("side == 'target' and missing is None", F), 0, 0),
    ],
    ids=str,
)
def test_first_matching_transform_applies_and_without_a_filter_only_at_grafts(
    transform: Any, grafted: int | None, compared: int | None
) -> None:
    for filters, expected in (({"b2t": YES}, grafted), ({"t2b": YES}, grafted), ({"t2b": NO}, compared)):
        plan = GraftPlan(**filters, transform=transform)
        assert plan.action_for(TAGS).transform == expected
        assert pickle.loads(pickle.dumps(plan)).action_for(TAGS).transform == expected
    assert GraftPlan(compare=None, keep="True", b2t=NO, transform=transform).action_for(TAGS).transform == compared
    assert GraftPlan(compare=None, b2t=NO, transform=transform).action_for(TAGS) == Action()


def test_transforms_filter_does_not_affect_the_action() -> None:
    plan = GraftPlan(b2t="name == 'q'", transform=("phase == 'decode' and rank == 1", F))
    assert not plan.rank_dependent
    assert plan.mentions == {"name"}
    assert plan.looks_at == {"name", "phase", "rank"}


@pytest.mark.parametrize(
    ("transform", "error", "says"),
    [
        (("layer ==", F), FilterError, "layer =="),
        (("", F), TransformError, "blank.*'True' for all taps"),
        (("True", "no_such_module.f"), TransformError, "no_such_module"),
        (("True", F, G), TransformError, r"is \(filter, transform\)"),
        ((F,), TransformError, r"is \(filter, transform\)"),
        (((YES, F), (NO, G)), TransformError, "several are a list of such pairs"),
        ([(YES, F), 3], TransformError, "not int"),
    ],
    ids=str,
)
def test_a_transform_with_a_filter_that_cannot_be_used_is_refused(transform: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        GraftPlan().edit(b2t="True", transform=transform)


def test_each_transform_is_shown_with_the_taps_that_it_is_for() -> None:
    shown = GraftPlan(b2t="True", transform=[(YES, F), G])._repr_mimebundle_()["text/html"]
    assert "torch.clone" in shown
    assert "where layer == 3" in shown
    assert shown.index("torch.neg") < shown.index("where the plan grafts") < shown.index("elsewhere")


# ---- the names under which taps are paired --------------------------------------------------------------------------


def test_a_name_is_rewritten_once_by_the_first_rule_of_its_side_that_matches() -> None:
    plan = GraftPlan().edit(
        rename={
            "target": {r"^model\.blocks\.(\d+)\.": r"layers[\1].", r"^model\.": ""},
            "baseline": {r"^model\.blocks": "late"},
        }
    )
    assert plan.rewrite("target", "model.blocks.3.attn") == "layers[3].attn"
    assert plan.rewrite("target", "model.norm") == "norm"
    assert plan.rewrite("baseline", "model.blocks.3.attn") == "late.3.attn"
    assert GraftPlan().rewrite("target", "model.blocks.3.attn") == "model.blocks.3.attn"
    # What one rule made is not for the next: else two names could not be exchanged.
    assert GraftPlan().edit(rename={"target": {"^a$": "b", "^b$": "a"}}).rewrite("target", "a") == "b"
    assert GraftPlan().edit(rename={"target": {"^a$": "b", "^b$": "a"}}).rewrite("target", "b") == "a"
    chained = {"dropout1": "attention.output.dropout", "dropout": "intermediate.act"}
    assert GraftPlan().edit(rename={"target": chained}).rewrite("target", "dropout1") == "attention.output.dropout"
    # A rule applies wherever it matches in the name.
    assert GraftPlan().edit(rename={"target": {"a": "b"}}).rewrite("target", "a.a") == "b.b"


def test_only_names_that_nothing_rewrites_are_known_on_the_other_side() -> None:
    plan = GraftPlan(rename={"target": {r"^model\.": ""}})
    (mine,) = plan.pairings("baseline", "x", {})
    (theirs,) = plan.pairings("target", "model.x", {})
    assert (mine.name, mine.baseline_name, mine.target_name) == ("x", "x", None)
    assert (theirs.name, theirs.baseline_name, theirs.target_name) == ("x", "x", "model.x")
    (mine,) = GraftPlan().pairings("baseline", "x", {})
    assert mine.target_name == "x"


def test_the_tags_of_a_pair_replace_the_taps_own_in_filters() -> None:
    plan = GraftPlan(pairs=[("q[l=1]", "x[i=2]"), ("a", "b")])
    place = {"side": "target", "rank": 0, "step": 4}
    (tags,) = plan.paired_tags({"name": "x", "i": 2, "p": 5, **place})
    assert tags == {"name": "q", "baseline_name": "q", "target_name": "x", "l": 1, "p": 5, **place}
    (tags,) = plan.paired_tags({"name": "b", "i": 2, **place})
    assert tags == {"name": "a", "baseline_name": "a", "target_name": "b", "i": 2, **place}


@pytest.mark.parametrize("whole", ["baseline", "target"])
def test_a_plan_knows_on_which_side_taps_show_the_rows_of_its_layouts(whole: Any) -> None:
    pair = {"baseline": "x", "target": "y", "layout": "rows(of='ids', into='packed')", "whole": whole}
    other = "target" if whole == "baseline" else "baseline"
    assert GraftPlan(pairs=[pair, ("a", "b")]).row_taps == {whole: {"ids"}, other: {"packed"}}


def test_a_plan_knows_taps_that_no_filter_can_match_by_their_own_names_alone() -> None:
    plan = GraftPlan(compare="name == 'h.0'")
    assert plan.matches_any
    assert plan.may_match("h")
    assert not plan.may_match("l")
    assert plan.edit(rename={"target": {"^l": "h"}}).may_match("l")
    assert plan.edit(pairs=[("h.0", "l.0")]).may_match("l")


UNUSABLE_RENAMES: dict[str, Any] = {
    "no regex": {"target": {"(": "x"}},
    "a group that is not there": {"target": {"a": r"\1"}},
    "a group too many": {"target": {"(a)": r"\2"}},
    "a name that is not there": {"target": {"(?P<n>a)": r"\g<m>"}},
    "half an escape": {"target": {"a": "\\"}},
    "more repeats than can be counted": {"target": {"a{99999999999999999999}": "b"}},
    "more parts than fit in memory": {"target": {"a" * 20_000: "b"}},
    "no such side": {"left": {"a": "b"}},
    "no such side, without rules": {"left": {}},
    "no replacement": {"target": {"a": None}},
    "a function": {"target": {"a": lambda match: "b"}},
    "a number": {"target": {3: "b"}},
    "bytes": {"target": {b"a": b"b"}},
    "a side without rules": {"target": "a"},
    "a list": ["target"],
    "a string": "target",
}


@pytest.mark.parametrize("rename", UNUSABLE_RENAMES.values(), ids=UNUSABLE_RENAMES)
def test_a_rename_that_cannot_work_is_refused_when_the_plan_is_made(rename: Any) -> None:
    with pytest.raises(PlanError, match="rename"):
        GraftPlan().edit(rename=rename)
    with pytest.raises(PlanError, match="rename"):
        GraftPlan(rename=rename)


def test_renames_are_taken_as_a_tuple_too_and_its_shape_is_checked() -> None:
    assert GraftPlan(rename=(("target", "a", "b"),)).rewrite("target", "aa") == "bb"
    with pytest.raises(
        PlanError, match=exactly("a rename rule is (side, regex, replacement), three strings, not ('target', 'a')")
    ):
        GraftPlan(rename=(("target", "a"),))  # type: ignore[arg-type]


# ---- refusals -------------------------------------------------------------------------------------------------------

REFUSED = {
    "a syntax error": ({"b2t": "name =="}, FilterError),
    "an unknown helper": ({"t2b": "findall('a', name)"}, FilterError),
    "an attribute": ({"compare": "name.__class__"}, FilterError),
    "no text": ({"keep": 3}, FilterError),
    "a module that is not there": ({"transform": "no_such_module.function"}, TransformError),
    "a function that is not there": ({"transform": "torch.no_such_function"}, TransformError),
    "source that does not compile": ({"transform": "def transform(g) return 1"}, TransformError),
    "no transform at all": ({"transform": 3}, TransformError),
    "a function that cannot travel": ({"transform": (lambda stuck: lambda g: stuck)(sys._getframe())}, ShippingError),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_parts_are_refused_when_the_plan_is_made(what: str) -> None:
    changes, error = REFUSED[what]
    plan = GraftPlan().edit(b2t="name == 'q'")
    before = plan.__getstate__()
    with pytest.raises(error) as raised:
        plan.edit(**changes)
    assert isinstance(raised.value, GraftError)
    assert plan.__getstate__() == before
    with pytest.raises(error):
        GraftPlan(**changes)


# ---- travelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plan_arrives_equal_and_with_the_same_repr(protocol: int) -> None:
    plan = GraftPlan().edit(**CHANGES).edit(b2t="search('at+n', name)", transform=negated)
    plan.action_for(TAGS)  # whatever it has worked out by now stays here
    sent = pickle.dumps(plan, protocol)
    assert b"_filters" not in sent
    arrived = pickle.loads(sent)
    assert arrived == plan
    assert arrived.version == 2
    assert arrived.action_for(TAGS) == plan.action_for(TAGS) == Action("b2t", graft=True, keep=True, transform=0)
    assert arrived.rewrite("target", "model.x") == "net.x"
    assert arrived.transforms[0].load()(example()).tolist() == [-1.0]  # type: ignore[union-attr]
    assert arrived.edit().version == 3


@pytest.mark.parametrize("nothing", [None, "", "  \n"])
def test_a_plan_that_can_do_nothing_warns(nothing: str | None) -> None:
    with pytest.warns(
        GraftWarning, match="this plan does nothing: each of b2t, t2b, compare and keep is blank or None"
    ):
        GraftPlan(compare=nothing)
    with pytest.warns(GraftWarning, match="does nothing"):
        edited = GraftPlan().edit(compare=nothing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The ranks have been told by the notebook.
        pickle.loads(pickle.dumps(edited))
        for some in ({"b2t": "True"}, {"t2b": "True"}, {"keep": "False"}):
            edited.edit(**some)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("error:this plan grafts no tap")
def test_transform_that_applies_nowhere_warns() -> None:
    with pytest.warns(GraftWarning, match=r"applied nowhere.*transform=\('True', f\)"):
        GraftPlan(transform="torch.clone")
    with pytest.warns(GraftWarning, match="applied nowhere") as warned:
        GraftPlan(b2t="True", transform="torch.clone").edit(b2t=None)
    assert [each.filename for each in warned] == [__file__], "the line of the edit, not of a library"
    with pytest.warns(GraftWarning, match="applied nowhere"):
        GraftPlan(transform=[("layer == 3", "torch.clone"), "torch.clone"])
    GraftPlan(t2b="layer == 3", transform="torch.clone")
    GraftPlan(transform=("layer == 3", "torch.clone"))


def test_a_plan_of_many_parts_is_shown_in_less_than_a_screen() -> None:
    plan = GraftPlan(
        b2t=" or ".join(f"name == 'layers.{n}.attn'" for n in range(100)),
        pairs=[(f"h.{n}.attn.c_proj", f"model.layers.{n}.self_attn.o_proj") for n in range(200)],
        rename={"target": {f"^m{n}[.]": "" for n in range(30)}},
        transform=[(f"layer == {n}", F) for n in range(30)],
    )
    assert len(repr(plan)) <= 2048
    assert "… 198 more)" in repr(plan)
    rich = plan._repr_mimebundle_()["text/html"]
    assert rich.count("<tr>") <= 24
    for count, word in ((195, "pairs"), (25, "transforms"), (25, "renames")):
        name = word.replace("renames", "rename")
        assert f"and {count} {word} more: <code>session.plan.{name}</code>" in rich


def test_a_notebook_shows_filters_as_they_are_typed_and_what_matches_nothing() -> None:
    rich = GraftPlan(b2t="layer < 4 and name == 'a&b'", t2b="  ")._repr_mimebundle_()["text/html"]
    assert "<code>layer &lt; 4 and name == &#x27;a&amp;b&#x27;</code>" in rich
    assert rich.count("nothing") == 2
    assert "elsewhere" not in rich


def test_the_repr_of_a_small_plan_makes_an_equal_one() -> None:
    plan = GraftPlan(b2t="layer == 3", rename={"target": {"^model[.]": ""}}).edit(keep="True")
    assert eval(repr(plan), {"GraftPlan": GraftPlan}) == plan


@pytest.mark.parametrize(
    ("filters", "nothing"),
    [({}, True), ({"b2t": " "}, True), ({"t2b": "\n"}, True), ({"b2t": "True"}, False), ({"t2b": "layer == 1"}, False)],
)
def test_a_plan_with_blank_filters_grafts_nothing(filters: dict[str, str], nothing: bool) -> None:
    assert GraftPlan(**filters).grafts_nothing is nothing
