"""The plan on which jobs without a notebook agree."""

from __future__ import annotations

from dataclasses import replace

from graftlab.base.world import Side
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.transforms import TransformSpec


class AgreedPlan:
    """The plan of jobs without a notebook, which all of them bring. Only its transform may differ, by side.

    A transform belongs to the receiving side. If only one side brings one, it is the plan's.
    """

    def __init__(self, first: GraftPlan) -> None:
        self._first = first
        self._transforms: dict[Side, tuple[TransformSpec, ...]] = {}

    def objection(self, side: Side, plan: GraftPlan) -> str:
        """Describe how a job's plan differs from those of the jobs before it; ``""`` if it may join."""
        for name in FILTERS:
            here, there = getattr(self._first, name), getattr(plan, name)
            if here != there:
                field = f"{name}_filter"
                return (
                    f"{field} (GRAFTLAB_{field.upper()}) is {there!r} here, but {here!r} in the job that joined first; "
                    f"both sides need the same"
                )
        brought = self._transforms.get(side, plan.transforms)
        if brought != plan.transforms:
            here, there = (" and ".join(spec.label for spec in specs) or None for specs in (brought, plan.transforms))
            return (
                f"transform_path (GRAFTLAB_TRANSFORM_PATH) is {there!r} here, but {here!r} in the {side} process that "
                f"joined first; the ranks of a side need the same"
            )
        return ""

    def enter(self, side: Side, plan: GraftPlan) -> GraftPlan:
        """Note the transform of a job that joins, and return the plan of all jobs so far."""
        self._transforms[side] = plan.transforms
        of_baseline, of_target = (self._transforms.get(each, ()) for each in ("baseline", "target"))
        if not of_baseline or not of_target or of_baseline == of_target:
            return replace(self._first, transform=of_target or of_baseline or None)
        each_own = [
            replace(spec, where=f"side == {receiver!r} and (\n{filter_}\n)")
            for receiver, filter_, specs in (
                ("target", self._first.b2t, of_target),
                ("baseline", self._first.t2b, of_baseline),
            )
            if filter_ is not None and filter_.strip()
            for spec in specs
        ]
        return replace(self._first, transform=tuple(each_own) or None)
