"""State that both sides' calls leave under different names: which call has left it differing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlab.comparison import state_pairs
from graftlab.comparison.state_pairs import StatePairs
from graftlab.diffs.results import compare_results, written_path
from graftlab.ranks.call_description import CallDescription

STATE = written_path("args[1][0]")
CACHE = "['cache'].layers[0].recurrent_states[0]"


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def call(left: dict[str, Tensor]) -> CallDescription:
    return CallDescription("Net", 1, False, (), left, {})


def after(*calls: tuple[dict[str, Tensor], dict[str, Tensor]]) -> list[str]:
    pairs = StatePairs()
    for number, sides in enumerate(calls, 1):
        pairs.add(number, *map(call, sides))
    return pairs.remark()


def test_state_that_agreed_and_differs_later_is_named_with_the_call_that_left_it() -> None:
    first = {CACHE: drawn(1, 1, 4, 8), "['conv']": drawn(2, 4, 8)}, {STATE: drawn(1, 4, 8) * (1 + 1e-7)}
    second = {CACHE: drawn(3, 1, 4, 8)}, {STATE: drawn(3, 4, 8) * 1.25}
    third = {CACHE: drawn(4, 1, 4, 8)}, {STATE: drawn(4, 4, 8) * 1.5}
    (sentence,) = after(first, second, third)
    assert sentence == (
        "State differs that call 2 has left: what the call writes to args[1][0] on the target differs by 0.25 from the "
        f"returned value {CACHE} on the baseline, and after call 1 they agreed. Call 2 may write it wrongly, or in "
        "another order; then code named below that reads it may be right."
    )
    # It says how many more do.
    both = [
        ({CACHE: ours[CACHE], "['b']": ours[CACHE] + 1}, {STATE: theirs[STATE], written_path("b"): theirs[STATE] + 1})
        for ours, theirs in (first, second)
    ]
    (sentence,) = after(*both)
    assert "they agreed; so does 1 more. Call 2" in sentence
    # Of several calls, it names the first that has left some.
    late = {"['b']": drawn(5, 9)}, {written_path("b"): drawn(5, 9)}
    wrong = {"['b']": drawn(6, 9)}, {written_path("b"): drawn(7, 9)}
    in_turn = [
        tuple({**one, **other} for one, other in zip(*each, strict=True)) for each in ((late, first), (late, second))
    ]
    (sentence,) = after(*in_turn, tuple({**one, **other} for one, other in zip(wrong, second, strict=True)))  # type: ignore[arg-type]
    assert sentence.startswith("State differs that call 2 has left: ")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        # Not paired: of another shape, without any number but zero, too few numbers, or two that are equal.
        ({CACHE: drawn(1, 8, 4)}, {STATE: drawn(1, 8, 4).T}),
        ({CACHE: torch.zeros(4, 8)}, {STATE: torch.zeros(4, 8)}),
        ({CACHE: drawn(1, 4)}, {STATE: drawn(1, 4)}),
        ({CACHE: drawn(1, 4, 8), "['other']": drawn(1, 4, 8)}, {STATE: drawn(1, 4, 8)}),
        # Nothing that the target returns is state, and what both have under one name is compared like results.
        ({CACHE: drawn(1, 4, 8)}, {"['state']": drawn(1, 4, 8)}),
        ({STATE: drawn(1, 4, 8)}, {STATE: drawn(1, 4, 8)}),
        ({STATE: drawn(1, 4, 8)}, {STATE: drawn(1, 4, 8), written_path("args[2]"): drawn(1, 4, 8)}),
    ],
)
def test_only_state_that_agrees_with_one_tensor_alone_is_paired(
    ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    later = {path: each + drawn(7, *each.shape) for path, each in theirs.items()}
    assert after((ours, theirs), (ours, later)) == []


def test_state_that_agrees_again_or_moves_by_rounding_is_not_named() -> None:
    first = {CACHE: drawn(1, 4, 8)}, {STATE: drawn(1, 4, 8)}
    near = {CACHE: drawn(2, 4, 8)}, {STATE: drawn(2, 4, 8) * (1 + 1e-5)}
    far = {CACHE: drawn(3, 4, 8)}, {STATE: drawn(3, 4, 8) * 2}
    longer = {CACHE: drawn(3, 5, 8)}, {STATE: drawn(3, 4, 8) * 2}
    assert after(first, near) == after(first, far, first) == after(first, longer) == []


def test_state_that_agrees_with_another_tensor_later_is_not_named() -> None:
    first = {CACHE: drawn(1, 4, 8)}, {STATE: drawn(1, 4, 8)}
    far = {CACHE: drawn(2, 4, 8)}, {STATE: drawn(2, 4, 8) * 2}
    renamed = {"['cache'].layers[1]": drawn(3, 4, 8)}, {STATE: drawn(3, 4, 8)}
    assert after(first, far)
    assert after(first, far, renamed) == []


def test_only_state_whose_samples_are_near_is_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a model's caches may be that of any layer, and all are compared after each call."""
    compared: list[Tensor] = []

    def compare(one: Tensor, other: Tensor, *, matched: bool) -> object:
        compared.append(one)
        return compare_results(one, other, matched=matched)

    monkeypatch.setattr(state_pairs, "compare_results", compare)
    ours = {f"['cache'].layers[{layer}]": drawn(layer, 1, 40, 50) for layer in range(6)}
    ours["['mask']"] = torch.full((40, 50), -torch.inf).triu(1) + 1
    theirs = {written_path(path): each[0] if each.dim() == 3 else each for path, each in ours.items()}
    theirs = {path: each.bfloat16() for path, each in theirs.items()}
    later = {path: each * 4 for path, each in theirs.items()}
    (sentence,) = after((ours, theirs), (ours, later))
    assert "; so do 6 more" in sentence
    assert len(compared) == 2 * len(ours)
