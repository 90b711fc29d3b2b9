"""Tokens that differ before a call: near ties of logits, and tokens that no rounding explains."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graftlab.__main__ import main
from graftlab.comparison.chosen_tokens import ChosenToken, _last_rows, chosen_tokens, sentence_on
from graftlab.ranks.call_description import CallDescription

CHOOSES = str(Path(__file__).with_name("scripts") / "chooses.py")


def call(result: Tensor, ids: Tensor) -> CallDescription:
    return CallDescription("Model", 1, False, (), {"['logits']": result}, {}, whole_numbers={"[0][0]": ids})


def found(ours: Tensor, theirs: Tensor, ids: Tensor | None = None, others: Tensor | None = None) -> list[ChosenToken]:
    """What is found where each side's next token is its largest logit, or the one that is given."""
    ids = ours[:, -1:].argmax(-1) if ids is None else ids
    others = theirs[:, -1:].argmax(-1) if others is None else others
    return chosen_tokens((call(ours, ids), call(theirs, ids)), (call(ours, ids), call(theirs, others)), 5.0)


def logits(second: float = 4.0) -> Tensor:
    """Of two rows and 1,000 tokens: in row 1 the token 11 has the largest, and 700 the second largest."""
    drawn = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    drawn[1, -1, 11], drawn[1, -1, 700] = 4.0, second
    return drawn


def rounded(values: Tensor, by: float = 1e-6) -> Tensor:
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1)) * by
    noise[1, -1, 11], noise[1, -1, 700] = -by, by
    return values + noise


def test_a_token_that_rounding_has_turned_is_a_near_tie() -> None:
    ours = logits(4.0 - 1e-6)
    (token,) = found(ours, rounded(ours))
    assert (token.row, token.baseline, token.target, token.is_tie) == (1, 11, 700, True)
    said = sentence_on([token], 4, "Model")
    assert "the tokens differ in row 1 (11 on the baseline, 700 on the target), by a near tie" in said
    assert "Later differences are inherited from this choice" in said


@pytest.mark.parametrize("side", range(2))
def test_logits_that_one_side_alone_masks_do_not_widen_a_tie(side: int) -> None:
    ours = logits(4.0 - 1e-6)
    sides = [ours, rounded(ours)]
    (plain,) = found(*sides)
    sides[side][1, -1, 5] = -torch.inf
    (token,) = found(*sides)
    assert token.limit == pytest.approx(plain.limit, rel=0.01)


def test_whole_numbers_of_one_side_alone_are_no_choice() -> None:
    ours = logits(4.0 - 1e-6)
    before = call(ours, ours[:, -1:].argmax(-1))
    alone = replace(before, whole_numbers={**before.whole_numbers, "[0][1]": torch.ones(2)})
    assert chosen_tokens((before, before), (alone, before), 5.0) == []
    assert chosen_tokens((before, before), (before, alone), 5.0) == []


def other_names(call: CallDescription, ids: Tensor, rows: Tensor) -> CallDescription:
    """The call of a target with other names and shapes: its batch is flat, and it returns the last position alone."""
    return replace(call, plain={"": rows[:, -1]}, whole_numbers={"ids": ids.flatten(), "pos": torch.tensor([3, 3])})


def test_a_near_tie_is_found_in_arguments_and_logits_of_other_names_and_shapes() -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    one, other = (each[:, -1:].argmax(-1) for each in (ours, theirs))
    before = call(ours, one), other_names(call(theirs, one), one, theirs)
    (token,) = chosen_tokens(before, (call(ours, one), other_names(before[1], other, theirs)), 5.0)
    assert (token.row, token.baseline, token.target, token.is_tie) == (1, 11, 700, True)
    # Of those, only one that is the largest is known to be a choice.
    assert chosen_tokens(before, (call(ours, one), other_names(before[1], other + 1, theirs)), 5.0) == []
    assert chosen_tokens(before, (call(ours, one), other_names(before[1], one, theirs)), 5.0) == []
    # Logits of another vocabulary are others.
    smaller = before[0], replace(before[1], plain={"": theirs[:, -1, :-1]})
    assert chosen_tokens(smaller, (call(ours, one), other_names(smaller[1], other, theirs)), 5.0) == []


def test_a_token_flipped_by_one_wrong_logit_is_not_a_near_tie() -> None:
    ours = logits(4.0 - 2e-5)
    theirs = ours.clone()
    theirs[1, -1, 700] += 4e-5
    (token,) = found(ours, theirs)
    assert not token.is_tie
    assert (
        "not a near tie: in the previous call, the baseline's logits of the two tokens are 2e-05 apart"
        in sentence_on([token], 4, "Model")
    )


def test_a_token_that_differs_by_far_is_not_a_near_tie_even_if_each_is_the_largest() -> None:
    ours = logits(3.5)
    (token,) = found(ours, rounded(ours, by=0.3))
    assert token.is_targets_largest
    assert not token.is_tie


def test_a_token_that_is_not_its_sides_largest_blames_the_code_that_chooses() -> None:
    ours = logits(4.0 - 1e-6)
    others = ours[:, -1:].argmax(-1)
    others[1] = 700
    (token,) = found(ours, ours.clone(), others=others)
    assert not token.is_tie
    assert "the code that chooses tokens differs" in sentence_on([token], 4, "Model")


def test_a_second_largest_logit_within_rounding_is_no_tie_on_the_side_that_took_it() -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    theirs[1, -1, 11] = 4.1
    others = theirs[:, -1:].argmax(-1)
    others[1] = 700
    (token,) = found(ours, theirs, others=others)
    assert token.apart <= token.limit
    assert not token.is_tie


def test_an_argument_that_is_no_choice_of_a_token_is_not_excused_by_one_that_is() -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    before, now = [], []
    for side, position in ((ours, 3), (theirs, 4)):
        ids = side[:, -1:].argmax(-1)
        before.append(call(side, ids))
        now.append(replace(before[-1], whole_numbers={"[0][0]": ids, "position": torch.tensor([position] * 2)}))
    assert chosen_tokens((before[0], before[1]), (now[0], now[1]), 5.0) == []
    same = replace(now[1], whole_numbers={**now[1].whole_numbers, "position": now[0].whole_numbers["position"]})
    assert len(chosen_tokens((before[0], before[1]), (now[0], same), 5.0)) == 1


def test_another_token_with_an_equal_logit_is_a_tie() -> None:
    ours = logits(4.0)
    others = ours[:, -1:].argmax(-1)
    others[1] = 700
    (token,) = found(ours, ours.clone(), others=others)
    assert (token.baseline, token.target, token.is_tie) == (11, 700, True)


def test_one_token_without_a_tie_is_reported_before_those_with_one() -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    others = theirs[:, -1:].argmax(-1)
    others[0] = 5
    tokens = found(ours, theirs, others=others)
    assert [each.is_tie for each in tokens] == [False, True]
    said = sentence_on(tokens, 4, "Model")
    assert "the tokens differ in row 0" in said
    assert "row 1" not in said
    assert "near tie" not in said


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, " and 1 more row,"), (6, " and 3 more rows,")])
def test_of_many_rows_the_first_are_named_and_the_others_counted(count: int, more: str) -> None:
    said = sentence_on([ChosenToken(row, 1, 2, 0.0, 1.0, True) for row in range(count)], 4, "Model")
    assert said.count("on the baseline") == 3
    assert (more in said) if more else ("more row" not in said)


@pytest.mark.parametrize("case", ["sampled", "earlier", "shapes", "no logits", "equal"])
def test_whole_numbers_that_are_not_choices_of_the_largest_logit_are_ignored(case: str) -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    ids, others = ours[:, -1:].argmax(-1), theirs[:, -1:].argmax(-1)
    if case == "sampled":
        ids = ids + 1
    if case == "earlier":
        ids, others = torch.cat([ids, ids], 1), torch.cat([ids + 1, others], 1)
    if case == "shapes":
        others = torch.cat([others, others], 1)
    if case == "no logits":
        ours, theirs = ours[:1], theirs[:1]
    if case == "equal":
        others = ids
    assert found(ours, theirs, ids, others) == []


def test_logits_have_a_dimension_of_rows_and_one_of_tokens() -> None:
    assert _last_rows(torch.arange(24.0).reshape(2, 4, 3), 2).tolist() == [[9, 10, 11], [21, 22, 23]]  # type: ignore[union-attr]
    assert _last_rows(torch.arange(6.0).reshape(2, 3), 2).tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[union-attr]
    assert _last_rows(torch.arange(6.0).reshape(2, 3), 1).tolist() == [[3, 4, 5]]  # type: ignore[union-attr]
    assert _last_rows(torch.arange(3.0), 1).tolist() == [[0, 1, 2]]  # type: ignore[union-attr]
    for shape in ((2, 2, 2, 3), (2,), (3, 3), (2, 0), (2, 4, 0)):
        assert _last_rows(torch.ones(shape), 2) is None


def test_a_whole_sequence_is_read_at_its_last_token() -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    before = torch.ones(2, 4, dtype=torch.int64)
    ids, others = (torch.cat([before, each[:, -1:].argmax(-1)], 1) for each in (ours, theirs))
    assert [token.is_tie for token in found(ours, theirs, ids, others)] == [True]


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("warm_scripts")
@pytest.mark.parametrize("how", ["rounds", "third"])
def test_a_near_tie_is_proven_and_another_choice_is_not_excused(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", CHOOSES, f"{CHOOSES} {how}", "--json", "--folder", str(tmp_path)])
    answer = json.loads(capsys.readouterr().out)
    text = answer["text"]
    assert text.startswith("3 calls of Model agree. Before call 4, of Model, the tokens differ in row"), text
    if how == "rounds":
        assert answer["answer"] == "agree"
        assert "by a near tie: in the previous call, the baseline's logits of the two tokens are 0 apart" in text
        assert "Not checked: what the scripts compute from different tokens." in text
    else:
        assert answer["answer"] == "differ"
        assert "the code that chooses tokens differs" in text
        assert "near tie" not in text


@pytest.mark.parametrize("seen", ["other shape", "whole numbers", "one side alone"])
def test_only_results_of_one_shape_that_both_sides_return_are_logits(seen: str) -> None:
    ours = logits(4.0 - 1e-6)
    theirs = rounded(ours)
    ids, others = (side[:, -1:].argmax(-1) for side in (ours, theirs))
    first, second = call(ours, ids), call(theirs, ids)
    # Another result comes before the logits.
    extra = torch.full((2, 3, 1000), 2.0)
    extra[:, :, 0] = 1.0
    extra[0, -1, ids[0]] = extra[1, -1, ids[1]] = 3.0
    of_ours, of_theirs = {"['a']": extra, **first.plain}, {"['a']": extra, **second.plain}
    if seen == "other shape":
        of_theirs["['a']"] = extra[:, :2]
    elif seen == "whole numbers":
        of_ours["['a']"] = of_theirs["['a']"] = extra.long()
    else:
        del of_theirs["['a']"]
    (token,) = chosen_tokens(
        (replace(first, plain=of_ours), replace(second, plain=of_theirs)), (call(ours, ids), call(theirs, others)), 5.0
    )
    assert token.is_tie


@pytest.mark.parametrize("token", [-1, 1000, 4000])
def test_a_number_that_no_logit_has_is_no_choice(token: int) -> None:
    ours = logits(4.0 - 1e-6)
    ids = torch.tensor([[token], [11]])
    assert found(ours, rounded(ours), ids=ids, others=ids + 1) == []


def test_tokens_of_other_batches_are_no_choices() -> None:
    ours = logits()
    ids = ours[:, -1:].argmax(-1)
    assert found(ours, ours, ids=ids, others=ids[:1]) == found(ours, ours, ids=ids[:, 0], others=ids) == []


def test_the_rows_of_one_sequence_are_its_last() -> None:
    drawn = torch.randn(3, 7)
    for tensor, rows in ((drawn[None], 1), (drawn, 1), (drawn[-1], 1)):
        last = _last_rows(tensor, rows)
        assert last is not None
        assert torch.equal(last, drawn[-1:].double())
    for tensor, rows in ((drawn[-1], 2), (drawn, 2), (drawn[None], 2), (drawn[:, :0], 3), (torch.tensor(1.0), 1)):
        assert _last_rows(tensor, rows) is None
