"""``graftlab doctor``: what an installation has, what it lacks, and the command that fixes it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from graftlab.base.world import MAX_RANKS
from graftlab.control.run_folder import home
from graftlab.diffs import kernel
from graftlab.ranks.descriptors import MEMORY_FILES

_PACKAGES = ("torch", "numpy", "pandas", "pyarrow", "ipywidgets", "anywidget", "jupyterlab", "transformers", "triton")
_LAB_EXTENSIONS = {"@jupyter-widgets/jupyterlab-manager": "jupyterlab-widgets", "anywidget": "anywidget"}
_SPARE_DESCRIPTORS = 128
"""Descriptors that a notebook's kernel uses for other things."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    ``remedy`` is a command or an instruction, for what is missing; ``needed`` tells whether graftlab fails without it.
    """

    subject: str
    found: str
    remedy: str | None = None
    needed: bool = False

    def __str__(self) -> str:
        mark = "ok" if self.remedy is None else ("!!" if self.needed else " !")
        line = f"{mark} {self.subject:<18}{self.found}"
        return line if self.remedy is None else f"{line}\n{'':21}{self.remedy}"


def run(_: argparse.Namespace) -> int:
    """Print the report. Returns 1 where something is missing that graftlab needs, 0 otherwise."""
    found = findings()
    sys.stdout.write("".join(f"{each}\n" for each in found))
    missing = [each for each in found if each.remedy is not None]
    needed = sum(each.needed for each in missing)
    if not missing:
        sys.stdout.write("\nNothing is missing.\n")
    else:
        sys.stdout.write(f"\n{needed} needed (!!) and {len(missing) - needed} optional (!) parts are missing.\n")
    return 1 if needed else 0


def findings() -> list[Finding]:
    """Examine this process's installation and machine."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _system,
        _versions,
        _kernel,
        _gpus,
        _shared_memory,
        _descriptors,
        _folder,
        _front_end,
        _examples,
    )
    return [each for check in checks for each in check()]


def _system() -> list[Finding]:
    named = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() == "Linux":
        return [Finding("system", named)]
    return [Finding("system", named, "graftlab runs on Linux only", needed=True)]


def _versions() -> list[Finding]:
    def version(package: str) -> str | None:
        try:
            # The build matters as well, which the package's metadata leave out.
            return torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    found = {package: version(package) for package in ("graftlab", *_PACKAGES)}
    listed = Finding("packages", ", ".join(f"{package} {number}" for package, number in found.items() if number))
    if found["transformers"] is not None:
        return [listed]
    return [listed, Finding("transformers", "not installed", "for graftlab demo: pip install 'graftlab[demo]'")]


def _kernel() -> list[Finding]:
    built = kernel.description()
    if built.startswith("compiled"):
        return [Finding("kernel", built)]
    return [Finding("kernel", built, "install a C compiler, then: pip install --force-reinstall --no-deps graftlab")]


def _gpus() -> list[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "none visible to torch" if built else "none: this build of torch supports only CPUs"
        return [Finding("GPUs", f"{why}; ranks run on the CPU with gloo")]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # Untyped in torch.
    version: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    nccl = f"NCCL {'.'.join(map(str, version))}" if version else "no NCCL"
    gpus = Finding("GPUs", f"{len(names)}: {', '.join(sorted(set(names)))}; {nccl}")
    if importlib.util.find_spec("triton") is None:
        slow = "not installed, so tensors on GPUs are measured by torch operations, which is slower"
        return [gpus, Finding("triton", slow, "pip install triton")]
    return [gpus]


def _shared_memory() -> list[Finding]:
    if MEMORY_FILES:
        return [Finding("shared memory", "memory files without a name (memfd)")]
    remedy = "use a Python built for glibc 2.27 or newer"
    return [Finding("shared memory", "no memfd_create in this Python", remedy, needed=True)]


def _descriptors() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ranks = ranks_within(soft)
    found = f"{soft} open files, enough to launch about {ranks} ranks on this machine"
    if ranks >= 16:
        return [Finding("descriptors", found)]
    return [Finding("descriptors", found, f"ulimit -n {hard}, before Jupyter starts", needed=ranks < 2)]


def ranks_within(limit: int) -> int:
    """Return the largest number of launched ranks whose descriptors fit into ``limit`` open files of the notebook.

    Any two ranks have a socket pair, and each rank a segment of memory and about ten descriptors for its process.
    """
    ranks = 0
    while ranks < MAX_RANKS and (ranks + 1) * ranks + 11 * (ranks + 1) + _SPARE_DESCRIPTORS <= limit:
        ranks += 1
    return ranks


def _folder() -> list[Finding]:
    folder = home()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = "set GRAFTLAB_HOME to a folder that you can write into"
        return [Finding("run folders", f"{folder} cannot be written", remedy, needed=True)]
    free = shutil.disk_usage(existing).free / 2**30
    return [Finding("run folders", f"{folder}, {free:.0f} GiB free")]


def _front_end() -> list[Finding]:
    from jupyter_core.paths import jupyter_path

    from graftlab.widgets.code_mirror import BUNDLE

    folders = [Path(each) for each in jupyter_path("labextensions")]
    missing = [
        package for name, package in _LAB_EXTENSIONS.items() if not any((each / name).is_dir() for each in folders)
    ]
    found: list[Finding] = []
    if missing:
        remedy = f"if JupyterLab runs in this environment: pip install {' '.join(missing)}"
        found.append(Finding("front end", f"{', '.join(missing)} not found", remedy))
    else:
        found.append(Finding("front end", "JupyterLab's extensions for widgets are installed in this environment"))
    if BUNDLE.is_file():
        found.append(Finding("code editor", "installed"))
    else:
        remedy = "install npm, then: pip install --force-reinstall --no-deps graftlab"
        found.append(Finding("code editor", "not built; a plain text area replaces it", remedy))
    return found


def _examples() -> list[Finding]:
    from graftlab.demo import QUICKSTART

    if QUICKSTART.is_file():
        return [Finding("notebooks", f"{QUICKSTART.parent} (graftlab examples DIR copies them)")]
    return [Finding("notebooks", "not found", "reinstall graftlab")]
