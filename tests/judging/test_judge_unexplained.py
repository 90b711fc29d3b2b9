"""A verdict clears nothing that differs: what no tap explains is its first sentence."""

from __future__ import annotations

import builtins
import functools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import graftlab as gl
from graftlab.comparison.answers import answer_of
from graftlab.requests import request_ids_tensor

pytestmark = pytest.mark.ranks


def first_line(verdict: Any) -> str:
    return str(verdict.text.splitlines()[0])


# ---- a target that does not repeat itself ---------------------------------------------------------------------------


def begin_counting() -> None:
    builtins.calls_so_far = 0  # type: ignore[attr-defined]


def wrong_in_some_calls(wrong: str) -> torch.Tensor:
    """Three layers; the target scales one of them in the calls for which ``wrong``, of the call's number, is true."""
    call: int = builtins.calls_so_far  # type: ignore[attr-defined]
    builtins.calls_so_far = call + 1  # type: ignore[attr-defined]
    is_wrong = gl.here().side == "target" and eval(wrong, {"call": call})
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator)
    for i in range(3):
        act = torch.tanh(x @ torch.randn(32, 32, generator=generator) / 32**0.5)
        x = x + gl.tap(f"layers.{i}.act", act * 1.2 if is_wrong and i == 1 else act)
    return gl.tap("out", x)


@pytest.mark.parametrize("wrong", ["call == 0", "call % 2 == 0", "call % 3 == 0", "call % 3 == 2"])
def test_a_target_wrong_in_some_calls_is_not_cleared(session: gl.Session, wrong: str) -> None:
    session.run(begin_counting, begin_counting)
    verdict = session.verdict(wrong_in_some_calls, wrong_in_some_calls, args=(wrong,))
    assert verdict.named == []
    assert "The target does not repeat itself: " in verdict.text
    assert "No tap adds more than rounding" not in verdict.text
    if not verdict.text.startswith("The target does not repeat itself"):
        assert first_line(verdict).startswith("The returned value differs by 0.09")
        assert ", and no tapped value explains it. The first tap that differs is layers.1.act by 0.2 (" in first_line(
            verdict
        )


# ---- values that both sides mask ------------------------------------------------------------------------------------


def masked_attention(factor: float) -> torch.Tensor:
    """Scores with a mask of -1e9, whose norm hides all others."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (gl.tap(name, torch.randn(4, 8, 16, generator=generator)) for name in "qkv")
    wrong = gl.here().side == "target"
    scores = q @ k.mT * (0.25 * factor if wrong else 0.25) + torch.ones(8, 8).triu(1) * -1e9
    return gl.tap("out", gl.tap("scores", scores).softmax(-1) @ v)


def test_masked_values_do_not_hide_a_mistake_in_the_others(session: gl.Session) -> None:
    verdict = session.verdict(masked_attention, masked_attention, args=(1.05,))
    assert verdict.named == ["scores"]
    assert "\nAt scores, values below -10000 on both sides count as masked, and are left out." in verdict.text
    assert 0.04 < verdict.frame.loc[verdict.frame["name"] == "scores", "added"].item() < 0.06
    assert session.verdict(masked_attention, masked_attention, args=(1.0,)).named == []


def attention_with_a_mask_of(number: float, wrong_layer: int | None) -> torch.Tensor:
    """Two layers whose baseline masks by minus infinity, and whose target by a number."""
    x = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
    is_target = gl.here().side == "target"
    fill = number if is_target else -math.inf
    for layer in range(2):
        scores = x @ x.mT * (0.06 if is_target and layer == wrong_layer else 0.05)
        scores = gl.tap("scores", scores.masked_fill(torch.ones(8, 8).triu(1).bool(), fill), layer=layer)
        x = gl.tap("x", scores.softmax(-1) @ x, layer=layer)
    return x


def test_another_number_that_masks_is_no_mistake_and_hides_none(session: gl.Session) -> None:
    number = torch.finfo(torch.float32).min
    clear = session.verdict(attention_with_a_mask_of, attention_with_a_mask_of, args=(number, None))
    assert clear.named == []
    assert clear.text.startswith("No tap adds more than rounding")
    assert "\nAt scores, minus infinity on one side and a number below -10000 on the other count as equal" in clear.text
    wrong = session.verdict(attention_with_a_mask_of, attention_with_a_mask_of, args=(number, 1))
    assert wrong.named == ["scores"]
    assert wrong.text.startswith("scores is computed differently in layer 1 of 0-1 (added ")
    # A number that others exceed masks nothing, and is a difference.
    none = session.verdict(attention_with_a_mask_of, attention_with_a_mask_of, args=(-3.0, None))
    assert none.named == ["scores"]


# ---- batches in another order ---------------------------------------------------------------------------------------


def batch_in_another_order(factor: float, after: float) -> torch.Tensor:
    is_target = gl.here().side == "target"
    order = [2, 0, 1] if is_target else [0, 1, 2]
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))[order]
    extras = {"rids_int": request_ids_tensor([f"r{place}" for place in order], "cpu")}
    hidden = gl.tap("hidden", x.tanh() * (factor if is_target else 1.0), extras=extras)
    out = gl.tap("out", hidden.cumsum(1), extras=extras)
    return out * (after if is_target else 1.0)


def rows_returned_in_a_wrong_order() -> torch.Tensor:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    out = gl.tap("out", x.tanh(), extras={"rids_int": request_ids_tensor(["a", "b", "c"], "cpu")})
    return out[[1, 0, 2]] if gl.here().side == "target" else out


def test_a_wrong_order_of_returned_rows_is_found_where_requests_have_one_order(session: gl.Session) -> None:
    session.edit(transform=("True", gl.transforms.align_by_request))
    try:
        found = session.verdict(rows_returned_in_a_wrong_order, rows_returned_in_a_wrong_order)
    finally:
        session.edit(transform=None)
    assert first_line(found).startswith("Something after the last tap, out, is computed differently")


def test_another_order_of_requests_is_no_difference_after_the_last_tap(session: gl.Session) -> None:
    session.edit(transform=("True", gl.transforms.align_by_request))
    try:
        found = {
            case: session.verdict(batch_in_another_order, batch_in_another_order, args=case)
            for case in ((1.0, 1.0), (1.1, 1.0), (1.0, 1.1))
        }
    finally:
        session.edit(transform=None)
    right, wrong, later = found.values()
    assert first_line(right).startswith("Nothing that was checked adds more than rounding")
    assert "Not checked: the order of the rows of the returned value." in right.text
    assert first_line(wrong).startswith("hidden is computed differently")
    assert first_line(later).startswith("Something after the last tap, out, is computed differently")
    assert "the returned value still differs by 0.1 (" in first_line(later)


# ---- what no tap shows ----------------------------------------------------------------------------------------------


def returns_more(fault: str) -> dict[str, torch.Tensor]:
    x = torch.linspace(-1, 1, 64).reshape(4, 16)
    hidden = gl.tap("hidden", x.tanh())
    logits = hidden * (1.1 if fault == "logits" and gl.here().side == "target" else 1.0)
    loss = logits.square().mean() * (1.01 if fault == "loss" and gl.here().side == "target" else 1.0)
    return {"logits": logits, "loss": loss}


@pytest.mark.parametrize(("fault", "path", "size"), [("logits", "['loss']", "0.21"), ("loss", "['loss']", "0.01")])
def test_a_fault_after_the_last_tap_is_the_first_sentence(
    session: gl.Session, fault: str, path: str, size: str
) -> None:
    verdict = session.verdict(returns_more, returns_more, args=(fault,))
    assert verdict.named == []
    assert first_line(verdict).startswith(
        "Something after the last tap, hidden, is computed differently: with the baseline's value at every tap, the "
        f"returned value {path} still differs by {size} ("
    )
    assert "No tap adds more than rounding" not in verdict.text


def test_equal_returned_values_are_not_mentioned(session: gl.Session) -> None:
    verdict = session.verdict(returns_more, returns_more, args=("",))
    assert verdict.text.startswith("No tap adds more than rounding (")


def faults_before_and_after_the_last_tap() -> torch.Tensor:
    wrong = gl.here().side == "target"
    x = gl.tap("h", torch.linspace(-1, 1, 64).tanh() * (1.1 if wrong else 1.0))
    return x.exp() * (1.2 if wrong else 1.0)


def test_a_fault_after_the_last_tap_is_reported_beside_a_named_group(session: gl.Session) -> None:
    verdict = session.verdict(faults_before_and_after_the_last_tap, faults_before_and_after_the_last_tap)
    assert verdict.named == ["h"]
    assert first_line(verdict).startswith("Something after the last tap, h, is computed differently: ")


def copies() -> torch.Tensor:
    h = torch.linspace(-1, 1, 64) * (1.1 if gl.here().side == "target" else 1.0)
    gl.tap("h", h.clone())
    return h


def test_a_graft_that_reaches_nothing_is_not_taken_for_a_fault_after_the_last_tap(session: gl.Session) -> None:
    verdict = session.verdict(copies, copies)
    assert verdict.named == ["h"]
    assert "Something after the last tap" not in verdict.text


# ---- outputs without a partner --------------------------------------------------------------------------------------


def head_under_another_name(returns: bool) -> torch.Tensor | None:
    target = gl.here().side == "target"
    h = gl.tap("h", torch.linspace(-1, 1, 64).tanh())
    out = gl.tap("head" if target else "lm_head", h * (2.0 if target else 1.0))
    return out if returns else None


def test_an_output_without_a_partner_is_the_first_sentence(session: gl.Session) -> None:
    verdict = session.verdict(head_under_another_name, head_under_another_name, args=(False,))
    assert first_line(verdict) == (
        "The output was not compared: the baseline's last tap, lm_head, and the target's last tap, head, have no "
        "partner. The last tap that was compared is h. Return the output from both functions, pair it "
        "(session.edit(pairs=...)), or name the tap that counts (output=, or --output)."
    )
    returned = session.verdict(head_under_another_name, head_under_another_name, args=(True,))
    assert first_line(returned).startswith("Something after the last tap, h, is computed differently: ")
    assert "was not compared" not in returned.text


# ---- floors of unlike taps ------------------------------------------------------------------------------------------


def behind_an_ill_conditioned_norm(factor: float) -> torch.Tensor:
    """A Sequential, all of whose members are one group; the norm's rounding is 1,000 times that of the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    norm, linear = model[0], model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert isinstance(linear, nn.Linear)
    norm.running_mean.fill_(100.0)  # type: ignore[union-attr]
    norm.running_var.fill_(1e-6)  # type: ignore[union-attr]
    norm.eps = 0.0
    if gl.here().side == "target":
        linear.weight.data.mul_(factor)
    gl.watch(model, inputs=True)
    with torch.no_grad():
        return model(100 + 1e-3 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1)))  # type: ignore[no-any-return]


def test_a_tap_is_judged_by_its_own_floor_where_its_groups_is_that_of_unlike_taps(session: gl.Session) -> None:
    verdict = session.verdict(behind_an_ill_conditioned_norm, behind_an_ill_conditioned_norm, args=(1.02,))
    assert verdict.named == ["*"]
    rows = verdict.frame[verdict.frame["label"] == "culprit"]
    assert list(rows["name"]) == ["1"]
    right = session.verdict(behind_an_ill_conditioned_norm, behind_an_ill_conditioned_norm, args=(1.0,))
    assert right.named == []
    assert "no tap explains" not in right.text


# ---- low precision --------------------------------------------------------------------------------------------------


def in_bfloat16(fault: str) -> torch.Tensor:
    """Layers in bfloat16 whose norms, on the target, are rounded before they are multiplied by their weight."""
    wrong = fault if gl.here().side == "target" else ""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator).bfloat16()
    weight = 1 + torch.randn(64, generator=generator) / 3
    for i in range(4):
        wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        norm = wide.bfloat16() * weight.bfloat16() if wrong == "norm" else (wide * weight.bfloat16()).bfloat16()
        norm = gl.tap(f"layers.{i}.norm", norm)
        matrix = (torch.randn(64, 64, generator=generator) / 8).bfloat16()
        x = gl.tap(f"layers.{i}.out", x + gl.tap(f"layers.{i}.act", torch.tanh(gl.tap(f"layers.{i}.h", norm @ matrix))))
    return gl.tap("logits", x * 2)


def test_groups_that_round_differently_are_named_with_their_effect(session: gl.Session) -> None:
    verdict = session.verdict(in_bfloat16, in_bfloat16, args=("norm",))
    assert verdict.named == ["layers.*.norm"]
    assert verdict.labels["layers.*.norm"] == "rounds differently"
    assert verdict.text.startswith(
        "layers.*.norm rounds differently: from equal inputs it is never bit-equal, and the other 4 groups of bfloat16 "
        "taps always are. So it, or code before it that is not tapped, computes in a different order or precision, or "
        "with a mistake that is smaller than one rounding. A run in float32 shows only the mistake.\n"
        "With the baseline's layers.*.norm the output logits is bit-equal; with the target's it is off by 0.0"
    )
    assert "in float32 for a closer look" not in verdict.text


def test_equal_low_precision_names_nothing(session: gl.Session) -> None:
    verdict = session.verdict(in_bfloat16, in_bfloat16, args=("",))
    assert verdict.named == []
    assert verdict.text.startswith("Nothing above bfloat16 rounding (")


# ---- stages that fail -----------------------------------------------------------------------------------------------


def other_dtypes(factor: float) -> torch.Tensor:
    target = gl.here().side == "target"
    ids = gl.tap("ids", torch.arange(16, dtype=torch.int32 if target else torch.int64))
    h = gl.tap("h", torch.linspace(-1, 1, 16)[ids.long()] * (factor if target else 1.0))
    return gl.tap("out", h.tanh())


def test_a_tap_with_other_dtypes_does_not_end_the_verdict(session: gl.Session) -> None:
    verdict = session.verdict(other_dtypes, other_dtypes, args=(1.1,))
    assert verdict.named == ["h"]
    assert "With the baseline's h the output out agrees (" in verdict.text


def refuses_t2b(given: Any) -> torch.Tensor:
    if given.direction == "t2b":
        raise ValueError("one way only")
    return given.received_list[0]  # type: ignore[no-any-return]


def test_a_stage_that_fails_is_reported_and_the_others_are_kept(session: gl.Session) -> None:
    session.edit(transform=("True", refuses_t2b))
    verdict = session.verdict(other_dtypes, other_dtypes, args=(1.1,))
    assert verdict.named == ["h"]
    assert first_line(verdict).startswith("h is computed differently")
    assert "\nThe search for what moves out failed, so its results are missing: " in verdict.text
    assert "The effect of h on the output was not measured." in verdict.text


def raises_when_grafted() -> torch.Tensor:
    target = gl.here().side == "target"
    h = gl.tap("h", torch.linspace(-1, 1, 16) * (1.1 if target else 1.0))
    if target and float(h.max()) < 1.05:
        raise ValueError("this target takes only its own values")
    return gl.tap("out", h.tanh())


def test_the_run_without_grafts_is_judged_where_no_other_run_succeeds(session: gl.Session) -> None:
    verdict = session.verdict(raises_when_grafted, raises_when_grafted)
    lines = verdict.text.splitlines()
    assert lines[0].startswith("The returned value differs by 0.0")
    assert ", and what each tap adds to it is not known. The first tap that differs is h by 0.1 (" in lines[0]
    assert lines[1].startswith("The run in which every tap was grafted failed, so its results are missing: ")
    assert "Nothing was compared" not in verdict.text


# ---- sides in different steps ---------------------------------------------------------------------------------------


def decodes(ahead: int) -> torch.Tensor:
    """Five steps on a series that no tap shows; the target may begin later in it, and its second layer is wrong."""
    x = torch.zeros(16)
    for step in range(5):
        target = gl.here().side == "target"
        x = torch.randn(16, generator=torch.Generator().manual_seed(step + (ahead if target else 0)))
        x = gl.tap("embed", x * 3)
        x = gl.tap("layer", x.tanh() * (1.1 if target else 1.0))
        gl.step()
    return x


def test_a_side_that_is_ahead_is_reported_and_no_innocent_is_named(session: gl.Session) -> None:
    verdict = session.verdict(decodes, decodes, args=(2,))
    assert first_line(verdict).startswith("The target is ahead by 2 steps: its values at embed are those that the base")
    assert first_line(verdict).endswith(
        "by 2 more calls of gl.step() on the target before its first step, and judge again."
    )
    assert (verdict.named, set(verdict.labels.values())) == ([], {"unmeasured"})
    assert session.verdict(decodes, decodes, args=(0,)).named == ["layer"]


def reads_a_cache() -> torch.Tensor:
    """A step of decoding, whose target finds another request's rows in its cache."""
    draw = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0))
    old, others, k = draw(6, 8), draw(2, 8), gl.tap("k", draw(1, 8))
    if gl.here().side == "target":
        old = torch.cat([old[:2], others, old[4:]])
    q = gl.tap("q", draw(1, 8))
    cache = gl.tap("cache", torch.cat([old, k]))
    return gl.tap("out", (q @ cache.T).softmax(-1) @ cache)


def test_rows_of_a_cache_that_no_tap_computed_are_called_stale(session: gl.Session) -> None:
    text = session.verdict(reads_a_cache, reads_a_cache).text
    assert "Hint (cache): at cache, indices 2-3 of dim 0 were not computed in this call, a stale or wrongly " in text


def generates(fault: str, tapped: bool) -> None:
    """Greedy decoding, in which the target chooses its second-best token once, or computes wrong logits."""
    table = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    token, target = torch.tensor(3), gl.here().side == "target"
    for step in range(5):
        embedded = gl.tap("embed", table[gl.tap("token", token) if tapped else token].clone())
        h = gl.tap("h", torch.roll(embedded, 1).tanh() * (-1.5 if target and fault == "h" and step == 1 else 1.0))
        logits = gl.tap("logits", table @ h)
        token = logits.topk(2).indices[1 if target and fault == "sampler" and step == 1 else 0]
        gl.step()


def test_a_run_that_feeds_back_its_own_tokens_is_called_free(session: gl.Session) -> None:
    text = session.verdict(generates, generates, args=("sampler", False), explain=False).text
    assert text.startswith(
        "From step 2 on, each side probably generates freely: embed, the first tap of each step, differs"
    )
    assert "such as a token chosen from logits; differences from step 2 on may be its consequences." in text
    assert "free run" not in session.verdict(generates, generates, args=("sampler", True), explain=False).text


def test_tokens_that_are_tapped_are_held_to_the_baselines(session: gl.Session) -> None:
    verdict = session.verdict(generates, generates, args=("h", True), explain=False)
    assert verdict.named == ["h"]
    assert "Running freely, the target has different numbers at token from step 2 on. Here it was giv" in verdict.text


# ---- groups that are outputs themselves -----------------------------------------------------------------------------


def loss_tapped_last(returns: bool) -> torch.Tensor | None:
    """The logits are wrong; the last tap is an auxiliary loss that does not depend on them."""
    h = gl.tap("h", torch.linspace(-1, 1, 64).tanh())
    logits = gl.tap("logits", h * (1.1 if gl.here().side == "target" else 1.0))
    gl.tap("aux", h.square().mean() + 1)
    return logits if returns else None


@pytest.mark.parametrize("returns", [False, True])
def test_a_wrong_group_that_nothing_depends_on_is_not_a_minor_one(session: gl.Session, returns: bool) -> None:
    verdict = session.verdict(loss_tapped_last, loss_tapped_last, args=(returns,))
    assert verdict.named == ["logits"]
    assert verdict.labels["logits"] == "culprit"
    assert (
        "No later tap depends on logits: it is an output itself, or its tap shows a copy. A swap cannot show its "
        "effect."
    ) in verdict.text


# ---- returned values that do not compare ----------------------------------------------------------------------------


def returns_a_time(extra: bool) -> dict[str, Any]:
    h = gl.tap("h", torch.linspace(-1, 1, 64) * (1.1 if gl.here().side == "target" else 1.0))
    out = {"out": gl.tap("out", h.tanh()), "seconds": time.perf_counter()}
    return out | ({"more": h} if extra and gl.here().side == "target" else {})


def test_a_returned_time_neither_stops_a_verdict_nor_counts(session: gl.Session) -> None:
    verdict = session.verdict(returns_a_time, returns_a_time, args=(False,))
    assert "Not checked: the returned value ['seconds'], which the baseline does not repeat." in verdict.text
    assert "does not repeat itself" not in verdict.text
    assert "With the baseline's h the output out agrees (" in verdict.text


def test_a_value_that_one_side_alone_returns_is_reported(session: gl.Session) -> None:
    verdict = session.verdict(returns_a_time, returns_a_time, args=(True,))
    assert "Not checked: only the target returns the result's ['more']." in verdict.text


def returns_an_auxiliary_loss(extra: str) -> dict[str, Any]:
    h = gl.tap("h", torch.linspace(-1, 1, 64))
    return {"out": gl.tap("out", h.tanh())} | ({"loss": h.mean()} if gl.here().side == extra else {})


def test_a_value_that_the_target_does_not_return_is_stated_first(session: gl.Session) -> None:
    verdict = session.verdict(returns_an_auxiliary_loss, returns_an_auxiliary_loss, args=("baseline",))
    assert verdict.text.startswith(
        "Only the baseline returns the result's ['loss'], which was therefore not compared. If this is intended, name "
        "the tap that counts (output=, or --output), such as out."
    )
    assert answer_of(verdict.findings, trusted=True, results_compared=True) == "inconclusive"
    chosen = session.verdict(returns_an_auxiliary_loss, returns_an_auxiliary_loss, args=("baseline",), output="out")
    assert "Not checked: only the baseline returns the result's ['loss']." in chosen.text
    more = session.verdict(returns_an_auxiliary_loss, returns_an_auxiliary_loss, args=("target",))
    for verdict in (chosen, more):
        assert answer_of(verdict.findings, trusted=True, results_compared=True) == "agree"


def scales_once_more() -> torch.Tensor:
    h = gl.tap("h", torch.linspace(-1, 1, 64))
    if gl.here().side == "target":
        h = gl.tap("scaled", h * 1.1)
    return gl.tap("out", h.tanh())


def test_a_tap_that_the_target_alone_has_is_mentioned_with_the_one_after_it(session: gl.Session) -> None:
    verdict = session.verdict(scales_once_more, scales_once_more, explain=False)
    assert verdict.named == ["out"]
    assert ". Before out the target alone has scaled, which was not compared." in verdict.text.splitlines()[0]


def one_request_of_three() -> None:
    for rid in range(3):
        wrong = gl.here().side == "target" and rid == 1
        h = gl.tap("h", torch.linspace(-1, 1, 64) * (rid + 1), rid=rid)
        gl.tap("logits", h.tanh() * (1.5 if wrong else 1.0), rid=rid)


def test_an_output_that_is_wrong_in_an_earlier_request_is_not_minor(session: gl.Session) -> None:
    verdict = session.verdict(one_request_of_three, one_request_of_three)
    assert verdict.labels["logits"] == "culprit"
    assert "The output logits agrees in its last call (0 x its floor) and differs earlier, in step 0." in verdict.text
    assert "without changing the output" not in verdict.text


def one_tap_for_all_layers(tagged: bool) -> None:
    h = torch.linspace(-1, 1, 64)
    for layer in range(4):
        wrong = gl.here().side == "target" and layer == 1
        h = gl.tap("h", torch.tanh(h * 1.5) * (1.05 if wrong else 1.0), **({"layer": layer} if tagged else {}))


def test_the_output_may_be_a_later_call_of_the_named_tap(session: gl.Session) -> None:
    verdict = session.verdict(one_tap_for_all_layers, one_tap_for_all_layers, args=(True,))
    assert "h is computed differently in layer 1 of 0-3" in verdict.text
    assert "outside the taps" not in verdict.text


def test_an_effect_that_calls_without_tags_hide_is_not_claimed(session: gl.Session) -> None:
    verdict = session.verdict(one_tap_for_all_layers, one_tap_for_all_layers, args=(False,))
    assert "h is computed differently in occurrence 1 of 0-3" in verdict.text
    assert "something outside the taps" not in verdict.text
    assert "The effect of h on the output was not measured." in verdict.text
    assert "1.05 times the baseline's" in verdict.text


def other_inputs() -> torch.Tensor:
    ids = gl.tap("ids", torch.arange(16) + (1 if gl.here().side == "target" else 0))
    return gl.tap("out", torch.linspace(-1, 1, 32)[ids].tanh())


def test_a_difference_that_inputs_explain_is_stated_with_them(session: gl.Session) -> None:
    verdict = session.verdict(other_inputs, other_inputs)
    assert verdict.text.startswith("The inputs already differ: ids")
    assert "With the baseline's ids the output out agrees (0 x its floor; " in verdict.text
    assert "no tapped value explains it" not in verdict.text


def test_a_difference_beside_differing_inputs_is_stated(session: gl.Session) -> None:
    lines = session.verdict(other_inputs, other_inputs, explain=False).text.splitlines()
    assert lines[0].startswith("The inputs already differ: ids")
    assert lines[1].startswith("The returned value differs by 0.")
    assert lines[1].endswith("The differences above may explain it.")


def test_the_repr_does_not_sound_like_an_acquittal(session: gl.Session) -> None:
    assert "nothing named, and something differs" in repr(session.verdict(returns_more, returns_more, args=("loss",)))
    assert "nothing named>" in repr(session.verdict(returns_more, returns_more, args=("",)))


def reads_unwritten(reserve: str) -> torch.Tensor:
    x = gl.tap("x", torch.linspace(-1, 1, 8))
    make = getattr(torch, reserve) if gl.here().side == "target" else torch.zeros
    # So large that its memory is new, and has zeros, in any run.
    room = make(1 << 24)
    room[:8] = x
    return gl.tap("read", room[4:12] * 2)


def test_memory_that_is_read_before_it_is_written_is_not_cleared(session: gl.Session) -> None:
    verdict = session.verdict(reads_unwritten, reads_unwritten, args=("empty",))
    assert verdict.named == []
    assert verdict.text.startswith(
        "The target reads memory before anything is written to it: in a run whose new memory was filled with NaN, it "
        "differs at read."
    )
    assert answer_of(verdict.findings, True, True) == "inconclusive"
    assert not torch.are_deterministic_algorithms_enabled()
    clean = session.verdict(reads_unwritten, reads_unwritten, args=("zeros",))
    assert clean.text.startswith("No tap adds more than rounding")


def fills_what_it_reserves(written: int) -> torch.Tensor:
    room = torch.empty(16)
    room[:written] = gl.tap("x", torch.linspace(-1, 1, 16))[:written]
    return gl.tap("read", room[:written] * 2)


def test_memory_that_both_sides_reserve_alike_is_not_a_difference(session: gl.Session) -> None:
    verdict = session.verdict(fills_what_it_reserves, fills_what_it_reserves, args=(12,))
    assert verdict.text.startswith("No tap adds more than rounding")


# ---- work that each side divides into different calls ---------------------------------------------------------------


def in_chunks(wrong: float) -> torch.Tensor:
    """One call on the baseline, and three on the target."""
    is_target = gl.here().side == "target"
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    found = [gl.tap("out", torch.tanh(gl.tap("h", part * 2))) for part in x.split(4 if is_target else 12)]
    return torch.cat(found) * (wrong if is_target else 1.0)


def tokens_in_chunks(wrong: float) -> torch.Tensor:
    return in_chunks(wrong).argmax(-1)


def test_tokens_alone_do_not_clear_calls_that_do_not_pair(session: gl.Session) -> None:
    verdict = session.verdict(tokens_in_chunks, tokens_in_chunks, args=(1.01,))
    assert first_line(verdict).startswith("Nothing but whole numbers was compared, such as tokens.")
    assert answer_of(verdict.findings, True, True) == "inconclusive"


def test_of_calls_that_do_not_pair_only_the_returned_values_are_compared(session: gl.Session) -> None:
    right = session.verdict(in_chunks, in_chunks, args=(1.0,))
    assert answer_of(right.findings, True, True) == "agree"
    assert first_line(right) == "The returned values agree to rounding; nothing else was compared."
    assert "Not checked: 2 taps (h, out): the sides divide their work into different calls (1 call " in right.text
    wrong = session.verdict(in_chunks, in_chunks, args=(1.01,))
    assert wrong.named == []
    assert first_line(wrong).startswith("The returned value differs by 0.01 (")
    assert answer_of(wrong.findings, True, True) == "differ"


# ---- generation whose only taps are the logits, or none -------------------------------------------------------------


def generated(
    *, taps: bool = True, in_other_order: bool = False, wrong: float = 1.0, sampled: bool = False
) -> list[int]:
    """Tokens of a loop over a state that no tap shows; the target may add its sums up in another order."""
    me = gl.here()
    is_target = me is not None and me.side == "target"
    weights = torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0)) / 4
    head = torch.randn(32, 50, generator=torch.Generator().manual_seed(1))
    state, tokens = torch.zeros(32), [7]
    for _ in range(6):
        state = state + head[:, tokens[-1]]
        for weight in weights:
            if in_other_order and is_target:
                state = (state[:16] @ weight[:16] + state[16:] @ weight[16:]).tanh()
            else:
                state = (state @ weight).tanh()
        logits = state @ head * (wrong if is_target and not sampled else 1.0)
        if taps:
            logits = gl.tap("logits", logits)
        scores = (logits * wrong if is_target else logits * 1.0) - head[0] if sampled else logits
        tokens.append(int(gl.tap("token", scores.argmax())) if taps else int(scores.argmax()))
    return tokens


def test_rounding_of_a_loop_whose_only_tap_is_the_logits_is_no_mistake(session: gl.Session) -> None:
    right = session.verdict(generated, generated, kwargs={"in_other_order": True})
    assert right.frame["ratio"].max() > 0
    assert right.text.startswith("No tap adds more than rounding")
    assert answer_of(right.findings, True, True) == "agree"
    wrong = session.verdict(generated, generated, kwargs={"wrong": 1.0001})
    assert wrong.named == ["logits"]


@pytest.mark.parametrize(
    "options", [{"taps": False}, {"sampled": True}], ids=["no tap", "no tap of what is sampled from"]
)
def test_equal_tokens_do_not_clear_the_values_from_which_they_were_chosen(
    session: gl.Session, options: dict[str, Any]
) -> None:
    verdict = session.verdict(generated, generated, kwargs={"wrong": 1.0001, **options})
    said = "The returned whole numbers, such as tokens, agree, but the values from which they were chosen differ by "
    assert first_line(verdict).startswith(said)
    assert answer_of(verdict.findings, True, True) == "inconclusive"


def test_tokens_chosen_from_clearly_different_values_differ(session: gl.Session) -> None:
    verdict = session.verdict(generated, generated, kwargs={"wrong": 1.02, "sampled": True})
    assert " the values from which they were chosen differ by 0.0" in first_line(verdict)
    assert answer_of(verdict.findings, True, True) == "differ"


def test_tokens_chosen_from_values_that_agree_clear_the_target(session: gl.Session) -> None:
    verdict = session.verdict(generated, generated, kwargs={"in_other_order": True, "sampled": True})
    assert answer_of(verdict.findings, True, True) == "agree", verdict.text


def test_equal_tokens_of_a_recording_do_not_clear_the_target(tmp_path: Path) -> None:
    def load() -> Any:
        return lambda tokens: torch.tensor(generated(taps=False, wrong=1.01))

    with gl.record(tmp_path / "recorded"):
        gl.tap("output", torch.tensor(generated(taps=False)))
    comparison = gl.compare(gl.Recording(tmp_path / "recorded"), load, torch.tensor([7]))
    comparison.session.close()
    assert comparison.text.startswith("The returned whole numbers, such as tokens, agree. Whether the values from")
    assert comparison.answer == "inconclusive"


def test_a_recording_of_values_that_round_needs_no_run_for_whole_numbers(tmp_path: Path) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def load() -> Any:
        return double

    with gl.record(tmp_path / "recorded"):
        gl.tap("output", double(torch.ones(4)))
    comparison = gl.compare(gl.Recording(tmp_path / "recorded"), load, torch.ones(4))
    comparison.session.close()
    assert (comparison.answer, comparison.runs) == ("agree", 3)
