"""Ranks on a Ray cluster of a head and two workers: found mistakes, deaths, and what is left; and jobs inside Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit import namespaces

pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(2400)]

SCRIPTS = Path(__file__).with_name("scripts")


def tell(story: str) -> None:
    """Run this script, which starts a cluster."""
    pytest.importorskip("ray", reason="needs ray: pip install 'graftlab[ray]'")
    # On a machine that does other work, the head's first process takes longer than Ray gives it by default.
    namespaces.run(SCRIPTS / story, RAY_USAGE_STATS_ENABLED="0", RAY_gcs_server_port_wait_time_s="300")


def test_a_ray_cluster_runs_a_session_survives_deaths_and_gets_all_back() -> None:
    tell("ray_story.py")


def test_a_stale_cache_of_a_rollout_engine_inside_ray_is_found() -> None:
    tell("ray_rollout_story.py")


def test_the_notebook_finds_its_mistake_on_its_own_cluster_and_leaves_nothing() -> None:
    tell("ray_notebook_story.py")
