"""Settings of optimizers that differ are named with both sides' values and the weights that they are for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from kit.rows import row

from graftlab.errors import SessionError
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.optimizer_settings import SettingsDifference, settings_difference


def setting(name: str, step: int = 0, rel_l2: float = 0.5, **fields: Any) -> Row:
    return row(name, 9, step, rel_l2=rel_l2, own={"kind": "optimizer"}, **fields)


def updated(name: str, order: int, step: int = 0) -> Row:
    return row(name, order, step, rel_l2=0.5, own={"kind": "param", "updated": True})


def difference(
    rows: Sequence[Row], values: Mapping[str, tuple[list[float], list[float]]], asked: list[Any] | None = None
) -> SettingsDifference:
    def pair_of(name: str, rank: int, step: int, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        if asked is not None:
            asked.append((name, rank, step, dict(tags)))
        if name not in values:
            raise SessionError("not kept")
        baseline, target = values[name]
        return torch.tensor(baseline), torch.tensor(target)

    return settings_difference(to_frame(list(rows)), pair_of)


def test_a_setting_has_the_values_of_both_sides_and_its_weights() -> None:
    asked: list[Any] = []
    rows = [updated("a", 1), updated("b", 2), updated("c", 3), setting("lr"), setting("eps", rel_l2=0.0)]
    found = difference(rows, {"lr": ([0.1, 0.1, 0.1], [0.1, 0.2, 0.2])}, asked)
    assert found.lacking == ()
    assert found.values == {"lr": "0.1 on the baseline, 0.2 on the target for 2 of 3 weights: b, c"}
    assert asked == [("lr", 0, 0, {"occurrence": 0, "kind": "optimizer"})]
    found = difference([updated("a", 1), setting("lr")], {"lr": ([1.0], [2.0])})
    assert found.values == {"lr": "1 on the baseline, 2 on the target for a"}
    found = difference([updated("a", 1), updated("b", 2), setting("lr")], {"lr": ([1.0, 1.0], [2.0, 2.0])})
    assert found.values == {"lr": "1 on the baseline, 2 on the target for all 2 weights"}


def test_the_first_step_in_which_a_setting_differs_is_named() -> None:
    rows = [setting("lr", 5, rel_l2=0.0), setting("lr", 6), setting("lr", 7)]
    asked: list[Any] = []
    found = difference(rows, {"lr": ([0.1], [0.2])}, asked)
    assert found.values == {"lr": "0.1 on the baseline, 0.2 on the target for number 0, from step 1 on"}
    assert [step for _, _, step, _ in asked] == [1]


def test_weights_that_an_optimizer_lacks_are_named_once() -> None:
    nan = math.nan
    names = [updated(name, order) for order, name in enumerate("abcdef")]
    rows = [*names, setting("lr"), setting("beta", nonfinite_differ=5, rel_l2=0.0)]
    values = {"lr": ([1.0] * 6, [1.0] + [nan] * 5), "beta": ([0.9] * 6, [0.9] + [nan] * 5)}
    found = difference(rows, values)
    assert found.lacking == ("The target's optimizer does not have 5 of 6 weights: b, c, d, e and 1 more.",)
    assert found.values == {"lr": "", "beta": ""}
    found = difference([updated("a", 1), setting("lr")], {"lr": ([nan], [1.0])})
    assert found.lacking == ("The baseline's optimizer does not have 1 of 1 weights: a.",)
    # Neither has it.
    found = difference([updated("a", 1), updated("b", 2), setting("lr")], {"lr": ([nan, 1.0], [nan, 2.0])})
    assert found.lacking == ()
    assert found.values == {"lr": "1 on the baseline, 2 on the target for 1 of 2 weights: b"}


def test_more_pairs_of_values_than_three_are_counted() -> None:
    found = difference([setting("lr")], {"lr": ([1.0, 2.0, 3.0, 4.0, 5.0], [9.0] * 5)})
    assert found.values["lr"].endswith(
        "3 on the baseline, 9 on the target for 1 of 5 weights: number 2; 2 more pairs of values"
    )


def test_a_setting_that_was_not_kept_has_no_words() -> None:
    rows = [setting("lr"), setting("eps"), setting("weight", status="missing", rel_l2=None)]
    assert difference(rows, {"eps": ([1.0], [2.0])}).values.keys() == {"eps"}
