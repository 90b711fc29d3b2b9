"""Taps in programs of ``torch.export``: keep them on request, and remove them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graftlab.taps import calls, compiled


def strip(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Remove the taps from an exported program, which then computes the same without them; returns the program.

    Do this before AOTInductor compiles it: its runtime cannot run taps, because they need Python.

    >>> program = torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),))
    >>> gl.strip(program) is program
    True
    """
    graph = program.graph_module.graph
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", None) != "graftlab":
            continue
        if node.target is torch.ops.graftlab.show_gradient.default:
            node.replace_all_uses_with(node.args[0])
        if not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    program.graph_module.recompile()
    return program


@contextlib.contextmanager
def export_taps() -> Iterator[None]:
    """Keep taps in programs exported by ``torch.export`` inside the ``with`` block; by default a program has none.

    The program then shows its tensors when it runs in a session, and only there. Not for several threads at once.

    >>> with gl.export_taps():
    ...     program = torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),))
    """
    with calls.tracing(compiled, torch.compiler.is_compiling):
        yield
