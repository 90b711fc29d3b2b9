"""The kernel's library: how it is found and chosen, and that it does not affect the process."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kit import warm
from kit.build_hook import ROOT, hook
from kit.deadline import DEADLINE
from kit.exact_diffs import assert_nearly_right, assert_right, random
from kit.refusals import exactly

from graftlab.diffs import kernel
from graftlab.diffs.measure import DiffStats, measure
from graftlab.diffs.sorting import sorted_values

built = pytest.mark.skipif(not kernel.LIBRARY.exists(), reason="the kernel is not built: python hatch_build.py kernel")


@pytest.fixture
def unloaded() -> Iterator[None]:
    """As in a process that has measured nothing yet."""
    kernel.load.cache_clear()
    kernel.description.cache_clear()
    yield
    kernel.load.cache_clear()
    kernel.description.cache_clear()


def run_python(code: str) -> str:
    """The output of a new process, so that a crash or a deadlock does not affect this one."""
    done = warm.run("-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# -- which one ----------------------------------------------------------------------------------------------------


@built
def test_the_description_names_the_level(unloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernel.CHOICE, raising=False)
    assert kernel.description() == f"compiled kernel, level {kernel.processor_level()}"


@built
def test_a_lower_level_can_be_asked_for(unloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = "v2" if kernel.processor_level() in kernel.X86_LEVELS else "neon"
    monkeypatch.setenv(kernel.CHOICE, lowest)
    loaded = kernel.load()
    assert loaded is not None
    assert loaded.level == lowest
    assert kernel.description() == f"compiled kernel, level {lowest}"


@built
def test_unknown_level_is_refused_with_the_known_ones(unloaded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernel.CHOICE, "v9")
    assert "v9" in kernel.description()
    assert f"{kernel.CHOICE} can be" in kernel.description()
    assert kernel.load() is None


def test_missing_library_logs_once_that_measuring_is_slower(
    unloaded: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(kernel.CHOICE, raising=False)
    monkeypatch.setattr(kernel, "LIBRARY", tmp_path / "kernel.so")
    x = random((50,), torch.float32, 0)
    with caplog.at_level(logging.WARNING, "graftlab"):
        for _ in range(3):
            assert_right(x, x + 1)
    (record,) = caplog.records
    assert "slower" in record.message
    assert "python hatch_build.py" in record.message
    assert kernel.description().startswith("torch operations (slower): the kernel was not built")


@pytest.mark.parametrize("contents", [b"", b"no library", b"\x7fELF and no more"])
def test_invalid_library_file_is_reported(tmp_path: Path, contents: bytes) -> None:
    (tmp_path / "kernel.so").write_bytes(contents)
    with pytest.raises(kernel.KernelError, match="cannot be loaded"):
        kernel.open_library(tmp_path / "kernel.so")


@built
def test_library_built_from_different_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(kernel.SOURCES, tmp_path / "c")
    with open(tmp_path / "c" / "loops.c", "a") as loops:
        loops.write("/* changed */\n")
    monkeypatch.setattr(kernel, "SOURCES", tmp_path / "c")
    with pytest.raises(kernel.KernelError, match=r"not built from .* python hatch_build.py"):
        kernel.open_library(kernel.LIBRARY)


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("fpu sse sse2 ssse3 sse4_1 sse4_2 popcnt", "v2"),
        ("sse4_2 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma", "v3"),
        ("sse4_2 ssse3 popcnt avx avx2 bmi1 bmi2 f16c", "v2"),  # no fma
        ("sse4_2 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma avx512f avx512bw avx512cd avx512dq avx512vl", "v4"),
        ("sse4_2 ssse3 popcnt avx avx2 bmi1 bmi2 f16c fma avx512f avx512cd", "v3"),
        ("sse4_2 ssse3 popcnt avx512f avx512bw avx512cd avx512dq avx512vl", "v2"),  # no avx2
    ],
)
def test_the_level_is_the_highest_whose_instructions_are_all_there(
    flags: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n\nprocessor\t: 1\n")
    assert kernel.processor_level(tmp_path / "cpuinfo") == level


def test_a_processor_without_a_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(kernel.KernelError, match=exactly("there is no kernel for riscv64 processors")):
        kernel.processor_level()
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(kernel.KernelError, match=exactly("this processor has no SSE 4.2")):
        kernel.processor_level(tmp_path / "missing")


def test_the_build_makes_the_levels_that_are_chosen_from() -> None:
    assert list(hook.LEVELS["x86_64"]) == list(reversed(kernel.X86_LEVELS))


def test_a_processor_has_each_instruction_that_its_level_is_compiled_to() -> None:
    named = {"sse4.2": "sse4_2", "bmi": "bmi1"}
    needed: set[str] = set()
    for level, (options, _) in hook.LEVELS["x86_64"].items():
        needed |= kernel.X86_LEVELS[level]
        compiled_to = {option.removeprefix("-m") for option in options}
        assert {named.get(each, each) for each in compiled_to} <= needed


@built
def test_the_results_have_the_names_of_the_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [field.name for field in dataclasses.fields(DiffStats)]
    monkeypatch.setattr(kernel, "NAMES", (fields[1], fields[0], *fields[2:]))
    with pytest.raises(kernel.KernelError, match="DiffStats has rel_l2, numel"):
        kernel.open_library(kernel.LIBRARY)


# -- what is around it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64],
    ids=str,
)
def test_each_integer_dtype_is_read_with_its_whole_range(dtype: torch.dtype) -> None:
    lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    stats = measure(torch.tensor([lowest, highest], dtype=dtype), torch.tensor([highest, lowest], dtype=dtype))
    assert (stats.min_baseline, stats.max_baseline) == (float(lowest), float(highest))
    assert (stats.min_target, stats.max_target) == (float(lowest), float(highest))


def test_flush_to_zero_mode_is_preserved_and_does_not_matter() -> None:
    tiny = torch.finfo(torch.float64).tiny
    x, y = random((3 << 16,), torch.float64, 0) * tiny / 8, random((3 << 16,), torch.float64, 1) * tiny / 8
    single = x[:999].mul(1e270).float()  # among the smallest numbers of float32
    assert 0 < single.abs().max() < torch.finfo(torch.float32).tiny
    pairs = [(x, y), (single, 2 * single), (single.half(), single.to(torch.bfloat16))]
    wanted = [measure(*pair) for pair in pairs]
    assert x.mul(0.5).count_nonzero() == x.count_nonzero()  # loading and measuring has set nothing
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush small numbers to zero")
    try:
        assert [measure(*pair) for pair in pairs] == wanted or kernel.load() is None
        assert x[:9].mul(0.5).count_nonzero() == 0
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("size", "lets_go"), [(1 << 20, True), (100, False)])
def test_other_threads_run_while_a_large_tensor_is_measured(size: int, lets_go: bool) -> None:
    # A small one takes no longer than handing over to another thread and back would.
    compiled = kernel.load()
    if compiled is None:
        pytest.skip(kernel.description())
    x = random((size,), torch.float32, 0)
    place, types = x.data_ptr(), compiled.types[x.dtype, x.dtype]
    ready, gate, ran = threading.Lock(), threading.Lock(), threading.Event()
    ready.acquire()
    gate.acquire()

    def wait_and_run() -> None:
        ready.release()
        gate.acquire()
        ran.set()

    other = threading.Thread(target=wait_and_run)
    interval = sys.getswitchinterval()
    # Only who lets the GIL go gives it away. So this thread gets it back when the other one waits at the gate, and to
    # open a lock gives nothing away.
    sys.setswitchinterval(100.0)
    try:
        other.start()
        ready.acquire()
        gate.release()
        calls, given_up = 0, time.monotonic() + DEADLINE
        # Not measure(), in which some of torch's own calls let the GIL go.
        while calls < 500 or (lets_go and not ran.is_set() and time.monotonic() < given_up):
            compiled.measure(place, place, size, types, (size,))
            calls += 1
            if ran.is_set():
                break
        assert ran.is_set() == lets_go
    finally:
        sys.setswitchinterval(interval)
        other.join()


FORK = """
import os, threading, torch
from graftlab.diffs.measure import measure

torch.set_num_threads(3)
x = torch.arange(3_000_000).remainder(1009).float()
y = x.flip(0)  # here: torch's own threads do not survive a fork
wanted = measure(x, y)

{meanwhile}
child = os.fork()
if child == 0:
    os._exit(0 if all(measure(x, y) == wanted for _ in range(3)) else 7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert measure(x, y) == wanted
{afterwards}
"""
BUSY = """
stop = threading.Event()
z = torch.arange(20_000_000).remainder(1013).float()
def keep_on():
    while not stop.is_set():
        measure(z, z)
busy = threading.Thread(target=keep_on)
busy.start()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("meanwhile", ["", BUSY], ids=["idle threads", "threads at work"])
def test_forked_child_measures_with_its_own_threads(meanwhile: str) -> None:
    code = FORK.format(meanwhile=meanwhile, afterwards="stop.set(); busy.join()" if meanwhile else "")
    assert run_python(code) == "0"


@pytest.mark.ranks
def test_threads_of_the_kernel_take_no_signals() -> None:
    code = """
import signal, threading, torch
from pathlib import Path
from graftlab.diffs import kernel
from graftlab.diffs.measure import measure

torch.set_num_threads(4)
x = torch.ones(3_000_000)  # large enough for torch's own threads
known = {t.name for t in Path("/proc/self/task").iterdir()}
measure(x, x)
for task in Path("/proc/self/task").iterdir():
    if task.name not in known:
        (blocked,) = [line.split()[1] for line in (task / "status").read_text().splitlines() if line[:7] == "SigBlk:"]
        assert int(blocked, 16) & 1 << signal.SIGINT - 1, blocked
print(len(list(Path("/proc/self/task").iterdir())) - len(known), kernel.load() is not None)
"""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    made, there = run_python(code).split()
    assert int(made) == (3 if there == "True" else 0)


@pytest.mark.ranks
def test_a_session_of_large_tensors_ends_as_others_do() -> None:
    # Threads that are asleep must not keep the process, nor crash it at its end.
    assert (
        run_python(
            "import torch; from graftlab.diffs.measure import measure\n"
            "torch.set_num_threads(4); x = torch.ones(2_000_000); print(measure(x, x).rel_l2)"
        )
        == "0.0"
    )


# -- one with other blocks ----------------------------------------------------------------------------------------


def test_a_library_that_zig_makes_measures_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = hook.zig_compiler()
    if compiler is None:
        pytest.skip("ziglang is not installed here (tests/test_packaging.py installs it, among the soak tests)")
    library = tmp_path / "kernel.so"
    hook.compile_kernel(kernel.SOURCES, library, compiler, f"{hook.kernel_hash(ROOT)} for {compiler.tag}")
    made = kernel.open_library(library)
    monkeypatch.setattr(kernel, "load", lambda: made)
    x = random((100_000,), torch.bfloat16, 0)
    assert_nearly_right(x, random((100_000,), torch.float32, 1))
    assert_nearly_right(x, random((100_000,), torch.bfloat16, 1))


# -- moments ----------------------------------------------------------------------------------------------------------


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_moments_are_the_sums_that_numpy_computes(unloaded: None, dtype: torch.dtype) -> None:
    library = kernel.load()
    assert library is not None
    values = (torch.arange(10) - 4).to(dtype)
    factors, of_blocks = np.arange(12.0).reshape(4, 3), np.array([[1.0, -2.0, 3.0, -4.0]] * 3 + [[0.5] * 4])
    found = library.moments(
        values.data_ptr(), 10, dtype, factors.ctypes.data, np.ascontiguousarray(of_blocks).ctypes.data, 3
    )
    plain = values.double().numpy()
    size = np.abs(plain)
    assert found[:7] == pytest.approx(
        [-4, 5, plain.sum(), size.sum(), (plain**2).sum(), (plain**3).sum(), np.sqrt(size).sum()]
    )
    blocks = [plain[at : at + 3] for at in range(0, 10, 3)]
    expected = [
        sum(of_blocks[at][row] * (block @ factors[row][: len(block)]) for at, block in enumerate(blocks))
        for row in range(4)
    ]
    assert found[7:] == pytest.approx(expected)


# -- sorting ----------------------------------------------------------------------------------------------------------


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("values", [[3.0], [5, -7, 0, -0.0, 5, -2, 9], [-3, -1, -2], range(-70_000, 70_000, 7)])
def test_quantiles_are_those_of_sorted_values_and_magnitudes(
    unloaded: None, values: Sequence[float], dtype: torch.dtype
) -> None:
    library = kernel.load()
    assert library is not None
    given = torch.tensor(values).to(dtype)
    given = given[torch.randperm(len(given), generator=torch.Generator().manual_seed(0))]
    places = np.linspace(0, len(given) - 1, min(len(given), 65)).astype(np.int64)
    found = library.sort(given.data_ptr(), len(given), dtype, places)
    plain = given.double().numpy()
    assert np.array_equal(found, [*np.sort(plain)[places], *np.sort(np.abs(plain))[places]])


@built
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_sorted_as_by_numpy(dtype: npt.DTypeLike) -> None:
    values = np.random.default_rng(0).normal(size=5000).astype(dtype)
    values[:6] = math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0
    assert np.array_equal(sorted_values(values), np.sort(values), equal_nan=True)
    assert np.array_equal(sorted_values(values[::-2]), np.sort(values[::-2]), equal_nan=True)


@built
def test_more_places_than_the_kernel_has_room_for_are_refused(unloaded: None) -> None:
    library, values = kernel.load(), torch.zeros(100)
    assert library is not None
    with pytest.raises(ValueError, match=exactly("there are 100 places; at most 65 can be looked up")):
        library.sort(values.data_ptr(), 100, torch.float32, np.arange(100))
