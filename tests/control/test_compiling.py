"""session.compare_compiled: what compiled code computes otherwise, and what only fusion makes other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import graftlab as gl

pytestmark = pytest.mark.ranks

X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


def model(x: Tensor) -> Tensor:
    x = gl.tap("first", (x + 1).tanh())
    x = gl.tap("second", x * 3)
    x = gl.tap("third", x + 2)
    return gl.tap("out", x.sin().sum(-1))


def faulty(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that takes sin for cos wherever it comes."""
    for node in module.graph.nodes:
        if node.target == "sin":
            node.target = "cos"
    module.recompile()
    return module.forward


def faulty_where_fused(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend that forgets to add where it can fuse that with the product right before it."""
    import operator

    for node in list(module.graph.nodes):
        before = node.args[0] if node.target is operator.add else None
        if getattr(before, "target", None) is operator.mul and len(before.users) == 1:
            node.replace_all_uses_with(before)
            module.graph.erase_node(node)
    module.recompile()
    return module.forward


@pytest.mark.parametrize("how", ["function", "expression"])
def test_a_faithful_compilation_is_told_as_such(how: str, session: gl.Session) -> None:
    if how == "function":
        compared = session.compare_compiled(model, args=(X,), backend="aot_eager", fullgraph=True)
    else:
        session.execute("import torch\nx = torch.linspace(-1, 1, 8)\ndef f(x):\n    return gl.tap('h', x * 2)")
        compared = session.compare_compiled("f(x)", backend="aot_eager")
    assert (compared.untapped, compared.tapped, compared.fused) == (0.0, 0.0, None)
    assert compared.verdict.named == []
    assert compared.text.startswith("Compiled, its result is equal to the eager one, without taps and with them.")


def test_a_mistake_of_the_compiler_is_named_by_the_verdict(session: gl.Session) -> None:
    compared = session.compare_compiled(model, args=(X,), backend=faulty)
    assert compared.verdict.named == ["out"]
    assert compared.fused is None
    assert compared.untapped > 0.1


def test_what_parts_only_without_a_tap_names_that_tap(session: gl.Session) -> None:
    compared = session.compare_compiled(model, args=(X,), backend=faulty_where_fused)
    assert compared.verdict.named == []
    assert compared.tapped == 0.0
    assert compared.untapped > 0.1
    assert compared.fused == "second"
    assert "They part only without the tap 'second' in the graph" in compared.text
    # Whatever was left out for it is there again.
    run = session.run(model, model, args=(X,))
    assert run.frame["name"].tolist() == ["first", "second", "third", "out"]


def test_a_function_that_returns_no_tensor_is_told_of(session: gl.Session) -> None:
    compared = session.compare_compiled(lambda x: [model(x), None][1], args=(X,), backend="eager")
    assert "The function returns no tensor and no number" in compared.text


def test_arguments_of_an_expression_are_refused(session: gl.Session) -> None:
    with pytest.raises(gl.SessionError, match="takes no args"):
        session.compare_compiled("f(x)", args=(X,))


def test_a_graft_of_the_plan_in_force_repairs_nothing_here_and_is_in_force_again(session: gl.Session) -> None:
    session.edit(b2t="name == 'out'")
    try:
        compared = session.compare_compiled(model, args=(X,), backend=faulty)
        assert compared.verdict.named == ["out"]
        assert compared.tapped > 0.1
        assert (session.plan.b2t, session.plan.t2b, session.plan.compare) == ("name == 'out'", None, "True")
    finally:
        session.edit(b2t=None)


def nan_for_inf(module: Any, inputs: Any) -> Callable[..., Any]:
    return lambda *args: tuple(torch.full_like(each, torch.nan) for each in module(*args))


def test_other_values_that_are_not_finite_and_results_that_are_absent_are_no_agreement(session: gl.Session) -> None:
    infinite = session.compare_compiled(lambda x: gl.tap("h", x / 0.0), args=(X + 2,), backend=nan_for_inf)
    assert infinite.untapped == float("inf")

    def shorter(x: Tensor) -> list[Tensor]:
        h = gl.tap("h", x * 2)
        return [h] if torch.compiler.is_compiling() else [h, h]

    assert session.compare_compiled(shorter, args=(X,), backend="eager").untapped == float("inf")
