"""The plans of a session: all that were published, undo and redo, and the step from which each rank uses them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from graftlab.errors import SessionError
from graftlab.plan.changes import PlanChange
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import PlanAdopted, PlanUpdate, pack

Action = Literal["undo", "redo"]


class Plans:
    """All published plans, oldest first. Never empty after the first :meth:`publish`."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._published: list[GraftPlan] = []
        # A rank uses the plan that it receives last, so no other plan may be sent between reading the newest and
        # sending it.
        self._sending = threading.Lock()
        self._adopted: dict[int, dict[str, int]] = {}
        # Versions that a verdict, a match or a comparison published for its runs, or to restore the plan before them.
        self._temporary: set[int] = set()
        self._done: list[PlanChange] = []
        self._undone: list[PlanChange] = []

    @property
    def newest(self) -> GraftPlan:
        return self._published[-1]

    def all(self) -> list[GraftPlan]:
        return list(self._published)

    def lasting(self) -> list[GraftPlan]:
        """All plans except those that a verdict, a match or a comparison published for its runs; never empty."""
        return [plan for plan in self._published if plan.version not in self._temporary]

    @property
    def is_lent(self) -> bool:
        """Whether the plan in force is that of a verdict, a match or a comparison, and another is to be restored."""
        return bool(PlanChange(self.lasting()[-1], self.newest).parts)

    def publish(self, plan: GraftPlan) -> None:
        """Make this the newest plan, and send it to every live rank."""
        with self._sending:
            self._published.append(plan)
            self._send()

    def publish_temporary(self, plan: GraftPlan) -> None:
        """Publish a plan for runs of a verdict, a match or a comparison, or one that restores the plan before them."""
        self._temporary.add(plan.version)
        self.publish(plan)

    def publish_as(self, version: int) -> None:
        """Publish the newest plan again, as this version. That of a verdict stays temporary."""
        is_temporary = self.newest.version in self._temporary
        (self.publish_temporary if is_temporary else self.publish)(replace(self.newest, version=version))

    def restore(self, *, as_new: bool = False) -> None:
        """Put the plan from before temporary ones in force again. A plan that the user has published since stays.

        ``as_new`` gives it a new version even if the temporary one is equal: orders of jobs end with their version.
        """
        if self.is_lent or (as_new and self.newest.version in self._temporary):
            self.publish_temporary(replace(self.lasting()[-1], version=self.newest.version + 1))

    def publish_edit(self, plan: GraftPlan) -> None:
        """Publish a plan that a person has edited; :meth:`revert` undoes it."""
        change = PlanChange(self.lasting()[-1], plan)
        self.publish(plan)
        if change.parts:
            self._done.append(change)
            self._undone.clear()

    def last(self, action: Action) -> PlanChange | None:
        """The edit that an undo or a redo applies to; None without one."""
        changes = self._done if action == "undo" else self._undone
        return changes[-1] if changes else None

    def wanted(self, action: Action) -> GraftPlan:
        """The plan that an undo or a redo restores.

        Raises :class:`SessionError` without such an edit, and while a verdict or a match has its own plan in force.
        """
        change = self.last(action)
        if change is None:
            raise SessionError(f"session.{action}: there is no edit of the plan to {action}")
        if self.is_lent:
            raise SessionError(
                f"session.{action}: the plan in force is that of a verdict, a match or a comparison, which restores "
                "yours at its end. Stop it, or wait"
            )
        return change.before if action == "undo" else change.plan

    def revert(self, action: Action, plan: GraftPlan) -> PlanChange:
        """Publish the plan that :meth:`wanted` returned, as a new version. Returns what it changes."""
        made = PlanChange(self.newest, plan)
        self.publish(plan)
        source, other = (self._done, self._undone) if action == "undo" else (self._undone, self._done)
        other.append(source.pop())
        return made

    def publish_again(self) -> None:
        """Send the newest plan to ranks that have just begun, and forget which plans earlier ranks used."""
        with self._sending:
            self._adopted.clear()
            self._send()

    def _send(self) -> None:
        for rank in self._ranks:
            if rank.alive:
                self._send_newest(rank)

    def send_to(self, rank: RankHandle) -> None:
        """Send the newest plan to one rank."""
        with self._sending:
            self._send_newest(rank)

    def _send_newest(self, rank: RankHandle) -> None:
        rank.channel.send(pack(PlanUpdate(to_wire(self.newest))))

    def note_adopted(self, message: PlanAdopted, rank: RankHandle) -> None:
        self._adopted.setdefault(message.version, {})[rank.label] = message.step

    def adopted(self, version: int) -> dict[str, int]:
        """The step from which each rank uses this plan, by rank; ranks that do not use it yet are left out."""
        return dict(self._adopted.get(version, {}))
