"""What ranks print and display, and what failed on them, as a notebook shows it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
from kit.kernels import Kernel, Reply, kernel

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    # The variable that a notebook server sets.
    with kernel(MPLBACKEND="module://matplotlib_inline.backend_inline") as running:
        started = running.run("%load_ext graftlab\nimport graftlab as gl, torch\n%graft up -b 1 -t 2")
        assert not started.error, started.error
        yield running


def displayed(reply: Reply) -> list[dict[str, Any]]:
    """What was displayed, but for the places of bars."""
    return [data for data in reply.shown if "graftlab-live" not in data.get("text/html", "")]


def typed(notebook: Kernel, cell: str) -> Reply:
    reply = notebook.run(textwrap.dedent(cell).strip())
    assert not reply.error, reply.error
    return reply


def test_figures_frames_and_rich_values_are_shown_once_with_their_rank(notebook: Kernel) -> None:
    reply = typed(
        notebook,
        """
        %%graft target[1]
        import matplotlib.pyplot as plt
        import pandas as pd
        plt.plot([1, 2])
        plt.show()
        display(pd.DataFrame({"a": [1]}))
        print("between")
        figure, _ = plt.subplots()
        plt.figure()
        figure
        """,
    )
    kinds = [sorted(set(data) - {"text/plain"}) for data in displayed(reply)]
    assert kinds == [["image/png"], ["text/html"], ["image/png"], ["image/png"]], "open ones at the end, then the value"
    assert reply.stdout.splitlines() == [
        "target[1] |",
        "target[1] |",
        "target[1] | between",
        "target[1] |",
        "target[1]:",
    ]
    again = typed(notebook, "%%graft target[1]\nplt.get_fignums()")
    assert again.values == ["[]"], "what was shown is closed"


def test_a_figure_of_each_rank_comes_under_its_label(notebook: Kernel) -> None:
    reply = typed(notebook, "%%graft both\nimport matplotlib.pyplot as plt\nplt.plot([1])\nplt.show()")
    assert sorted(reply.stdout.splitlines()) == ["baseline[0] |", "target[0] |", "target[1] |"]
    assert len(displayed(reply)) == 3


def test_a_progress_bar_is_updated_in_place_and_ends_as_a_line(notebook: Kernel) -> None:
    reply = typed(
        notebook,
        """
        %%graft target
        import threading
        from tqdm.auto import tqdm
        pause = threading.Event()
        for _ in tqdm(range(12), desc="epoch", mininterval=0):
            pause.wait(0.1)
        print("done")
        """,
    )
    places = [data for data in reply.shown if "epoch" in data["text/plain"]]
    assert len(places) == 2, "one a rank"
    bars = [data["text/plain"] for data in [*places, *reply.updates] if "epoch" in data["text/plain"]]
    seen = {text.partition("epoch")[0] for text in bars}
    assert seen == {"target[0] | ", "target[1] | "}
    assert len(bars) > 6
    assert reply.updates[-1]["text/plain"] == ""
    ends = [line for line in reply.stdout.splitlines() if "epoch: 100%" in line]
    assert sorted(line[:9] for line in ends) == ["target[0]", "target[1]"]
    assert len([line for line in reply.stdout.splitlines() if "epoch" in line]) == 2


FAILS = """
%%graft target
def fails(factor):
    scale = factor * 2
    if gl.here().rank == 1:
        raise ValueError(f"no such scale: {scale}")
fails(3)
"""


def test_a_failure_is_inspected_at_a_prompt_and_with_single_commands(notebook: Kernel) -> None:
    assert "no such scale: 6" in notebook.run(FAILS.strip()).error
    reply, prompts = notebook.converse("%graft debug", ["p scale", "u", "n", "", "q"])
    assert prompts == ["(target[1]) "] * 5
    assert reply.stdout.startswith("ValueError: no such scale: 6\n")
    assert "q: the end\n6\n" in reply.stdout
    assert "fails(3)" in reply.stdout
    assert reply.stdout.count("cannot be resumed") == 2, "an empty answer repeats the command before"
    assert typed(notebook, "%graft debug target[1] d").error == ""
    assert typed(notebook, "%graft debug target[1] p factor, scale").stdout == "(3, 6)\n"
    missing = notebook.run("%graft debug target p 1")
    assert "more than one rank; name one of target[0], target[1]" in missing.error
    typed(notebook, "%%graft target\n1")
    assert "UsageError: %graft debug: nothing failed in the newest run" in notebook.run("%graft debug").stderr
    assert "no failure is kept" in notebook.run("%graft debug target[1] w").error


def test_without_stdin_the_exception_is_shown_with_the_commands_to_continue(notebook: Kernel) -> None:
    notebook.run(FAILS.strip())
    message = notebook.client.execute("%graft debug target[1]", allow_stdin=False)
    reply = notebook.finish(message)
    assert reply.stdout.startswith("ValueError: no such scale: 6\n")
    assert "`%graft debug target[1] p EXPR` shows a value" in reply.stdout


WAITS = """
def waits(code):
    if gl.here().rank in code:
        exec(code[gl.here().rank], {"dist": torch.distributed, "torch": torch})
    while True:
        gl.step()

going_on = session.start(target=waits, args=(CODE,))
# In C, from where nothing comes back: the stack stays what it is.
seen = []
while len(seen) < 30 or len(set(seen[-30:])) > 1 or "distributed_c10d" not in seen[-1]:
    seen.append("".join(session.stacks()[f"target[{rank}]"] for rank in CODE))
"""


def test_interrupt_reports_what_it_ended_and_what_it_could_not(notebook: Kernel) -> None:
    assert typed(notebook, "%graft interrupt").stdout == "nothing is running\n"
    typed(notebook, "CODE = {0: 'dist.barrier()'}\n" + WAITS)
    first, second, lost = typed(notebook, "%graft interrupt").stdout.splitlines()
    assert first.startswith("target[0]: was ended, because it waited in a collective (")
    assert second.startswith("target[1]: ended; it was ")
    assert lost.startswith("the process group of the target is gone (")
    typed(notebook, "%graft restart")
    typed(notebook, "CODE = {rank: f'dist.recv(torch.ones(1), {1 - rank})' for rank in range(2)}\n" + WAITS)
    lines = typed(notebook, "%graft interrupt").stdout.splitlines()
    for rank, line in enumerate(lines):
        assert line.startswith(f"target[{rank}]: still running; it waits in a collective (")
        assert "ends with the time limit of its group, 60 s; `%graft restart` ends it now" in line
    typed(notebook, "%graft restart")
