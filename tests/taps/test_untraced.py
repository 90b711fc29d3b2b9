"""Functions that ``torch.compile`` must not trace, and their cost when nothing is compiled."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from graftlab.taps.untraced import outside_compiled_code


@pytest.mark.slow
def test_function_is_never_traced_while_its_caller_is() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    seen_inside: list[bool] = []

    @outside_compiled_code
    def apart(x: torch.Tensor) -> torch.Tensor:
        seen_inside.append(torch.compiler.is_compiling())
        return x.sin().cos().tan()

    def model(x: torch.Tensor) -> torch.Tensor:
        return apart(x + 1) * 2

    x = torch.linspace(0, 1, 3)
    assert torch.equal(torch.compile(model, backend=backend)(x), (x + 1).sin().cos().tan() * 2)
    assert (graphs, seen_inside) == ([1, 1], [False])


@pytest.mark.ranks
def test_rank_imports_only_the_parts_of_torch_that_its_code_uses() -> None:
    code = (
        "import sys, graftlab.ranks.worker\n"
        "from graftlab.taps.untraced import outside_compiled_code\n"
        "assert outside_compiled_code(lambda x, y: x + y)(1, y=2) == 3\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "False\n"
