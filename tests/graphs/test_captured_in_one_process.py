"""A captured function's taps before a grafter in this process: what a replay shows, grafts and refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld
from kit.refusals import exactly
from torch import Tensor

import graftlab as gl
from graftlab.grafting import active
from graftlab.graphs import FillContext
from graftlab.graphs.capture import CpuCapturer
from graftlab.graphs.captured_function import CapturedFunction
from graftlab.graphs.tap_sites import WantedTaps, _is_wanted
from graftlab.plan.plan import Action
from graftlab.taps import calls

ways = pytest.mark.parametrize("grafts", ["switches", "breaks"])


def rank_of(monkeypatch: pytest.MonkeyPatch, **plan: Any) -> GrafterWorld:
    """This process taps as the target does; the test taps for the baseline."""
    world = GrafterWorld(1, 1, **plan)
    grafter = world.target.grafter
    for module, name, value in (
        (active, "_grafter", grafter),
        (calls, "_grafter", grafter),
        (calls, "_handler", grafter),
    ):
        monkeypatch.setattr(module, name, value)
    return world


def captured(
    function: Callable[[Tensor], Tensor], buffer: Tensor, grafts: Any = "switches", wanted: WantedTaps | None = None
) -> CapturedFunction:
    graph = CapturedFunction(sizes(len(buffer)), wanted or WantedTaps(grafts), CpuCapturer())
    graph.capture(lambda: (function(buffer),))
    return graph


def sizes(padded: int, raw: int | None = None) -> FillContext:
    raw = padded if raw is None else raw
    return FillContext(raw, padded, 0, 0)


def on(buffer: Tensor, graph: CapturedFunction, *values: float) -> tuple[list[float], int]:
    """What a replay gives for these values, and how many replays it took."""
    buffer[: len(values)] = torch.tensor(values)
    outputs, count = graph.replay(int, sizes(len(buffer), len(values)))
    return outputs[0][: len(values)].tolist(), count


@ways
def test_a_graft_continues_in_the_graph_and_rows_leave_out_the_padding(
    grafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = rank_of(monkeypatch, b2t="name == 'doubled'", compare="name == 'out'")

    def function(x: Tensor) -> Tensor:
        with gl.tags(layer=3):
            x = gl.tap("doubled", x * 2)
        return gl.tap("out", x + 1)

    buffer = torch.zeros(4)
    graph = captured(function, buffer, grafts)
    assert [(site.name, site.tags, site.rows, site.breaks) for site in graph.sites] == [
        ("doubled", {"layer": 3}, "requests", grafts == "breaks"),
        ("out", {}, "requests", False),
    ]
    for step, values in enumerate(([1.0, 2.0, 3.0], [5.0])):
        world.baseline.tap("doubled", torch.full((len(values),), 100.0 + step), layer=3)
        world.baseline.tap("out", torch.full((len(values),), 101.0 + step))
        assert graph.suits()
        assert on(buffer, graph, *values) == ([101.0 + step] * len(values), 2 if grafts == "switches" else 1)
        world.step()
    world.end()
    assert [(row.name, row.status, row.step, row.shape, row.max_abs) for row in world.target.rows] == [
        ("doubled", "grafted", 0, [3], 98.0),
        ("out", "compared", 0, [3], 0.0),
        ("doubled", "grafted", 1, [1], 91.0),
        ("out", "compared", 1, [1], 0.0),
    ]
    assert not any(site.slot.switch.any() for site in graph.sites if site.slot is not None)


def test_a_tap_that_no_plan_wants_leaves_nothing_behind_until_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, compare="name == 'a'")

    def function(x: Tensor) -> Tensor:
        return gl.tap("b", gl.tap("a", x * 2) + 1)

    buffer, wanted = torch.zeros(2), WantedTaps("switches")
    graph = captured(function, buffer, wanted=wanted)
    assert [site.is_left_out for site in graph.sites] == [False, True]
    assert graph.suits()
    world.edit(compare="name == 'b'")
    world.step()
    assert not graph.suits()
    # What was wanted once stays.
    graph = captured(function, buffer, wanted=wanted)
    assert [site.is_left_out for site in graph.sites] == [False, False]
    assert graph.suits()
    graph.release()
    assert graph.sites == []


def test_a_tap_without_a_tensor_takes_no_slot_and_keeps_the_graph_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = rank_of(monkeypatch, b2t="True")

    def function(x: Tensor) -> Tensor:
        gl.tap("words", "text", extras={"n": 1})
        return gl.tap("out", x + 1)

    buffer = torch.zeros(2)
    with pytest.warns(gl.GraftWarning, match="its value is str, not a tensor"):
        graph = captured(function, buffer)
    words, _ = graph.sites
    assert (words.is_unfit, words.stand_in, words.slot, words.breaks) == (True, "text", None, False)
    assert graph.broken_at == frozenset()
    assert graph.suits()
    world.baseline.tap("out", torch.tensor([7.0, 8.0]))
    assert on(buffer, graph, 1.0, 2.0) == ([7.0, 8.0], 2)
    world.end()
    assert [row.name for row in world.target.rows] == ["out"]


def test_extras_are_those_of_each_replay_and_a_callable_is_called_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, t2b="True")
    made: list[int] = []

    def host() -> dict[str, Any]:
        made.append(len(made))
        return {"number": made[-1]}

    def function(x: Tensor) -> Tensor:
        gl.tap("tensors", x, extras={"scales": [x[:1] * 3, "max"], "rows": x * 10})
        gl.tap("host", x, extras=host)
        return x + 1

    buffer = torch.zeros(3)
    graph = captured(function, buffer)
    assert made == []
    for step, values in enumerate(([1.0, 2.0], [4.0])):
        on(buffer, graph, *values)
        found = {key.name: sent[1].extras for key, sent in world.post.sent.items() if key.step == step}
        extras = found["tensors"]() if callable(found["tensors"]) else found["tensors"]
        assert extras["scales"][0].tolist() == [values[0] * 3]
        assert extras["scales"][1] == "max"
        assert extras["rows"].tolist() == [10 * value for value in values]
        number = found["host"]() if callable(found["host"]) else found["host"]
        assert number == {"number": step}
        world.step()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (1, 2, "was the int 1 at one time, and the int 2 at another"),
        (
            "a" * 70,
            "b" * 58,
            f"was the str '{'a' * 56}... at one time, and the str '{'b' * 58}' at another",
        ),
        ("a" * 58, "b" * 59, f"was the str '{'a' * 58}' at one time, and the str '{'b' * 56}... at another"),
    ],
)
def test_extras_that_a_replay_could_not_tell_are_refused_and_shown_in_short(
    first: object, second: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_of(monkeypatch, t2b="True")
    values = iter((first, second))
    with pytest.raises(gl.GraphError) as refused:
        captured(lambda x: gl.tap("h", x, extras={"n": next(values)}) + 1, torch.zeros(2))
    assert (
        f"tap 'h' in a captured function: extras['n'] {said.removeprefix(chr(101) + 'xtras[' + repr('n') + '] ')}"
        in str(refused.value)
    )


@pytest.mark.parametrize(
    ("extras", "said"),
    [
        (lambda x, n: {"a": x} if n else {"b": x}, "extras had the entries [\"extras['a']\"] this time"),
        (lambda x, n: {"a": x[:1] if n else x}, "extras['a'] was a tensor of another shape or dtype, or none"),
        (lambda x, n: {"a": x.int() if n else x}, "extras['a'] was a tensor of another shape or dtype, or none"),
        (lambda x, n: {"a": 1 if n else x}, "extras['a'] was a tensor of another shape or dtype, or none"),
        (lambda x, n: dict if n else {"a": x}, "extras were a callable at one time and not at another"),
    ],
)
def test_extras_of_another_form_are_refused(extras: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, t2b="True")
    times = iter(range(9))
    buffer = torch.zeros(2)
    graph = captured(lambda x: gl.tap("h", x, extras=extras(x, next(times))) + 1, buffer)
    with pytest.raises(gl.GraphError) as refused:
        on(buffer, graph, 1.0, 2.0)
    assert said in str(refused.value)
    world.end()


def test_a_function_that_reaches_other_taps_or_shapes_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_of(monkeypatch, compare="True")
    times = iter(range(9))
    named = captured(lambda x: gl.tap("ab"[next(times)], x), buffer := torch.zeros(2))
    with pytest.raises(
        gl.GraphError,
        match=exactly(
            "a captured function reached tap 'b' as number 1 this time; when it ran first, its taps were "
            "['a']. It must reach the same taps, with values of the same shapes, each time that it runs"
        ),
    ):
        on(buffer, named, 1.0, 2.0)
    lengths = iter((2, 1))
    shorter = captured(lambda x: gl.tap("a", x[: next(lengths)]), buffer)
    with pytest.raises(
        gl.GraphError,
        match=exactly(
            "a captured function had a different value at tap 'a' this time: a tensor of shape [1]; when "
            "it ran first, its taps were ['a']. It must reach the same taps, with values of the same "
            "shapes, each time that it runs"
        ),
    ):
        on(buffer, shorter, 1.0, 2.0)
    counts = iter((2, 1))

    def fewer(x: Tensor) -> Tensor:
        for _ in range(next(counts)):
            gl.tap("a", x)
        return x + 1

    with pytest.raises(
        gl.GraphError,
        match=exactly(
            "a captured function ran past 1 taps this time; when it ran first, its taps were ['a', 'a']. "
            "It must reach the same taps, with values of the same shapes, each time that it runs"
        ),
    ):
        on(buffer, captured(fewer, buffer), 1.0, 2.0)


@ways
def test_host_parts_between_graphs_reach_their_taps_once_and_in_order(
    grafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = rank_of(monkeypatch, b2t="name in ('before', 'after')", compare="name == 'host'")
    ran: list[float] = []
    graph: CapturedFunction

    def host(x: Tensor) -> Tensor:
        ran.append(float(x[0]))
        return gl.tap("host", x * 10)

    def function(x: Tensor) -> Tensor:
        x = gl.tap("before", x + 1)
        with gl.tags(layer=1):
            x = graph.on_host(host)(x)
        return gl.tap("after", x + 2)

    buffer = torch.zeros(1)
    graph = CapturedFunction(sizes(1), WantedTaps(grafts), CpuCapturer())  # type: ignore[arg-type]
    graph.capture(lambda: (function(buffer),))
    ran.clear()
    for name, value, tags in (("before", 5.0, {}), ("host", 50.0, {"layer": 1}), ("after", 60.0, {})):
        world.baseline.tap(name, torch.tensor([value]), **tags)
    assert on(buffer, graph, 1.0) == ([60.0], 3 if grafts == "switches" else 1)
    world.step()
    world.end()
    assert [(row.name, row.status, row.tags.get("layer")) for row in world.target.rows] == [
        ("before", "grafted", None),
        ("host", "compared", 1),
        ("after", "grafted", None),
    ]
    assert [row.max_abs for row in world.target.rows] == [3.0, 0.0, 8.0]
    assert ran[-1] == 5.0


def test_tags_around_a_replay_are_those_of_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, compare="batch == 1")
    buffer = torch.zeros(1)
    with gl.tags(batch=1):
        graph = captured(lambda x: gl.tap("h", x * 2), buffer)
    for batch in (1, 2):
        with gl.tags(batch=batch):
            assert graph.suits()
            on(buffer, graph, 1.0)
        world.baseline.tap("h", torch.tensor([2.0]), batch=batch)
    world.end()
    assert [tags["batch"] for tags in world.target.tags_seen] in ([1], [1, 2])
    assert {row.tags["batch"] for row in world.target.rows} == {1}


def test_whether_a_tap_is_grafted_depends_on_the_tags_around_each_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, b2t="batch == 1")
    buffer = torch.zeros(1)
    with gl.tags(batch=1):
        graph = captured(lambda x: gl.tap("h", x * 2) + 1, buffer)
    found = []
    for batch in (1, 2, 1):
        world.baseline.tap("h", torch.tensor([7.0]), batch=batch)
        with gl.tags(batch=batch):
            found.append(on(buffer, graph, 1.0))
    assert found == [([8.0], 2), ([3.0], 1), ([8.0], 2)]


def test_a_function_with_a_break_suits_only_a_plan_that_grafts_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = rank_of(monkeypatch, b2t="name == 'h'")
    buffer, wanted = torch.zeros(1), WantedTaps("breaks")
    graph = captured(lambda x: gl.tap("h", x * 2), buffer, wanted=wanted)
    assert graph.suits()
    world.edit(b2t=None)
    world.step()
    assert not graph.suits()
    assert captured(lambda x: gl.tap("h", x * 2), buffer, wanted=wanted).suits()


def test_outside_a_session_a_replay_is_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = torch.zeros(2)
    graph = captured(lambda x: gl.tap("h", x * 2), buffer)
    assert graph.sites == []
    assert graph.suits()
    assert on(buffer, graph, 1.0, 2.0) == ([2.0, 4.0], 1)


@ways
def test_host_parts_between_graphs_keep_their_places_at_every_replay(
    grafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = rank_of(monkeypatch, b2t="name == 'mid'", compare="search('host', name)")
    graph = CapturedFunction(sizes(1), WantedTaps(grafts), CpuCapturer())  # type: ignore[arg-type]
    parts = [graph.on_host(lambda x, n=n: gl.tap(f"host{n}", x * 10 + n)) for n in range(5)]

    def function(x: Tensor) -> Tensor:
        for number, part in enumerate(parts):
            x = part(x)
            if number == 2:
                x = gl.tap("mid", x)
        return x

    buffer = torch.zeros(1)
    graph.capture(lambda: (function(buffer),))
    for value in (1.0, 2.0):
        for name in ("host0", "host1", "host2", "mid", "host3", "host4"):
            world.baseline.tap(name, torch.full((1,), 7.0))
        assert on(buffer, graph, value)[0] == [734.0]
        world.step()
    rows = {(row.step, row.name): row for row in world.target.rows}
    assert len(rows) == len(world.target.rows) == 12
    for step, value in enumerate((1.0, 2.0)):
        own = {"host0": 10 * value, "host1": 100 * value + 1, "host2": 1000 * value + 12, "host3": 73.0, "host4": 734.0}
        assert {name: rows[step, name].mean_target for name in own} == own


@ways
def test_a_host_parts_result_that_the_graph_changes_in_place_is_kept_as_it_was(
    grafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = rank_of(monkeypatch, b2t="name in ('mid', 'late')")
    graph = CapturedFunction(sizes(1), WantedTaps(grafts), CpuCapturer())  # type: ignore[arg-type]
    host = graph.on_host(lambda x: x * 10)

    def function(x: Tensor) -> Tensor:
        h = host(x)
        h += gl.tap("mid", x)
        return h + gl.tap("late", x)

    buffer = torch.zeros(1)
    graph.capture(lambda: (function(buffer),))
    for value in (1.0, 2.0):
        for name in ("mid", "late"):
            world.baseline.tap(name, torch.full((1,), 7.0))
        assert on(buffer, graph, value)[0] == [10 * value + 14]
        world.step()


def test_a_tap_that_would_be_grafted_both_ways_is_wanted_so_that_its_error_is_raised() -> None:
    wanted = [_is_wanted(each) for each in (Action(), Action("b2t"), Action("t2b", graft=True), Action(overlap=True))]
    assert wanted == [False, True, True, True]
