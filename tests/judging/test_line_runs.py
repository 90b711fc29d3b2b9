"""A verdict's lines of source: the right one, confirmed by a graft of its operation alone; none without a fault."""

from __future__ import annotations

import gc
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graftlab as gl
from graftlab.control.verdicts import Verdict
from graftlab.grafting import active
from graftlab.lines import operations
from graftlab.lines.fingerprints import Fingerprint
from graftlab.ranks import line_tracer

pytestmark = pytest.mark.ranks


class Attention(nn.Module):
    """Attention with queries and keys that are rotated by position; ``wrong`` is its fault."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.wrong = wrong
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        for weight in self.parameters():
            weight.data = torch.randn(weight.shape, generator=generator) / 4

    def rotated(self, x: Tensor) -> Tensor:
        theta = 5e5 if "theta" in self.wrong else 1e4
        frequency = theta ** (-torch.arange(4) / 4)
        angle = torch.arange(6.0)[:, None] * frequency
        first, second = x.chunk(2, -1)
        return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (2, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = self.rotated(q), self.rotated(k)
        scores = q @ k.mT * (0.3 if "scale" in self.wrong else 1 / math.sqrt(8))
        mixed = scores.softmax(-1) @ v
        joined: Tensor = self.o(mixed.transpose(1, 2).flatten(-2))
        return joined


class FusedAttention(Attention):
    """The same with torch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (2, 8)).transpose(1, 2) for w in (self.q, self.k, self.v))
        scale = 0.3 if "scale" in self.wrong else None
        mixed = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, scale=scale)
        return self.o(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def on_target() -> bool:
    me = gl.here()
    assert me is not None
    return me.side == "target"


def run(wrong: str) -> Tensor:
    """Two blocks over an input that is given; the target is wrong in the second."""
    is_target = on_target()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    kind = FusedAttention if is_target and "fused" in wrong else Attention
    model = nn.Sequential(kind(), kind(wrong if is_target else ""))
    with torch.no_grad(), gl.watch(model):
        return model(x)  # type: ignore[no-any-return]


def lines(verdict: Verdict, side: str = "target") -> list[tuple[str, bool]]:
    """The source of each line of a side, and whether it is confirmed."""
    frame = verdict.lines[verdict.lines["side"] == side]
    assert {Path(file).name for file in frame["file"]} <= {Path(__file__).name}
    return list(zip(frame["source"], frame["confirmed"], strict=True))


def test_the_line_is_confirmed_and_stands_below_the_sentence_that_it_explains(session: gl.Session) -> None:
    verdict = session.verdict(run, run, args=("scale",))
    assert lines(verdict)[0] == ('scores = q @ k.mT * (0.3 if "scale" in self.wrong else 1 / math.sqrt(8))', True)
    assert verdict.lines["operation"].iloc[0] == "mul(f32[2, 2, 6, 6], 0.3)"
    said = verdict.text.splitlines()
    place = next(n for n, line in enumerate(said) if line.startswith("The values first differ here"))
    assert said[place - 1].startswith(
        "The model's member 1 of 0-1 is computed differently, between q, k, v and o (o itself"
    )
    assert said[place].endswith("with the baseline's value there, the tap agrees:")
    assert said[place + 1].startswith(f"  target    {Path(__file__).name}:")
    assert said[place + 2].startswith(f"  baseline  {Path(__file__).name}:")
    assert session.plan.b2t is None


def test_no_rank_imports_the_compiler_for_code_that_does_not_use_it() -> None:
    def has_compiler() -> bool:
        return "torch._dynamo" in sys.modules

    with gl.launch(1, 1) as session:
        before = session.run(has_compiler, has_compiler)
        if before.baseline[0] or before.target[0]:
            pytest.skip("the ranks come from a process that has imported torch's compiler")
        assert session.verdict(run, run, args=("scale",)).lines["confirmed"].any()
        # Unwritten memory is looked for where nothing is named.
        assert not session.verdict(run, run, args=("",)).named
        after = session.run(has_compiler, has_compiler)
    assert (after.baseline, after.target) == ([False], [False])


def run_many(wrong: str) -> Tensor:
    """Six blocks; the target's fourth is wrong."""
    blocks = [Attention(wrong if on_target() and place == 3 else "") for place in range(6)]
    model = nn.Sequential(*blocks)
    with torch.no_grad(), gl.watch(model, prefix="many."):
        return model(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1)))  # type: ignore[no-any-return]


def kept_names() -> set[str]:
    grafter = active.grafter()
    assert grafter is not None
    return {str(tags["name"]) for tags in grafter.kept.tags()}


def test_a_verdict_keeps_pairs_only_of_the_layer_that_it_looks_at(session: gl.Session) -> None:
    assert session.verdict(run_many, run_many, args=("scale",)).named
    (names,) = session.run(target=kept_names).target
    assert any(name.startswith("many.3") for name in names)
    assert not {name for name in names if name.startswith(tuple(f"many.{place}" for place in (0, 1, 4, 5)))}


def count_fingerprints() -> None:
    me, real = gl.here(), operations.fingerprint
    assert me is not None
    counts: list[int] = []
    me.vars["fingerprints"], me.vars["real fingerprint"] = counts, real

    def counted(value: Tensor, **options: Any) -> Fingerprint:
        counts[-1] += 1
        return real(value, **options)

    class Counted(operations.OperationRecorder):
        def __init__(self, only: frozenset[int] | None = None) -> None:
            super().__init__(only)
            counts.append(0)

    me.vars["real recorder"] = line_tracer.OperationRecorder
    operations.fingerprint, line_tracer.OperationRecorder = counted, Counted  # type: ignore[misc,assignment]


def counted_fingerprints() -> list[int]:
    me = gl.here()
    assert me is not None
    operations.fingerprint = me.vars.pop("real fingerprint")
    line_tracer.OperationRecorder = me.vars.pop("real recorder")  # type: ignore[misc]
    counts: list[int] = me.vars.pop("fingerprints")
    return counts


def test_a_run_that_confirms_a_line_reads_the_values_that_lead_to_the_tap_alone(session: gl.Session) -> None:
    session.run(count_fingerprints, count_fingerprints)
    try:
        verdict = session.verdict(run_many, run_many, args=("scale",))
    finally:
        counted = session.run(counted_fingerprints, counted_fingerprints)
    assert any(confirmed for _, confirmed in lines(verdict))
    for first, *confirming in (*counted.baseline, *counted.target):
        assert confirming
        assert all(count < first / 2 for count in confirming)


def repeat_by_value(wrong: str) -> Tensor:
    """As many operations follow the first line as its result is large; on the target, too few."""
    x = gl.tap("x", torch.linspace(1, 2, 24).view(4, 6))
    x = x * (1.4 if on_target() and wrong else 3.0)
    for _ in range(int(x.max())):
        x = (x + 0.25).sin() + 2
        x = x.cos() * 3
    return gl.tap("out", x)


def test_a_line_is_confirmed_where_more_operations_follow_it_then(session: gl.Session) -> None:
    verdict = session.verdict(repeat_by_value, repeat_by_value, args=("scale",))
    assert lines(verdict)[0] == ("x = x * (1.4 if on_target() and wrong else 3.0)", True)


def recorders() -> int:
    return sum(type(each).__name__ == "OperationRecorder" for each in gc.get_objects())


def test_a_rank_keeps_nothing_of_the_operations_that_it_traced(session: gl.Session) -> None:
    session.run(gc.collect, gc.collect)
    session.run(gc.disable, gc.disable)
    try:
        assert len(session.verdict(run, run, args=("scale",)).lines)
        counted = session.run(recorders, recorders)
    finally:
        session.run(gc.enable, gc.enable)
    assert (counted.baseline, counted.target) == ([0], [0])


def test_a_fused_call_is_named_beside_the_lines_that_it_replaces(session: gl.Session) -> None:
    verdict = session.verdict(run, run, args=("fused scale",))
    assert "scale=0.3" in verdict.lines["operation"].iloc[0]
    assert lines(verdict, "baseline")[0][0].startswith("scores = q @ k.mT * (")


def test_two_faults_in_one_module_are_both_found_and_confirmed_together(session: gl.Session) -> None:
    verdict = session.verdict(run, run, args=("theta scale",))
    assert [source for source, confirmed in lines(verdict) if confirmed] == [
        "frequency = theta ** (-torch.arange(4) / 4)",
        'scores = q @ k.mT * (0.3 if "scale" in self.wrong else 1 / math.sqrt(8))',
    ]


def test_right_implementations_have_no_lines(session: gl.Session) -> None:
    verdict = session.verdict(run, run, args=("fused",))
    assert (verdict.named, len(verdict.lines)) == ([], 0)


class Scaled(torch.autograd.Function):
    """The identity, with half the gradient, and three quarters of it on the target."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return gradients[0] * (0.75 if on_target() else 0.5)


def backward() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2)).requires_grad_()
    hidden = gl.tap("hidden", x.tanh() * 1, grad=True)
    out: Tensor = Scaled.apply(hidden).sin()  # type: ignore[no-untyped-call]
    gl.tap("out", out, grad=True).sum().backward()  # type: ignore[no-untyped-call]


def test_a_wrong_gradient_has_the_line_of_the_backward_function(session: gl.Session) -> None:
    verdict = session.verdict(backward, backward)
    assert verdict.named == ["hidden@grad"]
    assert lines(verdict)[0] == ("return gradients[0] * (0.75 if on_target() else 0.5)", True)


class Normed(torch.autograd.Function):
    """Divides by the root of the mean square, with a backward pass by hand; ``keeps`` is what it saves for that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keeps: str) -> Tensor:
        by = x.square().mean(-1, keepdim=True).rsqrt()
        kept = by * 1.25 if keeps == "wrong" else by
        ctx.save_for_backward(x, kept)
        return x * by

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, by = ctx.saved_tensors
        normed = x * by
        return by * (gradients[0] - normed * (gradients[0] * normed).mean(-1, keepdim=True)), None


def residual_stream(fault: str) -> None:
    """Two blocks around a stream that is tapped only beside them, so gradients have two ways; on the target a fault."""
    wrong = fault if on_target() else ""
    weight = torch.nn.Parameter(torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) / 4)
    x = gl.tap("x", torch.randn(4, 16, generator=torch.Generator().manual_seed(4)).requires_grad_(), grad=True)
    for layer in range(2):
        attended = gl.tap(f"{layer}.attended", x @ weight, grad=True)
        x = x + attended
        normed = Normed.apply(x, "wrong" if wrong == "saves" else "right")  # type: ignore[no-untyped-call]
        clamped = normed.clamp(-1, 1)
        normed = clamped if wrong == "clamps" else normed + (clamped - normed).detach()
        if wrong == "halves":
            normed.register_hook(lambda gradient: gradient * 0.5)
        x = x + gl.tap(f"{layer}.mixed", normed @ weight, grad=True)
    loss = gl.tap("out", x, grad=True).square().mean()
    if wrong == "twice":
        loss.backward(retain_graph=True)
    loss.backward()
    gl.tap("weight", weight.grad, kind="param_grad")


@pytest.mark.parametrize(
    ("fault", "source"),
    [
        ("clamps", "clamped = normed.clamp(-1, 1)"),
        ("halves", "normed.register_hook(lambda gradient: gradient * 0.5)"),
        ("saves", 'kept = by * 1.25 if keeps == "wrong" else by'),
        ("twice", "loss.backward()"),
    ],
)
def test_a_mistake_of_the_backward_pass_has_its_line_in_each_group(
    fault: str, source: str, session: gl.Session
) -> None:
    verdict = session.verdict(residual_stream, residual_stream, args=(fault,))
    on = verdict.lines[verdict.lines["side"] == "target"]
    first = on.groupby("group", sort=False)["source"].first()
    # Also where the error arrives by the stream, to which no graft reaches.
    assert len(first)
    assert set(first) == {source}, verdict.text


def decode() -> None:
    """Four steps with a state; from the third on the target forgets to add."""
    state = torch.zeros(8)
    for step in range(4):
        x = gl.tap("x", torch.linspace(0, 1, 8) * (step + 1))
        late = on_target() and step >= 2
        state = gl.tap("state", x * 0.5 if late else x * 0.5 + state.cos())
        gl.step()


def test_a_call_that_differs_in_some_steps_is_traced_in_such_a_step(session: gl.Session) -> None:
    verdict = session.verdict(decode, decode)
    assert set(verdict.lines["step"]) <= {2, 3}
    assert lines(verdict, "baseline")[0][0] == 'state = gl.tap("state", x * 0.5 if late else x * 0.5 + state.cos())'


def test_the_lines_of_one_tap_need_no_verdict(session: gl.Session) -> None:
    found = session.lines("1.o", run, run, args=("scale",))
    assert found.frame["side"].tolist() == ["target", "baseline"]
    assert found.frame["confirmed"].tolist() == [True, False]
    assert "mul(f32[2, 2, 6, 6], 0.3)" in found.text
    assert "<mark>" in found._repr_mimebundle_()["text/html"]
    # Of the same call: what adds nothing has no lines.
    right = session.lines("0", run, run, args=("scale",))
    assert (right.text, len(right.frame)) == (
        "'0' adds no more than rounding: from equal inputs, both sides compute the same.",
        0,
    )

    def nothing() -> Tensor:
        return gl.tap("h", torch.full((8,), math.nan))

    with pytest.raises(gl.SessionError, match="'h' has no pair of finite numbers"):
        session.lines("h", nothing, nothing)
    with pytest.raises(gl.SessionError, match=r"no tap '1\.vv' was measured .* did you mean '1\.v'"):
        session.lines("1.vv", run, run, args=("scale",))


def test_lines_of_a_cell_are_shown_among_those_around_them(session: gl.Session) -> None:
    session.execute(
        """
        import torch
        class Scaled(torch.nn.Module):
            def forward(self, x):
                by = 2.0 if gl.here().side == "baseline" else 2.5
                scaled = x * by
                return scaled.sin()
        scaled = torch.nn.ModuleDict({"scaled": Scaled()})
        watched = gl.watch(scaled)
        """.replace("\n        ", "\n")
    )
    page = session.lines("scaled", "scaled.scaled(torch.ones(16))", "scaled.scaled(torch.ones(16))")
    shown = page._repr_mimebundle_()["text/html"]
    assert shown.count("<mark>") == shown.count("return scaled.sin()") == 2


def tagged_calls(wrong: int) -> list[Tensor]:
    """A tap in each of five calls under tags; the target scales the scores wrongly in one."""
    is_target = on_target()
    out = []
    for t in range(5):
        with gl.tags(t=t):
            x = gl.tap("x", torch.randn(4, 8, generator=torch.Generator().manual_seed(t)))
            scores = x @ x.T
            if is_target and t == wrong:
                scores = (scores * 1.5) * 0.9
            out.append(gl.tap("mixed", scores.softmax(-1) @ x))
    return out


def test_a_line_is_confirmed_by_the_call_that_was_wrong_and_no_other(session: gl.Session) -> None:
    verdict = session.verdict(tagged_calls, tagged_calls, args=(3,))
    assert verdict.named == ["mixed"]
    # Both factors stand on one line, which is left out as a whole; in the other calls the tap agreed anyway.
    assert lines(verdict)[0] == ("scores = (scores * 1.5) * 0.9", True)
    assert "(only the target does this)" in verdict.text
    assert verdict.lines["is_only_here"].iloc[0]


def stages(wrong: str) -> Tensor:
    """Two stages; the target lacks a line of the first, or shows a value once more than the baseline."""
    x = gl.tap("x", torch.randn(4, 8, generator=torch.Generator().manual_seed(4)))
    hidden = x.tanh()
    if not (on_target() and wrong == "lacks"):
        hidden = hidden * hidden.abs().mean(-1, keepdim=True)
    first = gl.tap("first", hidden.softmax(-1) + 1)
    second = gl.tap("norm", F.layer_norm(first, (8,)))
    if on_target() and wrong == "twice":
        second = gl.tap("norm", second.exp())
    return gl.tap("out", second @ x.T)


def test_a_line_that_the_target_lacks_is_confirmed_on_the_baseline(session: gl.Session) -> None:
    verdict = session.verdict(stages, stages, args=("lacks",))
    assert lines(verdict, "baseline")[0] == ("hidden = hidden * hidden.abs().mean(-1, keepdim=True)", True)
    assert not any(confirmed for _, confirmed in lines(verdict))
    assert "The values first differ here; with this operation added the tap agrees:" in verdict.text
    assert "(the target lacks this)" in verdict.text


def test_an_extra_call_of_the_target_is_part_of_the_difference(session: gl.Session) -> None:
    verdict = session.verdict(stages, stages, args=("twice",))
    assert verdict.named == ["out"]
    assert lines(verdict)[0] == ('second = gl.tap("norm", second.exp())', True)


# ---- a few numbers of many, in low precision ------------------------------------------------------------------------


def one_wrong_logit() -> Tensor:
    h = gl.tap("h", torch.linspace(-1, 1, 32 * 64).sin().view(32, 64).bfloat16())
    logits = h @ torch.linspace(-1, 1, 64 * 256).cos().view(64, 256).bfloat16()
    if gl.here().side == "target":
        logits[3, 100] += logits.abs().max()
    return gl.tap("logits", logits * 1)


class Bucketed(nn.Module):
    """A table of relative positions, with buckets that fit it; on the target with those of both directions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(8, 6), nn.Linear(6, 6)

    def bucket(self, distance: Tensor) -> Tensor:
        size, first = 8, torch.zeros_like(distance)
        if on_target():
            size = size // 2
            first = first + (distance > 0).long() * size
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        large = size // 2 + ((distance.float().clamp(min=1) / (size // 2)).log() / math.log(4) * (size // 2)).long()
        return first + torch.where(distance < size // 2, distance, large.clamp(max=size - 1))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(6)
        return self.out(x + self.table(self.bucket(place - place[:, None])).sum(1))  # type: ignore[no-any-return]


def bucketed() -> Tensor:
    model = Bucketed().eval()
    with torch.no_grad(), gl.watch(model):
        return model(torch.linspace(-1, 1, 36).reshape(6, 6))  # type: ignore[no-any-return]


def test_a_value_that_makes_the_code_raise_confirms_no_line_and_ends_no_search(session: gl.Session) -> None:
    verdict = session.verdict(bucketed, bucketed)
    assert verdict.named == ["table"]
    assert "results are missing" not in verdict.text
    assert not verdict.lines["confirmed"].any()


def test_one_wrong_number_in_low_precision_changes_the_output_and_has_a_line(session: gl.Session) -> None:
    """Over the whole tensor it is less than rounding adds."""
    verdict = session.verdict(one_wrong_logit, one_wrong_logit)
    row = verdict.frame[verdict.frame["name"] == "logits"].iloc[0]
    assert row["added"] < 5 * row["floor"]
    assert verdict.labels["logits"] == "culprit"
    assert "without changing the output" not in verdict.text
    assert "still agrees" not in verdict.text
    assert "Run eagerly" not in verdict.text
    assert len(verdict.lines)
