"""The line of source behind an operation."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

from graftlab.base.sources import install_source
from graftlab.lines.frames import SourceFrame, StackEntry, model_entry, model_frame, runs_in_backward, stack_entries
from graftlab.lines.operations import Operation
from graftlab.zoo.model import Config, Math, Model, make_weights


def calling_line(frame: FrameType) -> SourceFrame | None:
    entry = model_entry(stack_entries(frame))
    return None if entry is None else entry.read()


MODEL = """
import torch
from package_with_models.helpers import attend

class Attention(torch.nn.Module):
    def forward(self, x):
        return rotated(x) if x.dim() == 1 else attend(self, x)

def rotated(x):
    return x * 2
"""
HELPER = """
from torch.nn import Linear

def attend(module, x):
    return x @ x
"""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SourceFrame | None]:
    """The lines of the multiplications and matrix products that run."""
    lines: list[SourceFrame | None] = []
    for name in ("__mul__", "__matmul__"):
        original = getattr(torch.Tensor, name)

        def noted(self: torch.Tensor, other: object, original: object = original) -> object:
            # From the operation's caller on, as under a mode of torch.
            lines.append(calling_line(sys._getframe(1)))
            return original(self, other)  # type: ignore[operator]

        monkeypatch.setattr(torch.Tensor, name, noted)
    return lines


@pytest.fixture
def attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.nn.Module]:
    """A module of an installed package, which has a file of helpers without modules."""
    package = tmp_path / "site-packages" / "package_with_models"
    package.mkdir(parents=True)
    for name, source in (("__init__", ""), ("models", MODEL), ("helpers", HELPER)):
        (package / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(package.parent))
    from package_with_models.models import Attention  # type: ignore[import-not-found]

    found: torch.nn.Module = Attention()
    yield found
    for name in [each for each in sys.modules if each.startswith("package_with_models")]:
        del sys.modules[name]


def test_the_models_line_is_shown_not_the_line_of_a_helper_it_calls(
    seen: list[SourceFrame | None], attention: torch.nn.Module
) -> None:
    attention(torch.ones(2, 2))
    attention(torch.ones(2))
    assert [(each.line, each.source) for each in seen if each] == [
        (7, "return rotated(x) if x.dim() == 1 else attend(self, x)"),
        (10, "return x * 2"),
    ]


def test_the_whole_stack_has_the_helpers_line_too(monkeypatch: pytest.MonkeyPatch, attention: torch.nn.Module) -> None:
    stacks: list[list[StackEntry]] = []
    original = torch.Tensor.__matmul__

    def noted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        stacks.append(stack_entries(sys._getframe(1)))
        return original(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    attention(torch.ones(2, 2))
    assert [each.read().source for each in stacks[0][:3]] == [
        "return x @ x",
        "return rotated(x) if x.dim() == 1 else attend(self, x)",
        "attention(torch.ones(2, 2))",
    ]
    # Python 3.10 knows only the functions' own names.
    here = "test_" + stacks[0][2].read().function.partition("test_")[2]
    assert [each.read().function.rpartition(".")[2] for each in stacks[0][:2]] == ["attend", "forward"]
    entry = StackEntry(noted.__code__, 1, True, True)
    assert entry.read().function == (f"{here}.noted" if sys.version_info >= (3, 11) else "noted")


def test_a_running_frame_is_chosen_as_the_models_line_is(
    monkeypatch: pytest.MonkeyPatch, attention: torch.nn.Module
) -> None:
    chosen: list[tuple[int, int]] = []

    def noted(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        line, frame = calling_line(sys._getframe(1)), model_frame(sys._getframe(1))
        assert line is not None
        assert frame is not None
        chosen.append((line.line, frame.f_lineno))
        return torch.mm(self, other)

    monkeypatch.setattr(torch.Tensor, "__matmul__", noted)
    attention(torch.ones(2, 2))
    assert chosen == [(7, 7)]


def test_frames_of_torch_and_graftlab_are_left_out_but_not_its_models(seen: list[SourceFrame | None]) -> None:
    Model(Math(Config()), make_weights(Config()))(torch.arange(4)[None])
    assert seen
    assert {Path(each.file).name for each in seen if each} <= {"model.py", "faults.py"}
    assert not [each for each in stack_entries() if each.code.co_filename.startswith(str(Path(torch.__file__).parent))]


def test_a_cells_line_has_its_source() -> None:
    source = "def double(x):\n    return line()\n"
    install_source("<cell 7>", source)
    cell: dict[str, object] = {"line": lambda: calling_line(sys._getframe(1)), "__name__": "__main__"}
    exec(compile(source, "<cell 7>", "exec"), cell)
    assert cell["double"](1) == SourceFrame("<cell 7>", 2, "double", "return line()")  # type: ignore[operator]


def test_generated_code_without_source_is_passed_over() -> None:
    generated: dict[str, object] = {"line": lambda: calling_line(sys._getframe(1))}
    exec(compile("def run():\n    return line()\n", "<generated>", "exec"), generated)
    found = generated["run"]()  # type: ignore[operator]
    assert found.file == __file__
    assert "generated" in found.source


def test_text_after_python_c_is_not_taken_for_generated_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # As Python 3.13 does in a process that starts with python -c.
    monkeypatch.setitem(linecache.cache, "<string>", (12, None, ["import rank\n"], "<string>"))
    found = eval("line()", {"line": lambda: calling_line(sys._getframe(1))})
    assert found.file == __file__
    assert "eval" in found.source


def test_a_stack_without_user_code_has_no_line() -> None:
    assert model_entry([]) is None


def test_torchs_own_modules_have_their_lines_where_an_expression_calls_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[SourceFrame | None] = []

    def noted(*args: object, **kwargs: object) -> torch.Tensor:
        found.append(calling_line(sys._getframe(1)))
        return torch.ones(2, 4)

    monkeypatch.setattr(torch.nn.functional, "layer_norm", noted)
    thread = threading.Thread(target=eval, args=("norm(x)", {"norm": torch.nn.LayerNorm(4), "x": torch.ones(2, 4)}))
    thread.start()
    thread.join()
    assert [each.source for each in found if each] == ["return F.layer_norm("]


def entry(code: CodeType, line: int, *, is_of_user: bool, defines_modules: bool = False) -> StackEntry:
    return StackEntry(code, line, is_of_user, defines_modules)


def test_the_line_of_a_helper_is_replaced_by_that_of_a_modules_method_alone() -> None:
    function = test_the_line_of_a_helper_is_replaced_by_that_of_a_modules_method_alone.__code__
    method = Attention.forward.__code__
    helper = entry(function, 1, is_of_user=False)
    of_notebook = entry(function, 2, is_of_user=True, defines_modules=True)
    of_module = entry(method, 3, is_of_user=True, defines_modules=True)
    of_package = entry(function, 4, is_of_user=False, defines_modules=True)
    assert model_entry([helper, of_notebook, of_module]) is of_module
    assert model_entry([helper, of_notebook]) is helper
    assert model_entry([helper, of_package, of_module]) is of_package
    assert model_entry([of_notebook, of_module]) is of_notebook


class Attention(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_only_the_users_own_code_can_be_what_autograd_has_called() -> None:
    frame = sys._getframe()
    assert runs_in_backward([entry(frame.f_code, 1, is_of_user=True)], frame)
    assert not runs_in_backward([entry(frame.f_code, 1, is_of_user=False)], frame)
    assert not runs_in_backward([], frame)


def test_callers_follow_only_the_line_that_made_the_operation_itself() -> None:
    code = test_callers_follow_only_the_line_that_made_the_operation_itself.__code__
    helper = StackEntry(code, 1, is_of_user=False, defines_modules=False, instruction=10)
    model = StackEntry(code, 2, is_of_user=False, defines_modules=True, instruction=20)
    caller = StackEntry(code, 3, is_of_user=True, defines_modules=False, instruction=30)

    def shown(*stack: StackEntry) -> list[tuple[int, int]]:
        frames = Operation(0, "mul", "mul(f32[2])", (), (), stack).frames()
        return [(frame.line, frame.instruction) for frame in frames]

    assert shown(helper, model, caller) == [(2, -1), (1, 10), (3, 30)]
    assert shown(model, caller) == [(2, 20), (3, 30)]


def test_a_stack_of_torchs_modules_alone_leaves_out_what_only_calls_them() -> None:
    found: list[list[str]] = []

    class Shown(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *given: Any, **more: Any) -> Any:
            entries = stack_entries(sys._getframe(1))
            found.append([Path(each.code.co_filename).name for each in entries])
            return super().__torch_function__(*given, **more)

    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    # A new thread has no code of the user on its stack.
    thread = threading.Thread(target=model, args=(torch.ones(1, 2).as_subclass(Shown),))
    thread.start()
    thread.join()
    assert found[-1] == ["linear.py"]


def test_a_line_is_named_by_its_file_and_that_of_a_notebook_by_its_cell() -> None:
    files = ["/home/me/model.py", "/tmp/ipykernel_123/4567.py", "/tmp/ipykernel_123/helpers.py"]
    assert [str(SourceFrame(each, 3, "f", "")) for each in files] == ["model.py:3", "cell:3", "helpers.py:3"]


def test_a_deep_stack_has_its_innermost_lines_alone() -> None:
    def deeper(left: int) -> list[StackEntry]:
        return deeper(left - 1) if left else stack_entries(sys._getframe())

    found = deeper(40)
    assert len(found) == 32
    assert {each.code for each in found} == {deeper.__code__}
