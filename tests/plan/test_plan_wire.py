"""A plan travels to the ranks as plain data: it arrives equal, is checked, and nothing is executed."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.limits import limited
from kit.refusals import exactly

import graftlab as gl
from graftlab.errors import FilterError, MessageError, PlanError, TagError, TransformError
from graftlab.plan.plan import FILTERS, GraftPlan, PlanEdit
from graftlab.plan.wire import WirePlan, WireTransform, from_wire, pack_plan, to_wire, unpack_plan
from graftlab.transforms import GraftTransformInput

EDITS: dict[str, list[Any]] = {
    "b2t": [None, "", "name == 'q'"],
    "t2b": [None, "layer < 2 and search('ä', name)"],
    "compare": [None, "True"],
    "keep": [None, "rank == 0"],
    "transform": [
        None,
        "def transform(g): return g.target",
        "torch.clone",
        lambda g: -g.target,
        ("layer == 1", "torch.clone"),
        [("layer == 2", "torch.neg"), ("name == 'q'", lambda g: -g.target), "torch.clone"],
    ],
    "rename": [None, {"target": {"^model": "net", "a": "b"}, "baseline": {r"(\d+)": r"\1"}}],
}


@pytest.mark.filterwarnings("ignore:this plan does nothing", "ignore:this plan grafts no tap")
@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in EDITS.items()}))
def test_a_plan_arrives_equal(changes: dict[str, Any]) -> None:
    plan = GraftPlan().edit(**changes)
    arrived = unpack_plan(pack_plan(plan))
    assert arrived == plan
    assert from_wire(to_wire(plan)) == plan
    for name in FILTERS:
        assert arrived.action_for({"name": "q", "layer": 1}) == plan.action_for({"name": "q", "layer": 1}), name


def test_a_transform_given_as_a_function_arrives_as_one() -> None:
    arrived = unpack_plan(pack_plan(GraftPlan(b2t="True", transform=lambda g: -g.target)))  # type: ignore[arg-type]
    transform = arrived.transforms[0].load()
    assert transform(GraftTransformInput({}, [torch.zeros(1)], [None], torch.ones(1))).tolist() == [-1.0]  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore:this plan does nothing")
def test_warnings_about_a_plan_are_not_repeated_on_arrival() -> None:
    sent = pack_plan(GraftPlan(compare=None))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrived = unpack_plan(sent)
    assert arrived.compare is None


def test_the_wire_has_every_part_of_a_plan_and_an_edit_all_but_the_version() -> None:
    parts = [field.name for field in dataclasses.fields(GraftPlan)]
    assert list(WirePlan.__struct_fields__) == parts
    assert [*PlanEdit.__annotations__, "version"] == parts


def wire_of(plan: GraftPlan, **changes: Any) -> bytes:
    return msgspec.msgpack.encode({**msgspec.structs.asdict(to_wire(plan)), **changes})


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"b2t": 3}, MessageError, r"Expected `str \| null`, got `int` - at `\$.b2t`"),
        ({"version": "1"}, MessageError, r"\$.version"),
        ({"version": -1}, MessageError, r"\$.version"),
        ({"rename": [["left", "a", "b"]]}, MessageError, r"'left'"),
        ({"rename": [["target", "a"]]}, MessageError, r"\$.rename"),
        ({"more": 1}, MessageError, "unknown field `more`"),
        ({"transform": [{"kind": "pickle", "text": "", "blob": b"", "where": None}]}, MessageError, "'pickle'"),
        ({"b2t": "name =="}, FilterError, "syntax|expression"),
        ({"keep": "name.__class__"}, FilterError, "__class__|attribute"),
        ({"rename": [["target", "(", "b"]]}, PlanError, "rename"),
        (
            {"transform": [{"kind": "function", "text": "f", "blob": b"", "where": None}]},
            PlanError,
            "'function' came with 0 bytes",
        ),
        (
            {"transform": [{"kind": "path", "text": "f", "blob": b"x", "where": None}]},
            PlanError,
            "'path' came with 1 bytes",
        ),
        ({"transform": [{"kind": "path", "text": "f", "blob": b"", "where": "a =="}]}, FilterError, "a =="),
    ],
)
def test_invalid_plan_is_refused_on_arrival(changes: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        unpack_plan(wire_of(GraftPlan(), **changes))


def test_a_plan_without_a_part_is_refused() -> None:
    for name in WirePlan.__struct_fields__:
        fields = msgspec.structs.asdict(to_wire(GraftPlan()))
        del fields[name]
        with pytest.raises(MessageError, match=f"missing required field `{name}`"):
            unpack_plan(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=100))
def test_other_bytes_are_no_plan(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpack_plan(data)


def test_a_plan_that_is_only_received_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was run",)

    evil = to_wire(GraftPlan())
    evil = msgspec.structs.replace(evil, transform=(WireTransform("function", "f", pickle.dumps(Evil()), None),))
    plan = from_wire(evil)
    assert plan.action_for({"name": "x"}).direction == "b2t"
    repr(plan), plan._repr_mimebundle_(), plan.edit(b2t="name == 'x'")
    assert not list(tmp_path.iterdir())
    with pytest.raises(MessageError):
        unpack_plan(pickle.dumps(Evil()))
    assert not list(tmp_path.iterdir())


def test_a_rename_that_cannot_be_sent_is_refused_when_the_plan_is_made() -> None:
    with pytest.raises(PlanError, match=r"rename .* is invalid"):
        GraftPlan().edit(rename={"target": {"a": "\ud800"}})


# ---- the keywords of an edit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [GraftPlan().edit, GraftPlan.edit, gl.Session.edit])
def test_help_shows_the_possible_changes_of_an_edit(edit: Any) -> None:
    parameters = inspect.signature(edit).parameters
    keywords = [each for each in parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    assert [each.name for each in keywords] == ["b2t", "t2b", "compare", "keep", "transform", "rename", "pairs"]
    assert {repr(each.default) for each in keywords} == {"<unchanged>"}
    assert str(inspect.signature(edit)).count("b2t: 'str | None' = <unchanged>") == 1


def test_unknown_keyword_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        TypeError,
        match=exactly(
            "edit() got unexpected keywords ['b2']; a plan has b2t, t2b, compare, keep, transform, rename, pairs"
        ),
    ):
        GraftPlan().edit(b2="True")  # type: ignore[call-arg]


# ---- plans of any kind ----------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
words = "name layer step rank None True 'q' 1 == < not in ( ) [ ] search( , 0 : - * . lambda len( '(a|' { } if else ä"
pieces = st.sampled_from([*words.split(), " ", " and ", " or ", "\n", "\x00"])
expressions = st.lists(pieces, max_size=9).map("".join)
names = st.text("ab.\\1(|)*+?[]^$ ", max_size=8)
refused = (PlanError, FilterError, TransformError, MessageError, TagError)


def asked_of(plan: GraftPlan) -> None:
    """Query a plan as ranks do; it may raise only its own errors."""
    for side in ("baseline", "target"):
        for tags in ({"name": "q", "layer": 1, "step": 0}, {"name": "h.0.x", "layer": None}, {"name": ""}):
            try:
                for paired in plan.paired_tags({**tags, "side": side, "rank": 0}):
                    plan.action_for(paired)
            except FilterError:
                continue


@pytest.mark.filterwarnings("ignore:this plan does nothing", "ignore:this plan grafts no tap", "ignore::SyntaxWarning")
@given(
    st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(FILTERS, expressions | anything),
            "rename": anything
            | st.dictionaries(st.sampled_from(["baseline", "target", "x"]), st.dictionaries(names, names)),
            "pairs": anything | st.lists(st.tuples(names, names), max_size=3),
            "transform": anything
            | st.sampled_from(["torch.clone", "no.where", "def f(", "def transform(g): return g.target"]),
        },
    )
)
@examples(200)
def test_any_argument_gives_a_plan_or_a_graftlab_error(parts: dict[str, Any]) -> None:
    try:
        plan = GraftPlan(**parts)
    except refused:
        return
    asked_of(plan)
    assert unpack_plan(pack_plan(plan)) == plan


@pytest.mark.filterwarnings("ignore:this plan does nothing", "ignore:this plan grafts no tap", "ignore::SyntaxWarning")
@given(
    st.dictionaries(st.sampled_from(WirePlan.__struct_fields__), anything | expressions, max_size=2),
    st.lists(st.tuples(st.integers(0), st.integers(0, 255)), max_size=3),
    st.integers(0, 30),
)
@examples(300)
def test_any_message_gives_a_plan_or_a_graftlab_error(
    changes: dict[str, Any], flips: list[tuple[int, int]], cut: int
) -> None:
    plan = GraftPlan(b2t="name == 'q'", rename={"target": {"^model": "net"}}, pairs=[("h.{n}.x", "l.{n}.y")])  # type: ignore[arg-type]
    data = bytearray(wire_of(plan, **changes))
    for place, value in flips:
        data[place % len(data)] = value
    try:
        with limited():
            arrived = unpack_plan(bytes(data[: len(data) - cut]))
    except refused:
        return
    asked_of(arrived)
