"""The end of a warm script: takes down what the script has imported, and not all of torch, which takes a second.

Imported before what it spares, since the function that atexit gets first is the last that it calls.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import sys

_spared: set[str] = set()


def spare_what_was_imported() -> None:
    """Leave all modules of now, and the libraries that are loaded by now, as they are when this process ends."""
    if "coverage" in sys.modules:
        return  # which saves its data later still
    if "triton" in sys.modules:
        # Triton's bindings, which torch 2.15 has on the CPU too, report what the last collection of a process leaves.
        atexit.register(gc.unfreeze)
        return
    _spared.update({*sys.modules} - {*sys.builtin_module_names, "__main__"})
    # Python then ends by exit() of C, which calls these before the destructors of all libraries that are loaded by now.
    # Both take the status first: flush, and leave with it.
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.on_exit(libc.fcloseall, None)


@atexit.register
def _hide() -> None:
    for name in _spared & {*sys.modules}:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules[name]))
        # As Python itself does, for what the last finalizers import.
        sys.modules[name] = None  # type: ignore[assignment]
