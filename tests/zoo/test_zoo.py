"""The zoo: its specimens are what they say, and a verdict names those of a sample, and all of them in the soak."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from kit import warm

from graftlab.zoo import scoring
from graftlab.zoo.controls import CONTROLS
from graftlab.zoo.faults import FAULTS, math_of, weights_of
from graftlab.zoo.model import Config, Math, Model, RankShard, make_weights

# One of each regime, of each kind of cause, and controls that cancel or are in another dtype.
SAMPLE = [
    *("other_theta", "positions_from_zero", "norms_mixed_up", "values_gradient_halved"),
    *("up_columns_swapped", "routers_gradient_not_summed"),
    *("all_positions_shifted", "norm_folded_into_weights", "half_precision_fused_norm", "tensor_parallel"),
]


def test_the_zoo_has_the_promised_number_of_uniquely_named_specimens() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    promised = re.search(r"on (\d+) planted mistakes .*?\sand\s(\d+) benign variants", readme, re.DOTALL)
    assert promised is not None
    assert promised.groups() == (str(len(FAULTS)), str(len(CONTROLS)))
    assert len({each.name for each in FAULTS}) == len(FAULTS)
    assert len({each.name for each in CONTROLS}) == len(CONTROLS)


def test_every_fault_has_a_truth_and_no_control_has_one() -> None:
    assert all(each.truth for each in FAULTS)
    assert not any(each.truth for each in CONTROLS)


def test_faults_in_the_forward_pass_move_the_logits_and_controls_do_not() -> None:
    config = Config()
    tokens, weights = scoring.make_tokens(config), make_weights(config)
    wanted = Model(Math(config), weights)(tokens)

    def off(specimen: object) -> float:
        own = Model(math_of(specimen)(config, RankShard()), weights_of(specimen, weights))  # type: ignore[arg-type]
        return float((own(tokens) - wanted).norm() / wanted.norm())

    with torch.no_grad():
        unmoved = [each.name for each in FAULTS if each.regime == "forward" and off(each) < 1e-5]
        moved = [each.name for each in CONTROLS if each.regime == "forward" and off(each) > 1e-5]
    assert (unmoved, moved) == ([], [])


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_sample_is_named_exactly() -> None:
    found = list(scoring.score(names=SAMPLE))
    assert sorted(each.specimen.name for each in found) == sorted(SAMPLE)
    wrong = {each.specimen.name: (each.labels, each.text) for each in found if not each.exact or each.alarm}
    assert wrong == {}
    assert not any(each.innocents for each in found)
    # Two runs and the floor, before anything is swapped.
    assert {each.runs for each in found if not each.labels} == {3}


@pytest.mark.ranks
def test_the_command_prints_the_score() -> None:
    command = warm.start(["-m", "graftlab", "zoo", "--only", "embedding"], os.environ, forkserver=True)
    out, err = command.communicate(timeout=110)
    assert command.returncode == 0, err
    assert "named exactly" in out
    assert "1 benign controls: 0 alarms" in out


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_the_whole_zoo_is_named_and_no_control_raises_an_alarm() -> None:
    found = list(scoring.score())
    assert {each.specimen.name for each in found} == {each.name for each in (*FAULTS, *CONTROLS)}
    wrong = {each.specimen.name: each.labels for each in found if not each.exact or each.innocents or each.alarm}
    assert wrong == {}, scoring.summary(found)
