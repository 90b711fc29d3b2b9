"""Whole numbers that are chosen from values which no tap and no result shows, such as tokens that are sampled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from kit.grafters import GrafterWorld

import graftlab as gl
from graftlab.diffs.results import NamedTensors, written_path
from graftlab.grafting import unseen_choices
from graftlab.taps import calls
from graftlab.verdict.unexplained import on_unseen_choices


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process taps as a baseline's rank does."""
    world = GrafterWorld(1, 1)
    monkeypatch.setattr(calls, "_grafter", world.baseline.grafter)
    monkeypatch.setattr(calls, "_handler", world.baseline.grafter)


def has_unseen_choices(call: Callable[[], Any], *, but: str = "", sees_result: bool = True) -> bool:
    """The answer with the taps of these tests, ``but`` the one of this name."""
    names = {"logits", "probs", "y", "buffer"} - {but}
    return unseen_choices.unseen_choices(call, names, sees_result=sees_result).exist


EMBEDDING = torch.linspace(-1, 1, 11 * 8).reshape(11, 8).sin()


def generate(choose: Callable[[torch.Tensor], torch.Tensor], *, taps: bool = True, steps: int = 4) -> list[int]:
    """Tokens, each chosen from the logits that follow the one before."""
    tokens, state = [3], torch.zeros(8)
    for _ in range(steps):
        state = (state + EMBEDDING[tokens[-1]]).tanh()
        logits = state @ EMBEDDING.T
        logits = gl.tap("logits", logits) if taps else logits
        tokens.append(int(choose(logits)))
    return tokens


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().clone().argmax()


def sampled(logits: torch.Tensor) -> torch.Tensor:
    noise = torch.linspace(0.5, 1.5, len(logits))
    return ((logits / 0.7).softmax(-1) / noise).argmax()


def sampled_from_the_largest(logits: torch.Tensor) -> torch.Tensor:
    """As top-p does it, where the choice is a place among sorted tokens."""
    values, tokens = (logits / 0.7).sort(descending=True)
    return tokens.gather(0, values[:4].softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(0)))


def sampled_from_a_tap(logits: torch.Tensor) -> torch.Tensor:
    return gl.tap("probs", (logits / 0.7).softmax(-1)).argmax()


@pytest.mark.parametrize("choose", [sampled, sampled_from_the_largest])
def test_tokens_that_are_sampled_after_the_last_tap_are_chosen_from_unseen_values(choose: Any) -> None:
    assert has_unseen_choices(lambda: generate(choose))


@pytest.mark.parametrize("choose", [greedy, sampled_from_a_tap])
def test_tokens_chosen_from_tapped_values_are_not(choose: Any) -> None:
    assert not has_unseen_choices(lambda: generate(choose))


@pytest.mark.parametrize("choose", [greedy, sampled])
def test_without_a_tap_all_tokens_are(choose: Any) -> None:
    assert has_unseen_choices(lambda: generate(choose, taps=False))


def test_a_tap_that_is_not_compared_shows_nothing() -> None:
    assert has_unseen_choices(lambda: generate(greedy), but="logits")


def test_a_returned_value_shows_what_was_chosen_from_it() -> None:
    def scores(*, also: bool) -> Any:
        logits = EMBEDDING @ EMBEDDING[2] * 1.5
        token = logits.argmax()
        return (token, logits.log_softmax(-1)) if also else (token, EMBEDDING[token])

    assert not has_unseen_choices(lambda: scores(also=True))
    assert has_unseen_choices(lambda: scores(also=False))
    assert has_unseen_choices(lambda: scores(also=True), sees_result=False)


def test_an_index_that_is_not_returned_does_not_count() -> None:
    def looked_up() -> tuple[torch.Tensor, list[int]]:
        buckets = (torch.arange(8).float().log1p() * 4).long()
        return gl.tap("y", EMBEDDING[buckets]), [11, 12]

    assert not has_unseen_choices(looked_up)


def test_whole_numbers_that_are_computed_from_whole_numbers_alone_do_not_count() -> None:
    assert not has_unseen_choices(lambda: torch.arange(9).flip(0).cumsum(0) % 5)


def test_values_written_into_a_buffer_stay_what_they_are() -> None:
    def buffered(*, shown: bool) -> torch.Tensor:
        buffer = torch.zeros(2, 11)
        buffer[1] = EMBEDDING @ EMBEDDING[2] * 1.5
        if shown:
            gl.tap("buffer", buffer)
        return buffer[1].argmax()

    assert has_unseen_choices(lambda: buffered(shown=False))
    assert not has_unseen_choices(lambda: buffered(shown=True))


def test_code_that_cannot_be_followed_is_unknown() -> None:
    def fails() -> torch.Tensor:
        raise ValueError("under a mode")

    assert unseen_choices.unseen_choices(fails, ()) == unseen_choices.UnseenChoices()
    assert not unseen_choices.UnseenChoices().is_known
    assert unseen_choices.unseen_choices(lambda: [3], ()).is_known


@pytest.mark.parametrize(("steps", "unseen"), [(4, True), (300, False)])
def test_many_equal_tokens_are_no_chance(steps: int, unseen: bool) -> None:
    assert has_unseen_choices(lambda: generate(sampled, steps=steps)) is unseen


def test_what_a_call_writes_is_not_returned() -> None:
    def counts() -> NamedTensors:
        return NamedTensors({written_path("count"): (EMBEDDING * 2).argmax()})

    assert not has_unseen_choices(counts)


# ---- the values behind them -----------------------------------------------------------------------------------------


def distance(one: Callable[[], Any], other: Callable[[], Any]) -> float:
    first, second = (unseen_choices.unseen_choices(call, ()) for call in (one, other))
    return first.distance(second)


def test_values_from_which_tokens_are_chosen_are_compared_between_the_sides() -> None:
    assert distance(lambda: generate(sampled), lambda: generate(sampled)) == 0.0
    found = distance(lambda: EMBEDDING[:, 0].argmax(), lambda: (EMBEDDING[:, 0] * 1.01).argmax())
    assert 0.0099 < found < 0.02
    # A change of direction alone shows in the sums under random signs.
    turned = EMBEDDING[:, 0].roll(1)
    rel_l2 = float((turned - EMBEDDING[:, 0]).norm() / turned.norm())
    assert rel_l2 / 4 < distance(lambda: EMBEDDING[:, 0].argmax(), lambda: turned.argmax()) < 3 * rel_l2


def test_masked_values_are_counted_and_left_out() -> None:
    def top(count: int, scale: float = 1.0) -> torch.Tensor:
        kept = EMBEDDING[:, 0].clone() * scale
        kept[count:] = -torch.inf
        return kept.argmax()

    assert distance(lambda: top(5), lambda: top(5)) == 0.0
    assert distance(lambda: top(5), lambda: top(6)) == float("inf")
    assert 0.1 <= distance(lambda: top(5), lambda: top(5, 1.1)) < 0.2
    assert distance(lambda: top(0), lambda: top(0)) == 0.0


def test_choices_that_do_not_pair_have_no_distance() -> None:
    assert math.isnan(distance(lambda: EMBEDDING[0].argmax(), lambda: EMBEDDING[:, 0].argmax()))
    assert math.isnan(distance(lambda: generate(sampled, steps=2), lambda: generate(sampled, steps=3)))
    assert math.isnan(distance(lambda: [3], lambda: [3]))


def test_a_distance_beyond_one_rounding_is_stated_and_a_large_one_differs() -> None:
    rows = pd.DataFrame({"dtype": ["float32", "int64", None]})
    assert on_unseen_choices(None, rows, 5.0) == on_unseen_choices(1e-5, rows, 5.0) == ([], [])
    for found, places in ((math.nan, (1, 0)), (2e-5, (1, 0)), (0.01, (1, 0)), (0.02, (0, 1)), (math.inf, (0, 1))):
        assert tuple(map(len, on_unseen_choices(found, rows, 5.0))) == places
    low = pd.DataFrame({"dtype": ["bfloat16"]})
    for found, places in ((3e-3, (0, 0)), (5e-3, (1, 0)), (0.09, (1, 0)), (0.11, (0, 1))):
        assert tuple(map(len, on_unseen_choices(found, low, 5.0))) == places
