"""Taps inside code that torch.compile and torch.export trace: the same taps as in eager code, without graph breaks."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.support import not_on, wait_until
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.taps import calls, compiled
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.extras import ExtrasWithLayout
from graftlab.taps.routing import handled_by

# Compiling takes seconds, torch's import of its tracer alone.
pytestmark = pytest.mark.slow


class TapHandler:
    """Notes what taps show, in the grafter's place; ``grafts`` has what to put in place of a tap's tensor."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.values: list[Tensor] = []
        self.extras: list[Any] = []
        self.grafts: dict[str, float] = {}
        self.steps = 0

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        around = {**dict(ambient.get()), **tags}
        assert around.pop("compiled", None) == self.in_graphs, f"{name}: {tags}"
        self.seen.append((name, around))
        shown = value if isinstance(value, Tensor) else value()
        self.values.append(shown.detach().clone())
        # Copies, as a graph uses its memory again.
        self.extras.append({key: torch.as_tensor(each).detach().clone() for key, each in (extras or {}).items()})
        if name in self.grafts:
            with torch.no_grad():
                shown.data.fill_(self.grafts[name])  # which autograd does not notice
        return value

    @property
    def moment(self) -> int:
        return self.steps

    def step(self) -> None:
        self.steps += 1

    in_graphs: bool | None = True

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        seen, self.seen, self.values, self.extras = self.seen, [], [], []
        return seen


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[TapHandler]:
    handler = TapHandler()
    for name, value in (
        ("_grafter", handler),
        ("_handler", handler),
        ("_traced", compiled),
        ("_is_tracing", torch.compiler.is_dynamo_compiling),
        ("_are_wanted", True),
    ):
        monkeypatch.setattr(calls, name, value)
    torch.compiler.reset()
    compiled.forget_open_tags()
    monkeypatch.setattr(compiled, "_has_steps", False)
    monkeypatch.setattr(compiled, "_left_out", {})
    yield handler
    gl.compile_taps(None)
    torch.compiler.reset()


class Graphs:
    """A backend that counts the graphs it is given, and what is in them."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    @property
    def taps(self) -> int:
        return sum("graftlab" in target for targets in self.graphs for target in targets)


# inductor compiles in separate processes
# To find out which vectors the processor has, inductor compiles a program for each; and their code takes longer.
SCALAR = {"cpp.vec_isa_ok": False}
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.ranks)]
INDUCTOR_WITH_CONJUGATES = pytest.param(
    "inductor",
    marks=[pytest.mark.ranks, not_on("2.6 2.9", "does not compile taps of conjugated tensors with inductor")],
)


def compile_with(backend: str, function: Callable[..., Any]) -> Callable[..., Any]:
    options = SCALAR if backend == "inductor" else None
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend, options=options)
    return compiled


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(8, 8)

    @gl.tags(lambda self, *_: {"layer": self.index})
    def forward(self, x: Tensor) -> Tensor:
        hidden = gl.tap("hidden", self.linear(x), part="a", extras={"total": x.sum(), "count": 3})
        with gl.tags(inner=True):
            gl.tap("never used again", hidden * 2)
        return hidden.relu()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(0), Block(1)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        gl.tap("computed", lambda: x + 1)
        return gl.tap("out", x)


X = torch.linspace(-1, 1, 16).reshape(2, 8)


def eager(
    handler: TapHandler, call: Callable[[], Any]
) -> tuple[Any, list[tuple[str, dict[str, Any]]], list[Tensor], list[Any]]:
    handler.in_graphs = None
    result = call()
    values, extras = handler.values, handler.extras
    seen = handler.take()
    handler.in_graphs = True
    return result, seen, values, extras


# With inductor the test of views shows the same, and soak tests this one too.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.soak)])
def test_compiled_model_shows_the_same_taps_in_the_same_order_as_eager(backend: str, handler: TapHandler) -> None:
    model = Model()
    with gl.watch(model), gl.tags(phase="decode"):
        expected, seen, values, extras = eager(handler, lambda: model(X))
        torch.testing.assert_close(compile_with(backend, model)(X), expected)
        assert handler.seen == seen
        torch.testing.assert_close(handler.values, values)
        torch.testing.assert_close(handler.extras, extras)
    assert ("never used again", {"phase": "decode", "layer": 1, "inner": True}) in seen


# With inductor gradients pass in the test of views.
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.ranks, pytest.mark.soak])]
)
@pytest.mark.parametrize("watched", [False, True])
def test_graft_continues_in_the_graph_and_gradients_pass_through(
    backend: str, watched: bool, handler: TapHandler
) -> None:
    model = Model()
    handler.grafts = {"blocks.0.linear" if watched else "hidden": 0.5}

    def both(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        x = X.clone().requires_grad_()
        out = call(x)
        out.square().sum().backward()
        return out.detach(), x.grad

    with gl.watch(model):
        expected, *_ = eager(handler, lambda: both(model))
        torch.testing.assert_close(both(torch.compile(model, fullgraph=True, backend=backend)), expected)


def test_watched_modules_tensor_is_never_modified(handler: TapHandler) -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model, x = Keeps(), X.clone()
    handler.grafts = {"output": 7.0}
    with gl.watch(model):
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert out.eq(7.0).all()
    assert x.equal(X)


def test_compiled_model_shows_taps_added_later_until_they_are_removed(handler: TapHandler) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    function = torch.compile(model, fullgraph=True, backend="eager")
    function(X)
    with gl.watch(model):
        function(X)
        assert [name for name, _ in handler.take()] == ["0", "1", "output"]
    function(X)
    assert handler.seen == []


def test_weights_inside_a_graph_warn_and_are_shown_by_the_compiled_module(handler: TapHandler) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    function = torch.compile(model, fullgraph=True, backend="aot_eager")
    with (
        gl.watch(model, params=True, exclude="type == 'Sequential'"),
        pytest.warns(gl.GraftWarning, match=r"they are not shown; watch the compiled module"),
    ):
        function(X)
    assert [name for name, _ in handler.take()] == ["0"]
    handler.in_graphs = None
    with gl.watch(function, params=True, include="search('weight|bias', name)"):
        function(X)
    assert [name for name, _ in handler.seen] == ["0.weight", "0.bias"]


def test_a_statements_graft_is_written_into_the_tensor_itself(handler: TapHandler) -> None:
    def function(x: Tensor) -> Tensor:
        gl.tap("x", x)
        return x * 2

    handler.grafts = {"x": 3.0}
    x = X.clone()
    assert torch.compile(function, fullgraph=True, backend="aot_eager")(x).eq(6.0).all()
    assert x.eq(3.0).all()


def parts_of_tensors(x: Tensor) -> tuple[Tensor, ...]:
    whole = (x * 3).tanh()
    gl.tap("columns", whole[:, :4])
    first, second = whole.chunk(2, dim=1)
    gl.tap("second", second)
    other = x.sin()
    gl.tap("alone", other[:, 2:5].detach())
    gl.tap("turned", whole.t()[1:3])
    number = torch.view_as_complex(whole.reshape(2, 4, 2))
    gl.tap("complex", number[:, 1:3], extras={"own": number, "count": 1})
    conjugate = gl.tap("conjugate", number.conj())
    return whole * 2, other * 2, first + second, torch.view_as_real(number * conjugate)


@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR_WITH_CONJUGATES])
def test_views_and_complex_tensors_are_shown_and_grafted_as_in_eager(backend: str, handler: TapHandler) -> None:
    def with_gradients(function: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Any, ...]:
        x = X.clone().requires_grad_()
        results = function(x)
        torch.stack([each.sum() for each in results]).sum().backward()
        return *(each.detach() for each in results), x.grad

    handler.grafts = {"alone": 3.0, "complex": 5.0}
    expected, seen, values, extras = eager(handler, lambda: with_gradients(parts_of_tensors))
    found = with_gradients(compile_with(backend, parts_of_tensors))
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(handler.values, values)
    torch.testing.assert_close(handler.extras, extras)
    assert handler.seen == seen
    assert len(seen) == 6


@pytest.mark.parametrize("make", [lambda x: x[:1].expand(3, 8), lambda x: x.flatten().unfold(0, 3, 1)])
def test_graft_of_an_overlapping_tensor_is_only_in_the_result_and_warns(
    make: Callable[[Tensor], Tensor], handler: TapHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_warned_of", set())

    def graft(name: str, value: Tensor, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Tensor:
        assert replace
        return torch.arange(float(value.numel())).reshape(value.shape)

    handler.tap = graft  # type: ignore[method-assign]
    function = torch.compile(lambda x: (gl.tap("wide", make(x)) * 2, x + 0), fullgraph=True, backend="aot_eager")
    with pytest.warns(gl.GraftWarning, match=r"'wide'.*overlaps itself.* only gl\.tap's result"):
        result, untouched = function(X)
    torch.testing.assert_close(result, torch.arange(float(result.numel())).reshape(result.shape) * 2)
    torch.testing.assert_close(untouched, X)


def test_graph_has_no_taps_outside_a_session_and_recompiles_once_inside(
    monkeypatch: pytest.MonkeyPatch, handler: TapHandler, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_warned_of", set())
    caplog.set_level(logging.INFO, logger="graftlab")
    model, graphs = Model(), Graphs()
    function = torch.compile(model, fullgraph=True, backend=graphs)
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_handler", None)
        patch.setattr(calls, "_grafter", None)
        function(X)
        function(X)
    assert (len(graphs.graphs), graphs.taps) == (1, 0)
    assert "compiled" not in caplog.text
    function(X)
    function(X)
    assert len(graphs.graphs) == 2
    assert graphs.taps > 0
    assert len(handler.seen) == 2 * 6
    assert caplog.text.count("code compiled before the session is compiled again, once") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch.compile captures CUDA graphs only on a GPU")
@pytest.mark.ranks
def test_reduce_overhead_replays_show_each_tap_without_more_graphs(
    handler: TapHandler,
) -> None:
    from torch._dynamo.utils import counters

    model, x = Model().cuda(), X.cuda()
    expected, seen, *_ = eager(handler, lambda: model(x))
    counts = []
    for choice in ("False", None):
        torch.compiler.reset()
        counters.clear()
        gl.compile_taps(choice)
        function = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        for _ in range(4):  # warms up, captures, and replays
            torch.compiler.cudagraph_mark_step_begin()
            handler.take()
            torch.testing.assert_close(function(x), expected)
        counts.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    assert counts == [(1, 0), (1, 0)]
    assert handler.seen == seen


def test_dynamic_length_uses_one_graph_and_shows_each_call(handler: TapHandler) -> None:
    graphs = Graphs()
    function = torch.compile(Model(), fullgraph=True, backend=graphs, dynamic=True)
    for length in (2, 3, 5):
        function(torch.ones(length, 8))
    assert len(graphs.graphs) == 1
    assert [value.shape[0] for value, (name, _) in zip(handler.values, handler.seen, strict=True) if name == "out"] == [
        2,
        3,
        5,
    ]


def test_users_graph_break_keeps_the_tags(handler: TapHandler) -> None:
    def function(x: Tensor) -> Tensor:
        with gl.tags(a=1):
            gl.tap("before", x * 1)
            torch._dynamo.graph_break()
            gl.tap("after", x * 2)
        return gl.tap("outside", x * 3)

    torch.compile(function, backend="aot_eager")(X)
    assert [(name, tags.get("a")) for name, tags in handler.seen] == [("before", 1), ("after", 1), ("outside", None)]


def test_checkpointed_repeats_are_distinguished_and_keep_their_tags(handler: TapHandler) -> None:
    block = Block(4)
    marks: list[bool] = []
    tap = handler.tap

    def noting(*args: Any, **kwargs: Any) -> Any:
        from graftlab.grafting.decisions import recompute_status

        marks.append(recompute_status() == "recompute")
        return tap(*args, **kwargs)

    handler.tap = noting  # type: ignore[method-assign]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False).square().sum()

    loss = function(X.clone().requires_grad_())
    assert marks == [False, False]
    forward = handler.take()
    loss.backward()
    # That of torch 2.6 recomputes both.
    assert all(marks[2:])
    assert handler.seen == forward[: len(handler.seen)]
    assert handler.seen[0] == ("hidden", {"layer": 4, "part": "a"})


def test_gradients_have_the_forwards_tags_and_their_grafts_flow_upstream(handler: TapHandler) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x: Tensor) -> Tensor:
        with gl.tags(layer=3):
            return gl.tap("h", x * 2, grad=True, part="a").sum()

    x = X.clone().requires_grad_()
    with gl.tags(phase="train"):
        loss = function(x)
    handler.take()
    loss.backward()
    assert handler.seen == [("h", {"phase": "train", "layer": 3, "part": "a", "kind": "grad"})]
    assert x.grad.eq(2.0).all()

    handler.grafts = {"h": 5.0}
    x.grad = None
    function(x).backward()
    assert x.grad.eq(10.0).all()


@pytest.mark.parametrize(
    ("transform", "tags"),
    [
        (lambda function: torch.vmap(function), {"vmap": True}),
        (lambda function: lambda x: torch.func.jvp(function, (x,), (x,)), {}),
        (lambda function: torch.func.jacrev(function), {}),
    ],
    ids=["vmap", "jvp", "jacrev"],
)
def test_function_transforms_show_the_tensors_they_compute_with(
    transform: Callable[..., Any], tags: dict[str, Any], handler: TapHandler
) -> None:
    def function(x: Tensor) -> Tensor:
        square = x * x
        gl.tap("part", square[..., ::2])
        return gl.tap("x", square)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "_handler", None)
        expected = transform(function)(X)
    torch.testing.assert_close(torch.compile(transform(function), fullgraph=True, backend="aot_eager")(X), expected)
    torch.testing.assert_close(handler.values, [(X * X)[:, ::2], X * X])
    assert handler.seen == [("part", tags), ("x", tags)]


@pytest.mark.parametrize("bad", [torch.ones(1), object(), [1, 2]], ids=["a tensor", "an object", "a list"])
def test_invalid_tag_in_a_graph_is_refused_with_a_message(bad: Any, handler: TapHandler) -> None:
    function = torch.compile(lambda x: gl.tap("h", x * 2, odd=bad), fullgraph=True, backend="aot_eager")
    with pytest.raises(
        Exception, match=r"tag 'odd' of gl\.tap\('h'\) has the type .*a tag is text, a number, a bool or None"
    ):
        function(X)


def test_invalid_extras_in_a_graph_are_refused_with_a_message(handler: TapHandler) -> None:
    function = torch.compile(lambda x: gl.tap("h", x * 2, extras={"k": [x]}), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"extras\['k'\] of gl\.tap\('h'\) has the type list"):
        function(X)


def test_a_layout_travels_with_the_tap_and_so_does_the_lack_of_extras(handler: TapHandler) -> None:
    found: list[Any] = []
    handler.tap = lambda name, value, extras, tags, replace=False: found.append(extras)  # type: ignore[method-assign]

    def forward(x: torch.Tensor) -> torch.Tensor:
        gl.tap("h", x * 2, layout="shard(dim=0, mesh='tp')", extras={"n": 1})
        return gl.tap("out", x + 1)

    torch.compile(forward, fullgraph=True, backend="eager")(X)
    assert found == [ExtrasWithLayout("shard(dim=0, mesh='tp')", {"n": 1}), None]


def test_a_graft_of_a_gradient_leaves_autograds_own_tensor(
    handler: TapHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another branch of the model may share it."""
    handler.tap = lambda name, value, extras, tags, replace=False: value.fill_(7.0)  # type: ignore[method-assign]
    monkeypatch.setitem(compiled._shown, 1 << 30, compiled._GradientOrigin({}, threading.get_ident()))
    gradient = torch.ones(3)
    assert compiled._show_gradient(gradient, torch.tensor(1 << 30), "h", []).tolist() == [7.0] * 3
    assert gradient.tolist() == [1.0] * 3


def test_value_other_than_a_tensor_is_skipped_with_one_warning(handler: TapHandler) -> None:
    function = torch.compile(lambda x: (gl.tap("h", "text"), x * 2)[1], fullgraph=True, backend="aot_eager")
    with pytest.warns(gl.GraftWarning, match=r"gl\.tap\('h'\) in compiled code: its value is str"):
        function(X)
    function(X)
    assert handler.seen == []


def test_only_chosen_taps_are_in_the_graph(handler: TapHandler) -> None:
    graphs = Graphs()
    function = torch.compile(Model(), fullgraph=True, backend=graphs)
    gl.compile_taps("name == 'hidden' and part == 'a'")
    function(X)
    assert {name for name, _ in handler.take()} == {"hidden"}
    gl.compile_taps("name == 'out'")
    function(X)
    assert [name for name, _ in handler.take()] == ["out"]
    gl.compile_taps(None)
    function(X)
    assert len(handler.seen) == 6
    assert len(graphs.graphs) == 3
    with pytest.raises(gl.FilterError):
        gl.compile_taps("name ==")


def test_tags_that_an_error_left_open_are_closed(handler: TapHandler) -> None:
    class Stop(Exception):
        pass

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Stop

    function = torch.compile(Block(1), fullgraph=True, backend="aot_eager")
    function(X)
    seen = handler.take()
    handler.tap, tap = stop, handler.tap  # type: ignore[method-assign]
    with pytest.raises(Stop):
        function(X)
    handler.tap = tap  # type: ignore[method-assign]
    function(X)
    assert handler.seen == seen


def test_callable_is_always_called_in_a_graph(handler: TapHandler) -> None:
    graphs = Graphs()
    torch.compile(lambda x: (gl.tap("h", lambda: x.sin()), x * 2)[1], fullgraph=True, backend=graphs)(X)
    assert any("sin" in target for target in graphs.graphs[0])


def test_a_tag_that_follows_from_a_shape_is_compiled_for_each_shape(handler: TapHandler) -> None:
    graphs = Graphs()
    function = torch.compile(
        lambda x: gl.tap("h", x * 2, length=x.shape[0]), fullgraph=True, backend=graphs, dynamic=True
    )
    for length in (2, 3, 5, 3):
        function(torch.ones(length, 8))
    assert [tags["length"] for _, tags in handler.seen] == [2, 3, 5, 3]
    assert len(graphs.graphs) == 3


@pytest.mark.parametrize("values", [(1, 2, 3), (0.5, 1.5, 2.5), (None, True, 2, 2.5, "a")], ids=str)
def test_a_tag_that_is_an_argument_is_compiled_for_each_value(values: tuple[Any, ...], handler: TapHandler) -> None:
    def function(x: Tensor, value: Any) -> Tensor:
        return gl.tap("h", x * 2, tag=value, extras={"extra": 0 if value == "a" else value or 0})

    compiled_function = torch.compile(function, fullgraph=True, backend="eager")
    for value in values:
        compiled_function(X, value)
    assert [(type(tags["tag"]), tags["tag"]) for _, tags in handler.seen] == [(type(value), value) for value in values]
    assert [each["extra"].item() for each in handler.extras] == [0 if value == "a" else value or 0 for value in values]


@not_on("2.6", "raises what the tap raised")
def test_code_that_a_graph_cannot_contain_runs_uncompiled_if_allowed(handler: TapHandler) -> None:
    function = torch.compile(lambda x: gl.tap("h", x * 2, odd=[1, 2]) + 1, backend="aot_eager")
    handler.in_graphs = None
    torch.testing.assert_close(function(X), X * 2 + 1)
    assert handler.seen == [("h", {"odd": [1, 2]})]


def test_tags_without_end_do_not_fill_the_memory_with_places_of_gradients(
    handler: TapHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "_SHOWN_LIMIT", 5)
    monkeypatch.setattr(compiled, "_shown", {})
    monkeypatch.setattr(compiled, "_shown_numbers", {})
    for request in range(23):
        with gl.tags(request=request):
            place = int(compiled._place(compiled.clock))
        assert compiled._shown[place].tags == {"request": request}
        assert len(compiled._shown) == len(compiled._shown_numbers) <= 5


def test_tags_that_are_opened_again_take_no_further_room(handler: TapHandler) -> None:
    time = torch.zeros((), dtype=torch.int64)
    held: set[tuple[int, int]] = set()
    for _ in range(3):
        compiled._open_tags(time, [])
        held.add((int(time), len(compiled._open)))
        compiled._close_tags(time)
        assert int(time) == 0
    assert len(held) == 1


def test_graphs_of_two_threads_with_shared_open_tags_warn(handler: TapHandler) -> None:
    torch.ops.graftlab.open_(compiled.clock, ["a=1"])
    caught: list[Warning] = []

    def elsewhere() -> None:
        with pytest.warns(gl.GraftWarning, match="graphs of two threads") as found:
            torch.ops.graftlab.show_(torch.ones(1), compiled.clock, "x", [], [], [], "")
        caught.extend(each.message for each in found)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_step_in_a_graph_is_a_step(handler: TapHandler) -> None:
    def function(x: Tensor) -> Tensor:
        gl.step()
        return x * 2

    torch.compile(function, fullgraph=True, backend="aot_eager")(X)
    assert handler.steps == 1


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text()


@given(st.dictionaries(st.from_regex(r"[a-z_]\w{0,8}", fullmatch=True), VALUES, max_size=4))
def test_tags_that_travel_as_text_arrive_as_they_were(tags: dict[str, Any]) -> None:
    read = compiled.from_text(tuple(compiled.as_text("", tags)))
    assert repr(read) == repr(tags)
    assert list(map(type, read.values())) == list(map(type, tags.values()))


# ---- torch.export ---------------------------------------------------------------------------------------------------


def own_operators(program: torch.export.ExportedProgram) -> int:
    return sum("graftlab" in str(node.target) for node in program.graph.nodes if node.op == "call_function")


class ComputesForATap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gl.tap("norm", (x * 2).norm())
        return x.sin()


def test_a_program_without_its_taps_computes_nothing_for_them() -> None:
    with gl.export_taps():
        program = torch.export.export(ComputesForATap(), (X,), strict=False)
    assert own_operators(program) == 1
    computed = [str(node.target) for node in gl.strip(program).graph.nodes if node.op == "call_function"]
    assert computed == ["aten.sin.default"]


@pytest.mark.parametrize(
    "strict", [False, pytest.param(True, marks=not_on("2.6 2.9", "exports no taps in strict mode"))]
)
def test_an_exported_program_has_taps_on_request_and_loses_them_on_request(
    strict: bool, monkeypatch: pytest.MonkeyPatch, handler: TapHandler
) -> None:
    model = Model()
    expected, seen, *_ = eager(handler, lambda: model(X))
    with monkeypatch.context() as patch:
        patch.setattr(calls, "_handler", None)
        patch.setattr(calls, "_grafter", None)
        assert own_operators(torch.export.export(model, (X,), strict=strict)) == 0
        with gl.export_taps():
            program = torch.export.export(model, (X,), strict=strict)
        torch.testing.assert_close(program.module()(X), expected)
    assert handler.take() == []
    torch.testing.assert_close(program.module()(X), expected)
    assert handler.take() == seen

    assert own_operators(gl.strip(program)) == 0
    # What a user sees of it.
    assert "ops.graftlab" not in program.graph_module.code
    torch.testing.assert_close(program.module()(X), expected)
    torch.testing.assert_close(program.run_decompositions().module()(X), expected)
    assert handler.seen == []


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return gl.tap("doubled", x * 2)


@pytest.mark.parametrize("model", [Model(), Doubled()], ids=["with tags", "with a tap alone"])
def test_aot_inductor_refuses_a_program_with_taps_with_instructions(model: nn.Module, tmp_path: Path) -> None:
    with gl.export_taps():
        program = torch.export.export(model, (X,), strict=False)
    assert own_operators(program) > 0
    with pytest.raises(gl.GraphError, match=r"has taps \(graftlab\.\w+\).*remove them with gl\.strip\(program\)"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "tapped.pt2"))


# Torch's headers take the C++ compiler ten seconds. That a stripped program has no operator of ours stands above, and
# that those operators are what AOTInductor refuses.
@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler: no g++ on PATH")
@pytest.mark.timeout(600)
def test_aot_inductor_compiles_a_program_without_or_stripped_of_taps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    with gl.export_taps():
        program = torch.export.export(model, (X,), strict=False)
    # Torch's headers are compiled in advance for programs to come, which takes longer than this one.
    once = {"aot_inductor.precompile_headers": False}
    package = torch._inductor.aoti_compile_and_package(
        gl.strip(program), package_path=str(tmp_path / "model.pt2"), inductor_configs=once
    )
    torch.testing.assert_close(torch._inductor.aoti_load_package(package)(X), model(X))


# ---- a compiled backward --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_autograd_has_one_graph_with_taps_and_without(handler: TapHandler) -> None:
    from torch._dynamo import compiled_autograd

    model = Model()

    def gradients(backend: Graphs) -> list[Tensor]:
        model.zero_grad()
        torch.compiler.reset()
        forward = torch.compile(model, fullgraph=True, backend="aot_eager")
        # With fullgraph a break in the backward would raise.
        with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
            forward(X).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    untapped, tapped = Graphs(), Graphs()
    gl.compile_taps("False")
    expected = gradients(untapped)
    assert handler.take() == []
    gl.compile_taps(None)
    with gl.watch(model, grads=True):
        torch.testing.assert_close(gradients(tapped), expected)
    assert len(tapped.graphs) == len(untapped.graphs) == 1
    shown = [name for name, tags in handler.seen if tags.get("kind") == "grad"]
    assert shown == ["output", "blocks.1", "blocks.1.linear", "blocks.0", "blocks.0.linear"]


def test_graphs_have_no_taps_while_none_is_wanted_and_the_next_call_has_all(handler: TapHandler) -> None:
    model, graphs = Model(), Graphs()
    function = torch.compile(model, fullgraph=True, backend=graphs)
    calls.want_taps(handler, False)
    expected = function(X)
    assert handler.seen == []
    assert not any("show_" in target for target in graphs.graphs[0])
    calls.want_taps(handler, True)
    torch.testing.assert_close(function(X), expected)
    assert len(handler.take()) == 6
    # Both programs stay compiled.
    calls.want_taps(handler, False)
    function(X)
    calls.want_taps(handler, True)
    function(X)
    assert len(handler.seen) == 6
    assert len(graphs.graphs) == 2


def test_taps_left_out_of_a_graph_are_known_by_their_names_and_tags(handler: TapHandler) -> None:
    known = len(compiled.left_out_since(0))
    calls.want_taps(handler, False)
    with gl.tags(phase="decode"):
        torch.compile(Model(), fullgraph=True, backend="aot_eager")(X)
    found = compiled.left_out_since(known)
    assert [name for name, _ in found] == [
        "hidden",
        "never used again",
        "hidden",
        "never used again",
        "computed",
        "out",
    ]
    assert found[3][1] == {"phase": "decode", "layer": 1, "inner": True, "compiled": True}
    assert found[5][1] == {"phase": "decode", "compiled": True}


def test_graph_that_ends_steps_keeps_the_taps_that_a_later_plan_may_want(handler: TapHandler) -> None:
    step = handler.step

    def edited() -> None:
        step()
        calls.want_taps(handler, True)

    handler.step = edited  # type: ignore[method-assign]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(x: Tensor) -> Tensor:
        with gl.tags(phase="decode"):
            for _ in range(2):
                x = gl.tap("x", x * 2)
                gl.step()
        return x

    calls.want_taps(handler, False)
    function(X)
    assert handler.take() == [("x", {"phase": "decode"})]
    calls.want_taps(handler, False)
    function(X)
    assert handler.seen == [("x", {"phase": "decode"})] * 2


def test_graphs_have_all_taps_while_something_else_than_the_plan_takes_them(handler: TapHandler) -> None:
    other = TapHandler()
    function = torch.compile(lambda x: gl.tap("x", x * 2), fullgraph=True, backend="aot_eager")
    calls.want_taps(handler, False)
    function(X)
    with handled_by(other):
        function(X)
    assert [name for name, _ in other.seen] == ["x"]
    with compiled.only_taps(None):
        function(X)
    assert [name for name, _ in handler.seen] == ["x"]


def test_watched_modules_that_return_tuples_stay_in_one_graph(handler: TapHandler) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[tuple[Tensor, int], Tensor]:
            return (x + 1, 3), x * 2

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()

        def forward(self, x: Tensor) -> Tensor:
            (more, number), double = self.pair(x)
            return double + more * number

    model, graphs = Outer(), Graphs()
    with gl.watch(model):
        expected, seen, *_ = eager(handler, lambda: model(X))
        torch.testing.assert_close(torch.compile(model, fullgraph=True, backend=graphs)(X), expected)
    assert handler.seen == seen
    # torch calls the hook of the model itself from a second one.
    assert len(graphs.graphs) == 2


# ---- with real ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


def forward(backend: str | None) -> list[list[float]]:
    here = gl.here()
    assert here is not None
    key = f"model for {backend}"
    if key not in here.vars:
        model = Model()
        gl.watch(model)
        here.vars[key] = model if backend is None else compile_with(backend, model)
    with gl.tags(phase="decode"):
        return here.vars[key](X * (1.0 if here.side == "baseline" else 2.0)).tolist()


@pytest.mark.ranks
def test_rows_of_a_compiled_target_are_those_of_an_eager_one_and_a_graft_repairs_it(session: gl.Session) -> None:
    backend = "inductor"
    columns = ["name", "layer", "part", "phase", "status", "rel_l2"]
    eager = session.run(lambda: forward(None), lambda: forward(None))
    run = session.run(lambda: forward(None), lambda: forward(backend))
    torch.testing.assert_close(torch.tensor(run.target), torch.tensor(eager.target))
    for column in columns[:-1]:
        assert run.frame[column].astype(str).tolist() == eager.frame[column].astype(str).tolist()
    torch.testing.assert_close(run.frame["rel_l2"].tolist(), eager.frame["rel_l2"].tolist(), rtol=1e-4, atol=1e-6)
    assert run.frame["compiled"].tolist() == [True] * len(run.frame)
    assert "compiled" not in eager.frame

    # A new decision, by a plan that the graph does not know.
    session.edit(b2t="name == 'blocks.0.linear'")
    repaired = session.run(lambda: forward(None), lambda: forward(backend))
    torch.testing.assert_close(torch.tensor(repaired.target), torch.tensor(run.baseline))
    session.edit(b2t=None, t2b="name == 'hidden' and layer == 1", compare=None)
    turned = session.run(lambda: forward(None), lambda: forward(backend))
    torch.testing.assert_close(torch.tensor(turned.baseline), torch.tensor(run.target))
    assert turned.frame["status"].tolist() == ["grafted"]
    session.edit(t2b=None, compare="True")


def loop(folder: str, backend: str | None) -> int:
    """Call a model, compiled with a backend or not, in separate steps until the file ``enough`` exists."""
    x = torch.ones(3)

    def model(x: Tensor) -> Tensor:
        return gl.tap("hidden", (x * 1.5).tanh())

    function = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)
    steps = 0
    while not Path(folder, "enough").exists():
        function(x)
        Path(folder, "began").touch()
        gl.step()
        steps += 1
    return steps


@pytest.mark.ranks
def test_edit_after_compilation_reaches_the_tap_at_one_step_on_all_ranks(tmp_path: Path) -> None:
    with gl.launch(1, 2, plan=gl.GraftPlan(compare="False")) as session:
        run = session.start(loop, loop, args=(str(tmp_path), "aot_eager"))
        wait_until(lambda: Path(tmp_path, "began").exists(), "the compiled function was called")
        session.edit(compare="name == 'hidden'")
        wait_until(lambda: set(run.frame["rank"]) == {0, 1}, "the tap was compared on both ranks")
        Path(tmp_path, "enough").touch()
        run.wait()
        frame = run.frame
        assert any(tags["name"] == "hidden" and tags["compiled"] for tags in session.taps)
    compared = frame[frame["status"] == "compared"]
    assert compared["compiled"].all()
    first = compared.groupby("rank")["step"].min().tolist()
    assert first[0] == first[1] > 0
    # Sides that end the loop at different steps leave taps without a counterpart at the end only.
    others = frame[frame["status"] != "compared"]
    assert (others["step"] > compared["step"].max() - 1).all()


def test_the_choice_of_taps_holds_in_its_block_alone_even_if_that_fails() -> None:
    def now() -> tuple[object, bool]:
        return compiled._choice, compiled._is_given

    before = now()

    def fail() -> None:
        with compiled.only_taps(("inner",)):
            raise ZeroDivisionError

    with compiled.only_taps(("outer",)):
        outer = now()
        assert outer[1]
        assert compiled._matches("outer", (), outer[0])
        assert not compiled._matches("inner", (), outer[0])
        with compiled.only_taps(None):
            assert now() == (None, True)
        assert now() == outer
        with pytest.raises(ZeroDivisionError):
            fail()
        assert now() == outer
    assert now() == before
