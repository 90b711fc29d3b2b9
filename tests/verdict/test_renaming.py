"""Which rename is suggested where nothing paired, and that none is where none would help."""

from __future__ import annotations

import re
import shlex

import pandas as pd
import pytest

from graftlab.verdict.renaming import suggested_rename


def frame(target: list[str], baseline: list[str], status: str = "missing") -> pd.DataFrame:
    rows = [{"name": name, "side": "target", "status": status} for name in target]
    rows += [{"name": name, "side": "baseline", "status": "unmatched"} for name in baseline]
    return pd.DataFrame(rows, columns=["name", "side", "status"])


LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("attn", "mlp")]


def test_a_prefix_of_one_side() -> None:
    said = suggested_rename(frame([f"model.{name}" for name in LAYERS], [*LAYERS, "extra"]))
    assert said is not None
    assert said.startswith("24 missing, 25 unmatched: target names start with 'model.'.")
    assert r"%graft rename target '^model\.' '' pairs 24 names" in said
    other = suggested_rename(frame(LAYERS, [f"model.{name}" for name in LAYERS]))
    assert other is not None
    assert "baseline names start with 'model.'" in other


def test_one_word_for_another() -> None:
    said = suggested_rename(frame([name.replace("layers", "h") for name in LAYERS], LAYERS))
    assert said is not None
    assert "target names have 'h' for 'layers'" in said
    _, _, _, pattern, new, *_ = shlex.split(said[said.index("%graft") :])
    assert re.sub(pattern, new, "h.3.attn") == "layers.3.attn"


@pytest.mark.parametrize(
    "rows",
    [
        frame(["a", "b", "c"], ["x", "y", "z"]),
        frame(LAYERS, []),
        frame([f"model.{name}" for name in LAYERS], LAYERS, status="compared"),
        frame([f"model.{i}" for i in range(9)], [f"m.{i}" for i in range(40, 49)]),
    ],
    ids=["unlike", "one side", "something paired", "other numbers"],
)
def test_nothing_is_suggested_where_it_would_not_help(rows: pd.DataFrame) -> None:
    assert suggested_rename(rows) is None
