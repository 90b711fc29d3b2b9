"""A second device of torch, ``"second"``, for the code that runs where a model's tensors are not on the CPU.

``second_device.cpp`` is compiled once, into the folder ``build``. A process keeps the device once it has called
:func:`load`, so only ranks and scripts do: torch takes it for the machine's accelerator.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import types
from functools import cache
from pathlib import Path

import torch

_SOURCE = Path(__file__).with_name("second_device.cpp")
_BUILT = Path(__file__).resolve().parents[2] / "build" / "second_device"
_NAME = "second"


def compiler() -> str | None:
    """The C++ compiler's path, if there is one."""
    return shutil.which(os.environ.get("CXX", "c++"))


def build() -> Path:
    """Compile the device, unless that has been done; processes that ask at the same time wait for each other."""
    digest = hashlib.blake2b(_SOURCE.read_bytes() + torch.__version__.encode(), digest_size=8).hexdigest()
    library = _BUILT / f"{digest}.so"
    _BUILT.mkdir(parents=True, exist_ok=True)
    with (_BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    found = compiler()
    assert found is not None, "a C++ compiler is needed"
    of_torch = Path(torch.__file__).parent
    headers = (of_torch / "include", of_torch / "include/torch/csrc/api/include")
    libraries = of_torch / "lib"
    part = library.with_suffix(".part")
    command = [found, "-std=c++20", "-O0", "-w", "-fPIC", "-shared", *(f"-isystem{each}" for each in headers)]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(_SOURCE), "-o", str(part)]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    part.rename(library)


@cache
def load() -> str:
    """Give this process the device; returns its name."""
    torch.utils.rename_privateuse1_backend(_NAME)
    torch.ops.load_library(str(build()))
    torch._register_device_module(_NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend()
    return _NAME


def _module() -> types.ModuleType:
    """What torch calls for the device's random numbers and autocast; it draws the CPU's random numbers."""
    module = types.ModuleType(f"torch.{_NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda device=None: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=0: torch.get_rng_state(),
        "set_rng_state": lambda state, device=0: torch.set_rng_state(state),
        "device": lambda device: contextlib.nullcontext(),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(functions)
    return module
