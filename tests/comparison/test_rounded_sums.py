"""A call of float32 that differs by a few roundings is repeated in float64, where only mistakes are as large."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graftlab as gl
from graftlab.comparison.closer_look import CloserLook, in_more_bits
from graftlab.comparison.repeats import JudgingChoice
from graftlab.control.verdicts import Verdict
from graftlab.errors import SessionError
from graftlab.verdict.findings import Findings

ONE = 2.0**-24
X = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))


class Shifted(nn.Linear):
    """A linear layer that adds ``shift`` with its bias, and subtracts it again."""

    def __init__(self, shift: float, factor: float) -> None:
        super().__init__(32, 32)
        self.shift, self.factor = shift, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.shift:
            return F.linear(x, self.weight, self.bias) * self.factor
        return F.linear(x, self.weight, self.bias + self.shift) - self.shift


class Convolved(nn.Module):
    """A layer between convolutions with a bias, whose input and bias must have one dtype, also if the input is new."""

    def __init__(self, shift: float, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.layer, self.after = nn.Conv1d(4, 4, 1), Shifted(shift, factor), nn.Conv1d(4, 4, 1)
        self.begin = nn.Conv1d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = self.begin(torch.zeros(x.shape))
        return self.after(self.layer(self.before(x) + state))


def compared(shift: float, factor: float = 1.0) -> tuple[str, str]:
    comparison = gl.compare(partial(Convolved, 0.0, 1.0), partial(Convolved, shift, factor), X)
    with comparison.session:
        return comparison.answer, comparison.text


@pytest.mark.ranks
def test_a_sum_that_is_rounded_more_often_is_cleared_in_float64() -> None:
    answer, text = compared(16.0)
    assert answer == "agree", text
    found = re.search(r"In float32 layer differs by up to (\S+) from equal inputs, and in float64, .*, by (\S+):", text)
    assert found is not None, text
    assert float(found[1]) > 5 * ONE > ONE > float(found[2])


@pytest.mark.ranks
def test_a_mistake_of_a_few_roundings_is_none_of_float32_alone() -> None:
    answer, text = compared(0.0, 1 + 1e-6)
    assert answer == "differ", text
    assert "in float64" not in text


class Normed(nn.Module):
    """A norm of small numbers, to which its epsilon matters by a few roundings."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.RMSNorm(32, eps), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(0.22 * x))


class Beside(nn.Module):
    """A small branch, perhaps in 16 bits, beside a large one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.dtype = nn.Linear(32, 32), nn.Linear(32, 32), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x + (0.005 * x.tanh()).to(self.dtype).float()))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        # The default is that of the dtype, which float64 makes as small as the other.
        (partial(Normed, None), partial(Normed, 1e-12)),
        (partial(Beside, torch.float32), partial(Beside, torch.float16)),
    ],
)
def test_a_mistake_that_float64_would_not_make_is_not_cleared(baseline: Any, target: Any) -> None:
    comparison = gl.compare(baseline, target, X)
    with comparison.session:
        assert comparison.answer == "differ", comparison.text
        assert "in float64" not in comparison.text


# ---- when float64 clears ---------------------------------------------------------------------------------------------


class Looks:
    """Calls that give this verdict in float64, or do not run so."""

    def __init__(self, wide: Verdict | None) -> None:
        self.wide, self.looks = wide, 0

    def state_in_16_bits(self) -> dict[str, torch.dtype]:
        return {}

    def in_float64(self, choice: JudgingChoice) -> Verdict:
        self.looks += 1
        if self.wide is None:
            raise SessionError("it has a backward pass")
        return self.wide


def verdict(
    added: float, *, label: str = "culprit", dtype: str = "float32", of_head: str = "", **parts: Any
) -> Verdict:
    shared = {"cast": None, "tags": {}, "ratio": 9.0}
    rows = [
        {"name": "fc", "group": "fc", "added": added, "dtype": dtype, "label": label, "order": 0, **shared},
        {
            "name": "head",
            "group": "head",
            "added": 0.0,
            "dtype": of_head or dtype,
            "label": "clean",
            "order": 1,
            **shared,
        },
    ]
    return Verdict(Findings(pd.DataFrame(rows), 5.0, 1, **parts), 4)


def looked(found: Verdict, wide: Verdict | None, floor: Any = "auto") -> tuple[CloserLook, int]:
    repeats, choice = Looks(wide), JudgingChoice(floor=floor)
    return in_more_bits(repeats, found, choice, None, True), repeats.looks  # type: ignore[arg-type]


CLEAN = verdict(0.5 * ONE, label="clean")


def test_what_is_far_smaller_in_float64_is_cleared_with_both_numbers() -> None:
    wide = verdict(2 * ONE, label="clean")
    look, _ = looked(verdict(20 * ONE), wide)
    assert look.verdict.findings is wide.findings
    assert (look.verdict.runs, look.doubt, look.may_be_rounding) == (8, None, False)
    (said,) = look.said
    assert said == (
        "In float32 fc differs by up to 1.2e-06 from equal inputs, and in float64, from the same numbers, by 1.2e-07: "
        "they only round differently."
    )
    # A third of it, if that is less than two roundings.
    assert looked(verdict(3 * ONE), verdict(ONE, label="clean"))[0].said


@pytest.mark.parametrize(
    ("found", "wide"),
    [
        # Float64 leaves more than a third, or more than two roundings, or nothing that can be read.
        (verdict(3 * ONE), verdict(1.1 * ONE, label="clean")),
        (verdict(20 * ONE), verdict(2.1 * ONE, label="clean")),
        (verdict(20 * ONE), verdict(float("nan"), label="clean")),
        # It names something, or does not run.
        (verdict(20 * ONE), verdict(ONE)),
        (verdict(20 * ONE), verdict(ONE, label="clean", unexplained=["head differs."])),
        (verdict(20 * ONE), None),
    ],
)
def test_what_float64_does_not_explain_stays_named(found: Verdict, wide: Verdict | None) -> None:
    look, looks = looked(found, wide)
    assert (look.verdict, look.said, looks) == (found, (), 1)


@pytest.mark.parametrize(
    "found",
    [
        verdict(33 * ONE),
        verdict(float("nan")),
        verdict(20 * ONE, label="clean"),
        verdict(20 * ONE, dtype="float64"),
        verdict(20 * ONE, of_head="bfloat16"),
        verdict(20 * ONE, data=["The weights already differ."]),
        verdict(20 * ONE, unexplained=["head differs."]),
    ],
)
def test_only_a_few_roundings_to_float32_are_looked_at_in_float64(found: Verdict) -> None:
    look, looks = looked(found, CLEAN)
    assert (look.verdict, look.said, looks) == (found, (), 0)


def test_a_floor_that_a_person_gave_stands() -> None:
    found = verdict(20 * ONE)
    look, looks = looked(found, CLEAN, 1e-9)
    assert (look.verdict, look.said, looks) == (found, (), 0)
