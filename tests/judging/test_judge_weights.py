"""Verdicts where weights differ: the code is judged with the baseline's weights, and the target keeps its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import graftlab as gl

pytestmark = pytest.mark.ranks


class Shifted(nn.LayerNorm):
    """A norm whose code adds 1 to its weight, which is stored without that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, self.normalized_shape, 1 + self.weight, self.bias, self.eps)


class Rolled(nn.Linear):
    """A linear layer whose code puts the last features of its input first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.roll(4, -1), self.weight, self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 16)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factor * (x + torch.tanh(self.up(self.norm(x))))


NETS: dict[str, nn.Module] = {}


def call(fault: str) -> torch.Tensor:
    """Call a net, which is made once on each rank; on the target with a fault."""
    if fault not in NETS:
        torch.manual_seed(0)
        net = NETS[fault] = nn.Sequential(*(Block() for _ in range(3)))
        with torch.no_grad():
            for each in net:
                each.norm.weight.uniform_(0.5, 1.5)
                each.spare = nn.Linear(2, 2) if "spare" in fault else None
            if gl.here().side == "target":
                plant(fault, net)
        gl.watch(net, prefix="layers.", params=True)
    with torch.no_grad():
        result: torch.Tensor = NETS[fault](torch.linspace(-1, 1, 64).view(4, 16))
    return result


def plant(fault: str, net: nn.Sequential) -> None:
    if "scaled" in fault:
        net[1].up.weight.mul_(1.1)
    if "code" in fault:
        net[2].norm.eps = 0.1
    if "folded" in fault:
        for each in net:
            each.up.weight.mul_(each.norm.weight)
            each.norm = nn.LayerNorm(16, elementwise_affine=False)
    if "shifted" in fault:
        for each in net:
            weight, each.norm = each.norm.weight, Shifted(16)
            each.norm.weight.copy_(weight - 1)
    if "rolled" in fault:
        for each in net:
            plain, each.up = each.up, Rolled(16, 16)
            each.up.weight.copy_(plain.weight.roll(4, 1))
            each.up.bias.copy_(plain.bias)
    if "spare" in fault:
        net[1].spare.weight.mul_(2)
    if "slightly" in fault:
        net[1].norm.weight[0] *= 1 + 3e-6
    if "barely" in fault:
        net[1].up.bias[0] += 2.5e-7
    if "one norm" in fault:
        net[0].norm.weight[0] += 1e-3
    if "factor" in fault:
        net[2].factor = 1.001


def weights(fault: str) -> list[torch.Tensor]:
    return [each.detach().clone() for each in NETS[fault].parameters()]


def test_weights_that_explain_everything_are_reported_as_the_cause(session: gl.Session) -> None:
    verdict = session.verdict(call, call, args=("scaled",))
    first, *_, last = verdict.text.splitlines()
    assert first.startswith("The weights already differ: layers.*.up.weight in layer 1 (rel_l2 0.1). ")
    assert first.endswith(" With the baseline's weights the target agrees.")
    assert "culprit" not in verdict.labels.values()
    assert last.startswith("Hint (layers.*.up.weight): at layers.1.up.weight, the target's values are 1.1 times")


def test_code_is_judged_with_the_weights_of_the_baseline(session: gl.Session) -> None:
    verdict = session.verdict(call, call, args=("scaled and code",))
    first, second, *_ = verdict.text.splitlines()
    assert first.endswith("(rel_l2 0.1). Everything below was measured with the baseline's weights.")
    assert second.startswith("layers.*.norm is computed differently in layer 2 ")
    assert verdict.labels["layers.*.norm"] == "culprit"
    assert "With the baseline's layers.*.norm the output layers.output agrees (0 x its floor; " in verdict.text


def test_the_target_has_its_own_weights_again_after_a_verdict(session: gl.Session) -> None:
    session.run(call, call, args=("scaled",))
    before = session.run(weights, weights, args=("scaled",))
    session.verdict(call, call, args=("scaled",))
    after = session.run(weights, weights, args=("scaled",))
    assert not torch.equal(before.target[0][6], before.baseline[0][6])
    assert all(torch.equal(*each) for each in zip(before.target[0], after.target[0], strict=True))


def test_folded_weights_are_judged_as_each_side_has_them(session: gl.Session) -> None:
    verdict = session.verdict(call, call, args=("folded",))
    assert "with weights that already differ: layers.*.up.weight in layers 0-2" in verdict.text
    assert "layers.*.norm, layers.*.up cancel each other." in verdict.text
    assert "the baseline's weights" not in verdict.text


def test_weights_of_another_arrangement_are_not_exchanged(session: gl.Session) -> None:
    verdict = session.verdict(call, call, args=("folded and factor",))
    assert "measured with the baseline's weights" not in verdict.text
    assert verdict.labels["layers.*"] == "culprit"


@pytest.mark.parametrize(
    ("fault", "weight", "form"),
    [("shifted", "norm.weight", "minus 1"), ("rolled", "up.weight", "rolled by 4 along dim 1")],
)
def test_weights_that_are_stored_in_another_form_are_no_difference(
    session: gl.Session, fault: str, weight: str, form: str
) -> None:
    verdict = session.verdict(call, call, args=(fault,))
    assert verdict.text.startswith("No tap adds more than rounding")
    said = f"The target stores weights in another form: layers.*.{weight} (the baseline's {form}). "
    assert f"\n{said}What their modules compute from them agrees." in verdict.text
    run = session.run(weights, weights, args=(fault,))
    alike = [torch.equal(*each) for each in zip(run.baseline[0], run.target[0], strict=True)]
    assert alike.count(False) == 3


@pytest.mark.parametrize("fault", ["shifted", "rolled"])
def test_weights_of_another_form_are_no_difference_beside_wrong_code(session: gl.Session, fault: str) -> None:
    verdict = session.verdict(call, call, args=(f"{fault}, but factor",))
    first, *_ = verdict.text.splitlines()
    assert first.startswith("layers.* is computed differently in layer 2 of 0-2 (")
    assert "The target stores weights in another form: " in verdict.text
    assert "already differ" not in verdict.text


def test_a_wrong_weight_is_named_beside_weights_of_another_form(session: gl.Session) -> None:
    verdict = session.verdict(call, call, args=("shifted, but scaled",))
    first, *_ = verdict.text.splitlines()
    assert first.startswith("The weights already differ: layers.*.up.weight in layer 1 (rel_l2 0.1). ")
    assert first.endswith(" With the baseline's weights the target agrees.")
    assert "The target stores weights in another form: layers.*.norm.weight (the baseline's minus 1). " in verdict.text


@pytest.mark.parametrize("fault", ["spare", "slightly", "shifted, but spare", "shifted, but one norm"])
def test_weights_of_another_form_that_are_not_read_or_wrong_still_differ(session: gl.Session, fault: str) -> None:
    verdict = session.verdict(call, call, args=(fault,))
    assert "already differ: " in verdict.text
    assert "in another form" not in verdict.text


def test_weights_that_differ_by_little_alone_are_doubtful(
    session: gl.Session,
) -> None:
    findings = session.verdict(call, call, args=("barely",)).findings
    assert not findings.data
    assert findings.without_output[0].startswith("The weights already differ: layers.*.up.bias in layer 1")
    for more in ("barely, and code", "barely, and spare"):
        findings = session.verdict(call, call, args=(more,)).findings
        assert findings.data
        assert not findings.without_output
