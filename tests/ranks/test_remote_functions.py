"""What a rank does with the code of a notebook: how it is bound, and what comes back of each batch of a replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.grafters import StandInGrafter, become_rank
from kit.refusals import exactly

import graftlab as gl
from graftlab.errors import RequestError
from graftlab.grafting.unseen_choices import UnseenChoices
from graftlab.plan.plan import GraftPlan
from graftlab.ranks import remote_functions
from graftlab.ranks.remote_functions import (
    bind_callee,
    call_in_float64,
    call_until_exception,
    call_with_lent_weights,
    call_with_module_inputs,
    feed_batches,
    find_unseen_choices,
    find_without_dependents,
    graft_baseline_into_itself,
    round_callee,
    sketch_callee,
)
from graftlab.taps.ambient_tags import ambient

X = torch.linspace(0.1, 3, 8)


@pytest.fixture
def grafter(monkeypatch: pytest.MonkeyPatch) -> StandInGrafter:
    # As of a grafter within a run.
    monkeypatch.setattr(StandInGrafter, "moment", property(lambda self: (0, self.next_step)))
    return become_rank(monkeypatch, "target", x=X, twice=lambda batch: [2 * each for each in batch])


def tapped(x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
    gl.tap("y", x * times)
    gl.tap("n", 3)
    return (x * times).sin()


@pytest.mark.usefixtures("grafter")
def test_code_is_a_function_with_arguments_or_an_expression_on_the_rank() -> None:
    assert torch.equal(bind_callee(tapped, (X,), {"times": 2.0})(), (X * 2).sin())
    assert torch.equal(bind_callee("x + 1")(), X + 1)
    sketches, others = sketch_callee(tapped, (X,), {"times": 2.0})
    assert [(each.name, round(each.norm, 4)) for each in sketches] == [("y", round(float((X * 2).norm()), 4))]
    assert others == ["n"]


def test_a_call_that_raises_again_has_no_result() -> None:
    def fails() -> None:
        raise ValueError

    assert call_until_exception(fails) is None
    assert call_until_exception(lambda: 3) == 3


def test_lent_weights_are_put_back_after_the_call(grafter: StandInGrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def restoring() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("put back")

    monkeypatch.setattr(grafter, "restoring_data", restoring, raising=False)
    assert call_with_lent_weights(lambda: seen.append("call")) is None
    assert seen == ["begin", "call", "put back"]


def test_a_call_in_float64_computes_in_it() -> None:
    wide = call_in_float64(tapped, X, times=1 / 3)
    assert not torch.equal(wide.double(), tapped(X, times=1 / 3).double())
    assert torch.allclose(wide.double(), (X.double() / 3).sin(), rtol=1e-7, atol=0)
    assert round_callee(tapped, (X,), {"times": 1 / 3}, 1 << 20)


@pytest.mark.usefixtures("grafter")
def test_inputs_of_modules_are_those_of_the_code_that_ran() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 2))
    gl.watch(model).remove()
    assert call_with_module_inputs(lambda: model(X), [], [], {}) == {}


def test_a_verdicts_choices_reach_the_code_that_grafts_a_baseline_into_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    grafted, without = Mock(), Mock()
    monkeypatch.setattr(remote_functions, "graft_self", grafted)
    monkeypatch.setattr(remote_functions, "without_dependents", without)
    plan = GraftPlan(rename={"baseline": {"^x$": "x_of_both"}})
    for exact in (None, lambda: "exact"):
        found = graft_baseline_into_itself(lambda: "own", exact, {"a": "float32"}, plan, 9, ["a"], ["b"])
        assert found is grafted.return_value
        (run, dtypes), given = grafted.call_args
        assert (run(), dtypes, given.pop("paired_names")("x")) == ("own", {"a": "float32"}, ["x_of_both"])
        made = given.pop("exact")
        assert made is None if exact is None else made() == "exact"
        assert given == {"budget": 9, "keep": ["a"], "doubtful": ["b"]}
    assert find_without_dependents(lambda: "own", ["a", "b"], plan, 7) is without.return_value
    (run, groups), given = without.call_args
    assert (run(), groups, given.pop("paired_names")("x"), given) == ("own", ["a", "b"], ["x_of_both"], {"budget": 7})


@pytest.mark.parametrize("has_compiled", [False, True])
def test_choices_are_not_looked_for_where_code_would_be_compiled_anew(
    has_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = Mock()
    monkeypatch.setattr(remote_functions, "unseen_choices", looked)
    monkeypatch.setattr(remote_functions, "has_compiled", lambda: has_compiled)
    found = find_unseen_choices(lambda: "own", ["a"], True)
    if has_compiled:
        assert found == UnseenChoices()
        looked.assert_not_called()
    else:
        assert found is looked.return_value
        (run, taps), given = looked.call_args
        assert (run(), taps, given) == ("own", ["a"], {"sees_result": True})


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_each_batch_has_its_outputs_or_its_own_failure(grafter: StandInGrafter) -> None:
    def answer(batch: list[Any]) -> list[Any]:
        if "bad" in batch:
            raise ValueError("no such request")
        if "exit" in batch:
            raise SystemExit(2)
        return [each.upper() for each in batch if each != "lost"] * (2 if "more" in batch else 1)

    batches = [("0", ["a", "b"]), ("1", ["bad", "c"]), ("2", ["d", "lost"]), ("3", ["exit"]), ("4", ["e"])]
    good, bad, short, left, last, long = feed_batches(answer, [*batches, ("5", ["more"])])
    assert str(long.error).startswith("RequestError: the function returned 2 outputs for 1 request; return one for")
    assert (good.outputs, good.error) == (["A", "B"], None)
    assert bad.outputs == [None, None]
    assert str(bad.error).startswith("ValueError: no such request\n")
    assert "in answer" in str(bad.error)
    assert str(short.error).startswith("RequestError: the function returned 1 output for 2 requests; return one for")
    assert (left.outputs, str(left.error).partition("\n")[0]) == ([None], "SystemExit: 2")
    assert (last.outputs, last.error) == (["E"], None)
    assert [each.step for each in (good, bad, short, left, last, long)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures("grafter")
def test_batches_have_a_step_and_a_request_id_each() -> None:
    seen: list[Any] = []

    def answer(batch: list[Any]) -> list[Any]:
        seen.append((dict(ambient.get())["rid"], batch))
        # As an engine does after each forward pass.
        gl.step()
        return batch

    found = feed_batches(answer, [("a", [1]), ("b", [2]), ("c", [3])])
    assert seen == [("a", [1]), ("b", [2]), ("c", [3])]
    # The first batch is of the step that the run begins with; each is known by the step in which it began.
    assert [each.step for each in found] == [0, 2, 4]
    assert "rid" not in dict(ambient.get())


def test_batches_outside_a_run_have_no_step(grafter: StandInGrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInGrafter, "moment", None)
    assert [each.step for each in feed_batches(list, [("a", [1])])] == [None]


@pytest.mark.usefixtures("grafter")
def test_a_function_of_batches_may_be_an_expression_and_must_be_callable() -> None:
    (found,) = feed_batches("twice", [("a", [1, 2])])
    assert found.outputs == [2, 4]
    with pytest.raises(
        RequestError, match=exactly("replay: 3 cannot be called; give a function of a list of requests")
    ):
        feed_batches("3", [("a", [1])])
