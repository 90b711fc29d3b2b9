"""session.compare_compiled: what compiled code computes otherwise, and what only fusion makes other."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import graftlab as gl
from graftlab.base import shipping
from graftlab.judging.compiled_comparison import CompiledComparison
from graftlab.taps.compiled_calls import CompiledCall

pytestmark = pytest.mark.ranks

X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture(scope="module", autouse=True)
def unmeasured_guards(launched: gl.Session) -> None:
    """Torch empties the processor's caches after each compilation to measure guards: a tenth of the time here."""
    launched.execute("import torch._dynamo.guards as guards; guards.profile_guard_manager = lambda *_: 0.0")


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


def miscompiled(compared: CompiledComparison) -> dict[str, tuple[str, ...]]:
    """The operations of each line whose compiled code is wrong."""
    return dict(zip(compared.lines["source"], compared.lines["operations"], strict=True))


@pytest.mark.parametrize("how", ["function", "expression"])
def test_a_faithful_compilation_is_reported_as_equal(how: str, session: gl.Session) -> None:
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
    # The search for lines runs the code eagerly, and leaves it compiled afterwards: `tapped` is of a later run.
    assert "Run eagerly, operation by operation, out agrees: compiling the target's code" in compared.verdict.text
    assert not len(compared.verdict.lines)
    assert compared.fused is None
    assert compared.untapped > 0.1
    assert miscompiled(compared) == {'return gl.tap("out", x.sin().sum(-1))': ("sin",)}
    assert "Only this line's compiled code is wrong; with everything else uncompiled" in compared.text


def test_a_difference_only_without_a_tap_names_that_tap(session: gl.Session) -> None:
    compared = session.compare_compiled(model, args=(X,), backend=faulty_where_fused)
    assert compared.verdict.named == []
    assert compared.tapped == 0.0
    assert compared.untapped > 0.1
    assert compared.fused == "second"
    assert "They differ only without the tap 'second' in the graph" in compared.text
    # Neither line is wrong alone.
    assert miscompiled(compared) == {
        'x = gl.tap("second", x * 3)': ("mul",),
        'x = gl.tap("third", x + 2)': ("add",),
    }
    # The taps left out for it are restored.
    run = session.run(model, model, args=(X,))
    assert run.frame["name"].tolist() == ["first", "second", "third", "out"]


def test_a_function_without_a_comparable_result_is_reported(session: gl.Session) -> None:
    compared = session.compare_compiled(lambda x: [model(x), None][1], args=(X,), backend="eager")
    assert "The function returns no finite tensor or number, so" in compared.text


def test_a_result_without_a_finite_number_is_not_called_equal(session: gl.Session) -> None:
    compared = session.compare_compiled(lambda x: (model(x) * math.inf * 0, None), args=(X,), backend="eager")
    assert compared.text.startswith("The function returns no finite tensor or number, so")
    both = session.compare_compiled(lambda x: (model(x) * math.inf * 0, model(x)), args=(X,), backend="eager")
    assert both.text.startswith("Compiled, its result is equal to the eager one")


def test_arguments_of_an_expression_are_refused(session: gl.Session) -> None:
    with pytest.raises(gl.SessionError, match="takes no args"):
        session.compare_compiled("f(x)", args=(X,))


def test_the_plans_grafts_are_suspended_and_restored(session: gl.Session) -> None:
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


def test_differing_nonfinite_values_and_missing_results_do_not_agree(session: gl.Session) -> None:
    infinite = session.compare_compiled(lambda x: gl.tap("h", x / 0.0), args=(X + 2,), backend=nan_for_inf)
    assert infinite.untapped == float("inf")

    def shorter(x: Tensor) -> list[Tensor]:
        h = gl.tap("h", x * 2)
        return [h] if torch.compiler.is_compiling() else [h, h]

    assert session.compare_compiled(shorter, args=(X,), backend="eager").untapped == float("inf")


# ---- rounding -------------------------------------------------------------------------------------------------------


class RoundsOnce(torch.fx.Interpreter):
    """Keeps float32 between operators, as fused code does; a tap alone sees bfloat16."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "graftlab" not in str(target) or not args[0].is_floating_point():
            return super().call_function(target, args, kwargs)
        shown, *others = args
        narrow = shown.bfloat16()
        result = super().call_function(target, (narrow, *others), kwargs)
        shown.copy_(narrow)
        return result


def rounds_once(module: Any, inputs: Any) -> Callable[..., Any]:
    def run(*given: Tensor) -> tuple[Tensor, ...]:
        wide = [each.float() if each.is_floating_point() else each for each in given]
        return tuple(each.bfloat16() for each in RoundsOnce(module).run(*wide))

    return run


def rounds_once_and_is_wrong(module: Any, inputs: Any) -> Callable[..., Any]:
    faulty(module, inputs)
    return rounds_once(module, inputs)


def sums_in_another_order(module: Any, inputs: Any) -> Callable[..., Any]:
    for node in module.graph.nodes:
        if node.target == "sum":
            node.target = "cumsum"
            with module.graph.inserting_after(node):
                last = module.graph.call_method("select", (node, -1, -1))
            node.replace_all_uses_with(last, delete_user_cb=lambda user, last=last: user is not last)
    module.recompile()
    return module.forward


def in_small_steps(x: Tensor) -> Tensor:
    """Adds in steps that bfloat16 drops, each below half a unit in the last place."""
    h = gl.tap("h", x * 1.5)
    for _ in range(60):
        h = h * 1.0019
    return gl.tap("out", h.sin())


def cancelling(x: Tensor) -> Tensor:
    h = gl.tap("h", x * 1.5)
    return gl.tap("out", (h + 3e4).sum(-1) - 3e4 * x.shape[-1])


HALF = torch.linspace(-1, 1, 1600).reshape(8, 200).bfloat16()
# Rows short enough that sums in another order round alike: some processors sum long ones far less exactly.
FULL = torch.linspace(-2, 2.5, 8000).reshape(40, 200)
NEEDS_A_COMPILER = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler: no g++ on PATH"),
]


@pytest.mark.parametrize(
    ("function", "x", "backend"),
    [
        (in_small_steps, HALF, rounds_once),
        (cancelling, FULL, sums_in_another_order),
        pytest.param(in_small_steps, HALF, "inductor", marks=[*NEEDS_A_COMPILER, pytest.mark.soak]),
        pytest.param(cancelling, FULL, "inductor", marks=[*NEEDS_A_COMPILER, pytest.mark.soak]),
    ],
)
def test_a_difference_of_rounding_is_reported_as_rounding(
    function: Any, x: Tensor, backend: Any, session: gl.Session
) -> None:
    compared = session.compare_compiled(function, args=(x,), backend=backend)
    # It differs, and by more than moved taps alone explain.
    assert compared.untapped > 5 * torch.finfo(x.dtype).eps
    without = session.verdict(
        function, CompiledCall(None, shipping.pack_function(function), {"backend": backend}), args=(x,)
    )
    assert without.named == ["out"]
    assert compared.verdict.named == []
    assert compared.fused is None
    assert "That is within rounding: rounding alone changes the eager result" in compared.text


def test_a_compiled_result_nearer_to_float64_is_not_blamed(
    session: gl.Session,
) -> None:
    compared = session.compare_compiled(in_small_steps, args=(HALF,), backend=rounds_once)
    eager, untapped, tapped = compared.exact
    assert max(untapped, tapped) < eager / 5
    assert "from the compiled one, which rounds less often and is not at fault." in compared.text


def test_a_mistake_beside_rounding_is_named(session: gl.Session) -> None:
    compared = session.compare_compiled(in_small_steps, args=(HALF,), backend=rounds_once_and_is_wrong)
    assert compared.verdict.named == ["out"]
    assert "That is more than rounding: rounding alone changes the eager result" in compared.text
    assert "not at fault" not in compared.text


def test_a_difference_after_the_last_tap_is_reported(session: gl.Session) -> None:
    def ends_untapped(x: Tensor) -> Tensor:
        return gl.tap("h", x * 3).sin()

    compared = session.compare_compiled(ends_untapped, args=(X,), backend=faulty)
    assert compared.verdict.named == []
    assert "the computation between the last tap and the result differs. Tap the result." in compared.text


def test_code_that_does_not_run_in_float64_is_compared_and_reported(session: gl.Session) -> None:
    def insists(x: Tensor) -> Tensor:
        h = gl.tap("h", x * 3)
        if h.dtype != torch.float32:
            raise TypeError("float32 only")
        return gl.tap("out", h.sin())

    compared = session.compare_compiled(insists, args=(X,), backend=faulty)
    assert compared.verdict.named == ["out"]
    assert "does not run in float64 (TypeError: float32 only), so the floors do not include" in compared.text


# ---- what is compiled -----------------------------------------------------------------------------------------------

NET = """
import torch
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
    def forward(self, x):
        return gl.tap("out", gl.tap("hidden", self.linear(x) * 2).sin())
net, x = Net(), torch.linspace(-1, 1, 16).reshape(2, 8)
"""


def faulty_without_gradients(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend with a pass that is wrong where no gradients are computed."""
    return module.forward if torch.is_grad_enabled() else faulty(module, inputs)


def faulty_by_patterns(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend as inductor, whose patterns are wrong."""
    import torch._inductor.config as config

    return faulty(module, inputs) if config.pattern_matcher else module.forward


def test_a_program_that_is_wrong_without_gradients_alone_is_not_cleared(session: gl.Session) -> None:
    session.execute(NET)
    compared = session.compare_compiled("net(x)", backend=faulty_without_gradients)
    assert (compared.grad_mode, compared.verdict.named) == ("no_grad", ["out"])
    assert compared.untapped > 0.1
    assert compared.other_mode == 0
    assert "Judged without gradients (torch.no_grad), because there the result is farther off." in compared.text
    right = session.compare_compiled("net(x)", backend="eager")
    assert (right.grad_mode, right.other_mode) == (None, 0)
    assert "Compiled without them (torch.no_grad), its result agrees too." in right.text
    told = session.compare_compiled("net(x)", backend=faulty_without_gradients, grad_mode="grad")
    assert (told.grad_mode, told.verdict.named, told.other_mode) == ("grad", [], None)


def test_a_call_that_uses_its_gradients_is_compared_with_them_alone(session: gl.Session) -> None:
    session.execute(NET + "def loss():\n    out = net(x).sum()\n    out.backward()\n    return out")
    compared = session.compare_compiled("loss()", backend="eager")
    assert (compared.other_mode, compared.untapped) == (None, 0)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_mode_around_the_model_does_not_prevent_tracing(fullgraph: bool, session: gl.Session) -> None:
    session.execute(NET)
    expression = "torch.inference_mode()(net)(x)"
    compared = session.compare_compiled(expression, backend=faulty_without_gradients, fullgraph=fullgraph)
    assert compared.not_whole is not None
    assert "The modules that it calls were compiled" in compared.text
    assert compared.verdict.named == ["out"]


def test_code_that_cannot_be_compiled_is_reported_in_a_few_lines(session: gl.Session) -> None:
    with pytest.raises(gl.RunError, match=r"torch\.compile cannot compile this call: .*") as error:
        session.compare_compiled(lambda x: torch.inference_mode()(torch.sin)(x), args=(X,), fullgraph=True)
    assert len(str(error.value).splitlines()) < 12
    with pytest.raises(gl.RunError, match="ZeroDivisionError"):
        session.compare_compiled(lambda x: x * (1 // 0), args=(X,), backend="eager")


def test_the_switch_that_makes_the_result_right_is_named(session: gl.Session) -> None:
    compared = session.compare_compiled(model, args=(X,), backend=faulty_by_patterns)
    assert compared.switches == {"pattern_matcher": False}
    assert "With torch._inductor.config.pattern_matcher = False the compiled result is right" in compared.text
    assert session.compare_compiled(model, args=(X,), backend=faulty).switches == {}


def faulty_by_two_steps(module: Any, inputs: Any) -> Callable[..., Any]:
    """A backend as inductor, in which either of two steps makes the mistake."""
    import torch._inductor.config as config

    is_wrong = config.epilogue_fusion or config.split_cat_fx_passes
    return faulty(module, inputs) if is_wrong else module.forward


def test_switches_that_only_together_make_the_result_right_are_named(session: gl.Session) -> None:
    compared = session.compare_compiled(model, args=(X,), backend=faulty_by_two_steps)
    assert compared.switches == {"epilogue_fusion": False, "split_cat_fx_passes": False}
    assert "epilogue_fusion = False, together but not one alone, the compiled result is right" in compared.text


def test_code_that_computes_something_else_while_it_is_captured_is_reported(session: gl.Session) -> None:
    def asks(x: Tensor) -> Tensor:
        return gl.tap("out", x.cos() if torch.compiler.is_compiling() else x.sin())

    compared = session.compare_compiled(asks, args=(X,), backend="eager")
    assert not len(compared.lines)
    assert "The graphs that torch captures give a wrong result even when none of them is compiled" in compared.text


def attend(x: Tensor) -> Tensor:
    """Attention with as many heads as tokens, which a pattern of inductor takes for a different one."""
    q, k, v = gl.tap("x", x * 2).unbind(0)
    q, v = q.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
    turned = k.permute(0, 2, 3, 1)
    shares = (q @ turned).mul(0.35).softmax(-1)
    return gl.tap("out", (shares @ v).cos())


@pytest.mark.soak
@pytest.mark.parametrize("mark", [pytest.param(None, marks=NEEDS_A_COMPILER)])
def test_inductors_mistake_has_its_lines_and_its_switch(mark: None, session: gl.Session) -> None:
    x = torch.randn(3, 2, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    if torch.compile(attend)(x).allclose(attend(x), atol=1e-4):
        pytest.skip("this release of torch compiles it right")
    compared = session.compare_compiled(attend, args=(x,))
    assert compared.switches == {"pattern_matcher": False}
    assert list(miscompiled(compared)) == [
        "turned = k.permute(0, 2, 3, 1)",
        "shares = (q @ turned).mul(0.35).softmax(-1)",
        'return gl.tap("out", (shares @ v).cos())',
    ]
