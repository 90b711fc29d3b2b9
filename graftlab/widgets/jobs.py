"""What the transform editor has been asked to try and to apply, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from graftlab.widgets.drafts import Draft
from graftlab.widgets.kept_taps import TapOption


@dataclass(frozen=True)
class Job:
    """A draft, to be ``tried`` on the tensors of ``tap`` if any are kept, then ``published`` or not."""

    draft: Draft
    tap: TapOption | None = None
    tried: bool = True
    published: bool = False

    @property
    def label(self) -> str:
        on = f" on {self.tap.label}" if self.tried and self.tap is not None and self.tap.kept else ""
        return f"{'applying' if self.published else 'trying'}{on} …"


class Jobs:
    """The job that is worked on, and those that wait. Not for several threads at once."""

    def __init__(self) -> None:
        self.current: Job | None = None
        self._waiting: list[Job] = []

    def add(self, job: Job) -> None:
        # Of the tries that wait only the newest is of interest, and none when an Apply follows, which tries too.
        self._waiting = [*(waiting for waiting in self._waiting if waiting.published), job]

    def begin_next(self) -> Job | None:
        """The job to work on now, which is the current one until :meth:`end`; None when there is none left."""
        self.current = self._waiting.pop(0) if self._waiting else None
        return self.current

    def end(self) -> None:
        self.current = None

    def clear(self) -> None:
        """Forget those that wait."""
        self._waiting.clear()

    @property
    def open(self) -> list[Job]:
        """All that are not done, in their order."""
        return [*([] if self.current is None else [self.current]), *self._waiting]
