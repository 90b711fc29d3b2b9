"""Search for the smallest part of the captured graphs whose compilation makes a result wrong, and its lines of source.

torch captures a call as graphs, and notes the line of each operation. Here a backend compiles a contiguous part of
those operations and runs the rest one by one. Halving that part from both ends leaves the operations that the compiler
turns into wrong code, whichever backend has the mistake.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from graftlab.lines.frames import SourceFrame, frames_of_traceback
from graftlab.taps.compiled_calls import CompiledCall

_MOST_ATTEMPTS = 40


@dataclass(frozen=True)
class MiscompiledLine:
    """A line of source in the smallest part of the captured graphs that is wrong as soon as it is compiled.

    ``operations`` are the graph's operations that come from the line, in their order. ``stack`` has the line and its
    callers, innermost first.
    """

    file: str
    line: int
    source: str
    operations: tuple[str, ...]
    stack: tuple[SourceFrame, ...]


@dataclass(frozen=True)
class PieceSearch:
    """The result of a search for miscompiled lines.

    ``lines`` are in the order of execution; compiled alone they make the result wrong, and without the first or the
    last of their operations they do not. ``is_right_uncompiled`` is False where the captured graphs give a wrong result
    even uncompiled.
    """

    lines: tuple[MiscompiledLine, ...]
    is_right_uncompiled: bool


def search_pieces(call: CompiledCall, is_right: Callable[[CompiledCall], bool | None]) -> PieceSearch:
    """Compile ever smaller parts of the call's graphs, as long as its result is wrong.

    ``call`` compiles without taps. ``is_right`` compiles and calls; it returns None where that fails, and must give all
    ranks the same answer.
    """
    attempts = 0

    def is_wrong(first: int, last: int) -> bool:
        """Whether the result is wrong with the operations between these cuts compiled."""
        nonlocal attempts
        attempts += 1
        return is_right(_with_backend(call, _CompiledPart(call.options, cuts[first], cuts[last]))) is False

    survey = _CompiledPart(call.options, 0, 0)
    uncompiled = is_right(_with_backend(call, survey))
    if not uncompiled:
        return PieceSearch((), uncompiled is None)
    cuts = survey.cuts
    begin, end = 0, len(cuts) - 1
    # If all operations compiled as one part are right, the mistake is in how torch compiles a whole call.
    if end < 1 or not is_wrong(begin, end):
        return PieceSearch((), True)
    begin = _last_true(lambda middle: is_wrong(middle, end), begin, end)
    end = -_last_true(lambda middle: is_wrong(begin, -middle), -end, -begin)
    while end - begin > 1 and attempts < _MOST_ATTEMPTS and is_wrong(begin + 1, end):
        begin += 1
    return PieceSearch(_lines_of(survey.nodes[cuts[begin] : cuts[end]]), True)


def _last_true(holds: Callable[[int], bool], first: int, beyond: int) -> int:
    """Return a number at which the condition holds and after which it does not. It holds at the first."""
    while beyond - first > 1:
        middle = (first + beyond) // 2
        first, beyond = (middle, beyond) if holds(middle) else (first, middle)
    return first


def _with_backend(call: CompiledCall, backend: _CompiledPart) -> CompiledCall:
    kept = {name: value for name, value in call.options.items() if name not in ("backend", "mode", "options")}
    return replace(call, options={**kept, "backend": backend}, names=())


class _CompiledPart:
    """A backend that compiles the operations from ``begin`` to ``end`` of all graphs of a call, and runs the others.

    Operations are counted over the graphs in the order in which torch captures them. ``cuts`` are the places at which
    a part may begin or end, ``nodes`` the operations.
    """

    def __init__(self, options: Mapping[str, Any], begin: int, end: int) -> None:
        self.nodes: list[Node] = []
        self.cuts: list[int] = [0]
        self._options = {name: value for name, value in options.items() if name != "fullgraph"}
        self._begin, self._end = begin, end

    def __repr__(self) -> str:
        # The text identifies the backend among the options of a call that was compiled before.
        return f"<{type(self).__name__} {self._begin}:{self._end} at {id(self)}>"

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        operations = [node for node in module.graph.nodes if node.op.startswith("call_")]
        first = len(self.nodes)
        at = {node: first + place for place, node in enumerate(operations)}
        self.nodes += operations
        self.cuts += [cut for cut in _cuts(operations, at) if cut > self.cuts[-1]]
        inside = [node for node in operations if self._begin <= at[node] < self._end]
        if not inside:
            return module.forward

        def part_of(node: Node) -> int:
            # A node that is no operation, such as a weight, belongs to its first reader.
            number = at.get(node, min((at[user] for user in node.users if user in at), default=self._end))
            return 0 if number < self._begin else 1 if number < self._end else 2

        split = split_module(module, module, part_of, keep_original_order=True)
        part = split.get_submodule("submod_1")
        # Before torch 2.10 a graph module that is made while torch compiles would not be compiled itself.
        compiled = torch.compile(lambda *values: part(*values), **self._options)
        split.submod_1 = _Calls(compiled)
        return split.forward


class _Calls(torch.nn.Module):
    """A function as a module, as a graph module needs it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _cuts(operations: Sequence[Node], at: Mapping[Node, int]) -> list[int]:
    """The places, the end included, across which only tensors and numbers pass; ``at`` numbers the operations."""
    found = []
    needed_until = -1
    for node in operations:
        if not isinstance(node.meta.get("example_value"), (torch.Tensor, torch.SymInt, int)):
            # A node without users is dropped; any other is a tuple, or an open context.
            needed_until = max([needed_until, *(at.get(user, -1) for user in node.users)])
        if needed_until <= at[node]:
            found.append(at[node] + 1)
    return found


def _lines_of(nodes: Sequence[Node]) -> tuple[MiscompiledLine, ...]:
    """The lines of source of these operations, each with its operations."""
    found: dict[tuple[str, int], MiscompiledLine] = {}
    for node in nodes:
        stack = frames_of_traceback(node.meta.get("stack_trace") or "")
        if not stack or node.target is operator.getitem:
            continue
        shown = stack[0]
        key = (shown.file, shown.line)
        if key in found:
            found[key] = replace(found[key], operations=(*found[key].operations, _name_of(node)))
        else:
            found[key] = MiscompiledLine(shown.file, shown.line, shown.source, (_name_of(node),), stack)
    return tuple(found.values())


def _name_of(node: Node) -> str:
    target = node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
