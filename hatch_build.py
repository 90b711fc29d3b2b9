"""Makes what is not Python while the package is built: what hatchling calls, and a command.

* The code editor's script, bundled with esbuild. Without npm the notebook shows a plain text area instead.
* The kernel that measures tensors, compiled from C: with the machine's C compiler, or, where there is none that works,
  with the one in the package ziglang, which this asks for then. Without either, torch operations measure tensors,
  several times slower.

A build makes each only if its sources have changed since, and continues without it, with a warning, where that fails.
``GRAFTLAB_SKIP_JS=1`` and ``GRAFTLAB_SKIP_KERNEL=1`` leave what is there as it is. ``GRAFTLAB_KERNEL_FOR=aarch64`` (or
``x86_64``) compiles the kernel for publication: with ziglang, for that processor, against a glibc that is old enough
for manylinux. ``python hatch_build.py`` makes both anew, ``python hatch_build.py kernel`` one of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a command, outside of a build
    BuildHookInterface = object

SECONDS = 300  # for each command that is run
ZIG = "ziglang>=0.13"


class BuildError(Exception):
    """Something could not be made; the message says why in one line."""


class Product(NamedTuple):
    """A file that a build makes, where it can."""

    name: str  # in the command
    title: str
    path: Path
    skip: str  # the environment variable that leaves it as it is
    instead: str  # what its absence means
    is_fresh: Callable[[Path], bool]
    make: Callable[[Path], Path]  # raises BuildError

    def skipped(self) -> bool:
        return os.environ.get(self.skip, "0") not in ("", "0")


class CustomBuildHook(BuildHookInterface):
    """Runs before hatchling collects the files of a wheel (editable ones too) or of a source distribution."""

    def dependencies(self) -> list[str]:
        """What the build needs beside hatchling: a C compiler, if the kernel is to be made and there is none."""
        if self.target_name != "wheel" or KERNEL.skipped() or KERNEL.is_fresh(Path(self.root)):
            return []
        return [ZIG] if levels_here() and machine_compiler() is None else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        # A source distribution is for any processor.
        products = PRODUCTS if self.target_name == "wheel" else [BUNDLE]
        for product in products:
            if product.skipped() or product.is_fresh(root):
                continue
            try:
                product.make(root)
            except Exception as error:  # an installation must not fail for what has a stand-in
                # One made from other sources might not fit the rest. Where it cannot be removed, it is no worse than
                # before.
                with contextlib.suppress(OSError):
                    (root / product.path).unlink()
                self.app.display_warning(
                    f"graftlab: {product.title} was not built, so {product.instead}: {error}. "
                    f"To build it later: python hatch_build.py {product.name}"
                )
        if self.target_name == "wheel" and version != "editable":
            # Beside the package they would be no part of it. An editable installation finds them in the checkout.
            build_data["force_include"]["notebooks"] = "graftlab/notebooks"
        if KERNEL in products and (made := made_for(root / KERNEL.path)):
            build_data.update(pure_python=False, tag=f"py3-none-{made}")


def in_place(path: Path, write: Callable[[Path], object]) -> Path:
    """Let ``write`` write the file, which is there only when it is complete."""
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name("partial." + path.name.partition(".")[2])  # git ignores this name too
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def run(command: Sequence[str], name: str, cwd: Path, variables: dict[str, str] | None = None) -> None:
    """Run a command. Raises ``BuildError`` with what it said, under this name."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=SECONDS,
            env=os.environ | (variables or {}),
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{name} took more than {SECONDS} s") from None
    except OSError as error:
        raise BuildError(f"{name} could not be started: {error}") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said or ["it said nothing"]
        raise BuildError(f"{name} failed: {' '.join(errors[:3])[:300]}")


def load_sources(root: Path) -> ModuleType:
    """What the package itself tells the kernel's sources by."""
    spec = importlib.util.spec_from_file_location("graftlab_sources", root / "graftlab" / "diffs" / "sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the code editor ----------------------------------------------------------------------------------------------

JS = Path("graftlab", "widgets", "js")
JS_TOOLS = ("esbuild", "@esbuild")  # not part of what they make


def js_sources(root: Path) -> list[Path]:
    """The files that the bundle is made from."""
    return sorted(path for path in (root / JS).iterdir() if path.suffix in (".js", ".json"))


def first_line(root: Path) -> str:
    """What the bundle begins with: a comment that tells which sources it was made from."""
    sources = load_sources(root).fingerprint(js_sources(root))
    return f"/* graftlab's code editor, made by hatch_build.py from the sources {sources} */\n"


def bundle_is_fresh(root: Path) -> bool:
    """Whether the bundle is there and made from the sources that are there."""
    try:
        with open(root / BUNDLE.path, encoding="utf-8") as bundle:
            return bundle.readline() == first_line(root)
    except OSError:
        return False


def make_bundle(root: Path) -> Path:
    """Make the bundle anew, in a temporary folder, and put it in its place. Raises ``BuildError``."""
    npm = shutil.which("npm")
    if npm is None:
        raise BuildError("npm was not found (it comes with Node.js)")
    with tempfile.TemporaryDirectory(prefix="graftlab-js-") as name:
        folder = Path(name)
        for path in js_sources(root):
            shutil.copy(path, folder)
        # esbuild's install script only checks what npm has just checked.
        options = ("--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1")
        run([npm, "ci", *options], "npm ci", folder)
        run([npm, "run", "build"], "npm run build", folder)
        made = folder / BUNDLE.path.name
        if not made.is_file():
            raise BuildError("npm run build made no bundle")
        text = first_line(root) + made.read_text(encoding="utf-8") + licences(folder / "node_modules")
    return in_place(root / BUNDLE.path, lambda partial: partial.write_text(text, encoding="utf-8"))


def licences(modules: Path) -> str:
    """A comment with the licence of every bundled package; a text that several share is there once."""
    texts: dict[str, list[str]] = {}
    for path in sorted(modules.rglob("LICENSE*")):
        package = path.parent.relative_to(modules).as_posix()
        if package.split("/")[0] not in JS_TOOLS:
            texts.setdefault(path.read_text(encoding="utf-8").strip(), []).append(package)
    parts = [f"{', '.join(packages)}:\n\n{text}" for text, packages in texts.items()]
    return "\n/*\nBundled here:\n\n{}\n*/\n".format("\n\n".join(parts).replace("*/", "* /")) if parts else ""


BUNDLE = Product(
    "editor",
    "the code editor",
    Path("graftlab", "widgets", "static", "code_editor.bundle.js"),
    "GRAFTLAB_SKIP_JS",
    "a plain text area takes its place",
    bundle_is_fresh,
    make_bundle,
)

# --- the kernel ---------------------------------------------------------------------------------------------------

# No -ffast-math, here or elsewhere: it would change results, and at times the processor's settings.
C_OPTIONS = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-Wno-psabi")
# For each processor what each level of its instructions is for a C compiler, and for zig.
_V2 = ("-msse4.2", "-mpopcnt")
_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_V4 = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
LEVELS: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    "x86_64": {
        "v2": (_V2, "x86_64_v2"),
        "v3": ((*_V2, *_V3), "x86_64_v3"),
        "v4": ((*_V2, *_V3, *_V4), "x86_64_v4"),
    },
    "aarch64": {"neon": ((), "generic")},
}
GLIBC = "2.17"  # the oldest that a library made with zig runs with


class Compiler(NamedTuple):
    """A C compiler; ``tag`` names the systems that what it makes runs on."""

    command: tuple[str, ...]
    tag: str
    is_zig: bool = False

    def run(self, arguments: Sequence[str], folder: Path) -> None:
        # What zig keeps for next time would be left behind in the user's home.
        kept = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "zig"), "ZIG_LOCAL_CACHE_DIR": str(folder / "zig")}
        name = "zig cc" if self.is_zig else Path(self.command[0]).name
        run([*self.command, *arguments], name, folder, kept if self.is_zig else None)


def published_for() -> str:
    """The processor that a wheel for publication is made for; empty where the wheel is for this machine."""
    return os.environ.get("GRAFTLAB_KERNEL_FOR", "")


def machine() -> str:
    name = published_for() or platform.machine()
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(name, name)


def levels_here() -> dict[str, tuple[tuple[str, ...], str]]:
    """What the kernel is made for on this machine; empty where it cannot be."""
    return LEVELS.get(machine(), {}) if os.name == "posix" else {}


def machine_compiler() -> Compiler | None:
    """The machine's own C compiler, if it has one that can make a library.

    None for publication, because its glibc is too new.
    """
    if published_for():
        return None
    named = shlex.split(os.environ.get("CC", ""))
    for command in ([named] if named else []) + [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) is None:
            continue
        compiler = Compiler(tuple(command), re.sub(r"[-.]", "_", sysconfig.get_platform()))
        with tempfile.TemporaryDirectory(prefix="graftlab-cc-") as name, contextlib.suppress(BuildError):
            folder = Path(name)
            (folder / "try.c").write_text("#include <math.h>\n#include <pthread.h>\nint main(void) { return 0; }\n")
            compiler.run(["-shared", "-fPIC", "try.c", "-o", "try.so", "-lm", "-pthread"], folder)
            return compiler
    return None


def zig_compiler() -> Compiler | None:
    """The compiler in the package ziglang, if that is installed."""
    if not sys.platform.startswith("linux") or importlib.util.find_spec("ziglang") is None:
        return None
    command = (sys.executable, "-m", "ziglang", "cc", "-fno-sanitize=all", "-target", f"{machine()}-linux-gnu.{GLIBC}")
    return Compiler(command, f"manylinux_{GLIBC.replace('.', '_')}_{machine()}", is_zig=True)


def compile_kernel(sources: Path, library: Path, compiler: Compiler, made: str, defines: Sequence[str] = ()) -> None:
    """Compile the library, which will say that it is ``made``. Raises ``BuildError``."""
    with tempfile.TemporaryDirectory(prefix="graftlab-kernel-") as name:
        folder = Path(name)
        options = [*C_OPTIONS, *(f"-D{define}" for define in defines)]
        parts = {
            level: [str(sources / "loops.c"), f"-DLEVEL={level}", *([f"-mcpu={cpu}"] if compiler.is_zig else flags)]
            for level, (flags, cpu) in levels_here().items()
        }
        parts["kernel"] = [str(sources / "kernel.c"), f'-DMADE="{made}"']
        parts["threads"] = [str(sources / "threads.c")]

        def compile_part(part: str) -> None:
            compiler.run([*options, *parts[part], "-c", "-o", f"{part}.o"], folder)

        with ThreadPoolExecutor(len(parts)) as pool:
            list(pool.map(compile_part, parts))
        objects = [f"{part}.o" for part in parts]
        compiler.run([*options, "-shared", "-s", *objects, "-o", "made.so", "-lm", "-pthread"], folder)
        in_place(library, lambda partial: shutil.copy(folder / "made.so", partial))


def made_for(library: Path) -> str | None:
    """The systems that the library runs on, if it is there and says so."""
    try:
        found = re.search(rb"graftlab kernel made from [0-9a-f]+ for (\w+)", library.read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def kernel_hash(root: Path) -> str:
    sources = load_sources(root)
    return str(sources.fingerprint(sources.kernel_sources(root / KERNEL.path.parent)))


def kernel_is_fresh(root: Path) -> bool:
    """Whether the library is there, made from the sources that are there, for this processor."""
    tag = made_for(root / KERNEL.path)
    return (
        tag is not None
        and tag.endswith(machine())
        and (tag.startswith("manylinux") or not published_for())
        and f"made from {kernel_hash(root)} for".encode() in (root / KERNEL.path).read_bytes()
    )


def make_kernel(root: Path) -> Path:
    """Make the library anew and put it in its place. Raises ``BuildError``."""
    if not levels_here():
        raise BuildError(f"it is not written for {platform.machine()} processors on {platform.system()}")
    compiler = machine_compiler() or zig_compiler()
    if compiler is None:
        wanted = "ziglang was not found" if published_for() else "no C compiler was found"
        raise BuildError(f"{wanted} (pip install ziglang brings one)")
    library = root / KERNEL.path
    compile_kernel(library.parent, library, compiler, f"{kernel_hash(root)} for {compiler.tag}")
    return library


KERNEL = Product(
    "kernel",
    "the kernel that measures tensors",
    Path("graftlab", "diffs", "c", "kernel.so"),
    "GRAFTLAB_SKIP_KERNEL",
    "torch operations take its place, several times slower",
    kernel_is_fresh,
    make_kernel,
)

PRODUCTS = [BUNDLE, KERNEL]


def main(arguments: Sequence[str]) -> int:
    """Make the products that are named, or all of them."""
    names = [product.name for product in PRODUCTS]
    if unknown := set(arguments) - set(names):
        print(f"There is no {', '.join(sorted(unknown))} to build; there are: {', '.join(names)}.", file=sys.stderr)
        return 2
    root = Path(__file__).resolve().parent
    failed = 0
    for product in PRODUCTS:
        if arguments and product.name not in arguments:
            continue
        try:
            path = product.make(root)
        except (BuildError, OSError) as error:
            print(f"{product.title[0].upper()}{product.title[1:]} was not built: {error}", file=sys.stderr)
            failed = 1
        else:
            print(f"{path.relative_to(root)}: {path.stat().st_size // 1000} kB")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
