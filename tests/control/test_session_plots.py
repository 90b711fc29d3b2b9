"""``session.plot``: help shows the options that each figure takes."""

from __future__ import annotations

import inspect

import pytest
import torch

import graftlab as gl
from graftlab import plots
from graftlab.control.core import SessionCore
from graftlab.session import Session


@pytest.mark.parametrize(
    ("name", "own"), [("divergence", ["step"]), ("over_steps", ["steps"]), ("history", ["name"]), ("ranks", ["name"])]
)
def test_the_options_are_those_of_the_function_of_that_name(name: str, own: list[str]) -> None:
    session = SessionCore.__new__(Session)
    method = getattr(session.plot, name)
    shown = inspect.signature(method).parameters
    of_function = [
        each for each in inspect.signature(getattr(plots, name)).parameters if each not in ("frame", "frames")
    ]
    assert list(shown) == [*own, *(each for each in of_function if each not in own)]
    assert shown["value"].default == "rel_l2"
    assert inspect.getdoc(getattr(plots, name)).splitlines()[0] in inspect.getdoc(method)


def steps(off_at: int, off: float) -> None:
    for step in range(4):
        gl.tap("a", torch.ones(4))
        gl.tap("b", torch.ones(4) + (off if step == off_at else 0.0))
        if step < 3:
            gl.step()


@pytest.mark.ranks
def test_divergence_draws_the_last_step_with_the_assumed_floor() -> None:
    with gl.launch(1, 1) as session:
        run = session.run(lambda: steps(1, 0.0), lambda: steps(1, 1.0))
        [ax] = session.plot.divergence().axes
        first = run.first_step
        assert ax.get_xlabel().endswith(f"run 0, step {first + 3} (the first divergent tap is in step {first + 1})")
        assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b"]
        assert [line.get_ydata()[0] for line in ax.lines if line.get_gid() == "noise floor"] == [1e-5]
        canvas = session.plot.divergence().interactive()
        assert f"step {first + 3}, plan 0, 2 taps: first divergent: none" in canvas.state["headline"]
        assert f"First divergent in this run: b on target[0] in step {first + 1}" in canvas.state["headline"]
        assert canvas.state["notes"] == []
        again = session.plot.divergence(step=first + 1).interactive()
        assert again.state["notes"] == [[1, "first divergent: b"]]
        assert again.with_floor(2.0)["notes"] == []
        with pytest.raises(gl.SessionError, match="no pair of tensors is kept for 'b'"):
            again.open(1)
        # Where the figure shows something else, the canvas would not fit.
        assert session.plot.divergence(value="max_abs").interactive is None
        [ax] = session.plot.divergence(step=first + 1).axes
        assert ax.get_xlabel().endswith(f"run 0, step {first + 1}")
        with pytest.raises(gl.SessionError, match=f"no rows of step 99; it has rows of steps {first} to {first + 3}"):
            session.plot.divergence(step=99)
        with pytest.raises(gl.SessionError, match=f"no rows of step 99 to 120; it has rows of steps {first} to"):
            session.plot.over_steps(steps=range(99, 121))
        assert (
            session.plot.over_steps()
            .axes[0]
            .get_title(loc="left")
            .startswith(f"first divergent: b in step {first + 1}")
        )
        assert session.plot.over_steps(steps=range(first + 2, 99)).axes[0].get_title(loc="left") == (
            "no tap is above the floor 1e-05, assumed for float32 in 2 steps"
        )
