"""What every test shares: run folders in a temporary place, no network, and where the browser is."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Real ranks share the machine, so an example's time says nothing; in CI the same examples run each time.
settings.register_profile("graftlab", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("graftlab")


# A shell that starts its command in the background has it ignore these, and processes that tests start would inherit
# that: SIGQUIT would not end them.
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def sealed_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set for the kernels and ranks that tests start, which inherit the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFTLAB_HOME", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # IPython warns where this names another environment than the one that runs the tests.
        patch.delenv("VIRTUAL_ENV", raising=False)
        yield


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium; playwright's own is a download."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on PATH: install the system's package named chromium")


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any], chromium: str) -> dict[str, Any]:
    args = ["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
    if os.geteuid() == 0:
        args.append("--no-sandbox")  # Chromium refuses to run as root with its sandbox
    return {**browser_type_launch_args, "executable_path": chromium, "args": args}
