"""A real JupyterLab in a real Chromium: the fixtures of the browser tests.

A test module takes them with ``pytest_plugins = ["kit.browser"]`` and the marker ``browser``, after
``pytest.importorskip("pytest_playwright")``. ``lab`` is what a test talks to. The server and the browser page behind
it are shared, because loading JupyterLab takes longer than most tests. So is the kernel, while it comes clean out of
each test: where graftlab was imported and ranks were launched before, the next launch takes no time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit import notebooks, warm
from kit.deadline import DEADLINE
from kit.support import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "graftlab-tests"
ADDRESS = re.compile(r"(http://127\.0\.0\.1:\d+)/lab")

# Where the notebook of the page in front is, as JupyterLab's own code would reach it.
SESSION = "window.jupyterapp?.shell.currentWidget?.sessionContext"

# The texts of the notebook's outputs.
OUTPUTS = "[...document.querySelectorAll('.jp-OutputArea-output')].map(each => each.textContent)"

# Whether a kernel has done it in time, and without an exception.
EXECUTE = """async ([id, code, limit]) => {
    const connection = window.jupyterapp.serviceManager.kernels.connectTo({ model: { id, name: 'python3' } });
    const late = new Promise(resolve => setTimeout(resolve, limit));
    const done = connection.requestExecute({ code, silent: true }).done.catch(() => null);  // its kernel has ended
    const reply = await Promise.race([done, late]);
    connection.dispose();
    return reply?.content.status === 'ok';
}"""
# All that is open in the main area is closed but one notebook of the kernel, whose cells are replaced.
EMPTY = """([id, content]) => {
    const open = [...window.jupyterapp.shell.widgets('main')];
    const kept = open.length === 1 && open[0].sessionContext?.session?.kernel?.id === id ? open[0] : null;
    open.forEach(widget => widget === kept || widget.dispose());
    kept?.context.model.fromJSON(content);
}"""
# Gives a notebook that EMPTY left these cells.
FILL = """content => {
    const notebook = window.jupyterapp.shell.currentWidget;
    if (!notebook?.context) return false;
    notebook.context.model.fromJSON(content);
    notebook.content.activeCellIndex = 0;
    notebook.content.mode = 'command';
    notebook.activate();
    return true;
}"""
# What a test leaves behind in the kernel.
CLEAN_UP = """
import gc as _gc, sys as _sys
if "graftlab.session" in _sys.modules:
    for _each in _gc.get_objects():
        if type(_each) is _sys.modules["graftlab.session"].Session and not _each.closed:
            _each.close()
if "ipywidgets" in _sys.modules:
    _sys.modules["ipywidgets"].Widget.close_all()
get_ipython().run_line_magic("reset", "-f")
import gc as _gc
_gc.freeze()  # What stays need not be looked through after each test.
"""


@dataclass
class Server:
    """A running JupyterLab. ``folder`` is where its notebooks lie, and the folder that their kernels start in."""

    process: warm.Running
    folder: Path
    address: str = ""
    shared_kernel: str = ""
    log: list[str] = field(default_factory=list)
    ready: threading.Event = field(default_factory=threading.Event)

    def read_log(self, output: int) -> None:
        for line in os.fdopen(output):
            self.log.append(line)
            if (found := ADDRESS.search(line)) and not self.address:
                self.address = found[1]
                self.ready.set()
        self.ready.set()  # it has ended

    def listens(self) -> bool:
        port = int(self.address.rpartition(":")[2])
        with socket.socket() as tries:
            return tries.connect_ex(("127.0.0.1", port)) == 0

    def request(self, method: str, path: str, /, **body: str) -> Any:
        asked = urllib.request.Request(
            f"{self.address}/api/{path}",
            json.dumps(body).encode() if body else None,
            method=method,
            headers={"Authorization": f"token {TOKEN}"},
        )
        with urllib.request.urlopen(asked, timeout=DEADLINE) as answer:
            return json.loads(answer.read() or "null")

    def kernel(self) -> str:
        """The kernel that tests have one after the other, or a new one where that has ended."""
        if self.shared_kernel not in self.running():
            self.shared_kernel = self.request("POST", "kernels", name="python3", path="")["id"]
        return self.shared_kernel

    def running(self) -> set[str]:
        return {kernel["id"] for kernel in self.request("GET", "kernels")}

    def end_kernels(self, but: str = "") -> None:
        for kernel in self.running() - {but}:
            self.request("DELETE", f"kernels/{kernel}")


@pytest.fixture(scope="session")
def lab_server() -> Iterator[Server]:
    """JupyterLab on a port that the system picks, with no settings but those of a new user."""
    # Short, because sockets lie in it.
    top = Path(tempfile.mkdtemp(prefix="gl-lab-"))
    for name in ("config/labconfig", "data", "runtime", "ipython", "notebooks"):
        (top / name).mkdir(parents=True)
    settings = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
    (top / "config" / "labconfig" / "page_config.json").write_text(json.dumps(settings))
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(top / "config"),
        "JUPYTER_DATA_DIR": str(top / "data"),
        "JUPYTER_RUNTIME_DIR": str(top / "runtime"),
        "IPYTHONDIR": str(top / "ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        # Without Node, which JupyterLab would ask where to download extensions from, for a second of the processor.
        "PATH": str(Path(sys.executable).parent),
    }
    command = [
        *("-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--port=0"),
        *(f"--IdentityProvider.token={TOKEN}", "--LabApp.expose_app_in_browser=True"),
        f"--ServerApp.root_dir={top / 'notebooks'}",
    ]
    if os.geteuid() == 0:
        command.append("--allow-root")
    reads, tells = os.pipe()
    # Its kernels are warm, and the forkservers of their ranks.
    how = {"children": True, "prepare": "kit.kernels.start_warm", "start_new_session": True}
    process = warm.start(command, environment, cwd=top, stdout=tells, stderr=tells, **how)
    os.close(tells)
    server = Server(process, top / "notebooks")
    reader = threading.Thread(target=server.read_log, args=(reads,), daemon=True)
    reader.start()
    try:
        server.ready.wait(DEADLINE)
        if not server.address:
            pytest.fail("JupyterLab did not start:\n" + "".join(server.log[-30:]))
        # It writes its address before it listens.
        wait_until(server.listens, "JupyterLab listens")
        yield server
        server.end_kernels()
    finally:
        process.terminate()
        try:
            process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join(DEADLINE)
        shutil.rmtree(top, ignore_errors=True)


@dataclass
class Lab:
    """One browser page on the shared server, and the notebook that is open in it."""

    page: Page
    server: Server
    pictures: Path | None
    console_errors: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where the kernel starts: a relative path in a cell is a file here."""
        return self.server.folder

    def open(self, *cells: str) -> None:
        """Open a notebook with these code cells, and wait until its kernel is idle."""
        if self.page.evaluate(FILL, notebooks.document(*cells)):
            self.wait_idle()
            return
        name = f"test{len(list(self.folder.glob('*.ipynb')))}.ipynb"
        notebooks.write(self.folder / name, *cells)
        self.command("docmanager:open", path=name, kernel={"id": self.server.kernel(), "name": "python3"})
        self.wait_idle()

    def close(self) -> None:
        """Close what is open without saving, clean up in its kernel, and go back to the light theme.

        The empty notebook of a shared kernel stays for the next test: a new one takes half a second.
        """
        shared = self.server.shared_kernel
        self.page.evaluate(EMPTY, [shared, notebooks.document("")])
        is_clean = shared in self.server.running() and self.page.evaluate(EXECUTE, [shared, CLEAN_UP, DEADLINE * 1000])
        self.server.end_kernels(but=shared if is_clean else "")
        self.use_theme("JupyterLab Light")

    def reload(self) -> None:
        """Load the page anew, with what was saved of the notebook; the kernel continues.

        JupyterLab waits two seconds for a widget's state, and then shows an error in its place for good. On a busy
        machine that is too short, so the page is loaded again, as a person would.
        """
        self.command("docmanager:save")
        name = self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        for _ in range(3):
            self.console_errors.clear()
            # Without the saved layout, which would open the notebook as well, some time later.
            self.page.goto(f"{self.server.address}/lab/tree/{name}?token={TOKEN}&reset")
            self.wait_idle()
            self.wait_for(f"() => {OUTPUTS}.length > 0 && !{OUTPUTS}.includes('Loading widget...')")
            if not any("model not found" in text for text in self.page.evaluate(f"() => {OUTPUTS}")):
                return

    def notebook_path(self) -> Path:
        """Where the notebook in front lies."""
        return self.folder / str(self.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path"))

    def reopen(self) -> None:
        """Close the notebook in front and open what was saved of it, with no kernel that knows of its widgets."""
        name = self.notebook_path().name
        self.page.evaluate("() => [...window.jupyterapp.shell.widgets('main')].forEach(widget => widget.dispose())")
        self.command("docmanager:open", path=name)
        self.wait_for("() => window.jupyterapp.shell.currentWidget?.content?.widgets?.length > 0")
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        self.wait_for(f"() => {SESSION}?.kernelDisplayStatus === 'idle'")

    def wait_busy(self) -> None:
        """Wait until the kernel is executing something."""
        self.page.wait_for_function(f"() => {SESSION}?.kernelDisplayStatus === 'busy'")

    def run_all(self, wait: bool = True) -> None:
        """Run every cell; with ``wait=False`` come back while they run."""
        self.command("notebook:run-all-cells", wait)

    def run_cell(self, number: int, wait: bool = True) -> None:
        """Run one cell, counted from 0."""
        self.page.evaluate(f"() => {{ window.jupyterapp.shell.currentWidget.content.activeCellIndex = {number}; }}")
        self.command("notebook:run-cell", wait)

    def command(self, name: str, wait: bool = True, **arguments: Any) -> None:
        """Execute a command of JupyterLab's, as its menus do."""
        self.page.evaluate(
            """async ([name, wait, given]) => {
                const done = window.jupyterapp.commands.execute(name, given);
                if (wait) await done;
            }""",
            [name, wait, arguments],
        )

    def execution_counts(self) -> list[int | None]:
        """The number in the brackets beside each code cell."""
        counts: list[int | None] = self.page.evaluate(
            "() => window.jupyterapp.shell.currentWidget.content.widgets.map(cell => cell.model.executionCount ?? null)"
        )
        return counts

    def use_theme(self, name: str) -> None:
        """``"JupyterLab Light"`` or ``"JupyterLab Dark"``."""
        light = "false" if "Dark" in name else "true"
        # A change reloads all style sheets, also where it changes nothing.
        if self.page.locator(f"body[data-jp-theme-light='{light}']").count() == 0:
            self.command("apputils:change-theme", theme=name)
            self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")

    def wait_for(self, condition: str, argument: Any = None) -> None:
        """Wait until this function of JavaScript returns true. At each frame it would be called a hundred times."""
        self.page.wait_for_function(condition, arg=argument, polling=50)

    def screenshot(self, name: str, of: Locator | None = None) -> None:
        """Keep a picture of the page, or of one element, where pictures are asked for."""
        keep_picture(of or self.page, self.pictures, name)


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """The folder for pictures to look at, which GRAFTLAB_SCREENSHOTS names: each takes a third of a second."""
    return Path(folder) if (folder := os.environ.get("GRAFTLAB_SCREENSHOTS")) else None


def keep_picture(of: Page | Locator, folder: Path | None, name: str) -> None:
    if folder is not None:
        of.screenshot(path=folder / f"{name}.png")


@pytest.fixture(scope="session")
def lab_page(browser: Browser, lab_server: Server) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    page = context.new_page()
    page.set_default_timeout(DEADLINE * 1000)
    page.goto(f"{lab_server.address}/lab?token={TOKEN}&reset")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('docmanager:open')", polling=50)
    page.evaluate("() => Promise.all([window.jupyterapp.restored, window.jupyterapp.allPluginsActivated])")
    yield page
    context.close()


@pytest.fixture
def lab(lab_page: Page, lab_server: Server, pictures: Path | None) -> Iterator[Lab]:
    """JupyterLab with nothing open; what the test opens is closed after it."""
    lab = Lab(lab_page, lab_server, pictures)

    def listen(message: ConsoleMessage) -> None:
        if message.type == "error":
            lab.console_errors.append(message.text)

    lab_page.on("console", listen)
    yield lab
    lab_page.remove_listener("console", listen)
    lab.close()


@pytest.fixture(scope="session")
def _shared_page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def empty_page(_shared_page: Page) -> Page:
    """A new document, with nothing of the test before, in a page that is shared: a new page takes half a second."""
    _shared_page.emulate_media(color_scheme="light")
    _shared_page.goto("about:blank")
    _shared_page.mouse.move(0, 0)
    return _shared_page


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Keep a picture of the page on which a test has failed, and say where it is."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("lab")
    if report.when == "call" and report.failed and lab is not None:
        folder = lab.pictures or Path(tempfile.mkdtemp(prefix="gl-pictures-"))
        path = folder / ("failed_" + re.sub(r"\W+", "_", item.name) + ".png")
        lab.page.screenshot(path=path)
        report.sections.append(("the page", f"{path}\nerrors in its console: {lab.console_errors}"))
    return report
