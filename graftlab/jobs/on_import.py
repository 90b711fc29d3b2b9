"""What an import of graftlab does in a job that the environment asks to join."""

from __future__ import annotations

from graftlab.config import GraftConfig, enabled
from graftlab.errors import ConfigError
from graftlab.jobs.attach import arm, is_armed
from graftlab.jobs.watching import watch_first_model
from graftlab.recordings.by_environment import record_by_environment


def prepare() -> None:
    """Join, or record, from the first tap or step on.

    Raises :class:`ConfigError` for what the environment says, where it is wrong.
    """
    if is_armed():
        return
    joins, records = enabled(), record_by_environment()
    if joins and records:
        raise ConfigError(
            "GRAFTLAB_RECORD and GRAFTLAB_ENABLE are both set; a job that joins records with gl.attach(), and then "
            "`with gl.record(folder):`"
        )
    if joins or records:
        config = GraftConfig.from_env()
        if joins:
            arm()
        if config.watch is not None:
            watch_first_model(config.watch)
