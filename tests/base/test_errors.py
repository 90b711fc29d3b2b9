"""How errors of a run look in a notebook: the user's own lines, and torch's behind one that expands."""

from __future__ import annotations

import html
import types
from typing import Any

import IPython
import pytest
import torch
from torch import nn

from graftlab.errors import RunError, without_torch
from graftlab.transforms.running import user_traceback


class Mismatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def error() -> RunError:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        Mismatched()(torch.ones(2, 4))
    # A page would take the name of a module's code for markup.
    return RunError(f"run 0 failed on target[0], <module>\n\n{user_traceback(caught.value)}")


def test_frames_of_torch_are_one_line_each_time(error: RunError) -> None:
    shown, hidden = without_torch(str(error))
    assert str(error).count('File "') == shown.count('File "') + hidden
    assert [line.strip() for line in shown.splitlines() if "of torch" in line] == [
        "... 2 frames of torch",
        f"... {hidden - 2} frames of torch",
    ]
    assert "return self.layers(x)" in shown
    assert "_call_impl" not in shown
    # Releases of torch word it differently.
    assert shown.splitlines()[-1].startswith("RuntimeError: ")
    assert "mat1 and mat2 shapes cannot be multiplied" in shown.splitlines()[-1]


def test_a_notebook_shows_the_whole_traceback_behind_a_line(error: RunError, monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[dict[str, Any]] = []
    display_pub = types.SimpleNamespace(publish=published.append)
    shell = types.SimpleNamespace(kernel=object(), display_pub=display_pub)
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
    (shown,) = error._render_traceback_()
    assert "_call_impl" not in shown
    assert error._render_traceback_() == [shown]
    [data] = published
    _, hidden = without_torch(str(error))
    title = f"the whole traceback, with {hidden} frames of torch"
    whole = html.escape(f"RunError: {error}")
    assert data == {
        "text/html": f"<details><summary>{title}</summary><pre>{whole}</pre></details>",
        "text/plain": title,
    }
    # Without frames of torch, and in a terminal, nothing is folded.
    assert RunError("a rank died")._render_traceback_() == ["RunError: a rank died"]
    shell.kernel = None
    RunError(str(error))._render_traceback_()
    assert len(published) == 1
