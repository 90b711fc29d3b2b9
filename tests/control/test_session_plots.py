"""``session.plot``: help shows the options that each figure takes."""

from __future__ import annotations

import inspect

import pytest

from graftlab import plots
from graftlab.control.core import SessionCore
from graftlab.session import Session


@pytest.mark.parametrize(("name", "own"), [("divergence", []), ("history", ["name"]), ("ranks", ["name"])])
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
