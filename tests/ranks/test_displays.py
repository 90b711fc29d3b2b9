"""Displayed values of a rank are sent in the forms that a notebook shows, within a budget."""

from __future__ import annotations

import base64
import builtins
import os
import subprocess
import sys
from types import ModuleType

import pandas as pd
import pytest
from matplotlib.figure import Figure

from graftlab.ranks import displays
from graftlab.ranks.displays import Displays, bundle_of


@pytest.fixture
def sent() -> list[dict[str, str]]:
    return []


def test_a_frame_is_sent_as_a_table_and_a_figure_as_a_picture(sent: list[dict[str, str]]) -> None:
    show = Displays(sent.append)
    drawn = Figure()
    show(pd.DataFrame({"a": [1]}), drawn, 3)
    table, figure, number = sent
    assert "<table" in table["text/html"]
    assert figure.keys() == {"text/plain", "image/png"}
    assert figure["text/plain"] == repr(drawn)
    assert base64.b64decode(figure["image/png"]).startswith(b"\x89PNG")
    assert number == {"text/plain": "3"}


def test_a_value_is_sent_in_all_its_forms_though_one_of_them_raises() -> None:
    class Rich:
        def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, str], dict[str, str]]:
            return {"text/html": "<b>it</b>"}, {}

        def _repr_html_(self) -> str:
            return "another"

        def _repr_latex_(self) -> tuple[str, dict[str, str]]:
            return "$x$", {}

        def _repr_markdown_(self) -> str:
            raise ValueError("no")

        def __repr__(self) -> str:
            raise ValueError("no repr")

    made = bundle_of(Rich())
    assert made["text/html"] == "<b>it</b>"
    assert {*made} == {"text/plain", "text/html", "text/latex"}
    assert made["text/latex"] == "$x$"
    assert "whose repr raises ValueError" in made["text/plain"]
    assert set(bundle_of(pd.DataFrame)) == {"text/plain"}, "a class is not its instance"


def test_displays_too_large_or_too_many_are_replaced_by_a_notice(
    sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.5]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    show = Displays(sent.append)
    show.publish({"text/plain": "big", "text/html": "x" * (5 << 20)})
    assert sent[0]["text/plain"].startswith("big\n[its display has 5 MiB")
    # All forms count.
    show.publish({"text/plain": "both", "text/html": "x" * (3 << 20), "image/png": b"x" * (2 << 20)})
    assert sent[1] == {"text/plain": "both\n[its display has 5 MiB, too much to send to the notebook]"}
    for number in range(100):
        show(number)
    assert len(sent) == 21
    assert "more than 20 displays per second" in sent[-1]["text/plain"]
    clock[0] = 1.5
    show("again")
    assert sent[-1] == {"text/plain": "'again'"}


_IN_A_PROCESS = """
import os, sys
os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
from graftlab.ranks.displays import show_displays
sent = []
show_displays(sent.append)
display(1)
from matplotlib import pyplot as plt
plt.plot([1, 2])
plt.show()
assert "IPython" not in sys.modules
plt.show()
from IPython.display import display as of_ipython, HTML, publish_display_data
of_ipython(HTML("<b>x</b>"))
publish_display_data({"text/plain": "as it is"})
from tqdm.notebook import tqdm
from tqdm.std import tqdm as plain
assert tqdm is plain
assert [sorted(each) for each in sent] == [
    ["text/plain"], ["image/png", "text/plain"], ["text/html", "text/plain"], ["text/plain"]
], sent
"""


@pytest.mark.ranks
def test_display_is_a_builtin_and_pyplot_shows_each_figure_once() -> None:
    subprocess.run([sys.executable, "-c", _IN_A_PROCESS], check=True, timeout=100)


def test_a_class_is_displayed_as_its_name_whatever_its_objects_show() -> None:
    class Page:
        @classmethod
        def _repr_html_(cls) -> str:
            return "<b>it</b>"

    assert bundle_of(Page) == {"text/plain": repr(Page)}
    assert bundle_of(Page())["text/html"] == "<b>it</b>"


@pytest.mark.parametrize(
    ("backend", "shown_by"),
    [
        ("", displays.BACKEND),
        ("module://matplotlib_inline.backend_inline", displays.BACKEND),
        ("widget", displays.BACKEND),
        ("agg", "agg"),
    ],
)
def test_displays_of_modules_that_are_imported_already_are_sent_too(
    backend: str, shown_by: str, sent: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(displays, "_displays", None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(builtins, "display", None, raising=False)
    monkeypatch.setenv("MPLBACKEND", backend)
    ipython = ModuleType("IPython.core.display_functions")
    monkeypatch.setitem(sys.modules, ipython.__name__, ipython)
    monkeypatch.delitem(sys.modules, "tqdm.notebook", raising=False)
    displays.show_displays(sent.append)
    assert os.environ["MPLBACKEND"] == shown_by
    assert builtins.display is ipython.display is displays.displays()  # type: ignore[attr-defined]
    ipython.publish_display_data({"text/plain": "3"})
    assert sent == [{"text/plain": "3"}]


def test_a_dict_is_displayed_as_given_only_on_request(sent: list[dict[str, str]]) -> None:
    show = Displays(sent.append)
    show({"text/html": "<b>it</b>"}, raw=True)
    show({"text/html": "<b>it</b>"})
    show(3, raw=True)
    show.publish({"text/x": 4})
    assert sent == [
        {"text/html": "<b>it</b>"},
        {"text/plain": "{'text/html': '<b>it</b>'}"},
        {"text/plain": "3"},
        {"text/plain": "[displayed in no form that a notebook can show]"},
    ]
