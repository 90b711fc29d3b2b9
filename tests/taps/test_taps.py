"""The calls in model code: no effect outside a session, and tags that apply where they were set."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.grafters import StandInGrafter
from kit.refusals import exactly
from kit.support import own_value, run_cell

import graftlab as gl
from graftlab.taps import ambient_tags
from graftlab.taps import calls as taps
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.routing import taps_within


class Recorder:
    """Stands where a rank has its grafter, and writes down with which tags each tap came."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def tap(self, name: str, value: Any, extras: Any, tags: dict[str, Any], replace: bool = False) -> Any:
        self.seen.append((name, {**dict(ambient.get()), **tags}))
        return value

    def tags_of(self, name: str) -> list[dict[str, Any]]:
        return [tags for seen, tags in self.seen if seen == name]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(taps, "_grafter", recorder)
    monkeypatch.setattr(taps, "_handler", recorder)
    return recorder


# ---- outside a session ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.ones(2), None, 3.0, [1], lambda: 1 / 0], ids=lambda v: type(v).__name__)
def test_without_a_session_a_tap_returns_the_very_object(value: Any) -> None:
    assert gl.tap("x", value) is value
    assert gl.tap("x", value, extras={"fill": 1}, layer=3) is value


def run_in_a_thread(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Like ``asyncio.run``, which refuses to work in the main thread once browser tests have left a loop there."""
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(asyncio.run, coroutine).result()


def test_without_a_session_tags_step_and_here_do_nothing() -> None:
    assert gl.here() is None
    gl.step()

    @gl.tags(lambda self: 1 / 0)
    def tagged(self: int) -> int:
        return self + 1

    assert tagged(1) == 2
    with gl.tags(phase="decode"):
        assert ambient.get() == ()
    assert gl.tap("x", 1) == 1


@pytest.mark.ranks
def test_taps_can_stay_in_code_that_ships_without_torch() -> None:
    program = """
import sys
sys.modules["torch"] = None
import graftlab as gl
with gl.tags(layer=1):
    assert gl.tap("x", 5, extras=1, layer=2) == 5
gl.step()
assert gl.here() is None
try:
    gl.watch
except gl.DependencyError as error:
    assert "pip install torch" in str(error)
else:
    raise AssertionError("watch came without torch")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_a_model_with_watch_hooks_runs_untouched_without_a_session() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    expected = model(torch.ones(1, 2))
    with gl.watch(model):
        assert model(torch.ones(1, 2)).equal(expected)


# ---- tags -----------------------------------------------------------------------------------------------------------


def test_inner_tags_precede_outer_ones_and_a_taps_own_both(recorder: Recorder) -> None:
    with gl.tags(phase="prefill", layer=0):
        gl.tap("outer", 1)
        with gl.tags(layer=1, head=2):
            gl.tap("inner", 1)
            gl.tap("own", 1, head=3)
        gl.tap("outer", 1)
    gl.tap("bare", 1)

    assert recorder.tags_of("outer") == [{"phase": "prefill", "layer": 0}] * 2
    assert recorder.tags_of("inner") == [{"phase": "prefill", "layer": 1, "head": 2}]
    assert recorder.tags_of("own") == [{"phase": "prefill", "layer": 1, "head": 3}]
    assert recorder.tags_of("bare") == [{}]


def test_tags_end_with_an_exception(recorder: Recorder) -> None:
    with pytest.raises(ZeroDivisionError), gl.tags(layer=1):
        raise ZeroDivisionError

    @gl.tags(layer=2)
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    gl.tap("after", 1)
    assert recorder.tags_of("after") == [{}]


def test_a_decorator_adds_tags_computed_from_each_calls_arguments(recorder: Recorder) -> None:
    class Layer:
        def __init__(self, index: int) -> None:
            self.index = index

        @gl.tags(lambda self, x, *, phase: {"layer": self.index, "phase": phase})
        def forward(self, x: int, *, phase: str) -> int:
            """The docstring stays."""
            return gl.tap("h", x + self.index)

    results = [Layer(index).forward(10, phase="decode") for index in range(2)]

    assert results == [10, 11]
    assert recorder.tags_of("h") == [{"layer": 0, "phase": "decode"}, {"layer": 1, "phase": "decode"}]
    assert Layer.forward.__doc__ == "The docstring stays."


def test_a_decorators_fixed_tags_precede_computed_ones(recorder: Recorder) -> None:
    @gl.tags(lambda number: {"layer": number, "phase": "decode"}, layer=7)
    def block(number: int) -> None:
        gl.tap("h", number)

    block(1)
    assert recorder.tags_of("h") == [{"layer": 7, "phase": "decode"}]


def test_a_decorator_with_fixed_tags_nests_in_recursion(recorder: Recorder) -> None:
    @gl.tags(kind="recursive")
    def down(depth: int) -> None:
        gl.tap("down", depth, depth=depth)
        if depth:
            down(depth - 1)
        gl.tap("up", depth)

    down(2)
    assert [tags["depth"] for tags in recorder.tags_of("down")] == [2, 1, 0]
    assert recorder.tags_of("up") == [{"kind": "recursive"}] * 3
    gl.tap("after", 1)
    assert recorder.tags_of("after") == [{}]


def test_one_tags_object_can_be_entered_by_several_threads_and_again(recorder: Recorder) -> None:
    decode = gl.tags(phase="decode")
    inside, outside = threading.Barrier(2), threading.Barrier(2)

    def first() -> None:
        with decode:
            inside.wait(30)
            gl.tap("first", 1)
        outside.wait(30)
        gl.tap("first after", 1)

    def second() -> None:
        with gl.tags(thread=2), decode:
            inside.wait(30)
            outside.wait(30)  # the other thread has left meanwhile
            gl.tap("second", 1)
        gl.tap("second after", 1)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    with decode, decode:
        pass
    gl.tap("main", 1)
    assert recorder.tags_of("first") == [{"phase": "decode"}]
    assert recorder.tags_of("second") == [{"thread": 2, "phase": "decode"}]
    for name in ("first after", "second after", "main"):
        assert recorder.tags_of(name) == [{}]


def test_each_asyncio_task_has_its_own_tags(recorder: Recorder) -> None:
    shared = gl.tags(phase="decode")

    async def request(number: int, turn: asyncio.Event, next_turn: asyncio.Event) -> None:
        with gl.tags(request=number), shared:
            next_turn.set()
            await turn.wait()  # the other task is inside its own tags by now
            gl.tap("request", 1)
        gl.tap("after", 1)

    async def serve() -> None:
        first, second = asyncio.Event(), asyncio.Event()
        await asyncio.gather(request(1, first, second), request(2, second, first))
        gl.tap("after", 1)

    run_in_a_thread(serve())
    assert sorted(tags["request"] for tags in recorder.tags_of("request")) == [1, 2]
    assert all(tags["phase"] == "decode" for tags in recorder.tags_of("request"))
    assert recorder.tags_of("after") == [{}] * 3


def test_a_decorated_coroutine_has_its_tags_while_it_runs(recorder: Recorder) -> None:
    @gl.tags(lambda number: {"request": number})
    async def request(number: int) -> int:
        await asyncio.sleep(0)
        gl.tap("request", 1)
        return number

    async def serve() -> list[int]:
        return await asyncio.gather(request(1), request(2))

    assert run_in_a_thread(serve()) == [1, 2]
    assert asyncio.iscoroutinefunction(request)
    assert recorder.tags_of("request") == [{"request": 1}, {"request": 2}]


def test_decorated_generator_is_refused_with_an_alternative(recorder: Recorder) -> None:
    with pytest.raises(
        gl.TagError,
        match=exactly(
            "gl.tags cannot decorate the generator "
            "test_decorated_generator_is_refused_with_an_alternative.<locals>.generate, which runs in "
            "pieces; write `with gl.tags(...)` around the taps in it"
        ),
    ):

        @gl.tags(layer=1)
        def generate() -> Iterator[int]:
            yield 1


def requests(number: int) -> Iterator[int]:
    """Two tokens of a request, whose taps have its number."""
    with gl.tags(request=number):
        for token in range(2):
            gl.tap("token", token)
            yield token
        gl.tap("end", number)


def test_tags_around_a_yield_leak_neither_to_the_caller_nor_to_other_generators(recorder: Recorder) -> None:
    def nested() -> Iterator[int]:
        with gl.tags(outer=True):
            yield from requests(3)
            gl.tap("nested", 0)

    with gl.tags(phase="decode"):
        for _ in zip(requests(1), requests(2), nested(), strict=True):
            gl.tap("caller", 0)
            with gl.tags(layer=0):
                gl.tap("inner", 0)
    gl.tap("after", 0)
    each = [{"phase": "decode", "request": number} for number in (1, 2)]
    each.append({"phase": "decode", "outer": True, "request": 3})
    assert recorder.tags_of("token") == each * 2
    assert recorder.tags_of("end") == each
    assert recorder.tags_of("nested") == [{"phase": "decode", "outer": True}]
    assert recorder.tags_of("caller") == [{"phase": "decode"}] * 2
    assert recorder.tags_of("inner") == [{"phase": "decode", "layer": 0}] * 2
    assert recorder.tags_of("after") == [{}]


def test_a_generator_may_outlive_the_tags_around_its_first_value(recorder: Recorder) -> None:
    with gl.tags(phase="prefill"):
        first, left = requests(1), requests(2)
        next(first)
        next(left)
    with gl.tags(phase="decode", request=7), contextlib.closing(left):
        assert [*first] == [1]
        gl.tap("caller", 0)
    gl.tap("after", 0)
    assert recorder.tags_of("token")[-1] == {"phase": "decode", "request": 1}
    assert recorder.tags_of("caller") == [{"phase": "decode", "request": 7}]
    assert recorder.tags_of("after") == [{}]
    assert not ambient_tags.in_generators


def test_a_generator_that_begins_in_one_thread_may_end_in_another(recorder: Recorder) -> None:
    def layers() -> Iterator[int]:
        with gl.tags(layer=1):
            yield 1

    begun = layers()
    thread = threading.Thread(target=next, args=(begun,))
    thread.start()
    thread.join()
    with gl.tags(phase="decode"):
        begun.close()
        gl.tap("x", 1)
    gl.tap("x", 1)
    assert recorder.tags_of("x") == [{"phase": "decode"}, {}]
    assert not ambient_tags.in_generators


def test_a_context_manager_that_is_dropped_ends_its_own_tags(recorder: Recorder) -> None:
    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        with gl.tags(phase=name):
            yield

    dropped = phase("prefill")
    dropped.__enter__()
    gl.tap("x", 1)
    # Its generator is closed by no context manager.
    del dropped
    gl.tap("x", 1)
    assert recorder.tags_of("x") == [{"phase": "prefill"}, {}]


def test_tags_that_end_before_those_inside_them_do_not_come_back(recorder: Recorder) -> None:
    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        with gl.tags(phase=name):
            yield

    with gl.tags(model="a"):
        outer, inner = phase("prefill"), gl.tags(layer=1)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        gl.tap("x", 1)
        inner.__exit__(None, None, None)
        gl.tap("x", 1)
    assert recorder.tags_of("x") == [{"model": "a", "layer": 1}, {"model": "a"}]


def test_a_gradient_after_the_session_is_left_as_it_is(recorder: Recorder) -> None:
    x = torch.ones(3, requires_grad=True)
    taps.tap_gradient("x", x, {"layer": 2})
    taps.tap_gradient("none", torch.ones(3), {})
    (x * 2).sum().backward()
    assert [(name, tags) for name, tags in recorder.seen] == [("x", {"layer": 2, "kind": "grad"})]
    taps.deactivate()
    x.grad = None
    (x * 2).sum().backward()
    assert x.grad is not None
    assert (x.grad.tolist(), len(recorder.seen)) == ([2.0] * 3, 1)


def test_the_gradient_of_a_dtensor_is_tapped_as_a_copy(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graft writes into it, and what autograd passes upstream stays as it was."""

    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    def write(name: str, value: Any, *_: Any, **__: Any) -> Any:
        return value.zero_()

    monkeypatch.setattr(recorder, "tap", write)
    hooks: list[Any] = []
    taps.tap_gradient("x", SimpleNamespace(requires_grad=True, register_hook=hooks.append), {})
    gradient = torch.ones(3).as_subclass(Sharded)
    assert (hooks[0](gradient).tolist(), gradient.tolist()) == ([0.0] * 3, [1.0] * 3)


def test_a_tracer_sees_taps_outside_a_session_and_nothing_is_left_of_it() -> None:
    assert taps.tap_handler() is None
    with taps.tracing({}, lambda: True):  # type: ignore[arg-type]
        handler = taps.tap_handler()
        assert handler is not None
        assert not handler.may_take("x")
        assert handler.tap("x", 3, None, {}) == 3
        assert taps.grafter() is not None
    assert taps.tap_handler() is None
    with taps_within(lambda: contextlib.nullcontext()):
        assert taps.tap_handler() is None


def test_a_context_manager_made_of_a_generator_sets_tags_for_its_block(recorder: Recorder) -> None:
    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        with gl.tags(phase=name):
            yield

    with phase("decode"):
        gl.tap("inside", 0)
        assert [*requests(1)] == [0, 1]
        gl.tap("inside", 0)
    gl.tap("after", 0)
    assert recorder.tags_of("inside") == [{"phase": "decode"}] * 2
    assert recorder.tags_of("token") == [{"phase": "decode", "request": 1}] * 2
    assert recorder.tags_of("after") == [{}]


def test_computed_tags_need_a_call_and_must_be_a_dict(recorder: Recorder) -> None:
    with (
        pytest.raises(
            gl.TagError, match=exactly("gl.tags(function) needs the arguments of a call: use it as a decorator")
        ),
        gl.tags(lambda: {}),
    ):
        pass

    @gl.tags(lambda: ["layer"])
    def wrong() -> None: ...

    with pytest.raises(gl.TagError, match=exactly("gl.tags: the function must return a dict of tags, not list")):
        wrong()


@pytest.mark.ranks
@pytest.mark.parametrize("tag", ["name", "step", "side", "rank", "recompute_status"])
def test_reserved_tags_are_refused(tag: str, recorder: Recorder, session: gl.Session) -> None:
    with pytest.raises(gl.TagError, match=tag):
        gl.tags(**{tag: 1})

    @gl.tags(lambda: {tag: 1})
    def computed() -> None: ...

    with pytest.raises(gl.TagError, match=tag):
        computed()

    def tapped(tag: str) -> None:
        gl.tap("x", torch.ones(1), **{tag: 1})

    with pytest.raises(gl.RunError, match=rf"gl.tap\('x'\): the tags \['{tag}'\] are set by graftlab itself") as caught:
        session.run(tapped, tapped, args=(tag,))
    assert isinstance(caught.value.__cause__, gl.TagError)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["", None, 3])
def test_a_tap_needs_a_name(name: Any, session: gl.Session) -> None:
    def tapped(name: Any) -> None:
        gl.tap(name, torch.ones(1))

    with pytest.raises(gl.RunError, match="the name must be a non-empty string"):
        session.run(tapped, tapped, args=(name,))


# ---- in a session ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_ambient_tags_reach_filters_rows_and_pairing(session: gl.Session) -> None:
    session.edit(b2t="phase == 'decode' and layer == 1")

    def taps_in_layers() -> list[float]:
        seen = []
        for phase in ("prefill", "decode"):
            for layer in range(2) if gl.here().side == "baseline" else (1, 0):
                with gl.tags(phase=phase, layer=layer, tensor="hidden"):
                    seen.append(gl.tap("h", torch.full((1,), own_value() + 100 * layer), tensor="h").item())
        return seen

    run = session.run(taps_in_layers, taps_in_layers)
    assert run.target == [[120.0, 20.0, 110.0, 20.0]]
    frame = run.frame
    assert list(zip(frame["phase"], frame["layer"], frame["status"], frame["max_abs"], strict=True)) == [
        ("prefill", 1, "compared", 10.0),
        ("prefill", 0, "compared", 10.0),
        ("decode", 1, "grafted", 10.0),
        ("decode", 0, "compared", 10.0),
    ]
    assert frame["tags"].iloc[0] == {
        **{"name": "h", "step": frame["step"].iloc[0], "side": "target", "rank": 0},
        **{"recompute_status": "original", "phase": "prefill", "layer": 1, "tensor": "h"},
    }


@pytest.mark.ranks
def test_a_function_that_was_decorated_in_the_notebook_adds_its_tags_on_the_ranks(session: gl.Session) -> None:
    cell = """
        import asyncio
        import torch
        import graftlab as gl

        @gl.tags(lambda layer: {"layer": layer})
        def block(layer):
            gl.tap("h", torch.ones(1))

        @gl.tags(phase="decode")
        async def decode():
            gl.tap("logits", torch.ones(1))

        def forward():
            block(3)
            asyncio.run(decode())
    """
    forward = run_cell(cell)["forward"]
    tags = session.run(forward, forward).frame["tags"]
    assert [tag.get("layer") for tag in tags] == [3, None]
    assert [tag.get("phase") for tag in tags] == [None, "decode"]


@pytest.mark.ranks
def test_here_returns_each_ranks_place() -> None:
    def stand() -> tuple[str, int, int, str]:
        me = gl.here()
        return me.side, me.rank, me.world_size, str(me.device)

    with gl.launch(1, 2, device="cpu") as session:
        run = session.run(stand, stand)
        session.execute("lock = __import__('threading').Lock()", on="target")  # no process can send it
        [_, place] = session.run(target="gl.here()").target
    assert (place.side, place.rank, place.vars) == ("target", 1, {})
    assert run.baseline == [("baseline", 0, 1, "cpu")]
    assert run.target == [("target", 0, 2, "cpu"), ("target", 1, 2, "cpu")]
    assert gl.here() is None


@pytest.mark.ranks
def test_taps_of_several_threads_of_one_rank_all_pair(session: gl.Session) -> None:
    session.edit(b2t="True")

    def in_threads() -> list[float]:
        sys.setswitchinterval(1e-6)  # threads change places in the middle of everything
        results = [0.0] * 8

        def work(number: int) -> None:
            with gl.tags(thread=number):
                for repeat in range(50):
                    value = torch.full((4,), own_value() + number + 100 * repeat)
                    results[number] += gl.tap("x", value)[0].item()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        # The other side starts its threads the other way round.
        for thread in threads if gl.here().side == "baseline" else reversed(threads):
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(0.005)
        return results

    run = session.run(in_threads, in_threads)
    assert run.target == run.baseline == [[50 * (10.0 + number) + 122500.0 for number in range(8)]]
    assert run.frame["status"].value_counts().to_dict() == {"grafted": 400}


def test_a_trace_leaves_the_calls_as_they_were_before_it() -> None:
    traced: Any = object()
    before = taps._grafter, taps._handler, taps._traced, taps._is_tracing, taps._are_wanted
    seen: list[Any] = []

    def fail() -> None:
        with taps.tracing(traced, lambda: True):
            seen.extend([taps._traced, taps._are_wanted])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert seen == [traced, True]
    assert (taps._grafter, taps._handler, taps._traced, taps._is_tracing, taps._are_wanted) == before


class Choosy(StandInGrafter):
    """A grafter whose plan may match one tap alone."""

    def may_take(self, path: str) -> bool:
        return path == "h"


@pytest.fixture
def grafter(monkeypatch: pytest.MonkeyPatch) -> Choosy:
    """The grafter of this process, which is a rank for a test."""
    for name in ("_grafter", "_handler", "_here", "_traced", "_is_tracing", "_are_wanted", "_route"):
        monkeypatch.setattr(taps, name, getattr(taps, name))
    monkeypatch.setattr("os.register_at_fork", lambda **_: None)
    grafter = Choosy()
    taps.activate(grafter, None, SimpleNamespace(), bool)  # type: ignore[arg-type]
    return grafter


def test_graphs_have_taps_where_the_plan_may_match_one_or_something_else_takes_them(grafter: Choosy) -> None:
    assert taps.are_wanted()
    taps.want_taps(grafter, False)
    assert not taps.are_wanted()
    with taps.tracing(SimpleNamespace(), bool):  # type: ignore[arg-type]
        assert taps.are_wanted()
    assert not taps.are_wanted()
    other: Any = Recorder()
    taps.redirect_taps(other, lambda thread: other)
    assert taps.are_wanted()
    taps.redirect_taps(None)
    assert not taps.are_wanted()
    # A recorder in the grafter's place has a plan that matches nothing.
    taps.want_taps(other, False)
    assert taps.are_wanted()
    taps.want_taps(grafter, False)
    taps.activate(grafter, None, SimpleNamespace(), bool)  # type: ignore[arg-type]
    assert taps.are_wanted()


def test_what_takes_taps_in_the_grafters_place_may_take_all(grafter: Choosy) -> None:
    assert [taps.may_take(path) for path in ("h", "x")] == [True, False]
    other: Any = Recorder()
    taps.redirect_taps(other)
    assert [taps.may_take(path) for path in ("h", "x")] == [True, True]
    taps.deactivate()
    assert not taps.may_take("h")
    # Without a grafter nothing can take them.
    taps.redirect_taps(other)
    assert not taps.may_take("h")
