"""Style sheets of the widgets: each colour and font that a rule takes is one that the panel defines."""

from __future__ import annotations

import re
from pathlib import Path

import graftlab.widgets


def test_rules_use_all_properties_that_the_panel_defines_and_no_others() -> None:
    text = "".join(each.read_text() for each in Path(graftlab.widgets.__path__[0]).glob("*.py"))
    defined = re.findall(r"^\s*(--gl-[\w-]+):", text, re.MULTILINE)
    assert len(defined) == len(set(defined)) > 5
    assert set(re.findall(r"var\((--gl-[\w-]+)", text)) == set(defined)
