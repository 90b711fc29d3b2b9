"""The manifest for Kubernetes gives every pod settings with which it joins, and no secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from graftlab.config import GraftConfig

MANIFEST = Path(__file__).parents[2] / "docs" / "jobset.yaml"


def jobs() -> list[dict[str, Any]]:
    spec: dict[str, Any] = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))["spec"]
    return list(spec["replicatedJobs"])


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_each_pod_of_the_manifest_gets_the_settings_of_its_side(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = next(each["template"]["spec"] for each in jobs() if each["name"] == side)
    (container,) = job["template"]["spec"]["containers"]
    for variable in container["env"]:
        if variable["name"] == "GRAFTLAB_TOKEN":
            assert variable["valueFrom"] == {"secretKeyRef": {"name": "graft-token", "key": "token"}}
        else:
            monkeypatch.setenv(variable["name"], variable["value"])
    config = GraftConfig.from_env()
    sizes = {"baseline": config.baseline_world_size, "target": config.target_world_size}
    assert (config.role, sizes) == (side, {"baseline": 1, "target": 2})
    assert job["completions"] == job["parallelism"] == sizes[side]
    assert config.endpoint is not None
    assert (config.endpoint.host, config.endpoint.port) == ("graft-baseline-0-0.graft", 29500)
