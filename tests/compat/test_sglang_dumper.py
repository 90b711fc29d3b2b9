"""Calls of SGLang's dumper are taps, by its own names and variables; its dumps can be a side."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.job_scripts import end, start
from kit.refusals import exactly
from kit.support import wait_until

import graftlab as gl
from graftlab.compat import sglang_dumper
from graftlab.compat.imports import replace_imports
from graftlab.compat.module_taps import watch_modules
from graftlab.compat.sglang_dumper import Dumper
from graftlab.grafting import active
from graftlab.taps.watch import ROOT


def recorded(folder: Path, show: Any) -> list[dict[str, Any]]:
    with gl.record(folder):
        show(Dumper())
    frame = gl.Recording(folder).frame
    return [
        {name: value for name, value in row.items() if name not in ("rank", "dtype", "shape") and value == value}
        for row in frame.to_dict("records")
    ]


def test_values_come_with_their_tags_and_the_context_and_steps(tmp_path: Path) -> None:
    def show(dumper: Dumper) -> None:
        dumper.set_ctx(phase="decode", layer_id=3)
        # The context goes before a call's own tags.
        dumper.dump("hidden", torch.ones(2), save=False, kind_of="mlp", layer_id=1)
        dumper.configure(enable_model_value=True)
        dumper.dump_model(torch.nn.Linear(1, 1, bias=False), layer_id=1)
        dumper.step()
        dumper.set_ctx(layer_id=None)
        dumper.dump_dict("batch", {"ids": torch.arange(3), "note": "text"})

    with pytest.warns(gl.GraftWarning, match="batch_note"):
        found = recorded(tmp_path, show)
    assert found == [
        {"step": 0, "name": "hidden", "kind_of": "mlp", "phase": "decode", "layer_id": 3.0},
        {"step": 0, "name": "param__weight", "kind": "param", "phase": "decode", "layer_id": 3.0},
        {"step": 1, "name": "batch_ids", "phase": "decode"},
    ]


def test_dims_are_the_layout_and_extras_arrive(tmp_path: Path) -> None:
    with gl.record(tmp_path):
        Dumper().dump("q", torch.ones(1, 2, 4), dims="b s h", grafter_extras={"phase": "prefill"})
    ((entry, _, extras),) = gl.Recording(tmp_path).taps(0)
    assert entry.layout is not None
    assert entry.layout.text == "b s h"
    assert extras == {"phase": "prefill"}


@pytest.mark.parametrize(("dims_grad", "expected"), [(None, "b s h"), ("b h s", "b h s")])
def test_a_gradient_has_its_own_layout_or_the_values(tmp_path: Path, dims_grad: str | None, expected: str) -> None:
    with gl.record(tmp_path):
        dumper, x = Dumper(), torch.ones(1, 2, 4, requires_grad=True)
        dumper.configure(enable_grad=True)
        dumper.dump("x", x, dims="b s h", dims_grad=dims_grad)
        x.sum().backward()  # type: ignore[no-untyped-call]
    layouts = {entry.tags.get("kind"): entry.layout for entry, _, _ in gl.Recording(tmp_path).taps(0)}
    assert {kind: layout and layout.text for kind, layout in layouts.items()} == {None: "b s h", "grad": expected}


def test_gradients_and_parameters_are_tapped_where_enabled(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)

    def show(dumper: Dumper) -> None:
        dumper.dump_model(model)
        x = torch.ones(2, requires_grad=True)
        dumper.dump("x", x)
        model(x).sum().backward()
        dumper.configure(enable_value=False, enable_grad=True, enable_model_value=True, enable_model_grad=True)
        dumper.dump("x", x)
        model(x).sum().backward()
        dumper.dump_model(model, name_prefix="p", get_grad=lambda parameter: parameter.grad, step=7)

    found = recorded(tmp_path, show)
    assert [(tap["name"], tap.get("kind")) for tap in found] == [
        ("x", None),
        ("x", "grad"),
        ("p__weight", "param"),
        ("p__weight", "param_grad"),
        ("p__bias", "param"),
        ("p__bias", "param_grad"),
    ]


def test_the_decorator_restores_the_tags(tmp_path: Path) -> None:
    def show(dumper: Dumper) -> None:
        dumper.set_ctx(layer_id=7)

        @dumper.ctx(layer_id=1)
        def inner() -> None:
            dumper.dump("inside", torch.ones(1))
            raise ValueError("the function's own")

        with pytest.raises(ValueError, match="own"):
            inner()
        dumper.dump("outside", torch.ones(1))

    assert [(tap["name"], tap["layer_id"]) for tap in recorded(tmp_path, show)] == [("inside", 1), ("outside", 7)]
    for wrong in ({}, {"extractor": dict, "layer_id": 1}):
        with pytest.raises(gl.TagError):
            Dumper().ctx(**wrong)


def test_outside_a_session_the_calls_do_nothing() -> None:
    assert active.grafter() is None
    dumper = Dumper()
    assert not dumper.may_enable
    dumper.dump("x", object())
    dumper.dump_dict("x", object())
    dumper.step()


class Batch:
    """With attributes of every sort."""

    __slots__ = ("_hidden",)

    def __init__(self) -> None:
        self._hidden = torch.zeros(1)

    @property
    def ids(self) -> torch.Tensor:
        return torch.arange(2)

    @property
    def broken(self) -> torch.Tensor:
        raise RuntimeError("not now")

    def method(self) -> None: ...


def test_objects_are_tapped_by_their_readable_attributes(tmp_path: Path) -> None:
    found = recorded(tmp_path, lambda dumper: dumper.dump_dict("batch", Batch()))
    assert [tap["name"] for tap in found] == ["batch__hidden", "batch_ids"]


def test_while_disabled_nothing_is_tapped_and_no_step_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def show(dumper: Dumper) -> None:
        for number in range(4):
            dumper.configure(enable=number % 2 == 1)
            dumper.dump("x", torch.ones(1), number=number)
            dumper.dump_dict("d", {"x": torch.ones(1)})
            dumper.step()

    found = recorded(tmp_path / "switched", show)
    assert [(tap["step"], tap["name"]) for tap in found] == [(0, "x"), (0, "d_x"), (1, "x"), (1, "d_x")]
    assert [tap["number"] for tap in found[::2]] == [1, 3]
    monkeypatch.setenv("DUMPER_ENABLE", "0")
    with pytest.warns(gl.GraftWarning, match="nothing was recorded"):
        assert recorded(tmp_path / "off", lambda dumper: dumper.dump("x", torch.ones(1))) == []


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor, *, positions: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.mlp(x), None


class SmallModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        x = input_ids.float().unsqueeze(-1).expand(-1, 2)
        for layer in self.layers:
            x, _ = layer(x, positions=positions)
        return {"logits": x}


def _of_modules(dumper: Dumper, model: torch.nn.Module | None = None) -> None:
    model = SmallModel() if model is None else model
    watched = dumper.register_non_intrusive_dumper(model)
    # As engines call it, past the hooks of the model.
    model.forward(torch.arange(3), positions=torch.arange(3))
    dumper.configure(enable=False)
    model(torch.arange(3), positions=torch.arange(3))
    if watched is not None:
        watched.remove()
    assert "forward" not in vars(model)


INSIDE_A_LAYER = [
    *("layers.{}.inputs.0", "layers.{}.inputs.positions"),
    *("layers.{}.mlp.inputs.0", "layers.{}.mlp", "layers.{}[0]"),
]


def test_modules_have_inputs_outputs_and_the_number_of_their_layer(tmp_path: Path) -> None:
    found = recorded(tmp_path, _of_modules)
    inside = [(name.format(layer), layer) for layer in range(2) for name in INSIDE_A_LAYER]
    expected = [("inputs.0", None), ("inputs.positions", None), *inside, ("output.logits", None)]
    assert [(tap["name"], tap.get("layer_id")) for tap in found] == expected


def test_modules_have_the_published_names_where_imports_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTLAB_COMPAT", "sglang")
    names = [tap["name"] for tap in recorded(tmp_path, _of_modules)]
    assert names[:7] == [
        *("non_intrusive__inputs.0", "positions"),
        *("non_intrusive__layers.0.inputs.0", "positions"),
        *("non_intrusive__layers.0.mlp.inputs.0", "non_intrusive__layers.0.mlp.output"),
        "non_intrusive__layers.0.output",
    ]
    assert names[-1] == "non_intrusive__output.logits"


class Several(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        return x, None, [x], x


def test_the_published_names_number_the_tensors_of_a_result_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFTLAB_COMPAT", "sglang")

    def show(dumper: Dumper) -> None:
        model = torch.nn.Sequential(Several())
        dumper.register_non_intrusive_dumper(model)
        model[0](torch.ones(1))

    assert [tap["name"] for tap in recorded(tmp_path, show)] == [
        *("non_intrusive__0.inputs.0", "non_intrusive__0.output.0"),
        *("non_intrusive__0.output.2.0", "non_intrusive__0.output.1"),
    ]


class Doubling:
    """In place of a dumper: every tap replaces its tensor by the double."""

    is_on = True

    def __init__(self) -> None:
        self.context: dict[str, Any] = {}
        self.seen: list[str] = []

    def show(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(name)
        return value * 2

    def set_ctx(self, **tags: Any) -> None:
        self.context.update(tags)


def test_a_model_continues_with_what_the_taps_of_its_modules_return(tmp_path: Path) -> None:
    model, doubling = torch.nn.Sequential(torch.nn.Identity()), Doubling()

    def show(_: Dumper) -> None:
        watched = watch_modules(doubling, model, core_only=False)
        results = [model(torch.ones(1)).item(), model.forward(torch.ones(1)).item()]
        watched.remove()
        assert (results, model(torch.ones(1)).item()) == ([16, 16], 1)

    with pytest.warns(gl.GraftWarning, match="nothing was recorded"):
        recorded(tmp_path, show)
    assert doubling.seen == ["inputs.0", "0.inputs.0", "0", ROOT] * 2


def test_a_reset_removes_the_taps_of_watched_models(tmp_path: Path) -> None:
    def show(dumper: Dumper) -> None:
        model = torch.nn.Sequential(torch.nn.Identity())
        dumper.register_non_intrusive_dumper(model)
        model(torch.ones(1))
        dumper.reset()
        model(torch.ones(1))

    assert len(recorded(tmp_path, show)) == 4


@pytest.mark.parametrize(("mode", "expected"), [("core", ["positions"] * 3), ("off", [])])
def test_the_mode_chooses_among_the_taps_of_modules(tmp_path: Path, mode: str, expected: list[str]) -> None:
    def show(dumper: Dumper) -> None:
        dumper.configure(non_intrusive_mode=mode)
        dumper.dump("x", torch.ones(1))
        _of_modules(dumper)

    assert [tap["name"] for tap in recorded(tmp_path, show)] == ["x", *expected]
    with pytest.raises(
        gl.ConfigError,
        match=exactly("non_intrusive_mode (DUMPER_NON_INTRUSIVE_MODE) is 'some'; it takes all, core or off"),
    ):
        Dumper().configure(non_intrusive_mode="some")


def test_the_number_of_a_layer_is_its_own_and_ends_with_it(tmp_path: Path) -> None:
    def show(dumper: Dumper) -> None:
        model = SmallModel()
        model.layers[0].layer_id = 4  # type: ignore[assignment]
        model.layers[1].layer_number = 6  # type: ignore[assignment]
        dumper.register_non_intrusive_dumper(model)
        with pytest.raises(RuntimeError):
            model.layers[0](torch.ones(3), positions=None)
        dumper.dump("between", torch.ones(1))
        model(torch.arange(3), torch.arange(3))
        dumper.reset()

    found = [(tap["name"], tap.get("layer_id")) for tap in recorded(tmp_path, show)]
    assert ("between", None) in found
    assert {layer for name, layer in found if name.startswith("layers.0")} == {4}
    assert {layer for name, layer in found if name.startswith("layers.1")} == {5}


def test_numbers_of_a_dict_are_tapped_as_tensors(tmp_path: Path) -> None:
    with gl.record(tmp_path):
        Dumper().dump_dict("batch", {"count": 3, "scale": 0.1, "last": True, "ids": torch.arange(2)})
    taps = {entry.name: tensor for entry, tensor, _ in gl.Recording(tmp_path).taps(0)}
    assert {name: tensor.tolist() for name, tensor in taps.items()} == {
        **{"batch_count": 3, "batch_scale": 0.1, "batch_last": True},
        "batch_ids": [0, 1],
    }
    assert taps["batch_scale"].dtype == torch.float64


def test_a_reset_counts_steps_from_0_again() -> None:
    dumper = Dumper()
    dumper.step()
    dumper.step()
    assert dumper.get_state()["step"] == 2
    dumper.reset()
    assert dumper.get_state()["step"] == 0


def test_tags_are_removed_by_none_or_by_a_reset(tmp_path: Path) -> None:
    def show(dumper: Dumper) -> None:
        dumper.set_ctx(layer_id=7, phase="decode")
        dumper.set_ctx(phase=None)
        dumper.dump("inside", torch.ones(1))
        dumper.reset()
        dumper.dump("outside", torch.ones(1))

    inside, outside = recorded(tmp_path, show)
    assert (inside["layer_id"], "phase" in inside) == (7, False)
    assert "layer_id" not in outside


def test_imports_are_replaced_without_the_kit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_COMPAT", "sglang")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    replace_imports()
    found = importlib.import_module("sglang.srt.debug_utils.dumper")
    assert found.dumper is sglang_dumper.dumper
    with pytest.raises(ImportError):
        importlib.import_module("sglang.srt.server_args")


def test_an_installed_kit_keeps_its_other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "sglang" / "srt" / "debug_utils"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("version = 7\n")
    (package / "dumper.py").write_text("dumper = None\n")
    (package / "text.py").write_text("text = 'theirs'\n")
    monkeypatch.setenv("GRAFTLAB_COMPAT", "sglang")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(str(tmp_path))
    replace_imports()
    assert importlib.import_module("sglang").version == 7
    assert importlib.import_module("sglang.srt.debug_utils.text").text == "theirs"
    assert importlib.import_module("sglang.srt.debug_utils.dumper").dumper is sglang_dumper.dumper


def test_a_module_that_was_imported_before_is_not_replaced_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_COMPAT", "sglang")
    finders = list(sys.meta_path)
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.setitem(sys.modules, "sglang.srt.debug_utils.dumper", sys)
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "sglang.srt.debug_utils.dumper was imported before graftlab, which could not replace it; "
            "import graftlab first"
        ),
    ):
        replace_imports()
    assert not [each for each in finders if type(each).__module__.startswith("graftlab.compat")]


def test_the_published_names_can_be_imported() -> None:
    assert sglang_dumper.GraftTransformInput is gl.GraftTransformInput
    assert sglang_dumper.get_tensor_info(3) == "type=<class 'int'> value=3"
    assert "shape=torch.Size([2, 3]) dtype=torch.bfloat16" in sglang_dumper.get_tensor_info(torch.ones(2, 3).bfloat16())
    assert "min=None" in sglang_dumper.get_tensor_info(torch.ones(0))
    ends = f"x_sample_head={torch.arange(5.0)} x_sample_tail={torch.arange(95.0, 100.0)}"
    assert sglang_dumper.get_tensor_info(torch.arange(100.0)).endswith(f"min=0.0 max=99.0 mean=49.5 {ends}")
    assert sglang_dumper.get_truncated_value((torch.ones(100, 9), "x"))[0].shape == (5, 9)
    # From 200 elements on, as SGLang does.
    assert [sglang_dumper.get_truncated_value(torch.ones(size)).numel() for size in (199, 200)] == [199, 5]


def test_defaults_change_only_the_settings_that_the_environment_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUMPER_ENABLE_GRAD", "1")
    # Another program's variable.
    monkeypatch.setenv("ENABLE_MODEL_GRAD", "0")
    dumper = Dumper()
    dumper.configure_default(enable_grad=False, enable_model_grad=True, non_intrusive_mode="core", grafter_timeout=9)
    assert dumper.get_state() == {
        "config": {
            **{"enable": True, "non_intrusive_mode": "core", "enable_value": True, "enable_grad": True},
            **{"enable_model_value": False, "enable_model_grad": True, "timeout": 9},
        },
        "step": 0,
    }


def test_settings_without_a_meaning_here_are_accepted_and_wrong_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dumper = Dumper()
    dumper.configure(enable=True, dir="/tmp/dumper", cleanup_previous=True)
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "dumper.configure: 'enable_gard' is not a setting; the settings are enable, "
            "non_intrusive_mode, enable_value, enable_grad, enable_model_value, enable_model_grad, "
            "grafter_enable, grafter_role, grafter_b2t_filter, grafter_t2b_filter, grafter_transform_path, "
            "grafter_baseline_world_size, grafter_target_world_size, grafter_group_name, grafter_timeout, "
            "grafter_master_address, grafter_master_port"
        ),
    ):
        dumper.configure(enable_gard=True)
    with pytest.raises(
        gl.ConfigError,
        match=exactly(
            "filter (DUMPER_FILTER) chooses what is dumped to files; graftlab's plan chooses taps: use "
            "GRAFTLAB_COMPARE_FILTER, or session.edit(compare=...)"
        ),
    ):
        dumper.configure(filter="layer_id=[0-3]")
    with pytest.raises(
        gl.ConfigError, match=exactly("role (GRAFTLAB_ROLE) is not given; it takes 'baseline' or 'target'")
    ):
        dumper.configure(grafter_enable=True)
    for setting in ("enable", "enable_grad"):
        with pytest.raises(gl.ConfigError, match=rf"{setting} \(DUMPER_.*\) is 1; it takes True or False"):
            dumper.configure(**{setting: 1})
    with pytest.raises(
        gl.ConfigError,
        match=exactly("dumper.capture_output has no counterpart; session.tensors and gl.record keep tensors"),
    ):
        dumper.capture_output().__enter__()
    monkeypatch.setenv("DUMPER_ENABLE_GRAD", "perhaps")
    with pytest.raises(gl.ConfigError, match=exactly("enable_grad (DUMPER_ENABLE_GRAD) is 'perhaps'; it takes 1 or 0")):
        Dumper()


def test_another_kit_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_COMPAT", "vllm")
    with pytest.raises(gl.ConfigError, match=r"compat \(GRAFTLAB_COMPAT\) is 'vllm'; it takes sglang"):
        replace_imports()


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_engines_with_its_calls_join_by_its_variables_alone(tmp_path: Path) -> None:
    told = {
        "DUMPER_GRAFTER_ENABLE": "1",
        "DUMPER_GRAFTER_B2T_FILTER": "layer_id == 1",
        "DUMPER_GRAFTER_MASTER_ADDRESS": "127.0.0.1",
        "DUMPER_GRAFTER_MASTER_PORT": "23456",
        "DUMPER_GRAFTER_GROUP_NAME": tmp_path.name,
        "DUMPER_GRAFTER_BASELINE_WORLD_SIZE": "1",
        "DUMPER_GRAFTER_TARGET_WORLD_SIZE": "1",
        "GRAFTLAB_COMPAT": "sglang",
        "GRAFTLAB_RUN_DIR": str(tmp_path),
    }
    jobs = [
        start("engine/serve.py", command=("-m", "graftlab", "attach"), DUMPER_GRAFTER_ROLE=role, **told, **more)
        # As in the published example, only the job that receives has a transform.
        for role, more in (
            ("baseline", {}),
            ("target", {"DUMPER_GRAFTER_TRANSFORM_PATH": "graftlab.transforms.by_layout"}),
        )
    ]
    ends = [end(job) for job in jobs]
    assert [(code, out) for code, out, _ in ends] == [(0, "sum 8.0\n")] * 2, ends
    wait_until(lambda: len(gl.load_run(tmp_path)) == 4, "rows")
    frame = gl.load_run(tmp_path)
    assert sorted(zip(frame["step"], frame["layer_id"], frame["status"], strict=True)) == [
        (step, layer, status) for step in range(2) for layer, status in ((0, "compared"), (1, "grafted"))
    ]
    grafted = frame["status"] == "grafted"
    assert set(frame.loc[grafted, "transform"]) == {"graftlab.transforms.by_layout"}


# ---- dumps that exist already -----------------------------------------------------------------------------------


def dump(folder: Path, value: object, **tags: object) -> Path:
    path = folder / ("___".join(f"{name}={each}" for name, each in tags.items()) + ".pt")
    torch.save({"value": value, "meta": {**tags, "world_size": 2, "dims": "b h[tp]"}}, path)
    return path


def two_ranks(folder: Path) -> None:
    for rank in range(2):
        for index, layer in enumerate((2, 0)):
            value = torch.full((1, 2), 10.0 * layer + rank)
            dump(folder, value, step=5, rank=rank, dump_index=index + 1, name="attn", layer_id=layer)


def test_a_dump_is_a_recording_in_its_own_order(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    dump(tmp_path, {"no": "tensor"}, step=5, rank=0, dump_index=9, name="config")
    recording = gl.Recording.open(tmp_path)
    assert recording.world_size == 2
    taps = list(recording.taps(1))
    assert [(entry.step, entry.name, entry.tags) for entry, _, _ in taps] == [
        (0, "attn", {"layer_id": 2}),
        (0, "attn", {"layer_id": 0}),
    ]
    assert torch.equal(taps[0][1], torch.full((1, 2), 21.0))
    assert taps[0][0].layout is not None
    assert taps[0][0].layout.text == "b h[tp]"
    assert recording.left_out == ["tap 'config', whose value is dict, not a tensor"]
    assert pickle.loads(pickle.dumps(recording)).world_size == 2


def test_ranks_without_dumps_are_missed_although_a_file_states_no_number_of_ranks(tmp_path: Path) -> None:
    dump(tmp_path, torch.ones(2), step=5, rank=0, dump_index=1, name="a")
    last = tmp_path / "step=5___rank=0___dump_index=9___name=b.pt"
    torch.save({"value": torch.ones(2), "meta": {"step": 5, "rank": 0, "dump_index": 9, "name": "b"}}, last)
    with pytest.raises(gl.RecordingError, match="of a job of 2 ranks, but only ranks up to 0 have dumps"):
        gl.Recording.open(tmp_path)


def test_a_dump_knows_how_its_ranks_were_arranged(tmp_path: Path) -> None:
    for rank in range(4):
        info = {"tp_rank": rank % 2, "tp_size": 2, "cp_rank": rank // 2, "cp_size": 2, "pp_rank": 0, "pp_size": 1}
        for index, dims in enumerate(("s[cp] b h[tp]", "s b h[tp]", "s[cp:backwards] h[tp]"), 1):
            named = {"step": 0, "rank": rank, "dump_index": index, "name": f"x{index}"}
            path = tmp_path / ("___".join(f"{key}={value}" for key, value in named.items()) + ".pt")
            meta = {**named, "world_size": 4, "dims": dims, "megatron_parallel_info": info}
            torch.save({"value": torch.ones(1, 1, 2), "meta": meta}, path)
    layouts = [entry.layout for entry, _, _ in gl.Recording.open(tmp_path).taps(3)]
    assert [None if each is None else each.mesh for each in layouts] == [[("cp", 2), ("tp", 2)], None, None]


def test_parameters_of_a_dump_pair_with_tapped_ones(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model(torch.ones(2)).backward()

    def show(dumper: Dumper) -> None:
        dumper.configure(enable_model_value=True, enable_model_grad=True)
        dumper.dump_model(model)

    live = recorded(tmp_path / "live", show)
    (tmp_path / "old").mkdir()
    for index, name in enumerate(("param__weight", "grad__param__weight"), 1):
        dump(tmp_path / "old", model.weight, step=1, rank=0, dump_index=index, name=name)
    with pytest.raises(gl.RecordingError, match=r"a job of 2 ranks, but only ranks up to 0"):
        gl.Recording.open(tmp_path / "old")
    old = gl.Recording.open(tmp_path / "old", partial=True)
    assert pickle.loads(pickle.dumps(old)).world_size == 1
    assert [(e.name, e.tags["kind"]) for e, _, _ in old.taps(0)] == [(tap["name"], tap["kind"]) for tap in live]
    with pytest.raises(gl.RecordingError, match="has dumps of several runs, in old; pass one of these"):
        gl.Recording.open(tmp_path)


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("this was run",)


def test_no_code_in_a_dump_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump(tmp_path, Payload(), step=0, rank=0, dump_index=1, name="evil")
    with pytest.raises(gl.RecordingError, match=r"tap 'evil': .* more than tensors and plain data"):
        gl.Recording.open(tmp_path)
    assert capsys.readouterr().out == ""


def test_a_damaged_dump_or_one_without_a_rank_is_refused(tmp_path: Path) -> None:
    two_ranks(tmp_path)
    path = next(tmp_path.glob("*rank=0*layer_id=2.pt"))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(gl.RecordingError, match=r"tap 'attn': .* is damaged"):
        gl.Recording.open(tmp_path)
    for each in tmp_path.glob("*rank=0*"):
        each.unlink()
    with pytest.raises(gl.RecordingError, match=r"none of \[0\]"):
        gl.Recording.open(tmp_path)
