"""``session.verdict``: what it names, what it says first, and that it leaves the session as it was."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import reset, run_cell

import graftlab as gl
from graftlab.control.verdicts import Verdict
from graftlab.errors import RunError, SessionError
from graftlab.judging import verdict_runs
from graftlab.judging.floor_cache import remember_floor
from graftlab.lines.traces import LINE_TAP
from graftlab.ranks.messages import Failure

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def one_and_two() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def chain(fault: str = "") -> torch.Tensor:
    """Four layers that mix; on the target with a fault."""
    wrong = fault if gl.here().side == "target" else ""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator)
    if wrong == "input":
        x = x + 1
    x = gl.tap("input", x)
    for i in range(4):
        weight = torch.randn(32, 32, generator=generator) / 32**0.5
        h = gl.tap(f"layers.{i}.h", x @ weight)
        if wrong == "layer 2" and i == 2:
            h = h * 1  # the tap was right; what follows is not
        act = torch.tanh(h) * (1.01 if wrong == "act" or (wrong == "layer 2" and i == 2) else 1.0)
        act = act + (float("nan") if wrong == "nan" and i == 1 else 0.0)
        if wrong == "random":
            act = act + torch.rand(())
        x = x + gl.tap(f"layers.{i}.act", act)
    if wrong == "missing":
        gl.tap("only here", x)
    if wrong == "dead end":
        gl.tap("aside", x * 2)
    elif fault == "dead end":
        gl.tap("aside", x)
    return gl.tap("out", x / (2 if wrong == "out" else 1))


@pytest.mark.parametrize(
    ("fault", "group", "said"),
    [
        ("act", "layers.*.act", "layers.*.act is computed differently in layers 0-3 ("),
        ("layer 2", "layers.*.act", "layers.*.act is computed differently in layer 2 of 0-3 ("),
        ("input", "input", "input is computed differently ("),
        ("out", "out", "out is computed differently ("),
    ],
)
def test_a_verdict_names_the_differing_group_and_its_layers(
    session: gl.Session, fault: str, group: str, said: str
) -> None:
    verdict = session.verdict(chain, chain, args=(fault,))
    assert verdict.named == [group]
    assert verdict.text.startswith(said)
    assert verdict.labels[group] == "culprit"
    # With its own values an output agrees in any case.
    assert (f"With the baseline's {group} the output out agrees (" in verdict.text) == (group != "out")


def tapped_by_the_baseline(wrong: bool) -> torch.Tensor:
    """Two hundred steps, which the baseline alone taps; the target rounds them differently."""
    is_target = gl.here().side == "target"
    x = gl.tap("given", torch.linspace(0.5, 2.0, 1000))
    for n in range(200):
        x = x * 1.3 / 1.3 if is_target else gl.tap(f"layers.{n}", x * 1.1 / 1.1)
    return gl.tap("out", x * (1 + 1e-5 * (wrong and is_target)))


def test_rounding_before_taps_of_the_baseline_alone_is_no_difference(session: gl.Session) -> None:
    verdict = session.verdict(tapped_by_the_baseline, tapped_by_the_baseline, args=(False,))
    assert verdict.named == []
    assert verdict.text.startswith("Nothing that was checked adds more than rounding (")
    assert session.verdict(tapped_by_the_baseline, tapped_by_the_baseline, args=(True,)).named == ["out"]


class Counted:
    """An argument that counts how often it was sent."""

    sent = 0

    def __reduce__(self) -> Any:
        Counted.sent += 1
        return Counted, ()


def test_functions_and_arguments_are_pickled_once_for_all_runs(session: gl.Session) -> None:
    def function(argument: Counted) -> torch.Tensor:
        return chain("act")

    Counted.sent = 0
    verdict = session.verdict(function, function, args=(Counted(),))
    assert verdict.runs > 3
    assert verdict.named == ["layers.*.act"]
    assert Counted.sent == 2, "once for each side"
    session.match(function, function, args=(Counted(),))
    assert Counted.sent == 4


def test_a_hint_at_the_mechanism_is_labelled_as_one(session: gl.Session) -> None:
    text = session.verdict(chain, chain, args=("out",)).text
    assert (
        "\nHint (out): at out, the target's values are 1/2 times the baseline's (explains 100 % of the difference)."
        in text
    )


def gated() -> None:
    gate = gl.tap("gate", torch.linspace(-3, 3, 64).reshape(4, 16))
    up = gl.tap("up", torch.linspace(2, 1, 64).reshape(4, 16) * gate.cos())
    act = torch.nn.functional.gelu if gl.here().side == "target" else torch.nn.functional.silu
    gl.tap("act", act(gate) * up)


def test_an_activation_variant_is_hinted_at(session: gl.Session) -> None:
    text = session.verdict(gated, gated).text
    assert (
        "Hint (act): at act, the target computes gelu of gate, times up, the baseline silu of gate, times up (" in text
    )


def crossed() -> torch.Tensor:
    """Two tables that the sides look up in another order; the target's first one is wrong."""
    target = gl.here().side == "target"
    tables = {"words": torch.linspace(1, 2, 32), "places": torch.linspace(-1, 3, 32).cos()}
    if target:
        tables["places"] = tables["places"] * 1.5
    found = {name: gl.tap(name, tables[name]) for name in (sorted(tables) if target else sorted(tables, reverse=True))}
    return gl.tap("out", gl.tap("sum", found["words"] + found["places"]).tanh())


def test_taps_in_different_orders_do_not_block_a_swap(session: gl.Session) -> None:
    verdict = session.verdict(crossed, crossed)
    assert verdict.named == ["places"]
    assert "With the baseline's places the output out agrees (" in verdict.text
    assert "outside the taps" not in verdict.text


def test_errors_after_the_culprit_are_inherited(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("layer 2",))
    labels = {row.name: row.label for row in verdict.frame.itertuples()}
    assert labels["layers.1.act"] == labels["layers.2.h"] == "clean"
    assert labels["layers.2.act"] == "culprit"
    assert labels["layers.3.h"] == labels["out"] == "inherited"
    assert "Everything else is inherited." in verdict.text


def test_equal_sides_are_reported_to_add_only_rounding(session: gl.Session) -> None:
    # Separate code, whose floor no other test can have measured before.
    verdict = session.verdict(lambda: chain(), chain)
    assert verdict.named == []
    assert verdict.text == "No tap adds more than rounding (4 groups of taps, at most 0 x the floor, threshold 5)."
    assert verdict.runs == 3


def test_a_group_that_does_not_reach_the_output_is_minor(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("dead end",))
    assert verdict.labels["aside"] == "minor"
    assert "without changing the output" in verdict.text


# ---- what is said besides -------------------------------------------------------------------------------------------


def test_a_one_sided_tap_is_reported_after_the_conclusion(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("missing",))
    assert verdict.text.startswith("Nothing that was checked adds more than rounding")
    assert "\nNot checked: 1 tap (only here) is on the target only" in verdict.text


def test_nan_on_one_side_is_named_where_it_begins(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("nan",))
    assert verdict.named == ["layers.*.act"]
    assert "in layer 1 of 0-3 (not finite on one side" in verdict.text


def decoding(scale: float) -> None:
    """Six tokens are chosen; the target's third step is scaled, which changes no token and not what comes after."""
    generator = torch.Generator().manual_seed(0)
    embedding = torch.randn(50, 16, generator=generator)
    token = gl.tap("token", torch.tensor([3]))
    for step in range(6):
        wrong = step == 2 and gl.here().side == "target"
        hidden = gl.tap("hidden", embedding[token].tanh() * (scale if wrong else 1))
        logits = gl.tap("logits", hidden @ embedding.T)
        token = gl.tap("chosen", logits.argmax(-1))
        gl.step()


def test_an_output_of_whole_numbers_has_no_floor_and_is_judged(session: gl.Session) -> None:
    verdict = session.verdict(decoding, decoding, args=(1.3,), output="chosen")
    assert "hidden is computed differently in step 2 of 0-5 (" in verdict.text
    assert ", without changing the output.\nThe output chosen still agrees (0 x its floor)." in verdict.text
    verdict = session.verdict(decoding, decoding, args=(-1.0,), output="chosen")
    assert verdict.labels["hidden"] == "culprit"
    assert "the output chosen agrees (0 x its floor; above any floor without)" in verdict.text


def test_the_output_is_the_last_tap_whose_numbers_round(session: gl.Session) -> None:
    verdict = session.verdict(decoding, decoding, args=(-1.0,))
    assert "With the baseline's hidden the output logits agrees (0 x its floor; " in verdict.text


def test_an_output_that_agrees_only_in_the_last_step_clears_nothing(session: gl.Session) -> None:
    verdict = session.verdict(decoding, decoding, args=(1.3,))
    assert verdict.labels["hidden"] == "culprit"
    assert "without changing the output" not in verdict.text
    assert "The output logits agrees in its last call (0 x its floor) and differs earlier, in step 2." in verdict.text


def showing_copies(used: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, generator=generator)
    for layer in range(4):
        weight = torch.randn(16, 16, generator=generator) / 4
        h = torch.tanh(x @ weight) * (1.01 if layer == 1 and gl.here().side == "target" else 1)
        copy = gl.tap(f"layers.{layer}.h", h.clone())
        x = x + (copy if used else h)
    return gl.tap("out", x)


def test_a_tap_of_an_unused_copy_is_reported_to_pass_nothing_on(session: gl.Session) -> None:
    """No graft reaches the model then, and what is inherited looks as if it arose where it is seen."""
    verdict = session.verdict(showing_copies, showing_copies, args=(True,))
    assert verdict.named == ["layers.*.h"]
    assert "grafting it changed" not in verdict.text
    verdict = session.verdict(showing_copies, showing_copies, args=(False,))
    assert verdict.text.startswith("Not checked: the effect of layers.*.h: grafting it changed no later tap. If")


def looped(fault: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight, head = torch.randn(16, 16, generator=generator) / 4, torch.randn(16, 30, generator=generator)
    state, tokens = torch.ones(16), []
    for t in range(4):
        state = gl.tap("state", torch.tanh(state @ weight + t), t=t)
        logits = gl.tap("logits", state @ head * (1.01 if fault and gl.here().side == "target" else 1), t=t)
        tokens.append(logits.argmax())
    return torch.stack(tokens)


def test_the_logits_of_a_loop_are_named_before_the_remark_that_nothing_reads_them(session: gl.Session) -> None:
    text = session.verdict(looped, looped, args=(True,)).text
    assert text.startswith("logits is computed differently (")
    assert "Not checked: the effect of logits: grafting it changed no later tap. If" in text


def normalizing(named_by_layer: bool) -> None:
    """The target's first layer is scaled, which the last one takes back."""
    x = torch.arange(1.0, 9.0)
    for layer in range(3):
        x = x / x.norm() * (2.0 if layer == 0 and gl.here().side == "target" else 1.0)
        x = gl.tap(f"layers.{layer}.h", x) if named_by_layer else gl.tap("h", x, layer=layer)


@pytest.mark.parametrize("named_by_layer", [True, False])
def test_other_layers_of_the_outputs_group_are_not_the_output(session: gl.Session, named_by_layer: bool) -> None:
    verdict = session.verdict(normalizing, normalizing, args=(named_by_layer,))
    assert ", without changing the output." in verdict.text
    assert "the last time" not in verdict.text


def choosing(place: int) -> torch.Tensor:
    logits = gl.tap("logits", torch.tensor([[3.0, 1.0, 2.0]]))
    return gl.tap("chosen", logits.topk(2).indices[..., place if gl.here().side == "target" else 0])


def test_differing_whole_numbers_are_named(session: gl.Session) -> None:
    verdict = session.verdict(choosing, choosing, args=(1,))
    assert "chosen is computed differently (added inf, above any floor, int64)." in verdict.text


def overflowing_chain(side: str) -> torch.Tensor:
    """Like a chain in float16, whose numbers leave its range on the way; the target's differs before that."""
    x = gl.tap("before", torch.ones(4) * (2.0 if gl.here().side == side else 1.0))
    return gl.tap("after", gl.tap("act", x * math.inf) - math.inf)


def test_values_finite_on_neither_side_are_unmeasured_not_clean(session: gl.Session) -> None:
    verdict = session.verdict(overflowing_chain, overflowing_chain, args=("neither",))
    assert verdict.text.startswith("Nothing that was checked adds more than rounding (1 group of taps")
    assert "\nNot checked: 2 taps (act, after) have no pair of finite numbers." in verdict.text
    assert verdict.labels == {"before": "clean", "act": "unmeasured", "after": "unmeasured"}
    verdict = session.verdict(overflowing_chain, overflowing_chain, args=("target",))
    assert verdict.labels == {"before": "culprit", "act": "unmeasured", "after": "unmeasured"}
    assert "The effect of before on the output after could not be measured" in verdict.text


def random_chain() -> None:
    gl.tap("x", torch.rand(4))
    gl.tap("y", torch.ones(4))


def test_code_that_does_not_repeat_itself_is_reported_first(session: gl.Session) -> None:
    verdict = session.verdict(random_chain, random_chain)
    assert verdict.text.startswith("The baseline does not repeat itself: run twice, it differs at x. Do not rely")
    assert verdict.runs == 3  # nothing is swapped


def test_a_target_that_does_not_repeat_itself_is_reported_first(session: gl.Session) -> None:
    text = session.verdict(chain, chain, args=("random",)).text
    assert text.startswith("The target does not repeat itself: run twice, it differs at layers.0.act, ")
    assert "layers.*.act is computed differently" in text


def lonely() -> None:
    """Each side has a tap that the other lacks, before one that differs."""
    target = gl.here().side == "target"
    x = gl.tap("x", torch.linspace(1, 2, 16))
    if not target:
        x = gl.tap("only the baseline's", x * 1)
    y = x * (2 if target else 3)
    if target:
        gl.tap("only the target's", y * 1)
    gl.tap("out", gl.tap("y", y) + x)


def test_a_one_sided_tap_does_not_block_a_swap(session: gl.Session) -> None:
    before = session.row_count
    verdict = session.verdict(lonely, lonely)
    assert verdict.named == ["y"]
    assert "With the baseline's y the output out agrees (" in verdict.text
    # In the swaps no side waits for such a tap: a side that did could block the one that it waits for.
    frame = session.frame.iloc[before:]
    _, grafted, *swaps = sorted(frame["plan_version"].unique())
    assert {"only the baseline's", "only the target's"} < set(frame.loc[frame["plan_version"] == grafted, "name"])
    assert len(swaps) >= 2
    later = set(frame.loc[frame["plan_version"] > grafted, "name"])
    assert {name for name in later if not name.startswith(LINE_TAP)} == {"x", "y", "out"}


def stepping() -> None:
    """The same taps in three steps; the second differs."""
    for step in range(3):
        x = gl.tap("x", torch.linspace(1, 2, 16) + step)
        gl.tap("out", x * (1.5 if step == 1 and gl.here().side == "target" else 1))
        gl.step()


def test_each_step_has_its_own_line_and_its_own_place_in_the_figure(session: gl.Session) -> None:
    verdict = session.verdict(stepping, stepping, explain=False)
    frame = verdict.frame
    assert frame[["step", "name"]].values.tolist() == [[step, name] for step in range(3) for name in ("x", "out")]
    assert frame.loc[frame["label"] == "culprit", "step"].tolist() == [1]
    # The error without grafts is that of the same step.
    assert (frame["error"] > 0.1).tolist() == [False, False, False, True, False, False]
    (axes,) = verdict.plot().axes
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("step")] == [
        "step 0",
        "step 1",
        "step 2",
    ]
    assert len(axes.get_xticks()) == 6


def untapped() -> int:
    return 1


def test_a_verdict_without_taps_does_not_agree(session: gl.Session) -> None:
    assert session.verdict(untapped, untapped).text.startswith("Nothing was compared")


def named_otherwise(*names: str) -> None:
    x = torch.linspace(1, 2, 16)
    for name in names:
        x = gl.tap(name, x * 1.5)


def test_taps_whose_names_never_pair_lead_to_a_match(session: gl.Session) -> None:
    baseline = partial(named_otherwise, "embed", "h.0", "norm")
    text = session.verdict(baseline, partial(named_otherwise, "lookup", "mixing", "end")).text
    assert "no tap was measured on both sides. Both sides have taps, and none of their names are equal" in text
    assert "%graft match EXPR" in text
    assert "session.match(" in text
    assert "Add gl.tap" not in text
    renamed = session.verdict(baseline, partial(named_otherwise, "model.embed", "model.h.0", "model.norm")).text
    assert "%graft rename target '^model\\.' '' pairs 3 names" in renamed
    # One side alone has taps: there is nothing to match.
    assert "Add gl.tap or gl.watch to both functions" in session.verdict(baseline, untapped).text


def failing_transform(graft_input: Any) -> Any:
    raise ValueError("no way")


def test_a_failing_transform_is_reported(session: gl.Session) -> None:
    # One without a filter is for what the plan grafts, and a verdict grafts all.
    plan = session.edit(b2t="name == 'nowhere'", transform=failing_transform)
    text = session.verdict(chain, chain).text
    assert (session.plan.b2t, session.plan.transform) == (plan.b2t, plan.transform)
    assert text.startswith("Nothing was compared")
    assert "\nNot checked: 10 taps (input," in text
    assert "ValueError: no way" in text


class Pooled(torch.nn.Module):
    """A model with two results; only the second is wrong on the target."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.pool = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.scale = 1.1 if gl.here().side == "target" else 1.0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(x)
        return {"hidden": hidden, "pooled": self.pool(hidden * self.scale)}


def pooled() -> dict[str, torch.Tensor]:
    model = Pooled()
    with gl.watch(model), torch.no_grad():
        found: dict[str, torch.Tensor] = model(torch.linspace(-1, 1, 8).reshape(2, 4))
    return found


def test_a_mistake_in_any_part_of_the_result_changes_the_output(session: gl.Session) -> None:
    verdict = session.verdict(pooled, pooled)
    assert verdict.frame.set_index("group").loc["pool", "label"] == "culprit"
    assert "With the baseline's pool the output agrees (0 x its floor; " in verdict.text


def evicts() -> None:
    """A cache that is a place shorter on the target, before what reads it."""
    rows = 3 if gl.here().side == "target" else 4
    cache = gl.tap("cache", torch.arange(20.0).reshape(4, 5)[:rows])
    gl.tap("read", cache.mean(0))


def test_a_tap_that_could_not_be_grafted_is_reported(session: gl.Session) -> None:
    verdict = session.verdict(evicts, evicts)
    assert verdict.named == ["read"]
    # It may make what is named innocent, and comes before it.
    assert verdict.text.startswith(
        "cache has the shape [4, 5] on the baseline and [3, 5] on the target. Nothing could be grafted there, so later "
        "taps may have inherited their named error from there."
    )


def narrow() -> None:
    dtype = torch.float32 if gl.here().side == "baseline" else torch.bfloat16
    x = gl.tap("x", torch.linspace(0, 1, 64).to(dtype))
    gl.tap("y", x * 3)


def test_low_precision_with_nothing_named_is_not_called_right(session: gl.Session) -> None:
    text = session.verdict(narrow, narrow).text
    assert text.startswith(
        "The target has bfloat16 at x, y where the baseline has float32, so differences within bfloat16 rounding "
        "cannot be seen there. Nothing above bfloat16 rounding ("
    )
    assert "run the target in float32 for a closer look." in text


# ---- the floor, measured once ---------------------------------------------------------------------------------------


def state_on_the_rank(scale: float) -> None:
    me = gl.here()
    held = me.vars.setdefault("held", {"scale": 1.0})
    if scale:
        held["scale"] = scale
    x = gl.tap("x", torch.linspace(1, 2, 16) * held["scale"])
    gl.tap("y", x.exp())


def test_a_floor_is_measured_again_when_code_arguments_plan_or_values_change(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[object] = []
    monkeypatch.setattr(verdict_runs, "remember_floor", lambda *given: (kept.append(given), remember_floor(*given)))

    def measured(*args: Any, **options: Any) -> int:
        kept.clear()
        session.verdict(state_on_the_rank, state_on_the_rank, args=args, **options)
        return len(kept)

    assert [measured(0.0), measured(0.0)] == [1, 0]
    session.edit(rename={"baseline": {"^x$": "renamed"}, "target": {"^x$": "renamed"}})
    assert [measured(0.0), measured(0.0)] == [1, 0]
    reset(session)
    assert measured(0.0, exact=state_on_the_rank) == 1
    # What the baseline shows has changed, and nothing that the notebook sends.
    session.execute("held['scale'] = 3.0", on="both")
    assert [measured(0.0), measured(0.0)] == [1, 0]
    assert measured(3.0) == 1


def test_a_floor_that_was_measured_before_gives_the_same_verdict(session: gl.Session) -> None:
    first = session.verdict(chain, chain, args=("layer 2",))
    again = session.verdict(chain, chain, args=("layer 2",))
    assert again.runs in (first.runs, first.runs - 1)  # a test before this one may have measured it
    assert again.text == first.text


# ---- under tensor parallelism ---------------------------------------------------------------------------------------


def sharded(wrong_rank: int) -> None:
    me = gl.here()
    weight = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    x = gl.tap("layers.0.x", x)
    own = weight.chunk(me.world_size)[me.rank] if me.side == "target" else weight
    if me.side == "target" and me.rank == wrong_rank:
        own = own * 1.5
    gl.tap("layers.0.q", x @ own.T)


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_the_rank_with_the_differing_shard_is_named(one_and_two: gl.Session, wrong_rank: int) -> None:
    verdict = reset(one_and_two).verdict(sharded, sharded, args=(wrong_rank,))
    assert verdict.named == ["layers.*.q"]
    assert f" on rank {wrong_rank} alone (" in verdict.text
    assert "aligned by slice dim=1" in verdict.text


# ---- options --------------------------------------------------------------------------------------------------------


def test_without_explanation_nothing_is_swapped(session: gl.Session) -> None:
    # Separate code, whose floor no other test can have measured before.
    verdict = session.verdict(lambda: chain("act"), lambda: chain("act"), explain=False)
    assert verdict.named == ["layers.*.act"]
    assert verdict.runs == 3


def many_mistakes(wrong: bool) -> torch.Tensor:
    x = torch.linspace(-1, 1, 32)
    for name in "abcdefghijklmn":
        x = torch.sin(3.03 * x if wrong else 3 * x)
        x = torch.tanh(x * 1.01 if wrong else x)
        # Several lines have to be right before one tap agrees.
        x = gl.tap(name, x + 0.01 if wrong else x)
    return x


def test_a_verdict_that_names_many_groups_makes_at_most_twenty_runs(session: gl.Session) -> None:
    verdict = session.verdict(lambda: many_mistakes(False), lambda: many_mistakes(True))
    assert verdict.named == list("abcdefghijklmn")
    assert verdict.runs <= 20


def test_the_threshold_and_a_constant_floor_decide(session: gl.Session) -> None:
    assert session.verdict(chain, chain, args=("act",), floor=0.1, explain=False).named == []
    assert session.verdict(chain, chain, args=("act",), threshold=1e9, explain=False).named == []
    assert session.verdict(chain, chain, args=("act",), floor=1e-3, explain=False).named == ["layers.*.act"]


def test_a_twin_in_higher_precision_raises_the_floor_by_its_distance(session: gl.Session) -> None:
    def twin(fault: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x = gl.tap("input", torch.randn(16, 32, generator=generator))
        for i in range(4):
            h = gl.tap(f"layers.{i}.h", x @ (torch.randn(32, 32, generator=generator) / 32**0.5))
            x = x + gl.tap(f"layers.{i}.act", torch.tanh(h) * 1.005)
        gl.tap("out", x)

    plain = session.verdict(chain, chain, args=("act",), explain=False)
    raised = session.verdict(chain, chain, args=("act",), exact=twin, explain=False)
    assert plain.named == ["layers.*.act"]
    assert raised.named == []
    assert "exact=" not in raised.text


def test_a_twin_with_other_taps_is_reported_as_useless(session: gl.Session) -> None:
    def of_the_first(fault: str) -> None:
        gl.tap("input", torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).double())

    partly = session.verdict(chain, chain, args=("",), exact=of_the_first, explain=False).text
    assert "\nNot checked: layers.0.h, layers.0.act, layers.1.h, layers.1.act and 5 more with exact=, " in partly
    other = session.verdict(chain, chain, args=("",), exact=untapped_with, explain=False).text
    assert "\nNot checked: exact=, which reaches none of the baseline's taps" in other


def untapped_with(fault: str) -> None:
    gl.tap("other", torch.ones(2))


def test_a_group_after_the_output_is_not_called_harmless(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("layer 2",), output="layers.1.h")
    assert verdict.labels["layers.*.act"] == "culprit"
    assert "without changing" not in verdict.text
    assert "The effect of layers.*.act on the output was not measured" in verdict.text


def test_expressions_and_notebook_functions_are_judged_too(session: gl.Session) -> None:
    session.execute("import torch\ndef f(k): gl.tap('x', torch.ones(4) * k)")
    assert session.verdict("f(1.0)", "f(2.0)").named == ["x"]
    cell = run_cell(
        """
        import torch, graftlab as gl
        def g(): gl.tap('x', torch.ones(4) * (2 if gl.here().side == 'target' else 1))
        """
    )
    assert session.verdict(cell["g"], cell["g"]).named == ["x"]


def test_renamed_taps_are_one_group(session: gl.Session) -> None:
    def names() -> None:
        prefix, gain = ("", 1.0) if gl.here().side == "baseline" else ("model.", 1.5)
        x = gl.tap(f"{prefix}layers.0.x", torch.ones(4))
        x = gl.tap(f"{prefix}layers.0.y", x * 3 * gain)
        gl.tap(f"{prefix}out", x + 1)

    session.edit(rename={"target": {r"^model\.": ""}})
    verdict = session.verdict(names, names)
    assert verdict.named == ["layers.*.y"]
    assert "the output out agrees" in verdict.text


@pytest.mark.parametrize(
    "options",
    [
        *({"floor": each} for each in (0, "high", True, float("nan"), float("inf"))),
        *({"threshold": each} for each in (0, "5", None, True, float("nan"), float("inf"))),
        *({"output": 3}, {"output": ["out"]}, {"exact": 5}, {"exact": "chain("}),
    ],
)
def test_invalid_options_are_refused(session: gl.Session, options: dict[str, Any]) -> None:
    runs = len(session.runs)
    with pytest.raises(SessionError, match=r"verdict: |is not valid Python, so nothing was run"):
        session.verdict(chain, chain, **options)
    assert len(session.runs) == runs


def test_an_unknown_output_is_refused_with_the_known_taps(session: gl.Session) -> None:
    with pytest.raises(SessionError, match=r"no tap named 'logits' was measured.*out"):
        session.verdict(chain, chain, output="logits")


# ---- the session afterwards -----------------------------------------------------------------------------------------

PLAN = {"b2t": "name == 'a'", "t2b": "name == 'b'", "compare": "name == 'c'", "keep": None}


def filters(session: gl.Session) -> dict[str, str | None]:
    return {name: getattr(session.plan, name) for name in PLAN}


def test_the_plan_is_restored(session: gl.Session) -> None:
    session.edit(**PLAN)
    session.verdict(chain, chain, args=("act",))
    assert filters(session) == PLAN


def breaks(side: str = "") -> None:
    gl.tap("x", torch.ones(2))
    if side in ("", gl.here().side):
        raise ZeroDivisionError("broken")


def test_the_plan_is_restored_when_the_code_raises(session: gl.Session) -> None:
    session.edit(**PLAN)
    with pytest.raises(RunError, match="broken"):
        session.verdict(breaks, breaks)
    assert filters(session) == PLAN


def ends_early(fault: str, side: str) -> torch.Tensor:
    """Layers: one has a fault on the target, and the third raises on one side."""
    generator = torch.Generator().manual_seed(0)
    x = gl.tap("input", torch.randn(16, 32, generator=generator))
    for i in range(4):
        act = torch.tanh(x @ torch.randn(32, 32, generator=generator) / 32**0.5)
        if fault and i == 1 and gl.here().side == "target":
            act = act * 1.01
        x = x + gl.tap(f"layers.{i}.act", act)
        if i == 2 and gl.here().side == side:
            raise ZeroDivisionError("broken")
    return gl.tap("out", x)


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_after_an_exception_of_one_side_the_values_before_it_are_judged(session: gl.Session, side: str) -> None:
    first = f"The {side} raises ZeroDivisionError: broken (test_judge.py:"
    wrong = session.verdict(ends_early, ends_early, args=("scale", side))
    assert wrong.text.startswith(first)
    assert wrong.text.partition("\n")[0].endswith(" does not. Before that, values already differ:")
    assert wrong.named == ["layers.*.act"]
    assert any("act = act * 1.01" in source for source in wrong.lines["source"])
    # The output that was named is never reached.
    right = session.verdict(ends_early, ends_early, args=("", side), output="out")
    assert right.text.startswith(first)
    assert "The values before that agree to rounding, up to layers.2.act, the last" in right.text
    assert right.named == []


def test_an_exception_of_both_sides_is_raised(session: gl.Session) -> None:
    with pytest.raises(RunError, match="baseline"):
        session.verdict(breaks, breaks)


def test_an_interrupt_restores_the_plan_and_stops_the_ranks(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve() -> None:
        while True:
            gl.step()

    from graftlab.control.run import Run

    def stop(run: Run, *_: object, **__: object) -> None:
        run.wait_steps(1)
        raise KeyboardInterrupt

    session.edit(**PLAN)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "wait", stop)
        with pytest.raises(KeyboardInterrupt):
            session.verdict(serve, serve)
    assert filters(session) == PLAN
    with pytest.raises(RunError):
        session.runs[-1].wait(timeout=60)
    kinds = {failure.kind for failure in session.runs[-1].failures.values() if isinstance(failure, Failure)}
    assert kinds == {"KeyboardInterrupt"}


# ---- what is shown --------------------------------------------------------------------------------------------------


def test_a_verdict_has_text_and_html(session: gl.Session) -> None:
    verdict = session.verdict(chain, chain, args=("layer 2",))
    shown = verdict._repr_mimebundle_()
    assert verdict.text in shown["text/plain"]
    assert ">culprit</td>" in shown["text/html"]
    # The answer is bold and first, but for what may overturn it.
    partly = Verdict(replace(verdict.findings, unseen=["one tap."]), verdict.runs)._repr_mimebundle_()["text/html"]
    assert partly.startswith("<p><b>layers.*.act is computed differently")
    assert "<p>Not checked: one tap.</p>" in partly
    doubtful = replace(verdict.findings, unexplained=["The output differs, and no tapped value explains it."])
    both = Verdict(doubtful, verdict.runs)._repr_mimebundle_()["text/html"]
    assert both.startswith(
        "<p><b>The output differs, and no tapped value explains it.</b></p><p><b>layers.*.act is computed"
    )
    figure = verdict.plot()
    assert [text.get_text() for text in figure.axes[0].texts] == ["culprit: layers.*.act"]
    assert session.verdict(untapped, untapped).plot().axes


def in_shares(fault: str) -> None:
    """A step of training, on each of two target ranks with half of the batch."""
    me = gl.here()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    call: Any = model
    if me.world_size > 1 and fault != "not averaged":
        call = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).chunk(me.world_size)[me.rank]
    with gl.watch(model, grads=True, inputs=True), gl.watch_training(model, optimizer):
        call(batch).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("fault", ["", "not averaged"])
def test_gradients_evened_out_by_averaging_are_reported_and_not_named(one_and_two: gl.Session, fault: str) -> None:
    verdict = reset(one_and_two).verdict(in_shares, in_shares, args=(fault,), explain=False)
    said = "On each of the target's 2 ranks, gradients are 2 times the baseline's; computed from the baseline's, "
    if fault:
        assert said not in verdict.text
        assert "output@grad" in verdict.named
        return
    assert verdict.named == [], verdict.text
    assert verdict.text.startswith(said)
    assert set(verdict.frame["label"]) == {"clean"}
    assert (
        "Nothing that was checked adds more than rounding" in verdict.text
        or "No tap adds more than rounding" in verdict.text
    )
