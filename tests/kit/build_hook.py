"""`hatch_build.py`, which lies outside of the package, as a module, and a copy of the project for it to build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def load_hook() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


hook = load_hook()


class Project:
    """A copy of what the build reads, and a folder that is all of PATH."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root / "project"
        self.bin = root / "bin"
        self.calls = root / "calls"
        self.bin.mkdir()
        built = shutil.ignore_patterns("node_modules", "*.so")
        for folder in (hook.JS, hook.KERNEL.path.parent):
            shutil.copytree(ROOT / folder, self.root / folder, ignore=built)
        for name in ("hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, self.root / name)
        for name in ("__init__.py", "diffs/__init__.py", "diffs/sources.py"):
            shutil.copy(ROOT / "graftlab" / name, self.root / "graftlab" / name)
        (self.root / "notebooks").mkdir()
        (self.root / "notebooks" / "one.ipynb").write_text("{}")
        monkeypatch.setenv("PATH", str(self.bin))
        for name in (hook.BUNDLE.skip, hook.KERNEL.skip, "CC"):
            monkeypatch.delenv(name, raising=False)

    @property
    def bundle(self) -> Path:
        return Path(self.root / hook.BUNDLE.path)

    @property
    def library(self) -> Path:
        return Path(self.root / hook.KERNEL.path)

    def program(self, name: str, script: str) -> None:
        """Let this shell script be the program of that name on PATH."""
        path = self.bin / name
        path.write_text(f'#!/bin/sh\necho "{name} $1" >> {self.calls}\n{script}\n')
        path.chmod(0o755)

    def called(self) -> list[str]:
        """The programs that were called, each with its first argument."""
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def hook(self, target: str = "wheel") -> types.SimpleNamespace:
        """What stands for the hook that hatchling makes; ``warnings`` is what it was told."""
        warnings: list[str] = []
        app = types.SimpleNamespace(display_warning=warnings.append)
        return types.SimpleNamespace(root=str(self.root), target_name=target, app=app, warnings=warnings)

    def build(self, target: str = "wheel") -> list[str]:
        """What hatchling does before it collects files; returns the warnings."""
        made = self.hook(target)
        hook.CustomBuildHook.initialize(made, "standard", {"force_include": {}})
        return made.warnings  # type: ignore[no-any-return]

    def asked_for(self, target: str = "wheel") -> list[str]:
        """What hatchling installs beside itself."""
        asked: list[str] = hook.CustomBuildHook.dependencies(self.hook(target))
        return asked

    def package(self, kind: str, folder: Path) -> tuple[Path, str]:
        """Let hatchling build a "wheel", "editable" or "sdist"; the file, and what was said meanwhile."""
        pytest.importorskip("hatchling", reason="hatchling is not installed, so nothing can be built without a network")
        if kind == "editable":
            pytest.importorskip("editables", reason="editables is not installed, which hatchling needs here")
        code = f"import hatchling.build, sys; print(hatchling.build.build_{kind}(sys.argv[1]))"
        built = subprocess.run(
            [sys.executable, "-c", code, str(folder)], cwd=self.root, capture_output=True, text=True, env=os.environ
        )
        assert built.returncode == 0, built.stderr
        return folder / built.stdout.split()[-1], built.stderr + built.stdout

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "hatch_build.py", *arguments], cwd=self.root, capture_output=True, text=True
        )


def names_in(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()
