"""What a check of one side's ranks makes of its arguments and of the ranks' sketches, without a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graftlab.errors import SessionError
from graftlab.judging.replica_check import ReplicaCheck, _groups_along, _inputs, check
from graftlab.layouts.replicas import TapSketch

NUMBERS = np.random.default_rng(0).standard_normal((4, 256))


def sketch(name: str, values: Any, dtype: str = "float32", **tags: Any) -> TapSketch:
    norm = float(np.linalg.norm(values))
    return TapSketch(name, tags, (name, str(tags)), (4, 8), dtype, np.asarray(values, np.float64).tobytes(), norm, 0)


class Session:
    """Has four ranks on the target's side, whose sketches are given."""

    options = SimpleNamespace(baseline=1, target=4)

    def __init__(self, *ranks: tuple[list[TapSketch], list[str]]) -> None:
        self.ranks = list(ranks)
        self.started: list[str] = []

    def start(self, **sides: Any) -> Any:
        self.started += sides
        return SimpleNamespace(wait=lambda bar: None, steps=0, **dict.fromkeys(sides, self.ranks))


def checked(session: Session, **given: Any) -> ReplicaCheck:
    options = {"layouts": None, "mesh": None, "args": (), "kwargs": None, **given}
    return check(session, options.pop("baseline", None), options.pop("target", None), **options)  # type: ignore[arg-type]


def test_groups_of_ranks_are_those_along_each_dimension_of_several() -> None:
    assert _groups_along({"data": 2, "one": 1, "tensor": 2}, 4) == {
        "data": [(0, 2), (1, 3)],
        "tensor": [(0, 1), (2, 3)],
    }
    assert _groups_along({"one": 1, "tensor": 4}, 4) == _groups_along(None, 4) == {}


def test_inputs_are_whole_numbers_before_all_computation_and_those_said_to_be() -> None:
    shown = [
        *(sketch("w", NUMBERS[0], kind="param"), sketch("ids", NUMBERS[0], "int64"), sketch("h", NUMBERS[0])),
        *(sketch("top", NUMBERS[0], "int64"), sketch("mask", NUMBERS[0], kind="input")),
    ]
    assert _inputs(shown) == ["ids", "mask"]


def test_a_check_has_what_its_ranks_show_and_what_they_cannot() -> None:
    ranks = [([sketch("ids", NUMBERS[0], "int64"), sketch("x", NUMBERS[rank // 2])], ["n", "m"]) for rank in range(4)]
    session = Session(*ranks)
    found = checked(
        session, target="f()", mesh={"data": 2, "tensor": 2}, layouts={"name == 'x'": "replicate(mesh='data')"}
    )
    assert session.started == ["target"]
    assert (found.inputs, found.checked.skipped) == (("ids",), ["n", "m"])
    assert found.found == ["x"]
    assert list(found.frame["relation"]) == ["agrees", "disagrees"]
    # Along one dimension of the mesh they are copies, where no layout is declared.
    along = checked(session, target="f()", mesh={"data": 2, "tensor": 2})
    assert (along.found, list(along.frame["relation"])) == ([], ["agrees", "agrees"])


def test_what_cannot_be_checked_is_refused_before_anything_runs() -> None:
    session = Session()
    for given, said in (
        ({"target": "f()", "mesh": {"tp": 3}}, "a mesh of {'tp': 3} has 3 ranks, and the side has 4"),
        ({"baseline": "f()"}, "the baseline has one rank"),
        ({}, "give one side's function"),
        ({"target": "f()", "baseline": "f()"}, "give one side's function"),
        ({"target": "1 +"}, "is not valid Python"),
    ):
        with pytest.raises(SessionError, match=said):
            checked(session, **given)
    assert session.started == []
