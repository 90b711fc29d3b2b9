"""Which device and backend a rank gets, on machines with any number of GPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from graftlab.base.world import Place
from graftlab.errors import LaunchError
from graftlab.ranks.devices import assign_devices
from graftlab.ranks.trial_process import device_here

# One baseline rank and two target ranks.
PLACES = Place("baseline", 0, 1, 2).everyone()


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl", "ucc"))


@pytest.mark.parametrize(
    ("gpus", "device", "backend", "devices", "backends", "noted"),
    [
        (0, None, None, ["cpu"] * 3, ["gloo"] * 3, []),
        (2, "cpu", None, ["cpu"] * 3, ["gloo"] * 3, []),
        (3, None, None, ["cuda:0", "cuda:1", "cuda:2"], ["nccl"] * 3, []),
        # The baseline's rank and one of the target's share a GPU, and no group does.
        (2, "cuda", None, ["cuda:0", "cuda:1", "cuda:0"], ["nccl"] * 3, []),
        (1, None, None, ["cuda:0"] * 3, ["nccl", "gloo", "gloo"], [1, 2]),
        (2, "cuda:1", None, ["cuda:1"] * 3, ["nccl", "gloo", "gloo"], [1, 2]),
        (2, "cuda:1", "nccl", ["cuda:1"] * 3, ["nccl", "gloo", "gloo"], [1, 2]),
        (2, "cuda:1", "gloo", ["cuda:1"] * 3, ["gloo"] * 3, []),
        (2, "cuda:1", "ucc", ["cuda:1"] * 3, ["ucc"] * 3, []),
    ],
    indirect=["gpus"],
)
def test_ranks_are_spread_over_gpus_and_those_of_a_side_that_share_one_get_gloo(
    gpus: None, device: str | None, backend: str | None, devices: list[str], backends: list[str], noted: list[int]
) -> None:
    assignments = assign_devices(PLACES, device, backend)
    assert [assignment.device for assignment in assignments] == devices
    assert [assignment.backend for assignment in assignments] == backends
    assert [number for number, assignment in enumerate(assignments) if assignment.notes] == noted
    assert all("share one GPU" in assignments[number].notes[0] for number in noted)


@pytest.mark.parametrize("gpus", [0, 2], indirect=True)
@pytest.mark.parametrize("device", ["cuda:2", "cuda:x", "tpu"])
def test_an_unavailable_device_is_refused(gpus: None, device: str) -> None:
    with pytest.raises(LaunchError, match=f"device='{device}'"):
        assign_devices(PLACES, device, None)


def test_a_draft_is_tried_on_the_cpu_where_the_ranks_gpu_is_not_here() -> None:
    assert device_here("cpu") == "cpu"
    assert device_here(f"cuda:{torch.cuda.device_count()}") == "cpu"
