"""Scripts that know nothing of graftlab, attached by the environment or the command alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import warm
from kit.job_scripts import SCRIPTS, end, environment, start, variables

import graftlab as gl

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def torchrun(ranks: int, *command: str, **extra: str) -> warm.Running:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return warm.start([*launcher, *command], environment(extra), children=True)


def test_an_unmodified_script_joins_under_torchrun_with_two_ranks_against_one(tmp_path: Path) -> None:
    told = {"run_dir": tmp_path, "watch": "True", "timeout": 120}
    script = str(SCRIPTS / "train.py")
    one = start("train.py", command=("-m", "graftlab", "attach"), **variables("baseline", 1, 2, **told))
    two = torchrun(2, "-m", "graftlab", "attach", script, **variables("target", 1, 2, **told))
    for job in (one, two):
        code, out, err = end(job)
        assert code == 0, err
        assert "trained" in out
    frame = gl.load_run(tmp_path)
    # Each call is a step, and names are those of the model that DDP wraps.
    assert set(frame["name"]) == {"output", "0", "1", "2"}
    assert set(frame["step"]) == {0, 1, 2}
    assert len(frame) == 4 * 3 * 2
    assert set(frame["status"]) == {"compared"}
    assert set(frame["aligned_by"]) == {"slice dim=0"}
    assert frame["rel_l2"].max() < 1e-6


def test_a_changed_weight_is_found_at_its_module(tmp_path: Path) -> None:
    more = {f"watch_{each}": 1 for each in ("params", "inputs", "grads", "optimizer")}
    told = {"run_dir": tmp_path, "watch": "name != 'output'", "watch_functions": "linear", **more, "timeout": 120}
    jobs = [
        start("train.py", command=("-m", "graftlab", "attach"), **variables("baseline", 1, 1, **told)),
        start("train.py", "wrong", command=("-m", "graftlab", "attach"), **variables("target", 1, 1, **told)),
    ]
    for job in jobs:
        code, _, err = end(job)
        assert code == 0, err
    frame = gl.load_run(tmp_path)
    outputs = frame[frame["kind"].isna() & ~frame["name"].str.startswith("linear")]
    first = outputs[outputs["step"] == 0].set_index("name")["rel_l2"]
    assert set(first.index) == {"0", "1", "2"}
    assert first["1"] == 0.0
    assert first["2"] > 1e-2
    # In every step, the first included: its call had begun before the model was known.
    weights, linear = {"0.weight", "0.bias", "2.weight", "2.bias"}, {f"linear.in[{each}]" for each in range(3)}
    for step in range(3):
        taps = frame[frame["step"] == step]
        names = {kind: set(of_kind["name"]) for kind, of_kind in taps.groupby(taps["kind"].fillna(""))}
        assert names[""] == {"0", "1", "2", "linear.out", *linear}
        assert names["input"] == {"input.input"}
        assert names["grad"] == names[""]
        assert names["param"] == names["param_grad"] == weights
        assert "optimizer.lr" in names["optimizer"]
    assert frame[frame["name"] == "optimizer.lr"]["rel_l2"].min() == 1


def test_an_unmodified_trainer_joins_just_by_its_environment(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed, which transformers' Trainer needs")
    told = {"run_dir": tmp_path / "run", "watch": "'layer' in name and type != 'Dropout'", "timeout": 120}
    jobs = [
        start(
            "train_with_trainer.py",
            tmp_path / role,
            kind,
            imports=warm.TRANSFORMERS,
            command=("-m", "graftlab", "attach"),
            **variables(role, 1, 1, **told),
        )
        for role, kind in (("baseline", "right"), ("target", "wrong"))
    ]
    for job in jobs:
        code, out, err = end(job)
        assert code == 0, err
        assert "trained" in out
    frame = gl.load_run(tmp_path / "run")
    assert set(frame["step"]) == {0, 1}
    assert set(frame["status"]) == {"compared"}
    first = frame[(frame["step"] == 0) & (frame["rel_l2"] > 1e-6)].iloc[0]
    assert first["name"] == "bert.encoder.layer.1.attention.output.LayerNorm"
