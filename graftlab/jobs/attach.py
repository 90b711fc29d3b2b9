"""``attach``, and joining automatically at the first tap."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from typing import Any

from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, GraftError, LayoutError, SessionError, warn
from graftlab.grafting import active
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.layouts import give_mesh
from graftlab.taps import calls

_joining = threading.Lock()


def attach(config: GraftConfig | None = None, *, mesh: Any = None) -> bool:
    """Join the graft world that the config (by default the environment) names; return whether this process has joined.

    Waits until every rank of both sides has joined, at most ``timeout`` seconds. If some have not, or joining fails
    otherwise, one :class:`GraftWarning` gives the reason and the job continues without graftlab: its taps do nothing.
    Call it on every rank of the job, after its process group is set up if it has one. Everything that the job does from
    now on belongs to one run of the session, until the process ends.

    Raises :class:`ConfigError` for settings that are invalid, or do not fit the job or the other side, and
    :class:`SessionError` in a process that is a rank already.

    >>> gl.attach(gl.GraftConfig(role="target", run_dir="/tmp/r", baseline_world_size=1, target_world_size=2))
    Traceback (most recent call last):
    graftlab.errors.ConfigError: target_world_size (GRAFTLAB_TARGET_WORLD_SIZE) is 2, and this job has 1 process...
    """
    with _joining:
        if active.grafter() is not None:
            raise SessionError("this process is a rank already; gl.here() shows which")
        forget_first_tap()
        config = GraftConfig.from_env() if config is None else config
        try:
            give_mesh(config.mesh if mesh is None else mesh)
        except LayoutError as error:
            raise ConfigError(f"mesh: {error}") from error
        try:
            AttachedRank(config).begin()
        except ConfigError:
            raise
        except (GraftError, OSError, EOFError) as error:
            warn(f"graftlab could not join, and the job continues without it: {error}")
            return False
        return True


class FirstTapJoiner(active.FirstTap):
    """Joins at the first tap or step of a job that the environment asks to join."""

    def begin(self) -> calls.RankTapHandler | None:
        import torch

        # A data loader's worker is not a rank.
        if torch.utils.data.get_worker_info() is not None:
            forget_first_tap()
            return None
        try:
            if active.grafter() is None:
                attach()
        except SessionError:
            # Another thread has joined already.
            if active.grafter() is None:
                raise
        return active.grafter()


def arm() -> None:
    """Arrange to join at this process's first tap or step, and to warn if it ends before one."""
    active.install_handler(FirstTapJoiner(), None)
    atexit.register(_warn_at_exit, os.getpid())


def is_armed() -> bool:
    """Whether this process will join automatically."""
    return isinstance(calls.grafter(), FirstTapJoiner)


def forget_first_tap() -> None:
    """Stop joining automatically."""
    if is_armed():
        calls.deactivate()


def warn_never_joined(what: str) -> None:
    """Warn that ``what`` has ended without joining, if it was to join automatically."""
    if is_armed():
        forget_first_tap()
        warn(
            f"{what} ended before it reached a tap or gl.step(), so it never joined, and other ranks may have waited "
            f"for it. Put gl.tap or gl.watch into its code, or set GRAFTLAB_WATCH=True, which taps the modules of the "
            f"first model that it calls"
        )


def _warn_at_exit(process: int) -> None:
    # A data loader's worker inherits the environment too, and is not a rank.
    if os.getpid() == process and multiprocessing.parent_process() is None:
        warn_never_joined(os.path.basename(sys.argv[0]) or "this process")


def _renew_lock() -> None:
    """Give a forked child a lock that no thread of its parent holds."""
    global _joining
    _joining = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
