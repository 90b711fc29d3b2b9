"""What an import of graftlab does in a job that the environment asks to join."""

from __future__ import annotations

from graftlab.config import GraftConfig, enabled
from graftlab.jobs.joining import arm, is_armed
from graftlab.jobs.watching import watch_first_model


def prepare() -> None:
    """Join at the first tap or step. Raises :class:`ConfigError` for what the environment says, where it is wrong."""
    if enabled() and not is_armed():
        config = GraftConfig.from_env()
        arm()
        if config.watch is not None:
            watch_first_model(config.watch)
