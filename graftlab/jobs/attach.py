"""``attach``, and joining by itself at the first tap."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from typing import Any

from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, GraftError, SessionError, warn
from graftlab.grafting import active
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.taps import calls

_joining = threading.Lock()
_member: AttachedRank | None = None


def attach(config: GraftConfig | None = None) -> bool:
    """Join the graft world that the config (default: the environment) names; returns whether this process is in it.

    Waits until every rank of both sides has joined, at most ``timeout`` seconds. Where they have not, or joining fails
    in another way, one :class:`GraftWarning` says so and the job goes on without graftlab: its taps do nothing.
    Call it on every rank of the job, after its process group is set up where it has one. What the job does from now on
    is one run of the session; its part ends with the process.

    Raises :class:`ConfigError` for settings that cannot be used or do not fit the job, or the other side, and
    :class:`SessionError` in a process that is a rank already.

    >>> gl.attach(gl.GraftConfig(role="target", run_dir="/tmp/r", baseline_world_size=1, target_world_size=2))
    Traceback (most recent call last):
    graftlab.errors.ConfigError: target_world_size (GRAFTLAB_TARGET_WORLD_SIZE) is 2, and this job has 1 process...
    """
    global _member
    with _joining:
        if active.grafter() is not None:
            raise SessionError("this process is a rank already; gl.here() says which")
        forget_first_tap()
        config = GraftConfig.from_env() if config is None else config
        try:
            member = AttachedRank(config)
            member.begin()
        except ConfigError:
            raise
        except (GraftError, OSError, EOFError) as error:
            warn(f"graftlab could not join, and the job goes on without it: {error}")
            return False
        _member = member
        return True


class FirstTap:
    """In place of a grafter until the first tap or step of a job that the environment asks to join."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        handler = _join_by_itself()
        return value if handler is None else handler.tap(name, value, extras, tags, replace)

    @property
    def moment(self) -> object:
        return object()

    def step(self) -> None:
        handler = _join_by_itself()
        if handler is not None:
            handler.step()


def arm() -> None:
    """Join at the first tap or step of this process; one that ends before that says so."""
    active.install_handler(FirstTap(), None)
    atexit.register(_tell_at_exit, os.getpid())


def is_armed() -> bool:
    """Whether this process will join by itself."""
    return isinstance(calls.grafter(), FirstTap)


def forget_first_tap() -> None:
    """Join by itself no more."""
    if is_armed():
        calls.deactivate()


def tell_never_joined(what: str) -> None:
    """Warn where ``what`` is over, and was to join by itself and has not."""
    if is_armed():
        forget_first_tap()
        warn(
            f"{what} ended before it came to a tap or gl.step(), so it never joined, and others may have waited for "
            f"it. Put gl.tap or gl.watch into its code, or set GRAFTLAB_WATCH=True, which taps the modules of the "
            f"first model that it calls"
        )


def _tell_at_exit(process: int) -> None:
    # A worker of a data loader, say, has the environment too, and nothing to join for.
    if os.getpid() == process and multiprocessing.parent_process() is None:
        tell_never_joined(os.path.basename(sys.argv[0]) or "this process")


def _join_by_itself() -> calls.RankTapHandler | None:
    import torch

    # A data loader's worker is no rank, whatever it taps.
    if torch.utils.data.get_worker_info() is not None:
        forget_first_tap()
        return None
    try:
        if active.grafter() is None:
            attach()
    except SessionError:
        # Another thread was quicker.
        if active.grafter() is None:
            raise
    return active.grafter()


def _forget_member() -> None:
    """In a forked child, which is no rank."""
    global _member, _joining
    _joining = threading.Lock()
    _member = None


os.register_at_fork(after_in_child=_forget_member)
