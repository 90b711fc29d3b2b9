"""Displays of a rank: figures, frames and other rich values, sent in the forms that a notebook shows.

A rank has no IPython shell. So ``display`` becomes a builtin, as in a notebook, which also replaces IPython's function,
and pyplot gets graftlab's backend (:mod:`graftlab.ranks.matplotlib_backend`).
"""

from __future__ import annotations

import base64
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Bundle = dict[str, str]
Send = Callable[[Bundle], None]

# IPython's protocol: the method that renders a value, and the MIME type of its result.
_METHODS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_latex_": "text/latex",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
}
_LARGEST = 4 << 20
# Displays shown per second: more than a reader can follow.
_A_SECOND = 20

BACKEND = "module://graftlab.ranks.matplotlib_backend"
# Backends that notebooks set, and that show figures nowhere else.
_OF_NOTEBOOKS = ("module://matplotlib_inline", "inline", "module://ipympl", "widget", "ipympl", "nbagg", "notebook")


class Displays:
    """Sends displayed values, within a budget."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._second, self._count = 0, 0

    def __call__(self, *values: Any, **options: Any) -> None:
        """Do what IPython's ``display`` does, with ``raw`` as the only option."""
        for value in values:
            self.publish(value if options.get("raw") and isinstance(value, dict) else bundle_of(value))

    def publish(self, data: dict[str, Any], *_: Any, **__: Any) -> None:
        """Do what IPython's ``publish_display_data`` does."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._count > _A_SECOND:
            if self._count == _A_SECOND + 1:
                self._send({"text/plain": f"[more than {_A_SECOND} displays per second; the others are left out]"})
            return
        made = {kind: _as_text(value) for kind, value in data.items() if isinstance(value, (str, bytes))}
        size = sum(map(len, made.values()))
        if size > _LARGEST:
            what = made.get("text/plain", "a value")[:200]
            made = {"text/plain": f"{what}\n[its display has {size >> 20} MiB, too much to send to the notebook]"}
        self._send(made or {"text/plain": "[displayed in no form that a notebook can show]"})


def bundle_of(value: Any) -> dict[str, Any]:
    """Render a value, by MIME type."""
    made: dict[str, Any] = {"text/plain": _repr(value)}
    figure = _png_of_figure(value)
    if figure is not None:
        return made | {"image/png": figure}
    if isinstance(value, type):
        return made
    bundle = _call_method(value, "_repr_mimebundle_")
    if isinstance(bundle, tuple):
        bundle = bundle[0]
    if isinstance(bundle, dict):
        made |= bundle
    for method, kind in _METHODS.items():
        shown = None if kind in made else _call_method(value, method)
        if isinstance(shown, tuple):
            shown = shown[0]
        if shown is not None:
            made[kind] = shown
    return made


def _call_method(value: Any, method: str) -> Any:
    try:
        ask = getattr(value, method, None)
        return ask() if callable(ask) else None
    except Exception:
        # As in IPython: other forms may succeed, and the plain text always does.
        return None


def _repr(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__qualname__}, whose repr raises {type(error).__name__}: {error}>"


def _png_of_figure(value: Any) -> bytes | None:
    figures = sys.modules.get("matplotlib.figure")
    if figures is None or not isinstance(value, figures.Figure):
        return None
    out = io.BytesIO()
    value.savefig(out, format="png", bbox_inches="tight")
    return out.getvalue()


def _as_text(value: str | bytes) -> str:
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


# ---- installation ---------------------------------------------------------------------------------------------------

_displays: Displays | None = None


def displays() -> Displays | None:
    """Return the displays of this process; None if it is not a rank."""
    return _displays


def show_displays(send: Send) -> None:
    """Send what this process displays from now on."""
    global _displays
    _displays = Displays(send)
    builtins.display = _displays  # type: ignore[attr-defined]
    backend = os.environ.get("MPLBACKEND", "")
    if not backend or backend.startswith(_OF_NOTEBOOKS):
        os.environ["MPLBACKEND"] = BACKEND
    patch = _ImportPatch({"IPython.core.display_functions": _patch_ipython, "tqdm.notebook": _patch_tqdm})
    sys.meta_path.insert(0, patch)
    for name, apply in patch.after.items():
        if name in sys.modules:
            apply(sys.modules[name])


def _patch_ipython(module: ModuleType) -> None:
    module.display = _displays  # type: ignore[attr-defined]
    assert _displays is not None
    module.publish_display_data = _displays.publish  # type: ignore[attr-defined]


def _patch_tqdm(module: ModuleType) -> None:
    """Replace tqdm's widgets, which need a kernel, by its text bars, which the notebook shows live."""
    from tqdm.std import tqdm, trange

    module.tqdm = module.tqdm_notebook = tqdm  # type: ignore[attr-defined]
    module.trange = module.tnrange = trange  # type: ignore[attr-defined]


class _ImportPatch(importlib.abc.MetaPathFinder):
    """Patches modules right after their import, so that code that never imports them pays nothing."""

    def __init__(self, after: dict[str, Callable[[ModuleType], None]]) -> None:
        self.after = after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.after:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader, self.after[name])
        return spec


class _PatchingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any, after: Callable[[ModuleType], None]) -> None:
        self._loader, self._after = loader, after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._after(module)
