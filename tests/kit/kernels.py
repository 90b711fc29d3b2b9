"""A real Jupyter kernel that tests type cells into, as a notebook does."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from kit import grammar, warm
from kit.deadline import DEADLINE

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Reply:
    """What came of one cell. ``error`` is the text that the notebook shows below it; ``shown`` one dict a display."""

    stdout: str = ""
    stderr: str = ""
    error_name: str = ""
    error: str = ""
    shown: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def values(self) -> list[str]:
        return [data["text/plain"] for data in self.shown]


class Kernel:
    """``run`` types a cell and waits for it; ``begin`` and ``finish`` are its halves.

    ``temporary`` is where the kernel, and whatever it starts, puts its temporary files.
    """

    def __init__(self, manager: KernelManager, client: BlockingKernelClient, temporary: Path) -> None:
        self.manager = manager
        self.client = client
        self.temporary = temporary

    @property
    def pid(self) -> int:
        pid: int = self.manager.provisioner.process.pid
        return pid

    def run(self, cell: str) -> Reply:
        return self.finish(self.begin(cell))

    def begin(self, cell: str) -> str:
        message: str = self.client.execute(cell)
        return message

    def finish(self, message: str, until: Callable[[Reply], object] | None = None) -> Reply:
        """Collect what a cell shows to its end, or until ``until`` says that it has shown enough."""
        reply = Reply()
        while until is None or not until(reply):
            report = self.client.get_iopub_msg(timeout=DEADLINE)
            kind, content = report["msg_type"], report["content"]
            if report["parent_header"].get("msg_id") != message:
                continue
            if kind == "stream":
                setattr(reply, content["name"], getattr(reply, content["name"]) + content["text"])
            elif kind in ("execute_result", "display_data"):
                reply.shown.append(content["data"])
            elif kind == "update_display_data":
                reply.updates.append(content["data"])
            elif kind == "error":
                reply.error_name = content["ename"]
                reply.error = _COLOURS.sub("", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                break
        return reply

    def converse(self, cell: str, answers: list[str]) -> tuple[Reply, list[str]]:
        """Run a cell that asks with ``input()``; what it came to, and the prompts that were answered."""
        message = self.begin(cell)
        prompts = []
        for answer in answers:
            asked = self.client.get_stdin_msg(timeout=DEADLINE)
            prompts.append(asked["content"]["prompt"])
            self.client.input(answer)
        return self.finish(message), prompts

    def complete(self, code: str) -> list[str]:
        """What the Tab key offers at the end of ``code``."""
        answer = self.client.complete(code, len(code), reply=True, timeout=DEADLINE)
        matches: list[str] = answer["content"]["matches"]
        return matches


class WarmProvisioner(LocalProvisioner):
    """Starts a kernel as a fork of a process that has imported torch: any kernel, once it is the default."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        cwd = kwargs.get("cwd")
        env = {"JPY_PARENT_PID": str(os.getpid()), **kwargs["env"]}  # as jupyter_client gives it
        how = {"cwd": cwd, "start_new_session": True, "imports": env.pop(IMPORTS, "").split()}
        how["forkserver"] = not env.pop(COLD, "")
        how["children"] = bool(env.pop(CHILDREN, ""))
        with open(os.devnull, "w") as nowhere:
            self.process = warm.start(cmd[1:], env, stdout=nowhere, stderr=nowhere, **how)
        # Of the group that it is about to make, or a signal to the kernel would reach what it is forked from.
        self.pid = self.pgid = self.process.pid
        self.cwd = cwd or Path.cwd()
        return self.connection_info


PROVISIONER = "graftlab-warm"
# A variable of a kernel's environment: more modules that it, and the forkserver of its ranks, have imported before.
IMPORTS = "GRAFTLAB_TESTS_IMPORTS"
# A second kernel: its forkserver starts as a user's does.
COLD = "GRAFTLAB_TESTS_COLD"
# A third: scripts that its cells start have imported torch before, too.
CHILDREN = "GRAFTLAB_TESTS_CHILDREN"


def start_warm() -> None:
    """Let all kernels that this process starts be warm."""
    grammar.leave_out()  # in a JupyterLab that begins with this
    factory = KernelProvisionerFactory.instance()
    factory.provisioners[PROVISIONER] = EntryPoint(
        PROVISIONER, f"{__name__}:WarmProvisioner", KernelProvisionerFactory.GROUP_NAME
    )
    factory.default_provisioner_name = PROVISIONER


@contextlib.contextmanager
def kernel(**environment: str) -> Iterator[Kernel]:
    """A kernel with these variables in its environment, and a separate folder for its temporary files."""
    start_warm()
    # Short, because sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="gl-") as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        own = {"TMPDIR": str(temporary), "IPYTHONDIR": f"{folder}/ipython", "JUPYTER_RUNTIME_DIR": folder}
        manager = KernelManager(kernel_name="python3", transport="ipc", connection_file=f"{folder}/kernel.json")
        manager.start_kernel(env={**os.environ, **own, **environment})
        client = manager.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=DEADLINE)
            yield Kernel(manager, client, temporary)
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
