"""Taps at the operations inside a module: their names, what they leave out, and what a graft does there."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.recorder import Recorder
from kit.support import not_on, run_cell
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.config import GraftConfig
from graftlab.jobs.on_import import watch_first_model
from graftlab.taps import inside, operation_names
from graftlab.taps.watch import kinds_of_watched


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotated(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * cos + rotate_half(q), k * cos + rotate_half(k)


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(scale + 1e-6)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.scale = Norm(), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k = self.q_proj(x).view(1, -1, 2, 4).transpose(1, 2), self.k_proj(x).view(1, -1, 2, 4).transpose(1, 2)
        q_rot, k_rot = rotated(q, k, torch.full((4,), 0.5))
        scores = q_rot @ k_rot.mT * self.scale
        scores = scores + 1.0
        scores = functional.softmax(scores, dim=-1)
        return (scores @ q).transpose(1, 2).reshape(1, -1, 8)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder()


X = torch.linspace(-1, 1, 24).reshape(1, 3, 8)


def line_of(text: str) -> str:
    """The line of this file with this text, as a tap's name has it."""
    with open(__file__, encoding="utf-8") as file:
        return next(f"L{number}" for number, line in enumerate(file, 1) if text in line)


def names_of(recorder: Recorder, module: nn.Module, *inputs: torch.Tensor, **watching: Any) -> list[str]:
    """The taps inside one module of a test's own."""
    recorder.shown.clear()
    with gl.watch(module, include="False", inside="name == 'output'", **watching):
        module(*inputs)
    return recorder.names


class Calls(nn.Module):
    """A module that computes what a test gives it."""

    def __init__(self, function: Callable[..., Any], **inner: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in inner.items():
            setattr(self, name, module)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


# ---- names ----------------------------------------------------------------------------------------------------------


def test_names_are_variables_or_else_lines(model: Decoder, recorder: Recorder) -> None:
    with gl.watch(model, include="False", inside="name == 'layers.1'"):
        model(X)
    half, rope, end = line_of("return torch.cat"), line_of("return q * cos"), line_of("return (scores @ q)")
    turned = ["rotate_half.first", "rotate_half.second", f"rotate_half.{half}.neg", f"rotate_half.{half}.cat"]
    assert [name.removeprefix("layers.1.") for name in recorder.names] == [
        *("q", "k", f"{line_of('torch.full')}.full"),
        *(f"rotated.{rope}.mul", *turned, "q_rot", f"rotated.{rope}.mul.2nd", *turned, "k_rot"),
        *(f"{line_of('scores = q_rot')}.matmul", "scores", "scores.2nd", "scores.3rd"),
        *(f"{end}.matmul", f"{end}.reshape"),
    ]
    assert {each.partition(".")[0] for each in recorder.names} == {"layers"}
    assert recorder.tags["layers.1.q_rot"] == {}
    assert recorder.tags[f"layers.1.{end}.matmul"] == {"file": "test_inside.py"}
    kinds = kinds_of_watched()
    assert (kinds["layers.1.q_rot"], kinds["layers.1.scores.3rd"]) == ("add", "softmax")


def test_a_forward_that_was_wrapped_has_the_names_of_the_one_inside(recorder: Recorder) -> None:
    norm = Norm()
    with gl.watch(norm, include="False", inside="True"):
        norm(X)
    names, recorder.shown = recorder.names, []
    # As libraries do that add something to each call.
    norm.forward = functools.partial(Norm.forward, norm)  # type: ignore[method-assign]
    with gl.watch(norm, include="False", inside="True"):
        norm(X)
    assert recorder.names == names
    assert "scale" in names


def test_a_tap_shows_the_value_that_the_variable_has(model: Decoder, recorder: Recorder) -> None:
    with gl.watch(model, include="False", inside="name == 'layers.0'"):
        model(X)
    shown = dict(recorder.shown)
    layer = model.layers[0]
    x = layer.norm(X)
    q, k = (each(x).view(1, -1, 2, 4).transpose(1, 2) for each in (layer.q_proj, layer.k_proj))
    q_rot, k_rot = rotated(q, k, torch.full((4,), 0.5))
    assert torch.equal(shown["layers.0.q_rot"], q_rot)
    assert torch.equal(shown["layers.0.scores.3rd"], functional.softmax(q_rot @ k_rot.mT * 0.5 + 1.0, dim=-1))


def test_submodules_are_inside_only_if_they_are_chosen(model: Decoder, recorder: Recorder) -> None:
    with gl.watch(model, prefix="m.", include="False", inside="type in ('Decoder', 'Norm')"):
        model(X)
    power, end = (f"{line_of(text)}." for text in ("scale = x.pow", "torch.rsqrt"))
    norm = [f"{power}pow", "scale", f"{end}add", f"{end}rsqrt", f"{end}mul"]
    layers = ([f"m.layers.{layer}.norm.{name}" for name in norm] for layer in range(2))
    assert recorder.names == [*next(layers), "m.x", *next(layers), "m.x"]


def test_a_submodules_name_is_not_given_to_a_variable(recorder: Recorder) -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        output = inner = module.inner(x) * 2
        inner = output + 1
        return inner

    module = Calls(function, inner=nn.Identity())
    assert names_of(recorder, module, X) == ["function.output", "function.inner.2nd"]

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.inner(x) * 2
            return inner

    name = line_of("inner = self.inner(x) * 2")
    assert names_of(recorder, Own(), X) == [f"inner.{name}"]


def test_what_is_assigned_in_other_ways_has_plain_names_too(recorder: Recorder) -> None:
    def pair(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x + 2

    def indirect(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return pair(x)

    def function(module: Any, x: torch.Tensor) -> Any:
        module.kept = x * 2
        (low, high), top = pair(x), x.max(-1)
        a, b = indirect(x)
        both = pair(x)
        x += 1
        if (y := x * 3) is not None:
            typed: torch.Tensor = y - 1
        chosen = typed.exp() if len(x) else typed
        picked = typed if x.any() else chosen
        many = [each * 2 for each in (x, x)]
        largest, where = chosen.max(-1)
        return [low, high, top, a, b, both, picked, many, largest, where]

    names = names_of(recorder, Calls(function), X.clone())
    comprehension, nested = line_of("each * 2 for each"), line_of("(low, high), top")
    returned = line_of("return x + 1, x + 2")
    # What Python 3.10 runs of a line cannot be found by its instruction there.
    sum_in_place = "x" if sys.version_info >= (3, 11) else f"{line_of('x += 1')}.add_"
    function_names = [
        *("kept", f"pair.{returned}.add", f"pair.{returned}.add.2nd"),
        *(f"{nested}.max[0]", f"{nested}.max[1]"),
        *("a", "b", "both[0]", "both[1]", sum_in_place, "y", "typed", "chosen"),
        # A condition is not what its choice is.
        f"{line_of('picked = typed')}.any",
        *([f"{comprehension}.mul"] * 2),
        *("largest", "where"),
    ]
    assert names == [name if name.startswith("pair") else f"function.{name}" for name in function_names]


def test_what_is_summed_over_ranks_is_left_out_until_it_is_summed(recorder: Recorder) -> None:
    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_from_region(x: torch.Tensor) -> torch.Tensor:
        return x

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        part = before @ x.mT
        other = doubled(x)
        third = before * 3
        fourth = before * 4
        all_reduce(part)
        all_reduce(other)
        reduce_scatter(third)
        reduce_from_region(fourth)
        whole = all_reduce(before @ x.mT) + part
        return whole

    assert names_of(recorder, Calls(function), X) == ["function.before", "function.whole"]


def test_a_decorated_forward_has_the_names_of_a_plain_one(recorder: Recorder) -> None:
    class Decorated(nn.Module):
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            tripled = doubled + x
            return tripled

    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled = x * 2
            tripled = doubled + x
            return tripled

    assert names_of(recorder, Decorated(), X) == names_of(recorder, Plain(), X) == ["doubled", "tripled"]


def test_code_of_a_notebook_cell_has_names(recorder: Recorder) -> None:
    cell = run_cell(
        """
        import torch
        class Cell(torch.nn.Module):
            def forward(self, x):
                doubled = x * 2
                return doubled + 1
        """
    )
    assert names_of(recorder, cell["Cell"](), X) == ["doubled", "L5.add"]


def test_code_without_a_source_has_its_lines(recorder: Recorder) -> None:
    namespace: dict[str, Any] = {"nn": nn}
    exec(
        compile("class Lost(nn.Module):\n  def forward(self, x):\n    y = x * 2\n    return y + 1", "lost.py", "exec"),
        namespace,
    )
    assert names_of(recorder, namespace["Lost"](), X) == ["L3.mul", "L4.add"]


def test_an_installed_helper_is_passed_over_for_the_line_that_calls_it(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "split_heads.py").write_text("def split(x):\n    y = x * 1\n    return y + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    split = importlib.import_module("split_heads").split

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = split(x)
            return heads.exp()

    line, end = line_of("heads = split(x)"), line_of("return heads.exp()")
    assert names_of(recorder, Model(), X) == [f"{line}.mul", f"{line}.add", f"{end}.exp"]

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        return x

    class Summed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return all_reduce(split(x) * 3)

    # What it computes on the way is no part of a sum over ranks.
    line = line_of("return all_reduce(split(x) * 3)")
    assert names_of(recorder, Summed(), X) == [f"{line}.mul", f"{line}.add"]


def test_a_single_number_is_a_tap_and_what_is_no_tensor_is_none(recorder: Recorder) -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.sum()
        size = x.size()
        both, _ = functional.multi_head_attention_forward(
            *(x[0][:, None],) * 3,
            *(8, 2, torch.ones(24, 8), None, None, None, False, 0.0, torch.eye(8), None),
            need_weights=False,
        )
        return total * size[0] + both.sum()

    names = names_of(recorder, Calls(function), X)
    assert names[0] == "function.total"
    assert "function.both" in names
    assert "function.size" not in names


def test_the_second_and_later_operations_of_a_line_are_numbered_in_words() -> None:
    same = ast.parse("; ".join(["f()"] * 112)).body
    endings = {number: operation_names._numbered([*same], same[number - 1]) for number in (1, 2, 3, 4, 11, 12, 13, 22)}
    assert [*endings.values()] == ["", ".2nd", ".3rd", ".4th", ".11th", ".12th", ".13th", ".22nd"]
    assert operation_names._numbered([*same], same[110]) == ".111th"
    assert operation_names._numbered(same[::-1], same[20]) == ".21st"
    # Operands are computed before the call that is written first.
    outer = ast.parse("f(f(x))").body[0].value  # type: ignore[attr-defined]
    calls = [outer, outer.args[0]]
    assert [operation_names._numbered([*calls], each) for each in calls] == [".2nd", ""]


def test_other_modes_are_no_code_of_the_model(recorder: Recorder) -> None:
    class Passing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        with Passing(), torch.device("cpu"):
            doubled = x * 2
        return doubled

    assert names_of(recorder, Calls(function), X, functions=["mul"]) == ["mul.in[0]", "mul.out", "function.doubled"]


# ---- grafts ---------------------------------------------------------------------------------------------------------


def test_a_graft_replaces_the_value_for_what_follows(model: Decoder, recorder: Recorder) -> None:
    recorder.grafts["layers.0.scores.3rd"] = torch.zeros_like
    with gl.watch(model, include="name == 'layers.0'", inside="name == 'layers.0'"):
        model(X)
    assert dict(recorder.shown)["layers.0"].abs().max() == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_write_into_a_view_that_a_graft_replaced_reaches_its_memory(recorder: Recorder, mode: Any) -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first, rest = x[..., :4], x[..., 4:]
        inner = first[..., :2]
        inner.mul_(0)
        rest[..., 1:] = 7
        return x

    with mode():
        plain = Calls(function)(X)
        for name in ("function.first", "function.inner", "function.rest"):
            recorder.grafts[name] = torch.clone
        module = Calls(function)
        with gl.watch(module, include="False", inside="True"):
            assert torch.equal(module(X), plain)
    assert recorder.names[:4] == [f"function.{each}" for each in ("x", "first", "rest", "inner")]


def test_a_write_in_place_is_grafted_in_place(recorder: Recorder) -> None:
    def function(module: Any, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 1] = 5
        cache.add_(1)
        torch.mul(cache, 2, out=cache)
        return functional.relu(cache, inplace=True)

    module, cache = Calls(function), torch.zeros(2, 3)
    names = [
        f"function.{line_of(text)}.{operation}"
        for text, operation in (
            ("cache[:, 1] = 5", "setitem"),
            ("cache.add_(1)", "add_"),
            ("torch.mul(cache, 2, out", "mul"),
            ("functional.relu(cache, in", "relu"),
        )
    ]
    recorder.grafts[names[0]] = lambda value: torch.full_like(value, 9)
    recorder.grafts[names[2]] = lambda value: value + 1
    assert names_of(recorder, module, cache) == names
    assert recorder.shown[0][1].shape == (2,)
    assert cache.tolist() == [[3, 21, 3], [3, 21, 3]]


def test_gradients_are_tapped_and_flow_through_a_graft(model: Decoder, recorder: Recorder) -> None:
    recorder.grafts["layers.0.scores.2nd"] = lambda value: value * 0
    x = X.clone().requires_grad_()
    with gl.watch(model, include="False", inside="name == 'layers.0'", grads=True):
        model(x).sum().backward()
    backward = [name for name in recorder.names if name.endswith(" grad")]
    assert backward.index("layers.0.scores.3rd grad") < backward.index("layers.0.scores.2nd grad")
    assert backward.index("layers.0.scores.2nd grad") < backward.index("layers.0.q_rot grad")
    # Through the graft to what made the scores.
    assert model.layers[0].k_proj.weight.grad.abs().max() > 0


# ---- checkpoints, compiled code, errors, copies ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_operations_are_tapped_again_when_a_checkpoint_repeats_them(
    model: Decoder, recorder: Recorder, reentrant: bool
) -> None:
    x = X.clone().requires_grad_()
    with gl.watch(model, include="False", inside="name == 'layers.0'"):
        checkpoint(model.layers[0], x, use_reentrant=reentrant).sum().backward()
    assert recorder.names.count("layers.0.scores.2nd") == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_a_module_is_left_out_with_a_warning(recorder: Recorder, reentrant: bool) -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = x * 2
        return checkpoint(lambda y: (y * 3).exp(), before, use_reentrant=reentrant)

    module = nn.ModuleDict({f"inner{reentrant}": Calls(function)})
    with (
        gl.watch(module, include="False", inside="search('inner', name)"),
        pytest.warns(gl.GraftWarning, match=f"inner{reentrant} begins an activation checkpoint") as warned,
    ):
        module[f"inner{reentrant}"](X.clone().requires_grad_()).sum().backward()
    # For both of its operations.
    assert len(warned) == 1
    assert recorder.names == [f"inner{reentrant}.function.before"]


def test_a_forward_that_raises_leaves_nothing_tapped(recorder: Recorder) -> None:
    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        if module.training:
            raise RuntimeError("in the forward")
        y = x * 2
        return y

    module = Calls(function)
    with gl.watch(module, include="False", inside="True"):
        with pytest.raises(RuntimeError):
            module(X)
        _ = X * 3
        module.eval()(X)
    assert recorder.names == ["function.y"]


def test_a_watched_model_can_be_copied(model: Decoder, recorder: Recorder) -> None:
    with gl.watch(model, include="False", inside="name == 'layers.0'"):
        copied = copy.deepcopy(model)
        copied(X)
        assert recorder.names.count("layers.0.q_rot") == 1


def test_outside_a_session_no_hook_is_installed(model: Decoder) -> None:
    with gl.watch(model, inside="True"):
        assert not any(each._forward_hooks for each in model.modules())


@pytest.mark.slow
@not_on("2.9", "takes one hook of a module for another in compiled code")
def test_compiled_code_shows_module_outputs_alone_and_warns(model: Decoder, recorder: Recorder) -> None:
    with gl.watch(model, include="name == 'layers.0'", inside="name == 'layers.0'"):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with pytest.warns(gl.GraftWarning, match="run it without torch.compile"):
            result = compiled(X)
        assert recorder.names == ["layers.0"]
        assert torch.equal(result, model(X))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_inside_a_module_are_left_out_with_a_warning(recorder: Recorder, backend: str) -> None:
    inner = torch.compile(lambda x: (x * 2).exp(), backend=backend, fullgraph=True)

    def function(module: Any, x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        after = inner(before) - 1
        return after

    inside._warned.clear()
    module = Calls(function)
    with pytest.warns(gl.GraftWarning, match="calls compiled code"):
        assert names_of(recorder, module, X) == ["function.before", "function.after"]
    assert torch.equal(module(X), ((X + 1) * 2).exp() - 1)


# ---- a model that its script calls ----------------------------------------------------------------------------------


def test_the_first_call_of_a_scripts_model_is_tapped_as_the_next(recorder: Recorder) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            scaled = x * scale
            return functional.softmax(scaled * self.weight, dim=-1)

    watch_first_model(GraftConfig(watch_inside="True", watch_functions="softmax", watch_params=True, watch_inputs=True))
    recorder.grafts["input.scale input"] = lambda value: value * 2
    model, calls_of_model = Model(), []
    for _ in range(2):
        model(X, scale=torch.tensor(1.0))
        calls_of_model.append([name for name in recorder.names if not name.startswith("L")])
        assert torch.equal(dict(recorder.shown)["scaled"], X * 2)
        recorder.shown.clear()
    functions = ["softmax.in[0]", "softmax.out"]
    assert calls_of_model[0] == ["input.x input", "input.scale input", "weight param", "scaled", *functions, "output"]
    assert sorted(calls_of_model[0]) == sorted(calls_of_model[1])


def test_a_function_that_torch_has_not_is_refused_when_the_job_starts() -> None:
    with pytest.raises(gl.ConfigError, match=r"GRAFTLAB_WATCH_FUNCTIONS\) is 'softmax, smax'.* no function 'smax'"):
        watch_first_model(GraftConfig(watch_functions="softmax, smax"))


# ---- on ranks -------------------------------------------------------------------------------------------------------


def decode(fault: float) -> torch.Tensor:
    torch.manual_seed(0)
    model = Decoder()
    if gl.here().side == "target":
        model.layers[1].scale = fault
    with gl.watch(model, inside="type == 'Attention'"):
        return model(X.clone().requires_grad_())


@pytest.mark.ranks
def test_a_verdict_names_the_variable_and_grafts_reach_it_in_both_directions() -> None:
    with gl.launch(1, 1) as session:
        compared = session.run(decode, decode, args=(0.7,))
        for side in ("b2t", "t2b"):
            session.edit(**{"b2t": None, "t2b": None, side: "True"})
            grafted = session.run(decode, decode, args=(0.7,))
            assert torch.equal(grafted.baseline[0], grafted.target[0])
            # What graftlab computes for a graft is no operation of the model.
            assert grafted.frame["name"].tolist() == compared.frame["name"].tolist()
        session.edit(b2t=None, t2b=None)
        verdict = session.verdict(decode, decode, args=(0.7,))
        assert verdict.named == ["layers.*.scores"]
        # No filter can match a tap inside, so that after the first step under it nothing is in the way.
        session.edit(compare="name == 'layers.1'")
        assert session.run(modes, modes).target == [[True, False]]


def modes() -> list[bool]:
    """Whether operations pass through graftlab, in two calls under one plan."""
    seen = []
    inner = Calls(lambda module, x: seen.append(len(torch.overrides._get_current_function_mode_stack()) > 0))
    with gl.watch(nn.ModuleDict({"inner": inner}), include="False", inside="name == 'inner'"):
        inner(X)
        inner(X)
    return seen
