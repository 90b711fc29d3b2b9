"""What ``gl.Ray`` refuses before it needs a cluster, and how `%graft up` makes one."""

from __future__ import annotations

import importlib.util

import pytest
from IPython.core.error import UsageError
from kit.refusals import exactly

import graftlab as gl
from graftlab.magics import command_line
from graftlab.magics.magics import _cluster_of


def cluster_of(line: str) -> gl.Ray | None:
    return _cluster_of(command_line.parse(f"up {line}")[1])


def test_up_makes_the_cluster_that_its_options_say() -> None:
    assert cluster_of("--on ray:auto") == gl.Ray("auto", resources={"GPU": 1})
    assert cluster_of("--on ray://head:10001 --gpus-per-rank 0.5") == gl.Ray("ray://head:10001", {"GPU": 0.5})
    assert cluster_of("--on ray:head:6379 --gpus-per-rank 0") == gl.Ray("head:6379", {"CPU": 1})
    assert cluster_of("--baseline 2") is None


@pytest.mark.parametrize("options", ["--on head:6379", "--on ray:", "--on ray://", "--gpus-per-rank -1"])
def test_up_refuses_a_value_that_is_not_a_cluster(options: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        command_line.parse(f"up {options}")


def test_gpus_of_ranks_are_refused_without_a_cluster() -> None:
    with pytest.raises(
        UsageError, match=exactly("%graft up --gpus-per-rank: is for ranks on a cluster; add --on, or choose --device")
    ):
        cluster_of("--gpus-per-rank 1")


@pytest.mark.parametrize(
    "given",
    [
        {"placement": "close"},
        {"resources": {}},
        {"resources": {"GPU": 0}},
        {"resources": {"GPU": -1}},
        {"resources": {"GPU": float("inf")}},
        {"listen": "::"},
    ],
)
def test_values_that_no_cluster_can_use_are_refused(given: dict[str, object]) -> None:
    with pytest.raises(gl.LaunchError, match=next(iter(given))):
        gl.Ray(**given)  # type: ignore[arg-type]


def test_without_ray_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        gl.DependencyError,
        match=exactly(
            "ranks on a Ray cluster need ray, which is not installed; `pip install 'graftlab[ray]'` installs it"
        ),
    ):
        gl.launch(on=gl.Ray())
