"""The parts of captured graphs that a search for miscompiled lines compiles."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from graftlab.ranks import compiled_pieces, compiled_runs
from graftlab.ranks.compiled_pieces import _CompiledPart, _cuts, _lines_of, search_pieces


def graph_of(*lines: tuple[str, Any, tuple[str, ...]]) -> list[fx.Node]:
    """The operations of a graph, each given by its name, its example value and the names of what it reads."""
    graph = fx.Graph()
    made = {"x": graph.placeholder("x")}
    for name, value, reads in lines:
        # In older releases call_function() takes no name.
        made[name] = graph.create_node("call_function", operator.neg, tuple(made[each] for each in reads), name=name)
        made[name].meta["example_value"] = value
    graph.output(made[lines[-1][0]])
    return [made[name] for name, _, _ in lines]


def test_no_part_ends_between_a_tuple_or_a_context_and_its_last_user() -> None:
    x = torch.ones(1)
    nodes = graph_of(("a", x, ("x",)), ("pair", (x, x), ("a",)), ("b", x, ("pair",)), ("c", x, ("b",)))
    assert _cuts(nodes, {node: at for at, node in enumerate(nodes)}) == [1, 3, 4]
    nodes = graph_of(("open", None, ("x",)), ("a", x, ("x",)), ("close", None, ("open",)), ("b", 3, ("a",)))
    assert _cuts(nodes, {node: at for at, node in enumerate(nodes)}) == [3, 4]


def test_a_tuple_that_the_graph_returns_lets_a_part_end_after_it() -> None:
    nodes = graph_of(("a", torch.ones(1), ("x",)), ("pair", (1, 2), ("a",)))
    # Its user, the graph's output, is no operation.
    assert _cuts(nodes, {node: at for at, node in enumerate(nodes)}) == [1, 2]


def test_operations_of_one_line_are_one_line_and_taking_an_item_is_none() -> None:
    nodes = graph_of(("a", 1, ("x",)), ("b", 1, ("a",)), ("c", 1, ("b",)), ("d", 1, ("c",)))
    for node, line in zip(nodes, (3, 4, 3, 5), strict=True):
        node.meta["stack_trace"] = f'  File "/model.py", line {line}, in forward\n    return number_{line}\n'
    nodes[3].target = operator.getitem
    found = _lines_of(nodes)
    assert [(each.line, each.operations) for each in found] == [(3, ("neg", "neg")), (4, ("neg",))]
    nodes[0].meta.clear()
    assert [each.line for each in _lines_of(nodes)] == [4, 3]


@pytest.mark.parametrize(("begin", "end", "compiled"), [(0, 0, []), (1, 2, ["cos"]), (0, 3, ["sin", "cos", "exp"])])
def test_only_the_operations_between_the_cuts_are_compiled(
    begin: int, end: int, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    given: dict[str, Any] = {}

    class Recorder(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    def compile_(function: Any, **options: Any) -> Any:
        # Before torch 2.10 a graph module would not be compiled here.
        assert not isinstance(function, torch.nn.Module)
        given.update(options)

        def recorded(*values: Any) -> Any:
            with Recorder():
                return function(*values)

        return recorded

    monkeypatch.setattr(torch, "compile", compile_)
    module = fx.symbolic_trace(lambda x: torch.exp(torch.cos(torch.sin(x))))
    for node in module.graph.nodes:
        node.meta["example_value"] = torch.ones(2)
    part = _CompiledPart({"fullgraph": True, "dynamic": False}, begin, end)
    x = torch.linspace(0, 1, 2)
    assert torch.equal(part(module, [x])(x), x.sin().cos().exp())
    assert seen == compiled
    # A part that is compiled need not be one graph.
    assert given == ({"dynamic": False} if compiled else {})
    assert part.cuts == [0, 1, 2, 3]


@pytest.mark.parametrize(("made", "answer"), [(1.0, True), (1.5, False), (ValueError("no such pattern"), None)])
def test_all_ranks_of_a_side_give_one_answer_on_a_compilation(
    made: float | Exception, answer: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would compile different code next, and a collective would hang."""
    agreed: list[bool | None] = []
    monkeypatch.setattr(compiled_runs, "_on_all_ranks", lambda own: agreed.append(own) or "of all")
    monkeypatch.setattr(compiled_runs, "search_pieces", lambda call, is_right: is_right(attempt))

    def called_anew(args: object, kwargs: object) -> torch.Tensor:
        if isinstance(made, Exception):
            raise made
        return torch.tensor([made])

    attempt = SimpleNamespace(called_anew=called_anew)
    call: Any = SimpleNamespace(mode=None, options={"backend": "eager"})
    found = compiled_runs.search_compiler(lambda: torch.ones(1), call, 1e-3, (), {})
    assert (found.pieces, agreed, found.compilations) == ("of all", [answer], 1)


class Part:
    """A part of a call of eight operations, which may be cut anywhere."""

    cuts = tuple(range(9))
    nodes = tuple(range(8))

    def __init__(self, options: Any, begin: int, end: int) -> None:
        self.begin, self.end = begin, end


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(compiled_pieces, "_CompiledPart", Part)
    monkeypatch.setattr(compiled_pieces, "_with_backend", lambda call, part: part)
    monkeypatch.setattr(compiled_pieces, "_lines_of", tuple)
    return SimpleNamespace(options={})


def test_the_smallest_wrong_part_is_found_wherever_it_is(parts: Any) -> None:
    for last in range(8):
        for first in range(last + 1):
            tried: list[Any] = []

            def is_right(part: Any, first: int = first, last: int = last, tried: list[Any] = tried) -> bool:
                tried.append(part)
                return not (part.begin <= first and last < part.end)

            found = search_pieces(parts, is_right)
            assert (found.lines, found.is_right_uncompiled) == (tuple(range(first, last + 1)), True)
            # By halves from either end.
            assert len(tried) <= 10


@pytest.mark.parametrize(("most", "lines"), [(100, (3,)), (9, (2, 3)), (0, (0, 1, 2, 3))])
def test_a_part_is_shortened_from_its_begin_again_up_to_a_number_of_compilations(
    most: int, lines: tuple[int, ...], parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_pieces, "_MOST_ATTEMPTS", most)

    def is_right(part: Any) -> bool:
        # Without the last operations, the mistake needs fewer of the first ones.
        return not ((part.begin == 0 and part.end == 8) or part.begin <= 3 < part.end < 8)

    assert search_pieces(parts, is_right).lines == lines


@pytest.mark.parametrize(
    ("own", "other", "together"),
    [(True, True, True), (True, False, False), (False, True, False), (True, None, None), (None, False, None)],
)
def test_an_answer_of_a_side_is_that_of_all_its_ranks(
    own: bool | None, other: bool, together: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(answers: list[bool | None], answer: bool | None) -> None:
        answers[:] = [answer, other]

    assert compiled_runs._on_all_ranks(own) is own
    for name, stand_in in (
        ("is_initialized", lambda: True),
        ("get_world_size", lambda: 2),
        ("all_gather_object", gather),
    ):
        monkeypatch.setattr(torch.distributed, name, stand_in)
    assert compiled_runs._on_all_ranks(own) is together


@pytest.mark.parametrize(
    ("answers", "is_right"), [([False], False), ([None], True), ([True, True], True), ([True, None], True)]
)
def test_no_part_is_blamed_where_none_or_something_else_is_wrong(
    answers: list[bool | None], is_right: bool, parts: Any
) -> None:
    left = list(answers)
    found = search_pieces(parts, lambda part: left.pop(0))
    assert (found.lines, found.is_right_uncompiled, left) == ((), is_right, [])


@pytest.mark.parametrize(
    ("needed", "found"),
    [("c", "c"), ("bd", "bd"), ("ae", "ae"), ("abcde", "abcde"), ("", ""), ("x", "")],
)
def test_the_fewest_switches_that_make_a_result_right_are_found(
    needed: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_force: dict[str, object] = {}

    @contextlib.contextmanager
    def patch(changes: dict[str, object]) -> Iterator[None]:
        in_force.update(changes)
        yield
        in_force.clear()

    # One has the value anyway, and one is not in this release.
    config = SimpleNamespace(patch=patch, same=False, force_disable_caches=False, **dict.fromkeys("abcde", True))
    monkeypatch.setattr(compiled_runs, "_SWITCHES", dict.fromkeys(["a", "b", "same", "c", "later", "d", "e"], False))
    monkeypatch.setattr(compiled_runs, "_inductor_config", lambda: config)

    def is_right(call: object) -> bool:
        assert in_force.get("force_disable_caches") is True
        assert "same" not in in_force
        assert "later" not in in_force
        return all(in_force.get(name) is False for name in needed)

    assert compiled_runs._search_switches(None, is_right) == dict.fromkeys(found, False)  # type: ignore[arg-type]


def test_each_switch_differs_from_what_inductor_does_by_itself() -> None:
    config = compiled_runs._inductor_config()
    found = {name: compiled_runs._setting(config, name) for name in compiled_runs._SWITCHES}
    absent = {name for name, value in found.items() if value is compiled_runs._ABSENT}
    idle = {name for name, value in compiled_runs._SWITCHES.items() if found[name] == value}
    # Passes that a user's settings may turn on, and one that inductor runs by itself in later releases than 2.6.
    usual = {"group_fusion", "permute_fusion", "efficient_conv_bn_eval_fx_passes", "decompose_mem_bound_mm"}
    assert idle <= usual | {"loop_ordering_after_fusion"}
    assert absent <= {"use_pre_grad_passes", "use_joint_graph_passes", "use_post_grad_passes", "prologue_fusion"}
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert not absent
        assert idle <= usual
