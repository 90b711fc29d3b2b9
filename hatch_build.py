"""Bundles the code editor's script with esbuild while the package is built: what hatchling calls, and a command.

``python hatch_build.py`` makes the bundle anew. A build makes it only if the sources have changed since, and goes on
without it, with a warning, where npm is missing or fails: the notebook then shows a plain text area instead.
``GRAFTLAB_SKIP_JS=1`` leaves the bundle as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a command, outside of a build
    BuildHookInterface = object

SOURCES = Path("graftlab", "widgets", "js")
BUNDLE = Path("graftlab", "widgets", "static", "code_editor.bundle.js")
SKIP = "GRAFTLAB_SKIP_JS"
SECONDS = 300  # for each of npm's two commands
BUILD_TOOLS = ("esbuild", "@esbuild")  # not part of what they make


class BundleError(Exception):
    """The bundle could not be made; the message says why in one line."""


class CustomBuildHook(BuildHookInterface):
    """Runs before hatchling collects the files of a wheel (editable ones too) or of a source distribution."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        if os.environ.get(SKIP, "0") not in ("", "0") or is_fresh(root):
            return
        try:
            make_bundle(root)
        except Exception as error:  # an installation must not fail for an editor that has a stand-in
            # A bundle of other sources might not understand the kernel's half. Where it cannot be removed, it is no
            # worse than before.
            with contextlib.suppress(OSError):
                (root / BUNDLE).unlink()
            self.app.display_warning(
                f"graftlab: the notebook's code editor was not built, so a plain text area takes its place: {error}. "
                "To build it later: python hatch_build.py"
            )


def sources(root: Path) -> list[Path]:
    """The files that the bundle is made from."""
    return sorted(path for path in (root / SOURCES).iterdir() if path.suffix in (".js", ".json"))


def first_line(root: Path) -> str:
    """What the bundle begins with: a comment that names the sources by their hash."""
    digest = hashlib.sha256()
    for path in sources(root):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return f"/* graftlab's code editor, made by hatch_build.py from the sources {digest.hexdigest()[:16]} */\n"


def is_fresh(root: Path) -> bool:
    """Whether the bundle is there and made from the sources that are there."""
    try:
        with open(root / BUNDLE, encoding="utf-8") as bundle:
            return bundle.readline() == first_line(root)
    except OSError:
        return False


def make_bundle(root: Path) -> Path:
    """Make the bundle anew, in a temporary folder, and put it in its place. Raises ``BundleError``."""
    npm = shutil.which("npm")
    if npm is None:
        raise BundleError("npm was not found (it comes with Node.js)")
    with tempfile.TemporaryDirectory(prefix="graftlab-js-") as folder:
        for path in sources(root):
            shutil.copy(path, folder)
        # esbuild's install script only checks what npm has just checked.
        run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", cwd=folder)
        run(npm, "run", "build", cwd=folder)
        made = Path(folder, BUNDLE.name)
        if not made.is_file():
            raise BundleError("npm run build made no bundle")
        text = first_line(root) + made.read_text(encoding="utf-8") + licences(Path(folder, "node_modules"))
    bundle = root / BUNDLE
    bundle.parent.mkdir(exist_ok=True)
    partial = bundle.with_name("partial.bundle.js")  # git ignores this name too
    partial.write_text(text, encoding="utf-8")
    partial.replace(bundle)
    return bundle


def run(npm: str, *arguments: str, cwd: str) -> None:
    """Run an npm command. Raises ``BundleError`` with what npm said."""
    command = f"npm {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(
            [npm, *arguments], cwd=cwd, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise BundleError(f"{command} took more than {SECONDS} s") from None
    except OSError as error:
        raise BundleError(f"{command} could not be started: {error}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or ["it said nothing"]
        raise BundleError(f"{command} failed: {' '.join(errors[:3])[:300]}")


def licences(modules: Path) -> str:
    """A comment with the licence of every bundled package; a text that several share is there once."""
    texts: dict[str, list[str]] = {}
    for path in sorted(modules.rglob("LICENSE*")):
        package = path.parent.relative_to(modules).as_posix()
        if package.split("/")[0] not in BUILD_TOOLS:
            texts.setdefault(path.read_text(encoding="utf-8").strip(), []).append(package)
    parts = [f"{', '.join(packages)}:\n\n{text}" for text, packages in texts.items()]
    return "\n/*\nBundled here:\n\n{}\n*/\n".format("\n\n".join(parts).replace("*/", "* /")) if parts else ""


def main() -> int:
    root = Path(__file__).resolve().parent
    try:
        bundle = make_bundle(root)
    except (BundleError, OSError) as error:
        print(f"The code editor was not built: {error}", file=sys.stderr)
        return 1
    print(f"{bundle.relative_to(root)}: {bundle.stat().st_size // 1000} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
