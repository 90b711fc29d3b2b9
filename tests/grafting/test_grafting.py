"""One tap's tensor is compared, grafted, ignored or failed; and the transform's input."""

from __future__ import annotations

import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
import torch
from kit.support import own_value, reset, run_cell

import graftlab as gl
from graftlab.grafting import active


@pytest.fixture(scope="module")
def two_and_one() -> Iterator[gl.Session]:
    with gl.launch(2, 1) as session:
        yield session


@pytest.fixture
def two_senders(two_and_one: gl.Session) -> gl.Session:
    return reset(two_and_one)


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def taps_a_and_b() -> tuple[list[float], list[float]]:
    """Both as statements, so that what was written into the tensors themselves is seen."""
    a, b = torch.full((2,), own_value()), torch.full((2,), own_value())
    gl.tap("a", a, layer=3)
    gl.tap("b", b, layer=4)
    return a.tolist(), b.tolist()


def returns_the_very_tensor() -> tuple[bool, list[float]]:
    a = torch.full((2,), own_value())
    return gl.tap("a", a) is a, a.tolist()


def sends() -> bool:
    """Whether this rank has a tensor on its way, after a tap and before the step ends."""
    gl.tap("a", torch.ones(4))
    return active.grafter()._exchange.bytes_in_use > 0


def three_times(value: Any, other: Any) -> tuple[bool, list[float]]:
    warnings.simplefilter("always")  # or Python itself would show a repeated warning once
    same = all(gl.tap("numbers", value) is value for _ in range(3))
    gl.tap("others", other)
    after = torch.full((2,), own_value())
    gl.tap("after", after)
    return same, after.tolist()


def taps_a_callable() -> tuple[int, bool, list[float]]:
    made: list[torch.Tensor] = []

    def value() -> torch.Tensor:
        made.append(torch.full((2,), own_value()))
        return made[-1]

    returned = gl.tap("lazy", value)
    return len(made), returned is value, made[-1].tolist() if made else []


def with_extras(give: tuple[int, ...] = (0, 1)) -> list[float]:
    me = gl.here()
    extras = {"fill": 100.0 * (me.rank + 1)} if me.side == "baseline" and me.rank in give else None
    return gl.tap("a", torch.full((2,), own_value()), extras=extras).tolist()


def with_extras_of_a_class_that_only_one_side_has() -> list[float]:
    if gl.here().side == "baseline":
        gl.here().vars["OnlyHere"] = type("OnlyHere", (), {"__module__": "__main__"})
        gl.tap("a", torch.full((2,), 10.0), extras=gl.here().vars["OnlyHere"]())
        gl.tap("b", torch.full((2,), 10.0))
        return []
    a = gl.tap("a", torch.full((2,), 20.0))
    return [*a.tolist(), *gl.tap("b", torch.full((2,), 20.0)).tolist()]


def published(graft_input):
    """Written against the published signature; looks at each of its four fields."""
    import torch

    assert graft_input.tags["name"] == "a"
    assert len(graft_input.received_list) == len(graft_input.received_extras_list) == 1
    assert graft_input.received_extras_list[0] == {"fill": 100.0}
    merged = torch.maximum(graft_input.received_list[0] * 2, graft_input.target)
    return merged + graft_input.received_extras_list[0]["fill"]


# ---- both ways, one way, no way -------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_b2t_and_t2b_in_one_run_on_different_taps(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'", t2b="name == 'b'")

    run = session.run(taps_a_and_b, taps_a_and_b)

    assert run.baseline == run.target == [([10.0, 10.0], [20.0, 20.0])]
    rows = run.frame.set_index("name")
    assert rows["direction"].to_dict() == {"a": "b2t", "b": "t2b"}
    assert rows["side"].to_dict() == {"a": "target", "b": "baseline"}
    assert set(rows["status"]) == {"grafted"}


@pytest.mark.ranks
def test_grafting_goes_before_compare_and_the_rest_is_compared(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'")

    run = session.run(taps_a_and_b, taps_a_and_b)

    assert run.target == [([10.0, 10.0], [20.0, 20.0])]
    rows = run.frame.set_index("name")
    assert rows["status"].to_dict() == {"a": "grafted", "b": "compared"}
    assert rows["max_abs"].to_dict() == {"a": 10.0, "b": 10.0}
    assert rows["layer"].to_dict() == {"a": 3, "b": 4}
    assert rows.loc["b", ["mean_baseline", "mean_target"]].tolist() == [10.0, 20.0]


@pytest.mark.ranks
def test_a_grafted_tap_returns_the_tensor_itself(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'")
    run = session.run(returns_the_very_tensor, returns_the_very_tensor)
    assert run.baseline == run.target == [(True, [10.0, 10.0])]


@pytest.fixture
def overlapping() -> Callable[..., Any]:
    """A session whose first plan has these filters, before any tap was seen: an edit would be refused later."""
    return lambda **filters: gl.launch(1, 1, plan=gl.GraftPlan(**filters))


@pytest.mark.ranks
def test_overlap_raises_on_that_rank_and_names_the_tags(overlapping: Callable[..., Any]) -> None:
    # Only the target's rank sees both filters match; the baseline's rank sends.
    with overlapping(b2t="layer == 3", t2b="name == 'a' and side == 'target'") as session:
        _check_overlap_on_the_target(session)


def _check_overlap_on_the_target(session: gl.Session) -> None:
    with pytest.raises(gl.RunError) as caught:
        # Else the other one is interrupted if it is late.
        session.run(taps_a_and_b, taps_a_and_b, on_failure="continue")

    assert list(caught.value.failures) == ["target[0]"]
    cause = caught.value.__cause__
    assert isinstance(cause, gl.GraftOverlapError)
    assert isinstance(cause, RuntimeError)
    for part in ("'a'", "target[0]", "'layer': 3", "layer == 3", "side == 'target'"):
        assert part in str(cause)
    # The rank that raised lives on.
    reset(session)
    assert session.run(taps_a_and_b, taps_a_and_b).target == [([20.0, 20.0], [20.0, 20.0])]


@pytest.mark.ranks
def test_overlap_on_every_rank_raises_on_every_rank(overlapping: Callable[..., Any]) -> None:
    with overlapping(b2t="True", t2b="name == 'b'") as session, pytest.raises(gl.RunError) as caught:
        session.run(taps_a_and_b, taps_a_and_b)
    assert list(caught.value.failures) == ["baseline[0]", "target[0]"]


@pytest.mark.ranks
def test_without_a_match_and_without_compare_nothing_is_touched_and_nothing_is_sent(session: gl.Session) -> None:
    session.edit(b2t="name == 'other'", t2b="name == 'another'", compare=None)
    seen = session.status()["taps"].tolist()

    run = session.run(returns_the_very_tensor, returns_the_very_tensor)

    assert run.baseline == [(True, [10.0, 10.0])]
    assert run.target == [(True, [20.0, 20.0])]
    assert session.run(sends, sends).baseline == [False]
    assert len(run.frame) == 0
    assert session.status()["taps"].tolist() == seen
    # The control: what is compared is sent.
    session.edit(compare="True")
    assert session.run(sends, lambda: None).baseline == [True]


@pytest.mark.ranks
def test_compare_overwrites_nothing(session: gl.Session) -> None:
    run = session.run(taps_a_and_b, taps_a_and_b)
    assert run.baseline == [([10.0, 10.0], [10.0, 10.0])]
    assert run.target == [([20.0, 20.0], [20.0, 20.0])]
    assert run.frame["status"].tolist() == ["compared", "compared"]


@pytest.mark.ranks
def test_one_sided_runs_ignore_taps(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = session.run(target=taps_a_and_b)
    assert run.target == [([20.0, 20.0], [20.0, 20.0])]
    assert run.baseline == []
    assert len(run.frame) == 0


# ---- values that are not tensors ------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("value", [[1.0, 2.0], None, 3.0, "text"], ids=lambda value: type(value).__name__)
def test_non_tensors_are_skipped_with_one_warning_per_tap(
    value: Any, session: gl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    with gl.launch(1, 1) as fresh:
        fresh.edit(b2t="True")
        run = fresh.run(three_times, three_times, args=(value, 2.0))

    assert run.baseline == run.target == [(True, [10.0, 10.0])]
    assert run.frame["name"].tolist() == ["after"]
    output = capsys.readouterr().out
    kind = type(value).__name__
    for label in ("baseline[0]", "target[0]"):
        warned = [line for line in output.splitlines() if line.startswith(label) and "GraftWarning" in line]
        assert len(warned) == 2
        assert f"gl.tap('numbers') on {label}: its value is {kind}, not a tensor" in warned[0]
        assert "gl.tap('others')" in warned[1]


@pytest.mark.ranks
def test_a_tap_whose_value_is_a_tensor_on_one_side_only_is_missing_or_unmatched(session: gl.Session) -> None:
    session.edit(b2t="True")

    def tensor() -> list[float]:
        return gl.tap("x", torch.full((1,), own_value())).tolist()

    def number() -> float:
        return gl.tap("x", own_value())

    assert session.run(number, tensor).frame["status"].tolist() == ["missing"]
    assert session.run(tensor, number).frame["status"].tolist() == ["unmatched"]


@pytest.mark.ranks
def test_callable_is_called_only_if_the_plan_matches_its_tap(session: gl.Session) -> None:
    session.edit(b2t="name == 'other'", compare=None)
    run = session.run(taps_a_callable, taps_a_callable)
    assert run.baseline == run.target == [(0, True, [])]

    session.edit(b2t="name == 'lazy'")
    run = session.run(taps_a_callable, taps_a_callable)
    # Called once on each side; what the target's call made was overwritten.
    assert run.baseline == run.target == [(1, True, [10.0, 10.0])]
    assert run.frame["status"].tolist() == ["grafted"]


# ---- extras ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize(("give", "expected"), [((0, 1), 2100.0), ((1,), 2001.0), ((0,), 101.0), ((), 2.0)], ids=str)
def test_extras_are_in_sender_order_and_omitted_ones_are_none(
    give: tuple[int, ...], expected: float, two_senders: gl.Session
) -> None:
    source = """
def transform(graft_input):
    pairs = list(zip(graft_input.received_list, graft_input.received_extras_list, strict=True))
    digits = [1.0 if extras is None else extras["fill"] * 10**i for i, (_, extras) in enumerate(pairs)]
    assert [tensor[0].item() for tensor, _ in pairs] == [10.0, 11.0]
    return graft_input.target * 0 + sum(digits)
"""
    two_senders.edit(b2t="name == 'a'", transform=source)
    run = two_senders.run(with_extras, with_extras, args=(give,))
    assert run.frame["error"].isna().all(), run.frame["error"].tolist()
    assert run.target == [[expected, expected]]


@pytest.mark.ranks
def test_extras_travel_in_the_other_direction_too(session: gl.Session) -> None:
    session.edit(
        t2b="name == 'a'", transform="def transform(g): return g.target + sum(g.received_extras_list[0]['add'])"
    )

    def tap_with_extras() -> list[float]:
        return gl.tap("a", torch.full((2,), own_value()), extras={"add": [own_value(), 0.5]}).tolist()

    assert session.run(tap_with_extras, tap_with_extras).baseline == [[30.5, 30.5]]


@pytest.mark.ranks
def test_unpicklable_extras_give_a_failed_row_that_names_them(
    session: gl.Session,
) -> None:
    def tap_with_bad_extras() -> float:
        extras = {"good": 1, "bad": {"deep": [2, (number for number in range(3))]}}
        gl.tap("a", torch.zeros(1), extras=extras if gl.here().side == "baseline" else None)
        return gl.tap("b", torch.full((1,), own_value())).item()

    session.edit(b2t="True")
    run = session.run(tap_with_bad_extras, tap_with_bad_extras)
    assert run.target == [10.0]
    rows = run.frame.set_index(["name", "side"]).sort_index()
    assert rows["status"].to_dict() == {
        ("a", "baseline"): "failed",
        ("a", "target"): "missing",
        ("b", "target"): "grafted",
    }
    error = rows.loc[("a", "baseline"), "error"]
    assert error.startswith("extras['bad']['deep'][1] of gl.tap('a') on baseline[0] cannot be pickled: ")
    assert "generator" in error


@pytest.mark.ranks
def test_extras_that_cannot_be_loaded_fail_that_tap_only(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = session.run(with_extras_of_a_class_that_only_one_side_has, with_extras_of_a_class_that_only_one_side_has)
    assert run.target == [[20.0, 20.0, 10.0, 10.0]]
    rows = run.frame.set_index("name")
    assert rows["status"].to_dict() == {"a": "failed", "b": "grafted"}
    assert "OnlyHere" in rows.loc["a", "error"]
    assert "extras" in rows.loc["a", "error"]


# ---- transforms -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["dotted path", "source text", "notebook function"])
def test_a_transform_written_against_the_published_signature_runs_unchanged(form: str, session: gl.Session) -> None:
    source = inspect.getsource(published)
    transform = {
        "dotted path": f"{__name__}.published",
        "source text": source,
        "notebook function": run_cell(source)["published"],
    }[form]
    session.edit(b2t="name == 'a'", transform=transform)

    run = session.run(with_extras, with_extras)

    assert run.frame["error"].isna().all(), run.frame["error"].tolist()
    # max(2 * 10, 20) + 100, and after that max(2 * 10, 20) stays what the baseline has.
    assert run.target == [[120.0, 120.0]]
    assert run.baseline == [[10.0, 10.0]]


@pytest.mark.ranks
def test_transforms_result_in_a_different_dtype_is_converted_and_recorded(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'", transform="def transform(g): return g.received_list[0].double() + 0.5")
    run = session.run(taps_a_and_b, taps_a_and_b)
    assert run.target[0][0] == [10.5, 10.5]
    assert run.frame.loc[run.frame["name"] == "a", "cast"].tolist() == ["float64 -> float32"]


@pytest.mark.ranks
def test_compare_measures_against_the_transforms_result(session: gl.Session) -> None:
    session.edit(transform=("True", "def transform(g): return g.received_list[0] * 2"))
    run = session.run(taps_a_and_b, taps_a_and_b)
    assert run.frame["max_abs"].tolist() == [0.0, 0.0]
    assert run.target == [([20.0, 20.0], [20.0, 20.0])]


def told(frame: pd.DataFrame) -> Iterator[Any]:
    which = [each if isinstance(each, str) else None for each in frame["transform"]]
    return frame.assign(transform=pd.Series(which, frame.index, dtype=object)).itertuples()


@pytest.mark.ranks
def test_transform_does_not_apply_at_other_taps(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'", transform="def transform(g): return g.received_list[0] * 2")
    label = session.plan.transforms[0].label
    frame = session.run(taps_a_and_b, taps_a_and_b).frame
    found = {row.name: (row.status, row.max_abs, row.transform) for row in told(frame)}
    assert found == {"a": ("grafted", 0.0, label), "b": ("compared", 10.0, None)}

    # The first of a list that is for a tap applies, whichever way the tap goes.
    session.edit(
        t2b="name == 'b'",
        b2t=None,
        transform=[
            ("name == 'b' and side == 'target'", "operator.neg"),
            ("name == 'b'", "def transform(g): return g.received_list[0] + 1"),
            ("True", "def transform(g): return g.received_list[0] * 4"),
        ],
    )
    labels = [each.label for each in session.plan.transforms]
    run = session.run(taps_a_and_b, taps_a_and_b)
    found = {row.name: (row.status, row.side, row.max_abs, row.transform) for row in told(run.frame)}
    assert found == {"a": ("compared", "target", 20.0, labels[2]), "b": ("grafted", "baseline", 11.0, labels[1])}
    assert run.baseline == [([10.0, 10.0], [21.0, 21.0])]


@pytest.mark.ranks
def test_a_transform_may_be_for_some_steps(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'", transform=("step % 2 == 0", "def transform(g): return g.received_list[0] * 2"))

    def three_steps() -> None:
        for _ in range(3):
            gl.tap("a", torch.full((2,), own_value()))
            gl.step()

    frame = session.run(three_steps, three_steps).frame
    frame = frame[frame["status"] == "grafted"]
    assert [(row.max_abs, isinstance(row.transform, str)) for row in frame.itertuples()] == [
        (0.0, True) if step % 2 == 0 else (10.0, False) for step in frame["step"]
    ]
    assert len(frame) == 3


FAILING = {
    "raises": ("raise ValueError('no such shard')", "ValueError: no such shard"),
    "raises at depth": ("torch.zeros(2) @ torch.zeros(3)", "RuntimeError"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "returns nothing": ("return None", "returned NoneType"),
    "returns a list": ("return [1.0, 2.0]", "returned list"),
    "returns another shape": ("return torch.zeros(3)", "returned shape [3]; the target has shape [2]"),
    "returns what would broadcast": ("return torch.zeros(1)", "returned shape [1]; the target has shape [2]"),
    "writes another shape": (
        "graft_input.target.resize_(1); return",
        "returned shape [1]; the target has shape",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("way", FAILING)
def test_failing_transform_leaves_the_target_and_the_run_continues(way: str, session: gl.Session) -> None:
    statement, message = FAILING[way]
    cell = run_cell(
        f"""
        import torch

        def faulty(graft_input):
            if graft_input.tags["name"] == "a":
                {statement}  # the line at fault
            return graft_input.received_list[0]
        """
    )
    session.edit(b2t="True", transform=cell["faulty"])

    run = session.run(taps_a_and_b, taps_a_and_b)

    assert run.target == [([20.0, 20.0], [10.0, 10.0])]
    assert run.baseline == [([10.0, 10.0], [10.0, 10.0])]
    rows = run.frame.set_index("name")
    assert rows["status"].to_dict() == {"a": "failed", "b": "grafted"}
    error = rows.loc["a", "error"]
    assert message in error
    if way.startswith(("raises", "exits")):
        assert "Traceback" in error
        assert "# the line at fault" in error
        # The reader's own frame comes first, none of graftlab's before it.
        assert error.index("faulty") < error.index("# the line at fault")
        assert "run_transform" not in error
    else:
        assert re.search(r"line \d+, in faulty\n    def faulty\(graft_input\):\ngraftlab", error)
    assert rows.loc["a", ["rel_l2", "max_abs"]].isna().all()


@pytest.mark.ranks
def test_a_transform_that_is_refused_here_leaves_the_plan_in_force(session: gl.Session) -> None:
    plan = session.plan
    for transform in ("def transform(", "nosuchmodule.transform", "x = 1", 7):
        with pytest.raises(gl.TransformError):
            session.edit(transform=transform)
    with pytest.raises(gl.FilterError):
        session.edit(b2t="name ==")
    assert session.plan is plan


@pytest.mark.ranks
def test_a_transform_that_only_the_notebook_can_load_fails_each_tap_not_the_run(session: gl.Session) -> None:
    # By path, from a module that exists in this process alone.
    import sys
    import types

    module = types.ModuleType("made_up_here")
    module.transform = lambda g: g.received_list[0]
    sys.modules["made_up_here"] = module
    try:
        session.edit(b2t="True", transform="made_up_here.transform")
    finally:
        del sys.modules["made_up_here"]

    run = session.run(taps_a_and_b, taps_a_and_b)

    assert run.target == [([20.0, 20.0], [20.0, 20.0])]
    assert run.frame["status"].tolist() == ["failed", "failed"]
    assert run.frame["error"].str.contains("cannot be loaded on this rank.*made_up_here").all()


@pytest.mark.ranks
def test_default_transform_names_the_shapes_that_do_not_fit_on_ranks(session: gl.Session) -> None:
    def shaped() -> list[float]:
        return gl.tap("a", torch.full((2, 3) if gl.here().side == "baseline" else (5, 7), own_value())).shape

    session.edit(b2t="True")
    row = session.run(shaped, shaped).frame.iloc[0]
    assert row["status"] == "failed"
    for part in ("[2, 3]", "[5, 7]", "def transform(graft_input"):
        assert part in row["error"]


@pytest.mark.ranks
def test_a_successful_graft_is_logged_with_before_after_and_the_difference(session: gl.Session) -> None:
    session.edit(b2t="name == 'a'")
    run = session.run(taps_a_and_b, taps_a_and_b)
    row = run.frame.set_index("name").loc["a"]

    lines = [line for line in session.log("target", lines=10).splitlines() if "INFO" in line]
    line = lines[-1]
    assert "target[0] grafted b2t at tap 'a'" in line
    before, after = line.split("overridden by")
    assert "float32[2] cpu (mean=20 std=0 min=20 max=20)" in before
    assert "float32[2] cpu (mean=10 std=0 min=10 max=10)" in after
    for name in ("rel_diff", "max_abs", "mean_abs"):
        assert f"{name}={row[name]:.3e}" in after
    # What is only compared is a row, not a line in the log.
    assert "'b'" not in session.log("target", lines=1)


def test_overlap_errors_survive_pickling() -> None:
    error = gl.GraftOverlapError("tap 'a' matches both")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
