"""The worlds that the tests of the contract run in, once for every exchange."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.implementations import PROCESSES, WORLDS, MakeProcesses, MakeWorld
from kit.mailboxes import World


# Of module scope, so that tests with many examples may use them.
@pytest.fixture(scope="module", params=WORLDS)
def a_world(request: pytest.FixtureRequest) -> MakeWorld:
    make: MakeWorld = request.param
    return make


@pytest.fixture(scope="module", params=PROCESSES)
def processes(request: pytest.FixtureRequest) -> MakeProcesses:
    make: MakeProcesses = request.param
    return make


@pytest.fixture
def world(a_world: MakeWorld) -> Iterator[World]:
    with a_world(1, 1) as made:
        yield made.begin()
