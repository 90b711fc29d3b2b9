"""Taps in programs that ``torch.export`` makes: kept on request, and taken out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from graftlab.taps import calls, compiled


def strip(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Take the taps out of an exported program, which computes the same without them; returns it.

    Do so before AOTInductor compiles it: its runtime has no Python, in which taps run.

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
    """Keep the taps in what ``torch.export`` exports inside; without it a program has none.

    The program then shows its tensors wherever it runs in a session, and does nothing more elsewhere. Not for several
    threads at once.

    >>> with gl.export_taps():
    ...     program = torch.export.export(torch.nn.Linear(3, 4), (torch.ones(2, 3),))
    """
    with calls.tracing(compiled, torch.compiler.is_compiling):
        yield
