"""What every test shares: run folders in a temporary place, no network, the browser, and who may start processes."""

from __future__ import annotations

import gc
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from kit import grammar, warm
from kit.examples import factor, scaled

if TYPE_CHECKING:
    import graftlab as gl

grammar.leave_out()
# Set before torch is imported, for workers and for what they start. The workers of pytest fill the cores already: more
# threads of torch would spend their time waiting for each other. Tests of threads set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Older releases of torch start processes to compile with, whatever the backend.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Real ranks share the machine, so an example's time says nothing; in CI the same examples run each time.
unhurried: Any = {"max_examples": scaled(60), "deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("graftlab", **unhurried, derandomize="CI" in os.environ)
settings.register_profile("fuzz", **unhurried, print_blob=True)
settings.load_profile("fuzz" if factor() > 1 else "graftlab")


# A shell that starts its command in the background has it ignore the first two of these, and nohup the third. Processes
# that tests start would inherit that: SIGQUIT would not end them.
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Not the compiler, which ranks of code that is not compiled do without.
IMPORTED_BY_TESTS = (
    *("pytest", "hypothesis", "pandas", "pyarrow.parquet", "matplotlib.figure", "jupyter_client"),
    # With these the notebook's side of a verdict and a comparison, a quarter of a second.
    *("graftlab.comparison.held_calls", "graftlab.comparison.command", "graftlab.requests"),
)


@pytest.fixture(scope="session", autouse=True)
def sealed_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set for the kernels and ranks that tests start, which inherit the environment."""
    from graftlab.ranks import forkserver  # imports torch, which only those need who run tests

    # Or each rank would take a second to import DTensors, and as long for what the module of a test's function imports.
    forkserver.PRELOADED += ["torch.distributed.tensor.parallel", *IMPORTED_BY_TESTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFTLAB_HOME", str(tmp_path_factory.mktemp("runs")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # IPython warns where this names another environment than the one that runs the tests.
        patch.delenv("VIRTUAL_ENV", raising=False)
        yield


@pytest.fixture(scope="module")
def launched(request: pytest.FixtureRequest) -> Iterator[gl.Session]:
    """One rank a side, or the ``RANKS`` of the module, whose tests share them. ``session`` resets their plan."""
    import graftlab as gl  # imports torch later

    with gl.launch(*getattr(request.module, "RANKS", (1, 1))) as session:
        yield session


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    from kit.support import reset

    return reset(launched)


@pytest.fixture(scope="session")
def chromium() -> str:
    """The path of the system's Chromium; playwright's own is a download."""
    # The shell has no windows, and takes a sixth less of the processor.
    for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on PATH: install the system's package chromium-headless-shell or chromium")


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args: dict[str, Any], chromium: str) -> dict[str, Any]:
    args = ["--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"]
    if os.geteuid() == 0:
        args.append("--no-sandbox")  # Chromium refuses to run as root with its sandbox
    return {**browser_type_launch_args, "executable_path": chromium, "args": args}


# ---- what the garbage collector looks at -----------------------------------------------------------------------------
# Torch and its like make a million objects that stay. Looked through again and again, they took a fifth of the time.


def pytest_collection() -> None:
    gc.disable()


# ---- in which order --------------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in a browser first: one worker has them all, or each would start a JupyterLab, a browser and a kernel."""
    items.sort(key=lambda item: item.get_closest_marker("browser") is None)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()
    # What a test leaves may be collected more rarely, too: a test of what is freed collects by itself.
    gc.set_threshold(5000, 20, 100)


# ---- who starts processes -------------------------------------------------------------------------------------------

MAY_START_PROCESSES = ("ranks", "browser", "soak")
_running: list[pytest.Item] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start a process in a test that is not marked for it, so that ``make test-fast`` stays what it says."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        warm.share()
    start, popen, warm_start = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__, warm.start

    def guarded_start(self: Any) -> None:
        _require_marker(f"the process {self.name}")
        start(self)

    def guarded_popen(self: Any, args: Any, *more: Any, **options: Any) -> None:
        # Libraries look for fonts and the like by small programs, once; only another Python is what takes its time.
        if sys.executable in str(args):
            _require_marker(f"{args}")
        popen(self, args, *more, **options)

    def guarded_warm_start(arguments: Any, *more: Any, **options: Any) -> warm.Running:
        _require_marker(f"{arguments}")
        return warm_start(arguments, *more, **options)

    warm.start = guarded_warm_start
    multiprocessing.process.BaseProcess.start = guarded_start  # type: ignore[method-assign]
    subprocess.Popen.__init__ = guarded_popen  # type: ignore[method-assign]


def _require_marker(what: str) -> None:
    if _running and not any(_running[-1].get_closest_marker(name) for name in MAY_START_PROCESSES):
        raise AssertionError(f"{_running[-1].nodeid} starts {what}: mark it with @pytest.mark.ranks")
