"""graftlab: find where two implementations of one PyTorch model diverge, and whether that place is the cause.

What model code needs (``tap``, ``tags``, ``step``, ``watch``, ``here``) is here at once; what notebooks need is
imported when it is first used, so that taps can stay in code that ships.

Public are the names in ``__all__``, those of ``graftlab.plots``, ``.transforms``, ``.requests``, ``.engine``,
``.graphs`` and ``.models``, the magics, and the commands; docs/api has them all. Every other module is internal.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from graftlab.base.uninterrupted import import_module
from graftlab.errors import (
    ConfigError,
    DependencyError,
    DumpError,
    FilterError,
    GraftError,
    GraftOverlapError,
    GraftWarning,
    GraphError,
    LaunchError,
    LayoutError,
    MatchError,
    PlanError,
    RecordingError,
    RequestError,
    RunError,
    SessionBusyError,
    SessionClosedError,
    SessionError,
    ShippingError,
    TagError,
    TransformError,
)
from graftlab.taps.calls import Here, here, step, tags, tap

if TYPE_CHECKING:
    from graftlab import plots, transforms
    from graftlab.comparison.functions import compare
    from graftlab.config import GraftConfig
    from graftlab.control.past_runs import runs
    from graftlab.control.run import Run
    from graftlab.jobs.attach import attach
    from graftlab.launching import launch
    from graftlab.loaded_run import load_run
    from graftlab.matching.weights import make_converter, match_weights
    from graftlab.plan.plan import GraftPlan
    from graftlab.recordings.recorder import record
    from graftlab.recordings.recording import Recording
    from graftlab.remote.ray_cluster import Ray
    from graftlab.session import Session, listen
    from graftlab.taps.compiled import compile_taps
    from graftlab.taps.exported import export_taps, strip
    from graftlab.taps.training import watch_training
    from graftlab.taps.watch import Watch, watch
    from graftlab.transforms import GraftTransformInput

try:
    __version__ = version(__name__)
except PackageNotFoundError:
    # A source tree on the path, without an installation.
    __version__ = "0+unknown"

_LAZY = {
    "Ray": "graftlab.remote.ray_cluster",
    "Recording": "graftlab.recordings.recording",
    "record": "graftlab.recordings.recorder",
    "attach": "graftlab.jobs.attach",
    "GraftConfig": "graftlab.config",
    "GraftPlan": "graftlab.plan.plan",
    "GraftTransformInput": "graftlab.transforms",
    "Run": "graftlab.control.run",
    "Session": "graftlab.session",
    "Watch": "graftlab.taps.watch",
    "compare": "graftlab.comparison.functions",
    "compile_taps": "graftlab.taps.compiled",
    "export_taps": "graftlab.taps.exported",
    "launch": "graftlab.launching",
    "listen": "graftlab.session",
    "load_run": "graftlab.loaded_run",
    "make_converter": "graftlab.matching.weights",
    "match_weights": "graftlab.matching.weights",
    "plots": "graftlab.plots",
    "runs": "graftlab.control.past_runs",
    "strip": "graftlab.taps.exported",
    "transforms": "graftlab.transforms",
    "watch": "graftlab.taps.watch",
    "watch_training": "graftlab.taps.training",
}

__all__ = [
    "ConfigError",
    "DependencyError",
    "DumpError",
    "FilterError",
    "GraftConfig",
    "GraftError",
    "GraftOverlapError",
    "GraftPlan",
    "GraftTransformInput",
    "GraftWarning",
    "GraphError",
    "Here",
    "LaunchError",
    "LayoutError",
    "MatchError",
    "PlanError",
    "Ray",
    "Recording",
    "RecordingError",
    "RequestError",
    "Run",
    "RunError",
    "Session",
    "SessionBusyError",
    "SessionClosedError",
    "SessionError",
    "ShippingError",
    "TagError",
    "TransformError",
    "Watch",
    "attach",
    "compare",
    "compile_taps",
    "export_taps",
    "here",
    "launch",
    "listen",
    "load_ipython_extension",
    "load_run",
    "make_converter",
    "match_weights",
    "plots",
    "record",
    "runs",
    "step",
    "strip",
    "tags",
    "tap",
    "transforms",
    "watch",
    "watch_training",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'graftlab' has no attribute {name!r}")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        _explain_missing_torch(f"graftlab.{name}", error)
        raise
    # Some are modules themselves, the others are found in one.
    value = found if module == f"{__name__}.{name}" else getattr(found, name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext graftlab``: registers the magics."""
    try:
        magics = import_module("graftlab.magics.magics")
    except ModuleNotFoundError as error:
        _explain_missing_torch("%load_ext graftlab", error)
        raise
    magics.load(shell)


def _explain_missing_torch(what: str, error: ModuleNotFoundError) -> None:
    if error.name == "torch":
        raise DependencyError(f"{what} needs torch, which is not installed; `pip install torch` installs it") from error


def _follow_environment() -> None:
    """Where the environment asks for it, join a graft world, or record, from this process's first tap on."""
    if any(os.environ.get(name) for name in ("GRAFTLAB_ENABLE", "DUMPER_GRAFTER_ENABLE", "GRAFTLAB_RECORD")):
        from graftlab.jobs.on_import import prepare

        prepare()
    if os.environ.get("GRAFTLAB_COMPAT"):
        from graftlab.compat.imports import replace_imports

        replace_imports()


_follow_environment()
