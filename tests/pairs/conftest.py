"""The public pairs, each made once; what a missing package skips says which one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator

import pytest
from kit import public_ports
from kit.ports import Port

import graftlab as gl

NEEDS: dict[str, str | None] = {
    "bert": None,
    "vit": "timm",
    "convnext": "timm",
    "llama": "litgpt",
    "clip": "open_clip",
}
_made: dict[str, Port] = {}


def public_port(name: str) -> Port:
    """The pair of this name, or a skip that says what it needs."""
    if importlib.util.find_spec("torchvision"):
        public_ports.declare_vision_operators()
    package = NEEDS[name]
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'graftlab[pairs]'")
    if name not in _made:
        make: Callable[[], Port] = getattr(public_ports, name)
        _made[name] = make()
    return _made[name]


@pytest.fixture(scope="session")
def launched() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        if importlib.util.find_spec("torchvision"):
            session.run(public_ports.declare_vision_operators, public_ports.declare_vision_operators)
        yield session
