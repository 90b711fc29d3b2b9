"""``gl.watch``: every module's output is tapped, whatever its structure, and the model can be restored."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from kit.recorder import Recorder
from kit.refusals import exactly
from kit.support import own_value
from torch import nn

import graftlab as gl
from graftlab.taps.compiled_calls import outermost_modules
from graftlab.taps.hooks import is_called_from_python
from graftlab.taps.module_inputs import Argument, ModuleCall, ModuleInputs
from graftlab.taps.watch import weights_of

# ---- models ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    hidden: torch.Tensor
    label: str


@dataclasses.dataclass
class Output:
    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    note: str = "kept"
    history: list[torch.Tensor] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    doubled: Any = dataclasses.field(init=False, default="by itself")


def own(extra: float = 0.0) -> torch.Tensor:
    return torch.full((2,), own_value() + extra)


def model_output() -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(last_hidden_state=own(), hidden_states=(own(1), own(2)))


# Each makes an output, and says which taps its tensors become.
OUTPUTS: dict[str, tuple[Any, list[str]]] = {
    "tensor": (lambda: own(), ["model"]),
    "tuple": (lambda: (own(), "text", own(1), None), ["model[0]", "model[2]"]),
    "list": (lambda: [own(), own(1)], ["model[0]", "model[1]"]),
    "dict": (lambda: {"a": own(), "b": 3, "c": own(1)}, ["model.a", "model.c"]),
    "ordered dict": (lambda: OrderedDict(z=own(), a=own(1)), ["model.z", "model.a"]),
    # By index, as any tuple's, so that it pairs with a plain tuple on the other side.
    "namedtuple": (lambda: Pair(own(), "label"), ["model[0]"]),
    "dataclass": (
        lambda: Output(own(), own(1), history=[own(2)]),
        ["model.hidden", "model.logits", "model.history[0]"],
    ),
    "frozen dataclass": (lambda: Frozen(own()), ["model.hidden"]),
    "ModelOutput": (model_output, ["model.last_hidden_state", "model.hidden_states[0]", "model.hidden_states[1]"]),
    "nested": (
        lambda: (own(), {"cache": [(own(1), own(2))]}),
        ["model[0]", "model[1].cache[0][0]", "model[1].cache[0][1]"],
    ),
    "nothing": (lambda: None, []),
    "the same tensor twice": (lambda: (lambda t: (t, t))(own()), ["model[0]", "model[1]"]),
}


class Module(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self) -> Any:
        self.made = OUTPUTS[self.kind][0]()
        return self.made


def flat(value: Any) -> list[Any]:
    """The tensors' numbers and everything else, in order, without the containers."""
    if isinstance(value, torch.Tensor):
        return [value[0].item()]
    if dataclasses.is_dataclass(value) and not hasattr(value, "items"):
        return flat([getattr(value, field.name) for field in dataclasses.fields(value)])
    if hasattr(value, "items"):
        return flat(list(value.values()))
    if isinstance(value, (tuple, list)):
        return [number for item in value for number in flat(item)]
    return [value]


def watched(kind: str) -> dict[str, Any]:
    holder = nn.ModuleDict({"model": Module(kind)})
    with gl.watch(holder):
        output = holder["model"]()
    made = holder["model"].made
    return {"output": flat(output), "made": flat(made), "type": type(output).__name__, "same": output is made}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.attn(self.norm(x)), None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x, _ = layer(x)
        return {"logits": self.head(x)}


def made_model() -> Model:
    torch.manual_seed(0 if gl.here() is None or gl.here().side == "baseline" else 1)
    return Model()


def forward(prefix: str = "", include: Any = None, exclude: Any = None) -> dict[str, torch.Tensor]:
    model = made_model()
    with gl.watch(model, prefix, include, exclude):
        return model(torch.ones(1, 4))


ALL = [
    *("layers.0.norm", "layers.0.attn", "layers.0[0]"),
    *("layers.1.norm", "layers.1.attn", "layers.1[0]"),
    *("head", "output.logits"),
]


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_every_modules_output_is_tapped_in_execution_order_under_its_name(session: gl.Session) -> None:
    frame = session.run(forward, forward).frame
    assert frame["name"].tolist() == ALL
    assert set(frame["status"]) == {"compared"}


@pytest.mark.ranks
def test_prefix_and_name_of_the_root_module(session: gl.Session) -> None:
    frame = session.run(forward, forward, args=("encoder.",)).frame
    assert frame["name"].tolist() == [f"encoder.{name}" for name in ALL]


@pytest.mark.ranks
@pytest.mark.parametrize("kind", OUTPUTS)
def test_tensors_inside_outputs_are_named_and_replaced_where_they_are(kind: str, session: gl.Session) -> None:
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    _, names = OUTPUTS[kind]
    compared = session.run(watched, watched, args=(kind,))
    assert compared.frame["name"].tolist() == names
    # What is only compared passes through as the very object that the module returned.
    assert compared.baseline[0]["same"]
    assert compared.target[0]["same"]

    session.edit(b2t="True")
    run = session.run(watched, watched, args=(kind,))

    assert run.frame["status"].tolist() == ["grafted"] * len(names)
    source, result = run.baseline[0], run.target[0]
    assert result["output"] == source["output"]
    # Replaced, not written into.
    assert result["made"] == compared.target[0]["made"]
    assert result["type"] == source["type"]
    assert result["same"] == (not names)
    assert source["same"]


@pytest.mark.ranks
def test_grafting_one_tensor_of_several_leaves_the_others_the_same_objects(session: gl.Session) -> None:
    def identities() -> list[bool]:
        module = Module("dataclass")
        with gl.watch(module, prefix="m."):
            output = module()
        made = module.made
        return [
            output.hidden is made.hidden,
            output.logits is made.logits,
            output.history is made.history,
            output.note == made.note,
        ]

    session.edit(b2t="name == 'm.output.logits'")
    assert session.run(identities, identities).target == [[True, False, True, True]]


@pytest.mark.ranks
def test_a_graft_flows_into_the_modules_that_follow(session: gl.Session) -> None:
    session.edit(b2t="name == 'layers.1[0]' or name == 'head'")
    run = session.run(forward, forward)
    assert run.target[0]["logits"].equal(run.baseline[0]["logits"])
    rows = run.frame.set_index("name")
    assert rows.loc["layers.0[0]", "rel_l2"] > 1e-3
    assert rows.loc["head", "rel_l2"] > 1e-3
    assert rows.loc["output.logits", "max_abs"] == 0.0


class PeftModel(nn.Module):
    """Named and built as PEFT's: the model is two levels down."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = BaseTuner(model)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base_model(x)


class BaseTuner(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)


def checkpointed(model: Model) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.layers[1] = checkpoint_wrapper(model.layers[1])
    return model


WRAPPERS = {
    "not": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "a subclass": type("OwnParallel", (nn.DataParallel,), {}),
    "PEFT": PeftModel,
    "checkpointed": checkpointed,
    "several": lambda model: nn.DataParallel(PeftModel(checkpointed(model))),
}


@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=[pytest.mark.slow] if name == "compiled" else []) for name in WRAPPERS]
)
def test_a_wrapped_model_has_the_names_of_the_model(wrapper: str) -> None:
    names = gl.watch(made_model()).names
    with gl.watch(WRAPPERS[wrapper](made_model())) as handle:
        assert sorted(handle.names) == sorted(names)
    # Filters on the type see what is wrapped.
    assert gl.watch(WRAPPERS[wrapper](made_model()), include="type == 'Block'").names == ["layers.0", "layers.1"]


@pytest.mark.ranks
def test_wrapped_module_is_one_tap_and_pairs_with_an_unwrapped_one(session: gl.Session) -> None:
    def plain() -> None:
        model = made_model()
        with gl.watch(model):
            model(torch.ones(1, 4))

    def wrapped() -> None:
        model = nn.DataParallel(PeftModel(made_model()))
        with gl.watch(model):
            model(torch.ones(1, 4))

    frame = session.run(plain, wrapped).frame
    assert frame["name"].tolist() == ALL
    assert set(frame["status"]) == {"compared"}


def test_a_module_that_people_call_like_a_wrappers_keeps_its_name() -> None:
    holder = nn.ModuleDict({"module": nn.ModuleDict({"model": nn.Linear(2, 2)})})
    assert gl.watch(holder).names == ["output", "module", "module.model"]


# ---- which modules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("search('attn', name)", None, ["layers.0.attn", "layers.1.attn"]),
        ("type == 'Linear'", "search('^layers', name)", ["head"]),
        (None, "search('layers', name) or type == 'Model'", ["head"]),
        (lambda name: name.endswith("norm"), None, ["layers.0.norm", "layers.1.norm"]),
        (None, lambda name: name != "output", ["output"]),
        ("", None, []),
    ],
    ids=["filter", "both", "exclude", "function", "excluding function", "blank"],
)
def test_include_and_exclude_choose_modules(include: Any, exclude: Any, expected: list[str]) -> None:
    assert gl.watch(made_model(), include=include, exclude=exclude).names == expected


def test_weights_are_found_with_their_buffers_and_types() -> None:
    class FSDPModule:
        """What torch adds to the classes of sharded modules."""

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def names(wanted: str = "", **more: Any) -> list[str]:
        return list(weights_of(model, "m.", lambda name, kind: wanted in (name, kind, ""), lambda *_: False, **more))

    weights = ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]
    assert names(buffers=False) == weights
    assert names() == [*weights, "m.1.running_mean", "m.1.running_var", "m.1.num_batches_tracked"]
    assert names("Linear") == weights[:2]
    model[0].__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    assert names("Linear") == weights[:2]
    model[1].__class__ = type("Own", (nn.BatchNorm1d,), {})
    assert names("Own", buffers=False) == weights[2:]


def test_the_extras_of_a_watched_module_are_those_of_its_call(recorder: Recorder) -> None:
    seen: list[Any] = []
    recorder.tap = lambda name, value, extras, tags, replace=False: seen.append((name, extras)) or value  # type: ignore[method-assign]
    model = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.ones(3)
    with gl.watch(model, include="name == '0'", extras=lambda module, args, output: {"given": args[0] is x}):
        # The module returns its input, and no graft has replaced it.
        assert model(x) is x
    assert seen == [("0", {"given": True})]


@pytest.mark.ranks
def test_only_chosen_modules_are_tapped(session: gl.Session) -> None:
    frame = session.run(forward, forward, args=("", "type == 'Linear'", "name == 'head'")).frame
    assert frame["name"].tolist() == ["layers.0.attn", "layers.1.attn"]


def test_unwatchable_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=exactly("gl.watch taps a torch.nn.Module, not function")):
        gl.watch(lambda x: x)
    monkeypatch.setattr("graftlab.taps.calls._handler", object())
    model = made_model()
    before = hooks_of(model)
    with pytest.raises(gl.FilterError):
        gl.watch(model, include="name ==")
    with pytest.raises(ZeroDivisionError):
        gl.watch(model, include=lambda name: name != "head" or 1 / 0)
    assert hooks_of(model) == before


class Inner(nn.Module):
    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * scale + shift,)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.chain = nn.Sequential(nn.Identity())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.inner(x, scale=x[:2].repeat(2), shift=x.double())
        return self.chain(x) + y


def test_inputs_of_a_module_have_its_taps_name_and_their_arguments(recorder: Recorder) -> None:
    model, x = Outer(), torch.ones(4)
    seen: list[tuple[str, Any]] = []
    record = recorder.tap

    def tap(name: str, value: Any, extras: Any, tags: Any, replace: bool = False) -> Any:
        seen.append((name, tags.get("argument")))
        return record(name, value, extras, tags, replace)

    recorder.tap = tap  # type: ignore[method-assign]
    inputs = ModuleInputs(["inner[0]", "chain.0"], ["inner[0]", "chain.0"], {"inner[0]": {"scale": "factor"}})
    with gl.watch(model), inputs:
        model(x)
    assert [each for each in seen if each[0].endswith(".in")] == [
        ("output.in", "first"),
        *(("inner[0].in", "first"), ("inner[0].in", "factor"), ("inner[0].in", "shift")),
        *(("chain.in", "first"), ("chain.0.in", "first")),
    ]
    # The call has its own names of the parameters, and both modules are given one tensor.
    others = (Argument("scale", "float32", 4), Argument("shift", "float64", 4))
    assert inputs.calls["inner[0]"] == ModuleCall("inner", ("output",), "forward", True, 1, others)
    assert inputs.calls["chain.0"] == ModuleCall("chain.0", ("chain", "output"), "forward", False, 1)
    seen.clear()
    model(x)
    assert seen == []


def test_inputs_are_called_after_the_output_itself_where_it_is_known(recorder: Recorder) -> None:
    model = Outer()
    with gl.watch(model), ModuleInputs(["inner"], ["inner[0]", "inner"]) as inputs:
        model(torch.ones(4))
    assert [*inputs.calls] == ["output", "inner"]


def test_the_outermost_modules_of_a_function_are_those_that_no_module_calls() -> None:
    hooks = torch.nn.modules.module
    before = [dict(each) for each in (hooks._global_forward_pre_hooks, hooks._global_forward_hooks)]
    model, other = Outer(), nn.Identity()

    def twice(x: torch.Tensor, fails: bool = False) -> torch.Tensor:
        x = other(model(model(x)))
        assert not fails
        return x

    assert outermost_modules(twice, (torch.ones(4),), {}) == [model, other]
    with pytest.raises(AssertionError):
        outermost_modules(twice, (torch.ones(4),), {"fails": True})
    with pytest.raises(RuntimeError):
        outermost_modules(twice, (torch.ones(3),), {})
    # A call that raised is over.
    assert outermost_modules(twice, (torch.ones(4),), {}) == [model, other]
    assert [dict(each) for each in (hooks._global_forward_pre_hooks, hooks._global_forward_hooks)] == before


def test_python_calls_a_module_of_torchscript_and_none_inside_it() -> None:
    script, plain = torch.jit.ScriptModule(), nn.Identity()
    assert is_called_from_python("", {"": script})
    assert not is_called_from_python("a", {"": script, "a": plain})
    assert not is_called_from_python("a.b", {"": plain, "a": script, "a.b": plain})
    assert is_called_from_python("a.b", {"": plain, "a": plain, "a.b": script})


# ---- and back -------------------------------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> list[dict[str, Any]]:
    """Everything that each module holds, the dicts of hooks among it, as values."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]


def test_no_hook_is_installed_outside_a_session() -> None:
    model = made_model()
    before = hooks_of(model)
    with gl.watch(model, exclude="name == 'head'") as watched:
        assert hooks_of(model) == before
        assert watched.names
        assert "head" not in watched.names
    with pytest.raises(gl.FilterError):
        gl.watch(model, include="name ==")


def test_remove_restores_the_model_exactly_and_leaves_other_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.taps.calls._handler", object())
    model = made_model()
    mine = model.head.register_forward_hook(lambda module, args, output: None)
    before = hooks_of(model)

    handle = gl.watch(model)
    assert hooks_of(model) != before
    assert len(handle.names) == len(list(model.modules()))
    assert repr(handle) == f"<graftlab.Watch of {len(handle.names)} taps>"
    handle.remove()
    assert hooks_of(model) == before
    assert repr(handle) == "<graftlab.Watch of 0 taps>"
    handle.remove()  # twice does no harm

    with gl.watch(model):
        pass
    assert hooks_of(model) == before
    mine.remove()


@pytest.mark.ranks
def test_after_remove_nothing_is_tapped(session: gl.Session) -> None:
    def twice() -> None:
        model = made_model()
        with gl.watch(model):
            model(torch.ones(1, 4))
        model(torch.ones(1, 4))

    assert session.run(twice, twice).frame["name"].tolist() == ALL


@pytest.mark.ranks
def test_watches_nest_and_are_removed_in_any_order(session: gl.Session) -> None:
    def nested() -> None:
        model = made_model()
        outer = gl.watch(model, prefix="outer.", include="name == 'outer.head'")
        inner = gl.watch(model.layers[1], prefix="block.", include="name == 'block.attn'")
        for handle in (outer, inner):
            model(torch.ones(1, 4))
            handle.remove()
        model(torch.ones(1, 4))

    frame = session.run(nested, nested).frame
    assert frame["name"].tolist() == ["block.attn", "outer.head", "block.attn"]
    assert frame["occurrence"].tolist() == [0, 0, 1]


@pytest.mark.ranks
def test_ambient_tags_reach_watched_taps(session: gl.Session) -> None:
    def tagged() -> None:
        model = made_model()
        with gl.watch(model, include="name == 'head'"), gl.tags(phase="decode"):
            model(torch.ones(1, 4))

    session.edit(compare="phase == 'decode'")
    assert session.run(tagged, tagged).frame["name"].tolist() == ["head"]


@pytest.mark.ranks
def test_a_module_that_is_called_twice_taps_two_occurrences(session: gl.Session) -> None:
    def shared() -> None:
        layer = nn.Linear(2, 2)
        with gl.watch(nn.ModuleDict({"shared": layer})):
            layer(layer(torch.ones(1, 2)))

    frame = session.run(shared, shared).frame
    assert frame["name"].tolist() == ["shared", "shared"]
    assert frame["occurrence"].tolist() == [0, 1]


@pytest.mark.ranks
def test_a_compiled_model_is_watched_too(session: gl.Session) -> None:
    def compiled() -> torch.Tensor:
        model = made_model()
        with gl.watch(model, include="name == 'head'"):
            return torch.compile(model, backend="eager")(torch.ones(1, 4))["logits"]

    session.edit(b2t="True")
    run = session.run(compiled, compiled)
    assert run.frame["status"].tolist() == ["grafted"]
    assert run.target[0].equal(run.baseline[0])


@pytest.mark.ranks
def test_a_child_that_is_called_like_the_root_is_tapped_as_well(session: gl.Session) -> None:
    def collide() -> list[str]:
        model = nn.Sequential(OrderedDict(output=nn.Linear(2, 2)))
        with gl.watch(model) as handle:
            model(torch.ones(1, 2))
        return handle.names

    run = session.run(collide, collide)
    assert run.target == [["output", "output"]]
    assert run.frame[["name", "occurrence"]].values.tolist() == [["output", 0], ["output", 1]]
