"""``graftlab doctor``: what it finds on a machine, what it advises, and how it ends."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graftlab import __main__ as command
from graftlab import doctor
from graftlab.widgets import code_mirror


def test_the_doctor_finds_what_is_missing_and_how_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAFTLAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(code_mirror, "BUNDLE", tmp_path / "missing.js")
    monkeypatch.setattr(doctor.kernel, "description", lambda: "torch operations (slower): no C compiler")
    monkeypatch.setattr(doctor, "_LAB_EXTENSIONS", {"no-such-extension": "no-such-package"})
    assert command.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}," in said  # with the build
    built = "pip install --force-reinstall --no-deps graftlab"
    missing = {
        "kernel": ("torch operations (slower): no C compiler", f"install a C compiler, then: {built}"),
        "code editor": ("not built; a plain text area replaces it", f"install npm, then: {built}"),
        "front end": (
            "no-such-package not found",
            "if JupyterLab runs in this environment: pip install no-such-package",
        ),
    }
    for name, (what, remedy) in missing.items():
        assert re.search(rf"^ ! {name} +{re.escape(what)}\n +{re.escape(remedy)}$", said, re.MULTILINE), name
    assert "0 needed (!!) and 3 optional (!) parts are missing." in said
    monkeypatch.setattr(doctor, "MEMORY_FILES", False)
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (64, 4096))
    assert command.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"^!! descriptors .*\n +ulimit -n 4096", said, re.MULTILINE)
    assert "2 needed (!!)" in said


@pytest.mark.parametrize(
    ("limit", "ranks", "needed"), [(64, 0, True), (151, 1, True), (152, 2, False), (543, 15, False), (544, 16, None)]
)
def test_the_doctor_asks_for_descriptors_of_sixteen_ranks_and_needs_those_of_two(
    monkeypatch: pytest.MonkeyPatch, limit: int, ranks: int, needed: bool | None
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda kind: (limit, 4096))
    found = f"{limit} open files, enough to launch about {ranks} ranks on this machine"
    remedy = () if needed is None else ("ulimit -n 4096, before Jupyter starts", needed)
    assert doctor._descriptors() == [doctor.Finding("descriptors", found, *remedy)]


def test_the_doctor_needs_a_folder_that_can_be_written_and_entered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRAFTLAB_HOME", str(tmp_path / "new" / "home"))
    usage = SimpleNamespace(free=5 << 30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: {tmp_path: usage}[path])
    home = tmp_path / "new" / "home"
    assert doctor._folder() == [doctor.Finding("run folders", f"{home}, 5 GiB free")]
    remedy = "set GRAFTLAB_HOME to a folder that you can write into"
    refused = doctor.Finding("run folders", f"{home} cannot be written", remedy, needed=True)
    for allowed in (os.W_OK, os.X_OK):
        monkeypatch.setattr(doctor.os, "access", lambda path, wanted, has=allowed: wanted & has == wanted)
        assert doctor._folder() == [refused]


def test_the_doctor_finds_extensions_in_any_folder_of_jupyter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_LAB_EXTENSIONS", {"one": "package-one", "two": "package-two"})
    monkeypatch.setattr(code_mirror, "BUNDLE", tmp_path)
    monkeypatch.setattr("jupyter_core.paths.jupyter_path", lambda name: [str(tmp_path / "a"), str(tmp_path / "b")])
    said = "JupyterLab's extensions for widgets are installed in this environment"
    (tmp_path / "a" / "two").mkdir(parents=True)
    remedy = "if JupyterLab runs in this environment: pip install package-one"
    assert doctor._front_end()[0] == doctor.Finding("front end", "package-one not found", remedy)
    (tmp_path / "b" / "one").mkdir(parents=True)
    assert doctor._front_end()[0] == doctor.Finding("front end", said)


@pytest.mark.parametrize(
    ("devices", "nccl", "found"),
    [
        ([], None, [("GPUs", "none: this build of torch supports only CPUs; ranks run on the CPU with gloo")]),
        (["H200", "A100", "H200"], (2, 27, 5), [("GPUs", "3: A100, H200; NCCL 2.27.5"), ("triton", "not installed")]),
        (["H200"], None, [("GPUs", "1: H200; no NCCL"), ("triton", "not installed")]),
    ],
)
def test_the_doctor_names_the_gpus_and_what_measures_on_them(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], nccl: tuple[int, ...] | None, found: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "get_device_name", devices.__getitem__)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl is not None)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert [(each.subject, each.found.partition(", so")[0]) for each in doctor._gpus()] == found
    assert [each.remedy for each in doctor._gpus()[1:]] == ["pip install triton"] * (len(found) - 1)


def test_the_doctor_asks_for_the_demos_package_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"graftlab": "1.0", "numpy": "2.0", "transformers": "4.0"}

    def version(package: str) -> str:
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(doctor.metadata, "version", version)
    named = f"graftlab 1.0, torch {torch.__version__}, numpy 2.0"
    assert doctor._versions() == [doctor.Finding("packages", f"{named}, transformers 4.0")]
    del installed["transformers"]
    remedy = "for graftlab demo: pip install 'graftlab[demo]'"
    assert doctor._versions() == [
        doctor.Finding("packages", named),
        doctor.Finding("transformers", "not installed", remedy),
    ]


@pytest.mark.parametrize("has", [(), ("optional",), ("optional", "needed")])
def test_the_doctors_exit_status_and_last_line_count_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], has: tuple[str, ...]
) -> None:
    found = [doctor.Finding("a", "there")]
    found += [doctor.Finding(each, "absent", "install it", needed=each == "needed") for each in has]
    monkeypatch.setattr(doctor, "findings", lambda: found)
    code = command.main(["doctor"])
    said = {
        (): "ok a                 there\n\nNothing is missing.\n",
        ("optional",): "ok a                 there\n"
        " ! optional          absent\n                     install it\n"
        "\n0 needed (!!) and 1 optional (!) parts are missing.\n",
        ("optional", "needed"): "ok a                 there\n"
        " ! optional          absent\n                     install it\n"
        "!! needed            absent\n                     install it\n"
        "\n1 needed (!!) and 1 optional (!) parts are missing.\n",
    }
    assert (code, capsys.readouterr().out) == (int("needed" in has), said[has])


def test_the_descriptors_of_all_pairs_of_ranks_are_counted() -> None:
    assert doctor.ranks_within(64) == 0
    assert doctor.ranks_within(1024) == 25
    assert doctor.ranks_within(10**7) == 512
