"""A plan is written as one cell that puts the same plan in force elsewhere."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.errors import TransformError
from graftlab.plan.changes import PARTS, PlanChange
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import GraftTransformInput, TransformSpec

pytestmark = pytest.mark.filterwarnings("ignore:this plan does nothing", "ignore:this plan grafts no tap")

FACTOR = 2.0
TABLE = torch.ones(2)


class Elsewhere:
    """Takes the edit of a cell, as the session of another notebook does."""

    def __init__(self) -> None:
        self.plan = GraftPlan(
            b2t="name == 'left over'", rename={"target": {"^old": ""}}, transform=("True", "math.sin")
        )

    def edit(self, **changes: Any) -> None:
        self.plan = self.plan.edit(**changes)


def restored(plan: GraftPlan) -> GraftPlan:
    session = Elsewhere()
    exec(plan.to_code(), {"session": session})
    return session.plan


NAMES = st.text(alphabet="abc.'\"\\ \n\r\té{}%", min_size=1, max_size=8)
FILTER_TEXTS = st.one_of(
    st.none(),
    st.sampled_from(["", "layer == 3", "True", "(name == 'q'\n and layer < 4)  # comment", "search('a\"b', name)"]),
    NAMES.map(lambda text: f"name == {text!r}"),
)
SOURCES = NAMES.map(lambda text: f"def transform(graft_input):\n    {text!r}\n    return graft_input.target")
ONE_TRANSFORM = st.one_of(
    SOURCES,
    SOURCES.map(lambda text: text + '\n"""the end"""'),
    SOURCES.map(lambda text: text.replace("\n", "\r\n")),
    st.just("graftlab.transforms.align_by_request"),
)
TRANSFORMS = st.lists(
    st.one_of(ONE_TRANSFORM, st.tuples(st.sampled_from(["True", "name == 'a\\nb'", "layer < 3"]), ONE_TRANSFORM)),
    max_size=3,
)
# A replacement has no groups to refer to.
RENAMES = st.lists(
    st.tuples(
        st.sampled_from(["baseline", "target"]),
        st.sampled_from([r"^model\.", "'", '"', "a\nb", r"\\"]),
        st.sampled_from(["", "net.", "'\"", "é\n"]),
    ),
    max_size=3,
).map(tuple)
PAIRS = st.lists(
    st.builds(
        PairRule,
        baseline=NAMES.filter(lambda text: "{" not in text),
        target=NAMES.filter(lambda text: "{" not in text),
        layout=st.sampled_from(["same", "a b -> b a"]),
        whole=st.sampled_from(["baseline", "target"]),
        matched_by=st.sampled_from(["given", "exact", "near"]),
        rel=st.one_of(st.none(), st.floats(allow_nan=False)),
    ),
    max_size=3,
    unique_by=(lambda rule: rule.baseline, lambda rule: rule.target),
).map(tuple)


@given(FILTER_TEXTS, FILTER_TEXTS, FILTER_TEXTS, FILTER_TEXTS, TRANSFORMS, RENAMES, PAIRS)
def test_a_plan_written_as_code_is_the_same_plan_elsewhere(
    b2t: str | None, t2b: str | None, compare: str | None, keep: str | None, transform: Any, rename: Any, pairs: Any
) -> None:
    plan = GraftPlan(b2t, t2b, compare, keep, transform, rename, pairs)
    again = restored(plan)
    assert [getattr(again, name) for name in PARTS] == [getattr(plan, name) for name in PARTS]
    assert not PlanChange(plan, again).parts


def doubled(graft_input: GraftTransformInput) -> torch.Tensor:
    return graft_input.received_list[0] * FACTOR + math.pi


def looked_up(graft_input: GraftTransformInput) -> torch.Tensor:
    return graft_input.received_list[0] * TABLE


def of_closure(factor: float) -> Any:
    def scaled(graft_input: GraftTransformInput) -> torch.Tensor:
        return graft_input.received_list[0] * factor

    return scaled


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (doubled, 2 * FACTOR + math.pi),
        (of_closure(3.0), 6.0),
        (lambda graft_input: graft_input.received_list[0] + 1, 3.0),
    ],
    ids=["function", "closure", "lambda"],
)
def test_a_function_is_written_with_what_it_reads(transform: Any, expected: float) -> None:
    spec = restored(GraftPlan(transform=("True", transform))).transform
    assert isinstance(spec, TransformSpec)
    assert spec.kind == "source"
    value = torch.full((1,), 2.0)
    made = spec.load()(GraftTransformInput(tags={}, received_list=[value], received_extras_list=[None], target=value))
    assert made.item() == pytest.approx(expected)


ON_ONE_LINE = (lambda given: given.target, lambda given: given.received_list[0])


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        # Which of them is meant cannot be seen in the source.
        (ON_ONE_LINE[0], "several functions begin on its line; define it with def"),
        (ON_ONE_LINE[1], "several functions begin on its line; define it with def"),
        (looked_up, "looked_up cannot be written as code: it reads 'TABLE', a Tensor"),
        # A float by its class, whose text is a call.
        (of_closure(np.float64(2.0)), "it reads 'factor', a float64"),
    ],
    ids=["first", "second", "tensor", "float64"],
)
def test_a_function_that_reads_more_than_plain_values_of_its_notebook_is_refused(transform: Any, reason: str) -> None:
    with pytest.raises(TransformError, match=reason):
        GraftPlan(transform=("True", transform)).to_code()


def test_a_change_names_each_part_with_both_values() -> None:
    before = GraftPlan(b2t="layer == 3")
    after = before.edit(b2t=None, transform=("True", "math.sin"), rename={"target": {"^m": ""}}, pairs=[("a", "b")])
    change = PlanChange(before, after)
    assert change.parts == ("b2t", "transform", "rename", "pairs")
    assert change.text == (
        "b2t: layer == 3 -> nothing; transform: default -> math.sin where True; "
        "rename: none -> 1 rule (target ^m -> ); pairs: none -> 1 pair (a = b)"
    )
    blank = before.edit(b2t="  ")
    assert PlanChange(after, blank.edit(transform=after.transform, rename=after.rename, pairs=after.pairs)).parts == ()
    assert PlanChange(blank, blank.edit(b2t=" layer < 3\n")).text == "b2t: nothing -> layer < 3"
    longest, longer = "layer == 1 or layer == 22222 or " * 2 + "layer == 3 or layer == 4", "layer == 3 or " * 9 + "True"
    assert PlanChange(blank, blank.edit(b2t=longest[:80])).text == f"b2t: nothing -> {longest[:80]}"
    assert PlanChange(blank, blank.edit(b2t=longer)).text == f"b2t: nothing -> {longer[:39]}…{longer[-40:]}"
    rich = PlanChange(blank, before.edit(b2t="layer < 3"))._repr_mimebundle_()["text/html"]
    assert rich == "<b>plan 1</b>: b2t: nothing -&gt; layer &lt; 3"
