"""Which rename is suggested where nothing paired, and that none is where none would help."""

from __future__ import annotations

import re
import shlex

import pandas as pd
import pytest
from kit.rows import row

from graftlab.rows.store import to_frame
from graftlab.verdict.renaming import pairing_advice, suggested_rename


def run(target: list[str], baseline: list[str], status: str = "missing") -> pd.DataFrame:
    rows = [row(name, status=status, rel_l2=None) for name in target]
    return to_frame([*rows, *(row(name, side="baseline", status="unmatched", rel_l2=None) for name in baseline)])


LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("attn", "mlp")]


def test_a_prefix_on_one_side_is_suggested_away() -> None:
    said = suggested_rename(run([f"model.{name}" for name in LAYERS], [*LAYERS, "extra"]))
    assert said is not None
    assert said.startswith("24 missing, 25 unmatched: target names start with 'model.'.")
    assert r"%graft rename target '^model\.' '' pairs 24 names" in said
    other = suggested_rename(run(LAYERS, [f"model.{name}" for name in LAYERS]))
    assert other is not None
    assert "baseline names start with 'model.'" in other


def test_a_differing_word_is_suggested_as_a_rename() -> None:
    said = suggested_rename(run([name.replace("layers", "h") for name in LAYERS], LAYERS))
    assert said is not None
    assert "target names have 'h' for 'layers'" in said
    _, _, _, pattern, new, *_ = shlex.split(said[said.index("%graft") :])
    assert re.sub(pattern, new, "h.3.attn") == "layers.3.attn"
    # A part of a word is none.
    paths = [f"layers.{n}.path" for n in range(4)]
    assert "pairs 4 names" in str(suggested_rename(run([name.replace("layers", "h") for name in paths], paths)))


@pytest.mark.parametrize(
    "found",
    [
        run(["a", "b", "c"], ["x", "y", "z"]),
        run(LAYERS, []),
        run([f"model.{name}" for name in LAYERS], LAYERS, status="compared"),
        run([f"model.{i}" for i in range(9)], [f"m.{i}" for i in range(40, 49)]),
        run(["layers.0.attn"], ["layers.1.attn"]),
    ],
    ids=["unlike", "one side", "something paired", "other numbers", "other layers"],
)
def test_no_rename_is_suggested_if_it_would_not_help(found: pd.DataFrame) -> None:
    assert suggested_rename(found) is None


def test_sides_that_share_no_name_are_advised_to_rename_or_to_match() -> None:
    said = pairing_advice(run([f"model.{name}" for name in LAYERS], LAYERS), of_jobs=False)
    assert said is not None
    assert "none of their names are equal: 24 missing, 24 unmatched: target names start with 'model.'" in said
    unlike = run(["a", "b", "c"], ["x", "y", "z"])
    assert "%graft match EXPR, or with session.match(...)" in str(pairing_advice(unlike, of_jobs=False))
    assert "%graft match, or with session.match()" in str(pairing_advice(unlike, of_jobs=True))


def test_taps_that_no_transform_fits_are_not_to_be_added() -> None:
    said = pairing_advice(run(["q"], ["q"], status="failed"), of_jobs=False)
    assert said == "The taps that both sides have could not be compared, for the reason below"
    others = pd.concat([run(["q"], [], status="failed"), run(["a", "b", "c"], ["x", "y", "z"])])
    advice = str(pairing_advice(others, of_jobs=False))
    assert advice.startswith(f"{said}, and the others have no name in common: pair them by value with %graft match EX")


def test_sides_that_share_a_name_or_have_no_taps_get_no_advice() -> None:
    for found in (run(["a", "b"], ["x", "b"]), run(["a"], []), run([], ["x"])):
        assert pairing_advice(found, of_jobs=False) is None


def test_a_side_with_fewer_taps_needs_pairs_for_most_of_those_alone() -> None:
    said = suggested_rename(run([f"model.{name}" for name in LAYERS], LAYERS[:4]))
    assert said is not None
    assert "pairs 4 names" in said
