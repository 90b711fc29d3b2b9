"""Held steps of optimizers: on one rank of each side, and what follows from the descriptions of several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

import graftlab as gl
from graftlab.comparison.amplified_rounding import distance
from graftlab.comparison.answers import Comparison
from graftlab.comparison.gradients import _factor, _is_unscaled, judge_gradients
from graftlab.comparison.held_updates import (
    _differing_settings,
    _fused,
    _not_taken,
    _pairs_of_states,
    _parted,
    _with_names_of_updates,
    _without_partner,
    judge_held_updates,
)
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.plan.pairs import PairRule
from graftlab.ranks.held_update import GradientWatch, HeldUpdate, TensorSample, UpdateDescription
from graftlab.ranks.holding import describe_call, hold


def model_of_test() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))


def hold_update(fault: str) -> None:
    """Train up to the step that is held: the second one where gradients may be left over, or else the first."""
    me = gl.here()
    wrong = fault if me is not None and me.side == "target" else ""
    model, watched = model_of_test(), GradientWatch()
    settings: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
    settings.update({"decay": {"weight_decay": 0.2}, "eps": {"eps": 1e-6}}.get(wrong, {}))
    kind = torch.optim.Adam if wrong == "Adam" else torch.optim.AdamW
    optimizer = kind([p for n, p in model.named_parameters() if wrong != "left out" or n != "2.weight"], **settings)
    previous: dict[str, TensorSample] = {}
    last = 2 if fault == "left over" else 1
    for number in range(1, last + 1):
        draw = torch.Generator().manual_seed(number)
        x, wanted = torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)
        watched.add_weights(model)
        result = model(x)
        watched.add_results({"call 1": result})
        loss = (result - wanted).square()
        (loss.sum() if wrong in ("sum", "sum, clipped") else loss.mean()).backward()
        if wrong == "one":
            model[2].weight.grad.mul_(3)  # type: ignore[union-attr]
        if fault in ("one", "clipped", "sum, clipped") and wrong != "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.02)
        step = partial(type(optimizer).step, optimizer)
        update = HeldUpdate(step, optimizer, {"Net": model}, watched, previous, number=number, calls=1)
        if number < last:
            update.describe()
            previous = update.gradients
            step()
            watched.begin_step()
            if wrong != "left over":
                optimizer.zero_grad()
    hold(update)


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=1, device="cpu") as session:
        yield session


def judged(session: gl.Session, fault: str) -> Comparison:
    session.run(hold_update, hold_update, args=(fault,))
    run = session.run(describe_call, describe_call)
    return judge_held_updates(Repeats(session), run.baseline, run.target, JudgingChoice(), None, {})


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "said", "named"),
    [
        ("decay", ["The optimizer's weight_decay is 0.1 on the baseline and 0.2 on the target."], "param"),
        ("eps", ["The optimizer's eps is 1e-08 on the baseline and 1e-06 on the target."], "param"),
        ("Adam", ["The optimizer is AdamW on the baseline and Adam on the target."], "optimizer param"),
        ("left out", ["The target does not train 2.weight, and the baseline does."], "param"),
        (
            "sum",
            [
                "All gradients that the optimizer reads are 24 times the baseline's.",
                "The gradients of the loss with respect to the model's results are 24 times the baseline's:",
            ],
            "",
        ),
        (
            "clipped",
            [
                "The gradients of the loss with respect to the model's results agree.",
                "After the backward passes the baseline multiplies its gradients by 0.0",
            ],
            "",
        ),
        (
            "sum, clipped",
            ["The target's gradients after the backward passes are 24 times the baseline's, and a later step divides"],
            "",
        ),
        (
            "one",
            [
                "The gradient of 2.weight (3 times the baseline's) differs apart from the factor below.",
                "The gradients of the 5 other weights are 0.",
            ],
            "param_grad",
        ),
        (
            "left over",
            ["The target's gradients are those of the baseline plus the target's own of the last update ("],
            "param_grad",
        ),
    ],
)
def test_the_difference_of_an_update_is_reported_and_nothing_else_is_named(
    session: gl.Session, fault: str, said: list[str], named: str
) -> None:
    compared = judged(session, fault)
    assert compared.answer == "differ", compared.text
    for line in said:
        assert line in compared.text, compared.text
    kinds = {group.rpartition("@")[2] for group in compared.named}
    assert kinds == set(named.split()), compared.text
    assert "eagerly" not in compared.text
    if "param" not in named.split():
        assert "From equal weights, gradients and state both sides compute the same update." in compared.text


@pytest.mark.ranks
def test_updates_that_agree_are_reported_to_agree(session: gl.Session) -> None:
    compared = judged(session, "")
    assert (compared.answer, compared.named) == ("agree", [])


def test_a_repeated_update_begins_from_the_same_state_and_leaves_it() -> None:
    model = model_of_test()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    before = [p.detach().clone() for p in model.parameters()]
    state = [v.clone() for each in optimizer.state.values() for v in each.values()]
    step = partial(torch.optim.AdamW.step, optimizer)
    held = HeldUpdate(step, optimizer, {"Net": model}, GradientWatch(), {}, number=2, calls=1)
    assert not held.describe().not_repeated
    held()
    held.end()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    left = [v for each in optimizer.state.values() for v in each.values()]
    assert all(torch.equal(a, b) for a, b in zip(state, left, strict=True))
    # The script's own step is the first one that counts.
    step()
    assert not torch.equal(before[0], model[0].weight)


def test_an_optimizer_of_two_models_and_a_loose_weight_has_names_for_all() -> None:
    one, other, loose = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters(), loose], 0.1)
    step = partial(torch.optim.SGD.step, optimizer)
    models = {"Actor": one, "Critic": other, "Frozen": nn.Linear(1, 1)}
    described = HeldUpdate(step, optimizer, models, GradientWatch(), {}, number=1, calls=1).describe()
    assert list(described.dtypes) == ["parameter_4", "Actor.weight", "Actor.bias", "Critic.weight", "Critic.bias"]
    assert described.settings["lr"] == dict.fromkeys(described.dtypes, 0.1)


def test_a_fused_step_that_unscales_by_itself_shows_unscaled_gradients() -> None:
    model, found = model_of_test(), list[UpdateDescription]()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def describe(*_: object) -> None:
        hook.remove()
        step = partial(torch.optim.AdamW.step, optimizer)
        found.append(HeldUpdate(step, optimizer, {"Net": model}, GradientWatch(), {}, number=1, calls=1).describe())

    hook = optimizer.register_step_pre_hook(describe)
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    scaler.step(optimizer)
    # The derivative of the sum by a bias is the number of rows.
    assert found[0].gradients["3.bias"].values.tolist() == [2.0] * 4
    assert not found[0].not_repeated
    assert found[0].scale == 1024.0


# ---- gradients of several ranks -------------------------------------------------------------------------------------


def description(
    gradients: dict[str, torch.Tensor], accumulated: dict[str, torch.Tensor] | None = None
) -> UpdateDescription:
    samples, before = (
        {name: TensorSample.of(gradient) for name, gradient in each.items()}
        for each in (gradients, gradients if accumulated is None else accumulated)
    )
    dtypes = dict.fromkeys(gradients, "float32")
    return UpdateDescription("SGD", 1, 1, {}, samples, before, {}, {}, dtypes, (), (), False)


def row(name: str, rank: int, baseline: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """What a comparison records of a weight's gradient: what is read of it."""
    found: dict[str, Any] = {"name": name, "rank": rank, "tags": {"kind": "param_grad"}, "nonfinite_differ": False}
    for side, tensor in (("baseline", baseline), ("target", target)):
        found[f"mean_{side}"], found[f"std_{side}"] = float(tensor.mean()), float(tensor.std(correction=0))
    apart = float((target - baseline).norm() / baseline.norm())
    return {**found, "rel_l2": apart, "numel": baseline.numel(), "dtype": "float32", "cast": None}


def gradients_of_ranks(parts: list[torch.Tensor], whole: torch.Tensor) -> Any:
    ranks = [description({"w": part}) for part in parts]
    rows = [row("w", rank, whole, part) for rank, part in enumerate(parts)]
    return judge_gradients(rows, [description({"w": whole})], ranks, {})


@pytest.mark.parametrize(("scale", "what"), [(1.0, "sum"), (2.0, "average")])
def test_ranks_that_add_up_to_the_baselines_gradient_lack_a_reduction(scale: float, what: str) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, generator=draw) for _ in range(2)]
    found = gradients_of_ranks(parts, (parts[0] + parts[1]) / scale)
    assert found.sentences[0] == (
        f"The target's ranks 0-1 {what} to the baseline's gradient of w, and each has only its part: a reduction over "
        "the ranks is missing."
    )
    # As many such gradients as the baseline's add up to as much.
    assert found.parts == (2 if what == "sum" else 1)


def test_a_missing_reduction_does_not_excuse_a_gradient_that_is_missing() -> None:
    parts = [drawn(0), drawn(1)]
    whole = replace(description({"w": parts[0] + parts[1], "v": drawn(2)}))
    ranks = [replace(description({"w": part}), without_gradient=("v",)) for part in parts]
    rows = [row("w", rank, parts[0] + parts[1], part) for rank, part in enumerate(parts)]
    found = judge_gradients(rows, [whole], ranks, {})
    assert found.sentences[0] == "The target has no gradient for v, and the baseline does."
    assert found.sentences[1].startswith("The target's ranks 0-1 sum to the baseline's gradient of w, and each has")
    assert found.parts == 0


def test_losses_are_compared_beside_a_reduction_that_a_step_may_make() -> None:
    parts = [drawn(0), drawn(1)]
    ranks = [replace(description({"w": part}), losses=(loss,)) for part, loss in zip(parts, (7.0, 9.0), strict=True)]
    whole = replace(description({"w": parts[0] + parts[1]}), losses=(2.5,))
    rows = [row("w", rank, parts[0] + parts[1], part) for rank, part in enumerate(parts)]
    found = judge_gradients(rows, [whole], ranks, {})
    assert found.parts == 2
    said = "The gradients agree, and the losses from which the backward passes begin differ: 2.5"
    assert found.losses.startswith(said)


def test_a_gradient_that_cannot_be_added_up_does_not_hide_a_missing_reduction() -> None:
    whole, parts = drawn(0), [drawn(1), drawn(2)]
    ranks, rows = [], []
    for rank, part in enumerate(parts):
        # A shard, for example.
        ranks.append(description({"a": whole[:8], "w": part}))
        rows += [row("a", rank, whole, 2 * whole), row("w", rank, parts[0] + parts[1], part)]
    found = judge_gradients(rows, [description({"a": whole, "w": parts[0] + parts[1]})], ranks, {})
    assert found.sentences[0].startswith("The target's ranks 0-1 sum to the baseline's gradient of w, and each has")


@pytest.mark.parametrize("is_reduced", [False, True])
def test_ranks_that_clip_their_parts_lack_a_reduction_unless_it_follows_the_backward(is_reduced: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(64, generator=draw) for _ in range(2)]
    whole = (parts[0] + parts[1]) / 2
    # By their own norms; or summed by the script, where the baseline has the average.
    read = [parts[0] + parts[1]] * 2 if is_reduced else [0.3 * parts[0], 0.2 * parts[1]]
    rows = [row("w", rank, 0.5 * whole, each) for rank, each in enumerate(read)]
    ranks = [description({"w": each}, {"w": part}) for each, part in zip(read, parts, strict=True)]
    found = judge_gradients(rows, [description({"w": 0.5 * whole}, {"w": whole})], ranks, {})
    assert ("a reduction over the ranks is missing" in found.sentences[0]) == (not is_reduced)


def test_copies_that_ranks_clip_differently_lack_no_reduction_and_parts_do() -> None:
    whole, parts = drawn(0), [drawn(1), drawn(2)]
    copies = {"w": whole, "v": parts[0] + parts[1]}

    def found(*own: torch.Tensor) -> Any:
        """The findings if the ranks have these parts of v, and clip by factors of their own."""
        ranks, rows = [], []
        for rank, (part, factor) in enumerate(zip(own, (0.3, 0.2), strict=True)):
            before = {"w": whole, "v": part}
            ranks.append(description({name: factor * each for name, each in before.items()}, before))
            rows += [row(name, rank, 0.5 * copies[name], factor * each) for name, each in before.items()]
        clipped = {name: 0.5 * each for name, each in copies.items()}
        return judge_gradients(rows, [description(clipped, copies)], ranks, {})

    clipped = found(copies["v"], copies["v"])
    assert not any("a reduction over the ranks is missing" in each for each in clipped.sentences)
    assert any("by different factors, 0.3 (rank 0), 0.2 (rank 1), as" in each for each in clipped.sentences)
    # A rank that changes each gradient by own factors has none, and a list without it would be misread.
    mixed = description({"w": 0.3 * whole, "v": 0.9 * copies["v"]}, copies)
    known = [description({name: factor * each for name, each in copies.items()}, copies) for factor in (0.3, 0.2)]
    rows = [row("w", rank, 0.5 * whole, factor * whole) for rank, factor in enumerate((0.3, 0.3, 0.2))]
    said = judge_gradients(rows, [description(copies)], [known[0], mixed, known[1]], {}).sentences
    assert not any("by different factors" in each for each in said)
    unreduced = found(*parts)
    assert unreduced.sentences[0].startswith("The target's ranks 0-1 sum to the baseline's gradient of v, and each has")


def test_a_reduction_is_missing_only_if_all_gradients_that_differ_lack_it() -> None:
    parts = [drawn(0), drawn(1)]
    whole, other, wrong = parts[0] + parts[1], drawn(2), drawn(3)
    rows = [
        row(name, rank, *pair) for rank in (0, 1) for name, pair in (("w", (whole, parts[rank])), ("v", (other, wrong)))
    ]
    ranks = [description({"w": part, "v": wrong}) for part in parts]
    found = judge_gradients(rows, [description({"w": whole, "v": other})], ranks, {})
    assert found.named == ("w", "v")
    assert not any("a reduction over the ranks is missing" in each for each in found.sentences)


def test_equal_halves_on_all_ranks_are_not_a_missing_reduction() -> None:
    whole = torch.randn(64, generator=torch.Generator().manual_seed(0))
    found = gradients_of_ranks([whole / 2, whole / 2], whole)
    assert found.sentences == ("The gradient of w (0.5 times the baseline's) differs.",)


def test_a_gradient_that_is_zero_but_for_rounding_is_not_blamed() -> None:
    draw = torch.Generator().manual_seed(0)
    large, noise, other = (torch.randn(64, generator=draw) for _ in range(3))
    noise, other = noise * 1e-8, other * 1e-8
    rows = [row("w", 0, large, large), row("b", 0, noise, other)]
    ours, theirs = description({"w": large, "b": noise}), description({"w": large, "b": other})
    found = judge_gradients(rows, [ours], [theirs], {})
    assert found.sentences == ()
    assert found.unseen == ("the gradients of b, which are barely above rounding noise.",)
    # Each is named once, on however many ranks it is so.
    both = [row(name, rank, *pair) for rank in (0, 1) for name, pair in (("w", (large, large)), ("b", (noise, other)))]
    assert judge_gradients(both, [ours] * 2, [theirs] * 2, {}).unseen == found.unseen
    doubled = [row("w", 0, large, large), row("b", 0, noise, 2 * noise)]
    assert judge_gradients(doubled, [ours], [description({"w": large, "b": 2 * noise})], {}).named == ("b",)
    # The same code makes similar rounding errors. A gradient that is more than a rounding error has no such excuse.
    for size, is_noise in ((1.0, True), (1e3, False)):
        mine, theirs = size * noise, size * (noise + 0.1 * other)
        similar = [row("w", 0, large, large), row("b", 0, mine, theirs)]
        found = judge_gradients(similar, [description({"b": mine})], [description({"b": theirs})], {})
        assert (found.named == ()) is is_noise
    # In 16 bits a gradient that lacks some numbers is as small.
    lacks = 1e-3 * drawn(1)
    lacks[6] = 0.0
    rows = [{**each, "dtype": "bfloat16"} for each in (row("w", 0, large, large), row("b", 0, 1e-3 * drawn(1), lacks))]
    found = judge_gradients(rows, [description({"b": 1e-3 * drawn(1)})], [description({"b": lacks})], {})
    assert found.named == ("b",)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_how_small_a_gradient_must_be_to_be_noise_follows_from_the_size_of_all(size: float) -> None:
    large, noise, other = (size * each for each in (drawn(0), drawn(1), drawn(2)))
    for part, is_noise in ((1e-8, True), (1e-5, False)):
        pairs = {"w": (large, large), "b": (part * noise, part * other)}
        rows = [row(name, 0, *pair) for name, pair in pairs.items()]
        ours, theirs = (description({name: pair[side] for name, pair in pairs.items()}) for side in (0, 1))
        found = judge_gradients(rows, [ours], [theirs], {})
        assert found.named == (() if is_noise else ("b",))
        assert bool(found.unseen) is is_noise


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_weight_that_only_one_side_trains_is_named(side: str) -> None:
    """Nothing is compared of it."""
    whole, other = drawn(0), "target" if side == "baseline" else "baseline"
    both = description({"w": whole, "v": drawn(1)})
    for lacks, said in (
        (replace(description({"w": whole}), without_gradient=("v",)), f"The {side} has no gradient for v, and the"),
        (replace(description({"w": whole}), frozen=("v",)), f"The {side} does not train v, and the"),
    ):
        ours, theirs = (lacks, both) if side == "baseline" else (both, lacks)
        found = judge_gradients([row("w", 0, whole, whole)], [ours], [theirs], {})
        assert found.sentences == (f"{said} {other} does.",)
    # Another optimizer may train it.
    lacks = replace(description({"w": whole}), frozen=("v",))
    elsewhere = replace(both, elsewhere=("v",))
    ours, theirs = (lacks, elsewhere) if side == "baseline" else (elsewhere, lacks)
    assert judge_gradients([row("w", 0, whole, whole)], [ours], [theirs], {}).sentences == ()
    # Neither has a gradient there.
    alike = replace(description({"w": whole}), without_gradient=("v",), frozen=("u",))
    assert judge_gradients([row("w", 0, whole, whole)], [alike], [alike], {}).sentences == ()


def test_a_weight_that_is_not_trained_is_not_said_to_lack_its_gradient_too() -> None:
    whole = drawn(0)
    lacks = replace(description({"w": whole}), without_gradient=("v",), frozen=("v",))
    found = judge_gradients([row("w", 0, whole, whole)], [description({"w": whole, "v": drawn(1)})], [lacks], {})
    assert found.sentences == ("The target does not train v, and the baseline does.",)


def test_the_first_gradient_of_the_backward_pass_that_differs_is_named() -> None:
    ours = {name: drawn(number) for number, name in enumerate("abcd")}

    def said(*wrong: str, absent: str = "", times: float = 1.0) -> list[str]:
        theirs = {name: drawn(9) if name in wrong else times * each for name, each in ours.items()}
        rows = [row(name, 0, ours[name], theirs[name]) for name in ours if name != absent]
        backward = description(ours, dict(reversed(ours.items())))
        found = judge_gradients(rows, [backward], [description(theirs)], {})
        return [each for each in found.sentences if "In the order of" in each]

    order = "In the order of the baseline's backward pass, the gradients agree up to"
    assert said("a", "b") == [f"{order} c, and the first that differs is that of b."]
    assert said("c") == [f"{order} d, and the first that differs is that of c."]
    # What was not compared may differ.
    assert said("a", "b", absent="c") == [f"{order} d, and the first that differs is that of b."]
    assert said("a", "b", absent="d") == [f"{order} c, and the first that differs is that of b."]
    # Nothing is known to agree before the first, nor apart from a factor.
    assert said("d", "a") == said("a", times=2.0) == said() == []


def test_a_factor_of_all_gradients_is_stated_once_and_apart_from_those_that_differ() -> None:
    ours = {name: drawn(number) for number, name in enumerate("abcd")}

    def found(**changed: torch.Tensor) -> Any:
        theirs = {name: 2.0 * each for name, each in ours.items()} | changed
        rows = [row(name, 0, ours[name], theirs[name]) for name in ours]
        return judge_gradients(rows, [description(ours)], [description(theirs)], {})

    norm = math.sqrt(sum(float(each.norm()) ** 2 for each in ours.values()))
    assert found().sentences[:2] == (
        "All gradients that the optimizer reads are 2 times the baseline's.",
        f"The norm over all of them is {norm:.4g} on the baseline and {2 * norm:.4g} on the target.",
    )
    assert (found().factor, found().named) == (2.0, ())
    # Ranks that have parts of them, as a pipeline's stages do, have parts of the norm.
    parts = [{name: ours[name] for name in names} for names in ("ab", "cd")]
    for names in (parts, [parts[0], {name: 3 * each for name, each in parts[0].items()}], [parts[0], parts[0]]):
        doubled = [{name: 2 * each for name, each in rank.items()} for rank in names]
        rows = [row(name, at, each, 2 * each) for at, rank in enumerate(names) for name, each in rank.items()]
        said = judge_gradients(rows, [*map(description, names)], [*map(description, doubled)], {}).sentences
        assert any(each.startswith("The norm over all") for each in said) is (names[0] is names[1]), said
    # A gradient without a partner may be larger by a mistake, and all others smaller by clipping.
    halves = {name: 0.5 * each for name, each in ours.items()}
    rows = [row(name, 0, ours[name], each) for name, each in halves.items()]
    clipping = "those differ, this factor may follow from clipping by the global norm."
    for more in ({"e": drawn(7)}, {}), ({}, {"f": drawn(8)}):
        (said, *_) = judge_gradients(rows, [description(ours | more[0])], [description(halves | more[1])], {}).sentences
        assert said == (
            f"All gradients that were compared are 0.5 times the baseline's. Others were not compared: if {clipping}"
        )
    one = found(d=0.5 * ours["d"])
    assert (one.factor, one.named) == (2.0, ("d",))
    assert one.sentences[:2] == (
        "The gradient of d (0.25 times the baseline's) differs apart from the factor below.",
        "The gradients of the 3 other weights are 2 times the baseline's, as when clipping by the global norm follows "
        "from the gradients above, which are shown without this factor.",
    )
    # A gradient that one side lacks is none of those with the factor.
    doubled = {name: 2.0 * each for name, each in ours.items() if name != "d"}
    rows = [row(name, 0, ours[name], each) for name, each in doubled.items()]
    lacking = judge_gradients(rows, [description(ours)], [replace(description(doubled), without_gradient=("d",))], {})
    assert lacking.sentences[0] == "The target has no gradient for d, and the baseline does."
    assert lacking.sentences[1].startswith("The gradients of the 3 other weights are 2 times the baseline's")
    two = judge_gradients(
        [row(name, 0, ours[name], drawn(9)) for name in "ab"], [description(ours)], [description(ours)], {}
    )
    assert two.sentences[0].startswith("The gradients of a (rel_l2 1.")
    assert two.sentences[0].endswith(" differ.")


def test_gradients_may_differ_by_rounding_that_the_loss_amplifies() -> None:
    noise, whole = drawn(7), drawn(0)

    def found(of_weight: torch.Tensor, of_result: torch.Tensor, ranks: int = 1) -> Any:
        ours = replace(description({"w": whole}), of_results=samples(y=drawn(2)))
        theirs = replace(description({"w": of_weight}), of_results=samples(y=of_result))
        rows = [row("w", rank, whole, of_weight) for rank in range(ranks)]
        return judge_gradients(rows, [ours], [theirs] * ranks, {})

    rounded = found(whole + 2e-4 * noise, drawn(2) + 5e-5 * noise)
    assert (rounded.sentences, rounded.named) == ((), ())
    assert "by 5.2e-05, those of the loss with respect to the model's results." in rounded.rounding
    assert rounded.rounding.startswith("The gradients of w (rel_l2 0.0002) differ, and so do, ")
    for of_weight, of_result, ranks in (
        # The loss agrees, or differs by a factor, or by far less than the weight's gradient, or too much.
        (whole + 2e-4 * noise, drawn(2), 1),
        (whole * (1 + 2e-4) + 1e-4 * noise, drawn(2) * (1 + 5e-5), 1),
        (whole + 2e-3 * noise, drawn(2) + 5e-5 * noise, 1),
        (whole + 2e-2 * noise, drawn(2) + 5e-3 * noise, 1),
        # Of ranks, none is the other side's.
        (whole + 2e-4 * noise, drawn(2) + 5e-5 * noise, 2),
    ):
        wrong = found(of_weight, of_result, ranks)
        assert (wrong.named, wrong.rounding) == (("w",), "")


def test_neither_other_rows_nor_another_result_is_rounding_that_a_loss_amplifies() -> None:
    whole, given = drawn(0), drawn(2).repeat(4, 1)
    given[1] *= 1.5e-3
    unread = given.clone()
    unread[1] = 0
    moved, of_weight = given + 5e-4 * given.flip(1), whole + 5e-4 * drawn(7)

    def found(theirs: dict[str, TensorSample], loss: float = 1.0) -> Any:
        one = replace(description({"w": whole}), of_results=samples(y=given), losses=(1.0,))
        other = replace(description({"w": of_weight}), of_results=theirs, losses=(loss,))
        return judge_gradients([row("w", 0, whole, of_weight)], [one], [other], {})

    assert found(samples(y=moved)).rounding
    assert found(samples(y=unread)).named == found(samples(y=moved, z=given)).named == ("w",)
    # Its losses are stated as what they are beside gradients that do not agree.
    wrong = found(samples(y=moved), 1.1)
    assert (wrong.named, wrong.losses) == (
        (),
        "The losses from which the backward passes begin differ, too: 1 on the baseline, 1.1 on the target.",
    )


def test_a_loss_amplifies_the_rounding_of_float64_by_as_much_as_that_of_float32() -> None:
    whole, given = drawn(0).double(), drawn(2).double()

    def found(times: float, known: dict[str, float]) -> Any:
        of_weight = whole + times * drawn(7)
        one = replace(description({"w": whole}), of_results=samples(y=given))
        other = replace(description({"w": of_weight}), of_results=samples(y=given + times * drawn(7)))
        return judge_gradients([{**row("w", 0, whole, of_weight), "dtype": "float64"}], [one], [other], known)

    assert found(1e-10, {}).named == ("w",)
    # A call that agrees has shown the backward pass.
    for known, where in (({}, "in the loss or in the backward pass."), ({"w": 1e-16}, "in the loss.")):
        assert found(1e-12, known).rounding.endswith(f" and so may a small mistake {where}")


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_gradients_that_still_have_those_of_the_last_update_are_not_set_to_zero(side: str) -> None:
    clean, last = {"w": drawn(0), "v": drawn(1)}, {"w": drawn(2), "v": drawn(3)}

    def said(**wrong: torch.Tensor) -> tuple[str, ...]:
        left = {name: clean[name] + last[name] for name in clean} | wrong
        added = replace(description({f"t.{n}": each for n, each in left.items()}), previous=samples(**last))
        added = replace(added, previous={f"t.{name}": each for name, each in added.previous.items()})
        ours, theirs = description(clean), added
        if side == "baseline":
            ours = replace(description(left), previous=samples(**last))
            theirs = description({f"t.{name}": each for name, each in clean.items()})
        pairs = {name: (left[name], clean[name]) if side == "baseline" else (clean[name], left[name]) for name in clean}
        rows = [{**row(name, 0, *pair), "target_name": f"t.{name}"} for name, pair in pairs.items()]
        return judge_gradients(rows, [ours], [theirs], {}).sentences

    other = "target" if side == "baseline" else "baseline"
    assert said()[0] == (
        f"The {side}'s gradients are those of the {other} plus the {side}'s own of the last update (w, v): they are "
        "not set to zero in between (zero_grad)."
    )
    assert not any("zero_grad" in each for each in said(v=clean["v"] + 2 * last["v"]))


def test_gradients_that_only_optimizers_show_have_no_words_on_their_origin() -> None:
    whole = drawn(0)
    bare = description({"w": whole}, {})
    assert judge_gradients([row("w", 0, whole, whole)], [bare], [bare], {}).sentences == ()
    other = description({"w": whole.flip(0)}, {})
    (said,) = judge_gradients([row("w", 0, whole, whole.flip(0))], [bare], [other], {}).sentences
    assert said.startswith("The gradient of w (rel_l2 1.")
    parts = drawn(1), drawn(2)
    ranks = [description({"w": part}, {}) for part in parts]
    rows = [row("w", rank, parts[0] + parts[1], part) for rank, part in enumerate(parts)]
    found = judge_gradients(rows, [description({"w": parts[0] + parts[1]}, {})], ranks, {})
    assert found.sentences[0].startswith("The target's ranks 0-1 sum to the baseline's gradient of w")


def test_summands_may_be_alike_on_some_ranks_and_have_one_shape() -> None:
    one, other = drawn(0), drawn(1)
    # A rank whose rows are nearly all padding has nearly nothing, and another rank nearly all.
    for parts, ranks in (([one, one, other], "0-2"), ([one, 1e-4 * other], "0-1")):
        found = gradients_of_ranks(parts, torch.stack(parts).sum(0))
        assert found.sentences[0].startswith(f"The target's ranks {ranks} sum to the baseline's gradient of w")
    whole = one + other
    ranks = [description({"w": one}), description({"w": other[:32]})]
    rows = [row("w", 0, whole, one), row("w", 1, whole, other)]
    found = judge_gradients(rows, [description({"w": whole})], ranks, {})
    assert not any("a reduction over the ranks" in each for each in found.sentences)


def test_a_difference_from_zeros_is_without_bound() -> None:
    zeros, ones = torch.zeros(3), torch.ones(3)
    assert [distance(*pair) for pair in ((zeros, zeros), (zeros, ones), (ones, zeros))] == [0.0, math.inf, 1.0]


def test_a_factor_of_half_of_the_gradients_is_not_that_of_all() -> None:
    factors = {"a": 2.0, "b": 2.0, "c": 1.0, "d": 3.0}
    ours = {name: drawn(number) for number, name in enumerate(factors)}
    theirs = {name: factors[name] * ours[name] for name in ours}
    rows = [row(name, 0, ours[name], theirs[name]) for name in ours]
    found = judge_gradients(rows, [description(ours)], [description(theirs)], {})
    assert (found.factor, found.named) == (1.0, ("a", "b", "d"))


def test_gradients_are_judged_by_those_of_an_agreeing_call() -> None:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randn(64, generator=draw)
    moved = whole + 1e-3 * torch.randn(64, generator=draw)
    args = [row("w", 0, whole, moved)], [description({"w": whole})], [description({"w": moved})]
    assert judge_gradients(*args, {"w": 5e-4}).sentences == ()
    assert judge_gradients(*args, {}).named == ("w",)
    # The model may compute in 16 bits between weights of 32 bits, on either side.
    narrow = [replace(description({"w": each}), of_results=samples(out=whole.bfloat16())) for each in (whole, moved)]
    for sides in ((narrow[0], args[2][0]), (args[1][0], narrow[1])):
        assert judge_gradients(args[0], *([each] for each in sides), {}).named == ()


@pytest.mark.parametrize(
    ("apart", "factor", "of", "dtype", "known", "is_rounding"),
    [
        (0.03, 1.0, 4, torch.bfloat16, {}, True),
        (0.1, 1.0, 4, torch.bfloat16, {}, False),
        # A factor is no rounding.
        (0.0, 1.04, 4, torch.bfloat16, {}, False),
        # Most mistakes move more than a quarter of the gradients.
        (0.03, 1.0, 3, torch.bfloat16, {}, False),
        (0.03, 1.0, 4, torch.float32, {}, False),
        (2e-5, 1.0, 4, torch.float32, {}, False),
        (0.03, 1.0, 4, torch.bfloat16, {"w0": 1e-3}, False),
    ],
)
def test_few_gradients_of_16_bits_that_differ_little_may_be_rounded(
    apart: float, factor: float, of: int, dtype: torch.dtype, known: dict[str, float], is_rounding: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    ours = {f"w{n}": torch.randn(4096, generator=draw).to(dtype) for n in range(of)}
    moved = factor * ours["w0"].float() + apart * torch.randn(4096, generator=draw)
    theirs = {**ours, "w0": moved.to(dtype)}
    name_of_dtype = str(dtype).removeprefix("torch.")
    rows = [{**row(name, 0, ours[name], theirs[name]), "dtype": name_of_dtype} for name in ours]
    found = judge_gradients(rows, [description(ours)], [description(theirs)], known)
    assert bool(found.rounding) is is_rounding
    assert bool(found.sentences) is bool(found.named) is not is_rounding
    if is_rounding:
        assert found.rounding.startswith("The gradients of w0 (rel_l2 0.03")
        # A weight without a gradient is a mistake, which may have moved others.
        more = replace(description({**ours, "v": ours["w1"]}))
        beside = judge_gradients(rows, [more], [replace(description(theirs), without_gradient=("v",))], known)
        assert (beside.rounding, beside.named) == ("", ("w0",))
        assert beside.sentences[0] == "The target has no gradient for v, and the baseline does."


@pytest.mark.parametrize(("of", "is_rounding"), [(3, False), (4, True)])
def test_a_gradient_that_differs_on_several_ranks_is_one_of_those_that_do(of: int, is_rounding: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    ours = {f"w{n}": torch.randn(4096, generator=draw).bfloat16() for n in range(of)}
    theirs = {**ours, "w0": (ours["w0"].float() + 0.03 * torch.randn(4096, generator=draw)).bfloat16()}
    rows = [{**row(name, rank, ours[name], theirs[name]), "dtype": "bfloat16"} for rank in range(2) for name in ours]
    rows[of] |= {"rel_l2": 0.025}
    found = judge_gradients(rows, [description(ours)], [description(theirs)] * 2, {})
    # It is as far apart as on the rank where it is furthest.
    assert found.rounding.startswith("The gradients of w0 (rel_l2 0.03) differ by") is is_rounding
    assert bool(found.rounding) is is_rounding


@pytest.mark.parametrize(
    ("of_loss", "clipped", "is_alarm"),
    [(100.0, False, False), (1024.0, False, False), (100.0, True, True), (1024.0, True, True)],
)
def test_a_scaled_loss_is_an_alarm_only_where_clipping_may_have_taken_the_scale_out(
    of_loss: float, clipped: bool, is_alarm: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(64, generator=draw)
    read = left * 0.37 if clipped else left
    zero = torch.zeros(64)
    rows = [row("w", 0, read, read), {**row("z", 0, read, read), **dict.fromkeys(("std_baseline", "std_target"), 0.0)}]
    rows[1] |= dict.fromkeys(("mean_baseline", "mean_target"), 0.0)
    ours, theirs = (
        replace(
            description({"w": read, "z": zero}), accumulated={"w": TensorSample.of(each), "z": TensorSample.of(zero)}
        )
        for each in (left, of_loss * left)
    )
    for found in (judge_gradients(rows, [ours], [theirs], {}), judge_gradients(rows, [theirs], [ours], {})):
        assert bool(found.sentences) == is_alarm
        assert len((*found.sentences, *found.unseen)) == 1
        assert "and a later step divides them by that factor" in (*found.sentences, *found.unseen)[0]


@pytest.mark.parametrize(("of_loss", "is_alarm"), [(0.5, True), (1.0, False)])
def test_a_factor_of_sharded_gradients_that_clipping_removes_is_reported(of_loss: float, is_alarm: bool) -> None:
    # Both sides clip; on the target each rank knows what happened to its own part alone.
    left, part = drawn(0), drawn(1)
    rows = [row("w", 0, 0.37 * left, 0.37 * left)]
    ours = description({"w": 0.37 * left}, {"w": left})
    before, after = (TensorSample.of(each) for each in (of_loss * part, 0.37 * part))
    theirs = replace(description({"w": 0.37 * left}, {}), of_shards=((before, after),))
    found = judge_gradients(rows, [ours], [theirs], {})
    said = "The target's gradients after the backward passes are 0.5 times the baseline's, and a later step divides"
    assert (bool(found.sentences), any(each.startswith(said) for each in found.sentences)) == (is_alarm, is_alarm)


def test_a_scaler_of_sharded_gradients_is_no_hidden_factor() -> None:
    left, part = drawn(0), drawn(1)
    rows = [row("w", 0, 0.37 * left, 0.37 * left)]
    ours = description({"w": 0.37 * left}, {"w": left})
    shards = ((TensorSample.of(1024 * part), TensorSample.of(0.37 * part)),)
    theirs = replace(description({"w": 0.37 * left}, {}), of_shards=shards, scale=1024.0)
    found = judge_gradients(rows, [ours], [theirs], {})
    assert (found.sentences, found.unseen) == ((), ())


@pytest.mark.parametrize(
    ("ours", "theirs", "is_unscaled"),
    [
        (2.0, 2**-9, True),
        (1.0, 0.37, True),
        (0.37, 1.0, True),
        (2.0, 0.37, False),
        (0.37, 2.0, False),
        # Clipping may happen to change little.
        (1.0005, 2.0, False),
        (2.001, 2.0, False),
        (2.0, None, False),
    ],
)
def test_a_factor_is_taken_out_exactly_by_powers_of_two_or_by_no_change(
    ours: float, theirs: float | None, is_unscaled: bool
) -> None:
    left = drawn(0)
    descriptions = [
        description({"w": left if factor is None else factor * left}, {} if factor is None else {"w": left})
        for factor in (ours, theirs)
    ]
    assert _is_unscaled(*descriptions) is is_unscaled


def test_only_samples_of_one_shape_and_direction_have_a_factor() -> None:
    one, zeros = drawn(0), torch.zeros(64)
    assert _factor(TensorSample.of(one), TensorSample.of(3 * one)) == pytest.approx(3.0)
    for other in (zeros, one[:32], -one, drawn(1)):
        assert _factor(TensorSample.of(one), TensorSample.of(other)) is None
        assert _factor(TensorSample.of(other), TensorSample.of(one)) is None


def test_another_number_of_calls_for_an_update_is_named() -> None:
    whole = torch.randn(64, generator=torch.Generator().manual_seed(0))
    ours, theirs = description({"w": whole}), replace(description({"w": 2 * whole}), calls=2)
    found = judge_gradients([row("w", 0, whole, 2 * whole)], [ours], [theirs], {})
    told = "For one update the baseline calls models once and the target 2 times."
    assert told in found.sentences
    same = judge_gradients([row("w", 0, whole, 2 * whole)], [ours], [replace(theirs, calls=1)], {})
    assert told not in same.sentences
    assert same.sentences


def test_a_sample_of_a_complex_gradient_has_its_imaginary_parts() -> None:
    one = torch.complex(torch.ones(3), torch.arange(3.0))
    sample = TensorSample.of(one)
    assert sample.values.tolist() == [1, 0, 1, 1, 1, 2]
    assert sample.norm == pytest.approx(8**0.5)
    assert sample.shape == (3,)


def test_results_with_other_numbers_on_each_side_are_not_compared_by_them() -> None:
    whole, value, entropy = drawn(0), drawn(1), drawn(2)
    ours = {"call 1[0]": whole, "call 1[1]": entropy, "call 1[2]": value, "call 1['loss']": whole}

    def said(**theirs: torch.Tensor) -> bool:
        both = (ours, {f"call {place}": each for place, each in theirs.items()})
        one, other = (replace(description({"w": whole}), of_results=samples(**each)) for each in both)
        found = judge_gradients([row("w", 0, whole, drawn(3))], [one], [other], {})
        return any(
            "The gradients of the loss with respect to the model's results differ" in each for each in found.sentences
        )

    assert not said(**{"1[0]": whole, "1[1]": value, "1['loss']": whole})
    # As many results, one that has a name, and those of another call are compared.
    assert said(**{"1[0]": whole, "1[1]": value, "1[2]": entropy, "1['loss']": whole})
    assert said(**{"1[0]": whole, "1[1]": value, "1['loss']": value})
    assert said(**{"1[0]": whole, "1[1]": value, "1[2]": value, "1['loss']": whole, "2[0]": whole})


def test_losses_that_weight_micro_batches_differently_are_distinguished() -> None:
    draw = torch.Generator().manual_seed(0)
    whole, first, second = (torch.randn(64, generator=draw) for _ in range(3))
    ours = replace(description({"w": whole}), of_results={"1": TensorSample.of(first), "2": TensorSample.of(second)})
    for factor, other, told in (
        (2.0, second, "results are 1 (1), 2 (2) times the baseline's: micro-batches or terms of the loss"),
        (1.0, second.flip(0), "differ (rel_l2 1."),
    ):
        samples = {"1": TensorSample.of(first), "2": TensorSample.of(factor * other)}
        theirs = replace(description({"w": whole.flip(0)}), of_results=samples)
        found = judge_gradients([row("w", 0, whole, whole.flip(0))], [ours], [theirs], {})
        assert sum(told in each for each in found.sentences) == 1


def test_rows_of_a_result_are_described_and_not_those_of_a_cache() -> None:
    given, cached = (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    factors = torch.tensor([1.0, 1.0, 2.0, 1.0])[:, None]
    results = [{"call 1['cache'].layers[0].keys": TensorSample.of(each)} for each in (cached, cached.flip(0))]
    for each, logits in zip(results, (given, factors * given), strict=True):
        each["call 1['logits']"] = TensorSample.of(logits)
    ours, theirs = (replace(description({"w": given}), of_results=each) for each in results)
    found = judge_gradients([row("w", 0, given, given.flip(0))], [ours], [theirs], {})
    assert any("Each row (last dim) of call 1['logits'] has its own factor there" in each for each in found.sentences)


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(64, generator=torch.Generator().manual_seed(seed))


def samples(**tensors: torch.Tensor) -> dict[str, TensorSample]:
    return {name: TensorSample.of(tensor) for name, tensor in tensors.items()}


def test_of_several_gradients_that_differ_the_furthest_comes_first() -> None:
    lost = {**row("b", 0, drawn(0), drawn(1)), "rel_l2": float("nan"), "nonfinite_differ": True}
    rows = [row("a", 0, drawn(0), drawn(1)), lost, row("c", 0, drawn(0), drawn(2))]
    (said, *_) = judge_gradients(rows, [description({})], [description({})], {}).sentences
    assert said.startswith("The gradients of b (rel_l2 inf), ")
    wrong = {"a": 0.01, "b": 0.3, "c": 0.1}
    ours = {name: drawn(number) for number, name in enumerate(wrong)}
    theirs = {name: ours[name] + size * drawn(9) for name, size in wrong.items()}
    rows = [row(name, 0, ours[name], theirs[name]) for name in ours]
    (said, *_) = judge_gradients(rows, [description(ours)], [description(theirs)], {}).sentences
    assert [said.index(f" {name} (") for name in ("b", "c", "a")] == sorted(said.index(f" {n} (") for n in "abc")
    # On several ranks each is as far apart as on the one where it is furthest.
    rows = [{**row("a", rank, ours["a"], drawn(9)), "rel_l2": apart} for rank, apart in enumerate((0.3, 0.9, 0.5))]
    (said, *_) = judge_gradients(rows, [description(ours)], [description({"a": drawn(9)})] * 3, {}).sentences
    assert said == "The gradient of a (rel_l2 0.9) differs."


@pytest.mark.parametrize(("ours", "theirs"), [(0.25, 0.5), (0.5, 0.25)])
def test_each_sides_factor_after_its_backward_passes_is_reported(ours: float, theirs: float) -> None:
    whole = {"a": drawn(0), "b": drawn(1)}

    def changed(*factors: float) -> UpdateDescription:
        gradients = {name: factor * whole[name] for name, factor in zip(whole, factors, strict=True)}
        return replace(description(gradients), accumulated=samples(**whole))

    rows = [row(name, 0, ours * each, theirs * each) for name, each in whole.items()]
    told = f"After the backward passes the baseline multiplies its gradients by {ours} and the target by {theirs}"
    found = judge_gradients(rows, [changed(ours, ours)], [changed(theirs, theirs)], {})
    assert any(each.startswith(told) for each in found.sentences), found.sentences
    # Without one factor there is none to report.
    for sides in (((ours, ours), (theirs, 3 * theirs)), ((ours, 3 * ours), (theirs, theirs))):
        mixed = judge_gradients(rows, *([changed(*factors)] for factors in sides), {})
        assert not any("After the backward passes" in each for each in mixed.sentences)


@pytest.mark.parametrize(
    ("factors", "said"),
    [
        ((2.0, 2.0), "with respect to the model's results are 2 times the baseline's"),
        ((1.0, 1.0), "with respect to the model's results agree."),
        ((2.0, 3.0), "results are 2 (x), 3 (y) times the baseline's: micro-batches or terms"),
        ((3.0, 2.0), "results are 3 (x), 2 (y) times the baseline's: micro-batches or terms"),
        ((-1.0, -1.0), "with respect to the model's results differ (rel_l2 2)"),
    ],
)
def test_gradients_of_results_differ_by_one_factor_or_by_more(factors: tuple[float, float], said: str) -> None:
    whole, results = drawn(0), {"x": drawn(1), "y": drawn(2)}
    ours = replace(description({"w": whole}), of_results=samples(**results))
    scaled = {name: factor * results[name] for name, factor in zip(results, factors, strict=True)}
    theirs = replace(description({"w": 1.5 * whole}), of_results=samples(**scaled))
    found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
    assert any(said in each for each in found.sentences), found.sentences
    # A scaler's factor is none of the loss.
    by_scaler = {name: 1024 * each for name, each in scaled.items()}
    theirs = replace(description({"w": 1.5 * whole}), of_results=samples(**by_scaler), scale=1024.0)
    of_scaled = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
    if factors != (-1.0, -1.0):
        assert [each for each in of_scaled.sentences if "results" in each] == [
            each for each in found.sentences if "results" in each
        ]


def test_the_gradient_of_a_returned_loss_does_not_show_that_the_loss_agrees() -> None:
    whole = drawn(0)
    ours, theirs = (
        replace(description({"w": scale * whole}), of_results=samples(loss=torch.ones(()))) for scale in (1.0, 1.5)
    )
    found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
    told = "The models return single numbers, such as their losses, from which the gradients differ."
    assert told in found.sentences
    assert not any("results agree" in each for each in found.sentences)


def test_a_single_number_is_all_that_was_compared_where_either_side_returns_more() -> None:
    whole, count = drawn(0), torch.tensor(3.0)
    alone, more = samples(scale=1.93 * count), samples(scale=count, x=torch.ones(4))
    told = "only those of single numbers were compared"
    for given, is_told in (((alone, more), True), ((more, alone), True), ((alone, samples(scale=count)), False)):
        ours, theirs = (
            replace(description({"w": scale * whole}), of_results=each)
            for scale, each in zip((1.0, 1.5), given, strict=True)
        )
        found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
        assert any(told in each for each in found.sentences) is is_told, found.sentences


@pytest.mark.parametrize("factor", [1.93, 2.0, 0.5])
def test_a_single_number_beside_other_results_shows_a_factor_only_if_it_is_a_count(factor: float) -> None:
    """Such as the temperature beside features, of which each rank has its part."""
    whole, count = drawn(0), torch.tensor(3.0)
    ours = replace(description({"w": whole}), of_results=samples(scale=count, x=torch.ones(4)), losses=(1.0,))
    theirs = replace(
        description({"w": 1.5 * whole}), of_results=samples(scale=factor * count, x=torch.ones(2)), losses=(3.0,)
    )
    found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
    told = "only those of single numbers were compared (scale: 1.93 times the baseline's)"
    assert any(told in each for each in found.sentences) is (factor == 1.93), found.sentences
    assert any("begin differ: 1 on the baseline, 3 on" in each for each in found.sentences) is (factor == 1.93)
    is_count = factor != 1.93
    assert any(f"results are {factor:g} times" in each for each in found.sentences) is is_count, found.sentences


@pytest.mark.parametrize(("dtype", "agree"), [(torch.float32, False), (torch.bfloat16, True)])
def test_a_factor_of_the_results_gradients_is_one_beyond_their_rounding(dtype: torch.dtype, agree: bool) -> None:
    whole, result = drawn(0), drawn(1).to(dtype)
    ours, theirs = (
        replace(description({"w": scale * whole}), of_results=samples(x=each))
        for scale, each in ((1.0, result), (1.5, (1.004 * result.float()).to(dtype)))
    )
    said = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {}).sentences
    assert ("The gradients of the loss with respect to the model's results agree." in said) is agree


@pytest.mark.parametrize(("apart", "said"), [(1e-4, "differ, too (rel_l2 0.0001)."), (1e-6, "agree.")])
def test_gradients_of_results_agree_only_to_their_rounding(apart: float, said: str) -> None:
    whole, result = drawn(0), drawn(1)
    ours = replace(description({"w": whole}), of_results=samples(x=result))
    moved = result + apart * drawn(2) * result.norm() / drawn(2).norm()
    # A scaler's factor is none of the loss.
    theirs = replace(description({"w": 1.5 * whole}), of_results=samples(x=8 * moved), scale=8.0)
    found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {}).sentences
    assert f"The gradients of the loss with respect to the model's results {said}" in found


def test_gradients_of_results_at_right_angles_have_no_factor() -> None:
    whole, axes = drawn(0), torch.eye(4)
    ours, theirs = (
        replace(description({"w": scale * whole}), of_results=samples(x=axis))
        for scale, axis in ((1.0, axes[0]), (1.5, axes[1]))
    )
    found = judge_gradients([row("w", 0, whole, 1.5 * whole)], [ours], [theirs], {})
    assert any("with respect to the model's results differ (rel_l2 1.4)" in each for each in found.sentences), (
        found.sentences
    )


# ---- what differs before an update ----------------------------------------------------------------------------------


def weight_row(
    name: str, partner: str | None = None, rel_l2: float | None = 0.0, kind: str = "param"
) -> dict[str, Any]:
    found = {"name": name, "target_name": partner, "rel_l2": rel_l2, "tags": {"kind": kind}}
    return {**found, "nonfinite_differ": 0, "dtype": "float32", "cast": None}


def test_settings_are_compared_by_pairs_of_weights() -> None:
    rows = [weight_row("w", "W"), weight_row("b"), weight_row("g", kind="param_grad")]
    ours = replace(
        description({}),
        settings={"initial_lr": {"w": 0.1, "b": 0.1}, "lr": {"w": 0.1, "b": 0.1, "g": 1}, "betas": {"w": (0.9, 0.99)}},
        dtypes={"w": "float32", "b": "float32"},
    )
    theirs = replace(
        ours,
        optimizer="Adam",
        settings={"initial_lr": {"W": 0.2, "b": 0.2}, "lr": {"W": 0.2, "b": 0.2, "g": 2}, "betas": {"W": (0.8, 0.99)}},
        dtypes={"W": "bfloat16", "b": "float32"},
    )
    assert _differing_settings(ours, theirs, rows, {}) == [
        "The optimizer's lr is 0.1 on the baseline and 0.2 on the target.",
        "The optimizer's betas are (0.9, 0.99) on the baseline and (0.8, 0.99) on the target, for w.",
        "The weights are float32 on the baseline and bfloat16 on the target: w. An update that is "
        "smaller than their rounding is lost.",
    ]
    # A scheduler's initial rate alone.
    theirs = replace(
        ours, settings={**ours.settings, "initial_lr": {"W": 0.2, "b": 0.1}}, dtypes={"W": "float32"} | ours.dtypes
    )
    assert _differing_settings(ours, theirs, rows, {}) == [
        "The optimizer's initial_lr is 0.1 on the baseline and 0.2 on the target, for w."
    ]
    # One side's optimizer has no such setting.
    theirs = replace(ours, settings={"momentum": {"W": 0.9}}, dtypes={"W": "float32", "b": "float32"})
    assert _differing_settings(ours, theirs, rows, {}) == []


def test_weights_and_states_that_differ_before_an_update_are_named_beyond_drift() -> None:
    rounding = 2.0**-24
    rows = [weight_row("w", rel_l2=90 * rounding), weight_row("b", rel_l2=300 * rounding), weight_row("n", rel_l2=None)]
    assert _parted(rows) == ["The weights already differ before this update: b."]
    # The target begins each update with the baseline's weights, so those of 16 bits are one rounding apart.
    narrow = [{**weight_row(name, rel_l2=apart), "dtype": "bfloat16"} for name, apart in (("w", 0.01), ("b", 0.05))]
    assert _parted(narrow) == ["The weights already differ before this update: b."]
    rows = [weight_row("w", rel_l2=float("nan")), weight_row("m", rel_l2=0.1, kind="optimizer")]
    assert _parted(rows) == [
        "The weights already differ before this update: w.",
        "The optimizer's state already differs before this update: m.",
    ]


def test_states_of_weights_with_other_names_are_paired_in_the_weights_layout() -> None:
    state: dict[str, tuple[int, ...]] = {"exp_avg": (2, 3), "step": (), "row": (2,), "own": (2, 3)}
    ours = replace(
        description({"w": torch.ones(2, 3), "kv": torch.ones(2, 3)}),
        states={"w": state, "kv": {"exp_avg": (2, 3), "step": ()}},
    )
    part: dict[str, tuple[int, ...]] = {"exp_avg": (1, 3), "step": ()}
    theirs = replace(
        description({"W": torch.ones(3, 2), "k": torch.ones(1, 3), "v": torch.ones(1, 3)}),
        states={"W": {"exp_avg": (3, 2), "step": (), "row": (3,)}, "k": part, "v": part},
    )
    turned = PairRule("w", "W", "a b -> b a")
    k, v = (PairRule("kv", name, f"part(dim=0, index={i}, of=[1, 1])") for i, name in enumerate("kv"))
    pairs = [PairRule("out", "OUT"), turned, k, v]
    found = _pairs_of_states(pairs, ours, theirs)
    # Moments in factors have no known layout, and a number of steps has one partner.
    assert found == [
        replace(turned, baseline="w.exp_avg", target="W.exp_avg"),
        PairRule("w.step", "W.step"),
        replace(k, baseline="kv.exp_avg", target="k.exp_avg"),
        PairRule("kv.step", "k.step"),
        replace(v, baseline="kv.exp_avg", target="v.exp_avg"),
    ]
    assert _pairs_of_states([*pairs, *found], ours, theirs) == []


@pytest.mark.parametrize("layout", ["same", "a b -> b a"])
def test_moments_in_factors_are_paired_only_for_weights_that_are_alike(layout: str) -> None:
    """Sums over the rows of a square weight are sums over the columns of its transpose."""
    states: dict[str, tuple[int, ...]] = {"row_var": (3, 1), "step": ()}
    ours, theirs = (replace(description({name: torch.ones(3, 3)}), states={name: states}) for name in ("w", "W"))
    found = _pairs_of_states([PairRule("w", "W", layout)], ours, theirs)
    factors = [PairRule("w.row_var", "W.row_var")] if layout == "same" else []
    assert found == [*factors, PairRule("w.step", "W.step")]
    # One side may keep in factors what the other has whole.
    whole = replace(ours, states={"w": {**states, "row_var": (3, 3)}})
    assert _pairs_of_states([PairRule("w", "W", layout)], whole, theirs) == [PairRule("w.step", "W.step")]
    turned = replace(theirs, states={"W": whole.states["w"]})
    assert _pairs_of_states([PairRule("w", "W", layout)], ours, turned) == [PairRule("w.step", "W.step")]


def test_a_description_has_the_states_that_the_first_step_makes() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    step = partial(torch.optim.AdamW.step, optimizer)
    held = HeldUpdate(step, optimizer, {"Net": model}, GradientWatch(), {}, number=1, calls=1)
    assert held.describe().states["weight"] == {"step": (), "exp_avg": (2, 3), "exp_avg_sq": (2, 3)}
    assert not optimizer.state


def test_inputs_that_could_not_be_grafted_are_named_once() -> None:
    frame = pd.DataFrame({"name": ["a", "b", "b", "c"], "status": ["grafted", "failed", "failed", "missing"]})
    assert _not_taken(frame) == [
        "the update from equal values for b, c: the baseline's value could not be grafted there."
    ]
    assert _not_taken(frame[:1]) == []


# ---- losses ---------------------------------------------------------------------------------------------------------


def losses_found(ours: list[list[float]], theirs: list[list[float]], factor: float = 1.0, scale: float = 1.0) -> str:
    """What is said of these losses of the ranks' backward passes, whose gradients agree after the division."""
    whole, zeros = drawn(0), torch.zeros(64)

    def ranks(losses: list[list[float]], times: float) -> list[UpdateDescription]:
        # That a gradient of zeros has no factor says nothing of the others.
        each = description({"w": whole, "z": zeros}, {"w": times * whole, "z": zeros})
        return [replace(each, losses=tuple(own), scale=scale if losses is theirs else 1.0) for own in losses]

    rows = [row("w", rank, whole, whole) for rank in range(len(theirs))]
    rows += [{**row("z", rank, zeros, zeros), "rel_l2": 0.0} for rank in range(len(theirs))]
    found = judge_gradients(rows, ranks(ours, 1.0), ranks(theirs, factor), {})
    lacks = any(not each for each in (*ours, *theirs))
    assert any(each.startswith("the losses, because") for each in found.unseen) is lacks
    assert found.sentences == () or factor != 1.0
    return found.losses


@pytest.mark.parametrize(
    ("ours", "theirs", "more"),
    [
        ([[2.5]], [[2.501]], {}),
        ([[2.5]], [[1.0, 1.5]], {}),
        # Parts of the loss are not divided by their number; the gradients are.
        ([[2.5]], [[2.0, 3.0]], {}),
        # A scaler's factor is taken out of the gradients.
        ([[2.5]], [[2560.0]], {"factor": 1024.0, "scale": 1024.0}),
        # So is a sum in place of a mean of two, which a later step halves.
        ([[2.5]], [[5120.0]], {"factor": 2048.0, "scale": 1024.0}),
        # Each rank has its part of the batch, or of the sum, or all.
        ([[2.5]], [[2.0], [3.0]], {}),
        ([[2.5]], [[2.0], [0.5]], {}),
        ([[2.5]], [[2.5], [2.5]], {}),
        ([[2.5]], [[]], {}),
    ],
)
def test_losses_that_parts_ranks_and_scalers_explain_agree(
    ours: list[list[float]], theirs: list[list[float]], more: dict[str, float]
) -> None:
    assert losses_found(ours, theirs, **more) == ""


def test_losses_of_models_that_round_to_16_bits_may_differ_by_that() -> None:
    whole = drawn(0)
    ours, theirs = (replace(description({"w": whole}, {"w": whole}), losses=(loss,)) for loss in (2.5, 2.52))
    rows = [row("w", 0, whole, whole)]
    assert judge_gradients(rows, [ours], [theirs], {}).losses
    inside = [replace(each, of_results=samples(out=whole.bfloat16())) for each in (ours, theirs)]
    assert judge_gradients(rows, inside[:1], [theirs], {}).losses == ""
    assert judge_gradients(rows, inside[:1], inside[1:], {}).losses == ""


@pytest.mark.parametrize("theirs", [[[2.6]], [[1.0, 1.6]], [[2.1], [3.1]], [[float("nan")]], [[2560.0]]])
def test_losses_that_nothing_explains_are_reported_beside_equal_gradients(theirs: list[list[float]]) -> None:
    said = losses_found([[2.5]], theirs)
    assert said.startswith("The gradients agree, and the losses from which the backward passes begin differ: 2.5 on")


def test_small_losses_differ_unless_rounding_explains_them() -> None:
    assert losses_found([[5e-4]], [[2e-4]])
    assert losses_found([[3e-6]], [[-2e-6]]) == ""


def test_the_numbers_from_which_the_scripts_backward_passes_begin_are_noted() -> None:
    watched, model = GradientWatch(), nn.Linear(2, 1)
    original = torch.autograd.backward
    watched.install()
    try:
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        watched.is_paused = True
        model(torch.ones(1, 2)).sum().backward()
        watched.is_paused = False
        # No number, so no loss.
        model(torch.ones(2, 2)).backward(torch.ones(2, 1))
        # Whose factor is in the gradient.
        model(torch.ones(1, 2)).sum().backward(torch.tensor(0.5))
    finally:
        watched.remove()
    assert torch.autograd.backward is original
    # Code that has replaced the function since then calls the watch, which notes nothing any more.
    watched.install()
    inner = torch.autograd.backward
    torch.autograd.backward = lambda *args, **kwargs: inner(*args, **kwargs)
    try:
        watched.remove()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.autograd.backward is not original
    finally:
        torch.autograd.backward = original
    assert watched.losses == [loss.item()]
    step = partial(torch.optim.SGD.step, optimizer := torch.optim.SGD(model.parameters(), 0.1))
    described = HeldUpdate(step, optimizer, {"Net": model}, watched, {}, number=1, calls=1).describe()
    assert described.losses == (loss.item(),)
    watched.begin_step()
    assert watched.losses == []


def test_a_factor_explains_a_weight_only_if_it_does_on_every_rank() -> None:
    ours = {name: drawn(number) for number, name in enumerate("abc")}
    factors = {"a": (2.0, 2.0), "b": (2.0, 3.0), "c": (1.0, 1.0)}
    ranks = [{name: each[rank] * ours[name] for name, each in factors.items()} for rank in (0, 1)]
    rows = [row(name, rank, ours[name], ranks[rank][name]) for name in ours for rank in (0, 1)]
    found = judge_gradients(rows, [description(ours)], [description(each) for each in ranks], {})
    assert (found.factor, found.named) == (1.0, ("a", "b"))


def test_gradients_that_are_zero_show_no_common_factor() -> None:
    ours = {name: drawn(number) for number, name in enumerate("abcde")}
    theirs = {name: 2 * ours[name] if name in "ab" else drawn(9 + ord(name)) for name in ours}
    zeros = {name: torch.zeros(64) for name in ("x", "y", "z")}
    of_zeros = [{**row(name, 0, ours["a"], ours["a"]), "mean_baseline": 0.0, "std_baseline": 0.0} for name in zeros]
    of_zeros = [{**each, "mean_target": 0.0, "std_target": 0.0, "rel_l2": 0.0} for each in of_zeros]
    rows = [*(row(name, 0, ours[name], theirs[name]) for name in ours), *of_zeros]
    found = judge_gradients(rows, [description(ours | zeros)], [description(theirs | zeros)], {})
    assert (found.factor, found.named) == (1.0, tuple("abcde"))


def test_losses_beside_gradients_that_differ_are_compared_if_no_results_are() -> None:
    whole, wrong = drawn(0), drawn(1)
    rows = [row("w", 0, whole, wrong)]
    ours = replace(description({"w": whole}), losses=(2.0,))
    for loss, how in ((2.5, "differ"), (2.0001, "hardly differ, apart from a factor for ranks or passes")):
        found = judge_gradients(rows, [ours], [replace(description({"w": wrong}), losses=(loss,))], {})
        shown = f"2 on the baseline, {loss} on the target"
        assert found.sentences[1:] == (f"The losses from which the backward passes begin {how}: {shown}.",)
    assert len(judge_gradients(rows, [ours], [description({"w": wrong})], {}).sentences) == 1


def test_pairs_of_calls_give_way_to_equal_names_of_weights_in_an_update() -> None:
    weights = {name: torch.ones(2) for name in ("model.w", "model.v", "head")}
    ours, whole = description(weights), description(weights)
    of_part = description({"w": torch.ones(2), "v": torch.ones(2)})
    pairs = [PairRule("model.w", "w"), PairRule("model.v", "v"), PairRule("model.norm", "norm")]
    assert _with_names_of_updates(pairs, ours, whole) == pairs[2:]
    assert _with_names_of_updates(pairs, ours, of_part) == pairs
    # Weights that are swapped have their names on both sides, and values that pair them.
    swapped = [PairRule("model.w", "model.v"), PairRule("model.v", "model.w")]
    assert _with_names_of_updates(swapped, ours, whole) == swapped
    # A weight of calls that no update of the target has keeps its pair.
    only_ours = [PairRule("head", "out")]
    assert _with_names_of_updates(only_ours, ours, of_part) == only_ours


def test_the_settings_of_a_weight_that_one_side_has_fused_are_those_of_the_whole() -> None:
    pairs = [PairRule("kv", name, f"part(dim=0, index={i}, of=[1, 1])") for i, name in enumerate("kv")]
    ours, theirs = description({"kv": torch.ones(4)}), description({name: torch.ones(2) for name in "kv"})
    ours = replace(ours, settings={"weight_decay": {"kv": 0.1}})
    theirs = replace(theirs, settings={"weight_decay": {"k": 0.1, "v": 0.0}})
    fused = _fused([*pairs, PairRule("x", "X")], ours)
    assert fused == {"k": "kv", "v": "kv"}
    rows = [{"name": n, "target_name": n, "tags": {"kind": kind}} for n in "kv" for kind in ("param", "param_grad")]
    assert _differing_settings(ours, theirs, rows, fused) == [
        "The optimizer's weight_decay is 0.1 on the baseline and 0.0 on the target, for v."
    ]
    assert _without_partner([ours], [theirs], rows, True, fused) == []
    # The other part may have no gradient.
    theirs = replace(theirs, gradients={"k": theirs.gradients["k"]})
    assert _without_partner([ours], [theirs], rows[:2], True, fused) == [
        "The gradients of 1 of the baseline's 1 weights were not compared, because no weight of the target has the "
        "same name or values: kv."
    ]
