"""How the package is built: the code editor's bundle and the kernel, and what happens where one cannot be made."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from kit.build_hook import ROOT, Project, hook, names_in

HASH = r"[0-9a-f]{16}"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """For the tests of the bundle."""
    made = Project(tmp_path, monkeypatch)
    monkeypatch.setenv(hook.KERNEL.skip, "1")
    return made


# --- the code editor ---------------------------------------------------------------------

GOOD_NPM = """
case "$1" in
ci) /bin/mkdir -p node_modules/@scope/one node_modules/esbuild
    echo "Licence of one, with */ in it" > node_modules/@scope/one/LICENSE
    echo "Licence of esbuild" > node_modules/esbuild/LICENSE.md ;;
run) echo "export default {made: 1}" > code_editor.bundle.js ;;
esac
"""


@pytest.mark.ranks
def test_a_build_without_npm_warns_in_one_line_and_continues(project: Project) -> None:
    (warning,) = project.build()
    assert "npm was not found" in warning
    assert "python hatch_build.py" in warning
    assert "\n" not in warning
    assert not project.bundle.exists()


@pytest.mark.ranks
@pytest.mark.parametrize("command", ["ci", "run"])
def test_a_build_warns_with_a_failing_npms_output_and_continues(project: Project, command: str) -> None:
    project.program("npm", f'[ "$1" = {command} ] && echo "npm error ENETUNREACH" >&2 && exit 7; exit 0')
    project.bundle.parent.mkdir()
    project.bundle.write_text("/* made from other sources */")
    (warning,) = project.build()
    assert f"npm {command}" in warning
    assert "ENETUNREACH" in warning
    assert "\n" not in warning
    assert not project.bundle.exists()  # it might not fit the kernel's half


@pytest.mark.ranks
def test_a_build_with_an_unusable_npm_continues(project: Project) -> None:
    project.program("npm", "exit 0")
    (warning,) = project.build()
    assert "made no bundle" in warning
    (project.bin / "npm").write_bytes(b"\x00\x01")
    (warning,) = project.build()
    assert "could not be started" in warning


@pytest.mark.ranks
def test_a_build_that_cannot_write_continues(project: Project) -> None:
    project.program("npm", GOOD_NPM)
    project.bundle.parent.write_text("a file where the folder should be")
    (warning,) = project.build()
    assert "was not built" in warning


@pytest.mark.ranks
def test_the_variable_leaves_the_bundle_as_it_is(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.program("npm", GOOD_NPM)
    project.bundle.parent.mkdir()
    project.bundle.write_text("as it is")
    monkeypatch.setenv(hook.BUNDLE.skip, "1")
    assert project.build() == []
    assert project.bundle.read_text() == "as it is"
    assert project.called() == []


@pytest.mark.ranks
def test_the_bundle_is_made_again_only_when_its_sources_have_changed(project: Project) -> None:
    project.program("npm", GOOD_NPM)
    assert project.build() == []
    assert "export default {made: 1}" in project.bundle.read_text()
    assert project.build() == []
    assert project.called() == ["npm ci", "npm run"]
    with open(project.root / hook.JS / "editor.js", "a") as editor:
        editor.write("// changed\n")
    assert project.build() == []
    assert project.called() == ["npm ci", "npm run"] * 2
    assert list(project.bundle.parent.iterdir()) == [project.bundle]


@pytest.mark.ranks
def test_the_bundle_carries_the_licences_of_what_is_in_it(project: Project) -> None:
    project.program("npm", GOOD_NPM)
    project.build()
    text = project.bundle.read_text()
    assert "@scope/one:\n\nLicence of one, with * / in it" in text
    assert "Licence of esbuild" not in text
    assert text.endswith("*/\n")


@pytest.mark.ranks
def test_the_command_makes_the_bundle_or_says_why_not(project: Project) -> None:
    refused = project.command("editor")
    assert refused.returncode == 1
    assert refused.stderr == "The code editor was not built: npm was not found (it comes with Node.js)\n"
    project.program("npm", GOOD_NPM)
    assert project.command("editor").returncode == 0
    assert project.command("editor").returncode == 0
    assert project.called() == ["npm ci", "npm run"] * 2  # a person who asks gets it made anew
    assert project.bundle.exists()


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("npm", ["good", "missing"])
def test_a_package_is_built_with_and_without_npm(project: Project, tmp_path: Path, kind: str, npm: str) -> None:
    if npm == "good":
        project.program("npm", GOOD_NPM)
    wheel, said = project.package(kind, tmp_path)
    assert ("npm was not found" in said) == (npm == "missing")
    assert project.bundle.exists() == (npm == "good")
    shipped = hook.BUNDLE.path.as_posix() in names_in(wheel)
    assert shipped == (npm == "good" and kind == "wheel")


def test_the_javascript_packages_are_pinned_and_no_registry_is_named() -> None:
    package = json.loads((ROOT / hook.JS / "package.json").read_text())
    asked = package["dependencies"] | package["devDependencies"]
    assert asked["codemirror"] == "6.0.2"
    assert [name for name, version in asked.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    text = (ROOT / hook.JS / "package-lock.json").read_text()
    lock = json.loads(text)
    assert "://" not in text
    assert {name: lock["packages"][f"node_modules/{name}"]["version"] for name in asked} == asked
    unchecked = [name for name, one in lock["packages"].items() if name and "integrity" not in one]
    assert unchecked == []


# --- the kernel --------------------------------------------------------------------------

# What a compiler does for the build: what it gets as the library's source ends up in the library.
GOOD_CC = """
out=a.out link=yes
while [ $# -gt 0 ]; do
    case "$1" in
    -o) shift; out=$1 ;;
    -c) link=no ;;
    -DMADE=*) made="graftlab kernel made from ${1#-DMADE=}" ;;
    *.o) read -r line < "$1" && made="$made$line" ;;
    esac
    shift
done
echo "$made" | /bin/tr -d '"' > "$out"
"""
needs_a_level = pytest.mark.skipif(not hook.levels_here(), reason="the kernel is not for this processor or system")
# What the collector finds of other tests meanwhile is not the build's.
pytestmark = pytest.mark.filterwarnings("error", "default::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def kernel_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """For the tests of the kernel. ziglang is not found, wherever the tests run."""
    made = Project(tmp_path, monkeypatch)
    monkeypatch.setenv(hook.BUNDLE.skip, "1")
    monkeypatch.setattr(hook, "zig_compiler", lambda: None)
    return made


@pytest.mark.ranks
@needs_a_level
def test_a_build_without_a_compiler_asks_for_one_and_continues(kernel_project: Project) -> None:
    assert kernel_project.asked_for() == [hook.ZIG]
    (warning,) = kernel_project.build()
    assert "no C compiler was found" in warning
    assert "several times slower" in warning
    assert "python hatch_build.py kernel" in warning
    assert "\n" not in warning
    assert not kernel_project.library.exists()


@pytest.mark.ranks
@needs_a_level
@pytest.mark.parametrize("name", ["cc", "gcc", "clang"])
def test_with_a_compiler_it_asks_for_none(kernel_project: Project, name: str) -> None:
    kernel_project.program(name, GOOD_CC)
    assert kernel_project.asked_for() == []
    assert kernel_project.build() == []
    assert re.fullmatch(rf"graftlab kernel made from {HASH} for \w+\n", kernel_project.library.read_text())
    assert {call.split()[0] for call in kernel_project.called()} == {name}


@pytest.mark.ranks
@needs_a_level
def test_a_compiler_that_makes_nothing_is_none(kernel_project: Project) -> None:
    # As one without the headers of the C library.
    kernel_project.program("cc", 'echo "fatal error: math.h: No such file" >&2; exit 1')
    assert kernel_project.asked_for() == [hook.ZIG]
    kernel_project.program("gcc", GOOD_CC)
    assert kernel_project.asked_for() == []


@pytest.mark.ranks
@needs_a_level
def test_the_compiler_can_be_named(kernel_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_project.program("cc", GOOD_CC)
    kernel_project.program("my-cc", GOOD_CC)
    monkeypatch.setenv("CC", "my-cc -O1")
    assert kernel_project.build() == []
    assert {call for call in kernel_project.called() if "-O1" not in call} == set()


@pytest.mark.ranks
@needs_a_level
def test_a_build_warns_with_a_failing_compilers_output_and_continues(kernel_project: Project) -> None:
    kernel_project.program(
        "cc", 'case "$*" in *LEVEL*) echo "loops.c: error: no such level" >&2; exit 1;; esac' + GOOD_CC
    )
    kernel_project.library.write_text("made from other sources")
    (warning,) = kernel_project.build()
    assert "cc failed: loops.c: error: no such level" in warning
    assert "\n" not in warning
    assert not kernel_project.library.exists()  # it might not fit what calls it


@pytest.mark.ranks
@needs_a_level
def test_the_variable_leaves_the_kernel_as_it_is(kernel_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_project.library.write_text("as it is")
    monkeypatch.setenv(hook.KERNEL.skip, "1")
    assert kernel_project.asked_for() == []
    assert kernel_project.build() == []
    assert kernel_project.library.read_text() == "as it is"


@pytest.mark.ranks
@needs_a_level
def test_the_kernel_is_rebuilt_only_for_new_sources_or_processors(
    kernel_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_project.program("cc", GOOD_CC)
    assert kernel_project.build() == []
    calls = len(kernel_project.called())
    made = kernel_project.library.read_text()
    assert kernel_project.build() == []
    assert len(kernel_project.called()) == calls
    (kernel_project.bin / "cc").unlink()
    assert kernel_project.asked_for() == []  # it exists
    kernel_project.program("cc", GOOD_CC)
    with open(kernel_project.library.parent / "kernel.h", "a") as header:
        header.write("/* changed */\n")
    assert kernel_project.build() == []
    assert len(kernel_project.called()) == 2 * calls
    assert kernel_project.library.read_text() != made
    kernel_project.library.write_text(kernel_project.library.read_text().replace(platform.machine(), "pdp11"))
    assert kernel_project.build() == []
    assert len(kernel_project.called()) == 3 * calls
    assert [path.suffix for path in kernel_project.library.parent.iterdir()].count(".so") == 1


@pytest.mark.ranks
def test_a_source_distribution_has_no_kernel_and_asks_for_nothing(kernel_project: Project, tmp_path: Path) -> None:
    assert kernel_project.asked_for("sdist") == []
    kernel_project.program("cc", GOOD_CC)
    assert kernel_project.build("sdist") == []
    assert kernel_project.called() == []
    kernel_project.library.write_text("from an earlier build")
    archive, _ = kernel_project.package("sdist", tmp_path)
    with tarfile.open(archive) as files:
        shipped = {name.partition("/")[2] for name in files.getnames()}
    assert {"hatch_build.py", "graftlab/diffs/c/kernel.c"} <= shipped
    assert hook.KERNEL.path.as_posix() not in shipped


@pytest.mark.ranks
def test_other_processors_get_a_package_without_it(kernel_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    kernel_project.program("cc", GOOD_CC)
    assert kernel_project.asked_for() == []
    (warning,) = kernel_project.build()
    assert "riscv64" in warning


@pytest.mark.ranks
@needs_a_level
def test_a_package_with_the_kernel_is_for_one_platform(kernel_project: Project, tmp_path: Path) -> None:
    kernel_project.program("cc", GOOD_CC)
    wheel, _ = kernel_project.package("wheel", tmp_path)
    assert re.fullmatch(rf"graftlab-.*-py3-none-linux_{platform.machine()}\.whl", wheel.name)
    assert hook.KERNEL.path.as_posix() in names_in(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()


@pytest.mark.ranks
@needs_a_level
def test_an_editable_installation_finds_the_kernel_in_the_sources(kernel_project: Project, tmp_path: Path) -> None:
    kernel_project.program("cc", GOOD_CC)
    wheel, _ = kernel_project.package("editable", tmp_path)
    assert hook.KERNEL.path.as_posix() not in names_in(wheel)
    assert hook.kernel_is_fresh(kernel_project.root)


@pytest.mark.ranks
@needs_a_level
@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_a_published_kernel_is_compiled_by_zig_for_the_named_processor(
    kernel_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str
) -> None:
    kernel_project.program("cc", GOOD_CC)
    assert kernel_project.build() == []  # for this machine, with its own glibc
    monkeypatch.setenv("GRAFTLAB_KERNEL_FOR", processor)
    assert kernel_project.asked_for() == [hook.ZIG]
    (warning,) = kernel_project.build()
    assert "ziglang was not found" in warning
    kernel_project.program("zig", f'echo "$*" >> {tmp_path}/arguments\n{GOOD_CC}')
    zig = hook.Compiler(("zig",), f"manylinux_2_17_{processor}", is_zig=True)
    monkeypatch.setattr(hook, "zig_compiler", lambda: zig)
    assert kernel_project.build() == []
    assert re.fullmatch(rf"graftlab kernel made from {HASH} for {zig.tag}\n", kernel_project.library.read_text())
    levels = {word for word in (tmp_path / "arguments").read_text().split() if word.startswith("-mcpu=")}
    assert levels == {f"-mcpu={cpu}" for _, cpu in hook.LEVELS[processor].values()}


@pytest.mark.ranks
def test_the_notebooks_are_in_the_package_but_not_in_an_editable_one(kernel_project: Project, tmp_path: Path) -> None:
    for kind in ("wheel", "editable"):
        package, _ = kernel_project.package(kind, tmp_path / kind)
        assert ("graftlab/notebooks/one.ipynb" in names_in(package)) == (kind == "wheel")


@pytest.mark.ranks
def test_a_package_without_the_kernel_is_for_any_platform(
    kernel_project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hook.KERNEL.skip, "1")
    wheel, _ = kernel_project.package("wheel", tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.ranks
@needs_a_level
def test_the_command_makes_what_its_arguments_name(kernel_project: Project) -> None:
    kernel_project.program("cc", GOOD_CC)
    done = kernel_project.command("kernel")
    assert done.returncode == 0
    assert done.stdout.startswith(f"{hook.KERNEL.path}: ")
    done = kernel_project.command()
    assert done.returncode == 1  # there is no npm
    assert "code editor was not built" in done.stderr
    assert kernel_project.command("colonel").returncode == 2


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_installing_on_a_machine_without_a_compiler_gives_the_fast_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make demo` installs, but for the dependencies, which are those of this environment."""
    environment, bin = tmp_path / "environment", tmp_path / "bin"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    bin.mkdir()
    for name in ("sh", "env", "uname", "ldd", "git"):
        if found := shutil.which(name):
            (bin / name).symlink_to(found)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    (site / "outer.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    variables = {name: value for name, value in os.environ.items() if name not in ("CC", "PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"PATH": str(bin), hook.BUNDLE.skip: "1"}
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of committed files")
    sources = tmp_path / "sources"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, sources / name)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "-e", sources]
    installed = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=tmp_path)
    if installed.returncode and re.search(
        "Could not fetch|Could not find a version|Connection|Retrying", installed.stderr
    ):
        pytest.skip(f"the package registry is not reached: {installed.stderr.strip().splitlines()[-1]}")
    assert installed.returncode == 0, installed.stderr
    said = subprocess.run(
        [python, "-c", "from graftlab.diffs import kernel; print(kernel.LIBRARY); print(kernel.description())"],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    ).stdout.splitlines()
    assert said[0].startswith(str(sources))
    assert said[1].startswith("compiled kernel")
    assert hook.made_for(sources / hook.KERNEL.path) == f"manylinux_2_17_{platform.machine()}"
